//! Contexts and the thread's stack of current contexts. How contexts begin and end is in
//! `lifetime.rs`, how their streams get work in `submission.rs`.

use std::cell::RefCell;
use std::collections::{HashMap, HashSet};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering};
use std::thread::ThreadId;

use parking_lot::Mutex;

use crate::faults;
use crate::handles::{Table, new_handle};
use crate::kernel_heap::KernelHeap;
use crate::prints::Prints;
use crate::status::{Code, Outcome};
use crate::streams::{NON_BLOCKING, Position, Stream};

/// All contexts.
pub(crate) static CONTEXTS: Table<Context> = Table::new();
/// The streams that programs have created.
pub(crate) static STREAMS: Table<Stream> = Table::new();

/// Number of limits that `cuCtxSetLimit` knows and this driver keeps: stack, printf, heap, sync
/// depth, pending launches, L2 fetch, persisting L2.
const LIMITS: usize = 7;
const DEFAULT_LIMITS: [u64; LIMITS] = [1024, 1 << 20, 8 << 20, 2, 2048, 64, 0];

/// `CU_LIMIT_PRINTF_FIFO_SIZE`.
const PRINTF_FIFO: usize = 1;
/// `CU_LIMIT_MALLOC_HEAP_SIZE`.
const HEAP: usize = 2;

/// Bytes for the parameters of kernels that kernels launch: those of 1024 threads, with 4 KiB each, and as much again.
const LAUNCH_ROOM: u64 = 8 << 20;

/// A context.
pub(crate) struct Context {
    /// The value that programs hold; also `cuCtxGetId`.
    pub(crate) handle: u64,
    /// Ordinal of the device.
    pub(crate) device: usize,
    /// Flags as given or set.
    pub(crate) flags: AtomicU32,
    /// How often `cuCtxAttach` was called, and not taken back.
    pub(crate) attached: AtomicU32,
    /// The primary context whose events and functions are this one's too: that of a green context; 0 for others.
    pub(crate) primary: AtomicU64,
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
    pub(crate) failure: AtomicU32,
    /// It has ended, or is about to.
    pub(crate) destroyed: AtomicBool,
    /// What kernels allocate by themselves.
    pub(crate) heap: KernelHeap,
    /// Parameters of kernels that kernels are about to launch.
    pub(crate) launch_room: KernelHeap,
    /// What kernels print.
    pub(crate) prints: Prints,
    /// The legacy default stream.
    pub(crate) legacy: Arc<Stream>,
    /// Streams of programs and of threads. The lock also makes "look where the others are, then
    /// submit" one step.
    pub(crate) streams: Mutex<Streams>,
}

/// The streams of a context, but for the legacy default stream.
#[derive(Default)]
pub(crate) struct Streams {
    /// Those that programs have created.
    pub(crate) created: Vec<Arc<Stream>>,
    /// The default streams of threads.
    pub(crate) of_threads: HashMap<ThreadId, Arc<Stream>>,
    /// Ends of streams that are gone, as long as they are not reached.
    pub(crate) retired: Vec<Position>,
    /// What streams that are yet to come have to wait for.
    pub(crate) barriers: Vec<Position>,
}

impl Streams {
    /// All of them that can still be named.
    pub(crate) fn all(&self) -> impl Iterator<Item = &Arc<Stream>> {
        self.created.iter().chain(self.of_threads.values())
    }
}

thread_local! {
    static STACK: RefCell<Vec<Arc<Context>>> = const { RefCell::new(Vec::new()) };
}

/// The stack of threads that are ending. Libraries call the driver from their own destructors, which may run when the
/// stack of the thread is gone.
static LATE: Mutex<Vec<Arc<Context>>> = Mutex::new(Vec::new());

/// Does something with the stack of this thread.
fn with_stack<T>(act: impl FnOnce(&mut Vec<Arc<Context>>) -> T) -> T {
    if STACK.try_with(|_| ()).is_ok() { STACK.with_borrow_mut(act) } else { act(&mut LATE.lock()) }
}

/// The context that is current to this thread, usable or not.
pub(crate) fn top() -> Option<Arc<Context>> {
    with_stack(|stack| stack.last().cloned())
}

