//! Conditional nodes of graphs.

use cudarc::driver::sys;

use super::arguments::{In, Out};
use super::capture::list;
use super::driver_api;
use super::graph_parts::context_or_current;
use crate::conditions::{Condition, Kind};
use crate::graphs;
use crate::status::{Code, Outcome};

/// `CU_GRAPH_COND_ASSIGN_DEFAULT`.
const ASSIGN_DEFAULT: u32 = 1;
/// The most bodies of a node.
const MOST_BODIES: u32 = 1 << 16;

/// `CUDA_CONDITIONAL_NODE_PARAMS`.
#[repr(C)]
#[derive(Clone, Copy)]
pub(super) struct Parameters {
    condition: u64,
    kind: u32,
    size: u32,
    bodies: u64,
    context: u64,
}

const _: () = assert!(size_of::<Parameters>() == size_of::<sys::CUDA_CONDITIONAL_NODE_PARAMS>());

/// Adds a node, and stores where its graphs are in the parameters.
///
/// # Errors
/// As [`graphs::add_conditional`], `INVALID_CONTEXT` for an unknown context, and `OUT_OF_MEMORY` for too many bodies.
pub(super) fn add(
    out: &Out<u64>,
    graph: u64,
    dependencies: &In<u64>,
    count: usize,
    place: &Out<Parameters>,
) -> Outcome {
    out.check()?;
    let mut parameters = place.get()?;
    let kind = Kind::try_from(parameters.kind)?;
    if parameters.size > MOST_BODIES {
        return Err(Code::OUT_OF_MEMORY);
    }
    let dependencies = list(dependencies, count)?;
    let condition = (parameters.condition, context_or_current(parameters.context)?.handle);
    let size = parameters.size as usize;
    let (node, conditional) = graphs::add_conditional(graph, &dependencies, condition, kind, size)?;
    // The node keeps the list alive.
    parameters.bodies = conditional.bodies.as_ptr() as u64;
    place.set(parameters)?;
    out.set(node)
}

driver_api! {
    call fn cuGraphConditionalHandleCreate(
        out: Out<u64>, graph: u64, context: u64, value: u32, flags: u32,
    ) {
        out.check()?;
        if flags & !ASSIGN_DEFAULT != 0 {
            return Err(Code::INVALID_VALUE);
        }
        let context = context_or_current(context)?.handle;
        let condition = Condition::new(context, value, flags & ASSIGN_DEFAULT != 0);
        graphs::add_condition(graph, &condition)?;
        out.set(condition.handle)
    }
}
