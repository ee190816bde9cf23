//! What processes share of an event: how often it was recorded, and which record was passed last.
//!
//! It is a page that only this process has until somebody asks for the event's handle. A handle
//! names the process, the descriptor of the page in it, and the page itself (its inode number).
//! Opening goes through `/proc`, which admits the same user and root.

use std::collections::BTreeMap;
use std::collections::btree_map::Entry;
use std::fs::File;
use std::mem::ManuallyDrop;
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::os::unix::fs::MetadataExt;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use parking_lot::Mutex;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::mm::{self, MapFlags, ProtFlags};
use rustix::process::{Pid, PidfdFlags, pidfd_open};

use crate::device_memory;
use crate::status::{Code, Outcome};

/// What marks a handle as one of this driver.
const MAGIC: u64 = u64::from_le_bytes(*b"softipce");
const PAGE: usize = 4096;
/// How often a wait for another process looks.
const PAUSE: Duration = Duration::from_micros(200);

/// `CUipcEventHandle`: 64 bytes that only the driver understands.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Handle {
    magic: u64,
    process: u64,
    descriptor: u64,
    inode: u64,
    unused: [u64; 4],
}

#[repr(C)]
struct Page {
    /// The number of the last record.
    recorded: AtomicU64,
    /// The highest record that a stream has passed.
    passed: AtomicU64,
    /// The process of the last record.
    recorder: AtomicU64,
}

/// The memory of the pages that this process has given out handles of, by address.
static MEMORIES: Mutex<BTreeMap<u64, OwnedFd>> = Mutex::new(BTreeMap::new());

/// After a fork, in the child: closes the descriptors, if nobody was inside at the fork. As all
/// locks of the child, this one is not given back.
pub(crate) fn close_in_child() {
    if let Some(memories) = MEMORIES.try_lock() {
        ManuallyDrop::new(memories).clear();
    }
}

/// The shared part of an event.
pub(crate) struct SharedEvent {
    page: *mut Page,
    /// Another process made it.
    foreign: bool,
}

// SAFETY: the page is mapped as long as the value lives, and is only used atomically.
unsafe impl Send for SharedEvent {}
// SAFETY: as above.
unsafe impl Sync for SharedEvent {}

fn own_process() -> u64 {
    std::process::id().into()
}

impl SharedEvent {
    /// A state that no other process has.
    ///
    /// # Errors
    /// `OUT_OF_MEMORY`.
    pub(crate) fn new() -> Outcome<SharedEvent> {
        let protection = ProtFlags::READ | ProtFlags::WRITE;
        // SAFETY: a new mapping at an address of the kernel's choice disturbs nothing.
        let page = unsafe {
            mm::mmap_anonymous(std::ptr::null_mut(), PAGE, protection, MapFlags::PRIVATE)
        };
        let page = page.map_err(|_| Code::OUT_OF_MEMORY)?.cast();
        Ok(SharedEvent { page, foreign: false })
    }

    /// The state behind another process's handle.
    ///
    /// # Errors
    /// `INVALID_VALUE` for what is no handle, `INVALID_CONTEXT` for one of this very process,
    /// `MAP_FAILED` when the event or its process is gone or does not admit this user.
    pub(crate) fn open(handle: &Handle) -> Outcome<SharedEvent> {
        if handle.magic != MAGIC {
            return Err(Code::INVALID_VALUE);
        }
        if handle.process == own_process() {
            return Err(Code::INVALID_CONTEXT);
        }
        let path = format!("/proc/{}/fd/{}", handle.process, handle.descriptor);
        let memory = File::options().read(true).write(true).open(path);
        let memory = memory.map_err(|_| Code::MAP_FAILED)?;
        let found = memory.metadata().map_err(|_| Code::MAP_FAILED)?;
        let fits = found.ino() == handle.inode && found.size() == PAGE as u64;
        if !fits || !device_memory::is_device_memory(&memory) {
            return Err(Code::MAP_FAILED);
        }
        let mut shared = SharedEvent::new()?;
        shared.foreign = true;
        shared.replace(Some(&memory)).map_err(|_| Code::MAP_FAILED)?;
        Ok(shared)
    }

