//! Contexts, the thread's stack of current contexts, and ordering among a context's streams.

use std::cell::RefCell;
use std::collections::{HashMap, HashSet};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering};
use std::thread::ThreadId;

use parking_lot::Mutex;

use crate::arrays::ARRAYS;
use crate::capture;
use crate::device_memory;
use crate::events::EVENTS;
use crate::exclusive;
use crate::faults;
use crate::graphs::Work;
use crate::handles::{Table, new_handle};
use crate::host_memory;
use crate::ipc;
use crate::managed_memory;
use crate::modules;
use crate::operations::Operation;
use crate::process::{MAX_DEVICES, is_forked, settings};
use crate::status::{Code, Outcome};
use crate::streams::{NON_BLOCKING, Position, Stream};

/// All contexts.
pub(crate) static CONTEXTS: Table<Context> = Table::new();
/// The streams that programs have created.
pub(crate) static STREAMS: Table<Stream> = Table::new();

/// `CU_STREAM_LEGACY`, a name for the legacy default stream.
const LEGACY: u64 = 1;
/// `CU_STREAM_PER_THREAD`, a name for the default stream of the calling thread.
const PER_THREAD: u64 = 2;

/// Number of limits that `cuCtxSetLimit` knows and this driver keeps: stack, printf, heap, sync
/// depth, pending launches, L2 fetch, persisting L2.
const LIMITS: usize = 7;
const DEFAULT_LIMITS: [u64; LIMITS] = [1024, 1 << 20, 8 << 20, 2, 2048, 64, 0];

/// Which stream a function means by stream 0.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum DefaultStream {
    /// The stream that synchronises with all blocking streams.
    Legacy,
    /// One stream for each thread (functions ending in `_ptds` and `_ptsz`).
    PerThread,
}

/// A context.
pub(crate) struct Context {
    /// The value that programs hold; also `cuCtxGetId`.
    pub(crate) handle: u64,
    /// Ordinal of the device.
    pub(crate) device: usize,
    /// Flags as given or set.
    pub(crate) flags: AtomicU32,
    /// Whether it is a device's primary context.
    pub(crate) is_primary: bool,
    /// Cache preference, kept and reported only.
    pub(crate) cache_config: AtomicU32,
    /// Shared memory bank size, kept and reported only.
    pub(crate) shared_config: AtomicU32,
    /// Raised when running kernels shall stop (the context is being destroyed after a failure).
    pub(crate) cancel: AtomicBool,
    /// Contexts of other devices whose memory work of this one may access. Kept and reported; the
    /// memory can be accessed anyway.
    pub(crate) peers: Mutex<HashSet<u64>>,
    limits: [AtomicU64; LIMITS],
    /// The first failure of work in this context; all later calls report it.
    failure: AtomicU32,
    destroyed: AtomicBool,
    legacy: Arc<Stream>,
    /// Streams of programs and of threads. The lock also makes "look where the others are, then
    /// submit" one step.
    streams: Mutex<Streams>,
}

#[derive(Default)]
struct Streams {
    created: Vec<Arc<Stream>>,
    of_threads: HashMap<ThreadId, Arc<Stream>>,
    /// Ends of streams that are gone, as long as they are not reached.
    retired: Vec<Position>,
}

impl Streams {
    fn all(&self) -> impl Iterator<Item = &Arc<Stream>> {
        self.created.iter().chain(self.of_threads.values())
    }
}

thread_local! {
    static STACK: RefCell<Vec<Arc<Context>>> = const { RefCell::new(Vec::new()) };
}

/// The contexts in which this thread has a default stream of its own, which ends with the thread.
struct OwnStreams(RefCell<Vec<u64>>);

impl Drop for OwnStreams {
    fn drop(&mut self) {
        // In the child of a fork locks may be held for ever.
        if is_forked() {
            return;
        }
        for context in self.0.take().into_iter().filter_map(|handle| CONTEXTS.get(handle)) {
            let stream = context.streams.lock().of_threads.remove(&std::thread::current().id());
            if let Some(stream) = stream {
                context.retire(&stream);
            }
        }
    }
}

thread_local! {
    static OWN_STREAMS: OwnStreams = const { OwnStreams(RefCell::new(Vec::new())) };
}

/// The context that is current to this thread, usable or not.
pub(crate) fn top() -> Option<Arc<Context>> {
    STACK.with_borrow(|stack| stack.last().cloned())
}

/// The context that is current to this thread.
///
/// # Errors
/// `INVALID_CONTEXT` without one, `CONTEXT_IS_DESTROYED` after its end, and the failure of its
/// work if there was one.
pub(crate) fn current() -> Outcome<Arc<Context>> {
    let context = top().ok_or(Code::INVALID_CONTEXT)?;
    context.check()?;
    Ok(context)
}

