//! Commands that a user has run before a program is stopped, and before it goes on.

use std::ffi::OsStr;
use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::{Command, Stdio};
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use crate::engine::error::Error;

/// How often it is checked whether the command has ended.
const POLL: Duration = Duration::from_millis(2);

/// Runs `command` in a shell and waits for it. What it prints goes to stderr. It gets the pid of the
/// program's root in `GPUCR_PID`, and the image, if there is one here, in `GPUCR_IMAGE`.
///
/// # Errors
/// The command cannot be started or fails; or `stop` is set, which ends it and whatever it has started in its
/// process group.
pub(super) fn run(
    command: &OsStr,
    image: Option<&Path>,
    pid: u32,
    stop: &AtomicBool,
) -> Result<(), Error> {
    let failed = |how: String| Error::Hook { command: command.to_string_lossy().into_owned(), how };
    let mut child = Command::new("/bin/sh")
        .arg("-c")
        .arg(command)
        .env("GPUCR_PID", pid.to_string())
        .env_remove("GPUCR_IMAGE")
        .envs(image.map(|image| ("GPUCR_IMAGE", image)))
        .stdin(Stdio::null())
        .stdout(std::io::stderr())
        .process_group(0)
        .spawn()
        .map_err(|error| failed(error.to_string()))?;
    loop {
        match child.try_wait() {
            Ok(Some(status)) if status.success() => return Ok(()),
            Ok(Some(status)) => return Err(failed(status.to_string())),
            Ok(None) => {}
            Err(error) => return Err(failed(error.to_string())),
        }
        if stop.load(Ordering::Relaxed) {
            if let Some(group) = rustix::process::Pid::from_raw(child.id() as i32) {
                let _ = rustix::process::kill_process_group(group, rustix::process::Signal::KILL);
            }
            let _ = child.wait();
            return Err(Error::Interrupted);
        }
        std::thread::sleep(POLL);
    }
}
