//! Conditional nodes of graphs: what decides, what is executed, updates, capture into bodies, and what is refused.

mod support;

use support::graphs::*;
use support::*;

const LAUNCH_FAILED: u32 = 719;
/// `CU_GRAPH_COND_ASSIGN_DEFAULT`.
const ASSIGN: u32 = 1;
/// `CUgraphConditionalNodeType`.
const IF: u32 = 0;
const WHILE: u32 = 1;
const SWITCH: u32 = 2;

unsafe extern "C" {
    safe fn cuGraphConditionalHandleCreate(
        handle: &mut u64,
        graph: u64,
        context: u64,
        value: u32,
        flags: u32,
    ) -> u32;
    /// The generic form has its parameters at byte 16, and is written to.
    fn cuGraphAddNode(
        node: &mut u64,
        graph: u64,
        after: *const u64,
        count: usize,
        parameters: &mut [u64; 32],
    ) -> u32;
    fn cuStreamBeginCaptureToGraph(
        stream: u64,
        graph: u64,
        after: *const u64,
        edges: *const u64,
        count: usize,
        mode: u32,
    ) -> u32;
    /// The same for streams that are not the default one.
    fn cuStreamEndCapture_ptsz(stream: u64, graph: *mut u64) -> u32;
    safe fn cuGraphInstantiateWithParams(exec: &mut u64, graph: u64, given: &mut [u64; 4]) -> u32;
    safe fn cuGraphExecNodeSetParams(exec: u64, node: u64, parameters: &[u64; 32]) -> u32;
    safe fn cuMemAllocAsync(address: &mut u64, size: usize, stream: u64) -> u32;
}

/// `put(handle, data)` sets a condition to data[0]; `step(handle, data)` adds 1 to data[1], takes 1 from data[0], and
/// sets a condition to that; `add(data, value)` adds.
const PTX: &str = "
.version 8.0
.target sm_80
.address_size 64
.extern .func cudaGraphSetConditional (.param .b64 a, .param .b32 b);
.visible .entry put(.param .u64 p0, .param .u64 p1)
{
    .reg .b64 %d<2>; .reg .b32 %r<1>;
    ld.param.u64 %d0, [p0]; ld.param.u64 %d1, [p1];
    ld.global.u32 %r0, [%d1];
    {
        .param .b64 handle; .param .b32 value;
        st.param.b64 [handle], %d0; st.param.b32 [value], %r0;
        call.uni cudaGraphSetConditional, (handle, value);
    }
    ret;
}
.visible .entry step(.param .u64 p0, .param .u64 p1)
{
    .reg .b64 %d<2>; .reg .b32 %r<2>;
    ld.param.u64 %d0, [p0]; ld.param.u64 %d1, [p1];
    ld.global.u32 %r0, [%d1+4]; add.u32 %r0, %r0, 1; st.global.u32 [%d1+4], %r0;
    ld.global.u32 %r1, [%d1]; sub.u32 %r1, %r1, 1; st.global.u32 [%d1], %r1;
    {
        .param .b64 handle; .param .b32 value;
        st.param.b64 [handle], %d0; st.param.b32 [value], %r1;
        call.uni cudaGraphSetConditional, (handle, value);
    }
    ret;
}
.visible .entry add(.param .u64 p0, .param .u64 p1)
{
    .reg .b64 %d<2>; .reg .b32 %r<2>;
    ld.param.u64 %d0, [p0]; ld.param.u64 %d1, [p1];
    cvt.u32.u64 %r1, %d1;
    ld.global.u32 %r0, [%d0]; add.u32 %r0, %r0, %r1; st.global.u32 [%d0], %r0;
    ret;
}
\0";

/// A context, its kernels, and some memory.
struct Room {
    context: u64,
    put: u64,
    step: u64,
    add: u64,
    stream: u64,
    data: u64,
}

