//! The copy of bulk memory that goes on during the phases of a dump.

use std::sync::Arc;
use std::thread::JoinHandle;

use crossbeam_channel::Receiver;
use gpucr_wire::Block;

use super::inside;
use super::task::{Task, Verdict};
use crate::base::progress::Progress;
use crate::base::stop::Stop;
use crate::engine::error::Error;
use crate::engine::memory::{Bulk, Saved};
use crate::image::ImageWriter;
use crate::store::ChunkId;

/// A copy of bulk memory under way, and the check before it of what was copied ahead, unless that was done already.
/// Dropped before its end it is stopped and waited for.
pub(super) struct Copy {
    blocks: Vec<Vec<Block>>,
    /// What copies: `outside` or `inside`, as the report names them.
    by: &'static str,
    stop: Stop,
    /// The ids that each block will have, where they are known before the end.
    hashes: Option<Vec<Vec<ChunkId>>>,
    work: Option<Work>,
}

/// What copied, and the ids of each block.
type Ended = (Bulk, Result<Vec<Vec<ChunkId>>, Error>);

enum Work {
    /// Ids for each block of each program, in order.
    Done(Vec<Vec<ChunkId>>),
    Thread {
        thread: JoinHandle<Ended>,
        /// Says when the programs may go on with their memory.
        release: Receiver<()>,
        /// Says when no call waits any more for memory that is saved while the programs run, and whether it was saved.
        settled: Receiver<bool>,
        /// Says what the check has found, if this thread makes one.
        checked: Option<Receiver<Verdict>>,
    },
}

/// What is done in the copy's thread before it copies.
type Check = Box<dyn FnOnce(&mut Bulk, &ImageWriter) -> Result<Verdict, Error> + Send>;

impl Copy {
    /// Starts the copy of what is left. From outside it goes on during the phases that follow,
    /// since the memory lives on without the program; from inside it is complete on return.
    ///
    /// # Errors
    /// The errors of a copy from inside.
    pub(super) fn of(
        task: &mut Task<'_>,
        memory: Option<Bulk>,
        blocks: Vec<Vec<Block>>,
        image: Arc<ImageWriter>,
    ) -> Result<Self, Error> {
        let (stop, progress) = (Stop::new(task.options.stop.clone()), task.progress.clone());
        if let Some(bulk) = memory {
            return Ok(Self::start(bulk, blocks, image, stop, progress, None));
        }
        let mut saved = Vec::new();
        for (program, blocks) in task.made.cuda_processes.iter_mut().zip(&blocks) {
            if program.has_agent {
                saved.extend(inside::copy(
                    program,
                    blocks,
                    image.chunks(),
                    &stop,
                    progress.as_ref(),
                    &task.options.timeline,
                )?);
            }
        }
        Ok(Self::done(blocks, stop, saved))
    }

    /// Starts the check of what was copied ahead, and after it the copy of what it finds missing. Both go on during the
    /// phases that follow.
    pub(super) fn after_check(
        task: &Task<'_>,
        memory: Bulk,
        blocks: Vec<Vec<Block>>,
        image: Arc<ImageWriter>,
        check: Check,
    ) -> Self {
        let (stop, progress) = (Stop::new(task.options.stop.clone()), task.progress.clone());
        Self::start(memory, blocks, image, stop, progress, Some(check))
    }

