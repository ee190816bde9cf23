//! Programs whose gates are shut behind a call by which a thread waits for the device.

#[path = "support/caller.rs"]
mod caller;
mod support;

use std::thread;

use caller::Caller;
use gpucr_wire::{Reply, Request, Rest};
use support::{Agent, ENV_PROGRAM};

/// `CU_STREAM_NON_BLOCKING`.
const NON_BLOCKING: u64 = 1;
/// `CU_STREAM_CAPTURE_MODE_RELAXED`.
const RELAXED: u64 = 2;

/// Not a test: the program that the others start.
#[test]
fn program() {
    if std::env::var_os(ENV_PROGRAM).is_some() {
        caller::run();
    }
}

fn meet(agent: &mut Agent, wait_ms: u64) -> bool {
    match agent.ask(&Request::Meet { wait_ms }) {
        Reply::Met { met } => met,
        other => panic!("{other:?}"),
    }
}

fn halt(agent: &mut Agent) -> Rest {
    match agent.ask(&Request::Halt { wait_ms: 60_000, timeout_ms: 60_000, interrupt_ms: 0 }) {
        Reply::Rest { rest } => rest,
        other => panic!("{other:?}"),
    }
}

/// Has the threads make this call again and again until the agent has met one. How many calls were made after that, and
/// wait for the gate if they pass it.
fn meet_at(program: &mut Caller, agent: &mut Agent, threads: u32, call: (&str, &[u64])) -> usize {
    thread::scope(|scope| {
        let meeting = scope.spawn(|| meet(agent, 60_000));
        let mut left = 0;
        while !meeting.is_finished() {
            (0..threads).for_each(|thread| program.begin(thread, call.0, call.1));
            left = threads as usize;
            while left > 0 {
                match program.program.line(100) {
                    Some(line) => assert!(line.ends_with(" 0"), "{}: {line}", call.0),
                    None if meeting.is_finished() => break,
                    None => continue,
                }
                left -= 1;
            }
        }
        assert!(meeting.join().expect("no panic"), "{}", call.0);
        left
    })
}

/// So many calls come back, and have succeeded.
fn come_back(program: &Caller, calls: usize) {
    for _ in 0..calls {
        let line = program.program.line(20_000).expect("it comes back");
        assert!(line.ends_with(" 0"), "{line}");
    }
}

#[test]
fn the_gate_is_shut_behind_each_kind_of_call_that_waits() {
    let mut program = Caller::start();
    let stream = program.made("cuStreamCreate", &[NON_BLOCKING]);
    let event = program.made("cuEventCreate", &[0]);
    let memory = program.made("cuMemAlloc_v2", &[4096]);
    let host = program.at(200);
    let calls: [(&str, &[u64]); 6] = [
        ("cuCtxSynchronize", &[]),
        ("cuStreamSynchronize", &[stream]),
        ("cuStreamSynchronize_ptsz", &[stream]),
        ("cuEventSynchronize", &[event]),
        ("cuMemcpyDtoH_v2", &[host, memory, 64]),
        ("cuMemsetD8_v2", &[memory, 1, 64]),
    ];
    for call in calls {
        let (mut agent, _) = program.program.agent();
        let left = meet_at(&mut program, &mut agent, 1, call);
        program.begin(0, "cuMemsetD8_v2", &[memory, 1, 64]);
        assert_eq!(program.program.line(200), None, "{}: the gate is open", call.0);
        assert!(halt(&mut agent).is_at_rest, "{}", call.0);
        agent.must(&Request::OpenGate {});
        come_back(&program, left + 1);
        // From here on nobody is held.
        program.must(call.0, call.1);
    }
}

#[test]
fn of_several_threads_one_is_met_and_all_go_on() {
    let mut program = Caller::start();
    let memory = program.made("cuMemAlloc_v2", &[4096]);
    let (mut agent, _) = program.program.agent();
    let left = meet_at(&mut program, &mut agent, 3, ("cuCtxSynchronize", &[]));
    assert_eq!(left, 0, "these calls do not pass the gate");
    for thread in 0..3 {
        program.begin(thread, "cuMemsetD8_v2", &[memory, 1, 64]);
    }
    assert_eq!(program.program.line(200), None, "the gate is open");
    assert!(halt(&mut agent).is_at_rest);
    agent.must(&Request::OpenGate {});
    come_back(&program, 3);
}

#[test]
fn who_does_not_come_leaves_the_gate_open() {
    let mut program = Caller::start();
    let memory = program.made("cuMemAlloc_v2", &[4096]);
    let (mut agent, _) = program.program.agent();
    assert!(!meet(&mut agent, 50));
    program.must("cuMemsetD8_v2", &[memory, 1, 64]);
    program.must("cuCtxSynchronize", &[]);
    assert!(halt(&mut agent).is_at_rest);
    assert!(agent.fails(&Request::Meet { wait_ms: 50 }).contains("not possible now"));
    agent.must(&Request::OpenGate {});
    // Nor is anybody held for a client that is gone.
    agent.0.send(&Request::Meet { wait_ms: 600_000 }).expect("sent");
    drop(agent);
    program.must("cuCtxSynchronize", &[]);
    let (mut agent, _) = program.program.agent();
    program.must("cuCtxSynchronize", &[]);
    agent.must(&Request::CloseGate { timeout_ms: 60_000 });
}

#[test]
fn a_capture_under_way_comes_to_its_end_before_the_gate_is_shut() {
    let mut program = Caller::start();
    let stream = program.made("cuStreamCreate", &[NON_BLOCKING]);
    let memory = program.made("cuMemAlloc_v2", &[4096]);
    let graph = program.at(100);
    let begun = program.call_on(1, "cuStreamBeginCapture_v2", &[stream, RELAXED]);
    assert_eq!(begun, 0);
    let (mut agent, _) = program.program.agent();
    let other = program.made("cuStreamCreate", &[NON_BLOCKING]);
    meet_at(&mut program, &mut agent, 1, ("cuStreamSynchronize", &[other]));
    // The capture goes on, and so does the thread that was met.
    program.must("cuMemsetD8_v2", &[memory, 1, 64]);
    assert_eq!(program.call_on(1, "cuMemsetD8Async", &[memory, 1, 64, stream]), 0);
    assert_eq!(program.call_on(1, "cuStreamEndCapture", &[stream, graph]), 0);
    assert!(halt(&mut agent).is_at_rest);
    program.begin(0, "cuMemsetD8_v2", &[memory, 1, 64]);
    assert_eq!(program.answer(0, 200), None, "the gate is open");
    agent.must(&Request::OpenGate {});
    assert_eq!(program.answer(0, 20_000), Some(0));
}
