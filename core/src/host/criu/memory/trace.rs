//! Calls by which processes change what is to be in their memory without their userfaultfd telling of it.
//!
//! The kernel tells of them by tracepoints: when such a call begins, and before it does anything, a record of it is
//! written to memory of the processor that it is made on (perf_event_open(2)). So whoever has changed a page and finds
//! no record after that has changed it before any such call has. All processes of the host are told of, since what is
//! forked while the records are read would be missed otherwise.

use std::ffi::{CString, c_void};
use std::fs::File;
use std::io::{self, Read};
use std::ops::Range;
use std::os::fd::{AsFd, AsRawFd, FromRawFd, OwnedFd};
use std::sync::atomic::{AtomicU64, Ordering};

use rustix::fs::{Mode, OFlags};
use rustix::io::Errno;
use rustix::mm::{MapFlags, ProtFlags};
use rustix::mount::{FsMountFlags, FsOpenFlags, MountAttrFlags};

use super::uffd::PAGE;

/// `MADV_WIPEONFORK`, `MADV_KEEPONFORK`, and `MADV_GUARD_INSTALL` of Linux 6.13.
const WIPE_ON_FORK: i32 = 18;
const KEEP_ON_FORK: i32 = 19;
const GUARD_INSTALL: i32 = 102;
/// Which calls are told of, by their tracepoints: madvise(2), process_madvise(2) and `IORING_OP_MADVISE`.
const EVENTS: [(&str, &str); 3] = [
    ("syscalls/sys_enter_madvise", ADVICE),
    ("syscalls/sys_enter_process_madvise", ADVICE),
    ("io_uring/io_uring_submit_req", "opcode == 25"),
];
const ADVICE: &str = "behavior == 18 || behavior == 19 || behavior == 102";
/// The processors that run now.
const ONLINE: &str = "/sys/devices/system/cpu/online";
/// Bytes of records that a processor has room for, a power of two pages. One record takes less than 100.
const ROOM: u64 = 16 * PAGE;
/// More than the longest record takes.
const RECORD: u64 = 1024;

/// A call that has begun. Whether it succeeds is not known.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Call {
    /// Its process; 0 if that is of another pid namespace.
    pub(super) pid: i32,
    pub(super) asks: Asks,
    /// What it is about, in whole pages.
    pub(super) addresses: Range<u64>,
}

/// What a call asks for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Asks {
    /// That memory be given up, and be a guard.
    Guard,
    /// That children find nothing there, or that they find it again.
    Emptied,
    /// Something of these, or something else; and it is not known of which memory.
    Unknown,
}

/// The records of calls on this host.
pub(super) struct Trace {
    madvise: Madvise,
    processors: Vec<Processor>,
    /// Which they are.
    online: String,
}

impl Trace {
    /// Begins to record.
    ///
    /// # Errors
    /// The kernel has no such tracepoints, or this user may not use them.
    pub(super) fn begin() -> io::Result<Self> {
        Self::with_room(ROOM)
    }

    /// With room for so many bytes of records on each processor.
    fn with_room(room: u64) -> io::Result<Self> {
        let tracing = tracing_files()?;
        let (mut events, mut madvise) = (Vec::new(), None);
        for (path, filter) in EVENTS {
            let number = match read_at(&tracing, &format!("events/{path}/id")) {
                Ok(number) => number.trim().parse::<u16>().map_err(|_| strange())?,
                // A kernel without io_uring.
                Err(error) if error.kind() == io::ErrorKind::NotFound && !events.is_empty() => {
                    continue;
                }
                Err(error) => return Err(error),
            };
            if events.is_empty() {
                let format = read_at(&tracing, &format!("events/{path}/format"))?;
                madvise = Some(Madvise::of(number, &format).ok_or_else(strange)?);
            }
            events.push((number, CString::new(filter)?));
        }
        let online = std::fs::read_to_string(ONLINE)?;
        let numbers = processors(&online).ok_or_else(strange)?;
        let begun = numbers.into_iter().map(|number| Processor::begin(number, room, &events));
        let processors = begun.collect::<io::Result<_>>()?;
        Ok(Self { madvise: madvise.ok_or_else(strange)?, processors, online })
    }

    /// Adds the calls since this was last asked for.
    ///
    /// # Errors
    /// Some are not known: there were too many. It stays so.
    pub(super) fn take(&mut self, calls: &mut Vec<Call>) -> Result<(), Lost> {
        let madvise = &self.madvise;
        self.processors.iter_mut().try_for_each(|processor| {
            processor.take(&mut |pid, raw| calls.extend(madvise.call(pid, raw)))
        })
    }

