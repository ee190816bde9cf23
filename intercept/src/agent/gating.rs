//! Requests about the gate, and what the program has.

use std::os::fd::AsFd;
use std::time::{Duration, Instant};

use gpucr_wire::{Connection, Counts, GateState, Reply};

use super::drain;
use super::state::{Agent, Next, devices};
use crate::limit::Limit;
use crate::state::memory::{self, Failure};
use crate::state::{gate, peers, recent};
use crate::watch::guard;
use crate::{ungated, usage};

/// What the program has.
pub(super) fn counts(agent: &Agent) -> Next {
    let mut counts = Counts::default();
    usage::fill(&mut counts);
    memory::lock().fill(&mut counts);
    peers::fill(&mut counts);
    counts.ungated = ungated::reasons();
    counts.launches = gate::launches();
    counts.devices =
        if agent.state == (GateState::Detached {}) { agent.devices.clone() } else { devices() };
    Next::Reply(Reply::Counts { counts })
}

/// Closes the gate.
pub(super) fn close(
    agent: &mut Agent,
    timeout_ms: u64,
    connection: &Connection,
) -> Result<Next, Failure> {
    agent.expect(GateState::Open {})?;
    if agent.awaiting && !memory::lock().all_attached() {
        return Err(Failure::other("not possible now: blocks are awaited"));
    }
    let limit = Duration::from_millis(timeout_ms);
    let asked = Limit::new(later(Instant::now(), limit), connection.as_fd());
    agent.end_sharing(asked)?;
    close_by(agent, Instant::now(), limit, connection, |limit| gate::close(*limit))?;
    Ok(Next::done())
}

/// Lets one launch pass the closed gate.
pub(super) fn step(
    agent: &mut Agent,
    wait_ms: u64,
    timeout_ms: u64,
    connection: &Connection,
) -> Result<Next, Failure> {
    agent.expect(GateState::Closed {})?;
    agent.state = GateState::Open {};
    let end = later(Instant::now(), Duration::from_millis(wait_ms));
    let limit = Duration::from_millis(timeout_ms);
    close_by(agent, end, limit, connection, |limit| {
        gate::step(Limit::new(end, connection.as_fd()), *limit)
    })?;
    Ok(Next::done())
}

/// Opens the gate.
pub(super) fn open(agent: &mut Agent) -> Result<Next, Failure> {
    if agent.state == (GateState::Detached {}) {
        if agent.awaiting {
            agent.transfer.restore_stacks()?;
        } else {
            agent.transfer.finish_copy_in()?;
        }
        agent.state = GateState::Closed {};
    }
    // An open gate is fine: recovery asks for it in any case.
    if agent.state == (GateState::Closed {}) {
        agent.open();
    }
    Ok(Next::done())
}

/// Closes the gate in some way, for which there is a time from `start` on, and drains: as long as the
/// client that has asked for it is there.
fn close_by(
    agent: &mut Agent,
    start: Instant,
    time: Duration,
    connection: &Connection,
    close: impl FnOnce(&Limit<'_>) -> Result<(), gate::NotClosed>,
) -> Result<(), Failure> {
    let limit = Limit::new(later(start, time), connection.as_fd());
    let closed = close(&limit).map_err(|why| {
        Failure::other(format!("the gate could not be closed within {time:?}: {why}"))
    });
    closed.and_then(|()| ungated::check()).and_then(|()| drain::drain(limit)).map_err(
        |mut failure| {
            // Handles are looked up while the program goes on: that calls the driver.
            let launched = recent::look();
            gate::open();
            if limit.is_over() {
                failure.message += &launched.unfinished();
            }
            failure
        },
    )?;
    // The memory of the last dump must be gone when CRIU comes.
    guard::free();
    agent.stop_awaiting();
    agent.state = GateState::Closed {};
    Ok(())
}

/// A limit beyond what the clock can count is none.
fn later(start: Instant, time: Duration) -> Instant {
    start.checked_add(time).unwrap_or(start + Duration::from_secs(1 << 30))
}
