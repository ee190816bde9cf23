//! The gate: every call that enqueues work or touches device memory passes it, and a dump closes
//! it.
//!
//! Passing an open gate is one addition before the call and one after it, in a place that the thread
//! has for itself (see [`callers`]), and one read of a flag that nobody writes.
//!
//! The order that makes it safe: a caller first announces itself in its place, then reads the
//! flag; the closer first sets the flag, then makes every thread show what it wrote, then reads the
//! places. So a caller that the closer does not see has seen the flag, and takes itself back.
//!
//! A stream capture spans many calls, so closing has two steps. First no new capture may begin,
//! while all other calls still pass, until every capture under way has ended (see [`captures`]). Then no
//! call may enter.

mod callers;
mod captures;
mod line;
#[cfg(test)]
mod stress;

use std::cell::Cell;
use std::fmt;
use std::io;
use std::sync::atomic::Ordering;
use std::thread;
use std::time::Duration;

pub(crate) use self::callers::COUNT as PLACES;
use self::callers::{CALL, LAUNCH, Me, Place};
pub(crate) use self::captures::{Capture, capturing, end_capture, end_captures_of};
use self::line::{CLOSED, LINE, NO_CAPTURE, OPEN, STEP, change, set, wait_until};
pub(crate) use self::line::{
    is_guarding, is_open, is_recording, is_watching, set_guarding, set_recording,
};
use crate::limit::Limit;

/// How often the closer looks.
const POLL: Duration = Duration::from_micros(50);

/// Why the gate could not be closed.
#[derive(Debug)]
pub(crate) enum NotClosed {
    /// Not in time.
    Busy {
        /// Calls still inside.
        calls: u64,
        /// Stream captures still under way.
        captures: usize,
    },
    /// The kernel does not say who is inside (see [`callers::barrier`]).
    NoBarrier(io::Error),
}

impl fmt::Display for NotClosed {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Busy { calls, captures } => {
                let plural = |number: u64| if number == 1 { "" } else { "s" };
                write!(f, "{calls} call{} inside, ", plural(*calls))?;
                write!(f, "{captures} stream capture{} under way", plural(*captures as u64))
            }
            Self::NoBarrier(error) => write!(f, "membarrier(2) failed: {error}"),
        }
    }
}

/// A call that has passed the gate. Dropping it is leaving.
#[must_use]
pub(crate) struct Inside {
    /// The thread that entered, which is also the one that leaves: a pointer does not go elsewhere.
    me: *const Cell<Me>,
}

impl Drop for Inside {
    #[inline]
    fn drop(&mut self) {
        // SAFETY: `self` is still with the thread that made it, and that is what the pointer lives with.
        let cell = unsafe { &*self.me };
        let me = cell.get();
        let depth = me.depth.wrapping_sub(1);
        cell.set(me.at(depth));
        if depth == 0 {
            let (place, own) = me.place();
            place.leave(own, CALL);
        }
    }
}

/// Passes the gate, waiting while it is closed. A call made within another one passes at once.
#[inline]
pub(crate) fn enter() -> Inside {
    pass(CALL)
}

/// Runs `begin`, which begins a capture in a stream of `context` and says whether it did, inside the gate.
pub(crate) fn begin_capture(capture: Capture, context: u64, begin: impl FnOnce() -> u32) -> u32 {
    captures::begin(capture, context, || {
        let inside = enter();
        (begin(), inside)
    })
}

/// Passes the gate and counts a launch.
#[inline]
pub(crate) fn enter_launch() -> Inside {
    pass(CALL + LAUNCH)
}

#[inline]
fn pass(amount: u64) -> Inside {
    let inside = Inside { me: callers::me() };
    // SAFETY: it is this thread's.
    let cell = unsafe { &*inside.me };
    let mut me = cell.get();
    if me.depth == 0 {
        me = me.placed();
        come_in(me, amount);
    }
    cell.set(me.at(me.depth + 1));
    inside
}

/// Enters with the outermost call of this thread, once the gate lets it.
#[inline]
fn come_in(me: Me, amount: u64) {
    let (place, own) = me.place();
    place.enter(own, amount);
    if LINE.state.load(Ordering::SeqCst) >= CLOSED {
        wait_and_pass(place, own, amount);
    }
}

