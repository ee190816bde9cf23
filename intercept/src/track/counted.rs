//! What is left to the driver's own checkpoint, or cannot be checkpointed at all: forwarded, and
//! counted.

use std::ffi::c_void;

use super::support::{hold_for, written};
use crate::abi::real;
use crate::abi::types::{Code, SUCCESS};
use crate::state::gate;
use crate::usage::{self, Kind, Thing, ending};

/// After something was made whose name the driver wrote to `name`; null is nothing, as for no bytes of a pool.
pub(super) fn added(code: Code, kind: Kind, name: *const u64, size: usize) -> Code {
    if code == SUCCESS && written(name) != 0 {
        let context = real::current_context().map_or(0, |(context, _)| context);
        usage::added(kind, written(name), size as u64, context);
    }
    code
}

/// What is destroyed as an array.
const ARRAYS: [Kind; 2] = [Kind::Array, Kind::Unsupported(Thing::Array)];

exported! {
    fn cuMemAllocManaged(out: *mut u64, size: usize, flags: u32) {
        let _inside = gate::enter();
        added(call!(cuMemAllocManaged(out, size, flags)), Kind::Managed, out, size)
    }
    fn cuMemHostAlloc(out: *mut u64, size: usize, flags: u32) {
        let _inside = gate::enter();
        added(call!(cuMemHostAlloc(out, size, flags)), Kind::Pinned, out, size)
    }
    fn cuMemAllocHost(out: *mut u64, size: u32) {
        let _inside = gate::enter();
        added(call!(cuMemAllocHost(out, size)), Kind::Pinned, out, size as usize)
    }
    fn cuMemAllocHost_v2(out: *mut u64, size: usize) {
        let _inside = gate::enter();
        added(call!(cuMemAllocHost_v2(out, size)), Kind::Pinned, out, size)
    }
    fn cuMemHostRegister(address: u64, size: usize, flags: u32) {
        let _inside = gate::enter();
        added(call!(cuMemHostRegister(address, size, flags)), Kind::Pinned, &address, size)
    }
    fn cuMemHostRegister_v2(address: u64, size: usize, flags: u32) {
        let _inside = gate::enter();
        added(call!(cuMemHostRegister_v2(address, size, flags)), Kind::Pinned, &address, size)
    }
    fn cuMemFreeHost(address: u64) {
        let _inside = gate::enter();
        hold_for(None);
        ending(&[Kind::Pinned], address, || call!(cuMemFreeHost(address)))
    }
    fn cuMemHostUnregister(address: u64) {
        let _inside = gate::enter();
        hold_for(None);
        ending(&[Kind::Pinned], address, || call!(cuMemHostUnregister(address)))
    }
    fn cuArrayCreate(out: *mut u64, descriptor: *const c_void) {
        let _inside = gate::enter();
        added(call!(cuArrayCreate(out, descriptor)), Kind::Array, out, 0)
    }
    fn cuArrayCreate_v2(out: *mut u64, descriptor: *const c_void) {
        let _inside = gate::enter();
        added(call!(cuArrayCreate_v2(out, descriptor)), Kind::Array, out, 0)
    }
    fn cuArray3DCreate(out: *mut u64, descriptor: *const c_void) {
        let _inside = gate::enter();
        added(call!(cuArray3DCreate(out, descriptor)), Kind::Array, out, 0)
    }
    fn cuArray3DCreate_v2(out: *mut u64, descriptor: *const c_void) {
        let _inside = gate::enter();
        added(call!(cuArray3DCreate_v2(out, descriptor)), Kind::Array, out, 0)
    }
    fn cuMipmappedArrayCreate(out: *mut u64, descriptor: *const c_void, levels: u32) {
        let _inside = gate::enter();
        added(call!(cuMipmappedArrayCreate(out, descriptor, levels)), Kind::Array, out, 0)
    }
    fn cuArrayDestroy(array: u64) {
        let _inside = gate::enter();
        hold_for(None);
        ending(&ARRAYS, array, || call!(cuArrayDestroy(array)))
    }
    fn cuMipmappedArrayDestroy(array: u64) {
        let _inside = gate::enter();
        hold_for(None);
        ending(&ARRAYS, array, || call!(cuMipmappedArrayDestroy(array)))
    }
}
