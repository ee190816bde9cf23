//! Stream-ordered memory: pools that hand out memory at once and order its reuse by streams.
//!
//! A pool takes whole blocks from the device (where the checkpoint finds them, like those of plain
//! allocations) and divides them. A freed range remembers the points in streams after which it is
//! free; an allocation takes it at once if they are passed or lie in its own stream, and otherwise
//! makes its stream wait for them.

use std::collections::BTreeMap;
use std::sync::Arc;

use parking_lot::Mutex;

use crate::address_space::{self, GRANULE};
use crate::device_memory;
use crate::handles::new_handle;
use crate::ipc;
use crate::managed_memory::{self, Location, Managed};
use crate::settings::MAX_DEVICES;
use crate::status::{Code, Outcome};
use crate::streams::{Position, Stream};

/// Alignment of every allocation, as for plain memory.
const ALIGNMENT: u64 = 512;

/// Where a pool is from.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Kind {
    /// The device has it from the beginning.
    Default,
    /// The program has made it.
    Own,
    /// The same, and other processes may have it too.
    Shareable,
    /// Another process has made it: nothing is allocated from it here.
    Imported {
        /// Its id.
        process: u32,
        /// The number of the pool there.
        number: u32,
    },
    /// Its memory is managed. It has no device, and each allocation is memory of its own.
    Managed {
        /// Where its memory should stay, if that was said.
        preferred: Option<Location>,
        /// The driver has it from the beginning.
        is_default: bool,
    },
}

/// A pool of one device, or of managed memory.
pub(crate) struct Pool {
    /// The value that programs hold.
    pub(crate) handle: u64,
    /// Ordinal of the device; 0 for managed memory.
    pub(crate) device: usize,
    kind: Kind,
    /// The most memory that it may hold in bytes; 0 for no limit.
    limit: u64,
    state: Mutex<State>,
}

/// What programs can set, and ask for.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Attributes {
    /// Reuse of memory whose free the allocating stream is known to come after: kept and reported,
    /// as such memory is reused anyway, in another way.
    pub(crate) follow_events: bool,
    /// Reuse of memory whose free is done.
    pub(crate) opportunistic: bool,
    /// Reuse of memory by making the allocating stream wait for its free.
    pub(crate) internal_dependencies: bool,
    /// Bytes that the pool keeps when the program synchronises.
    pub(crate) threshold: u64,
    /// Bytes of whole blocks, now and at most.
    pub(crate) reserved: Usage,
    /// Bytes in use by the program, now and at most.
    pub(crate) used: Usage,
}

/// A number of bytes and its high-water mark.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Usage {
    /// Now.
    pub(crate) current: u64,
    /// The most since the mark was last reset.
    pub(crate) high: u64,
}

impl Usage {
    /// Counts more bytes.
    pub(crate) fn add(&mut self, size: u64) {
        self.current += size;
        self.high = self.high.max(self.current);
    }

    /// Starts the mark anew.
    pub(crate) fn reset(&mut self) {
        self.high = self.current;
    }
}

/// An allocation from a pool.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Allocation {
    /// First address.
    pub(crate) address: u64,
    /// Size as asked for.
    pub(crate) size: u64,
    /// Ordinal of the device.
    pub(crate) device: usize,
    /// Handle of the pool.
    pub(crate) pool: u64,
    /// As in `CU_POINTER_ATTRIBUTE_BUFFER_ID`.
    pub(crate) id: u64,
    /// Another process may have it open.
    shared: bool,
}

struct Free {
    size: u64,
    /// When the range is free.
    after: Vec<Position>,
}

struct State {
    attributes: Attributes,
    /// Devices other than the pool's own that were given access.
    access: [bool; MAX_DEVICES],
    blocks: BTreeMap<u64, u64>,
    free: BTreeMap<u64, Free>,
    allocations: BTreeMap<u64, Allocation>,
    /// Destroyed by the program; goes away with its last allocation.
    destroyed: bool,
}

