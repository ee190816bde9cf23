//! Virtual memory management.

use std::os::fd::{BorrowedFd, IntoRawFd};

use cudarc::driver::sys;

use super::arguments::{Address, In, Out};
use super::driver_api;
use crate::address_space::{self, GRANULE};
use crate::context;
use crate::device_memory;
use crate::ipc;
use crate::managed_memory::Location;
use crate::settings::{Vmm, device, settings};
use crate::status::{Code, Outcome};
use crate::virtual_memory::{self, POSIX_FILE_DESCRIPTOR};

/// `CU_MEM_RANGE_HANDLE_TYPE_DMA_BUF_FD`.
const DMA_BUFFER: u32 = 1;
/// `CU_MEM_RANGE_FLAG_DMA_BUF_MAPPING_TYPE_PCIE`, the only flag.
const FOR_PCIE: u64 = 1;
/// What ranges of such handles are whole ones of.
const PAGE: u64 = 4096;

/// `CU_MEM_ALLOCATION_TYPE_PINNED`.
const PINNED: u32 = 1;
/// `CU_MEM_LOCATION_TYPE_DEVICE`.
pub(super) const ON_DEVICE: u32 = 1;
/// `CU_MEM_LOCATION_TYPE_HOST`.
const HOST: u32 = 2;
/// `CU_MEM_LOCATION_TYPE_HOST_NUMA`.
const HOST_NUMA: u32 = 3;
/// `CU_MEM_ACCESS_FLAGS_PROT_READWRITE`.
pub(super) const READ_WRITE: u32 = 3;

/// `CUmemAllocationProp` with its enumerations as numbers.
#[repr(C)]
#[derive(Clone, Copy)]
struct Properties {
    kind: u32,
    handle_types: u32,
    location: Location,
    metadata: u64,
    compression: u8,
    rdma: u8,
    usage: u16,
    reserved: [u8; 4],
}

/// `CUmemAccessDesc` with its enumerations as numbers.
#[repr(C)]
#[derive(Clone, Copy)]
pub(super) struct Access {
    pub(super) location: Location,
    pub(super) flags: u32,
}

const _: () = assert!(size_of::<Properties>() == size_of::<sys::CUmemAllocationProp>());
const _: () = assert!(size_of::<Access>() == size_of::<sys::CUmemAccessDesc>());

impl Location {
    /// # Errors
    /// `INVALID_DEVICE` without such a device, `NOT_SUPPORTED` for host memory.
    pub(super) fn device(&self) -> Outcome<usize> {
        match self.kind {
            ON_DEVICE => device(self.id),
            2..=4 => Err(Code::NOT_SUPPORTED),
            _ => Err(Code::INVALID_VALUE),
        }
    }

    /// Whether it is host memory as `cuMemCreate` gives it to driver 580 on a host with one NUMA node.
    fn is_host(&self) -> bool {
        matches!((self.kind, self.id), (HOST | HOST_NUMA, 0))
    }
}

/// Where physical memory is.
enum Place {
    Device(usize),
    Host,
}

/// The handle types that memory and multicast objects can have.
pub(super) fn handle_types() -> u32 {
    if settings().vmm == Vmm::Full { POSIX_FILE_DESCRIPTOR } else { 0 }
}

impl Properties {
    fn check(&self) -> Outcome<Place> {
        if self.kind != PINNED {
            return Err(Code::INVALID_VALUE);
        }
        if self.handle_types & !handle_types() != 0 || self.usage != 0 {
            return Err(Code::NOT_SUPPORTED);
        }
        check_there()?;
        match self.location.kind {
            ON_DEVICE => self.location.device().map(Place::Device),
            // Other processes get what is said to be of a node. Codes as driver 580 gives them.
            HOST if self.handle_types != 0 => Err(Code::INVALID_VALUE),
            _ if self.location.is_host() => Ok(Place::Host),
            _ => Err(Code::INVALID_VALUE),
        }
    }
}

/// # Errors
/// `NOT_SUPPORTED` where there is no virtual memory management.
fn check_there() -> Outcome {
    if settings().vmm == Vmm::None { Err(Code::NOT_SUPPORTED) } else { Ok(()) }
}

