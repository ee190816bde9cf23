//! The frame that guards index and manifest, the index's records, and the header of a pack.

use std::fs::File;
use std::io::{self, Read, Write};
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};

use super::{ChunkId, Encoding, MAX_CHUNK, STORE_VERSION, StoreError, io_error};

/// Bytes before the body of a framed file.
pub(crate) const FRAME_HEADER: usize = 56;
/// Bytes before the first chunk of a pack.
pub(crate) const PACK_HEADER: usize = 16;
const PACK_MAGIC: &[u8; 8] = b"gpucrPAK";
const INDEX_MAGIC: &[u8; 8] = b"gpucrIDX";
/// Bytes of one chunk's record in the index.
const RECORD: usize = 64;
/// Most bytes that an index may have; about 16 million chunks, 32 TiB of device memory.
const MAX_INDEX: u64 = 1 << 30;

/// Where a chunk is and how it is stored.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Entry {
    /// The chunk.
    pub id: ChunkId,
    /// How its bytes are stored.
    pub encoding: Encoding,
    /// Number of the pack; 0 for a constant chunk.
    pub pack: u32,
    /// Where in the pack the stored bytes begin; 0 for a constant chunk.
    pub offset: u64,
    /// Bytes in the pack; 0 for a constant chunk.
    pub stored_len: u32,
    /// Plain bytes.
    pub plain_len: u32,
    /// The first 8 bytes of the BLAKE3 of a compressed chunk's stored bytes; else 0.
    pub check: u64,
}

/// Writes a framed file: `magic`, version, zero, length and BLAKE3 of the body, the body.
///
/// The file must not exist; it is private to its owner and synced. Returns its whole contents'
/// BLAKE3 and its length. After a failure a partial file may be left.
pub(crate) fn write_framed(
    path: &Path,
    magic: &[u8; 8],
    version: u32,
    body: &[u8],
) -> Result<(blake3::Hash, u64), StoreError> {
    let mut header = [0u8; FRAME_HEADER];
    header[..8].copy_from_slice(magic);
    header[8..12].copy_from_slice(&version.to_le_bytes());
    header[16..24].copy_from_slice(&(body.len() as u64).to_le_bytes());
    header[24..].copy_from_slice(blake3::hash(body).as_bytes());

    let mut hasher = blake3::Hasher::new();
    hasher.update(&header).update(body);
    let mut file = create_private(path)?;
    file.write_all(&header)
        .and_then(|()| file.write_all(body))
        .and_then(|()| file.sync_all())
        .map_err(|e| io_error("write", path, e))?;
    Ok((hasher.finalize(), (header.len() + body.len()) as u64))
}

/// Reads a framed file and checks everything about it. Returns the body, and the BLAKE3 of the
/// whole file. No more than `limit` bytes are allocated, and none on the header's word alone.
pub(crate) fn read_framed(
    path: &Path,
    magic: &[u8; 8],
    supported: u32,
    limit: u64,
) -> Result<(Vec<u8>, blake3::Hash), StoreError> {
    let mut file = open_regular(path)?;
    let size = file.metadata().map_err(|e| io_error("read", path, e))?.len();
    let truncated =
        |expected| StoreError::Truncated { path: path.to_owned(), expected, found: size };
    let damaged = |what: &str| StoreError::Damaged { path: path.to_owned(), what: what.to_owned() };

    let mut header = [0u8; FRAME_HEADER];
    match file.read_exact(&mut header) {
        Ok(()) => {}
        Err(e) if e.kind() == io::ErrorKind::UnexpectedEof => {
            return Err(truncated(FRAME_HEADER as u64));
        }
        Err(e) => return Err(io_error("read", path, e)),
    }
    if &header[..8] != magic {
        return Err(StoreError::NotAStore { path: path.to_owned() });
    }
    let version = le_u32(&header[8..]);
    if version > supported {
        return Err(StoreError::NewerVersion { path: path.to_owned(), found: version, supported });
    }
    if version == 0 || le_u32(&header[12..]) != 0 {
        return Err(damaged("its header has impossible values"));
    }
    let len = le_u64(&header[16..]);
    if len > limit {
        return Err(damaged("its length is beyond the format's limit"));
    }
    let expected = FRAME_HEADER as u64 + len;
    if size < expected {
        return Err(truncated(expected));
    }
    if size > expected {
        return Err(damaged("there are bytes after its end"));
    }
    let mut body = vec![0u8; len as usize];
    file.read_exact(&mut body).map_err(|e| match e.kind() {
        io::ErrorKind::UnexpectedEof => truncated(expected),
        _ => io_error("read", path, e),
    })?;
    if blake3::hash(&body).as_bytes()[..] != header[24..] {
        return Err(damaged("its hash does not match its contents"));
    }
    let mut hasher = blake3::Hasher::new();
    hasher.update(&header).update(&body);
    Ok((body, hasher.finalize()))
}

