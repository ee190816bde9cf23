//! Events of legacy IPC, served by the shim: what processes share of them is a cell of shared memory.
//!
//! A cell has the number of the event's last record, and a word for each of the last records in turn. A record counts
//! the number up, and has the stream write it to the word of that number; who waits for the record waits until that word
//! has come so far. Numbers go round and round, and are compared like that.
//!
//! Cells are in arenas. A process makes arenas for its own events and keeps them; of an arena of another process there is
//! a mapping as long as an event in it is open, and until all that was enqueued with it is done.

use std::collections::{BTreeMap, HashMap, HashSet};
use std::os::fd::OwnedFd;
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, Weak};

use gpucr_wire::Counts;
use gpucr_wire::peers::Identity;

use super::memory::Origin;
use super::peers;
use crate::abi::real::{self, check};
use crate::abi::types::{Code, ERROR_MAP_FAILED, ERROR_OUT_OF_MEMORY};
use crate::log::log;
use crate::resettable::Resettable;

mod arena;

use arena::{Arena, CELLS, Cell};

/// `CU_STREAM_WAIT_VALUE_GEQ`: cyclic.
const AT_LEAST: u32 = 0;
/// In a name that others may open: it is an event's.
const NAME: u64 = 1 << 63;

/// An event of legacy IPC, as one process has it.
pub(crate) struct Event {
    arena: Arc<Arena>,
    cell: usize,
    /// The owner's name for it.
    name: u64,
    /// The number of the last record that is not its own.
    base: u32,
    /// Of one that was opened.
    origin: Option<Origin>,
    /// Others may open it.
    is_offered: AtomicBool,
    /// The number of the last record of this process.
    own: AtomicU32,
    /// The last record of this process was in a capture, and is the driver's alone.
    is_captured: AtomicBool,
    /// The context with which it is gone.
    context: u64,
}

impl Event {
    fn cell(&self) -> &Cell {
        self.arena.cell(self.cell)
    }

    /// The number of the last record, if it is not one that the driver's own event stands for.
    pub(crate) fn foreign_record(&self) -> Option<u32> {
        let last = self.cell().recorded.load(Ordering::Acquire);
        let own = self.own.load(Ordering::Acquire);
        let is_foreign = last != self.base && last != own;
        (is_foreign && !self.is_captured.load(Ordering::Relaxed)).then_some(last)
    }

    /// Whether a record was passed. What a process has recorded that has ended counts as passed.
    pub(crate) fn is_passed(&self, number: u32) -> bool {
        let cell = self.cell();
        cell.is_passed(number)
            || (cell.recorded.load(Ordering::Acquire) == number && has_recorder_ended(cell))
    }

    /// After the driver has recorded its event in a stream: in a capture if it is being `captured`.
    ///
    /// # Errors
    /// The driver's code.
    pub(crate) fn record(&self, stream: u64, captured: bool) -> Result<(), Code> {
        self.is_captured.store(captured, Ordering::Relaxed);
        if captured {
            return Ok(());
        }
        let cell = self.cell();
        cell.namespace.store(namespace(), Ordering::Release);
        cell.recorder.store(std::process::id(), Ordering::Release);
        let number = cell.recorded.fetch_add(1, Ordering::AcqRel).wrapping_add(1);
        self.own.store(number, Ordering::Release);
        let written = self.arena.device_address(self.cell, number).and_then(|word| {
            // SAFETY: a word of memory that is registered.
            check(unsafe { real::cuStreamWriteValue32_v2(stream, word, number, 0) })
        });
        self.arena.used(stream);
        written.inspect_err(|code| {
            log!("a record is not written: error {code}");
            // Nobody waits for what does not come.
            cell.passed[Cell::word(number)].store(number, Ordering::Release);
        })
    }

    /// Has a stream wait for a record of another process.
    ///
    /// # Errors
    /// The driver's code.
    pub(crate) fn wait(&self, stream: u64, number: u32) -> Result<(), Code> {
        let word = self.arena.device_address(self.cell, number)?;
        // SAFETY: a word of memory that is registered.
        check(unsafe { real::cuStreamWaitValue32_v2(stream, word, number, AT_LEAST) })?;
        self.arena.used(stream);
        Ok(())
    }
}

/// The pid namespace that this process has told others; 0 before. After a restore it may be in another one, and then
/// nobody takes it for a process that has ended.
static NAMESPACE: AtomicU64 = AtomicU64::new(0);

fn namespace() -> u64 {
    let mut known = NAMESPACE.load(Ordering::Relaxed);
    if known == 0 {
        known = gpucr_wire::own_pid_namespace().unwrap_or(0);
        NAMESPACE.store(known, Ordering::Relaxed);
    }
    known
}

