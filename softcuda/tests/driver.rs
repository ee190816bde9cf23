//! Memory, streams, events and their refusals, in one process. The tests share one driver, so each
//! has a context of its own and none locks the process.

mod support;

use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Duration;

use support::*;

#[test]
fn memory_is_allocated_copied_and_freed() {
    let context = context();
    let one = allocate(4096);
    let two = allocate(3 * GRANULE);
    let values: Vec<u32> = (0..1024).collect();
    write(one, &values);
    ok(cuMemcpyDtoDAsync_v2(two + GRANULE as u64, one, 4096, 0));
    assert_eq!(read(two + GRANULE as u64, 1024), values);
    ok(cuMemsetD32_v2(two, 0xdead_beef, 10));
    assert_eq!(read(two, 11), [vec![0xdead_beef; 10], vec![0]].concat());

    let mut address = 0;
    assert_eq!(cuMemAlloc_v2(&mut address, 0), INVALID_VALUE);
    assert_eq!(cuMemAlloc_v2(&mut address, 1 << 50), OUT_OF_MEMORY);
    assert_eq!(cuMemFree_v2(one + 8), INVALID_VALUE);
    ok(cuMemFree_v2(one));
    assert_eq!(cuMemFree_v2(one), INVALID_VALUE);
    ok(cuMemFree_v2(two));
    let byte = 0;
    // SAFETY: the source is one byte long, and the destination is refused.
    assert_eq!(unsafe { cuMemcpyHtoD_v2(two, &raw const byte, 1) }, INVALID_VALUE);
    ok(cuCtxDestroy_v2(context));
}

static ORDER: AtomicU32 = AtomicU32::new(0);

extern "C" fn slow_mark(value: u64) {
    std::thread::sleep(Duration::from_millis(30));
    let _ =
        ORDER.compare_exchange(value as u32, value as u32 + 1, Ordering::SeqCst, Ordering::SeqCst);
}

extern "C" fn call_the_api(result: u64) {
    let code = cuCtxSynchronize();
    // SAFETY: the test passes the address of an atomic that outlives the stream's work.
    unsafe { &*(result as *const AtomicU32) }.store(code, Ordering::SeqCst);
}

#[test]
fn streams_are_asynchronous_and_ordered() {
    let context = context();
    let (mut one, mut two, mut free) = (0, 0, 0);
    ok(cuStreamCreate(&mut one, 0));
    ok(cuStreamCreate(&mut two, 0));
    ok(cuStreamCreate(&mut free, 1));
    let mut event = 0;
    ok(cuEventCreate(&mut event, 0));

    // one marks 0, then two marks 1 (through an event), then the default stream marks 2 (as it
    // waits for both), then one marks 3 (as it waits for the default stream).
    ok(cuLaunchHostFunc(one, slow_mark, 0));
    ok(cuEventRecord(event, one));
    assert_eq!(cuEventQuery(event), NOT_READY);
    assert_eq!(cuStreamQuery(one), NOT_READY);
    ok(cuStreamWaitEvent(two, event, 0));
    ok(cuLaunchHostFunc(two, slow_mark, 1));
    ok(cuLaunchHostFunc(0, slow_mark, 2));
    ok(cuLaunchHostFunc(one, slow_mark, 3));
    assert_eq!(cuStreamQuery(free), 0, "a non-blocking stream waits for nobody");
    ok(cuStreamSynchronize(one));
    assert_eq!(ORDER.load(Ordering::SeqCst), 4);
    ok(cuEventSynchronize(event));
    assert_eq!(cuStreamQuery(two), 0);

    let code = AtomicU32::new(0);
    ok(cuLaunchHostFunc(two, call_the_api, (&raw const code) as u64));
    ok(cuStreamSynchronize(two));
    assert_eq!(code.load(Ordering::SeqCst), NOT_PERMITTED);

    // Work of a destroyed stream is still waited for.
    ok(cuLaunchHostFunc(one, slow_mark, 4));
    ok(cuStreamDestroy_v2(one));
    assert_eq!(cuStreamQuery(0), NOT_READY);
    ok(cuStreamSynchronize(0));
    assert_eq!(ORDER.load(Ordering::SeqCst), 5);
    assert_eq!(cuStreamSynchronize(one), INVALID_HANDLE);
    assert_eq!(cuStreamDestroy_v2(one), INVALID_HANDLE);
    ok(cuEventDestroy_v2(event));
    assert_eq!(cuEventRecord(event, two), INVALID_HANDLE);
    assert_eq!(cuStreamSynchronize(0x1234_5678), INVALID_HANDLE);
    ok(cuCtxDestroy_v2(context));
}

