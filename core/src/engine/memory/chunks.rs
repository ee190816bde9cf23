//! What is known of device memory, chunk by chunk.

use gpucr_wire::CHUNK_SIZE;

use crate::cuda::{SharedBlock, Span};
use crate::store::ChunkId;

/// A block of a program's memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Extent {
    pub(crate) id: u64,
    /// Where the program sees its first byte.
    pub(crate) low: u64,
    /// The address behind its last byte.
    pub(crate) end: u64,
}

/// One block of one program, with its chunks.
pub(super) struct ProgramBlock {
    pub(super) program: usize,
    pub(super) id: u64,
    /// Where the program sees its start; 0 if it does not.
    pub(super) address: u64,
    pub(super) lane: usize,
    /// `None` when the program has it for itself again.
    pub(super) memory: Option<SharedBlock>,
    pub(super) chunks: Vec<Chunk>,
    /// Whether other processes have it open: they could write it without being held up.
    pub(super) is_open_to_others: bool,
    /// The block's number in the chunk table of its program, if it is there.
    pub(super) range: Option<usize>,
}

impl Chunk {
    /// Whether it was clean in the last two hash passes, and the sink lacks it.
    pub(super) fn is_worth_copying(&self) -> bool {
        self.clean && !self.held_back && self.copied != self.hash
    }
}

impl ProgramBlock {
    /// The address behind its last chunk, as the program sees it.
    pub(super) fn end(&self) -> u64 {
        self.address.saturating_add(self.chunks.len() as u64 * CHUNK_SIZE)
    }

    /// The numbers of the chunks that have bytes between two addresses of the program.
    pub(super) fn chunks_within(&self, start: u64, end: u64) -> std::ops::Range<usize> {
        let (start, end) = (start.max(self.address), end.min(self.end()));
        if self.address == 0 || start >= end {
            return 0..0;
        }
        let number = |address: u64| ((address - self.address) / CHUNK_SIZE) as usize;
        number(start)..number(end - 1) + 1
    }

    pub(super) fn miss(&self, number: usize) -> Miss {
        let offset = if self.address == 0 { 0 } else { number as u64 * CHUNK_SIZE };
        Miss {
            program: self.program,
            address: self.address + offset,
            size: CHUNK_SIZE,
            interval: self.chunks[number].interval,
        }
    }

    /// How many bytes of a chunk lie between two addresses of the program.
    pub(super) fn overlap(&self, number: usize, start: u64, end: u64) -> u64 {
        let first = self.address + number as u64 * CHUNK_SIZE;
        end.min(first + CHUNK_SIZE).saturating_sub(start.max(first))
    }
}

/// What is known of one chunk of device memory.
#[derive(Debug, Clone, Copy, Default)]
pub(super) struct Chunk {
    /// Its hash in the last hash pass.
    pub(super) hash: Option<ChunkId>,
    /// Its sum in the last hash pass, by its lane's hasher.
    pub(super) sum: u64,
    /// Whether it had the same hash in the hash pass before that.
    pub(super) clean: bool,
    /// Whether it was hashed in the hash pass before that.
    pub(super) hashed_twice: bool,
    /// Whether it ever had another hash than in the hash pass before.
    pub(super) was_dirty: bool,
    /// Whether launches may write it: then others are copied first.
    pub(super) held_back: bool,
    /// The [`Bulk::interval`](super::Bulk::interval) in which it was copied.
    pub(super) interval: usize,
    /// The hash of the bytes that were last copied of it, or would have been had the store not had
    /// them already.
    pub(super) copied: Option<ChunkId>,
    /// Where its shadow is.
    pub(super) shadow: Option<u64>,
    /// Whether it is saved while the program runs.
    pub(super) deferred: bool,
}

/// A chunk that had changed after it was copied.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Miss {
    pub(crate) program: usize,
    /// Where the program sees it; 0 if it does not.
    pub(crate) address: u64,
    pub(crate) size: u64,
    /// The [`Bulk::interval`](super::Bulk::interval) in which it was copied.
    pub(crate) interval: usize,
}

/// How chunks that were expected to change compare with the ones that did.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, serde::Serialize)]
pub struct Compared {
    /// Chunks that were expected to change.
    pub expected: u64,
    /// Chunks that were expected to change, and did.
    pub changed: u64,
    /// Chunks that changed unexpectedly.
    pub missed: u64,
}

/// The chunks that `wanted` admits, with the indices of their pieces.
pub(super) fn spans(
    pieces: &[ProgramBlock],
    wanted: impl Fn(&ProgramBlock, &Chunk) -> bool,
) -> Vec<Span> {
    let mut spans = Vec::new();
    for (number, piece) in pieces.iter().enumerate() {
        let wanted = (0..piece.chunks.len()).filter(|&chunk| wanted(piece, &piece.chunks[chunk]));
        let Some(memory) = &piece.memory else { continue };
        spans.extend(wanted.map(|chunk| {
            let span = Span::of(memory, number, chunk);
            let shadow = piece.chunks[chunk].shadow;
            Span { address: shadow.unwrap_or(span.address), ..span }
        }));
    }
    spans
}
