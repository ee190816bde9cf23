//! Memory shared through IPC handles, and several devices.

mod support;

use support::*;

unsafe extern "C" {
    safe fn cuIpcGetMemHandle(handle: &mut Handle, address: u64) -> u32;
    safe fn cuIpcOpenMemHandle_v2(address: &mut u64, handle: Handle, flags: u32) -> u32;
    safe fn cuIpcCloseMemHandle(address: u64) -> u32;
    safe fn cuDeviceCanAccessPeer(out: &mut i32, one: i32, other: i32) -> u32;
    safe fn cuDeviceGetP2PAttribute(out: &mut i32, number: u32, one: i32, other: i32) -> u32;
    safe fn cuCtxEnablePeerAccess(context: u64, flags: u32) -> u32;
    safe fn cuCtxDisablePeerAccess(context: u64) -> u32;
    safe fn cuMemcpyPeer(
        to: u64,
        to_context: u64,
        from: u64,
        from_context: u64,
        size: usize,
    ) -> u32;
    fn cuPointerGetAttribute(out: *mut u64, attribute: u32, address: u64) -> u32;
}

/// `CUipcMemHandle`.
#[repr(C)]
#[derive(Clone, Copy, PartialEq, Debug)]
struct Handle([u64; 8]);

const NOTHING: [u64; 8] = [0; 8];
const INVALID_CONTEXT: u32 = 201;
const MAP_FAILED: u32 = 205;

#[track_caller]
fn handle_of(address: u64) -> Handle {
    let mut handle = Handle([0; 8]);
    ok(cuIpcGetMemHandle(&mut handle, address));
    handle
}

fn text(handle: &Handle) -> String {
    handle.0.map(|word| word.to_string()).join(" ")
}

fn parse(text: &str) -> Handle {
    let words: Vec<u64> = text.split(' ').map(|word| word.parse().unwrap()).collect();
    Handle(words.try_into().unwrap())
}

#[track_caller]
fn open(handle: Handle) -> u64 {
    let mut address = 0;
    ok(cuIpcOpenMemHandle_v2(&mut address, handle, 1));
    address
}

#[test]
#[ignore = "a program for other tests"]
fn program() {
    context();
    let (small, other, large) = (allocate(4000), allocate(4000), allocate(3 * GRANULE));
    write(small, &[1, 2]);
    write(other, &[3]);
    write(large + GRANULE as u64, &[4]);
    let mut handle = Handle([0; 8]);
    assert_eq!(cuIpcGetMemHandle(&mut handle, small + 4), INVALID_VALUE);
    assert_eq!(cuIpcGetMemHandle(&mut handle, map_new(GRANULE).1), INVALID_VALUE);
    let handle = handle_of(small);
    assert_eq!(handle_of(small), handle);
    let mut address = 0;
    assert_eq!(cuIpcOpenMemHandle_v2(&mut address, handle, 1), INVALID_CONTEXT);
    // Sharing leaves the contents alone, those of neighbours included.
    assert_eq!((read(small, 2), read(other, 1)), (vec![1, 2], vec![3]));
    for address in [small, other, large] {
        say(text(&handle_of(address)));
    }
    assert_eq!(listen(), "written");
    assert_eq!((read(small, 2), read(other, 1)), (vec![1, 20], vec![30]));
    assert_eq!(read(large + GRANULE as u64, 1), [40]);
    write(small, &[100]);
    say("seen");
    if listen() == "free" {
        for address in [small, other, large] {
            ok(cuMemFree_v2(address));
        }
        say("freed");
        listen();
        let again = allocate(8);
        write(again, &[5]);
    } else {
        listen();
        assert_ne!(cuCtxSynchronize(), 0);
    }
}

/// Opens the program's memory and writes to it.
fn share(program: &mut Program) -> [(Handle, u64); 3] {
    context();
    let handles = [(); 3].map(|()| parse(&program.hear()));
    let opened = handles.map(|handle| (handle, open(handle)));
    let [small, other, large] = opened.map(|(_, address)| address);
    assert_eq!((read(small, 2), read(other, 1)), (vec![1, 2], vec![3]));
    write(small + 4, &[20]);
    write(other, &[30]);
    write(large + GRANULE as u64, &[40]);
    program.tell("written");
    assert_eq!(program.hear(), "seen");
    assert_eq!(read(small, 1), [100]);
    opened
}

