//! Memory shared between processes through IPC handles.

use cudarc::driver::sys;

use super::arguments::Out;
use super::driver_api;
use crate::context;
use crate::device_memory;
use crate::ipc::{self, Handle};
use crate::status::{Code, Outcome};

/// `CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS`, which the API demands.
const LAZY_PEER_ACCESS: u32 = 1;

const _: () = assert!(size_of::<Handle>() == size_of::<sys::CUipcMemHandle>());

fn open(out: &Out<u64>, handle: &Handle, flags: u32) -> Outcome {
    out.check()?;
    let context = context::current()?;
    if flags != LAZY_PEER_ACCESS {
        return Err(Code::INVALID_VALUE);
    }
    out.set(ipc::open(handle, context.handle)?)
}

driver_api! {
    call fn cuIpcGetMemHandle(out: Out<Handle>, address: u64) {
        out.check()?;
        context::current()?;
        let shared = context::while_idle(|| device_memory::share(address))?;
        out.set(ipc::handle(&shared, 0))
    }

    call fn cuIpcOpenMemHandle(out: Out<u64>, handle: Handle, flags: u32) {
        open(&out, &handle, flags)
    }

    call fn cuIpcOpenMemHandle_v2(out: Out<u64>, handle: Handle, flags: u32) {
        open(&out, &handle, flags)
    }

    call fn cuIpcCloseMemHandle(address: u64) {
        context::current()?;
        if ipc::find(address)
            .is_none_or(|opened| opened.address != address || opened.context == ipc::OF_POOL)
        {
            return Err(Code::INVALID_VALUE);
        }
        context::wait_everything();
        ipc::close(address)
    }
}
