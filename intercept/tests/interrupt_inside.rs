//! Kernels that are interrupted inside of their blocks, in loops or at barriers, or are aborted.

#[path = "support/caller.rs"]
mod caller;
mod support;
#[path = "support/waiting.rs"]
mod waiting;

use gpucr_wire::Request;
use gpucr_wire::message::{Interrupted, Place};
use support::{Agent, ENV_PROGRAM};
use waiting::{BLOCKS, LONG, MOMENT, NON_BLOCKING, NOT_READY, Waiting, halt, interrupted};

#[test]
fn program() {
    if std::env::var_os(ENV_PROGRAM).is_some() {
        caller::run();
    }
}

/// Interrupts the one launch, which waits inside of its blocks.
fn interrupt_inside(agent: &mut Agent, kernel: &str) {
    assert!(halt(agent, LONG, LONG).is_at_rest);
    let place = if kernel == "looping" { Place::Loops {} } else { Place::Barriers {} };
    let waiting =
        Interrupted { kernel: kernel.to_owned(), done: 0, blocks: BLOCKS, place, again: 0 };
    assert_eq!(interrupted(agent), [waiting]);
}

#[test]
fn threads_go_on_in_their_loops() {
    go_on_inside("looping");
}

#[test]
fn blocks_go_on_at_their_barriers() {
    go_on_inside("meeting");
}

fn go_on_inside(kernel: &str) {
    let mut waiting = Waiting::start_with(kernel);
    let stream = waiting.stream(NON_BLOCKING);
    waiting.launch(stream);
    let begun = waiting.begun(0);
    waiting.begin_copy(1, stream);
    let (mut agent, _) = waiting.program.program.agent();
    // Nobody lets the blocks that have begun come to their end.
    interrupt_inside(&mut agent, kernel);
    assert_eq!(waiting.program.answer(1, MOMENT), None);
    // Its device memory is taken away and given back, and it waits once more.
    drop(agent.turn(&waiting.program.program));
    assert_eq!(waiting.program.call_on(5, "cuStreamQuery", &[stream]), NOT_READY);
    let (mut agent, _) = waiting.program.program.agent();
    interrupt_inside(&mut agent, kernel);
    agent.must(&Request::OpenGate {});
    waiting.go();
    assert_eq!(waiting.program.answer(1, LONG), Some(0));
    waiting.program.must("cuStreamSynchronize", &[stream]);
    waiting.copied(1);
    let all = waiting.begun(0);
    assert!(all == BLOCKS && begun <= BLOCKS, "{all}: none has begun again");
    // The next launch finds nothing of this one.
    waiting.launch(stream);
    waiting.have_run(2);
}

/// So many launches of it had short blocks; whether the next one is interrupted between blocks.
fn is_interrupted_between(kernel: &str, short: u64) -> bool {
    let mut waiting = Waiting::start_with(kernel);
    let stream = waiting.stream(NON_BLOCKING);
    waiting.go();
    for _ in 0..short {
        waiting.launch(stream);
        waiting.program.must("cuStreamSynchronize", &[stream]);
    }
    let before = waiting.stop();
    waiting.launch(stream);
    waiting.begun(before);
    let (mut agent, _) = waiting.program.program.agent();
    // Those that can be interrupted inside of their blocks end at once, or else as soon as they may.
    if !halt(&mut agent, MOMENT, LONG).is_at_rest {
        waiting.go();
        assert!(halt(&mut agent, LONG, LONG).is_at_rest);
    }
    let is_between = interrupted(&mut agent).iter().any(|one| one.place == Place::Between {});
    agent.must(&Request::OpenGate {});
    waiting.go();
    waiting.program.must("cuStreamSynchronize", &[stream]);
    waiting.have_run(short + 1);
    is_between
}

#[test]
fn blocks_that_were_short_in_several_launches_are_not_interrupted_inside() {
    for kernel in ["looping", "meeting"] {
        assert!(!is_interrupted_between(kernel, 7), "{kernel}");
        // On a busy machine short blocks may have taken long.
        assert!((0..10).any(|_| is_interrupted_between(kernel, 8)), "{kernel}");
    }
}

/// So many threads that the time is up before all are over: some are saved, and some have not begun.
#[test]
fn who_is_given_up_in_its_loops_goes_on_all_the_same() {
    is_given_up("looping");
}

#[test]
fn who_is_given_up_at_its_barriers_goes_on_all_the_same() {
    is_given_up("meeting");
}

