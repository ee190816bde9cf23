//! The phases of a restore, in their order. Each makes of what the one before has left a state of its own, so that
//! nothing can be used before it is there. What has to be taken back after a failure is in [`Made`] all the time.

use std::cell::RefCell;
use std::ffi::OsString;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use super::demand::{Awaited, Prepared};
use super::load::{Done, Load, Memory};
use super::preflight::{self, Opened};
use super::share::{InUse, Shared, Watch};
use super::source::{CriuFiles, Source};
use super::{Options, Report, bulk, hook, kill, memory, stdio, unless_ended, wait_for};
use crate::base::faults::fault;
use crate::base::format::milliseconds;
use crate::base::phase::{Clock, Phase};
use crate::base::progress::Progress;
use crate::cuda::HostDriver;
use crate::engine::device_state;
use crate::engine::error::{Error, Failure, Left};
use crate::engine::held::Held;
use crate::engine::keeper::Keeper;
use crate::host::criu::{Criu, Hint, InheritFd, RestoreError, RestoreOptions, RestoreWorker};
use crate::host::process::{Agent, ProcessInfo, sockets};
use crate::image::Manifest;

/// How long the agent of a process that was just restored may take to answer.
const FIRST_ANSWER: Duration = Duration::from_secs(60);
/// How long the driver may see the end of a process before the process has ended.
const SEEN_FIRST: Duration = Duration::from_millis(200);
/// After how long CRIU is asked once more, when a pid was in use.
const AGAIN: Duration = Duration::from_millis(100);

/// Restores it; with `on_demand` it goes on before its memory is there.
pub(super) fn attempt(
    options: &Options,
    on_demand: bool,
    progress: &Arc<dyn Progress>,
) -> Result<(Report, Option<Watch>), Failure> {
    let mut clock = Clock::start(progress.as_ref());
    let mut made = Made::default();
    let task = Task { options, on_demand, progress, clock: &mut clock, made: &mut made };
    let result = run(task);
    let left = match made {
        Made { ran: true, .. } => Left::NotRestoredButRan,
        Made { begun: true, .. } => Left::NotRestored,
        Made { .. } => Left::Untouched,
    };
    if result.is_err() {
        // CRIU has killed those that it has not let run, unless it has died itself.
        let held = made.held.iter().map(|program| &program.process);
        let killed = kill(made.processes.iter().chain(held));
        if !made.children.is_empty() {
            wait_for(&[&made.children[..], &killed].concat());
        }
    }
    // The keeper is for the death of gpucr; what gpucr lives to see it has settled itself.
    if let Some(keeper) = made.keeper {
        keeper.done();
    }
    result.map_err(|error| Failure { phase: clock.phase(), error: Box::new(error), left })
}

/// What there is to be taken back after a failure.
#[derive(Default)]
struct Made {
    keeper: Option<Keeper>,
    /// Whether CRIU was asked.
    begun: bool,
    /// What it was asked to make as children of this process.
    children: Vec<u32>,
    /// The processes that it has made, but for those that are `held`.
    processes: Vec<ProcessInfo>,
    /// Whether they may have run.
    ran: bool,
    /// Let go of after the processes were ended, since the end of an agent's connection opens
    /// its gate.
    held: Vec<Held>,
}

/// What is to be done, and how far it has come.
struct Task<'t, 'c> {
    options: &'t Options,
    /// The program goes on before its memory is there.
    on_demand: bool,
    progress: &'t Arc<dyn Progress>,
    clock: &'t mut Clock<'c>,
    made: &'t mut Made,
}

impl Task<'_, '_> {
    fn enter(&mut self, phase: Phase) -> Result<(), Error> {
        if self.options.stop.load(Ordering::Relaxed) {
            return Err(Error::Interrupted);
        }
        Ok(self.clock.enter(phase, None)?)
    }
}

fn run(mut task: Task<'_, '_>) -> Result<(Report, Option<Watch>), Error> {
    task.enter(Phase::Preflight)?;
    let image = Arc::new(Source::open(&task.options.image, task.options.warm)?);
    let checked = Checked::look_at(&image, &mut task)?;
    let begun = checked.load_and_extract(&mut task)?;
    let there = begun.make_processes(&mut task)?;
    let driven = there.restore_contexts(&mut task)?;
    let attached = driven.give_memory(&mut task)?;
    attached.go_on(task)
}

/// After `preflight`: nothing that could be found beforehand keeps the program from being restored. A keeper and CRIU
/// are at hand.
struct Checked<'i> {
    image: &'i Arc<Source>,
    criu: Criu,
    library: Arc<HostDriver>,
    /// The driver, where devices take the place of others.
    opened: Option<Opened>,
    /// Tells the keeper that CRIU is at work.
    at_work: OwnedFd,
    worker: RestoreWorker,
}

