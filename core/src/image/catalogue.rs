//! The images of a store: listing them, removing one, freeing what none needs.

use std::collections::HashMap;
use std::hash::{BuildHasher, RandomState};
use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use super::base::Base;
use super::error::{ImageError, io_failure};
use super::layout::MANIFEST;
use super::manifest::Manifest;
use crate::base::progress::Progress;
use crate::store::disk::{Disk, RealDisk};
use crate::store::gc::{GcOptions, collect};
use crate::store::{ChunkId, ChunkReader, GcReport, SharedStore, StoreError, shared};

/// An image of a store.
#[derive(Debug, Clone, serde::Serialize)]
pub struct Listed {
    /// Its name.
    pub name: String,
    /// Its directory, to give to the other commands.
    #[serde(serialize_with = "crate::base::format::lossy")]
    pub path: PathBuf,
    /// Its identity, in hexadecimal digits.
    pub id: String,
    /// When its dump began, seconds since 1970 UTC.
    pub created: u64,
    /// Root of its process tree.
    pub pid: u32,
    /// The root's arguments.
    pub command: Vec<String>,
    /// Words that it was given.
    pub tags: Vec<String>,
    /// Bytes of device memory that gpucr saved.
    pub bulk_bytes: u64,
    /// Bytes of CRIU's files.
    pub host_bytes: u64,
    /// Bytes of its chunks in the store, shared or not.
    pub stored_bytes: u64,
    /// Bytes of those chunks that no other image needs: what removing it and a gc free, about.
    pub own_bytes: u64,
}

/// The images of a store.
#[derive(Debug, serde::Serialize)]
pub struct Listing {
    /// In order of their names.
    pub images: Vec<Listed>,
    /// Names and errors of images that cannot be read.
    pub unreadable: Vec<(String, String)>,
    /// Bytes of all the chunks that the images need.
    pub needed_bytes: u64,
    /// Bytes of all packs.
    pub pack_bytes: u64,
}

/// Lists the images of the store in `dir`. Needs about 100 bytes of memory for each chunk of theirs.
///
/// # Errors
/// There is no store, or its images, segments or packs cannot be read. An image that cannot be read is no error.
pub fn list(dir: &Path) -> Result<Listing, ImageError> {
    let store = SharedStore::open(dir)?;
    let mut read: Vec<(PathBuf, Manifest, [u8; 32], Vec<ChunkId>)> = Vec::new();
    let mut unreadable = Vec::new();
    let mut users: HashMap<ChunkId, u32> = HashMap::new();
    for path in store.image_dirs()? {
        match Manifest::read_with_id(&path) {
            Ok((manifest, id)) => {
                let chunks = manifest.chunk_ids();
                for chunk in &chunks {
                    *users.entry(*chunk).or_default() += 1;
                }
                read.push((path, manifest, id, chunks));
            }
            // Removed since it was listed.
            Err(_) if !path.exists() => {}
            Err(error) => unreadable.push((name_of(&path), error.to_string())),
        }
    }
    let mut needed: Vec<ChunkId> = users.keys().copied().collect();
    needed.sort_unstable();
    let chunks = ChunkReader::open_needed(&store.sources()?, &needed)?;
    let len = |id: &ChunkId| chunks.entry(id).map_or(0, |entry| u64::from(entry.stored_len));
    let images = read.iter().map(|(path, manifest, id, ids)| {
        let root = &manifest.processes[0];
        let own = ids.iter().filter(|id| users[*id] == 1);
        Listed {
            name: name_of(path),
            path: path.clone(),
            id: crate::base::format::hex(id),
            created: manifest.created,
            pid: root.pid,
            command: root.command.clone(),
            tags: manifest.tags(),
            bulk_bytes: manifest.bulk_bytes,
            host_bytes: manifest.criu.files.iter().map(|file| file.size).sum(),
            stored_bytes: ids.iter().map(len).sum(),
            own_bytes: own.map(len).sum(),
        }
    });
    Ok(Listing {
        images: images.collect(),
        unreadable,
        needed_bytes: needed.iter().map(len).sum(),
        pack_bytes: store.pack_bytes()?,
    })
}

fn name_of(path: &Path) -> String {
    path.file_name().unwrap_or_default().to_string_lossy().into_owned()
}

/// What the removal of an image came to.
#[derive(Debug, Clone, serde::Serialize)]
pub struct Removed {
    /// Where it was.
    #[serde(serialize_with = "crate::base::format::lossy")]
    pub path: PathBuf,
    /// Bytes of the files that were removed.
    pub freed_bytes: u64,
    /// The store that it was in, whose next gc frees more.
    pub store: Option<PathBuf>,
}

