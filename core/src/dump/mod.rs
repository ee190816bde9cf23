//! `gpucr dump`: from a running program to an image.
//!
//! [`dump`] is the list of phases. Up to and including `attach` nothing of the program is changed, and
//! in `precopy` it runs on. From `gate` on it stands still. From `precopy` on every failure leads through
//! `Dump::settle`, which brings it back to running. The image is committed while CRIU
//! holds the program frozen, so at every moment either the program runs or the image is complete.
//! With protocol `cow` the program goes on before that, and the image is completed beside it. If it
//! writes memory before that is saved (`defer.rs`), all of this is done once more, in the old order.

pub(crate) mod bulk;
mod copy;
mod defer;
mod describe;
mod end;
mod inside;
mod precopy;
mod preflight;
mod report;
mod shadow;
mod speculate;

pub use bulk::Validation;
pub use defer::{Deferral, Lessons};
pub(crate) use describe::{hash_file, option_values};
pub use report::{CriuOptions, Options, Report};
pub use speculate::Misspeculation;

use std::os::fd::AsFd;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use gpucr_wire::{Block, ProcessSharing, SHARING_VERSION, Sharing, Stream};

use crate::access::Extent;
use crate::criu::{DumpError, DumpWorker};
use crate::error::{Error, Failure, Left};
use crate::held::{Drivers, Held};
use crate::image::{Committed, FileEntry, ImageWriter, Manifest, Protocol, SHARING_FILE};
use crate::keeper::Keeper;
use crate::phase::{Clock, Progress, fault, milliseconds, skipped};
use crate::process::{AgentError, Lock, ProcessInfo};
use crate::scratch;
use crate::stop::Stop;

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
        let prepare = |clock: &mut Clock<'_>| -> Result<_, Error> {
            clock.enter("preflight", None)?;
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
            let image =
                ImageWriter::begin_unless(&options.destination, options.compression, &stop)?;
            clock.enter("attach", None)?;
            let driver = drivers.open(&plan.driver)?;
            let timeline = options.timeline.clone();
            let bytes = plan.bulk_bytes();
            let mut bulk = Bulk::prepare(&driver, &plan.devices, bytes, timeline)?;
            let protocol = choose(options, &plan, bulk.as_mut());
            let libraries = Libraries::store(&plan, &image)?;
            let criu = plan.criu.start_dump()?;
            Ok((plan, held, image, bulk, protocol, keeper, libraries, criu, locks))
        };
        match prepare(&mut clock) {
            Ok((plan, held, image, bulk, protocol, keeper, libraries, criu, locks)) => Ok(Self {
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
            }),
            Err(error) => {
                Err(Failure { phase: clock.phase(), error: Box::new(error), left: Left::Untouched })
            }
        }
    }

    /// What can be copied while the program runs.
    fn copy_ahead(&mut self) -> Result<(), Error> {
        if !self.is_ahead() {
            return Ok(());
        }
        self.enter("precopy", Some(self.bulk_bytes))?;
        precopy::precopy(self)
    }

    /// The phases in which the program stands still, up to the commit. On return it is still
    /// stopped, or CRIU has ended it after the commit.
    fn stop_and_save(&mut self) -> Result<(), Error> {
        self.enter("gate", None)?;
        self.stopped_at = Instant::now();
        self.was_stopped = true;
        self.close_gates()?;

        self.enter("export", None)?;
        let blocks = self.export()?;
        self.adopt()?;
        self.follow(&blocks)?;

        let left = self.validate()?;
        self.shadow()?;
        self.defer()?;

        self.enter("copy", Some(left))?;
        let copy = self.start_copy(blocks)?;

        self.enter("detach", None)?;
        detach(&mut self.held)?;

        self.enter("checkpoint", None)?;
        self.checkpoint()?;

        self.enter("criu", None)?;
        self.freeze_and_commit(copy)
    }

    /// Whether memory is copied while the program runs.
    fn is_ahead(&self) -> bool {
        matches!(self.protocol, Protocol::Recopy | Protocol::Cow)
    }

    fn enter(&mut self, phase: &'static str, bytes: Option<u64>) -> Result<(), Error> {
        if self.options.stop.load(Ordering::Relaxed) {
            return Err(Error::Interrupted);
        }
        self.clock.enter(phase, bytes)
    }

    /// Closes all gates at the same time: programs that wait for each other on the device drain
    /// only together.
    fn close_gates(&mut self) -> Result<(), Error> {
        let limit = self.options.timeout;
        std::thread::scope(|scope| {
            let agents = self.held.iter_mut().filter_map(|program| program.agent.as_mut());
            let closing: Vec<_> =
                agents.map(|agent| scope.spawn(move || agent.close_gate(limit))).collect();
            closing.into_iter().try_for_each(joined)
        })?;
        Ok(())
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
        self.clock.enter("validate", None)?;
        if skipped("validate") {
            bulk.trust();
            return Ok(bulk.left());
        }
        let image = self.image.as_ref().expect("not committed yet");
        let early = self.protocol == Protocol::Recopy;
        let (held, speculation) = (&mut self.held, &mut self.speculation);
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
            if early { detach(held) } else { Ok(()) }
        };
        let since = Instant::now();
        let (validated, found_at, detached) = std::thread::scope(|scope| {
            let detaching = scope.spawn(ask_and_detach);
            let validated = bulk.validate(image.chunks());
            let validated = fault("validated").and(validated);
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
        self.enter("shadow", None)?;
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
        let limit = u32::try_from(self.options.timeout.as_millis()).unwrap_or(u32::MAX).max(1);
        let driver = self.drivers.open(&self.plan.driver)?;
        for program in &self.held {
            let pid = program.process.pid;
            driver.lock(pid, limit).map_err(|source| Error::Process { pid, source })?;
        }
        for program in &self.held {
            let pid = program.process.pid;
            driver.checkpoint(pid).map_err(|source| Error::Process { pid, source })?;
        }
        Ok(())
    }

    /// Lets CRIU freeze and save the processes, and commits the image before it lets go of them:
    /// it ends them only if the commit has succeeded.
    fn freeze_and_commit(&mut self, copy: Copy) -> Result<(), Error> {
        let image = self.image.as_ref().expect("not committed yet");
        let staging = image.staging_dir();
        let staging = std::fs::File::open(&staging).map_err(|source| Error::Io {
            what: format!("cannot open {}", staging.display()),
            source,
        })?;
        // CRIU's log goes elsewhere: on a full disk it is what tells that the disk is full.
        let log = scratch::file_system()?;
        let mut options = describe::criu_options(self.options, &self.plan, staging.as_fd());
        options.work = Some(log.as_fd());
        let criu = self.criu.take().expect("asked once");
        let mut copy = Some(copy);
        let commit = &mut || self.commit(copy.take().expect("CRIU asks for the commit once"));
        match criu.dump(&options, commit) {
            Ok(()) => Ok(()),
            Err(DumpError::Callback(error)) => Err(error),
            Err(DumpError::Criu { error, after_callback: false }) => Err(error.into()),
            // The image is complete; `settle` sees to the processes.
            Err(DumpError::Criu { error, after_callback: true }) => {
                tracing::warn!(%error, "CRIU failed after the commit");
                if !self.options.leave_running {
                    self.processes().for_each(ProcessInfo::kill);
                }
                Ok(())
            }
        }
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
        self.enter("store", None)?;
        let files = self.take_staged()?;
        let blocks = copy.finish().1?;
        let manifest = self.describe(blocks);
        self.write(manifest, files, None)
    }

    fn take_staged(&mut self) -> Result<Vec<FileEntry>, Error> {
        let sharing = self.describe_sharing();
        let image = self.image.as_ref().expect("not committed yet");
        if let Some(sharing) = sharing {
            let path = image.staging_dir().join(SHARING_FILE);
            std::fs::write(&path, sharing.to_bytes()).map_err(|source| Error::Io {
                what: format!("cannot write {}", path.display()),
                source,
            })?;
        }
        Ok(image.add_staged(|name| name.ends_with(".img"))?)
    }

    /// What of the memory instances of this program may share. `None` if nothing.
    fn describe_sharing(&mut self) -> Option<Sharing> {
        let still = std::mem::take(&mut self.still).into_iter();
        let of = |(program, still)| {
            let (blocks, habits) = self.speculation.sharing(program, still);
            ProcessSharing { pid: self.held[program].process.pid, blocks, habits }
        };
        let processes: Vec<_> =
            still.enumerate().map(of).filter(|p| !p.blocks.is_empty()).collect();
        let sharing = Sharing { version: SHARING_VERSION, processes };
        (!sharing.processes.is_empty()).then_some(sharing)
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
        self.enter("commit", None)?;
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

/// Takes the bulk memory away from every program that has it still.
fn detach(held: &mut [Held]) -> Result<(), Error> {
    for program in held {
        let Some(agent) = program.agent.take() else { continue };
        if let Err((agent, error)) = agent.detach() {
            program.agent = agent;
            return Err(error.into());
        }
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
