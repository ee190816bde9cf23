//! Multicast objects in one process: what the functions do and refuse, and what kernels reach by them.

mod support;

use support::multicast::*;
use support::*;

unsafe extern "C" {
    fn cuPointerGetAttribute(out: *mut u64, attribute: u32, address: u64) -> u32;
    safe fn cuMemRetainAllocationHandle(handle: &mut u64, address: u64) -> u32;
    safe fn cuMemGetAllocationPropertiesFromHandle(out: &mut [u64; 4], handle: u64) -> u32;
}

const INVALID_DEVICE: u32 = 101;
const NOT_FOUND: u32 = 500;

const ON_TWO: [(&str, &str); 2] = [("SOFTCUDA_DEVICE", HOPPER), ("SOFTCUDA_DEVICES", "2")];
const ON_THREE: [(&str, &str); 2] = [("SOFTCUDA_DEVICE", HOPPER), ("SOFTCUDA_DEVICES", "3")];

#[test]
#[ignore = "a program for other tests"]
fn telling_program() {
    context();
    let (mut there, mut handle, mut size) = (9, 7, 7);
    ok(cuDeviceGetAttribute(&mut there, MULTICAST_SUPPORTED, 0));
    let expected = if there == 1 { 0 } else { NOT_SUPPORTED };
    let properties = object_of(1, GRANULE);
    assert_eq!(cuMulticastCreate(&mut handle, &properties), expected);
    assert_eq!(cuMulticastGetGranularity(&mut size, &properties, 0), expected);
    if there == 0 {
        assert_eq!((handle, size), (7, 7));
        assert_eq!(cuMulticastAddDevice(7, 0), NOT_SUPPORTED);
        assert_eq!(cuMulticastBindMem(7, 0, 7, 0, GRANULE, 0), NOT_SUPPORTED);
        assert_eq!(cuMulticastBindAddr(7, 0, 7, GRANULE, 0), NOT_SUPPORTED);
        assert_eq!(cuMulticastUnbind(7, 0, 0, GRANULE), NOT_SUPPORTED);
    }
    say(there);
}

#[test]
fn devices_with_a_switch_have_it() {
    for (environment, there) in [
        (&[][..], "0"),
        (&[("SOFTCUDA_DEVICE", HOPPER)], "1"),
        (&[("SOFTCUDA_DEVICE", "NVIDIA B200,10.0,148,1G")], "1"),
        (&[("SOFTCUDA_DEVICE", "NVIDIA L4,8.9,58,1G")], "0"),
        (&[("SOFTCUDA_DEVICE", "NVIDIA RTX,12.0,58,1G")], "0"),
        (&[("SOFTCUDA_DEVICE", HOPPER), ("SOFTCUDA_MULTICAST", "none")], "0"),
        (&[("SOFTCUDA_DEVICE", HOPPER), ("SOFTCUDA_VMM", "none")], "0"),
    ] {
        let mut program = Program::start("telling_program", environment);
        assert_eq!(program.hear(), there, "{environment:?}");
        program.finish();
    }
}

#[test]
fn some_devices_have_it() {
    let both = format!("{HOPPER};NVIDIA L4,8.9,58,1G");
    Program::start("program_with_another_device", &[("SOFTCUDA_DEVICE", &both)]).finish();
}

#[test]
#[ignore = "a program for other tests"]
fn program_with_another_device() {
    context();
    let object = create(2, GRANULE);
    assert_eq!(cuMulticastAddDevice(object, 1), NOT_SUPPORTED);
    ok(cuMulticastAddDevice(object, 0));
}

#[test]
fn what_makes_no_sense_is_refused() {
    Program::start("refused_program", &ON_THREE).finish();
    let private = [ON_THREE[0], ON_THREE[1], ("SOFTCUDA_VMM", "private")];
    Program::start("private_program", &private).finish();
}

#[test]
#[ignore = "a program for other tests"]
fn private_program() {
    context();
    let mut handle = 0;
    assert_eq!(cuMulticastCreate(&mut handle, &object_of(1, GRANULE)), NOT_SUPPORTED);
    let private = ObjectProperties { handle_types: 0, ..object_of(1, GRANULE) };
    ok(cuMulticastCreate(&mut handle, &private));
    assert_eq!(cuMemExportToShareableHandle(&mut -1, handle, 1, 0), INVALID_VALUE);
}

