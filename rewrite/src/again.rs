//! Which instructions a thread or block may have run before it is begun again from its start.
//!
//! That such a launch does the same when it is done twice is not decided here but of each launch, by what it reads and writes.
//! Here it matters that nobody stays behind who needs a thread that has ended, and that nobody else has seen what was done.

use crate::opcodes::{self, Class};

/// Instructions of a thread for itself, besides those that a thread may run which goes on: what they do need not be known.
const ALONE: [&str; 9] = [
    "alloca",
    "applypriority",
    "brkpt",
    "call",
    "createpolicy",
    "fns",
    "pmevent",
    "stackrestore",
    "stacksave",
];
/// And those on parts of registers, with a number of parts behind their names or none.
const OF_PARTS: [&str; 10] =
    ["vabsdiff", "vadd", "vavrg", "vmad", "vmax", "vmin", "vset", "vshl", "vshr", "vsub"];
/// Memory that a thread has for itself.
const OWN: [&str; 2] = ["local", "param"];
/// Parts of opcodes by which threads of anybody tell each other something: what was told cannot be taken back.
const TELLING: [&str; 9] =
    ["volatile", "relaxed", "acquire", "release", "acq_rel", "sc", "mmio", "cv", "wt"];

/// An opcode without the parts that speak of a thread's own memory.
fn without_own(opcode: &str) -> String {
    let is_own = |part: &&str| OWN.contains(&part.split("::").next().unwrap_or(part));
    opcode.split('.').filter(|part| !is_own(part)).collect::<Vec<_>>().join(".")
}

/// Whether somebody outside of the block may be told something by it, or tell.
fn tells(opcode: &str) -> bool {
    let mut parts = opcode.split('.');
    let base = parts.next().unwrap_or_default();
    let is_shared = opcode.split(['.', ':']).any(|part| part == "shared");
    match base {
        "atom" | "red" => !is_shared,
        // Of the block at most.
        "fence" | "membar" => !parts.any(|part| part == "cta"),
        _ => !is_shared && parts.any(|part| TELLING.contains(&part)),
    }
}

/// What a thread may do that has nothing to do with others; as [`opcodes::class`] otherwise.
pub(crate) fn class(opcode: &str) -> Option<Class> {
    if tells(opcode) {
        return None;
    }
    let plain = without_own(opcode);
    let base = plain.split('.').next().unwrap_or_default();
    let of_parts = base.trim_end_matches(['2', '4']);
    if ALONE.contains(&base) || OF_PARTS.contains(&of_parts) {
        // With `call` of a name: `call.uni (x), f, (y)`.
        return opcodes::is_own(&plain).then_some(Class::Reads);
    }
    opcodes::class(&plain)
}

/// The same of a block that ends and begins as one.
pub(crate) fn class_together(opcode: &str) -> Option<Class> {
    if tells(opcode) {
        return None;
    }
    // Nobody keeps such an address.
    if opcode.starts_with("cvta.") && opcodes::is_of_shared(opcode) {
        return Some(Class::Computes);
    }
    class(opcode).or_else(|| opcodes::class_together(&without_own(opcode)))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn who_may_be_begun_again() {
        for one in [
            "ld.global.u32",
            "ld.global.nc.v4.f32",
            "st.global.u32",
            "st.u32",
            "ld.local.v2.u64",
            "st.local.u32",
            "st.param.b32",
            "ld.param::func.u32",
            "cvta.local.u64",
            "call.uni",
            "call",
            "alloca.u64",
            "vabsdiff4.u32.u32.u32.add",
            "vadd.u32.u32.u32",
            "mov.b128",
            "membar.cta",
            "fence.acq_rel.cta",
        ] {
            assert!(class(one).is_some(), "{one}");
            assert!(class_together(one).is_some(), "{one}");
        }
        for one in [
            "ld.shared.u32",
            "ld.volatile.shared.u32",
            "st.shared::cta.u32",
            "atom.shared.add.u32",
            "cvta.to.shared.u64",
            "shfl.sync.bfly.b32",
            "mma.sync.aligned.m16n8k8.row.col.f32.f16.f16.f32",
            "bar.sync",
            "cp.async.cg.shared.global",
        ] {
            assert_eq!(class(one), None, "{one}");
            assert!(class_together(one).is_some(), "{one}");
        }
        for one in [
            "atom.global.add.u32",
            "atom.add.u32",
            "red.global.add.u32",
            "ld.volatile.global.u32",
            "ld.volatile.u32",
            "ld.relaxed.gpu.global.u32",
            "st.release.sys.global.u32",
            "ld.global.cv.u32",
            "st.wt.global.u32",
            "ld.mmio.relaxed.sys.global.u32",
            "membar.gl",
            "membar.sys",
            "fence.sc.gpu",
            "fence.proxy.tensormap::generic.release.gpu",
            "bar.arrive",
            "mbarrier.init.shared.b64",
            "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes",
            "wgmma.mma_async.sync.aligned.m64n8k16.f32.f16.f16",
            "ld.shared::cluster.u32",
            "multimem.ld_reduce.relaxed.sys.global.add.u32",
            "griddepcontrol.wait",
            "unknown.u32",
        ] {
            assert_eq!(class(one), None, "{one}");
            assert_eq!(class_together(one), None, "{one}");
        }
    }
}
