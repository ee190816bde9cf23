//! Images of which an instance has written what it shared: nothing of them is shared any more.
//!
//! An empty file for each, named by the image's identity. They are gone when the host is started anew, and a user who
//! removes one lets the image be shared again: the program may have had another reason for its error.

use std::io;
use std::os::unix::fs::DirBuilderExt;
use std::path::{Path, PathBuf};

use crate::image::Manifest;

/// Root's alone, like all of gpucr's that is below `/run`.
const DIR: &str = "/run/gpucr/unshared";

fn file(id: &[u8; 32]) -> PathBuf {
    Path::new(DIR).join(crate::base::format::hex(id))
}

/// The file that says so of the image with this identity, if there is one.
pub(super) fn said(id: &[u8; 32]) -> Option<PathBuf> {
    Some(file(id)).filter(|file| file.symlink_metadata().is_ok())
}

/// An instance of the image at `path` has written memory that it shares: the next one shares nothing. Where that
/// cannot be written down, the next one learns it again.
pub(super) fn remember(path: &Path) {
    let write_down = || -> io::Result<()> {
        let id = Manifest::identity(path).map_err(io::Error::other)?;
        std::fs::DirBuilder::new().recursive(true).mode(0o700).create(DIR)?;
        match std::fs::File::create_new(file(&id)) {
            Err(error) if error.kind() != io::ErrorKind::AlreadyExists => Err(error),
            _ => Ok(()),
        }
    };
    if let Err(error) = write_down() {
        tracing::warn!(%error, "it could not be recorded that the image cannot be shared");
    }
}
