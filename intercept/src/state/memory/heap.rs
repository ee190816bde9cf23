//! The heap: `cuMemAlloc*` out of blocks of our own.

use std::collections::BTreeMap;

use gpucr_wire::{BlockKind, CHUNK_SIZE};

use super::space::{Slab, SlabPiece, Space, round_up};
use super::vmm::Vmm;
use super::{Block, Mapping, Memory};
use crate::abi::types::{
    ACCESS_NONE, ACCESS_READ_WRITE, Access, AllocationProp, Code, ERROR_INVALID_VALUE,
    ERROR_OUT_OF_MEMORY,
};
use crate::log::log;
use crate::state::index;

/// From here on an allocation has blocks of its own.
pub(super) const LARGE: u64 = 1 << 20;

/// What the program got from `cuMemAlloc*`.
pub(crate) struct Allocation {
    /// Where it begins.
    pub(crate) address: u64,
    /// Bytes that were asked for.
    pub(crate) size: u64,
    /// The context that was current.
    pub(crate) context: u64,
    /// Unlike any other's, as long as the process lives. Memory that a pool gives again keeps it: work that still uses
    /// it under its last owner is told by it.
    pub(crate) id: u64,
    /// What the program may tell it from all others by.
    pub(crate) buffer: u64,
    /// The [pool](super::pools) that it is from, 0 if from none.
    pub(crate) pool: u64,
    /// Bytes that it has, which may be more than it asked for.
    pub(super) held: u64,
    /// Its synchronous copies and fills always wait (see [`crate::watch::synchronous`]).
    pub(crate) synchronous: bool,
    /// How often the program has still opened it, if it is another process's.
    pub(super) opened: u32,
    block: u64,
    piece: Option<SlabPiece>,
}

impl Allocation {
    /// What was opened once, of a block of another process.
    pub(super) fn opened(address: u64, size: u64, context: u64, id: u64, block: u64) -> Self {
        let (buffer, synchronous, pool, held, opened, piece) = (id, false, 0, size, 1, None);
        Self { address, size, context, id, buffer, pool, held, synchronous, opened, block, piece }
    }

    /// Whether it is this process's, which others may open.
    pub(crate) fn is_own(&self) -> bool {
        self.opened == 0
    }

    /// The block in which it lies.
    pub(super) fn block(&self) -> u64 {
        self.block
    }
}

/// The heap of one device.
pub(super) struct Heap {
    /// Blocks are multiples of this, bytes.
    unit: u64,
    rdma: bool,
    space: Space,
    /// Blocks that small allocations share, in order of age.
    slabs: Vec<u64>,
}

impl Memory {
    /// Serves `cuMemAlloc`.
    ///
    /// # Errors
    /// The driver's code; then nothing has changed.
    pub(crate) fn allocate(
        &mut self,
        vmm: &dyn Vmm,
        device: i32,
        context: u64,
        size: u64,
    ) -> Result<u64, Code> {
        if size == 0 {
            return Err(ERROR_INVALID_VALUE);
        }
        match self.try_allocate(vmm, device, context, size) {
            // Both: pools may have pieces of blocks that are empty then.
            Err(ERROR_OUT_OF_MEMORY)
                if self.trim_pools(vmm, device) | self.trim(vmm, device, 0) =>
            {
                self.try_allocate(vmm, device, context, size)
            }
            result => result,
        }
    }

    fn try_allocate(
        &mut self,
        vmm: &dyn Vmm,
        device: i32,
        context: u64,
        size: u64,
    ) -> Result<u64, Code> {
        let (block, piece, address) = if size < LARGE {
            let (block, piece) = self.take_piece(vmm, device, size)?;
            let address = self.heap_address(block) + piece.offset;
            (block, Some(piece), address)
        } else {
            let unit = self.heap(vmm, device)?.unit;
            let bytes = round_up(size, unit).ok_or(ERROR_OUT_OF_MEMORY)?;
            let block = self.new_heap_block(vmm, device, bytes)?;
            (block, None, self.heap_address(block))
        };
        let id = self.new_id();
        let held = self.blocks.get_mut(&block).expect("just found");
        held.allocations += 1;
        match piece {
            Some(_) => index::insert_small(address, size, id),
            None => index::insert(address, held.size, id),
        }
        let held = if piece.is_some() { size } else { held.size };
        let (buffer, synchronous, pool, opened) = (id, false, 0, 0);
        self.put_back(Allocation {
            address,
            size,
            context,
            id,
            buffer,
            pool,
            held,
            synchronous,
            opened,
            block,
            piece,
        });
        Ok(address)
    }

