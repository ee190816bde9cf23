//! What the tests of graphs share.

use std::sync::{Mutex, MutexGuard, PoisonError};

use super::*;

unsafe extern "C" {
    pub(crate) safe fn cuStreamBeginCapture_v2(stream: u64, mode: u32) -> u32;
    pub(crate) safe fn cuStreamEndCapture(stream: u64, graph: &mut u64) -> u32;
    pub(crate) safe fn cuStreamIsCapturing(stream: u64, status: &mut u32) -> u32;
    pub(crate) safe fn cuStreamGetCaptureInfo_v2(
        stream: u64,
        status: &mut u32,
        id: &mut u64,
        graph: &mut u64,
        dependencies: &mut *const u64,
        count: &mut usize,
    ) -> u32;
    pub(crate) fn cuStreamUpdateCaptureDependencies(
        stream: u64,
        nodes: *const u64,
        count: usize,
        flags: u32,
    ) -> u32;
    pub(crate) safe fn cuThreadExchangeStreamCaptureMode(mode: &mut u32) -> u32;
    pub(crate) safe fn cuEventRecordWithFlags(event: u64, stream: u64, flags: u32) -> u32;
    pub(crate) safe fn cuGraphCreate(graph: &mut u64, flags: u32) -> u32;
    pub(crate) safe fn cuGraphDestroy(graph: u64) -> u32;
    pub(crate) safe fn cuUserObjectCreate(
        object: &mut u64,
        data: u64,
        destroy: extern "C" fn(u64),
        references: u32,
        flags: u32,
    ) -> u32;
    pub(crate) safe fn cuUserObjectRetain(object: u64, count: u32) -> u32;
    pub(crate) safe fn cuUserObjectRelease(object: u64, count: u32) -> u32;
    pub(crate) safe fn cuGraphRetainUserObject(
        graph: u64,
        object: u64,
        count: u32,
        flags: u32,
    ) -> u32;
    pub(crate) safe fn cuGraphReleaseUserObject(graph: u64, object: u64, count: u32) -> u32;
    pub(crate) safe fn cuGraphDestroyNode(node: u64) -> u32;
    pub(crate) safe fn cuGraphClone(clone: &mut u64, graph: u64) -> u32;
    pub(crate) safe fn cuGraphNodeFindInClone(found: &mut u64, node: u64, clone: u64) -> u32;
    pub(crate) safe fn cuGraphNodeGetType(node: u64, kind: &mut u32) -> u32;
    pub(crate) fn cuGraphGetNodes(graph: u64, nodes: *mut u64, count: &mut usize) -> u32;
    pub(crate) fn cuGraphGetEdges(
        graph: u64,
        from: *mut u64,
        to: *mut u64,
        count: &mut usize,
    ) -> u32;
    pub(crate) fn cuGraphNodeGetDependencies(node: u64, nodes: *mut u64, count: &mut usize) -> u32;
    pub(crate) fn cuGraphAddDependencies(
        graph: u64,
        from: *const u64,
        to: *const u64,
        count: usize,
    ) -> u32;
    pub(crate) fn cuGraphAddKernelNode_v2(
        node: &mut u64,
        graph: u64,
        after: *const u64,
        count: usize,
        parameters: &Kernel,
    ) -> u32;
    pub(crate) fn cuGraphAddMemsetNode(
        node: &mut u64,
        graph: u64,
        after: *const u64,
        count: usize,
        parameters: &Fill,
        context: u64,
    ) -> u32;
    pub(crate) fn cuGraphAddMemcpyNode(
        node: &mut u64,
        graph: u64,
        after: *const u64,
        count: usize,
        parameters: &[u64; 25],
        context: u64,
    ) -> u32;
    pub(crate) fn cuGraphAddHostNode(
        node: &mut u64,
        graph: u64,
        after: *const u64,
        count: usize,
        parameters: &Host,
    ) -> u32;
    pub(crate) fn cuGraphAddChildGraphNode(
        node: &mut u64,
        graph: u64,
        after: *const u64,
        count: usize,
        child: u64,
    ) -> u32;
    pub(crate) fn cuGraphAddEventRecordNode(
        node: &mut u64,
        graph: u64,
        after: *const u64,
        count: usize,
        event: u64,
    ) -> u32;
    pub(crate) fn cuGraphAddNode_v2(
        node: &mut u64,
        graph: u64,
        after: *const u64,
        edges: *const u64,
        count: usize,
        parameters: &[u64; 32],
    ) -> u32;
    pub(crate) safe fn cuGraphKernelNodeGetParams_v2(node: u64, parameters: &mut Kernel) -> u32;
    pub(crate) safe fn cuGraphMemcpyNodeGetParams(node: u64, parameters: &mut [u64; 25]) -> u32;
    pub(crate) safe fn cuGraphMemsetNodeGetParams(node: u64, parameters: &mut Fill) -> u32;
    pub(crate) safe fn cuGraphInstantiateWithFlags(exec: &mut u64, graph: u64, flags: u64) -> u32;
    pub(crate) safe fn cuGraphLaunch(exec: u64, stream: u64) -> u32;
    pub(crate) safe fn cuGraphUpload(exec: u64, stream: u64) -> u32;
    pub(crate) safe fn cuGraphExecDestroy(exec: u64) -> u32;
    pub(crate) safe fn cuGraphExecUpdate_v2(exec: u64, graph: u64, result: &mut [u64; 3]) -> u32;
    pub(crate) fn cuGraphExecKernelNodeSetParams_v2(
        exec: u64,
        node: u64,
        parameters: &Kernel,
    ) -> u32;
    pub(crate) safe fn cuGraphExecMemsetNodeSetParams(
        exec: u64,
        node: u64,
        parameters: &Fill,
        context: u64,
    ) -> u32;
    pub(crate) safe fn cuGraphNodeSetEnabled(exec: u64, node: u64, enabled: u32) -> u32;
}

