//! Batches of copies: of lines and of boxes, their attributes, orders and refusals.

mod support;

use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use support::graphs::*;
use support::*;

unsafe extern "C" {
    fn cuMemcpyBatchAsync(
        to: *const u64,
        from: *const u64,
        sizes: *const usize,
        copies: usize,
        attributes: *const Attributes,
        starts: *const usize,
        count: usize,
        failed: *mut usize,
        stream: u64,
    ) -> u32;
    fn cuMemcpyBatchAsync_v2(
        to: *const u64,
        from: *const u64,
        sizes: *const usize,
        copies: usize,
        attributes: *const Attributes,
        starts: *const usize,
        count: usize,
        stream: u64,
    ) -> u32;
    fn cuMemcpyBatchAsync_v2_ptsz(
        to: *const u64,
        from: *const u64,
        sizes: *const usize,
        copies: usize,
        attributes: *const Attributes,
        starts: *const usize,
        count: usize,
        stream: u64,
    ) -> u32;
    fn cuMemcpy3DBatchAsync(
        count: usize,
        list: *const BoxCopy,
        failed: *mut usize,
        flags: u64,
        stream: u64,
    ) -> u32;
    fn cuMemcpy3DBatchAsync_v2(count: usize, list: *const BoxCopy, flags: u64, stream: u64) -> u32;
    fn cuMemcpy3DBatchAsync_v2_ptsz(
        count: usize,
        list: *const BoxCopy,
        flags: u64,
        stream: u64,
    ) -> u32;
    safe fn cuArray3DCreate_v2(array: &mut u64, descriptor: &[u64; 5]) -> u32;
    safe fn cuMemAllocManaged(address: &mut u64, size: usize, flags: u32) -> u32;
}

/// `CUmemcpyAttributes`: the locations are a kind and a number each.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
struct Attributes {
    order: u32,
    from: [u32; 2],
    to: [u32; 2],
    flags: u32,
}

/// `CUmemcpy3DOperand`.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
struct Operand {
    kind: u32,
    words: [u64; 4],
}

/// `CUDA_MEMCPY3D_BATCH_OP`.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
struct BoxCopy {
    from: Operand,
    to: Operand,
    extent: [usize; 3],
    order: u32,
    flags: u32,
}

/// `CU_MEMCPY_SRC_ACCESS_ORDER_*`.
const STREAM: u32 = 1;
const DURING_CALL: u32 = 2;
const ANY: u32 = 3;
/// What says that no copy is at fault.
const NONE: usize = usize::MAX;
const PER_THREAD: u64 = 2;

const PLAIN: Attributes = Attributes { order: STREAM, from: [0; 2], to: [0; 2], flags: 0 };

/// Destination, source and size.
type Line = (u64, u64, usize);

/// A batch by the first version: the code, and which copy it names.
fn lines(list: &[Line], attributes: &[Attributes], starts: &[usize], stream: u64) -> (u32, usize) {
    let to: Vec<u64> = list.iter().map(|line| line.0).collect();
    let from: Vec<u64> = list.iter().map(|line| line.1).collect();
    let sizes: Vec<usize> = list.iter().map(|line| line.2).collect();
    let (to, from, sizes) = (to.as_ptr(), from.as_ptr(), sizes.as_ptr());
    let (given, count) = (attributes.as_ptr(), starts.len());
    let mut failed = 77;
    // SAFETY: the lists are as long as they say; what the copies name is there or refused.
    let code = unsafe {
        let starts = starts.as_ptr();
        cuMemcpyBatchAsync(to, from, sizes, list.len(), given, starts, count, &mut failed, stream)
    };
    (code, failed)
}

