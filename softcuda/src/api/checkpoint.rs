//! The checkpoint functions. They work on any process of the same user that uses this library, this
//! one included; they need no initialisation and pass no gate, which they may have closed.

use super::arguments::{In, Out};
use super::device::number;
use super::driver_api;
use crate::custom_storage;
use crate::placement;
use crate::process;
use crate::requests::{Request, ask};
use crate::settings::{MAX_DEVICES, settings};
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

/// Refuses to bring a process back to devices of another kind than its own.
///
/// # Errors
/// `NOT_SUPPORTED`, which is this driver's choice: NVIDIA documents the refusal, not its code.
fn check_kinds(pid: i32, devices: u32) -> Outcome {
    let used = ask(pid, Request::Devices, 0)?;
    for number in (0..MAX_DEVICES).filter(|number| used & 1 << number != 0) {
        // As far as this process knows the devices of the host.
        let new = placement::ordinal_on(placement::moved(devices, number), settings().devices);
        let new = new.map(|ordinal| settings().model(ordinal).kind());
        if new.is_some_and(|new| ask(pid, Request::Kind, number as u32) != Ok(new)) {
            return Err(Code::NOT_SUPPORTED);
        }
    }
    Ok(())
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
        if !settings().driver.has_custom_storage() {
            check(&arguments, 0)?;
            return ask(pid, Request::Checkpoint, 0).map(|_| ());
        }
        // Where to say where the memory is, if it is to go to storage of the caller's choice.
        let info = Out::at_address(check(&arguments, 1)?[0]);
        if info.address() == 0 {
            return ask(pid, Request::Checkpoint, 0).map(|_| ());
        }
        process::check_initialised()?;
        info.set(custom_storage::checkpoint(pid)?)
    }

    early fn cuCheckpointOperationComplete(handle: u64) {
        settings().driver.since(13_040)?;
        process::check_initialised()?;
        custom_storage::complete(handle)
    }

    early fn cuCheckpointProcessRestore(pid: i32, arguments: In<Arguments>) {
        // Pointer to and number of pairs of UUIDs, old and new; and as for a checkpoint.
        let custom = settings().driver.has_custom_storage();
        let [list, count, info, ..] = check(&arguments, if custom { 3 } else { 2 })?;
        let count = u32::try_from(count).map_err(|_| Code::INVALID_VALUE)? as usize;
        if list == 0 && count != 0 || count > MAX_DEVICES {
            return Err(Code::INVALID_VALUE);
        }
        let pair = |i: usize| {
            // SAFETY: the function's contract: so many pairs are there.
            let pair = unsafe { (list as *const [[u8; 16]; 2]).add(i).read_unaligned() };
            Some((number(&pair[0])?, number(&pair[1])?))
        };
        let pairs: Option<Vec<_>> = (0..count).map(pair).collect();
        let devices = placement::encode(pairs.ok_or(Code::INVALID_VALUE)?.into_iter())?;
        check_kinds(pid, devices)?;
        if info == 0 {
            return ask(pid, Request::Restore, devices).map(|_| ());
        }
        process::check_initialised()?;
        Out::at_address(info).set(custom_storage::restore(pid, devices)?)
    }

    early fn cuCheckpointProcessUnlock(pid: i32, arguments: In<Arguments>) {
        check(&arguments, 0)?;
        ask(pid, Request::Unlock, 0).map(|_| ())
    }
}
