//! Memory of the host that devices copy from and to.

use std::sync::Arc;

use super::context::Context;
use super::driver::DriverError;

/// `CU_MEMHOSTALLOC_PORTABLE`: pinned for every context, since blocks of several devices share
/// one ring of staging memory.
const PORTABLE: u32 = 1;
/// `CU_MEMHOSTALLOC_DEVICEMAP`: kernels may use it.
const DEVICE_MAP: u32 = 2;
/// `CU_MEMHOSTREGISTER_READ_ONLY`: of memory that this process cannot write.
const READ_ONLY: u32 = 8;

/// A pinned buffer of host memory.
#[derive(Debug)]
pub struct Staging {
    pub(super) allocation: Arc<PinnedAllocation>,
    pub(super) memory: *mut u8,
    pub(super) len: usize,
}

// SAFETY: plain memory with one owner: no two buffers have bytes in common.
unsafe impl Send for Staging {}
// SAFETY: who shares it can only read it.
unsafe impl Sync for Staging {}

/// What the driver has allocated for one or more buffers.
#[derive(Debug)]
pub(super) struct PinnedAllocation {
    context: Arc<Context>,
    memory: *mut u8,
}

// SAFETY: an address that is not used before it is given back.
unsafe impl Send for PinnedAllocation {}
// SAFETY: as above.
unsafe impl Sync for PinnedAllocation {}

impl Staging {
    /// Allocates `len` pinned bytes, which costs about half a second for each GiB.
    pub fn allocate(context: &Arc<Context>, len: usize) -> Result<Self, DriverError> {
        let mut row = Self::allocate_row(context, len, 1)?;
        Ok(row.pop().expect("it has one"))
    }

    /// Allocates `count` buffers of `len` bytes that follow each other in memory.
    pub fn allocate_row(
        context: &Arc<Context>,
        len: usize,
        count: usize,
    ) -> Result<Vec<Self>, DriverError> {
        context.enter()?;
        let mut memory = std::ptr::null_mut();
        // SAFETY: `memory` is a place for a pointer.
        unsafe { context.driver.cuMemHostAlloc(&mut memory, len * count, PORTABLE | DEVICE_MAP)? };
        let memory: *mut u8 = memory.cast();
        // SAFETY: the driver gave that many bytes, which become initialised here.
        unsafe { memory.write_bytes(0, len * count) };
        let allocation = Arc::new(PinnedAllocation { context: context.clone(), memory });
        let part = |number: usize| {
            // SAFETY: that far it is still within the allocation.
            let memory = unsafe { memory.add(number * len) };
            Self { allocation: allocation.clone(), memory, len }
        };
        Ok((0..count).map(part).collect())
    }

    /// Where kernels see the buffer.
    pub fn device_address(&self) -> Result<u64, DriverError> {
        let mut address = 0;
        // SAFETY: `address` is a place for an address; the memory was made by this driver.
        unsafe {
            let memory = self.memory.cast();
            let driver = &self.allocation.context.driver;
            driver.cuMemHostGetDevicePointer_v2(&mut address, memory, 0)?;
        }
        Ok(address)
    }

    /// The bytes. Only meaningful while no copy into the buffer is under way.
    pub fn bytes(&self) -> &[u8] {
        // SAFETY: `len` initialised bytes that live as long as `self`.
        unsafe { std::slice::from_raw_parts(self.memory, self.len) }
    }

    /// The bytes, to be written. Only while no copy of the buffer is under way.
    pub fn bytes_mut(&mut self) -> &mut [u8] {
        // SAFETY: `len` initialised bytes that live as long as `self`, borrowed exclusively.
        unsafe { std::slice::from_raw_parts_mut(self.memory, self.len) }
    }
}

impl Drop for PinnedAllocation {
    fn drop(&mut self) {
        let entered = self.context.enter();
        // SAFETY: allocated in `allocate_row` and freed once, when no buffer is left.
        let gone =
            entered.and_then(|()| unsafe { self.context.driver.cuMemFreeHost(self.memory.cast()) });
        if let Err(error) = gone {
            tracing::warn!(%error, "staging memory could not be given back");
        }
    }
}

/// Memory of somebody else, which the driver has pinned, so that devices read it without a staging buffer. No
/// longer pinned on drop.
#[derive(Debug)]
pub struct Pinned {
    context: Arc<Context>,
    pub(super) memory: *const u8,
    pub(super) len: usize,
}

// SAFETY: the memory is only read, by devices.
unsafe impl Send for Pinned {}
// SAFETY: as above; any number of copies may read it at once.
unsafe impl Sync for Pinned {}

impl Pinned {
    /// Pins memory that this process can read. It takes up to a tenth of a second for each GiB.
    ///
    /// # Errors
    /// Of the driver: not all of them can pin what cannot be written.
    ///
    /// # Safety
    /// The `len` bytes at `memory` stay mapped until this is dropped.
    pub unsafe fn new(
        context: &Arc<Context>,
        memory: *const u8,
        len: usize,
    ) -> Result<Self, DriverError> {
        context.enter()?;
        let flags = PORTABLE | READ_ONLY;
        // SAFETY: the memory is mapped, says the caller; with this flag nobody writes to it.
        unsafe { context.driver.cuMemHostRegister_v2(memory.cast_mut().cast(), len, flags)? };
        Ok(Self { context: context.clone(), memory, len })
    }
}

impl Drop for Pinned {
    fn drop(&mut self) {
        let entered = self.context.enter();
        // SAFETY: pinned in `new`, and given back once.
        let gone = entered.and_then(|()| unsafe {
            self.context.driver.cuMemHostUnregister(self.memory.cast_mut().cast())
        });
        if let Err(error) = gone {
            tracing::warn!(%error, "pinned memory could not be given back");
        }
    }
}
