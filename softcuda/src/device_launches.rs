//! Kernels that kernels launch, and copies and fills that kernels enqueue (CUDA's dynamic parallelism).
//!
//! They begin when the kernel that asked for them has ended, one after the other in the order of the calls, and each with
//! all that comes of it: that keeps the order of every stream and event, and a kernel cannot wait for what it launches.
//! What is in the stream for the end (`cudaStreamTailLaunch`) comes after all else of the kernel.

use std::collections::{HashMap, VecDeque};
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};

use parking_lot::Mutex;

use crate::context::Context;
use crate::copy_engine::{self, Fill, Transfer};
use crate::device_view::DeviceView;
use crate::kernel_launch::KernelLaunch;
use crate::modules::{FUNCTIONS, MODULES};
use crate::ptx::{AddressSpace, Child, Heap, Launcher};
use crate::settings::settings;
use crate::shapes::{self, Shape};
use crate::status::{Code, Outcome};

/// `cudaStreamTailLaunch`.
const AT_THE_END: u64 = 3;
/// The deepest that kernels launch kernels, as on a GPU.
const DEEPEST: u32 = 24;
/// The most that may wait to begin, of all that comes of one launch.
const MOST_WAITING: usize = 1 << 16;
/// Places for parameters begin and end at multiples of this.
const ALIGNMENT: u64 = 64;
/// Handles of streams and events begin behind those that have a meaning.
const FIRST_HANDLE: u64 = 0x10;

/// `cudaErrorInvalidValue`.
const INVALID_VALUE: u32 = 1;
/// `cudaErrorInvalidConfiguration`.
const INVALID_CONFIGURATION: u32 = 9;
/// `cudaErrorLaunchMaxDepthExceeded`.
const TOO_DEEP: u32 = 65;
/// `cudaErrorLaunchPendingCountExceeded`.
const TOO_MANY: u32 = 69;
/// `cudaErrorInvalidDeviceFunction`.
const NO_FUNCTION: u32 = 98;

/// What a kernel asks for.
pub(crate) enum Task {
    /// A kernel.
    Kernel(KernelLaunch),
    /// A copy within memory of the device.
    Copy(Transfer),
    /// A fill of memory of the device.
    Fill(Fill),
}

/// What one kernel asks for.
pub(crate) struct Launches<'a> {
    context: &'a Context,
    parent: &'a KernelLaunch,
    /// How many kernels led to the parent.
    depth: u32,
    /// How much waits, of all that comes of one launch.
    waiting: &'a AtomicUsize,
    handles: AtomicU64,
    asked: Mutex<Asked>,
}

/// A place for parameters.
struct Room {
    /// Bytes.
    size: u64,
    /// The launch that it is for, if that is known.
    launch: Option<Prepared>,
}

/// A launch without its parameters.
struct Prepared {
    launch: KernelLaunch,
    /// How many bytes of parameters it needs.
    size: usize,
}

#[derive(Default)]
struct Asked {
    /// Places that were given out, by their addresses.
    rooms: HashMap<u64, Room>,
    tasks: VecDeque<Task>,
    at_the_end: VecDeque<Task>,
}

/// What is left to do of what one kernel has asked for.
pub(crate) struct Tasks {
    tasks: VecDeque<Task>,
    at_the_end: VecDeque<Task>,
    /// How many kernels led to the one that has asked.
    depth: u32,
}

impl Tasks {
    /// The next one, and how many kernels led to it. One at the end takes the place of its parent.
    pub(crate) fn next(&mut self, waiting: &AtomicUsize) -> Option<(Task, u32)> {
        let now = self.tasks.pop_front().map(|task| (task, self.depth + 1));
        let next = now.or_else(|| self.at_the_end.pop_front().map(|task| (task, self.depth)));
        if next.is_some() {
            waiting.fetch_sub(1, Ordering::Relaxed);
        }
        next
    }

    /// Whether there is no other.
    pub(crate) fn is_empty(&self) -> bool {
        self.tasks.is_empty() && self.at_the_end.is_empty()
    }
}

/// Makes a copy or a fill; only memory that the device can use may be in it.
///
/// # Errors
/// `ILLEGAL_ADDRESS`.
pub(crate) fn copy(transfer: &Transfer) -> Outcome {
    let Transfer { to, from, width, .. } = *transfer;
    if !DeviceView.is_writable(to, width) || !DeviceView.is_mapped(from, width) {
        return Err(Code::ILLEGAL_ADDRESS);
    }
    copy_engine::copy(transfer)
}

