//! Contents of device memory while a process is checkpointed: in private host memory, or in storage that another
//! process has mapped too.

use std::ffi::c_void;

use rustix::fd::{AsFd, OwnedFd};
use rustix::fs::{MemfdFlags, SealFlags, fcntl_add_seals, ftruncate, memfd_create};
use rustix::mm::{self, MapFlags, ProtFlags};

use crate::status::{Code, Outcome};

/// Physical memory, mapped for a moment.
pub(crate) struct SharedView {
    /// First address.
    pub(crate) address: *mut c_void,
    size: usize,
}

impl SharedView {
    /// Maps all of it.
    ///
    /// # Errors
    /// `OUT_OF_MEMORY`.
    pub(crate) fn of(memory: impl AsFd, size: u64) -> Outcome<SharedView> {
        let size = size as usize;
        let protection = ProtFlags::READ | ProtFlags::WRITE;
        // SAFETY: a new mapping at an address of the kernel's choice disturbs nothing.
        let address = unsafe {
            mm::mmap(std::ptr::null_mut(), size, protection, MapFlags::SHARED, memory, 0)
        };
        Ok(SharedView { address: address.map_err(|_| Code::OUT_OF_MEMORY)?, size })
    }
}

impl Drop for SharedView {
    fn drop(&mut self) {
        // SAFETY: this mapping is ours and nobody else has its address.
        let result = unsafe { mm::munmap(self.address, self.size) };
        debug_assert!(result.is_ok());
    }
}

// SAFETY: the mapping belongs to this value alone.
unsafe impl Send for SharedView {}

/// Contents of a piece of device memory.
pub(crate) struct Bytes {
    /// How many.
    pub(crate) size: u64,
    at: Place,
}

/// Where contents are.
enum Place {
    /// In private host memory, in a mapping of its own, so that it goes back to the system at once and zero pages
    /// cost nothing.
    Private(*mut u8),
    /// In storage that is still there.
    Storage(*mut u8),
    /// With the caller that asked for the checkpoint.
    Elsewhere,
}

// SAFETY: a private mapping belongs to this value alone, and storage outlives what refers to it; both are only read
// through shared references.
unsafe impl Send for Bytes {}

/// Storage for the contents of one device, which others open by its name among the descriptors of this process.
pub(crate) struct Storage {
    /// Number of the host's device.
    pub(crate) device: usize,
    size: u64,
    filled: u64,
    view: SharedView,
    /// Kept open for those who look for it.
    _memory: OwnedFd,
}

/// How the descriptor of storage is named, before the number of the device.
pub(crate) const STORAGE: &str = "softcuda-storage-";

/// Its size can never change, so that no process that has it mapped can make accesses of another one fail.
pub(crate) const SEALS: SealFlags = SealFlags::SHRINK.union(SealFlags::GROW).union(SealFlags::SEAL);

const PAGE: usize = 4096;
static ZEROS: [u8; PAGE] = [0; PAGE];

impl Storage {
    /// Room of so many bytes, all zeros.
    ///
    /// # Errors
    /// `OUT_OF_MEMORY`.
    pub(crate) fn new(device: usize, size: u64) -> Outcome<Storage> {
        let flags = MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING;
        let memory =
            memfd_create(format!("{STORAGE}{device}"), flags).map_err(|_| Code::OUT_OF_MEMORY)?;
        ftruncate(&memory, size).map_err(|_| Code::OUT_OF_MEMORY)?;
        fcntl_add_seals(&memory, SEALS).map_err(|_| Code::OUT_OF_MEMORY)?;
        let view = SharedView::of(&memory, size)?;
        Ok(Storage { device, size, filled: 0, view, _memory: memory })
    }

    /// The next piece of it.
    ///
    /// # Errors
    /// `OUT_OF_MEMORY` beyond the end.
    fn take(&mut self, size: u64) -> Outcome<*mut u8> {
        let end = self.filled.checked_add(size).filter(|end| *end <= self.size);
        let end = end.ok_or(Code::OUT_OF_MEMORY)?;
        let at = self.view.address.cast::<u8>().wrapping_add(self.filled as usize);
        self.filled = end;
        Ok(at)
    }
}

impl Bytes {
    /// Copies `size` bytes (whole pages) of accessible memory. Pages of zeros are left out.
    ///
    /// # Errors
    /// `OUT_OF_MEMORY`.
    pub(crate) fn copy_of(from: *const u8, size: u64) -> Outcome<Bytes> {
        let flags = MapFlags::PRIVATE | MapFlags::NORESERVE;
        let protection = ProtFlags::READ | ProtFlags::WRITE;
        // SAFETY: a new mapping at an address of the kernel's choice disturbs nothing.
        let address =
            unsafe { mm::mmap_anonymous(std::ptr::null_mut(), size as usize, protection, flags) };
        let address = address.map_err(|_| Code::OUT_OF_MEMORY)?.cast::<u8>();
        copy_pages(from, address, size as usize);
        Ok(Bytes { size, at: Place::Private(address) })
    }

    /// Copies `size` bytes (whole pages) of accessible memory into storage, which must outlive the result.
    ///
    /// # Errors
    /// `OUT_OF_MEMORY` beyond the end of the storage.
    pub(crate) fn store(from: *const u8, size: u64, storage: &mut Storage) -> Outcome<Bytes> {
        let address = storage.take(size)?;
        copy_pages(from, address, size as usize);
        Ok(Bytes { size, at: Place::Storage(address) })
    }

    /// Whether the contents are not in this process.
    pub(crate) fn are_elsewhere(&self) -> bool {
        matches!(self.at, Place::Elsewhere)
    }

    /// Has the contents come from the next piece of storage, which must outlive this.
    ///
    /// # Errors
    /// `OUT_OF_MEMORY` beyond the end of the storage.
    pub(crate) fn expect_in(&mut self, storage: &mut Storage) -> Outcome {
        self.at = Place::Storage(storage.take(self.size)?);
        Ok(())
    }

    /// Forgets what is in storage, which is about to end.
    pub(crate) fn leave_storage(&mut self) {
        if let Place::Storage(_) = self.at {
            self.at = Place::Elsewhere;
        }
    }

    /// Copies to accessible memory of the same size that is all zeros. Contents that are elsewhere are left out.
    pub(crate) fn copy_to(&self, to: *mut u8) {
        match self.at {
            Place::Private(address) | Place::Storage(address) => {
                copy_pages(address, to, self.size as usize);
            }
            Place::Elsewhere => {}
        }
    }
}

impl Drop for Bytes {
    fn drop(&mut self) {
        let Place::Private(address) = self.at else { return };
        // SAFETY: this mapping is ours and nobody else has its address.
        let result = unsafe { mm::munmap(address.cast(), self.size as usize) };
        debug_assert!(result.is_ok());
    }
}

/// Copies whole pages into zeroed memory, leaving out those that are zero.
fn copy_pages(from: *const u8, to: *mut u8, size: usize) {
    for offset in (0..size).step_by(PAGE) {
        // SAFETY: callers give two separate ranges of `size` accessible bytes. No work runs that
        // could write to them.
        unsafe {
            let page = std::slice::from_raw_parts(from.add(offset), PAGE);
            if page != ZEROS {
                std::ptr::copy_nonoverlapping(page.as_ptr(), to.add(offset), PAGE);
            }
        }
    }
}
