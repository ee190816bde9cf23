//! Modules and kernels: loading, refusals, launches, failures.

mod support;

use support::*;

const PTX: &str = "
.version 7.0
.target sm_80
.address_size 64

.global .align 4 .u32 factor = 3;
.global .align 4 .b8 table[16] = {1, 0, 0, 0, 2, 0, 0, 0};

.visible .entry scale(.param .u64 p_data, .param .u32 p_count, .param .u32 p_add)
{
    .reg .pred %p;
    .reg .b32 %r<9>;
    .reg .b64 %rd<5>;
    ld.param.u64 %rd1, [p_data];
    ld.param.u32 %r1, [p_count];
    ld.param.u32 %r2, [p_add];
    mov.u32 %r3, %ctaid.x;
    mov.u32 %r4, %ntid.x;
    mov.u32 %r5, %tid.x;
    mad.lo.s32 %r6, %r3, %r4, %r5;
    setp.ge.u32 %p, %r6, %r1;
    @%p bra DONE;
    mul.wide.u32 %rd2, %r6, 4;
    add.s64 %rd3, %rd1, %rd2;
    ld.global.u32 %r7, [%rd3];
    ld.global.u32 %r8, [factor];
    mad.lo.s32 %r7, %r7, %r8, %r2;
    st.global.u32 [%rd3], %r7;
DONE:
    ret;
}

.visible .entry stop()
{
    trap;
}
\0";

#[track_caller]
fn load(text: &str) -> u64 {
    let mut module = 0;
    // SAFETY: the texts of this file end in NUL.
    ok(unsafe { cuModuleLoadData(&mut module, text.as_ptr()) });
    module
}

#[track_caller]
fn function(module: u64, name: &std::ffi::CStr) -> u64 {
    let mut function = 0;
    // SAFETY: the name ends in NUL.
    ok(unsafe { cuModuleGetFunction(&mut function, module, name.as_ptr().cast()) });
    function
}

fn launch_scale(function: u64, data: u64, count: u32, add: u32) -> u32 {
    let parameters = [(&raw const data).cast(), (&raw const count).cast(), (&raw const add).cast()];
    let blocks = count.div_ceil(64);
    let (parameters, none) = (parameters.as_ptr(), std::ptr::null());
    // SAFETY: the parameters are those of `scale`, in order.
    unsafe { cuLaunchKernel(function, blocks, 1, 1, 64, 1, 1, 0, 0, parameters, none) }
}

#[test]
fn a_kernel_runs_with_both_forms_of_parameters() {
    let context = context();
    let module = load(PTX);
    let scale = function(module, c"scale");
    let data = allocate(4 * 1000);
    write(data, &(0..1000).collect::<Vec<u32>>());
    ok(launch_scale(scale, data, 1000, 5));
    assert_eq!(read(data, 1000), (0..1000).map(|i| 3 * i + 5).collect::<Vec<u32>>());

    #[repr(C)]
    struct Parameters(u64, u32, u32);
    let buffer = Parameters(data, 2, 1);
    let size = size_of::<Parameters>();
    let extra = [1, (&raw const buffer) as u64, 2, (&raw const size) as u64, 0];
    // SAFETY: the buffer is laid out as `scale` declares its parameters.
    ok(unsafe { cuLaunchKernel(scale, 1, 1, 1, 64, 1, 1, 0, 0, std::ptr::null(), extra.as_ptr()) });
    assert_eq!(read(data, 3), [16, 25, 11]);

    let (mut address, mut bytes) = (0, 0);
    // SAFETY: the names end in NUL.
    unsafe {
        ok(cuModuleGetGlobal_v2(&mut address, &mut bytes, module, c"factor".as_ptr().cast()));
        assert_eq!((bytes, read(address, 1)), (4, vec![3]));
        write(address, &[10]);
        ok(cuModuleGetGlobal_v2(&mut address, &mut bytes, module, c"table".as_ptr().cast()));
        assert_eq!((bytes, read(address, 4)), (16, vec![1, 2, 0, 0]));
        let unknown = cuModuleGetGlobal_v2(&mut address, &mut bytes, module, c"x".as_ptr().cast());
        assert_eq!(unknown, 500);
    }
    ok(launch_scale(scale, data, 1, 0));
    assert_eq!(read(data, 1), [160]);

    let one = std::ptr::null();
    // SAFETY: these launches are refused before any parameter is looked at.
    unsafe {
        let launch = |grid, block, shared| {
            cuLaunchKernel(scale, grid, 1, 1, block, 1, 1, shared, 0, one, std::ptr::null())
        };
        assert_eq!(launch(0, 1, 0), INVALID_VALUE);
        assert_eq!(launch(1, 1025, 0), INVALID_VALUE);
        assert_eq!(launch(1, 1, 49 << 10), INVALID_VALUE);
        assert_eq!(launch(1, 1, 0), INVALID_VALUE);
    }
    ok(cuModuleUnload(module));
    assert_eq!(launch_scale(scale, data, 1, 0), INVALID_HANDLE);
    assert_eq!(cuModuleUnload(module), INVALID_HANDLE);
    ok(cuCtxDestroy_v2(context));
}

