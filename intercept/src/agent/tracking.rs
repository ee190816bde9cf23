//! Requests of a checkpointer that wants to see, from outside, which host memory the program writes.
//!
//! The kernel makes a userfaultfd only for the process that asks for it. So the agent asks, with a device that the
//! checkpointer has opened, since most programs may not open that; the rest is done outside.

use std::io::Write;
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};
use std::sync::atomic::{AtomicI32, Ordering};

use gpucr_wire::table::Range;
use gpucr_wire::{Connection, Reply};
use rustix::fs::OFlags;

use super::state::Next;
use crate::log::log;
use crate::state::memory::Failure;
use crate::usage;

/// `USERFAULTFD_IOC_NEW` of linux/userfaultfd.h.
const NEW: libc::c_ulong = 0xaa00;

/// The number of a descriptor that is here for a moment; none is -1. A child of a fork closes it: it would keep the
/// parent's memory watched, and CRIU saves no such descriptor.
type Place = AtomicI32;

static DEVICE: Place = Place::new(-1);
static MADE: Place = Place::new(-1);

/// A descriptor that children of forks close.
struct Passing {
    fd: Option<OwnedFd>,
    place: &'static Place,
}

impl Passing {
    fn new(fd: OwnedFd, place: &'static Place) -> Self {
        place.store(fd.as_raw_fd(), Ordering::Release);
        Self { fd: Some(fd), place }
    }

    fn get(&self) -> &OwnedFd {
        self.fd.as_ref().expect("taken only by drop")
    }
}

impl Drop for Passing {
    fn drop(&mut self) {
        drop(self.fd.take());
        self.place.store(-1, Ordering::Release);
    }
}

/// Makes a userfaultfd and sends it.
pub(super) fn track(connection: &mut Connection) -> Result<Next, Failure> {
    let fds = connection.receive_fds(1);
    let device = fds.map_err(|error| Failure::other(format!("no device of userfaultfds: {error}")));
    let device = Passing::new(device?.remove(0), &DEVICE);
    usage::remember_pinned(true);
    let made = make(device.get())
        .map_err(|error| Failure::other(format!("userfaultfd cannot be made: {error}")))?;
    let made = Passing::new(made, &MADE);
    let sent = connection.send(&Reply::Done {}).and_then(|()| connection.send_fds(&[made.get()]));
    // There is nobody to tell: the next receive says that the connection is broken.
    sent.unwrap_or_else(|error| log!("cannot send a userfaultfd: {error}"));
    Ok(Next::Sent)
}

fn make(device: &OwnedFd) -> std::io::Result<OwnedFd> {
    let flags = (OFlags::CLOEXEC | OFlags::NONBLOCK).bits();
    // SAFETY: a request with a plain number; a descriptor that is something else refuses it.
    let made = unsafe { libc::ioctl(device.as_raw_fd(), NEW, flags) };
    if made < 0 {
        return Err(std::io::Error::last_os_error());
    }
    // SAFETY: the kernel has just made it, and nobody else knows it.
    Ok(unsafe { OwnedFd::from_raw_fd(made) })
}

/// Tells what devices may have written.
pub(super) fn pinned() -> Result<Next, Failure> {
    let pinned = usage::remembered_pinned().ok_or_else(|| Failure::other("nothing is tracked"))?;
    let ranges = pinned.into_iter().map(|(address, size)| Range { address, size }).collect();
    Ok(Next::Reply(Reply::Ranges { ranges }))
}

/// In the child of a fork, which has no agent: closes what was passing through.
pub(super) fn reset() {
    for place in [&DEVICE, &MADE] {
        let fd = place.swap(-1, Ordering::AcqRel);
        // The number may be another file's by now.
        if fd >= 0 && is_userfaultfd(fd) {
            // SAFETY: a copy of the parent's descriptor, which nothing in this process refers to: the thread that has
            // it is not here.
            drop(unsafe { OwnedFd::from_raw_fd(fd) });
        }
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
