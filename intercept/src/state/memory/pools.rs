//! Stream-ordered pools: memory of the heap that is given out at once, and again in the order of streams.
//!
//! What the program frees keeps its memory and its place in the index. Its own stream may have it again at once, since
//! whatever uses it there comes later; others once all is over that was in the stream when it was freed, of which an
//! event tells. Memory goes back to the device as the driver's pools give it back: what a pool has beyond its threshold
//! when the program synchronises, all that is idle when it is trimmed or destroyed, and when memory is short.
//!
//! A pool does not divide memory: an allocation of [`LARGE`] or more gets blocks that it has for itself.

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicBool, Ordering};

use gpucr_wire::CHUNK_SIZE;

use super::heap::{Allocation, LARGE};
use super::opened::Origin;
use super::space::round_up;
use super::vmm::Vmm;
use super::{Memory, lock};
use crate::abi::types::{Code, ERROR_INVALID_VALUE, ERROR_OUT_OF_MEMORY};
use crate::state::gate;

/// Sizes of small allocations are multiples of this, bytes: as for plain memory, and what the index can tell apart.
const SMALL: u64 = 512;
/// How many pieces of one size are looked at that another stream has freed.
const LOOKED_AT: usize = 8;
/// An allocation takes a piece that is larger by one part in so many, at most.
const SLACK: u64 = 8;

/// Whether a pool may have more than it is to keep.
static IS_DUE: AtomicBool = AtomicBool::new(false);

/// Bytes, now and at most.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(crate) struct Amount {
    /// Now.
    pub(crate) current: u64,
    /// The most since the program has reset that.
    pub(crate) high: u64,
}

impl Amount {
    fn add(&mut self, bytes: u64) {
        self.current += bytes;
        self.high = self.high.max(self.current);
    }
}

/// Until when freed memory may be in use.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct After {
    /// The context of the stream.
    pub(crate) context: u64,
    /// Unlike any other stream's, as long as the process lives; 0 if it is not known.
    pub(crate) stream: u64,
    /// Recorded in the stream when the memory was freed.
    pub(crate) event: u64,
}

/// Memory that the program has freed.
struct Freed {
    allocation: Allocation,
    /// `None` once nothing uses it any more.
    after: Option<After>,
}

/// Whether a pool is shared with other processes.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum Sharing {
    /// It cannot be.
    Not,
    /// Others may be given it.
    Shareable,
    /// It is another process's: which, and to which devices besides its own its memory is open here.
    Imported(Origin, Vec<i32>),
}

/// A pool whose memory is the heap's.
pub(super) struct Pool {
    /// The driver's name of it; 0 once it is destroyed.
    pub(super) handle: u64,
    pub(super) device: i32,
    pub(super) sharing: Sharing,
    /// The most that it may have, bytes; 0 for no limit.
    limit: u64,
    /// What it keeps when the program synchronises, bytes.
    threshold: u64,
    reserved: Amount,
    used: Amount,
    /// By what they hold, the newest last.
    freed: BTreeMap<u64, Vec<Freed>>,
}

impl Pool {
    fn is_over_threshold(&self) -> bool {
        self.reserved.current > self.threshold && !self.freed.is_empty()
    }
}

/// All pools, and what they share.
#[derive(Default)]
pub(super) struct Pools {
    /// By numbers of ours: the driver may give the name of a destroyed pool again.
    pools: BTreeMap<u64, Pool>,
    /// Events that are not in use, by their contexts.
    events: BTreeMap<u64, Vec<u64>>,
}

impl Pools {
    pub(super) fn get(&self, id: u64) -> Option<&Pool> {
        self.pools.get(&id)
    }

    pub(super) fn get_mut(&mut self, id: u64) -> Option<&mut Pool> {
        self.pools.get_mut(&id)
    }

    /// A freed piece is needed no longer as such: its event may be used again.
    fn spare(&mut self, after: Option<After>) {
        if let Some(After { context, event, .. }) = after {
            self.events.entry(context).or_default().push(event);
        }
    }

