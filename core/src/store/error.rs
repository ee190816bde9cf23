//! What can go wrong with a store.

use std::io;
use std::path::{Path, PathBuf};

use super::{ChunkId, MAX_CHUNK};

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
    /// Who was to take the chunk does not.
    #[error("the other side takes no more of the program: {what}")]
    NotTaken {
        /// Why not.
        what: String,
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
