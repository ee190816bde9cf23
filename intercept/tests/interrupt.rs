//! Kernels that are interrupted between two of their blocks, and calls that come behind them.

#[path = "support/caller.rs"]
mod caller;
mod support;
#[path = "support/waiting.rs"]
mod waiting;

use gpucr_wire::message::{Interrupted, Place};
use gpucr_wire::{GateState, Reply, Request};
use support::{Agent, ENV_PROGRAM};
use waiting::{BLOCKS, LONG, MOMENT, NON_BLOCKING, NOT_READY, Waiting, halt, interrupted};

#[test]
fn program() {
    if std::env::var_os(ENV_PROGRAM).is_some() {
        caller::run();
    }
}

/// Interrupts the one launch, which then is not over.
fn interrupt(waiting: &mut Waiting, agent: &mut Agent) -> Interrupted {
    assert!(!halt(agent, 100, LONG).is_at_rest, "blocks that have begun wait");
    waiting.go();
    assert!(halt(agent, LONG, LONG).is_at_rest);
    let launches = interrupted(agent);
    let [one] = &launches[..] else { panic!("{launches:?}") };
    assert!(one.kernel == "waiting" && one.blocks == BLOCKS && one.done < BLOCKS, "{one:?}");
    assert_eq!(one.place, Place::Between {});
    one.clone()
}

#[test]
fn what_is_queued_behind_it_comes_after_all_of_it() {
    let mut waiting = Waiting::start();
    let (stream, other) = (waiting.stream(NON_BLOCKING), waiting.stream(NON_BLOCKING));
    let event = waiting.program.made("cuEventCreate", &[0]);
    waiting.launch(stream);
    waiting.begun(0);
    // What has nothing to do with it goes on, and is not held.
    assert_eq!(waiting.program.call_on(1, "cuEventRecord", &[event, other]), 0);
    waiting.begin_copy(2, stream);
    waiting.program.begin(3, "cuStreamSynchronize", &[stream]);
    waiting.program.begin(4, "cuCtxSynchronize", &[]);
    assert_eq!(waiting.program.call_on(5, "cuStreamQuery", &[stream]), NOT_READY);
    // Another stream would wait for it by an event; a host function, of which the driver would say that there is none.
    let behind = waiting.program.made("cuEventCreate", &[0]);
    waiting.program.begin(6, "cuEventRecord", &[behind, stream]);
    waiting.program.begin(7, "cuLaunchHostFunc", &[stream, 0, 0]);
    let (mut agent, _) = waiting.program.program.agent();
    let done = interrupt(&mut waiting, &mut agent).done;
    assert!(done > 0, "a block had begun");
    waiting.program.begin(5, "cuStreamQuery", &[stream]);
    for thread in 2..=7 {
        assert_eq!(waiting.program.answer(thread, MOMENT), None, "thread {thread}");
    }
    // Its device memory is taken away and given back. The blocks that are left wait once more.
    let go = waiting.go;
    waiting.program.call("poke", &[go, 0]);
    let agent = agent.turn(&waiting.program.program);
    drop(agent);
    assert_eq!(waiting.program.answer(5, LONG), Some(NOT_READY));
    for thread in [3, 4] {
        assert_eq!(waiting.program.answer(thread, MOMENT), None, "thread {thread}");
    }
    waiting.go();
    for thread in [2, 3, 4, 6] {
        assert_eq!(waiting.program.answer(thread, LONG), Some(0), "thread {thread}");
    }
    assert!(waiting.program.answer(7, LONG).is_some());
    waiting.program.must("cuStreamSynchronize", &[stream]);
    waiting.copied(1);
    assert_eq!(waiting.program.call_on(5, "cuStreamQuery", &[stream]), 0);
}

#[test]
fn it_can_be_interrupted_again_and_again() {
    let mut waiting = Waiting::start();
    waiting.launch(0);
    waiting.begun(0);
    let (mut agent, _) = waiting.program.program.agent();
    let first = interrupt(&mut waiting, &mut agent);
    let go = waiting.go;
    waiting.program.call("poke", &[go, 0]);
    let before = waiting.program.call("peek", &[go + 8]);
    agent.must(&Request::OpenGate {});
    waiting.begun(before);
    assert_eq!(waiting.program.call_on(1, "cuStreamQuery", &[0]), NOT_READY);
    let second = interrupt(&mut waiting, &mut agent);
    assert!(second.done > first.done, "{first:?} {second:?}");
    // The end of the connection lets it go on too.
    drop(agent);
    waiting.have_run(1);
    waiting.launch(0);
    waiting.have_run(2);
    // Now there is none.
    let (mut agent, _) = waiting.program.program.agent();
    assert!(halt(&mut agent, LONG, LONG).is_at_rest);
    assert_eq!(interrupted(&mut agent), []);
}

