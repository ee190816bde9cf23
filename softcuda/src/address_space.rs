//! Device addresses. They are host addresses inside one window that nothing else uses; ranges of
//! it are reserved (inaccessible, no memory behind them) and then backed. Which granules of the
//! window kernels and copies may touch, and which of them they may write to, is kept in bitmaps, so
//! that looking up costs no lock; pinned host memory, which lies anywhere, is in a sorted table.

use std::collections::BTreeMap;
use std::ffi::c_void;
use std::sync::atomic::{AtomicU64, Ordering};

use parking_lot::{Mutex, RwLock};
use rustix::fd::BorrowedFd;
use rustix::mm::{self, MapFlags, MprotectFlags, ProtFlags};

use crate::status::{Code, Outcome};

/// First address of the window. Linux places heaps, stacks and libraries far above it.
const WINDOW: u64 = 0x2000_0000_0000;
const WINDOW_SIZE: u64 = 1 << 40;
/// The unit of physical memory and of mapping: 2 MiB.
pub(crate) const GRANULE: u64 = 2 << 20;

const WORDS: usize = (WINDOW_SIZE / GRANULE / 64) as usize;
/// One bit for each granule of the window.
type Granules = [AtomicU64; WORDS];
static ACCESSIBLE: Granules = [const { AtomicU64::new(0) }; WORDS];
/// Those of the accessible ones that are not read-only.
static WRITABLE: Granules = [const { AtomicU64::new(0) }; WORDS];
static RESERVED: Mutex<BTreeMap<u64, u64>> = Mutex::new(BTreeMap::new());
static HOST: RwLock<BTreeMap<u64, u64>> = RwLock::new(BTreeMap::new());

/// What the device may do with memory. The numbers are those of `CUmemAccess_flags`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Access {
    /// Nothing.
    None = 0,
    /// Read it.
    Read = 1,
    /// Read it and write to it.
    ReadWrite = 3,
}

impl TryFrom<u32> for Access {
    type Error = Code;

    fn try_from(flags: u32) -> Outcome<Access> {
        match flags {
            0 => Ok(Access::None),
            1 => Ok(Access::Read),
            3 => Ok(Access::ReadWrite),
            _ => Err(Code::INVALID_VALUE),
        }
    }
}

/// Whether the device may read all of a range.
pub(crate) fn is_accessible(address: u64, size: u64) -> bool {
    is_in(&ACCESSIBLE, address, size)
}

/// Whether the device may read all of a range and write to it.
pub(crate) fn is_writable(address: u64, size: u64) -> bool {
    is_in(&WRITABLE, address, size)
}

/// Whether a range is all granules of a bitmap, or all pinned host memory.
fn is_in(granules: &Granules, address: u64, size: u64) -> bool {
    let Some(last) = address.checked_add(size.max(1) - 1) else { return false };
    if address >= WINDOW && last < WINDOW + WINDOW_SIZE {
        let first = (address - WINDOW) / GRANULE;
        let last = (last - WINDOW) / GRANULE;
        if (first..=last).all(|granule| has(granules, granule)) {
            return true;
        }
    }
    // A program may have put memory of its own where it has reserved addresses.
    is_registered_host(address, size)
}

/// Whether a granule, by its number, is in a bitmap.
fn has(granules: &Granules, granule: u64) -> bool {
    granules[(granule / 64) as usize].load(Ordering::Acquire) & (1 << (granule % 64)) != 0
}

/// Whether a part of a range may be read but not written to.
pub(crate) fn any_read_only(address: u64, size: u64) -> bool {
    let end = address.saturating_add(size).min(WINDOW + WINDOW_SIZE);
    let first = address.max(WINDOW);
    first < end
        && ((first - WINDOW) / GRANULE..=(end - 1 - WINDOW) / GRANULE)
            .any(|granule| has(&ACCESSIBLE, granule) && !has(&WRITABLE, granule))
}

/// All device memory that may be written: address and size of each piece.
pub(crate) fn writable_ranges() -> Vec<(u64, u64)> {
    let mut ranges: Vec<(u64, u64)> = Vec::new();
    for (number, word) in WRITABLE.iter().enumerate() {
        let bits = word.load(Ordering::Acquire);
        for bit in (0..64).filter(|bit| bits >> bit & 1 != 0) {
            let address = WINDOW + (number as u64 * 64 + bit) * GRANULE;
            match ranges.last_mut() {
                Some((start, size)) if *start + *size == address => *size += GRANULE,
                _ => ranges.push((address, GRANULE)),
            }
        }
    }
    ranges
}

