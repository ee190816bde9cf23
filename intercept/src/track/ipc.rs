//! Legacy IPC memory. The heap's memory is offered to other processes under the shim by handles of ours, which name
//! the process and the allocation; what a program opens by such a handle is followed, so that both sides can be
//! detached and put back. Handles of the driver's own are forwarded, and counted.

use std::ffi::c_void;
use std::os::fd::{AsFd, OwnedFd};

use gpucr_wire::peers::{Identity, PeerReply, PeerRequest, Piece};

use super::counted::added;
use super::heap::free;
use super::offered::{For, Offered};
use super::owners::{ask_owner, tell_owners};
use super::support::{enter_at, put};
use crate::abi::real;
use crate::abi::table::index;
use crate::abi::types::{
    Code, ERROR_INVALID_CONTEXT, ERROR_INVALID_DEVICE, ERROR_INVALID_VALUE, ERROR_MAP_FAILED,
    ERROR_NOT_SUPPORTED, IpcHandle, SUCCESS,
};
use crate::state::memory::vmm::Driver;
use crate::state::{gate, memory, peers};
use crate::usage::{Kind, ending};

/// `CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS`, which the driver demands.
const LAZY_PEER_ACCESS: u32 = 1;

/// The handle of memory of ours at `address`; `None` if it is not the heap's.
fn offer(address: u64) -> Option<Result<IpcHandle, Code>> {
    let offered = memory::lock().offered(address)?;
    Some(offered.and_then(|(allocation, address)| {
        let own = Offered::own(allocation, address).map_err(|_| ERROR_NOT_SUPPORTED)?;
        Ok(IpcHandle(own.to_bytes(For::Memory)))
    }))
}

/// Asks the owner for the memory of a handle.
fn ask(handle: &Offered, opener: Identity) -> Option<(Piece, OwnedFd)> {
    let Offered { owner, name, address, .. } = *handle;
    let request = PeerRequest::Open { owner, allocation: name, address, opener };
    match ask_owner(handle, &request)? {
        (PeerReply::Opened { piece }, fd) if piece.is_possible() => Some((piece, fd)),
        _ => None,
    }
}

/// Opens memory of another process under the shim.
fn open(handle: &Offered, flags: u32) -> Result<u64, Code> {
    let (context, current) = real::current_context()?;
    if flags != LAZY_PEER_ACCESS {
        return Err(ERROR_INVALID_VALUE);
    }
    let own = peers::identity().ok_or(ERROR_NOT_SUPPORTED)?;
    if handle.owner == own {
        return Err(ERROR_INVALID_CONTEXT);
    }
    let (piece, fd) = ask(handle, own).ok_or(ERROR_MAP_FAILED)?;
    let device = real::device_of(piece.device).ok_or(ERROR_INVALID_DEVICE)?;
    let Offered { owner, pid, namespace, .. } = *handle;
    let origin = memory::Origin { owner, pid, namespace, block: piece.block };
    let mut memory = memory::lock();
    memory.open(&Driver, origin, &piece, fd.as_fd(), (device, current), context)
}

/// Opens memory by whatever handle.
fn open_any(slot: usize, out: *mut u64, handle: IpcHandle, flags: u32) -> Code {
    let _inside = gate::enter();
    if let Some(offered) = Offered::of(&handle.0, For::Memory) {
        return if out.is_null() { ERROR_INVALID_VALUE } else { put(out, open(&offered, flags)) };
    }
    // SAFETY: the program's own arguments, to the function of this name.
    let code = unsafe { real::ipc_open(slot, out, handle, flags) };
    added(code, Kind::SharedAddress, out, 0)
}

exported! {
    fn cuIpcGetMemHandle(out: *mut c_void, address: u64) {
        let _inside = enter_at(address);
        if let Some(offered) = offer(address) {
            return put(out.cast(), real::current_context().and(offered));
        }
        let code = call!(cuIpcGetMemHandle(out, address));
        added(code, Kind::SharedAddress, &address, 0)
    }
    fn cuIpcOpenMemHandle(out: *mut u64, handle: IpcHandle, flags: u32) {
        open_any(index::cuIpcOpenMemHandle, out, handle, flags)
    }
    fn cuIpcOpenMemHandle_v2(out: *mut u64, handle: IpcHandle, flags: u32) {
        open_any(index::cuIpcOpenMemHandle_v2, out, handle, flags)
    }
    fn cuIpcCloseMemHandle(address: u64) {
        let _inside = enter_at(address);
        let closed = memory::lock().close(address);
        match closed {
            Some(Some(last)) => {
                let code = free(last);
                tell_owners();
                code
            }
            Some(None) => SUCCESS,
            None => ending(&[Kind::SharedAddress], address, || call!(cuIpcCloseMemHandle(address))),
        }
    }
}
