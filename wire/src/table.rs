//! The memory of the [chunk table](crate::chunks), shared by checkpointer and shim.
//!
//! A file without a name, from its beginning: a [`Header`]; two 32-bit words for each range
//! (how many of its chunks are left, and the hint that one is wanted); a 32-bit word for each chunk of
//! each range, in order. Which ranges there are is said in [`Request::Guard`](crate::Request::Guard).

use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};
use std::time::Duration;

use rustix::fs::{MemfdFlags, SealFlags};
use rustix::mm::{Advice, MapFlags, ProtFlags};

use crate::chunks::Chunks;
use crate::wire_struct;

/// Bytes of a chunk of device memory: the unit of hashing, storing and copying.
pub const CHUNK_SIZE: u64 = 2 << 20;

wire_struct! {
    /// Device memory of a program that is followed chunk by chunk, from its first byte on.
    #[derive(Debug, Clone, Copy, PartialEq, Eq)]
    pub struct Range {
        /// Where the program sees it.
        pub address: u64,
        /// Bytes.
        pub size: u64,
    }
}

impl Range {
    /// A range of so much memory that it counts as one chunk: a block that comes as a whole.
    pub const WHOLE: Self = Self { address: 0, size: 1 };

    fn chunks(&self) -> usize {
        self.size.div_ceil(CHUNK_SIZE) as usize
    }

    /// The numbers of the chunks that have bytes between two addresses.
    pub fn chunks_within(&self, low: u64, end: u64) -> std::ops::Range<usize> {
        let (low, end) = (low.max(self.address), end.min(self.address.saturating_add(self.size)));
        if low >= end {
            return 0..0;
        }
        let number = |address: u64| ((address - self.address) / CHUNK_SIZE) as usize;
        number(low)..number(end - 1) + 1
    }
}

/// What belongs to no single range.
#[repr(C, align(64))]
pub struct Header {
    /// Calls that have waited for chunks.
    pub blocked: AtomicU64,
    /// How long they waited, added up, nanoseconds.
    pub blocked_ns: AtomicU64,
    /// Places in `waits` that were taken, and calls that found none.
    listed: AtomicU64,
    waits: [Listed; WAITS],
    /// The driver's code of an access that found nothing; 0 is none.
    fault: AtomicU32,
    /// When a fault was last asked for, nanoseconds of the monotonic clock.
    looked: AtomicU64,
}

/// So many waits are told one by one.
const WAITS: usize = 255;

/// A wait in the list: none if it has no end.
#[repr(C)]
struct Listed {
    begin: AtomicU64,
    end: AtomicU64,
}

/// A wait of a call, in nanoseconds of the monotonic clock.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Wait {
    /// When it began.
    pub begin: u64,
    /// When it ended.
    pub end: u64,
}

impl Header {
    /// A call has waited, for the `first` time or again.
    pub fn waited(&self, wait: Wait, first: bool) {
        self.blocked.fetch_add(u64::from(first), Ordering::Relaxed);
        self.blocked_ns.fetch_add(wait.end.saturating_sub(wait.begin), Ordering::Relaxed);
        let place = self.listed.fetch_add(1, Ordering::Relaxed);
        if let Some(listed) = usize::try_from(place).ok().and_then(|place| self.waits.get(place)) {
            listed.begin.store(wait.begin, Ordering::Relaxed);
            // A thread that sees the end sees the begin.
            listed.end.store(wait.end, Ordering::Release);
        }
    }

    /// A call of the program has got this code: the device has touched memory that was not there yet.
    /// The first code counts.
    pub fn set_fault(&self, code: u32) {
        let _ = self.fault.compare_exchange(0, code, Ordering::Relaxed, Ordering::Relaxed);
    }

    /// Notes that a fault is asked for, and returns it if there is one.
    pub fn look(&self) -> Option<u32> {
        self.looked.store(monotonic_ns(), Ordering::Relaxed);
        self.fault()
    }

    /// Whether a fault was asked for within `time`.
    pub fn is_looked_at(&self, time: Duration) -> bool {
        let since = monotonic_ns().saturating_sub(self.looked.load(Ordering::Relaxed));
        u128::from(since) <= time.as_nanos()
    }

    /// The code of the first fault, if there was one.
    pub fn fault(&self) -> Option<u32> {
        Some(self.fault.load(Ordering::Relaxed)).filter(|code| *code != 0)
    }

    /// The first waits, at most 255.
    pub fn waits(&self) -> Vec<Wait> {
        let read = |listed: &Listed| {
            let end = listed.end.load(Ordering::Acquire);
            Wait { begin: listed.begin.load(Ordering::Relaxed), end }
        };
        self.waits.iter().map(read).filter(|wait| wait.end != 0).collect()
    }
}

/// Now, on the clock of [`Wait`].
pub fn monotonic_ns() -> u64 {
    let now = rustix::time::clock_gettime(rustix::time::ClockId::Monotonic);
    let (seconds, ns) = (now.tv_sec.unsigned_abs(), now.tv_nsec.unsigned_abs());
    seconds.saturating_mul(1_000_000_000).saturating_add(ns)
}

