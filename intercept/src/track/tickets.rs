//! Exported POSIX handles. What the program gets for a block, a multicast object or a pool of its own is a ticket: a sealed memfd that names
//! the process and the block. Importing a ticket asks that process for the real descriptor, so that both sides can be detached and
//! put back. Whatever else is imported is forwarded, and counted.

use std::ffi::c_void;
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

use gpucr_wire::peers::{PeerReply, PeerRequest};
use rustix::fs::{MemfdFlags, SealFlags, fcntl_add_seals, fcntl_get_seals, fstat, memfd_create};

use super::offered::{For, LENGTH, Offered};
use super::owners::ask_owner;
use crate::abi::real;
use crate::abi::types::{
    Code, ERROR_INVALID_DEVICE, ERROR_INVALID_VALUE, ERROR_OPERATING_SYSTEM, HANDLE_POSIX_FD,
};
use crate::log::log;
use crate::state::memory::vmm::Driver;
use crate::state::{memory, peers};

/// What nobody can undo or change.
const SEALS: SealFlags =
    SealFlags::SEAL.union(SealFlags::SHRINK).union(SealFlags::GROW).union(SealFlags::WRITE);

/// A ticket for a block or a pool of this process.
///
/// # Errors
/// `ERROR_OPERATING_SYSTEM`: there is no descriptor, or nobody can be served.
pub(super) fn make(what: For, name: u64) -> Result<OwnedFd, Code> {
    let made = || -> io::Result<OwnedFd> {
        let bytes = Offered::own(name, 0)?.to_bytes(what);
        let fd = memfd_create(c"gpucr-ticket", MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING)?;
        if rustix::io::pwrite(&fd, &bytes, 0)? != bytes.len() {
            return Err(io::ErrorKind::WriteZero.into());
        }
        fcntl_add_seals(&fd, SEALS)?;
        Ok(fd)
    };
    made().map_err(|error| {
        log!("{what:?} {name} cannot be exported: {error}");
        ERROR_OPERATING_SYSTEM
    })
}

/// What a ticket says. `None`: it is none.
pub(super) fn read(fd: BorrowedFd<'_>, what: For) -> Option<Offered> {
    // What can still change, or be read for ever, is no ticket.
    let is_sealed = fcntl_get_seals(fd).is_ok_and(|seals| seals.contains(SEALS));
    if !is_sealed || fstat(fd).ok()?.st_size != LENGTH as i64 {
        return None;
    }
    let mut bytes = [0; LENGTH];
    let read = rustix::io::pread(fd, &mut bytes, 0).ok()?;
    (read == LENGTH).then_some(())?;
    Offered::of(&bytes, what)
}

/// The ticket behind a handle of this kind; none if it is none of ours.
pub(super) fn behind(os_handle: *mut c_void, kind: u32, what: For) -> Option<Offered> {
    let fd =
        i32::try_from(os_handle as u64).ok().filter(|fd| kind == HANDLE_POSIX_FD && *fd >= 0)?;
    // SAFETY: the caller lends the descriptor for the length of the call; one that is not open fails in the kernel.
    read(unsafe { BorrowedFd::borrow_raw(fd) }, what)
}

/// Imports the block or the multicast object of a ticket; its handle.
///
/// # Errors
/// `ERROR_INVALID_VALUE`: the owner does not give it. Or the driver's code.
pub(super) fn import(ticket: &Offered) -> Result<u64, Code> {
    let Offered { owner, pid, namespace, name: block, .. } = *ticket;
    let own = peers::identity().ok_or(ERROR_OPERATING_SYSTEM)?;
    if owner == own {
        return memory::lock().import_own(block).ok_or(ERROR_INVALID_VALUE);
    }
    let request = PeerRequest::Import { owner, block, opener: own };
    let origin = memory::Origin { owner, pid, namespace, block };
    let (whole, fd) = match ask_owner(ticket, &request) {
        Some((PeerReply::Imported { block }, fd)) => (block, fd),
        Some((PeerReply::Object { team }, fd)) => {
            return memory::lock().import_object(&Driver, origin, &team, fd.as_fd());
        }
        _ => return Err(ERROR_INVALID_VALUE),
    };
    // Host memory is of no device.
    let device = if whole.node == 0 { real::device_of(whole.device) } else { Some(0) };
    let device = device.ok_or(ERROR_INVALID_DEVICE)?;
    memory::lock().import(&Driver, origin, &whole, device, fd.as_fd())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn memfd(bytes: &[u8], seals: SealFlags) -> OwnedFd {
        let fd = memfd_create(c"x", MemfdFlags::ALLOW_SEALING).expect("made");
        assert_eq!(rustix::io::pwrite(&fd, bytes, 0), Ok(bytes.len()));
        fcntl_add_seals(&fd, seals).expect("sealed");
        fd
    }

    #[test]
    fn only_what_is_sealed_and_whole_is_a_ticket() {
        let offered = Offered { owner: [3; 16], namespace: 4, pid: 5, name: 6, address: 0 };
        let bytes = offered.to_bytes(For::Block);
        assert_eq!(read(memfd(&bytes, SEALS).as_fd(), For::Block), Some(offered));
        let longer = [&bytes[..], &[0]].concat();
        let other = offered.to_bytes(For::Memory);
        for fd in [
            memfd(&bytes, SealFlags::WRITE | SealFlags::GROW | SealFlags::SHRINK),
            memfd(&bytes, SealFlags::SEAL | SealFlags::GROW | SealFlags::SHRINK),
            memfd(&bytes[..63], SEALS),
            memfd(&longer, SEALS),
            memfd(&other, SEALS),
            std::fs::File::open("/dev/zero").expect("it is there").into(),
        ] {
            assert_eq!(read(fd.as_fd(), For::Block), None, "{fd:?}");
        }
    }
}
