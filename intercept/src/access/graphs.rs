//! Executable graphs: what their nodes touch.
//!
//! A graph is looked into when it is made executable, since the driver does not tell afterwards, and
//! again when it is updated. A launch only counts the graph; the agent puts the sets of its nodes
//! in when it is asked.

use std::collections::HashMap;
use std::sync::{Arc, Mutex};

use super::forms::{self, Range};
use super::kernels::{self, Kernel};
use super::recorder::Merged;
use crate::driver::{Copy3d, FillParams, KernelNodeParams, MemoryOpsParams, SUCCESS};
use crate::fork::Resettable;
use crate::real;

/// `CU_GRAPH_NODE_TYPE_*`.
pub(super) const KERNEL: u32 = 0;
pub(super) const COPY: u32 = 1;
pub(super) const FILL: u32 = 2;
const HOST: u32 = 3;
pub(super) const CHILD: u32 = 4;
/// Empty nodes, events, semaphores; memory that the graph allocates is the driver's.
const OTHERS: std::ops::RangeInclusive<u32> = 5..=11;
pub(super) const MEMORY_OPS: u32 = 12;

/// Nodes of all graphs that are kept.
const NODES: usize = 1 << 20;
/// Graphs within graphs, at most.
const DEPTH: usize = 16;
/// Former nodes of a graph that are kept until they are asked for.
const FORMER: usize = 1 << 12;

/// What a node touches.
#[derive(Debug, Clone)]
enum Node {
    Kernel {
        kernel: Arc<Kernel>,
        /// Number and value of each word.
        words: Vec<(usize, u64)>,
    },
    Ranges(Vec<Range>),
    Host,
    Child(Vec<Node>),
}

/// New parameters of a node: where they are, or the child graph.
#[derive(Debug, Clone, Copy)]
pub(super) enum Given {
    KernelV1(usize),
    Kernel(usize),
    Copy(usize),
    Fill(usize),
    MemoryOps(usize),
    Child(u64),
}

#[derive(Default)]
struct Executable {
    /// Some node cannot be looked into.
    unknown: bool,
    nodes: HashMap<u64, Node>,
    /// What nodes were before, since the last question: launches may have used that.
    former: Vec<Node>,
}

#[derive(Default)]
struct Graphs {
    executables: HashMap<u64, Executable>,
    nodes: usize,
}

static GRAPHS: Resettable<Mutex<Option<Graphs>>> = Resettable::new(Mutex::new(None));

fn with<T>(work: impl FnOnce(&mut Graphs) -> T) -> T {
    let mut graphs = GRAPHS.get().lock().unwrap_or_else(|poisoned| poisoned.into_inner());
    work(graphs.get_or_insert_default())
}

/// A graph was made executable, or an executable one was updated from it.
pub(super) fn made(executable: u64, graph: u64) {
    let nodes = nodes(graph, 0);
    with(|graphs| {
        let mut new = Executable { unknown: nodes.is_none(), ..Executable::default() };
        let before = graphs.executables.remove(&executable);
        graphs.nodes -= before.as_ref().map_or(0, |before| before.nodes.len());
        if super::is_on()
            && let Some(before) = before
        {
            new.unknown |= before.unknown;
            new.former = before.former;
            new.former.extend(before.nodes.into_values());
            new.forget_former();
        }
        match nodes {
            Some(nodes) if graphs.nodes + nodes.len() <= NODES => {
                new.nodes = nodes.into_iter().collect()
            }
            _ => new.unknown = true,
        }
        graphs.nodes += new.nodes.len();
        graphs.executables.insert(executable, new);
    });
}

impl Executable {
    /// Keeps no more of the former nodes than there is room for.
    fn forget_former(&mut self) {
        if self.former.len() > FORMER {
            self.former = Vec::new();
            self.unknown = true;
        }
    }
}

/// An executable graph is gone.
pub(super) fn gone(executable: u64) {
    with(|graphs| {
        let gone = graphs.executables.remove(&executable);
        graphs.nodes -= gone.map_or(0, |gone| gone.nodes.len());
    });
}

/// A node of an executable graph has got other parameters.
pub(super) fn set(executable: u64, node: u64, given: Given) {
    // SAFETY: the driver has just accepted these parameters.
    let new = unsafe { given.node(0) };
    with(|graphs| {
        let Some(executable) = graphs.executables.get_mut(&executable) else { return };
        let old = executable.nodes.get_mut(&node);
        // After an update from another graph nodes go by names that are not known here.
        let (Some(old), Some(new)) = (old, new) else {
            executable.unknown = true;
            return;
        };
        let old = std::mem::replace(old, new);
        if super::is_on() {
            executable.former.push(old);
            executable.forget_former();
        }
    });
}

