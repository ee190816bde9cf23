//! `cuMemAlloc*` and what programs ask about the memory that it gave them.

use std::collections::BTreeSet;
use std::ffi::c_void;

use super::patience::patiently;
use super::support::{enter_at, hold_for_context, put, synchronize_device};
use crate::abi::real;
use crate::abi::types::{
    Code, ERROR_INVALID_VALUE, MEMORY_HOST, POINTER_ALLOWED_HANDLE_TYPES, POINTER_BUFFER_ID,
    POINTER_CONTEXT, POINTER_IS_LEGACY_IPC_CAPABLE, POINTER_MAPPING_BASE, POINTER_MAPPING_SIZE,
    POINTER_MEMORY_TYPE, POINTER_POOL, POINTER_RANGE_SIZE, POINTER_RANGE_START,
    POINTER_SYNC_MEMOPS, SUCCESS,
};
use crate::state::memory::host::Seen;
use crate::state::memory::vmm::Driver;
use crate::state::memory::{self, Allocation};
use crate::state::{contexts, gate};
use crate::usage::{self, Kind, Thing};
use crate::watch::{broken, guard, synchronous};

/// The driver's own pitch for rows, bytes.
const PITCH: usize = 512;
/// `CU_STREAM_LEGACY`: the default stream of the current context.
const STREAM_LEGACY: u64 = 1;
/// Our buffer ids are above the driver's, which count up from 1.
const BUFFER_ID: u64 = 1 << 48;

/// What is at an address that `cuMemFree*` gives back, other than memory of the heap.
pub(super) const FREED: [Kind; 4] =
    [Kind::Pool, Kind::Managed, Kind::SharedAddress, Kind::Unsupported(Thing::ExternalAddress)];

/// Fails as every call of the driver does once a context is broken. Memory from blocks that there are is given without
/// asking the driver for anything else, so nothing else would tell.
///
/// The question is one that waits for nothing. About the legacy stream it can be asked while others capture: the driver
/// then refuses it and harms no capture, as is documented.
fn sound() -> Result<(), Code> {
    let mut status = 0;
    match call!(cuStreamIsCapturing(STREAM_LEGACY, &mut status)) {
        code if broken::is_lasting(code) => Err(code),
        _ => Ok(()),
    }
}

/// Serves an allocation. The caller is outside of the gate.
fn allocate(size: usize) -> Result<u64, Code> {
    patiently(|| {
        let (context, device) = real::current_context()?;
        contexts::became_current(context);
        sound()?;
        settle();
        let mut memory = memory::lock();
        if memory.serves(&Driver, device) {
            return memory.allocate(&Driver, device, context, size as u64);
        }
        drop(memory);
        let mut address = 0;
        real::check(call!(cuMemAlloc_v2(&mut address, size)))?;
        usage::added(Kind::Pool, address, size as u64, context);
        Ok(address)
    })
}

/// Gives back what was freed during a stream capture, once there is none: the device cannot be
/// waited for while it lasts.
fn settle() {
    let waiting = {
        let mut memory = memory::lock();
        if !memory.has_deferred() || gate::capturing() {
            return;
        }
        memory.take_deferred()
    };
    guard::wait_for_awaited();
    let (pooled, plain): (Vec<_>, Vec<_>) = waiting.iter().partition(|one| one.pool != 0);
    let contexts: BTreeSet<u64> = plain.iter().map(|allocation| allocation.context).collect();
    for context in contexts {
        // A broken context uses nothing any more either.
        let _ = real::synchronize(context);
    }
    for allocation in pooled {
        let _ = synchronize(allocation);
    }
    let mut memory = memory::lock();
    for allocation in waiting {
        memory.release(&Driver, allocation);
    }
}

/// Waits for whatever may use an allocation: memory of a pool is the device's, and any of its contexts may.
fn synchronize(allocation: &Allocation) -> Result<(), Code> {
    if allocation.pool == 0 {
        return real::synchronize(allocation.context);
    }
    let device = memory::lock().device_of(allocation);
    device.map_or(Ok(()), synchronize_device)
}

