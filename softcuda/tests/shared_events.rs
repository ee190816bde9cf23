//! Events that processes share.

mod support;

use support::*;

unsafe extern "C" {
    safe fn cuIpcGetEventHandle(handle: &mut Handle, event: u64) -> u32;
    safe fn cuIpcOpenEventHandle(event: &mut u64, handle: Handle) -> u32;
}

/// `CUipcEventHandle`.
#[repr(C)]
#[derive(Clone, Copy, PartialEq, Debug)]
struct Handle([u64; 8]);

const NOTHING: [u64; 8] = [0; 8];
const INVALID_CONTEXT: u32 = 201;
const MAP_FAILED: u32 = 205;
/// `CU_EVENT_DISABLE_TIMING | CU_EVENT_INTERPROCESS`.
const SHARED: u32 = 6;

#[track_caller]
fn shared_event() -> (u64, Handle) {
    let (mut event, mut handle) = (0, Handle([0; 8]));
    ok(cuEventCreate(&mut event, SHARED));
    ok(cuIpcGetEventHandle(&mut handle, event));
    (event, handle)
}

fn parse(text: &str) -> Handle {
    let words: Vec<u64> = text.split(' ').map(|word| word.parse().unwrap()).collect();
    Handle(words.try_into().unwrap())
}

/// Records an event behind work that waits until it is told to go on, by a value in memory.
#[test]
#[ignore = "a program for other tests"]
fn program() {
    context();
    let (event, handle) = shared_event();
    let mut again = Handle([0; 8]);
    ok(cuIpcGetEventHandle(&mut again, event));
    assert_eq!(again, handle);
    let mut other = 0;
    assert_eq!(cuIpcOpenEventHandle(&mut other, handle), INVALID_CONTEXT);
    let mut stream = 0;
    ok(cuStreamCreate(&mut stream, 1));
    let gate = allocate(4);
    say(handle.0.map(|word| word.to_string()).join(" "));
    assert_eq!(listen(), "record");
    ok(cuStreamWaitValue32_v2(stream, gate, 1, 1));
    ok(cuEventRecord(event, stream));
    assert_eq!(cuEventQuery(event), NOT_READY);
    say("recorded");
    match listen().as_str() {
        "go" => {
            let mut second = 0;
            ok(cuStreamCreate(&mut second, 1));
            ok(cuStreamWriteValue32_v2(second, gate, 1, 0));
            ok(cuEventSynchronize(event));
            say("passed");
            // Now the other process records it.
            assert_eq!(listen(), "wait");
            assert_eq!(cuEventQuery(event), NOT_READY);
            ok(cuStreamWaitEvent(second, event, 0));
            say("waiting");
            ok(cuStreamSynchronize(second));
            say("over");
            listen();
            ok(cuEventDestroy_v2(event));
        }
        other => assert_eq!(other, "end"),
    }
    say("end");
    listen();
}

fn opened(program: &mut Program) -> (Handle, u64, u64) {
    context();
    let handle = parse(&program.hear());
    let (mut event, mut stream) = (0, 0);
    ok(cuIpcOpenEventHandle(&mut event, handle));
    ok(cuStreamCreate(&mut stream, 1));
    ok(cuEventQuery(event));
    program.tell("record");
    assert_eq!(program.hear(), "recorded");
    assert_eq!(cuEventQuery(event), NOT_READY);
    (handle, event, stream)
}

