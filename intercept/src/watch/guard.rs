//! Launches that wait: while a checkpointer saves memory of the running program, what may write a chunk
//! waits until that chunk is saved.
//!
//! The checkpointer hands over a [chunk table](gpucr_wire::chunks) while the gate is closed. From then
//! on every call that the table of functions has a decoder for is shown here, inside the
//! gate, before it goes on. If it may write what is not saved yet, it leaves the gate, waits for the
//! chunks, enters again, and looks again. So the gate can be closed while calls wait, and no lock is
//! held by waiting calls.
//!
//! What a call may write is a guess, like everything in [`super`]: a copy or fill writes what it says,
//! a kernel all allocations that its arguments point to, unless it is known only to read them. If
//! nothing can be said of it, it waits for everything. A guess that is wrong is found by the
//! checkpointer, which compares what it copies with what was there when the gate was closed.
//!
//! The same serves a program that was restored before its memory is there ([`install_awaited`]). Then reading
//! counts as writing does, and whatever has no decoder waits for everything. A guess that is wrong is found
//! by the device, since what is not there is not mapped (see [`super::faults`]).
//!
//! And it serves a program whose memory is, in part, that of other instances too ([`install_shared`]): what
//! may write it waits until it has memory of its own, which its agent gives it.

use std::cell::RefCell;
use std::collections::{HashMap, HashSet};
use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::{AtomicPtr, AtomicU32, AtomicU64, Ordering};
use std::thread::Thread;
use std::time::Duration;

use gpucr_wire::Table;
use gpucr_wire::access::{KernelSummary, Slot};
use gpucr_wire::reach::{Reach, Sizes};
use gpucr_wire::table::{Wait, monotonic_ns};

use crate::abi::real;
use crate::abi::types::{ERROR_ILLEGAL_ADDRESS, ERROR_LAUNCH_FAILED, SUCCESS};
use crate::calls::effects::{Decoded, Effects, Launch};
use crate::state::graphs::{self, Node};
use crate::state::index;
use crate::state::kernels::{self, Kernel};
use crate::state::range::Range as Touched;
use crate::state::{gate, memory};

/// What the checkpointer has handed over.
struct Guard {
    /// Unlike that of any other.
    number: u64,
    table: Table,
    purpose: Purpose,
    /// In order of their addresses.
    pieces: Vec<GuardedRange>,
    /// Pieces that belong to one reservation of the program's, by its name as an allocation: places
    /// among the pieces.
    reservations: HashMap<u64, Range<usize>>,
    summaries: HashMap<u64, KernelSummary>,
    distrusted: HashSet<String>,
}

/// What a guard is for.
enum Purpose {
    /// Memory is being saved.
    Saved,
    /// Memory is not there yet. Each block is one chunk.
    Awaited,
    /// Memory is shared. Each block is one chunk. Has the thread that is to be woken when one is wanted.
    Shared(Thread),
}

/// A range of the table.
struct GuardedRange {
    low: u64,
    end: u64,
    /// Its number in the table.
    range: usize,
    /// The pieces of the same allocation, this one among them.
    allocation: Range<usize>,
}

/// Who has looked for faults within so long is there to be told of one.
const ATTENTION: Duration = Duration::from_secs(5);

/// Changed by the agent alone, and freed by it while nobody can be looking.
static GUARD: AtomicPtr<Guard> = AtomicPtr::new(std::ptr::null_mut());
static LAST_NUMBER: AtomicU64 = AtomicU64::new(0);
/// Calls that have left the gate to wait.
static WAITERS: AtomicU32 = AtomicU32::new(0);

/// What a call may write and is not saved.
#[derive(Default)]
struct Needs {
    everything: bool,
    chunks: Vec<(usize, Range<usize>)>,
    /// The stream that the call is for.
    stream: u64,
}

/// A kernel, as far as it concerns the guard of that number.
struct KernelWrites {
    kernel: Arc<Kernel>,
    anywhere: bool,
    /// What is written through each of the kernel's words.
    writes: Vec<Writes>,
}

/// What a kernel writes through a word of its parameters.
enum Writes {
    Nothing,
    /// What is within this distance of the address.
    Reach(Reach),
    /// The whole allocation.
    All,
}

