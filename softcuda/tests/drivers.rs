//! The drivers that softcuda presents itself as: versions, functions, and what their checkpoints can do.

mod support;

use support::*;

unsafe extern "C" {
    fn cuGetProcAddress_v2(
        name: *const u8,
        out: &mut usize,
        version: i32,
        flags: u64,
        status: &mut u32,
    ) -> u32;
    fn cuPointerGetAttribute(out: *mut u64, attribute: u32, address: u64) -> u32;
    fn cuGetProcAddress(name: *const u8, out: &mut usize, version: i32, flags: u64) -> u32;
    safe fn cuFuncGetParamCount(function: u64, count: &mut usize) -> u32;
    safe fn cuLaunchHostFunc_v2(
        stream: u64,
        function: extern "C" fn(u64),
        data: u64,
        how_to_wait: u32,
    ) -> u32;
    safe fn cuMemcpyWithAttributesAsync(
        to: u64,
        from: u64,
        size: usize,
        attributes: &[u32; 6],
        stream: u64,
    ) -> u32;
    safe fn cuGraphGetId(graph: u64, id: &mut u32) -> u32;
    safe fn cuCheckpointOperationComplete(handle: u64) -> u32;
    safe fn cuDeviceGetAttribute(value: &mut i32, attribute: u32, device: i32) -> u32;
    safe fn cuDevicePrimaryCtxRetain(context: &mut u64, device: i32) -> u32;
    safe fn cuStreamGetCtx(stream: u64, context: &mut u64) -> u32;
    safe fn cuStreamBeginCapture_v2(stream: u64, mode: u32) -> u32;
    safe fn cuStreamEndCapture(stream: u64, graph: &mut u64) -> u32;
    safe fn cuIpcGetMemHandle(handle: &mut Handle, address: u64) -> u32;
    safe fn cuIpcOpenMemHandle_v2(address: &mut u64, handle: Handle, flags: u32) -> u32;
    safe fn cuIpcCloseMemHandle(address: u64) -> u32;
}

/// `CUipcMemHandle`.
#[repr(C)]
#[derive(Clone, Copy, PartialEq, Debug)]
struct Handle([u64; 8]);

const NOTHING: [u64; 8] = [0; 8];
const INVALID_CONTEXT: u32 = 201;
const INVALID_PTX: u32 = 218;
const UNSUPPORTED_PTX_VERSION: u32 = 222;
const NOT_FOUND: u32 = 500;
/// `CU_POINTER_ATTRIBUTE_LOCALITY_DOMAIN_ORDINAL`
const LOCALITY_DOMAIN: u32 = 22;
const CAPTURE_UNSUPPORTED: u32 = 900;
const CAPTURE_INVALIDATED: u32 = 901;
const LOCKED: u32 = 1;
const CHECKPOINTED: u32 = 2;
const CHECKPOINTING: u32 = 4;
const RESTORING: u32 = 5;
/// Drivers by name, and the versions of the API that they have.
const DRIVERS: [(&str, i32); 4] =
    [("580", 13_000), ("590", 13_010), ("610", 13_030), ("13.4", 13_040)];

#[track_caller]
fn state(pid: i32) -> u32 {
    let mut state = 99;
    ok(cuCheckpointProcessGetState(pid, &mut state));
    state
}

/// The code, whether an address was given, and the status.
fn find(name: &std::ffi::CStr, version: i32) -> (u32, bool, u32) {
    let (mut address, mut status) = (7, 9);
    // SAFETY: the name is a C string.
    let code =
        unsafe { cuGetProcAddress_v2(name.as_ptr().cast(), &mut address, version, 0, &mut status) };
    (code, !matches!(address, 0 | 7), status)
}