#[cold]
fn wait_and_pass(place: &Place, own: bool, amount: u64) {
    loop {
        place.leave(own, amount);
        wait_until(|state| state != CLOSED);
        place.enter(own, amount);
        let passes = match LINE.state.load(Ordering::SeqCst) {
            CLOSED => false,
            STEP if amount >= LAUNCH => change(STEP, CLOSED),
            _ => true,
        };
        if passes {
            return;
        }
    }
}

/// The number of this thread's place, below [`PLACES`]: of its own, or one that it shares. It has to be inside.
#[inline(always)]
pub(crate) fn place() -> usize {
    // SAFETY: it is this thread's.
    unsafe { &*callers::me() }.get().number()
}

/// Kernel and graph launches so far.
pub(crate) fn launches() -> u64 {
    callers::launches()
}

/// Closes the gate: afterwards no call is inside, none enters, and no capture is under way.
///
/// # Errors
/// At the limit, and if the kernel does not say who is inside, the gate is opened again, and what was
/// in the way is returned.
pub(crate) fn close<'a>(limit: impl Into<Limit<'a>>) -> Result<(), NotClosed> {
    let limit = limit.into();
    LINE.state.store(NO_CAPTURE, Ordering::SeqCst);
    while !captures::close_if_none() {
        if limit.is_over() {
            return Err(busy());
        }
        thread::sleep(POLL);
    }
    wait_until_empty(&limit)
}

/// Lets calls pass the closed gate up to the first launch, that one too, or until `end`; if a capture
/// begins, up to its end. Afterwards the gate is closed, no call is inside, and no capture under way.
///
/// # Errors
/// The errors of [`close`].
pub(crate) fn step<'a>(
    end: impl Into<Limit<'a>>,
    limit: impl Into<Limit<'a>>,
) -> Result<(), NotClosed> {
    let (end, limit) = (end.into(), limit.into());
    set(STEP);
    while LINE.state.load(Ordering::SeqCst) == STEP {
        if end.is_over() {
            change(STEP, CLOSED);
        } else {
            thread::sleep(POLL);
        }
    }
    if is_open() { close(limit) } else { wait_until_empty(&limit) }
}

/// Closes the gate, without waiting for calls that are inside.
pub(crate) fn shut() {
    LINE.state.store(CLOSED, Ordering::SeqCst);
}

/// Waits for the calls that are inside a closed gate.
fn wait_until_empty(limit: &Limit<'_>) -> Result<(), NotClosed> {
    // Who enters from here on sees that the gate is closed.
    if let Err(error) = callers::barrier() {
        open();
        return Err(NotClosed::NoBarrier(error));
    }
    while callers::inside() != 0 {
        if limit.is_over() {
            return Err(busy());
        }
        thread::sleep(POLL);
    }
    Ok(())
}

/// Opens the gate, and says what was in the way.
fn busy() -> NotClosed {
    let busy = NotClosed::Busy { calls: callers::inside(), captures: captures::under_way() };
    open();
    busy
}

/// Leaves the gate for as long as `work` takes, and passes it again. A call within another one stays
/// inside.
pub(crate) fn aside(work: impl FnOnce()) {
    /// Passes the gate again, even after a panic.
    struct Back<'a>(&'a Cell<Me>, Me);
    impl Drop for Back<'_> {
        fn drop(&mut self) {
            come_in(self.1, CALL);
            self.0.set(self.1);
        }
    }
    // SAFETY: it is this thread's.
    let cell = unsafe { &*callers::me() };
    let me = cell.get();
    let _back = (me.depth == 1).then(|| {
        cell.set(me.at(0));
        let (place, own) = me.place();
        place.leave(own, CALL);
        Back(cell, me)
    });
    work();
}

/// Opens the gate.
pub(crate) fn open() {
    set(OPEN);
}

/// Makes everything as in a new process, in the child of a fork.
///
/// # Safety
/// No other thread exists.
pub(crate) unsafe fn reset() {
    // SAFETY: no other thread exists.
    unsafe {
        callers::reset();
        captures::reset();
    }
    LINE.state.store(OPEN, Ordering::SeqCst);
}

#[cfg(test)]
mod tests;
