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
//! while all other calls still pass, until every capture under way has ended. Then no call may
//! enter.

mod callers;

use std::cell::Cell;
use std::collections::HashSet;
use std::fmt;
use std::io;
use std::sync::Mutex;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use self::callers::{CALL, LAUNCH, Me, Place};
use crate::fork::Resettable;

/// Everything passes.
const OPEN: u32 = 0;
/// Everything but the beginning of a capture passes.
const NO_CAPTURE: u32 = 1;
/// Nothing passes.
const CLOSED: u32 = 2;
/// One launch passes, and closes the gate behind it; before it all other calls. A capture opens the gate,
/// since it cannot be interrupted.
const STEP: u32 = 3;

/// How often the closer looks.
const POLL: Duration = Duration::from_micros(50);

/// What every call reads and hardly anybody writes, together on one cache line.
#[repr(align(128))]
struct Line {
    state: AtomicU32,
    /// Why launches are looked at (see [`crate::access`]).
    watched: AtomicU32,
}

/// In [`Line::watched`]: launches are recorded.
const RECORDED: u32 = 1;
/// In [`Line::watched`]: launches wait for memory that is being saved.
const GUARDED: u32 = 2;

static LINE: Line = Line { state: AtomicU32::new(OPEN), watched: AtomicU32::new(0) };
/// Calls that are beginning a capture.
static BEGINNING: AtomicU64 = AtomicU64::new(0);
/// Captures under way.
static CAPTURES: Resettable<Mutex<Option<HashSet<Capture>>>> = Resettable::new(Mutex::new(None));

/// The name of a stream that is being captured. The default streams are one for each thread or
/// context, so the thread belongs to the name.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) struct Capture {
    stream: u64,
    thread: u32,
}

impl Capture {
    /// `per_thread`: the call was one of those for which 0 means the thread's own stream.
    pub(crate) fn of(stream: u64, per_thread: bool) -> Self {
        const LEGACY: u64 = 1;
        const PER_THREAD: u64 = 2;
        match stream {
            0 if per_thread => Self { stream: PER_THREAD, thread: thread_number() },
            PER_THREAD => Self { stream, thread: thread_number() },
            0 => Self { stream: LEGACY, thread: 0 },
            _ => Self { stream, thread: 0 },
        }
    }
}

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
                write!(f, "{calls} calls were inside, {captures} stream captures under way")
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

/// Changes the state, unless it is another than it was thought to be.
fn change(from: u32, to: u32) -> bool {
    LINE.state.compare_exchange(from, to, Ordering::SeqCst, Ordering::SeqCst).is_ok()
}

/// Sleeps until the state is as wanted.
#[cold]
fn wait_until(wanted: impl Fn(u32) -> bool) {
    loop {
        let state = LINE.state.load(Ordering::SeqCst);
        if wanted(state) {
            return;
        }
        // Woken, changed in between or interrupted: all the same, look again.
        let flags = rustix::thread::futex::Flags::PRIVATE;
        let _ = rustix::thread::futex::wait(&LINE.state, flags, state, None);
    }
}

/// A number for this thread that no other living thread has.
fn thread_number() -> u32 {
    rustix::thread::gettid().as_raw_nonzero().get() as u32
}

/// Runs `begin`, which begins a capture and says whether it did.
pub(crate) fn begin_capture(capture: Capture, begin: impl FnOnce() -> u32) -> u32 {
    loop {
        BEGINNING.fetch_add(1, Ordering::SeqCst);
        if LINE.state.load(Ordering::SeqCst) == OPEN {
            break;
        }
        BEGINNING.fetch_sub(1, Ordering::SeqCst);
        if !change(STEP, OPEN) {
            wait_until(|state| matches!(state, OPEN | STEP));
        }
    }
    let inside = enter();
    let code = begin();
    if code == 0 {
        captures(|set| set.insert(capture));
    }
    drop(inside);
    BEGINNING.fetch_sub(1, Ordering::SeqCst);
    code
}

