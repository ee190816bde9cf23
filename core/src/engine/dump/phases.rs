//! The phases of a dump, in their order. Each makes of what the one before has left a state of its own, so that
//! nothing can be used before it is there, or after it is gone. What has to be taken back after a failure is in
//! [`Made`](super::task::Made) all the time, and what the state had made is let go of with the [`Setback`]. Every
//! failure leads to [`go_on`], which brings the programs back to running.
//!
//! 1. [`attach`]: checks, connections, preparations.
//! 2. [`stop_and_save`]: from programs that run to an image, or to all that it needs of them.
//! 3. [`go_on`]: the programs run again or are gone, and the image of programs that went on early is completed.
//!
//! [`again`] leads from the end of the third back to the second.

use std::time::{Duration, Instant};

use gpucr_wire::Block;

use super::attach::{Prepared, Unfinished};
use super::commit::{self, Commit, Staged};
use super::copy::Copy;
use super::defer::{self, Late};
use super::describe;
use super::freeze::{Window, freeze};
use super::precopy::precopy;
use super::resume::{self, Lost};
use super::setback::{Setback, or_keep};
use super::stop;
use super::task::{Task, Verdict};
use super::validate::{Known, ValidationResult, validate};
use crate::base::faults::skipped;
use crate::base::phase::Phase;
use crate::engine::access::Extent;
use crate::engine::error::Error;
use crate::engine::memory::Bulk;
use crate::engine::opened;
use crate::host::criu::{DumpWorker, LeftMemory};
use crate::host::process::Agent;
use crate::image::{Contents, HeldContents, ImageWriter, Manifest};

pub(super) use super::attach::{attach, offer};

/// How long an agent may take to answer that serves no other client.
const ANSWER: Duration = Duration::from_secs(10);

/// From programs that run to [`Saved`], in the phases from `precopy` on.
pub(super) fn stop_and_save(prepared: Prepared, task: &mut Task<'_>) -> Result<Saved, Setback> {
    let precopied = Precopied::copy_ahead(prepared, task)?;
    let gated = precopied.close_gates(task)?;
    let exported = gated.export(task)?;
    let validated = exported.validate(task)?;
    let aside = validated.copy_aside(task)?;
    let copying = aside.start_copy(task)?;
    let checkpointed = copying.checkpoint(task)?;
    checkpointed.save(task)
}

/// After `precopy`: the programs run, and nothing of them is changed but that their launches are recorded. The way
/// back: recording ends.
struct Precopied {
    prepared: Prepared,
}

impl Precopied {
    /// The phase `precopy`, where memory is copied while the programs run.
    fn copy_ahead(mut prepared: Prepared, task: &mut Task<'_>) -> Result<Self, Setback> {
        if !task.strategy.copies_ahead() {
            return Ok(Self { prepared });
        }
        let bytes = task.account.bulk_bytes;
        let copied = task
            .enter(Phase::Precopy, Some(bytes))
            .and_then(|()| precopy(task, &prepared.image.writer, &mut prepared.memory));
        let (prepared, ()) = or_keep(prepared, copied)?;
        Ok(Self { prepared })
    }

    /// The phase `gate`.
    fn close_gates(self, task: &mut Task<'_>) -> Result<Gated, Setback> {
        let Self { mut prepared } = self;
        let closed = stop::announce(task).and_then(|()| {
            task.enter(Phase::Gate, None)?;
            stop::meet(task)?;
            task.made.standstill.begin();
            if let Some(peer) = task.options.target.peer() {
                peer.stopped();
            }
            stop::close_gates(task, prepared.memory.as_mut())
        });
        let (prepared, ()) = or_keep(prepared, closed)?;
        Ok(Gated { prepared })
    }
}

/// After `gate`: the programs are stopped, and what they use does not change any more. The way back: the gates are
/// opened.
struct Gated {
    prepared: Prepared,
}

impl Gated {
    /// The phase `export`.
    fn export(self, task: &mut Task<'_>) -> Result<Exported, Setback> {
        let Self { mut prepared } = self;
        let exported = task.enter(Phase::Export, None).and_then(|()| {
            task.host.ask_pinned(&mut task.made.cuda_processes);
            if task.opens_late {
                prepared.open(task)?;
            }
            let blocks = stop::export(task)?;
            opened::resolve(&mut task.made.cuda_processes, &blocks)?;
            stop::adopt(task)?;
            stop::follow(&task.made.cuda_processes, &mut prepared.memory, &blocks)?;
            Ok(blocks)
        });
        let (prepared, blocks) = or_keep(prepared, exported)?;
        Ok(Exported { prepared, blocks })
    }
}

