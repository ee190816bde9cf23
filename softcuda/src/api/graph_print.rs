//! Graphs as text for programs that draw them.

use std::fmt::Write as _;

use super::arguments::Text;
use super::driver_api;
use crate::graphs::{self, Work};
use crate::operations::Operation;
use crate::status::{Code, Outcome};

/// The largest flag of `CUgraphDebugDot_flags`. All that there is to say is said without any, but for what the nodes'
/// handles are.
const LARGEST_FLAG: u32 = 1 << 15;
/// `CU_GRAPH_DEBUG_DOT_FLAGS_VERBOSE` and `CU_GRAPH_DEBUG_DOT_FLAGS_HANDLES`: with handles.
const WITH_HANDLES: u32 = 1 | 1 << 10;

/// What a node does, in a few words.
fn label(work: &Work) -> String {
    match work {
        Work::Operation(Operation::Kernel(launch), _) => {
            let name = launch.function.name.to_string_lossy();
            format!("kernel {} {:?} {:?}", name, launch.shape.grid, launch.shape.block)
        }
        Work::Operation(Operation::Copy(_), _) => "memcpy".to_owned(),
        Work::Operation(Operation::Fill(_), _) => "memset".to_owned(),
        Work::Operation(Operation::Host(_), _) => "host".to_owned(),
        Work::Operation(Operation::Values(_), _) => "memory operations".to_owned(),
        Work::Child(_) => "child graph".to_owned(),
        Work::Empty => "empty".to_owned(),
        Work::Record(..) => "event record".to_owned(),
        Work::Wait(..) => "event wait".to_owned(),
        Work::Allocate(_) => "allocation".to_owned(),
        Work::Free(_) => "free".to_owned(),
        Work::Conditional(conditional) => format!("conditional {:?}", conditional.kind),
    }
}

/// A graph in the language of `dot`.
fn dot(graph: u64, flags: u32) -> Outcome<String> {
    let nodes = graphs::nodes(graph)?;
    let number = |node| nodes.iter().position(|other| *other == node).unwrap_or_default();
    let mut text = "digraph graph_1 {\n".to_owned();
    let fault = |_| Code::UNKNOWN;
    for (index, node) in nodes.iter().enumerate() {
        let label = label(&graphs::work(*node)?).replace(['"', '\\'], "_");
        let handle = if flags & WITH_HANDLES != 0 { format!(" {node:#x}") } else { String::new() };
        writeln!(text, "  node_{index} [label=\"{index}: {label}{handle}\"];").map_err(fault)?;
    }
    for (from, to) in graphs::edges(graph)? {
        writeln!(text, "  node_{} -> node_{};", number(from), number(to)).map_err(fault)?;
    }
    text.push_str("}\n");
    Ok(text)
}

driver_api! {
    call fn cuGraphDebugDotPrint(graph: u64, path: Text, flags: u32) {
        let path = path.get()?;
        if flags >= 2 * LARGEST_FLAG {
            return Err(Code::INVALID_VALUE);
        }
        std::fs::write(path, dot(graph, flags)?).map_err(|_| Code::OPERATING_SYSTEM)
    }
}
