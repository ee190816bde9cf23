//! Host memory that is copied while the program runs.
//!
//!     GPUCR_RANDOM_DUMPS=1000 cargo nextest run -p gpucr-tests -E 'binary(host_memory)' --run-ignored only
//!         --no-capture    # many dumps at random moments; GPUCR_RANDOM_SEED is where they begin

use std::time::Duration;

use anyhow::{Context, Result, bail, ensure};
use gpucr_core::process::why_untracked;
use gpucr_tests::{
    Lab, Pace, PausedDump, Program, Random, finish, number, show, undisturbed, until,
};
use serde_json::Value;

const NAME: &str = "host-memory";
/// Few enough steps that each is printed.
const STEPS: [&str; 2] = ["--steps", "99"];
const BEFORE_THE_END: usize = 80;

/// Whether memory can be tracked here.
fn is_tracked() -> bool {
    let why = why_untracked();
    if let Some(why) = &why {
        gpucr_tests::skip(&format!("host memory cannot be tracked: {why}"));
    }
    why.is_none()
}

struct Setting {
    lab: Lab,
    pace: Pace,
    program: Program,
    expected: Vec<String>,
}

impl Setting {
    /// A program that is at work, and waits after so many steps.
    fn with(seed: u64, steps: usize) -> Result<Self> {
        let seed = seed.to_string();
        let args = [&STEPS[..], &["--seed", &seed]].concat();
        let expected = undisturbed(NAME, &args)?;
        let (lab, pace) = (Lab::new(), Pace::new()?);
        pace.allow(steps)?;
        let args = [&args[..], &["--step-delay-ms", "5", "--pace", pace.file()]].concat();
        let mut program = lab.start(NAME, &args)?;
        program.wait_for("ready")?;
        Ok(Self { lab, pace, program, expected })
    }

    fn is_watched(&self) -> Result<bool> {
        is_watched(self.program.pid)
    }

    /// Lets the program make some steps.
    fn steps(&mut self, count: usize) -> Result<()> {
        let before = made(&self.program);
        self.pace.allow(count)?;
        until("it makes steps", || made(&self.program) >= before + count)
    }

    /// The program, and what is restored from `image` after it, end as if nothing had been.
    fn both_end_well(mut self, image: &str) -> Result<()> {
        self.pace.allow_all()?;
        self.program.result()?;
        ensure!(
            self.program.series() == self.expected,
            "it ran on to {:#?}",
            self.program.series()
        );
        let image = self.lab.path(image);
        self.lab.rewind(&self.program, &image)?;
        let mut restored = self.lab.restore(&image, self.program)?;
        restored.result()?;
        ensure!(restored.series() == self.expected, "restored: {:#?}", restored.series());
        Ok(())
    }
}

fn made(program: &Program) -> usize {
    program.output().lines().filter(|line| line.starts_with("step ")).count()
}

/// Whether a userfaultfd watches memory of the process.
fn is_watched(pid: u32) -> Result<bool> {
    let smaps = std::fs::read_to_string(format!("/proc/{pid}/smaps"))?;
    let flags = smaps.lines().filter_map(|line| line.strip_prefix("VmFlags:"));
    Ok(flags.flat_map(str::split_whitespace).any(|flag| flag == "uw"))
}

fn has_userfaultfd(pid: u32) -> Result<bool> {
    for entry in std::fs::read_dir(format!("/proc/{pid}/fd"))? {
        let target = std::fs::read_link(entry?.path()).unwrap_or_default();
        if target.to_string_lossy().contains("userfaultfd") {
            return Ok(true);
        }
    }
    Ok(false)
}

fn host(report: &Value, name: &str) -> Result<u64> {
    report["host"][name].as_u64().with_context(|| format!("no {name} in {report:#}"))
}

