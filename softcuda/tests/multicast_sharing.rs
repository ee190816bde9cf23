//! Multicast objects that several processes have, for how long objects live, and checkpoints with them.

mod support;

use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};

use rustix::io::{FdFlags, fcntl_setfd};
use support::multicast::*;
use support::*;

const NOTHING: [u64; 8] = [0; 8];

const ON_ONE: [(&str, &str); 1] = [("SOFTCUDA_DEVICE", HOPPER)];
const ON_TWO: [(&str, &str); 2] = [("SOFTCUDA_DEVICE", HOPPER), ("SOFTCUDA_DEVICES", "2")];
/// Sums a word of all devices.
const LOAD: &str =
    "multimem.ld_reduce.relaxed.sys.global.add.u32 %r1, [%a]; st.global.u32 [%b], %r1;";

#[test]
fn an_object_lives_as_long_as_anybody_has_it() {
    Program::start("program_with_lifetimes", &ON_ONE).finish();
}

#[test]
#[ignore = "a program for other tests"]
fn program_with_lifetimes() {
    context();
    let result = allocate(64);
    let nothing = used();
    let bound = |value: u32| {
        let object = team(1, GRANULE);
        let (memory, address) = map_on(0, GRANULE);
        write(address, &[value]);
        ok(cuMulticastBindMem(object, 0, memory, 0, GRANULE, 0));
        ok(cuMemUnmap(address, GRANULE));
        ok(cuMemRelease(memory));
        assert_eq!(used(), nothing + GRANULE, "bound memory lives on");
        object
    };
    // As long as it is mapped.
    let object = bound(5);
    let at = map_object(object, GRANULE);
    ok(cuMemRelease(object));
    assert_eq!(cuMemRelease(object), INVALID_VALUE);
    ok(run(LOAD, &[at, result]));
    assert_eq!(read(result, 1), [5]);
    ok(cuMemUnmap(at, GRANULE));
    assert_eq!(used(), nothing, "it took what was bound with it");

    // As long as there is a handle, and until it is unbound.
    let object = bound(6);
    ok(cuMulticastUnbind(object, 0, 0, GRANULE));
    assert_eq!(used(), nothing);
    ok(cuMemRelease(object));

    // As long as there is a descriptor.
    let object = bound(7);
    let descriptor = export(object);
    ok(cuMemRelease(object));
    assert_eq!(used(), nothing + GRANULE);
    let again = import(&descriptor);
    assert_eq!(cuMulticastAddDevice(again, 0), INVALID_VALUE, "it was added");
    let at = map_object(again, GRANULE);
    ok(run(LOAD, &[at, result]));
    assert_eq!(read(result, 1), [7]);
    let twice = import(&descriptor);
    ok(cuMulticastUnbind(twice, 0, 0, GRANULE));
    assert_eq!(used(), nothing, "this process had bound it");
    for handle in [again, twice] {
        ok(cuMemRelease(handle));
    }
    ok(cuMemUnmap(at, GRANULE));
    drop(descriptor);

    // With the last descriptor it is gone, which is seen when something is created.
    let object = bound(8);
    let descriptor = export(object);
    ok(cuMemRelease(object));
    drop(descriptor);
    let (memory, address) = map_on(0, GRANULE);
    assert_eq!(used(), nothing + GRANULE, "the new memory alone");
    ok(cuMemUnmap(address, GRANULE));
    ok(cuMemRelease(memory));
    assert_eq!(used(), nothing);
}

#[test]
fn what_is_no_object_is_not_imported() {
    Program::start("importing_program", &ON_ONE).finish();
}

#[test]
#[ignore = "a program for other tests"]
fn importing_program() {
    use rustix::fs::{MemfdFlags, SealFlags, fcntl_add_seals, ftruncate, memfd_create};
    context();
    let mut handle = 0;
    let seals = SealFlags::SHRINK | SealFlags::GROW | SealFlags::SEAL;
    for size in [4096, 64 << 10, 128 << 10] {
        let file = memfd_create("other", MemfdFlags::ALLOW_SEALING).unwrap();
        ftruncate(&file, size).unwrap();
        fcntl_add_seals(&file, seals).unwrap();
        let number = file.as_raw_fd() as u64;
        assert_eq!(cuMemImportFromShareableHandle(&mut handle, number, 1), INVALID_VALUE, "{size}");
    }
    // What another process writes there is believed only as far as it can be true.
    let object = team(1, GRANULE);
    let descriptor = export(object);
    let at = map_object(object, GRANULE);
    let context = context();
    let words = |words: &[u64], at: u64| {
        let bytes: Vec<u8> = words.iter().flat_map(|word| word.to_le_bytes()).collect();
        rustix::io::pwrite(&descriptor, &bytes, at).unwrap();
    };
    const BINDINGS: u64 = 8 * (6 + 16);
    const CHANGES: u64 = 8 * 4;
    let own = u64::from(std::process::id());
    let number = descriptor.as_raw_fd() as u64;
    for binding in [
        [1, 0, GRANULE as u64, own, number, 1, GRANULE as u64, 0],
        [1, 0, u64::MAX, own, number, 1, GRANULE as u64, 0],
        [1, 0, GRANULE as u64, u64::MAX, u64::MAX, 1, u64::MAX, u64::MAX],
        [u64::MAX; 8],
    ] {
        words(&binding, BINDINGS);
        let mut changes = [0; 8];
        rustix::io::pread(&descriptor, &mut changes, CHANGES).unwrap();
        words(&[u64::from_le_bytes(changes) + 1], CHANGES);
        let result = allocate(64);
        assert_eq!(run(LOAD, &[at, result]), ILLEGAL_ADDRESS, "{binding:?}");
        ok(cuCtxDestroy_v2(context_of_now()));
        self::context();
    }
    let _ = context;
    words(&[0], 8 * 2);
    assert_eq!(cuMemImportFromShareableHandle(&mut handle, number, 1), INVALID_VALUE, "no size");
}

