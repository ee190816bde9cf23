//! Waiting for values and writing them: single, in batches, captured, and as nodes of graphs.

mod support;

use std::time::Duration;

use support::graphs::*;
use support::*;

/// `CUstreamBatchMemOpParams`.
type Op = [u64; 6];

/// `CUDA_BATCH_MEM_OP_NODE_PARAMS`.
#[repr(C)]
#[derive(Clone, Copy)]
struct Node {
    context: u64,
    count: u32,
    list: *const Op,
    flags: u32,
}

unsafe extern "C" {
    fn cuStreamBatchMemOp(stream: u64, count: u32, list: *const Op, flags: u32) -> u32;
    fn cuStreamBatchMemOp_v2(stream: u64, count: u32, list: *const Op, flags: u32) -> u32;
    fn cuStreamBatchMemOp_v2_ptsz(stream: u64, count: u32, list: *const Op, flags: u32) -> u32;
    safe fn cuStreamWriteValue32(stream: u64, address: u64, value: u32, flags: u32) -> u32;
    safe fn cuStreamWriteValue64_v2(stream: u64, address: u64, value: u64, flags: u32) -> u32;
    fn cuGraphAddBatchMemOpNode(
        node: &mut u64,
        graph: u64,
        after: *const u64,
        count: usize,
        given: &Node,
    ) -> u32;
    safe fn cuGraphBatchMemOpNodeGetParams(node: u64, found: &mut Node) -> u32;
    fn cuGraphBatchMemOpNodeSetParams(node: u64, given: &Node) -> u32;
    fn cuGraphExecBatchMemOpNodeSetParams(exec: u64, node: u64, given: &Node) -> u32;
    fn cuGraphNodeSetParams(node: u64, given: &[u64; 32]) -> u32;
    fn cuGraphExecNodeSetParams(exec: u64, node: u64, given: &[u64; 32]) -> u32;
    safe fn cuGraphNodeGetEnabled(exec: u64, node: u64, enabled: &mut u32) -> u32;
}

/// `CU_STREAM_MEM_OP_*`.
const WAIT_32: u64 = 1;
const WRITE_32: u64 = 2;
const FLUSH: u64 = 3;
const WAIT_64: u64 = 4;
const WRITE_64: u64 = 5;
const BARRIER: u64 = 6;
/// `CU_STREAM_WAIT_VALUE_*`.
const GEQ: u64 = 0;
const EQ: u64 = 1;
const AND: u64 = 2;
const NOR: u64 = 3;
const AND_FLUSH: u64 = 1 << 30;
/// `CU_GRAPH_NODE_TYPE_BATCH_MEM_OP`.
const VALUES: u32 = 12;

fn op(kind: u64, address: u64, value: u64, flags: u64) -> Op {
    [kind, address, value, flags, 0, 0]
}

/// A flush or a barrier, whose flags follow its kind.
fn bare(kind: u64, flags: u64) -> Op {
    [kind | flags << 32, 0, 0, 0, 0, 0]
}

fn batch(stream: u64, list: &[Op]) -> u32 {
    // SAFETY: the list is as long as it says.
    unsafe { cuStreamBatchMemOp_v2(stream, list.len() as u32, list.as_ptr(), 0) }
}

fn node(context: u64, list: &[Op]) -> Node {
    Node { context, count: list.len() as u32, list: list.as_ptr(), flags: 0 }
}

fn add(graph: u64, given: &Node) -> Result<u64, u32> {
    let mut node = 0;
    // SAFETY: no dependencies; the list of the node is as long as it says.
    match unsafe { cuGraphAddBatchMemOpNode(&mut node, graph, std::ptr::null(), 0, given) } {
        0 => Ok(node),
        code => Err(code),
    }
}

fn graph() -> u64 {
    let mut graph = 0;
    ok(cuGraphCreate(&mut graph, 0));
    graph
}

/// The parameters of a node: its context and its operations.
fn parameters(node: u64) -> (u64, Vec<Op>) {
    let mut found = Node { context: 0, count: 9, list: std::ptr::null(), flags: 9 };
    ok(cuGraphBatchMemOpNodeGetParams(node, &mut found));
    assert_eq!(found.flags, 0);
    // SAFETY: the driver says how many there are.
    let list = unsafe { std::slice::from_raw_parts(found.list, found.count as usize) };
    (found.context, list.to_vec())
}

