//! Programs whose standard streams are pipes, or a terminal.

use std::fs::File;
use std::io::{PipeWriter, Read, Write};
use std::os::fd::OwnedFd;
use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::Command;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::JoinHandle;
use std::time::Duration;

use anyhow::{Context, Result};

use crate::command::{binary, in_own_session, until};
use crate::lab::Lab;
use crate::program::Program;

/// The other ends of a program's pipes: who writes its input, and who reads its output.
pub struct Pipes {
    /// To its standard input, until that is closed.
    pub input: Option<PipeWriter>,
    reading: JoinHandle<std::io::Result<()>>,
    /// Whoever reads its output does not, for the moment.
    is_idle: Arc<AtomicBool>,
}

impl Pipes {
    /// A command with pipes as standard input and output; what it writes comes to this file. Both other ends have to be
    /// dropped when the command was started: with the command.
    fn new(command: &mut Command, log: &Path) -> Result<Self> {
        let (input, to_program) = std::io::pipe()?;
        let (from_program, output) = std::io::pipe()?;
        command.stdin(input).stdout(output);
        Self::reading(OwnedFd::from(from_program).into(), Some(to_program), log)
    }

    fn reading(from: File, input: Option<PipeWriter>, log: &Path) -> Result<Self> {
        let file = File::create(log)?;
        let is_idle = Arc::new(AtomicBool::new(false));
        let idle = is_idle.clone();
        let reading = std::thread::spawn(move || pass_on(from, file, &idle));
        Ok(Self { input, reading, is_idle })
    }

    /// A command whose terminal, and all of whose standard streams, are a new one, of a session of its own.
    fn terminal(command: &mut Command, log: &Path) -> Result<Self> {
        use rustix::fs::{Mode, OFlags};
        use rustix::pty::{OpenptFlags, grantpt, openpt, ptsname, unlockpt};
        let control = openpt(OpenptFlags::RDWR | OpenptFlags::NOCTTY | OpenptFlags::CLOEXEC)?;
        grantpt(&control)?;
        unlockpt(&control)?;
        let flags = OFlags::RDWR | OFlags::NOCTTY | OFlags::CLOEXEC;
        let terminal = rustix::fs::open(ptsname(&control, Vec::new())?, flags, Mode::empty())?;
        command.stdin(terminal.try_clone()?).stdout(terminal.try_clone()?).stderr(terminal);
        // SAFETY: ioctl is async-signal-safe. It comes after the session was made.
        unsafe {
            command.pre_exec(|| match libc::ioctl(0, libc::TIOCSCTTY, 0) {
                -1 => Err(std::io::Error::last_os_error()),
                _ => Ok(()),
            });
        }
        Self::reading(control.into(), None, log)
    }

    /// Whoever reads the output does so no more, or goes on.
    pub fn set_idle(&self, is_idle: bool) {
        self.is_idle.store(is_idle, Ordering::SeqCst);
    }

    /// Writes to the program's input.
    ///
    /// # Errors
    /// Nobody reads it.
    pub fn say(&mut self, text: &str) -> Result<()> {
        Ok(self.input.as_mut().context("it is open")?.write_all(text.as_bytes())?)
    }

    /// Whether the reader of the output has come to its end.
    pub fn has_ended(&self) -> bool {
        self.reading.is_finished()
    }

    /// Waits for that.
    ///
    /// # Errors
    /// It takes too long, or the output cannot be read.
    pub fn end(self) -> Result<()> {
        drop(self.input);
        until("the output ends", || self.reading.is_finished())?;
        Ok(self.reading.join().expect("no panic")?)
    }
}

fn pass_on(mut from: File, mut to: File, is_idle: &AtomicBool) -> std::io::Result<()> {
    let mut part = vec![0; 4096];
    loop {
        while is_idle.load(Ordering::SeqCst) {
            std::thread::sleep(Duration::from_millis(5));
        }
        match from.read(&mut part) {
            Ok(0) => return Ok(()),
            // So a terminal ends.
            Err(error) if error.raw_os_error() == Some(libc::EIO) => return Ok(()),
            read => to.write_all(&part[..read?])?,
        }
    }
}