    fn heap(&mut self, vmm: &dyn Vmm, device: i32) -> Result<&mut Heap, Code> {
        use std::collections::btree_map::Entry;
        match self.heaps.entry(device) {
            Entry::Occupied(heap) => Ok(heap.into_mut()),
            Entry::Vacant(vacant) => {
                let info = vmm.device(device)?;
                let unit = CHUNK_SIZE.max(info.granularity);
                Ok(vacant.insert(Heap {
                    unit,
                    rdma: info.rdma,
                    space: Space::new(unit, info.total),
                    slabs: Vec::new(),
                }))
            }
        }
    }

    /// Where the heap mapped a block of its own.
    fn heap_address(&self, block: u64) -> u64 {
        self.blocks[&block].place.as_ref().map_or(0, |place| place.address)
    }

    fn take_piece(
        &mut self,
        vmm: &dyn Vmm,
        device: i32,
        size: u64,
    ) -> Result<(u64, SlabPiece), Code> {
        let unit = self.heap(vmm, device)?.unit;
        // The newest first: the others are likely to be full.
        for index in (0..self.heaps[&device].slabs.len()).rev() {
            let block = self.heaps[&device].slabs[index];
            let slab = self.blocks.get_mut(&block).and_then(|block| block.slab.as_mut());
            if let Some(piece) = slab.and_then(|slab| slab.take(size)) {
                return Ok((block, piece));
            }
        }
        let id = self.new_heap_block(vmm, device, unit)?;
        let slab = self.blocks.get_mut(&id).expect("just made").slab.insert(Slab::new(unit));
        let piece = slab.take(size).ok_or(ERROR_OUT_OF_MEMORY)?;
        self.heap(vmm, device)?.slabs.push(id);
        Ok((id, piece))
    }

    fn new_heap_block(&mut self, vmm: &dyn Vmm, device: i32, size: u64) -> Result<u64, Code> {
        let access = self.heap_access(device);
        let mut reserved = Vec::new();
        let heap = self.heap(vmm, device)?;
        let prop = AllocationProp::on_device(device, heap.rdma);
        let place = heap.space.place(vmm, size, |address, size| reserved.push((address, size)))?;
        self.reservations.extend(reserved);
        let address = place.address;
        let made = (|| {
            let handle = vmm.create(size, &prop)?;
            let mapped = vmm.map(address, size, 0, handle).and_then(|()| {
                vmm.set_access(address, size, &access).inspect_err(|_| {
                    let _ = vmm.unmap(address, size);
                })
            });
            mapped.map(|()| handle).inspect_err(|_| {
                let _ = vmm.release(handle);
            })
        })();
        let handle = match made {
            Ok(handle) => handle,
            Err(code) => {
                self.heap(vmm, device)?.space.free(place);
                return Err(code);
            }
        };
        let id = self.new_id();
        let block = Block::new(device, size, BlockKind::Heap {}, prop, handle);
        let block = Block { place: Some(place), ..block };
        self.blocks.insert(id, block);
        let mapping = Mapping { size, offset: 0, block: id, access, attached: true };
        self.mappings.insert(address, mapping);
        Ok(id)
    }

    fn heap_access(&self, device: i32) -> Vec<Access> {
        let peers = self.peers.union(&self.pool_peers);
        let peers = peers.filter(|(owner, _)| *owner == device).map(|(_, peer)| *peer);
        std::iter::once(device)
            .chain(peers)
            .map(|device| Access::of_device(device, ACCESS_READ_WRITE))
            .collect()
    }

    /// Takes the allocation that begins at `address` out of the table. It still holds its
    /// memory, until [`Self::release`].
    pub(crate) fn take(&mut self, address: u64) -> Option<Allocation> {
        self.allocations.remove(&address)
    }

