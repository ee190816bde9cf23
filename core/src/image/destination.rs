//! Where an image is to be, and whether it can be there.

use std::io;
use std::path::{Path, PathBuf};

use super::base::{self, Base};
use super::error::{ImageError, io_failure};
use super::layout::MAX_CHAIN;
use super::manifest::Manifest;
use crate::store::{StoredChunks, shared};

/// Where an image is to be, and what it may share.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Destination {
    /// A directory that holds everything: a name that does not exist in an existing directory, or
    /// an empty directory.
    Alone(PathBuf),
    /// Such a directory, which holds only what the image `parent` and its ancestors lack.
    Incremental {
        /// The new image.
        path: PathBuf,
        /// The image that it builds on. Without it the new one cannot be read.
        parent: PathBuf,
    },
    /// The image `name` of the store in the directory `store`, which is made if it does not exist.
    Stored {
        /// The store.
        store: PathBuf,
        /// A name that no image of the store has.
        name: String,
    },
}

impl Destination {
    /// The directory of the image.
    pub fn path(&self) -> PathBuf {
        match self {
            Self::Alone(path) | Self::Incremental { path, .. } => path.clone(),
            Self::Stored { store, name } => store.join(shared::IMAGES).join(name),
        }
    }
}

impl Destination {
    /// Looks whether an image could be made there now.
    ///
    /// # Errors
    /// Something is there, the directory that it is to be in is not, the name cannot be one, or the parent cannot be read.
    pub fn check(&self) -> Result<(), ImageError> {
        let path = self.path();
        match self {
            Self::Stored { store, name } => {
                let reason = check_name(name);
                reason.map_err(|reason| ImageError::Output { path: path.clone(), reason })?;
                shared::check_place(store)?;
                return check_free(&path, &path);
            }
            Self::Incremental { parent, .. } => drop(Manifest::read_with_id(parent)?),
            Self::Alone(_) => {}
        }
        check_free(&path, &path)?;
        let absolute = std::path::absolute(&path).map_err(|e| io_failure("find", &path, e))?;
        let dir = absolute.parent().unwrap_or(&absolute);
        std::fs::read_dir(dir).map(drop).map_err(|e| io_failure("open", dir, e))
    }
}

/// Why no image can be made where something is already.
pub const NOT_EMPTY: &str = "the directory is not empty";

/// Nothing, or an empty directory, is at `target`.
pub(super) fn check_free(target: &Path, shown: &Path) -> Result<(), ImageError> {
    let output = |reason| Err(ImageError::Output { path: shown.to_owned(), reason });
    match std::fs::symlink_metadata(target) {
        Err(e) if e.kind() == io::ErrorKind::NotFound => Ok(()),
        Err(e) => Err(io_failure("open", shown, e)),
        Ok(meta) if !meta.is_dir() => output("something that is not a directory is there"),
        Ok(_) => {
            let mut entries = target.read_dir().map_err(|e| io_failure("read", shown, e))?;
            if entries.next().is_some() { output(NOT_EMPTY) } else { Ok(()) }
        }
    }
}

/// What an image at `target` has to say about its parent at `path`, and what it need not store.
pub(super) fn build_on(path: &Path, target: &Path) -> Result<(Base, StoredChunks), ImageError> {
    let parent = path.canonicalize().map_err(|e| io_failure("open", path, e))?;
    // Decoded too: nobody builds on what cannot be restored.
    let (_, identity) = Manifest::read_with_id(&parent)?;
    let foundation = base::resolve(&parent)?;
    if foundation.store.is_some() {
        return Err(ImageError::ParentInStore { path: path.to_owned() });
    }
    if foundation.ancestors.len() + 2 > MAX_CHAIN {
        return Err(ImageError::ChainTooLong { path: path.to_owned() });
    }
    let mut known = StoredChunks::default();
    for source in &foundation.sources {
        known.add(&source.index, &source.packs)?;
    }
    known.sort();
    // Below the real directory, whatever symbolic links the caller came by.
    let (dir, name) = (target.parent(), target.file_name());
    let dir = dir.unwrap_or(target).canonicalize().map_err(|e| io_failure("find", target, e))?;
    let relative = base::relative(&dir.join(name.unwrap_or_default()), &parent);
    Ok((Base::Parent { identity, relative, absolute: parent }, known))
}

/// Refuses names of images in a store that are hidden or lead elsewhere.
///
/// # Errors
/// What is wrong with it.
pub fn check_name(name: &str) -> Result<(), &'static str> {
    if name.is_empty() || name.len() > 200 {
        return Err("a name has 1 to 200 bytes");
    }
    if name.starts_with('.') || name.contains(['/', '\0']) {
        return Err("a name does not begin with a dot and has no `/`");
    }
    Ok(())
}

/// Whether the empty directory `target` is on another file system than its parent, so that the
/// rename of the commit would fail.
pub(super) fn is_mount_point(target: &Path, parent: &Path) -> bool {
    use std::os::unix::fs::MetadataExt;
    match (std::fs::metadata(target), std::fs::metadata(parent)) {
        (Ok(target), Ok(parent)) => target.dev() != parent.dev(),
        _ => false,
    }
}
