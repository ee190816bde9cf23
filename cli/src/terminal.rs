//! The terminal at which a program is restored. CRIU makes it as it was at the dump, but it is that of a user who goes on
//! with it.

use std::fs::File;
use std::io::{self, IsTerminal};
use std::os::fd::AsFd;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Mutex, PoisonError};

use rustix::termios::{OptionalActions, Termios, Winsize};

/// The controlling terminal of this process, and how it was.
pub(crate) struct Kept {
    terminal: File,
    modes: Termios,
    size: Mutex<Winsize>,
    had_foreground: bool,
    /// Whether the restore has changed it: then it is the program's too.
    was_changed: AtomicBool,
}

impl Kept {
    /// How the first of the standard streams that is a terminal is now; none if none is one, or it is that of another
    /// session.
    pub(crate) fn now() -> Option<Self> {
        fn of(stream: &(impl AsFd + IsTerminal)) -> Option<File> {
            let fd = stream.is_terminal().then(|| stream.as_fd().try_clone_to_owned())?;
            fd.ok().map(File::from)
        }
        let (input, error, output) = (io::stdin(), io::stderr(), io::stdout());
        let terminal = of(&input).or_else(|| of(&error)).or_else(|| of(&output))?;
        let foreground = rustix::termios::tcgetpgrp(&terminal).ok()?;
        Some(Self {
            modes: rustix::termios::tcgetattr(&terminal).ok()?,
            size: Mutex::new(rustix::termios::tcgetwinsize(&terminal).ok()?),
            had_foreground: foreground == rustix::process::getpgrp(),
            was_changed: AtomicBool::new(false),
            terminal,
        })
    }

    /// The program is restored again, after it had run here: the size is what it is by now.
    pub(crate) fn again(&self) {
        if let Ok(now) = rustix::termios::tcgetwinsize(&self.terminal) {
            *self.size.lock().unwrap_or_else(PoisonError::into_inner) = now;
        }
    }

    /// The restore has made of it what it does, or has failed: gives the terminal its size again. The kernel tells the
    /// program of it (SIGWINCH).
    pub(crate) fn restored(&self) {
        let size = *self.size.lock().unwrap_or_else(PoisonError::into_inner);
        if rustix::termios::tcgetwinsize(&self.terminal).is_ok_and(|now| now != size) {
            self.was_changed.store(true, Ordering::SeqCst);
            let _ = rustix::termios::tcsetwinsize(&self.terminal, size);
        }
        let modes = rustix::termios::tcgetattr(&self.terminal);
        if modes.is_ok_and(|now| told(&now) != told(&self.modes)) {
            self.was_changed.store(true, Ordering::SeqCst);
        }
        if self.had_foreground && !self.has_foreground() {
            self.was_changed.store(true, Ordering::SeqCst);
        }
    }

    /// Gives it its modes again, and its foreground to this process, as a shell does when a program has ended. Nothing is done
    /// if the restore has changed nothing, or another program has the terminal by now.
    pub(crate) fn give_back(&self) {
        let Ok(foreground) = rustix::termios::tcgetpgrp(&self.terminal) else { return };
        let is_another = foreground != rustix::process::getpgrp()
            && rustix::process::test_kill_process_group(foreground).is_ok();
        if is_another || !self.was_changed.load(Ordering::SeqCst) {
            return;
        }
        without_stop(|| {
            if self.had_foreground && !self.has_foreground() {
                let own = rustix::process::getpgrp();
                let _ = rustix::termios::tcsetpgrp(&self.terminal, own);
            }
            let now = OptionalActions::Now;
            let _ = rustix::termios::tcsetattr(&self.terminal, now, &self.modes);
        });
    }

    fn has_foreground(&self) -> bool {
        let foreground = rustix::termios::tcgetpgrp(&self.terminal);
        foreground == Ok(rustix::process::getpgrp())
    }
}

/// What there is to compare of a terminal's modes.
fn told(modes: &Termios) -> [u32; 4] {
    [
        modes.input_modes.bits(),
        modes.output_modes.bits(),
        modes.control_modes.bits(),
        modes.local_modes.bits(),
    ]
}

/// Does something to a terminal that stops processes in its background (SIGTTOU), of which this one may be.
pub(crate) fn without_stop(work: impl FnOnce()) {
    // SAFETY: sets are made and used; the mask is this thread's, and is put back.
    unsafe {
        let (mut set, mut before) = (std::mem::zeroed(), std::mem::zeroed());
        libc::sigemptyset(&mut set);
        libc::sigaddset(&mut set, libc::SIGTTOU);
        libc::pthread_sigmask(libc::SIG_BLOCK, &set, &mut before);
        work();
        libc::pthread_sigmask(libc::SIG_SETMASK, &before, std::ptr::null_mut());
    }
}