/// Makes a context current, on top of the others.
pub(crate) fn push(context: Arc<Context>) {
    STACK.with_borrow_mut(|stack| stack.push(context));
}

/// Takes the current context off.
///
/// # Errors
/// `INVALID_CONTEXT` without one.
pub(crate) fn pop() -> Outcome<Arc<Context>> {
    STACK.with_borrow_mut(Vec::pop).ok_or(Code::INVALID_CONTEXT)
}

/// Replaces the current context; `None` takes it off.
pub(crate) fn set_current(context: Option<Arc<Context>>) {
    STACK.with_borrow_mut(|stack| {
        stack.pop();
        stack.extend(context);
    });
}

/// The context behind a handle.
///
/// # Errors
/// `INVALID_CONTEXT` for anything else.
pub(crate) fn by_handle(handle: u64) -> Outcome<Arc<Context>> {
    CONTEXTS.get(handle).ok_or(Code::INVALID_CONTEXT)
}

/// Creates a context on a device.
///
/// # Errors
/// `DEVICE_UNAVAILABLE` when the device is in exclusive mode and another process has it; `OUT_OF_MEMORY`
/// without room for what each context is set to take.
pub(crate) fn create(device: usize, flags: u32, is_primary: bool) -> Outcome<Arc<Context>> {
    faults::present()?;
    exclusive::acquire(device)?;
    let handle = new_handle();
    if settings().context_memory > 0 {
        // Freed with all that belongs to the context.
        device_memory::allocate(device, handle, settings().context_memory)
            .inspect_err(|_| exclusive::release(device))?;
    }
    let context = Arc::new(Context {
        handle,
        device,
        flags: AtomicU32::new(flags),
        is_primary,
        cache_config: AtomicU32::new(0),
        shared_config: AtomicU32::new(1),
        cancel: AtomicBool::new(false),
        peers: Mutex::default(),
        limits: DEFAULT_LIMITS.map(AtomicU64::new),
        failure: AtomicU32::new(0),
        destroyed: AtomicBool::new(false),
        legacy: Stream::new(new_handle(), handle, 0, 0),
        streams: Mutex::default(),
    });
    CONTEXTS.insert(handle, context.clone());
    Ok(context)
}

/// Ends a context: its work is waited for, then everything that belongs to it is freed.
pub(crate) fn destroy(context: &Arc<Context>) {
    if context.destroyed.swap(true, Ordering::SeqCst) {
        return;
    }
    if context.failure.load(Ordering::SeqCst) != 0 {
        context.cancel.store(true, Ordering::SeqCst);
    }
    context.wait_all();
    CONTEXTS.remove(context.handle);
    for stream in STREAMS.remove_where(|s| s.context == context.handle) {
        stream.close();
    }
    let streams = std::mem::take(&mut *context.streams.lock());
    for stream in streams.all() {
        capture::forget(stream.handle);
        stream.close();
    }
    context.legacy.close();
    EVENTS.remove_where(|event| event.context == context.handle);
    modules::unload_context(context.handle);
    ARRAYS.remove_where(|array| array.context == context.handle);
    device_memory::free_context(context.handle);
    host_memory::free_context(context.handle);
    managed_memory::free_context(context.handle);
    ipc::close_context(context.handle);
    STACK.with_borrow_mut(|stack| {
        if stack.last().is_some_and(|top| Arc::ptr_eq(top, context)) {
            stack.pop();
        }
    });
    exclusive::release(context.device);
}

impl Context {
    /// Fails as every call does when the context cannot be used any more.
    ///
    /// # Errors
    /// `CONTEXT_IS_DESTROYED`, or the failure of its work.
    pub(crate) fn check(&self) -> Outcome {
        if self.destroyed.load(Ordering::Relaxed) {
            return Err(Code::CONTEXT_IS_DESTROYED);
        }
        match self.failure.load(Ordering::Relaxed) {
            0 => faults::present(),
            code => Err(Code(code)),
        }
    }

    /// Records a failure of work; the first one stays.
    pub(crate) fn fail(&self, code: Code) {
        let _ = self.failure.compare_exchange(0, code.0, Ordering::SeqCst, Ordering::SeqCst);
    }

    /// Whether work has failed.
    pub(crate) fn has_failed(&self) -> bool {
        self.failure.load(Ordering::Relaxed) != 0
    }

    /// The value of a limit.
    ///
    /// # Errors
    /// `UNSUPPORTED_LIMIT` for one that does not exist here.
    pub(crate) fn limit(&self, limit: u32) -> Outcome<&AtomicU64> {
        self.limits.get(limit as usize).ok_or(Code::UNSUPPORTED_LIMIT)
    }

