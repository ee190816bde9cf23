//! Memory that instances of one image share, and the way out of it: a block gets memory of its own, with
//! the same bytes, where the block was.

use std::collections::BTreeMap;

use gpucr_wire::BlockKind;

use super::vmm::Vmm;
use super::{Block, Failure, Memory};
use crate::abi::types::{ACCESS_READ, ACCESS_READ_WRITE, Access, ERROR_INVALID_VALUE};
use crate::log::log;

impl Block {
    /// The access that the driver is to give where the program is to have `wanted`.
    pub(super) fn granted(&self, wanted: &[Access]) -> Vec<Access> {
        let grant = |access: &Access| match access.flags {
            ACCESS_READ_WRITE if self.read_only => Access { flags: ACCESS_READ, ..*access },
            _ => *access,
        };
        wanted.iter().map(grant).collect()
    }
}

impl Memory {
    /// The memory that these blocks get next is shared. From where to where the program sees them, with the
    /// place of each in the list.
    ///
    /// # Errors
    /// One is not a detached block of the heap. Nothing has changed.
    pub(crate) fn share(&mut self, ids: &[u64]) -> Result<Vec<(u64, u64, usize)>, Failure> {
        let numbers: BTreeMap<u64, usize> = ids.iter().copied().zip(0..).collect();
        let can_be = |id: &u64| {
            let block = self.blocks.get(id);
            block.is_some_and(|b| b.kind == (BlockKind::Heap {}) && b.handle.is_none())
        };
        if numbers.len() < ids.len() || !ids.iter().all(can_be) {
            return Err(Failure::other("these are not detached blocks of the heap"));
        }
        for (id, block) in &mut self.blocks {
            block.read_only = numbers.contains_key(id);
        }
        let place = |(address, mapping): (&u64, &super::Mapping)| {
            Some((*address, address + mapping.size, *numbers.get(&mapping.block)?))
        };
        Ok(self.mappings.iter().filter_map(place).collect())
    }

    /// The blocks whose memory is shared.
    pub(crate) fn shared_blocks(&self) -> Vec<u64> {
        let shared = self.blocks.iter().filter(|(_, block)| block.read_only);
        shared.map(|(id, _)| *id).collect()
    }

    /// Gives a block memory of its own in place of memory that is shared; nothing if it has that. `copy` is
    /// told the device, and copies so many bytes from the second address to the first. The device is idle,
    /// and the gate closed.
    ///
    /// # Errors
    /// The block's memory is shared, as before; unless the message says that it is detached.
    pub(crate) fn own(
        &mut self,
        vmm: &dyn Vmm,
        id: u64,
        copy: impl FnOnce(i32, u64, u64, u64) -> Result<(), Failure>,
    ) -> Result<(), Failure> {
        let Some(block) = self.blocks.get(&id).filter(|block| block.read_only) else {
            return Ok(());
        };
        let place = self.mappings.iter().find(|(_, mapping)| mapping.block == id);
        let (Some(old), Some((&address, _))) = (block.handle, place) else {
            return Err(Failure::other(format!("shared block {id} is detached")));
        };
        let (device, size) = (block.device, block.size);
        let failed = |code| Failure::driver(code, format!("no memory of its own for block {id}"));
        let new = vmm.create(size, &block.prop).map_err(failed)?;
        let copied = at_an_address(vmm, device, size, new, |to| copy(device, to, address, size));
        let replaced = copied.and_then(|()| self.replace(vmm, id, address, new));
        let (unused, result) = match replaced {
            Ok(()) => (old, Ok(())),
            Err(failure) => (new, Err(failure)),
        };
        if let Err(code) = vmm.release(unused) {
            log!("memory of block {id} cannot be released: error {code}");
        }
        result
    }

    /// Puts other memory where a shared block is.
    fn replace(&mut self, vmm: &dyn Vmm, id: u64, address: u64, new: u64) -> Result<(), Failure> {
        let block = &self.blocks[&id];
        let (size, wanted) = (block.size, self.mappings[&address].access.clone());
        let put = |handle, access: &[Access]| {
            vmm.map(address, size, 0, handle)?;
            vmm.set_access(address, size, access).inspect_err(|_| {
                let _ = vmm.unmap(address, size);
            })
        };
        let failed = |code| Failure::driver(code, format!("block {id} cannot be mapped anew"));
        vmm.unmap(address, size).map_err(failed)?;
        let mut result = put(new, &wanted).map_err(failed);
        let back = |old| put(old, &block.granted(&wanted));
        if let Err(failure) = &mut result
            && let Err(code) = block.handle.ok_or(ERROR_INVALID_VALUE).and_then(back)
        {
            failure.message += &format!("; it is detached now: error {code}");
            if let Some(mapping) = self.mappings.get_mut(&address) {
                mapping.attached = false;
            }
        }
        result?;
        let block = self.blocks.get_mut(&id).expect("it was there");
        (block.handle, block.fd, block.read_only) = (Some(new), None, false);
        Ok(())
    }
}

