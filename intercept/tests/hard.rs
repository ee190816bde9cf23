//! Programs that do what makes it hard for the shim.

#[path = "support/caller.rs"]
mod caller;
mod support;

use caller::Caller;
use gpucr_wire::{Reply, Request};
use support::ENV_PROGRAM;

const MIB: u64 = 1 << 20;
const OUT_OF_MEMORY: u64 = 2;

/// Not a test: the program that the others start.
#[test]
fn program() {
    if std::env::var_os(ENV_PROGRAM).is_some() {
        caller::run();
    }
}

/// Uses that make a dump impossible: memory shared with others, and functions by name.
fn uses(program: &Caller) -> (u64, Vec<String>) {
    let counts = program.program.agent().0.counts();
    (counts.shared, counts.unsupported)
}

/// Words from `word` on: `CUmemAllocationProp` of pinned memory on device 0 with these handle types.
fn properties(program: &mut Caller, word: usize, handle_types: u64) -> u64 {
    for (at, value) in [1 | handle_types << 32, 1, 0, 0].into_iter().enumerate() {
        program.poke(word + at, value);
    }
    program.at(word)
}

#[test]
fn what_found_no_memory_is_not_held_against_the_program() {
    // Memory that is there again a moment later.
    let mut program = Caller::start_with(&[("SOFTCUDA_FAULT", "cuMemCreate:1:2,cuMemCreate:2:2")]);
    let (out, properties) = (program.at(0), properties(&mut program, 1, 0));
    let create = [out, 2 * MIB, properties, 0];
    assert_eq!(program.call("cuMemCreate", &create), OUT_OF_MEMORY);
    assert_eq!(uses(&program), (0, vec![]));
    program.must("cuMemCreate", &create);
    assert_eq!(uses(&program), (0, vec![]));
    assert_eq!(program.program.agent().0.counts().blocks, 1, "it is followed");
}

#[test]
fn memory_whose_operations_are_to_be_synchronous_stays_so() {
    const SYNC: u64 = 6;
    const NOT_SUPPORTED: u64 = 801;
    const INVALID: u64 = 1;
    let mut program = Caller::start();
    let value = program.at(8);
    let memory = program.made("cuMemAlloc_v2", &[3 * MIB]);
    let other = program.made("cuMemAlloc_v2", &[100]);
    let is_set = |program: &mut Caller, address: u64| {
        let out = program.at(16);
        program.poke(16, !0);
        program.must("cuPointerGetAttribute", &[out, SYNC, address]);
        program.peek(16) as u32
    };
    assert_eq!(is_set(&mut program, memory), 0);
    program.poke(8, 1);
    program.must("cuPointerSetAttribute", &[value, SYNC, memory + 100]);
    assert_eq!(program.call("cuPointerSetAttribute", &[value, SYNC, memory + 3 * MIB]), INVALID);
    assert_eq!(program.call("cuPointerSetAttribute", &[value, SYNC + 1, memory]), INVALID);
    assert_eq!(program.call("cuPointerSetAttribute", &[0, SYNC, memory]), INVALID);
    for _ in 0..2 {
        assert_eq!(is_set(&mut program, memory + 3 * MIB - 1), 1);
        assert_eq!(is_set(&mut program, other), 0);
        program.must("cuMemsetD8_v2", &[memory, 7, 3 * MIB]);
        program.must("cuMemcpyDtoD_v2", &[other, memory, 100]);
        // Its memory is taken away and put back.
        program.program.agent().0.cycle(&program.program);
    }
    program.poke(8, 0);
    program.must("cuPointerSetAttribute", &[value, SYNC, memory]);
    assert_eq!(is_set(&mut program, memory), 0);
    // Memory that the program has mapped itself is the driver's.
    let properties = properties(&mut program, 1, 0);
    let handle = program.made("cuMemCreate", &[2 * MIB, properties, 0]);
    let address = program.made("cuMemAddressReserve", &[2 * MIB, 0, 0, 0]);
    program.must("cuMemMap", &[address, 2 * MIB, 0, handle, 0]);
    program.poke(8, 1);
    assert_eq!(program.call("cuPointerSetAttribute", &[value, SYNC, address]), NOT_SUPPORTED);
}

