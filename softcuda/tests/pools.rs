//! Stream-ordered memory: order, reuse, attributes, and the checkpoint.

mod support;

use support::*;

unsafe extern "C" {
    safe fn cuMemAllocAsync(address: &mut u64, size: usize, stream: u64) -> u32;
    safe fn cuMemAllocFromPoolAsync(address: &mut u64, size: usize, pool: u64, stream: u64) -> u32;
    safe fn cuMemFreeAsync(address: u64, stream: u64) -> u32;
    safe fn cuMemPoolCreate(pool: &mut u64, properties: &PoolProperties) -> u32;
    safe fn cuMemPoolDestroy(pool: u64) -> u32;
    safe fn cuMemPoolTrimTo(pool: u64, keep: usize) -> u32;
    safe fn cuMemPoolGetAttribute(pool: u64, attribute: u32, value: &mut u64) -> u32;
    safe fn cuMemPoolSetAttribute(pool: u64, attribute: u32, value: &u64) -> u32;
    safe fn cuMemPoolSetAccess(pool: u64, access: &Access, count: usize) -> u32;
    safe fn cuMemPoolGetAccess(flags: &mut u32, pool: u64, location: &[u32; 2]) -> u32;
    safe fn cuMemPoolExportToShareableHandle(
        out: &mut i32,
        pool: u64,
        kind: u32,
        flags: u64,
    ) -> u32;
    safe fn cuDeviceGetDefaultMemPool(pool: &mut u64, device: i32) -> u32;
    safe fn cuDeviceGetMemPool(pool: &mut u64, device: i32) -> u32;
    safe fn cuDeviceSetMemPool(device: i32, pool: u64) -> u32;
    safe fn cuDeviceGetAttribute(value: &mut i32, attribute: u32, device: i32) -> u32;
    fn cuPointerGetAttribute(out: *mut u64, attribute: u32, address: u64) -> u32;
}

/// `CUmemPoolProps`.
#[repr(C)]
#[derive(Clone, Copy)]
struct PoolProperties {
    kind: u32,
    handle_types: u32,
    location_kind: u32,
    location: i32,
    security: u64,
    most: usize,
    rest: [u8; 56],
}

const PLAIN: PoolProperties = PoolProperties {
    kind: 1,
    handle_types: 0,
    location_kind: 1,
    location: 0,
    security: 0,
    most: 0,
    rest: [0; 56],
};

const REUSE_FOLLOW_EVENTS: u32 = 1;
const THRESHOLD: u32 = 4;
const RESERVED: u32 = 5;
const RESERVED_HIGH: u32 = 6;
const IN_USE: u32 = 7;
const IN_USE_HIGH: u32 = 8;

#[track_caller]
fn pool() -> u64 {
    let mut pool = 0;
    ok(cuMemPoolCreate(&mut pool, &PLAIN));
    pool
}

#[track_caller]
fn attribute(pool: u64, number: u32) -> u64 {
    let mut value = 0;
    ok(cuMemPoolGetAttribute(pool, number, &mut value));
    value
}

#[track_caller]
fn allocate_from(pool: u64, size: usize, stream: u64) -> u64 {
    let mut address = 0;
    ok(cuMemAllocFromPoolAsync(&mut address, size, pool, stream));
    address
}

#[track_caller]
fn stream() -> u64 {
    let mut stream = 0;
    ok(cuStreamCreate(&mut stream, 1));
    stream
}

extern "C" fn sleep(milliseconds: u64) {
    std::thread::sleep(std::time::Duration::from_millis(milliseconds));
}

#[test]
fn allocation_and_free_take_place_in_stream_order() {
    let context = context();
    let (pool, stream) = (pool(), stream());
    ok(cuLaunchHostFunc(stream, sleep, 50));
    let one = allocate_from(pool, 4000, stream);
    ok(cuMemsetD32Async(one, 3, 1000, stream));
    let copy = allocate(4000);
    ok(cuMemcpyDtoDAsync_v2(copy, one, 4000, stream));
    ok(cuMemFreeAsync(one, stream));
    assert_eq!(cuMemFreeAsync(one, stream), INVALID_VALUE);
    // As with other memory, there is nothing to free at null.
    ok(cuMemFreeAsync(0, stream));
    // The same stream may have the memory again at once, though the free is not done.
    assert_eq!(cuStreamQuery(stream), NOT_READY);
    let two = allocate_from(pool, 4000, stream);
    assert_eq!(two, one);
    ok(cuMemsetD32Async(two, 4, 1000, stream));
    ok(cuStreamSynchronize(stream));
    assert_eq!(read(copy, 1000), vec![3; 1000]);
    assert_eq!(read(two, 1000), vec![4; 1000]);
    // SAFETY: 8 bytes, as the attributes have.
    unsafe {
        let mut value = 0;
        ok(cuPointerGetAttribute(&mut value, 17, two + 8));
        assert_eq!(value, pool);
        ok(cuPointerGetAttribute(&mut value, 12, two + 8));
        assert_eq!(value, 4000);
    }
    ok(cuMemFree_v2(two));
    assert_eq!(cuMemFree_v2(two), INVALID_VALUE);

    // Plain memory may be freed in stream order.
    ok(cuLaunchHostFunc(stream, sleep, 20));
    ok(cuMemsetD32Async(copy, 1, 1000, stream));
    ok(cuMemFreeAsync(copy, stream));
    assert_eq!(cuMemFree_v2(copy), INVALID_VALUE);
    ok(cuStreamSynchronize(stream));
    ok(cuMemPoolDestroy(pool));
    assert_eq!(used(), 0);
    ok(cuCtxDestroy_v2(context));
}

