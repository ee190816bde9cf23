//! What the program does with multicast objects.

use std::os::fd::{BorrowedFd, OwnedFd};

use gpucr_wire::peers::{Identity, Team};

use super::super::Memory;
use super::super::opened::{Offer, Origin};
use super::super::program::{handle_of, named};
use super::super::vmm::Vmm;
use super::{Binding, Mapping, Multicast, Object};
use crate::abi::types::{Access, Code, ERROR_INVALID_VALUE, HANDLE_POSIX_FD, MulticastProp};
use crate::log::log;

/// What is to be bound.
#[derive(Debug, Clone, Copy)]
pub(crate) enum Source {
    /// Memory behind a handle, from this offset on.
    Memory(u64, u64),
    /// Memory at an address.
    Address(u64),
}

/// Memory that the program wants to bind.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Asked {
    /// The handle of the object.
    pub(crate) object: u64,
    /// The device, if the program names it.
    pub(crate) device: Option<i32>,
    pub(crate) offset: u64,
    pub(crate) source: Source,
    pub(crate) size: u64,
    pub(crate) flags: u64,
}

/// A binding that the driver is asked for.
pub(crate) struct Begun {
    /// The driver's handles of the object and of the memory.
    pub(crate) real: u64,
    pub(crate) memory: u64,
    object: u64,
    pub(super) binding: Binding,
}

/// An object that devices are missing of, as far as this process knows.
pub(crate) enum Incomplete {
    /// It is this process's, which is told of each.
    Own,
    /// Who knows.
    Of(Origin),
}

impl Memory {
    fn object_of(&self, handle: u64) -> Option<u64> {
        named(handle).filter(|id| self.multicast.objects.contains_key(id))
    }

    fn object(&self, handle: u64) -> Option<&Object> {
        self.multicast.objects.get(&named(handle)?)
    }

    /// The driver's handle of an object; `None`: it is none that is followed.
    pub(crate) fn real_object(&self, handle: u64) -> Option<u64> {
        self.object(handle).filter(|object| object.references > 0)?.handle
    }

    /// Serves `cuMulticastCreate`.
    ///
    /// # Errors
    /// The driver's code; then nothing has changed.
    pub(crate) fn create_object(
        &mut self,
        driver: &dyn Multicast,
        asked: MulticastProp,
    ) -> Result<u64, Code> {
        // As with memory: both have to be for the same handles.
        let handle_types = asked.handle_types | u64::from(HANDLE_POSIX_FD);
        let handle = driver.create_object(&MulticastProp { handle_types, ..asked })?;
        let granularity = driver.object_granularity(&asked);
        Ok(handle_of(self.new_object(asked, granularity, handle, None)))
    }

    /// After the program has added a device to an object: whom to tell, if it is another process's.
    pub(crate) fn device_added(&mut self, handle: u64, device: i32) -> Option<Origin> {
        let object = self.multicast.objects.get_mut(&named(handle)?)?;
        object.devices.push(device);
        object.count();
        object.origin
    }

    /// Another process has added a device to an object of this one. `false`: there is no such object.
    pub(crate) fn device_added_by(
        &mut self,
        id: u64,
        adder: Identity,
        device: Option<i32>,
    ) -> bool {
        let Some(object) = self.multicast.objects.get_mut(&id) else { return false };
        // No more than there can be, whatever is said.
        if object.adders.len() < object.prop.devices as usize {
            object.adders.push((adder, device));
        }
        object.count();
        true
    }

    /// Whether all devices were added to an object of this process; `None`: there is no such object.
    pub(crate) fn is_team_complete(&self, id: u64) -> Option<bool> {
        self.multicast.objects.get(&id).map(|object| object.is_complete)
    }

    /// What is known of an object whose devices have to be there for a call; `None`: they are, or nobody can tell.
    pub(crate) fn incomplete(&self, handle: u64) -> Option<Incomplete> {
        let is_missing = |object: &&Object| object.references > 0 && !object.is_complete;
        let object = self.object(handle).filter(is_missing)?;
        Some(object.origin.map_or(Incomplete::Own, Incomplete::Of))
    }

    /// All devices of an object are there.
    pub(crate) fn set_complete(&mut self, handle: u64) {
        if let Some(object) = named(handle).and_then(|id| self.multicast.objects.get_mut(&id)) {
            object.is_complete = true;
        }
    }

    /// Block, first byte and device of what is to be bound, if it is all of one block that is followed.
    fn source(&self, asked: &Asked) -> Option<(u64, u64, i32)> {
        let (id, from) = match asked.source {
            Source::Memory(handle, from) => (self.block_of(handle)?, from),
            Source::Address(address) => {
                let (start, mapping) = self.mapping_at(address)?;
                (asked.size <= mapping.size - (address - start))
                    .then_some((mapping.block, mapping.offset + (address - start)))?
            }
        };
        let block = self.blocks.get(&id).filter(|block| !block.is_heap())?;
        Some((id, from, block.device))
    }

