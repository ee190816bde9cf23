//! Blocks that processes give each other by tickets, which stand for exported handles.

use std::os::fd::{BorrowedFd, OwnedFd};

use gpucr_wire::BlockKind;
use gpucr_wire::peers::Whole;

use super::opened::{Offer, Origin};
use super::program::handle_of;
use super::vmm::Vmm;
use super::{Block, Memory};
use crate::abi::types::{AllocationProp, Code, ERROR_INVALID_VALUE};
use crate::log::log;

impl Memory {
    /// Whether this is the handle of a block that was imported.
    pub(crate) fn is_imported(&self, handle: u64) -> bool {
        self.block_of(handle).is_some_and(|id| self.blocks[&id].is_imported)
    }

    /// Lets others import the block of this handle; its name. `None`: the program has released the handle.
    pub(crate) fn offer_block(&mut self, handle: u64) -> Option<u64> {
        let id = self.block_of(handle)?;
        let block = self.blocks.get_mut(&id).filter(|block| block.references > 0)?;
        block.is_offered = true;
        Some(id)
    }

    /// The block of this name, for another process. `uuid` gives the name of a device.
    pub(crate) fn hand_out(
        &self,
        vmm: &dyn Vmm,
        id: u64,
        uuid: impl Fn(i32) -> [u8; 16],
    ) -> Offer<Whole> {
        if let Some(offer) = self.hand_out_host(id) {
            return offer;
        }
        let offered = |block: &&Block| block.is_offered && !block.is_opened();
        let Some(block) = self.blocks.get(&id).filter(offered) else { return Offer::Gone };
        let (device, handle_types) = (uuid(block.device), block.asked_types);
        let whole = Whole { size: block.size, device, handle_types, node: 0 };
        self.descriptor(vmm, block).map_or_else(|gone| gone, |fd| Offer::Here(whole, fd))
    }

    /// A descriptor of a block for another process, or why there is none.
    pub(super) fn descriptor<T>(&self, vmm: &dyn Vmm, block: &Block) -> Result<OwnedFd, Offer<T>> {
        // Memory that is shared with other instances is another one soon.
        let (Some(handle), false) = (block.handle, block.read_only) else {
            return Err(Offer::Busy);
        };
        let fd = match &block.fd {
            Some(fd) => fd.try_clone().map_err(|error| log!("no descriptor: {error}")),
            None => vmm.export(handle).map_err(|code| log!("cannot be exported: error {code}")),
        };
        fd.map_err(|()| Offer::Gone)
    }

    /// A block of this process is imported here: the handle once more. `None`: it is gone, or was not exported.
    pub(crate) fn import_own(&mut self, id: u64) -> Option<u64> {
        let other = self.import_own_host(id).or_else(|| self.import_own_object(id));
        if other.is_some() {
            return other;
        }
        let block = self.blocks.get_mut(&id).filter(|block| block.is_offered)?;
        block.references += 1;
        Some(handle_of(id))
    }

    /// Imports a block of another process, or counts that it was imported once more. Gives its handle.
    ///
    /// # Errors
    /// The driver's code; then nothing has changed.
    pub(crate) fn import(
        &mut self,
        vmm: &dyn Vmm,
        origin: Origin,
        whole: &Whole,
        device: i32,
        fd: BorrowedFd<'_>,
    ) -> Result<u64, Code> {
        if whole.node != 0 {
            return self.import_host(origin, whole, fd);
        }
        let granularity = vmm.device(device)?.granularity.max(1);
        if whole.size == 0 || !whole.size.is_multiple_of(granularity) {
            return Err(ERROR_INVALID_VALUE);
        }
        let kind = BlockKind::Opened { owner: origin.owner, block: origin.block };
        let mut known = self.blocks.iter_mut();
        if let Some((id, block)) = known.find(|(_, b)| b.kind == kind && b.is_imported) {
            if block.size != whole.size {
                return Err(ERROR_INVALID_VALUE);
            }
            block.references += 1;
            return Ok(handle_of(*id));
        }
        let handle = vmm.import(fd)?;
        let id = self.new_id();
        let prop = AllocationProp::on_device(device, false);
        let block = Block::new(device, whole.size, kind, prop, handle);
        let asked_types = whole.handle_types;
        let block = Block { asked_types, references: 1, is_imported: true, ..block };
        self.blocks.insert(id, block);
        self.origins.insert(id, origin);
        Ok(handle_of(id))
    }
}

#[cfg(test)]
mod tests {
    use std::os::fd::AsFd;
    use std::sync::Arc;

    use super::*;
    use crate::abi::types::{ACCESS_READ_WRITE, Access, HANDLE_POSIX_FD};
    use crate::state::memory::Fds;
    use crate::state::memory::fake::Fake;

    const MIB: u64 = 1 << 20;

    fn origin(block: u64) -> Origin {
        Origin { owner: [9; 16], pid: 3, namespace: 4, block }
    }

