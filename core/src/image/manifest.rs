//! What an image says about itself.
//!
//! The manifest is stored in postcard form, in which fields and variants have an order and no
//! names. So fields never change, and variants are only added at the end of an enum. What else there is to say is
//! said in [sections](Section), each of which has a name and a version of its own.

mod fields;

use std::collections::HashSet;
use std::path::{Path, PathBuf};

use rayon::prelude::*;

pub use fields::{
    Block, BlockKind, CarriedFile, Counts, CriuImage, CudaProcess, Device, Driver, DriverKind,
    FileChunk, FileEntry, Listener, ListenerKind, Manifest, Phase, Piece, Process, Protocol,
    RequiredFile, Section, Shim, Stdio,
};

use super::error::{ImageError, io_failure};
use super::layout::MANIFEST;
use crate::store::disk::Disk;
use crate::store::{ChunkId, MAX_CHUNK, StoreError, index};

/// The newest version of the manifest that this code reads: one with [sections](Section).
pub const MANIFEST_VERSION: u32 = 2;
/// The version of one without sections. It is written where there are none, so that earlier readers can read it.
const WITHOUT_SECTIONS: u32 = 1;

const MAGIC: &[u8; 8] = b"gpucrIMG";
/// Most bytes that a manifest may have; that of a 139 GiB image has about 3 MB.
pub(crate) const MAX_MANIFEST: u64 = 256 << 20;

/// Chunks that one thread encodes at a time.
const BATCH: usize = 16 << 10;

/// The kind of the section that has tags.
pub(crate) const TAGS: &str = "tags";
/// Most tags of an image that are read.
const MAX_TAGS: usize = 64;
/// Most sections of a manifest.
const MAX_SECTIONS: u64 = 64;
/// Most bytes of a file that is read into memory as a whole: libraries that are carried, of which the largest has some
/// 30 MB, and what says which memory can be shared.
pub(crate) const MAX_IN_MEMORY: u64 = 256 << 20;
/// Most bytes of all files that are carried; a restore may have to put each in its place.
const MAX_CARRIED: u64 = 1 << 30;
/// The largest pid that Linux gives (`PID_MAX_LIMIT` less one).
const MAX_PID: u32 = (1 << 22) - 1;

impl Manifest {
    /// The blocks of all processes, in the order of these.
    pub(crate) fn blocks(&self) -> Vec<&Block> {
        let cuda = self.processes.iter().filter_map(|process| process.cuda.as_ref());
        cuda.flat_map(|cuda| &cuda.blocks).collect()
    }

    /// The ids of all processes and of their threads, each once, which a restore needs again. CRIU has
    /// a file for each.
    pub fn thread_ids(&self) -> Vec<u32> {
        let number = |name: &str| name.strip_prefix("core-")?.strip_suffix(".img")?.parse().ok();
        let threads = self.criu.files.iter().filter_map(|file| number(&file.name));
        let mut ids: Vec<u32> = self.processes.iter().map(|p| p.pid).chain(threads).collect();
        ids.sort_unstable();
        ids.dedup();
        ids
    }

    /// Reads and checks the manifest of the image at `dir`.
    ///
    /// # Errors
    /// There is no image or no permission, it is damaged or of a newer version, or it says something that cannot be.
    pub fn read(dir: &Path) -> Result<Self, ImageError> {
        Ok(Self::read_with_id(dir)?.0)
    }

    pub(crate) fn read_with_id(dir: &Path) -> Result<(Self, [u8; 32]), ImageError> {
        let (version, body, id) = Self::read_body(dir)?;
        let manifest = Self::decode(version, &body).map_err(|what| ImageError::Damaged {
            path: dir.join(MANIFEST),
            what: what.to_owned(),
        })?;
        Ok((manifest, id))
    }

    /// The identity of the image at `dir`, whose manifest is not decoded.
    pub(crate) fn identity(dir: &Path) -> Result<[u8; 32], ImageError> {
        Ok(Self::read_body(dir)?.2)
    }