fn is_given_up(kernel: &str) {
    const THREADS: u64 = 1024;
    let mut waiting = Waiting::start_with(kernel);
    let stream = waiting.stream(NON_BLOCKING);
    for round in 1..=5 {
        let go = waiting.go;
        waiting.program.call("poke", &[go, 0]);
        waiting.program.call("poke", &[go + 8, 0]);
        let params = waiting.program.at(182);
        let all = [waiting.function, BLOCKS, 1, 1, THREADS, 1, 1, 0, stream, params, 0];
        waiting.program.must("cuLaunchKernel", &all);
        waiting.begun(0);
        let (mut agent, _) = waiting.program.program.agent();
        // At rest or not.
        halt(&mut agent, 0, 1);
        halt(&mut agent, 20, 1);
        agent.must(&Request::OpenGate {});
        waiting.go();
        waiting.program.must("cuStreamSynchronize", &[stream]);
        waiting.have_run(round * THREADS);
    }
}

/// Launches that are aborted and begun again, at rest in time or not, leave what they leave undisturbed. `is_same`: it reads
/// what it writes, and is never aborted.
fn is_repeated(is_same: bool) -> usize {
    const THREADS: u64 = 1024;
    const FIRST: u32 = 9;
    let mut waiting = Waiting::start_with("repeated");
    let stream = waiting.stream(NON_BLOCKING);
    let to = waiting.counts;
    let from = if is_same { to } else { waiting.program.made("cuMemAlloc_v2", &[4 * BLOCKS]) };
    waiting.program.poke(180, from);
    waiting.program.poke(181, to);
    let steps = (0..2000)
        .fold(FIRST, |number, _| number.wrapping_mul(1_664_525).wrapping_add(1_013_904_223));
    let expected = u64::from(steps.wrapping_add(FIRST));
    // Threads of a block that write what others of it read would race.
    let threads = if is_same { 1 } else { THREADS };
    let mut aborted = 0;
    for round in 0..4 {
        waiting.program.must("cuMemsetD32Async", &[to, 0, BLOCKS, stream]);
        waiting.program.must("cuMemsetD32Async", &[from, FIRST.into(), BLOCKS, stream]);
        let params = waiting.program.at(182);
        let all = [waiting.function, BLOCKS, 1, 1, threads, 1, 1, 0, stream, params, 0];
        waiting.program.must("cuLaunchKernel", &all);
        let (mut agent, _) = waiting.program.program.agent();
        let limit = if round % 2 == 0 { LONG } else { 1 };
        let wait = if round % 2 == 0 { LONG } else { 20 };
        if halt(&mut agent, wait, limit).is_at_rest {
            for one in interrupted(&mut agent) {
                assert!(one.done + one.again <= BLOCKS, "{one:?}");
                aborted += usize::from(one.place == Place::Aborted {});
            }
        }
        agent.must(&Request::OpenGate {});
        waiting.begin_copy(1, stream);
        assert_eq!(waiting.program.answer(1, LONG), Some(0));
        waiting.program.must("cuStreamSynchronize", &[stream]);
        for word in 0..BLOCKS / 2 {
            let found = waiting.program.call("peek", &[waiting.copy + 8 * word]);
            assert_eq!(found, expected << 32 | expected, "blocks of word {word}, round {round}");
        }
    }
    aborted
}

#[test]
fn launches_that_may_be_begun_again_are_aborted() {
    // Where the machine is busy they may be over.
    let aborted = (0..5).map(|_| is_repeated(false));
    assert!({ aborted }.any(|aborted| aborted > 0));
}

#[test]
fn launches_that_read_what_they_write_are_not_aborted() {
    assert_eq!(is_repeated(true), 0);
}

#[test]
fn a_launch_with_much_to_save_is_interrupted_between_blocks() {
    let mut waiting = Waiting::start_with("looping");
    let params = waiting.program.at(182);
    // Nobody waits.
    waiting.go();
    let threads = 1024;
    let all = [waiting.function, 1 << 14, 1, 1, threads, 1, 1, 0, 0, params, 0];
    let counts = waiting.program.made("cuMemAlloc_v2", &[4 << 14]);
    waiting.program.must("cuMemsetD32_v2", &[counts, 0, 1 << 14]);
    waiting.program.poke(181, counts);
    waiting.program.must("cuLaunchKernel", &all);
    waiting.program.must("cuCtxSynchronize", &[]);
    waiting.program.must("cuMemcpyDtoH_v2", &[waiting.copy, counts, 4 * BLOCKS]);
    waiting.copied(threads);
}
