//! Virtual memory management: physical memory and multicast objects with handles, mapped into reservations.

use std::cell::Cell;
use std::collections::{BTreeMap, HashMap};
use std::mem::ManuallyDrop;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, LazyLock};

use parking_lot::{Mutex, MutexGuard};
use rustix::fd::{AsFd, AsRawFd, OwnedFd};
use rustix::fs::fstat;
use rustix::io::fcntl_dupfd_cloexec;

use crate::address_space::{self, Access, GRANULE};
use crate::backing::Backing;
use crate::descriptors;
use crate::device_memory::{self, charge, refund};
use crate::handles::new_handle;
use crate::managed_memory;
use crate::multicast::{self, Object};
use crate::multicast_table::Properties;
use crate::physical::Physical;
use crate::placement;
use crate::ptx::Replicas;
use crate::settings::settings;
use crate::status::{Code, Outcome};

/// `CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR`.
pub(crate) const POSIX_FILE_DESCRIPTOR: u32 = 1;

/// A mapping of (a part of) physical memory or of a multicast object.
#[derive(Clone)]
pub(crate) struct Mapping {
    /// Size in bytes.
    pub(crate) size: u64,
    /// Where in what is mapped it begins.
    pub(crate) offset: u64,
    /// The access that was granted.
    pub(crate) access: Access,
    /// What is mapped.
    pub(crate) backing: Backing,
    /// As in `CU_POINTER_ATTRIBUTE_BUFFER_ID`.
    pub(crate) id: u64,
}

struct Handle {
    backing: Backing,
    references: u64,
}

#[derive(Default)]
struct State {
    handles: HashMap<u64, Handle>,
    mappings: BTreeMap<u64, Mapping>,
}

static STATE: LazyLock<Mutex<State>> = LazyLock::new(Mutex::default);

fn is_whole(value: u64) -> bool {
    value.is_multiple_of(GRANULE)
}

fn add_handle(backing: Backing) -> u64 {
    let handle = new_handle();
    STATE.lock().handles.insert(handle, Handle { backing, references: 1 });
    handle
}

fn add_memory(physical: Physical) -> u64 {
    add_handle(Backing::Memory(Arc::new(physical)))
}

/// Creates a multicast object and a handle to it.
///
/// # Errors
/// Those of [`multicast::create`].
pub(crate) fn create_multicast(properties: Properties) -> Outcome<u64> {
    Ok(add_handle(Backing::Multicast(multicast::create(properties)?)))
}

/// Creates physical memory, zeroed, and a handle to it.
///
/// # Errors
/// `INVALID_VALUE` for a size that is not a positive number of granules, `OUT_OF_MEMORY`.
pub(crate) fn create(device: usize, size: u64, handle_types: u32) -> Outcome<u64> {
    if size == 0 || !is_whole(size) {
        return Err(Code::INVALID_VALUE);
    }
    multicast::tidy();
    charge(device, size)?;
    let memory = device_memory::new_memory_on(placement::of(device), size);
    let memory = memory.inspect_err(|_| refund(device, size))?;
    Ok(add_memory(Physical {
        size,
        device,
        is_host: false,
        handle_types,
        imported: false,
        exported: AtomicBool::new(false),
        memory: Mutex::new(Some(memory)),
        counted: AtomicBool::new(true),
    }))
}

/// Creates host memory, zeroed, and a handle to it.
///
/// # Errors
/// As for [`create`].
pub(crate) fn create_on_host(size: u64, handle_types: u32) -> Outcome<u64> {
    if size == 0 || !is_whole(size) {
        return Err(Code::INVALID_VALUE);
    }
    Ok(add_memory(Physical {
        size,
        device: 0,
        is_host: true,
        handle_types,
        imported: false,
        exported: AtomicBool::new(false),
        memory: Mutex::new(Some(device_memory::new_host_memory(size)?)),
        counted: AtomicBool::new(false),
    }))
}

/// Drops one reference of a handle.
///
/// # Errors
/// `INVALID_VALUE` for an unknown handle.
pub(crate) fn release(handle: u64) -> Outcome {
    let mut state = STATE.lock();
    let entry = state.handles.get_mut(&handle).ok_or(Code::INVALID_VALUE)?;
    entry.references -= 1;
    if entry.references == 0 {
        state.handles.remove(&handle);
    }
    Ok(())
}

