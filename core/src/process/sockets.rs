//! The abstract sockets by which others reach what listens inside a process: the shim's agent, NVIDIA's
//! driver (`cuda-uvmfd-NS-PID`), the software driver.
//!
//! Their names end in the number of the process's pid namespace and its pid. A restored process may be in
//! another namespace than it was, and there may be several restored from one image, all with the same pid
//! and in the same network. So a restore makes these sockets anew, under the names that are right then, and
//! CRIU puts them in place of those in the image.

use std::io;
use std::os::fd::OwnedFd;

use gpucr_wire::agent_socket;
use rustix::net::{AddressFamily, SocketAddrUnix, SocketFlags, SocketType};

use super::tree::ProcessInfo;
use crate::image::{Listener, ListenerKind};

/// How many may wait to be accepted.
const BACKLOG: i32 = 128;
/// In the flags of `/proc/net/unix`: connections are accepted.
const ACCEPTS: u32 = 0x10000;

/// A row of `/proc/net/unix` that listens on an abstract name.
struct Row<'a> {
    /// The name; bytes of 0 are shown as `@`.
    name: &'a str,
    /// `SOCK_STREAM` and so on.
    kind: u32,
    inode: u32,
}

/// Listeners of this process with such names.
pub fn of(process: &ProcessInfo) -> Vec<Listener> {
    let end = format!("-{}-{}", process.pid_namespace, process.inner_pid);
    let listener = |row: Row<'_>| {
        // NVIDIA's driver counts the end of the C string to the name.
        let (name, terminated) = match row.name.strip_suffix('@') {
            Some(name) => (name, true),
            None => (row.name, false),
        };
        let kind = match SocketType::from_raw(row.kind) {
            SocketType::STREAM => ListenerKind::Stream,
            SocketType::SEQPACKET => ListenerKind::SeqPacket,
            _ => return None,
        };
        let name = name.strip_suffix(&end)?.to_owned();
        Some(Listener { name, terminated, kind, inode: row.inode })
    };
    let table = table(process.pid).unwrap_or_default();
    rows(&table).filter_map(listener).collect()
}

/// Listens on behalf of a process that will have this pid in gpucr's own pid namespace.
///
/// # Errors
/// The name is taken, or `/proc` is not mounted.
pub fn listen(listener: &Listener, pid: u32) -> io::Result<OwnedFd> {
    let namespace = gpucr_wire::own_pid_namespace()?;
    let end = if listener.terminated { "\0" } else { "" };
    let name = format!("{}-{namespace}-{pid}{end}", listener.name);
    let kind = match listener.kind {
        ListenerKind::Stream => SocketType::STREAM,
        ListenerKind::SeqPacket => SocketType::SEQPACKET,
    };
    let socket = rustix::net::socket_with(AddressFamily::UNIX, kind, SocketFlags::CLOEXEC, None)?;
    rustix::net::bind(&socket, &SocketAddrUnix::new_abstract_name(name.as_bytes())?)?;
    rustix::net::listen(&socket, BACKLOG)?;
    Ok(socket)
}

/// Whether an agent listens in that process.
pub(super) fn has_agent(process: &ProcessInfo) -> bool {
    let name = agent_socket(process.pid_namespace, process.inner_pid);
    table(process.pid).is_some_and(|table| rows(&table).any(|row| row.name == name))
}

/// The sockets in the network namespace of a process.
fn table(pid: u32) -> Option<String> {
    std::fs::read_to_string(format!("/proc/{pid}/net/unix")).ok()
}

fn rows(table: &str) -> impl Iterator<Item = Row<'_>> {
    table.lines().filter_map(|line| {
        // Num RefCount Protocol Flags Type St Inode Path
        let mut fields = line.split_ascii_whitespace();
        let flags = u32::from_str_radix(fields.nth(3)?, 16).ok()?;
        let kind = u32::from_str_radix(fields.next()?, 16).ok()?;
        let inode = fields.nth(1)?.parse().ok()?;
        let name = fields.next()?.strip_prefix('@')?;
        (flags & ACCEPTS != 0).then_some(Row { name, kind, inode })
    })
}

#[cfg(test)]
mod tests {
    use std::os::fd::AsRawFd;

    use super::*;

    #[test]
    fn listeners_are_found_by_their_names() {
        let pid = std::process::id();
        let process = ProcessInfo::read(pid).expect("it is this one");
        assert!(!has_agent(&process));
        let wanted = |name: &str, terminated, kind| {
            let mut listener = Listener { name: name.into(), terminated, kind, inode: 0 };
            let socket = listen(&listener, pid).expect("the name is free");
            assert!(listen(&listener, pid).is_err(), "the name is taken");
            let link = std::fs::read_link(format!("/proc/self/fd/{}", socket.as_raw_fd()));
            let link = link.expect("open").to_string_lossy().into_owned();
            let inode = link.strip_prefix("socket:[").and_then(|rest| rest.strip_suffix(']'));
            listener.inode = inode.expect("a socket").parse().expect("a number");
            (socket, listener)
        };
        let (_other, other) = wanted("other", true, ListenerKind::SeqPacket);
        assert!(!has_agent(&process));
        let (_agent, agent) = wanted("gpucr-agent", false, ListenerKind::Stream);
        assert!(has_agent(&process));
        // Another test may have started the software driver in this process.
        let mut found = of(&process);
        found.retain(|listener| listener.name != "softcuda");
        found.sort_by_key(|listener| listener.inode);
        assert_eq!(found, [other, agent]);
    }
}
