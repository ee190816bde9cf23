//! A driver library that this host vouches for. [`Drivers`](super::Drivers) says which these are.

use std::fs::File;
use std::io;
use std::os::fd::AsRawFd;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::sync::OnceLock;

use crate::base::foreign::{FileId, Foreign};
use crate::base::io_error::IoError;
use crate::image::DriverKind;

/// A driver library that the host vouches for, open as a file. Whatever takes its place in the file system
/// later, it is this file that is hashed and loaded.
#[derive(Debug)]
pub struct HostDriver {
    path: PathBuf,
    kind: DriverKind,
    file: File,
    id: FileId,
    size: u64,
    hash: OnceLock<[u8; 32]>,
}

impl HostDriver {
    /// The library at `path`, for which the caller vouches.
    ///
    /// # Errors
    /// It cannot be opened.
    pub fn vouched(path: &Path, kind: DriverKind) -> io::Result<Self> {
        let path = path.canonicalize()?;
        let file = File::open(&path)?;
        let (id, size) = (FileId::of(&file)?, file.metadata()?.len());
        Ok(Self { path, kind, file, id, size, hash: OnceLock::new() })
    }

    /// Where it is, with no link on the way.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Whose it is.
    pub fn kind(&self) -> DriverKind {
        self.kind
    }

    /// Its file.
    pub(super) fn file(&self) -> &File {
        &self.file
    }

    /// BLAKE3 of its bytes, which takes all cores some hundredths of a second for the 100 MB of NVIDIA's.
    ///
    /// # Errors
    /// It cannot be read.
    pub fn hash(&self) -> Result<[u8; 32], IoError> {
        if let Some(hash) = self.hash.get() {
            return Ok(*hash);
        }
        let mut hasher = blake3::Hasher::new();
        let path = format!("/proc/self/fd/{}", self.file.as_raw_fd());
        hasher.update_mmap_rayon(path).map_err(|source| self.unreadable(source))?;
        Ok(*self.hash.get_or_init(|| *hasher.finalize().as_bytes()))
    }

    /// Its bytes.
    ///
    /// # Errors
    /// It cannot be read.
    pub fn bytes(&self) -> Result<Vec<u8>, IoError> {
        let mut bytes = vec![0; self.size as usize];
        let read = self.file.read_exact_at(&mut bytes, 0);
        read.map_err(|source| self.unreadable(source))?;
        Ok(bytes)
    }

    fn unreadable(&self, source: io::Error) -> IoError {
        IoError { what: format!("cannot read {}", self.path.display()), source }
    }

    /// Whether `file` is this library: the very file, or another one with the same bytes.
    ///
    /// # Errors
    /// `file` cannot be read.
    pub(crate) fn is(&self, file: Foreign) -> Result<bool, IoError> {
        if file.id() == self.id {
            return Ok(true);
        }
        if file.size() != self.size {
            return Ok(false);
        }
        let what = || format!("cannot compare a library with {}", self.path.display());
        let theirs = file.hash().map_err(|source| IoError { what: what(), source })?;
        Ok(theirs == self.hash()?)
    }
}
