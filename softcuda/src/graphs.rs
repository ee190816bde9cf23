//! Graphs: pieces of work with dependencies. They are the program's alone, in host memory, so the
//! checkpoint carries them without doing anything.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::sync::{Arc, LazyLock};

use parking_lot::Mutex;

use crate::conditions::{Condition, Conditional, Kind};
pub(crate) use crate::graph_work::Work;
use crate::handles::new_handle;
use crate::status::{Code, Outcome};
use crate::user_objects::{self, Held};

struct Node {
    graph: u64,
    work: Work,
    dependencies: Vec<u64>,
    /// The node that this one was copied from.
    original: u64,
}

#[derive(Default)]
struct Graph {
    /// In the order of creation.
    nodes: Vec<u64>,
    /// The graph of the node that it belongs to, if it belongs to one.
    within: Option<u64>,
    /// The graph that this one was cloned from, or 0.
    original: u64,
    /// User objects that it keeps alive.
    objects: Vec<Held>,
    /// What decides about conditional nodes in it and in graphs of its nodes.
    conditions: Vec<Arc<Condition>>,
}

#[derive(Default)]
struct State {
    graphs: HashMap<u64, Graph>,
    nodes: HashMap<u64, Node>,
}

static STATE: LazyLock<Mutex<State>> = LazyLock::new(Mutex::default);

/// A node of a graph that is ready to be executed; child graphs are dissolved.
#[derive(Clone)]
pub(crate) struct Step {
    /// Handle of the graph's node; 0 for the end of a child graph.
    pub(crate) node: u64,
    /// What to do.
    pub(crate) work: Work,
    /// Steps before, by index.
    pub(crate) after: Vec<usize>,
    /// The steps of each body of a conditional node.
    pub(crate) bodies: Vec<Vec<Step>>,
}

/// Creates a graph without nodes.
pub(crate) fn create() -> u64 {
    let handle = new_handle();
    STATE.lock().graphs.insert(handle, Graph::default());
    handle
}

/// Destroys a graph and its nodes.
///
/// # Errors
/// `INVALID_VALUE` for an unknown graph, or one that belongs to a node.
pub(crate) fn destroy(graph: u64) -> Outcome {
    let mut state = STATE.lock();
    if state.graph(graph)?.within.is_some() {
        return Err(Code::INVALID_VALUE);
    }
    let released = state.remove(graph);
    // User objects are destroyed by functions of the program, which need the lock to be free.
    drop(state);
    drop(released);
    Ok(())
}

/// Has a graph keep a user object alive.
///
/// # Errors
/// `INVALID_VALUE` for an unknown graph.
pub(crate) fn hold(graph: u64, object: Held) -> Outcome {
    let mut state = STATE.lock();
    let Some(graph) = state.graphs.get_mut(&graph) else {
        drop(state);
        return Err(Code::INVALID_VALUE);
    };
    graph.objects.push(object);
    Ok(())
}

/// Takes references of a user object away from a graph.
///
/// # Errors
/// `INVALID_VALUE` for an unknown graph, or when it has fewer.
pub(crate) fn release(graph: u64, object: u64, count: u64) -> Outcome {
    let mut state = STATE.lock();
    let graph = state.graphs.get_mut(&graph).ok_or(Code::INVALID_VALUE)?;
    let released = user_objects::take(&mut graph.objects, object, count)?;
    drop(state);
    drop(released);
    Ok(())
}

/// References of its own to all user objects of a graph and its children.
///
/// # Errors
/// `INVALID_VALUE` for an unknown graph.
pub(crate) fn objects(graph: u64) -> Outcome<Vec<Held>> {
    let state = STATE.lock();
    let mut objects = Vec::new();
    let mut rest = vec![graph];
    while let Some(graph) = rest.pop() {
        let graph = state.graph(graph)?;
        objects.extend(graph.objects.iter().cloned());
        let nodes = graph.nodes.iter().filter_map(|node| state.nodes.get(node));
        rest.extend(nodes.flat_map(|node| node.work.own_graphs()));
    }
    Ok(objects)
}

