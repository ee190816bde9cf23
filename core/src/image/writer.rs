//! Making an image.

use std::ffi::{OsStr, OsString};
use std::fs::DirBuilder;
use std::hash::{BuildHasher, RandomState};
use std::io;
use std::os::unix::fs::DirBuilderExt;
use std::path::{Path, PathBuf};

use super::{FileEntry, ImageError, Manifest, STAGING, files, io_failure};
use crate::store::{ChunkWriter, Compression, Stats, sync_dir};

/// An image that is being written.
///
/// It lives in a hidden directory beside its final place, `.NAME.partial-PID-RANDOM`, which only
/// its owner may enter. [`commit`](Self::commit) makes it durable and renames it into place.
/// Dropped without that, the directory is removed; after a crash of the whole process it stays,
/// and [`remove_unfinished`] removes it.
pub struct ImageWriter {
    target: PathBuf,
    partial: PathBuf,
    chunks: Option<ChunkWriter>,
    committed: bool,
}

/// An image that is complete and durable.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Committed {
    /// Its identity: the BLAKE3 of its manifest file.
    pub id: [u8; 32],
    /// Bytes of all its files.
    pub stored_bytes: u64,
    /// What its chunks came to.
    pub stats: Stats,
}

impl ImageWriter {
    /// Begins an image that will be at `path`: a name that does not exist in an existing
    /// directory, or an empty directory. Nothing is changed at `path` before the commit.
    pub fn create(path: &Path, compression: Compression) -> Result<Self, ImageError> {
        // Absolute, so that the caller may change its directory; symbolic links are left alone.
        let target = std::path::absolute(path).map_err(|e| io_failure("find", path, e))?;
        let output = |reason| ImageError::Output { path: path.to_owned(), reason };
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
        let partial = make_partial(&parent, &name)?;
        // From here on the drop of `writer` removes the directory.
        let mut writer = Self { target, partial, chunks: None, committed: false };
        private_dir(&writer.staging_dir())?;
        writer.chunks = Some(ChunkWriter::create(&writer.partial, compression)?);
        Ok(writer)
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

    /// Where device memory goes.
    pub fn chunks(&self) -> &ChunkWriter {
        // `chunks` is None only inside `create` and after `commit` has taken `self`.
        self.chunks.as_ref().expect("an image that is being written has a store")
    }

    /// Stores a copy of the regular file at `path` as `name` (no directory), in parallel.
    pub fn add_file(&self, path: &Path, name: &str) -> Result<FileEntry, ImageError> {
        files::store_file(self.chunks(), path, name)
    }

    /// Stores `bytes` as a file `name` (no directory) with these permission bits.
    pub fn add_bytes(&self, name: &str, mode: u32, bytes: &[u8]) -> Result<FileEntry, ImageError> {
        let chunks = files::store_pieces(self.chunks(), bytes)?;
        let entry = FileEntry { name: name.to_owned(), size: bytes.len() as u64, mode, chunks };
        entry.check_name().map_err(|reason| ImageError::BadFile { name: name.into(), reason })?;
        Ok(entry)
    }

    /// Stores every file in [`staging_dir`](Self::staging_dir) whose name `keep` admits, in
    /// order of their names. Fails on anything there that is not a regular file.
    pub fn add_staged(&self, keep: impl Fn(&str) -> bool) -> Result<Vec<FileEntry>, ImageError> {
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
        names.iter().map(|name| self.add_file(&staging.join(name), name)).collect()
    }

    /// Completes the image: checks that every chunk of the manifest is there, syncs packs and
    /// index, writes and syncs the manifest, syncs the directories, renames, syncs the parent.
    ///
    /// After success the image is durable. After a failure there is no image and nothing else is
    /// left, as long as removing files works.
    pub fn commit(mut self, manifest: &Manifest) -> Result<Committed, ImageError> {
        for owner in manifest.owners() {
            if let Some(piece) = owner.pieces().find(|piece| !self.chunks().contains(&piece.id)) {
                let owner = owner.to_string();
                return Err(ImageError::MissingChunk { id: piece.id, owner });
            }
        }
        let stats = match self.chunks.take() {
            Some(chunks) => chunks.finish()?,
            None => Stats::default(),
        };
        let staging = self.staging_dir();
        std::fs::remove_dir_all(&staging).map_err(|e| io_failure("remove", &staging, e))?;
        let (id, manifest_len) = manifest.write(&self.partial)?;
        sync_dir(&self.partial)?;

        std::fs::rename(&self.partial, &self.target).map_err(|e| match e.kind() {
            io::ErrorKind::DirectoryNotEmpty | io::ErrorKind::NotADirectory => ImageError::Output {
                path: self.target.clone(),
                reason: "something was put there during the dump",
            },
            _ => io_failure("rename to", &self.target, e),
        })?;
        if let Some(parent) = self.target.parent()
            && let Err(error) = sync_dir(parent)
        {
            // An image that may vanish with the next power cut must not pass for complete: take
            // the name back, and let the drop remove what it named.
            let _ = std::fs::rename(&self.target, &self.partial);
            return Err(error.into());
        }
        self.committed = true;
        Ok(Committed { id, stored_bytes: stats.stored_bytes + manifest_len, stats })
    }
}

impl Drop for ImageWriter {
    fn drop(&mut self) {
        if self.committed {
            return;
        }
        // Open packs are closed first, so that their space is free when this returns.
        self.chunks = None;
        if let Err(error) = std::fs::remove_dir_all(&self.partial)
            && error.kind() != io::ErrorKind::NotFound
        {
            tracing::warn!(path = %self.partial.display(), %error, "cannot remove partial image");
        }
    }
}

/// Nothing, or an empty directory, is at `target`.
fn check_free(target: &Path, shown: &Path) -> Result<(), ImageError> {
    let output = |reason| Err(ImageError::Output { path: shown.to_owned(), reason });
    match std::fs::symlink_metadata(target) {
        Err(e) if e.kind() == io::ErrorKind::NotFound => Ok(()),
        Err(e) => Err(io_failure("open", shown, e)),
        Ok(meta) if !meta.is_dir() => output("something that is not a directory is there"),
        Ok(_) => {
            let mut entries = target.read_dir().map_err(|e| io_failure("read", shown, e))?;
            if entries.next().is_some() { output("the directory is not empty") } else { Ok(()) }
        }
    }
}

fn make_partial(parent: &Path, name: &OsString) -> Result<PathBuf, ImageError> {
    loop {
        let random = RandomState::new().hash_one(std::process::id());
        let mut hidden = partial_prefix(name, std::process::id());
        hidden.push(format!("{random:016x}"));
        let partial = parent.join(hidden);
        match DirBuilder::new().mode(0o700).create(&partial) {
            Ok(()) => return Ok(partial),
            Err(e) if e.kind() == io::ErrorKind::AlreadyExists => continue,
            Err(e) => return Err(io_failure("create", &partial, e)),
        }
    }
}

/// Whether the empty directory `target` is on another file system than its parent, so that the
/// rename of the commit would fail.
fn is_mount_point(target: &Path, parent: &Path) -> bool {
    use std::os::unix::fs::MetadataExt;
    match (std::fs::metadata(target), std::fs::metadata(parent)) {
        (Ok(target), Ok(parent)) => target.dev() != parent.dev(),
        _ => false,
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
/// `target`. What cannot be removed stays.
pub fn remove_unfinished(target: &Path, pid: u32) {
    let (Some(name), Some(parent)) = (target.file_name(), target.parent()) else { return };
    let prefix = partial_prefix(name, pid);
    for entry in std::fs::read_dir(parent).into_iter().flatten().flatten() {
        if entry.file_name().as_encoded_bytes().starts_with(prefix.as_encoded_bytes()) {
            let _ = std::fs::remove_dir_all(entry.path());
        }
    }
}

fn private_dir(path: &Path) -> Result<(), ImageError> {
    DirBuilder::new().mode(0o700).create(path).map_err(|e| io_failure("create", path, e))
}
