//! A context of gpucr's own on a device, and physical memory of the device that is shared with a program.

use std::ffi::{c_int, c_void};
use std::os::fd::{AsRawFd, BorrowedFd, FromRawFd, OwnedFd};
use std::sync::Arc;

use cudarc::driver::sys::{
    CUmemAccess_flags, CUmemAccessDesc, CUmemAllocationHandleType, CUmemAllocationProp,
    CUmemAllocationType, CUmemLocation, CUmemLocationType,
};

use super::driver::{Device, Driver, DriverError};

/// Physical device memory is given out in multiples of this.
pub const GRANULE: u64 = 2 << 20;
/// `CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR`.
const POSIX_FD: u32 = 1;

/// A context on one device, destroyed on drop together with what is left in it.
#[derive(Debug)]
pub struct Context {
    pub(super) driver: Arc<Driver>,
    device: Device,
    handle: *mut c_void,
}

// SAFETY: a context handle may be made current on any thread; the driver locks internally.
unsafe impl Send for Context {}
// SAFETY: every call here first makes the context current on its own thread; the driver locks internally.
unsafe impl Sync for Context {}

impl Context {
    /// Makes a context on `device`. It takes 260 to 530 MiB of the device's memory.
    ///
    /// # Errors
    /// The driver's, for instance if there is no room on the device, or another process has it alone.
    pub fn create(driver: &Arc<Driver>, device: &Device) -> Result<Arc<Self>, DriverError> {
        let mut handle = std::ptr::null_mut();
        // SAFETY: `handle` is a place for a context.
        unsafe { driver.cuCtxCreate_v2(&mut handle, 0, device.ordinal)? };
        Ok(Arc::new(Self { driver: driver.clone(), device: device.clone(), handle }))
    }

    /// The device it is on.
    pub fn device(&self) -> &Device {
        &self.device
    }

    /// The driver that it was made with.
    pub fn driver(&self) -> &Arc<Driver> {
        &self.driver
    }

    /// Bytes of the device's memory that nobody uses.
    ///
    /// # Errors
    /// The driver's.
    pub fn free_memory(&self) -> Result<u64, DriverError> {
        self.enter()?;
        let (mut free, mut total) = (0, 0);
        // SAFETY: both are places for a size.
        unsafe { self.driver.cuMemGetInfo_v2(&mut free, &mut total)? };
        Ok(free as u64)
    }

    /// Makes new memory of the device, of which nothing is left here but the descriptor; `len` is a multiple of
    /// [`GRANULE`]. It is free again when the last copy of that is closed, in whatever process.
    ///
    /// # Errors
    /// The driver's: there is no room, or the memory cannot be exported. Nothing is left of it then, unless the driver
    /// does not even release it.
    pub fn keep(&self, len: u64) -> Result<OwnedFd, DriverError> {
        let handle = self.make_memory(len)?;
        let fd = self.export(handle);
        // SAFETY: the handle was made just now, and is used nowhere else.
        unsafe { self.driver.cuMemRelease(handle)? };
        fd
    }

    /// A handle of new memory that can be exported.
    fn make_memory(&self, len: u64) -> Result<u64, DriverError> {
        self.enter()?;
        let mut handle = 0;
        let prop = CUmemAllocationProp {
            type_: CUmemAllocationType::CU_MEM_ALLOCATION_TYPE_PINNED,
            requestedHandleTypes:
                CUmemAllocationHandleType::CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR,
            location: location(&self.device),
            win32HandleMetaData: std::ptr::null_mut(),
            // SAFETY: plain integers, for which zero means "nothing special".
            allocFlags: unsafe { std::mem::zeroed() },
        };
        // SAFETY: `handle` and `prop` are places of the right types.
        unsafe { self.driver.cuMemCreate(&mut handle, len as usize, &prop, 0)? };
        Ok(handle)
    }

    /// A descriptor of memory that was made here. Nobody whom gpucr starts keeps it open.
    fn export(&self, handle: u64) -> Result<OwnedFd, DriverError> {
        let mut fd: c_int = -1;
        // SAFETY: `fd` is a place for a file descriptor, which is what this handle type gives.
        unsafe { self.driver.cuMemExportToShareableHandle(&mut fd, handle, POSIX_FD, 0)? };
        // SAFETY: the driver made the descriptor for us.
        let fd = unsafe { OwnedFd::from_raw_fd(fd) };
        // Drivers give descriptors without the flag. An open one can always be given it.
        let set = rustix::io::fcntl_setfd(&fd, rustix::io::FdFlags::CLOEXEC);
        debug_assert!(set.is_ok(), "{set:?}");
        Ok(fd)
    }

