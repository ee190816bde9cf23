//! A context of gpucr's own on a device, and what lives in it: streams, and physical memory that is shared
//! with a program.

use std::ffi::{CStr, CString, c_int, c_void};
use std::os::fd::{AsRawFd, BorrowedFd, FromRawFd, OwnedFd};
use std::sync::Arc;
use std::time::{Duration, Instant};

use cudarc::driver::sys::{
    CUmemAccess_flags, CUmemAccessDesc, CUmemAllocationHandleType, CUmemAllocationProp,
    CUmemAllocationType, CUmemLocation, CUmemLocationType,
};

use super::driver::{Device, Driver, DriverError, code};
use super::staging::{Pinned, Staging};

/// Physical device memory is given out in multiples of this.
pub const GRANULE: u64 = 2 << 20;
/// `CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR`.
const POSIX_FD: u32 = 1;
/// `CU_STREAM_NON_BLOCKING`.
const NON_BLOCKING: u32 = 1;
/// `CU_EVENT_DISABLE_TIMING`. Not `CU_EVENT_BLOCKING_SYNC`, which makes an interrupt of each wait, all of them on
/// the same CPU.
const PLAIN: u32 = 2;
/// How long a thread that waits for an event sleeps between two questions: less than the copy of a chunk takes
/// (`docs/results/beside.md`, "Waiting for copies").
pub(super) const NAP: Duration = Duration::from_micros(30);
/// How long one that expects it soon asks without sleeping.
const MOMENT: Duration = Duration::from_millis(1);

/// A context on one device, destroyed on drop together with what is left in it.
#[derive(Debug)]
pub struct Context {
    pub(super) driver: Arc<Driver>,
    device: Device,
    handle: *mut c_void,
}

// SAFETY: a context handle may be made current on any thread; the driver locks internally.
unsafe impl Send for Context {}
// SAFETY: as above; every call here first makes the context current on its own thread.
unsafe impl Sync for Context {}

impl Context {
    /// Makes a context on `device`. It takes 260 to 530 MiB of the device's memory.
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
    pub fn free_memory(&self) -> Result<u64, DriverError> {
        self.enter()?;
        let (mut free, mut total) = (0, 0);
        // SAFETY: both are places for a size.
        unsafe { self.driver.cuMemGetInfo_v2(&mut free, &mut total)? };
        Ok(free as u64)
    }

    /// Makes new memory of the device, of which nothing is left here but the descriptor; `len` is a multiple of
    /// [`GRANULE`]. It is free again when the last copy of that is closed, in whatever process.
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

    /// A descriptor of memory that was made here.
    fn export(&self, handle: u64) -> Result<OwnedFd, DriverError> {
        let mut fd: c_int = -1;
        // SAFETY: `fd` is a place for a file descriptor, which is what this handle type gives.
        unsafe { self.driver.cuMemExportToShareableHandle(&mut fd, handle, POSIX_FD, 0)? };
        // SAFETY: the driver made the descriptor for us.
        Ok(unsafe { OwnedFd::from_raw_fd(fd) })
    }

    /// Makes the context current on this thread, which every use of a stream or memory needs.
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

/// A stream of a context.
#[derive(Debug)]
pub struct Stream {
    context: Arc<Context>,
    handle: *mut c_void,
}

// SAFETY: streams may be used from any thread on which their context is current.
unsafe impl Send for Stream {}
// SAFETY: as above, by several at once: the driver locks internally.
unsafe impl Sync for Stream {}

impl Stream {
    /// Makes a stream that waits for no other.
    pub fn create(context: &Arc<Context>) -> Result<Self, DriverError> {
        context.enter()?;
        let mut handle = std::ptr::null_mut();
        // SAFETY: `handle` is a place for a stream.
        unsafe { context.driver.cuStreamCreate(&mut handle, NON_BLOCKING)? };
        Ok(Self { context: context.clone(), handle })
    }

    /// The context that it belongs to.
    pub fn context(&self) -> &Arc<Context> {
        &self.context
    }

    /// Starts a copy from device memory into staging memory. The bytes are there once an event
    /// recorded behind it has happened; `to` must stay alive until then.
    pub fn copy_out(&self, from: u64, to: &mut Staging, len: usize) -> Result<(), DriverError> {
        self.copy_out_to_row(from, [to], len)
    }

