//! Requests about what the program launches.

use gpucr_wire::{Connection, Reply};

use super::descriptors::Room;
use super::state::Next;
use crate::log::log;
use crate::state::images;
use crate::state::memory::Failure;
use crate::watch;

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
