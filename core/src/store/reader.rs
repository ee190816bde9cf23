//! Reading a store.

use std::collections::HashMap;
use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::sync::OnceLock;

use parking_lot::Mutex;
use rayon::prelude::*;

use super::encoding::{DecodeError, Decoder, Stored};
use super::index::{Index, PACK_TRAILER, PackInfo, check_pack_trailer, open_regular};
use super::{ChunkId, Entry, INDEX, PACKS, StoreError, io_error};

/// Reads chunks, from any number of threads at once.
///
/// A chunk whose copy is damaged is read from another one, where a source has a sound one.
///
/// Holds the records of its chunks in memory (64 bytes each), one file descriptor for each pack,
/// and buffers of at most twice [`MAX_CHUNK`](super::MAX_CHUNK) for each thread that was ever reading
/// at the same time.
pub struct ChunkReader {
    entries: Vec<Entry>,
    /// No file where it was missing when a damaged store was opened.
    packs: Vec<(PathBuf, Option<File>)>,
    decoders: Mutex<Vec<Decoder>>,
    stored_bytes: u64,
    unneeded_bytes: u64,
    /// Where other copies may be.
    sources: Vec<Source>,
    /// These copies: several for one chunk, in order of their ids. Looked for when the first damaged
    /// chunk is found.
    spares: OnceLock<Box<ChunkReader>>,
}

/// A chunk that cannot be read, as [`ChunkReader::verify`] reports it.
#[derive(Debug)]
pub struct Damage {
    /// The chunk.
    pub id: ChunkId,
    /// What is wrong with it.
    pub error: StoreError,
}

/// An index, and the directory of its packs.
#[derive(Debug, Clone)]
pub(crate) struct Source {
    pub(crate) index: PathBuf,
    pub(crate) packs: PathBuf,
    pub(crate) trust: Trust,
}

/// What is asked of a [`Source`].
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Trust {
    /// The source belongs to the image alone: it must be whole, with all of its packs.
    Whole,
    /// The source must be whole, with those packs that are needed.
    Used,
    /// The source is one of many: another may make up for what it lacks.
    Spare,
}

impl Source {
    /// The index and the packs that are in the directory of an image.
    pub(crate) fn in_image(dir: &Path, trust: Trust) -> Self {
        Self { index: dir.join(INDEX), packs: dir.join(PACKS), trust }
    }
}

impl ChunkReader {
    /// Opens all chunks in the directory `dir` of an image: reads the index, opens every pack,
    /// and checks their trailers and lengths. The chunks themselves are checked when they are read.
    ///
    /// # Errors
    /// The index or a pack cannot be read, is damaged or of another length than was written, or is a newer gpucr's.
    pub fn open(dir: &Path) -> Result<Self, StoreError> {
        let source = Source::in_image(dir, Trust::Whole);
        let index = Index::read(&source.index)?;
        let mut needed: Vec<ChunkId> = index.entries.iter().map(|entry| entry.id).collect();
        needed.dedup();
        Self::open_needed(&[source], &needed)
    }

    /// Opens the `needed` chunks, which are in order of their ids, none twice. Each is taken from
    /// the first source that has it. Memory depends on their number, whatever is in the sources.
    ///
    /// A chunk that no source has is no error: the reader does not have it. But if a spare source
    /// could not be read, which may have had it, that is the error.
    pub(crate) fn open_needed(sources: &[Source], needed: &[ChunkId]) -> Result<Self, StoreError> {
        let mut gathering = Gathering::new(needed.len());
        let mut first_failure = None;
        for source in sources {
            if gathering.missing == 0 && source.trust != Trust::Whole {
                break;
            }
            match gathering.take(source, needed) {
                Err(error) if source.trust != Trust::Spare => return Err(error),
                Err(error) | Ok(Some(error)) => first_failure = first_failure.or(Some(error)),
                Ok(None) => {}
            }
        }
        match first_failure {
            Some(error) if gathering.missing > 0 => return Err(error),
            Some(error) => tracing::warn!(%error, "made up for by other parts of the store"),
            None => {}
        }
        Ok(gathering.finish(sources))
    }

