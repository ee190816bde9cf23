//! Nodes of graphs: making them, and their parameters.

use std::sync::Arc;

use cudarc::driver::sys;

use super::arguments::{In, Out};
use super::attributes;
use super::copy::{self, Copy3d};
use super::edge_data::{EdgeData, check_edges};
use super::graph_parts::{add, context_or_current};
use super::{driver_api, graph_conditional, graph_memory, launch, memory_operation, set};
use crate::context;
use crate::copy_engine::Fill;
use crate::events::EVENTS;
use crate::graphs::{self, Work};
use crate::host_calls::HostCall;
use crate::modules;
use crate::operations::Operation;
use crate::shapes::Shape;
use crate::status::{Code, Outcome};

/// `CUDA_KERNEL_NODE_PARAMS`, first version, with plain types.
#[repr(C)]
#[derive(Clone, Copy)]
pub(super) struct KernelParameters {
    function: u64,
    grid: [u32; 3],
    block: [u32; 3],
    shared: u32,
    each: u64,
    extra: u64,
}

/// `CUDA_KERNEL_NODE_PARAMS` since its second version.
#[repr(C)]
#[derive(Clone, Copy)]
pub(super) struct KernelParametersV2 {
    first: KernelParameters,
    kernel: u64,
    context: u64,
}

/// `CUDA_MEMSET_NODE_PARAMS`.
#[repr(C)]
#[derive(Clone, Copy)]
pub(super) struct FillParameters {
    to: u64,
    pitch: usize,
    value: u32,
    value_size: u32,
    width: usize,
    height: usize,
}

/// `CUDA_HOST_NODE_PARAMS`.
#[repr(C)]
#[derive(Clone, Copy)]
pub(super) struct HostParameters {
    function: Option<unsafe extern "C" fn(u64)>,
    data: u64,
}

/// `CUgraphNodeParams`: the kind, and parameters at byte 16.
#[repr(C)]
#[derive(Clone, Copy)]
pub(super) struct AnyParameters {
    kind: u32,
    reserved: [u32; 3],
    parameters: [u64; 29],
    end: u64,
}

const _: () =
    assert!(size_of::<KernelParametersV2>() == size_of::<sys::CUDA_KERNEL_NODE_PARAMS_v2>());
const _: () = assert!(size_of::<FillParameters>() == size_of::<sys::CUDA_MEMSET_NODE_PARAMS>());
const _: () = assert!(size_of::<AnyParameters>() == size_of::<sys::CUgraphNodeParams>());

/// The work that kernel parameters describe.
pub(super) fn kernel(given: &KernelParametersV2) -> Outcome<Work> {
    let KernelParameters { function, grid, block, shared, each, extra } = given.first;
    let handle = if function == 0 { given.kernel } else { function };
    let function = match modules::FUNCTIONS.get(handle) {
        Some(function) => function,
        None => modules::function(handle, &*context_or_current(given.context)?)
            .map_err(|_| Code::INVALID_VALUE)?,
    };
    let owner = function.context;
    let shape = Shape { grid, block, shared, cooperative: false, cluster: None };
    let (each, extra) = (In::at_address(each), In::at_address(extra));
    let launch = launch::prepare(function, shape, &each, &extra)?;
    Ok(Work::Operation(Operation::Kernel(Arc::new(launch)), owner))
}

fn kernel_v1(first: KernelParameters) -> KernelParametersV2 {
    KernelParametersV2 { first, kernel: 0, context: 0 }
}

/// The work that kernel parameters of the first version describe.
pub(super) fn kernel_of_v1(given: KernelParameters) -> Outcome<Work> {
    kernel(&kernel_v1(given))
}

/// The work that copy parameters describe.
pub(super) fn copy(given: &Copy3d, owner: u64) -> Outcome<Work> {
    let owner = context_or_current(owner)?.handle;
    let transfer = given.transfer()?;
    if transfer.is_empty() {
        return Err(Code::INVALID_VALUE);
    }
    copy::check(&transfer)?;
    Ok(Work::Operation(Operation::Copy(transfer), owner))
}

/// The work that fill parameters describe.
pub(super) fn fill(given: &FillParameters, owner: u64) -> Outcome<Work> {
    let owner = context_or_current(owner)?.handle;
    if !matches!(given.value_size, 1 | 2 | 4) || given.width == 0 || given.height == 0 {
        return Err(Code::INVALID_VALUE);
    }
    let fill = Fill {
        to: given.to,
        pitch: given.pitch as u64,
        value: given.value,
        value_size: given.value_size as usize,
        width: given.width,
        height: given.height,
    };
    set::check(&fill)?;
    Ok(Work::Operation(Operation::Fill(fill), owner))
}

/// The work that a host function's parameters describe.
pub(super) fn host(given: &HostParameters) -> Outcome<Work> {
    let function = given.function.ok_or(Code::INVALID_VALUE)?;
    // A host function belongs to no context; it is not called after a failure of this one.
    let owner = context::current()?.handle;
    Ok(Work::Operation(Operation::Host(HostCall { function, data: given.data }), owner))
}