fn context_of_now() -> u64 {
    unsafe extern "C" {
        safe fn cuCtxGetCurrent(context: &mut u64) -> u32;
    }
    let mut context = 0;
    ok(cuCtxGetCurrent(&mut context));
    context
}

#[track_caller]
fn export(object: u64) -> OwnedFd {
    let mut number = -1;
    ok(cuMemExportToShareableHandle(&mut number, object, 1, 0));
    // SAFETY: the call has made it, and nobody else has it.
    unsafe { OwnedFd::from_raw_fd(number) }
}

#[track_caller]
fn import(descriptor: &OwnedFd) -> u64 {
    let mut handle = 0;
    let number = descriptor.as_raw_fd() as u64;
    ok(cuMemImportFromShareableHandle(&mut handle, number, 1));
    handle
}

#[test]
fn processes_share_an_object() {
    Program::start("first_process", &ON_TWO).finish();
}

#[test]
#[ignore = "a program for other tests"]
fn first_process() {
    context();
    let object = create(2, GRANULE);
    let descriptor = export(object);
    fcntl_setfd(&descriptor, FdFlags::empty()).unwrap();
    let number = descriptor.as_raw_fd().to_string();
    let mut other = Program::start("second_process", &[("SECOND_PROCESS", &number)]);
    assert_eq!(other.hear(), "imported");
    drop(descriptor);
    ok(cuMulticastAddDevice(object, 0));
    let (memory, address) = map_on(0, GRANULE);
    write(address, &[1, 0]);
    // The other one adds its device when it is told to, which this waits for.
    other.tell("add");
    ok(cuMulticastBindMem(object, 0, memory, 0, GRANULE, 0));
    let at = map_object(object, GRANULE);
    assert_eq!(other.hear(), "bound");
    let result = allocate(64);
    ok(run(LOAD, &[at, result]));
    assert_eq!(read(result, 1), [1 + 20]);
    ok(run("multimem.st.relaxed.sys.global.u32 [%a], 300;", &[at, result]));
    other.tell("stored");
    // Both add at the same time, and nothing is lost.
    ok(run_many("multimem.red.relaxed.sys.global.add.u32 [%a+4], 1;", 200, &[at, result]));
    assert_eq!(other.hear(), "added");
    assert_eq!(read(address, 2), [300, 2 * 200 * 32]);

    // What the other one gives up stays bound, and what it unbinds is gone.
    other.tell("release");
    assert_eq!(other.hear(), "released");
    ok(run(LOAD, &[at, result]));
    assert_eq!(read(result, 1), [600]);
    other.tell("unbind");
    assert_eq!(other.hear(), "unbound");
    assert_eq!(run(LOAD, &[at, result]), ILLEGAL_ADDRESS);
    other.finish();
}

#[test]
#[ignore = "a program for other tests"]
fn second_process() {
    let number: i32 = std::env::var("SECOND_PROCESS").unwrap().parse().unwrap();
    let mut context = 0;
    ok(cuInit(0));
    ok(cuCtxCreate_v2(&mut context, 0, 1));
    // SAFETY: it was inherited, and nobody else here has it.
    let descriptor = unsafe { OwnedFd::from_raw_fd(number) };
    let object = import(&descriptor);
    assert_eq!(cuMemExportToShareableHandle(&mut -1, object, 1, 0), INVALID_VALUE, "as memory");
    say("imported");
    assert_eq!(listen(), "add");
    assert_eq!(cuMulticastAddDevice(object, 0), INVALID_VALUE, "the first process has");
    ok(cuMulticastAddDevice(object, 1));
    let (memory, address) = map_on(1, GRANULE);
    write(address, &[20, 0]);
    ok(cuMulticastBindMem(object, 0, memory, 0, GRANULE, 0));
    let at = map_object_on(1, object, GRANULE);
    say("bound");
    assert_eq!(listen(), "stored");
    assert_eq!(read(address, 1), [300]);
    let result = allocate(64);
    ok(run_many("multimem.red.relaxed.sys.global.add.u32 [%a+4], 1;", 200, &[at, result]));
    say("added");
    assert_eq!(listen(), "release");
    let before = used();
    for (handle, address) in [(memory, address), (object, at)] {
        ok(cuMemUnmap(address, GRANULE));
        ok(cuMemRelease(handle));
    }
    assert_eq!(used(), before, "others have the object");
    say("released");
    assert_eq!(listen(), "unbind");
    let object = import(&descriptor);
    ok(cuMulticastUnbind(object, 1, 0, GRANULE));
    assert_eq!(used(), before - GRANULE);
    say("unbound");
}

