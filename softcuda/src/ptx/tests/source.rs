//! Faults in the source are reported with their place.

use super::{Device, kernel, load};
use crate::ptx::{DiagnosticKind, Module, link};
use proptest::prelude::*;

/// The fault in a kernel whose only interesting line is the given one: its kind and column.
fn fault(line: &str) -> (DiagnosticKind, u32, String) {
    let declared = ".reg .b32 %r<4>; .reg .b64 %rd<4>; .reg .pred %p<4>; .reg .f32 %f<4>;";
    let source = kernel(&format!("{declared}\n{line}"));
    let fault = Module::load(&source).expect_err(line);
    assert_eq!(fault.line, 8, "{fault}: {line}");
    (fault.kind, fault.column, fault.message)
}

#[test]
fn faults_name_their_line_and_column() {
    use DiagnosticKind::{Redefined, Syntax, Type, Undefined};
    let cases = [
        ("add.s32 %r1, %r2 %r3;", Syntax, 18),
        ("add.s32 %r1, %r2, #;", Syntax, 19),
        ("add.s32 %r1, %r2;", Type, 1),
        ("add.s32 %r1, %r2, %rd1;", Type, 1),
        ("add.s32 %p1, %r2, %r3;", Type, 1),
        ("  mov.u32 %r1, missing;", Undefined, 3),
        ("mov.u32 %r1, %r9;", Undefined, 1),
        ("bra nowhere;", Undefined, 1),
        ("@%p9 bra nowhere;", Undefined, 2),
        ("a: ret; a: ret;", Redefined, 12),
        ("ld.global.u32 %r1, [missing];", Undefined, 1),
        ("ld.global.v2.u32 {%r1}, [%rd1];", Type, 1),
        ("mov.u32 %r1, 0f123;", Syntax, 14),
        ("mov.u32 %r1, 99999999999999999999999;", Syntax, 14),
    ];
    for (line, kind, column) in cases {
        let (found, at, message) = fault(line);
        assert_eq!((&found, at), (&kind, column), "{line}: {message}");
    }
}

#[test]
fn missing_instructions_are_named() {
    for name in ["frobnicate.b32", "wgmma.fence.sync", "add.weird.s32", "tcgen05.alloc"] {
        let (kind, column, message) = fault(&format!("{name} %r1, %r2, %r3;"));
        let DiagnosticKind::Unsupported(found) = kind else { panic!("{name}: {message}") };
        assert_eq!((found.as_str(), column), (name, 1));
        assert!(message.contains(name), "{message}");
    }
}

#[test]
fn modules_for_other_machines_are_refused() {
    for header in [
        ".version 9.0\n.target gfx90a\n",
        ".version 12.0\n.target sm_80\n",
        ".version 0.9\n.target sm_10\n",
    ] {
        let fault = Module::load(header).unwrap_err();
        assert_eq!(fault.kind, DiagnosticKind::UnsupportedTarget, "{fault}");
    }
    assert_eq!(Module::load("").unwrap_err().kind, DiagnosticKind::Syntax);
    let fault = Module::load(".version 9.0\n.target sm_80\n.extern .global .u32 x;").unwrap_err();
    assert_eq!(fault.kind, DiagnosticKind::Undefined, "{fault}");
}

/// PTX of the first compilers: no size of addresses, no rounding, and registers of 16 bits take the special ones.
#[test]
fn the_first_versions_of_ptx_are_read() {
    let source = ".version 1.4\n.target sm_10, map_f64_to_f32\n\
        .entry k(.param .u64 out, .param .f32 x)\n{\n\
        .reg .u32 %r<4>;\n.reg .u64 %rd<4>;\n.reg .f32 %f<4>;\n\
        $begin:\ncvt.s32.u16 %r1, %tid.x;\nmul24.lo.s32 %r2, %r1, 4;\ncvt.s64.s32 %rd1, %r2;\n\
        ld.param.u64 %rd2, [out];\nadd.u64 %rd3, %rd2, %rd1;\nld.param.f32 %f1, [x];\n\
        mad.f32 %f2, %f1, %f1, %f1;\nst.global.f32 [%rd3+0], %f2;\nexit;\n}\n";
    let module = load(source);
    let mut device = Device::default();
    let out = device.alloc(8);
    device.launch(&module, &[], "k", (1, 2, 0), &[out, u64::from(3.0_f32.to_bits())]).unwrap();
    assert_eq!(device.download_f32(out, 2), [12.0, 12.0]);
}

#[test]
fn parameters_are_laid_out_by_their_alignment() {
    let source = ".version 8.0\n.target sm_75\n.address_size 64\n\
        .entry k(.param .u8 a, .param .align 8 .b8 s[12], .param .u16 b, .param .u64 c)\n\
        .maxntid 128, 2, 1\n{ ret; }";
    let module = Module::load(source).unwrap();
    let entry = module.entry("k").unwrap();
    let places: Vec<_> = entry.params.iter().map(|p| (p.offset, p.size)).collect();
    assert_eq!(places, [(0, 1), (8, 12), (20, 2), (24, 8)]);
    assert_eq!((entry.param_bytes, entry.max_threads), (32, Some([128, 2, 1])));
    assert_eq!((module.version, module.target.as_str()), ((8, 0), "sm_75"));
}