/// After `export`: gpucr and the watchdog have a descriptor of every block, and gpucr has them mapped if it can. The
/// way back: the gates are opened.
struct Exported {
    prepared: Prepared,
    blocks: Vec<Vec<Block>>,
}

impl Exported {
    /// The phase `validate`, where memory was copied while the programs ran.
    fn validate(self, task: &mut Task<'_>) -> Result<Validated, Setback> {
        let Self { mut prepared, blocks } = self;
        let Prepared { image, memory, .. } = &mut prepared;
        let known = validate(task, &image.writer, memory, &blocks);
        let (prepared, known) = or_keep(prepared, known)?;
        Ok(Validated { prepared, blocks, known })
    }
}

/// After `validate`: it is known which memory the image lacks. With `recopy` the programs are detached, and it is being
/// found out, and copied, during the phases that follow. The way back: they are given their memory again, and the gates
/// are opened.
struct Validated {
    prepared: Prepared,
    blocks: Vec<Vec<Block>>,
    known: Known,
}

impl Validated {
    /// The phase `shadow`, where programs go on before all is saved.
    fn copy_aside(self, task: &mut Task<'_>) -> Result<Aside, Setback> {
        let Self { mut prepared, blocks, known } = self;
        let late = shadow_and_defer(task, prepared.memory.as_mut());
        let (prepared, late) = or_keep(prepared, late)?;
        Ok(Aside { prepared, blocks, known, late })
    }
}

/// Copies aside, within the devices, what is left to be saved: then the programs need not wait for it. What finds no
/// room is put off.
fn shadow_and_defer(task: &mut Task<'_>, memory: Option<&mut Bulk>) -> Result<Option<Late>, Error> {
    if !task.strategy.copies_aside() {
        return Ok(None);
    }
    task.enter(Phase::Shadow, None)?;
    let Some(bulk) = memory else { return Ok(None) };
    task.account.shadowed = bulk.shadow(task.options.shadow_memory)?;
    if !task.strategy.defers() || skipped("defer") {
        return Ok(None);
    }
    Late::defer(&mut task.made.cuda_processes, bulk, &task.speculation, &task.options.feedback)
}

/// After `shadow`: it is settled what is copied before the programs go on, and what after that. The way back: as
/// before.
struct Aside {
    prepared: Prepared,
    blocks: Vec<Vec<Block>>,
    known: Known,
    late: Option<Late>,
}

impl Aside {
    /// The phase `copy`, which goes on during the next.
    fn start_copy(self, task: &mut Task<'_>) -> Result<Copying, Setback> {
        let Self { prepared, blocks, known, late } = self;
        match known {
            Known::Now(ValidationResult { left, unchanged }) => {
                let (prepared, ()) = or_keep(prepared, task.enter(Phase::Copy, Some(left)))?;
                let Prepared { image, criu, memory } = prepared;
                let copy = Copy::of(task, memory, blocks, image.writer.clone());
                let ((image, criu), copy) = or_keep((image, criu), copy)?;
                Ok(Copying { criu, unsaved: Unsaved { image, copy, unchanged, late } })
            }
            Known::Meanwhile(copy) => {
                let Prepared { image, criu, .. } = prepared;
                let unsaved = Unsaved { image, copy, unchanged: Vec::new(), late };
                match task.enter(Phase::Copy, None) {
                    Ok(()) => Ok(Copying { criu, unsaved }),
                    Err(error) => Err(unsaved.give_up(error).with(criu)),
                }
            }
        }
    }
}

/// From `copy` on: what is left is copied during the phases that follow, from memory that lives on without the
/// programs. The way back: as before, after the end of the copy.
struct Copying {
    criu: DumpWorker,
    unsaved: Unsaved,
}

