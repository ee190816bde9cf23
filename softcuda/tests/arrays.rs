//! CUDA arrays: description, and copies with memory of every kind.

mod support;

use support::*;

unsafe extern "C" {
    safe fn cuArrayCreate_v2(array: &mut u64, descriptor: &Plain) -> u32;
    safe fn cuArray3DCreate_v2(array: &mut u64, descriptor: &Deep) -> u32;
    safe fn cuArrayGetDescriptor_v2(descriptor: &mut Plain, array: u64) -> u32;
    safe fn cuArray3DGetDescriptor_v2(descriptor: &mut Deep, array: u64) -> u32;
    safe fn cuArrayDestroy(array: u64) -> u32;
    fn cuMemcpyAtoH_v2(to: *mut u32, from: u64, start: usize, size: usize) -> u32;
    fn cuMemcpyHtoA_v2(to: u64, start: usize, from: *const u32, size: usize) -> u32;
    fn cuMemcpyHtoAAsync_v2(
        to: u64,
        start: usize,
        from: *const u32,
        size: usize,
        stream: u64,
    ) -> u32;
    fn cuMemcpyAtoHAsync_v2(to: *mut u32, from: u64, start: usize, size: usize, stream: u64)
    -> u32;
    safe fn cuMemcpyAtoD_v2(to: u64, from: u64, start: usize, size: usize) -> u32;
    safe fn cuMemcpyDtoA_v2(to: u64, start: usize, from: u64, size: usize) -> u32;
    safe fn cuMemcpyAtoA_v2(to: u64, at: usize, from: u64, start: usize, size: usize) -> u32;
    fn cuMemcpy3D_v2(copy: &[u64; 25]) -> u32;
}

/// `CUDA_ARRAY_DESCRIPTOR`.
#[repr(C)]
#[derive(Clone, Copy, PartialEq, Debug, Default)]
struct Plain {
    width: usize,
    height: usize,
    format: u32,
    channels: u32,
}

/// `CUDA_ARRAY3D_DESCRIPTOR`.
#[repr(C)]
#[derive(Clone, Copy, PartialEq, Debug, Default)]
struct Deep {
    width: usize,
    height: usize,
    depth: usize,
    format: u32,
    channels: u32,
    flags: u32,
}

/// `CU_AD_FORMAT_UNSIGNED_INT32`, `_HALF` and `_FLOAT`.
const U32: u32 = 3;
const HALF: u32 = 0x10;
const FLOAT: u32 = 0x20;
/// `CU_MEMORYTYPE_HOST`, `_DEVICE` and `_ARRAY`.
const HOST: u64 = 1;
const DEVICE: u64 = 2;
const ARRAY: u64 = 3;

#[track_caller]
fn array(width: usize, height: usize, format: u32, channels: u32) -> u64 {
    let mut array = 0;
    ok(cuArrayCreate_v2(&mut array, &Plain { width, height, format, channels }));
    array
}

fn bytes(array: u64, count: usize) -> Vec<u32> {
    let mut found = vec![0; count];
    // SAFETY: the destination is the vector itself.
    ok(unsafe { cuMemcpyAtoH_v2(found.as_mut_ptr(), array, 0, 4 * count) });
    found
}

