//! Why an image was not shipped as one file.

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
    /// The image's chunks.
    #[error(transparent)]
    Store(#[from] StoreError),
    /// The image is not taken.
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
    /// The tar is not as [`export`](super::export()) writes it.
    #[error("this is not a tar of an image: {what}")]
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
    /// The export or import was asked to end.
    #[error("interrupted")]
    Interrupted,
}

/// The error for a failed call of the system.
pub(super) fn io_error(what: &'static str) -> impl Fn(io::Error) -> TarError {
    move |source| IoError { what: what.to_owned(), source }.into()
}
