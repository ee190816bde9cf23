//! What becomes of the programs after the phases in which they were stopped: they go on, or are gone.

use std::time::{Duration, Instant};

use super::task::Task;
use crate::base::phase::Phase;
use crate::engine::cuda_process::{CudaProcess, resume_all};
use crate::engine::error::Error;
use crate::host::criu::CriuError;
use crate::host::process::ProcessInfo;

/// How long CRIU may take to end the processes after the commit.
const ENDING: Duration = Duration::from_secs(5);

/// Processes that do not go on, and why.
pub(super) type Lost = Vec<String>;

/// Brings all processes back to running, after `failure` if there was one. `before` is done before any of them goes
/// on.
pub(super) fn bring_back(
    task: &mut Task<'_>,
    failure: Option<&Error>,
    before: impl FnOnce(&mut [CudaProcess]),
) -> Lost {
    let injected = task.clock.enter(Phase::Resume, None);
    let cuda_processes = &mut task.made.cuda_processes;
    before(cuda_processes);
    let lost: Vec<(u32, Error)> = match failure {
        // Neither driver nor agent of a frozen process answers.
        Some(Error::Criu(CriuError::Stuck { pid })) => {
            cuda_processes.iter().map(|program| stuck(program, *pid)).collect()
        }
        _ => {
            let watchdog = Some(&mut task.made.watchdog);
            resume_all(cuda_processes, &task.drivers, watchdog, Some(&task.options.stop))
        }
    };
    if let Err(error) = injected {
        tracing::warn!(%error, "bringing the program back continues all the same");
    }
    lost.iter().map(|(pid, error)| format!("process {pid}: {error}")).collect()
}

/// A process that CRIU does not let go of.
fn stuck(program: &CudaProcess, criu: u32) -> (u32, Error) {
    (program.process.pid, CriuError::Stuck { pid: criu }.into())
}

/// Waits until all processes are gone, as CRIU has ended them; ends them if it has not.
pub(super) fn ensure_ended(task: &Task<'_>) {
    let since = Instant::now();
    while !task.processes().all(ProcessInfo::has_ended) {
        if since.elapsed() > ENDING {
            task.processes().for_each(ProcessInfo::kill);
        }
        if since.elapsed() > 2 * ENDING {
            tracing::warn!("a process of the program does not end, though it was killed");
            return;
        }
        std::thread::sleep(Duration::from_millis(1));
    }
}