    /// All that is freed.
    pub(super) fn freed(&self) -> impl Iterator<Item = &Allocation> {
        let freed = self.pools.values().flat_map(|pool| pool.freed.values().flatten());
        freed.map(|freed| &freed.allocation)
    }
}

/// An allocation in a stream.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Asked {
    /// The pool.
    pub(crate) pool: u64,
    /// The context that is current.
    pub(crate) context: u64,
    /// As in [`After`].
    pub(crate) stream: u64,
    /// Bytes.
    pub(crate) size: u64,
}

impl Memory {
    /// From now on the memory of a pool of the driver's is the heap's. Gives the pool's number.
    pub(crate) fn add_pool(&mut self, handle: u64, device: i32, limit: u64, threshold: u64) -> u64 {
        let id = self.new_id();
        let (reserved, used) = (Amount::default(), Amount::default());
        let freed = BTreeMap::new();
        // As the driver: in whole blocks.
        let limit = round_up(limit, CHUNK_SIZE).unwrap_or(0);
        let sharing = Sharing::Not;
        let pool = Pool { handle, device, sharing, limit, threshold, reserved, used, freed };
        self.pools.pools.insert(id, pool);
        id
    }

    /// The number of the pool that the driver names so, and its device.
    pub(crate) fn pool(&self, handle: u64) -> Option<(u64, i32)> {
        let mut pools = self.pools.pools.iter();
        let (id, pool) = pools.find(|(_, pool)| pool.handle == handle && handle != 0)?;
        Some((*id, pool.device))
    }

    /// The driver's name of the pool that an allocation is from; 0 if it is from none, or that is destroyed.
    pub(crate) fn pool_handle(&self, allocation: &Allocation) -> u64 {
        self.pools.pools.get(&allocation.pool).map_or(0, |pool| pool.handle)
    }

    /// What the program may ask about a pool: what it has, and what of that is in use.
    pub(crate) fn pool_amounts(&mut self, id: u64) -> Option<(&mut Amount, &mut Amount)> {
        self.pools.pools.get_mut(&id).map(|pool| (&mut pool.reserved, &mut pool.used))
    }

    /// What a pool keeps when the program synchronises, bytes.
    pub(crate) fn set_threshold(&mut self, id: u64, threshold: u64) {
        if let Some(pool) = self.pools.pools.get_mut(&id) {
            pool.threshold = threshold;
            note(pool);
        }
    }

    /// Serves an allocation from a pool.
    ///
    /// # Errors
    /// The driver's code, `ERROR_OUT_OF_MEMORY` where the pool may have no more, or `ERROR_INVALID_VALUE` where it is
    /// another process's; then nothing has changed, but that idle memory was given back.
    pub(crate) fn allocate_in_pool(&mut self, vmm: &dyn Vmm, asked: &Asked) -> Result<u64, Code> {
        let unit = if asked.size < LARGE { SMALL } else { CHUNK_SIZE };
        let wanted = round_up(asked.size, unit).ok_or(ERROR_OUT_OF_MEMORY)?;
        let Some(pool) = self.pools.pools.get(&asked.pool) else { return Err(ERROR_INVALID_VALUE) };
        if matches!(pool.sharing, Sharing::Imported(..)) {
            return Err(ERROR_INVALID_VALUE);
        }
        let (device, limit) = (pool.device, pool.limit);
        let mut allocation = match self.take_freed(vmm, asked, wanted) {
            Some(allocation) => allocation,
            None => {
                let has_room = |pool: &Pool| {
                    let all = pool.reserved.current.checked_add(wanted);
                    limit == 0 || all.is_some_and(|all| all <= limit)
                };
                if !has_room(&self.pools.pools[&asked.pool]) {
                    self.trim_pool(vmm, asked.pool, 0);
                    if !has_room(&self.pools.pools[&asked.pool]) {
                        return Err(ERROR_OUT_OF_MEMORY);
                    }
                }
                let address = self.allocate(vmm, device, asked.context, wanted)?;
                let new = self.take(address).ok_or(ERROR_INVALID_VALUE)?;
                if let Some(pool) = self.pools.pools.get_mut(&asked.pool) {
                    pool.reserved.add(new.held);
                }
                new
            }
        };
        allocation.pool = asked.pool;
        allocation.context = asked.context;
        allocation.size = asked.size;
        allocation.synchronous = false;
        allocation.buffer = self.new_id();
        let address = allocation.address;
        if let Some(pool) = self.pools.pools.get_mut(&asked.pool) {
            pool.used.add(allocation.held);
        }
        self.put_back(allocation);
        Ok(address)
    }