pub(crate) const UNSUPPORTED: u32 = 900;
pub(crate) const INVALIDATED: u32 = 901;
pub(crate) const MERGE: u32 = 902;
pub(crate) const UNMATCHED: u32 = 903;
pub(crate) const UNJOINED: u32 = 904;
pub(crate) const ISOLATION: u32 = 905;
pub(crate) const IMPLICIT: u32 = 906;
pub(crate) const CAPTURED_EVENT: u32 = 907;
pub(crate) const WRONG_THREAD: u32 = 908;
pub(crate) const UPDATE_FAILURE: u32 = 910;

/// `CUDA_KERNEL_NODE_PARAMS`.
#[repr(C)]
#[derive(Clone, Copy)]
pub(crate) struct Kernel {
    pub(crate) function: u64,
    pub(crate) grid: [u32; 3],
    pub(crate) block: [u32; 3],
    pub(crate) shared: u32,
    pub(crate) each: *const *const u8,
    pub(crate) extra: u64,
    pub(crate) kernel: u64,
    pub(crate) context: u64,
}

/// `CUDA_MEMSET_NODE_PARAMS`.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Default)]
pub(crate) struct Fill {
    pub(crate) to: u64,
    pub(crate) pitch: usize,
    pub(crate) value: u32,
    pub(crate) size: u32,
    pub(crate) width: usize,
    pub(crate) height: usize,
}

/// `CUDA_HOST_NODE_PARAMS`.
#[repr(C)]
pub(crate) struct Host(pub(crate) extern "C" fn(u64), pub(crate) u64);

pub(crate) const ADD: &str = "
.version 7.0
.target sm_80
.address_size 64
.visible .entry add(.param .u64 p_data, .param .u32 p_add)
{
    .reg .b32 %r<3>;
    .reg .b64 %rd<2>;
    ld.param.u64 %rd1, [p_data];
    ld.param.u32 %r1, [p_add];
    ld.global.u32 %r2, [%rd1];
    add.u32 %r2, %r2, %r1;
    st.global.u32 [%rd1], %r2;
    ret;
}
.visible .entry twice(.param .u64 p_data, .param .u32 p_unused)
{
    .reg .b32 %r<2>;
    .reg .b64 %rd<2>;
    ld.param.u64 %rd1, [p_data];
    ld.global.u32 %r1, [%rd1];
    add.u32 %r1, %r1, %r1;
    st.global.u32 [%rd1], %r1;
    ret;
}
\0";