impl Room {
    fn new() -> Room {
        let context = context();
        let mut module = 0;
        // SAFETY: the text ends in NUL.
        unsafe { ok(cuModuleLoadData(&mut module, PTX.as_ptr())) };
        let function = |name: &std::ffi::CStr| {
            let mut function = 0;
            // SAFETY: as above.
            unsafe { ok(cuModuleGetFunction(&mut function, module, name.as_ptr().cast())) };
            function
        };
        let (put, step, add) = (function(c"put"), function(c"step"), function(c"add"));
        Room { context, put, step, add, stream: stream(), data: allocate(64) }
    }

    /// Adds a node of one thread, after some.
    #[track_caller]
    fn kernel(&self, graph: u64, after: &[u64], function: u64, given: (u64, u64)) -> u64 {
        let mut node = 0;
        ok(self.try_kernel(&mut node, graph, after, function, given));
        node
    }

    fn try_kernel(
        &self,
        node: &mut u64,
        graph: u64,
        after: &[u64],
        function: u64,
        given: (u64, u64),
    ) -> u32 {
        let each = [(&raw const given.0).cast(), (&raw const given.1).cast()];
        let kernel = one_thread(function, &each);
        // SAFETY: the structure and the list are as the function wants them.
        unsafe { cuGraphAddKernelNode_v2(node, graph, after.as_ptr(), after.len(), &kernel) }
    }

    /// Adds `value` to a word of the memory.
    #[track_caller]
    fn count(&self, graph: u64, word: u64, value: u64) -> u64 {
        self.kernel(graph, &[], self.add, (self.data + 4 * word, value))
    }

    /// Launches with the first words set, and reads as many.
    #[track_caller]
    fn run<const N: usize>(&self, exec: u64, words: [u32; N]) -> [u32; N] {
        write(self.data, &words);
        ok(cuGraphLaunch(exec, self.stream));
        ok(cuStreamSynchronize(self.stream));
        read(self.data, N).try_into().unwrap()
    }
}

fn one_thread(function: u64, each: &[*const u8; 2]) -> Kernel {
    let (grid, block, each) = ([1; 3], [1; 3], each.as_ptr());
    Kernel { function, grid, block, shared: 0, each, extra: 0, kernel: 0, context: 0 }
}

#[track_caller]
fn graph() -> u64 {
    let mut graph = 0;
    ok(cuGraphCreate(&mut graph, 0));
    graph
}

#[track_caller]
fn condition(graph: u64, value: u32, flags: u32) -> u64 {
    let mut handle = 0;
    ok(cuGraphConditionalHandleCreate(&mut handle, graph, 0, value, flags));
    handle
}

/// Adds a conditional node: what the call returns, the node, and the bodies.
fn try_conditional(
    graph: u64,
    after: &[u64],
    condition: u64,
    (kind, size): (u32, u32),
    context: u64,
) -> (u32, u64, Vec<u64>) {
    let mut parameters = [0; 32];
    parameters[0] = 13;
    parameters[2] = condition;
    parameters[3] = u64::from(kind) | u64::from(size) << 32;
    parameters[5] = context;
    let mut node = 0;
    // SAFETY: structure and list are as the function wants them, and the driver gives as many graphs as were asked for.
    unsafe {
        let code = cuGraphAddNode(&mut node, graph, after.as_ptr(), after.len(), &mut parameters);
        let bodies = match code {
            0 => std::slice::from_raw_parts(parameters[4] as *const u64, size as usize).to_vec(),
            _ => Vec::new(),
        };
        (code, node, bodies)
    }
}

#[track_caller]
fn conditional(graph: u64, after: &[u64], condition: u64, kind: (u32, u32)) -> (u64, Vec<u64>) {
    let (code, node, bodies) = try_conditional(graph, after, condition, kind, 0);
    ok(code);
    (node, bodies)
}

