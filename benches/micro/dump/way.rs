//! What each way of saving a program is given, and what it comes to.

use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::Instant;

use anyhow::{Context, Result, ensure};

use crate::memory::{self, Peak};

/// What is started, and where everything lies.
#[derive(Clone)]
pub(crate) struct Setup {
    pub(crate) gpucr: PathBuf,
    pub(crate) holder: PathBuf,
    pub(crate) driver: PathBuf,
    pub(crate) size: u64,
    pub(crate) dir: PathBuf,
}

/// What one run of one way came to; times in milliseconds, sizes in bytes.
#[derive(Default)]
pub(crate) struct Run {
    pub(crate) stopped: f64,
    pub(crate) total: f64,
    /// From the start of the restore to the program's next step.
    pub(crate) restore: f64,
    pub(crate) stored: u64,
    /// Phases of the dump and of the restore.
    pub(crate) phases: Vec<(String, f64)>,
}

pub(crate) fn milliseconds(since: Instant) -> f64 {
    since.elapsed().as_secs_f64() * 1e3
}

/// Bytes of all files below a directory.
pub(crate) fn bytes_below(dir: &Path) -> Result<u64> {
    let mut bytes = 0;
    for entry in std::fs::read_dir(dir)? {
        let entry = entry?;
        let meta = entry.metadata()?;
        // What is on the file system, as holes cost nothing.
        bytes += if meta.is_dir() { bytes_below(&entry.path())? } else { meta.blocks() * 512 };
    }
    Ok(bytes)
}

/// Runs gpucr with `--json` and watches its memory.
pub(crate) fn gpucr(command: &mut Command, setup: &Setup) -> Result<(serde_json::Value, Peak)> {
    let (out, err) = (setup.dir.join("gpucr.out"), setup.dir.join("gpucr.err"));
    let mut child = command
        .stdin(Stdio::null())
        .stdout(std::fs::File::create(&out)?)
        .stderr(std::fs::File::create(&err)?)
        .spawn()
        .context("gpucr starts")?;
    let mut peak = Peak::default();
    let status = loop {
        if let Some(status) = child.try_wait()? {
            break status;
        }
        peak.look(child.id());
        std::thread::sleep(memory::EVERY);
    };
    ensure!(status.success(), "gpucr: {status}\n{}", std::fs::read_to_string(&err)?);
    Ok((serde_json::from_slice(&std::fs::read(&out)?)?, peak))
}
