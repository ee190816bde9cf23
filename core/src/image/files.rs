//! Files into chunks and back.

use std::fs::File;
use std::io;
use std::ops::Range;
use std::os::fd::{AsFd, BorrowedFd};
use std::os::unix::fs::{FileExt, MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};

use rayon::prelude::*;
use rustix::fs::{AtFlags, Mode, OFlags};

use super::cut::{FILE_CUT, SPAN};
use super::error::{ImageError, io_failure};
use super::manifest::{FileChunk, FileEntry, Piece};
use crate::base::concat::concat;
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

/// Chunks whose bytes are known to be in a file, and to be stored: where each begins in it, in the order of the file. A
/// place that overlaps the one before it, or is not within the file, counts for nothing.
pub type Reused = [(u64, FileChunk)];

/// Cuts the regular file at `path` into chunks, in parallel, and stores them; what is `reused` is not read. The file
/// must not change meanwhile; if it shrinks, this fails.
pub(super) fn store_file(
    chunks: &dyn ChunkSink,
    path: &Path,
    name: &str,
    reused: &Reused,
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
    entry.chunks = store_but(chunks, path, entry.size, reused, &read)?;
    Ok(entry)
}

/// Cuts a file that is read from where its bytes are into chunks, in parallel, and stores them; what is `reused` is not
/// read.
pub(super) fn store_contents(
    chunks: &dyn ChunkSink,
    contents: &dyn Contents,
    reused: &Reused,
) -> Result<FileEntry, ImageError> {
    let read = |bytes: &mut [u8], from| contents.read_exact_at(bytes, from);
    let mut entry = FileEntry::new(contents.name(), contents.mode(), contents.size())?;
    let path = Path::new(contents.name());
    entry.chunks = store_but(chunks, path, entry.size, reused, &read)?;
    Ok(entry)
}

/// Cuts stretches of a file that is read from where its bytes are into chunks, in parallel, and stores them. Gives the
/// chunks of each stretch, and where each begins in the file: see [`store_stretches`].
pub(super) fn store_stretches_of(
    chunks: &dyn ChunkSink,
    contents: &dyn Contents,
    stretches: &[Range<u64>],
) -> Result<Vec<Vec<(u64, FileChunk)>>, ImageError> {
    let read = |bytes: &mut [u8], from| contents.read_exact_at(bytes, from);
    store_stretches(chunks, Path::new(contents.name()), stretches, &read)
}

/// Writes a file that is read from where its bytes are into the directory `dir`, in parallel, in the place of what has
/// its name there; what is `reused` is not read, and zeros are in its place. After a failure, part of it may be there
/// under another name.
pub(super) fn write_contents(
    contents: &dyn Contents,
    dir: &Path,
    reused: &Reused,
) -> Result<(), ImageError> {
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
    unknown(size, reused).into_par_iter().try_for_each_init(Vec::new, |buffer, span| {
        let bytes = first(buffer, (span.end - span.start) as usize);
        contents
            .read_exact_at(bytes, span.start)
            .map_err(|e| io_failure("read", Path::new(name), e))?;
        file.write_all_at(bytes, span.start).map_err(|e| failed("write", e))
    })?;
    std::fs::rename(&path, dir.join(name)).map_err(|e| failed("rename", e))
}

/// What was read of a file that is elsewhere, in memory of gpucr's own.
pub struct HeldContents {
    name: String,
    mode: u32,
    size: u64,
    /// In the order of the file, each with where it begins there.
    pieces: Vec<(u64, Vec<u8>)>,
}

impl HeldContents {
    /// Reads a file in parallel from where its bytes are; what is `reused` is not read.
    ///
    /// # Errors
    /// The bytes cannot be read.
    pub fn read(contents: &dyn Contents, reused: &Reused) -> Result<Self, ImageError> {
        let (name, mode, size) = (contents.name().to_owned(), contents.mode(), contents.size());
        let failed = |e| io_failure("read", Path::new(&name), e);
        let pieces = unknown(size, reused).into_par_iter().map(|span| {
            let mut bytes = vec![0; (span.end - span.start) as usize];
            contents.read_exact_at(&mut bytes, span.start).map_err(failed)?;
            Ok((span.start, bytes))
        });
        let pieces = pieces.collect::<Result<_, ImageError>>()?;
        Ok(Self { name, mode, size, pieces })
    }
}

impl Contents for HeldContents {
    fn name(&self) -> &str {
        &self.name
    }

    fn mode(&self) -> u32 {
        self.mode
    }

