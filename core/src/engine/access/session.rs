//! A tree of processes that is watched: connections to its agents, what was seen of each, and their device memory.

use std::sync::Arc;
use std::time::{Duration, Instant};

use gpucr_wire::GateState;
use gpucr_wire::access::Allocation;

use super::{Kernels, Tally};
use crate::base::stop::Stop;
use crate::base::timeline::Timeline;
use crate::cuda::{Drivers, HostDriver};
use crate::engine::cuda_process::{CudaProcess, are_fragile};
use crate::engine::error::Error;
use crate::engine::locks;
use crate::engine::mapped::Mapped;
use crate::engine::memory::Bulk;
use crate::host::process::{Agent, Lock, Tree};

/// How often the agents are asked, so that what they keep stays small.
const ASK: Duration = Duration::from_millis(250);
/// For so long kernels are learned of before memory that the programs have given back is let go of: they
/// wait for it a few seconds.
const LEARNING: Duration = Duration::from_secs(1);
/// How long is slept between two reads of the clock.
const NAP: Duration = Duration::from_millis(20);
/// How long an agent may take to answer at first.
const FIRST_ANSWER: Duration = Duration::from_secs(10);
/// Larger images of modules are not read, bytes.
pub(super) const LARGEST_IMAGE: u64 = 512 << 20;

/// What to trace, and how.
#[derive(Debug, Clone)]
pub struct Options {
    /// Root of the process tree.
    pub pid: u32,
    /// For how long.
    pub time: Duration,
    /// Also compare the device memory before and after.
    pub observe: bool,
    /// Stop the program after each launch, and compare what changed with what was expected to.
    pub check: bool,
    /// Of a check: make launches that are idempotent a second time. One that is not so after all leaves the
    /// program with other memory than it should have.
    pub twice: bool,
    /// Ends the trace early, with what there is.
    pub stop: Stop,
}

/// What was seen of a process.
#[derive(Default)]
pub(super) struct Watched {
    pub(super) tally: Tally,
    pub(super) kernels: Kernels,
}

/// The processes, and what was seen of each, in the same order.
pub(super) struct Session {
    pub(super) cuda_processes: Vec<CudaProcess>,
    pub(super) watched: Vec<Watched>,
    /// The device memory of all, mapped in gpucr.
    pub(super) memory: Option<Bulk>,
    /// Keep a second gpucr away.
    _locks: Vec<Lock>,
}

impl Session {
    /// Connects to all agents of a tree.
    ///
    /// # Errors
    /// The tree has no process under gpucr, or another gpucr is at work on one.
    pub(super) fn attach(options: &Options) -> Result<Self, Error> {
        let pid = options.pid;
        let tree = Tree::read(pid)?;
        let drivers = Drivers::default();
        let mut session = Self {
            cuda_processes: Vec::new(),
            watched: Vec::new(),
            memory: None,
            _locks: Vec::new(),
        };
        for process in tree.processes.into_iter().filter(Agent::listens) {
            let pid = process.pid;
            session._locks.push(locks::take(&process, Some(options.stop.asked()))?);
            if process.is_suspended() {
                return Err(Error::Suspended { pid });
            }
            let mut agent = Agent::connect(&process, FIRST_ANSWER, Some(options.stop.asked()))?;
            // The end of a trace asks once more.
            agent.set_stop(None);
            if matches!(agent.hello().gate, GateState::Detached {} | GateState::Parted {}) {
                return Err(Error::Detached { pid });
            }
            let driver = match Mapped::of(&process, &drivers)? {
                Mapped::Host { library, .. } => library,
                mapped => return Err(mapped.refused(pid)),
            };
            let kernels = match capability(&mut agent, &drivers, &driver) {
                Ok(capability) => capability.map_or_else(Kernels::default, Kernels::on),
                Err(error) => {
                    tracing::debug!(%error, pid, "its device is not known");
                    Kernels::default()
                }
            };
            let program = CudaProcess::new(process, driver, true);
            session.cuda_processes.push(CudaProcess { agent: Some(agent), ..program });
            session.watched.push(Watched { kernels, ..Watched::default() });
        }
        if session.cuda_processes.is_empty() { Err(Error::NoAgent { pid }) } else { Ok(session) }
    }

    pub(super) fn is_alive(&self) -> bool {
        self.cuda_processes.iter().any(|program| program.agent.is_some())
    }

    /// Sums up for as long as was asked for.
    pub(super) fn watch(&mut self, options: &Options) {
        let since = Instant::now();
        let mut next = since + ASK;
        while !options.stop.is_set() && self.is_alive() && since.elapsed() < options.time {
            if Instant::now() >= next {
                self.ask();
                next = Instant::now() + ASK;
            }
            let left = options.time.saturating_sub(since.elapsed());
            std::thread::sleep(NAP.min(left));
        }
        self.ask();
        self.observe();
        while !self.learn() && !options.stop.is_set() {}
    }

