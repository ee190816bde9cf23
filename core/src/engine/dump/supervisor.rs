//! Leads a dump through its phases, tries again, and says how it has ended.

use std::sync::Arc;
use std::sync::atomic::Ordering;

use super::phases::{self, Ended, GoneOn, Missed};
use super::report::{Options, Report};
use super::speculate::Blamed;
use super::task::{Account, Checked, Task};
use crate::base::format::{hex, milliseconds};
use crate::base::phase::Phase;
use crate::base::progress::Progress;
use crate::engine::error::{Error, Failure, Left};
use crate::host::process::AgentError;

/// Dumps a program.
///
/// # Errors
/// What has failed, and in which phase. See [`Failure::left`] for what holds then.
pub fn dump(options: &Options, progress: &Arc<dyn Progress>) -> Result<Report, Failure> {
    let (mut task, prepared) = phases::attach(options, progress)?;
    let saved = phases::stop_and_save(prepared, &mut task);
    let ended = match phases::go_on(&mut task, saved) {
        GoneOn::Ended(ended) => ended,
        GoneOn::Missed(missed) => once_more(*missed, &mut task),
    };
    let is_gone = !ended.resume;
    let farewell = task.farewell.take();
    let outcome = settle(task, ended);
    if let Some(farewell) = farewell {
        farewell.say(is_gone);
    }
    outcome
}

/// Only asks the other side of a migration whether the program could go there.
///
/// # Errors
/// It could not: what is in the way, here or there. Nothing was changed.
pub fn offer(options: &Options, progress: &Arc<dyn Progress>) -> Result<(), Failure> {
    phases::offer(options, progress)
}

/// Makes the image again. Program and host are as they should be: a guess about the program was wrong. So it is stopped
/// a second time, and does not go on then before the image has all that it could write. This is the only time that a
/// dump is tried again.
fn once_more(missed: Missed, task: &mut Task<'_>) -> Ended {
    let prepared = phases::again(missed, task);
    let saved = prepared.and_then(|prepared| phases::stop_and_save(prepared, task));
    match phases::go_on(task, saved) {
        GoneOn::Ended(ended) => ended,
        GoneOn::Missed(missed) => missed.give_up(task),
    }
}

/// The error, or that the process has ended whose agent or driver does not answer because of that.
fn unless_ended(task: &Task<'_>, error: Error) -> Error {
    let (Error::Agent(AgentError::Broken { pid, .. }) | Error::Process { pid, .. }) = error else {
        return error;
    };
    let has_ended = task.processes().any(|process| process.pid == pid && process.is_ending());
    if has_ended { Error::Changed { pid, what: "it has ended".to_owned() } } else { error }
}

/// Lets the watchdog go, and says how the dump has ended.
fn settle(mut task: Task<'_>, ended: Ended) -> Result<Report, Failure> {
    task.clock.end();
    let Ended { image, resume, lost } = ended;
    // An image that was not committed is removed here, before anything is reported.
    let image = image.map_err(|(phase, setback)| (phase, unless_ended(&task, setback.error)));
    let root = task.options.pid;
    let has_ended = resume && task.processes().any(|p| p.pid == root && p.has_ended());
    if lost.is_empty() {
        task.made.watchdog.done();
    } else {
        // The watchdog tries for longer than gpucr has.
        drop(task.made.watchdog);
    }
    // To find the kernels to blame takes time, so this waits until the program runs again.
    if let Some(Checked { found, missed, at }) = &mut task.account.checked {
        found.misspeculations =
            task.speculation.blame(missed, &task.made.cuda_processes, Blamed::Writers);
        task.options.timeline.mark(*at, &found.misspeculations);
    }
    let left = match &image {
        Ok(_) => Left::CompleteButLost(lost.clone()),
        Err(_) if !lost.is_empty() => Left::Lost(lost.clone()),
        Err(_) if has_ended => Left::Ended,
        Err(_) => Left::RolledBack,
    };
    let complete = match image {
        Ok(complete) if lost.is_empty() => complete,
        Ok(_) => {
            let error = Box::new(Error::NotResumed(lost.join("; ")));
            return Err(Failure { phase: Phase::Resume, error, left });
        }
        Err((phase, error)) => {
            let error = Box::new(match error {
                _ if left == Left::Ended => Error::ProgramEnded,
                Error::CopyIncomplete if task.options.stop.load(Ordering::Relaxed) => {
                    Error::Interrupted
                }
                error => error,
            });
            return Err(Failure { phase, error, left });
        }
    };
    let Account {
        bulk_bytes,
        precopied,
        checked,
        at_sync,
        let_through,
        interrupted,
        shadowed,
        deferral,
    } = task.account;
    let committed = complete.commit.image;
    Ok(Report {
        image: task.options.target.path(),
        id: hex(&committed.id),
        pid: root,
        protocol: task.strategy.protocol(),
        copied: if bulk_bytes == 0 { "driver" } else { complete.by },
        at_sync,
        left_running: resume && !has_ended,
        bulk_bytes,
        stored_bytes: committed.stored_bytes,
        precopied_chunks: precopied,
        validation: checked.map(|checked| checked.found),
        private_bytes: task.plan.private_bytes(),
        host: task.host.report(),
        let_through,
        interrupted,
        shadowed_bytes: shadowed,
        deferral,
        new_bytes: committed.new_bytes,
        unneeded_bytes: committed.unneeded_bytes,
        stopped_ms: milliseconds(task.made.standstill.length()),
        total_ms: milliseconds(task.clock.total()),
        phases: task.clock.times().to_vec(),
    })
}
