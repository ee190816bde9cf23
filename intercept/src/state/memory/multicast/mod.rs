//! Multicast objects: memory of several devices, and of several processes, at one address. The driver cannot checkpoint
//! one. So they are followed, undone before a checkpoint and [made again](remake) after it.
//!
//! What is kept of an object is what this process has done with it: the devices that it has added, the memory that it
//! has bound, its mappings. Who has created it is its *owner*, from whom others import it by a ticket as they do memory,
//! and who is told of the devices that they add: whoever binds memory waits for all of them.

mod remake;
mod serve;
#[cfg(test)]
mod tests;

use std::collections::BTreeMap;

use gpucr_wire::Counts;
use gpucr_wire::peers::{Identity, Team};

use super::Memory;
use super::opened::Origin;
use super::vmm::Vmm;
use crate::abi::real::{self, check};
use crate::abi::types::{Access, Code, MulticastProp};
use crate::log::log;
use crate::state::peers;

pub(crate) use serve::{Asked, Incomplete, Source};

/// The driver's calls about multicast objects. Errors are the driver's codes.
pub(crate) trait Multicast: Vmm {
    fn create_object(&self, prop: &MulticastProp) -> Result<u64, Code>;
    /// What is bound to such an object is a multiple of this, bytes.
    fn object_granularity(&self, prop: &MulticastProp) -> u64;
    fn add_device(&self, object: u64, device: i32) -> Result<(), Code>;
    /// Binds memory on its own device, or on one that is named. Waits for ever where a device was not added.
    fn bind(&self, object: u64, binding: &Binding, memory: u64) -> Result<(), Code>;
    fn unbind(&self, object: u64, binding: &Binding) -> Result<(), Code>;
}

/// Memory that this process has bound to an object.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Binding {
    /// The device whose memory it is.
    pub(crate) device: i32,
    /// Whether the program has named the device.
    pub(crate) is_named: bool,
    /// Where in the object it begins.
    pub(crate) offset: u64,
    /// The block, and where in it.
    pub(crate) block: u64,
    pub(crate) from: u64,
    /// Bytes.
    pub(crate) size: u64,
    /// Whether the driver has it; false while detached.
    attached: bool,
}

/// An object, as this process has it.
struct Object {
    /// As the program has asked for it; but for others' flags, which they do not tell.
    prop: MulticastProp,
    /// What the driver binds and unbinds is a multiple of this, bytes.
    granularity: u64,
    /// The driver's handle; `None` while detached.
    handle: Option<u64>,
    /// Times that the program may still release it.
    references: u32,
    mappings: u32,
    /// Calls that are about it just now.
    busy: u32,
    /// The program has exported it.
    is_offered: bool,
    /// Whose it is, if it is another process's.
    origin: Option<Origin>,
    /// The devices that this process has added.
    devices: Vec<i32>,
    /// Whether all devices are known to be added.
    is_complete: bool,
    /// Of an own object: who else has added a device, and which, if this process sees it.
    adders: Vec<(Identity, Option<i32>)>,
    /// What this process has bound.
    bindings: Vec<Binding>,
}

/// An object at an address.
struct Mapping {
    size: u64,
    offset: u64,
    object: u64,
    access: Vec<Access>,
    attached: bool,
}

/// All objects. They have names from the same numbers as all blocks.
#[derive(Default)]
pub(super) struct Objects {
    objects: BTreeMap<u64, Object>,
    mappings: BTreeMap<u64, Mapping>,
}

impl Object {
    /// What another process that imports it is told.
    fn team(&self) -> Team {
        let MulticastProp { devices, size, handle_types, .. } = self.prop;
        Team { devices, size: size as u64, handle_types: handle_types as u32 }
    }

    /// Whether other processes can have it.
    fn is_shareable(&self) -> bool {
        self.origin.is_some() || self.prop.handle_types != 0
    }

    fn count(&mut self) {
        let added = self.devices.len() + self.adders.len();
        self.is_complete |= self.origin.is_none() && added >= self.prop.devices as usize;
    }
}

impl Objects {
    fn mapping_at(&self, address: u64) -> Option<(u64, &Mapping)> {
        let (start, mapping) = self.mappings.range(..=address).next_back()?;
        (address - start < mapping.size).then_some((*start, mapping))
    }

