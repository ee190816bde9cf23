//! What a call of the system failed at.

use std::io;

/// A call of the system that failed, and what it was for.
#[derive(Debug, thiserror::Error)]
#[error("{what}: {source}")]
pub struct IoError {
    /// For example `cannot read /a/file`.
    pub what: String,
    /// What the system said.
    pub source: io::Error,
}

impl IoError {
    /// Adds to the error of a call what it was for; for `map_err`.
    pub fn when<E: Into<io::Error>>(what: impl Into<String>) -> impl FnOnce(E) -> Self {
        move |error| Self { what: what.into(), source: error.into() }
    }
}
