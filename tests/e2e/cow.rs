//! Protocol `cow` without room for shadows: the program goes on while its memory is still to be saved,
//! and launches that may write it wait.
//!
//! The program is `seldom`: each step writes to every chunk of its memory, through pointers that hide
//! in memory. gpucr sees in its code that it follows such pointers, so its launches wait for
//! everything. Where gpucr is kept from looking at the code (`skip:summaries`) they do not wait.

use std::process::Stdio;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use gpucr_tests::{Lab, Pace, Program, SmallDisk, Started, finish, undisturbed, until};
use serde_json::Value;

/// Eight pools of two chunks.
const CHUNKS: u64 = 16;
/// At this rate, GB/s, a chunk takes a quarter of a second, and all of them four.
const SLOW: (&str, &str) = ("SOFTCUDA_PCIE_GBPS", "0.008");
const CHUNK_MS: f64 = 262.0;
const STEPS: usize = 200;

fn expected() -> Result<Vec<String>> {
    undisturbed("seldom", &["--steps", &STEPS.to_string()])
}

/// A program that makes steps until the test lets it end.
fn started(lab: &Lab, pace: &Pace) -> Result<Program> {
    pace.allow(STEPS - 1)?;
    let steps = STEPS.to_string();
    // Half a minute of steps: what a dump does before the program goes on takes a fraction of that.
    let args = ["--steps", &steps, "--step-delay-ms", "150", "--pace", pace.file()];
    let mut program = lab.start("seldom", &args)?;
    program.wait_for("step ")?;
    Ok(program)
}

fn command(lab: &Lab, program: &Program, faults: &str) -> std::process::Command {
    let mut command = lab.gpucr();
    command
        .args(["dump", "--json", "-R", "--protocol", "cow", "--shadow-memory", "0", "-o", "image"])
        .args(["--timeline", "dump.json", "--pid", &program.pid.to_string()])
        .env("GPUCR_FAULT", faults)
        .env(SLOW.0, SLOW.1);
    command
}

/// Dumps it. Of what is saved late no more is stored than a chunk or two before the program has gone on: however long
/// CRIU takes, which does its part meanwhile.
fn dump(lab: &Lab, program: &Program, faults: &str) -> Result<Value> {
    let faults = [faults, "hold:deferred"].join(",");
    let (go, log, out) = (lab.path("go"), lab.path("dump.log"), lab.path("report"));
    let mut command = command(lab, program, &faults);
    command.env("GPUCR_FAULT_FILE", &go).env("GPUCR_LOG", "gpucr_core=debug").env("NO_COLOR", "1");
    command.stdout(std::fs::File::create(&out)?).stderr(std::fs::File::create(&log)?);
    let mut gpucr = Started::spawn(&mut command)?;
    let said = || std::fs::read_to_string(&log).unwrap_or_default();
    until("the program goes on", || stores(&said()) > 0).with_context(said)?;
    std::fs::write(&go, "")?;
    let status = gpucr.wait()?;
    ensure!(status.success(), "{status}: {}\n{}", said(), program.output());
    let report: Value = serde_json::from_slice(&std::fs::read(&out)?)?;
    for file in [go, log, out] {
        std::fs::remove_file(file)?;
    }
    ensure!(report["protocol"] == "cow" && report["left_running"] == true, "{report}");
    Ok(report)
}

/// How often a dump has come to where the program has gone on, by its log.
fn stores(log: &str) -> usize {
    log.matches("phase=\"store\"").count()
}

fn count(value: &Value, name: &str) -> Result<u64> {
    value[name].as_u64().with_context(|| format!("no {name}: {value}"))
}

/// The program that ran on and the one restored from the image both end as if nothing had happened.
fn both_end_well(lab: &Lab, pace: &Pace, mut program: Program) -> Result<()> {
    let expected = expected()?;
    pace.hurry()?;
    program.result()?;
    ensure!(program.series() == expected, "the program that ran on: {:#?}", program.series());
    let image = lab.path("image");
    lab.rewind(&program, &image)?;
    let mut restored = lab.restore(&image, program)?;
    restored.result()?;
    ensure!(restored.series() == expected, "{:#?}\nis not {expected:#?}", restored.series());
    Ok(())
}