    /// Whose objects are imported here.
    pub(super) fn owners(&self) -> impl Iterator<Item = Identity> {
        self.objects.values().filter_map(|object| object.origin.map(|origin| origin.owner))
    }

    pub(super) fn fill(&self, counts: &mut Counts) {
        counts.multicast = self.objects.len() as u64;
    }
}

impl Memory {
    /// An object of which the driver has just given a handle.
    fn new_object(
        &mut self,
        prop: MulticastProp,
        granularity: u64,
        handle: u64,
        origin: Option<Origin>,
    ) -> u64 {
        let object = Object {
            prop,
            granularity,
            handle: Some(handle),
            references: 1,
            mappings: 0,
            busy: 0,
            is_offered: false,
            origin,
            devices: Vec::new(),
            is_complete: false,
            adders: Vec::new(),
            bindings: Vec::new(),
        };
        let id = self.new_id();
        self.multicast.objects.insert(id, object);
        id
    }

    /// An object goes with its last use, and with it the hold on what is bound to it. As long as others have it, its owner
    /// keeps it for them, and what this process has bound stays.
    fn drop_unused_object(&mut self, vmm: &dyn Vmm, id: u64) {
        let Some(object) = self.multicast.objects.get(&id) else { return };
        let is_used = object.references > 0 || object.mappings > 0 || object.busy > 0;
        let is_kept = match object.origin {
            None => object.is_offered && peers::is_open(id),
            Some(_) => !object.bindings.is_empty(),
        };
        if is_used || is_kept {
            return;
        }
        let Some(object) = self.multicast.objects.remove(&id) else { return };
        self.closed.extend(object.origin);
        if let Some(handle) = object.handle
            && let Err(code) = vmm.release(handle)
        {
            log!("multicast object {id} cannot be given back: error {code}");
        }
        for binding in object.bindings {
            self.let_go(vmm, binding.block);
        }
    }

    /// A block is bound to one object fewer.
    fn let_go(&mut self, vmm: &dyn Vmm, block: u64) {
        if let Some(found) = self.blocks.get_mut(&block) {
            found.bound = found.bound.saturating_sub(1);
        }
        self.drop_unused(vmm, block);
    }

    /// Lets go of own objects that were kept for others who have closed them.
    pub(crate) fn tidy_objects(&mut self, vmm: &dyn Vmm) {
        let ids: Vec<u64> = self.multicast.objects.keys().copied().collect();
        ids.into_iter().for_each(|id| self.drop_unused_object(vmm, id));
    }
}

impl Multicast for super::vmm::Driver {
    fn create_object(&self, prop: &MulticastProp) -> Result<u64, Code> {
        let mut handle = 0;
        // SAFETY: writes one value, reads the properties.
        check(unsafe { real::cuMulticastCreate(&mut handle, prop) })?;
        Ok(handle)
    }

    fn object_granularity(&self, prop: &MulticastProp) -> u64 {
        let mut granularity = 0;
        // SAFETY: writes one value and reads the properties. 0 asks for the least that there may be.
        let code = unsafe { real::cuMulticastGetGranularity(&mut granularity, prop, 0) };
        if check(code).is_ok() { (granularity as u64).max(1) } else { 1 }
    }

    fn add_device(&self, object: u64, device: i32) -> Result<(), Code> {
        // SAFETY: plain values, which the driver checks.
        check(unsafe { real::cuMulticastAddDevice(object, device) })
    }

    fn bind(&self, object: u64, binding: &Binding, memory: u64) -> Result<(), Code> {
        let Binding { device, offset, from, size, .. } = *binding;
        let (offset, from, size) = (offset as usize, from as usize, size as usize);
        // SAFETY: plain values, which the driver checks.
        check(unsafe {
            if binding.is_named {
                real::cuMulticastBindMem_v2(object, device, offset, memory, from, size, 0)
            } else {
                real::cuMulticastBindMem(object, offset, memory, from, size, 0)
            }
        })
    }

    fn unbind(&self, object: u64, binding: &Binding) -> Result<(), Code> {
        let Binding { device, offset, size, .. } = *binding;
        // SAFETY: plain values, which the driver checks.
        check(unsafe { real::cuMulticastUnbind(object, device, offset as usize, size as usize) })
    }
}
