//! Pools and their allocations in other processes.

mod support;

use std::fs::File;
use std::os::fd::AsRawFd;

use support::*;

unsafe extern "C" {
    safe fn cuMemAllocFromPoolAsync(address: &mut u64, size: usize, pool: u64, stream: u64) -> u32;
    safe fn cuMemFreeAsync(address: u64, stream: u64) -> u32;
    safe fn cuMemPoolCreate(pool: &mut u64, properties: &[u32; 22]) -> u32;
    safe fn cuMemPoolDestroy(pool: u64) -> u32;
    safe fn cuMemPoolExportToShareableHandle(
        out: &mut i32,
        pool: u64,
        kind: u32,
        flags: u64,
    ) -> u32;
    safe fn cuMemPoolImportFromShareableHandle(
        pool: &mut u64,
        descriptor: u64,
        kind: u32,
        flags: u64,
    ) -> u32;
    safe fn cuMemPoolExportPointer(out: &mut Data, address: u64) -> u32;
    safe fn cuMemPoolImportPointer(address: &mut u64, pool: u64, data: &Data) -> u32;
    safe fn cuDeviceSetMemPool(device: i32, pool: u64) -> u32;
    safe fn cuIpcCloseMemHandle(address: u64) -> u32;
}

/// `CUmemPoolPtrExportData`.
#[repr(C)]
#[derive(Clone, Copy)]
struct Data([u64; 8]);

/// `CUmemPoolProps` of pinned memory on device 0 that is exported as a descriptor.
const SHAREABLE: [u32; 22] = {
    let mut words = [0; 22];
    (words[0], words[1], words[2]) = (1, 1, 1);
    words
};
const NOTHING: [u64; 8] = [0; 8];
/// Behind a first allocation in the same block.
const PLACE: usize = 4096;

fn pool(properties: &[u32; 22]) -> u64 {
    let mut pool = 0;
    ok(cuMemPoolCreate(&mut pool, properties));
    pool
}

fn allocate_from(pool: u64, size: usize) -> u64 {
    let mut address = 0;
    ok(cuMemAllocFromPoolAsync(&mut address, size, pool, 0));
    address
}

/// Gives the descriptor of its pool and the data of an allocation, and says what is in that when it is told to.
#[test]
#[ignore = "a program for other tests"]
fn program() {
    context();
    let (pool, other) = (pool(&SHAREABLE), pool(&SHAREABLE));
    let (first, second) = (allocate_from(pool, PLACE), allocate_from(pool, 4000));
    write(first, &[1]);
    write(second, &[2, 3]);
    let mut descriptor = -1;
    ok(cuMemPoolExportToShareableHandle(&mut descriptor, pool, 1, 0));
    let mut data = Data([0; 8]);
    assert_eq!(cuMemPoolExportPointer(&mut data, second + 4), INVALID_VALUE);
    // Another pool, which the allocation is not of.
    let mut other_descriptor = -1;
    ok(cuMemPoolExportToShareableHandle(&mut other_descriptor, other, 1, 0));
    let plain = allocate(100);
    assert_eq!(cuMemPoolExportPointer(&mut data, plain), INVALID_VALUE);
    ok(cuMemFree_v2(plain));
    ok(cuMemPoolExportPointer(&mut data, second));
    assert_eq!((read(first, 1), read(second, 2)), (vec![1], vec![2, 3]));
    say(other_descriptor);
    say(descriptor);
    data.0.iter().for_each(say);
    while listen() == "read" {
        say(format!("{:?}", read(second, 2)));
    }
    ok(cuMemFreeAsync(second, 0));
    ok(cuMemFree_v2(first));
    ok(cuMemPoolDestroy(pool));
    ok(cuCtxSynchronize());
    say(used());
}

/// The descriptors of another pool of the program and of its pool, and the data of its allocation.
fn exported(program: &mut Program) -> (File, File, Data) {
    let mut open = || {
        let path = format!("/proc/{}/fd/{}", program.pid(), program.hear());
        File::open(path).unwrap()
    };
    let (other, file) = (open(), open());
    let data = Data([(); 8].map(|()| program.hear().parse().unwrap()));
    (other, file, data)
}

extern "C" fn sleep(milliseconds: u64) {
    std::thread::sleep(std::time::Duration::from_millis(milliseconds));
}

fn import(file: &File) -> (u32, u64) {
    let mut pool = 0;
    let code = cuMemPoolImportFromShareableHandle(&mut pool, file.as_raw_fd() as u64, 1, 0);
    (code, pool)
}

