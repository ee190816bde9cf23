//! Checkpoint, restore and sharing of memory across processes.

mod support;

use std::fs::File;
use std::os::fd::AsRawFd;
use std::sync::atomic::{AtomicBool, Ordering};

use support::*;

const NOTHING: [u64; 8] = [0; 8];
const RUNNING: u32 = 0;
const LOCKED: u32 = 1;
const CHECKPOINTED: u32 = 2;
const FAILED: u32 = 3;

fn limit(milliseconds: u64) -> [u64; 8] {
    let mut arguments = NOTHING;
    arguments[0] = milliseconds;
    arguments
}

#[track_caller]
fn state(pid: i32) -> u32 {
    let mut state = 99;
    ok(cuCheckpointProcessGetState(pid, &mut state));
    state
}

/// Names of the process's open files and of its mappings that are device memory.
fn device_memory_of(pid: i32) -> Vec<String> {
    let maps = std::fs::read_to_string(format!("/proc/{pid}/maps")).unwrap();
    let maps = maps.lines().filter(|line| line.contains("memfd:softcuda")).map(str::to_owned);
    let files = std::fs::read_dir(format!("/proc/{pid}/fd")).unwrap();
    let files = files
        .filter_map(|entry| std::fs::read_link(entry.unwrap().path()).ok())
        .map(|target| target.display().to_string())
        .filter(|target| target.contains("memfd:softcuda"));
    maps.chain(files).collect()
}

#[test]
#[ignore = "a program for other tests"]
fn program() {
    context();
    let plain = allocate(3 * GRANULE);
    let small = allocate(100);
    let (handle, mapped) = map_new(2 * GRANULE);
    let mut reserved = 0;
    ok(cuMemAddressReserve(&mut reserved, 8 * GRANULE, 0, 0, 0));
    write(plain + 4096, &[1, 2, 3]);
    write(small, &[4, 5]);
    write(mapped + GRANULE as u64, &[6, 7]);
    say("ready");
    listen();
    // This call waits at the gate while the process is locked.
    assert_eq!(read(plain + 4096, 3), [1, 2, 3]);
    say("through");
    assert_eq!(read(plain, 1), [0]);
    assert_eq!(read(small, 2), [4, 5]);
    assert_eq!(read(mapped + GRANULE as u64, 2), [6, 7]);
    ok(cuMemMap(reserved, GRANULE, 0, handle, 0));
    ok(cuMemSetAccess(reserved, GRANULE, &READ_WRITE, 1));
    write(mapped, &[8]);
    assert_eq!(read(reserved, 1), [8]);
    say(used());
    ok(cuMemUnmap(reserved, GRANULE));
    ok(cuMemUnmap(mapped, 2 * GRANULE));
    ok(cuMemRelease(handle));
    ok(cuMemFree_v2(plain));
    ok(cuMemFree_v2(small));
    assert_eq!(used(), 0);
}