    /// Opens what can be had of the `needed` chunks, and tells `problem` everything that
    /// [`open_needed`](Self::open_needed) would have ended at.
    pub(crate) fn salvage(
        sources: &[Source],
        needed: &[ChunkId],
        problem: &mut dyn FnMut(StoreError),
    ) -> Self {
        let mut gathering = Gathering::new(needed.len());
        let mut spare_failures = Vec::new();
        for source in sources {
            if gathering.missing == 0 && source.trust != Trust::Whole {
                break;
            }
            match gathering.take(source, needed) {
                Ok(None) => {}
                Ok(Some(error)) => spare_failures.push(error),
                Err(error) if source.trust == Trust::Spare => spare_failures.push(error),
                Err(_) => gathering.salvage(source, needed, problem),
            }
        }
        // Of a store, only what nothing else makes up for is this image's damage.
        if gathering.missing > 0 {
            spare_failures.into_iter().for_each(problem);
        }
        gathering.finish(sources)
    }

    /// Opens chunks of one pack in the directory `packs`, each given once. Their pack number counts
    /// for nothing.
    pub(crate) fn open_pack(
        packs: &Path,
        info: PackInfo,
        mut entries: Vec<Entry>,
    ) -> Result<Self, StoreError> {
        let mut gathering = Gathering::new(0);
        let number = gathering.pack(packs, &info)?;
        entries.sort_unstable_by_key(|entry| entry.id);
        entries.iter_mut().for_each(|entry| entry.pack = number);
        Ok(Self { entries, stored_bytes: info.len, ..gathering.finish(&[]) })
    }

    /// What the index says about a chunk.
    pub fn entry(&self, id: &ChunkId) -> Option<&Entry> {
        self.entries.binary_search_by_key(id, |e| e.id).ok().map(|i| &self.entries[i])
    }

    /// Every chunk, in order of their ids.
    pub fn entries(&self) -> &[Entry] {
        &self.entries
    }

    /// Bytes on disk: of the image's own packs and index, and of those chunks which it shares.
    pub fn stored_bytes(&self) -> u64 {
        self.stored_bytes
    }

    /// Stored bytes of chunks that the image holds itself and does not need: they changed after they
    /// had been copied while the program ran.
    pub fn unneeded_bytes(&self) -> u64 {
        self.unneeded_bytes
    }

    /// Reads a chunk into `out`, which must have exactly its plain length, and checks it against
    /// its address. After a failure `out` holds anything.
    ///
    /// # Errors
    /// The reader has no such chunk, or it has another length than `out`, or no copy of it can be read undamaged. In
    /// the last case the error is that of the first copy.
    pub fn get(&self, id: &ChunkId, out: &mut [u8]) -> Result<(), StoreError> {
        let Err(error) = self.get_first(id, out) else { return Ok(()) };
        if !self.get_spare(id, out) {
            return Err(error);
        }
        tracing::warn!(%error, "read from another copy");
        Ok(())
    }

    /// Reads a chunk from its first copy alone.
    fn get_first(&self, id: &ChunkId, out: &mut [u8]) -> Result<(), StoreError> {
        let entry = self.entry_for(id, out)?;
        let found = self.decode(entry, out)?;
        if found != *id {
            return Err(self.damaged(entry, "its hash does not match its address"));
        }
        Ok(())
    }

    /// Reads a chunk from its first copy into `out`, which must have exactly its plain length, and does
    /// not check that it has the right bytes: for a caller who hashes them elsewhere, and calls
    /// [`get`](Self::get) where they are wrong. After a failure `out` holds anything.
    ///
    /// # Errors
    /// The reader has no such chunk, or it has another length than `out`, or its first copy cannot be read or decoded;
    /// other copies are not tried.
    pub fn get_unchecked(&self, id: &ChunkId, out: &mut [u8]) -> Result<(), StoreError> {
        let entry = self.entry_for(id, out)?;
        self.with_decoder(entry, |decoder| {
            let read = |buffer: &mut [u8]| self.read_stored(entry, buffer);
            decoder.decode_unnamed(Stored::of(entry), out, read)
        })
    }

