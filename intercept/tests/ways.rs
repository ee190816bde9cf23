//! Programs that find the driver's functions in other ways than by their symbols in `libcuda.so.1`.

#[path = "support/ways.rs"]
mod program_body;
mod support;

use std::time::{Duration, Instant};

use gpucr_wire::table::Range;
use gpucr_wire::{Reply, Request, Table};
use support::{Agent, ENV_PROGRAM, Program};

/// How long a call that waits is watched, milliseconds. One that does not wait is not missed by this,
/// only noticed late.
const MOMENT: u64 = 150;

/// Not a test: the program that the others start.
#[test]
fn program() {
    if std::env::var_os(ENV_PROGRAM).is_some() {
        program_body::run();
    }
}

/// Takes the program's memory away and lets it go on all the same, as a restore does that loads on demand.
fn await_memory(program: &Program) -> (Agent, Table) {
    let (mut agent, _) = program.agent();
    agent.must(&Request::CloseGate { timeout_ms: 20_000 });
    let (blocks, _fds) = agent.export();
    agent.must(&Request::Detach {});
    let (mut agent, _) = program.agent();
    let blocks: Vec<u64> = blocks.iter().map(|block| block.id).collect();
    let (table, file) = Table::create(vec![Range::WHOLE; blocks.len()]).expect("a table");
    (0..blocks.len()).for_each(|block| table.chunks(block).pend(0));
    assert_eq!(agent.guard(&Request::Await { blocks }, &file), Reply::Done {});
    agent.must(&Request::OpenGate {});
    (agent, table)
}

#[test]
fn an_error_of_the_device_is_kept_from_programs_that_ask_for_their_functions() {
    for wait in [
        "symbol cuStreamSynchronize stream",
        "asked:12000:0 cuStreamSynchronize stream",
        "asked:12000:1 cuStreamSynchronize stream",
        "asked:12000:2 cuStreamSynchronize stream",
        "asked:12000:0 cuStreamQuery stream",
        "asked:12000:0 cuCtxSynchronize",
        "asked:13000:0 cuCtxSynchronize context",
        "asked:12000:0 cuEventRecord event stream",
        "asked:13000:0 cuMemGetInfo out out",
    ] {
        let mut program = Program::start();
        let (_agent, table) = await_memory(&program);
        let launch = "asked:12000:0 cuLaunchKernel function 1 1 1 1 1 1 0 stream parameters 0";
        assert_eq!(program.ask(launch), "0");
        // The device is not done at once, and says so.
        let deadline = Instant::now() + Duration::from_secs(60);
        while table.header().fault().is_none() {
            program.tell(wait);
            match program.line(MOMENT).as_deref() {
                None | Some("0" | "600") => {}
                Some(code) => panic!("{wait}: the program has got {code}"),
            }
            assert!(Instant::now() < deadline, "{wait}: nobody was told");
        }
        assert_eq!(table.header().fault(), Some(700), "{wait}");
    }
}

/// A driver that has what this library does not know.
fn with_newer_driver() -> Program {
    Program::start_with(&[("SOFTCUDA_NEWER", "1")])
}

const UNKNOWN: &str = "asked:13060:0 cuMemcpyNewest 4096 to from stream";
const NEWER_ENTRY: &str = "asked:13060:0 cuMemcpyDtoDAsync to from 4096 0 stream";

#[test]
fn an_unknown_function_is_named_once_it_has_been_called() {
    for (call, name) in
        [(UNKNOWN, "cuMemcpyNewest (CUDA 13.6)"), (NEWER_ENTRY, "cuMemcpyDtoDAsync (CUDA 13.6)")]
    {
        let mut program = with_newer_driver();
        // The CUDA runtime asks for all functions at its start in this way.
        assert_eq!(program.ask(&format!("only {UNKNOWN}")), "0");
        assert_eq!(program.ask(&format!("only {NEWER_ENTRY}")), "0");
        let (mut agent, _) = program.agent();
        assert_eq!(agent.counts().ungated, [""; 0]);
        let mut agent = agent.cycle(&program);
        assert_eq!(program.ask(call), "0");
        let counts = agent.counts();
        let reason = format!("it has called {name}, which this gpucr does not know");
        assert_eq!(counts.ungated, std::slice::from_ref(&reason));
        assert_eq!(counts.unsupported, [""; 0]);
        let refused = agent.fails(&Request::CloseGate { timeout_ms: 20_000 });
        assert!(refused.contains(&reason), "{refused}");
        // The gate is open, and the function does what it does.
        assert_eq!(program.ask("symbol cuMemcpyDtoH_v2 out to 8"), "0");
        assert_eq!(program.ask("symbol cuStreamSynchronize stream"), "0");
    }
}