#[test]
fn events_measure_time() {
    let context = context();
    let (mut start, mut end) = (0, 0);
    ok(cuEventCreate(&mut start, 0));
    ok(cuEventCreate(&mut end, 0));
    let mut time = -1.0;
    assert_eq!(cuEventElapsedTime_v2(&mut time, start, end), INVALID_HANDLE);
    ok(cuEventRecord(start, 0));
    ok(cuLaunchHostFunc(0, slow_mark, 99));
    ok(cuEventRecord(end, 0));
    assert_eq!(cuEventElapsedTime_v2(&mut time, start, end), NOT_READY);
    ok(cuEventSynchronize(end));
    ok(cuEventElapsedTime_v2(&mut time, start, end));
    assert!((29.0..5000.0).contains(&time), "{time} ms");
    ok(cuCtxDestroy_v2(context));
}

#[test]
fn a_stream_waits_for_a_value() {
    let context = context();
    let (mut waits, mut writes) = (0, 0);
    ok(cuStreamCreate(&mut waits, 1));
    ok(cuStreamCreate(&mut writes, 1));
    let flag = allocate(8);
    let result = allocate(8);
    ok(cuMemsetD32_v2(flag, 0, 2));
    ok(cuMemsetD32_v2(result, 0, 2));
    ok(cuStreamWaitValue32_v2(waits, flag, 5, 0));
    ok(cuMemsetD32Async(result, 1, 1, waits));
    std::thread::sleep(Duration::from_millis(20));
    assert_eq!(cuStreamQuery(waits), NOT_READY);
    ok(cuStreamWriteValue32_v2(writes, flag, 6, 0));
    ok(cuStreamSynchronize(waits));
    assert_eq!(read(result, 1), [1]);
    ok(cuCtxDestroy_v2(context));
}

#[test]
fn pinned_memory_is_the_devices_too() {
    let context = context();
    let mut pinned = 0;
    ok(cuMemHostAlloc(&mut pinned, 8192, 0));
    ok(cuMemsetD32_v2(pinned + 4096, 7, 4));
    // SAFETY: the driver allocated these bytes and set them.
    assert_eq!(unsafe { ((pinned + 4108) as *const u32).read() }, 7);
    ok(cuMemFreeHost(pinned));
    assert_eq!(cuMemFreeHost(pinned), INVALID_VALUE);
    ok(cuMemFreeHost(0));
    assert_eq!(cuMemsetD32_v2(pinned, 7, 4), INVALID_VALUE);
    ok(cuCtxDestroy_v2(context));
}

#[test]
fn virtual_memory_refuses_what_the_driver_refuses() {
    let context = context();
    let (handle, address) = map_new(2 * GRANULE);
    let mut other = 0;
    assert_eq!(cuMemCreate(&mut other, GRANULE + 4096, &SHAREABLE, 0), INVALID_VALUE);
    assert_eq!(cuMemMap(address, GRANULE, 0, handle, 0), INVALID_VALUE);
    assert_eq!(cuMemUnmap(address, GRANULE), INVALID_VALUE);
    assert_eq!(cuMemAddressFree(address, 2 * GRANULE), INVALID_VALUE);
    ok(cuMemUnmap(address, 2 * GRANULE));
    // Not accessible before access is granted.
    ok(cuMemMap(address, 2 * GRANULE, 0, handle, 0));
    assert_eq!(cuMemsetD32_v2(address, 1, 1), INVALID_VALUE);
    ok(cuMemUnmap(address, 2 * GRANULE));
    ok(cuMemRelease(handle));
    assert_eq!(cuMemMap(address, 2 * GRANULE, 0, handle, 0), INVALID_VALUE);
    ok(cuMemAddressFree(address, 2 * GRANULE));
    let mut fd = -1;
    assert_eq!(cuMemExportToShareableHandle(&mut fd, handle, 1, 0), INVALID_VALUE);
    let private = Properties { handle_types: 0, ..SHAREABLE };
    ok(cuMemCreate(&mut other, GRANULE, &private, 0));
    assert_eq!(cuMemExportToShareableHandle(&mut fd, other, 1, 0), INVALID_VALUE);
    ok(cuMemRelease(other));
    ok(cuCtxDestroy_v2(context));
}

