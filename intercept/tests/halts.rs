//! Programs that are brought to rest step by step: one launch at a time passes their shut gates.

#[path = "support/caller.rs"]
mod caller;
mod support;

use caller::Caller;
use gpucr_wire::{Reply, Request, Rest};
use support::{Agent, ENV_PROGRAM};

/// `CU_STREAM_NON_BLOCKING`.
const NON_BLOCKING: u64 = 1;
/// `CU_STREAM_WAIT_VALUE_GEQ`.
const AT_LEAST: u64 = 0;

/// Not a test: the program that the others start.
#[test]
fn program() {
    if std::env::var_os(ENV_PROGRAM).is_some() {
        caller::run();
    }
}

fn halt(agent: &mut Agent, wait_ms: u64) -> Rest {
    match agent.ask(&Request::Halt { wait_ms, timeout_ms: 60_000, interrupt_ms: 0 }) {
        Reply::Rest { rest } => rest,
        other => panic!("{other:?}"),
    }
}

fn pass(agent: &mut Agent, wait_ms: u64) -> bool {
    let request = Request::Pass { wait_ms, busy_too: false };
    match agent.ask(&request) {
        Reply::Passed { launched } => launched,
        other => panic!("{other:?}"),
    }
}

/// An empty graph that can be launched, and a stream, in the context of a thread.
fn launchable(program: &mut Caller, thread: u32) -> [u64; 2] {
    let mut made = |function: &str, arguments: &[u64]| {
        let out = program.at(100);
        let all = [&[out], arguments].concat();
        assert_eq!(program.call_on(thread, function, &all), 0, "{function}");
        program.peek(100)
    };
    let graph = made("cuGraphCreate", &[0]);
    let executable = made("cuGraphInstantiateWithFlags", &[graph, 0]);
    let stream = made("cuStreamCreate", &[NON_BLOCKING]);
    [executable, stream]
}

/// A word of pinned memory for which a new stream of the context of thread 0 waits to become 1.
fn busy(program: &mut Caller) -> u64 {
    let word = program.made("cuMemHostAlloc", &[4096, 2]);
    program.call("poke", &[word, 0]);
    let stream = program.made("cuStreamCreate", &[NON_BLOCKING]);
    program.must("cuStreamWaitValue32_v2", &[stream, word, 1, AT_LEAST]);
    word
}

#[test]
fn one_launch_passes_for_each_that_is_asked_for() {
    let mut program = Caller::start();
    let launch = launchable(&mut program, 0);
    let (mut agent, _) = program.program.agent();
    let rest = halt(&mut agent, 60_000);
    assert!(rest.is_at_rest && rest.may_pass, "{rest:?}");
    for thread in 0..3 {
        program.begin(thread, "cuGraphLaunch", &launch);
    }
    assert_eq!(program.program.line(300), None, "one has passed that nobody asked for");
    for left in (0..3).rev() {
        assert!(pass(&mut agent, 60_000), "{left} are left");
        let line = program.program.line(20_000).expect("one has passed");
        assert!(line.ends_with(" 0"), "{line}");
        assert_eq!(program.program.line(200), None, "a second one has passed");
        assert!(halt(&mut agent, 60_000).is_at_rest);
    }
    assert!(!pass(&mut agent, 20), "there is none");
    assert!(halt(&mut agent, 60_000).is_at_rest);
    // Other calls pass meanwhile, and do not end the wait.
    program.begin(0, "cuMemFree_v2", &[0]);
    assert!(!pass(&mut agent, 500));
    assert_eq!(program.answer(0, 20_000), Some(0));
    assert!(halt(&mut agent, 60_000).is_at_rest);
    agent.must(&Request::OpenGate {});
    program.must("cuGraphLaunch", &launch);
}

