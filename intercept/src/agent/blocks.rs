//! Requests about the blocks of the program's memory.

use std::ffi::c_void;
use std::os::fd::AsFd;
use std::time::{Duration, Instant};

use gpucr_wire::{Connection, GateState, Reply};

use super::staging::Staging;
use super::state::{Agent, Next, devices};
use super::{signals, transfer};
use crate::limit::Limit;
use crate::state::memory::{self, Failure};

/// How long it may take until shared memory has become the program's own, where the request has no limit.
const LIMIT: Duration = Duration::from_secs(10);

/// Sends all blocks, and the file descriptors of those that are not known.
pub(super) fn export(
    agent: &mut Agent,
    known: Vec<u64>,
    connection: &mut Connection,
) -> Result<Next, Failure> {
    if agent.state != (GateState::Open {}) {
        agent.expect(GateState::Closed {})?;
    }
    agent.end_sharing(Limit::new(Instant::now() + LIMIT, connection.as_fd()))?;
    agent.transfer.export(connection, known, agent.state)?;
    Ok(Next::Sent)
}

/// Maps memory through which blocks are copied.
pub(super) fn stage(
    agent: &mut Agent,
    len: u64,
    connection: &mut Connection,
) -> Result<Next, Failure> {
    // Announced, so it is taken off the connection even if it cannot be used.
    let fds = connection
        .receive_fds(1)
        .map_err(|error| Failure::other(format!("no staging memory: {error}")))?;
    agent.staging = None;
    agent.staging = Some(Staging::map(&fds[0], len)?);
    Ok(Next::done())
}

/// Copies from a block to the staging memory.
pub(super) fn copy_out(agent: &Agent, block: u64, offset: u64, len: u64) -> Result<Next, Failure> {
    agent.expect(GateState::Closed {})?;
    let to = staged(&agent.staging, len)?;
    transfer::copy_out(block, offset, len, to)?;
    Ok(Next::done())
}

/// Copies from the staging memory to a block.
pub(super) fn copy_in(agent: &Agent, block: u64, offset: u64, len: u64) -> Result<Next, Failure> {
    agent.expect(GateState::Detached {})?;
    let from = staged(&agent.staging, len)?;
    transfer::copy_in(block, offset, len, from)?;
    Ok(Next::done())
}

/// Takes the blocks out of the program.
pub(super) fn detach(agent: &mut Agent) -> Result<Next, Failure> {
    if agent.state != (GateState::Parted {}) {
        agent.expect(GateState::Closed {})?;
        if memory::lock().has_objects() {
            return Err(Failure::other(
                "not possible now: it has multicast objects, and a part in them",
            ));
        }
    }
    agent.devices = devices();
    if let Err(failure) = agent.transfer.detach() {
        // Where even the way back failed, the gate must not open.
        if !memory::lock().are_blocks_attached() {
            agent.state = GateState::Detached {};
        }
        return Err(failure);
    }
    agent.staging = None;
    agent.state = GateState::Detached {};
    agent.was_detached = true;
    agent.is_left_alone = true;
    signals::forget_to_be_woken();
    Ok(Next::Last(Reply::Done {}))
}

/// Puts all blocks back.
pub(super) fn reattach(
    agent: &mut Agent,
    blocks: &[u64],
    connection: &mut Connection,
) -> Result<Next, Failure> {
    // Received before anything is checked: they are on their way.
    let fds = transfer::receive(connection, blocks)?;
    agent.expect(GateState::Detached {})?;
    agent.transfer.reattach(fds)?;
    let has_objects = memory::lock().has_objects();
    agent.state = if has_objects { GateState::Parted {} } else { GateState::Closed {} };
    Ok(Next::done())
}

/// Gives blocks that are awaited their memory.
pub(super) fn attach(
    agent: &mut Agent,
    blocks: &[u64],
    connection: &mut Connection,
) -> Result<Next, Failure> {
    let fds = transfer::receive(connection, blocks)?;
    if !agent.awaiting {
        return Err(Failure::other("no blocks are awaited"));
    }
    agent.transfer.attach(fds)?;
    Ok(Next::done())
}

fn staged(staging: &Option<Staging>, len: u64) -> Result<*mut c_void, Failure> {
    match staging {
        Some(staging) => staging.room(len),
        // Nothing to copy needs nowhere to copy to: it makes a block that is not written.
        None if len == 0 => Ok(std::ptr::null_mut()),
        None => Err(Failure::other("there is no staging memory yet")),
    }
}
