//! Making an image.

use std::ffi::{OsStr, OsString};
use std::io;
use std::os::fd::{AsRawFd, OwnedFd};
use std::path::{Path, PathBuf};
use std::sync::Arc;

use rayon::prelude::*;

use super::base::Base;
use super::destination::{Destination, build_on, check_free, check_name, is_mount_point};
use super::error::{ImageError, io_failure};
use super::files::{self, Contents, Reused};
use super::layout::STAGING;
use super::manifest::{FileChunk, FileEntry, Manifest};
use super::parts::Part;
use super::recipient::{Committed, Recipient, Written};
use crate::base::scratch;
use crate::image::trust::{PrivateKey, SIGNATURES};
use crate::store::disk::{Disk, RealDisk};
use crate::store::index::WriterId;
use crate::store::{
    ChunkId, ChunkSink, ChunkWriter, Compared, Compression, Place, SharedStore, StoredChunks,
    io_error, shared,
};

/// An image that is being written.
///
/// It lives in a hidden directory beside its final place, `.NAME.partial-PID-WRITER`, which only
/// its owner may enter. [`commit`](Self::commit) makes it durable and renames it into place.
/// Dropped without that, the directory is removed; after a crash of the whole process it stays,
/// and [`remove_unfinished`] removes it. Chunks go to the same directory, or to a shared store,
/// which is locked until this is dropped.
///
/// An image that is [for somebody else](Self::begin_away) has that directory in memory, and its chunks go to its
/// [`Recipient`].
pub struct ImageWriter {
    target: PathBuf,
    partial: PathBuf,
    chunks: Option<Chunks>,
    committed: bool,
    /// The directory cannot be removed without harm.
    keep_partial: bool,
    disk: Arc<dyn Disk>,
    base: Option<Base>,
    /// What others have signed it with, and who signs it now.
    signatures: String,
    signer: Option<Arc<PrivateKey>>,
    /// Let go of last.
    _store: Option<SharedStore>,
    /// Has the directory, where that is in memory.
    _memory: Option<OwnedFd>,
}

/// Where chunks go.
enum Chunks {
    Packs(Box<ChunkWriter>),
    Away(Arc<dyn Recipient>),
}

impl ImageWriter {
    /// Begins a self-contained image that will be at `path`: a name that does not exist in an
    /// existing directory, or an empty directory. Nothing is changed at `path` before the commit.
    ///
    /// # Errors
    /// The errors of [`begin`](Self::begin).
    pub fn create(path: &Path, compression: Compression) -> Result<Self, ImageError> {
        Self::begin(&Destination::Alone(path.to_owned()), compression)
    }

    /// Begins an image. Nothing is changed in its place before the commit. A parent is read and
    /// checked here, and a store is locked.
    ///
    /// # Errors
    /// [`ImageError::Output`] if no image can be there; or the directory or the store cannot be made or locked, or the
    /// parent cannot be read. Nothing of an image is left then.
    pub fn begin(to: &Destination, compression: Compression) -> Result<Self, ImageError> {
        Self::begin_unless(to, compression, &|| false)
    }

    /// Begins an image; `stop` is asked now and then whether to give up waiting for a store of which a gc
    /// has to free something first.
    pub(crate) fn begin_unless(
        to: &Destination,
        compression: Compression,
        stop: &dyn Fn() -> bool,
    ) -> Result<Self, ImageError> {
        Self::begin_on(Arc::new(RealDisk), to, compression, stop)
    }

