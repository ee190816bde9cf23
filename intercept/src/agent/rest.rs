//! A program that is being stopped: its gate is shut, and what came before comes to an end.

use std::thread;
use std::time::{Duration, Instant};

use super::drain::Drain;
use crate::limit::Limit;
use crate::state::gate::{self, Closing, EVERYWHERE, NotClosed};
use crate::state::memory::Failure;
use crate::ungated;
use crate::watch::interrupt;

/// How often is looked whether calls have left the gate.
const POLL: Duration = Duration::from_micros(50);
/// How long is waited for devices until somebody looks whether the client is still there.
const LOOK: Duration = Duration::from_millis(10);

/// Launches that are interrupted have no more time than this.
const MOST: Duration = Duration::from_secs(600);

/// How far it is.
pub(super) struct Rest {
    since: Instant,
    gate: Closing,
    /// Since the last shutting of the gate: no call is inside, and the devices are waited for since then.
    is_empty: bool,
    drain: Option<Drain>,
    /// What is done about launches that can be interrupted.
    interrupt: Interrupt,
}

/// What is done about launches that can be interrupted.
#[derive(Debug, Clone, Copy)]
enum Interrupt {
    /// They run to their end.
    No,
    /// They are interrupted once the gate is shut, and have so long then.
    For(Duration),
    /// They are, and have to have come to rest by then.
    Until(Instant),
    /// They were, and some did not.
    Over,
}

/// Why a program is not at rest.
pub(super) enum Unfinished {
    /// Its gate is not closed.
    Gate(NotClosed),
    /// A device is busy.
    Devices(Failure),
}

impl Rest {
    /// Begins to close the open gate.
    pub(super) fn begin() -> Self {
        let since = Instant::now();
        Self {
            since,
            gate: Closing::begin(),
            is_empty: false,
            drain: None,
            interrupt: Interrupt::No,
        }
    }

    /// Has launches interrupted that can be. Those that do not come to rest within this time go on to their end.
    pub(super) fn interrupt(&mut self, time: Duration) {
        if matches!(self.interrupt, Interrupt::No) {
            self.interrupt = Interrupt::For(time);
        }
    }

    /// When it began.
    pub(super) fn since(&self) -> Instant {
        self.since
    }

    /// Waits until the program is at rest: no call is inside the gate, none enters, and the devices are idle. Whether
    /// it is so at the end.
    ///
    /// # Errors
    /// A context is broken, or the gate does not stop all of the program.
    pub(super) fn go_on(&mut self, end: &Limit<'_>) -> Result<bool, Failure> {
        loop {
            if self.look()? {
                ungated::check()?;
                return Ok(true);
            }
            if end.is_over() {
                return Ok(false);
            }
            match &mut self.drain {
                Some(drain) if self.is_empty => drain.wait(LOOK.min(end.left()))?,
                _ => thread::sleep(POLL),
            }
        }
    }

    /// Whether the program is at rest.
    fn look(&mut self) -> Result<bool, Failure> {
        let is_closed = self.gate.is_done().map_err(|why| Failure::other(why.to_string()))?;
        if !self.gate.is_shut() {
            return Ok(false);
        }
        // Calls that are inside may be waiting for work on one device that others do on another: so it is looked at
        // devices before they have left. What they do in between is waited for afterwards.
        let drain = match &mut self.drain {
            None => self.drain.insert(Drain::begin()?),
            Some(drain) => {
                if is_closed && !self.is_empty {
                    drain.renew()?;
                }
                drain
            }
        };
        self.is_empty = is_closed;
        let is_at_rest = drain.is_done()? && is_closed;
        if !is_at_rest {
            self.look_after_interrupted()?;
        }
        Ok(is_at_rest)
    }

    /// Interrupts what can be once nobody is inside, and lets it go on where that does not bring it to rest.
    fn look_after_interrupted(&mut self) -> Result<(), Failure> {
        match self.interrupt {
            Interrupt::For(time) if self.is_empty => {
                interrupt::interrupt();
                self.interrupt = Interrupt::Until(Instant::now() + time.min(MOST));
            }
            Interrupt::Until(end) if Instant::now() >= end => {
                interrupt::give_up();
                self.interrupt = Interrupt::Over;
                if let Some(drain) = &mut self.drain {
                    drain.renew()?;
                }
            }
            // What was let through may be one more.
            Interrupt::Until(_) if self.is_empty => interrupt::interrupt(),
            _ => {}
        }
        Ok(())
    }

    /// Lets calls pass up to one launch on a device that is idle, or on any with `busy_too`, that one too, or up to the
    /// limit. Whether a launch has passed.
    ///
    /// # Errors
    /// Captures are under way, all devices are busy, or there are no threads.
    pub(super) fn pass(&mut self, busy_too: bool, end: Limit<'_>) -> Result<bool, Failure> {
        let may_launch = |drain: &Drain| busy_too || drain.may_launch();
        let drain = self.drain.as_mut().filter(|drain| self.gate.is_shut() && may_launch(drain));
        let Some(drain) = drain else {
            return Err(Failure::other("nothing can be launched now"));
        };
        let devices = if busy_too { EVERYWHERE } else { !drain.busy() };
        let launched = self.gate.pass(devices, end);
        self.is_empty = false;
        drain.renew()?;
        Ok(launched)
    }

    /// What a checkpointer is told.
    pub(super) fn told(&mut self, is_at_rest: bool) -> gpucr_wire::Rest {
        let longest = self.drain.as_mut().map(Drain::take_longest).unwrap_or_default();
        let drain = self.drain.as_ref();
        let mut busy = drain.map(Drain::busy_for).unwrap_or_default();
        if !self.is_empty {
            busy = busy.max(self.since.elapsed());
        }
        gpucr_wire::Rest {
            is_at_rest,
            is_shut: self.gate.is_shut(),
            may_pass: self.gate.is_shut() && drain.is_some_and(Drain::may_launch),
            busy_ms: if is_at_rest { 0 } else { busy.as_millis() as u64 },
            longest_ms: longest.as_millis() as u64,
        }
    }

    /// Why the program is not at rest.
    pub(super) fn unfinished(&self) -> Unfinished {
        match &self.drain {
            Some(drain) if self.is_empty => Unfinished::Devices(drain.unfinished()),
            _ => Unfinished::Gate(gate::busy()),
        }
    }
}
