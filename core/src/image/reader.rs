//! Reading an image.

use std::ops::Range;
use std::os::fd::BorrowedFd;
use std::path::{Path, PathBuf};

use super::base::{self, Base};
use super::error::ImageError;
use super::files;
use super::manifest::{FileEntry, MAX_IN_MEMORY, Manifest, Piece};
use crate::store::{ChunkId, ChunkReader, ChunkSource, Encoding, Filled, SharedStore, StoreError};

/// An image that was opened for reading. Safe to use from many threads. While one of a store is
/// open, a gc removes nothing there.
pub struct ImageReader {
    manifest: Manifest,
    id: [u8; 32],
    chunks: ChunkReader,
    base: Option<Base>,
    ancestors: Vec<PathBuf>,
    store: Option<SharedStore>,
}

impl ImageReader {
    /// Opens the image at `dir`, of whatever kind: reads and checks manifest and index, those of
    /// its ancestors or the segments of its store, checks that the packs have their lengths and
    /// that every chunk which the manifest names is there. Memory depends on the image, not on
    /// the store.
    ///
    /// # Errors
    /// There is no image or no permission, one of these files is damaged or of a newer version, an ancestor is not
    /// found, or [`ImageError::MissingChunk`].
    pub fn open(dir: &Path) -> Result<Self, ImageError> {
        let foundation = match base::resolve(dir) {
            Ok(foundation) => foundation,
            // What is no image at all is said first.
            Err(error) => return Manifest::read(dir).and(Err(error)),
        };
        tracing::trace!("its foundation is resolved");
        let (manifest, id) = Manifest::read_with_id(dir)?;
        tracing::trace!("its manifest is read");
        let needed = manifest.chunk_lens();
        let mut ids: Vec<ChunkId> = needed.iter().map(|(id, _)| *id).collect();
        ids.dedup();
        tracing::trace!(chunks = ids.len(), "chunks are sorted");
        let chunks = ChunkReader::open_needed(&foundation.sources, &ids)?;
        // Both are in order, so that nothing is searched for; only to name the owner of one that lacks.
        let found = chunks.entries().iter().map(|entry| (entry.id, entry.plain_len as usize));
        if !found.eq(needed) {
            let lacks = |piece: &Piece| {
                chunks.entry(&piece.id).map(|entry| entry.plain_len as usize) != Some(piece.len)
            };
            for part in manifest.parts() {
                if let Some(Piece { id, .. }) = part.pieces().find(lacks) {
                    return Err(ImageError::MissingChunk { id, owner: part.to_string() });
                }
            }
        }
        let base::Foundation { base, ancestors, store, .. } = foundation;
        Ok(Self { manifest, id, chunks, base, ancestors, store })
    }

    /// What the image says about itself.
    pub fn manifest(&self) -> &Manifest {
        &self.manifest
    }

    /// The image's identity: the BLAKE3 of its manifest file.
    pub fn id(&self) -> [u8; 32] {
        self.id
    }

    /// What the image builds on; none if it is self-contained.
    pub fn base(&self) -> Option<&Base> {
        self.base.as_ref()
    }

    /// Where the ancestors of an incremental image were found, the parent first.
    pub fn ancestors(&self) -> &[PathBuf] {
        &self.ancestors
    }

    /// The store that a stored image is in.
    pub fn store(&self) -> Option<&SharedStore> {
        self.store.as_ref()
    }

    /// Where device memory comes from.
    pub fn chunks(&self) -> &ChunkReader {
        &self.chunks
    }

    /// Takes a chunk from another copy from now on, if there is one that is sound. Says whether there was.
    pub(crate) fn use_other_copy(&mut self, id: &ChunkId) -> bool {
        self.chunks.use_other_copy(id)
    }

    /// Writes a file of the image into the open directory `dir`, in parallel, with its mode. A
    /// file of that name must not exist there. After a failure none does.
    ///
    /// # Errors
    /// The name is bad or there already, a chunk is damaged or cannot be read, or the file cannot be written.
    pub fn extract_file(&self, entry: &FileEntry, dir: BorrowedFd<'_>) -> Result<(), ImageError> {
        files::extract(&self.chunks, entry, None, dir)
    }

    /// As [`extract_file`](Self::extract_file), but only chunks of which some is in `parts`, which are in the order of
    /// the file. It has its size, and holes for the rest.
    ///
    /// # Errors
    /// Those of [`extract_file`](Self::extract_file).
    pub fn extract_parts(
        &self,
        entry: &FileEntry,
        parts: &[Range<u64>],
        dir: BorrowedFd<'_>,
    ) -> Result<(), ImageError> {
        files::extract(&self.chunks, entry, Some(parts), dir)
    }

    /// Reads a whole file of the image into memory: one of 256 MiB at most.
    ///
    /// # Errors
    /// The file is larger, or a chunk is damaged or cannot be read.
    pub fn read_file(&self, entry: &FileEntry) -> Result<Vec<u8>, ImageError> {
        if entry.size > MAX_IN_MEMORY {
            let reason = "it is too large to be read into memory";
            return Err(ImageError::BadFile { name: entry.name.clone(), reason });
        }
        // Grown chunk by chunk: an entry that lies about its size costs no memory.
        let mut bytes = Vec::new();
        for piece in entry.pieces() {
            let start = bytes.len();
            bytes.resize(start + piece.len, 0);
            self.chunks.get(&piece.id, &mut bytes[start..])?;
        }
        Ok(bytes)
    }
}

/// Chunks are read from disk, decompressed and checked.
impl ChunkSource for ImageReader {
    fn get(&self, id: &ChunkId, out: &mut [u8]) -> Result<Filled, StoreError> {
        self.get_by(id, out, ChunkReader::get)
    }

    fn get_unchecked(&self, id: &ChunkId, out: &mut [u8]) -> Result<Filled, StoreError> {
        self.get_by(id, out, |chunks, id, out| {
            // What can be seen to be damaged may have another copy.
            chunks.get_unchecked(id, out).or_else(|_| chunks.get(id, out))
        })
    }
}

impl ImageReader {
    fn get_by(
        &self,
        id: &ChunkId,
        out: &mut [u8],
        get: impl FnOnce(&ChunkReader, &ChunkId, &mut [u8]) -> Result<(), StoreError>,
    ) -> Result<Filled, StoreError> {
        let encoding = self.chunks.entry(id).map(|entry| entry.encoding);
        if let Some(Encoding::Constant(byte)) = encoding {
            return Ok(Filled::Constant(byte));
        }
        get(&self.chunks, id, out)?;
        Ok(Filled::Bytes)
    }
}
