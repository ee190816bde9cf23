//! Managed memory: used by host and device, its attributes, and the checkpoint's refusal.

mod support;

use support::*;

unsafe extern "C" {
    safe fn cuMemAllocManaged(address: &mut u64, size: usize, flags: u32) -> u32;
    safe fn cuMemAdvise_v2(address: u64, size: usize, advice: u32, location: Location) -> u32;
    safe fn cuMemPrefetchAsync_v2(
        address: u64,
        size: usize,
        location: Location,
        flags: u32,
        stream: u64,
    ) -> u32;
    fn cuMemRangeGetAttribute(
        out: *mut i32,
        bytes: usize,
        attribute: u32,
        address: u64,
        size: usize,
    ) -> u32;
    safe fn cuStreamAttachMemAsync(stream: u64, address: u64, length: usize, flags: u32) -> u32;
    fn cuPointerGetAttribute(out: *mut u64, attribute: u32, address: u64) -> u32;
    safe fn cuDeviceGetAttribute(value: &mut i32, attribute: u32, device: i32) -> u32;
}

#[repr(C)]
#[derive(Clone, Copy)]
struct Location(u32, i32);

const DEVICE: Location = Location(1, 0);
const HOST: Location = Location(2, 0);
const INVALID_DEVICE: u32 = 101;

#[track_caller]
fn managed(size: usize) -> u64 {
    let mut address = 0;
    ok(cuMemAllocManaged(&mut address, size, 1));
    address
}

#[track_caller]
fn range<const N: usize>(attribute: u32, address: u64, size: usize) -> [i32; N] {
    let mut values = [99; N];
    // SAFETY: the place has room for as many words as it says.
    ok(unsafe { cuMemRangeGetAttribute(values.as_mut_ptr(), 4 * N, attribute, address, size) });
    values
}

#[track_caller]
fn pointer(attribute: u32, address: u64) -> u64 {
    let mut value = 0;
    // SAFETY: no attribute that the tests ask for is larger than 8 bytes.
    ok(unsafe { cuPointerGetAttribute(&mut value, attribute, address) });
    value
}

#[test]
fn host_and_device_use_one_address() {
    let context = context();
    let address = managed(10_000);
    // SAFETY: managed memory may be used by the host; no work of the device is under way.
    unsafe { (address as *mut u32).write(5) };
    assert_eq!(read(address, 2), [5, 0]);
    ok(cuMemsetD32_v2(address + 4, 9, 1));
    // SAFETY: as before.
    assert_eq!(unsafe { ((address + 4) as *const u32).read() }, 9);
    assert_eq!(used(), 0, "managed memory is not the device's");

    assert_eq!(pointer(2, address + 10) as u32, 2, "memory type: device");
    assert_eq!(pointer(8, address) & 0xff, 1, "managed");
    assert_eq!(pointer(4, address + 10), address + 10, "host pointer");
    assert_eq!(pointer(11, address + 10), address, "start");
    assert_eq!(pointer(12, address + 10), 10_000, "size");
    assert_eq!(pointer(1, address), context);
    let plain = allocate(8);
    assert_eq!(pointer(8, plain) & 0xff, 0);
    for attribute in [83, 89] {
        let mut value = 0;
        ok(cuDeviceGetAttribute(&mut value, attribute, 0));
        assert_eq!(value, 1);
    }

    ok(cuMemFree_v2(address));
    assert_eq!(cuMemFree_v2(address), INVALID_VALUE);
    let mut refused = 0;
    assert_eq!(cuMemAllocManaged(&mut refused, 0, 1), INVALID_VALUE);
    assert_eq!(cuMemAllocManaged(&mut refused, 8, 0), INVALID_VALUE);
    assert_eq!(cuMemAllocManaged(&mut refused, 8, 3), INVALID_VALUE);
    assert_eq!(refused, 0);
    ok(cuCtxDestroy_v2(context));
    assert_eq!(cuMemAllocManaged(&mut refused, 8, 1), 201);
}