#[test]
#[ignore = "a program for other tests"]
fn refused_program() {
    context();
    let (mut handle, mut size) = (0, 0);
    // Creation.
    let two = object_of(2, 4 * GRANULE);
    for (wrong, code) in [
        (ObjectProperties { devices: 0, ..two }, INVALID_VALUE),
        (ObjectProperties { devices: 17, ..two }, INVALID_VALUE),
        (ObjectProperties { flags: 1, ..two }, INVALID_VALUE),
        (ObjectProperties { handle_types: 8, ..two }, NOT_SUPPORTED),
    ] {
        assert_eq!(cuMulticastCreate(&mut handle, &wrong), code);
        assert_eq!(cuMulticastGetGranularity(&mut size, &wrong, 0), code);
    }
    for wrong in [0, 1, GRANULE - 1, GRANULE + 4096] {
        let properties = object_of(2, wrong);
        assert_eq!(cuMulticastCreate(&mut handle, &properties), INVALID_VALUE, "{wrong}");
        for option in 0..2 {
            size = 0;
            ok(cuMulticastGetGranularity(&mut size, &properties, option));
            assert_eq!(size, GRANULE);
        }
    }
    assert_eq!(cuMulticastGetGranularity(&mut size, &two, 2), INVALID_VALUE);

    // Devices.
    let object = create(2, 4 * GRANULE);
    let (memory, address) = map_on(0, 2 * GRANULE);
    assert_eq!(cuMulticastAddDevice(7, 0), INVALID_VALUE);
    assert_eq!(cuMulticastAddDevice(memory, 0), INVALID_VALUE, "no multicast object");
    assert_eq!(cuMulticastAddDevice(object, 3), INVALID_DEVICE);
    assert_eq!(cuMulticastAddDevice(object, -1), INVALID_DEVICE);
    ok(cuMulticastAddDevice(object, 0));
    assert_eq!(cuMulticastAddDevice(object, 0), INVALID_VALUE, "a device twice");
    // What is wrong whatever the devices are is refused without waiting for them.
    assert_eq!(cuMulticastBindMem(object, 0, memory, 0, GRANULE + 1, 0), INVALID_VALUE);
    ok(cuMulticastAddDevice(object, 1));
    assert_eq!(cuMulticastAddDevice(object, 2), INVALID_VALUE, "too many devices");

    // Bindings.
    let bind =
        |offset, memory, from, size| cuMulticastBindMem(object, offset, memory, from, size, 0);
    let bind_address = |offset, at, size| cuMulticastBindAddr(object, offset, at, size, 0);
    assert_eq!(cuMulticastBindMem(object, 0, memory, 0, GRANULE, 1), INVALID_VALUE);
    assert_eq!(cuMulticastBindAddr(object, 0, address, GRANULE, 1), INVALID_VALUE);
    assert_eq!(cuMulticastBindMem(memory, 0, memory, 0, GRANULE, 0), INVALID_VALUE);
    for (offset, from, size) in [
        (0, 0, 0),
        (4096, 0, GRANULE),
        (0, 4096, GRANULE),
        (0, 0, GRANULE + 4096),
        (0, 0, 3 * GRANULE),
        (0, GRANULE, 2 * GRANULE),
        (0, 2 * GRANULE, GRANULE),
        (4 * GRANULE, 0, GRANULE),
        (3 * GRANULE, 0, 2 * GRANULE),
        (usize::MAX - GRANULE + 1, 0, GRANULE),
        (0, usize::MAX - GRANULE + 1, GRANULE),
    ] {
        assert_eq!(bind(offset, memory, from, size), INVALID_VALUE, "{offset} {from} {size}");
        let at = address.wrapping_add(from as u64);
        assert_eq!(bind_address(offset, at, size), INVALID_VALUE, "{offset} {from} {size}");
    }
    assert_eq!(bind(0, object, 0, GRANULE), INVALID_VALUE, "no memory");
    assert_eq!(bind(0, 7, 0, GRANULE), INVALID_VALUE);
    assert_eq!(bind_address(0, allocate(GRANULE), GRANULE), INVALID_VALUE, "of cuMemAlloc");
    let (other, other_address) = map_on(2, GRANULE);
    assert_eq!(bind(0, other, 0, GRANULE), INVALID_DEVICE, "a device that was not added");
    assert_eq!(bind_address(0, other_address, GRANULE), INVALID_DEVICE);
    let mut private = 0;
    ok(cuMemCreate(&mut private, GRANULE, &Properties { handle_types: 0, ..SHAREABLE }, 0));
    assert_eq!(bind(0, private, 0, GRANULE), INVALID_VALUE, "private memory, a shareable object");
    ok(bind(GRANULE, memory, 0, 2 * GRANULE));
    for (offset, size) in [(0, 2), (GRANULE, 2), (GRANULE, 1), (2 * GRANULE, 1), (2 * GRANULE, 2)] {
        assert_eq!(bind(offset, memory, 0, size * GRANULE), INVALID_VALUE, "{offset} is taken");
    }
    ok(bind(0, memory, GRANULE, GRANULE));
    ok(bind_address(3 * GRANULE, address + GRANULE as u64, GRANULE));

    // What is taken back.
    let unbind = |device, offset, size| cuMulticastUnbind(object, device, offset, size);
    assert_eq!(cuMulticastUnbind(memory, 0, 0, GRANULE), INVALID_VALUE);
    assert_eq!(unbind(3, 0, GRANULE), INVALID_DEVICE);
    assert_eq!(unbind(2, 0, GRANULE), INVALID_DEVICE);
    assert_eq!(unbind(1, 0, GRANULE), INVALID_VALUE, "nothing is bound there");
    for (offset, size) in [
        (0, 0),
        (0, 4096),
        (4096, GRANULE),
        (GRANULE, GRANULE),
        (2 * GRANULE, GRANULE),
        (GRANULE, 3 * GRANULE),
        (3 * GRANULE, 2 * GRANULE),
    ] {
        assert_eq!(unbind(0, offset, size), INVALID_VALUE, "{offset} {size}");
    }
    ok(unbind(0, GRANULE, 2 * GRANULE));
    assert_eq!(unbind(0, GRANULE, 2 * GRANULE), INVALID_VALUE);
    ok(bind(2 * GRANULE, memory, 0, GRANULE));

    // Mappings.
    let mut at = 0;
    ok(cuMemAddressReserve(&mut at, 8 * GRANULE, 0, 0, 0));
    for (size, offset) in [(5, 0), (1, 4), (2, 3), (0, 0)] {
        assert_eq!(cuMemMap(at, size * GRANULE, offset * GRANULE, object, 0), INVALID_VALUE);
    }
    assert_eq!(cuMemMap(at, 4096, 0, object, 0), INVALID_VALUE);
    ok(cuMemMap(at, 4 * GRANULE, 0, object, 0));
    assert_eq!(cuMemMap(at, GRANULE, 0, object, 0), INVALID_VALUE, "mapped already");
    assert_eq!(cuMemUnmap(at, GRANULE), INVALID_VALUE);
    let of = |location| Access { location, ..READ_WRITE };
    assert_eq!(cuMemSetAccess(at, 4 * GRANULE, &of(2), 1), ILLEGAL_STATE, "not added");
    assert_eq!(cuMemSetAccess(at, GRANULE, &of(0), 1), INVALID_VALUE);
    ok(cuMemSetAccess(at, 4 * GRANULE, &of(0), 1));
    assert_eq!(cuMemAddressFree(at, 8 * GRANULE), INVALID_VALUE);
    let mut found = [0; 4];
    assert_eq!(cuMemGetAllocationPropertiesFromHandle(&mut found, object), INVALID_VALUE);
    assert_eq!(cuMemExportToShareableHandle(&mut -1, object, 2, 0), NOT_SUPPORTED);
    // What is no multimem instruction finds nothing there.
    let mut word = [0_u32];
    // SAFETY: the destination is as large as said.
    assert_eq!(unsafe { cuMemcpyDtoH_v2(word.as_mut_ptr().cast(), at, 4) }, INVALID_VALUE);
    assert_eq!(cuMemsetD32_v2(at, 1, 1), INVALID_VALUE);
}

