//! The libraries that gpucr brings: the shim and the software driver, and the real driver's place.

use std::fs::{Metadata, Permissions};
use std::io::{self, Write};
use std::os::unix::fs::{MetadataExt, PermissionsExt};
use std::path::{Path, PathBuf};

use rustix::fs::StatVfsMountFlags;

use crate::base::file_tree::FileTree;
use crate::base::foreign::Foreign;
use crate::base::io_error::IoError;
use crate::image::DriverKind;

mod in_tree;

/// Why a library is not in its place.
#[derive(Debug, thiserror::Error)]
pub enum LibraryError {
    /// A file or directory cannot be read or made.
    #[error(transparent)]
    Io(#[from] IoError),
    /// One of gpucr's own libraries is not where it is installed.
    #[error("{name}, which is a part of gpucr, was not found")]
    Missing {
        /// Its file name.
        name: String,
    },
    /// A library cannot be put where programs load it from.
    #[error("cannot put {path} in place: {source}", path = path.display())]
    NotPut {
        /// Its place.
        path: PathBuf,
        /// Below which gpucr puts libraries.
        root: PathBuf,
        /// Why.
        source: io::Error,
    },
    /// gpucr puts no library there.
    #[error(
        "the program needs {path} as it was, but gpucr puts libraries back only below {}",
        root.display()
    )]
    Misplaced {
        /// Where the program has it.
        path: PathBuf,
        /// Below which gpucr puts libraries.
        root: PathBuf,
    },
}

/// The shim's file as it is built and installed.
pub const SHIM: &str = "libgpucr_intercept.so";
/// The software driver's file as it is built and installed.
pub const SOFT_DRIVER: &str = "libsoftcuda.so";
/// The name under which a program asks for the driver library.
pub const SONAME: &str = "libcuda.so.1";
/// Directories of the form `PREFIX<hash>` hold the libraries that programs run with.
const PREFIX: &str = "gpucr-";
/// What they may hold.
const KINDS: [&str; 2] = ["shim", "soft"];
/// Permission bits of these libraries and their directories.
pub const MODE: u32 = 0o755;
/// A shim has no more bytes than these, with all that a build for debugging adds.
pub const LARGEST_SHIM: u64 = 256 << 20;
/// Environment variable that names the directory of [`SHIM`] and [`SOFT_DRIVER`].
pub const ENV_LIB_DIR: &str = "GPUCR_LIB_DIR";

/// Where the driver's own library may be, besides what the loader's configuration says.
const DRIVER_DIRS: [&str; 6] = [
    "/usr/local/nvidia/lib64",
    "/usr/lib/x86_64-linux-gnu",
    "/usr/lib64",
    "/usr/lib/x86_64-linux-gnu/nvidia/current",
    "/usr/lib/wsl/lib",
    "/usr/local/cuda/compat",
];

/// Where one of gpucr's own libraries is: in `$GPUCR_LIB_DIR`, in `../lib/gpucr` beside the
/// command (installed), or in the command's own directory (a build tree).
///
/// # Errors
/// It is in none of these places, or this program does not know where it is itself.
pub fn own(name: &str) -> Result<PathBuf, LibraryError> {
    let exe =
        std::env::current_exe().map_err(IoError::when("cannot find this program's own file"))?;
    let beside = exe.parent().unwrap_or(Path::new("/"));
    let dirs = std::env::var_os(ENV_LIB_DIR)
        .map(PathBuf::from)
        .into_iter()
        .chain(beside.parent().map(|prefix| prefix.join("lib/gpucr")))
        .chain([beside.to_owned()]);
    dirs.map(|dir| dir.join(name))
        .find(|path| path.is_file())
        .ok_or_else(|| LibraryError::Missing { name: name.to_owned() })
}