/// All pools, those included that are destroyed but still in use.
static POOLS: Mutex<Vec<Arc<Pool>>> = Mutex::new(Vec::new());
/// The pool that `cuMemAllocAsync` uses on each device, if it is not the default one.
static CURRENT: Mutex<[Option<u64>; MAX_DEVICES]> = Mutex::new([None; MAX_DEVICES]);

/// Creates a pool; `limit` is the most memory it may hold in bytes, 0 for no limit.
pub(crate) fn create(device: usize, limit: u64, kind: Kind) -> Arc<Pool> {
    let pool = Pool::new(device, limit, kind);
    POOLS.lock().push(pool.clone());
    pool
}

/// The pool of a handle.
///
/// # Errors
/// `INVALID_VALUE` without one.
pub(crate) fn by_handle(handle: u64) -> Outcome<Arc<Pool>> {
    let pools = POOLS.lock();
    let found = pools.iter().find(|p| p.handle == handle && !p.state.lock().destroyed);
    found.cloned().ok_or(Code::INVALID_VALUE)
}

/// The pool that each device has from the beginning.
pub(crate) fn default_of(device: usize) -> Arc<Pool> {
    let mut pools = POOLS.lock();
    if let Some(pool) =
        pools.iter().find(|pool| pool.kind == Kind::Default && pool.device == device)
    {
        return pool.clone();
    }
    let pool = Pool::new(device, 0, Kind::Default);
    pools.push(pool.clone());
    pool
}

/// The pool that allocations on a device come from when they name none.
pub(crate) fn current_of(device: usize) -> Arc<Pool> {
    let chosen = CURRENT.lock()[device];
    chosen.and_then(|handle| by_handle(handle).ok()).unwrap_or_else(|| default_of(device))
}

/// Chooses the pool of a device.
///
/// # Errors
/// `INVALID_VALUE` for a pool of another device or process.
pub(crate) fn set_current(device: usize, pool: &Pool) -> Outcome {
    if pool.device != device || pool.is_imported() || pool.is_managed() {
        return Err(Code::INVALID_VALUE);
    }
    CURRENT.lock()[device] = Some(pool.handle);
    Ok(())
}

/// Destroys a pool. Memory that is in use stays until it is freed.
///
/// # Errors
/// `INVALID_VALUE` for a default pool.
pub(crate) fn destroy(pool: &Pool) -> Outcome {
    if matches!(pool.kind, Kind::Default | Kind::Managed { is_default: true, .. }) {
        return Err(Code::INVALID_VALUE);
    }
    let mut current = CURRENT.lock();
    if current[pool.device] == Some(pool.handle) {
        current[pool.device] = None;
    }
    drop(current);
    pool.state.lock().destroyed = true;
    tidy(None);
    Ok(())
}

/// The allocation that contains an address.
pub(crate) fn find(address: u64) -> Option<Allocation> {
    let pools = POOLS.lock();
    pools.iter().find_map(|pool| {
        let state = pool.state.lock();
        let (_, found) = state.allocations.range(..=address).next_back()?;
        (address < found.address + found.size).then_some(*found)
    })
}

/// Marks an allocation as one that another process may have open: its size, and the number of its pool.
///
/// # Errors
/// `INVALID_VALUE` unless a pool that is [`Kind::Shareable`] has an allocation that begins there.
pub(crate) fn share(address: u64) -> Outcome<(u64, u32)> {
    let pools = POOLS.lock();
    for pool in pools.iter().filter(|pool| pool.kind == Kind::Shareable) {
        if let Some(allocation) = pool.state.lock().allocations.get_mut(&address) {
            allocation.shared = true;
            return Ok((allocation.size, pool.number()));
        }
    }
    Err(Code::INVALID_VALUE)
}

/// Whether another process may have an allocation open.
pub(crate) fn any_shared() -> bool {
    let shared = |pool: &Arc<Pool>| pool.state.lock().allocations.values().any(|a| a.shared);
    POOLS.lock().iter().any(shared)
}