impl<'i> Checked<'i> {
    fn look_at(image: &'i Arc<Source>, task: &mut Task<'_, '_>) -> Result<Self, Error> {
        let options = task.options;
        options.trust.check_image(&options.image, &image.id())?;
        memory::check(image, options.share.is_some())?;
        let (criu, library) = preflight::check(image, &options.stop)?;
        // What somebody has named is looked at before anything is made; else that is done beside CRIU's work.
        let is_moved = !options.device_map.is_empty();
        let open = || preflight::open(image, &library, &options.device_map);
        let opened = is_moved.then(open).transpose()?;
        let keeper = task.made.keeper.insert(Keeper::start().map_err(Error::Keeper)?);
        let at_work = keeper.at_work().map_err(Error::Keeper)?;
        let worker = start_criu(&criu, image.manifest(), options, at_work.as_fd())?;
        Ok(Self { image, criu, library, opened, at_work, worker })
    }

    /// The phases `load`, which goes on beside the next, and `extract`.
    fn load_and_extract(self, task: &mut Task<'_, '_>) -> Result<Begun<'i>, Error> {
        let Self { image, criu, library, opened, at_work, worker } = self;
        task.clock.enter(Phase::Load, Some(image.manifest().bulk_bytes))?;
        let (own_image, own_library) = (image.clone(), library.clone());
        let progress = task.progress.clone();
        let load =
            Load::start(own_image, own_library, opened, task.on_demand, task.options, progress);

        task.enter(Phase::Extract)?;
        let files = image.criu_files()?;
        Ok(Begun { image, criu, library, at_work, worker, load, files })
    }
}

/// While memory is loaded, and when CRIU's files are there.
struct Begun<'i> {
    image: &'i Arc<Source>,
    criu: Criu,
    library: Arc<HostDriver>,
    at_work: OwnedFd,
    worker: RestoreWorker,
    load: Load,
    files: CriuFiles,
}

impl<'i> Begun<'i> {
    /// The phase `criu`.
    fn make_processes(mut self, task: &mut Task<'_, '_>) -> Result<There<'i>, Error> {
        task.enter(Phase::Criu)?;
        let (options, manifest) = (task.options, self.image.manifest());
        preflight::check_pids(manifest)?;
        let pids: Vec<u32> = manifest.processes.iter().map(|process| process.pid).collect();
        let keeper = task.made.keeper.as_mut().ok_or(Error::ProgramEnded)?;
        keeper.restoring(&pids).map_err(Error::Keeper)?;
        // How it ends tells whether it has missed memory, and only a parent is told.
        let is_child = !options.detach || task.on_demand;
        task.made.begun = true;
        task.made.children = if is_child { pids.clone() } else { Vec::new() };
        // Before the processes run everything is loaded, and gpucr's own context is gone by the time
        // that the driver needs room for theirs. On demand there is room only.
        let mut loaded = None;
        // As soon as they are there, so that they are known whatever becomes of CRIU, and of them.
        let found = RefCell::new(Vec::new());
        let mut they_are_there =
            || found.borrow_mut().extend(pids.iter().map(|pid| ProcessInfo::read(*pid)));
        let load = &mut self.load;
        let mut before_they_run = || {
            loaded = Some(load.finish()?);
            let command = options.before_resume.as_ref();
            let run =
                |command: &OsString| hook::run(command, &options.image, pids[0], &options.stop);
            command.map_or(Ok(()), run)
        };
        let deadline = Instant::now() + preflight::REAPING;
        let result = loop {
            let criu_options = criu_options(manifest, is_child, &self.files);
            match self.worker.restore(criu_options, &mut they_are_there, &mut before_they_run) {
                // Taken since the look, or by what only CRIU meets, such as the group of a process that has
                // ended: it may pass. Nothing is there yet.
                Err(RestoreError::Criu(error))
                    if error.has(Hint::PidInUse)
                        && found.borrow().is_empty()
                        && Instant::now() < deadline =>
                {
                    tracing::warn!(%error, "a pid is in use; trying again");
                    // What CRIU had made it has killed; it is in the way until somebody has waited for it.
                    wait_for(&task.made.children);
                    std::thread::sleep(AGAIN);
                    preflight::check_pids(manifest)?;
                    self.worker = start_criu(&self.criu, manifest, options, self.at_work.as_fd())?;
                }
                result => break result,
            }
        };
        task.made.ran = !matches!(result, Err(RestoreError::Callback(_))) && loaded.is_some();
        let (known, unknown): (Vec<_>, Vec<_>) =
            found.into_inner().into_iter().partition(Result::is_ok);
        task.made.processes.extend(known.into_iter().flatten());
        let root = result.map_err(|error| match error {
            RestoreError::Criu(error) => self.load.give_up().unwrap_or_else(|| error.into()),
            RestoreError::Callback(error) => error,
        })?;
        unknown.into_iter().try_for_each(|unknown| unknown.map(drop))?;
        let done = loaded.ok_or(Error::CopyIncomplete)?;
        Ok(There { image: self.image, library: self.library, root, done })
    }
}

