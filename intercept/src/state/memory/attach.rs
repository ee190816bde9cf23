//! Taking the bulk memory away from the program, and putting it back.

use std::collections::{BTreeMap, BTreeSet};
use std::os::fd::{AsFd, OwnedFd};
use std::sync::Arc;

use gpucr_wire::Block as WireBlock;

use super::vmm::Vmm;
use super::{Failure, Memory};
use crate::abi::types::{ACCESS_READ_WRITE, Access, ERROR_DEINITIALIZED, LOCATION_DEVICE};
use crate::log::log;

/// File descriptors of blocks, by id. A thread that sends them keeps its own references, outside the tables.
pub(crate) type Fds = BTreeMap<u64, Arc<OwnedFd>>;

impl Memory {
    /// Every block as the checkpointer sees it. `uuid` gives the name of a device.
    pub(crate) fn list(&self, uuid: impl Fn(i32) -> [u8; 16]) -> Vec<WireBlock> {
        let mut addresses: BTreeMap<u64, u64> = BTreeMap::new();
        for (address, mapping) in self.mappings.iter().filter(|(_, mapping)| mapping.offset == 0) {
            addresses.entry(mapping.block).or_insert(*address);
        }
        let of = |(id, block): (&u64, &super::Block)| WireBlock {
            id: *id,
            device: uuid(block.device),
            size: block.size,
            kind: block.kind,
            address: addresses.get(id).copied().unwrap_or(0),
            allocations: block.allocations,
        };
        self.blocks.iter().map(of).collect()
    }

    /// File descriptors of every block of the program's that has none among `exported` and was not imported itself;
    /// those that were hold theirs. Each goes to where `park` puts it before the next is made.
    ///
    /// # Errors
    /// Nothing has changed.
    pub(crate) fn export(
        &self,
        vmm: &dyn Vmm,
        exported: &Fds,
        park: impl Fn(OwnedFd) -> OwnedFd,
    ) -> Result<Fds, Failure> {
        let mut fds = Fds::new();
        let new = |id: &u64, block: &super::Block| {
            block.fd.is_none() && !block.is_opened() && !exported.contains_key(id)
        };
        for (id, block) in self.blocks.iter().filter(|(id, block)| new(id, block)) {
            let handle = block
                .handle
                .ok_or_else(|| Failure::other(format!("block {id} is detached already")))?;
            let fd = vmm
                .export(handle)
                .map_err(|code| Failure::driver(code, format!("block {id} cannot be exported")))?;
            fds.insert(*id, Arc::new(park(fd)));
        }
        Ok(fds)
    }

    /// Id and file descriptor of each block of the program's in the order of [`Self::list`].
    ///
    /// # Errors
    /// Names a block that has none.
    pub(crate) fn fds(&self, exported: &Fds) -> Result<Vec<(u64, Arc<OwnedFd>)>, Failure> {
        let own = self.blocks.iter().filter(|(_, block)| !block.is_opened());
        own.map(|(id, block)| {
            let fd = block.fd.as_ref().or_else(|| exported.get(id));
            let missing = || Failure::other(format!("block {id} was not exported"));
            Ok((*id, fd.ok_or_else(missing)?.clone()))
        })
        .collect()
    }

    /// Remembers of which blocks the checkpointer holds the memory.
    pub(crate) fn lend(&mut self, blocks: BTreeSet<u64>) {
        self.lent = blocks;
    }

    /// Remembers that the checkpointer holds the memory that is mapped at these addresses.
    pub(crate) fn lend_at(&mut self, addresses: impl Iterator<Item = u64>) {
        let block = |address| self.mapping_at(address).map(|(_, mapping)| mapping.block);
        self.lent = addresses.filter_map(block).collect();
    }

    /// Whether the checkpointer holds memory that the program has given back: the device gets it
    /// when the checkpointer asks for the blocks again.
    pub(crate) fn is_missed(&self) -> bool {
        self.lent.iter().any(|id| !self.blocks.contains_key(id))
    }

    /// Whether every block and mapping is in place, and every multicast object.
    pub(crate) fn all_attached(&self) -> bool {
        self.are_blocks_attached() && self.are_objects_whole()
    }

    /// Whether every block and mapping is in place.
    pub(crate) fn are_blocks_attached(&self) -> bool {
        self.blocks.values().all(|block| block.handle.is_some())
            && self.mappings.values().all(|mapping| mapping.attached)
    }

