//! Userfaultfds in asynchronous write-protect mode (Linux 6.7): see [`tracking`](super::tracking).

use std::io;
use std::os::fd::{FromRawFd, OwnedFd};

use rustix::ioctl::{Opcode, Updater, ioctl, opcode};

/// `UFFDIO`.
const GROUP: u8 = 0xaa;
/// `UFFD_API`.
const VERSION: u64 = 0xaa;
/// `UFFD_FEATURE_WP_UNPOPULATED` and `UFFD_FEATURE_WP_ASYNC`.
const FEATURES: u64 = 1 << 13 | 1 << 15;
/// `UFFDIO_REGISTER_MODE_WP`.
const PROTECTING: u64 = 1 << 1;
/// `struct uffdio_api` of linux/userfaultfd.h.
#[repr(C)]
#[derive(Default)]
struct Api {
    api: u64,
    features: u64,
    ioctls: u64,
}

/// `struct uffdio_register`.
#[repr(C)]
#[derive(Default)]
struct Register {
    start: u64,
    len: u64,
    mode: u64,
    ioctls: u64,
}

const API: Opcode = opcode::read_write::<Api>(GROUP, 0x3f);
const REGISTER: Opcode = opcode::read_write::<Register>(GROUP, 0);
/// `UFFD_USER_MODE_ONLY`: it handles no faults of the kernel's, which in asynchronous mode come to nobody. Any process
/// may have one.
const USER_MODE_ONLY: i32 = 1;

/// A userfaultfd of this process, in which nothing is registered.
///
/// # Errors
/// The kernel has none for this user.
pub(super) fn own() -> io::Result<OwnedFd> {
    let flags = libc::O_CLOEXEC | libc::O_NONBLOCK | USER_MODE_ONLY;
    // SAFETY: a plain number.
    let made = unsafe { libc::syscall(libc::SYS_userfaultfd, flags) };
    if made < 0 {
        return Err(io::Error::last_os_error());
    }
    // SAFETY: the kernel has just made it, and nobody else knows it.
    Ok(unsafe { OwnedFd::from_raw_fd(made as i32) })
}

/// Puts a userfaultfd, of which nobody has asked anything yet, into this mode.
///
/// # Errors
/// The kernel cannot do it.
pub(super) fn begin(uffd: &OwnedFd) -> io::Result<()> {
    let mut api = Api { api: VERSION, features: FEATURES, ..Api::default() };
    // SAFETY: the request is the kernel's for this structure.
    unsafe { ioctl(uffd, Updater::<API, Api>::new(&mut api)) }?;
    Ok(())
}

/// Registers memory of its process, between two addresses.
///
/// # Errors
/// It is of no kind that can be registered.
pub(super) fn register(uffd: &OwnedFd, start: u64, end: u64) -> io::Result<()> {
    let mut request = Register { start, len: end - start, mode: PROTECTING, ioctls: 0 };
    // SAFETY: the request is the kernel's for this structure. It changes nothing of what is in the memory of the
    // process, nor who may use it.
    unsafe { ioctl(uffd, Updater::<REGISTER, Register>::new(&mut request)) }?;
    Ok(())
}
