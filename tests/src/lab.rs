//! The folder of a test, and what is done in it.

use std::ffi::OsStr;
use std::fs::File;
use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};

use anyhow::{Context, Result, ensure};

use crate::command::{binary, finish, in_own_session, show, until};
use crate::pace::Pace;
use crate::program::Program;
use crate::workloads::MULTICAST;

/// A folder for one test, and the programs that it starts; all end with it.
pub struct Lab {
    dir: tempfile::TempDir,
    /// Environment for the programs.
    pub environment: Vec<(String, String)>,
    /// Environment for gpucr and the programs: which devices there are.
    devices: Vec<(&'static str, &'static str)>,
}

impl Default for Lab {
    fn default() -> Self {
        Self::new()
    }
}

/// What keeps a program from its end, and the steps that it makes up to there.
type Held = (Pace, usize);

impl Lab {
    /// Makes the folder.
    pub fn new() -> Self {
        let dir = tempfile::tempdir().expect("a folder");
        Self { dir, environment: Vec::new(), devices: Vec::new() }
    }

    /// Makes the folder for a test of a workload, with the devices that it needs.
    pub fn of(workload: &str) -> Self {
        let devices = match workload {
            MULTICAST => {
                vec![("SOFTCUDA_DEVICE", "NVIDIA H100,9.0,4,1G"), ("SOFTCUDA_DEVICES", "3")]
            }
            _ => Vec::new(),
        };
        Self { devices, ..Self::new() }
    }

    /// A path in the folder.
    pub fn path(&self, name: impl AsRef<Path>) -> PathBuf {
        self.dir.path().join(name)
    }

    /// A gpucr command, ready for arguments.
    pub fn gpucr(&self) -> Command {
        let mut command = Command::new(binary("gpucr"));
        command.current_dir(self.dir.path()).stdin(Stdio::null());
        command.envs(self.devices.iter().copied());
        command
    }

    /// Runs gpucr with arguments and waits for its end.
    ///
    /// # Errors
    /// gpucr cannot be started, or takes too long.
    pub fn run<S: AsRef<OsStr>>(&self, args: impl IntoIterator<Item = S>) -> Result<Output> {
        finish(self.gpucr().args(args))
    }

    /// What a file of `--events` has, each line an object.
    ///
    /// # Errors
    /// There is no such file, or a line is no object.
    pub fn events(&self, name: &str) -> Result<Vec<serde_json::Value>> {
        let text = std::fs::read_to_string(self.path(name))?;
        text.lines().map(|line| Ok(serde_json::from_str(line)?)).collect()
    }

    /// Waits until the folder holds nothing but what is allowed: no socket, temporary file or half an
    /// image is left.
    ///
    /// # Errors
    /// Something else is still there when the time is over; the error names it.
    pub fn holds_only(&self, allowed: &[&str]) -> Result<()> {
        let others = || -> Result<Vec<String>> {
            let names = std::fs::read_dir(self.path(""))?;
            let names = names.map(|entry| Ok(entry?.file_name().to_string_lossy().into_owned()));
            names.filter(|name| !matches!(name, Ok(n) if allowed.contains(&n.as_str()))).collect()
        };
        let gone = until("what was made is removed", || matches!(others(), Ok(o) if o.is_empty()));
        gone.with_context(|| format!("left behind: {:?}", others()))
    }

    /// Starts a workload under gpucr on the software driver.
    ///
    /// # Errors
    /// The program cannot be started.
    pub fn start(&self, name: &str, args: &[&str]) -> Result<Program> {
        self.start_with(name, args, &[])
    }

    /// Starts a workload with more in its environment.
    ///
    /// # Errors
    /// The program cannot be started.
    pub fn start_with(
        &self,
        name: &str,
        args: &[&str],
        environment: &[(&str, &str)],
    ) -> Result<Program> {
        let args: Vec<&str> = [name].iter().chain(args).copied().collect();
        self.start_any(&binary("workload"), &args, environment)
    }

    fn start_any(
        &self,
        program: &Path,
        args: &[&str],
        environment: &[(&str, &str)],
    ) -> Result<Program> {
        let mut command = self.gpucr();
        command.envs(environment.iter().copied());
        command.args(["run", "--device", "soft", "--"]).arg(program).args(args);
        self.spawn(command, "log")
    }