    /// The blocks that have no memory.
    pub(crate) fn detached_blocks(&self) -> Vec<u64> {
        let detached = self.blocks.iter().filter(|(_, block)| block.handle.is_none());
        detached.map(|(id, _)| *id).collect()
    }

    /// Whether there is such a block.
    pub(crate) fn has_block(&self, id: u64) -> bool {
        self.blocks.contains_key(&id)
    }

    /// Device and size of a block.
    pub(crate) fn block(&self, id: u64) -> Option<(i32, u64)> {
        self.blocks.get(&id).map(|block| (block.device, block.size))
    }

    /// Unmaps and releases every block, and closes the file descriptors that blocks hold.
    ///
    /// # Errors
    /// Some blocks are detached, some are not, none has lost its file descriptor: go back with
    /// [`Self::attach`], or repeat.
    pub(crate) fn detach(&mut self, vmm: &dyn Vmm) -> Result<(), Failure> {
        let attached = self.mappings.iter().filter(|(_, mapping)| mapping.attached);
        let attached: Vec<u64> = attached.map(|(address, _)| *address).collect();
        for (start, size) in self.runs(attached.into_iter(), |_, _| true) {
            vmm.unmap(start, size).map_err(|code| {
                Failure::driver(code, format!("{size} bytes at {start:#x} cannot be unmapped"))
            })?;
            for (_, mapping) in self.mappings.range_mut(start..start + size) {
                mapping.attached = false;
            }
        }
        for (id, block) in &mut self.blocks {
            if let Some(handle) = block.handle {
                vmm.release(handle).map_err(|code| {
                    Failure::driver(code, format!("block {id} cannot be released"))
                })?;
                block.handle = None;
            }
        }
        for block in self.blocks.values_mut() {
            block.fd = None;
        }
        Ok(())
    }

    /// Gives every block that has no memory the memory behind its file descriptor, in `fds` or
    /// held by the block, and maps whatever is not mapped. Takes the file descriptors that it
    /// used out of `fds`: the blocks hold them from now on. A driver that is shutting down has no blocks any
    /// more, and none is missed.
    ///
    /// # Errors
    /// Some blocks are attached, some are not, `fds` is unchanged: go back with
    /// [`Self::detach`], or repeat.
    pub(crate) fn attach(&mut self, vmm: &dyn Vmm, fds: &mut Fds) -> Result<(), Failure> {
        match self.attach_all(vmm, fds) {
            // The host side of the program came to its end while its memory was away.
            Err(failure) if failure.code == ERROR_DEINITIALIZED => {
                log!("{}: the driver is shutting down", failure.message);
                *self = Self::default();
                Ok(())
            }
            attached => attached,
        }
    }

    fn attach_all(&mut self, vmm: &dyn Vmm, fds: &mut Fds) -> Result<(), Failure> {
        let mut imported = Vec::new();
        for (id, block) in self.blocks.iter_mut().filter(|(_, block)| block.handle.is_none()) {
            let fd = block
                .fd
                .as_ref()
                .or_else(|| fds.get(id))
                .ok_or_else(|| Failure::other(format!("block {id} has no file descriptor")))?;
            let handle = vmm
                .import(fd.as_fd())
                .map_err(|code| Failure::driver(code, format!("block {id} cannot be imported")))?;
            block.handle = Some(handle);
            imported.push(*id);
        }
        self.map_detached(vmm, |_| true)?;
        // What came in by a file descriptor in an earlier, failed attempt is among `fds` too.
        for (id, block) in &mut self.blocks {
            if block.fd.is_none()
                && let Some(fd) = fds.remove(id)
                && imported.contains(id)
                && !block.is_opened()
            {
                block.fd = Some(fd);
            }
        }
        Ok(())
    }

    /// From where to where the program sees these blocks, with the place of each in the list.
    ///
    /// # Errors
    /// They are not the blocks that have no memory.
    pub(crate) fn awaited(&self, ids: &[u64]) -> Result<Vec<(u64, u64, usize)>, Failure> {
        let numbers: BTreeMap<u64, usize> = ids.iter().copied().zip(0..).collect();
        if !numbers.keys().eq(&self.detached_blocks()) {
            return Err(Failure::other("these are not the blocks that are detached"));
        }
        let place = |(address, mapping): (&u64, &super::Mapping)| {
            Some((*address, address + mapping.size, *numbers.get(&mapping.block)?))
        };
        Ok(self.mappings.iter().filter_map(place).collect())
    }