/// The work of marking an event.
pub(super) fn record(event: u64) -> Outcome<Work> {
    Ok(Work::Record(event, EVENTS.get(event).ok_or(Code::INVALID_HANDLE)?))
}

/// The work of waiting for an event.
pub(super) fn wait(event: u64) -> Outcome<Work> {
    Ok(Work::Wait(event, EVENTS.get(event).ok_or(Code::INVALID_HANDLE)?))
}

/// The work that parameters of any kind describe.
pub(super) fn any(given: &AnyParameters) -> Outcome<Work> {
    let words = &given.parameters;
    let at = |word: usize| (&raw const words[word]) as u64;
    if given.end != 0 || given.reserved != [0; 3] {
        return Err(Code::INVALID_VALUE);
    }
    match given.kind {
        0 => kernel(&In::at_address(at(0)).get()?),
        // Flags and a reserved word, then a context.
        1 if words[0] != 0 => Err(Code::INVALID_VALUE),
        1 => copy(&In::at_address(at(2)).get()?, words[1]),
        2 => fill(&In::at_address(at(0)).get()?, words[5]),
        3 => host(&In::at_address(at(0)).get()?),
        4 if words[1] as u32 != 0 => Err(Code::NOT_SUPPORTED), // ownership other than a copy
        4 => Ok(Work::Child(words[0])),
        5 => Ok(Work::Empty),
        6 => wait(words[0]),
        7 => record(words[0]),
        11 => graph_memory::freed(words[0]),
        12 => memory_operation::node(&In::at_address(at(0)).get()?),
        8..=13 => Err(Code::NOT_SUPPORTED),
        _ => Err(Code::INVALID_VALUE),
    }
}

/// Adds a node of any kind. One that allocates memory tells its address in the parameters, and a conditional one its
/// graphs.
fn add_any(
    out: &Out<u64>,
    graph: u64,
    dependencies: &In<u64>,
    count: usize,
    given: &In<AnyParameters>,
) -> Outcome {
    let parameters = given.get()?;
    let is_plain = parameters.end == 0 && parameters.reserved == [0; 3];
    let place = given.address() + std::mem::offset_of!(AnyParameters, parameters) as u64;
    match parameters.kind {
        10 if is_plain => {
            return graph_memory::add(out, graph, dependencies, count, &Out::at_address(place));
        }
        13 if is_plain => {
            return graph_conditional::add(
                out,
                graph,
                dependencies,
                count,
                &Out::at_address(place),
            );
        }
        _ => {}
    }
    add(out, graph, dependencies, count, any(&parameters)?)
}

fn kernel_of(node: u64) -> Outcome<KernelParametersV2> {
    let Work::Operation(Operation::Kernel(launch), _) = graphs::work(node)? else {
        return Err(Code::INVALID_VALUE);
    };
    let Shape { grid, block, shared, .. } = launch.shape;
    let (function, each) = (launch.function.handle, launch.places.as_ptr() as u64);
    // The graph keeps the parameters alive as long as the node is not changed.
    let first = KernelParameters { function, grid, block, shared, each, extra: 0 };
    // The runtime 13 finds its own name for a kernel of a library by the kernel.
    let kernel = modules::kernel_of(function).unwrap_or(0);
    Ok(KernelParametersV2 { kernel, ..kernel_v1(first) })
}

