//! One test for each rule, and the kernels of `tests/workloads`.

use super::*;
use crate::{Direction, Source};

mod any;

/// A kernel with four parameters of 8 bytes, `a` to `d`, loaded into `%a` to `%d`.
fn ptx(body: &str) -> String {
    module("", body)
}

fn module(before: &str, body: &str) -> String {
    format!(
        ".version 8.0\n.target sm_80\n.address_size 64\n{before}\n.visible .entry k(\n\
         .param .u64 a, .param .u64 b, .param .u64 c, .param .u64 d)\n{{\n\
         .reg .pred %p<9>; .reg .b16 %h<9>; .reg .b32 %r<99>; .reg .f32 %f<9>; .reg .b64 %rd<99>;\n\
         .reg .b64 %a, %b, %c, %d;\n\
         ld.param.u64 %a, [a]; ld.param.u64 %b, [b]; ld.param.u64 %c, [c]; ld.param.u64 %d, [d];\n\
         {body}\nret;\n}}\n"
    )
}

/// One letter for each word of the first kernel: `-`, `R`, `W`, `B` (both), `?`; then `i` if it is
/// indirect, and `v` and a letter if it accesses variables.
fn of(text: &str) -> String {
    let kernels = from_ptx(text).unwrap_or_else(|error| panic!("{error}\n{text}"));
    shown(&kernels[0])
}

fn shown(kernel: &Kernel) -> String {
    let letter = |direction: &Direction| match direction {
        Direction::None => '-',
        Direction::Read => 'R',
        Direction::Write => 'W',
        Direction::ReadWrite => 'B',
        Direction::Unknown => '?',
    };
    let words = kernel.params.iter().flat_map(|param| &param.words);
    let mut shown: String = words.map(|word| letter(&word.direction)).collect();
    if kernel.indirect {
        shown.push('i');
    }
    if kernel.variables != Direction::None {
        shown.extend(['v', letter(&kernel.variables)]);
    }
    shown
}

/// Checks bodies against what [`of`] shows.
#[track_caller]
fn check(cases: &[(&str, &str)]) {
    for (body, expected) in cases {
        assert_eq!(of(&ptx(body)), *expected, "{body}");
    }
}

#[test]
fn loads_read_stores_write_and_atomics_do_both() {
    check(&[
        ("", "----"),
        ("ld.global.f32 %f1, [%a];", "R---"),
        ("ld.f32 %f1, [%b+16];", "-R--"),
        ("ldu.global.v4.f32 {%f1, %f2, %f3, %f4}, [%c];", "--R-"),
        ("ld.global.nc.L1::no_allocate.L2::128B.v2.u64 {%rd1, %rd2}, [%d+-8];", "---R"),
        ("ld.acquire.gpu.global.u32 %r1, [%a];", "R---"),
        ("st.global.f32 [%a], %f1;", "W---"),
        ("st.v2.u32 [%b], {%r1, %r2};", "-W--"),
        ("st.global.u64 [%a], 7; ld.global.u64 %rd1, [%a];", "B---"),
        ("atom.global.add.u32 %r1, [%a], 1;", "B---"),
        ("atom.cas.b64 %rd1, [%b], %rd2, %rd3;", "-B--"),
        ("atom.global.add.f32 _, [%a], %f1;", "B---"),
        ("red.global.add.f32 [%c], %f1;", "--B-"),
        (
            "red.async.relaxed.cluster.shared::cluster.mbarrier::complete_tx::bytes.add.u32 [%r1], %r2, [%r3];",
            "----",
        ),
        ("discard.global.L2 [%d], 128;", "---W"),
        ("prefetch.global.L2 [%d];", "----"),
        ("@%p1 st.global.f32 [%a], %f1;", "W---"),
        ("@!%p1 bra $done; ld.global.f32 %f1, [%a]; $done: st.global.f32 [%b], %f1;", "RW--"),
        ("ret; st.global.f32 [%a], %f1;", "W---"),
    ]);
}

