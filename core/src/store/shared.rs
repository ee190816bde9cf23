//! A shared store: one directory in which many images keep their chunks, each chunk once.
//!
//! `docs/image-format.md` says what is in it, in which order it is written, and why a crash harms
//! no image. A process that has a [`SharedStore`] open keeps a gc from removing anything.

use std::ffi::OsStr;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, Instant};

use super::disk::Disk;
use super::index::{PackId, WriterId};
use super::lock::{COURTESY, LockFile, QUEUE_PATIENCE, SWEEP_PATIENCE};
use super::reader::{Source, Trust};
use super::stored_chunks::StoredChunks;
use super::writer::{PACK_LIMIT, Place, hidden_index};
use super::{PACKS, StoreError, io_error};

const LOCK: &str = "lock";
pub(super) const GC_LOCK: &str = "gc.lock";
const QUEUE: &str = "queue.lock";
/// The lock files of a store.
const LOCKS: [&str; 3] = [LOCK, GC_LOCK, QUEUE];
pub(crate) const IMAGES: &str = "images";
const SEGMENTS: &str = "index";

/// A shared store, with its lock held. While it lives, nothing that a reader or writer relies on
/// is removed.
#[derive(Debug)]
pub struct SharedStore {
    dir: PathBuf,
    pub(super) lock: LockFile,
}

impl SharedStore {
    /// Opens the store in `dir`; nothing is written, so `dir` may be on a read-only mount.
    ///
    /// # Errors
    ///
    /// [`StoreError::NotAStoreDir`] if `dir` is not a store, [`StoreError::Busy`] if a gc sweeps for
    /// longer than a minute.
    pub fn open(dir: &Path) -> Result<Self, StoreError> {
        // The gc may wait for this very reader: one who reads two images at a time.
        Self::open_behind(dir, |queue| queue_up(queue, COURTESY, &|| false))
    }

    /// Opens the store without waiting for a gc in the queue.
    pub(super) fn open_at_once(dir: &Path) -> Result<Self, StoreError> {
        Self::open_behind(dir, |_| Ok(()))
    }

    /// Opens the store; `queue_up` waits as long as is right for a gc that waits for the store.
    fn open_behind(
        dir: &Path,
        queue_up: impl FnOnce(&LockFile) -> Result<(), StoreError>,
    ) -> Result<Self, StoreError> {
        let not = |reason| StoreError::NotAStoreDir { path: dir.to_owned(), reason };
        let meta = std::fs::metadata(dir).map_err(|e| io_error("open", dir, e))?;
        if !meta.is_dir() {
            return Err(not("it is not a directory"));
        }
        if !is_store(dir) {
            return Err(not("it has no locks, images, index and packs"));
        }
        let queue = LockFile::open(&dir.join(QUEUE))?;
        queue_up(&queue)?;
        let lock = LockFile::open(&dir.join(LOCK))?;
        lock.share(SWEEP_PATIENCE, &|| false)?;
        Ok(Self { dir: dir.to_owned(), lock })
    }

    /// Waits until no other process uses the store, for a gc; new dumps queue behind it. What is returned
    /// keeps them there.
    pub(super) fn have_alone(
        &self,
        patience: Duration,
        stop: &dyn Fn() -> bool,
    ) -> Result<LockFile, StoreError> {
        let since = Instant::now();
        let queue = LockFile::open(&self.dir.join(QUEUE))?;
        // Others have it for a moment only.
        queue.exclude(patience, stop)?;
        self.lock.exclude(patience.saturating_sub(since.elapsed()), stop)?;
        Ok(queue)
    }