#[test]
#[ignore = "a program for other tests"]
fn telling_program() {
    let mut version = 0;
    ok(cuDriverGetVersion(&mut version));
    ok(cuInit(0));
    for (name, since) in [
        (c"cuMemAlloc", 2000),
        (c"cuGraphGetId", 13_010),
        (c"cuMemcpyWithAttributesAsync", 13_020),
        (c"cuLogicalEndpointCreate", 13_030),
        (c"cuCheckpointOperationComplete", 13_040),
    ] {
        let is_there = since <= version;
        let found = find(name, version);
        assert_eq!(found, (0, is_there, if is_there { 0 } else { 1 }), "{name:?}");
        if is_there {
            assert_eq!(find(name, since), (0, true, 0), "{name:?}");
            assert_eq!(find(name, since - 1), (0, false, 2), "{name:?}");
        }
        // What is later than the driver is refused, whatever the name.
        assert_eq!(find(name, version + 1), (INVALID_VALUE, false, 9), "{name:?}");
    }
    assert_eq!(find(c"cuNothing", version), (0, false, 1));
    let mut address = 7;
    // SAFETY: the name is a C string.
    let code = unsafe { cuGetProcAddress(c"cuNothing".as_ptr().cast(), &mut address, version, 0) };
    assert_eq!((code, address), (NOT_FOUND, 0));
    // The exported symbols are there in any case.
    let mut id = 0;
    let since = |since, otherwise| if version < since { NOT_FOUND } else { otherwise };
    assert_eq!(cuGraphGetId(0, &mut id), since(13_010, NOT_SUPPORTED));
    assert_eq!(cuCheckpointOperationComplete(7), since(13_040, INVALID_VALUE));
    let attribute = |number| cuDeviceGetAttribute(&mut 7, number, 0);
    assert_eq!(attribute(147), 0);
    assert_eq!(attribute(148), if version < 13_010 { INVALID_VALUE } else { 0 });
    assert_eq!(attribute(156), if version < 13_030 { INVALID_VALUE } else { 0 });
    assert_eq!(attribute(157), if version < 13_040 { INVALID_VALUE } else { 0 });
    // Arguments of a checkpoint that name no place are refused where there is no such place.
    let mut arguments = NOTHING;
    arguments[0] = 64;
    let own = std::process::id() as i32;
    let refusal = if version < 13_040 { INVALID_VALUE } else { NOT_SUPPORTED };
    assert_eq!(cuCheckpointProcessCheckpoint(own, &arguments), refusal);
    say(version);
}

#[test]
fn each_driver_has_its_version_and_its_functions() {
    for (name, version) in DRIVERS {
        let mut program = Program::start("telling_program", &[("SOFTCUDA_DRIVER", name)]);
        assert_eq!(program.hear(), version.to_string(), "{name}");
        program.finish();
    }
    let mut program = Program::start("telling_program", &[]);
    assert_eq!(program.hear(), "13000", "what softcuda is when nobody says anything");
    program.finish();
}

/// Loads PTX of this version whose rest is as given: the code.
fn load(version: (u32, u32), rest: &str) -> u32 {
    let text =
        format!(".version {}.{}\n.target sm_80\n.address_size 64\n{rest}\0", version.0, version.1);
    let mut module = 0;
    // SAFETY: a C string.
    unsafe { cuModuleLoadData(&mut module, text.as_ptr()) }
}

#[test]
#[ignore = "a program for other tests"]
fn compiling_program() {
    context();
    let mut version = 0;
    ok(cuDriverGetVersion(&mut version));
    let minor = version as u32 % 1000 / 10;
    for (ptx, expected) in [
        ((8, 8), 0),
        ((9, 0), 0),
        ((9, minor), 0),
        ((9, minor + 1), UNSUPPORTED_PTX_VERSION),
        ((10, 0), UNSUPPORTED_PTX_VERSION),
    ] {
        assert_eq!(load(ptx, ""), expected, "{ptx:?}");
    }
    // What such PTX may have is not looked at.
    assert_eq!(load((9, minor), ".visible .entry new() { newer.b32; }"), INVALID_PTX);
    assert_eq!(
        load((9, minor + 1), ".visible .entry new() { newer.b32; }"),
        UNSUPPORTED_PTX_VERSION
    );
    say(minor);
}

