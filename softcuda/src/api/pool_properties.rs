//! What pools and nodes of graphs say about the memory that they want.

use cudarc::driver::sys;

use super::managed::{NOWHERE, ON_HOST, ON_NUMA_NODE};
use super::vmm::ON_DEVICE;
use crate::managed_memory::Location;
use crate::settings::device;
use crate::status::{Code, Outcome};
use crate::virtual_memory::POSIX_FILE_DESCRIPTOR;

/// `CU_MEM_ALLOCATION_TYPE_PINNED`.
pub(super) const PINNED: u32 = 1;
/// `CU_MEM_ALLOCATION_TYPE_MANAGED`.
pub(super) const MANAGED: u32 = 2;

/// `CUmemPoolProps` with its enumerations as numbers.
#[repr(C)]
#[derive(Clone, Copy)]
pub(super) struct Properties {
    kind: u32,
    handle_types: u32,
    location: Location,
    security: u64,
    /// The most memory that the pool may have; 0 for no limit.
    pub(super) most: usize,
    usage: u16,
    reserved: [u8; 54],
}

const _: () = assert!(size_of::<Properties>() == size_of::<sys::CUmemPoolProps>());

/// Where a location says that managed memory should stay.
///
/// # Errors
/// `INVALID_DEVICE`, and `INVALID_VALUE` for a location that pools cannot have.
pub(super) fn preferred(location: Location) -> Outcome<Option<Location>> {
    match location.kind {
        NOWHERE => Ok(None),
        ON_DEVICE => device(location.id).map(|_| Some(location)),
        // The host is one place, whatever its number.
        ON_HOST => Ok(Some(Location { kind: ON_HOST, id: 0 })),
        ON_NUMA_NODE if location.id >= 0 => Ok(Some(location)),
        _ => Err(Code::INVALID_VALUE),
    }
}

impl Properties {
    /// The device, if the properties are those of memory that pools can have.
    ///
    /// # Errors
    /// `INVALID_VALUE`, `INVALID_DEVICE`, and `NOT_SUPPORTED` for what is not there.
    pub(super) fn device(&self) -> Outcome<usize> {
        if self.kind != PINNED || self.reserved.iter().any(|byte| *byte != 0) {
            return Err(Code::INVALID_VALUE);
        }
        if !matches!(self.handle_types, 0 | POSIX_FILE_DESCRIPTOR) || self.usage != 0 {
            return Err(Code::NOT_SUPPORTED);
        }
        self.location.device()
    }

    /// Where the managed memory of a pool should stay, if it is managed.
    ///
    /// # Errors
    /// `INVALID_VALUE`, `INVALID_DEVICE`, and `NOT_SUPPORTED` for a pool that other processes may get.
    pub(super) fn managed(&self) -> Outcome<Option<Option<Location>>> {
        if self.kind != MANAGED {
            return Ok(None);
        }
        if self.reserved.iter().any(|byte| *byte != 0) {
            return Err(Code::INVALID_VALUE);
        }
        if self.handle_types != 0 || self.usage != 0 {
            return Err(Code::NOT_SUPPORTED);
        }
        preferred(self.location).map(Some)
    }

    /// Whether other processes may get the pool.
    pub(super) fn is_shareable(&self) -> bool {
        self.handle_types == POSIX_FILE_DESCRIPTOR
    }

    /// Those of plain memory of a device.
    pub(super) fn of_device(device: usize) -> Properties {
        Properties::plain(PINNED, Location { kind: ON_DEVICE, id: device as i32 })
    }

    /// Those of managed memory.
    pub(super) fn of_managed(preferred: Option<Location>) -> Properties {
        Properties::plain(MANAGED, preferred.unwrap_or_default())
    }

    fn plain(kind: u32, location: Location) -> Properties {
        let reserved = [0; 54];
        Properties { kind, handle_types: 0, location, security: 0, most: 0, usage: 0, reserved }
    }
}