    /// Whether the driver would wait for devices before it binds this: what is wrong otherwise it says at once.
    pub(crate) fn can_be_bound(&self, asked: &Asked) -> bool {
        let (Some(object), Some((block, from, _))) =
            (self.object(asked.object), self.source(asked))
        else {
            return false;
        };
        let is_whole = |n: u64| n.is_multiple_of(object.granularity);
        let fits = |from: u64, whole: u64| {
            is_whole(from) && from.checked_add(asked.size).is_some_and(|end| end <= whole)
        };
        let is_sized = asked.size != 0 && is_whole(asked.size);
        asked.flags == 0
            && object.references > 0
            && is_sized
            && fits(asked.offset, object.prop.size as u64)
            && fits(from, self.blocks[&block].size)
            && self.may_share(object, block)
    }

    /// What others can have is bound only to what they can have too, by what the program has asked for.
    fn may_share(&self, object: &Object, block: u64) -> bool {
        let block = &self.blocks[&block];
        !object.is_shareable() || block.is_imported || block.asked_types != 0
    }

    /// Before the driver binds: object and memory stay as they are until [`Self::bound`]. `None`: one of them is not
    /// followed.
    ///
    /// # Errors
    /// `ERROR_INVALID_VALUE`, which the driver would give for what the program has asked for.
    pub(crate) fn begin_to_bind(&mut self, asked: &Asked) -> Option<Result<Begun, Code>> {
        let id = self.object_of(asked.object)?;
        let (block, from, device) = self.source(asked)?;
        if !self.may_share(&self.multicast.objects[&id], block) {
            return Some(Err(ERROR_INVALID_VALUE));
        }
        let object = self.multicast.objects.get_mut(&id)?;
        let held = self.blocks.get_mut(&block)?;
        let has_handles = object.references > 0
            && (matches!(asked.source, Source::Address(_)) || held.references > 0);
        let (Some(real), Some(memory), true) = (object.handle, held.handle, has_handles) else {
            return Some(Err(ERROR_INVALID_VALUE));
        };
        object.busy += 1;
        held.bound += 1;
        let Asked { offset, size, .. } = *asked;
        let (is_named, attached) = (asked.device.is_some(), true);
        let binding = Binding { device, is_named, offset, block, from, size, attached };
        Some(Ok(Begun { real, memory, object: id, binding }))
    }

    /// After the driver was asked to bind: what came of it.
    pub(crate) fn bound(&mut self, vmm: &dyn Vmm, begun: &Begun, is_done: bool) {
        if let Some(object) = self.multicast.objects.get_mut(&begun.object) {
            object.busy = object.busy.saturating_sub(1);
            if is_done {
                object.bindings.push(begun.binding);
                object.is_complete = true;
            }
        }
        if !is_done {
            self.let_go(vmm, begun.binding.block);
        }
        self.drop_unused_object(vmm, begun.object);
    }

    /// After the program has unbound a part of an object. `false`: it is not what this process has bound there, so
    /// another one has, and does not know.
    pub(crate) fn unbound(
        &mut self,
        vmm: &dyn Vmm,
        handle: u64,
        device: i32,
        offset: u64,
        size: u64,
    ) -> bool {
        let object = named(handle).and_then(|id| self.multicast.objects.get_mut(&id));
        let Some(object) = object else { return false };
        let is_it = |b: &Binding| (b.device, b.offset, b.size) == (device, offset, size);
        let Some(place) = object.bindings.iter().position(is_it) else { return false };
        let gone = object.bindings.swap_remove(place);
        self.let_go(vmm, gone.block);
        true
    }

    /// Serves `cuMemMap` for an object, all of whose devices are there. `None`: the handle is of none that is followed.
    pub(crate) fn map_object(
        &mut self,
        vmm: &dyn Vmm,
        address: u64,
        size: u64,
        offset: u64,
        handle: u64,
    ) -> Option<Result<(), Code>> {
        let id = self.object_of(handle)?;
        let object = self.multicast.objects.get_mut(&id)?;
        let Some(real) = object.handle.filter(|_| object.references > 0) else {
            return Some(Err(ERROR_INVALID_VALUE));
        };
        Some(vmm.map(address, size, offset, real).map(|()| {
            object.mappings += 1;
            object.is_complete = true;
            let (object, access) = (id, Vec::new());
            let mapping = Mapping { size, offset, object, access, attached: true };
            self.multicast.mappings.insert(address, mapping);
        }))
    }