/// The nodes of a graph; `None` if one cannot be looked into.
fn nodes(graph: u64, depth: usize) -> Option<Vec<(u64, Node)>> {
    let mut count = 0;
    // SAFETY: writes how many there are.
    if unsafe { real::cuGraphGetNodes(graph, std::ptr::null_mut(), &mut count) } != SUCCESS {
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
            KERNEL => {
                let mut params = KernelNodeParams::default();
                let code = real::cuGraphKernelNodeGetParams_v2(node, &mut params);
                (code == SUCCESS).then(|| kernel(&params))?
            }
            COPY => {
                let mut copy = Copy3d::default();
                let code = real::cuGraphMemcpyNodeGetParams(node, &mut copy);
                (code == SUCCESS).then(|| Node::Ranges(forms::copy_3d_ranges(&copy)))
            }
            FILL => {
                let mut params = FillParams::default();
                let code = real::cuGraphMemsetNodeGetParams(node, &mut params);
                (code == SUCCESS).then(|| fill(&params))
            }
            HOST => Some(Node::Host),
            CHILD => {
                let mut graph = 0;
                let code = real::cuGraphChildGraphNodeGetGraph(node, &mut graph);
                if code == SUCCESS { child(graph, depth) } else { None }
            }
            MEMORY_OPS => {
                let mut params = MemoryOpsParams::default();
                let code = real::cuGraphBatchMemOpNodeGetParams(node, &mut params);
                (code == SUCCESS).then(|| memory_ops(&params))
            }
            kind if OTHERS.contains(&kind) => Some(Node::Ranges(Vec::new())),
            // Conditional nodes, and what newer drivers have.
            _ => None,
        }
    }
}

/// # Safety
/// The arguments are those of a node of this kernel.
unsafe fn kernel(params: &KernelNodeParams) -> Option<Node> {
    let handle = if params.function == 0 { params.kernel } else { params.function };
    let kernel = kernels::find(handle);
    let mut words = Vec::new();
    let mut note = |number: usize, word: u64| {
        if word != 0 {
            words.push((number, word));
        }
    };
    // SAFETY: the caller's duty.
    unsafe { forms::words(&kernel, params.params as _, params.extra as _, &mut note) };
    Some(Node::Kernel { kernel, words })
}

fn fill(params: &FillParams) -> Node {
    let width = params.width.saturating_mul(params.value_size as usize);
    let range = forms::fill_range(params.to as usize, params.pitch, width, params.height);
    Node::Ranges(vec![range])
}

/// # Safety
/// The list is as long as it says.
unsafe fn memory_ops(params: &MemoryOpsParams) -> Node {
    // SAFETY: the caller's duty.
    Node::Ranges(unsafe { forms::memory_op_ranges(params.count, params.list as usize) })
}

fn child(graph: u64, depth: usize) -> Option<Node> {
    let nodes = nodes(graph, depth + 1)?;
    Some(Node::Child(nodes.into_iter().map(|(_, node)| node).collect()))
}

impl Given {
    /// What a node with these parameters touches.
    ///
    /// # Safety
    /// The driver has just accepted them.
    unsafe fn node(self, depth: usize) -> Option<Node> {
        // SAFETY: each points to the parameters of its kind.
        unsafe {
            match self {
                // The first version lacks the last two members.
                Self::KernelV1(at) => {
                    let mut params = KernelNodeParams::default();
                    let len = std::mem::offset_of!(KernelNodeParams, kernel);
                    let to = (&raw mut params).cast::<u8>();
                    std::ptr::copy_nonoverlapping(at as *const u8, to, len);
                    kernel(&params)
                }
                Self::Kernel(at) => kernel(&(at as *const KernelNodeParams).read_unaligned()),
                Self::Copy(at) => {
                    let copy = (at as *const Copy3d).read_unaligned();
                    Some(Node::Ranges(forms::copy_3d_ranges(&copy)))
                }
                Self::Fill(at) => Some(fill(&(at as *const FillParams).read_unaligned())),
                Self::MemoryOps(at) => {
                    Some(memory_ops(&(at as *const MemoryOpsParams).read_unaligned()))
                }
                Self::Child(graph) => child(graph, depth),
            }
        }
    }
}

/// Puts in what launches of graphs have touched.
pub(super) fn expand(merged: &mut Merged, launches: &HashMap<u64, u64>) {
    with(|graphs| {
        for (executable, launches) in launches {
            match graphs.executables.get_mut(executable) {
                None => merged.unknown_graphs += launches,
                Some(executable) => {
                    if executable.unknown {
                        merged.unknown_graphs += launches;
                    }
                    for node in executable.nodes.values().chain(&executable.former) {
                        add(merged, node, *launches);
                    }
                }
            }
        }
        for executable in graphs.executables.values_mut() {
            executable.former = Vec::new();
        }
    });
}

fn add(merged: &mut Merged, node: &Node, launches: u64) {
    match node {
        Node::Kernel { kernel, words } => {
            merged.add_kernel(kernel, launches, launches);
            for (number, word) in words {
                merged.add_word(kernel, *number, *word, launches);
            }
        }
        Node::Ranges(ranges) => ranges.iter().for_each(|range| merged.add_range(*range, launches)),
        Node::Host => merged.add_host_functions(launches),
        Node::Child(nodes) => nodes.iter().for_each(|node| add(merged, node, launches)),
    }
}

/// Forgets everything, in the child of a fork.
///
/// # Safety
/// No other thread exists.
pub(super) unsafe fn reset() {
    // SAFETY: the caller's duty.
    unsafe { GRAPHS.reset(Mutex::new(None)) };
}