    /// Takes up what was launched since the last time, and lets go of memory that was given back.
    fn ask(&mut self) {
        let until = Instant::now() + LEARNING;
        for (program, watched) in self.cuda_processes.iter_mut().zip(&mut self.watched) {
            let Some(agent) = program.agent.as_mut() else { continue };
            let asked = agent.accesses().and_then(|accesses| {
                watched.kernels.learn(agent, &accesses.kernels, LARGEST_IMAGE, until)?;
                Ok(accesses)
            });
            match asked {
                Ok(accesses) => watched.tally.add(accesses),
                Err(error) => {
                    tracing::debug!(%error, "a process is not watched any more");
                    program.agent = None;
                }
            }
        }
        self.with_memory(follow);
    }

    /// Learns of kernels for which there was no time so far. Says whether nothing is left to learn.
    fn learn(&mut self) -> bool {
        let until = Instant::now() + LEARNING;
        let mut all = true;
        for (program, watched) in self.cuda_processes.iter_mut().zip(&mut self.watched) {
            let Some(agent) = program.agent.as_mut() else { continue };
            let Watched { tally, kernels } = watched;
            match kernels.learn(agent, tally.kernels.values(), LARGEST_IMAGE, until) {
                Ok(done) => all &= done,
                Err(error) => {
                    tracing::debug!(%error, "a process is not watched any more");
                    program.agent = None;
                }
            }
        }
        self.with_memory(follow);
        all
    }

    /// Maps the memory and makes the first hash pass. It takes a context of gpucr's own on each
    /// device; where that cannot be had, nothing is observed.
    pub(super) fn open_memory(&mut self) {
        match are_fragile(&mut self.cuda_processes) {
            Ok(false) => {}
            Ok(true) => {
                tracing::warn!(
                    "a long-running kernel of a restored program would die if gpucr opened its device"
                );
                return;
            }
            Err(error) => {
                tracing::warn!(%error, "it is not known whether a long-running kernel is at work")
            }
        }
        match prepare(&mut self.cuda_processes) {
            Ok(bulk) => self.memory = bulk,
            Err(error) => tracing::warn!(%error, "device memory cannot be observed"),
        }
        self.with_memory(hash_pass);
    }

    /// Makes another hash pass and draws conclusions.
    fn observe(&mut self) {
        self.with_memory(hash_pass);
        let Some(bulk) = &self.memory else { return };
        for (program, watched) in self.watched.iter_mut().enumerate() {
            let Watched { tally, kernels } = watched;
            let changed = |a: &Allocation| bulk.has_changed(program, a.address, a.size);
            kernels.observe(tally.kernels.values(), tally.allocations.values(), changed);
        }
    }

    /// Does something with the memory; without it from then on if that fails.
    pub(super) fn with_memory(
        &mut self,
        work: impl FnOnce(&mut Bulk, &mut [CudaProcess]) -> Result<bool, Error>,
    ) {
        let Some(mut bulk) = self.memory.take() else { return };
        match work(&mut bulk, &mut self.cuda_processes) {
            Ok(true) => self.memory = Some(bulk),
            Ok(false) => tracing::warn!("the device has no room for observing its memory"),
            Err(error) => tracing::warn!(%error, "device memory is not observed"),
        }
    }
}

/// The compute capability of the first device that a process uses; `None` if it uses none yet.
fn capability(
    agent: &mut Agent,
    drivers: &Drivers,
    driver: &Arc<HostDriver>,
) -> Result<Option<u32>, Error> {
    let devices = agent.counts()?.devices;
    let driver = drivers.open(driver)?;
    let all = driver.devices()?;
    let found = all.iter().find(|device| devices.first() == Some(&device.uuid));
    Ok(found.map(|device| driver.capability(device)).transpose()?)
}

fn prepare(cuda_processes: &mut [CudaProcess]) -> Result<Option<Bulk>, Error> {
    let (mut wanted, mut bytes) = (Vec::new(), 0);
    for agent in cuda_processes.iter_mut().filter_map(|program| program.agent.as_mut()) {
        let counts = agent.counts()?;
        wanted.extend(counts.devices);
        bytes += counts.bulk_bytes;
    }
    let driver = Drivers::default().open(&cuda_processes[0].driver)?;
    let devices: Vec<_> =
        driver.devices()?.into_iter().filter(|device| wanted.contains(&device.uuid)).collect();
    let Some(mut bulk) = Bulk::prepare(&driver, &devices, bytes, Timeline::default())? else {
        return Ok(None);
    };
    Ok(bulk.prepare_hashing().then_some(bulk))
}

fn follow(bulk: &mut Bulk, cuda_processes: &mut [CudaProcess]) -> Result<bool, Error> {
    let mut blocks = Vec::new();
    for program in cuda_processes.iter_mut() {
        // A process that has just ended has no blocks; the others are followed all the same.
        blocks.push(program.export().unwrap_or_else(|error| {
            tracing::debug!(%error, "a process is not watched any more");
            program.agent = None;
            program.blocks.clear();
            Vec::new()
        }));
    }
    bulk.follow(cuda_processes, &blocks)
}

/// Maps the memory that the processes have now, and hashes all of it. Says whether there was room.
///
/// # Errors
/// A device fails.
pub(super) fn hash_pass(
    bulk: &mut Bulk,
    cuda_processes: &mut [CudaProcess],
) -> Result<bool, Error> {
    let fits = follow(bulk, cuda_processes)?;
    if fits {
        bulk.hash_pass()?;
    }
    Ok(fits)
}