/// Removes the image at `path`, of whatever kind. Afterwards it is durably gone; the chunks of a
/// stored one are freed by the next [`gc`].
///
/// # Errors
///
/// [`ImageError::HasChildren`] if an image next to it builds on it and `force` is not given; only
/// there is looked. After any error the image is there whole, under its name or (if the disk refuses
/// that too) under the hidden one, or it is gone and parts of it are left under the hidden name.
pub fn remove(path: &Path, force: bool) -> Result<Removed, ImageError> {
    remove_on(&RealDisk, path, force)
}

pub(crate) fn remove_on(disk: &dyn Disk, path: &Path, force: bool) -> Result<Removed, ImageError> {
    // Without following a link: what is removed is what was named.
    let not = |reason| ImageError::NotAnImage { path: path.to_owned(), reason };
    let meta = std::fs::symlink_metadata(path).map_err(|e| io_failure("open", path, e))?;
    if !meta.is_dir() {
        return Err(not("it is not a directory"));
    }
    if !path.join(MANIFEST).exists() {
        return Err(not("it has no manifest"));
    }
    let target = path.canonicalize().map_err(|e| io_failure("find", path, e))?;
    let (Some(name), Some(parent)) = (target.file_name(), target.parent()) else {
        return Err(not("it has no name"));
    };
    // The lock is kept until the end, so that no gc comes between.
    let store = shared::store_around(&target).map(|dir| SharedStore::open(&dir)).transpose()?;
    if store.is_none() && !force {
        let children = children(&target, parent);
        if !children.is_empty() {
            return Err(ImageError::HasChildren { path: path.to_owned(), children });
        }
    }
    let freed_bytes = tree_bytes(&target);
    let mut hidden = std::ffi::OsString::from(".");
    hidden.push(name);
    let random = RandomState::new().hash_one(std::process::id());
    hidden.push(format!(".removed-{}-{random:016x}", std::process::id()));
    let hidden = parent.join(hidden);
    disk.rename(&target, &hidden).map_err(|e| io_failure("rename", &target, e))?;
    if let Err(error) = disk.sync_dir(parent) {
        // The name may come back with a power cut, so nothing of the image may be removed.
        let _ = disk.rename(&hidden, &target);
        return Err(io_failure("sync", parent, error));
    }
    match disk.remove_tree(&hidden) {
        Err(e) if e.kind() != io::ErrorKind::NotFound => {
            return Err(io_failure("remove", &hidden, e));
        }
        _ => {}
    }
    let store = store.map(|store| store.dir().to_owned());
    Ok(Removed { path: path.to_owned(), freed_bytes, store })
}

/// Images in the directory `siblings` whose parent is the image at `target`.
fn children(target: &Path, siblings: &Path) -> Vec<PathBuf> {
    let Ok(own) = Manifest::identity(target) else { return Vec::new() };
    let entries = std::fs::read_dir(siblings).into_iter().flatten().flatten();
    let is_child = |path: &PathBuf| matches!(Base::read(path), Ok(Some(Base::Parent { identity, .. })) if identity == own);
    entries.map(|entry| entry.path()).filter(is_child).collect()
}

/// Bytes of the files in a directory and its folders, as far as they can be read.
fn tree_bytes(dir: &Path) -> u64 {
    let entries = std::fs::read_dir(dir).into_iter().flatten().flatten();
    let bytes = entries.map(|entry| match entry.metadata() {
        Ok(meta) if meta.is_dir() => tree_bytes(&entry.path()),
        Ok(meta) => meta.len(),
        Err(_) => 0,
    });
    bytes.sum()
}

/// Frees what no image of the store in `dir` needs, while dumps and restores run; waits up
/// to `patience` for these to end before it removes anything.
///
/// # Errors
///
/// An image that cannot be read ends the gc, since it might need anything. After any error no image
/// has lost anything.
pub fn gc(
    dir: &Path,
    patience: Duration,
    stop: &AtomicBool,
    progress: &dyn Progress,
) -> Result<GcReport, ImageError> {
    gc_on(&(Arc::new(RealDisk) as Arc<dyn Disk>), dir, patience, stop, progress)
}

pub(crate) fn gc_on(
    disk: &Arc<dyn Disk>,
    dir: &Path,
    patience: Duration,
    stop: &AtomicBool,
    progress: &dyn Progress,
) -> Result<GcReport, ImageError> {
    let marks =
        |dir: &Path| -> Result<Vec<ChunkId>, ImageError> { Ok(Manifest::read(dir)?.chunk_ids()) };
    let stop = || stop.load(Ordering::Relaxed);
    let options = GcOptions { patience, stop: &stop };
    collect(disk, dir, &marks, &options, progress).map_err(|error: ImageError| match error {
        // The words for a dump that found the disk full would not fit here.
        ImageError::NoSpace { path, source } => {
            ImageError::Store(StoreError::NoSpace { path, source })
        }
        error => error,
    })
}