    /// Freed memory of the pool that the stream may have.
    fn take_freed(&mut self, vmm: &dyn Vmm, asked: &Asked, wanted: u64) -> Option<Allocation> {
        let pool = self.pools.pools.get_mut(&asked.pool)?;
        let most = if wanted < LARGE { wanted } else { wanted.saturating_add(wanted / SLACK) };
        let own = |freed: &Freed| {
            freed.after.is_none_or(|after| after.stream == asked.stream && asked.stream != 0)
        };
        let is_over = |freed: &Freed| freed.after.is_none_or(|after| vmm.is_over(after.event));
        let mut pieces = pool.freed.range(wanted..=most);
        let found = pieces.find_map(|(held, pieces)| {
            let at = pieces.iter().rposition(own).or_else(|| {
                // The oldest first: they are the likeliest to be done.
                pieces.iter().take(LOOKED_AT).position(is_over)
            })?;
            Some((*held, at))
        });
        let (held, at) = found?;
        let pieces = pool.freed.get_mut(&held)?;
        let Freed { allocation, after } = pieces.remove(at);
        if pieces.is_empty() {
            pool.freed.remove(&held);
        }
        self.pools.spare(after);
        Some(allocation)
    }

    /// Takes the allocation of a pool that begins at `address` out of the table; `None` if there is none. Follow it
    /// with [`Self::free_in_pool`] or [`Self::put_back`].
    pub(crate) fn take_of_pool(&mut self, address: u64) -> Option<Allocation> {
        self.allocations.get(&address).filter(|found| found.pool != 0 && found.is_own())?;
        self.take(address)
    }

    /// Puts an allocation into the table that was taken out of it.
    pub(crate) fn put_back(&mut self, allocation: Allocation) {
        self.allocations.insert(allocation.address, allocation);
    }

    /// An event of `context` that is not in use, to be recorded where memory is freed.
    pub(crate) fn spare_event(&mut self, context: u64) -> Option<u64> {
        self.pools.events.get_mut(&context)?.pop()
    }

    /// An event is not needed after all.
    pub(crate) fn keep_event(&mut self, context: u64, event: u64) {
        self.pools.spare(Some(After { context, stream: 0, event }));
    }

    /// Gives an allocation back to its pool. With `None` nothing uses it any more.
    pub(crate) fn free_in_pool(&mut self, allocation: Allocation, after: Option<After>) {
        let Some(pool) = self.pools.pools.get_mut(&allocation.pool) else { return };
        pool.used.current = pool.used.current.saturating_sub(allocation.held);
        pool.freed.entry(allocation.held).or_default().push(Freed { allocation, after });
        note(pool);
    }

    /// A pool is destroyed: it goes with its last allocation.
    pub(crate) fn destroy_pool(&mut self, vmm: &dyn Vmm, id: u64) {
        let Some(pool) = self.pools.pools.get_mut(&id) else { return };
        (pool.handle, pool.threshold) = (0, 0);
        self.trim_pool(vmm, id, 0);
        self.forget_pools();
    }