/// The kernels that a thread has launched, by handle.
#[derive(Default)]
struct Cache {
    guard: u64,
    generation: u64,
    known: HashMap<u64, Arc<KernelWrites>>,
}

thread_local! {
    static CACHE: RefCell<Cache> = RefCell::new(Cache::default());
}

/// Lets calls wait for what is pending in this table. The gate is closed.
pub(crate) fn install(table: Table, summaries: Vec<KernelSummary>, distrusted: Vec<String>) {
    let places = table.ranges().iter().enumerate();
    let places = places.map(|(range, r)| (r.address, r.address.saturating_add(r.size), range));
    let places = places.collect();
    set(Guard::new(table, places, summaries, distrusted));
}

/// Lets calls wait for memory that is not there yet. The gate is closed. Each range of the table is one
/// chunk; `places` says from where to where the program sees it, and its number.
pub(crate) fn install_awaited(table: Table, places: Vec<(u64, u64, usize)>) {
    let guard = Guard::new(table, places, Vec::new(), Vec::new());
    set(Guard { purpose: Purpose::Awaited, ..guard });
}

/// Lets calls wait for memory of its own for what is shared. The gate is closed. As in [`install_awaited`];
/// `server` is woken when a call waits.
pub(crate) fn install_shared(
    table: Table,
    places: Vec<(u64, u64, usize)>,
    summaries: Vec<KernelSummary>,
    server: Thread,
) {
    let guard = Guard::new(table, places, summaries, Vec::new());
    set(Guard { purpose: Purpose::Shared(server), ..guard });
}

/// The table of memory that is shared. For the thread that serves it: the table stays until that has ended.
pub(crate) fn shared_table() -> Option<&'static Table> {
    guard().filter(|guard| matches!(guard.purpose, Purpose::Shared(_))).map(|guard| &guard.table)
}

fn set(guard: Guard) {
    free();
    GUARD.store(Box::into_raw(Box::new(guard)), Ordering::Release);
    gate::set_guarding(true);
}

/// Tells the restore that the program has got an error of the device which may have been caused by an
/// access to memory that is not there, or by a write to memory that is shared. `false` if there is no such
/// memory, or nobody to be told.
pub(super) fn tell_fault(code: u32) -> bool {
    // The guard is not freed under its hands. A closed gate ends the wait for memory: then there is nothing
    // to tell.
    let _inside = gate::enter();
    let Some(guard) = guard() else { return false };
    let header = guard.table.header();
    let told = match guard.purpose {
        Purpose::Saved => false,
        Purpose::Awaited => true,
        // What a write to memory is answered with that is only to be read. The table does not tell what is
        // shared still: a call that could not be served went on.
        Purpose::Shared(_) => {
            [ERROR_ILLEGAL_ADDRESS, ERROR_LAUNCH_FAILED].contains(&code)
                && header.is_looked_at(ATTENTION)
                && !memory::lock().shared_blocks().is_empty()
        }
    };
    if told {
        header.set_fault(code);
    }
    told
}

/// Where the memory is that the checkpointer holds until it is saved.
pub(crate) fn addresses() -> Vec<u64> {
    let guard = guard().filter(|guard| gate::is_guarding() && !guard.is_shared());
    guard.map_or_else(Vec::new, |guard| guard.pieces.iter().map(|piece| piece.low).collect())
}

/// Ends all waiting for a checkpointer, which is gone.
pub(crate) fn end_saving() {
    if guard().is_some_and(|guard| !guard.is_shared()) {
        end();
    }
}

/// Ends all waiting. What the checkpointer has not saved by now it cannot save any more.
pub(crate) fn end() {
    gate::set_guarding(false);
    if let Some(guard) = guard() {
        guard.table.end();
    }
}

/// Unmaps the table. The gate is closed, so nobody looks at it but those who wait, and they go on now.
pub(crate) fn free() {
    end();
    while WAITERS.load(Ordering::SeqCst) != 0 {
        std::thread::sleep(Duration::from_micros(50));
    }
    let guard = GUARD.swap(std::ptr::null_mut(), Ordering::AcqRel);
    if !guard.is_null() {
        // SAFETY: made by `install`. A thread that reads the pointer is inside the gate, which is closed, or
        // among the waiters, of which there are none; and only the agent calls this.
        drop(unsafe { Box::from_raw(guard) });
    }
}