/// Puts a library where programs load it from: a directory named by the hash of its bytes, with
/// the driver's soname. So a program keeps the very file that it was started with, however often
/// gpucr is updated. `root` is the directory for all of them, which only this user can write.
///
/// # Errors
/// The directories or the file cannot be made, or somebody else has made or can write them.
pub fn install(bytes: &[u8], kind: &str, root: &Path) -> Result<PathBuf, LibraryError> {
    let path = place_of(kind, blake3::hash(bytes).as_bytes(), root);
    let dir = path.parent().unwrap_or(root);
    let made = root.parent().map_or(Ok(()), std::fs::create_dir_all);
    made.and_then(|()| own_directory(root))
        .and_then(|()| can_be_run_from(root))
        .and_then(|()| own_directory(dir))
        .and_then(|()| put(&path, bytes))
        .map_err(|source| {
            let (path, root) = (path.clone(), root.to_owned());
            LibraryError::NotPut { path, root, source }
        })?;
    // Some programs ask for the name without the version.
    let link = dir.join("libcuda.so");
    match std::os::unix::fs::symlink(SONAME, &link) {
        Err(error) if error.kind() != io::ErrorKind::AlreadyExists => {
            Err(IoError::when(format!("cannot make {}", link.display()))(error).into())
        }
        _ => Ok(path),
    }
}

/// Has a library that an image brings along where the restored program expects it, in its file tree. gpucr puts it there if it
/// is where [`install`] would put it below `root`; anywhere else it has to be there already.
///
/// # Errors
/// The errors of [`install`]; or the place is another one, and the file is not there with these bytes.
pub fn put_back(
    path: &Path,
    bytes: &[u8],
    root: &Path,
    tree: &FileTree,
) -> Result<(), LibraryError> {
    let hash = *blake3::hash(bytes).as_bytes();
    if let Some(kind) = KINDS.iter().find(|kind| path == place_of(kind, &hash, root)) {
        let Some((other, rest)) = tree.parts(path) else {
            return install(bytes, kind, root).map(|_| ());
        };
        let failed = IoError::when(format!("cannot put {} in place", path.display()));
        return Ok(in_tree::put(other, rest, bytes).map_err(failed)?);
    }
    let present = || Foreign::open_in(tree, path).and_then(|file| file.bytes(bytes.len() as u64));
    if is_place_of(path, &hash) && present().is_ok_and(|present| present == bytes) {
        return Ok(());
    }
    Err(LibraryError::Misplaced { path: path.to_owned(), root: root.to_owned() })
}

/// Where [`install`] puts a library with this hash.
pub fn place_of(kind: &str, hash: &[u8; 32], root: &Path) -> PathBuf {
    root.join(format!("{PREFIX}{kind}-{}", crate::base::format::hex(hash))).join(SONAME)
}

/// Whether `path` is where [`install`] would put a library with this hash, below whatever root.
pub fn is_place_of(path: &Path, hash: &[u8; 32]) -> bool {
    let root = path.parent().and_then(Path::parent).filter(|root| root.is_absolute());
    !path.components().any(|part| part.as_os_str() == "..")
        && root.is_some_and(|root| KINDS.iter().any(|kind| path == place_of(kind, hash, root)))
}

/// The hash in the name of a file that [`install`] may have put below `root`: nobody but this user can have put
/// it there. Whether the file still has that hash is not checked.
pub fn installed_hash(path: &Path, kind: &str, root: &Path) -> Option<[u8; 32]> {
    let dir = path.parent()?;
    let name = dir.file_name()?.to_str()?;
    let hash =
        blake3::Hash::from_hex(name.strip_prefix(PREFIX)?.strip_prefix(kind)?.strip_prefix('-')?);
    let hash = *hash.ok()?.as_bytes();
    let is_own = |path: &Path| path.symlink_metadata().is_ok_and(|meta| is_own(&meta));
    (path == place_of(kind, &hash, root) && [root, dir, path].into_iter().all(is_own))
        .then_some(hash)
}

/// Whether it is no link, belongs to the user that gpucr runs as, and nobody else can write it.
fn is_own(meta: &Metadata) -> bool {
    !meta.is_symlink()
        && meta.uid() == rustix::process::geteuid().as_raw()
        && meta.mode() & 0o022 == 0
}

