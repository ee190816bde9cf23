//! A second process of a workload, which the first one tells what to do, line by line.

use std::fmt::Display;
use std::io::{BufRead, BufReader, Lines, Read, Write};
use std::os::unix::net::UnixStream;
use std::os::unix::process::ExitStatusExt as _;
use std::process::{Child, Command, ExitStatus, Stdio};

use anyhow::{Context as _, Result, ensure};

use crate::cuda::{Lookup, lookup};

/// The second process, with both ends of the conversation.
pub(crate) struct Second {
    process: Process,
    orders: Box<dyn Write>,
    answers: Lines<BufReader<Box<dyn Read>>>,
}

enum Process {
    Started(Child),
    Forked(libc::pid_t),
}

impl Second {
    /// Starts this program once more, as the workload `name`, with `given` in the variable `variable`.
    pub(crate) fn start(name: &str, variable: &str, given: &str) -> Result<Self> {
        let mut command = Command::new(std::env::current_exe()?);
        command.arg(name).env(variable, given);
        if lookup() == Lookup::GetProcAddress {
            command.arg("--get-proc-address");
        }
        let mut child = command.stdin(Stdio::piped()).stdout(Stdio::piped()).spawn()?;
        let orders = child.stdin.take().context("the pipe is there")?;
        let answers = child.stdout.take().context("the pipe is there")?;
        Ok(Self::talking(Process::Started(child), Box::new(orders), Box::new(answers)))
    }

    /// Forks this process. The second one does this work, by what it is told and with what it answers on, and ends.
    ///
    /// # Safety
    /// This process has one thread.
    pub(crate) unsafe fn fork(
        work: impl FnOnce(UnixStream, UnixStream) -> Result<()>,
    ) -> Result<Self> {
        let (here, there) = UnixStream::pair()?;
        // SAFETY: as the caller says, no other thread holds anything that the child might wait for.
        let pid = unsafe { libc::fork() };
        if pid == 0 {
            drop(here);
            let ended = there.try_clone().map_err(Into::into).and_then(|said| work(there, said));
            if let Err(error) = &ended {
                eprintln!("error: a forked process: {error:#}");
            }
            // Not what the parent has to do at its end.
            // SAFETY: takes a number.
            unsafe { libc::_exit(i32::from(ended.is_err())) };
        }
        ensure!(pid > 0, "fork: {}", std::io::Error::last_os_error());
        let orders = Box::new(here.try_clone()?);
        Ok(Self::talking(Process::Forked(pid), orders, Box::new(here)))
    }

    fn talking(process: Process, orders: Box<dyn Write>, answers: Box<dyn Read>) -> Self {
        Self { process, orders, answers: BufReader::new(answers).lines() }
    }

    pub(crate) fn pid(&self) -> u32 {
        match &self.process {
            Process::Started(child) => child.id(),
            Process::Forked(pid) => *pid as u32,
        }
    }

    /// Says a line to it.
    pub(crate) fn tell(&mut self, line: impl Display) -> Result<()> {
        Ok(writeln!(self.orders, "{line}")?)
    }

    /// The next line that it says.
    pub(crate) fn hear(&mut self) -> Result<String> {
        self.answers.next().context("the second process has ended")?.context("a line")
    }

    /// Lets it come to its end, which must be a good one.
    pub(crate) fn end(self) -> Result<()> {
        ensure!(self.status()?.success(), "the second process failed");
        Ok(())
    }

    /// Lets it come to its end, however that is.
    pub(crate) fn status(self) -> Result<ExitStatus> {
        let Self { process, orders, answers } = self;
        drop((orders, answers));
        match process {
            Process::Started(mut child) => Ok(child.wait()?),
            Process::Forked(pid) => {
                let mut status = 0;
                // SAFETY: a place for the result.
                let waited = unsafe { libc::waitpid(pid, &raw mut status, 0) };
                ensure!(waited == pid, "waitpid: {}", std::io::Error::last_os_error());
                Ok(ExitStatus::from_raw(status))
            }
        }
    }
}
