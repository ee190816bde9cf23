//! Files into chunks and back.

use std::fs::File;
use std::io;
use std::os::fd::{AsFd, BorrowedFd};
use std::os::unix::fs::{FileExt, MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};

use rayon::prelude::*;
use rustix::fs::{AtFlags, Mode, OFlags};

use super::cut::{FILE_CUT, SPAN};
use super::error::{ImageError, io_failure};
use super::manifest::{FileChunk, FileEntry, Piece};
use crate::store::{ChunkReader, ChunkSink, io_error};

/// A file that is to be in an image and is nowhere on a disk: its bytes are read from where they are.
pub trait Contents: Sync {
    /// Its name (no directory).
    fn name(&self) -> &str;

    /// Its permission bits.
    fn mode(&self) -> u32;

    /// Bytes. They must stay the same.
    fn size(&self) -> u64;

    /// Fills `bytes` with what is at `offset`. All of that lies within the size.
    ///
    /// # Errors
    /// The bytes cannot be read.
    fn read_exact_at(&self, bytes: &mut [u8], offset: u64) -> io::Result<()>;
}

/// Cuts the regular file at `path` into chunks, in parallel, and stores them. The file must not
/// change meanwhile; if it shrinks, this fails.
pub(super) fn store_file(
    chunks: &dyn ChunkSink,
    path: &Path,
    name: &str,
) -> Result<FileEntry, ImageError> {
    let bad = |reason| ImageError::BadFile { name: name.to_owned(), reason };
    let file = File::options()
        .read(true)
        .custom_flags(libc::O_NONBLOCK)
        .open(path)
        .map_err(|e| io_failure("open", path, e))?;
    let meta = file.metadata().map_err(|e| io_failure("read", path, e))?;
    if !meta.is_file() {
        return Err(bad("it is not a regular file"));
    }
    let read = |bytes: &mut [u8], from| file.read_exact_at(bytes, from);
    let mut entry = FileEntry::new(name, meta.mode() & 0o7777, meta.len())?;
    entry.chunks = store_spans(chunks, path, entry.size, &read)?;
    Ok(entry)
}

/// Cuts a file that is read from where its bytes are into chunks, in parallel, and stores them.
pub(super) fn store_contents(
    chunks: &dyn ChunkSink,
    contents: &dyn Contents,
) -> Result<FileEntry, ImageError> {
    let read = |bytes: &mut [u8], from| contents.read_exact_at(bytes, from);
    let mut entry = FileEntry::new(contents.name(), contents.mode(), contents.size())?;
    entry.chunks = store_spans(chunks, Path::new(contents.name()), entry.size, &read)?;
    Ok(entry)
}

/// Writes a file that is read from where its bytes are into the directory `dir`, in parallel, in the place of what has
/// its name there. After a failure, part of it may be there under another name.
pub(super) fn write_contents(contents: &dyn Contents, dir: &Path) -> Result<(), ImageError> {
    let (name, size) = (contents.name(), contents.size());
    let path = dir.join(format!("{name}.unfinished"));
    let failed = |action, e| io_failure(action, &path, e);
    let file = File::options()
        .write(true)
        .create_new(true)
        .mode(contents.mode())
        .open(&path)
        .map_err(|e| failed("create", e))?;
    file.set_len(size).map_err(|e| failed("write", e))?;
    (0..size.div_ceil(SPAN as u64)).into_par_iter().try_for_each_init(
        Vec::new,
        |buffer, number| {
            let from = number * SPAN as u64;
            let bytes = first(buffer, (size - from).min(SPAN as u64) as usize);
            contents
                .read_exact_at(bytes, from)
                .map_err(|e| io_failure("read", Path::new(name), e))?;
            file.write_all_at(bytes, from).map_err(|e| failed("write", e))
        },
    )?;
    std::fs::rename(&path, dir.join(name)).map_err(|e| failed("rename", e))
}

