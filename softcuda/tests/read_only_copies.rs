//! Copies, fills and memory operations that would write to read-only memory: each is refused when it is
//! given, and the context goes on.

mod support;

use support::graphs::*;
use support::read_only::*;
use support::*;

/// `CUstreamBatchMemOpParams`.
type Op = [u64; 6];
const WRITE_32: u64 = 2;
const WRITE_64: u64 = 5;

/// `CUDA_BATCH_MEM_OP_NODE_PARAMS`.
#[repr(C)]
struct ValuesNode {
    context: u64,
    count: u32,
    list: *const Op,
    flags: u32,
}

/// `CUmemcpy3DOperand`.
#[repr(C)]
struct Operand(u32, [u64; 4]);

/// `CUDA_MEMCPY3D_BATCH_OP`.
#[repr(C)]
struct BoxCopy {
    from: Operand,
    to: Operand,
    extent: [usize; 3],
    order: u32,
    flags: u32,
}

unsafe extern "C" {
    safe fn cuMemsetD8_v2(to: u64, value: u8, count: usize) -> u32;
    safe fn cuMemsetD16_v2(to: u64, value: u16, count: usize) -> u32;
    safe fn cuMemsetD8Async(to: u64, value: u8, count: usize, stream: u64) -> u32;
    safe fn cuMemsetD16Async(to: u64, value: u16, count: usize, stream: u64) -> u32;
    safe fn cuMemsetD2D8_v2(to: u64, pitch: usize, v: u8, width: usize, height: usize) -> u32;
    safe fn cuMemsetD2D32_v2(to: u64, pitch: usize, v: u32, width: usize, height: usize) -> u32;
    safe fn cuMemsetD2D32Async(
        to: u64,
        pitch: usize,
        v: u32,
        width: usize,
        height: usize,
        stream: u64,
    ) -> u32;
    safe fn cuMemcpy(to: u64, from: u64, size: usize) -> u32;
    safe fn cuMemcpyAsync(to: u64, from: u64, size: usize, stream: u64) -> u32;
    safe fn cuMemcpyDtoD_v2(to: u64, from: u64, size: usize) -> u32;
    safe fn cuMemcpyPeer(to: u64, one: u64, from: u64, other: u64, size: usize) -> u32;
    fn cuMemcpy2DAsync_v2(copy: &[u64; 16], stream: u64) -> u32;
    fn cuMemcpy3D_v2(copy: &[u64; 25]) -> u32;
    fn cuMemcpy3DAsync_v2(copy: &[u64; 25], stream: u64) -> u32;
    fn cuMemcpyBatchAsync_v2(
        to: *const u64,
        from: *const u64,
        sizes: *const usize,
        copies: usize,
        attributes: &[u32; 6],
        starts: *const usize,
        count: usize,
        stream: u64,
    ) -> u32;
    fn cuMemcpy3DBatchAsync_v2(count: usize, list: &BoxCopy, flags: u64, stream: u64) -> u32;
    safe fn cuArrayCreate_v2(array: &mut u64, descriptor: &[u64; 3]) -> u32;
    safe fn cuMemcpyAtoD_v2(to: u64, from: u64, start: usize, size: usize) -> u32;
    safe fn cuMemcpyDtoA_v2(to: u64, start: usize, from: u64, size: usize) -> u32;
    safe fn cuMemcpyAtoH_v2(to: u64, from: u64, start: usize, size: usize) -> u32;
    safe fn cuStreamWriteValue32(stream: u64, address: u64, value: u32, flags: u32) -> u32;
    safe fn cuStreamWriteValue64_v2(stream: u64, address: u64, value: u64, flags: u32) -> u32;
    safe fn cuStreamWaitValue64_v2(stream: u64, address: u64, value: u64, flags: u32) -> u32;
    fn cuStreamBatchMemOp_v2(stream: u64, count: u32, list: *const Op, flags: u32) -> u32;
    fn cuGraphAddBatchMemOpNode(
        node: &mut u64,
        graph: u64,
        after: *const u64,
        count: usize,
        given: &ValuesNode,
    ) -> u32;
}