#[test]
fn a_batch_is_done_in_order_and_its_waits_block() {
    let context = context();
    let (one, two) = (stream(), stream());
    let (flag, data) = (allocate(8), allocate(16));
    // The comparison, what lies there, what is waited for, and what ends the wait.
    let waits = [
        (WAIT_32, GEQ, 4u64, 5, 6),
        (WAIT_32, GEQ, 0xffff_fffe, 1, 2),
        (WAIT_32, EQ, 7, 5, 5),
        (WAIT_64, EQ, 5, 1 << 40 | 5, 1 << 40 | 5),
        (WAIT_32, AND, 1, 6, 4),
        (WAIT_64, NOR, !0, 0, 1),
        (WAIT_64, GEQ | AND_FLUSH, 1 << 33, 1 << 34, 1 << 35),
    ];
    for (kind, comparison, before, wanted, after) in waits {
        write(flag, &[before as u32, (before >> 32) as u32]);
        write(data, &[0; 4]);
        let list = [
            op(WRITE_32, data, 0xff_0000_0001, 0),
            op(kind, flag, wanted, comparison),
            bare(BARRIER, 1),
            bare(FLUSH, 0),
            op(WRITE_64, data + 8, 3 << 32 | 2, 0),
        ];
        ok(batch(one, &list));
        std::thread::sleep(Duration::from_millis(20));
        assert_eq!(cuStreamQuery(one), NOT_READY, "{kind} {comparison}");
        assert_eq!(read(data, 4), [1, 0, 0, 0], "{kind} {comparison}");
        ok(cuStreamWriteValue64_v2(two, flag, after, 0));
        ok(cuStreamSynchronize(one));
        assert_eq!(read(data, 4), [1, 0, 2, 3]);
    }
    // Of no operations, and the most there can be. The later ones win.
    ok(batch(one, &[]));
    // SAFETY: a batch of no operations needs no list.
    ok(unsafe { cuStreamBatchMemOp_v2(one, 0, std::ptr::null(), 0) });
    let most: Vec<Op> = (0..255).map(|n| op(WRITE_32, data, n, 0)).collect();
    ok(batch(one, &most));
    ok(cuStreamSynchronize(one));
    assert_eq!(read(data, 1), [254]);
    // In the default streams.
    ok(batch(0, &[op(WRITE_32, data, 8, 0)]));
    // SAFETY: a list of one.
    ok(unsafe { cuStreamBatchMemOp_v2_ptsz(0, 1, &op(WRITE_32, data + 4, 9, 0), 0) });
    ok(cuCtxSynchronize());
    assert_eq!(read(data, 2), [8, 9]);
    ok(cuCtxDestroy_v2(context));
}

#[test]
fn a_batch_with_a_malformed_operation_does_nothing() {
    let context = context();
    let (one, data, gone) = (stream(), allocate(16), allocate(3 * GRANULE));
    ok(cuMemFree_v2(gone));
    write(data, &[0; 4]);
    let good = op(WRITE_32, data, 5, 0);
    let mut pageable = [0u64; 2];
    let bad = [
        op(0, data, 5, 0),
        op(7, data, 5, 0),
        op(8, data, 5, 0),
        op(WRITE_32, 0, 5, 0),
        op(WRITE_32, gone, 5, 0),
        op(WRITE_32, data + 2, 5, 0),
        op(WRITE_64, data + 4, 5, 0),
        op(WAIT_64, data + 4, 5, 0),
        op(WRITE_32, pageable.as_mut_ptr() as u64, 5, 0),
        op(WRITE_32, data, 5, 1),
        op(WAIT_32, data, 5, 4),
        bare(BARRIER, 2),
        bare(FLUSH, 1),
    ];
    for other in bad {
        assert_eq!(batch(one, &[good, other]), INVALID_VALUE, "{other:x?}");
        assert_eq!(add(graph(), &node(context, &[good, other])), Err(INVALID_VALUE));
    }
    assert_eq!(batch(one, &vec![good; 256]), INVALID_VALUE);
    // SAFETY: the lists are as long as they say, or refused.
    unsafe {
        assert_eq!(cuStreamBatchMemOp_v2(one, 1, &good, 1), INVALID_VALUE);
        assert_eq!(cuStreamBatchMemOp_v2(one, 1, std::ptr::null(), 0), INVALID_VALUE);
        assert_eq!(cuStreamBatchMemOp_v2(77, 1, &good, 0), INVALID_HANDLE);
        // The first version knows no barriers, and a flag that the second one does not.
        assert_eq!(cuStreamBatchMemOp(one, 1, &bare(BARRIER, 0), 0), NOT_SUPPORTED);
        ok(cuStreamSynchronize(one));
        assert_eq!(read(data, 1), [0], "nothing was done so far");
        ok(cuStreamBatchMemOp(one, 1, &op(WRITE_32, data, 6, 1), 0));
    }
    assert_eq!(cuStreamWriteValue32_v2(one, data, 5, 1), INVALID_VALUE);
    ok(cuStreamSynchronize(one));
    assert_eq!(read(data, 1), [6]);
    ok(cuStreamWriteValue32(one, data, 7, 1));
    ok(cuStreamSynchronize(one));
    assert_eq!(read(data, 1), [7]);
    ok(cuCtxDestroy_v2(context));
}

