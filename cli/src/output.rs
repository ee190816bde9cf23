//! Files that the user has named for gpucr to write.
//!
//! gpucr may be root and the directory everybody's, `/tmp` say, in which others can have put links that lead to
//! files of the system. So a path is followed step by step, and over links of root and of gpucr's own user only.
//! A file is written without a name, or under a hidden one next to its own, and renamed: it appears whole, and what
//! was there before is replaced and not written to. Pipes and devices are written as they are, and so are
//! descriptors that gpucr was started with (`/dev/fd/3`).

use std::ffi::{OsStr, OsString};
use std::fs::{File, OpenOptions};
use std::hash::{BuildHasher, RandomState};
use std::io::{self, ErrorKind, Write};
use std::os::fd::{AsRawFd, OwnedFd};
use std::os::unix::ffi::OsStrExt;
use std::path::{Component, Path};

use rustix::fs::{AtFlags, FileType, Mode, OFlags, PROC_SUPER_MAGIC, Stat};
use rustix::io::Errno;

/// As many links are followed as the kernel follows.
const MOST_LINKS: usize = 40;
/// The mode of a new file, before the user's mask.
const NEW: Mode = Mode::from_raw_mode(0o666);

/// A place in a directory.
struct Place {
    dir: OwnedFd,
    name: OsString,
    found: Option<Found>,
}

/// What is there: no link, and no directory.
struct Found {
    /// Good for no more than to be opened again.
    file: OwnedFd,
    stat: Stat,
    /// It was found as a descriptor, so `dir` is not where it is.
    is_descriptor: bool,
}

impl Found {
    fn new(file: OwnedFd, is_descriptor: bool) -> io::Result<Self> {
        Ok(Self { stat: rustix::fs::fstat(&file)?, file, is_descriptor })
    }

    fn kind(&self) -> FileType {
        FileType::from_raw_mode(self.stat.st_mode)
    }

    /// Whether a file next to it can take its place.
    fn is_replaceable(&self) -> bool {
        self.kind() == FileType::RegularFile && !self.is_descriptor
    }

    /// Opens just this, whatever has its name by now.
    fn open(&self, options: &OpenOptions) -> io::Result<File> {
        options.open(format!("/proc/self/fd/{}", self.file.as_raw_fd()))
    }
}

/// Follows a path to its end, where there need be nothing yet.
fn find(path: &Path) -> io::Result<Place> {
    let mut dir = start(path)?;
    let mut left = steps(path);
    let mut links = 0;
    while let Some(name) = left.pop() {
        let flags = OFlags::PATH | OFlags::NOFOLLOW | OFlags::CLOEXEC;
        let mut found = match rustix::fs::openat(&dir, &name, flags, Mode::empty()) {
            Err(Errno::NOENT) if left.is_empty() => return Ok(Place { dir, name, found: None }),
            other => Found::new(other?, false)?,
        };
        if found.kind() == FileType::Symlink {
            links += 1;
            if links > MOST_LINKS {
                return Err(Errno::LOOP.into());
            }
            trust(&found, &name)?;
            if rustix::fs::fstatfs(&dir)?.f_type != PROC_SUPER_MAGIC {
                let target = rustix::fs::readlinkat(&found.file, c"", Vec::new())?;
                let target = Path::new(OsStr::from_bytes(target.as_bytes()));
                if target.is_absolute() {
                    dir = start(target)?;
                }
                left.extend(steps(target));
                continue;
            }
            // Its text is no path: it leads to a file that is open.
            let file = rustix::fs::openat(&dir, &name, flags - OFlags::NOFOLLOW, Mode::empty())?;
            found = Found::new(file, true)?;
        }
        match found.kind() {
            FileType::Directory => dir = found.file,
            _ if left.is_empty() => return Ok(Place { dir, name, found: Some(found) }),
            _ => return Err(ErrorKind::NotADirectory.into()),
        }
    }
    Err(ErrorKind::IsADirectory.into())
}

/// The directory in which a path begins.
fn start(path: &Path) -> io::Result<OwnedFd> {
    let flags = OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC;
    let dir = if path.is_absolute() { "/" } else { "." };
    Ok(rustix::fs::open(dir, flags, Mode::empty())?)
}

/// The names in a path, the first of them last.
fn steps(path: &Path) -> Vec<OsString> {
    let steps = path.components().rev().filter_map(|step| match step {
        Component::Normal(name) => Some(name.to_owned()),
        Component::ParentDir => Some("..".into()),
        _ => None,
    });
    steps.collect()
}

/// Refuses a link that somebody else has made.
fn trust(link: &Found, name: &OsStr) -> io::Result<()> {
    let owner = link.stat.st_uid;
    if owner == 0 || owner == rustix::process::geteuid().as_raw() {
        return Ok(());
    }
    let name = name.display();
    let what = format!("`{name}` is a link that another user (uid {owner}) has made");
    Err(io::Error::new(ErrorKind::PermissionDenied, what))
}

/// A file that is to be written as a whole.
pub(crate) struct Output {
    place: Place,
    /// What will be there; none where it is written as it is.
    partial: Option<Partial>,
}

/// A file that has no name yet that anybody looks for. If it has one it is removed on drop.
struct Partial {
    file: File,
    hidden: String,
    is_named: bool,
}

