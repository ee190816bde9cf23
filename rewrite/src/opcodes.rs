//! Which instructions a thread may run before and after it is interrupted, and what they do with their operands.

/// Instructions whose first operand is written, all of it, and whose others are read.
const WRITING: [&str; 51] = [
    "abs", "add", "addc", "and", "atom", "bfe", "bfi", "bfind", "bmsk", "brev", "clz", "cnot",
    "copysign", "cos", "cvt", "cvta", "div", "dp2a", "dp4a", "ex2", "fma", "isspacep", "ld", "ldu",
    "lg2", "lop3", "mad", "mad24", "madc", "max", "min", "mov", "mul", "mul24", "neg", "not", "or",
    "popc", "prmt", "rcp", "rem", "rsqrt", "sad", "selp", "set", "setp", "shf", "shl", "shr",
    "sin", "slct",
];
const MORE_WRITING: [&str; 7] = ["sqrt", "sub", "subc", "szext", "tanh", "testp", "xor"];

/// Instructions that only read their operands.
const READING: [&str; 7] = ["fence", "membar", "nanosleep", "prefetch", "prefetchu", "red", "st"];

/// Parts of opcodes that speak of what threads have together, or of memory that a thread has for itself.
const TOGETHER: [&str; 11] = [
    "shared", "local", "cluster", "sync", "aligned", "async", "mbarrier", "bulk", "tensor",
    "param", "multimem",
];

/// Instructions by which threads of a warp exchange what is in their registers: they write their first operand.
const EXCHANGING: [&str; 9] =
    ["activemask", "elect", "ldmatrix", "match", "mma", "movmatrix", "redux", "shfl", "vote"];

/// Parts of opcodes that are allowed of [those](class_together) that threads of a block may run.
const SHARED: [&str; 3] = ["shared", "sync", "aligned"];

/// What an instruction is to a thread.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Class {
    /// It computes its first operand of the others, and of nothing else.
    Computes,
    /// It writes its first operand.
    Writes,
    /// It writes no register.
    Reads,
    /// It goes to a label.
    Branches,
    /// It goes to one of several labels.
    Chooses,
    /// It ends the thread.
    Ends,
    /// It waits for all threads of the block that have not ended.
    Meets {
        /// Threads of a warp come to it together.
        is_aligned: bool,
    },
    /// The same, and it writes its first operand, which tells each of all others.
    Asks,
}

impl Class {
    /// Whether it is a barrier at which a block may be interrupted.
    pub(crate) fn meets(self) -> bool {
        matches!(self, Self::Meets { .. })
    }
}

/// The class of an opcode with all its parts; `None`: it is not one of those that are known to be each thread's own matter.
pub(crate) fn class(opcode: &str) -> Option<Class> {
    let mut parts = opcode.split('.');
    let base = parts.next()?;
    let class = match base {
        "bra" => Class::Branches,
        "brx" => Class::Chooses,
        "ret" | "exit" | "trap" => Class::Ends,
        "ld" if is_of_param(opcode) => return Some(Class::Computes),
        "atom" | "ld" | "ldu" => Class::Writes,
        _ if WRITING.contains(&base) || MORE_WRITING.contains(&base) => Class::Computes,
        _ if READING.contains(&base) => Class::Reads,
        _ => return None,
    };
    is_own(opcode).then_some(class)
}

/// Whether no part of an opcode speaks of what threads have together, or of memory that a thread has for itself.
pub(crate) fn is_own(opcode: &str) -> bool {
    opcode.split(['.', ':']).skip(1).all(|name| !TOGETHER.contains(&name))
}

/// Whether an opcode speaks of the block's shared memory.
pub(crate) fn is_of_shared(opcode: &str) -> bool {
    let mut parts = opcode.split('.').map(|part| part.split("::").collect::<Vec<_>>());
    parts.any(|part| matches!(part[..], ["shared"] | ["shared", "cta"]))
}

/// The same for an instruction of a block that is interrupted at barriers: what threads do together between two of these is
/// over when they have come to the next one. [`Class::Meets`] and [`Class::Asks`] only if its operands say so.
pub(crate) fn class_together(opcode: &str) -> Option<Class> {
    let parts: Vec<&str> = opcode.split('.').collect();
    let is_own = |part: &&str| {
        part.split("::").all(|name| !TOGETHER.contains(&name) || SHARED.contains(&name))
    };
    let base = *parts.first()?;
    let parts = match &parts[1..] {
        ["cta", rest @ ..] if matches!(base, "bar" | "barrier") => rest,
        rest => rest,
    };
    match (base, parts) {
        ("bar", ["sync"]) | ("barrier", ["sync", "aligned"]) => {
            return Some(Class::Meets { is_aligned: true });
        }
        ("barrier", ["sync"]) => return Some(Class::Meets { is_aligned: false }),
        ("bar" | "barrier", ["red", ..]) => return Some(Class::Asks),
        ("bar", ["warp", "sync"]) => return Some(Class::Reads),
        // They are waited for when a block is saved.
        ("cp", ["async", "ca" | "cg", rest @ ..]) => {
            return rest.iter().all(is_own).then_some(Class::Reads);
        }
        ("cp", ["async", "commit_group" | "wait_group" | "wait_all"]) => return Some(Class::Reads),
        // The same address may mean another place in the next launch.
        ("cvta", parts) if parts.iter().any(|part| part.starts_with("shared")) => return None,
        ("wmma", ["store", rest @ ..]) => return rest.iter().all(is_own).then_some(Class::Reads),
        _ => {}
    }
    if !parts.iter().all(is_own) && !is_of_param(opcode) {
        return None;
    }
    match base {
        "wmma" => Some(Class::Writes),
        "stmatrix" => Some(Class::Reads),
        _ if EXCHANGING.contains(&base) => Some(Class::Writes),
        _ => {
            let own: Vec<&str> = opcode
                .split('.')
                .filter(|part| !part.split("::").any(|name| SHARED.contains(&name)))
                .collect();
            class(&own.join("."))
        }
    }
}