    /// Version, body and identity.
    fn read_body(dir: &Path) -> Result<(u32, Vec<u8>, [u8; 32]), ImageError> {
        let not = |reason| ImageError::NotAnImage { path: dir.to_owned(), reason };
        match std::fs::metadata(dir) {
            Ok(meta) if meta.is_dir() => {}
            Ok(_) => return Err(not("it is not a directory")),
            Err(e) => return Err(io_failure("open", dir, e)),
        }
        let path = dir.join(MANIFEST);
        let (version, body, hash) =
            index::read_framed(&path, MAGIC, MANIFEST_VERSION, MAX_MANIFEST).map_err(|error| {
                match error {
                    StoreError::NotAStore { .. } => not("its manifest is something else"),
                    StoreError::Io { source, .. }
                        if source.kind() == std::io::ErrorKind::NotFound =>
                    {
                        not("it has no manifest")
                    }
                    other => other.into(),
                }
            })?;
        Ok((version, body, *hash.as_bytes()))
    }

    /// The chunks that the image needs, in order, each once.
    pub fn chunk_ids(&self) -> Vec<ChunkId> {
        let mut ids = Vec::with_capacity(self.parts().map(|part| part.chunk_count()).sum());
        self.parts().for_each(|part| part.add_ids(&mut ids));
        ids.par_sort_unstable();
        ids.dedup();
        ids
    }

    /// The chunks that the image needs, with their lengths in bytes. A chunk that has several lengths, which cannot be,
    /// comes several times.
    pub(super) fn chunk_lens(&self) -> Vec<(ChunkId, usize)> {
        let pieces = self.parts().flat_map(|part| part.pieces());
        let mut chunks: Vec<_> = pieces.map(|piece| (piece.id, piece.len)).collect();
        chunks.sort_unstable();
        chunks.dedup();
        chunks
    }

    /// Reads the manifest of the image at `dir` as far as that can be done, and tells `problem` what
    /// [`read`](Self::read) would have refused it for. Fails if nothing like an image is there.
    pub(crate) fn salvage(
        dir: &Path,
        problem: &mut dyn FnMut(ImageError),
    ) -> Result<(Option<Self>, Option<[u8; 32]>), ImageError> {
        let error = match Self::read_with_id(dir) {
            Ok((manifest, id)) => return Ok((Some(manifest), Some(id))),
            Err(error) => error,
        };
        let denied = matches!(&error, ImageError::Store(StoreError::Io { source, .. })
            if source.kind() == std::io::ErrorKind::PermissionDenied);
        let newer = matches!(error, ImageError::NewerVersion { .. });
        // Something else than an image, rather than one whose manifest is damaged.
        if denied
            || newer
            || ![crate::store::INDEX, "base"].iter().any(|name| dir.join(name).is_file())
        {
            return Err(error);
        }
        problem(error);
        let body = index::salvage_body(&dir.join(MANIFEST), MAX_MANIFEST).unwrap_or_default();
        let versions = (WITHOUT_SECTIONS..=MANIFEST_VERSION).rev();
        Ok((versions.map(|version| Self::decode(version, &body)).find_map(Result::ok), None))
    }

    /// What is to be written of the manifest into `dir`. What could not be read back is refused.
    pub(super) fn encode(&self, dir: &Path) -> Result<Encoded, ImageError> {
        let path = dir.join(MANIFEST);
        let damaged = |what: &str| ImageError::Damaged { path: path.clone(), what: what.into() };
        self.check().map_err(damaged)?;
        let (version, body) = self.body().map_err(damaged)?;
        if body.len() as u64 > MAX_MANIFEST {
            return Err(damaged("it is larger than the format's limit"));
        }
        Ok(Encoded { path, version, body })
    }

    /// Identity, version and body of the manifest of an image that is written elsewhere. Errors name it as a file in
    /// `dir`.
    pub(super) fn to_be_sent(&self, dir: &Path) -> Result<([u8; 32], u32, Vec<u8>), ImageError> {
        let Encoded { version, body, .. } = self.encode(dir)?;
        Ok((file_hash(version, &body), version, body))
    }

