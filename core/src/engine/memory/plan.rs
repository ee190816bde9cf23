//! Which chunks are copied, and in which order.

use std::cmp::Reverse;
use std::collections::HashSet;

use super::bulk::Bulk;
use super::chunks::{Chunk, spans};
use crate::cuda::Span;
use crate::store::{ChunkId, ChunkSink};

/// When a chunk is saved that the sink lacks.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
enum Stage {
    Shadowed,
    Deferred,
    Now,
}

/// What is left to be saved, by when that is done.
pub(super) struct Stages {
    /// Before the programs go on.
    pub(super) now: Vec<Span>,
    /// While they run, before a launch may write it.
    pub(super) deferred: Vec<Span>,
    /// While they run; no program can write it.
    pub(super) shadowed: Vec<Span>,
}

/// So many chunks in a row are copied in their order, which is quicker than one by one.
const ROW: usize = 16;

/// When a chunk of a block of so many comes, of which `last` was written last: memory that is filled is filled upwards
/// as a rule, so what lies just above that is written next, and what lies just below it comes last of all.
fn turn(chunk: usize, last: usize, chunks: usize) -> (usize, Reverse<usize>) {
    let below = (last + chunks - chunk) % chunks;
    (below / ROW, Reverse(below))
}

impl Bulk {
    /// Lets the chunks that have bytes between two addresses of a program wait until
    /// [`hold_nothing_back`](Self::hold_nothing_back). Says whether there are any.
    pub(crate) fn hold_back(&mut self, program: usize, start: u64, end: u64) -> bool {
        let mut any = false;
        let pieces: Vec<usize> = self.overlapping(program, start, end).collect();
        for at in pieces {
            let piece = &mut self.pieces[at];
            for number in piece.chunks_within(start, end) {
                piece.chunks[number].held_back = true;
                any = true;
            }
        }
        any
    }

    /// From now on no chunk waits for others to be copied first.
    pub(crate) fn hold_nothing_back(&mut self) {
        let chunks = self.pieces.iter_mut().flat_map(|piece| &mut piece.chunks);
        chunks.for_each(|chunk| chunk.held_back = false);
    }

    /// Bytes of the chunks that were clean in the last two hash passes and are not in the sink.
    pub(crate) fn worth_copying(&mut self, sink: &dyn ChunkSink) -> u64 {
        self.mark_known(sink);
        spans(&self.pieces, |_, chunk| chunk.is_worth_copying())
            .iter()
            .map(|span| span.len as u64)
            .sum()
    }

    /// Chunks that the sink has need not be copied, from wherever it has them.
    pub(super) fn mark_known(&mut self, sink: &dyn ChunkSink) {
        let chunks = self.pieces.iter().flat_map(|piece| &piece.chunks);
        let unknown = chunks.filter(|chunk| chunk.copied != chunk.hash);
        sink.expect(&mut unknown.filter_map(|chunk| chunk.hash));
        for chunk in self.pieces.iter_mut().flat_map(|piece| &mut piece.chunks) {
            if chunk.copied != chunk.hash && chunk.hash.is_some_and(|id| sink.contains(&id)) {
                chunk.copied = chunk.hash;
            }
        }
    }

    /// The chunks that are [worth](Self::worth_copying) a copy, equal ones once; last those that will be written soon by
    /// a program that goes on as it has begun.
    pub(super) fn plan_ahead(&self) -> Vec<Span> {
        let mut taken = HashSet::new();
        let mut work = spans(&self.pieces, |_, chunk| chunk.is_worth_copying());
        let is_written = |chunk: &Chunk| chunk.hashed_twice && !chunk.clean;
        let written: Vec<Option<usize>> =
            self.pieces.iter().map(|piece| piece.chunks.iter().rposition(is_written)).collect();
        // What is not written is as good at any time, and comes first.
        work.sort_by_key(|span| {
            let (last, chunks) = (written[span.block], self.pieces[span.block].chunks.len());
            (last.is_some(), span.block, turn(span.chunk, last.unwrap_or(chunks - 1), chunks))
        });
        work.retain(|span| taken.insert(self.hash_of(span)));
        work
    }

    /// Everything that the sink lacks. Of equal chunks one is saved, and best one that is free to wait.
    pub(super) fn plan_rest(&self) -> Stages {
        let mut taken = HashSet::new();
        let mut work = spans(&self.pieces, |_, c| c.hash.is_none() || c.copied != c.hash);
        work.sort_by_key(|span| self.stage(span));
        work.retain(|span| {
            let hash = self.hash_of(span);
            hash.is_none() || taken.insert(hash)
        });
        let of = |stage| work.iter().filter(|span| self.stage(span) == stage).copied().collect();
        Stages { now: of(Stage::Now), deferred: of(Stage::Deferred), shadowed: of(Stage::Shadowed) }
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

    /// Bytes that [`save`](Self::save) has to copy.
    pub(crate) fn left(&self) -> u64 {
        let left =
            spans(&self.pieces, |_, chunk| chunk.hash.is_none() || chunk.copied != chunk.hash);
        left.iter().map(|span| span.len as u64).sum()
    }

    /// What is left to be saved on a lane's device.
    pub(super) fn left_on(&self, lane: usize) -> Vec<Span> {
        spans(&self.pieces, |piece, chunk| piece.lane == lane && chunk.copied != chunk.hash)
    }

    /// The hash that the chunk had in the last hash pass.
    pub(super) fn hash_of(&self, span: &Span) -> Option<ChunkId> {
        self.pieces[span.block].chunks[span.chunk].hash
    }

    /// The chunk will be saved from there.
    pub(super) fn set_shadow(&mut self, span: &Span, address: u64) {
        self.pieces[span.block].chunks[span.chunk].shadow = Some(address);
    }

    /// The hash of each chunk of each block: what the image will say, once all of it is saved. None
    /// where not everything has been hashed.
    pub(crate) fn hashes(&self) -> Option<Vec<Vec<ChunkId>>> {
        self.pieces.iter().map(|p| p.chunks.iter().map(|chunk| chunk.hash).collect()).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_about_to_be_written_is_copied_last() {
        const CHUNKS: usize = 3 * ROW;
        let order = |last| {
            let mut order: Vec<usize> = (0..CHUNKS).collect();
            order.sort_by_key(|chunk| turn(*chunk, last, CHUNKS));
            order
        };
        let last = ROW + 2;
        let rows = [(3..=last).collect(), (CHUNKS - ROW + 3..CHUNKS).chain(0..3).collect()];
        let rows: [Vec<usize>; 2] = rows;
        let rest: Vec<usize> = (last + 1..CHUNKS - ROW + 3).collect();
        assert_eq!(order(last), [&rows[0][..], &rows[1], &rest].concat());
        // Nothing is known of a block that was not written: it may be before long, from its begin on.
        assert_eq!(order(CHUNKS - 1)[CHUNKS - ROW..], (0..ROW).collect::<Vec<_>>());
    }
}