    /// Opens the store in `dir` to write to it. What it lacks is made: `dir` may be missing or
    /// empty. All of it is durable on return.
    ///
    /// # Errors
    ///
    /// The errors of [`open`](Self::open); `dir` has something in it and is not a store;
    /// [`StoreError::Interrupted`] if `stop` says to give up waiting for a gc. What was made before a
    /// failure stays, and is taken for the beginning of a store the next time.
    pub(crate) fn open_or_create(
        dir: &Path,
        disk: &dyn Disk,
        stop: &dyn Fn() -> bool,
    ) -> Result<Self, StoreError> {
        let make = |path: &Path| match disk.make_dir(path) {
            Err(e) if e.kind() != io::ErrorKind::AlreadyExists => Err(io_error("create", path, e)),
            _ => Ok(()),
        };
        make(dir)?;
        // Absolute, so that the caller may change its directory.
        let dir = &dir.canonicalize().map_err(|e| io_error("find", dir, e))?;
        if !is_store(dir) {
            check_empty(dir)?;
            for name in LOCKS {
                let path = dir.join(name);
                match disk.create(&path) {
                    Err(e) if e.kind() != io::ErrorKind::AlreadyExists => {
                        return Err(io_error("create", &path, e));
                    }
                    _ => {}
                }
            }
            for name in [IMAGES, SEGMENTS, PACKS] {
                make(&dir.join(name))?;
            }
        }
        // Directories that another gpucr has made are synced too: its own syncs may be yet to come.
        for place in [Some(dir.as_path()), dir.parent()].into_iter().flatten() {
            disk.sync_dir(place).map_err(|e| io_error("sync", place, e))?;
        }
        Self::open_behind(dir, |queue| queue_up(queue, QUEUE_PATIENCE, stop))
    }

    /// Where the store is.
    pub fn dir(&self) -> &Path {
        &self.dir
    }

    /// Where its images are.
    pub fn images(&self) -> PathBuf {
        self.dir.join(IMAGES)
    }

    /// The directories of its images, in order of their names.
    ///
    /// # Errors
    /// The directory of the images cannot be read.
    pub fn image_dirs(&self) -> Result<Vec<PathBuf>, StoreError> {
        let dir = self.images();
        Ok(names(&dir)?.into_iter().map(|name| dir.join(name)).collect())
    }

    /// Bytes of all its packs.
    ///
    /// # Errors
    /// The directory of the packs cannot be read. A pack whose length cannot be had counts as empty.
    pub fn pack_bytes(&self) -> Result<u64, StoreError> {
        let dir = self.packs();
        let len = |name: String| std::fs::symlink_metadata(dir.join(name)).map_or(0, |m| m.len());
        Ok(names(&dir)?.into_iter().map(len).sum())
    }

    pub(super) fn packs(&self) -> PathBuf {
        self.dir.join(PACKS)
    }

    pub(super) fn index(&self) -> PathBuf {
        self.dir.join(SEGMENTS)
    }

    /// The segments, in order of their names.
    pub(super) fn segments(&self) -> Result<Vec<PathBuf>, StoreError> {
        let dir = self.index();
        let segment = |name: &String| segment_writer(name).is_some();
        Ok(names(&dir)?.into_iter().filter(segment).map(|name| dir.join(name)).collect())
    }

    /// The segments for a reader.
    pub(crate) fn sources(&self) -> Result<Vec<Source>, StoreError> {
        let source = |index| Source { index, packs: self.packs(), trust: Trust::Spare };
        Ok(self.segments()?.into_iter().map(source).collect())
    }

    /// Where a new writer writes; reads what the store has already (about 40 bytes of memory for
    /// each chunk).
    pub(crate) fn place(&self, disk: Arc<dyn Disk>, writer: WriterId) -> Result<Place, StoreError> {
        let mut known = StoredChunks::default();
        let segments = self.segments()?;
        // Another may have renamed one of these a moment ago, and not have synced it yet.
        let index = self.index();
        disk.sync_dir(&index).map_err(|e| io_error("sync", &index, e))?;
        for segment in segments {
            if let Err(error) = known.add(&segment, &self.packs()) {
                tracing::warn!(%error, "chunks of this segment are written again");
            }
        }
        known.sort();
        Ok(self.place_knowing(disk, writer, known))
    }

    /// Where a writer writes that relies on `known` alone.
    pub(super) fn place_knowing(
        &self,
        disk: Arc<dyn Disk>,
        writer: WriterId,
        known: StoredChunks,
    ) -> Place {
        let index = self.index().join(format!("{writer}.index"));
        let packs = self.packs();
        Place { disk, packs, index, writer, known, shared: true, pack_limit: PACK_LIMIT }
    }
}

