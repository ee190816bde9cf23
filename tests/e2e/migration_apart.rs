//! A destination that has pids and a network of its own makes the processes before it is handed the program.

use std::time::Duration;

use anyhow::{Context, Result, ensure};
use gpucr_tests::migrated::{End, is_so};
use gpucr_tests::migration::{Pair, Side, Sides, ends_well, made};
use gpucr_tests::{Lab, refused, show, undisturbed, until};

const ARGS: [&str; 4] = ["--steps", "100", "--step-delay-ms", "20"];
const WORKLOAD: &str = "sgd";

#[test]
fn a_program_is_made_before_it_is_handed_over_and_runs_only_then() -> Result<()> {
    let expected = undisturbed(WORKLOAD, &ARGS[..2])?;
    let lab = Lab::new();
    let mut program = lab.at_work(WORKLOAD, &ARGS)?;
    let go_on = lab.path("go-on");
    let mut pair = Pair::apart(&lab, &program)?;
    pair.source.env("GPUCR_FAULT", "hold:decide").env("GPUCR_FAULT_FILE", &go_on);
    let Pair { mut source, mut destination, sockets } = pair;
    let (mut source, mut destination) = (Side::start(&mut source)?, Side::start(&mut destination)?);
    drop(sockets);
    until("its processes are made", || {
        made(&program).is_some() || !source.is_at_work() || !destination.is_at_work()
    })?;
    let before = program.output();
    std::thread::sleep(Duration::from_millis(300));
    ensure!(program.output() == before, "it runs nowhere");
    if !source.is_at_work() || !destination.is_at_work() {
        let sides = Sides { source: source.end()?, destination: destination.end()? };
        anyhow::bail!("both were to wait for the decision: {}", sides.show());
    }
    std::fs::write(&go_on, "")?;
    until("both sides end", || {
        program.is_running();
        !source.is_at_work() & !destination.is_at_work()
    })?;
    std::fs::remove_file(&go_on)?;
    let sides = Sides { source: source.end()?, destination: destination.end()? };
    let (source, _) = sides.reports()?;
    let pid = made(&program).context("it runs there")?;
    ensure!(source["new_pid"] == pid, "{source}");
    program.pid = pid;
    ends_well(&mut program, &expected)
}

#[test]
fn what_fails_at_the_destination_before_the_decision_leaves_the_program_at_the_source() -> Result<()>
{
    use End::{GoesParked, GoesUnheard, Stays, StaysWithImage};
    let expected = undisturbed(WORKLOAD, &ARGS[..2])?;
    for (source, destination, end) in [
        // In the process that restores.
        ("", "fail:criu", Stays),
        ("", "kill:criu", Stays),
        ("", "fail:made", Stays),
        ("", "kill:made", StaysWithImage),
        ("fail:decide", "", Stays),
        ("kill:decided", "", GoesUnheard),
        ("", "kill:decide", GoesUnheard),
        ("", "kill:handover", GoesParked),
        ("", "fail:driver", GoesParked),
        ("", "kill:attach", GoesParked),
    ] {
        let lab = Lab::new();
        let mut program = lab.at_work(WORKLOAD, &ARGS)?;
        let mut pair = Pair::apart(&lab, &program)?;
        pair.source.env("GPUCR_FAULT", source);
        pair.destination.env("GPUCR_FAULT", destination);
        let sides = pair.run(&mut program)?;
        let told = || format!("{source} {destination} {end:?}: {}", sides.show());
        ensure!(!sides.destination.status.success(), "{}", told());
        ensure!(!sides.source.status.success(), "{}", show(&sides.source));
        until("what was made is gone", || made(&program).is_none()).with_context(told)?;
        is_so(&lab, program, end, &expected).with_context(told)?;
    }
    Ok(())
}

/// Two processes that share memory, each on a device of its own, change places: there, and where processes are made before
/// the decision; the second time each comes back to where it was.
#[test]
fn a_group_migrates_to_other_devices() -> Result<()> {
    const COUNT: (&str, &str) = ("SOFTCUDA_DEVICES", "2");
    let mut lab = Lab::of("ring");
    lab.environment.push((COUNT.0.into(), COUNT.1.into()));
    let steps = ["--steps", "40"];
    let mut program = lab.start("ring", &steps)?;
    program.result()?;
    let expected = program.series();
    let mut program = lab.at_work("ring", &steps)?;
    for is_apart in [false, true] {
        let mut pair = match is_apart {
            true => Pair::apart(&lab, &program)?,
            false => Pair::new(&lab, &program)?,
        };
        pair.source.env(COUNT.0, COUNT.1);
        pair.destination.env(COUNT.0, COUNT.1).args(["--device-map", "0=1,1=0"]);
        let sides = pair.run(&mut program)?;
        let (source, _) = sides.reports()?;
        let told = String::from_utf8_lossy(&sides.destination.stderr).into_owned();
        ensure!(told.matches("has moved from the").count() == 2, "{told}");
        let pid = source["new_pid"].as_u64().with_context(|| sides.show())?;
        program.pid = u32::try_from(pid)?;
        let before = program.output().len();
        program.allow(2)?;
        until("it goes on", || program.output().len() > before)?;
    }
    ends_well(&mut program, &expected)
}

#[test]
fn both_sides_are_in_one_timeline_and_passes_are_told() -> Result<()> {
    let expected = undisturbed(WORKLOAD, &ARGS[..2])?;
    let lab = Lab::new();
    let mut program = lab.at_work(WORKLOAD, &ARGS)?;
    let mut pair = Pair::apart(&lab, &program)?;
    pair.source.args(["--timeline", "time.json", "--events", "events", "--bandwidth", "50MB"]);
    pair.source.args(["--max-downtime", "2s"]);
    let (source, _) = pair.run(&mut program)?.reports()?;
    let sent = source["sent_bytes"].as_f64().context("it has sent something")?;
    let total = source["total_ms"].as_f64().context("that took time")?;
    ensure!(sent / total < 50e6 / 1000.0, "it keeps below the rate: {source}");
    let mut passes = lab.events("events")?;
    passes.retain(|event| event["event"] == "pass");
    ensure!(passes.iter().all(|pass| pass["written_per_s"].is_number()), "{passes:?}");
    let report = lab.run(["report", "time.json", "-o", "time.html"])?;
    ensure!(report.status.success(), "{}", show(&report));
    let page = std::fs::read_to_string(lab.path("time.html"))?;
    for words in ["destination", "restore there", "receive", "handover"] {
        ensure!(page.contains(words), "{words}");
    }
    program.pid = made(&program).context("it runs there")?;
    ends_well(&mut program, &expected)
}

/// It changes memory in each of its steps.
#[test]
fn a_program_that_writes_too_fast_is_left_alone_if_that_was_wanted() -> Result<()> {
    let lab = Lab::new();
    let mut program = lab.at_work(WORKLOAD, &["--steps", "20000", "--step-delay-ms", "20"])?;
    program.allow(19000)?;
    let mut pair = Pair::new(&lab, &program)?;
    // Much less than the time that the smallest chunk takes.
    pair.source.args(["--bandwidth", "50MB", "--max-downtime", "1us", "--on-stall", "abort"]);
    let Pair { mut source, mut destination, sockets } = pair;
    let (source, destination) = (Side::start(&mut source)?, Side::start(&mut destination)?);
    drop(sockets);
    let (source, destination) = (source.end()?, destination.end()?);
    refused(&source, 1, &["writes too fast", "the program keeps running here"])?;
    refused(&destination, 1, &["writes too fast", "nothing is left here"])?;
    program.wait_for_progress()
}
