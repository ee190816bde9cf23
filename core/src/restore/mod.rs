//! `gpucr restore`: from an image to a running program.
//!
//! [`restore`] and `run` are the list of phases. The image is only read. Whatever can fail early
//! does so before CRIU lets the processes run: from then on their host side runs, and waits only
//! where it calls the driver, until the gates open. A failure ends whatever had been restored.

mod bulk;
mod hook;
mod preflight;
mod source;
mod stdio;

use std::ffi::OsString;
use std::os::fd::{AsFd, BorrowedFd};
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::JoinHandle;
use std::time::Duration;

use crate::criu::{Criu, InheritFd, RestoreError, RestoreOptions, RestoreWorker};
use crate::device::Driver;
use crate::error::{Error, Failure, Left};
use crate::held::{Drivers, Held};
use crate::image::Manifest;
use crate::keeper::Keeper;
use crate::phase::{Clock, PhaseTime, Progress, milliseconds};
use crate::process::{Agent, ProcessInfo, sockets};
use crate::stop::Stop;
use source::{CriuFiles, Source};

/// How long the agent of a process that was just restored may take to answer.
const FIRST_ANSWER: Duration = Duration::from_secs(60);

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
    /// Set by a signal handler to end the restore.
    pub stop: Arc<AtomicBool>,
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
    /// Bytes of device memory that gpucr loaded.
    pub bulk_bytes: u64,
    /// The whole restore.
    pub total_ms: f64,
    /// Its phases. The load runs beside `extract` and `criu`, which waits for it.
    pub phases: Vec<PhaseTime>,
}

/// Restores a program. See [`Failure::left`] for what holds after a failure.
pub fn restore(options: &Options, progress: &Arc<dyn Progress>) -> Result<Report, Failure> {
    let mut clock = Clock::start(progress.as_ref());
    let mut made = Made::default();
    let result = run(options, progress, &mut clock, &mut made);
    let left = match made.restored.as_ref() {
        None if !made.begun => Left::Untouched,
        None => Left::NotRestored,
        Some(_) => Left::NotRestoredButRan,
    };
    if let (Err(_), Some(restored)) = (&result, &made.restored) {
        restored.kill();
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
    restored: Option<Restored>,
    /// Let go of after the processes were ended, since the end of an agent's connection opens
    /// its gate.
    held: Vec<Held>,
}

fn run(
    options: &Options,
    progress: &Arc<dyn Progress>,
    clock: &mut Clock<'_>,
    made: &mut Made,
) -> Result<Report, Error> {
    let enter = |clock: &mut Clock<'_>, phase| {
        if options.stop.load(Ordering::Relaxed) {
            return Err(Error::Interrupted);
        }
        clock.enter(phase, None)
    };

    enter(clock, "preflight")?;
    let image = Arc::new(Source::open(&options.image, options.warm)?);
    let manifest = image.manifest();
    let plan = preflight::check(&image, &Drivers::default())?;
    let keeper = made.keeper.insert(Keeper::start().map_err(Error::Keeper)?);
    let at_work = keeper.at_work().map_err(Error::Keeper)?;
    let worker = start_criu(&plan.criu, manifest, options, at_work.as_fd())?;

    clock.enter("load", Some(manifest.bulk_bytes))?;
    let mut load = Load::start(plan.driver.clone(), image.clone(), options, progress.clone());

    enter(clock, "extract")?;
    let files = image.criu_files()?;

    enter(clock, "criu")?;
    preflight::check_pids(manifest)?;
    let pids: Vec<u32> = manifest.processes.iter().map(|process| process.pid).collect();
    keeper.restoring(&pids).map_err(Error::Keeper)?;
    made.begun = true;
    // Before the processes run everything is loaded, and gpucr's own context is gone by the time
    // that the driver needs room for theirs.
    let mut loaded = None;
    let mut before_they_run = || {
        loaded = Some(load.finish()?);
        let command = options.before_resume.as_ref();
        command.map_or(Ok(()), |command| hook::run(command, &options.image, pids[0], &options.stop))
    };
    let criu_options = criu_options(manifest, options, &files);
    let result = worker.restore(criu_options, &mut before_they_run);
    // Once CRIU has asked, the processes exist under their pids, whatever becomes of CRIU.
    if !matches!(result, Err(RestoreError::Callback(_))) && loaded.is_some() {
        made.restored = Some(Restored { root: pids[0], is_child: !options.detach });
    }
    let root = result.map_err(|error| match error {
        RestoreError::Criu(error) => error.into(),
        RestoreError::Callback(error) => error,
    })?;
    drop((files, at_work));
    let loaded = loaded.ok_or(Error::CopyIncomplete)?;

    enter(clock, "driver")?;
    let copied = match (&loaded, manifest.bulk_bytes) {
        (_, 0) => "driver",
        (Some(_), _) => "outside",
        (None, _) => "inside",
    };
    made.held = hold(manifest, loaded)?;
    let held = &mut made.held;
    for program in held.iter() {
        let pid = program.process.pid;
        plan.driver.resume(pid).map_err(|source| Error::Process { pid, source })?;
    }

    enter(clock, "attach")?;
    let blocks = bulk::cuda_processes(&manifest.processes);
    for (program, (_, blocks)) in held.iter_mut().zip(blocks) {
        if program.has_agent {
            let mut agent = Agent::connect_restored(&program.process, FIRST_ANSWER)?;
            if copied == "inside" {
                bulk::load_inside(&mut agent, &image, blocks, progress.as_ref())?;
            } else {
                agent.reattach(&program.blocks)?;
            }
            program.agent = Some(agent);
        }
    }
    // The last moment at which a signal means this command and not the program. If gpucr dies
    // from here on, the gates open by themselves and the program runs.
    if let Some(keeper) = made.keeper.take() {
        keeper.done();
    }
    enter(clock, "resume")?;
    // All gates open only when every process has its memory.
    for agent in held.iter_mut().filter_map(|program| program.agent.as_mut()) {
        agent.open_gate()?;
    }
    clock.end();
    Ok(Report {
        image: options.image.clone(),
        id: crate::hex(&image.id()),
        pid: root,
        copied,
        warm: image.is_warm(),
        bulk_bytes: manifest.bulk_bytes,
        total_ms: milliseconds(clock.total()),
        phases: clock.times().to_vec(),
    })
}

