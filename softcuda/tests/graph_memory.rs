//! Graphs that allocate and free memory.

mod support;

use support::graphs::*;
use support::*;

unsafe extern "C" {
    safe fn cuMemAllocAsync(address: &mut u64, size: usize, stream: u64) -> u32;
    safe fn cuMemFreeAsync(address: u64, stream: u64) -> u32;
    fn cuGraphAddMemAllocNode(
        node: &mut u64,
        graph: u64,
        after: *const u64,
        count: usize,
        parameters: &mut Allocation,
    ) -> u32;
    fn cuGraphAddMemFreeNode(
        node: &mut u64,
        graph: u64,
        after: *const u64,
        count: usize,
        address: u64,
    ) -> u32;
    safe fn cuGraphMemAllocNodeGetParams(node: u64, parameters: &mut Allocation) -> u32;
    safe fn cuGraphMemFreeNodeGetParams(node: u64, address: &mut u64) -> u32;
    fn cuGraphAddNode(
        node: &mut u64,
        graph: u64,
        after: *const u64,
        count: usize,
        parameters: *mut [u64; 32],
    ) -> u32;
    fn cuGraphRemoveDependencies(graph: u64, from: *const u64, to: *const u64, count: usize)
    -> u32;
    safe fn cuDeviceGraphMemTrim(device: i32) -> u32;
    safe fn cuDeviceGetGraphMemAttribute(device: i32, number: u32, value: &mut u64) -> u32;
    safe fn cuDeviceSetGraphMemAttribute(device: i32, number: u32, value: &u64) -> u32;
    fn cuPointerGetAttribute(out: *mut u64, attribute: u32, address: u64) -> u32;
}

/// `CUDA_MEM_ALLOC_NODE_PARAMS` with no description of accesses.
#[repr(C)]
#[derive(Clone, Copy, PartialEq, Debug)]
struct Allocation {
    /// Pinned memory; handle types.
    kind: [u32; 2],
    /// Device 0.
    location: [i32; 2],
    rest: [u64; 9],
    access: u64,
    access_count: usize,
    size: usize,
    address: u64,
}

const PLAIN: Allocation = Allocation {
    kind: [1, 0],
    location: [1, 0],
    rest: [0; 9],
    access: 0,
    access_count: 0,
    size: 4096,
    address: 0,
};

/// Used now and at most, reserved now and at most.
fn amounts() -> [u64; 4] {
    [0, 1, 2, 3].map(|number| {
        let mut value = 99;
        ok(cuDeviceGetGraphMemAttribute(0, number, &mut value));
        value
    })
}

fn add_free(graph: u64, after: &[u64], address: u64) -> (u32, u64) {
    let mut node = 0;
    // SAFETY: the dependencies are the slice itself.
    let code =
        unsafe { cuGraphAddMemFreeNode(&mut node, graph, after.as_ptr(), after.len(), address) };
    (code, node)
}

#[test]
fn captured_allocations_become_nodes() {
    let _alone = alone();
    let context = context();
    let (add, _) = functions();
    let stream = stream();
    let result = allocate(4);
    let mut inner = 0;
    ok(cuStreamBeginCapture_v2(stream, 0));
    ok(cuMemAllocAsync(&mut inner, 1000, stream));
    ok(cuMemsetD32Async(inner, 5, 250, stream));
    ok(launch(add, inner + 8, 10, stream));
    ok(cuMemcpyDtoDAsync_v2(result, inner + 8, 4, stream));
    ok(cuMemFreeAsync(inner, stream));
    let graph = end(stream);
    assert_eq!(kinds(graph), [10, 2, 0, 1, 11]);
    assert_eq!(used(), GRANULE, "memory comes with the first launch");

    let exec = instantiate(graph);
    let mut other = 0;
    assert_eq!(cuGraphInstantiateWithFlags(&mut other, graph, 0), NOT_SUPPORTED);
    for _ in 0..3 {
        write(result, &[0]);
        ok(cuGraphLaunch(exec, stream));
        ok(cuStreamSynchronize(stream));
        assert_eq!(read(result, 1), [15]);
    }
    let whole = GRANULE as u64;
    assert_eq!(amounts(), [0, 1000, whole, whole]);
    assert_eq!(used(), 2 * GRANULE);
    ok(cuDeviceGraphMemTrim(0));
    assert_eq!((amounts()[2], used()), (0, GRANULE));
    assert_eq!(cuMemFree_v2(inner), INVALID_VALUE);
    ok(cuGraphLaunch(exec, stream));
    ok(cuStreamSynchronize(stream));
    assert_eq!(read(result, 1), [15]);
    assert_eq!(cuDeviceSetGraphMemAttribute(0, 1, &7), INVALID_VALUE);
    assert_eq!(cuDeviceSetGraphMemAttribute(0, 0, &0), INVALID_VALUE);
    ok(cuDeviceSetGraphMemAttribute(0, 1, &0));
    assert_eq!(amounts()[1], 0);

    // Only memory of graphs can be freed in a capture.
    ok(cuStreamBeginCapture_v2(stream, 0));
    assert_eq!(cuMemFreeAsync(result, stream), INVALID_VALUE);
    ok(cuGraphDestroy(end(stream)));

    ok(cuGraphExecDestroy(exec));
    ok(cuGraphInstantiateWithFlags(&mut other, graph, 0));
    ok(cuGraphExecDestroy(other));
    ok(cuGraphDestroy(graph));
    assert_eq!(used(), GRANULE);
    ok(cuCtxDestroy_v2(context));
}

