//! What nodes of graphs do.

use std::sync::Arc;

use crate::conditions::Conditional;
use crate::events::Event;
use crate::graph_memory::GraphMemory;
use crate::operations::Operation;
use crate::status::{Code, Outcome};

/// What a node does.
#[derive(Clone)]
pub(crate) enum Work {
    /// Work of the context with this handle.
    Operation(Operation, u64),
    /// All of another graph: the handle of the node's own copy.
    Child(u64),
    /// Nothing but to join dependencies.
    Empty,
    /// Marks an event.
    Record(u64, Arc<Event>),
    /// Waits for an event.
    Wait(u64, Arc<Event>),
    /// Allocates memory.
    Allocate(Arc<GraphMemory>),
    /// Frees memory that a graph has allocated.
    Free(Arc<GraphMemory>),
    /// Some of its own graphs, as a condition says.
    Conditional(Arc<Conditional>),
}

impl Work {
    /// `CUgraphNodeType`.
    pub(crate) fn kind(&self) -> u32 {
        match self {
            Work::Operation(Operation::Kernel(_), _) => 0,
            Work::Operation(Operation::Copy(_), _) => 1,
            Work::Operation(Operation::Fill(_), _) => 2,
            Work::Operation(Operation::Host(_), _) => 3,
            Work::Operation(Operation::Values(_), _) => 12,
            Work::Child(_) => 4,
            Work::Empty => 5,
            Work::Wait(..) => 6,
            Work::Record(..) => 7,
            Work::Allocate(_) => 10,
            Work::Free(_) => 11,
            Work::Conditional(_) => 13,
        }
    }

    /// Whether it allocates or frees memory: graphs with such nodes can be changed less.
    pub(crate) fn is_about_memory(&self) -> bool {
        matches!(self, Work::Allocate(_) | Work::Free(_))
    }

    /// Whether there can be only one of it: graphs with such nodes cannot be copied, nor be executable twice.
    pub(crate) fn is_single(&self) -> bool {
        self.is_about_memory() || matches!(self, Work::Conditional(_))
    }

    /// The handles of the graphs that belong to the node.
    pub(crate) fn own_graphs(&self) -> &[u64] {
        match self {
            Work::Child(graph) => std::slice::from_ref(graph),
            Work::Conditional(conditional) => &conditional.bodies,
            _ => &[],
        }
    }

    /// Refuses what a body in this context cannot have.
    ///
    /// # Errors
    /// `NOT_SUPPORTED` for the kind, `INVALID_VALUE` for another context.
    pub(crate) fn check_in_body(&self, context: u64) -> Outcome {
        match self {
            Work::Operation(
                Operation::Kernel(_) | Operation::Copy(_) | Operation::Fill(_),
                owner,
            ) => {
                if *owner == context {
                    Ok(())
                } else {
                    Err(Code::INVALID_VALUE)
                }
            }
            Work::Conditional(conditional) if conditional.condition.context != context => {
                Err(Code::INVALID_VALUE)
            }
            Work::Child(_) | Work::Empty | Work::Conditional(_) => Ok(()),
            _ => Err(Code::NOT_SUPPORTED),
        }
    }
}
