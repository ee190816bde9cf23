//! Where a restore has an image from: from disk, or from a warm copy in memory.

use std::collections::BTreeMap;
use std::fs::File;
use std::io::{Read, Write};
use std::ops::{Deref, Range};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::path::{Path, PathBuf};
use std::sync::Arc;

use rayon::prelude::*;
use rustix::fs::{Mode, OFlags};

use crate::base::io_error::IoError;
use crate::base::progress::Progress;
use crate::base::scratch;
use crate::base::stop::Stop;
use crate::engine::error::Error;
use crate::engine::sections;
use crate::engine::warm::WarmImage;
use crate::host::criu::{FILES, PagesFile, Part as Pages, Plan, with_sizes};
use crate::image::{FileEntry, ImageReader, Manifest, Part, Piece, SHARING_FILE};
use crate::store::{ChunkId, ChunkSource, Encoding, Filled, StoreError};

/// Files of pages are cut at multiples of this.
const PAGE: usize = 4096;

/// What a restore needs of an image. Device memory is given chunk by chunk.
pub(super) trait ImageSource: ChunkSource + Send {
    /// What the image says about itself.
    fn manifest(&self) -> &Manifest;

    /// The image's identity.
    fn id(&self) -> [u8; 32];

    /// Whether it is a warm copy.
    fn is_warm(&self) -> bool {
        false
    }

    /// Bytes of the host's memory that a restore takes for files of CRIU's, `pages` of which are the memory of the
    /// processes, and for that memory.
    ///
    /// # Errors
    /// The size of a file cannot be read.
    fn host_memory(&self, pages: &[&FileEntry], others: &[&FileEntry]) -> Result<u64, Error>;

    /// Has the holder of the image load blocks, given by their places among the manifest's. Calls `room` once if there
    /// is room for them, and for a program's contexts besides. `None` if no holder does.
    fn load(
        &self,
        blocks: &[usize],
        stop: &Stop,
        progress: &dyn Progress,
        room: &dyn Fn(),
    ) -> Option<Vec<OwnedFd>> {
        let _ = (blocks, stop, progress, room);
        None
    }

    /// Reads a file that the image carries, by its number in the manifest.
    ///
    /// # Errors
    /// The file cannot be read, or is damaged.
    fn carried(&self, number: usize) -> Result<Vec<u8>, Error>;

    /// Reads one of CRIU's files.
    ///
    /// # Errors
    /// The file cannot be read, or is damaged.
    fn criu_file(&self, file: &FileEntry) -> Result<Vec<u8>, Error>;

    /// Reads a copy of a file that the program was writing.
    ///
    /// # Errors
    /// The copy cannot be read, or is damaged.
    fn kept_file(&self, file: &FileEntry) -> Result<Vec<u8>, Error>;

    /// CRIU's files in a file system in memory: written there now, but for files of pages, or all of them long since.
    ///
    /// # Errors
    /// A file cannot be read, or there is no room.
    fn criu_files(&self) -> Result<CriuFiles, Error>;

    /// The directory that lists the zeros which CRIU's files do not have, if some were left out.
    fn zeros(&self) -> Option<BorrowedFd<'_>> {
        None
    }

    /// Writes a file of pages among those: all of it, or what of it is in `parts`, with holes for the rest. Nothing
    /// where they are there long since.
    ///
    /// # Errors
    /// The file cannot be read, or there is no room.
    fn write_pages(
        &self,
        file: &FileEntry,
        parts: Option<&[Range<u64>]>,
        images: BorrowedFd<'_>,
    ) -> Result<(), Error> {
        let _ = (file, parts, images);
        Ok(())
    }
}

/// CRIU's files, ready for CRIU.
pub(super) struct CriuFiles {
    images: OwnedFd,
    /// For what CRIU writes itself, where that cannot be among its files.
    work: Option<OwnedFd>,
    /// The memory that is brought in in CRIU's place: its files have no more of it than it reads itself.
    plan: Option<Arc<Plan>>,
}

