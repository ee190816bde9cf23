//! Executable graphs: what their nodes touch.
//!
//! A graph is looked into when it is made executable, since the driver does not tell afterwards, and
//! again when it is updated. A launch only counts the graph; the agent puts the sets of its nodes
//! in when it is asked.

use std::collections::HashMap;
use std::sync::{Arc, Mutex};

use gpucr_wire::reach::Sizes;

use super::forms::{self, Range};
use super::guard::GraphNeeds;
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

/// What is kept of all graphs, in nodes; those that touch much count more than once.
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
        /// Blocks, and threads of a block.
        shape: ([u32; 3], [u32; 3]),
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
    /// There was no room for some of those.
    lost: bool,
    /// It is kept only for them.
    gone: bool,
    /// The guard under which all that the nodes may write is saved.
    free_under: u64,
}

#[derive(Default)]
struct Graphs {
    executables: HashMap<u64, Executable>,
    /// What all nodes and former nodes weigh.
    weight: usize,
}

static GRAPHS: Resettable<Mutex<Option<Graphs>>> = Resettable::new(Mutex::new(None));

fn with<T>(work: impl FnOnce(&mut Graphs) -> T) -> T {
    let mut graphs = GRAPHS.get().lock().unwrap_or_else(|poisoned| poisoned.into_inner());
    work(graphs.get_or_insert_default())
}

/// A graph was made executable, or an executable one was updated from it.
pub(super) fn made(executable: u64, graph: u64) {
    let nodes = nodes(graph, 0);
    with(|graphs| graphs.made(executable, nodes, super::is_on()));
}

/// An executable graph is about to go: another one may be made under the same handle.
pub(super) fn going(executable: u64) {
    with(|graphs| graphs.going(executable, super::is_on()));
}

/// A node of an executable graph has got other parameters.
pub(super) fn set(executable: u64, node: u64, given: Given) {
    // SAFETY: the driver has just accepted these parameters.
    let new = unsafe { given.node(0) };
    with(|graphs| graphs.set(executable, node, new, super::is_on()));
}

/// Nobody asks for what nodes were before.
pub(super) fn forget_former() {
    with(Graphs::forget_former);
}

impl Node {
    /// About how many plain nodes take as much memory.
    fn weight(&self) -> usize {
        match self {
            Self::Kernel { words, .. } => 1 + words.len() / 8,
            Self::Ranges(ranges) => 1 + ranges.len() / 4,
            Self::Host => 1,
            Self::Child(nodes) => 1 + nodes.iter().map(Self::weight).sum::<usize>(),
        }
    }
}

impl Executable {
    /// Keeps a node that is one no more, or not: gives what is kept of it.
    fn retire(&mut self, node: Node, recording: bool) -> usize {
        if !recording {
            return 0;
        }
        if self.former.len() >= FORMER {
            self.lost = true;
            return 0;
        }
        let weight = node.weight();
        self.former.push(node);
        weight
    }
}

impl Graphs {
    fn going(&mut self, executable: u64, recording: bool) {
        let Some(one) = self.executables.get_mut(&executable) else { return };
        let nodes = std::mem::take(&mut one.nodes);
        for (_, node) in nodes {
            self.weight -= node.weight();
            self.weight += one.retire(node, recording);
        }
        one.gone = true;
        if !recording {
            self.forget(executable);
        }
    }

    fn forget(&mut self, executable: u64) {
        let gone = self.executables.remove(&executable);
        let former = gone.iter().flat_map(|gone| &gone.former);
        self.weight -= former.map(Node::weight).sum::<usize>();
    }

    fn made(&mut self, executable: u64, nodes: Option<Vec<(u64, Node)>>, recording: bool) {
        // What it was before, or one that had this handle.
        self.going(executable, recording);
        let weight =
            nodes.iter().flatten().map(|(_, node)| node.weight()).sum::<usize>() + self.weight;
        let one = self.executables.entry(executable).or_default();
        one.lost |= std::mem::take(&mut one.unknown);
        one.gone = false;
        one.free_under = 0;
        match nodes {
            Some(nodes) if weight <= NODES => {
                self.weight = weight;
                one.nodes = nodes.into_iter().collect();
            }
            _ => one.unknown = true,
        }
    }

    fn set(&mut self, executable: u64, node: u64, new: Option<Node>, recording: bool) {
        let Some(one) = self.executables.get_mut(&executable) else { return };
        // After an update from another graph nodes go by names that are not known here.
        let (Some(old), Some(new)) = (one.nodes.get_mut(&node), new) else {
            one.unknown = true;
            return;
        };
        let old = std::mem::replace(old, new);
        let weight = one.nodes[&node].weight();
        self.weight = self.weight - old.weight() + weight;
        self.weight += one.retire(old, recording);
        if self.weight > NODES {
            // What cannot be kept is not looked into.
            one.unknown = true;
            self.weight -= weight;
            one.nodes.remove(&node);
        }
    }