/// `CUDA_MEMCPY2D` of rows of 8 bytes of device memory. A side is an address and the bytes from row to
/// row.
fn plane((to, to_pitch): (u64, u64), (from, from_pitch): (u64, u64), height: u64) -> [u64; 16] {
    [0, 0, 2, 0, from, 0, from_pitch, 0, 0, 2, 0, to, 0, to_pitch, 8, height]
}

/// `CUDA_MEMCPY3D` of planes of one row of 8 bytes of device memory. A side is an address and the bytes
/// from plane to plane.
fn planes((to, to_plane): (u64, u64), (from, from_plane): (u64, u64), depth: u64) -> [u64; 25] {
    let mut copy = [0; 25];
    (copy[4], copy[6], copy[9], copy[10]) = (2, from, from_plane, 1);
    (copy[15], copy[17], copy[20], copy[21]) = (2, to, to_plane, 1);
    (copy[22], copy[23], copy[24]) = (8, 1, depth);
    copy
}

fn operand(address: u64) -> Operand {
    Operand(1, [address, 0, 0, 0])
}

/// A batch of copies of 8 bytes.
fn batch(to: &[u64], from: u64, stream: u64) -> u32 {
    let (from, sizes) = (vec![from; to.len()], vec![8; to.len()]);
    let (list, from, sizes, order) =
        (to.as_ptr(), from.as_ptr(), sizes.as_ptr(), [1, 0, 0, 0, 0, 0]);
    // SAFETY: the lists are as long as they say.
    unsafe { cuMemcpyBatchAsync_v2(list, from, sizes, to.len(), &order, &0, 1, stream) }
}

/// Every one was refused, and did no harm to the context or the memory.
#[track_caller]
fn are_refused(codes: &[(&str, u32)], memory: &Memory) {
    for (name, code) in codes {
        assert_eq!(*code, INVALID_VALUE, "{name}");
    }
    ok(cuCtxSynchronize());
    assert_eq!(read(memory.alias, WORDS), [FILLING; WORDS]);
    assert_eq!(read(memory.before, WORDS), [0; WORDS]);
    assert_eq!(read(memory.beside, WORDS), [0; WORDS]);
}

#[test]
fn fills_are_refused() {
    let context = context();
    let memory = memory();
    let (to, one) = (memory.read_only, stream());
    let (end, step) = (memory.beside - 4, GRANULE);
    let codes = [
        ("8 bits", cuMemsetD8_v2(to, 1, 1)),
        ("16 bits", cuMemsetD16_v2(to + 2, 1, 1)),
        ("32 bits", cuMemsetD32_v2(to, 1, 1)),
        ("8 bits later", cuMemsetD8Async(to, 1, 1, one)),
        ("16 bits later", cuMemsetD16Async(to, 1, 1, one)),
        ("32 bits later", cuMemsetD32Async(to, 1, 1, one)),
        ("per thread", cuMemsetD32Async_ptsz(to, 1, 1, 0)),
        ("rows of bytes", cuMemsetD2D8_v2(to, 16, 1, 8, 4)),
        ("rows", cuMemsetD2D32_v2(to, 16, 1, 2, 4)),
        ("rows later", cuMemsetD2D32Async(to, 16, 1, 2, 4, one)),
        ("its last word", cuMemsetD32_v2(end, 1, 1)),
        ("its last word and the next", cuMemsetD32_v2(end, 1, 2)),
        ("the word before and its first", cuMemsetD32_v2(to - 4, 1, 2)),
        ("it and what is around", cuMemsetD32_v2(memory.before, 1, 3 * WORDS)),
        ("its row in the middle", cuMemsetD2D32_v2(memory.before, step, 1, 2, 3)),
    ];
    are_refused(&codes, &memory);
    // Rows around it.
    ok(cuMemsetD2D32_v2(memory.before, 2 * step, 1, 2, 2));
    ok(cuMemsetD32Async(memory.beside + 8, 2, 1, one));
    ok(cuCtxSynchronize());
    assert_eq!((read(memory.before, 3), read(memory.beside, 4)), (vec![1, 1, 0], vec![1, 1, 2, 0]));
    ok(cuCtxDestroy_v2(context));
}

