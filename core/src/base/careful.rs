//! Files that a user, an image or a program has named, or may have put in their place.
//!
//! What is no regular file is not opened: to open a device may do something, a FIFO or a device may have no end,
//! and may never say anything.

use std::ffi::{OsStr, OsString};
use std::fs::File;
use std::io::{self, Read};
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::path::Path;

use rustix::fs::{AtFlags, CWD, FileType, Mode, OFlags, RenameFlags, ResolveFlags};
use rustix::io::Errno;

/// How often a path is looked up again in which something was being renamed.
const ATTEMPTS: u32 = 64;

/// Opens a regular file for reading.
///
/// # Errors
/// `InvalidInput` if it is none.
pub fn open_regular(path: &Path) -> io::Result<File> {
    // This descriptor opens nothing yet, and whatever becomes of the name, it is the same file.
    let named: OwnedFd =
        rustix::fs::openat(CWD, path, OFlags::PATH | OFlags::CLOEXEC, Mode::empty())?;
    open_if_regular(&named, OFlags::RDONLY | OFlags::CLOEXEC)
}

/// Opens a regular file that is in a directory itself, and no link. What is none is not opened: that may do something.
///
/// # Errors
/// It is not there, is a link (`ELOOP`), or `InvalidInput` if it is no regular file.
pub(crate) fn open_regular_in(
    directory: BorrowedFd<'_>,
    name: &OsStr,
    flags: OFlags,
) -> io::Result<File> {
    let only_name = OFlags::PATH | OFlags::NOFOLLOW | OFlags::CLOEXEC;
    let named = rustix::fs::openat(directory, name, only_name, Mode::empty())?;
    open_if_regular(&named, flags | OFlags::NONBLOCK | OFlags::CLOEXEC)
}

/// openat2(2), once more where something on the way is being renamed: the kernel cannot tell then that nothing leads
/// outside.
///
/// # Errors
/// As openat2(2).
pub(crate) fn open_below(
    root: BorrowedFd<'_>,
    path: &Path,
    flags: OFlags,
    resolve: ResolveFlags,
) -> io::Result<OwnedFd> {
    for _ in 0..ATTEMPTS {
        match rustix::fs::openat2(root, path, flags, Mode::empty(), resolve) {
            Err(Errno::AGAIN) => std::thread::yield_now(),
            found => return Ok(found?),
        }
    }
    Err(Errno::AGAIN.into())
}

/// Opens the file that a descriptor names, which opens nothing itself.
///
/// # Errors
/// It is a link (`ELOOP`), or `InvalidInput` if it is no regular file.
fn open_if_regular(named: &OwnedFd, flags: OFlags) -> io::Result<File> {
    match FileType::from_raw_mode(rustix::fs::fstat(named)?.st_mode) {
        FileType::RegularFile => {}
        FileType::Symlink => return Err(Errno::LOOP.into()),
        kind => {
            let what = format!("it is {}, not a regular file", name(kind));
            return Err(io::Error::new(io::ErrorKind::InvalidInput, what));
        }
    }
    let path = format!("/proc/self/fd/{}", named.as_raw_fd());
    Ok(rustix::fs::open(path, flags, Mode::empty())?.into())
}

/// A directory, and the name of a file in it, to which no symbolic link leads: whoever can rename directories on the way
/// to a file cannot have another one opened.
pub(crate) struct Place {
    directory: OwnedFd,
    name: OsString,
}

impl Place {
    /// Finds the directory, seen from `root`, which is a directory or [`CWD`].
    ///
    /// # Errors
    /// It is not there, a link leads to it (`ELOOP`), or the path has no last name.
    pub(crate) fn find(root: BorrowedFd<'_>, path: &Path) -> io::Result<Self> {
        let no_name =
            || io::Error::new(io::ErrorKind::InvalidInput, "it is not the path of a file");
        let parent = path.parent().ok_or_else(no_name)?;
        let name = path.file_name().ok_or_else(no_name)?.to_owned();
        let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC;
        let mut resolve = ResolveFlags::NO_SYMLINKS;
        if root.as_raw_fd() != CWD.as_raw_fd() {
            resolve |= ResolveFlags::IN_ROOT;
        }
        // What is in the root itself has no other name there. In this process's own tree it would be relative.
        let is_tree = resolve.contains(ResolveFlags::IN_ROOT);
        let is_in_root = is_tree && parent.as_os_str().is_empty();
        let parent = if is_in_root { Path::new(".") } else { parent };
        let directory = open_below(root, parent, flags, resolve)?;
        Ok(Self { directory, name })
    }