/// The tree that CRIU has made.
struct Restored {
    root: u32,
    is_child: bool,
}

impl Restored {
    /// Ends what was restored, after a failure.
    fn kill(&self) {
        if let Ok(tree) = crate::process::Tree::read(self.root) {
            tree.kill();
        }
        if self.is_child
            && let Some(pid) = rustix::process::Pid::from_raw(self.root as i32)
        {
            let _ = rustix::process::waitpid(Some(pid), rustix::process::WaitOptions::empty());
        }
    }
}

/// The load of the bulk memory, beside the phases that follow its start.
struct Load {
    stop: Stop,
    thread: Option<JoinHandle<Result<Option<bulk::Loaded>, Error>>>,
}

impl Load {
    fn start(
        driver: Arc<Driver>,
        image: Arc<Source>,
        options: &Options,
        progress: Arc<dyn Progress>,
    ) -> Self {
        let stop = Stop::new(options.stop.clone());
        let flag = stop.clone();
        let load = move || bulk::load(&driver, &image, &flag, progress.as_ref());
        Self { stop, thread: Some(std::thread::spawn(load)) }
    }

    fn finish(&mut self) -> Result<Option<bulk::Loaded>, Error> {
        let thread = self.thread.take().expect("CRIU asks once");
        thread.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic))
    }
}

impl Drop for Load {
    fn drop(&mut self) {
        if let Some(thread) = self.thread.take() {
            self.stop.fail();
            let _ = thread.join();
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
    options: &Options,
    files: &'a CriuFiles,
) -> RestoreOptions<'a> {
    let (_, names) = crate::dump::option_values(&manifest.criu.options);
    RestoreOptions {
        tcp_established: names.tcp_established,
        tcp_close: names.tcp_close,
        file_locks: names.file_locks,
        ext_unix_sk: names.ext_unix_sk,
        link_remap: names.link_remap,
        rst_sibling: !options.detach,
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
