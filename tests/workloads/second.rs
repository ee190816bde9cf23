//! A second process of a workload, which the first one tells what to do, line by line.

use std::fmt::Display;
use std::io::{BufRead as _, BufReader, Lines, Write as _};
use std::process::{Child, ChildStdin, ChildStdout, Command, Stdio};

use anyhow::{Context as _, Result, ensure};

use crate::cuda::{Lookup, lookup};

/// The second process, with both ends of the conversation.
pub(crate) struct Second {
    child: Child,
    orders: ChildStdin,
    answers: Lines<BufReader<ChildStdout>>,
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
        let answers = BufReader::new(child.stdout.take().context("the pipe is there")?).lines();
        Ok(Self { child, orders, answers })
    }

    pub(crate) fn pid(&self) -> u32 {
        self.child.id()
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
    pub(crate) fn end(mut self) -> Result<()> {
        drop(self.orders);
        ensure!(self.child.wait()?.success(), "the second process failed");
        Ok(())
    }
}
