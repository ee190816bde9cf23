//! Signals: they end a command in order, and are passed on to a restored program.

use std::io;
use std::sync::atomic::{AtomicBool, AtomicI32, AtomicU32, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use signal_hook::consts::{SIGCONT, SIGHUP, SIGINT, SIGQUIT, SIGTERM, SIGUSR1, SIGUSR2, SIGWINCH};
use signal_hook::iterator::SignalsInfo;
use signal_hook::iterator::exfiltrator::origin::WithOrigin;
use signal_hook::low_level::siginfo::Cause;

use crate::failure::{self, CliError, FAILED};

/// How long a command may take to come to its end. What takes longer is out of its hands, such as a call of the
/// driver or a disk that hangs.
const AT_LAST: Duration = Duration::from_millis(1800);

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

/// Starts to handle signals, on a thread of its own.
///
/// # Errors
/// The kernel or the process has no room for what passes signals on. Signals do then what they did before.
pub(crate) fn handle() -> io::Result<SignalPlan> {
    let plan = SignalPlan { stop: Arc::default(), target: Arc::default(), at_last: Arc::default() };
    let (stop, target) = (plan.stop.clone(), plan.target.clone());
    let waiting = plan.clone();
    let all = [SIGHUP, SIGINT, SIGQUIT, SIGTERM, SIGUSR1, SIGUSR2, SIGWINCH, SIGCONT];
    let mut signals = SignalsInfo::<WithOrigin>::new(all)?;
    std::thread::spawn(move || {
        for origin in &mut signals {
            let signal = origin.signal;
            if [SIGHUP, SIGINT, SIGQUIT, SIGTERM].contains(&signal) {
                if !stop.swap(true, Ordering::SeqCst) {
                    let waiting = waiting.clone();
                    std::thread::spawn(move || waiting.end_at_last());
                }
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
