//! Signals: they end a command in order, and are passed on to a restored program.

use std::io;
use std::sync::atomic::{AtomicBool, AtomicI32, AtomicU32, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use signal_hook::consts::{SIGCONT, SIGHUP, SIGINT, SIGQUIT, SIGTERM, SIGUSR1, SIGUSR2, SIGWINCH};
use signal_hook::iterator::Signals;
use signal_hook_registry::register_sigaction;

use crate::failure::{self, CliError, FAILED};

/// How long a command may take to come to its end. What takes longer is out of its hands, such as a call of the
/// driver or a disk that hangs.
const AT_LAST: Duration = Duration::from_millis(1800);

/// The signals that ask for an end.
const ENDS: [i32; 4] = [SIGHUP, SIGINT, SIGQUIT, SIGTERM];

/// What signals do while gpucr works.
#[derive(Clone)]
pub(crate) struct SignalPlan {
    /// Set by the signals that ask for an end.
    pub(crate) stop: Arc<AtomicBool>,
    target: Arc<Target>,
    at_last: Arc<Mutex<Option<AtLast>>>,
}

/// Settles what can be settled, and says how things are then.
type AtLast = Box<dyn FnOnce() -> String + Send>;

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

    /// If the command has not come to its end in time after it was asked to, this is done, and gpucr ends as if it
    /// had been killed.
    pub(crate) fn settle_at_last(&self, settle: impl FnOnce() -> String + Send + 'static) {
        if let Ok(mut at_last) = self.at_last.lock() {
            *at_last = Some(Box::new(settle));
        }
    }

    /// Waits for that time to be over.
    fn end_at_last(&self) {
        std::thread::sleep(AT_LAST);
        // What signals are for now is the program's.
        let settle = self.at_last.lock().ok().and_then(|mut at_last| at_last.take());
        let (0, Some(settle)) = (self.target.pid.load(Ordering::SeqCst), settle) else { return };
        let state = settle();
        let _ = failure::report(CliError::new(FAILED, "interrupted").state(state));
        // SAFETY: ends this process. What a library would do at its exit is what may hang.
        unsafe { libc::_exit(FAILED.into()) };
    }

    /// Signals are no longer passed on: the child is about to be waited for.
    pub(crate) fn keep(&self) {
        self.target.pid.store(0, Ordering::SeqCst);
    }
}

/// Starts to handle signals.
///
/// # Errors
/// The kernel or the process has no room for what passes signals on. Signals do then what they did before.
pub(crate) fn handle() -> io::Result<SignalPlan> {
    let plan = SignalPlan { stop: Arc::default(), target: Arc::default(), at_last: Arc::default() };
    for signal in [SIGHUP, SIGINT, SIGQUIT, SIGTERM, SIGUSR1, SIGUSR2, SIGWINCH, SIGCONT] {
        let (stop, target) = (plan.stop.clone(), plan.target.clone());
        // SAFETY: what the handler calls may be called in one: it works on atomics and makes plain system calls.
        unsafe { register_sigaction(signal, move |info| target.take(signal, info, &stop)) }?;
    }
    let mut ends = Signals::new(ENDS)?;
    let waiting = plan.clone();
    std::thread::spawn(move || {
        if ends.forever().next().is_some() {
            waiting.end_at_last();
        }
    });
    Ok(plan)
}

impl Target {
    /// What the handler of a signal does. The process has the signal when it returns: what was left to a thread would
    /// be lost if this process became another program before that thread got on.
    fn take(&self, signal: i32, info: &libc::siginfo_t, stop: &AtomicBool) {
        if ENDS.contains(&signal) {
            stop.store(true, Ordering::SeqCst);
            self.pending.store(signal, Ordering::SeqCst);
        }
        let pid = self.pid.load(Ordering::SeqCst);
        if pid == 0 {
            return;
        }
        if self.pending.swap(0, Ordering::SeqCst) == 0 && ENDS.contains(&signal) {
            // Whoever has just named the process has sent it on.
            return;
        }
        // The terminal sends its signals to the whole group, the program included.
        if !(info.si_code == libc::SI_KERNEL && in_own_group(pid)) {
            send(pid, signal);
        }
    }
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
