//! Launches of kernels whose arguments are in one buffer.

use std::ffi::c_void;

use crate::abi::real::{self, check};
use crate::abi::types::{Code, EXTRA_BUFFER, EXTRA_SIZE};
use crate::calls::effects::Form;

/// Launches a kernel, as the program has launched it, or its twin, in a stream of the current context. The arguments are those
/// of all its parameters.
///
/// # Errors
/// Those of `cuLaunchKernel`; a kernel that was unloaded meanwhile is a handle that the driver refuses.
pub(in crate::watch) fn launch(
    kernel: u64,
    form: Form,
    stream: u64,
    arguments: &[u8],
) -> Result<(), Code> {
    let size = arguments.len();
    let mut extra: [*const c_void; 5] = [
        EXTRA_BUFFER as _,
        arguments.as_ptr().cast(),
        EXTRA_SIZE as _,
        (&raw const size).cast(),
        std::ptr::null(),
    ];
    // A kernel without parameters gets no buffer.
    let extra = if size == 0 { std::ptr::null_mut() } else { extra.as_mut_ptr() };
    let Form { shape: [gx, gy, gz, bx, by, bz], shared } = form;
    let nothing = std::ptr::null_mut();
    // SAFETY: the program has launched the kernel in this way. The driver copies the arguments before it returns.
    check(unsafe {
        real::cuLaunchKernel(kernel, gx, gy, gz, bx, by, bz, shared, stream, nothing, extra.cast())
    })
}
