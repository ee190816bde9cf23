//! Events: marks in streams, with the time at which they were passed.

use std::sync::{Arc, OnceLock};
use std::time::Instant;

use parking_lot::Mutex;

use crate::handles::Table;
use crate::shared_events::SharedEvent;
use crate::status::{Code, Outcome};
use crate::streams::Position;

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
    /// Where it was recorded last.
    pub(crate) last: Mutex<Last>,
}

/// Where an event was captured.
#[derive(Clone)]
pub(crate) struct Mark {
    /// The number of the capture.
    pub(crate) capture: u64,
    /// What is done before it.
    pub(crate) nodes: Vec<u64>,
}

/// Where an event was recorded last.
#[derive(Clone, Default)]
pub(crate) enum Last {
    #[default]
    /// Never, or by way of what is shared.
    Nowhere,
    /// In a stream.
    InStream(Record),
    /// In a stream that captured.
    InCapture(Mark),
}

/// A record in a stream.
#[derive(Clone)]
pub(crate) struct Record {
    /// What has to be done before.
    pub(crate) position: Position,
    /// When that was.
    pub(crate) passed: Arc<OnceLock<Instant>>,
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