/// Adds a node. A child graph is copied.
///
/// # Errors
/// `INVALID_VALUE` for an unknown graph, for dependencies that are not nodes of it or are named
/// twice, and for memory that the graph frees already; `NOT_SUPPORTED` for a child graph that
/// allocates or frees memory or has conditional nodes.
pub(crate) fn add(graph: u64, dependencies: &[u64], work: Work) -> Outcome<u64> {
    let mut state = STATE.lock();
    state.check_dependencies(graph, dependencies)?;
    if let Work::Free(memory) = &work
        && state.works(graph).any(|work| matches!(work, Work::Free(m) if Arc::ptr_eq(m, memory)))
    {
        return Err(Code::INVALID_VALUE);
    }
    let work = state.take_in(graph, work)?;
    state.insert(graph, dependencies.to_vec(), work, 0)
}

/// Makes a condition for conditional nodes in a graph and in graphs of its nodes.
///
/// # Errors
/// `INVALID_VALUE` for an unknown graph.
pub(crate) fn add_condition(graph: u64, condition: &Arc<Condition>) -> Outcome {
    let mut state = STATE.lock();
    let graph = state.graphs.get_mut(&graph).ok_or(Code::INVALID_VALUE)?;
    graph.conditions.push(condition.clone());
    Ok(())
}

/// Adds a conditional node with empty bodies; gives the node too.
///
/// # Errors
/// `INVALID_VALUE` as [`add`], for a condition that is not one of this graph or of those that it is within, for
/// another context than the condition's, and for a number of bodies that the kind cannot have.
pub(crate) fn add_conditional(
    graph: u64,
    dependencies: &[u64],
    (condition, context): (u64, u64),
    kind: Kind,
    bodies: usize,
) -> Outcome<(u64, Arc<Conditional>)> {
    let mut state = STATE.lock();
    state.check_dependencies(graph, dependencies)?;
    let condition = state.condition(graph, condition).ok_or(Code::INVALID_VALUE)?;
    if condition.context != context || !kind.may_have(bodies) {
        return Err(Code::INVALID_VALUE);
    }
    let within = Some(graph);
    let bodies = (0..bodies).map(|_| {
        let body = new_handle();
        state.graphs.insert(body, Graph { within, ..Graph::default() });
        body
    });
    let conditional = Arc::new(Conditional { condition, kind, bodies: bodies.collect() });
    let work = Work::Conditional(conditional.clone());
    Ok((state.insert(graph, dependencies.to_vec(), work, 0)?, conditional))
}

/// Whether a graph can be executable only once at a time: it allocates or frees memory, or has conditional nodes.
///
/// # Errors
/// `INVALID_VALUE` for an unknown graph.
pub(crate) fn is_single(graph: u64) -> Outcome<bool> {
    let state = STATE.lock();
    state.graph(graph)?;
    Ok(state.works(graph).any(Work::is_single))
}

/// Refuses a graph with a conditional node whose body has what no body may have.
///
/// # Errors
/// `NOT_SUPPORTED` for other nodes than kernels, copies, fills, child graphs, empty and conditional ones;
/// `INVALID_VALUE` for another context than the condition's.
pub(crate) fn check_bodies(graph: u64) -> Outcome {
    STATE.lock().check_bodies(graph, None)
}

/// Whether there is a node for each condition of a graph and the graphs of its nodes.
pub(crate) fn uses_all_conditions(graph: u64) -> bool {
    let state = STATE.lock();
    let (mut made, mut used) = (BTreeSet::new(), BTreeSet::new());
    let mut rest = vec![graph];
    while let Some(graph) = rest.pop() {
        let conditions = state.graphs.get(&graph).map_or(&[][..], |graph| &graph.conditions);
        made.extend(conditions.iter().map(|condition| condition.handle));
        for work in state.works(graph) {
            rest.extend(work.own_graphs());
            if let Work::Conditional(conditional) = work {
                used.insert(conditional.condition.handle);
            }
        }
    }
    made.is_subset(&used)
}

