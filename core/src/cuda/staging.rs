//! Memory of the host that devices copy from and to.

use std::ffi::c_void;
use std::sync::Arc;

use rustix::mm::{Advice, MapFlags, ProtFlags, madvise, mmap_anonymous, munmap};

use super::context::Context;
use super::driver::{DriverError, code};

/// `CU_MEMHOSTREGISTER_PORTABLE`: pinned for every context, since blocks of several devices share
/// one ring of staging memory.
const PORTABLE: u32 = 1;
/// `CU_MEMHOSTREGISTER_DEVICEMAP`: kernels may use it.
const DEVICE_MAP: u32 = 2;
/// Bytes of a huge page.
const HUGE_PAGE: usize = 2 << 20;
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

/// Pinned memory for one or more buffers.
#[derive(Debug)]
pub(super) struct PinnedAllocation {
    context: Arc<Context>,
    memory: *mut u8,
    /// What `memory` is in; `None` where it is the driver's.
    pages: Option<Pages>,
}

/// Memory of this process, of zeros at first, in huge pages where the kernel has them. What the driver allocates
/// seems to be mapped in small ones: a processor reads that more slowly (`docs/results/copy.md`, "What the copy is up
/// against").
#[derive(Debug)]
struct Pages {
    /// Where a huge page can begin.
    memory: *mut u8,
    /// The start of all that is mapped.
    mapped: *mut c_void,
    mapped_len: usize,
}

// SAFETY: an address that is not used before it is given back.
unsafe impl Send for PinnedAllocation {}
// SAFETY: the address is not used before the memory is given back.
unsafe impl Sync for PinnedAllocation {}

impl Staging {
    /// Allocates `len` pinned bytes of zeros.
    ///
    /// # Errors
    /// The errors of [`allocate_row`](Self::allocate_row).
    pub fn allocate(context: &Arc<Context>, len: usize) -> Result<Self, DriverError> {
        let mut row = Self::allocate_row(context, len, 1)?;
        Ok(row.pop().expect("it has one"))
    }

    /// Allocates `count` buffers of `len` bytes that follow each other in memory.
    ///
    /// # Errors
    /// The driver's, or that the host has no memory to map, which looks the same: nothing stays allocated.
    pub fn allocate_row(
        context: &Arc<Context>,
        len: usize,
        count: usize,
    ) -> Result<Vec<Self>, DriverError> {
        let allocation = Arc::new(PinnedAllocation::new(context, len * count)?);
        let memory = allocation.memory;
        let part = |number: usize| {
            // SAFETY: that far it is still within the allocation.
            let memory = unsafe { memory.add(number * len) };
            Self { allocation: allocation.clone(), memory, len }
        };
        Ok((0..count).map(part).collect())
    }

