//! Pinned host memory.

use super::arguments::{Address, Out};
use super::driver_api;
use crate::capture;
use crate::context;
use crate::host_memory;
use crate::status::{Code, Outcome};

/// `CU_MEMHOSTALLOC_PORTABLE`, also of registrations.
const PORTABLE: u32 = 1;
/// `CU_MEMHOSTALLOC_DEVICEMAP`, also of registrations.
const DEVICE_MAP: u32 = 2;
/// Those two and `CU_MEMHOSTALLOC_WRITECOMBINED`.
const ALLOCATION_FLAGS: u32 = PORTABLE | DEVICE_MAP | 4;
/// Those two and `CU_MEMHOSTREGISTER_READ_ONLY`; not `_IOMEMORY`.
const REGISTRATION_FLAGS: u32 = PORTABLE | DEVICE_MAP | 8;

fn allocate(out: &Out<u64>, size: usize, flags: u32) -> Outcome {
    out.check()?;
    if flags & !ALLOCATION_FLAGS != 0 {
        return Err(Code::INVALID_VALUE);
    }
    let context = context::current()?;
    capture::refuse_unsafe()?;
    out.set(host_memory::allocate(context.handle, size as u64, flags)?)
}

fn register(address: u64, size: usize, flags: u32) -> Outcome {
    let context = context::current()?;
    capture::refuse_unsafe()?;
    if flags & !REGISTRATION_FLAGS != 0 {
        return Err(Code::NOT_SUPPORTED);
    }
    host_memory::register(context.handle, address, size as u64, flags)
}

driver_api! {

    call fn cuMemAllocHost_v2(out: Out<u64>, size: usize) {
        allocate(&out, size, 0)
    }

    call fn cuMemHostAlloc(out: Out<u64>, size: usize, flags: u32) {
        allocate(&out, size, flags)
    }

    call fn cuMemFreeHost(address: Address) {
        context::current()?;
        // As of driver 590 on an RTX 4090 (lupinemachines/lupine, issue 850).
        if address.0 == 0 {
            return Ok(());
        }
        capture::refuse_unsafe()?;
        if !host_memory::find(address.0).is_some_and(|m| m.allocated) {
            return Err(Code::INVALID_VALUE);
        }
        context::wait_everything();
        host_memory::free(address.0)
    }


    call fn cuMemHostRegister_v2(address: Address, size: usize, flags: u32) {
        register(address.0, size, flags)
    }

    call fn cuMemHostUnregister(address: Address) {
        context::current()?;
        capture::refuse_unsafe()?;
        context::wait_everything();
        host_memory::unregister(address.0)
    }

    call fn cuMemHostGetDevicePointer_v2(out: Out<u64>, address: Address, flags: u32) {
        context::current()?;
        if flags != 0 || host_memory::find(address.0).is_none() {
            return Err(Code::INVALID_VALUE);
        }
        out.set(address.0)
    }

    call fn cuMemHostGetFlags(out: Out<u32>, address: Address) {
        let memory = host_memory::find(address.0).ok_or(Code::INVALID_VALUE)?;
        // All pinned memory is mapped for the device under unified addressing. It is also portable whether or not the
        // program says so, and a GPU (driver 580.159.04) does not tell who did.
        out.set(memory.flags & !PORTABLE | DEVICE_MAP)
    }
}
