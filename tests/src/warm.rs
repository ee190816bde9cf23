//! Processes that keep images warm.

use anyhow::{Context, Result, ensure};
use serde_json::Value;

use crate::{Lab, finish, show, until};

/// Runs gpucr, which must succeed, and reads the JSON that it prints.
///
/// # Errors
/// gpucr fails, takes too long, or prints no JSON.
pub fn json(lab: &Lab, args: &[&str]) -> Result<Value> {
    let output = lab.run(args)?;
    ensure!(output.status.success(), "{args:?}: {}", show(&output));
    Ok(serde_json::from_slice(&output.stdout)?)
}

/// A process that holds a warm image; it ends with the test, if not before.
#[derive(Debug)]
pub struct Holder {
    /// Its pid.
    pub pid: u32,
    /// Identity of the image.
    pub id: String,
}

impl Holder {
    /// Sends it a signal.
    pub fn signal(&self, signal: i32) {
        // SAFETY: sends a signal; a pid that is gone by now is an error that changes nothing.
        unsafe { libc::kill(self.pid as i32, signal) };
    }

    /// Whether `gpucr warm --list` names it.
    ///
    /// # Errors
    /// The list cannot be had.
    pub fn is_listed(&self, lab: &Lab) -> Result<bool> {
        Ok(kept(lab, &self.id)?.is_some())
    }

    /// Waits until the process has ended, and with it its hold on the memory.
    ///
    /// # Errors
    /// It has not ended in time.
    pub fn wait_for_end(&self) -> Result<()> {
        let state = || std::fs::read_to_string(format!("/proc/{}/stat", self.pid));
        // One that nobody has waited for yet holds nothing any more.
        until("the holder ends", || !state().is_ok_and(|stat| !stat.contains(") Z ")))
    }
}

impl Drop for Holder {
    fn drop(&mut self) {
        self.signal(libc::SIGKILL);
    }
}

/// Keeps the image `image` of the lab warm, and pinned.
///
/// # Errors
/// gpucr fails, the image was warm before, or its memory is not pinned.
pub fn warm(lab: &Lab, image: &str) -> Result<Holder> {
    let (holder, report) = warm_with(lab, &[image], &[])?;
    ensure!(report["pinned"] == true && report["unpinned"].is_null(), "{report}");
    Ok(holder)
}

/// Makes an image warm with these arguments and variables. Gives the report too.
///
/// # Errors
/// gpucr fails, or the image was warm before.
pub fn warm_with(lab: &Lab, args: &[&str], env: &[(&str, &str)]) -> Result<(Holder, Value)> {
    let mut command = lab.gpucr();
    command.args(["warm", "--json"]).args(args).envs(env.iter().copied());
    let output = finish(&mut command)?;
    ensure!(output.status.success(), "{}", show(&output));
    let report: Value = serde_json::from_slice(&output.stdout)?;
    ensure!(report["already"] == false && report["bytes"].as_u64() > Some(4096), "{report}");
    let pid = report["pid"].as_u64().context("a pid")? as u32;
    let id = report["id"].as_str().context("an identity")?.to_owned();
    Ok((Holder { pid, id }, report))
}

/// What `gpucr warm --list` says of an image.
///
/// # Errors
/// gpucr takes too long, or prints no list.
pub fn kept(lab: &Lab, id: &str) -> Result<Option<Value>> {
    // Holders of other tests may come and go meanwhile, which the exit code tells.
    let output = lab.run(["warm", "--list", "--json"])?;
    let listing: Value = serde_json::from_slice(&output.stdout)?;
    let kept = listing["kept"].as_array().context("a list")?;
    Ok(kept.iter().find(|kept| kept["id"] == id).cloned())
}