    fn size(&self) -> u64 {
        self.size
    }

    /// # Errors
    /// Some of the bytes were not read, as they were known.
    fn read_exact_at(&self, bytes: &mut [u8], offset: u64) -> io::Result<()> {
        let mut next = self.pieces.partition_point(|(at, held)| at + held.len() as u64 <= offset);
        let (mut rest, mut offset) = (bytes, offset);
        while !rest.is_empty() {
            let held = self.pieces.get(next).and_then(|(at, held)| {
                let skipped = offset.checked_sub(*at)?;
                held.get(skipped as usize..).filter(|held| !held.is_empty())
            });
            let held = held.ok_or(io::ErrorKind::UnexpectedEof)?;
            let len = held.len().min(rest.len());
            let (now, after) = rest.split_at_mut(len);
            now.copy_from_slice(&held[..len]);
            (rest, offset, next) = (after, offset + len as u64, next + 1);
        }
        Ok(())
    }
}

/// Bytes of a file of so many bytes that are not `reused`.
pub fn unknown_bytes(size: u64, reused: &Reused) -> u64 {
    unknown(size, reused).iter().map(|span| span.end - span.start).sum()
}

/// What is not `reused` of a file of so many bytes, in pieces of at most [`SPAN`].
fn unknown(size: u64, reused: &Reused) -> Vec<Range<u64>> {
    let within = |span: Range<u64>| span.start..span.end.min(span.start + SPAN as u64);
    stretches(&parts(size, reused)).into_iter().flat_map(spans).map(within).collect()
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

/// A part of a file.
enum FilePart<'a> {
    /// What is not known.
    Stretch(Range<u64>),
    /// Chunks that follow one another.
    Reused(&'a Reused),
}

/// The parts of a file of so many bytes, in their order.
fn parts(size: u64, reused: &Reused) -> Vec<FilePart<'_>> {
    let (mut parts, mut at, mut run) = (Vec::new(), 0, 0);
    for (number, (begin, chunk)) in reused.iter().enumerate() {
        let end = begin.saturating_add(chunk.len.into());
        let counts = *begin >= at && end <= size && chunk.len > 0;
        if counts && *begin == at {
            at = end;
            continue;
        }
        parts.push(FilePart::Reused(&reused[run..number]));
        run = if counts { number } else { number + 1 };
        if counts {
            parts.push(FilePart::Stretch(at..*begin));
            at = end;
        }
    }
    parts.extend([FilePart::Reused(&reused[run..]), FilePart::Stretch(at..size)]);
    parts.retain(|part| match part {
        FilePart::Stretch(stretch) => !stretch.is_empty(),
        FilePart::Reused(run) => !run.is_empty(),
    });
    parts
}

/// The parts that are not known.
fn stretches(parts: &[FilePart<'_>]) -> Vec<Range<u64>> {
    let stretch = |part: &FilePart<'_>| match part {
        FilePart::Stretch(stretch) => Some(stretch.clone()),
        FilePart::Reused(_) => None,
    };
    parts.iter().filter_map(stretch).collect()
}

/// The spans of a stretch: each goes from its place to the end of the stretch.
fn spans(stretch: Range<u64>) -> impl Iterator<Item = Range<u64>> {
    let end = stretch.end;
    stretch.step_by(SPAN).map(move |from| from..end)
}

/// Cuts what is not `reused` of a file of `size` bytes into chunks, in parallel, and stores them. Gives all chunks of
/// the file. Errors name it by its path.
fn store_but(
    chunks: &dyn ChunkSink,
    path: &Path,
    size: u64,
    reused: &Reused,
    read: &ReadAt<'_>,
) -> Result<Vec<FileChunk>, ImageError> {
    let parts = parts(size, reused);
    let stored = store_stretches(chunks, path, &stretches(&parts), read)?;
    let mut stored = stored.iter();
    let placed = |part| match part {
        FilePart::Stretch(stretch) => {
            let cut = stored.next().map_or(&[][..], Vec::as_slice);
            let name = || path.display().to_string();
            let reason = "it has changed while it was read";
            let changed = || ImageError::BadFile { name: name(), reason };
            are_whole(cut, &stretch).then_some(cut).ok_or_else(changed)
        }
        FilePart::Reused(run) => Ok(run),
    };
    let all: Vec<&Reused> = parts.into_iter().map(placed).collect::<Result<_, _>>()?;
    Ok(concat(&all, |(_, chunk)| *chunk))
}

