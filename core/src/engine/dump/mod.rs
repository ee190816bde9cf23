//! `gpucr dump`: from a running program to an image.
//!
//! [`dump`] is the list of phases. Up to and including `attach` nothing of the program is changed, and
//! in `precopy` it runs on. From `gate` on it stands still. From `precopy` on every failure leads through
//! `Dump::settle`, which brings it back to running. The image is committed while CRIU
//! holds the program frozen, so at every moment either the program runs or the image is complete.
//! With protocol `cow` the program goes on before that, and the image is completed beside it. If it
//! writes memory before that is saved (`defer.rs`), all of this is done once more, in the old order.

mod copy;
mod defer;
mod describe;
mod end;
mod freeze;
mod inside;
mod precopy;
mod preflight;
mod report;
mod speculate;

pub use crate::base::timeline::Misspeculation;
pub use bulk::Validation;
pub use defer::{Deferral, Lessons};
pub(crate) use describe::option_values;
pub use report::{CriuOptions, Options, Report};

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use gpucr_wire::{Block, ProcessSharing, SHARING_VERSION, Sharing};

use crate::base::faults::{fault, skipped};
use crate::base::format::milliseconds;
use crate::base::phase::{Clock, Phase};
use crate::base::progress::Progress;
use crate::base::stop::Stop;
use crate::cuda::{Drivers, Reserver};
use crate::engine::access::Extent;
use crate::engine::device_state::DeviceStates;
use crate::engine::error::{Error, Failure, Left};
use crate::engine::held::Held;
use crate::engine::keeper::Keeper;
use crate::engine::memory as bulk;
use crate::engine::sections;
use crate::host::criu::DumpWorker;
use crate::host::process::{AgentError, LAST_MOMENTS, Lock, ProcessInfo};
use crate::image::{Committed, FileEntry, ImageWriter, Manifest, Protocol, Section};

use bulk::{Bulk, Miss, joined};
use copy::Copy;
use defer::Late;
use describe::Libraries;
use preflight::Plan;
use speculate::Speculation;

/// Dumps a program. See [`Failure::left`] for what holds after a failure.
pub fn dump(options: &Options, progress: &Arc<dyn Progress>) -> Result<Report, Failure> {
    let mut dump = Dump::attach(options, progress)?;
    let saved = dump.copy_ahead().and_then(|()| dump.stop_and_save());
    dump.settle(saved)
}

/// A dump between its first and its last phase.
struct Dump<'a> {
    options: &'a Options,
    progress: &'a Arc<dyn Progress>,
    clock: Clock<'a>,
    drivers: Drivers,
    plan: Plan,
    held: Vec<Held>,
    keeper: Keeper,
    /// Keeps device memory for the programs while the driver has them checkpointed.
    reserver: Reserver,
    /// Taken by the commit.
    image: Option<Arc<ImageWriter>>,
    libraries: Libraries,
    /// The memory as gpucr maps it; `None` where the programs have to copy from inside.
    bulk: Option<Bulk>,
    protocol: Protocol,
    /// Chunks copied while the program ran.
    precopied: u64,
    /// What the programs launch meanwhile.
    speculation: Speculation,
    validation: Option<Validation>,
    /// What that found to have changed, and when.
    missed: Vec<Miss>,
    missed_at: Instant,
    /// Of each program the blocks that have held still all the time.
    still: Vec<Vec<Extent>>,
    /// What instances may share of it, for the manifest.
    sharing: Option<Section>,
    /// Bytes copied aside within the devices.
    shadowed: u64,
    /// What is saved after the programs go on, and what came of it.
    late: Option<Late>,
    deferral: Option<Deferral>,
    /// Memory was written before it was saved, so the program is stopped a second time.
    fallen_back: bool,
    /// Started ahead; taken by its request.
    criu: Option<DumpWorker>,
    /// Keep a second gpucr away.
    _locks: Vec<Lock>,
    /// Bytes of the exported blocks.
    bulk_bytes: u64,
    /// Who copies them.
    copied: &'static str,
    stopped_at: Instant,
    /// Whether it has come that far.
    was_stopped: bool,
    /// For how long the program has stood still until it went on, both times if it was twice.
    stopped: Duration,
    /// For how long it did the first time, if it was twice.
    stopped_before: Duration,
    /// What is to be done for the image after the program goes on.
    pending: Option<Pending>,
    /// Set by the commit, with the time for which the program had been stopped then.
    committed: Option<(Committed, Duration)>,
    /// A CRIU that has the processes in its hands and does not answer.
    stuck: Option<u32>,
}