    pub(crate) fn begin_on(
        disk: Arc<dyn Disk>,
        to: &Destination,
        compression: Compression,
        stop: &dyn Fn() -> bool,
    ) -> Result<Self, ImageError> {
        let path = &to.path();
        let output = |reason| ImageError::Output { path: path.clone(), reason };
        let store = match to {
            Destination::Stored { store, name } => {
                check_name(name).map_err(output)?;
                Some(SharedStore::open_or_create(store, disk.as_ref(), stop)?)
            }
            _ => None,
        };
        // Absolute, so that the caller may change its directory; symbolic links are left alone.
        let target = std::path::absolute(path).map_err(|e| io_failure("find", path, e))?;
        let (Some(name), Some(parent)) = (target.file_name(), target.parent()) else {
            return Err(output("the path has no last part to name it by"));
        };
        check_free(&target, path)?;
        let (name, parent) = (name.to_owned(), parent.to_owned());
        if !std::fs::metadata(&parent).map_err(|e| io_failure("open", &parent, e))?.is_dir() {
            return Err(output("its parent is not a directory"));
        }
        if is_mount_point(&target, &parent) {
            return Err(output("it is a mount point: give a new name inside it"));
        }
        if store.is_none() && shared::store_around(&target).is_some() {
            return Err(output("it is among the images of a store: use --store for these"));
        }
        let (base, known) = match to {
            Destination::Alone(_) => (None, StoredChunks::default()),
            Destination::Stored { .. } => (Some(Base::Store), StoredChunks::default()),
            Destination::Incremental { parent: on, .. } => {
                let (base, known) = build_on(on, &parent.join(&name))?;
                (Some(base), known)
            }
        };
        let writer = WriterId::random();
        let mut partial = partial_prefix(&name, std::process::id());
        partial.push(writer.to_string());
        let partial = parent.join(partial);
        disk.make_dir(&partial).map_err(|e| io_failure("create", &partial, e))?;
        // From here on the drop of `image` removes the directory.
        let mut image = Self {
            target,
            partial,
            chunks: None,
            committed: false,
            keep_partial: false,
            disk,
            base,
            signatures: String::new(),
            signer: None,
            _store: store,
            _memory: None,
        };
        let staging = image.staging_dir();
        image.disk.make_dir(&staging).map_err(|e| io_failure("create", &staging, e))?;
        let disk = image.disk.clone();
        let place = match &image._store {
            Some(store) => store.place(disk, writer)?,
            None => Place::in_image(disk, &image.partial, writer, known)?,
        };
        image.chunks = Some(Chunks::Packs(Box::new(ChunkWriter::start(place, compression))));
        Ok(image)
    }

    /// Begins an image that `recipient` takes, and of which nothing comes to be on a disk of this host.
    ///
    /// # Errors
    /// The kernel makes no file system in memory.
    pub(crate) fn begin_away(recipient: Arc<dyn Recipient>) -> Result<Self, ImageError> {
        let memory = scratch::file_system().map_err(|error| {
            io_failure("make", Path::new("a file system in memory"), error.source)
        })?;
        // A file system that is mounted nowhere has paths by its descriptor alone.
        let partial = PathBuf::from(format!("/proc/self/fd/{}/image", memory.as_raw_fd()));
        let disk: Arc<dyn Disk> = Arc::new(RealDisk);
        for dir in [partial.clone(), partial.join(STAGING)] {
            disk.make_dir(&dir).map_err(|e| io_failure("create", &dir, e))?;
        }
        Ok(Self {
            target: partial.clone(),
            partial,
            chunks: Some(Chunks::Away(recipient)),
            committed: false,
            keep_partial: false,
            disk,
            base: None,
            signatures: String::new(),
            signer: None,
            _store: None,
            _memory: Some(memory),
        })
    }

    /// Has the image signed with `key` when it is committed.
    pub fn sign_with(&mut self, key: Arc<PrivateKey>) {
        self.signer = Some(key);
    }

    /// Gives the image signatures that were made for it elsewhere.
    pub(crate) fn set_signatures(&mut self, signatures: String) {
        self.signatures = signatures;
    }

    /// The directory in which the image is being written.
    pub fn partial_path(&self) -> &Path {
        &self.partial
    }

    /// A directory for files that are to become part of the image, on the same file system. It
    /// is gone after the commit.
    pub fn staging_dir(&self) -> PathBuf {
        self.partial.join(STAGING)
    }

