//! `cargo xtask demo`: the main job, from end to end, in front of the reader's eyes.

use std::fs::File;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitCode, ExitStatus, Stdio};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};
use clap::ValueEnum;

use crate::runs::Series;
use crate::{chart, setup, sys};

/// Nothing that the demo waits for takes this long, even on a small and busy machine.
const PATIENCE: Duration = Duration::from_secs(240);

#[derive(clap::Args)]
pub(crate) struct Args {
    /// Where to train
    #[arg(long, value_enum, default_value_t = Device::Auto)]
    device: Device,
    /// Length of the training
    #[arg(long, default_value_t = 200, value_parser = clap::value_parser!(u32).range(10..))]
    steps: u32,
    /// Pause after each step, in milliseconds, so that there is time to dump in between
    #[arg(long, value_name = "MS", default_value_t = 20)]
    step_delay_ms: u64,
    /// Keep logs and image
    #[arg(long)]
    keep: bool,
    /// Take `gpucr`, its libraries and `workload` from there, and install and build nothing: for a
    /// machine without Rust
    #[arg(long, value_name = "DIR")]
    prebuilt: Option<PathBuf>,
}

#[derive(Clone, Copy, PartialEq, Eq, ValueEnum)]
enum Device {
    /// The GPU if there is one, else the software driver
    Auto,
    /// The GPU
    Cuda,
    /// The software driver
    Soft,
}

/// Runs the demo. The last line says `identical`, and the exit code is 0, only if the restored
/// training printed the same losses, bit for bit, and the same result as the uninterrupted one.
///
/// # Errors
/// Any step before the comparison fails. No process is left behind.
pub(crate) fn run(args: &Args) -> Result<ExitCode> {
    let bin = match &args.prebuilt {
        Some(dir) => dir.canonicalize().with_context(|| format!("no folder {}", dir.display()))?,
        None => {
            setup::run(&setup::Args::default())?;
            sys::run(sys::cargo().args(["build", "--workspace"]))?;
            sys::target_dir()?.join("debug")
        }
    };
    let work = tempfile::Builder::new().prefix("gpucr-demo-").tempdir();
    let work = work.context("cannot make a temporary folder")?;
    let demo = Demo {
        dir: work.path().to_path_buf(),
        bin,
        device: resolve(args.device),
        steps: args.steps,
        step_delay_ms: args.step_delay_ms,
    };
    let outcome = demo.play();
    if args.keep {
        sys::say("kept", work.keep().display());
    }
    // The verdict comes last, whatever else was said.
    match outcome? {
        Verdict::Identical(text) => println!("{}", sys::styled("1;32", &text)),
        Verdict::Different(text) => {
            println!("{}", sys::styled("1;31", &text));
            return Ok(ExitCode::FAILURE);
        }
    }
    Ok(ExitCode::SUCCESS)
}

fn resolve(asked: Device) -> Device {
    match asked {
        Device::Auto if has_gpu() => {
            sys::say("device", "NVIDIA GPU");
            Device::Cuda
        }
        Device::Auto => {
            sys::say("device", "software driver (no NVIDIA GPU with a driver found)");
            Device::Soft
        }
        Device::Cuda | Device::Soft => asked,
    }
}

/// Whether the kernel driver is loaded and its user-space library can be found.
fn has_gpu() -> bool {
    let cache = sys::capture(Command::new("/sbin/ldconfig").arg("-p")).unwrap_or_default();
    let known = cache.lines().any(|line| line.trim_start().starts_with("libcuda.so.1 "));
    let library = ["/usr/lib/x86_64-linux-gnu", "/usr/lib64", "/usr/local/nvidia/lib64"]
        .iter()
        .any(|dir| Path::new(dir).join("libcuda.so.1").exists());
    Path::new("/dev/nvidiactl").exists() && (known || library)
}

enum Verdict {
    Identical(String),
    Different(String),
}

struct Demo {
    /// Logs and image.
    dir: PathBuf,
    /// Where `gpucr` and `workload` were built.
    bin: PathBuf,
    device: Device,
    steps: u32,
    step_delay_ms: u64,
}

