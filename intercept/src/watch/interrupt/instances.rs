//! Launches that can be interrupted, and what waits for them.
//!
//! A launch of a twin is an instance from before it is made until it is seen to be over, or is *released*: from then on
//! it is like any other launch, and nobody interrupts it. While there are instances, a call that passes the gate waits outside
//! of it, unless it is known to be for a stream whose order has nothing to do with theirs. So behind an instance nothing is
//! queued. Who waits for [`HOLD`] releases what it waits for, so that a program which has to go on for its kernel's
//! sake does.
//!
//! The table's lock is taken inside the gate or by the agent, and never while the gate is waited for.

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread;
use std::time::{Duration, Instant};

use super::layout::{Layout, Shape};
use super::lengths::{Grid, Length};
use super::recent::Class;
use super::twins::{self, Entry, Relaxed, Twin};
use crate::abi::real;
use crate::abi::types::{Code, ERROR_NOT_READY, SUCCESS};
use crate::calls::effects::Form;
use crate::cancel;
use crate::resettable::Resettable;
use crate::state::gate;
use crate::watch::own;

/// For how long a call waits for an instance.
pub(super) const HOLD: Duration = Duration::from_secs(1);
/// The pauses between looks: they grow with the time that has passed, up to this.
const LONGEST_PAUSE: Duration = Duration::from_millis(2);
/// For how long it is looked all the time.
const AT_ONCE: Duration = Duration::from_micros(30);
/// `CU_STREAM_LEGACY`
pub(super) const LEGACY: u64 = 1;
/// The default streams.
const DEFAULT: std::ops::RangeInclusive<u64> = 0..=2;

/// Memory of the device that tells a twin which blocks or threads to run, and from where.
#[derive(Debug, Clone, Copy)]
pub(super) struct Control {
    pub(super) address: u64,
    /// Bytes that there are.
    pub(super) capacity: u64,
}

/// A launch that can be interrupted.
#[derive(Clone)]
pub(super) struct Instance {
    /// Unlike that of any other.
    pub(super) number: u64,
    pub(super) context: u64,
    /// As the functions without suffix know it; the default stream is [`LEGACY`].
    pub(super) stream: u64,
    /// Whether synchronous copies wait for its stream.
    pub(super) is_blocking: bool,
    pub(super) twin: Arc<Twin>,
    /// The one of its twins that is launched.
    pub(super) entry: Entry,
    /// What its control block has.
    pub(super) layout: Layout,
    pub(super) form: Form,
    /// All parameters, the control block's address among them.
    pub(super) arguments: Arc<[u8]>,
    pub(super) control: Control,
    pub(super) shape: Shape,
    /// Recorded behind the launch.
    pub(super) event: u64,
    pub(super) state: State,
    pub(super) watched: Watched,
    /// So many of its blocks were done when it was looked at last.
    pub(super) done: u64,
    /// How often it was interrupted since a block of it came to its end.
    pub(super) in_vain: u32,
    /// When it was launched.
    pub(super) since: Instant,
}

/// What is to be noted of an instance when it is over.
#[derive(Clone)]
pub(super) enum Watched {
    /// Nothing.
    No,
    /// How long it took: it depends on that whether the kernel may be interrupted.
    Length(Arc<Length>, Grid),
    /// How long its blocks took: it depends on that where the kernel is interrupted.
    Blocks(Class, Grid),
}

/// Where an instance stands.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum State {
    /// It is in its stream.
    Running,
    /// Its flag is raised or about to be, and it is to be launched again before it can be over.
    Interrupted,
}

/// The table.
#[derive(Default)]
pub(super) struct Table {
    pub(super) instances: Vec<Instance>,
    /// Threads that are about to launch one.
    pub(super) launching: u32,
    /// Of released ones: what they use, as far as they are not known to be over.
    pub(super) released: Vec<Instance>,
    /// What the next ones can use: controls and events, by context. Their flags are 0.
    pub(super) spare: Vec<(u64, Control, u64)>,
    /// A stream of ours for each context.
    pub(super) streams: Vec<(u64, u64)>,
    pub(super) last: u64,
}