/// The first `len` bytes of a buffer that grows as far as it has to.
fn first(buffer: &mut Vec<u8>, len: usize) -> &mut [u8] {
    if buffer.len() < len {
        buffer.resize(len, 0);
    }
    &mut buffer[..len]
}

impl FileEntry {
    /// A file without its chunks.
    fn new(name: &str, mode: u32, size: u64) -> Result<Self, ImageError> {
        let entry = Self { name: name.to_owned(), size, mode, chunks: Vec::new() };
        entry.check_name().map_err(|reason| ImageError::BadFile { name: name.into(), reason })?;
        Ok(entry)
    }
}

/// Fills a slice with what is at a place in a file.
type ReadAt<'a> = dyn Fn(&mut [u8], u64) -> io::Result<()> + Sync + 'a;

/// Cuts a file of `size` bytes into chunks, in parallel, and stores them. Errors name it by its path.
fn store_spans(
    chunks: &dyn ChunkSink,
    path: &Path,
    size: u64,
    read: &ReadAt<'_>,
) -> Result<Vec<FileChunk>, ImageError> {
    let spans: Vec<Vec<FileChunk>> = (0..size.div_ceil(SPAN as u64))
        .into_par_iter()
        .map_init(Vec::new, |buffer: &mut Vec<u8>, number| {
            let from = number * SPAN as u64;
            let bytes = first(buffer, (size - from).min(FILE_CUT.reach() as u64) as usize);
            read(bytes, from).map_err(|e| io_failure("read", path, e))?;
            store_pieces(chunks, &bytes[FILE_CUT.span(number == 0, bytes)])
        })
        .collect::<Result<_, _>>()?;
    Ok(spans.concat())
}

/// Cuts bytes that begin at a cut into chunks and stores them.
pub(super) fn store_pieces(
    chunks: &dyn ChunkSink,
    bytes: &[u8],
) -> Result<Vec<FileChunk>, ImageError> {
    let store = |piece: &[u8]| Ok(FileChunk { id: chunks.put(piece)?, len: piece.len() as u32 });
    FILE_CUT.pieces(bytes).map(store).collect()
}

/// Writes a file of an image into the directory `dir`, in parallel. It must not exist there.
/// After a failure it does not exist.
pub(super) fn extract(
    chunks: &ChunkReader,
    entry: &FileEntry,
    dir: BorrowedFd<'_>,
) -> Result<(), ImageError> {
    entry
        .check_name()
        .map_err(|reason| ImageError::BadFile { name: entry.name.clone(), reason })?;
    let path = PathBuf::from(&entry.name);
    // The usual conversion will not do: it takes a full disk for one on which an image was being written.
    let failed = |action, e: io::Error| ImageError::Store(io_error(action, &path, e));
    let flags = OFlags::CREATE | OFlags::EXCL | OFlags::WRONLY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
    let fd = rustix::fs::openat(dir, entry.name.as_str(), flags, Mode::RUSR | Mode::WUSR)
        .map_err(|e| failed("create", e.into()))?;
    let file = File::from(fd);
    let fill = || {
        file.set_len(entry.size).map_err(|e| failed("write", e))?;
        let pieces: Vec<Piece> = entry.pieces().collect();
        pieces.par_iter().try_for_each_init(Vec::new, |buffer: &mut Vec<u8>, piece| {
            let bytes = first(buffer, piece.len);
            chunks.get(&piece.id, bytes)?;
            // The file is new, so it reads as zeros where nothing is written.
            if bytes.iter().all(|&byte| byte == 0) {
                return Ok(());
            }
            file.write_all_at(bytes, piece.offset).map_err(|e| failed("write", e))
        })?;
        rustix::fs::fchmod(file.as_fd(), Mode::from_raw_mode(entry.mode & 0o777))
            .map_err(|e| failed("change the mode of", e.into()))
    };
    fill().inspect_err(|_: &ImageError| {
        // Best effort: the error at hand says more than a failure to clean up would.
        let _ = rustix::fs::unlinkat(dir, entry.name.as_str(), AtFlags::empty());
    })
}
