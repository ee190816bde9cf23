//! What pools and nodes of graphs say about the memory that they want.

use cudarc::driver::sys;

use super::vmm::ON_DEVICE;
use crate::managed_memory::Location;
use crate::status::{Code, Outcome};
use crate::virtual_memory::POSIX_FILE_DESCRIPTOR;

/// `CU_MEM_ALLOCATION_TYPE_PINNED`.
pub(super) const PINNED: u32 = 1;

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

    /// Whether other processes may get the pool.
    pub(super) fn is_shareable(&self) -> bool {
        self.handle_types == POSIX_FILE_DESCRIPTOR
    }

    /// Those of plain memory of a device.
    pub(super) fn of_device(device: usize) -> Properties {
        let location = Location { kind: ON_DEVICE, id: device as i32 };
        let reserved = [0; 54];
        Properties {
            kind: PINNED,
            handle_types: 0,
            location,
            security: 0,
            most: 0,
            usage: 0,
            reserved,
        }
    }
}
