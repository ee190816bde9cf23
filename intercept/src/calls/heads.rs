//! The kernel and the stream of a launch, for each decoder of a launch: all that is noted of every launch. A few
//! instructions each, since they are on the way of launches that nobody looks at.

use crate::abi::types::LaunchConfig;
use crate::state::recent::{GRAPH, Head};

/// `cuLaunchKernel(f, grid, block, shared, stream, kernelParams, extra)`.
#[inline(always)]
pub(crate) fn kernel(a: &[usize]) -> Option<Head> {
    let &[kernel, _, _, _, _, _, _, _, stream, ..] = a else { return None };
    Some(Head { stream, kernel })
}

/// `cuLaunchCooperativeKernel(f, grid, block, shared, stream, kernelParams)`.
#[inline(always)]
pub(crate) fn cooperative(a: &[usize]) -> Option<Head> {
    kernel(a)
}

/// `cuLaunchKernelEx(config, f, kernelParams, extra)`.
#[inline(always)]
pub(crate) fn kernel_ex(a: &[usize]) -> Option<Head> {
    let &[config, kernel, ..] = a else { return None };
    let config = config as *const LaunchConfig;
    if config.is_null() {
        return None;
    }
    // SAFETY: not null, and by the function's signature such a structure.
    let stream = unsafe { (&raw const (*config).stream).read_unaligned() };
    Some(Head { stream: stream as usize, kernel })
}

/// `cuLaunchCooperativeKernelMultiDevice(list, count, flags)`: its streams are many, and it is not noted.
#[inline(always)]
pub(crate) fn kernels(_: &[usize]) -> Option<Head> {
    None
}

/// `cuLaunch(f)`, `cuLaunchGrid(f, width, height)` and `cuLaunchGridAsync(f, width, height, stream)`.
#[inline(always)]
pub(crate) fn kernel_legacy(a: &[usize]) -> Option<Head> {
    let &[kernel, ref rest @ ..] = a else { return None };
    let stream = if let &[_, _, stream] = rest { stream } else { 0 };
    Some(Head { stream, kernel })
}

/// `cuGraphLaunch(exec, stream)`.
#[inline(always)]
pub(crate) fn graph(a: &[usize]) -> Option<Head> {
    let &[_, stream] = a else { return None };
    Some(Head { stream, kernel: GRAPH as usize })
}
