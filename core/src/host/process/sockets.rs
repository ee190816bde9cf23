//! The abstract sockets by which others reach what listens inside a process: the shim's agent, NVIDIA's
//! driver (`cuda-uvmfd-NS-PID`), the software driver.
//!
//! Their names end in the number of the process's pid namespace and its pid. A restored process may be in
//! another namespace than it was, and there may be several restored from one image, all with the same pid
//! and in the same network. So a restore makes these sockets anew, under the names that are right then, and
//! CRIU puts them in place of those in the image.
//!
//! Anybody on the host may listen on any such name. What counts is whose descriptor the socket is: a name that
//! somebody else has taken is passed over.

use std::collections::HashSet;
use std::io;
use std::os::fd::OwnedFd;

use gpucr_wire::{AGENT, AGENT_QUEUE, agent_socket_aside};
use rustix::net::{AddressFamily, SocketAddrUnix, SocketFlags, SocketType};

use super::network::{self, Row};
use super::tree::{ProcessInfo, directory};
use crate::image::{Listener, ListenerKind};

/// How many may wait to be accepted by a driver.
const BACKLOG: i32 = 128;

/// What the names of a process's sockets end in.
fn end(process: &ProcessInfo) -> String {
    format!("-{}-{}", process.pid_namespace, process.inner_pid)
}

/// Listeners of this process with such names.
pub fn of(process: &ProcessInfo) -> Vec<Listener> {
    let end = end(process);
    let listener = |row: &Row| {
        let name = str::from_utf8(&row.name).ok()?;
        // NVIDIA's driver counts the end of the C string to the name.
        let (name, terminated) = match name.strip_suffix('\0') {
            Some(name) => (name, true),
            None => (name, false),
        };
        let kind = match row.kind {
            SocketType::STREAM => ListenerKind::Stream,
            SocketType::SEQPACKET => ListenerKind::SeqPacket,
            _ => return None,
        };
        let name = name.strip_suffix(&end)?.to_owned();
        Some(Listener { name, terminated, kind, inode: row.inode })
    };
    let mut named: Vec<Listener> = rows(process).iter().filter_map(listener).collect();
    if !named.is_empty() {
        let own: HashSet<u32> = inodes(process.pid).collect();
        named.retain(|listener| own.contains(&listener.inode));
    }
    named
}

/// Listens on behalf of a process that will have this pid in gpucr's own pid namespace. An agent may have another
/// name than its usual one, if somebody has that.
///
/// # Errors
/// The name is taken, or `/proc` is not mounted.
pub fn listen(listener: &Listener, pid: u32) -> io::Result<OwnedFd> {
    let namespace = gpucr_wire::own_pid_namespace()?;
    if listener.name.starts_with(AGENT) {
        return match bound(&gpucr_wire::agent_socket(namespace, pid), listener.kind, AGENT_QUEUE) {
            Err(error) if error.kind() == io::ErrorKind::AddrInUse => {
                bound(&agent_socket_aside(namespace, pid)?, listener.kind, AGENT_QUEUE)
            }
            done => done,
        };
    }
    let end = if listener.terminated { "\0" } else { "" };
    bound(&format!("{}-{namespace}-{pid}{end}", listener.name), listener.kind, BACKLOG)
}

/// A socket that listens on this name.
fn bound(name: &str, kind: ListenerKind, backlog: i32) -> io::Result<OwnedFd> {
    let kind = match kind {
        ListenerKind::Stream => SocketType::STREAM,
        ListenerKind::SeqPacket => SocketType::SEQPACKET,
    };
    let socket = rustix::net::socket_with(AddressFamily::UNIX, kind, SocketFlags::CLOEXEC, None)?;
    rustix::net::bind(&socket, &SocketAddrUnix::new_abstract_name(name.as_bytes())?)?;
    rustix::net::listen(&socket, backlog)?;
    Ok(socket)
}

/// The name on which an agent listens in that process.
pub(super) fn agent(process: &ProcessInfo) -> Option<String> {
    agent_among(process, &rows(process))
}

/// The name on which an agent listens in that process, and the inode of the socket.
pub(super) fn agent_socket(process: &ProcessInfo) -> Option<(String, u32)> {
    own_agent(process, &rows(process))
}

/// The name on which its agent listens, if `rows` are all that listen in its network namespace.
pub(super) fn agent_among(process: &ProcessInfo, rows: &[Row]) -> Option<String> {
    own_agent(process, rows).map(|(name, _)| name)
}

fn own_agent(process: &ProcessInfo, rows: &[Row]) -> Option<(String, u32)> {
    let named = agents_named(process, rows);
    if named.is_empty() {
        return None;
    }
    let own = inodes(process.pid).find_map(|own| named.iter().find(|row| row.inode == own))?;
    Some((String::from_utf8(own.name.clone()).ok()?, own.inode))
}

