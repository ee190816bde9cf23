//! Graphs: structure and queries.

use super::arguments::{In, Out};
use super::capture::list;
use super::driver_api;
use super::edge_data::{EdgeData, check_edges};
use crate::graphs::{self, Work};
use crate::status::{Code, Outcome};

/// Gives a list the way that the API does: without a place for it, only its length; otherwise at
/// most as many elements as there is room for, and zeros in the rest of the room.
fn answer(found: Vec<u64>, places: &[&Out<u64>], count: &Out<usize>) -> Outcome {
    let length = found.len() / places.len();
    if places.iter().all(|place| place.check().is_err()) {
        return count.set(length);
    }
    let room = count.get()?;
    for (part, place) in places.iter().enumerate() {
        let values = found.iter().skip(part).step_by(places.len()).copied();
        place.set_all(values.chain(std::iter::repeat(0)).take(room))?;
    }
    count.set(length.min(room))
}

fn edges(graph: u64, from: &Out<u64>, to: &Out<u64>, count: &Out<usize>) -> Outcome {
    if from.check().is_err() != to.check().is_err() {
        return Err(Code::INVALID_VALUE);
    }
    let edges = graphs::edges(graph)?.into_iter().flat_map(|(from, to)| [from, to]);
    answer(edges.collect(), &[from, to], count)
}

fn pairs(from: &In<u64>, to: &In<u64>, count: usize) -> Outcome<Vec<(u64, u64)>> {
    Ok(list(from, count)?.into_iter().zip(list(to, count)?).collect())
}

/// All edges are plain ones.
fn plain_edges(edges: &Out<EdgeData>, count: &Out<usize>) -> Outcome {
    if edges.check().is_ok() {
        edges.set_all(std::iter::repeat_n([0; 8], count.get()?))?;
    }
    Ok(())
}

driver_api! {
    call fn cuGraphCreate(out: Out<u64>, flags: u32) {
        out.check()?;
        if flags != 0 {
            return Err(Code::INVALID_VALUE);
        }
        out.set(graphs::create())
    }

    call fn cuGraphDestroy(graph: u64) {
        graphs::destroy(graph)
    }

    call fn cuGraphDestroyNode(node: u64) {
        graphs::destroy_node(node)
    }

    call fn cuGraphClone(out: Out<u64>, graph: u64) {
        out.check()?;
        out.set(graphs::clone(graph)?)
    }

    call fn cuGraphNodeFindInClone(out: Out<u64>, node: u64, clone: u64) {
        out.check()?;
        out.set(graphs::find_in_clone(node, clone)?)
    }

    call fn cuGraphNodeGetType(node: u64, out: Out<u32>) {
        out.set(graphs::work(node)?.kind())
    }

    call fn cuGraphChildGraphNodeGetGraph(node: u64, out: Out<u64>) {
        match graphs::work(node)? {
            Work::Child(graph) => out.set(graph),
            _ => Err(Code::INVALID_VALUE),
        }
    }

    call fn cuGraphGetNodes(graph: u64, nodes: Out<u64>, count: Out<usize>) {
        answer(graphs::nodes(graph)?, &[&nodes], &count)
    }

    call fn cuGraphGetRootNodes(graph: u64, nodes: Out<u64>, count: Out<usize>) {
        answer(graphs::roots(graph)?, &[&nodes], &count)
    }

    call fn cuGraphGetEdges(graph: u64, from: Out<u64>, to: Out<u64>, count: Out<usize>) {
        edges(graph, &from, &to, &count)
    }

    call fn cuGraphGetEdges_v2(
        graph: u64, from: Out<u64>, to: Out<u64>, data: Out<EdgeData>, count: Out<usize>,
    ) {
        edges(graph, &from, &to, &count)?;
        plain_edges(&data, &count)
    }

    call fn cuGraphNodeGetDependencies(node: u64, nodes: Out<u64>, count: Out<usize>) {
        answer(graphs::dependencies(node)?, &[&nodes], &count)
    }

    call fn cuGraphNodeGetDependencies_v2(
        node: u64, nodes: Out<u64>, data: Out<EdgeData>, count: Out<usize>,
    ) {
        answer(graphs::dependencies(node)?, &[&nodes], &count)?;
        plain_edges(&data, &count)
    }

    call fn cuGraphNodeGetDependentNodes(node: u64, nodes: Out<u64>, count: Out<usize>) {
        answer(graphs::dependents(node)?, &[&nodes], &count)
    }

    call fn cuGraphNodeGetDependentNodes_v2(
        node: u64, nodes: Out<u64>, data: Out<EdgeData>, count: Out<usize>,
    ) {
        answer(graphs::dependents(node)?, &[&nodes], &count)?;
        plain_edges(&data, &count)
    }

    call fn cuGraphAddDependencies(graph: u64, from: In<u64>, to: In<u64>, count: usize) {
        graphs::add_edges(graph, &pairs(&from, &to, count)?)
    }

    call fn cuGraphAddDependencies_v2(
        graph: u64, from: In<u64>, to: In<u64>, data: In<EdgeData>, count: usize,
    ) {
        check_edges(&data, count)?;
        graphs::add_edges(graph, &pairs(&from, &to, count)?)
    }

    call fn cuGraphRemoveDependencies(graph: u64, from: In<u64>, to: In<u64>, count: usize) {
        graphs::remove_edges(graph, &pairs(&from, &to, count)?)
    }

    call fn cuGraphRemoveDependencies_v2(
        graph: u64, from: In<u64>, to: In<u64>, data: In<EdgeData>, count: usize,
    ) {
        check_edges(&data, count)?;
        graphs::remove_edges(graph, &pairs(&from, &to, count)?)
    }
}
