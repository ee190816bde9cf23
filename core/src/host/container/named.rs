//! The root directory, and what is mounted in it, as the command line names them.

use std::os::fd::OwnedFd;
use std::path::{Path, PathBuf};

use rustix::fs::{CWD, Mode, OFlags, ResolveFlags};

use super::mount::ContainerError;
use crate::base::file_tree::FileTree;

/// The magic number of the file system of processes, linux/magic.h.
const PROC: rustix::fs::FsWord = 0x9fa0;

/// Finds a directory for the root of a program, and for each of some places in it what is mounted there. The directory may
/// belong to a container that is there still, and be mounted elsewhere.
///
/// # Errors
/// One is not there, or is not what it has to be; or it is found through `/proc`: it is looked for twice, the second time by a
/// gpucr that sees other processes.
pub fn named(root: &Path, mounts: &[(PathBuf, PathBuf)]) -> Result<FileTree, ContainerError> {
    let open_mount =
        |(place, source): &(PathBuf, PathBuf)| Ok((place.clone(), open(source, OFlags::empty())?));
    let mounts = mounts.iter().map(open_mount).collect::<Result<_, ContainerError>>()?;
    Ok(FileTree::of(open(root, OFlags::DIRECTORY)?, mounts))
}

fn open(path: &Path, more: OFlags) -> Result<OwnedFd, ContainerError> {
    let failed = |error: rustix::io::Errno| {
        let (path, source) = (path.to_owned(), error.into());
        ContainerError::Root { path, source }
    };
    let flags = OFlags::PATH | OFlags::CLOEXEC | more;
    let opened = rustix::fs::open(path, flags, Mode::empty()).map_err(failed)?;
    // The links that lead from one process's files to another's are the kernel's magic ones.
    let again = rustix::fs::openat2(CWD, path, flags, Mode::empty(), ResolveFlags::NO_MAGICLINKS);
    let is_in_proc = rustix::fs::fstatfs(&opened).map_err(failed)?.f_type == PROC;
    match again {
        Ok(again) if !is_in_proc => Ok(again),
        Ok(_) | Err(rustix::io::Errno::LOOP) => {
            Err(ContainerError::ThroughProc { path: path.to_owned() })
        }
        Err(error) => Err(failed(error)),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn nothing_is_found_through_a_process() {
        let dir = tempfile::tempdir().expect("a directory");
        std::os::unix::fs::symlink(dir.path(), dir.path().join("link")).expect("made");
        std::os::unix::fs::symlink("/proc/self/root", dir.path().join("magic")).expect("made");
        std::fs::write(dir.path().join("file"), "").expect("written");
        let mounts = |source: &Path| [(PathBuf::from("/data"), source.to_owned())];
        for path in [dir.path().to_owned(), dir.path().join("link")] {
            named(&path, &mounts(&dir.path().join("file"))).expect("it is found");
        }
        let own = format!("/proc/{}/root", std::process::id());
        for path in ["/proc/self/root", &own, "/proc/self/cwd", "/proc", "/proc/sys"] {
            let path = Path::new(path);
            for found in [named(path, &[]), named(dir.path(), &mounts(path))] {
                let refused = matches!(found, Err(ContainerError::ThroughProc { .. }));
                assert!(refused, "{}", path.display());
            }
        }
        let found = named(&dir.path().join("magic"), &[]);
        assert!(matches!(found, Err(ContainerError::ThroughProc { .. })));
        for path in ["file", "nothing"] {
            let found = named(&dir.path().join(path), &[]);
            assert!(matches!(found, Err(ContainerError::Root { .. })), "{path}");
        }
    }
}
