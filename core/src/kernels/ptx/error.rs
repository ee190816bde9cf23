//! What PTX can have wrong.

use gpucr_rewrite::lexer::Syntax;
use thiserror::Error;

/// Why PTX cannot be read.
#[derive(Debug, Error, Clone, Copy, PartialEq, Eq)]
pub enum PtxError {
    /// The text does not say `.version`.
    #[error("this is no PTX: it names no version")]
    NotPtx,
    /// A line that the grammar does not allow.
    #[error("PTX, line {0}: {1}")]
    Syntax(u32, &'static str),
}

impl From<Syntax> for PtxError {
    fn from(Syntax(line, why): Syntax) -> Self {
        Self::Syntax(line, why)
    }
}