    /// Gives idle memory of a pool back until it has no more than `keep` bytes, as far as that goes. Whether any was.
    pub(crate) fn trim_pool(&mut self, vmm: &dyn Vmm, id: u64, keep: u64) -> bool {
        // What is awaited or still to be saved is at its place until it is.
        if gate::is_guarding() {
            return false;
        }
        let Some(pool) = self.pools.pools.get_mut(&id) else { return false };
        let mut idle = Vec::new();
        for pieces in pool.freed.values_mut() {
            let is_idle = |freed: &mut Freed| {
                let fits = pool.reserved.current.saturating_sub(keep) >= freed.allocation.held;
                let is_over = fits && freed.after.is_none_or(|after| vmm.is_over(after.event));
                if is_over {
                    pool.reserved.current -= freed.allocation.held;
                }
                is_over
            };
            idle.extend(pieces.extract_if(.., is_idle));
        }
        pool.freed.retain(|_, pieces| !pieces.is_empty());
        let any = !idle.is_empty();
        for Freed { allocation, after } in idle {
            self.pools.spare(after);
            self.give_back(vmm, allocation);
        }
        any
    }

    /// Gives all idle memory of the pools of a device back. Whether any was.
    pub(super) fn trim_pools(&mut self, vmm: &dyn Vmm, device: i32) -> bool {
        let pools = self.pools.pools.iter().filter(|(_, pool)| pool.device == device);
        let ids: Vec<u64> = pools.map(|(id, _)| *id).collect();
        let trimmed = ids.into_iter().filter(|id| self.trim_pool(vmm, *id, 0));
        trimmed.count() > 0
    }

    /// Whether a device's pools have freed memory, which something may still be using.
    pub(crate) fn has_freed(&self, device: i32) -> bool {
        let mut pools = self.pools.pools.values();
        pools.any(|pool| pool.device == device && !pool.freed.is_empty())
    }

    /// Whether any pool has freed memory.
    pub(crate) fn have_pools_freed(&self) -> bool {
        self.pools.freed().next().is_some()
    }

    /// A context is gone, and what was under way in it.
    pub(super) fn forget_context_of_pools(&mut self, context: u64) {
        self.pools.events.remove(&context);
        let pools = self.pools.pools.values_mut();
        let freed = pools.flat_map(|pool| pool.freed.values_mut()).flatten();
        for freed in freed.filter(|freed| freed.after.is_some_and(|at| at.context == context)) {
            freed.after = None;
        }
    }

    fn forget_pools(&mut self) {
        self.pools.pools.retain(|_, pool| pool.handle != 0 || pool.reserved.current > 0);
    }

    fn tidy_pools(&mut self, vmm: &dyn Vmm) {
        let pools = self.pools.pools.iter().filter(|(_, pool)| pool.is_over_threshold());
        let due: Vec<(u64, u64)> = pools.map(|(id, pool)| (*id, pool.threshold)).collect();
        for (id, threshold) in due {
            self.trim_pool(vmm, id, threshold);
        }
        self.forget_pools();
        let is_due = self.pools.pools.values().any(Pool::is_over_threshold);
        IS_DUE.store(is_due, Ordering::Relaxed);
    }
}

/// Remembers whether a pool has more than it is to keep.
fn note(pool: &Pool) {
    if pool.is_over_threshold() {
        IS_DUE.store(true, Ordering::Relaxed);
    }
}

/// Whether a pool may have more than it is to keep.
#[inline(always)]
pub(crate) fn is_due() -> bool {
    IS_DUE.load(Ordering::Relaxed)
}

