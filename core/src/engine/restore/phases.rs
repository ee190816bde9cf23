//! The phases of a restore, in their order. Each makes of what the one before has left a state of its own, so that
//! nothing can be used before it is there. What has to be taken back after a failure is in [`Made`] all the time.

use std::collections::HashMap;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use super::arrival::choose::choose;
use super::arrival::{Arrival, Programs};
use super::bulk;
use super::criu::{Late, Maker, Making, Start, Streams};
use super::extract::Extracting;
use super::files::Files;
use super::lacks::{self, leaves_network};
use super::late::{self, Alarm, HostSide};
use super::load::{Done, Load};
use super::loading::LoadedBy;
use super::memory;
use super::options::Options;
use super::preflight::{self, Opened};
use super::processes::{unless_ended, wait_for};
use super::report::Report;
use super::root;
use super::source::{CriuFiles, Source};
use super::stdio;
use super::watch::Watch;
use crate::base::clock::Clock;
use crate::base::faults::fault;
use crate::base::format::milliseconds;
use crate::base::phase::Phase;
use crate::base::progress::Progress;
use crate::base::stop::Stop;
use crate::base::threads::joined;
use crate::cuda::HostDriver;
use crate::engine::cuda_process::{CudaProcess, make_teams_whole};
use crate::engine::device_state;
use crate::engine::error::{Error, Failure, Left};
use crate::engine::hook;
use crate::engine::multicast;
use crate::engine::watchdog::Watchdog;
use crate::host::criu::{OnDemandMemory, RestoreError};
use crate::host::process::{Agent, Lock, ProcessInfo, kill_trees};
use crate::image::Manifest;

/// How long the agent of a process that was just restored may take to answer.
const FIRST_ANSWER: Duration = Duration::from_secs(60);
/// How long the driver may see the end of a process before the process has ended.
const SEEN_FIRST: Duration = Duration::from_millis(200);

/// Restores it, once. If it shares memory it has to be watched over.
///
/// # Errors
/// [`Failure::left`] says what holds. Whatever had been made of the program has been ended.
pub(super) fn attempt(
    options: &Options,
    progress: &Arc<dyn Progress>,
) -> Result<(Report, Option<Watch>), Failure> {
    let mut clock = Clock::start(progress.as_ref());
    let mut made = Made::default();
    let result = run(Task {
        options,
        progress,
        clock: &mut clock,
        made: &mut made,
        files: Files::default(),
    });
    let result = result.map_err(|error| late::failure(made.memory.as_ref()).unwrap_or(error));
    let left = match made {
        Made { ran: true, .. } => Left::NotRestoredButRan,
        Made { begun: true, .. } => Left::NotRestored,
        Made { .. } => Left::Untouched,
    };
    if result.is_err() {
        // CRIU has killed the processes that it has not let run, unless it has died itself.
        let cuda_processes = made.cuda_processes.iter().map(|program| &program.process);
        let killed = kill_trees(made.processes.iter().chain(cuda_processes));
        if !made.children.is_empty() {
            wait_for(&[&made.children[..], &killed].concat());
        }
    }
    // The watchdog is for the death of gpucr; what gpucr lives to see it has settled itself.
    if let Some(watchdog) = made.watchdog {
        watchdog.done();
    }
    result.map_err(|error| Failure { phase: clock.phase(), error: Box::new(error), left })
}

fn run(mut task: Task<'_, '_>) -> Result<(Report, Option<Watch>), Error> {
    task.enter(Phase::Preflight)?;
    let image = Arc::new(Source::open(&task.options.image, task.options.warm)?);
    let checked = Checked::look_at(&image, &mut task)?;
    let begun = checked.load_and_extract(&mut task)?;
    let there = begun.make_processes(&mut task)?;
    let alarm = Alarm::set(task.made.memory.as_ref(), image.manifest())?;
    let driven = there.restore_contexts(&mut task)?;
    let attached = driven.give_memory(&mut task)?;
    let running = attached.go_on(&mut task)?;
    drop(alarm);
    running.complete(task)
}

/// What there is to be taken back after a failure.
#[derive(Default)]
struct Made {
    watchdog: Option<Watchdog>,
    /// Whether CRIU was asked.
    begun: bool,
    /// What it was asked to make as children of this process.
    children: Vec<u32>,
    /// The processes that it has made, but for the `cuda_processes`.
    processes: Vec<ProcessInfo>,
    /// Whether they may have run.
    ran: bool,
    /// Let go of after the processes were ended, since the end of an agent's connection opens
    /// its gate.
    cuda_processes: Vec<CudaProcess>,
    /// Of processes whose host memory is not all there: a dump would find nothing in its place.
    locks: Vec<Lock>,
    /// What brings host memory that is not there yet. Let go of after the processes were ended, since what is missing
    /// then is zeros.
    memory: Option<OnDemandMemory>,
}