    /// The version and the body of its file.
    pub(crate) fn body(&self) -> Result<(u32, Vec<u8>), &'static str> {
        let cannot = |_| "it cannot be encoded";
        let mut parts = self.encode_fields().map_err(cannot)?;
        if self.sections.is_empty() {
            return Ok((WITHOUT_SECTIONS, concat_encoded(&parts)));
        }
        parts.push(Encoding::Done(postcard::to_stdvec(&self.sections).map_err(cannot)?));
        Ok((MANIFEST_VERSION, concat_encoded(&parts)))
    }

    /// What postcard makes of the fields. A program stands still meanwhile, and CRIU's files can have millions of
    /// chunks, so many threads encode these: in postcard form a structure is its fields one after the other, and a list
    /// its length and what it has.
    fn encode_fields(&self) -> Result<Vec<Encoding<'_>>, postcard::Error> {
        let Self {
            created,
            gpucr_version,
            hostname,
            kernel,
            protocol,
            driver,
            devices,
            processes,
            criu,
            carried,
            required,
            bulk_bytes,
            phases,
            stopped_ms,
            sections: _,
        } = self;
        let CriuImage { version, files, options } = criu;
        let host = (created, gpucr_version, hostname, kernel);
        let before = (host, protocol, driver, devices, processes, version, files.len());
        let mut parts = vec![Encoding::Done(postcard::to_stdvec(&before)?)];
        for FileEntry { name, size, mode, chunks } in files {
            parts.push(Encoding::Done(postcard::to_stdvec(&(name, size, mode, chunks.len()))?));
            parts.extend(chunks.chunks(BATCH).map(Encoding::Chunks));
        }
        let after = (options, carried, required, bulk_bytes, phases, stopped_ms);
        parts.push(Encoding::Done(postcard::to_stdvec(&after)?));
        Ok(parts)
    }

    /// The words that a user has given the image; nothing if they make no sense.
    pub fn tags(&self) -> Vec<String> {
        let section = self.section(TAGS, 1);
        let tags = section.and_then(|section| postcard::from_bytes(&section.data).ok());
        let mut tags: Vec<String> = tags.unwrap_or_default();
        tags.truncate(MAX_TAGS);
        tags
    }

    /// The section of this kind and version, if there is one.
    pub(crate) fn section(&self, kind: &str, version: u32) -> Option<&Section> {
        self.sections.iter().find(|section| section.kind == kind && section.version == version)
    }

    /// Refuses what this code would have to know to restore the program right, and does not. `known` are kinds and
    /// their versions.
    ///
    /// # Errors
    /// [`ImageError::UnknownSection`].
    pub(crate) fn check_sections(&self, known: &[(&str, u32)]) -> Result<(), ImageError> {
        let is_known = |s: &Section| known.contains(&(s.kind.as_str(), s.version));
        match self.sections.iter().find(|section| section.needed && !is_known(section)) {
            None => Ok(()),
            Some(Section { kind, version, .. }) => Err(ImageError::UnknownSection {
                kind: kind.clone(),
                version: *version,
                made_by: self.gpucr_version.clone(),
            }),
        }
    }

    /// The manifest file of the image at `dir` as bytes, which must be that of image `id`.
    pub(crate) fn file_bytes(dir: &Path, id: &[u8; 32]) -> Result<Vec<u8>, ImageError> {
        let path = dir.join(MANIFEST);
        let bytes = std::fs::read(&path).map_err(|e| io_failure("read", &path, e))?;
        if blake3::hash(&bytes).as_bytes() != id {
            return Err(ImageError::Damaged { path, what: "it has just changed".into() });
        }
        Ok(bytes)
    }

    /// The identity of an image that is written with this manifest.
    pub(crate) fn written_identity(&self) -> Result<[u8; 32], &'static str> {
        let (version, body) = self.body()?;
        Ok(file_hash(version, &body))
    }

    /// Decodes the body of a manifest file of this version; any bytes are safe.
    pub(crate) fn decode(version: u32, body: &[u8]) -> Result<Self, &'static str> {
        let cannot = |_| "it cannot be decoded";
        let (mut manifest, mut rest) = postcard::take_from_bytes::<Self>(body).map_err(cannot)?;
        if version > WITHOUT_SECTIONS {
            // Looked at first: in memory an empty section is twenty times what it is in the file.
            let (count, _) = postcard::take_from_bytes::<u64>(rest).map_err(cannot)?;
            if count > MAX_SECTIONS {
                return Err("it has too many sections");
            }
            (manifest.sections, rest) = postcard::take_from_bytes(rest).map_err(cannot)?;
            if manifest.sections.is_empty() {
                return Err("it has a version with sections, and none");
            }
        }
        if !rest.is_empty() {
            return Err("there are bytes after its last field");
        }
        manifest.check()?;
        Ok(manifest)
    }

    /// Checks what the rest of the code relies on: file names that stay inside their directory,
    /// chunk lists that fit the sizes, pids that there can be, files of a size that can be had in memory.
    fn check(&self) -> Result<(), &'static str> {
        if self.processes.is_empty() {
            return Err("it has no process");
        }
        let is_possible =
            |process: &Process| (2..=MAX_PID).contains(&process.pid) && process.ppid <= MAX_PID;
        if !self.processes.iter().all(is_possible)
            || self.thread_ids().last().is_some_and(|id| *id > MAX_PID)
        {
            return Err("a process has an impossible pid");
        }
        let mut names = HashSet::new();
        for file in &self.criu.files {
            if !names.insert(file.name.as_str()) {
                return Err("two of CRIU's files have the same name");
            }
        }
        if self.sections.len() as u64 > MAX_SECTIONS {
            return Err("it has too many sections");
        }
        let mut kinds = HashSet::new();
        for section in &self.sections {
            section.check_kind()?;
            if !kinds.insert(section.kind.as_str()) {
                return Err("two sections are of the same kind");
            }
        }
        for part in self.parts() {
            part.check_chunks()?;
            if let Some(file) = part.file() {
                file.check_name()?;
            }
        }
        if self.carried.iter().any(|carried| !carried.path.is_absolute()) {
            return Err("a carried file has no absolute path");
        }
        if self.required.iter().any(|required| !required.path.is_absolute()) {
            return Err("a file that the program needs has no absolute path");
        }
        let sizes = || self.carried.iter().map(|carried| carried.file.size);
        if sizes().any(|size| size > MAX_IN_MEMORY) || sizes().sum::<u64>() > MAX_CARRIED {
            return Err("the files that it carries are too large");
        }
        // The number is shown, and added to what has real limits.
        if self.bulk_bytes > i64::MAX as u64 {
            return Err("it has an impossible amount of device memory");
        }
        Ok(())
    }
}

