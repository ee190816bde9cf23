//! What a chunk is, and what it is named by.

use std::cmp::Ordering;

use serde::{Deserialize, Serialize};

/// Most bytes that one chunk may have; also the size that big data is cut into.
pub const MAX_CHUNK: usize = gpucr_wire::CHUNK_SIZE as usize;

/// Version of index and packs that this code writes, and the newest that it reads.
pub const STORE_VERSION: u32 = 1;

/// Address of a chunk: the BLAKE3 hash of its plain bytes.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct ChunkId(pub [u8; 32]);

/// Ids are ordered as their bytes are. Opening an image compares ids some million times, nearly all of which differ
/// in the first 8 bytes.
impl Ord for ChunkId {
    fn cmp(&self, other: &Self) -> Ordering {
        let head = |id: &Self| u64::from_be_bytes(std::array::from_fn(|i| id.0[i]));
        head(self).cmp(&head(other)).then_with(|| self.0.cmp(&other.0))
    }
}

impl PartialOrd for ChunkId {
    fn partial_cmp(&self, other: &Self) -> Option<Ordering> {
        Some(self.cmp(other))
    }
}

impl ChunkId {
    /// The address of these bytes.
    pub fn of(plain: &[u8]) -> Self {
        Self(*blake3::hash(plain).as_bytes())
    }
}

impl std::fmt::Display for ChunkId {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        self.0.iter().try_for_each(|byte| write!(f, "{byte:02x}"))
    }
}

impl std::fmt::Debug for ChunkId {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "ChunkId({self})")
    }
}

/// What a [`ChunkWriter`](super::ChunkWriter) was given and what it made of it.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Stats {
    /// Bytes given, repeated chunks included.
    pub plain_bytes: u64,
    /// Bytes of packs and index on disk.
    pub stored_bytes: u64,
    /// Chunks given, repeated ones included.
    pub chunks: u64,
    /// Chunks given that the store had already.
    pub duplicate_chunks: u64,
    /// Chunks given that are all zero.
    pub zero_chunks: u64,
}
