//! Programs that have been stopped, and the one way back to running.
//!
//! What brings a program back does not follow what was done to it but asks where it stands: the
//! state that the driver reports and the state that the agent reports. So the same code serves
//! the end of a dump that leaves the program running, the roll-back of one that failed anywhere,
//! and the watchdog, which knows only that gpucr has died.

use std::collections::{HashMap, HashSet};
use std::os::fd::OwnedFd;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, mpsc};
use std::time::{Duration, Instant};

use gpucr_wire::{Block, BlockKind, GateState};

use crate::cuda::{Freed, HostDriver, ProcessState};
use crate::engine::device_state::{DeviceStates, StateError};
use crate::engine::error::Error;
use crate::engine::sharers::{Opened, Sharers};
use crate::engine::teams::{self, Member, Team};
use crate::host::process::{Agent, AgentError, Guard, ProcessInfo};

/// How long a thawing program may take until its agent has done its part.
const THAW: Duration = Duration::from_secs(60);
/// How long the way back may still take when gpucr was asked to end. The watchdog brings back the rest.
const GRACE: Duration = Duration::from_millis(1200);
/// How often it is checked whether gpucr was asked to end.
const POLL: Duration = Duration::from_millis(20);
/// After how long a failed way back is tried once more.
const AGAIN: Duration = Duration::from_millis(100);

/// How long a program that the driver has restored is looked at, to see whether a kernel takes long; and how often, since
/// a gate that is shut may itself keep several processes from what their kernels wait for.
const PATIENCE: Duration = Duration::from_millis(1500);
const LOOKS: u32 = 2;

/// Another process that has copies of the device memory that is kept for programs: as long as it has them the memory
/// is not free.
pub(crate) trait HasCopies {
    /// Has it close its copies of what is kept for process `pid`, and waits until it has.
    fn give_back(&mut self, pid: u32);
}

/// A CUDA process of the program that is being dumped or restored.
pub struct CudaProcess {
    /// The process.
    pub process: ProcessInfo,
    /// The driver library of this host that serves it.
    pub driver: Arc<HostDriver>,
    /// Its agent's connection, while there is one.
    pub agent: Option<Agent>,
    /// Whether it has an agent at all, that is, runs under gpucr.
    pub has_agent: bool,
    /// Its physical memory by block id: what keeps the bytes alive while it is detached. Also that of other processes
    /// which it has [open](Self::opened).
    pub blocks: Vec<(u64, OwnedFd)>,
    /// The blocks of other processes that it has open.
    pub(crate) opened: Vec<Opened>,
    /// As its agent lists them, until they are [found](super::opened::resolve).
    pub(crate) listed: Vec<Block>,
    /// With whom it shares memory, as far as it was asked.
    pub(crate) sharers: Sharers,
    /// Its multicast objects, as it had them when its gate was closed.
    pub(crate) team: Team,
    /// Device memory that is kept for it while the driver has it checkpointed.
    pub reserve: Vec<OwnedFd>,
    /// Bytes of each device, by its UUID, that became free when it was detached and checkpointed.
    pub freed: Vec<([u8; 16], u64)>,
    /// What the agent is told before the gate opens. Its connection is kept then: with it the guard ends.
    pub guard: Option<Guard>,
    /// Why it was not told: then the program runs unguarded.
    pub guard_failed: Option<AgentError>,
}

impl CudaProcess {
    /// A process of which nothing has been asked or taken yet.
    pub(crate) fn new(process: ProcessInfo, driver: Arc<HostDriver>, has_agent: bool) -> Self {
        Self {
            process,
            driver,
            agent: None,
            has_agent,
            blocks: Vec::new(),
            opened: Vec::new(),
            listed: Vec::new(),
            sharers: Sharers::default(),
            team: Team::default(),
            reserve: Vec::new(),
            freed: Vec::new(),
            guard: None,
            guard_failed: None,
        }
    }