#[test]
fn who_has_waited_for_long_goes_on_and_it_is_like_any_other_launch() {
    let mut waiting = Waiting::start();
    let stream = waiting.stream(NON_BLOCKING);
    waiting.launch(stream);
    waiting.begin_copy(1, stream);
    assert_eq!(waiting.program.answer(1, LONG), Some(0), "though the kernel waits for the host");
    let (mut agent, _) = waiting.program.program.agent();
    assert!(!halt(&mut agent, 100, LONG).is_at_rest);
    waiting.go();
    assert!(halt(&mut agent, LONG, LONG).is_at_rest);
    assert_eq!(interrupted(&mut agent), []);
    agent.must(&Request::OpenGate {});
    waiting.copied(1);
}

#[test]
fn a_copy_that_waits_for_it_anyway_waits_for_ever() {
    let mut waiting = Waiting::start();
    let stream = waiting.stream(0);
    waiting.launch(stream);
    waiting.begun(0);
    let (to, counts) = (waiting.copy, waiting.counts);
    waiting.program.begin(1, "cuMemcpyDtoH_v2", &[to, counts, 4 * BLOCKS]);
    waiting.program.begin(2, "cuMemFree_v2", &[counts]);
    // For longer than others.
    for thread in [1, 2] {
        assert_eq!(waiting.program.answer(thread, 1500), None, "thread {thread}");
    }
    let (mut agent, _) = waiting.program.program.agent();
    // Who waits has hold of nothing that the agent needs.
    assert!(matches!(agent.ask(&Request::Counts {}), Reply::Counts { .. }));
    interrupt(&mut waiting, &mut agent);
    assert!(matches!(agent.ask(&Request::Counts {}), Reply::Counts { .. }));
    agent.must(&Request::OpenGate {});
    assert_eq!(waiting.program.answer(2, LONG), Some(0));
    // One may have been quicker than the other.
    assert!(waiting.program.answer(1, LONG).is_some());
}

#[test]
fn two_threads_that_launch_at_once_launch_each_kernel_once() {
    let mut waiting = Waiting::start();
    let streams = [waiting.stream(1), waiting.stream(1)];
    waiting.go();
    let params = waiting.program.at(182);
    let rounds = 200;
    for _ in 0..rounds {
        for (thread, stream) in [1, 2].into_iter().zip(streams) {
            let all = [waiting.function, BLOCKS, 1, 1, 1, 1, 1, 0, stream, params, 0];
            waiting.program.begin(thread, "cuLaunchKernel", &all);
        }
        for thread in [1, 2] {
            assert_eq!(waiting.program.answer(thread, LONG), Some(0));
        }
    }
    waiting.have_run(2 * rounds);
}

#[test]
fn what_does_not_come_to_rest_goes_on_to_its_end() {
    let mut waiting = Waiting::start();
    let stream = waiting.stream(NON_BLOCKING);
    waiting.launch(stream);
    waiting.begun(0);
    waiting.begin_copy(1, stream);
    let (mut agent, _) = waiting.program.program.agent();
    assert!(!halt(&mut agent, 100, 200).is_at_rest);
    assert!(!halt(&mut agent, 500, 200).is_at_rest, "it is given up meanwhile");
    assert_eq!(waiting.program.answer(1, MOMENT), None, "the gate is shut");
    waiting.go();
    assert!(halt(&mut agent, LONG, 200).is_at_rest);
    assert_eq!(interrupted(&mut agent), [], "all blocks are done");
    agent.must(&Request::OpenGate {});
    assert_eq!(waiting.program.answer(1, LONG), Some(0));
    waiting.program.must("cuStreamSynchronize", &[stream]);
    waiting.copied(1);
}

#[test]
fn a_gate_that_cannot_be_closed_lets_it_go_on() {
    let mut waiting = Waiting::start();
    waiting.launch(0);
    waiting.begun(0);
    let (mut agent, _) = waiting.program.program.agent();
    assert!(!halt(&mut agent, 100, LONG).is_at_rest);
    agent.fails(&Request::CloseGate { timeout_ms: 20 });
    waiting.go();
    waiting.have_run(1);
    let (state, _) = (GateState::Open {}, agent);
    assert_eq!(waiting.program.program.agent().1.gate, state);
}

