//! The terminal at which a program is restored. CRIU makes it as it was at the dump, but it is that of a user who goes on
//! with it.

use std::fs::File;
use std::io::{self, IsTerminal};
use std::os::fd::AsFd;

use rustix::termios::{OptionalActions, Termios, Winsize};

/// A terminal, and how it was.
pub(crate) struct Kept {
    terminal: File,
    modes: Termios,
    size: Winsize,
}

impl Kept {
    /// How the first of the standard streams that is a terminal is now; none if none is one.
    pub(crate) fn now() -> Option<Self> {
        fn of(stream: &(impl AsFd + IsTerminal)) -> Option<File> {
            let fd = stream.is_terminal().then(|| stream.as_fd().try_clone_to_owned())?;
            fd.ok().map(File::from)
        }
        let (input, error, output) = (io::stdin(), io::stderr(), io::stdout());
        let terminal = of(&input).or_else(|| of(&error)).or_else(|| of(&output))?;
        let modes = rustix::termios::tcgetattr(&terminal).ok()?;
        let size = rustix::termios::tcgetwinsize(&terminal).ok()?;
        Some(Self { terminal, modes, size })
    }

    /// Gives it its size again. The kernel tells the program of it (SIGWINCH).
    pub(crate) fn set_size(&self) {
        let now = rustix::termios::tcgetwinsize(&self.terminal);
        if now.is_ok_and(|now| now != self.size) {
            let _ = rustix::termios::tcsetwinsize(&self.terminal, self.size);
        }
    }

    /// Gives it its modes again, as a shell does when a program has ended in the foreground. If another program has it by
    /// now, they are that one's.
    pub(crate) fn set_modes(&self) {
        let Ok(foreground) = rustix::termios::tcgetpgrp(&self.terminal) else { return };
        let is_another = foreground != rustix::process::getpgrp()
            && rustix::process::test_kill_process_group(foreground).is_ok();
        if !is_another {
            without_stop(|| {
                let _ =
                    rustix::termios::tcsetattr(&self.terminal, OptionalActions::Now, &self.modes);
            });
        }
    }
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
