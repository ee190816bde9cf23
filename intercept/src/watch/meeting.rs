//! The next call by which a thread of the program waits for the device: a checkpointer wants the gate to be shut behind
//! it, since the program has nothing under way then that it does not know to be done.
//!
//! Such calls are those that synchronise with a stream, an event or a context, and copies and fills that are done when
//! they come back. The thread that comes back first from one waits until the agent has shut the gate, or knows that it
//! cannot.

use std::sync::atomic::{AtomicU32, Ordering};
use std::time::{Duration, Instant};

use rustix::thread::futex;
use rustix::time::Timespec;

/// Nobody waits for such a call.
const NONE: u32 = 0;
/// The agent does.
const AWAITED: u32 = 1;
/// A thread has come back from one, and waits for the agent.
const MET: u32 = 2;

static STATE: AtomicU32 = AtomicU32::new(NONE);

/// The agent shuts the gate at once; so long the thread waits for it at most.
const PATIENCE: Duration = Duration::from_secs(1);

/// Whether such a call is awaited.
#[inline(always)]
pub(crate) fn is_awaited() -> bool {
    STATE.load(Ordering::Relaxed) == AWAITED
}

/// This thread, which is the program's and outside of the gate, has come back from such a call.
#[cold]
pub(crate) fn come_back() {
    if STATE.compare_exchange(AWAITED, MET, Ordering::SeqCst, Ordering::SeqCst).is_err() {
        return;
    }
    let end = Instant::now() + PATIENCE;
    loop {
        let left = end.saturating_duration_since(Instant::now());
        if STATE.load(Ordering::SeqCst) != MET || left.is_zero() {
            return;
        }
        // Woken, changed in between, interrupted or in vain: all the same, it is looked again.
        let left = Timespec::try_from(left).ok();
        let _ = futex::wait(&STATE, futex::Flags::PRIVATE, MET, left.as_ref());
    }
}

/// Whether there was such a call since it is awaited.
pub(crate) fn has_come() -> bool {
    STATE.load(Ordering::SeqCst) == MET
}

/// Waits for one from now on. Only the agent calls this.
pub(crate) fn begin() {
    STATE.store(AWAITED, Ordering::SeqCst);
}

/// Waits for none any more; the thread that has come back goes on. Whether one was awaited. Only the agent calls this.
pub(crate) fn end() -> bool {
    if STATE.swap(NONE, Ordering::SeqCst) == NONE {
        return false;
    }
    let _ = futex::wake(&STATE, futex::Flags::PRIVATE, u32::MAX >> 1);
    true
}

/// Makes everything as in a new process, in the child of a fork.
pub(crate) fn reset() {
    STATE.store(NONE, Ordering::SeqCst);
}