/// A capture has ended, or its stream is gone.
pub(crate) fn end_capture(capture: Capture) {
    captures(|set| set.remove(&capture));
}

/// Whether any capture is under way.
pub(crate) fn capturing() -> bool {
    captures(|set| !set.is_empty())
}

fn captures<T>(with: impl FnOnce(&mut HashSet<Capture>) -> T) -> T {
    let mut set = CAPTURES.get().lock().unwrap_or_else(|poisoned| poisoned.into_inner());
    with(set.get_or_insert_default())
}

/// Kernel and graph launches so far.
pub(crate) fn launches() -> u64 {
    callers::launches()
}

/// Closes the gate: afterwards no call is inside, none enters, and no capture is under way.
///
/// # Errors
/// At the deadline, and if the kernel does not say who is inside, the gate is opened again, and what was
/// in the way is returned.
pub(crate) fn close(deadline: Instant) -> Result<(), NotClosed> {
    LINE.state.store(NO_CAPTURE, Ordering::SeqCst);
    while BEGINNING.load(Ordering::SeqCst) != 0 || capturing() {
        if Instant::now() >= deadline {
            return Err(busy());
        }
        thread::sleep(POLL);
    }
    LINE.state.store(CLOSED, Ordering::SeqCst);
    wait_until_empty(deadline)
}

/// Lets calls pass the closed gate up to the first launch, that one too, or until `end`; if a capture
/// begins, up to its end. Afterwards the gate is closed, no call is inside, and no capture under way.
///
/// # Errors
/// As [`close`].
pub(crate) fn step(end: Instant, deadline: Instant) -> Result<(), NotClosed> {
    set(STEP);
    while LINE.state.load(Ordering::SeqCst) == STEP {
        if Instant::now() >= end {
            change(STEP, CLOSED);
        } else {
            thread::sleep(POLL);
        }
    }
    if is_open() { close(deadline) } else { wait_until_empty(deadline) }
}

/// Closes the gate, whoever is inside.
pub(crate) fn shut() {
    LINE.state.store(CLOSED, Ordering::SeqCst);
}

/// Waits for the calls that are inside a closed gate.
fn wait_until_empty(deadline: Instant) -> Result<(), NotClosed> {
    // Who enters from here on sees that the gate is closed.
    if let Err(error) = callers::barrier() {
        open();
        return Err(NotClosed::NoBarrier(error));
    }
    while callers::inside() != 0 {
        if Instant::now() >= deadline {
            return Err(busy());
        }
        thread::sleep(POLL);
    }
    Ok(())
}

/// Opens the gate, and says what was in the way.
fn busy() -> NotClosed {
    let captures = captures(|set| set.len());
    let busy = NotClosed::Busy { calls: callers::inside(), captures };
    open();
    busy
}