#[test]
fn a_stream_waits_for_another_process() {
    let mut program = Program::start("program", &[]);
    let (handle, event, stream) = opened(&mut program);
    let cell = allocate(4);
    write(cell, &[1]);
    ok(cuStreamWaitEvent(stream, event, 0));
    ok(cuMemsetD32Async(cell, 2, 1, stream));
    std::thread::sleep(std::time::Duration::from_millis(20));
    assert_eq!(cuStreamQuery(stream), NOT_READY);
    program.tell("go");
    assert_eq!(program.hear(), "passed");
    ok(cuStreamSynchronize(stream));
    assert_eq!(read(cell, 1), [2]);
    ok(cuEventQuery(event));

    // The other way round.
    ok(cuStreamWaitValue32_v2(stream, cell, 7, 1));
    ok(cuEventRecord(event, stream));
    program.tell("wait");
    assert_eq!(program.hear(), "waiting");
    let mut second = 0;
    ok(cuStreamCreate(&mut second, 1));
    ok(cuStreamWriteValue32_v2(second, cell, 7, 0));
    assert_eq!(program.hear(), "over");
    ok(cuEventSynchronize(event));

    let (mut again, mut own) = (0, Handle([0; 8]));
    assert_eq!(cuIpcGetEventHandle(&mut own, event), INVALID_HANDLE, "not its own");
    let mut milliseconds = 0.0;
    assert_eq!(cuEventElapsedTime_v2(&mut milliseconds, event, event), INVALID_HANDLE);
    program.tell("destroy");
    assert_eq!(program.hear(), "end");
    assert_eq!(cuIpcOpenEventHandle(&mut again, handle), MAP_FAILED);
    assert_eq!(cuIpcOpenEventHandle(&mut again, Handle([3; 8])), INVALID_VALUE);
    ok(cuEventDestroy_v2(event));
    // What is not shared any more is carried.
    program.checkpoint_and_restore();
    program.tell("end");
    program.finish();
}

#[test]
fn a_process_that_ends_keeps_nobody_waiting() {
    let mut program = Program::start("program", &[]);
    let (_, event, stream) = opened(&mut program);
    ok(cuStreamWaitEvent(stream, event, 0));
    program.kill();
    ok(cuStreamSynchronize(stream));
    ok(cuEventSynchronize(event));
}

#[test]
fn only_events_for_it_are_shared() {
    context();
    let (mut event, mut handle) = (0, Handle([0; 8]));
    assert_eq!(cuEventCreate(&mut event, 4), INVALID_VALUE, "with timing");
    assert_eq!(cuEventCreate(&mut event, 8), INVALID_VALUE);
    ok(cuEventCreate(&mut event, 2));
    assert_eq!(cuIpcGetEventHandle(&mut handle, event), INVALID_HANDLE);
    assert_eq!(cuIpcGetEventHandle(&mut handle, 12345), INVALID_HANDLE);
}

#[test]
#[ignore = "a program for other tests"]
fn program_that_is_checkpointed() {
    context();
    let mut private = 0;
    ok(cuEventCreate(&mut private, SHARED));
    let mut stream = 0;
    ok(cuStreamCreate(&mut stream, 1));
    ok(cuEventRecord(private, stream));
    ok(cuEventSynchronize(private));
    say("private");
    assert_eq!(listen(), "go on");
    ok(cuEventRecord(private, stream));
    ok(cuEventSynchronize(private));
    ok(cuIpcGetEventHandle(&mut Handle([0; 8]), private));
    say("shared");
    listen();
    assert_ne!(cuCtxSynchronize(), 0);
}

#[test]
fn a_shared_event_at_the_checkpoint_loses_the_process() {
    let mut program = Program::start("program_that_is_checkpointed", &[]);
    let pid = program.pid();
    let checkpoint = || {
        ok(cuCheckpointProcessLock(pid, &NOTHING));
        ok(cuCheckpointProcessCheckpoint(pid, &NOTHING));
        let maps = std::fs::read_to_string(format!("/proc/{pid}/maps")).unwrap();
        assert!(!maps.contains("memfd:softcuda"));
    };
    ok(cuInit(0));
    assert_eq!(program.hear(), "private");
    checkpoint();
    ok(cuCheckpointProcessRestore(pid, &NOTHING));
    ok(cuCheckpointProcessUnlock(pid, &NOTHING));
    program.tell("go on");
    assert_eq!(program.hear(), "shared");
    checkpoint();
    assert_eq!(cuCheckpointProcessRestore(pid, &NOTHING), NOT_SUPPORTED);
    program.tell("end");
    program.finish();
}