#[test]
fn a_process_is_checkpointed_and_restored() {
    let mut program = Program::start("program", &[]);
    assert_eq!(program.hear(), "ready");
    let pid = program.pid();
    assert_eq!(state(pid), RUNNING);
    let mut thread = 0;
    ok(cuCheckpointProcessGetRestoreThreadId(pid, &mut thread));
    assert!(std::path::Path::new(&format!("/proc/{pid}/task/{thread}")).exists());
    assert!(!device_memory_of(pid).is_empty());

    // Out of order: refused, and nothing changes.
    assert_eq!(cuCheckpointProcessCheckpoint(pid, &NOTHING), ILLEGAL_STATE);
    assert_eq!(cuCheckpointProcessRestore(pid, &NOTHING), ILLEGAL_STATE);
    assert_eq!(cuCheckpointProcessUnlock(pid, &NOTHING), ILLEGAL_STATE);
    assert_eq!(state(pid), RUNNING);

    for _ in 0..2 {
        ok(cuCheckpointProcessLock(pid, &limit(1000)));
        assert_eq!(state(pid), LOCKED);
        assert_eq!(cuCheckpointProcessLock(pid, &NOTHING), ILLEGAL_STATE);
        ok(cuCheckpointProcessCheckpoint(pid, &NOTHING));
        assert_eq!(state(pid), CHECKPOINTED);
        assert_eq!(device_memory_of(pid), Vec::<String>::new());
        assert_eq!(cuCheckpointProcessUnlock(pid, &NOTHING), ILLEGAL_STATE);
        ok(cuCheckpointProcessRestore(pid, &NOTHING));
        assert_eq!(state(pid), LOCKED);
        ok(cuCheckpointProcessUnlock(pid, &NOTHING));
        assert_eq!(state(pid), RUNNING);
    }

    ok(cuCheckpointProcessLock(pid, &NOTHING));
    program.tell("go on");
    std::thread::sleep(std::time::Duration::from_millis(50));
    ok(cuCheckpointProcessCheckpoint(pid, &NOTHING));
    ok(cuCheckpointProcessRestore(pid, &NOTHING));
    ok(cuCheckpointProcessUnlock(pid, &NOTHING));
    assert_eq!(program.hear(), "through");
    // Plain memory 3 and 1 granules, mapped memory 2.
    assert_eq!(program.hear(), (6 * GRANULE).to_string());
    program.finish();
}

#[test]
#[ignore = "a program for other tests"]
fn sharing_program() {
    context();
    let (handle, address) = map_new(2 * GRANULE);
    write(address, &[11, 22]);
    let mut fd = -1;
    ok(cuMemExportToShareableHandle(&mut fd, handle, 1, 0));
    say(fd);
    assert_eq!(listen(), "written");
    assert_eq!(read(address, 2), [11, 33]);
    if listen() == "release" {
        // What gpucr does: nothing of the shared memory is left when the driver checkpoints.
        ok(cuMemUnmap(address, 2 * GRANULE));
        ok(cuMemRelease(handle));
        assert_eq!(used(), 0);
        say("released");
        let place = listen();
        let (pid, fd) = place.split_once(' ').unwrap();
        let file = descriptor_of(pid.parse().unwrap(), fd);
        let mut handle = 0;
        ok(cuMemImportFromShareableHandle(&mut handle, file.as_raw_fd() as u64, 1));
        ok(cuMemMap(address, 2 * GRANULE, 0, handle, 0));
        ok(cuMemSetAccess(address, 2 * GRANULE, &READ_WRITE, 1));
        assert_eq!(read(address, 2), [11, 33]);
    } else {
        say("kept");
        listen();
        // The process is lost: calls fail instead of hanging.
        assert_ne!(cuCtxSynchronize(), 0);
    }
}

/// Opens a descriptor of another process.
fn descriptor_of(pid: i32, fd: &str) -> File {
    File::options().read(true).write(true).open(format!("/proc/{pid}/fd/{fd}")).unwrap()
}

/// Imports the program's memory and writes to it.
fn share(program: &mut Program) -> (File, u64) {
    let file = descriptor_of(program.pid(), &program.hear());
    context();
    let (mut handle, mut address) = (0, 0);
    ok(cuMemImportFromShareableHandle(&mut handle, file.as_raw_fd() as u64, 1));
    let mut fd = -1;
    assert_eq!(cuMemExportToShareableHandle(&mut fd, handle, 1, 0), INVALID_VALUE);
    ok(cuMemAddressReserve(&mut address, 2 * GRANULE, 0, 0, 0));
    ok(cuMemMap(address, 2 * GRANULE, 0, handle, 0));
    ok(cuMemSetAccess(address, 2 * GRANULE, &READ_WRITE, 1));
    ok(cuMemRelease(handle));
    assert_eq!(read(address, 2), [11, 22]);
    write(address + 4, &[33]);
    program.tell("written");
    (file, address)
}