/// The processes are there, and run until they call the driver. Their memory is gpucr's.
struct There<'i> {
    image: &'i Arc<Source>,
    library: Arc<HostDriver>,
    root: u32,
    done: Done,
}

impl<'i> There<'i> {
    /// The phase `driver`.
    fn restore_contexts(self, task: &mut Task<'_, '_>) -> Result<Driven<'i>, Error> {
        task.enter(Phase::Driver)?;
        let Self { image, library, root, done } = self;
        let Done { opened, memory, by_holder, mut reserve } = done;
        let manifest = image.manifest();
        let copied = match (&memory, manifest.bulk_bytes) {
            (_, 0) => "driver",
            (Memory::Inside, _) => "inside",
            _ => "outside",
        };
        let (loaded, prepared, in_use) = match memory {
            Memory::Loaded(loaded, in_use) => (Some(loaded), None, in_use),
            Memory::Prepared(prepared) => (None, Some(prepared), None),
            Memory::Inside => (None, None, None),
        };
        let share = task.options.share.as_ref();
        let shared = share.map(|_| in_use.as_ref().map(InUse::report).unwrap_or_default());
        task.made.held = hold(manifest, &library, loaded, &mut task.made.processes);
        let device_state = device_state::of(&opened.driver);
        for program in &task.made.held {
            let pid = program.process.pid;
            // From here on the driver takes what it needs.
            drop(reserve.remove(&pid));
            match device_state.resume(pid, &opened.placement.pairs) {
                Err(error) if program.process.ends_within(SEEN_FIRST) => {
                    tracing::debug!(%error, pid, "it has ended");
                }
                resumed => resumed.map_err(|source| Error::Process { pid, source })?,
            }
        }
        Ok(Driven { image, root, opened, copied, by_holder, prepared, in_use, shared })
    }
}

/// The programs have their contexts, and wait for their memory.
struct Driven<'i> {
    image: &'i Arc<Source>,
    root: u32,
    opened: Opened,
    copied: &'static str,
    by_holder: bool,
    /// Memory that is to come on demand.
    prepared: Option<Box<Prepared>>,
    /// Memory that is shared.
    in_use: Option<InUse>,
    shared: Option<Shared>,
}

impl<'i> Driven<'i> {
    /// The phase `attach`.
    fn give_memory(self, task: &mut Task<'_, '_>) -> Result<Attached<'i>, Error> {
        task.enter(Phase::Attach)?;
        let Self { image, root, opened, copied, by_holder, prepared, in_use, shared } = self;
        let (options, held) = (task.options, &mut task.made.held);
        for program in held.iter_mut().filter(|program| program.has_agent) {
            let agent =
                Agent::connect_restored(&program.process, FIRST_ANSWER, Some(&options.stop));
            program.agent = unless_ended(&program.process, agent)?;
        }
        tracing::debug!("all agents have answered");
        fault("greeted")?;
        let watch = in_use.map(|in_use| in_use.begin(held)).transpose()?;
        let blocks = bulk::cuda_processes(&image.manifest().processes);
        for (program, (_, blocks)) in held.iter_mut().zip(blocks) {
            let Some(agent) = &mut program.agent else { continue };
            if copied == "inside" {
                let loaded = bulk::load_inside(agent, image, blocks, task.progress.as_ref());
                unless_ended(&program.process, loaded)?;
            } else if prepared.is_none() {
                let attached = agent.reattach(&program.blocks);
                unless_ended(&program.process, attached)?;
            }
            tracing::debug!(pid = program.process.pid, "it has its memory");
            fault("attached")?;
        }
        let begin = |prepared: Box<Prepared>| Awaited::begin(*prepared, image, held);
        let awaited = prepared.map(begin).transpose()?;
        Ok(Attached { image, root, opened, copied, by_holder, awaited, watch, shared })
    }
}

/// Every process has its memory, or waits for it.
struct Attached<'i> {
    image: &'i Arc<Source>,
    root: u32,
    opened: Opened,
    copied: &'static str,
    by_holder: bool,
    awaited: Option<Awaited<'i>>,
    watch: Option<Watch>,
    shared: Option<Shared>,
}