#[test]
fn the_program_does_not_stand_still_for_the_copy() -> Result<()> {
    let lab = Lab::new();
    let pace = Pace::new()?;
    let program = started(&lab, &pace)?;
    let report = dump(&lab, &program, "")?;
    let late = &report["deferral"];
    ensure!(count(&report, "shadowed_bytes")? == 0, "{report}");
    ensure!(count(late, "chunks")? >= CHUNKS && count(late, "misspeculated")? == 0, "{report}");
    ensure!(count(late, "blocked")? > 0, "{report}");
    // It went on while the copy was held up at its first chunk, or `dump` would have waited for ever.
    waits_are_in_the_timeline(&lab, late)?;
    both_end_well(&lab, &pace, program)
}

/// Each wait of a call is an event, while the memory was saved and the program ran.
fn waits_are_in_the_timeline(lab: &Lab, late: &Value) -> Result<()> {
    let trace: Value = serde_json::from_str(&std::fs::read_to_string(lab.path("dump.json"))?)?;
    let events = trace["traceEvents"].as_array().context("events")?;
    let length = |event: &Value| event["dur"].as_f64().context("a length");
    let named = |name: &'static str| events.iter().filter(move |event| event["name"] == *name);
    let waits: Vec<&Value> = named("blocked").collect();
    ensure!(waits.len() as u64 >= count(late, "blocked")?.min(255), "{waits:?}\n{late}");
    let copied = named("deferred").next().context("a deferred copy")?;
    let begin = |event: &Value| event["ts"].as_f64().context("a begin");
    let mut waited = 0.0;
    for wait in &waits {
        waited += length(wait)? / 1e3;
        // It was woken when the copy ended, and looked at the clock a little later.
        let late = begin(wait)? + length(wait)? - begin(copied)? - length(copied)?;
        ensure!(begin(wait)? >= begin(copied)? && late < 1e6, "{wait} and {copied}");
    }
    let blocked_ms = late["blocked_ms"].as_f64().context("a time")?;
    ensure!(waits.len() > 255 || (waited - blocked_ms).abs() < 1.0, "{waited} ms, {late}");
    Ok(())
}

/// The old way, for comparison: what finds no room is copied while the program stands still.
#[test]
fn otherwise_it_would() -> Result<()> {
    let lab = Lab::new();
    let pace = Pace::new()?;
    let program = started(&lab, &pace)?;
    let report = dump(&lab, &program, "skip:defer")?;
    ensure!(report["deferral"].is_null(), "{report}");
    let stopped = report["stopped_ms"].as_f64().context("a time")?;
    ensure!(stopped > CHUNK_MS * (CHUNKS - 1) as f64, "{report}");
    both_end_well(&lab, &pace, program)
}

#[test]
fn what_is_written_too_early_is_found_and_the_dump_falls_back() -> Result<()> {
    let lab = Lab::new();
    let pace = Pace::new()?;
    let program = started(&lab, &pace)?;
    let report = dump(&lab, &program, "skip:summaries")?;
    let late = &report["deferral"];
    ensure!(count(late, "misspeculated")? > 0, "{report}");
    let named = late["misspeculations"].as_array().context("a list")?;
    ensure!(!named.is_empty(), "{report}");
    let phases = report["phases"].as_array().context("phases")?;
    let gates = phases.iter().filter(|phase| phase["name"] == "gate").count();
    ensure!(gates == 2 && phases.iter().any(|phase| phase["name"] == "fallback"), "{report}");
    both_end_well(&lab, &pace, program)
}