    fn forget_former(&mut self) {
        for one in self.executables.values_mut() {
            let former = std::mem::take(&mut one.former);
            self.weight -= former.iter().map(Node::weight).sum::<usize>();
            one.lost = false;
        }
        self.executables.retain(|_, one| !one.gone);
    }
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
    let [gx, gy, gz, bx, by, bz, _] = params.shape;
    Some(Node::Kernel { kernel, shape: ([gx, gy, gz], [bx, by, bz]), words })
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

/// Collects what a launch of a graph may write, under the guard of this number.
pub(super) fn needs(executable: u64, guard: u64, needs: &mut GraphNeeds<'_>) {
    with(|graphs| match graphs.executables.get_mut(&executable) {
        None => needs.everything(),
        Some(executable) if executable.free_under == guard => {}
        Some(executable) => {
            if executable.unknown || executable.gone {
                needs.everything();
            }
            executable.nodes.values().for_each(|node| collect(node, needs));
            if needs.is_free() {
                executable.free_under = guard;
            }
        }
    });
}

fn collect(node: &Node, needs: &mut GraphNeeds<'_>) {
    match node {
        Node::Kernel { kernel, shape, words } => {
            needs.kernel(kernel, &Sizes::of(shape.0, shape.1), words);
        }
        Node::Ranges(ranges) => {
            ranges
                .iter()
                .for_each(|(_, write, address, bytes)| needs.range(*write, *address, *bytes));
        }
        Node::Host => {}
        Node::Child(nodes) => nodes.iter().for_each(|node| collect(node, needs)),
    }
}

/// Puts in what launches of graphs have touched.
pub(super) fn expand(merged: &mut Merged, launches: &HashMap<u64, u64>) {
    with(|graphs| graphs.expand(merged, launches));
}

impl Graphs {
    fn expand(&mut self, merged: &mut Merged, launches: &HashMap<u64, u64>) {
        for (executable, launches) in launches {
            match self.executables.get(executable) {
                None => merged.unknown_graphs += launches,
                Some(one) => {
                    if one.unknown || one.lost {
                        merged.unknown_graphs += launches;
                    }
                    for node in one.nodes.values().chain(&one.former) {
                        add(merged, node, *launches);
                    }
                }
            }
        }
        self.forget_former();
    }
}

fn add(merged: &mut Merged, node: &Node, launches: u64) {
    match node {
        Node::Kernel { kernel, shape, words } => {
            merged.add_kernel(kernel, &Sizes::of(shape.0, shape.1), launches, launches);
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

#[cfg(test)]
mod tests {
    use super::*;

    const GRAPH: u64 = 0x50;

    /// Nodes that are host functions: what they touch is counted without further ado.
    fn nodes(count: u64) -> Option<Vec<(u64, Node)>> {
        Some((0..count).map(|node| (node, Node::Host)).collect())
    }

    /// Host functions, and launches that may have touched anything, of so many launches.
    fn launched(graphs: &mut Graphs, launches: u64) -> (u64, u64) {
        let mut merged = Merged::default();
        graphs.expand(&mut merged, &HashMap::from([(GRAPH, launches)]));
        let accesses = merged.finish();
        (accesses.host_functions, accesses.unknown_graphs)
    }

    #[test]
    fn a_graph_that_was_launched_and_is_gone_is_still_known() {
        let mut graphs = Graphs::default();
        graphs.made(GRAPH, nodes(3), true);
        graphs.going(GRAPH, true);
        assert_eq!(launched(&mut graphs, 2), (6, 0));
        // Not for ever, and not if nobody asks.
        assert_eq!(launched(&mut graphs, 2), (0, 2));
        graphs.made(GRAPH, nodes(3), false);
        graphs.going(GRAPH, false);
        assert!(graphs.executables.is_empty());
        assert_eq!(graphs.weight, 0);
    }

    #[test]
    fn another_graph_with_the_same_handle_hides_nothing() {
        let mut graphs = Graphs::default();
        graphs.made(GRAPH, nodes(3), true);
        graphs.going(GRAPH, true);
        graphs.made(GRAPH, nodes(5), true);
        assert_eq!(launched(&mut graphs, 1), (8, 0), "either may have been launched");
        assert_eq!(launched(&mut graphs, 1), (5, 0));
        // Nor does one that is known hide one that was not.
        graphs.made(GRAPH, None, true);
        graphs.going(GRAPH, true);
        graphs.made(GRAPH, nodes(5), true);
        assert_eq!(launched(&mut graphs, 1), (10, 1));
        assert_eq!(launched(&mut graphs, 1), (5, 0));
    }

    #[test]
    fn former_nodes_are_bounded_and_what_was_lost_does_not_count_for_ever() {
        let mut graphs = Graphs::default();
        graphs.made(GRAPH, nodes(1), true);
        for _ in 0..FORMER {
            graphs.set(GRAPH, 0, Some(Node::Host), true);
        }
        assert_eq!(launched(&mut graphs, 1), (FORMER as u64 + 1, 0));
        assert_eq!(graphs.weight, 1);
        for _ in 0..FORMER + 1 {
            graphs.set(GRAPH, 0, Some(Node::Host), true);
        }
        assert_eq!(launched(&mut graphs, 1), (FORMER as u64 + 1, 1));
        assert_eq!(launched(&mut graphs, 1), (1, 0));
    }

    #[test]
    fn graphs_within_graphs_take_room_too() {
        let child = || Node::Child(vec![Node::Host; NODES / 4]);
        let mut graphs = Graphs::default();
        graphs.made(GRAPH, Some(vec![(0, child())]), true);
        assert_eq!(graphs.weight, NODES / 4 + 1);
        for _ in 0..4 {
            graphs.set(GRAPH, 0, Some(child()), true);
        }
        assert!(graphs.weight <= NODES);
        assert_eq!(launched(&mut graphs, 1).1, 1, "it could not all be kept");
        graphs.going(GRAPH, false);
        assert_eq!(graphs.weight, 0);
    }
}