#[test]
fn what_is_allocated_from_a_pool_can_be_opened_elsewhere() {
    let mut program = Program::start("program", &[]);
    context();
    let (other, file, data) = exported(&mut program);
    let (code, imported) = import(&file);
    ok(code);
    let mut address = 0;
    ok(cuMemPoolImportPointer(&mut address, imported, &data));
    assert_eq!(read(address, 2), [2, 3]);
    write(address + 4, &[30]);
    program.tell("read");
    assert_eq!(program.hear(), "[2, 30]");
    // It is no memory of an IPC handle, and is freed as memory of a pool.
    assert_eq!(cuIpcCloseMemHandle(address), INVALID_VALUE);
    assert_eq!(cuMemFree_v2(address + 4), INVALID_VALUE);
    ok(cuMemFree_v2(address));
    assert_eq!(used(), 0);
    ok(cuMemPoolImportPointer(&mut address, imported, &data));
    ok(cuMemFreeAsync(address, 0));
    ok(cuCtxSynchronize());
    assert_eq!(used(), 0);
    // What was submitted before can still use it, whatever its stream.
    let (mut stream, copy) = (0, allocate(4));
    ok(cuMemPoolImportPointer(&mut address, imported, &data));
    ok(cuStreamCreate(&mut stream, 1));
    ok(cuLaunchHostFunc(stream, sleep, 50));
    ok(cuMemcpyDtoDAsync_v2(copy, address, 4, stream));
    ok(cuMemFreeAsync(address, 0));
    assert_eq!(cuMemFreeAsync(address, 0), INVALID_VALUE);
    ok(cuStreamSynchronize(0));
    ok(cuStreamSynchronize(stream));
    assert_eq!(read(copy, 1), [2]);
    ok(cuMemFree_v2(copy));
    ok(cuCtxSynchronize());
    assert_eq!(used(), 0);
    // It is of no other pool of the program.
    let (code, wrong) = import(&other);
    ok(code);
    assert_eq!(cuMemPoolImportPointer(&mut address, wrong, &data), INVALID_VALUE);
    ok(cuMemPoolDestroy(wrong));
    // Nothing is allocated from a pool of another process.
    assert_eq!(cuMemAllocFromPoolAsync(&mut address, 100, imported, 0), INVALID_VALUE);
    assert_eq!(cuDeviceSetMemPool(0, imported), INVALID_VALUE);
    ok(cuMemPoolDestroy(imported));
    assert_eq!(cuMemPoolImportPointer(&mut address, imported, &data), INVALID_VALUE);
    program.tell("end");
    assert_eq!(program.hear(), "0");
    program.finish();
}

#[test]
fn what_is_no_exported_pool_is_refused() {
    let mut program = Program::start("program", &[]);
    context();
    let (_, file, data) = exported(&mut program);
    let descriptor = file.as_raw_fd() as u64;
    let pool_of = |descriptor, kind, flags| {
        cuMemPoolImportFromShareableHandle(&mut 0, descriptor, kind, flags)
    };
    for (descriptor, kind, flags) in
        [(descriptor, 8, 0), (descriptor, 1, 1), (!0, 1, 0), (9999, 1, 0)]
    {
        assert_eq!(pool_of(descriptor, kind, flags), INVALID_VALUE, "{descriptor} {kind} {flags}");
    }
    let (reader, _writer) = std::io::pipe().unwrap();
    assert_eq!(pool_of(reader.as_raw_fd() as u64, 1, 0), INVALID_VALUE);
    let zero = File::open("/dev/zero").unwrap();
    assert_eq!(pool_of(zero.as_raw_fd() as u64, 1, 0), INVALID_VALUE);
    // Pools of this process are none, and neither are others exported.
    let (own, mut plain) = (pool(&SHAREABLE), SHAREABLE);
    plain[1] = 0;
    let plain = pool(&plain);
    let mut address = 0;
    for pool in [own, plain] {
        assert_eq!(cuMemPoolImportPointer(&mut address, pool, &data), INVALID_VALUE);
    }
    let mut out = 0;
    assert_eq!(cuMemPoolExportToShareableHandle(&mut out, plain, 1, 0), INVALID_VALUE);
    assert_eq!(cuMemPoolExportToShareableHandle(&mut out, own, 8, 0), INVALID_VALUE);
    let memory = allocate_from(plain, 100);
    assert_eq!(cuMemPoolExportPointer(&mut Data([0; 8]), memory), INVALID_VALUE);
    program.tell("end");
    assert_eq!(program.hear(), "0");
    program.finish();
}

/// As memory of IPC handles: with it the process is lost.
#[test]
fn shared_memory_of_pools_is_not_carried_by_a_checkpoint() {
    let mut program = Program::start("program", &[]);
    context();
    exported(&mut program);
    let pid = program.pid();
    ok(cuCheckpointProcessLock(pid, &NOTHING));
    ok(cuCheckpointProcessCheckpoint(pid, &NOTHING));
    assert_eq!(cuCheckpointProcessRestore(pid, &NOTHING), NOT_SUPPORTED);
    program.kill();
}