/// Makes a directory that everybody can read and only this user can write, unless it is there.
fn own_directory(dir: &Path) -> io::Result<()> {
    match std::fs::create_dir(dir) {
        // Whatever the umask says.
        Ok(()) => std::fs::set_permissions(dir, Permissions::from_mode(MODE))?,
        Err(error) if error.kind() == io::ErrorKind::AlreadyExists => {}
        Err(error) => return Err(error),
    }
    let meta = dir.symlink_metadata()?;
    if meta.is_dir() && is_own(&meta) {
        return Ok(());
    }
    let what = "is not a directory that belongs to this user and that nobody else can write to";
    Err(io::Error::other(format!("{} {what}", dir.display())))
}

/// Refuses a directory from which no library can be loaded: the program would only say that it finds none.
fn can_be_run_from(dir: &Path) -> io::Result<()> {
    if !rustix::fs::statvfs(dir)?.f_flag.contains(StatVfsMountFlags::NOEXEC) {
        return Ok(());
    }
    let what = "is on a file system from which nothing can be run (noexec)";
    Err(io::Error::other(format!("{} {what}", dir.display())))
}

/// Puts a file in place at once and whole, unless it is there already with these bytes. Then it stays
/// that very file, even if another gpucr puts it there at the same time: a program may have it mapped, and could
/// not be dumped without it.
fn put(path: &Path, bytes: &[u8]) -> io::Result<()> {
    let is_there = || {
        let own = path.symlink_metadata().is_ok_and(|meta| meta.is_file() && is_own(&meta));
        own && std::fs::read(path).is_ok_and(|present| present == bytes)
    };
    if is_there() {
        return Ok(());
    }
    let dir = path.parent().unwrap_or(Path::new("/"));
    let mut file = tempfile::NamedTempFile::new_in(dir)?;
    file.write_all(bytes)?;
    file.as_file().set_permissions(Permissions::from_mode(MODE))?;
    match file.persist_noclobber(path) {
        Ok(_) => Ok(()),
        Err(_) if is_there() => Ok(()),
        // Something else is in its place, which has not the hash that the place is named by.
        Err(error) => error.file.persist(path).map(|_| ()).map_err(|error| error.error),
    }
}

/// The directory in which [`install`] puts libraries: below `/var/lib` for root, since a restore
/// needs them after a reboot, else the user's own cache.
pub fn library_root() -> PathBuf {
    if rustix::process::geteuid().is_root() {
        return PathBuf::from("/var/lib/gpucr");
    }
    let home = || std::env::var_os("HOME").map(|home| PathBuf::from(home).join(".cache"));
    let cache = std::env::var_os("XDG_CACHE_HOME").map(PathBuf::from).or_else(home);
    cache.unwrap_or_else(std::env::temp_dir).join("gpucr")
}

/// Whether `path` is a shim that [`install`] put there.
pub fn is_shim(path: &Path) -> bool {
    parent_starts_with(path, &format!("{PREFIX}shim-"))
}

/// Whether `path` is a software driver that [`install`] put there.
pub fn is_soft(path: &Path) -> bool {
    parent_starts_with(path, &format!("{PREFIX}soft-"))
}

/// Whose library `path` is, by its name.
pub fn kind(path: &Path) -> DriverKind {
    let soft = path.file_name().is_some_and(|name| name == SOFT_DRIVER) || is_soft(path);
    if soft { DriverKind::Soft } else { DriverKind::Nvidia }
}

fn parent_starts_with(path: &Path, prefix: &str) -> bool {
    let parent = path.parent().and_then(Path::file_name).and_then(|name| name.to_str());
    parent.is_some_and(|name| name.starts_with(prefix))
}

/// NVIDIA's driver library on this host, the first one that the loader would find.
pub fn nvidia() -> Option<PathBuf> {
    all_of_nvidia().into_iter().next()
}

