//! Graphs: capture, explicit nodes, execution, updates, and the checkpoint.

mod support;

use std::sync::atomic::{AtomicU32, Ordering};

use support::graphs::*;
use support::*;

extern "C" fn count(place: u64) {
    // SAFETY: the tests pass the address of a counter that outlives the work.
    unsafe { &*(place as *const AtomicU32) }.fetch_add(1, Ordering::SeqCst);
}

#[test]
fn captured_work_is_done_at_each_launch() {
    let _alone = alone();
    let context = context();
    let (add, twice) = functions();
    let (one, two, fork, join) = (stream(), stream(), event(), event());
    let data = allocate(16);
    let calls = AtomicU32::new(0);
    write(data, &[100, 0, 0, 0]);
    ok(cuStreamBeginCapture_v2(one, 0));
    assert_eq!((status(one), status(two)), (1, 0));
    ok(cuMemsetD32Async(data, 1, 1, one));
    ok(launch(add, data, 4, one));
    ok(cuEventRecord(fork, one));
    ok(cuStreamWaitEvent(two, fork, 0));
    assert_eq!(status(two), 1);
    ok(launch(twice, data, 0, one));
    ok(cuMemsetD32Async(data + 8, 9, 1, two));
    ok(cuLaunchHostFunc(two, count, (&raw const calls) as u64));
    ok(cuEventRecord(join, two));
    ok(cuStreamWaitEvent(one, join, 0));
    ok(cuMemcpyDtoDAsync_v2(data + 4, data, 4, one));
    let graph = end(one);
    assert_eq!((status(one), status(two)), (0, 0));
    assert_eq!(kinds(graph), [2, 0, 0, 2, 3, 1]);
    let n = nodes(graph);
    let mut found = edges(graph);
    found.sort_unstable();
    let mut wanted =
        vec![(n[0], n[1]), (n[1], n[2]), (n[1], n[3]), (n[3], n[4]), (n[2], n[5]), (n[4], n[5])];
    wanted.sort_unstable();
    assert_eq!(found, wanted);
    assert_eq!(read(data, 1), [100], "nothing is done while capturing");

    let exec = instantiate(graph);
    ok(cuGraphDestroy(graph));
    assert_eq!(cuGraphDestroy(graph), INVALID_VALUE);
    ok(cuGraphUpload(exec, one));
    for round in 1..3 {
        write(data, &[0, 0, 0, 0]);
        ok(cuGraphLaunch(exec, one));
        ok(cuStreamSynchronize(one));
        assert_eq!(read(data, 3), [10, 10, 9]);
        assert_eq!(calls.load(Ordering::SeqCst), round);
    }
    ok(cuGraphExecDestroy(exec));
    assert_eq!(cuGraphLaunch(exec, one), INVALID_VALUE);
    ok(cuCtxDestroy_v2(context));
}

