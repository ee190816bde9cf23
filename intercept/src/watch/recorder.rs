//! What each thread has launched since it was last asked.
//!
//! Each thread writes to a buffer of its own, behind a lock that it shares with the agent alone. The
//! agent takes what is there and leaves the buffer empty. A buffer is bounded: what does not fit is
//! counted, as launches that may have touched anything.

use std::cell::RefCell;
use std::collections::HashMap;
use std::hash::{BuildHasherDefault, Hasher};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use gpucr_wire::access::{
    Accesses, KernelUse, Operation, OperationUse, SlotUse, Touched, WHOLE_BUFFER,
};
use gpucr_wire::reach::Sizes;
use gpucr_wire::twice::{Class, merge};

use crate::calls::effects::{Effects, Launch};
use crate::resettable::Resettable;
use crate::state::gate;
use crate::state::graphs::{self, Node};
use crate::state::index;
use crate::state::kernels::{self, Kernel};
use crate::state::range::Range;
use crate::watch::classes::Classes;

/// Kernels that a thread keeps apart.
const KERNELS: usize = 1 << 13;
/// Pairs of a slot and an allocation that a thread keeps apart: at 48 bytes, 3 MiB.
const PAIRS: usize = 1 << 16;
/// Operations and graphs that a thread keeps apart.
const OTHERS: usize = 1 << 14;
/// Pairs in an answer: at 32 bytes, and 24 for the allocation.
const PAIRS_IN_ALL: usize = 1 << 19;
/// Operations in an answer: at 42 bytes, and 24 for the allocation.
const OPERATIONS_IN_ALL: usize = 1 << 17;
/// Places of arguments in the classes of an answer, 2 bytes each.
const PLACES_IN_ALL: usize = 1 << 20;
// The longest message has 64 MiB. The rest is for the kernels' names and parameters.
const _: () = assert!(
    PAIRS_IN_ALL * (32 + 24) + OPERATIONS_IN_ALL * (42 + 24) + PLACES_IN_ALL * 2 < 42 << 20
);
/// Threads that are told apart.
const THREADS: usize = 1 << 12;

/// Hashes a handle or an id: one multiplication, both halves of which count.
#[derive(Default)]
pub(super) struct NumberHasher(u64);

impl Hasher for NumberHasher {
    fn finish(&self) -> u64 {
        self.0
    }

    fn write(&mut self, bytes: &[u8]) {
        bytes.iter().for_each(|byte| self.write_u64((*byte).into()));
    }

    fn write_u64(&mut self, number: u64) {
        let product = u128::from(self.0 ^ number) * 0x9e37_79b9_7f4a_7c15;
        self.0 = (product >> 64) as u64 ^ product as u64;
    }
}

type Numbers<K, V> = HashMap<K, V, BuildHasherDefault<NumberHasher>>;

/// A slot of a kernel.
#[derive(Default)]
struct Slot {
    more: bool,
    touched: Numbers<u64, Touched>,
}

/// A kernel that this thread has launched.
struct Used {
    kernel: Arc<Kernel>,
    launches: u64,
    sizes: Sizes,
    /// As many as the kernel has words that may be pointers; more of one without a layout.
    slots: Vec<Slot>,
    classes: Classes,
}

/// An operation on an allocation: what it does, whether it writes.
type Operated = (Operation, bool, u64);

/// What one thread has launched.
#[derive(Default)]
pub(super) struct Buffer {
    /// The number of the recording that it belongs to.
    recording: u64,
    /// The generation of the handles below.
    generation: u64,
    by_handle: Numbers<u64, usize>,
    used: Vec<Used>,
    pairs: usize,
    operations: HashMap<Operated, OperationUse>,
    /// Launches of executable graphs.
    graphs: Numbers<u64, u64>,
    host_functions: u64,
    unseen: u64,
}

/// All buffers of the present recording.
static BUFFERS: Resettable<Mutex<Vec<Arc<Mutex<Buffer>>>>> =
    Resettable::new(Mutex::new(Vec::new()));
/// Names the present recording.
static RECORDING: AtomicU64 = AtomicU64::new(0);
/// Launches that could not be recorded at all, by threads that are ending or too many.
static LOST: AtomicU64 = AtomicU64::new(0);

thread_local! {
    static BUFFER: RefCell<Option<Arc<Mutex<Buffer>>>> = const { RefCell::new(None) };
}

fn locked<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Begins a recording: nothing is known of what went before.
pub(super) fn begin() {
    // Under the lock: a thread that registers late belongs to this recording, or is refused.
    let mut buffers = locked(BUFFERS.get());
    buffers.clear();
    LOST.store(0, Ordering::Relaxed);
    RECORDING.fetch_add(1, Ordering::SeqCst);
}