    /// After a `cuMemUnmap` of the program that succeeded.
    pub(in crate::state::memory) fn unmapped_objects(
        &mut self,
        vmm: &dyn Vmm,
        address: u64,
        size: u64,
    ) {
        let range = address..address.saturating_add(size);
        let starts: Vec<u64> = self.multicast.mappings.range(range).map(|(at, _)| *at).collect();
        for start in starts {
            let Some(mapping) = self.multicast.mappings.remove(&start) else { continue };
            if let Some(object) = self.multicast.objects.get_mut(&mapping.object) {
                object.mappings = object.mappings.saturating_sub(1);
            }
            self.drop_unused_object(vmm, mapping.object);
        }
    }

    /// After a `cuMemSetAccess` of the program that succeeded.
    pub(in crate::state::memory) fn object_access_set(
        &mut self,
        address: u64,
        size: u64,
        access: &[Access],
    ) {
        let range = address..address.saturating_add(size);
        for (_, mapping) in self.multicast.mappings.range_mut(range) {
            for new in access {
                mapping.access.retain(|old| old.location != new.location);
                mapping.access.push(*new);
            }
        }
    }

    /// Serves `cuMemRelease`. `None`: the handle is not of an object.
    pub(crate) fn release_object(&mut self, vmm: &dyn Vmm, handle: u64) -> Option<Code> {
        let id = self.object_of(handle)?;
        let object = self.multicast.objects.get_mut(&id)?;
        if object.references == 0 {
            return Some(ERROR_INVALID_VALUE);
        }
        object.references -= 1;
        self.drop_unused_object(vmm, id);
        Some(0)
    }

    /// Serves `cuMemRetainAllocationHandle`. `None`: no object is mapped there.
    pub(crate) fn retain_object(&mut self, address: u64) -> Option<u64> {
        let id = self.multicast.mapping_at(address)?.1.object;
        self.multicast.objects.get_mut(&id)?.references += 1;
        Some(handle_of(id))
    }

    /// Lets others import an object: its name. `None`: the handle is not of an object.
    ///
    /// # Errors
    /// `ERROR_INVALID_VALUE`: it is another process's, or was not made for that.
    pub(crate) fn offer_object(&mut self, handle: u64) -> Option<Result<u64, Code>> {
        let id = self.object_of(handle)?;
        let object = self.multicast.objects.get_mut(&id)?;
        let can_be = object.origin.is_none()
            && object.references > 0
            && object.prop.handle_types & u64::from(HANDLE_POSIX_FD) != 0;
        object.is_offered |= can_be;
        Some(if can_be { Ok(id) } else { Err(ERROR_INVALID_VALUE) })
    }

    /// The object of this name, for another process. `None`: there is none of this process's, or it was not exported.
    pub(crate) fn hand_out_object(&self, vmm: &dyn Vmm, id: u64) -> Option<Offer<Team>> {
        let object = self.multicast.objects.get(&id)?;
        if object.origin.is_some() || !object.is_offered {
            return Some(Offer::Gone);
        }
        let Some(handle) = object.handle else { return Some(Offer::Busy) };
        let fd: Result<OwnedFd, Code> = vmm.export(handle);
        Some(match fd {
            Ok(fd) => Offer::Here(object.team(), fd),
            Err(code) => {
                log!("multicast object {id} cannot be exported: error {code}");
                Offer::Gone
            }
        })
    }

    /// An object of this process is imported here: the handle once more. `None`: there is none.
    pub(in crate::state::memory) fn import_own_object(&mut self, id: u64) -> Option<u64> {
        let object = self.multicast.objects.get_mut(&id).filter(|object| object.is_offered)?;
        object.references += 1;
        Some(handle_of(id))
    }

    /// Imports an object of another process, or counts that it was imported once more. Gives its handle.
    ///
    /// # Errors
    /// The driver's code; then nothing has changed.
    pub(crate) fn import_object(
        &mut self,
        driver: &dyn Multicast,
        origin: Origin,
        team: &Team,
        fd: BorrowedFd<'_>,
    ) -> Result<u64, Code> {
        let same = |object: &Object| {
            object.origin.is_some_and(|of| (of.owner, of.block) == (origin.owner, origin.block))
        };
        if let Some((id, object)) = self.multicast.objects.iter_mut().find(|(_, o)| same(o)) {
            if object.team() != *team {
                return Err(ERROR_INVALID_VALUE);
            }
            object.references += 1;
            return Ok(handle_of(*id));
        }
        let handle = driver.import(fd)?;
        let Team { devices, size, handle_types } = *team;
        let (handle_types, flags) = (handle_types.into(), 0);
        let prop = MulticastProp { devices, size: size as usize, handle_types, flags };
        let granularity = driver.object_granularity(&prop);
        Ok(handle_of(self.new_object(prop, granularity, handle, Some(origin))))
    }
}
