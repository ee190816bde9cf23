//! Operations of streams on single values in memory: waiting for one, writing one. One of them, or
//! up to 255 in a batch.

use std::sync::atomic::{AtomicU32, AtomicU64, Ordering, fence};
use std::time::Duration;

use cudarc::driver::sys;

use crate::address_space;
use crate::context::Context;
use crate::graph_memory;
use crate::status::{Code, Outcome};

/// `CU_STREAM_MEM_OP_*`.
pub(crate) const WAIT_32: u32 = 1;
pub(crate) const WRITE_32: u32 = 2;
const FLUSH: u32 = 3;
pub(crate) const WAIT_64: u32 = 4;
pub(crate) const WRITE_64: u32 = 5;
const BARRIER: u32 = 6;

/// `CU_STREAM_WAIT_VALUE_FLUSH`: remote writes are made visible after the wait.
const WAIT_FLUSHES: u32 = 1 << 30;
/// `CU_STREAM_WRITE_VALUE_NO_MEMORY_BARRIER`, which the second version of the functions lacks.
const WRITE_WITHOUT_BARRIER: u32 = 1;
/// `CU_STREAM_MEMORY_BARRIER_TYPE_GPU`, the largest of its kind.
const LAST_BARRIER: u32 = 1;

/// Which functions an operation is given to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Version {
    /// The first ones, which know no barriers.
    V1,
    /// Those of CUDA 11.7, and nodes of graphs.
    V2,
}

/// `CUstreamBatchMemOpParams` as one structure for all kinds.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct MemoryOperation {
    /// `CUstreamBatchMemOpType`.
    pub(crate) kind: u32,
    /// Flags of flushes and barriers.
    own_flags: u32,
    /// Address of the value.
    pub(crate) address: u64,
    /// The value; of 32-bit operations in the lower half.
    pub(crate) value: u64,
    /// Flags of waits and writes.
    pub(crate) flags: u32,
    unused: [u32; 5],
}

const _: () = assert!(size_of::<MemoryOperation>() == size_of::<sys::CUstreamBatchMemOpParams>());

/// The comparisons of waits; the top flag asks for a flush, which is nothing here.
fn compare(flags: u32, seen: u64, wanted: u64, bits: u32) -> Outcome<bool> {
    Ok(match flags & !WAIT_FLUSHES {
        // "Greater or equal" is cyclic: the difference is looked at as a signed number.
        0 => ((seen.wrapping_sub(wanted) << (64 - bits)) as i64) >= 0,
        1 => seen == wanted,
        2 => seen & wanted != 0,
        3 => (!(seen | wanted)) << (64 - bits) != 0,
        _ => return Err(Code::INVALID_VALUE),
    })
}

/// Reads a value, if the device may do so now.
///
/// # Errors
/// `ILLEGAL_ADDRESS`.
fn load(address: u64, bits: u32) -> Outcome<u64> {
    if !address_space::is_accessible(address, u64::from(bits / 8)) {
        return Err(Code::ILLEGAL_ADDRESS);
    }
    // SAFETY: accessible, as checked just now, and aligned, as checked when the operation was given;
    // memory is not taken away before the operation is over, since freeing and unmapping wait for
    // it. It may be read-only, where relaxed loads of these sizes are allowed.
    let value = unsafe {
        if bits == 32 {
            AtomicU32::from_ptr(address as *mut u32).load(Ordering::Relaxed).into()
        } else {
            AtomicU64::from_ptr(address as *mut u64).load(Ordering::Relaxed)
        }
    };
    fence(Ordering::SeqCst);
    Ok(value)
}

/// Writes a value, if the device may do so now.
///
/// # Errors
/// `ILLEGAL_ADDRESS`.
fn store(address: u64, value: u64, bits: u32) -> Outcome {
    if !address_space::is_writable(address, u64::from(bits / 8)) {
        return Err(Code::ILLEGAL_ADDRESS);
    }
    // SAFETY: writable, as checked just now; otherwise as for `load`.
    unsafe {
        if bits == 32 {
            AtomicU32::from_ptr(address as *mut u32).store(value as u32, Ordering::SeqCst);
        } else {
            AtomicU64::from_ptr(address as *mut u64).store(value, Ordering::SeqCst);
        }
    }
    Ok(())
}

impl MemoryOperation {
    /// A wait or a write.
    pub(crate) fn new(kind: u32, address: u64, value: u64, flags: u32) -> MemoryOperation {
        MemoryOperation { kind, address, value, flags, ..MemoryOperation::default() }
    }

    fn bits(&self) -> u32 {
        if matches!(self.kind, WAIT_64 | WRITE_64) { 64 } else { 32 }
    }

    /// The value that it waits for or writes.
    fn value(&self) -> u64 {
        if self.bits() == 32 { self.value & u64::from(u32::MAX) } else { self.value }
    }

