//! Ranges of device memory.

use gpucr_wire::access::Operation;

/// A range that is read or written by something that is not a kernel.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Range {
    pub(crate) operation: Operation,
    /// Whether it is written.
    pub(crate) write: bool,
    pub(crate) address: u64,
    pub(crate) bytes: u64,
}

impl Range {
    /// What is read.
    pub(crate) fn read(operation: Operation, address: usize, bytes: usize) -> Self {
        Self { operation, write: false, address: address as u64, bytes: bytes as u64 }
    }

    /// What is written.
    pub(crate) fn written(operation: Operation, address: usize, bytes: usize) -> Self {
        Self { operation, write: true, address: address as u64, bytes: bytes as u64 }
    }
}