const RELAXED: u64 = 2;
const CLOSE: Request = Request::CloseGate { timeout_ms: 60_000 };

#[test]
fn a_capture_ends_with_its_context() {
    let mut program = Caller::start();
    let context = program.made("cuCtxCreate_v2", &[0, 0]);
    let stream = program.made("cuStreamCreate", &[1]);
    program.must("cuStreamBeginCapture_v2", &[stream, RELAXED]);
    program.must("cuCtxDestroy_v2", &[context]);
    let (mut agent, _) = program.program.agent();
    agent.must(&Request::CloseGate { timeout_ms: 500 });
    agent.must(&Request::OpenGate {});
    // What is freed is given back at once.
    let out = program.at(0);
    assert_eq!(program.call_on(1, "cuMemAlloc_v2", &[out, 4 * MIB]), 0);
    assert_eq!(agent.counts().blocks, 1);
    let address = program.peek(0);
    assert_eq!(program.call_on(1, "cuMemFree_v2", &[address]), 0);
    assert_eq!(agent.counts().blocks, 0);
}

#[test]
fn captures_that_depend_on_each_other_end_while_the_gate_closes() {
    let mut program = Caller::start();
    let streams: [u64; 3] = std::array::from_fn(|_| program.made("cuStreamCreate", &[1]));
    let graph = program.at(0);
    let (mut agent, _) = program.program.agent();
    program.must("cuStreamBeginCapture_v2", &[streams[0], RELAXED]);
    agent.0.send(&CLOSE).expect("sent");
    // One within it, and one of another thread, both begun and ended before it ends.
    for (thread, stream) in [(0, streams[1]), (1, streams[2])] {
        let begun = program.call_on(thread, "cuStreamBeginCapture_v2", &[stream, RELAXED]);
        assert_eq!(begun, 0, "thread {thread}");
        assert_eq!(program.call_on(thread, "cuStreamEndCapture", &[stream, graph]), 0);
    }
    program.must("cuStreamEndCapture", &[streams[0], graph]);
    assert_eq!(agent.0.receive::<Reply>().expect("a reply"), Reply::Done {});
    // Behind the closed gate none begins.
    program.begin(0, "cuStreamBeginCapture_v2", &[streams[0], RELAXED]);
    assert_eq!(program.answer(0, 500), None);
    agent.must(&Request::OpenGate {});
    assert_eq!(program.answer(0, 20_000), Some(0));
}

/// Closes the gate and takes the memory away; `meanwhile` the program has none. Then it has it back.
fn while_detached(program: &mut Caller, meanwhile: impl FnOnce(&mut Caller)) {
    let (mut agent, _) = program.program.agent();
    agent.must(&CLOSE);
    let (blocks, fds) = agent.export();
    agent.must(&Request::Detach {});
    meanwhile(program);
    let (mut agent, _) = program.program.agent();
    assert_eq!(agent.reattach(&blocks, &fds), Reply::Done {});
    agent.must(&Request::OpenGate {});
}

#[test]
fn the_stack_limit_is_the_programs_own_at_all_times() {
    const STACK: u64 = 0;
    let mut program = Caller::start();
    program.must("cuCtxSetLimit", &[STACK, 4096]);
    let limit = program.at(0);
    while_detached(&mut program, |program| {
        program.begin(0, "cuCtxGetLimit", &[limit, STACK]);
        assert_eq!(program.answer(0, 500), None, "it would see what is none of its business");
    });
    assert_eq!(program.answer(0, 20_000), Some(0));
    assert_eq!(program.peek(0), 4096);
    while_detached(&mut program, |program| program.begin(0, "cuCtxSetLimit", &[STACK, 8192]));
    assert_eq!(program.answer(0, 20_000), Some(0));
    program.must("cuCtxGetLimit", &[limit, STACK]);
    assert_eq!(program.peek(0), 8192, "its change is undone");
}
