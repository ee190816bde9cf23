//! Host memory that comes while the program runs.

use std::thread::JoinHandle;
use std::time::Duration;

use crossbeam_channel::{RecvTimeoutError, Sender};

use crate::base::progress::Progress;
use crate::engine::error::Error;
use crate::engine::locks;
use crate::host::criu::{OnDemandError, OnDemandMemory};
use crate::host::process::{Lock, ProcessInfo, kill_trees};
use crate::image::Manifest;

/// The time between two looks whether host memory has failed.
const LOOK: Duration = Duration::from_millis(10);

/// Keeps other gpucrs from processes that exist and do not run yet, for as long as host memory of theirs is missing.
///
/// # Errors
/// Another gpucr is at work on one; there is no place for locks.
pub(super) fn lock(pids: &[u32]) -> Result<Vec<Lock>, Error> {
    let lock = |pid: &u32| locks::take(&ProcessInfo::read(*pid)?, None);
    pids.iter().map(lock).collect()
}

/// What brings host memory, and the processes that it is brought to.
pub(super) struct HostSide<'a> {
    memory: Option<&'a OnDemandMemory>,
    processes: Vec<ProcessInfo>,
    progress: &'a dyn Progress,
}

impl<'a> HostSide<'a> {
    /// Of the processes of an image, which run.
    pub(super) fn of(
        memory: Option<&'a OnDemandMemory>,
        manifest: &Manifest,
        progress: &'a dyn Progress,
    ) -> Self {
        Self { memory, processes: processes(manifest), progress }
    }

    /// Waits until all of the memory is there, and for `device`, which is done meanwhile. If one of both fails the
    /// processes are ended, so that the other does not wait for them.
    ///
    /// # Errors
    /// That of `device`, unless it was the host memory that has failed.
    pub(super) fn beside(&self, device: impl FnOnce() -> Result<(), Error>) -> Result<(), Error> {
        let Some(memory) = self.memory else { return device() };
        std::thread::scope(|scope| {
            let host = scope.spawn(|| {
                self.wait(memory).inspect_err(|_| drop(kill_trees(self.processes.iter())))
            });
            let device = device().inspect_err(|_| drop(kill_trees(self.processes.iter())));
            let host = host.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic));
            host.and(device)
        })
    }

    fn wait(&self, memory: &OnDemandMemory) -> Result<(), Error> {
        let mut seen = 0;
        let waited = memory.wait(&mut |arrived| {
            self.progress.advance(arrived.bytes - seen);
            seen = arrived.bytes;
        });
        waited.map_err(failed)
    }
}

/// Ends processes whose host memory fails while nobody waits for it: they may wait for that memory for ever, and gpucr for
/// them. Ends when it is dropped.
pub(super) struct Alarm {
    /// Its end is that of the alarm.
    over: Option<Sender<()>>,
    thread: Option<JoinHandle<()>>,
}

impl Alarm {
    /// For the processes of an image, which run.
    ///
    /// # Errors
    /// There is no thread for it.
    pub(super) fn set(
        memory: Option<&OnDemandMemory>,
        manifest: &Manifest,
    ) -> Result<Option<Self>, Error> {
        let Some(memory) = memory else { return Ok(None) };
        let (has_failed, processes) = (memory.alarm(), processes(manifest));
        let (over, is_over) = crossbeam_channel::bounded::<()>(0);
        let watch = move || {
            while is_over.recv_timeout(LOOK) == Err(RecvTimeoutError::Timeout) {
                if has_failed() {
                    kill_trees(processes.iter());
                    return;
                }
            }
        };
        let thread = std::thread::Builder::new().name("gpucr-alarm".to_owned()).spawn(watch);
        let none = |source| Error::Io { what: "cannot start a thread".to_owned(), source };
        Ok(Some(Self { over: Some(over), thread: Some(thread.map_err(none)?) }))
    }
}

impl Drop for Alarm {
    fn drop(&mut self) {
        self.over = None;
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}

/// The processes of an image that run.
fn processes(manifest: &Manifest) -> Vec<ProcessInfo> {
    let pids = manifest.processes.iter().map(|process| process.pid);
    pids.filter_map(|pid| ProcessInfo::read(pid).ok()).collect()
}

/// The error of a restore whose host memory has failed, if it has: whatever else went wrong came of that.
pub(super) fn failure(memory: Option<&OnDemandMemory>) -> Option<Error> {
    memory?.take_failure().map(failed)
}

fn failed(error: OnDemandError) -> Error {
    match error {
        OnDemandError::Untold => Error::MovedAwaiting,
        OnDemandError::Io(source) => Error::of_memory(source),
    }
}