#[track_caller]
pub(crate) fn functions() -> (u64, u64) {
    let (mut module, mut add, mut twice) = (0, 0, 0);
    // SAFETY: texts and names end in NUL.
    unsafe {
        ok(cuModuleLoadData(&mut module, ADD.as_ptr()));
        ok(cuModuleGetFunction(&mut add, module, c"add".as_ptr().cast()));
        ok(cuModuleGetFunction(&mut twice, module, c"twice".as_ptr().cast()));
    }
    (add, twice)
}

/// Keeps the tests of one process apart: captures keep other threads from many calls.
pub(crate) fn alone() -> MutexGuard<'static, ()> {
    static ALONE: Mutex<()> = Mutex::new(());
    ALONE.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Launches one thread of a kernel of `ADD`.
pub(crate) fn launch(function: u64, data: u64, add: u32, stream: u64) -> u32 {
    let each = [(&raw const data).cast(), (&raw const add).cast()];
    let (each, none) = (each.as_ptr(), std::ptr::null());
    // SAFETY: the parameters are those of the kernels above.
    unsafe { cuLaunchKernel(function, 1, 1, 1, 1, 1, 1, 0, stream, each, none) }
}

#[track_caller]
pub(crate) fn stream() -> u64 {
    let mut stream = 0;
    ok(cuStreamCreate(&mut stream, 1));
    stream
}

#[track_caller]
pub(crate) fn event() -> u64 {
    let mut event = 0;
    ok(cuEventCreate(&mut event, 0));
    event
}

#[track_caller]
pub(crate) fn instantiate(graph: u64) -> u64 {
    let mut exec = 0;
    ok(cuGraphInstantiateWithFlags(&mut exec, graph, 0));
    exec
}

#[track_caller]
pub(crate) fn end(stream: u64) -> u64 {
    let mut graph = 0;
    ok(cuStreamEndCapture(stream, &mut graph));
    graph
}

#[track_caller]
pub(crate) fn nodes(graph: u64) -> Vec<u64> {
    let mut count = 0;
    // SAFETY: null asks for the number only; then there is room for that many.
    unsafe {
        ok(cuGraphGetNodes(graph, std::ptr::null_mut(), &mut count));
        let mut nodes = vec![0; count];
        ok(cuGraphGetNodes(graph, nodes.as_mut_ptr(), &mut count));
        nodes
    }
}

#[track_caller]
pub(crate) fn edges(graph: u64) -> Vec<(u64, u64)> {
    let mut count = 0;
    let none = std::ptr::null_mut();
    // SAFETY: as for `nodes`.
    unsafe {
        ok(cuGraphGetEdges(graph, none, none, &mut count));
        let (mut from, mut to) = (vec![0; count], vec![0; count]);
        ok(cuGraphGetEdges(graph, from.as_mut_ptr(), to.as_mut_ptr(), &mut count));
        from.into_iter().zip(to).collect()
    }
}

#[track_caller]
pub(crate) fn kinds(graph: u64) -> Vec<u32> {
    nodes(graph)
        .into_iter()
        .map(|node| {
            let mut kind = 99;
            ok(cuGraphNodeGetType(node, &mut kind));
            kind
        })
        .collect()
}

pub(crate) fn status(stream: u64) -> u32 {
    let mut status = 99;
    ok(cuStreamIsCapturing(stream, &mut status));
    status
}

/// Begins a capture, has a call fail in it, and ends it.
#[track_caller]
pub(crate) fn spoiled(stream: u64, call: impl FnOnce() -> u32) -> u32 {
    ok(cuStreamBeginCapture_v2(stream, 0));
    let code = call();
    assert_eq!(status(stream), 2, "the capture is invalidated");
    let mut graph = 7;
    assert_eq!(cuStreamEndCapture(stream, &mut graph), INVALIDATED);
    assert_eq!((graph, status(stream)), (0, 0));
    code
}
