//! Dumps and restores that wait for the test at the edge of a phase, or in the middle of one.

use std::ffi::OsStr;
use std::fs::File;
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};
use std::process::Output;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};

use crate::command::{PATIENCE, until};
use crate::lab::Lab;
use crate::program::Program;
use crate::started::Started;

/// A dump that is held up when it enters a phase.
#[derive(Debug)]
pub struct PausedDump {
    child: Started,
    log: PathBuf,
    report: PathBuf,
    go: PathBuf,
}

impl PausedDump {
    /// Starts a dump to `image` and waits until it has come to the phase at which the first of the
    /// `faults` holds it up.
    ///
    /// # Errors
    /// The dump cannot be started, or does not come to that phase in time.
    pub fn start(lab: &Lab, program: &Program, args: &[&str], faults: &str) -> Result<Self> {
        Self::start_with(lab, program, args, &[], faults)
    }

    /// Starts a dump with more in its environment.
    ///
    /// # Errors
    /// The dump cannot be started, or does not come to that phase in time.
    pub fn start_with(
        lab: &Lab,
        program: &Program,
        args: &[&str],
        environment: &[(&str, &str)],
        faults: &str,
    ) -> Result<Self> {
        let path = |name: &str| lab.path(name);
        let (log, report, go) = (path("dump.log"), path("dump.json"), path("go"));
        let mut command = lab.gpucr();
        command
            .args(["dump", "--json", "-o", "image", "--pid", &program.pid.to_string()])
            .args(args)
            .env("GPUCR_LOG", "gpucr_core=debug")
            .env("NO_COLOR", "1")
            .env("GPUCR_FAULT", faults)
            .env("GPUCR_FAULT_FILE", &go)
            .envs(environment.iter().copied())
            .stdout(File::create(&report)?)
            .stderr(File::create(&log)?);
        let child = Started::spawn(&mut command)?;
        let held = faults.split(',').next().and_then(|fault| fault.strip_prefix("hold:"));
        let entered = format!("phase=\"{}\"", held.context("it is held somewhere")?);
        wait_for(&log, &entered)?;
        Ok(Self { child, log, report, go })
    }

    /// The pid of gpucr.
    pub fn pid(&self) -> u32 {
        self.child.id()
    }

    /// Lets it go on until it comes to a later phase, at which a fault holds it up too. What lies between takes long
    /// enough that it is told to stop there before it arrives.
    ///
    /// # Errors
    /// It does not come there in time, or the file that holds it up cannot be written or removed.
    pub fn on_to(&self, phase: &str) -> Result<()> {
        let log = || std::fs::read_to_string(&self.log).unwrap_or_default();
        // What it says at the begin of a phase, and of each pass of the pre-copy.
        let said = || log().matches("phase=").count() + log().matches("pre-copy").count();
        let before = said();
        std::fs::write(&self.go, "")?;
        until("it goes on", || said() > before).with_context(log)?;
        std::fs::remove_file(&self.go)?;
        wait_for(&self.log, &format!("phase=\"{phase}\""))
    }

    /// Lets it go on, and waits until its log has the text.
    ///
    /// # Errors
    /// The text does not come in time, or the file that holds it up cannot be written.
    pub fn on_until(&self, text: &str) -> Result<()> {
        std::fs::write(&self.go, "")?;
        wait_for(&self.log, text)
    }

    /// Lets it go on to its end, whatever that is.
    ///
    /// # Errors
    /// It cannot be waited for, or what it wrote cannot be read or removed.
    pub fn end(self) -> Result<Output> {
        end(self.child, &self.go, &self.report, &self.log)
    }

    /// Lets it go on; it must fail. Gives what it says.
    ///
    /// # Errors
    /// It succeeds, or ends with another status than 1.
    pub fn fails(mut self) -> Result<String> {
        std::fs::write(&self.go, "")?;
        let status = self.child.wait()?;
        let said = std::fs::read_to_string(&self.log)?;
        ensure!(status.code() == Some(1), "{status}: {said}");
        Ok(said)
    }

    /// Lets it go on, and gives its report.
    ///
    /// # Errors
    /// It fails; the error has what it says. Or its report cannot be read.
    pub fn finish(mut self) -> Result<serde_json::Value> {
        std::fs::write(&self.go, "")?;
        ensure!(self.child.wait()?.success(), "{}", std::fs::read_to_string(&self.log)?);
        Ok(serde_json::from_slice(&std::fs::read(&self.report)?)?)
    }
}