#[test]
fn initial_values_hold_numbers_and_addresses() {
    let source = ".version 8.0\n.target sm_75\n.address_size 64\n\
        .global .align 4 .u32 a[2][2] = {{1, 2}, {3, -1}};\n\
        .global .align 8 .u64 p[2] = {generic(a)+4, a};\n\
        .const .f32 f = 0f3F800000;\n\
        .global .align 8 .b8 m[9] = {1, 0xFF(a), 0xFF00(a), 0xFF0000(a), 0xFF000000(a), \
        0xFF00000000(a), 0xFF0000000000(a), 0xFF000000000000(a), 0xFF00000000000000(a)};\n\
        .global .b8 z[100];";
    let module = Module::load(source).unwrap();
    let [a, p, f, m, z] = &module.globals[..] else { panic!("five variables") };
    assert_eq!(a.init, [1, 0, 0, 0, 2, 0, 0, 0, 3, 0, 0, 0, 255, 255, 255, 255]);
    let places: Vec<_> = p.relocations.iter().map(|r| (r.offset, r.addend)).collect();
    assert_eq!(places, [(0, 4), (8, 0)]);
    assert_eq!((f.constant, f.init.as_slice()), (true, &1f32.to_le_bytes()[..]));
    assert_eq!((m.init.len(), m.relocations[0].offset, m.relocations.len()), (9, 1, 1));
    assert_eq!((z.size, z.init.len()), (100, 0));
}

/// Pieces of PTX, so that random text gets past the first token.
const PIECES: &[&str] = &[
    ".version 9.0\n.target sm_80\n",
    ".visible .entry k(",
    ".param .u64 a",
    ")",
    "{",
    "}",
    ";",
    ".reg .b32 %r<9>;",
    ".reg .pred %p;",
    "add.s32",
    "%r1",
    "%r2,",
    ",",
    "bra",
    "L:",
    "L",
    "@%p",
    ".shared .b8 s[4];",
    "ld.param.u64",
    "[a]",
    "[%r1+4]",
    "ret;",
    "0f3F800000",
    "-1",
    "(",
    ":",
    "call",
    "mov.b64",
    "{%r1, %r2}",
    "0x",
    ".global .u32 g = {",
    "generic(g)",
    "\"",
    "/*",
    "%tid.x",
    "setp.lt.f32",
    "%p|%p",
    "!%p",
    "brx.idx",
    ".branchtargets",
    "cvt.rn.f32.s32",
    "atom.add.u32",
    ".func f",
    ".local .align 4 .b8 d[8];",
    "st.local.v2.u32",
    "bar.sync 0;",
    "%r<99999999999>",
];

proptest! {
    #[test]
    fn random_text_never_panics(text in ".{0,200}") {
        let _ = Module::load(&text);
    }

    #[test]
    fn damaged_modules_never_panic(at in 0.0..1.0f64, length in 0usize..40, into in 0.0..1.0f64) {
        let source = include_str!("../testdata/mixture.ptx");
        let place = |fraction: f64| (fraction * (source.len() - 1) as f64) as usize;
        let (start, end) = (place(at), (place(at) + length).min(source.len()));
        let cut = format!("{}{}", &source[..start], &source[end..]);
        let _ = Module::load(&cut);
        let target = place(into).min(cut.len());
        let moved = format!("{}{}{}", &cut[..target], &source[start..end], &cut[target..]);
        let _ = Module::load(&moved);
        let _ = link(&[&cut, &moved], None);
    }

    #[test]
    fn random_pieces_never_panic(picks in prop::collection::vec(0..PIECES.len(), 0..60)) {
        let text: Vec<&str> = picks.into_iter().map(|index| PIECES[index]).collect();
        let _ = Module::load(&text.join(" "));
        let header = ".version 9.0\n.target sm_80\n.entry k(.param .u64 a){ .reg .b32 %r<9>;";
        let _ = Module::load(&format!("{header} .reg .pred %p; {}", text.join(" ")));
        let pieces = text.join(" ");
        let _ = link(&[&pieces, &format!(".version 9.0\n.target sm_80\n{pieces}")], Some(32));
    }
}

#[test]
fn a_version_is_read_without_the_rest() {
    for (text, version) in [
        (".version 9.4", Some((9, 4))),
        ("\n// .version 1.0\n/* .version 2.0\n*/ .version 12.34\n.target nothing", Some((12, 34))),
        (".version\t8.0\n#%", Some((8, 0))),
        ("", None),
        ("// no end", None),
        ("/* no end", None),
        (".target sm_80\n.version 9.0", None),
        (".version 9", None),
        (".version 9.x", None),
        (".version 99999999999.0", None),
    ] {
        assert_eq!(Module::version_of(text), version, "{text:?}");
    }
}
