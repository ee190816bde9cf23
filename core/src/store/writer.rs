//! Writing a store, from many threads at once.

use std::collections::HashMap;
use std::fs::{DirBuilder, File};
use std::os::unix::fs::{DirBuilderExt, FileExt};
use std::path::{Path, PathBuf};
use std::sync::OnceLock;
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, AtomicUsize, Ordering::Relaxed};

use parking_lot::Mutex;
use rayon::prelude::*;

use super::index::{Index, PACK_HEADER, create_private, pack_header, stored_check};
use super::{ChunkId, Encoding, Entry, INDEX, MAX_CHUNK, PACKS, Stats, StoreError};
use super::{io_error, pack_name, sync_dir};

/// Whether and how hard chunks are compressed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Compression {
    /// Every chunk is stored as it is.
    None,
    /// zstd at this level; a chunk that gains less than a thirty-second is stored as it is.
    Level(i32),
}

impl Default for Compression {
    fn default() -> Self {
        Self::Level(1)
    }
}

/// A pack takes no further chunk once it has this many bytes.
const PACK_LIMIT: u64 = 1 << 30;
/// The map of known chunks is cut into this many parts, each with a lock of its own.
const SHARDS: usize = 64;
/// Most lanes: beyond this, more threads do not write faster.
const MAX_LANES: usize = 32;

/// Writes a store. [`put`](Self::put) may be called from any number of threads at once.
///
/// Each of a fixed number of lanes (one per core) appends to a pack of its own, so writers do
/// not wait for each other. Memory is bounded by the lanes' buffers (about 4 MiB each at level 1)
/// and about 100 bytes for each distinct chunk.
///
/// The store can be read only after [`finish`](Self::finish). After a failed write, or when the
/// writer is dropped before `finish`, the directory holds packs and no index: the owner of the
/// directory removes it.
pub struct ChunkWriter {
    dir: PathBuf,
    packs_dir: PathBuf,
    compression: Compression,
    pack_limit: u64,
    known: Vec<Mutex<HashMap<ChunkId, Option<Entry>>>>,
    lanes: Vec<Mutex<Lane>>,
    turn: AtomicUsize,
    next_pack: AtomicU32,
    /// Length in bytes of each pack that is complete and synced, by number.
    sealed: Mutex<Vec<(u32, u64)>>,
    failed: AtomicBool,
    first_failure: Mutex<Option<String>>,
    plain_bytes: AtomicU64,
    chunks: AtomicU64,
    duplicates: AtomicU64,
    zeros: AtomicU64,
}

#[derive(Default)]
struct Lane {
    compressor: Option<zstd::bulk::Compressor<'static>>,
    buffer: Vec<u8>,
    pack: Option<Pack>,
}

struct Pack {
    number: u32,
    path: PathBuf,
    file: File,
    len: u64,
}

impl ChunkWriter {
    /// Starts a store in the existing directory `dir`, in which it makes `packs/` (only for the
    /// owner). Fails when that exists.
    pub fn create(dir: &Path, compression: Compression) -> Result<Self, StoreError> {
        Self::with_pack_limit(dir, compression, PACK_LIMIT)
    }

    pub(crate) fn with_pack_limit(
        dir: &Path,
        compression: Compression,
        pack_limit: u64,
    ) -> Result<Self, StoreError> {
        let packs_dir = dir.join(PACKS);
        DirBuilder::new()
            .mode(0o700)
            .create(&packs_dir)
            .map_err(|e| io_error("create", &packs_dir, e))?;
        let cores = std::thread::available_parallelism().map_or(1, |n| n.get());
        Ok(Self {
            dir: dir.to_owned(),
            packs_dir,
            compression,
            pack_limit,
            known: (0..SHARDS).map(|_| Mutex::default()).collect(),
            lanes: (0..cores.min(MAX_LANES)).map(|_| Mutex::default()).collect(),
            turn: AtomicUsize::new(0),
            next_pack: AtomicU32::new(0),
            sealed: Mutex::default(),
            failed: AtomicBool::new(false),
            first_failure: Mutex::default(),
            plain_bytes: AtomicU64::new(0),
            chunks: AtomicU64::new(0),
            duplicates: AtomicU64::new(0),
            zeros: AtomicU64::new(0),
        })
    }

