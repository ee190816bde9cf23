//! Writing an image as a tar.

use std::collections::HashMap;
use std::ffi::OsString;
use std::fs::File;
use std::io::{self, Seek, Write};
use std::ops::Range;
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};

use rayon::prelude::*;
use rustix::fs::{CWD, RenameFlags};
use serde::Serialize;

use super::error::{TarError, io_error};
use super::format::{BATCH, BLOCK, member_len};
use crate::base::io_error::IoError;
use crate::base::progress::Progress;
use crate::base::stop::Stop;
use crate::image::trust::{self, SIGNATURES};
use crate::image::{ImageReader, MANIFEST, Manifest};
use crate::store::index::{Index, PACK_TRAILER, PackInfo, WriterId, pack_trailer};
use crate::store::{ChunkReader, Entry, INDEX, PACKS, PackId, StoreError};

/// A pack takes no further chunk once it has this many bytes.
const PACK_LIMIT: u64 = 1 << 30;

/// What was exported.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Exported {
    /// Identity of the image.
    pub id: String,
    /// Distinct chunks.
    pub chunks: u64,
    /// Their plain bytes.
    pub bytes: u64,
    /// Bytes of the tar.
    pub tar_bytes: u64,
}

/// Writes the image at `dir` to `out`, which gets all of the tar, or after a failure a part of it.
///
/// The tar holds just the chunks that the image needs, in the order in which the manifest names
/// them, so it is the same whatever else is in their packs. Each is checked by the way. Memory: the
/// records of the chunks, and two buffers of 16 MiB.
///
/// # Errors
/// The image cannot be read or is damaged, `out` cannot be written to, or `stop` is set.
pub fn export(
    dir: &Path,
    out: &mut dyn Write,
    stop: &Stop,
    progress: &dyn Progress,
) -> Result<Exported, TarError> {
    write(&ImageReader::open(dir)?, dir, out, stop, progress)
}

fn write(
    image: &ImageReader,
    dir: &Path,
    out: &mut dyn Write,
    stop: &Stop,
    progress: &dyn Progress,
) -> Result<Exported, TarError> {
    let plan = ExportPlan::of(image, dir)?;
    progress.phase("export", Some(plan.len()));
    plan.write(image.chunks(), out, stop, progress)?;
    out.flush().map_err(io_error("cannot write the tar"))?;
    Ok(Exported {
        id: crate::base::format::hex(&image.id()),
        chunks: plan.chunks,
        bytes: plan.bytes,
        tar_bytes: plan.len(),
    })
}

/// Exports into a new file, which only the owner may read. It is written under a hidden name
/// next to `path`, synced and renamed. After a failure there is no file.
///
/// # Errors
/// [`TarError::Exists`] if something is at `path`; the image cannot be read or is damaged and no other copy of the
/// chunk is sound; the file cannot be written, synced or renamed; or `stop` is set.
pub fn export_to_file(
    dir: &Path,
    path: &Path,
    stop: &Stop,
    progress: &dyn Progress,
) -> Result<Exported, TarError> {
    let exists = || TarError::Exists { path: path.to_owned() };
    if path.symlink_metadata().is_ok() {
        return Err(exists());
    }
    let partial = Partial::create(path)?;
    let mut file = &partial.file;
    let mut image = ImageReader::open(dir)?;
    let exported = loop {
        match write(&image, dir, &mut file, stop, progress) {
            // What follows it is elsewhere in the tar then, so that is begun anew.
            Err(TarError::Store(StoreError::DamagedChunk { id, .. }))
                if image.use_other_copy(&id) =>
            {
                tracing::warn!(chunk = %id, "taken from another copy");
                let emptied = file.rewind().and_then(|()| file.set_len(0));
                emptied.map_err(io_error("cannot write the tar"))?;
            }
            done => break done?,
        }
    };
    progress.phase("sync", None);
    file.sync_all().map_err(io_error("cannot sync the tar"))?;
    match rustix::fs::renameat_with(CWD, &partial.path, CWD, path, RenameFlags::NOREPLACE) {
        Ok(()) => {}
        Err(rustix::io::Errno::EXIST) => return Err(exists()),
        // File systems without that flag: what may come between is a file of that name.
        Err(rustix::io::Errno::INVAL) if path.symlink_metadata().is_err() => {
            std::fs::rename(&partial.path, path).map_err(io_error("cannot rename the tar"))?;
        }
        Err(error) => return Err(io_error("cannot rename the tar")(error.into())),
    }
    let dir = partial.path.parent().unwrap_or(Path::new("/"));
    File::open(dir).and_then(|dir| dir.sync_all()).map_err(io_error("cannot sync the tar"))?;
    Ok(exported)
}