/// A part of the body of a manifest.
enum Encoding<'a> {
    Done(Vec<u8>),
    /// Still to be encoded. What postcard makes of chunks is, one after the other, the bytes of the address of each and
    /// its length, seven bits in a byte, the lowest first.
    Chunks(&'a [FileChunk]),
}

impl Encoding<'_> {
    /// Bytes.
    fn len(&self) -> usize {
        let of = |chunk: &FileChunk| chunk.id.0.len() + (chunk.len.max(1).ilog2() / 7 + 1) as usize;
        match self {
            Self::Done(bytes) => bytes.len(),
            Self::Chunks(chunks) => chunks.iter().map(of).sum(),
        }
    }

    /// Fills `place`, which has its length.
    fn write(&self, place: &mut [u8]) {
        let chunks = match self {
            Self::Done(bytes) => return place.copy_from_slice(bytes),
            Self::Chunks(chunks) => *chunks,
        };
        let mut rest = place;
        let mut put = |bytes: &[u8]| {
            rest.split_off_mut(..bytes.len()).expect("room for it").copy_from_slice(bytes)
        };
        for FileChunk { id, len } in chunks {
            put(&id.0);
            let mut rest = *len;
            while rest > 0x7f {
                put(&[rest as u8 | 0x80]);
                rest >>= 7;
            }
            put(&[rest as u8]);
        }
    }
}