#[test]
fn a_forked_child_has_no_driver() {
    let context = context();
    let (handle, address) = map_new(GRANULE);
    // SAFETY: the child calls only functions that return at once without taking locks, and leaves
    // through `_exit`.
    let child = unsafe {
        let child = libc::fork();
        if child == 0 {
            let refused = cuInit(0) == NOT_INITIALIZED && cuCtxSynchronize() == NOT_INITIALIZED;
            // Asking about unmapped addresses fails.
            let gone = libc::msync(address as *mut _, GRANULE, libc::MS_ASYNC) != 0;
            let closed = (0..1000).all(|fd| {
                // Only device memory is sealed against shrinking.
                let seals = libc::fcntl(fd, libc::F_GET_SEALS);
                seals < 0 || seals & libc::F_SEAL_SHRINK == 0
            });
            libc::_exit(if refused && gone && closed { 0 } else { 1 });
        }
        child
    };
    let mut status = 0;
    // SAFETY: waits for the child made above, with a place for its status.
    unsafe { libc::waitpid(child, &mut status, 0) };
    assert_eq!(status, 0);
    write(address, &[1]);
    ok(cuMemUnmap(address, GRANULE));
    ok(cuMemRelease(handle));
    ok(cuCtxDestroy_v2(context));
}

#[test]
fn forks_are_safe_while_other_threads_use_memory() {
    let context = context();
    let stop = std::sync::atomic::AtomicBool::new(false);
    std::thread::scope(|scope| {
        for _ in 0..3 {
            scope.spawn(|| {
                ok(cuCtxSetCurrent(context));
                while !stop.load(Ordering::Relaxed) {
                    let (handle, address) = map_new(GRANULE);
                    ok(cuMemUnmap(address, GRANULE));
                    ok(cuMemRelease(handle));
                    ok(cuMemAddressFree(address, GRANULE));
                }
            });
        }
        for _ in 0..200 {
            // SAFETY: the child calls a function that returns at once without taking locks, and
            // leaves through `_exit`.
            let child = unsafe {
                let child = libc::fork();
                if child == 0 {
                    libc::_exit(if cuCtxSynchronize() == NOT_INITIALIZED { 0 } else { 1 });
                }
                child
            };
            let mut status = -1;
            let begin = std::time::Instant::now();
            // SAFETY: waits for the child made above, with a place for its status.
            while unsafe { libc::waitpid(child, &mut status, libc::WNOHANG) } == 0 {
                if begin.elapsed() > Duration::from_secs(60) {
                    // SAFETY: the child is not waited for yet, so the number is still its own.
                    unsafe { libc::kill(child, libc::SIGKILL) };
                }
                std::thread::yield_now();
            }
            assert_eq!(status, 0);
        }
        stop.store(true, Ordering::Relaxed);
    });
    ok(cuCtxDestroy_v2(context));
}

#[test]
fn each_thread_has_a_default_stream() {
    let context = context();
    let data = allocate(4096);
    std::thread::scope(|scope| {
        scope.spawn(|| {
            ok(cuCtxSetCurrent(context));
            ok(cuLaunchHostFunc_ptsz(0, slow_mark, 99));
            ok(cuMemsetD32Async_ptsz(data, 3, 1, 0));
            assert_eq!(cuStreamQuery_ptsz(0), NOT_READY);
        });
    });
    // The thread's stream has ended with it, but its work counts.
    assert_eq!(cuStreamQuery_ptsz(0), 0);
    ok(cuCtxSynchronize());
    assert_eq!(read(data, 1), [3]);
    ok(cuCtxDestroy_v2(context));
}

#[test]
fn copies_keep_to_the_rate_in_both_directions_at_once() {
    Program::start("copying_program", &[("SOFTCUDA_PCIE_GBPS", "0.1")]).finish();
}

#[test]
#[ignore = "a program for other tests"]
fn copying_program() {
    context();
    const SIZE: usize = 25_000_000;
    let (mut host, mut to, mut from) = (0, 0, 0);
    ok(cuMemHostAlloc(&mut host, 2 * SIZE, 0));
    ok(cuStreamCreate(&mut to, 1));
    ok(cuStreamCreate(&mut from, 1));
    let device = allocate(2 * SIZE);
    // Other programs may hold up this one, and then it says nothing: one try that was not held up is enough.
    let mut tries = Vec::new();
    while tries.len() < 50 {
        let begin = std::time::Instant::now();
        // SAFETY: both halves of the pinned memory are as large as the copies.
        unsafe {
            ok(cuMemcpyHtoDAsync_v2(device, host as *const u8, SIZE, to));
            let there = (host as usize + SIZE) as *mut u8;
            ok(cuMemcpyDtoHAsync_v2(there, device + SIZE as u64, SIZE, from));
        }
        let called = begin.elapsed();
        ok(cuCtxSynchronize());
        let took = begin.elapsed();
        assert!(took >= Duration::from_millis(250), "{took:?}");
        // The calls do not wait, and each direction has the rate for itself.
        if called < Duration::from_millis(200) && took < Duration::from_millis(450) {
            return;
        }
        tries.push((called, took));
    }
    panic!("the calls wait, or the directions share the rate: {tries:?}");
}

