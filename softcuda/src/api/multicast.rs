//! Multicast objects. Those of `cuMem*` that take handles and mappings take theirs too (`vmm.rs`).

use cudarc::driver::sys;

use super::arguments::{In, Out};
use super::driver_api;
use super::vmm::handle_types;
use crate::address_space::GRANULE;
use crate::multicast_table;
use crate::settings::{MAX_DEVICES, device, settings};
use crate::status::{Code, Outcome};
use crate::virtual_memory;

/// `CUmulticastObjectProp`.
#[repr(C)]
#[derive(Clone, Copy)]
struct Properties {
    devices: u32,
    size: usize,
    handle_types: u64,
    flags: u64,
}

const _: () = assert!(size_of::<Properties>() == size_of::<sys::CUmulticastObjectProp>());

impl Properties {
    /// What holds of an object of any size.
    ///
    /// # Errors
    /// `NOT_SUPPORTED` where no device has multicast and for other handle types; `INVALID_VALUE` for flags, and for
    /// no devices or more than there can be.
    fn check(&self) -> Outcome<multicast_table::Properties> {
        check_there()?;
        let devices = self.devices as usize;
        if !(1..=MAX_DEVICES).contains(&devices) || self.flags != 0 {
            return Err(Code::INVALID_VALUE);
        }
        let handle_types = u64::from(handle_types());
        if self.handle_types & !handle_types != 0 {
            return Err(Code::NOT_SUPPORTED);
        }
        let handle_types = self.handle_types as u32;
        Ok(multicast_table::Properties { devices, size: self.size as u64, handle_types })
    }
}

/// # Errors
/// `NOT_SUPPORTED` where no device has multicast.
fn check_there() -> Outcome {
    let any = (0..settings().devices).any(|device| settings().has_multicast(device));
    if any { Ok(()) } else { Err(Code::NOT_SUPPORTED) }
}

/// Binds memory behind a handle, on a device if it is named.
fn bind_memory(
    handle: u64,
    device: Option<usize>,
    offset: usize,
    (memory, from): (u64, usize),
    size: usize,
    flags: u64,
) -> Outcome {
    check_there()?;
    let object = virtual_memory::multicast(handle)?;
    if flags != 0 {
        return Err(Code::INVALID_VALUE);
    }
    let memory = virtual_memory::physical(memory)?;
    object.bind(device, offset as u64, &memory, from as u64, size as u64)
}

/// Binds memory that is mapped at an address: of `cuMemCreate` alone, all of it in one mapping.
fn bind_address(
    handle: u64,
    device: Option<usize>,
    offset: usize,
    address: u64,
    size: usize,
    flags: u64,
) -> Outcome {
    check_there()?;
    let object = virtual_memory::multicast(handle)?;
    let found = virtual_memory::find(address).filter(|_| flags == 0);
    let (start, mapping) = found.ok_or(Code::INVALID_VALUE)?;
    let memory = mapping.backing.memory().ok_or(Code::INVALID_VALUE)?;
    let before = address - start;
    if size as u64 > mapping.size - before {
        return Err(Code::INVALID_VALUE);
    }
    object.bind(device, offset as u64, memory, mapping.offset + before, size as u64)
}

driver_api! {
    call fn cuMulticastCreate(out: Out<u64>, properties: In<Properties>) {
        out.check()?;
        let properties = properties.get()?.check()?;
        out.set(virtual_memory::create_multicast(properties)?)
    }

    call fn cuMulticastAddDevice(handle: u64, ordinal: i32) {
        check_there()?;
        virtual_memory::multicast(handle)?.add(device(ordinal)?)
    }

    call fn cuMulticastBindMem(
        handle: u64, offset: usize, memory: u64, from: usize, size: usize, flags: u64,
    ) {
        bind_memory(handle, None, offset, (memory, from), size, flags)
    }

    call fn cuMulticastBindMem_v2(
        handle: u64, ordinal: i32, offset: usize, memory: u64, from: usize, size: usize, flags: u64,
    ) {
        settings().driver.since(13_010)?;
        bind_memory(handle, Some(device(ordinal)?), offset, (memory, from), size, flags)
    }

    call fn cuMulticastBindAddr(
        handle: u64, offset: usize, address: u64, size: usize, flags: u64,
    ) {
        bind_address(handle, None, offset, address, size, flags)
    }

    call fn cuMulticastBindAddr_v2(
        handle: u64, ordinal: i32, offset: usize, address: u64, size: usize, flags: u64,
    ) {
        settings().driver.since(13_010)?;
        bind_address(handle, Some(device(ordinal)?), offset, address, size, flags)
    }

    call fn cuMulticastUnbind(handle: u64, ordinal: i32, offset: usize, size: usize) {
        check_there()?;
        virtual_memory::multicast(handle)?.unbind(device(ordinal)?, offset as u64, size as u64)
    }

    call fn cuMulticastGetGranularity(out: Out<usize>, properties: In<Properties>, option: u32) {
        out.check()?;
        // Programs ask before they know the size.
        properties.get()?.check()?;
        if option > 1 {
            return Err(Code::INVALID_VALUE);
        }
        // A GPU may recommend more (512 MiB for an H100), as its mappings of multicast objects have such pages.
        out.set(GRANULE as usize)
    }
}