#[test]
fn ptx_that_is_newer_than_the_driver_is_refused() {
    for (name, version) in DRIVERS {
        let mut program = Program::start("compiling_program", &[("SOFTCUDA_DRIVER", name)]);
        assert_eq!(program.hear(), (version % 1000 / 10).to_string(), "{name}");
        program.finish();
    }
}

#[test]
#[ignore = "a program for other tests"]
fn placing_program() {
    context();
    let memory = allocate(100);
    let mut domain = 7;
    // SAFETY: there is room for the attribute.
    let code = unsafe { cuPointerGetAttribute(&mut domain, LOCALITY_DOMAIN, memory) };
    say(format!("{code} {}", domain as u32 as i32));
}

/// An attribute of pointers that came with CUDA 13.4, and that its runtime asks older drivers for too.
#[test]
fn an_attribute_of_a_later_driver_is_no_attribute() {
    for (name, expected) in [("580", "1 7"), ("610", "1 7"), ("13.4", "0 -1")] {
        let mut program = Program::start("placing_program", &[("SOFTCUDA_DRIVER", name)]);
        assert_eq!(program.hear(), expected, "{name}");
        program.finish();
    }
}

extern "C" fn count(calls: u64) {
    // SAFETY: the number lives until the stream is done.
    unsafe { &*(calls as *const std::sync::atomic::AtomicU32) }
        .fetch_add(1, std::sync::atomic::Ordering::SeqCst);
}

#[test]
#[ignore = "a program for other tests"]
fn newer_program() {
    context();
    let (mut module, mut function, mut parameters, mut stream) = (0, 0, 0, 0);
    let code = c".version 8.0\n.target sm_80\n.address_size 64\n.entry k(.param .u64 a, .param .u32 b) { ret; }\n";
    // SAFETY: the texts are C strings.
    unsafe {
        ok(cuModuleLoadData(&mut module, code.as_ptr().cast()));
        ok(cuModuleGetFunction(&mut function, module, c"k".as_ptr().cast()));
    }
    let mut version = 0;
    ok(cuDriverGetVersion(&mut version));
    if version < 13_020 {
        assert_eq!(cuFuncGetParamCount(function, &mut parameters), NOT_FOUND);
        return;
    }
    ok(cuFuncGetParamCount(function, &mut parameters));
    assert_eq!(parameters, 2);
    assert_eq!(cuFuncGetParamCount(7, &mut parameters), INVALID_HANDLE);
    ok(cuStreamCreate(&mut stream, 0));
    let calls = std::sync::atomic::AtomicU32::new(0);
    ok(cuLaunchHostFunc_v2(stream, count, &raw const calls as u64, 0));
    let (from, to) = (allocate(8), allocate(8));
    write(from, &[1, 2]);
    // The source is read in the order of the stream; no hints, no flags.
    ok(cuMemcpyWithAttributesAsync(to, from, 8, &[1, 0, 0, 0, 0, 0], stream));
    assert_eq!(
        cuMemcpyWithAttributesAsync(to, from, 8, &[9, 0, 0, 0, 0, 0], stream),
        INVALID_VALUE
    );
    ok(cuStreamSynchronize(stream));
    assert_eq!((read(to, 2), calls.load(std::sync::atomic::Ordering::SeqCst)), (vec![1, 2], 1));
}

#[test]
fn some_functions_of_later_drivers_work() {
    for driver in ["590", "610", "13.4"] {
        Program::start("newer_program", &[("SOFTCUDA_DRIVER", driver)]).finish();
    }
}

