//! The chunk store: bytes named by their BLAKE3 hash, kept in packs with an index.
//!
//! An image has chunks of its own in `index` and `packs/`, or shares those of a [`SharedStore`].
//! They are written once, by a [`ChunkWriter`], and afterwards only read, by any number of
//! [`ChunkReader`]s. `docs/image-format.md` describes the files byte by byte.
//!
//! A chunk is at most [`MAX_CHUNK`] bytes. Equal chunks are stored once; a chunk of one repeated
//! byte takes an index entry and no data.

pub(crate) mod disk;
mod encoding;
pub(crate) mod gc;
pub(crate) mod index;
mod known;
mod lock;
mod planes;
mod reader;
pub(crate) mod shared;
mod writer;

#[cfg(test)]
pub(crate) mod power;
#[cfg(test)]
pub(crate) mod tests;

pub use encoding::{Compression, DecodeError, Decoder, Encoded, Encoder, Encoding, Stored};
pub(crate) use encoding::{decode_stored, stored_check};
pub use gc::GcReport;
pub use index::{Entry, PackId};
pub use planes::Width;
pub use reader::{ChunkReader, Damage};
pub use shared::SharedStore;
pub use writer::ChunkWriter;

pub(crate) use known::Known;
pub(crate) use reader::{Source, Trust};
pub(crate) use writer::Place;

use std::cmp::Ordering;
use std::io;
use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};

/// Most bytes that one chunk may have; also the size that big data is cut into.
pub const MAX_CHUNK: usize = gpucr_wire::CHUNK_SIZE as usize;

/// Version of index and packs that this code writes, and the newest that it reads.
pub const STORE_VERSION: u32 = 1;

/// Address of a chunk: the BLAKE3 hash of its plain bytes.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct ChunkId(pub [u8; 32]);

/// As bytes are ordered. Opening an image compares ids some million times, nearly all of which differ
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

/// What a [`ChunkWriter`] was given and what it made of it.
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

/// Why a store could not be written or read.
#[derive(Debug, thiserror::Error)]
pub enum StoreError {
    /// A system call failed.
    #[error("cannot {action} {}: {source}", path.display())]
    Io {
        /// What was tried, as a verb.
        action: &'static str,
        /// The file or directory.
        path: PathBuf,
        /// The system's answer.
        source: io::Error,
    },
    /// The disk, or the user's share of it, is full.
    #[error("no space left while writing {}", path.display())]
    NoSpace {
        /// The file that was being written.
        path: PathBuf,
        /// The system's answer.
        source: io::Error,
    },
    /// An earlier write failed, so the store is incomplete and takes nothing more.
    #[error("the store is incomplete: an earlier write failed ({first})")]
    Incomplete {
        /// The first failure, in words.
        first: String,
    },
    /// A chunk has more than [`MAX_CHUNK`] bytes.
    #[error("a chunk of {len} bytes is more than the limit of {MAX_CHUNK}")]
    ChunkTooLarge {
        /// Its length in bytes.
        len: usize,
    },
    /// The store has no such chunk.
    #[error("chunk {id} is not in the store")]
    UnknownChunk {
        /// The chunk.
        id: ChunkId,
    },
    /// The caller asked for a chunk with another length than it has.
    #[error("chunk {id} has {stored} bytes, not {asked}")]
    WrongLength {
        /// The chunk.
        id: ChunkId,
        /// Its length in bytes.
        stored: usize,
        /// The length that was asked for, in bytes.
        asked: usize,
    },
    /// A chunk's bytes are not those that were written.
    #[error("chunk {id} is damaged ({what}), at offset {offset} of {}", pack.display())]
    DamagedChunk {
        /// The chunk.
        id: ChunkId,
        /// The pack that holds it.
        pack: PathBuf,
        /// Where in the pack its stored bytes begin.
        offset: u64,
        /// What does not match.
        what: &'static str,
    },
    /// A file of the store, other than a chunk in it, is not as it was written.
    #[error("{} is damaged: {what}", path.display())]
    Damaged {
        /// The file.
        path: PathBuf,
        /// What does not match.
        what: String,
    },
    /// A file is shorter than it must be.
    #[error("{} is truncated: {found} bytes where {expected} are needed", path.display())]
    Truncated {
        /// The file.
        path: PathBuf,
        /// Bytes needed.
        expected: u64,
        /// Bytes there.
        found: u64,
    },
    /// A file begins with something else than the format's magic bytes.
    #[error("{} is not a file of a gpucr store", path.display())]
    NotAStore {
        /// The file.
        path: PathBuf,
    },
    /// A directory is not a shared store, and cannot become one.
    #[error("{} is not a gpucr store: {reason}", path.display())]
    NotAStoreDir {
        /// The directory.
        path: PathBuf,
        /// What is missing or in the way.
        reason: &'static str,
    },
    /// The caller asked for the end.
    #[error("interrupted")]
    Interrupted,
    /// Others use the store for longer than was waited.
    #[error("{} is locked by another gpucr", path.display())]
    Busy {
        /// The lock.
        path: PathBuf,
    },
    /// A file was written by a newer gpucr.
    #[error("{} has format version {found}; this gpucr reads up to {supported}", path.display())]
    NewerVersion {
        /// The file.
        path: PathBuf,
        /// Its version.
        found: u32,
        /// The newest version that can be read.
        supported: u32,
    },
}

/// Makes a typed error of a system call's; tells a full disk from the rest.
pub(crate) fn io_error(action: &'static str, path: &Path, source: io::Error) -> StoreError {
    let path = path.to_owned();
    match source.kind() {
        io::ErrorKind::StorageFull | io::ErrorKind::QuotaExceeded => {
            StoreError::NoSpace { path, source }
        }
        _ => StoreError::Io { action, path, source },
    }
}

/// Name of the directory of packs within an image or a store.
pub(crate) const PACKS: &str = "packs";
/// Name of the index within an image.
pub(crate) const INDEX: &str = "index";
