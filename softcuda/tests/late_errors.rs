//! What a GPU's driver says later than one would think, or not at all: text that is no code, a flag of pinned memory,
//! and a device after the reset of a context that has failed.

mod support;

use support::*;

const INVALID_PTX: u32 = 218;

unsafe extern "C" {
    fn cuLibraryLoadData(
        library: &mut u64,
        code: *const u8,
        options: u64,
        values: u64,
        count: u32,
        library_options: u64,
        library_values: u64,
        library_count: u32,
    ) -> u32;
    fn cuLibraryGetKernel(kernel: &mut u64, library: u64, name: *const u8) -> u32;
    safe fn cuLibraryGetKernelCount(count: &mut u32, library: u64) -> u32;
    safe fn cuLibraryGetModule(module: &mut u64, library: u64) -> u32;
    safe fn cuLibraryUnload(library: u64) -> u32;
    safe fn cuMemHostGetFlags(flags: &mut u32, address: u64) -> u32;
    safe fn cuDevicePrimaryCtxRetain(context: &mut u64, device: i32) -> u32;
    safe fn cuDevicePrimaryCtxReset_v2(device: i32) -> u32;
}

/// A kernel that writes where there is no memory.
const PTX: &str = "
.version 8.0
.target sm_80
.address_size 64
.visible .entry k() { .reg .b64 %d; mov.u64 %d, 64; st.global.u32 [%d], 1; ret; }
\0";

#[test]
fn text_that_is_no_code_is_refused_when_something_of_it_is_wanted() {
    let context = context();
    let (mut library, mut kernel, mut count, mut module) = (0, 0, 0, 0);
    // SAFETY: text and name end with a NUL, and there are no options.
    unsafe {
        ok(cuLibraryLoadData(&mut library, c"no code".as_ptr().cast(), 0, 0, 0, 0, 0, 0));
        assert_eq!(cuLibraryGetKernel(&mut kernel, library, c"k".as_ptr().cast()), INVALID_PTX);
    }
    assert_eq!(cuLibraryGetKernelCount(&mut count, library), INVALID_PTX);
    assert_eq!(cuLibraryGetModule(&mut module, library), INVALID_PTX);
    ok(cuLibraryUnload(library));
    // SAFETY: a cubin is told by its first four bytes.
    let cubin =
        unsafe { cuLibraryLoadData(&mut library, c"\x7fELF".as_ptr().cast(), 0, 0, 0, 0, 0, 0) };
    assert_ne!(cubin, 0, "only text is looked at later");
    ok(cuCtxDestroy_v2(context));
}

#[test]
fn pinned_memory_does_not_tell_that_it_is_portable() {
    let context = context();
    let (mut address, mut flags) = (0, 0);
    ok(cuMemHostAlloc(&mut address, 4096, 1 | 4));
    ok(cuMemHostGetFlags(&mut flags, address));
    assert_eq!(flags, 2 | 4);
    ok(cuMemFreeHost(address));
    ok(cuCtxDestroy_v2(context));
}

/// Launches the kernel in the primary context, and resets that.
fn fail_and_reset() {
    let (mut module, mut function) = (0, 0);
    // SAFETY: text and name end with a NUL, and the kernel takes no arguments.
    unsafe {
        ok(cuModuleLoadData(&mut module, PTX.as_ptr()));
        ok(cuModuleGetFunction(&mut function, module, c"k".as_ptr().cast()));
        let (none, nothing) = (std::ptr::null(), std::ptr::null());
        ok(cuLaunchKernel(function, 1, 1, 1, 1, 1, 1, 0, 0, none, nothing));
    }
    assert_eq!(cuCtxSynchronize(), ILLEGAL_ADDRESS);
    // What it returns for a failed context is not known of a GPU.
    let _ = cuDevicePrimaryCtxReset_v2(0);
}

#[test]
#[ignore = "a program for other tests"]
fn failing_program() {
    ok(cuInit(0));
    let mut context = 0;
    ok(cuDevicePrimaryCtxRetain(&mut context, 0));
    ok(cuDevicePrimaryCtxReset_v2(0));
    ok(cuDevicePrimaryCtxRetain(&mut context, 0));
    ok(cuCtxSetCurrent(context));
    fail_and_reset();
    assert_eq!(cuDevicePrimaryCtxRetain(&mut context, 0), DEVICE_UNAVAILABLE);
    assert_eq!(cuCtxCreate_v2(&mut context, 0, 0), DEVICE_UNAVAILABLE);
    ok(cuDevicePrimaryCtxRetain(&mut context, 1));
}

#[test]
fn a_process_has_no_device_after_the_reset_of_a_failed_context() {
    Program::start("failing_program", &[("SOFTCUDA_DEVICES", "2")]).finish();
}
