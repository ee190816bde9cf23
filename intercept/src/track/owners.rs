//! The connections to processes whose memory is opened here.

use std::io;
use std::os::fd::OwnedFd;
use std::thread;
use std::time::{Duration, Instant};

use gpucr_wire::Connection;
use gpucr_wire::peers::{Identity, PeerReply, PeerRequest, peers_socket};

use super::offered::Offered;
use crate::log::log;
use crate::state::{memory, peers};

/// How long it may take to tell an owner that its memory is closed.
const TELLING: Duration = Duration::from_secs(1);
/// How long an owner may take to answer, whose memory may be away for a dump of its own.
const PATIENCE: Duration = Duration::from_secs(60);
/// Between two questions to an owner whose memory is not in its place.
const PAUSE: Duration = Duration::from_millis(5);
/// Bytes of the longest reply.
const LONGEST: u32 = 128;

/// A connection to the owner of a handle. After a restore its pid namespace may be another one, which is ours then.
fn connect(namespace: u64, pid: u32, deadline: Instant) -> io::Result<Connection> {
    let own = gpucr_wire::own_pid_namespace()?;
    let to = |namespace| Connection::connect(&peers_socket(namespace, pid), Some(deadline), None);
    match to(own) {
        Err(error) if error.kind() == io::ErrorKind::ConnectionRefused && own != namespace => {
            to(namespace)
        }
        done => done,
    }
}

/// Asks the owner for what it has offered: its reply, and the descriptor that goes with it. `None`: it does not give it.
/// The tables of memory must not be locked, since two processes may ask each other.
pub(super) fn ask_owner(offered: &Offered, request: &PeerRequest) -> Option<(PeerReply, OwnedFd)> {
    let (reply, mut owner) = ask(offered, request)?;
    let fds = owner.receive_fds(1).inspect_err(|error| not_given(offered, error)).ok()?;
    fds.into_iter().next().map(|fd| (reply, fd))
}

/// Asks the owner about what it has offered; no descriptor goes with its reply. Otherwise as [`ask_owner`].
pub(super) fn ask_owner_about(offered: &Offered, request: &PeerRequest) -> Option<PeerReply> {
    ask(offered, request).map(|(reply, _)| reply)
}

fn ask(offered: &Offered, request: &PeerRequest) -> Option<(PeerReply, Connection)> {
    let deadline = Instant::now() + PATIENCE;
    let asked = || -> io::Result<Option<(PeerReply, Connection)>> {
        loop {
            let mut owner = connect(offered.namespace, offered.pid, deadline)?;
            owner.send(request)?;
            match owner.receive_at_most(LONGEST)? {
                PeerReply::Busy {} if Instant::now() < deadline => thread::sleep(PAUSE),
                PeerReply::Busy {} | PeerReply::Gone {} | PeerReply::Done {} => return Ok(None),
                reply => return Ok(Some((reply, owner))),
            }
        }
    };
    asked().inspect_err(|error| not_given(offered, error)).ok()?
}

fn not_given(offered: &Offered, error: &io::Error) {
    log!("process {} does not give what it has offered: {error}", offered.pid);
}

/// Tells the owners of blocks that were closed that they are.
pub(super) fn tell_owners() {
    let closed = memory::lock().take_closed();
    closed.into_iter().for_each(tell_owner);
}

/// Tells the owner of a block or an event that it is closed here.
pub(super) fn tell_owner(closed: memory::Origin) {
    let Some(opener) = peers::identity() else { return };
    // One that has ended need not know.
    tell(closed, opener).unwrap_or_else(|error| {
        log!("an owner does not know that what it has offered is closed: {error}")
    });
}

fn tell(closed: memory::Origin, opener: Identity) -> io::Result<()> {
    let memory::Origin { owner, block, pid, namespace } = closed;
    let mut connection = connect(namespace, pid, Instant::now() + TELLING)?;
    connection.send(&PeerRequest::Close { owner, block, opener })?;
    let _: PeerReply = connection.receive_at_most(LONGEST)?;
    Ok(())
}
