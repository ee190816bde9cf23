//! Graphs that are ready to be launched. A launch submits the steps one after the other to one
//! stream, so that branches of a graph do not overlap; nothing in the API promises that they do.

use std::collections::BTreeMap;
use std::sync::Arc;

use parking_lot::Mutex;

use crate::capture;
use crate::conditions::{Condition, Conditional, Kind};
use crate::context::{CONTEXTS, Context};
use crate::graph_memory::GraphMemory;
use crate::graphs::{self, Step, Work};
use crate::handles::{Table, new_handle};
use crate::memory_operations::are_alike;
use crate::operations::Operation;
use crate::status::{Code, Outcome};
use crate::streams::{Position, Stream};
use crate::user_objects::Held;

/// All executable graphs.
pub(crate) static EXECUTABLES: Table<Executable> = Table::new();

/// A graph that can be launched. It is independent of the graph that it was made of.
pub(crate) struct Executable {
    /// The value that programs hold.
    pub(crate) handle: u64,
    /// Flags as given.
    pub(crate) flags: u64,
    /// Handle of the graph that it was made of.
    graph: u64,
    /// User objects that it keeps alive; its launches do, too.
    objects: Vec<Held>,
    state: Mutex<State>,
}

/// `CUDA_GRAPH_INSTANTIATE_FLAG_AUTO_FREE_ON_LAUNCH`.
pub(crate) const AUTO_FREE: u64 = 1;

struct State {
    steps: Vec<Step>,
    /// Nodes that are passed over.
    disabled: Vec<u64>,
    /// The end of the last launch: two launches do not overlap.
    last: Option<Position>,
}

/// Work of a launch that a stream does as one piece.
enum Part {
    /// An operation, in its context.
    Operation(Operation, Arc<Context>),
    /// A conditional node, in its context, and what is done in each of its bodies.
    Conditional(Arc<Conditional>, Arc<Context>, Vec<Vec<Part>>),
}

impl Part {
    fn run(&self) {
        let (conditional, context, bodies) = match self {
            Part::Operation(operation, context) => return operation.run(context),
            Part::Conditional(conditional, context, bodies) => (conditional, context, bodies),
        };
        let run = |body: usize| bodies.get(body).into_iter().flatten().for_each(Part::run);
        let value = || conditional.condition.value();
        match conditional.kind {
            Kind::If => run(usize::from(value() == 0)),
            Kind::Switch => run(value() as usize),
            Kind::While => {
                // Nothing sets the value any more where work has failed.
                while value() != 0 && !context.has_failed() {
                    run(0);
                }
            }
        }
    }
}

/// Why an executable graph could not be made like another graph: `CUgraphExecUpdateResult` and the
/// node that is at fault, or 0.
pub(crate) struct Difference {
    /// The number in the API.
    pub(crate) result: u32,
    /// Handle of the new graph's node.
    pub(crate) node: u64,
}

const TOPOLOGY_CHANGED: u32 = 2;
const KIND_CHANGED: u32 = 3;
const PARAMETERS_CHANGED: u32 = 5;
const UNSUPPORTED_FUNCTION_CHANGE: u32 = 7;

/// Makes a graph executable.
///
/// # Errors
/// `INVALID_VALUE` for an unknown graph, one whose edges go in a circle, and one with a condition that no node has; what
/// is wrong with bodies, as [`graphs::check_bodies`];
/// `NOT_SUPPORTED` for one that allocates or frees memory or has conditional nodes, and has an executable form already.
pub(crate) fn instantiate(graph: u64, flags: u64) -> Outcome<Arc<Executable>> {
    let steps = graphs::steps(graph)?;
    graphs::check_bodies(graph)?;
    if !graphs::uses_all_conditions(graph) {
        return Err(Code::INVALID_VALUE);
    }
    if graphs::is_single(graph)? && EXECUTABLES.all().iter().any(|other| other.graph == graph) {
        return Err(Code::NOT_SUPPORTED);
    }
    let handle = new_handle();
    let state = Mutex::new(State { steps, disabled: Vec::new(), last: None });
    let objects = graphs::objects(graph)?;
    let executable = Arc::new(Executable { handle, flags, graph, objects, state });
    EXECUTABLES.insert(handle, executable.clone());
    Ok(executable)
}

