//! Why an image could not be written or read.

use std::io;
use std::path::{Path, PathBuf};

use super::layout::MAX_CHAIN;
use crate::store::{ChunkId, StoreError, io_error};

/// Why an image could not be written or read.
#[derive(Debug, thiserror::Error)]
pub enum ImageError {
    /// The image's signatures are not those that are asked for.
    #[error(transparent)]
    Trust(#[from] TrustError),
    /// The manifest says something that has to be known for a restore, and is not.
    #[error(
        "the image, made by gpucr {made_by}, needs `{kind}` in version {version}, which this gpucr does not know"
    )]
    UnknownSection {
        /// What it is.
        kind: String,
        /// The version in which it is needed.
        version: u32,
        /// The version of the gpucr that wrote it.
        made_by: String,
    },
    /// The place for the image cannot take one.
    #[error("cannot make an image at {}: {reason}", path.display())]
    Output {
        /// The path that was asked for.
        path: PathBuf,
        /// Why not.
        reason: &'static str,
    },
    /// The path holds something else than an image.
    #[error("{} is not a gpucr image: {reason}", path.display())]
    NotAnImage {
        /// The path that was asked for.
        path: PathBuf,
        /// What is missing or wrong.
        reason: &'static str,
    },
    /// A file of the image is shorter than it must be.
    #[error("{} is truncated: {found} bytes where {expected} are needed", path.display())]
    Truncated {
        /// The file.
        path: PathBuf,
        /// Bytes needed.
        expected: u64,
        /// Bytes there.
        found: u64,
    },
    /// A file of the image is not as it was written.
    #[error("{} is damaged: {what}", path.display())]
    Damaged {
        /// The file.
        path: PathBuf,
        /// What does not match.
        what: String,
    },
    /// The image was written by a newer gpucr.
    #[error("{} has format version {found}; this gpucr reads up to {supported}", path.display())]
    NewerVersion {
        /// The file.
        path: PathBuf,
        /// Its version.
        found: u32,
        /// The newest version that can be read.
        supported: u32,
    },
    /// The disk is full. Nothing of the image is left behind.
    #[error("no space left while writing {}; the unfinished image was removed", path.display())]
    NoSpace {
        /// The file that was being written.
        path: PathBuf,
        /// The system's answer.
        source: io::Error,
    },
    /// The manifest names a chunk that the image does not have.
    #[error("chunk {id}, part of {owner}, is missing from the image")]
    MissingChunk {
        /// The chunk.
        id: ChunkId,
        /// The file or block of memory that it belongs to.
        owner: String,
    },
    /// The parent of an incremental image is not where the image says.
    #[error(
        "{} builds on the image {}, which is not at {}",
        image.display(), &identity[..16], path.display()
    )]
    ParentMissing {
        /// The incremental image.
        image: PathBuf,
        /// Where the parent was when the image was made.
        path: PathBuf,
        /// The parent's identity, in hexadecimal digits.
        identity: String,
    },
    /// Another image is in the place of the parent.
    #[error(
        "{} builds on the image {}, but {} is a different one",
        image.display(), &identity[..16], path.display()
    )]
    ParentChanged {
        /// The incremental image.
        image: PathBuf,
        /// Where the parent should be.
        path: PathBuf,
        /// The parent's identity, in hexadecimal digits.
        identity: String,
    },
    /// A parent keeps its chunks in a store.
    #[error("{} is in a store, and so cannot be a parent", path.display())]
    ParentInStore {
        /// The parent.
        path: PathBuf,
    },
    /// Other images build on the one that was to be removed.
    #[error(
        "{} is the parent of {}, which cannot be read without it",
        path.display(),
        children.iter().map(|child| child.display().to_string()).collect::<Vec<_>>().join(", ")
    )]
    HasChildren {
        /// The image.
        path: PathBuf,
        /// The images that build on it.
        children: Vec<PathBuf>,
    },
    /// Too many images build one on another.
    #[error("{} is the end of a chain of {MAX_CHAIN} images, which is the maximum", path.display())]
    ChainTooLong {
        /// The last image of the chain.
        path: PathBuf,
    },
    /// A file has a name or a shape that an image cannot hold.
    #[error("file {name:?} cannot be part of an image: {reason}")]
    BadFile {
        /// Its name.
        name: String,
        /// Why not.
        reason: &'static str,
    },
    /// The store failed in another way.
    #[error(transparent)]
    Store(StoreError),
}

impl From<StoreError> for ImageError {
    fn from(error: StoreError) -> Self {
        match error {
            StoreError::NoSpace { path, source } => Self::NoSpace { path, source },
            StoreError::Truncated { path, expected, found } => {
                Self::Truncated { path, expected, found }
            }
            StoreError::Damaged { path, what } => Self::Damaged { path, what },
            StoreError::NewerVersion { path, found, supported } => {
                Self::NewerVersion { path, found, supported }
            }
            StoreError::NotAStore { path } => {
                Self::Damaged { path, what: "it is not a file of this format".into() }
            }
            other => Self::Store(other),
        }
    }
}

/// The error for a failed call of the system on a file.
pub(super) fn io_failure(action: &'static str, path: &Path, source: io::Error) -> ImageError {
    io_error(action, path, source).into()
}

/// Why an image is not taken, or a key cannot be used.
#[derive(Debug, thiserror::Error)]
#[allow(missing_docs)] // the messages say what each field is
pub enum TrustError {
    #[error("the identity of the image is {found}, but {expected} was expected")]
    OtherImage { found: String, expected: String },
    #[error("the image is not signed, but {} requires that", by.display())]
    Unsigned { by: PathBuf },
    #[error("no key in {} has signed the image; these have: {}", by.display(), signers.join(", "))]
    Untrusted { by: PathBuf, signers: Vec<String> },
    #[error("the signatures of the image are damaged: {0}")]
    BadSignatures(String),
    #[error("{} holds no public key in PEM form", path.display())]
    NoPublicKey { path: PathBuf },
    #[error("{} holds no private Ed25519 key in PEM form (PKCS #8)", path.display())]
    NoPrivateKey { path: PathBuf },
    #[error("others can read the private key {}", path.display())]
    OpenKey { path: PathBuf },
    #[error("cannot read {}: {source}", path.display())]
    Read { path: PathBuf, source: io::Error },
    #[error("cannot write {}: {source}", path.display())]
    Write { path: PathBuf, source: io::Error },
}