/// The guard there is. To be used inside the gate, while counted as a waiter, or by the agent.
fn guard() -> Option<&'static Guard> {
    // SAFETY: `free` waits for all who may use it; see there.
    unsafe { GUARD.load(Ordering::Acquire).as_ref() }
}

/// Waits, outside of the gate, until all that a call may write is saved. The call is inside the gate,
/// before and after.
pub(super) fn pass(call: &Decoded) {
    let mut first = true;
    while let Some(guard) = guard() {
        let Some(needs) = guard.needs(call) else { return };
        guard.wait(needs.chunks, first);
        first = false;
    }
}

/// Waits for everything: gpucr lets go of memory only when it is through.
pub(crate) fn wait_for_all() {
    if gate::is_guarding()
        && let Some(guard) = guard()
    {
        guard.wait(guard.everything(), false);
    }
}

/// Waits for all memory that is not there yet. For calls that are about memory as such.
pub(crate) fn wait_for_awaited() {
    if gate::is_guarding()
        && let Some(guard) = guard()
        && guard.is_awaited()
    {
        let everything = guard.everything();
        if !everything.is_empty() {
            guard.wait(everything, true);
        }
    }
}

/// Waits for the memory at this address, if it is awaited.
pub(crate) fn wait_for_awaited_at(address: u64) {
    if gate::is_guarding()
        && let Some(guard) = guard()
        && guard.is_awaited()
    {
        let mut needs = Needs::default();
        needs.add(guard, address, address.saturating_add(1));
        if !needs.chunks.is_empty() {
            guard.wait(needs.chunks, true);
        }
    }
}

/// Collects what a call may write under a guard.
struct Collector<'a> {
    guard: &'a Guard,
    needs: Needs,
}

impl Effects for Collector<'_> {
    fn stream(&mut self, stream: u64) {
        self.needs.stream = stream;
    }

    fn range(&mut self, range: Touched) {
        self.touched(&range);
    }

    fn launch(&mut self, launch: &Launch) {
        let Self { guard, needs } = self;
        let known = guard.known(launch.handle);
        let mut seen = false;
        launch.words(&known.kernel, &mut |number, word| {
            seen = true;
            needs.word(guard, &known, &launch.sizes, number, word);
        });
        // Arguments that were set one by one before, or that the driver does not describe.
        let pointers = known.kernel.params.is_none() || !known.kernel.words.is_empty();
        needs.everything |= known.anywhere || (pointers && !seen);
    }

    fn graph(&mut self, executable: u64) {
        let number = self.guard.number;
        graphs::needed(executable, number, self, Self::node, Self::is_free);
    }

    /// It writes no device memory.
    fn host_function(&mut self) {}
}

impl Collector<'_> {
    fn touched(&mut self, range: &Touched) {
        if range.write || self.guard.is_awaited() {
            let end = range.address.saturating_add(range.bytes);
            self.needs.add(self.guard, range.address, end);
        }
    }

    /// A node of a graph; `None`: one that is not known.
    fn node(&mut self, node: Option<&Node>) {
        match node {
            None => self.needs.everything = true,
            Some(Node::Kernel { kernel, shape, words }) => {
                let known = self.guard.judge(kernel.clone());
                let sizes = Sizes::of(shape.0, shape.1);
                for (number, word) in words {
                    self.needs.word(self.guard, &known, &sizes, *number, *word);
                }
                self.needs.everything |= known.anywhere || kernel.params.is_none();
            }
            Some(Node::Ranges(ranges)) => ranges.iter().for_each(|range| self.touched(range)),
            Some(Node::Host) => {}
            Some(Node::Child(nodes)) => nodes.iter().for_each(|node| self.node(Some(node))),
        }
    }

    /// Whether nothing was added.
    fn is_free(&self) -> bool {
        !self.needs.everything && self.needs.chunks.is_empty()
    }
}

impl Needs {
    /// What lies between two addresses may be written.
    fn add(&mut self, guard: &Guard, low: u64, end: u64) {
        let first = guard.pieces.partition_point(|piece| piece.end <= low);
        for piece in guard.pieces[first..].iter().take_while(|piece| piece.low < end) {
            self.add_of(guard, piece, low, end);
        }
    }