    /// Whether the calls of all processors were told.
    pub(super) fn is_whole(&self) -> bool {
        std::fs::read_to_string(ONLINE).is_ok_and(|online| online == self.online)
    }
}

/// That calls are not known.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Lost;

/// The files of the kernel's tracing, wherever they are mounted or not.
fn tracing_files() -> io::Result<OwnedFd> {
    let made = rustix::mount::fsopen("tracefs", FsOpenFlags::FSOPEN_CLOEXEC)?;
    match rustix::mount::fsconfig_create(made.as_fd()) {
        Ok(()) | Err(Errno::BUSY) => {}
        Err(error) => return Err(error.into()),
    }
    let (flags, attributes) = (FsMountFlags::FSMOUNT_CLOEXEC, MountAttrFlags::empty());
    Ok(rustix::mount::fsmount(made.as_fd(), flags, attributes)?)
}

fn read_at(dir: &OwnedFd, path: &str) -> io::Result<String> {
    let fd = rustix::fs::openat(dir, path, OFlags::RDONLY | OFlags::CLOEXEC, Mode::empty())?;
    let mut text = String::new();
    File::from(fd).read_to_string(&mut text)?;
    Ok(text)
}

fn strange() -> io::Error {
    io::Error::other("the kernel describes its tracepoints in an unknown way")
}

/// Numbers as the kernel lists them, such as `0-3,8`.
fn processors(list: &str) -> Option<Vec<i32>> {
    let mut numbers = Vec::new();
    for part in list.trim().split(',') {
        let (first, last) = part.split_once('-').unwrap_or((part, part));
        let (first, last): (i32, i32) = (first.parse().ok()?, last.parse().ok()?);
        numbers.extend(first..=last);
    }
    Some(numbers)
}

/// Where a record has what madvise(2) was called with.
struct Madvise {
    event: u16,
    start: usize,
    len: usize,
    behavior: usize,
}

impl Madvise {
    fn of(event: u16, format: &str) -> Option<Self> {
        let place = |name: &str| {
            let line = format.lines().find(|line| line.contains(&format!(" {name};")))?;
            line.split("offset:").nth(1)?.split(';').next()?.parse().ok()
        };
        Some(Self {
            event,
            start: place("start")?,
            len: place("len_in")?,
            behavior: place("behavior")?,
        })
    }

    /// The call that a record is of; `None` if it will do nothing.
    fn call(&self, pid: i32, raw: &[u8]) -> Option<Call> {
        /// Above the addresses of programs: what they may write there does not count (`untagged_addr`).
        const TAG: u64 = !0 << 57;
        let unknown = Call { pid, asks: Asks::Unknown, addresses: 0..u64::MAX };
        let word = |at: usize| Some(u64::from_ne_bytes(*raw.get(at..)?.first_chunk()?));
        if raw.first_chunk().is_none_or(|event| u16::from_ne_bytes(*event) != self.event) {
            return Some(unknown);
        }
        let (Some(start), Some(len), Some(behavior)) =
            (word(self.start), word(self.len), word(self.behavior))
        else {
            return Some(unknown);
        };
        let asks = match behavior as i32 {
            GUARD_INSTALL => Asks::Guard,
            WIPE_ON_FORK | KEEP_ON_FORK => Asks::Emptied,
            _ => Asks::Unknown,
        };
        let start = start & !TAG;
        let end = start.checked_add(len.checked_next_multiple_of(PAGE)?)?;
        (start.is_multiple_of(PAGE) && len > 0).then_some(Call { pid, asks, addresses: start..end })
    }
}

/// The records of one processor: a page that says where they are, and then they.
struct Processor {
    memory: *mut c_void,
    /// Bytes of the records.
    room: u64,
    /// Where the next record begins, counted from the first.
    taken: u64,
    is_lost: bool,
    /// They write there while they are open.
    _events: Vec<OwnedFd>,
}

// SAFETY: the memory is the kernel's and this value's, and is used through `&mut` alone.
unsafe impl Send for Processor {}

/// `struct perf_event_attr` in its first version. There are flags in `flags`, of which the first is `disabled`.
#[repr(C)]
#[derive(Default)]
struct Attributes {
    kind: u32,
    size: u32,
    config: u64,
    period: u64,
    sampled: u64,
    read_format: u64,
    flags: u64,
    wakeup: u32,
    breakpoint: u32,
    address: u64,
}