#[test]
fn a_value_that_a_kernel_sets_chooses_the_body() {
    let _alone = alone();
    let room = &Room::new();
    let choice = |kind: (u32, u32)| {
        let graph = graph();
        let chosen = condition(graph, 0, 0);
        let put = room.kernel(graph, &[], room.put, (chosen, room.data));
        let (node, bodies) = conditional(graph, &[put], chosen, kind);
        for (number, body) in bodies.iter().enumerate() {
            room.count(*body, 1, 10u64.pow(number as u32));
        }
        // What comes after the node waits for it.
        room.kernel(graph, &[node], room.add, (room.data + 4, 1000));
        assert_eq!(kinds(graph), [0, 13, 0]);
        let exec = instantiate(graph);
        ok(cuGraphDestroy(graph));
        move |value: u32| room.run(exec, [value, 0])[1] - 1000
    };
    let one = choice((IF, 1));
    assert_eq!([0, 1, 7].map(&one), [0, 1, 1]);
    let two = choice((IF, 2));
    assert_eq!([0, 1, 7].map(&two), [10, 1, 1]);
    let many = choice((SWITCH, 4));
    assert_eq!([3, 0, 1, 2, 4, u32::MAX].map(&many), [1000, 1, 10, 100, 0, 0]);
    ok(cuCtxDestroy_v2(room.context));
}

#[test]
fn a_body_is_repeated_as_long_as_the_value_is_not_zero() {
    let _alone = alone();
    let room = Room::new();
    let graph = graph();
    let more = condition(graph, 1, ASSIGN);
    let (_, bodies) = conditional(graph, &[], more, (WHILE, 1));
    room.kernel(bodies[0], &[], room.step, (more, room.data));
    let exec = instantiate(graph);
    // The value of the creation counts at each launch.
    for _ in 0..2 {
        assert_eq!(room.run(exec, [5, 0]), [0, 5]);
    }
    ok(cuCtxDestroy_v2(room.context));
}

#[test]
fn without_a_default_the_value_stays_from_launch_to_launch() {
    let _alone = alone();
    let room = Room::new();
    let graph = graph();
    let chosen = condition(graph, 1, 0);
    let (node, bodies) = conditional(graph, &[], chosen, (SWITCH, 3));
    for (number, body) in bodies.iter().enumerate() {
        room.count(*body, 1, 10u64.pow(number as u32));
    }
    room.kernel(graph, &[node], room.put, (chosen, room.data));
    let exec = instantiate(graph);
    assert_eq!(room.run(exec, [2, 0]), [2, 10]);
    assert_eq!(room.run(exec, [0, 0]), [0, 100]);
    assert_eq!(room.run(exec, [1, 0]), [1, 1]);
    ok(cuCtxDestroy_v2(room.context));
}

#[test]
fn bodies_have_conditional_nodes_and_child_graphs() {
    let _alone = alone();
    let room = Room::new();
    let (graph, child) = (graph(), graph());
    room.count(child, 2, 1);
    let (outer, inner) = (condition(graph, 1, ASSIGN), condition(graph, 0, ASSIGN));
    let (_, bodies) = conditional(graph, &[], outer, (WHILE, 1));
    let mut node = 0;
    // SAFETY: there are no dependencies.
    unsafe { ok(cuGraphAddChildGraphNode(&mut node, bodies[0], std::ptr::null(), 0, child)) };
    let own = condition(bodies[0], 2, 0);
    let step = room.kernel(bodies[0], &[], room.step, (outer, room.data));
    // Counts in the last two rounds only, in which less than two are left: data[0] is 1, then 0.
    let put = room.kernel(bodies[0], &[step], room.put, (inner, room.data));
    let (_, last) = conditional(bodies[0], &[put], inner, (SWITCH, 2));
    for body in &last {
        let (_, innermost) = conditional(*body, &[], own, (IF, 1));
        room.count(innermost[0], 3, 1);
    }
    let exec = instantiate(graph);
    assert_eq!(room.run(exec, [5, 0, 0, 0]), [0, 5, 5, 2]);
    ok(cuGraphDestroy(graph));
    assert!(nodes_of(bodies[0]).is_none(), "bodies go with their graph");
    ok(cuGraphExecDestroy(exec));
    ok(cuCtxDestroy_v2(room.context));
}