/// Ends it, and gives back the memory that it took. Recording has been turned off.
pub(super) fn end() {
    // One lock at a time: a thread takes them in the other order.
    let buffers = std::mem::take(&mut *locked(BUFFERS.get()));
    for buffer in buffers {
        *locked(&buffer) = Buffer::default();
    }
}

/// Lets this thread write to its buffer.
fn with(work: impl FnOnce(&mut Buffer)) {
    let done = BUFFER.try_with(|buffer| {
        // Borrowed already: a driver that calls itself through the shim while it is asked.
        let Ok(mut own) = buffer.try_borrow_mut() else { return false };
        let own = own.get_or_insert_default();
        let mut buffer = locked(own);
        let recording = RECORDING.load(Ordering::Relaxed);
        if buffer.recording != recording {
            *buffer = Buffer { recording, ..Buffer::default() };
            if !register(own, recording) {
                buffer.recording = 0;
                return false;
            }
        }
        work(&mut buffer);
        true
    });
    if done != Ok(true) {
        LOST.fetch_add(1, Ordering::Relaxed);
    }
}

/// Lets the agent see the buffer of a thread, unless there are too many, or the recording has ended
/// since the thread saw that it was going on.
fn register(buffer: &Arc<Mutex<Buffer>>, recording: u64) -> bool {
    let mut buffers = locked(BUFFERS.get());
    let goes_on = gate::is_recording() && RECORDING.load(Ordering::Relaxed) == recording;
    let room = buffers.len() < THREADS;
    if goes_on && room {
        buffers.push(buffer.clone());
    }
    goes_on && room
}

/// Writes what a call does to the buffer of this thread.
pub(super) struct Recorder;

impl Effects for Recorder {
    fn launch(&mut self, launch: &Launch) {
        with(|buffer| {
            let Some(at) = buffer.place(launch.handle) else {
                buffer.unseen += 1;
                return;
            };
            let Buffer { used, pairs, .. } = buffer;
            let Used { kernel, launches, sizes: largest, slots, classes } = &mut used[at];
            *launches += 1;
            largest.include(&launch.sizes);
            let mut shown = kernel.words.is_empty();
            let has_class = Classes::are_of(kernel);
            if has_class {
                classes.begin(kernel);
            }
            let mut note = |slot: usize, word: u64| {
                shown = true;
                let found = index::find(word);
                if has_class {
                    classes.note(slot, word, found);
                }
                let Some(allocation) = found else { return };
                if slot >= slots.len() {
                    slots.resize_with(slot + 1, Slot::default);
                }
                slots[slot].note(allocation, word, 1, pairs);
            };
            launch.words(kernel, &mut note);
            if shown && has_class {
                classes.end(1);
            }
            if !shown {
                // Arguments that were set one by one before may be anything.
                slots.iter_mut().for_each(|slot| slot.more = true);
            }
        });
    }

    fn range(&mut self, Range { operation, write, address, bytes }: Range) {
        if bytes == 0 {
            return;
        }
        let Some(allocation) = index::find(address) else { return };
        with(|buffer| {
            let key = (operation, write, allocation);
            if buffer.operations.len() >= OTHERS && !buffer.operations.contains_key(&key) {
                buffer.unseen += 1;
                return;
            }
            operated(&mut buffer.operations, key, address, bytes, 1);
        });
    }

    fn graph(&mut self, executable: u64) {
        with(|buffer| {
            if buffer.graphs.len() >= OTHERS && !buffer.graphs.contains_key(&executable) {
                buffer.unseen += 1;
                return;
            }
            *buffer.graphs.entry(executable).or_default() += 1;
        });
    }

    fn host_function(&mut self) {
        with(|buffer| buffer.host_functions += 1);
    }
}

impl Slot {
    fn note(&mut self, allocation: u64, word: u64, launches: u64, pairs: &mut usize) {
        if let Some(touched) = self.touched.get_mut(&allocation) {
            touched.low = touched.low.min(word);
            touched.high = touched.high.max(word);
            touched.launches += launches;
        } else if *pairs < PAIRS {
            *pairs += 1;
            let touched = Touched { allocation, low: word, high: word, launches };
            self.touched.insert(allocation, touched);
        } else {
            self.more = true;
        }
    }
}

impl Buffer {
    fn is_empty(&self) -> bool {
        let nothing = (self.host_functions, self.unseen) == (0, 0);
        nothing && self.used.is_empty() && self.operations.is_empty() && self.graphs.is_empty()
    }