#[test]
fn attributes_and_the_release_threshold() {
    let context = context();
    let (pool, stream) = (pool(), stream());
    assert_eq!(attribute(pool, REUSE_FOLLOW_EVENTS) as u32, 1);
    assert_eq!(attribute(pool, THRESHOLD), 0);
    let granule = GRANULE as u64;
    let (one, two) = (allocate_from(pool, GRANULE, stream), allocate_from(pool, 100, stream));
    assert_eq!(attribute(pool, IN_USE), granule + 512);
    assert_eq!(attribute(pool, RESERVED), 2 * granule);
    ok(cuMemFreeAsync(one, stream));
    assert_eq!(attribute(pool, IN_USE), 512);
    ok(cuStreamSynchronize(stream));
    assert_eq!(attribute(pool, RESERVED), granule, "what is free is given back");
    assert_eq!(used(), GRANULE);
    assert_eq!(attribute(pool, RESERVED_HIGH), 2 * granule);
    assert_eq!(attribute(pool, IN_USE_HIGH), granule + 512);
    ok(cuMemPoolSetAttribute(pool, IN_USE_HIGH, &0));
    assert_eq!(attribute(pool, IN_USE_HIGH), 512);
    assert_eq!(cuMemPoolSetAttribute(pool, IN_USE_HIGH, &5), INVALID_VALUE);
    assert_eq!(cuMemPoolSetAttribute(pool, IN_USE, &0), INVALID_VALUE);
    assert_eq!(cuMemPoolSetAttribute(pool, 99, &0), INVALID_VALUE);
    let mut value = 0;
    assert_eq!(cuMemPoolGetAttribute(pool, 99, &mut value), INVALID_VALUE);

    ok(cuMemPoolSetAttribute(pool, THRESHOLD, &u64::MAX));
    ok(cuMemFreeAsync(two, stream));
    ok(cuCtxSynchronize());
    assert_eq!(attribute(pool, RESERVED), granule, "kept below the threshold");
    ok(cuMemPoolTrimTo(pool, GRANULE));
    assert_eq!(attribute(pool, RESERVED), granule);
    ok(cuMemPoolTrimTo(pool, 0));
    assert_eq!(attribute(pool, RESERVED), 0);
    ok(cuMemPoolSetAttribute(pool, REUSE_FOLLOW_EVENTS, &0));
    assert_eq!(attribute(pool, REUSE_FOLLOW_EVENTS) as u32, 0);
    let mut supported = 0;
    ok(cuDeviceGetAttribute(&mut supported, 115, 0));
    assert_eq!(supported, 1);
    ok(cuMemPoolDestroy(pool));
    ok(cuCtxDestroy_v2(context));
}

/// A limit is in whole pages of the device.
#[test]
fn a_small_limit_leaves_room_for_an_allocation() {
    let context = context();
    let (mut pool, mut address) = (0, 0);
    ok(cuMemPoolCreate(&mut pool, &PoolProperties { most: 2048, ..PLAIN }));
    ok(cuMemAllocFromPoolAsync(&mut address, 64, pool, 0));
    assert_eq!(cuMemAllocFromPoolAsync(&mut 0, GRANULE, pool, 0), OUT_OF_MEMORY);
    ok(cuMemFreeAsync(address, 0));
    ok(cuMemPoolDestroy(pool));
    ok(cuCtxDestroy_v2(context));
}

#[test]
fn plain_memory_gets_what_pools_keep_unused() {
    let environment = [("SOFTCUDA_MEMORY", "8M")];
    Program::start("program_with_little_memory", &environment).finish();
}

#[test]
#[ignore = "a program for other tests"]
fn program_with_little_memory() {
    context();
    let (pool, stream) = (pool(), stream());
    let one = allocate_from(pool, 6 << 20, stream);
    let mut address = 0;
    assert_eq!(cuMemAllocFromPoolAsync(&mut address, 4 << 20, pool, stream), OUT_OF_MEMORY);
    assert_eq!(cuMemAlloc_v2(&mut address, 4 << 20), OUT_OF_MEMORY);
    ok(cuMemPoolSetAttribute(pool, THRESHOLD, &u64::MAX));
    ok(cuMemFreeAsync(one, stream));
    ok(cuStreamSynchronize(stream));
    assert_eq!(used(), 6 << 20);
    ok(cuMemAlloc_v2(&mut address, 4 << 20));
    assert_eq!(used(), 4 << 20);
}