/// Removes a node with its edges.
///
/// # Errors
/// `INVALID_VALUE` for an unknown node, `NOT_SUPPORTED` in a graph that allocates or frees memory.
pub(crate) fn destroy_node(node: u64) -> Outcome {
    let mut state = STATE.lock();
    state.check_without_memory(state.node(node)?.graph)?;
    let Node { graph, work, .. } = state.nodes.remove(&node).ok_or(Code::INVALID_VALUE)?;
    let released = state.remove_all(&work);
    let others = state.graphs.get_mut(&graph).map(|graph| {
        graph.nodes.retain(|other| *other != node);
        graph.nodes.clone()
    });
    for other in others.unwrap_or_default() {
        if let Some(other) = state.nodes.get_mut(&other) {
            other.dependencies.retain(|dependency| *dependency != node);
        }
    }
    drop(state);
    drop(released);
    Ok(())
}

/// Adds edges, each from the first node to the second.
///
/// # Errors
/// `INVALID_VALUE` for nodes of another graph, from a node to itself, and for edges that exist;
/// no edge is added then.
pub(crate) fn add_edges(graph: u64, edges: &[(u64, u64)]) -> Outcome {
    let mut state = STATE.lock();
    let mut seen = BTreeSet::new();
    for (from, to) in edges {
        let exists = state.node_of(graph, *to)?.dependencies.contains(from);
        state.node_of(graph, *from)?;
        if exists || from == to || !seen.insert((from, to)) {
            return Err(Code::INVALID_VALUE);
        }
    }
    for (from, to) in edges {
        if let Some(node) = state.nodes.get_mut(to) {
            node.dependencies.push(*from);
        }
    }
    Ok(())
}

/// Removes edges.
///
/// # Errors
/// `INVALID_VALUE` for edges that do not exist, `NOT_SUPPORTED` in a graph that allocates or frees
/// memory; no edge is removed then.
pub(crate) fn remove_edges(graph: u64, edges: &[(u64, u64)]) -> Outcome {
    let mut state = STATE.lock();
    state.check_without_memory(graph)?;
    for (from, to) in edges {
        if !state.node_of(graph, *to)?.dependencies.contains(from) {
            return Err(Code::INVALID_VALUE);
        }
    }
    for (from, to) in edges {
        if let Some(node) = state.nodes.get_mut(to) {
            node.dependencies.retain(|dependency| dependency != from);
        }
    }
    Ok(())
}

/// The nodes of a graph, in the order of creation.
///
/// # Errors
/// `INVALID_VALUE` for an unknown graph, here and below.
pub(crate) fn nodes(graph: u64) -> Outcome<Vec<u64>> {
    Ok(STATE.lock().graph(graph)?.nodes.clone())
}

/// The nodes that depend on nothing.
pub(crate) fn roots(graph: u64) -> Outcome<Vec<u64>> {
    let state = STATE.lock();
    let nodes = state.graph(graph)?.nodes.iter().copied();
    Ok(nodes.filter(|node| state.dependencies(*node).is_empty()).collect())
}

/// All edges, from and to.
pub(crate) fn edges(graph: u64) -> Outcome<Vec<(u64, u64)>> {
    let state = STATE.lock();
    let nodes = state.graph(graph)?.nodes.iter();
    Ok(nodes.flat_map(|to| state.dependencies(*to).iter().map(|from| (*from, *to))).collect())
}

/// What a node depends on.
///
/// # Errors
/// `INVALID_VALUE` for an unknown node, here and below.
pub(crate) fn dependencies(node: u64) -> Outcome<Vec<u64>> {
    Ok(STATE.lock().node(node)?.dependencies.clone())
}

/// What depends on a node.
pub(crate) fn dependents(node: u64) -> Outcome<Vec<u64>> {
    let state = STATE.lock();
    let nodes = state.graph(state.node(node)?.graph)?.nodes.iter().copied();
    Ok(nodes.filter(|other| state.dependencies(*other).contains(&node)).collect())
}

