//! Where a restore has the bytes of an image from: from disk, or from a warm copy in memory.

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::path::Path;

use rayon::prelude::*;

use crate::base::progress::Progress;
use crate::base::scratch;
use crate::base::stop::Stop;
use crate::cuda::Filled;
use crate::engine::error::Error;
use crate::engine::sections;
use crate::engine::warm::WarmImage;
use crate::image::{ImageReader, Manifest, Part, Piece, SHARING_FILE};
use crate::store::{ChunkId, ChunkReader, Encoding, StoreError};

/// An image, opened for a restore.
pub(super) enum Source {
    /// On disk: chunks are read, decompressed and checked.
    Disk(Box<ImageReader>),
    /// Kept by `gpucr warm`, which has done that.
    Warm(Box<WarmImage>),
}

/// CRIU's files, ready for CRIU.
pub(super) struct CriuFiles {
    images: OwnedFd,
    /// For what CRIU writes itself, where that cannot be among its files.
    work: Option<OwnedFd>,
}

impl CriuFiles {
    pub(super) fn images(&self) -> BorrowedFd<'_> {
        self.images.as_fd()
    }

    pub(super) fn work(&self) -> Option<BorrowedFd<'_>> {
        self.work.as_ref().map(AsFd::as_fd)
    }
}

impl Source {
    /// Opens the image at `path`, or the warm copy of it, if `warm` says so and there is one.
    pub(super) fn open(path: &Path, warm: bool) -> Result<Self, Error> {
        let copy = if warm { WarmImage::find(path) } else { None };
        let source = match copy {
            Some(copy) => Self::Warm(Box::new(copy)),
            None => Self::Disk(Box::new(ImageReader::open(path)?)),
        };
        sections::check(source.manifest())?;
        Ok(source)
    }

    /// Bytes of the host's memory that a restore takes: for CRIU's files, of which those of a warm copy are there
    /// already, and for the memory of the processes.
    pub(super) fn host_memory(&self) -> Result<u64, Error> {
        let files = &self.manifest().criu.files;
        let (pages, others): (Vec<_>, Vec<_>) =
            files.iter().partition(|file| file.name.starts_with("pages-"));
        match self {
            Self::Disk(image) => {
                // Zeros are not written to other files; those of pages get memory when they are read.
                let is_kept = |piece: &Piece| {
                    let entry = image.chunks().entry(&piece.id);
                    entry.is_none_or(|entry| entry.encoding != Encoding::Constant(0))
                };
                let kept = others.into_iter().flat_map(|file| Part::Criu(file).pieces());
                let kept: u64 = kept.filter(is_kept).map(|piece| piece.len as u64).sum();
                Ok(kept + 2 * pages.iter().map(|file| file.size).sum::<u64>())
            }
            Self::Warm(image) => {
                pages.iter().map(|file| image.copy.criu_file_size(&file.name)).sum()
            }
        }
    }

    /// Whether it is a warm copy.
    pub(super) fn is_warm(&self) -> bool {
        matches!(self, Self::Warm(_))
    }

    /// What the image says about itself.
    pub(super) fn manifest(&self) -> &Manifest {
        match self {
            Self::Disk(image) => image.manifest(),
            Self::Warm(image) => &image.manifest,
        }
    }

    /// The image's identity.
    pub(super) fn id(&self) -> [u8; 32] {
        match self {
            Self::Disk(image) => image.id(),
            Self::Warm(image) => image.id,
        }
    }

    /// Gives a chunk of device memory: its bytes in `out`, which has its length, or the one byte that
    /// fills it. From disk these bytes have been checked.
    pub(super) fn give(&self, id: &ChunkId, out: &mut [u8]) -> Result<Filled, StoreError> {
        self.give_by(id, out, ChunkReader::get)
    }

    /// The same, but from disk too they may be other bytes: whoever calls it has to find out.
    pub(super) fn give_unchecked(
        &self,
        id: &ChunkId,
        out: &mut [u8],
    ) -> Result<Filled, StoreError> {
        self.give_by(id, out, |chunks, id, out| {
            // What can be seen to be damaged may have another copy.
            chunks.get_unchecked(id, out).or_else(|_| chunks.get(id, out))
        })
    }

    fn give_by(
        &self,
        id: &ChunkId,
        out: &mut [u8],
        get: impl FnOnce(&ChunkReader, &ChunkId, &mut [u8]) -> Result<(), StoreError>,
    ) -> Result<Filled, StoreError> {
        match self {
            Self::Disk(image) => {
                let encoding = image.chunks().entry(id).map(|entry| entry.encoding);
                if let Some(Encoding::Constant(byte)) = encoding {
                    return Ok(Filled::Constant(byte));
                }
                get(image.chunks(), id, out)?;
                Ok(Filled::Bytes)
            }
            Self::Warm(image) => image.copy.give(id, out),
        }
    }

    /// Reads a chunk of device memory into `out`, which has its length.
    pub(super) fn read(&self, id: &ChunkId, out: &mut [u8]) -> Result<(), StoreError> {
        if let Filled::Constant(byte) = self.give(id, out)? {
            out.fill(byte);
        }
        Ok(())
    }

    /// Has whoever keeps it warm load blocks, given by their places among those of the manifest. `None` if
    /// nobody does.
    pub(super) fn load(
        &self,
        blocks: &[usize],
        stop: &Stop,
        progress: &dyn Progress,
    ) -> Option<Vec<OwnedFd>> {
        match self {
            Self::Disk(_) => None,
            Self::Warm(image) => image.load(blocks, stop, progress),
        }
    }

    /// Reads a file that the image carries, by its number in the manifest.
    pub(super) fn carried(&self, number: usize) -> Result<Vec<u8>, Error> {
        match self {
            Self::Disk(image) => Ok(image.read_file(&image.manifest().carried[number].file)?),
            Self::Warm(image) => image.copy.carried(number),
        }
    }

    /// What says which memory can be shared, if anything does.
    pub(super) fn sharing(&self) -> Result<Option<Vec<u8>>, Error> {
        if let Some(bytes) = sections::read_sharing(self.manifest()) {
            return Ok(Some(bytes.to_vec()));
        }
        // Images of version 1 have it among CRIU's files.
        let files = &self.manifest().criu.files;
        let Some(file) = files.iter().find(|file| file.name == SHARING_FILE) else {
            return Ok(None);
        };
        match self {
            Self::Disk(image) => Ok(Some(image.read_file(file)?)),
            Self::Warm(image) => image.copy.criu_file(&file.name).map(Some),
        }
    }

    /// CRIU's files in a file system in memory: written there now, or long since.
    pub(super) fn criu_files(&self) -> Result<CriuFiles, Error> {
        match self {
            Self::Disk(image) => {
                let images = scratch::file_system()?;
                let files = &image.manifest().criu.files;
                files.par_iter().try_for_each(|file| image.extract_file(file, images.as_fd()))?;
                Ok(CriuFiles { images, work: None })
            }
            Self::Warm(image) => {
                // Shared with other restores, and read-only.
                let images = image.copy.criu_files()?;
                Ok(CriuFiles { images, work: Some(scratch::file_system()?) })
            }
        }
    }
}