/// What is written is not where the address points, and not of this process alone.
#[test]
fn memory_behind_multicast_objects_is_not_derived() {
    check(&[
        ("multimem.ld_reduce.relaxed.sys.global.add.f32 %f1, [%a];", "?---i"),
        ("multimem.ld_reduce.acquire.sys.add.v2.f32 {%f1, %f2}, [%a+16];", "?---i"),
        ("multimem.st.relaxed.sys.global.f32 [%b], %f1;", "-?--i"),
        ("multimem.red.relaxed.sys.global.add.f32 [%c], %f1;", "--?-i"),
        ("multimem.st.u64 [%b], %d;", "-?-?i"),
        // What comes from there may be anything.
        ("multimem.ld_reduce.or.b64 %rd1, [%a]; st.global.u32 [%rd1], 0;", "?---i"),
    ]);
    // Neither is how far it goes, and doing it twice is never the same as doing it once.
    let known = |body: &str| {
        let kernel = from_ptx(&ptx(body)).expect("PTX").remove(0);
        (kernel.closed, kernel.params[0].words[0].reach.is_some())
    };
    assert_eq!(known("st.global.f32 [%a], 0f00000000;"), (true, true));
    for one in ["ld_reduce.add.f32 %f1, [%a];", "st.f32 [%a], %f1;", "red.add.f32 [%a], %f1;"] {
        assert_eq!(known(&format!("multimem.{one}")), (false, false), "{one}");
    }
}

#[test]
fn asynchronous_and_matrix_copies_go_by_their_spaces() {
    check(&[
        ("cp.async.ca.shared.global [%r1], [%a], 16;", "R---"),
        ("cp.async.cg.shared::cta.global.L2::cache_hint [%r1], [%a], 16, %rd1;", "R---"),
        ("cp.async.commit_group; cp.async.wait_group 0; cp.async.wait_all;", "----"),
        ("cp.async.mbarrier.arrive.shared.b64 [%r1];", "----"),
        (
            "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%r1], [%a], %r2, [%r3];",
            "R---",
        ),
        ("cp.async.bulk.global.shared::cta.bulk_group [%b], [%r1], %r2;", "-W--"),
        ("cp.reduce.async.bulk.global.shared::cta.bulk_group.add.f32 [%b], [%r1], %r2;", "-B--"),
        ("cp.async.bulk.prefetch.L2.global [%b], %r2;", "----"),
        // What is copied to shared memory may be pointers.
        (
            "cp.async.ca.shared.global [%r1], [%a], 16; ld.shared.u64 %rd1, [%r1]; st.global.u32 [%rd1], 0;",
            "R---i",
        ),
        ("wmma.load.a.sync.aligned.row.m16n16k16.global.f16 {%r1, %r2}, [%a], %r9;", "R---"),
        ("wmma.load.b.sync.aligned.row.m16n16k16.shared.f16 {%r1, %r2}, [%r8], %r9;", "----"),
        ("wmma.mma.sync.aligned.row.col.m16n16k16.f32.f32 {%f1}, {%r1}, {%r2}, {%f2};", "----"),
        ("wmma.store.d.sync.aligned.row.m16n16k16.global.f32 [%b], {%f1, %f2}, %r9;", "-W--"),
        ("wmma.store.d.sync.aligned.row.m16n16k16.f32 [%b], {%f1, %f2}, %r9;", "-W--"),
        ("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%f1}, {%r1}, {%r2}, {%f2};", "----"),
        ("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%r1, %r2, %r3, %r4}, [%r5];", "----"),
        ("stmatrix.sync.aligned.m8n8.x1.shared.b16 [%r5], {%r1};", "----"),
        (
            "wgmma.fence.sync.aligned; wgmma.mma_async.sync.aligned.m64n8k16.f32.f16.f16 {%f1, %f2}, %rd1, %rd2, 1, 1, 1, 0, 0;",
            "----",
        ),
        ("tcgen05.ld.sync.aligned.32x32b.x1.b32 {%r1}, [%r2];", "----"),
        // A tensor map is followed by hardware.
        (
            "cp.async.bulk.tensor.1d.shared::cluster.global.mbarrier::complete_tx::bytes [%r1], [%a, {%r2}], [%r3];",
            "?---i",
        ),
    ]);
}