/// What the device may do with the byte at an address.
pub(crate) fn access(address: u64) -> Access {
    match (is_accessible(address, 1), is_writable(address, 1)) {
        (false, _) => Access::None,
        (true, false) => Access::Read,
        (true, true) => Access::ReadWrite,
    }
}

/// Whether all of a range is pinned host memory.
pub(crate) fn is_registered_host(address: u64, size: u64) -> bool {
    let host = HOST.read();
    host.range(..=address).next_back().is_some_and(|(start, length)| {
        address.checked_add(size).is_some_and(|end| end <= start + length)
    })
}

/// Whether an address is inside the window of device addresses.
pub(crate) fn in_window(address: u64) -> bool {
    (WINDOW..WINDOW + WINDOW_SIZE).contains(&address)
}

/// Puts granules into a bitmap or takes them out. The range is whole granules of the window.
fn set(granules: &Granules, address: u64, size: u64, on: bool) {
    let first = (address - WINDOW) / GRANULE;
    for granule in first..first + size / GRANULE {
        let bit = 1 << (granule % 64);
        let word = &granules[(granule / 64) as usize];
        if on {
            word.fetch_or(bit, Ordering::AcqRel);
        } else {
            word.fetch_and(!bit, Ordering::AcqRel);
        }
    }
}

/// Adds pinned host memory. Overlaps are the caller's to refuse.
pub(crate) fn register_host(address: u64, size: u64) {
    HOST.write().insert(address, size);
}

/// Takes pinned host memory out again.
pub(crate) fn unregister_host(address: u64) {
    HOST.write().remove(&address);
}

/// Rounds up to whole granules; `None` on overflow.
pub(crate) fn round_up(size: u64) -> Option<u64> {
    size.checked_next_multiple_of(GRANULE)
}

/// Reserves `size` bytes (whole granules) at a multiple of `alignment` (a power of two), at `hint`
/// if that is free.
///
/// # Errors
/// `OUT_OF_MEMORY` when the window has no such range left.
pub(crate) fn reserve(size: u64, alignment: u64, hint: u64) -> Outcome<u64> {
    let alignment = alignment.max(GRANULE);
    let end = WINDOW + WINDOW_SIZE;
    let mut reserved = RESERVED.lock();
    let fits = |reserved: &BTreeMap<u64, u64>, start: u64| {
        let free = |end: u64| reserved.range(..end).next_back().is_none_or(|(s, l)| s + l <= start);
        start >= WINDOW && start.checked_add(size).is_some_and(|last| last <= end && free(last))
    };
    if hint != 0 && hint.is_multiple_of(alignment) && fits(&reserved, hint) && place(hint, size) {
        reserved.insert(hint, size);
        return Ok(hint);
    }
    let mut start = WINDOW.next_multiple_of(alignment);
    while start.checked_add(size).is_some_and(|last| last <= end) {
        if let Some((taken, length)) = reserved.range(..start + size).next_back()
            && taken + length > start
        {
            start = (taken + length).next_multiple_of(alignment);
            continue;
        }
        if place(start, size) {
            reserved.insert(start, size);
            return Ok(start);
        }
        // Something foreign is mapped in the window; step over it.
        start = (start + size.max(1 << 30)).next_multiple_of(alignment);
    }
    Err(Code::OUT_OF_MEMORY)
}

fn place(address: u64, size: u64) -> bool {
    let flags = MapFlags::PRIVATE | MapFlags::NORESERVE | MapFlags::FIXED_NOREPLACE;
    // SAFETY: FIXED_NOREPLACE never replaces a mapping that somebody else made.
    let mapped = unsafe {
        mm::mmap_anonymous(address as *mut c_void, size as usize, ProtFlags::empty(), flags)
    };
    match mapped {
        Ok(at) if at as u64 == address => true,
        Ok(at) => {
            // A kernel without FIXED_NOREPLACE takes the address as a hint only.
            // SAFETY: this mapping was made just now and nobody knows of it.
            let _ = unsafe { mm::munmap(at, size as usize) };
            false
        }
        Err(_) => false,
    }
}

/// Whether a range lies inside one reservation.
pub(crate) fn is_reserved(address: u64, size: u64) -> bool {
    let reserved = RESERVED.lock();
    reserved.range(..=address).next_back().is_some_and(|(start, length)| {
        address.checked_add(size).is_some_and(|end| end <= start + length)
    })
}

