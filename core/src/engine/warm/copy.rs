//! What is kept of a warm image: the files of a file system in memory that has no name.
//!
//! | file | contents |
//! |---|---|
//! | `chunks` | the chunks of device memory, plain, each once, each at a multiple of 2 MiB; none of one repeated byte |
//! | `table` | where each of them is |
//! | `criu/` | CRIU's files, as the phase `extract` of a restore makes them, without long runs of zeros |
//! | `zeros-PID` | where these zeros were in the memory of a process |
//! | `carried/` | the files that the image carries, by their number in the manifest |
//!
//! Everything was checked against its hash when it was put there. Then the file system is made read-only.

use std::fs::File;
use std::io::{Read, Write};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::fs::FileExt;

use rayon::prelude::*;
use rustix::fs::{Mode, OFlags};
use serde::{Deserialize, Serialize};

use crate::base::mapping::Mapping;
use crate::base::progress::Progress;
use crate::base::scratch;
use crate::base::stop::Stop;
use crate::engine::error::Error;
use crate::host::criu::leave_out_zeros;
use crate::image::{ImageReader, Manifest, Part, Piece};
use crate::store::{ChunkId, ChunkSource, Encoding, Filled, MAX_CHUNK, StoreError};

/// Version of all this, and of the conversation with a holder.
pub(super) const VERSION: u32 = 3;

const CHUNKS: &str = "chunks";
const TABLE: &str = "table";
const CRIU: &str = "criu";
const CARRIED: &str = "carried";
/// The unit in which memory is given out.
const PAGE: u64 = 4096;

/// Where a chunk is.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub(super) enum Place {
    /// In the file of chunks, from this byte on.
    At(u64),
    /// Nowhere: all its bytes are this one.
    Constant(u8),
}

#[derive(Debug, Serialize, Deserialize)]
pub(super) struct Table {
    version: u32,
    /// Identity of the image.
    image: [u8; 32],
    /// Places of chunks, in order of the ids.
    pub(super) places: Vec<(ChunkId, Place)>,
}

/// The chunks of device memory in the order in which the blocks have them, repeated ones included.
fn device_chunks(manifest: &Manifest) -> impl Iterator<Item = Piece> {
    let blocks = manifest.parts().filter(|part| matches!(part, Part::Block { .. }));
    blocks.flat_map(|part| part.pieces())
}

/// What a copy of an image will be.
pub(super) struct WarmPlan {
    pub(super) table: Table,
    /// The chunks with data, in the order in which they will lie.
    slots: Vec<Piece>,
    /// Bytes of the chunks with data.
    pub(super) chunk_bytes: u64,
    /// Bytes of memory for everything.
    pub(super) memory: u64,
}

impl WarmPlan {
    /// Reads manifest and index, and no chunk.
    pub(super) fn of(image: &ImageReader) -> Self {
        let manifest = image.manifest();
        let mut pieces: Vec<(usize, Piece)> = device_chunks(manifest).enumerate().collect();
        pieces.sort_unstable_by_key(|(order, piece)| (piece.id, *order));
        pieces.dedup_by_key(|(_, piece)| piece.id);
        pieces.sort_unstable_by_key(|(order, _)| *order);
        let mut slots: Vec<Piece> = Vec::new();
        let mut places = Vec::with_capacity(pieces.len());
        for (_, piece) in pieces {
            let place = match image.chunks().entry(&piece.id).map(|entry| entry.encoding) {
                Some(Encoding::Constant(byte)) => Place::Constant(byte),
                _ => {
                    slots.push(piece);
                    Place::At((slots.len() - 1) as u64 * MAX_CHUNK as u64)
                }
            };
            places.push((piece.id, place));
        }
        places.sort_unstable_by_key(|(id, _)| *id);
        let chunk_bytes = slots.iter().map(|piece| piece.len as u64).sum();
        let carried = manifest.carried.iter().map(|carried| &carried.file);
        let files = manifest.criu.files.iter().chain(carried);
        let pages: u64 = files.map(|file| file.size.next_multiple_of(PAGE)).sum();
        let memory = slots.len() as u64 * MAX_CHUNK as u64 + pages;
        let table = Table { version: VERSION, image: image.id(), places };
        Self { table, slots, chunk_bytes, memory }
    }
}

/// A copy that is being made. Gone without a trace if it is dropped before [`finish`](Self::finish).
pub(super) struct Making<'a> {
    image: &'a ImageReader,
    plan: WarmPlan,
    root: OwnedFd,
}