    /// Removes what was put into [`staging_dir`](Self::staging_dir).
    ///
    /// # Errors
    /// A file cannot be removed, or the directory not made again; some files are gone then.
    pub fn clear_staging(&self) -> Result<(), ImageError> {
        let staging = self.staging_dir();
        self.disk.remove_tree(&staging).map_err(|e| io_failure("remove", &staging, e))?;
        self.disk.make_dir(&staging).map_err(|e| io_failure("create", &staging, e))
    }

    /// Where device memory goes.
    pub fn chunks(&self) -> &dyn ChunkSink {
        // `chunks` is None only inside `create` and after `commit` has taken `self`.
        match self.chunks.as_ref().expect("an image that is being written has a store") {
            Chunks::Packs(writer) => writer.as_ref(),
            Chunks::Away(recipient) => recipient.sink(),
        }
    }

    /// Syncs the chunks that were written so far, so that the [commit](Self::commit) has less to wait for. Those of an
    /// image that goes elsewhere are not its concern.
    ///
    /// # Errors
    /// They could not be synced. The image cannot be completed then.
    pub(crate) fn sync_written(&self) -> Result<(), ImageError> {
        match &self.chunks {
            Some(Chunks::Packs(writer)) => Ok(writer.sync_written()?),
            _ => Ok(()),
        }
    }

    /// Stores a copy of the regular file at `path` as `name` (no directory), in parallel.
    ///
    /// # Errors
    /// The file cannot be read, is no regular one or has a bad name, or a chunk cannot be written. The image can be
    /// completed without the file.
    pub fn add_file(&self, path: &Path, name: &str) -> Result<FileEntry, ImageError> {
        files::store_file(self.chunks(), path, name, &[])
    }

    /// Stores `bytes` as a file `name` (no directory) with these permission bits.
    ///
    /// # Errors
    /// The name is bad, or a chunk cannot be written. The image can be completed without the file.
    pub fn add_bytes(&self, name: &str, mode: u32, bytes: &[u8]) -> Result<FileEntry, ImageError> {
        let chunks = files::store_pieces(self.chunks(), bytes)?;
        let entry = FileEntry { name: name.to_owned(), size: bytes.len() as u64, mode, chunks };
        entry.check_name().map_err(|reason| ImageError::BadFile { name: name.into(), reason })?;
        Ok(entry)
    }

