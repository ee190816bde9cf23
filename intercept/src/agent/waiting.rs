//! Requests after which calls of the program wait for memory.

use std::os::fd::OwnedFd;

use gpucr_wire::access::KernelSummary;
use gpucr_wire::table::Range;
use gpucr_wire::{Connection, GateState, Table};

use super::sharing::Sharing;
use super::state::{Agent, Next};
use crate::state::memory::{self, Failure};
use crate::watch::faults::Why;
use crate::watch::{faults, guard};

/// Lets calls wait for what is not saved.
pub(super) fn guard(
    agent: &mut Agent,
    ranges: Vec<Range>,
    summaries: Vec<KernelSummary>,
    distrusted: Vec<String>,
    connection: &mut Connection,
) -> Result<Next, Failure> {
    let fds = connection
        .receive_fds(1)
        .map_err(|error| Failure::other(format!("no chunk table: {error}")))?;
    agent.expect(GateState::Closed {})?;
    let table = Table::open(&fds[0], ranges)
        .map_err(|error| Failure::other(format!("no chunk table: {error}")))?;
    guard::install(table, summaries, distrusted);
    Ok(Next::done())
}

/// Lets calls wait for blocks that are not there yet.
pub(super) fn wait_for(
    agent: &mut Agent,
    blocks: &[u64],
    connection: &mut Connection,
) -> Result<Next, Failure> {
    let fds = receive_table(connection)?;
    agent.expect(GateState::Detached {})?;
    let places = memory::lock().awaited(blocks)?;
    guard::install_awaited(table_of(&fds, blocks)?, places);
    faults::watch(Why::Memory, true);
    agent.awaiting = true;
    Ok(Next::done())
}

/// Lets calls that may write these blocks wait until the blocks have memory of their own.
pub(super) fn share(
    agent: &mut Agent,
    blocks: Vec<u64>,
    summaries: Vec<KernelSummary>,
    connection: &mut Connection,
) -> Result<Next, Failure> {
    let fds = receive_table(connection)?;
    agent.expect(GateState::Detached {})?;
    let table = table_of(&fds, &blocks)?;
    agent.sharing = Some(Sharing::begin(table, blocks, summaries)?);
    faults::watch(Why::Memory, true);
    Ok(Next::done())
}

fn receive_table(connection: &mut Connection) -> Result<Vec<OwnedFd>, Failure> {
    connection.receive_fds(1).map_err(|error| Failure::other(format!("no table: {error}")))
}

/// A table in which each block is one chunk.
fn table_of(fds: &[OwnedFd], blocks: &[u64]) -> Result<Table, Failure> {
    Table::open(&fds[0], vec![Range::WHOLE; blocks.len()])
        .map_err(|error| Failure::other(format!("no table: {error}")))
}