impl CriuFiles {
    pub(super) fn images(&self) -> BorrowedFd<'_> {
        self.images.as_fd()
    }

    pub(super) fn work(&self) -> Option<BorrowedFd<'_>> {
        self.work.as_ref().map(AsFd::as_fd)
    }

    pub(super) fn plan(&self) -> Option<&Arc<Plan>> {
        self.plan.as_ref()
    }
}

impl CriuFiles {
    /// A copy of these files, of its own.
    fn copied<'n>(&self, names: impl Iterator<Item = &'n str>) -> Result<Self, Error> {
        let images = scratch::file_system()?;
        for name in names {
            let copy = || -> std::io::Result<u64> {
                let mut from = open(self.images(), name, OFlags::RDONLY)?;
                let flags = OFlags::WRONLY | OFlags::CREATE | OFlags::EXCL;
                std::io::copy(&mut from, &mut open(images.as_fd(), name, flags)?)
            };
            copy().map_err(IoError::when("cannot copy a file of CRIU's in memory"))?;
        }
        Ok(Self { images, work: None, plan: None })
    }

    /// Takes the sizes of files that have other ones by now, these, out of CRIU's list.
    fn set_sizes(&self, sizes: &BTreeMap<PathBuf, u64>) -> Result<(), Error> {
        let failed = || IoError::when("cannot change CRIU's list of open files");
        let mut list = Vec::new();
        let mut file = open(self.images(), FILES, OFlags::RDONLY).map_err(failed())?;
        file.read_to_end(&mut list).map_err(failed())?;
        let list = with_sizes(&list, sizes).ok_or_else(|| Error::Damaged {
            what: "CRIU's list of the files that the program had open".into(),
        })?;
        let flags = OFlags::WRONLY | OFlags::TRUNC;
        let written = open(self.images(), FILES, flags).and_then(|mut file| file.write_all(&list));
        Ok(written.map_err(failed())?)
    }
}

/// Opens a file in this directory.
fn open(dir: BorrowedFd<'_>, name: &str, flags: OFlags) -> std::io::Result<File> {
    let flags = flags | OFlags::NOFOLLOW | OFlags::CLOEXEC;
    Ok(rustix::fs::openat(dir, name, flags, Mode::RUSR | Mode::WUSR)?.into())
}

/// On disk: chunks are read, decompressed and checked.
impl ImageSource for ImageReader {
    fn manifest(&self) -> &Manifest {
        Self::manifest(self)
    }

    fn id(&self) -> [u8; 32] {
        Self::id(self)
    }

    fn host_memory(&self, pages: &[&FileEntry], others: &[&FileEntry]) -> Result<u64, Error> {
        // Zeros are not written to other files; zeros of pages get memory when they are read.
        let is_kept = |piece: &Piece| {
            let entry = self.chunks().entry(&piece.id);
            entry.is_none_or(|entry| entry.encoding != Encoding::Constant(0))
        };
        let kept = others.iter().flat_map(|file| Part::Criu(file).pieces());
        let kept: u64 = kept.filter(is_kept).map(|piece| piece.len as u64).sum();
        Ok(kept + pages.iter().map(|file| file.size).sum::<u64>())
    }

    fn carried(&self, number: usize) -> Result<Vec<u8>, Error> {
        Ok(self.read_file(&Self::manifest(self).carried[number].file)?)
    }

    fn criu_file(&self, file: &FileEntry) -> Result<Vec<u8>, Error> {
        Ok(self.read_file(file)?)
    }

    fn kept_file(&self, file: &FileEntry) -> Result<Vec<u8>, Error> {
        Ok(self.read_file(file)?)
    }

    fn criu_files(&self) -> Result<CriuFiles, Error> {
        let images = scratch::file_system()?;
        let files = Self::manifest(self).criu.files.par_iter().filter(|file| !is_pages(file));
        files.try_for_each(|file| self.extract_file(file, images.as_fd()))?;
        Ok(CriuFiles { images, work: None, plan: None })
    }