    /// Where the kernel of `handle` is; `None` if there is no room for it.
    fn place(&mut self, handle: u64) -> Option<usize> {
        let generation = kernels::generation();
        if self.generation != generation {
            self.by_handle.clear();
            self.generation = generation;
        }
        if let Some(at) = self.by_handle.get(&handle) {
            return Some(*at);
        }
        if self.used.len() >= KERNELS {
            return None;
        }
        let kernel = kernels::find(handle);
        let slots = kernel.words.iter().map(|_| Slot::default()).collect();
        let (sizes, classes) = (Sizes::default(), Classes::default());
        self.used.push(Used { kernel, launches: 0, sizes, slots, classes });
        self.by_handle.insert(handle, self.used.len() - 1);
        Some(self.used.len() - 1)
    }
}

fn operated(
    operations: &mut HashMap<Operated, OperationUse>,
    key: Operated,
    address: u64,
    bytes: u64,
    count: u64,
) -> &mut OperationUse {
    let (operation, write, allocation) = key;
    let end = address.saturating_add(bytes);
    let new = OperationUse { operation, write, allocation, count: 0, bytes: 0, low: address, end };
    let entry = operations.entry(key).or_insert(new);
    entry.count += count;
    entry.bytes = entry.bytes.saturating_add(bytes.saturating_mul(count));
    entry.low = entry.low.min(address);
    entry.end = entry.end.max(end);
    entry
}

/// What all threads have launched, put together.
#[derive(Default)]
pub(super) struct Merged {
    kernels: HashMap<u64, (Arc<Kernel>, KernelUse)>,
    slots: HashMap<(u64, usize), Slot>,
    operations: HashMap<Operated, OperationUse>,
    pairs: usize,
    /// Places in classes that there is room for.
    room: usize,
    unknown_graphs: u64,
    host_functions: u64,
    unseen: u64,
}

/// Takes what all threads have launched, the nodes of graphs included.
pub(super) fn take() -> Merged {
    let (mut merged, launched) = take_buffers();
    graphs::expand(&launched, |launches, node| merged.add_node(node, launches));
    merged
}

/// Takes what all threads have launched, and the launches of graphs among it.
fn take_buffers() -> (Merged, HashMap<u64, u64>) {
    let mut merged = Merged { room: PLACES_IN_ALL, ..Merged::default() };
    merged.unseen = LOST.swap(0, Ordering::Relaxed);
    let mut graphs = HashMap::new();
    // One lock at a time: a thread takes them in the other order.
    let buffers = locked(BUFFERS.get()).clone();
    for buffer in &buffers {
        let taken = {
            let mut buffer = locked(buffer);
            let empty = Buffer { recording: buffer.recording, ..Buffer::default() };
            std::mem::replace(&mut *buffer, empty)
        };
        for used in &taken.used {
            merged.add_kernel(&used.kernel, &used.sizes, used.launches, 0);
            merged.add_classes(&used.kernel, used.classes.known());
            for (number, slot) in used.slots.iter().enumerate() {
                merged.add_slot(&used.kernel, number, slot.more);
                for touched in slot.touched.values() {
                    merged.add_touched(&used.kernel, number, touched);
                }
            }
        }
        for (key, used) in taken.operations {
            merged.add_operation(key, used);
        }
        for (executable, launches) in taken.graphs {
            *graphs.entry(executable).or_default() += launches;
        }
        merged.host_functions += taken.host_functions;
        merged.unseen += taken.unseen;
    }
    drop(buffers);
    // Buffers of threads that have ended are dropped.
    let in_use =
        |buffer: &Arc<Mutex<Buffer>>| Arc::strong_count(buffer) > 1 || !locked(buffer).is_empty();
    locked(BUFFERS.get()).retain(in_use);
    (merged, graphs)
}

impl Merged {
    /// A node of a graph that was launched so often; `None`: nodes that are not known.
    fn add_node(&mut self, node: Option<&Node>, launches: u64) {
        match node {
            None => self.unknown_graphs += launches,
            Some(Node::Kernel { kernel, shape, words }) => {
                self.add_kernel(kernel, &Sizes::of(shape.0, shape.1), launches, launches);
                let (mut classes, has_class) = (Classes::default(), Classes::are_of(kernel));
                classes.begin(kernel);
                for (number, word) in words {
                    classes.note(*number, *word, index::find(*word));
                    self.add_word(kernel, *number, *word, launches);
                }
                if has_class {
                    classes.end(launches);
                    self.add_classes(kernel, classes.known());
                }
            }
            Some(Node::Ranges(ranges)) => {
                ranges.iter().for_each(|range| self.add_range(range, launches));
            }
            Some(Node::Host) => self.host_functions += launches,
            Some(Node::Child(nodes)) => {
                nodes.iter().for_each(|node| self.add_node(Some(node), launches));
            }
        }
    }

