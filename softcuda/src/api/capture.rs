//! Stream capture.

use std::cell::RefCell;

use super::arguments::{In, Out};
use super::driver_api;
use super::edge_data::{EdgeData, check_edges};
use crate::capture::{self, Mode, THREAD_MODE};
use crate::status::{Code, Outcome};
use crate::submission::{DefaultStream, stream_and_context};

/// `CUstreamCaptureStatus`.
const NONE: u32 = 0;
const ACTIVE: u32 = 1;
const INVALIDATED: u32 = 2;

/// `CU_STREAM_ADD_CAPTURE_DEPENDENCIES` and `CU_STREAM_SET_CAPTURE_DEPENDENCIES`.
const ADD: u32 = 0;
const SET: u32 = 1;

thread_local! {
    /// What the last question of this thread was answered with; the program gets its address.
    static ANSWER: RefCell<Vec<u64>> = const { RefCell::new(Vec::new()) };
    /// The edges of that answer, all of them plain ones: cuda-bindings reads them wherever there are dependencies.
    static EDGES: RefCell<Vec<EdgeData>> = const { RefCell::new(Vec::new()) };
}

/// The elements of an array argument.
pub(super) fn list<T: Copy>(from: &In<T>, count: usize) -> Outcome<Vec<T>> {
    (0..count).map(|index| from.at(index)).collect()
}

/// Where the parts of an answer go; all but the status are optional.
struct Places {
    status: Out<u32>,
    id: Out<u64>,
    graph: Out<u64>,
    dependencies: Out<u64>,
    edges: Out<u64>,
    count: Out<usize>,
}

fn info(mode: DefaultStream, stream: u64, places: &Places) -> Outcome {
    places.status.check()?;
    let (stream, context) = stream_and_context(stream, mode)?;
    let Some(info) = capture::info(&stream) else {
        if context.is_legacy(&stream) && capture::blocks_legacy(&context) {
            return Err(Code::STREAM_CAPTURE_IMPLICIT);
        }
        return places.status.set(NONE);
    };
    if info.invalidated {
        return places.status.set(INVALIDATED);
    }
    places.status.set(ACTIVE)?;
    places.id.set_if_wanted(info.id);
    places.graph.set_if_wanted(info.graph);
    places.edges.set_if_wanted(EDGES.with_borrow_mut(|edges| {
        *edges = vec![EdgeData::default(); info.dependencies.len()];
        edges.as_ptr() as u64
    }));
    places.count.set_if_wanted(info.dependencies.len());
    let address = ANSWER.with_borrow_mut(|answer| {
        *answer = info.dependencies;
        answer.as_ptr() as u64
    });
    places.dependencies.set_if_wanted(address);
    Ok(())
}

fn begin(mode: DefaultStream, stream: u64, how: u32, into: Option<(u64, Vec<u64>)>) -> Outcome {
    let how = Mode::try_from(how)?;
    let (stream, context) = stream_and_context(stream, mode)?;
    capture::begin(&context, &stream, how, into)
}

fn update(
    mode: DefaultStream,
    stream: u64,
    dependencies: &In<u64>,
    count: usize,
    flags: u32,
) -> Outcome {
    let (stream, _) = stream_and_context(stream, mode)?;
    if !matches!(flags, ADD | SET) {
        return Err(Code::INVALID_VALUE);
    }
    capture::set_dependencies(&stream, list(dependencies, count)?, flags == ADD)
}

driver_api! {
    stream(mode) fn cuStreamBeginCapture, cuStreamBeginCapture_ptsz(stream: u64) {
        begin(mode, stream, 0, None)
    }

    stream(mode) fn cuStreamBeginCapture_v2, cuStreamBeginCapture_v2_ptsz(stream: u64, how: u32) {
        begin(mode, stream, how, None)
    }

    stream(mode) fn cuStreamBeginCaptureToGraph, cuStreamBeginCaptureToGraph_ptsz(
        stream: u64, graph: u64, dependencies: In<u64>, edges: In<EdgeData>, count: usize, how: u32,
    ) {
        check_edges(&edges, count)?;
        begin(mode, stream, how, Some((graph, list(&dependencies, count)?)))
    }

    stream(mode) fn cuStreamEndCapture, cuStreamEndCapture_ptsz(stream: u64, graph: Out<u64>) {
        let (stream, _) = stream_and_context(stream, mode)?;
        // Who has captured into a graph of his own need not be told which it was.
        if !capture::is_into_a_known_graph(&stream) {
            graph.check()?;
        }
        let ended = capture::end(&stream);
        graph.set_if_wanted(ended.unwrap_or(0));
        ended.map(|_| ())
    }

    stream(mode) fn cuStreamIsCapturing, cuStreamIsCapturing_ptsz(stream: u64, status: Out<u32>) {
        let [id, graph, dependencies, edges] = [0; 4].map(Out::at_address);
        info(mode, stream, &Places {
            status, id, graph, dependencies, edges, count: Out::at_address(0),
        })
    }

    stream(mode) fn cuStreamGetCaptureInfo, cuStreamGetCaptureInfo_ptsz(
        stream: u64, status: Out<u32>, id: Out<u64>,
    ) {
        let [graph, dependencies, edges] = [0; 3].map(Out::at_address);
        info(mode, stream, &Places {
            status, id, graph, dependencies, edges, count: Out::at_address(0),
        })
    }

    stream(mode) fn cuStreamGetCaptureInfo_v2, cuStreamGetCaptureInfo_v2_ptsz(
        stream: u64, status: Out<u32>, id: Out<u64>, graph: Out<u64>, dependencies: Out<u64>,
        count: Out<usize>,
    ) {
        let edges = Out::at_address(0);
        info(mode, stream, &Places { status, id, graph, dependencies, edges, count })
    }

    stream(mode) fn cuStreamGetCaptureInfo_v3, cuStreamGetCaptureInfo_v3_ptsz(
        stream: u64, status: Out<u32>, id: Out<u64>, graph: Out<u64>, dependencies: Out<u64>,
        edges: Out<u64>, count: Out<usize>,
    ) {
        info(mode, stream, &Places { status, id, graph, dependencies, edges, count })
    }

    stream(mode) fn cuStreamUpdateCaptureDependencies, cuStreamUpdateCaptureDependencies_ptsz(
        stream: u64, dependencies: In<u64>, count: usize, flags: u32,
    ) {
        update(mode, stream, &dependencies, count, flags)
    }

    stream(mode) fn cuStreamUpdateCaptureDependencies_v2, cuStreamUpdateCaptureDependencies_v2_ptsz(
        stream: u64, dependencies: In<u64>, edges: In<EdgeData>, count: usize, flags: u32,
    ) {
        check_edges(&edges, count)?;
        update(mode, stream, &dependencies, count, flags)
    }

    call fn cuThreadExchangeStreamCaptureMode(mode: Out<u32>) {
        let wanted = Mode::try_from(mode.get()?)?;
        mode.set(THREAD_MODE.replace(wanted) as u32)
    }
}
