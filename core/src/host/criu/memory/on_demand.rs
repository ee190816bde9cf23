//! Memory that comes when it is touched, and all of it in the end, while the processes run.

use std::io;
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::sync::atomic::Ordering;

use super::follow::Follower;
use super::missing::Missing;
use super::plan::Memory;
use super::server::{LOOK_UP, Late, OnDemandError, Shared};
use super::stage::Stage;
use super::uffd::Uffd;

/// How far it has come.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Arrived {
    /// Bytes that are there, or are not wanted any more.
    pub(crate) bytes: u64,
    /// How often a thread has touched what was missing.
    pub(crate) faults: u64,
}

/// Memory that comes on demand. Dropping it before all is there gives zeros to the program.
pub(crate) struct OnDemandMemory(Arc<Shared>);

impl OnDemandMemory {
    pub(super) fn new(stage: Arc<Stage>, wake: OwnedFd, late: Late) -> Self {
        Self(Arc::new(Shared::new(stage, wake, late)))
    }

    /// Begins to serve a process.
    ///
    /// # Errors
    /// Its descriptor cannot be kept, or there is no thread for it.
    pub(super) fn begin(&self, pid: i32, memory: Arc<Memory>, uffd: Uffd) -> io::Result<()> {
        let missing = Missing::new(memory.pieces().iter().copied());
        self.0.all.fetch_add(memory.bytes(), Ordering::Relaxed);
        let follower = Follower::of(self.0.advice.clone(), pid);
        Shared::serve(&self.0, memory, uffd, missing, follower)
    }

    /// # Errors
    /// Something has failed so far.
    pub(super) fn check(&self) -> Result<(), OnDemandError> {
        self.take_failure().map_or(Ok(()), Err)
    }

    /// Why memory cannot be brought any more, if it cannot. This is told once.
    pub(crate) fn take_failure(&self) -> Option<OnDemandError> {
        self.0.failure.lock().take()
    }

    /// Tells, from any thread, whether memory cannot be brought any more.
    pub(crate) fn alarm(&self) -> impl Fn() -> bool + Send + 'static {
        let shared = self.0.clone();
        move || shared.failure.lock().is_some()
    }

    /// Bytes that are not there when the processes begin to run.
    pub(crate) fn bytes(&self) -> u64 {
        self.0.all.load(Ordering::Relaxed)
    }

    /// How far it has come.
    pub(crate) fn arrived(&self) -> Arrived {
        let Shared { bytes, faults, .. } = &*self.0;
        Arrived { bytes: bytes.load(Ordering::Relaxed), faults: faults.load(Ordering::Relaxed) }
    }

    /// Waits until all memory is there, or its processes have ended. `look` is called now and then. After that the
    /// program needs this no more, once those who keep descriptors have closed them.
    ///
    /// # Errors
    /// Memory cannot be brought any more: the program must be ended, and this be dropped after that.
    pub(crate) fn wait(&self, look: &mut dyn FnMut(Arrived)) -> Result<(), OnDemandError> {
        loop {
            let is_there = self.0.lacking.load(Ordering::SeqCst) == 0;
            look(self.arrived());
            if let Some(failure) = self.take_failure() {
                return Err(failure);
            }
            if is_there {
                return Ok(());
            }
            let mut threads = self.0.threads.lock();
            let ended: Vec<_> = threads.extract_if(.., |thread| thread.is_finished()).collect();
            drop(threads);
            for thread in ended {
                thread.join().map_err(|_| io::Error::other("a thread has panicked"))?;
            }
            std::thread::sleep(LOOK_UP);
        }
    }
}

impl Drop for OnDemandMemory {
    fn drop(&mut self) {
        self.0.stage.end();
        // A thread may add one, while it has not ended.
        while let Some(thread) = { self.0.threads.lock().pop() } {
            let _ = thread.join();
        }
    }
}