/// What is to be done, and how far it has come.
struct Task<'t, 'c> {
    options: &'t Options,
    progress: &'t Arc<dyn Progress>,
    clock: &'t mut Clock<'c>,
    made: &'t mut Made,
    /// Files that are not as they were.
    files: Files,
}

impl Task<'_, '_> {
    fn enter(&mut self, phase: Phase) -> Result<(), Error> {
        if self.options.stop.load(Ordering::Relaxed) {
            return Err(Error::Interrupted);
        }
        Ok(self.clock.enter(phase, None)?)
    }
}

/// After `preflight`: nothing that could be found beforehand keeps the program from being restored. A watchdog and CRIU
/// are at hand.
struct Checked<'i> {
    image: &'i Arc<Source>,
    library: Arc<HostDriver>,
    /// The driver, where devices take the place of others.
    opened: Option<Opened>,
    arrival: Box<dyn Arrival>,
    maker: Maker,
    /// Takes CRIU's files out of the image meanwhile.
    extracting: Extracting,
}

impl<'i> Checked<'i> {
    fn look_at(image: &'i Arc<Source>, task: &mut Task<'_, '_>) -> Result<Self, Error> {
        let options = task.options;
        tracing::debug!("the image is open");
        options.trust.check_image(&options.image, &image.id())?;
        memory::check(image, options.device_memory_there(image))?;
        stdio::check(&image.manifest().processes, options.outputs.named())?;
        root::check(image.manifest(), options)?;
        // There is room for that, which nothing of what follows needs.
        let extracting = Extracting::start(image.clone());
        tracing::debug!("the image is checked");
        let wanted = (options.files, &options.tree());
        let (criu, library, files) =
            preflight::check(image, wanted, &options.at_hand, &options.stop)?;
        tracing::debug!("files, driver and CRIU are checked");
        task.files = files;
        // Devices that the user has named are checked before anything is made; else while CRIU works.
        lacks::check_network(options.network.as_ref())?;
        let is_moved = !options.device_map.is_empty();
        let drivers = &options.at_hand.drivers;
        let open = || preflight::open(image, &library, drivers, &options.device_map);
        let opened = is_moved.then(open).transpose()?;
        tracing::debug!("devices are found");
        let streams = Streams { is_detached: options.detach, outputs: options.outputs.clone() };
        let watchdog = task.made.watchdog.insert(Watchdog::start().map_err(Error::Watchdog)?);
        let at_work = watchdog.at_work().map_err(Error::Watchdog)?;
        let network = options.network.clone();
        let root = root::stage(image.manifest(), options)?;
        let start = Start { criu, network, at_work, root, streams };
        let maker = Maker::start(start, image.manifest())?;
        Ok(Self { image, library, opened, arrival: choose(options), maker, extracting })
    }

    /// The phases `load`, which goes on during the next, and `extract`.
    fn load_and_extract(self, task: &mut Task<'_, '_>) -> Result<Begun<'i>, Error> {
        let Self { image, library, opened, arrival, maker, extracting } = self;
        task.clock.enter(Phase::Load, Some(image.manifest().bulk_bytes))?;
        let is_child = !task.options.detach || arrival.needs_parent();
        let (own_image, own_library) = (image.clone(), library.clone());
        let (stop, progress) = (Stop::new(task.options.stop.clone()), task.progress.clone());
        let given = task.options.given.clone();
        let libraries = (own_library, task.options.at_hand.clone());
        let load = Load::start(own_image, libraries, opened, arrival, given, stop, progress);

        task.enter(Phase::Extract)?;
        let files = extracting
            .finish()
            .and_then(|files| image.with_sizes(files, &task.files.continued()))?;
        Ok(Begun { image, library, maker, is_child, load, files })
    }
}

/// While memory is loaded, and when CRIU's files are there.
struct Begun<'i> {
    image: &'i Arc<Source>,
    library: Arc<HostDriver>,
    maker: Maker,
    /// Whether the processes are to be children of this one.
    is_child: bool,
    load: Load,
    files: CriuFiles,
}