#[test]
fn captured_operations_are_nodes() {
    let _alone = alone();
    let context = context();
    let (one, two, data) = (stream(), stream(), allocate(16));
    write(data, &[0; 4]);
    let list = [op(WRITE_32, data, 5, 0), op(WAIT_32, data + 4, 1, EQ), bare(BARRIER, 0)];
    ok(cuStreamBeginCapture_v2(one, 0));
    ok(batch(one, &list));
    ok(batch(one, &[]));
    // What is refused leaves the capture as it is.
    assert_eq!(batch(one, &[op(7, data, 0, 0)]), INVALID_VALUE);
    ok(cuStreamWriteValue32_v2(one, data + 8, 6, 0));
    ok(cuStreamWaitValue32_v2(one, data + 8, 6, 0));
    let captured = end(one);
    assert_eq!(kinds(captured), [VALUES; 4]);
    let nodes = nodes(captured);
    assert_eq!(edges(captured), [(nodes[0], nodes[1]), (nodes[1], nodes[2]), (nodes[2], nodes[3])]);
    assert_eq!(parameters(nodes[0]), (context, list.to_vec()));
    assert_eq!(parameters(nodes[1]), (context, Vec::new()));
    assert_eq!(parameters(nodes[2]).1, [op(WRITE_32, data + 8, 6, 0)]);
    assert_eq!(read(data, 4), [0; 4], "nothing is done while capturing");

    let exec = instantiate(captured);
    ok(cuGraphDestroy(captured));
    for _ in 0..2 {
        write(data, &[0; 4]);
        ok(cuGraphLaunch(exec, one));
        std::thread::sleep(Duration::from_millis(20));
        assert_eq!(cuStreamQuery(one), NOT_READY);
        assert_eq!(read(data, 4), [5, 0, 0, 0]);
        ok(cuStreamWriteValue32_v2(two, data + 4, 1, 0));
        ok(cuStreamSynchronize(one));
        assert_eq!(read(data, 4), [5, 1, 6, 0]);
    }
    // And into another capture, as a child.
    ok(cuStreamBeginCapture_v2(one, 0));
    ok(cuGraphLaunch(exec, one));
    let outer = end(one);
    assert_eq!(kinds(outer), [4]);
    write(data, &[0, 1, 0, 0]);
    ok(cuGraphLaunch(instantiate(outer), one));
    ok(cuStreamSynchronize(one));
    assert_eq!(read(data, 4), [5, 1, 6, 0]);
    ok(cuCtxDestroy_v2(context));
}