    fn entry_for(&self, id: &ChunkId, out: &[u8]) -> Result<&Entry, StoreError> {
        let entry = self.entry(id).ok_or(StoreError::UnknownChunk { id: *id })?;
        let stored = entry.plain_len as usize;
        if stored != out.len() {
            return Err(StoreError::WrongLength { id: *id, stored, asked: out.len() });
        }
        Ok(entry)
    }

    /// Reads a chunk from any copy but the first. `false` if none is sound; then `out` holds anything.
    fn get_spare(&self, id: &ChunkId, out: &mut [u8]) -> bool {
        let is_known = self.entry(id).is_some_and(|entry| entry.plain_len as usize == out.len());
        is_known && self.spares().sound_copy(id, out).is_some()
    }

    /// All copies but the first.
    fn spares(&self) -> &Self {
        self.spares.get_or_init(|| Box::new(self.find_spares()))
    }

    /// The copies of one chunk, in a reader that has several of each.
    fn copies_of(&self, id: &ChunkId) -> &[Entry] {
        let first = self.entries.partition_point(|copy| copy.id < *id);
        let copies = &self.entries[first..];
        &copies[..copies.partition_point(|copy| copy.id == *id)]
    }

    /// The first sound one of these, of `out.len()` bytes, which are read into `out`.
    fn sound_copy(&self, id: &ChunkId, out: &mut [u8]) -> Option<Entry> {
        let len = out.len();
        let copies = self.copies_of(id).iter().filter(|copy| copy.plain_len as usize == len);
        let mut sound =
            copies.filter(|copy| self.decode(copy, out).is_ok_and(|found| found == *id));
        sound.next().copied()
    }

    /// All copies of its chunks but those that it reads: one pass over all sources.
    fn find_spares(&self) -> Self {
        let mut gathering = Gathering::new(0);
        let mut copies = Vec::new();
        for source in &self.sources {
            let mut here = Vec::new();
            let scanned = Index::scan(&source.index, |entry| {
                if entry.encoding.has_data() && self.entry(&entry.id).is_some() {
                    here.push(*entry);
                }
            });
            let Ok((infos, _)) = scanned else { continue };
            for copy in here {
                let info = &infos[copy.pack as usize];
                let chosen = self.entry(&copy.id).map(|e| (self.pack_path(e), e.offset));
                if chosen == Some((source.packs.join(info.id.file_name()), copy.offset)) {
                    continue;
                }
                if let Ok(pack) = gathering.pack(&source.packs, info) {
                    copies.push(Entry { pack, ..copy });
                }
            }
        }
        copies.sort_by_key(|copy| copy.id);
        Self { entries: copies, ..gathering.finish(&[]) }
    }

    /// Reads and checks every chunk, on all cores. Returns those whose copy is damaged, though
    /// [`get`](Self::get) may find another one.
    pub fn verify(&self) -> Vec<Damage> {
        let damage = self.verify_with(&|_| ()).into_iter();
        damage.map(|(id, error)| Damage { id, error }).collect()
    }

    /// Reads and checks every chunk, in the order in which they lie in the packs. Calls `advance` with the plain
    /// bytes of each chunk that was read.
    pub(crate) fn verify_with(&self, advance: &(dyn Fn(u64) + Sync)) -> Vec<(ChunkId, StoreError)> {
        let mut order: Vec<&Entry> = self.entries.iter().collect();
        order.par_sort_unstable_by_key(|entry| (entry.pack, entry.offset));
        order
            .par_iter()
            .map_init(Vec::new, |buffer: &mut Vec<u8>, entry| {
                let len = entry.plain_len as usize;
                if buffer.len() < len {
                    buffer.resize(len, 0);
                }
                let error = self.get_first(&entry.id, &mut buffer[..len]).err();
                advance(len as u64);
                error.map(|error| (entry.id, error))
            })
            .flatten()
            .collect()
    }