/// Without the comparison the image holds what was written after the program went on.
#[test]
fn without_the_comparison_the_image_is_wrong() -> Result<()> {
    let lab = Lab::new();
    let pace = Pace::new()?;
    let mut program = started(&lab, &pace)?;
    let report = dump(&lab, &program, "skip:summaries,skip:compare")?;
    ensure!(count(&report["deferral"], "misspeculated")? == 0, "{report}");
    pace.hurry()?;
    program.result()?;
    let image = lab.path("image");
    lab.rewind(&program, &image)?;
    let mut restored = lab.restore(&image, program)?;
    let result = restored.result();
    ensure!(result.is_err(), "the program found nothing wrong: {result:?}");
    ensure!(restored.output().contains("is wrong"), "{}", restored.output());
    Ok(())
}

/// A program that makes steps for longer than any test takes. It compares each with what it expects.
fn endless(lab: &Lab) -> Result<Program> {
    let args = ["--steps", "10000", "--step-delay-ms", "20"];
    let mut program = lab.start("seldom", &args)?;
    program.wait_for("ready")?;
    Ok(program)
}

/// A kernel that was found out waits the next time.
#[test]
fn what_was_learnt_counts_for_later_dumps() -> Result<()> {
    let lab = Lab::new();
    let program = endless(&lab)?;
    let (reports, log, go) = (lab.path("reports"), lab.path("said"), lab.path("go"));
    let mut gpucr = lab.gpucr();
    gpucr
        .args(["dump", "--json", "--every", "1s", "--store", "store", "--protocol", "cow"])
        .args(["--shadow-memory", "0", "--pid", &program.pid.to_string()])
        .env("GPUCR_FAULT", "skip:summaries,hold:deferred")
        .env("GPUCR_FAULT_FILE", &go)
        .env("GPUCR_LOG", "gpucr_core=debug")
        .env("NO_COLOR", "1")
        .env(SLOW.0, "0.02")
        .stdin(Stdio::null())
        .stdout(std::fs::File::create(&reports)?)
        .stderr(std::fs::File::create(&log)?);
    let mut gpucr = Started::spawn(&mut gpucr)?;
    let said = || -> Result<Vec<Value>> {
        let text = std::fs::read_to_string(&reports)?;
        let complete = text.rfind('\n').map_or("", |end| &text[..end]);
        Ok(complete.lines().map(serde_json::from_str).collect::<Result<_, _>>()?)
    };
    let logged = || std::fs::read_to_string(&log).unwrap_or_default();
    // The first comes there a second time, when it has fallen back.
    for (dumps, gone_on) in [(1, 1), (2, 3)] {
        // What is saved late waits until the program has gone on.
        until("the program goes on", || stores(&logged()) >= gone_on).with_context(logged)?;
        std::fs::write(&go, "")?;
        until("the dump ends", || said().is_ok_and(|said| said.len() >= dumps))
            .with_context(logged)?;
        std::fs::remove_file(&go)?;
        ensure!(gpucr.try_wait()?.is_none(), "{}", logged());
    }
    let found = said()?;
    ensure!(count(&found[0]["deferral"], "misspeculated")? > 0, "{}", found[0]);
    ensure!(count(&found[1]["deferral"], "misspeculated")? == 0, "{}", found[1]);
    ensure!(count(&found[1]["deferral"], "blocked")? > 0, "{}", found[1]);
    Ok(())
}

/// Starts a dump and waits until the program waits for it.
fn waiting(lab: &Lab, program: &Program) -> Result<Started> {
    let log = std::fs::File::create(lab.path("dump.log"))?;
    let mut command = command(lab, program, "");
    command
        .env("GPUCR_LOG", "gpucr_core=debug")
        .env("NO_COLOR", "1")
        .stdout(log.try_clone()?)
        .stderr(log);
    let running = Started::spawn(&mut command)?;
    let said = || std::fs::read_to_string(lab.path("dump.log")).unwrap_or_default();
    until("the program goes on", || said().contains("phase=\"store\"")).with_context(said)?;
    // A step takes 20 ms, and the first launch after the gate waits for seconds.
    std::thread::sleep(Duration::from_millis(300));
    Ok(running)
}