/// Removes what an export of this process to `path` has written so far, if it is to end without further ado.
pub fn remove_unfinished(path: &Path) {
    if let Some(hidden) = hidden(path) {
        let _ = std::fs::remove_file(hidden);
    }
}

/// The name under which a file is written.
fn hidden(target: &Path) -> Option<PathBuf> {
    let target = std::path::absolute(target).ok()?;
    let mut hidden = OsString::from(".");
    hidden.push(target.file_name()?);
    hidden.push(format!(".partial-{}", std::process::id()));
    Some(target.parent()?.join(hidden))
}

/// The file that is being written; removed on drop, unless it was renamed.
struct Partial {
    path: PathBuf,
    file: File,
}

impl Partial {
    fn create(target: &Path) -> Result<Self, TarError> {
        let failed =
            |source| IoError { what: format!("cannot create {}", target.display()), source };
        let path = hidden(target).ok_or_else(|| failed(io::ErrorKind::IsADirectory.into()))?;
        let file = File::options().write(true).create_new(true).mode(0o600).open(&path);
        Ok(Self { file: file.map_err(failed)?, path })
    }
}

impl Drop for Partial {
    fn drop(&mut self) {
        // Best effort; after the rename there is nothing of that name.
        let _ = std::fs::remove_file(&self.path);
    }
}

/// The tar, before anything of it is written.
struct ExportPlan {
    manifest: Vec<u8>,
    /// Empty if there are none.
    signatures: Vec<u8>,
    index: Vec<u8>,
    packs: Vec<Pack>,
    /// The chunks with stored bytes, in the order in which they lie in the packs.
    stored: Vec<Entry>,
    /// Time of change of all members, seconds since 1970.
    time: u64,
    chunks: u64,
    bytes: u64,
}

struct Pack {
    id: PackId,
    len: u64,
    /// The file's chunks among `ExportPlan::stored`.
    chunks: Range<usize>,
}

impl ExportPlan {
    fn of(image: &ImageReader, dir: &Path) -> Result<Self, TarError> {
        let manifest = image.manifest();
        let mut entries: HashMap<_, Entry> = HashMap::new();
        let mut stored = Vec::new();
        let mut packs: Vec<Pack> = Vec::new();
        // Named by the image, so that it gives the same tar always.
        let writer = WriterId(std::array::from_fn(|i| image.id()[i]));
        for piece in manifest.parts().flat_map(|part| part.pieces()) {
            if entries.contains_key(&piece.id) {
                continue;
            }
            // `ImageReader::open` has looked for every chunk.
            let Some(mut entry) = image.chunks().entry(&piece.id).copied() else { continue };
            if entry.encoding.has_data() {
                let len = u64::from(entry.stored_len);
                if packs.last().is_none_or(|pack| pack.len + len > PACK_LIMIT) {
                    let chunks = stored.len()..stored.len();
                    let id = writer.pack(packs.len() as u32);
                    packs.push(Pack { id, len: PACK_TRAILER as u64, chunks });
                }
                let number = packs.len() - 1;
                let pack = &mut packs[number];
                (entry.pack, entry.offset) = (number as u32, pack.len - PACK_TRAILER as u64);
                pack.len += len;
                pack.chunks.end += 1;
                stored.push(entry);
            }
            entries.insert(piece.id, entry);
        }
        let chunks = entries.len() as u64;
        let bytes = entries.values().map(|entry| u64::from(entry.plain_len)).sum();
        let mut index = Index {
            packs: packs.iter().map(|pack| PackInfo { id: pack.id, len: pack.len }).collect(),
            entries: entries.into_values().collect(),
        };
        let index = index.encode_file().ok_or_else(|| TarError::Damaged {
            what: "it has more chunks than one index can hold".into(),
        })?;
        let manifest_file = Manifest::file_bytes(dir, &image.id())?;
        let signatures = trust::signatures(dir)?.into_bytes();
        let time = manifest.created;
        Ok(Self { manifest: manifest_file, signatures, index, packs, stored, time, chunks, bytes })
    }

    /// Bytes of the tar.
    fn len(&self) -> u64 {
        let packs: u64 = self.packs.iter().map(|pack| member_len(pack.len)).sum();
        let files = self.files().map(|(_, file)| member_len(file.len() as u64));
        files.sum::<u64>() + packs + 2 * BLOCK
    }

    /// The members before the packs.
    fn files(&self) -> impl Iterator<Item = (&'static str, &Vec<u8>)> {
        let signatures = Some((SIGNATURES, &self.signatures)).filter(|(_, text)| !text.is_empty());
        [(MANIFEST, &self.manifest)].into_iter().chain(signatures).chain([(INDEX, &self.index)])
    }

