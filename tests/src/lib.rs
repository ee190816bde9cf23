//! What the end-to-end tests share: programs that are started, dumped and restored, in a folder of
//! their own, with everything they print in a file.

use std::ffi::OsStr;
use std::fs::File;
use std::io::Write;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus, Output, Stdio};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};

mod dumped;
mod held;
mod skip;
mod started;
pub mod warm;

pub use dumped::{Dumped, Piped, last_step};
pub use held::{HeldDump, HeldRestore, child_named, kill};
pub use skip::skip;
pub use started::Started;
use started::{kill_tree, writes_to};

/// How long anything may take before a test gives up on it; machines are slow and shared.
const PATIENCE: Duration = Duration::from_secs(120);

/// The workloads that make it hard to tell what they write; `e2e/adversaries.rs` dumps them.
pub const ADVERSARIES: [&str; 11] = [
    "halves",
    "permuted",
    "shifting",
    "const-cast",
    "seldom",
    "two-halves",
    "remade",
    "long-kernel",
    "graph-nodes",
    "model",
    "stamp",
];

/// The workloads that a dump refuses for a while; `e2e/hard.rs` has them.
pub const REFUSED: [&str; 2] = ["sharer", "headless"];

/// The workload with more memory than each test needs; `e2e/faults.rs` has it.
pub const LARGE: [&str; 1] = ["one-block"];

/// How far a workload that was started with `--pace` may get: however slow the machine, it does not
/// end before the test wants it to.
#[derive(Debug)]
pub struct Pace(tempfile::NamedTempFile);

impl Pace {
    /// A pace that allows no step yet.
    ///
    /// # Errors
    /// No temporary file can be made.
    pub fn new() -> Result<Self> {
        Ok(Self(tempfile::NamedTempFile::new()?))
    }

    /// The value of `--pace`.
    pub fn file(&self) -> &str {
        self.0.path().to_str().expect("temporary directories have names in UTF-8")
    }

    /// Lets it go on to its end, and its children too.
    ///
    /// # Errors
    /// The file cannot be written to.
    pub fn allow_all(&self) -> Result<()> {
        self.allow(1 << 20)
    }

    /// Lets so many more steps end.
    ///
    /// # Errors
    /// The file cannot be written to.
    pub fn allow(&self, steps: usize) -> Result<()> {
        Ok(self.0.as_file().write_all(&vec![b'.'; steps])?)
    }
}

/// A file system of the given size, unmounted on drop.
pub struct SmallDisk(PathBuf);

impl SmallDisk {
    /// Mounts it at a path where nothing is yet.
    ///
    /// # Errors
    /// Something is there, or nothing can be mounted there.
    pub fn mount(path: PathBuf, kib: u32) -> Result<Self> {
        std::fs::create_dir(&path)?;
        let mounted = Command::new("mount")
            .args(["-t", "tmpfs", "-o", &format!("size={kib}k"), "tmpfs"])
            .arg(&path)
            .status()?;
        ensure!(mounted.success(), "a small file system is needed for this test");
        Ok(Self(path))
    }
}

impl Drop for SmallDisk {
    fn drop(&mut self) {
        // At once, whatever a test that has failed leaves behind: a process on its way out, for example.
        let _ = Command::new("umount").arg("--lazy").arg(&self.0).status();
        let _ = std::fs::remove_dir(&self.0);
    }
}

/// A binary of this workspace, built beside the tests.
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

/// A folder for one test, and the programs that it starts; all end with it.
pub struct Lab {
    dir: tempfile::TempDir,
    /// Environment for the programs.
    pub environment: Vec<(String, String)>,
}

impl Default for Lab {
    fn default() -> Self {
        Self::new()
    }
}

impl Lab {
    /// Makes the folder.
    pub fn new() -> Self {
        Self { dir: tempfile::tempdir().expect("a folder"), environment: Vec::new() }
    }

    /// A path in the folder.
    pub fn path(&self, name: impl AsRef<Path>) -> PathBuf {
        self.dir.path().join(name)
    }

    /// A gpucr command, ready for arguments.
    pub fn gpucr(&self) -> Command {
        let mut command = Command::new(binary("gpucr"));
        command.current_dir(self.dir.path()).stdin(Stdio::null());
        command
    }