#[test]
fn nodes_are_made_changed_and_cloned() {
    let _alone = alone();
    let context = context();
    let (one, data) = (stream(), allocate(16));
    let run = |exec: u64| {
        write(data, &[0; 4]);
        ok(cuGraphLaunch(exec, one));
        ok(cuStreamSynchronize(one));
        read(data, 4)
    };
    let one_graph = graph();
    let mut list = vec![op(WRITE_32, data, 5, 0)];
    let made = add(one_graph, &node(context, &list)).expect("a node");
    list[0] = op(7, 0, 0, 0); // its list was copied
    let first = vec![op(WRITE_32, data, 5, 0)];
    assert_eq!((kinds(one_graph), parameters(made)), (vec![VALUES], (context, first.clone())));
    assert_eq!(add(one_graph, &node(0, &first)), Err(INVALID_VALUE), "no context");
    assert_eq!(add(one_graph, &node(context, &vec![first[0]; 256])), Err(INVALID_VALUE));
    let flagged = Node { flags: 1, ..node(context, &first) };
    assert_eq!(add(one_graph, &flagged), Err(INVALID_VALUE));
    let nowhere = Node { list: std::ptr::null(), ..node(context, &first) };
    assert_eq!(add(one_graph, &nowhere), Err(INVALID_VALUE));
    assert_eq!(nodes(one_graph), [made]);
    let mut fill = Fill::default();
    assert_eq!(cuGraphMemsetNodeGetParams(made, &mut fill), INVALID_VALUE);

    // In a graph kind and number of the operations may change.
    let mut clone = 0;
    ok(cuGraphClone(&mut clone, one_graph));
    let second = [op(WRITE_64, data, 1 << 32 | 6, 0), op(WAIT_32, data + 4, 1, EQ)];
    // SAFETY: the lists are as long as they say.
    unsafe {
        ok(cuGraphBatchMemOpNodeSetParams(made, &node(context, &second)));
        assert_eq!(cuGraphBatchMemOpNodeSetParams(made, &node(0, &second)), INVALID_VALUE);
    }
    assert_eq!(parameters(made).1, second);
    assert_eq!(run(instantiate(one_graph)), [6, 1, 0, 0]);
    let copy = nodes(clone)[0];
    assert_eq!(parameters(copy).1, first, "the clone is as it was");
    assert_eq!(run(instantiate(clone)), [5, 0, 0, 0]);

    // The form for all kinds: kind, context, count, list, flags.
    let mut any = [0; 32];
    any[0] = VALUES.into();
    any[2] = context;
    any[3] = 2;
    any[4] = second.as_ptr() as u64;
    let (general, mut node_of_any) = (graph(), 0);
    let none = std::ptr::null();
    // SAFETY: the parameters are of that kind, and there are no dependencies.
    unsafe {
        ok(cuGraphAddNode_v2(&mut node_of_any, general, none, none, 0, &any));
        assert_eq!(parameters(node_of_any), (context, second.to_vec()));
        any[3] = 1;
        ok(cuGraphNodeSetParams(node_of_any, &any));
        assert_eq!(parameters(node_of_any).1, second[..1]);
        let exec = instantiate(general);
        let other = op(WRITE_64, data + 8, 7, 0);
        any[4] = other.as_ptr() as u64;
        ok(cuGraphExecNodeSetParams(exec, node_of_any, &any));
        assert_eq!(run(exec), [0, 0, 7, 0]);
        any[3] = 2;
        any[4] = second.as_ptr() as u64;
        assert_eq!(cuGraphExecNodeSetParams(exec, node_of_any, &any), INVALID_VALUE);
        any[2] = 0;
        assert_eq!(cuGraphNodeSetParams(node_of_any, &any), INVALID_VALUE);
        assert_eq!(cuGraphAddNode_v2(&mut 0, general, none, none, 0, &any), INVALID_VALUE);
    }
    ok(cuCtxDestroy_v2(context));
}