impl<'i> Begun<'i> {
    /// The phase `criu`.
    fn make_processes(self, task: &mut Task<'_, '_>) -> Result<There<'i>, Error> {
        task.enter(Phase::Criu)?;
        let Self { image, library, maker, is_child, mut load, files } = self;
        let (options, manifest) = (task.options, image.manifest());
        preflight::check_pids(manifest)?;
        let pids: Vec<u32> = manifest.processes.iter().map(|process| process.pid).collect();
        let watchdog = task.made.watchdog.as_mut().ok_or(Error::ProgramEnded)?;
        watchdog.restoring(&pids).map_err(Error::Watchdog)?;
        // From here on it is not said that nothing was changed.
        task.made.begun = true;
        task.files.rewind(image)?;
        task.made.children = if is_child { pids.clone() } else { Vec::new() };
        let keep = options.on_demand.then(|| watchdog.keeper());
        let late = keep.map(|keep| Late { keep, memory: &mut task.made.memory });
        // Before the processes run the memory is prepared, and gpucr's own context is gone by the time that the driver
        // needs room for theirs, unless memory arrives later.
        let mut done = None;
        let locks = &mut task.made.locks;
        let mut before_they_run = || {
            if options.on_demand {
                *locks = late::lock(&pids)?;
            }
            done = Some(load.finish()?);
            stdio::append(&manifest.processes);
            stdio::pass_on_unprocessed(&manifest.processes, &task.options.outputs);
            let command = options.before_resume.as_ref();
            let image = Some(options.image.as_path());
            let run = |command| hook::run(command, image, pids[0], &options.stop);
            command.map_or(Ok(()), |command| run(command.as_os_str()))?;
            options.may_they_run()
        };
        let making = maker.make(manifest, is_child, &files, late, &mut before_they_run)?;
        let Making { root, found } = making;
        task.made.ran = !matches!(root, Err(RestoreError::Callback(_))) && done.is_some();
        let (known, unknown): (Vec<_>, Vec<_>) = found.into_iter().partition(Result::is_ok);
        task.made.processes.extend(known.into_iter().flatten());
        let root = root.map_err(|error| match error {
            RestoreError::Criu(error) => load.give_up().unwrap_or_else(|| error.into()),
            RestoreError::Callback(error) => error,
        })?;
        unknown.into_iter().try_for_each(|unknown| unknown.map(drop))?;
        Ok(There { image, library, root, done: done.ok_or(Error::CopyIncomplete)? })
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
        let Done { opened, mut arrival, by, mut reserve } = done;
        let loaded = arrival.take_loaded();
        task.made.cuda_processes =
            hold(image.manifest(), &library, loaded, &mut task.made.processes);
        let device_state = device_state::of(&opened.driver);
        for program in &mut task.made.cuda_processes {
            let (process, has_agent) = (&program.process, program.has_agent);
            let pid = process.pid;
            // From here on the driver takes what it needs.
            drop(reserve.remove(&pid));
            let stop = Some(&task.options.stop);
            let (resumed, answer) = std::thread::scope(|scope| {
                // Meanwhile: the agent makes itself ready for the memory when it is greeted.
                let greet = || {
                    let agent = Agent::connect_restored(process, FIRST_ANSWER, stop);
                    tracing::debug!(pid, "the agent was greeted");
                    agent
                };
                let greeting = has_agent.then(|| scope.spawn(greet));
                let resumed = device_state.resume(pid, &opened.placement.pairs);
                (resumed, greeting.map(joined))
            });
            // Its connection is not to end before the process has, whatever has failed.
            let answer = answer.map_or(Ok(None), |agent| unless_ended(process, agent));
            let greeted = answer.map(|agent| program.agent = agent);
            match resumed {
                Err(error) if program.process.ends_within(SEEN_FIRST) => {
                    tracing::debug!(%error, pid, "it has ended");
                }
                resumed => resumed.map_err(|source| Error::Process { pid, source })?,
            }
            greeted?;
        }
        tracing::debug!("all agents have answered, and the driver has restored its contexts");
        Ok(Driven { image, root, opened, arrival, by })
    }
}

/// The programs have their contexts, their agents have answered, and they wait for their memory.
struct Driven<'i> {
    image: &'i Arc<Source>,
    root: u32,
    opened: Opened,
    arrival: Box<dyn Arrival>,
    by: LoadedBy,
}

impl<'i> Driven<'i> {
    /// The phase `attach`.
    fn give_memory(mut self, task: &mut Task<'_, '_>) -> Result<Attached<'i>, Error> {
        task.enter(Phase::Attach)?;
        let cuda_processes = &mut task.made.cuda_processes;
        fault("greeted")?;
        let progress = task.progress.as_ref();
        self.arrival.attach(&mut Programs { image: self.image, cuda_processes, progress })?;
        make_teams(self.image.manifest(), cuda_processes)?;
        Ok(Attached(self))
    }
}

/// Has the multicast objects made again of which the image tells.
fn make_teams(manifest: &Manifest, cuda_processes: &mut [CudaProcess]) -> Result<(), Error> {
    if multicast::read(manifest)?.is_empty() {
        return Ok(());
    }
    let mut teams = HashMap::new();
    for (at, program) in cuda_processes.iter_mut().enumerate() {
        let asked = multicast::ask(program);
        unless_ended(&program.process, asked)?;
        if program.agent.is_some() && !program.team.objects.is_empty() {
            teams.insert(at, program.team.clone());
        }
    }
    make_teams_whole(cuda_processes, &teams)
}