/// Whether the process of the last record is known to have ended: a pid of another namespace says nothing here.
fn has_recorder_ended(cell: &Cell) -> bool {
    let (pid, of) = (cell.recorder.load(Ordering::Acquire), cell.namespace.load(Ordering::Acquire));
    gpucr_wire::own_pid_namespace().is_ok_and(|own| own == of) && !peers::is_alive(pid)
}

#[derive(Default)]
struct Events {
    /// By the driver's handle.
    by_handle: HashMap<u64, Arc<Event>>,
    last_name: u64,
    own: Vec<Arc<Arena>>,
    /// The cells of own arenas that are in use, with the names of their events: also of those that are destroyed here
    /// and open elsewhere.
    cells: BTreeMap<(usize, usize), u64>,
    /// Arenas of others of which an event is open.
    others: HashMap<(Identity, u64), Weak<Arena>>,
    /// Those of which none is open any more.
    retired: Vec<Arc<Arena>>,
}

static EVENTS: Resettable<Mutex<Option<Events>>> = Resettable::new(Mutex::new(None));
/// Whether there has been such an event: programs use many others.
static ANY: AtomicBool = AtomicBool::new(false);
/// How many there are.
static COUNT: AtomicU64 = AtomicU64::new(0);

/// The locked tables.
struct Locked(MutexGuard<'static, Option<Events>>);

fn lock() -> Locked {
    let mut guard = EVENTS.get().lock().unwrap_or_else(|poisoned| poisoned.into_inner());
    guard.get_or_insert_default();
    Locked(guard)
}

impl std::ops::Deref for Locked {
    type Target = Events;
    fn deref(&self) -> &Events {
        self.0.as_ref().expect("made by lock()")
    }
}

impl std::ops::DerefMut for Locked {
    fn deref_mut(&mut self) -> &mut Events {
        self.0.as_mut().expect("made by lock()")
    }
}

/// Whether there is any such event.
#[inline(always)]
pub(crate) fn any() -> bool {
    ANY.load(Ordering::Relaxed)
}

/// The event of this handle; none if it is not one of these.
pub(crate) fn find(handle: u64) -> Option<Arc<Event>> {
    if any() { lock().by_handle.get(&handle).cloned() } else { None }
}

/// By which name those who open an event are known.
pub(crate) fn peer_name(event: u64) -> u64 {
    NAME | event
}

impl Events {
    fn insert(&mut self, handle: u64, event: Event) {
        self.by_handle.insert(handle, Arc::new(event));
        COUNT.store(self.by_handle.len() as u64, Ordering::Relaxed);
        ANY.store(true, Ordering::Relaxed);
    }

    /// A cell that nobody uses.
    fn free_cell(&mut self) -> Option<(usize, usize)> {
        let live: HashSet<u64> = self
            .by_handle
            .values()
            .filter(|event| event.origin.is_none())
            .map(|event| event.name)
            .collect();
        let own = &self.own;
        self.cells.retain(|(arena, cell), name| {
            live.contains(name)
                || peers::is_open(peer_name(*name))
                || !own[*arena].cell(*cell).is_settled()
        });
        let all = (0..own.len()).flat_map(|arena| (0..CELLS).map(move |cell| (arena, cell)));
        let free = all.into_iter().find(|place| !self.cells.contains_key(place));
        free.or_else(|| {
            self.own.push(Arc::new(Arena::new()?));
            Some((self.own.len() - 1, 0))
        })
    }

    /// Lets go of arenas that are of no use any more.
    fn sweep(&mut self) -> Vec<Arc<Arena>> {
        self.retired.extract_if(.., |arena| arena.is_unused()).collect()
    }
}

/// The driver has made an event that others may be given.
///
/// # Errors
/// There is no memory for what is shared of it.
pub(crate) fn made(handle: u64, context: u64) -> Result<(), Code> {
    let mut events = lock();
    let (arena, cell) = events.free_cell().ok_or(ERROR_OUT_OF_MEMORY)?;
    events.last_name += 1;
    let name = events.last_name;
    events.cells.insert((arena, cell), name);
    let arena = Arc::clone(&events.own[arena]);
    let base = arena.cell(cell).recorded.load(Ordering::Acquire);
    let event = Event {
        arena,
        cell,
        name,
        base,
        origin: None,
        is_offered: AtomicBool::new(false),
        own: AtomicU32::new(base),
        is_captured: AtomicBool::new(false),
        context,
    };
    events.insert(handle, event);
    Ok(())
}

/// Lets others open an event; its name. `None`: it is another process's.
pub(crate) fn offer(event: &Event) -> Option<u64> {
    event.is_offered.store(true, Ordering::Relaxed);
    event.origin.is_none().then_some(event.name)
}

/// What another process gets that opens an event of this one.
pub(crate) struct Handed {
    pub(crate) arena: u64,
    pub(crate) cell: u32,
    pub(crate) base: u32,
    pub(crate) fd: OwnedFd,
}

/// The event of this name, for another process.
pub(crate) fn hand_out(name: u64) -> Option<Handed> {
    let events = lock();
    let offered =
        |event: &&Arc<Event>| event.origin.is_none() && event.is_offered.load(Ordering::Relaxed);
    let event = events.by_handle.values().filter(offered).find(|event| event.name == name)?;
    let arena = events.own.iter().position(|own| Arc::ptr_eq(own, &event.arena))?;
    let fd = event.arena.fd.as_ref()?.try_clone();
    let fd = fd.map_err(|error| log!("no descriptor: {error}")).ok()?;
    Some(Handed { arena: arena as u64, cell: event.cell as u32, base: event.base, fd })
}

/// The driver's event `handle` stands for one of another process from now on.
///
/// # Errors
/// `ERROR_MAP_FAILED`: what that process says cannot be.
pub(crate) fn opened(
    handle: u64,
    context: u64,
    origin: Origin,
    handed: &Handed,
) -> Result<(), Code> {
    let cell = usize::try_from(handed.cell).ok().filter(|cell| *cell < CELLS);
    let cell = cell.ok_or(ERROR_MAP_FAILED)?;
    let mut events = lock();
    let key = (origin.owner, handed.arena);
    let known = events.others.get(&key).and_then(Weak::upgrade);
    let arena = match known {
        Some(known) => known,
        None => {
            let new = Arc::new(Arena::open(&handed.fd).ok_or(ERROR_MAP_FAILED)?);
            events.others.insert(key, Arc::downgrade(&new));
            new
        }
    };
    let event = Event {
        arena,
        cell,
        name: origin.block,
        base: handed.base,
        origin: Some(origin),
        is_offered: AtomicBool::new(false),
        own: AtomicU32::new(handed.base),
        is_captured: AtomicBool::new(false),
        context,
    };
    events.insert(handle, event);
    let unused = events.sweep();
    drop(events);
    drop(unused);
    Ok(())
}

/// An event of the driver's is gone. Its origin, if it stood for one of another process that is not open here any more.
pub(crate) fn destroyed(handle: u64) -> Option<Origin> {
    if !any() {
        return None;
    }
    let mut events = lock();
    let event = events.by_handle.remove(&handle)?;
    let closed = events.closed(&event);
    drop(event);
    let unused = events.sweep();
    drop(events);
    drop(unused);
    closed
}

/// A context is gone, and its events. Where those come from that stood for events of others.
pub(crate) fn context_gone(context: u64) -> Vec<Origin> {
    if !any() || context == 0 {
        return Vec::new();
    }
    let mut events = lock();
    let gone: Vec<_> =
        events.by_handle.extract_if(|_, event| event.context == context).map(|(_, e)| e).collect();
    gone.iter().filter_map(|event| events.closed(event)).collect()
}

impl Events {
    /// An event is not in the table any more.
    fn closed(&mut self, event: &Arc<Event>) -> Option<Origin> {
        COUNT.store(self.by_handle.len() as u64, Ordering::Relaxed);
        let origin = event.origin?;
        let of_arena = |other: &&Arc<Event>| Arc::ptr_eq(&other.arena, &event.arena);
        if !self.by_handle.values().any(|other| of_arena(&other)) {
            // What is opened from now on is mapped anew: the owner need not be the same process any more.
            self.others.retain(|_, arena| !std::ptr::eq(arena.as_ptr(), &*event.arena));
            self.retired.push(Arc::clone(&event.arena));
        }
        let same = |other: &Arc<Event>| other.origin == Some(origin);
        (!self.by_handle.values().any(same)).then_some(origin)
    }
}

/// Writes whose events are open here.
pub(crate) fn fill(counts: &mut Counts) {
    if COUNT.load(Ordering::Relaxed) == 0 {
        return;
    }
    let events = lock();
    let origins = events.by_handle.values().filter_map(|event| event.origin);
    for owner in origins.map(|origin| origin.owner) {
        if !counts.owners.contains(&owner) {
            counts.owners.push(owner);
        }
    }
}

/// Forgets everything, in the child of a fork.
///
/// # Safety
/// No other thread exists.
pub(crate) unsafe fn reset() {
    if let Ok(mut guard) = EVENTS.get().try_lock()
        && let Some(events) = guard.take()
    {
        // The memory is not mapped here, and the driver is not this process's; descriptors are closed.
        let Events { by_handle, own, retired, .. } = events;
        std::mem::forget((by_handle, retired));
        for arena in own {
            if let Some(fd) = &arena.fd {
                // SAFETY: nobody uses it, since the arena is forgotten.
                unsafe { libc::close(std::os::fd::AsRawFd::as_raw_fd(fd)) };
            }
            std::mem::forget(arena);
        }
    }
    // SAFETY: the caller's duty.
    unsafe { EVENTS.reset(Mutex::new(None)) };
    ANY.store(false, Ordering::Relaxed);
    COUNT.store(0, Ordering::Relaxed);
    NAMESPACE.store(0, Ordering::Relaxed);
}