/// A batch by the second version, with the same attributes for all copies.
fn alike(list: &[Line], attributes: Attributes, stream: u64) -> u32 {
    let to: Vec<u64> = list.iter().map(|line| line.0).collect();
    let from: Vec<u64> = list.iter().map(|line| line.1).collect();
    let sizes: Vec<usize> = list.iter().map(|line| line.2).collect();
    let (to, from, sizes) = (to.as_ptr(), from.as_ptr(), sizes.as_ptr());
    // SAFETY: as for `lines`.
    unsafe { cuMemcpyBatchAsync_v2(to, from, sizes, list.len(), &attributes, &0, 1, stream) }
}

/// A batch of boxes by the first version.
fn boxes(list: &[BoxCopy], flags: u64, stream: u64) -> (u32, usize) {
    let mut failed = 77;
    // SAFETY: the list is as long as it says; what the copies name is there or refused.
    let code =
        unsafe { cuMemcpy3DBatchAsync(list.len(), list.as_ptr(), &mut failed, flags, stream) };
    (code, failed)
}

fn pointer(address: u64, row: u64, layer: u64) -> Operand {
    Operand { kind: 1, words: [address, row, layer, 0] }
}

fn array(array: u64, [x, y, z]: [u64; 3]) -> Operand {
    Operand { kind: 2, words: [array, x, y, z] }
}

fn dense(address: u64) -> Operand {
    pointer(address, 0, 0)
}

fn pinned(size: usize) -> u64 {
    let mut address = 0;
    ok(cuMemHostAlloc(&mut address, size, 0));
    address
}

fn set(address: u64, value: u32) {
    // SAFETY: the tests pass addresses of words of theirs.
    unsafe { (address as *mut u32).write_volatile(value) };
}

#[test]
fn copies_of_all_directions_in_one_batch() {
    let context = context();
    let (one, data) = (stream(), allocate(4096));
    let mut managed = 0;
    ok(cuMemAllocManaged(&mut managed, 4096, 1));
    let host = pinned(4096);
    set(host, 1);
    set(host + 4, 2);
    set(managed, 3);
    write(data, &[4, 5, 6, 7, 0, 0, 0, 0]);
    let source = [8u32, 9];
    let mut back = [0u32; 2];
    let list = [
        (data + 16, host, 8),                    // pinned to device
        (host + 8, data, 4),                     // device to pinned
        (data + 24, data + 4, 4),                // within the device
        (data + 28, managed, 4),                 // managed to device
        (data + 32, source.as_ptr() as u64, 8),  // plain host memory to device
        (back.as_mut_ptr() as u64, data + 8, 8), // and back
    ];
    let hinted = Attributes { order: ANY, from: [1, 0], to: [2, 9], flags: 1 };
    let attributes = [PLAIN, hinted, Attributes { order: DURING_CALL, ..PLAIN }];
    assert_eq!(lines(&list, &attributes, &[0, 3, 4], one), (0, NONE));
    ok(cuStreamSynchronize(one));
    assert_eq!(read(data, 10), [4, 5, 6, 7, 1, 2, 5, 3, 8, 9]);
    assert_eq!(back, [6, 7]);
    // SAFETY: pinned memory of this test.
    assert_eq!(unsafe { ((host + 8) as *const u32).read() }, 4);

    // In order with what is before and after in the stream.
    ok(cuMemsetD32Async(data, 70, 1, one));
    ok(alike(&[(data + 4, data, 4)], PLAIN, one));
    ok(cuMemsetD32Async(data, 71, 1, one));
    ok(alike(&[(data + 8, data, 4)], PLAIN, one));
    ok(cuStreamSynchronize(one));
    assert_eq!(read(data, 3), [71, 70, 71]);
    ok(cuCtxDestroy_v2(context));
}

