//! Bringing everything into the store: what has to be copied before the programs go on, and what is
//! copied beside them, while launches that may write it wait.

use std::collections::HashSet;
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::time::Duration;

use gpucr_wire::Table;
use gpucr_wire::chunks::Chunks;
use gpucr_wire::table::{Range, Wait};
use parking_lot::Mutex;

use super::{Bulk, Piece, joined, spans};
use crate::base::faults::{fault, skipped};
use crate::base::progress::Progress;
use crate::base::stop::Stop;
use crate::base::timeline::{Counter, Timeline, Track};
use crate::cuda::{Hashed, Key, Lane, Queue, Span, TransferError};
use crate::engine::error::Error;
use crate::store::{ChunkId, ChunkWriter, StoreError};

/// The memory that is saved while the programs run, as far as their shims need to know.
#[derive(Default)]
pub(crate) struct Deferred {
    /// For each program that has such memory.
    tables: Vec<Option<Table>>,
    running: AtomicBool,
}

impl Deferred {
    /// The ranges of a program's table.
    pub(crate) fn ranges(&self, program: usize) -> &[Range] {
        self.tables.get(program).and_then(Option::as_ref).map_or(&[], Table::ranges)
    }

    /// From now on programs may run, and what they write can be written too early.
    pub(crate) fn set_running(&self) {
        self.running.store(true, Ordering::SeqCst);
    }

    /// Calls of all programs that have waited, and for how long, added up.
    pub(crate) fn held(&self) -> (u64, Duration) {
        let headers = self.tables.iter().flatten().map(Table::header);
        let of = |header: &gpucr_wire::table::Header| {
            (header.held.load(Ordering::Relaxed), header.held_ns.load(Ordering::Relaxed))
        };
        let (held, ns) = headers.map(of).fold((0, 0), |a, b| (a.0 + b.0, a.1 + b.1));
        (held, Duration::from_nanos(ns))
    }

    /// The first waits of each program.
    pub(crate) fn waits(&self) -> Vec<Wait> {
        self.tables.iter().flatten().flat_map(|table| table.header().waits()).collect()
    }

    /// Nobody waits any more.
    pub(crate) fn end(&self) {
        self.tables.iter().flatten().for_each(Table::end);
    }

    /// How many chunks are not saved.
    pub(crate) fn left(&self) -> u64 {
        self.tables.iter().flatten().map(Table::left).sum()
    }

    /// Whether a call of a program waits for one of them.
    pub(crate) fn is_wanted(&self) -> bool {
        self.tables.iter().flatten().any(Table::is_wanted)
    }

    fn chunks(&self, piece: &Piece) -> Option<Chunks<'_>> {
        Some(self.tables.get(piece.program)?.as_ref()?.chunks(piece.range?))
    }
}

/// What is put off.
pub(crate) struct PutOff {
    pub(crate) shared: Arc<Deferred>,
    /// The file of each program's chunk table, if it has one.
    pub(crate) files: Vec<Option<OwnedFd>>,
    pub(crate) chunks: u64,
}

/// The chunks of a lane that are saved while the programs run, those that launches wait for first.
struct WantedFirst<'a> {
    deferred: &'a Deferred,
    pieces: &'a [Piece],
    /// The pieces of the lane that have such chunks.
    here: Vec<usize>,
    work: &'a [Span],
    next: AtomicUsize,
}

impl Queue for WantedFirst<'_> {
    fn next(&self) -> Option<Span> {
        for &at in &self.here {
            let piece = &self.pieces[at];
            if let Some(memory) = &piece.memory
                && let Some(chunk) = self.deferred.chunks(piece)?.claim_wanted()
            {
                return Some(Span::of(memory, at, chunk));
            }
        }
        loop {
            let span = *self.work.get(self.next.fetch_add(1, Ordering::Relaxed))?;
            // Another one may have had it because it was wanted.
            if self.deferred.chunks(&self.pieces[span.block])?.claim(span.chunk) {
                return Some(span);
            }
        }
    }

    fn arrived(&self, span: &Span) -> bool {
        let chunks = self.deferred.chunks(&self.pieces[span.block]);
        chunks.is_some_and(|chunks| chunks.finish(span.chunk))
    }

    fn is_urgent(&self) -> bool {
        true
    }
}