/// The number of nodes of a graph, if there is one.
fn nodes_of(graph: u64) -> Option<usize> {
    let mut count = 0;
    // SAFETY: null asks for the number only.
    let code = unsafe { cuGraphGetNodes(graph, std::ptr::null_mut(), &mut count) };
    (code == 0).then_some(count)
}

#[test]
fn what_the_documentation_forbids_is_refused() {
    let _alone = alone();
    let other = context();
    let room = Room::new();
    let (graph, stranger) = (graph(), graph());
    let mut handle = 0;
    let create = |handle: &mut u64, graph, context, flags| {
        cuGraphConditionalHandleCreate(handle, graph, context, 0, flags)
    };
    assert_eq!(create(&mut handle, graph, 0, 2), INVALID_VALUE);
    assert_eq!(create(&mut handle, 77, 0, 0), INVALID_VALUE);
    assert_ne!(create(&mut handle, graph, 77, 0), 0);
    let chosen = condition(graph, 0, 0);
    let refused = |graph, condition, kind, context| {
        let (code, ..) = try_conditional(graph, &[], condition, kind, context);
        code
    };
    for kind in [(IF, 0), (IF, 3), (WHILE, 0), (WHILE, 2), (SWITCH, 0), (3, 1)] {
        assert_eq!(refused(graph, chosen, kind, 0), INVALID_VALUE, "{kind:?}");
    }
    assert_eq!(refused(graph, chosen, (SWITCH, u32::MAX), 0), OUT_OF_MEMORY);
    assert_eq!(refused(stranger, chosen, (IF, 1), 0), INVALID_VALUE);
    assert_eq!(refused(graph, chosen + 16, (IF, 1), 0), INVALID_VALUE);
    assert_eq!(refused(graph, chosen, (IF, 1), other), INVALID_VALUE);
    assert_eq!(nodes(graph), []);

    let (_, bodies) = conditional(graph, &[], chosen, (IF, 1));
    let body = bodies[0];
    assert_eq!(cuGraphDestroy(body), INVALID_VALUE);
    assert_eq!(refused(stranger, chosen, (IF, 1), 0), INVALID_VALUE);
    // The graph is in no other, and is executable once.
    let (none, mut node) = (std::ptr::null(), 0);
    // SAFETY: there are no dependencies.
    unsafe {
        assert_eq!(cuGraphAddChildGraphNode(&mut node, stranger, none, 0, graph), NOT_SUPPORTED);
    }
    assert_eq!(cuGraphClone(&mut handle, graph), NOT_SUPPORTED);
    let exec = instantiate(graph);
    assert_eq!(cuGraphInstantiateWithFlags(&mut handle, graph, 0), NOT_SUPPORTED);
    let mut parameters = [0; 32];
    parameters[0] = 13;
    assert_eq!(cuGraphExecNodeSetParams(exec, nodes(graph)[0], &parameters), NOT_SUPPORTED);
    ok(cuStreamBeginCapture_v2(room.stream, 0));
    assert_eq!(cuGraphLaunch(exec, room.stream), NOT_SUPPORTED);
    ok(cuGraphDestroy(end(room.stream)));
    ok(cuGraphExecDestroy(exec));

    // `CUDA_GRAPH_INSTANTIATE_CONDITIONAL_HANDLE_UNUSED`
    condition(graph, 0, 0);
    let mut given = [0; 4];
    assert_eq!(cuGraphInstantiateWithParams(&mut handle, graph, &mut given), INVALID_VALUE);
    assert_eq!(given[3] as u32, 5);
    for context in [room.context, other] {
        ok(cuCtxDestroy_v2(context));
    }
}

