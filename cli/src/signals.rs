//! Signals: they end a command in order, and are passed on to a restored program.

use std::io;
use std::sync::atomic::{AtomicBool, AtomicI32, AtomicU32, AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use signal_hook::consts::{
    SIGCONT, SIGHUP, SIGINT, SIGQUIT, SIGTERM, SIGTSTP, SIGUSR1, SIGUSR2, SIGWINCH,
};
use signal_hook::iterator::Signals;
use signal_hook_registry::register_sigaction;

use rustix::process::{WaitId, WaitIdOptions, waitid};

use crate::failure::{self, CliError, FAILED};
use crate::terminal::without_stop;

/// How long a command may take to come to its end. What takes longer is out of its hands, such as a call of the
/// driver or a disk that hangs.
const AT_LAST: Duration = Duration::from_millis(1800);

/// The signals that ask for an end.
const ENDS: [i32; 4] = [SIGHUP, SIGINT, SIGQUIT, SIGTERM];

/// Signals that gpucr takes for itself: each is a bit, by its number.
#[derive(Default)]
struct Taken {
    /// Those that are.
    which: AtomicU64,
    /// Those that have come.
    come: AtomicU64,
}

/// What signals do while gpucr works.
#[derive(Clone)]
pub(crate) struct SignalPlan {
    /// Set by the signals that ask for an end.
    pub(crate) stop: Arc<AtomicBool>,
    target: Arc<Target>,
    taken: Arc<Taken>,
    at_last: Arc<Mutex<Option<AtLast>>>,
}

/// Settles what can be settled, and says how things are then.
type AtLast = Box<dyn FnOnce() -> CliError + Send>;

/// The process that gets every signal, once there is one.
#[derive(Default)]
struct Target {
    pid: AtomicU32,
    /// The last signal that asked for an end before there was a process to get it.
    pending: AtomicI32,
    /// Whether that process passes on what it gets, as the first one of a pid namespace.
    passes_on: AtomicBool,
    /// How often that process was asked to stop.
    suspended: AtomicU32,
    /// Whether [`SignalPlan::stand_in`] lets it go on. The handler of SIGCONT, which any thread may run, and late, does
    /// not do so then.
    is_stood_in_for: AtomicBool,
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

    /// The same with a child that passes signals on itself.
    pub(crate) fn pass_to_init(&self, pid: u32) {
        self.target.passes_on.store(true, Ordering::SeqCst);
        self.pass_to(pid);
    }

    /// If the command has not come to its end in time after it was asked to, this is done, and gpucr ends as if it
    /// had been killed.
    pub(crate) fn settle_at_last(&self, settle: impl FnOnce() -> String + Send + 'static) {
        self.end_at_last_with(|| CliError::new(FAILED, "interrupted").state(settle()));
    }

    /// The same, with all of what the command has to say then, and its exit status.
    pub(crate) fn end_at_last_with(&self, settle: impl FnOnce() -> CliError + Send + 'static) {
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
        let error = settle();
        let code = error.exit_code();
        let _ = failure::report(error);
        // SAFETY: ends this process. What a library would do at its exit is what may hang.
        unsafe { libc::_exit(code.into()) };
    }

    /// Stops gpucr whenever the child `pid` has stopped, and lets that go on when gpucr does, as if gpucr were the program:
    /// so a shell gets the terminal back, and gives it back. Ends with the child. To be called on a thread of its own.
    pub(crate) fn stand_in(&self, pid: u32) {
        let Some(raw) = rustix::process::Pid::from_raw(pid as i32) else { return };
        self.target.is_stood_in_for.store(true, Ordering::SeqCst);
        let mut seen = 0;
        loop {
            let options = WaitIdOptions::STOPPED | WaitIdOptions::EXITED | WaitIdOptions::NOWAIT;
            match rustix::io::retry_on_intr(|| waitid(WaitId::Pid(raw), options)) {
                Ok(Some(status)) if status.stopped() => {}
                _ => return,
            }
            // That it has stopped has been seen.
            let _ = waitid(WaitId::Pid(raw), WaitIdOptions::STOPPED | WaitIdOptions::NOHANG);
            let Ok(group) = rustix::process::getpgid(Some(raw)) else { return };
            let terminal = std::fs::File::options().read(true).write(true).open("/dev/tty").ok();
            let foreground =
                || terminal.as_ref().and_then(|terminal| rustix::termios::tcgetpgrp(terminal).ok());
            let had_terminal = foreground() == Some(group);
            let suspended = || self.target.suspended.load(Ordering::SeqCst);
            let before = suspended();
            // Somebody else has stopped the program, and there is no terminal at which gpucr would have to stand in for
            // it: whoever lets that go on need not know gpucr.
            if terminal.is_none() && before == seen {
                continue;
            }
            seen = before;
            stop_self();
            // A shell that lets gpucr go on in the foreground has given it the terminal, and the program needs it.
            let own = rustix::process::getpgrp();
            if let Some(terminal) = terminal.as_ref().filter(|_| had_terminal && group != own)
                && foreground() == Some(own)
            {
                give_terminal(terminal, group);
            }
            send_to_group(pid, SIGCONT);
            // Whoever has asked it to stop once more since then has not meant this.
            if suspended() != before {
                send_to_group(pid, libc::SIGSTOP);
            }
        }
    }

    /// This signal is not passed on from here on, but [noted](Self::take).
    pub(crate) fn keep_for_itself(&self, signal: i32) {
        self.taken.which.fetch_or(bit(signal), Ordering::SeqCst);
    }

    /// Whether a signal has come, since this was asked last, that is [noted](Self::keep_for_itself).
    pub(crate) fn take(&self, signal: i32) -> bool {
        self.taken.come.fetch_and(!bit(signal), Ordering::SeqCst) & bit(signal) != 0
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
    let plan = SignalPlan {
        stop: Arc::default(),
        target: Arc::default(),
        taken: Arc::default(),
        at_last: Arc::default(),
    };
    for signal in [SIGHUP, SIGINT, SIGQUIT, SIGTERM, SIGUSR1, SIGUSR2, SIGWINCH, SIGCONT, SIGTSTP] {
        let (stop, target, taken) = (plan.stop.clone(), plan.target.clone(), plan.taken.clone());
        // SAFETY: what the handler calls may be called in one: it works on atomics and makes plain system calls.
        unsafe {
            register_sigaction(signal, move |info| match taken.note(signal) {
                true => {}
                false => target.take(signal, info, &stop),
            })
        }?;
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

/// A signal among others.
fn bit(signal: i32) -> u64 {
    1u64.checked_shl(signal as u32).unwrap_or(0)
}

impl Taken {
    /// Notes a signal, if it is gpucr's own.
    fn note(&self, signal: i32) -> bool {
        let is_own = self.which.load(Ordering::SeqCst) & bit(signal) != 0;
        if is_own {
            self.come.fetch_or(bit(signal), Ordering::SeqCst);
        }
        is_own
    }
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
        if signal == SIGTSTP {
            return self.suspend(pid, info);
        }
        if pid == 0 || signal == SIGCONT && self.is_stood_in_for.load(Ordering::SeqCst) {
            return;
        }
        if self.pending.swap(0, Ordering::SeqCst) == 0 && ENDS.contains(&signal) {
            // Whoever has just named the process has sent it on.
            return;
        }
        // The terminal sends its signals to the whole group, the program included.
        if !(info.si_code == libc::SI_KERNEL && in_own_group(pid)) {
            match signal == SIGCONT && !self.passes_on.load(Ordering::SeqCst) {
                true => send_to_group(pid, signal),
                false => send(pid, signal),
            }
        }
    }

    /// Ctrl-Z: the program is to stand still, and gpucr with it. What the terminal sends does nothing to a program in a
    /// session of its own, so it gets SIGSTOP; once it stands still [`SignalPlan::stand_in`] stops gpucr too.
    fn suspend(&self, pid: u32, info: &libc::siginfo_t) {
        if pid == 0 {
            return stop_self();
        }
        if self.passes_on.load(Ordering::SeqCst) {
            send(pid, SIGTSTP);
            return stop_self();
        }
        if !(info.si_code == libc::SI_KERNEL && in_own_group(pid)) {
            self.suspended.fetch_add(1, Ordering::SeqCst);
            send_to_group(pid, libc::SIGSTOP);
        }
    }
}

/// Makes a process group the one in the foreground.
fn give_terminal(terminal: &std::fs::File, group: rustix::process::Pid) {
    // A process that has just lost the foreground would be stopped.
    without_stop(|| {
        let _ = rustix::termios::tcsetpgrp(terminal, group);
    });
}

/// Stops this process, all its threads, until it gets SIGCONT. This thread does nothing more before that: the signal is its
/// own. One for the process might reach another thread first, and this one go on for a while.
pub(crate) fn stop_self() {
    // SAFETY: sends a signal to this thread.
    unsafe { libc::raise(libc::SIGSTOP) };
}

/// Sends a signal to the process group of the child, which this process has not waited for; to the child alone if they
/// are in one group.
fn send_to_group(pid: u32, signal: i32) {
    // SAFETY: plain system calls with numbers; the pid is the child's own until it was waited for.
    unsafe {
        match libc::getpgid(pid as i32) {
            group if group > 1 && group != libc::getpgrp() => libc::kill(-group, signal),
            _ => libc::kill(pid as i32, signal),
        };
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