fn backing(handle: u64) -> Outcome<Backing> {
    STATE.lock().handles.get(&handle).map(|h| h.backing.clone()).ok_or(Code::INVALID_VALUE)
}

/// The physical memory behind a handle.
///
/// # Errors
/// `INVALID_VALUE` for an unknown handle, and for one of a multicast object.
pub(crate) fn physical(handle: u64) -> Outcome<Arc<Physical>> {
    backing(handle)?.memory().cloned().ok_or(Code::INVALID_VALUE)
}

/// The multicast object behind a handle.
///
/// # Errors
/// `INVALID_VALUE` for an unknown handle, and for one of memory.
pub(crate) fn multicast(handle: u64) -> Outcome<Arc<Object>> {
    backing(handle)?.multicast().cloned().ok_or(Code::INVALID_VALUE)
}

/// A handle to what is mapped at an address, with one more reference.
///
/// # Errors
/// `INVALID_VALUE` when nothing is mapped there.
pub(crate) fn retain(address: u64) -> Outcome<u64> {
    let mut state = STATE.lock();
    let (_, mapping) = state.find(address).ok_or(Code::INVALID_VALUE)?;
    let known = state.handles.iter_mut().find(|(_, h)| h.backing.is(&mapping.backing));
    if let Some((handle, entry)) = known {
        entry.references += 1;
        return Ok(*handle);
    }
    let handle = new_handle();
    state.handles.insert(handle, Handle { backing: mapping.backing, references: 1 });
    Ok(handle)
}

/// A descriptor for what is behind a handle.
///
/// # Errors
/// `INVALID_VALUE` for an unknown handle, one that was created without the POSIX handle type, or
/// one that was imported (as the real driver, which exports only what the process created);
/// `OPERATING_SYSTEM` when descriptors run out.
pub(crate) fn export(handle: u64) -> Outcome<OwnedFd> {
    let physical = match backing(handle)? {
        Backing::Memory(physical) => physical,
        Backing::Multicast(object) => return object.export(),
    };
    if physical.imported || physical.handle_types & POSIX_FILE_DESCRIPTOR == 0 {
        return Err(Code::INVALID_VALUE);
    }
    let memory = physical.memory.lock();
    let copy = memory.as_ref().ok_or(Code::ILLEGAL_STATE)?.try_clone();
    let copy = copy.map_err(|_| Code::OPERATING_SYSTEM)?;
    physical.exported.store(true, Ordering::Relaxed);
    Ok(copy)
}

/// A handle for what is behind a descriptor, which stays the caller's. `device` is that of memory that does not tell.
///
/// # Errors
/// `INVALID_VALUE` when the descriptor is neither device memory nor a multicast object, `OPERATING_SYSTEM` when
/// descriptors run out.
pub(crate) fn import(device: usize, memory: impl AsFd) -> Outcome<u64> {
    if let Some(object) = multicast::import(&memory)? {
        return Ok(add_handle(Backing::Multicast(object)));
    }
    let size = fstat(&memory).map_err(|_| Code::INVALID_VALUE)?.st_size as u64;
    if size == 0 || !is_whole(size) || !device_memory::is_device_memory(&memory) {
        return Err(Code::INVALID_VALUE);
    }
    // Above the given one: who has that out of the program's way wants this one there as well.
    let above = memory.as_fd().as_raw_fd();
    let memory = descriptors::keep(|| Ok(fcntl_dupfd_cloexec(&memory, above)?));
    let memory = memory.map_err(|_| Code::OPERATING_SYSTEM)?;
    let is_host = device_memory::is_host_memory(&memory);
    let known = device_memory::device_of(&memory);
    let own = known.and_then(|number| placement::ordinal_on(number, settings().devices));
    let device = own.unwrap_or(device);
    if !is_host {
        device_memory::charge_existing(device, size);
    }
    Ok(add_memory(Physical {
        size,
        device,
        is_host,
        handle_types: POSIX_FILE_DESCRIPTOR,
        imported: true,
        exported: AtomicBool::new(false),
        memory: Mutex::new(Some(memory)),
        counted: AtomicBool::new(!is_host),
    }))
}