    /// Stores every file in [`staging_dir`](Self::staging_dir) whose name `keep` admits, in
    /// order of their names. Fails on anything there that is not a regular file. Of each file `reused` gives the chunks
    /// that need not be read.
    ///
    /// # Errors
    /// The directory or a file cannot be read, is no regular one or has a bad name, or a chunk cannot be written.
    pub fn add_staged<'a>(
        &self,
        keep: impl Fn(&str) -> bool,
        reused: impl Fn(&str) -> &'a Reused,
    ) -> Result<Vec<FileEntry>, ImageError> {
        let staging = self.staging_dir();
        let mut names = Vec::new();
        for entry in std::fs::read_dir(&staging).map_err(|e| io_failure("read", &staging, e))? {
            let name = entry.map_err(|e| io_failure("read", &staging, e))?.file_name();
            let name = name.into_string().map_err(|name| ImageError::BadFile {
                name: name.to_string_lossy().into_owned(),
                reason: "its name is not UTF-8",
            })?;
            if keep(&name) {
                names.push(name);
            }
        }
        names.sort_unstable();
        let add = |name: &String| {
            files::store_file(self.chunks(), &staging.join(name), name, reused(name))
        };
        names.iter().map(add).collect()
    }

    /// Stores a file that is read from where its bytes are, in parallel. What is `reused` is not read: the caller says
    /// that the file has these chunks there, and has stored them in this image.
    ///
    /// # Errors
    /// The bytes cannot be read, the name is bad, or a chunk cannot be written. The image can be completed without the
    /// file.
    pub fn add_contents(
        &self,
        contents: &dyn Contents,
        reused: &Reused,
    ) -> Result<FileEntry, ImageError> {
        files::store_contents(self.chunks(), contents, reused)
    }

    /// Stores stretches of a file that is read from where its bytes are, in parallel. Gives the chunks of each stretch,
    /// of which nothing in the image speaks yet, and where each begins in the file. Of a file that changes meanwhile,
    /// chunks may overlap, and parts be left out.
    ///
    /// # Errors
    /// The bytes cannot be read, or a chunk cannot be written. The image can be completed without them.
    pub fn add_stretches(
        &self,
        contents: &dyn Contents,
        stretches: &[std::ops::Range<u64>],
    ) -> Result<Vec<Vec<(u64, FileChunk)>>, ImageError> {
        files::store_stretches_of(self.chunks(), contents, stretches)
    }

    /// Writes a file that is read from where its bytes are into [`staging_dir`](Self::staging_dir), in parallel, in the
    /// place of what has its name there. What is `reused` is not read, and zeros are in its place.
    ///
    /// # Errors
    /// The bytes cannot be read, or the file cannot be written. What had its name is still there then.
    pub fn stage_contents(
        &self,
        contents: &dyn Contents,
        reused: &Reused,
    ) -> Result<(), ImageError> {
        files::write_contents(contents, &self.staging_dir(), reused)
    }

    /// Completes the image: checks that every chunk of the manifest is there, syncs packs and
    /// index, writes and syncs base, manifest and signatures, syncs the directories, renames, syncs the parent.
    ///
    /// After success the image is durable. After a failure there is no image and nothing else is
    /// left, as long as removing files works; only what was already made known to others in a
    /// store stays, for its next gc.
    ///
    /// # Errors
    /// [`ImageError::MissingChunk`] if the manifest names a chunk that was not written; [`ImageError::Output`] if
    /// something has come to be in the place of the image; or a file cannot be written, synced or renamed.
    pub fn commit(mut self, manifest: &Manifest) -> Result<Committed, ImageError> {
        // A program that is ended by its dump stands still meanwhile, and there can be millions of chunks: all cores
        // are used for what is done for each.
        let needed = manifest.chunk_ids();
        let missing = |id: ChunkId| {
            let of = |part: &Part<'_>| part.pieces().any(|piece| piece.id == id);
            let owner = manifest.parts().find(of).expect("it is of one of them").to_string();
            Err(ImageError::MissingChunk { id, owner })
        };
        let chunks = match self.chunks.take() {
            Some(Chunks::Packs(chunks)) => chunks,
            Some(Chunks::Away(recipient)) => {
                let sink = recipient.sink();
                if let Some(id) = needed.par_iter().find_first(|id| !sink.contains(id)) {
                    return missing(*id);
                }
                return self.hand_over(manifest, recipient.as_ref());
            }
            None => unreachable!("nothing else takes them"),
        };
        let compared = chunks.compare(&needed);
        if let Some(id) = compared.missing {
            return missing(id);
        }
        let Compared { shared_bytes, unneeded_bytes, .. } = compared;
        let disk = self.disk.clone();
        let (partial, staging, base) = (&self.partial, self.staging_dir(), &self.base);
        // Beside the index: nobody sees either of them before the rename.
        let describe = || {
            disk.remove_tree(&staging).map_err(|e| io_failure("remove", &staging, e))?;
            let manifest = manifest.encode(partial)?;
            let base_len = match base {
                Some(base) => base.write(disk.as_ref(), partial)?,
                None => 0,
            };
            Ok::<_, ImageError>((base_len, manifest.write(disk.as_ref())?))
        };
        let (stats, described) = rayon::join(|| chunks.finish(), describe);
        let (stats, (base_len, (id, manifest_len))) = (stats?, described?);
        let signatures_len = self.write_signatures(&id)?;
        disk.sync_dir(&self.partial).map_err(|e| io_failure("sync", &self.partial, e))?;

        disk.rename(&self.partial, &self.target).map_err(|e| match e.kind() {
            io::ErrorKind::DirectoryNotEmpty | io::ErrorKind::NotADirectory => ImageError::Output {
                path: self.target.clone(),
                reason: "something was put there during the dump",
            },
            _ => io_failure("rename to", &self.target, e),
        })?;
        if let Some(parent) = self.target.parent()
            && let Err(error) = disk.sync_dir(parent)
        {
            // An image that may vanish with the next power cut must not pass for complete: take
            // the name back, and let the drop remove what it named. But not before the name is
            // durably gone, or a power cut could bring it back without its contents.
            let gone = disk.rename(&self.target, &self.partial).is_ok();
            self.keep_partial = !gone || disk.sync_dir(parent).is_err();
            return Err(io_error("sync", parent, error).into());
        }
        self.committed = true;
        let new_bytes = stats.stored_bytes + base_len + manifest_len + signatures_len;
        let stored_bytes = new_bytes + shared_bytes;
        Ok(Committed { id, stored_bytes, new_bytes, unneeded_bytes, stats })
    }

    /// Gives the image up. What it has taken stays in its store, where others can use it until the next gc; of an image
    /// that is in no store nothing is left.
    ///
    /// # Errors
    /// A file could not be written, synced or renamed. Nothing is left then but what the next gc removes.
    pub(crate) fn leave_chunks(mut self) -> Result<(), ImageError> {
        match self.chunks.take() {
            Some(Chunks::Packs(chunks)) if self._store.is_some() => {
                chunks.finish()?;
                Ok(())
            }
            _ => Ok(()),
        }
    }

    /// Gives the image to its recipient, who has all of its chunks.
    fn hand_over(
        self,
        manifest: &Manifest,
        recipient: &dyn Recipient,
    ) -> Result<Committed, ImageError> {
        let (id, version, body) = manifest.to_be_sent(&self.partial)?;
        let own = self.signer.as_ref().map(|key| key.sign(&id)).unwrap_or_default();
        let signatures = [self.signatures.as_str(), &own].concat();
        recipient.commit(Written { id, version, body, signatures })
    }

    /// Writes and syncs the signatures, if there are any. Returns their length in bytes.
    fn write_signatures(&self, id: &[u8; 32]) -> Result<u64, ImageError> {
        let own = self.signer.as_ref().map(|key| key.sign(id)).unwrap_or_default();
        let text = [self.signatures.as_str(), &own].concat();
        if text.is_empty() {
            return Ok(0);
        }
        let path = self.partial.join(SIGNATURES);
        let file = self.disk.create(&path).map_err(|e| io_failure("create", &path, e))?;
        file.write_all_at(text.as_bytes(), 0).map_err(|e| io_failure("write", &path, e))?;
        file.sync().map_err(|e| io_failure("sync", &path, e))?;
        Ok(text.len() as u64)
    }
}

