//! The check of what was copied while the programs ran, once they are stopped.

use std::time::{Duration, Instant};

use super::stop::detach;
use super::task::{Checked, Task};
use crate::base::faults::{fault, skipped};
use crate::base::format::milliseconds;
use crate::base::phase::Phase;
use crate::engine::access::Extent;
use crate::engine::error::Error;
use crate::engine::memory::{Bulk, Validation, joined};
use crate::host::process::AgentError;
use crate::image::ImageWriter;

/// What is known of the memory of programs that are stopped.
pub(super) struct ValidationResult {
    /// Bytes that are still to be copied.
    pub(super) left: u64,
    /// Of each program the blocks that have stayed unchanged all the time; empty where nothing was hashed.
    pub(super) unchanged: Vec<Vec<Extent>>,
}

/// Hashes all device memory and compares it with what was copied while the program ran, if anything was.
pub(super) fn validate(
    task: &mut Task<'_>,
    image: &ImageWriter,
    memory: Option<&mut Bulk>,
) -> Result<ValidationResult, Error> {
    let Some(bulk) = memory.filter(|_| task.strategy.copies_ahead()) else {
        task.strategy = task.strategy.without_memory();
        return Ok(ValidationResult { left: task.account.bulk_bytes, unchanged: Vec::new() });
    };
    task.clock.enter(Phase::Validate, None)?;
    if skipped("validate") {
        bulk.trust();
        return Ok(ValidationResult { left: bulk.left(), unchanged: Vec::new() });
    }
    check_and_detach(task, image, bulk)?;
    task.lay_out(bulk)?;
    let unchanged =
        (0..task.made.cuda_processes.len()).map(|program| bulk.unchanged(program)).collect();
    Ok(ValidationResult { left: bulk.left(), unchanged })
}

/// Hashes and compares. Meanwhile the programs are asked for the last time what they have launched, and detached
/// where that is early enough.
fn check_and_detach(
    task: &mut Task<'_>,
    image: &ImageWriter,
    bulk: &mut Bulk,
) -> Result<(), Error> {
    let early = task.strategy.detaches_early();
    let (cuda_processes, speculation) = (&mut task.made.cuda_processes, &mut task.speculation);
    let reserver = &task.reserver;
    let ask_and_detach = || {
        // Kernels that have written what was copied may have been launched after the last question, and
        // a program that is detached does not answer.
        match speculation.ask(cuda_processes, Duration::ZERO) {
            // A program that does not answer this would not answer the detach either.
            Err(error @ Error::Agent(AgentError::Broken { .. })) => return Err(error),
            Err(error) => {
                tracing::warn!(%error, "the programs do not report what they have launched");
            }
            Ok(()) => {}
        }
        if early { detach(cuda_processes, reserver) } else { Ok(()) }
    };
    let since = Instant::now();
    let (validated, at, detached) = std::thread::scope(|scope| {
        let detaching = scope.spawn(ask_and_detach);
        let validated = bulk.validate(image.chunks());
        let validated = fault("validated").map_err(Error::from).and(validated);
        let at = Instant::now();
        (validated, at, joined(detaching))
    });
    match validated {
        Ok((found, missed)) => {
            let found = Validation { ms: milliseconds(at.duration_since(since)), ..found };
            task.account.checked = Some(Checked { found, missed, at });
            detached
        }
        Err(error) => {
            if let Err(second) = detached {
                tracing::warn!(error = %second, "the programs could not be detached either");
            }
            Err(error)
        }
    }
}