/// Disks that are full at ever later points, some of them when the program has gone on.
#[test]
fn a_full_disk_lets_everybody_go() -> Result<()> {
    let lab = Lab::new();
    let mut program = endless(&lab)?;
    let mut concurrent = 0;
    for mib in (16..).step_by(8) {
        let disk = SmallDisk::mount(lab.path("disk"), mib << 10)?;
        let mut command = lab.gpucr();
        command
            .args(["dump", "-R", "--protocol", "cow", "--shadow-memory", "0", "-o", "disk/image"])
            .args(["--pid", &program.pid.to_string()])
            .env(SLOW.0, "0.05");
        let output = finish(&mut command)?;
        ensure!(program.is_running(), "{}", program.output());
        if output.status.success() {
            break;
        }
        let left: Vec<_> = std::fs::read_dir(lab.path("disk"))?.collect();
        ensure!(left.is_empty(), "left on the full disk: {left:?}");
        let message = String::from_utf8_lossy(&output.stderr).into_owned();
        ensure!(output.status.code() == Some(1) && message.contains("space"), "{message}");
        if ["phase store", "phase commit"].iter().any(|phase| message.contains(phase)) {
            program.wait_for_progress()?;
            concurrent += 1;
        }
        drop(disk);
    }
    ensure!(concurrent > 0, "the disk was never full while the program ran");
    Ok(())
}

/// The disk seems to hang: whatever gpucr does there comes to no end for as long as the test wants.
#[test]
fn nobody_waits_for_a_disk_that_hangs() -> Result<()> {
    let lab = Lab::new();
    let pace = Pace::new()?;
    let mut program = started(&lab, &pace)?;
    let (go, log) = (lab.path("go"), lab.path("dump.log"));
    let mut command = command(&lab, &program, "hold:deferred,hold:store");
    command.env("GPUCR_FAULT_FILE", &go).env("GPUCR_LOG", "gpucr_core=debug").env("NO_COLOR", "1");
    command.stdout(Stdio::null()).stderr(std::fs::File::create(&log)?);
    let mut gpucr = Started::spawn(&mut command)?;
    let said = || std::fs::read_to_string(&log).unwrap_or_default();
    until("the program goes on", || said().contains("phase=\"store\"")).with_context(said)?;
    let since = Instant::now();
    // A step takes 150 ms, and the first launch after the gate waits for everything.
    std::thread::sleep(Duration::from_millis(600));
    program.wait_for_progress()?;
    ensure!(since.elapsed() > Duration::from_secs(5), "it has not waited");
    ensure!(gpucr.try_wait()?.is_none(), "{}", said());
    std::fs::write(&go, "")?;
    let status = gpucr.wait()?;
    let said = said();
    ensure!(status.code() == Some(1) && said.contains("none of its memory"), "{status}: {said}");
    ensure!(said.contains("no image"), "{said}");
    lab.holds_only(&["log", "dump.log", "dump.json", "go"])?;
    pace.hurry()?;
    program.result()?;
    ensure!(program.series() == expected()?, "{:#?}", program.series());
    Ok(())
}

#[test]
fn launches_that_wait_go_on_when_gpucr_dies() -> Result<()> {
    use rustix::process::{Pid, Signal, kill_process};
    let expected = expected()?;
    for signal in [Signal::KILL, Signal::TERM] {
        let lab = Lab::new();
        let pace = Pace::new()?;
        let mut program = started(&lab, &pace)?;
        let mut gpucr = waiting(&lab, &program)?;
        let before = program.output();
        kill_process(Pid::from_child(&gpucr), signal)?;
        let status = gpucr.wait()?;
        ensure!(!status.success(), "{signal:?}: {status}");
        program.wait_for_progress()?;
        ensure!(!before.contains("result"), "{signal:?}: it had ended before");
        pace.hurry()?;
        program.result()?;
        ensure!(program.series() == expected, "{signal:?}: {:#?}", program.series());
        lab.holds_only(&["log", "dump.log", "dump.json"])?;
    }
    Ok(())
}
