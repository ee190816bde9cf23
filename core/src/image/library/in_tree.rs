//! Libraries in the file tree of a container, which may be changed by others meanwhile: every step is made from a directory
//! that is open, and follows no link.

use std::fs::{File, Permissions};
use std::io::{self, Read, Write};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::{MetadataExt, PermissionsExt};
use std::path::{Component, Path};

use rustix::fs::{AtFlags, Mode, OFlags};
use rustix::io::Errno;

use crate::base::careful;

/// Permission bits of these libraries and their directories.
const MODE: u32 = 0o755;

/// Puts a library in place below `root`, unless it is there with these bytes. The directory that it is in, and the one above,
/// have to belong to this user alone.
pub(super) fn put(root: BorrowedFd<'_>, path: &Path, bytes: &[u8]) -> io::Result<()> {
    let (parent, name) = path.parent().zip(path.file_name()).ok_or(io::ErrorKind::InvalidInput)?;
    let directory = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
    let open = |dir: BorrowedFd<'_>, name: &std::ffi::OsStr| {
        rustix::fs::openat(dir, name, directory, Mode::empty())
    };
    let mut opened = vec![open(root, ".".as_ref())?];
    for part in parent.components() {
        let Component::Normal(part) = part else { continue };
        let above = opened.last().map_or(root, |dir| dir.as_fd());
        opened.push(match open(above, part) {
            Err(Errno::NOENT) => make(above, part)?,
            found => found?,
        });
    }
    let own = opened.iter().rev().take(2);
    for dir in own {
        let meta = File::from(dir.try_clone()?).metadata()?;
        if !is_own(&meta) {
            let what =
                format!("{} or the directory above it may be written by others", parent.display());
            return Err(io::Error::other(what));
        }
    }
    let dir = opened.last().map_or(root, |dir| dir.as_fd());
    if !is_there(dir, name, bytes) {
        replace(dir, name, bytes)?;
    }
    match rustix::fs::symlinkat(name, dir, "libcuda.so") {
        Err(error) if error != Errno::EXIST => Err(error.into()),
        _ => Ok(()),
    }
}

fn is_own(meta: &std::fs::Metadata) -> bool {
    meta.uid() == rustix::process::geteuid().as_raw() && meta.mode() & 0o022 == 0
}

fn make(above: BorrowedFd<'_>, name: &std::ffi::OsStr) -> io::Result<OwnedFd> {
    let made = match rustix::fs::mkdirat(above, name, Mode::RWXU) {
        Err(Errno::EXIST) => false,
        made => made.map(|()| true)?,
    };
    let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
    let dir = rustix::fs::openat(above, name, flags, Mode::empty())?;
    if made {
        rustix::fs::fchmod(&dir, Mode::from_raw_mode(MODE))?;
    }
    Ok(dir)
}

/// Whether a file of this user has this name and these bytes.
fn is_there(dir: BorrowedFd<'_>, name: &std::ffi::OsStr, bytes: &[u8]) -> bool {
    let read = || -> io::Result<bool> {
        let file = careful::open_regular_in(dir, name, OFlags::RDONLY)?;
        let meta = file.metadata()?;
        if !is_own(&meta) || meta.len() != bytes.len() as u64 {
            return Ok(false);
        }
        let mut present = Vec::with_capacity(bytes.len());
        file.take(bytes.len() as u64 + 1).read_to_end(&mut present)?;
        Ok(present == bytes)
    };
    read().unwrap_or(false)
}

/// Writes the file under another name first, so that it is there whole.
fn replace(dir: BorrowedFd<'_>, name: &std::ffi::OsStr, bytes: &[u8]) -> io::Result<()> {
    let mut random = [0; 8];
    rustix::rand::getrandom(&mut random, rustix::rand::GetRandomFlags::empty())?;
    let mut passing = b".".to_vec();
    passing.extend(name.as_bytes());
    passing.extend(format!(".{:016x}", u64::from_ne_bytes(random)).as_bytes());
    let passing = std::ffi::OsStr::from_bytes(&passing);
    let flags = OFlags::WRONLY | OFlags::CREATE | OFlags::EXCL | OFlags::NOFOLLOW | OFlags::CLOEXEC;
    let mut file = File::from(rustix::fs::openat(dir, passing, flags, Mode::RUSR | Mode::WUSR)?);
    let written = file
        .write_all(bytes)
        .and_then(|()| file.set_permissions(Permissions::from_mode(MODE)))
        .and_then(|()| Ok(rustix::fs::renameat(dir, passing, dir, name)?));
    if written.is_err() {
        let _ = rustix::fs::unlinkat(dir, passing, AtFlags::empty());
    }
    written
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::fs::symlink;

    #[test]
    fn a_library_gets_to_its_place_and_nowhere_else() {
        let dir = tempfile::tempdir().expect("a directory");
        let (root, outside) = (dir.path().join("root"), dir.path().join("outside"));
        for dir in [&root, &outside] {
            std::fs::create_dir(dir).expect("made");
        }
        let opened = File::open(&root).expect("opened");
        let path = Path::new("/var/lib/gpucr/gpucr-shim-0/libcuda.so.1");
        let real = root.join("var/lib/gpucr/gpucr-shim-0/libcuda.so.1");
        let put = |bytes: &[u8]| super::put(opened.as_fd(), path, bytes);
        put(b"library").expect("put");
        assert_eq!(std::fs::read(&real).expect("read"), b"library");
        assert_eq!(std::fs::read(real.with_file_name("libcuda.so")).expect("read"), b"library");
        let inode = || real.symlink_metadata().expect("it is there").ino();
        let before = inode();
        put(b"library").expect("it is there");
        assert_eq!(inode(), before, "it stays that very file");

        // A link to a file outside is replaced, and not followed; a pipe is not waited for.
        let secret = outside.join("secret");
        std::fs::write(&secret, b"secret").expect("written");
        std::fs::remove_file(&real).expect("removed");
        symlink(&secret, &real).expect("made");
        put(b"library").expect("put");
        assert_eq!(std::fs::read(&secret).expect("read"), b"secret");
        assert!(real.symlink_metadata().expect("it is there").is_file());
        std::fs::remove_file(&real).expect("removed");
        let fifo = rustix::fs::FileType::Fifo;
        rustix::fs::mknodat(rustix::fs::CWD, &real, fifo, Mode::RUSR, 0).expect("made");
        put(b"library").expect("put");
        assert_eq!(std::fs::read(&real).expect("read"), b"library");

        // A directory on the way that is a link, or that others can write to.
        let parent = root.join("var/lib/gpucr");
        std::fs::set_permissions(&parent, Permissions::from_mode(0o777)).expect("set");
        put(b"library").expect_err("others may write there");
        std::fs::remove_dir_all(&parent).expect("removed");
        symlink(&outside, &parent).expect("made");
        put(b"library").expect_err("it is a link");
        let names = std::fs::read_dir(&outside).expect("read").count();
        assert_eq!(names, 1, "nothing is made outside");
    }
}