#[test]
fn later_drivers_bind_on_a_named_device() {
    Program::start("program_that_names_devices", &ON_THREE).finish();
    let later = [ON_THREE[0], ON_THREE[1], ("SOFTCUDA_DRIVER", "590")];
    Program::start("program_that_names_devices", &later).finish();
}

#[test]
#[ignore = "a program for other tests"]
fn program_that_names_devices() {
    context();
    let mut version = 0;
    ok(cuDriverGetVersion(&mut version));
    let object = team(2, GRANULE);
    let (memory, address) = map_on(1, GRANULE);
    if version < 13_010 {
        assert_eq!(cuMulticastBindMem_v2(object, 1, 0, memory, 0, GRANULE, 0), NOT_FOUND);
        assert_eq!(cuMulticastBindAddr_v2(object, 1, 0, address, GRANULE, 0), NOT_FOUND);
        return;
    }
    for (device, code) in [(3, INVALID_DEVICE), (2, INVALID_DEVICE), (0, INVALID_VALUE), (1, 0)] {
        let bound = cuMulticastBindMem_v2(object, device, 0, memory, 0, GRANULE, 0);
        assert_eq!(bound, code, "{device}");
    }
    ok(cuMulticastUnbind(object, 1, 0, GRANULE));
    for (device, code) in [(3, INVALID_DEVICE), (2, INVALID_DEVICE), (0, INVALID_VALUE), (1, 0)] {
        let bound = cuMulticastBindAddr_v2(object, device, 0, address, GRANULE, 0);
        assert_eq!(bound, code, "{device}");
    }
}

