//! Legacy IPC memory. The heap's memory is offered to other processes under the shim by handles of ours, which name
//! the process and the allocation; what a program opens by such a handle is followed, so that both sides can be
//! detached and put back. Handles of the driver's own are forwarded, and counted.

use std::ffi::c_void;
use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::thread;
use std::time::{Duration, Instant};

use gpucr_wire::peers::{Identity, PeerReply, PeerRequest, Piece};

use super::counted::added;
use super::heap::free;
use super::owners::{LONGEST, connect, tell_owners};
use super::support::{enter_at, put};
use crate::abi::real;
use crate::abi::table::index;
use crate::abi::types::{
    Code, ERROR_INVALID_CONTEXT, ERROR_INVALID_DEVICE, ERROR_INVALID_VALUE, ERROR_MAP_FAILED,
    ERROR_NOT_SUPPORTED, IpcHandle, SUCCESS,
};
use crate::agent;
use crate::log::log;
use crate::state::memory::vmm::Driver;
use crate::state::{gate, memory, peers};
use crate::usage::{Kind, ending};

/// What our handles begin with.
const MAGIC: [u8; 8] = *b"gpucr-ip";
/// `CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS`, which the driver demands.
const LAZY_PEER_ACCESS: u32 = 1;
/// How long an owner may take to answer, whose memory may be away for a dump of its own.
const PATIENCE: Duration = Duration::from_secs(60);
/// Between two questions to an owner whose memory is not in its place.
const PAUSE: Duration = Duration::from_millis(5);

/// What our handles say.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Offered {
    owner: Identity,
    /// The owner's pid namespace, and its pid in it.
    namespace: u64,
    pid: u32,
    allocation: u64,
    address: u64,
}

impl Offered {
    fn to_handle(self) -> IpcHandle {
        let parts: [&[u8]; 6] = [
            &MAGIC,
            &self.owner,
            &self.namespace.to_le_bytes(),
            &u64::from(self.pid).to_le_bytes(),
            &self.allocation.to_le_bytes(),
            &self.address.to_le_bytes(),
        ];
        let mut bytes = [0; 64];
        let mut rest = &mut bytes[..];
        for part in parts {
            let (place, after) = rest.split_at_mut(part.len());
            place.copy_from_slice(part);
            rest = after;
        }
        IpcHandle(bytes)
    }

    /// `None`: it is no handle of ours.
    fn of(handle: &IpcHandle) -> Option<Self> {
        let (magic, rest) = handle.0.split_first_chunk()?;
        let (owner, rest) = rest.split_first_chunk()?;
        let mut words = rest
            .chunks_exact(8)
            .map(|word| u64::from_le_bytes(word.try_into().expect("eight bytes")));
        let mut word = || words.next();
        let found = Self {
            owner: *owner,
            namespace: word()?,
            pid: word()? as u32,
            allocation: word()?,
            address: word()?,
        };
        (*magic == MAGIC).then_some(found)
    }
}

/// The handle of memory of ours at `address`; `None` if it is not the heap's.
fn offer(address: u64) -> Option<Result<IpcHandle, Code>> {
    let offered = memory::lock().offered(address)?;
    Some(offered.and_then(|(allocation, address)| {
        let made = || -> io::Result<IpcHandle> {
            agent::peers::start()?;
            let owner = peers::identity().ok_or(io::ErrorKind::Unsupported)?;
            let namespace = gpucr_wire::own_pid_namespace()?;
            let pid = std::process::id();
            Ok(Offered { owner, namespace, pid, allocation, address }.to_handle())
        };
        made().map_err(|error| {
            log!("memory cannot be offered: {error}");
            ERROR_NOT_SUPPORTED
        })
    }))
}

/// Asks the owner for the memory of a handle.
fn ask(handle: &Offered, opener: Identity) -> io::Result<Option<(Piece, OwnedFd)>> {
    let deadline = Instant::now() + PATIENCE;
    let Offered { owner, allocation, address, .. } = *handle;
    loop {
        let mut owner_of = connect(handle.namespace, handle.pid, deadline)?;
        owner_of.send(&PeerRequest::Open { owner, allocation, address, opener })?;
        match owner_of.receive_at_most(LONGEST)? {
            PeerReply::Opened { piece } if piece.is_possible() => {
                let fds = owner_of.receive_fds(1)?;
                return Ok(fds.into_iter().next().map(|fd| (piece, fd)));
            }
            PeerReply::Busy {} if Instant::now() < deadline => thread::sleep(PAUSE),
            _ => return Ok(None),
        }
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
    let asked = ask(handle, own).unwrap_or_else(|error| {
        log!("process {} does not give its memory: {error}", handle.pid);
        None
    });
    let (piece, fd) = asked.ok_or(ERROR_MAP_FAILED)?;
    let device = (0..real::device_count()).find(|device| real::uuid(*device) == piece.device);
    let device = device.ok_or(ERROR_INVALID_DEVICE)?;
    let Offered { owner, pid, namespace, .. } = *handle;
    let origin = memory::Origin { owner, pid, namespace, block: piece.block };
    let mut memory = memory::lock();
    memory.open(&Driver, origin, &piece, fd.as_fd(), (device, current), context)
}

/// Opens memory by whatever handle.
fn open_any(slot: usize, out: *mut u64, handle: IpcHandle, flags: u32) -> Code {
    let _inside = gate::enter();
    if let Some(offered) = Offered::of(&handle) {
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_handle_says_what_it_was_made_of() {
        let offered = Offered {
            owner: [7; 16],
            namespace: 1 << 40,
            pid: 12,
            allocation: 34,
            address: 1 << 46,
        };
        let handle = offered.to_handle();
        assert_eq!(Offered::of(&handle), Some(offered));
        let mut other = handle;
        other.0[0] ^= 1;
        assert_eq!(Offered::of(&other), None);
    }
}