#[test]
fn processes_share_memory() {
    let mut program = Program::start("program", &[]);
    let [(small_handle, small), (_, other), (large_handle, large)] = share(&mut program);
    assert_eq!(used(), 4 * GRANULE);
    assert_eq!(open(small_handle), small, "opened again, counted");
    // SAFETY: the attribute has 8 bytes.
    unsafe {
        let mut size = 0;
        ok(cuPointerGetAttribute(&mut size, 12, small + 8));
        assert_eq!(size, 4000);
    }
    let mut address = 0;
    assert_eq!(cuIpcOpenMemHandle_v2(&mut address, small_handle, 0), INVALID_VALUE);
    assert_eq!(cuIpcOpenMemHandle_v2(&mut address, Handle([7; 8]), 1), INVALID_VALUE);
    assert_eq!(cuMemFree_v2(small), INVALID_VALUE);
    assert_eq!(cuIpcCloseMemHandle(small + 4), INVALID_VALUE);
    ok(cuIpcCloseMemHandle(small));
    assert_eq!(read(small, 1), [100]);
    ok(cuIpcCloseMemHandle(small));
    assert_eq!(cuIpcCloseMemHandle(small), INVALID_VALUE);
    assert_eq!(read(other, 1), [30]);
    ok(cuIpcCloseMemHandle(other));
    ok(cuIpcCloseMemHandle(large));
    assert_eq!(used(), 0);

    program.tell("free");
    assert_eq!(program.hear(), "freed");
    assert_eq!(cuIpcOpenMemHandle_v2(&mut address, large_handle, 1), MAP_FAILED);
    // What is not shared any more is carried.
    let pid = program.pid();
    ok(cuCheckpointProcessLock(pid, &NOTHING));
    ok(cuCheckpointProcessCheckpoint(pid, &NOTHING));
    let maps = std::fs::read_to_string(format!("/proc/{pid}/maps")).unwrap();
    assert!(!maps.contains("memfd:softcuda"));
    ok(cuCheckpointProcessRestore(pid, &NOTHING));
    ok(cuCheckpointProcessUnlock(pid, &NOTHING));
    program.tell("go on");
    program.finish();
}

#[test]
fn shared_memory_at_the_checkpoint_loses_the_process() {
    let mut program = Program::start("program", &[]);
    share(&mut program);
    program.tell("keep");
    let pid = program.pid();
    ok(cuCheckpointProcessLock(pid, &NOTHING));
    ok(cuCheckpointProcessCheckpoint(pid, &NOTHING));
    for file in std::fs::read_dir(format!("/proc/{pid}/fd")).unwrap() {
        let target = std::fs::read_link(file.unwrap().path()).unwrap_or_default();
        assert!(!target.to_string_lossy().contains("memfd:softcuda"));
    }
    assert_eq!(cuCheckpointProcessRestore(pid, &NOTHING), NOT_SUPPORTED);
    program.tell("end");
    program.finish();
}

#[test]
fn devices_access_each_other() {
    Program::start("program_on_two_devices", &[("SOFTCUDA_DEVICES", "2")]).finish();
}

#[test]
#[ignore = "a program for other tests"]
fn program_on_two_devices() {
    let zero = context();
    let mine = allocate(4096);
    let mut one = 0;
    ok(cuCtxCreate_v2(&mut one, 0, 1));
    let theirs = allocate(4096);
    assert_eq!(used(), GRANULE, "each device has memory of its own");
    let device_of = |address: u64| {
        let mut device = 0;
        // SAFETY: the attribute has 4 bytes.
        ok(unsafe { cuPointerGetAttribute(&mut device, 9, address) });
        device
    };
    assert_eq!((device_of(mine), device_of(theirs)), (0, 1));

    let mut value = 9;
    ok(cuDeviceCanAccessPeer(&mut value, 0, 1));
    assert_eq!(value, 1);
    ok(cuDeviceCanAccessPeer(&mut value, 1, 1));
    assert_eq!(value, 0);
    assert_eq!(cuDeviceCanAccessPeer(&mut value, 0, 2), 101);
    ok(cuDeviceGetP2PAttribute(&mut value, 2, 0, 1));
    assert_eq!(value, 1);
    assert_eq!(cuDeviceGetP2PAttribute(&mut value, 99, 0, 1), INVALID_VALUE);
    assert_eq!(cuDeviceGetP2PAttribute(&mut value, 2, 1, 1), 101);

    assert_eq!(cuCtxDisablePeerAccess(zero), 705);
    ok(cuCtxEnablePeerAccess(zero, 0));
    assert_eq!(cuCtxEnablePeerAccess(zero, 0), 704);
    assert_eq!(cuCtxEnablePeerAccess(zero, 1), INVALID_VALUE);
    assert_eq!(cuCtxEnablePeerAccess(one, 0), INVALID_CONTEXT);
    let mut same_device = 0;
    ok(cuCtxCreate_v2(&mut same_device, 0, 1));
    assert_eq!(cuCtxEnablePeerAccess(one, 0), 217);
    ok(cuCtxDestroy_v2(same_device));
    ok(cuCtxDisablePeerAccess(zero));

    write(mine, &[1, 2, 3]);
    ok(cuMemcpyPeer(theirs, one, mine, zero, 12));
    assert_eq!(read(theirs, 3), [1, 2, 3]);
    assert_eq!(cuMemcpyPeer(theirs, 77, mine, zero, 12), INVALID_CONTEXT);
    ok(cuCtxDestroy_v2(one));
    assert_eq!(cuCtxEnablePeerAccess(one, 0), INVALID_CONTEXT);
}