impl Drop for ImageWriter {
    fn drop(&mut self) {
        if self.committed {
            return;
        }
        // Open packs are closed first, so that their space is free when this returns.
        self.chunks = None;
        if self.keep_partial {
            return;
        }
        if let Err(error) = self.disk.remove_tree(&self.partial)
            && error.kind() != io::ErrorKind::NotFound
        {
            tracing::warn!(path = %self.partial.display(), %error, "cannot remove partial image");
        }
    }
}

/// How the names of the hidden directories of one process begin.
fn partial_prefix(name: &OsStr, pid: u32) -> OsString {
    let mut prefix = OsString::from(".");
    prefix.push(name);
    prefix.push(format!(".partial-{pid}-"));
    prefix
}

/// Removes what process `pid`, which has died, had written of an image that would have been at
/// `target`, alone or in a store. What cannot be removed stays.
pub fn remove_unfinished(target: &Path, pid: u32) {
    let (Some(name), Some(parent)) = (target.file_name(), target.parent()) else { return };
    let prefix = partial_prefix(name, pid);
    for entry in std::fs::read_dir(parent).into_iter().flatten().flatten() {
        let name = entry.file_name();
        let Some(rest) = name.as_encoded_bytes().strip_prefix(prefix.as_encoded_bytes()) else {
            continue;
        };
        let writer = std::str::from_utf8(rest).ok().and_then(WriterId::parse);
        if let (Some(writer), Some(store)) = (writer, shared::store_around(&entry.path())) {
            shared::forget(&store, writer);
        }
        let _ = std::fs::remove_dir_all(entry.path());
    }
}
