//! Memory of other processes that the program has opened by legacy IPC handles.
//!
//! A block is opened once, however many allocations in it are; it is imported from the owner's descriptor and mapped
//! at an address of its own. No descriptor is kept: over a dump the owner's is what brings the memory back to both.

use std::collections::BTreeSet;
use std::os::fd::{BorrowedFd, OwnedFd};

use gpucr_wire::peers::{Identity, Piece};
use gpucr_wire::{BlockKind, CHUNK_SIZE};

use super::heap::{Allocation, LARGE};
use super::vmm::Vmm;
use super::{Block, Mapping, Memory};
use crate::abi::types::{ACCESS_READ_WRITE, Access, AllocationProp, Code, ERROR_INVALID_VALUE};
use crate::log::log;
use crate::state::index;

/// A block of another process.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Origin {
    /// Whose it is.
    pub(crate) owner: Identity,
    /// The owner's pid, and the namespace of that, when the block was opened.
    pub(crate) pid: u32,
    pub(crate) namespace: u64,
    /// The owner's name for it.
    pub(crate) block: u64,
}

/// What the owner says of memory that is offered to others.
pub(crate) enum Offer<T> {
    /// What it is, and a descriptor of it.
    Here(T, OwnedFd),
    /// It is not in its place now.
    Busy,
    /// There is no such memory, or it cannot be handed out.
    Gone,
}

impl Memory {
    /// Name and address of the allocation that holds `address`, if others may open it. `None`: it is not the heap's.
    ///
    /// # Errors
    /// `ERROR_INVALID_VALUE`: there is no allocation, or the memory is another process's or a pool's.
    pub(crate) fn offered(&self, address: u64) -> Option<Result<(u64, u64), Code>> {
        if !self.is_heap(address) {
            return None;
        }
        let may_be_given = |found: &&Allocation| !self.is_opened(found) && found.pool == 0;
        let own = self.allocation_at(address).filter(may_be_given);
        Some(own.map(|found| (found.buffer, found.address)).ok_or(ERROR_INVALID_VALUE))
    }

    /// Whether an allocation is in memory of another process.
    pub(crate) fn is_opened(&self, allocation: &Allocation) -> bool {
        let block = self.blocks.get(&allocation.block());
        block.is_some_and(Block::is_opened)
    }

    /// The allocation of this name, for another process. `uuid` gives the name of a device.
    pub(crate) fn offer(
        &self,
        vmm: &dyn Vmm,
        id: u64,
        address: u64,
        uuid: impl Fn(i32) -> [u8; 16],
    ) -> Offer<Piece> {
        let found = self.allocation_at(address);
        let found = found.filter(|found| found.buffer == id && found.pool == 0);
        match found.filter(|found| !self.is_opened(found)) {
            Some(allocation) => self.piece_of(vmm, allocation, uuid),
            None => Offer::Gone,
        }
    }

    /// An allocation of this process, for another one.
    pub(super) fn piece_of(
        &self,
        vmm: &dyn Vmm,
        allocation: &Allocation,
        uuid: impl Fn(i32) -> [u8; 16],
    ) -> Offer<Piece> {
        let Some((start, mapping)) = self.mapping_at(allocation.address) else {
            return Offer::Gone;
        };
        let block = &self.blocks[&mapping.block];
        let piece = Piece {
            block: mapping.block,
            block_size: block.size,
            device: uuid(block.device),
            offset: allocation.address - start,
            size: allocation.size,
        };
        self.descriptor(vmm, block).map_or_else(|gone| gone, |fd| Offer::Here(piece, fd))
    }

    /// Opens an allocation of another process for a context, or counts that it was opened once more. Gives its
    /// address. The memory is open to the block's own device and to a peer.
    ///
    /// # Errors
    /// The driver's code; then nothing has changed.
    pub(crate) fn open(
        &mut self,
        vmm: &dyn Vmm,
        origin: Origin,
        piece: &Piece,
        fd: BorrowedFd<'_>,
        (device, peer): (i32, i32),
        context: u64,
    ) -> Result<u64, Code> {
        let devices = if peer == device { vec![device] } else { vec![device, peer] };
        self.open_at(vmm, origin, piece, fd, &devices, context)
    }