/// NVIDIA's driver libraries on this host: from the loader's path, its cache, and the usual places. Besides the
/// driver's own there may be one of the toolkit for older drivers.
pub fn all_of_nvidia() -> Vec<PathBuf> {
    let from_path = std::env::var("LD_LIBRARY_PATH").unwrap_or_default();
    let path_dirs = from_path.split(':').filter(|dir| !dir.is_empty()).map(PathBuf::from);
    let cached = loader_cache().into_iter();
    let usual = DRIVER_DIRS.iter().map(PathBuf::from);
    let candidates = path_dirs.map(|dir| dir.join(SONAME)).chain(cached);
    let mut found = Vec::new();
    for path in candidates.chain(usual.map(|dir| dir.join(SONAME))) {
        // The stub library of the toolkit has no driver behind it.
        let is_stub = path.components().any(|part| part.as_os_str() == "stubs");
        let is_meant =
            path.is_file() && !is_stub && !is_shim(&path) && kind(&path) == DriverKind::Nvidia;
        match path.canonicalize() {
            Ok(path) if is_meant && !found.contains(&path) => found.push(path),
            _ => {}
        }
    }
    found
}

/// What the loader's cache knows under the driver's soname.
fn loader_cache() -> Vec<PathBuf> {
    let output = ["/sbin/ldconfig", "/usr/sbin/ldconfig"]
        .iter()
        .find_map(|ldconfig| std::process::Command::new(ldconfig).arg("-p").output().ok());
    let Some(output) = output else { return Vec::new() };
    String::from_utf8_lossy(&output.stdout)
        .lines()
        .filter(|line| line.trim_start().starts_with(SONAME) && line.contains("x86-64"))
        .filter_map(|line| Some(PathBuf::from(line.split(" => ").nth(1)?)))
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_installed_library_is_known_by_its_directory() {
        let root = tempfile::tempdir().expect("a directory");
        let shim = install(b"a shim", "shim", root.path()).expect("installed");
        let soft = install(b"a driver", "soft", root.path()).expect("installed");
        assert!(is_shim(&shim) && !is_shim(&soft));
        assert_eq!((kind(&soft), kind(&shim)), (DriverKind::Soft, DriverKind::Nvidia));
        assert_eq!(std::fs::read(shim.with_file_name("libcuda.so")).expect("read"), b"a shim");
        // The same bytes give the same place, and a damaged file is put right.
        std::fs::write(&shim, b"damaged").expect("written");
        assert_eq!(install(b"a shim", "shim", root.path()).expect("installed"), shim);
        assert_eq!(std::fs::read(&shim).expect("read"), b"a shim");
        let (one, other) =
            (*blake3::hash(b"a shim").as_bytes(), *blake3::hash(b"another").as_bytes());
        assert!(is_place_of(&shim, &one) && !is_place_of(&shim, &other));
        assert!(!is_place_of(&shim.with_file_name("other"), &one));
        assert!(!is_place_of(Path::new("/etc/passwd"), &one));
        assert_eq!(installed_hash(&shim, "shim", root.path()), Some(one));
        assert_eq!(installed_hash(&shim, "soft", root.path()), None);
        assert_eq!(installed_hash(&shim, "shim", Path::new("/var/lib/gpucr")), None);
        assert_ne!(install(b"another", "shim", root.path()).expect("installed"), shim);
    }

    #[test]
    fn many_at_once_install_one_file() {
        use std::os::unix::fs::MetadataExt;
        for round in 0..20_u8 {
            let root = tempfile::tempdir().expect("a directory");
            let install = || {
                let path = install(&vec![round; 1 << 20], "shim", root.path()).expect("installed");
                path.metadata().expect("it is there").ino()
            };
            let inodes: Vec<u64> = std::thread::scope(|scope| {
                let threads: Vec<_> = (0..4).map(|_| scope.spawn(install)).collect();
                threads.into_iter().map(|thread| thread.join().expect("it ends well")).collect()
            });
            assert!(inodes.iter().all(|inode| *inode == inodes[0]), "{round}: {inodes:?}");
        }
    }
}