    /// Makes the context current on this thread, which every use of a stream or memory needs.
    ///
    /// # Errors
    /// The driver's: this thread must not use what belongs to the context.
    pub fn enter(&self) -> Result<(), DriverError> {
        // SAFETY: the handle is live until drop.
        unsafe { self.driver.cuCtxSetCurrent(self.handle) }
    }
}

impl Drop for Context {
    fn drop(&mut self) {
        // SAFETY: made in `create`; all users hold an `Arc` of this context and are gone.
        if let Err(error) = unsafe { self.driver.cuCtxDestroy_v2(self.handle) } {
            tracing::warn!(%error, "a context could not be given back");
        }
    }
}

/// Physical device memory, mapped into gpucr's address space. Dropping it unmaps and releases it
/// here; the bytes live on while another process or a file descriptor holds them.
#[derive(Debug)]
pub struct SharedBlock {
    context: Arc<Context>,
    handle: u64,
    address: u64,
    len: usize,
}

impl SharedBlock {
    /// Maps memory that a program has exported.
    ///
    /// # Errors
    /// The driver's: it does not accept the descriptor, or cannot map the memory. Nothing stays mapped here; the
    /// descriptor is the caller's in any case.
    pub fn import(
        context: &Arc<Context>,
        fd: BorrowedFd<'_>,
        len: u64,
    ) -> Result<Self, DriverError> {
        context.enter()?;
        let mut handle = 0;
        let fd = fd.as_raw_fd() as usize as *mut c_void;
        // SAFETY: for this handle type the pointer argument is the file descriptor itself.
        unsafe {
            context.driver.cuMemImportFromShareableHandle(&mut handle, fd, POSIX_FD)?;
        }
        Self::map(context, handle, len as usize)
    }

    /// Makes new memory that can be exported; `len` is a multiple of [`GRANULE`].
    ///
    /// # Errors
    /// The driver's: there is no room, or the memory cannot be mapped. Nothing is left of it then.
    pub fn allocate(context: &Arc<Context>, len: u64) -> Result<Self, DriverError> {
        let handle = context.make_memory(len)?;
        Self::map(context, handle, len as usize)
    }

    fn map(context: &Arc<Context>, handle: u64, len: usize) -> Result<Self, DriverError> {
        let driver = &context.driver;
        let mut address = 0;
        // SAFETY: `address` is a place for an address.
        let reserved = unsafe { driver.cuMemAddressReserve(&mut address, len, 0, 0, 0) };
        if let Err(error) = reserved {
            // SAFETY: the handle is ours and used nowhere.
            let _ = unsafe { driver.cuMemRelease(handle) };
            return Err(error);
        }
        // From here on dropping `block` undoes what was done; unmapping what is not mapped is an
        // error that drop passes over.
        let block = Self { context: context.clone(), handle, address, len };
        let access = CUmemAccessDesc {
            location: location(&context.device),
            flags: CUmemAccess_flags::CU_MEM_ACCESS_FLAGS_PROT_READWRITE,
        };
        // SAFETY: the address range was reserved for this, and `access` is one descriptor.
        unsafe {
            driver.cuMemMap(address, len, 0, handle, 0)?;
            driver.cuMemSetAccess(address, len, &access, 1)?;
        }
        Ok(block)
    }

    /// The device that holds the memory.
    pub fn device(&self) -> &Device {
        &self.context.device
    }

    /// Where gpucr sees the memory.
    pub fn address(&self) -> u64 {
        self.address
    }

    /// Bytes.
    pub fn len(&self) -> u64 {
        self.len as u64
    }

    /// Whether it has no bytes; the driver makes no such memory.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// A file descriptor that keeps the memory alive and can be passed to another process. Only
    /// for memory made by [`SharedBlock::allocate`]: imported memory cannot be exported again.
    ///
    /// # Errors
    /// The driver's, for instance since the memory was imported. The block is as it was.
    pub fn export(&self) -> Result<OwnedFd, DriverError> {
        self.context.export(self.handle)
    }
}

impl Drop for SharedBlock {
    fn drop(&mut self) {
        let driver = &self.context.driver;
        // SAFETY: address and handle are ours; nothing uses the memory through them any more,
        // since all copies are waited for before a block is dropped.
        unsafe {
            let _ = driver.cuMemUnmap(self.address, self.len);
            let _ = driver.cuMemRelease(self.handle);
            if let Err(error) = driver.cuMemAddressFree(self.address, self.len) {
                tracing::warn!(%error, "an address range could not be given back");
            }
        }
    }
}

fn location(device: &Device) -> CUmemLocation {
    CUmemLocation { type_: CUmemLocationType::CU_MEM_LOCATION_TYPE_DEVICE, id: device.ordinal }
}