#[test]
fn binding_and_mapping_wait_for_all_devices() {
    Program::start("waiting_program", &ON_TWO).finish();
}

#[test]
#[ignore = "a program for other tests"]
fn waiting_program() {
    use std::sync::mpsc::channel;
    context();
    let (memory, _) = map_on(0, GRANULE);
    let calls: [fn(u64, u64) -> u32; 2] = [
        |object, memory| cuMulticastBindMem(object, 0, memory, 0, GRANULE, 0),
        |object, _| {
            let mut at = 0;
            ok(cuMemAddressReserve(&mut at, GRANULE, 0, 0, 0));
            cuMemMap(at, GRANULE, 0, object, 0)
        },
    ];
    for call in calls {
        let object = create(2, GRANULE);
        ok(cuMulticastAddDevice(object, 0));
        let (ended, end) = channel();
        let caller = std::thread::spawn(move || {
            let code = call(object, memory);
            ended.send(code).unwrap();
        });
        // One that does not wait would have ended by then, also on most slow machines; one that waits is never taken
        // for one that does not.
        let early = end.recv_timeout(std::time::Duration::from_millis(300));
        assert!(early.is_err(), "a call did not wait: {early:?}");
        ok(cuMulticastAddDevice(object, 1));
        ok(end.recv().unwrap());
        caller.join().unwrap();
    }
}

#[test]
fn kernels_reach_the_memory_of_all_devices() {
    Program::start("program_on_three_devices", &ON_THREE).finish();
}

#[test]
#[ignore = "a program for other tests"]
fn program_on_three_devices() {
    context();
    let object = team(3, 2 * GRANULE);
    let members: Vec<(u64, u64)> = (0..3).map(|device| map_on(device, 2 * GRANULE)).collect();
    // The second half of the object is the first one of the memory.
    for (memory, address) in &members {
        ok(cuMulticastBindMem(object, GRANULE, *memory, 0, GRANULE, 0));
        ok(cuMulticastBindAddr(object, 0, address + GRANULE as u64, GRANULE, 0));
    }
    let at = map_object(object, 2 * GRANULE);
    for (number, (_, address)) in (1..).zip(&members) {
        write(*address, &[number, 10 * number]);
        write(address + GRANULE as u64, &[100 * number]);
    }
    let result = allocate(64);
    let second = at + GRANULE as u64;
    let sum = "multimem.ld_reduce.relaxed.sys.global.add.u32 %r1, [%a]; st.global.u32 [%b], %r1;";
    let most = "multimem.ld_reduce.acquire.gpu.max.u32 %r1, [%a+4]; st.global.u32 [%b], %r1;";
    ok(run(sum, &[at, result]));
    assert_eq!(read(result, 1), [600]);
    ok(run(sum, &[second, result]));
    assert_eq!(read(result, 1), [6]);
    ok(run(most, &[second, result]));
    assert_eq!(read(result, 1), [30]);
    ok(run("multimem.st.release.sys.global.u32 [%a+8], 77;", &[second, result]));
    ok(run("multimem.red.relaxed.sys.global.add.u32 [%a], 5;", &[second, result]));
    for (number, (_, address)) in (1..).zip(&members) {
        assert_eq!(read(*address, 3), [number + 5 * 32, 10 * number, 77]);
    }
    // A mapping of a part.
    let mut part = 0;
    ok(cuMemAddressReserve(&mut part, GRANULE, 0, 0, 0));
    ok(cuMemMap(part, GRANULE, GRANULE, object, 0));
    ok(cuMemSetAccess(part, GRANULE, &READ_WRITE, 1));
    ok(run(sum, &[part, result]));
    assert_eq!(read(result, 1), [6 + 3 * 5 * 32]);
    // Every update of every thread counts, on each device.
    ok(run_many("multimem.red.relaxed.gpu.global.add.u32 [%a+64], 1;", 64, &[part, result]));
    for (_, address) in &members {
        assert_eq!(read(address + 64, 1), [64 * 32]);
    }
    // What is known of a pointer.
    // SAFETY: each attribute has no more than 8 bytes.
    let attribute = |number| unsafe {
        let mut value = 0;
        ok(cuPointerGetAttribute(&mut value, number, part + 4));
        value
    };
    assert_eq!([2, 9, 11, 12, 14].map(attribute), [2, 0, part, GRANULE as u64, 1]);
    let mut again = 0;
    ok(cuMemRetainAllocationHandle(&mut again, part));
    assert_eq!(again, object);
    ok(cuMemRelease(again));
}