#[test]
fn copies_are_refused() {
    let context = context();
    let memory = memory();
    let (to, one, from) = (memory.read_only, stream(), allocate(64));
    ok(cuMemsetD32_v2(from, 7, 16));
    let (step, source) = (GRANULE as u64, [1_u32, 2]);
    let (mut array, mut pinned) = (0, 0);
    ok(cuArrayCreate_v2(&mut array, &[8, 0, 3 | 1 << 32]));
    ok(cuMemcpyDtoA_v2(array, 0, from, 32));
    ok(cuMemHostAlloc(&mut pinned, 8, 0));
    let host = source.as_ptr().cast();
    let box_copy =
        BoxCopy { from: operand(from), to: operand(to), extent: [8, 1, 1], order: 1, flags: 0 };
    let (flat, deep) = (plane((to, 16), (from, 16), 2), planes((to, 16), (from, 16), 2));
    let flat_around = plane((memory.before, step), (from, 16), 3);
    let deep_around = planes((memory.before, step), (from, 16), 3);
    // SAFETY: sources have that many bytes; structures are as the functions want them.
    let described = unsafe {
        [
            ("from the host", cuMemcpyHtoD_v2(to, host, 8)),
            ("from the host later", cuMemcpyHtoDAsync_v2(to, host, 8, one)),
            ("from the host across the end", cuMemcpyHtoD_v2(memory.beside - 4, host, 8)),
            ("as if to the host", cuMemcpyDtoH_v2(to as *mut u8, from, 8)),
            ("as if to the host later", cuMemcpyDtoHAsync_v2(to as *mut u8, from, 8, one)),
            ("rows", cuMemcpy2D_v2(&flat)),
            ("rows later", cuMemcpy2DAsync_v2(&flat, one)),
            ("its row in the middle", cuMemcpy2D_v2(&flat_around)),
            ("planes", cuMemcpy3D_v2(&deep)),
            ("planes later", cuMemcpy3DAsync_v2(&deep, one)),
            ("its plane in the middle", cuMemcpy3D_v2(&deep_around)),
            ("a batch of boxes", cuMemcpy3DBatchAsync_v2(1, &box_copy, 0, one)),
        ]
    };
    are_refused(&described, &memory);
    let around = 3 * GRANULE;
    let codes = [
        ("any", cuMemcpy(to, from, 8)),
        ("any from pinned memory", cuMemcpy(to, pinned, 8)),
        ("any later", cuMemcpyAsync(to, from, 8, one)),
        ("in the device", cuMemcpyDtoD_v2(to, from, 8)),
        ("in the device later", cuMemcpyDtoDAsync_v2(to, from, 8, one)),
        ("it and what is around", cuMemcpyDtoD_v2(memory.before, map_new(around).1, around)),
        ("within itself", cuMemcpyDtoD_v2(to, to + 64, 8)),
        ("between contexts", cuMemcpyPeer(to, context, from, context, 8)),
        ("from an array", cuMemcpyAtoD_v2(to, array, 0, 8)),
        ("from an array as if to the host", cuMemcpyAtoH_v2(to, array, 0, 8)),
        ("a batch", batch(&[to], from, one)),
        ("the last of a batch", batch(&[memory.before, memory.beside, to], from, one)),
    ];
    are_refused(&codes, &memory);
    // Around it, and from it.
    let flat_beside = plane((memory.before, 2 * step), (to, 16), 2);
    let deep_beside = planes((memory.before + 8, 2 * step), (from, 16), 2);
    // SAFETY: all of it is memory of this test.
    unsafe {
        ok(cuMemcpy2D_v2(&flat_beside));
        ok(cuMemcpy3DAsync_v2(&deep_beside, one));
    }
    ok(batch(&[memory.before + 16, memory.beside + 16], to, one));
    ok(cuMemcpyDtoA_v2(array, 0, to, 8));
    ok(cuCtxSynchronize());
    for place in [memory.before, memory.beside] {
        assert_eq!(read(place, 7), [FILLING, FILLING, 7, 7, FILLING, FILLING, 0]);
    }
    ok(cuCtxDestroy_v2(context));
}

