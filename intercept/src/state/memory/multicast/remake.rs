//! Undoing multicast objects before a checkpoint, and making them again after it.
//!
//! Objects are of several processes, so the checkpointer leads through the steps, each of which all processes have done
//! before any does the next: one of them [makes](Memory::make_objects) an object, all [join](Memory::join_objects) it with
//! their devices, and then they [bind](Memory::bind_objects) and map what they had: a driver that is asked to bind waits for
//! all devices.

use std::os::fd::{AsFd, OwnedFd};
use std::sync::Arc;

use gpucr_wire::peers::Identity;
use gpucr_wire::{Adder, MulticastObject};

use super::super::{Failure, Fds, Memory};
use super::{Multicast, Object};
use crate::abi::types::{ERROR_INVALID_VALUE, HANDLE_POSIX_FD, MulticastProp};
use crate::state::peers;

impl Object {
    fn is_whole(&self) -> bool {
        self.handle.is_some() && self.bindings.iter().all(|binding| binding.attached)
    }
}

impl Memory {
    /// Every object as the checkpointer sees it.
    pub(crate) fn list_objects(&self) -> Vec<MulticastObject> {
        let own = peers::identity().unwrap_or_default();
        let of = |(id, object): (&u64, &Object)| {
            let mapped = self.multicast.mappings.iter().filter(|(_, at)| at.object == *id);
            let mut mapped = mapped.map(|(address, _)| *address);
            let adder = |(identity, device): &(Identity, Option<i32>)| Adder {
                identity: *identity,
                is_visible: device.is_some(),
            };
            let (owner, name) =
                object.origin.map_or((own, *id), |origin| (origin.owner, origin.block));
            MulticastObject {
                id: *id,
                owner,
                name,
                devices: object.prop.devices,
                size: object.prop.size as u64,
                address: mapped.next().unwrap_or(0),
                added: object.devices.len() as u32,
                adders: object.adders.iter().map(adder).collect(),
                bound: object.bindings.iter().map(|binding| binding.block).collect(),
                is_whole: object.is_whole() && self.is_mapped(*id),
            }
        };
        self.multicast.objects.iter().map(of).collect()
    }

    fn is_mapped(&self, object: u64) -> bool {
        let mut mapped = self.multicast.mappings.values().filter(|at| at.object == object);
        mapped.all(|mapping| mapping.attached)
    }

    /// Whether there is any object.
    pub(crate) fn has_objects(&self) -> bool {
        !self.multicast.objects.is_empty()
    }

    /// Whether all objects are as the program knows them.
    pub(crate) fn are_objects_whole(&self) -> bool {
        self.multicast.objects.values().all(Object::is_whole)
            && self.multicast.mappings.values().all(|mapping| mapping.attached)
    }

    /// Unmaps, unbinds and releases all objects.
    ///
    /// # Errors
    /// Some are undone, some are not. It may be repeated, and they may be made again.
    pub(crate) fn undo_objects(&mut self, driver: &dyn Multicast) -> Result<(), Failure> {
        for (address, mapping) in &mut self.multicast.mappings {
            if mapping.attached {
                driver.unmap(*address, mapping.size).map_err(|code| {
                    let what = format!("the multicast object at {address:#x} cannot be unmapped");
                    Failure::driver(code, what)
                })?;
                mapping.attached = false;
            }
        }
        for (id, object) in &mut self.multicast.objects {
            let Some(handle) = object.handle else { continue };
            for binding in object.bindings.iter_mut().filter(|binding| binding.attached) {
                match driver.unbind(handle, binding) {
                    // Another process may have unbound it already, which is refused in its own dump.
                    Ok(()) | Err(ERROR_INVALID_VALUE) => binding.attached = false,
                    Err(code) => {
                        let what = format!("memory cannot be unbound from multicast object {id}");
                        return Err(Failure::driver(code, what));
                    }
                }
            }
            driver.release(handle).map_err(|code| {
                Failure::driver(code, format!("multicast object {id} cannot be released"))
            })?;
            object.handle = None;
        }
        Ok(())
    }

