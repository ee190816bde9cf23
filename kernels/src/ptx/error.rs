//! What PTX can have wrong.

use std::fmt;

use gpucr_rewrite::lexer::Syntax;

/// Why PTX cannot be read.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum PtxError {
    /// The text does not say `.version`.
    NotPtx,
    /// A line that the grammar does not allow.
    Syntax(u32, &'static str),
}

impl fmt::Display for PtxError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::NotPtx => f.write_str("this is no PTX: it names no version"),
            Self::Syntax(line, why) => write!(f, "PTX, line {line}: {why}"),
        }
    }
}

impl std::error::Error for PtxError {}

impl From<Syntax> for PtxError {
    fn from(Syntax(line, why): Syntax) -> Self {
        Self::Syntax(line, why)
    }
}
