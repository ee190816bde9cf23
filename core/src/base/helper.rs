//! Processes that are this very program with a hidden subcommand: the watchdog, and the holders of warm images
//! and of shared memory.

use std::io;
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::os::unix::process::CommandExt;
use std::process::{Child, Command, Stdio};

use gpucr_wire::Connection;

/// The descriptor on which such a process finds its end of the conversation.
const CONVERSATION: i32 = 3;

/// Starts one, in a session of its own, so that what ends gpucr (a Ctrl-C, a SIGKILL) does not end it
/// too. It gets one end of a connection and nothing else that is open here; `name` is what `ps` shows.
///
/// # Errors
///
/// The process cannot be made. Nothing is left then.
pub(crate) fn start(name: &str, subcommand: &str) -> io::Result<(Connection, Child)> {
    let (ours, theirs) = UnixStream::pair()?;
    let mut command = Command::new("/proc/self/exe");
    command.arg0(name).arg(subcommand);
    let theirs_raw = theirs.as_raw_fd();
    // SAFETY: only async-signal-safe calls between fork and exec.
    unsafe {
        command.pre_exec(move || {
            rustix::process::setsid()?;
            if libc::dup2(theirs_raw, CONVERSATION) < 0 {
                return Err(io::Error::last_os_error());
            }
            if theirs_raw == CONVERSATION && libc::fcntl(CONVERSATION, libc::F_SETFD, 0) < 0 {
                return Err(io::Error::last_os_error());
            }
            // What a shell left open: a pipe, for example, whose end somebody waits for. Kernels
            // before 5.11 refuse this, and it stays open.
            let (rest, flags) = (CONVERSATION as u32 + 1, libc::CLOSE_RANGE_CLOEXEC);
            libc::syscall(libc::SYS_close_range, rest, u32::MAX, flags);
            Ok(())
        });
    }
    command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null());
    let child = command.spawn()?;
    Ok((Connection::new(ours), child))
}

/// The process's own end of the conversation; to be called once, at its start.
pub(crate) fn connection() -> Connection {
    // SAFETY: the descriptor was put there by `start`; a user who calls the hidden subcommand by hand gets
    // an error from the first read.
    Connection::new(UnixStream::from(unsafe { OwnedFd::from_raw_fd(CONVERSATION) }))
}
