//! Descriptors that gpucr was started with, and those that it starts another gpucr with.

use std::io;
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};
use std::os::unix::process::CommandExt;
use std::process::Command;

/// Takes a descriptor over whose number was given to gpucr. This can be done once for each.
///
/// # Errors
/// It is not open.
pub(crate) fn take(number: i32) -> io::Result<OwnedFd> {
    // SAFETY: only looks whether it is open, and sets a flag: nobody whom gpucr starts is to keep it open.
    if unsafe { libc::fcntl(number, libc::F_SETFD, libc::FD_CLOEXEC) } < 0 {
        return Err(io::Error::last_os_error());
    }
    // SAFETY: the user has given it to gpucr for this, and nothing else here knows it.
    Ok(unsafe { OwnedFd::from_raw_fd(number) })
}

/// Lets descriptors through to a command that is to be started, under their numbers. They have to be open until then.
pub(crate) fn let_through(command: &mut Command, descriptors: &[&impl AsRawFd]) {
    let numbers: Vec<i32> = descriptors.iter().map(|fd| fd.as_raw_fd()).collect();
    // SAFETY: fcntl is async-signal-safe.
    unsafe {
        command.pre_exec(move || {
            numbers.iter().try_for_each(|fd| match libc::fcntl(*fd, libc::F_SETFD, 0) {
                0 => Ok(()),
                _ => Err(io::Error::last_os_error()),
            })
        });
    }
}