/// The body that these parts make, one after the other.
fn concat_encoded(parts: &[Encoding<'_>]) -> Vec<u8> {
    let lens: Vec<usize> = parts.par_iter().map(Encoding::len).collect();
    // The kernel gives the pages of these zeros when they are first written, which many threads do.
    let mut body = vec![0; lens.iter().sum()];
    let (mut rest, mut places) = (&mut body[..], Vec::with_capacity(parts.len()));
    for (part, len) in parts.iter().zip(lens) {
        let place;
        (place, rest) = rest.split_at_mut(len);
        places.push((part, place));
    }
    places.into_par_iter().for_each(|(part, place)| part.write(place));
    body
}

/// The BLAKE3 of a manifest file of this version with this body.
fn file_hash(version: u32, body: &[u8]) -> [u8; 32] {
    let mut hasher = blake3::Hasher::new();
    hasher.update(&index::frame_header(MAGIC, version, body)).update(body);
    *hasher.finalize().as_bytes()
}

/// A manifest that is to be written.
pub(super) struct Encoded {
    path: PathBuf,
    version: u32,
    body: Vec<u8>,
}

impl Encoded {
    /// Writes and syncs it. Returns the image's identity and the length in bytes.
    pub(super) fn write(&self, disk: &dyn Disk) -> Result<([u8; 32], u64), ImageError> {
        let (path, body) = (&self.path, &self.body);
        let (hash, len) = index::write_framed(disk, path, MAGIC, self.version, body)?;
        Ok((*hash.as_bytes(), len))
    }
}

impl Block {
    /// Its chunks, in order.
    pub(crate) fn pieces(&self) -> impl Iterator<Item = Piece> {
        self.chunks.iter().enumerate().map(|(number, &id)| {
            let offset = number as u64 * MAX_CHUNK as u64;
            let len = self.size.saturating_sub(offset).min(MAX_CHUNK as u64) as usize;
            Piece { id, offset, len }
        })
    }
}

/// Chunks that follow each other.
fn in_order(chunks: &[FileChunk]) -> impl Iterator<Item = Piece> {
    chunks.iter().scan(0u64, |end, chunk| {
        let offset = *end;
        *end = offset.saturating_add(chunk.len.into());
        Some(Piece { id: chunk.id, offset, len: chunk.len as usize })
    })
}

impl Section {
    /// Its chunks, in order.
    pub(super) fn pieces(&self) -> impl Iterator<Item = Piece> {
        in_order(&self.chunks)
    }

    /// Bytes of its chunks.
    pub(super) fn size(&self) -> u64 {
        self.chunks.iter().fold(0, |size, chunk| size.saturating_add(chunk.len.into()))
    }

    fn check_kind(&self) -> Result<(), &'static str> {
        let is_usual = |c: u8| c.is_ascii_lowercase() || c.is_ascii_digit() || c == b'-';
        match self.kind.len() {
            1..=64 if self.kind.bytes().all(is_usual) => Ok(()),
            _ => Err("a section has an impossible name"),
        }
    }
}

impl FileEntry {
    /// Its chunks, in order.
    pub(crate) fn pieces(&self) -> impl Iterator<Item = Piece> {
        in_order(&self.chunks)
    }

    /// Refuses every name that could lead out of the directory that it is put in.
    pub(super) fn check_name(&self) -> Result<(), &'static str> {
        let name = self.name.as_str();
        if name.is_empty() || name.len() > 255 || name == "." || name == ".." {
            return Err("a file has an impossible name");
        }
        if name.contains(['/', '\0']) {
            return Err("a file's name contains a directory");
        }
        Ok(())
    }
}
