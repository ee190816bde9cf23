//! The exported functions, generated from `driver.table`, and how a slot finds its target.
//!
//! A forwarded function is one instruction: a jump through its slot. Slots start out pointing at
//! stubs which look the real function up on the first call, because nothing may run before the
//! program's own code (a constructor that loads a driver would do that).

use std::arch::naked_asm;
use std::ffi::CStr;
use std::sync::atomic::{AtomicPtr, Ordering};

use crate::driver::{ERROR_NO_DEVICE, ERROR_NOT_FOUND};
use crate::library;

/// Position of a function in the table, and what is put in its place.
pub(crate) struct Wrapper(pub(crate) usize, pub(crate) *const ());

// SAFETY: the pointer is the address of a function.
unsafe impl Sync for Wrapper {}

/// The exported function: one jump, all registers and the stack as the caller left them.
macro_rules! forward {
    ($name:ident, $index:literal) => {
        #[unsafe(naked)]
        #[unsafe(no_mangle)]
        #[allow(non_snake_case)]
        pub(crate) unsafe extern "C" fn $name() {
            naked_asm!(
                "jmp qword ptr [rip + {slots} + {offset}]",
                slots = sym SLOTS,
                offset = const 8 * $index,
            )
        }
    };
}

/// The first target of a slot.
macro_rules! stub {
    ($name:ident, $index:literal) => {
        #[unsafe(naked)]
        unsafe extern "C" fn $name() {
            naked_asm!(
                "mov r11d, {index}",
                "jmp {resolve}",
                index = const $index,
                resolve = sym resolve_and_jump,
            )
        }
    };
}

/// A function that enters the gate around the real call. The arguments are passed on as integer
/// slots, whatever their types: see the head of the table.
macro_rules! gate {
    ($name:ident, $index:literal, $($rest:tt)*) => {
        wrapped!($name, $index, crate::gate::enter(), |_| (), $($rest)*);
    };
}

/// The same for a copy or fill that is to be done when it comes back, where the program wants it to be.
macro_rules! sync {
    ($name:ident, $index:literal, $form:ident none, $stream:literal, $($argument:ident)*) => {
        #[unsafe(no_mangle)]
        #[allow(non_snake_case, clippy::too_many_arguments)]
        pub(crate) unsafe extern "C-unwind" fn $name($($argument: integer!($argument)),*) -> u32 {
            let inside = crate::gate::enter();
            before!($form, $($argument)*);
            // SAFETY: as below.
            let result = unsafe { real!($index, $($argument)*) };
            if result != 0 && crate::gate::is_watching() {
                crate::access::faults::look(result);
            }
            drop(inside);
            if result == 0 && crate::synchronous::is_wanted() {
                let form = crate::access::forms::$form;
                return crate::synchronous::finish(form, &[$($argument),*], $stream);
            }
            result
        }
    };
}

/// The same for a launch, which is noted.
macro_rules! launch {
    ($name:ident, $index:literal, $form:ident $then:ident, $($argument:ident)*) => {
        wrapped!(
            $name,
            $index,
            {
                let inside = crate::gate::enter_launch();
                let per_thread = stringify!($name).ends_with("_ptsz");
                crate::recent::$form(&[$($argument),*], per_thread);
                inside
            },
            |_| (),
            $form $then, $($argument)*
        );
    };
}

/// The same for a function that the driver's checkpoint cannot stand.
macro_rules! note {
    ($name:ident, $index:literal, $($rest:tt)*) => {
        wrapped!(
            $name,
            $index,
            crate::gate::enter(),
            |result| if result == 0 { crate::usage::record(stringify!($name)) },
            $($rest)*
        );
    };
}

/// A function that is followed, and does not enter the gate.
macro_rules! watch {
    ($name:ident, $index:literal, $($rest:tt)*) => {
        wrapped!($name, $index, (), |_| (), $($rest)*);
    };
}

/// Before the call its arguments are shown to the first form, if launches are recorded or have to wait;
/// after it to the second one. A thread that is cancelled in the driver's function is unwound through this one,
/// and leaves the gate.
macro_rules! wrapped {
    (
        $name:ident, $index:literal, $enter:expr, $after:expr,
        $before:ident $then:ident, $($argument:ident)*
    ) => {
        #[unsafe(no_mangle)]
        #[allow(non_snake_case, clippy::too_many_arguments, clippy::let_unit_value)]
        pub(crate) unsafe extern "C-unwind" fn $name($($argument: integer!($argument)),*) -> u32 {
            let _inside = $enter;
            before!($before, $($argument)*);
            // SAFETY: a slot holds a function of the driver (or its stub), which takes these
            // integer slots and returns a CUresult.
            let result = unsafe { real!($index, $($argument)*) };
            let after: fn(u32) = $after;
            after(result);
            if result != 0 && crate::gate::is_watching() {
                crate::access::faults::look(result);
            }
            then!($then, result, $($argument)*);
            result
        }
    };
}

