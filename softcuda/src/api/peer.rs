//! Access of devices to each other's memory. Every device can access every other.

use super::arguments::{In, Out};
use super::device::atomics;
use super::driver_api;
use crate::context;
use crate::settings::device;
use crate::status::{Code, Outcome};

/// `CUdevice_P2PAttribute`.
const PERFORMANCE_RANK: u32 = 1;
const ACCESS: u32 = 2;
const NATIVE_ATOMICS: u32 = 3;
const ARRAYS: u32 = 4;
const PARTIAL_ATOMICS: u32 = 5;

fn attribute(number: u32, one: i32, other: i32) -> Outcome<i32> {
    if device(one)? == device(other)? {
        return Err(Code::INVALID_DEVICE);
    }
    match number {
        ACCESS | NATIVE_ATOMICS => Ok(1),
        PERFORMANCE_RANK | ARRAYS | PARTIAL_ATOMICS => Ok(0),
        _ => Err(Code::INVALID_VALUE),
    }
}

driver_api! {
    call fn cuDeviceCanAccessPeer(out: Out<i32>, one: i32, other: i32) {
        out.set((device(one)? != device(other)?).into())
    }

    call fn cuDeviceGetP2PAttribute(out: Out<i32>, number: u32, one: i32, other: i32) {
        out.check()?;
        out.set(attribute(number, one, other)?)
    }

    call fn cuDeviceGetP2PAtomicCapabilities(
        out: Out<u32>, operations: In<u32>, count: u32, one: i32, other: i32,
    ) {
        if device(one)? == device(other)? {
            return Err(Code::INVALID_DEVICE);
        }
        atomics(&out, &operations, count)
    }

    call fn cuCtxEnablePeerAccess(handle: u64, flags: u32) {
        let own = context::current()?;
        if flags != 0 {
            return Err(Code::INVALID_VALUE);
        }
        let peer = context::by_handle(handle)?;
        if own.handle == peer.handle {
            return Err(Code::INVALID_CONTEXT);
        }
        if own.device == peer.device {
            return Err(Code::PEER_ACCESS_UNSUPPORTED);
        }
        let new = own.peers.lock().insert(handle);
        if new { Ok(()) } else { Err(Code::PEER_ACCESS_ALREADY_ENABLED) }
    }

    call fn cuCtxDisablePeerAccess(handle: u64) {
        let own = context::current()?;
        context::by_handle(handle)?;
        let known = own.peers.lock().remove(&handle);
        if known { Ok(()) } else { Err(Code::PEER_ACCESS_NOT_ENABLED) }
    }
}
