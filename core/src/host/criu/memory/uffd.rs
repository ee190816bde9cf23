//! What is asked of a userfaultfd(2), by the numbers of linux/userfaultfd.h.

use std::io;
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, BorrowedFd, FromRawFd, OwnedFd};

use rustix::io::Errno;
use rustix::ioctl::{Updater, ioctl, opcode};

pub(super) const PAGE: u64 = 4096;

/// `struct uffdio_copy`.
#[repr(C)]
struct Copy {
    to: u64,
    from: u64,
    len: u64,
    mode: u64,
    /// Bytes that were copied, or the error.
    copied: i64,
}

/// `struct uffdio_zeropage`.
#[repr(C)]
struct Zeros {
    to: u64,
    len: u64,
    mode: u64,
    /// Bytes that were filled, or the error.
    zeroed: i64,
}

/// `struct uffdio_range`.
#[repr(C)]
struct Places {
    from: u64,
    len: u64,
}

/// `UFFDIO`.
pub(super) const GROUP: u8 = 0xaa;
const COPY: rustix::ioctl::Opcode = opcode::read_write::<Copy>(GROUP, 3);
const ZEROS: rustix::ioctl::Opcode = opcode::read_write::<Zeros>(GROUP, 4);
const WAKE: rustix::ioctl::Opcode = opcode::read::<Places>(GROUP, 2);
/// Bytes of a `struct uffd_msg`: the kind is the first, and what is said of it begins 8 bytes further on.
const MESSAGE: usize = 32;

/// What a process waits for.
#[derive(Debug)]
pub(super) enum Event {
    /// Memory at this address, which is not there.
    Fault(u64),
    /// A child, which has the same memory, and lacks the same of it.
    Fork(Uffd),
    /// Memory was moved.
    Moved { from: u64, to: u64, len: u64 },
    /// Memory is given up: what is touched there later are zeros, or nothing.
    Gone { from: u64, to: u64 },
}

/// The userfaultfd of a process.
#[derive(Debug)]
pub(super) struct Uffd(OwnedFd);

impl Uffd {
    pub(super) fn new(fd: OwnedFd) -> Self {
        Self(fd)
    }

    /// Copies bytes to an address at which there is nothing yet. Gives how many were copied: fewer, or none, if the
    /// process is changing its mappings.
    ///
    /// # Errors
    /// `EEXIST`: something is there. `ENOENT`: no memory is registered there. `ESRCH`: the process has no such memory
    /// any more, since it has ended or has become another program.
    pub(super) fn copy(&self, to: u64, bytes: &[u8]) -> Result<u64, Errno> {
        let (from, len) = (bytes.as_ptr() as u64, bytes.len() as u64);
        let mut copy = Copy { to, from, len, mode: 0, copied: 0 };
        // SAFETY: the structure that the call takes. The kernel reads bytes that are borrowed for so long, and writes
        // memory of another process that has none there yet.
        let result = unsafe { ioctl(&self.0, Updater::<COPY, Copy>::new(&mut copy)) };
        done(result, copy.copied)
    }

    /// Puts zeros to an address at which there is nothing yet. As [`copy`](Self::copy).
    ///
    /// # Errors
    /// Those of [`copy`](Self::copy).
    pub(super) fn zero(&self, to: u64, len: u64) -> Result<u64, Errno> {
        let mut zeros = Zeros { to, len, mode: 0, zeroed: 0 };
        // SAFETY: the structure that the call takes. The kernel writes memory of another process that has none there
        // yet.
        let result = unsafe { ioctl(&self.0, Updater::<ZEROS, Zeros>::new(&mut zeros)) };
        done(result, zeros.zeroed)
    }

    /// Whether the process is changing its mappings, or has done so and waits until that was heard (`mmap_changing` of
    /// fs/userfaultfd.c).
    pub(super) fn is_changing(&self) -> bool {
        probe(self) == Err(Errno::AGAIN)
    }

    /// Has whoever waits for some pages look again. There need be no such pages any more.
    ///
    /// # Errors
    /// The kernel says something unexpected.
    pub(super) fn wake(&self, from: u64, len: u64) -> Result<(), Errno> {
        let mut places = Places { from, len };
        // SAFETY: the structure that the call takes; it changes nothing.
        match unsafe { ioctl(&self.0, Updater::<WAKE, Places>::new(&mut places)) } {
            Err(Errno::NOENT | Errno::INVAL) => Ok(()),
            woken => woken,
        }
    }

    /// The next event; `None` if there is none now. The process goes on after one that is no fault.
    ///
    /// # Errors
    /// The kernel says something unknown.
    pub(super) fn event(&self) -> io::Result<Option<Event>> {
        loop {
            let mut message = [MaybeUninit::<u8>::uninit(); MESSAGE];
            let message = match rustix::io::read(&self.0, &mut message) {
                Ok((message, _)) if message.len() == MESSAGE => &*message,
                Ok(_) | Err(Errno::AGAIN) => return Ok(None),
                Err(Errno::INTR) => continue,
                Err(error) => return Err(error.into()),
            };
            let word = |at: usize| u64::from_ne_bytes(std::array::from_fn(|i| message[8 + at + i]));
            return Ok(Some(match message[0] {
                0x12 => Event::Fault(word(8)),
                0x13 => {
                    let fd = i32::from_ne_bytes(std::array::from_fn(|i| message[8 + i]));
                    // SAFETY: with this message the kernel has made a descriptor for its reader.
                    Event::Fork(Self(unsafe { OwnedFd::from_raw_fd(fd) }))
                }
                0x14 => Event::Moved { from: word(0), to: word(8), len: word(16) },
                0x15 | 0x16 => Event::Gone { from: word(0), to: word(8) },
                kind => {
                    return Err(io::Error::other(format!(
                        "an unknown event {kind:#x} of a userfaultfd"
                    )));
                }
            }));
        }
    }
}

impl AsFd for Uffd {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.as_fd()
    }
}

fn done(result: Result<(), Errno>, done: i64) -> Result<u64, Errno> {
    match (result, u64::try_from(done)) {
        (Ok(()), Ok(done)) => Ok(done),
        // It was done in part, or not at all because the process is changing its mappings.
        (Err(Errno::AGAIN), done) => Ok(done.unwrap_or(0)),
        (Err(error), _) => Err(error),
        (Ok(()), Err(_)) => Err(Errno::IO),
    }
}

/// What the kernel says of a copy that it cannot make.
fn probe(uffd: &impl AsFd) -> Result<(), Errno> {
    /// The lowest address that the kernel looks at. It gives none so low by itself, so nothing is there in gpucr.
    const LOW: u64 = 1 << 16;
    let mut copy = Copy { to: LOW, from: LOW, len: PAGE, mode: 0, copied: 0 };
    // SAFETY: the structure that the call takes. The kernel has nothing to copy from, so nothing is written.
    unsafe { ioctl(uffd, Updater::<COPY, Copy>::new(&mut copy)) }
}

/// Whether the memory that a userfaultfd is of exists: somebody who has it has not ended.
pub(crate) fn is_alive(uffd: &impl AsFd) -> bool {
    probe(uffd) != Err(Errno::SRCH)
}
