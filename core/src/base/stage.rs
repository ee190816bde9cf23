//! Memory that gpucr and an agent share.

use std::os::fd::OwnedFd;

use crate::base::io_error::IoError;

/// A piece of shared memory without a name, unmapped and gone on drop.
pub(crate) struct Stage {
    /// The descriptor to be sent to the agent.
    pub(crate) memory: OwnedFd,
    address: *mut u8,
    len: usize,
}

impl Stage {
    /// Makes `len` bytes.
    pub(crate) fn create(len: u64) -> Result<Self, IoError> {
        let failed = |source| IoError { what: "cannot make shared memory".into(), source };
        let memory = gpucr_wire::table::shared_memory("gpucr-stage", len).map_err(failed)?;
        use rustix::mm::{MapFlags, ProtFlags};
        // SAFETY: a fresh mapping at an address of the kernel's choice.
        let address = unsafe {
            rustix::mm::mmap(
                std::ptr::null_mut(),
                len as usize,
                ProtFlags::READ | ProtFlags::WRITE,
                MapFlags::SHARED,
                &memory,
                0,
            )
        };
        let address = address.map_err(|errno| failed(errno.into()))?;
        Ok(Self { memory, address: address.cast(), len: len as usize })
    }

    /// The bytes. Only between an answer of the agent and the next request to it, since it
    /// writes here while it carries one out.
    pub(crate) fn bytes(&self) -> &[u8] {
        // SAFETY: `len` mapped bytes; the agent does not write between requests.
        unsafe { std::slice::from_raw_parts(self.address, self.len) }
    }

    /// The bytes, to be written between requests.
    pub(crate) fn bytes_mut(&mut self) -> &mut [u8] {
        // SAFETY: as in `bytes`, and borrowed exclusively here.
        unsafe { std::slice::from_raw_parts_mut(self.address, self.len) }
    }
}

impl Drop for Stage {
    fn drop(&mut self) {
        // SAFETY: mapped in `create`, unmapped once; no slice of it can be left.
        let _ = unsafe { rustix::mm::munmap(self.address.cast(), self.len) };
    }
}
