//! What all phases of a dump use, what they find out, and what has to be taken back after a failure.

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use super::defer::Deferral;
use super::host::memory::Host;
use super::preflight::DumpPlan;
use super::report::{LetThrough, Options};
use super::speculate::Speculation;
use super::strategy::Strategy;
use crate::base::clock::Clock;
use crate::base::phase::Phase;
use crate::base::progress::Progress;
use crate::base::timeline::{Timeline, Track};
use crate::cuda::{Drivers, Reserver};
use crate::engine::access::Extent;
use crate::engine::cuda_process::CudaProcess;
use crate::engine::error::Error;
use crate::engine::interrupted::Interrupted;
use crate::engine::memory::{Bulk, Miss, Validation};
use crate::engine::watchdog::Watchdog;
use crate::host::process::farewell::Farewell;
use crate::host::process::{LAST_MOMENTS, Lock, ProcessInfo};

/// What is to be done, with whom, and how far it has come.
pub(super) struct Task<'a> {
    pub(super) options: &'a Options,
    pub(super) progress: &'a Arc<dyn Progress>,
    pub(super) clock: Clock<'a>,
    pub(super) drivers: Drivers,
    /// Keeps device memory for the programs while the driver has them checkpointed.
    pub(super) reserver: Reserver,
    pub(super) plan: DumpPlan,
    pub(super) strategy: Strategy,
    /// gpucr comes to the devices when the programs stand still, not before.
    pub(super) opens_late: bool,
    /// What the programs launch while memory is copied.
    pub(super) speculation: Speculation,
    pub(super) account: Account,
    /// What of host memory is copied ahead.
    pub(super) host: Host,
    pub(super) made: Made,
    /// Whoever watches over the program knows that it is about to be ended, if it is.
    pub(super) farewell: Option<Farewell>,
    /// Keep a second gpucr away.
    pub(super) _locks: Vec<Lock>,
}

/// What there is to be taken back after a failure in any phase. The unfinished image is with the states, and last of
/// all in [`Setback`](super::setback::Setback).
pub(super) struct Made {
    /// The programs, which may be anywhere on the way to their checkpoint.
    pub(super) cuda_processes: Vec<CudaProcess>,
    /// Brings them back if gpucr dies.
    pub(super) watchdog: Watchdog,
    pub(super) standstill: Standstill,
}

/// What the report will say, and the timeline after a failure too. If the programs are stopped a second time it goes
/// on from there.
#[derive(Default)]
pub(super) struct Account {
    /// Bytes of the exported blocks.
    pub(super) bulk_bytes: u64,
    /// Chunks copied while the programs ran.
    pub(super) precopied: u64,
    /// The check of the chunks that were copied ahead, if there was one.
    pub(super) checked: Option<Checked>,
    /// Whether each process was stopped behind a call by which it waits for the device, if that was asked for.
    pub(super) at_sync: Option<bool>,
    /// Launches that were let through the closed gates, if any were.
    pub(super) let_through: Vec<LetThrough>,
    /// Launches that are interrupted, and go on with the programs.
    pub(super) interrupted: Vec<Interrupted>,
    /// Bytes copied aside within the devices.
    pub(super) shadowed: u64,
    /// What was saved late, if anything was.
    pub(super) deferral: Option<Deferral>,
}

/// What the hashes of all memory have told of the chunks that had been copied before.
pub(super) struct Checked {
    pub(super) found: Validation,
    /// The chunks that had changed.
    pub(super) missed: Vec<Miss>,
    pub(super) at: Instant,
}

/// What a check of all memory has found.
pub(super) struct Verdict {
    /// For the report.
    pub(super) checked: Checked,
    /// Of each program the blocks that have stayed unchanged all the time.
    pub(super) unchanged: Vec<Vec<Extent>>,
}

/// The times for which the programs are stopped.
#[derive(Default)]
pub(super) struct Standstill {
    /// Since when they are stopped; `None` while they run.
    since: Option<Instant>,
    /// For how long they were stopped before.
    before: Duration,
}

impl Standstill {
    pub(super) fn begin(&mut self) {
        self.since = Some(Instant::now());
    }

    /// While the programs are stopped, for how long by now; while they run, for how long they were in all.
    pub(super) fn length(&self) -> Duration {
        self.since.map_or(self.before, |since| since.elapsed())
    }

    /// The programs run again, or are gone, and have been stopped for so long; if they have.
    pub(super) fn end(&mut self, length: Duration, timeline: &Timeline) {
        if let Some(since) = self.since.take() {
            timeline.lasted(Track::Program, "stopped", since, length);
            self.before += length;
        }
    }
}

impl Task<'_> {
    /// # Errors
    /// gpucr was asked to end, or a test asked for a failure.
    pub(super) fn enter(&mut self, phase: Phase, bytes: Option<u64>) -> Result<(), Error> {
        if self.options.stop.load(Ordering::Relaxed) {
            return Err(Error::Interrupted);
        }
        Ok(self.clock.enter(phase, bytes)?)
    }

    /// Tells the other side of a migration what is in which block of device memory.
    pub(super) fn lay_out(&self, bulk: &Bulk) -> Result<(), Error> {
        let Some(peer) = self.options.target.peer() else { return Ok(()) };
        let pid = |program: usize| self.made.cuda_processes[program].process.pid;
        peer.lay_out(bulk.laid(), pid)
    }

    /// All processes of the program.
    pub(super) fn processes(&self) -> impl Iterator<Item = &ProcessInfo> {
        self.made.cuda_processes.iter().map(|program| &program.process).chain(&self.plan.others)
    }

    /// Goes on without the program `pid`, if it has ended and the tree lives on. Only while the programs run: later
    /// the end of one may be what stopping it has done.
    pub(super) fn forget_ended(&mut self, pid: u32, memory: Option<&mut Bulk>) -> bool {
        let cuda_processes = &mut self.made.cuda_processes;
        let Some(number) = cuda_processes.iter().position(|program| program.process.pid == pid)
        else {
            return false;
        };
        if pid == self.options.pid
            || cuda_processes.len() == 1
            || !cuda_processes[number].process.ends_within(LAST_MOMENTS)
        {
            return false;
        }
        cuda_processes.remove(number);
        self.plan.forget(pid);
        self.speculation.forget(number);
        if let Some(bulk) = memory {
            bulk.forget_program(number);
        }
        true
    }
}
