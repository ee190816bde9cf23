//! The TCP connections of a program: which stay within it, and which lead elsewhere.

use std::collections::{BTreeSet, HashMap, HashSet};
use std::io;
use std::net::{IpAddr, SocketAddr};
use std::path::PathBuf;

use procfs::ProcError;
use procfs::net::{TcpNetEntry, TcpState};
use procfs::process::Process;

use super::network;
use super::tree::{ProcessInfo, directory};

/// A connection with a process that is not of the program.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Outer {
    /// The process that has it.
    pub pid: u32,
    /// Its own end.
    pub local: SocketAddr,
    /// The other end.
    pub remote: SocketAddr,
}

/// The connections of these processes that lead elsewhere.
///
/// A process that has ended has none.
///
/// # Errors
/// The kernel does not tell all: then nothing is known.
pub fn outer(pids: &[u32]) -> io::Result<Vec<Outer>> {
    let mut namespaces: HashMap<PathBuf, Vec<u32>> = HashMap::new();
    for pid in pids {
        if let Some(namespace) = unless_ended(*pid, std::fs::read_link(network::namespace(*pid)))? {
            namespaces.entry(namespace).or_default().push(*pid);
        }
    }
    let mut found = Vec::new();
    for pids in namespaces.into_values() {
        found.extend(within(&pids)?);
    }
    found.sort_by_key(|outer| (outer.pid, outer.local, outer.remote));
    Ok(found)
}

/// What is known of a process, unless it has ended.
fn unless_ended<T>(pid: u32, known: io::Result<T>) -> io::Result<Option<T>> {
    match known {
        Ok(known) => Ok(Some(known)),
        // A process that nobody has waited for has no namespaces and no files either.
        Err(_) if ProcessInfo::read(pid).map_or(true, |process| process.has_ended()) => Ok(None),
        Err(error) => Err(error),
    }
}

/// Those of processes in one network namespace.
fn within(pids: &[u32]) -> io::Result<Vec<Outer>> {
    let mut sockets = HashMap::new();
    let mut rows = None;
    for pid in pids {
        let Some(own) = unless_ended(*pid, own_sockets(*pid))? else { continue };
        sockets.extend(own.into_iter().map(|inode| (inode, *pid)));
        if rows.is_none() {
            rows = unless_ended(*pid, table(*pid))?;
        }
    }
    Ok(outer_of(&rows.unwrap_or_default(), &sockets))
}

/// All sockets of TCP in the network namespace of a process.
fn table(pid: u32) -> io::Result<Vec<Row>> {
    let process = Process::new(pid as i32).map_err(io::Error::other)?;
    let old = process.tcp().map_err(io::Error::other)?;
    let new = match process.tcp6() {
        // A kernel without IPv6.
        Err(ProcError::NotFound(_)) => Vec::new(),
        read => read.map_err(io::Error::other)?,
    };
    Ok(old.into_iter().chain(new).map(Row::from).collect())
}

/// A socket of TCP.
struct Row {
    local: SocketAddr,
    remote: SocketAddr,
    listens: bool,
    /// 0 if no process has it.
    inode: u64,
}

impl From<TcpNetEntry> for Row {
    fn from(entry: TcpNetEntry) -> Self {
        Self {
            local: canonical(entry.local_address),
            remote: canonical(entry.remote_address),
            listens: entry.state == TcpState::Listen,
            inode: entry.inode,
        }
    }
}

/// Those among `rows`, all of a namespace, whose socket is in `sockets` and whose other end is not.
fn outer_of(rows: &[Row], sockets: &HashMap<u64, u32>) -> Vec<Outer> {
    let own = |row: &&Row| sockets.contains_key(&row.inode);
    let listeners = rows.iter().filter(|row| row.listens).filter(own);
    let ports: BTreeSet<u16> = listeners.map(|row| row.local.port()).collect();
    // A connection that nobody has accepted yet is its listener's.
    let awaited = |row: &&Row| row.inode == 0 && ports.contains(&row.local.port());
    let ends: HashSet<(SocketAddr, SocketAddr)> = rows
        .iter()
        .filter(|row| own(row) || awaited(row))
        .map(|row| (row.local, row.remote))
        .collect();
    let connected = rows.iter().filter(|row| !row.listens && row.remote.port() != 0);
    connected
        .filter(|row| !ends.contains(&(row.remote, row.local)))
        .filter_map(|row| {
            let pid = *sockets.get(&row.inode)?;
            Some(Outer { pid, local: row.local, remote: row.remote })
        })
        .collect()
}

/// The inodes of a process's sockets.
fn own_sockets(pid: u32) -> io::Result<Vec<u64>> {
    let mut found = Vec::new();
    for entry in std::fs::read_dir(directory(pid).join("fd"))? {
        let target = match std::fs::read_link(entry?.path()) {
            // It was closed meanwhile.
            Err(error) if error.kind() == io::ErrorKind::NotFound => continue,
            target => target?,
        };
        let target = target.to_string_lossy();
        let inode = target.strip_prefix("socket:[").and_then(|rest| rest.strip_suffix(']'));
        found.extend(inode.and_then(|inode| inode.parse::<u64>().ok()));
    }
    Ok(found)
}

/// A socket of IPv6 may be connected with one of IPv4.
fn canonical(address: SocketAddr) -> SocketAddr {
    match address.ip() {
        IpAddr::V6(ip) => SocketAddr::new(ip.to_canonical(), address.port()),
        ip => SocketAddr::new(ip, address.port()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::net::{Ipv4Addr, TcpListener, TcpStream};

    #[test]
    fn what_stays_within_is_not_outer() {
        let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).unwrap();
        let address = listener.local_addr().unwrap();
        let own = std::process::id();
        let here = |outer: &Outer| outer.remote.port() == address.port();
        let client = TcpStream::connect(address).unwrap();
        // Not accepted yet.
        assert!(!outer(&[own]).unwrap().iter().any(here));
        let accepted = listener.accept().unwrap();
        assert!(!outer(&[own]).unwrap().iter().any(here));
        drop((client, accepted));
    }

    #[test]
    fn an_end_that_nobody_of_the_program_has_is_outer() {
        let address = |port| SocketAddr::from((Ipv4Addr::LOCALHOST, port));
        let row = |local, remote, inode| Row {
            local: address(local),
            remote: address(remote),
            listens: remote == 0,
            inode,
        };
        let rows = [
            row(1, 0, 10),
            // One within, one from outside, one not accepted, one to the outside, and one of others.
            row(1, 2, 11),
            row(2, 1, 12),
            row(1, 3, 13),
            row(3, 1, 99),
            row(4, 1, 14),
            row(1, 4, 0),
            row(5, 80, 15),
            row(6, 80, 98),
        ];
        let sockets = (10..=15).map(|inode| (inode, inode as u32)).collect();
        let found = outer_of(&rows, &sockets);
        let outer = |pid, local, remote| {
            let (local, remote) = (address(local), address(remote));
            Outer { pid, local, remote }
        };
        assert_eq!(found, [outer(13, 1, 3), outer(15, 5, 80)]);
        let mapped = SocketAddr::new(Ipv4Addr::LOCALHOST.to_ipv6_mapped().into(), 7);
        assert_eq!(canonical(mapped), address(7));
    }
}