    /// Starts a workload and waits until it has done its first step. With `--steps` among the
    /// arguments it stops short of its end until [`Program::result`] is wanted.
    ///
    /// # Errors
    /// The program cannot be started, or ends or takes too long before its first step.
    pub fn at_work(&self, name: &str, args: &[&str]) -> Result<Program> {
        self.at_work_with(name, args, &[])
    }

    /// The same with more in the workload's environment.
    ///
    /// # Errors
    /// As [`Lab::at_work`].
    pub fn at_work_with(
        &self,
        name: &str,
        args: &[&str],
        environment: &[(&str, &str)],
    ) -> Result<Program> {
        let args: Vec<&str> = [name].iter().chain(args).copied().collect();
        self.paced(&binary("workload"), &args, environment)
    }

    /// The same with a log to which is appended, as by `>> log`.
    ///
    /// # Errors
    /// As [`Lab::at_work`].
    pub fn at_work_appending(&self, name: &str, args: &[&str]) -> Result<Program> {
        self.paced_by("exec \"$0\" \"$@\" >> log 2>&1", "log", name, args)
    }

    /// The same with a log that begins with this text.
    ///
    /// # Errors
    /// As [`Lab::at_work`].
    pub fn at_work_after(&self, name: &str, args: &[&str], text: &str) -> Result<Program> {
        self.paced_by(&format!("echo {text}; exec \"$0\" \"$@\""), "log", name, args)
    }

    /// The same with a log of this name, and more that is open, as a shell says it: `7<input`.
    ///
    /// # Errors
    /// As [`Lab::at_work`].
    pub fn at_work_with_files(
        &self,
        open: &str,
        log: &str,
        name: &str,
        args: &[&str],
    ) -> Result<Program> {
        self.paced_by(&format!("exec \"$0\" \"$@\" {open}"), log, name, args)
    }

    /// Starts a workload by a shell that does this.
    fn paced_by(&self, shell: &str, log: &str, name: &str, args: &[&str]) -> Result<Program> {
        let (args, pace) = self.pace(&[&[name], args].concat())?;
        let mut command = Command::new("sh");
        command.current_dir(self.dir.path()).args(["-c", shell]).arg(binary("gpucr"));
        command.args(["run", "--device", "soft", "--"]).arg(binary("workload")).args(args);
        let mut program = self.spawn(command, log)?;
        program.pace = pace;
        program.wait_for("step ")?;
        Ok(program)
    }

    /// The same for any program that takes `--steps` and `--pace` and prints as the workloads do.
    ///
    /// # Errors
    /// As [`Lab::at_work`].
    pub fn any_at_work(&self, program: &Path, args: &[&str]) -> Result<Program> {
        self.paced(program, args, &[])
    }

    fn paced(
        &self,
        program: &Path,
        args: &[&str],
        environment: &[(&str, &str)],
    ) -> Result<Program> {
        let (args, pace) = self.pace(args)?;
        let args: Vec<&str> = args.iter().map(String::as_str).collect();
        let mut program = self.start_any(program, &args, environment)?;
        program.pace = pace;
        program.wait_for("step ")?;
        Ok(program)
    }

    /// The arguments of a workload that stops short of its end, if they say how many steps it does.
    pub(crate) fn pace(&self, args: &[&str]) -> Result<(Vec<String>, Option<Held>)> {
        let mut paced: Vec<String> = args.iter().map(|arg| (*arg).to_owned()).collect();
        let steps = args.iter().position(|arg| *arg == "--steps").and_then(|at| args.get(at + 1));
        let steps: usize = steps.map_or(Ok(0), |steps| steps.parse())?;
        if steps == 0 {
            return Ok((paced, None));
        }
        let pace = Pace::new()?;
        pace.allow(steps * 3 / 4)?;
        paced.extend(["--pace".to_owned(), pace.file().to_owned()]);
        Ok((paced, Some((pace, steps))))
    }

