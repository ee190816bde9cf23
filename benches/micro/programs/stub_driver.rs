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

/// Succeeds without writing anything.
#[unsafe(no_mangle)]
pub extern "C" fn cuDeviceGetAttribute(_value: *mut c_int, _attribute: u32, _device: i32) -> u32 {
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
