//! Which allocation an address belongs to, for threads that launch: read without a lock, in
//! constant time.
//!
//! A page table of device memory. The first level has an entry for each GiB of the address space,
//! the second one for each 2 MiB: what the heap and the driver's virtual memory management hand out
//! are multiples of that. Where small allocations share 2 MiB, a third level has an entry for each
//! 512 bytes. It is written under the lock of the memory tables. Second and third levels are kept
//! once they are made: a reader may be looking.
//!
//! A reader may, while a writer is at work, see an allocation that is being freed, or not see one that is being
//! made. The program that uses memory while it frees it has a mistake of its own.

use std::sync::Mutex;
use std::sync::atomic::{AtomicPtr, AtomicU64, AtomicUsize, Ordering};

use gpucr_wire::access::RESERVATION;

use crate::resettable::Resettable;

/// Addresses of user space on x86-64 have so many bits, and those of devices are among them.
const ADDRESS_BITS: u32 = 47;
const REGION_BITS: u32 = 30;
const CHUNK_BITS: u32 = 21;
const CHUNK: u64 = 1 << CHUNK_BITS;
const GRAIN_BITS: u32 = 9;
const GRAIN: u64 = 1 << GRAIN_BITS;
const REGIONS: usize = 1 << (ADDRESS_BITS - REGION_BITS);
const CHUNKS: usize = 1 << (REGION_BITS - CHUNK_BITS);
const GRAINS: usize = 1 << (CHUNK_BITS - GRAIN_BITS);

/// In an entry of the second level: the rest is the address of a third level. Else the entry is an
/// id shifted by one, or 0.
const SHARED: u64 = 1;

/// An entry for each 2 MiB of a GiB.
struct Region([AtomicU64; CHUNKS]);
/// The id for each 512 bytes of 2 MiB; 0 is none.
struct Shared([AtomicU64; GRAINS]);

static REGION: [AtomicPtr<Region>; REGIONS] =
    [const { AtomicPtr::new(std::ptr::null_mut()) }; REGIONS];
/// The regions that have an entry lie between these, the last one not included.
static FIRST: AtomicUsize = AtomicUsize::new(REGIONS);
static LAST: AtomicUsize = AtomicUsize::new(0);
/// Third levels that no entry refers to.
static SPARE: Resettable<Mutex<Vec<&'static Shared>>> = Resettable::new(Mutex::new(Vec::new()));

/// The name of a reservation of the program's as an allocation: its address with the mark.
pub(crate) fn reservation_id(address: u64) -> u64 {
    RESERVATION | address
}

/// The address of a reservation, if `id` is one's name.
pub(crate) fn reservation_address(id: u64) -> Option<u64> {
    (id & RESERVATION != 0).then_some(id & !RESERVATION)
}

/// The allocation that holds `address`.
#[inline]
pub(crate) fn find(address: u64) -> Option<u64> {
    let region = (address >> REGION_BITS) as usize;
    if region >= REGIONS {
        return None;
    }
    // SAFETY: not null, it was made by `region` from a box that is never freed.
    let region = unsafe { REGION[region].load(Ordering::Acquire).as_ref()? };
    let entry = region.0[chunk_of(address)].load(Ordering::Acquire);
    let id = if entry & SHARED == 0 {
        entry >> 1
    } else {
        // SAFETY: an entry with this mark holds the address of a third level, which is never freed.
        let shared = unsafe { &*((entry & !SHARED) as *const Shared) };
        shared.0[grain_of(address)].load(Ordering::Relaxed)
    };
    (id != 0).then_some(id)
}

fn chunk_of(address: u64) -> usize {
    (address >> CHUNK_BITS) as usize % CHUNKS
}

fn grain_of(address: u64) -> usize {
    (address >> GRAIN_BITS) as usize % GRAINS
}

/// The entry of the 2 MiB that hold `address`; `None` beyond what addresses can be.
fn entry(address: u64) -> Option<&'static AtomicU64> {
    let number = (address >> REGION_BITS) as usize;
    let place = REGION.get(number)?;
    let mut region = place.load(Ordering::Acquire);
    if region.is_null() {
        let new = Box::into_raw(Box::new(Region([const { AtomicU64::new(0) }; CHUNKS])));
        let (success, failure) = (Ordering::AcqRel, Ordering::Acquire);
        region = match place.compare_exchange(region, new, success, failure) {
            Ok(_) => {
                FIRST.fetch_min(number, Ordering::Relaxed);
                LAST.fetch_max(number + 1, Ordering::Relaxed);
                new
            }
            Err(other) => {
                // SAFETY: made above, and nobody else has seen it.
                drop(unsafe { Box::from_raw(new) });
                other
            }
        };
    }
    // SAFETY: made from a box that is never freed.
    Some(unsafe { &(*region).0[chunk_of(address)] })
}

/// The entries of a range, which begins at a multiple of 2 MiB.
fn entries(address: u64, size: u64) -> impl Iterator<Item = &'static AtomicU64> {
    (address..address.saturating_add(size)).step_by(CHUNK as usize).map_while(entry)
}

