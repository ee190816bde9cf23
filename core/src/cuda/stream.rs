//! What a device does in order: streams of copies and kernels, and events that tell how far one has come.

use std::ffi::{CStr, CString, c_void};
use std::sync::Arc;
use std::time::{Duration, Instant};

use super::context::Context;
use super::driver::{DriverError, code};
use super::staging::{Pinned, Staging};

/// `CU_STREAM_NON_BLOCKING`.
const NON_BLOCKING: u32 = 1;
/// `CU_EVENT_DISABLE_TIMING`. Not `CU_EVENT_BLOCKING_SYNC`, which makes an interrupt of each wait, all of them on
/// the same CPU.
const PLAIN: u32 = 2;
/// How long a thread that waits for an event sleeps between two questions: less than the copy of a chunk takes
/// (`docs/results/concurrent-copies.md`, "Waiting for copies").
pub(super) const NAP: Duration = Duration::from_micros(30);
/// How long one that expects it soon asks without sleeping.
const MOMENT: Duration = Duration::from_millis(1);

/// A stream of a context.
#[derive(Debug)]
pub struct Stream {
    context: Arc<Context>,
    handle: *mut c_void,
}

// SAFETY: streams may be used from any thread on which their context is current.
unsafe impl Send for Stream {}
// SAFETY: several threads may use a stream at once: the driver locks internally.
unsafe impl Sync for Stream {}

impl Stream {
    /// Makes a stream that waits for no other.
    ///
    /// # Errors
    /// The driver's: it makes no stream, or the context is of no use any more.
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
    ///
    /// # Errors
    /// The errors of [`copy_out_to_row`](Self::copy_out_to_row).
    pub fn copy_out(&self, from: u64, to: &mut Staging, len: usize) -> Result<(), DriverError> {
        self.copy_out_to_row(from, [to], len)
    }

    /// Starts one copy from device memory into buffers that follow each other.
    ///
    /// # Errors
    /// The driver's: no such device memory, or an earlier piece of work on the device has failed. What was started
    /// before may still be under way.
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
    ///
    /// # Errors
    /// The errors of [`copy_out_to_row`](Self::copy_out_to_row).
    pub fn copy_in(&self, from: &Staging, to: u64, len: usize) -> Result<(), DriverError> {
        assert!(len <= from.len, "the staging buffer is too small");
        // SAFETY: `from` has `len` bytes, and the caller keeps it until the copy has ended.
        unsafe {
            self.context.driver.cuMemcpyHtoDAsync_v2(to, from.memory.cast(), len, self.handle)
        }
    }

    /// Starts a copy of `len` bytes of pinned memory, from its byte `at` on, to device memory; it must not be
    /// given back until the stream has been waited for.
    ///
    /// # Errors
    /// The errors of [`copy_out_to_row`](Self::copy_out_to_row).
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
    ///
    /// # Errors
    /// The errors of [`copy_out_to_row`](Self::copy_out_to_row).
    pub fn copy_within(&self, from: u64, to: u64, len: usize) -> Result<(), DriverError> {
        // SAFETY: takes no host pointer; a bad device address is the driver's error.
        unsafe { self.context.driver.cuMemcpyDtoDAsync_v2(to, from, len, self.handle) }
    }

    /// Fills device memory with one byte.
    ///
    /// # Errors
    /// The errors of [`copy_out_to_row`](Self::copy_out_to_row).
    pub fn fill(&self, to: u64, value: u8, len: usize) -> Result<(), DriverError> {
        // SAFETY: takes no host pointer; a bad device address is the driver's error.
        unsafe { self.context.driver.cuMemsetD8Async(to, value, len, self.handle) }
    }

    /// Records `event` behind everything that was started so far.
    ///
    /// # Errors
    /// The driver's, for instance if an earlier piece of work on the device has failed. To wait for the event then says
    /// nothing about this point of the stream.
    pub fn record(&self, event: &Event) -> Result<(), DriverError> {
        // SAFETY: both handles are live.
        unsafe { self.context.driver.cuEventRecord(event.handle, self.handle) }
    }

    /// Waits for everything that was started so far.
    ///
    /// # Errors
    /// The driver's: a piece of work on the device has failed. What that was to write holds anything.
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
    ///
    /// # Errors
    /// The driver's: it cannot compile the PTX, or finds no such kernel in it. Nothing stays loaded.
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
    /// # Errors
    /// The driver's: it does not accept the launch, and the kernel does not run; or an earlier piece of work on the
    /// device has failed. What the kernel itself does wrong shows only in [`Stream::synchronize`] or later calls.
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
// SAFETY: events may be waited for on several threads at once.
unsafe impl Sync for Event {}

impl Event {
    /// Makes an event without timing.
    ///
    /// # Errors
    /// The driver's: it makes no event, or the context is of no use any more.
    pub fn create(context: &Arc<Context>) -> Result<Self, DriverError> {
        context.enter()?;
        let mut handle = std::ptr::null_mut();
        // SAFETY: `handle` is a place for an event.
        unsafe { context.driver.cuEventCreate(&mut handle, PLAIN)? };
        Ok(Self { context: context.clone(), handle })
    }

    /// Waits until the last record of it has happened, which is expected within [`MOMENT`]: asks again and
    /// again for so long before it sleeps, but lets other threads have the processor.
    ///
    /// # Errors
    /// The errors of [`wait`](Self::wait).
    pub fn wait_soon(&self) -> Result<(), DriverError> {
        self.wait_awake(std::thread::yield_now)
    }

    /// Waits as [`wait_soon`](Self::wait_soon) does, for a thread that goes on at once: it keeps the processor.
    ///
    /// # Errors
    /// The errors of [`wait`](Self::wait).
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
    ///
    /// # Errors
    /// The driver's: a piece of work on the device has failed, so what was before the event may not have been done.
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
