//! Whose files the paths of a program name: those of this host, or those below another root directory.
//!
//! What is below another root belongs to a container, which may be hostile: links in it are followed inside of it alone,
//! and none of the kernel's magic ones.

use std::fs::{File, Metadata};
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::path::{Component, Path, PathBuf};
use std::sync::Arc;

use rustix::fs::{CWD, Mode, OFlags, ResolveFlags};

use super::careful::{self, Place};

/// A root directory, from which paths are looked up.
#[derive(Debug, Clone, Default)]
pub struct FileTree(Option<Arc<Other>>);

/// A root that is not that of this process.
#[derive(Debug)]
struct Other {
    root: OwnedFd,
    /// What is at some places in the place of what is there in the root.
    mounts: Vec<(PathBuf, OwnedFd)>,
}

impl FileTree {
    /// The one of this process.
    pub fn host() -> Self {
        Self::default()
    }

    /// The one whose root is at `path`.
    ///
    /// # Errors
    /// It is no directory, or may not be looked at.
    pub fn below(path: &Path) -> io::Result<Self> {
        let flags = OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC;
        Ok(Self::of(rustix::fs::open(path, flags, Mode::empty())?, Vec::new()))
    }

    /// The one with this root directory, and something else at some places. Links lead from none of them to another.
    pub fn of(root: OwnedFd, mounts: Vec<(PathBuf, OwnedFd)>) -> Self {
        Self(Some(Arc::new(Other { root, mounts })))
    }

    /// The root directory; none if it is that of this process.
    pub(crate) fn root(&self) -> Option<BorrowedFd<'_>> {
        self.0.as_ref().map(|other| other.root.as_fd())
    }

    /// What is mounted, and where.
    pub(crate) fn mounts(&self) -> impl Iterator<Item = (&Path, BorrowedFd<'_>)> {
        let mounts = self.0.iter().flat_map(|other| &other.mounts);
        mounts.map(|(place, source)| (place.as_path(), source.as_fd()))
    }

    /// The directory, or file, below which a path is looked up, and the rest of the path; none if both are as they are.
    pub(crate) fn parts<'p>(&self, path: &'p Path) -> Option<(BorrowedFd<'_>, &'p Path)> {
        let root = self.root()?;
        // One that goes up again is not below what it begins with. The kernel tells none like that.
        let goes_up = path.components().any(|part| part == Component::ParentDir);
        let mounts = self.mounts().filter(|_| !goes_up);
        let below = mounts.filter_map(|(at, fd)| Some((at, fd, path.strip_prefix(at).ok()?)));
        let innermost = below.max_by_key(|(at, ..)| at.components().count());
        Some(innermost.map_or((root, path), |(_, source, rest)| (source, rest)))
    }

    /// Finds what a path names, whose links are followed, and opens nothing: the descriptor says only what it is.
    ///
    /// # Errors
    /// It is not there, or may not be looked at.
    pub(crate) fn find(&self, path: &Path) -> io::Result<File> {
        self.look_up(path, ResolveFlags::empty())
    }

    /// The same where no link leads there.
    ///
    /// # Errors
    /// As [`find`](Self::find); `ELOOP` if there is a link.
    pub(crate) fn find_without_links(&self, path: &Path) -> io::Result<File> {
        self.look_up(path, ResolveFlags::NO_SYMLINKS)
    }

    /// Finds what a path names, to which no link leads, in the root directory itself, whatever is mounted there.
    ///
    /// # Errors
    /// As [`find_without_links`](Self::find_without_links).
    pub(crate) fn find_in_root(&self, path: &Path) -> io::Result<File> {
        let resolve =
            ResolveFlags::IN_ROOT | ResolveFlags::NO_MAGICLINKS | ResolveFlags::NO_SYMLINKS;
        let flags = OFlags::PATH | OFlags::CLOEXEC;
        Ok(careful::open_below(self.root().unwrap_or(CWD), path, flags, resolve)?.into())
    }

    fn look_up(&self, path: &Path, more: ResolveFlags) -> io::Result<File> {
        let flags = OFlags::PATH | OFlags::CLOEXEC;
        let Some((root, rest)) = self.parts(path) else {
            let found = match more.is_empty() {
                true => rustix::fs::open(path, flags, Mode::empty()),
                false => rustix::fs::openat2(CWD, path, flags, Mode::empty(), more),
            };
            return Ok(found?.into());
        };
        if rest.as_os_str().is_empty() {
            return Ok(root.try_clone_to_owned()?.into());
        }
        let resolve = ResolveFlags::IN_ROOT | ResolveFlags::NO_MAGICLINKS | more;
        Ok(careful::open_below(root, rest, flags, resolve)?.into())
    }

    /// What is known of what a path names, whose links are followed.
    ///
    /// # Errors
    /// As [`find`](Self::find).
    pub fn metadata(&self, path: &Path) -> io::Result<Metadata> {
        self.find(path)?.metadata()
    }

    /// The place of a file to which no link leads.
    ///
    /// # Errors
    /// As [`Place::find`].
    pub(crate) fn place(&self, path: &Path) -> io::Result<Place> {
        let (root, rest) = self.parts(path).unwrap_or((CWD, path));
        Place::find(root, rest)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::fs::{MetadataExt, symlink};

    #[test]
    fn links_lead_nowhere_else() {
        let dir = tempfile::tempdir().expect("a directory");
        let root = dir.path().join("root");
        std::fs::create_dir_all(root.join("etc")).expect("made");
        std::fs::write(root.join("etc/passwd"), b"inside").expect("written");
        std::fs::write(dir.path().join("secret"), b"outside").expect("written");
        symlink("/etc/passwd", root.join("absolute")).expect("made");
        symlink("../../../../etc/passwd", root.join("upwards")).expect("made");
        symlink(dir.path().join("secret"), root.join("outside")).expect("made");
        symlink("/proc/self/exe", root.join("magic")).expect("made");
        let tree = FileTree::below(&root).expect("it is one");
        let inside = std::fs::metadata(root.join("etc/passwd")).expect("it is there");
        for path in ["/etc/passwd", "/absolute", "/upwards", "/../../etc/passwd"] {
            let found = tree.metadata(Path::new(path)).expect(path);
            assert_eq!((found.dev(), found.ino()), (inside.dev(), inside.ino()), "{path}");
        }
        for path in ["/outside", "/magic", "/secret", "/../secret"] {
            tree.metadata(Path::new(path)).expect_err(path);
        }
        tree.find_without_links(Path::new("/etc/passwd")).expect("no link leads there");
        tree.find_without_links(Path::new("/absolute")).expect_err("it is a link");
        assert!(FileTree::below(&root.join("etc/passwd")).is_err(), "it is a file");
        // Something else at a place.
        let open = |path| OwnedFd::from(File::open(path).expect("opened"));
        let tree = FileTree::of(open(root.as_path()), vec![("/etc".into(), open(dir.path()))]);
        let found = |path: &str| tree.metadata(Path::new(path)).map(|meta| meta.len());
        assert_eq!(found("/etc/secret").expect("it is there"), 7);
        assert!(tree.metadata(Path::new("/etc")).expect("it is there").is_dir());
        found("/etc/passwd").expect_err("it is covered");
        found("/etc/../root").expect_err("it is not below what is there");
        let host = FileTree::host().metadata(Path::new("/proc/self/exe")).expect("it is there");
        assert!(host.is_file());
    }
}
