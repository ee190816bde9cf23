//! The frame that guards index and manifest, the index's records, and the trailer of a pack.

use std::fs::File;
use std::hash::{BuildHasher, RandomState};
use std::io::{self, Read, Seek, SeekFrom};
use std::os::unix::fs::OpenOptionsExt;
use std::path::Path;

use rayon::prelude::*;

use super::disk::Disk;
use super::{ChunkId, Encoding, MAX_CHUNK, STORE_VERSION, StoreError, Stored, io_error};

/// Name of the directory of packs within an image or a store.
pub(crate) const PACKS: &str = "packs";
/// Name of the index within an image.
pub(crate) const INDEX: &str = "index";

/// Bytes before the body of a framed file.
pub(crate) const FRAME_HEADER: usize = 56;
/// Bytes behind the last chunk of a pack.
pub(crate) const PACK_TRAILER: usize = 32;
const PACK_MAGIC: &[u8; 8] = b"gpucrPAK";
const INDEX_MAGIC: &[u8; 8] = b"gpucrIDX";
/// Bytes of one pack in the index.
const PACK_RECORD: usize = 24;
/// Bytes of one chunk's record in the index.
const RECORD: usize = 64;
/// Records that are read at a time.
const BATCH: usize = 16 << 10;
/// Most bytes that an index may have; about 16 million chunks, 32 TiB of device memory.
pub(crate) const MAX_INDEX: u64 = 1 << 30;

/// Where a chunk is and how it is stored.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Entry {
    /// The chunk.
    pub id: ChunkId,
    /// How its bytes are stored.
    pub encoding: Encoding,
    /// Number of the pack in the list that goes with it; 0 for a constant chunk.
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

impl Stored {
    /// What an index says of a chunk.
    pub(super) fn of(entry: &Entry) -> Self {
        Self { encoding: entry.encoding, len: entry.stored_len as usize, check: entry.check }
    }
}

impl Entry {
    /// Its record in an index.
    fn record(&self) -> [u8; RECORD] {
        let mut record = [0; RECORD];
        let mut rest = &mut record[..];
        let mut put = |bytes: &[u8]| {
            rest.split_off_mut(..bytes.len()).expect("room for it").copy_from_slice(bytes)
        };
        put(&self.id.0);
        put(&self.encoding.to_bytes());
        put(&[0, 0]);
        put(&self.pack.to_le_bytes());
        put(&self.offset.to_le_bytes());
        put(&self.stored_len.to_le_bytes());
        put(&self.plain_len.to_le_bytes());
        put(&self.check.to_le_bytes());
        record
    }
}

/// Name of a writer, random: 12 bytes. Packs and segments are named by it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(crate) struct WriterId(pub(crate) [u8; 12]);

impl WriterId {
    /// Draws a new one.
    pub(crate) fn random() -> Self {
        // Keyed with the system's randomness: unique among all writers, which is all it must be.
        let half = || RandomState::new().hash_one(std::process::id()).to_le_bytes();
        let (low, high) = (half(), half());
        Self(std::array::from_fn(|i| if i < 8 { low[i] } else { high[i - 8] }))
    }

    /// Reads 24 hexadecimal digits.
    pub(crate) fn parse(digits: &str) -> Option<Self> {
        parse_hex(digits).map(Self)
    }

    /// The id of this writer's pack `number`.
    pub(crate) fn pack(&self, number: u32) -> PackId {
        let mut id = [0u8; 16];
        id[..12].copy_from_slice(&self.0);
        id[12..].copy_from_slice(&number.to_be_bytes());
        PackId(id)
    }
}

impl std::fmt::Display for WriterId {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        self.0.iter().try_for_each(|byte| write!(f, "{byte:02x}"))
    }
}

/// Name of a pack: that of its writer, and a number.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct PackId(pub [u8; 16]);

impl PackId {
    /// Name of the pack's file.
    pub(crate) fn file_name(&self) -> String {
        format!("{self}.pack")
    }

