//! Launches of kernels, graphs and host functions.

use gpucr_wire::reach::Sizes;

use super::arguments::{at, member, named};
use super::effects::{Effects, Form, Launch};
use crate::abi::types::{LaunchConfig, LaunchParams};

/// `cuLaunchKernel(f, grid, block, shared, stream, kernelParams, extra)`.
pub(crate) fn kernel(a: &[usize], to: &mut dyn Effects) {
    let [kernel, gx, gy, gz, bx, by, bz, shared, stream, params, extra] = named(a);
    to.stream(stream as u64);
    let shape = [gx, gy, gz, bx, by, bz].map(|size| size as u32);
    let form = Form { shape, shared: shared as u32 };
    to.launch(&launch(kernel, sizes(shape), params, extra).plain(Some(form)));
}

/// `cuLaunchCooperativeKernel(f, grid, block, shared, stream, kernelParams)`.
pub(crate) fn cooperative(a: &[usize], to: &mut dyn Effects) {
    let [kernel, gx, gy, gz, bx, by, bz, _shared, stream, params] = named(a);
    to.stream(stream as u64);
    launched(to, kernel, sizes([gx, gy, gz, bx, by, bz].map(|size| size as u32)), params, 0);
}

/// `cuLaunchKernelEx(config, f, kernelParams, extra)`.
pub(crate) fn kernel_ex(a: &[usize], to: &mut dyn Effects) {
    let [config, kernel, params, extra] = named(a);
    // SAFETY: the function's signature.
    let config = unsafe { at::<LaunchConfig>(config) };
    to.stream(config.map_or(0, |config| config.stream));
    let sizes = config.map_or(Sizes::UNKNOWN, |config| sizes(config.shape));
    let form = config.filter(|config| config.count == 0);
    let form = form.map(|config| Form { shape: config.shape, shared: config.shared });
    to.launch(&launch(kernel, sizes, params, extra).plain(form));
}

/// `cuLaunchCooperativeKernelMultiDevice(list, count, flags)`.
pub(crate) fn kernels(a: &[usize], to: &mut dyn Effects) {
    let [list, count, _flags] = named(a);
    for number in 0..count as u32 as usize {
        // SAFETY: the list has so many members.
        let Some(one) = (unsafe { member::<LaunchParams>(list, number) }) else { return };
        let [gx, gy, gz, bx, by, bz, _shared] = one.shape;
        let sizes = sizes([gx, gy, gz, bx, by, bz]);
        launched(to, one.function as usize, sizes, one.params as usize, 0);
    }
}

/// `cuLaunch(f)` and `cuLaunchGrid(f, ...)`: the arguments were set one by one before.
pub(crate) fn kernel_legacy(a: &[usize], to: &mut dyn Effects) {
    let [kernel] = named(a);
    launched(to, kernel, Sizes::UNKNOWN, 0, 0);
}

/// `cuGraphLaunch(exec, stream)`.
pub(crate) fn graph(a: &[usize], to: &mut dyn Effects) {
    let [executable, stream] = named(a);
    to.stream(stream as u64);
    to.graph(executable as u64);
}

/// `cuLaunchHostFunc` and `cuStreamAddCallback`.
pub(crate) fn host_function(_: &[usize], to: &mut dyn Effects) {
    to.host_function();
}

/// Blocks in each direction, threads of a block in each direction.
fn sizes([gx, gy, gz, bx, by, bz]: [u32; 6]) -> Sizes {
    Sizes::of([gx, gy, gz], [bx, by, bz])
}

fn launched(to: &mut dyn Effects, kernel: usize, sizes: Sizes, params: usize, extra: usize) {
    to.launch(&launch(kernel, sizes, params, extra));
}

fn launch(kernel: usize, sizes: Sizes, params: usize, extra: usize) -> Launch {
    // SAFETY: the program passes these to a launch of the kernel, which is under way.
    unsafe { Launch::new(kernel, sizes, params, extra) }
}