/// The context that is current to this thread.
///
/// # Errors
/// `INVALID_CONTEXT` without one, `CONTEXT_IS_DESTROYED` after its end, and the failure of its
/// work if there was one.
pub(crate) fn current() -> Outcome<Arc<Context>> {
    let mut context = top().ok_or(Code::INVALID_CONTEXT)?;
    if context.is_primary
        && context.destroyed.load(Ordering::Relaxed)
        && let Ok(again) = by_handle(context.handle)
    {
        // A primary context that was reset is the same one again for every thread, once somebody uses it.
        set_current(Some(again.clone()));
        context = again;
    }
    context.check()?;
    Ok(context)
}

/// Makes a context current, on top of the others.
pub(crate) fn push(context: Arc<Context>) {
    with_stack(|stack| stack.push(context));
}

/// Takes the current context off.
///
/// # Errors
/// `INVALID_CONTEXT` without one.
pub(crate) fn pop() -> Outcome<Arc<Context>> {
    with_stack(Vec::pop).ok_or(Code::INVALID_CONTEXT)
}

/// Replaces the current context; `None` takes it off.
pub(crate) fn set_current(context: Option<Arc<Context>>) {
    with_stack(|stack| {
        stack.pop();
        stack.extend(context);
    });
}

/// Takes a context off if it is the current one.
pub(crate) fn take_off(context: &Arc<Context>) {
    with_stack(|stack| {
        if stack.last().is_some_and(|top| Arc::ptr_eq(top, context)) {
            stack.pop();
        }
    });
}

/// The context behind a handle.
///
/// # Errors
/// `INVALID_CONTEXT` for anything else.
pub(crate) fn by_handle(handle: u64) -> Outcome<Arc<Context>> {
    CONTEXTS.get(handle).ok_or(Code::INVALID_CONTEXT)
}

impl Context {
    /// A context that nobody knows yet.
    pub(crate) fn new(handle: u64, device: usize, flags: u32, is_primary: bool) -> Context {
        Context {
            handle,
            device,
            flags: AtomicU32::new(flags),
            attached: AtomicU32::new(0),
            primary: AtomicU64::new(0),
            is_primary,
            cache_config: AtomicU32::new(0),
            shared_config: AtomicU32::new(1),
            cancel: AtomicBool::new(false),
            peers: Mutex::default(),
            limits: DEFAULT_LIMITS.map(AtomicU64::new),
            failure: AtomicU32::new(0),
            destroyed: AtomicBool::new(false),
            heap: KernelHeap::default(),
            launch_room: KernelHeap::default(),
            prints: Prints::default(),
            legacy: Stream::new(new_handle(), handle, 0, 0),
            streams: Mutex::default(),
        }
    }

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

    /// Whether what belongs to a context can be used in this one.
    pub(crate) fn has(&self, context: u64) -> bool {
        context == self.handle || context == self.primary.load(Ordering::Relaxed)
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

    /// Bytes for what kernels print.
    pub(crate) fn print_room(&self) -> u64 {
        self.limits[PRINTF_FIFO].load(Ordering::Relaxed)
    }

    /// Has memory that kernels can allocate, as much as the limit says now.
    ///
    /// # Errors
    /// `OUT_OF_MEMORY`.
    pub(crate) fn need_heap(&self) -> Outcome {
        self.heap.make(self.device, self.handle, self.limits[HEAP].load(Ordering::Relaxed))
    }

    /// Makes the memory for the parameters of kernels that kernels launch, if it is not there.
    ///
    /// # Errors
    /// `OUT_OF_MEMORY`.
    pub(crate) fn need_launch_room(&self) -> Outcome {
        self.launch_room.make(self.device, self.handle, LAUNCH_ROOM)
    }

    /// Whether a stream is the legacy default stream.
    pub(crate) fn is_legacy(&self, stream: &Arc<Stream>) -> bool {
        Arc::ptr_eq(stream, &self.legacy)
    }

    /// Whether a stream (with all that synchronise with the legacy default stream, if it is that) has nothing left to do.
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

/// The ends of all streams of all contexts, as of now.
pub(crate) fn positions_of_all() -> Vec<Position> {
    CONTEXTS.all().iter().flat_map(|context| context.positions()).collect()
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