    /// The directory.
    pub(crate) fn directory(&self) -> BorrowedFd<'_> {
        self.directory.as_fd()
    }

    /// Opens the file, which is there and a regular one. What is none is not opened: that may do something.
    ///
    /// # Errors
    /// It is not there, is a link (`ELOOP`), or `InvalidInput` if it is no regular file.
    pub(crate) fn open(&self, flags: OFlags) -> io::Result<File> {
        open_regular_in(self.directory(), &self.name, flags)
    }

    /// Device and inode of what is there, be it a link.
    ///
    /// # Errors
    /// Nothing is there (`ENOENT`), or that cannot be told.
    pub(crate) fn number(&self) -> io::Result<(u64, u64)> {
        let flags = AtFlags::SYMLINK_NOFOLLOW;
        let stat = rustix::fs::statat(&self.directory, self.name.as_os_str(), flags)?;
        Ok((stat.st_dev, stat.st_ino))
    }

    /// Another name in the same directory.
    ///
    /// # Errors
    /// There is no descriptor left.
    pub(crate) fn beside(&self, name: &str) -> io::Result<Self> {
        Ok(Self { directory: self.directory.try_clone()?, name: name.into() })
    }

    /// Gives what is here the name of another place in the same directory, where nothing may be.
    ///
    /// # Errors
    /// Something is there (`EEXIST`), or the file system cannot make sure that nothing is (`EINVAL`).
    pub(crate) fn rename_to(&self, other: &Self) -> io::Result<()> {
        let (from, to) = (self.name.as_os_str(), other.name.as_os_str());
        let flags = RenameFlags::NOREPLACE;
        Ok(rustix::fs::renameat_with(&self.directory, from, &other.directory, to, flags)?)
    }

    /// Removes the file.
    ///
    /// # Errors
    /// It is not there, or cannot be removed.
    pub(crate) fn remove(&self) -> io::Result<()> {
        Ok(rustix::fs::unlinkat(&self.directory, self.name.as_os_str(), AtFlags::empty())?)
    }

    /// Makes the file, for this user alone.
    ///
    /// # Errors
    /// Something has that name, or it cannot be made.
    pub(crate) fn create(&self) -> io::Result<File> {
        let flags = OFlags::WRONLY | OFlags::CREATE | OFlags::EXCL | OFlags::CLOEXEC;
        let mode = Mode::RUSR | Mode::WUSR;
        Ok(rustix::fs::openat(&self.directory, self.name.as_os_str(), flags, mode)?.into())
    }
}

/// Reads a regular file of at most so many bytes.
///
/// # Errors
/// `InvalidInput` if it is none; `FileTooLarge` if it has more.
pub fn read_regular(path: &Path, most: u64) -> io::Result<Vec<u8>> {
    read_at_most(open_regular(path)?, most)
}

/// Reads an open file of at most so many bytes.
///
/// # Errors
/// `FileTooLarge` if it has more.
pub fn read_at_most(file: File, most: u64) -> io::Result<Vec<u8>> {
    let mut bytes = Vec::new();
    // The file may grow meanwhile.
    file.take(most.saturating_add(1)).read_to_end(&mut bytes)?;
    if bytes.len() as u64 > most {
        let what = format!("it has more than {most} bytes");
        return Err(io::Error::new(io::ErrorKind::FileTooLarge, what));
    }
    Ok(bytes)
}

