//! The agent's sockets: its name, who may connect, and what the child of a fork closes.

use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd};
use std::os::unix::net::UnixListener;
use std::sync::atomic::{AtomicI32, Ordering};

use gpucr_wire::{AGENT_QUEUE, Connection};

use crate::log::log;

/// The sockets, for the child of a fork to close; -1 is none.
static LISTENER: AtomicI32 = AtomicI32::new(-1);
static CONNECTION: AtomicI32 = AtomicI32::new(-1);

/// Listens on the agent's name, or on another one if somebody on the host has taken that.
pub(super) fn listen() -> io::Result<UnixListener> {
    // Without /proc nobody finds it either.
    let namespace = gpucr_wire::own_pid_namespace().unwrap_or_default();
    let pid = std::process::id();
    let name = gpucr_wire::agent_socket(namespace, pid);
    let listener = match Connection::listen(&name) {
        Err(error) if error.kind() == io::ErrorKind::AddrInUse => {
            let aside = gpucr_wire::agent_socket_aside(namespace, pid)?;
            log!("somebody else listens on {name}; this agent listens on {aside}");
            Connection::listen(&aside)
        }
        done => done,
    }?;
    rustix::net::listen(&listener, AGENT_QUEUE)?;
    LISTENER.store(listener.as_raw_fd(), Ordering::SeqCst);
    Ok(listener)
}

/// The listener is closed: there is no agent.
pub(super) fn unlisten() {
    LISTENER.store(-1, Ordering::SeqCst);
}

/// A connection that is served. For the child of a fork to close, until this is dropped.
pub(super) struct Served;

impl Served {
    pub(super) fn new(connection: &Connection) -> Self {
        CONNECTION.store(connection.as_fd().as_raw_fd(), Ordering::SeqCst);
        Self
    }
}

impl Drop for Served {
    fn drop(&mut self) {
        CONNECTION.store(-1, Ordering::SeqCst);
    }
}

/// Whether the other end is of root or of this process's own user.
pub(super) fn is_trusted(connection: &Connection) -> bool {
    let own = rustix::process::geteuid().as_raw();
    match connection.peer() {
        Ok(peer) if peer.uid == own || peer.uid == 0 => return true,
        Ok(peer) => log!("user {} is refused", peer.uid),
        Err(error) => log!("cannot tell who connects: {error}"),
    }
    false
}

/// Makes this process the one that listens, as who connects sees it. After a restore that is the gpucr
/// that made the socket.
pub(super) fn answer_to_the_name() {
    // SAFETY: the listener is never closed while the agent runs.
    let listener = unsafe { BorrowedFd::borrow_raw(LISTENER.load(Ordering::SeqCst)) };
    if let Err(error) = rustix::net::listen(listener, AGENT_QUEUE) {
        log!("cannot listen: {error}");
    }
}

/// Closes the sockets, in the child of a fork.
///
/// # Safety
/// No other thread exists.
pub(super) unsafe fn reset() {
    for socket in [&LISTENER, &CONNECTION] {
        let fd = socket.swap(-1, Ordering::SeqCst);
        if fd >= 0 {
            // SAFETY: its owner is a thread that this process does not have.
            unsafe { libc::close(fd) };
        }
    }
}