#[test]
fn addresses_are_followed_through_arithmetic() {
    let store = |how: &str| format!("{how} st.global.u32 [%rd1], 0;");
    for how in [
        "mov.u64 %rd1, %a;",
        "mov.b64 %rd1, %a;",
        "cvta.to.global.u64 %rd1, %a;",
        "add.s64 %rd1, %a, 16;",
        "add.s64 %rd1, %rd9, %a;",
        "sub.s64 %rd1, %a, %rd9;",
        "mad.lo.s64 %rd1, %rd8, %rd9, %a;",
        "mad.wide.u32 %rd1, %r8, 4, %a;",
        "and.b64 %rd1, %a, -16;",
        "or.b64 %rd1, %a, 8;",
        "xor.b64 %rd1, %a, %rd9;",
        "selp.b64 %rd1, %a, %a, %p1;",
        "max.u64 %rd1, %a, 0;",
        "mov.b64 {%r1, %r2}, %a; mov.b64 %rd1, {%r1, %r2};",
        "shfl.sync.idx.b32 %r2|%p1, %r1, 0, 31, -1; cvt.u32.u64 %r1, %a; mov.b64 %rd1, {%r2, %r2};",
        // The order does not matter, as there may be loops.
        "mov.u64 %rd1, %rd2; add.s64 %rd2, %rd3, 4; mov.u64 %rd3, %a;",
        "{ .reg .b64 %rd1; mov.u64 %rd1, %b; } mov.u64 %rd1, %a;",
        "lop3.b32 %r1, %r2, %r3, %r4, 0x96; add.s64 %rd1, %a, 0;",
    ] {
        assert_eq!(of(&ptx(&store(how))), "W---", "{how}");
    }
    check(&[
        // An address that may be one of several.
        ("selp.b64 %rd1, %a, %b, %p1; st.global.u32 [%rd1], 0;", "WW--"),
        ("mov.u64 %rd1, %a; @%p1 mov.u64 %rd1, %b; ld.global.u32 %r1, [%rd1];", "RR--"),
        ("slct.u64.s32 %rd1, %a, %c, %r1; st.global.u32 [%rd1], 0;", "W-W-"),
        ("setp.eq.s64 %p1, %a, %b; selp.b64 %rd1, %c, %c, %p1; st.global.u32 [%rd1], 0;", "--W-"),
        // The distance of two parameters, added to a third.
        ("sub.s64 %rd1, %a, %b; add.s64 %rd2, %c, %rd1; st.global.u32 [%rd2], 0;", "WWW-"),
        // Storing an address is no access to what is there.
        ("st.global.u64 [%a], %b;", "W---"),
        // An inner scope has its own registers.
        (
            "{ .reg .b64 %q; mov.u64 %q, %a; st.global.u32 [%q], 0; } { .reg .b64 %q; mov.u64 %q, %b; ld.global.u32 %r1, [%q]; }",
            "WR--",
        ),
    ]);
}