    /// Gives these blocks, which have no memory, the memory behind their file descriptors, and maps them.
    /// They hold the descriptors from now on.
    ///
    /// # Errors
    /// Some are attached, and the others are still detached.
    pub(crate) fn attach_some(&mut self, vmm: &dyn Vmm, fds: Fds) -> Result<(), Failure> {
        let ids: BTreeSet<u64> = fds.keys().copied().collect();
        for (id, fd) in fds {
            let block = self.blocks.get_mut(&id).filter(|block| block.handle.is_none());
            let block =
                block.ok_or_else(|| Failure::other(format!("block {id} is not awaited")))?;
            let handle = vmm
                .import(fd.as_fd())
                .map_err(|code| Failure::driver(code, format!("block {id} cannot be imported")))?;
            block.handle = Some(handle);
            block.fd = (!block.is_opened()).then_some(fd);
        }
        self.map_detached(vmm, |block| ids.contains(&block))
    }

    /// Maps whatever is not mapped of the blocks that `which` names.
    fn map_detached(&mut self, vmm: &dyn Vmm, which: impl Fn(u64) -> bool) -> Result<(), Failure> {
        let mut new = Vec::new();
        for (address, mapping) in &mut self.mappings {
            if mapping.attached || !which(mapping.block) {
                continue;
            }
            let handle = self.blocks[&mapping.block]
                .handle
                .ok_or_else(|| Failure::other(format!("block {} is detached", mapping.block)))?;
            vmm.map(*address, mapping.size, mapping.offset, handle).map_err(|code| {
                Failure::driver(code, format!("{address:#x} cannot be mapped again"))
            })?;
            mapping.attached = true;
            new.push(*address);
        }
        let with_access =
            new.into_iter().filter(|address| !self.mappings[address].access.is_empty());
        let read_only = |mapping: &super::Mapping| self.blocks[&mapping.block].read_only;
        let alike = |a: &super::Mapping, b: &super::Mapping| {
            a.access == b.access && read_only(a) == read_only(b)
        };
        for (start, size) in self.runs(with_access, alike) {
            let mapping = &self.mappings[&start];
            let access = self.blocks[&mapping.block].granted(&mapping.access);
            vmm.set_access(start, size, &access).map_err(|code| {
                Failure::driver(code, format!("access to {start:#x} cannot be set again"))
            })?;
        }
        Ok(())
    }

    /// Gives a detached block new memory of its own, mapped wherever the block was.
    ///
    /// # Errors
    /// The block is detached, as before.
    pub(crate) fn renew(&mut self, vmm: &dyn Vmm, id: u64) -> Result<(), Failure> {
        let block = self
            .blocks
            .get_mut(&id)
            .ok_or_else(|| Failure::other(format!("there is no block {id}")))?;
        if block.handle.is_some() {
            return Ok(());
        }
        let handle = vmm
            .create(block.size, &block.prop)
            .map_err(|code| Failure::driver(code, format!("no memory for block {id}")))?;
        block.handle = Some(handle);
        let mapped = self.map_detached(vmm, |block| block == id);
        if mapped.is_err() {
            self.strip(vmm, id);
        }
        mapped
    }

    /// Takes the memory of one block away, as far as the driver lets us.
    pub(crate) fn strip(&mut self, vmm: &dyn Vmm, id: u64) {
        let of_block = |(_, mapping): &(&u64, &mut super::Mapping)| mapping.block == id;
        for (address, mapping) in self.mappings.iter_mut().filter(of_block) {
            if mapping.attached {
                match vmm.unmap(*address, mapping.size) {
                    Ok(()) => mapping.attached = false,
                    Err(code) => log!("{address:#x} cannot be unmapped: error {code}"),
                }
            }
        }
        if let Some(block) = self.blocks.get_mut(&id) {
            block.fd = None;
            if let Some(handle) = block.handle.take()
                && let Err(code) = vmm.release(handle)
            {
                log!("block {id} cannot be released: error {code}");
            }
        }
    }

