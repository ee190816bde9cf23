//! The network namespace of a process, and what listens in it.
//!
//! It is not read from `/proc/net/unix`: a program that puts a line feed into the name of a socket writes rows
//! there as it likes.

use std::io;
use std::os::fd::OwnedFd;
use std::path::PathBuf;
use std::time::Duration;

use rustix::net::sockopt::{Timeout, set_socket_timeout};
use rustix::net::{AddressFamily, RecvFlags, SendFlags, SocketFlags, SocketType, netlink};

use super::tree::{ProcessInfo, directory};
use crate::host::network::NetworkNamespace;

/// How long the kernel may take for each part of its answer.
const PATIENCE: Duration = Duration::from_secs(5);

/// `SOCK_DIAG_BY_FAMILY`, and `NLMSG_ERROR` and `NLMSG_DONE` of linux/netlink.h.
const BY_FAMILY: u16 = 20;
const ERROR: u16 = 2;
const DONE: u16 = 3;
/// `NLM_F_REQUEST | NLM_F_DUMP`.
const DUMP: u16 = 0x301;
/// From linux/unix_diag.h: the states that are asked for are bits; names are wanted, and come in this attribute.
const LISTENS: u32 = 1 << 10;
const SHOW_NAME: u32 = 1;
const NAME: u16 = 0;
/// Bytes of `struct nlmsghdr`, `struct unix_diag_msg` and `struct nlattr`.
const HEADER: usize = 16;
const SOCKET: usize = 16;
const ATTRIBUTE: usize = 4;

/// All states, and the attribute with the inode of the other end of a connection.
const ALL: u32 = !0;
const SHOW_PEER: u32 = 1 << 2;
const PEER: u16 = 2;

/// A Unix socket.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct UnixSocket {
    pub(super) inode: u32,
    /// `SOCK_STREAM` and so on.
    pub(super) kind: SocketType,
    /// The inode of the socket that it is connected to.
    pub(super) peer: Option<u32>,
}

/// A socket that listens on an abstract name.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Row {
    /// The name, without the byte of 0 before it.
    pub(super) name: Vec<u8>,
    /// `SOCK_STREAM` and so on.
    pub(super) kind: SocketType,
    pub(super) inode: u32,
}

/// The link that names the network namespace of a process.
pub(super) fn namespace(pid: u32) -> PathBuf {
    directory(pid).join("ns/net")
}

/// The network namespace of a process that has not ended.
///
/// # Errors
/// It has, or this user may not look at it.
pub(crate) fn of(process: &ProcessInfo) -> io::Result<NetworkNamespace> {
    let found = NetworkNamespace::of_process(&namespace(process.pid))?;
    // Its pid is another process's only after that.
    if process.has_ended() { Err(io::ErrorKind::NotFound.into()) } else { Ok(found) }
}

/// Whether a process is in this network namespace. Not if it has ended.
pub(crate) fn is_in(process: &ProcessInfo, network: &NetworkNamespace) -> bool {
    network.is_of(&namespace(process.pid))
}

/// That of process `pid`; `None` if there is no such process, or it has ended.
///
/// # Errors
/// This user may not look at it.
pub(crate) fn of_pid(pid: u32) -> io::Result<Option<NetworkNamespace>> {
    match NetworkNamespace::of_process(&namespace(pid)) {
        Err(error)
            if error.kind() == io::ErrorKind::NotFound
                || error.raw_os_error() == Some(libc::ESRCH) =>
        {
            Ok(None)
        }
        found => found.map(Some),
    }
}

/// Does something in the network namespace of a process. Sockets that are made there stay usable.
///
/// # Errors
/// The process has ended, or this user may not go there.
pub(super) fn visit<T: Send>(
    pid: u32,
    work: impl FnOnce() -> io::Result<T> + Send,
) -> io::Result<T> {
    NetworkNamespace::of_process(&namespace(pid))?.visit(work)
}

/// Everything that listens on an abstract name in the network namespace of a process.
///
/// # Errors
/// The errors of [`visit`]; or the kernel does not tell.
pub(super) fn listeners(pid: u32) -> io::Result<Vec<Row>> {
    visit(pid, own_listeners)
}

/// All Unix sockets in the network namespace of a process.
///
/// # Errors
/// The errors of [`visit`]; or the kernel does not tell.
pub(super) fn unix_sockets(pid: u32) -> io::Result<Vec<UnixSocket>> {
    let bodies = visit(pid, || ask(ALL, SHOW_PEER))?;
    Ok(bodies.iter().filter_map(|body| unix_socket(body)).collect())
}

fn own_listeners() -> io::Result<Vec<Row>> {
    Ok(ask(LISTENS, SHOW_NAME)?.iter().filter_map(|body| row(body)).collect())
}