    /// Stores a chunk of at most [`MAX_CHUNK`] bytes, unless an equal one is there, and returns
    /// its address. The bytes are durable only after [`finish`](Self::finish).
    ///
    /// After the first error every call fails.
    pub fn put(&self, plain: &[u8]) -> Result<ChunkId, StoreError> {
        if plain.len() > MAX_CHUNK {
            return Err(StoreError::ChunkTooLarge { len: plain.len() });
        }
        self.check_whole()?;
        let constant = constant_byte(plain);
        let id = match constant {
            Some(value) => constant_id(value, plain.len()),
            None => ChunkId::of(plain),
        };
        self.plain_bytes.fetch_add(plain.len() as u64, Relaxed);
        self.chunks.fetch_add(1, Relaxed);
        if constant == Some(0) {
            self.zeros.fetch_add(1, Relaxed);
        }

        // The id is claimed before its bytes are written, so that of two threads with equal
        // chunks only one writes. The other need not wait: if the write fails, so does `finish`.
        if let Some(value) = constant {
            let entry = Entry {
                id,
                encoding: Encoding::Constant(value),
                pack: 0,
                offset: 0,
                stored_len: 0,
                plain_len: plain.len() as u32,
                check: 0,
            };
            if self.shard(&id).lock().insert(id, Some(entry)).is_some() {
                self.duplicates.fetch_add(1, Relaxed);
            }
            return Ok(id);
        }
        {
            let mut shard = self.shard(&id).lock();
            if shard.contains_key(&id) {
                self.duplicates.fetch_add(1, Relaxed);
                return Ok(id);
            }
            shard.insert(id, None);
        }
        match self.append(id, plain) {
            Ok(entry) => {
                self.shard(&id).lock().insert(id, Some(entry));
                Ok(id)
            }
            Err(error) => {
                self.fail(&error);
                Err(error)
            }
        }
    }

    /// Whether a chunk has been given already, so that its bytes need not be fetched.
    pub fn contains(&self, id: &ChunkId) -> bool {
        self.shard(id).lock().contains_key(id)
    }

    /// What has been given so far; `stored_bytes` counts complete packs only.
    pub fn stats(&self) -> Stats {
        Stats {
            plain_bytes: self.plain_bytes.load(Relaxed),
            stored_bytes: self.sealed.lock().iter().map(|(_, len)| len).sum(),
            chunks: self.chunks.load(Relaxed),
            duplicate_chunks: self.duplicates.load(Relaxed),
            zero_chunks: self.zeros.load(Relaxed),
        }
    }

    /// Syncs all packs, writes and syncs the index, syncs the directories. Afterwards the store
    /// is complete and durable (but for the entry of its own directory in the parent).
    ///
    /// Fails, with no index written, when any `put` failed.
    pub fn finish(self) -> Result<Stats, StoreError> {
        self.check_whole()?;
        self.lanes.par_iter().try_for_each(|lane| match lane.lock().pack.take() {
            Some(pack) => self.seal(pack),
            None => Ok(()),
        })?;
        let mut stats = self.stats();
        let mut sealed = std::mem::take(&mut *self.sealed.lock());
        sealed.sort_unstable();
        let mut index =
            Index { packs: sealed.into_iter().map(|(_, len)| len).collect(), entries: Vec::new() };
        for shard in &self.known {
            for (id, entry) in std::mem::take(&mut *shard.lock()) {
                index.entries.push(entry.ok_or(StoreError::UnknownChunk { id })?);
            }
        }
        stats.stored_bytes += index.write(&self.dir.join(INDEX))?;
        sync_dir(&self.packs_dir)?;
        sync_dir(&self.dir)?;
        Ok(stats)
    }

    fn shard(&self, id: &ChunkId) -> &Mutex<HashMap<ChunkId, Option<Entry>>> {
        &self.known[id.0[0] as usize % SHARDS]
    }

    fn check_whole(&self) -> Result<(), StoreError> {
        if !self.failed.load(Relaxed) {
            return Ok(());
        }
        let first = self.first_failure.lock().clone();
        Err(StoreError::Incomplete { first: first.unwrap_or_else(|| "unknown".into()) })
    }

