//! Stream-ordered pools that processes give each other. The driver knows ours as plain pools; what others get is a
//! [ticket](super::tickets) for the pool and handles of ours for what is allocated from it, and what they open by these is
//! followed as with [legacy IPC](super::ipc). Pools of the driver's own are forwarded, and counted.

use std::ffi::c_void;
use std::os::fd::{AsFd, IntoRawFd};

use gpucr_wire::peers::{PeerReply, PeerRequest};

use super::offered::{For, Offered};
use super::owners::{ask_owner, ask_owner_about};
use super::support::{put, written};
use super::tickets;
use super::uses::{began, shared};
use crate::abi::real;
use crate::abi::types::{
    ATTRIBUTE_POOL_HANDLES, Code, ERROR_INVALID_CONTEXT, ERROR_INVALID_DEVICE, ERROR_INVALID_VALUE,
    ERROR_MAP_FAILED, ERROR_OPERATING_SYSTEM, HANDLE_POSIX_FD, Location, PoolExport,
    PoolProperties, SUCCESS,
};
use crate::state::memory::Origin;
use crate::state::memory::vmm::Driver;
use crate::state::{gate, memory, peers};
use crate::usage::Thing;

/// Whether pools of the device that others may be given are served from the heap.
pub(super) fn are_served(device: i32) -> bool {
    let mut types = 0;
    let code = call!(cuDeviceGetAttribute(&mut types, ATTRIBUTE_POOL_HANDLES, device));
    code == SUCCESS && types as u32 & HANDLE_POSIX_FD != 0 && memory::lock().serves(&Driver, device)
}

/// What a pool of ours is exported as; `None` if it is none of ours.
fn export(pool: u64, kind: u32, flags: u64) -> Option<Result<i32, Code>> {
    let id = {
        let memory = memory::lock();
        let (id, _) = memory.pool(pool)?;
        memory.shareable_pool(id).map(|_| id)
    };
    let id = id.filter(|_| kind == HANDLE_POSIX_FD && flags == 0).ok_or(ERROR_INVALID_VALUE);
    Some(id.and_then(|id| tickets::make(For::Pool, id)).map(IntoRawFd::into_raw_fd))
}

/// Makes the pool of a ticket one of this process. The driver's pool stands for it, and never has memory.
fn import(ticket: &Offered) -> Result<u64, Code> {
    let Offered { owner, pid, namespace, name: pool, .. } = *ticket;
    let told = ask_owner_about(ticket, &PeerRequest::Pool { owner, pool });
    let Some(PeerReply::Pool { device }) = told else { return Err(ERROR_INVALID_VALUE) };
    let device = real::device_of(device).ok_or(ERROR_INVALID_DEVICE)?;
    let (mut handle, properties) = (0, PoolProperties::on_device(device));
    real::check(call!(cuMemPoolCreate(&mut handle, &properties)))?;
    let origin = Origin { owner, pid, namespace, block: pool };
    memory::lock().add_imported_pool(handle, device, origin);
    Ok(handle)
}

/// The handle of what begins at `address`; `None` if that is not of a pool of ours.
fn export_pointer(address: u64) -> Option<Result<PoolExport, Code>> {
    let offered = memory::lock().offered_of_pool(address)?;
    Some(offered.and_then(|(_, name)| {
        let own = Offered::own(name, address).map_err(|_| ERROR_OPERATING_SYSTEM)?;
        Ok(PoolExport(own.to_bytes(For::OfPool)))
    }))
}

/// Opens what a handle names, of a pool that was imported.
fn import_pointer(handle: &Offered, pool: u64) -> Result<u64, Code> {
    let found = memory::lock().imported_pool(pool);
    let (id, device, origin) = found.ok_or(ERROR_INVALID_VALUE)?;
    let own = peers::identity().ok_or(ERROR_OPERATING_SYSTEM)?;
    let Offered { owner, name: allocation, address, .. } = *handle;
    if owner == own {
        return Err(ERROR_INVALID_CONTEXT);
    }
    if owner != origin.owner {
        return Err(ERROR_INVALID_VALUE);
    }
    let pool = origin.block;
    let request = PeerRequest::OpenOfPool { owner, pool, allocation, address, opener: own };
    let (piece, fd) = match ask_owner(handle, &request).ok_or(ERROR_MAP_FAILED)? {
        (PeerReply::Opened { piece }, fd) if piece.is_possible() => (piece, fd),
        _ => return Err(ERROR_MAP_FAILED),
    };
    if real::device_of(piece.device) != Some(device) {
        return Err(ERROR_INVALID_VALUE);
    }
    memory::lock().open_of_pool(&Driver, id, &piece, fd.as_fd(), device)
}

/// Sets a device's pool by `set`; that of another process cannot give memory, which the driver does not know of it.
fn set_pool(pool: u64, set: impl FnOnce() -> Code) -> Code {
    if memory::lock().is_imported_pool(pool) { ERROR_INVALID_VALUE } else { set() }
}

exported! {
    fn cuMemPoolExportToShareableHandle(out: *mut c_void, pool: u64, kind: u32, flags: u64) {
        let _inside = gate::enter();
        if !out.is_null() && let Some(exported) = export(pool, kind, flags) {
            return put(out.cast(), exported);
        }
        let code = call!(cuMemPoolExportToShareableHandle(out, pool, kind, flags));
        began(code, Thing::Pool, pool, "cuMemPoolExportToShareableHandle")
    }
    fn cuMemPoolImportFromShareableHandle(
        out: *mut u64, os_handle: *mut c_void, kind: u32, flags: u64,
    ) {
        let _inside = gate::enter();
        let ticket = tickets::behind(os_handle, kind, For::Pool);
        if let Some(ticket) = ticket.filter(|_| !out.is_null()) {
            let imported = if flags == 0 { import(&ticket) } else { Err(ERROR_INVALID_VALUE) };
            return put(out, imported);
        }
        let code = call!(cuMemPoolImportFromShareableHandle(out, os_handle, kind, flags));
        began(code, Thing::Pool, written(out), "cuMemPoolImportFromShareableHandle")
    }
    fn cuMemPoolExportPointer(out: *mut PoolExport, address: u64) {
        let _inside = gate::enter();
        if !out.is_null() && let Some(exported) = export_pointer(address) {
            return put(out, exported);
        }
        shared(call!(cuMemPoolExportPointer(out, address)), address)
    }
    fn cuMemPoolImportPointer(out: *mut u64, pool: u64, data: *mut PoolExport) {
        let _inside = gate::enter();
        // SAFETY: by the function's contract null or such a handle.
        let handle = unsafe { data.as_ref() }.and_then(|data| Offered::of(&data.0, For::OfPool));
        if !out.is_null() && let Some(handle) = handle {
            return put(out, import_pointer(&handle, pool));
        }
        shared(call!(cuMemPoolImportPointer(out, pool, data)), written(out))
    }
    fn cuDeviceSetMemPool(device: i32, pool: u64) {
        set_pool(pool, || call!(cuDeviceSetMemPool(device, pool)))
    }
    fn cuMemSetMemPool(location: *const Location, kind: u32, pool: u64) {
        set_pool(pool, || call!(cuMemSetMemPool(location, kind, pool)))
    }
}