/// An image of a program that has gone on, but for what is still on its way into it.
struct Pending {
    manifest: Manifest,
    copy: Copy,
}

impl<'a> Dump<'a> {
    /// The phases that change nothing: checks, connections, preparations.
    fn attach(options: &'a Options, progress: &'a Arc<dyn Progress>) -> Result<Self, Failure> {
        let mut clock = Clock::recorded(progress.as_ref(), options.timeline.clone());
        let drivers = Drivers::default();
        let root = ProcessInfo::read(options.pid).ok();
        let prepare = |clock: &mut Clock<'_>| -> Result<_, Error> {
            clock.enter(Phase::Preflight, None)?;
            let target = options.destination.path();
            let target = std::path::absolute(&target).map_err(|source| Error::Io {
                what: format!("cannot make {} absolute", target.display()),
                source,
            })?;
            let (plan, held, locks) = preflight::check(options, &drivers)?;
            let mut keeper = Keeper::start().map_err(Error::Keeper)?;
            keeper.writing(&target).map_err(Error::Keeper)?;
            // Locks the store, so that nothing vanishes that this dump will rely on.
            let stop = || options.stop.load(Ordering::Relaxed);
            let mut image =
                ImageWriter::begin_unless(&options.destination, options.compression, &stop)?;
            if let Some(key) = &options.sign {
                image.sign_with(key.clone());
            }
            clock.enter(Phase::Attach, None)?;
            let driver = drivers.open(&plan.driver)?;
            let timeline = options.timeline.clone();
            let bytes = plan.bulk_bytes();
            let mut bulk = Bulk::prepare(&driver, &plan.devices, bytes, timeline)?;
            let contexts = bulk.as_ref().map_or_else(Vec::new, Bulk::contexts);
            let mut reserver = Reserver::new(contexts);
            // Nobody knows which devices a program uses that has no agent.
            if held.iter().any(|program| !program.has_agent) {
                reserver.add(&driver, &driver.devices()?);
            }
            let protocol = choose(options, &plan, bulk.as_mut());
            let libraries = Libraries::store(&plan, &image)?;
            let criu = plan.criu.start_dump()?;
            Ok((plan, held, image, bulk, reserver, protocol, keeper, libraries, criu, locks))
        };
        match prepare(&mut clock) {
            Ok((plan, held, image, bulk, reserver, protocol, keeper, libraries, criu, locks)) => {
                Ok(Self {
                    reserver,
                    libraries,
                    criu: Some(criu),
                    _locks: locks,
                    bulk_bytes: plan.bulk_bytes(),
                    copied: "outside",
                    options,
                    progress,
                    clock,
                    drivers,
                    plan,
                    held,
                    keeper,
                    image: Some(Arc::new(image)),
                    bulk,
                    protocol,
                    precopied: 0,
                    speculation: Speculation::default(),
                    validation: None,
                    missed: Vec::new(),
                    missed_at: Instant::now(),
                    still: Vec::new(),
                    sharing: None,
                    shadowed: 0,
                    late: None,
                    deferral: None,
                    fallen_back: false,
                    stopped_at: Instant::now(),
                    was_stopped: false,
                    stopped: Duration::ZERO,
                    stopped_before: Duration::ZERO,
                    pending: None,
                    committed: None,
                    stuck: None,
                })
            }
            Err(error) => {
                // What is looked for at a process that ends meanwhile is missing in many ways.
                let (error, left) = match root.is_some_and(|root| root.is_ending()) {
                    true => (Error::ProgramEnded, Left::Ended),
                    false => (error, Left::Untouched),
                };
                Err(Failure { phase: clock.phase(), error: Box::new(error), left })
            }
        }
    }

    /// What can be copied while the program runs.
    fn copy_ahead(&mut self) -> Result<(), Error> {
        if !self.is_ahead() {
            return Ok(());
        }
        self.enter(Phase::Precopy, Some(self.bulk_bytes))?;
        precopy::precopy(self)
    }

    /// Goes on without the program `pid`, if it has ended and the tree lives on. Only while the programs run: later
    /// the end of one may be what stopping it has done.
    fn forget_ended(&mut self, pid: u32) -> bool {
        let Some(number) = self.held.iter().position(|held| held.process.pid == pid) else {
            return false;
        };
        if pid == self.options.pid
            || self.held.len() == 1
            || !self.held[number].process.ends_within(LAST_MOMENTS)
        {
            return false;
        }
        self.held.remove(number);
        self.plan.forget(pid);
        self.speculation.forget(number);
        if let Some(bulk) = &mut self.bulk {
            bulk.forget_program(number);
        }
        true
    }

    /// The phases in which the program stands still, up to the commit. On return it is still
    /// stopped, or CRIU has ended it after the commit.
    fn stop_and_save(&mut self) -> Result<(), Error> {
        self.enter(Phase::Gate, None)?;
        self.stopped_at = Instant::now();
        self.was_stopped = true;
        self.close_gates()?;

        self.enter(Phase::Export, None)?;
        let blocks = self.export()?;
        self.adopt()?;
        self.follow(&blocks)?;

        let left = self.validate()?;
        self.shadow()?;
        self.defer()?;

        self.enter(Phase::Copy, Some(left))?;
        let copy = self.start_copy(blocks)?;

        self.enter(Phase::Detach, None)?;
        detach(&mut self.held, &self.reserver)?;

        self.enter(Phase::Checkpoint, None)?;
        self.checkpoint()?;

        self.enter(Phase::Criu, None)?;
        self.freeze_and_commit(copy)
    }

    /// Whether memory is copied while the program runs.
    fn is_ahead(&self) -> bool {
        matches!(self.protocol, Protocol::Recopy | Protocol::Cow)
    }

    fn enter(&mut self, phase: Phase, bytes: Option<u64>) -> Result<(), Error> {
        if self.options.stop.load(Ordering::Relaxed) {
            return Err(Error::Interrupted);
        }
        Ok(self.clock.enter(phase, bytes)?)
    }

    /// Closes all gates at the same time: programs that wait for each other on the device drain
    /// only together. What they use does not change from here on.
    fn close_gates(&mut self) -> Result<(), Error> {
        let limit = self.options.timeout;
        let closed: Vec<_> = std::thread::scope(|scope| {
            let agents = self.held.iter_mut().filter_map(|program| program.agent.as_mut());
            let closing: Vec<_> =
                agents.map(|agent| scope.spawn(move || agent.close_gate(limit))).collect();
            closing.into_iter().map(joined).collect()
        });
        for closed in closed {
            match closed {
                Err(AgentError::Broken { pid, .. }) if self.forget_ended(pid) => {}
                closed => closed?,
            }
        }
        // Each may have begun since it was asked first to use what the driver cannot checkpoint, and lose it
        // and itself.
        let drivers = &self.drivers;
        self.held.iter_mut().try_for_each(|program| preflight::look_again(program, drivers))
    }

    /// Asks every program for its blocks, and takes a file descriptor of each that is new.
    fn export(&mut self) -> Result<Vec<Vec<Block>>, Error> {
        let all: Vec<Vec<Block>> =
            self.held.iter_mut().map(Held::export).collect::<Result<_, _>>()?;
        self.bulk_bytes = all.iter().flatten().map(|block| block.size).sum();
        Ok(all)
    }

    /// Gives the keeper a descriptor of every block too: the program is about to lose its own.
    fn adopt(&mut self) -> Result<(), Error> {
        self.held.iter().try_for_each(|held| self.keeper.adopt(held)).map_err(Error::Keeper)
    }

    /// Maps these blocks in gpucr and lets go of all others. Where there is no room the programs
    /// copy from inside.
    fn follow(&mut self, blocks: &[Vec<Block>]) -> Result<(), Error> {
        if let Some(bulk) = &mut self.bulk
            && !bulk.follow(&self.held, blocks)?
        {
            self.bulk = None;
        }
        Ok(())
    }

    /// Hashes all device memory and compares it with what was copied while the program ran. Gives
    /// the bytes that are still to be copied.
    ///
    /// With `recopy` the programs are detached meanwhile: that too takes the longer the more memory they have, and
    /// gpucr reads it without them. With `cow` they keep it until the shadows are made: what their
    /// stacks give back at the detach is theirs, not room for shadows.
    fn validate(&mut self) -> Result<u64, Error> {
        let ahead = self.is_ahead();
        let Some(bulk) = self.bulk.as_mut().filter(|_| ahead) else {
            if ahead {
                self.protocol = Protocol::Stop;
            }
            return Ok(self.bulk_bytes);
        };
        // Not `enter`: the borrow of `bulk` lasts.
        self.clock.enter(Phase::Validate, None)?;
        if skipped("validate") {
            bulk.trust();
            return Ok(bulk.left());
        }
        let image = self.image.as_ref().expect("not committed yet");
        let early = self.protocol == Protocol::Recopy;
        let (held, speculation) = (&mut self.held, &mut self.speculation);
        let reserver = &self.reserver;
        let ask_and_detach = || {
            // Those who have written what was copied may have been launched after the last question, and
            // a program that is detached does not answer.
            match speculation.ask(held, Duration::ZERO) {
                // It would not answer the detach either.
                Err(error @ Error::Agent(AgentError::Broken { .. })) => return Err(error),
                Err(error) => {
                    tracing::warn!(%error, "the programs do not say what they have launched");
                }
                Ok(()) => {}
            }
            if early { detach(held, reserver) } else { Ok(()) }
        };
        let since = Instant::now();
        let (validated, found_at, detached) = std::thread::scope(|scope| {
            let detaching = scope.spawn(ask_and_detach);
            let validated = bulk.validate(image.chunks());
            let validated = fault("validated").map_err(Error::from).and(validated);
            let found_at = Instant::now();
            (validated, found_at, joined(detaching))
        });
        match validated {
            Ok((found, missed)) => {
                let ms = milliseconds(found_at.duration_since(since));
                self.validation = Some(Validation { ms, ..found });
                (self.missed, self.missed_at) = (missed, found_at);
            }
            Err(error) => {
                if let Err(second) = detached {
                    tracing::warn!(error = %second, "the programs could not be detached either");
                }
                return Err(error);
            }
        }
        detached?;
        self.still = (0..self.held.len()).map(|program| bulk.still(program)).collect();
        Ok(bulk.left())
    }

    /// Copies aside, within the devices, what is left to be saved: then the program need not wait
    /// for it.
    fn shadow(&mut self) -> Result<(), Error> {
        if self.protocol != Protocol::Cow {
            return Ok(());
        }
        self.enter(Phase::Shadow, None)?;
        let Some(bulk) = &mut self.bulk else { return Ok(()) };
        self.shadowed = bulk.shadow(self.options.shadow_memory)?;
        Ok(())
    }

    /// Starts the copy of what is left. From outside it goes on beside the phases that follow,
    /// since the memory lives on without the program; from inside it is complete on return.
    fn start_copy(&mut self, blocks: Vec<Vec<Block>>) -> Result<Copy, Error> {
        let image = self.image.as_ref().expect("not committed yet").clone();
        let (stop, progress) = (Stop::new(self.options.stop.clone()), self.progress.clone());
        let Some(bulk) = self.bulk.take() else {
            self.copied = "inside";
            let mut saved = Vec::new();
            for (program, blocks) in self.held.iter_mut().zip(&blocks) {
                if program.has_agent {
                    saved.extend(inside::copy(
                        program,
                        blocks,
                        image.chunks(),
                        &stop,
                        progress.as_ref(),
                        &self.options.timeline,
                    )?);
                }
            }
            return Ok(Copy::done(blocks, stop, saved));
        };
        Ok(Copy::start(bulk, blocks, image, stop, progress))
    }

    /// Lets the driver move what is left into host memory: first all locks, which can fail
    /// without harm, then all checkpoints.
    fn checkpoint(&mut self) -> Result<(), Error> {
        let device_state = self.drivers.device_state(&self.plan.driver)?;
        for program in &self.held {
            let pid = program.process.pid;
            let locked = device_state.lock(pid, self.options.timeout);
            locked.map_err(|source| Error::Process { pid, source })?;
        }
        for program in &mut self.held {
            let pid = program.process.pid;
            let free = self.reserver.free();
            device_state.checkpoint(pid).map_err(|source| Error::Process { pid, source })?;
            program.keep(self.reserver.take_since(&free));
            if let Err(error) = self.keeper.reserve(program) {
                tracing::warn!(%error, "the keeper has died");
            }
        }
        Ok(())
    }

    /// All processes of the program.
    fn processes(&self) -> impl Iterator<Item = &ProcessInfo> {
        self.held.iter().map(|program| &program.process).chain(&self.plan.others)
    }

    /// CRIU has written its files and holds the program frozen: commits the image, or with protocol
    /// `cow` takes down all that the image needs of the frozen program, which may go on then.
    fn commit(&mut self, mut copy: Copy) -> Result<(), Error> {
        self.plan.update(self.options.pid, &self.held, &self.drivers)?;
        if self.protocol == Protocol::Cow {
            let blocks = copy.released()?;
            let manifest = self.describe(blocks);
            self.pending = Some(Pending { manifest, copy });
            return Ok(());
        }
        self.enter(Phase::Store, None)?;
        let files = self.take_staged()?;
        let blocks = copy.finish().1?;
        let manifest = self.describe(blocks);
        self.write(manifest, files, None)
    }

    fn take_staged(&mut self) -> Result<Vec<FileEntry>, Error> {
        self.sharing = self.describe_sharing();
        let image = self.image.as_ref().expect("not committed yet");
        Ok(image.add_staged(|name| name.ends_with(".img"))?)
    }

    /// What of the memory instances of this program may share. `None` if nothing.
    fn describe_sharing(&mut self) -> Option<Section> {
        let still = std::mem::take(&mut self.still).into_iter();
        let of = |(program, still)| {
            let (blocks, habits) = self.speculation.sharing(program, still);
            ProcessSharing { pid: self.held[program].process.pid, blocks, habits }
        };
        let processes: Vec<_> =
            still.enumerate().map(of).filter(|p| !p.blocks.is_empty()).collect();
        let sharing = Sharing { version: SHARING_VERSION, processes };
        (!sharing.processes.is_empty()).then(|| sections::sharing(&sharing))
    }

    fn describe(&mut self, blocks: Vec<bulk::Saved>) -> Manifest {
        let libraries = self.libraries.clone();
        describe::manifest(self.options, &self.plan, self.protocol, libraries, blocks)
    }

    /// Completes the manifest and commits. The copy has ended.
    fn write(
        &mut self,
        mut manifest: Manifest,
        files: Vec<FileEntry>,
        stopped: Option<Duration>,
    ) -> Result<(), Error> {
        manifest.sections.extend(self.sharing.take());
        let of = |program: &Held| (program.process.pid, program.freed.clone());
        manifest.sections.extend(sections::contexts(self.held.iter().map(of).collect()));
        self.enter(Phase::Commit, None)?;
        // A restore loads them in this order.
        let cuda = manifest.processes.iter_mut().filter_map(|process| process.cuda.as_mut());
        for (program, cuda) in cuda.enumerate() {
            self.speculation.sort_by_use(program, &mut cuda.blocks);
        }
        let stopped = stopped.unwrap_or_else(|| self.stopped_at.elapsed());
        describe::finish(&mut manifest, files, self.clock.times(), stopped);
        let image = self.image.take().expect("committed once");
        let image = Arc::into_inner(image).expect("the copy has ended");
        let committed = image.commit(&manifest)?;
        self.committed = Some((committed, self.stopped_at.elapsed()));
        Ok(())
    }
}

