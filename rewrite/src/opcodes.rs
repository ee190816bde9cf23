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
    let is_own = |part: &str| part.split("::").all(|name| !TOGETHER.contains(&name));
    parts.all(is_own).then_some(class)
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

/// Whether a special register, without its `%`, has the same value whenever the launch is made again.
pub(crate) fn is_lasting(register: &str) -> bool {
    let name = register.split('.').next().unwrap_or(register);
    matches!(name, "tid" | "ntid" | "ctaid" | "nctaid" | "laneid") || name.starts_with("lanemask_")
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
}