/// A table, mapped. It is gone with its last mapping; children of a fork do not have it.
#[derive(Debug)]
pub struct Table {
    address: *mut u8,
    len: usize,
    ranges: Vec<Range>,
    /// The number of the first chunk of each range among all.
    first: Vec<usize>,
    chunks: usize,
}

// SAFETY: shared memory that is only accessed through atomics.
unsafe impl Send for Table {}
// SAFETY: shared memory that any number of threads may access through atomics.
unsafe impl Sync for Table {}

impl Table {
    /// Makes a table in which everything is saved, and the file to be sent to the other side.
    ///
    /// # Errors
    /// The ranges have more chunks than memory could, or the kernel gives no memory or no mapping.
    pub fn create(ranges: Vec<Range>) -> io::Result<(Self, OwnedFd)> {
        let (_, _, len) = layout(&ranges).ok_or_else(too_large)?;
        let file = shared_memory("gpucr-chunks", len as u64)?;
        Ok((Self::open(&file, ranges)?, file))
    }

    /// Maps a table that the other side has made for these ranges.
    ///
    /// # Errors
    /// The file is too small for them, or it cannot be mapped.
    pub fn open(file: impl AsFd, ranges: Vec<Range>) -> io::Result<Self> {
        let (first, chunks, len) = layout(&ranges).ok_or_else(too_large)?;
        // Beyond the end of the file every access would be a fault.
        if u64::try_from(rustix::fs::fstat(&file)?.st_size).unwrap_or(0) < len as u64 {
            return Err(io::Error::new(io::ErrorKind::InvalidData, "the chunk table is too small"));
        }
        let access = ProtFlags::READ | ProtFlags::WRITE;
        // SAFETY: a new mapping at an address of the kernel's choice.
        let address = unsafe {
            rustix::mm::mmap(std::ptr::null_mut(), len, access, MapFlags::SHARED, &file, 0)?
        };
        // SAFETY: the mapping was made just now. Where the kernel refuses, a child has it in vain.
        let _ = unsafe { rustix::mm::madvise(address, len, Advice::LinuxDontFork) };
        Ok(Self { address: address.cast(), len, ranges, first, chunks })
    }

    /// The counts that are shared too.
    pub fn header(&self) -> &Header {
        // SAFETY: the mapping begins with it, aligned to a page, and zeros are a header.
        unsafe { &*self.address.cast::<Header>() }
    }

    /// All words behind the header.
    fn words(&self) -> &[AtomicU32] {
        let count = 2 * self.ranges.len() + self.chunks;
        // SAFETY: `layout` has made room for so many behind the header.
        unsafe { std::slice::from_raw_parts(self.address.add(size_of::<Header>()).cast(), count) }
    }

    /// The ranges.
    pub fn ranges(&self) -> &[Range] {
        &self.ranges
    }

    /// The chunks of range number `range`.
    pub fn chunks(&self, range: usize) -> Chunks<'_> {
        let (of_ranges, states) = self.words().split_at(2 * self.ranges.len());
        let first = self.first[range];
        let states = &states[first..first + self.ranges[range].chunks()];
        Chunks { left: &of_ranges[2 * range], wanted: &of_ranges[2 * range + 1], states }
    }

    /// The chunks of all ranges.
    pub fn all(&self) -> impl Iterator<Item = Chunks<'_>> {
        (0..self.ranges.len()).map(|range| self.chunks(range))
    }

    /// Claims a chunk that a launch waits for: its range, and its number in it.
    pub fn claim_wanted(&self) -> Option<(usize, usize)> {
        let mut all = self.all().enumerate();
        all.find_map(|(range, chunks)| Some((range, chunks.claim_wanted()?)))
    }

    /// How many chunks are not saved.
    pub fn left(&self) -> u64 {
        self.all().map(|chunks| u64::from(chunks.left.load(Ordering::Relaxed))).sum()
    }

    /// Whether a launch waits for a chunk.
    pub fn is_wanted(&self) -> bool {
        self.all().any(|chunks| chunks.are_wanted())
    }

    /// Makes all chunks free to be written, and wakes all who wait.
    pub fn end(&self) {
        self.all().for_each(|chunks| chunks.end());
    }
}

impl Drop for Table {
    fn drop(&mut self) {
        // SAFETY: mapped in `open`, and nothing borrowed from it is left.
        let _ = unsafe { rustix::mm::munmap(self.address.cast(), self.len) };
    }
}

/// Memory without a name that is given to another process too, and keeps its length: a process that could cut it off
/// would end one that has it mapped.
///
/// # Errors
/// The kernel gives no descriptor, no memory of that length, or does not seal it; nothing is left of it then.
pub fn shared_memory(name: &str, len: u64) -> io::Result<OwnedFd> {
    let flags = MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING;
    let file = rustix::fs::memfd_create(name, flags)?;
    rustix::fs::ftruncate(&file, len)?;
    rustix::fs::fcntl_add_seals(&file, SealFlags::SHRINK | SealFlags::GROW | SealFlags::SEAL)?;
    Ok(file)
}