#[test]
fn values_are_waited_for_and_not_written() {
    let context = context();
    let memory = memory();
    let (to, one) = (memory.read_only, stream());
    let list = |kind| [[WRITE_32, memory.before, 1, 0, 0, 0], [kind, to, 1, 0, 0, 0]];
    // SAFETY: the lists are as long as they say.
    let batch = |kind| unsafe { cuStreamBatchMemOp_v2(one, 2, list(kind).as_ptr(), 0) };
    let codes = [
        ("32 bits", cuStreamWriteValue32_v2(one, to, 1, 0)),
        ("64 bits", cuStreamWriteValue64_v2(one, to + 8, 1, 0)),
        ("first version", cuStreamWriteValue32(one, memory.beside - 4, 1, 0)),
        ("second of a batch", batch(WRITE_32)),
        ("second of a batch, 64 bits", batch(WRITE_64)),
    ];
    are_refused(&codes, &memory);
    let both = u64::from(FILLING) << 32 | u64::from(FILLING);
    ok(cuStreamWaitValue32_v2(one, to, FILLING, 1));
    ok(cuStreamWaitValue64_v2(one, to, both, 1));
    ok(cuStreamWriteValue32_v2(one, memory.beside, 3, 0));
    ok(cuStreamSynchronize(one));
    assert_eq!(read(memory.beside, 1), [3]);
    // One that has to wait sees what is written at the other address.
    ok(cuStreamWaitValue32_v2(one, to + 4, 9, 1));
    ok(cuStreamWriteValue32_v2(one, memory.beside, 4, 0));
    write(memory.alias + 4, &[9]);
    ok(cuStreamSynchronize(one));
    assert_eq!(read(memory.beside, 1), [4]);
    ok(cuCtxDestroy_v2(context));
}

/// A graph of one piece of work that writes to an address: a fill, a copy or a value.
fn graph_of(kind: usize, to: u64, from: u64, context: u64) -> Result<u64, u32> {
    let (mut graph, mut node, none) = (0, 0, std::ptr::null());
    ok(cuGraphCreate(&mut graph, 0));
    let fill = Fill { to, pitch: 0, value: 1, size: 4, width: 1, height: 1 };
    let operation = [WRITE_32, to, 1, 0, 0, 0];
    let values = ValuesNode { context, count: 1, list: &operation, flags: 0 };
    let copy = planes((to, 16), (from, 16), 1);
    // SAFETY: structures and lists are as the functions want them.
    let code = unsafe {
        match kind {
            0 => cuGraphAddMemsetNode(&mut node, graph, none, 0, &fill, context),
            1 => cuGraphAddMemcpyNode(&mut node, graph, none, 0, &copy, context),
            _ => cuGraphAddBatchMemOpNode(&mut node, graph, none, 0, &values),
        }
    };
    if code == 0 { Ok(graph) } else { Err(code) }
}

#[test]
fn graphs_do_not_write_to_it() {
    let outer = context();
    let memory = memory();
    for kind in 0..3 {
        let context = context();
        let from = allocate(16);
        assert_eq!(graph_of(kind, memory.read_only, from, context), Err(INVALID_VALUE), "{kind}");
        are_refused(&[], &memory);
        // What was made when it was writable fails the context once it is not.
        set_access(memory.read_only, &READ_WRITE);
        let exec = instantiate(graph_of(kind, memory.read_only, from, context).unwrap());
        ok(cuGraphLaunch(exec, 0));
        ok(cuCtxSynchronize());
        ok(cuMemsetD32_v2(memory.alias, FILLING, WORDS));
        set_access(memory.read_only, &READ);
        ok(cuGraphLaunch(exec, 0));
        assert_eq!(cuCtxSynchronize(), ILLEGAL_ADDRESS, "{kind}");
        ok(cuCtxDestroy_v2(context));
        ok(cuCtxSetCurrent(outer));
        are_refused(&[], &memory);
    }
}
