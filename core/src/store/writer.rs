//! Writing a store, from many threads at once.

use std::collections::HashMap;
use std::collections::hash_map::Entry as MapEntry;
use std::ffi::OsString;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, AtomicUsize, Ordering::Relaxed};

use parking_lot::{Mutex, MutexGuard};
use rayon::prelude::*;

use super::disk::{Disk, DiskFile, RealDisk};
use super::encoding::{Encoded, Encoder, constant_byte, constant_id};
use super::index::{Index, PACK_TRAILER, PackId, PackInfo, WriterId, pack_trailer};
use super::io_error;
use super::stored_chunks::StoredChunks;
use super::{ChunkId, Compression, Encoding, Entry, INDEX, MAX_CHUNK, PACKS, Stats, StoreError};

/// A pack takes no further chunk once it has this many bytes.
pub(super) const PACK_LIMIT: u64 = 1 << 30;
/// The map of known chunks is cut into this many parts, each with a lock of its own: one for each first byte of their
/// addresses, so that the parts are in the order of these.
const SHARDS: usize = 256;
/// Most lanes: beyond this, more threads do not write faster.
const MAX_LANES: usize = 32;

/// Writes a store. [`put`](Self::put) may be called from any number of threads at once.
///
/// Each of a fixed number of lanes (one per core) appends to a pack of its own, so writers do
/// not wait for each other. Memory is bounded by the lanes' buffers (about 4 MiB each at level 1)
/// and about 100 bytes for each distinct chunk.
///
/// The chunks can be read only after [`finish`](Self::finish). After a failed write, or when the
/// writer is dropped before `finish`, there are packs without an index. In an image's own
/// directory the owner of that removes them; in a shared store the drop does.
pub struct ChunkWriter {
    place: Place,
    known: Vec<Mutex<Shard>>,
    lanes: Vec<Mutex<Lane>>,
    turn: AtomicUsize,
    next_pack: AtomicU32,
    /// Length in bytes of each pack that is complete and synced, by number.
    sealed: Mutex<Vec<(u32, u64)>>,
    failed: AtomicBool,
    /// Whether others may have seen the index.
    published: bool,
    first_failure: Mutex<Option<String>>,
    plain_bytes: AtomicU64,
    chunks: AtomicU64,
    duplicates: AtomicU64,
    zeros: AtomicU64,
}

/// Chunks that were given, and how each that was written is stored.
type Shard = HashMap<ChunkId, Option<Entry>>;

/// Which of [`ChunkWriter`]'s shards has a chunk.
fn shard_of(id: &ChunkId) -> usize {
    id.0[0].into()
}

/// How the chunks that an image needs, and those that there are, go together.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(crate) struct Compared {
    /// The first that is nowhere, if there is one.
    pub(crate) missing: Option<ChunkId>,
    /// Bytes in which the parent or the store has those that it has.
    pub(crate) shared_bytes: u64,
    /// Stored bytes of chunks that were written here and that the image does not need.
    pub(crate) unneeded_bytes: u64,
}

/// Where a [`ChunkWriter`] writes, and what it need not write.
pub(crate) struct Place {
    pub(crate) disk: Arc<dyn Disk>,
    /// Directory of the packs.
    pub(crate) packs: PathBuf,
    /// The index or segment.
    pub(crate) index: PathBuf,
    pub(crate) writer: WriterId,
    /// Chunks that are elsewhere already.
    pub(crate) known: StoredChunks,
    /// In a store others have packs in the same directory, and a segment without chunks is not
    /// written.
    pub(crate) shared: bool,
    /// A pack takes no further chunk that would make it longer.
    pub(crate) pack_limit: u64,
}

impl Place {
    /// A place in the directory of an image: makes `packs/` there.
    pub(crate) fn in_image(
        disk: Arc<dyn Disk>,
        dir: &Path,
        writer: WriterId,
        known: StoredChunks,
    ) -> Result<Self, StoreError> {
        let packs = dir.join(PACKS);
        disk.make_dir(&packs).map_err(|e| io_error("create", &packs, e))?;
        let index = dir.join(INDEX);
        Ok(Self { disk, packs, index, writer, known, shared: false, pack_limit: PACK_LIMIT })
    }
}

struct Lane {
    encoder: Encoder,
    packs: Packs,
}

/// The packs that a lane writes to.
#[derive(Default)]
struct Packs {
    /// The pack for chunks that are stored in [`MAX_CHUNK`] bytes: all of them lie at multiples of that, which lets a
    /// file system use huge pages, and give each away whole instead of clearing it first.
    whole: Option<Pack>,
    /// The pack for all other chunks.
    other: Option<Pack>,
}