    /// Brings its device state back to running, from wherever it stands. What is kept for it is given back
    /// before, by the watchdog too, which has copies. After a failure it may be tried again.
    fn resume_device_state(
        &mut self,
        states: &dyn DeviceStates,
        watchdog: Option<&mut impl HasCopies>,
    ) -> Result<(), Error> {
        if self.process.has_ended() {
            return Err(Error::ProgramEnded);
        }
        let device_state = states.device_state(&self.driver)?;
        let pid = self.process.pid;
        let of_process = |source| Error::Process { pid, source };
        match device_state.state(pid) {
            Ok(ProcessState::Running) => Ok(()),
            Ok(_) => {
                self.give_back(watchdog);
                device_state.resume(pid, &[]).map_err(of_process)
            }
            // A driver that does not know the process cannot have locked it: its memory matters.
            Err(error @ StateError::Driver(_)) if self.has_agent => {
                tracing::warn!(%error, pid, "no state");
                Ok(())
            }
            Err(error) => Err(of_process(error)),
        }
    }

    /// Lets go of the device memory that is kept for it.
    fn give_back(&mut self, watchdog: Option<&mut impl HasCopies>) {
        if self.reserve.is_empty() {
            return;
        }
        self.reserve.clear();
        if let Some(watchdog) = watchdog {
            watchdog.give_back(self.process.pid);
        }
    }

    /// Has the agent bring back the rest, from wherever it stands, by `end` and before `over` is set; what others have to
    /// take part in is left, and is what this gives. After a failure it may be tried again.
    fn resume_agent(
        &mut self,
        end: Instant,
        over: &Arc<AtomicBool>,
    ) -> Result<Option<Team>, Error> {
        if !self.has_agent {
            return Ok(None);
        }
        // A connection that is still open is from before the detach, and the agent serves it
        // alone: a second one would wait behind it.
        if let Some(mut agent) = self.agent.take().filter(Agent::is_in_step) {
            agent.set_stop(Some(over.clone()));
            agent.set_end(Some(end));
            if agent.open_gate().is_ok() {
                return Ok(None);
            }
        }
        let left = end.saturating_duration_since(Instant::now());
        let mut agent = Agent::connect(&self.process, left, Some(over))?;
        agent.set_end(Some(end));
        let gate = agent.hello().gate;
        if gate == (GateState::Detached {}) {
            agent.reattach(&self.blocks)?;
        }
        if matches!(gate, GateState::Detached {} | GateState::Parted {}) {
            let (identity, objects) = agent.objects()?;
            if gate == (GateState::Parted {}) || !objects.is_empty() {
                self.agent = Some(agent);
                return Ok(Some(Team { identity, objects }));
            }
        }
        self.go_on(agent).map(|()| None)
    }

    /// Has the agent, whose program has its memory, open the gate.
    fn go_on(&mut self, mut agent: Agent) -> Result<(), Error> {
        if let Some(guard) = &self.guard {
            // Launches are recorded to name the kernels that wrote too early.
            let told = agent.guard(guard).and_then(|()| agent.record(true));
            self.guard_failed = told.err();
        }
        agent.open_gate()?;
        self.agent = self.guard.is_some().then_some(agent);
        Ok(())
    }
}

impl CudaProcess {
    /// Keeps for it what has become free on its behalf.
    pub(crate) fn keep(&mut self, Freed { memory, bytes }: Freed) {
        self.reserve.extend(memory);
        for (device, bytes) in bytes {
            match self.freed.iter_mut().find(|(known, _)| *known == device) {
                Some((_, sum)) => *sum += bytes,
                None => self.freed.push((device, bytes)),
            }
        }
    }

