//! Files that strangers name: what a program has mapped, or what an image says that it needs.
//!
//! gpucr is root among them, so it reads such a file as data only: a regular file, up to a length that it has
//! decided on before, and for so long. A pipe is not waited for, a device is not opened, and a file system that
//! never answers costs a time limit.

use std::fs::File;
use std::io::{self, Read};
use std::os::fd::AsRawFd;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::time::Duration;

use crate::base::file_tree::FileTree;
use crate::base::time_limit::within;

/// How long opening and reading a file may take. A driver library of 100 MB from a slow disk needs a second.
const PATIENCE: Duration = Duration::from_secs(20);
/// What is said of one whose time is over.
const SILENT: &str = "its file system does not answer";
/// How much is read at a time.
const BUFFER: usize = 1 << 20;

/// Which file it is, whatever its name: device and inode.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct FileId {
    device: u64,
    inode: u64,
}

impl FileId {
    /// The id of an open file.
    ///
    /// # Errors
    /// The kernel cannot tell.
    pub(crate) fn of(file: &File) -> io::Result<Self> {
        let meta = file.metadata()?;
        Ok(Self { device: meta.dev(), inode: meta.ino() })
    }
}

/// A regular file of somebody else, open for reading.
#[derive(Debug)]
pub(crate) struct Foreign {
    file: File,
    id: FileId,
    size: u64,
}

impl Foreign {
    /// Opens the file at `path`, whose links are followed.
    ///
    /// # Errors
    /// It is not there, is no regular file, or the file system does not answer.
    pub(crate) fn open(path: &Path) -> io::Result<Self> {
        Self::open_in(&FileTree::host(), path)
    }

    /// The same in a file tree.
    ///
    /// # Errors
    /// As [`open`](Self::open).
    pub(crate) fn open_in(tree: &FileTree, path: &Path) -> io::Result<Self> {
        let (tree, path) = (tree.clone(), path.to_owned());
        within(PATIENCE, SILENT, move || Self::open_now(&tree, &path))
    }

    fn open_now(tree: &FileTree, path: &Path) -> io::Result<Self> {
        // Its kind is asked without opening it: to open a pipe waits, and to open a device may do anything.
        let place = tree.find(path)?;
        let meta = place.metadata()?;
        if !meta.is_file() {
            return Err(io::Error::new(io::ErrorKind::InvalidInput, "it is not a regular file"));
        }
        // The very file that was looked at, whatever the path leads to by now.
        let file = File::open(PathBuf::from(format!("/proc/self/fd/{}", place.as_raw_fd())))?;
        let id = FileId { device: meta.dev(), inode: meta.ino() };
        Ok(Self { file, id, size: meta.len() })
    }

    /// Which file it is.
    pub(crate) fn id(&self) -> FileId {
        self.id
    }

    /// The length that it had when it was opened, bytes.
    pub(crate) fn size(&self) -> u64 {
        self.size
    }

    /// BLAKE3 of its bytes, as many as it had when it was opened.
    ///
    /// # Errors
    /// It cannot be read, has become shorter, or the file system does not answer.
    pub(crate) fn hash(self) -> io::Result<[u8; 32]> {
        within(PATIENCE, SILENT, move || {
            let mut hasher = blake3::Hasher::new();
            self.read(|bytes| {
                hasher.update(bytes);
            })?;
            Ok(*hasher.finalize().as_bytes())
        })
    }

    /// Its bytes, if it has no more than `limit`.
    ///
    /// # Errors
    /// The errors of [`Self::hash`], or it is longer.
    pub(crate) fn bytes(self, limit: u64) -> io::Result<Vec<u8>> {
        if self.size > limit {
            let what = format!("it has {} bytes, and no more than {limit} are read", self.size);
            return Err(io::Error::new(io::ErrorKind::InvalidInput, what));
        }
        within(PATIENCE, SILENT, move || {
            let mut all = Vec::with_capacity(self.size as usize);
            self.read(|bytes| all.extend_from_slice(bytes))?;
            Ok(all)
        })
    }

    /// Reads with read(2): a mapping of a file that its owner cuts short would kill gpucr.
    fn read(&self, mut take: impl FnMut(&[u8])) -> io::Result<()> {
        let mut buffer = vec![0; BUFFER.min(self.size.max(1) as usize)];
        let mut left = self.size;
        while left > 0 {
            let part = left.min(buffer.len() as u64) as usize;
            (&self.file).read_exact(&mut buffer[..part])?;
            take(&buffer[..part]);
            left -= part as u64;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_no_regular_file_is_not_opened() {
        let dir = tempfile::tempdir().expect("a directory");
        let pipe = dir.path().join("pipe");
        let mode = rustix::fs::Mode::RUSR | rustix::fs::Mode::WUSR;
        rustix::fs::mknodat(rustix::fs::CWD, &pipe, rustix::fs::FileType::Fifo, mode, 0)
            .expect("a pipe");
        for path in [pipe.as_path(), Path::new("/dev/zero"), dir.path()] {
            let error = Foreign::open(path).expect_err("no regular file");
            assert_eq!(error.to_string(), "it is not a regular file", "{}", path.display());
        }
        assert_eq!(
            Foreign::open(Path::new("/nowhere")).unwrap_err().kind(),
            io::ErrorKind::NotFound
        );
    }

    #[test]
    fn no_more_is_read_than_was_asked_for() {
        let file = tempfile::NamedTempFile::new().expect("a file");
        let text = vec![7; 3 * BUFFER + 5];
        std::fs::write(file.path(), &text).expect("written");
        let open = || Foreign::open(file.path()).expect("opened");
        assert_eq!(open().bytes(text.len() as u64).expect("read"), text);
        assert!(open().bytes(text.len() as u64 - 1).is_err());
        assert_eq!(open().hash().expect("read"), *blake3::hash(&text).as_bytes());
        // A file that becomes shorter is an error, not a signal.
        let cut = open();
        file.as_file().set_len(BUFFER as u64).expect("cut");
        assert_eq!(cut.hash().unwrap_err().kind(), io::ErrorKind::UnexpectedEof);
    }
}