/// The reservation that begins exactly here.
pub(crate) fn reservation_size(address: u64) -> Option<u64> {
    RESERVED.lock().get(&address).copied()
}

/// Gives a reservation back; nothing may be mapped in it any more.
pub(crate) fn unreserve(address: u64) {
    let mut reserved = RESERVED.lock();
    if let Some(size) = reserved.remove(&address) {
        // SAFETY: the range is a reservation of ours without mappings, and nobody else can make
        // one there before the lock is released.
        let result = unsafe { mm::munmap(address as *mut c_void, size as usize) };
        debug_assert!(result.is_ok());
    }
}

/// Puts memory behind a reserved range; not accessible until [`protect`] makes it so.
///
/// # Errors
/// `OUT_OF_MEMORY` when the kernel refuses; the range is then still only reserved.
pub(crate) fn back(address: u64, size: u64, memory: BorrowedFd<'_>, offset: u64) -> Outcome {
    let flags = MapFlags::SHARED | MapFlags::FIXED;
    // SAFETY: callers pass a range that they own inside a reservation, so only reserved address
    // space is replaced.
    unsafe {
        let at = mm::mmap(
            address as *mut c_void,
            size as usize,
            ProtFlags::empty(),
            flags,
            memory,
            offset,
        )
        .map_err(|_| Code::OUT_OF_MEMORY)?;
        // Device memory is not inherited over fork. Failing to say so only wastes memory.
        let _ = mm::madvise(at, size as usize, mm::Advice::LinuxDontFork);
    }
    Ok(())
}

/// Says what this process's copies and kernels may do with backed memory. The memory is protected
/// so that a write which nobody checked stops the process rather than change read-only memory.
///
/// # Errors
/// `OUT_OF_MEMORY` when the kernel has no room for another mapping; what `access` lacks is taken away
/// even then.
pub(crate) fn protect(address: u64, size: u64, access: Access) -> Outcome {
    let maps = [(&ACCESSIBLE, access >= Access::Read), (&WRITABLE, access == Access::ReadWrite)];
    // Nobody is told that memory may be touched before it may, or after it may no more.
    for (granules, _) in maps.iter().filter(|(_, on)| !on) {
        set(granules, address, size, false);
    }
    let flags = match access {
        Access::None => MprotectFlags::empty(),
        Access::Read => MprotectFlags::READ,
        Access::ReadWrite => MprotectFlags::READ | MprotectFlags::WRITE,
    };
    // SAFETY: the range is device memory, which no Rust reference ever points into.
    unsafe { mm::mprotect(address as *mut c_void, size as usize, flags) }
        .map_err(|_| Code::OUT_OF_MEMORY)?;
    for (granules, _) in maps.iter().filter(|(_, on)| *on) {
        set(granules, address, size, true);
    }
    Ok(())
}

/// Takes the memory behind a range away; the range stays reserved.
pub(crate) fn unback(address: u64, size: u64) {
    set(&WRITABLE, address, size, false);
    set(&ACCESSIBLE, address, size, false);
    let flags = MapFlags::PRIVATE | MapFlags::NORESERVE | MapFlags::FIXED;
    // SAFETY: the range is inside a reservation of ours, and device memory has no Rust references.
    let result = unsafe {
        mm::mmap_anonymous(address as *mut c_void, size as usize, ProtFlags::empty(), flags)
    };
    debug_assert!(result.is_ok());
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn reservations_keep_apart_and_honour_hints() {
        let first = reserve(4 * GRANULE, GRANULE, 0).unwrap();
        let second = reserve(GRANULE, 8 * GRANULE, 0).unwrap();
        assert!(second.is_multiple_of(8 * GRANULE));
        assert!(second >= first + 4 * GRANULE || second + GRANULE <= first);
        let hint = WINDOW + (WINDOW_SIZE >> 1);
        assert_eq!(reserve(GRANULE, 0, hint).unwrap(), hint);
        assert_ne!(reserve(GRANULE, 0, hint).unwrap(), hint);
        assert!(is_reserved(first + GRANULE, 3 * GRANULE));
        assert!(!is_reserved(first + GRANULE, 4 * GRANULE) || second == first + 4 * GRANULE);
        assert_eq!(reserve(2 * WINDOW_SIZE, 0, 0), Err(Code::OUT_OF_MEMORY));
        unreserve(first);
        assert_eq!(reservation_size(first), None);
        assert!(!is_accessible(first, 1));
    }
}
