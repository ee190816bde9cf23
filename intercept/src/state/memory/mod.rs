//! The tables of the bulk memory: the heap that serves `cuMemAlloc*`, and the program's own
//! virtual memory management.
//!
//! A *block* is physical memory, a *mapping* is a block seen at an address, an *allocation* is
//! what the program got from `cuMemAlloc*`: a whole block, or a piece of one. While the program
//! is detached the blocks and mappings stay in the tables without handles, and that is all that is
//! needed to put everything back.
//!
//! The lock is held during calls of the virtual memory management, never while waiting for the
//! gate, for the device or for a checkpointer. Calls enter the gate first, then take the lock.

use std::collections::{BTreeMap, BTreeSet};
use std::os::fd::OwnedFd;
use std::sync::{Arc, Mutex, MutexGuard};

use gpucr_wire::access::Allocation as Extent;
use gpucr_wire::{BlockKind, Counts};

use crate::abi::types::{Access, AllocationProp, Code};
use crate::log::log;
use crate::resettable::Resettable;
use crate::state::index;

mod attach;
#[cfg(test)]
pub(crate) mod fake;
mod foreign;
mod heap;
pub(crate) mod host;
mod imported;
pub(crate) mod multicast;
mod opened;
pub(crate) mod pools;
mod program;
mod share;
mod shared_pools;
pub(crate) mod space;
pub(crate) mod vmm;

pub(crate) use attach::Fds;
use foreign::Foreign;
pub(crate) use foreign::IMPORT;
pub(crate) use heap::Allocation;
use heap::Heap;
use host::HostMemory;
use multicast::Objects;
pub(crate) use multicast::{Asked, Incomplete, Source};
pub(crate) use opened::{Offer, Origin};
use pools::Pools;
pub(crate) use program::is_marked;
use space::{Place, Slab};
use vmm::Vmm;

/// Physical memory.
pub(crate) struct Block {
    pub(crate) device: i32,
    /// Bytes.
    pub(crate) size: u64,
    pub(crate) kind: BlockKind,
    /// What it is created with.
    prop: AllocationProp,
    /// The handle types that the program itself asked for.
    asked_types: u32,
    /// The driver's handle; `None` while detached.
    handle: Option<u64>,
    /// Where it was imported from: such a handle cannot be exported again.
    fd: Option<Arc<OwnedFd>>,
    /// Times that the program may still release it.
    references: u32,
    /// The program has given it to another process, by a descriptor that is not ours.
    shared: bool,
    /// The program has exported it: others that have a ticket get it.
    is_offered: bool,
    /// It is another process's, and the program has imported it by a ticket: it maps it itself.
    is_imported: bool,
    /// Its memory is that of other instances of the program too: the device only reads it.
    read_only: bool,
    /// Live allocations inside it; of a block of the program's, its mappings.
    pub(crate) allocations: u32,
    /// How often it is bound to multicast objects.
    bound: u32,
    /// If small allocations share it.
    slab: Option<Slab>,
    /// Where the heap put it.
    place: Option<Place>,
}

impl Block {
    /// A block that the driver has just given, with nothing in it.
    fn new(device: i32, size: u64, kind: BlockKind, prop: AllocationProp, handle: u64) -> Self {
        Self {
            device,
            size,
            kind,
            asked_types: prop.handle_types,
            prop,
            handle: Some(handle),
            fd: None,
            references: 0,
            shared: false,
            is_offered: false,
            is_imported: false,
            read_only: false,
            allocations: 0,
            bound: 0,
            slab: None,
            place: None,
        }
    }

    /// Whether it is the heap's, or opened: the program did not map it itself.
    fn is_heap(&self) -> bool {
        !matches!(self.kind, BlockKind::Program {}) && !self.is_imported
    }

    /// Whether it is another process's.
    fn is_opened(&self) -> bool {
        matches!(self.kind, BlockKind::Opened { .. })
    }
}

/// A block at an address.
struct Mapping {
    size: u64,
    /// First byte of the block that is seen.
    offset: u64,
    block: u64,
    access: Vec<Access>,
    /// Whether the driver has it; false while detached.
    attached: bool,
}

/// All tables.
#[derive(Default)]
pub(crate) struct Memory {
    last_id: u64,
    blocks: BTreeMap<u64, Block>,
    mappings: BTreeMap<u64, Mapping>,
    /// Address ranges reserved by the heap and by the program.
    reservations: BTreeMap<u64, u64>,
    heaps: BTreeMap<i32, Heap>,
    /// Whether the memory of a device can be handed to another process, as far as it was asked.
    exportable: BTreeMap<i32, bool>,
    allocations: BTreeMap<u64, Allocation>,
    /// Freed, but the device may still be using them.
    deferred: Vec<Allocation>,
    /// (owner, other): memory of the owner's heap is open to the other device.
    peers: BTreeSet<(i32, i32)>,
    /// The same, since pools are.
    pool_peers: BTreeSet<(i32, i32)>,
    /// Blocks whose memory the checkpointer holds; some of them may be gone.
    lent: BTreeSet<u64>,
    /// Where blocks that are opened come from.
    origins: BTreeMap<u64, Origin>,
    /// Blocks of other processes that were closed, and their owners do not know yet.
    closed: Vec<Origin>,
    foreign: Foreign,
    host: HostMemory,
    multicast: Objects,
    pools: Pools,
}

