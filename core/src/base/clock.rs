//! The phases of a dump or a restore as they pass: their times, their display, and faults at their edges.

use std::time::{Duration, Instant};

use crate::base::faults::{Injected, fault};
use crate::base::format::milliseconds;
use crate::base::phase::{Phase, PhaseTime};
use crate::base::progress::Progress;
use crate::base::timeline::{Timeline, Track};

/// Measures phases one after the other.
pub(crate) struct Clock<'a> {
    progress: &'a dyn Progress,
    start: Instant,
    current: Option<(Phase, Instant)>,
    last: Phase,
    times: Vec<PhaseTime>,
    timeline: Timeline,
}

impl<'a> Clock<'a> {
    /// Starts now, in no phase.
    pub(crate) fn start(progress: &'a dyn Progress) -> Self {
        Self::recorded(progress, Timeline::default())
    }

    /// Starts now, in no phase, with a timeline to which the phases belong.
    pub(crate) fn recorded(progress: &'a dyn Progress, timeline: Timeline) -> Self {
        Self {
            progress,
            start: Instant::now(),
            current: None,
            last: Phase::Start,
            times: Vec::new(),
            timeline,
        }
    }

    /// Ends the current phase and begins the next.
    ///
    /// # Errors
    /// A fault that a test asked for at its beginning.
    pub(crate) fn enter(&mut self, phase: Phase, bytes: Option<u64>) -> Result<(), Injected> {
        self.end();
        let name = phase.name();
        tracing::debug!(phase = name, "begins");
        self.progress.phase(name, bytes);
        (self.current, self.last) = (Some((phase, Instant::now())), phase);
        fault(name)
    }

    /// Says that the current phase has so many bytes to move from now on.
    pub(crate) fn announce(&self, phase: Phase, bytes: u64) {
        self.progress.phase(phase.name(), Some(bytes));
    }

    /// Ends the current phase.
    pub(crate) fn end(&mut self) {
        if let Some((phase, since)) = self.current.take() {
            let name = phase.name();
            let length = since.elapsed();
            self.timeline.lasted(Track::Phases, name, since, length);
            self.times.push(PhaseTime { name, ms: milliseconds(length) });
        }
    }

    /// The phase that runs, or the last one.
    pub(crate) fn phase(&self) -> Phase {
        self.last
    }

    /// Since the start.
    pub(crate) fn total(&self) -> Duration {
        self.start.elapsed()
    }

    /// The phases that have ended.
    pub(crate) fn times(&self) -> &[PhaseTime] {
        &self.times
    }
}
