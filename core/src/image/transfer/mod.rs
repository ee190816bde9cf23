//! Images as one file to ship: an uncompressed tar of a self-contained image.
//!
//! The tar has these members and nothing else, in this order: `manifest`, `signatures` if the image has any,
//! `index`, and the packs in the order of the index, as `packs/NAME`. All are regular files. So `tar xf` makes an image
//! of it too, and [`import`] can check each member's name and length before it takes a byte.
//!
//! [`export`] knows all lengths before it begins, so it writes a stream; chunks are passed on as
//! they are stored, wherever the image has them. [`import`] checks each chunk on its way into a
//! new image, which appears only if all of it is right. The manifest stays the same byte by byte,
//! and so does the identity of the image.

mod export;
mod import;

#[cfg(test)]
mod tests;

pub use export::{Exported, export, export_to_file, remove_unfinished};
pub use import::{Imported, import};

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
    /// The tar is not as [`export`] writes it.
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
const BLOCK: u64 = 512;
/// Most stored bytes that are in memory at a time in each of two buffers.
const BATCH: usize = 16 << 20;

/// What a member takes up in the tar.
fn member_len(size: u64) -> u64 {
    BLOCK + size.next_multiple_of(BLOCK)
}

fn io_error(what: &'static str) -> impl Fn(io::Error) -> TarError {
    move |source| IoError { what: what.to_owned(), source }.into()
}