#[test]
fn advice_is_kept_and_reported() {
    let context = context();
    let address = managed(16 << 10);
    assert_eq!(range(1, address, 16 << 10), [0]);
    assert_eq!(range(2, address, 16 << 10), [-2]);
    assert_eq!(range(3, address, 16 << 10), [-2, -2]);
    ok(cuMemAdvise_v2(address, 8 << 10, 1, DEVICE));
    assert_eq!(range(1, address, 8 << 10), [1]);
    assert_eq!(range(1, address, 16 << 10), [0]);
    ok(cuMemAdvise_v2(address, 16 << 10, 3, HOST));
    assert_eq!(range(2, address, 16 << 10), [-1]);
    assert_eq!(range(5, address, 16 << 10), [2]);
    ok(cuMemAdvise_v2(address, 4 << 10, 5, DEVICE));
    ok(cuMemAdvise_v2(address, 16 << 10, 5, HOST));
    assert_eq!(range(3, address, 4 << 10), [0, -1, -2]);
    assert_eq!(range(3, address, 16 << 10), [-1, -2]);
    ok(cuMemAdvise_v2(address + (4 << 10), 4 << 10, 5, DEVICE));
    assert_eq!(range(3, address + (4 << 10), 4 << 10), [0, -1, -2], "devices come before the host");
    ok(cuMemAdvise_v2(address, 16 << 10, 4, DEVICE));
    assert_eq!(range(2, address, 16 << 10), [-2]);
    assert_eq!(range(4, address, 16 << 10), [-2]);
    ok(cuMemPrefetchAsync_v2(address, 16 << 10, DEVICE, 0, 0));
    assert_eq!(range(4, address, 16 << 10), [0]);

    assert_eq!(cuMemAdvise_v2(address, 16 << 10, 7, DEVICE), INVALID_VALUE);
    assert_eq!(cuMemAdvise_v2(address, 17 << 10, 1, DEVICE), INVALID_VALUE);
    assert_eq!(cuMemAdvise_v2(address, 8, 3, Location(1, 50)), INVALID_DEVICE);
    assert_eq!(cuMemAdvise_v2(allocate(8), 8, 1, DEVICE), INVALID_VALUE);
    assert_eq!(cuMemPrefetchAsync_v2(address, 8, DEVICE, 1, 0), INVALID_VALUE);
    assert_eq!(cuMemPrefetchAsync_v2(address, 8, Location(0, 0), 0, 0), INVALID_VALUE);
    assert_eq!(cuMemPrefetchAsync_v2(address, 8, DEVICE, 0, 0x7777), INVALID_HANDLE);
    let mut value = 0_i32;
    // SAFETY: both sizes are refused before anything is written.
    unsafe {
        assert_eq!(cuMemRangeGetAttribute(&mut value, 8, 1, address, 8), INVALID_VALUE);
        assert_eq!(cuMemRangeGetAttribute(&mut value, 4, 77, address, 8), INVALID_VALUE);
    }

    let mut stream = 0;
    ok(cuStreamCreate(&mut stream, 0));
    ok(cuStreamAttachMemAsync(stream, address, 0, 4));
    assert_eq!(cuStreamAttachMemAsync(0, address, 0, 4), INVALID_VALUE);
    assert_eq!(cuStreamAttachMemAsync(stream, address, 100, 1), INVALID_VALUE);
    assert_eq!(cuStreamAttachMemAsync(stream, address + 8, 0, 1), INVALID_VALUE);
    ok(cuCtxDestroy_v2(context));
}

#[test]
#[ignore = "a program for other tests"]
fn program() {
    context();
    let address = managed(100);
    let plain = allocate(100);
    write(plain, &[1, 2]);
    // SAFETY: managed memory may be used by the host; no work of the device is under way.
    unsafe { (address as *mut u32).write(7) };
    say("ready");
    listen();
    assert_eq!(read(address, 1), [7]);
    ok(cuMemFree_v2(address));
    say("freed");
    listen();
    assert_eq!(read(plain, 2), [1, 2]);
}

#[test]
fn a_process_with_managed_memory_is_not_checkpointed() {
    const NOTHING: [u64; 8] = [0; 8];
    let mut program = Program::start("program", &[]);
    assert_eq!(program.hear(), "ready");
    let pid = program.pid();
    ok(cuCheckpointProcessLock(pid, &NOTHING));
    assert_eq!(cuCheckpointProcessCheckpoint(pid, &NOTHING), NOT_SUPPORTED);
    let mut state = 9;
    ok(cuCheckpointProcessGetState(pid, &mut state));
    assert_eq!(state, 1, "still locked");
    ok(cuCheckpointProcessUnlock(pid, &NOTHING));
    program.tell("go on");
    assert_eq!(program.hear(), "freed");
    ok(cuCheckpointProcessLock(pid, &NOTHING));
    ok(cuCheckpointProcessCheckpoint(pid, &NOTHING));
    ok(cuCheckpointProcessRestore(pid, &NOTHING));
    ok(cuCheckpointProcessUnlock(pid, &NOTHING));
    program.tell("end");
    program.finish();
}
