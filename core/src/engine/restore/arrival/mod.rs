//! How device memory arrives in a restored program. Each way is a file of its own behind [`Arrival`].

pub(super) mod choose;
mod eager;
mod inside;
mod on_demand;
mod shared;

use std::os::fd::OwnedFd;
use std::sync::atomic::AtomicBool;

use crate::base::faults::fault;
use crate::base::progress::Progress;
use crate::engine::cuda_process::CudaProcess;
use crate::engine::error::Error;
use crate::host::process::Agent;
use crate::image::Block;

use super::bulk::{self, Loaded};
use super::loading::Loading;
use super::processes::unless_ended;
use super::report::Report;
use super::source::Source;
use super::watch::Watch;

/// A way of bringing device memory back: what it does at each moment of a restore. The methods are in the order in
/// which they are called, each at most once. What a way needs later it keeps in itself.
///
/// After a failure at any moment nothing more is called and the arrival is dropped. The caller ends the processes
/// that there are, so an arrival has nothing to undo in them; what it has made outside of them has to go with it.
pub(super) trait Arrival: Send {
    /// Whether gpucr has to be the parent of the processes even if the program is detached, because it has to be told
    /// how they end. Asked before anything is made.
    fn needs_parent(&self) -> bool {
        false
    }

    /// Whether it gives each block to one process only, at a time of the block's own.
    fn brings_blocks_alone(&self) -> bool {
        false
    }

    /// In phase `load`, on a thread of its own, while CRIU makes the processes. CRIU lets none of them run before this
    /// has returned. gpucr's own context may be used here; it has to be given up before this returns, unless memory
    /// arrives after the processes run, because the driver needs the room for the contexts of the processes. What
    /// others load may arrive until [`attach`](Self::attach).
    ///
    /// # Errors
    /// Host or image are not as they have to be; the stop was set. Nothing of the program has run then.
    fn prepare(&mut self, loading: &Loading<'_, '_>) -> Result<Prepared, Error>;

    /// What loads the memory, for the report.
    fn copied(&self) -> &'static str {
        "outside"
    }

    /// In phase `driver`: the processes run on the host's side and have no contexts yet. Gives the descriptors of the
    /// memory that is complete, which are kept until the restore has ended; `None` if there is none.
    fn take_loaded(&mut self) -> Option<Loaded> {
        None
    }

    /// In phase `attach`: the driver has restored the contexts. The agents have answered, all gates are closed, and
    /// nothing is mapped at the addresses of the memory. After this each process has its memory, or waits for it at
    /// each call that may touch it.
    ///
    /// # Errors
    /// An agent failed. The host's side of the program has run by then, and nothing of it on a device.
    fn attach(&mut self, programs: &mut Programs<'_>) -> Result<(), Error>;

    /// Whether every process has all of its memory after [`attach`](Self::attach). Then the watchdog is let go before
    /// the gates open, and the program runs on if gpucr dies. Else the watchdog ends the program if gpucr dies, until
    /// [`complete`](Self::complete) has returned.
    fn is_complete(&self) -> bool {
        true
    }

    /// In phase `stream`, only if the memory is not complete: the gates are open, and the program runs. `root` is the
    /// pid of its root, and a signal that came meanwhile has set `asked`. After this the program needs gpucr no more.
    ///
    /// # Errors
    /// The program has to be ended. It has run, and other programs may have seen what it did; [`Error::Missed`] and
    /// [`Error::EndedAwaiting`] say that image and host are as they should be.
    fn complete(
        &mut self,
        _programs: &mut Programs<'_>,
        _root: u32,
        _asked: &AtomicBool,
    ) -> Result<(), Error> {
        Ok(())
    }

    /// Puts down what became of it.
    fn report(&self, _report: &mut Report) {}

    /// At the end: what tells, as long as the program runs, that it cannot go on.
    fn take_watch(&mut self) -> Option<Watch> {
        None
    }
}

/// What preparing the memory has come to.
pub(super) enum Prepared {
    /// The memory is loaded, or there is room for it.
    Ready,
    /// The device has no room for it besides gpucr's context, or grants none.
    NoRoom,
}

/// The programs that memory is brought back to: detached from all of it, or waiting for it.
pub(super) struct Programs<'a> {
    pub(super) image: &'a Source,
    /// The processes that used CUDA, in the order of the image.
    pub(super) cuda_processes: &'a mut [CudaProcess],
    pub(super) progress: &'a dyn Progress,
}

impl Programs<'_> {
    /// Gives memory to each program that has an agent: `give` gets the agent, the descriptors that are kept for the
    /// program, and the blocks that the image has of it. A program that comes to its end meanwhile is passed over.
    fn give(
        &mut self,
        mut give: impl FnMut(&mut Agent, &[(u64, OwnedFd)], &[Block]) -> Result<(), Error>,
    ) -> Result<(), Error> {
        let processes = bulk::cuda_processes(&self.image.manifest().processes);
        for (program, (_, blocks)) in self.cuda_processes.iter_mut().zip(processes) {
            let Some(agent) = &mut program.agent else { continue };
            let given = give(agent, &program.blocks, blocks);
            unless_ended(&program.process, given)?;
            tracing::debug!(pid = program.process.pid, "it has its memory");
            fault("attached")?;
        }
        Ok(())
    }
}