#[test]
fn a_graph_with_what_no_body_may_have_is_not_made_executable() {
    let _alone = alone();
    let other = context();
    let foreign = Room::new().add;
    let room = Room::new();
    extern "C" fn nothing(_: u64) {}
    let none = std::ptr::null();
    let host = Host(nothing, 0);
    // Adds something to the body of an IF, and asks what an executable graph would be.
    let with = |fill: &dyn Fn(u64)| {
        let graph = graph();
        let (_, bodies) = conditional(graph, &[], condition(graph, 0, 0), (IF, 1));
        fill(bodies[0]);
        let code = cuGraphInstantiateWithFlags(&mut 0, graph, 0);
        ok(cuGraphDestroy(graph));
        code
    };
    // SAFETY: structure and list are as the function wants them.
    let host_node = |graph| unsafe { ok(cuGraphAddHostNode(&mut 0, graph, none, 0, &host)) };
    assert_eq!(with(&host_node), NOT_SUPPORTED);
    let event_node =
        // SAFETY: there are no dependencies.
        |graph| unsafe { ok(cuGraphAddEventRecordNode(&mut 0, graph, none, 0, event())) };
    assert_eq!(with(&event_node), NOT_SUPPORTED);
    let child = graph();
    host_node(child);
    // SAFETY: there are no dependencies.
    let child_node = |graph| unsafe { ok(cuGraphAddChildGraphNode(&mut 0, graph, none, 0, child)) };
    assert_eq!(with(&child_node), NOT_SUPPORTED);
    let captured = |body| {
        // SAFETY: there are no dependencies.
        unsafe { ok(cuStreamBeginCaptureToGraph(room.stream, body, none, none, 0, 2)) };
        ok(cuMemAllocAsync(&mut 0, 64, room.stream));
        assert_eq!(end(room.stream), body);
        assert_eq!(kinds(body), [10]);
    };
    assert_eq!(with(&captured), NOT_SUPPORTED);
    let elsewhere = |graph| {
        room.kernel(graph, &[], foreign, (room.data, 1));
    };
    assert_eq!(with(&elsewhere), INVALID_VALUE);
    ok(with(&|graph| {
        room.count(graph, 0, 1);
    }));
    for context in [room.context, other] {
        ok(cuCtxDestroy_v2(context));
    }
}

#[test]
fn executable_graphs_take_over_bodies_and_defaults() {
    let _alone = alone();
    let room = Room::new();
    let build = |value: u32, kind: (u32, u32), amount: u64| {
        let graph = graph();
        let chosen = condition(graph, value, ASSIGN);
        let (_, bodies) = conditional(graph, &[], chosen, kind);
        let counts: Vec<u64> = bodies.iter().map(|body| room.count(*body, 0, amount)).collect();
        (graph, counts)
    };
    let (graph, counts) = build(0, (SWITCH, 2), 1);
    let exec = instantiate(graph);
    assert_eq!(room.run(exec, [0]), [1]);
    let mut result = [9; 3];
    ok(cuGraphExecUpdate_v2(exec, build(1, (SWITCH, 2), 20).0, &mut result));
    assert_eq!((result[0] as u32, room.run(exec, [0])), (0, [20]));
    ok(cuGraphExecUpdate_v2(exec, build(2, (SWITCH, 2), 20).0, &mut result));
    assert_eq!(room.run(exec, [0]), [0]);
    // Another kind, another number of bodies, another structure of a body.
    for kind in [(IF, 2), (SWITCH, 3)] {
        let (other, _) = build(0, kind, 5);
        assert_eq!(cuGraphExecUpdate_v2(exec, other, &mut result), UPDATE_FAILURE);
        assert_eq!((result[0] as u32, result[1]), (5, nodes(other)[0]));
    }
    let (other, others) = build(0, (SWITCH, 2), 5);
    ok(cuGraphDestroyNode(others[1]));
    assert_eq!(cuGraphExecUpdate_v2(exec, other, &mut result), UPDATE_FAILURE);
    assert_eq!((result[0] as u32, room.run(exec, [0])), (2, [0]));

    // A node of a body.
    ok(cuGraphExecUpdate_v2(exec, graph, &mut result));
    let given = (room.data, 300_u64);
    let each = [(&raw const given.0).cast(), (&raw const given.1).cast()];
    let kernel = one_thread(room.add, &each);
    // SAFETY: the parameters are those of the kernel.
    unsafe { ok(cuGraphExecKernelNodeSetParams_v2(exec, counts[0], &kernel)) };
    assert_eq!(room.run(exec, [0]), [300]);
    ok(cuGraphNodeSetEnabled(exec, counts[0], 0));
    assert_eq!(room.run(exec, [0]), [0]);
    ok(cuCtxDestroy_v2(room.context));
}