/// Runs `work` with an address, for this purpose only, at which a device may read and write memory.
fn at_an_address(
    vmm: &dyn Vmm,
    device: i32,
    size: u64,
    handle: u64,
    work: impl FnOnce(u64) -> Result<(), Failure>,
) -> Result<(), Failure> {
    let failed = |code| Failure::driver(code, "memory cannot be mapped to be copied");
    let address = vmm.reserve(size).map_err(failed)?;
    let mut result = vmm.map(address, size, 0, handle).map_err(failed);
    if result.is_ok() {
        let access = [Access::of_device(device, ACCESS_READ_WRITE)];
        result =
            vmm.set_access(address, size, &access).map_err(failed).and_then(|()| work(address));
        result = result.and(vmm.unmap(address, size).map_err(failed));
    }
    result.and(vmm.unreserve(address, size).map_err(failed))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::state::memory::fake::Fake;

    const MIB: u64 = 1 << 20;

    /// Three blocks of a heap that is open to another device, detached.
    fn detached(fake: &Fake) -> (Memory, super::super::Fds) {
        let mut memory = Memory::default();
        memory.set_peer(fake, 0, 1, true).expect("open");
        for size in [4 * MIB, 2 * MIB, 6 * MIB] {
            memory.allocate(fake, 0, 1, size).expect("room");
        }
        let fds = memory.export(fake, &super::super::Fds::new(), |fd| fd).expect("exported");
        memory.detach(fake).expect("detached");
        (memory, fds)
    }

    #[test]
    fn shared_blocks_are_read_only_until_they_have_their_own() {
        let fake = Fake::new();
        let (mut memory, mut fds) = detached(&fake);
        let ids = memory.detached_blocks();
        assert!(memory.share(&[ids[0], ids[0]]).is_err(), "named twice");
        assert!(memory.share(&[99]).is_err(), "there is none");
        let places = memory.share(&ids[..2]).expect("of the heap");
        assert_eq!(places.iter().map(|(low, end, _)| end - low).sum::<u64>(), 6 * MIB);
        memory.attach(&fake, &mut fds).expect("attached");
        assert!(memory.share(&ids[..1]).is_err(), "it is attached");
        assert_eq!(fake.flags(), [[1, 1], [1, 1], [3, 3]]);
        // A device that comes later must not write either, and one that goes has nothing.
        memory.set_peer(&fake, 0, 2, true).expect("open");
        assert_eq!(fake.flags(), [[1, 1, 1], [1, 1, 1], [3, 3, 3]]);
        memory.set_peer(&fake, 0, 1, false).expect("closed");
        let mut copies = Vec::new();
        for id in [ids[0], ids[2], ids[0]] {
            let copy = |device, to, from, size| {
                assert_eq!(fake.devices(to), [0]);
                copies.push((device, from, size));
                Ok(())
            };
            memory.own(&fake, id, copy).expect("owned");
        }
        assert_eq!(copies, [(0, places[0].0, 4 * MIB)], "once, and only what is shared");
        assert_eq!(fake.flags(), [[3, 3], [1, 1], [3, 3]]);
        assert_eq!((memory.shared_blocks(), fake.handles()), (vec![ids[1]], 3));
        // It is an ordinary block again.
        let fds = memory.export(&fake, &super::super::Fds::new(), |fd| fd).expect("exported");
        assert!(fds.contains_key(&ids[0]) && !fds.contains_key(&ids[1]));
    }

    #[test]
    fn a_failure_at_any_call_leaves_it_shared() {
        for k in 0.. {
            let fake = Fake::new();
            let (mut memory, mut fds) = detached(&fake);
            let id = memory.detached_blocks()[0];
            memory.share(&[id]).expect("of the heap");
            memory.attach(&fake, &mut fds).expect("attached");
            let before = fake.snapshot();
            fake.fail_after(k);
            let result = memory.own(&fake, id, |_, _, _, _| Ok(()));
            if !fake.fail_never() {
                result.expect("no call failed");
                assert!(k > 8);
                break;
            }
            // What cannot be given back is lost, and no more.
            if result.is_err() {
                let now = fake.snapshot();
                assert!(before.iter().all(|(at, seen)| now.get(at) == Some(seen)), "call {k}");
                assert_eq!(memory.shared_blocks(), [id]);
                memory.own(&fake, id, |_, _, _, _| Ok(())).expect("repeated");
            }
            assert_eq!(memory.shared_blocks(), []);
        }
    }

    #[test]
    fn a_copy_that_fails_changes_nothing() {
        let fake = Fake::new();
        let (mut memory, mut fds) = detached(&fake);
        let id = memory.detached_blocks()[1];
        memory.share(&[id]).expect("of the heap");
        memory.attach(&fake, &mut fds).expect("attached");
        let before = fake.snapshot();
        let copy = |_, _, _, _| Err(Failure::other("no context"));
        assert!(memory.own(&fake, id, copy).is_err());
        assert_eq!((fake.snapshot(), fake.handles()), (before, 3));
    }
}
