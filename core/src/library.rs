//! The libraries that gpucr brings: the shim and the software driver, and the real driver's place.

use std::path::{Path, PathBuf};

use crate::error::Error;
use crate::image::DriverKind;

/// The shim's file as it is built and installed.
pub const SHIM: &str = "libgpucr_intercept.so";
/// The software driver's file as it is built and installed.
pub const SOFT_DRIVER: &str = "libsoftcuda.so";
/// The name under which a program asks for the driver library.
pub const SONAME: &str = "libcuda.so.1";
/// Directories of the form `PREFIX<hash>` hold the libraries that programs run with.
const PREFIX: &str = "gpucr-";
/// Environment variable that names the directory of [`SHIM`] and [`SOFT_DRIVER`].
pub const ENV_LIB_DIR: &str = "GPUCR_LIB_DIR";

/// Where the driver's own library may be, beside what the loader's configuration says.
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
pub fn own(name: &str) -> Result<PathBuf, Error> {
    let exe = std::env::current_exe().map_err(|source| Error::Io {
        what: "cannot find this program's own file".into(),
        source,
    })?;
    let beside = exe.parent().unwrap_or(Path::new("/"));
    let dirs = std::env::var_os(ENV_LIB_DIR)
        .map(PathBuf::from)
        .into_iter()
        .chain([beside.join("../lib/gpucr"), beside.to_owned()]);
    dirs.map(|dir| dir.join(name))
        .find(|path| path.is_file())
        .ok_or_else(|| Error::NoLibrary { name: name.to_owned() })
}

/// Puts a library where programs load it from: a directory named by the hash of its bytes, with
/// the driver's soname. So a program keeps the very file that it was started with, however often
/// gpucr is updated. `root` is the directory for all of them.
pub fn install(bytes: &[u8], kind: &str, root: &Path) -> Result<PathBuf, Error> {
    let dir = root.join(dir_name(kind, bytes));
    let path = dir.join(SONAME);
    put(&path, bytes, 0o755)?;
    // Some programs ask for the name without the version.
    let link = dir.join("libcuda.so");
    match std::os::unix::fs::symlink(SONAME, &link) {
        Err(error) if error.kind() != std::io::ErrorKind::AlreadyExists => {
            Err(Error::Io { what: format!("cannot make {}", link.display()), source: error })
        }
        _ => Ok(path),
    }
}

fn dir_name(kind: &str, bytes: &[u8]) -> String {
    format!("{PREFIX}{kind}-{}", &blake3::hash(bytes).to_hex()[..16])
}

/// Whether `path` is where [`install`] would put a library of these bytes, below whatever root.
pub fn is_place_of(path: &Path, bytes: &[u8]) -> bool {
    let parent = path.parent().and_then(Path::file_name).and_then(|name| name.to_str());
    path.is_absolute()
        && !path.components().any(|part| part.as_os_str() == "..")
        && path.file_name().is_some_and(|name| name == SONAME)
        && ["shim", "soft"].iter().any(|kind| parent == Some(&dir_name(kind, bytes)))
}

/// Puts a file in place at once and whole, unless it is there already with these bytes. Then it stays
/// that very file, whoever else puts it there at the same time: a program may have it mapped, and could
/// not be dumped without it.
pub fn put(path: &Path, bytes: &[u8], mode: u32) -> Result<(), Error> {
    use std::io::Write;
    use std::os::unix::fs::PermissionsExt;
    let is_there = || std::fs::read(path).is_ok_and(|present| present == bytes);
    if is_there() {
        return Ok(());
    }
    let failed = |source| Error::Io { what: format!("cannot write {}", path.display()), source };
    let dir = path.parent().unwrap_or(Path::new("/"));
    std::fs::create_dir_all(dir).map_err(failed)?;
    let mut file = tempfile::NamedTempFile::new_in(dir).map_err(failed)?;
    file.write_all(bytes).map_err(failed)?;
    file.as_file().set_permissions(std::fs::Permissions::from_mode(mode)).map_err(failed)?;
    match file.persist_noclobber(path) {
        Ok(_) => Ok(()),
        Err(_) if is_there() => Ok(()),
        // Something else is in its place.
        Err(error) => error.file.persist(path).map(|_| ()).map_err(|error| failed(error.error)),
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

/// Whether [`install`] put the file there, and it is as it was then.
pub fn is_installed(path: &Path) -> bool {
    std::fs::read(path).is_ok_and(|bytes| is_place_of(path, &bytes))
}

/// Whether `path` is a shim that [`install`] put there.
pub fn is_shim(path: &Path) -> bool {
    parent_starts_with(path, &format!("{PREFIX}shim-"))
}

/// Whose library `path` is.
pub fn kind(path: &Path) -> DriverKind {
    let soft = path.file_name().is_some_and(|name| name == SOFT_DRIVER)
        || parent_starts_with(path, &format!("{PREFIX}soft-"));
    if soft { DriverKind::Soft } else { DriverKind::Nvidia }
}

fn parent_starts_with(path: &Path, prefix: &str) -> bool {
    let parent = path.parent().and_then(Path::file_name).and_then(|name| name.to_str());
    parent.is_some_and(|name| name.starts_with(prefix))
}

/// NVIDIA's driver library on this host: from the loader's path, its cache, or the usual places.
pub fn nvidia() -> Option<PathBuf> {
    let from_path = std::env::var("LD_LIBRARY_PATH").unwrap_or_default();
    let path_dirs = from_path.split(':').filter(|dir| !dir.is_empty()).map(PathBuf::from);
    let cached = loader_cache().into_iter();
    let usual = DRIVER_DIRS.iter().map(PathBuf::from);
    let candidates = path_dirs.map(|dir| dir.join(SONAME)).chain(cached);
    candidates
        .chain(usual.map(|dir| dir.join(SONAME)))
        .filter(|path| path.is_file() && !is_shim(path) && kind(path) == DriverKind::Nvidia)
        // The stub library of the toolkit has no driver behind it.
        .find(|path| !path.components().any(|part| part.as_os_str() == "stubs"))
        .and_then(|path| path.canonicalize().ok())
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
        assert!(is_place_of(&shim, b"a shim") && !is_place_of(&shim, b"another"));
        assert!(!is_place_of(&shim.with_file_name("other"), b"a shim"));
        assert!(!is_place_of(Path::new("/etc/passwd"), b"a shim"));
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