#[test]
fn conditional_nodes_are_added_to_a_capture_and_their_bodies_captured() {
    let _alone = alone();
    let room = Room::new();
    let (one, two) = (room.stream, stream());
    ok(cuStreamBeginCapture_v2(one, 2));
    ok(cuMemsetD32Async(room.data + 8, 7, 1, one));
    let (mut state, mut id, mut graph, mut after, mut count) = (0, 0, 0, std::ptr::null(), 0);
    ok(cuStreamGetCaptureInfo_v2(one, &mut state, &mut id, &mut graph, &mut after, &mut count));
    let more = condition(graph, 1, ASSIGN);
    // SAFETY: the driver gives so many nodes, and one node is given to it.
    let bodies = unsafe {
        let after = std::slice::from_raw_parts(after, count);
        let (node, bodies) = conditional(graph, after, more, (WHILE, 1));
        ok(cuStreamUpdateCaptureDependencies(one, &node, 1, 1));
        bodies
    };
    // SAFETY: there are no dependencies.
    unsafe {
        let none = std::ptr::null();
        ok(cuStreamBeginCaptureToGraph(two, bodies[0], none, none, 0, 2));
    }
    let (step, add) = ((more, room.data), (room.data + 8, 1_u64));
    let launch = |function, given: &(u64, u64), stream| {
        let each = [(&raw const given.0).cast(), (&raw const given.1).cast()];
        let (each, none) = (each.as_ptr(), std::ptr::null());
        // SAFETY: the parameters are those of the kernels above.
        unsafe { ok(cuLaunchKernel(function, 1, 1, 1, 1, 1, 1, 0, stream, each, none)) };
    };
    launch(room.step, &step, two);
    ok(cuMemcpyDtoDAsync_v2(room.data + 12, room.data, 4, two));
    // Which graph it was is known.
    // SAFETY: the driver writes where it is told to only.
    assert_eq!(unsafe { cuStreamEndCapture_ptsz(one, std::ptr::null_mut()) }, INVALID_VALUE);
    // SAFETY: as above.
    unsafe { ok(cuStreamEndCapture_ptsz(two, std::ptr::null_mut())) };
    assert_eq!(kinds(bodies[0]), [0, 1]);
    launch(room.add, &add, one);
    assert_eq!(end(one), graph);
    assert_eq!(kinds(graph), [2, 13, 0]);
    let exec = instantiate(graph);
    assert_eq!(room.run(exec, [3, 0, 0, 9]), [0, 3, 8, 0]);
    ok(cuCtxDestroy_v2(room.context));
}

#[test]
fn loops_end_when_their_context_fails() {
    let _alone = alone();
    let room = Room::new();
    let graph = graph();
    let more = condition(graph, 1, ASSIGN);
    let (_, bodies) = conditional(graph, &[], more, (WHILE, 1));
    let unknown = more + (1 << 30);
    room.kernel(bodies[0], &[], room.put, (unknown, room.data));
    ok(cuGraphLaunch(instantiate(graph), room.stream));
    assert_eq!(cuStreamSynchronize(room.stream), LAUNCH_FAILED);
    let _ = cuCtxDestroy_v2(room.context);
}
