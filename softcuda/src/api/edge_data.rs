//! What the API says of edges between nodes of graphs.

use super::arguments::In;
use crate::status::{Code, Outcome};

/// `CUgraphEdgeData`; the plain kind is all zeros.
pub(super) type EdgeData = [u8; 8];

/// Fails for edges other than plain ones.
///
/// # Errors
/// `NOT_SUPPORTED`.
pub(super) fn check_edges(edges: &In<EdgeData>, count: usize) -> Outcome {
    for index in 0..if edges.is_null() { 0 } else { count } {
        if edges.at(index)? != [0; 8] {
            return Err(Code::NOT_SUPPORTED);
        }
    }
    Ok(())
}