/// Whether it is a copy to shared memory that goes on behind it.
pub(crate) fn is_copy(opcode: &str) -> bool {
    opcode.starts_with("cp.async.c")
}

/// Whether it is a load of a kernel's parameter.
pub(crate) fn is_of_param(opcode: &str) -> bool {
    let mut parts = opcode.split('.');
    parts.next() == Some("ld") && parts.next() == Some("param")
}

/// Whether it sets the carry flag, and whether it reads it.
pub(crate) fn carry(opcode: &str) -> (bool, bool) {
    let mut parts = opcode.split('.');
    let is_reading = matches!(parts.next(), Some("addc" | "subc" | "madc"));
    (parts.any(|part| part == "cc"), is_reading)
}

/// Whether a special register, without its `%`, has the same value in all threads of a block.
pub(crate) fn is_of_block(register: &str) -> bool {
    let name = register.split('.').next().unwrap_or(register);
    matches!(name, "ntid" | "ctaid" | "nctaid" | "dynamic_smem_size" | "total_smem_size")
}

/// Whether a special register, without its `%`, has the same value whenever the launch is made again.
pub(crate) fn is_lasting(register: &str) -> bool {
    let name = register.split('.').next().unwrap_or(register);
    let of_launch = ["dynamic_smem_size", "laneid", "total_smem_size"];
    matches!(name, "tid" | "ntid" | "ctaid" | "nctaid")
        || of_launch.contains(&name)
        || name.starts_with("lanemask_")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_each_threads_own() {
        assert_eq!(class("mad.lo.u32"), Some(Class::Computes));
        assert_eq!(class("ld.param.u64"), Some(Class::Computes));
        assert_eq!(class("ld.volatile.global.u32"), Some(Class::Writes));
        assert_eq!(class("atom.global.cta.add.u32"), Some(Class::Writes));
        assert_eq!(class("st.global.v4.f32"), Some(Class::Reads));
        assert_eq!(class("bra.uni"), Some(Class::Branches));
        for other in [
            "ld.shared.u32",
            "st.shared::cta.u32",
            "ld.local.u32",
            "cvta.shared.u64",
            "bar.sync",
            "shfl.sync.bfly.b32",
            "call.uni",
            "st.param.u32",
            "ld.param::func.u32",
            "activemask.b32",
            "vote.sync.all.pred",
            "cp.async.ca.shared.global",
            "mma.sync.aligned.m16n8k8",
            "griddepcontrol.wait",
            "cvta.param.u64",
            "alloca.u64",
            "st.async.b32",
            "multimem.ld_reduce.relaxed.sys.global.add.u32",
            "multimem.st.weak.global.v4.f32",
            "multimem.red.release.gpu.add.u32",
        ] {
            assert_eq!(class(other), None, "{other}");
        }
    }

    #[test]
    fn what_a_block_does_together() {
        let is = class_together;
        assert_eq!(is("bar.sync"), Some(Class::Meets { is_aligned: true }));
        assert_eq!(is("barrier.cta.sync"), Some(Class::Meets { is_aligned: false }));
        assert_eq!(is("barrier.sync.aligned"), Some(Class::Meets { is_aligned: true }));
        assert_eq!(is("bar.red.popc.u32"), Some(Class::Asks));
        for writing in [
            "ld.shared.u32",
            "ld.shared::cta.v4.f32",
            "atom.shared.add.u32",
            "shfl.sync.bfly.b32",
            "vote.sync.all.pred",
            "mma.sync.aligned.m16n8k8.row.col.f32.f16.f16.f32",
            "ldmatrix.sync.aligned.m8n8.x4.shared.b16",
            "wmma.load.a.sync.aligned.row.m16n16k16.shared.f16",
            "ld.global.u32",
        ] {
            assert_eq!(is(writing), Some(Class::Writes), "{writing}");
        }
        for reading in [
            "st.shared.u32",
            "red.shared.add.u32",
            "bar.warp.sync",
            "wmma.store.d.sync.aligned.row.m16n16k16.global.f32",
            "cp.async.cg.shared.global",
            "cp.async.wait_group",
            "fence.acq_rel.cta",
        ] {
            assert_eq!(is(reading), Some(Class::Reads), "{reading}");
        }
        assert_eq!(is("mov.u32"), Some(Class::Computes));
        assert_eq!(is("ld.param.u64"), Some(Class::Computes));
        for other in [
            "bar.arrive",
            "barrier.cluster.arrive",
            "barrier.cluster.wait.aligned",
            "mbarrier.init.shared.b64",
            "cp.async.mbarrier.arrive.shared.b64",
            "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes",
            "cp.async.bulk.commit_group",
            "cp.reduce.async.bulk.global.shared::cta.bulk_group.add.f32",
            "cvta.shared.u64",
            "cvta.to.shared.u64",
            "ld.shared::cluster.u32",
            "ld.local.u32",
            "st.async.shared::cluster.b32",
            "red.async.shared::cluster.add.u32",
            "st.param.u32",
            "mapa.shared::cluster.u32",
            "wgmma.mma_async.sync.aligned.m64n8k16.f32.f16.f16",
            "setmaxnreg.inc.sync.aligned.u32",
            "tcgen05.alloc.cta_group::1.sync.aligned.shared::cta.b32",
            "call.uni",
            "griddepcontrol.wait",
            "multimem.red.release.gpu.add.u32",
        ] {
            assert_eq!(is(other), None, "{other}");
        }
    }
}