#[test]
fn the_first_call_of_an_unknown_function_waits_at_a_closed_gate() {
    let mut program = with_newer_driver();
    let (mut agent, _) = program.agent();
    agent.must(&Request::CloseGate { timeout_ms: 20_000 });
    program.tell(UNKNOWN);
    assert_eq!(program.line(MOMENT), None);
    agent.must(&Request::OpenGate {});
    assert_eq!(program.line(20_000).as_deref(), Some("0"));
}

#[test]
fn older_entries_of_known_functions_are_known() {
    let mut program = with_newer_driver();
    for call in [
        "asked:12000:0 cuMemcpyDtoDAsync to from 4096 stream",
        "asked:12000:2 cuMemcpyDtoDAsync to from 4096 stream",
        "asked:13000:0 cuLaunchKernel function 1 1 1 1 1 1 0 stream parameters 0",
        "asked:13060:0 cuStreamSynchronize stream",
        "asked:13060:2 cuEventRecord event stream",
    ] {
        assert_eq!(program.ask(call), "0", "{call}");
    }
    let (mut agent, _) = program.agent();
    assert_eq!(agent.counts().ungated, [""; 0]);
}

/// A component that has the driver's path, and finds its functions there.
const PAST: &str = "past cuMemsetD32_v2 to 5 1000";

#[test]
fn who_opens_the_driver_by_its_path_passes_the_gate() {
    let mut program = Program::start();
    assert_eq!(program.ask(PAST), "0");
    let (mut agent, _) = program.agent();
    assert_eq!(agent.counts().ungated, [""; 0]);
    agent.must(&Request::CloseGate { timeout_ms: 20_000 });
    program.tell(PAST);
    assert_eq!(program.line(MOMENT), None);
    agent.must(&Request::OpenGate {});
    assert_eq!(program.line(20_000).as_deref(), Some("0"));
    // And the functions that it asks for there are ours too.
    assert_eq!(program.ask("past cuMemAlloc_v2 out 100"), "0");
    assert_eq!(agent.counts().allocations, 3);
}

#[test]
fn who_has_opened_the_driver_before_the_shim_is_named() {
    let driver = support::driver();
    let mut program = Program::start_with(&[("GPUCR_TEST_DRIVER_FIRST", "1")]);
    let (mut agent, _) = program.agent();
    let reason =
        format!("it has opened {} past gpucr, before it first called the driver", driver.display());
    assert_eq!(agent.counts().ungated, std::slice::from_ref(&reason));
    let refused = agent.fails(&Request::CloseGate { timeout_ms: 20_000 });
    assert!(refused.contains(&reason), "{refused}");
    assert_eq!(program.ask("symbol cuMemsetD32_v2 to 5 1000"), "0");
}

#[test]
fn who_opens_another_driver_is_named() {
    let folder = tempfile::tempdir().expect("a folder");
    let other = folder.path().join("libcuda.so.1");
    std::fs::copy(support::driver(), &other).expect("copied");
    let other = other.to_str().expect("a plain path");
    let mut program = Program::start_with(&[("GPUCR_TEST_PAST", other)]);
    let (mut agent, _) = program.agent();
    assert_eq!(agent.counts().ungated, [""; 0]);
    assert_eq!(program.ask("only past cuInit"), "0");
    assert_eq!(agent.counts().ungated, [format!("it has opened {other} past gpucr")]);
}