    /// Takes all allocations of a context, deferred ones included.
    pub(crate) fn take_context(&mut self, context: u64) -> Vec<Allocation> {
        self.forget_context_of_pools(context);
        // Memory of pools is the device's.
        let is_gone =
            |allocation: &Allocation| allocation.context == context && allocation.pool == 0;
        let allocations = std::mem::take(&mut self.allocations);
        let (gone, rest): (BTreeMap<_, _>, BTreeMap<_, _>) =
            allocations.into_iter().partition(|(_, allocation)| is_gone(allocation));
        self.allocations = rest;
        let deferred = self.deferred.extract_if(.., |allocation| is_gone(allocation));
        deferred.chain(gone.into_values()).collect()
    }

    /// Keeps a freed allocation until the device is known not to use it.
    pub(crate) fn defer(&mut self, allocation: Allocation) {
        self.deferred.push(allocation);
    }

    /// The freed allocations that wait for the device.
    pub(crate) fn take_deferred(&mut self) -> Vec<Allocation> {
        std::mem::take(&mut self.deferred)
    }

    /// Whether any freed allocation waits for the device.
    pub(crate) fn has_deferred(&self) -> bool {
        !self.deferred.is_empty()
    }

    /// Gives back the memory of an allocation that nothing uses any more: to its pool if it is from one.
    pub(crate) fn release(&mut self, vmm: &dyn Vmm, allocation: Allocation) {
        if allocation.pool != 0 && !self.is_opened(&allocation) {
            return self.free_in_pool(allocation, None);
        }
        self.give_back(vmm, allocation);
    }

    /// The same, whether it is from a pool or not.
    pub(super) fn give_back(&mut self, vmm: &dyn Vmm, allocation: Allocation) {
        let Some(block) = self.blocks.get_mut(&allocation.block) else { return };
        if block.is_opened() {
            return self.release_opened(vmm, &allocation);
        }
        block.allocations -= 1;
        match (allocation.piece, &mut block.slab) {
            (Some(piece), Some(slab)) => {
                index::remove_small(allocation.address, allocation.held);
                slab.free(piece);
                if block.allocations == 0 {
                    // One empty block is kept: a program that allocates and frees in turn would
                    // otherwise make and give back a block each time.
                    let device = block.device;
                    self.trim(vmm, device, 1);
                }
            }
            _ => self.drop_heap_block(vmm, allocation.block),
        }
    }

    /// Gives back all but `keep` empty shared blocks of a device. Says whether there were any.
    fn trim(&mut self, vmm: &dyn Vmm, device: i32, keep: usize) -> bool {
        let Some(heap) = self.heaps.get_mut(&device) else { return false };
        let blocks = &self.blocks;
        let empty = heap.slabs.iter().filter(|id| blocks[id].allocations == 0).count();
        let mut surplus = empty.saturating_sub(keep);
        let dropped: Vec<u64> = heap
            .slabs
            .extract_if(.., |id| {
                let drop = surplus > 0 && blocks[id].allocations == 0;
                surplus -= usize::from(drop);
                drop
            })
            .collect();
        for id in &dropped {
            self.drop_heap_block(vmm, *id);
        }
        !dropped.is_empty()
    }

    fn drop_heap_block(&mut self, vmm: &dyn Vmm, id: u64) {
        let Some(block) = self.blocks.remove(&id) else { return };
        let Some(place) = block.place else { return };
        self.mappings.remove(&place.address);
        index::remove(place.address, block.size);
        let unmapped = vmm.unmap(place.address, block.size);
        let released = block.handle.map_or(Ok(()), |handle| vmm.release(handle));
        if let Err(code) = unmapped.and(released) {
            // The addresses may still be in use: better lost than given out again.
            log!("block {id} at {:#x} cannot be given back: error {code}", place.address);
            return;
        }
        if let Some(heap) = self.heaps.get_mut(&block.device) {
            heap.space.free(place);
        }
    }

    /// The device whose memory an allocation has.
    pub(crate) fn device_of(&self, allocation: &Allocation) -> Option<i32> {
        self.blocks.get(&allocation.block).map(|block| block.device)
    }