#[test]
fn loaded_numbers_are_indices_and_loaded_addresses_are_indirect() {
    let load = "ld.global.u64 %rd9, [%b]; ld.global.u32 %r9, [%b];";
    for (body, expected) in [
        // Indices.
        ("mul.wide.s32 %rd1, %r9, 4; add.s64 %rd1, %a, %rd1; st.global.u32 [%rd1], 0;", "WR--"),
        ("cvt.u64.u32 %rd1, %r9; add.s64 %rd1, %a, %rd1; st.global.u8 [%rd1], 0;", "WR--"),
        ("shl.b64 %rd1, %rd9, 2; add.s64 %rd1, %a, %rd1; st.global.u32 [%rd1], 0;", "WR--"),
        ("mul.lo.s64 %rd1, %rd9, 12; add.s64 %rd1, %a, %rd1; st.global.u32 [%rd1], 0;", "WR--"),
        ("mad.lo.s64 %rd1, %rd9, %c, %a; st.global.u32 [%rd1], 0;", "WRW-"),
        ("rem.u64 %rd1, %rd9, 100; add.s64 %rd1, %a, %rd1; st.global.u32 [%rd1], 0;", "WR--"),
        ("cvt.u32.u64 %r1, %rd9; mad.wide.u32 %rd1, %r1, 4, %a; st.global.u32 [%rd1], 0;", "WR--"),
        // Addresses.
        ("st.global.u32 [%rd9], 0;", "-R--i"),
        ("ld.global.u32 %r1, [%rd9+8];", "-R--i"),
        ("add.s64 %rd1, %rd9, 8; atom.global.add.u32 %r1, [%rd1], 1;", "-R--i"),
        ("add.s64 %rd1, %a, %rd9; st.global.u32 [%rd1], 0;", "WR--i"),
        ("selp.b64 %rd1, %a, %rd9, %p1; st.global.u32 [%rd1], 0;", "WR--i"),
        ("mul.lo.s64 %rd1, %rd9, 1; st.global.u32 [%rd1], 0;", "-R--i"),
        ("atom.global.exch.b64 %rd1, [%a], 0; st.global.u32 [%rd1], 0;", "BR--i"),
        // Addresses from parts.
        ("mov.b64 %rd1, {%r9, %r9}; add.s64 %rd1, %a, %rd1; st.global.u32 [%rd1], 0;", "WR--i"),
        (
            "cvt.u64.u32 %rd1, %r9; shl.b64 %rd2, %rd1, 32; or.b64 %rd1, %rd1, %rd2; add.s64 %rd1, %rd1, %a; st.global.u32 [%rd1], 0;",
            "WR--i",
        ),
        (
            "cvt.u64.u32 %rd1, %r9; bfi.b64 %rd1, %rd1, %rd1, 32, 32; add.s64 %rd1, %rd1, %a; st.global.u32 [%rd1], 0;",
            "WR--i",
        ),
        (
            "cvt.u64.u32 %rd1, %r9; shl.b64 %rd1, %rd1, %r1; add.s64 %rd1, %rd1, %a; st.global.u32 [%rd1], 0;",
            "WR--i",
        ),
        (
            "cvt.u64.u32 %rd1, %r9; mul.lo.s64 %rd1, %rd1, 4294967296; add.s64 %rd1, %rd1, %a; st.global.u32 [%rd1], 0;",
            "WR--i",
        ),
        (
            "cvt.u64.u32 %rd1, %r9; mov.u64 %rd2, 0x100000000; mul.lo.s64 %rd1, %rd1, %rd2; add.s64 %rd1, %rd1, %a; st.global.u32 [%rd1], 0;",
            "WR--i",
        ),
        (
            "st.shared.u32 [%r1], %r9; ld.shared.u64 %rd1, [%r1]; add.s64 %rd1, %rd1, %a; st.global.u32 [%rd1], 0;",
            "WR--i",
        ),
        // A pointer with something in its upper bits.
        (
            "shl.b64 %rd1, %rd9, 16; shr.s64 %rd1, %rd1, 16; add.s64 %rd1, %rd1, %c; st.global.u32 [%rd1], 0;",
            "-RW-i",
        ),
        // Addresses from nowhere.
        ("ld.global.u32 %r1, [4096];", "-R--i"),
        ("mov.u64 %rd1, 4096; st.u32 [%rd1], 0;", "-R--i"),
        ("st.global.u32 [%rd77], 0;", "-R--i"),
    ] {
        assert_eq!(of(&ptx(&format!("{load} {body}"))), expected, "{body}");
    }
}

#[test]
fn what_is_put_into_local_and_shared_memory_comes_back() {
    let before = ".shared .align 8 .b8 tile[64]; .extern .shared .align 8 .b8 more[];";
    for (body, expected) in [
        (
            ".local .b64 x; mov.u64 %rd1, x; st.local.u64 [%rd1], %a; ld.local.u64 %rd2, [%rd1+8]; st.global.u32 [%rd2], 0;",
            "W---",
        ),
        (
            ".local .align 8 .b8 x[64]; mov.u64 %rd1, x; cvta.local.u64 %rd1, %rd1; st.u64 [%rd1], %a; ld.u64 %rd2, [%rd1]; ld.u32 %r1, [%rd2];",
            "R---",
        ),
        (
            ".local .b64 x; st.local.v2.u64 [x], {%a, %b}; ld.local.v2.u64 {%rd1, %rd2}, [x]; st.global.u32 [%rd2], 0;",
            "WW--",
        ),
        ("st.shared.u64 [tile], %b; ld.shared.u64 %rd2, [tile]; st.global.u32 [%rd2], 0;", "-W--"),
        ("atom.shared.exch.b64 %rd2, [more], %c; st.global.u32 [%rd2], 0;", "--W-"),
        (
            "mov.u32 %r1, tile; cvt.u64.u32 %rd1, %r1; cvta.shared.u64 %rd1, %rd1; st.u32 [%rd1], 1; ld.u32 %r2, [%rd1];",
            "----",
        ),
        // The two are apart.
        (
            ".local .b64 x; st.local.u64 [x], %a; st.shared.u64 [tile], %b; ld.shared.u64 %rd1, [tile]; st.global.u32 [%rd1], 0;",
            "-W--",
        ),
        // A generic address that may be one or the other.
        (
            "mov.u64 %rd1, tile; cvta.shared.u64 %rd1, %rd1; selp.b64 %rd1, %rd1, %a, %p1; st.u32 [%rd1], 1;",
            "W---",
        ),
        (
            "mov.u64 %rd1, tile; cvta.shared.u64 %rd1, %rd1; selp.b64 %rd1, %rd1, %a, %p1; st.u64 [%rd1], %b; ld.shared.u64 %rd2, [tile]; st.u32 [%rd2], 0;",
            "WW--",
        ),
        // Through an address from memory anything may come.
        (
            "ld.global.u64 %rd1, [%a]; st.u64 [%rd1], %b; ld.shared.u64 %rd2, [tile]; ld.u32 %r1, [%rd2];",
            "RR--i",
        ),
        (
            "alloca.u64 %rd1, 64; st.local.u64 [%rd1], %d; ld.local.u64 %rd2, [%rd1]; ld.global.u32 %r1, [%rd2];",
            "---R",
        ),
    ] {
        assert_eq!(of(&module(before, body)), expected, "{body}");
    }
}

