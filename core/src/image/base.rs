//! Where an image has those of its chunks that it does not hold itself: the file `base`.

use std::ffi::OsStr;
use std::os::unix::ffi::OsStrExt;
use std::path::{Component, Path, PathBuf};

use super::error::ImageError;
use super::layout::MAX_CHAIN;
use super::manifest::Manifest;
use crate::store::disk::Disk;
use crate::store::{SharedStore, Source, StoreError, Trust, index};

const FILE: &str = "base";
const MAGIC: &[u8; 8] = b"gpucrBAS";
const VERSION: u32 = 1;
/// Most bytes of the body.
const LIMIT: u64 = 16 << 10;
/// Most bytes of a path.
const PATH_LIMIT: usize = 4096;

/// What an image builds on.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Base {
    /// The image builds on another one, which has the chunks that this one lacks.
    Parent {
        /// The parent's identity.
        identity: [u8; 32],
        /// Its path, relative to the image's own directory.
        relative: PathBuf,
        /// Its path when the image was made.
        absolute: PathBuf,
    },
    /// The image builds on the store that its directory is in.
    Store,
}

impl Base {
    /// Reads the base of the image at `dir`; none if the image is self-contained.
    ///
    /// # Errors
    /// The file cannot be read, is damaged, or is of a newer version.
    pub fn read(dir: &Path) -> Result<Option<Self>, ImageError> {
        let path = dir.join(FILE);
        match index::read_framed(&path, MAGIC, VERSION, LIMIT) {
            Ok((_, body, _)) => Self::decode(&body)
                .map(Some)
                .map_err(|what| ImageError::Damaged { path, what: what.to_owned() }),
            Err(StoreError::Io { source, .. }) if source.kind() == std::io::ErrorKind::NotFound => {
                Ok(None)
            }
            Err(error) => Err(error.into()),
        }
    }

    /// Writes and syncs the base into `dir`. Returns its length in bytes.
    pub(super) fn write(&self, disk: &dyn Disk, dir: &Path) -> Result<u64, ImageError> {
        let path = dir.join(FILE);
        let body = self.encode();
        // What could not be read back must not be written.
        Self::decode(&body)
            .map_err(|what| ImageError::Damaged { path: path.clone(), what: what.to_owned() })?;
        Ok(index::write_framed(disk, &path, MAGIC, VERSION, &body)?.1)
    }

    /// The body of the file.
    pub(crate) fn encode(&self) -> Vec<u8> {
        let Self::Parent { identity, relative, absolute } = self else { return vec![2] };
        let mut body = vec![1];
        body.extend_from_slice(identity);
        for path in [relative, absolute] {
            let bytes = path.as_os_str().as_bytes();
            body.extend_from_slice(&(bytes.len() as u16).to_le_bytes());
            body.extend_from_slice(bytes);
        }
        body
    }

    /// Decodes the body of the file; any bytes are safe.
    pub(crate) fn decode(body: &[u8]) -> Result<Self, &'static str> {
        let (kind, rest) = body.split_first().ok_or("it is empty")?;
        let (base, rest) = match kind {
            1 => {
                let (identity, rest) = rest.split_first_chunk().ok_or("it has no identity")?;
                let (relative, rest) = decode_path(rest)?;
                let (absolute, rest) = decode_path(rest)?;
                if relative.is_absolute() || !absolute.is_absolute() {
                    return Err("its paths are of the wrong kind");
                }
                (Self::Parent { identity: *identity, relative, absolute }, rest)
            }
            2 => (Self::Store, rest),
            _ => return Err("it is of an unknown kind"),
        };
        if rest.is_empty() { Ok(base) } else { Err("there are bytes after its last field") }
    }
}