impl<'a> Launches<'a> {
    /// Takes what the kernel of a launch asks for, which so many kernels led to.
    pub(crate) fn new(
        context: &'a Context,
        parent: &'a KernelLaunch,
        depth: u32,
        waiting: &'a AtomicUsize,
    ) -> Launches<'a> {
        let (handles, asked) = (AtomicU64::new(FIRST_HANDLE), Mutex::default());
        Launches { context, parent, depth, waiting, handles, asked }
    }

    /// All that the kernel has asked for, which has ended.
    pub(crate) fn tasks(self) -> Tasks {
        let mut asked = self.asked.lock();
        let (tasks, at_the_end) =
            (std::mem::take(&mut asked.tasks), std::mem::take(&mut asked.at_the_end));
        Tasks { tasks, at_the_end, depth: self.depth }
    }

    fn prepared(&self, child: &Child<'_>) -> Result<Prepared, u32> {
        let Child { entry, grid, block, dynamic_shared: shared } = *child;
        let module = MODULES.get(self.parent.function.module).ok_or(NO_FUNCTION)?;
        let function = module.function(&entry.name).ok().and_then(|handle| FUNCTIONS.get(handle));
        let function = function.ok_or(NO_FUNCTION)?;
        let shape = Shape { grid, block, shared, cooperative: false, cluster: None };
        shapes::check(&function, &shape).map_err(|_| INVALID_CONFIGURATION)?;
        let launch = KernelLaunch::new(function, shape, Vec::new());
        Ok(Prepared { launch, size: entry.param_bytes })
    }

    /// A launch with the parameters that lie at an address, in a place of so many bytes.
    fn complete(&self, prepared: Prepared, room: u64, size: u64, stream: u64) -> Result<Task, u32> {
        let Prepared { launch, size: needed } = prepared;
        if needed as u64 > size {
            return Err(INVALID_VALUE);
        }
        if self.depth >= DEEPEST && stream != AT_THE_END {
            return Err(TOO_DEEP);
        }
        let mut parameters = vec![0_u8; needed];
        // SAFETY: the place is memory of this context that was given out with at least so many bytes, and is not given
        // back yet. Races with threads that write there are the program's own.
        unsafe { std::ptr::copy(room as *const u8, parameters.as_mut_ptr(), needed) };
        Ok(Task::Kernel(KernelLaunch::new(launch.function, launch.shape, parameters)))
    }

    fn enqueue(&self, task: Task, stream: u64) -> Result<(), u32> {
        let is_room = |count: usize| (count < MOST_WAITING).then_some(count + 1);
        let counted = self.waiting.fetch_update(Ordering::Relaxed, Ordering::Relaxed, is_room);
        counted.map_err(|_| TOO_MANY)?;
        let mut asked = self.asked.lock();
        let queue = if stream == AT_THE_END { &mut asked.at_the_end } else { &mut asked.tasks };
        queue.push_back(task);
        Ok(())
    }
}

impl Launcher for Launches<'_> {
    fn room(&self, size: u64, child: Option<&Child<'_>>) -> Result<u64, u32> {
        let launch = child.map(|child| self.prepared(child)).transpose()?;
        let size = size.max(1).checked_next_multiple_of(ALIGNMENT).ok_or(INVALID_VALUE)?;
        let address = self.context.launch_room.allocate(size).ok_or(TOO_MANY)?;
        self.asked.lock().rooms.insert(address, Room { size, launch });
        Ok(address)
    }

    fn launch(&self, room: u64, child: Option<&Child<'_>>, stream: u64) -> Result<(), u32> {
        let child = child.map(|child| self.prepared(child)).transpose()?;
        let Room { size, launch } = self.asked.lock().rooms.remove(&room).ok_or(INVALID_VALUE)?;
        let prepared = child.or(launch).ok_or(INVALID_VALUE);
        let task = prepared.and_then(|prepared| self.complete(prepared, room, size, stream));
        self.context.launch_room.free(room);
        self.enqueue(task?, stream)
    }

    fn copy(&self, to: u64, from: u64, size: u64, stream: u64) -> Result<(), u32> {
        let size = usize::try_from(size).map_err(|_| INVALID_VALUE)?;
        if size == 0 {
            return Ok(());
        }
        self.enqueue(Task::Copy(Transfer::linear(to, from, size)), stream)
    }

    fn fill(&self, to: u64, value: u8, size: u64, stream: u64) -> Result<(), u32> {
        let width = usize::try_from(size).map_err(|_| INVALID_VALUE)?;
        if width == 0 {
            return Ok(());
        }
        let value = value.into();
        let fill = Fill { to, pitch: 0, value, value_size: 1, width, height: 1 };
        self.enqueue(Task::Fill(fill), stream)
    }

    fn handle(&self) -> u64 {
        self.handles.fetch_add(1, Ordering::Relaxed)
    }

    fn device(&self) -> (u32, u32) {
        (self.context.device as u32, settings().devices as u32)
    }
}

impl Drop for Launches<'_> {
    fn drop(&mut self) {
        for room in self.asked.get_mut().rooms.keys() {
            self.context.launch_room.free(*room);
        }
    }
}