#[test]
#[ignore = "a program for other tests"]
fn mistaken_program() {
    assert_eq!(cuInit(0), INVALID_VALUE);
    assert_eq!(cuInit(0), INVALID_VALUE);
    assert_eq!(cuDriverGetVersion(&mut 0), INVALID_VALUE);
}

#[test]
fn an_unknown_driver_is_refused_with_the_names_of_the_known() {
    let said = mistake("mistaken_program", "SOFTCUDA_DRIVER", "600");
    let wanted =
        "softcuda: SOFTCUDA_DRIVER=600 is no driver that softcuda knows: 580, 590, 610, 13.4";
    assert_eq!(said.matches("softcuda: ").count(), 1, "{said}");
    assert!(said.contains(wanted), "{said}");
}

#[test]
#[ignore = "a program for other tests"]
fn owner() {
    context();
    let (small, large) = (allocate(4000), allocate(3 * GRANULE));
    write(small, &[1]);
    write(large, &[10]);
    for address in [small, large] {
        let mut handle = Handle([0; 8]);
        ok(cuIpcGetMemHandle(&mut handle, address));
        say(handle.0.map(|word| word.to_string()).join(" "));
    }
    loop {
        match listen().as_str() {
            "read" => say(format!("{} {}", read(small, 1)[0], read(large, 1)[0])),
            "write" => {
                write(small, &[read(small, 1)[0] + 1]);
                say("written");
            }
            _ => return,
        }
    }
}

#[test]
#[ignore = "a program for other tests"]
fn user() {
    context();
    let opened = [(); 2].map(|()| {
        let words: Vec<u64> = listen().split(' ').map(|word| word.parse().unwrap()).collect();
        let mut address = 0;
        ok(cuIpcOpenMemHandle_v2(&mut address, Handle(words.try_into().unwrap()), 1));
        address
    });
    let [small, large] = opened;
    say(format!("{small} {large}"));
    loop {
        match listen().as_str() {
            "read" => say(format!("{} {}", read(small, 1)[0], read(large, 1)[0])),
            "write" => {
                write(large, &[read(large, 1)[0] + 1]);
                say("written");
            }
            _ => break,
        }
    }
    opened.iter().for_each(|address| ok(cuIpcCloseMemHandle(*address)));
    assert_eq!(used(), 0);
}

const JOB: [(&str, &str); 2] =
    [("SOFTCUDA_DRIVER", "610"), ("CUDA_CHECKPOINT_JOB_FILE", "/dev/null")];

/// A process with memory and another one that has opened it, and the handles.
fn sharers(environment: &[(&str, &str)]) -> (Program, Program, [String; 2]) {
    let mut owner = Program::start("owner", environment);
    let handles = [owner.hear(), owner.hear()];
    (owner, opener(&handles, environment).0, handles)
}

fn opener(handles: &[String; 2], environment: &[(&str, &str)]) -> (Program, String) {
    let mut user = Program::start("user", environment);
    handles.iter().for_each(|handle| user.tell(handle));
    let addresses = user.hear();
    (user, addresses)
}

#[track_caller]
fn asked(program: &mut Program) -> String {
    program.tell("read");
    program.hear()
}

