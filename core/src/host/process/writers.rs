//! Threads that may be in the middle of a write to the memory of another process.
//!
//! process_vm_writev(2) takes hold of pages, and writes them a moment later, whoever has protected them in between. A
//! thread that is preempted just then does it when it runs again. Nothing tells from outside which pages somebody has
//! hold of; but a thread that has run for a while has let go of those that it had before.

use std::thread;
use std::time::{Duration, Instant};

use procfs::process::{Process, Task, all_processes};

use crate::base::stop::Stop;

/// The time between two looks.
const LOOK: Duration = Duration::from_millis(5);
/// A call takes hold of 4 MiB at most before it writes them. It has done so in this time of a processor, in the ticks
/// of 10 ms in which the kernel tells it.
const TICKS: u64 = 3;
/// `PF_KTHREAD` of the kernel's linux/sched.h, as `/proc/PID/stat` has it.
const IS_KERNELS: u32 = 0x0020_0000;

/// A thread that is somewhere in a call, or nowhere.
struct Busy {
    task: Task,
    /// When it was started, in ticks: another thread may come to have its number.
    started: u64,
    /// Ticks for which it had run.
    ran: u64,
}

/// Waits until every thread of the host that is running now, or waits for the kernel within process_vm_writev(2), has
/// run for long enough to be done with what it is doing, sleeps, or has ended. Ends early at `limit`, or when `stop`
/// is set: then that is not known.
pub(crate) fn wait_for_writers(limit: Duration, stop: &Stop) {
    let end = Instant::now() + limit;
    let mut busy = busy();
    loop {
        busy.retain(|busy| !busy.is_done());
        if busy.is_empty() || Instant::now() >= end || stop.is_set() {
            break;
        }
        thread::sleep(LOOK);
    }
    if let Some(first) = busy.first() {
        tracing::debug!(threads = busy.len(), tid = first.task.tid, "did not run meanwhile");
    }
}

fn busy() -> Vec<Busy> {
    let own = std::process::id() as i32;
    let processes = all_processes().into_iter().flatten().filter_map(Result::ok);
    let others = processes.filter(|process| process.pid != own);
    others.flat_map(|process| busy_of(&process)).collect()
}

/// Those of a process. None if it has ended, or is the kernel's.
fn busy_of(process: &Process) -> Vec<Busy> {
    let tasks = process.tasks().into_iter().flatten().filter_map(Result::ok);
    let busy = |task: Task| {
        let stat = task.stat().ok()?;
        let is_busy = stat.flags & IS_KERNELS == 0 && is_busy(&task, stat.state);
        is_busy.then(|| Busy { task, started: stat.starttime, ran: stat.utime + stat.stime })
    };
    tasks.filter_map(busy).collect()
}

/// Whether a thread in this state may be in the middle of a write. One that runs does not tell its call.
fn is_busy(task: &Task, state: char) -> bool {
    match state {
        'R' => true,
        'D' => std::fs::read_to_string(format!("/proc/{}/task/{}/syscall", task.pid, task.tid))
            .is_ok_and(|call| call.starts_with(&format!("{} ", libc::SYS_process_vm_writev))),
        _ => false,
    }
}

impl Busy {
    fn is_done(&self) -> bool {
        let Ok(stat) = self.task.stat() else { return true };
        stat.starttime != self.started
            || stat.utime + stat.stime >= self.ran + TICKS
            || !is_busy(&self.task, stat.state)
    }
}

#[cfg(test)]
mod tests {
    use std::process::Command;
    use std::sync::Arc;

    use super::*;

    const LONG: Duration = Duration::from_secs(300);

    fn ran(pid: u32) -> u64 {
        let stat = Process::new(pid as i32).unwrap().stat().unwrap();
        stat.utime + stat.stime
    }

    #[test]
    fn a_thread_that_runs_is_waited_for_until_it_has() {
        let mut child = Command::new("sh").args(["-c", "while :; do :; done"]).spawn().unwrap();
        // It is at work before it is looked at.
        while ran(child.id()) < 2 {
            thread::sleep(LOOK);
        }
        let before = ran(child.id());
        // On a machine with others it does not run all the time, but it never sleeps.
        wait_for_writers(LONG, &Stop::new(Arc::default()));
        let after = ran(child.id());
        child.kill().unwrap();
        child.wait().unwrap();
        assert!(after >= before + TICKS, "{before} {after}");
    }

    #[test]
    fn nobody_waits_longer_than_was_said_or_asked_for() {
        let mut child = Command::new("sh").args(["-c", "while :; do :; done"]).spawn().unwrap();
        let stopped = Stop::new(Arc::default());
        stopped.fail();
        for (limit, stop) in [(Duration::ZERO, Stop::new(Arc::default())), (LONG, stopped)] {
            let begun = Instant::now();
            wait_for_writers(limit, &stop);
            assert!(begun.elapsed() < LONG);
        }
        child.kill().unwrap();
        child.wait().unwrap();
    }
}