/// What keeps the work of a node from being replaced by other work of the same kind.
fn hindrance(old: &Work, new: &Work) -> Option<u32> {
    match (old, new) {
        (Work::Operation(Operation::Kernel(_), one), Work::Operation(_, other)) => {
            (one != other).then_some(UNSUPPORTED_FUNCTION_CHANGE)
        }
        (
            Work::Operation(Operation::Values(some), one),
            Work::Operation(Operation::Values(others), other),
        ) => (one != other || !are_alike(some, others)).then_some(PARAMETERS_CHANGED),
        (Work::Operation(_, one), Work::Operation(_, other)) => {
            (one != other).then_some(PARAMETERS_CHANGED)
        }
        (Work::Allocate(one), Work::Allocate(other)) | (Work::Free(one), Work::Free(other)) => {
            (!Arc::ptr_eq(one, other)).then_some(PARAMETERS_CHANGED)
        }
        (Work::Conditional(one), Work::Conditional(other)) => {
            let what = |node: &Conditional| (node.kind, node.bodies.len(), node.condition.context);
            (what(one) != what(other)).then_some(PARAMETERS_CHANGED)
        }
        _ => None,
    }
}

/// The first difference between steps that cannot be taken over.
fn compare(steps: &[Step], others: &[Step]) -> Result<(), Difference> {
    let differs = |result, node| Err(Difference { result, node });
    if steps.len() != others.len() {
        return differs(TOPOLOGY_CHANGED, 0);
    }
    for (old, new) in steps.iter().zip(others) {
        if old.work.kind() != new.work.kind() {
            return differs(KIND_CHANGED, new.node);
        }
        if old.after != new.after {
            return differs(TOPOLOGY_CHANGED, new.node);
        }
        if let Some(result) = hindrance(&old.work, &new.work) {
            return differs(result, new.node);
        }
        for (old, new) in old.bodies.iter().zip(&new.bodies) {
            compare(old, new)?;
        }
    }
    Ok(())
}

/// Takes over the work of steps that do not differ.
fn take_over(steps: &mut [Step], others: &[Step]) {
    for (old, new) in steps.iter_mut().zip(others) {
        old.work = new.work.clone();
        for (old, new) in old.bodies.iter_mut().zip(&new.bodies) {
            take_over(old, new);
        }
    }
}

/// The step of a node, in bodies too.
fn find_step(steps: &mut [Step], node: u64) -> Option<&mut Step> {
    for step in steps {
        if step.node == node {
            return Some(step);
        }
        if let Some(found) = step.bodies.iter_mut().find_map(|body| find_step(body, node)) {
            return Some(found);
        }
    }
    None
}

/// The conditions of steps, in bodies too.
fn conditions(steps: &[Step], found: &mut Vec<Arc<Condition>>) {
    for step in steps {
        if let Work::Conditional(conditional) = &step.work {
            found.push(conditional.condition.clone());
        }
        step.bodies.iter().for_each(|body| conditions(body, found));
    }
}

