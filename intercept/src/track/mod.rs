//! The functions that change what the shim keeps in its tables, each with the signature that the
//! driver gives it. Those that touch device memory enter the gate first.

use crate::access::guard;
use crate::driver::{Code, ERROR_INVALID_VALUE, SUCCESS};
use crate::gate::{self, Inside};

/// Exported functions. A mistake of ours that panics becomes an error of the call: unwinding must
/// not reach the program. Nor must that of a thread that is cancelled reach what catches it here.
macro_rules! exported {
    ($(fn $name:ident($($argument:ident: $type:ty),* $(,)?) $body:block)*) => {$(
        #[unsafe(no_mangle)]
        #[allow(non_snake_case, clippy::too_many_arguments)]
        pub(crate) unsafe extern "C" fn $name($($argument: $type),*) -> $crate::driver::Code {
            let _uncancelled = $crate::cancel::not_now();
            let body = move || -> $crate::driver::Code { $body };
            let code = std::panic::catch_unwind(std::panic::AssertUnwindSafe(body))
                .unwrap_or($crate::driver::ERROR_UNKNOWN);
            if code != $crate::driver::SUCCESS && $crate::gate::is_watching() {
                return $crate::access::faults::look(code);
            }
            code
        }
    )*};
}

/// Calls a real function with the program's own arguments.
macro_rules! call {
    ($name:ident($($argument:expr),* $(,)?)) => {{
        // SAFETY: the arguments are those that the program gave to the function of this name, or
        // values of ours in place of handles of ours.
        unsafe { $crate::real::$name($($argument),*) }
    }};
}

mod contexts;
mod counted;
mod heap;
mod streams;
mod unloads;
mod uses;
mod vmm;

pub(crate) use crate::resolver::{cuGetProcAddress, cuGetProcAddress_v2};
pub(crate) use contexts::*;
pub(crate) use counted::*;
pub(crate) use heap::*;
pub(crate) use streams::*;
pub(crate) use unloads::*;
pub(crate) use uses::*;
pub(crate) use vmm::*;

exported! {
    fn cuInit(flags: u32) {
        let code = call!(cuInit(flags));
        if code == SUCCESS {
            crate::agent::start();
        }
        code
    }
}

/// Passes the gate with a call that is about memory as such: all of it is there afterwards.
fn enter_whole() -> Inside {
    let inside = gate::enter();
    guard::wait_for_awaited();
    inside
}

/// The same for a call that is about the memory at `address`.
fn enter_at(address: u64) -> Inside {
    let inside = gate::enter();
    guard::wait_for_awaited_at(address);
    inside
}

/// Writes a result where the program wants it.
fn put<T>(out: *mut T, result: Result<T, Code>) -> Code {
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
fn written<T: Copy + Default>(out: *const T) -> T {
    if out.is_null() {
        return T::default();
    }
    // SAFETY: not null, and the driver has just written there.
    unsafe { out.read() }
}
