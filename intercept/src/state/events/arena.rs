//! The memory that processes share of events of legacy IPC.

use std::collections::HashMap;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::ptr::null_mut;
use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering};

use rustix::fs::{MemfdFlags, SealFlags, fcntl_add_seals, fcntl_get_seals, fstat, memfd_create};
use rustix::mm::{self, MapFlags, ProtFlags};

use crate::abi::real::{self, check};
use crate::abi::types::{Code, ERROR_NOT_READY, SUCCESS};
use crate::log::log;
use crate::usage::{self, Kind};

/// Words for records in a cell.
const WORDS: usize = 124;
/// Cells in an arena.
pub(super) const CELLS: usize = 128;
/// Bytes of an arena.
const ARENA: usize = CELLS * size_of::<Cell>();
/// What must not be done to an arena: an access would end the process.
const SEALS: SealFlags = SealFlags::SEAL.union(SealFlags::SHRINK).union(SealFlags::GROW);
/// `CU_MEMHOSTREGISTER_PORTABLE` and `CU_MEMHOSTREGISTER_DEVICEMAP`.
const REGISTERED: u32 = 1 | 2;
/// `CU_EVENT_DISABLE_TIMING`.
const DISABLE_TIMING: u32 = 2;
/// What is shared of an event.
#[repr(C)]
pub(super) struct Cell {
    /// The number of the last record.
    pub(super) recorded: AtomicU32,
    /// The process that made it.
    pub(super) recorder: AtomicU32,
    /// The pid namespace of that.
    pub(super) namespace: AtomicU64,
    /// The numbers of the last records that were passed.
    pub(super) passed: [AtomicU32; WORDS],
}

impl Cell {
    pub(super) fn word(number: u32) -> usize {
        number as usize % WORDS
    }

    pub(super) fn is_passed(&self, number: u32) -> bool {
        let passed = self.passed[Self::word(number)].load(Ordering::Acquire);
        passed.wrapping_sub(number) as i32 >= 0
    }

    /// Whether no stream is still to write to it.
    pub(super) fn is_settled(&self) -> bool {
        let last = self.recorded.load(Ordering::Acquire);
        (0..WORDS as u32).all(|back| self.is_passed(last.wrapping_sub(back)))
    }
}

/// Shared memory with cells.
pub(super) struct Arena {
    cells: *mut Cell,
    /// Of an own one.
    pub(super) fd: Option<OwnedFd>,
    /// For each stream that has been given work with it, an event of the driver's that was recorded after that. Only of
    /// those of other processes: own ones stay.
    uses: Mutex<HashMap<u64, u64>>,
    /// It is not known of all work when it is done.
    is_lost: AtomicBool,
}

// SAFETY: the memory is mapped as long as the value lives, and is only used atomically.
unsafe impl Send for Arena {}
// SAFETY: as above.
unsafe impl Sync for Arena {}

impl Arena {
    /// Maps an arena's memory.
    fn map(fd: BorrowedFd<'_>) -> Option<*mut Cell> {
        let protection = ProtFlags::READ | ProtFlags::WRITE;
        // SAFETY: a new mapping at an address of the kernel's choice disturbs nothing.
        let at = unsafe { mm::mmap(null_mut(), ARENA, protection, MapFlags::SHARED, fd, 0) };
        let at = at.ok()?;
        // SAFETY: the mapping of just now. In a child of fork it would be of no use.
        let _ = unsafe { mm::madvise(at, ARENA, mm::Advice::LinuxDontFork) };
        Some(at.cast())
    }

    pub(super) fn new() -> Option<Self> {
        let flags = MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING;
        let fd = memfd_create(c"gpucr-events", flags).ok()?;
        rustix::fs::ftruncate(&fd, ARENA as u64).ok()?;
        fcntl_add_seals(&fd, SEALS).ok()?;
        let cells = Self::map(fd.as_fd())?;
        let (uses, is_lost) = (Mutex::default(), AtomicBool::new(false));
        Some(Self { cells, fd: Some(fd), uses, is_lost })
    }

    /// Another process's. Whether it can be used is looked at: that may say anything.
    pub(super) fn open(fd: &OwnedFd) -> Option<Self> {
        let is_sealed = fcntl_get_seals(fd).is_ok_and(|seals| seals.contains(SEALS));
        if !is_sealed || fstat(fd).ok()?.st_size != ARENA as i64 {
            return None;
        }
        let (cells, is_lost) = (Self::map(fd.as_fd())?, AtomicBool::new(false));
        Some(Self { cells, fd: None, uses: Mutex::default(), is_lost })
    }

    pub(super) fn cell(&self, number: usize) -> &Cell {
        assert!(number < CELLS, "there is such a cell");
        // SAFETY: within the mapping, aligned, and only used atomically.
        unsafe { &*self.cells.add(number) }
    }

