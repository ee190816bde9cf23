//! Where chunks go.

use super::{ChunkId, ChunkWriter, Entry, Stats, StoreError};

/// Takes chunks, from any number of threads at once: the packs of a store, or another sink.
///
/// A chunk that was put counts for nothing before [`finish`](Self::finish): who names chunks elsewhere, as a manifest
/// does, does so afterwards. After an error the sink is incomplete, and its owner gives up on all of it.
pub trait ChunkSink: Sync {
    /// Whether the sink has the chunk or has taken it, so that its bytes need not be brought. One that cannot tell says
    /// that it has not.
    fn contains(&self, id: &ChunkId) -> bool;

    /// Takes a chunk of at most [`MAX_CHUNK`](super::MAX_CHUNK) bytes, whose address the caller has computed from these
    /// very bytes, and returns that.
    ///
    /// # Errors
    /// The chunk was not taken. The sink may refuse all others from then on.
    fn put_hashed(&self, id: ChunkId, plain: &[u8]) -> Result<ChunkId, StoreError>;

    /// Takes a chunk of which nobody knows the address: the sink computes and returns it.
    ///
    /// # Errors
    /// The errors of [`put_hashed`](Self::put_hashed).
    fn put(&self, plain: &[u8]) -> Result<ChunkId, StoreError> {
        self.put_hashed(ChunkId::of(plain), plain)
    }

    /// Says which chunks it will be asked for: one that has to ask elsewhere can ask for all of them at once.
    fn expect(&self, ids: &mut dyn Iterator<Item = ChunkId>) {
        let _ = ids;
    }

    /// Takes a chunk as it is stored elsewhere: the caller has checked `stored` against the entry.
    ///
    /// # Errors
    /// The errors of [`put_hashed`](Self::put_hashed).
    fn put_stored(&self, entry: &Entry, stored: &[u8]) -> Result<(), StoreError>;

    /// Makes everything durable that was put, and says what that was. Of a sink that is dropped without it nobody sees
    /// anything.
    ///
    /// # Errors
    /// Not all of it is durable, or a chunk could not be taken before.
    fn finish(self: Box<Self>) -> Result<Stats, StoreError>;
}

impl ChunkSink for ChunkWriter {
    fn contains(&self, id: &ChunkId) -> bool {
        Self::contains(self, id)
    }

    fn put_hashed(&self, id: ChunkId, plain: &[u8]) -> Result<ChunkId, StoreError> {
        Self::put_hashed(self, id, plain)
    }

    fn put(&self, plain: &[u8]) -> Result<ChunkId, StoreError> {
        Self::put(self, plain)
    }

    fn put_stored(&self, entry: &Entry, stored: &[u8]) -> Result<(), StoreError> {
        Self::put_stored(self, entry, stored)
    }

    fn finish(self: Box<Self>) -> Result<Stats, StoreError> {
        Self::finish(*self)
    }
}
