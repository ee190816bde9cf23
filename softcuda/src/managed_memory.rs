//! Managed memory: one address for host and device. The device is the host's processor, so there
//! is nothing to migrate; what a program advises about a range is kept and reported.
//!
//! It is not counted as device memory, because a device may have more managed memory than it has
//! memory. The checkpoint refuses a process that has any, as NVIDIA's driver does.

use std::collections::BTreeMap;

use parking_lot::Mutex;

use crate::address_space::{self, GRANULE};
use crate::device_memory;
use crate::status::{Code, Outcome};

/// Ranges of advice begin and end at multiples of this.
const PAGE: u64 = 4096;

/// Where memory may be: `CUmemLocation` with its enumeration as a number.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Location {
    /// `CUmemLocationType`.
    pub(crate) kind: u32,
    /// Ordinal of the device, or number of the NUMA node.
    pub(crate) id: i32,
}

/// What is advised about a range.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Advice {
    /// Mostly read, so that it may be duplicated.
    pub(crate) read_mostly: bool,
    /// Where it should stay.
    pub(crate) preferred: Option<Location>,
    /// Who should have it mapped, in order of advice.
    pub(crate) accessed_by: Vec<Location>,
    /// Where it was prefetched to last.
    pub(crate) prefetched: Option<Location>,
}

/// A piece of managed memory.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Managed {
    /// First address.
    pub(crate) address: u64,
    /// Size as asked for.
    pub(crate) size: u64,
    /// Handle of the context that it belongs to; 0 for memory of a pool, which belongs to none.
    pub(crate) context: u64,
    /// Handle of the pool that it is from, 0 if there is none.
    pub(crate) pool: u64,
    /// As in `CU_POINTER_ATTRIBUTE_BUFFER_ID`.
    pub(crate) id: u64,
}

struct Entry {
    managed: Managed,
    /// Advice from an address up to the next key; the first key is the first address.
    advice: BTreeMap<u64, Advice>,
}

static MEMORY: Mutex<BTreeMap<u64, Entry>> = Mutex::new(BTreeMap::new());

/// Allocates zeroed managed memory.
///
/// # Errors
/// `INVALID_VALUE` for size 0, `OUT_OF_MEMORY`.
pub(crate) fn allocate(context: u64, size: u64) -> Outcome<u64> {
    new(size, context, 0, None)
}

/// Allocates managed memory of a pool, which may say where it should stay.
///
/// # Errors
/// As [`allocate`].
pub(crate) fn allocate_of_pool(pool: u64, size: u64, preferred: Option<Location>) -> Outcome<u64> {
    new(size, 0, pool, preferred)
}

fn new(size: u64, context: u64, pool: u64, preferred: Option<Location>) -> Outcome<u64> {
    if size == 0 {
        return Err(Code::INVALID_VALUE);
    }
    let whole = address_space::round_up(size).ok_or(Code::OUT_OF_MEMORY)?;
    let address = address_space::reserve(whole, GRANULE, 0)?;
    device_memory::back_with_new_memory(address, whole)
        .inspect_err(|_| address_space::unreserve(address))?;
    let managed = Managed { address, size, context, pool, id: device_memory::new_buffer_id() };
    let advice = BTreeMap::from([(address, Advice { preferred, ..Advice::default() })]);
    MEMORY.lock().insert(address, Entry { managed, advice });
    Ok(address)
}

/// Gives memory back that was taken. No work that uses it may be under way.
pub(crate) fn give_back(managed: &Managed) {
    let whole = managed.size.next_multiple_of(GRANULE);
    address_space::unback(managed.address, whole);
    address_space::unreserve(managed.address);
}

/// Frees managed memory by its first address. No work that uses it may be under way.
///
/// # Errors
/// `INVALID_VALUE` for any other address.
pub(crate) fn free(address: u64) -> Outcome {
    give_back(&take(address)?);
    Ok(())
}

/// Takes managed memory from the program by its first address; [`give_back`] frees it.
///
/// # Errors
/// `INVALID_VALUE` for any other address.
pub(crate) fn take(address: u64) -> Outcome<Managed> {
    MEMORY.lock().remove(&address).map(|entry| entry.managed).ok_or(Code::INVALID_VALUE)
}

