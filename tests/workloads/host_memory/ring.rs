//! Input by io_uring: the kernel writes memory of the program outside of any call of it.

use std::fs::File;
use std::os::fd::{AsRawFd as _, FromRawFd as _, OwnedFd};
use std::ptr;
use std::sync::atomic::{AtomicU32, Ordering};

use anyhow::{Result, ensure};

use super::done;

/// `struct io_uring_params` of linux/io_uring.h: what is asked, and then where in the mappings of the ring what is.
#[repr(C)]
#[derive(Default)]
struct Params {
    entries: [u32; 2],
    asked: [u32; 8],
    /// Of the queue of requests: head, tail, mask, number, flags, dropped, array, reserved, and an address.
    requests: [u32; 10],
    /// Of the queue of results: head, tail, mask, number, overflow, entries, flags, reserved, and an address.
    results: [u32; 10],
}

/// `struct io_uring_sqe`, as far as a read needs it.
#[repr(C)]
#[derive(Default)]
struct Request {
    operation: u8,
    flags: u8,
    priority: u16,
    fd: i32,
    offset: u64,
    address: u64,
    len: u32,
    rest: [u32; 7],
}

/// `IORING_OP_READ`, `IORING_ENTER_GETEVENTS`, and `IORING_OFF_SQES`.
const READ: u8 = 22;
const WAIT: u32 = 1;
const REQUESTS: i64 = 0x1000_0000;
const PAGE: usize = 4096;

/// A ring for one request at a time.
pub(super) struct Ring {
    fd: OwnedFd,
    params: Params,
    queues: *mut u8,
    requests: *mut Request,
}

impl Ring {
    /// # Errors
    /// The kernel has none, or forbids it.
    pub(super) fn new() -> Result<Self> {
        let mut params = Params::default();
        // SAFETY: the kernel fills in the structure.
        let fd = unsafe { libc::syscall(libc::SYS_io_uring_setup, 1, &raw mut params) };
        let fd = done("io_uring_setup", fd)?;
        // SAFETY: just made.
        let fd = unsafe { OwnedFd::from_raw_fd(fd as i32) };
        let map = |offset| -> Result<*mut u8> {
            let (access, flags) = (libc::PROT_READ | libc::PROT_WRITE, libc::MAP_SHARED);
            // SAFETY: a new mapping, in nobody's place. Both queues are in one, of less than a page.
            let at =
                unsafe { libc::mmap(ptr::null_mut(), PAGE, access, flags, fd.as_raw_fd(), offset) };
            ensure!(at != libc::MAP_FAILED, "mmap: {}", std::io::Error::last_os_error());
            Ok(at.cast())
        };
        let (queues, requests) = (map(0)?, map(REQUESTS)?.cast());
        Ok(Self { fd, params, queues, requests })
    }

    /// A number of the ring that both sides use.
    fn number(&self, offset: u32) -> &AtomicU32 {
        // SAFETY: the kernel says that there is one, and it is mapped as long as `self` lives.
        unsafe { &*self.queues.add(offset as usize).cast::<AtomicU32>() }
    }

    /// Reads from a file, and waits for it.
    pub(super) fn read(&self, file: &File, bytes: &mut [u8], offset: u64) -> Result<()> {
        let (requests, results) = (&self.params.requests, &self.params.results);
        let request = Request {
            operation: READ,
            fd: file.as_raw_fd(),
            offset,
            address: bytes.as_mut_ptr().expose_provenance() as u64,
            len: bytes.len() as u32,
            ..Request::default()
        };
        // SAFETY: the first of the requests, which the kernel does not look at before it is told of it.
        unsafe { self.requests.write(request) };
        self.number(requests[6]).store(0, Ordering::Relaxed);
        self.number(requests[1]).fetch_add(1, Ordering::Release);
        let fd = self.fd.as_raw_fd();
        // SAFETY: `bytes` is borrowed until the kernel has given the result.
        let entered = unsafe { libc::syscall(libc::SYS_io_uring_enter, fd, 1, 1, WAIT, 0, 0) };
        ensure!(done("io_uring_enter", entered)? == 1, "nothing was asked");
        let (head, mask) = (self.number(results[0]), self.number(results[2]));
        let at = head.load(Ordering::Acquire) & mask.load(Ordering::Relaxed);
        ensure!(head.load(Ordering::Acquire) != self.number(results[1]).load(Ordering::Acquire));
        // An entry has 16 bytes, of which the result is in those from the eighth on.
        let result = self.number(results[5] + at * 16 + 8).load(Ordering::Relaxed) as i32;
        head.fetch_add(1, Ordering::Release);
        ensure!(result == bytes.len() as i32, "io_uring gave {result}");
        Ok(())
    }
}

impl Drop for Ring {
    fn drop(&mut self) {
        // SAFETY: mapped by `new`, and nobody refers to it any more.
        unsafe {
            libc::munmap(self.queues.cast(), PAGE);
            libc::munmap(self.requests.cast(), PAGE);
        }
    }
}
