//! The connections to processes whose memory is opened here.

use std::io;
use std::time::{Duration, Instant};

use gpucr_wire::Connection;
use gpucr_wire::peers::{Identity, PeerReply, PeerRequest, peers_socket};

use crate::log::log;
use crate::state::{memory, peers};

/// How long it may take to tell an owner that its memory is closed.
const TELLING: Duration = Duration::from_secs(1);
/// Bytes of the longest reply.
pub(super) const LONGEST: u32 = 128;

/// A connection to the owner of a handle. After a restore its pid namespace may be another one, which is ours then.
pub(super) fn connect(namespace: u64, pid: u32, deadline: Instant) -> io::Result<Connection> {
    let own = gpucr_wire::own_pid_namespace()?;
    let to = |namespace| Connection::connect(&peers_socket(namespace, pid), Some(deadline), None);
    match to(own) {
        Err(error) if error.kind() == io::ErrorKind::ConnectionRefused && own != namespace => {
            to(namespace)
        }
        done => done,
    }
}

/// Tells the owners of blocks that were closed that they are.
pub(super) fn tell_owners() {
    let closed = memory::lock().take_closed();
    let Some(opener) = peers::identity().filter(|_| !closed.is_empty()) else { return };
    for closed in closed {
        let told = tell(closed, opener);
        // One that has ended need not know.
        told.unwrap_or_else(|error| {
            log!("an owner does not know that its memory is closed: {error}")
        });
    }
}

fn tell(closed: memory::Origin, opener: Identity) -> io::Result<()> {
    let memory::Origin { owner, block, pid, namespace } = closed;
    let mut connection = connect(namespace, pid, Instant::now() + TELLING)?;
    connection.send(&PeerRequest::Close { owner, block, opener })?;
    let _: PeerReply = connection.receive_at_most(LONGEST)?;
    Ok(())
}