/// Maps memory or a multicast object into a reservation; not accessible before [`set_access`]. Of an object, this waits
/// until all devices are added to it.
///
/// # Errors
/// `INVALID_VALUE` when anything is not whole granules, outside the memory or the reservation, or
/// overlaps a mapping; `OUT_OF_MEMORY` when the kernel refuses. Nothing is mapped then.
pub(crate) fn map(address: u64, size: u64, offset: u64, handle: u64) -> Outcome {
    let backing = backing(handle)?;
    if let Backing::Multicast(object) = &backing {
        object.wait_for_devices()?;
    }
    let mut state = STATE.lock();
    let end = address.checked_add(size).ok_or(Code::INVALID_VALUE)?;
    let inside = offset.checked_add(size).is_some_and(|last| last <= backing.size());
    if size == 0
        || ![address, size, offset].into_iter().all(is_whole)
        || !inside
        || !address_space::is_reserved(address, size)
        || state.mappings.range(..end).next_back().is_some_and(|(s, m)| s + m.size > address)
        || device_memory::is_block(address)
        || managed_memory::find(address).is_some()
    {
        return Err(Code::INVALID_VALUE);
    }
    if let Backing::Memory(physical) = &backing {
        let memory = physical.memory.lock();
        let memory = memory.as_ref().ok_or(Code::ILLEGAL_STATE)?;
        address_space::back(address, size, memory.as_fd(), offset)?;
    }
    let id = device_memory::new_buffer_id();
    let access = Access::None;
    state.mappings.insert(address, Mapping { size, offset, access, backing, id });
    Ok(())
}

/// Unmaps one or more whole mappings that follow each other without a gap.
///
/// # Errors
/// `INVALID_VALUE` when the range is not exactly that; nothing is unmapped then.
pub(crate) fn unmap(address: u64, size: u64) -> Outcome {
    let mut state = STATE.lock();
    let covered = state.covered(address, size)?;
    // One call for the whole range: it may be thousands of mappings.
    address_space::unback(address, size);
    for start in covered {
        state.mappings.remove(&start);
    }
    Ok(())
}

/// Grants or takes access to whole mappings.
///
/// # Errors
/// `INVALID_VALUE` when the range is not covered by mappings; `OUT_OF_MEMORY` when the kernel
/// refuses.
pub(crate) fn set_access(address: u64, size: u64, access: Access) -> Outcome {
    let mut state = STATE.lock();
    let covered = state.covered(address, size)?;
    let memory = |start: &u64| state.mappings.get(start).filter(|m| m.backing.memory().is_some());
    let all: Option<Vec<_>> = covered.iter().map(memory).collect();
    if all.is_some() {
        // One call for the whole range, as in `unmap`.
        address_space::protect(address, size, access)?;
    } else {
        for (start, mapping) in covered.iter().filter_map(|start| Some((start, memory(start)?))) {
            address_space::protect(*start, mapping.size, access)?;
        }
    }
    for start in covered {
        if let Some(mapping) = state.mappings.get_mut(&start) {
            mapping.access = access;
        }
    }
    Ok(())
}

/// Whether [`set_access`] would take access away that a mapping has. No work may be under way then,
/// since it may have found that it has the access.
pub(crate) fn would_reduce(address: u64, size: u64, access: Access) -> bool {
    let state = STATE.lock();
    let end = address.saturating_add(size);
    address < end && state.mappings.range(address..end).any(|(_, mapping)| mapping.access > access)
}

/// Whether a device may be given access to a range: to multicast objects those alone that were added to them.
///
/// # Errors
/// `ILLEGAL_STATE` for a device that was not, as NVIDIA's forum tells of the driver.
pub(crate) fn check_device(address: u64, size: u64, device: usize) -> Outcome {
    let state = STATE.lock();
    let end = address.saturating_add(size).max(address);
    let mappings = state.mappings.range(address..end).map(|(_, mapping)| mapping);
    for object in mappings.filter_map(|mapping| mapping.backing.multicast()) {
        if !object.has(device)? {
            return Err(Code::ILLEGAL_STATE);
        }
    }
    Ok(())
}

