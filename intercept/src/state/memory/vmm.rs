//! The driver's virtual memory management, behind a trait so that tests can let any call fail.

use std::os::fd::{AsRawFd, BorrowedFd, FromRawFd, OwnedFd, RawFd};

use crate::abi::real::{self, Relaxed, check};
use crate::abi::types::{
    ATTRIBUTE_POSIX_FD, ATTRIBUTE_RDMA_WITH_VMM, ATTRIBUTE_VMM, Access, AllocationProp, Code,
    ERROR_NOT_READY, HANDLE_POSIX_FD, SUCCESS,
};

/// What the heap wants to know of a device.
#[derive(Debug, Clone, Copy)]
pub(crate) struct DeviceInfo {
    /// Bytes of its memory.
    pub(crate) total: u64,
    /// Physical blocks are multiples of this, bytes.
    pub(crate) granularity: u64,
    /// Whether blocks may be asked for that other hardware reaches directly.
    pub(crate) rdma: bool,
}

/// The calls that the tables make. Errors are the driver's codes.
pub(crate) trait Vmm {
    /// Whether memory of the device can be handed to another process. `true` if the driver does not say.
    fn is_exportable(&self, device: i32) -> bool;
    fn device(&self, device: i32) -> Result<DeviceInfo, Code>;
    fn reserve(&self, size: u64) -> Result<u64, Code>;
    fn unreserve(&self, address: u64, size: u64) -> Result<(), Code>;
    fn create(&self, size: u64, prop: &AllocationProp) -> Result<u64, Code>;
    fn release(&self, handle: u64) -> Result<(), Code>;
    fn map(&self, address: u64, size: u64, offset: u64, handle: u64) -> Result<(), Code>;
    fn unmap(&self, address: u64, size: u64) -> Result<(), Code>;
    fn set_access(&self, address: u64, size: u64, access: &[Access]) -> Result<(), Code>;
    fn export(&self, handle: u64) -> Result<OwnedFd, Code>;
    fn import(&self, fd: BorrowedFd<'_>) -> Result<u64, Code>;
    /// Whether all is over that an event was recorded behind, as far as the driver says.
    fn is_over(&self, event: u64) -> bool;
}

/// The real driver.
pub(crate) struct Driver;

impl Vmm for Driver {
    fn is_exportable(&self, device: i32) -> bool {
        [ATTRIBUTE_VMM, ATTRIBUTE_POSIX_FD].into_iter().all(|attribute| {
            let mut value = 0;
            // SAFETY: writes one value.
            let code = unsafe { real::cuDeviceGetAttribute(&mut value, attribute, device) };
            code != SUCCESS || value != 0
        })
    }

    fn device(&self, device: i32) -> Result<DeviceInfo, Code> {
        let (mut total, mut granularity, mut rdma) = (0usize, 0usize, 0);
        let prop = AllocationProp::on_device(device, false);
        // SAFETY: each call writes one value to the given place and reads the properties.
        unsafe {
            check(real::cuDeviceTotalMem_v2(&mut total, device))?;
            check(real::cuMemGetAllocationGranularity(&mut granularity, &prop, 0))?;
            if real::cuDeviceGetAttribute(&mut rdma, ATTRIBUTE_RDMA_WITH_VMM, device) != 0 {
                rdma = 0;
            }
        }
        Ok(DeviceInfo { total: total as u64, granularity: granularity as u64, rdma: rdma != 0 })
    }

    fn reserve(&self, size: u64) -> Result<u64, Code> {
        let mut address = 0;
        // SAFETY: writes one value.
        check(unsafe { real::cuMemAddressReserve(&mut address, size as usize, 0, 0, 0) })?;
        Ok(address)
    }

    fn unreserve(&self, address: u64, size: u64) -> Result<(), Code> {
        // SAFETY: plain values, which the driver checks.
        check(unsafe { real::cuMemAddressFree(address, size as usize) })
    }

    fn create(&self, size: u64, prop: &AllocationProp) -> Result<u64, Code> {
        let mut handle = 0;
        // SAFETY: writes one value, reads the properties.
        check(unsafe { real::cuMemCreate(&mut handle, size as usize, prop, 0) })?;
        Ok(handle)
    }

    fn release(&self, handle: u64) -> Result<(), Code> {
        // SAFETY: a handle that the driver gave, released once.
        check(unsafe { real::cuMemRelease(handle) })
    }

    fn map(&self, address: u64, size: u64, offset: u64, handle: u64) -> Result<(), Code> {
        // SAFETY: plain values, which the driver checks.
        check(unsafe { real::cuMemMap(address, size as usize, offset as usize, handle, 0) })
    }

    fn unmap(&self, address: u64, size: u64) -> Result<(), Code> {
        // SAFETY: plain values, which the driver checks.
        check(unsafe { real::cuMemUnmap(address, size as usize) })
    }

    fn set_access(&self, address: u64, size: u64, access: &[Access]) -> Result<(), Code> {
        // SAFETY: reads the descriptors.
        check(unsafe {
            real::cuMemSetAccess(address, size as usize, access.as_ptr(), access.len())
        })
    }

    fn export(&self, handle: u64) -> Result<OwnedFd, Code> {
        let mut fd: RawFd = -1;
        // SAFETY: for this kind of handle the driver writes one file descriptor.
        check(unsafe {
            real::cuMemExportToShareableHandle((&raw mut fd).cast(), handle, HANDLE_POSIX_FD, 0)
        })?;
        // SAFETY: the descriptor is new, and nobody else has it.
        let fd = unsafe { OwnedFd::from_raw_fd(fd) };
        // The program's children must not inherit it. Failing leaves it as the driver made it.
        let _ = rustix::io::fcntl_setfd(&fd, rustix::io::FdFlags::CLOEXEC);
        Ok(fd)
    }

    fn import(&self, fd: BorrowedFd<'_>) -> Result<u64, Code> {
        let mut handle = 0;
        let fd = fd.as_raw_fd() as usize as *mut std::ffi::c_void;
        // SAFETY: writes one value. For this kind of handle the pointer is the descriptor itself.
        check(unsafe { real::cuMemImportFromShareableHandle(&mut handle, fd, HANDLE_POSIX_FD) })?;
        Ok(handle)
    }

    fn is_over(&self, event: u64) -> bool {
        // Others may be capturing, which a question must not end.
        let _relaxed = Relaxed::now();
        // SAFETY: an event of ours, which lives as long as its context.
        unsafe { real::cuEventQuery(event) != ERROR_NOT_READY }
    }
}
