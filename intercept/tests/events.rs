//! Events that processes share by legacy IPC handles: behind the shim as on the driver alone.

#[path = "support/caller.rs"]
mod caller;
mod support;

use caller::Caller;
use gpucr_wire::Request;
use support::ENV_PROGRAM;

const SHARED: u64 = 2 | 4;
/// `CU_STREAM_NON_BLOCKING`.
const NON_BLOCKING: u64 = 1;
const NOT_READY: u64 = 600;
const INVALID_VALUE: u64 = 1;
const INVALID_HANDLE: u64 = 400;
const INVALID_CONTEXT: u64 = 201;
const MAP_FAILED: u64 = 205;

/// Not a test: the program that the others start.
#[test]
fn program() {
    if std::env::var_os(ENV_PROGRAM).is_some() {
        caller::run();
    }
}

/// Does it with two processes behind the shim and with two on the driver alone.
fn both_ways(work: impl Fn(Caller, Caller)) {
    work(Caller::start_natively(), Caller::start_natively());
    work(Caller::start(), Caller::start());
}

/// The eight words of an event's handle.
fn offer(program: &mut Caller, event: u64) -> Vec<u64> {
    let out = program.at(200);
    program.must("cuIpcGetEventHandle", &[out, event]);
    (200..208).map(|word| program.peek(word)).collect()
}

/// Opens a handle: what the call gives back, and the event.
fn open(program: &mut Caller, handle: &[u64]) -> (u64, u64) {
    let out = program.at(210);
    program.poke(210, 0);
    // The structure is on the stack, behind five registers that are not used.
    let code = program.call("cuIpcOpenEventHandle", &[&[out, 0, 0, 0, 0, 0], handle].concat());
    (code, program.peek(210))
}

/// A stream, and a word of pinned memory for which it waits to become 1.
fn busy(program: &mut Caller) -> (u64, u64) {
    let word = program.made("cuMemHostAlloc", &[4096, 2]);
    program.call("poke", &[word, 0]);
    let stream = program.made("cuStreamCreate", &[NON_BLOCKING]);
    program.must("cuStreamWaitValue32_v2", &[stream, word, 1, 0]);
    (stream, word)
}

#[test]
fn a_record_of_one_process_is_waited_for_in_the_other() {
    both_ways(|mut owner, mut other| {
        let event = owner.made("cuEventCreate", &[SHARED]);
        let handle = offer(&mut owner, event);
        let (code, opened) = open(&mut other, &handle);
        assert_eq!(code, 0);
        assert_eq!(other.call("cuEventQuery", &[opened]), 0, "never recorded");
        other.must("cuStreamWaitEvent", &[0, opened, 0]);
        for (here, event, there, opened) in
            [(0, event, 1, opened), (1, opened, 0, event), (0, event, 1, opened)]
        {
            let both = [&mut owner, &mut other];
            let (stream, word) = busy(both[here]);
            both[here].must("cuEventRecord", &[event, stream]);
            assert_eq!(both[here].call("cuEventQuery", &[event]), NOT_READY);
            assert_eq!(both[there].call("cuEventQuery", &[opened]), NOT_READY);
            let waiting = both[there].made("cuStreamCreate", &[NON_BLOCKING]);
            both[there].must("cuStreamWaitEvent", &[waiting, opened, 0]);
            both[there].begin(1, "cuEventSynchronize", &[opened]);
            assert_eq!(both[there].answer(1, 200), None, "it is not passed");
            assert_eq!(both[there].call("cuStreamQuery", &[waiting]), NOT_READY);
            both[here].call("poke", &[word, 1]);
            assert_eq!(both[there].answer(1, 20_000), Some(0));
            both[there].must("cuStreamSynchronize", &[waiting]);
            for (place, event) in [(here, event), (there, opened)] {
                both[place].must("cuEventSynchronize", &[event]);
                assert_eq!(both[place].call("cuEventQuery", &[event]), 0);
            }
        }
    });
}

#[test]
fn a_later_record_takes_the_place_of_an_earlier_one() {
    both_ways(|mut owner, mut other| {
        let event = owner.made("cuEventCreate", &[SHARED]);
        let (slow, word) = busy(&mut owner);
        // Recorded before anybody else knows it.
        owner.must("cuEventRecord", &[event, slow]);
        let handle = {
            let out = owner.at(200);
            // The driver alone may wait here for all work.
            owner.begin(1, "cuIpcGetEventHandle", &[out, event]);
            let got = owner.answer(1, 500);
            if got.is_none() {
                owner.call("poke", &[word, 1]);
                assert_eq!(owner.answer(1, 20_000), Some(0));
            }
            (200..208).map(|at| owner.peek(at)).collect::<Vec<u64>>()
        };
        let (code, opened) = open(&mut other, &handle);
        assert_eq!(code, 0);
        let idle = other.made("cuStreamCreate", &[NON_BLOCKING]);
        other.must("cuEventRecord", &[opened, idle]);
        for (program, event) in [(&mut other, opened), (&mut owner, event)] {
            program.must("cuEventSynchronize", &[event]);
            assert_eq!(program.call("cuEventQuery", &[event]), 0);
        }
        owner.call("poke", &[word, 1]);
        owner.must("cuStreamSynchronize", &[slow]);
        assert_eq!(other.call("cuEventQuery", &[opened]), 0, "what is late does not take it back");
    });
}