    /// The same for these devices, of which the first is the block's own.
    pub(super) fn open_at(
        &mut self,
        vmm: &dyn Vmm,
        origin: Origin,
        piece: &Piece,
        fd: BorrowedFd<'_>,
        devices: &[i32],
        context: u64,
    ) -> Result<u64, Code> {
        if !is_as_the_heap_places(piece) {
            return Err(ERROR_INVALID_VALUE);
        }
        let kind = BlockKind::Opened { owner: origin.owner, block: origin.block };
        let same = |block: &Block| block.kind == kind && !block.is_imported;
        let known = self.blocks.iter().find(|(_, block)| same(block)).map(|(id, _)| *id);
        let id = match known {
            Some(id) => {
                self.open_to(vmm, id, devices)?;
                id
            }
            None => self.map_opened(vmm, kind, piece, fd, devices)?,
        };
        self.origins.insert(id, origin);
        let start = self.start_of(id).ok_or(ERROR_INVALID_VALUE)?;
        if piece.block_size != self.blocks[&id].size {
            return Err(ERROR_INVALID_VALUE);
        }
        let address = start + piece.offset;
        if let Some(allocation) = self.allocations.get_mut(&address) {
            allocation.opened += 1;
            return Ok(address);
        }
        let name = self.new_id();
        if piece.size < LARGE {
            index::insert_small(address, piece.size, name);
        } else {
            index::insert(address, piece.block_size, name);
        }
        self.allocations
            .insert(address, Allocation::opened(address, piece.size, context, name, id));
        self.blocks.get_mut(&id).expect("just found").allocations += 1;
        Ok(address)
    }

    /// Opens a block of another process, which is mapped, to these devices too.
    ///
    /// # Errors
    /// The driver's code; then the block is open to some of them.
    pub(super) fn open_to(
        &mut self,
        vmm: &dyn Vmm,
        block: u64,
        devices: &[i32],
    ) -> Result<(), Code> {
        for (address, mapping) in self.mappings.iter_mut().filter(|(_, at)| at.block == block) {
            let mut access = mapping.access.clone();
            for device in devices {
                let wanted = Access::of_device(*device, ACCESS_READ_WRITE);
                if !access.contains(&wanted) {
                    access.push(wanted);
                }
            }
            if access != mapping.access {
                vmm.set_access(*address, mapping.size, &access)?;
                mapping.access = access;
            }
        }
        Ok(())
    }

    fn map_opened(
        &mut self,
        vmm: &dyn Vmm,
        kind: BlockKind,
        piece: &Piece,
        fd: BorrowedFd<'_>,
        devices: &[i32],
    ) -> Result<u64, Code> {
        let size = piece.block_size;
        let device = *devices.first().ok_or(ERROR_INVALID_VALUE)?;
        let access: Vec<Access> =
            devices.iter().map(|device| Access::of_device(*device, ACCESS_READ_WRITE)).collect();
        let handle = vmm.import(fd)?;
        let place = vmm.reserve(size).and_then(|address| {
            let mapped = vmm.map(address, size, 0, handle).and_then(|()| {
                vmm.set_access(address, size, &access).inspect_err(|_| {
                    let _ = vmm.unmap(address, size);
                })
            });
            mapped.map(|()| address).inspect_err(|_| {
                let _ = vmm.unreserve(address, size);
            })
        });
        let address = place.inspect_err(|_| {
            let _ = vmm.release(handle);
        })?;
        let id = self.new_id();
        let prop = AllocationProp::on_device(device, false);
        let block = Block::new(device, size, kind, prop, handle);
        self.blocks.insert(id, block);
        self.reservations.insert(address, size);
        self.mappings
            .insert(address, Mapping { size, offset: 0, block: id, access, attached: true });
        Ok(id)
    }

    /// Takes back one opening of the allocation that begins at `address`; with the last one the allocation, which
    /// still holds its memory until [`Self::release`]. `None`: there is none.
    pub(crate) fn close(&mut self, address: u64) -> Option<Option<Allocation>> {
        let allocation = self.allocations.get_mut(&address).filter(|found| found.opened > 0)?;
        allocation.opened -= 1;
        let last = allocation.opened == 0;
        Some(if last { self.take(address) } else { None })
    }