impl Bulk {
    /// Puts off saving what is left and has no shadow until the programs, of which there are so many,
    /// run again. What no program sees at an address is saved before.
    pub(crate) fn defer(&mut self, programs: usize) -> Result<PutOff, Error> {
        let chunks = || self.pieces.iter().flat_map(|piece| &piece.chunks);
        // Of equal chunks one is saved: one with a shadow, if there is any.
        let mut taken: HashSet<Option<ChunkId>> =
            chunks().filter(|chunk| chunk.shadow.is_some()).map(|chunk| chunk.seen).collect();
        let mut ranges: Vec<Vec<Range>> = vec![Vec::new(); programs];
        let mut count = 0;
        for piece in &mut self.pieces {
            let Some(memory) = piece.memory.as_ref().filter(|_| piece.address != 0) else {
                continue;
            };
            let before = count;
            for chunk in &mut piece.chunks {
                let left = chunk.seen.is_some() && chunk.copied != chunk.seen;
                chunk.deferred = left && chunk.shadow.is_none() && taken.insert(chunk.seen);
                count += u64::from(chunk.deferred);
            }
            if count > before {
                let of_program = &mut ranges[piece.program];
                piece.range = Some(of_program.len());
                of_program.push(Range { address: piece.address, size: memory.len() });
            }
        }
        let (mut tables, mut files) = (Vec::new(), Vec::new());
        for ranges in ranges {
            let made = (!ranges.is_empty()).then(|| Table::create(ranges)).transpose();
            let made = made
                .map_err(|source| Error::Io { what: "cannot make shared memory".into(), source })?;
            let (table, file) = made.unzip();
            tables.push(table);
            files.push(file);
        }
        self.deferred = Arc::new(Deferred { tables, running: AtomicBool::new(false) });
        for piece in self.pieces.iter().filter(|piece| piece.range.is_some()) {
            let Some(chunks) = self.deferred.chunks(piece) else { continue };
            let numbers = (0..piece.chunks.len()).filter(|&number| piece.chunks[number].deferred);
            numbers.for_each(|number| chunks.pend(number));
        }
        Ok(PutOff { shared: self.deferred.clone(), files, chunks: count })
    }

    /// Lets go of all memory and of what is known of it.
    pub(crate) fn forget(&mut self) {
        self.pieces.clear();
        self.by_address.clear();
        self.shadows.clear();
        self.missed.clear();
        self.deferred = Arc::default();
        self.run_beside(false);
    }

    /// Brings everything into the store that is not in it, and gives the chunks of each block. The
    /// memory is let go of in any case. What was looked at is taken at its hash: a copy with another
    /// one is an error.
    ///
    /// First what neither has a shadow nor is [deferred](Self::defer), while the memory stands still.
    /// Then `released` is called: the programs may go on with their memory. What is deferred comes
    /// next; then nobody waits any more, and `settled` is called with whether it was saved.
    /// What has a shadow comes last.
    ///
    /// # Errors
    /// [`Error::Misspeculated`]: deferred memory was written before it was saved. What of it was found
    /// is in `missed`.
    pub(crate) fn save(
        &mut self,
        store: &ChunkWriter,
        stop: &Stop,
        progress: &dyn Progress,
        released: impl FnOnce(),
        settled: impl FnOnce(bool),
    ) -> Result<Vec<Vec<ChunkId>>, Error> {
        /// Whatever happens, nobody is left waiting.
        struct End(Arc<Deferred>);
        impl Drop for End {
            fn drop(&mut self) {
                self.0.end();
            }
        }
        let end = End(self.deferred.clone());
        let mut taken = HashSet::new();
        let mut work = spans(&self.pieces, |_, c| c.seen.is_none() || c.copied != c.seen);
        // Of equal chunks one is saved, and best one that is free to wait.
        work.sort_by_key(|span| self.stage(span));
        work.retain(|span| {
            let seen = self.seen(span);
            seen.is_none() || taken.insert(seen)
        });
        let of = |stage| work.iter().filter(|span| self.stage(span) == stage).copied().collect();
        let stages: [Vec<Span>; 3] = [of(Stage::Shadowed), of(Stage::Deferred), of(Stage::Now)];
        let [shadowed, deferred, now] = stages;
        let saved = self.transfer("what is left", &now, store, stop, progress)?;
        self.check(saved)?;
        self.let_go(|piece| piece.range.is_none());
        released();
        self.run_beside(true);
        let saved = self.save_deferred(&deferred, store, stop, progress);
        drop(end);
        self.let_go(|_| true);
        settled(saved.is_ok());
        saved?;
        let saved = self.transfer("shadows", &shadowed, store, stop, progress)?;
        self.check(saved)?;
        self.hashes().ok_or(Error::CopyIncomplete)
    }