static TABLE: Resettable<Mutex<Option<Table>>> = Resettable::new(Mutex::new(None));
/// Goes up whenever something is interrupted, and whenever it is launched again.
static EPOCH: AtomicU64 = AtomicU64::new(0);

/// Works on the table. Calls wait for what is in it afterwards.
pub(super) fn with<T>(work: impl FnOnce(&mut Table) -> T) -> T {
    let mut table: MutexGuard<'_, Option<Table>> =
        TABLE.get().lock().unwrap_or_else(PoisonError::into_inner);
    let table = table.get_or_insert_default();
    let result = work(table);
    let is_holding = table.launching > 0 || !table.instances.is_empty();
    // Every call reads where that is written.
    if gate::is_holding() != is_holding {
        gate::set_holding(is_holding);
    }
    result
}

/// Something is interrupted, or was launched again. To be called before the table says so.
pub(super) fn new_epoch() {
    EPOCH.fetch_add(1, Ordering::SeqCst);
}

impl Table {
    /// An instance that comes before a call for a stream; `None`: one of which the stream is not known.
    fn in_the_way(&self, stream: Option<u64>) -> Option<&Instance> {
        let order = |instance: &Instance| {
            let Some(stream) = stream else { return true };
            let is_default = DEFAULT.contains(&stream) || DEFAULT.contains(&instance.stream);
            // What is in a default stream has no order with streams that were made not to wait for it.
            stream == instance.stream || is_default && instance.is_blocking
        };
        self.instances.iter().find(|instance| order(instance))
    }

    /// Takes an instance out that is over or released.
    pub(super) fn end(&mut self, number: u64) {
        if let Some(at) = self.instances.iter().position(|one| one.number == number) {
            let ended = self.instances.swap_remove(at);
            self.released.push(ended);
        }
    }

    /// Takes back what is not used any more.
    pub(super) fn reclaim(&mut self) {
        let (over, used): (Vec<_>, Vec<_>) =
            std::mem::take(&mut self.released).into_iter().partition(|one| is_over(one.event));
        self.released = used;
        self.spare.extend(over.into_iter().map(|one| (one.context, one.control, one.event)));
    }

    /// Takes out what is over.
    pub(super) fn settle(&mut self) {
        let over = |one: &&Instance| one.state == State::Running && is_over(one.event);
        let over: Vec<Instance> = self.instances.iter().filter(over).cloned().collect();
        for one in over {
            one.is_over();
            self.end(one.number);
        }
    }
}

impl Instance {
    /// Notes how long it took.
    fn is_over(&self) {
        let time = self.since.elapsed();
        match &self.watched {
            Watched::No => {}
            Watched::Length(length, grid) => length.observed(time, *grid),
            Watched::Blocks(class, grid) => {
                self.twin.recent.observed(*class, grid.time_of_a_round(time));
            }
        }
    }

    /// Nobody will see when it is over.
    fn is_released(&self) {
        if let Watched::Blocks(class, _) = self.watched {
            self.twin.recent.unknown(class);
        }
    }
}

/// Whether what was before an event is over, or broken.
fn is_over(event: u64) -> bool {
    let _relaxed = Relaxed::now();
    // SAFETY: an event of ours. One that is gone with its context is an error.
    unsafe { real::cuEventQuery(event) != ERROR_NOT_READY }
}

/// How long a call waits.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Patience {
    /// [`HOLD`], and then what it waits for is like any other launch.
    Limited,
    /// The driver would have it wait for all work of this context too, so nothing there can depend on this thread.
    ForContext(u64),
    /// The same, as far as work is in streams of the context that synchronous copies wait for.
    ForBlocking(u64),
}

