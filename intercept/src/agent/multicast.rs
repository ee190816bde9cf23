//! Requests about multicast objects: that they are about to be undone, and the steps in which they are made again.

use gpucr_wire::peers::Identity;
use gpucr_wire::{Connection, GateState, Reply};

use super::state::{Agent, Next};
use super::transfer;
use crate::log::log;
use crate::state::memory::vmm::Driver;
use crate::state::memory::{self, Failure};
use crate::state::peers;

/// The gate stays closed from now on, whatever becomes of the connection.
pub(super) fn part(agent: &mut Agent) -> Result<Next, Failure> {
    agent.expect(GateState::Closed {})?;
    agent.state = GateState::Parted {};
    Ok(Next::done())
}

/// Lists the objects.
pub(super) fn objects() -> Next {
    let objects = memory::lock().list_objects();
    Next::Reply(Reply::Objects { identity: peers::identity().unwrap_or_default(), objects })
}

fn expect_parted(agent: &Agent) -> Result<(), Failure> {
    if agent.state == (GateState::Detached {}) {
        Ok(())
    } else {
        agent.expect(GateState::Parted {})
    }
}

/// Undoes what there is, and creates objects.
pub(super) fn make(
    agent: &Agent,
    ids: &[u64],
    connection: &mut Connection,
) -> Result<Next, Failure> {
    expect_parted(agent)?;
    let fds = memory::lock().make_objects(&Driver, ids)?;
    let sent = connection.send(&Reply::Made {}).and_then(|()| connection.send_fds(&fds));
    sent.unwrap_or_else(|error| log!("cannot send multicast objects: {error}"));
    Ok(Next::Sent)
}

/// Takes objects that others have made, and adds devices.
pub(super) fn join(
    agent: &Agent,
    ids: &[u64],
    present: &[Identity],
    connection: &mut Connection,
) -> Result<Next, Failure> {
    // Received before anything is checked: they are on their way.
    let fds = transfer::receive(connection, ids)?;
    expect_parted(agent)?;
    memory::lock().join_objects(&Driver, &fds, present)?;
    Ok(Next::done())
}

/// Binds and maps.
pub(super) fn bind(agent: &Agent) -> Result<Next, Failure> {
    expect_parted(agent)?;
    memory::lock().bind_objects(&Driver)?;
    Ok(Next::done())
}

/// All processes have done that.
pub(super) fn whole(agent: &mut Agent) -> Result<Next, Failure> {
    expect_parted(agent)?;
    if !memory::lock().are_objects_whole() {
        return Err(Failure::other("a multicast object is still undone"));
    }
    if agent.state == (GateState::Parted {}) {
        agent.state = GateState::Closed {};
    }
    Ok(Next::done())
}
