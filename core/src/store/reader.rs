//! Reading a store.

use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};

use parking_lot::Mutex;
use rayon::prelude::*;

use super::encoding::{DecodeError, Decoder, Stored};
use super::index::{Index, PACK_HEADER, check_pack_header, open_regular};
use super::{ChunkId, Entry, INDEX, MAX_CHUNK, PACKS, StoreError, io_error, pack_name};

/// Reads chunks of a store, from any number of threads at once.
///
/// Holds the index in memory (64 bytes per chunk), one file descriptor for each pack, and a
/// buffer of at most [`MAX_CHUNK`] for each thread that was ever reading at the same time.
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

impl ChunkReader {
    /// Opens the store in `dir`: reads the index, opens every pack, and checks their headers and
    /// lengths. The chunks themselves are checked when they are read.
    pub fn open(dir: &Path) -> Result<Self, StoreError> {
        let index_path = dir.join(INDEX);
        let index = Index::read(&index_path)?;
        let mut stored_bytes =
            std::fs::metadata(&index_path).map_err(|e| io_error("read", &index_path, e))?.len();
        let mut packs = Vec::new();
        for (number, &expected) in index.packs.iter().enumerate() {
            let path = dir.join(PACKS).join(pack_name(number as u32));
            let file = open_regular(&path)?;
            let found = file.metadata().map_err(|e| io_error("read", &path, e))?.len();
            if found < expected {
                return Err(StoreError::Truncated { path, expected, found });
            }
            if found > expected {
                let what = format!("it has {found} bytes, {expected} were written");
                return Err(StoreError::Damaged { path, what });
            }
            let mut header = [0u8; PACK_HEADER];
            file.read_exact_at(&mut header, 0).map_err(|e| io_error("read", &path, e))?;
            check_pack_header(&path, number as u32, &header)?;
            stored_bytes += found;
            packs.push((path, file));
        }
        Ok(Self { entries: index.entries, packs, decoders: Mutex::default(), stored_bytes })
    }

    /// What the index says about a chunk.
    pub fn entry(&self, id: &ChunkId) -> Option<&Entry> {
        self.entries.binary_search_by_key(id, |e| e.id).ok().map(|i| &self.entries[i])
    }

    /// Every chunk of the store, in order of their ids.
    pub fn entries(&self) -> &[Entry] {
        &self.entries
    }

    /// Bytes of packs and index on disk.
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

    /// Decodes a chunk; returns the address that its bytes have.
    fn decode(&self, entry: &Entry, out: &mut [u8]) -> Result<ChunkId, StoreError> {
        let recycled = self.decoders.lock().pop();
        let mut decoder = match recycled {
            Some(decoder) => decoder,
            None => Decoder::new()
                .map_err(|e| io_error("start decompressing", &self.location(entry), e))?,
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

    fn location(&self, entry: &Entry) -> PathBuf {
        self.packs.get(entry.pack as usize).map_or_else(PathBuf::new, |(path, _)| path.clone())
    }

    fn damaged(&self, entry: &Entry, what: &'static str) -> StoreError {
        let pack = self.location(entry);
        StoreError::DamagedChunk { id: entry.id, pack, offset: entry.offset, what }
    }
}
