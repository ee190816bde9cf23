//! Stream captures: a dump waits for those under way, and lets none begin.

use std::ffi::c_void;

use super::support::hold_for;
use crate::abi::real;
use crate::abi::types::{Code, SUCCESS};
use crate::state::gate::{self, Capture};
use crate::state::recent;

/// Begins a capture, once a dump lets it.
fn beginning(stream: u64, per_thread: bool, begin: impl FnOnce() -> Code) -> Code {
    // What is interrupted there is not to be launched into the capture.
    hold_for(if per_thread { None } else { Some(stream) });
    gate::begin_capture(Capture::of(stream, per_thread), context_of(stream, per_thread), begin)
}

/// The context that a stream lives in.
fn context_of(stream: u64, per_thread: bool) -> u64 {
    let mut context = 0;
    let code = if per_thread {
        call!(cuStreamGetCtx_ptsz(stream, &mut context))
    } else {
        call!(cuStreamGetCtx(stream, &mut context))
    };
    match code {
        SUCCESS => context,
        _ => real::current_context().map_or(0, |(context, _)| context),
    }
}

/// After the end of a capture was asked for: even a failure may have ended it.
fn ended(code: Code, stream: u64, per_thread: bool) -> Code {
    let mut status = 0;
    let still = code != SUCCESS
        && SUCCESS
            == if per_thread {
                call!(cuStreamIsCapturing_ptsz(stream, &mut status))
            } else {
                call!(cuStreamIsCapturing(stream, &mut status))
            }
        && status != 0;
    if !still {
        gate::end_capture(Capture::of(stream, per_thread));
    }
    code
}

exported! {
    fn cuStreamBeginCapture(stream: u64) {
        beginning(stream, false, || call!(cuStreamBeginCapture(stream)))
    }
    fn cuStreamBeginCapture_ptsz(stream: u64) {
        beginning(stream, true, || {
            call!(cuStreamBeginCapture_ptsz(stream))
        })
    }
    fn cuStreamBeginCapture_v2(stream: u64, mode: u32) {
        beginning(stream, false, || {
            call!(cuStreamBeginCapture_v2(stream, mode))
        })
    }
    fn cuStreamBeginCapture_v2_ptsz(stream: u64, mode: u32) {
        beginning(stream, true, || {
            call!(cuStreamBeginCapture_v2_ptsz(stream, mode))
        })
    }
    fn cuStreamBeginCaptureToGraph(
        stream: u64, graph: u64, nodes: *const u64, edges: *const c_void, count: usize, mode: u32,
    ) {
        beginning(stream, false, || {
            call!(cuStreamBeginCaptureToGraph(stream, graph, nodes, edges, count, mode))
        })
    }
    fn cuStreamBeginCaptureToGraph_ptsz(
        stream: u64, graph: u64, nodes: *const u64, edges: *const c_void, count: usize, mode: u32,
    ) {
        beginning(stream, true, || {
            call!(cuStreamBeginCaptureToGraph_ptsz(stream, graph, nodes, edges, count, mode))
        })
    }
    fn cuStreamBeginRecaptureToGraph(
        stream: u64, mode: u32, graph: u64, callback: *const c_void, data: *mut c_void,
    ) {
        beginning(stream, false, || {
            call!(cuStreamBeginRecaptureToGraph(stream, mode, graph, callback, data))
        })
    }
    fn cuStreamBeginRecaptureToGraph_ptsz(
        stream: u64, mode: u32, graph: u64, callback: *const c_void, data: *mut c_void,
    ) {
        beginning(stream, true, || {
            call!(cuStreamBeginRecaptureToGraph_ptsz(stream, mode, graph, callback, data))
        })
    }
    fn cuStreamEndCapture(stream: u64, graph: *mut u64) {
        ended(call!(cuStreamEndCapture(stream, graph)), stream, false)
    }
    fn cuStreamEndCapture_ptsz(stream: u64, graph: *mut u64) {
        ended(call!(cuStreamEndCapture_ptsz(stream, graph)), stream, true)
    }
    fn cuStreamDestroy(stream: u64) {
        hold_for(Some(stream));
        recent::forget_stream(stream);
        let code = call!(cuStreamDestroy(stream));
        if code == SUCCESS {
            gate::end_capture(Capture::of(stream, false));
        }
        code
    }
    fn cuStreamDestroy_v2(stream: u64) {
        hold_for(Some(stream));
        recent::forget_stream(stream);
        let code = call!(cuStreamDestroy_v2(stream));
        if code == SUCCESS {
            gate::end_capture(Capture::of(stream, false));
        }
        code
    }
}