/// Frees an allocation by its first address; it may be used again after the given points.
///
/// # Errors
/// `INVALID_VALUE` when no pool has such an allocation.
pub(crate) fn free(address: u64, after: Vec<Position>) -> Outcome {
    let pools = POOLS.lock();
    let mut after = Some(after);
    for pool in pools.iter() {
        let mut state = pool.state.lock();
        if let Some(allocation) = state.allocations.remove(&address) {
            let size = allocation.size.next_multiple_of(ALIGNMENT);
            state.attributes.used.current -= size;
            state.give_back(address, size, after.take().unwrap_or_default());
            return Ok(());
        }
    }
    Err(Code::INVALID_VALUE)
}

/// Takes managed memory from the program by its first address, and from its pool if it has one.
///
/// # Errors
/// `INVALID_VALUE` for any other address.
pub(crate) fn take_managed(address: u64) -> Outcome<Managed> {
    let managed = managed_memory::take(address)?;
    let pools = POOLS.lock();
    if let Some(pool) = pools.iter().find(|pool| pool.handle == managed.pool) {
        let size = managed.size.next_multiple_of(ALIGNMENT);
        let attributes = &mut pool.state.lock().attributes;
        attributes.used.current -= size;
        attributes.reserved.current -= size;
    }
    Ok(managed)
}

/// What pools do when the program has waited for work: they give memory back that exceeds their
/// thresholds; destroyed ones give back all that they can. With a device, its pools keep nothing
/// that is free.
pub(crate) fn tidy(everything_of: Option<usize>) {
    ipc::tidy();
    POOLS.lock().retain(|pool| {
        let mut state = pool.state.lock();
        let all = state.destroyed || everything_of == Some(pool.device);
        let keep = if all { 0 } else { state.attributes.threshold };
        state.trim(pool.device, keep);
        // Managed memory is in no block.
        !(state.destroyed && state.blocks.is_empty() && state.attributes.used.current == 0)
    });
}

impl Pool {
    fn new(device: usize, limit: u64, kind: Kind) -> Arc<Pool> {
        let attributes = Attributes {
            follow_events: true,
            opportunistic: true,
            internal_dependencies: true,
            threshold: 0,
            reserved: Usage::default(),
            used: Usage::default(),
        };
        Arc::new(Pool {
            handle: new_handle(),
            device,
            kind,
            limit,
            state: Mutex::new(State {
                attributes,
                access: [false; MAX_DEVICES],
                blocks: BTreeMap::new(),
                free: BTreeMap::new(),
                allocations: BTreeMap::new(),
                destroyed: false,
            }),
        })
    }

    /// What other processes know it by. Handles are small numbers.
    pub(crate) fn number(&self) -> u32 {
        self.handle as u32
    }

    /// Where it is from.
    pub(crate) fn kind(&self) -> Kind {
        self.kind
    }

    /// Whether another process has made it.
    pub(crate) fn is_imported(&self) -> bool {
        matches!(self.kind, Kind::Imported { .. })
    }

    /// Whether its memory is managed.
    pub(crate) fn is_managed(&self) -> bool {
        matches!(self.kind, Kind::Managed { .. })
    }

