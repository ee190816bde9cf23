//! `gpucr restore`: from an image to a running program.
//!
//! [`restore`] and `run` are the list of phases. The image is only read. Whatever can fail early
//! does so before CRIU lets the processes run: from then on their host side runs, and waits only
//! where it calls the driver, until the gates open. A failure ends whatever had been restored.

mod bulk;
mod demand;
mod devices;
pub(crate) mod driver;
mod hook;
mod load;
mod preflight;
mod share;
mod source;
mod stdio;

use std::cell::Cell;
use std::ffi::OsString;
use std::os::fd::{AsFd, BorrowedFd};
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use crate::criu::{Criu, Hint, InheritFd, RestoreError, RestoreOptions, RestoreWorker};
use crate::error::{Error, Failure, Left};
use crate::held::Held;
use crate::image::Manifest;
use crate::keeper::Keeper;
use crate::phase::{Clock, PhaseTime, Progress, milliseconds};
use crate::process::{Agent, AgentError, ProcessInfo, sockets};
use crate::sharing::Holder;
use demand::Awaited;
pub use demand::{OnDemand, take_back_output};
pub use devices::MappedDevice;
use load::{Done, Load, Memory};
use share::InUse;
pub use share::{Shared, Watch};
use source::{CriuFiles, Source};

/// How long the agent of a process that was just restored may take to answer.
const FIRST_ANSWER: Duration = Duration::from_secs(60);
/// How long a process takes to end, from the end of its connections on.
const ENDING: Duration = Duration::from_secs(5);
/// How long the driver may see the end of a process before the process has ended.
const SEEN_FIRST: Duration = Duration::from_millis(200);
/// After how long CRIU is asked once more, when a pid was in use.
const AGAIN: Duration = Duration::from_millis(100);

/// What to restore, and how.
#[derive(Debug, Clone)]
pub struct Options {
    /// The image.
    pub image: PathBuf,
    /// Take it from memory, if `gpucr warm` keeps it there.
    pub warm: bool,
    /// The program does not become a child of this process, and gets none of its streams.
    pub detach: bool,
    /// A shell command that is run when the processes are there and their memory is loaded, before any of
    /// them runs. If it fails the restore does.
    pub before_resume: Option<OsString>,
    /// Devices that others of this host take the place of.
    pub device_map: Vec<MappedDevice>,
    /// The program goes on before its memory is there, and gets it when it asks for it.
    pub on_demand: bool,
    /// The program shares device memory that it does not write with other instances of the image: who is to
    /// hold it if this is the first. Only of a program that is not detached, and not on demand.
    pub share: Option<Holder>,
    /// Is told the pid of the program's root when the program is about to go on; and nothing if it is ended
    /// again, which can only be on demand or if it shares memory, before it is restored once more.
    pub goes_on: Option<GoesOn>,
    /// Set by a signal handler to end the restore. Once the program goes on, that says that it was asked to
    /// end itself.
    pub stop: Arc<AtomicBool>,
}

/// See [`Options::goes_on`].
#[derive(Clone)]
pub struct GoesOn(pub Arc<dyn Fn(Option<u32>) + Send + Sync>);

impl std::fmt::Debug for GoesOn {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("GoesOn")
    }
}

impl Options {
    fn tell(&self, pid: Option<u32>) {
        if let Some(GoesOn(tell)) = &self.goes_on {
            tell(pid);
        }
    }
}

/// What a restore did.
#[derive(Debug, Clone, serde::Serialize)]
pub struct Report {
    /// The image.
    #[serde(serialize_with = "crate::phase::lossy")]
    pub image: PathBuf,
    /// Its identity.
    pub id: String,
    /// Root of the process tree; a child of this process unless it was detached.
    pub pid: u32,
    /// By whom memory was loaded: `outside`, `inside` or `driver`, as in a dump's report.
    pub copied: &'static str,
    /// Whether the image was kept warm, so that nothing was read, decompressed and checked.
    pub warm: bool,
    /// Whether the process that keeps it warm has loaded the device memory, from pinned memory.
    pub by_holder: bool,
    /// Bytes of device memory that gpucr loaded.
    pub bulk_bytes: u64,
    /// What became of `--on-demand`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub on_demand: Option<OnDemand>,
    /// What became of `--share`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub shared: Option<Shared>,
    /// Until the program went on.
    pub running_ms: f64,
    /// The whole restore.
    pub total_ms: f64,
    /// Its phases. The load runs beside `extract` and `criu`, which waits for it.
    pub phases: Vec<PhaseTime>,
}