impl Processor {
    fn begin(number: i32, room: u64, events: &[(u16, CString)]) -> io::Result<Self> {
        const ENABLE: libc::Ioctl = 0x2400;
        const SET_OUTPUT: libc::Ioctl = 0x2405;
        const SET_FILTER: libc::Ioctl = 0x4008_2406;
        let opened: Vec<OwnedFd> =
            events.iter().map(|(event, _)| open(number, *event)).collect::<io::Result<_>>()?;
        let first = opened.first().ok_or_else(strange)?;
        let len = (PAGE + room) as usize;
        let prot = ProtFlags::READ | ProtFlags::WRITE;
        // SAFETY: a new mapping, at an address of the kernel's choice.
        let memory = unsafe {
            rustix::mm::mmap(std::ptr::null_mut(), len, prot, MapFlags::SHARED, first, 0)
        }?;
        let mut this = Self { memory, room, taken: 0, is_lost: false, _events: Vec::new() };
        for (fd, (_, filter)) in opened.iter().zip(events) {
            if fd.as_raw_fd() != first.as_raw_fd() {
                done(|| ioctl(fd, SET_OUTPUT, first.as_raw_fd() as usize))?;
            }
            done(|| ioctl(fd, SET_FILTER, filter.as_ptr().expose_provenance()))?;
            done(|| ioctl(fd, ENABLE, 0))?;
        }
        this._events = opened;
        Ok(this)
    }

    /// A number in the page that says where the records are (`struct perf_event_mmap_page`).
    fn place(&self, at: usize) -> &AtomicU64 {
        // SAFETY: the page is mapped as long as this value lives, and what it has there are numbers of 64 bits that
        // kernel and process change as wholes.
        unsafe { AtomicU64::from_ptr(self.memory.cast::<u8>().add(at).cast()) }
    }

    /// Calls `each` with the process and the contents of each record that has not been taken.
    fn take(&mut self, each: &mut dyn FnMut(i32, &[u8])) -> Result<(), Lost> {
        const HEAD: usize = 1024;
        const TAIL: usize = 1032;
        const SAMPLE: u32 = 9;
        let head = self.place(HEAD).load(Ordering::Acquire);
        // What finds no room is not written.
        self.is_lost |= head - self.taken + RECORD > self.room;
        while self.taken < head && !self.is_lost {
            let mut record = vec![0; 8];
            self.copy(&mut record);
            let size = u16::from_ne_bytes([record[6], record[7]]);
            if size < 8 || u64::from(size) > head - self.taken {
                self.is_lost = true;
                break;
            }
            record.resize(size.into(), 0);
            self.copy(&mut record);
            self.taken += u64::from(size);
            let word =
                |at: usize| record.get(at..)?.first_chunk().map(|word| u32::from_ne_bytes(*word));
            // Process, thread, and the length of what follows.
            match (word(0), word(8), record.get(20..)) {
                (Some(SAMPLE), Some(pid), Some(raw)) => each(pid as i32, raw),
                // It is told so if something was lost, and if there is a pause.
                _ => self.is_lost = true,
            }
        }
        self.place(TAIL).store(self.taken, Ordering::Release);
        if self.is_lost { Err(Lost) } else { Ok(()) }
    }

    /// Copies bytes from where the next record is.
    fn copy(&self, bytes: &mut [u8]) {
        for (byte, at) in bytes.iter_mut().zip(self.taken..) {
            // SAFETY: within the mapping. The kernel does not write what has not been taken.
            *byte = unsafe { *self.memory.cast::<u8>().add((PAGE + at % self.room) as usize) };
        }
    }
}

impl Drop for Processor {
    fn drop(&mut self) {
        // SAFETY: the mapping is this value's, and nothing refers to it any more.
        let _ = unsafe { rustix::mm::munmap(self.memory, (PAGE + self.room) as usize) };
    }
}

/// Opens an event of a processor, which does not count yet.
fn open(processor: i32, event: u16) -> io::Result<OwnedFd> {
    const TRACEPOINT: u32 = 2;
    const PROCESS_AND_CONTENTS: u64 = 1 << 1 | 1 << 10;
    const DISABLED: u64 = 1;
    const CLOEXEC: u64 = 8;
    let attributes = Attributes {
        kind: TRACEPOINT,
        size: size_of::<Attributes>() as u32,
        config: event.into(),
        period: 1,
        sampled: PROCESS_AND_CONTENTS,
        flags: DISABLED,
        ..Attributes::default()
    };
    let fd = done(|| {
        // SAFETY: the structure that the call takes, of the size that it names.
        unsafe {
            libc::syscall(
                libc::SYS_perf_event_open,
                &raw const attributes,
                -1,
                processor,
                -1,
                CLOEXEC,
            )
        }
    })?;
    // SAFETY: the kernel has just made it.
    Ok(unsafe { OwnedFd::from_raw_fd(fd as i32) })
}