#[test]
fn driver_610_carries_memory_that_the_processes_of_a_job_share() {
    let (mut owner, mut user, handles) = sharers(&JOB);
    assert_eq!(asked(&mut user), "1 10");
    for turn in 0..2 {
        let both = [owner.pid(), user.pid()];
        both.iter().for_each(|pid| ok(cuCheckpointProcessLock(*pid, &NOTHING)));
        both.iter().for_each(|pid| ok(cuCheckpointProcessCheckpoint(*pid, &NOTHING)));
        for pid in both {
            let maps = std::fs::read_to_string(format!("/proc/{pid}/maps")).unwrap();
            assert!(!maps.contains("memfd:softcuda"));
        }
        // Who has memory of the other waits for it.
        ok(cuCheckpointProcessRestore(user.pid(), &NOTHING));
        assert_eq!(cuCheckpointProcessUnlock(user.pid(), &NOTHING), ILLEGAL_STATE);
        assert_eq!(state(user.pid()), LOCKED);
        ok(cuCheckpointProcessRestore(owner.pid(), &NOTHING));
        both.iter().for_each(|pid| ok(cuCheckpointProcessUnlock(*pid, &NOTHING)));
        for program in [&mut owner, &mut user] {
            program.tell("write");
            assert_eq!(program.hear(), "written");
        }
        let now = format!("{} {}", 2 + turn, 11 + turn);
        assert_eq!([asked(&mut owner), asked(&mut user)], [now.clone(), now]);
    }
    // Handles that were given out before lead to the memory that is there now.
    let (mut late, _) = opener(&handles, &JOB);
    assert_eq!(asked(&mut late), "3 12");
    late.tell("end");
    late.finish();
    user.tell("end");
    user.finish();
    owner.tell("end");
    owner.finish();
}

#[test]
fn without_a_job_or_with_an_older_driver_shared_memory_is_lost() {
    let job = JOB[1];
    for environment in [&[JOB[0]][..], &[("SOFTCUDA_DRIVER", "590"), job]] {
        let (owner, user, _) = sharers(environment);
        for pid in [owner.pid(), user.pid()] {
            ok(cuCheckpointProcessLock(pid, &NOTHING));
            ok(cuCheckpointProcessCheckpoint(pid, &NOTHING));
            assert_eq!(cuCheckpointProcessRestore(pid, &NOTHING), NOT_SUPPORTED);
        }
        owner.kill();
        user.kill();
    }
}

#[test]
#[ignore = "a program for other tests"]
fn stored_program() {
    context();
    let (large, small) = (allocate(3 * GRANULE), allocate(100));
    let (_, mapped) = map_new(2 * GRANULE);
    write(large + 4096, &[1, 2]);
    write(small, &[3]);
    write(mapped + GRANULE as u64, &[4]);
    say("ready");
    listen();
    let found = [read(large + 4096, 2), read(small, 1), read(mapped + GRANULE as u64, 1)];
    say(format!("{found:?}"));
    write(mapped, &[5]);
    say(used());
}

/// `CUcheckpointCustomStorageInfo`.
#[repr(C)]
struct Info {
    handle: u64,
    devices: *const [u64; 3],
    count: u32,
}

/// Asks for a checkpoint or restore by way of storage: handle, address, size and stream.
#[track_caller]
fn storage(begin: extern "C" fn(i32, &[u64; 8]) -> u32, pid: i32, word: usize) -> [u64; 4] {
    let mut info: *const Info = std::ptr::null();
    let mut arguments = NOTHING;
    arguments[word] = &raw mut info as u64;
    ok(begin(pid, &arguments));
    // SAFETY: the driver has said where it is.
    let (info, [address, size, stream]) = unsafe { (&*info, *(*info).devices) };
    assert_eq!(info.count, 1);
    [info.handle, address, size, stream]
}

extern "C" fn checkpoint(pid: i32, arguments: &[u64; 8]) -> u32 {
    cuCheckpointProcessCheckpoint(pid, arguments)
}

extern "C" fn restore(pid: i32, arguments: &[u64; 8]) -> u32 {
    cuCheckpointProcessRestore(pid, arguments)
}

