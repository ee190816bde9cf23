//! The check of what was copied while the programs ran, once they are stopped.

use std::sync::Arc;
use std::time::{Duration, Instant};

use gpucr_wire::Block;

use super::copy::Copy;
use super::stop::detach;
use super::task::{Checked, Task, Verdict};
use crate::base::faults::{fault, skipped};
use crate::base::format::milliseconds;
use crate::base::phase::Phase;
use crate::engine::access::Extent;
use crate::engine::error::Error;
use crate::engine::memory::{Bulk, Validation, joined};
use crate::engine::migrate::outgoing::Outgoing;
use crate::host::process::AgentError;
use crate::image::ImageWriter;

/// What is known of the memory of programs that are stopped.
pub(super) enum Known {
    /// All.
    Now(ValidationResult),
    /// It is being found out, and what is found missing is copied then. The programs are detached.
    Meanwhile(Copy),
}

/// What the image lacks.
pub(super) struct ValidationResult {
    /// Bytes that are still to be copied.
    pub(super) left: u64,
    /// Of each program the blocks that have stayed unchanged all the time; empty where nothing was hashed.
    pub(super) unchanged: Vec<Vec<Extent>>,
}

/// Hashes all device memory and compares it with what was copied while the program ran, if anything was. Where the
/// programs can be detached early, `memory` is taken for that and it goes on during the phases that follow.
pub(super) fn validate(
    task: &mut Task<'_>,
    image: &Arc<ImageWriter>,
    memory: &mut Option<Bulk>,
    blocks: &[Vec<Block>],
) -> Result<Known, Error> {
    if memory.is_none() || !task.strategy.copies_ahead() {
        task.strategy = task.strategy.without_memory();
        return Ok(Known::Now(ValidationResult {
            left: task.account.bulk_bytes,
            unchanged: Vec::new(),
        }));
    }
    task.clock.enter(Phase::Validate, None)?;
    let is_skipped = skipped("validate");
    let check = Check::of(task);
    let early = task.strategy.detaches_early() && !is_skipped;
    if let Some(bulk) = memory.take_if(|_| early) {
        let check = move |bulk: &mut Bulk, image: &ImageWriter| check.make(bulk, image);
        let copy = Copy::after_check(task, bulk, blocks.to_vec(), image.clone(), Box::new(check));
        ask_for_the_last_time(task)?;
        detach(&mut task.made.cuda_processes, &task.reserver)?;
        return Ok(Known::Meanwhile(copy));
    }
    let mut unchanged = Vec::new();
    let bulk = memory.as_mut().expect("it was there, and was not taken");
    if is_skipped {
        bulk.trust();
    } else {
        let (asked, verdict) = std::thread::scope(|scope| {
            let checking = scope.spawn(|| check.make(bulk, image));
            (ask_for_the_last_time(task), joined(checking))
        });
        let verdict = verdict?;
        task.account.checked = Some(verdict.checked);
        unchanged = verdict.unchanged;
        asked?;
    }
    Ok(Known::Now(ValidationResult { left: bulk.left(), unchanged }))
}

/// Kernels that have written what was copied may have been launched after the last question, and a program that is
/// detached does not answer.
fn ask_for_the_last_time(task: &mut Task<'_>) -> Result<(), Error> {
    match task.speculation.ask(&mut task.made.cuda_processes, Duration::ZERO) {
        // A program that does not answer this would not answer the detach either.
        Err(error @ Error::Agent(AgentError::Broken { .. })) => Err(error),
        Err(error) => {
            tracing::warn!(%error, "the programs do not report what they have launched");
            Ok(())
        }
        Ok(()) => Ok(()),
    }
}

/// A check that is to be made.
struct Check {
    /// The programs.
    pids: Vec<u32>,
    /// The other side of a migration, which is told what is in which block.
    peer: Option<Arc<Outgoing>>,
}

impl Check {
    fn of(task: &Task<'_>) -> Self {
        let pids = task.made.cuda_processes.iter().map(|program| program.process.pid).collect();
        Self { pids, peer: task.options.target.peer().cloned() }
    }

    fn make(self, bulk: &mut Bulk, image: &ImageWriter) -> Result<Verdict, Error> {
        let since = Instant::now();
        let (found, missed) = bulk.validate(image.chunks())?;
        fault("validated")?;
        let at = Instant::now();
        let found = Validation { ms: milliseconds(at.duration_since(since)), ..found };
        if let Some(peer) = self.peer {
            peer.lay_out(bulk.laid(), |program| self.pids[program])?;
        }
        let unchanged = (0..self.pids.len()).map(|program| bulk.unchanged(program)).collect();
        Ok(Verdict { checked: Checked { found, missed, at }, unchanged })
    }
}
