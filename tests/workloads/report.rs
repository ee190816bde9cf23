//! Options of a run, and what it prints.

use std::fmt::Display;
use std::fs::OpenOptions;
use std::io::Write as _;
use std::path::{Path, PathBuf};
use std::time::Duration;

use anyhow::{Context as _, Result};

use crate::collective::options::Team;
use crate::gpu::{Plain, bytes_of};

/// How much memory and work a run has.
#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
pub(crate) enum Size {
    /// A few seconds on a software driver.
    Small,
    /// Tens of MiB.
    Medium,
    /// For a real GPU.
    Large,
}

/// One run: its options, its output, and the hash over everything that must not differ.
pub(crate) struct Run {
    /// Where all "random" data comes from.
    pub(crate) seed: u32,
    /// Scale of the run.
    pub(crate) size: Size,
    asked_steps: Option<u32>,
    delay: Duration,
    pace: Option<PathBuf>,
    log: Option<PathBuf>,
    /// How ranks work, where there are some.
    pub(crate) team: Team,
    steps: u32,
    hash: blake3::Hasher,
}

impl Run {
    /// A run with the options of the command line.
    pub(crate) fn new(
        seed: u32,
        size: Size,
        steps: Option<u32>,
        delay: Duration,
        pace: Option<PathBuf>,
        log: Option<PathBuf>,
        team: Team,
    ) -> Self {
        let hash = blake3::Hasher::new();
        Self { seed, size, asked_steps: steps, delay, pace, log, team, steps: 0, hash }
    }

    /// The value for this run's size.
    pub(crate) fn pick<T>(&self, small: T, medium: T, large: T) -> T {
        match self.size {
            Size::Small => small,
            Size::Medium => medium,
            Size::Large => large,
        }
    }

    /// The number of steps: what the user asked for, or the default of this size.
    pub(crate) fn plan(&mut self, small: u32, medium: u32, large: u32) -> u32 {
        self.steps = self.asked_steps.unwrap_or_else(|| self.pick(small, medium, large));
        self.steps
    }

    /// How many steps the host can repeat in reasonable time, if one costs it `cost` simple
    /// operations: all of them in small runs, at least one.
    pub(crate) fn checkable(&self, cost: u64) -> u32 {
        let affordable = (300_000_000 / cost.max(1)).clamp(1, u64::from(self.steps));
        affordable as u32
    }

    /// The number of steps that the user asked for.
    pub(crate) fn asked_steps(&self) -> Option<u32> {
        self.asked_steps
    }

    /// The file that sets the pace.
    pub(crate) fn pace(&self) -> Option<&Path> {
        self.pace.as_deref()
    }

    /// The pause after each step.
    pub(crate) fn delay(&self) -> Duration {
        self.delay
    }

    /// Prints a line, and appends it to the log file.
    ///
    /// The log is opened for each line, so that no open file whose size changes is part of a
    /// checkpoint.
    pub(crate) fn line(&self, text: impl Display) -> Result<()> {
        let line = format!("{text}\n");
        let mut out = std::io::stdout().lock();
        let printed = out.write_all(line.as_bytes()).and_then(|()| out.flush());
        let Some(path) = &self.log else { return printed.context("cannot write to stdout") };
        // With a log, a stdout that has gone (the reader died) is no reason to stop.
        let mut file = OpenOptions::new().create(true).append(true).open(path)?;
        file.write_all(line.as_bytes()).with_context(|| format!("cannot write {}", path.display()))
    }

    /// Says that the state is set up and that steps follow.
    pub(crate) fn ready(&self) -> Result<()> {
        self.line(format_args!("ready pid={}", std::process::id()))
    }

    /// Ends step `step` (counted from 0): its text belongs to the result; every few steps it is
    /// printed.
    pub(crate) fn step(&mut self, step: u32, text: impl Display) -> Result<()> {
        let line = format!("step {} {text}", step + 1);
        self.hash.update(line.as_bytes());
        self.hash.update(b"\n");
        if (step + 1).is_multiple_of((self.steps / 50).max(1)) || step + 1 == self.steps {
            self.line(&line)?;
        }
        if !self.is_hurried() {
            std::thread::sleep(self.delay);
        }
        self.wait_for_pace(step);
        Ok(())
    }

    /// Lets something last as long as a step: for the delay, or until the pace allows the step's end
    /// where there is no delay.
    pub(crate) fn last(&self, step: u32) {
        if self.delay.is_zero() {
            self.wait_for_pace(step);
        } else {
            std::thread::sleep(self.delay);
        }
    }

    /// Whether nobody wants the program to take its time any more.
    fn is_hurried(&self) -> bool {
        let allowed = self.pace.as_ref().and_then(|pace| std::fs::metadata(pace).ok());
        allowed.is_some_and(|meta| meta.len() >= HURRY)
    }

    fn wait_for_pace(&self, step: u32) {
        let Some(pace) = &self.pace else { return };
        // Once the file is gone nobody waits for the program any more: it goes on to its end.
        while std::fs::metadata(pace).is_ok_and(|meta| meta.len() <= u64::from(step)) {
            std::thread::sleep(Duration::from_millis(2));
        }
    }

    /// Adds final state to the result.
    pub(crate) fn absorb<T: Plain>(&mut self, values: &[T]) {
        self.hash.update(&(values.len() as u64).to_le_bytes());
        self.hash.update(bytes_of(values));
    }

    /// Prints the result line.
    pub(crate) fn finish(&self) -> Result<()> {
        self.line(format_args!("result {}", self.hash.finalize().to_hex()))
    }
}

/// So many bytes in the file that sets the pace mean that steps need not take their time.
const HURRY: u64 = 1 << 21;

/// A float with its bits, so that a series shows the smallest difference.
pub(crate) struct Exact(pub(crate) f32);

impl Display for Exact {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{:.7} {:08x}", self.0, self.0.to_bits())
    }
}