/// Calls the function in a slot with integers.
macro_rules! real {
    ($index:literal, $($argument:ident)*) => {{
        let target = SLOTS[$index].load(Ordering::Relaxed);
        let real: unsafe extern "C-unwind" fn($(integer!($argument)),*) -> u32 =
            std::mem::transmute(target);
        real($($argument),*)
    }};
}

macro_rules! before {
    (none, $($argument:ident)*) => {};
    (unknown, $($argument:ident)*) => {
        if crate::gate::is_watching() {
            crate::access::before_unknown();
        }
    };
    ($form:ident, $($argument:ident)*) => {
        if crate::gate::is_watching() {
            crate::access::before(crate::access::forms::$form, &[$($argument),*]);
        }
    };
}

macro_rules! then {
    (none, $result:ident, $($argument:ident)*) => {};
    ($form:ident, $result:ident, $($argument:ident)*) => {
        crate::access::after(crate::access::forms::$form, &[$($argument),*], $result);
    };
}

macro_rules! integer {
    ($argument:ident) => {
        usize
    };
}

include!(concat!(env!("OUT_DIR"), "/table.rs"));

/// A naked function that calls `$callee` with what is in `r11`, and goes on to the address that it gives as if
/// nothing had happened: arguments and stack are as they were.
macro_rules! call_and_jump {
    ($(#[$doc:meta])* $name:ident = $callee:ident) => {
        $(#[$doc])*
        #[unsafe(naked)]
        unsafe extern "C" fn $name() {
            std::arch::naked_asm!(
                "push rdi",
                "push rsi",
                "push rdx",
                "push rcx",
                "push r8",
                "push r9",
                // `al` counts vector registers in a variadic call. Seven pushes and the return address
                // leave the stack on a multiple of 16, as the call below needs it.
                "push rax",
                "sub rsp, 128",
                "movdqu [rsp], xmm0",
                "movdqu [rsp + 16], xmm1",
                "movdqu [rsp + 32], xmm2",
                "movdqu [rsp + 48], xmm3",
                "movdqu [rsp + 64], xmm4",
                "movdqu [rsp + 80], xmm5",
                "movdqu [rsp + 96], xmm6",
                "movdqu [rsp + 112], xmm7",
                "mov rdi, r11",
                "call {callee}",
                "mov r11, rax",
                "movdqu xmm0, [rsp]",
                "movdqu xmm1, [rsp + 16]",
                "movdqu xmm2, [rsp + 32]",
                "movdqu xmm3, [rsp + 48]",
                "movdqu xmm4, [rsp + 64]",
                "movdqu xmm5, [rsp + 80]",
                "movdqu xmm6, [rsp + 96]",
                "movdqu xmm7, [rsp + 112]",
                "add rsp, 128",
                "pop rax",
                "pop r9",
                "pop r8",
                "pop rcx",
                "pop rdx",
                "pop rsi",
                "pop rdi",
                "jmp r11",
                callee = sym $callee,
            )
        }
    };
}
pub(crate) use call_and_jump;

call_and_jump! {
    /// Looks up the function whose position is in `r11`, and goes on to it.
    resolve_and_jump = resolve
}

/// Fills the slot `index` with the driver's function and returns that.
pub(crate) extern "C" fn resolve(index: u32) -> *const () {
    let index = index as usize;
    let target = match library::library() {
        Some(library) => library.function(index).unwrap_or(missing_function as *const ()),
        None => no_driver as *const (),
    };
    SLOTS[index].store(target.cast_mut(), Ordering::Relaxed);
    target
}

/// Stands in for a function that the real driver is too old to have.
extern "C" fn missing_function() -> u32 {
    ERROR_NOT_FOUND
}

/// Stands in for everything where there is no driver library at all.
extern "C" fn no_driver() -> u32 {
    ERROR_NO_DEVICE
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_table_is_sorted_and_complete() {
        assert_eq!(COUNT, 733);
        assert!(NAMES.windows(2).all(|pair| pair[0] < pair[1]), "sorted, no name twice");
        assert_eq!(NAMES[index::cuInit], c"cuInit");
    }

    #[test]
    fn wrappers_are_in_order_and_distinct() {
        assert!(WRAPPED.windows(2).all(|pair| pair[0].0 < pair[1].0));
        let mut addresses: Vec<_> = WRAPPED.iter().map(|w| w.1 as usize).collect();
        addresses.sort_unstable();
        let before = addresses.len();
        addresses.dedup();
        // Functions with identical code may be merged, which would make them one address; the
        // gate wrappers all load different slots.
        assert_eq!(addresses.len(), before);
    }
}
