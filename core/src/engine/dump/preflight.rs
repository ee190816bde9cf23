//! What a dump checks before it changes anything.

use std::collections::BTreeSet;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use gpucr_wire::{Counts, GateState};

use super::report::Options;
use crate::base::file_tree::FileTree;
use crate::base::limits;
use crate::cuda::{Device, Drivers, HostDriver, ProcessState};
use crate::engine::cuda_process::CudaProcess;
use crate::engine::device_state::DeviceStates;
use crate::engine::error::Error;
use crate::engine::kinds;
use crate::engine::locks;
use crate::engine::mapped::Mapped;
use crate::engine::multicast;
use crate::engine::opened;
use crate::engine::sharers::Sharers;
use crate::engine::teams::Team;
use crate::host::container::Container;
use crate::host::criu::{Criu, DumpWorker};
use crate::host::network::NetworkNamespace;
use crate::host::process::connections::Outer;
use crate::host::process::held::{self, Held};
use crate::host::process::{
    Agent, AgentError, Lock, MappedLibrary, ProcessInfo, Tree, connections, files, network, sockets,
};
use crate::image::library;
use crate::image::{Listener, Stdio};

/// How long the agent of a running program may take to answer; it is busy only while another
/// gpucr works on the same program.
const FIRST_ANSWER: Duration = Duration::from_secs(10);
/// How often, and with which pause, it is looked whether a stream is still one that keeps CRIU from saving the program.
const LOOKS: u32 = 30;
const BETWEEN_LOOKS: Duration = Duration::from_millis(100);

/// Everything that a dump needs to know before it begins.
pub(super) struct DumpPlan {
    pub(super) criu: Criu,
    /// The network namespace of all processes.
    pub(super) network: NetworkNamespace,
    /// The container of all processes, if they are in one.
    pub(super) container: Option<Container>,
    /// All processes, in the order of the tree.
    pub(super) processes: Vec<Planned>,
    /// The processes that use no CUDA.
    pub(super) others: Vec<ProcessInfo>,
    pub(super) devices: Vec<Device>,
    /// The driver of this host that serves the processes.
    pub(super) driver: Arc<HostDriver>,
    /// Where they have it mapped.
    pub(super) driver_path: PathBuf,
    pub(super) driver_version: i32,
    /// Whether the root is no session leader: CRIU calls that a shell job.
    pub(super) shell_job: bool,
    /// The names by which a restore opens files that have lost those by which they were opened, once CRIU has saved
    /// the processes.
    pub(super) renamed: BTreeSet<PathBuf>,
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
    pub(super) shim: Option<MappedLibrary>,
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

impl DumpPlan {
    /// Starts a CRIU that waits for its request, where the processes have their network.
    pub(super) fn start_criu(&self) -> Result<DumpWorker, Error> {
        Ok(self.criu.start_dump(self.foreign_network())?)
    }

    /// The network namespace of the processes, unless that is gpucr's own.
    pub(super) fn foreign_network(&self) -> Option<&NetworkNamespace> {
        Some(&self.network).filter(|network| !network.is_own())
    }

    /// Where the paths of their files are.
    pub(super) fn tree(&self) -> FileTree {
        self.container.as_ref().map(|container| container.tree.clone()).unwrap_or_default()
    }

    /// Bytes of the bulk memory of all processes, as they were.
    pub(super) fn bulk_bytes(&self) -> u64 {
        self.cuda().map(|cuda| cuda.counts.bulk_bytes).sum()
    }

    /// Bytes of memory that could not be handed to gpucr, as they were.
    pub(super) fn private_bytes(&self) -> u64 {
        self.cuda().map(|cuda| kinds::private_bytes(&cuda.counts)).sum()
    }