#[test]
fn variables_of_the_module_are_told_apart() {
    let before = ".global .align 4 .b8 table[16] = {1, 2, 3, 4}; .visible .global .u64 total;\n\
                  .const .align 8 .u64 pointers[4]; .global .u64 start = generic(table);";
    for (body, expected) in [
        ("ld.global.u32 %r1, [table+4];", "----vR"),
        ("mov.u64 %rd1, total; atom.global.add.u64 %rd2, [%rd1], 1;", "----vB"),
        ("mov.u64 %rd1, total; cvta.global.u64 %rd2, %rd1; st.u64 [%rd2], 1;", "----vW"),
        ("ld.const.u32 %r1, [pointers];", "----vR"),
        ("mov.u64 %rd1, pointers; cvta.const.u64 %rd1, %rd1; ld.u64 %rd2, [%rd1];", "----vR"),
        // Pointers in variables lead anywhere.
        ("ld.const.u64 %rd1, [pointers+8]; st.global.u32 [%rd1], 0;", "----ivR"),
        ("ld.global.u64 %rd1, [start]; ld.global.u32 %r1, [%rd1];", "----ivR"),
    ] {
        assert_eq!(of(&module(before, body)), expected, "{body}");
    }
}

#[test]
fn parameters_are_words() {
    let text = ".version 8.0\n.entry k(.param .u32 n, .param .align 8 .b8 s[28], .param .u8 c,\n\
                .param .u64 .ptr .global .align 256 p, .param .align 4 .b8 t[12])\n{\n\
                .reg .b32 %r<9>; .reg .b64 %rd<9>;\n\
                ld.param.u32 %r1, [n]; ld.param.v2.u64 {%rd1, %rd2}, [s]; ld.param.u32 %r2, [s+24];\n\
                ld.param.u64 %rd3, [p]; ld.param.u32 %r3, [s+16];\n\
                mad.wide.u32 %rd4, %r3, %r2, %rd2; mad.wide.u32 %rd4, %r1, 4, %rd4;\n\
                ld.global.u32 %r4, [%rd1]; st.global.u32 [%rd4], %r4; red.global.add.u32 [%rd3], 1;\n}";
    let kernel = from_ptx(text).unwrap().remove(0);
    let params: Vec<_> = kernel
        .params
        .iter()
        .map(|param| (param.offset, param.size, param.words.iter().map(|w| w.offset).collect()))
        .collect();
    let expected: [(u32, u32, Vec<u32>); 5] = [
        (0, 4, vec![]),
        (8, 28, vec![0, 8, 16]),
        (36, 1, vec![]),
        (40, 8, vec![0]),
        (48, 12, vec![0]),
    ];
    assert_eq!(params, expected);
    assert!(kernel.params.iter().flat_map(|p| &p.words).all(|w| w.source == Source::Ptx));
    assert_eq!(shown(&kernel), "RW-B-");

    let with = |body: &str| {
        of(&format!(
            ".version 8.0\n.entry k(.param .align 8 .b8 s[32], .param .u64 p)\n{{ .reg .b32 %r<9>;\n\
             .reg .b64 %rd<9>; {body} }}"
        ))
    };
    // By the address of the parameter, with an index: any of its words.
    assert_eq!(
        with(
            "mov.b64 %rd1, s; add.s64 %rd1, %rd1, %rd9; ld.param.u64 %rd2, [%rd1+8]; st.global.u32 [%rd2], 0;"
        ),
        "WWWW-"
    );
    assert_eq!(
        with(
            "mov.b64 %rd1, s; cvta.param.u64 %rd1, %rd1; ld.u64 %rd2, [%rd1]; st.global.u32 [%rd2], 0;"
        ),
        "BBBB-i"
    );
    // A pointer that does not lie in one word.
    assert_eq!(
        with(
            "ld.param.u32 %r1, [s+4]; ld.param.u32 %r2, [s+8]; mov.b64 %rd1, {%r1, %r2}; st.global.u32 [%rd1], 0;"
        ),
        "-----i"
    );
    assert_eq!(with("ld.param.u64 %rd1, [s+4]; st.global.u32 [%rd1], 0;"), "WW---i");
    assert_eq!(with("ld.param.b128 %rd1, [s]; st.global.u32 [%rd1], 0;"), "WW---");
    assert_eq!(with("ld.param.u64 %rd1, [s+32]; st.global.u32 [%rd1], 0;"), "WWWW-i");
}

