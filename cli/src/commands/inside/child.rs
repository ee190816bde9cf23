//! The gpucr that was started in a namespace, seen from outside. Whoever has its user there may send it signals.

use std::io;
use std::process::{Child, ExitStatus};
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::process::{
    Pid, PidfdFlags, Signal, WaitId, WaitIdOptions, kill_process, pidfd_open, waitid,
};

use crate::commands::note;
use crate::signals::{SignalPlan, stop_self};

/// How often it is looked at.
const TICK: Timespec = Timespec { tv_sec: 0, tv_nsec: 100_000_000 };
/// How long it may take to come to its end after it was asked to. It gives up by itself much sooner.
const AT_LAST: Duration = Duration::from_secs(20);

/// Waits for it, and passes signals on to it. It is not left stopped, and is killed if it does not end when it is asked to.
pub(super) fn wait(child: &mut Child, signals: &SignalPlan) -> io::Result<ExitStatus> {
    // The terminal sends it to both.
    signals.keep_for_itself(libc::SIGTSTP);
    signals.pass_to(child.id());
    let (mut asked, mut is_told) = (None, false);
    let process = pidfd_open(Pid::from_child(child), PidfdFlags::empty())?;
    let status = loop {
        if let Some(status) = child.try_wait()? {
            break status;
        }
        // Not waited for yet: its pid is its own.
        let pid = Pid::from_child(child);
        if signals.take(libc::SIGTSTP) {
            let _ = kill_process(pid, Signal::STOP);
            stop_self();
            let _ = kill_process(pid, Signal::CONT);
            // That it stopped then is known.
            let _ = was_stopped(pid);
        }
        if was_stopped(pid) {
            if !std::mem::replace(&mut is_told, true) {
                note!(
                    "gpucr: the gpucr in the program's pid namespace was stopped by a signal; it goes on"
                );
            }
            let _ = kill_process(pid, Signal::CONT);
        }
        if signals.stop.load(Ordering::Relaxed)
            && asked.get_or_insert_with(Instant::now).elapsed() > AT_LAST
        {
            let _ = kill_process(pid, Signal::KILL);
        }
        // A signal may interrupt it.
        let _ = poll(&mut [PollFd::new(&process, PollFlags::IN)], Some(&TICK));
    };
    signals.keep();
    Ok(status)
}

/// Whether a child has been stopped since this was asked last.
fn was_stopped(pid: Pid) -> bool {
    let options = WaitIdOptions::STOPPED | WaitIdOptions::NOHANG;
    waitid(WaitId::Pid(pid), options).is_ok_and(|status| status.is_some_and(|it| it.stopped()))
}