    /// A block of an owner that it has exported: its tables, its handle, and what others get.
    fn offered(fake: &Fake) -> (Memory, u64, u64, (Whole, OwnedFd)) {
        let mut owner = Memory::default();
        let prop = AllocationProp::on_device(0, false);
        let prop = AllocationProp { handle_types: HANDLE_POSIX_FD, ..prop };
        let handle = owner.create(fake, 4 * MIB, prop).expect("room");
        let id = owner.block_of(handle).expect("its own");
        assert!(matches!(owner.hand_out(fake, id, |_| [0; 16]), Offer::Gone), "not exported yet");
        assert_eq!(owner.offer_block(handle), Some(id));
        let Offer::Here(whole, fd) = owner.hand_out(fake, id, |_| [0; 16]) else {
            panic!("it is there")
        };
        (owner, handle, id, (whole, fd))
    }

    #[test]
    fn a_block_is_imported_once_and_goes_with_its_last_use() {
        let fake = Fake::new();
        let (mut owner, handle, id, (whole, fd)) = offered(&fake);
        let mut importer = Memory::default();
        let before = fake.handles();
        let mut import =
            || importer.import(&fake, origin(id), &whole, 0, fd.as_fd()).expect("imported");
        let (imported, again) = (import(), import());
        assert_eq!((imported, fake.handles()), (again, before + 1));
        assert!(importer.is_imported(imported) && !owner.is_imported(handle));
        assert_eq!(importer.asked_types(imported), Some(HANDLE_POSIX_FD));
        let base = fake.reserve(4 * MIB).expect("reserved");
        importer.reserved(base, 4 * MIB);
        importer.map(&fake, base, 4 * MIB, 0, imported).expect("ours").expect("mapped");
        assert!(!importer.touches_heap(base, MIB), "the program may unmap it");
        for _ in 0..2 {
            assert_eq!(importer.release_handle(&fake, imported), Some(0));
        }
        assert_eq!(importer.release_handle(&fake, imported), Some(ERROR_INVALID_VALUE));
        let mut counts = gpucr_wire::Counts::default();
        importer.fill(&mut counts);
        assert_eq!((counts.bulk_bytes, counts.blocks, counts.shared), (0, 1, 0));
        assert_eq!(counts.owners, [[9; 16]]);
        fake.unmap(base, 4 * MIB).expect("unmapped");
        importer.unmapped(&fake, base, 4 * MIB);
        assert_eq!((fake.handles(), importer.take_closed()), (before, vec![origin(id)]));
        // What was given back is not handed out any more.
        assert_eq!(owner.release_handle(&fake, handle), Some(0));
        assert!(matches!(owner.hand_out(&fake, id, |_| [0; 16]), Offer::Gone));
        assert_eq!(owner.import_own(id), None);
    }

    #[test]
    fn it_comes_back_by_the_owners_descriptor_where_it_was_mapped() {
        let fake = Fake::new();
        let (mut owner, _, id, (whole, fd)) = offered(&fake);
        let mut importer = Memory::default();
        let handle = importer.import(&fake, origin(id), &whole, 0, fd.as_fd()).expect("imported");
        let base = fake.reserve(4 * MIB).expect("reserved");
        importer.reserved(base, 4 * MIB);
        importer.map(&fake, base, 2 * MIB, 2 * MIB, handle).expect("ours").expect("mapped");
        let access = [Access::of_device(0, ACCESS_READ_WRITE)];
        fake.set_access(base, 2 * MIB, &access).expect("set");
        importer.access_set(base, 2 * MIB, &access);
        let before: Vec<u64> = fake.snapshot().into_keys().collect();
        let fds = owner.export(&fake, &Fds::new(), |fd| fd).expect("exported");
        assert!(importer.export(&fake, &Fds::new(), |fd| fd).expect("none").is_empty());
        owner.detach(&fake).expect("detached");
        importer.detach(&fake).expect("detached");
        assert!(matches!(owner.hand_out(&fake, id, |_| [0; 16]), Offer::Busy));
        assert_eq!(fake.handles(), 0);
        let own = importer.list(|_| [0; 16])[0].id;
        let mut of_importer = Fds::from([(own, Arc::clone(&fds[&id]))]);
        owner.attach(&fake, &mut fds.clone()).expect("attached");
        importer.attach(&fake, &mut of_importer).expect("attached");
        assert_eq!(fake.snapshot().into_keys().collect::<Vec<u64>>(), before);
        assert_eq!(importer.release_handle(&fake, handle), Some(0), "the same handle");
    }

    #[test]
    fn what_no_owner_can_have_is_refused() {
        let fake = Fake::new();
        let (_owner, _, id, (whole, fd)) = offered(&fake);
        let mut importer = Memory::default();
        let before = fake.handles();
        for size in [0, 1, 4 * MIB + 1] {
            let wrong = Whole { size, ..whole };
            let result = importer.import(&fake, origin(id), &wrong, 0, fd.as_fd());
            assert_eq!(result, Err(ERROR_INVALID_VALUE), "{size}");
        }
        fake.fail_after(0);
        assert!(importer.import(&fake, origin(id), &whole, 0, fd.as_fd()).is_err());
        fake.fail_never();
        assert_eq!((fake.handles(), importer.list(|_| [0; 16]).len()), (before, 0));
        importer.import(&fake, origin(id), &whole, 0, fd.as_fd()).expect("imported");
        let other = Whole { size: 8 * MIB, ..whole };
        let result = importer.import(&fake, origin(id), &other, 0, fd.as_fd());
        assert_eq!(result, Err(ERROR_INVALID_VALUE), "it has another size now");
    }
}