/// Frees an allocation as the driver does: whatever the device still does with it comes first.
pub(super) fn free(allocation: Allocation) -> Code {
    if gate::capturing() {
        memory::lock().defer(allocation);
        return SUCCESS;
    }
    settle();
    let result = synchronize(&allocation);
    memory::lock().release(&Driver, allocation);
    result.err().unwrap_or(SUCCESS)
}

/// Takes back one opening of what is from a pool of another process, and with the last one waits for whatever uses it:
/// later than a stream asks for, never too early. `None` if no such memory begins at `address`.
pub(super) fn close_of_pool(address: u64) -> Option<Code> {
    let closed = {
        let mut memory = memory::lock();
        memory.allocation_at(address).filter(|found| found.pool != 0)?;
        memory.close(address)?
    };
    let Some(last) = closed else { return Some(SUCCESS) };
    let code = free(last);
    super::owners::tell_owners();
    Some(code)
}

/// Frees the allocation that begins at `address`; `None` if there is none. Also for
/// `cuMemFreeAsync`: waiting for everything is later than its stream asks for, never too early.
pub(super) fn free_heap(address: u64) -> Option<Code> {
    if let Some(code) = close_of_pool(address) {
        return Some(code);
    }
    let allocation = memory::lock().take(address)?;
    let code = free(allocation);
    super::owners::tell_owners();
    Some(code)
}

/// An answer to what a program asks about a pointer.
enum Value {
    Word(u64),
    Flag(u32),
}

impl Value {
    /// `out` is where the program wants a value of the attribute's type.
    fn write(self, out: *mut c_void) {
        // SAFETY: by the function's contract there is room for it.
        unsafe {
            match self {
                Self::Word(value) => out.cast::<u64>().write_unaligned(value),
                Self::Flag(value) => out.cast::<u32>().write_unaligned(value),
            }
        }
    }
}

/// What a program asks about a pointer, where the answer for memory of the heap is not that for
/// the block it lies in.
///
/// `pool` is the driver's name of the pool that it is from, 0 for none.
fn attribute(attribute: u32, allocation: &Allocation, pool: u64, out: *mut c_void) -> bool {
    let value = match attribute {
        POINTER_CONTEXT => Value::Word(allocation.context),
        POINTER_SYNC_MEMOPS => Value::Flag(allocation.synchronous.into()),
        POINTER_BUFFER_ID => Value::Word(BUFFER_ID + allocation.buffer),
        POINTER_POOL => Value::Word(pool),
        POINTER_IS_LEGACY_IPC_CAPABLE => {
            Value::Flag((allocation.is_own() && allocation.pool == 0).into())
        }
        POINTER_RANGE_START | POINTER_MAPPING_BASE => Value::Word(allocation.address),
        POINTER_RANGE_SIZE | POINTER_MAPPING_SIZE => Value::Word(allocation.size),
        POINTER_ALLOWED_HANDLE_TYPES => Value::Word(0),
        _ => return false,
    };
    value.write(out);
    true
}

/// The same for whatever is at an address; `false` if it is not in the heap.
fn told(which: u32, address: u64, out: *mut c_void) -> bool {
    let memory = memory::lock();
    if let Some(found) = memory.allocation_at(address) {
        return attribute(which, found, memory.pool_handle(found), out);
    }
    memory.seen_host(address).is_some_and(|seen| host_attribute(which, &seen, out))
}

/// The same for host memory of `cuMemCreate`, where the answer is not that for memory that was registered.
fn host_attribute(attribute: u32, seen: &Seen, out: *mut c_void) -> bool {
    let value = match attribute {
        // It is of no context.
        POINTER_CONTEXT => Value::Word(0),
        POINTER_MEMORY_TYPE => Value::Flag(MEMORY_HOST),
        POINTER_RANGE_START | POINTER_MAPPING_BASE => Value::Word(seen.address),
        POINTER_RANGE_SIZE | POINTER_MAPPING_SIZE => Value::Word(seen.size),
        POINTER_ALLOWED_HANDLE_TYPES => Value::Word(seen.handle_types.into()),
        _ => return false,
    };
    value.write(out);
    true
}