impl<'a> Making<'a> {
    pub(super) fn begin(image: &'a ImageReader, plan: WarmPlan) -> Result<Self, Error> {
        Ok(Self { image, plan, root: scratch::lasting_file_system()? })
    }

    /// Reads, checks and decompresses the chunks of device memory, on all cores.
    ///
    /// # Errors
    ///
    /// A chunk is damaged; there is no memory; `stop` was set.
    pub(super) fn load_chunks(&self, stop: &Stop, progress: &dyn Progress) -> Result<(), Error> {
        let file = create(self.root.as_fd(), CHUNKS)?;
        let failed = io_failed("write", CHUNKS);
        // First, since a large page is given only where the file fills it.
        file.set_len(self.plan.slots.len() as u64 * MAX_CHUNK as u64).map_err(&failed)?;
        let load = |buffer: &mut Vec<u8>, (slot, piece): (usize, &Piece)| {
            if stop.is_set() {
                return Err(Error::Interrupted);
            }
            buffer.resize(piece.len, 0);
            self.image.chunks().get(&piece.id, buffer)?;
            file.write_all_at(buffer, slot as u64 * MAX_CHUNK as u64).map_err(&failed)?;
            progress.advance(piece.len as u64);
            Ok(())
        };
        self.plan.slots.par_iter().enumerate().try_for_each_init(Vec::new, load)
    }

    /// Writes CRIU's files and the files that the image carries.
    ///
    /// # Errors
    ///
    /// A file is damaged; there is no memory.
    pub(super) fn extract_files(&self) -> Result<(), Error> {
        let manifest = self.image.manifest();
        let criu = make_dir(self.root.as_fd(), CRIU)?;
        let extract = |file| self.image.extract_file(file, criu.as_fd());
        manifest.criu.files.par_iter().try_for_each(extract)?;
        let names = manifest.criu.files.iter().map(|file| file.name.as_str());
        let left_out = leave_out_zeros(criu.as_fd(), self.root.as_fd(), names);
        let left_out = left_out.map_err(io_failed("leave zeros out of", CRIU))?;
        tracing::debug!(left_out, "zeros of host memory");
        let carried = make_dir(self.root.as_fd(), CARRIED)?;
        for (number, file) in manifest.carried.iter().enumerate() {
            let bytes = self.image.read_file(&file.file)?;
            write(carried.as_fd(), &number.to_string(), &bytes)?;
        }
        Ok(())
    }

    /// Writes the table and makes everything read-only. Returns the root, and the bytes of memory that
    /// all of it takes.
    pub(super) fn finish(self) -> Result<(OwnedFd, u64), Error> {
        let table = postcard::to_stdvec(&self.plan.table).map_err(|error| Error::Io {
            what: "cannot encode the table of a warm image".into(),
            source: std::io::Error::other(error),
        })?;
        write(self.root.as_fd(), TABLE, &table)?;
        scratch::make_read_only(self.root.as_fd())?;
        let manifest = self.image.manifest();
        let criu = manifest.criu.files.iter().map(|file| format!("{CRIU}/{}", file.name));
        let carried = (0..manifest.carried.len()).map(|number| format!("{CARRIED}/{number}"));
        let mut bytes = 0;
        for name in criu.chain(carried).chain([CHUNKS.to_owned(), TABLE.to_owned()]) {
            bytes += File::from(open(self.root.as_fd(), &name, OFlags::empty())?)
                .metadata()
                .map(|meta| std::os::unix::fs::MetadataExt::blocks(&meta) * 512)
                .map_err(io_failed("read the size of", &name))?;
        }
        Ok((self.root, bytes))
    }
}

/// A copy of an image that is complete, opened to be read. It lives as long as this, whatever becomes of
/// its holder.
pub(crate) struct WarmCopy {
    root: OwnedFd,
    places: Vec<(ChunkId, Place)>,
    chunks: Mapping,
}

