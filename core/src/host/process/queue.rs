//! Keeps strangers out of the queue of an agent's socket while CRIU looks at it.
//!
//! Anybody on the host may connect to an agent, and while it serves gpucr a second one waits in the queue. CRIU
//! refuses to save a program in one of whose queues somebody waits who has given up: a stranger, or `gpucr ps`. The
//! queue of an agent has one place ([`gpucr_wire::AGENT_QUEUE`]), and here gpucr takes that itself.

use std::io;
use std::os::fd::OwnedFd;
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags};
use rustix::io::Errno;
use rustix::net::{AddressFamily, SocketAddrUnix, SocketFlags, SocketType};

use super::tree::{ProcessInfo, directory};
use super::{network, sockets};
use crate::base::time_limit::within;

/// How long it may take to be faster than the others.
const LIMIT: Duration = Duration::from_secs(1);
/// What is said if the others were faster.
const TAKEN: &str = "the program takes away the connections to its agent";

/// The only place in the queue of an agent, until this is dropped. The agent finds a connection that has ended then.
#[derive(Debug)]
pub(crate) struct Place {
    _connection: OwnedFd,
}

/// Sends away who waits for the agent of a process, and waits there instead. The agent has to have detached the
/// program: it accepts nobody then. Without an agent there is no place to take.
///
/// # Errors
/// The process has ended or may not be looked at; or others were always faster.
pub(crate) fn take(process: &ProcessInfo) -> io::Result<Option<Place>> {
    let Some((name, inode)) = sockets::agent_socket(process) else { return Ok(None) };
    let (listener, pid) = (listener(process, inode)?, process.pid);
    // The program has the socket too, and may take a connection away just before it is accepted here.
    within(2 * LIMIT, TAKEN, move || network::visit(pid, || take_from(&listener, &name))).map(Some)
}

fn take_from(listener: &OwnedFd, name: &str) -> io::Result<Place> {
    let address = SocketAddrUnix::new_abstract_name(name.as_bytes())?;
    let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
    let end = Instant::now() + LIMIT;
    loop {
        while somebody_waits(listener)? {
            if Instant::now() >= end {
                return Err(io::ErrorKind::TimedOut.into());
            }
            rustix::net::accept_with(listener, SocketFlags::CLOEXEC)?;
        }
        let own = rustix::net::socket_with(AddressFamily::UNIX, SocketType::STREAM, flags, None)?;
        match rustix::net::connect(&own, &address) {
            Ok(()) => return Ok(Place { _connection: own }),
            Err(Errno::AGAIN | Errno::INTR) if Instant::now() < end => {}
            Err(error) => return Err(error.into()),
        }
    }
}

fn somebody_waits(listener: &OwnedFd) -> io::Result<bool> {
    let mut poll = [PollFd::new(listener, PollFlags::IN)];
    let now = rustix::time::Timespec { tv_sec: 0, tv_nsec: 0 };
    Ok(rustix::io::retry_on_intr(|| rustix::event::poll(&mut poll, Some(&now)))? > 0)
}

/// A descriptor of a socket that a process has open.
fn listener(process: &ProcessInfo, inode: u32) -> io::Result<OwnedFd> {
    let path = directory(process.pid).join("fd");
    let wanted = format!("socket:[{inode}]");
    for entry in std::fs::read_dir(&path)?.flatten() {
        let is_wanted =
            std::fs::read_link(entry.path()).is_ok_and(|link| link.as_os_str() == &*wanted);
        let number = entry.file_name().to_str().and_then(|name| name.parse().ok());
        if let (true, Some(number)) = (is_wanted, number) {
            return process.descriptor(number);
        }
    }
    Err(io::ErrorKind::NotFound.into())
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::Arc;
    use std::sync::atomic::{AtomicBool, Ordering};

    /// A listener with one place, and its name.
    fn listener_of_one(what: &str) -> (Arc<OwnedFd>, String) {
        let name = format!("gpucr-queue-{what}-{}", std::process::id());
        let address = SocketAddrUnix::new_abstract_name(name.as_bytes()).unwrap();
        let kind = SocketType::STREAM;
        let flags = SocketFlags::CLOEXEC;
        let listener = rustix::net::socket_with(AddressFamily::UNIX, kind, flags, None).unwrap();
        rustix::net::bind(&listener, &address).unwrap();
        rustix::net::listen(&listener, gpucr_wire::AGENT_QUEUE).unwrap();
        (Arc::new(listener), name)
    }

    #[test]
    fn who_waits_is_sent_away() {
        let (listener, name) = listener_of_one("waits");
        let address = SocketAddrUnix::new_abstract_name(name.as_bytes()).unwrap();
        let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
        let connect = || {
            let kind = SocketType::STREAM;
            let stranger = rustix::net::socket_with(AddressFamily::UNIX, kind, flags, None)?;
            rustix::net::connect(&stranger, &address).map(|()| stranger)
        };
        let mut strangers = Vec::new();
        while let Ok(stranger) = connect() {
            strangers.push(stranger);
        }
        assert!(!strangers.is_empty());
        let place = take_from(&listener, &name).unwrap();
        assert!(somebody_waits(&listener).unwrap(), "gpucr waits there");
        assert!(connect().is_err(), "there is another place");
        // An end of file each: they have been accepted and let go of.
        for stranger in &strangers {
            assert_eq!(rustix::io::read(stranger, &mut [0; 1]), Ok(0));
        }
        drop(place);
    }

    #[test]
    fn a_program_that_takes_connections_away_is_not_waited_for() {
        let (listener, name) = listener_of_one("away");
        let over = Arc::new(AtomicBool::new(false));
        // A thief who accepts every connection, and a crowd of strangers.
        let (thief, until) = (listener.clone(), over.clone());
        std::thread::spawn(move || {
            while !until.load(Ordering::Relaxed) {
                if somebody_waits(&thief).unwrap_or(false) {
                    let _ = rustix::net::accept_with(&thief, SocketFlags::CLOEXEC);
                }
            }
        });
        let (until, address) = (over.clone(), name.clone());
        std::thread::spawn(move || {
            while !until.load(Ordering::Relaxed) {
                let _ = std::os::unix::net::UnixStream::connect_addr(&abstract_address(&address));
            }
        });
        // Whatever comes of it, it comes to an end.
        for _ in 0..20 {
            let (listener, name) = (listener.clone(), name.clone());
            let _ = within(2 * LIMIT, TAKEN, move || take_from(&listener, &name));
        }
        over.store(true, Ordering::Relaxed);
        // One of the two may wait for the other, as here: nobody comes any more.
        let taken = within(LIMIT / 10, TAKEN, move || {
            rustix::net::accept_with(&listener, SocketFlags::CLOEXEC)?;
            rustix::net::accept_with(&listener, SocketFlags::CLOEXEC)?;
            rustix::net::accept_with(&listener, SocketFlags::CLOEXEC).map_err(io::Error::from)
        });
        assert_eq!(taken.unwrap_err().kind(), io::ErrorKind::TimedOut);
    }

    fn abstract_address(name: &str) -> std::os::unix::net::SocketAddr {
        use std::os::linux::net::SocketAddrExt;
        std::os::unix::net::SocketAddr::from_abstract_name(name).unwrap()
    }
}
