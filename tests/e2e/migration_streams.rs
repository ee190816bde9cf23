//! A migration whose memory goes over streams: whatever becomes of one of them, one program runs.

use anyhow::{Context, Result, ensure};
use gpucr_tests::migrated::{End, is_so};
use gpucr_tests::migration::{Pair, Side, Sides, ends_well};
use gpucr_tests::relay::{Loss, OnStreams, Plan, Relay};
use gpucr_tests::{Lab, Random, refused, undisturbed, until};

const ARGS: [&str; 4] = ["--steps", "100", "--step-delay-ms", "20"];
const WORKLOAD: &str = "sgd";
const STREAMS: usize = 3;

#[test]
fn memory_goes_over_several_streams() -> Result<()> {
    let expected = undisturbed(WORKLOAD, &ARGS[..2])?;
    let lab = Lab::new();
    let mut program = lab.at_work(WORKLOAD, &ARGS)?;
    let pair = |streams: &[&str], at: &[&str]| -> Result<Pair> {
        let mut pair = Pair::new(&lab, &program)?;
        pair.source.args(["--streams"]).args(streams);
        pair.destination.args(at);
        Ok(pair)
    };
    let at = ["--streams-at", "127.0.0.1:0"];
    let (no_host, not_let) = (pair(&["4"], &at)?, pair(&["4", "--streams-to", "127.0.0.1"], &[])?);
    // Nobody is at such an address of these, which are for documents.
    let nowhere = pair(&["4", "--streams-to", "192.0.2.1", "--silence", "2s"], &at)?;
    let good = pair(&["4", "--streams-to", "127.0.0.1"], &at)?;
    for (pair, words) in [
        (no_host, "--streams-to HOST"),
        (not_let, "--streams-at"),
        (nowhere, "no stream to 192.0.2.1"),
    ] {
        let sides = pair.run(&mut program)?;
        let said = String::from_utf8_lossy(&sides.source.stderr).into_owned();
        ensure!(!sides.source.status.success() && said.contains(words), "{}", sides.show());
        ensure!(program.is_running(), "{}", sides.show());
    }
    let sides = good.run(&mut program)?;
    let (source, destination) = sides.reports()?;
    ensure!(source["sent_chunks"].as_u64() > Some(0), "{source}");
    ensure!(source["sent_chunks"] == destination["chunks"], "{}", sides.show());
    let all = &source["dump"]["bulk_bytes"];
    ensure!(destination["ahead_bytes"] == *all, "loaded as it came: {}", sides.show());
    ends_well(&mut program, &expected)
}

#[test]
fn a_side_that_is_killed_while_there_are_streams_leaves_one_program() -> Result<()> {
    use End::{GoesParked, GoesUnheard, Stays};
    let expected = undisturbed(WORKLOAD, &ARGS[..2])?;
    for (source, destination, end) in [
        ("kill:precopy", "", Stays),
        ("kill:store", "", Stays),
        ("fail:criu", "", Stays),
        ("fail:handover", "", GoesUnheard),
        ("cut:ask", "", Stays),
        ("cut:sent", "", Stays),
        ("cut-after:sent", "", Stays),
        ("", "kill:receive", Stays),
        ("", "cut:want", Stays),
        ("", "kill:handover", GoesParked),
    ] {
        let lab = Lab::new();
        let mut program = lab.at_work(WORKLOAD, &ARGS)?;
        let mut pair = Pair::new(&lab, &program)?;
        pair.source.args(["--streams", "3", "--streams-to", "127.0.0.1"]);
        pair.destination.args(["--streams-at", "127.0.0.1:0"]);
        pair.source.env("GPUCR_FAULT", source);
        pair.destination.env("GPUCR_FAULT", destination);
        let sides = pair.run(&mut program)?;
        let told = || format!("{source} {destination} {end:?}: {}", sides.show());
        let both = !sides.source.status.success() && !sides.destination.status.success();
        ensure!(both, "{}", told());
        is_so(&lab, program, end, &expected).with_context(told)?;
    }
    Ok(())
}

