//! The checkpoint functions. They work on any process of the same user that uses this library, this
//! one included; they need no initialisation and pass no gate, which they may have closed.

use super::arguments::{In, Out};
use super::driver_api;
use crate::service::{Request, ask};
use crate::status::{Code, Outcome};

/// All argument structures are 64 bytes. Reserved parts must be zero.
type Arguments = [u64; 8];

/// # Errors
/// `INVALID_VALUE` when a reserved part is not zero.
fn check(arguments: &In<Arguments>, reserved_from: usize) -> Outcome<Arguments> {
    if arguments.is_null() {
        return Ok([0; 8]);
    }
    let arguments = arguments.get()?;
    if arguments[reserved_from..].iter().any(|part| *part != 0) {
        return Err(Code::INVALID_VALUE);
    }
    Ok(arguments)
}

driver_api! {
    early fn cuCheckpointProcessGetRestoreThreadId(pid: i32, thread: Out<i32>) {
        thread.check()?;
        thread.set(ask(pid, Request::RestoreThread, 0)? as i32)
    }

    early fn cuCheckpointProcessGetState(pid: i32, state: Out<u32>) {
        state.check()?;
        state.set(ask(pid, Request::State, 0)?)
    }

    early fn cuCheckpointProcessLock(pid: i32, arguments: In<Arguments>) {
        // The first word is the time limit in milliseconds, the second is reserved.
        let limit = check(&arguments, 1)?[0];
        let limit = u32::try_from(limit).map_err(|_| Code::INVALID_VALUE)?;
        ask(pid, Request::Lock, limit).map(|_| ())
    }

    early fn cuCheckpointProcessCheckpoint(pid: i32, arguments: In<Arguments>) {
        check(&arguments, 0)?;
        ask(pid, Request::Checkpoint, 0).map(|_| ())
    }

    early fn cuCheckpointProcessRestore(pid: i32, arguments: In<Arguments>) {
        // Pointer to and number of device pairs. The devices are all the same, so that a mapping
        // between them changes nothing; a list without its pointer is refused.
        let [pairs, count, ..] = check(&arguments, 2)?;
        if pairs == 0 && count as u32 != 0 {
            return Err(Code::INVALID_VALUE);
        }
        ask(pid, Request::Restore, 0).map(|_| ())
    }

    early fn cuCheckpointProcessUnlock(pid: i32, arguments: In<Arguments>) {
        check(&arguments, 0)?;
        ask(pid, Request::Unlock, 0).map(|_| ())
    }
}