/// A restore of `image` that is held up.
#[derive(Debug)]
pub struct PausedRestore {
    child: Started,
    log: PathBuf,
    out: PathBuf,
    go: PathBuf,
}

impl PausedRestore {
    /// Starts it with these arguments and variables, and waits until its log has the text, which it has not
    /// before it comes to where the first of the `faults` holds it up.
    ///
    /// # Errors
    /// The restore cannot be started, or the text does not come in time.
    pub fn start(
        lab: &Lab,
        args: &[&str],
        environment: &[(&str, &str)],
        faults: &str,
        text: &str,
    ) -> Result<Self> {
        let (log, out, go) = (lab.path("restore.log"), lab.path("restore.out"), lab.path("go"));
        let mut command = lab.gpucr();
        command
            .arg("restore")
            .args(args)
            .arg("image")
            .env("GPUCR_LOG", "gpucr_core=debug")
            .env("NO_COLOR", "1")
            .env("GPUCR_FAULT", faults)
            .env("GPUCR_FAULT_FILE", &go)
            .envs(environment.iter().copied())
            .stdout(File::create(&out)?)
            .stderr(File::create(&log)?);
        let child = Started::spawn(&mut command)?;
        wait_for(&log, text)?;
        Ok(Self { child, log, out, go })
    }

    /// The pid of gpucr.
    pub fn pid(&self) -> u32 {
        self.child.id()
    }

    /// Lets it go on to its end, whatever that is. Its files are gone then.
    ///
    /// # Errors
    /// It cannot be waited for, or what it wrote cannot be read or removed.
    pub fn end(self) -> Result<Output> {
        end(self.child, &self.go, &self.out, &self.log)
    }
}

fn wait_for(log: &Path, text: &str) -> Result<()> {
    let deadline = Instant::now() + PATIENCE;
    while !std::fs::read_to_string(log)?.contains(text) {
        ensure!(Instant::now() < deadline, "no `{text}` in {}", std::fs::read_to_string(log)?);
        std::thread::sleep(Duration::from_millis(2));
    }
    Ok(())
}

fn end(mut child: Started, go: &Path, out: &Path, log: &Path) -> Result<Output> {
    std::fs::write(go, "")?;
    let status = child.wait()?;
    let output = Output { status, stdout: std::fs::read(out)?, stderr: std::fs::read(log)? };
    for file in [go, out, log] {
        std::fs::remove_file(file)?;
    }
    Ok(output)
}

/// The child of a process that has this name, or whose command line begins with it.
///
/// # Errors
/// The process has ended, or has no such child.
pub fn child_named(parent: u32, name: &str) -> Result<u32> {
    let is_meant = |pid: &u32| {
        let own = std::fs::read_to_string(format!("/proc/{pid}/comm")).unwrap_or_default();
        if own.trim_end() == name {
            return true;
        }
        let command = std::fs::read(format!("/proc/{pid}/cmdline")).unwrap_or_default();
        let first = command.split(|byte| *byte == 0).next().unwrap_or_default();
        Path::new(OsStr::from_bytes(first)).file_name() == Some(OsStr::new(name))
    };
    for task in std::fs::read_dir(format!("/proc/{parent}/task"))? {
        let children = std::fs::read_to_string(task?.path().join("children")).unwrap_or_default();
        let mut children = children.split_whitespace().filter_map(|pid| pid.parse().ok());
        if let Some(found) = children.find(is_meant) {
            return Ok(found);
        }
    }
    bail!("process {parent} has no child {name}")
}

/// Kills a process, and waits until it has ended.
///
/// # Errors
/// There is no such process, or it does not end in time.
pub fn kill(pid: u32) -> Result<()> {
    let process = rustix::process::Pid::from_raw(pid as i32).context("a pid")?;
    rustix::process::kill_process(process, rustix::process::Signal::KILL)?;
    // Nobody may have waited for it yet.
    until("it has ended", || {
        let stat = std::fs::read_to_string(format!("/proc/{pid}/stat"));
        stat.map_or(true, |stat| stat.rsplit(") ").next().is_some_and(|rest| rest.starts_with('Z')))
    })
}