#[test]
fn functions_are_followed() {
    let callees = "
        .extern .func (.param .b32 r) vprintf(.param .b64 f, .param .b64 v);
        .extern .func outside(.param .b64 x);
        .func write(.param .b64 x) { .reg .b64 %x; ld.param.b64 %x, [x]; st.u32 [%x], 0; ret; }
        .func read(.param .b64 x, .param .b32 n) { .reg .b64 %x; .reg .b32 %n; ld.param.b64 %x, [x];
            ld.param.b32 %n, [n]; ld.u32 %n, [%x]; ret; }
        .func (.param .b64 y) pass(.param .b64 x) { .reg .b64 %x; ld.param.b64 %x, [x+0];
            add.s64 %x, %x, 8; st.param.b64 [y+0], %x; ret; }
        .func (.param .b64 y) again(.param .b64 x, .param .b64 z) { .reg .b64 %x, %z;
            ld.param.b64 %x, [x]; ld.param.b64 %z, [z]; st.u32 [%x], 1;
            { .param .b64 p0; .param .b64 p1; .param .b64 r0; st.param.b64 [p0], %z; st.param.b64 [p1], %x;
              call.uni (r0), again, (p0, p1); ld.param.b64 %z, [r0]; }
            st.param.b64 [y], %z; ret; }
        .func pair(.param .align 8 .b8 s[16]) { .reg .b64 %x<4>; ld.param.b64 %x1, [s];
            ld.param.b64 %x2, [s+8]; st.u32 [%x1], 0; ld.u64 %x3, [%x2]; ret; }
        .func (.reg .b64 y) old(.reg .b64 x) { st.u32 [x], 0; mov.b64 y, x; ret; }
        .alias other, write;";
    let one = |name: &str, register: &str| {
        format!("{{ .param .b64 p; st.param.b64 [p+0], {register}; call.uni {name}, (p); }}")
    };
    for (body, expected) in [
        (one("write", "%a"), "W---"),
        (one("write", "%a") + &one("write", "%b"), "WW--"),
        (one("other", "%c"), "--W-"),
        ("{ .param .b64 p; .param .b32 q; st.param.b64 [p], %b; call read, (p, q); }".into(), "-R--"),
        // Two callees do not mix, although their parameters have the same names here.
        (one("write", "%a") + "{ .param .b64 p; .param .b32 q; st.param.b64 [p], %b; call read, (p, q); }", "WR--"),
        ("{ .param .b64 p; .param .b64 r; st.param.b64 [p], %d; call (r), pass, (p); ld.param.b64 %rd1, [r]; st.u32 [%rd1], 0; }".into(), "---W"),
        // Recursion: the two parameters change places.
        ("{ .param .b64 p; .param .b64 q; .param .b64 r; st.param.b64 [p], %a; st.param.b64 [q], %b; call (r), again, (p, q); ld.param.b64 %rd1, [r]; ld.u32 %r1, [%rd1]; }".into(), "BB--"),
        ("{ .param .align 8 .b8 p[16]; st.param.v2.b64 [p], {%a, %b}; call pair, (p); }".into(), "WR--"),
        ("call (%rd1), old, (%a); ld.u32 %r1, [%rd1];".into(), "B---"),
        // A parameter of a function is on the stack.
        ("{ .param .b64 p; mov.b64 %rd1, p; st.param.b64 [p], %a; ld.local.u64 %rd2, [%rd1]; st.u32 [%rd2], 0; }".into(), "W---"),
        // It is not known what these functions do.
        (one("outside", "%b"), "-?--i"),
        ("{ .param .b64 p; st.param.b64 [p], %a; call %rd9, (p), prototype; }".into(), "?---i"),
        (".local .b64 x; st.local.u64 [x], %c; mov.u64 %rd1, x;".to_owned() + &one("outside", "%rd1"), "--?-i"),
        // The wrong number of arguments.
        ("call write;".into(), "----i"),
        // Printing.
        (".local .b64 x; st.local.u32 [x], 7; mov.u64 %rd1, x; cvta.local.u64 %rd1, %rd1; { .param .b64 f; .param .b64 v; .param .b32 r; st.param.b64 [v], %rd1; call (r), vprintf, (f, v); }".into(), "----"),
    ] {
        assert_eq!(of(&module(callees, &body)), expected, "{body}");
    }
}

