//! Requests about the gate, and what the program has.

use std::os::fd::AsFd;
use std::thread;
use std::time::{Duration, Instant};

use gpucr_wire::{Connection, Counts, GateState, Reply};

use super::drain;
use super::rest::{Rest, Unfinished};
use super::state::{Agent, Next, devices};
use crate::limit::Limit;
use crate::state::memory::{self, Failure};
use crate::state::{events, gate, peers, recent};
use crate::watch::{guard, interrupt, meeting};
use crate::{ungated, usage};

/// How often is looked whether a thread has come back.
const LOOK: Duration = Duration::from_micros(200);
/// The limit for what has to be done before the gate is shut behind a call, milliseconds.
const SHUTTING_MS: u64 = 10_000;

/// What the program has.
pub(super) fn counts(agent: &Agent) -> Next {
    let mut counts = Counts::default();
    usage::fill(&mut counts);
    memory::lock().fill(&mut counts);
    events::fill(&mut counts);
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
    let limit = Duration::from_millis(timeout_ms);
    let since = begin_to_close(agent, limit, connection)?;
    let end = Limit::new(later(since, limit), connection.as_fd());
    if go_on_closing(agent, &end)? {
        return Ok(Next::done());
    }
    let mut failure = match agent.rest.as_ref().map(Rest::unfinished) {
        Some(Unfinished::Gate(why)) => {
            Failure::other(format!("the gate could not be closed within {limit:?}: {why}"))
        }
        Some(Unfinished::Devices(failure)) => failure,
        None => Failure::other("nobody closes the gate"),
    };
    // Handles are looked up while the program goes on: that calls the driver.
    let launched = recent::look();
    agent.reopen();
    failure.message += &launched.unfinished(interrupt::why_not);
    failure.message += interrupt::why_none();
    Err(failure)
}

/// Shuts the gate, or goes on waiting for what is behind it.
pub(super) fn halt(
    agent: &mut Agent,
    wait_ms: u64,
    timeout_ms: u64,
    interrupt_ms: u64,
    connection: &Connection,
) -> Result<Next, Failure> {
    begin_to_close(agent, Duration::from_millis(timeout_ms), connection)?;
    if let (Some(rest), 1..) = (&mut agent.rest, interrupt_ms) {
        rest.interrupt(Duration::from_millis(interrupt_ms));
    }
    let end = later(Instant::now(), Duration::from_millis(wait_ms));
    let is_at_rest = go_on_closing(agent, &Limit::new(end, connection.as_fd()))?;
    let rest = agent.rest.as_mut().map(|rest| rest.told(is_at_rest)).unwrap_or_default();
    Ok(Next::Reply(Reply::Rest { rest }))
}

/// Which launches are interrupted.
pub(super) fn interrupted(agent: &Agent) -> Result<Next, Failure> {
    agent.expect(GateState::Closed {})?;
    Ok(Next::Reply(Reply::Interrupted { launches: interrupt::standing() }))
}

/// Waits until a thread of the program comes back from a call by which it waits for the device, and begins to close the
/// gate then, before that thread goes on. What is under way in the driver does not matter: only whether it was so.
pub(super) fn meet(
    agent: &mut Agent,
    wait_ms: u64,
    connection: &Connection,
) -> Result<Next, Failure> {
    agent.expect(GateState::Open {})?;
    let end = later(Instant::now(), Duration::from_millis(wait_ms));
    let limit = Limit::new(end, connection.as_fd());
    agent.begin_meeting();
    while !meeting::has_come() && !limit.is_over() {
        thread::sleep(LOOK);
    }
    let met = meeting::has_come();
    let closing = if met { close_behind(agent, connection) } else { Ok(()) };
    agent.end_meeting();
    closing?;
    Ok(Next::Reply(Reply::Met { met }))
}

/// Tells whether a kernel would die if another process came to the devices: whether the driver has restored this process
/// and a kernel takes long. The gate is open before and after.
pub(super) fn fragile(
    agent: &mut Agent,
    wait_ms: u64,
    connection: &Connection,
) -> Result<Next, Failure> {
    let may_be = agent.was_detached && agent.state == (GateState::Open {}) && !agent.awaiting;
    // Kernels that are to be interrupted take long, and one may begin at any time.
    let fragile =
        may_be && (gate::is_interruptible() || !comes_to_rest(agent, wait_ms, connection)?);
    Ok(Next::Reply(Reply::Fragile { fragile }))
}

/// Whether the program stands still so soon behind its gate, which is opened again. The driver could be asked with the
/// gate open too, but for a stream that is being captured: that would end the capture.
fn comes_to_rest(
    agent: &mut Agent,
    wait_ms: u64,
    connection: &Connection,
) -> Result<bool, Failure> {
    // Memory that is shared with other instances becomes the program's own first, whatever that takes.
    let since = begin_to_close(agent, Duration::from_millis(SHUTTING_MS), connection)?;
    let end = later(since, Duration::from_millis(wait_ms));
    let is_at_rest = go_on_closing(agent, &Limit::new(end, connection.as_fd()))?;
    if is_at_rest {
        agent.open();
    } else {
        agent.reopen();
    }
    Ok(is_at_rest)
}

