//! Copying out of memory that a program may be writing to.
//!
//! What is stored is named by its hash, so the bytes that are hashed have to be those that are stored.
//! The host could hash what has arrived; but it takes its cores longer than PCIe takes to bring it. So
//! chunks are first copied within the device, some forty times faster than over PCIe, to a bounce buffer
//! in which nobody writes. There they are hashed, and from there they are copied out. The host compares a
//! [sum](super::hash::Key::sum) of what arrives with that of what was hashed.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use crossbeam_channel::{Receiver, Sender, bounded};
use gpucr_wire::CHUNK_SIZE;

use super::context::{Context, SharedBlock};
use super::driver::DriverError;
use super::hash::{Hashed, Hasher};
use super::span::Span;
use super::stream::Stream;
use super::transfer::{Queue, SAMPLE, Slot, TransferError, Work, on_all};
use crate::store::ChunkId;

/// Most bytes of a bounce buffer. Each launch of the hash kernel takes the device away from the program for
/// more than a millisecond, however short it is, since processes take turns. So few launches for many chunks
/// are better: half of the buffer is hashed while the other half is copied out.
const SIZE: u64 = 4 << 30;
/// The first batch has this part of the buffer, since nothing crosses PCIe before it is hashed; each one after it
/// twice as much, up to all that is free.
const FIRST: usize = 16;
/// What may be taken of the memory that is free.
const SHARE: u64 = 8;

/// Device memory of gpucr's own for chunks on their way out.
pub(super) struct Bounce {
    memory: SharedBlock,
    stream: Stream,
    hasher: Hasher,
}

/// A chunk in the bounce buffer.
struct Bounced {
    span: Span,
    place: usize,
    hashed: Hashed,
}

impl Bounce {
    /// Makes a buffer to bring out `bulk` bytes. `None` if little memory is free.
    pub(super) fn prepare(context: &Arc<Context>, bulk: u64) -> Result<Option<Self>, DriverError> {
        let size = SIZE.min(bulk / 2).min(context.free_memory()? / SHARE) / CHUNK_SIZE * CHUNK_SIZE;
        if size == 0 {
            return Ok(None);
        }
        Ok(Some(Self {
            memory: SharedBlock::allocate(context, size)?,
            stream: Stream::create(context)?,
            hasher: Hasher::prepare(context)?,
        }))
    }

    fn places(&self) -> usize {
        (self.memory.len() / CHUNK_SIZE) as usize
    }

    fn address(&self, place: usize) -> u64 {
        self.memory.address() + place as u64 * CHUNK_SIZE
    }

    /// Copies what the queue gives to free places, hashes it, and gives it to `ready`; until the queue is
    /// empty, or nobody gives places back any more.
    fn fill(
        &mut self,
        work: &Work<'_, impl Queue>,
        free: &Receiver<usize>,
        ready: &Sender<Bounced>,
    ) -> Result<(), DriverError> {
        let &Work { queue, stop, free_cpus, .. } = work;
        self.stream.context().enter()?;
        let half = self.places().div_ceil(2);
        let mut most = self.places().div_ceil(FIRST);
        let mut places: Vec<usize> = Vec::new();
        loop {
            // A thread that waits for a device may do so by asking it all the time.
            if let Some(cores) = free_cpus {
                cores.stay_off();
            }
            let few = if queue.is_urgent() { 1 } else { most.min(half) };
            while places.len() < few {
                let Ok(place) = free.recv() else { return Ok(()) };
                places.push(place);
            }
            places.extend(free.try_iter());
            if stop.is_set() {
                return Ok(());
            }
            let mut batch = Vec::with_capacity(most);
            while batch.len() < most
                && let Some(place) = places.pop()
                && let Some(span) = queue.next()
            {
                batch.push((span, place));
            }
            most = (2 * most).min(self.places());
            if batch.is_empty() {
                return Ok(());
            }
            for (span, place) in &batch {
                self.stream.copy_within(span.address, self.address(*place), span.len)?;
            }
            self.stream.synchronize()?;
            // From here on the program may have its memory.
            let arrived: Vec<(Span, usize)> = batch
                .into_iter()
                .filter(|(span, place)| {
                    let safe = queue.arrived(span);
                    if !safe {
                        places.push(*place);
                    }
                    safe
                })
                .collect();
            let bounced: Vec<_> =
                arrived.iter().map(|(span, place)| (self.address(*place), span.len)).collect();
            let hashes = self.hasher.hash(&bounced)?;
            for ((span, place), hashed) in arrived.into_iter().zip(hashes) {
                if ready.send(Bounced { span, place, hashed }).is_err() {
                    return Ok(());
                }
            }
        }
    }
}

/// Copies what a queue gives by way of the bounce buffer, on all workers. `take` gets the hash of the bytes
/// too. Copies may still be under way into staging buffers after a failure.
pub(super) fn copy_out<E: Send>(
    bounce: &mut Bounce,
    workers: &mut [[Slot; 2]],
    begin: impl Fn() -> Result<(), DriverError> + Sync,
    work: &Work<'_, impl Queue>,
    take: &(impl Fn(Span, &[u8], Option<ChunkId>) -> Result<(), E> + Sync),
) -> Result<(), TransferError<E>> {
    let &Work { stream, stop, .. } = work;
    let (base, key) = (bounce.address(0), bounce.hasher.key().clone());
    let (give_back, free) = bounded(bounce.places());
    (0..bounce.places()).for_each(|place| give_back.send(place).expect("there is room for all"));
    let (ready, filled) = bounded::<Bounced>(bounce.places());
    let taken = AtomicUsize::new(0);
    std::thread::scope(|scope| {
        let filler = scope.spawn(move || {
            // With it ends the last sender, and the workers once they have had everything.
            let ready = ready;
            let result = bounce.fill(work, &free, &ready);
            if result.is_err() {
                stop.fail();
            }
            result
        });
        let worker = |slots: &mut [Slot; 2]| -> Result<(), TransferError<E>> {
            begin()?;
            let issue = |slot: &mut Slot, wait: bool| -> Result<Option<Bounced>, DriverError> {
                let bounced = if wait { filled.recv().ok() } else { filled.try_recv().ok() };
                let Some(bounced) = bounced.filter(|_| !stop.is_set()) else { return Ok(None) };
                let from = base + bounced.place as u64 * CHUNK_SIZE;
                stream.copy_out(from, &mut slot.staging, bounced.span.len)?;
                stream.record(&slot.event)?;
                Ok(Some(bounced))
            };
            let [a, b] = slots;
            let (mut current, mut other) = (a, b);
            let mut pending = issue(current, true)?;
            while let Some(Bounced { span, place, hashed }) = pending {
                pending = issue(other, false)?;
                current.event.wait()?;
                // Once everything is read nobody takes places any more.
                let _ = give_back.send(place);
                let bytes = &current.staging.bytes()[..span.len];
                let looked_at = taken.fetch_add(1, Ordering::Relaxed).is_multiple_of(SAMPLE);
                let named_wrongly = looked_at && ChunkId::of(bytes) != hashed.id;
                if named_wrongly || key.sum(bytes) != hashed.sum {
                    return Err(TransferError::Altered);
                }
                take(span, bytes, Some(hashed.id)).map_err(TransferError::Chunk)?;
                std::mem::swap(&mut current, &mut other);
                if pending.is_none() {
                    pending = issue(current, true)?;
                }
            }
            Ok(())
        };
        let copied = on_all(workers, stop, &worker);
        // If the workers have failed, this tells the filler that no place becomes free any more.
        drop(give_back);
        filler.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic))?;
        copied
    })
}