impl Demo {
    fn play(&self) -> Result<Verdict> {
        sys::headline("1. Train without interruption");
        let plain = self.train_through()?;

        sys::headline("2. Train again, dump half-way, kill");
        let image = self.dir.join("image");
        // On a slow machine the training waits here for its dump, rather than end before it.
        let pace = self.dir.join("pace");
        let allow = |steps: u32| {
            std::fs::write(&pace, vec![b'.'; steps as usize])
                .with_context(|| format!("cannot write {}", pace.display()))
        };
        allow(self.steps / 10 * 9)?;
        let mut program = self.start("interrupted", Some(&pace))?;
        let pid = self.await_step(&mut program, self.steps / 2)?;
        self.dump(pid, &image)?;
        let status = program.await_end("the dumped program")?;
        let cut = program.series()?.last_step();
        if Path::new(&format!("/proc/{pid}")).exists() {
            bail!("process {pid} is still there after the dump");
        }
        sys::say("process", format!("{pid} is gone ({}) after step {cut}", sys::ended(status)));

        sys::headline("3. Restore");
        allow(self.steps)?;
        self.restore(&image, pid)?;
        let restored = program.series()?;
        describe(&restored);

        sys::headline("4. Compare");
        let signs = if sys::fancy() { chart::UNICODE } else { chart::ASCII };
        print!("{}", chart::draw(&restored.curve(), &plain.curve(), cut, signs));
        println!();
        if cut >= self.steps {
            bail!("the training ended before the dump took effect; give it more --steps");
        }
        Ok(match restored.difference(&plain) {
            None => Verdict::Identical(format!(
                "identical: {} losses and the result equal those of the uninterrupted run",
                restored.losses.len()
            )),
            Some(difference) => Verdict::Different(format!(
                "different: the restored run has {difference} of the uninterrupted run"
            )),
        })
    }

    /// The uninterrupted run.
    fn train_through(&self) -> Result<Series> {
        let start = Instant::now();
        let mut program = self.start("plain", None)?;
        let status = program.await_end("the training")?;
        let series = program.series()?;
        if !status.success() || series.result.is_none() {
            bail!("the training failed ({}):\n{}", sys::ended(status), program.said());
        }
        sys::say("time", format!("{:.1} s", start.elapsed().as_secs_f64()));
        describe(&series);
        Ok(series)
    }

    /// Starts a training whose output goes to files. A restored program gets back the files that it
    /// had open, so pipes would not do. With a file for its pace it makes no more steps than that has
    /// bytes.
    fn start(&self, name: &str, pace: Option<&Path>) -> Result<Program> {
        let out = self.dir.join(format!("{name}.out"));
        let err = self.dir.join(format!("{name}.err"));
        // A session of its own: CRIU refuses a process that shares one with a terminal's shell.
        let mut command = self.command("setsid")?;
        command.arg(self.bin.join("gpucr")).args(["run", "--device"]);
        command.arg(if self.device == Device::Cuda { "cuda" } else { "soft" }).arg("--");
        command.arg(self.bin.join("workload")).args(["sgd", "--size", "small", "--seed", "7"]);
        command.args(["--steps", &self.steps.to_string()]);
        command.args(["--step-delay-ms", &self.step_delay_ms.to_string()]);
        if let Some(pace) = pace {
            command.arg("--pace").arg(pace);
        }
        command.stdout(create(&out)?).stderr(create(&err)?);
        let child = command.spawn().context("cannot start the training")?;
        Ok(Program { child, out, err })
    }

    /// Waits until the training has printed this step; returns its pid.
    fn await_step(&self, program: &mut Program, step: u32) -> Result<u32> {
        let deadline = Instant::now() + PATIENCE;
        loop {
            let series = program.series()?;
            if let (true, Some(pid)) = (series.last_step() >= step, series.pid) {
                sys::say("process", format!("{pid} has printed step {}", series.last_step()));
                return Ok(pid);
            }
            if let Some(status) = program.child.try_wait()? {
                bail!("the training ended early ({}):\n{}", sys::ended(status), program.said());
            }
            if Instant::now() > deadline {
                bail!("no step {step} after {} s:\n{}", PATIENCE.as_secs(), program.said());
            }
            std::thread::sleep(Duration::from_millis(5));
        }
    }

    /// Dumps and kills, and shows the figures.
    fn dump(&self, pid: u32, image: &Path) -> Result<()> {
        let mut command = self.command(self.bin.join("gpucr"))?;
        command.args(["dump", "--pid", &pid.to_string(), "--json", "-o"]).arg(image);
        let json = sys::capture(&mut command)?;
        let report: serde_json::Value = serde_json::from_str(json.trim())
            .with_context(|| format!("`gpucr dump --json` printed no JSON object:\n{json}"))?;
        let number = |name: &str| report[name].as_f64().unwrap_or(f64::NAN);
        let protocol = report["protocol"].as_str().unwrap_or("?");
        sys::say("dump", format!("{:.0} ms, protocol {protocol}", number("total_ms")));
        sys::say("stopped", format!("{:.0} ms", number("stopped_ms")));
        for phase in report["phases"].as_array().into_iter().flatten() {
            let (name, ms) = (phase["name"].as_str(), phase["ms"].as_f64());
            if let (Some(name), Some(ms)) = (name, ms) {
                sys::say("", format!("{name:<14} {ms:>7.1} ms"));
            }
        }
        let (bulk, stored) = (size(number("bulk_bytes")), size(number("stored_bytes")));
        sys::say("memory", format!("{bulk} of device memory, stored in {stored}"));
        let (files, bytes) = weigh(image)?;
        sys::say("image", format!("{} in {files} files", size(bytes as f64)));
        Ok(())
    }

