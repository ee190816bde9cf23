//! The phases of a dump or a restore: their times, their display, and faults at their edges.

use std::time::{Duration, Instant};

use crate::error::Error;
use crate::timeline::{Timeline, Track};

/// Where the phases of a dump or restore are shown.
pub trait Progress: Send + Sync {
    /// A phase begins; `bytes` is how much it has to move, where that is known.
    fn phase(&self, name: &'static str, bytes: Option<u64>);
    /// So many bytes more have been moved.
    fn advance(&self, bytes: u64);
}

/// Shows nothing.
#[derive(Debug, Clone, Copy)]
pub struct Quiet;

impl Progress for Quiet {
    fn phase(&self, _: &'static str, _: Option<u64>) {}
    fn advance(&self, _: u64) {}
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
    current: Option<(&'static str, Instant)>,
    times: Vec<PhaseTime>,
    timeline: Timeline,
}

impl<'a> Clock<'a> {
    /// Starts now, in no phase.
    pub fn start(progress: &'a dyn Progress) -> Self {
        Self::recorded(progress, Timeline::default())
    }

    /// The same, with a timeline to which the phases belong.
    pub fn recorded(progress: &'a dyn Progress, timeline: Timeline) -> Self {
        Self { progress, start: Instant::now(), current: None, times: Vec::new(), timeline }
    }

    /// Ends the current phase and begins the next. Fails where a fault was asked for.
    pub fn enter(&mut self, name: &'static str, bytes: Option<u64>) -> Result<(), Error> {
        self.end();
        tracing::debug!(phase = name, "begins");
        self.progress.phase(name, bytes);
        self.current = Some((name, Instant::now()));
        fault(name)
    }

    /// Says that the current phase has so many bytes to move from now on.
    pub fn announce(&self, phase: &'static str, bytes: u64) {
        self.progress.phase(phase, Some(bytes));
    }

    /// Ends the current phase.
    pub fn end(&mut self) {
        if let Some((name, since)) = self.current.take() {
            let length = since.elapsed();
            self.timeline.lasted(Track::Phases, name, since, length);
            self.times.push(PhaseTime { name, ms: milliseconds(length) });
        }
    }

    /// Adds a time that was measured elsewhere, beside the phases.
    pub fn add(&mut self, name: &'static str, time: Duration) {
        self.times.push(PhaseTime { name, ms: milliseconds(time) });
    }

    /// The phase that runs, or the last one.
    pub fn phase(&self) -> &'static str {
        self.current.map(|(name, _)| name).or(self.times.last().map(|t| t.name)).unwrap_or("start")
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

/// A path as text, for reports: JSON has no place for bytes that are not UTF-8.
pub(crate) fn lossy<S: serde::Serializer>(
    path: &std::path::Path,
    serializer: S,
) -> Result<S::Ok, S::Error> {
    serializer.serialize_str(&path.to_string_lossy())
}

/// Milliseconds, with fractions.
pub fn milliseconds(time: Duration) -> f64 {
    (time.as_secs_f64() * 1e6).round() / 1e3
}

/// What tests ask for, in debug builds only: `GPUCR_FAULT=KIND:PHASE`, or several with commas.
fn asked() -> Vec<(String, String)> {
    if !cfg!(debug_assertions) {
        return Vec::new();
    }
    let asked = std::env::var("GPUCR_FAULT").unwrap_or_default();
    let pairs = asked.split(',').filter_map(|one| one.split_once(':'));
    pairs.map(|(kind, phase)| (kind.to_owned(), phase.to_owned())).collect()
}

/// Whether a test asked to leave something out, in debug builds only: `GPUCR_FAULT=skip:validate` (the
/// check of what was copied early), `skip:compare` (that of what is copied late), `skip:defer` (copying
/// late at all), `skip:habits` (telling the shim what is known of kernels), `skip:cores` (staying off the CPUs
/// that the programs need), `skip:unwanted` (loading, on demand, what nobody has asked for).
pub fn skipped(phase: &str) -> bool {
    asked().iter().any(|(kind, name)| kind == "skip" && name == phase)
}

/// A failure on demand, for tests, in debug builds only: `GPUCR_FAULT=kill:PHASE` ends gpucr with
/// SIGKILL when it enters the phase, `fail:PHASE` makes the phase fail, `pause:PHASE` holds it up
/// there for two seconds, and `hold:PHASE` until the file is there that `GPUCR_FAULT_FILE` names. As phases
/// count `detached`, the moment after each process has been detached, and `validated`, the one at which hashing
/// all memory has ended, beside which programs are detached with `recopy`.
pub fn fault(phase: &str) -> Result<(), Error> {
    for (kind, name) in asked().iter().filter(|(_, name)| name == phase) {
        match kind.as_str() {
            "kill" => {
                let own = rustix::process::getpid();
                let _ = rustix::process::kill_process(own, rustix::process::Signal::KILL);
                unreachable!("killed");
            }
            "fail" => return Err(Error::Injected(format!("fail:{name}"))),
            "pause" => std::thread::sleep(Duration::from_secs(2)),
            "hold" => {
                let file = std::env::var_os("GPUCR_FAULT_FILE").unwrap_or_default();
                while !std::path::Path::new(&file).exists() {
                    std::thread::sleep(Duration::from_millis(2));
                }
            }
            _ => {}
        }
    }
    Ok(())
}
