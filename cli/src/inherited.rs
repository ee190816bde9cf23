//! Descriptors that gpucr was started with.

use std::io;
use std::os::fd::{FromRawFd, OwnedFd};

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