/// Waits for what can be interrupted and comes before a call for this stream; `None`: a call of which the stream is not
/// known. The call is inside the gate, which it leaves while it waits, or never passes it.
#[cold]
pub(crate) fn hold(stream: Option<u64>, patience: Patience) {
    // The stack must not be unwound from a pause.
    let _uncancelled = cancel::not_now();
    let begin = Instant::now();
    loop {
        let waits = with(|table| {
            table.settle();
            if table.launching > 0 {
                return true;
            }
            let Some(instance) = table.in_the_way(stream) else { return false };
            let number = instance.number;
            let is_patient = match patience {
                Patience::Limited => false,
                Patience::ForContext(context) => instance.context == context,
                Patience::ForBlocking(context) => {
                    instance.context == context && instance.is_blocking
                }
            };
            let is_running = instance.state == State::Running;
            if is_running && !is_patient && begin.elapsed() >= HOLD {
                instance.is_released();
                twins::note(&instance.twin.kernel.name, "more was queued behind it");
                table.end(number);
                return table.in_the_way(stream).is_some();
            }
            true
        });
        if !waits {
            return;
        }
        gate::aside(|| pause(begin));
    }
}

fn pause(begin: Instant) {
    let passed = begin.elapsed();
    if passed < AT_ONCE {
        thread::yield_now();
    } else {
        thread::sleep((passed / 8).min(LONGEST_PAUSE));
    }
}

/// A thread that is about to launch an instance. Nobody else is inside the gate, and whoever enters waits.
pub(super) struct Launching(());

impl Launching {
    /// `None` if another launch is in the way, or somebody stays inside.
    pub(super) fn begin(stream: u64, limit: Duration) -> Option<Self> {
        let is_free = with(|table| {
            table.settle();
            table.reclaim();
            let is_free = table.launching == 0 && table.in_the_way(Some(stream)).is_none();
            table.launching += u32::from(is_free);
            is_free
        });
        if !is_free {
            return None;
        }
        // From here on the count is taken back whatever happens.
        let launching = Self(());
        if gate::alone(limit) { Some(launching) } else { None }
    }
}

impl Drop for Launching {
    fn drop(&mut self) {
        with(|table| table.launching -= 1);
    }
}

/// Makes a call of the program that waits for work, or asks for it, and passes no gate; again, if something was interrupted
/// meanwhile that it may have taken for done.
pub(crate) fn truthful(call: impl Fn() -> Code) -> Code {
    if !gate::is_interruptible() || own::is_ours() {
        return call();
    }
    loop {
        let before = EPOCH.load(Ordering::SeqCst);
        let code = call();
        if code != SUCCESS {
            return code;
        }
        let _uncancelled = cancel::not_now();
        let begin = Instant::now();
        // How long they took is known best now.
        if gate::is_holding() {
            with(Table::settle);
        }
        let is_interrupted = |one: &Instance| one.state == State::Interrupted;
        while with(|table| table.instances.iter().any(is_interrupted)) {
            gate::aside(|| pause(begin));
        }
        if EPOCH.load(Ordering::SeqCst) == before {
            return code;
        }
    }
}

/// Whether all instances are over, the released ones among them.
pub(super) fn are_over() -> bool {
    with(|table| {
        table.settle();
        table.reclaim();
        table.instances.is_empty() && table.released.is_empty()
    })
}

/// A context is gone, and all that was in it.
pub(super) fn context_gone(context: u64) {
    with(|table| {
        table.instances.retain(|one| one.context != context);
        table.released.retain(|one| one.context != context);
        table.spare.retain(|(of, ..)| *of != context);
        table.streams.retain(|(of, _)| *of != context);
    });
}

/// Forgets everything, in the child of a fork.
///
/// # Safety
/// No other thread exists.
pub(super) unsafe fn reset() {
    // SAFETY: the caller's duty.
    unsafe { TABLE.reset(Mutex::new(None)) };
}