/// Every process has its memory, or waits for it.
struct Attached<'i>(Driven<'i>);

impl<'i> Attached<'i> {
    /// The phase `resume`.
    fn go_on(self, task: &mut Task<'_, '_>) -> Result<Running<'i>, Error> {
        let Self(driven) = self;
        // The last moment at which a signal means this command and not the program. If gpucr dies
        // from here on, the gates open by themselves and the program runs, unless it awaits memory.
        if driven.arrival.is_complete()
            && task.made.memory.is_none()
            && let Some(watchdog) = task.made.watchdog.take()
        {
            watchdog.done();
        }
        task.enter(Phase::Resume)?;
        tracing::debug!("signals are the program's");
        fault("passed")?;
        task.options.tell(Some(driven.root));
        for program in &mut task.made.cuda_processes {
            let told = program.agent.as_mut().map_or(Ok(()), |agent| {
                // A signal that comes from here on is not gpucr's.
                agent.set_stop(None);
                agent.tell_restored()
            });
            unless_ended(&program.process, told)?;
        }
        // All gates open only when every process has its memory, or waits for it.
        for program in &mut task.made.cuda_processes {
            let opened = program.agent.as_mut().map_or(Ok(()), Agent::open_gate);
            unless_ended(&program.process, opened)?;
        }
        Ok(Running { driven, running_ms: milliseconds(task.clock.total()) })
    }
}

/// The program runs.
struct Running<'i> {
    driven: Driven<'i>,
    running_ms: f64,
}

impl Running<'_> {
    /// The phase `stream`, if there is memory that has not arrived.
    fn complete(self, task: Task<'_, '_>) -> Result<(Report, Option<Watch>), Error> {
        let Self { driven, running_ms } = self;
        let Driven { image, root, opened, mut arrival, by } = driven;
        let Task { options, progress, clock, made, files } = task;
        let bulk_bytes = image.manifest().bulk_bytes;
        let late = made.memory.as_ref();
        if !arrival.is_complete() || late.is_some() {
            let device = if arrival.is_complete() { 0 } else { bulk_bytes };
            let host = late.map_or(0, OnDemandMemory::bytes);
            clock.enter(Phase::Stream, Some(device + host))?;
            let cuda_processes = &mut made.cuda_processes;
            let mut programs = Programs { image, cuda_processes, progress: progress.as_ref() };
            let host_side = HostSide::of(late, image.manifest(), progress.as_ref());
            host_side.beside(|| match arrival.is_complete() {
                true => Ok(()),
                false => arrival.complete(&mut programs, root, &options.stop),
            })?;
        }
        clock.end();
        let mut report = Report {
            image: options.image.clone(),
            id: crate::base::format::hex(&image.id()),
            pid: root,
            copied: if bulk_bytes == 0 { "driver" } else { arrival.copied() },
            warm: image.is_warm(),
            by_holder: by == LoadedBy::Holder,
            was_given: by == LoadedBy::Starter,
            bulk_bytes,
            moved: opened.placement.moved,
            unread: match options.detach {
                true => stdio::lost(&image.manifest().processes, options.outputs.named()),
                false => Vec::new(),
            },
            left_network: leaves_network(image.manifest(), options),
            files: files.into_changed(),
            on_demand: None,
            shared: None,
            running_ms,
            total_ms: milliseconds(clock.total()),
            phases: clock.times().to_vec(),
        };
        arrival.report(&mut report);
        if let Some(arrived) = made.memory.as_ref().map(OnDemandMemory::arrived) {
            let on_demand = report.on_demand.get_or_insert_default();
            (on_demand.host_bytes, on_demand.host_faults) = (arrived.bytes, arrived.faults);
        }
        Ok((report, arrival.take_watch()))
    }
}

/// Takes the CUDA processes from all that were restored, each with its memory.
fn hold(
    manifest: &Manifest,
    library: &Arc<HostDriver>,
    loaded: Option<bulk::Loaded>,
    restored: &mut Vec<ProcessInfo>,
) -> Vec<CudaProcess> {
    let processes = bulk::cuda_processes(&manifest.processes);
    let loaded = loaded.unwrap_or_else(|| processes.iter().map(|_| Vec::new()).collect());
    let mut cuda_processes = Vec::with_capacity(processes.len());
    for ((process, _), blocks) in processes.into_iter().zip(loaded) {
        let place = restored.iter().position(|restored| restored.pid == process.pid);
        let place = place.expect("each process of the image is among them");
        let has_agent = process.cuda.as_ref().is_some_and(|cuda| cuda.shim.is_some());
        let program = CudaProcess::new(restored.remove(place), library.clone(), has_agent);
        cuda_processes.push(CudaProcess { blocks, ..program });
    }
    cuda_processes
}