    /// When a chunk is saved.
    fn stage(&self, span: &Span) -> Stage {
        let chunk = &self.pieces[span.block].chunks[span.chunk];
        match chunk.shadow {
            Some(_) => Stage::Shadowed,
            None if chunk.deferred => Stage::Deferred,
            None => Stage::Now,
        }
    }

    fn let_go(&mut self, of: impl Fn(&Piece) -> bool) {
        for piece in self.pieces.iter_mut().filter(|piece| of(piece)) {
            piece.memory = None;
        }
    }

    /// Saves what is deferred, and compares it with what was seen when the programs stood still.
    fn save_deferred(
        &mut self,
        work: &[Span],
        store: &ChunkWriter,
        stop: &Stop,
        progress: &dyn Progress,
    ) -> Result<(), Error> {
        let saved = Mutex::new(Vec::with_capacity(work.len()));
        let wrong = Mutex::new(Vec::new());
        let (pieces, deferred) = (&self.pieces, self.deferred.clone());
        let trusted = skipped("compare");
        let take = |span: Span, id: ChunkId| {
            let _ = fault("beside");
            if pieces[span.block].chunks[span.chunk].seen == Some(id) || trusted {
                saved.lock().push((span, id));
            } else {
                wrong.lock().push(span);
                // The image is lost: nobody needs wait for it any more.
                stop.fail();
            }
        };
        let moved = Moved {
            name: "beside the program",
            work: on_each_lane(pieces, self.lanes.len(), work),
            store,
            progress,
            timeline: &self.timeline,
        };
        let copied = moved.through(&mut self.lanes, take, |lane, copier, work, take| {
            let here = |at: &usize| pieces[*at].lane == lane && pieces[*at].range.is_some();
            let here = (0..pieces.len()).filter(here).collect();
            let deferred = deferred.as_ref();
            let queue = WantedFirst { deferred, pieces, here, work, next: AtomicUsize::new(0) };
            copier.copy_queue(&queue, stop, take)
        });
        let (saved, wrong) = (saved.into_inner(), wrong.into_inner());
        if !wrong.is_empty() && deferred.running.load(Ordering::SeqCst) {
            self.missed =
                wrong.iter().map(|span| self.pieces[span.block].miss(span.chunk)).collect();
            return Err(Error::Misspeculated { chunks: wrong.len() });
        }
        if let Some(span) = wrong.first() {
            return Err(self.wrong(span));
        }
        copied?;
        if saved.len() < work.len() {
            return Err(Error::CopyIncomplete);
        }
        for (span, id) in saved {
            self.pieces[span.block].chunks[span.chunk].seen = Some(id);
        }
        Ok(())
    }

    fn wrong(&self, span: &Span) -> Error {
        let id = self.pieces[span.block].id;
        Error::WrongCopy { what: format!("chunk {} of block {id}", span.chunk) }
    }

    /// Compares what was copied with what was seen on the device.
    fn check(&mut self, saved: Vec<(Span, ChunkId)>) -> Result<(), Error> {
        for (span, id) in saved {
            if self.seen(&span).is_some_and(|seen| seen != id) {
                return Err(self.wrong(&span));
            }
            self.pieces[span.block].chunks[span.chunk].seen = Some(id);
        }
        Ok(())
    }