#[test]
fn a_process_that_ends_makes_room() {
    Program::start("surviving_program", &ON_TWO).finish();
}

#[test]
#[ignore = "a program for other tests"]
fn surviving_program() {
    context();
    let object = team(2, GRANULE);
    let descriptor = export(object);
    fcntl_setfd(&descriptor, FdFlags::empty()).unwrap();
    let number = descriptor.as_raw_fd().to_string();
    let mut other = Program::start("program_that_is_killed", &[("SECOND_PROCESS", &number)]);
    assert_eq!(other.hear(), "bound");
    let (memory, _) = map_on(1, GRANULE);
    assert_eq!(cuMulticastBindMem(object, 0, memory, 0, GRANULE, 0), INVALID_VALUE);
    other.kill();
    ok(cuMulticastBindMem(object, 0, memory, 0, GRANULE, 0));
}

#[test]
#[ignore = "a program for other tests"]
fn program_that_is_killed() {
    let number: i32 = std::env::var("SECOND_PROCESS").unwrap().parse().unwrap();
    ok(cuInit(0));
    // SAFETY: it was inherited, and nobody else here has it.
    let object = import(&unsafe { OwnedFd::from_raw_fd(number) });
    let (memory, _) = map_on(1, GRANULE);
    ok(cuMulticastBindMem(object, 0, memory, 0, GRANULE, 0));
    say("bound");
    listen();
}

#[test]
fn a_checkpoint_with_an_object_loses_the_process() {
    // Who restores has to see the same devices.
    Program::start("losing_program", &ON_ONE).finish();
}

#[test]
fn a_checkpoint_after_it_is_gone_carries_all() {
    Program::start("carrying_program", &ON_ONE).finish();
}

#[test]
#[ignore = "a program for other tests"]
fn losing_program() {
    for what in ["mapped", "bound", "left"] {
        let mut program = Program::start("program_at_a_checkpoint", &ON_ONE);
        program.tell(what);
        assert_eq!(program.hear(), "ready");
        let pid = program.pid();
        ok(cuCheckpointProcessLock(pid, &NOTHING));
        ok(cuCheckpointProcessCheckpoint(pid, &NOTHING));
        assert_eq!(devices_memory_of(pid), usize::from(what == "left"), "{what}: the descriptor");
        assert_eq!(cuCheckpointProcessRestore(pid, &NOTHING), NOT_SUPPORTED, "{what}");
        program.tell("end");
        assert_eq!(program.hear(), "lost");
        program.finish();
    }
}

#[test]
#[ignore = "a program for other tests"]
fn carrying_program() {
    let mut program = Program::start("program_at_a_checkpoint", &ON_ONE);
    program.tell("released");
    assert_eq!(program.hear(), "ready");
    program.checkpoint_and_restore();
    program.tell("end");
    assert_eq!(program.hear(), "restored");
    program.finish();
}

/// How many files of the driver a process has open or mapped.
fn devices_memory_of(pid: i32) -> usize {
    let maps = std::fs::read_to_string(format!("/proc/{pid}/maps")).unwrap();
    let open = std::fs::read_dir(format!("/proc/{pid}/fd")).unwrap();
    let open = open.filter_map(|file| std::fs::read_link(file.unwrap().path()).ok());
    let is_ours = |text: &str| text.contains("memfd:softcuda");
    maps.lines().filter(|line| is_ours(line)).count()
        + open.filter(|target| is_ours(&target.to_string_lossy())).count()
}

#[test]
#[ignore = "a program for other tests"]
fn program_at_a_checkpoint() {
    context();
    let what = listen();
    let object = team(1, GRANULE);
    let (memory, address) = map_on(0, GRANULE);
    write(address, &[5]);
    ok(cuMulticastBindMem(object, 0, memory, 0, GRANULE, 0));
    let at = map_object(object, GRANULE);
    let result = allocate(64);
    ok(run(LOAD, &[at, result]));
    let mut descriptor = None;
    match &what[..] {
        "bound" => ok(cuMemUnmap(at, GRANULE)),
        "left" => {
            descriptor = Some(export(object));
            ok(cuMemUnmap(at, GRANULE));
            ok(cuMemRelease(object));
        }
        "released" => {
            ok(cuMulticastUnbind(object, 0, 0, GRANULE));
            ok(cuMemUnmap(at, GRANULE));
            ok(cuMemRelease(object));
        }
        _ => {}
    }
    say("ready");
    listen();
    if what == "released" {
        assert_eq!(read(address, 1), [5]);
        say("restored");
    } else {
        assert_ne!(cuCtxSynchronize(), 0);
        say("lost");
    }
    drop(descriptor);
}
