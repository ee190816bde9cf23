//! Bringing everything into a sink: what is copied ahead, what has to be copied before the programs go on, and what is
//! copied while they run, and launches that may write it wait.

use std::collections::HashSet;
use std::sync::Arc;
use std::sync::atomic::AtomicBool;

use gpucr_wire::table::Range;
use gpucr_wire::{Block, Table};

use super::bulk::Bulk;
use super::chunks::ProgramBlock;
use super::deferred::{Deferred, PutOff};
use super::transfer::{Received, To, Transfer, Way};
use crate::base::progress::Progress;
use crate::base::stop::Stop;
use crate::cuda::Span;
use crate::engine::error::Error;
use crate::store::{ChunkId, ChunkSink};

/// The blocks of a program with the chunks that they turned into.
pub(crate) type Saved = Vec<(Block, Vec<ChunkId>)>;

impl Bulk {
    /// Copies chunks that are [worth](Self::worth_copying) it, equal ones once, until it is `enough`, but
    /// some in any case. The program may be writing to them: what is copied is named by what it is.
    /// Gives the number of chunks that were copied; 0 when there are no more.
    ///
    /// # Errors
    /// A copy has failed, or the sink; `stop` was set. Nothing counts as copied then.
    pub(crate) fn copy_some(
        &mut self,
        enough: &AtomicBool,
        sink: &dyn ChunkSink,
        stop: &Stop,
        progress: &dyn Progress,
    ) -> Result<usize, Error> {
        self.mark_known(sink);
        let work = self.plan_ahead();
        let hashers = self.hashers.as_ref().expect("it was hashed");
        let keys = hashers.iter().map(|hasher| hasher.key().clone()).collect();
        let way = Way::Ahead { keys, enough };
        self.run_concurrently(true);
        let (received, copied) = self.run("ahead", way, &work, To { sink, stop, progress });
        self.run_concurrently(false);
        copied?;
        if stop.is_set() {
            return Err(Error::CopyIncomplete);
        }
        let count = received.stored.len();
        for (span, id) in received.stored {
            let chunk = &mut self.pieces[span.block].chunks[span.chunk];
            chunk.copied = Some(id);
            chunk.interval = self.interval;
            // If it has changed since it was hashed, it is not worth another copy before it has
            // stayed unchanged again.
            chunk.clean = chunk.hash == Some(id);
        }
        Ok(count)
    }

    /// Puts off saving what is left and has no shadow until the programs, of which there are so many,
    /// run again. What no program sees at an address, or several processes see, is saved before.
    pub(crate) fn defer(&mut self, programs: usize) -> Result<PutOff, Error> {
        let chunks = || self.pieces.iter().flat_map(|piece| &piece.chunks);
        // Of equal chunks one is saved: one with a shadow, if there is any.
        let mut taken: HashSet<Option<ChunkId>> =
            chunks().filter(|chunk| chunk.shadow.is_some()).map(|chunk| chunk.hash).collect();
        let mut ranges: Vec<Vec<Range>> = vec![Vec::new(); programs];
        let mut count = 0;
        for piece in &mut self.pieces {
            let can_wait = piece.address != 0 && !piece.is_open_to_others;
            let Some(memory) = piece.memory.as_ref().filter(|_| can_wait) else {
                continue;
            };
            let before = count;
            for chunk in &mut piece.chunks {
                let left = chunk.hash.is_some() && chunk.copied != chunk.hash;
                chunk.deferred = left && chunk.shadow.is_none() && taken.insert(chunk.hash);
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
        self.deferred = Arc::new(Deferred::new(tables));
        for piece in self.pieces.iter().filter(|piece| piece.range.is_some()) {
            let Some(chunks) = self.deferred.chunks(piece) else { continue };
            let numbers = (0..piece.chunks.len()).filter(|&number| piece.chunks[number].deferred);
            numbers.for_each(|number| chunks.pend(number));
        }
        Ok(PutOff { shared: self.deferred.clone(), files, chunks: count })
    }

    /// Brings everything into the sink that is not in it, and gives the chunks of each block. The
    /// memory is let go of in any case. What was hashed is taken at its hash: a copy with another
    /// one is an error.
    ///
    /// First what neither has a shadow nor is [deferred](Self::defer), while nothing writes the memory.
    /// Then `released` is called: the programs may go on with their memory. What is deferred comes
    /// next; then no call waits any more, and `settled` is called with whether it was saved.
    /// What has a shadow comes last.
    ///
    /// # Errors
    /// [`Error::Misspeculated`]: deferred memory was written before it was saved. What of it was found
    /// is in `missed`.
    pub(crate) fn save(
        &mut self,
        sink: &dyn ChunkSink,
        stop: &Stop,
        progress: &dyn Progress,
        released: impl FnOnce(),
        settled: impl FnOnce(bool),
    ) -> Result<Vec<Vec<ChunkId>>, Error> {
        /// Whatever happens, no call is left waiting.
        struct End(Arc<Deferred>);
        impl Drop for End {
            fn drop(&mut self) {
                self.0.end();
            }
        }
        let deferred = self.deferred.clone();
        let end = End(deferred.clone());
        let to = To { sink, stop, progress };
        let stages = self.plan_rest();
        self.transfer("what is left", Way::Quiesced, &stages.now, to)?;
        self.let_go(|piece| piece.range.is_none());
        released();
        self.run_concurrently(true);
        let way = Way::WantedFirst(&deferred);
        let saved = self.transfer("deferred", way, &stages.deferred, to);
        drop(end);
        self.let_go(|_| true);
        settled(saved.is_ok());
        saved?;
        self.transfer("shadows", Way::Quiesced, &stages.shadowed, to)?;
        self.hashes().ok_or(Error::CopyIncomplete)
    }

    fn let_go(&mut self, of: impl Fn(&ProgramBlock) -> bool) {
        for piece in self.pieces.iter_mut().filter(|piece| of(piece)) {
            piece.memory = None;
        }
    }

    /// Copies all of these spans and takes down the hash of each.
    fn transfer(
        &mut self,
        name: &'static str,
        way: Way<'_>,
        work: &[Span],
        to: To<'_>,
    ) -> Result<(), Error> {
        let is_deferred = matches!(way, Way::WantedFirst(_));
        let (Received { stored, wrong }, copied) = self.run(name, way, work, to);
        if let Some(first) = wrong.first() {
            if is_deferred && self.deferred.is_running() {
                let miss = |span: &Span| self.pieces[span.block].miss(span.chunk);
                self.missed = wrong.iter().map(miss).collect();
                return Err(Error::Misspeculated { chunks: wrong.len() });
            }
            let id = self.pieces[first.block].id;
            let what = format!("chunk {} of block {id}", first.chunk);
            return Err(Error::WrongCopy { what });
        }
        copied?;
        if stored.len() < work.len() {
            return Err(Error::CopyIncomplete);
        }
        for (span, id) in stored {
            self.pieces[span.block].chunks[span.chunk].hash = Some(id);
        }
        Ok(())
    }

    fn run(
        &mut self,
        name: &'static str,
        way: Way<'_>,
        work: &[Span],
        to: To<'_>,
    ) -> (Received, Result<(), Error>) {
        let (pieces, timeline) = (&self.pieces, &self.timeline);
        Transfer { name, way, to, pieces, timeline }.run(&mut self.lanes, work)
    }
}