    /// Undoes what there still is of all objects, and creates these again: a descriptor of each.
    ///
    /// # Errors
    /// It may be repeated.
    pub(crate) fn make_objects(
        &mut self,
        driver: &dyn Multicast,
        ids: &[u64],
    ) -> Result<Vec<OwnedFd>, Failure> {
        self.undo_objects(driver)?;
        ids.iter()
            .map(|id| {
                let object = self.multicast.objects.get_mut(id);
                let object = object.ok_or_else(|| unknown(*id))?;
                let failed = |code| {
                    Failure::driver(code, format!("multicast object {id} cannot be made again"))
                };
                let handle_types = object.prop.handle_types | u64::from(HANDLE_POSIX_FD);
                let prop = MulticastProp { handle_types, ..object.prop };
                let handle = driver.create_object(&prop).map_err(failed)?;
                object.handle = Some(handle);
                driver.export(handle).map_err(failed)
            })
            .collect()
    }

    /// Takes these objects from whoever has made them, and adds the devices that this process had added to its objects;
    /// to its own also those of processes that are not `present` any more.
    ///
    /// # Errors
    /// It may be repeated from the beginning.
    pub(crate) fn join_objects(
        &mut self,
        driver: &dyn Multicast,
        fds: &Fds,
        present: &[Identity],
    ) -> Result<(), Failure> {
        for (id, fd) in fds {
            let object = self.multicast.objects.get_mut(id).ok_or_else(|| unknown(*id))?;
            if object.handle.is_none() {
                let fd: &Arc<OwnedFd> = fd;
                let handle = driver.import(fd.as_fd()).map_err(|code| {
                    Failure::driver(code, format!("multicast object {id} cannot be imported"))
                })?;
                object.handle = Some(handle);
            }
        }
        for (id, object) in &self.multicast.objects {
            let Some(handle) = object.handle else {
                return Err(Failure::other(format!("multicast object {id} was not handed over")));
            };
            let absent = object.adders.iter().filter(|(adder, _)| !present.contains(adder));
            let absent = absent.filter_map(|(_, device)| *device);
            for device in object.devices.iter().copied().chain(absent) {
                driver.add_device(handle, device).map_err(|code| {
                    let what = format!("device {device} cannot be added to multicast object {id}");
                    Failure::driver(code, what)
                })?;
            }
        }
        Ok(())
    }

    /// Binds and maps what was bound and mapped. All devices have been added to what is used, since the driver would wait
    /// for them.
    ///
    /// # Errors
    /// It may be repeated from the beginning.
    pub(crate) fn bind_objects(&mut self, driver: &dyn Multicast) -> Result<(), Failure> {
        for (id, object) in &mut self.multicast.objects {
            let Some(handle) = object.handle else {
                return Err(Failure::other(format!("multicast object {id} is not there")));
            };
            for binding in object.bindings.iter_mut().filter(|binding| !binding.attached) {
                let block = binding.block;
                let memory = self.blocks.get(&block).and_then(|found| found.handle);
                let memory = memory
                    .ok_or_else(|| Failure::other(format!("bound block {block} is detached")))?;
                driver.bind(handle, binding, memory).map_err(|code| {
                    let what = format!("block {block} cannot be bound to multicast object {id}");
                    Failure::driver(code, what)
                })?;
                binding.attached = true;
            }
        }
        for (address, mapping) in &mut self.multicast.mappings {
            if mapping.attached {
                continue;
            }
            let object = self.multicast.objects.get(&mapping.object);
            let handle = object.and_then(|object| object.handle);
            let handle = handle.ok_or_else(|| unknown(mapping.object))?;
            let failed = |code| {
                let what = format!("the multicast object at {address:#x} cannot be mapped again");
                Failure::driver(code, what)
            };
            driver.map(*address, mapping.size, mapping.offset, handle).map_err(failed)?;
            mapping.attached = true;
            if !mapping.access.is_empty() {
                driver.set_access(*address, mapping.size, &mapping.access).map_err(failed)?;
            }
        }
        Ok(())
    }
}

fn unknown(id: u64) -> Failure {
    Failure::other(format!("there is no multicast object {id}"))
}
