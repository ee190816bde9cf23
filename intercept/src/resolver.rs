//! `cuGetProcAddress`: how most programs find the driver's functions.
//!
//! The real resolver is asked first: it alone knows which version of a function belongs to the
//! caller's name, version and flags. Its answer is replaced only if it is the address of a
//! function that this library wraps. That deals with all versions and per-thread-stream forms
//! without a second list, and leaves alone what this library has never heard of.

use std::collections::{HashMap, HashSet};
use std::ffi::{CStr, c_char, c_int};
use std::sync::OnceLock;

use crate::log::log;
use crate::real;
use crate::table::{NAMES, WRAPPED, Wrapper};
use crate::usage;

/// Addresses of real functions.
struct Known {
    /// Those of functions that are wrapped, and what is given out instead.
    wrapped: HashMap<usize, *const ()>,
    /// All that are exported.
    exported: HashSet<usize>,
}

// SAFETY: the pointers are addresses of functions.
unsafe impl Send for Known {}
// SAFETY: as above.
unsafe impl Sync for Known {}

fn known() -> &'static Known {
    static KNOWN: OnceLock<Known> = OnceLock::new();
    KNOWN.get_or_init(|| {
        let address = |name: &CStr| {
            real::library().and_then(|library| library.symbol(name)).map(|a| a as usize)
        };
        let wrapped = |wrapper: &Wrapper| Some((address(NAMES[wrapper.0])?, wrapper.1));
        Known {
            wrapped: WRAPPED.iter().filter_map(wrapped).collect(),
            exported: NAMES.iter().filter_map(|name| address(name)).collect(),
        }
    })
}

/// What to hand out in place of the real function at `address`.
fn replacement(symbol: &CStr, address: *const ()) -> *const () {
    let known = known();
    if let Some(ours) = known.wrapped.get(&(address as usize)) {
        return *ours;
    }
    if !known.exported.contains(&(address as usize)) {
        // A driver newer than the table. If it is another version of a function that is wrapped
        // here, calls of it pass by the gate: a dump has to know.
        let wrapped = WRAPPED.iter().map(|wrapper| NAMES[wrapper.0]).find(|name| *name == symbol);
        log!("not in the table: {} (wrapped: {})", symbol.to_string_lossy(), wrapped.is_some());
        if let Some(name) = wrapped.and_then(|name| name.to_str().ok()) {
            usage::record(name);
        }
    }
    address
}

macro_rules! resolve {
    ($real:ident, $symbol:ident, $out:ident, ($($argument:expr),*)) => {{
        // SAFETY: the program's own arguments.
        let code = unsafe { real::$real($($argument),*) };
        if code == 0 && !$out.is_null() && !$symbol.is_null() {
            // SAFETY: on success the symbol is a C string, and the result has been written.
            unsafe {
                let found = $out.read();
                if !found.is_null() {
                    $out.write(replacement(CStr::from_ptr($symbol), found));
                }
            }
        }
        code
    }};
}

/// The first form, without a status.
#[unsafe(no_mangle)]
#[allow(non_snake_case)]
pub(crate) unsafe extern "C" fn cuGetProcAddress(
    symbol: *const c_char,
    out: *mut *const (),
    version: c_int,
    flags: u64,
) -> u32 {
    resolve!(cuGetProcAddress, symbol, out, (symbol, out, version, flags))
}

/// The form with a status.
#[unsafe(no_mangle)]
#[allow(non_snake_case)]
pub(crate) unsafe extern "C" fn cuGetProcAddress_v2(
    symbol: *const c_char,
    out: *mut *const (),
    version: c_int,
    flags: u64,
    status: *mut c_int,
) -> u32 {
    resolve!(cuGetProcAddress_v2, symbol, out, (symbol, out, version, flags, status))
}