#[test]
fn what_cannot_be_captured_invalidates_the_capture() {
    let _alone = alone();
    let context = context();
    let (one, two, event_one) = (stream(), stream(), event());
    let mut blocking = 0;
    ok(cuStreamCreate(&mut blocking, 0));
    let data = allocate(16);
    let mut graph = 0;
    assert_eq!(cuStreamBeginCapture_v2(0, 0), UNSUPPORTED);
    assert_eq!(cuStreamBeginCapture_v2(one, 3), INVALID_VALUE);
    assert_eq!(cuStreamEndCapture(one, &mut graph), ILLEGAL_STATE);

    assert_eq!(spoiled(one, || cuStreamSynchronize(one)), UNSUPPORTED);
    assert_eq!(spoiled(one, || cuStreamQuery(one)), UNSUPPORTED);
    assert_eq!(spoiled(one, || cuCtxSynchronize()), UNSUPPORTED);
    assert_eq!(spoiled(one, || cuMemAlloc_v2(&mut 0, 8)), UNSUPPORTED);
    assert_eq!(spoiled(one, || cuMemFree_v2(data)), UNSUPPORTED);
    assert_eq!(spoiled(blocking, || cuMemsetD32_v2(data, 1, 1)), IMPLICIT);
    assert_eq!(spoiled(blocking, || cuStreamSynchronize(0)), IMPLICIT);
    let record_and = |call: fn(u64) -> u32| {
        spoiled(one, || {
            ok(cuEventRecord(event_one, one));
            call(event_one)
        })
    };
    assert_eq!(record_and(|event| cuEventSynchronize(event)), CAPTURED_EVENT);
    assert_eq!(record_and(|event| cuEventQuery(event)), CAPTURED_EVENT);
    assert_eq!(cuStreamWaitEvent(two, event_one, 0), CAPTURED_EVENT);
    ok(cuEventRecord(event_one, two));
    assert_eq!(spoiled(one, || cuStreamWaitEvent(one, event_one, 0)), ISOLATION);
    // The legacy stream does not wait for non-blocking streams.
    ok(cuStreamBeginCapture_v2(one, 0));
    ok(cuMemsetD32Async(data, 1, 1, 0));
    assert_eq!(cuStreamBeginCapture_v2(one, 0), ILLEGAL_STATE);
    ok(cuGraphDestroy(end(one)));

    // Two captures do not merge.
    ok(cuStreamBeginCapture_v2(one, 0));
    ok(cuStreamBeginCapture_v2(two, 0));
    ok(cuEventRecord(event_one, one));
    assert_eq!(cuStreamWaitEvent(two, event_one, 0), MERGE);
    assert_eq!(cuStreamEndCapture(one, &mut graph), INVALIDATED);
    assert_eq!(cuStreamEndCapture(two, &mut graph), INVALIDATED);

    // Work of another stream must be joined, and the capture ended where it began.
    let branch = || {
        ok(cuStreamBeginCapture_v2(one, 0));
        ok(cuEventRecord(event_one, one));
        ok(cuStreamWaitEvent(two, event_one, 0));
        ok(cuMemsetD32Async(data, 1, 1, two));
    };
    branch();
    assert_eq!(cuStreamEndCapture(one, &mut graph), UNJOINED);
    branch();
    assert_eq!(cuStreamEndCapture(two, &mut graph), UNMATCHED);
    assert_eq!(cuStreamEndCapture(one, &mut graph), INVALIDATED);
    ok(cuCtxDestroy_v2(context));
}

/// NVIDIA's samples of memory nodes destroy their second stream while the first one still captures.
#[test]
fn what_a_destroyed_stream_captured_stays_and_has_to_be_joined() {
    let _alone = alone();
    let context = context();
    let (one, fork, join) = (stream(), event(), event());
    let data = allocate(16);
    let branch = || {
        let two = stream();
        ok(cuStreamBeginCapture_v2(one, 0));
        ok(cuEventRecord(fork, one));
        ok(cuStreamWaitEvent(two, fork, 0));
        ok(cuMemsetD32Async(data, 7, 1, two));
        ok(cuEventRecord(join, two));
        two
    };
    let two = branch();
    ok(cuStreamWaitEvent(one, join, 0));
    ok(cuStreamDestroy_v2(two));
    ok(cuMemcpyDtoDAsync_v2(data + 4, data, 4, one));
    let exec = instantiate(end(one));
    ok(cuGraphLaunch(exec, one));
    ok(cuStreamSynchronize(one));
    assert_eq!(read(data, 2), [7, 7]);

    ok(cuStreamDestroy_v2(branch()));
    assert_eq!(cuStreamEndCapture(one, &mut 0), UNJOINED);
    ok(cuStreamDestroy_v2(branch()));
    ok(cuStreamWaitEvent(one, join, 0));
    assert_eq!(kinds(end(one)), [2]);
    ok(cuCtxDestroy_v2(context));
}