/// The program has synchronised: pools give back what is idle and more than they are to keep. Not while a dump has shut
/// the gate: then after the next such call.
#[cold]
pub(crate) fn tidy(vmm: &dyn Vmm) {
    if gate::is_open() {
        let _inside = gate::enter();
        lock().tidy_pools(vmm);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::state::memory::fake::Fake;

    const MIB: u64 = 1 << 20;

    fn pool(limit: u64) -> (Fake, Memory, u64) {
        let (fake, mut memory) = (Fake::new(), Memory::default());
        let pool = memory.add_pool(0x77, 0, limit, u64::MAX);
        (fake, memory, pool)
    }

    fn asked(pool: u64, stream: u64, size: u64) -> Asked {
        Asked { pool, context: 1, stream, size }
    }

    fn free(memory: &mut Memory, address: u64, stream: u64, event: u64) {
        let allocation = memory.take_of_pool(address).expect("it is allocated");
        memory.free_in_pool(allocation, Some(After { context: 1, stream, event }));
    }

    fn amounts(memory: &mut Memory, pool: u64) -> (Amount, Amount) {
        let (reserved, used) = memory.pool_amounts(pool).expect("it is there");
        (*reserved, *used)
    }

    #[test]
    fn memory_is_given_again_in_the_order_of_streams() {
        for size in [1000, 3 * MIB] {
            let (fake, mut memory, pool) = pool(0);
            let first = memory.allocate_in_pool(&fake, &asked(pool, 1, size)).expect("room");
            let (id, buffer) =
                memory.allocation_at(first).map(|a| (a.id, a.buffer)).expect("there");
            free(&mut memory, first, 1, 51);
            assert!(memory.take_of_pool(first).is_none(), "freed twice");
            assert!(memory.allocation_at(first).is_none());
            assert_eq!(memory.extents(&[id]).len(), 1, "work from before may still write it");
            let same = memory.allocate_in_pool(&fake, &asked(pool, 1, size - 8)).expect("room");
            assert_eq!(same, first, "its own stream has it at once");
            let again = memory.allocation_at(same).map(|a| (a.id, a.size)).expect("there");
            assert_eq!(again, (id, size - 8));
            assert_ne!(memory.allocation_at(same).map(|a| a.buffer), Some(buffer));
            assert_eq!(memory.spare_event(1), Some(51));

            free(&mut memory, same, 1, 52);
            let other = memory.allocate_in_pool(&fake, &asked(pool, 2, size)).expect("room");
            assert_ne!(other, first, "the other stream's work may still use it");
            fake.end(52);
            let third = memory.allocate_in_pool(&fake, &asked(pool, 2, size)).expect("room");
            assert_eq!(third, first, "it is over");
            let unknown = memory.allocate_in_pool(&fake, &asked(pool, 0, size)).expect("room");
            free(&mut memory, unknown, 0, 53);
            let next = memory.allocate_in_pool(&fake, &asked(pool, 0, size)).expect("room");
            assert_ne!(next, unknown, "who knows whether it is the same stream");
        }
    }

    #[test]
    fn what_a_pool_has_is_counted_and_given_back() {
        let (fake, mut memory, pool) = pool(0);
        let a = memory.allocate_in_pool(&fake, &asked(pool, 1, 3 * MIB)).expect("room");
        let b = memory.allocate_in_pool(&fake, &asked(pool, 1, 5)).expect("room");
        let all = Amount { current: 4 * MIB + 512, high: 4 * MIB + 512 };
        assert_eq!(amounts(&mut memory, pool), (all, all));
        free(&mut memory, a, 1, 1);
        free(&mut memory, b, 1, 2);
        assert_eq!(amounts(&mut memory, pool), (all, Amount { current: 0, ..all }));
        assert!(!memory.trim_pool(&fake, pool, 0), "both may be in use");
        fake.end(1);
        assert!(!memory.trim_pool(&fake, pool, MIB), "so much is to be kept");
        memory.set_threshold(pool, 512);
        memory.tidy_pools(&fake);
        assert_eq!(amounts(&mut memory, pool).0.current, 512);
        fake.end(2);
        memory.tidy_pools(&fake);
        assert_eq!(amounts(&mut memory, pool).0.current, 512, "that is what it keeps");
        memory.destroy_pool(&fake, pool);
        assert!(memory.pools.pools.is_empty());
        assert_eq!(fake.mapped(), 1, "the heap keeps a block for small allocations");
    }

    #[test]
    fn a_destroyed_pool_goes_with_its_last_allocation() {
        let (fake, mut memory, pool) = pool(0);
        let kept = memory.allocate_in_pool(&fake, &asked(pool, 1, 3 * MIB)).expect("room");
        memory.destroy_pool(&fake, pool);
        assert_eq!(memory.pool(0x77), None, "the driver may give the name again");
        let found = memory.allocation_at(kept).expect("still there");
        assert_eq!(memory.pool_handle(found), 0);
        assert!(memory.take_context(1).is_empty(), "it is the device's");
        let allocation = memory.take_of_pool(kept).expect("it is allocated");
        memory.release(&fake, allocation);
        memory.tidy_pools(&fake);
        assert!(memory.pools.pools.is_empty());
        assert_eq!(fake.mapped(), 0);
    }

    #[test]
    fn a_pool_has_no_more_than_its_limit() {
        let (fake, mut memory, pool) = pool(4 * MIB);
        let ask = |memory: &mut Memory, size| memory.allocate_in_pool(&fake, &asked(pool, 1, size));
        assert_eq!(ask(&mut memory, 5 * MIB), Err(ERROR_OUT_OF_MEMORY));
        assert_eq!(ask(&mut memory, u64::MAX), Err(ERROR_OUT_OF_MEMORY));
        let first = ask(&mut memory, 2 * MIB).expect("room");
        ask(&mut memory, 2 * MIB).expect("room");
        assert_eq!(ask(&mut memory, 1), Err(ERROR_OUT_OF_MEMORY));
        free(&mut memory, first, 1, 7);
        assert_eq!(ask(&mut memory, 1), Err(ERROR_OUT_OF_MEMORY), "it may be in use");
        fake.end(7);
        ask(&mut memory, 1).expect("what is idle is given back");
    }

    #[test]
    fn idle_memory_of_pools_makes_room_for_others() {
        let (fake, mut memory, pool) = pool(0);
        fake.limit_bytes(4 * MIB);
        let small = memory.allocate_in_pool(&fake, &asked(pool, 1, 100)).expect("room");
        let large = memory.allocate_in_pool(&fake, &asked(pool, 1, 2 * MIB)).expect("room");
        free(&mut memory, small, 1, 1);
        free(&mut memory, large, 1, 2);
        assert_eq!(memory.allocate(&fake, 0, 1, 4 * MIB), Err(ERROR_OUT_OF_MEMORY));
        [1, 2].into_iter().for_each(|event| fake.end(event));
        memory.allocate(&fake, 0, 1, 4 * MIB).expect("all of it is idle");
        assert!(!memory.has_freed(0));
    }

    #[test]
    fn with_a_context_its_work_is_over() {
        let (fake, mut memory, pool) = pool(0);
        let first = memory.allocate_in_pool(&fake, &asked(pool, 1, MIB)).expect("room");
        free(&mut memory, first, 1, 9);
        memory.keep_event(1, 10);
        memory.take_context(1);
        assert_eq!(memory.spare_event(1), None, "they are gone with it");
        assert_eq!(memory.allocate_in_pool(&fake, &asked(pool, 2, MIB)), Ok(first));
        assert_eq!(memory.spare_event(1), None);
    }

    #[test]
    fn a_failure_at_any_call_changes_nothing() {
        for k in 0.. {
            let (fake, mut memory, pool) = pool(0);
            memory.allocate(&fake, 0, 1, MIB).expect("room");
            fake.fail_after(k);
            let result = memory.allocate_in_pool(&fake, &asked(pool, 1, 3 * MIB));
            if !fake.fail_never() {
                assert!(result.is_ok());
                break;
            }
            assert!(result.is_err(), "call {k} failed unnoticed");
            assert_eq!(fake.mapped(), 1, "call {k}");
            assert_eq!(amounts(&mut memory, pool), Default::default(), "call {k}");
        }
    }
}
