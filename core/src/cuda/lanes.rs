//! Moving the chunks of many blocks between device memory and the store, on all cores.
//!
//! A *lane* is gpucr's context on one device with its workers. Each worker has two staging
//! buffers of one chunk: while it hashes and compresses the one (or fills it from the store) the
//! device copies the other. So the copy engine has at least one chunk of each worker queued, and
//! the memory needed is two chunks for each core, whatever the size of the bulk. What is copied ahead goes
//! into the same buffers, several at once (`turns.rs`).

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};

use gpucr_wire::CHUNK_SIZE;

use super::bounce::{self, Bounce};
use super::context::Context;
use super::driver::{Device, Driver, DriverError};
use super::hash::{Hashed, Key};
use super::span::Span;
pub use super::span::{chunks_in, spans_on};
use super::staging::Staging;
use super::stream::{Event, Stream};
use super::transfer::{InOrder, Queue, SAMPLE, Slot, TransferError, Work, on_all};
use super::{direct, turns};
use crate::base::cores::Cores;
use crate::base::stop::Stop;
use crate::store::{ChunkId, Filled};

/// The context of gpucr on one device, ready to copy.
pub struct Lane {
    /// Let go of before the context.
    bounce: Option<Bounce>,
    workers: Vec<[Slot; 2]>,
    context: Arc<Context>,
    /// Which CPUs may be used while programs run on; `None` if none does.
    free_cpus: Option<Arc<Cores>>,
}

/// Niceness of workers while a program runs. A program that launches kernels without end is
/// slowed by each moment that it waits for a core; the copier loses little, since it has many.
const NICE: i32 = 10;

/// How memory is copied out.
#[derive(Clone, Copy)]
enum Way<'a> {
    /// Copies go by way of the bounce buffer, if there is one.
    Bounced,
    /// Copies go straight from where the memory is. When it is enough, nothing more is begun after the first copy.
    Straight { enough: &'a AtomicBool },
}

impl Lane {
    /// Makes the context and the staging memory for `workers` workers.
    ///
    /// # Errors
    /// The driver's, for instance if there is no room for the context on the device, or for the staging memory in the
    /// host. Nothing is left of either.
    pub fn prepare(
        driver: &Arc<Driver>,
        device: &Device,
        workers: usize,
    ) -> Result<Self, DriverError> {
        let context = Context::create(driver, device)?;
        let count = workers.max(1);
        let mut row = Staging::allocate_row(&context, CHUNK_SIZE as usize, 2 * count)?.into_iter();
        let mut slot = || -> Result<Slot, DriverError> {
            let staging = row.next().expect("there are two for each");
            Ok(Slot { staging, event: Event::create(&context)? })
        };
        let workers = (0..count).map(|_| Ok([slot()?, slot()?])).collect::<Result<_, _>>()?;
        Ok(Self { bounce: None, workers, context, free_cpus: None })
    }

    /// Makes ready to hash on the device what is copied out from here on, `bulk` bytes or so. Without
    /// that, and where little memory is free for it, the receiver hashes.
    ///
    /// # Errors
    /// Of the driver; copying works as before.
    pub fn prepare_bounce(&mut self, bulk: u64) -> Result<(), DriverError> {
        self.bounce = Bounce::prepare(&self.context, bulk)?;
        Ok(())
    }

    /// Lets the copies from here on run on the CPUs that programs which run on leave free, if any do.
    pub(crate) fn yield_cpus_to(&mut self, free_cpus: Option<Arc<Cores>>) {
        self.free_cpus = free_cpus;
    }

    /// The context.
    pub fn context(&self) -> &Arc<Context> {
        &self.context
    }

    /// Reads these spans, which lie in memory of this lane's device that is mapped here, and calls
    /// `take` with the bytes of each, and their hash if it is known, from many threads at once. Ends
    /// early when `stop` is set, which a failure does by itself; the caller then has to treat what was
    /// taken as incomplete.
    ///
    /// # Errors
    /// The driver's error, that of `take`, or [`TransferError::Altered`] if bytes do not have the hash or sum that the
    /// device made of them; one of these where there are several. What was taken is incomplete. No copy is under way
    /// any more, unless the driver cannot even wait for it.
    pub fn copy_out<E: Send>(
        &mut self,
        work: &[Span],
        stop: &Stop,
        take: &(impl Fn(Span, &[u8], Option<ChunkId>) -> Result<(), E> + Sync),
    ) -> Result<(), TransferError<E>> {
        self.copy_queue(&InOrder::of(work), stop, take)
    }

    /// Copies out what a queue gives. What has not arrived safely is not taken.
    ///
    /// # Errors
    /// The errors of [`copy_out`](Self::copy_out).
    pub fn copy_queue<E: Send>(
        &mut self,
        queue: &impl Queue,
        stop: &Stop,
        take: &(impl Fn(Span, &[u8], Option<ChunkId>) -> Result<(), E> + Sync),
    ) -> Result<(), TransferError<E>> {
        self.copy(queue, Way::Bounced, stop, take)
    }