#[test]
fn two_dimensional_copies() {
    let context = context();
    let device = allocate(64 * 4);
    ok(cuMemsetD32_v2(device, 0, 64));
    let from: Vec<u32> = (0..12).collect();
    // 3 rows of 2 words, out of rows of 4 words, into rows of 8 words, at row 1, word 2.
    let mut copy = [0_u64; 16];
    copy[0] = 4; // from x
    copy[2] = 1; // from host
    copy[3] = from.as_ptr() as u64;
    copy[6] = 16;
    copy[7] = 8; // to x
    copy[8] = 1; // to y
    copy[9] = 2; // to device
    copy[11] = device;
    copy[13] = 32;
    copy[14] = 8;
    copy[15] = 3;
    // SAFETY: the structure describes the vector and the allocation.
    ok(unsafe { cuMemcpy2D_v2(&copy) });
    let rows = read(device, 64);
    assert_eq!(rows[10..12], [1, 2]);
    assert_eq!(rows[18..20], [5, 6]);
    assert_eq!(rows[26..28], [9, 10]);
    assert_eq!(rows.iter().filter(|word| **word != 0).count(), 6);
    copy[9] = 3; // an array, which 0 is not
    // SAFETY: as before.
    assert_eq!(unsafe { cuMemcpy2D_v2(&copy) }, INVALID_VALUE);
    ok(cuCtxDestroy_v2(context));
}

#[test]
fn the_library_exports_every_function_of_the_driver() {
    let test = std::env::current_exe().unwrap();
    let path = test.parent().unwrap().join("libsoftcuda.so");
    // SAFETY: the library has no constructors, and stays loaded.
    let library = unsafe { libloading::Library::new(&path) }.unwrap();
    let names = include_str!("../src/api/names.txt");
    assert_eq!(names.lines().count(), 682);
    for name in names.lines() {
        // SAFETY: only the address is looked at.
        let symbol = unsafe { library.get::<unsafe extern "C" fn()>(name) };
        assert!(symbol.is_ok(), "{name}");
    }
    type Version = unsafe extern "C" fn(*mut i32) -> u32;
    type GetAddress = unsafe extern "C" fn(*const u8, *mut usize, i32, u64, *mut u32) -> u32;
    // SAFETY: these are the functions' types.
    let (version, get_address, missing) = unsafe {
        (
            library.get::<Version>("cuDriverGetVersion").unwrap(),
            library.get::<GetAddress>("cuGetProcAddress_v2").unwrap(),
            library.get::<unsafe extern "C" fn() -> u32>("cuProfilerInitialize").unwrap(),
        )
    };
    let (mut value, mut address, mut status) = (0, 0, 9);
    // SAFETY: the arguments are as the functions want them; the stub ignores its arguments.
    unsafe {
        ok(version(&mut value));
        assert_eq!(value, 13000);
        let name = c"cuDriverGetVersion".as_ptr().cast();
        ok(get_address(name, &mut address, 13000, 0, &mut status));
        assert_eq!(missing(), NOT_SUPPORTED);
    }
    assert_eq!((address, status), (*version as usize, 0));
    std::mem::forget(library);
}

/// As the tests of NVIDIA's cuda-bindings ask it.
#[test]
fn registered_memory_is_given_back_by_its_beginning() {
    unsafe extern "C" {
        fn cuMemHostRegister_v2(address: *mut u8, size: usize, flags: u32) -> u32;
        fn cuMemHostUnregister(address: *mut u8) -> u32;
    }
    const NOT_REGISTERED: u32 = 713;
    context();
    let mut bytes = [0_u8; 256];
    let start = bytes.as_mut_ptr();
    // SAFETY: the memory lives to the end of the test; addresses that are not registered are refused.
    unsafe {
        ok(cuMemHostRegister_v2(start, 160, 0));
        assert_eq!(cuMemHostUnregister(start.add(80)), INVALID_VALUE);
        assert_eq!(cuMemHostUnregister(start.add(160)), NOT_REGISTERED);
        ok(cuMemHostUnregister(start));
        assert_eq!(cuMemHostUnregister(start), NOT_REGISTERED);
    }
}
