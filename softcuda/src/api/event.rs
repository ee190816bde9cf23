//! Events.

use std::sync::Arc;

use cudarc::driver::sys;

use super::arguments::Out;
use super::driver_api;
use crate::capture;
use crate::context::{self, CONTEXTS};
use crate::events::{EVENTS, Event};
use crate::graphs::Work;
use crate::handles::new_handle;
use crate::pools;
use crate::shared_events::{Handle, SharedEvent};
use crate::status::{Code, Outcome};
use crate::submission::{DefaultStream, stream_and_context};

/// `CU_EVENT_DISABLE_TIMING`.
const DISABLE_TIMING: u32 = 2;
/// `CU_EVENT_INTERPROCESS`.
const INTERPROCESS: u32 = 4;
/// Those and `CU_EVENT_BLOCKING_SYNC`.
const KNOWN_FLAGS: u32 = 1 | DISABLE_TIMING | INTERPROCESS;
/// `CU_EVENT_RECORD_EXTERNAL`.
const EXTERNAL: u32 = 1;

const _: () = assert!(size_of::<Handle>() == size_of::<sys::CUipcEventHandle>());

fn find(handle: u64) -> Outcome<Arc<Event>> {
    EVENTS.get(handle).ok_or(Code::INVALID_HANDLE)
}

/// The failure of the event's context, if there is one.
fn check_context(event: &Event) -> Outcome {
    context::by_handle(event.context).map_err(|_| Code::INVALID_HANDLE)?.check()
}

fn record(mode: DefaultStream, event: u64, stream: u64, flags: u32) -> Outcome {
    if flags & !EXTERNAL != 0 {
        return Err(Code::INVALID_VALUE);
    }
    let handle = event;
    let event = find(event)?;
    let (stream, context) = stream_and_context(stream, mode)?;
    if flags == EXTERNAL {
        // Part of the graph, where an event is usually only a way to name dependencies.
        let captured = capture::record(&stream, Work::Record(handle, event))?;
        return if captured { Ok(()) } else { Err(Code::INVALID_VALUE) };
    }
    event.record(&context, &stream)
}

fn destroy(handle: u64) -> Outcome {
    EVENTS.remove(handle).map(|_| ()).ok_or(Code::INVALID_HANDLE)
}

fn elapsed(out: &Out<f32>, start: u64, end: u64) -> Outcome {
    let (start, end) = (find(start)?, find(end)?);
    check_context(&end)?;
    capture::check_not_captured(&start)?;
    capture::check_not_captured(&end)?;
    out.set(Event::milliseconds(&start, &end)?)
}

driver_api! {
    call fn cuEventCreate(out: Out<u64>, flags: u32) {
        out.check()?;
        let shared = flags & INTERPROCESS != 0;
        if flags & !KNOWN_FLAGS != 0 || (shared && flags & DISABLE_TIMING == 0) {
            return Err(Code::INVALID_VALUE);
        }
        let context = context::current()?;
        let shared = if shared { Some(SharedEvent::new()?) } else { None };
        let handle = new_handle();
        EVENTS.insert(handle, Arc::new(Event::new(context.handle, flags, shared)));
        out.set(handle)
    }

    call fn cuIpcGetEventHandle(out: Out<Handle>, handle: u64) {
        out.check()?;
        let event = find(handle)?;
        let shared = event.shared.as_ref().ok_or(Code::INVALID_HANDLE)?;
        out.set(context::while_idle(|| shared.handle())?)
    }

    call fn cuIpcOpenEventHandle(out: Out<u64>, handle: Handle) {
        out.check()?;
        let context = context::current()?;
        let shared = SharedEvent::open(&handle)?;
        let flags = DISABLE_TIMING | INTERPROCESS;
        let handle = new_handle();
        EVENTS.insert(handle, Arc::new(Event::new(context.handle, flags, Some(shared))));
        out.set(handle)
    }

    call fn cuEventDestroy(handle: u64) {
        destroy(handle)
    }

    call fn cuEventDestroy_v2(handle: u64) {
        destroy(handle)
    }

    stream(mode) fn cuEventRecord, cuEventRecord_ptsz(event: u64, stream: u64) {
        record(mode, event, stream, 0)
    }

    stream(mode) fn cuEventRecordWithFlags, cuEventRecordWithFlags_ptsz(
        event: u64, stream: u64, flags: u32,
    ) {
        record(mode, event, stream, flags)
    }

    call fn cuEventQuery(handle: u64) {
        let event = find(handle)?;
        check_context(&event)?;
        capture::check_not_captured(&event)?;
        match event.position() {
            Some(position) if !position.is_reached() => Err(Code::NOT_READY),
            _ => Ok(()),
        }
    }

    call fn cuEventSynchronize(handle: u64) {
        let event = find(handle)?;
        capture::check_not_captured(&event)?;
        if let Some(position) = event.position() {
            position.wait();
        }
        if let Some(context) = CONTEXTS.get(event.context) {
            context.prints.flush();
        }
        pools::tidy(None);
        check_context(&event)
    }

    call fn cuEventElapsedTime(out: Out<f32>, start: u64, end: u64) {
        elapsed(&out, start, end)
    }

    call fn cuEventElapsedTime_v2(out: Out<f32>, start: u64, end: u64) {
        elapsed(&out, start, end)
    }
}