driver_api! {
    call fn cuMemGetAllocationGranularity(out: Out<usize>, properties: In<Properties>, option: u32) {
        properties.get()?.check()?;
        if option > 1 {
            return Err(Code::INVALID_VALUE);
        }
        out.set(GRANULE as usize)
    }

    call fn cuMemAddressReserve(
        out: Out<u64>, size: usize, alignment: usize, hint: u64, flags: u64,
    ) {
        out.check()?;
        check_there()?;
        let aligned = alignment == 0 || alignment.is_power_of_two();
        if size == 0 || !(size as u64).is_multiple_of(GRANULE) || !aligned || flags != 0 {
            return Err(Code::INVALID_VALUE);
        }
        out.set(address_space::reserve(size as u64, alignment as u64, hint)?)
    }

    call fn cuMemAddressFree(address: u64, size: usize) {
        if address_space::reservation_size(address) != Some(size as u64)
            || crate::managed_memory::find(address).is_some()
            || device_memory::is_block(address)
            || ipc::find(address).is_some()
            || virtual_memory::any_mapped(address, size as u64)
        {
            return Err(Code::INVALID_VALUE);
        }
        address_space::unreserve(address);
        Ok(())
    }

    call fn cuMemCreate(out: Out<u64>, size: usize, properties: In<Properties>, flags: u64) {
        out.check()?;
        let properties = properties.get()?;
        let place = properties.check()?;
        if flags != 0 {
            return Err(Code::INVALID_VALUE);
        }
        let (size, types) = (size as u64, properties.handle_types);
        out.set(match place {
            Place::Device(device) => virtual_memory::create(device, size, types)?,
            Place::Host => virtual_memory::create_on_host(size, types)?,
        })
    }

    call fn cuMemRelease(handle: u64) {
        virtual_memory::release(handle)
    }

    call fn cuMemMap(address: u64, size: usize, offset: usize, handle: u64, flags: u64) {
        if flags != 0 {
            return Err(Code::INVALID_VALUE);
        }
        virtual_memory::map(address, size as u64, offset as u64, handle)
    }

    call fn cuMemUnmap(address: u64, size: usize) {
        // Work that uses the memory must not find it gone under its hands.
        context::wait_everything();
        virtual_memory::unmap(address, size as u64)
    }

    call fn cuMemSetAccess(address: u64, size: usize, access: In<Access>, count: usize) {
        if count == 0 {
            return Err(Code::INVALID_VALUE);
        }
        // Devices are one processor here: each has what any of them is given.
        let is_host = virtual_memory::find(address).is_some_and(|(_, at)| at.backing.is_host());
        let mut most = address_space::Access::None;
        for index in 0..count {
            let access = access.at(index)?;
            // What the host may do with its memory, devices may do with it here, and the reverse.
            if !(is_host && access.location.is_host()) {
                let device = access.location.device()?;
                virtual_memory::check_device(address, size as u64, device)?;
            }
            most = most.max(access.flags.try_into()?);
        }
        let set = || virtual_memory::set_access(address, size as u64, most);
        if virtual_memory::would_reduce(address, size as u64, most) {
            context::while_idle(set)
        } else {
            set()
        }
    }

    call fn cuMemGetAccess(out: Out<u64>, location: In<Location>, address: u64) {
        let location = location.get()?;
        let (_, mapping) = virtual_memory::find(address).ok_or(Code::INVALID_VALUE)?;
        if !(mapping.backing.is_host() && location.is_host()) {
            location.device()?;
        }
        out.set(mapping.access as u64)
    }

    call fn cuMemExportToShareableHandle(out: Out<i32>, handle: u64, kind: u32, flags: u64) {
        out.check()?;
        if flags != 0 {
            return Err(Code::INVALID_VALUE);
        }
        if kind != POSIX_FILE_DESCRIPTOR {
            return Err(Code::NOT_SUPPORTED);
        }
        out.set(virtual_memory::export(handle)?.into_raw_fd())
    }

    call fn cuMemImportFromShareableHandle(out: Out<u64>, descriptor: Address, kind: u32) {
        out.check()?;
        if kind != POSIX_FILE_DESCRIPTOR {
            return Err(Code::NOT_SUPPORTED);
        }
        let descriptor = i32::try_from(descriptor.0).ok().filter(|fd| *fd >= 0);
        let descriptor = descriptor.ok_or(Code::INVALID_VALUE)?;
        // SAFETY: the caller lends the descriptor for the length of the call; one that is not open
        // fails in the kernel.
        let memory = unsafe { BorrowedFd::borrow_raw(descriptor) };
        let device = context::top().map_or(0, |context| context.device);
        out.set(virtual_memory::import(device, memory)?)
    }

    call fn cuMemGetHandleForAddressRange(
        out: Out<i32>, address: u64, size: usize, kind: u32, flags: u64,
    ) {
        out.check()?;
        let is_whole = |n: u64| n.is_multiple_of(PAGE);
        let is_range = size != 0 && is_whole(address) && is_whole(size as u64);
        if kind != DMA_BUFFER || flags > FOR_PCIE || !is_range {
            return Err(Code::INVALID_VALUE);
        }
        if !address_space::is_accessible(address, size as u64) {
            return Err(Code::INVALID_VALUE);
        }
        // The device attribute says so.
        Err(Code::NOT_SUPPORTED)
    }

    call fn cuMemRetainAllocationHandle(out: Out<u64>, address: Address) {
        out.check()?;
        out.set(virtual_memory::retain(address.0)?)
    }

    call fn cuMemGetAllocationPropertiesFromHandle(out: Out<Properties>, handle: u64) {
        let physical = virtual_memory::physical(handle)?;
        out.set(Properties {
            kind: PINNED,
            handle_types: physical.handle_types,
            location: if physical.is_host {
                Location { kind: HOST_NUMA, id: 0 }
            } else {
                Location { kind: ON_DEVICE, id: physical.device as i32 }
            },
            metadata: 0,
            compression: 0,
            rdma: 0,
            usage: 0,
            reserved: [0; 4],
        })
    }
}