impl Executable {
    /// Launches the graph in a stream; in one that captures, adds it as a child.
    ///
    /// # Errors
    /// `CONTEXT_IS_DESTROYED` when the context of a node is gone, and what it has failed with;
    /// `INVALID_VALUE` when memory that the graph allocates is still allocated, or memory that it
    /// frees is not; `OUT_OF_MEMORY`. Nothing is submitted then.
    pub(crate) fn launch(&self, context: &Context, stream: &Arc<Stream>) -> Outcome {
        let mut state = self.state.lock();
        if capture::info(stream).is_some() {
            return state.capture(stream);
        }
        let mut ready = Vec::new();
        for step in &state.steps {
            let part = state.part(step)?;
            if !state.disabled.contains(&step.node) {
                ready.push((step.work.clone(), part));
            }
        }
        let mut memory = state.prepare_memory(self.flags & AUTO_FREE != 0)?;
        let mut after: Vec<Position> = state.last.take().into_iter().collect();
        let mut conditions = Vec::new();
        self::conditions(&state.steps, &mut conditions);
        if !conditions.is_empty() {
            let after = std::mem::take(&mut after);
            let begin = move || conditions.iter().for_each(|condition| condition.begin());
            context.submit(stream, after, begin)?;
        }
        for (work, part) in ready {
            match (work, part) {
                (_, Some(part)) => {
                    let after = std::mem::take(&mut after);
                    context.submit(stream, after, move || part.run())?;
                }
                (Work::Record(_, event), _) => event.record(context, stream)?,
                (Work::Wait(_, event), _) => after.extend(event.position()),
                (Work::Allocate(allocated), _) => allocated.allocate(),
                (Work::Free(freed), _) => memory.extend(freed.free()?),
                _ => {}
            }
        }
        // What the work needs lives until it is done.
        let kept = (self.objects.clone(), memory);
        let last = match after.is_empty() && kept.0.is_empty() && kept.1.is_empty() {
            true => stream.last(),
            false => context.submit(stream, after, move || drop(kept))?,
        };
        state.last = Some(last);
        Ok(())
    }

    /// Has the executable form of a graph's node do something else of the same kind.
    ///
    /// # Errors
    /// `INVALID_VALUE` for a node that is not in it, and for work of another kind or context.
    pub(crate) fn set_work(&self, node: u64, work: Work) -> Outcome {
        let mut state = self.state.lock();
        let step = state.step(node)?;
        if step.work.kind() != work.kind() || hindrance(&step.work, &work).is_some() {
            return Err(Code::INVALID_VALUE);
        }
        step.work = work;
        Ok(())
    }

    /// Whether a node is executed.
    ///
    /// # Errors
    /// `INVALID_VALUE` unless it is a kernel, a copy or a fill in this graph, here and below.
    pub(crate) fn is_enabled(&self, node: u64) -> Outcome<bool> {
        let mut state = self.state.lock();
        state.check_can_be_disabled(node)?;
        Ok(!state.disabled.contains(&node))
    }

    /// Has a node executed or passed over.
    pub(crate) fn set_enabled(&self, node: u64, enabled: bool) -> Outcome {
        let mut state = self.state.lock();
        state.check_can_be_disabled(node)?;
        state.disabled.retain(|other| *other != node);
        if !enabled {
            state.disabled.push(node);
        }
        Ok(())
    }

    /// Takes over all parameters of a graph of the same structure.
    ///
    /// # Errors
    /// The first difference that cannot be taken over; nothing is changed then.
    pub(crate) fn update(&self, steps: &[Step]) -> Result<(), Difference> {
        let mut state = self.state.lock();
        compare(&state.steps, steps)?;
        take_over(&mut state.steps, steps);
        Ok(())
    }

    /// Takes over the parameters of a graph into the executable form of a child graph.
    ///
    /// # Errors
    /// `INVALID_VALUE` when the node is no child of the same structure; nothing is changed then.
    pub(crate) fn set_child(&self, node: u64, graph: u64) -> Outcome {
        let Work::Child(own) = graphs::work(node)? else { return Err(Code::INVALID_VALUE) };
        let (old, new) = (graphs::steps(own)?, graphs::steps(graph)?);
        let alike = |(old, new): (&Step, &Step)| {
            old.work.kind() == new.work.kind() && old.after == new.after
        };
        if old.len() != new.len() || !old.iter().zip(&new).all(alike) {
            return Err(Code::INVALID_VALUE);
        }
        let pairs: Vec<_> = old.iter().zip(&new).filter(|(old, _)| old.node != 0).collect();
        let mut state = self.state.lock();
        for (old, new) in &pairs {
            if hindrance(&state.step(old.node)?.work, &new.work).is_some() {
                return Err(Code::INVALID_VALUE);
            }
        }
        for (old, new) in pairs {
            state.step(old.node)?.work = new.work.clone();
        }
        Ok(())
    }
}

