//! Processes that tests leave behind.
//!
//! Every process that a test starts inherits a mark in its environment, and keeps it when it is
//! restored from an image.

use std::path::Path;
use std::time::{Duration, Instant};

use anyhow::{Result, bail};

/// The variable with the mark.
pub(crate) const MARK: &str = "GPUCR_TEST_RUN";
/// How long what was told to end may take.
const PATIENCE: Duration = Duration::from_secs(60);

/// Waits until no process has this mark.
///
/// # Errors
/// Some still have it after a minute; the error names them and the tests that they are of. They run on.
pub(crate) fn none(mark: &str) -> Result<()> {
    none_within(mark, PATIENCE)
}

fn none_within(mark: &str, patience: Duration) -> Result<()> {
    let deadline = Instant::now() + patience;
    loop {
        let left = marked(mark);
        if left.is_empty() {
            return Ok(());
        }
        if Instant::now() >= deadline {
            bail!("the tests have left processes behind:\n{}", left.join("\n"));
        }
        std::thread::sleep(Duration::from_millis(100));
    }
}

/// A line for each process with this mark. One that has ended has none.
fn marked(mark: &str) -> Vec<String> {
    let entry = format!("{MARK}={mark}");
    let processes = std::fs::read_dir("/proc").into_iter().flatten().flatten();
    processes.filter_map(|process| told(&process.path(), &entry)).collect()
}

fn told(process: &Path, entry: &str) -> Option<String> {
    let read = |file: &str| {
        let bytes = std::fs::read(process.join(file)).ok()?;
        Some(String::from_utf8_lossy(&bytes).into_owned())
    };
    let pid: u32 = process.file_name()?.to_str()?.parse().ok()?;
    let environment = read("environ")?;
    environment.split('\0').find(|found| *found == entry)?;
    let test = environment.split('\0').find_map(|one| one.strip_prefix("NEXTEST_TEST_NAME="));
    let command = read("cmdline")?.replace('\0', " ");
    Some(format!("    {pid} {} (of {})", command.trim(), test.unwrap_or("a test")))
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::process::{Child, Command};

    struct Sleeper(Child);

    impl Drop for Sleeper {
        fn drop(&mut self) {
            let _ = self.0.kill();
            let _ = self.0.wait();
        }
    }

    #[test]
    fn a_process_that_is_left_behind_is_named() {
        let mark = format!("self-test-{}", std::process::id());
        none_within(&mark, Duration::ZERO).expect("nothing has this mark yet");
        let sleeper = Command::new("sleep").arg("1000").env(MARK, &mark).spawn();
        let sleeper = Sleeper(sleeper.expect("it starts"));
        // Until it has replaced itself its environment is that of this test.
        let deadline = Instant::now() + Duration::from_secs(60);
        let left = loop {
            match none_within(&mark, Duration::ZERO) {
                Err(left) => break left.to_string(),
                Ok(()) => assert!(Instant::now() < deadline, "it is not found"),
            }
        };
        assert!(left.contains(&format!(" {} ", sleeper.0.id())), "{left}");
        drop(sleeper);
        none_within(&mark, Duration::from_secs(60)).expect("it is gone");
    }
}