#[test]
fn modes_of_captures_and_threads() {
    let _alone = alone();
    let context = context();
    let one = stream();
    let elsewhere = |call: &(dyn Fn() -> u32 + Sync)| {
        std::thread::scope(|scope| {
            let thread = scope.spawn(|| {
                ok(cuCtxSetCurrent(context));
                call()
            });
            thread.join().unwrap()
        })
    };
    let allocate = || cuMemAlloc_v2(&mut 0, 8);
    let end_there = || cuStreamEndCapture(one, &mut 0);
    let relaxed = || {
        let mut mode = 2;
        ok(cuThreadExchangeStreamCaptureMode(&mut mode));
        assert_eq!(mode, 0);
        let code = cuMemAlloc_v2(&mut 0, 8);
        ok(cuThreadExchangeStreamCaptureMode(&mut mode));
        assert_eq!(mode, 2);
        code
    };
    // Global: no thread may, unless it has relaxed itself.
    assert_eq!(spoiled(one, || elsewhere(&allocate)), UNSUPPORTED);
    ok(cuStreamBeginCapture_v2(one, 0));
    ok(elsewhere(&relaxed));
    ok(relaxed());
    assert_eq!(elsewhere(&end_there), WRONG_THREAD);
    ok(cuGraphDestroy(end(one)));
    // Thread-local: this thread may not.
    ok(cuStreamBeginCapture_v2(one, 1));
    ok(elsewhere(&allocate));
    assert_eq!(allocate(), UNSUPPORTED);
    assert_eq!(cuStreamEndCapture(one, &mut 0), INVALIDATED);
    // Relaxed: everybody may, and any thread may end it.
    ok(cuStreamBeginCapture_v2(one, 2));
    ok(allocate());
    ok(elsewhere(&allocate));
    ok(elsewhere(&end_there));
    assert_eq!(cuThreadExchangeStreamCaptureMode(&mut 3), INVALID_VALUE);
    ok(cuCtxDestroy_v2(context));
}

#[test]
fn the_capture_can_be_asked_and_led() {
    unsafe extern "C" {
        safe fn cuStreamGetCaptureInfo_v3(
            stream: u64,
            state: &mut u32,
            id: &mut u64,
            graph: &mut u64,
            nodes: &mut *const u64,
            edges: &mut *const u64,
            count: &mut usize,
        ) -> u32;
        fn cuStreamUpdateCaptureDependencies_v2(
            stream: u64,
            nodes: *const u64,
            edges: *const u64,
            count: usize,
            flags: u32,
        ) -> u32;
    }
    let _alone = alone();
    let context = context();
    let one = stream();
    let data = allocate(16);
    let (mut state, mut id, mut graph, mut nodes_at, mut count) =
        (9, 0, 0, std::ptr::null(), 9_usize);
    ok(cuStreamBeginCapture_v2(one, 0));
    ok(cuMemsetD32Async(data, 1, 1, one));
    ok(cuMemsetD32Async(data + 4, 1, 1, one));
    ok(cuStreamGetCaptureInfo_v2(one, &mut state, &mut id, &mut graph, &mut nodes_at, &mut count));
    assert_eq!((state, count), (1, 1));
    assert_ne!(id, 0);
    let known = nodes(graph);
    // SAFETY: the driver gave one node there, valid up to the next question.
    assert_eq!(unsafe { *nodes_at }, known[1]);
    // SAFETY: one node each.
    unsafe {
        ok(cuStreamUpdateCaptureDependencies(one, &known[0], 1, 1));
        assert_eq!(cuStreamUpdateCaptureDependencies(one, &7, 1, 1), INVALID_VALUE);
        assert_eq!(cuStreamUpdateCaptureDependencies(one, &known[0], 1, 2), INVALID_VALUE);
    }
    // As many edges as dependencies, and each is a plain one; it can be given back.
    let mut edges_at = std::ptr::null();
    ok(cuStreamGetCaptureInfo_v3(
        one,
        &mut state,
        &mut id,
        &mut graph,
        &mut nodes_at,
        &mut edges_at,
        &mut count,
    ));
    assert_eq!((state, count), (1, 1));
    // SAFETY: the driver gave one node and one edge, valid up to the next question; 8 bytes each.
    unsafe {
        assert_eq!((*nodes_at, *edges_at), (known[0], 0));
        ok(cuStreamUpdateCaptureDependencies_v2(one, &known[0], edges_at, 1, 1));
        let code = cuStreamUpdateCaptureDependencies_v2(one, &known[0], &1, 1, 1);
        assert_eq!(code, NOT_SUPPORTED);
    }
    ok(cuMemsetD32Async(data + 8, 1, 1, one));
    assert_eq!(end(one), graph);
    let known = nodes(graph);
    assert_eq!(edges(graph), [(known[0], known[1]), (known[0], known[2])]);
    ok(cuCtxDestroy_v2(context));
}

