//! The locks of a shared store.

use std::fs::File;
use std::io;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use rustix::fs::FlockOperation;

use super::{StoreError, io_error};

/// How long a dump or restore waits for a gc that sweeps.
pub(super) const SWEEP_PATIENCE: Duration = Duration::from_secs(60);
/// How long a dump lets a gc that waits go first. Dumps that are shorter never keep one waiting by following each
/// other; but a program may have to be saved in a hurry, and the gc may wait for a dump that takes an hour.
pub(super) const QUEUE_PATIENCE: Duration = Duration::from_secs(if cfg!(test) { 2 } else { 10 });
/// How long a reader lets a gc that waits go first.
pub(super) const COURTESY: Duration = Duration::from_secs(2);
/// How often a lock is tried.
const PAUSE: Duration = Duration::from_millis(20);

/// An open lock file. What it holds is let go of on drop, and by the kernel if the process dies.
/// The file is opened for reading only, so that this works on a read-only mount.
#[derive(Debug)]
pub(super) struct LockFile {
    file: File,
    path: PathBuf,
}

impl LockFile {
    /// Opens the lock file at `path`, and holds nothing yet.
    pub(super) fn open(path: &Path) -> Result<Self, StoreError> {
        let file = super::index::open_regular(path)?;
        Ok(Self { file, path: path.to_owned() })
    }

    /// Takes the lock together with others who share it; waits for one who has it alone, until
    /// `stop` says to give up.
    pub(super) fn share(
        &self,
        patience: Duration,
        stop: &dyn Fn() -> bool,
    ) -> Result<(), StoreError> {
        self.take(FlockOperation::NonBlockingLockShared, patience, stop)
    }

    /// Takes the lock alone; waits for the processes that have it, until `stop` says to give up. A lock
    /// that was held before is not held after a failure.
    pub(super) fn exclude(
        &self,
        patience: Duration,
        stop: &dyn Fn() -> bool,
    ) -> Result<(), StoreError> {
        self.take(FlockOperation::NonBlockingLockExclusive, patience, stop)
    }

    fn take(
        &self,
        operation: FlockOperation,
        patience: Duration,
        stop: &dyn Fn() -> bool,
    ) -> Result<(), StoreError> {
        let since = Instant::now();
        loop {
            match rustix::fs::flock(&self.file, operation) {
                Ok(()) => return Ok(()),
                Err(rustix::io::Errno::INTR) => continue,
                Err(rustix::io::Errno::WOULDBLOCK) => {}
                Err(e) => return Err(io_error("lock", &self.path, io::Error::from(e))),
            }
            if since.elapsed() >= patience {
                return Err(StoreError::Busy { path: self.path.clone() });
            }
            if stop() {
                return Err(StoreError::Interrupted);
            }
            std::thread::sleep(PAUSE);
        }
    }
}