    /// Restores in the foreground, so that this returns when the training has ended.
    fn restore(&self, image: &Path, pid: u32) -> Result<()> {
        let (out, err) = (self.dir.join("restore.out"), self.dir.join("restore.err"));
        let mut command = self.command(self.bin.join("gpucr"))?;
        command.arg("restore").arg(image).stdout(create(&out)?).stderr(create(&err)?);
        let start = Instant::now();
        let child = command.spawn().context("cannot start `gpucr restore`")?;
        let mut restore = Program { child, out, err };
        let ended = restore.await_end("the restored program");
        if ended.is_err() {
            // It holds the pid that it was dumped with, and is no child of ours.
            let pid = rustix::process::Pid::from_raw(pid.cast_signed());
            pid.map(|pid| rustix::process::kill_process(pid, rustix::process::Signal::KILL));
        }
        let status = ended?;
        if !status.success() {
            bail!("`gpucr restore` failed ({}):\n{}", sys::ended(status), restore.said());
        }
        let seconds = start.elapsed().as_secs_f64();
        sys::say("process", format!("{pid} carried on and ended well, {seconds:.1} s"));
        Ok(())
    }

    /// A command with no input, and without the library folders of cargo.
    fn command(&self, program: impl AsRef<std::ffi::OsStr>) -> Result<Command> {
        let mut command = Command::new(program);
        command.current_dir(&self.dir).stdin(Stdio::null()).env_remove("LD_LIBRARY_PATH");
        if let Some(path) = sys::library_path()? {
            command.env("LD_LIBRARY_PATH", path);
        }
        Ok(command)
    }
}

/// A started program, ended at the latest when this is dropped.
struct Program {
    child: Child,
    out: PathBuf,
    err: PathBuf,
}

impl Program {
    fn series(&self) -> Result<Series> {
        let text = std::fs::read_to_string(&self.out);
        Ok(Series::parse(&text.with_context(|| format!("cannot read {}", self.out.display()))?))
    }

    /// The end of what it printed.
    fn said(&self) -> String {
        let text = |file| std::fs::read_to_string(file).unwrap_or_default();
        sys::tail(&format!("{}{}", text(&self.out), text(&self.err)), 25)
    }

    fn await_end(&mut self, what: &str) -> Result<ExitStatus> {
        let deadline = Instant::now() + PATIENCE;
        loop {
            if let Some(status) = self.child.try_wait()? {
                return Ok(status);
            }
            if Instant::now() > deadline {
                bail!("{what} did not end in {} s:\n{}", PATIENCE.as_secs(), self.said());
            }
            std::thread::sleep(Duration::from_millis(5));
        }
    }
}

impl Drop for Program {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

fn create(file: &Path) -> Result<File> {
    File::create(file).with_context(|| format!("cannot write {}", file.display()))
}

fn describe(series: &Series) {
    let curve = series.curve();
    if let (Some((_, first)), Some((_, last))) = (curve.first(), curve.last()) {
        let steps = series.last_step();
        sys::say("training", format!("{steps} steps, loss from {first:.4} to {last:.4}"));
    }
    sys::say("result", series.result.as_deref().unwrap_or("none"));
}

/// Number and total size of the files under a folder.
fn weigh(dir: &Path) -> Result<(u64, u64)> {
    let (mut files, mut bytes) = (0, 0);
    for entry in dir.read_dir().with_context(|| format!("cannot read {}", dir.display()))? {
        let entry = entry?;
        let meta = entry.metadata()?;
        if meta.is_dir() {
            let (inner_files, inner_bytes) = weigh(&entry.path())?;
            files += inner_files;
            bytes += inner_bytes;
        } else {
            files += 1;
            bytes += meta.len();
        }
    }
    Ok((files, bytes))
}

/// A number of bytes for a reader.
fn size(bytes: f64) -> String {
    const UNITS: [&str; 4] = ["bytes", "KiB", "MiB", "GiB"];
    let mut value = bytes;
    let mut unit = 0;
    while value >= 1024.0 && unit < UNITS.len() - 1 {
        value /= 1024.0;
        unit += 1;
    }
    if unit == 0 { format!("{value:.0} bytes") } else { format!("{value:.1} {}", UNITS[unit]) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_for_readers() {
        assert_eq!(size(0.0), "0 bytes");
        assert_eq!(size(1536.0), "1.5 KiB");
        assert_eq!(size(3.0 * 1024.0 * 1024.0 * 1024.0 * 1024.0), "3072.0 GiB");
    }
}
