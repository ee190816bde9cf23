//! Commands and processes: where they are, how long they may take, and what they say.

use std::fs::File;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};
use std::time::{Duration, Instant};

use anyhow::{Result, ensure};

use crate::started::Started;

/// How long anything may take before a test gives up on it; machines are slow and shared.
pub(crate) const PATIENCE: Duration = Duration::from_secs(400);

/// A binary of this workspace, built next to the tests.
pub fn binary(name: &str) -> PathBuf {
    let tests = std::env::current_exe().expect("a test has a file");
    let path = tests
        .ancestors()
        // There cargo may have put a library as another package wants it.
        .filter(|dir| !dir.ends_with("deps"))
        .map(|dir| dir.join(name))
        .find(|path| path.is_file())
        .unwrap_or_else(|| panic!("{name} is not built: run `cargo xtask test`"));
    path.canonicalize().expect("it exists")
}

/// Lets a command be started in a session of its own, as a daemon has: CRIU cannot save one whose leader
/// is outside of the container in which the tests may run.
pub fn in_own_session(command: &mut Command) {
    // SAFETY: setsid is async-signal-safe.
    unsafe {
        command.pre_exec(|| {
            rustix::process::setsid()?;
            Ok(())
        });
    }
}

/// Waits until something is so.
///
/// # Errors
/// It is not so when the time is over.
pub fn until(what: &str, mut so: impl FnMut() -> bool) -> Result<()> {
    let deadline = Instant::now() + PATIENCE;
    while !so() {
        ensure!(Instant::now() < deadline, "not in time: {what}");
        std::thread::sleep(Duration::from_millis(5));
    }
    Ok(())
}

/// Whether there is a process of that pid, be it one that nobody has waited for.
pub fn exists(pid: u32) -> bool {
    Path::new(&format!("/proc/{pid}")).exists()
}

/// Runs a command to its end, which must come in time.
///
/// # Errors
/// It cannot be started, or takes too long and is killed.
pub fn finish(command: &mut Command) -> Result<Output> {
    let mut out = tempfile::tempfile()?;
    let mut err = tempfile::tempfile()?;
    let mut child = Started::spawn(command.stdout(out.try_clone()?).stderr(err.try_clone()?))?;
    let deadline = Instant::now() + PATIENCE;
    let status = loop {
        if let Some(status) = child.try_wait()? {
            break status;
        }
        ensure!(Instant::now() <= deadline, "{command:?} does not end");
        std::thread::sleep(Duration::from_millis(2));
    };
    let read = |file: &mut File| -> Result<Vec<u8>> {
        use std::io::{Read, Seek};
        let mut bytes = Vec::new();
        file.rewind()?;
        file.read_to_end(&mut bytes)?;
        Ok(bytes)
    };
    Ok(Output { status, stdout: read(&mut out)?, stderr: read(&mut err)? })
}

/// An output as a person would see it.
pub fn show(output: &Output) -> String {
    format!(
        "{}\n{}{}",
        output.status,
        String::from_utf8_lossy(&output.stdout),
        String::from_utf8_lossy(&output.stderr)
    )
}

/// One clear error: the exit code, these words, and no more than a few lines.
///
/// # Errors
/// It is not so; the error has what was printed.
pub fn refused(output: &Output, code: i32, words: &[&str]) -> Result<()> {
    ensure!(output.status.code() == Some(code), "{}", show(output));
    let message = String::from_utf8_lossy(&output.stderr);
    // Long lines are folded; words are looked for without regard to that.
    let flat = message.split_whitespace().filter(|word| *word != "│").collect::<Vec<_>>().join(" ");
    for word in words {
        ensure!(flat.contains(word), "no `{word}` in: {message}");
    }
    ensure!(message.lines().count() <= 12, "too much: {message}");
    ensure!(output.stdout.is_empty(), "on stdout: {}", show(output));
    Ok(())
}