    /// Creates a stream.
    pub(crate) fn create_stream(&self, flags: u32, priority: i32) -> Arc<Stream> {
        let stream = Stream::new(new_handle(), self.handle, flags, priority);
        self.streams.lock().created.push(stream.clone());
        STREAMS.insert(stream.handle, stream.clone());
        stream
    }

    /// Removes a stream; its work goes on to the end.
    pub(crate) fn destroy_stream(&self, stream: &Arc<Stream>) {
        STREAMS.remove(stream.handle);
        self.streams.lock().created.retain(|other| !Arc::ptr_eq(other, stream));
        self.retire(stream);
    }

    /// Lets a stream end that nobody can name any more.
    fn retire(&self, stream: &Arc<Stream>) {
        capture::forget(stream.handle);
        let last = stream.last();
        if !last.is_reached() {
            // Whoever waits for all streams must still wait for what is under way.
            self.streams.lock().retired.push(last);
        }
        stream.close();
    }

    /// The stream that a handle means, special names included.
    ///
    /// # Errors
    /// `INVALID_HANDLE` for an unknown handle.
    pub(crate) fn stream(&self, handle: u64, default: DefaultStream) -> Outcome<Arc<Stream>> {
        match (handle, default) {
            (LEGACY, _) | (0, DefaultStream::Legacy) => Ok(self.legacy.clone()),
            (PER_THREAD, _) | (0, DefaultStream::PerThread) => {
                let mut streams = self.streams.lock();
                let stream =
                    streams.of_threads.entry(std::thread::current().id()).or_insert_with(|| {
                        // Fails only while the thread ends, when nobody is left to clean up for.
                        let _ = OWN_STREAMS.try_with(|own| own.0.borrow_mut().push(self.handle));
                        Stream::new(new_handle(), self.handle, 0, 0)
                    });
                Ok(stream.clone())
            }
            _ => STREAMS.get(handle).ok_or(Code::INVALID_HANDLE),
        }
    }

    /// Whether a stream is the legacy default stream.
    pub(crate) fn is_legacy(&self, stream: &Arc<Stream>) -> bool {
        Arc::ptr_eq(stream, &self.legacy)
    }

    /// Adds an operation to a stream of this context, or to the graph that the stream captures.
    ///
    /// # Errors
    /// As [`Context::submit`], and `STREAM_CAPTURE_INVALIDATED`.
    pub(crate) fn enqueue(
        self: &Arc<Self>,
        stream: &Arc<Stream>,
        operation: Operation,
    ) -> Outcome<Option<Position>> {
        if capture::record(stream, Work::Operation(operation.clone(), self.handle))? {
            return Ok(None);
        }
        let owner = self.clone();
        self.submit(stream, Vec::new(), move || operation.run(&owner)).map(Some)
    }

    /// Adds work to a stream of this context, in order with the legacy default stream.
    ///
    /// # Errors
    /// `OPERATING_SYSTEM` when no thread can be started; those of [`capture::refuse`], as this
    /// work cannot be captured.
    pub(crate) fn submit(
        &self,
        stream: &Arc<Stream>,
        mut after: Vec<Position>,
        work: impl FnOnce() + Send + 'static,
    ) -> Outcome<Position> {
        capture::refuse(self, stream)?;
        let mut streams = self.streams.lock();
        if self.is_legacy(stream) {
            let blocking = streams.all().filter(|s| s.flags & NON_BLOCKING == 0);
            after.extend(blocking.map(Stream::last).filter(|p| !p.is_reached()));
            // Retired streams are few, so blocking or not is not told apart.
            streams.retired.retain(|position| !position.is_reached());
            after.extend(streams.retired.iter().cloned());
        } else if stream.flags & NON_BLOCKING == 0 {
            after.extend(Some(self.legacy.last()).filter(|p| !p.is_reached()));
        }
        stream.submit(after, work)
    }

    /// A point that is reached when a stream is done, including, for the legacy default stream,
    /// all streams that synchronise with it.
    ///
    /// # Errors
    /// As [`Context::submit`].
    pub(crate) fn submit_marker(&self, stream: &Arc<Stream>) -> Outcome<Position> {
        if self.is_idle(stream) {
            return Ok(stream.last());
        }
        if self.is_legacy(stream) {
            self.submit(stream, Vec::new(), || ())
        } else {
            Ok(stream.last())
        }
    }