/// Restores a program. See [`Failure::left`] for what holds after a failure. If it shares memory, the
/// [`Watch`] that comes with the report has to be asked for as long as the program runs.
pub fn restore(
    options: &Options,
    progress: &Arc<dyn Progress>,
) -> Result<(Report, Option<Watch>), Failure> {
    let failure = match attempt(options, options.on_demand, progress) {
        Err(failure) if options.on_demand => failure,
        done => return done,
    };
    if !matches!(*failure.error, Error::Missed { .. } | Error::EndedAwaiting { .. }) {
        return Err(failure);
    }
    // Image and host are as they should be: it was a guess about the program that was wrong.
    tracing::warn!(error = %failure.error, "restoring again, with all memory before the program goes on");
    let (mut report, watch) = once_more(options, failure.phase, failure.left, progress)?;
    report.on_demand =
        Some(OnDemand { fallen_back: Some(failure.error.to_string()), ..OnDemand::default() });
    Ok((report, watch))
}

/// After a [`Watch`] has said that the program with root `pid` cannot go on: ends it, gives up what it has
/// shared, and restores it anew, with all memory its own.
pub fn restore_unshared(
    options: Options,
    watch: Watch,
    pid: u32,
    why: &Error,
    progress: &Arc<dyn Progress>,
) -> Result<Report, Failure> {
    tracing::warn!(error = %why, "restoring again, with all memory the program's own");
    Restored { root: pid, is_child: true }.kill();
    watch.leave();
    let options = Options { share: None, ..options };
    // By signals that the program was given, and has survived.
    options.stop.store(false, Ordering::Relaxed);
    let (mut report, _) = once_more(&options, "share", Left::NotRestoredButRan, progress)?;
    report.shared = Some(Shared { fallen_back: Some(why.to_string()), ..Shared::default() });
    Ok(report)
}

/// Restores a program that has run already, and was ended in that `phase`.
fn once_more(
    options: &Options,
    phase: &'static str,
    left: Left,
    progress: &Arc<dyn Progress>,
) -> Result<(Report, Option<Watch>), Failure> {
    options.tell(None);
    let manifest = Manifest::read(&options.image);
    let manifest =
        manifest.map_err(|error| Failure { phase, error: Box::new(error.into()), left })?;
    demand::take_back_output(&manifest);
    attempt(options, false, progress)
}