/// Lets a gc that waits for the store go first, but not for longer than this.
fn queue_up(
    queue: &LockFile,
    patience: Duration,
    stop: &dyn Fn() -> bool,
) -> Result<(), StoreError> {
    match queue.share(patience, stop) {
        Err(StoreError::Busy { .. }) => Ok(()),
        taken => taken,
    }
}

/// Whether `dir` has what makes a store.
pub(crate) fn is_store(dir: &Path) -> bool {
    LOCKS.iter().all(|name| dir.join(name).is_file())
        && [IMAGES, SEGMENTS, PACKS].iter().all(|name| dir.join(name).is_dir())
}

/// The store that has what is at `image`, which need not exist, among its images.
pub(crate) fn store_around(image: &Path) -> Option<PathBuf> {
    let images = image.parent()?.canonicalize().ok()?;
    let dir = images.parent()?;
    (images.ends_with(IMAGES) && is_store(dir)).then(|| dir.to_owned())
}

/// Removes what a writer that has died had written to the store in `dir`, unless its segment is
/// there: then another may rely on it, and the next gc sees to it. What cannot be removed stays.
pub(crate) fn forget(dir: &Path, writer: WriterId) {
    let segment = dir.join(SEGMENTS).join(format!("{writer}.index"));
    if !is_store(dir) || !matches!(segment.try_exists(), Ok(false)) {
        return;
    }
    let _ = std::fs::remove_file(hidden_index(&segment));
    let packs = dir.join(PACKS);
    for name in names(&packs).unwrap_or_default() {
        if PackId::of_file_name(&name).is_some_and(|id| id.0[..12] == writer.0) {
            let _ = std::fs::remove_file(packs.join(name));
        }
    }
}

/// The writer of the segment with this file name.
pub(super) fn segment_writer(name: &str) -> Option<WriterId> {
    WriterId::parse(name.strip_suffix(".index")?)
}

/// The names in a directory that are not hidden, in order.
fn names(dir: &Path) -> Result<Vec<String>, StoreError> {
    let mut names = all_names(dir)?;
    names.retain(|name| !name.starts_with('.'));
    Ok(names)
}

/// The names in a directory, in order; those that are not UTF-8 are none of gpucr's.
pub(super) fn all_names(dir: &Path) -> Result<Vec<String>, StoreError> {
    let failed = |e| io_error("read", dir, e);
    let mut names = Vec::new();
    for entry in std::fs::read_dir(dir).map_err(failed)? {
        names.extend(entry.map_err(failed)?.file_name().into_string().ok());
    }
    names.sort_unstable();
    Ok(names)
}

/// Looks whether a directory is a store, or could become one now.
///
/// # Errors
/// It has something else in it, or cannot be made.
pub(crate) fn check_place(dir: &Path) -> Result<(), StoreError> {
    match std::fs::metadata(dir) {
        Ok(_) if is_store(dir) => Ok(()),
        Ok(_) => check_empty(dir),
        Err(error) if error.kind() == io::ErrorKind::NotFound => {
            let dir = std::path::absolute(dir).map_err(|e| io_error("find", dir, e))?;
            let parent = dir.parent().unwrap_or(&dir);
            std::fs::read_dir(parent).map(drop).map_err(|e| io_error("open", parent, e))
        }
        Err(error) => Err(io_error("open", dir, error)),
    }
}

/// A directory that is to become a store has nothing but what a store has.
fn check_empty(dir: &Path) -> Result<(), StoreError> {
    let failed = |e| io_error("read", dir, e);
    for entry in std::fs::read_dir(dir).map_err(failed)? {
        let name = entry.map_err(failed)?.file_name();
        let mut ours = LOCKS.iter().chain(&[IMAGES, SEGMENTS, PACKS]);
        if !ours.any(|own| OsStr::new(own) == name) {
            let reason = "it has other files in it, and no store is made among these";
            return Err(StoreError::NotAStoreDir { path: dir.to_owned(), reason });
        }
    }
    Ok(())
}