#[test]
fn explicit_nodes_run_in_the_order_of_their_edges() {
    let _alone = alone();
    let context = context();
    let (add, twice) = functions();
    let (data, calls, done) = (allocate(16), AtomicU32::new(0), event());
    let none = std::ptr::null();
    let mut graph = 0;
    ok(cuGraphCreate(&mut graph, 0));
    assert_eq!(cuGraphCreate(&mut 0, 1), INVALID_VALUE);
    let five = 5_u32;
    let each = [(&raw const data).cast(), (&raw const five).cast()];
    let (grid, block) = ([1; 3], [1; 3]);
    let parameters = Kernel {
        function: add,
        grid,
        block,
        shared: 0,
        each: each.as_ptr(),
        extra: 0,
        kernel: 0,
        context: 0,
    };
    let fill = Fill { to: data, pitch: 0, value: 1, size: 4, width: 2, height: 1 };
    let (mut k, mut d, mut f, mut h, mut r) = (0, 0, 0, 0, 0);
    let mut copy = [0; 25];
    copy[4] = 2; // from device
    copy[6] = data;
    copy[15] = 2; // to device
    copy[17] = data + 4;
    copy[22] = 4;
    copy[23] = 1;
    copy[24] = 1;
    let mut c = 0;
    // SAFETY: structures and lists are as the functions want them.
    unsafe {
        // The kernels are made first, and run after the fill that they depend on.
        ok(cuGraphAddKernelNode_v2(&mut k, graph, none, 0, &parameters));
        let doubled = Kernel { function: twice, ..parameters };
        ok(cuGraphAddKernelNode_v2(&mut d, graph, &k, 1, &doubled));
        ok(cuGraphAddMemsetNode(&mut f, graph, none, 0, &fill, context));
        ok(cuGraphAddDependencies(graph, &f, &k, 1));
        assert_eq!(cuGraphAddDependencies(graph, &f, &k, 1), INVALID_VALUE);
        ok(cuGraphAddMemcpyNode(&mut c, graph, &d, 1, &copy, context));
        let host = Host(count, (&raw const calls) as u64);
        ok(cuGraphAddHostNode(&mut h, graph, [d, c].as_ptr(), 2, &host));
        assert_eq!(cuGraphAddHostNode(&mut r, graph, [d, d].as_ptr(), 2, &host), INVALID_VALUE);
        ok(cuGraphAddEventRecordNode(&mut r, graph, &h, 1, done));
        assert_eq!(cuGraphAddMemsetNode(&mut r, graph, &99, 1, &fill, context), INVALID_VALUE);
        let wrong = Fill { size: 3, ..fill };
        assert_eq!(cuGraphAddMemsetNode(&mut r, graph, none, 0, &wrong, context), INVALID_VALUE);
        let mut count = 9;
        ok(cuGraphNodeGetDependencies(h, std::ptr::null_mut(), &mut count));
        assert_eq!(count, 2);
    }
    let mut seen = parameters;
    ok(cuGraphKernelNodeGetParams_v2(k, &mut seen));
    // SAFETY: the driver gives a pointer to each parameter.
    let second = unsafe { (*seen.each.add(1)).cast::<u32>().read() };
    assert_eq!((seen.function, seen.block, second), (add, [1; 3], 5));
    let mut seen = [0; 25];
    ok(cuGraphMemcpyNodeGetParams(c, &mut seen));
    assert_eq!((seen[6], seen[17], seen[22]), (data, data + 4, 4));
    let mut seen = Fill::default();
    ok(cuGraphMemsetNodeGetParams(f, &mut seen));
    assert_eq!(seen, fill);
    assert_eq!(cuGraphMemsetNodeGetParams(k, &mut seen), INVALID_VALUE);

    // As a child, twice, with a fill between.
    let mut parent = 0;
    ok(cuGraphCreate(&mut parent, 0));
    let (mut first, mut between, mut last) = (0, 0, 0);
    let mut generic = [0_u64; 32];
    generic[0] = 2;
    generic[2] = data + 8;
    generic[4] = 8 | 4 << 32;
    generic[5] = 1;
    generic[6] = 1;
    // SAFETY: as before; the generic form has its parameters at byte 16.
    unsafe {
        ok(cuGraphAddChildGraphNode(&mut first, parent, none, 0, graph));
        ok(cuGraphAddNode_v2(&mut between, parent, &first, none, 1, &generic));
        ok(cuGraphAddChildGraphNode(&mut last, parent, &between, 1, graph));
    }
    assert_eq!(kinds(parent), [4, 2, 4]);
    let exec = instantiate(parent);
    ok(cuGraphLaunch(exec, 0));
    ok(cuEventSynchronize(done));
    assert_eq!(cuEventQuery(done), 0);
    ok(cuCtxSynchronize());
    assert_eq!(read(data, 3), [12, 12, 8]);
    assert_eq!(calls.load(Ordering::SeqCst), 2);

    let (mut clone, mut copy_of_h) = (0, 0);
    ok(cuGraphClone(&mut clone, graph));
    ok(cuGraphNodeFindInClone(&mut copy_of_h, h, clone));
    assert_ne!(copy_of_h, h);
    ok(cuGraphDestroyNode(copy_of_h));
    assert_eq!(cuGraphNodeFindInClone(&mut copy_of_h, h, clone), INVALID_VALUE);
    assert_eq!(edges(clone).len(), edges(graph).len() - 3);
    // SAFETY: one edge.
    unsafe { ok(cuGraphAddDependencies(clone, &nodes(clone)[1], &nodes(clone)[0], 1)) };
    assert_eq!(cuGraphInstantiateWithFlags(&mut 0, clone, 0), INVALID_VALUE, "a circle");
    assert_eq!(cuGraphInstantiateWithFlags(&mut 0, graph, 16), INVALID_VALUE);
    assert_eq!(cuGraphInstantiateWithFlags(&mut 0, 77, 0), INVALID_VALUE);
    ok(cuCtxDestroy_v2(context));
    assert_ne!(cuGraphLaunch(exec, 0), 0);
}