#[test]
fn ptx_in_fat_binaries_runs() {
    unsafe extern "C" {
        safe fn cuModuleLoadFatBinary(module: &mut u64, image: *const u8) -> u32;
        safe fn cuModuleLoad(module: &mut u64, path: *const u8) -> u32;
    }
    let context = context();
    let data = allocate(128);
    let plain: &[u8] = include_bytes!("fatbin/plain.fatbin");
    let wrapper = [0x1_4662_43b1_u64, plain.as_ptr() as u64, 0];
    let images: [&[u8]; 4] = [
        plain,
        include_bytes!("fatbin/lz4.fatbin"),
        include_bytes!("fatbin/zstd.fatbin"),
        include_bytes!("fatbin/both.fatbin"),
    ];
    let check = |module: u64| {
        write(data, &(0..32).collect::<Vec<u32>>());
        let factor = 7_u32;
        let each = [(&raw const data).cast(), (&raw const factor).cast()];
        let scale = function(module, c"scale");
        // SAFETY: the parameters are those of the kernel in `fatbin/scale.cu`.
        ok(unsafe {
            cuLaunchKernel(scale, 1, 1, 1, 32, 1, 1, 0, 0, each.as_ptr(), std::ptr::null())
        });
        assert_eq!(read(data, 32), (0..32).map(|i| 7 * i).collect::<Vec<u32>>());
        ok(cuModuleUnload(module));
    };
    let mut module = 0;
    for image in images {
        // SAFETY: the images are whole.
        ok(unsafe { cuModuleLoadData(&mut module, image.as_ptr()) });
        check(module);
    }
    ok(cuModuleLoadFatBinary(&mut module, wrapper.as_ptr().cast()));
    check(module);
    let path = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/fatbin/zstd.fatbin\0");
    ok(cuModuleLoad(&mut module, path.as_ptr()));
    check(module);

    let (code, log) = refused(include_bytes!("fatbin/sass.fatbin"));
    assert_eq!(code, 209);
    assert!(log.contains("no PTX") && log.contains("device code: 1"), "{log}");
    assert_eq!(refused(include_bytes!("fatbin/newer.fatbin")).0, 209);
    let mut damaged = plain.to_vec();
    damaged[20] = 0xff;
    assert_eq!(refused(&damaged).0, 200);
    ok(cuCtxDestroy_v2(context));
}

#[test]
fn a_failed_kernel_spoils_its_context_only() {
    let spoiled = context();
    let module = load(PTX);
    ok(launch_scale(function(module, c"scale"), 0x1000, 1, 0));
    assert_eq!(cuCtxSynchronize(), ILLEGAL_ADDRESS);
    let mut address = 0;
    assert_eq!(cuMemAlloc_v2(&mut address, 4), ILLEGAL_ADDRESS);
    ok(cuCtxDestroy_v2(spoiled));

    let context = context();
    let stop = function(load(PTX), c"stop");
    // SAFETY: `stop` has no parameters.
    ok(unsafe { cuLaunchKernel(stop, 1, 1, 1, 1, 1, 1, 0, 0, std::ptr::null(), std::ptr::null()) });
    assert_eq!(cuCtxSynchronize(), 719);
    ok(cuCtxDestroy_v2(context));
}