fn decode_path(body: &[u8]) -> Result<(PathBuf, &[u8]), &'static str> {
    let (len, rest) = body.split_first_chunk().ok_or("it ends early")?;
    let (path, rest) =
        rest.split_at_checked(u16::from_le_bytes(*len).into()).ok_or("it ends early")?;
    if path.is_empty() || path.len() > PATH_LIMIT || path.contains(&0) {
        return Err("it has an impossible path");
    }
    Ok((PathBuf::from(OsStr::from_bytes(path)), rest))
}

/// Everything that an image builds on, opened.
pub(crate) struct Foundation {
    /// The image's own base.
    pub(super) base: Option<Base>,
    /// Where its chunks are, in the order in which they are looked for.
    pub(crate) sources: Vec<Source>,
    /// Ancestors of an incremental image, the parent first.
    pub(super) ancestors: Vec<PathBuf>,
    /// Keeps a gc from removing anything.
    pub(super) store: Option<SharedStore>,
}

/// Finds as much as there is of what a damaged image builds on: `problem` is told what
/// [`resolve`] would have failed with. Chunks of ancestors that were not found are missing.
pub(crate) fn salvage(
    dir: &Path,
    problem: &mut dyn FnMut(ImageError),
) -> Result<Foundation, ImageError> {
    resolve(dir).or_else(|error| {
        // A busy store is no damage: others are at work on it.
        if matches!(error, ImageError::Store(StoreError::Busy { .. })) {
            return Err(error);
        }
        problem(error);
        let sources = vec![Source::in_image(dir, Trust::Whole)];
        Ok(Foundation { base: None, sources, ancestors: vec![], store: None })
    })
}

/// Finds what the image at `dir` builds on. A parent that is missing or changed is an error.
pub(super) fn resolve(dir: &Path) -> Result<Foundation, ImageError> {
    let base = Base::read(dir)?;
    let mut foundation =
        Foundation { base: base.clone(), sources: vec![], ancestors: vec![], store: None };
    if base == Some(Base::Store) {
        let store = SharedStore::open(&dir.join("../.."))?;
        foundation.sources = store.sources()?;
        foundation.store = Some(store);
        return Ok(foundation);
    }
    foundation.sources.push(Source::in_image(dir, Trust::Whole));
    let (mut at, mut next) = (dir.to_owned(), base);
    while let Some(base) = next {
        let parent = find_parent(&at, &base)?;
        foundation.ancestors.push(parent.clone());
        if foundation.ancestors.len() >= MAX_CHAIN {
            return Err(ImageError::ChainTooLong { path: dir.to_owned() });
        }
        foundation.sources.push(Source::in_image(&parent, Trust::Used));
        next = Base::read(&parent)?;
        at = parent;
    }
    Ok(foundation)
}

/// The directory of the parent that `base` names, found by its identity.
fn find_parent(image: &Path, base: &Base) -> Result<PathBuf, ImageError> {
    let Base::Parent { identity, relative, absolute } = base else {
        return Err(ImageError::ParentInStore { path: image.to_owned() });
    };
    let mut changed = None;
    for place in [image.join(relative), absolute.clone()] {
        match Manifest::identity(&place) {
            Ok(found) if found == *identity => return Ok(place),
            Ok(_) => changed = changed.or(Some(place)),
            Err(error) => tracing::debug!(%error, "no parent at {}", place.display()),
        }
    }
    let (image, identity) = (image.to_owned(), crate::base::format::hex(identity));
    Err(match changed {
        Some(path) => ImageError::ParentChanged { image, path, identity },
        None => ImageError::ParentMissing { image, path: absolute.clone(), identity },
    })
}

/// The way from the directory `from` to `to`, both absolute and without symbolic links.
pub(super) fn relative(from: &Path, to: &Path) -> PathBuf {
    let (from, to): (Vec<_>, Vec<_>) = (from.components().collect(), to.components().collect());
    let common = from.iter().zip(&to).take_while(|(a, b)| a == b).count();
    let up = from[common..].iter().map(|_| Component::ParentDir);
    up.chain(to[common..].iter().copied()).collect()
}
