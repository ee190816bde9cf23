//! Pools of managed memory, and managed memory of graphs.

mod support;

use support::graphs::*;
use support::*;

unsafe extern "C" {
    safe fn cuMemAllocFromPoolAsync(address: &mut u64, size: usize, pool: u64, stream: u64) -> u32;
    safe fn cuMemFreeAsync(address: u64, stream: u64) -> u32;
    safe fn cuMemPoolCreate(pool: &mut u64, properties: &Properties) -> u32;
    safe fn cuMemPoolDestroy(pool: u64) -> u32;
    safe fn cuMemPoolGetAttribute(pool: u64, attribute: u32, value: &mut u64) -> u32;
    safe fn cuMemPoolGetAccess(flags: &mut u32, pool: u64, location: &[i32; 2]) -> u32;
    safe fn cuMemGetDefaultMemPool(pool: &mut u64, location: &[i32; 2], kind: u32) -> u32;
    safe fn cuMemGetMemPool(pool: &mut u64, location: &[i32; 2], kind: u32) -> u32;
    safe fn cuMemSetMemPool(location: &[i32; 2], kind: u32, pool: u64) -> u32;
    safe fn cuDeviceSetMemPool(device: i32, pool: u64) -> u32;
    fn cuMemRangeGetAttribute(
        out: *mut i32,
        bytes: usize,
        attribute: u32,
        address: u64,
        size: usize,
    ) -> u32;
    fn cuPointerGetAttribute(out: *mut u64, attribute: u32, address: u64) -> u32;
}

/// `CUmemPoolProps`: allocation type, handle types, location, and the most bytes.
#[repr(C)]
#[derive(Clone, Copy)]
struct Properties {
    kind: u32,
    handle_types: u32,
    location: [i32; 2],
    security: u64,
    most: usize,
    rest: [u8; 56],
}

const MANAGED: u32 = 2;
const ANYWHERE: [i32; 2] = [0, 0];
const ON_DEVICE: [i32; 2] = [1, 0];
const ON_HOST: [i32; 2] = [2, 0];
const ON_NODE: [i32; 2] = [3, 0];
const INVALID_DEVICE: u32 = 101;

const fn properties(location: [i32; 2]) -> Properties {
    Properties { kind: MANAGED, handle_types: 0, location, security: 0, most: 0, rest: [0; 56] }
}

#[track_caller]
fn pool(location: [i32; 2]) -> u64 {
    let mut pool = 0;
    ok(cuMemPoolCreate(&mut pool, &properties(location)));
    pool
}

#[track_caller]
fn attribute(pool: u64, number: u32) -> u64 {
    let mut value = 0;
    ok(cuMemPoolGetAttribute(pool, number, &mut value));
    value
}

#[track_caller]
fn pointer(attribute: u32, address: u64) -> u64 {
    let mut value = 0;
    // SAFETY: no attribute that the tests ask for is larger than 8 bytes.
    ok(unsafe { cuPointerGetAttribute(&mut value, attribute, address) });
    value
}

#[test]
fn managed_memory_comes_from_a_pool_in_stream_order() {
    let context = context();
    let (pool, stream) = (pool(ON_HOST), stream());
    let mut address = 0;
    ok(cuMemAllocFromPoolAsync(&mut address, 10_000, pool, stream));
    // SAFETY: managed memory may be used by the host; no work of the device is under way.
    unsafe { (address as *mut u32).write(5) };
    assert_eq!(read(address, 2), [5, 0]);
    assert_eq!(used(), 0, "managed memory is not the device's");
    assert_eq!(pointer(8, address) & 0xff, 1, "managed");
    assert_eq!(pointer(17, address + 8), pool);
    assert_eq!(pointer(12, address + 8), 10_000);
    assert_eq!((attribute(pool, 7), attribute(pool, 5)), (10_240, 10_240));
    let mut preferred = 0;
    // SAFETY: four bytes, as it says.
    ok(unsafe { cuMemRangeGetAttribute(&mut preferred, 4, 2, address, 10_000) });
    assert_eq!(preferred, -1, "the host");

    // The stream can still use it after it is freed in its order, and nobody can free it again.
    let copy = allocate(4);
    ok(cuMemsetD32Async(address, 9, 1, stream));
    ok(cuMemcpyDtoDAsync_v2(copy, address, 4, stream));
    ok(cuMemFreeAsync(address, stream));
    assert_eq!(cuMemFreeAsync(address, stream), INVALID_VALUE);
    assert_eq!(cuMemFree_v2(address), INVALID_VALUE);
    assert_eq!((attribute(pool, 7), attribute(pool, 8)), (0, 10_240));
    ok(cuStreamSynchronize(stream));
    assert_eq!(read(copy, 1), [9]);

    // A pool that is destroyed lasts as long as its memory.
    ok(cuMemAllocFromPoolAsync(&mut address, 8, pool, stream));
    ok(cuMemPoolDestroy(pool));
    let mut refused = 0;
    assert_eq!(cuMemAllocFromPoolAsync(&mut refused, 8, pool, stream), INVALID_VALUE);
    assert_eq!(read(address, 2), [0, 0]);
    ok(cuMemFree_v2(address));
    ok(cuCtxDestroy_v2(context));
}