#[test]
fn attributes_and_lines_that_are_refused() {
    let context = context();
    let (one, data, gone) = (stream(), allocate(64), allocate(3 * GRANULE));
    ok(cuMemFree_v2(gone));
    write(data, &[1, 2, 3, 4, 5, 6, 7, 8]);
    let good = [(data + 32, data, 4), (data + 36, data + 4, 4)];
    let refused = |attributes: &[Attributes], starts: &[usize]| {
        assert_eq!(lines(&good, attributes, starts, one), (INVALID_VALUE, NONE), "{starts:?}");
    };
    refused(&[], &[]);
    refused(&[PLAIN; 2], &[1, 2]);
    refused(&[PLAIN], &[1]);
    refused(&[PLAIN; 2], &[0, 0]);
    refused(&[PLAIN; 2], &[0, 2]);
    refused(&[PLAIN; 2], &[0, 3]);
    refused(&[PLAIN; 3], &[0, 1, 1]);
    refused(&[PLAIN; 3], &[0, 1, 2]);
    let bad = [
        Attributes { order: 0, ..PLAIN },
        Attributes { order: 4, ..PLAIN },
        Attributes { flags: 2, ..PLAIN },
        Attributes { from: [9, 0], ..PLAIN },
        Attributes { to: [9, 0], ..PLAIN },
        Attributes { from: [1, 99], ..PLAIN },
    ];
    for other in bad {
        refused(&[other], &[0]);
        refused(&[PLAIN, other], &[0, 1]);
        assert_eq!(alike(&good, other, one), INVALID_VALUE);
    }
    // No copies are no batch.
    assert_eq!(lines(&[], &[PLAIN], &[0], one), (INVALID_VALUE, NONE));
    assert_eq!(lines(&[], &[], &[], one), (INVALID_VALUE, NONE));
    assert_eq!(alike(&[], PLAIN, one), INVALID_VALUE);
    let bad = [
        (data + 36, data, 0),
        (0, data, 4),
        (data + 36, 0, 4),
        (gone, data, 4),
        (data + 36, gone, 4),
        (data + 36, data, usize::MAX),
    ];
    for line in bad {
        let [first, last] = good;
        assert_eq!(lines(&[line, last], &[PLAIN], &[0], one), (INVALID_VALUE, 0), "{line:x?}");
        assert_eq!(lines(&[first, last, line], &[PLAIN], &[0], one), (INVALID_VALUE, 2));
        assert_eq!(alike(&[first, line], PLAIN, one), INVALID_VALUE);
    }
    let (to, from, sizes) = ([data + 32], [data], [4]);
    // SAFETY: lists of one, or none, which is refused.
    unsafe {
        let (to, from, sizes) = (to.as_ptr(), from.as_ptr(), sizes.as_ptr());
        let (none, nobody) = (std::ptr::null(), std::ptr::null_mut());
        let bad = Attributes { order: 0, ..PLAIN };
        let code = cuMemcpyBatchAsync(to, from, sizes, 1, &bad, &0, 1, nobody, one);
        assert_eq!(code, INVALID_VALUE, "nobody asks which");
        let call = |to, from, sizes, starts| {
            cuMemcpyBatchAsync_v2(to, from, sizes, 1, &PLAIN, starts, 1, one)
        };
        assert_eq!(call(none, from, sizes, &0), INVALID_VALUE);
        assert_eq!(call(to, none, sizes, &0), INVALID_VALUE);
        assert_eq!(call(to, from, std::ptr::null(), &0), INVALID_VALUE);
        assert_eq!(call(to, from, sizes, std::ptr::null()), INVALID_VALUE);
        let without = std::ptr::null();
        assert_eq!(cuMemcpyBatchAsync_v2(to, from, sizes, 1, without, &0, 1, one), INVALID_VALUE);
    }
    ok(cuStreamSynchronize(one));
    assert_eq!(read(data, 10)[8..], [0, 0], "nothing of all this was copied");
    ok(cuCtxDestroy_v2(context));
}