/// Whether nobody is closing the gate, or has closed it.
pub(crate) fn is_open() -> bool {
    LINE.state.load(Ordering::Relaxed) == OPEN
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

/// Opens the gate.
pub(crate) fn open() {
    set(OPEN);
}

/// Changes the state and wakes everybody who waits for that.
fn set(state: u32) {
    LINE.state.store(state, Ordering::SeqCst);
    let flags = rustix::thread::futex::Flags::PRIVATE;
    let _ = rustix::thread::futex::wake(&LINE.state, flags, u32::MAX >> 1);
}

/// Makes everything as in a new process, in the child of a fork.
///
/// # Safety
/// No other thread exists.
pub(crate) unsafe fn reset() {
    // SAFETY: no other thread exists.
    unsafe { callers::reset() };
    BEGINNING.store(0, Ordering::Relaxed);
    LINE.state.store(OPEN, Ordering::SeqCst);
    // SAFETY: no other thread exists.
    unsafe { CAPTURES.reset(Mutex::new(None)) };
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::AtomicBool;

    use super::*;

    /// The gate is one for the process: one test uses it at a time.
    pub(super) static ALONE: Mutex<()> = Mutex::new(());

    fn soon(ms: u64) -> Instant {
        Instant::now() + Duration::from_millis(ms)
    }

    #[test]
    fn a_step_lets_one_launch_pass() {
        let _alone = ALONE.lock();
        let (stop, launched, called) =
            (AtomicBool::new(false), AtomicU64::new(0), AtomicU64::new(0));
        close(soon(1000)).expect("nobody is inside");
        thread::scope(|scope| {
            for _ in 0..4 {
                scope.spawn(|| {
                    while !stop.load(Ordering::SeqCst) {
                        drop(enter());
                        called.fetch_add(1, Ordering::SeqCst);
                        let launch = enter_launch();
                        launched.fetch_add(1, Ordering::SeqCst);
                        drop(launch);
                    }
                });
            }
            for number in 1..=200 {
                step(soon(10_000), soon(20_000)).expect("all leave soon");
                assert_eq!(launched.load(Ordering::SeqCst), number);
            }
            assert!(called.load(Ordering::SeqCst) >= 200);
            stop.store(true, Ordering::SeqCst);
            open();
        });
        // A capture comes to its end first.
        close(soon(1000)).expect("nobody is inside");
        let ended = AtomicBool::new(false);
        thread::scope(|scope| {
            scope.spawn(|| {
                let capture = Capture::of(77, false);
                assert_eq!(begin_capture(capture, || 0), 0);
                for _ in 0..20 {
                    drop(enter_launch());
                    thread::sleep(POLL);
                }
                ended.store(true, Ordering::SeqCst);
                end_capture(capture);
            });
            step(soon(10_000), soon(20_000)).expect("it ends");
            assert!(ended.load(Ordering::SeqCst));
        });
        open();
        // Without any launch it is over when the time is.
        close(soon(1000)).expect("nobody is inside");
        step(soon(20), soon(1000)).expect("nobody is inside");
        assert_eq!(LINE.state.load(Ordering::SeqCst), CLOSED);
        open();
    }

    #[test]
    fn nobody_is_inside_after_close() {
        let _alone = ALONE.lock();
        let (stop, inside, passed) = (AtomicBool::new(false), AtomicU64::new(0), AtomicU64::new(0));
        let before = launches();
        thread::scope(|scope| {
            for _ in 0..6 {
                scope.spawn(|| {
                    while !stop.load(Ordering::Relaxed) {
                        let outer = enter_launch();
                        inside.fetch_add(1, Ordering::SeqCst);
                        let nested = enter();
                        std::hint::spin_loop();
                        drop(nested);
                        inside.fetch_sub(1, Ordering::SeqCst);
                        drop(outer);
                        passed.fetch_add(1, Ordering::SeqCst);
                    }
                });
            }
            for _ in 0..100 {
                close(soon(10_000)).expect("every call leaves soon");
                for _ in 0..20 {
                    assert_eq!(inside.load(Ordering::SeqCst), 0, "a call is inside a closed gate");
                    std::hint::spin_loop();
                }
                let now = passed.load(Ordering::SeqCst);
                open();
                while passed.load(Ordering::SeqCst) <= now + 6 {
                    thread::yield_now();
                }
            }
            stop.store(true, Ordering::Relaxed);
        });
        assert_eq!(launches() - before, passed.load(Ordering::SeqCst), "each launch counts once");
        assert_eq!(callers::inside(), 0);
    }

    #[test]
    fn a_call_that_does_not_leave_opens_the_gate_again() {
        let _alone = ALONE.lock();
        let inside = enter();
        let busy = thread::spawn(|| close(soon(20))).join().expect("joined");
        assert!(matches!(busy, Err(NotClosed::Busy { calls: 1, captures: 0 })), "{busy:?}");
        drop(inside);
        thread::spawn(|| drop(enter())).join().expect("the gate is open");
    }

    #[test]
    fn a_capture_under_way_may_finish_and_no_other_begins() {
        let _alone = ALONE.lock();
        let (one, two) = (Capture::of(0x10, false), Capture::of(0x20, false));
        assert_eq!(begin_capture(one, || 0), 0);
        assert!(capturing());
        let busy = close(soon(20));
        assert!(matches!(busy, Err(NotClosed::Busy { calls: 0, captures: 1 })), "{busy:?}");
        let began = AtomicBool::new(false);
        thread::scope(|scope| {
            let closer = scope.spawn(|| close(soon(10_000)));
            while LINE.state.load(Ordering::SeqCst) != NO_CAPTURE {
                thread::yield_now();
            }
            drop(enter()); // a call of the capture under way passes
            scope.spawn(|| {
                begin_capture(two, || {
                    began.store(true, Ordering::SeqCst);
                    900 // it fails, so it is no capture
                })
            });
            thread::sleep(Duration::from_millis(20));
            assert!(!began.load(Ordering::SeqCst), "a capture began at a closing gate");
            end_capture(one);
            closer.join().expect("joined").expect("closed once the capture is over");
            assert!(!began.load(Ordering::SeqCst));
            open();
        });
        assert!(began.load(Ordering::SeqCst));
        assert!(!capturing());
    }

    #[test]
    fn the_gate_closes_while_a_call_waits_aside() {
        let _alone = ALONE.lock();
        let [left, closed, back] = [const { AtomicBool::new(false) }; 3];
        thread::scope(|scope| {
            scope.spawn(|| {
                let inside = enter();
                aside(|| {
                    left.store(true, Ordering::SeqCst);
                    while !closed.load(Ordering::SeqCst) {
                        thread::yield_now();
                    }
                });
                back.store(true, Ordering::SeqCst);
                assert_eq!(callers::inside(), 1);
                drop(inside);
            });
            while !left.load(Ordering::SeqCst) {
                thread::yield_now();
            }
            close(soon(10_000)).expect("the call is not inside");
            closed.store(true, Ordering::SeqCst);
            thread::sleep(Duration::from_millis(10));
            assert!(!back.load(Ordering::SeqCst), "it came back into a closed gate");
            open();
        });
        assert!(back.load(Ordering::SeqCst));
        assert_eq!(callers::inside(), 0);
        // Within another call nothing is left.
        let (outer, inner) = (enter(), enter());
        aside(|| assert_eq!(callers::inside(), 1));
        drop((inner, outer));
        assert_eq!(callers::inside(), 0);
    }

    #[test]
    fn default_streams_are_told_apart() {
        assert_eq!(Capture::of(0, false), Capture::of(1, false));
        assert_eq!(Capture::of(0, true), Capture::of(2, false));
        assert_ne!(Capture::of(0, true), Capture::of(0, false));
        let other = thread::spawn(|| Capture::of(0, true)).join().expect("joined");
        assert_ne!(Capture::of(0, true), other);
    }

    /// The checkpointer, which holds what was given back, lets go of it when the gate is closed.
    #[test]
    fn a_call_that_waits_for_memory_does_not_keep_the_gate_open() {
        use crate::driver::ERROR_OUT_OF_MEMORY;
        use crate::memory;
        let _alone = ALONE.lock();
        memory::lock().lend([u64::MAX].into());
        let (asked, there) = (AtomicBool::new(false), AtomicBool::new(false));
        let ask = || {
            assert_ne!(callers::inside(), 0, "it asks inside");
            asked.store(true, Ordering::SeqCst);
            there.load(Ordering::SeqCst).then_some(()).ok_or(ERROR_OUT_OF_MEMORY)
        };
        let (closed, answer) = thread::scope(|scope| {
            let program = scope.spawn(|| memory::patiently(ask));
            while !asked.load(Ordering::SeqCst) {
                thread::yield_now();
            }
            let closed = close(soon(1000));
            there.store(true, Ordering::SeqCst);
            open();
            (closed, program.join().expect("no panic"))
        });
        memory::lock().lend([].into());
        assert!(closed.is_ok(), "{closed:?}");
        assert_eq!(answer, Ok(()));
    }
}