impl State {
    fn step(&mut self, node: u64) -> Outcome<&mut Step> {
        let found = if node == 0 { None } else { find_step(&mut self.steps, node) };
        found.ok_or(Code::INVALID_VALUE)
    }

    /// What a stream does for a step, if that is a piece of work.
    ///
    /// # Errors
    /// As [`Executable::launch`].
    fn part(&self, step: &Step) -> Outcome<Option<Part>> {
        let owner = match &step.work {
            Work::Operation(_, owner) => *owner,
            Work::Conditional(conditional) => conditional.condition.context,
            _ => return Ok(None),
        };
        let owner = CONTEXTS.get(owner).ok_or(Code::CONTEXT_IS_DESTROYED)?;
        owner.check()?;
        let parts = |steps: &Vec<Step>| {
            let mut parts = Vec::new();
            for step in steps {
                let part = self.part(step)?;
                parts.extend(part.filter(|_| !self.disabled.contains(&step.node)));
            }
            Ok(parts)
        };
        Ok(match &step.work {
            Work::Operation(operation, _) => Some(Part::Operation(operation.clone(), owner)),
            Work::Conditional(conditional) => {
                let bodies = step.bodies.iter().map(parts).collect::<Outcome<_>>()?;
                Some(Part::Conditional(conditional.clone(), owner, bodies))
            }
            _ => None,
        })
    }

    /// Makes the memory ready that the steps allocate, and frees what is still allocated if that is
    /// wanted; all memory that the steps name.
    ///
    /// # Errors
    /// As [`Executable::launch`]; nothing is freed then.
    fn prepare_memory(&self, frees: bool) -> Outcome<Vec<Arc<GraphMemory>>> {
        let mut all = Vec::new();
        let mut allocated: BTreeMap<u64, bool> = BTreeMap::new();
        let mut left = Vec::new();
        for step in &self.steps {
            let (memory, allocates) = match &step.work {
                Work::Allocate(memory) => (memory, true),
                Work::Free(memory) => (memory, false),
                _ => continue,
            };
            let now = *allocated.entry(memory.address).or_insert_with(|| memory.is_allocated());
            match (allocates, now) {
                (true, true) if frees => left.push(memory.clone()),
                (true, false) | (false, true) => {}
                _ => return Err(Code::INVALID_VALUE),
            }
            allocated.insert(memory.address, allocates);
            all.push(memory.clone());
        }
        all.iter().try_for_each(|memory| memory.prepare())?;
        for memory in left {
            all.extend(memory.free()?);
        }
        Ok(all)
    }

    fn check_can_be_disabled(&mut self, node: u64) -> Outcome {
        match self.step(node)?.work {
            Work::Operation(Operation::Host(_) | Operation::Values(_), _) => {
                Err(Code::INVALID_VALUE)
            }
            Work::Operation(..) => Ok(()),
            _ => Err(Code::INVALID_VALUE),
        }
    }

    /// Adds the steps, as a child graph, to the capture of a stream.
    ///
    /// # Errors
    /// `NOT_SUPPORTED` with conditional nodes, which a child graph cannot have.
    fn capture(&self, stream: &Stream) -> Outcome {
        if self.steps.iter().any(|step| matches!(step.work, Work::Conditional(_))) {
            return Err(Code::NOT_SUPPORTED);
        }
        let graph = graphs::create();
        let outcome = (|| {
            let mut nodes = Vec::new();
            for step in &self.steps {
                let after: Vec<u64> = step.after.iter().map(|index| nodes[*index]).collect();
                let work = match &step.work {
                    Work::Child(_) => Work::Empty,
                    _ if self.disabled.contains(&step.node) => Work::Empty,
                    other => other.clone(),
                };
                nodes.push(graphs::add(graph, &after, work)?);
            }
            capture::record(stream, Work::Child(graph)).map(|_| ())
        })();
        graphs::destroy(graph).and(outcome)
    }
}