/// What a node does.
pub(crate) fn work(node: u64) -> Outcome<Work> {
    Ok(STATE.lock().node(node)?.work.clone())
}

/// Has a node do something else of the same kind.
///
/// # Errors
/// `INVALID_VALUE` also for another kind.
pub(crate) fn set_work(node: u64, work: Work) -> Outcome {
    let mut state = STATE.lock();
    let old = state.node(node)?.work.clone();
    if old.kind() != work.kind() {
        return Err(Code::INVALID_VALUE);
    }
    let graph = state.node(node)?.graph;
    let work = state.take_in(graph, work)?;
    let released = state.remove_all(&old);
    if let Some(node) = state.nodes.get_mut(&node) {
        node.work = work;
    }
    drop(state);
    drop(released);
    Ok(())
}

/// A copy of a graph.
///
/// # Errors
/// `INVALID_VALUE` for an unknown graph, `NOT_SUPPORTED` for one that allocates or frees memory or has conditional
/// nodes.
pub(crate) fn clone(graph: u64) -> Outcome<u64> {
    let mut state = STATE.lock();
    state.check_copy(graph)?;
    state.copy(graph, None)
}

/// The copy of a node in a clone of its graph.
///
/// # Errors
/// `INVALID_VALUE` when the graph is no clone of the node's graph or has no copy of it any more.
pub(crate) fn find_in_clone(node: u64, clone: u64) -> Outcome<u64> {
    let state = STATE.lock();
    let clone = state.graph(clone)?;
    let known = state.node(node)?.graph == clone.original;
    let mut copies = clone.nodes.iter().copied().filter(|_| known);
    copies
        .find(|copy| state.nodes.get(copy).is_some_and(|copy| copy.original == node))
        .ok_or(Code::INVALID_VALUE)
}

/// Whether every one of `nodes` is one of `ends` or comes before one.
pub(crate) fn all_before(nodes: &[u64], ends: &[u64]) -> bool {
    let state = STATE.lock();
    let mut reached = BTreeSet::new();
    let mut rest = ends.to_vec();
    while let Some(node) = rest.pop() {
        if reached.insert(node) {
            rest.extend_from_slice(state.dependencies(node));
        }
    }
    nodes.iter().all(|node| reached.contains(node))
}

/// The steps of a graph, each after those that it depends on.
///
/// # Errors
/// `INVALID_VALUE` for an unknown graph, or one whose edges go in a circle.
pub(crate) fn steps(graph: u64) -> Outcome<Vec<Step>> {
    let mut steps = Vec::new();
    STATE.lock().flatten(graph, &[], &mut steps)?;
    Ok(steps)
}

impl State {
    fn graph(&self, graph: u64) -> Outcome<&Graph> {
        self.graphs.get(&graph).ok_or(Code::INVALID_VALUE)
    }

    fn node(&self, node: u64) -> Outcome<&Node> {
        self.nodes.get(&node).ok_or(Code::INVALID_VALUE)
    }

    fn node_of(&self, graph: u64, node: u64) -> Outcome<&Node> {
        self.node(node).ok().filter(|node| node.graph == graph).ok_or(Code::INVALID_VALUE)
    }

    fn dependencies(&self, node: u64) -> &[u64] {
        self.nodes.get(&node).map_or(&[], |node| &node.dependencies)
    }

    fn check_dependencies(&self, graph: u64, dependencies: &[u64]) -> Outcome {
        self.graph(graph)?;
        let mut seen = BTreeSet::new();
        for node in dependencies {
            self.node_of(graph, *node)?;
            if !seen.insert(node) {
                return Err(Code::INVALID_VALUE);
            }
        }
        Ok(())
    }