/// The rows that have the name of an agent in that process, whichever process listens there.
pub(super) fn agents_named(process: &ProcessInfo, rows: &[Row]) -> Vec<Row> {
    let end = end(process);
    let is_named =
        |row: &&Row| row.name.starts_with(AGENT.as_bytes()) && row.name.ends_with(end.as_bytes());
    rows.iter().filter(is_named).cloned().collect()
}

fn rows(process: &ProcessInfo) -> Vec<Row> {
    network::listeners(process.pid).unwrap_or_else(|error| {
        tracing::warn!(%error, pid = process.pid, "its sockets are not known");
        Vec::new()
    })
}

/// The inodes of the sockets that a process has open. None if it may not be looked at.
fn inodes(pid: u32) -> impl Iterator<Item = u32> {
    let all = std::fs::read_dir(directory(pid).join("fd")).into_iter().flatten();
    all.filter_map(|entry| {
        let link = std::fs::read_link(entry.ok()?.path()).ok()?;
        link.to_str()?.strip_prefix("socket:[")?.strip_suffix(']')?.parse().ok()
    })
}

#[cfg(test)]
mod tests {
    use std::io::{BufRead, BufReader, Read};
    use std::os::fd::AsRawFd;
    use std::process::{Command, Stdio};

    use gpucr_wire::Connection;

    use super::*;

    fn own() -> ProcessInfo {
        ProcessInfo::read(std::process::id()).expect("it is this one")
    }

    /// What this process listens on, but for the software driver, which another test may have started.
    fn found() -> Vec<Listener> {
        let mut found = of(&own());
        found.retain(|listener| listener.name != "softcuda");
        found.sort_by_key(|listener| listener.inode);
        found
    }

    fn inode(socket: &OwnedFd) -> u32 {
        let link = std::fs::read_link(format!("/proc/self/fd/{}", socket.as_raw_fd()));
        let link = link.expect("open").to_string_lossy().into_owned();
        let inode = link.strip_prefix("socket:[").and_then(|rest| rest.strip_suffix(']'));
        inode.expect("a socket").parse().expect("a number")
    }

    fn listening(name: &str, terminated: bool, kind: ListenerKind) -> (OwnedFd, Listener) {
        let mut listener = Listener { name: name.into(), terminated, kind, inode: 0 };
        let socket = listen(&listener, std::process::id()).expect("the name is free");
        listener.inode = inode(&socket);
        (socket, listener)
    }

    /// Taken by tests that listen, which see each other's sockets where they share a process.
    static ALONE: parking_lot::Mutex<()> = parking_lot::Mutex::new(());

    #[test]
    fn listeners_are_found_by_their_names() {
        let _alone = ALONE.lock();
        assert_eq!(agent(&own()), None);
        let (_other, other) = listening("other", true, ListenerKind::SeqPacket);
        assert!(listen(&other, std::process::id()).is_err(), "the name is taken");
        assert_eq!(agent(&own()), None);
        let (_agent, listener) = listening(AGENT, false, ListenerKind::Stream);
        let process = own();
        let usual = gpucr_wire::agent_socket(process.pid_namespace, process.inner_pid);
        assert_eq!(agent(&process), Some(usual));
        assert_eq!(found(), [other, listener]);
    }

    /// What the helper below listens on.
    const NAMES: &str = "TEST_NAMES";

    /// Run as a process of its own by the test below: listens until its standard input ends.
    #[test]
    #[ignore = "a helper process of another test"]
    fn stranger() {
        let names = std::env::var(NAMES).expect("it is told");
        let listen = |name| Connection::listen(name).expect("the name is free");
        let _listeners: Vec<_> = names.split(' ').map(listen).collect();
        println!("listening");
        let _ = io::stdin().read(&mut [0]);
    }

    #[test]
    fn what_others_listen_on_is_passed_over() {
        let _alone = ALONE.lock();
        let process = own();
        let usual = gpucr_wire::agent_socket(process.pid_namespace, process.inner_pid);
        let strange = format!("strange-{}-{}", process.pid_namespace, process.inner_pid);
        let mut stranger = Command::new(std::env::current_exe().expect("a test has a file"))
            .args([
                "--ignored",
                "--exact",
                "host::process::sockets::tests::stranger",
                "--nocapture",
            ])
            .env(NAMES, format!("{usual} {strange}"))
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .expect("it starts");
        let said = BufReader::new(stranger.stdout.as_mut().expect("piped")).lines();
        let ready = said.map_while(Result::ok).any(|line| line.ends_with("listening"));
        assert!(ready, "it does not listen");
        assert_eq!((agent(&process), found()), (None, Vec::new()));
        // An agent that is restored gets another name, and is found by that.
        let (socket, _) = listening(AGENT, false, ListenerKind::Stream);
        let name = agent(&process).expect("it listens");
        assert!(name != usual && name.starts_with(AGENT), "{name}");
        assert!(Connection::connect(&name, None, None).is_ok());
        drop((stranger.stdin.take(), socket));
        stranger.wait().expect("it ends");
    }
}