    /// Runs gpucr with arguments and waits for its end.
    ///
    /// # Errors
    /// gpucr cannot be started, or takes too long.
    pub fn run<S: AsRef<OsStr>>(&self, args: impl IntoIterator<Item = S>) -> Result<Output> {
        finish(self.gpucr().args(args))
    }

    /// Waits until the folder holds nothing but what is allowed: no socket, temporary file or half an
    /// image is left.
    ///
    /// # Errors
    /// Something else is there still when the time is over; the error names it.
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

    /// The same with more in its environment.
    ///
    /// # Errors
    /// The program cannot be started.
    pub fn start_with(
        &self,
        name: &str,
        args: &[&str],
        environment: &[(&str, &str)],
    ) -> Result<Program> {
        let workload = binary("workload");
        let mut command = self.gpucr();
        command.envs(environment.iter().copied());
        command.args(["run", "--device", "soft", "--"]).arg(workload).arg(name).args(args);
        self.spawn(command, "log")
    }

    /// Starts a workload and waits until it has done its first step. With `--steps` among the
    /// arguments it stops short of its end until [`Program::result`] is wanted.
    ///
    /// # Errors
    /// The program cannot be started, or ends or takes too long before its first step.
    pub fn at_work(&self, name: &str, args: &[&str]) -> Result<Program> {
        let pace = Pace::new()?;
        let mut paced = args.to_vec();
        let steps = args.iter().position(|arg| *arg == "--steps").and_then(|at| args.get(at + 1));
        let steps: usize = steps.map_or(Ok(0), |steps| steps.parse())?;
        if steps > 0 {
            pace.allow(steps * 3 / 4)?;
            paced.extend(["--pace", pace.file()]);
        }
        let mut program = self.start(name, &paced)?;
        program.pace = (steps > 0).then_some((pace, steps));
        program.wait_for("step ")?;
        Ok(program)
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
    /// that were open must have their old size for a restore.
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

    /// The same with further environment for gpucr.
    ///
    /// # Errors
    /// The old program does not end, or the restore fails or takes too long; the error has what it says.
    pub fn restore_with(
        &self,
        image: &Path,
        mut old: Program,
        environment: &[(&str, &str)],
    ) -> Result<Program> {
        // Until somebody has waited for it, the old process holds its pid.
        old.wait().context("the dumped program ends")?;
        let mut command = self.gpucr();
        let out = File::create(self.path("restore.log"))?;
        command.arg("restore").arg(image).stdout(out.try_clone()?).stderr(out);
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

/// A program that was started, or the foreground restore that stands in for it. Killed on drop.
pub struct Program {
    /// The program's own pid.
    pub pid: u32,
    child: Option<Child>,
    log: PathBuf,
    /// What keeps it from its end, and the steps that it makes up to there.
    pace: Option<(Pace, usize)>,
}

impl Program {
    /// What it has printed so far.
    pub fn output(&self) -> String {
        std::fs::read_to_string(&self.log).unwrap_or_default()
    }

    /// Waits for a line that starts with `prefix`, and gives it.
    ///
    /// # Errors
    /// It has ended without such a line, or takes too long; the error has what it has printed.
    pub fn wait_for(&mut self, prefix: &str) -> Result<String> {
        let deadline = Instant::now() + PATIENCE;
        loop {
            let output = self.output();
            let complete = output.rfind('\n').map_or("", |end| &output[..end]);
            if let Some(line) = complete.lines().find(|line| line.starts_with(prefix)) {
                return Ok(line.to_owned());
            }
            if let Some(status) = self.child.as_mut().and_then(|c| c.try_wait().ok().flatten())
                && !self.output().lines().any(|line| line.starts_with(prefix))
            {
                bail!("ended with {status} before `{prefix}`:\n{}", self.output());
            }
            ensure!(Instant::now() < deadline, "no `{prefix}` in time:\n{}", self.output());
            std::thread::sleep(Duration::from_millis(5));
        }
    }

    /// Waits until it has printed something more than it had.
    ///
    /// # Errors
    /// It has ended with a failure, or takes too long.
    pub fn wait_for_progress(&mut self) -> Result<()> {
        let before = self.output().len();
        self.allow_some()?;
        self.wait_for_more_than(before)
    }

    fn allow_all(&self) -> Result<()> {
        self.pace.as_ref().map_or(Ok(()), |(pace, _)| pace.allow_all())
    }

    /// Allows as many steps as it makes between two lines.
    fn allow_some(&self) -> Result<()> {
        self.pace.as_ref().map_or(Ok(()), |(pace, steps)| pace.allow(steps.div_ceil(50)))
    }

    fn wait_for_more_than(&mut self, before: usize) -> Result<()> {
        let deadline = Instant::now() + PATIENCE;
        while self.output().len() == before {
            if let Some(Some(status)) = self.child.as_mut().map(Child::try_wait).transpose()? {
                ensure!(status.success(), "it ended with {status}");
                break;
            }
            ensure!(Instant::now() < deadline, "no progress:\n{}", self.output());
            std::thread::sleep(Duration::from_millis(5));
        }
        Ok(())
    }

    /// From here on its output alone tells how it fares: it is no child of this test any more, and
    /// goes on to its end.
    ///
    /// # Errors
    /// Its pace cannot be changed.
    pub fn let_go(&mut self) -> Result<()> {
        self.child = None;
        self.allow_all()
    }

    /// Whether it has not ended yet.
    pub fn is_running(&mut self) -> bool {
        self.child.as_mut().is_some_and(|child| matches!(child.try_wait(), Ok(None)))
    }

    /// Waits for its end.
    ///
    /// # Errors
    /// It was let go of, or prints nothing for a long time and does not end.
    pub fn wait(&mut self) -> Result<ExitStatus> {
        let mut printed = 0;
        let mut deadline = Instant::now() + PATIENCE;
        loop {
            let child = self.child.as_mut().context("it was started")?;
            if let Some(status) = child.try_wait()? {
                return Ok(status);
            }
            // However slow the machine: as long as there is progress.
            let now = std::fs::metadata(&self.log).map_or(0, |log| log.len());
            if now > printed {
                (printed, deadline) = (now, Instant::now() + PATIENCE);
            }
            if Instant::now() > deadline {
                bail!("it does not end:\n{}", self.output());
            }
            std::thread::sleep(Duration::from_millis(5));
        }
    }

    /// Waits for its end, which must be a good one, and gives the line with its result.
    ///
    /// # Errors
    /// It fails, takes too long, or has not printed just one result.
    pub fn result(&mut self) -> Result<String> {
        self.allow_all()?;
        let status = self.wait()?;
        let output = self.output();
        ensure!(status.success(), "it ended with {status}:\n{output}");
        let mut results = output.lines().filter(|line| line.starts_with("result "));
        let result = results.next().with_context(|| format!("no result:\n{output}"))?;
        ensure!(results.next().is_none(), "two results:\n{output}");
        Ok(result.to_owned())
    }

    /// The lines that belong to the computation: steps and the result.
    pub fn series(&self) -> Vec<String> {
        let wanted = |line: &&str| line.starts_with("step ") || line.starts_with("result ");
        self.output().lines().filter(wanted).map(str::to_owned).collect()
    }

    /// Kills the whole program and reaps it.
    pub fn kill(&mut self) {
        // The program's processes first: the foreground restore ends with them.
        kill_tree(self.pid);
        if let Some(child) = &mut self.child {
            let _ = child.kill();
            let _ = child.wait();
        }
    }
}

impl Drop for Program {
    fn drop(&mut self) {
        // One that was let go of is no child, and may be at work all the same.
        if self.is_running() || self.child.is_none() && writes_to(self.pid, &self.log) {
            self.kill();
        }
    }
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

/// Numbers that look random and are the same in every run; the seed is in the name of a failure.
pub struct Random(pub u64);

impl Random {
    /// The next number below `limit`.
    pub fn below(&mut self, limit: u64) -> u64 {
        // splitmix64
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        (z ^ (z >> 31)) % limit.max(1)
    }
}

/// What a workload prints that nobody touches.
///
/// # Errors
/// It cannot be started, fails, or takes too long.
pub fn undisturbed(name: &str, args: &[&str]) -> Result<Vec<String>> {
    let lab = Lab::new();
    let mut program = lab.start(name, args)?;
    program.result()?;
    Ok(program.series())
}
