//! For how long the agent waits for the program.

use std::os::fd::BorrowedFd;
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec};

/// A limit: up to a moment, and as long as the client that asked is there.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Limit<'a> {
    deadline: Instant,
    /// The connection by which somebody has asked for it.
    asked: Option<BorrowedFd<'a>>,
}

impl From<Instant> for Limit<'_> {
    /// A limit for what this process itself has asked for.
    fn from(deadline: Instant) -> Self {
        Self { deadline, asked: None }
    }
}

impl<'a> Limit<'a> {
    pub(crate) fn new(deadline: Instant, asked: BorrowedFd<'a>) -> Self {
        Self { deadline, asked: Some(asked) }
    }

    /// Whether it is over.
    pub(crate) fn is_over(&self) -> bool {
        self.left().is_zero() || self.asked.is_some_and(is_closed)
    }

    /// Up to the deadline.
    pub(crate) fn left(&self) -> Duration {
        self.deadline.saturating_duration_since(Instant::now())
    }
}

/// Whether the other end of a connection is gone.
fn is_closed(connection: BorrowedFd<'_>) -> bool {
    let mut poll = [PollFd::from_borrowed_fd(connection, PollFlags::RDHUP)];
    let now = Timespec { tv_sec: 0, tv_nsec: 0 };
    let gone = PollFlags::RDHUP | PollFlags::HUP | PollFlags::ERR;
    rustix::event::poll(&mut poll, Some(&now)).is_ok() && poll[0].revents().intersects(gone)
}