/// Creates a file that must not exist, readable and writable by its owner only.
pub(crate) fn create_private(path: &Path) -> Result<File, StoreError> {
    File::options()
        .read(true)
        .write(true)
        .create_new(true)
        .mode(0o600)
        .open(path)
        .map_err(|e| io_error("create", path, e))
}

/// Opens a file for reading that must be a regular one, so that a FIFO or a device planted in an
/// image cannot stall or surprise the reader.
pub(crate) fn open_regular(path: &Path) -> Result<File, StoreError> {
    let file = File::options()
        .read(true)
        .custom_flags(libc::O_NONBLOCK | libc::O_NOFOLLOW)
        .open(path)
        .map_err(|e| io_error("open", path, e))?;
    let meta = file.metadata().map_err(|e| io_error("read", path, e))?;
    if !meta.is_file() {
        return Err(StoreError::NotAStore { path: path.to_owned() });
    }
    Ok(file)
}

/// The first bytes of pack `number`.
pub(crate) fn pack_header(number: u32) -> [u8; PACK_HEADER] {
    let mut header = [0u8; PACK_HEADER];
    header[..8].copy_from_slice(PACK_MAGIC);
    header[8..12].copy_from_slice(&STORE_VERSION.to_le_bytes());
    header[12..].copy_from_slice(&number.to_le_bytes());
    header
}

/// Checks the first bytes of pack `number`.
pub(crate) fn check_pack_header(
    path: &Path,
    number: u32,
    header: &[u8; PACK_HEADER],
) -> Result<(), StoreError> {
    if &header[..8] != PACK_MAGIC {
        return Err(StoreError::NotAStore { path: path.to_owned() });
    }
    let found = le_u32(&header[8..]);
    if found > STORE_VERSION {
        let path = path.to_owned();
        return Err(StoreError::NewerVersion { path, found, supported: STORE_VERSION });
    }
    if *header != pack_header(number) {
        let what = "its header names another version or pack".to_owned();
        return Err(StoreError::Damaged { path: path.to_owned(), what });
    }
    Ok(())
}

/// What the index says: the length in bytes of each pack, and the chunks in order of their ids.
#[derive(Debug, Default)]
pub(crate) struct Index {
    pub(crate) packs: Vec<u64>,
    pub(crate) entries: Vec<Entry>,
}

impl Index {
    /// Writes the index file. Sorts the entries. Returns the file's length in bytes.
    pub(crate) fn write(&mut self, path: &Path) -> Result<u64, StoreError> {
        self.entries.sort_unstable_by_key(|e| e.id);
        let len = 8 + self.packs.len() * 8 + self.entries.len() * RECORD;
        if len as u64 > MAX_INDEX {
            let source = io::Error::from(io::ErrorKind::FileTooLarge);
            return Err(io_error("write", path, source));
        }
        let mut body = Vec::with_capacity(len);
        body.extend_from_slice(&(self.packs.len() as u32).to_le_bytes());
        body.extend_from_slice(&(self.entries.len() as u32).to_le_bytes());
        for pack in &self.packs {
            body.extend_from_slice(&pack.to_le_bytes());
        }
        for e in &self.entries {
            body.extend_from_slice(&e.id.0);
            body.extend_from_slice(&e.encoding.to_bytes());
            body.extend_from_slice(&[0, 0]);
            body.extend_from_slice(&e.pack.to_le_bytes());
            body.extend_from_slice(&e.offset.to_le_bytes());
            body.extend_from_slice(&e.stored_len.to_le_bytes());
            body.extend_from_slice(&e.plain_len.to_le_bytes());
            body.extend_from_slice(&e.check.to_le_bytes());
        }
        Ok(write_framed(path, INDEX_MAGIC, STORE_VERSION, &body)?.1)
    }