#[test]
fn what_was_written_after_it_was_copied_is_found_and_the_rest_is_not_read() -> Result<()> {
    if !is_tracked() {
        return Ok(());
    }
    let mut setting = Setting::with(1, 8)?;
    setting.steps(0)?;
    until("it waits", || made(&setting.program) >= 8)?;
    let args = ["-R", "--protocol", "recopy"];
    let checked = [("GPUCR_HOST_AHEAD", "check")];
    let dump =
        PausedDump::start_with(&setting.lab, &setting.program, &args, &checked, "hold:gate")?;
    ensure!(setting.is_watched()?, "nothing is tracked");
    ensure!(!has_userfaultfd(setting.program.pid)?, "the program has kept a descriptor");
    setting.steps(4)?;
    let report = dump.finish()?;
    ensure!(host(&report, "tracked")? == 1 && host(&report, "passes")? > 0, "{report:#}");
    ensure!(host(&report, "unseen_bytes")? == 0, "{report:#}");
    let (kept, changed) = (host(&report, "kept_bytes")?, host(&report, "changed_bytes")?);
    // Four words of 4 MiB were written, and all other memory changed here and there.
    ensure!(kept > 2 << 20 && changed > 0, "{report:#}");
    ensure!(host(&report, "pinned_bytes")? >= 64 << 10, "{report:#}");
    ensure!(host(&report, "left_bytes")? > 0, "{report:#}");
    ensure!(!setting.is_watched()?, "it is still tracked");
    setting.both_end_well("image")
}

#[test]
fn without_the_check_the_image_is_wrong() -> Result<()> {
    if !is_tracked() {
        return Ok(());
    }
    let mut setting = Setting::with(2, 8)?;
    until("it waits", || made(&setting.program) >= 8)?;
    let args = ["--protocol", "recopy"];
    let faults = "hold:gate,skip:host-memory";
    let dump = PausedDump::start_with(&setting.lab, &setting.program, &args, &[], faults)?;
    setting.steps(20)?;
    let report = dump.finish()?;
    ensure!(host(&report, "kept_bytes")? > 0, "{report:#}");
    setting.pace.allow_all()?;
    // Pages of its heap and its stacks are of another moment than its registers: it may not even come to an end.
    let restored = setting.lab.restore(&setting.lab.path("image"), setting.program);
    let ended = restored.and_then(|mut restored| {
        restored.result()?;
        Ok(restored.series())
    });
    ensure!(ended.ok() != Some(setting.expected), "nothing was wrong");
    Ok(())
}

/// Whatever comes of a dump, the program runs on and nobody watches its memory any more.
#[test]
fn nothing_is_tracked_after_a_dump() -> Result<()> {
    if !is_tracked() {
        return Ok(());
    }
    let mut setting = Setting::with(3, 5)?;
    for faults in ["fail:gate", "fail:criu", "kill:gate", "kill:criu", "fail:commit"] {
        let mut command = setting.lab.gpucr();
        command.args(["dump", "--pid", &setting.program.pid.to_string(), "-o", "failed"]);
        let output = finish(command.env("GPUCR_FAULT", faults))?;
        ensure!(!output.status.success(), "{faults}: {}", show(&output));
        let pid = setting.program.pid;
        until("it is not tracked", || is_watched(pid).is_ok_and(|watched| !watched))?;
        setting.steps(3)?;
    }
    for protocol in ["stop", "recopy", "cow"] {
        let mut command = setting.lab.gpucr();
        command.args(["dump", "--json", "-R", "--protocol", protocol, "-o", protocol]);
        command.args(["--pid", &setting.program.pid.to_string()]);
        let output = finish(&mut command)?;
        ensure!(output.status.success(), "{protocol}: {}", show(&output));
        let report: Value = serde_json::from_slice(&output.stdout)?;
        ensure!(report["host"].is_null() == (protocol == "stop"), "{report:#}");
        ensure!(!setting.is_watched()?, "{protocol}: it is still tracked");
        setting.steps(3)?;
    }
    setting.both_end_well("cow")
}

/// Memory that was not copied ahead is copied aside, so that a program that runs on need not wait for the disk.
#[test]
fn a_program_runs_on_before_its_memory_is_written() -> Result<()> {
    if !is_tracked() {
        return Ok(());
    }
    let mut setting = Setting::with(5, 5)?;
    for (image, limit) in [("none", Some("0")), ("little", Some("4K")), ("aside", None)] {
        let mut command = setting.lab.gpucr();
        command.args(["dump", "--json", "-R", "--protocol", "cow", "-o", image]);
        command.args(["--pid", &setting.program.pid.to_string()]);
        command.args(limit.iter().flat_map(|limit| ["--host-memory-limit", limit]));
        let output = finish(&mut command)?;
        ensure!(output.status.success(), "{image}: {}", show(&output));
        let report: Value = serde_json::from_slice(&output.stdout)?;
        let (left, aside) = (host(&report, "left_bytes")?, host(&report, "aside_bytes")?);
        // Beside what is left, files of pages have what CRIU has written.
        ensure!((aside >= left) == limit.is_none(), "{image}: {report:#}");
        ensure!((aside == 0) == limit.is_some(), "{image}: {report:#}");
        setting.steps(3)?;
        let image = setting.lab.path(image);
        let output = finish(setting.lab.gpucr().arg("verify").arg(&image))?;
        ensure!(output.status.success(), "{}", show(&output));
    }
    setting.both_end_well("aside")
}