/// Memory from `address` on, which shares its 2 MiB pages with nothing else, belongs to `id`.
pub(crate) fn insert(address: u64, size: u64, id: u64) {
    entries(address, size).for_each(|entry| entry.store(id << 1, Ordering::Release));
}

/// Memory within one page of 2 MiB belongs to `id`.
pub(crate) fn insert_small(address: u64, size: u64, id: u64) {
    let Some(entry) = entry(address) else { return };
    let mut value = entry.load(Ordering::Acquire);
    if value & SHARED == 0 {
        value = std::ptr::from_ref(spare(|spare| spare.pop()).unwrap_or_else(shared)) as u64;
        value |= SHARED;
        entry.store(value, Ordering::Release);
    }
    fill_small(value, address, size, id);
}

/// Memory within one page of 2 MiB belongs to nothing any more.
pub(crate) fn remove_small(address: u64, size: u64) {
    let Some(entry) = entry(address) else { return };
    let value = entry.load(Ordering::Acquire);
    if value & SHARED != 0 {
        fill_small(value, address, size, 0);
    }
}

fn fill_small(value: u64, address: u64, size: u64, id: u64) {
    // SAFETY: the callers have seen the mark of a third level, and those are never freed.
    let shared = unsafe { &*((value & !SHARED) as *const Shared) };
    let first = grain_of(address);
    let count = size.div_ceil(GRAIN) as usize;
    shared.0.iter().skip(first).take(count).for_each(|grain| grain.store(id, Ordering::Relaxed));
}

/// Memory from `address` on, a multiple of 2 MiB, belongs to nothing any more.
pub(crate) fn remove(address: u64, size: u64) {
    for entry in entries(address, size) {
        let value = entry.swap(0, Ordering::AcqRel);
        if value & SHARED != 0 {
            // SAFETY: as in `find`.
            let shared = unsafe { &*((value & !SHARED) as *const Shared) };
            shared.0.iter().for_each(|grain| grain.store(0, Ordering::Relaxed));
            spare(|spare| spare.push(shared));
        }
    }
}

fn shared() -> &'static Shared {
    Box::leak(Box::new(Shared([const { AtomicU64::new(0) }; GRAINS])))
}

fn spare<T>(with: impl FnOnce(&mut Vec<&'static Shared>) -> T) -> T {
    with(&mut SPARE.get().lock().unwrap_or_else(|poisoned| poisoned.into_inner()))
}

/// Forgets everything, in the child of a fork.
///
/// # Safety
/// No other thread exists.
pub(crate) unsafe fn reset() {
    let used = FIRST.load(Ordering::Relaxed)..LAST.load(Ordering::Relaxed);
    for region in REGION.get(used).unwrap_or_default() {
        // What was there is not worth the time to give it back.
        region.store(std::ptr::null_mut(), Ordering::Relaxed);
    }
    // SAFETY: the caller's duty.
    unsafe { SPARE.reset(Mutex::new(Vec::new())) };
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Far from what other tests make up.
    const BASE: u64 = 0x5555 << REGION_BITS;

    #[test]
    fn addresses_lead_to_their_allocations() {
        insert(BASE, 5 << 20, 7); // three pages
        insert(BASE + 3 * CHUNK, CHUNK, reservation_id(BASE));
        assert_eq!(find(BASE), Some(7));
        assert_eq!(find(BASE + 3 * CHUNK - 1), Some(7), "to the end of the last page");
        assert_eq!(find(BASE + 3 * CHUNK), Some(reservation_id(BASE)));
        assert_eq!(reservation_address(reservation_id(BASE)), Some(BASE));
        assert_eq!(reservation_address(7), None);
        assert_eq!(find(BASE + 4 * CHUNK), None);
        assert_eq!(find(BASE - 1), None);
        for word in [0, 1, u64::MAX, 1 << 47, 0x3f80_0000_3f80_0000] {
            assert_eq!(find(word), None, "{word:#x}");
        }
        remove(BASE, 5 << 20);
        assert_eq!(find(BASE), None);
        assert_eq!(find(BASE + 3 * CHUNK), Some(reservation_id(BASE)));
        remove(BASE + 3 * CHUNK, CHUNK);
    }

    #[test]
    fn small_ones_share_a_page() {
        let page = BASE + (1 << REGION_BITS) - CHUNK;
        insert_small(page + 512, 513, 3);
        insert_small(page + CHUNK - 512, 512, 4);
        let at = |offset| find(page + offset);
        assert_eq!(
            [at(0), at(511), at(512), at(1535), at(1536)],
            [None, None, Some(3), Some(3), None]
        );
        assert_eq!(at(CHUNK - 1), Some(4));
        assert_eq!(find(page + CHUNK), None, "the next region");
        remove_small(page + 512, 513);
        assert_eq!((at(512), at(CHUNK - 1)), (None, Some(4)));
        remove(page, CHUNK);
        assert_eq!(at(CHUNK - 1), None);
        // What one page had is used again, and empty.
        insert_small(page + CHUNK * 9, 512, 5);
        assert_eq!((find(page + CHUNK * 9), find(page + CHUNK * 10 - 512)), (Some(5), None));
        remove(page + CHUNK * 9, CHUNK);
    }
}