    /// An opened allocation is not used any more: the block goes with the last one.
    pub(super) fn release_opened(&mut self, vmm: &dyn Vmm, allocation: &Allocation) {
        let id = allocation.block();
        let start = self.start_of(id);
        if allocation.size < LARGE {
            index::remove_small(allocation.address, allocation.size);
        }
        if let Some(block) = self.blocks.get_mut(&id) {
            block.allocations = block.allocations.saturating_sub(1);
            if block.allocations > 0 {
                return;
            }
        }
        self.closed.extend(self.origins.remove(&id));
        let (Some(block), Some(address)) = (self.blocks.remove(&id), start) else { return };
        self.mappings.remove(&address);
        self.reservations.remove(&address);
        index::remove(address, block.size);
        let unmapped = vmm.unmap(address, block.size);
        let released = block.handle.map_or(Ok(()), |handle| vmm.release(handle));
        let freed = unmapped.and(released).and_then(|()| vmm.unreserve(address, block.size));
        if let Err(code) = freed {
            log!("block {id} at {address:#x} cannot be given back: error {code}");
        }
    }

    /// The blocks of other processes that were closed since the last call.
    pub(crate) fn take_closed(&mut self) -> Vec<Origin> {
        std::mem::take(&mut self.closed)
    }

    /// Whose memory is open here, each once.
    pub(super) fn owners(&self) -> Vec<Identity> {
        let owner = |block: &Block| match block.kind {
            BlockKind::Opened { owner, .. } => Some(owner),
            _ => None,
        };
        let owners = self.blocks.values().filter_map(owner).chain(self.host.owners());
        let owners = owners.chain(self.multicast.owners());
        let owners: BTreeSet<Identity> = owners.collect();
        owners.into_iter().collect()
    }

    fn start_of(&self, block: u64) -> Option<u64> {
        let place = self.mappings.iter().find(|(_, mapping)| mapping.block == block);
        place.map(|(address, _)| *address)
    }
}

/// Whether an allocation lies as the heap of its owner places it: alone in its block, or within a unit of small ones.
/// Another process may say anything.
fn is_as_the_heap_places(piece: &Piece) -> bool {
    let within_a_unit = || piece.offset % CHUNK_SIZE + piece.size <= CHUNK_SIZE;
    piece.is_possible() && if piece.size < LARGE { within_a_unit() } else { piece.offset == 0 }
}

#[cfg(test)]
mod tests {
    use std::os::fd::AsFd;

    use super::*;
    use crate::state::memory::Fds;
    use crate::state::memory::fake::Fake;

    const MIB: u64 = 1 << 20;
    const OWNER: Identity = [9; 16];

    fn origin(block: u64) -> Origin {
        Origin { owner: OWNER, pid: 3, namespace: 4, block }
    }

    /// A large allocation and two small ones of an owner.
    fn owned(fake: &Fake) -> (Memory, [u64; 3]) {
        let mut memory = Memory::default();
        let sizes = [4 * MIB, 1000, 3000];
        let addresses = sizes.map(|size| memory.allocate(fake, 0, 1, size).expect("room"));
        (memory, addresses)
    }

    fn offered(memory: &Memory, fake: &Fake, address: u64) -> (Piece, OwnedFd) {
        let (id, start) = memory.offered(address).expect("the heap's").expect("an allocation");
        match memory.offer(fake, id, start, |_| [0; 16]) {
            Offer::Here(piece, fd) => (piece, fd),
            _ => panic!("it is there"),
        }
    }

    fn open(memory: &mut Memory, fake: &Fake, (piece, fd): &(Piece, OwnedFd)) -> Result<u64, Code> {
        memory.open(fake, origin(piece.block), piece, fd.as_fd(), (0, 0), 1)
    }

    fn close(memory: &mut Memory, fake: &Fake, address: u64) {
        if let Some(last) = memory.close(address).expect("it is open") {
            memory.release(fake, last);
        }
    }

