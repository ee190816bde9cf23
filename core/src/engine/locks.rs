//! The locks of processes, by which one gpucr at a time works on each.

use std::sync::atomic::AtomicBool;

use crate::engine::error::Error;
use crate::host::process::{Lock, ProcessInfo};

/// Takes the lock of a process. The watchdog of a gpucr that has died is waited for, until `stop` says so.
///
/// # Errors
/// [`Error::Busy`]: another gpucr is at work on it. [`Error::Io`]: there is no place for locks.
pub(super) fn take(process: &ProcessInfo, stop: Option<&AtomicBool>) -> Result<Lock, Error> {
    let pid = process.pid;
    let lock = Lock::take(process, stop).map_err(|source| Error::Io {
        what: format!("cannot take the lock of process {pid}"),
        source,
    })?;
    lock.ok_or(Error::Busy { pid })
}
