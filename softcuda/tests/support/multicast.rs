//! Multicast objects, and kernels of one instruction or a few.

use super::*;

unsafe extern "C" {
    pub(crate) safe fn cuDeviceGetAttribute(value: &mut i32, attribute: u32, device: i32) -> u32;
    pub(crate) safe fn cuMulticastCreate(handle: &mut u64, properties: &ObjectProperties) -> u32;
    pub(crate) safe fn cuMulticastAddDevice(handle: u64, device: i32) -> u32;
    pub(crate) safe fn cuMulticastBindMem(
        handle: u64,
        offset: usize,
        memory: u64,
        from: usize,
        size: usize,
        flags: u64,
    ) -> u32;
    pub(crate) safe fn cuMulticastBindMem_v2(
        handle: u64,
        device: i32,
        offset: usize,
        memory: u64,
        from: usize,
        size: usize,
        flags: u64,
    ) -> u32;
    pub(crate) safe fn cuMulticastBindAddr(
        handle: u64,
        offset: usize,
        address: u64,
        size: usize,
        flags: u64,
    ) -> u32;
    pub(crate) safe fn cuMulticastBindAddr_v2(
        handle: u64,
        device: i32,
        offset: usize,
        address: u64,
        size: usize,
        flags: u64,
    ) -> u32;
    pub(crate) safe fn cuMulticastUnbind(
        handle: u64,
        device: i32,
        offset: usize,
        size: usize,
    ) -> u32;
    pub(crate) safe fn cuMulticastGetGranularity(
        size: &mut usize,
        properties: &ObjectProperties,
        option: u32,
    ) -> u32;
}

/// `CU_DEVICE_ATTRIBUTE_MULTICAST_SUPPORTED`.
pub(crate) const MULTICAST_SUPPORTED: u32 = 132;
pub(crate) const HOPPER: &str = "NVIDIA H100 80GB HBM3,9.0,4,1G";

/// `CUmulticastObjectProp`.
#[repr(C)]
#[derive(Clone, Copy)]
pub(crate) struct ObjectProperties {
    pub(crate) devices: u32,
    pub(crate) size: usize,
    pub(crate) handle_types: u64,
    pub(crate) flags: u64,
}

pub(crate) fn object_of(devices: u32, size: usize) -> ObjectProperties {
    ObjectProperties { devices, size, handle_types: 1, flags: 0 }
}

/// A shareable object.
#[track_caller]
pub(crate) fn create(devices: u32, size: usize) -> u64 {
    let mut handle = 0;
    ok(cuMulticastCreate(&mut handle, &object_of(devices, size)));
    handle
}

/// A shareable object that the first devices were added to.
#[track_caller]
pub(crate) fn team(devices: u32, size: usize) -> u64 {
    let handle = create(devices, size);
    (0..devices as i32).for_each(|device| ok(cuMulticastAddDevice(handle, device)));
    handle
}

/// Maps all of an object, for device 0.
#[track_caller]
pub(crate) fn map_object(object: u64, size: usize) -> u64 {
    map_object_on(0, object, size)
}

#[track_caller]
pub(crate) fn map_object_on(location: i32, object: u64, size: usize) -> u64 {
    let mut address = 0;
    ok(cuMemAddressReserve(&mut address, size, 0, 0, 0));
    ok(cuMemMap(address, size, 0, object, 0));
    ok(cuMemSetAccess(address, size, &Access { location, ..READ_WRITE }, 1));
    address
}

/// Shareable memory of a device, mapped and accessible: handle and address.
#[track_caller]
pub(crate) fn map_on(location: i32, size: usize) -> (u64, u64) {
    let mut handle = 0;
    ok(cuMemCreate(&mut handle, size, &Properties { location, ..SHAREABLE }, 0));
    (handle, map_object_on(location, handle, size))
}

/// A kernel `k` with two parameters of 8 bytes, loaded into `%a` and `%b`, and the number of the thread in its block
/// in `%t`.
pub(crate) fn kernel(body: &str) -> String {
    format!(
        ".version 8.6\n.target sm_90\n.address_size 64\n.visible .entry k(.param .u64 a, .param .u64 b)\n{{\n\
         .reg .pred %p<9>; .reg .b16 %h<20>; .reg .b32 %r<20>; .reg .f32 %f<20>; .reg .b64 %rd<20>;\n\
         .reg .f64 %fd<9>; .reg .b64 %a, %b; .reg .b32 %t;\n\
         ld.param.u64 %a, [a]; ld.param.u64 %b, [b]; mov.u32 %t, %tid.x;\n{body}\nret;\n}}\n\0"
    )
}

/// Loads such a kernel: the code, and the module.
pub(crate) fn load(body: &str) -> (u32, u64) {
    let mut module = 0;
    // SAFETY: the text ends in NUL.
    (unsafe { cuModuleLoadData(&mut module, kernel(body).as_ptr()) }, module)
}

/// Runs such a kernel with one warp, and waits: the code.
#[track_caller]
pub(crate) fn run(body: &str, parameters: &[u64; 2]) -> u32 {
    run_many(body, 1, parameters)
}

/// Runs such a kernel with so many warps, each a block, and waits: the code.
#[track_caller]
pub(crate) fn run_many(body: &str, blocks: u32, parameters: &[u64; 2]) -> u32 {
    let (code, module) = load(body);
    assert_eq!(code, 0, "{body}");
    let mut function = 0;
    let places = parameters.each_ref().map(|value| (&raw const *value).cast::<u8>());
    // SAFETY: the name is a C string, and the kernel has these parameters.
    unsafe {
        ok(cuModuleGetFunction(&mut function, module, c"k".as_ptr().cast()));
        let empty = std::ptr::null();
        ok(cuLaunchKernel(function, blocks, 1, 1, 32, 1, 1, 0, 0, places.as_ptr(), empty));
    }
    let code = cuCtxSynchronize();
    if code == 0 {
        ok(cuModuleUnload(module));
    }
    code
}