driver_api! {
    call fn cuGraphAddKernelNode(
        out: Out<u64>, graph: u64, dependencies: In<u64>, count: usize, given: In<KernelParameters>,
    ) {
        add(&out, graph, &dependencies, count, kernel_of_v1(given.get()?)?)
    }

    call fn cuGraphAddKernelNode_v2(
        out: Out<u64>, graph: u64, dependencies: In<u64>, count: usize,
        given: In<KernelParametersV2>,
    ) {
        add(&out, graph, &dependencies, count, kernel(&given.get()?)?)
    }

    call fn cuGraphAddMemcpyNode(
        out: Out<u64>, graph: u64, dependencies: In<u64>, count: usize, given: In<Copy3d>,
        owner: u64,
    ) {
        add(&out, graph, &dependencies, count, copy(&given.get()?, owner)?)
    }

    call fn cuGraphAddMemsetNode(
        out: Out<u64>, graph: u64, dependencies: In<u64>, count: usize, given: In<FillParameters>,
        owner: u64,
    ) {
        add(&out, graph, &dependencies, count, fill(&given.get()?, owner)?)
    }

    call fn cuGraphAddHostNode(
        out: Out<u64>, graph: u64, dependencies: In<u64>, count: usize, given: In<HostParameters>,
    ) {
        add(&out, graph, &dependencies, count, host(&given.get()?)?)
    }

    call fn cuGraphAddChildGraphNode(
        out: Out<u64>, graph: u64, dependencies: In<u64>, count: usize, child: u64,
    ) {
        add(&out, graph, &dependencies, count, Work::Child(child))
    }

    call fn cuGraphAddEmptyNode(
        out: Out<u64>, graph: u64, dependencies: In<u64>, count: usize,
    ) {
        add(&out, graph, &dependencies, count, Work::Empty)
    }

    call fn cuGraphAddEventRecordNode(
        out: Out<u64>, graph: u64, dependencies: In<u64>, count: usize, event: u64,
    ) {
        add(&out, graph, &dependencies, count, record(event)?)
    }

    call fn cuGraphAddEventWaitNode(
        out: Out<u64>, graph: u64, dependencies: In<u64>, count: usize, event: u64,
    ) {
        add(&out, graph, &dependencies, count, wait(event)?)
    }

    call fn cuGraphAddNode(
        out: Out<u64>, graph: u64, dependencies: In<u64>, count: usize, given: In<AnyParameters>,
    ) {
        add_any(&out, graph, &dependencies, count, &given)
    }

    call fn cuGraphAddNode_v2(
        out: Out<u64>, graph: u64, dependencies: In<u64>, edges: In<EdgeData>, count: usize,
        given: In<AnyParameters>,
    ) {
        check_edges(&edges, count)?;
        add_any(&out, graph, &dependencies, count, &given)
    }

    call fn cuGraphNodeSetParams(node: u64, given: In<AnyParameters>) {
        graphs::set_work(node, any(&given.get()?)?)
    }

    call fn cuGraphKernelNodeGetParams(node: u64, out: Out<KernelParameters>) {
        out.set(kernel_of(node)?.first)
    }

    call fn cuGraphKernelNodeGetParams_v2(node: u64, out: Out<KernelParametersV2>) {
        out.set(kernel_of(node)?)
    }

    call fn cuGraphKernelNodeSetParams(node: u64, given: In<KernelParameters>) {
        graphs::set_work(node, attributes::keep(node, kernel_of_v1(given.get()?)?)?)
    }

    call fn cuGraphKernelNodeSetParams_v2(node: u64, given: In<KernelParametersV2>) {
        graphs::set_work(node, attributes::keep(node, kernel(&given.get()?)?)?)
    }

    call fn cuGraphMemcpyNodeGetParams(node: u64, out: Out<Copy3d>) {
        match graphs::work(node)? {
            Work::Operation(Operation::Copy(transfer), _) => out.set(Copy3d::from(&transfer)),
            _ => Err(Code::INVALID_VALUE),
        }
    }

    call fn cuGraphMemcpyNodeSetParams(node: u64, given: In<Copy3d>) {
        let Work::Operation(_, owner) = graphs::work(node)? else { return Err(Code::INVALID_VALUE) };
        graphs::set_work(node, copy(&given.get()?, owner)?)
    }

    call fn cuGraphMemsetNodeGetParams(node: u64, out: Out<FillParameters>) {
        let Work::Operation(Operation::Fill(fill), _) = graphs::work(node)? else {
            return Err(Code::INVALID_VALUE);
        };
        out.set(FillParameters {
            to: fill.to,
            pitch: fill.pitch as usize,
            value: fill.value,
            value_size: fill.value_size as u32,
            width: fill.width,
            height: fill.height,
        })
    }

    call fn cuGraphMemsetNodeSetParams(node: u64, given: In<FillParameters>) {
        let Work::Operation(_, owner) = graphs::work(node)? else { return Err(Code::INVALID_VALUE) };
        graphs::set_work(node, fill(&given.get()?, owner)?)
    }

    call fn cuGraphHostNodeGetParams(node: u64, out: Out<HostParameters>) {
        match graphs::work(node)? {
            Work::Operation(Operation::Host(call), _) => {
                out.set(HostParameters { function: Some(call.function), data: call.data })
            }
            _ => Err(Code::INVALID_VALUE),
        }
    }

    call fn cuGraphHostNodeSetParams(node: u64, given: In<HostParameters>) {
        graphs::set_work(node, host(&given.get()?)?)
    }

    call fn cuGraphEventRecordNodeGetEvent(node: u64, out: Out<u64>) {
        match graphs::work(node)? {
            Work::Record(event, _) => out.set(event),
            _ => Err(Code::INVALID_VALUE),
        }
    }

    call fn cuGraphEventRecordNodeSetEvent(node: u64, event: u64) {
        graphs::set_work(node, record(event)?)
    }

    call fn cuGraphEventWaitNodeGetEvent(node: u64, out: Out<u64>) {
        match graphs::work(node)? {
            Work::Wait(event, _) => out.set(event),
            _ => Err(Code::INVALID_VALUE),
        }
    }

    call fn cuGraphEventWaitNodeSetEvent(node: u64, event: u64) {
        graphs::set_work(node, wait(event)?)
    }
}
