//! The phase in which CRIU saves the processes.

use std::io;
use std::os::fd::{AsFd, BorrowedFd};

use super::describe;
use super::setback::Setback;
use super::task::Task;
use crate::base::faults::fault;
use crate::base::limits;
use crate::base::scratch;
use crate::engine::cuda_process::CudaProcess;
use crate::engine::error::Error;
use crate::host::criu::{CriuError, DumpError, DumpWorker, Hint, LeftMemory, settle_links};
use crate::host::process::{ProcessInfo, mapped_privately, queue};
use crate::image::ImageWriter;

/// Set to anything, it has CRIU write the private memory of programs, for tests and measurements.
const ENV_CRIU_WRITES: &str = "GPUCR_CRIU_WRITES_MEMORY";
/// Bytes that CRIU, which takes hold of memory that it leaves in processes, holds with one pipe; more if it has
/// `CAP_SYS_RESOURCE`.
const PIPE: u64 = 1 << 20;
/// Bytes that CRIU copies in next to no time.
const LITTLE: u64 = 64 << 20;
/// How often CRIU is asked while strangers are in its way.
const ATTEMPTS: usize = 5;

/// What is done once while CRIU holds the processes frozen and has saved them.
pub(super) trait Window: Sized {
    /// What the window has made.
    type Saved;

    /// The image that CRIU's files belong to.
    fn image(&self) -> &ImageWriter;

