//! Sockets by whose names processes of gpucr find each other: abstract ones, so no file is left when their
//! process dies, and they belong to a network namespace.
//!
//! Both ends ask the kernel who the other is: a holder serves its own user and root, and takes nothing from
//! anybody else.

use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::time::{Duration, Instant};

use gpucr_wire::{Connection, Peer};
use rustix::net::{AddressFamily, SocketAddrUnix, SocketFlags, SocketType};

/// Clients that may wait.
const BACKLOG: i32 = 128;

/// Whose word counts: that of root and of this process's own user.
pub(crate) fn is_trusted(uid: u32) -> bool {
    uid == 0 || uid == rustix::process::geteuid().as_raw()
}

fn address(name: &str) -> io::Result<SocketAddrUnix> {
    Ok(SocketAddrUnix::new_abstract_name(name.as_bytes())?)
}

fn socket(flags: SocketFlags) -> io::Result<OwnedFd> {
    let flags = flags | SocketFlags::CLOEXEC;
    Ok(rustix::net::socket_with(AddressFamily::UNIX, SocketType::STREAM, flags, None)?)
}

/// A name, had by this process alone. Nobody gets a connection to it before it [listens](Name::listen).
pub(crate) struct Name {
    socket: OwnedFd,
}

impl Name {
    /// Takes the name; `None` if another process has it.
    pub(crate) fn take(name: &str) -> io::Result<Option<Self>> {
        let socket = socket(SocketFlags::empty())?;
        match rustix::net::bind(&socket, &address(name)?) {
            Ok(()) => Ok(Some(Self { socket })),
            Err(rustix::io::Errno::ADDRINUSE) => Ok(None),
            Err(error) => Err(error.into()),
        }
    }

    /// Lets clients connect. What the kernel tells them about the listener is who calls this.
    pub(crate) fn listen(&self) -> io::Result<()> {
        Ok(rustix::net::listen(&self.socket, BACKLOG)?)
    }

    /// The next client.
    pub(crate) fn accept(&self) -> io::Result<Connection> {
        let client = rustix::net::accept_with(&self.socket, SocketFlags::CLOEXEC)?;
        Ok(Connection::new(UnixStream::from(client)))
    }
}

impl From<OwnedFd> for Name {
    /// A name that another process has taken.
    fn from(socket: OwnedFd) -> Self {
        Self { socket }
    }
}

impl AsFd for Name {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.socket.as_fd()
    }
}

/// Connects to who listens on the name, and says who that is. What follows has to be over within `patience`,
/// unless the connection is given more time. `None` if nobody listens.
pub(crate) fn connect(name: &str, patience: Duration) -> io::Result<Option<(Connection, Peer)>> {
    // The call does not wait: another process may have the name, and never take a call.
    let socket = socket(SocketFlags::NONBLOCK)?;
    match rustix::net::connect(&socket, &address(name)?) {
        Ok(()) => {}
        Err(rustix::io::Errno::CONNREFUSED) => return Ok(None),
        Err(error) => return Err(error.into()),
    }
    let socket = UnixStream::from(socket);
    socket.set_nonblocking(false)?;
    let mut connection = Connection::new(socket);
    connection.set_deadline(Some(Instant::now() + patience));
    let peer = connection.peer()?;
    Ok(Some((connection, peer)))
}