/// Shuts the gate if nothing is in the way, and else goes on to do so later.
fn close_behind(agent: &mut Agent, connection: &Connection) -> Result<(), Failure> {
    let limit = Duration::from_millis(SHUTTING_MS);
    begin_to_close(agent, limit, connection)?;
    let Some(rest) = &mut agent.rest else { return Ok(()) };
    let end = Limit::new(Instant::now(), connection.as_fd());
    rest.go_on(&end).map(drop).inspect_err(|_| agent.reopen())
}

/// Lets one launch pass the shut gate.
pub(super) fn pass(
    agent: &mut Agent,
    wait_ms: u64,
    busy_too: bool,
    connection: &Connection,
) -> Result<Next, Failure> {
    if agent.state != (GateState::Closed {}) {
        agent.expect(GateState::Closing {})?;
    }
    let Some(rest) = &mut agent.rest else {
        return Err(Failure::other("nobody has asked it to halt"));
    };
    agent.state = GateState::Closing {};
    // What was exported need not be all any more.
    agent.transfer.forget_exports();
    let end = later(Instant::now(), Duration::from_millis(wait_ms));
    let launched = rest.pass(busy_too, Limit::new(end, connection.as_fd()));
    let launched = launched.inspect_err(|_| agent.reopen())?;
    Ok(Next::Reply(Reply::Passed { launched }))
}

/// Begins to close an open gate; one that is closing goes on to. Since when it is.
fn begin_to_close(
    agent: &mut Agent,
    limit: Duration,
    connection: &Connection,
) -> Result<Instant, Failure> {
    if let (GateState::Closing {}, Some(rest)) = (agent.state, &agent.rest) {
        return Ok(rest.since());
    }
    agent.expect(GateState::Open {})?;
    if agent.awaiting && !memory::lock().all_attached() {
        return Err(Failure::other("not possible now: blocks are awaited"));
    }
    agent.end_sharing(Limit::new(later(Instant::now(), limit), connection.as_fd()))?;
    let rest = Rest::begin();
    let since = rest.since();
    agent.rest = Some(rest);
    agent.state = GateState::Closing {};
    Ok(since)
}

/// Goes on closing the gate. Whether the program is at rest then. A failure opens the gate.
fn go_on_closing(agent: &mut Agent, end: &Limit<'_>) -> Result<bool, Failure> {
    let Some(rest) = &mut agent.rest else { return Ok(false) };
    let is_at_rest = rest.go_on(end).inspect_err(|_| agent.reopen())?;
    if is_at_rest {
        closed(agent);
    }
    Ok(is_at_rest)
}

/// The gate is closed and the devices are idle.
fn closed(agent: &mut Agent) {
    // The memory of the last dump must be gone when CRIU comes.
    guard::free();
    agent.stop_awaiting();
    // What has come to its end is over, though it was interrupted.
    interrupt::standing();
    agent.state = GateState::Closed {};
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
    agent.rest = None;
    let end = later(Instant::now(), Duration::from_millis(wait_ms));
    let time = Duration::from_millis(timeout_ms);
    let limit = Limit::new(later(end, time), connection.as_fd());
    let stepped = gate::step(Limit::new(end, connection.as_fd()), limit).map_err(|why| {
        Failure::other(format!("the gate could not be closed within {time:?}: {why}"))
    });
    let stepped = stepped.and_then(|()| ungated::check()).and_then(|()| drain::drain(limit));
    stepped.map_err(|mut failure| {
        let launched = recent::look();
        agent.launch_interrupted();
        gate::open();
        if limit.is_over() {
            failure.message += &launched.unfinished(|_| None);
        }
        failure
    })?;
    closed(agent);
    Ok(Next::done())
}

/// Opens the gate.
pub(super) fn open(agent: &mut Agent) -> Result<Next, Failure> {
    if agent.state == (GateState::Parted {}) {
        return Err(Failure::other("not possible now: multicast objects may be undone"));
    }
    if agent.state == (GateState::Detached {}) {
        if agent.awaiting {
            agent.transfer.restore_stacks()?;
        } else {
            agent.transfer.finish_copy_in()?;
        }
        agent.state = GateState::Closed {};
    }
    // An open gate is fine: recovery asks for it in any case.
    if matches!(agent.state, GateState::Closed {} | GateState::Closing {}) && !gate::is_guarding() {
        interrupt::relaunch()?;
    }
    match agent.state {
        GateState::Closed {} => agent.open(),
        GateState::Closing {} => agent.reopen(),
        _ => {}
    }
    Ok(Next::done())
}

/// A limit beyond what the clock can count is none.
pub(super) fn later(start: Instant, time: Duration) -> Instant {
    start.checked_add(time).unwrap_or(start + Duration::from_secs(1 << 30))
}
