//! What a dump looks at before it changes anything.

use std::collections::BTreeSet;
use std::path::PathBuf;
use std::time::Duration;

use gpucr_wire::{Counts, GateState};

use super::Options;
use crate::criu::Criu;
use crate::device::{Device, ProcessState};
use crate::error::Error;
use crate::held::{Drivers, Held};
use crate::image::{Listener, Stdio};
use crate::library;
use crate::process::{Agent, AgentError, Lock, ProcessInfo, Tree, files, sockets};

/// How long the agent of a running program may take to answer; it is busy only while another
/// gpucr works on the same program.
const FIRST_ANSWER: Duration = Duration::from_secs(10);

/// Everything that a dump needs to know before it begins.
pub(super) struct Plan {
    pub(super) criu: Criu,
    /// All processes, in the order of the tree.
    pub(super) processes: Vec<Planned>,
    /// The processes that use no CUDA.
    pub(super) others: Vec<ProcessInfo>,
    pub(super) devices: Vec<Device>,
    pub(super) driver: PathBuf,
    pub(super) driver_version: i32,
    /// Whether the root is no session leader: CRIU calls that a shell job.
    pub(super) shell_job: bool,
}

/// A process of the tree.
pub(super) struct Planned {
    pub(super) pid: u32,
    pub(super) parent: u32,
    pub(super) command: Vec<String>,
    pub(super) exe: PathBuf,
    pub(super) cuda: Option<Cuda>,
    pub(super) listeners: Vec<Listener>,
}

/// What a CUDA process had at the start of the dump.
pub(super) struct Cuda {
    pub(super) counts: Counts,
    pub(super) shim: Option<PathBuf>,
}

impl Planned {
    fn new(process: &ProcessInfo, cuda: Option<Cuda>) -> Self {
        Self {
            pid: process.pid,
            parent: process.parent,
            command: process.command.clone(),
            exe: std::fs::read_link(format!("/proc/{}/exe", process.pid)).unwrap_or_default(),
            cuda,
            listeners: sockets::of(process),
        }
    }
}

impl Plan {
    /// Bytes of the bulk memory of all processes, as they were.
    pub(super) fn bulk_bytes(&self) -> u64 {
        self.cuda().map(|cuda| cuda.counts.bulk_bytes).sum()
    }

    /// Looks at the tree again while CRIU holds it frozen: processes without CUDA may have come
    /// and gone. One that uses CUDA must not have, since its state was not saved.
    pub(super) fn update(
        &mut self,
        root: u32,
        held: &[Held],
        drivers: &Drivers,
    ) -> Result<(), Error> {
        if let Some(gone) = held.iter().find(|program| program.process.has_ended()) {
            let what = "it has ended".to_owned();
            return Err(Error::Changed { pid: gone.process.pid, what });
        }
        let tree = Tree::read(root)?;
        let mut known = std::mem::take(&mut self.processes);
        self.others.clear();
        for process in tree.processes {
            if held.iter().any(|program| program.process.pid == process.pid) {
                let place = known.iter().position(|planned| planned.pid == process.pid);
                self.processes.extend(place.map(|place| known.swap_remove(place)));
                continue;
            }
            // A frozen agent does not answer, but its socket is to be seen.
            if Agent::listens(&process) || driver_knows(&process, drivers)?.is_some() {
                let what = "it began to use CUDA after the others were stopped".to_owned();
                return Err(Error::Changed { pid: process.pid, what });
            }
            self.processes.push(Planned::new(&process, None));
            self.others.push(process);
        }
        Ok(())
    }

    /// The shims behind which the processes run.
    pub(super) fn shims(&self) -> impl Iterator<Item = &PathBuf> {
        self.cuda().filter_map(|cuda| cuda.shim.as_ref())
    }

    fn cuda(&self) -> impl Iterator<Item = &Cuda> {
        self.processes.iter().filter_map(|process| process.cuda.as_ref())
    }
}

