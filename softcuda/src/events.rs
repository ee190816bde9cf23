//! Events: marks in streams, with the time at which they were passed.

use std::sync::{Arc, OnceLock};
use std::time::Instant;

use parking_lot::Mutex;

use crate::capture::{self, Mark};
use crate::context::Context;
use crate::handles::Table;
use crate::shared_events::SharedEvent;
use crate::status::{Code, Outcome};
use crate::streams::{Position, Stream};

/// `CU_EVENT_DISABLE_TIMING`.
const DISABLE_TIMING: u32 = 2;

/// All events.
pub(crate) static EVENTS: Table<Event> = Table::new();

/// An event.
pub(crate) struct Event {
    /// Handle of the context that it belongs to.
    pub(crate) context: u64,
    /// Flags as given at creation.
    pub(crate) flags: u32,
    /// What other processes may see of it.
    pub(crate) shared: Option<Arc<SharedEvent>>,
    last: Mutex<Last>,
}

/// Where an event was recorded last.
#[derive(Clone, Default)]
enum Last {
    #[default]
    Nowhere,
    InStream(Record),
    InCapture(Mark),
}

#[derive(Clone)]
struct Record {
    position: Position,
    passed: Arc<OnceLock<Instant>>,
}

/// Lets go of what is shared with other processes, for a checkpoint that does not carry it; whether
/// there was anything.
pub(crate) fn close_shared() -> bool {
    let mut any = false;
    for shared in EVENTS.all().iter().filter_map(|event| event.shared.as_ref()) {
        any |= shared.is_shared();
        shared.close();
    }
    any
}

impl Event {
    /// An event that was never recorded.
    pub(crate) fn new(context: u64, flags: u32, shared: Option<SharedEvent>) -> Event {
        Event { context, flags, shared: shared.map(Arc::new), last: Mutex::default() }
    }

    /// Marks the present end of a stream, or of what it has captured.
    ///
    /// # Errors
    /// `INVALID_HANDLE` when event and stream belong to different contexts,
    /// `STREAM_CAPTURE_INVALIDATED`.
    pub(crate) fn record(&self, context: &Context, stream: &Arc<Stream>) -> Outcome {
        if self.context != context.handle {
            return Err(Code::INVALID_HANDLE);
        }
        if let Some(mark) = capture::mark(stream)? {
            *self.last.lock() = Last::InCapture(mark);
            return Ok(());
        }
        let mut last = self.last.lock();
        if let Some(shared) = &self.shared {
            let (event, number) = (shared.clone(), shared.announce());
            *last = Last::Nowhere;
            let submitted = context.submit(stream, Vec::new(), move || event.pass(number));
            if submitted.is_err() {
                shared.pass(number);
            }
            return submitted.map(|_| ());
        }
        let passed = Arc::new(OnceLock::new());
        let mark = passed.clone();
        let position = context.submit(stream, Vec::new(), move || {
            let _ = mark.set(Instant::now());
        })?;
        *last = Last::InStream(Record { position, passed });
        Ok(())
    }

    /// Marks the present ends of several streams, through a stream that waits for them.
    ///
    /// # Errors
    /// As [`Event::record`].
    pub(crate) fn record_after(
        &self,
        context: &Context,
        stream: &Arc<Stream>,
        after: Vec<Position>,
    ) -> Outcome {
        context.submit(stream, after, || ())?;
        self.record(context, stream)
    }

    /// What the last record marked; `None` before the first, and in a capture.
    pub(crate) fn position(&self) -> Option<Position> {
        match (&*self.last.lock(), &self.shared) {
            (Last::InStream(record), _) => Some(record.position.clone()),
            (Last::Nowhere, Some(shared)) => {
                Some(Position::Shared(shared.clone(), shared.recorded()))
            }
            _ => None,
        }
    }

    /// What the last record marked, if that was in a capture.
    pub(crate) fn mark(&self) -> Option<Mark> {
        match &*self.last.lock() {
            Last::InCapture(mark) => Some(mark.clone()),
            _ => None,
        }
    }

    /// Fails if the event was recorded last in a capture, where it has no time.
    ///
    /// # Errors
    /// `CAPTURED_EVENT`, with the capture invalidated.
    pub(crate) fn check_not_captured(&self) -> Outcome {
        self.mark().map_or(Ok(()), |mark| Err(capture::refuse_captured_event(&mark)))
    }

    /// Milliseconds from one event to another.
    ///
    /// # Errors
    /// `INVALID_HANDLE` when one was never recorded or has no timing, `NOT_READY` when one is not
    /// passed yet.
    pub(crate) fn milliseconds(start: &Event, end: &Event) -> Outcome<f32> {
        let time = |event: &Event| {
            let Last::InStream(record) = event.last.lock().clone() else {
                return Err(Code::INVALID_HANDLE);
            };
            if event.flags & DISABLE_TIMING != 0 {
                return Err(Code::INVALID_HANDLE);
            }
            record.passed.get().copied().ok_or(Code::NOT_READY)
        };
        let (start, end) = (time(start)?, time(end)?);
        let seconds = match end.checked_duration_since(start) {
            Some(after) => after.as_secs_f64(),
            None => -(start - end).as_secs_f64(),
        };
        Ok((seconds * 1e3) as f32)
    }
}