impl Copying {
    /// The phases `detach` and `checkpoint`.
    fn checkpoint(self, task: &mut Task<'_>) -> Result<Checkpointed, Setback> {
        let Self { criu, unsaved } = self;
        let done = detach_and_checkpoint(task);
        match done {
            Ok(()) => Ok(Checkpointed { criu, unsaved }),
            Err(error) => Err(unsaved.give_up(error).with(criu)),
        }
    }
}

fn detach_and_checkpoint(task: &mut Task<'_>) -> Result<(), Error> {
    task.enter(Phase::Detach, None)?;
    stop::detach(&mut task.made.cuda_processes, &task.reserver)?;
    task.enter(Phase::Checkpoint, None)?;
    stop::checkpoint(task)
}

/// After `checkpoint`: all of the programs that is not copied is in their host memory. The way back: the driver
/// restores and unlocks them, they are given their memory again, and the gates are opened.
struct Checkpointed {
    criu: DumpWorker,
    unsaved: Unsaved,
}

impl Checkpointed {
    /// The phase `criu`, and within it `store` and `commit` for programs that do not go on before.
    fn save(self, task: &mut Task<'_>) -> Result<Saved, Setback> {
        let Self { criu, unsaved } = self;
        match task.enter(Phase::Criu, None) {
            Ok(()) => freeze(task, criu, unsaved),
            Err(error) => Err(unsaved.give_up(error).with(criu)),
        }
    }
}

/// What is not in the image before CRIU's callback.
struct Unsaved {
    image: Unfinished,
    copy: Copy,
    /// For each program, the blocks that have stayed unchanged all the time; empty if the copy finds that out.
    unchanged: Vec<Vec<Extent>>,
    /// What is saved after the programs go on, if anything is.
    late: Option<Late>,
}

impl Window for Unsaved {
    type Saved = Saved;

    fn image(&self) -> &ImageWriter {
        &self.image.writer
    }

    /// CRIU has written its files and holds the programs frozen: commits the image, or takes down all that the image
    /// needs of frozen programs that may go on then.
    fn commit(self, task: &mut Task<'_>, left: Option<LeftMemory>) -> Result<Saved, Setback> {
        let Self { image, mut copy, unchanged, late } = self;
        let Task { plan, host, options, made, drivers, .. } = task;
        let mut settled = Ok(());
        // Each takes some milliseconds, in which the programs stand still.
        let updated = rayon::in_place_scope(|scope| {
            scope.spawn(|_| {
                settled = left.as_ref().map_or(Ok(()), |left| host.settle(&image.writer, left));
            });
            plan.update(options, &made.cuda_processes, drivers)
        });
        let updated = updated.and(settled);
        if task.strategy.goes_on_early() {
            let held = updated.and_then(|()| commit::copy_aside(task, &image.writer, left));
            let blocks = held.and_then(|held| Ok((held, copy.released()?)));
            let (image, (held, blocks)) = or_keep(image, blocks)?;
            let described = commit::describe(task, &image, blocks);
            let (image, manifest) = or_keep(image, described)?;
            return Ok(Saved::Concurrently(Box::new(ConcurrentSave {
                image,
                manifest,
                copy,
                held,
                unchanged,
                late,
            })));
        }
        let by = copy.by();
        let stored = updated.and_then(|()| task.enter(Phase::Store, None)).and_then(|()| {
            let unchanged = match copy.checked()? {
                Some(Verdict { checked, unchanged }) => {
                    task.account.checked = Some(checked);
                    unchanged
                }
                None => unchanged,
            };
            let left: Vec<_> = left.iter().flat_map(LeftMemory::files).collect();
            let staged = Staged::take(task, &image.writer, unchanged, &left)?;
            Ok((staged, copy.finish().1?))
        });
        let (image, (staged, blocks)) = or_keep(image, stored)?;
        let described = commit::describe(task, &image, blocks);
        let (image, manifest) = or_keep(image, described)?;
        let commit = commit::commit(task, image, manifest, staged)?;
        Ok(Saved::Complete(Complete { commit, by }))
    }

    /// The copy ends before anything else is done.
    fn give_up(self, error: Error) -> Setback {
        let Self { image, copy, .. } = self;
        drop(copy);
        Setback::new(error, image)
    }
}

