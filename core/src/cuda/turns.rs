//! Copies that let those of programs have their turn.
//!
//! A copy engine that has work of several processes goes on with that of one for as long as there is any, up to half a
//! millisecond. A program that brings one number to the host waits for that, however little of the link it
//! needs (`docs/results/concurrent-copies.md`, "What copies cost a program"). So here one thread, the submitter, starts
//! one copy of a few chunks that follow each other, waits for it without sleeping, and only then starts the next. In
//! the moments between the others have their turn. A large copy makes up for these moments: it takes less time than
//! several small ones.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use crossbeam_channel::{Receiver, Sender, TryRecvError, bounded};

use super::driver::DriverError;
use super::span::Span;
use super::stream::NAP;
use super::transfer::{Queue, Slot, TransferError, Work, on_all};
use crate::store::ChunkId;

/// So many workers or more are about as fast as the device, so that the submitter hardly sleeps.
const SUBMITTER_COUNTS: usize = 6;

/// How many chunks are copied at once.
const AT_ONCE: usize = 4;

/// Buffers that follow each other, and what has arrived or is to arrive in each of the first ones.
struct Batch<'a> {
    slots: Vec<&'a mut Slot>,
    spans: Vec<Span>,
}

/// One chunk of a batch that has arrived, by its number. Who is the last to have one gives the batch back.
type Part<'a> = (Arc<Batch<'a>>, usize);

/// How many of so many threads take what a submitter brings, which may need one of their CPUs.
pub(super) fn consumers(threads: usize) -> usize {
    threads - usize::from(threads >= SUBMITTER_COUNTS)
}

/// Copies what a queue gives straight to the host, with the buffers of these workers, so many threads that take
/// what has arrived, and the submitter. When it is `enough`, nothing more is begun after the first copy. Copies may
/// still be under way into staging buffers after a failure.
pub(super) fn copy_out<E: Send>(
    workers: &mut [[Slot; 2]],
    consumers: usize,
    begin: impl Fn() -> Result<(), DriverError> + Sync,
    work: &Work<'_, impl Queue>,
    enough: &AtomicBool,
    take: &(impl Fn(Span, &[u8], Option<ChunkId>) -> Result<(), E> + Sync),
) -> Result<(), TransferError<E>> {
    let mut consumers = vec![(); consumers];
    let buffers = workers.len() * 2;
    // Two batches at least, so that one can be copied while the other is worked on.
    let at_once = AT_ONCE.min(buffers / 2);
    let (ready, arrived) = bounded(buffers);
    let (give_back, free) = bounded(buffers);
    let mut slots = workers.iter_mut().flatten();
    for _ in 0..buffers / at_once {
        let slots = slots.by_ref().take(at_once).collect();
        let batch = Batch { slots, spans: Vec::with_capacity(at_once) };
        give_back.send(batch).expect("there is room for all");
    }
    std::thread::scope(|scope| {
        let begin = &begin;
        let submitter = scope.spawn(move || {
            // With it ends the only sender, and the consumers once they have had everything.
            let ready = ready;
            let result = begin().and_then(|()| feed(work, enough, &free, &ready));
            if result.is_err() {
                work.stop.fail();
            }
            result
        });
        let consumer = |_: &mut ()| -> Result<(), TransferError<E>> {
            begin()?;
            while let Some((batch, part)) = next(&arrived) {
                let span = batch.spans[part];
                let bytes = &batch.slots[part].staging.bytes()[..span.len];
                let arrived = work.queue.arrived(&span);
                let taken = if arrived { take(span, bytes, None) } else { Ok(()) };
                if let Some(batch) = Arc::into_inner(batch) {
                    // Once everything has arrived nobody takes batches any more.
                    let _ = give_back.send(batch);
                }
                taken.map_err(TransferError::Chunk)?;
            }
            Ok(())
        };
        let taken = on_all(&mut consumers, work.stop, &consumer);
        // If the consumers have failed, this tells the submitter that no batch comes back any more.
        drop(give_back);
        submitter.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic))?;
        taken
    })
}

/// What the submitter does, until the queue is empty, or it is late, or nobody gives batches back any more.
fn feed<'a>(
    work: &Work<'_, impl Queue>,
    enough: &AtomicBool,
    free: &Receiver<Batch<'a>>,
    arrived: &Sender<Part<'a>>,
) -> Result<(), DriverError> {
    let &Work { queue, stop, stream, free_cpus } = work;
    let (mut begun, mut done) = (false, None);
    let (began, mut copied, mut starved) = (Instant::now(), Duration::ZERO, Duration::ZERO);
    loop {
        // The one that came back first. What has just been read is in a processor's own cache, and a device that writes
        // there has to wait for that (`docs/results/concurrent-copies.md`).
        let batch = free.try_recv().ok().or_else(|| {
            // The submitter must not wait for the batch that it has itself.
            send(arrived, done.take());
            let since = Instant::now();
            let batch = next_unless(free, || stop.is_set());
            starved += since.elapsed();
            batch
        });
        let Some(mut batch) = batch else { return Ok(()) };
        batch.spans.clear();
        let late = begun && enough.load(Ordering::Relaxed);
        while batch.spans.len() < batch.slots.len() && !stop.is_set() && !late {
            let Some(span) = queue.next() else { break };
            batch.spans.push(span);
            begun = true;
        }
        if batch.spans.is_empty() {
            send(arrived, done.take());
            let all = began.elapsed();
            tracing::debug!(?all, ?copied, ?starved, "copied, with turns for others");
            return Ok(());
        }
        let mut slots = batch.slots.iter_mut();
        for run in batch.spans.chunk_by(Span::is_before) {
            let len = run.iter().map(|span| span.len).sum();
            let to = slots.by_ref().take(run.len()).map(|slot| &mut slot.staging);
            stream.copy_out_to_row(run[0].address, to, len)?;
        }
        let event = &batch.slots[0].event;
        stream.record(event)?;
        send(arrived, done.take());
        if let Some(cores) = free_cpus {
            cores.keep_off();
        }
        let since = Instant::now();
        event.wait_busily()?;
        copied += since.elapsed();
        done = Some(batch);
    }
}

/// The next of a channel, when there is one; `None` at its end.
fn next<T>(from: &Receiver<T>) -> Option<T> {
    next_unless(from, || false)
}

/// The next of a channel, or `None` as soon as it is not wanted any more. Nobody sleeps in the channel itself, since
/// waking a sleeper takes longer than the moments between copies may.
fn next_unless<T>(from: &Receiver<T>, unwanted: impl Fn() -> bool) -> Option<T> {
    loop {
        match from.try_recv() {
            Ok(one) => return Some(one),
            Err(TryRecvError::Empty) if !unwanted() => std::thread::sleep(NAP),
            Err(_) => return None,
        }
    }
}

/// Hands over what has arrived. Nobody is there any more if all have failed, and then nothing is lost.
fn send<'a>(to: &Sender<Part<'a>>, done: Option<Batch<'a>>) {
    let Some(batch) = done.map(Arc::new) else { return };
    for part in 1..batch.spans.len() {
        let _ = to.send((batch.clone(), part));
    }
    // Only they have it from here on, so one of them gives it back.
    let _ = to.send((batch, 0));
}