#[test]
fn textures_and_unknown_instructions() {
    check(&[
        ("tex.1d.v4.f32.s32 {%f1, %f2, %f3, %f4}, [%a, {%r1}];", "?---i"),
        ("sust.b.1d.b32.trap [%b, {%r1}], {%r2};", "-?--i"),
        ("frobnicate.global.u32 %r1, [%a], %r2;", "?---"),
        // An unknown instruction may write any of its registers.
        ("frobnicate.global.u32 %r1, [%a], %b;", "??--i"),
        ("frobnicate.sync;", "----"),
        ("frobnicate.u32 %r1, %r2;", "----"),
        ("frobnicate.b64 %rd1, %rd2; st.global.u32 [%rd1], 0;", "----i"),
        ("frobnicate.b64 %rd1, %c; st.global.u32 [%rd1], 0;", "--?-i"),
        ("ld.global.u64 %rd1, [%a]; frobnicate [%rd1];", "R---i"),
        (".local .b64 x; st.local.u64 [x], %a; mov.u64 %rd1, x; frobnicate [%rd1];", "?---i"),
    ]);
}

#[test]
fn text_that_is_no_ptx_is_refused() {
    assert_eq!(from_ptx(""), Err(PtxError::NotPtx));
    assert_eq!(from_ptx("hello"), Err(PtxError::NotPtx));
    for bad in [
        ".entry k() {",
        ".entry {}",
        ".entry k() { @",
        "/* open",
        ".pragma \"open",
        ".entry k() { \"text\" }",
        ".entry k(.param .b8 a[40000]) { ret; }",
        ".entry k(.param .b8 a[4294967295][4294967295][4294967295]) { ret; }",
        ".entry k() { \u{e9} }",
    ] {
        let bad = format!(".version 8.0\n{bad}");
        assert!(matches!(from_ptx(&bad), Err(PtxError::Syntax(..))), "{bad}");
    }
    assert!(from_ptx(".version 1.0\n.address_size 32\n").is_err());
    // No kernels, no harm: declarations, debug information, functions.
    let text = ".version 8.0 // \u{e9}\n.target sm_80, debug\n.address_size 64\n.extern .func f(.param .b32 x);\n\
                .func .noreturn g() .pragma \"nounroll\"; { .loc 1 2 3, function_name $x, inlined_at 4 5 6\n trap; }\n\
                .file 1 \"a\\\"b.cu\"\n.section .debug_info { .b8 1; .b64 $x+4 }\n\
                .weak .func .attribute(.unified(1, 2)) h() { L: .branchtargets M, N; brx.idx %r1, L; }\n";
    assert_eq!(from_ptx(text), Ok(vec![]));
}

#[test]
fn too_large_is_unknown() {
    let mut text = String::from(".version 8.0\n.entry k(.param .b64 a) {\n");
    for at in 0..600 {
        text.push_str(&format!(".param .b8 x{at}[32768];\n"));
    }
    text.push('}');
    let kernel = from_ptx(&text).unwrap().remove(0);
    assert_eq!(shown(&kernel), "?iv?");
}

macro_rules! workload {
    ($name:literal) => {
        include_str!(concat!("../../../tests/workloads/kernels/", $name, ".ptx"))
    };
}

