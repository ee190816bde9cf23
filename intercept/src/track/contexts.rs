//! Contexts: which there are, and what goes with them when they go.

use std::ffi::{c_int, c_void};

use super::support::{enter_whole, hold_for, written};
use crate::abi::real;
use crate::abi::types::{Code, SUCCESS};
use crate::log::log;
use crate::state::memory::vmm::Driver;
use crate::state::{contexts, events, gate, memory, recent};
use crate::{usage, watch};

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

/// After a context was destroyed: its allocations and the captures in its streams are gone with it.
fn gone(context: u64) {
    contexts::gone(context);
    usage::context_gone(context);
    gate::end_captures_of(context);
    watch::context_going();
    watch::interrupt::context_gone(context);
    let mut memory = memory::lock();
    for allocation in memory.take_context(context) {
        memory.release(&Driver, allocation);
    }
    drop(memory);
    super::owners::tell_owners();
    events::context_gone(context).into_iter().for_each(super::owners::tell_owner);
}

/// Calls `end`, which gives a device's primary context up, and does what follows. Nobody looks at the context while
/// it goes, and nobody makes it anew before what was in the old one is given back: both have one handle.
fn end_primary(device: i32, reset: bool, end: impl FnOnce() -> Code) -> Code {
    let _inside = enter_whole();
    hold_for(None);
    let primaries = contexts::primaries();
    let context = primaries.active(device);
    recent::forget();
    if reset {
        watch::context_going();
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
        let _primaries = contexts::primaries();
        made(call!(cuDevicePrimaryCtxRetain(context, device)), context, device)
    }
    fn cuCtxDestroy(context: u64) {
        let _inside = enter_whole();
        hold_for(None);
        watch::context_going();
        let code = call!(cuCtxDestroy(context));
        if code == SUCCESS {
            gone(context);
        }
        code
    }
    fn cuCtxDestroy_v2(context: u64) {
        let _inside = enter_whole();
        hold_for(None);
        watch::context_going();
        let code = call!(cuCtxDestroy_v2(context));
        if code == SUCCESS {
            gone(context);
        }
        code
    }
    fn cuCtxDetach(context: u64) {
        let _inside = enter_whole();
        hold_for(None);
        recent::forget();
        let code = call!(cuCtxDetach(context));
        // It goes with its last user, and only the driver knows how many there are.
        if code == SUCCESS && real::with_context(context, || Ok(())).is_err() {
            gone(context);
        }
        code
    }
    // They wait while the gate is closed: the stacks that gpucr takes away meanwhile are none of the program's.
    fn cuCtxGetLimit(value: *mut usize, limit: u32) {
        let _inside = gate::enter();
        call!(cuCtxGetLimit(value, limit))
    }
    fn cuCtxSetLimit(limit: u32, value: usize) {
        let _inside = gate::enter();
        call!(cuCtxSetLimit(limit, value))
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
        hold_for(None);
        let mut context = 0;
        let known = call!(cuCtxFromGreenCtx(&mut context, green)) == SUCCESS;
        recent::forget();
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

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicBool, AtomicI32, AtomicPtr, Ordering};
    use std::sync::mpsc;
    use std::thread;
    use std::time::Duration;

    use super::*;
    use crate::abi::slots::SLOTS;
    use crate::abi::table::index;

    /// State of the stand-in for the driver: how often the primary context is retained, whether its last release is under
    /// way, and whether anybody asked for it then.
    static RETAINED: AtomicI32 = AtomicI32::new(1);
    static GOING: AtomicBool = AtomicBool::new(false);
    static TOUCHED: AtomicBool = AtomicBool::new(false);
    /// Long enough for another thread to come to the context if nothing holds it back.
    const A_WHILE: Duration = Duration::from_millis(300);

    fn touch() {
        TOUCHED.fetch_or(GOING.load(Ordering::SeqCst), Ordering::SeqCst);
    }

    extern "C" fn state(_: i32, flags: *mut u32, active: *mut c_int) -> Code {
        touch();
        // SAFETY: both are places of the caller's.
        unsafe {
            flags.write(0);
            active.write((RETAINED.load(Ordering::SeqCst) > 0).into());
        }
        SUCCESS
    }

    extern "C" fn retain(context: *mut u64, _: i32) -> Code {
        touch();
        RETAINED.fetch_add(1, Ordering::SeqCst);
        // SAFETY: a place of the caller's.
        unsafe { context.write(0x1234) };
        SUCCESS
    }

    extern "C" fn release(_: i32) -> Code {
        touch();
        if RETAINED.load(Ordering::SeqCst) == 1 {
            GOING.store(true, Ordering::SeqCst);
            thread::sleep(A_WHILE);
            GOING.store(false, Ordering::SeqCst);
        }
        RETAINED.fetch_sub(1, Ordering::SeqCst);
        SUCCESS
    }

    #[test]
    fn nobody_looks_at_a_primary_context_that_is_going() {
        const DEVICE: i32 = 0;
        let put = |slot: &AtomicPtr<()>, function: *const ()| {
            slot.store(function.cast_mut(), Ordering::SeqCst);
        };
        put(&SLOTS[index::cuDevicePrimaryCtxGetState], state as *const ());
        put(&SLOTS[index::cuDevicePrimaryCtxRetain], retain as *const ());
        put(&SLOTS[index::cuDevicePrimaryCtxRelease_v2], release as *const ());
        let (ends, ending) = mpsc::channel();
        let program = thread::spawn(move || {
            end_primary(DEVICE, false, || {
                ends.send(()).expect("somebody waits for it");
                release(DEVICE)
            })
        });
        ending.recv().expect("it comes to that");
        assert_eq!(contexts::of_device(DEVICE), None, "it is gone, and not known any more");
        assert_eq!(program.join().expect("no panic"), SUCCESS);
        assert!(!TOUCHED.load(Ordering::SeqCst), "it was touched while it went");
        assert_eq!(RETAINED.load(Ordering::SeqCst), 0);
    }
}
