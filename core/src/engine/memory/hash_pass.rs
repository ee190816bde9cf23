//! Hash passes: the devices hash all memory where it is, which shows what has changed.

use super::bulk::Bulk;
use super::chunks::{Miss, spans};
use crate::base::threads::joined;
use crate::base::timeline::{Counter, Misspeculation, Track};
use crate::cuda::{DriverError, Hashed, Hasher, Span};
use crate::engine::error::Error;
use crate::store::ChunkSink;

/// What a check of all device memory has found.
#[derive(Debug, Clone, Default, PartialEq, serde::Serialize)]
pub struct Validation {
    /// Chunks of device memory, all of which were hashed while the program was stopped.
    pub chunks: u64,
    /// Chunks that had been copied before, in the belief that they would not change any more.
    pub predicted_clean: u64,
    /// The chunks among these that had changed all the same.
    pub misspeculated: u64,
    /// Which allocations the changed chunks belong to, and what may have written them; at most 100.
    pub misspeculations: Vec<Misspeculation>,
    /// Chunks copied while the program was stopped, misspeculated ones among them.
    pub recopied: u64,
    /// Milliseconds that hashing and comparing took.
    pub ms: f64,
}

impl Bulk {
    /// Makes ready to hash. `false` where the driver refuses; copying works all the same.
    pub(crate) fn prepare_hashing(&mut self) -> bool {
        let hashers = self.lanes.iter().map(|lane| Hasher::prepare(lane.context()));
        match hashers.collect::<Result<Vec<_>, _>>() {
            Ok(hashers) => self.hashers = Some(hashers),
            Err(error) => tracing::warn!(%error, "device memory cannot be hashed"),
        }
        self.hashers.is_some()
    }

    /// Hashes all memory where it is. What is known of the chunks is brought up to date.
    pub(crate) fn hash_pass(&mut self) -> Result<u64, Error> {
        let mut slice = self.timeline.begin(Track::HashPasses, || "hash pass");
        let hashers = self.hashers.as_mut().expect("made ready to hash");
        let pieces = &self.pieces;
        let hashes: Vec<Vec<(Span, Hashed)>> = std::thread::scope(|scope| {
            let threads: Vec<_> = hashers
                .iter_mut()
                .enumerate()
                .map(|(lane, hasher)| {
                    scope.spawn(move || -> Result<_, DriverError> {
                        let spans = spans(pieces, |piece, _| piece.lane == lane);
                        let places: Vec<_> = spans.iter().map(|s| (s.address, s.len)).collect();
                        Ok(spans.into_iter().zip(hasher.hash(&places)?).collect())
                    })
                })
                .collect();
            threads.into_iter().map(joined).collect::<Result<_, _>>()
        })?;
        let mut changed = 0;
        for (span, hash) in hashes.into_iter().flatten() {
            let chunk = &mut self.pieces[span.block].chunks[span.chunk];
            chunk.clean = chunk.hash == Some(hash.id);
            chunk.hashed_twice = chunk.hash.is_some();
            chunk.was_dirty |= chunk.hashed_twice && !chunk.clean;
            if chunk.hashed_twice && !chunk.clean {
                changed += span.len as u64;
            }
            (chunk.hash, chunk.sum) = (Some(hash.id), hash.sum);
        }
        slice.set_bytes(changed);
        self.timeline.add(Counter::Changed, changed);
        Ok(changed)
    }

    /// Hashes everything while the program is stopped and tells what has changed since it was
    /// copied.
    pub(crate) fn validate(
        &mut self,
        sink: &dyn ChunkSink,
    ) -> Result<(Validation, Vec<Miss>), Error> {
        self.hash_pass()?;
        let (mut found, mut missed) = (Validation::default(), Vec::new());
        for piece in &self.pieces {
            for (number, chunk) in piece.chunks.iter().enumerate() {
                found.chunks += 1;
                if chunk.copied.is_none() {
                    continue;
                }
                found.predicted_clean += 1;
                if chunk.copied != chunk.hash {
                    missed.push(piece.miss(number));
                }
            }
        }
        found.misspeculated = missed.len() as u64;
        self.mark_known(sink);
        found.recopied = spans(&self.pieces, |_, c| c.copied != c.hash).len() as u64;
        Ok((found, missed))
    }

    /// Takes what was copied while the program ran for what its memory holds, for the test that shows
    /// that this is wrong.
    pub(crate) fn trust(&mut self) {
        for chunk in self.pieces.iter_mut().flat_map(|piece| &mut piece.chunks) {
            chunk.hash = chunk.copied;
        }
    }
}