    /// The pack whose file has this name.
    pub(crate) fn of_file_name(name: &str) -> Option<Self> {
        parse_hex(name.strip_suffix(".pack")?).map(Self)
    }
}

impl std::fmt::Display for PackId {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        self.0.iter().try_for_each(|byte| write!(f, "{byte:02x}"))
    }
}

/// Lower-case digits only: every id has one name.
fn parse_hex<const N: usize>(digits: &str) -> Option<[u8; N]> {
    let digits = digits.as_bytes();
    if digits.len() != 2 * N {
        return None;
    }
    let value = |digit: u8| match digit {
        b'0'..=b'9' => Some(digit - b'0'),
        b'a'..=b'f' => Some(digit - b'a' + 10),
        _ => None,
    };
    let mut bytes = [0u8; N];
    for (byte, pair) in bytes.iter_mut().zip(digits.chunks_exact(2)) {
        *byte = value(pair[0])? << 4 | value(pair[1])?;
    }
    Some(bytes)
}

/// What stands before the body of a framed file.
pub(crate) fn frame_header(magic: &[u8; 8], version: u32, body: &[u8]) -> [u8; FRAME_HEADER] {
    let mut header = [0u8; FRAME_HEADER];
    header[..8].copy_from_slice(magic);
    header[8..12].copy_from_slice(&version.to_le_bytes());
    header[16..24].copy_from_slice(&(body.len() as u64).to_le_bytes());
    // A program stands still while the index of its image is written, which can have millions of records: all cores work.
    let hash = blake3::Hasher::new().update_rayon(body).finalize();
    header[24..].copy_from_slice(hash.as_bytes());
    header
}

/// Writes a framed file: `magic`, version, zero, length and BLAKE3 of the body, the body.
///
/// The file must not exist; it is private to its owner and synced. Returns its whole contents'
/// BLAKE3 and its length. After a failure a partial file may be left.
pub(crate) fn write_framed(
    disk: &dyn Disk,
    path: &Path,
    magic: &[u8; 8],
    version: u32,
    body: &[u8],
) -> Result<(blake3::Hash, u64), StoreError> {
    let header = frame_header(magic, version, body);
    let mut hasher = blake3::Hasher::new();
    hasher.update(&header).update_rayon(body);
    let file = disk.create(path).map_err(|e| io_error("create", path, e))?;
    file.write_all_at(&header, 0)
        .and_then(|()| file.write_all_at(body, FRAME_HEADER as u64))
        .map_err(|e| io_error("write", path, e))?;
    file.sync().map_err(|e| io_error("sync", path, e))?;
    Ok((hasher.finalize(), (header.len() + body.len()) as u64))
}

/// A framed file whose header was checked against its length; the body is still to be read.
struct Framed {
    file: File,
    header: [u8; FRAME_HEADER],
    len: u64,
}

impl Framed {
    fn open(path: &Path, magic: &[u8; 8], supported: u32, limit: u64) -> Result<Self, StoreError> {
        let mut file = open_regular(path)?;
        let size = file.metadata().map_err(|e| io_error("read", path, e))?.len();
        let truncated =
            |expected| StoreError::Truncated { path: path.to_owned(), expected, found: size };

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
            let path = path.to_owned();
            return Err(StoreError::NewerVersion { path, found: version, supported });
        }
        if version == 0 || le_u32(&header[12..]) != 0 {
            return Err(damaged(path, "its header has impossible values"));
        }
        let len = le_u64(&header[16..]);
        if len > limit {
            return Err(damaged(path, "its length is beyond the format's limit"));
        }
        let expected = FRAME_HEADER as u64 + len;
        if size < expected {
            return Err(truncated(expected));
        }
        if size > expected {
            return Err(damaged(path, "there are bytes after its end"));
        }
        Ok(Self { file, header, len })
    }

    fn read(&mut self, path: &Path, out: &mut [u8]) -> Result<(), StoreError> {
        self.file.read_exact(out).map_err(|e| match e.kind() {
            io::ErrorKind::UnexpectedEof => damaged(path, "it became shorter while it was read"),
            _ => io_error("read", path, e),
        })
    }

    fn check(&self, path: &Path, body: blake3::Hash) -> Result<(), StoreError> {
        if body.as_bytes()[..] == self.header[24..] {
            return Ok(());
        }
        Err(damaged(path, "its hash does not match its contents"))
    }
}

