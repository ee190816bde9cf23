//! How long kernels take, where that decides which of them can be interrupted (`--interruptible auto`).
//!
//! Of each kernel some launches are measured: an event is recorded before such a launch and one behind it, and what lies
//! between them is looked at when the kernel is launched again. A kernel of which one took [`LONG`] gets a twin. Launches
//! of that are not measured by events: they are seen to end, and a kernel of which several in a row were seen to be
//! short is measured anew.

use std::collections::HashMap;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, mpsc};
use std::thread;
use std::time::Duration;

use crate::abi::real::{self, Relaxed, check};
use crate::abi::types::{Code, ERROR_NOT_READY, SUCCESS};
use crate::log::log;
use crate::resettable::Resettable;
use crate::state::kernels::Kernel;
use crate::watch::own;

/// A kernel that takes so long can be interrupted.
const LONG: Duration = Duration::from_millis(20);
/// A dump may wait so long for blocks to end.
pub(super) const SOON: Duration = Duration::from_millis(75);
/// On an H200, blocks of a twin begin every 5 ns at best, since each writes to the control block. If those of the kernel
/// itself come in less than this time, nanoseconds, a twin might take longer.
const TINY: u128 = 20;
/// So many launches in a row that were shorter, and its kernel is launched as it is.
const SHORT_IN_A_ROW: u32 = 8;
/// The first launches of a kernel are measured.
const FIRST: u64 = 3;
/// And one of so many in any case.
const SELDOM: u64 = 1024;
/// Of more kernels nothing is kept, but of those that take long.
const MOST_KERNELS: usize = 1 << 14;

/// What is known of how long a kernel takes.
pub(super) struct Length {
    pub(super) kernel: Arc<Kernel>,
    state: Mutex<State>,
}

#[derive(Default)]
struct State {
    /// Since it has been measured, or is again.
    launches: u64,
    /// A launch that may be under way.
    measured: Option<(Events, Grid)>,
    is_long: bool,
    /// A launch took long, but its blocks are too short for a twin.
    is_tiny: bool,
    /// The longest that a round has taken in a launch that was measured, on average.
    round: Duration,
    /// Launches in a row that were not long, though it was.
    short: u32,
    /// How often its twin could not be loaded since the device was busy, and launches that are left until that is tried
    /// again.
    busy: (u32, u64),
}

/// How large the grid of a launch is.
#[derive(Debug, Clone, Copy)]
pub(super) struct Grid {
    pub(super) blocks: u64,
    /// So many times as many blocks as can run at a time.
    pub(super) rounds: u64,
}

/// Two events, which are recorded before and behind a launch.
#[derive(Debug, Clone, Copy)]
struct Events {
    context: u64,
    begin: u64,
    end: u64,
}

/// What is to be done with a launch.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Next {
    /// Nothing.
    Plain,
    /// It is measured.
    Measure,
    /// It takes long.
    Long,
}

#[derive(Default)]
struct Known {
    /// By the numbers of kernels.
    lengths: HashMap<u64, Arc<Length>>,
    /// Events that nobody uses.
    spare: Vec<Events>,
}

static KNOWN: Resettable<Mutex<Option<Known>>> = Resettable::new(Mutex::new(None));
/// A thread waits for a context.
static IS_WAITING: AtomicBool = AtomicBool::new(false);

fn with<T>(work: impl FnOnce(&mut Known) -> T) -> T {
    let mut known: MutexGuard<'_, Option<Known>> =
        KNOWN.get().lock().unwrap_or_else(PoisonError::into_inner);
    work(known.get_or_insert_default())
}

/// What is known of a kernel's launches.
pub(super) fn of(kernel: &Arc<Kernel>) -> Arc<Length> {
    with(|known| {
        if known.lengths.len() >= MOST_KERNELS {
            known.lengths.retain(|_, length| {
                let state = length.state();
                state.is_long || state.measured.is_some()
            });
        }
        let new = || Arc::new(Length { kernel: kernel.clone(), state: Mutex::default() });
        known.lengths.entry(kernel.id).or_insert_with(new).clone()
    })
}

/// Why no kernel of this name gets a twin; `None` if one takes long.
pub(super) fn why_not(name: &str) -> Option<&'static str> {
    with(|known| {
        let mut is_tiny = false;
        for one in known.lengths.values().filter(|one| one.kernel.name == name) {
            let state = one.state();
            if state.is_long {
                return None;
            }
            is_tiny |= state.is_tiny;
        }
        Some(if is_tiny {
            "its blocks are so short that a twin would slow it down; name it to have one anyway"
        } else {
            "none of its launches that were measured took 20 ms"
        })
    })
}

impl Length {
    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(super) fn is_long(&self) -> bool {
        self.state().is_long
    }

    /// Whether its blocks end soon, by the launches that were measured: then the device is idle soon if it is interrupted between
    /// blocks, which costs less than inside of them.
    pub(super) fn has_short_blocks(&self) -> bool {
        let state = self.state();
        state.is_long && state.round < SOON
    }