    /// Reads the tree again while CRIU holds it frozen: processes without CUDA may have come
    /// and gone. One that uses CUDA must not have, since its state was not saved.
    pub(super) fn update(
        &mut self,
        options: &Options,
        cuda_processes: &[CudaProcess],
        drivers: &Drivers,
    ) -> Result<(), Error> {
        let root = options.pid;
        if let Some(gone) = cuda_processes.iter().find(|program| program.process.has_ended()) {
            let what = "it has ended".to_owned();
            return Err(Error::Changed { pid: gone.process.pid, what });
        }
        let tree = Tree::read(root)?;
        refuse_connected(&tree, options)?;
        let elsewhere = |process: &&ProcessInfo| {
            !network::is_in(process, &self.network) && !process.has_ended()
        };
        if let Some(process) = tree.processes.iter().find(elsewhere) {
            return Err(Error::OtherNetwork { pid: process.pid, root });
        }
        if let Some(container) = &self.container {
            refuse_other_mounts(&tree)?;
            let seen = container.is_as_it_was(root);
            let what = || format!("cannot read the mounts of process {root}");
            if !seen.map_err(|source| Error::Io { what: what(), source })? {
                let what = "what is mounted in its container has changed".to_owned();
                return Err(Error::Changed { pid: root, what });
            }
        }
        let mut known = std::mem::take(&mut self.processes);
        self.others.clear();
        for process in tree.processes {
            if cuda_processes.iter().any(|program| program.process.pid == process.pid) {
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

    /// A process has ended before anything of it was saved: a restore needs nothing of what was its alone.
    pub(super) fn forget(&mut self, pid: u32) {
        self.processes.retain(|process| process.pid != pid);
        let used: BTreeSet<[u8; 16]> =
            self.cuda().flat_map(|cuda| cuda.counts.devices.iter().copied()).collect();
        self.devices.retain(|device| used.contains(&device.uuid));
    }

    /// The shims behind which the processes run.
    pub(super) fn shims(&self) -> impl Iterator<Item = &MappedLibrary> {
        self.cuda().filter_map(|cuda| cuda.shim.as_ref())
    }

    fn cuda(&self) -> impl Iterator<Item = &Cuda> {
        self.processes.iter().filter_map(|process| process.cuda.as_ref())
    }
}

/// Checks host and program. Nothing is changed; the agents' connections are open afterwards, and
/// the locks keep another gpucr away.
///
/// # Errors
/// The program cannot be dumped, or not on this host; the error says why and names the process.
pub(super) fn check(
    options: &Options,
    drivers: &Drivers,
) -> Result<(DumpPlan, Vec<CudaProcess>, Vec<Lock>), Error> {
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
    if let Some(process) = tree.processes.iter().find(|process| process.is_headless) {
        return Err(Error::Headless { pid: process.pid });
    }
    let container = container_of(&tree, options)?;
    refuse_connected(&tree, options)?;
    refuse_lost(&tree)?;
    let criu = Criu::find(Some(&options.stop))?;
    let root = tree.root();
    let on_terminal = |process: &ProcessInfo| {
        let stdio = files::stdio(process.pid, &BTreeSet::new());
        stdio.iter().any(|stream| matches!(stream, Stdio::Terminal { .. }))
    };
    let shell_job =
        options.shell_job || root.session != root.pid || tree.processes.iter().any(on_terminal);

    let (mut processes, mut cuda_processes) = (Vec::new(), Vec::<CudaProcess>::new());
    let mut driver_path: Option<PathBuf> = None;
    let mut network = None;
    let mut others = Vec::new();
    let mut locks = Vec::new();
    for process in tree.processes {
        locks.push(locks::take(&process, Some(&options.stop))?);
        let inspected = match inspect(&process, drivers, options) {
            // What is asked about a process that ends meanwhile is missing in many ways. The others go on without it.
            Err(_) if process.pid != options.pid && process.is_ending() => continue,
            inspected => inspected?,
        };
        if process.pid == options.pid {
            network = Some(network_of(&process)?);
        }
        let (cuda, program) = match inspected {
            Some(Inspected { cuda, driver, path, agent }) => {
                if *driver_path.get_or_insert_with(|| path.clone()) != path {
                    let what = format!(
                        "a different driver library ({}) from the rest of the tree",
                        path.display()
                    );
                    return Err(Error::Unsupported { pid: process.pid, what });
                }
                let sharers = Sharers::of(&cuda.counts);
                (Some(cuda), Some((driver, agent, sharers)))
            }
            None => (None, None),
        };
        processes.push(Planned::new(&process, cuda));
        match program {
            Some((driver, agent, sharers)) => {
                let program = CudaProcess::new(process, driver, agent.is_some());
                cuda_processes.push(CudaProcess { agent, sharers, ..program });
            }
            None => others.push(process),
        }
    }
    opened::check(&cuda_processes)?;
    let (Some(first), Some(driver_path), Some(network)) =
        (cuda_processes.first(), driver_path, network)
    else {
        return Err(Error::NoCuda { pid: options.pid });
    };
    let blocks =
        processes.iter().filter_map(|process| process.cuda.as_ref()).map(|c| c.counts.blocks);
    limits::make_room_for(blocks.sum())?;
    let driver = drivers.open(&first.driver)?;
    let wanted: Vec<[u8; 16]> = processes
        .iter()
        .filter_map(|process| process.cuda.as_ref())
        .flat_map(|cuda| cuda.counts.devices.clone())
        .collect();
    let devices = driver.devices()?.into_iter().filter(|d| wanted.contains(&d.uuid)).collect();
    let driver_version = driver.version()?;
    let driver = first.driver.clone();
    let plan = DumpPlan {
        criu,
        network,
        container,
        processes,
        others,
        devices,
        driver,
        driver_path,
        driver_version,
        shell_job,
        renamed: BTreeSet::new(),
    };
    Ok((plan, cuda_processes, locks))
}

/// Refuses streams of Unix sockets to the outside, and within the tree those that nobody accepts: of these CRIU makes
/// images that cannot be restored. And devices of RDMA, and what CRIU saves of no process, before anything is stopped for
/// them in vain. The program runs, so what is seen once may be a connection that is just being made.
///
/// # Errors
/// [`Error::Held`].
fn refuse_lost(tree: &Tree) -> Result<(), Error> {
    let lost = || held::of(tree).held.into_iter().filter(|held| held.is_lost);
    let mut seen: Vec<Held> = lost().collect();
    for _ in 0..LOOKS {
        if seen.is_empty() {
            return Ok(());
        }
        std::thread::sleep(BETWEEN_LOOKS);
        // Each stream is named by the number of its socket, which is no other's.
        let still = lost().filter(|held| seen.contains(held)).collect();
        seen = still;
    }
    let first = seen.into_iter().next();
    first.map_or(Ok(()), |Held { pid, what, options, .. }| Err(Error::Held { pid, what, options }))
}

/// Finds the container of a program, and refuses one that cannot be saved as a whole.
///
/// # Errors
/// [`Error::Container`], [`Error::OtherMounts`], [`Error::FirstOfContainer`], [`Error::ContainerStays`].
pub(super) fn container_of(tree: &Tree, options: &Options) -> Result<Option<Container>, Error> {
    let container = Container::of(tree.root())?;
    if container.is_some() {
        refuse_other_mounts(tree)?;
        // Of a pid namespace: gpucr is in the one of the container by now.
        if tree.root().inner_pid == 1 {
            return Err(Error::FirstOfContainer { pid: options.pid });
        }
        if options.target.peer().is_some() {
            return Err(Error::ContainerStays { pid: options.pid });
        }
    }
    Ok(container)
}

fn refuse_other_mounts(tree: &Tree) -> Result<(), Error> {
    let root = tree.root().pid;
    let mut others = tree.processes.iter().filter(|it| !it.shares_namespace("mnt", root));
    others.next().map_or(Ok(()), |it| Err(Error::OtherMounts { pid: it.pid, root }))
}

/// Opens the network namespace of a process, and refuses one in which CRIU cannot work.
///
/// # Errors
/// [`Error::NoLoopback`]; or it cannot be opened.
pub(super) fn network_of(process: &ProcessInfo) -> Result<NetworkNamespace, Error> {
    let pid = process.pid;
    let failed = |source| {
        let what = format!("the network namespace of process {pid} cannot be looked at");
        Error::Io { what, source }
    };
    let network = network::of(process).map_err(failed)?;
    if !network.is_own() && !Criu::can_work_in(&network).map_err(failed)? {
        return Err(Error::NoLoopback { of: Some(pid) });
    }
    Ok(network)
}

/// Refuses TCP connections that lead out of the program, but for those that the user allows.
fn refuse_connected(tree: &Tree, options: &Options) -> Result<(), Error> {
    if options.criu.tcp_established || options.criu.tcp_close {
        return Ok(());
    }
    outer_connections(tree)?.next().map_or(Ok(()), Err)
}

/// The TCP connections that lead out of the program, each as what is in the way of a dump.
///
/// # Errors
/// The kernel does not tell which there are.
pub(super) fn outer_connections(tree: &Tree) -> Result<impl Iterator<Item = Error>, Error> {
    let outer = connections::outer(&tree.pids()).map_err(|source| {
        let what = "cannot see which TCP connections the program has".to_owned();
        Error::Io { what, source }
    })?;
    let connected = |Outer { pid, local, remote }| Error::Connected { pid, local, remote };
    Ok(outer.into_iter().map(connected))
}

/// What a CUDA process has.
pub(super) struct Inspected {
    pub(super) cuda: Cuda,
    pub(super) driver: Arc<HostDriver>,
    /// Where it has that mapped.
    path: PathBuf,
    pub(super) agent: Option<Agent>,
}

/// What `process` has of CUDA, if anything.
///
/// # Errors
/// It has what cannot be saved.
pub(super) fn inspect(
    process: &ProcessInfo,
    drivers: &Drivers,
    options: &Options,
) -> Result<Option<Inspected>, Error> {
    let (pid, root) = (process.pid, options.pid);
    if process.inner_pid != pid {
        return Err(Error::OtherPidNamespace { pid, inner: process.inner_pid });
    }
    if !process.shares_namespace("user", std::process::id()) {
        return Err(Error::OtherUsers { pid });
    }
    if !process.shares_namespace("net", root) {
        return Err(Error::OtherNetwork { pid, root });
    }
    // Of these CRIU saves one of each, that of the root.
    let other = |kind: &&str| !process.shares_namespace(kind, root);
    if let Some(kind) = ["ipc", "uts", "time"].into_iter().find(other) {
        return Err(Error::OtherNamespace { pid, root, kind });
    }
    if Agent::listens(process) {
        if process.is_suspended() {
            return Err(Error::Suspended { pid });
        }
        let mut agent = match Agent::connect(process, FIRST_ANSWER, Some(&options.stop)) {
            Ok(agent) => agent,
            Err(AgentError::Absent { .. }) => return Ok(None),
            Err(error) => return Err(error.into()),
        };
        if matches!(agent.hello().gate, GateState::Detached {} | GateState::Parted {}) {
            return Err(Error::Detached { pid });
        }
        let counts = agent.counts()?;
        refuse_unsupported(pid, &counts, drivers)?;
        // The room is given back at once: it will be there when it is needed.
        drop(limits::lend_room(pid, counts.blocks)?);
        if !counts.ungated.is_empty() {
            return Err(Error::Ungated { pid, what: counts.ungated.join("; ") });
        }
        // When the tree was read it may just have been started: a process has an agent only after it has the driver.
        let process = &ProcessInfo::read(pid)?;
        let (driver, path) = match Mapped::of(process, drivers)? {
            Mapped::Host { library, path } => (library, path),
            mapped => return Err(mapped.refused(pid)),
        };
        // If gpucr cannot ask for the state it could not bring the program back either.
        let state = drivers.device_state(&driver)?.state(pid);
        match state.map_err(|source| Error::Process { pid, source })? {
            ProcessState::Running => {}
            state => return Err(Error::NotRunning { pid, state }),
        }
        let shim = process.driver_libraries.iter().find(|mapped| library::is_shim(&mapped.path));
        let Some(shim) = shim.cloned() else {
            return Err(Error::StrangeShim { path: PathBuf::from(&agent.hello().shim) });
        };
        let cuda = Cuda { counts, shim: Some(shim) };
        return Ok(Some(Inspected { cuda, driver, path, agent: Some(agent) }));
    }
    // No agent: either no CUDA, or not started under gpucr.
    let Some((driver, path, state)) = driver_knows(process, drivers)? else { return Ok(None) };
    if process.is_suspended() {
        return Err(Error::Suspended { pid });
    }
    if state != ProcessState::Running {
        return Err(Error::NotRunning { pid, state });
    }
    let cuda = Cuda { counts: Counts::default(), shim: None };
    Ok(Some(Inspected { cuda, driver, path, agent: None }))
}

/// The driver that knows `process`, if the one that it has mapped does, and where it has that mapped.
fn driver_knows(
    process: &ProcessInfo,
    drivers: &Drivers,
) -> Result<Option<(Arc<HostDriver>, PathBuf, ProcessState)>, Error> {
    match Mapped::of(process, drivers)? {
        Mapped::Nothing => Ok(None),
        Mapped::Host { library, path } => {
            let state = drivers.device_state(&library)?.state(process.pid);
            Ok(state.ok().map(|state| (library, path, state)))
        }
        // The process may use CUDA, and only that library could tell.
        stranger @ Mapped::Stranger { .. } => Err(stranger.refused(process.pid)),
    }
}

/// Checks once more whether a process, whose gate is closed now, has what driver and CRIU cannot save.
///
/// # Errors
/// The process has begun to use something that they cannot save, or does not answer.
pub(super) fn look_again(
    program: &mut CudaProcess,
    states: &dyn DeviceStates,
) -> Result<(), Error> {
    let pid = program.process.pid;
    if ProcessInfo::read(pid)?.is_headless {
        return Err(Error::Headless { pid });
    }
    match &mut program.agent {
        Some(agent) => {
            let counts = agent.counts()?;
            program.sharers = Sharers::of(&counts);
            refuse_unsupported(pid, &counts, states)?;
            program.team = Team::default();
            if counts.multicast > 0 { multicast::ask(program) } else { Ok(()) }
        }
        None => Ok(()),
    }
}

fn refuse_unsupported(pid: u32, counts: &Counts, states: &dyn DeviceStates) -> Result<(), Error> {
    let what = kinds::refused(counts, |kind| states.carries(kind));
    if what.is_empty() {
        return Ok(());
    }
    Err(Error::Unsupported { pid, what: what.join(", ") })
}