fn damaged(path: &Path, what: &str) -> StoreError {
    StoreError::Damaged { path: path.to_owned(), what: what.to_owned() }
}

/// Reads a framed file and checks everything about it. Returns its version, the body, and the BLAKE3 of the
/// whole file. No more than `limit` bytes are allocated, and none on the header's word alone.
pub(crate) fn read_framed(
    path: &Path,
    magic: &[u8; 8],
    supported: u32,
    limit: u64,
) -> Result<(u32, Vec<u8>, blake3::Hash), StoreError> {
    let mut framed = Framed::open(path, magic, supported, limit)?;
    let mut body = vec![0u8; framed.len as usize];
    framed.read(path, &mut body)?;
    framed.check(path, blake3::hash(&body))?;
    let mut hasher = blake3::Hasher::new();
    hasher.update(&framed.header).update(&body);
    Ok((le_u32(&framed.header[8..]), body, hasher.finalize()))
}

/// The body of a framed file that [`read_framed`] refuses, whatever its header says: at most
/// `limit` bytes.
pub(crate) fn salvage_body(path: &Path, limit: u64) -> Result<Vec<u8>, StoreError> {
    let mut file = open_regular(path)?;
    let mut body = Vec::new();
    file.seek(SeekFrom::Start(FRAME_HEADER as u64))
        .and_then(|_| file.take(limit).read_to_end(&mut body))
        .map_err(|e| io_error("read", path, e))?;
    Ok(body)
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

/// The last bytes of pack `id`.
pub(crate) fn pack_trailer(id: PackId) -> [u8; PACK_TRAILER] {
    let mut trailer = [0u8; PACK_TRAILER];
    trailer[..8].copy_from_slice(PACK_MAGIC);
    trailer[8..12].copy_from_slice(&STORE_VERSION.to_le_bytes());
    trailer[16..].copy_from_slice(&id.0);
    trailer
}

/// Checks the last bytes of pack `id`.
pub(crate) fn check_pack_trailer(
    path: &Path,
    id: PackId,
    trailer: &[u8; PACK_TRAILER],
) -> Result<(), StoreError> {
    if &trailer[..8] != PACK_MAGIC {
        return Err(StoreError::NotAStore { path: path.to_owned() });
    }
    let found = le_u32(&trailer[8..]);
    if found > STORE_VERSION {
        let path = path.to_owned();
        return Err(StoreError::NewerVersion { path, found, supported: STORE_VERSION });
    }
    if *trailer != pack_trailer(id) {
        return Err(damaged(path, "its trailer names another version or pack"));
    }
    Ok(())
}

/// A pack, as an index names it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct PackInfo {
    pub(crate) id: PackId,
    /// Bytes of its file.
    pub(crate) len: u64,
}

/// What an index or a segment says: its packs in order of their ids, and the chunks in order of
/// theirs.
#[derive(Debug, Default)]
pub(crate) struct Index {
    pub(crate) packs: Vec<PackInfo>,
    pub(crate) entries: Vec<Entry>,
}

impl Index {
    /// Most chunks that one index can have besides so many packs.
    pub(crate) fn room(packs: usize) -> usize {
        (MAX_INDEX as usize - 8).saturating_sub(packs * PACK_RECORD) / RECORD
    }

    /// Writes the index file and syncs it. The packs are in order, and so are the entries, those of each part behind
    /// those of the one before. Returns the file's length in bytes.
    ///
    /// # Errors
    /// It would be larger than the format's limit, or cannot be written or synced. A part of it may be there then.
    pub(crate) fn write(
        disk: &dyn Disk,
        path: &Path,
        packs: &[PackInfo],
        parts: &[Vec<Entry>],
    ) -> Result<u64, StoreError> {
        let body = Self::encode(packs, parts)
            .ok_or_else(|| io_error("write", path, io::Error::from(io::ErrorKind::FileTooLarge)))?;
        Ok(write_framed(disk, path, INDEX_MAGIC, STORE_VERSION, &body)?.1)
    }