    /// What is to be done with a launch that is about to be made.
    pub(super) fn next(&self) -> Next {
        // The table's lock is taken before that of a kernel, or without it.
        let (next, over) = self.state().next(&self.kernel.name);
        if let Some(events) = over {
            with(|known| known.spare.push(events));
        }
        next
    }

    /// Makes a launch, which is measured, in a stream of `context`, which is current; what the driver says to it. `None`: it
    /// cannot be measured, and was not made.
    pub(super) fn measure(
        &self,
        context: u64,
        stream: u64,
        grid: Grid,
        launch: impl FnOnce() -> Result<(), Code>,
    ) -> Option<Code> {
        let _relaxed = Relaxed::now();
        let events = Events::new(context).ok()?;
        // SAFETY: an event of ours, and the stream of a call that is under way.
        let begun = unsafe { real::cuEventRecord(events.begin, stream) };
        if begun != SUCCESS {
            with(|known| known.spare.push(events));
            return None;
        }
        let made = launch();
        // SAFETY: as above.
        let ended = unsafe { real::cuEventRecord(events.end, stream) };
        if made.is_ok() && ended == SUCCESS {
            self.state().measured = Some((events, grid));
        } else {
            with(|known| known.spare.push(events));
        }
        Some(made.err().unwrap_or(SUCCESS))
    }

    /// A launch of its twin was over after this time at the latest.
    pub(super) fn observed(&self, time: Duration, grid: Grid) {
        let mut state = self.state();
        state.short = if time < LONG || grid.is_tiny(time) { state.short + 1 } else { 0 };
        if state.short >= SHORT_IN_A_ROW {
            *state = State::default();
        }
    }

    /// Whether it is to be tried to load its twin for this launch.
    pub(super) fn may_load(&self) -> bool {
        let (_, left) = &mut self.state().busy;
        let may = *left == 0;
        *left = left.saturating_sub(1);
        may
    }

    /// Its twin could not be loaded, since the device was busy.
    pub(super) fn was_busy(&self) {
        let (times, left) = &mut self.state().busy;
        *times = (*times + 1).min(SELDOM.ilog2());
        *left = 1 << *times;
    }
}

impl State {
    /// A launch took so long.
    fn took(&mut self, time: Duration, grid: Grid) {
        self.round = self.round.max(grid.time_of_a_round(time));
        if time >= LONG {
            self.is_tiny = grid.is_tiny(time);
            self.is_long = !self.is_tiny;
        }
    }

    /// What is to be done with a launch; and the events of one that is over.
    fn next(&mut self, name: &str) -> (Next, Option<Events>) {
        let mut over = None;
        if let Some((events, grid)) = self.measured {
            match took(events) {
                Err(ERROR_NOT_READY) => {}
                Err(_) => self.measured = None,
                Ok(time) => {
                    self.measured = None;
                    over = Some(events);
                    if time >= LONG {
                        log!("`{name}` took {} ms, {grid:?}", time.as_millis());
                    }
                    self.took(time, grid);
                }
            }
        }
        if self.is_long {
            return (Next::Long, over);
        }
        let number = self.launches;
        self.launches += 1;
        let is_due = number < FIRST || number.is_power_of_two() || number.is_multiple_of(SELDOM);
        let next = if is_due && self.measured.is_none() { Next::Measure } else { Next::Plain };
        (next, over)
    }
}

impl Grid {
    /// Whether blocks of a twin could not begin as fast as these if all take this time.
    fn is_tiny(self, time: Duration) -> bool {
        time.as_nanos() < TINY * u128::from(self.blocks)
    }

    /// How long a round takes if all take this time.
    pub(super) fn time_of_a_round(self, time: Duration) -> Duration {
        time / u32::try_from(self.rounds.max(1)).unwrap_or(u32::MAX)
    }
}

impl Events {
    /// Two of the current context.
    fn new(context: u64) -> Result<Self, Code> {
        let spare = with(|known| {
            let at = known.spare.iter().position(|events| events.context == context)?;
            Some(known.spare.swap_remove(at))
        });
        if let Some(spare) = spare {
            return Ok(spare);
        }
        let (mut begin, mut end) = (0, 0);
        // SAFETY: it writes one value.
        check(unsafe { real::cuEventCreate(&mut begin, 0) })?;
        // SAFETY: as above.
        let made = check(unsafe { real::cuEventCreate(&mut end, 0) });
        if made.is_err() {
            // SAFETY: one that has just been made.
            unsafe { real::cuEventDestroy_v2(begin) };
        }
        made.map(|()| Self { context, begin, end })
    }
}

/// The time between two events; an error of the driver, or that they are not over.
fn took(events: Events) -> Result<Duration, Code> {
    let _relaxed = Relaxed::now();
    let mut time = 0f32;
    // SAFETY: events of ours, whose context there is: those of others are forgotten. The second writes one value.
    unsafe {
        check(real::cuEventQuery(events.end))?;
        check(real::cuEventElapsedTime(&mut time, events.begin, events.end))?;
    }
    // Nonsense of a driver is no time.
    Ok(Duration::try_from_secs_f32(time / 1000.0).unwrap_or_default())
}

