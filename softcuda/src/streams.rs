//! Streams: queues of work, each with a thread of its own that starts with the first piece of
//! work. What one stream must wait for in another is a position there that was submitted before,
//! so waiting can never go in a circle within one process.

use std::cell::Cell;
use std::collections::VecDeque;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::{Arc, Condvar, MutexGuard, PoisonError};

use parking_lot::Mutex;

use crate::attributes::Attributes;
use crate::shared_events::SharedEvent;
use crate::status::{Code, Outcome};

/// `CU_STREAM_NON_BLOCKING`: the stream does not wait for the legacy default stream, nor that for
/// it.
pub(crate) const NON_BLOCKING: u32 = 1;

type Work = Box<dyn FnOnce() + Send>;

struct Operation {
    after: Vec<Position>,
    work: Work,
}

#[derive(Default)]
struct State {
    queue: VecDeque<Operation>,
    submitted: u64,
    completed: u64,
    has_worker: bool,
    closing: bool,
}

/// A stream.
pub(crate) struct Stream {
    /// The value that programs hold; also `cuStreamGetId`.
    pub(crate) handle: u64,
    /// Handle of the context that it belongs to.
    pub(crate) context: u64,
    /// As given at creation.
    pub(crate) flags: u32,
    /// What programs set, the priority of the creation among it; reported, otherwise ignored.
    pub(crate) attributes: Mutex<Attributes>,
    /// Of the standard library: a thread that finds it locked sleeps. That of parking_lot yields the processor first, and
    /// gets it back after all others had a turn: beside 40 busy loops on two cores, `workload small-allocs` took more
    /// than 100 s with it, and takes 8 s.
    state: std::sync::Mutex<State>,
    changed: Condvar,
}

/// A point in a stream: all work up to it.
#[derive(Clone)]
pub(crate) enum Position {
    /// In a stream of this process, after so many pieces of work.
    Here(Arc<Stream>, u64),
    /// In whichever process recorded an event last: the number of the record.
    Shared(Arc<SharedEvent>, u64),
}

impl Position {
    /// Whether it lies in this stream.
    pub(crate) fn is_in(&self, other: &Arc<Stream>) -> bool {
        matches!(self, Position::Here(stream, _) if Arc::ptr_eq(stream, other))
    }

    /// Whether the stream has come this far.
    pub(crate) fn is_reached(&self) -> bool {
        match self {
            Position::Here(stream, number) => stream.state().completed >= *number,
            Position::Shared(event, number) => event.is_passed(*number),
        }
    }

    /// Waits until the stream has come this far.
    pub(crate) fn wait(&self) {
        match self {
            Position::Here(stream, number) => {
                let mut state = stream.state();
                while state.completed < *number {
                    state = stream.wait_for_change(state);
                }
            }
            Position::Shared(event, number) => event.wait(*number),
        }
    }
}

thread_local! {
    static IS_WORKER: Cell<bool> = const { Cell::new(false) };
}

/// Whether this thread executes a stream's work (host functions included, which may not call the
/// API).
pub(crate) fn is_worker() -> bool {
    IS_WORKER.get()
}

impl Stream {
    /// A stream without work.
    pub(crate) fn new(handle: u64, context: u64, flags: u32, priority: i32) -> Arc<Stream> {
        Arc::new(Stream {
            handle,
            context,
            flags,
            attributes: Mutex::new(Attributes::with_priority(priority)),
            state: std::sync::Mutex::default(),
            changed: Condvar::new(),
        })
    }

    /// Nothing panics while it holds this, so a poisoned one is as good.
    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn wait_for_change<'a>(&self, state: MutexGuard<'a, State>) -> MutexGuard<'a, State> {
        self.changed.wait(state).unwrap_or_else(PoisonError::into_inner)
    }

    /// Adds work that begins when everything before it in this stream and everything in `after`
    /// is done.
    ///
    /// # Errors
    /// `OPERATING_SYSTEM` when the thread cannot be started; the work is then not added.
    pub(crate) fn submit(
        self: &Arc<Self>,
        after: Vec<Position>,
        work: impl FnOnce() + Send + 'static,
    ) -> Outcome<Position> {
        let mut state = self.state();
        if !state.has_worker {
            let stream = self.clone();
            start_thread("softcuda-stream", move || stream.work_off())?;
            state.has_worker = true;
        }
        state.queue.push_back(Operation { after, work: Box::new(work) });
        state.submitted += 1;
        let position = Position::Here(self.clone(), state.submitted);
        // Unlocked first, so that the thread that wakes up need not wait for the lock.
        drop(state);
        self.changed.notify_all();
        Ok(position)
    }

    /// The last work submitted so far.
    pub(crate) fn last(self: &Arc<Self>) -> Position {
        Position::Here(self.clone(), self.state().submitted)
    }

    /// Lets the thread end once all work is done.
    pub(crate) fn close(&self) {
        self.state().closing = true;
        self.changed.notify_all();
    }

    fn work_off(self: Arc<Self>) {
        IS_WORKER.set(true);
        let mut state = self.state();
        loop {
            let Some(operation) = state.queue.pop_front() else {
                if state.closing {
                    state.has_worker = false;
                    return;
                }
                state = self.wait_for_change(state);
                continue;
            };
            drop(state);
            for position in &operation.after {
                position.wait();
            }
            // Work reports its failures through its context; a panic is a defect that must not
            // leave everybody waiting.
            let _ = catch_unwind(AssertUnwindSafe(operation.work));
            // What the work and its dependencies held may take locks when dropped.
            drop(operation.after);
            state = self.state();
            state.completed += 1;
            self.changed.notify_all();
        }
    }
}

/// Starts a thread that gets none of the program's signals.
///
/// # Errors
/// `OPERATING_SYSTEM` when there is no thread to be had.
pub(crate) fn start_thread(name: &str, body: impl FnOnce() + Send + 'static) -> Outcome {
    // SAFETY: the sets are plain data that the calls fill, and the mask of this thread is put back
    // whatever happens in between.
    unsafe {
        let mut all = std::mem::zeroed::<libc::sigset_t>();
        let mut before = std::mem::zeroed::<libc::sigset_t>();
        libc::sigfillset(&mut all);
        libc::pthread_sigmask(libc::SIG_BLOCK, &all, &mut before);
        let started = std::thread::Builder::new().name(name.into()).spawn(body);
        libc::pthread_sigmask(libc::SIG_SETMASK, &before, std::ptr::null_mut());
        started.map(|_| ()).map_err(|_| Code::OPERATING_SYSTEM)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::time::Duration;

    #[test]
    fn work_waits_for_other_streams() {
        let first = Stream::new(1, 0, 0, 0);
        let second = Stream::new(2, 0, 0, 0);
        let order = Arc::new(Mutex::new(Vec::new()));
        let log = |value: u32, pause: u64| {
            let order = order.clone();
            move || {
                std::thread::sleep(Duration::from_millis(pause));
                order.lock().push(value);
            }
        };
        let slow = first.submit(vec![], log(1, 30)).unwrap();
        assert!(!slow.is_reached());
        let fast = second.submit(vec![slow], log(2, 0)).unwrap();
        let panics = second.submit(vec![], || panic!("a defect")).unwrap();
        fast.wait();
        assert_eq!(*order.lock(), [1, 2]);
        panics.wait();
        second.close();
        first.close();
    }
}
