//! What a program writes that nobody reads any more: the link was lost.

use std::fs::{DirBuilder, File};
use std::io::{self, Write};
use std::os::unix::fs::{DirBuilderExt, OpenOptionsExt};
use std::path::{Path, PathBuf};

use super::end::ProgramEnd;
use crate::engine::migrate::record::{MigrationId, directory};

/// So many bytes go to a file; then it becomes the old one, in the place of the one before.
const MOST: u64 = 32 << 20;

/// A file that has the last of what came, with an old one.
#[derive(Debug)]
pub(super) struct Kept {
    /// None if nothing is kept.
    path: Option<PathBuf>,
    most: u64,
    /// The file, and what is in it.
    file: Option<(File, u64)>,
}

/// Where all is that is kept of a migration.
pub(super) fn folder(id: MigrationId) -> PathBuf {
    directory().join(format!("{id}.output"))
}

impl Kept {
    /// What has this name in the folder, which is made when something comes. Without a folder nothing is kept.
    pub(super) fn new(folder: Option<&Path>, name: &str) -> Self {
        Self { path: folder.map(|folder| folder.join(name)), most: MOST, file: None }
    }

    /// Of at most so many bytes.
    #[cfg(test)]
    pub(super) fn with_most(self, most: u64) -> Self {
        Self { most, ..self }
    }

    /// Keeps what has come. What cannot be written is lost: the program goes on.
    pub(super) fn write(&mut self, bytes: &[u8]) {
        let Some(path) = self.path.clone().filter(|_| !bytes.is_empty()) else { return };
        if let Err(error) = self.try_to(bytes, &path) {
            tracing::warn!(%error, path = %path.display(), "output of a program is lost");
        }
    }

    fn try_to(&mut self, bytes: &[u8], path: &Path) -> io::Result<()> {
        if self.file.as_ref().is_some_and(|(_, has)| *has >= self.most) {
            self.file = None;
            let mut old = path.as_os_str().to_owned();
            old.push(".old");
            std::fs::rename(path, old)?;
        }
        let (file, has) = match &mut self.file {
            Some(file) => file,
            none => none.insert((create(path)?, 0)),
        };
        file.write_all(bytes)?;
        *has += bytes.len() as u64;
        Ok(())
    }
}

/// Notes how the program has ended.
pub(super) fn note_end(folder: &Path, end: ProgramEnd) {
    let json = match end {
        ProgramEnd::Code(code) => serde_json::json!({"exit_code": code}),
        ProgramEnd::Signal(signal) => serde_json::json!({"signal": signal}),
        ProgramEnd::Unknown => serde_json::json!({}),
    };
    let path = folder.join("end");
    let written = create(&path).and_then(|mut file| writeln!(file, "{json}"));
    if let Err(error) = written {
        tracing::warn!(%error, path = %path.display(), "it is not recorded how a program ended");
    }
}

fn create(path: &Path) -> io::Result<File> {
    let folder = path.parent().ok_or(io::ErrorKind::NotFound)?;
    DirBuilder::new().recursive(true).mode(0o700).create(folder)?;
    File::options().write(true).create(true).truncate(true).mode(0o600).open(path)
}