#[test]
fn it_can_be_switched_off_or_hashed() -> Result<()> {
    let mut setting = Setting::with(4, 5)?;
    for mode in ["0", "hash"] {
        let mut command = setting.lab.gpucr();
        command.args(["dump", "-R", "--json", "--protocol", "recopy", "-o", mode]);
        command.args(["--pid", &setting.program.pid.to_string()]);
        let output = finish(command.env("GPUCR_HOST_AHEAD", mode))?;
        ensure!(output.status.success(), "{mode}: {}", show(&output));
        let report: Value = serde_json::from_slice(&output.stdout)?;
        if mode == "0" {
            ensure!(report["host"].is_null(), "{report:#}");
        } else {
            ensure!(
                host(&report, "tracked")? == 0 && host(&report, "kept_bytes")? == 0,
                "{report:#}"
            );
            ensure!(host(&report, "ahead_bytes")? > 0, "{report:#}");
        }
        setting.steps(3)?;
    }
    setting.both_end_well("hash")
}

/// One dump at a random moment; what tracking says is compared with what is there. Gives the bytes that need not be
/// read.
fn dump(setting: &Setting, image: &str, last: bool, random: &mut Random) -> Result<u64> {
    std::thread::sleep(Duration::from_millis(random.below(200)));
    let protocol = if last && random.below(2) == 0 { "cow" } else { "recopy" };
    let mut command = setting.lab.gpucr();
    command.args(["dump", "--json", "--protocol", protocol, "-o", image]);
    command.args(["--pid", &setting.program.pid.to_string(), "--compress", "none"]);
    command.args(last.then_some("--leave-running"));
    // Half of the dumps are as those of users: what is read to be compared takes time.
    let is_checked = random.below(2) == 0;
    if is_checked {
        command.env("GPUCR_HOST_AHEAD", "check");
    }
    let output = finish(&mut command)?;
    ensure!(output.status.success(), "{}\n{}", show(&output), setting.program.output());
    let report: Value = serde_json::from_slice(&output.stdout)?;
    if report["host"].is_null() {
        return Ok(0);
    }
    if is_checked && report["host"]["unseen_bytes"].as_u64() > Some(0) {
        bail!("writes were not seen: {report:#}");
    }
    host(&report, "kept_bytes")
}

/// Dumps a program three times at random moments. Gives the bytes that need not be read.
fn dumped_at_random(seed: u64) -> Result<u64> {
    let mut random = Random(seed);
    let mut setting = Setting::with(seed, BEFORE_THE_END)?;
    let mut kept = 0;
    for number in 1..3 {
        let image = format!("image-{number}");
        kept += dump(&setting, &image, false, &mut random)?;
        // A restored program must print something to show that it lives.
        setting.pace.allow(1)?;
        setting.program = setting.lab.restore(&setting.lab.path(&image), setting.program)?;
    }
    kept += dump(&setting, "last", true, &mut random)?;
    setting.both_end_well("last")?;
    Ok(kept)
}

fn dumped_at_random_from(first: u64, dumps: u64) -> Result<()> {
    let mut kept = 0;
    for seed in first..first + dumps.div_ceil(3) {
        kept += dumped_at_random(seed).with_context(|| format!("seed {seed}"))?;
    }
    println!("{dumps} dumps; {kept} bytes were not read at the stop");
    ensure!(kept > 0 || why_untracked().is_some(), "nothing was copied ahead");
    Ok(())
}

#[test]
fn programs_that_write_in_every_way_end_as_if_nobody_had_touched_them() -> Result<()> {
    dumped_at_random_from(number("GPUCR_RANDOM_SEED", 1)?, 6)
}

#[test]
#[ignore = "takes an hour"]
fn many_of_them() -> Result<()> {
    dumped_at_random_from(number("GPUCR_RANDOM_SEED", 1)?, number("GPUCR_RANDOM_DUMPS", 1000)?)
}
