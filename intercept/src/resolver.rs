//! `cuGetProcAddress`: how most programs find the driver's functions.
//!
//! The real resolver is asked first: it alone knows which version of a function belongs to the
//! caller's name, version and flags. Its answer is replaced if it is the address of a function that
//! this library replaces: one that it wraps, or one whose slot leads elsewhere at times. That deals
//! with all versions and per-thread-stream forms without a second list. For what this library has never
//! heard of the program gets a stub, which tells if it is called.

use std::collections::{HashMap, HashSet};
use std::ffi::{CStr, c_char, c_int};
use std::sync::OnceLock;

use crate::abi::table::{COUNT, Wrapper};
use crate::abi::{library, real};
use crate::unknown;

/// Addresses of real functions.
struct RealFunctions {
    /// Addresses of functions that are replaced, and what is given out instead.
    replaced: HashMap<usize, *const ()>,
    /// Addresses of all functions that are in the table.
    tabled: HashSet<usize>,
}

// SAFETY: the pointers are addresses of functions.
unsafe impl Send for RealFunctions {}
// SAFETY: the pointers are addresses of functions.
unsafe impl Sync for RealFunctions {}

fn real_functions() -> &'static RealFunctions {
    static FUNCTIONS: OnceLock<RealFunctions> = OnceLock::new();
    FUNCTIONS.get_or_init(|| {
        let library = library::library();
        let function = |index| library?.function(index);
        let replaced = |Wrapper(index, ours): &Wrapper| Some((function(*index)? as usize, *ours));
        RealFunctions {
            replaced: library.iter().flat_map(|l| &l.replaced).filter_map(replaced).collect(),
            tabled: (0..COUNT).filter_map(function).map(|function| function as usize).collect(),
        }
    })
}

/// What to hand out in place of the real function at `address`, which the driver has for this name and version.
fn replacement(symbol: &CStr, version: c_int, address: *const ()) -> *const () {
    let known = real_functions();
    if let Some(ours) = known.replaced.get(&(address as usize)) {
        return *ours;
    }
    if known.tabled.contains(&(address as usize)) {
        return address;
    }
    unknown::stand_in(symbol, version, address)
}

macro_rules! resolve {
    ($real:ident, $symbol:ident, $out:ident, $version:ident, ($($argument:expr),*)) => {{
        // SAFETY: the program's own arguments.
        let code = unsafe { real::$real($($argument),*) };
        if code == 0 && !$out.is_null() && !$symbol.is_null() {
            // SAFETY: on success the symbol is a C string, and the result has been written.
            unsafe {
                let found = $out.read();
                if !found.is_null() {
                    $out.write(replacement(CStr::from_ptr($symbol), $version, found));
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
    resolve!(cuGetProcAddress, symbol, out, version, (symbol, out, version, flags))
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
    resolve!(cuGetProcAddress_v2, symbol, out, version, (symbol, out, version, flags, status))
}