#[test]
fn the_pools_of_a_device() {
    let context = context();
    let (mut default, mut current) = (0, 0);
    ok(cuDeviceGetDefaultMemPool(&mut default, 0));
    ok(cuDeviceGetMemPool(&mut current, 0));
    assert_eq!(default, current);
    assert_eq!(cuMemPoolDestroy(default), INVALID_VALUE);
    let stream = stream();
    let own = pool();
    ok(cuDeviceSetMemPool(0, own));
    ok(cuDeviceGetMemPool(&mut current, 0));
    assert_eq!(current, own);
    let mut address = 0;
    ok(cuMemAllocAsync(&mut address, 100, stream));
    assert_eq!(attribute(own, IN_USE), 512);
    // What is in use outlives the pool's handle.
    ok(cuMemPoolDestroy(own));
    ok(cuDeviceGetMemPool(&mut current, 0));
    assert_eq!(current, default);
    ok(cuMemsetD32Async(address, 1, 25, stream));
    ok(cuStreamSynchronize(stream));
    assert_eq!(read(address, 1), [1]);
    assert_eq!(cuMemPoolDestroy(own), INVALID_VALUE);
    assert_eq!(cuMemAllocFromPoolAsync(&mut current, 100, own, stream), INVALID_VALUE);
    ok(cuMemFreeAsync(address, stream));
    ok(cuStreamSynchronize(stream));
    assert_eq!(used(), 0);
    assert_eq!(cuDeviceSetMemPool(0, 12), INVALID_VALUE);
    assert_eq!(cuDeviceSetMemPool(9, default), 101);
    ok(cuCtxDestroy_v2(context));
}

#[test]
fn refusals_of_pools() {
    let context = context();
    let mut pool = 0;
    assert_eq!(
        cuMemPoolCreate(&mut pool, &PoolProperties { handle_types: 8, ..PLAIN }),
        NOT_SUPPORTED
    );
    assert_eq!(cuMemPoolCreate(&mut pool, &PoolProperties { kind: 0, ..PLAIN }), INVALID_VALUE);
    assert_eq!(cuMemPoolCreate(&mut pool, &PoolProperties { location: 9, ..PLAIN }), 101);
    ok(cuMemPoolCreate(&mut pool, &PoolProperties { most: GRANULE, ..PLAIN }));
    let mut address = 0;
    assert_eq!(cuMemAllocFromPoolAsync(&mut address, GRANULE + 1, pool, 0), OUT_OF_MEMORY);
    // No bytes are nothing, which can be freed.
    address = 9;
    ok(cuMemAllocFromPoolAsync(&mut address, 0, pool, 0));
    assert_eq!((address, attribute(pool, IN_USE)), (0, 0));
    ok(cuMemFreeAsync(address, 0));
    assert_eq!(cuMemAllocFromPoolAsync(&mut address, 8, pool, 0x999), INVALID_HANDLE);
    assert_eq!(cuMemFreeAsync(0x1234, 0), INVALID_VALUE);
    let mut flags = 9;
    ok(cuMemPoolGetAccess(&mut flags, pool, &[1, 0]));
    assert_eq!(flags, 3);
    ok(cuMemPoolSetAccess(pool, &READ_WRITE, 1));
    let none = Access { location_kind: 1, location: 0, flags: 0 };
    assert_eq!(cuMemPoolSetAccess(pool, &none, 1), INVALID_VALUE);
    let mut descriptor = -1;
    assert_eq!(cuMemPoolExportToShareableHandle(&mut descriptor, pool, 1, 0), INVALID_VALUE);
    ok(cuMemPoolDestroy(pool));
    ok(cuCtxDestroy_v2(context));
}

#[test]
#[ignore = "a program for other tests"]
fn program() {
    context();
    let (pool, stream) = (pool(), stream());
    ok(cuMemPoolSetAttribute(pool, THRESHOLD, &u64::MAX));
    let kept = allocate_from(pool, 5 << 20, stream);
    let freed = allocate_from(pool, 4000, stream);
    ok(cuMemsetD32Async(kept + (4 << 20), 21, 100, stream));
    ok(cuMemFreeAsync(freed, stream));
    ok(cuStreamSynchronize(stream));
    say("ready");
    listen();
    assert_eq!(read(kept + (4 << 20), 101), [vec![21; 100], vec![0]].concat());
    assert_eq!(attribute(pool, RESERVED), 6 << 20);
    assert_eq!(used(), 6 << 20);
    assert_eq!(allocate_from(pool, 4000, stream), freed);
    ok(cuMemFreeAsync(freed, stream));
    ok(cuMemFreeAsync(kept, stream));
    ok(cuStreamSynchronize(stream));
    ok(cuMemPoolDestroy(pool));
    assert_eq!(used(), 0);
}

#[test]
fn a_checkpoint_carries_pools() {
    const NOTHING: [u64; 8] = [0; 8];
    let mut program = Program::start("program", &[]);
    assert_eq!(program.hear(), "ready");
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
