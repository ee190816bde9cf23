//! An image that the source keeps until the program runs on the other side: what is sent is put into it too.
//!
//! It says nothing of who owns the program. It is for the case that the other side is lost, and its image with it.

use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};

use parking_lot::RwLock;

use crate::engine::error::Error;
use crate::image::{self, Destination, ImageError, ImageWriter, Manifest, Written};
use crate::store::{ChunkId, Compression, StoreError};

/// The image.
pub(super) struct SafetyImage {
    path: PathBuf,
    compression: Compression,
    /// `None` until it is begun, and once it is complete or was given up.
    writer: RwLock<Option<ImageWriter>>,
    is_complete: AtomicBool,
}

impl SafetyImage {
    /// One that is to be at `path`, which is new, or an empty directory. Nothing is made yet.
    ///
    /// # Errors
    /// No image can be there.
    pub(super) fn new(path: &Path, compression: Compression) -> Result<Self, Error> {
        let absolute = std::path::absolute(path).map_err(|source| Error::Io {
            what: format!("cannot make {} absolute", path.display()),
            source,
        })?;
        Destination::Alone(absolute.clone()).check()?;
        let (writer, is_complete) = (RwLock::default(), AtomicBool::default());
        Ok(Self { path: absolute, compression, writer, is_complete })
    }

    /// Begins it. Somebody has to know of it who removes what there is if this process is killed.
    ///
    /// # Errors
    /// No image can be there.
    pub(super) fn begin(&self) -> Result<(), ImageError> {
        let destination = Destination::Alone(self.path.clone());
        *self.writer.write() = Some(ImageWriter::begin(&destination, self.compression)?);
        Ok(())
    }

    /// Where it is, or will be.
    pub(super) fn path(&self) -> &Path {
        &self.path
    }

    /// Whether there is an image that could be restored.
    pub(super) fn is_complete(&self) -> bool {
        self.is_complete.load(Ordering::Acquire)
    }

    /// Whether it has the chunk.
    pub(super) fn contains(&self, id: &ChunkId) -> bool {
        self.writer.read().as_ref().is_none_or(|writer| writer.chunks().contains(id))
    }

    /// Puts a chunk into it.
    ///
    /// # Errors
    /// It cannot be written.
    pub(super) fn put(&self, id: ChunkId, plain: &[u8]) -> Result<(), StoreError> {
        let writer = self.writer.read();
        writer.as_ref().map_or(Ok(()), |writer| writer.chunks().put_hashed(id, plain).map(drop))
    }

    /// Syncs what was put, so that there is less to wait for when the program stands still.
    ///
    /// # Errors
    /// It cannot be synced.
    pub(super) fn sync(&self) -> Result<(), Error> {
        Ok(self.writer.read().as_ref().map_or(Ok(()), ImageWriter::sync_written)?)
    }

    /// Completes it.
    ///
    /// # Errors
    /// It is not complete, and nothing of it is left.
    pub(super) fn commit(&self, image: &Written) -> Result<(), ImageError> {
        let Some(mut writer) = self.writer.write().take() else { return Ok(()) };
        let damaged = |what: &str| StoreError::NotTaken { what: format!("its manifest: {what}") };
        let manifest = Manifest::decode(image.version, &image.body).map_err(damaged)?;
        writer.set_signatures(image.signatures.clone());
        writer.commit(&manifest)?;
        self.is_complete.store(true, Ordering::Release);
        Ok(())
    }

    /// It is not needed: the program runs.
    pub(super) fn remove(&self) {
        drop(self.writer.write().take());
        if !self.is_complete.swap(false, Ordering::AcqRel) {
            return;
        }
        if let Err(error) = image::remove(&self.path, true) {
            tracing::warn!(%error, path = %self.path.display(), "an image that is not needed any more could not \
            be removed");
        }
    }
}
