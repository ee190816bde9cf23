//! What a driver has that is newer than all programs: with `SOFTCUDA_NEWER` there is a function that no header
//! has, and a newer entry of a known one, which take other arguments than that does. `cuGetProcAddress`
//! alone gives them out. They are for tests of what stands in front of a driver.

use super::{call, copy};
use crate::settings;
use crate::status::Outcome;
use crate::submission::DefaultStream;

/// The version of the API since when there are these functions.
const SINCE: i32 = 13_060;
/// The latest version of the API that such a driver is taken for.
pub(super) const NEWEST: i32 = 13_999;

/// The address of a function that is asked for by this name as of this version, if it is one of these.
pub(super) fn find(name: &str, version: i32) -> Option<u64> {
    if !settings::settings().newer || version < SINCE {
        return None;
    }
    match name {
        "cuMemcpyNewest" => Some(newest as *const () as u64),
        "cuMemcpyDtoDAsync" => Some(copy_v3 as *const () as u64),
        _ => None,
    }
}

extern "C" fn newest(size: usize, to: u64, from: u64, stream: u64) -> u32 {
    call("cuMemcpyNewest", || copied(to, from, size, stream))
}

extern "C" fn copy_v3(to: u64, from: u64, size: usize, _flags: u32, stream: u64) -> u32 {
    call("cuMemcpyDtoDAsync_v3", || copied(to, from, size, stream))
}

fn copied(to: u64, from: u64, size: usize, stream: u64) -> Outcome {
    copy::within_device(DefaultStream::Legacy, to, from, size, stream)
}