impl Attached<'_> {
    /// The phases `resume` and, on demand, `stream`.
    fn go_on(self, mut task: Task<'_, '_>) -> Result<(Report, Option<Watch>), Error> {
        let Self { image, root, opened, copied, by_holder, awaited, watch, shared } = self;
        let manifest = image.manifest();
        // The last moment at which a signal means this command and not the program. If gpucr dies
        // from here on, the gates open by themselves and the program runs, unless it awaits memory.
        if awaited.is_none()
            && let Some(keeper) = task.made.keeper.take()
        {
            keeper.done();
        }
        task.enter(Phase::Resume)?;
        let Task { options, progress, clock, made, .. } = task;
        tracing::debug!("signals are the program's");
        fault("passed")?;
        options.tell(Some(root));
        // All gates open only when every process has its memory, or waits for it.
        for program in &mut made.held {
            let opened = program.agent.as_mut().map_or(Ok(()), |agent| {
                agent.set_stop(None);
                agent.open_gate()
            });
            unless_ended(&program.process, opened)?;
        }
        let running_ms = milliseconds(clock.total());
        let mut streamed = None;
        if let Some(awaited) = awaited {
            clock.enter(Phase::Stream, Some(manifest.bulk_bytes))?;
            let stream = awaited.stream(&mut made.held, root, &options.stop, progress.as_ref());
            streamed = Some(stream?);
        }
        clock.end();
        let report = Report {
            image: options.image.clone(),
            id: crate::base::format::hex(&image.id()),
            pid: root,
            copied,
            warm: image.is_warm(),
            by_holder,
            bulk_bytes: manifest.bulk_bytes,
            moved: opened.placement.moved,
            on_demand: streamed,
            shared,
            running_ms,
            total_ms: milliseconds(clock.total()),
            phases: clock.times().to_vec(),
        };
        Ok((report, watch))
    }
}

/// Starts a CRIU for the restore.
fn start_criu(
    criu: &Criu,
    manifest: &Manifest,
    options: &Options,
    at_work: BorrowedFd<'_>,
) -> Result<RestoreWorker, Error> {
    let (shell_job, _) = crate::engine::dump::option_values(&manifest.criu.options);
    let mut inherited = stdio::inherited(&manifest.processes, options.detach)?;
    for process in &manifest.processes {
        for listener in &process.listeners {
            let pid = process.pid;
            let socket = sockets::listen(listener, pid).map_err(|source| match source.kind() {
                // The pid is free: another restore is about to take it.
                std::io::ErrorKind::AddrInUse => Error::Busy { pid },
                _ => Error::Io { what: format!("cannot listen for process {pid}"), source },
            })?;
            let key = format!("socket:[{}]", listener.inode);
            inherited.push(InheritFd { key, fd: socket });
        }
    }
    Ok(criu.start_restore(inherited, Some(at_work), shell_job)?)
}

/// The options of the dump, which the restore repeats.
fn criu_options<'a>(
    manifest: &Manifest,
    is_child: bool,
    files: &'a CriuFiles,
) -> RestoreOptions<'a> {
    let (_, names) = crate::engine::dump::option_values(&manifest.criu.options);
    RestoreOptions {
        tcp_established: names.tcp_established,
        tcp_close: names.tcp_close,
        file_locks: names.file_locks,
        ext_unix_sk: names.ext_unix_sk,
        link_remap: names.link_remap,
        rst_sibling: is_child,
        work: files.work(),
        pids: manifest.processes.iter().map(|process| process.pid).collect(),
        ..RestoreOptions::new(files.images())
    }
}

/// Takes the CUDA processes from those that were restored, each with its memory.
fn hold(
    manifest: &Manifest,
    library: &Arc<HostDriver>,
    loaded: Option<bulk::Loaded>,
    restored: &mut Vec<ProcessInfo>,
) -> Vec<Held> {
    let processes = bulk::cuda_processes(&manifest.processes);
    let loaded = loaded.unwrap_or_else(|| processes.iter().map(|_| Vec::new()).collect());
    let mut held = Vec::with_capacity(processes.len());
    for ((process, _), blocks) in processes.into_iter().zip(loaded) {
        let place = restored.iter().position(|restored| restored.pid == process.pid);
        let place = place.expect("each process of the image is among them");
        let has_agent = process.cuda.as_ref().is_some_and(|cuda| cuda.shim.is_some());
        let program = Held::new(restored.remove(place), library.clone(), has_agent);
        held.push(Held { blocks, ..program });
    }
    held
}