#[test]
#[ignore = "a program for other tests"]
fn storing_program() {
    let pid: i32 = listen().parse().unwrap();
    let mut arguments = NOTHING;
    let mut info = 0_u64;
    arguments[0] = &raw mut info as u64;
    ok(cuCheckpointProcessLock(pid, &NOTHING));
    assert_eq!(cuCheckpointProcessCheckpoint(pid, &arguments), NOT_INITIALIZED);
    ok(cuInit(0));
    assert_eq!(cuCheckpointProcessCheckpoint(pid, &arguments), INVALID_CONTEXT);
    let mut primary = 0;
    ok(cuDevicePrimaryCtxRetain(&mut primary, 0));
    ok(cuCtxSetCurrent(primary));
    let own = std::process::id() as i32;
    assert_eq!(cuCheckpointProcessCheckpoint(own, &arguments), NOT_SUPPORTED);
    assert_eq!((state(pid), info), (LOCKED, 0));

    let [handle, address, size, stream] = storage(checkpoint, pid, 0);
    // Plain memory 3 and 1 granules, mapped memory 2.
    assert_eq!((state(pid), size), (CHECKPOINTING, 6 * GRANULE as u64));
    let mut owner = 0;
    ok(cuStreamGetCtx(stream, &mut owner));
    assert_eq!(owner, primary);
    for call in [cuCheckpointProcessUnlock, cuCheckpointProcessRestore] {
        assert_eq!(call(pid, &NOTHING), ILLEGAL_STATE);
    }
    let mut kept = vec![0_u8; size as usize];
    // SAFETY: the vector is as large, and the stream is done before it is looked at.
    unsafe { ok(cuMemcpyDtoHAsync_v2(kept.as_mut_ptr(), address, kept.len(), stream)) };
    assert_eq!(cuCheckpointOperationComplete(handle + 1000), INVALID_VALUE);
    ok(cuCheckpointOperationComplete(handle));
    assert!(kept.iter().any(|byte| *byte != 0));
    assert_eq!(state(pid), CHECKPOINTED);
    assert_eq!(cuCheckpointOperationComplete(handle), INVALID_VALUE);
    assert_eq!(cuStreamQuery(stream), INVALID_HANDLE);
    // SAFETY: as above; nothing is written.
    unsafe { assert_eq!(cuMemcpyDtoH_v2(kept.as_mut_ptr(), address, 8), INVALID_VALUE) };
    let files = std::fs::read_dir(format!("/proc/{pid}/fd")).unwrap();
    let mut names = files.map(|file| std::fs::read_link(file.unwrap().path()).unwrap_or_default());
    assert!(!names.any(|name| name.to_string_lossy().contains("softcuda")));

    // What is not there cannot be brought back from there.
    assert_eq!(cuCheckpointProcessRestore(pid, &NOTHING), INVALID_VALUE);
    assert_eq!(state(pid), CHECKPOINTED);
    let [handle, address, again, stream] = storage(restore, pid, 2);
    assert_eq!((state(pid), again), (RESTORING, size));
    assert_eq!(cuCheckpointProcessUnlock(pid, &NOTHING), ILLEGAL_STATE);
    ok(cuStreamBeginCapture_v2(stream, 0));
    assert_eq!(cuCheckpointOperationComplete(handle), CAPTURE_UNSUPPORTED);
    let mut graph = 0;
    assert_eq!(cuStreamEndCapture(stream, &mut graph), CAPTURE_INVALIDATED);
    // SAFETY: the vector is as large, and lives until the stream is done.
    unsafe { ok(cuMemcpyHtoDAsync_v2(address, kept.as_ptr(), kept.len(), stream)) };
    ok(cuCheckpointOperationComplete(handle));
    assert_eq!(state(pid), LOCKED);
    ok(cuCheckpointProcessUnlock(pid, &NOTHING));
    say("restored");
}

#[test]
fn a_checkpoint_goes_to_storage_of_the_callers_choice() {
    let newest = [("SOFTCUDA_DRIVER", "13.4")];
    let mut program = Program::start("stored_program", &newest);
    assert_eq!(program.hear(), "ready");
    let mut storing = Program::start("storing_program", &newest);
    storing.tell(&program.pid().to_string());
    assert_eq!(storing.hear(), "restored");
    storing.finish();
    program.tell("go on");
    assert_eq!(program.hear(), "[[1, 2], [3], [4]]");
    assert_eq!(program.hear(), (6 * GRANULE).to_string());
    program.finish();
}