    /// Where kernels see the buffer.
    ///
    /// # Errors
    /// The driver's: it does not map the memory for the device whose context is current.
    pub fn device_address(&self) -> Result<u64, DriverError> {
        let mut address = 0;
        // SAFETY: `address` is a place for an address; this driver has made the memory or pinned it.
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

impl PinnedAllocation {
    fn new(context: &Arc<Context>, len: usize) -> Result<Self, DriverError> {
        context.enter()?;
        match Self::of_pages(context, len) {
            Err(error) if error.code != code::OUT_OF_MEMORY => {
                tracing::debug!(%error, "the driver does not pin what it has not allocated");
                Self::of_driver(context, len)
            }
            done => done,
        }
    }

    fn of_pages(context: &Arc<Context>, len: usize) -> Result<Self, DriverError> {
        let len = len.next_multiple_of(rustix::param::page_size());
        let pages = Pages::map(len).map_err(|error| DriverError {
            function: "mmap",
            code: code::OUT_OF_MEMORY,
            name: error.to_string(),
        })?;
        let memory = pages.memory;
        // SAFETY: the memory is mapped, and nobody else's.
        unsafe {
            context.driver.cuMemHostRegister_v2(memory.cast(), len, PORTABLE | DEVICE_MAP)?;
        }
        Ok(Self { context: context.clone(), memory, pages: Some(pages) })
    }

    /// Pinned memory that the driver allocates.
    fn of_driver(context: &Arc<Context>, len: usize) -> Result<Self, DriverError> {
        let mut memory = std::ptr::null_mut();
        // SAFETY: `memory` is a place for a pointer.
        unsafe { context.driver.cuMemHostAlloc(&mut memory, len, PORTABLE | DEVICE_MAP)? };
        let memory: *mut u8 = memory.cast();
        // SAFETY: the driver gave that many bytes, which become initialised here.
        unsafe { memory.write_bytes(0, len) };
        Ok(Self { context: context.clone(), memory, pages: None })
    }

    /// Gives the memory back to the driver, or unpins it.
    fn release(&self) -> Result<(), DriverError> {
        self.context.enter()?;
        let (driver, memory) = (&self.context.driver, self.memory.cast());
        // SAFETY: made or pinned in `new`, and given back once, when no buffer is left. A copy that
        // somebody who panicked has left behind has ended.
        unsafe {
            driver.cuCtxSynchronize()?;
            match self.pages {
                Some(_) => driver.cuMemHostUnregister(memory),
                None => driver.cuMemFreeHost(memory),
            }
        }
    }
}

impl Drop for PinnedAllocation {
    fn drop(&mut self) {
        if let Err(error) = self.release() {
            tracing::warn!(%error, "staging memory could not be given back");
            // The memory stays mapped, since a device may still use it.
            std::mem::forget(self.pages.take());
        }
    }
}

impl Pages {
    /// Maps so many bytes, which begin where a huge page can.
    fn map(len: usize) -> rustix::io::Result<Self> {
        let mapped_len = len + HUGE_PAGE;
        let (anywhere, protection) = (std::ptr::null_mut(), ProtFlags::READ | ProtFlags::WRITE);
        // SAFETY: a fresh mapping at an address of the kernel's choice.
        let mapped =
            unsafe { mmap_anonymous(anywhere, mapped_len, protection, MapFlags::PRIVATE) }?;
        let first = mapped.cast::<u8>();
        let memory = first.wrapping_add(first.align_offset(HUGE_PAGE));
        let pages = Self { memory, mapped, mapped_len };
        // SAFETY: this changes nothing about the contents, which are zeros. Without huge pages they are as good.
        let _ = unsafe { madvise(memory.cast(), len, Advice::LinuxHugepage) };
        // A child that has them as well could make the next write go to a copy, which the device does not know.
        // SAFETY: children do not need them.
        unsafe { madvise(mapped, mapped_len, Advice::LinuxDontFork) }?;
        // SAFETY: the contents stay; only a core dump of this process lacks them. They are a program's memory.
        let _ = unsafe { madvise(mapped, mapped_len, Advice::LinuxDontDump) };
        Ok(pages)
    }
}

impl Drop for Pages {
    fn drop(&mut self) {
        // SAFETY: mapped in `map`, and nobody uses them any more.
        let gone = unsafe { munmap(self.mapped, self.mapped_len) };
        if let Err(error) = gone {
            tracing::warn!(%error, "staging memory could not be given back");
        }
    }
}

/// Memory of another owner, which the driver has pinned, so that devices read it without a staging buffer. No
/// longer pinned on drop.
#[derive(Debug)]
pub struct Pinned {
    context: Arc<Context>,
    pub(super) memory: *const u8,
    pub(super) len: usize,
}

// SAFETY: the memory is only read, by devices.
unsafe impl Send for Pinned {}
// SAFETY: the memory is only read, by any number of copies at once.
unsafe impl Sync for Pinned {}

impl Pinned {
    /// Pins memory that this process can read. It takes up to a tenth of a second for each GiB.
    ///
    /// # Errors
    /// An error of the driver: not all drivers can pin what cannot be written.
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