fn name(kind: FileType) -> &'static str {
    match kind {
        FileType::Directory => "a directory",
        FileType::Fifo => "a FIFO",
        FileType::Socket => "a socket",
        FileType::CharacterDevice | FileType::BlockDevice => "a device",
        _ => "something else",
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_no_file_is_not_opened() {
        let dir = tempfile::tempdir().expect("a directory");
        let fifo = dir.path().join("fifo");
        rustix::fs::mknodat(CWD, &fifo, FileType::Fifo, Mode::RWXU, 0).expect("made");
        for path in [fifo.as_path(), Path::new("/dev/zero"), dir.path()] {
            let error = open_regular(path).expect_err("it is no file");
            assert_eq!(error.kind(), io::ErrorKind::InvalidInput, "{path:?}: {error}");
        }
    }

    /// To open a device may do something: it is looked at first what is there.
    #[test]
    fn what_is_no_file_at_a_place_is_not_opened_for_a_moment() {
        use rustix::fs::inotify;
        let dir = tempfile::tempdir().expect("a directory");
        let fifo = dir.path().join("fifo");
        rustix::fs::mknodat(CWD, &fifo, FileType::Fifo, Mode::RWXU, 0).expect("made");
        let file = dir.path().join("file");
        std::fs::write(&file, b"12345").expect("written");
        std::os::unix::fs::symlink(&file, dir.path().join("link")).expect("made");
        let watch = inotify::init(inotify::CreateFlags::NONBLOCK).expect("a watch");
        for path in [&fifo, &file] {
            inotify::add_watch(&watch, path, inotify::WatchFlags::OPEN).expect("watched");
        }
        let mut seen = [0; 4096];
        for name in ["fifo", "link"] {
            for flags in [OFlags::RDONLY, OFlags::RDWR] {
                let place = Place::find(CWD, &dir.path().join(name)).expect("it is there");
                let error = place.open(flags).expect_err("it is no file");
                let is_link = error.raw_os_error() == Some(Errno::LOOP.raw_os_error());
                assert_eq!(is_link, name == "link", "{error}");
                assert_eq!(error.kind() == io::ErrorKind::InvalidInput, name == "fifo", "{error}");
            }
        }
        assert_eq!(rustix::io::read(&watch, &mut seen), Err(Errno::AGAIN), "none was opened");
        let mut text = String::new();
        let place = Place::find(CWD, &file).expect("it is there");
        place.open(OFlags::RDWR).and_then(|mut file| file.read_to_string(&mut text)).expect("read");
        assert_eq!(text, "12345");
        assert!(rustix::io::read(&watch, &mut seen).is_ok(), "it is seen when one is");
    }

    #[test]
    fn a_bare_name_is_one_below_a_root_alone() {
        let dir = tempfile::tempdir().expect("a directory");
        std::fs::write(dir.path().join("file"), b"12345").expect("written");
        let root = File::open(dir.path()).expect("opened");
        let place = Place::find(root.as_fd(), Path::new("file")).expect("it is in the root");
        place.open(OFlags::RDONLY).expect("it is there");
        assert!(Place::find(CWD, Path::new("Cargo.toml")).is_err(), "it is relative");
    }

    /// To look up `..` fails for a moment in which anything is renamed.
    #[test]
    fn a_place_is_found_while_things_are_renamed() {
        let dir = tempfile::tempdir().expect("a directory");
        std::fs::create_dir_all(dir.path().join("a/b")).expect("made");
        std::fs::write(dir.path().join("a/file"), b"12345").expect("written");
        let root = File::open(dir.path()).expect("opened");
        let done = std::sync::atomic::AtomicBool::new(false);
        std::thread::scope(|scope| {
            scope.spawn(|| {
                let names = ["one", "two"].map(|name| dir.path().join(name));
                std::fs::create_dir(&names[0]).expect("made");
                while !done.load(std::sync::atomic::Ordering::Relaxed) {
                    std::fs::rename(&names[0], &names[1]).expect("renamed");
                    std::fs::rename(&names[1], &names[0]).expect("renamed");
                }
            });
            let found = (0..2000).map(|_| Place::find(root.as_fd(), Path::new("/a/b/../file")));
            let failed = found.filter(Result::is_err).count();
            done.store(true, std::sync::atomic::Ordering::Relaxed);
            assert_eq!(failed, 0);
        });
    }

    #[test]
    fn a_file_is_read_up_to_a_limit() {
        let dir = tempfile::tempdir().expect("a directory");
        let path = dir.path().join("file");
        std::fs::write(&path, b"12345").expect("written");
        assert_eq!(read_regular(&path, 5).expect("read"), b"12345");
        let error = read_regular(&path, 4).expect_err("too long");
        assert_eq!(error.kind(), io::ErrorKind::FileTooLarge);
    }
}