struct Pack {
    number: u32,
    path: PathBuf,
    file: Box<dyn DiskFile>,
    /// Bytes of its chunks.
    len: u64,
}

impl ChunkWriter {
    /// Starts in the existing directory `dir`, in which it makes `packs/` (only for the owner).
    ///
    /// # Errors
    /// `packs/` exists already, or cannot be made; nothing was changed.
    pub fn create(dir: &Path, compression: Compression) -> Result<Self, StoreError> {
        let writer = WriterId::random();
        let place = Place::in_image(Arc::new(RealDisk), dir, writer, StoredChunks::default())?;
        Ok(Self::start(place, compression))
    }

    pub(crate) fn start(place: Place, compression: Compression) -> Self {
        let cores = std::thread::available_parallelism().map_or(1, |n| n.get());
        Self::start_lanes(place, compression, cores.min(MAX_LANES))
    }

    /// Starts a writer with so many lanes: as many packs grow at once.
    pub(super) fn start_lanes(place: Place, compression: Compression, lanes: usize) -> Self {
        Self {
            place,
            known: (0..SHARDS).map(|_| Mutex::default()).collect(),
            lanes: (0..lanes)
                .map(|_| {
                    Mutex::new(Lane { encoder: Encoder::new(compression), packs: Packs::default() })
                })
                .collect(),
            turn: AtomicUsize::new(0),
            next_pack: AtomicU32::new(0),
            sealed: Mutex::default(),
            failed: AtomicBool::new(false),
            published: false,
            first_failure: Mutex::default(),
            plain_bytes: AtomicU64::new(0),
            chunks: AtomicU64::new(0),
            duplicates: AtomicU64::new(0),
            zeros: AtomicU64::new(0),
        }
    }

    /// Stores a chunk of at most [`MAX_CHUNK`] bytes, unless an equal one is there, and returns
    /// its address. The bytes are durable only after [`finish`](Self::finish).
    ///
    /// # Errors
    /// The chunk is too large, which changes nothing; or a pack could not be written, now or in an earlier call. In
    /// that case the store stays incomplete: every call fails from then on, as does [`finish`](Self::finish).
    pub fn put(&self, plain: &[u8]) -> Result<ChunkId, StoreError> {
        if plain.len() > MAX_CHUNK {
            return Err(StoreError::ChunkTooLarge { len: plain.len() });
        }
        let constant = constant_byte(plain);
        let id = match constant {
            Some(value) => constant_id(value, plain.len()),
            None => ChunkId::of(plain),
        };
        self.put_as(id, plain, constant)
    }

    /// Writes a chunk whose address the caller has computed from these very bytes.
    ///
    /// # Errors
    /// The errors of [`put`](Self::put).
    pub fn put_hashed(&self, id: ChunkId, plain: &[u8]) -> Result<ChunkId, StoreError> {
        if plain.len() > MAX_CHUNK {
            return Err(StoreError::ChunkTooLarge { len: plain.len() });
        }
        self.put_as(id, plain, constant_byte(plain))
    }