#[test]
fn memory_outlives_the_launch_until_it_is_freed() {
    let _alone = alone();
    let context = context();
    let stream = stream();
    let mut graph = 0;
    ok(cuGraphCreate(&mut graph, 0));
    let mut parameters = Allocation { size: 3 * GRANULE, ..PLAIN };
    let (mut node, mut fill_node) = (0, 0);
    // SAFETY: no dependencies; then one, which is the local variable.
    unsafe {
        ok(cuGraphAddMemAllocNode(&mut node, graph, std::ptr::null(), 0, &mut parameters));
        let fill =
            Fill { to: parameters.address, value: 3, size: 4, width: 8, height: 1, pitch: 0 };
        ok(cuGraphAddMemsetNode(&mut fill_node, graph, &node, 1, &fill, 0));
    }
    let address = parameters.address;
    let mut found = PLAIN;
    ok(cuGraphMemAllocNodeGetParams(node, &mut found));
    assert_eq!(found, parameters);
    let mut kind = 0;
    // SAFETY: the attribute is smaller than its place.
    ok(unsafe { cuPointerGetAttribute(&mut kind, 2, address + 100) });
    assert_eq!(kind, 2);

    let exec = instantiate(graph);
    ok(cuGraphLaunch(exec, stream));
    ok(cuStreamSynchronize(stream));
    assert_eq!(read(address, 8), [3; 8]);
    assert_eq!(cuGraphLaunch(exec, stream), INVALID_VALUE, "still allocated");
    ok(cuMemFreeAsync(address, stream));
    assert_eq!(cuMemFreeAsync(address, stream), INVALID_VALUE);
    ok(cuGraphLaunch(exec, stream));
    ok(cuMemFree_v2(address));
    ok(cuGraphLaunch(exec, stream));

    // Another graph frees it.
    let mut freeing = 0;
    ok(cuGraphCreate(&mut freeing, 0));
    let (code, free_node) = add_free(freeing, &[], address);
    ok(code);
    assert_eq!(add_free(freeing, &[], address).0, INVALID_VALUE, "twice");
    assert_eq!(add_free(freeing, &[], address + 512).0, INVALID_VALUE);
    let mut freed = 0;
    ok(cuGraphMemFreeNodeGetParams(free_node, &mut freed));
    assert_eq!(freed, address);
    assert_eq!(cuGraphMemFreeNodeGetParams(node, &mut freed), INVALID_VALUE);
    let free_exec = instantiate(freeing);
    ok(cuGraphLaunch(free_exec, stream));
    assert_eq!(cuGraphLaunch(free_exec, stream), INVALID_VALUE);
    ok(cuStreamSynchronize(stream));

    // With the flag each launch frees what the last one left.
    ok(cuGraphExecDestroy(exec));
    let mut exec = 0;
    ok(cuGraphInstantiateWithFlags(&mut exec, graph, 1));
    ok(cuGraphLaunch(exec, stream));
    ok(cuGraphLaunch(exec, stream));
    assert_eq!(amounts()[0], 3 * GRANULE as u64);

    // The memory is the program's, with or without the graph.
    for graph in [graph, freeing] {
        ok(cuGraphDestroy(graph));
    }
    for exec in [exec, free_exec] {
        ok(cuGraphExecDestroy(exec));
    }
    ok(cuStreamSynchronize(stream));
    assert_eq!(read(address, 8), [3; 8]);
    assert_eq!(used(), 3 * GRANULE);
    ok(cuMemFree_v2(address));
    assert_eq!(used(), 0);
    ok(cuCtxDestroy_v2(context));
}