#[test]
fn released_memory_comes_back_through_its_descriptor() {
    let mut program = Program::start("sharing_program", &[]);
    let (file, address) = share(&mut program);
    program.tell("release");
    assert_eq!(program.hear(), "released");
    program.checkpoint_and_restore();
    assert_eq!(read(address, 2), [11, 33]);
    // Give the memory back: the program opens our descriptor.
    program.tell(&format!("{} {}", std::process::id(), file.as_raw_fd()));
    program.finish();
    ok(cuMemUnmap(address, 2 * GRANULE));
}

#[test]
fn shared_memory_at_the_checkpoint_loses_the_process() {
    let mut program = Program::start("sharing_program", &[]);
    let _shared = share(&mut program);
    program.tell("keep");
    assert_eq!(program.hear(), "kept");
    let pid = program.pid();
    ok(cuCheckpointProcessLock(pid, &NOTHING));
    ok(cuCheckpointProcessCheckpoint(pid, &NOTHING));
    assert_eq!(cuCheckpointProcessRestore(pid, &NOTHING), NOT_SUPPORTED);
    assert_eq!(state(pid), FAILED);
    assert_eq!(cuCheckpointProcessUnlock(pid, &NOTHING), ILLEGAL_STATE);
    program.tell("end");
    program.finish();
}

extern "C" fn sleep(milliseconds: u64) {
    std::thread::sleep(std::time::Duration::from_millis(milliseconds));
}

#[test]
#[ignore = "a program for other tests"]
fn busy_program() {
    context();
    let mut stream = 0;
    ok(cuStreamCreate(&mut stream, 0));
    ok(cuLaunchHostFunc(stream, sleep, 600));
    say("busy");
    ok(cuStreamSynchronize(stream));
    say("idle");
    listen();
    // Work that is submitted but that no call waits for does not keep the gate open.
    ok(cuLaunchHostFunc(stream, sleep, 300));
    say("submitted");
    listen();
}

#[test]
fn lock_has_a_time_limit() {
    let mut program = Program::start("busy_program", &[]);
    assert_eq!(program.hear(), "busy");
    let pid = program.pid();
    std::thread::sleep(std::time::Duration::from_millis(50));
    assert_eq!(cuCheckpointProcessLock(pid, &limit(20)), NOT_READY);
    assert_eq!(state(pid), RUNNING);
    assert_eq!(program.hear(), "idle");
    program.tell("go on");
    assert_eq!(program.hear(), "submitted");
    ok(cuCheckpointProcessLock(pid, &limit(20)));
    let begin = std::time::Instant::now();
    ok(cuCheckpointProcessCheckpoint(pid, &NOTHING));
    assert!(begin.elapsed().as_millis() > 150, "the checkpoint waits for work");
    program.kill();
}

/// Allocates, computes and frees until told to stop.
fn work(context: u64, seed: u32, stop: &AtomicBool) -> u32 {
    ok(cuCtxSetCurrent(context));
    let mut stream = 0;
    ok(cuStreamCreate(&mut stream, seed % 2));
    let kept = allocate(3000 * seed as usize);
    ok(cuMemsetD32_v2(kept, seed, 100));
    let mut rounds = 0;
    while !stop.load(Ordering::Relaxed) {
        let passing = allocate(if rounds % 3 == 0 { GRANULE } else { 512 });
        ok(cuMemcpyDtoDAsync_v2(passing, kept, 400, stream));
        ok(cuMemsetD32Async(passing + 400, seed + rounds, 1, stream));
        ok(cuStreamSynchronize(stream));
        assert_eq!(read(passing, 101)[99..], [seed, seed + rounds]);
        if rounds % 5 == 0 {
            let (handle, address) = map_new(GRANULE);
            write(address, &[rounds]);
            assert_eq!(read(address, 1), [rounds]);
            ok(cuMemUnmap(address, GRANULE));
            ok(cuMemRelease(handle));
            ok(cuMemAddressFree(address, GRANULE));
        }
        ok(cuMemFree_v2(passing));
        rounds += 1;
    }
    assert_eq!(read(kept, 100), vec![seed; 100]);
    rounds
}