    fn write_pages(
        &self,
        file: &FileEntry,
        parts: Option<&[Range<u64>]>,
        images: BorrowedFd<'_>,
    ) -> Result<(), Error> {
        Ok(match parts {
            Some(parts) => self.extract_parts(file, parts, images),
            None => self.extract_file(file, images),
        }?)
    }
}

/// Kept by `gpucr warm`, which has read and checked everything.
impl ImageSource for WarmImage {
    fn manifest(&self) -> &Manifest {
        &self.manifest
    }

    fn id(&self) -> [u8; 32] {
        self.id
    }

    fn is_warm(&self) -> bool {
        true
    }

    fn host_memory(&self, pages: &[&FileEntry], _: &[&FileEntry]) -> Result<u64, Error> {
        // CRIU's files are there already.
        pages.iter().map(|file| self.copy.criu_file_size(&file.name)).sum()
    }

    fn load(
        &self,
        blocks: &[usize],
        stop: &Stop,
        progress: &dyn Progress,
        room: &dyn Fn(),
    ) -> Option<Vec<OwnedFd>> {
        Self::load(self, blocks, stop, progress, room)
    }

    fn carried(&self, number: usize) -> Result<Vec<u8>, Error> {
        self.copy.carried(number)
    }

    fn criu_file(&self, file: &FileEntry) -> Result<Vec<u8>, Error> {
        self.copy.criu_file(&file.name)
    }

    fn kept_file(&self, file: &FileEntry) -> Result<Vec<u8>, Error> {
        // What is rarely wanted is not kept in memory.
        Ok(ImageReader::open(&self.path)?.read_file(file)?)
    }

    fn criu_files(&self) -> Result<CriuFiles, Error> {
        // Shared with other restores, and read-only.
        let images = self.copy.criu_files()?;
        Ok(CriuFiles { images, work: Some(scratch::file_system()?), plan: None })
    }

    fn zeros(&self) -> Option<BorrowedFd<'_>> {
        Some(self.copy.zeros())
    }
}

/// Whether this is one of CRIU's files of pages.
fn is_pages(file: &FileEntry) -> bool {
    file.name.starts_with("pages-")
}

/// A file of pages, in the chunks of an image.
struct StoredPages {
    image: Arc<Source>,
    pieces: Vec<Piece>,
    size: u64,
}

impl StoredPages {
    /// `None` if it is not cut at pages, as by none of gpucr's versions.
    fn of(image: &Arc<Source>, file: &FileEntry) -> Option<Self> {
        let pieces: Vec<Piece> = file.pieces().collect();
        let is_cut_at_pages = pieces.iter().all(|piece| piece.len.is_multiple_of(PAGE));
        is_cut_at_pages.then(|| Self { image: image.clone(), pieces, size: file.size })
    }

    fn piece(&self, at: u64) -> Option<&Piece> {
        let after = self.pieces.partition_point(|piece| piece.offset <= at);
        self.pieces[..after].last()
    }
}

impl PagesFile for StoredPages {
    fn size(&self) -> u64 {
        self.size
    }

    fn part(&self, at: u64) -> Range<u64> {
        self.piece(at).map_or(at..at, |piece| piece.offset..piece.offset + piece.len as u64)
    }

    fn read<'a>(
        &'a self,
        part: &Range<u64>,
        buffer: &'a mut Vec<u8>,
    ) -> std::io::Result<Pages<'a>> {
        let piece = self.piece(part.start).ok_or(std::io::ErrorKind::UnexpectedEof)?;
        buffer.resize(piece.len, 0);
        // An error of the store is found again in that of the restore.
        match self.image.get(&piece.id, buffer).map_err(std::io::Error::other)? {
            Filled::Constant(0) => return Ok(Pages::Zeros),
            Filled::Constant(byte) => buffer.fill(byte),
            Filled::Bytes => {}
        }
        Ok(Pages::Bytes(buffer))
    }
}

/// An image, opened for a restore.
pub(super) struct Source(Box<dyn ImageSource>);

impl Deref for Source {
    type Target = dyn ImageSource;

    fn deref(&self) -> &Self::Target {
        self.0.as_ref()
    }
}