#[test]
fn graphs_with_memory_are_not_taken_apart() {
    let _alone = alone();
    let context = context();
    let stream = stream();
    let (mut graph, mut parent, mut clone) = (0, 0, 0);
    ok(cuGraphCreate(&mut graph, 0));
    ok(cuGraphCreate(&mut parent, 0));
    let mut any = [0u64; 32];
    // `CU_GRAPH_NODE_TYPE_MEM_ALLOC`; pinned memory of device 0.
    any[0] = 10;
    (any[2], any[3], any[15]) = (1, 1, 4096);
    let mut node = 0;
    // SAFETY: no dependencies, and parameters as the API has them.
    ok(unsafe { cuGraphAddNode(&mut node, graph, std::ptr::null(), 0, &mut any) });
    let address = any[16];
    let (code, free_node) = add_free(graph, &[node], address);
    ok(code);
    assert_eq!(kinds(graph), [10, 11]);
    assert_eq!(cuGraphClone(&mut clone, graph), NOT_SUPPORTED);
    assert_eq!(cuGraphDestroyNode(node), NOT_SUPPORTED);
    // SAFETY: each edge is two local variables.
    unsafe {
        assert_eq!(cuGraphRemoveDependencies(graph, &node, &free_node, 1), NOT_SUPPORTED);
        let none = std::ptr::null();
        let mut child = 0;
        assert_eq!(cuGraphAddChildGraphNode(&mut child, parent, none, 0, graph), NOT_SUPPORTED);
        any[15] = 0;
        assert_eq!(cuGraphAddNode(&mut child, graph, none, 0, &mut any), INVALID_VALUE);
        let mut shared = Allocation { kind: [1, 1], ..PLAIN };
        let code = cuGraphAddMemAllocNode(&mut child, graph, none, 0, &mut shared);
        assert_eq!(code, NOT_SUPPORTED, "shareable memory");
    }
    // A launch in a capture would make it a child.
    let exec = instantiate(graph);
    ok(cuStreamBeginCapture_v2(stream, 0));
    assert_eq!(cuGraphLaunch(exec, stream), NOT_SUPPORTED);
    ok(cuGraphDestroy(end(stream)));
    ok(cuGraphLaunch(exec, stream));
    ok(cuStreamSynchronize(stream));
    ok(cuGraphExecDestroy(exec));
    ok(cuGraphDestroy(graph));
    ok(cuGraphDestroy(parent));
    assert_eq!(used(), 0);
    ok(cuCtxDestroy_v2(context));
}

#[test]
#[ignore = "a program for other tests"]
fn program() {
    context();
    let stream = stream();
    let (mut kept, mut passing) = (0, 0);
    ok(cuStreamBeginCapture_v2(stream, 0));
    ok(cuMemAllocAsync(&mut kept, 4000, stream));
    ok(cuMemAllocAsync(&mut passing, 4000, stream));
    ok(cuMemsetD32Async(passing, 6, 1000, stream));
    ok(cuMemcpyDtoDAsync_v2(kept, passing, 4000, stream));
    ok(cuMemFreeAsync(passing, stream));
    let exec = instantiate(end(stream));
    ok(cuGraphLaunch(exec, stream));
    say("ready");
    assert_eq!(listen(), "go on");
    assert_eq!(read(kept, 1000), [6; 1000]);
    write(kept, &[9]);
    ok(cuMemFreeAsync(kept, stream));
    ok(cuGraphLaunch(exec, stream));
    ok(cuStreamSynchronize(stream));
    assert_eq!(read(kept, 1), [6]);
    assert_eq!(amounts(), [4000, 8000, 2 * GRANULE as u64, 2 * GRANULE as u64]);
    ok(cuDeviceGraphMemTrim(0));
    assert_eq!(used(), GRANULE);
}

#[test]
fn the_checkpoint_carries_memory_of_graphs() {
    ok(cuInit(0));
    let mut program = Program::start("program", &[]);
    assert_eq!(program.hear(), "ready");
    program.checkpoint_and_restore();
    program.tell("go on");
    program.finish();
}