impl Lab {
    /// Starts a workload with pipes as standard input and output, and waits until it has done its first step. What it
    /// writes comes to `log`.
    ///
    /// # Errors
    /// As [`Lab::at_work`].
    pub fn at_work_in_pipes(&self, name: &str, args: &[&str]) -> Result<(Program, Pipes)> {
        let (args, pace) = self.pace(&[&[name], args].concat())?;
        let mut command = self.gpucr();
        command.args(["run", "--device", "soft", "--"]).arg(binary("workload")).args(args);
        let (mut program, pipes) = self.spawn_in_pipes(command)?;
        program.pace = pace;
        program.wait_for("step ")?;
        Ok((program, pipes))
    }

    /// The same with a shell that does this; `$0` is the workload, and `$1` and what follows is how it is to be started.
    ///
    /// # Errors
    /// As [`Lab::at_work`].
    pub fn shell_in_pipes(&self, shell: &str, args: &[&str]) -> Result<(Program, Pipes)> {
        let (args, pace) = self.pace(args)?;
        let (mut program, pipes) = self.spawn_in_pipes(self.shell(shell, &args))?;
        program.pace = pace;
        program.wait_for("step ")?;
        Ok((program, pipes))
    }

    /// The same with a terminal.
    ///
    /// # Errors
    /// As [`Lab::at_work`].
    pub fn at_work_at_terminal(&self, name: &str, args: &[&str]) -> Result<(Program, Pipes)> {
        let (args, pace) = self.pace(&[&[name], args].concat())?;
        let mut command = self.gpucr();
        command.args(["run", "--device", "soft", "--"]).arg(binary("workload")).args(args);
        let (mut program, pipes) = self.spawn_at_terminal(command, None)?;
        program.pace = pace;
        program.wait_for("step ")?;
        Ok((program, pipes))
    }

    /// The same with a shell that does this, as by [`Lab::shell_in_pipes`], and with `errors` as standard error.
    ///
    /// # Errors
    /// As [`Lab::at_work`].
    pub fn shell_at_terminal(
        &self,
        shell: &str,
        args: &[&str],
        errors: OwnedFd,
    ) -> Result<(Program, Pipes)> {
        let (args, pace) = self.pace(args)?;
        let (mut program, pipes) =
            self.spawn_at_terminal(self.shell(shell, &args), Some(errors))?;
        program.pace = pace;
        program.wait_for("step ")?;
        Ok((program, pipes))
    }

    fn shell(&self, shell: &str, args: &[String]) -> Command {
        let mut command = self.gpucr();
        command.args(["run", "--device", "soft", "--", "sh", "-c", shell]);
        command.arg(binary("workload")).args(args);
        command
    }

    fn spawn_at_terminal(
        &self,
        mut command: Command,
        errors: Option<OwnedFd>,
    ) -> Result<(Program, Pipes)> {
        in_own_session(&mut command);
        let log = self.path("log");
        let pipes = Pipes::terminal(&mut command, &log)?;
        if let Some(errors) = errors {
            command.stderr(errors);
        }
        let child = command.spawn().context("the program starts")?;
        // The test's own ends of the terminal are closed with the command.
        Ok((Program { pid: child.id(), child: Some(child), log, pace: None }, pipes))
    }

    fn spawn_in_pipes(&self, mut command: Command) -> Result<(Program, Pipes)> {
        let log = self.path("log");
        let pipes = Pipes::new(&mut command, &log)?;
        command.stderr(File::create(self.path("errors"))?);
        in_own_session(&mut command);
        let child = command.spawn().context("the program starts")?;
        Ok((Program { pid: child.id(), child: Some(child), log, pace: None }, pipes))
    }
}
