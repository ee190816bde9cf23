//! Requests of a checkpointer that wants to see, from outside, which host memory the program writes.
//!
//! The kernel makes a userfaultfd only for the process that asks for it. So the agent asks; the rest is done outside.
//! It asks for one that handles no fault of the kernel's, as any program may: in asynchronous mode none is handled by
//! anybody, and the program gets nothing that it could not have by itself.

use std::io::Write;
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};
use std::sync::atomic::{AtomicI32, Ordering};

use gpucr_wire::table::Range;
use gpucr_wire::{Connection, Reply};

use super::state::Next;
use crate::log::log;
use crate::state::memory::Failure;
use crate::usage;

/// `UFFD_USER_MODE_ONLY` of linux/userfaultfd.h.
const USER_MODE_ONLY: i32 = 1;

/// The number of a descriptor that is here for a moment; none is -1. A child of a fork closes it: it would keep the
/// parent's memory watched, and CRIU saves no such descriptor.
static MADE: AtomicI32 = AtomicI32::new(-1);

/// A descriptor that the child of a fork closes.
struct Passing {
    fd: Option<OwnedFd>,
}

impl Passing {
    fn new(fd: OwnedFd) -> Self {
        MADE.store(fd.as_raw_fd(), Ordering::Release);
        Self { fd: Some(fd) }
    }

    fn get(&self) -> &OwnedFd {
        self.fd.as_ref().expect("taken only by drop")
    }
}

impl Drop for Passing {
    fn drop(&mut self) {
        drop(self.fd.take());
        MADE.store(-1, Ordering::Release);
    }
}

/// Makes a userfaultfd and sends it.
pub(super) fn track(connection: &mut Connection) -> Result<Next, Failure> {
    usage::remember_pinned(true);
    let made =
        make().map_err(|error| Failure::other(format!("userfaultfd cannot be made: {error}")))?;
    let made = Passing::new(made);
    let sent = connection.send(&Reply::Done {}).and_then(|()| connection.send_fds(&[made.get()]));
    // There is nobody to tell: the next receive says that the connection is broken.
    sent.unwrap_or_else(|error| log!("cannot send a userfaultfd: {error}"));
    Ok(Next::Sent)
}

fn make() -> std::io::Result<OwnedFd> {
    let flags = libc::O_CLOEXEC | libc::O_NONBLOCK | USER_MODE_ONLY;
    // SAFETY: a plain number.
    let made = unsafe { libc::syscall(libc::SYS_userfaultfd, flags) };
    if made < 0 {
        return Err(std::io::Error::last_os_error());
    }
    // SAFETY: the kernel has just made it, and nobody else knows it.
    Ok(unsafe { OwnedFd::from_raw_fd(made as i32) })
}

/// Tells what devices may have written.
pub(super) fn pinned() -> Result<Next, Failure> {
    let pinned = usage::remembered_pinned().ok_or_else(|| Failure::other("nothing is tracked"))?;
    let ranges = pinned.into_iter().map(|(address, size)| Range { address, size }).collect();
    Ok(Next::Reply(Reply::Ranges { ranges }))
}

/// In the child of a fork, which has no agent: closes what was passing through.
pub(super) fn reset() {
    let fd = MADE.swap(-1, Ordering::AcqRel);
    // The number may be another file's by now.
    if fd >= 0 && is_userfaultfd(fd) {
        // SAFETY: a copy of the parent's descriptor, which nothing in this process refers to: the thread that has it
        // is not here.
        drop(unsafe { OwnedFd::from_raw_fd(fd) });
    }
}

/// Allocates nothing: the lock of an allocator that the program brings may have been taken by a thread that is not
/// here.
fn is_userfaultfd(fd: i32) -> bool {
    let (mut path, mut link) = ([0; 32], [0; 64]);
    let written = write!(&mut path[..31], "/proc/self/fd/{fd}");
    // SAFETY: a path that ends with a zero, and room for as many bytes as are said.
    let len = unsafe { libc::readlink(path.as_ptr().cast(), link.as_mut_ptr().cast(), link.len()) };
    let link = link.get(..usize::try_from(len).unwrap_or(0)).unwrap_or_default();
    written.is_ok() && link.windows(11).any(|bytes| bytes == b"userfaultfd")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_userfaultfd_is_told_from_other_files() {
        assert!(!is_userfaultfd(-1));
        let null = std::fs::File::open("/dev/null").expect("opened");
        assert!(!is_userfaultfd(null.as_raw_fd()));
        // SAFETY: plain numbers; pages are not touched.
        let fd = unsafe { libc::syscall(libc::SYS_userfaultfd, libc::O_CLOEXEC | 1) };
        if fd >= 0 {
            assert!(is_userfaultfd(fd as i32));
            // SAFETY: just made.
            drop(unsafe { OwnedFd::from_raw_fd(fd as i32) });
        }
    }
}
