//! What PTX can have wrong.

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