/// What a multimem address stands for: as much around it as is one piece of one mapping and of each device's memory.
/// `None` without the access that is asked for, and where a device has no memory bound.
pub(crate) fn replicas(address: u64, written: bool) -> Option<Replicas> {
    let (start, mapping) = find(address)?;
    let needed = if written { Access::ReadWrite } else { Access::Read };
    let object = mapping.backing.multicast().filter(|_| mapping.access >= needed)?;
    let mut found = object.replicas(mapping.offset + (address - start))?;
    let before = mapping.offset.saturating_sub(found.start);
    let end = (found.start + found.size).min(mapping.offset + mapping.size);
    found.places.iter_mut().for_each(|place| *place += before);
    found.start += before;
    found.size = end - found.start;
    found.start = start + (found.start - mapping.offset);
    Some(found)
}

/// The mapping that contains an address, and where it begins.
pub(crate) fn find(address: u64) -> Option<(u64, Mapping)> {
    STATE.lock().find(address)
}

/// Whether anything is mapped in a range.
pub(crate) fn any_mapped(address: u64, size: u64) -> bool {
    let state = STATE.lock();
    state
        .mappings
        .range(..address.saturating_add(size))
        .next_back()
        .is_some_and(|(start, mapping)| start + mapping.size > address)
}

/// A mapping of memory with its address.
pub(crate) type MappedMemory = (u64, Mapping, Arc<Physical>);

/// All mappings of memory, and all physical memory that has a handle or a mapping or is bound to a
/// multicast object.
pub(crate) fn everything() -> (Vec<MappedMemory>, Vec<Arc<Physical>>) {
    let left = multicast::left_bound();
    let state = STATE.lock();
    let mappings = state.mappings.iter();
    let memory = |(a, m): (&u64, &Mapping)| Some((*a, m.clone(), m.backing.memory()?.clone()));
    let mappings: Vec<_> = mappings.filter_map(memory).collect();
    let mut physical: Vec<Arc<Physical>> = Vec::new();
    let mut seen = std::collections::HashSet::new();
    let bound: Vec<_> = state.objects().flat_map(|object| object.bound()).chain(left).collect();
    let all = state.backings().filter_map(Backing::memory);
    for memory in all.chain(&bound) {
        if seen.insert(Arc::as_ptr(memory)) {
            physical.push(memory.clone());
        }
    }
    (mappings, physical)
}

/// Lets go of all multicast objects, for a checkpoint that does not carry them; whether there were any, or memory bound
/// to one that others have.
pub(crate) fn close_multicast() -> bool {
    let any_left = multicast::close_left();
    let state = STATE.lock();
    state.objects().for_each(|object| object.close());
    any_left || state.objects().next().is_some()
}

thread_local! {
    /// The state, locked by this thread for the length of a fork. Without a destructor, so that it
    /// is there also in a fork of a thread that is ending.
    static DURING_FORK: Cell<Option<ManuallyDrop<MutexGuard<'static, State>>>> =
        const { Cell::new(None) };
}

/// Before a fork: keeps other threads from being inside while the process is copied.
pub(crate) fn before_fork() {
    DURING_FORK.set(Some(ManuallyDrop::new(STATE.lock())));
}

/// After a fork, in the parent: lets other threads in again.
pub(crate) fn after_fork() {
    if let Some(guard) = DURING_FORK.take() {
        drop(ManuallyDrop::into_inner(guard));
    }
}

/// After a fork, in the child: closes the memory, which the child has no use for and which would
/// otherwise outlive the parent's handles.
///
/// No lock is given back in the child. Threads that it does not have may be queued for it, and the
/// queues may be locked by others that it does not have either. Nobody misses the locks: every call
/// of the child is refused before it takes one.
pub(crate) fn close_in_child() {
    let Some(state) = DURING_FORK.take() else { return };
    state.objects().for_each(|object| object.close_in_child());
    for physical in state.backings().filter_map(Backing::memory) {
        // Held by a thread that the child does not have (or done already): then it stays as it is.
        if let Some(memory) = physical.memory.try_lock() {
            **ManuallyDrop::new(memory) = None;
        }
    }
}

