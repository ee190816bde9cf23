//! A process that does not use CUDA and starts one that does, as `torchrun` and shells do.

use std::io::{BufRead as _, BufReader};
use std::process::{Child, ChildStdout, Command, ExitStatus, Stdio};

use anyhow::{Context as _, Result, ensure};

use crate::cuda::{Lookup, lookup};
use crate::report::Run;

/// A workload in a process of its own, whose output comes through a pipe.
pub(crate) struct Worker {
    child: Child,
    output: BufReader<ChildStdout>,
    /// The process id.
    pub(crate) pid: String,
}

impl Worker {
    /// Starts workload `name` with this run's options, and waits until it is ready.
    pub(crate) fn start(run: &Run, name: &str, seed: u32) -> Result<Self> {
        let mut command = Command::new(std::env::current_exe()?);
        let size = format!("{:?}", run.size).to_lowercase();
        command.args([name, "--size", &size, "--seed", &seed.to_string()]);
        command.args(["--step-delay-ms", &run.delay().as_millis().to_string()]);
        if lookup() == Lookup::GetProcAddress {
            command.arg("--get-proc-address");
        }
        if let Some(steps) = run.asked_steps() {
            command.args(["--steps", &steps.to_string()]);
        }
        if let Some(pace) = run.pace() {
            command.arg("--pace").arg(pace);
        }
        let mut child = command.stdin(Stdio::null()).stdout(Stdio::piped()).spawn()?;
        let output = BufReader::new(child.stdout.take().context("the pipe is there")?);
        let mut worker = Self { child, output, pid: String::new() };
        let line = worker.next_line()?.unwrap_or_default();
        let pid = line.strip_prefix("ready pid=");
        pid.with_context(|| format!("{name} did not get ready; it said: {line}"))?
            .clone_into(&mut worker.pid);
        Ok(worker)
    }

    /// The next line of its output, without the end of line; none after the last.
    pub(crate) fn next_line(&mut self) -> Result<Option<String>> {
        let mut line = String::new();
        let more = self.output.read_line(&mut line).context("cannot read a worker's output")? > 0;
        Ok(more.then(|| line.trim_end().to_owned()))
    }

    /// Waits for its end.
    pub(crate) fn wait(mut self) -> Result<ExitStatus> {
        self.child.wait().context("cannot wait for a worker")
    }
}

/// Runs the workload.
pub(crate) fn run(run: &mut Run) -> Result<()> {
    let mut worker = Worker::start(run, "sgd", run.seed)?;
    run.line(format_args!("child pid={}", worker.pid))?;
    run.ready()?;
    while let Some(line) = worker.next_line()? {
        run.line(&line)?;
    }
    let status = worker.wait()?;
    ensure!(status.success(), "the child ended with {status}");
    Ok(())
}