    /// Does the work of the window, in which private memory is `left` in the processes if CRIU has not written it. CRIU
    /// goes on with the processes only if it succeeds.
    fn commit(self, task: &mut Task<'_>, left: Option<LeftMemory>) -> Result<Self::Saved, Setback>;

    /// Ends a window that is not reached, because of this error.
    fn give_up(self, error: Error) -> Setback;
}

/// How far the window has come.
enum WindowState<W: Window> {
    /// CRIU has not called back.
    Before(W),
    /// It was not reached: memory that was left in the processes cannot be read.
    Unreadable(W, io::Error),
    /// What was to be done has failed.
    Failed,
    /// The work of the window is done.
    After(W::Saved),
}

/// Lets CRIU freeze and save the processes, and does what is to be done in the window before it lets go of them:
/// it ends them only if that has succeeded.
pub(super) fn freeze<W: Window>(
    task: &mut Task<'_>,
    mut criu: DumpWorker,
    mut window: W,
) -> Result<W::Saved, Setback> {
    let _places = keep_strangers_out(&task.made.cuda_processes);
    let mut attempt = 1;
    let mut leave_memory = std::env::var_os(ENV_CRIU_WRITES).is_none() && can_leave_memory(task);
    loop {
        match ask(task, criu, window, leave_memory)? {
            Asked::Done(saved) => return Ok(saved),
            Asked::NotLeft(unopened, error) => {
                tracing::warn!(%error, "CRIU cannot leave memory in the program; it is asked to write all");
                (window, leave_memory) = (unopened, false);
            }
            Asked::Refused(unopened, error) => {
                if attempt == ATTEMPTS || !is_of_strangers(task, &error, attempt) {
                    return Err(unopened.give_up(error.into()));
                }
                tracing::warn!(%error, "another process has connected to the program; trying CRIU again");
                window = unopened;
                attempt += 1;
            }
        }
        let cleared = window.image().clear_staging().map_err(Error::from);
        criu = match cleared.and_then(|()| task.plan.start_criu()) {
            Ok(criu) => criu,
            Err(error) => return Err(window.give_up(error)),
        };
    }
}

/// Whether CRIU is to leave the memory of all processes where it is: it has descriptors enough for that, where it is
/// asked twice if this is wrong, and has not more to copy for it than all of that memory.
fn can_leave_memory(task: &Task<'_>) -> bool {
    let pages = |process: &ProcessInfo| {
        let status = procfs::process::Process::new(process.pid as i32).and_then(|it| it.status());
        let status = status.ok()?;
        Some((status.rssanon? + status.vmswap.unwrap_or(0)) * 1024)
    };
    let there: Vec<u64> = task.processes().filter_map(pages).collect();
    let mapped = |process: &ProcessInfo| mapped_privately(process.pid as i32).ok();
    let lists = task.processes().filter_map(mapped).map(|mapped| task.plan.criu.list_bytes(mapped));
    let (lists, all): (u64, u64) = (lists.sum(), there.iter().sum());
    if lists > all.max(LITTLE) {
        tracing::info!(lists, all, "CRIU is asked to write all memory: its lists are longer");
        return false;
    }
    if !task.plan.criu.takes_hold_of_pages() {
        return true;
    }
    let pipes: u64 = there.iter().map(|bytes| bytes.div_ceil(PIPE)).sum();
    // Each has two ends.
    limits::make_room_for(2 * pipes)
        .inspect_err(|error| {
            tracing::info!(pipes, limit = error.limit, "CRIU is asked to write all memory")
        })
        .is_ok()
}

/// What has come of one request.
enum Asked<W: Window> {
    Done(W::Saved),
    /// CRIU, which was to leave memory in the processes, has failed because of that, or that memory cannot be read. The
    /// processes run on.
    NotLeft(W, Error),
    /// CRIU has failed before the window, and the processes run on.
    Refused(W, CriuError),
}

fn ask<W: Window>(
    task: &mut Task<'_>,
    criu: DumpWorker,
    window: W,
    leave_memory: bool,
) -> Result<Asked<W>, Setback> {
    let staging = window.image().staging_dir();
    let staging = std::fs::File::open(&staging)
        .map_err(|source| Error::Io { what: format!("cannot open {}", staging.display()), source });
    // CRIU's log goes elsewhere: on a full disk it is what tells that the disk is full.
    let opened = staging.and_then(|staging| Ok((staging, scratch::file_system()?)));
    let (staging, log) = match opened {
        Ok(opened) => opened,
        Err(error) => return Err(window.give_up(error)),
    };
    let mut options = describe::criu_options(task.options, &task.plan, staging.as_fd());
    options.work = Some(log.as_fd());
    options.leave_memory = leave_memory;
    let pid = options.pid;
    let mut state = WindowState::Before(window);
    let asked = criu.dump(&options, &mut || {
        // CRIU asks once. Were it to ask again it would get the same answer.
        state = match std::mem::replace(&mut state, WindowState::Failed) {
            WindowState::Before(window) => {
                match settle_links(staging.as_fd(), pid) {
                    Ok(names) => task.plan.renamed = names,
                    Err(source) => {
                        let what = "cannot save a file that the program has open".to_owned();
                        return Err(Some(window.give_up(Error::Io { what, source })));
                    }
                }
                match leave_memory.then(|| left_memory(task, staging.as_fd())).transpose() {
                    Ok(left) => WindowState::After(window.commit(task, left).map_err(Some)?),
                    Err(error) => WindowState::Unreadable(window, error),
                }
            }
            before => before,
        };
        if matches!(state, WindowState::After(_)) { Ok(()) } else { Err(None) }
    });
    match (asked, state) {
        (Err(DumpError::Callback(Some(setback))), _) => Err(setback),
        (_, WindowState::Unreadable(window, source)) => {
            let what = "cannot read memory of the program".to_owned();
            Ok(Asked::NotLeft(window, Error::Io { what, source }))
        }
        (Ok(()), WindowState::After(saved)) => Ok(Asked::Done(saved)),
        (Err(DumpError::Criu { error, .. }), WindowState::After(saved)) => {
            // The image is complete; the processes are seen to at the end.
            tracing::warn!(%error, "CRIU failed after the commit");
            if !task.options.leave_running {
                task.processes().for_each(ProcessInfo::kill);
            }
            Ok(Asked::Done(saved))
        }
        (Err(DumpError::Criu { error, .. }), WindowState::Before(window))
            if leave_memory && error.has(Hint::Pipes) =>
        {
            Ok(Asked::NotLeft(window, error.into()))
        }
        (Err(DumpError::Criu { error, .. }), WindowState::Before(window)) => {
            Ok(Asked::Refused(window, error))
        }
        (_, WindowState::Before(window)) => Err(window.give_up(Error::CopyIncomplete)),
        (Err(DumpError::Callback(None)), WindowState::After(_)) | (_, WindowState::Failed) => {
            Err(Setback::new(Error::CopyIncomplete, ()))
        }
    }
}

/// What CRIU has left in the processes whose files are in `images`.
fn left_memory(task: &Task<'_>, images: BorrowedFd<'_>) -> io::Result<LeftMemory> {
    fault("left-memory").map_err(io::Error::other)?;
    LeftMemory::of(images, &task.options.stop)
}

/// Whether CRIU has failed because a stranger was just connecting to a socket of the program, such as an agent's,
/// to which anybody on the host may. That is over a moment later.
fn is_of_strangers(task: &Task<'_>, error: &CriuError, attempt: usize) -> bool {
    // It may be accepted already, and then differs from the program's own connections in that it does not last.
    let was_accepted = error.has(Hint::ExtUnixSk) && !task.options.criu.ext_unix_sk;
    error.has(Hint::InFlight) || was_accepted && attempt == 1
}

/// Takes the places of strangers in the queues of the agents.
fn keep_strangers_out(cuda_processes: &[CudaProcess]) -> Vec<queue::Place> {
    let take = |process: &ProcessInfo| {
        queue::take(process).unwrap_or_else(|error| {
            tracing::warn!(%error, pid = process.pid, "other processes may be waiting for its agent");
            None
        })
    };
    let with_agent = cuda_processes.iter().filter(|program| program.has_agent);
    with_agent.filter_map(|program| take(&program.process)).collect()
}
