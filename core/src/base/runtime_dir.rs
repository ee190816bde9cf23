//! The directory for what gpucr's processes leave for each other while they run: nobody else gets in.
//!
//! It is `/run/gpucr` for root. Others have one below `$XDG_RUNTIME_DIR`, `/run/user/UID`, or, where there is
//! neither, `/tmp/gpucr-UID`.

use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::fs::DirBuilderExt;
use std::path::{Path, PathBuf};

use rustix::fs::{CWD, Mode, OFlags};
use rustix::io::Errno;

/// Opens the directory of this name in it, which is made if it is not there, as is `/run`, which small containers lack.
///
/// # Errors
/// `PermissionDenied` if somebody else may have made it, or may get in; others where it cannot be made.
pub(crate) fn open(name: &str) -> io::Result<OwnedFd> {
    let path = path();
    let dir = with_parent(&path)?;
    private(dir, Path::new(name), &path.join(name))
}

/// Where the directory of this name is, for people.
pub(crate) fn path_of(name: &str) -> PathBuf {
    path().join(name)
}

fn path() -> PathBuf {
    let user = rustix::process::geteuid();
    if user.is_root() {
        // Not what the environment says: it may be that of the user who has become root.
        return PathBuf::from("/run/gpucr");
    }
    let named = std::env::var_os("XDG_RUNTIME_DIR").map(PathBuf::from);
    let usual = PathBuf::from(format!("/run/user/{}", user.as_raw()));
    let found = named.into_iter().chain([usual]).find(|dir| dir.is_absolute() && dir.is_dir());
    match found {
        Some(dir) => dir.join("gpucr"),
        None => PathBuf::from(format!("/tmp/gpucr-{}", user.as_raw())),
    }
}

/// As [`private`]; the directory in which it lies is made too if it is missing.
fn with_parent(path: &Path) -> io::Result<OwnedFd> {
    let made = private(CWD, path, path);
    match path.parent() {
        Some(parent)
            if made.as_ref().is_err_and(|error| error.kind() == io::ErrorKind::NotFound) =>
        {
            match std::fs::DirBuilder::new().mode(0o755).create(parent) {
                Err(error) if error.kind() != io::ErrorKind::AlreadyExists => made,
                _ => private(CWD, path, path),
            }
        }
        _ => made,
    }
}

/// Opens a directory that belongs to this user alone, and makes it if it is not there; `whole` is its name in
/// errors.
fn private(dir: impl AsFd, path: &Path, whole: &Path) -> io::Result<OwnedFd> {
    let failed = |error: Errno| {
        let error = io::Error::from(error);
        io::Error::new(error.kind(), format!("{}: {error}", whole.display()))
    };
    match rustix::fs::mkdirat(&dir, path, Mode::RWXU) {
        Ok(()) | Err(Errno::EXIST) => {}
        Err(error) => return Err(failed(error)),
    }
    let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
    let opened = rustix::fs::openat(dir, path, flags, Mode::empty()).map_err(failed)?;
    let found = rustix::fs::fstat(&opened).map_err(failed)?;
    let is_own = found.st_uid == rustix::process::geteuid().as_raw();
    if !is_own || Mode::from_raw_mode(found.st_mode).intersects(Mode::RWXG | Mode::RWXO) {
        let what = format!(
            "{} must belong to this user alone: remove it, or correct it (chmod 0700, chown {})",
            whole.display(),
            rustix::process::geteuid().as_raw()
        );
        return Err(io::Error::new(io::ErrorKind::PermissionDenied, what));
    }
    Ok(opened)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::fs::{PermissionsExt, symlink};

    fn made(path: &Path) -> io::Result<OwnedFd> {
        private(CWD, path, path)
    }

    #[test]
    fn the_directory_above_may_be_missing() {
        let scratch = tempfile::tempdir().expect("a directory");
        let path = scratch.path().join("run/gpucr");
        with_parent(&path).expect("both are made");
        let mode =
            |path: &Path| path.metadata().expect("it is there").permissions().mode() & 0o7777;
        let above = mode(&scratch.path().join("run"));
        assert_eq!((mode(&path), above & 0o722), (0o700, 0o700));
        let far = with_parent(&scratch.path().join("a/b/c")).expect_err("not all of a path");
        assert_eq!(far.kind(), io::ErrorKind::NotFound);
    }

    #[test]
    fn a_directory_of_somebody_else_is_not_used() {
        let scratch = tempfile::tempdir().expect("a directory");
        let path = scratch.path().join("gpucr");
        let mode = |mode| {
            std::fs::set_permissions(&path, PermissionsExt::from_mode(mode)).expect("it is ours");
        };
        assert!(made(&path).is_ok() && made(&path).is_ok(), "made, and found again");
        assert_eq!(path.metadata().expect("it is there").permissions().mode() & 0o777, 0o700);
        for open in [0o755, 0o770, 0o702] {
            mode(open);
            let error = made(&path).expect_err("others get in");
            assert_eq!(error.kind(), io::ErrorKind::PermissionDenied, "{open:o}");
        }
        mode(0o700);
        let link = scratch.path().join("link");
        symlink(&path, &link).expect("made");
        assert!(made(&link).is_err(), "a link is followed");
        if rustix::process::geteuid().is_root() {
            std::os::unix::fs::chown(&path, Some(65534), None).expect("root may");
            assert_eq!(made(&path).expect_err("not ours").kind(), io::ErrorKind::PermissionDenied);
        }
    }
}
