//! What export and import have in common.

use std::io;
use std::path::PathBuf;

use crate::base::io_error::IoError;
use crate::image::ImageError;
use crate::image::trust::TrustError;
use crate::store::StoreError;

/// Why an image was not written as a tar, or not read from one.
#[derive(Debug, thiserror::Error)]
pub enum TarError {
    /// The image.
    #[error(transparent)]
    Image(#[from] ImageError),
    /// Its chunks.
    #[error(transparent)]
    Store(#[from] StoreError),
    /// It is not taken.
    #[error(transparent)]
    Trust(#[from] TrustError),
    /// The tar cannot be written or read.
    #[error(transparent)]
    Io(#[from] IoError),
    /// The image cannot be written as it is.
    #[error("the image is damaged: {what}")]
    Damaged {
        /// Of what.
        what: String,
    },
    /// The tar is not as [`export`](super::export) writes it.
    #[error("this is no tar of an image: {what}")]
    BadTar {
        /// What is wrong.
        what: String,
    },
    /// Something is there already.
    #[error("{path} exists")]
    Exists {
        /// Where the tar was to go.
        path: PathBuf,
    },
    /// It was asked to end.
    #[error("interrupted")]
    Interrupted,
}

/// Length of a tar's header, and what members are filled up to.
pub(super) const BLOCK: u64 = 512;
/// Most stored bytes that are in memory at a time in each of two buffers.
pub(super) const BATCH: usize = 16 << 20;

/// What a member takes up in the tar.
pub(super) fn member_len(size: u64) -> u64 {
    BLOCK + size.next_multiple_of(BLOCK)
}

pub(super) fn io_error(what: &'static str) -> impl Fn(io::Error) -> TarError {
    move |source| IoError { what: what.to_owned(), source }.into()
}