    /// Runs `work` with an address at which the block's own device may read and write all of it:
    /// one of the program's, or else one for this purpose only.
    ///
    /// # Errors
    /// `work` fails, or the address cannot be made.
    pub(crate) fn with_address<T>(
        &self,
        vmm: &dyn Vmm,
        id: u64,
        work: impl FnOnce(u64) -> Result<T, Failure>,
    ) -> Result<T, Failure> {
        let block = self
            .blocks
            .get(&id)
            .ok_or_else(|| Failure::other(format!("there is no block {id}")))?;
        let handle =
            block.handle.ok_or_else(|| Failure::other(format!("block {id} is detached")))?;
        let usable = self.mappings.iter().find(|(_, mapping)| {
            mapping.block == id
                && mapping.attached
                && mapping.offset == 0
                && mapping.size == block.size
                && mapping.access.iter().any(|access| {
                    access.location.kind == LOCATION_DEVICE
                        && access.location.id == block.device
                        && access.flags == ACCESS_READ_WRITE
                })
        });
        if let Some((address, _)) = usable {
            return work(*address);
        }
        let failed =
            |code| Failure::driver(code, format!("block {id} cannot be mapped to be copied"));
        let address = vmm.reserve(block.size).map_err(failed)?;
        let result = vmm.map(address, block.size, 0, handle).map_err(failed).and_then(|()| {
            let access = [Access::of_device(block.device, ACCESS_READ_WRITE)];
            let result = vmm
                .set_access(address, block.size, &access)
                .map_err(failed)
                .and_then(|()| work(address));
            result.and_then(|value| {
                vmm.unmap(address, block.size).map_err(failed)?;
                Ok(value)
            })
        });
        if result.is_err() {
            let _ = vmm.unmap(address, block.size);
        }
        let _ = vmm.unreserve(address, block.size);
        result
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::abi::types::{ACCESS_READ_WRITE, AllocationProp};
    use crate::state::memory::fake::Fake;

    const MIB: u64 = 1 << 20;

    /// A heap on two devices, and blocks of the program's: mapped twice, not mapped, unreadable.
    fn populated(fake: &Fake) -> Memory {
        let mut memory = Memory::default();
        for size in [100, 2 * MIB, 20 * MIB, 300, 5 * MIB] {
            memory.allocate(fake, 0, 1, size).expect("room");
        }
        memory.allocate(fake, 1, 2, 4 * MIB).expect("room");
        let base = fake.reserve(16 * MIB).expect("reserved");
        memory.reserved(base, 16 * MIB);
        let prop = AllocationProp::on_device(0, false);
        let twice = memory.create(fake, 2 * MIB, prop).expect("created");
        for address in [base, base + 2 * MIB] {
            memory.map(fake, address, 2 * MIB, 0, twice).expect("ours").expect("mapped");
        }
        let access = [Access::of_device(0, ACCESS_READ_WRITE), Access::of_device(1, 1)];
        fake.set_access(base, 2 * MIB, &access).expect("set");
        memory.access_set(base, 2 * MIB, &access);
        memory.create(fake, 4 * MIB, prop).expect("created, not mapped");
        memory
    }

    #[test]
    fn all_comes_back_where_it_was() {
        let fake = Fake::new();
        let mut memory = populated(&fake);
        let (before, list) = (fake.snapshot(), memory.list(|_| [0; 16]));
        for round in 0..3 {
            let exported = memory.export(&fake, &Fds::new(), |fd| fd).expect("exported");
            assert_eq!(exported.len(), if round == 0 { list.len() } else { 0 });
            let mut fds: Fds = memory
                .fds(&exported)
                .expect("all")
                .into_iter()
                .map(|(id, fd)| (id, fd.clone()))
                .collect();
            assert!(fds.keys().eq(list.iter().map(|block| &block.id)));
            let calls = fake.calls();
            memory.detach(&fake).expect("detached");
            assert!(fake.calls() - calls <= 5 + list.len(), "few unmaps, one release a block");
            assert_eq!((fake.mapped(), fake.handles()), (0, 0));
            assert_eq!(memory.detached_blocks().len(), list.len());
            memory.attach(&fake, &mut fds).expect("attached");
            assert!(fds.is_empty(), "the blocks hold them now");
            assert!(memory.all_attached());
            assert_eq!(fake.snapshot(), before);
            assert_eq!(memory.list(|_| [0; 16]), list);
        }
    }

    #[test]
    fn blocks_come_back_one_by_one() {
        let fake = Fake::new();
        let mut memory = populated(&fake);
        let before = fake.snapshot();
        let mut fds = memory.export(&fake, &Fds::new(), |fd| fd).expect("exported");
        memory.detach(&fake).expect("detached");
        let ids = memory.detached_blocks();
        assert!(memory.awaited(&ids[1..]).is_err(), "one would be missed");
        let places = memory.awaited(&ids).expect("all");
        assert_eq!(places.len(), memory.mappings.len());
        for (low, end, number) in places {
            let mapping = &memory.mappings[&low];
            assert_eq!((end - low, ids[number]), (mapping.size, mapping.block));
        }
        for id in ids {
            assert!(!memory.all_attached());
            let one = |fds: &mut Fds| Fds::from([(id, fds.remove(&id).expect("exported"))]);
            let fd = one(&mut fds);
            let again = fd.iter().map(|(id, fd)| (*id, fd.clone())).collect();
            memory.attach_some(&fake, fd).expect("attached");
            assert!(memory.attach_some(&fake, again).is_err(), "it has its memory");
        }
        assert!(memory.all_attached());
        assert_eq!(fake.snapshot(), before);
    }

    #[test]
    fn nothing_is_missed_by_a_driver_that_shuts_down() {
        let fake = Fake::new();
        let mut memory = populated(&fake);
        let mut fds = memory.export(&fake, &Fds::new(), |fd| fd).expect("exported");
        memory.detach(&fake).expect("detached");
        assert!(!memory.all_attached());
        fake.shut_down();
        memory.attach(&fake, &mut fds).expect("done without");
        assert!(memory.all_attached() && memory.detached_blocks().is_empty());
    }

    #[test]
    fn a_failure_at_any_call_of_detach_is_undone() {
        for k in 0.. {
            let fake = Fake::new();
            let mut memory = populated(&fake);
            let before = fake.snapshot();
            let mut fds = memory.export(&fake, &Fds::new(), |fd| fd).expect("exported");
            fake.fail_after(k);
            let result = memory.detach(&fake);
            if !fake.fail_never() {
                result.expect("no call failed");
                assert!(k > 5);
                break;
            }
            assert!(result.is_err(), "call {k}");
            memory.attach(&fake, &mut fds).expect("undone");
            assert_eq!(fake.snapshot(), before, "call {k}");
            assert!(memory.all_attached());
            // And it can be exported and detached afterwards.
            let mut fds = memory.export(&fake, &Fds::new(), |fd| fd).expect("exported");
            let held: Fds = memory
                .blocks
                .iter()
                .filter_map(|(id, block)| Some((*id, block.fd.clone()?)))
                .collect();
            fds.extend(held);
            memory.detach(&fake).expect("detached");
            memory.attach(&fake, &mut fds).expect("attached");
            assert_eq!(fake.snapshot(), before, "call {k}");
        }
    }

    #[test]
    fn a_failure_at_any_call_of_attach_leaves_it_detached_and_can_be_repeated() {
        for k in 0.. {
            let fake = Fake::new();
            let mut memory = populated(&fake);
            let before = fake.snapshot();
            let fds = memory.export(&fake, &Fds::new(), |fd| fd).expect("exported");
            let copy = || -> Fds { fds.iter().map(|(id, fd)| (*id, fd.clone())).collect() };
            memory.detach(&fake).expect("detached");
            let mut first = copy();
            fake.fail_after(k);
            let result = memory.attach(&fake, &mut first);
            if !fake.fail_never() {
                result.expect("no call failed");
                assert!(k > 10);
                break;
            }
            assert!(result.is_err(), "call {k}");
            memory.detach(&fake).expect("undone");
            assert_eq!((fake.mapped(), fake.handles()), (0, 0), "call {k}");
            let mut second = copy();
            memory.attach(&fake, &mut second).expect("repeated");
            assert_eq!(fake.snapshot(), before, "call {k}");
        }
    }

    #[test]
    fn new_memory_takes_the_place_of_the_old() {
        let fake = Fake::new();
        let mut memory = populated(&fake);
        let places = fake.places();
        let ids = memory.detached_blocks();
        assert!(ids.is_empty());
        memory.detach(&fake).expect("detached");
        for id in memory.detached_blocks() {
            assert!(!memory.all_attached());
            memory.renew(&fake, id).expect("renewed");
            memory.renew(&fake, id).expect("twice is once");
        }
        assert!(memory.all_attached());
        assert_eq!(fake.places(), places);
        // New memory is no import: it can be exported.
        assert_eq!(
            memory.export(&fake, &Fds::new(), |fd| fd).expect("exported").len(),
            memory.blocks.len()
        );
    }

    #[test]
    fn a_block_without_an_address_gets_one_for_copying() {
        let fake = Fake::new();
        let memory = populated(&fake);
        let before = fake.snapshot();
        for id in memory.blocks.keys() {
            memory
                .with_address(&fake, *id, |address| {
                    let device = memory.blocks[id].device;
                    assert!(fake.devices(address).contains(&device), "block {id}");
                    Ok(())
                })
                .expect("an address");
            assert_eq!(fake.snapshot(), before);
        }
    }
}