    fn write(
        &self,
        chunks: &ChunkReader,
        out: &mut dyn Write,
        stop: &Stop,
        progress: &dyn Progress,
    ) -> Result<(), TarError> {
        let mut out = Counted { out, progress };
        for (name, bytes) in self.files() {
            self.header(&mut out, name, bytes.len() as u64)?;
            out.put(bytes)?;
            out.pad(bytes.len() as u64)?;
        }
        for pack in &self.packs {
            self.header(&mut out, &format!("{PACKS}/{}", pack.id.file_name()), pack.len)?;
            self.write_chunks(chunks, &self.stored[pack.chunks.clone()], &mut out, stop)?;
            out.put(&pack_trailer(pack.id))?;
            out.pad(pack.len)?;
        }
        out.put(&[0; 2 * BLOCK as usize])
    }

    /// Reads chunks in batches, on all cores, while the batch before is written.
    fn write_chunks(
        &self,
        chunks: &ChunkReader,
        entries: &[Entry],
        out: &mut Counted<'_>,
        stop: &Stop,
    ) -> Result<(), TarError> {
        let (full, next) = crossbeam_channel::bounded::<Result<Vec<u8>, TarError>>(0);
        let (emptied, empty) = crossbeam_channel::bounded::<Vec<u8>>(2);
        for _ in 0..2 {
            let _ = emptied.send(Vec::new());
        }
        std::thread::scope(|scope| {
            scope.spawn(move || {
                for batch in batches(entries) {
                    // The writer has failed and is gone if there is no buffer any more.
                    let Ok(mut buffer) = empty.recv() else { return };
                    let read = if stop.is_set() {
                        Err(TarError::Interrupted)
                    } else {
                        read_batch(chunks, batch, &mut buffer).map(|()| buffer)
                    };
                    let failed = read.is_err();
                    if full.send(read).is_err() || failed {
                        return;
                    }
                }
            });
            // Dropped at the end of this closure, before the thread is waited for.
            let (next, emptied) = (next, emptied);
            for batch in next.iter() {
                let batch = batch?;
                out.put(&batch)?;
                let _ = emptied.send(batch);
            }
            Ok(())
        })
    }

    fn header(&self, out: &mut Counted<'_>, name: &str, size: u64) -> Result<(), TarError> {
        let mut header = tar::Header::new_ustar();
        header.set_path(name).map_err(io_error("cannot write the tar"))?;
        header.set_entry_type(tar::EntryType::Regular);
        header.set_mode(0o600);
        header.set_uid(0);
        header.set_gid(0);
        header.set_mtime(self.time);
        header.set_size(size);
        header.set_cksum();
        out.put(header.as_bytes())
    }
}

/// Cuts a list of chunks into parts that have at most [`BATCH`] stored bytes, or one chunk.
fn batches(mut entries: &[Entry]) -> impl Iterator<Item = &[Entry]> {
    std::iter::from_fn(move || {
        let mut len = 0;
        let count = entries.iter().take_while(|entry| {
            len += entry.stored_len as usize;
            len <= BATCH
        });
        let count = count.count().max(1).min(entries.len());
        let (batch, rest) = entries.split_at(count);
        entries = rest;
        (!batch.is_empty()).then_some(batch)
    })
}

/// Fills `buffer` with the stored bytes of these chunks, one after the other.
fn read_batch(chunks: &ChunkReader, batch: &[Entry], buffer: &mut Vec<u8>) -> Result<(), TarError> {
    buffer.resize(batch.iter().map(|entry| entry.stored_len as usize).sum(), 0);
    let mut rest = &mut buffer[..];
    let mut pieces = Vec::with_capacity(batch.len());
    for entry in batch {
        let (piece, after) = rest.split_at_mut(entry.stored_len as usize);
        pieces.push((entry, piece));
        rest = after;
    }
    let read = pieces.into_par_iter().map(|(entry, piece)| chunks.get_stored(&entry.id, piece));
    Ok(read.collect::<Result<(), _>>()?)
}

/// Where the tar goes, with the progress.
struct Counted<'a> {
    out: &'a mut dyn Write,
    progress: &'a dyn Progress,
}

impl Counted<'_> {
    fn put(&mut self, bytes: &[u8]) -> Result<(), TarError> {
        self.out.write_all(bytes).map_err(io_error("cannot write the tar"))?;
        self.progress.advance(bytes.len() as u64);
        Ok(())
    }

    /// Fills a member of `size` bytes up.
    fn pad(&mut self, size: u64) -> Result<(), TarError> {
        let missing = size.next_multiple_of(BLOCK) - size;
        self.put(&[0; BLOCK as usize][..missing as usize])
    }
}