/// Whether a context comes to rest within this time. Nothing new comes meanwhile.
pub(super) fn comes_to_rest(context: u64, limit: Duration) -> bool {
    if IS_WAITING.swap(true, Ordering::SeqCst) {
        return false;
    }
    let (say, said) = mpsc::channel();
    // The driver's wait has no time limit. If nobody waits any more, the thread ends when the context is at rest.
    let wait = move || {
        own::exempt_this_thread();
        let _relaxed = Relaxed::now();
        let rests = real::synchronize(context).is_ok();
        IS_WAITING.store(false, Ordering::SeqCst);
        let _ = say.send(rests);
    };
    let started = thread::Builder::new().name("gpucr-idle".into()).spawn(wait);
    if let Err(error) = started {
        IS_WAITING.store(false, Ordering::SeqCst);
        log!("no thread to wait until a device is idle: {error}");
        return false;
    }
    said.recv_timeout(limit) == Ok(true)
}

/// A context is gone, and all events in it.
pub(super) fn context_gone(context: u64) {
    with(|known| {
        known.spare.retain(|events| events.context != context);
        for length in known.lengths.values() {
            let mut state = length.state();
            state.measured = state.measured.filter(|(events, _)| events.context != context);
        }
    });
}

/// Forgets everything, in the child of a fork.
///
/// # Safety
/// No other thread exists.
pub(super) unsafe fn reset() {
    IS_WAITING.store(false, Ordering::SeqCst);
    // SAFETY: the caller's duty.
    unsafe { KNOWN.reset(Mutex::new(None)) };
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::state::kernels;

    /// A grid that runs in one round.
    const ONE: Grid = Grid { blocks: 1, rounds: 1 };

    fn length() -> Length {
        Length { kernel: Arc::new(kernels::nameless()), state: Mutex::default() }
    }

    #[test]
    fn some_launches_are_measured() {
        let length = length();
        let measured = (0..5000).filter(|_| length.next() == Next::Measure).count();
        // 0, 1, 2, 4, ..., 4096 and 3072.
        assert_eq!(measured, 15);
    }

    #[test]
    fn what_was_short_several_times_is_measured_anew() {
        let length = length();
        length.state().is_long = true;
        assert_eq!(length.next(), Next::Long);
        for _ in 1..SHORT_IN_A_ROW {
            length.observed(Duration::from_millis(3), ONE);
        }
        length.observed(LONG, ONE);
        for _ in 1..SHORT_IN_A_ROW {
            length.observed(Duration::from_millis(3), ONE);
        }
        assert!(length.is_long());
        length.observed(Duration::from_millis(3), ONE);
        assert_eq!(length.next(), Next::Measure);
    }

    #[test]
    fn kernels_of_tiny_blocks_get_no_twin() {
        let length = length();
        let of = |blocks| Grid { blocks, rounds: 1 + blocks / 2112 };
        // As measured on an H200: a twin took 73 % more.
        length.state().took(Duration::from_millis(184), of(1 << 26));
        assert_eq!((length.is_long(), length.state().is_tiny), (false, true));
        // And there 0.3 %.
        length.state().took(Duration::from_millis(193), of(1 << 23));
        assert_eq!((length.is_long(), length.state().is_tiny), (true, false));
        length.state().took(Duration::from_millis(3), of(1 << 26));
        assert!(length.is_long());
    }

    #[test]
    fn blocks_are_short_as_long_as_no_round_was_long() {
        let length = length();
        assert!(!length.has_short_blocks(), "nothing is known");
        length.state().took(SOON * 4, Grid { blocks: 9, rounds: 5 });
        assert!(length.has_short_blocks());
        length.state().took(SOON * 4, Grid { blocks: 8, rounds: 4 });
        assert!(!length.has_short_blocks());
        length.state().took(LONG, Grid { blocks: 1000, rounds: 500 });
        assert!(!length.has_short_blocks(), "some were long");
        // Tiny blocks count as short ones, since their launches are better made without a twin.
        for _ in 0..SHORT_IN_A_ROW {
            length.observed(LONG, Grid { blocks: 1 << 40, rounds: 1 << 30 });
        }
        assert_eq!(length.next(), Next::Measure);
        length.state().took(LONG, Grid { blocks: 0, rounds: 0 });
        assert!(length.is_long());
        length.state().took(LONG, Grid { blocks: 2, rounds: 1 });
        assert!(length.has_short_blocks(), "it was measured anew");
    }

    #[test]
    fn a_busy_device_is_waited_for_ever_less_often() {
        let length = length();
        let mut tries = 0;
        for _ in 0..1000 {
            if length.may_load() {
                tries += 1;
                length.was_busy();
            }
        }
        assert_eq!(tries, 9);
    }
}
