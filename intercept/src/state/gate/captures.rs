//! Stream captures: a dump waits for those under way, and lets none begin.
//!
//! But for those that others may be waiting for: a thread that has a capture under way may need a second one to
//! end the first, and a thread may wait for a capture that another one is to make. So the first begin at once,
//! and a thread that finds the gate closing waits for a moment only, as long as captures are under way. All calls that
//! end captures pass in any case.

use std::collections::HashMap;
use std::sync::Mutex;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use rustix::time::Timespec;

use super::line::{CLOSED, LINE, NO_CAPTURE, OPEN, STEP, change};
use crate::resettable::Resettable;

/// How long a capture that is to begin waits for those of other threads while the gate closes: longer than
/// most captures take, and no time in which a program would seem to stand still.
pub(super) const DEPENDENT: Duration = Duration::from_millis(250);
/// How often a waiting thread looks, where nobody wakes it.
const POLL: Duration = Duration::from_millis(1);

/// The name of a stream that is being captured. The default streams are one for each thread or
/// context, so the thread belongs to the name.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) struct Capture {
    stream: u64,
    thread: u32,
}

const LEGACY: u64 = 1;
const PER_THREAD: u64 = 2;

impl Capture {
    /// `per_thread`: the call was one of those for which 0 means the thread's own stream.
    pub(crate) fn of(stream: u64, per_thread: bool) -> Self {
        match stream {
            0 if per_thread => Self { stream: PER_THREAD, thread: thread_number() },
            PER_THREAD => Self { stream, thread: thread_number() },
            0 => Self { stream: LEGACY, thread: 0 },
            _ => Self { stream, thread: 0 },
        }
    }
}

/// A capture under way.
struct Begun {
    /// Who began it.
    thread: u32,
    /// The stream's context, with which the capture ends.
    context: u64,
}

#[derive(Default)]
struct Captures {
    under_way: HashMap<Capture, Begun>,
    /// Calls that are beginning one.
    beginning: u32,
}

static CAPTURES: Resettable<Mutex<Option<Captures>>> = Resettable::new(Mutex::new(None));

fn with<T>(work: impl FnOnce(&mut Captures) -> T) -> T {
    let mut captures = CAPTURES.get().lock().unwrap_or_else(|poisoned| poisoned.into_inner());
    work(captures.get_or_insert_default())
}

/// A number for this thread that no other living thread has.
fn thread_number() -> u32 {
    rustix::thread::gettid().as_raw_nonzero().get() as u32
}

/// A call that is beginning a capture: the gate is not closed meanwhile.
struct Beginning;

impl Beginning {
    /// Waits until a capture may begin.
    fn announce() -> Self {
        let thread = thread_number();
        let mut since = None;
        loop {
            let has_waited = since.is_some_and(|since: Instant| since.elapsed() >= DEPENDENT);
            // With the lock: the closer looks with it too.
            let begins = with(|captures| {
                let mut others = captures.under_way.values();
                let begins = match LINE.state.load(Ordering::SeqCst) {
                    OPEN => true,
                    NO_CAPTURE if has_waited => others.next().is_some(),
                    NO_CAPTURE => others.any(|begun| begun.thread == thread),
                    _ => false,
                };
                captures.beginning += u32::from(begins);
                begins
            });
            if begins {
                return Self;
            }
            if !change(STEP, OPEN) {
                since.get_or_insert_with(Instant::now);
                wait();
            }
        }
    }
}

impl Drop for Beginning {
    fn drop(&mut self) {
        with(|captures| captures.beginning -= 1);
    }
}

/// Waits until the gate opens, while it is closed; for a moment while it closes.
fn wait() {
    let state = LINE.state.load(Ordering::SeqCst);
    let limit = match state {
        OPEN | STEP => return,
        CLOSED => None,
        _ => Timespec::try_from(POLL).ok(),
    };
    // Woken, changed in between, interrupted or in vain: all the same, the caller looks again.
    let flags = rustix::thread::futex::Flags::PRIVATE;
    let _ = rustix::thread::futex::wait(&LINE.state, flags, state, limit.as_ref());
}

/// Runs `begin`, which begins a capture in a stream of `context` and gives 0 if it did, once one may begin. What it
/// gives besides is dropped when the capture is noted.
pub(super) fn begin<T>(capture: Capture, context: u64, begin: impl FnOnce() -> (u32, T)) -> u32 {
    let _beginning = Beginning::announce();
    let (code, _inside) = begin();
    if code == 0 {
        let begun = Begun { thread: thread_number(), context };
        with(|captures| captures.under_way.insert(capture, begun));
    }
    code
}

/// A capture has ended, or its stream is gone.
pub(crate) fn end_capture(capture: Capture) {
    with(|captures| captures.under_way.remove(&capture));
}

/// A context is gone, and with it the captures in its streams.
pub(crate) fn end_captures_of(context: u64) {
    with(|captures| captures.under_way.retain(|_, begun| begun.context != context));
}

/// Notes that this thread ends, and with it the captures in its own default stream, which nobody else could end.
pub(super) fn end_own_captures() {
    let own = Capture::of(PER_THREAD, true);
    with(|captures| captures.under_way.remove(&own));
}

/// Whether any capture is under way.
pub(crate) fn capturing() -> bool {
    under_way() != 0
}

/// Whether a capture is under way that this thread has begun.
pub(crate) fn is_capturing_here() -> bool {
    let thread = thread_number();
    with(|captures| captures.under_way.values().any(|begun| begun.thread == thread))
}

/// How many captures are under way.
pub(super) fn under_way() -> usize {
    with(|captures| captures.under_way.len())
}

/// Closes the gate, if no capture is under way or beginning. Since it is [`NO_CAPTURE`], none begins after
/// that.
pub(super) fn close_if_none() -> bool {
    with(|captures| {
        let none = captures.beginning == 0 && captures.under_way.is_empty();
        if none {
            LINE.state.store(CLOSED, Ordering::SeqCst);
        }
        none
    })
}

/// Forgets everything, in the child of a fork.
///
/// # Safety
/// No other thread exists.
pub(super) unsafe fn reset() {
    // SAFETY: the caller's duty.
    unsafe { CAPTURES.reset(Mutex::new(None)) };
}