#[test]
fn who_is_busy_is_waited_for_and_the_gate_stays_shut() {
    let mut program = Caller::start();
    let launch = launchable(&mut program, 0);
    let word = busy(&mut program);
    let (mut agent, _) = program.program.agent();
    for _ in 0..3 {
        let rest = halt(&mut agent, 50);
        assert!(!rest.is_at_rest && !rest.may_pass && rest.busy_ms > 0, "{rest:?}");
    }
    program.begin(1, "cuGraphLaunch", &launch);
    assert_eq!(program.answer(1, 300), None, "the gate is shut");
    program.call("poke", &[word, 1]);
    let rest = halt(&mut agent, 60_000);
    assert!(rest.is_at_rest && rest.longest_ms >= 300, "{rest:?}");
    assert_eq!(program.answer(1, 100), None, "the gate is shut");
    // What is exported now and what comes after a launch are not the same.
    agent.export();
    assert!(pass(&mut agent, 60_000));
    assert_eq!(program.answer(1, 20_000), Some(0));
    assert!(halt(&mut agent, 60_000).is_at_rest);
    agent.fails(&Request::Detach {});
    agent.export();
    agent.must(&Request::Detach {});
}

#[test]
fn at_the_time_limit_the_gate_opens_and_the_device_is_named() {
    let mut program = Caller::start();
    let launch = launchable(&mut program, 0);
    let word = busy(&mut program);
    let (mut agent, _) = program.program.agent();
    assert!(!halt(&mut agent, 10).is_at_rest);
    let why = agent.fails(&Request::CloseGate { timeout_ms: 20 });
    assert!(why.contains("device 0 was still busy"), "{why}");
    program.must("cuGraphLaunch", &launch);
    // Nor does one get stuck whose client is gone.
    assert!(!halt(&mut agent, 10).is_at_rest);
    drop(agent);
    program.must("cuGraphLaunch", &launch);
    let (mut agent, _) = program.program.agent();
    assert!(!halt(&mut agent, 10).is_at_rest);
    agent.must(&Request::OpenGate {});
    program.must("cuGraphLaunch", &launch);
    program.call("poke", &[word, 1]);
    agent.must(&Request::CloseGate { timeout_ms: 60_000 });
}

#[test]
fn a_launch_passes_on_the_device_that_is_idle() {
    let mut program = Caller::start_with(&[("SOFTCUDA_DEVICES", "2")]);
    let second = program.made("cuDevicePrimaryCtxRetain", &[1]);
    assert_eq!(program.call_on(1, "cuCtxSetCurrent", &[second]), 0);
    let (here, there) = (launchable(&mut program, 0), launchable(&mut program, 1));
    let word = busy(&mut program);
    let (mut agent, _) = program.program.agent();
    let rest = halt(&mut agent, 100);
    assert!(!rest.is_at_rest && rest.may_pass, "{rest:?}");
    program.begin(2, "cuGraphLaunch", &here);
    assert!(!pass(&mut agent, 300), "its device is busy");
    let rest = halt(&mut agent, 100);
    assert!(!rest.is_at_rest && rest.may_pass, "{rest:?}");
    program.begin(1, "cuGraphLaunch", &there);
    assert!(pass(&mut agent, 60_000));
    assert_eq!(program.answer(1, 20_000), Some(0));
    assert_eq!(program.answer(2, 100), None);
    program.call("poke", &[word, 1]);
    assert!(halt(&mut agent, 60_000).is_at_rest);
    assert!(pass(&mut agent, 60_000), "now it is idle");
    assert_eq!(program.answer(2, 20_000), Some(0));
    agent.must(&Request::OpenGate {});
}

#[test]
fn a_launch_passes_on_a_device_that_is_busy_if_that_is_asked_for() {
    let mut program = Caller::start();
    let launch = launchable(&mut program, 0);
    let word = busy(&mut program);
    let (mut agent, _) = program.program.agent();
    let rest = halt(&mut agent, 50);
    assert!(!rest.is_at_rest && rest.is_shut && !rest.may_pass, "{rest:?}");
    program.begin(1, "cuGraphLaunch", &launch);
    assert_eq!(program.answer(1, 300), None, "the gate is shut");
    let request = Request::Pass { wait_ms: 60_000, busy_too: true };
    assert_eq!(agent.ask(&request), Reply::Passed { launched: true });
    assert_eq!(program.answer(1, 20_000), Some(0));
    program.begin(1, "cuGraphLaunch", &launch);
    assert_eq!(program.answer(1, 300), None, "one has passed that nobody asked for");
    program.call("poke", &[word, 1]);
    assert!(halt(&mut agent, 60_000).is_at_rest);
    agent.must(&Request::OpenGate {});
    assert_eq!(program.answer(1, 20_000), Some(0));
}
