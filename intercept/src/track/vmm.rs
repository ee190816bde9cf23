//! The program's own virtual memory management. Its device memory is followed, and so are [multicast objects](super::multicast)
//! and what is of other processes under the shim; host memory is [the kernel's](crate::state::memory::host); what it takes from others is
//! forwarded, and counted as long as it lives.

use std::ffi::c_void;
use std::os::fd::IntoRawFd;

use super::host_blocks::{self, Pins};
use super::multicast;
use super::offered::For;
use super::owners::tell_owners;
use super::patience::patiently;
use super::support::{enter_whole, hold_for, put, written};
use super::tickets;
use crate::abi::real;
use crate::abi::types::{
    ALLOCATION_PINNED, Access, AllocationProp, ArrayMapInfo, Code, ERROR_INVALID_VALUE,
    ERROR_OUT_OF_MEMORY, HANDLE_POSIX_FD, LOCATION_DEVICE, Location, SUCCESS,
};
use crate::state::memory::vmm::Driver;
use crate::state::memory::{self, IMPORT};
use crate::usage::{self, Thing};

/// Calls `map` with a copy of a list of mappings in which handles of ours are the driver's.
fn map_arrays(
    list: *mut c_void,
    count: u32,
    name: &'static str,
    map: impl FnOnce(*mut c_void) -> Code,
) -> Code {
    let _inside = enter_whole();
    hold_for(None);
    if list.is_null() {
        return map(list);
    }
    // SAFETY: by the function's contract there are `count` members.
    let infos = unsafe { std::slice::from_raw_parts(list.cast::<ArrayMapInfo>(), count as usize) };
    let mut infos = infos.to_vec();
    {
        let memory = memory::lock();
        for info in &mut infos {
            info.handle = memory.real_handle(info.handle);
        }
    }
    let code = map(infos.as_mut_ptr().cast());
    if code == SUCCESS {
        let context = real::current_context().map_or(0, |(context, _)| context);
        for info in infos {
            // Which parts of it a block backs is not followed. The second word is its handle.
            usage::began(Thing::Array, info.before[1], name, context);
        }
    }
    code
}

/// Tells those whose memory was given back here, once nobody holds the tables.
fn after_release(memory: memory::Locked, code: Code) -> Code {
    drop(memory);
    tell_owners();
    code
}

