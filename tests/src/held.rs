//! Dumps that wait for the test at the edge of a phase.

use std::fs::File;
use std::path::PathBuf;
use std::process::Child;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};

use crate::{Lab, PATIENCE, Program};

/// A dump that is held up when it enters a phase.
#[derive(Debug)]
pub struct HeldDump {
    child: Child,
    log: PathBuf,
    report: PathBuf,
    go: PathBuf,
}

impl HeldDump {
    /// Starts a dump to `image` and waits until it has come to the phase at which the first of the
    /// `faults` holds it up.
    pub fn start(lab: &Lab, program: &Program, args: &[&str], faults: &str) -> Result<Self> {
        let path = |name: &str| lab.path(name);
        let (log, report, go) = (path("dump.log"), path("dump.json"), path("go"));
        let child = lab
            .gpucr()
            .args(["dump", "--json", "-o", "image", "--pid", &program.pid.to_string()])
            .args(args)
            .env("GPUCR_LOG", "gpucr_core=debug")
            .env("NO_COLOR", "1")
            .env("GPUCR_FAULT", faults)
            .env("GPUCR_FAULT_FILE", &go)
            .stdout(File::create(&report)?)
            .stderr(File::create(&log)?)
            .spawn()?;
        let deadline = Instant::now() + PATIENCE;
        let held = faults.split(',').next().and_then(|fault| fault.strip_prefix("hold:"));
        let entered = format!("phase=\"{}\"", held.context("it is held somewhere")?);
        while !std::fs::read_to_string(&log)?.contains(&entered) {
            ensure!(Instant::now() < deadline, "{}", std::fs::read_to_string(&log)?);
            std::thread::sleep(Duration::from_millis(2));
        }
        Ok(Self { child, log, report, go })
    }

    /// Lets it go on, and gives its report.
    pub fn finish(mut self) -> Result<serde_json::Value> {
        std::fs::write(&self.go, "")?;
        ensure!(self.child.wait()?.success(), "{}", std::fs::read_to_string(&self.log)?);
        Ok(serde_json::from_slice(&std::fs::read(&self.report)?)?)
    }
}