    /// The allocation that holds `address`.
    pub(crate) fn allocation_at(&self, address: u64) -> Option<&Allocation> {
        let (start, allocation) = self.allocations.range(..=address).next_back()?;
        (address - start < allocation.size).then_some(allocation)
    }

    /// The allocation that has `address` in it, to change what is known of it.
    pub(crate) fn allocation_at_mut(&mut self, address: u64) -> Option<&mut Allocation> {
        let (start, allocation) = self.allocations.range_mut(..=address).next_back()?;
        (address - start < allocation.size).then_some(allocation)
    }

    /// Whether synchronous calls that touch this range always wait.
    pub(crate) fn is_synchronous(&self, address: u64, bytes: u64) -> bool {
        let end = address.saturating_add(bytes);
        let first = self.allocation_at(address).filter(|_| bytes > 0);
        let inside = self.allocations.range(address..end).map(|(_, allocation)| allocation);
        first.into_iter().chain(inside).any(|allocation| allocation.synchronous)
    }

    /// Whether `address` lies in a block of the heap, or in one that was opened.
    pub(crate) fn is_heap(&self, address: u64) -> bool {
        self.mapping_at(address).is_some_and(|(_, mapping)| self.blocks[&mapping.block].is_heap())
    }

    /// Opens the heap of `owner` to the device `peer`, or closes it, as contexts are to each other.
    ///
    /// # Errors
    /// The driver's first code; the other blocks are done all the same.
    pub(crate) fn set_peer(
        &mut self,
        vmm: &dyn Vmm,
        owner: i32,
        peer: i32,
        open: bool,
    ) -> Result<(), Code> {
        let pair = (owner, peer);
        let changed = if open { self.peers.insert(pair) } else { self.peers.remove(&pair) };
        if changed && !self.pool_peers.contains(&pair) {
            self.give_access(vmm, owner, peer, open)
        } else {
            Ok(())
        }
    }

    /// Opens the heap of `owner` to the device `peer` since a pool is: for good.
    ///
    /// # Errors
    /// As for [`Self::set_peer`].
    pub(crate) fn open_pools(&mut self, vmm: &dyn Vmm, owner: i32, peer: i32) -> Result<(), Code> {
        let pair = (owner, peer);
        if self.pool_peers.insert(pair) && !self.peers.contains(&pair) {
            self.give_access(vmm, owner, peer, true)
        } else {
            Ok(())
        }
    }