exported! {
    fn cuMemCreate(out: *mut u64, size: usize, prop: *const AllocationProp, flags: u64) {
        if out.is_null() || prop.is_null() || flags != 0 {
            let _inside = enter_whole();
            return call!(cuMemCreate(out, size, prop, flags));
        }
        // SAFETY: not null, and by the function's contract such a structure.
        let asked = unsafe { prop.read() };
        let device = asked.kind == ALLOCATION_PINNED && asked.location.kind == LOCATION_DEVICE;
        let ours = device && memory::lock().serves(&Driver, asked.location.id);
        let create = || memory::lock().create(&Driver, size as u64, asked);
        if ours {
            match patiently(create) {
                // Asked once more it might give memory that is not followed.
                Err(ERROR_OUT_OF_MEMORY) => return ERROR_OUT_OF_MEMORY,
                Ok(handle) => return put(out, Ok(handle)),
                Err(_) => {}
            }
        }
        let _inside = enter_whole();
        // Host memory, or a device whose memory is left to the driver; or the driver refuses, and says why; or it
        // refuses our addition to what was asked for, and then the program gets what it wants.
        let mut memory = memory::lock();
        let code = call!(cuMemCreate(out, size, prop, flags));
        if code == SUCCESS && asked.location.is_host() {
            drop(memory);
            return put(out, host_blocks::in_place_of(written(out), size as u64));
        }
        if code == SUCCESS && (ours || !device) {
            memory.foreign_made(written(out), "cuMemCreate");
        }
        code
    }
    fn cuMemRelease(handle: u64) {
        let _inside = enter_whole();
        let mut memory = memory::lock();
        let released = memory.release_handle(&Driver, handle);
        let released = released.or_else(|| memory.release_host(handle));
        if let Some(code) = released.or_else(|| memory.release_object(&Driver, handle)) {
            return after_release(memory, code);
        }
        // A driver takes handles for addresses: it would not come back from one that is gone.
        if memory::is_marked(handle) {
            return ERROR_INVALID_VALUE;
        }
        let code = call!(cuMemRelease(handle));
        if code == SUCCESS {
            memory.foreign_released(handle);
        }
        code
    }
    fn cuMemMap(address: u64, size: usize, offset: usize, handle: u64, flags: u64) {
        let _inside = multicast::enter_complete(handle, flags == 0);
        let mut memory = memory::lock();
        if flags == 0 {
            let mapped = memory.map(&Driver, address, size as u64, offset as u64, handle);
            let mapped = mapped.or_else(|| {
                memory.map_host(address, size as u64, offset as u64, handle)
            });
            let mapped = mapped.or_else(|| {
                memory.map_object(&Driver, address, size as u64, offset as u64, handle)
            });
            if let Some(result) = mapped {
                return result.err().unwrap_or(SUCCESS);
            }
        }
        if memory::is_marked(handle) {
            return ERROR_INVALID_VALUE;
        }
        let code = call!(cuMemMap(address, size, offset, handle, flags));
        if code == SUCCESS {
            memory.foreign_mapped(address, size as u64, handle);
        }
        code
    }
    fn cuMemUnmap(address: u64, size: usize) {
        let _inside = enter_whole();
        let mut memory = memory::lock();
        if memory.touches_heap(address, size as u64) {
            return ERROR_INVALID_VALUE;
        }
        if let Some(result) = memory.unmap_host(&Pins, address, size as u64) {
            return after_release(memory, result.err().unwrap_or(SUCCESS));
        }
        let code = call!(cuMemUnmap(address, size));
        if code == SUCCESS {
            memory.unmapped(&Driver, address, size as u64);
        }
        after_release(memory, code)
    }
    fn cuMemSetAccess(address: u64, size: usize, access: *const Access, count: usize) {
        let _inside = enter_whole();
        let mut memory = memory::lock();
        // What cuMemAlloc gives has no access that could be set; here it may be shared, and only to be read.
        if memory.touches_heap(address, size as u64) {
            return ERROR_INVALID_VALUE;
        }
        if access.is_null() {
            return call!(cuMemSetAccess(address, size, access, count));
        }
        // SAFETY: not null, and by the function's contract so many.
        let given = unsafe { std::slice::from_raw_parts(access, count) };
        if let Some(result) = memory.set_host_access(&Pins, address, size as u64, given) {
            return result.err().unwrap_or(SUCCESS);
        }
        let code = call!(cuMemSetAccess(address, size, access, count));
        if code == SUCCESS {
            memory.access_set(address, size as u64, given);
        }
        code
    }
    fn cuMemGetAccess(flags: *mut u64, location: *const Location, address: u64) {
        let _inside = enter_whole();
        // SAFETY: by the function's contract null or a location.
        let seen = unsafe { location.as_ref() }
            .and_then(|location| memory::lock().host_access(address, *location));
        match seen {
            Some(seen) => put(flags, Ok(seen.into())),
            None => call!(cuMemGetAccess(flags, location, address)),
        }
    }
    fn cuMemExportToShareableHandle(out: *mut c_void, handle: u64, kind: u32, flags: u64) {
        let _inside = enter_whole();
        let mut memory = memory::lock();
        if let Some(offered) = memory.offer_host(handle, kind) {
            drop(memory);
            if flags != 0 || kind != HANDLE_POSIX_FD {
                return ERROR_INVALID_VALUE;
            }
            let ticket = offered.and_then(|block| tickets::make(For::Block, block));
            return put(out.cast(), ticket.map(IntoRawFd::into_raw_fd));
        }
        if kind == HANDLE_POSIX_FD && flags == 0 && !out.is_null()
            && let Some(offered) = memory.offer_object(handle)
        {
            drop(memory);
            let ticket = offered.and_then(|object| tickets::make(For::Block, object));
            return put(out.cast(), ticket.map(IntoRawFd::into_raw_fd));
        }
        if let Some(real) = memory.real_object(handle) {
            let code = call!(cuMemExportToShareableHandle(out, real, kind, flags));
            if code == SUCCESS {
                usage::record("cuMemExportToShareableHandle");
            }
            return code;
        }
        let Some(asked) = memory.asked_types(handle) else {
            if memory::is_marked(handle) {
                return ERROR_INVALID_VALUE;
            }
            let code = call!(cuMemExportToShareableHandle(out, handle, kind, flags));
            if code == SUCCESS {
                memory.foreign_used(handle, "cuMemExportToShareableHandle");
            }
            return code;
        };
        // The driver does not export what was imported either.
        if out.is_null() || flags != 0 || asked & kind == 0 || memory.is_imported(handle) {
            return ERROR_INVALID_VALUE;
        }
        if kind == HANDLE_POSIX_FD {
            let block = memory.offer_block(handle);
            drop(memory);
            let ticket = block.ok_or(ERROR_INVALID_VALUE);
            let ticket = ticket.and_then(|block| tickets::make(For::Block, block));
            return put(out.cast(), ticket.map(IntoRawFd::into_raw_fd));
        }
        let real = memory.real_handle(handle);
        let code = call!(cuMemExportToShareableHandle(out, real, kind, flags));
        if code == SUCCESS {
            memory.set_shared(handle);
        }
        code
    }
    fn cuMemImportFromShareableHandle(out: *mut u64, os_handle: *mut c_void, kind: u32) {
        let _inside = enter_whole();
        let ticket = tickets::behind(os_handle, kind, For::Block);
        if let Some(ticket) = ticket.filter(|_| !out.is_null()) {
            return put(out, tickets::import(&ticket));
        }
        let mut memory = memory::lock();
        let code = call!(cuMemImportFromShareableHandle(out, os_handle, kind));
        if code == SUCCESS {
            memory.foreign_made(written(out), IMPORT);
        }
        code
    }
    fn cuMemRetainAllocationHandle(out: *mut u64, address: *mut c_void) {
        let _inside = enter_whole();
        if out.is_null() {
            return ERROR_INVALID_VALUE;
        }
        let mut memory = memory::lock();
        let retained = memory.retain(address as u64);
        let retained = retained.or_else(|| memory.retain_host(address as u64).map(Ok));
        if let Some(result) = retained.or_else(|| memory.retain_object(address as u64).map(Ok)) {
            return put(out, result);
        }
        let code = call!(cuMemRetainAllocationHandle(out, address));
        if code == SUCCESS {
            memory.foreign_retained(address as u64, written(out));
        }
        code
    }
    fn cuMemGetAllocationPropertiesFromHandle(prop: *mut AllocationProp, handle: u64) {
        let _inside = enter_whole();
        let memory = memory::lock();
        if let Some(host) = memory.host_properties(handle) {
            return put(prop, Ok(host));
        }
        let real = memory.real_object(handle).unwrap_or_else(|| memory.real_handle(handle));
        if memory::is_marked(real) {
            return ERROR_INVALID_VALUE;
        }
        let code = call!(cuMemGetAllocationPropertiesFromHandle(prop, real));
        if code == SUCCESS
            && !prop.is_null()
            && let Some(asked) = memory.asked_types(handle)
        {
            // SAFETY: not null, and just written by the driver.
            unsafe { (*prop).handle_types = asked };
        }
        code
    }
    fn cuMemAddressReserve(
        out: *mut u64, size: usize, alignment: usize, address: u64, flags: u64,
    ) {
        let _inside = enter_whole();
        let code = call!(cuMemAddressReserve(out, size, alignment, address, flags));
        if code == SUCCESS {
            memory::lock().reserved(written(out), size as u64);
        }
        code
    }
    fn cuMemAddressFree(address: u64, size: usize) {
        let _inside = enter_whole();
        let mut memory = memory::lock();
        // The driver refuses it where something is mapped.
        if memory.has_host(address, size as u64) {
            return ERROR_INVALID_VALUE;
        }
        let code = call!(cuMemAddressFree(address, size));
        if code == SUCCESS {
            memory.unreserved(address);
        }
        code
    }
    fn cuMemMapArrayAsync(list: *mut c_void, count: u32, stream: u64) {
        map_arrays(list, count, "cuMemMapArrayAsync", |list| {
            call!(cuMemMapArrayAsync(list, count, stream))
        })
    }
    fn cuMemMapArrayAsync_ptsz(list: *mut c_void, count: u32, stream: u64) {
        map_arrays(list, count, "cuMemMapArrayAsync", |list| {
            call!(cuMemMapArrayAsync_ptsz(list, count, stream))
        })
    }
    fn cuLogicalEndpointBindMem(
        endpoint: u32, device: i32, offset: u64, handle: u64, handle_offset: u64, size: u64,
        flags: u64,
    ) {
        let _inside = enter_whole();
        let real = memory::lock().real_handle(handle);
        if memory::is_marked(real) {
            return ERROR_INVALID_VALUE;
        }
        let code = call!(cuLogicalEndpointBindMem(
            endpoint, device, offset, real, handle_offset, size, flags
        ));
        if code == SUCCESS {
            usage::record("cuLogicalEndpointBindMem");
        }
        code
    }
}
