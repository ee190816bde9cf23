//! Writing a store, from many threads at once.

use std::collections::HashMap;
use std::fs::{DirBuilder, File};
use std::os::unix::fs::{DirBuilderExt, FileExt};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, AtomicUsize, Ordering::Relaxed};

use parking_lot::Mutex;
use rayon::prelude::*;

use super::encoding::{Encoded, Encoder, constant_byte, constant_id};
use super::index::{Index, PACK_HEADER, create_private, pack_header};
use super::{ChunkId, Compression, Encoding, Entry, INDEX, MAX_CHUNK, PACKS, Stats, StoreError};
use super::{io_error, pack_name, sync_dir};

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

struct Lane {
    encoder: Encoder,
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
            pack_limit,
            known: (0..SHARDS).map(|_| Mutex::default()).collect(),
            lanes: (0..cores.min(MAX_LANES))
                .map(|_| Mutex::new(Lane { encoder: Encoder::new(compression), pack: None }))
                .collect(),
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

        let Encoded { encoding, bytes, check } = lane.encoder.encode(plain);
        let full = |p: &Pack| p.len + bytes.len() as u64 > self.pack_limit;
        if lane.pack.as_ref().is_some_and(|p| p.len > PACK_HEADER as u64 && full(p))
            && let Some(pack) = lane.pack.take()
        {
            self.seal(pack)?;
        }
        let pack = match &mut lane.pack {
            Some(pack) => pack,
            none => none.insert(self.open_pack()?),
        };
        let offset = pack.len;
        pack.file.write_all_at(bytes, offset).map_err(|e| io_error("write", &pack.path, e))?;
        pack.len += bytes.len() as u64;
        Ok(Entry {
            id,
            encoding,
            pack: pack.number,
            offset,
            stored_len: bytes.len() as u32,
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