fn too_large() -> io::Error {
    io::Error::new(io::ErrorKind::InvalidInput, "the chunk table would be too large")
}

/// The number of the first chunk of each range, that of all chunks, and the bytes of the file.
fn layout(ranges: &[Range]) -> Option<(Vec<usize>, usize, usize)> {
    let (mut first, mut chunks) = (Vec::with_capacity(ranges.len()), 0usize);
    for range in ranges {
        first.push(chunks);
        chunks = chunks.checked_add(range.chunks())?;
    }
    let words = ranges.len().checked_mul(2)?.checked_add(chunks)?;
    let len = words.checked_mul(size_of::<AtomicU32>())?.checked_add(size_of::<Header>())?;
    isize::try_from(len).ok()?;
    Some((first, chunks, len))
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::time::Duration;

    const MIB: u64 = 1 << 20;

    fn ranges() -> Vec<Range> {
        vec![
            Range { address: 0x1000_0000, size: 5 * MIB },
            Range { address: 0x4000_0000, size: 2 * MIB },
        ]
    }

    #[test]
    fn both_sides_see_the_same_chunks() {
        let (ours, file) = Table::create(ranges()).expect("memory");
        let theirs = Table::open(&file, ranges()).expect("mapped");
        ours.chunks(0).pend(2);
        ours.chunks(1).pend(0);
        assert_eq!(theirs.chunks(0).states.len(), 3, "the last one is a half");
        assert!(theirs.chunks(0).are_saved(0..2) && !theirs.chunks(0).are_saved(0..3));
        assert!(ours.left() == 2 && !ours.is_wanted());
        assert!(theirs.chunks(1).want(0) && ours.is_wanted());
        assert_eq!(ours.claim_wanted(), Some((1, 0)));
        assert_eq!(ours.claim_wanted(), None);
        assert!(ours.chunks(1).finish(0));
        assert!(ours.left() == 1 && !ours.is_wanted());
        assert!(!theirs.chunks(1).want(0));
        let waits: Vec<Wait> = (1..=300).map(|n| Wait { begin: n, end: n + 10 }).collect();
        waits.iter().for_each(|wait| theirs.header().waited(*wait, wait.begin % 3 == 0));
        let (blocked, ns) = (&ours.header().blocked, &ours.header().blocked_ns);
        assert_eq!((blocked.load(Ordering::Relaxed), ns.load(Ordering::Relaxed)), (100, 3000));
        assert_eq!(ours.header().waits(), waits[..255]);
        ours.end();
        assert!(theirs.chunks(0).are_saved(0..3));
    }

    #[test]
    fn who_sleeps_in_one_mapping_is_woken_through_another() {
        let (ours, file) = Table::create(ranges()).expect("memory");
        let theirs = Table::open(&file, ranges()).expect("mapped");
        for end in [false, true] {
            ours.chunks(0).pend(1);
            std::thread::scope(|scope| {
                let launch = scope.spawn(|| theirs.chunks(0).wait(1));
                // Long enough for it to sleep; if it does not yet, nothing is tested, and nothing fails.
                std::thread::sleep(Duration::from_millis(30));
                if end {
                    ours.end();
                } else {
                    assert!(ours.chunks(0).claim(1) && ours.chunks(0).finish(1));
                }
                launch.join().expect("joined");
            });
        }
    }

    #[test]
    fn a_file_that_is_too_small_is_refused() {
        let (_, file) = Table::create(ranges()).expect("memory");
        let more = vec![Range { address: 0, size: 1 << 40 }];
        assert!(Table::open(&file, more).is_err());
        let absurd = vec![Range { address: 0, size: u64::MAX }; 1 << 24];
        assert!(Table::open(&file, absurd).is_err());
    }

    #[test]
    fn nobody_cuts_a_table_off() {
        let (_ours, file) = Table::create(ranges()).expect("memory");
        assert!(rustix::fs::ftruncate(&file, 0).is_err());
        assert!(rustix::fs::fcntl_add_seals(&file, SealFlags::WRITE).is_err());
    }

    #[test]
    fn addresses_lead_to_chunks() {
        let range = ranges()[0];
        let at = |low: u64, end: u64| range.chunks_within(range.address + low, range.address + end);
        assert_eq!(at(0, 1), 0..1);
        assert_eq!(at(2 * MIB - 1, 2 * MIB + 1), 0..2);
        assert_eq!(at(4 * MIB, 100 * MIB), 2..3);
        assert_eq!(at(5 * MIB, 100 * MIB), 0..0);
        assert_eq!(at(7, 7), 0..0);
        assert_eq!(range.chunks_within(0, range.address), 0..0);
    }
}
