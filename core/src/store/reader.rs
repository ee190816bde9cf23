//! Reading a store.

use std::collections::HashMap;
use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};

use parking_lot::Mutex;
use rayon::prelude::*;

use super::encoding::{DecodeError, Decoder, Stored};
use super::index::{Index, PACK_HEADER, PackInfo, check_pack_header, open_regular};
use super::{ChunkId, Entry, INDEX, MAX_CHUNK, PACKS, StoreError, io_error};

/// Reads chunks, from any number of threads at once.
///
/// Holds the records of its chunks in memory (64 bytes each), one file descriptor for each pack,
/// and a buffer of at most [`MAX_CHUNK`] for each thread that was ever reading at the same time.
pub struct ChunkReader {
    entries: Vec<Entry>,
    packs: Vec<(PathBuf, File)>,
    decoders: Mutex<Vec<Decoder>>,
    stored_bytes: u64,
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
    /// It belongs to the image alone: it must be whole, with all of its packs.
    Whole,
    /// It must be whole, with those packs that are needed.
    Used,
    /// One of many: another may make up for what it lacks.
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
    /// and checks their headers and lengths. The chunks themselves are checked when they are read.
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
        Ok(Self {
            entries: gathering.found.into_iter().flatten().collect(),
            packs: gathering.packs,
            decoders: Mutex::default(),
            stored_bytes: gathering.stored_bytes,
        })
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
        let packs = gathering.packs;
        Ok(Self { entries, packs, decoders: Mutex::default(), stored_bytes: info.len })
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

    /// Reads a chunk into `out`, which must have exactly its plain length, and checks it against
    /// its address. After a failure `out` holds anything.
    pub fn get(&self, id: &ChunkId, out: &mut [u8]) -> Result<(), StoreError> {
        let entry = self.entry(id).ok_or(StoreError::UnknownChunk { id: *id })?;
        let stored = entry.plain_len as usize;
        if stored != out.len() {
            return Err(StoreError::WrongLength { id: *id, stored, asked: out.len() });
        }
        let found = self.decode(entry, out)?;
        if found != *id {
            return Err(self.damaged(entry, "its hash does not match its address"));
        }
        Ok(())
    }

    /// Reads and checks every chunk, on all cores. Returns those that cannot be read.
    pub fn verify(&self) -> Vec<Damage> {
        self.entries
            .par_iter()
            .map_init(
                || vec![0u8; MAX_CHUNK],
                |buffer, entry| {
                    self.get(&entry.id, &mut buffer[..entry.plain_len as usize])
                        .err()
                        .map(|error| Damage { id: entry.id, error })
                },
            )
            .flatten()
            .collect()
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
        let recycled = self.decoders.lock().pop();
        let mut decoder = match recycled {
            Some(decoder) => decoder,
            None => Decoder::new()
                .map_err(|e| io_error("start decompressing", &self.pack_path(entry), e))?,
        };
        let stored =
            Stored { encoding: entry.encoding, len: entry.stored_len as usize, check: entry.check };
        let result = decoder.decode(stored, out, |buffer| self.read_stored(entry, buffer));
        self.decoders.lock().push(decoder);
        result.map_err(|error| match error {
            DecodeError::Read(error) => error,
            DecodeError::Damaged(what) => self.damaged(entry, what),
        })
    }

    fn read_stored(&self, entry: &Entry, out: &mut [u8]) -> Result<(), StoreError> {
        let (path, file) = &self.packs[entry.pack as usize];
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
    /// For each chunk that is needed.
    found: Vec<Option<Entry>>,
    missing: usize,
    packs: Vec<(PathBuf, File)>,
    /// Number and length of each open pack.
    numbers: HashMap<PathBuf, (u32, u64)>,
    stored_bytes: u64,
}

impl Gathering {
    fn new(needed: usize) -> Self {
        Self {
            found: vec![None; needed],
            missing: needed,
            packs: Vec::new(),
            numbers: HashMap::new(),
            stored_bytes: 0,
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
        let mut at = 0;
        let (infos, index_len) = Index::scan(&source.index, |entry| {
            // Both are in order.
            while needed.get(at).is_some_and(|id| *id < entry.id) {
                at += 1;
            }
            if needed.get(at) == Some(&entry.id) && self.found[at].is_none() {
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
        let mut header = [0u8; PACK_HEADER];
        file.read_exact_at(&mut header, 0).map_err(|e| io_error("read", &path, e))?;
        check_pack_header(&path, info.id, &header)?;
        let number = self.packs.len() as u32;
        self.packs.push((path.clone(), file));
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
