//! Waiting until the device has finished all that the program gave it.

use std::sync::mpsc::{self, RecvTimeoutError};
use std::thread;
use std::time::Duration;

use crate::abi::real;
use crate::abi::types::{CAPTURE_RELAXED, ERROR_CONTEXT_IS_DESTROYED, ERROR_INVALID_CONTEXT};
use crate::limit::Limit;
use crate::state::contexts;
use crate::state::memory::Failure;
use crate::watch::faults;

/// How often is looked whether the limit is reached.
const POLL: Duration = Duration::from_millis(10);

/// Calls of this thread, which is one of gpucr's, shall not disturb stream captures of others.
pub(crate) fn tolerate_captures() {
    faults::exempt_this_thread();
    let mut mode = CAPTURE_RELAXED;
    // SAFETY: reads and writes one value.
    unsafe { real::cuThreadExchangeStreamCaptureMode(&mut mode) };
}

/// Waits for every context. The gate is closed, so nothing new comes.
///
/// # Errors
/// Names the context that was not done at the limit, or that is broken.
pub(crate) fn drain<'a>(limit: impl Into<Limit<'a>>) -> Result<(), Failure> {
    let limit = limit.into();
    let contexts = contexts::all();
    let (done, results) = mpsc::channel();
    let work = contexts.clone();
    // The driver's wait has no time limit, so another thread waits, and is left alone if it takes
    // too long. It ends when the device is done.
    let waiting = thread::Builder::new()
        .name("gpucr-drain".into())
        .spawn(move || {
            tolerate_captures();
            for (context, _) in work {
                if done.send(real::synchronize(context)).is_err() {
                    return;
                }
            }
        })
        .map_err(|error| Failure::other(format!("cannot start a thread to drain: {error}")))?;
    for (context, device) in contexts {
        let mut result = results.recv_timeout(POLL);
        while result == Err(RecvTimeoutError::Timeout) && !limit.is_over() {
            result = results.recv_timeout(POLL);
        }
        match result {
            Ok(Ok(())) => {}
            // Destroyed in a way that was not seen.
            Ok(Err(ERROR_INVALID_CONTEXT | ERROR_CONTEXT_IS_DESTROYED)) => contexts::gone(context),
            Ok(Err(code)) => {
                let message = format!("context {context:#x} on device {device} is broken");
                return Err(Failure::driver(code, message));
            }
            Err(RecvTimeoutError::Timeout) => {
                return Err(Failure::other(format!(
                    "device {device} was still busy with context {context:#x} at the time limit"
                )));
            }
            Err(RecvTimeoutError::Disconnected) => {
                return Err(Failure::other("the thread that drains has failed"));
            }
        }
    }
    // It has nothing left to do, and must not be in the driver when that is checkpointed.
    let _ = waiting.join();
    Ok(())
}