    fn insert(
        &mut self,
        graph: u64,
        dependencies: Vec<u64>,
        work: Work,
        original: u64,
    ) -> Outcome<u64> {
        let handle = new_handle();
        self.graphs.get_mut(&graph).ok_or(Code::INVALID_VALUE)?.nodes.push(handle);
        self.nodes.insert(handle, Node { graph, work, dependencies, original });
        Ok(handle)
    }

    /// Removes a graph with its nodes; gives what it kept alive, to be dropped without the lock.
    fn remove(&mut self, graph: u64) -> Vec<Held> {
        let Graph { nodes, mut objects, .. } = self.graphs.remove(&graph).unwrap_or_default();
        for node in nodes {
            if let Some(node) = self.nodes.remove(&node) {
                objects.extend(self.remove_all(&node.work));
            }
        }
        objects
    }

    /// Removes the graphs that belong to a node.
    fn remove_all(&mut self, work: &Work) -> Vec<Held> {
        work.own_graphs().iter().flat_map(|graph| self.remove(*graph)).collect()
    }

    /// What a node of a graph is to do, as the node keeps it: with a copy of its own of a child graph.
    fn take_in(&mut self, graph: u64, work: Work) -> Outcome<Work> {
        let Work::Child(child) = work else { return Ok(work) };
        self.check_copy(child)?;
        Ok(Work::Child(self.copy(child, Some(graph))?))
    }

    /// The condition of a graph, or of those that it is within.
    fn condition(&self, graph: u64, handle: u64) -> Option<Arc<Condition>> {
        let graph = self.graphs.get(&graph)?;
        let own = graph.conditions.iter().find(|condition| condition.handle == handle);
        own.cloned().or_else(|| self.condition(graph.within?, handle))
    }

    /// What the nodes of a graph do; nothing for an unknown graph.
    fn works(&self, graph: u64) -> impl Iterator<Item = &Work> {
        let nodes = self.graphs.get(&graph).into_iter().flat_map(|graph| &graph.nodes);
        nodes.filter_map(|node| self.nodes.get(node).map(|node| &node.work))
    }

    fn check_without_memory(&self, graph: u64) -> Outcome {
        if self.works(graph).any(Work::is_about_memory) {
            return Err(Code::NOT_SUPPORTED);
        }
        Ok(())
    }

    /// Refuses a graph that cannot be copied.
    fn check_copy(&self, graph: u64) -> Outcome {
        self.graph(graph)?;
        for work in self.works(graph) {
            if work.is_single() {
                return Err(Code::NOT_SUPPORTED);
            }
            work.own_graphs().iter().try_for_each(|own| self.check_copy(*own))?;
        }
        Ok(())
    }

    /// Refuses bodies with what no body may have. `context` is that of the body that the graph is in, if it is in one.
    fn check_bodies(&self, graph: u64, context: Option<u64>) -> Outcome {
        for work in self.works(graph) {
            if let Some(context) = context {
                work.check_in_body(context)?;
            }
            let inside = match work {
                Work::Conditional(conditional) => Some(conditional.condition.context),
                _ => context,
            };
            work.own_graphs().iter().try_for_each(|own| self.check_bodies(*own, inside))?;
        }
        Ok(())
    }

    /// Copies a graph that can be copied.
    fn copy(&mut self, graph: u64, within: Option<u64>) -> Outcome<u64> {
        let nodes = self.graph(graph)?.nodes.clone();
        let objects = self.graph(graph)?.objects.clone();
        let handle = new_handle();
        let copy = Graph { within, original: graph, objects, ..Graph::default() };
        self.graphs.insert(handle, copy);
        let mut copies = BTreeMap::new();
        for node in &nodes {
            let work = match self.node(*node)?.work.clone() {
                Work::Child(child) => Work::Child(self.copy(child, Some(handle))?),
                other => other,
            };
            copies.insert(*node, self.insert(handle, Vec::new(), work, *node)?);
        }
        for node in &nodes {
            let dependencies = self.dependencies(*node).iter();
            let dependencies = dependencies.filter_map(|d| copies.get(d).copied()).collect();
            if let Some(copy) = self.nodes.get_mut(&copies[node]) {
                copy.dependencies = dependencies;
            }
        }
        Ok(handle)
    }