#[test]
#[ignore = "a program for other tests"]
fn working_program() {
    let context = context();
    let stop = AtomicBool::new(false);
    std::thread::scope(|scope| {
        let workers: Vec<_> = (1..4)
            .map(|seed| {
                let stop = &stop;
                scope.spawn(move || work(context, seed, stop))
            })
            .collect();
        say("ready");
        listen();
        stop.store(true, Ordering::Relaxed);
        for worker in workers {
            assert!(worker.join().unwrap() > 3);
        }
    });
}

#[test]
fn a_program_with_several_threads_survives_many_checkpoints() {
    let mut program = Program::start("working_program", &[]);
    assert_eq!(program.hear(), "ready");
    let pid = program.pid();
    for pause in 0..12 {
        std::thread::sleep(std::time::Duration::from_millis(10 + pause % 3));
        ok(cuCheckpointProcessLock(pid, &limit(5000)));
        ok(cuCheckpointProcessCheckpoint(pid, &NOTHING));
        assert_eq!(device_memory_of(pid), Vec::<String>::new());
        ok(cuCheckpointProcessRestore(pid, &NOTHING));
        ok(cuCheckpointProcessUnlock(pid, &NOTHING));
    }
    program.tell("stop");
    program.finish();
}

#[test]
fn processes_without_the_driver_and_bad_arguments() {
    let mut state = 7;
    assert_eq!(cuCheckpointProcessGetState(1, &mut state), INVALID_VALUE);
    assert_eq!(cuCheckpointProcessGetState(-5, &mut state), INVALID_VALUE);
    assert_eq!(cuCheckpointProcessLock(0, &NOTHING), INVALID_VALUE);
    assert_eq!(state, 7);
    let mut reserved = NOTHING;
    reserved[5] = 1;
    assert_eq!(cuCheckpointProcessLock(std::process::id() as i32, &reserved), INVALID_VALUE);
}

#[test]
fn a_fault_on_demand() {
    let environment = [("SOFTCUDA_FAULT", "cuMemCreate:1:2")];
    Program::start("program_that_wants_memory", &environment).finish();
}

#[test]
#[ignore = "a program for other tests"]
fn program_that_wants_memory() {
    context();
    let mut handle = 0;
    assert_eq!(cuMemCreate(&mut handle, GRANULE, &SHAREABLE, 0), OUT_OF_MEMORY);
    ok(cuMemCreate(&mut handle, GRANULE, &SHAREABLE, 0));
}

#[test]
fn exclusive_mode_admits_one_process() {
    let environment = [("SOFTCUDA_COMPUTE_MODE", "exclusive")];
    let mut first = Program::start("program_in_exclusive_mode", &environment);
    first.tell("0");
    assert_eq!(first.hear(), "0");
    let mut second = Program::start("program_in_exclusive_mode", &environment);
    second.tell("go on");
    assert_eq!(second.hear(), DEVICE_UNAVAILABLE.to_string());
    second.finish();
    // A checkpointed process holds no context.
    let pid = first.pid();
    ok(cuCheckpointProcessLock(pid, &NOTHING));
    ok(cuCheckpointProcessCheckpoint(pid, &NOTHING));
    let mut third = Program::start("program_in_exclusive_mode", &environment);
    third.tell("go on");
    assert_eq!(third.hear(), "0");
    assert_eq!(cuCheckpointProcessRestore(pid, &NOTHING), DEVICE_UNAVAILABLE);
    assert_eq!(state(pid), CHECKPOINTED);
    third.kill();
    ok(cuCheckpointProcessRestore(pid, &NOTHING));
    ok(cuCheckpointProcessUnlock(pid, &NOTHING));
    first.kill();
}

#[test]
#[ignore = "a program for other tests"]
fn program_in_exclusive_mode() {
    listen();
    ok(cuInit(0));
    let mut context = 0;
    say(cuCtxCreate_v2(&mut context, 0, 0));
    listen();
}