/// After CRIU's callback. The programs are as after `checkpoint`, or CRIU has ended them.
pub(super) enum Saved {
    /// The image is complete. There is no way back but forwards: a program that does not come back to running is lost.
    Complete(Complete),
    /// The programs go on before their image is complete. What fails from here on costs the image only.
    Concurrently(Box<ConcurrentSave>),
}

/// A complete image.
pub(super) struct Complete {
    pub(super) commit: Commit,
    /// What has copied the memory, as the report names it.
    pub(super) by: &'static str,
}

/// An image that is completed while the programs run.
pub(super) struct ConcurrentSave {
    image: Unfinished,
    manifest: Manifest,
    copy: Copy,
    /// Host memory as it was when the programs were stopped.
    held: Vec<HeldContents>,
    unchanged: Vec<Vec<Extent>>,
    late: Option<Late>,
}

/// What follows the phases in which the programs were stopped.
pub(super) enum GoneOn {
    /// The programs run or are gone, and there is an image or none.
    Ended(Ended),
    /// The programs run, and have written memory before it was saved.
    Missed(Box<Missed>),
}

/// How a dump has ended.
pub(super) struct Ended {
    /// Where there is no image: why, and in which phase that was.
    pub(super) image: Result<Complete, (Phase, Setback)>,
    /// Whether the programs were to run on.
    pub(super) resume: bool,
    /// The programs that do not.
    pub(super) lost: Lost,
}

/// The phase `resume`, for programs that are to run on, and `store` and `commit` for programs that go on before
/// their image is complete. After a failure in any phase this is the way back.
pub(super) fn go_on(task: &mut Task<'_>, saved: Result<Saved, Setback>) -> GoneOn {
    let failed_in = task.clock.phase();
    let resume = saved.is_err() || task.options.leave_running;
    let mut lost = Lost::new();
    if resume {
        let failure = saved.as_ref().err().map(|setback| &setback.error);
        lost = resume::bring_back(task, failure, |cuda_processes| match &saved {
            Ok(Saved::Concurrently(save)) => save.late.iter().for_each(Late::set_running),
            _ => defer::forget_guards(cuda_processes),
        });
    } else {
        resume::ensure_ended(task);
    }
    task.host.end();
    let stopped = match &saved {
        Ok(Saved::Complete(complete)) if !resume => complete.commit.stopped,
        _ => task.made.standstill.length(),
    };
    task.made.standstill.end(stopped, &task.options.timeline);
    let image = match saved {
        Ok(Saved::Complete(complete)) => Ok(complete),
        Ok(Saved::Concurrently(save)) if !lost.is_empty() => {
            Err((Phase::Resume, save.give_up(Error::NotResumed(lost.join("; ")))))
        }
        Ok(Saved::Concurrently(save)) => match save.complete(task) {
            Ok(Completed::Complete(complete)) => Ok(complete),
            Ok(Completed::Missed(missed)) => return GoneOn::Missed(missed),
            Err(setback) => Err((task.clock.phase(), setback)),
        },
        Err(setback) => Err((failed_in, setback)),
    };
    defer::unguard(&mut task.made.cuda_processes);
    GoneOn::Ended(Ended { image, resume, lost })
}

enum Completed {
    Complete(Complete),
    Missed(Box<Missed>),
}

