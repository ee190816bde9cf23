//! The phases of a dump or a restore: their times, their display, and faults at their edges.

use std::fmt;
use std::time::{Duration, Instant};

use serde::{Serialize, Serializer};

use crate::base::faults::{Injected, fault};
use crate::base::format::milliseconds;
use crate::base::progress::Progress;
use crate::base::timeline::{Timeline, Track};

/// A part of a dump, of a restore, or of the making of a warm image. Which follow each other is told by
/// `engine/dump`, `engine/restore` and `engine/warm`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Phase {
    /// Nothing has begun.
    Start,
    /// What the host, the programs or the image lack is found before anything is touched.
    Preflight,
    /// Connections to the agents.
    Attach,
    /// Memory is copied while the program runs.
    Precopy,
    /// No call of the programs goes to the driver any more.
    Gate,
    /// The programs hand over what keeps their memory.
    Export,
    /// Memory is compared with what was copied.
    Validate,
    /// What is still to be saved is copied aside within the devices.
    Shadow,
    /// What is left is copied.
    Copy,
    /// The programs lose their memory, which lives on.
    Detach,
    /// The driver moves the rest of the CUDA state into host memory.
    Checkpoint,
    /// CRIU saves or makes the processes.
    Criu,
    /// CRIU's files become part of the image.
    Store,
    /// The image appears.
    Commit,
    /// The programs go on.
    Resume,
    /// Memory was written before it was saved: the program is stopped again.
    Fallback,
    /// Memory of the image goes to the devices, or into the memory of the host.
    Load,
    /// CRIU's files are written for CRIU.
    Extract,
    /// The driver restores the rest of the CUDA state.
    Driver,
    /// Memory comes while the program runs.
    Stream,
    /// A process takes over what is kept.
    Hold,
    /// The program runs and shares memory with other instances.
    Share,
    /// Of a migration: whether the program can go on at the destination.
    Offer,
    /// The destination takes chunks.
    Receive,
    /// The destination completes the image.
    Prepare,
    /// The program changes hands.
    Decide,
    /// The source has none of the program any more, and the destination restores it.
    Handover,
}

impl Phase {
    /// The phase's name as it is shown, and given in `GPUCR_FAULT`.
    pub fn name(self) -> &'static str {
        match self {
            Self::Start => "start",
            Self::Preflight => "preflight",
            Self::Attach => "attach",
            Self::Precopy => "precopy",
            Self::Gate => "gate",
            Self::Export => "export",
            Self::Validate => "validate",
            Self::Shadow => "shadow",
            Self::Copy => "copy",
            Self::Detach => "detach",
            Self::Checkpoint => "checkpoint",
            Self::Criu => "criu",
            Self::Store => "store",
            Self::Commit => "commit",
            Self::Resume => "resume",
            Self::Fallback => "fallback",
            Self::Load => "load",
            Self::Extract => "extract",
            Self::Driver => "driver",
            Self::Stream => "stream",
            Self::Hold => "hold",
            Self::Share => "share",
            Self::Offer => "offer",
            Self::Receive => "receive",
            Self::Prepare => "prepare",
            Self::Decide => "decide",
            Self::Handover => "handover",
        }
    }
}

impl fmt::Display for Phase {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

impl Serialize for Phase {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.serialize_str(self.name())
    }
}

/// How long one phase took.
#[derive(Debug, Clone, PartialEq, serde::Serialize)]
pub struct PhaseTime {
    /// The phase.
    pub name: &'static str,
    /// Milliseconds.
    pub ms: f64,
}

/// Measures phases one after the other.
pub struct Clock<'a> {
    progress: &'a dyn Progress,
    start: Instant,
    current: Option<(Phase, Instant)>,
    last: Phase,
    times: Vec<PhaseTime>,
    timeline: Timeline,
}

impl<'a> Clock<'a> {
    /// Starts now, in no phase.
    pub fn start(progress: &'a dyn Progress) -> Self {
        Self::recorded(progress, Timeline::default())
    }

    /// Starts now, in no phase, with a timeline to which the phases belong.
    pub fn recorded(progress: &'a dyn Progress, timeline: Timeline) -> Self {
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
    pub fn enter(&mut self, phase: Phase, bytes: Option<u64>) -> Result<(), Injected> {
        self.end();
        let name = phase.name();
        tracing::debug!(phase = name, "begins");
        self.progress.phase(name, bytes);
        (self.current, self.last) = (Some((phase, Instant::now())), phase);
        fault(name)
    }

    /// Says that the current phase has so many bytes to move from now on.
    pub fn announce(&self, phase: Phase, bytes: u64) {
        self.progress.phase(phase.name(), Some(bytes));
    }

    /// Ends the current phase.
    pub fn end(&mut self) {
        if let Some((phase, since)) = self.current.take() {
            let name = phase.name();
            let length = since.elapsed();
            self.timeline.lasted(Track::Phases, name, since, length);
            self.times.push(PhaseTime { name, ms: milliseconds(length) });
        }
    }

    /// Adds a time that was measured elsewhere than in the phases.
    pub fn add(&mut self, name: &'static str, time: Duration) {
        self.times.push(PhaseTime { name, ms: milliseconds(time) });
    }

    /// The phase that runs, or the last one.
    pub fn phase(&self) -> Phase {
        self.last
    }

    /// Since the start.
    pub fn total(&self) -> Duration {
        self.start.elapsed()
    }

    /// The phases that have ended.
    pub fn times(&self) -> &[PhaseTime] {
        &self.times
    }
}