/// The name of a file, its PTX, and its kernels.
type Workload = (&'static str, &'static str, &'static [(&'static str, &'static str)]);

/// What each kernel of the workloads does, word by word, as its source says. `i` is for those that
/// follow pointers in memory, or put pointers together from halves; `structs_spread` has its pointers
/// in an array on its stack, next to a number of 4 bytes.
const WORKLOADS: [Workload; 14] = [
    (
        "attention",
        workload!("attention"),
        &[("attn_project", "RRRRWWW"), ("attn_attend", "RRRW"), ("attn_next", "RRBW")],
    ),
    ("early", workload!("early"), &[("early_step", "BvB")]),
    (
        "histogram",
        workload!("histogram"),
        &[
            ("hist_keys", "WR"),
            ("hist_count", "RB"),
            ("hist_scan", "RWB"),
            ("hist_scatter", "RBW"),
            ("hist_check", "RRBB"),
        ],
    ),
    (
        "indirect",
        workload!("indirect"),
        &[("lists_link", "Ri"), ("lists_walk", "RBi"), ("table_mask", "RW"), ("table_touch", "Ri")],
    ),
    ("late", workload!("late"), &[("late_step", "BvB")]),
    (
        "mixer",
        workload!("mixer"),
        &[("mixer_fill", "W"), ("mixer_round", "B"), ("mixer_sum", "RB")],
    ),
    (
        "mlp",
        workload!("mlp"),
        &[
            ("mlp_batch", "WW"),
            ("mlp_forward", "RRW"),
            ("mlp_loss", "RRWW"),
            ("mlp_grad_weights", "RRW"),
            ("mlp_grad_input", "RRRW"),
            ("sgd_update", "BRB"),
            ("adamw_update", "BRBB---"),
        ],
    ),
    ("pinned", workload!("pinned"), &[("pinned_transform", "RWB"), ("pinned_mapped", "BR")]),
    ("scatter", workload!("scatter"), &[("scatter_hide", "RW"), ("scatter_write", "Ri")]),
    ("small_allocs", workload!("small_allocs"), &[("small_update", "Ri")]),
    ("stack", workload!("stack"), &[("stack_tree", "B"), ("stack_array", "B")]),
    ("stencil", workload!("stencil"), &[("heat_init", "W"), ("heat_step", "RW")]),
    ("streams", workload!("streams"), &[("ring_step", "RRRW")]),
    (
        "structs",
        workload!("structs"),
        &[("structs_apply", "-RW--B-"), ("structs_spread", "R-BBBBBBi"), ("structs_split", "-Ri")],
    ),
];

#[test]
fn the_kernels_of_the_workloads() {
    let mut wrong = String::new();
    for (file, text, expected) in WORKLOADS {
        let kernels = from_ptx(text).unwrap();
        let found: Vec<_> =
            kernels.iter().map(|kernel| (&kernel.name[..], shown(kernel))).collect();
        let same =
            found.iter().map(|(name, shown)| (*name, &shown[..])).eq(expected.iter().copied());
        if !same {
            wrong.push_str(&format!("{file}: {found:?}\n"));
        }
    }
    assert!(wrong.is_empty(), "{wrong}");
}

/// `count` kernels that all call one function of so many instructions.
fn callers(count: usize, instructions: usize) -> String {
    let call = "{ .param .b64 p; st.param.b64 [p], %rd1; call shared, (p); } ret;";
    let body = "add.u64 %rd1, %rd1, %rd2; add.u64 %rd2, %rd2, %rd1;\n".repeat(instructions / 2);
    let mut text = format!(
        ".version 8.0\n.target sm_80\n.address_size 64\n.func shared(.param .u64 p)\n\
         {{ .reg .b64 %rd<9>; ld.param.u64 %rd1, [p]; {body} st.global.u64 [%rd1], %rd2; ret; }}\n"
    );
    for number in 0..count {
        text.push_str(&format!(
            ".visible .entry k{number}(.param .u64 a)\n\
             {{ .reg .b64 %rd<9>; ld.param.u64 %rd1, [a]; {call} }}\n"
        ));
    }
    text
}

#[test]
fn what_kernels_have_in_common_is_not_followed_without_end() {
    let kernels = from_ptx(&callers(3, 10)).unwrap();
    assert!(kernels.iter().all(|kernel| shown(kernel) == "W"), "{kernels:?}");
    // 50 times 100,000 instructions, each of them several times.
    let since = std::time::Instant::now();
    let kernels = from_ptx(&callers(50, 100_000)).unwrap();
    assert_eq!((shown(&kernels[0]), shown(&kernels[49])), ("W".to_owned(), "?iv?".to_owned()));
    assert!(since.elapsed() < std::time::Duration::from_secs(30), "{:?}", since.elapsed());
}

#[test]
fn braces_without_end_are_refused() {
    let nested = |depth: usize| {
        let (open, close) = ("{".repeat(depth), "}".repeat(depth));
        from_ptx(&ptx(&format!("{open} st.global.u32 [%a], 1; {close}")))
    };
    assert_eq!(shown(&nested(20).unwrap()[0]), "W---");
    assert!(matches!(nested(100_000), Err(PtxError::Syntax(..))));
}