    /// Reads the index file and checks that it contradicts neither itself nor the format.
    pub(crate) fn read(path: &Path) -> Result<Self, StoreError> {
        let (body, _) = read_framed(path, INDEX_MAGIC, STORE_VERSION, MAX_INDEX)?;
        Self::decode(&body)
            .map_err(|what| StoreError::Damaged { path: PathBuf::from(path), what: what.into() })
    }

    pub(crate) fn decode(body: &[u8]) -> Result<Self, &'static str> {
        let (counts, rest) = body.split_at_checked(8).ok_or("it has no counts")?;
        let packs = le_u32(counts) as usize;
        let entries = le_u32(&counts[4..]) as usize;
        // Both counts are checked against the bytes that are there before anything is allocated.
        if rest.len() as u64 != packs as u64 * 8 + entries as u64 * RECORD as u64 {
            return Err("its counts do not fit its length");
        }
        let (lengths, records) = rest.split_at(packs * 8);
        let packs: Vec<u64> = lengths.chunks_exact(8).map(le_u64).collect();
        if packs.iter().any(|&len| len < PACK_HEADER as u64 || len > i64::MAX as u64) {
            return Err("a pack has an impossible length");
        }
        let entries = records
            .chunks_exact(RECORD)
            .map(|r| decode_record(r, &packs))
            .collect::<Result<Vec<_>, _>>()?;
        if !entries.is_sorted_by(|a, b| a.id < b.id) {
            return Err("its chunks are not in order");
        }
        Ok(Self { packs, entries })
    }
}

fn decode_record(r: &[u8], packs: &[u64]) -> Result<Entry, &'static str> {
    let entry = Entry {
        id: ChunkId(std::array::from_fn(|i| r[i])),
        encoding: Encoding::from_bytes([r[32], r[33]]).ok_or("a chunk has an unknown encoding")?,
        pack: le_u32(&r[36..]),
        offset: le_u64(&r[40..]),
        stored_len: le_u32(&r[48..]),
        plain_len: le_u32(&r[52..]),
        check: le_u64(&r[56..]),
    };
    if r[34] != 0 || r[35] != 0 {
        return Err("a chunk's record has reserved bytes set");
    }
    if entry.plain_len as usize > MAX_CHUNK {
        return Err("a chunk is larger than the limit");
    }
    let placed = if entry.encoding.has_data() {
        packs.get(entry.pack as usize).is_some_and(|&len| {
            entry.offset >= PACK_HEADER as u64
                && entry.offset.checked_add(entry.stored_len.into()).is_some_and(|end| end <= len)
        })
    } else {
        (entry.pack, entry.offset) == (0, 0)
    };
    let consistent =
        placed && entry.encoding.admits(entry.plain_len, entry.stored_len, entry.check);
    if consistent { Ok(entry) } else { Err("a chunk's record contradicts itself") }
}

/// The first four bytes, little endian. The caller has checked that they are there.
pub(crate) fn le_u32(bytes: &[u8]) -> u32 {
    u32::from_le_bytes(std::array::from_fn(|i| bytes[i]))
}

/// The first eight bytes, little endian. The caller has checked that they are there.
pub(crate) fn le_u64(bytes: &[u8]) -> u64 {
    u64::from_le_bytes(std::array::from_fn(|i| bytes[i]))
}
