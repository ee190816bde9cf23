//! Contexts: which there are, and what goes with them when they go.

use std::ffi::{c_int, c_void};

use super::{enter_whole, written};
use crate::driver::{Code, SUCCESS};
use crate::log::log;
use crate::memory::vmm::Driver;
use crate::{access, contexts, memory, real, usage};

/// After a context of `device` was made.
fn made(code: Code, context: *const u64, device: i32) -> Code {
    if code == SUCCESS {
        contexts::seen(written(context), device);
    }
    code
}

/// After a context became current.
fn current(code: Code, context: u64) -> Code {
    if code == SUCCESS {
        contexts::became_current(context);
    }
    code
}

/// After a context was destroyed: its allocations are gone with it.
fn gone(context: u64) {
    contexts::gone(context);
    usage::context_gone(context);
    access::context_going();
    let mut memory = memory::lock();
    for allocation in memory.take_context(context) {
        memory.release(&Driver, allocation);
    }
}

/// Calls `end`, which gives a device's primary context up, and does what follows.
fn end_primary(device: i32, reset: bool, end: impl FnOnce() -> Code) -> Code {
    let _inside = enter_whole();
    let context = contexts::active_primary(device);
    if reset {
        access::context_going();
    }
    let code = end();
    if code == SUCCESS
        && let Some(context) = context
        && (reset || !is_active(device))
    {
        gone(context);
    }
    code
}

fn is_active(device: i32) -> bool {
    let (mut flags, mut active) = (0, 0);
    // SAFETY: writes two values.
    let code = unsafe { real::cuDevicePrimaryCtxGetState(device, &mut flags, &mut active) };
    code == SUCCESS && active != 0
}

/// Follows peer access between the current device and that of `peer`.
fn peer(peer: u64, open: bool) {
    let Ok((_, device)) = real::current_context() else { return };
    let owner = real::with_context(peer, || real::current_context().map(|(_, device)| device));
    let result = owner.and_then(|owner| memory::lock().set_peer(&Driver, owner, device, open));
    if let Err(code) = result {
        log!("peer access of device {device}: error {code}");
    }
}

exported! {
    fn cuCtxCreate(context: *mut u64, flags: u32, device: i32) {
        made(call!(cuCtxCreate(context, flags, device)), context, device)
    }
    fn cuCtxCreate_v2(context: *mut u64, flags: u32, device: i32) {
        made(call!(cuCtxCreate_v2(context, flags, device)), context, device)
    }
    fn cuCtxCreate_v3(
        context: *mut u64, params: *mut c_void, count: c_int, flags: u32, device: i32,
    ) {
        made(call!(cuCtxCreate_v3(context, params, count, flags, device)), context, device)
    }
    fn cuCtxCreate_v4(context: *mut u64, params: *mut c_void, flags: u32, device: i32) {
        made(call!(cuCtxCreate_v4(context, params, flags, device)), context, device)
    }
    fn cuDevicePrimaryCtxRetain(context: *mut u64, device: i32) {
        made(call!(cuDevicePrimaryCtxRetain(context, device)), context, device)
    }
    fn cuCtxDestroy(context: u64) {
        let _inside = enter_whole();
        access::context_going();
        let code = call!(cuCtxDestroy(context));
        if code == SUCCESS {
            gone(context);
        }
        code
    }
    fn cuCtxDestroy_v2(context: u64) {
        let _inside = enter_whole();
        access::context_going();
        let code = call!(cuCtxDestroy_v2(context));
        if code == SUCCESS {
            gone(context);
        }
        code
    }
    fn cuCtxDetach(context: u64) {
        let _inside = enter_whole();
        let code = call!(cuCtxDetach(context));
        // It goes with its last user, and only the driver knows how many there are.
        if code == SUCCESS && real::with_context(context, || Ok(())).is_err() {
            gone(context);
        }
        code
    }
    fn cuCtxSetCurrent(context: u64) {
        current(call!(cuCtxSetCurrent(context)), context)
    }
    fn cuCtxPushCurrent(context: u64) {
        current(call!(cuCtxPushCurrent(context)), context)
    }
    fn cuCtxPushCurrent_v2(context: u64) {
        current(call!(cuCtxPushCurrent_v2(context)), context)
    }
    fn cuCtxFromGreenCtx(context: *mut u64, green: u64) {
        let code = call!(cuCtxFromGreenCtx(context, green));
        if code == SUCCESS {
            let context = written(context);
            let device = real::with_context(context, || real::current_context().map(|c| c.1));
            if let Ok(device) = device {
                contexts::seen(context, device);
            }
        }
        code
    }
    fn cuGreenCtxDestroy(green: u64) {
        let _inside = enter_whole();
        let mut context = 0;
        let known = call!(cuCtxFromGreenCtx(&mut context, green)) == SUCCESS;
        let code = call!(cuGreenCtxDestroy(green));
        if code == SUCCESS && known {
            gone(context);
        }
        code
    }
    fn cuDevicePrimaryCtxRelease(device: i32) {
        end_primary(device, false, || call!(cuDevicePrimaryCtxRelease(device)))
    }
    fn cuDevicePrimaryCtxRelease_v2(device: i32) {
        end_primary(device, false, || call!(cuDevicePrimaryCtxRelease_v2(device)))
    }
    fn cuDevicePrimaryCtxReset(device: i32) {
        end_primary(device, true, || call!(cuDevicePrimaryCtxReset(device)))
    }
    fn cuDevicePrimaryCtxReset_v2(device: i32) {
        end_primary(device, true, || call!(cuDevicePrimaryCtxReset_v2(device)))
    }
    fn cuCtxEnablePeerAccess(other: u64, flags: u32) {
        let _inside = enter_whole();
        let code = call!(cuCtxEnablePeerAccess(other, flags));
        if code == SUCCESS {
            peer(other, true);
        }
        code
    }
    fn cuCtxDisablePeerAccess(other: u64) {
        let _inside = enter_whole();
        let code = call!(cuCtxDisablePeerAccess(other));
        if code == SUCCESS {
            peer(other, false);
        }
        code
    }
}
