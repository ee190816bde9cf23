//! The one way of chunks from the devices into a sink.
//!
//! The devices copy; what arrives is received here, on many threads at once, is put into the sink, and is compared with
//! what was hashed on the device.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use parking_lot::Mutex;

use super::chunks::{Chunk, ProgramBlock};
use super::deferred::{Deferred, WantedFirst};
use crate::base::faults::{fault, skipped};
use crate::base::progress::Progress;
use crate::base::stop::Stop;
use crate::base::threads::joined;
use crate::base::timeline::{Counter, Timeline, Track};
use crate::cuda::{Hashed, Key, Lane, Span, TransferError};
use crate::engine::error::Error;
use crate::store::{ChunkId, ChunkSink, StoreError};

/// Where chunks go, what ends the transfer early, and what is told of it.
#[derive(Clone, Copy)]
pub(super) struct To<'a> {
    pub(super) sink: &'a dyn ChunkSink,
    pub(super) stop: &'a Stop,
    pub(super) progress: &'a dyn Progress,
}

/// How chunks are copied out.
pub(super) enum Way<'a> {
    /// One after the other, from memory that no program writes.
    Quiesced,
    /// One after the other, from memory that programs may be writing, which was hashed with these keys, one for each
    /// lane. When it is `enough`, nothing more is begun after the first copy.
    Ahead { keys: Vec<Arc<Key>>, enough: &'a AtomicBool },
    /// First the chunks that calls of the programs wait for.
    WantedFirst(&'a Deferred),
}

/// Chunks on their way.
pub(super) struct Transfer<'a> {
    /// For the timeline.
    pub(super) name: &'static str,
    pub(super) way: Way<'a>,
    pub(super) to: To<'a>,
    pub(super) pieces: &'a [ProgramBlock],
    pub(super) timeline: &'a Timeline,
}

/// What has come of the chunks of a transfer.
#[derive(Default)]
pub(super) struct Received {
    /// The chunks that the sink has taken, with the hash of what was copied.
    pub(super) stored: Vec<(Span, ChunkId)>,
    /// Chunks that were copied with other bytes than they had when the memory had come to a halt. The first one ends
    /// the transfer.
    pub(super) wrong: Vec<Span>,
}

impl Transfer<'_> {
    /// Copies these spans on all lanes at once. What is received is given after a failure too.
    pub(super) fn run(&self, lanes: &mut [Lane], work: &[Span]) -> (Received, Result<(), Error>) {
        let received = Mutex::new(Received::default());
        received.lock().stored.reserve(work.len());
        let each = self.on_each_lane(lanes.len(), work);
        let ended = std::thread::scope(|scope| {
            let lanes = lanes.iter_mut().zip(&each).enumerate();
            let threads: Vec<_> = lanes
                .filter(|(_, (_, work))| !work.is_empty())
                .map(|(number, (lane, work))| {
                    let received = &received;
                    scope.spawn(move || self.run_on(number, lane, work, received))
                })
                .collect();
            threads.into_iter().try_for_each(joined)
        });
        (received.into_inner(), ended.map_err(Error::from))
    }

    /// Copies the spans of one lane.
    fn run_on(
        &self,
        number: usize,
        lane: &mut Lane,
        work: &[Span],
        received: &Mutex<Received>,
    ) -> Result<(), TransferError<StoreError>> {
        let mut slice = self.timeline.begin(Track::Copies(number), || self.name);
        let bytes = AtomicU64::new(0);
        let receive = |span: Span, plain: &[u8], hash: Option<ChunkId>| {
            self.receive(span, plain, hash, received)?;
            bytes.fetch_add(plain.len() as u64, Ordering::Relaxed);
            Ok(())
        };
        let stop = self.to.stop;
        let ended = match &self.way {
            Way::Quiesced => lane.copy_out(work, stop, &receive),
            Way::Ahead { keys, enough } => {
                let hashed = |span: &Span| {
                    let chunk = self.chunk(span);
                    Hashed { id: chunk.hash.expect("it was hashed"), sum: chunk.sum }
                };
                let receive = |span: Span, plain: &[u8], hash| receive(span, plain, Some(hash));
                lane.copy_ahead(work, &keys[number], &hashed, enough, stop, &receive)
            }
            Way::WantedFirst(deferred) => {
                let queue = WantedFirst::new(deferred, self.pieces, number, work);
                lane.copy_queue(&queue, stop, &receive)
            }
        };
        slice.set_bytes(bytes.load(Ordering::Relaxed));
        ended
    }

    /// Takes the bytes of a span, and their hash if that is known.
    fn receive(
        &self,
        span: Span,
        plain: &[u8],
        hash: Option<ChunkId>,
        received: &Mutex<Received>,
    ) -> Result<(), StoreError> {
        let To { sink, stop, progress } = self.to;
        let id = match hash {
            Some(id) => sink.put_hashed(id, plain)?,
            None => sink.put(plain)?,
        };
        if self.is_expected(&span, id) {
            received.lock().stored.push((span, id));
        } else {
            received.lock().wrong.push(span);
            // The image is lost: no call needs to wait for it any more.
            stop.fail();
        }
        let len = plain.len() as u64;
        progress.advance(len);
        self.timeline.add(Counter::Copied, len);
        Ok(())
    }

    /// Whether these are the bytes that the memory had when it had come to a halt.
    fn is_expected(&self, span: &Span, id: ChunkId) -> bool {
        let is_same = self.chunk(span).hash.is_none_or(|hash| hash == id);
        match self.way {
            Way::Quiesced => is_same,
            // The memory has not come to a halt: what is copied is named by what it is.
            Way::Ahead { .. } => true,
            Way::WantedFirst(_) => {
                let _ = fault("deferred");
                is_same || skipped("compare")
            }
        }
    }

    fn chunk(&self, span: &Span) -> &Chunk {
        &self.pieces[span.block].chunks[span.chunk]
    }

    /// The spans of each lane.
    fn on_each_lane(&self, lanes: usize, work: &[Span]) -> Vec<Vec<Span>> {
        let mut each = vec![Vec::new(); lanes];
        work.iter().for_each(|span| each[self.pieces[span.block].lane].push(*span));
        each
    }
}