/// Loads an image with an error log; gives the code and the log.
fn refused(image: &[u8]) -> (u32, String) {
    let mut log = [0_u8; 400];
    let names = [5, 6];
    let mut values = [log.as_mut_ptr() as u64, log.len() as u64];
    let mut module = 0;
    let (names, places) = (names.as_ptr(), values.as_mut_ptr());
    // SAFETY: the options describe `log`, and the images of this file end in NUL.
    let code = unsafe { cuModuleLoadDataEx(&mut module, image.as_ptr(), 2, names, places) };
    let text = String::from_utf8(log[..values[1] as usize].to_vec()).unwrap();
    (code, text)
}

#[test]
fn images_that_cannot_run_are_refused_with_a_reason() {
    let context = context();
    let (code, log) = refused(b"\x7fELF\0");
    assert_eq!(code, 209);
    assert!(log.contains("cubin"), "{log}");
    let (code, log) = refused(b"this is no PTX\0");
    assert_eq!(code, 218);
    assert!(log.contains("line 1"), "{log}");
    let unknown = PTX.replace("trap;", "frobnicate.u32 %r1, %r2;");
    let (code, log) = refused(unknown.as_bytes());
    assert_eq!(code, 218);
    assert!(log.contains("frobnicate"), "{log}");
    assert_eq!(refused(b"\0").0, 218);
    ok(cuCtxDestroy_v2(context));
}

#[test]
fn kernels_fail_on_demand() {
    let environment = [("SOFTCUDA_FAULT", "kernel:1:slow=60,kernel:3:lost")];
    Program::start("program_that_loses_its_device", &environment).finish();
    let environment = [("SOFTCUDA_FAULT", "kernel:2:716")];
    Program::start("program_with_a_bad_kernel", &environment).finish();
}

#[test]
#[ignore = "a program for other tests"]
fn program_that_loses_its_device() {
    const DEVICE_UNAVAILABLE: u32 = 46;
    context();
    let scale = function(load(PTX), c"scale");
    let data = allocate(4);
    let begin = std::time::Instant::now();
    ok(launch_scale(scale, data, 1, 1));
    ok(cuCtxSynchronize());
    assert!(begin.elapsed().as_millis() >= 60, "the first kernel is slow");
    ok(launch_scale(scale, data, 1, 1));
    assert_eq!(read(data, 1), [4]);
    ok(launch_scale(scale, data, 1, 1));
    assert_eq!(cuCtxSynchronize(), DEVICE_UNAVAILABLE);
    let mut address = 0;
    assert_eq!(cuMemAlloc_v2(&mut address, 4), DEVICE_UNAVAILABLE);
    let mut context = 0;
    assert_eq!(cuCtxCreate_v2(&mut context, 0, 0), DEVICE_UNAVAILABLE);
}

/// As the tests of NVIDIA's cuda-bindings ask it.
#[test]
fn nothing_has_no_name() {
    unsafe extern "C" {
        safe fn cuFuncGetName(name: &mut usize, function: u64) -> u32;
        safe fn cuKernelGetName(name: &mut usize, kernel: u64) -> u32;
    }
    context();
    let mut name = 7;
    assert_eq!(cuFuncGetName(&mut name, 0), INVALID_VALUE);
    assert_eq!(cuKernelGetName(&mut name, 0), INVALID_VALUE);
    assert_eq!(cuFuncGetName(&mut name, 1), INVALID_HANDLE);
    assert_eq!(cuKernelGetName(&mut name, 1), INVALID_HANDLE);
    assert_eq!(name, 7);
}

#[test]
#[ignore = "a program for other tests"]
fn program_with_a_bad_kernel() {
    const MISALIGNED_ADDRESS: u32 = 716;
    context();
    let scale = function(load(PTX), c"scale");
    let data = allocate(4);
    ok(launch_scale(scale, data, 1, 1));
    ok(cuCtxSynchronize());
    ok(launch_scale(scale, data, 1, 1));
    assert_eq!(cuCtxSynchronize(), MISALIGNED_ADDRESS);
    let mut context = 0;
    ok(cuCtxCreate_v2(&mut context, 0, 0));
}