    fn add_of(&mut self, guard: &Guard, piece: &GuardedRange, low: u64, end: u64) {
        let of = guard.table.ranges()[piece.range];
        let within = match guard.purpose {
            Purpose::Saved => of.chunks_within(low, end),
            Purpose::Awaited | Purpose::Shared(_) => 0..1,
        };
        if !guard.table.chunks(piece.range).are_saved(within.clone()) {
            self.chunks.push((piece.range, within));
        }
    }

    /// A word of a kernel's arguments: if it points into an allocation, that may be written, or as far of
    /// it as a launch of this size goes.
    fn word(
        &mut self,
        guard: &Guard,
        known: &KernelWrites,
        sizes: &Sizes,
        number: usize,
        word: u64,
    ) {
        let reach = match known.writes.get(number) {
            Some(Writes::Nothing) => return,
            Some(Writes::Reach(reach)) => Some(reach),
            Some(Writes::All) | None => None,
        };
        let pieces = &guard.pieces[guard.allocation_of(word)];
        let (Some(first), Some(last)) = (pieces.first(), pieces.last()) else { return };
        let whole = first.low..last.end;
        let range = match reach {
            Some(reach) => reach.within(sizes, word, word, whole),
            None => whole,
        };
        for piece in pieces.iter().filter(|p| p.low < range.end && range.start < p.end) {
            self.add_of(guard, piece, range.start, range.end);
        }
    }
}

impl Guard {
    fn new(
        table: Table,
        places: Vec<(u64, u64, usize)>,
        summaries: Vec<KernelSummary>,
        distrusted: Vec<String>,
    ) -> Self {
        let piece = |(low, end, range)| GuardedRange { low, end, range, allocation: 0..0 };
        let mut pieces: Vec<GuardedRange> = places.into_iter().map(piece).collect();
        pieces.sort_by_key(|piece| piece.low);
        let mut reservations: HashMap<u64, Range<usize>> = HashMap::new();
        for (at, piece) in pieces.iter().enumerate() {
            let id = index::find(piece.low).filter(|id| index::reservation_address(*id).is_some());
            if let Some(id) = id {
                reservations.entry(id).or_insert(at..at).end = at + 1;
            }
        }
        for (at, piece) in pieces.iter_mut().enumerate() {
            let of = |id| reservations.get(&id).cloned();
            piece.allocation = index::find(piece.low).and_then(of).unwrap_or(at..at + 1);
        }
        let summaries = summaries.into_iter().map(|summary| (summary.kernel, summary)).collect();
        let distrusted = distrusted.into_iter().collect();
        let number = LAST_NUMBER.fetch_add(1, Ordering::Relaxed) + 1;
        let purpose = Purpose::Saved;
        Self { number, table, purpose, pieces, reservations, summaries, distrusted }
    }

    fn is_awaited(&self) -> bool {
        matches!(self.purpose, Purpose::Awaited)
    }

    fn is_shared(&self) -> bool {
        matches!(self.purpose, Purpose::Shared(_))
    }

    /// The pieces of the allocation that an address lies in; none if nothing of it is in the table.
    fn allocation_of(&self, address: u64) -> Range<usize> {
        let (Some(first), Some(last)) = (self.pieces.first(), self.pieces.last()) else {
            return 0..0;
        };
        // Most words are no pointers. A reservation may begin before its first piece.
        if self.reservations.is_empty() && (address < first.low || address >= last.end) {
            return 0..0;
        }
        let at = self.pieces.partition_point(|piece| piece.end <= address);
        match self.pieces.get(at) {
            Some(piece) if piece.low <= address => piece.allocation.clone(),
            _ if self.reservations.is_empty() => 0..0,
            _ => index::find(address)
                .and_then(|id| self.reservations.get(&id).cloned())
                .unwrap_or(0..0),
        }
    }

    /// What a call has to wait for; `None` if it may go on.
    fn needs(&self, call: &Decoded) -> Option<Needs> {
        let mut collector = Collector { guard: self, needs: Needs::default() };
        call.show(&mut collector);
        let mut needs = collector.needs;
        if needs.everything {
            needs.chunks = self.everything();
        }
        let waits = !needs.chunks.is_empty() && !needs.is_captured();
        waits.then_some(needs)
    }

