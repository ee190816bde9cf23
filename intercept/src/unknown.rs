//! Functions of a driver that is newer than the table: nothing is known of what they take and do.
//!
//! The program gets a stub that jumps on to the driver's function, all registers and the stack as the
//! caller left them. A call cannot be blocked inside the gate, since nothing would tell when it returns. So the
//! stub passes the gate and leaves it again, and notes within it that the function has been called: from
//! then on no dump closes the gate, and it is said by name why. That a program has asked for a function says
//! nothing: the CUDA runtime asks for all that it may ever need.

use std::arch::naked_asm;
use std::ffi::{CStr, c_int};
use std::ptr;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicBool, AtomicPtr, Ordering};

use crate::abi::slots::call_and_jump;
use crate::log::log;
use crate::state::gate;
use crate::watch;

/// How many functions can be told apart. Those beyond count as called at once.
const STUBS: usize = 512;
/// Bytes from one stub to the next.
const STRIDE: usize = 16;
/// Longer than the name of any function of the driver.
const LONGEST: usize = 100;

struct Function {
    /// The driver's function; null as long as there is none.
    address: AtomicPtr<()>,
    name: OnceLock<String>,
    called: AtomicBool,
}

static FUNCTIONS: [Function; STUBS] = [const {
    Function {
        address: AtomicPtr::new(ptr::null_mut()),
        name: OnceLock::new(),
        called: AtomicBool::new(false),
    }
}; STUBS];

/// For what found no stub.
static REST: Function = Function {
    address: AtomicPtr::new(ptr::null_mut()),
    name: OnceLock::new(),
    called: AtomicBool::new(false),
};

/// What the program gets for the driver's function at `address`, which it has asked for by `symbol`, as of
/// `version` of the API.
pub(crate) fn stand_in(symbol: &CStr, version: c_int, address: *const ()) -> *const () {
    let named = || describe(symbol, version);
    for (number, function) in FUNCTIONS.iter().enumerate() {
        let (free, ours) = (ptr::null_mut(), address.cast_mut());
        let taken =
            function.address.compare_exchange(free, ours, Ordering::SeqCst, Ordering::SeqCst);
        if taken.is_ok() || taken == Err(ours) {
            let name = function.name.get_or_init(named);
            if taken.is_ok() {
                log!("not in the table: {name}");
            }
            return (stubs as *const ()).wrapping_byte_add(number * STRIDE);
        }
    }
    REST.name.get_or_init(named);
    REST.called.store(true, Ordering::SeqCst);
    address
}

/// The functions that have been called, each with its name and the version of CUDA that it was asked for.
pub(crate) fn called() -> impl Iterator<Item = &'static str> {
    let called = |function: &&Function| function.called.load(Ordering::SeqCst);
    FUNCTIONS.iter().chain([&REST]).filter(called).filter_map(|function| {
        let name = function.name.get()?;
        Some(name.as_str())
    })
}

/// The version is part of the name: there may be an older entry that the table knows.
fn describe(symbol: &CStr, version: c_int) -> String {
    let plain = |byte: &u8| byte.is_ascii_alphanumeric() || *byte == b'_';
    let name: String = symbol
        .to_bytes()
        .iter()
        .take(LONGEST)
        .take_while(|b| plain(b))
        .map(|b| char::from(*b))
        .collect();
    format!("{name} (CUDA {}.{})", version / 1000, version % 1000 / 10)
}

/// The stubs, one every [`STRIDE`] bytes. Each tells by its place which one it is.
#[unsafe(naked)]
unsafe extern "C" fn stubs() {
    naked_asm!(
        ".rept {stubs}",
        "2:",
        "lea r11, [rip + 2b]",
        "jmp {call}",
        ".org 2b + {stride}, 0xcc",
        ".endr",
        stubs = const STUBS,
        stride = const STRIDE,
        call = sym note_and_jump,
    )
}

call_and_jump! {
    /// Notes the call of the stub whose address is in `r11`, and goes on to the driver's function.
    note_and_jump = note
}

/// The function behind the stub at this address; it counts as called.
extern "C" fn note(stub: usize) -> *const () {
    let function = &FUNCTIONS[(stub - stubs as *const () as usize) / STRIDE];
    let inside = gate::enter();
    function.called.store(true, Ordering::SeqCst);
    if gate::is_watching() {
        watch::before_unknown();
    }
    drop(inside);
    function.address.load(Ordering::Relaxed)
}

/// Forgets what was called, in the child of a fork.
pub(crate) fn reset() {
    for function in FUNCTIONS.iter().chain([&REST]) {
        function.called.store(false, Ordering::SeqCst);
    }
}