#[test]
fn which_streams_take_batches() {
    let _alone = alone();
    let context = context();
    let (one, data) = (stream(), allocate(64));
    write(data, &[1, 2, 3, 4]);
    let line = [(data + 32, data, 4)];
    let boxed = BoxCopy {
        from: dense(data + 4),
        to: dense(data + 36),
        extent: [4, 1, 1],
        order: STREAM,
        flags: 0,
    };
    // The legacy default stream does not, by either of its names.
    for legacy in [0, 1] {
        assert_eq!(lines(&line, &[PLAIN], &[0], legacy), (INVALID_VALUE, NONE));
        assert_eq!(alike(&line, PLAIN, legacy), INVALID_VALUE);
        assert_eq!(boxes(&[boxed], 0, legacy), (INVALID_VALUE, NONE));
    }
    assert_eq!(alike(&line, PLAIN, 99), INVALID_HANDLE);
    // Nor one that captures, whose capture goes on.
    ok(cuStreamBeginCapture_v2(one, 0));
    assert_eq!(lines(&line, &[PLAIN], &[0], one), (UNSUPPORTED, NONE));
    assert_eq!(boxes(&[boxed], 0, one), (UNSUPPORTED, NONE));
    assert_eq!(status(one), 1);
    ok(cuMemsetD32Async(data + 60, 1, 1, one));
    assert_eq!(kinds(end(one)), [2]);
    assert_eq!(read(data, 10)[8..], [0, 0]);
    // The default stream of the thread does.
    ok(alike(&line, PLAIN, PER_THREAD));
    // SAFETY: a list of one.
    ok(unsafe { cuMemcpy3DBatchAsync_v2_ptsz(1, &boxed, 0, 0) });
    ok(cuCtxSynchronize());
    assert_eq!(read(data, 10)[8..], [1, 2]);
    let (to, from, sizes) = (data + 40, data + 8, 4);
    // SAFETY: lists of one.
    unsafe {
        ok(cuMemcpyBatchAsync_v2_ptsz(&to, &from, &sizes, 1, &PLAIN, &0, 1, 0));
        assert_eq!(cuMemcpyBatchAsync_v2_ptsz(&to, &from, &sizes, 1, &PLAIN, &0, 1, 1), 1);
    }
    ok(cuCtxSynchronize());
    assert_eq!(read(data, 11)[8..], [1, 2, 3]);
    ok(cuCtxDestroy_v2(context));
}

/// Copies a word in a stream that is held up, and changes the source when the call is over. Whether
/// the call waited for the stream, and what was copied: 7 from before, 9 from after the call.
fn held_up(source: u64, order: u32) -> (bool, u32) {
    let (one, gate, data) = (stream(), pinned(4), allocate(4));
    set(source, 7);
    set(gate, 0);
    ok(cuStreamWaitValue32_v2(one, gate, 1, 1));
    let open = AtomicBool::new(false);
    let waited = std::thread::scope(|scope| {
        scope.spawn(|| {
            std::thread::sleep(Duration::from_millis(100));
            open.store(true, Ordering::SeqCst);
            set(gate, 1);
        });
        ok(alike(&[(data, source, 4)], Attributes { order, ..PLAIN }, one));
        let waited = open.load(Ordering::SeqCst);
        set(source, 9);
        waited
    });
    ok(cuStreamSynchronize(one));
    (waited, read(data, 1)[0])
}

#[test]
fn orders_say_when_sources_are_read() {
    let context = context();
    let mut plain = vec![0u32; 1];
    let (plain, pinned) = (plain.as_mut_ptr() as u64, pinned(4));
    // In the order of the stream: what the program may change at once makes the call wait.
    assert_eq!(held_up(plain, STREAM), (true, 7));
    assert_eq!(held_up(pinned, STREAM), (false, 9));
    // During the call: nothing after it counts. Plain memory is read at once.
    assert_eq!(held_up(plain, DURING_CALL), (false, 7));
    assert_eq!(held_up(pinned, DURING_CALL), (true, 7));
    // At any time: the call never waits.
    assert!(!held_up(plain, ANY).0);
    assert!(!held_up(pinned, ANY).0);

    // What is too large to be kept is read during the call, or at any time.
    let large = vec![3u32; 1 << 16];
    let (one, data) = (stream(), allocate(4 << 16));
    for order in [STREAM, DURING_CALL, ANY] {
        ok(cuMemsetD32_v2(data, 0, 1 << 16));
        let attributes = Attributes { order, ..PLAIN };
        ok(alike(&[(data, large.as_ptr() as u64, 4 << 16)], attributes, one));
        ok(cuStreamSynchronize(one));
        assert_eq!(read(data, 1 << 16), large);
    }
    ok(cuCtxDestroy_v2(context));
}