exported! {
    fn cuMemAlloc_v2(out: *mut u64, size: usize) {
        if out.is_null() {
            return ERROR_INVALID_VALUE;
        }
        put(out, allocate(size))
    }
    fn cuMemAllocPitch_v2(
        out: *mut u64, pitch: *mut usize, width: usize, height: usize, element: u32,
    ) {
        if out.is_null() || pitch.is_null() || !matches!(element, 4 | 8 | 16) {
            return ERROR_INVALID_VALUE;
        }
        let size = width
            .checked_next_multiple_of(PITCH)
            .and_then(|row| Some((row, row.checked_mul(height)?)));
        match size {
            Some((row, size)) => match put(out, allocate(size)) {
                SUCCESS => put(pitch, Ok(row)),
                code => code,
            },
            None => ERROR_INVALID_VALUE,
        }
    }
    fn cuMemFree_v2(address: u64) {
        if gate::is_holding() && !gate::capturing() {
            // The lock is given back before anything is waited for.
            let context = memory::lock().allocation_at(address).map(|found| found.context);
            // What follows waits for that too, inside of the gate.
            context.into_iter().for_each(hold_for_context);
        }
        let _inside = enter_at(address);
        if let Some(code) = free_heap(address) {
            return code;
        }
        if memory::lock().is_heap(address) {
            return ERROR_INVALID_VALUE;
        }
        usage::ending(&FREED, address, || call!(cuMemFree_v2(address)))
    }
    fn cuMemGetAddressRange_v2(base: *mut u64, size: *mut usize, address: u64) {
        let _inside = enter_at(address);
        let found = memory::lock().allocation_at(address).map(|found| (found.address, found.size));
        let Some((start, bytes)) = found else {
            return call!(cuMemGetAddressRange_v2(base, size, address));
        };
        // Either may be null: then it is not wanted.
        if !base.is_null() {
            put(base, Ok(start));
        }
        if !size.is_null() {
            put(size, Ok(bytes as usize));
        }
        SUCCESS
    }
    fn cuPointerGetAttribute(data: *mut c_void, which: u32, address: u64) {
        let _inside = enter_at(address);
        if !data.is_null()
            && told(which, address, data)
        {
            return SUCCESS;
        }
        call!(cuPointerGetAttribute(data, which, address))
    }
    fn cuPointerSetAttribute(value: *const c_void, which: u32, address: u64) {
        let _inside = enter_at(address);
        // The only one that can be set.
        if which == POINTER_SYNC_MEMOPS && !value.is_null() {
            let mut memory = memory::lock();
            if let Some(allocation) = memory.allocation_at_mut(address) {
                // SAFETY: by the function's contract a value of the attribute's type.
                allocation.synchronous = unsafe { value.cast::<u32>().read_unaligned() } != 0;
                synchronous::want();
                return SUCCESS;
            }
            // Between what the program has: for the driver it would be mapped memory.
            if memory.is_heap(address) {
                return ERROR_INVALID_VALUE;
            }
        }
        call!(cuPointerSetAttribute(value, which, address))
    }
    fn cuPointerGetAttributes(
        count: u32, attributes: *mut u32, data: *mut *mut c_void, address: u64,
    ) {
        let _inside = enter_at(address);
        let code = call!(cuPointerGetAttributes(count, attributes, data, address));
        if code == SUCCESS {
            for i in 0..count as usize {
                // SAFETY: both arrays have `count` members: the driver has just used them.
                let (which, out) = unsafe { (attributes.add(i).read(), data.add(i).read()) };
                if !out.is_null() {
                    told(which, address, out);
                }
            }
        }
        code
    }
}