    fn give_access(
        &mut self,
        vmm: &dyn Vmm,
        owner: i32,
        peer: i32,
        open: bool,
    ) -> Result<(), Code> {
        if owner == peer {
            return Ok(());
        }
        let after = self.heap_access(owner);
        let blocks = &self.blocks;
        let addresses: Vec<u64> = self
            .mappings
            .iter_mut()
            .filter(|(_, mapping)| {
                let block = &blocks[&mapping.block];
                block.device == owner && block.is_heap()
            })
            .map(|(address, mapping)| {
                mapping.access.clone_from(&after);
                *address
            })
            .collect();
        let mut result = Ok(());
        let read_only = |mapping: &Mapping| self.blocks[&mapping.block].read_only;
        let alike = |a: &Mapping, b: &Mapping| read_only(a) == read_only(b);
        let flags = if open { ACCESS_READ_WRITE } else { ACCESS_NONE };
        for (start, size) in self.runs(addresses.into_iter(), alike) {
            let block = &self.blocks[&self.mappings[&start].block];
            let change = block.granted(&[Access::of_device(peer, flags)]);
            result = result.and(vmm.set_access(start, size, &change));
        }
        result
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::state::memory::fake::Fake;

    const MIB: u64 = 1 << 20;

    #[test]
    fn ten_thousand_small_allocations_cost_few_blocks() {
        let (fake, mut memory) = (Fake::new(), Memory::default());
        let mut addresses: Vec<u64> =
            (0..10_000).map(|_| memory.allocate(&fake, 0, 1, 1024).expect("room")).collect();
        assert_eq!(memory.blocks.len(), 5);
        addresses.sort_unstable();
        assert!(addresses.windows(2).all(|pair| pair[1] - pair[0] >= 1024), "they overlap");
        for address in addresses {
            let allocation = memory.take(address).expect("known");
            memory.release(&fake, allocation);
        }
        assert_eq!(memory.blocks.len(), 1, "one empty block is kept");
        assert_eq!(fake.mapped(), 1);
    }

    #[test]
    fn large_allocations_have_blocks_of_their_own() {
        let (fake, mut memory) = (Fake::new(), Memory::default());
        let a = memory.allocate(&fake, 0, 1, 3 * MIB).expect("room");
        let b = memory.allocate(&fake, 0, 1, MIB).expect("room");
        assert_eq!(b, a + 4 * MIB, "side by side");
        let found = memory.allocation_at(a + 3 * MIB - 1).expect("inside");
        assert_eq!((found.address, found.size), (a, 3 * MIB));
        assert!(memory.allocation_at(a + 3 * MIB).is_none(), "beyond what was asked for");
        assert!(memory.take(a + 1).is_none(), "not its beginning");
        let allocation = memory.take(a).expect("known");
        memory.release(&fake, allocation);
        assert!(memory.take(a).is_none(), "freed twice");
        assert_eq!(memory.allocate(&fake, 0, 1, 4 * MIB), Ok(a), "used again");
        assert_eq!(memory.allocate(&fake, 0, 1, 0), Err(ERROR_INVALID_VALUE));
    }

    #[test]
    fn a_failure_at_any_call_leaves_nothing_behind() {
        for size in [100, 5 * MIB] {
            for k in 0.. {
                let (fake, mut memory) = (Fake::new(), Memory::default());
                let kept = memory.allocate(&fake, 0, 1, 2 * MIB).expect("room");
                let before = fake.snapshot();
                fake.fail_after(k);
                let result = memory.allocate(&fake, 0, 1, size);
                let failed = fake.fail_never();
                if !failed {
                    assert!(result.is_ok());
                    break;
                }
                assert!(result.is_err(), "call {k} failed unnoticed");
                assert_eq!(fake.snapshot(), before, "call {k}");
                assert_eq!(memory.blocks.len(), 1, "call {k}");
                assert_eq!(
                    memory.allocate(&fake, 0, 1, 2 * MIB),
                    Ok(kept + 2 * MIB),
                    "call {k}: the addresses are free again"
                );
            }
        }
    }

    #[test]
    fn an_empty_shared_block_makes_room_for_a_large_one() {
        let (fake, mut memory) = (Fake::new(), Memory::default());
        let small = memory.allocate(&fake, 0, 1, 100).expect("room");
        let allocation = memory.take(small).expect("known");
        memory.release(&fake, allocation);
        fake.limit_bytes(4 * MIB);
        memory.allocate(&fake, 0, 1, 4 * MIB).expect("the empty block is given back");
        assert_eq!(memory.allocate(&fake, 0, 1, 100), Err(ERROR_OUT_OF_MEMORY));
    }

    #[test]
    fn a_context_takes_its_allocations_along() {
        let (fake, mut memory) = (Fake::new(), Memory::default());
        let keep = memory.allocate(&fake, 0, 1, 100).expect("room");
        memory.allocate(&fake, 0, 2, 100).expect("room");
        let deferred = memory.allocate(&fake, 0, 2, 2 * MIB).expect("room");
        let allocation = memory.take(deferred).expect("known");
        memory.defer(allocation);
        let gone = memory.take_context(2);
        assert_eq!(gone.len(), 2);
        for allocation in gone {
            memory.release(&fake, allocation);
        }
        assert!(memory.allocation_at(keep).is_some());
        assert!(!memory.has_deferred());
        assert_eq!(fake.mapped(), 1);
    }

    #[test]
    fn peers_reach_old_and_new_blocks() {
        let (fake, mut memory) = (Fake::new(), Memory::default());
        let old = memory.allocate(&fake, 0, 1, 2 * MIB).expect("room");
        memory.set_peer(&fake, 0, 1, true).expect("opened");
        let new = memory.allocate(&fake, 0, 1, 2 * MIB).expect("room");
        assert_eq!(fake.devices(old), vec![0, 1]);
        assert_eq!(fake.devices(new), vec![0, 1]);
        memory.set_peer(&fake, 0, 1, false).expect("closed");
        assert_eq!(fake.devices(old), vec![0]);
    }
}