/// A driver call failed on behalf of the agent.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Failure {
    /// The driver's code, 0 if the driver is not the cause.
    pub(crate) code: Code,
    /// What was being done.
    pub(crate) message: String,
}

impl Failure {
    /// The error of a driver call.
    pub(crate) fn driver(code: Code, message: impl Into<String>) -> Self {
        Self { code, message: message.into() }
    }

    /// An error of something else.
    pub(crate) fn other(message: impl Into<String>) -> Self {
        Self { code: 0, message: message.into() }
    }
}

static MEMORY: Resettable<Mutex<Option<Memory>>> = Resettable::new(Mutex::new(None));

/// The locked tables.
pub(crate) struct Locked(MutexGuard<'static, Option<Memory>>);

impl std::ops::Deref for Locked {
    type Target = Memory;
    fn deref(&self) -> &Memory {
        self.0.as_ref().expect("made by lock()")
    }
}

impl std::ops::DerefMut for Locked {
    fn deref_mut(&mut self) -> &mut Memory {
        self.0.as_mut().expect("made by lock()")
    }
}

/// Locks the tables.
pub(crate) fn lock() -> Locked {
    let mut guard = MEMORY.get().lock().unwrap_or_else(|poisoned| poisoned.into_inner());
    guard.get_or_insert_default();
    Locked(guard)
}

/// Forgets everything, in the child of a fork.
///
/// # Safety
/// No other thread exists.
pub(crate) unsafe fn reset() {
    // If nobody was changing them, the tables are whole, and the file descriptors in them can be
    // closed: they would keep the parent's memory alive.
    if let Ok(mut guard) = MEMORY.get().try_lock() {
        *guard = None;
    }
    // SAFETY: the caller's duty.
    unsafe { MEMORY.reset(Mutex::new(None)) };
}

impl Memory {
    fn new_id(&mut self) -> u64 {
        self.last_id += 1;
        self.last_id
    }

    /// Whether memory of the device is served from blocks of ours: they can be taken out of the process and
    /// put back. If not, the driver has to serve it, and its checkpoint to save it.
    pub(crate) fn serves(&mut self, vmm: &dyn Vmm, device: i32) -> bool {
        *self.exportable.entry(device).or_insert_with(|| {
            let exportable = vmm.is_exportable(device);
            if !exportable {
                log!("the memory of device {device} cannot be exported: it is left to the driver");
            }
            exportable
        })
    }

    /// Writes the counts kept here.
    pub(crate) fn fill(&self, counts: &mut Counts) {
        let own = self.blocks.values().filter(|block| !block.is_opened());
        counts.bulk_bytes = own.map(|block| block.size).sum();
        let own = self.allocations.values().filter(|allocation| allocation.opened == 0);
        counts.allocations = own.count() as u64;
        counts.blocks = self.blocks.len() as u64;
        counts.owners = self.owners();
        counts.private = self.exportable.values().any(|exportable| !exportable);
        counts.shared += self.blocks.values().filter(|block| block.shared).count() as u64;
        self.foreign.fill(counts);
        self.multicast.fill(counts);
    }

    /// The mapping that holds `address`.
    fn mapping_at(&self, address: u64) -> Option<(u64, &Mapping)> {
        let (start, mapping) = self.mappings.range(..=address).next_back()?;
        (address - start < mapping.size).then_some((*start, mapping))
    }

    /// Where the allocations with these ids, given in order, are. Those that are gone are left out.
    pub(crate) fn extents(&self, ids: &[u64]) -> Vec<Extent> {
        let wanted = |allocation: &&Allocation| ids.binary_search(&allocation.id).is_ok();
        let extent = |a: &Allocation| Extent { id: a.id, address: a.address, size: a.size };
        let mapped = |id: &u64| {
            let address = index::reservation_address(*id)?;
            let size = self.reservations.get(&address)?;
            let mut mappings = self.mappings.range(address..address + size);
            let first = mappings.next()?;
            let last = mappings.next_back().unwrap_or(first);
            Some(Extent { id: *id, address: *first.0, size: last.0 + last.1.size - first.0 })
        };
        // What a pool has been given back may still be written by work from before.
        let heap = self.allocations.values().chain(self.pools.freed());
        let heap = heap.filter(wanted).map(extent);
        heap.chain(ids.iter().filter_map(mapped)).collect()
    }

    /// The beginning of the reservation that holds `address`; 0 if it is not known.
    fn reservation_at(&self, address: u64) -> u64 {
        match self.reservations.range(..=address).next_back() {
            Some((start, size)) if address - start < *size => *start,
            _ => 0,
        }
    }

    /// Joins mappings, given in order of address, that follow each other within a reservation
    /// and that `same` allows to be treated in one call. Gives beginning and size of each run.
    fn runs(
        &self,
        addresses: impl Iterator<Item = u64>,
        same: impl Fn(&Mapping, &Mapping) -> bool,
    ) -> Vec<(u64, u64)> {
        let mut runs: Vec<(u64, u64)> = Vec::new();
        let mut last: Option<&Mapping> = None;
        for address in addresses {
            let mapping = &self.mappings[&address];
            match (runs.last_mut(), last) {
                (Some((start, size)), Some(last))
                    if *start + *size == address
                        && self.reservation_at(*start) == self.reservation_at(address)
                        && same(last, mapping) =>
                {
                    *size += mapping.size;
                }
                _ => runs.push((address, mapping.size)),
            }
            last = Some(mapping);
        }
        runs
    }
}