/// Whether chunks with these places follow one another, and make a stretch.
fn are_whole(cut: &[(u64, FileChunk)], stretch: &Range<u64>) -> bool {
    let end = cut.iter().try_fold(stretch.start, |next, (at, chunk)| {
        (*at == next).then(|| next + u64::from(chunk.len))
    });
    end == Some(stretch.end)
}

/// Cuts stretches of a file into chunks, in parallel, and stores them. Gives the chunks of each, and where each begins
/// in the file.
///
/// Where a span ends and the next begins is found by reading what is there, for each of the two. If that changes in
/// between, chunks overlap there, or there is a gap between them.
fn store_stretches(
    chunks: &dyn ChunkSink,
    path: &Path,
    stretches: &[Range<u64>],
    read: &ReadAt<'_>,
) -> Result<Vec<Vec<(u64, FileChunk)>>, ImageError> {
    let all = stretches.iter().enumerate().flat_map(|(number, stretch)| {
        spans(stretch.clone()).map(move |span| (number, span.start == stretch.start, span))
    });
    let stored = all
        .collect::<Vec<_>>()
        .into_par_iter()
        .map_init(Vec::new, |buffer: &mut Vec<u8>, (number, is_first, span)| {
            let len = (span.end - span.start).min(FILE_CUT.reach() as u64);
            let bytes = first(buffer, len as usize);
            read(bytes, span.start).map_err(|e| io_failure("read", path, e))?;
            let own = FILE_CUT.span(is_first, bytes);
            let mut at = span.start + own.start as u64;
            let placed = store_pieces(chunks, &bytes[own])?.into_iter().map(|chunk| {
                let begin = at;
                at += u64::from(chunk.len);
                (begin, chunk)
            });
            Ok((number, placed.collect::<Vec<_>>()))
        })
        .collect::<Result<Vec<_>, ImageError>>()?;
    let mut of_stretches = vec![Vec::new(); stretches.len()];
    stored.into_iter().for_each(|(number, chunks)| of_stretches[number].extend(chunks));
    Ok(of_stretches)
}

/// Cuts bytes that begin at a cut into chunks and stores them.
pub(super) fn store_pieces(
    chunks: &dyn ChunkSink,
    bytes: &[u8],
) -> Result<Vec<FileChunk>, ImageError> {
    let store = |piece: &[u8]| Ok(FileChunk { id: chunks.put(piece)?, len: piece.len() as u32 });
    FILE_CUT.pieces(bytes).map(store).collect()
}

