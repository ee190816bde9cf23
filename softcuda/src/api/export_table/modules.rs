//! By which the runtime loads the fat binaries that nvcc has put into a program.

use super::slots::called;
use crate::api::arguments::{Address, Out};
use crate::api::module;
use crate::status::{Code, Outcome};

/// Fails for options, of which nothing is known.
fn without(options: [u64; 2], count: u32) -> Outcome {
    if options == [0, 0] && count == 0 { Ok(()) } else { Err(Code::NOT_SUPPORTED) }
}

/// Loads a module of the structure that programs embed.
pub(super) extern "C" fn module_from_wrapper(out: Out<u64>, wrapper: Address) -> u32 {
    called("module_from_wrapper", || module::load_at(&out, wrapper))
}

/// The same with options.
pub(super) extern "C" fn module_from_wrapper_with_options(
    out: Out<u64>,
    wrapper: Address,
    first: u64,
    second: u64,
    count: u32,
) -> u32 {
    called("module_from_wrapper_with_options", || {
        without([first, second], count)?;
        module::load_at(&out, wrapper)
    })
}

/// Loads a module of a container.
pub(super) extern "C" fn module_from_container(
    container: Address,
    out: Out<u64>,
    first: u64,
    second: u64,
    count: u32,
) -> u32 {
    called("module_from_container", || {
        without([first, second], count)?;
        module::load_at(&out, container)
    })
}

/// Loads the compilers of a driver; the one here is always there.
pub(super) extern "C" fn load_compilers() -> u32 {
    called("load_compilers", || Ok(()))
}
