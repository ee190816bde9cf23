//! Programs that were dumped in the middle of their work.

use std::fs::File;
use std::io::{BufRead, BufReader};
use std::process::{Command, Stdio};
use std::time::Duration;

use anyhow::{Context, Result, ensure};

use crate::{Lab, Pace, Program, Started, binary, in_own_session, undisturbed};

/// A workload that was dumped to `image` in the middle of its work and has ended. Restored it goes on to
/// its end.
pub struct Dumped {
    /// The workload; its log is as it was at the dump.
    pub program: Program,
    /// What it prints when nobody touches it.
    pub expected: Vec<String>,
    /// How far what was restored may get: to its end, to begin with.
    pub pace: Pace,
}

impl Dumped {
    /// Runs the workload once to its end, and a second time up to the dump.
    ///
    /// # Errors
    /// The workload or the dump fails, or one of them takes too long.
    pub fn in_the_middle(lab: &Lab, name: &str, args: &[&str]) -> Result<Self> {
        Self::with(lab, name, args, &[])
    }

    /// Dumps the workload while it works, so that the dump sees what it launches.
    ///
    /// # Errors
    /// The workload or the dump fails, or one of them takes too long.
    pub fn at_work(lab: &Lab, name: &str, args: &[&str]) -> Result<Self> {
        Self::dumped_by(lab, name, args, &[], Meanwhile::Works)
    }

    /// As [`in_the_middle`](Self::in_the_middle), with more in the environment of the second.
    ///
    /// # Errors
    /// The workload or the dump fails, or one of them takes too long.
    pub fn with(
        lab: &Lab,
        name: &str,
        args: &[&str],
        environment: &[(&str, &str)],
    ) -> Result<Self> {
        Self::dumped_by(lab, name, args, environment, Meanwhile::Waits)
    }

    fn dumped_by(
        lab: &Lab,
        name: &str,
        args: &[&str],
        environment: &[(&str, &str)],
        meanwhile: Meanwhile,
    ) -> Result<Self> {
        let expected = undisturbed(name, args)?;
        let (pace, left) = meanwhile.pace(&expected)?;
        let paced = [args, &["--step-delay-ms", "10", "--pace", pace.file()]].concat();
        let mut program = lab.start_with(name, &paced, environment)?;
        program.wait_for("ready")?;
        dump(lab, program.pid, &pace, left)?;
        program.wait()?;
        pace.allow_all()?;
        program.let_go()?;
        Ok(Self { program, expected, pace })
    }

    /// What was restored has come to its end: it must have printed what it prints when nobody touches it.
    /// Its log is as it was at the dump afterwards, for the next restore.
    ///
    /// # Errors
    /// It printed something else, or its log cannot be put back.
    pub fn came_out_right(&self, lab: &Lab) -> Result<()> {
        let output = self.program.output();
        ensure!(self.program.series() == self.expected, "it differs:\n{output}");
        lab.rewind(&self.program, &lab.path("image"))
    }
}

/// A workload that prints to a pipe, dumped to `image` in the middle of its work, which has ended. So it can
/// be restored several times at once, each time with its output in a file of its own.
pub struct Piped {
    /// The workload's pid.
    pub pid: u32,
    /// How far what was restored may get: not further than it was at the dump, to begin with.
    pub pace: Pace,
    before: Vec<String>,
    expected: Vec<String>,
}

impl Piped {
    /// Runs the workload once to its end, and a second time up to the dump.
    ///
    /// # Errors
    /// The workload or the dump fails, or one of them takes too long.
    pub fn in_the_middle(lab: &Lab, name: &str, args: &[&str]) -> Result<Self> {
        Self::dumped_by(lab, name, args, &|_| (), Meanwhile::Waits)
    }

    /// As [`in_the_middle`](Self::in_the_middle), with more done to the command that starts the second.
    ///
    /// # Errors
    /// The workload or the dump fails, or one of them takes too long.
    pub fn prepared(
        lab: &Lab,
        name: &str,
        args: &[&str],
        prepare: &dyn Fn(&mut Command),
    ) -> Result<Self> {
        Self::dumped_by(lab, name, args, prepare, Meanwhile::Waits)
    }

    /// Dumps the workload while it works, so that the dump sees what it launches.
    ///
    /// # Errors
    /// The workload or the dump fails, or one of them takes too long.
    pub fn at_work(lab: &Lab, name: &str, args: &[&str]) -> Result<Self> {
        Self::dumped_by(lab, name, args, &|_| (), Meanwhile::Works)
    }