    /// Refuses what cannot be done, before it is submitted.
    ///
    /// # Errors
    /// `INVALID_VALUE`, `NOT_SUPPORTED` for barriers in the first version.
    pub(crate) fn check(&self, version: Version) -> Outcome {
        let known = match self.kind {
            WAIT_32 | WAIT_64 => compare(self.flags, 0, 0, self.bits()).is_ok(),
            WRITE_32 | WRITE_64 if version == Version::V1 => {
                self.flags & !WRITE_WITHOUT_BARRIER == 0
            }
            WRITE_32 | WRITE_64 => self.flags == 0,
            FLUSH => return if self.own_flags == 0 { Ok(()) } else { Err(Code::INVALID_VALUE) },
            BARRIER if version == Version::V1 => return Err(Code::NOT_SUPPORTED),
            BARRIER if self.own_flags <= LAST_BARRIER => return Ok(()),
            _ => false,
        };
        let size = u64::from(self.bits() / 8);
        let there = || graph_memory::is_accessible(self.address, size);
        let writes = matches!(self.kind, WRITE_32 | WRITE_64);
        let allowed = || !writes || !address_space::any_read_only(self.address, size);
        if known && self.address.is_multiple_of(size) && there() && allowed() {
            Ok(())
        } else {
            Err(Code::INVALID_VALUE)
        }
    }

    /// Whether an executable graph may have the other one in its place: address, value and kind of
    /// comparison may differ.
    fn is_like(&self, other: &MemoryOperation) -> bool {
        let fixed = |one: &MemoryOperation| match one.kind {
            WAIT_32 | WAIT_64 => one.flags & WAIT_FLUSHES,
            WRITE_32 | WRITE_64 => one.flags,
            _ => one.own_flags,
        };
        self.kind == other.kind && fixed(self) == fixed(other)
    }

    /// Does it. A wait also ends when work of the context has failed.
    ///
    /// # Errors
    /// `ILLEGAL_ADDRESS`.
    fn run(&self, context: &Context) -> Outcome {
        match self.kind {
            WAIT_32 | WAIT_64 => {
                let mut pause = Duration::from_micros(5);
                let reached = || {
                    let seen = load(self.address, self.bits())?;
                    compare(self.flags, seen, self.value(), self.bits())
                };
                while !reached()? && !context.has_failed() {
                    std::thread::sleep(pause);
                    pause = (pause * 2).min(Duration::from_millis(1));
                }
                Ok(())
            }
            WRITE_32 | WRITE_64 => store(self.address, self.value(), self.bits()),
            // Each store above is seen by everybody before the next operation begins.
            _ => {
                fence(Ordering::SeqCst);
                Ok(())
            }
        }
    }
}

/// Whether an executable graph may do these operations in place of the others.
pub(crate) fn are_alike(some: &[MemoryOperation], others: &[MemoryOperation]) -> bool {
    some.len() == others.len() && some.iter().zip(others).all(|(one, other)| one.is_like(other))
}

/// Does all of them, one after the other.
///
/// # Errors
/// `ILLEGAL_ADDRESS`; nothing is done from there on.
pub(crate) fn run(operations: &[MemoryOperation], context: &Context) -> Outcome {
    for operation in operations {
        if context.has_failed() {
            break;
        }
        operation.run(context)?;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn comparisons() {
        assert_eq!(compare(0, 5, 5, 32), Ok(true));
        assert_eq!(compare(0, 4, 5, 32), Ok(false));
        assert_eq!(compare(0, 1, u32::MAX.into(), 32), Ok(true));
        assert_eq!(compare(1, 4, 5, 64), Ok(false));
        assert_eq!(compare(2, 6, 4, 64), Ok(true));
        assert_eq!(compare(3, u32::MAX.into(), 0, 32), Ok(false));
        assert_eq!(compare(3, 0, 1, 32), Ok(true));
        assert!(compare(4, 0, 0, 32).is_err());
    }

    #[test]
    fn what_may_differ_in_an_executable_graph() {
        let wait = MemoryOperation::new(WAIT_32, 8, 1, 0);
        assert!(wait.is_like(&MemoryOperation::new(WAIT_32, 16, 2, 3)));
        assert!(!wait.is_like(&MemoryOperation::new(WAIT_32, 8, 1, WAIT_FLUSHES)));
        assert!(!wait.is_like(&MemoryOperation::new(WAIT_64, 8, 1, 0)));
        let barrier = MemoryOperation { kind: BARRIER, ..MemoryOperation::default() };
        assert!(!barrier.is_like(&MemoryOperation { own_flags: 1, ..barrier }));
        assert!(are_alike(&[wait, barrier], &[wait, barrier]));
        assert!(!are_alike(&[wait], &[wait, barrier]));
    }

    #[test]
    fn a_value_of_32_bits_has_no_upper_half() {
        let junk = 0xffff_ffff_0000_0005;
        assert_eq!(MemoryOperation::new(WRITE_32, 0, junk, 0).value(), 5);
        assert_eq!(MemoryOperation::new(WRITE_64, 0, junk, 0).value(), junk);
    }
}