    /// The same into buffers that follow each other, all in one copy.
    pub fn copy_out_to_row<'a>(
        &self,
        from: u64,
        to: impl IntoIterator<Item = &'a mut Staging>,
        len: usize,
    ) -> Result<(), DriverError> {
        let mut to = to.into_iter();
        let first = to.next().expect("there is a buffer");
        let mut end = first.memory.wrapping_add(first.len);
        for next in to {
            let is_next = Arc::ptr_eq(&first.allocation, &next.allocation) && next.memory == end;
            assert!(is_next, "the buffers do not follow each other");
            end = end.wrapping_add(next.len);
        }
        assert!(len <= end.addr() - first.memory.addr(), "the staging buffers are too small");
        // SAFETY: the buffers, which are borrowed exclusively, are `len` bytes of one allocation, and the caller keeps
        // them until the copy has ended.
        unsafe {
            let to = first.memory.cast();
            self.context.driver.cuMemcpyDtoHAsync_v2(to, from, len, self.handle)
        }
    }

    /// Starts a copy from staging memory to device memory; `from` must stay alive and unchanged
    /// until an event recorded behind it has happened.
    pub fn copy_in(&self, from: &Staging, to: u64, len: usize) -> Result<(), DriverError> {
        assert!(len <= from.len, "the staging buffer is too small");
        // SAFETY: `from` has `len` bytes, and the caller keeps it until the copy has ended.
        unsafe {
            self.context.driver.cuMemcpyHtoDAsync_v2(to, from.memory.cast(), len, self.handle)
        }
    }

    /// Starts a copy of `len` bytes of pinned memory, from its byte `at` on, to device memory; it must not be
    /// given back until the stream has been waited for.
    pub fn copy_from(
        &self,
        from: &Pinned,
        at: usize,
        to: u64,
        len: usize,
    ) -> Result<(), DriverError> {
        assert!(at.checked_add(len).is_some_and(|end| end <= from.len), "beyond the pinned memory");
        // SAFETY: within memory that is mapped as long as `from` lives, which the caller keeps.
        unsafe {
            let bytes = from.memory.add(at).cast();
            self.context.driver.cuMemcpyHtoDAsync_v2(to, bytes, len, self.handle)
        }
    }

    /// Starts a copy within the device.
    pub fn copy_within(&self, from: u64, to: u64, len: usize) -> Result<(), DriverError> {
        // SAFETY: takes no host pointer; a bad device address is the driver's error.
        unsafe { self.context.driver.cuMemcpyDtoDAsync_v2(to, from, len, self.handle) }
    }

    /// Fills device memory with one byte.
    pub fn fill(&self, to: u64, value: u8, len: usize) -> Result<(), DriverError> {
        // SAFETY: takes no host pointer; a bad device address is the driver's error.
        unsafe { self.context.driver.cuMemsetD8Async(to, value, len, self.handle) }
    }

    /// Records `event` behind everything that was started so far.
    pub fn record(&self, event: &Event) -> Result<(), DriverError> {
        // SAFETY: both handles are live.
        unsafe { self.context.driver.cuEventRecord(event.handle, self.handle) }
    }

    /// Waits for everything that was started so far.
    pub fn synchronize(&self) -> Result<(), DriverError> {
        // SAFETY: the handle is live.
        unsafe { self.context.driver.cuStreamSynchronize(self.handle) }
    }
}

impl Drop for Stream {
    fn drop(&mut self) {
        let entered = self.context.enter();
        // SAFETY: made in `create` and destroyed once.
        let gone =
            entered.and_then(|()| unsafe { self.context.driver.cuStreamDestroy_v2(self.handle) });
        if let Err(error) = gone {
            tracing::warn!(%error, "a stream could not be given back");
        }
    }
}

/// One kernel, loaded from PTX.
#[derive(Debug)]
pub struct Module {
    context: Arc<Context>,
    handle: *mut c_void,
    function: *mut c_void,
}

// SAFETY: handles that may be used on any thread on which their context is current.
unsafe impl Send for Module {}