    /// Reads the stored bytes of a chunk into `out`, which must have exactly their length, and
    /// checks them without decoding them. After a failure `out` holds anything.
    ///
    /// # Errors
    /// The reader has no such chunk, or its stored bytes have another length than `out`, or no copy in the same form
    /// can be read undamaged. In the last case the error is that of the first copy; see
    /// [`use_other_copy`](Self::use_other_copy).
    pub fn get_stored(&self, id: &ChunkId, out: &mut [u8]) -> Result<(), StoreError> {
        let entry = self.entry(id).ok_or(StoreError::UnknownChunk { id: *id })?;
        let stored = entry.stored_len as usize;
        if stored != out.len() {
            return Err(StoreError::WrongLength { id: *id, stored, asked: out.len() });
        }
        if !entry.encoding.has_data() {
            return Ok(());
        }
        let checked = |out: &mut [u8]| {
            Stored::of(entry).check(out, id).map_err(|what| self.damaged(entry, what))
        };
        let first = self.read_stored(entry, out).and_then(|()| checked(out));
        let Err(error) = first else { return Ok(()) };
        let spares = self.spares();
        let same = |copy: &&Entry| copy.stored_len == entry.stored_len;
        let is_read = |copy: &Entry| spares.read_stored(copy, out).is_ok() && checked(out).is_ok();
        if !spares.copies_of(id).iter().filter(same).any(is_read) {
            return Err(error);
        }
        tracing::warn!(%error, "read from another copy");
        Ok(())
    }

    /// Takes a chunk from another copy from now on, if there is one that is sound: it may be stored in another
    /// form. Says whether there was.
    pub(crate) fn use_other_copy(&mut self, id: &ChunkId) -> bool {
        let Some(at) = self.entries.iter().position(|entry| entry.id == *id) else { return false };
        let mut plain = vec![0; self.entries[at].plain_len as usize];
        let spares = self.spares();
        let Some(copy) = spares.sound_copy(id, &mut plain) else { return false };
        let (path, file) = &spares.packs[copy.pack as usize];
        let now = &self.entries[at];
        if (self.pack_path(now), now.offset) == (path.clone(), copy.offset) {
            return false;
        }
        let Some(Ok(file)) = file.as_ref().map(File::try_clone) else { return false };
        let pack = (path.clone(), Some(file));
        self.entries[at] = Entry { pack: self.packs.len() as u32, ..copy };
        self.packs.push(pack);
        true
    }

    /// Reads a chunk's stored bytes, which are not checked.
    pub(crate) fn stored(&self, entry: &Entry) -> Result<Vec<u8>, StoreError> {
        let mut bytes = vec![0u8; entry.stored_len as usize];
        if entry.encoding.has_data() {
            self.read_stored(entry, &mut bytes)?;
        }
        Ok(bytes)
    }

    /// Decodes a chunk; returns the address that its bytes have.
    fn decode(&self, entry: &Entry, out: &mut [u8]) -> Result<ChunkId, StoreError> {
        self.with_decoder(entry, |decoder| {
            decoder.decode(Stored::of(entry), out, |buffer| self.read_stored(entry, buffer))
        })
    }

    fn with_decoder<T>(
        &self,
        entry: &Entry,
        decode: impl FnOnce(&mut Decoder) -> Result<T, DecodeError<StoreError>>,
    ) -> Result<T, StoreError> {
        let recycled = self.decoders.lock().pop();
        let mut decoder = match recycled {
            Some(decoder) => decoder,
            None => Decoder::new()
                .map_err(|e| io_error("start decompressing", &self.pack_path(entry), e))?,
        };
        let result = decode(&mut decoder);
        self.decoders.lock().push(decoder);
        result.map_err(|error| match error {
            DecodeError::Read(error) => error,
            DecodeError::Damaged(what) => self.damaged(entry, what),
        })
    }