/// What becomes of streams.
#[derive(Debug, Clone, Copy)]
enum Lost {
    /// While nothing goes over them, one is cut, or all are.
    Idle { is_all: bool },
    /// While a chunk goes over one. What does not go on is taken all the same if it `swallows`.
    AtWork { loss: Loss, is_all: bool, swallows: bool },
}

/// Migrates a program, and has something happen to streams in this phase.
fn lost_in(phase: &str, lost: Lost, expected: &[String]) -> Result<()> {
    let lab = Lab::new();
    let program = lab.at_work(WORKLOAD, &ARGS)?;
    let (go_on, events) = (lab.path("go-on"), lab.path("events"));
    let mut pair = Pair::new(&lab, &program)?;
    pair.source.args(["--silence", "3s", "--events", "events"]);
    pair.source.args(["--streams", &STREAMS.to_string(), "--streams-to", "127.0.0.1"]);
    pair.destination.args(["--silence", "3s", "--streams-at", "127.0.0.1:0"]);
    pair.source.env("GPUCR_FAULT", format!("hold:{phase}")).env("GPUCR_FAULT_FILE", &go_on);
    let swallows = matches!(lost, Lost::AtWork { swallows: true, .. });
    let plan = Plan { swallows, ..Plan::default() };
    let mut relay = Relay::between(&mut pair, plan, &mut Random(1))?;
    let Pair { mut source, mut destination, sockets } = pair;
    let (mut source, mut destination) = (Side::start(&mut source)?, Side::start(&mut destination)?);
    drop(sockets);
    relay.started(source.pid(), destination.pid());
    let begun = format!("\"phase\":\"{phase}\"");
    until("the phase begins", || {
        let said = std::fs::read_to_string(&events).unwrap_or_default();
        said.contains(&begun) || !source.is_at_work() || !destination.is_at_work()
    })?;
    let count = relay.streams();
    match lost {
        Lost::Idle { is_all } => relay.cut_streams(is_all),
        Lost::AtWork { loss, is_all, .. } => {
            let (number, of_source, after) = (None, true, 0);
            relay.plan_streams(OnStreams { loss, is_all, number, of_source, after });
        }
    }
    std::fs::write(&go_on, "")?;
    until("both sides end", || !source.is_at_work() & !destination.is_at_work())?;
    let sides = Sides { source: source.end()?, destination: destination.end()? };
    let told = || format!("{phase} {lost:?}: {}", sides.show());
    ensure!(count == STREAMS && relay.has_happened(), "{}", told());
    drop(relay);
    refused(&sides.source, 1, &["a stream was lost", "keeps running"]).with_context(told)?;
    refused(&sides.destination, 1, &["a stream was lost", "nothing is left"]).with_context(told)?;
    is_so(&lab, program, End::Stays, expected).with_context(told)
}

/// While the program runs (`precopy`), and while it stands still (`store`).
fn lost_at_any_time(cases: &[Lost]) -> Result<()> {
    let expected = undisturbed(WORKLOAD, &ARGS[..2])?;
    for phase in ["precopy", "store"] {
        cases.iter().try_for_each(|lost| lost_in(phase, *lost, &expected))?;
    }
    Ok(())
}

#[test]
fn streams_that_are_cut_leave_the_program_at_the_source() -> Result<()> {
    let at_work = |is_all| Lost::AtWork { loss: Loss::Cut, is_all, swallows: false };
    let idle = |is_all| Lost::Idle { is_all };
    lost_at_any_time(&[at_work(false), at_work(true), idle(false), idle(true)])
}

#[test]
fn streams_on_which_nothing_comes_any_more_leave_the_program_at_the_source() -> Result<()> {
    let one = |loss, swallows| Lost::AtWork { loss, is_all: false, swallows };
    let all = Lost::AtWork { loss: Loss::Silence, is_all: true, swallows: false };
    lost_at_any_time(&[one(Loss::Silence, false), one(Loss::HalfOpen, true), all])
}
