//! Copies that let those of programs have their turn.
//!
//! A copy engine that has work of several processes goes on with that of one for as long as there is any, up to half a
//! millisecond. A program that brings one number to the host then waits for it ten times as long as alone, however
//! little of the link it needs (`docs/results.md`, "What copies cost a program"). So here one thread, the
//! feeder, starts one copy of a few chunks that follow each other, waits for it, and only then starts the next. In the
//! moments between the others have their turn. A large copy makes up for these moments: it takes less time
//! than several small ones.

use std::collections::VecDeque;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use crossbeam_channel::{Receiver, Sender, TryRecvError, bounded};

use super::context::{MOMENT, NAP};
use super::driver::DriverError;
use super::lanes::{Queue, Slot, Span, TransferError, Work, on_all};
use crate::store::ChunkId;

/// How many chunks are copied at once. The fewer, the shorter do others wait, and the more of the link is left
/// idle.
const AT_ONCE: usize = 4;

/// Buffers that follow each other, and what has arrived or is to arrive in each of the first ones.
struct Batch<'a> {
    slots: Vec<&'a mut Slot>,
    spans: Vec<Span>,
}

/// One chunk of a batch that has arrived, by its number. Who is the last to have one gives the batch back.
type Part<'a> = (Arc<Batch<'a>>, usize);

/// One of the threads.
enum Role<'a> {
    /// Takes batches that are free, and sends their parts on when bytes have arrived there.
    Feeder { free: Receiver<Batch<'a>>, arrived: Sender<Part<'a>> },
    /// Takes these, and gives them back.
    Worker { arrived: Receiver<Part<'a>>, free: Sender<Batch<'a>> },
    /// Has ended.
    Done,
}

/// Copies what a queue gives straight to the host, by as many threads as there are `workers`, the feeder among
/// them; but by two at least. Copies may still be under way into staging buffers after a failure.
pub(super) fn copy_out<E: Send>(
    workers: &mut [[Slot; 2]],
    begin: impl Fn() -> Result<(), DriverError> + Sync,
    work: &Work<'_, impl Queue>,
    enough: Option<&AtomicBool>,
    take: &(impl Fn(Span, &[u8], Option<ChunkId>) -> Result<(), E> + Sync),
) -> Result<(), TransferError<E>> {
    let others = (workers.len() - 1).max(1);
    let slots = workers.len() * 2;
    // Two at least, so that one can be copied while the other is worked on.
    let at_once = AT_ONCE.min(slots / 2);
    let (ready, arrived) = bounded(slots);
    let (give_back, free) = bounded(slots);
    let mut slots = workers.iter_mut().flatten();
    loop {
        let slots: Vec<&mut Slot> = slots.by_ref().take(at_once).collect();
        if slots.is_empty() {
            break;
        }
        let batch = Batch { spans: Vec::with_capacity(slots.len()), slots };
        give_back.send(batch).expect("there is room for all");
    }
    let mut roles = vec![Role::Feeder { free, arrived: ready }];
    for _ in 0..others {
        roles.push(Role::Worker { arrived: arrived.clone(), free: give_back.clone() });
    }
    // Each channel ends when those have who hold it: the feeder, or all others.
    drop((arrived, give_back));
    on_all(&mut roles, work.stop, &|role| {
        begin()?;
        match std::mem::replace(role, Role::Done) {
            Role::Feeder { free, arrived } => Ok(feed(work, enough, &free, &arrived)?),
            Role::Worker { arrived, free } => {
                while let Some((batch, part)) = next(&arrived, || std::thread::sleep(NAP)) {
                    let span = batch.spans[part];
                    let bytes = &batch.slots[part].staging.bytes()[..span.len];
                    let taken =
                        if work.queue.arrived(&span) { take(span, bytes, None) } else { Ok(()) };
                    if let Some(batch) = Arc::into_inner(batch) {
                        // Once everything has arrived nobody takes batches any more.
                        let _ = free.send(batch);
                    }
                    taken.map_err(TransferError::Chunk)?;
                }
                Ok(())
            }
            Role::Done => unreachable!("each has its role once"),
        }
    })
}

/// What the feeder does, until the queue is empty, or it is late, or nobody gives batches back any more.
fn feed<'a>(
    work: &Work<'_, impl Queue>,
    enough: Option<&AtomicBool>,
    free: &Receiver<Batch<'a>>,
    arrived: &Sender<Part<'a>>,
) -> Result<(), DriverError> {
    let &Work { queue, stop, stream, beside } = work;
    let late = || enough.is_some_and(|enough| enough.load(Ordering::Relaxed));
    let mut begun = false;
    // The one that came back first is used first. What has just been read is in a processor's own cache, and a
    // device that writes there has to wait for that: it takes a third longer (`docs/results.md`).
    let mut batches = VecDeque::new();
    let mut done = None;
    let (began, mut copied, mut starved) = (Instant::now(), Duration::ZERO, Duration::ZERO);
    loop {
        if batches.is_empty() {
            // It must not wait for what it has itself.
            send(arrived, done.take());
            let since = Instant::now();
            let Some(batch) = next(free, || wait_since(since)) else { return Ok(()) };
            starved += since.elapsed();
            batches.push_back(batch);
        }
        let Some(mut batch) = batches.pop_front() else { continue };
        batch.spans.clear();
        while batch.spans.len() < batch.slots.len() && !stop.is_set() && !(begun && late()) {
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
        if let Some(cores) = beside {
            cores.keep_off();
        }
        batches.extend(free.try_iter());
        let since = Instant::now();
        event.wait_busily()?;
        copied += since.elapsed();
        done = Some(batch);
    }
}

/// The next of a channel, when there is one; `None` at its end. Nobody sleeps in the channel itself, since waking a
/// sleeper takes longer than the moments between copies may.
fn next<T>(from: &Receiver<T>, wait: impl Fn()) -> Option<T> {
    loop {
        match from.try_recv() {
            Ok(one) => return Some(one),
            Err(TryRecvError::Empty) => wait(),
            Err(TryRecvError::Disconnected) => return None,
        }
    }
}

/// Waits a little, for something that may be there at once: without sleeping for a moment, to lose no time.
fn wait_since(since: Instant) {
    if since.elapsed() <= MOMENT { std::hint::spin_loop() } else { std::thread::sleep(NAP) }
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
