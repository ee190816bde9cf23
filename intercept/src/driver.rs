//! Types and codes of the driver API, as far as the shim looks into them.
//!
//! Flags and enumerations are plain integers here: the driver may return values that are newer
//! than any list, and a combination of flags is no value of a Rust enumeration. A test compares
//! the layouts with those of `cudarc`.

use std::ffi::c_void;

/// What every driver function returns.
pub(crate) type Code = u32;

pub(crate) const SUCCESS: Code = 0;
pub(crate) const ERROR_INVALID_VALUE: Code = 1;
pub(crate) const ERROR_OUT_OF_MEMORY: Code = 2;
pub(crate) const ERROR_NO_DEVICE: Code = 100;
pub(crate) const ERROR_INVALID_CONTEXT: Code = 201;
pub(crate) const ERROR_NOT_FOUND: Code = 500;
pub(crate) const ERROR_NOT_SUPPORTED: Code = 801;
pub(crate) const ERROR_UNKNOWN: Code = 999;

/// `CU_MEM_ALLOCATION_TYPE_PINNED`
pub(crate) const ALLOCATION_PINNED: u32 = 1;
/// `CU_MEM_LOCATION_TYPE_DEVICE`
pub(crate) const LOCATION_DEVICE: u32 = 1;
/// `CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR`
pub(crate) const HANDLE_POSIX_FD: u32 = 1;
/// `CU_MEM_ACCESS_FLAGS_PROT_NONE`
pub(crate) const ACCESS_NONE: u32 = 0;
/// `CU_MEM_ACCESS_FLAGS_PROT_READWRITE`
pub(crate) const ACCESS_READ_WRITE: u32 = 3;
/// `CU_LIMIT_STACK_SIZE`
pub(crate) const LIMIT_STACK_SIZE: u32 = 0;
/// `CU_STREAM_CAPTURE_MODE_RELAXED`
pub(crate) const CAPTURE_RELAXED: u32 = 2;
/// `CU_DEVICE_ATTRIBUTE_GPU_DIRECT_RDMA_WITH_CUDA_VMM_SUPPORTED`
pub(crate) const ATTRIBUTE_RDMA_WITH_VMM: u32 = 110;

/// `CUmemLocation`
#[repr(C)]
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Location {
    pub(crate) kind: u32,
    pub(crate) id: i32,
}

/// `CUmemAllocationProp`
#[repr(C)]
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct AllocationProp {
    pub(crate) kind: u32,
    pub(crate) handle_types: u32,
    pub(crate) location: Location,
    pub(crate) win32: *mut c_void,
    pub(crate) compression: u8,
    pub(crate) rdma: u8,
    pub(crate) usage: u16,
    pub(crate) reserved: [u8; 4],
}

// SAFETY: the pointer is unused on this system; it is copied and never followed.
unsafe impl Send for AllocationProp {}

impl AllocationProp {
    /// Pinned memory on `device`, exportable as a file descriptor.
    pub(crate) fn on_device(device: i32, rdma: bool) -> Self {
        Self {
            kind: ALLOCATION_PINNED,
            handle_types: HANDLE_POSIX_FD,
            location: Location { kind: LOCATION_DEVICE, id: device },
            win32: std::ptr::null_mut(),
            compression: 0,
            rdma: rdma.into(),
            usage: 0,
            reserved: [0; 4],
        }
    }
}

/// `CUmemAccessDesc`
#[repr(C)]
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Access {
    pub(crate) location: Location,
    pub(crate) flags: u32,
}

impl Access {
    /// Access of `device` with these flags.
    pub(crate) fn of_device(device: i32, flags: u32) -> Self {
        Self { location: Location { kind: LOCATION_DEVICE, id: device }, flags }
    }
}

/// `CUarrayMapInfo`, the parts before and after the handle left as they are.
#[repr(C)]
#[derive(Clone, Copy)]
pub(crate) struct ArrayMapInfo {
    pub(crate) before: [u64; 8],
    pub(crate) handle: u64,
    pub(crate) after: [u64; 3],
}

/// `CUipcMemHandle`
#[repr(C)]
#[derive(Clone, Copy)]
pub(crate) struct IpcHandle(pub(crate) [u8; 64]);

#[cfg(test)]
mod tests {
    use super::*;
    use cudarc::driver::sys;
    use std::mem::{offset_of, size_of};

    #[test]
    fn layouts_are_the_drivers() {
        assert_eq!(size_of::<Location>(), size_of::<sys::CUmemLocation_st>());
        assert_eq!(size_of::<Access>(), size_of::<sys::CUmemAccessDesc_st>());
        assert_eq!(offset_of!(Access, flags), offset_of!(sys::CUmemAccessDesc_st, flags));
        assert_eq!(size_of::<AllocationProp>(), size_of::<sys::CUmemAllocationProp_st>());
        assert_eq!(
            offset_of!(AllocationProp, compression),
            offset_of!(sys::CUmemAllocationProp_st, allocFlags)
        );
        assert_eq!(
            offset_of!(AllocationProp, location),
            offset_of!(sys::CUmemAllocationProp_st, location)
        );
        assert_eq!(size_of::<ArrayMapInfo>(), size_of::<sys::CUarrayMapInfo_st>());
        assert_eq!(offset_of!(ArrayMapInfo, handle), offset_of!(sys::CUarrayMapInfo_st, memHandle));
        assert_eq!(size_of::<IpcHandle>(), size_of::<sys::CUipcMemHandle_st>());
        assert_eq!(
            ATTRIBUTE_RDMA_WITH_VMM,
            sys::CUdevice_attribute_enum::CU_DEVICE_ATTRIBUTE_GPU_DIRECT_RDMA_WITH_CUDA_VMM_SUPPORTED
                as u32
        );
    }
}