/// What the kernel says of the sockets of the namespace that are in these states.
fn ask(states: u32, show: u32) -> io::Result<Vec<Vec<u8>>> {
    let protocol = Some(netlink::SOCK_DIAG);
    let (flags, kind) = (SocketFlags::CLOEXEC, SocketType::RAW);
    let socket = rustix::net::socket_with(AddressFamily::NETLINK, kind, flags, protocol)?;
    set_socket_timeout(&socket, Timeout::Recv, Some(PATIENCE))?;
    rustix::net::send(&socket, &request(states, show), SendFlags::empty())?;
    read_all(&socket)
}

/// A request for all sockets of the namespace in these states.
fn request(states: u32, show: u32) -> Vec<u8> {
    // struct nlmsghdr: length, kind, flags, number, sender.
    let mut request = 40u32.to_ne_bytes().to_vec();
    request.extend([BY_FAMILY, DUMP].iter().flat_map(|half| half.to_ne_bytes()));
    request.extend([0; 8]);
    // struct unix_diag_req: family, protocol, states, inode, what to show, cookie.
    request.extend([AddressFamily::UNIX.as_raw() as u8, 0, 0, 0]);
    request.extend([states, 0, show, 0, 0].iter().flat_map(|word| word.to_ne_bytes()));
    request
}

fn read_all(socket: &OwnedFd) -> io::Result<Vec<Vec<u8>>> {
    let (mut bodies, mut buffer) = (Vec::new(), vec![0; 64 << 10]);
    loop {
        let receive = || rustix::net::recv(socket, &mut buffer[..], RecvFlags::empty());
        let (len, _) = rustix::io::retry_on_intr(receive)?;
        let mut rest = &buffer[..len];
        if rest.is_empty() {
            return Err(io::ErrorKind::UnexpectedEof.into());
        }
        while let Some((kind, body, after)) = message(rest) {
            match kind {
                DONE => return Ok(bodies),
                ERROR => {
                    let code = body.first_chunk().map_or(0, |code| -i32::from_ne_bytes(*code));
                    return Err(io::Error::from_raw_os_error(code));
                }
                BY_FAMILY => bodies.push(body.to_vec()),
                _ => {}
            }
            rest = after;
        }
    }
}

/// The first message: its kind, its body, and what follows it.
fn message(bytes: &[u8]) -> Option<(u16, &[u8], &[u8])> {
    let len = u32::from_ne_bytes(*bytes.first_chunk()?) as usize;
    let kind = u16::from_ne_bytes(*bytes.get(4..)?.first_chunk()?);
    let body = bytes.get(HEADER..len)?;
    Some((kind, body, bytes.get(len.next_multiple_of(4)..).unwrap_or_default()))
}

fn row(body: &[u8]) -> Option<Row> {
    let (kind, inode) = head(body)?;
    // The name of a file does not begin so.
    let name = attribute(body, NAME)?.strip_prefix(&[0])?.to_owned();
    Some(Row { name, kind, inode })
}

fn unix_socket(body: &[u8]) -> Option<UnixSocket> {
    let (kind, inode) = head(body)?;
    let peer = attribute(body, PEER).and_then(|value| value.first_chunk());
    Some(UnixSocket { inode, kind, peer: peer.map(|peer| u32::from_ne_bytes(*peer)) })
}

/// The kind of a socket, and its inode.
fn head(body: &[u8]) -> Option<(SocketType, u32)> {
    let kind = SocketType::from_raw((*body.get(1)?).into());
    Some((kind, u32::from_ne_bytes(*body.get(4..)?.first_chunk()?)))
}

/// An attribute of a socket.
fn attribute(body: &[u8], wanted: u16) -> Option<&[u8]> {
    let mut attributes = body.get(SOCKET..)?;
    loop {
        let len = usize::from(u16::from_ne_bytes(*attributes.first_chunk()?));
        let which = u16::from_ne_bytes(*attributes.get(2..)?.first_chunk()?);
        let value = attributes.get(ATTRIBUTE..len)?;
        if which == wanted {
            return Some(value);
        }
        attributes = attributes.get(len.next_multiple_of(4)..)?;
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use gpucr_wire::Connection;

    #[test]
    fn who_listens_is_told_whatever_the_name() {
        let pid = std::process::id();
        let (forged, latin) = (format!("test-{pid}\nforged"), b"test-latin-\xe4");
        let _first = Connection::listen(&forged).expect("the name is free");
        let address = rustix::net::SocketAddrUnix::new_abstract_name(latin).expect("short");
        let second = rustix::net::socket(AddressFamily::UNIX, SocketType::SEQPACKET, None);
        let second = second.expect("a socket");
        rustix::net::bind(&second, &address).expect("the name is free");
        let all = || listeners(pid).expect("the kernel tells");
        assert!(all().iter().all(|row| row.name != latin), "it does not listen yet");
        rustix::net::listen(&second, 1).expect("bound");
        let rows = all();
        assert!(rows.iter().any(|row| row.name == forged.as_bytes()));
        let second = rows.iter().find(|row| row.name == latin).expect("it listens");
        assert_eq!(second.kind, SocketType::SEQPACKET);
    }
}
