//! Launches of the first versions of CUDA, whose arguments are set in the function.

mod support;

use support::graphs::*;
use support::*;

unsafe extern "C" {
    safe fn cuFuncSetBlockShape(function: u64, x: i32, y: i32, z: i32) -> u32;
    safe fn cuFuncSetSharedSize(function: u64, bytes: u32) -> u32;
    safe fn cuParamSetSize(function: u64, bytes: u32) -> u32;
    safe fn cuParamSeti(function: u64, offset: i32, value: u32) -> u32;
    safe fn cuParamSetf(function: u64, offset: i32, value: f32) -> u32;
    fn cuParamSetv(function: u64, offset: i32, value: *const u8, bytes: u32) -> u32;
    safe fn cuParamSetTexRef(function: u64, unit: i32, texture: u64) -> u32;
    safe fn cuLaunch(function: u64) -> u32;
    safe fn cuLaunchGrid(function: u64, width: i32, height: i32) -> u32;
    safe fn cuLaunchGridAsync(function: u64, width: i32, height: i32, stream: u64) -> u32;
    fn cuLibraryLoadData(
        library: &mut u64,
        image: *const u8,
        options: u64,
        values: u64,
        count: u32,
        library_options: u64,
        library_values: u64,
        library_count: u32,
    ) -> u32;
    fn cuLibraryGetKernel(kernel: &mut u64, library: u64, name: *const u8) -> u32;
}

/// Writes its parameters and its shape where the first parameter points to, if that is not null.
const TELL: &str = "
.version 7.0
.target sm_80
.address_size 64
.visible .entry tell(.param .u64 to, .param .u32 whole, .param .f32 real) {
    .reg .b64 %to;
    .reg .b32 %v;
    .reg .pred %p;
    ld.param.u64 %to, [to];
    setp.eq.u64 %p, %to, 0;
    @%p ret;
    ld.param.u32 %v, [whole];
    st.global.u32 [%to], %v;
    ld.param.u32 %v, [real];
    st.global.u32 [%to+4], %v;
    mov.u32 %v, %ntid.x;
    st.global.u32 [%to+8], %v;
    mov.u32 %v, %ntid.y;
    st.global.u32 [%to+12], %v;
    mov.u32 %v, %nctaid.x;
    st.global.u32 [%to+16], %v;
    mov.u32 %v, %nctaid.y;
    st.global.u32 [%to+20], %v;
    mov.u32 %v, %dynamic_smem_size;
    st.global.u32 [%to+24], %v;
    ret;
}
\0";

const LAUNCH_OUT_OF_RESOURCES: u32 = 701;
const REAL: u32 = 1.5f32.to_bits();

fn function() -> u64 {
    let (mut module, mut function) = (0, 0);
    // SAFETY: the text and the name end with a NUL.
    unsafe {
        ok(cuModuleLoadData(&mut module, TELL.as_ptr()));
        ok(cuModuleGetFunction(&mut function, module, c"tell".as_ptr().cast()));
    }
    function
}

fn set_pointer(function: u64, offset: i32, address: u64) -> u32 {
    // SAFETY: the value is as large as it says.
    unsafe { cuParamSetv(function, offset, (&raw const address).cast(), 8) }
}

/// What the kernel has written since the last question.
fn told(data: u64) -> Vec<u32> {
    ok(cuCtxSynchronize());
    let told = read(data, 7);
    write(data, &[0; 7]);
    told
}

#[test]
fn functions_are_launched_with_what_was_set() {
    let context = context();
    let (tell, data, one) = (function(), allocate(28), stream());
    write(data, &[0; 7]);
    // Nothing is set: one thread, and zeros.
    ok(cuLaunch(tell));
    assert_eq!(told(data), [0; 7]);
    ok(cuFuncSetBlockShape(tell, 3, 2, 1));
    ok(set_pointer(tell, 0, data));
    ok(cuParamSeti(tell, 8, 7));
    ok(cuParamSetf(tell, 12, 1.5));
    ok(cuLaunch(tell));
    assert_eq!(told(data), [0; 7], "the size is still 0");
    ok(cuParamSetSize(tell, 16));
    for _ in 0..2 {
        ok(cuLaunch(tell));
        assert_eq!(told(data), [7, REAL, 3, 2, 1, 1, 0]);
    }
    ok(cuFuncSetSharedSize(tell, 64));
    ok(cuLaunchGrid(tell, 2, 3));
    assert_eq!(told(data), [7, REAL, 3, 2, 2, 3, 64]);
    ok(cuParamSeti(tell, 8, 8));
    ok(cuLaunchGridAsync(tell, 4, 5, one));
    // What is set now is for the next launch.
    ok(cuParamSeti(tell, 8, 9));
    assert_eq!(told(data), [8, REAL, 3, 2, 4, 5, 64]);
    // Of fewer parameters than there are the rest is zero; more cannot be.
    ok(cuParamSetSize(tell, 12));
    ok(cuLaunch(tell));
    assert_eq!(told(data), [9, 0, 3, 2, 1, 1, 64]);
    ok(cuParamSetSize(tell, 17));
    assert_eq!(cuLaunch(tell), LAUNCH_OUT_OF_RESOURCES);
    assert_eq!(told(data), [0; 7]);
    ok(cuParamSetSize(tell, 16));
    // Another function has settings of its own.
    ok(cuLaunch(function()));
    assert_eq!(told(data), [0; 7]);
    ok(cuLaunch(tell));
    assert_eq!(told(data), [9, REAL, 3, 2, 1, 1, 64]);
    ok(cuCtxDestroy_v2(context));
}

