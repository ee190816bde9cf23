//! Requests about what the program launches.

use std::os::fd::AsFd;
use std::time::{Duration, Instant};

use gpucr_wire::{Connection, GateState, Reply};

use super::descriptors::Room;
use super::drain;
use super::gating::later;
use super::state::{Agent, Next};
use crate::limit::Limit;
use crate::log::log;
use crate::state::images;
use crate::state::memory::Failure;
use crate::watch::{self, again};

/// Begins or ends recording.
pub(super) fn record(on: bool) -> Next {
    if on {
        watch::start();
    } else {
        watch::stop();
    }
    Next::done()
}

/// What was launched since the last question.
pub(super) fn accesses() -> Result<Next, Failure> {
    if !watch::is_on() {
        return Err(Failure::other("nothing is recorded"));
    }
    Ok(Next::Reply(Reply::Accesses { accesses: watch::take() }))
}

/// Makes the launch once more that the last step has kept.
pub(super) fn again(
    agent: &Agent,
    timeout_ms: u64,
    connection: &Connection,
) -> Result<Next, Failure> {
    agent.expect(GateState::Closed {})?;
    match again::launch() {
        Some(Ok(())) => {}
        refused_or_none => {
            // It is noted before the driver has seen it, which may have refused it the first time too.
            if let Some(Err(code)) = refused_or_none {
                log!("a launch is not made once more: error {code}");
            }
            return Ok(Next::Reply(Reply::Again { launched: false }));
        }
    }
    let end = later(Instant::now(), Duration::from_millis(timeout_ms));
    drain::drain(Limit::new(end, connection.as_fd()))?;
    Ok(Next::Reply(Reply::Again { launched: true }))
}

/// Sends what a module was loaded from.
pub(super) fn image(id: u64, limit: u64, connection: &mut Connection) -> Result<Next, Failure> {
    let room = Room::make();
    let (fd, bytes) = images::open(id, limit)?;
    let sent = connection.send(&Reply::Image { bytes });
    let sent = sent.and_then(|()| connection.send_fds(&[room.park(fd)]));
    // There is nobody to tell: the next receive says that the connection is broken.
    sent.unwrap_or_else(|error| log!("cannot send an image: {error}"));
    Ok(Next::Sent)
}