#[test]
fn executable_nodes_keep_their_kinds() {
    let _alone = alone();
    let context = context();
    let (one, data) = (stream(), allocate(32));
    write(data, &[0; 8]);
    let barrier = bare(BARRIER, 0);
    let list = [op(WRITE_32, data, 5, 0), op(WAIT_32, data, 5, EQ), barrier];
    let first = graph();
    let made = add(first, &node(context, &list)).expect("a node");
    let exec = instantiate(first);
    // SAFETY: the list is as long as it says.
    let set = |owner: u64, list: &[Op]| unsafe {
        cuGraphExecBatchMemOpNodeSetParams(exec, made, &node(owner, list))
    };
    let run = || {
        ok(cuGraphLaunch(exec, one));
        ok(cuStreamSynchronize(one));
        read(data, 8)
    };
    let [write_op, wait_op, _] = list;
    let refused: &[&[Op]] = &[
        &[],
        &list[..2],
        &[op(WRITE_64, data, 5, 0), wait_op, barrier],
        &[write_op, op(WAIT_64, data, 5, EQ), barrier],
        &[write_op, op(WAIT_32, data, 5, EQ | AND_FLUSH), barrier],
        &[write_op, wait_op, bare(BARRIER, 1)],
        &[write_op, wait_op, bare(FLUSH, 0)],
        &[op(WRITE_32, data + 1, 5, 0), wait_op, barrier],
    ];
    for other in refused {
        assert_eq!(set(context, other), INVALID_VALUE, "{other:x?}");
    }
    assert_eq!(set(0, &list), INVALID_VALUE);
    let mut other = 0;
    ok(cuCtxCreate_v2(&mut other, 0, 0));
    assert_eq!(set(other, &list), INVALID_VALUE);
    ok(cuCtxDestroy_v2(other));
    ok(cuCtxSetCurrent(context));
    assert_eq!(run()[..2], [5, 0], "it is as it was");
    // Addresses, values and comparisons.
    ok(set(context, &[op(WRITE_32, data + 4, 6, 0), op(WAIT_32, data + 4, 2, AND), barrier]));
    assert_eq!(run()[..2], [5, 6]);
    assert_eq!(parameters(made).1, list, "the graph's node is as it was");
    let mut enabled = 9;
    assert_eq!(cuGraphNodeSetEnabled(exec, made, 0), INVALID_VALUE);
    assert_eq!(cuGraphNodeGetEnabled(exec, made, &mut enabled), INVALID_VALUE);

    // The same for an update of the whole.
    let update = |list: &[Op]| {
        let (graph, mut result) = (graph(), [9; 3]);
        let node = add(graph, &node(context, list)).expect("a node");
        let code = cuGraphExecUpdate_v2(exec, graph, &mut result);
        (code, result[0] as u32, result[1] == node)
    };
    const PARAMETERS_CHANGED: u32 = 5;
    for other in refused.iter().take(7) {
        assert_eq!(update(other), (UPDATE_FAILURE, PARAMETERS_CHANGED, true), "{other:x?}");
    }
    assert_eq!(run()[..4], [5, 6, 0, 0]);
    let changed = [op(WRITE_32, data + 8, 7, 0), op(WAIT_32, data + 8, 7, GEQ), barrier];
    assert_eq!(update(&changed), (0, 0, false));
    assert_eq!(run()[..4], [5, 6, 7, 0]);

    // What is gone when the graph is launched fails the context.
    let gone = allocate(3 * GRANULE);
    let last = graph();
    add(last, &node(context, &[op(WRITE_32, gone, 1, 0)])).expect("a node");
    let exec = instantiate(last);
    ok(cuMemFree_v2(gone));
    ok(cuGraphLaunch(exec, one));
    assert_eq!(cuStreamSynchronize(one), ILLEGAL_ADDRESS);
    ok(cuCtxDestroy_v2(context));
}

#[test]
#[ignore = "a program for other tests"]
fn program() {
    let context = context();
    let (one, data) = (stream(), allocate(16));
    write(data, &[0; 4]);
    let list = [op(WRITE_32, data, 5, 0), op(WAIT_32, data + 4, 1, EQ), op(WRITE_32, data, 6, 0)];
    let graph = graph();
    let made = add(graph, &node(context, &list)).expect("a node");
    let exec = instantiate(graph);
    write(data + 4, &[1]);
    ok(cuGraphLaunch(exec, one));
    ok(cuStreamSynchronize(one));
    say("ready");
    listen();
    assert_eq!(parameters(made), (context, list.to_vec()));
    write(data, &[0, 0]);
    ok(cuGraphLaunch(exec, one));
    ok(batch(one, &[op(WAIT_32, data + 8, 1, EQ), op(WRITE_32, data + 12, 7, 0)]));
    std::thread::sleep(Duration::from_millis(20));
    assert_eq!(read(data, 4), [5, 0, 0, 0]);
    write(data + 4, &[1, 1]);
    ok(cuStreamSynchronize(one));
    assert_eq!(read(data, 4), [6, 1, 1, 7]);
}

#[test]
fn a_checkpoint_carries_the_nodes() {
    let mut program = Program::start("program", &[]);
    assert_eq!(program.hear(), "ready");
    program.checkpoint_and_restore();
    program.tell("go on");
    program.finish();
}