    /// The steps of each body.
    fn bodies(&self, conditional: &Conditional) -> Outcome<Vec<Vec<Step>>> {
        let steps = |body: &u64| {
            let mut steps = Vec::new();
            self.flatten(*body, &[], &mut steps)?;
            Ok(steps)
        };
        conditional.bodies.iter().map(steps).collect()
    }

    /// Appends the steps of a graph whose roots come after some others; gives its last steps.
    fn flatten(&self, graph: u64, before: &[usize], steps: &mut Vec<Step>) -> Outcome<Vec<usize>> {
        let mut rest = self.graph(graph)?.nodes.clone();
        let mut place: BTreeMap<u64, usize> = BTreeMap::new();
        while !rest.is_empty() {
            // In the order of creation as far as the edges allow.
            let ready = |node: &u64| self.dependencies(*node).iter().all(|d| place.contains_key(d));
            let index = rest.iter().position(ready).ok_or(Code::INVALID_VALUE)?;
            let node = rest.remove(index);
            let dependencies = self.dependencies(node);
            let mut after: Vec<usize> = dependencies.iter().map(|d| place[d]).collect();
            if dependencies.is_empty() {
                after.extend_from_slice(before);
            }
            let work = self.node(node)?.work.clone();
            let bodies = match &work {
                Work::Conditional(conditional) => self.bodies(conditional)?,
                _ => Vec::new(),
            };
            steps.push(Step { node, work: work.clone(), after, bodies });
            place.insert(node, steps.len() - 1);
            if let Work::Child(child) = work {
                let mut ends = self.flatten(child, &[steps.len() - 1], steps)?;
                ends.push(place[&node]);
                steps.push(Step { node: 0, work: Work::Empty, after: ends, bodies: Vec::new() });
                place.insert(node, steps.len() - 1);
            }
        }
        let inner: BTreeSet<usize> =
            steps.iter().flat_map(|step| step.after.iter().copied()).collect();
        Ok(place.into_values().filter(|step| !inner.contains(step)).collect())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn steps_follow_the_edges_and_dissolve_children() {
        let child = create();
        let inner = add(child, &[], Work::Empty).unwrap();
        let graph = create();
        let last = add(graph, &[], Work::Empty).unwrap();
        let nested = add(graph, &[], Work::Child(child)).unwrap();
        add_edges(graph, &[(nested, last)]).unwrap();
        assert_eq!(add_edges(graph, &[(nested, last)]), Err(Code::INVALID_VALUE));
        assert_eq!(add_edges(graph, &[(inner, last)]), Err(Code::INVALID_VALUE));
        let steps = steps(graph).unwrap();
        let kinds: Vec<u32> = steps.iter().map(|step| step.work.kind()).collect();
        assert_eq!(kinds, [4, 5, 5, 5]);
        assert_eq!(steps[1].after, [0]);
        assert!(steps[1].node != inner, "the child is a copy");
        assert_eq!((steps[2].node, steps[3].node, &steps[3].after[..]), (0, last, &[2][..]));
        assert!(all_before(&[nested], &[last]) && !all_before(&[last], &[nested]));

        add_edges(graph, &[(last, nested)]).unwrap();
        assert!(super::steps(graph).is_err(), "a circle");
        let copy = clone(graph).unwrap();
        assert_eq!(edges(copy).unwrap().len(), 2);
        assert!(find_in_clone(last, copy).is_ok());
        assert!(find_in_clone(inner, copy).is_err());
        let Work::Child(embedded) = work(nested).unwrap() else { panic!("no child") };
        assert_eq!(destroy(embedded), Err(Code::INVALID_VALUE));
        destroy_node(nested).unwrap();
        assert!(nodes(embedded).is_err() && dependencies(last).unwrap().is_empty());
        for graph in [child, graph, copy] {
            destroy(graph).unwrap();
        }
    }
}