#[test]
fn other_accesses_are_faults() {
    Program::start("faulting_program", &ON_TWO).finish();
}

#[test]
#[ignore = "a program for other tests"]
fn faulting_program() {
    const MISALIGNED: u32 = 716;
    ok(cuInit(0));
    let object = team(2, 2 * GRANULE);
    let members: Vec<(u64, u64)> = (0..2).map(|device| map_on(device, 2 * GRANULE)).collect();
    for (memory, _) in &members {
        ok(cuMulticastBindMem(object, 0, *memory, 0, GRANULE, 0));
    }
    // Of one device alone.
    ok(cuMulticastBindMem(object, GRANULE, members[0].0, GRANULE, GRANULE, 0));
    let at = map_object(object, 2 * GRANULE);
    let plain = members[0].1;
    let half = at + GRANULE as u64;
    // A failed context takes nothing of `cuMemCreate` with it.
    let code = |body: &str, address: u64| {
        let context = context();
        let code = run(body, &[address, plain]);
        if code == 0 {
            ok(cuCtxSynchronize());
        }
        ok(cuCtxDestroy_v2(context));
        code
    };
    let load = "multimem.ld_reduce.relaxed.sys.global.add.u32 %r1, [%a];";
    let store = "multimem.st.relaxed.sys.global.u32 [%a], 7;";
    let add = "multimem.red.relaxed.sys.global.add.u32 [%a], 7;";
    for body in [load, store, add] {
        ok(code(body, at));
        assert_eq!(code(body, plain), ILLEGAL_ADDRESS, "{body}: no multicast address");
        assert_eq!(code(body, half), ILLEGAL_ADDRESS, "{body}: a device has nothing bound");
        assert_eq!(code(body, at + 2 * GRANULE as u64), ILLEGAL_ADDRESS, "{body}: beyond it");
        assert_eq!(code(body, at + 2), MISALIGNED, "{body}");
        assert_eq!(code(&body.replace(".global", ""), 0x0100_0000_0000_0000), ILLEGAL_ADDRESS);
    }
    let four = "multimem.st.relaxed.sys.global.v4.f32 [%a], {%f1, %f1, %f1, %f1};";
    assert_eq!(code(four, at + 4), MISALIGNED);
    for body in [
        "ld.global.u32 %r1, [%a]; st.global.u32 [%b], %r1;",
        "st.global.u32 [%a], 7;",
        "red.global.add.u32 [%a], 7;",
        "atom.add.u32 %r1, [%a], 7;",
    ] {
        ok(code(body, plain));
        assert_eq!(code(body, at), ILLEGAL_ADDRESS, "{body}: undefined in PTX");
    }
    // What a lane of a warp may not do keeps the others from writing.
    let before = read_in_context(plain + GRANULE as u64 - 8, 2);
    let across = "mul.wide.u32 %rd1, %t, 4; add.u64 %a, %a, %rd1;";
    let edge = half - 8;
    assert_eq!(code(&format!("{across} {store}"), edge), ILLEGAL_ADDRESS);
    assert_eq!(read_in_context(plain + GRANULE as u64 - 8, 2), before);
    // Access is as granted.
    let only_read = Access { flags: 1, ..READ_WRITE };
    ok(cuMemSetAccess(at, 2 * GRANULE, &only_read, 1));
    ok(code(load, at));
    assert_eq!(code(store, at), ILLEGAL_ADDRESS);
    assert_eq!(code(add, at), ILLEGAL_ADDRESS);
    ok(cuMemSetAccess(at, 2 * GRANULE, &Access { flags: 0, ..READ_WRITE }, 1));
    assert_eq!(code(load, at), ILLEGAL_ADDRESS);
    ok(cuMemSetAccess(at, 2 * GRANULE, &READ_WRITE, 1));
    ok(code(store, at));
    ok(cuMulticastUnbind(object, 1, 0, GRANULE));
    assert_eq!(code(store, at), ILLEGAL_ADDRESS, "nothing is bound any more");
    ok(cuMemUnmap(at, 2 * GRANULE));
    assert_eq!(code(load, at), ILLEGAL_ADDRESS);
}

#[track_caller]
fn read_in_context(address: u64, count: usize) -> Vec<u32> {
    let context = context();
    let values = read(address, count);
    ok(cuCtxDestroy_v2(context));
    values
}