#[test]
fn executable_graphs_are_updated() {
    let _alone = alone();
    let context = context();
    let (add, twice) = functions();
    let (one, data) = (stream(), allocate(16));
    let capture = |value: u32, kernel: u64, more: bool| {
        ok(cuStreamBeginCapture_v2(one, 0));
        ok(cuMemsetD32Async(data, value, 1, one));
        ok(launch(kernel, data, 2, one));
        if more {
            ok(cuMemsetD32Async(data + 4, value, 1, one));
        }
        end(one)
    };
    let run = |exec: u64| {
        ok(cuGraphLaunch(exec, one));
        ok(cuStreamSynchronize(one));
        read(data, 1)[0]
    };
    let graph = capture(10, add, false);
    let exec = instantiate(graph);
    assert_eq!(run(exec), 12);
    let mut result = [9; 3];
    ok(cuGraphExecUpdate_v2(exec, capture(20, twice, false), &mut result));
    assert_eq!((result[0] as u32, run(exec)), (0, 40));
    assert_eq!(cuGraphExecUpdate_v2(exec, capture(1, add, true), &mut result), UPDATE_FAILURE);
    assert_eq!((result[0] as u32, run(exec)), (2, 40));
    let mut other = 0;
    ok(cuStreamBeginCapture_v2(one, 0));
    ok(cuMemsetD32Async(data, 1, 1, one));
    ok(cuMemsetD32Async(data, 1, 1, one));
    ok(cuStreamEndCapture(one, &mut other));
    assert_eq!(cuGraphExecUpdate_v2(exec, other, &mut result), UPDATE_FAILURE);
    assert_eq!((result[0] as u32, result[1]), (3, nodes(other)[1]));

    // Single nodes, by the handles of the graph that it was made of.
    let n = nodes(graph);
    let fill = Fill { to: data, pitch: 0, value: 3, size: 4, width: 1, height: 1 };
    ok(cuGraphExecMemsetNodeSetParams(exec, n[0], &fill, context));
    assert_eq!(run(exec), 6);
    let seven = 7_u32;
    let each = [(&raw const data).cast(), (&raw const seven).cast()];
    let parameters = Kernel {
        function: add,
        grid: [1; 3],
        block: [1; 3],
        shared: 0,
        each: each.as_ptr(),
        extra: 0,
        kernel: 0,
        context: 0,
    };
    // SAFETY: the parameters are those of the kernel.
    unsafe {
        ok(cuGraphExecKernelNodeSetParams_v2(exec, n[1], &parameters));
        assert_eq!(cuGraphExecKernelNodeSetParams_v2(exec, n[0], &parameters), INVALID_VALUE);
        assert_eq!(cuGraphExecKernelNodeSetParams_v2(exec, 77, &parameters), INVALID_VALUE);
    }
    assert_eq!(run(exec), 10);
    ok(cuGraphNodeSetEnabled(exec, n[1], 0));
    assert_eq!(run(exec), 3);
    assert_eq!(run(instantiate(graph)), 12, "the graph itself is as it was");

    // A launch in a stream that captures becomes a child of the graph.
    ok(cuStreamBeginCapture_v2(one, 0));
    ok(cuGraphLaunch(exec, one));
    ok(launch(add, data, 100, one));
    let outer = end(one);
    assert_eq!(kinds(outer), [4, 0]);
    assert_eq!(run(instantiate(outer)), 103);
    // An event that is part of the graph.
    let mark = event();
    assert_eq!(cuEventRecordWithFlags(mark, one, 1), INVALID_VALUE);
    ok(cuStreamBeginCapture_v2(one, 0));
    ok(cuEventRecordWithFlags(mark, one, 1));
    let graph = end(one);
    assert_eq!(kinds(graph), [7]);
    ok(cuGraphLaunch(instantiate(graph), one));
    ok(cuEventSynchronize(mark));
    ok(cuCtxDestroy_v2(context));
}