    /// Where devices of the current context see the word of a record.
    pub(super) fn device_address(&self, cell: usize, number: u32) -> Result<u64, Code> {
        let (base, mut seen) = (self.cells as u64, 0);
        // SAFETY: writes one value. It is refused where the memory is not registered.
        let mut known =
            || unsafe { real::cuMemHostGetDevicePointer_v2(&mut seen, self.cells.cast(), 0) };
        if known() != SUCCESS {
            // Not yet; or the context is gone that had it registered.
            // SAFETY: our own mapping.
            check(unsafe { real::cuMemHostRegister_v2(base, ARENA, REGISTERED) })?;
            let context = real::current_context().map_or(0, |(context, _)| context);
            usage::added(Kind::Pinned, base, ARENA as u64, context);
            check(known())?;
        }
        let word = &raw const self.cell(cell).passed[Cell::word(number)];
        Ok(seen + (word as u64 - base))
    }

    /// Work with it has been given to a stream.
    pub(super) fn used(&self, stream: u64) {
        if self.fd.is_some() {
            return;
        }
        let mut uses = self.uses.lock().unwrap_or_else(|poisoned| poisoned.into_inner());
        let event = uses.entry(stream).or_insert_with(|| {
            let mut event = 0;
            // SAFETY: writes one value.
            unsafe { real::cuEventCreate(&mut event, DISABLE_TIMING) };
            event
        });
        // SAFETY: an event of ours, and the stream that the program has just used; no event is refused.
        if unsafe { real::cuEventRecord(*event, stream) } != SUCCESS {
            self.is_lost.store(true, Ordering::Relaxed);
        }
    }

    /// Whether all work with it is done.
    pub(super) fn is_unused(&self) -> bool {
        let uses = self.uses.lock().unwrap_or_else(|poisoned| poisoned.into_inner());
        // SAFETY: events of ours.
        let is_done = |event: &u64| unsafe { real::cuEventQuery(*event) } != ERROR_NOT_READY;
        !self.is_lost.load(Ordering::Relaxed) && uses.values().all(is_done)
    }
}

impl Drop for Arena {
    fn drop(&mut self) {
        let uses = self.uses.get_mut().unwrap_or_else(|poisoned| poisoned.into_inner());
        for event in uses.values() {
            // SAFETY: an event of ours, destroyed once.
            unsafe { real::cuEventDestroy_v2(*event) };
        }
        let base = self.cells as u64;
        // SAFETY: our own mapping; where it is not registered this is refused.
        usage::ending(&[Kind::Pinned], base, || unsafe { real::cuMemHostUnregister(base) });
        // SAFETY: nobody uses it any more.
        if let Err(error) = unsafe { mm::munmap(self.cells.cast(), ARENA) } {
            log!("an arena of events is left: {error}");
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn cell() -> Cell {
        let passed = [const { AtomicU32::new(0) }; WORDS];
        Cell {
            recorded: AtomicU32::new(0),
            recorder: AtomicU32::new(0),
            namespace: AtomicU64::new(0),
            passed,
        }
    }

    /// Has a stream pass a record.
    fn pass(cell: &Cell, number: u32) {
        cell.passed[Cell::word(number)].store(number, Ordering::Release);
    }

    #[test]
    fn records_are_passed_in_any_order() {
        let cell = cell();
        cell.recorded.store(3, Ordering::Release);
        assert!(!(1..=3).any(|number| cell.is_passed(number)));
        pass(&cell, 3);
        assert!(cell.is_passed(3) && !cell.is_passed(2) && !cell.is_settled());
        pass(&cell, 1);
        pass(&cell, 2);
        assert!(cell.is_passed(3), "an earlier one does not take it back");
        assert!(cell.is_settled());
    }

    #[test]
    fn numbers_go_round() {
        let cell = cell();
        let first = u32::MAX - 200;
        for step in 0..400 {
            let number = first.wrapping_add(step);
            cell.recorded.store(number, Ordering::Release);
            // The word of before is of a record that is long passed.
            pass(&cell, number.wrapping_sub(WORDS as u32));
            assert!(!cell.is_passed(number), "{number}");
            pass(&cell, number);
            assert!(cell.is_passed(number), "{number}");
        }
        assert!(cell.is_settled());
    }

    #[test]
    fn memory_that_could_shrink_or_is_another_size_is_no_arena() {
        let new = |bytes: u64, seals: SealFlags| {
            let fd = memfd_create(c"x", MemfdFlags::ALLOW_SEALING).expect("made");
            rustix::fs::ftruncate(&fd, bytes).expect("it has a size");
            fcntl_add_seals(&fd, seals).expect("sealed");
            fd
        };
        let few = SealFlags::GROW | SealFlags::SEAL;
        for fd in [new(ARENA as u64, few), new(ARENA as u64 / 2, SEALS)] {
            assert!(Arena::open(&fd).is_none());
        }
        std::mem::forget(Arena::open(&new(ARENA as u64, SEALS)).expect("good"));
    }
}
