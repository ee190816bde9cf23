//! What every call reads: whether the gate is open, and whether calls are looked at.

use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};

use rustix::thread::futex;

use crate::abi::real;

/// Everything passes.
pub(super) const OPEN: u32 = 0;
/// Everything but the beginning of a capture passes, and that too where one under way may depend on it.
pub(super) const NO_CAPTURE: u32 = 1;
/// Nothing passes.
pub(super) const CLOSED: u32 = 2;
/// One launch passes, and closes the gate behind it; before it all other calls. A capture opens the gate,
/// since it cannot be interrupted.
pub(super) const STEP: u32 = 3;

/// What every call reads and hardly anybody writes, together on one cache line.
#[repr(align(128))]
pub(super) struct Line {
    pub(super) state: AtomicU32,
    /// Why launches are looked at (see [`crate::watch`]).
    watched: AtomicU32,
}

/// In [`Line::watched`]: launches are recorded.
const RECORDED: u32 = 1;
/// In [`Line::watched`]: launches wait for memory that is being saved.
const GUARDED: u32 = 2;

/// In [`Line::watched`]: launches may be made so that they can be interrupted.
const INTERRUPTIBLE: u32 = 4;
/// In [`Line::watched`]: there are such launches, and calls wait for their end.
const HOLDING: u32 = 8;

pub(super) static LINE: Line = Line { state: AtomicU32::new(OPEN), watched: AtomicU32::new(0) };

/// Changes the state, unless it is another than it was thought to be.
pub(super) fn change(from: u32, to: u32) -> bool {
    LINE.state.compare_exchange(from, to, Ordering::SeqCst, Ordering::SeqCst).is_ok()
}

/// On which devices the launch may be that passes in [`STEP`], a bit for each; set before the state.
static LAUNCHING: AtomicU64 = AtomicU64::new(u64::MAX);

/// Launches on all devices may pass in [`STEP`].
pub(crate) const EVERYWHERE: u64 = u64::MAX;

/// Says on which devices the launch may be that passes in [`STEP`].
pub(super) fn set_launching(devices: u64) {
    LAUNCHING.store(devices, Ordering::SeqCst);
}

/// Whether this thread may make the launch that passes in [`STEP`].
pub(super) fn may_launch() -> bool {
    let devices = LAUNCHING.load(Ordering::SeqCst);
    let on = |device: i32| 1u64.checked_shl(device as u32).is_some_and(|bit| devices & bit != 0);
    devices == EVERYWHERE || real::current_context().is_ok_and(|(_, device)| on(device))
}

/// Sleeps until the state is as wanted.
#[cold]
pub(super) fn wait_until(wanted: impl Fn(u32) -> bool) {
    loop {
        let state = LINE.state.load(Ordering::SeqCst);
        if wanted(state) {
            return;
        }
        // Woken, changed in between or interrupted: all the same, look again.
        let flags = futex::Flags::PRIVATE;
        let _ = futex::wait(&LINE.state, flags, state, None);
    }
}

/// Whether nobody is closing the gate, or has closed it.
pub(crate) fn is_open() -> bool {
    LINE.state.load(Ordering::Relaxed) == OPEN
}

/// Whether launches are to be looked at before they are made.
#[inline(always)]
pub(crate) fn is_watching() -> bool {
    LINE.watched.load(Ordering::Relaxed) != 0
}

/// Whether launches are recorded.
#[inline(always)]
pub(crate) fn is_recording() -> bool {
    LINE.watched.load(Ordering::Relaxed) & RECORDED != 0
}

/// Whether launches wait for memory that is being saved.
pub(crate) fn is_guarding() -> bool {
    LINE.watched.load(Ordering::Relaxed) & GUARDED != 0
}

/// Whether launches may be made so that they can be interrupted.
#[inline(always)]
pub(crate) fn is_interruptible() -> bool {
    LINE.watched.load(Ordering::Relaxed) & INTERRUPTIBLE != 0
}

/// Whether calls wait for launches that can be interrupted.
#[inline(always)]
pub(crate) fn is_holding() -> bool {
    LINE.watched.load(Ordering::Relaxed) & HOLDING != 0
}

/// Launches may be made so that they can be interrupted, or not.
pub(crate) fn set_interruptible(on: bool) {
    watch(INTERRUPTIBLE, on);
}

/// Lets calls wait for launches that can be interrupted, or not.
pub(crate) fn set_holding(on: bool) {
    watch(HOLDING, on);
}

/// Lets launches be recorded, or not.
pub(crate) fn set_recording(on: bool) {
    watch(RECORDED, on);
}

/// Lets launches wait, or not. Set while the gate is closed: who passes it later sees it.
pub(crate) fn set_guarding(on: bool) {
    watch(GUARDED, on);
}

fn watch(why: u32, on: bool) {
    if on {
        LINE.watched.fetch_or(why, Ordering::SeqCst);
    } else {
        LINE.watched.fetch_and(!why, Ordering::SeqCst);
    }
}

/// Changes the state and wakes everybody who waits for that.
pub(super) fn set(state: u32) {
    LINE.state.store(state, Ordering::SeqCst);
    let flags = futex::Flags::PRIVATE;
    let _ = futex::wake(&LINE.state, flags, u32::MAX >> 1);
}