    /// Starts a thread that saves all of `bulk`, which is `blocks`, into the image.
    fn start(
        mut bulk: Bulk,
        blocks: Vec<Vec<Block>>,
        image: Arc<ImageWriter>,
        stop: Stop,
        progress: Arc<dyn Progress>,
        check: Option<Check>,
    ) -> Self {
        // Before the check they are those of memory that may have changed since.
        let hashes = if check.is_none() { bulk.hashes() } else { None };
        let (released, release) = crossbeam_channel::bounded(1);
        let (all_settled, settled) = crossbeam_channel::bounded(1);
        let (found, checked) = crossbeam_channel::bounded(1);
        let checked = check.is_some().then_some(checked);
        let stop_flag = stop.clone();
        let thread = std::thread::spawn(move || {
            if let Some(check) = check {
                match check(&mut bulk, &image) {
                    Ok(verdict) => _ = found.send(verdict),
                    Err(error) => return (bulk, Err(error)),
                }
            }
            drop(found);
            // The thread that waits for these may have given up.
            let released = || _ = released.send(());
            let settle = |saved| _ = all_settled.send(saved);
            let saved = bulk.save(image.chunks(), &stop_flag, progress.as_ref(), released, settle);
            (bulk, saved)
        });
        Self {
            blocks,
            by: "outside",
            stop,
            hashes,
            work: Some(Work::Thread { thread, release, settled, checked }),
        }
    }

    /// A copy that has ended already: these are the ids of each block, in order.
    fn done(blocks: Vec<Vec<Block>>, stop: Stop, ids: Vec<Vec<ChunkId>>) -> Self {
        Self { blocks, by: "inside", stop, hashes: None, work: Some(Work::Done(ids)) }
    }

    /// What copies, as the report names it.
    pub(super) fn by(&self) -> &'static str {
        self.by
    }

    /// What ends it early.
    pub(super) fn stop(&self) -> &Stop {
        &self.stop
    }

    /// Waits for the check, if the copy makes one, and gives what it has found.
    ///
    /// # Errors
    /// The check has failed.
    pub(super) fn checked(&mut self) -> Result<Option<Verdict>, Error> {
        let Some(Work::Thread { checked: Some(checked), .. }) = &self.work else { return Ok(None) };
        // No word means that it has failed.
        checked.recv().map(Some).map_err(|_| self.failure())
    }

    /// Why the copy's thread has ended without a word.
    fn failure(&mut self) -> Error {
        let Some(Work::Thread { thread, .. }) = self.work.take() else {
            return Error::CopyIncomplete;
        };
        joined(thread).1.err().unwrap_or(Error::CopyIncomplete)
    }

    /// Waits until the programs may go on with their memory, and gives each program's blocks with the
    /// chunks that they will have. All memory has been hashed.
    pub(super) fn released(&mut self) -> Result<Vec<Saved>, Error> {
        if let Some(Work::Thread { release, .. }) = &self.work
            && release.recv().is_err()
        {
            // No word means that the copy has failed.
            return Err(self.failure());
        }
        let hashes = self.hashes.clone().ok_or(Error::CopyIncomplete)?;
        Ok(in_programs(self.blocks.clone(), hashes))
    }

    /// Waits until no call waits any more for memory that is saved while the programs run. Says whether it
    /// is saved.
    pub(super) fn settled(&self) -> bool {
        match &self.work {
            Some(Work::Thread { settled, .. }) => settled.recv().unwrap_or(false),
            _ => true,
        }
    }

    /// Waits for the end and gives each program's blocks with their chunks, and what copied them.
    pub(super) fn finish(mut self) -> (Option<Bulk>, Result<Vec<Saved>, Error>) {
        let (bulk, ids) = match self.work.take().expect("taken only here and in drop") {
            Work::Done(ids) => (None, Ok(ids)),
            Work::Thread { thread, .. } => {
                let (bulk, ids) = joined(thread);
                (Some(bulk), ids)
            }
        };
        let blocks = std::mem::take(&mut self.blocks);
        (bulk, ids.map(|ids| in_programs(blocks, ids)))
    }
}

fn joined<T>(thread: JoinHandle<T>) -> T {
    thread.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic))
}

fn in_programs(blocks: Vec<Vec<Block>>, ids: Vec<Vec<ChunkId>>) -> Vec<Saved> {
    let mut ids = ids.into_iter();
    blocks.into_iter().map(|blocks| blocks.into_iter().zip(ids.by_ref()).collect()).collect()
}

impl Drop for Copy {
    fn drop(&mut self) {
        if let Some(Work::Thread { thread, .. }) = self.work.take() {
            self.stop.fail();
            let _ = thread.join();
        }
    }
}
