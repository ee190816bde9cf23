//! What writers do to a disk, as a trait, so that tests can cut the power or fill the disk at
//! each single step.
//!
//! Only changes go through it. Readers open files by themselves.

use std::fs::{DirBuilder, File};
use std::io;
use std::os::unix::fs::{DirBuilderExt, FileExt, OpenOptionsExt};
use std::path::Path;

/// Changes to a file system, each as durable as the system makes it: names only after
/// [`sync_dir`](Self::sync_dir), contents only after [`DiskFile::sync`].
pub(crate) trait Disk: Send + Sync {
    /// Creates a file that must not exist, for its owner only.
    fn create(&self, path: &Path) -> io::Result<Box<dyn DiskFile>>;
    /// Makes a directory that must not exist, for its owner only.
    fn make_dir(&self, path: &Path) -> io::Result<()>;
    /// Gives a file or directory another name in the same directory; replaces a file, or an
    /// empty directory by a directory.
    fn rename(&self, from: &Path, to: &Path) -> io::Result<()>;
    /// Removes a file.
    fn remove_file(&self, path: &Path) -> io::Result<()>;
    /// Removes a directory with all that is in it.
    fn remove_tree(&self, path: &Path) -> io::Result<()>;
    /// Makes the names in a directory durable.
    fn sync_dir(&self, path: &Path) -> io::Result<()>;
}

/// A file that is being written.
pub(crate) trait DiskFile: Send {
    /// Writes all of `bytes` at `offset`.
    fn write_all_at(&self, bytes: &[u8], offset: u64) -> io::Result<()>;
    /// Makes the contents durable.
    fn sync(&self) -> io::Result<()>;
}

/// The file systems of this host.
#[derive(Debug, Clone, Copy)]
pub(crate) struct RealDisk;

impl Disk for RealDisk {
    fn create(&self, path: &Path) -> io::Result<Box<dyn DiskFile>> {
        let file =
            File::options().read(true).write(true).create_new(true).mode(0o600).open(path)?;
        Ok(Box::new(file))
    }

    fn make_dir(&self, path: &Path) -> io::Result<()> {
        DirBuilder::new().mode(0o700).create(path)
    }

    fn rename(&self, from: &Path, to: &Path) -> io::Result<()> {
        std::fs::rename(from, to)
    }

    fn remove_file(&self, path: &Path) -> io::Result<()> {
        std::fs::remove_file(path)
    }

    fn remove_tree(&self, path: &Path) -> io::Result<()> {
        std::fs::remove_dir_all(path)
    }

    fn sync_dir(&self, path: &Path) -> io::Result<()> {
        File::open(path)?.sync_all()
    }
}

impl DiskFile for File {
    fn write_all_at(&self, bytes: &[u8], offset: u64) -> io::Result<()> {
        FileExt::write_all_at(self, bytes, offset)
    }

    fn sync(&self) -> io::Result<()> {
        self.sync_all()
    }
}