impl Output {
    /// Finds the place, and makes sure that a file can be put there. What is there stays until then.
    ///
    /// # Errors
    /// There is no such directory, or none that can be written; a directory is there; the path leads over a link
    /// that somebody else has made.
    pub(crate) fn prepare(path: &Path) -> io::Result<Self> {
        let place = find(path)?;
        let partial = match &place.found {
            Some(found) if !found.is_replaceable() => None,
            old => {
                let mode = old.as_ref().map(|old| Mode::from_raw_mode(old.stat.st_mode & 0o777));
                Some(Partial::create(&place.dir, mode)?)
            }
        };
        Ok(Self { place, partial })
    }

    /// Whether a file is made that takes the place of what was there; not a pipe or device, which is written as it is.
    pub(crate) fn is_file(&self) -> bool {
        self.partial.is_some()
    }

    /// Removes the file that was there, if there was one.
    ///
    /// # Errors
    /// It cannot be removed.
    pub(crate) fn remove_old(&mut self) -> io::Result<()> {
        if self.place.found.as_ref().is_some_and(Found::is_replaceable) {
            match rustix::fs::unlinkat(&self.place.dir, &self.place.name, AtFlags::empty()) {
                Err(Errno::NOENT) => {}
                other => other?,
            }
            self.place.found = None;
        }
        Ok(())
    }

    /// Writes the file, which then has its name. To a pipe or device it writes.
    ///
    /// # Errors
    /// It cannot be written, and what was there is as it was; a pipe or device may have got a part.
    pub(crate) fn write(self, bytes: &[u8]) -> io::Result<()> {
        self.write_by(|file| file.write_all(bytes))
    }

    /// The same with a function that writes it.
    ///
    /// # Errors
    /// As for [`write`](Self::write); or that of the function, after which what was there is as it was.
    pub(crate) fn write_by<E: From<io::Error>>(
        mut self,
        write: impl FnOnce(&mut File) -> Result<(), E>,
    ) -> Result<(), E> {
        let Place { dir, name, found } = &self.place;
        let Some(partial) = &mut self.partial else {
            let found = found.as_ref().ok_or(io::Error::from(ErrorKind::NotFound))?;
            return write(&mut found.open(File::options().write(true).truncate(true))?);
        };
        write(&mut partial.file)?;
        partial.give_name(dir)?;
        let renamed = rustix::fs::renameat(dir, &partial.hidden, dir, name);
        renamed.map_err(io::Error::from)?;
        self.partial = None;
        Ok(())
    }
}

impl Partial {
    fn create(dir: &OwnedFd, mode: Option<Mode>) -> io::Result<Self> {
        // Hard to guess, so that nobody can take the name. Whatever has it is not opened.
        let hidden = format!(".gpucr-{:016x}", RandomState::new().hash_one(std::process::id()));
        let flags = OFlags::WRONLY | OFlags::CLOEXEC;
        // Without a name, so that nothing is left of it if gpucr is killed; not every file system can do that.
        let (file, is_named) = match rustix::fs::openat(dir, c".", flags | OFlags::TMPFILE, NEW) {
            Ok(file) => (file, false),
            Err(Errno::OPNOTSUPP | Errno::ISDIR) => {
                let flags = flags | OFlags::CREATE | OFlags::EXCL;
                (rustix::fs::openat(dir, &hidden, flags, NEW)?, true)
            }
            Err(error) => return Err(error.into()),
        };
        let file = File::from(file);
        if let Some(mode) = mode {
            rustix::fs::fchmod(&file, mode)?;
        }
        Ok(Self { file, hidden, is_named })
    }

    /// Gives it its hidden name, by which it can take another one's place.
    fn give_name(&mut self, dir: &OwnedFd) -> io::Result<()> {
        if !self.is_named {
            let own = format!("/proc/self/fd/{}", self.file.as_raw_fd());
            rustix::fs::linkat(rustix::fs::CWD, own, dir, &self.hidden, AtFlags::SYMLINK_FOLLOW)?;
            self.is_named = true;
        }
        Ok(())
    }
}

impl Drop for Output {
    fn drop(&mut self) {
        if let Some(Partial { hidden, is_named: true, .. }) = &self.partial {
            // It is of no use to anybody.
            let _ = rustix::fs::unlinkat(&self.place.dir, hidden, AtFlags::empty());
        }
    }
}

/// Opens a file, pipe or device to add to it; a file is made if it is not there.
///
/// # Errors
/// It cannot be written; the path leads over a link that somebody else has made; a file has further names, which
/// somebody else may have given to a file of the system.
pub(crate) fn append(path: &Path) -> io::Result<File> {
    append_to(find(path)?)
}

/// As [`append`], but where no file is there none is made: what is given takes whatever is written, and keeps nothing.
///
/// # Errors
/// As for [`append`], as far as that can be told.
pub(crate) fn appendable(path: &Path) -> io::Result<File> {
    let place = find(path)?;
    match &place.found {
        None => File::options().append(true).open("/dev/null"),
        Some(_) => append_to(place),
    }
}

fn append_to(place: Place) -> io::Result<File> {
    let Some(found) = place.found else {
        let flags = OFlags::CREATE | OFlags::EXCL | OFlags::WRONLY | OFlags::APPEND;
        let file = rustix::fs::openat(place.dir, &place.name, flags | OFlags::CLOEXEC, NEW)?;
        return Ok(file.into());
    };
    if found.is_replaceable() && found.stat.st_nlink > 1 {
        return Err(io::Error::new(ErrorKind::PermissionDenied, "the file has more than one name"));
    }
    found.open(File::options().append(true))
}
