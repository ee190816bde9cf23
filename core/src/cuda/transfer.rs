//! What the ways of copying out have in common: what is to be copied, buffers for it, the threads, and how it ends.

use std::sync::atomic::{AtomicUsize, Ordering};

use super::driver::DriverError;
use super::span::Span;
use super::staging::Staging;
use super::stream::{Event, Stream};
use crate::base::cores::Cores;
use crate::base::stop::Stop;

/// The host hashes the first of so many chunks too, so that a kernel that does not do what it should is found
/// out.
pub(super) const SAMPLE: usize = 64;

/// A staging buffer with the event that says when the copy of it has ended.
pub(super) struct Slot {
    pub(super) staging: Staging,
    pub(super) event: Event,
}

/// What is to be copied out, for several workers at once.
pub trait Queue: Sync {
    /// What to copy next; `None` if there is nothing more.
    fn next(&self) -> Option<Span>;
    /// The bytes have arrived: the memory is not needed any more. `false` if it was not safe from
    /// being written meanwhile, so that they are worth nothing.
    fn arrived(&self, span: &Span) -> bool;
    /// Whether a program may be waiting for what comes next.
    fn is_urgent(&self) -> bool {
        false
    }
}

/// What is copied out on a stream, and when to end.
pub(super) struct Work<'a, Q> {
    pub(super) queue: &'a Q,
    pub(super) stop: &'a Stop,
    pub(super) stream: &'a Stream,
    /// Which CPUs may be used while programs run on; `None` if none does.
    pub(super) free_cpus: Option<&'a Cores>,
}

/// Spans in the order of a list.
pub(super) struct InOrder<'a> {
    work: &'a [Span],
    next: AtomicUsize,
}

impl<'a> InOrder<'a> {
    pub(super) fn of(work: &'a [Span]) -> Self {
        Self { work, next: AtomicUsize::new(0) }
    }
}

impl Queue for InOrder<'_> {
    fn next(&self) -> Option<Span> {
        self.work.get(self.next.fetch_add(1, Ordering::Relaxed)).copied()
    }

    fn arrived(&self, _: &Span) -> bool {
        true
    }
}

/// Why a transfer ended early.
#[derive(Debug)]
pub enum TransferError<E> {
    /// The driver refused a call.
    Driver(DriverError),
    /// What the caller does with a chunk failed.
    Chunk(E),
    /// Other bytes have arrived than were hashed on the device.
    Altered,
}

impl<E> From<DriverError> for TransferError<E> {
    fn from(error: DriverError) -> Self {
        Self::Driver(error)
    }
}

/// Ends a transfer when a thread of it panics: others must not wait for what it would have done.
struct EndOnPanic<'a>(&'a Stop);

impl Drop for EndOnPanic<'_> {
    fn drop(&mut self) {
        if std::thread::panicking() {
            self.0.fail();
        }
    }
}

/// Runs `worker` once for each element, each on a thread of its own, and gives the first error.
pub(super) fn on_all<T: Send, E: Send>(
    workers: &mut [T],
    stop: &Stop,
    worker: &(impl Fn(&mut T) -> Result<(), E> + Sync),
) -> Result<(), E> {
    std::thread::scope(|scope| {
        let threads: Vec<_> = workers
            .iter_mut()
            .map(|state| {
                scope.spawn(move || {
                    let _guard = EndOnPanic(stop);
                    let result = worker(state);
                    if result.is_err() {
                        stop.fail();
                    }
                    result
                })
            })
            .collect();
        let mut first = Ok(());
        for thread in threads {
            let result = thread.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic));
            if first.is_ok() {
                first = result;
            }
        }
        first
    })
}
