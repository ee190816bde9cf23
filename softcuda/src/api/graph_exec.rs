//! Executable graphs.

use super::arguments::{Address, In, Out};
use super::copy::Copy3d;
use super::driver_api;
use super::graph_node::{
    AnyParameters, FillParameters, HostParameters, KernelParameters, KernelParametersV2, any, copy,
    fill, host, kernel, kernel_of_v1, record, wait,
};
use super::graph_parts::find;
use crate::executables::{self, AUTO_FREE, Difference, EXECUTABLES};
use crate::graphs;
use crate::status::{Code, Outcome};
use crate::submission::{DefaultStream, stream_and_context};

/// `CUDA_GRAPH_INSTANTIATE_FLAG_AUTO_FREE_ON_LAUNCH`, `_UPLOAD` and `_USE_NODE_PRIORITY`.
const KNOWN_FLAGS: u64 = AUTO_FREE | 2 | 8;
/// `CUDA_GRAPH_INSTANTIATE_FLAG_DEVICE_LAUNCH`.
const DEVICE_LAUNCH: u64 = 4;

/// `CUDA_GRAPH_INSTANTIATE_PARAMS`.
#[repr(C)]
#[derive(Clone, Copy)]
struct InstantiateParameters {
    flags: u64,
    stream: u64,
    error_node: u64,
    result: u32,
}

/// `CUgraphExecUpdateResultInfo`.
#[repr(C)]
#[derive(Clone, Copy)]
struct UpdateResult {
    result: u32,
    node: u64,
    from_node: u64,
}

fn instantiate(out: &Out<u64>, graph: u64, flags: u64) -> Outcome {
    out.check()?;
    let both = AUTO_FREE | DEVICE_LAUNCH;
    if flags & !(KNOWN_FLAGS | DEVICE_LAUNCH) != 0 || flags & both == both {
        return Err(Code::INVALID_VALUE);
    }
    if flags & DEVICE_LAUNCH != 0 {
        return Err(Code::NOT_SUPPORTED);
    }
    out.set(executables::instantiate(graph, flags)?.handle)
}

fn instantiate_with(
    mode: DefaultStream,
    out: &Out<u64>,
    graph: u64,
    place: &Out<InstantiateParameters>,
) -> Outcome {
    const ERROR: u32 = 1;
    const INVALID_STRUCTURE: u32 = 2;
    const CONDITION_UNUSED: u32 = 5;
    let mut parameters = place.get()?;
    if parameters.stream != 0 {
        stream_and_context(parameters.stream, mode)?;
    }
    let outcome = instantiate(out, graph, parameters.flags);
    parameters.error_node = 0;
    parameters.result = match outcome {
        Ok(()) => 0,
        Err(_) if graphs::nodes(graph).is_ok() && graphs::steps(graph).is_err() => {
            INVALID_STRUCTURE
        }
        Err(_) if !graphs::uses_all_conditions(graph) => CONDITION_UNUSED,
        Err(_) => ERROR,
    };
    place.set(parameters)?;
    outcome
}

fn launch(mode: DefaultStream, executable: u64, stream: u64) -> Outcome {
    let executable = find(executable)?;
    let (stream, context) = stream_and_context(stream, mode)?;
    executable.launch(&context, &stream)
}

fn update(executable: u64, graph: u64) -> Outcome<Result<(), Difference>> {
    Ok(find(executable)?.update(&graphs::steps(graph)?))
}