#[test]
fn a_batch_is_not_done_in_a_context_that_has_failed() {
    let context = context();
    let (one, data, gate) = (stream(), allocate(8), allocate(4));
    let (_, mapped) = map_new(3 * GRANULE);
    write(data, &[1, 2]);
    write(gate, &[0]);
    // A range whose ends are there and whose middle is not fails where it is copied.
    let mut hole = 0;
    ok(cuMemAddressReserve(&mut hole, 3 * GRANULE, 0, 0, 0));
    let (mut handle, properties) = (0, SHAREABLE);
    ok(cuMemCreate(&mut handle, GRANULE, &properties, 0));
    for part in [0, 2] {
        let at = hole + part * GRANULE as u64;
        ok(cuMemMap(at, GRANULE, 0, handle, 0));
        ok(cuMemSetAccess(at, GRANULE, &READ_WRITE, 1));
    }
    let host = pinned(4);
    set(host, 5);
    let list = [(mapped, hole, 3 * GRANULE), (host, data, 4)];
    ok(alike(&list, PLAIN, one));
    assert_eq!(cuStreamSynchronize(one), ILLEGAL_ADDRESS);
    // SAFETY: pinned memory of this test.
    assert_eq!(unsafe { (host as *const u32).read() }, 5, "the copy after it is not made");
    assert_eq!(alike(&list, PLAIN, one), ILLEGAL_ADDRESS);
    ok(cuCtxDestroy_v2(context));
}

#[test]
fn boxes_have_pitches_and_layers() {
    let context = context();
    let (one, data) = (stream(), allocate(4096));
    let words: Vec<u32> = (0..512).collect();
    ok(cuMemsetD32_v2(data, 0, 1024));
    write(data, &words);
    // Of pointers alone the elements are bytes. Two layers of two rows of 8 bytes: from rows of 32
    // bytes and layers of 3 rows, into rows of 16 bytes, whose layers are dense; and all dense.
    let list = [
        BoxCopy {
            from: pointer(data + 4, 32, 3),
            to: pointer(data + 2048, 16, 0),
            extent: [8, 2, 2],
            order: STREAM,
            flags: 1,
        },
        BoxCopy {
            from: pointer(data, 16, 2),
            to: dense(data + 3072),
            extent: [4, 2, 2],
            order: DURING_CALL,
            flags: 0,
        },
    ];
    assert_eq!(boxes(&list, 0, one), (0, NONE));
    ok(cuStreamSynchronize(one));
    let found = read(data + 2048, 16);
    assert_eq!(found, [1, 2, 0, 0, 9, 10, 0, 0, 25, 26, 0, 0, 33, 34, 0, 0]);
    assert_eq!(read(data + 3072, 5), [0, 4, 8, 12, 0]);
    // To the host, which is there when the call is over.
    let mut host = vec![0u32; 8];
    let to_host = BoxCopy {
        from: pointer(data + 4, 32, 3),
        to: dense(host.as_mut_ptr() as u64),
        extent: [8, 2, 2],
        order: STREAM,
        flags: 0,
    };
    // SAFETY: a list of one.
    ok(unsafe { cuMemcpy3DBatchAsync_v2(1, &to_host, 0, one) });
    assert_eq!(host, [1, 2, 9, 10, 25, 26, 33, 34]);
    ok(cuCtxDestroy_v2(context));
}

