//! What the functions have in common: how they pass the gate, and how results get to the program.

use crate::abi::real;
use crate::abi::types::{Code, ERROR_INVALID_VALUE, SUCCESS};
use crate::state::contexts;
use crate::state::gate::{self, Inside};
use crate::watch::guard;
use crate::watch::interrupt::{self, Patience};

/// Passes the gate with a call that is about memory as such: all of it is there afterwards.
pub(super) fn enter_whole() -> Inside {
    let inside = gate::enter();
    guard::wait_for_awaited();
    inside
}

/// Enters the gate once the memory at `address` is there, for a call that is about it.
pub(super) fn enter_at(address: u64) -> Inside {
    let inside = gate::enter();
    guard::wait_for_awaited_at(address);
    inside
}

/// Waits for launches that can be interrupted, and that come before work in this stream, `None` for all. The caller is
/// inside the gate, or does not pass it.
pub(super) fn hold_for(stream: Option<u64>) {
    if gate::is_holding() {
        interrupt::hold(stream, Patience::Limited);
    }
}

/// Waits for all launches that can be interrupted, for a call that waits for all work of a context itself.
pub(super) fn hold_for_context(context: u64) {
    if gate::is_holding() {
        interrupt::hold(None, Patience::ForContext(context));
    }
}

/// Waits for all work on a device, in whichever of the program's contexts.
///
/// # Errors
/// The driver's first code; the other contexts are waited for all the same.
pub(super) fn synchronize_device(device: i32) -> Result<(), Code> {
    let contexts = contexts::all().into_iter().filter(|(_, of)| *of == device);
    contexts.map(|(context, _)| real::synchronize(context)).fold(Ok(()), Result::and)
}

/// Writes a result where the program wants it.
pub(super) fn put<T>(out: *mut T, result: Result<T, Code>) -> Code {
    match result {
        Ok(value) if !out.is_null() => {
            // SAFETY: not null, and by the function's contract a place for such a value.
            unsafe { out.write(value) };
            SUCCESS
        }
        Ok(_) => ERROR_INVALID_VALUE,
        Err(code) => code,
    }
}

/// Reads what the driver has just written for the program.
pub(super) fn written<T: Copy + Default>(out: *const T) -> T {
    if out.is_null() {
        return T::default();
    }
    // SAFETY: not null, and the driver has just written there.
    unsafe { out.read() }
}