    /// Copies these spans, which were looked at and which programs may be writing, on all lanes at once, or the first of
    /// them until it is `enough`. Gives the address of each that was copied.
    pub(super) fn transfer_ahead(
        &mut self,
        work: &[Span],
        enough: &AtomicBool,
        store: &ChunkWriter,
        stop: &Stop,
        progress: &dyn Progress,
    ) -> Result<Vec<(Span, ChunkId)>, Error> {
        let copied = Mutex::new(Vec::with_capacity(work.len()));
        let moved = Moved {
            name: "ahead",
            work: on_each_lane(&self.pieces, self.lanes.len(), work),
            store,
            progress,
            timeline: &self.timeline,
        };
        let hashers = self.hashers.as_ref().expect("it was looked at");
        let keys: Vec<Arc<Key>> = hashers.iter().map(|hasher| hasher.key().clone()).collect();
        let pieces = &self.pieces;
        let hashed = |span: &Span| {
            let chunk = &pieces[span.block].chunks[span.chunk];
            Hashed { id: chunk.seen.expect("it was looked at"), sum: chunk.sum }
        };
        let stored = |span, id| copied.lock().push((span, id));
        moved.through(&mut self.lanes, stored, |lane, copier, work, take| {
            let take = |span, bytes: &[u8], id| take(span, bytes, Some(id));
            copier.copy_ahead(work, &keys[lane], &hashed, enough, stop, &take)
        })?;
        if stop.is_set() { Err(Error::CopyIncomplete) } else { Ok(copied.into_inner()) }
    }

    /// Copies these spans into the store, on all lanes at once. Gives the address of each. The timeline gets `name`.
    pub(super) fn transfer(
        &mut self,
        name: &'static str,
        work: &[Span],
        store: &ChunkWriter,
        stop: &Stop,
        progress: &dyn Progress,
    ) -> Result<Vec<(Span, ChunkId)>, Error> {
        let copied = Mutex::new(Vec::with_capacity(work.len()));
        let moved = Moved {
            name,
            work: on_each_lane(&self.pieces, self.lanes.len(), work),
            store,
            progress,
            timeline: &self.timeline,
        };
        let take = |span, id| copied.lock().push((span, id));
        moved.through(&mut self.lanes, take, |_, copier, work, take| {
            copier.copy_out(work, stop, take)
        })?;
        let copied = copied.into_inner();
        if copied.len() < work.len() { Err(Error::CopyIncomplete) } else { Ok(copied) }
    }
}

/// When a chunk is saved that the store lacks.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
enum Stage {
    Shadowed,
    Deferred,
    Now,
}

/// What is moved on the lanes, all at once.
struct Moved<'a> {
    /// For the timeline.
    name: &'static str,
    /// For each lane.
    work: Vec<Vec<Span>>,
    store: &'a ChunkWriter,
    progress: &'a dyn Progress,
    timeline: &'a Timeline,
}

/// Takes the bytes of a span, and their hash if it is known.
type Take<'a> = dyn Fn(Span, &[u8], Option<ChunkId>) -> Result<(), StoreError> + Sync + 'a;

impl Moved<'_> {
    /// Lets `copy` copy the work of each lane; it gives what it copies to the function that it is given,
    /// which puts it into the store, and tells `stored` under which address.
    fn through(
        &self,
        lanes: &mut [Lane],
        stored: impl Fn(Span, ChunkId) + Sync,
        copy: impl Fn(usize, &mut Lane, &[Span], &&Take<'_>) -> Result<(), TransferError<StoreError>>
        + Sync,
    ) -> Result<(), Error> {
        let (stored, copy) = (&stored, &copy);
        std::thread::scope(|scope| {
            let lanes = lanes.iter_mut().enumerate().zip(&self.work);
            let lanes = lanes.filter(|(_, work)| !work.is_empty());
            let threads: Vec<_> = lanes
                .map(|((lane, copier), work)| {
                    scope.spawn(move || {
                        let mut slice = self.timeline.begin(Track::Copies(lane), || self.name);
                        let sum = AtomicU64::new(0);
                        let take: &Take<'_> = &|span, bytes, hash| {
                            let id = match hash {
                                Some(id) => self.store.put_hashed(id, bytes)?,
                                None => self.store.put(bytes)?,
                            };
                            stored(span, id);
                            let len = bytes.len() as u64;
                            sum.fetch_add(len, Ordering::Relaxed);
                            self.progress.advance(len);
                            self.timeline.add(Counter::Copied, len);
                            Ok(())
                        };
                        let outcome = copy(lane, copier, work, &take);
                        slice.set_bytes(sum.load(Ordering::Relaxed));
                        outcome
                    })
                })
                .collect();
            Ok(threads.into_iter().try_for_each(joined)?)
        })
    }
}

/// The spans of each lane.
fn on_each_lane(pieces: &[Piece], lanes: usize, work: &[Span]) -> Vec<Vec<Span>> {
    let mut each = vec![Vec::new(); lanes];
    work.iter().for_each(|span| each[pieces[span.block].lane].push(*span));
    each
}