/// Restores it; with `on_demand` it goes on before its memory is there.
fn attempt(
    options: &Options,
    on_demand: bool,
    progress: &Arc<dyn Progress>,
) -> Result<(Report, Option<Watch>), Failure> {
    let mut clock = Clock::start(progress.as_ref());
    let mut made = Made::default();
    let result = run(options, on_demand, progress, &mut clock, &mut made);
    let left = match made.restored.as_ref() {
        None if !made.begun => Left::Untouched,
        None => Left::NotRestored,
        Some(_) => Left::NotRestoredButRan,
    };
    match (&result, &made.restored) {
        (Ok(_), _) => {}
        (Err(_), Some(restored)) => restored.kill(),
        (Err(_), None) => wait_for(&made.children),
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
    /// What it was asked to make as children of this process: if it fails it has killed them.
    children: Vec<u32>,
    restored: Option<Restored>,
    /// Let go of after the processes were ended, since the end of an agent's connection opens
    /// its gate.
    held: Vec<Held>,
}

fn run(
    options: &Options,
    on_demand: bool,
    progress: &Arc<dyn Progress>,
    clock: &mut Clock<'_>,
    made: &mut Made,
) -> Result<(Report, Option<Watch>), Error> {
    let enter = |clock: &mut Clock<'_>, phase| {
        if options.stop.load(Ordering::Relaxed) {
            return Err(Error::Interrupted);
        }
        clock.enter(phase, None)
    };

    enter(clock, "preflight")?;
    let image = Arc::new(Source::open(&options.image, options.warm)?);
    let manifest = image.manifest();
    let criu = preflight::check(&image)?;
    // What somebody has named is looked at before anything is made; else that is done beside CRIU's work.
    let is_moved = !options.device_map.is_empty();
    let opened = is_moved.then(|| preflight::open(&image, &options.device_map)).transpose()?;
    let keeper = made.keeper.insert(Keeper::start().map_err(Error::Keeper)?);
    let at_work = keeper.at_work().map_err(Error::Keeper)?;
    let mut worker = start_criu(&criu, manifest, options, at_work.as_fd())?;

    clock.enter("load", Some(manifest.bulk_bytes))?;
    let mut load = Load::start(image.clone(), opened, on_demand, options, progress.clone());

    enter(clock, "extract")?;
    let files = image.criu_files()?;

    enter(clock, "criu")?;
    preflight::check_pids(manifest)?;
    let pids: Vec<u32> = manifest.processes.iter().map(|process| process.pid).collect();
    keeper.restoring(&pids).map_err(Error::Keeper)?;
    // How it ends tells whether it has missed memory, and only a parent is told.
    let is_child = !options.detach || on_demand;
    made.begun = true;
    made.children = if is_child { pids.clone() } else { Vec::new() };
    // Before the processes run everything is loaded, and gpucr's own context is gone by the time
    // that the driver needs room for theirs. On demand there is room only.
    let mut loaded = None;
    let asked = Cell::new(false);
    let mut before_they_run = || {
        asked.set(true);
        loaded = Some(load.finish()?);
        let command = options.before_resume.as_ref();
        command.map_or(Ok(()), |command| hook::run(command, &options.image, pids[0], &options.stop))
    };
    let deadline = Instant::now() + preflight::REAPING;
    let result = loop {
        let criu_options = criu_options(manifest, is_child, &files);
        match worker.restore(criu_options, &mut before_they_run) {
            // Taken since the look, or by what only CRIU meets, such as the group of a process that has
            // ended: it may pass. Nothing is there yet.
            Err(RestoreError::Criu(error))
                if error.has(Hint::PidInUse) && !asked.get() && Instant::now() < deadline =>
            {
                tracing::warn!(%error, "a pid is in use; trying again");
                // What CRIU had made it has killed; it is in the way until somebody has waited for it.
                wait_for(&made.children);
                std::thread::sleep(AGAIN);
                preflight::check_pids(manifest)?;
                worker = start_criu(&criu, manifest, options, at_work.as_fd())?;
            }
            result => break result,
        }
    };
    // Once CRIU has asked, the processes exist under their pids, whatever becomes of CRIU.
    if !matches!(result, Err(RestoreError::Callback(_))) && loaded.is_some() {
        made.restored = Some(Restored { root: pids[0], is_child });
    }
    let root = result.map_err(|error| match error {
        RestoreError::Criu(error) => load.give_up().unwrap_or_else(|| error.into()),
        RestoreError::Callback(error) => error,
    })?;
    drop((files, at_work));
    let Done { opened, memory: loaded, by_holder } = loaded.ok_or(Error::CopyIncomplete)?;

    enter(clock, "driver")?;
    let copied = match (&loaded, manifest.bulk_bytes) {
        (_, 0) => "driver",
        (Memory::Inside, _) => "inside",
        _ => "outside",
    };
    let (loaded, prepared, in_use) = match loaded {
        Memory::Loaded(loaded, in_use) => (Some(loaded), None, in_use),
        Memory::Prepared(prepared) => (None, Some(prepared), None),
        Memory::Inside => (None, None, None),
    };
    let shared =
        options.share.as_ref().map(|_| in_use.as_ref().map(InUse::report).unwrap_or_default());
    made.held = hold(manifest, loaded)?;
    let held = &mut made.held;
    for program in held.iter() {
        let pid = program.process.pid;
        match opened.driver.resume_on(pid, &opened.placement.pairs) {
            Err(error) if ends(&program.process, SEEN_FIRST) => {
                tracing::debug!(%error, pid, "it has ended");
            }
            resumed => resumed.map_err(|source| Error::Process { pid, source })?,
        }
    }

    enter(clock, "attach")?;
    for program in held.iter_mut().filter(|program| program.has_agent) {
        let agent = Agent::connect_restored(&program.process, FIRST_ANSWER);
        program.agent = unless_ended(&program.process, agent)?;
    }
    let watch = in_use.map(|in_use| in_use.begin(held)).transpose()?;
    let blocks = bulk::cuda_processes(&manifest.processes);
    for (program, (_, blocks)) in held.iter_mut().zip(blocks) {
        let Some(agent) = &mut program.agent else { continue };
        if copied == "inside" {
            bulk::load_inside(agent, &image, blocks, progress.as_ref())?;
        } else if prepared.is_none() {
            let attached = agent.reattach(&program.blocks);
            unless_ended(&program.process, attached)?;
        }
    }
    let awaited = prepared.map(|prepared| Awaited::begin(*prepared, &image, held)).transpose()?;
    // The last moment at which a signal means this command and not the program. If gpucr dies
    // from here on, the gates open by themselves and the program runs, unless it awaits memory.
    if awaited.is_none()
        && let Some(keeper) = made.keeper.take()
    {
        keeper.done();
    }
    enter(clock, "resume")?;
    options.tell(Some(root));
    // All gates open only when every process has its memory, or waits for it.
    for program in held.iter_mut() {
        let opened = program.agent.as_mut().map_or(Ok(()), Agent::open_gate);
        unless_ended(&program.process, opened)?;
    }
    let running_ms = milliseconds(clock.total());
    let mut streamed = None;
    if let Some(awaited) = awaited {
        clock.enter("stream", Some(manifest.bulk_bytes))?;
        streamed = Some(awaited.stream(held, root, &options.stop, progress.as_ref())?);
    }
    clock.end();
    let report = Report {
        image: options.image.clone(),
        id: crate::hex(&image.id()),
        pid: root,
        copied,
        warm: image.is_warm(),
        by_holder,
        bulk_bytes: manifest.bulk_bytes,
        on_demand: streamed,
        shared,
        running_ms,
        total_ms: milliseconds(clock.total()),
        phases: clock.times().to_vec(),
    };
    Ok((report, watch))
}