    /// Asks for the blocks that the process has now: takes a file descriptor of each that is new, and
    /// closes the descriptors of blocks that are gone. None without an agent. Blocks of other processes that it has
    /// open are not among them: they are listed for [`resolve`](super::opened::resolve).
    ///
    /// # Errors
    /// The agent does not answer, or there is no descriptor left.
    pub(crate) fn export(&mut self) -> Result<Vec<Block>, Error> {
        let Some(agent) = &mut self.agent else {
            return Ok(Vec::new());
        };
        self.blocks.retain(|(id, _)| !self.opened.iter().any(|opened| opened.id == *id));
        self.opened.clear();
        let known = self.blocks.iter().map(|(id, _)| *id).collect();
        let (blocks, new) = agent.export(known)?;
        let (listed, blocks) = blocks
            .into_iter()
            .partition::<Vec<_>, _>(|block| matches!(block.kind, BlockKind::Opened { .. }));
        self.listed = listed;
        let listed: HashSet<u64> = blocks.iter().map(|block| block.id).collect();
        self.blocks.retain(|(id, _)| listed.contains(id));
        self.blocks.extend(new);
        Ok(blocks)
    }
}

/// Brings every process back to running that has not ended; says what went wrong, by process. If `asked` is set,
/// before or meanwhile, it does not wait much longer for programs that do not answer. `watchdog` is the one that has
/// copies of what is kept for them.
pub(crate) fn resume_all<K: HasCopies>(
    cuda_processes: &mut [CudaProcess],
    states: &dyn DeviceStates,
    mut watchdog: Option<&mut K>,
    asked: Option<&AtomicBool>,
) -> Vec<(u32, Error)> {
    let ready = cuda_processes.iter_mut().map(|program| {
        let watchdog = &mut watchdog;
        twice(move || program.resume_device_state(states, watchdog.as_deref_mut()))
    });
    let ready: Vec<Result<(), Error>> = ready.collect();
    let (end, over) = (Instant::now() + THAW, Arc::new(AtomicBool::new(false)));
    let (done, is_done) = mpsc::channel::<()>();
    let results: Vec<Result<(), Error>> = std::thread::scope(|scope| {
        let watched = &over;
        scope.spawn(move || set_soon_after(asked, watched, &is_done));
        let _done = done;
        let resumed = resume_agents(cuda_processes, ready, end, &over);
        resume_teams(cuda_processes, resumed)
    });
    let mut failed = Vec::new();
    for (program, result) in cuda_processes.iter_mut().zip(results) {
        let pid = program.process.pid;
        match result {
            Err(_) if program.process.has_ended() => {}
            Err(Error::Interrupted) => {
                let cause = std::io::ErrorKind::TimedOut.into();
                failed.push((pid, AgentError::Broken { pid, cause }.into()));
            }
            Err(error) => failed.push((pid, error)),
            Ok(()) => {
                // What is asked of it from now on is not the way back any more.
                if let Some(agent) = &mut program.agent {
                    agent.set_end(None);
                    agent.set_stop(None);
                }
            }
        }
    }
    failed
}

/// All processes at once: one that does not answer delays no other.
fn resume_agents(
    cuda_processes: &mut [CudaProcess],
    ready: Vec<Result<(), Error>>,
    end: Instant,
    over: &Arc<AtomicBool>,
) -> Vec<Result<Option<Team>, Error>> {
    std::thread::scope(|scope| {
        let resuming = cuda_processes.iter_mut().zip(ready).map(|(program, ready)| {
            scope.spawn(move || ready.and_then(|()| twice(|| program.resume_agent(end, over))))
        });
        let resuming: Vec<_> = resuming.collect();
        let joined = resuming.into_iter().map(|thread| thread.join());
        joined.map(|r| r.unwrap_or_else(|panic| std::panic::resume_unwind(panic))).collect()
    })
}

