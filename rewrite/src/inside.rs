//! Why a kernel cannot be interrupted inside of its blocks.

use std::fmt;

/// Why a kernel's twin can be interrupted between two of its blocks, and not in its loops, or not at barriers, or not be aborted.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Inside {
    /// It has no loops, or none with barriers.
    Straight,
    /// It uses something of this name that its threads have together, that they have for themselves outside of registers,
    /// or that may be another one when they go on; or of which that is not known.
    Uses(String),
    /// The carry flag is kept from one instruction to another across a label.
    Carry,
    /// Its text has a form that is not read.
    Form,
    /// Its text is too long, or has too many loops.
    Size,
    /// Nobody has asked for that twin.
    Unasked,
}

impl fmt::Display for Inside {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Straight => f.write_str("it has no such loops"),
            Self::Uses(name) => write!(f, "it uses {name}"),
            Self::Carry => f.write_str("it keeps the carry flag across a label"),
            Self::Form => f.write_str("its code has a form that is not read"),
            Self::Size => f.write_str("its code is too long"),
            Self::Unasked => f.write_str("nobody has asked for that"),
        }
    }
}