    fn put_as(
        &self,
        id: ChunkId,
        plain: &[u8],
        constant: Option<u8>,
    ) -> Result<ChunkId, StoreError> {
        self.check_whole()?;
        self.plain_bytes.fetch_add(plain.len() as u64, Relaxed);
        self.chunks.fetch_add(1, Relaxed);
        if constant == Some(0) {
            self.zeros.fetch_add(1, Relaxed);
        }

        if self.place.known.contains(&id) {
            self.duplicates.fetch_add(1, Relaxed);
            return Ok(id);
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

    /// Whether a chunk has been given already, or the parent or the store has it, so that its
    /// bytes need not be fetched.
    pub fn contains(&self, id: &ChunkId) -> bool {
        self.place.known.contains(id) || self.shard(id).lock().contains_key(id)
    }

    /// How the chunks that an image needs, each once and in order, and those that there are go together.
    pub(crate) fn compare(&self, needed: &[ChunkId]) -> Compared {
        let of_shard = |(number, shard): (usize, &Mutex<Shard>)| {
            let first = needed.partition_point(|id| shard_of(id) < number);
            let needed = needed[first..].iter().take_while(|id| shard_of(id) == number);
            let shard = shard.lock();
            let len = |entry: &Entry| u64::from(entry.stored_len);
            let unneeded_bytes = shard.values().flatten().map(len).sum();
            let mut compared = Compared { missing: None, shared_bytes: 0, unneeded_bytes };
            for id in needed {
                let (own, shared) = (shard.get(id), self.place.known.stored_len(id));
                compared.unneeded_bytes -= own.and_then(Option::as_ref).map_or(0, len);
                compared.shared_bytes += u64::from(shared.unwrap_or(0));
                if own.is_none() && shared.is_none() {
                    compared.missing = compared.missing.or(Some(*id));
                }
            }
            compared
        };
        let shards = self.known.par_iter().enumerate().map(of_shard);
        shards.reduce(Compared::default, |a, b| Compared {
            missing: a.missing.or(b.missing),
            shared_bytes: a.shared_bytes + b.shared_bytes,
            unneeded_bytes: a.unneeded_bytes + b.unneeded_bytes,
        })
    }

    /// Takes over a chunk as it is stored elsewhere; `stored` was checked. For a gc.
    pub(crate) fn put_stored(&self, entry: &Entry, stored: &[u8]) -> Result<(), StoreError> {
        self.check_whole()?;
        match self.shard(&entry.id).lock().entry(entry.id) {
            MapEntry::Occupied(_) => return Ok(()),
            MapEntry::Vacant(place) => place.insert(None),
        };
        let kept = if entry.encoding.has_data() {
            self.append_stored(&mut self.lane().packs, *entry, stored)
        } else {
            Ok(*entry)
        };
        match kept {
            Ok(entry) => {
                self.shard(&entry.id).lock().insert(entry.id, Some(entry));
                Ok(())
            }
            Err(error) => {
                self.fail(&error);
                Err(error)
            }
        }
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

    /// Syncs what was written so far, so that [`finish`](Self::finish) has less to wait for.
    ///
    /// # Errors
    /// A pack could not be synced. The store stays incomplete then, as after a failed [`put`](Self::put).
    pub(crate) fn sync_written(&self) -> Result<(), StoreError> {
        let sync = |pack: &Pack| pack.file.sync().map_err(|e| io_error("sync", &pack.path, e));
        let synced = self.lanes.par_iter().try_for_each(|lane| {
            let Packs { whole, other } = &lane.lock().packs;
            whole.iter().chain(other).try_for_each(sync)
        });
        synced.inspect_err(|error| self.fail(error))
    }

    /// Syncs all packs and their directory, writes and syncs the index under a hidden name, renames
    /// it, syncs its directory. Afterwards the chunks are complete and durable (but for the entry
    /// of an image's own directory in its parent).
    ///
    /// # Errors
    /// A `put` has failed, or a file or directory could not be written, synced or renamed. There is no index then, so
    /// nobody sees the chunks; only if renaming it or the last sync has failed it may be there, and may not last.
    pub fn finish(self) -> Result<Stats, StoreError> {
        self.finish_with(Index::default())
    }

    /// Finishes with packs and chunks in the index that are there already. For a gc.
    pub(crate) fn finish_with(mut self, older: Index) -> Result<Stats, StoreError> {
        self.check_whole()?;
        self.lanes.par_iter().try_for_each(|lane| {
            let Packs { whole, other } = std::mem::take(&mut lane.lock().packs);
            whole.into_iter().chain(other).try_for_each(|pack| self.seal(pack))
        })?;
        let mut stats = self.stats();
        let (packs, entries) = self.gather(older)?;
        if self.place.shared && entries.iter().all(Vec::is_empty) {
            return Ok(stats);
        }
        let (disk, path) = (self.place.disk.clone(), self.place.index.clone());
        disk.sync_dir(&self.place.packs).map_err(|e| io_error("sync", &self.place.packs, e))?;
        let hidden = hidden_index(&path);
        stats.stored_bytes += Index::write(disk.as_ref(), &hidden, &packs, &entries)?;
        // The index is not taken back from here on: another dump may rely on it.
        self.published = true;
        disk.rename(&hidden, &path).map_err(|e| io_error("rename to", &path, e))?;
        let dir = path.parent().unwrap_or(Path::new("."));
        disk.sync_dir(dir).map_err(|e| io_error("sync", dir, e))?;
        Ok(stats)
    }

    /// The packs and the chunks of what was written, and of what was there: in order, the chunks in parts.
    fn gather(&self, older: Index) -> Result<(Vec<PackInfo>, Vec<Vec<Entry>>), StoreError> {
        let written = self.sealed.lock();
        let mut packs = older.packs.clone();
        packs.extend(
            written.iter().map(|&(number, len)| PackInfo { id: self.pack_id(number), len }),
        );
        packs.sort_unstable();
        let place = |id: PackId| match packs.binary_search_by_key(&id, |pack| pack.id) {
            Ok(place) => place as u32,
            Err(_) => unreachable!("every pack is in the list"),
        };
        let renumber = |mut entry: Entry, id: &dyn Fn(u32) -> PackId| {
            if entry.encoding.has_data() {
                entry.pack = place(id(entry.pack));
            }
            entry
        };
        let mut there = vec![Vec::new(); SHARDS];
        for entry in older.entries {
            let entry = renumber(entry, &|number| older.packs[number as usize].id);
            there[shard_of(&entry.id)].push(entry);
        }
        let of_shard = |(shard, mut entries): (&Mutex<Shard>, Vec<Entry>)| {
            let shard = std::mem::take(&mut *shard.lock());
            entries.reserve(shard.len());
            for (id, entry) in shard {
                let entry = entry.ok_or(StoreError::UnknownChunk { id })?;
                entries.push(renumber(entry, &|number| self.pack_id(number)));
            }
            entries.sort_unstable_by_key(|entry| entry.id);
            Ok(entries)
        };
        let entries: Result<_, StoreError> =
            self.known.par_iter().zip(there).map(of_shard).collect();
        Ok((packs, entries?))
    }

    fn pack_id(&self, number: u32) -> PackId {
        self.place.writer.pack(number)
    }

    fn shard(&self, id: &ChunkId) -> &Mutex<HashMap<ChunkId, Option<Entry>>> {
        &self.known[shard_of(id)]
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
        let mut lane = self.lane();
        let Lane { encoder, packs } = &mut *lane;
        let Encoded { encoding, bytes, check } = encoder.encode(plain);
        let entry = Entry {
            id,
            encoding,
            pack: 0,
            offset: 0,
            stored_len: bytes.len() as u32,
            plain_len: plain.len() as u32,
            check,
        };
        self.append_stored(packs, entry, bytes)
    }

    /// A lane that is free, or else the one whose turn it is.
    fn lane(&self) -> MutexGuard<'_, Lane> {
        let start = self.turn.fetch_add(1, Relaxed);
        let lanes = self.lanes.len();
        let free = (0..lanes).find_map(|i| self.lanes[(start + i) % lanes].try_lock());
        free.unwrap_or_else(|| self.lanes[start % lanes].lock())
    }

    /// Writes a chunk's stored bytes to one of a lane's packs, or to a new one where that is full.
    fn append_stored(
        &self,
        packs: &mut Packs,
        entry: Entry,
        stored: &[u8],
    ) -> Result<Entry, StoreError> {
        let place = if stored.len() == MAX_CHUNK { &mut packs.whole } else { &mut packs.other };
        let most = self.place.pack_limit.saturating_sub((stored.len() + PACK_TRAILER) as u64);
        if let Some(pack) = place.take_if(|pack| pack.len > 0 && pack.len > most) {
            self.seal(pack)?;
        }
        let pack = match place {
            Some(pack) => pack,
            none => none.insert(self.open_pack()?),
        };
        let offset = pack.len;
        pack.file.write_all_at(stored, offset).map_err(|e| io_error("write", &pack.path, e))?;
        pack.len += stored.len() as u64;
        Ok(Entry { pack: pack.number, offset, ..entry })
    }

    fn open_pack(&self) -> Result<Pack, StoreError> {
        let number = self.next_pack.fetch_add(1, Relaxed);
        let id = self.pack_id(number);
        let path = self.place.packs.join(id.file_name());
        let file = self.place.disk.create(&path).map_err(|e| io_error("create", &path, e))?;
        Ok(Pack { number, path, file, len: 0 })
    }

    fn seal(&self, pack: Pack) -> Result<(), StoreError> {
        let trailer = pack_trailer(self.pack_id(pack.number));
        let written = pack.file.write_all_at(&trailer, pack.len);
        written.map_err(|e| io_error("write", &pack.path, e))?;
        pack.file.sync().map_err(|e| io_error("sync", &pack.path, e))?;
        self.sealed.lock().push((pack.number, pack.len + PACK_TRAILER as u64));
        Ok(())
    }
}

impl Drop for ChunkWriter {
    fn drop(&mut self) {
        if !self.place.shared || self.published {
            return;
        }
        // What was begun in a shared store and nobody has seen.
        for lane in &self.lanes {
            lane.lock().packs = Packs::default();
        }
        let Place { disk, packs, index, writer, .. } = &self.place;
        for number in 0..self.next_pack.load(Relaxed) {
            let _ = disk.remove_file(&packs.join(writer.pack(number).file_name()));
        }
        let _ = disk.remove_file(&hidden_index(index));
    }
}

/// The name of an index while it is written.
pub(super) fn hidden_index(path: &Path) -> PathBuf {
    let mut name = OsString::from(".");
    name.push(path.file_name().unwrap_or_default());
    name.push(".partial");
    path.with_file_name(name)
}