    #[test]
    fn a_block_is_opened_once_and_goes_with_the_last_allocation() {
        let fake = Fake::new();
        let (mut owner, addresses) = owned(&fake);
        let mut opener = Memory::default();
        let before = fake.handles();
        let offers = addresses.map(|address| offered(&owner, &fake, address + 8));
        let opened = [0, 1, 2, 1].map(|i| open(&mut opener, &fake, &offers[i]).expect("opened"));
        assert_eq!(opened[1], opened[3], "the same address again");
        assert_eq!(opened[2] - opened[1], addresses[2] - addresses[1]);
        assert_eq!(fake.handles(), before + 2, "two of them share a block");
        assert!(opener.is_heap(opened[0]) && opener.offered(opened[0]).expect("known").is_err());
        let mut counts = gpucr_wire::Counts::default();
        opener.fill(&mut counts);
        assert_eq!((counts.bulk_bytes, counts.allocations, counts.blocks), (0, 0, 2));
        assert_eq!(counts.owners, [OWNER]);
        for address in [opened[1], opened[2], opened[0]] {
            close(&mut opener, &fake, address);
        }
        assert_eq!(fake.handles(), before + 1, "one is open still");
        close(&mut opener, &fake, opened[1]);
        assert!(opener.close(opened[1]).is_none(), "closed once too often");
        assert_eq!((fake.handles(), opener.take_closed().len()), (before, 2));
        // What was given back is not offered any more.
        let (id, start) = owner.offered(addresses[0]).expect("the heap's").expect("there");
        let freed = owner.take(addresses[0]).expect("allocated");
        owner.release(&fake, freed);
        assert!(matches!(owner.offer(&fake, id, start, |_| [0; 16]), Offer::Gone));
    }

    #[test]
    fn opened_blocks_come_back_by_the_owners_descriptors() {
        let fake = Fake::new();
        let (mut owner, addresses) = owned(&fake);
        let mut opener = Memory::default();
        let offers = addresses.map(|address| offered(&owner, &fake, address));
        let opened = [0, 1].map(|i| open(&mut opener, &fake, &offers[i]).expect("opened"));
        let before = fake.snapshot();
        let fds = owner.export(&fake, &Fds::new(), |fd| fd).expect("exported");
        assert!(opener.export(&fake, &Fds::new(), |fd| fd).expect("nothing to export").is_empty());
        owner.detach(&fake).expect("detached");
        opener.detach(&fake).expect("detached");
        assert_eq!(fake.handles(), 0);
        let mut of_opener = Fds::new();
        for block in opener.list(|_| [0; 16]) {
            let BlockKind::Opened { owner, block: name } = block.kind else { panic!("its own?") };
            assert_eq!(owner, OWNER);
            of_opener.insert(block.id, fds[&name].clone());
        }
        owner.attach(&fake, &mut fds.clone()).expect("attached");
        opener.attach(&fake, &mut of_opener).expect("attached");
        let seen =
            |books: std::collections::BTreeMap<u64, _>| books.into_keys().collect::<Vec<u64>>();
        assert_eq!(seen(fake.snapshot()), seen(before), "all at their addresses");
        assert!(opener.fds(&Fds::new()).expect("none is its own").is_empty());
        opened.into_iter().for_each(|address| close(&mut opener, &fake, address));
    }

    #[test]
    fn what_no_heap_would_place_so_is_refused() {
        let fake = Fake::new();
        let (owner, addresses) = owned(&fake);
        let (large, fd) = offered(&owner, &fake, addresses[0]);
        let before = fake.handles();
        for wrong in [
            Piece { offset: 2 * MIB, size: 2 * MIB, ..large },
            Piece { offset: 2 * MIB - 8, size: 16, ..large },
            Piece { offset: u64::MAX, size: 16, ..large },
            Piece { size: 0, ..large },
        ] {
            let mut opener = Memory::default();
            let fd = fd.try_clone().expect("cloned");
            assert_eq!(
                open(&mut opener, &fake, &(wrong, fd)),
                Err(ERROR_INVALID_VALUE),
                "{wrong:?}"
            );
            assert_eq!(fake.handles(), before);
        }
    }

    #[test]
    fn a_failure_at_any_call_opens_nothing() {
        for calls in 0.. {
            let fake = Fake::new();
            let (owner, addresses) = owned(&fake);
            let mut opener = Memory::default();
            let offer = offered(&owner, &fake, addresses[0]);
            let before = (fake.handles(), fake.mapped());
            fake.fail_after(calls);
            let result = open(&mut opener, &fake, &offer);
            if !fake.fail_never() {
                result.expect("no call failed");
                assert!(calls >= 4);
                break;
            }
            assert!(result.is_err(), "call {calls}");
            assert_eq!((fake.handles(), fake.mapped()), before, "call {calls}");
            open(&mut opener, &fake, &offer).expect("repeated");
        }
    }
}
