//! Memory shared with the checkpointer, through which blocks are copied where it has no context
//! of its own.

use std::ffi::c_void;
use std::os::fd::OwnedFd;
use std::ptr;

use rustix::mm::{MapFlags, ProtFlags, mmap, munmap};

use crate::state::memory::Failure;

/// The mapping. The file descriptor is not kept.
pub(super) struct Staging {
    address: *mut c_void,
    len: usize,
}

impl Staging {
    /// Maps `len` bytes of `fd`.
    pub(super) fn map(fd: &OwnedFd, len: u64) -> Result<Self, Failure> {
        let stat = rustix::fs::fstat(fd).map_err(|e| Failure::other(format!("staging: {e}")))?;
        // Beyond the end of the file every access would be a fault.
        if len == 0 || u64::try_from(stat.st_size).unwrap_or(0) < len {
            return Err(Failure::other(format!(
                "staging memory of {len} bytes is wanted, the file has {}",
                stat.st_size
            )));
        }
        let len = len as usize;
        let flags = ProtFlags::READ | ProtFlags::WRITE;
        // SAFETY: a new mapping at an address that the kernel chooses.
        let address = unsafe { mmap(ptr::null_mut(), len, flags, MapFlags::SHARED, fd, 0) }
            .map_err(|error| Failure::other(format!("staging memory cannot be mapped: {error}")))?;
        Ok(Self { address, len })
    }

    /// Its beginning, if `len` bytes fit in.
    pub(super) fn room(&self, len: u64) -> Result<*mut c_void, Failure> {
        if len > self.len as u64 {
            let message = format!("{len} bytes do not fit the staging memory of {}", self.len);
            return Err(Failure::other(message));
        }
        Ok(self.address)
    }
}

impl Drop for Staging {
    fn drop(&mut self) {
        // SAFETY: mapped by `map`, and no pointer outlives a request.
        let _ = unsafe { munmap(self.address, self.len) };
    }
}