    /// A handle for other processes. No work may be under way.
    ///
    /// # Errors
    /// `INVALID_HANDLE` for an event that another process made, `OUT_OF_MEMORY`.
    pub(crate) fn handle(&self) -> Outcome<Handle> {
        if self.foreign {
            return Err(Code::INVALID_HANDLE);
        }
        let mut memories = MEMORIES.lock();
        let descriptor = match memories.entry(self.page as u64) {
            Entry::Occupied(there) => there.into_mut(),
            Entry::Vacant(place) => {
                let new = device_memory::new_memory(PAGE as u64)?;
                // SAFETY: the page is mapped, and nobody changes it while no work is under way.
                let bytes = unsafe { std::slice::from_raw_parts(self.page.cast::<u8>(), PAGE) };
                match rustix::io::pwrite(&new, bytes, 0) {
                    Ok(PAGE) => {}
                    _ => return Err(Code::OUT_OF_MEMORY),
                }
                self.replace(Some(&new))?;
                place.insert(new)
            }
        };
        let inode = rustix::fs::fstat(&*descriptor).map_err(|_| Code::OPERATING_SYSTEM)?.st_ino;
        let descriptor = descriptor.as_raw_fd() as u64;
        Ok(Handle { magic: MAGIC, process: own_process(), descriptor, inode, unused: [0; 4] })
    }

    /// Puts other memory behind the page; none is private memory, zeroed.
    fn replace<Fd: AsFd>(&self, memory: Option<&Fd>) -> Outcome {
        let protection = ProtFlags::READ | ProtFlags::WRITE;
        let place = self.page.cast();
        // SAFETY: the page is this value's own mapping; its users only read and write whole
        // atomic numbers, which both memories hold.
        let mapped = unsafe {
            match memory {
                Some(memory) => {
                    mm::mmap(place, PAGE, protection, MapFlags::SHARED | MapFlags::FIXED, memory, 0)
                }
                None => {
                    mm::mmap_anonymous(place, PAGE, protection, MapFlags::PRIVATE | MapFlags::FIXED)
                }
            }
        };
        let at = mapped.map_err(|_| Code::OUT_OF_MEMORY)?;
        // SAFETY: the mapping of just now. Failing to keep it from a child only wastes memory.
        let _ = unsafe { mm::madvise(at, PAGE, mm::Advice::LinuxDontFork) };
        Ok(())
    }

    fn page(&self) -> &Page {
        // SAFETY: mapped, aligned, and only used atomically.
        unsafe { &*self.page }
    }

    /// Whether other processes may have it.
    pub(crate) fn is_shared(&self) -> bool {
        self.foreign || MEMORIES.lock().contains_key(&(self.page as u64))
    }

    /// Lets go of shared memory, for a checkpoint that does not carry it.
    pub(crate) fn close(&self) {
        if self.is_shared() {
            let _ = self.replace(None::<&OwnedFd>);
            MEMORIES.lock().remove(&(self.page as u64));
        }
    }

    /// The number of the last record; 0 is none.
    pub(crate) fn recorded(&self) -> u64 {
        self.page().recorded.load(Ordering::Acquire)
    }

    /// Counts a record of this process; its number.
    pub(crate) fn announce(&self) -> u64 {
        self.page().recorder.store(own_process(), Ordering::Release);
        self.page().recorded.fetch_add(1, Ordering::AcqRel) + 1
    }

    /// Tells that a stream has come to a record.
    pub(crate) fn pass(&self, number: u64) {
        self.page().passed.fetch_max(number, Ordering::AcqRel);
    }

    /// Whether a record was passed. What a process recorded that has ended counts as passed.
    pub(crate) fn is_passed(&self, number: u64) -> bool {
        self.look(number, Duration::ZERO)
    }

    /// Waits until a record is passed.
    pub(crate) fn wait(&self, number: u64) {
        while !self.look(number, PAUSE) {}
    }

    fn look(&self, number: u64, pause: Duration) -> bool {
        let passed = || self.page().passed.load(Ordering::Acquire) >= number;
        if passed() {
            return true;
        }
        let recorder = self.page().recorder.load(Ordering::Acquire);
        if recorder == own_process() {
            std::thread::sleep(pause);
            return passed();
        }
        let process = i32::try_from(recorder).ok().and_then(Pid::from_raw);
        let Some(process) = process.and_then(|pid| pidfd_open(pid, PidfdFlags::empty()).ok())
        else {
            return true;
        };
        let limit = Timespec { tv_sec: 0, tv_nsec: pause.subsec_nanos().into() };
        let mut ends = [PollFd::new(&process, PollFlags::IN)];
        poll(&mut ends, Some(&limit)).is_ok_and(|ready| ready != 0) || passed()
    }
}

impl Drop for SharedEvent {
    fn drop(&mut self) {
        MEMORIES.lock().remove(&(self.page as u64));
        // SAFETY: this mapping is ours, and nobody uses it any more.
        let result = unsafe { mm::munmap(self.page.cast(), PAGE) };
        debug_assert!(result.is_ok());
    }
}