/// Takes the bulk memory away from every program that has it still. Keeps for it what its stacks give back.
fn detach(held: &mut [Held], reserver: &Reserver) -> Result<(), Error> {
    for program in held {
        // Of an earlier attempt.
        program.freed.clear();
        let Some(agent) = program.agent.take() else { continue };
        let free = reserver.free();
        if let Err((agent, error)) = agent.detach() {
            program.agent = agent.map(|agent| *agent);
            return Err(error.into());
        }
        program.keep(reserver.take_since(&free));
        fault("detached")?;
    }
    Ok(())
}

/// How the memory is copied: as it was asked for, where that can be done. Copying while the program
/// runs needs a context of gpucr's own that can hash, and memory to copy.
fn choose(options: &Options, plan: &Plan, bulk: Option<&mut Bulk>) -> Protocol {
    if plan.shims().next().is_none() {
        return Protocol::Driver;
    }
    let Some(bulk) = bulk.filter(|_| plan.bulk_bytes() > 0) else { return Protocol::Stop };
    // A program that is ended need not be let go early.
    let best = if options.leave_running { Protocol::Cow } else { Protocol::Recopy };
    if options.protocol == Some(Protocol::Stop) || !bulk.prepare_hashing() {
        return Protocol::Stop;
    }
    bulk.prepare_bounce(plan.bulk_bytes());
    match options.protocol {
        Some(Protocol::Recopy) => Protocol::Recopy,
        _ => best,
    }
}