    /// Starts any command as a program whose output goes to the file `log`.
    ///
    /// # Errors
    /// The file cannot be made, or the program cannot be started.
    pub fn spawn(&self, mut command: Command, log: &str) -> Result<Program> {
        let log = self.path(log);
        let out = File::create(&log)?;
        command
            .stdin(Stdio::null())
            .stdout(out.try_clone()?)
            .stderr(out)
            .envs(self.environment.iter().map(|(k, v)| (k, v)));
        in_own_session(&mut command);
        let child = command.spawn().context("the program starts")?;
        Ok(Program { pid: child.id(), child: Some(child), log, pace: None })
    }

    /// Dumps a program and gives the report. `args` are further flags.
    ///
    /// # Errors
    /// gpucr fails or takes too long; the error has what it and the program say.
    pub fn dump(
        &self,
        program: &Program,
        image: &Path,
        args: &[&str],
    ) -> Result<serde_json::Value> {
        let mut command = self.gpucr();
        command.args(["dump", "--json", "--pid", &program.pid.to_string(), "-o"]).arg(image);
        let output = finish(command.args(args))?;
        ensure!(output.status.success(), "dump: {}\n{}", show(&output), program.output());
        Ok(serde_json::from_slice(&output.stdout)?)
    }

    /// Puts the log of a program that ran on after a dump back to what it was at the dump: files
    /// that were open have their old size then.
    ///
    /// # Errors
    /// The image cannot be read or does not have the log, or the log cannot be cut.
    pub fn rewind(&self, program: &Program, image: &Path) -> Result<()> {
        let output = finish(self.gpucr().args(["inspect", "--json"]).arg(image))?;
        ensure!(output.status.success(), "inspect: {}", show(&output));
        let summary: serde_json::Value = serde_json::from_slice(&output.stdout)?;
        let files = summary["files"].as_array().context("inspect lists files")?;
        let file = files
            .iter()
            .find(|file| file["path"].as_str().map(Path::new) == Some(program.log.as_path()))
            .context("the log is among them")?;
        let log = File::options().write(true).open(&program.log)?;
        log.set_len(file["size"].as_u64().context("with a size")?)?;
        Ok(())
    }

    /// Restores an image in the foreground and waits until the program goes on: the program in its
    /// new life.
    ///
    /// # Errors
    /// The old program does not end, or the restore fails or takes too long; the error has what it says.
    pub fn restore(&self, image: &Path, old: Program) -> Result<Program> {
        self.restore_with(image, old, &[])
    }

    /// Restores with further environment for gpucr.
    ///
    /// # Errors
    /// The old program does not end, or the restore fails or takes too long; the error has what it says.
    pub fn restore_with(
        &self,
        image: &Path,
        old: Program,
        environment: &[(&str, &str)],
    ) -> Result<Program> {
        self.restore_as(image, old, &[], environment)
    }

    /// The same with further arguments.
    ///
    /// # Errors
    /// As [`Lab::restore_with`].
    pub fn restore_as(
        &self,
        image: &Path,
        mut old: Program,
        args: &[&str],
        environment: &[(&str, &str)],
    ) -> Result<Program> {
        // Until somebody has waited for it, the old process holds its pid.
        old.wait().context("the dumped program ends")?;
        let mut command = self.gpucr();
        let out = File::create(self.path("restore.log"))?;
        command.arg("restore").args(args).arg(image).stdout(out.try_clone()?).stderr(out);
        command.envs(environment.iter().copied());
        let before = old.output().len();
        old.allow_some()?;
        let child = command.spawn().context("the restore starts")?;
        let (log, pace) = (old.log.clone(), old.pace.take());
        let mut program = Program { pid: old.pid, child: Some(child), log, pace };
        let restored = program.wait_for_more_than(before);
        let said = std::fs::read_to_string(self.path("restore.log")).unwrap_or_default();
        restored.with_context(|| format!("restore: {said}"))?;
        Ok(program)
    }
}

/// What a workload prints that nobody touches.
///
/// # Errors
/// It cannot be started, fails, or takes too long.
pub fn undisturbed(name: &str, args: &[&str]) -> Result<Vec<String>> {
    let lab = Lab::of(name);
    let mut program = lab.start(name, args)?;
    program.result()?;
    Ok(program.series())
}