impl Module {
    /// Compiles `ptx` and takes the kernel `name` of it. PTX must contain no zero byte.
    pub fn load(context: &Arc<Context>, ptx: &str, name: &CStr) -> Result<Self, DriverError> {
        context.enter()?;
        let ptx = CString::new(ptx).expect("PTX is text");
        let mut handle = std::ptr::null_mut();
        // SAFETY: `handle` is a place for a module, and the text ends with a zero byte.
        unsafe { context.driver.cuModuleLoadData(&mut handle, ptx.as_ptr().cast())? };
        // From here on the drop of `module` unloads it.
        let mut module = Self { context: context.clone(), handle, function: std::ptr::null_mut() };
        // SAFETY: `function` is a place for a function, and the name ends with a zero byte.
        unsafe {
            context.driver.cuModuleGetFunction(&mut module.function, handle, name.as_ptr())?;
        }
        Ok(module)
    }

    /// Starts the kernel on `stream` with so many blocks of so many threads.
    ///
    /// # Safety
    ///
    /// `arguments` point at values of the types that the kernel takes, and what these point to
    /// stays as the kernel needs it until the stream has finished.
    pub unsafe fn launch(
        &self,
        stream: &Stream,
        blocks: u32,
        threads: u32,
        arguments: &mut [*mut c_void],
    ) -> Result<(), DriverError> {
        let (arguments, none) = (arguments.as_mut_ptr(), std::ptr::null_mut());
        let (function, stream) = (self.function, stream.handle);
        // SAFETY: the handles are live; for the arguments the caller answers.
        unsafe {
            self.context
                .driver
                .cuLaunchKernel(function, blocks, 1, 1, threads, 1, 1, 0, stream, arguments, none)
        }
    }
}

impl Drop for Module {
    fn drop(&mut self) {
        let entered = self.context.enter();
        // SAFETY: loaded in `load` and unloaded once; its kernels have finished.
        let gone =
            entered.and_then(|()| unsafe { self.context.driver.cuModuleUnload(self.handle) });
        if let Err(error) = gone {
            tracing::warn!(%error, "a module could not be unloaded");
        }
    }
}

/// A point in a stream that can be waited for.
#[derive(Debug)]
pub struct Event {
    context: Arc<Context>,
    handle: *mut c_void,
}

// SAFETY: events may be waited for on any thread.
unsafe impl Send for Event {}
// SAFETY: as above, on several at once.
unsafe impl Sync for Event {}

impl Event {
    /// Makes an event without timing.
    pub fn create(context: &Arc<Context>) -> Result<Self, DriverError> {
        context.enter()?;
        let mut handle = std::ptr::null_mut();
        // SAFETY: `handle` is a place for an event.
        unsafe { context.driver.cuEventCreate(&mut handle, PLAIN)? };
        Ok(Self { context: context.clone(), handle })
    }

    /// Waits until the last record of it has happened, which is expected within [`MOMENT`]: asks again and
    /// again for so long before it sleeps, but lets other threads have the processor.
    pub fn wait_soon(&self) -> Result<(), DriverError> {
        self.wait_awake(std::thread::yield_now)
    }

    /// The same for a thread that goes on as soon as it has happened: it keeps the processor.
    pub fn wait_busily(&self) -> Result<(), DriverError> {
        self.wait_awake(std::hint::spin_loop)
    }

    fn wait_awake(&self, between: impl Fn()) -> Result<(), DriverError> {
        let since = Instant::now();
        while since.elapsed() <= MOMENT {
            if self.has_happened()? {
                return Ok(());
            }
            between();
        }
        self.wait()
    }

    /// Waits until the last record of it has happened. Takes little of the processor.
    pub fn wait(&self) -> Result<(), DriverError> {
        while !self.has_happened()? {
            std::thread::sleep(NAP);
        }
        Ok(())
    }

    fn has_happened(&self) -> Result<bool, DriverError> {
        // SAFETY: the handle is live.
        match unsafe { self.context.driver.cuEventQuery(self.handle) } {
            Err(error) if error.code == code::NOT_READY => Ok(false),
            other => other.map(|()| true),
        }
    }
}

impl Drop for Event {
    fn drop(&mut self) {
        let entered = self.context.enter();
        // SAFETY: made in `create` and destroyed once.
        let gone =
            entered.and_then(|()| unsafe { self.context.driver.cuEventDestroy_v2(self.handle) });
        if let Err(error) = gone {
            tracing::warn!(%error, "an event could not be given back");
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