    fn read_stored(&self, entry: &Entry, out: &mut [u8]) -> Result<(), StoreError> {
        let (path, file) = &self.packs[entry.pack as usize];
        let Some(file) = file else { return Err(self.damaged(entry, "its pack is missing")) };
        file.read_exact_at(out, entry.offset).map_err(|e| match e.kind() {
            io::ErrorKind::UnexpectedEof => self.damaged(entry, "the pack ends within it"),
            _ => io_error("read", path, e),
        })
    }

    /// The pack that holds a chunk; empty for a constant one.
    pub fn pack_path(&self, entry: &Entry) -> PathBuf {
        if !entry.encoding.has_data() {
            return PathBuf::new();
        }
        self.packs.get(entry.pack as usize).map_or_else(PathBuf::new, |(path, _)| path.clone())
    }

    fn damaged(&self, entry: &Entry, what: &'static str) -> StoreError {
        let pack = self.pack_path(entry);
        StoreError::DamagedChunk { id: entry.id, pack, offset: entry.offset, what }
    }
}

/// What [`ChunkReader::open_needed`] has gathered so far.
struct Gathering {
    /// The copy of each chunk that is needed.
    found: Vec<Option<Entry>>,
    missing: usize,
    packs: Vec<(PathBuf, Option<File>)>,
    /// Number and length of each open pack.
    numbers: HashMap<PathBuf, (u32, u64)>,
    stored_bytes: u64,
    unneeded_bytes: u64,
}

impl Gathering {
    fn new(needed: usize) -> Self {
        Self {
            found: vec![None; needed],
            missing: needed,
            packs: Vec::new(),
            numbers: HashMap::new(),
            stored_bytes: 0,
            unneeded_bytes: 0,
        }
    }

    /// Takes from a source what is needed and not found yet. Of a spare source, packs that cannot
    /// be used are passed over; the first such failure is returned.
    fn take(
        &mut self,
        source: &Source,
        needed: &[ChunkId],
    ) -> Result<Option<StoreError>, StoreError> {
        let mut picked: Vec<(usize, Entry)> = Vec::new();
        let (mut at, mut unneeded) = (0, 0);
        let (infos, index_len) = Index::scan(&source.index, |entry| {
            // Both are in order.
            while needed.get(at).is_some_and(|id| *id < entry.id) {
                at += 1;
            }
            if needed.get(at) != Some(&entry.id) {
                unneeded += u64::from(entry.stored_len);
            } else if self.found[at].is_none() {
                picked.push((at, *entry));
            }
        })?;

        let mut used = vec![source.trust == Trust::Whole; infos.len()];
        for (_, entry) in &picked {
            if entry.encoding.has_data() {
                used[entry.pack as usize] = true;
            }
        }
        let mut failure = None;
        let mut numbers = vec![None; infos.len()];
        for (number, info) in infos.iter().enumerate().filter(|(number, _)| used[*number]) {
            match self.pack(&source.packs, info) {
                Ok(opened) => numbers[number] = Some(opened),
                Err(error) if source.trust == Trust::Spare => failure = failure.or(Some(error)),
                Err(error) => return Err(error),
            }
        }
        if source.trust == Trust::Whole {
            self.stored_bytes += index_len + infos.iter().map(|pack| pack.len).sum::<u64>();
            self.unneeded_bytes += unneeded;
        }
        for (place, mut entry) in picked {
            if entry.encoding.has_data() {
                let Some(number) = numbers[entry.pack as usize] else { continue };
                entry.pack = number;
            }
            if source.trust != Trust::Whole {
                self.stored_bytes += u64::from(entry.stored_len);
            }
            self.found[place] = Some(entry);
            self.missing -= 1;
        }
        Ok(failure)
    }

