//! Programs that `gpucr run` watches over.

use std::path::{Path, PathBuf};
use std::process::ExitStatus;

use anyhow::{Context, Result, ensure};

use crate::{Lab, Pace, Program, binary, undisturbed, until};

/// How many steps the workload makes.
pub const STEPS: [&str; 2] = ["--steps", "40"];
/// Where it is held.
const HALF: usize = 20;

/// A workload under a `gpucr run` that watches over it, held in the middle of its steps.
pub struct Watched {
    /// The `gpucr run`; its log has what the workload prints, too.
    pub run: Program,
    /// Holds the workload.
    pub pace: Pace,
    /// What it prints when nobody touches it.
    pub expected: Vec<String>,
    /// Where its images are.
    pub store: PathBuf,
}

impl Watched {
    /// `options` are those of `gpucr run`; `environment` is the workload's.
    ///
    /// # Errors
    /// It cannot be started, or makes no step in time.
    pub fn held(lab: &Lab, options: &[&str], environment: &[(&str, &str)]) -> Result<Self> {
        Self::of(lab, &[], options, environment)
    }

    /// The same with a command in front of the workload's.
    ///
    /// # Errors
    /// As [`Watched::held`].
    pub fn of(
        lab: &Lab,
        front: &[&str],
        options: &[&str],
        environment: &[(&str, &str)],
    ) -> Result<Self> {
        let expected = undisturbed("sgd", &STEPS)?;
        let pace = Pace::new()?;
        pace.allow(HALF)?;
        let mut command = lab.gpucr();
        command.args(["run", "--device", "soft", "--store", "store"]).args(options);
        command.args(["--", "env"]).args(environment.iter().map(|(k, v)| format!("{k}={v}")));
        command.args(front).arg(binary("workload")).arg("sgd").args(STEPS);
        command.args(["--pace", pace.file()]);
        let run = lab.spawn(command, "log")?;
        let mut watched = Self { run, pace, expected, store: lab.path("store") };
        watched.run.wait_for("step ")?;
        Ok(watched)
    }

    /// The process of the workload.
    ///
    /// # Errors
    /// It has not said it.
    pub fn pid(&self) -> Result<u32> {
        let output = self.run.output();
        let pid = output.lines().find_map(|line| line.strip_prefix("ready pid="));
        Ok(pid.context("it says its pid")?.parse()?)
    }

    /// The images that there are.
    pub fn images(&self) -> Vec<PathBuf> {
        images(&self.store)
    }

    /// Waits for so many images.
    ///
    /// # Errors
    /// They do not come in time.
    pub fn wait_for_images(&self, count: usize) -> Result<()> {
        until(&format!("{count} images: {}", self.run.output()), || self.images().len() >= count)
    }

    /// Waits until the workload is restored after a failure.
    ///
    /// # Errors
    /// It is not in time.
    pub fn waits_for_restore(&mut self) -> Result<()> {
        self.run.wait_for("gpucr: the program has failed").map(drop)
    }

    /// Waits for the end. What the workload has printed is what it prints when nobody touches it; after each restore it
    /// goes on at an earlier step.
    ///
    /// # Errors
    /// It is not so; the error has what was printed.
    pub fn comes_out_right(&mut self) -> Result<()> {
        self.pace.allow_all()?;
        let status = self.run.wait()?;
        let output = self.run.output();
        ensure!(status.success(), "it ended with {status}:\n{output}");
        let mut at = 0;
        for line in self.run.series() {
            let place = self.expected.iter().position(|expected| *expected == line);
            let place = place.with_context(|| format!("unexpected: {line}\n{output}"))?;
            ensure!(place <= at, "left out before {line}:\n{output}");
            at = place + 1;
        }
        ensure!(at == self.expected.len(), "it has no end:\n{output}");
        Ok(())
    }

    /// Lets it go on to its end.
    ///
    /// # Errors
    /// It does not end in time.
    pub fn ends(&mut self) -> Result<ExitStatus> {
        self.pace.allow_all()?;
        self.run.wait()
    }
}

/// The images of a store, those that are complete.
pub fn images(store: &Path) -> Vec<PathBuf> {
    let entries = std::fs::read_dir(store.join("images")).into_iter().flatten().flatten();
    let names = entries.filter(|entry| !entry.file_name().to_string_lossy().starts_with('.'));
    let mut images: Vec<PathBuf> = names.map(|entry| entry.path()).collect();
    images.sort();
    images
}

/// Sends a signal to a process of a test.
///
/// # Errors
/// There is no such process.
pub fn signal(pid: u32, signal: i32) -> Result<()> {
    // SAFETY: sends a signal to a process of this test.
    let result = unsafe { libc::kill(pid as i32, signal) };
    ensure!(result == 0, "{}", std::io::Error::last_os_error());
    Ok(())
}