/// Opens the gates of those that have multicast objects, once all of them have them again. As long as one of the others
/// is not back that may be one whose memory they reach: then they wait too.
fn resume_teams(
    cuda_processes: &mut [CudaProcess],
    results: Vec<Result<Option<Team>, Error>>,
) -> Vec<Result<(), Error>> {
    let programs = cuda_processes.iter().zip(&results);
    let away = programs.filter(|(program, result)| result.is_err() && !program.process.has_ended());
    let away = away.map(|(program, _)| program.process.pid).next();
    let teams = results.iter().enumerate();
    let teams = teams.filter_map(|(at, result)| Some((at, result.as_ref().ok()?.clone()?)));
    let teams: HashMap<usize, Team> = teams.collect();
    let whole = match away {
        _ if teams.is_empty() => Ok(()),
        Some(pid) => Err(format!("its multicast objects wait for process {pid}")),
        None => make_teams_whole(cuda_processes, &teams).map_err(|error| error.to_string()),
    };
    let programs = cuda_processes.iter_mut().zip(results).enumerate();
    let go_on = |(at, (program, result)): (usize, (&mut CudaProcess, Result<_, Error>))| {
        result?;
        if !teams.contains_key(&at) {
            return Ok(());
        }
        let (pid, agent) = (program.process.pid, program.agent.take());
        match (&whole, agent) {
            (Ok(()), Some(agent)) => program.go_on(agent),
            (Err(message), _) => {
                Err(AgentError::Failed { pid, code: 0, message: message.clone() }.into())
            }
            (Ok(()), None) => Err(Error::ProgramEnded),
        }
    };
    programs.map(go_on).collect()
}

/// Has the multicast objects of these processes made again, by their places in the list. Those of them that end meanwhile
/// are passed over.
///
/// # Errors
/// An agent has failed twice, or nobody can add a device. The gates of all of them stay closed.
pub(crate) fn make_teams_whole(
    cuda_processes: &mut [CudaProcess],
    teams: &HashMap<usize, Team>,
) -> Result<(), Error> {
    twice(|| {
        let mut members = Vec::new();
        for (at, program) in cuda_processes.iter_mut().enumerate() {
            let pid = program.process.pid;
            let team = teams.get(&at).filter(|_| !program.process.has_ended());
            if let (Some(team), Some(agent)) = (team, &mut program.agent) {
                members.push(Member { pid, agent, team });
            }
        }
        teams::make_whole(&mut members)
    })
}

/// Some refusals pass, such as the one of a device that was full for a moment.
fn twice<T>(mut work: impl FnMut() -> Result<T, Error>) -> Result<T, Error> {
    work().or_else(|_| {
        std::thread::sleep(AGAIN);
        work()
    })
}

/// Sets `over` a moment after `asked` is set, unless all senders of `is_done` are gone before that.
fn set_soon_after(asked: Option<&AtomicBool>, over: &AtomicBool, is_done: &mpsc::Receiver<()>) {
    let mut since = None;
    while is_done.recv_timeout(POLL) == Err(mpsc::RecvTimeoutError::Timeout) {
        if asked.is_some_and(|asked| asked.load(Ordering::Relaxed)) {
            let since = *since.get_or_insert_with(Instant::now);
            over.store(since.elapsed() >= GRACE, Ordering::Relaxed);
        }
    }
}

/// Whether gpucr has to keep away from the devices while the programs run: with driver 580 a kernel of a process that
/// it has restored dies when another process comes to the device and the kernel runs on for some five seconds. Their gates
/// may be shut meanwhile, and are open again then.
///
/// # Errors
/// An agent does not answer, or gpucr was asked to end. That a process has ended or cannot be stopped is no error.
pub(crate) fn are_fragile(cuda_processes: &mut [CudaProcess]) -> Result<bool, Error> {
    for agent in cuda_processes.iter_mut().filter_map(|program| program.agent.as_mut()) {
        let mut looks = (0..LOOKS).map(|_| agent.is_fragile(PATIENCE));
        match looks.find(|look| !matches!(look, Ok(true))) {
            None => {
                tracing::debug!("the devices are left alone until the programs stand still");
                return Ok(true);
            }
            // It may have ended, or cannot be stopped: that is found out, and told, when the gates are closed.
            Some(Ok(_) | Err(AgentError::Broken { .. } | AgentError::Failed { .. })) => {}
            Some(Err(error)) => return Err(error.into()),
        }
    }
    Ok(false)
}

#[cfg(test)]
mod tests;