    fn fail(&self, error: &StoreError) {
        self.first_failure.lock().get_or_insert_with(|| error.to_string());
        self.failed.store(true, Relaxed);
    }

    /// Compresses and writes a chunk on a lane that is free, or else on the one whose turn it is.
    fn append(&self, id: ChunkId, plain: &[u8]) -> Result<Entry, StoreError> {
        let start = self.turn.fetch_add(1, Relaxed);
        let lanes = self.lanes.len();
        let free = (0..lanes).find_map(|i| self.lanes[(start + i) % lanes].try_lock());
        let mut lane = free.unwrap_or_else(|| self.lanes[start % lanes].lock());
        let lane = &mut *lane;

        let compressed = match self.compression {
            Compression::None => None,
            Compression::Level(level) => lane.compress(level, plain),
        };
        let (encoding, stored_len, check) = match compressed {
            Some(len) => (Encoding::Zstd, len, stored_check(&lane.buffer[..len])),
            None => (Encoding::Raw, plain.len(), 0),
        };
        let full = |p: &Pack| p.len + stored_len as u64 > self.pack_limit;
        if lane.pack.as_ref().is_some_and(|p| p.len > PACK_HEADER as u64 && full(p))
            && let Some(pack) = lane.pack.take()
        {
            self.seal(pack)?;
        }
        let pack = match &mut lane.pack {
            Some(pack) => pack,
            none => none.insert(self.open_pack()?),
        };
        let stored = if encoding == Encoding::Zstd { &lane.buffer[..stored_len] } else { plain };
        let offset = pack.len;
        pack.file.write_all_at(stored, offset).map_err(|e| io_error("write", &pack.path, e))?;
        pack.len += stored_len as u64;
        Ok(Entry {
            id,
            encoding,
            pack: pack.number,
            offset,
            stored_len: stored_len as u32,
            plain_len: plain.len() as u32,
            check,
        })
    }

    fn open_pack(&self) -> Result<Pack, StoreError> {
        let number = self.next_pack.fetch_add(1, Relaxed);
        let path = self.packs_dir.join(pack_name(number));
        let file = create_private(&path)?;
        file.write_all_at(&pack_header(number), 0).map_err(|e| io_error("write", &path, e))?;
        Ok(Pack { number, path, file, len: PACK_HEADER as u64 })
    }

    fn seal(&self, pack: Pack) -> Result<(), StoreError> {
        pack.file.sync_all().map_err(|e| io_error("sync", &pack.path, e))?;
        self.sealed.lock().push((pack.number, pack.len));
        Ok(())
    }
}

impl Lane {
    /// Compresses into `self.buffer`; the length, or None where it does not pay (or zstd fails,
    /// which raw storage makes up for).
    fn compress(&mut self, level: i32, plain: &[u8]) -> Option<usize> {
        // The destination is the most that pays: zstd gives up as soon as it would need more.
        let most = plain.len().checked_sub(plain.len() / 32 + 1)?;
        if self.buffer.len() < most {
            self.buffer.resize(most, 0);
        }
        if self.compressor.is_none() {
            self.compressor = zstd::bulk::Compressor::new(level).ok();
        }
        self.compressor.as_mut()?.compress_to_buffer(plain, &mut self.buffer[..most]).ok()
    }
}

/// The value of every byte of `plain`, if they are all equal and there is one.
fn constant_byte(plain: &[u8]) -> Option<u8> {
    let (&first, rest) = plain.split_first()?;
    // Equal to itself moved by one byte: one fast comparison that stops at the first difference.
    (rest == &plain[..plain.len() - 1]).then_some(first)
}

/// The address of `len` bytes of `value`. That of a full chunk of zeros, by far the most
/// frequent, is computed once.
pub(super) fn constant_id(value: u8, len: usize) -> ChunkId {
    static ZEROS: OnceLock<ChunkId> = OnceLock::new();
    let compute = || {
        let piece = [value; 4096];
        let mut hasher = blake3::Hasher::new();
        for _ in 0..len / piece.len() {
            hasher.update(&piece);
        }
        hasher.update(&piece[..len % piece.len()]);
        ChunkId(*hasher.finalize().as_bytes())
    };
    if value == 0 && len == MAX_CHUNK { *ZEROS.get_or_init(compute) } else { compute() }
}
