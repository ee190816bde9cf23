//! The program that is dumped and restored.

use std::os::unix::process::CommandExt;
use std::path::PathBuf;
use std::process::{Child, Command, Stdio};
use std::sync::mpsc::{Receiver, channel};
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};

use crate::way::{Setup, milliseconds};

/// How long anything may take.
const PATIENCE: Duration = Duration::from_secs(300);

/// A program that holds device memory; killed on drop, in its first life or a later one.
pub(crate) struct Program {
    child: Child,
    log: PathBuf,
}

impl Program {
    /// Starts the holder by `command`, to which its arguments are added, and waits until it has
    /// made its memory and goes on in steps, which change `written` bytes more.
    pub(crate) fn start(mut command: Command, setup: &Setup, written: u64) -> Result<Self> {
        let (log, end) = (setup.dir.join("log"), setup.dir.join("end"));
        if end.exists() {
            std::fs::remove_file(&end)?;
        }
        let file = std::fs::File::create(&log)?;
        command
            .arg(setup.size.to_string())
            .arg(&end)
            .arg(written.to_string())
            .env("SOFTCUDA_MEMORY", format!("{}M", (setup.size >> 20) + 1024))
            .stdin(Stdio::null())
            .stdout(file.try_clone()?)
            .stderr(file);
        // SAFETY: setsid is async-signal-safe. A session of its own, as a daemon has.
        unsafe {
            command.pre_exec(|| {
                rustix::process::setsid()?;
                Ok(())
            });
        }
        let mut program = Self { child: command.spawn().context("the program starts")?, log };
        let deadline = Instant::now() + PATIENCE;
        while !program.output().contains("step ") {
            if let Some(status) = program.child.try_wait()? {
                ensure!(false, "it ended with {status}:\n{}", program.output());
            }
            ensure!(Instant::now() < deadline, "it does not get ready:\n{}", program.output());
            thread::sleep(Duration::from_millis(5));
        }
        Ok(program)
    }

    pub(crate) fn pid(&self) -> u32 {
        self.child.id()
    }

    /// What it has printed.
    pub(crate) fn output(&self) -> String {
        std::fs::read_to_string(&self.log).unwrap_or_default()
    }

    /// After the dump: waits for its end, so that its pid is free.
    pub(crate) fn ended(&mut self) -> Result<()> {
        self.child.wait()?;
        Ok(())
    }

    /// Watches, from another thread, for the first step of its next life.
    pub(crate) fn next_step(&self, before: usize, start: Instant) -> NextStep {
        let (log, (send, receive)) = (self.log.clone(), channel());
        thread::spawn(move || {
            let longer = || std::fs::metadata(&log).is_ok_and(|meta| meta.len() > before as u64);
            while start.elapsed() < PATIENCE {
                if longer() {
                    // Nobody to tell when the restore has failed.
                    let _ = send.send(milliseconds(start));
                    return;
                }
                thread::sleep(Duration::from_millis(1));
            }
        });
        NextStep(receive)
    }

    /// Lets it compare all of its memory and end.
    pub(crate) fn finish(self, setup: &Setup) -> Result<()> {
        std::fs::write(setup.dir.join("end"), b"")?;
        let deadline = Instant::now() + PATIENCE;
        while !self.output().contains("result ok") {
            ensure!(Instant::now() < deadline, "no result:\n{}", self.output());
            let error = self.output().lines().any(|line| line.starts_with("Error"));
            ensure!(!error, "it failed:\n{}", self.output());
            thread::sleep(Duration::from_millis(5));
        }
        Ok(())
    }
}

impl Drop for Program {
    fn drop(&mut self) {
        // Whichever life it is in, it goes by this pid, unless it has ended; pids are not used
        // again so quickly.
        if let Some(pid) = rustix::process::Pid::from_raw(self.child.id() as i32) {
            let _ = rustix::process::kill_process(pid, rustix::process::Signal::KILL);
        }
        let _ = self.child.wait();
    }
}

/// When the program goes on.
pub(crate) struct NextStep(Receiver<f64>);

impl NextStep {
    /// Milliseconds from the start of the restore.
    pub(crate) fn wait(self) -> Result<f64> {
        self.0.recv().context("the restored program does not go on")
    }
}