    /// Allocates memory for use in a stream: the address, and what the stream must wait for
    /// before it uses the memory.
    ///
    /// # Errors
    /// `INVALID_VALUE` for size 0 or a pool of another process, `OUT_OF_MEMORY`.
    pub(crate) fn allocate(
        &self,
        stream: &Arc<Stream>,
        size: u64,
    ) -> Outcome<(u64, Vec<Position>)> {
        if size == 0 || self.is_imported() {
            return Err(Code::INVALID_VALUE);
        }
        let rounded = size.checked_next_multiple_of(ALIGNMENT).ok_or(Code::OUT_OF_MEMORY)?;
        let mut state = self.state.lock();
        if let Kind::Managed { preferred, .. } = self.kind {
            let total = state.attributes.used.current.checked_add(rounded);
            if self.limit != 0 && total.is_none_or(|total| total > self.limit) {
                return Err(Code::OUT_OF_MEMORY);
            }
            let address = managed_memory::allocate_of_pool(self.handle, size, preferred)?;
            state.attributes.used.add(rounded);
            state.attributes.reserved.add(rounded);
            return Ok((address, Vec::new()));
        }
        let opportunistic = state.attributes.opportunistic;
        let at_once = |position: &Position| {
            position.is_in(stream) || (opportunistic && position.is_reached())
        };
        let free = state.fitting(rounded, |free| free.after.iter().all(at_once));
        let start = match free {
            Some(start) => start,
            None => match state.add_block(self, rounded) {
                Ok(start) => start,
                Err(code) => {
                    let waiting = state.attributes.internal_dependencies;
                    state.fitting(rounded, |_| waiting).ok_or(code)?
                }
            },
        };
        let after = state.take(start, rounded);
        state.attributes.used.add(rounded);
        let id = device_memory::new_buffer_id();
        let (device, pool) = (self.device, self.handle);
        let allocation = Allocation { address: start, size, device, pool, id, shared: false };
        state.allocations.insert(start, allocation);
        let after = after.into_iter().filter(|p| !p.is_in(stream) && !p.is_reached()).collect();
        Ok((start, after))
    }

    /// The attributes.
    pub(crate) fn attributes(&self) -> Attributes {
        self.state.lock().attributes
    }

    /// Changes the attributes.
    pub(crate) fn change(&self, change: impl FnOnce(&mut Attributes)) {
        change(&mut self.state.lock().attributes);
    }

    /// Whether a device has access.
    pub(crate) fn has_access(&self, device: usize) -> bool {
        self.is_managed() || device == self.device || self.state.lock().access[device]
    }

    /// Gives a device access or takes it away.
    ///
    /// # Errors
    /// `INVALID_VALUE` for taking it from the pool's own device, or managed memory from any.
    pub(crate) fn set_access(&self, device: usize, access: bool) -> Outcome {
        if (device == self.device || self.is_managed()) && !access {
            return Err(Code::INVALID_VALUE);
        }
        self.state.lock().access[device] = access;
        Ok(())
    }

    /// Gives free memory back to the device until no more than `keep` bytes are held.
    pub(crate) fn trim(&self, keep: u64) {
        self.state.lock().trim(self.device, keep);
    }
}

impl State {
    /// The first free range of at least a size that is acceptable.
    fn fitting(&self, size: u64, acceptable: impl Fn(&Free) -> bool) -> Option<u64> {
        let mut ranges = self.free.iter();
        ranges.find(|(_, free)| free.size >= size && acceptable(free)).map(|(start, _)| *start)
    }

    fn add_block(&mut self, pool: &Pool, size: u64) -> Outcome<u64> {
        let whole = address_space::round_up(size).ok_or(Code::OUT_OF_MEMORY)?;
        // The tests of cuda.core allocate from pools of at most 2048 bytes.
        let limit = pool.limit.checked_next_multiple_of(GRANULE).unwrap_or(u64::MAX);
        let total = self.attributes.reserved.current.checked_add(whole);
        if limit != 0 && total.is_none_or(|total| total > limit) {
            return Err(Code::OUT_OF_MEMORY);
        }
        let start = device_memory::add_pool_block(pool.device, whole)?;
        self.attributes.reserved.add(whole);
        self.blocks.insert(start, whole);
        self.free.insert(start, Free { size: whole, after: Vec::new() });
        Ok(start)
    }

    /// Takes the beginning of a free range.
    fn take(&mut self, start: u64, size: u64) -> Vec<Position> {
        let Some(Free { size: length, after }) = self.free.remove(&start) else {
            return Vec::new();
        };
        if length > size {
            let rest = Free { size: length - size, after: after.clone() };
            self.free.insert(start + size, rest);
        }
        after
    }

    /// Adds a free range, joined with its free neighbours in the same block.
    fn give_back(&mut self, mut start: u64, mut size: u64, mut after: Vec<Position>) {
        let Some((&block, &length)) = self.blocks.range(..=start).next_back() else { return };
        let before = self.free.range(block..start).next_back();
        if let Some((&other, _)) = before.filter(|(other, free)| **other + free.size == start)
            && let Some(free) = self.free.remove(&other)
        {
            (start, size) = (other, size + free.size);
            after.extend(free.after);
        }
        if start + size < block + length
            && let Some(free) = self.free.remove(&(start + size))
        {
            size += free.size;
            after.extend(free.after);
        }
        after.retain(|position| !position.is_reached());
        self.free.insert(start, Free { size, after });
    }