impl ConcurrentSave {
    /// The phases `store` and `commit`, while the programs run again.
    fn complete(self, task: &mut Task<'_>) -> Result<Completed, Setback> {
        if let Err(error) = defer::check_guards(&mut task.made.cuda_processes) {
            return Err(self.give_up(error));
        }
        let Self { image, mut manifest, copy, held, unchanged, mut late } = self;
        let patience = late.as_ref().map(|late| late.patience(copy.stop()));
        // Memory that the program gives back from now on is the device's.
        task.made.cuda_processes.iter_mut().for_each(|program| program.blocks.clear());
        if let Err(error) = task.made.watchdog.resumed() {
            // All that is left for the watchdog to do is to remove the image, should gpucr die.
            tracing::warn!(%error, "the watchdog has died");
        }
        let shadowed = task.account.shadowed;
        if let Err(error) = task.enter(Phase::Store, Some(shadowed)) {
            drop((patience, copy));
            return Err(Setback::new(error, image));
        }
        // First what calls of the programs may wait for: host memory takes all cores for as long as it is compressed.
        let is_saved = copy.settled();
        late.iter_mut().for_each(|late| late.settled(&task.options.timeline));
        if is_saved {
            defer::unguard(&mut task.made.cuda_processes);
        }
        let files: Vec<_> = held.iter().map(|held| held as &dyn Contents).collect();
        let staged = match Staged::take(task, &image.writer, unchanged, &files) {
            Ok(staged) => staged,
            Err(error) => {
                drop((patience, copy));
                return Err(Setback::new(error, image));
            }
        };
        drop(held);
        let by = copy.by();
        let (mut memory, blocks) = copy.finish();
        let is_missed = matches!(blocks, Err(Error::Misspeculated { .. }));
        if let (true, Some(late), Some(bulk)) = (is_missed, &mut late, &mut memory) {
            learn(task, late, bulk);
        }
        if let Some(late) = late {
            task.account.deferral = Some(late.found);
        }
        if patience.is_some_and(|patience| patience.has_ended()) {
            let error = Error::Stalled { seconds: defer::LIMIT.as_secs() };
            return Err(Setback::new(error, (image, memory)));
        }
        match blocks {
            Err(error) if is_missed => {
                Ok(Completed::Missed(Box::new(Missed { image, memory, error })))
            }
            blocks => {
                let (image, blocks) = or_keep(image, blocks)?;
                describe::set_saved(&mut manifest, blocks);
                let commit = commit::commit(task, image, manifest, staged)?;
                Ok(Completed::Complete(Complete { commit, by }))
            }
        }
    }

    /// The copy ends before anything else is done.
    fn give_up(self, error: Error) -> Setback {
        let Self { image, copy, .. } = self;
        drop(copy);
        Setback::new(error, image)
    }
}

/// Finds out who has written memory before it was saved, and lets go of all memory.
fn learn(task: &mut Task<'_>, late: &mut Late, bulk: &mut Bulk) {
    let options = task.options;
    late.learn(&mut task.made.cuda_processes, bulk, &mut task.speculation, &options.feedback);
    options.timeline.mark(Instant::now(), &late.found.misspeculations);
    bulk.forget();
}

/// The programs run, and memory was written before it was saved: there will be no image of that moment. CRIU's files
/// of it are still there, and the guards. The way back: the guards end.
pub(super) struct Missed {
    image: Unfinished,
    memory: Option<Bulk>,
    error: Error,
}

impl Missed {
    /// The dump is not tried again.
    pub(super) fn give_up(self, task: &mut Task<'_>) -> Ended {
        let Self { image, memory, error } = self;
        let setback = Setback::new(error, (image, memory));
        defer::unguard(&mut task.made.cuda_processes);
        Ended { image: Err((task.clock.phase(), setback)), resume: true, lost: Lost::new() }
    }
}

/// The phase `fallback`: makes ready, while the programs run, to stop them once more. Nothing is deferred then.
pub(super) fn again(missed: Missed, task: &mut Task<'_>) -> Result<Prepared, Setback> {
    let Missed { image, mut memory, .. } = missed;
    task.strategy = task.strategy.after_miss();
    let criu = make_ready_again(task, &image.writer, memory.as_mut());
    let ((image, memory), criu) = or_keep((image, memory), criu)?;
    Ok(Prepared { image, criu, memory })
}

fn make_ready_again(
    task: &mut Task<'_>,
    image: &ImageWriter,
    mut memory: Option<&mut Bulk>,
) -> Result<DumpWorker, Error> {
    task.enter(Phase::Fallback, None)?;
    tracing::info!("memory was written before it was saved; the program is stopped again");
    // CRIU's files of the first stop are of another moment.
    image.clear_staging()?;
    let criu = task.plan.start_criu()?;
    let ended =
        task.made.cuda_processes.iter().map(|program| &program.process).filter(|p| p.has_ended());
    for pid in ended.map(|process| process.pid).collect::<Vec<_>>() {
        task.forget_ended(pid, memory.as_deref_mut());
    }
    for program in &mut task.made.cuda_processes {
        program.guard = None;
        // Agents without a guard were let go.
        if program.has_agent && program.agent.as_ref().is_none_or(|agent| !agent.is_in_step()) {
            program.agent = None;
            program.agent =
                Some(Agent::connect(&program.process, ANSWER, Some(&task.options.stop))?);
        }
    }
    Ok(criu)
}