    /// A kernel was launched, so often within graphs.
    fn add_kernel(&mut self, kernel: &Arc<Kernel>, sizes: &Sizes, launches: u64, in_graphs: u64) {
        let (_, entry) = self.kernels.entry(kernel.id).or_insert_with(|| {
            let used = KernelUse {
                id: kernel.id,
                name: kernel.name.clone(),
                image: kernel.image,
                known: kernel.params.is_some(),
                params: kernel.params.clone().unwrap_or_default(),
                ..KernelUse::default()
            };
            (kernel.clone(), used)
        });
        entry.launches += launches;
        entry.in_graphs += in_graphs;
        entry.sizes.include(sizes);
    }

    fn add_classes(&mut self, kernel: &Kernel, classes: &[Class]) {
        if let Some((_, used)) = self.kernels.get_mut(&kernel.id) {
            merge(&mut used.classes, classes, &mut self.room);
        }
    }

    fn slot(&mut self, kernel: &Kernel, number: usize) -> &mut Slot {
        self.slots.entry((kernel.id, number)).or_default()
    }

    fn add_slot(&mut self, kernel: &Kernel, number: usize, more: bool) {
        if more {
            self.slot(kernel, number).more = true;
        }
    }

    fn add_touched(&mut self, kernel: &Kernel, number: usize, new: &Touched) {
        if self.pairs >= PAIRS_IN_ALL {
            self.slot(kernel, number).more = true;
            return;
        }
        let slot = self.slots.entry((kernel.id, number)).or_default();
        let before = slot.touched.len();
        let entry = slot.touched.entry(new.allocation);
        let entry = entry.or_insert(Touched { launches: 0, ..*new });
        entry.low = entry.low.min(new.low);
        entry.high = entry.high.max(new.high);
        entry.launches += new.launches;
        self.pairs += slot.touched.len() - before;
    }

    /// A word of a kernel in a graph that was launched so often.
    fn add_word(&mut self, kernel: &Kernel, number: usize, word: u64, launches: u64) {
        if let Some(allocation) = index::find(word) {
            let touched = Touched { allocation, low: word, high: word, launches };
            self.add_touched(kernel, number, &touched);
        }
    }

    fn add_operation(&mut self, key: Operated, new: OperationUse) {
        if self.has_room_for(&key, new.count) {
            let OperationUse { low, end, bytes, count, .. } = new;
            let old = operated(&mut self.operations, key, low, end - low, 0);
            old.count += count;
            old.bytes = old.bytes.saturating_add(bytes);
        }
    }

    /// An operation in a graph that was launched so often.
    fn add_range(&mut self, range: &Range, launches: u64) {
        let Range { operation, write, address, bytes } = *range;
        if let Some(allocation) = index::find(address) {
            let key = (operation, write, allocation);
            if self.has_room_for(&key, launches) {
                operated(&mut self.operations, key, address, bytes, launches);
            }
        }
    }

    fn has_room_for(&mut self, key: &Operated, count: u64) -> bool {
        let room = self.operations.len() < OPERATIONS_IN_ALL || self.operations.contains_key(key);
        self.unseen += if room { 0 } else { count };
        room
    }

    /// The ids of all allocations that were touched.
    pub(super) fn touched(&self) -> impl Iterator<Item = u64> {
        let of_slots = self.slots.values().flat_map(|slot| slot.touched.keys().copied());
        of_slots.chain(self.operations.values().map(|operation| operation.allocation))
    }

    /// Makes a message of it, in a stable order, without the allocations.
    pub(super) fn finish(mut self) -> Accesses {
        for ((id, number), slot) in self.slots {
            let Some((known, kernel)) = self.kernels.get_mut(&id) else { continue };
            let (param, offset) = match known.words.get(number) {
                Some(word) => (word.param, word.offset),
                None => (WHOLE_BUFFER, 8 * number as u32),
            };
            let mut touched: Vec<Touched> = slot.touched.into_values().collect();
            touched.sort_by_key(|touched| touched.allocation);
            kernel.slots.push(SlotUse { param, offset, more: slot.more, touched });
        }
        let mut kernels: Vec<KernelUse> =
            self.kernels.into_values().map(|(_, used)| used).collect();
        kernels.retain(|kernel| kernel.launches > 0);
        kernels.sort_by_key(|kernel| kernel.id);
        for kernel in &mut kernels {
            kernel.slots.sort_by_key(|slot| (slot.param, slot.offset));
        }
        let mut operations: Vec<OperationUse> = self.operations.into_values().collect();
        operations.sort_by_key(|used| (used.operation, used.write, used.allocation));
        Accesses {
            kernels,
            operations,
            allocations: Vec::new(),
            unknown_graphs: self.unknown_graphs,
            unseen: self.unseen,
            host_functions: self.host_functions,
        }
    }
}