#[test]
#[ignore = "a program for other tests"]
fn program() {
    context();
    let (add, _) = functions();
    let (one, data) = (stream(), allocate(16));
    write(data, &[0]);
    ok(cuStreamBeginCapture_v2(one, 0));
    ok(launch(add, data, 3, one));
    let graph = end(one);
    let exec = instantiate(graph);
    ok(cuGraphLaunch(exec, one));
    ok(cuStreamSynchronize(one));
    say("ready");
    listen();
    ok(cuGraphLaunch(exec, one));
    ok(cuGraphLaunch(instantiate(graph), one));
    ok(cuStreamSynchronize(one));
    assert_eq!(read(data, 1), [9]);
}

#[test]
fn a_checkpoint_carries_graphs() {
    let mut program = Program::start("program", &[]);
    assert_eq!(program.hear(), "ready");
    program.checkpoint_and_restore();
    program.tell("go on");
    program.finish();
}

#[test]
fn user_objects_live_as_long_as_what_holds_them() {
    const MOVE: u32 = 1;
    let _alone = alone();
    context();
    let (mut graph, mut child, mut object, mut exec, mut node) = (0, 0, 0, 0, 0);
    let destroyed = AtomicU32::new(0);
    let gone = || destroyed.load(Ordering::SeqCst);
    let place = (&raw const destroyed) as u64;
    assert_eq!(cuUserObjectCreate(&mut object, place, count, 1, 0), INVALID_VALUE);
    assert_eq!(cuUserObjectCreate(&mut object, place, count, 0, 1), INVALID_VALUE);
    ok(cuUserObjectCreate(&mut object, place, count, 1, 1));
    ok(cuUserObjectRetain(object, 2));
    ok(cuUserObjectRelease(object, 1));
    assert_eq!(cuUserObjectRelease(object, 3), INVALID_VALUE);

    // Two references of the program become the child's; its copy in the graph has two of its own.
    ok(cuGraphCreate(&mut child, 0));
    assert_eq!(cuGraphRetainUserObject(child, object, 1, 2), INVALID_VALUE);
    ok(cuGraphRetainUserObject(child, object, 2, MOVE));
    assert_eq!(cuGraphReleaseUserObject(child, object, 3), INVALID_VALUE);
    ok(cuGraphReleaseUserObject(child, object, 1));
    ok(cuGraphCreate(&mut graph, 0));
    // SAFETY: no dependencies are passed.
    ok(unsafe { cuGraphAddChildGraphNode(&mut node, graph, std::ptr::null(), 0, child) });
    ok(cuGraphDestroy(child));
    ok(cuGraphInstantiateWithFlags(&mut exec, graph, 0));
    assert_eq!(cuGraphInstantiateWithFlags(&mut 0, graph, 1 | 4), INVALID_VALUE);
    ok(cuGraphDestroy(graph));
    assert_eq!(gone(), 0);

    // A launch that is under way holds it, too.
    let stream = stream();
    let flag = allocate(4);
    write(flag, &[0]);
    ok(cuStreamWaitValue32_v2(stream, flag, 1, 0));
    ok(cuGraphLaunch(exec, stream));
    ok(cuGraphExecDestroy(exec));
    assert_eq!(gone(), 0);
    write(flag, &[1]);
    ok(cuStreamSynchronize(stream));
    assert_eq!(gone(), 1);
    assert_eq!(cuUserObjectRetain(object, 1), INVALID_VALUE);
}