    /// The index file as bytes; none if it would be larger than the format's limit. Sorts the
    /// entries; the packs are in order already.
    pub(crate) fn encode_file(&mut self) -> Option<Vec<u8>> {
        self.entries.par_sort_unstable_by_key(|e| e.id);
        let body = Self::encode(&self.packs, std::slice::from_ref(&self.entries))?;
        Some([&frame_header(INDEX_MAGIC, STORE_VERSION, &body)[..], &body].concat())
    }

    fn encode(packs: &[PackInfo], parts: &[Vec<Entry>]) -> Option<Vec<u8>> {
        let entries: usize = parts.iter().map(Vec::len).sum();
        if entries > Self::room(packs.len()) {
            return None;
        }
        // The kernel gives the pages of these zeros when they are first written, which many threads do.
        let mut body = vec![0; 8 + packs.len() * PACK_RECORD + entries * RECORD];
        let (counts, rest) = body.split_at_mut(8);
        counts[..4].copy_from_slice(&(packs.len() as u32).to_le_bytes());
        counts[4..].copy_from_slice(&(entries as u32).to_le_bytes());
        let (named, records) = rest.split_at_mut(packs.len() * PACK_RECORD);
        for (record, pack) in named.chunks_exact_mut(PACK_RECORD).zip(packs) {
            record[..16].copy_from_slice(&pack.id.0);
            record[16..].copy_from_slice(&pack.len.to_le_bytes());
        }
        let (mut records, _) = records.as_chunks_mut::<RECORD>();
        let mut batches = Vec::new();
        for entries in parts.iter().flat_map(|part| part.chunks(BATCH)) {
            let own;
            (own, records) = records.split_at_mut(entries.len());
            batches.push((own, entries));
        }
        batches.into_par_iter().for_each(|(records, entries)| {
            records.iter_mut().zip(entries).for_each(|(record, entry)| *record = entry.record());
        });
        Some(body)
    }

    /// What can be read of an index that [`read`](Self::read) refuses: the records that make sense
    /// by themselves. Perhaps none.
    pub(crate) fn salvage(path: &Path) -> Self {
        let body = salvage_body(path, MAX_INDEX).unwrap_or_default();
        let Some((counts, rest)) = body.split_at_checked(8) else { return Self::default() };
        let lengths = (le_u32(counts) as usize).saturating_mul(PACK_RECORD);
        let Some((packs, records)) = rest.split_at_checked(lengths) else {
            return Self::default();
        };
        let packs: Vec<PackInfo> = packs.chunks_exact(PACK_RECORD).map(decode_pack).collect();
        let records = records.chunks_exact(RECORD);
        let mut entries: Vec<Entry> =
            records.filter_map(|record| decode_record(record, &packs).ok()).collect();
        entries.sort_unstable_by_key(|entry| entry.id);
        entries.dedup_by_key(|entry| entry.id);
        Self { packs, entries }
    }

    /// Reads the index file and checks that it contradicts neither itself nor the format.
    pub(crate) fn read(path: &Path) -> Result<Self, StoreError> {
        let mut entries = Vec::new();
        let (packs, _) = Self::scan(path, |entry| entries.push(*entry))?;
        Ok(Self { packs, entries })
    }