impl WarmCopy {
    /// Opens the copy in the file system `root`, which must be one of the image with this identity and
    /// manifest.
    ///
    /// # Errors
    ///
    /// The file system is another image's, or not one that [`Making`] made.
    pub(super) fn open(root: OwnedFd, id: &[u8; 32], manifest: &Manifest) -> Result<Self, Error> {
        let wrong = |what: &'static str| Error::Io {
            what: "cannot use the copy of a warm image".into(),
            source: std::io::Error::other(what),
        };
        let table: Table = postcard::from_bytes(&read(root.as_fd(), TABLE)?)
            .map_err(|_| wrong("its table cannot be decoded"))?;
        if table.version != VERSION || table.image != *id {
            return Err(wrong("it is of another image or version"));
        }
        let chunks = open(root.as_fd(), CHUNKS, OFlags::empty())?;
        let chunks = Mapping::of(chunks).map_err(io_failed("map", CHUNKS))?;
        let copy = Self { root, places: table.places, chunks };
        for piece in device_chunks(manifest) {
            let fits = match copy.place(&piece.id) {
                Some(Place::At(at)) => at
                    .checked_add(piece.len as u64)
                    .is_some_and(|end| end <= copy.chunks.len() as u64),
                Some(Place::Constant(_)) => true,
                None => false,
            };
            if !fits {
                return Err(wrong("a chunk is missing"));
            }
        }
        Ok(copy)
    }

    /// Where a chunk of device memory is.
    pub(super) fn place(&self, id: &ChunkId) -> Option<Place> {
        let at = self.places.binary_search_by_key(id, |(id, _)| *id).ok()?;
        Some(self.places[at].1)
    }

    /// The chunks, in which [`place`](Self::place) says where each is.
    pub(super) fn chunks(&self) -> &Mapping {
        &self.chunks
    }

    /// The directory that lists the zeros which CRIU's files do not have.
    pub(crate) fn zeros(&self) -> BorrowedFd<'_> {
        self.root.as_fd()
    }

    /// The directory of CRIU's files, read-only.
    pub(crate) fn criu_files(&self) -> Result<OwnedFd, Error> {
        open(self.root.as_fd(), CRIU, OFlags::DIRECTORY)
    }

    /// Reads one of CRIU's files.
    pub(crate) fn criu_file(&self, name: &str) -> Result<Vec<u8>, Error> {
        read(self.criu_files()?.as_fd(), name)
    }

    /// Bytes of one of CRIU's files.
    pub(crate) fn criu_file_size(&self, name: &str) -> Result<u64, Error> {
        let file = File::from(open(self.criu_files()?.as_fd(), name, OFlags::empty())?);
        file.metadata().map(|meta| meta.len()).map_err(io_failed("read the size of", name))
    }

    /// Reads a file that the image carries, by its number in the manifest.
    pub(crate) fn carried(&self, number: usize) -> Result<Vec<u8>, Error> {
        read(self.root.as_fd(), &format!("{CARRIED}/{number}"))
    }
}

/// Chunks of device memory: they were checked when they were put there.
impl ChunkSource for WarmCopy {
    fn get(&self, id: &ChunkId, out: &mut [u8]) -> Result<Filled, StoreError> {
        let unknown = StoreError::UnknownChunk { id: *id };
        match self.place(id) {
            Some(Place::Constant(byte)) => Ok(Filled::Constant(byte)),
            Some(Place::At(at)) => {
                self.chunks.copy(at, out).ok_or(unknown)?;
                Ok(Filled::Bytes)
            }
            None => Err(unknown),
        }
    }
}

/// An error of the system at a file of a copy.
fn io_failed(action: &'static str, name: &str) -> impl Fn(std::io::Error) -> Error {
    let what = format!("cannot {action} {name} of a warm image");
    move |source| Error::Io { what: what.clone(), source }
}

fn open(dir: BorrowedFd<'_>, name: &str, flags: OFlags) -> Result<OwnedFd, Error> {
    let flags = flags | OFlags::RDONLY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
    rustix::fs::openat(dir, name, flags, Mode::empty())
        .map_err(|error| io_failed("open", name)(error.into()))
}

fn read(dir: BorrowedFd<'_>, name: &str) -> Result<Vec<u8>, Error> {
    let mut bytes = Vec::new();
    let read = File::from(open(dir, name, OFlags::empty())?).read_to_end(&mut bytes);
    read.map_err(io_failed("read", name))?;
    Ok(bytes)
}

fn create(dir: BorrowedFd<'_>, name: &str) -> Result<File, Error> {
    let flags = OFlags::CREATE | OFlags::EXCL | OFlags::WRONLY | OFlags::CLOEXEC;
    let file = rustix::fs::openat(dir, name, flags, Mode::RUSR | Mode::WUSR);
    Ok(file.map_err(|error| io_failed("create", name)(error.into()))?.into())
}

fn write(dir: BorrowedFd<'_>, name: &str, bytes: &[u8]) -> Result<(), Error> {
    create(dir, name)?.write_all(bytes).map_err(io_failed("write", name))
}

fn make_dir(dir: BorrowedFd<'_>, name: &str) -> Result<OwnedFd, Error> {
    rustix::fs::mkdirat(dir, name, Mode::RWXU)
        .map_err(|error| io_failed("create", name)(error.into()))?;
    open(dir, name, OFlags::DIRECTORY)
}
