//! Programs that have been stopped, and the one way back to running.
//!
//! What brings a program back does not follow what was done to it but looks where it stands: the
//! state that the driver reports and the state that the agent reports. So the same code serves
//! the end of a dump that leaves the program running, the roll-back of one that failed anywhere,
//! and the keeper, which knows only that gpucr has died.

use std::collections::{HashMap, HashSet};
use std::os::fd::OwnedFd;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use gpucr_wire::{Block, GateState};
use parking_lot::Mutex;

use crate::device::{Driver, ProcessState};
use crate::error::Error;
use crate::process::{Agent, AgentError, Guard, ProcessInfo};

/// How long a thawing program may take until its agent answers.
const THAW: Duration = Duration::from_secs(60);
/// After how long a failed way back is tried once more.
const AGAIN: Duration = Duration::from_millis(100);

/// A CUDA process of the program that is being dumped or restored.
pub struct Held {
    /// The process.
    pub process: ProcessInfo,
    /// The driver library that it uses.
    pub driver: PathBuf,
    /// Its agent's connection, while there is one.
    pub agent: Option<Agent>,
    /// Whether it has an agent at all, that is, runs under gpucr.
    pub has_agent: bool,
    /// Its physical memory by block id: what keeps the bytes alive while it is detached.
    pub blocks: Vec<(u64, OwnedFd)>,
    /// What the agent is told before the gate opens. Its connection is kept then: with it the guard ends.
    pub guard: Option<Guard>,
    /// Why it was not told: then the program runs unguarded.
    pub guard_failed: Option<AgentError>,
}

impl Held {
    /// Brings the process back to running from wherever it stands. After a failure it may be
    /// tried again.
    pub fn resume(&mut self, drivers: &Drivers) -> Result<(), Error> {
        if self.process.has_ended() {
            return Err(Error::ProgramEnded);
        }
        let driver = drivers.open(&self.driver)?;
        let pid = self.process.pid;
        let of_process = |source| Error::Process { pid, source };
        match driver.process_state(pid) {
            Ok(ProcessState::Running) => {}
            Ok(_) => driver.resume(pid).map_err(of_process)?,
            // A driver that does not know the process cannot have locked it: its memory matters.
            Err(error) if self.has_agent => tracing::warn!(%error, pid, "no state"),
            Err(error) => return Err(of_process(error)),
        }
        if !self.has_agent {
            return Ok(());
        }
        // A connection that is still open is from before the detach, and the agent serves it
        // alone: a second one would wait behind it.
        if let Some(mut agent) = self.agent.take().filter(Agent::is_in_step)
            && agent.open_gate().is_ok()
        {
            return Ok(());
        }
        let mut agent = Agent::connect(&self.process, THAW)?;
        if agent.hello().gate == (GateState::Detached {}) {
            agent.reattach(&self.blocks)?;
        }
        if let Some(guard) = &self.guard {
            // Launches are recorded for those who will be suspected.
            let told = agent.guard(guard).and_then(|()| agent.record(true));
            self.guard_failed = told.err();
        }
        agent.open_gate()?;
        self.agent = self.guard.is_some().then_some(agent);
        Ok(())
    }
}

impl Held {
    /// Asks for the blocks that the process has now: takes a file descriptor of each that is new, and
    /// closes those of blocks that are gone. None without an agent.
    pub(crate) fn export(&mut self) -> Result<Vec<Block>, Error> {
        let Some(agent) = &mut self.agent else {
            return Ok(Vec::new());
        };
        let known = self.blocks.iter().map(|(id, _)| *id).collect();
        let (blocks, new) = agent.export(known)?;
        let listed: HashSet<u64> = blocks.iter().map(|block| block.id).collect();
        self.blocks.retain(|(id, _)| listed.contains(id));
        self.blocks.extend(new);
        Ok(blocks)
    }
}

/// Brings every process back to running that has not ended; says what went wrong, by process.
pub(crate) fn resume_all(held: &mut [Held], drivers: &Drivers) -> Vec<(u32, Error)> {
    let mut failed = Vec::new();
    for program in held.iter_mut() {
        // Some refusals pass, such as that of a device which was full for a moment.
        let mut result = program.resume(drivers);
        if result.is_err() {
            std::thread::sleep(AGAIN);
            result = program.resume(drivers);
        }
        match result {
            Err(error) if !program.process.has_ended() => failed.push((program.process.pid, error)),
            _ => {}
        }
    }
    failed
}

/// The driver libraries opened so far, by path: opening one takes a tenth of a second and more.
#[derive(Default)]
pub struct Drivers {
    open: Mutex<HashMap<PathBuf, Arc<Driver>>>,
}

impl Drivers {
    /// The driver at `path`, opened and initialised on its first use.
    pub fn open(&self, path: &Path) -> Result<Arc<Driver>, Error> {
        let mut open = self.open.lock();
        if let Some(driver) = open.get(path) {
            return Ok(driver.clone());
        }
        let driver = Arc::new(Driver::open(path)?);
        open.insert(path.to_owned(), driver.clone());
        Ok(driver)
    }
}
