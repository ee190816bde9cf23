//! Exclusive compute mode: one process at a time has contexts on a device. The claim is an
//! abstract socket name, which goes away with the process, however that ends.

use std::mem::ManuallyDrop;
use std::os::linux::net::SocketAddrExt;
use std::os::unix::net::{SocketAddr, UnixDatagram};

use parking_lot::Mutex;

use crate::placement;
use crate::settings::{MAX_DEVICES, settings};
use crate::status::{Code, Outcome};

struct Claim {
    contexts: usize,
    socket: Option<UnixDatagram>,
}

static CLAIMS: [Mutex<Claim>; MAX_DEVICES] =
    [const { Mutex::new(Claim { contexts: 0, socket: None }) }; MAX_DEVICES];

fn bind(device: usize) -> Outcome<UnixDatagram> {
    SocketAddr::from_abstract_name(format!("softcuda-exclusive-{}", placement::of(device)))
        .and_then(|name| UnixDatagram::bind_addr(&name))
        .map_err(|_| Code::DEVICE_UNAVAILABLE)
}

/// Counts a context; the first one claims the device if the mode is exclusive.
///
/// # Errors
/// `DEVICE_UNAVAILABLE` when another process has the device.
pub(crate) fn acquire(device: usize) -> Outcome {
    let mut claim = CLAIMS[device].lock();
    if settings().exclusive && claim.socket.is_none() {
        claim.socket = Some(bind(device)?);
    }
    claim.contexts += 1;
    Ok(())
}

/// Takes a context off; the last one frees the device.
pub(crate) fn release(device: usize) {
    let mut claim = CLAIMS[device].lock();
    claim.contexts -= 1;
    if claim.contexts == 0 {
        claim.socket = None;
    }
}

/// Frees all devices while the process is checkpointed: it holds no context then.
pub(crate) fn suspend() {
    for claim in &CLAIMS {
        claim.lock().socket = None;
    }
}

/// After a fork, in the child: the claims are the parent's.
pub(crate) fn close_in_child() {
    for claim in &CLAIMS {
        // As all locks of the child, this one is not given back.
        if let Some(claim) = claim.try_lock() {
            ManuallyDrop::new(claim).socket = None;
        }
    }
}

/// Claims the devices with contexts again.
///
/// # Errors
/// `DEVICE_UNAVAILABLE` when another process has taken one meanwhile; none is claimed then.
pub(crate) fn resume() -> Outcome {
    if !settings().exclusive {
        return Ok(());
    }
    for (device, claim) in CLAIMS.iter().enumerate() {
        let mut claim = claim.lock();
        if claim.contexts > 0 && claim.socket.is_none() {
            let bound = bind(device);
            if bound.is_err() {
                drop(claim);
                suspend();
            } else {
                claim.socket = bound.ok();
                continue;
            }
            return Err(Code::DEVICE_UNAVAILABLE);
        }
    }
    Ok(())
}