    fn dumped_by(
        lab: &Lab,
        name: &str,
        args: &[&str],
        prepare: &dyn Fn(&mut Command),
        meanwhile: Meanwhile,
    ) -> Result<Self> {
        let expected = undisturbed(name, args)?;
        let (pace, left) = meanwhile.pace(&expected)?;
        let mut command = lab.gpucr();
        command.args(["run", "--device", "soft", "--"]).arg(binary("workload")).arg(name);
        command.args(args).args(["--pace", pace.file()]).stdout(Stdio::piped());
        in_own_session(&mut command);
        prepare(&mut command);
        let mut program = Started::spawn(&mut command)?;
        let mut lines = BufReader::new(program.stdout.take().context("piped")?).lines();
        let mut before = Vec::new();
        while before.iter().filter(|line: &&String| line.starts_with("step ")).count() < 3 {
            before.push(lines.next().context("it goes on")??);
        }
        dump(lab, program.id(), &pace, left)?;
        before.extend(lines.collect::<Result<Vec<_>, _>>()?);
        program.wait()?;
        Ok(Self { pid: program.id(), pace, before, expected })
    }

    /// Begins a restore in the foreground, in a pid namespace of its own, that prints to a file of the lab.
    ///
    /// # Errors
    /// The file cannot be made, or gpucr cannot be started.
    pub fn restore(&self, lab: &Lab, args: &[&str], out: &str) -> Result<Started> {
        let mut command = lab.gpucr();
        command.args(["restore", "--new-pids"]).args(args).arg("image");
        Ok(Started::spawn(command.stdout(File::create(lab.path(out))?))?)
    }

    /// What was restored has come to its end: it must have printed what is still missing, into that file.
    ///
    /// # Errors
    /// It printed something else, or the file cannot be read.
    pub fn came_out_right(&self, lab: &Lab, out: &str) -> Result<()> {
        let twice = self.printed_twice(lab, out)?;
        ensure!(twice.is_empty(), "{out} has these lines twice: {twice:#?}");
        Ok(())
    }

    /// As [`came_out_right`](Self::came_out_right), after it was restored again by the same command: the beginning of what
    /// is missing may come first. Gives that.
    ///
    /// # Errors
    /// It printed something else, or the file cannot be read.
    pub fn printed_twice(&self, lab: &Lab, out: &str) -> Result<Vec<String>> {
        let printed = std::fs::read_to_string(lab.path(out))?;
        let is_of_series = |line: &&str| line.starts_with("step ") || line.starts_with("result ");
        let series = |lines: &mut dyn Iterator<Item = &str>| -> Vec<String> {
            lines.filter(is_of_series).map(str::to_owned).collect()
        };
        let before = series(&mut self.before.iter().map(String::as_str));
        let missing = self.expected.strip_prefix(&before[..]).context("it was dumped too late")?;
        let mut printed = series(&mut printed.lines());
        let last = printed.split_off(printed.len().saturating_sub(missing.len()));
        ensure!(
            last == missing && missing.starts_with(&printed),
            "{out} differs: {printed:#?} {last:#?}"
        );
        Ok(printed)
    }
}

/// What a workload does during its dump. Either way it has made half of its steps when the image is complete, at most.
#[derive(Clone, Copy)]
enum Meanwhile {
    /// It has made them before, and waits.
    Waits,
    /// It makes most of them during the dump.
    Works,
}

impl Meanwhile {
    /// A pace that allows the steps before the dump, and how many may be made during it.
    fn pace(self, expected: &[String]) -> Result<(Pace, usize)> {
        let half = last_step(expected)? / 2;
        let before = match self {
            Self::Waits => half,
            // A workload prints one line for each fiftieth of its steps: so there are some lines.
            Self::Works => half / 4,
        };
        let pace = Pace::new()?;
        pace.allow(before)?;
        Ok((pace, half - before))
    }
}

/// How often a workload may make one more step during its dump.
const STEP: Duration = Duration::from_millis(10);

/// Dumps to `image` a workload that waits for `pace`. Once the dump records what it launches, the workload may make
/// `steps` more.
fn dump(lab: &Lab, pid: u32, pace: &Pace, mut steps: usize) -> Result<()> {
    let path = lab.path("dump.log");
    let mut command = lab.gpucr();
    command.args(["dump", "-o", "image", "--pid", &pid.to_string()]);
    command.env("GPUCR_LOG", "gpucr_core=debug").env("NO_COLOR", "1");
    command.stdout(Stdio::null()).stderr(File::create(&path)?);
    let mut child = Started::spawn(&mut command)?;
    let log = || std::fs::read_to_string(&path);
    let mut is_recording = false;
    let status = loop {
        if let Some(status) = child.try_wait()? {
            break status;
        }
        is_recording = is_recording || log()?.contains("phase=\"precopy\"");
        if is_recording && steps > 0 {
            pace.allow(1)?;
            steps -= 1;
        }
        std::thread::sleep(STEP);
    };
    ensure!(status.success(), "{status}: {}", log()?);
    Ok(std::fs::remove_file(path)?)
}

/// The number of the last step in what a workload prints.
///
/// # Errors
/// It prints no step.
pub fn last_step(series: &[String]) -> Result<usize> {
    let number = |line: &String| line.strip_prefix("step ")?.split(' ').next()?.parse().ok();
    series.iter().filter_map(number).max().context("it makes steps")
}
