//! The abstract sockets by which others reach what listens inside a process: the agent, and the software
//! driver.
//!
//! Their names have the process's pid in them and the number of its pid namespace. A restored process may
//! be in another namespace than it was, and there may be several restored from one image, all with the
//! same pid and in the same network. So a restore makes these sockets anew, under the names that are right
//! then, and CRIU puts them in place of those in the image.

use std::io;
use std::os::unix::net::UnixListener;

use gpucr_wire::{Connection, agent_socket};

use super::tree::ProcessInfo;
use crate::image::{Listener, ListenerKind};

/// Listeners of this process.
pub fn of(process: &ProcessInfo) -> Vec<Listener> {
    let found = |kind| {
        let name = name(kind, process.pid_namespace, process.inner_pid);
        listening(process.pid, &name).map(|inode| Listener { kind, inode })
    };
    [ListenerKind::Agent, ListenerKind::SoftDriver].into_iter().filter_map(found).collect()
}

/// Listens on behalf of a process that will have this pid in gpucr's own pid namespace.
///
/// # Errors
/// The name is taken, or `/proc` is not mounted.
pub fn listen(kind: ListenerKind, pid: u32) -> io::Result<UnixListener> {
    Connection::listen(&name(kind, gpucr_wire::own_pid_namespace()?, pid))
}

fn name(kind: ListenerKind, namespace: u64, pid: u32) -> String {
    match kind {
        ListenerKind::Agent => agent_socket(namespace, pid),
        // As softcuda's README has it.
        ListenerKind::SoftDriver => format!("softcuda-{namespace}-{pid}"),
    }
}

/// The inode of the socket that listens on an abstract name, in the network namespace of process `pid`.
pub(super) fn listening(pid: u32, name: &str) -> Option<u32> {
    let table = std::fs::read_to_string(format!("/proc/{pid}/net/unix")).ok()?;
    table.lines().find_map(|line| {
        // Num RefCount Protocol Flags Type St Inode Path
        let mut fields = line.split_ascii_whitespace();
        let (flags, inode) = (fields.nth(3)?, fields.nth(2)?);
        let listens = u32::from_str_radix(flags, 16).ok()? & ACCEPTS != 0;
        let path = fields.next()?.strip_prefix('@')?;
        (listens && path == name).then(|| inode.parse().ok())?
    })
}

/// In the flags of that table: connections are accepted.
const ACCEPTS: u32 = 0x10000;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_listener_is_found_by_its_name() {
        use std::os::fd::AsRawFd;
        let pid = std::process::id();
        let process = ProcessInfo::read(pid).expect("it is this one");
        assert_eq!(of(&process), []);
        let agent = listen(ListenerKind::Agent, pid).expect("the name is free");
        let driver = listen(ListenerKind::SoftDriver, pid).expect("the name is free");
        assert!(listen(ListenerKind::Agent, pid).is_err(), "the name is taken");
        let link = |socket: &UnixListener| {
            let path = format!("/proc/self/fd/{}", socket.as_raw_fd());
            std::fs::read_link(path).expect("open").to_string_lossy().into_owned()
        };
        let found: Vec<_> = of(&process).iter().map(|l| format!("socket:[{}]", l.inode)).collect();
        assert_eq!(found, [link(&agent), link(&driver)]);
    }
}
