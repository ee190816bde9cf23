//! The gate that every call of the API passes: shared among calls, closed by a checkpoint's lock.

use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use parking_lot::{Condvar, Mutex};

use crate::status::{Code, Outcome};

static CLOSED: AtomicBool = AtomicBool::new(false);
/// The process was lost by a failed restore: calls fail instead of waiting for ever.
static LOST: AtomicBool = AtomicBool::new(false);
static INSIDE: AtomicUsize = AtomicUsize::new(0);
static WAITING: Mutex<()> = Mutex::new(());
static CHANGED: Condvar = Condvar::new();

/// One call inside the gate; leaves it when dropped.
pub(crate) struct Pass(());

impl Drop for Pass {
    fn drop(&mut self) {
        INSIDE.fetch_sub(1, Ordering::SeqCst);
        if CLOSED.load(Ordering::SeqCst) {
            let _guard = WAITING.lock();
            CHANGED.notify_all();
        }
    }
}

/// Enters the gate; waits while it is closed.
///
/// # Errors
/// `UNKNOWN` when a failed restore has lost the state of this process.
pub(crate) fn enter() -> Outcome<Pass> {
    loop {
        // Count first, look second: `close` does it the other way round, so that one of the two
        // sees the other.
        INSIDE.fetch_add(1, Ordering::SeqCst);
        let pass = Pass(());
        if LOST.load(Ordering::SeqCst) {
            return Err(Code::UNKNOWN);
        }
        if !CLOSED.load(Ordering::SeqCst) {
            return Ok(pass);
        }
        drop(pass);
        let mut guard = WAITING.lock();
        while CLOSED.load(Ordering::SeqCst) {
            CHANGED.wait(&mut guard);
        }
    }
}

/// Closes the gate and waits until nobody is inside.
///
/// # Errors
/// `NOT_READY` when calls are still inside after `limit` (`None`: no limit); the gate is then open
/// again.
pub(crate) fn close(limit: Option<Duration>) -> Outcome {
    CLOSED.store(true, Ordering::SeqCst);
    let deadline = limit.map(|limit| Instant::now() + limit);
    let mut guard = WAITING.lock();
    while INSIDE.load(Ordering::SeqCst) != 0 {
        match deadline {
            None => CHANGED.wait(&mut guard),
            Some(deadline) => {
                if CHANGED.wait_until(&mut guard, deadline).timed_out()
                    && INSIDE.load(Ordering::SeqCst) != 0
                {
                    drop(guard);
                    open();
                    return Err(Code::NOT_READY);
                }
            }
        }
    }
    Ok(())
}

/// Opens the gate and lets the waiting calls in.
pub(crate) fn open() {
    let _guard = WAITING.lock();
    CLOSED.store(false, Ordering::SeqCst);
    CHANGED.notify_all();
}

/// Opens the gate for good, with every call failing: the device state is gone.
pub(crate) fn give_up() {
    LOST.store(true, Ordering::SeqCst);
    open();
}
