//! Who takes an image that is not written to a disk of this host.

use super::error::ImageError;
use crate::store::{ChunkSink, Stats};

/// Takes an image in the place of a disk.
pub(crate) trait Recipient: Send + Sync {
    /// Where the chunks of the image go.
    fn sink(&self) -> &dyn ChunkSink;

    /// Takes the manifest, after all chunks that it names. When this returns the image is complete where it was
    /// sent to, and durable.
    ///
    /// # Errors
    /// There is no image there, or it is not known whether there is one.
    fn commit(&self, image: Written) -> Result<Committed, ImageError>;
}

/// An image that is complete and durable.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Committed {
    /// Its identity: the BLAKE3 of its manifest file.
    pub id: [u8; 32],
    /// Bytes of all its files, and of the chunks that it shares with its ancestors or its store.
    pub stored_bytes: u64,
    /// Bytes of all the files that were written for it.
    pub new_bytes: u64,
    /// How many of the new bytes are stored bytes of chunks that the image does not need.
    pub unneeded_bytes: u64,
    /// What its chunks came to.
    pub stats: Stats,
}

/// What there is of an image besides its chunks.
pub(crate) struct Written {
    /// Its identity.
    pub(crate) id: [u8; 32],
    /// Version of the manifest.
    pub(crate) version: u32,
    /// Body of the manifest.
    pub(crate) body: Vec<u8>,
    /// Signatures of the identity; empty if there are none.
    pub(crate) signatures: String,
}
