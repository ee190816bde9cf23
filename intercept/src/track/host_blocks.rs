//! How devices get to use [host memory of `cuMemCreate`](crate::state::memory::host), and what the functions for virtual
//! memory answer where it is about such memory.

use crate::abi::real;
use crate::abi::types::{
    AllocationProp, Code, ERROR_INVALID_CONTEXT, ERROR_NOT_REGISTERED, SUCCESS,
};
use crate::log::log;
use crate::state::memory::host::Pin;
use crate::state::{contexts, memory};
use crate::usage::{self, Kind};

/// `CU_MEMHOSTREGISTER_PORTABLE` and `CU_MEMHOSTREGISTER_DEVICEMAP`.
const FOR_ALL_DEVICES: u32 = 3;

/// The real driver.
pub(super) struct Pins;

/// Calls `work` with the context in which it is, and that is current. Functions for virtual memory need none, those for
/// registered memory do: then it is one that the program has.
fn in_any_context(work: impl FnOnce(u64) -> Result<(), Code>) -> Result<(), Code> {
    if let Ok((context, _)) = real::current_context() {
        return work(context);
    }
    let (context, _) = contexts::all().into_iter().next().ok_or(ERROR_INVALID_CONTEXT)?;
    real::with_context(context, || work(context))
}

impl Pin for Pins {
    fn register(&self, address: u64, size: u64) -> Result<(), Code> {
        in_any_context(|context| {
            let code = call!(cuMemHostRegister_v2(address, size as usize, FOR_ALL_DEVICES));
            real::check(code)?;
            usage::added(Kind::Pinned, address, size, context);
            Ok(())
        })
    }

    fn unregister(&self, address: u64) -> Result<(), Code> {
        let unregister = || match call!(cuMemHostUnregister(address)) {
            // It has gone with its context.
            ERROR_NOT_REGISTERED => SUCCESS,
            code => code,
        };
        let end = |_| real::check(usage::ending(&[Kind::Pinned], address, unregister));
        match in_any_context(end) {
            Err(ERROR_INVALID_CONTEXT) => Ok(()),
            done => done,
        }
    }
}

/// Makes host memory of ours in the place of what the driver has just given.
pub(super) fn in_place_of(given: u64, size: u64) -> Result<u64, Code> {
    let mut prop = AllocationProp::on_device(0, false);
    let code = call!(cuMemGetAllocationPropertiesFromHandle(&mut prop, given));
    let released = call!(cuMemRelease(given));
    if released != SUCCESS {
        log!("host memory of the driver cannot be given back: error {released}");
    }
    real::check(code)?;
    memory::lock().create_host(size, prop)
}