#[test]
fn boxes_of_arrays_are_counted_in_their_elements() {
    let context = context();
    let (one, data) = (stream(), allocate(4096));
    ok(cuMemsetD32_v2(data, 0, 1024));
    write(data, &(0..64).collect::<Vec<u32>>());
    let make = |channels: u64| {
        let mut array = 0;
        // 16 elements, 4 rows, 2 planes; 32-bit numbers.
        ok(cuArray3DCreate_v2(&mut array, &[16, 4, 2, 3 | channels << 32, 0]));
        array
    };
    let (wide, other, narrow) = (make(2), make(2), make(1));
    let copy = |from, to, extent| BoxCopy { from, to, extent, order: STREAM, flags: 0 };
    // Two elements of 8 bytes in each of two rows, from rows of three; through two arrays.
    let steps = [
        copy(pointer(data, 3, 0), array(wide, [14, 2, 1]), [2, 2, 1]),
        copy(array(wide, [14, 2, 1]), array(other, [1, 0, 0]), [2, 2, 1]),
        copy(array(other, [1, 0, 0]), pointer(data + 2048, 2, 0), [2, 2, 1]),
    ];
    for step in steps {
        assert_eq!(boxes(&[step], 0, one), (0, NONE), "{step:?}");
    }
    ok(cuStreamSynchronize(one));
    assert_eq!(read(data + 2048, 9), [0, 1, 2, 3, 6, 7, 8, 9, 0]);

    let good = copy(dense(data), dense(data + 3000), [4, 1, 1]);
    let dense = dense(data);
    let refused = [
        BoxCopy { extent: [0, 1, 1], ..good },
        BoxCopy { extent: [1, 0, 1], ..good },
        BoxCopy { extent: [1, 1, 0], ..good },
        BoxCopy { order: 0, ..good },
        BoxCopy { order: 4, ..good },
        BoxCopy { flags: 2, ..good },
        BoxCopy { from: Operand { kind: 0, ..dense }, ..good },
        BoxCopy { to: Operand { kind: 3, ..dense }, ..good },
        BoxCopy { from: pointer(0, 0, 0), ..good },
        BoxCopy { from: pointer(data, 3, 0), ..good },
        BoxCopy { extent: [4, 2, 1], to: pointer(data, 4, 1), ..good },
        BoxCopy { extent: [usize::MAX / 2, 2, 2], ..good },
        copy(dense, array(wide, [13, 0, 0]), [4, 1, 1]),
        copy(dense, array(wide, [0, 3, 0]), [4, 2, 1]),
        copy(dense, array(wide, [0, 0, 1]), [4, 1, 2]),
        copy(dense, array(0, [0; 3]), [1, 1, 1]),
        copy(pointer(data, 3, 0), array(wide, [0; 3]), [4, 2, 1]),
        copy(array(wide, [0; 3]), array(narrow, [0; 3]), [4, 1, 1]),
        copy(array(wide, [usize::MAX as u64 / 8, 0, 0]), dense, [4, 1, 1]),
    ];
    for other in refused {
        assert_eq!(boxes(&[good, other], 0, one), (INVALID_VALUE, 1), "{other:x?}");
        // SAFETY: a list of one.
        assert_eq!(unsafe { cuMemcpy3DBatchAsync_v2(1, &other, 0, one) }, INVALID_VALUE);
    }
    assert_eq!(boxes(&[good], 1, one), (INVALID_VALUE, NONE), "flags");
    assert_eq!(boxes(&[], 0, one), (INVALID_VALUE, NONE), "no copies");
    // SAFETY: no list is refused.
    assert_eq!(unsafe { cuMemcpy3DBatchAsync_v2(1, std::ptr::null(), 0, one) }, INVALID_VALUE);
    ok(cuStreamSynchronize(one));
    assert_eq!(read(data + 3000, 1), [0], "nothing of all this was copied");
    ok(cuCtxDestroy_v2(context));
}