    /// All ranges that have chunks that are not saved.
    fn everything(&self) -> Vec<(usize, Range<usize>)> {
        let all = self.table.all().enumerate().map(|(range, c)| (range, 0..c.states.len(), c));
        all.filter(|(_, whole, c)| !c.are_saved(whole.clone())).map(|(r, w, _)| (r, w)).collect()
    }

    /// Leaves the gate, waits for these chunks, and enters again. The guard may be gone afterwards.
    fn wait(&self, needs: Vec<(usize, Range<usize>)>, first: bool) {
        /// Ends the use of the guard, even by a panic.
        struct Waiting;
        impl Drop for Waiting {
            fn drop(&mut self) {
                WAITERS.fetch_sub(1, Ordering::SeqCst);
            }
        }
        // Before the gate is left: it keeps the guard until here, the count from here on.
        WAITERS.fetch_add(1, Ordering::SeqCst);
        let waiting = Waiting;
        gate::aside(move || {
            let waiting = waiting;
            let begin = monotonic_ns();
            let chunks = || {
                needs.iter().flat_map(|(range, within)| within.clone().map(|chunk| (*range, chunk)))
            };
            // All of them first: they are saved in one go.
            for (range, chunk) in chunks() {
                self.table.chunks(range).want(chunk);
            }
            if let Purpose::Shared(server) = &self.purpose {
                server.unpark();
            }
            for (range, chunk) in chunks() {
                self.table.chunks(range).wait(chunk);
            }
            self.table.header().waited(Wait { begin, end: monotonic_ns() }, first);
            drop(waiting);
        });
    }

    fn known(&self, handle: u64) -> Arc<KernelWrites> {
        let generation = kernels::generation();
        let cached = CACHE.try_with(|cache| {
            let mut cache = cache.borrow_mut();
            if (cache.guard, cache.generation) != (self.number, generation) {
                *cache = Cache { guard: self.number, generation, known: HashMap::new() };
            }
            cache.known.get(&handle).cloned()
        });
        if let Ok(Some(known)) = cached {
            return known;
        }
        let known = Arc::new(self.judge(kernels::find(handle)));
        let _ = CACHE.try_with(|cache| cache.borrow_mut().known.insert(handle, known.clone()));
        known
    }

    fn judge(&self, kernel: Arc<Kernel>) -> KernelWrites {
        let summary = self.summaries.get(&kernel.id);
        let distrusted = self.distrusted.contains(&kernel.name);
        let anywhere = distrusted || summary.is_some_and(|summary| summary.anywhere);
        let writes = |slot: Slot| {
            let Some(summary) = summary.filter(|_| !distrusted) else { return Writes::All };
            let reached = summary.reaches.iter().find(|reached| reached.slot == slot);
            match reached {
                _ if summary.reads.contains(&slot) => Writes::Nothing,
                Some(reached) => Writes::Reach(reached.reach.clone()),
                None => Writes::All,
            }
        };
        let words = kernel.words.iter();
        let writes =
            words.map(|word| writes(Slot { param: word.param, offset: word.offset })).collect();
        KernelWrites { kernel, anywhere, writes }
    }
}

impl Needs {
    /// Whether the call is only recorded into a graph: it does nothing now.
    fn is_captured(&self) -> bool {
        // The default streams: asking about them can disturb captures of others.
        const DEFAULT: std::ops::RangeInclusive<u64> = 0..=2;
        if DEFAULT.contains(&self.stream) {
            return false;
        }
        let mut status = 0;
        // SAFETY: writes one value; the program is using the stream.
        let mut ask = || unsafe { real::cuStreamIsCapturing(self.stream, &mut status) };
        gate::capturing() && ask() == SUCCESS && status != 0
    }
}

/// Forgets everything, in the child of a fork, which does not have the table.
///
/// # Safety
/// No other thread exists.
pub(crate) unsafe fn reset() {
    gate::set_guarding(false);
    GUARD.store(std::ptr::null_mut(), Ordering::Relaxed);
    WAITERS.store(0, Ordering::Relaxed);
}
