//! The exported functions that are made from `driver.table`, and the list of all that this library replaces.

use std::arch::naked_asm;
use std::sync::atomic::Ordering;

use crate::abi::slots::SLOTS;
use crate::abi::table::{COUNT, Wrapper};
use crate::watch::faults;

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

/// A function that enters the gate around the real call. The arguments are passed on as integer
/// slots, whatever their types: see the head of the table.
macro_rules! gate {
    ($name:ident, $index:literal, $($rest:tt)*) => {
        wrapped!($name, $index, crate::state::gate::enter(), |_| (), $($rest)*);
    };
}

/// A gated copy or fill that is to be done when it comes back, where the program wants it to be.
macro_rules! sync {
    ($name:ident, $index:literal, $decoder:ident none, $stream:literal, $($argument:ident)*) => {
        #[unsafe(no_mangle)]
        #[allow(non_snake_case, clippy::too_many_arguments)]
        pub(crate) unsafe extern "C-unwind" fn $name($($argument: integer!($argument)),*) -> u32 {
            let inside = crate::state::gate::enter();
            if crate::state::gate::is_watching() {
                const WAITS: bool = is_awaited(stringify!($name));
                let decoder = crate::calls::$decoder;
                crate::watch::before_synchronous(decoder, &[$($argument),*], WAITS);
            }
            // SAFETY: a slot holds a function of the driver (or its stub), which takes these integer slots.
            let result = unsafe { real!($index, $($argument)*) };
            if result != 0 && crate::watch::faults::is_wanted() {
                crate::watch::faults::look(result);
            }
            drop(inside);
            let result = if result == 0 && crate::watch::synchronous::is_wanted() {
                let decoder = crate::calls::$decoder;
                crate::watch::synchronous::finish(decoder, &[$($argument),*], $stream)
            } else {
                result
            };
            if result == 0 && crate::watch::meeting::is_awaited() {
                crate::watch::meeting::come_back();
            }
            result
        }
    };
}

/// A gated launch, which is noted.
macro_rules! launch {
    ($name:ident, $index:literal, $decoder:ident $then:ident, $($argument:ident)*) => {
        wrapped!(
            $name,
            $index,
            {
                let inside = crate::state::gate::enter_launch();
                let per_thread = stringify!($name).ends_with("_ptsz");
                if let Some(head) = crate::calls::heads::$decoder(&[$($argument),*]) {
                    crate::state::recent::launched(head, per_thread);
                }
                inside
            },
            |_| (),
            twin
            $decoder $then, $($argument)*
        );
    };
}

/// A gated function that makes what the driver's checkpoint cannot carry; its use is recorded.
macro_rules! note {
    ($name:ident, $index:literal, $($rest:tt)*) => {
        wrapped!(
            $name,
            $index,
            crate::state::gate::enter(),
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

/// Before the call its arguments are shown to the first decoder, if launches are recorded or have to wait;
/// after it to the second one. A thread that is cancelled in the driver's function is unwound through this one,
/// and leaves the gate.
macro_rules! wrapped {
    (
        $name:ident, $index:literal, $enter:expr, $after:expr,
        $before:ident $then:ident, $($argument:ident)*
    ) => {
        wrapped!($name, $index, $enter, $after, real $before $then, $($argument)*);
    };
    (
        $name:ident, $index:literal, $enter:expr, $after:expr,
        $by:ident $before:ident $then:ident, $($argument:ident)*
    ) => {
        #[unsafe(no_mangle)]
        #[allow(non_snake_case, clippy::too_many_arguments, clippy::let_unit_value)]
        pub(crate) unsafe extern "C-unwind" fn $name($($argument: integer!($argument)),*) -> u32 {
            let _inside = $enter;
            ahead!($name, $by $before, $($argument)*);
            // SAFETY: a slot holds a function of the driver (or its stub), which takes these
            // integer slots and returns a CUresult.
            let result = unsafe { real!($index, $($argument)*) };
            let after: fn(u32) = $after;
            after(result);
            if result != 0 && crate::watch::faults::is_wanted() {
                crate::watch::faults::look(result);
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
        if crate::state::gate::is_watching() {
            crate::watch::before_unknown();
        }
    };
    ($decoder:ident, $($argument:ident)*) => {
        if crate::state::gate::is_watching() {
            crate::watch::before(crate::calls::$decoder, &[$($argument),*]);
        }
    };
}

/// What comes ahead of the call: a launch may be made in another way.
macro_rules! ahead {
    ($name:ident, real $decoder:ident, $($argument:ident)*) => {
        before!($decoder, $($argument)*);
    };
    ($name:ident, twin $decoder:ident, $($argument:ident)*) => {
        if crate::state::gate::is_watching() {
            let decoder = crate::calls::$decoder;
            let per_thread = stringify!($name).ends_with("_ptsz");
            let made = crate::watch::before_launch(decoder, &[$($argument),*], per_thread);
            if let Some(code) = made {
                return code;
            }
        }
    };
}

/// Whether a function copies to the host in the default stream of all threads, and so comes back after all that was
/// there before.
const fn is_awaited(name: &str) -> bool {
    matches!(name.as_bytes(), b"cuMemcpyDtoH_v2")
}

macro_rules! then {
    (none, $result:ident, $($argument:ident)*) => {};
    ($decoder:ident, $result:ident, $($argument:ident)*) => {
        crate::watch::after(crate::calls::$decoder, &[$($argument),*], $result);
    };
}

macro_rules! integer {
    ($argument:ident) => {
        usize
    };
}

include!(concat!(env!("OUT_DIR"), "/exports.rs"));

/// What this library puts in the place of the driver's functions: jumps whose slots lead elsewhere at times, and
/// what is more than a jump.
#[unsafe(no_mangle)]
fn gpucr_intercept_replaced() -> Vec<Wrapper> {
    faults::LOOKED_AT.iter().chain(WRAPPED).map(|index| EXPORTED[*index]).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn wrappers_are_in_order_and_distinct() {
        assert!(EXPORTED.iter().enumerate().all(|(index, exported)| index == exported.0));
        assert!(WRAPPED.windows(2).all(|pair| pair[0] < pair[1]));
        let mut addresses: Vec<_> =
            WRAPPED.iter().map(|index| EXPORTED[*index].1 as usize).collect();
        addresses.sort_unstable();
        let before = addresses.len();
        addresses.dedup();
        // Functions with identical code may be merged, which would make them one address; the
        // gate wrappers all load different slots.
        assert_eq!(addresses.len(), before);
    }
}
