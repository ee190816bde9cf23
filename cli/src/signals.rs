//! Signals: they end a dump or restore in order, and are passed on to a restored program.

use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicI32, AtomicU32, Ordering};

use signal_hook::consts::{SIGCONT, SIGHUP, SIGINT, SIGQUIT, SIGTERM, SIGUSR1, SIGUSR2, SIGWINCH};
use signal_hook::iterator::SignalsInfo;
use signal_hook::iterator::exfiltrator::origin::WithOrigin;
use signal_hook::low_level::siginfo::Cause;

/// What signals do while gpucr works.
#[derive(Clone)]
pub(crate) struct SignalPlan {
    /// Set by the signals that ask for an end.
    pub(crate) stop: Arc<AtomicBool>,
    target: Arc<Target>,
}

/// The process that gets every signal, once there is one.
#[derive(Default)]
struct Target {
    pid: AtomicU32,
    /// The last signal that asked for an end before there was a process to get it.
    pending: AtomicI32,
}

impl SignalPlan {
    /// From here on the child `pid` gets the signals, and one that came too late to stop gpucr.
    pub(crate) fn pass_to(&self, pid: u32) {
        self.target.pid.store(pid, Ordering::SeqCst);
        let pending = self.target.pending.swap(0, Ordering::SeqCst);
        if pending != 0 {
            send(pid, pending);
        }
    }

    /// Signals are no longer passed on: the child is about to be waited for.
    pub(crate) fn keep(&self) {
        self.target.pid.store(0, Ordering::SeqCst);
    }
}

/// Starts to handle signals, on a thread of its own.
pub(crate) fn handle() -> io::Result<SignalPlan> {
    let plan =
        SignalPlan { stop: Arc::new(AtomicBool::new(false)), target: Arc::new(Target::default()) };
    let (stop, target) = (plan.stop.clone(), plan.target.clone());
    let all = [SIGHUP, SIGINT, SIGQUIT, SIGTERM, SIGUSR1, SIGUSR2, SIGWINCH, SIGCONT];
    let mut signals = SignalsInfo::<WithOrigin>::new(all)?;
    std::thread::spawn(move || {
        for origin in &mut signals {
            let signal = origin.signal;
            if [SIGHUP, SIGINT, SIGQUIT, SIGTERM].contains(&signal) {
                stop.store(true, Ordering::SeqCst);
                target.pending.store(signal, Ordering::SeqCst);
            }
            let pid = target.pid.load(Ordering::SeqCst);
            if pid == 0 {
                continue;
            }
            target.pending.store(0, Ordering::SeqCst);
            // The terminal sends its signals to the whole group, the program included.
            if !(matches!(origin.cause, Cause::Kernel) && in_own_group(pid)) {
                send(pid, signal);
            }
        }
    });
    Ok(plan)
}

fn in_own_group(pid: u32) -> bool {
    let pid = rustix::process::Pid::from_raw(pid as i32);
    rustix::process::getpgid(pid).is_ok_and(|group| group == rustix::process::getpgrp())
}

fn send(pid: u32, signal: i32) {
    // SAFETY: sends a signal to the child that this process has not waited for yet, so the pid is
    // still its own.
    unsafe { libc::kill(pid as i32, signal) };
}
