//! A file in memory, mapped to be read.

use std::io;
use std::os::fd::AsFd;

use rustix::fs::StatVfsMountFlags;
use rustix::mm::{MapFlags, ProtFlags};

/// A whole file that cannot change any more, mapped; unmapped on drop.
pub(crate) struct Mapping {
    address: *const u8,
    len: usize,
}

// SAFETY: the memory is only read, through copies that say how far they go, and nobody can write it.
unsafe impl Send for Mapping {}
// SAFETY: any number of threads may read at once, and nobody can write the memory.
unsafe impl Sync for Mapping {}

impl Mapping {
    /// Maps `file`.
    ///
    /// # Errors
    ///
    /// The file is not on a read-only file system, so that somebody might write or cut it; or the
    /// kernel refuses.
    pub(crate) fn of(file: impl AsFd) -> io::Result<Self> {
        let flags = rustix::fs::fstatvfs(&file)?.f_flag;
        if !flags.contains(StatVfsMountFlags::RDONLY) {
            return Err(io::Error::other("its file system can be written"));
        }
        // SAFETY: nobody can write or cut it.
        unsafe { Self::new(file) }
    }

    /// Maps a file that could change.
    ///
    /// # Errors
    ///
    /// The kernel refuses.
    ///
    /// # Safety
    ///
    /// Nobody writes or cuts the file as long as this lives.
    pub(crate) unsafe fn new(file: impl AsFd) -> io::Result<Self> {
        let len = rustix::fs::fstat(&file)?.st_size as usize;
        if len == 0 {
            return Ok(Self { address: std::ptr::null(), len });
        }
        let address = std::ptr::null_mut();
        // SAFETY: a fresh mapping at an address of the kernel's choice. The file is never cut, so
        // all of it stays accessible.
        let address =
            unsafe { rustix::mm::mmap(address, len, ProtFlags::READ, MapFlags::SHARED, file, 0) }?;
        Ok(Self { address: address.cast(), len })
    }

    /// Bytes.
    pub(crate) fn len(&self) -> usize {
        self.len
    }

    /// Where it begins. Readable as long as `self` lives.
    pub(crate) fn address(&self) -> *const u8 {
        self.address
    }

    /// All of it.
    pub(crate) fn bytes(&self) -> &[u8] {
        if self.len == 0 {
            return &[];
        }
        // SAFETY: the mapping has so many bytes and is readable as long as `self` lives, and nobody writes or cuts the
        // file: its file system is read-only, or the caller of `new` has said so.
        unsafe { std::slice::from_raw_parts(self.address, self.len) }
    }

    /// Copies the bytes from `at` on; `None` if the file ends before.
    pub(crate) fn copy(&self, at: u64, out: &mut [u8]) -> Option<()> {
        let at = usize::try_from(at).ok()?;
        if at.checked_add(out.len())? > self.len {
            return None;
        }
        // SAFETY: within the mapping, as was just checked, which is readable as long as `self` lives;
        // `out` is exclusively borrowed memory, so the two do not overlap.
        unsafe { std::ptr::copy_nonoverlapping(self.address.add(at), out.as_mut_ptr(), out.len()) };
        Some(())
    }
}

impl Drop for Mapping {
    fn drop(&mut self) {
        if self.len > 0 {
            // SAFETY: mapped in `of`, unmapped once; no reference to it outlives `self`.
            let _ = unsafe { rustix::mm::munmap(self.address.cast_mut().cast(), self.len) };
        }
    }
}