fn ioctl(fd: &OwnedFd, request: libc::Ioctl, argument: usize) -> i64 {
    // SAFETY: the requests that are made here take a number, or a text that lives until the call is over.
    unsafe { libc::ioctl(fd.as_raw_fd(), request, argument).into() }
}

fn done(call: impl FnOnce() -> i64) -> io::Result<i64> {
    match call() {
        -1 => Err(io::Error::last_os_error()),
        result => Ok(result),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn processors_are_listed_in_ranges() {
        assert_eq!(processors("0-2,5\n"), Some(vec![0, 1, 2, 5]));
        assert_eq!(processors("7"), Some(vec![7]));
        assert_eq!(processors(""), None);
    }

    #[test]
    fn a_record_is_read_as_the_kernel_describes_it() {
        let format = "\tfield:int __syscall_nr;\toffset:8;\tsize:4;\n\
            \tfield:unsigned long start;\toffset:16;\tsize:8;\n\
            \tfield:size_t len_in;\toffset:24;\tsize:8;\n\tfield:int behavior;\toffset:32;\tsize:8;\n";
        let madvise = Madvise::of(7, format).unwrap();
        assert!(Madvise::of(7, "").is_none());
        let raw = |event: u64, start: u64, len: u64, behavior: u64| -> Vec<u8> {
            [event, 0, start, len, behavior].into_iter().flat_map(u64::to_ne_bytes).collect()
        };
        let of = |asks, addresses| Some(Call { pid: 3, asks, addresses });
        // A whole page is meant, whatever its length, and wherever the top bits point.
        let guard = raw(7, 0x1000 | 1 << 60, 1, 102);
        assert_eq!(madvise.call(3, &guard), of(Asks::Guard, 0x1000..0x2000));
        let emptied = raw(7, 0x1000, 0x2000, 18);
        assert_eq!(madvise.call(3, &emptied), of(Asks::Emptied, 0x1000..0x3000));
        // What the kernel refuses.
        assert_eq!(madvise.call(3, &raw(7, 0x1001, 0x1000, 102)), None);
        assert_eq!(madvise.call(3, &raw(7, 0x1000, 0, 102)), None);
        assert_eq!(madvise.call(3, &raw(7, 0x1000, u64::MAX, 102)), None);
        // Another call, and half a record.
        assert_eq!(madvise.call(3, &raw(8, 0x1000, 0x1000, 102)), of(Asks::Unknown, 0..u64::MAX));
        assert_eq!(madvise.call(3, &guard[..30]), of(Asks::Unknown, 0..u64::MAX));
    }

    /// Calls of this process, of which each test makes its own at its own addresses.
    fn advise(address: u64, behavior: i32) {
        // SAFETY: nothing is mapped there, so nothing is changed.
        let _ = unsafe { libc::madvise(address as *mut c_void, PAGE as usize, behavior) };
    }

    #[test]
    fn a_call_is_told_when_it_is_over_at_the_latest() {
        let mut trace = Trace::begin().unwrap();
        let address = 0x1234_0000;
        let own = std::process::id() as i32;
        for round in 1..50 {
            advise(address, GUARD_INSTALL);
            advise(address, libc::MADV_NORMAL);
            let mut calls = Vec::new();
            trace.take(&mut calls).unwrap();
            calls.retain(|call| call.addresses == (address..address + PAGE) && call.pid == own);
            assert_eq!(calls.len(), 1, "round {round}");
            assert_eq!(calls[0].asks, Asks::Guard);
        }
        assert!(trace.is_whole());
    }

    #[test]
    fn too_many_calls_are_lost_and_that_is_told() {
        // So few that whoever else listens on this host has room for them.
        let mut trace = Trace::with_room(PAGE).unwrap();
        let processor = rustix::thread::sched_getcpu();
        let mut alone = rustix::thread::CpuSet::new();
        alone.set(processor);
        rustix::thread::sched_setaffinity(None, &alone).unwrap();
        let mut calls = Vec::new();
        // That nothing is lost of few calls the test above shows; here others may have made some already.
        for _ in 0..PAGE / 64 {
            advise(0x4321_0000, GUARD_INSTALL);
        }
        assert_eq!(trace.take(&mut calls), Err(Lost));
        assert_eq!(trace.take(&mut calls), Err(Lost));
    }
}