impl Source {
    /// Opens the image at `path`, or the warm copy of it, if `warm` says so and there is one.
    pub(super) fn open(path: &Path, warm: bool) -> Result<Self, Error> {
        let copy = if warm { WarmImage::find(path) } else { None };
        let source = match copy {
            Some(copy) => Self(Box::new(copy)),
            None => Self(Box::new(ImageReader::open(path)?)),
        };
        sections::check(source.manifest())?;
        Ok(source)
    }

    /// Bytes of the host's memory that a restore takes: for CRIU's files, which a warm copy has
    /// already, and for the memory of the processes.
    pub(super) fn host_memory(&self) -> Result<u64, Error> {
        let files = &self.manifest().criu.files;
        let (pages, others): (Vec<_>, Vec<_>) = files.iter().partition(|file| is_pages(file));
        self.0.host_memory(&pages, &others)
    }

    /// CRIU's files. What is brought in in CRIU's place stays where it is.
    ///
    /// # Errors
    /// A file cannot be read, or there is no room.
    pub(super) fn extract(self: &Arc<Self>) -> Result<CriuFiles, Error> {
        let mut files = self.0.criu_files()?;
        tracing::debug!("CRIU's files are written");
        let all = &self.manifest().criu.files;
        let elsewhere = |name: &str| {
            let file = all.iter().find(|file| file.name == name && !self.is_warm())?;
            Some(Arc::new(StoredPages::of(self, file)?) as Arc<dyn PagesFile>)
        };
        let plan = Plan::of(files.images(), &elsewhere, self.0.zeros()).unwrap_or_else(|error| {
            tracing::warn!(%error, "CRIU brings in the memory of processes itself");
            None
        });
        let pages: Vec<&FileEntry> = all.iter().filter(|file| is_pages(file)).collect();
        if plan.is_none() && !self.is_warm() {
            // They are there twice then, until the processes have them.
            super::room::check_bytes(2 * pages.iter().map(|file| file.size).sum::<u64>())?;
        }
        let parts = |name: &str| plan.as_ref().and_then(|plan| plan.left_to_criu(name));
        let write = |file: &&FileEntry| self.write_pages(file, parts(&file.name), files.images());
        pages.par_iter().try_for_each(write)?;
        tracing::debug!("so are the pages that CRIU brings in");
        files.plan = plan.map(Arc::new);
        Ok(files)
    }

    /// CRIU's files of this image, in which files that are gone on with have these sizes.
    ///
    /// # Errors
    /// One cannot be read or written, or there is no room.
    pub(super) fn with_sizes(
        &self,
        files: CriuFiles,
        sizes: &BTreeMap<PathBuf, u64>,
    ) -> Result<CriuFiles, Error> {
        if sizes.is_empty() {
            return Ok(files);
        }
        let names = self.manifest().criu.files.iter().map(|file| file.name.as_str());
        // Those of a warm image are other restores' too.
        let files = if files.work.is_some() { files.copied(names)? } else { files };
        files.set_sizes(sizes)?;
        Ok(files)
    }

    /// What says which memory can be shared, if anything does.
    pub(super) fn sharing(&self) -> Result<Option<Vec<u8>>, Error> {
        if let Some(bytes) = sections::read_sharing(self.manifest()) {
            return Ok(Some(bytes.to_vec()));
        }
        // Images of version 1 have it among CRIU's files.
        let files = &self.manifest().criu.files;
        let file = files.iter().find(|file| file.name == SHARING_FILE);
        file.map(|file| self.criu_file(file)).transpose()
    }
}

impl ChunkSource for Source {
    fn get(&self, id: &ChunkId, out: &mut [u8]) -> Result<Filled, StoreError> {
        self.0.get(id, out)
    }

    fn get_unchecked(&self, id: &ChunkId, out: &mut [u8]) -> Result<Filled, StoreError> {
        self.0.get_unchecked(id, out)
    }

    fn prefetch(&self, ids: &mut dyn Iterator<Item = ChunkId>) {
        self.0.prefetch(ids);
    }
}
