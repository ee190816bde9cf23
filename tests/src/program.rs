//! Programs that a test has started.

use std::path::PathBuf;
use std::process::{Child, ExitStatus};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};

use crate::command::PATIENCE;
use crate::pace::Pace;
use crate::started::{kill_tree, writes_to};

/// A program that was started, or the foreground restore that stands in for it. Killed on drop.
pub struct Program {
    /// The program's own pid.
    pub pid: u32,
    pub(crate) child: Option<Child>,
    pub(crate) log: PathBuf,
    /// What keeps it from its end, and the steps that it makes up to there.
    pub(crate) pace: Option<(Pace, usize)>,
}

impl Program {
    /// What it has printed so far.
    pub fn output(&self) -> String {
        std::fs::read_to_string(&self.log).unwrap_or_default()
    }

    /// Waits for a line that starts with `prefix`, and gives it.
    ///
    /// # Errors
    /// It has ended without such a line, or takes too long; the error has what it has printed.
    pub fn wait_for(&mut self, prefix: &str) -> Result<String> {
        let deadline = Instant::now() + PATIENCE;
        loop {
            let output = self.output();
            let complete = output.rfind('\n').map_or("", |end| &output[..end]);
            if let Some(line) = complete.lines().find(|line| line.starts_with(prefix)) {
                return Ok(line.to_owned());
            }
            if let Some(status) = self.child.as_mut().and_then(|c| c.try_wait().ok().flatten())
                && !self.output().lines().any(|line| line.starts_with(prefix))
            {
                bail!("ended with {status} before `{prefix}`:\n{}", self.output());
            }
            ensure!(Instant::now() < deadline, "no `{prefix}` in time:\n{}", self.output());
            std::thread::sleep(Duration::from_millis(5));
        }
    }

    /// Waits until it has printed something more than it had.
    ///
    /// # Errors
    /// It has ended with a failure, or takes too long.
    pub fn wait_for_progress(&mut self) -> Result<()> {
        let before = self.output().len();
        self.allow_some()?;
        self.wait_for_more_than(before)
    }

    /// Lets it make so many steps more at a pace that the test keeps itself, and waits until it has printed
    /// something.
    ///
    /// # Errors
    /// As [`Program::wait_for_progress`], and the pace cannot be changed.
    pub fn goes_on_by(&mut self, pace: &Pace, steps: usize) -> Result<()> {
        // What it had is looked at before it may go on: it may be fast.
        let before = self.output().len();
        pace.allow(steps)?;
        self.wait_for_more_than(before)
    }

    /// Lets it make so many steps more, if a pace holds it up.
    ///
    /// # Errors
    /// Its pace cannot be changed.
    pub fn allow(&self, steps: usize) -> Result<()> {
        self.pace.as_ref().map_or(Ok(()), |(pace, _)| pace.allow(steps))
    }

    pub(crate) fn allow_all(&self) -> Result<()> {
        self.pace.as_ref().map_or(Ok(()), |(pace, _)| pace.allow_all())
    }

    /// Allows as many steps as it makes between two lines.
    pub(crate) fn allow_some(&self) -> Result<()> {
        self.pace.as_ref().map_or(Ok(()), |(pace, steps)| pace.allow(steps.div_ceil(50)))
    }

    pub(crate) fn wait_for_more_than(&mut self, before: usize) -> Result<()> {
        let deadline = Instant::now() + PATIENCE;
        while self.output().len() == before {
            if let Some(Some(status)) = self.child.as_mut().map(Child::try_wait).transpose()? {
                ensure!(status.success(), "it ended with {status}");
                break;
            }
            ensure!(Instant::now() < deadline, "no progress:\n{}", self.output());
            std::thread::sleep(Duration::from_millis(5));
        }
        Ok(())
    }

    /// From here on its output alone tells how it fares: it is no child of this test any more, and
    /// goes on to its end.
    ///
    /// # Errors
    /// Its pace cannot be changed.
    pub fn let_go(&mut self) -> Result<()> {
        self.child = None;
        self.allow_all()
    }

    /// It goes on as this process, and its output is in this file from now on.
    pub fn goes_on_as(&mut self, pid: u32, log: PathBuf) {
        (self.pid, self.log) = (pid, log);
    }

    /// The process that this test has started: the program itself, or the restore that stands in for it.
    pub fn command_pid(&self) -> Option<u32> {
        self.child.as_ref().map(Child::id)
    }

    /// Whether it has not ended yet.
    pub fn is_running(&mut self) -> bool {
        self.child.as_mut().is_some_and(|child| matches!(child.try_wait(), Ok(None)))
    }

    /// Waits for its end.
    ///
    /// # Errors
    /// It was let go of, or prints nothing for a long time and does not end.
    pub fn wait(&mut self) -> Result<ExitStatus> {
        let mut printed = 0;
        let mut deadline = Instant::now() + PATIENCE;
        loop {
            let child = self.child.as_mut().context("it was started")?;
            if let Some(status) = child.try_wait()? {
                return Ok(status);
            }
            // However slow the machine: as long as there is progress.
            let now = std::fs::metadata(&self.log).map_or(0, |log| log.len());
            if now > printed {
                (printed, deadline) = (now, Instant::now() + PATIENCE);
            }
            if Instant::now() > deadline {
                bail!("it does not end:\n{}", self.output());
            }
            std::thread::sleep(Duration::from_millis(5));
        }
    }

    /// Waits for its end, which must be a good one, and gives the line with its result.
    ///
    /// # Errors
    /// It fails, takes too long, or has not printed just one result.
    pub fn result(&mut self) -> Result<String> {
        self.allow_all()?;
        let status = self.wait()?;
        let output = self.output();
        ensure!(status.success(), "it ended with {status}:\n{output}");
        let mut results = output.lines().filter(|line| line.starts_with("result "));
        let result = results.next().with_context(|| format!("no result:\n{output}"))?;
        ensure!(results.next().is_none(), "two results:\n{output}");
        Ok(result.to_owned())
    }

    /// The lines that belong to the computation: steps and the result.
    pub fn series(&self) -> Vec<String> {
        let wanted = |line: &&str| line.starts_with("step ") || line.starts_with("result ");
        self.output().lines().filter(wanted).map(str::to_owned).collect()
    }

    /// Kills the whole program and reaps it.
    pub fn kill(&mut self) {
        // The program's processes first: the foreground restore ends with them.
        kill_tree(self.pid);
        if let Some(child) = &mut self.child {
            let _ = child.kill();
            let _ = child.wait();
        }
    }
}

impl Drop for Program {
    fn drop(&mut self) {
        // One that was let go of is no child, and may be at work all the same.
        if self.is_running() || self.child.is_none() && writes_to(self.pid, &self.log) {
            self.kill();
        }
    }
}
