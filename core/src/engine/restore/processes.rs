//! The processes that a restore has made: their ends, expected or not.

use std::time::{Duration, Instant};

use rustix::process::{Pid, WaitId, WaitIdOptions, WaitIdStatus, WaitOptions, waitid, waitpid};

use crate::engine::error::Error;
use crate::host::process::tree::raw_pid;
use crate::host::process::{AgentError, LAST_MOMENTS, ProcessInfo};

/// How long a process that has ended may take until its parent has waited for it.
pub(super) const REAPING: Duration = Duration::from_secs(3);

/// Waits for the end of processes that were killed, as far as they are children of this one. The root
/// comes first: what it leaves behind becomes a child if this is the first process of a pid namespace.
pub(super) fn wait_for(pids: &[u32]) {
    // The wait has an end: the process that was to kill them may have died before it could.
    let deadline = Instant::now() + REAPING;
    for pid in pids.iter().filter_map(|pid| raw_pid(*pid)) {
        while matches!(waitpid(Some(pid), WaitOptions::NOHANG), Ok(None))
            && Instant::now() < deadline
        {
            std::thread::sleep(Duration::from_millis(2));
        }
    }
}

/// Waits until a child has ended. Its status stays to be asked for. Of a process that is no child nothing can be said.
pub(super) fn wait_until_ended(pid: u32) {
    let Some(pid) = raw_pid(pid) else { return };
    let ended = WaitIdOptions::EXITED | WaitIdOptions::NOWAIT;
    if let Err(error) = rustix::io::retry_on_intr(|| waitid(WaitId::Pid(pid), ended)) {
        tracing::debug!(%error, "the end of the program cannot be waited for");
    }
}

/// What an agent has answered; `None` if its process was at its end before that. That is no failure: the host
/// side of a program runs while its memory is brought back, and may have had nothing else to do any more.
pub(super) fn unless_ended<T>(
    process: &ProcessInfo,
    answer: Result<T, impl Into<Error>>,
) -> Result<Option<T>, Error> {
    match answer.map_err(Into::into) {
        Err(error @ Error::Agent(AgentError::Broken { .. } | AgentError::Absent { .. }))
            if process.ends_within(LAST_MOMENTS) =>
        {
            tracing::debug!(%error, pid = process.pid, "it has ended");
            Ok(None)
        }
        answer => answer.map(Some),
    }
}

/// Whether a child, which has ended, did so with exit status 0, or was killed. It is not waited for.
pub(super) fn ended_well(pid: u32) -> bool {
    let Some(pid) = raw_pid(pid) else { return false };
    was_killed(pid) || status(pid).is_some_and(|status| status.exit_status() == Some(0))
}

/// Whether a child has ended because another process has killed it. It is not waited for.
pub(super) fn was_killed(pid: Pid) -> bool {
    /// After an error of the device it would be another signal, or none.
    const KILLED: [i32; 4] = [libc::SIGHUP, libc::SIGINT, libc::SIGKILL, libc::SIGTERM];
    let signal = status(pid).and_then(|status| status.terminating_signal());
    signal.is_some_and(|signal| KILLED.contains(&signal))
}

fn status(pid: Pid) -> Option<WaitIdStatus> {
    let options = WaitIdOptions::EXITED | WaitIdOptions::NOWAIT | WaitIdOptions::NOHANG;
    waitid(WaitId::Pid(pid), options).ok().flatten()
}
