//! The functions that change what the shim keeps in its tables, each with the signature that the
//! driver gives it. Those that touch device memory enter the gate first.

use crate::abi::types::SUCCESS;
use crate::{agent, fork, watch};

/// Exported functions. A mistake of ours that panics becomes an error of the call: unwinding must
/// not reach the program. Nor must that of a thread that is cancelled reach what catches it here.
macro_rules! exported {
    ($(fn $name:ident($($argument:ident: $type:ty),* $(,)?) $body:block)*) => {$(
        #[unsafe(no_mangle)]
        #[allow(non_snake_case, clippy::too_many_arguments)]
        pub(crate) unsafe extern "C" fn $name($($argument: $type),*) -> $crate::abi::types::Code {
            let _uncancelled = $crate::cancel::not_now();
            let body = move || -> $crate::abi::types::Code { $body };
            let code = std::panic::catch_unwind(std::panic::AssertUnwindSafe(body))
                .unwrap_or($crate::abi::types::ERROR_UNKNOWN);
            if code != $crate::abi::types::SUCCESS && $crate::watch::faults::is_wanted() {
                return $crate::watch::faults::look(code);
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
        unsafe { $crate::abi::real::$name($($argument),*) }
    }};
}

/// Calls the driver's function of this name with the program's own arguments, which are integers all.
macro_rules! pass_on {
    ($name:ident($($argument:ident),* $(,)?)) => {{
        let slot = &$crate::abi::slots::SLOTS[$crate::abi::table::index::$name];
        let target = slot.load(std::sync::atomic::Ordering::Relaxed);
        // SAFETY: a slot holds a function of the driver (or its stub), which takes these integer slots and
        // returns a CUresult.
        unsafe {
            let driver: unsafe extern "C" fn($(pass_on!(@ $argument)),*) -> Code =
                std::mem::transmute(target);
            driver($($argument),*)
        }
    }};
    (@ $argument:ident) => { usize };
}

mod contexts;
mod counted;
mod events;
mod heap;
mod host_blocks;
mod ipc;
mod multicast;
mod offered;
mod owners;
pub(crate) mod patience;
mod pools;
mod shared_pools;
mod streams;
mod support;
mod tickets;
mod unloads;
mod uses;
mod vmm;

pub(crate) use crate::resolver::{cuGetProcAddress, cuGetProcAddress_v2};
pub(crate) use contexts::*;
pub(crate) use counted::*;
pub(crate) use events::*;
pub(crate) use heap::*;
pub(crate) use ipc::*;
pub(crate) use multicast::*;
pub(crate) use pools::*;
pub(crate) use shared_pools::*;
pub(crate) use streams::*;
pub(crate) use unloads::*;
pub(crate) use uses::*;
pub(crate) use vmm::*;

exported! {
    fn cuInit(flags: u32) {
        let code = call!(cuInit(flags));
        if code == SUCCESS {
            fork::watch();
            watch::begin();
            agent::start();
        }
        code
    }
}