    fn trim(&mut self, device: usize, keep: u64) {
        let idle = |state: &State, (start, size): (&u64, &u64)| {
            state.free.get(start).is_some_and(|free| {
                free.size == *size && free.after.iter().all(Position::is_reached)
            })
        };
        let blocks: Vec<(u64, u64)> = self
            .blocks
            .iter()
            .filter(|block| idle(self, *block))
            .map(|(start, size)| (*start, *size))
            .collect();
        for (start, size) in blocks {
            // As the driver: the amount to keep is a minimum.
            if self.attributes.reserved.current < keep.saturating_add(size) {
                continue;
            }
            self.blocks.remove(&start);
            self.free.remove(&start);
            self.attributes.reserved.current -= size;
            device_memory::remove_pool_block(device, start);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::mpsc;

    #[test]
    fn memory_is_reused_in_stream_order() {
        let device = 7;
        let pool = create(device, 0, Kind::Own);
        let (one, two) = (Stream::new(11, 0, 0, 0), Stream::new(12, 0, 0, 0));
        let (go, wait) = mpsc::channel::<()>();
        let busy = one.submit(Vec::new(), move || wait.recv().unwrap()).unwrap();
        let (first, after) = pool.allocate(&one, GRANULE).unwrap();
        assert!(after.is_empty());
        free(first, vec![busy.clone()]).unwrap();
        assert_eq!(free(first, Vec::new()), Err(Code::INVALID_VALUE));

        // The same stream has it at once; another gets new memory while there is any.
        assert_eq!(pool.allocate(&one, GRANULE).unwrap().0, first);
        free(first, vec![busy.clone()]).unwrap();
        let (second, after) = pool.allocate(&two, GRANULE).unwrap();
        assert!(second != first && after.is_empty());
        assert_eq!(pool.attributes().reserved.current, 2 * GRANULE);
        pool.trim(0);
        assert_eq!(pool.attributes().reserved.current, 2 * GRANULE, "not free yet");
        go.send(()).unwrap();
        busy.wait();
        assert_eq!(pool.allocate(&two, 100).unwrap().0, first);
        free(first, Vec::new()).unwrap();
        free(second, Vec::new()).unwrap();
        pool.trim(GRANULE);
        assert_eq!(pool.attributes().reserved.current, GRANULE);
        assert_eq!(pool.attributes().used.current, 0);
        assert_eq!(pool.attributes().used.high, GRANULE + 512);
        destroy(&pool).unwrap();
        assert_eq!(device_memory::used(device), 0);
        assert!(by_handle(pool.handle).is_err());
    }

    #[test]
    fn a_full_pool_waits_for_a_free() {
        let pool = create(8, GRANULE, Kind::Own);
        let (one, two) = (Stream::new(13, 0, 0, 0), Stream::new(14, 0, 0, 0));
        let (go, wait) = mpsc::channel::<()>();
        let busy = one.submit(Vec::new(), move || wait.recv().unwrap()).unwrap();
        let (first, _) = pool.allocate(&one, GRANULE).unwrap();
        assert!(matches!(pool.allocate(&two, 1), Err(Code::OUT_OF_MEMORY)));
        free(first, vec![busy]).unwrap();
        pool.change(|attributes| attributes.internal_dependencies = false);
        assert!(matches!(pool.allocate(&two, 1), Err(Code::OUT_OF_MEMORY)));
        pool.change(|attributes| attributes.internal_dependencies = true);
        let (again, after) = pool.allocate(&two, 1).unwrap();
        assert_eq!((again, after.len()), (first, 1));
        go.send(()).unwrap();
        free(again, after).unwrap();
        destroy(&pool).unwrap();
    }
}