    /// Runs through the index file once and gives each chunk to `take`, in order. Returns the
    /// packs, and the length of the file in bytes. Needs little memory, however long the file is.
    ///
    /// What was taken counts only if this succeeds: the hash is known at the end.
    pub(crate) fn scan(
        path: &Path,
        mut take: impl FnMut(&Entry),
    ) -> Result<(Vec<PackInfo>, u64), StoreError> {
        let mut framed = Framed::open(path, INDEX_MAGIC, STORE_VERSION, MAX_INDEX)?;
        let bad = |what: &'static str| damaged(path, what);
        let mut hasher = blake3::Hasher::new();
        let mut counts = [0u8; 8];
        if framed.len < counts.len() as u64 {
            return Err(bad("it has no counts"));
        }
        framed.read(path, &mut counts)?;
        hasher.update(&counts);
        let (pack_count, mut left) = check_counts(&counts, framed.len - 8).map_err(bad)?;
        let mut buffer = vec![0u8; pack_count * PACK_RECORD];
        framed.read(path, &mut buffer)?;
        hasher.update(&buffer);
        let packs = decode_packs(&buffer).map_err(bad)?;
        let mut last = None;
        while left > 0 {
            let batch = left.min(BATCH);
            buffer.resize(batch * RECORD, 0);
            framed.read(path, &mut buffer)?;
            hasher.update(&buffer);
            for record in buffer.chunks_exact(RECORD) {
                take(&decode_next(record, &packs, &mut last).map_err(bad)?);
            }
            left -= batch;
        }
        framed.check(path, hasher.finalize())?;
        Ok((packs, FRAME_HEADER as u64 + framed.len))
    }

    /// Decodes the body of an index file; any bytes are safe.
    pub(crate) fn decode(body: &[u8]) -> Result<Self, &'static str> {
        let (counts, rest) = body.split_at_checked(8).ok_or("it has no counts")?;
        let (packs, _) = check_counts(counts, rest.len() as u64)?;
        let (packs, records) = rest.split_at(packs * PACK_RECORD);
        let packs = decode_packs(packs)?;
        let mut last = None;
        let records = records.chunks_exact(RECORD);
        let entries =
            records.map(|r| decode_next(r, &packs, &mut last)).collect::<Result<_, _>>()?;
        Ok(Self { packs, entries })
    }
}

/// The numbers of packs and chunks, which must fit the `len` bytes that follow them: nothing is
/// allocated before that is known.
fn check_counts(counts: &[u8], len: u64) -> Result<(usize, usize), &'static str> {
    let (packs, entries) = (u64::from(le_u32(counts)), u64::from(le_u32(&counts[4..])));
    if len != packs * PACK_RECORD as u64 + entries * RECORD as u64 {
        return Err("its counts do not fit its length");
    }
    Ok((packs as usize, entries as usize))
}

fn decode_pack(r: &[u8]) -> PackInfo {
    PackInfo { id: PackId(std::array::from_fn(|i| r[i])), len: le_u64(&r[16..]) }
}

fn decode_packs(bytes: &[u8]) -> Result<Vec<PackInfo>, &'static str> {
    let pack =
        |r: &[u8]| PackInfo { id: PackId(std::array::from_fn(|i| r[i])), len: le_u64(&r[16..]) };
    let packs: Vec<PackInfo> = bytes.chunks_exact(PACK_RECORD).map(pack).collect();
    if packs.iter().any(|pack| pack.len < PACK_TRAILER as u64 || pack.len > i64::MAX as u64) {
        return Err("a pack has an impossible length");
    }
    if !packs.is_sorted_by(|a, b| a.id < b.id) {
        return Err("its packs are not in order");
    }
    Ok(packs)
}

/// Decodes a record and checks that it comes after the last one.
fn decode_next(
    record: &[u8],
    packs: &[PackInfo],
    last: &mut Option<ChunkId>,
) -> Result<Entry, &'static str> {
    let entry = decode_record(record, packs)?;
    if last.replace(entry.id).is_some_and(|last| last >= entry.id) {
        return Err("its chunks are not in order");
    }
    Ok(entry)
}

fn decode_record(r: &[u8], packs: &[PackInfo]) -> Result<Entry, &'static str> {
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
        packs.get(entry.pack as usize).is_some_and(|pack| {
            let end = entry.offset.checked_add(entry.stored_len.into());
            let end = end.and_then(|end| end.checked_add(PACK_TRAILER as u64));
            end.is_some_and(|end| end <= pack.len)
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