#[test]
fn what_cannot_be_is_refused_as_by_the_driver() {
    both_ways(|mut owner, mut other| {
        let out = owner.at(200);
        for flags in [4, 4 | 1, SHARED | 8] {
            assert_eq!(owner.call("cuEventCreate", &[out, flags]), INVALID_VALUE, "{flags}");
        }
        assert_eq!(owner.call("cuEventCreate", &[0, SHARED]), INVALID_VALUE);
        let plain = owner.made("cuEventCreate", &[2]);
        assert_eq!(owner.call("cuIpcGetEventHandle", &[out, plain]), INVALID_HANDLE);
        assert_eq!(owner.call("cuIpcGetEventHandle", &[out, 77]), INVALID_HANDLE);
        let event = owner.made("cuEventCreate", &[SHARED]);
        assert_eq!(owner.call("cuIpcGetEventHandle", &[0, event]), INVALID_VALUE);
        let handle = offer(&mut owner, event);
        assert_eq!(open(&mut owner, &handle).0, INVALID_CONTEXT, "its own");
        let (code, opened) = open(&mut other, &handle);
        assert_eq!(code, 0);
        let out = other.at(200);
        assert_eq!(other.call("cuIpcGetEventHandle", &[out, opened]), INVALID_HANDLE);
        let zeros = [0; 8];
        assert_eq!(open(&mut other, &zeros).0, INVALID_VALUE);
        assert_eq!(other.call("cuEventElapsedTime", &[out, opened, opened]), INVALID_HANDLE);
        assert_eq!(other.call("cuEventRecord", &[opened, 77]), INVALID_HANDLE);
        assert_eq!(other.call("cuStreamWaitEvent", &[77, opened, 0]), INVALID_HANDLE);
        assert_eq!(other.call("cuStreamWaitEvent", &[0, opened, 8]), INVALID_VALUE);
        other.must("cuEventDestroy_v2", &[opened]);
        assert_eq!(other.call("cuEventQuery", &[opened]), INVALID_HANDLE);
        owner.must("cuEventDestroy_v2", &[event]);
        assert_eq!(open(&mut other, &handle).0, MAP_FAILED, "it is gone");
    });
}

#[test]
fn what_a_process_has_recorded_that_has_ended_counts_as_passed() {
    both_ways(|mut owner, mut other| {
        let event = owner.made("cuEventCreate", &[SHARED]);
        let handle = offer(&mut owner, event);
        let (code, opened) = open(&mut other, &handle);
        assert_eq!(code, 0);
        let (stream, _) = busy(&mut owner);
        owner.must("cuEventRecord", &[event, stream]);
        assert_eq!(other.call("cuEventQuery", &[opened]), NOT_READY);
        drop(owner);
        other.must("cuEventSynchronize", &[opened]);
        assert_eq!(other.call("cuEventQuery", &[opened]), 0);
    });
}

#[test]
fn both_tell_of_each_other_as_long_as_an_event_is_open() {
    let (mut owner, mut other) = (Caller::start(), Caller::start());
    let counts = |program: &Caller| program.program.agent().0.counts();
    let pinned = counts(&other).pinned_bytes;
    let mut events = Vec::new();
    for round in 0..300u64 {
        let event = owner.made("cuEventCreate", &[SHARED]);
        let handle = offer(&mut owner, event);
        let (code, opened) = open(&mut other, &handle);
        assert_eq!(code, 0, "round {round}");
        owner.must("cuEventRecord", &[event, 0]);
        other.must("cuStreamWaitEvent", &[0, opened, 0]);
        other.must("cuEventRecord", &[opened, 0]);
        other.must("cuCtxSynchronize", &[]);
        owner.must("cuEventSynchronize", &[event]);
        if round < 150 {
            events.push((event, opened));
        } else {
            owner.must("cuEventDestroy_v2", &[event]);
            other.must("cuEventDestroy_v2", &[opened]);
        }
    }
    let (of_owner, of_other) = (counts(&owner), counts(&other));
    assert_eq!(of_other.owners, [of_owner.identity]);
    assert_eq!(of_owner.openers[0].identity, of_other.identity);
    assert!(of_owner.unsupported.is_empty() && of_other.unsupported.is_empty());
    assert_eq!((of_owner.shared, of_other.shared), (0, 0));
    // A detach and what follows leave them as they are.
    owner.program.agent().0.cycle(&owner.program);
    for (event, opened) in events {
        owner.must("cuEventRecord", &[event, 0]);
        other.must("cuEventSynchronize", &[opened]);
        other.must("cuEventDestroy_v2", &[opened]);
        owner.must("cuEventDestroy_v2", &[event]);
    }
    let (of_owner, of_other) = (counts(&owner), counts(&other));
    assert!(of_owner.openers.is_empty() && of_other.owners.is_empty());
    // What it has mapped is given back when the next one is opened, and what is used again is bounded.
    let event = owner.made("cuEventCreate", &[SHARED]);
    let handle = offer(&mut owner, event);
    let (code, opened) = open(&mut other, &handle);
    assert_eq!((code, counts(&other).pinned_bytes), (0, pinned));
    other.must("cuEventDestroy_v2", &[opened]);
}

#[test]
fn a_record_waits_at_a_shut_gate() {
    let mut program = Caller::start();
    let event = program.made("cuEventCreate", &[SHARED]);
    let (mut agent, _) = program.program.agent();
    agent.must(&Request::CloseGate { timeout_ms: 60_000 });
    program.begin(0, "cuEventRecord", &[event, 0]);
    assert_eq!(program.answer(0, 300), None);
    agent.must(&Request::OpenGate {});
    assert_eq!(program.answer(0, 20_000), Some(0));
    program.must("cuEventSynchronize", &[event]);
}
