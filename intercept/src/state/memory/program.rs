//! The program's own virtual memory management, followed so that its blocks can be taken away
//! and put back.
//!
//! The program gets handles of ours, because the driver's change across a detach. Handles of
//! things that are not followed (imports from programs without the shim) are the
//! driver's own.

use gpucr_wire::BlockKind;

use super::vmm::Vmm;
use super::{Block, Mapping, Memory};
use crate::abi::types::{Access, AllocationProp, Code, ERROR_INVALID_VALUE, HANDLE_POSIX_FD};
use crate::log::log;
use crate::state::index;

/// Our handles begin with this; the driver's are small numbers.
const HANDLE_MARK: u64 = 0x6763_7200_0000_0000;
const MARK_BITS: u64 = 0xffff_ff00_0000_0000;

pub(super) fn handle_of(block: u64) -> u64 {
    HANDLE_MARK | block
}

/// What one of our handles names.
pub(super) fn named(handle: u64) -> Option<u64> {
    (handle & MARK_BITS == HANDLE_MARK).then_some(handle & !MARK_BITS)
}

/// Whether a handle is or was one of ours, and none of the driver's.
pub(crate) fn is_marked(handle: u64) -> bool {
    named(handle).is_some()
}

impl Memory {
    pub(super) fn block_of(&self, handle: u64) -> Option<u64> {
        named(handle).filter(|id| self.blocks.contains_key(id))
    }

    /// Whether `handle` is one of ours.
    #[cfg(test)]
    fn is_program_handle(&self, handle: u64) -> bool {
        self.block_of(handle).is_some()
    }

    /// The driver's handle for one of the program's: itself if it is not ours.
    pub(crate) fn real_handle(&self, handle: u64) -> u64 {
        self.block_of(handle).and_then(|id| self.blocks[&id].handle).unwrap_or(handle)
    }

    /// Serves `cuMemCreate` for device memory.
    ///
    /// # Errors
    /// The driver's code; then nothing has changed.
    pub(crate) fn create(
        &mut self,
        vmm: &dyn Vmm,
        size: u64,
        asked: AllocationProp,
    ) -> Result<u64, Code> {
        let prop = AllocationProp { handle_types: asked.handle_types | HANDLE_POSIX_FD, ..asked };
        let handle = vmm.create(size, &prop)?;
        let id = self.new_id();
        let block = Block::new(asked.location.id, size, BlockKind::Program {}, prop, handle);
        let block = Block { asked_types: asked.handle_types, references: 1, ..block };
        self.blocks.insert(id, block);
        Ok(handle_of(id))
    }

    /// Serves `cuMemRelease`. `None`: the handle is not ours.
    pub(crate) fn release_handle(&mut self, vmm: &dyn Vmm, handle: u64) -> Option<Code> {
        let id = self.block_of(handle)?;
        let block = self.blocks.get_mut(&id)?;
        if block.references == 0 {
            return Some(ERROR_INVALID_VALUE);
        }
        block.references -= 1;
        self.drop_unused(vmm, id);
        Some(0)
    }

    /// Serves `cuMemRetainAllocationHandle`. `None`: nothing that is followed is mapped there.
    ///
    /// # Errors
    /// `ERROR_INVALID_VALUE` for memory of the heap, which has no handle for the program.
    pub(crate) fn retain(&mut self, address: u64) -> Option<Result<u64, Code>> {
        let id = self.mapping_at(address)?.1.block;
        let block = self.blocks.get_mut(&id)?;
        if block.is_heap() {
            return Some(Err(ERROR_INVALID_VALUE));
        }
        block.references += 1;
        Some(Ok(handle_of(id)))
    }

    /// Serves `cuMemMap`. `None`: the handle is not ours.
    pub(crate) fn map(
        &mut self,
        vmm: &dyn Vmm,
        address: u64,
        size: u64,
        offset: u64,
        handle: u64,
    ) -> Option<Result<(), Code>> {
        let id = self.block_of(handle)?;
        let reservation = self.reservation_at(address);
        let block = self.blocks.get_mut(&id)?;
        let Some(real) = block.handle.filter(|_| block.references > 0) else {
            return Some(Err(ERROR_INVALID_VALUE));
        };
        Some(vmm.map(address, size, offset, real).map(|()| {
            block.allocations += 1;
            let mapping = Mapping { size, offset, block: id, access: Vec::new(), attached: true };
            self.mappings.insert(address, mapping);
            index::insert(address, size, index::reservation_id(reservation));
        }))
    }

    /// After a `cuMemUnmap` of the program that succeeded.
    pub(crate) fn unmapped(&mut self, vmm: &dyn Vmm, address: u64, size: u64) {
        self.foreign_unmapped(address, size);
        self.unmapped_objects(vmm, address, size);
        let starts: Vec<u64> =
            self.mappings.range(address..address.saturating_add(size)).map(|(a, _)| *a).collect();
        for start in starts {
            let Some(mapping) = self.mappings.remove(&start) else { continue };
            index::remove(start, mapping.size);
            if let Some(block) = self.blocks.get_mut(&mapping.block) {
                block.allocations = block.allocations.saturating_sub(1);
            }
            self.drop_unused(vmm, mapping.block);
        }
    }

