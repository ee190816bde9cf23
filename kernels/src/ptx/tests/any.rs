//! All instructions that some rule is about, with operands of all kinds and in any number.

use super::*;
use proptest::prelude::*;

const OPCODES: &[&str] = &[
    "tex.2d.v4.f32.s32",
    "tld4.r.2d",
    "suld.b.1d",
    "sust.b.1d",
    "sured.b.add",
    "txq.width",
    "suq.width",
    "istypep",
    "alloca.u64",
    "stacksave",
    "call",
    "call.uni",
    "ld",
    "ldu.global",
    "ld.param.u64",
    "ld.param.v2.u32",
    "ld.local.u64",
    "ld.shared.u8",
    "ld.global.v4.f32",
    "st",
    "st.param.u64",
    "st.param.v2.b32",
    "st.local.b64",
    "st.shared.b16",
    "red.global.add.u32",
    "atom.cas.b64",
    "multimem.ld_reduce",
    "multimem.st",
    "multimem.red",
    "ldmatrix",
    "stmatrix",
    "wmma.load",
    "wmma.store",
    "wmma.mma",
    "wgmma.mma_async",
    "tcgen05.mma",
    "cp.async.shared.global",
    "cp.async.bulk.tensor",
    "cp.reduce.async.bulk.global.shared",
    "cp.async.bulk.prefetch.global",
    "cp.async.wait_all",
    "discard.global",
    "tensormap.replace",
    "mov.u64",
    "mov.b64",
    "bfi.b64",
    "cvta.to.global.u64",
    "cvta.local",
    "mapa",
    "shl.b64",
    "mul.wide.u32",
    "mul.lo.u64",
    "mad.lo.s64",
    "div.u64",
    "add.u64",
    "setp.eq.u64",
    "prefetch.global",
    "something.else",
];
const OPERANDS: &[&str] = &[
    "%a",
    "%rd1",
    "%rd99999",
    "%r1",
    "%p1",
    "a",
    "k",
    "f",
    "l",
    "s",
    "v",
    "w",
    "_",
    "0",
    "-9223372036854775808",
    "0x8000000000000000",
    "99999999999999999999",
    "1.5",
    "%tid.x",
    "{}",
    "{%rd1}",
    "{%rd1, %r2}",
    "%p1|%p2",
    "()",
    "(%rd1)",
    "(w, %a)",
    "[]",
    "[%a]",
    "[%a+8]",
    "[a+16]",
    "[w]",
    "[w+7]",
    "[w+-1]",
    "[w+9223372036854775807]",
    "[l]",
    "[s+4]",
    "[v]",
    "[0]",
    "[%a, {%r1, %r2}]",
    "[,]",
    "-",
    "[",
    "{",
];

proptest! {
    #![proptest_config(ProptestConfig::with_cases(2_000))]
    #[test]
    fn no_instructions_make_it_panic(
        lines in prop::collection::vec(
            (prop::sample::select(OPCODES),
             prop::collection::vec(prop::sample::select(OPERANDS), 0..5)),
            1..8,
        ),
    ) {
        let lines: Vec<String> = lines
            .into_iter()
            .map(|(opcode, operands)| format!("{opcode} {};", operands.join(", ")))
            .collect();
        let before = ".global .u64 v; .func (.param .u64 r) f(.param .u64 p, .reg .u32 q) {\
                      .reg .b64 %x; ld.param.u64 %x, [p]; st.param.u64 [r], %x; ret; }";
        let own = ".local .b8 l[16]; .shared .u32 s; .param .b8 w[12];";
        let _ = from_ptx(&module(before, &format!("{own}\n{}", lines.join("\n"))));
    }
}