    /// Reads these spans straight from where they are, where programs may be writing them, after they were hashed
    /// by a [hasher](super::Hasher) with this key; `hashed` tells with what result. `take` gets the bytes of
    /// each and their hash: that one if they still have the same [sum](Key::sum), else the host makes another. So
    /// the device has nothing to do but to copy, and the host hashes what has changed. While programs run, their own
    /// copies have their turn. The rest is as in [`copy_out`](Self::copy_out); when it is `enough`, nothing more is
    /// begun after the first copy.
    ///
    /// # Errors
    /// The errors of [`copy_out`](Self::copy_out). [`TransferError::Altered`] says that hash and sum contradict each
    /// other: bytes have the same sum and another hash, or the other way round.
    pub fn copy_ahead<E: Send>(
        &mut self,
        work: &[Span],
        key: &Key,
        hashed: &(impl Fn(&Span) -> Hashed + Sync),
        enough: &AtomicBool,
        stop: &Stop,
        take: &(impl Fn(Span, &[u8], ChunkId) -> Result<(), E> + Sync),
    ) -> Result<(), TransferError<E>> {
        let unchanged = AtomicUsize::new(0);
        let take = |span: Span, bytes: &[u8], _: Option<ChunkId>| {
            let Hashed { id, sum } = hashed(&span);
            let same = key.sum(bytes) == sum;
            // As a rule one of the two is enough.
            if same && !unchanged.fetch_add(1, Ordering::Relaxed).is_multiple_of(SAMPLE) {
                return take(span, bytes, id).map_err(TransferError::Chunk);
            }
            let found = ChunkId::of(bytes);
            if (found == id) != same {
                return Err(TransferError::Altered);
            }
            take(span, bytes, found).map_err(TransferError::Chunk)
        };
        let queue = InOrder::of(work);
        self.copy(&queue, Way::Straight { enough }, stop, &take).map_err(|error| match error {
            TransferError::Chunk(error) => error,
            TransferError::Driver(error) => TransferError::Driver(error),
            TransferError::Altered => TransferError::Altered,
        })
    }

    /// Copies in one of two ways.
    fn copy<E: Send>(
        &mut self,
        queue: &impl Queue,
        way: Way<'_>,
        stop: &Stop,
        take: &(impl Fn(Span, &[u8], Option<ChunkId>) -> Result<(), E> + Sync),
    ) -> Result<(), TransferError<E>> {
        let stream = Stream::create(&self.context)?;
        let Self { context, workers, bounce, free_cpus } = self;
        let free_cpus = free_cpus.as_deref();
        let begin = || {
            if let Some(cores) = free_cpus {
                // The priority is the thread's own, and the thread ends with the copy.
                let _ = rustix::process::setpriority_process(None, NICE);
                cores.stay_off();
            }
            context.enter()
        };
        // The programs may have moved since the last chunk.
        let take = |span: Span, bytes: &[u8], hash: Option<ChunkId>| {
            if let Some(cores) = free_cpus {
                cores.stay_off();
            }
            take(span, bytes, hash)
        };
        let few = free_cpus.map_or(workers.len(), |cores| cores.share(workers.len()));
        let work = Work { queue, stop, stream: &stream, free_cpus };
        let result = match (way, bounce) {
            (Way::Bounced, Some(bounce)) => {
                bounce::copy_out(bounce, &mut workers[..few], begin, &work, &take)
            }
            (Way::Bounced, None) => direct::copy_out(&mut workers[..few], begin, &work, &take),
            (Way::Straight { enough }, _) => {
                turns::copy_out(workers, turns::consumers(few), begin, &work, enough, &take)
            }
        };
        // Copies may be under way into staging buffers after a failure: wait before anyone
        // touches or frees them.
        self.context.enter()?;
        stream.synchronize()?;
        result
    }

    /// Writes these spans, which lie in memory of this lane's device that is mapped here. `give` fills the
    /// buffer with the chunk's bytes, or answers with the one byte that fills it.
    ///
    /// # Errors
    /// The driver's error or that of `give`; one of these where there are several. Any part of the spans may have been
    /// written. No copy is under way any more, unless the driver cannot even wait for it.
    pub fn copy_in<E: Send>(
        &mut self,
        work: &[Span],
        stop: &Stop,
        give: &(impl Fn(Span, &mut [u8]) -> Result<Filled, E> + Sync),
    ) -> Result<(), TransferError<E>> {
        let stream = Stream::create(&self.context)?;
        let next = AtomicUsize::new(0);
        let worker = |slots: &mut [Slot; 2]| -> Result<(), TransferError<E>> {
            stream.context().enter()?;
            for (turn, slot) in (0..).map(|i| (i, i % 2)) {
                let slot = &mut slots[slot];
                let Some(span) = work.get(next.fetch_add(1, Ordering::Relaxed)) else { break };
                if stop.is_set() {
                    break;
                }
                if turn >= 2 {
                    slot.event.wait_soon()?;
                }
                let filled = give(*span, &mut slot.staging.bytes_mut()[..span.len]);
                match filled.map_err(TransferError::Chunk)? {
                    Filled::Bytes => stream.copy_in(&slot.staging, span.address, span.len)?,
                    Filled::Constant(byte) => stream.fill(span.address, byte, span.len)?,
                }
                stream.record(&slot.event)?;
            }
            Ok(())
        };
        let result = on_all(&mut self.workers, stop, &worker);
        self.context.enter()?;
        stream.synchronize()?;
        result
    }
}