impl State {
    /// What mappings and handles are of.
    fn backings(&self) -> impl Iterator<Item = &Backing> {
        let mapped = self.mappings.values().map(|mapping| &mapping.backing);
        mapped.chain(self.handles.values().map(|handle| &handle.backing))
    }

    fn objects(&self) -> impl Iterator<Item = &Arc<Object>> {
        self.backings().filter_map(Backing::multicast)
    }

    fn find(&self, address: u64) -> Option<(u64, Mapping)> {
        let (start, mapping) = self.mappings.range(..=address).next_back()?;
        (address < start + mapping.size).then(|| (*start, mapping.clone()))
    }

    /// The mappings in a range, which they must fill exactly.
    fn covered(&self, address: u64, size: u64) -> Outcome<Vec<u64>> {
        let end = address.checked_add(size).ok_or(Code::INVALID_VALUE)?;
        let mut next = address;
        let mut covered = Vec::new();
        for (start, mapping) in self.mappings.range(address..end) {
            if *start != next {
                return Err(Code::INVALID_VALUE);
            }
            next = start + mapping.size;
            covered.push(*start);
        }
        if size == 0 || next != end { Err(Code::INVALID_VALUE) } else { Ok(covered) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_unmap_takes_several_whole_mappings() {
        let device = 5;
        let base = address_space::reserve(8 * GRANULE, 0, 0).unwrap();
        let handle = create(device, 4 * GRANULE, POSIX_FILE_DESCRIPTOR).unwrap();
        map(base, GRANULE, 0, handle).unwrap();
        map(base + GRANULE, 2 * GRANULE, GRANULE, handle).unwrap();
        assert_eq!(map(base, GRANULE, 0, handle), Err(Code::INVALID_VALUE));
        assert_eq!(map(base + 3 * GRANULE, GRANULE, 1, handle), Err(Code::INVALID_VALUE));
        assert_eq!(map(base + 7 * GRANULE, 2 * GRANULE, 0, handle), Err(Code::INVALID_VALUE));
        assert!(!address_space::is_accessible(base, 1));
        set_access(base, 3 * GRANULE, Access::ReadWrite).unwrap();
        assert!(address_space::is_accessible(base, 3 * GRANULE));
        release(handle).unwrap();
        assert_eq!(release(handle), Err(Code::INVALID_VALUE));
        assert_eq!(unmap(base, 2 * GRANULE), Err(Code::INVALID_VALUE));
        assert_eq!(unmap(base, 4 * GRANULE), Err(Code::INVALID_VALUE));
        assert_eq!(device_memory::used(device), 4 * GRANULE);
        unmap(base, 3 * GRANULE).unwrap();
        assert_eq!(device_memory::used(device), 0);
        assert!(!address_space::is_accessible(base, 1));
        address_space::unreserve(base);
    }

    #[test]
    fn imported_memory_is_the_same_and_is_not_exported_again() {
        let device = 6;
        let handle = create(device, GRANULE, POSIX_FILE_DESCRIPTOR).unwrap();
        let memory = export(handle).unwrap();
        let other = import(device, &memory).unwrap();
        assert!(matches!(export(other), Err(Code::INVALID_VALUE)));
        let base = address_space::reserve(2 * GRANULE, 0, 0).unwrap();
        map(base, GRANULE, 0, handle).unwrap();
        map(base + GRANULE, GRANULE, 0, other).unwrap();
        set_access(base, 2 * GRANULE, Access::ReadWrite).unwrap();
        // SAFETY: both addresses were mapped readable and writable just now.
        let seen = unsafe {
            (base as *mut u32).write_volatile(0x1234_5678);
            ((base + GRANULE) as *const u32).read_volatile()
        };
        assert_eq!(seen, 0x1234_5678);
        let private = create(device, GRANULE, 0).unwrap();
        assert!(matches!(export(private), Err(Code::INVALID_VALUE)));
        let file = std::fs::File::open("/dev/null").unwrap();
        assert_eq!(import(device, &file), Err(Code::INVALID_VALUE));
    }
}