/// Frees all that belongs to a context.
pub(crate) fn free_context(context: u64) {
    MEMORY.lock().retain(|_, entry| {
        let keep = entry.managed.context != context;
        if !keep {
            give_back(&entry.managed);
        }
        keep
    });
}

/// The managed memory that contains an address.
pub(crate) fn find(address: u64) -> Option<Managed> {
    let memory = MEMORY.lock();
    let (_, entry) = memory.range(..=address).next_back()?;
    (address < entry.managed.address + entry.managed.size).then_some(entry.managed)
}

/// Whether a range is inside one managed allocation.
pub(crate) fn has(address: u64, size: u64) -> bool {
    entry_of(&mut MEMORY.lock(), address, size).is_ok()
}

/// Whether this process has managed memory.
pub(crate) fn any() -> bool {
    !MEMORY.lock().is_empty()
}

/// The allocation that contains a whole range, and the range in whole pages.
fn entry_of(
    memory: &mut BTreeMap<u64, Entry>,
    address: u64,
    size: u64,
) -> Outcome<(&mut Entry, u64, u64)> {
    let end = address.checked_add(size).filter(|_| size != 0).ok_or(Code::INVALID_VALUE)?;
    let (_, entry) = memory.range_mut(..=address).next_back().ok_or(Code::INVALID_VALUE)?;
    let last = entry.managed.address + entry.managed.size;
    if end > last.next_multiple_of(PAGE) {
        return Err(Code::INVALID_VALUE);
    }
    let start = address - address % PAGE;
    Ok((entry, start, end.next_multiple_of(PAGE)))
}

/// Changes the advice about every page of a range.
///
/// # Errors
/// `INVALID_VALUE` unless the range is inside one managed allocation; nothing is changed then.
pub(crate) fn advise(address: u64, size: u64, change: impl Fn(&mut Advice)) -> Outcome {
    let mut memory = MEMORY.lock();
    let (entry, start, end) = entry_of(&mut memory, address, size)?;
    let limit = entry.managed.address + entry.managed.size;
    for cut in [start, end] {
        let before = entry.advice.range(..=cut).next_back();
        if let Some(advice) = before.filter(|_| cut < limit).map(|(_, advice)| advice.clone()) {
            entry.advice.insert(cut, advice);
        }
    }
    entry.advice.range_mut(start..end).for_each(|(_, advice)| change(advice));
    Ok(())
}

/// The advice about each part of a range, in order.
///
/// # Errors
/// `INVALID_VALUE` unless the range is inside one managed allocation.
pub(crate) fn advice(address: u64, size: u64) -> Outcome<Vec<Advice>> {
    let mut memory = MEMORY.lock();
    let (entry, start, end) = entry_of(&mut memory, address, size)?;
    let first = entry.advice.range(..=start).next_back().map_or(start, |(key, _)| *key);
    Ok(entry.advice.range(first..end).map(|(_, advice)| advice.clone()).collect())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn advice_is_kept_for_the_pages_of_a_range() {
        let address = allocate(77, 4 * PAGE).unwrap();
        advise(address + PAGE, PAGE + 1, |advice| advice.read_mostly = true).unwrap();
        let seen = |at: u64, size: u64| -> Vec<bool> {
            advice(address + at, size).unwrap().iter().map(|a| a.read_mostly).collect()
        };
        assert_eq!(seen(0, 4 * PAGE), [false, true, false]);
        assert_eq!(seen(PAGE, 2 * PAGE), [true]);
        assert_eq!(seen(3 * PAGE, 1), [false]);
        assert_eq!(advise(address, 5 * PAGE, |_| ()), Err(Code::INVALID_VALUE));
        assert_eq!(advise(address, 0, |_| ()), Err(Code::INVALID_VALUE));
        assert!(any());
        free_context(77);
        assert_eq!(free(address), Err(Code::INVALID_VALUE));
        assert!(advice(address, 1).is_err());
    }
}
