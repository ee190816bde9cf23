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
pub(crate) use self::captures::{
    Capture, capturing, end_capture, end_captures_of, is_capturing_here,
};

pub(crate) use self::line::EVERYWHERE;
use self::line::{CLOSED, LINE, NO_CAPTURE, OPEN, STEP, change, set, wait_until};
pub(crate) use self::line::{
    is_guarding, is_holding, is_interruptible, is_open, is_recording, is_watching, set_guarding,
    set_holding, set_interruptible, set_recording,
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

/// Waits until no thread but this one, which is, is inside: for `limit` at most. Whether none is. Whoever enters later sees
/// what this thread has written before.
pub(crate) fn alone(limit: Duration) -> bool {
    if callers::barrier().is_err() {
        return false;
    }
    let begin = std::time::Instant::now();
    while callers::inside() > 1 {
        if begin.elapsed() >= limit {
            return false;
        }
        thread::sleep(POLL);
    }
    true
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
        let launches = amount >= LAUNCH;
        wait_until(|state| state != CLOSED && !(state == STEP && launches && !line::may_launch()));
        place.enter(own, amount);
        let passes = match LINE.state.load(Ordering::SeqCst) {
            CLOSED => false,
            STEP if launches => line::may_launch() && change(STEP, CLOSED),
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

/// A gate that is being closed, by somebody who looks again and again whether it is.
#[derive(Debug)]
pub(crate) struct Closing {
    /// Nobody enters any more, and whoever did before is counted.
    is_shut: bool,
}

impl Closing {
    /// Begins to close an open gate: no capture begins.
    pub(crate) fn begin() -> Self {
        LINE.state.store(NO_CAPTURE, Ordering::SeqCst);
        Self { is_shut: false }
    }

    /// Goes on with it. Whether the gate is closed: no call is inside, none enters, and no capture is under way.
    ///
    /// # Errors
    /// The kernel does not say who is inside. The gate stays as it is.
    pub(crate) fn is_done(&mut self) -> Result<bool, NotClosed> {
        if !self.is_shut {
            if LINE.state.load(Ordering::SeqCst) != CLOSED && !captures::close_if_none() {
                return Ok(false);
            }
            // Who enters from here on sees that the gate is closed.
            callers::barrier().map_err(NotClosed::NoBarrier)?;
            self.is_shut = true;
        }
        Ok(callers::inside() == 0)
    }

    /// Whether nobody enters any more.
    pub(crate) fn is_shut(&self) -> bool {
        self.is_shut
    }

    /// Lets calls pass the shut gate up to the first launch on one of these devices, of which each is a bit, that
    /// one too, or until `end`. A capture that begins opens the gate up to its end. Then the gate is closing again.
    /// Whether a launch has passed.
    pub(crate) fn pass<'a>(&mut self, devices: u64, end: impl Into<Limit<'a>>) -> bool {
        let passed = pass_one(devices, &end.into());
        if is_open() {
            LINE.state.store(NO_CAPTURE, Ordering::SeqCst);
        }
        self.is_shut = false;
        passed
    }
}

/// Closes the gate: afterwards no call is inside, none enters, and no capture is under way.
///
/// # Errors
/// At the limit, and if the kernel does not say who is inside, the gate is opened again, and what was
/// in the way is returned.
pub(crate) fn close<'a>(limit: impl Into<Limit<'a>>) -> Result<(), NotClosed> {
    wait_until_closed(Closing::begin(), &limit.into())
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
    pass_one(EVERYWHERE, &end.into());
    let closing = if is_open() { Closing::begin() } else { Closing { is_shut: false } };
    wait_until_closed(closing, &limit.into())
}

/// Lets calls pass the closed gate up to the first launch on one of these devices, or until `end`, or the beginning of a
/// capture, which opens the gate. Whether a launch has passed.
fn pass_one(devices: u64, end: &Limit<'_>) -> bool {
    line::set_launching(devices);
    set(STEP);
    loop {
        match LINE.state.load(Ordering::SeqCst) {
            STEP if end.is_over() && change(STEP, CLOSED) => return false,
            STEP => thread::sleep(POLL),
            state => return state == CLOSED,
        }
    }
}

/// Closes the gate, without waiting for calls that are inside.
pub(crate) fn shut() {
    LINE.state.store(CLOSED, Ordering::SeqCst);
}

/// Waits until the gate is closed, and opens it if it is not in time.
fn wait_until_closed(mut closing: Closing, limit: &Limit<'_>) -> Result<(), NotClosed> {
    loop {
        match closing.is_done() {
            Ok(true) => return Ok(()),
            Ok(false) if limit.is_over() => return Err(give_up()),
            Ok(false) => thread::sleep(POLL),
            Err(error) => {
                open();
                return Err(error);
            }
        }
    }
}

/// Opens the gate, and says what was in the way.
fn give_up() -> NotClosed {
    let busy = busy();
    open();
    busy
}

/// What is in the way of closing the gate.
pub(crate) fn busy() -> NotClosed {
    NotClosed::Busy { calls: callers::inside(), captures: captures::under_way() }
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
