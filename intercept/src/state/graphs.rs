//! Executable graphs: what their nodes touch.
//!
//! A graph is looked into when it is made executable, since the driver does not tell afterwards, and
//! again when it is updated. A launch only counts the graph; the agent puts the sets of its nodes
//! in when it is asked.

use std::collections::HashMap;
use std::sync::{Arc, Mutex};

use super::gate;
use super::kernels::Kernel;
use super::range::Range;
use crate::resettable::Resettable;

/// What is kept of all graphs, in nodes; those that touch much count more than once.
const NODES: usize = 1 << 20;
/// Former nodes of a graph that are kept until they are asked for.
const FORMER: usize = 1 << 12;

/// What a node touches.
#[derive(Debug, Clone)]
pub(crate) enum Node {
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

/// A graph with these nodes was made executable, or an executable one was updated from it. `None` if a node could
/// not be looked into.
pub(crate) fn made(executable: u64, nodes: Option<Vec<(u64, Node)>>) {
    with(|graphs| graphs.made(executable, nodes, gate::is_recording()));
}

/// An executable graph is about to go: another one may be made under the same handle.
pub(crate) fn going(executable: u64) {
    with(|graphs| graphs.going(executable, gate::is_recording()));
}

/// A node of an executable graph touches something else now; `None` if it could not be looked into.
pub(crate) fn set(executable: u64, node: u64, new: Option<Node>) {
    with(|graphs| graphs.set(executable, node, new, gate::is_recording()));
}

/// Nobody asks for what nodes were before.
pub(crate) fn forget_former() {
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

/// Shows the nodes of a graph that is launched to `needs`, unless all that they may write is saved under the guard
/// of this number. In place of a node that is not known it is shown `None`. If `is_free` says afterwards that nothing
/// is needed, that is remembered for as long as this guard lasts.
pub(crate) fn needed<N>(
    executable: u64,
    guard: u64,
    needs: &mut N,
    add: impl Fn(&mut N, Option<&Node>),
    is_free: impl Fn(&N) -> bool,
) {
    with(|graphs| match graphs.executables.get_mut(&executable) {
        None => add(needs, None),
        Some(executable) if executable.free_under == guard => {}
        Some(executable) => {
            if executable.unknown || executable.gone {
                add(needs, None);
            }
            executable.nodes.values().for_each(|node| add(needs, Some(node)));
            if is_free(needs) {
                executable.free_under = guard;
            }
        }
    });
}

/// Shows what so many launches of each graph have touched to `add`, which is given the number of launches and a
/// node; `None` in place of nodes that are not known.
pub(crate) fn expand(launches: &HashMap<u64, u64>, add: impl FnMut(u64, Option<&Node>)) {
    with(|graphs| graphs.expand(launches, add));
}

impl Graphs {
    fn expand(&mut self, launches: &HashMap<u64, u64>, mut add: impl FnMut(u64, Option<&Node>)) {
        for (executable, launches) in launches {
            match self.executables.get(executable) {
                None => add(*launches, None),
                Some(one) => {
                    if one.unknown || one.lost {
                        add(*launches, None);
                    }
                    let nodes = one.nodes.values().chain(&one.former);
                    nodes.for_each(|node| add(*launches, Some(node)));
                }
            }
        }
        self.forget_former();
    }
}

/// Forgets everything, in the child of a fork.
///
/// # Safety
/// No other thread exists.
pub(crate) unsafe fn reset() {
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
        let (mut host_functions, mut unknown) = (0, 0);
        graphs.expand(&HashMap::from([(GRAPH, launches)]), |launches, node| match node {
            None => unknown += launches,
            Some(Node::Host) => host_functions += launches,
            Some(_) => {}
        });
        (host_functions, unknown)
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
