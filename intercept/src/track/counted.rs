//! What is left to the driver's own checkpoint, or cannot be checkpointed at all: forwarded, and
//! counted.

use std::ffi::c_void;

use super::heap::{FREED, free_heap};
use super::support::{enter_at, hold_for, written};
use crate::abi::real;
use crate::abi::types::{Code, POINTER_IS_MANAGED, SUCCESS};
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

/// After something was allocated from a pool that the program named: pools may be of managed memory, which nobody
/// carries.
fn added_of_pool(code: Code, address: *const u64, size: usize) -> Code {
    let mut managed = 0_u64;
    let out = (&raw mut managed).cast();
    let is_managed = code == SUCCESS
        && written(address) != 0
        && call!(cuPointerGetAttribute(out, POINTER_IS_MANAGED, written(address))) == SUCCESS
        && managed as u8 == 1;
    added(code, if is_managed { Kind::Managed } else { Kind::Pool }, address, size)
}

/// What is destroyed as an array.
const ARRAYS: [Kind; 2] = [Kind::Array, Kind::Unsupported(Thing::Array)];

exported! {
    fn cuMemAllocAsync(out: *mut u64, size: usize, stream: u64) {
        let _inside = gate::enter();
        hold_for(Some(stream));
        added(call!(cuMemAllocAsync(out, size, stream)), Kind::Pool, out, size)
    }
    fn cuMemAllocAsync_ptsz(out: *mut u64, size: usize, stream: u64) {
        let _inside = gate::enter();
        hold_for(Some(stream));
        added(call!(cuMemAllocAsync_ptsz(out, size, stream)), Kind::Pool, out, size)
    }
    fn cuMemAllocFromPoolAsync(out: *mut u64, size: usize, pool: u64, stream: u64) {
        let _inside = gate::enter();
        hold_for(Some(stream));
        added_of_pool(call!(cuMemAllocFromPoolAsync(out, size, pool, stream)), out, size)
    }
    fn cuMemAllocFromPoolAsync_ptsz(out: *mut u64, size: usize, pool: u64, stream: u64) {
        let _inside = gate::enter();
        hold_for(Some(stream));
        added_of_pool(call!(cuMemAllocFromPoolAsync_ptsz(out, size, pool, stream)), out, size)
    }
    fn cuMemFreeAsync(address: u64, stream: u64) {
        let _inside = enter_at(address);
        hold_for(Some(stream));
        free_heap(address)
            .unwrap_or_else(|| ending(&FREED, address, || call!(cuMemFreeAsync(address, stream))))
    }
    fn cuMemFreeAsync_ptsz(address: u64, stream: u64) {
        let _inside = enter_at(address);
        hold_for(Some(stream));
        free_heap(address).unwrap_or_else(|| {
            ending(&FREED, address, || call!(cuMemFreeAsync_ptsz(address, stream)))
        })
    }
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