#[test]
fn each_place_has_a_pool_of_managed_memory() {
    context();
    let mut all = Vec::new();
    for location in [ANYWHERE, ON_DEVICE, ON_HOST, ON_NODE] {
        let (mut default, mut current, mut other) = (0, 0, 0);
        ok(cuMemGetDefaultMemPool(&mut default, &location, MANAGED));
        ok(cuMemGetMemPool(&mut current, &location, MANAGED));
        assert_eq!(current, default);
        assert!(!all.contains(&default));
        all.push(default);
        assert_eq!(cuMemPoolDestroy(default), INVALID_VALUE);
        let own = pool(location);
        ok(cuMemSetMemPool(&location, MANAGED, own));
        ok(cuMemGetMemPool(&mut current, &location, MANAGED));
        assert_eq!(current, own);
        ok(cuMemGetMemPool(&mut other, &ON_DEVICE, 1));
        assert!(other != own && other != default, "that of plain memory");
        ok(cuMemPoolDestroy(own));
        ok(cuMemGetMemPool(&mut current, &location, MANAGED));
        assert_eq!(current, default);
    }
    let (mut value, own) = (0, pool(ON_DEVICE));
    ok(cuMemPoolGetAccess(&mut value, own, &ON_DEVICE));
    assert_eq!(value, 3);
    assert_eq!(cuDeviceSetMemPool(0, own), INVALID_VALUE);
    assert_eq!(cuMemSetMemPool(&ON_HOST, MANAGED, own), INVALID_VALUE);
    assert_eq!(cuMemSetMemPool(&ON_DEVICE, 1, own), INVALID_VALUE);
    let mut refused = 0;
    assert_eq!(cuMemGetMemPool(&mut refused, &ON_DEVICE, 3), INVALID_VALUE);
    assert_eq!(cuMemGetMemPool(&mut refused, &[4, 0], MANAGED), INVALID_VALUE);
    assert_eq!(cuMemPoolCreate(&mut refused, &properties([1, 50])), INVALID_DEVICE);
    assert_eq!(cuMemPoolCreate(&mut refused, &properties([3, -1])), INVALID_VALUE);
    let shared = Properties { handle_types: 1, ..properties(ON_DEVICE) };
    assert_eq!(cuMemPoolCreate(&mut refused, &shared), NOT_SUPPORTED);
    let limited = Properties { most: 4096, ..properties(ANYWHERE) };
    let mut pool = 0;
    ok(cuMemPoolCreate(&mut pool, &limited));
    let mut address = 0;
    assert_eq!(cuMemAllocFromPoolAsync(&mut refused, 4 << 20, pool, 0), OUT_OF_MEMORY);
    ok(cuMemAllocFromPoolAsync(&mut address, 4096, pool, 0));
    ok(cuMemFreeAsync(address, 0));
    assert_eq!(refused, 0);
}

/// Gets managed memory from a graph that was captured, and keeps it until it is told to free it.
#[test]
#[ignore = "a program for other tests"]
fn program() {
    context();
    let (pool, stream) = (pool(ANYWHERE), stream());
    let mut address = 0;
    ok(cuStreamBeginCapture_v2(stream, 0));
    ok(cuMemAllocFromPoolAsync(&mut address, 4000, pool, stream));
    ok(cuMemsetD32Async(address, 7, 1000, stream));
    let graph = end(stream);
    assert_eq!(kinds(graph), [10, 2]);
    let exec = instantiate(graph);
    ok(cuGraphLaunch(exec, stream));
    ok(cuStreamSynchronize(stream));
    assert_eq!(pointer(8, address) & 0xff, 1, "managed");
    // SAFETY: managed memory may be used by the host; no work of the device is under way.
    assert_eq!(unsafe { (address as *const u32).read() }, 7);
    say("ready");
    listen();
    ok(cuMemFree_v2(address));
    ok(cuGraphExecDestroy(exec));
    ok(cuGraphDestroy(graph));
    ok(cuMemAllocFromPoolAsync(&mut address, 4000, pool, stream));
    say("again");
    listen();
    ok(cuMemFreeAsync(address, stream));
    ok(cuStreamSynchronize(stream));
    say("freed");
    listen();
}

#[test]
fn a_process_with_managed_memory_of_pools_or_graphs_is_not_checkpointed() {
    const NOTHING: [u64; 8] = [0; 8];
    let mut program = Program::start("program", &[]);
    let pid = program.pid();
    for (said, expected) in [("ready", NOT_SUPPORTED), ("again", NOT_SUPPORTED), ("freed", 0)] {
        assert_eq!(program.hear(), said);
        ok(cuCheckpointProcessLock(pid, &NOTHING));
        assert_eq!(cuCheckpointProcessCheckpoint(pid, &NOTHING), expected, "{said}");
        if expected == 0 {
            ok(cuCheckpointProcessRestore(pid, &NOTHING));
        }
        ok(cuCheckpointProcessUnlock(pid, &NOTHING));
        program.tell("go on");
    }
    program.finish();
}