driver_api! {
    call fn cuGraphInstantiate(
        out: Out<u64>, graph: u64, _error_node: Address, _log: Address, _size: usize,
    ) {
        instantiate(&out, graph, 0)
    }

    call fn cuGraphInstantiate_v2(
        out: Out<u64>, graph: u64, _error_node: Address, _log: Address, _size: usize,
    ) {
        instantiate(&out, graph, 0)
    }

    call fn cuGraphInstantiateWithFlags(out: Out<u64>, graph: u64, flags: u64) {
        instantiate(&out, graph, flags)
    }

    stream(mode) fn cuGraphInstantiateWithParams, cuGraphInstantiateWithParams_ptsz(
        out: Out<u64>, graph: u64, parameters: Out<InstantiateParameters>,
    ) {
        instantiate_with(mode, &out, graph, &parameters)
    }

    call fn cuGraphExecDestroy(executable: u64) {
        // A launch that is under way has all that it needs.
        EXECUTABLES.remove(executable).map(|_| ()).ok_or(Code::INVALID_VALUE)
    }

    call fn cuGraphExecGetFlags(executable: u64, out: Out<u64>) {
        out.set(find(executable)?.flags)
    }

    stream(mode) fn cuGraphLaunch, cuGraphLaunch_ptsz(executable: u64, stream: u64) {
        launch(mode, executable, stream)
    }

    stream(mode) fn cuGraphUpload, cuGraphUpload_ptsz(executable: u64, stream: u64) {
        // There is nowhere to upload a graph to.
        find(executable)?;
        stream_and_context(stream, mode).map(|_| ())
    }

    call fn cuGraphExecUpdate(executable: u64, graph: u64, node: Out<u64>, result: Out<u32>) {
        let difference = update(executable, graph)?.err();
        node.set_if_wanted(difference.as_ref().map_or(0, |difference| difference.node));
        result.set_if_wanted(difference.as_ref().map_or(0, |difference| difference.result));
        difference.map_or(Ok(()), |_| Err(Code::GRAPH_EXEC_UPDATE_FAILURE))
    }

    call fn cuGraphExecUpdate_v2(executable: u64, graph: u64, result: Out<UpdateResult>) {
        result.check()?;
        let difference = update(executable, graph)?.err();
        let (code, node) = difference.as_ref().map_or((0, 0), |d| (d.result, d.node));
        result.set(UpdateResult { result: code, node, from_node: 0 })?;
        difference.map_or(Ok(()), |_| Err(Code::GRAPH_EXEC_UPDATE_FAILURE))
    }

    call fn cuGraphExecKernelNodeSetParams(
        executable: u64, node: u64, given: In<KernelParameters>,
    ) {
        find(executable)?.set_work(node, kernel_of_v1(given.get()?)?)
    }

    call fn cuGraphExecKernelNodeSetParams_v2(
        executable: u64, node: u64, given: In<KernelParametersV2>,
    ) {
        find(executable)?.set_work(node, kernel(&given.get()?)?)
    }

    call fn cuGraphExecMemcpyNodeSetParams(
        executable: u64, node: u64, given: In<Copy3d>, owner: u64,
    ) {
        find(executable)?.set_work(node, copy(&given.get()?, owner)?)
    }

    call fn cuGraphExecMemsetNodeSetParams(
        executable: u64, node: u64, given: In<FillParameters>, owner: u64,
    ) {
        find(executable)?.set_work(node, fill(&given.get()?, owner)?)
    }

    call fn cuGraphExecHostNodeSetParams(executable: u64, node: u64, given: In<HostParameters>) {
        find(executable)?.set_work(node, host(&given.get()?)?)
    }

    call fn cuGraphExecEventRecordNodeSetEvent(executable: u64, node: u64, event: u64) {
        find(executable)?.set_work(node, record(event)?)
    }

    call fn cuGraphExecEventWaitNodeSetEvent(executable: u64, node: u64, event: u64) {
        find(executable)?.set_work(node, wait(event)?)
    }

    call fn cuGraphExecChildGraphNodeSetParams(executable: u64, node: u64, graph: u64) {
        find(executable)?.set_child(node, graph)
    }

    call fn cuGraphExecNodeSetParams(executable: u64, node: u64, given: In<AnyParameters>) {
        let executable = find(executable)?;
        match any(&given.get()?)? {
            graphs::Work::Child(graph) => executable.set_child(node, graph),
            work => executable.set_work(node, work),
        }
    }

    call fn cuGraphNodeSetEnabled(executable: u64, node: u64, enabled: u32) {
        find(executable)?.set_enabled(node, enabled != 0)
    }

    call fn cuGraphNodeGetEnabled(executable: u64, node: u64, out: Out<u32>) {
        out.set(find(executable)?.is_enabled(node)?.into())
    }
}