#[test]
fn what_cannot_be_set_changes_nothing() {
    let context = context();
    let (tell, data) = (function(), allocate(28));
    write(data, &[0; 7]);
    ok(set_pointer(tell, 0, data));
    ok(cuParamSeti(tell, 8, 7));
    ok(cuParamSetSize(tell, 16));
    ok(cuFuncSetBlockShape(tell, 3, 1, 1));
    ok(cuFuncSetSharedSize(tell, 48 << 10));
    for [x, y, z] in
        [[0, 1, 1], [1, -1, 1], [1, 1, 0], [1025, 1, 1], [1024, 2, 1], [1, 1, 65], [i32::MAX; 3]]
    {
        assert_eq!(cuFuncSetBlockShape(tell, x, y, z), INVALID_VALUE, "{x} {y} {z}");
    }
    assert_eq!(cuFuncSetSharedSize(tell, (48 << 10) + 1), INVALID_VALUE);
    for offset in [-4, -1, 32_761, 32_764, i32::MAX] {
        assert_eq!(cuParamSeti(tell, offset, 1), INVALID_VALUE, "{offset}");
        assert_eq!(cuParamSetf(tell, offset, 1.0), INVALID_VALUE, "{offset}");
        assert_eq!(set_pointer(tell, offset, 1), INVALID_VALUE, "{offset}");
    }
    ok(cuParamSeti(tell, 32_760, 1));
    // SAFETY: what is not there is refused; of nothing nothing is read.
    unsafe {
        assert_eq!(cuParamSetv(tell, 0, std::ptr::null(), 8), INVALID_VALUE);
        assert_eq!(cuParamSetv(tell, 0, std::ptr::null(), 40_000), INVALID_VALUE);
        ok(cuParamSetv(tell, 8, std::ptr::null(), 0));
    }
    assert_eq!(cuParamSetSize(tell, 32_765), INVALID_VALUE);
    assert_eq!(cuParamSetTexRef(tell, -1, 0), INVALID_VALUE, "no reference");
    for (width, height) in [(0, 1), (1, 0), (-1, 1), (1, -1), (1, 65_536)] {
        assert_eq!(cuLaunchGrid(tell, width, height), INVALID_VALUE);
    }
    assert_eq!(cuLaunchGridAsync(tell, 1, 1, 99), INVALID_HANDLE);
    assert_eq!(told(data), [0; 7]);
    ok(cuLaunch(tell));
    assert_eq!(told(data), [7, 0, 3, 1, 1, 1, 48 << 10]);

    // Neither nothing nor a library's kernel is a function here.
    let (mut library, mut kernel) = (0, 0);
    // SAFETY: the text and the name end with a NUL, and there are no options.
    unsafe {
        ok(cuLibraryLoadData(&mut library, TELL.as_ptr(), 0, 0, 0, 0, 0, 0));
        ok(cuLibraryGetKernel(&mut kernel, library, c"tell".as_ptr().cast()));
    }
    for other in [0, kernel] {
        let codes = [
            cuFuncSetBlockShape(other, 1, 1, 1),
            cuFuncSetSharedSize(other, 0),
            cuParamSetSize(other, 0),
            cuParamSeti(other, 0, 0),
            cuLaunch(other),
        ];
        assert_eq!(codes, [INVALID_HANDLE; 5]);
    }
    ok(cuCtxCreate_v2(&mut 0, 0, 0));
    assert_eq!(cuLaunch(tell), 201, "a function of another context");
    ok(cuCtxDestroy_v2(context));
}

#[test]
fn they_cannot_be_captured() {
    let _alone = alone();
    let context = context();
    let (tell, one) = (function(), stream());
    assert_eq!(spoiled(one, || cuLaunchGridAsync(tell, 1, 1, one)), UNSUPPORTED);
    // Nor launched in another stream meanwhile, if the capture forbids what is unsafe.
    assert_eq!(spoiled(one, || cuLaunch(tell)), UNSUPPORTED);
    ok(cuStreamBeginCapture_v2(one, 2));
    ok(cuLaunchGrid(tell, 1, 1));
    ok(cuGraphDestroy(end(one)));
    ok(cuCtxDestroy_v2(context));
}

/// As the tests of NVIDIA's cuda.core ask it.
#[test]
fn parameters_of_a_kernel_are_told_in_a_context_only() {
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
        safe fn cuKernelGetParamInfo(
            kernel: u64,
            index: usize,
            offset: &mut usize,
            size: &mut usize,
        ) -> u32;
    }
    const INVALID_CONTEXT: u32 = 201;
    let context = context();
    let (mut library, mut kernel, mut offset, mut size) = (0, 0, 9, 9);
    // SAFETY: the text and the name end with a NUL.
    unsafe {
        ok(cuLibraryLoadData(&mut library, TELL.as_ptr(), 0, 0, 0, 0, 0, 0));
        ok(cuLibraryGetKernel(&mut kernel, library, c"tell".as_ptr().cast()));
    }
    ok(cuKernelGetParamInfo(kernel, 0, &mut offset, &mut size));
    assert_eq!((offset, size), (0, 8));
    ok(cuCtxDestroy_v2(context));
    assert_eq!(cuKernelGetParamInfo(kernel, 0, &mut offset, &mut size), INVALID_CONTEXT);
}
