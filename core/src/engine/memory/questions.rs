//! What is asked of the chunks by their addresses in a program.

use std::collections::HashSet;
use std::sync::LazyLock;

use gpucr_wire::CHUNK_SIZE;

use super::bulk::Bulk;
use super::chunks::{Chunk, Compared, Extent, ProgramBlock};
use crate::store::ChunkId;

/// A block of a program, and what its chunks were in the last hash pass, where they were in it.
pub(crate) struct Laid {
    /// Number of the program.
    pub(crate) program: usize,
    pub(crate) id: u64,
    /// UUID of its device.
    pub(crate) device: [u8; 16],
    /// Bytes.
    pub(crate) size: u64,
    pub(crate) chunks: Vec<Option<ChunkId>>,
}

impl Bulk {
    /// All blocks that are mapped, with their contents.
    pub(crate) fn laid(&self) -> Vec<Laid> {
        let laid = |piece: &ProgramBlock| {
            let memory = piece.memory.as_ref()?;
            Some(Laid {
                program: piece.program,
                id: piece.id,
                device: memory.device().uuid,
                size: memory.len(),
                chunks: piece.chunks.iter().map(|chunk| chunk.hash).collect(),
            })
        };
        self.pieces.iter().filter_map(laid).collect()
    }

    /// The blocks of a program that have stayed unchanged since the first hash pass, without blocks that have a chunk
    /// of zeros: that is room for something.
    pub(crate) fn unchanged(&self, program: usize) -> Vec<Extent> {
        static ZEROS: LazyLock<ChunkId> =
            LazyLock::new(|| ChunkId::of(&vec![0; CHUNK_SIZE as usize]));
        let unchanged =
            |chunk: &Chunk| chunk.hashed_twice && !chunk.was_dirty && chunk.hash != Some(*ZEROS);
        let is_unchanged = |piece: &&ProgramBlock| {
            piece.program == program && piece.address != 0 && piece.chunks.iter().all(unchanged)
        };
        let extent = |p: &ProgramBlock| Extent { id: p.id, low: p.address, end: p.end() };
        self.pieces.iter().filter(is_unchanged).map(extent).collect()
    }

    /// Whether memory of a program has changed between the last two hash passes; `None` where that is not
    /// known, because it was not there both times.
    pub(crate) fn has_changed(&self, program: usize, address: u64, size: u64) -> Option<bool> {
        let end = address.checked_add(size)?;
        let (mut covered, mut changed) = (0, false);
        for at in self.overlapping(program, address, end) {
            let piece = &self.pieces[at];
            for number in piece.chunks_within(address, end) {
                let chunk = &piece.chunks[number];
                if !chunk.hashed_twice {
                    return None;
                }
                covered += piece.overlap(number, address, end);
                changed |= !chunk.clean;
            }
        }
        (covered == size).then_some(changed)
    }

    /// Compares the chunks of a program that have changed between the last two hash passes with the ones that
    /// have bytes in some ranges of its addresses.
    pub(crate) fn compare(
        &self,
        program: usize,
        ranges: impl IntoIterator<Item = (u64, u64)>,
    ) -> Compared {
        let mut expected = HashSet::new();
        for (start, end) in ranges {
            for at in self.overlapping(program, start, end) {
                expected
                    .extend(self.pieces[at].chunks_within(start, end).map(|number| (at, number)));
            }
        }
        let mut compared = Compared::default();
        for (at, piece) in self.pieces.iter().enumerate().filter(|(_, p)| p.program == program) {
            let chunks = piece.chunks.iter().enumerate().filter(|(_, chunk)| chunk.hashed_twice);
            for (number, chunk) in chunks {
                match (expected.contains(&(at, number)), !chunk.clean) {
                    (true, changed) => {
                        compared.expected += 1;
                        compared.changed += u64::from(changed);
                    }
                    (false, changed) => compared.missed += u64::from(changed),
                }
            }
        }
        compared
    }

    /// The places of the blocks that have bytes between two addresses of a program.
    pub(super) fn overlapping(
        &self,
        program: usize,
        start: u64,
        end: u64,
    ) -> impl Iterator<Item = usize> {
        let below = self.by_address.range((program, 0)..(program, end)).rev().map(|(_, at)| *at);
        below.take_while(move |at| self.pieces[*at].end() > start)
    }
}
