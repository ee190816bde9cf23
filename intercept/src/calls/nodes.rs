//! Nodes of graphs: what they touch, by what the driver says of them or by parameters that they are given.

use std::mem::offset_of;
use std::ptr;

use super::copies::copy_3d_ranges;
use super::fills::fill_range;
use super::outcomes::Given;
use super::values::memory_op_ranges;
use crate::abi::real;
use crate::abi::types::{
    Copy3d, FillParams, KernelNodeParams, MemoryOpsParams, NODE_CHILD, NODE_COPY, NODE_FILL,
    NODE_HOST, NODE_KERNEL, NODE_MEMORY_OPS, NODES_WITHOUT_EFFECT, SUCCESS,
};
use crate::state::graphs::Node;
use crate::state::kernels::{self, Arguments};

/// Graphs within graphs, at most.
const DEPTH: usize = 16;

/// The nodes of a graph; `None` if one cannot be looked into.
pub(crate) fn of_graph(graph: u64) -> Option<Vec<(u64, Node)>> {
    nodes(graph, 0)
}

/// What a node touches that has been given parameters; `None` if it cannot be looked into.
///
/// # Safety
/// The driver has just accepted them.
pub(crate) unsafe fn given(given: Given) -> Option<Node> {
    // SAFETY: each points to the parameters of its kind.
    unsafe {
        match given {
            // The first version lacks the last two members.
            Given::KernelV1(at) => {
                let mut params = KernelNodeParams::default();
                let len = offset_of!(KernelNodeParams, kernel);
                ptr::copy_nonoverlapping(at as *const u8, (&raw mut params).cast::<u8>(), len);
                Some(kernel(&params))
            }
            Given::Kernel(at) => Some(kernel(&(at as *const KernelNodeParams).read_unaligned())),
            Given::Copy(at) => Some(copy(&(at as *const Copy3d).read_unaligned())),
            Given::Fill(at) => Some(fill(&(at as *const FillParams).read_unaligned())),
            Given::MemoryOps(at) => {
                Some(memory_ops(&(at as *const MemoryOpsParams).read_unaligned()))
            }
            Given::Child(graph) => child(graph, 0),
        }
    }
}

fn nodes(graph: u64, depth: usize) -> Option<Vec<(u64, Node)>> {
    let mut count = 0;
    // SAFETY: writes how many there are.
    if unsafe { real::cuGraphGetNodes(graph, ptr::null_mut(), &mut count) } != SUCCESS {
        return None;
    }
    let mut handles = vec![0u64; count];
    // SAFETY: writes so many handles at most.
    let code = unsafe { real::cuGraphGetNodes(graph, handles.as_mut_ptr(), &mut count) };
    if code != SUCCESS || depth > DEPTH {
        return None;
    }
    handles.truncate(count);
    handles.into_iter().map(|node| Some((node, look_into(node, depth)?))).collect()
}

fn look_into(node: u64, depth: usize) -> Option<Node> {
    let mut kind = u32::MAX;
    // SAFETY: writes one value.
    if unsafe { real::cuGraphNodeGetType(node, &mut kind) } != SUCCESS {
        return None;
    }
    // SAFETY: each call fills one structure, or says that it cannot; pointers in it are the graph's,
    // which keeps what they point to.
    unsafe {
        match kind {
            NODE_KERNEL => {
                let mut params = KernelNodeParams::default();
                let code = real::cuGraphKernelNodeGetParams_v2(node, &mut params);
                (code == SUCCESS).then(|| kernel(&params))
            }
            NODE_COPY => {
                let mut params = Copy3d::default();
                let code = real::cuGraphMemcpyNodeGetParams(node, &mut params);
                (code == SUCCESS).then(|| copy(&params))
            }
            NODE_FILL => {
                let mut params = FillParams::default();
                let code = real::cuGraphMemsetNodeGetParams(node, &mut params);
                (code == SUCCESS).then(|| fill(&params))
            }
            NODE_HOST => Some(Node::Host),
            NODE_CHILD => {
                let mut graph = 0;
                let code = real::cuGraphChildGraphNodeGetGraph(node, &mut graph);
                if code == SUCCESS { child(graph, depth) } else { None }
            }
            NODE_MEMORY_OPS => {
                let mut params = MemoryOpsParams::default();
                let code = real::cuGraphBatchMemOpNodeGetParams(node, &mut params);
                (code == SUCCESS).then(|| memory_ops(&params))
            }
            kind if NODES_WITHOUT_EFFECT.contains(&kind) => Some(Node::Ranges(Vec::new())),
            // Conditional nodes, and what newer drivers have.
            _ => None,
        }
    }
}

/// # Safety
/// The arguments are those of a node of this kernel.
unsafe fn kernel(params: &KernelNodeParams) -> Node {
    let handle = if params.function == 0 { params.kernel } else { params.function };
    let kernel = kernels::find(handle);
    let mut words = Vec::new();
    let mut note = |number: usize, word: u64| {
        if word != 0 {
            words.push((number, word));
        }
    };
    let arguments = Arguments { params: params.params as _, extra: params.extra as _ };
    // SAFETY: the caller's duty.
    unsafe { kernel.words(&arguments, &mut note) };
    let [gx, gy, gz, bx, by, bz, _shared] = params.shape;
    Node::Kernel { kernel, shape: ([gx, gy, gz], [bx, by, bz]), words }
}

fn copy(params: &Copy3d) -> Node {
    Node::Ranges(copy_3d_ranges(params).into_iter().flatten().collect())
}

fn fill(params: &FillParams) -> Node {
    let width = params.width.saturating_mul(params.value_size as usize);
    Node::Ranges(vec![fill_range(params.to as usize, params.pitch, width, params.height)])
}

/// # Safety
/// The list is as long as it says.
unsafe fn memory_ops(params: &MemoryOpsParams) -> Node {
    // SAFETY: the caller's duty.
    Node::Ranges(unsafe { memory_op_ranges(params.count, params.list as usize) }.collect())
}

fn child(graph: u64, depth: usize) -> Option<Node> {
    let nodes = nodes(graph, depth + 1)?;
    Some(Node::Child(nodes.into_iter().map(|(_, node)| node).collect()))
}
