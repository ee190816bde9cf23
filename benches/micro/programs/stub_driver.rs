//! A driver library whose functions return success at once, so that what a shim adds to a call is
//! not lost in the call itself.

use std::ffi::{c_int, c_void};

/// Succeeds.
#[unsafe(no_mangle)]
pub extern "C" fn cuInit(_flags: u32) -> u32 {
    0
}

/// Tells the version that the shim's table is made for.
///
/// # Safety
/// `version` is a place for a number.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuDriverGetVersion(version: *mut c_int) -> u32 {
    // SAFETY: by the contract of this function.
    unsafe { version.write(13000) };
    0
}

/// Whatever is asked for, the device has it: without virtual memory management the shim would leave memory to the driver.
///
/// # Safety
/// `value` is a place for a number.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuDeviceGetAttribute(
    value: *mut c_int,
    _attribute: u32,
    _device: i32,
) -> u32 {
    // SAFETY: by the contract of this function.
    unsafe { value.write(1) };
    0
}

/// Succeeds without copying anything.
#[unsafe(no_mangle)]
pub extern "C" fn cuMemcpyAsync(_to: u64, _from: u64, _size: usize, _stream: u64) -> u32 {
    0
}

/// Succeeds without launching anything.
#[unsafe(no_mangle)]
#[allow(clippy::too_many_arguments)]
pub extern "C" fn cuLaunchKernel(
    _function: u64,
    _grid_x: u32,
    _grid_y: u32,
    _grid_z: u32,
    _block_x: u32,
    _block_y: u32,
    _block_z: u32,
    _shared: u32,
    _stream: u64,
    _parameters: *mut *mut c_void,
    _extra: *mut *mut c_void,
) -> u32 {
    0
}

/// A context, which is always current.
///
/// # Safety
/// `context` is a place for a handle.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuCtxGetCurrent(context: *mut u64) -> u32 {
    // SAFETY: by the contract of this function.
    unsafe { context.write(1) };
    0
}

/// Succeeds.
#[unsafe(no_mangle)]
pub extern "C" fn cuCtxSetCurrent(_context: u64) -> u32 {
    0
}

/// The first device.
///
/// # Safety
/// `device` is a place for a number.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuCtxGetDevice(device: *mut i32) -> u32 {
    // SAFETY: by the contract of this function.
    unsafe { device.write(0) };
    0
}

/// 1 GiB.
///
/// # Safety
/// `bytes` is a place for a number.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuDeviceTotalMem_v2(bytes: *mut usize, _device: i32) -> u32 {
    // SAFETY: by the contract of this function.
    unsafe { bytes.write(1 << 30) };
    0
}

/// 2 MiB.
///
/// # Safety
/// `bytes` is a place for a number.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuMemGetAllocationGranularity(
    bytes: *mut usize,
    _prop: *const c_void,
    _option: u32,
) -> u32 {
    // SAFETY: by the contract of this function.
    unsafe { bytes.write(2 << 20) };
    0
}

/// An address at which nothing is, the same each time.
///
/// # Safety
/// `address` is a place for an address.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuMemAddressReserve(
    address: *mut u64,
    _size: usize,
    _alignment: usize,
    _hint: u64,
    _flags: u64,
) -> u32 {
    // SAFETY: by the contract of this function.
    unsafe { address.write(0x7000_0000_0000) };
    0
}

/// A handle, the same each time.
///
/// # Safety
/// `handle` is a place for a handle.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuMemCreate(
    handle: *mut u64,
    _size: usize,
    _prop: *const c_void,
    _flags: u64,
) -> u32 {
    // SAFETY: by the contract of this function.
    unsafe { handle.write(1) };
    0
}

/// Succeeds without mapping anything.
#[unsafe(no_mangle)]
pub extern "C" fn cuMemMap(_: u64, _: usize, _: usize, _: u64, _: u64) -> u32 {
    0
}

/// Succeeds.
#[unsafe(no_mangle)]
pub extern "C" fn cuMemSetAccess(_: u64, _: usize, _: *const c_void, _: usize) -> u32 {
    0
}

/// Every kernel has ten parameters of 8 bytes.
///
/// # Safety
/// `offset` and `size` are places for numbers.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuFuncGetParamInfo(
    _function: u64,
    index: usize,
    offset: *mut usize,
    size: *mut usize,
) -> u32 {
    if index >= 10 {
        return 1; // invalid value
    }
    // SAFETY: by the contract of this function.
    unsafe {
        offset.write(8 * index);
        size.write(8);
    }
    0
}

/// An event, the same each time.
///
/// # Safety
/// `event` is a place for a handle.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuEventCreate(event: *mut u64, _flags: u32) -> u32 {
    // SAFETY: by the contract of this function.
    unsafe { event.write(1) };
    0
}

/// Succeeds.
#[unsafe(no_mangle)]
pub extern "C" fn cuEventRecord(_event: u64, _stream: u64) -> u32 {
    0
}

/// All is over.
#[unsafe(no_mangle)]
pub extern "C" fn cuEventQuery(_event: u64) -> u32 {
    0
}

/// It took no time.
///
/// # Safety
/// `ms` is a place for a number.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuEventElapsedTime(ms: *mut f32, _begin: u64, _end: u64) -> u32 {
    // SAFETY: by the contract of this function.
    unsafe { ms.write(0.0) };
    0
}