#[test]
fn arrays_describe_themselves() {
    let context = context();
    let mut other = 0;
    let plain = Plain { width: 10, height: 3, format: HALF, channels: 4 };
    ok(cuArrayCreate_v2(&mut other, &plain));
    let (mut found, mut deep) = (Plain::default(), Deep::default());
    ok(cuArrayGetDescriptor_v2(&mut found, other));
    ok(cuArray3DGetDescriptor_v2(&mut deep, other));
    assert_eq!(found, plain);
    let wanted = Deep { width: 10, height: 3, depth: 0, format: HALF, channels: 4, flags: 0 };
    assert_eq!(deep, wanted);
    ok(cuArrayDestroy(other));
    assert_eq!(cuArrayDestroy(other), INVALID_HANDLE);
    assert_eq!(cuArrayGetDescriptor_v2(&mut found, other), INVALID_HANDLE);

    let good = Deep { width: 6, height: 6, depth: 6, format: U32, channels: 1, flags: 0 };
    let refused = [
        (Deep { width: 0, ..good }, INVALID_VALUE),
        (Deep { height: 0, ..good }, INVALID_VALUE),
        (Deep { channels: 3, ..good }, INVALID_VALUE),
        (Deep { format: 7, ..good }, INVALID_VALUE),
        (Deep { flags: 1 << 9, ..good }, INVALID_VALUE),
        (Deep { depth: 0, flags: 1, ..good }, INVALID_VALUE),
        (Deep { depth: 5, flags: 4, ..good }, INVALID_VALUE),
        (Deep { flags: 0x40, ..good }, NOT_SUPPORTED),
        (Deep { format: 0xb0, ..good }, NOT_SUPPORTED),
        (Deep { width: 1 << 40, ..good }, OUT_OF_MEMORY),
        (Deep { width: usize::MAX / 2, ..good }, OUT_OF_MEMORY),
    ];
    for (descriptor, code) in refused {
        assert_eq!(cuArray3DCreate_v2(&mut other, &descriptor), code, "{descriptor:?}");
    }
    for flags in [0, 1, 2, 4, 5] {
        ok(cuArray3DCreate_v2(&mut other, &Deep { flags, ..good }));
    }
    assert_eq!(used(), GRANULE);
    ok(cuCtxDestroy_v2(context));
    ok(cuCtxCreate_v2(&mut 0, 0, 0));
    assert_eq!(cuArrayDestroy(other), INVALID_HANDLE, "gone with its context");
    assert_eq!(used(), 0);
}

#[test]
fn bytes_are_copied() {
    context();
    let (one, two) = (array(64, 0, U32, 1), array(32, 2, FLOAT, 1));
    let memory = allocate(256);
    let mut stream = 0;
    ok(cuStreamCreate(&mut stream, 1));
    let numbers: Vec<u32> = (0..64).collect();
    write(memory, &numbers);
    let mut back = [0; 4];
    // SAFETY: sources and destinations have that many bytes.
    unsafe {
        ok(cuMemcpyHtoA_v2(one, 0, numbers.as_ptr(), 256));
        assert_eq!(cuMemcpyHtoA_v2(one, 4, numbers.as_ptr(), 256), INVALID_VALUE);
        assert_eq!(cuMemcpyHtoA_v2(memory, 0, numbers.as_ptr(), 4), INVALID_VALUE);
        ok(cuMemcpyHtoAAsync_v2(one, 8, numbers[50..].as_ptr(), 8, stream));
        ok(cuMemcpyAtoHAsync_v2(back.as_mut_ptr(), one, 4, 16, stream));
    }
    ok(cuStreamSynchronize(stream));
    assert_eq!(back, [1, 50, 51, 4]);
    ok(cuMemcpyAtoA_v2(two, 128, one, 0, 128));
    ok(cuMemcpyDtoA_v2(two, 0, memory + 128, 128));
    assert_eq!(bytes(two, 36)[30..], [62, 63, 0, 1, 50, 51]);
    ok(cuMemcpyAtoD_v2(memory, two, 120, 16));
    assert_eq!(read(memory, 5), [62, 63, 0, 1, 4]);
    assert_eq!(cuMemcpyAtoD_v2(memory, two, 0, 257), INVALID_VALUE);
    assert_eq!(cuMemcpyAtoA_v2(two, 0, one, usize::MAX, 4), INVALID_VALUE);
}

/// A side of `CUDA_MEMCPY2D`.
fn side([x, y]: [u64; 2], kind: u64, place: u64, pitch: u64) -> [u64; 7] {
    let at = |wanted| if kind == wanted { place } else { 0 };
    [x, y, kind, at(HOST), at(DEVICE), at(ARRAY), pitch]
}

fn copy2d(from: [u64; 7], to: [u64; 7], width: u64, height: u64) -> u32 {
    let all: Vec<u64> = from.into_iter().chain(to).chain([width, height]).collect();
    // SAFETY: the tests describe memory that is there.
    unsafe { cuMemcpy2D_v2(&all.try_into().unwrap()) }
}