#[test]
fn streams_and_modules_are_not_taken_from_it() {
    let mut waiting = Waiting::start();
    let stream = waiting.stream(NON_BLOCKING);
    waiting.launch(stream);
    waiting.begun(0);
    waiting.program.begin(1, "cuStreamDestroy_v2", &[stream]);
    waiting.program.begin(2, "cuModuleUnload", &[waiting.module]);
    let (mut agent, _) = waiting.program.program.agent();
    interrupt(&mut waiting, &mut agent);
    for thread in [1, 2] {
        assert_eq!(waiting.program.answer(thread, MOMENT), None, "thread {thread}");
    }
    agent.must(&Request::OpenGate {});
    for thread in [1, 2] {
        assert_eq!(waiting.program.answer(thread, LONG), Some(0), "thread {thread}");
    }
    waiting.have_run(1);
}

/// Longer than kernels take that are not long.
fn while_it_takes_long() {
    std::thread::sleep(std::time::Duration::from_millis(40));
}

#[test]
fn a_kernel_is_interrupted_if_it_took_long_before() {
    let mut waiting = Waiting::start_with("auto");
    let stream = waiting.stream(NON_BLOCKING);
    waiting.launch(stream);
    waiting.begun(0);
    waiting.begin_copy(1, stream);
    assert_eq!(waiting.program.answer(1, LONG), Some(0), "it waits for nothing");
    let (mut agent, _) = waiting.program.program.agent();
    assert!(!halt(&mut agent, 100, LONG).is_at_rest);
    waiting.go();
    assert!(halt(&mut agent, LONG, LONG).is_at_rest);
    assert_eq!(interrupted(&mut agent), []);
    drop(agent);
    waiting.have_run(1);
    let before = waiting.stop();
    waiting.launch(stream);
    waiting.begun(before);
    let (mut agent, _) = waiting.program.program.agent();
    interrupt(&mut waiting, &mut agent);
    agent.must(&Request::OpenGate {});
    waiting.have_run(2);
    // Some that are short, of a kernel that was long.
    for round in 3..=30 {
        waiting.launch(stream);
        waiting.have_run(round);
    }
}

/// What runs might wait for the launch of a kernel whose twin is not loaded yet, and the driver for what runs.
#[test]
fn a_module_is_loaded_when_nothing_runs() {
    let mut waiting = Waiting::start_with("auto");
    let streams = [waiting.stream(NON_BLOCKING), waiting.stream(NON_BLOCKING)];
    waiting.launch(streams[0]);
    waiting.begun(0);
    while_it_takes_long();
    waiting.go();
    waiting.have_run(1);
    let mut before = waiting.stop();
    // The other kernel waits for the host, whose next call is the launch.
    let long = std::mem::replace(&mut waiting.function, 0);
    waiting.function = waiting.other(b"looping\0");
    waiting.launch(streams[1]);
    before = waiting.begun(before);
    waiting.function = long;
    waiting.launch(streams[0]);
    waiting.go();
    waiting.have_run(3);
    assert!(before > 0);
    // Now nothing is in the way, after some launches more.
    for round in 4..=6 {
        before = waiting.stop();
        waiting.launch(streams[0]);
        waiting.begun(before);
        let (mut agent, _) = waiting.program.program.agent();
        if round == 6 {
            interrupt(&mut waiting, &mut agent);
        } else {
            waiting.go();
        }
        drop(agent);
        waiting.have_run(round);
    }
}

#[test]
fn nothing_is_interrupted_that_was_not_asked_for() {
    let mut waiting = Waiting::start_with("other");
    let stream = waiting.stream(NON_BLOCKING);
    waiting.launch(stream);
    waiting.begin_copy(1, stream);
    assert_eq!(waiting.program.answer(1, LONG), Some(0), "it waits for nothing");
    let (mut agent, _) = waiting.program.program.agent();
    assert!(!halt(&mut agent, 300, LONG).is_at_rest);
    waiting.go();
    assert!(halt(&mut agent, LONG, LONG).is_at_rest);
    assert_eq!(interrupted(&mut agent), []);
    agent.must(&Request::OpenGate {});
    waiting.copied(1);
}