    /// Whether a range lies, in part at least, in the heap: the program must not unmap it.
    pub(crate) fn touches_heap(&self, address: u64, size: u64) -> bool {
        let end = address.saturating_add(size);
        self.mappings.range(..end).next_back().is_some_and(|(start, mapping)| {
            start + mapping.size > address && self.blocks[&mapping.block].is_heap()
        })
    }

    pub(super) fn drop_unused(&mut self, vmm: &dyn Vmm, id: u64) {
        let unused = self.blocks.get(&id).is_some_and(|block| {
            !block.is_heap() && (block.references, block.allocations, block.bound) == (0, 0, 0)
        });
        if unused {
            self.closed.extend(self.origins.remove(&id));
        }
        if unused
            && let Some(block) = self.blocks.remove(&id)
            && let Some(handle) = block.handle
            && let Err(code) = vmm.release(handle)
        {
            log!("block {id} cannot be given back: error {code}");
        }
    }

    /// After a `cuMemSetAccess` of the program that succeeded.
    pub(crate) fn access_set(&mut self, address: u64, size: u64, access: &[Access]) {
        self.object_access_set(address, size, access);
        let range = address..address.saturating_add(size);
        for (_, mapping) in self.mappings.range_mut(range) {
            for new in access {
                mapping.access.retain(|old| old.location != new.location);
                mapping.access.push(*new);
            }
        }
    }

    /// The program has reserved addresses.
    pub(crate) fn reserved(&mut self, address: u64, size: u64) {
        self.reservations.insert(address, size);
    }

    /// The program has given addresses back.
    pub(crate) fn unreserved(&mut self, address: u64) {
        self.reservations.remove(&address);
    }

    /// The handle types that the program asked for; `None`: the handle is not ours.
    pub(crate) fn asked_types(&self, handle: u64) -> Option<u32> {
        self.block_of(handle).map(|id| self.blocks[&id].asked_types)
    }

    /// The program has given a block to another process, by a descriptor that is not ours.
    pub(crate) fn set_shared(&mut self, handle: u64) {
        if let Some(id) = self.block_of(handle)
            && let Some(block) = self.blocks.get_mut(&id)
        {
            block.shared = true;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::abi::types::{ACCESS_READ_WRITE, ERROR_INVALID_VALUE};
    use crate::state::memory::fake::Fake;

    const MIB: u64 = 1 << 20;

    #[test]
    fn a_block_lives_as_long_as_a_handle_or_a_mapping() {
        let (fake, mut memory) = (Fake::new(), Memory::default());
        let base = fake.reserve(8 * MIB).expect("reserved");
        memory.reserved(base, 8 * MIB);
        let prop = AllocationProp { handle_types: 0, ..AllocationProp::on_device(0, false) };
        let handle = memory.create(&fake, 2 * MIB, prop).expect("created");
        assert_eq!(memory.asked_types(handle), Some(0), "our own bit is hidden");
        for address in [base, base + 4 * MIB] {
            memory.map(&fake, address, 2 * MIB, 0, handle).expect("ours").expect("mapped");
            fake.set_access(address, 2 * MIB, &[Access::of_device(0, ACCESS_READ_WRITE)])
                .expect("set");
        }
        assert_eq!(memory.release_handle(&fake, handle), Some(0));
        assert_eq!(memory.release_handle(&fake, handle), Some(ERROR_INVALID_VALUE));
        assert_eq!(memory.map(&fake, base, 2 * MIB, 0, handle), Some(Err(ERROR_INVALID_VALUE)));
        let again = memory.retain(base + MIB).expect("mapped").expect("a handle");
        assert_eq!(again, handle);
        fake.unmap(base, 2 * MIB).expect("unmapped");
        memory.unmapped(&fake, base, 2 * MIB);
        assert_eq!(memory.release_handle(&fake, again), Some(0));
        assert_eq!(fake.handles(), 1, "one mapping is left");
        fake.unmap(base + 4 * MIB, 2 * MIB).expect("unmapped");
        memory.unmapped(&fake, base + 4 * MIB, 2 * MIB);
        assert_eq!(fake.handles(), 0);
        assert!(!memory.is_program_handle(handle));
    }

    #[test]
    fn the_heap_is_out_of_the_programs_reach() {
        let (fake, mut memory) = (Fake::new(), Memory::default());
        let address = memory.allocate(&fake, 0, 1, 2 * MIB).expect("room");
        assert_eq!(memory.retain(address), Some(Err(ERROR_INVALID_VALUE)));
        assert!(memory.touches_heap(address - MIB, 2 * MIB));
        assert!(!memory.touches_heap(address + 2 * MIB, 2 * MIB));
        assert_eq!(memory.retain(1), None);
        assert_eq!(memory.release_handle(&fake, 3), None, "a handle of the driver's own");
    }
}