    /// Whether a stream (see [`Context::submit_marker`]) has nothing left to do.
    pub(crate) fn is_idle(&self, stream: &Arc<Stream>) -> bool {
        if !stream.last().is_reached() {
            return false;
        }
        if !self.is_legacy(stream) {
            return true;
        }
        let streams = self.streams.lock();
        let mut blocking = streams.all().filter(|stream| stream.flags & NON_BLOCKING == 0);
        blocking.all(|stream| stream.last().is_reached())
            && streams.retired.iter().all(Position::is_reached)
    }

    /// The ends of all streams, as of now.
    pub(crate) fn positions(&self) -> Vec<Position> {
        let mut streams = self.streams.lock();
        streams.retired.retain(|position| !position.is_reached());
        let retired = streams.retired.iter().cloned();
        streams.all().chain([&self.legacy]).map(Stream::last).chain(retired).collect()
    }

    /// Waits for all work submitted so far.
    pub(crate) fn wait_all(&self) {
        for position in self.positions() {
            position.wait();
        }
    }
}

/// The context of a stream, for calls that name only the stream.
///
/// # Errors
/// As [`current`] and [`Context::stream`].
pub(crate) fn stream_and_context(
    handle: u64,
    default: DefaultStream,
) -> Outcome<(Arc<Stream>, Arc<Context>)> {
    if !is_default_stream(handle) {
        let stream = STREAMS.get(handle).ok_or(Code::INVALID_HANDLE)?;
        let context = CONTEXTS.get(stream.context).ok_or(Code::CONTEXT_IS_DESTROYED)?;
        context.check()?;
        return Ok((stream, context));
    }
    let context = current()?;
    Ok((context.stream(handle, default)?, context))
}

/// Whether this names a default stream.
pub(crate) fn is_default_stream(handle: u64) -> bool {
    handle <= PER_THREAD
}

/// Waits for all work of all contexts in this process.
pub(crate) fn wait_everything() {
    for context in CONTEXTS.all() {
        context.wait_all();
    }
}

/// Does something while no work is under way and none can be submitted.
pub(crate) fn while_idle<T>(act: impl FnOnce() -> T) -> T {
    loop {
        // Not under the locks: work may wait for work that is yet to be submitted.
        wait_everything();
        let mut contexts = CONTEXTS.all();
        contexts.sort_unstable_by_key(|context| context.handle);
        let locked: Vec<_> = contexts.iter().map(|context| context.streams.lock()).collect();
        let created = locked.iter().flat_map(|streams| streams.all());
        let mut all = created.chain(contexts.iter().map(|context| &context.legacy));
        let idle = all.all(|stream| stream.last().is_reached())
            && locked.iter().all(|streams| streams.retired.iter().all(Position::is_reached));
        if idle {
            return act();
        }
    }
}

/// A device's primary context.
#[derive(Default)]
struct Primary {
    context: Option<Arc<Context>>,
    references: u64,
    flags: u32,
}

static PRIMARY: [Mutex<Primary>; MAX_DEVICES] =
    [const { Mutex::new(Primary { context: None, references: 0, flags: 0 }) }; MAX_DEVICES];

/// The primary context of a device, created if need be; counts a reference.
///
/// # Errors
/// As [`create`].
pub(crate) fn retain_primary(device: usize) -> Outcome<Arc<Context>> {
    let mut primary = PRIMARY[device].lock();
    let context = match &primary.context {
        Some(context) => context.clone(),
        None => create(device, primary.flags, true)?,
    };
    primary.context = Some(context.clone());
    primary.references += 1;
    Ok(context)
}

/// Drops a reference to the primary context; the last one destroys it.
///
/// # Errors
/// `INVALID_CONTEXT` when there is no reference.
pub(crate) fn release_primary(device: usize) -> Outcome {
    let mut primary = PRIMARY[device].lock();
    primary.references = primary.references.checked_sub(1).ok_or(Code::INVALID_CONTEXT)?;
    if primary.references == 0
        && let Some(context) = primary.context.take()
    {
        destroy(&context);
    }
    Ok(())
}

/// Destroys the primary context, whoever refers to it.
pub(crate) fn reset_primary(device: usize) {
    let mut primary = PRIMARY[device].lock();
    primary.references = 0;
    if let Some(context) = primary.context.take() {
        destroy(&context);
    }
}

/// Flags of the primary context and whether it exists.
pub(crate) fn primary_state(device: usize) -> (u32, bool) {
    let primary = PRIMARY[device].lock();
    match &primary.context {
        Some(context) => (context.flags.load(Ordering::Relaxed), true),
        None => (primary.flags, false),
    }
}

/// Sets the flags of the primary context.
pub(crate) fn set_primary_flags(device: usize, flags: u32) {
    let mut primary = PRIMARY[device].lock();
    primary.flags = flags;
    if let Some(context) = &primary.context {
        context.flags.store(flags, Ordering::Relaxed);
    }
}