/// Forgets everything, in the child of a fork.
///
/// # Safety
/// No other thread exists.
pub(crate) unsafe fn reset() {
    gate::set_recording(false);
    RECORDING.fetch_add(1, Ordering::Relaxed);
    // The agent may have held this thread's buffer, and nobody will let go of it any more.
    let _ = BUFFER.try_with(|own| own.try_borrow_mut().map(|mut own| std::mem::forget(own.take())));
    // SAFETY: the caller's duty.
    unsafe { BUFFERS.reset(Mutex::new(Vec::new())) };
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::atomic::AtomicBool;

    /// There is one recording in a process.
    static ALONE: Mutex<()> = Mutex::new(());

    /// A launch sees that recording is on, and then takes its time.
    #[test]
    fn launches_that_come_late_are_neither_lost_nor_kept() {
        let _alone = locked(&ALONE);
        let (stop, launches) = (AtomicBool::new(false), AtomicU64::new(0));
        let some_launches = || {
            let before = launches.load(Ordering::SeqCst);
            while launches.load(Ordering::SeqCst) < before + 2 {
                std::thread::yield_now();
            }
        };
        std::thread::scope(|scope| {
            scope.spawn(|| {
                while !stop.load(Ordering::SeqCst) {
                    Recorder.host_function();
                    launches.fetch_add(1, Ordering::SeqCst);
                }
            });
            for _ in 0..2_000 {
                crate::watch::start();
                some_launches();
                let merged = take();
                let kept = locked(BUFFERS.get()).len();
                crate::watch::stop();
                some_launches();
                let left = locked(BUFFERS.get()).len();
                if merged.host_functions == 0 || (kept, left) != (1, 0) {
                    stop.store(true, Ordering::SeqCst);
                    panic!("{} host functions, {kept} buffers, then {left}", merged.host_functions);
                }
            }
            stop.store(true, Ordering::SeqCst);
        });
    }

    #[test]
    fn a_child_does_not_wait_for_an_agent_that_it_does_not_have() {
        let _alone = locked(&ALONE);
        crate::watch::start();
        Recorder.host_function();
        let own = BUFFER.with(|own| own.borrow().clone()).expect("used");
        // The agent had locked it when the program forked.
        let held = locked(&own);
        // SAFETY: no other thread uses the recorder.
        unsafe { reset() };
        let (ended, end) = std::sync::mpsc::channel();
        std::thread::scope(|scope| {
            // Should it wait, it would wait for ever: for a guard of its own.
            scope.spawn(move || {
                let done = end.recv_timeout(std::time::Duration::from_secs(5));
                if done.is_err() {
                    std::process::abort();
                }
            });
            Recorder.host_function();
            ended.send(()).expect("somebody listens");
        });
        drop(held);
        crate::watch::stop();
    }

    #[test]
    fn what_does_not_fit_is_said_to_be_missing() {
        let (mut slot, mut pairs) = (Slot::default(), PAIRS - 1);
        slot.note(1, 100, 1, &mut pairs);
        assert_eq!((slot.touched.len(), slot.more), (1, false));
        slot.note(2, 200, 1, &mut pairs);
        assert_eq!((slot.touched.len(), slot.more), (1, true));
        slot.note(1, 50, 2, &mut pairs);
        let known = Touched { allocation: 1, low: 50, high: 100, launches: 3 };
        assert_eq!(slot.touched[&1], known, "what is there is kept up to date");
        // And the mark goes all the way to the message.
        let kernel = Arc::new(Kernel { id: 7, ..Kernel::default() });
        let mut merged = Merged::default();
        merged.add_kernel(&kernel, &Sizes::default(), 3, 0);
        merged.add_slot(&kernel, 0, slot.more);
        merged.add_touched(&kernel, 0, &known);
        merged.pairs = PAIRS_IN_ALL;
        merged.add_touched(&kernel, 1, &known);
        let accesses = merged.finish();
        let slots = &accesses.kernels[0].slots;
        let more: Vec<_> = slots.iter().map(|slot| (slot.more, slot.touched.len())).collect();
        assert_eq!(more, [(true, 1), (true, 0)]);
        assert!(slots.iter().all(|slot| slot.param == WHOLE_BUFFER));
    }
}