/// The tree that CRIU has made.
struct Restored {
    root: u32,
    is_child: bool,
}

impl Restored {
    /// Ends what was restored, after a failure.
    fn kill(&self) {
        let mut pids = vec![self.root];
        if let Ok(tree) = crate::process::Tree::read(self.root) {
            tree.kill();
            pids = tree.pids();
        }
        if self.is_child {
            wait_for(&pids);
        }
    }
}

/// What an agent has answered; `None` if its process was at its end before that. That is no failure: the host
/// side of a program runs while its memory is brought back, and may have had nothing else to do any more.
fn unless_ended<T>(
    process: &ProcessInfo,
    answer: Result<T, AgentError>,
) -> Result<Option<T>, AgentError> {
    match answer {
        // The connections of a process go before the process.
        Err(error @ (AgentError::Broken { .. } | AgentError::Absent { .. }))
            if ends(process, ENDING) =>
        {
            tracing::debug!(%error, pid = process.pid, "it has ended");
            Ok(None)
        }
        answer => answer.map(Some),
    }
}

/// Whether a process comes to its end in so long.
fn ends(process: &ProcessInfo, limit: Duration) -> bool {
    let deadline = Instant::now() + limit;
    while !process.has_ended() && Instant::now() < deadline {
        std::thread::sleep(Duration::from_millis(2));
    }
    process.has_ended()
}

/// Waits for the end of processes that were killed, as far as they are children of this one. The root
/// comes first: what it leaves behind becomes a child if this is the first process of a pid namespace.
fn wait_for(pids: &[u32]) {
    use rustix::process::{Pid, WaitOptions, waitpid};
    // Whoever has died before it could kill them is not waited for without end.
    let deadline = Instant::now() + preflight::REAPING;
    for pid in pids.iter().filter_map(|pid| Pid::from_raw(*pid as i32)) {
        while matches!(waitpid(Some(pid), WaitOptions::NOHANG), Ok(None))
            && Instant::now() < deadline
        {
            std::thread::sleep(Duration::from_millis(2));
        }
    }
}

/// Starts a CRIU for the restore.
fn start_criu(
    criu: &Criu,
    manifest: &Manifest,
    options: &Options,
    at_work: BorrowedFd<'_>,
) -> Result<RestoreWorker, Error> {
    let (shell_job, _) = crate::dump::option_values(&manifest.criu.options);
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
    let (_, names) = crate::dump::option_values(&manifest.criu.options);
    RestoreOptions {
        tcp_established: names.tcp_established,
        tcp_close: names.tcp_close,
        file_locks: names.file_locks,
        ext_unix_sk: names.ext_unix_sk,
        link_remap: names.link_remap,
        rst_sibling: is_child,
        work: files.work(),
        ..RestoreOptions::new(files.images())
    }
}

/// What is known of the restored CUDA processes.
fn hold(manifest: &Manifest, loaded: Option<bulk::Loaded>) -> Result<Vec<Held>, Error> {
    let processes = bulk::cuda_processes(&manifest.processes);
    let loaded = loaded.unwrap_or_else(|| processes.iter().map(|_| Vec::new()).collect());
    let mut held = Vec::with_capacity(processes.len());
    for ((process, _), blocks) in processes.into_iter().zip(loaded) {
        held.push(Held {
            process: ProcessInfo::read(process.pid)?,
            driver: manifest.driver.path.clone(),
            agent: None,
            has_agent: process.cuda.as_ref().is_some_and(|cuda| cuda.shim.is_some()),
            blocks,
            guard: None,
            guard_failed: None,
        });
    }
    Ok(held)
}