/// Writes a file of an image into the directory `dir`, in parallel: all of it, or the chunks of which some is in
/// `parts`. It must not exist there. After a failure it does not exist.
pub(super) fn extract(
    chunks: &ChunkReader,
    entry: &FileEntry,
    parts: Option<&[Range<u64>]>,
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
        let is_wanted = |piece: &Piece| {
            let end = piece.offset + piece.len as u64;
            parts.is_none_or(|parts| {
                let next = parts.partition_point(|part| part.end <= piece.offset);
                parts.get(next).is_some_and(|part| part.start < end)
            })
        };
        let pieces: Vec<Piece> = entry.pieces().filter(is_wanted).collect();
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

#[cfg(test)]
mod tests {
    use std::collections::HashSet;

    use super::*;
    use crate::store::ChunkId;
    use crate::store::doubles::TestSink;
    use crate::store::tests::noise;

    #[test]
    fn parts_are_the_whole_file_and_name_what_counts() {
        let at = |begin: u64, len: u32| (begin, FileChunk { id: ChunkId::of(b"known"), len });
        let of = |size: u64, reused: &Reused| {
            let part = |part: FilePart<'_>| match part {
                FilePart::Stretch(stretch) => (stretch, 0),
                FilePart::Reused(run) => {
                    let ((first, _), (last, chunk)) = (run[0], run[run.len() - 1]);
                    (first..last + u64::from(chunk.len), run.len())
                }
            };
            parts(size, reused).into_iter().map(part).collect::<Vec<_>>()
        };
        assert_eq!(of(0, &[]), []);
        assert_eq!(of(9, &[]), [(0..9, 0)]);
        assert_eq!(of(9, &[at(0, 4), at(4, 5)]), [(0..9, 2)]);
        let apart = [at(1, 2), at(3, 1), at(6, 2)];
        assert_eq!(of(9, &apart), [(0..1, 0), (1..4, 2), (4..6, 0), (6..8, 1), (8..9, 0)]);
        // One that overlaps, an empty one, and some that are not within the file.
        let bad = [at(0, 4), at(3, 4), at(4, 0), at(4, 2), at(6, 4), at(u64::MAX, 2), at(8, 1)];
        assert_eq!(of(9, &bad), [(0..4, 1), (4..6, 1), (6..8, 0), (8..9, 1)]);
    }

    /// Memory of which the pages about a multiple of [`SPAN`] change between the reads of the two spans.
    struct Changing {
        before: Vec<u8>,
        after: Vec<u8>,
    }

    impl Changing {
        fn new(seed: u64) -> Self {
            let before = noise(1, 2 * SPAN);
            let mut after = before.clone();
            after[SPAN..SPAN + FILE_CUT.max].copy_from_slice(&noise(seed, FILE_CUT.max));
            Self { before, after }
        }
    }

    #[test]
    fn what_is_held_is_what_was_read() {
        let contents = Changing::new(1);
        let len = contents.size() as usize;
        let chunk = |len: u64| FileChunk { id: ChunkId::of(b"known"), len: len as u32 };
        let (first, second) = ((4096, chunk(8192)), (SPAN as u64 + 100, chunk(300)));
        let reused = [first, second];
        let held = HeldContents::read(&contents, &reused).unwrap();
        assert_eq!(
            (held.name(), held.mode(), held.size()),
            ("changing", contents.mode(), len as u64)
        );
        assert_eq!(unknown_bytes(len as u64, &reused), (len - 8492) as u64);
        let read = |from: usize, to: usize| {
            let mut bytes = vec![0; to - from];
            held.read_exact_at(&mut bytes, from as u64).map(|()| bytes)
        };
        let (known, end) = (SPAN + 100, SPAN + 400);
        for (from, to) in
            [(0, 4096), (12288, SPAN), (SPAN - 5, known), (end, len), (end, end), (len, len)]
        {
            let mut expected = vec![0; to - from];
            contents.read_exact_at(&mut expected, from as u64).unwrap();
            assert_eq!(read(from, to).unwrap(), expected, "{from} to {to}");
        }
        for (from, to) in
            [(0, 4097), (4096, 4097), (12287, 12300), (SPAN, known + 1), (len - 1, len + 1)]
        {
            assert!(read(from, to).is_err(), "{from} to {to}");
        }
        let tail = [(0, chunk(len as u64 - 1))];
        let held = HeldContents::read(&contents, &tail).unwrap();
        assert!(held.read_exact_at(&mut [0], 0).is_err());
    }

    impl Contents for Changing {
        fn name(&self) -> &str {
            "changing"
        }

        fn mode(&self) -> u32 {
            0o600
        }

        fn size(&self) -> u64 {
            self.before.len() as u64
        }

        fn read_exact_at(&self, bytes: &mut [u8], offset: u64) -> io::Result<()> {
            let all = if offset == 0 { &self.before } else { &self.after };
            bytes.copy_from_slice(&all[offset as usize..][..bytes.len()]);
            Ok(())
        }
    }

    #[test]
    fn chunks_of_memory_that_changes_are_said_to_be_where_they_were_read() {
        let mut ways = HashSet::new();
        for seed in 2..34 {
            let (memory, sink) = (Changing::new(seed), TestSink::default());
            let all = 0..memory.size();
            let stored = store_stretches_of(&sink, &memory, std::slice::from_ref(&all)).unwrap();
            for (at, chunk) in &stored[0] {
                let place = *at as usize..(*at + u64::from(chunk.len)) as usize;
                let read = [&memory.before, &memory.after].map(|all| &all[place.clone()]);
                assert!(read.iter().any(|bytes| ChunkId::of(bytes) == chunk.id), "{place:?}");
            }
            let len: u64 = stored[0].iter().map(|(_, chunk)| u64::from(chunk.len)).sum();
            ways.insert(len.cmp(&all.end));
            // Where the cuts meet by chance nobody can tell that it has changed.
            let entry = store_contents(&sink, &memory, &[]);
            match are_whole(&stored[0], &all) {
                true => assert_eq!(entry.unwrap().chunks.len(), stored[0].len()),
                false => assert!(matches!(entry, Err(ImageError::BadFile { .. }))),
            }
        }
        // Both happened: chunks that overlap, and parts that are left out.
        assert!(ways.contains(&std::cmp::Ordering::Less), "{ways:?}");
        assert!(ways.contains(&std::cmp::Ordering::Greater), "{ways:?}");
    }
}