#[test]
fn boxes_are_copied() {
    context();
    // Four rows of eight numbers.
    let array = array(8, 4, U32, 1);
    let host: Vec<u32> = (0..32).collect();
    let source = host.as_ptr() as u64;
    ok(copy2d(side([0, 0], HOST, source, 32), side([0, 0], ARRAY, array, 0), 32, 4));
    assert_eq!(bytes(array, 32), host);
    // A box of two by two into the middle, from device memory with a pitch.
    let memory = allocate(64);
    write(memory, &[100, 101, 0, 0, 102, 103]);
    ok(copy2d(side([0, 0], DEVICE, memory, 16), side([8, 1], ARRAY, array, 0), 8, 2));
    assert_eq!(bytes(array, 32)[8..20], [8, 9, 100, 101, 12, 13, 14, 15, 16, 17, 102, 103]);
    ok(copy2d(side([8, 2], ARRAY, array, 0), side([4, 0], DEVICE, memory, 16), 8, 1));
    assert_eq!(read(memory, 3), [100, 102, 103]);
    for (start, width, height) in [([28, 0], 8, 1), ([0, 3], 4, 2), ([0, 4], 4, 1)] {
        let from = side([0, 0], DEVICE, memory, 16);
        assert_eq!(copy2d(from, side(start, ARRAY, array, 0), width, height), INVALID_VALUE);
    }
    let from = side([0, 0], DEVICE, memory, 16);
    assert_eq!(copy2d(from, side([0, 0], ARRAY, 7, 0), 4, 1), INVALID_VALUE);
    assert_eq!(copy2d(from, side([0, 0], 9, 7, 0), 4, 1), INVALID_VALUE);
}

#[test]
fn cubes_are_copied() {
    context();
    let mut cube = 0;
    let descriptor = Deep { width: 2, height: 3, depth: 4, format: U32, channels: 2, flags: 0 };
    ok(cuArray3DCreate_v2(&mut cube, &descriptor));
    let host: Vec<u32> = (0..48).collect();
    // x, y, z, level, kind, host, device, array, context, pitch, height; twice, then the size.
    let mut copy = [0; 25];
    (copy[4], copy[5], copy[9], copy[10]) = (HOST, host.as_ptr() as u64, 16, 3);
    (copy[11 + 4], copy[11 + 7]) = (ARRAY, cube);
    (copy[22], copy[23], copy[24]) = (16, 3, 4);
    // SAFETY: the source has all bytes, and the destination is an array.
    ok(unsafe { cuMemcpy3D_v2(&copy) });
    assert_eq!(bytes(cube, 48), host);
    // From the array: one element of two rows of two planes.
    let mut found = [0u32; 8];
    let mut copy = [0; 25];
    (copy[0], copy[1], copy[2], copy[4], copy[7]) = (8, 1, 2, ARRAY, cube);
    (copy[15], copy[16], copy[20], copy[21]) = (HOST, found.as_mut_ptr() as u64, 8, 2);
    (copy[22], copy[23], copy[24]) = (8, 2, 2);
    // SAFETY: the destination has all bytes.
    ok(unsafe { cuMemcpy3D_v2(&copy) });
    assert_eq!(found, [30, 31, 34, 35, 42, 43, 46, 47]);
    copy[24] = 3;
    // SAFETY: refused.
    assert_eq!(unsafe { cuMemcpy3D_v2(&copy) }, INVALID_VALUE);
}

#[test]
#[ignore = "a program for other tests"]
fn program() {
    context();
    let array = array(8, 2, U32, 1);
    let numbers: Vec<u32> = (5..21).collect();
    // SAFETY: the source has that many bytes.
    ok(unsafe { cuMemcpyHtoA_v2(array, 0, numbers.as_ptr(), 64) });
    say("ready");
    listen();
    assert_eq!(bytes(array, 16), numbers);
    ok(cuArrayDestroy(array));
}

#[test]
fn the_checkpoint_carries_arrays() {
    ok(cuInit(0));
    let mut program = Program::start("program", &[]);
    assert_eq!(program.hear(), "ready");
    program.checkpoint_and_restore();
    program.tell("go on");
    program.finish();
}
