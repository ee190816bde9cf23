//! What all functions about graphs need.

use std::sync::Arc;

use super::arguments::{In, Out};
use super::capture::list;
use crate::context::{self, Context};
use crate::executables::{EXECUTABLES, Executable};
use crate::graphs::{self, Work};
use crate::status::{Code, Outcome};

/// The context of a handle; the current one for 0.
pub(super) fn context_or_current(handle: u64) -> Outcome<Arc<Context>> {
    if handle == 0 { context::current() } else { context::by_handle(handle) }
}

/// The executable graph of a handle.
pub(super) fn find(handle: u64) -> Outcome<Arc<Executable>> {
    EXECUTABLES.get(handle).ok_or(Code::INVALID_VALUE)
}

/// Adds a node.
pub(super) fn add(
    out: &Out<u64>,
    graph: u64,
    dependencies: &In<u64>,
    count: usize,
    work: Work,
) -> Outcome {
    out.check()?;
    out.set(graphs::add(graph, &list(dependencies, count)?, work)?)
}