    /// Takes what can be read from a source that [`take`](Self::take) has failed on.
    fn salvage(
        &mut self,
        source: &Source,
        needed: &[ChunkId],
        problem: &mut dyn FnMut(StoreError),
    ) {
        let index = Index::read(&source.index).unwrap_or_else(|error| {
            problem(error);
            Index::salvage(&source.index)
        });
        let mut numbers = vec![None; index.packs.len()];
        let mut open = |gathering: &mut Self, number: u32| {
            let known = &mut numbers[number as usize];
            *known.get_or_insert_with(|| {
                gathering.salvage_pack(&source.packs, &index.packs[number as usize], problem)
            })
        };
        if source.trust == Trust::Whole {
            for number in 0..index.packs.len() as u32 {
                open(self, number);
            }
            // What is there, not what a damaged index says.
            let len = |path: &Path| std::fs::metadata(path).map_or(0, |meta| meta.len());
            let packs = index.packs.iter().map(|pack| len(&source.packs.join(pack.id.file_name())));
            self.stored_bytes += len(&source.index) + packs.sum::<u64>();
        }
        for mut entry in index.entries {
            let Ok(at) = needed.binary_search(&entry.id) else { continue };
            if self.found[at].is_some() {
                continue;
            }
            if entry.encoding.has_data() {
                entry.pack = open(self, entry.pack);
            }
            if source.trust != Trust::Whole {
                self.stored_bytes += u64::from(entry.stored_len);
            }
            self.found[at] = Some(entry);
            self.missing -= 1;
        }
    }

    /// The number of a pack that may be missing, or have another length or trailer.
    fn salvage_pack(
        &mut self,
        dir: &Path,
        info: &PackInfo,
        problem: &mut dyn FnMut(StoreError),
    ) -> u32 {
        match self.pack(dir, info) {
            Ok(number) => number,
            Err(error) => {
                problem(error);
                let path = dir.join(info.id.file_name());
                if let Some((number, _)) = self.numbers.get(&path) {
                    return *number;
                }
                let number = self.packs.len() as u32;
                self.packs.push((path.clone(), open_regular(&path).ok()));
                self.numbers.insert(path, (number, info.len));
                number
            }
        }
    }

    fn finish(self, sources: &[Source]) -> ChunkReader {
        ChunkReader {
            entries: self.found.into_iter().flatten().collect(),
            packs: self.packs,
            decoders: Mutex::default(),
            stored_bytes: self.stored_bytes,
            unneeded_bytes: self.unneeded_bytes,
            sources: sources.to_vec(),
            spares: OnceLock::new(),
        }
    }

    /// The number of a pack among those that are open; opens and checks it where it is not.
    fn pack(&mut self, dir: &Path, info: &PackInfo) -> Result<u32, StoreError> {
        let path = dir.join(info.id.file_name());
        if let Some((number, len)) = self.numbers.get(&path) {
            return if *len == info.len {
                Ok(*number)
            } else {
                Err(wrong_length(path, info, *len))
            };
        }
        let file = open_regular(&path)?;
        let found = file.metadata().map_err(|e| io_error("read", &path, e))?.len();
        if found != info.len {
            return Err(wrong_length(path, info, found));
        }
        let mut trailer = [0u8; PACK_TRAILER];
        let Some(end) = info.len.checked_sub(PACK_TRAILER as u64) else {
            return Err(StoreError::NotAStore { path });
        };
        file.read_exact_at(&mut trailer, end).map_err(|e| io_error("read", &path, e))?;
        check_pack_trailer(&path, info.id, &trailer)?;
        let number = self.packs.len() as u32;
        self.packs.push((path.clone(), Some(file)));
        self.numbers.insert(path, (number, found));
        Ok(number)
    }
}

fn wrong_length(path: PathBuf, info: &PackInfo, found: u64) -> StoreError {
    let expected = info.len;
    if found < expected {
        return StoreError::Truncated { path, expected, found };
    }
    let what = format!("it has {found} bytes, {expected} were written");
    StoreError::Damaged { path, what }
}
