//! Where chunks come from.

use super::{ChunkId, StoreError};

/// How a chunk was given.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Filled {
    /// The buffer holds its bytes.
    Bytes,
    /// All its bytes are this one; the buffer was not written.
    Constant(u8),
}

/// Gives chunks, to any number of threads at once: an image on disk, a copy of one in memory, or another source.
pub trait ChunkSource: Sync {
    /// Gives a chunk: its bytes in `out`, which has its length, or the one byte that fills it. They are those of its
    /// address. After a failure `out` holds anything.
    ///
    /// # Errors
    /// The source does not have the chunk, or not undamaged, or with another length.
    fn get(&self, id: &ChunkId, out: &mut [u8]) -> Result<Filled, StoreError>;

    /// Gives a chunk whose bytes may be other ones: for a caller who hashes them elsewhere, and calls
    /// [`get`](Self::get) where they are wrong.
    ///
    /// # Errors
    /// The errors of [`get`](Self::get).
    fn get_unchecked(&self, id: &ChunkId, out: &mut [u8]) -> Result<Filled, StoreError> {
        self.get(id, out)
    }

    /// Reads a chunk into `out`, whether it is of one byte or not.
    ///
    /// # Errors
    /// The errors of [`get`](Self::get).
    fn read(&self, id: &ChunkId, out: &mut [u8]) -> Result<(), StoreError> {
        if let Filled::Constant(byte) = self.get(id, out)? {
            out.fill(byte);
        }
        Ok(())
    }

    /// Says which chunks will be asked for next, in this order: a source that is far away may begin to bring them. It
    /// changes nothing of what is given.
    fn prefetch(&self, ids: &mut dyn Iterator<Item = ChunkId>) {
        let _ = ids;
    }
}