/// Checks host and program. Nothing is changed; the agents' connections are open afterwards, and
/// the locks keep another gpucr away.
pub(super) fn check(
    options: &Options,
    drivers: &Drivers,
) -> Result<(Plan, Vec<Held>, Vec<Lock>), Error> {
    if !rustix::process::geteuid().is_root() {
        return Err(Error::NotRoot);
    }
    let tree = Tree::read(options.pid)?;
    if tree.pids().contains(&std::process::id()) {
        return Err(Error::OwnTree { pid: options.pid });
    }
    if let Some(process) = tree.processes.iter().find(|process| process.session == 0) {
        return Err(Error::OuterSession { pid: process.pid });
    }
    let criu = Criu::find()?;
    let root = tree.root();
    let on_terminal = |process: &ProcessInfo| {
        let stdio = files::stdio(process.pid, &BTreeSet::new());
        stdio.iter().any(|stream| matches!(stream, Stdio::Terminal { .. }))
    };
    let shell_job =
        options.shell_job || root.session != root.pid || tree.processes.iter().any(on_terminal);
    let descendants = tree.processes.len() - 1;

    let (mut processes, mut held) = (Vec::new(), Vec::<Held>::new());
    let mut others = Vec::new();
    let mut locks = Vec::new();
    for process in tree.processes {
        let lock = Lock::take(&process).map_err(|source| Error::Io {
            what: format!("cannot take the lock of process {}", process.pid),
            source,
        })?;
        locks.push(lock.ok_or(Error::Busy { pid: process.pid })?);
        let (cuda, program) = match inspect(&process, drivers)? {
            Some((cuda, driver, agent)) => (Some(cuda), Some((driver, agent))),
            None => (None, None),
        };
        processes.push(Planned::new(&process, cuda));
        match program {
            Some((driver, agent)) => {
                let has_agent = agent.is_some();
                held.push(Held {
                    process,
                    driver,
                    agent,
                    has_agent,
                    blocks: Vec::new(),
                    guard: None,
                    guard_failed: None,
                });
            }
            None => others.push(process),
        }
    }
    let Some(first) = held.first() else {
        return Err(Error::NoCuda { pid: options.pid, others: descendants });
    };
    let driver_path = first.driver.clone();
    if let Some(other) = held.iter().find(|program| program.driver != driver_path) {
        return Err(Error::Unsupported {
            pid: other.process.pid,
            what: format!("another driver library ({}) than its relatives", other.driver.display()),
        });
    }
    let driver = drivers.open(&driver_path)?;
    let wanted: Vec<[u8; 16]> = processes
        .iter()
        .filter_map(|process| process.cuda.as_ref())
        .flat_map(|cuda| cuda.counts.devices.clone())
        .collect();
    let devices = driver.devices()?.into_iter().filter(|d| wanted.contains(&d.uuid)).collect();
    let driver_version = driver.version()?;
    let plan =
        Plan { criu, processes, others, devices, driver: driver_path, driver_version, shell_job };
    Ok((plan, held, locks))
}

type Inspected = (Cuda, PathBuf, Option<Agent>);

/// What `process` has of CUDA, if anything.
fn inspect(process: &ProcessInfo, drivers: &Drivers) -> Result<Option<Inspected>, Error> {
    let pid = process.pid;
    if process.inner_pid != pid {
        return Err(Error::OtherPidNamespace { pid });
    }
    if Agent::listens(process) {
        if process.is_suspended() {
            return Err(Error::Suspended { pid });
        }
        let mut agent = match Agent::connect(process, FIRST_ANSWER) {
            Ok(agent) => agent,
            Err(AgentError::Absent { .. }) => return Ok(None),
            Err(error) => return Err(error.into()),
        };
        if agent.hello().gate == (GateState::Detached {}) {
            return Err(Error::Detached { pid });
        }
        let counts = agent.counts()?;
        refuse_unsupported(pid, &counts)?;
        let driver = PathBuf::from(&agent.hello().driver);
        // Whoever cannot ask for the state could not bring the program back either.
        let state = drivers.open(&driver)?.process_state(pid);
        match state.map_err(|source| Error::Process { pid, source })? {
            ProcessState::Running => {}
            state => return Err(Error::NotRunning { pid, state }),
        }
        let shim = Some(PathBuf::from(&agent.hello().shim));
        return Ok(Some((Cuda { counts, shim }, driver, Some(agent))));
    }
    // No agent: either no CUDA, or not started under gpucr.
    let Some((path, state)) = driver_knows(process, drivers)? else { return Ok(None) };
    if process.is_suspended() {
        return Err(Error::Suspended { pid });
    }
    if state != ProcessState::Running {
        return Err(Error::NotRunning { pid, state });
    }
    Ok(Some((Cuda { counts: Counts::default(), shim: None }, path, None)))
}

/// The driver library that knows `process`, if one of those that it has mapped does.
fn driver_knows(
    process: &ProcessInfo,
    drivers: &Drivers,
) -> Result<Option<(PathBuf, ProcessState)>, Error> {
    for path in process.driver_libraries.iter().filter(|path| !library::is_shim(path)) {
        if let Ok(state) = drivers.open(path)?.process_state(process.pid) {
            return Ok(Some((path.clone(), state)));
        }
    }
    Ok(None)
}

fn refuse_unsupported(pid: u32, counts: &Counts) -> Result<(), Error> {
    let mut what = counts.unsupported.clone();
    if counts.managed > 0 {
        what.push(format!("managed memory ({} allocations)", counts.managed));
    }
    if counts.shared > 0 {
        what.push(format!("memory shared with other processes ({} handles)", counts.shared));
    }
    if what.is_empty() {
        return Ok(());
    }
    Err(Error::Unsupported { pid, what: what.join(", ") })
}
