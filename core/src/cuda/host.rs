//! The driver libraries that this host vouches for.
//!
//! gpucr runs as root over programs of other people. To open a driver library runs its code, so gpucr opens
//! none because a program maps it, and none because an image names it. It opens
//!
//! - NVIDIA's driver, where the loader would find it for the user that gpucr runs as;
//! - its own software driver: the one that came with this gpucr, or one that `gpucr run` of this user has
//!   [installed](crate::image::library::install);
//! - the library that [`ENV_HOST_DRIVER`] names in gpucr's own environment.
//!
//! What a program maps is compared with these, by file or by content, and so is what an image says.

use std::collections::HashMap;
use std::fs::File;
use std::io;
use std::os::fd::AsRawFd;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::sync::{Arc, OnceLock};

use parking_lot::Mutex;

use super::Driver;
use super::driver::OpenError;
use crate::base::foreign::{FileId, Foreign};
use crate::base::io_error::IoError;
use crate::image::DriverKind;
use crate::image::library;

/// Environment variable of gpucr that names one driver library more, for whose code its caller answers.
pub const ENV_HOST_DRIVER: &str = "GPUCR_HOST_DRIVER";

/// A driver library that the host vouches for, open as a file. Whatever takes its place in the file system
/// later, it is this file that is hashed and loaded.
#[derive(Debug)]
pub struct HostDriver {
    path: PathBuf,
    kind: DriverKind,
    file: File,
    id: FileId,
    size: u64,
    hash: OnceLock<[u8; 32]>,
}

impl HostDriver {
    /// The library at `path`, for which the caller vouches.
    ///
    /// # Errors
    /// It cannot be opened.
    pub fn vouched(path: &Path, kind: DriverKind) -> io::Result<Self> {
        let path = path.canonicalize()?;
        let file = File::open(&path)?;
        let (id, size) = (FileId::of(&file)?, file.metadata()?.len());
        Ok(Self { path, kind, file, id, size, hash: OnceLock::new() })
    }

    /// Where it is, with no link on the way.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Whose it is.
    pub fn kind(&self) -> DriverKind {
        self.kind
    }

    /// Its file.
    pub(super) fn file(&self) -> &File {
        &self.file
    }

    /// BLAKE3 of its bytes, which takes all cores some hundredths of a second for the 100 MB of NVIDIA's.
    ///
    /// # Errors
    /// It cannot be read.
    pub fn hash(&self) -> Result<[u8; 32], IoError> {
        if let Some(hash) = self.hash.get() {
            return Ok(*hash);
        }
        let mut hasher = blake3::Hasher::new();
        let path = format!("/proc/self/fd/{}", self.file.as_raw_fd());
        hasher.update_mmap_rayon(path).map_err(|source| self.unreadable(source))?;
        Ok(*self.hash.get_or_init(|| *hasher.finalize().as_bytes()))
    }

    /// Its bytes.
    ///
    /// # Errors
    /// It cannot be read.
    pub fn bytes(&self) -> Result<Vec<u8>, IoError> {
        let mut bytes = vec![0; self.size as usize];
        let read = self.file.read_exact_at(&mut bytes, 0);
        read.map_err(|source| self.unreadable(source))?;
        Ok(bytes)
    }

    fn unreadable(&self, source: io::Error) -> IoError {
        IoError { what: format!("cannot read {}", self.path.display()), source }
    }

    /// Whether `file` is this library: the very file, or another one with the same bytes.
    ///
    /// # Errors
    /// `file` cannot be read.
    pub(crate) fn is(&self, file: Foreign) -> Result<bool, IoError> {
        if file.id() == self.id {
            return Ok(true);
        }
        if file.size() != self.size {
            return Ok(false);
        }
        let what = || format!("cannot compare a library with {}", self.path.display());
        let theirs = file.hash().map_err(|source| IoError { what: what(), source })?;
        Ok(theirs == self.hash()?)
    }
}

/// The driver libraries of this host, and which of them are open: to open one takes a tenth of a second and
/// more.
#[derive(Default)]
pub struct Drivers {
    host: OnceLock<Vec<Arc<HostDriver>>>,
    installed: Mutex<HashMap<PathBuf, Arc<HostDriver>>>,
    open: Mutex<HashMap<PathBuf, Arc<Driver>>>,
}

impl Drivers {
    /// The driver of this library, opened and initialised on its first use.
    ///
    /// # Errors
    /// It cannot be loaded, is too old, or does not start.
    pub fn open(&self, library: &Arc<HostDriver>) -> Result<Arc<Driver>, OpenError> {
        let mut open = self.open.lock();
        if let Some(driver) = open.get(library.path()) {
            return Ok(driver.clone());
        }
        let driver = Arc::new(Driver::open(library)?);
        open.insert(library.path().to_owned(), driver.clone());
        Ok(driver)
    }

    /// The one that a file is which somebody has mapped at `path`.
    ///
    /// # Errors
    /// Files cannot be compared.
    pub(crate) fn is_one(
        &self,
        path: &Path,
        open: impl Fn() -> io::Result<Foreign>,
    ) -> Result<Option<Arc<HostDriver>>, IoError> {
        for host in self.installed(path).iter().chain(self.of_host()) {
            // One that cannot be opened is none of this host's.
            let Ok(file) = open() else { break };
            if host.is(file)? {
                return Ok(Some(host.clone()));
            }
        }
        Ok(None)
    }

    /// The library with this hash, if it is one of them.
    ///
    /// # Errors
    /// One cannot be read.
    pub fn with_hash(&self, hash: &[u8; 32]) -> Result<Option<Arc<HostDriver>>, IoError> {
        let place = library::place_of("soft", hash, &library::library_root());
        for host in self.installed(&place).iter().chain(self.of_host()) {
            if host.hash()? == *hash {
                return Ok(Some(host.clone()));
            }
        }
        Ok(None)
    }

    fn of_host(&self) -> &[Arc<HostDriver>] {
        self.host.get_or_init(|| {
            let named = std::env::var_os(ENV_HOST_DRIVER).filter(|path| !path.is_empty());
            let named = named.map(PathBuf::from).map(|path| (library::kind(&path), path));
            let soft = library::own(library::SOFT_DRIVER).ok().map(|path| (DriverKind::Soft, path));
            let nvidia = library::all_of_nvidia().into_iter().map(|path| (DriverKind::Nvidia, path));
            let all = named.into_iter().chain(soft).chain(nvidia);
            all.filter_map(|(kind, path)| match HostDriver::vouched(&path, kind) {
                Ok(library) => Some(Arc::new(library)),
                Err(error) => {
                    tracing::warn!(%error, path = %path.display(), "a driver library cannot be opened");
                    None
                }
            })
            .collect()
        })
    }

    /// A software driver at `path` where [`library::install`] has put it, below a directory that only the
    /// user that gpucr runs as can write. A restore puts none there that is not one of these already.
    fn installed(&self, path: &Path) -> Option<Arc<HostDriver>> {
        let mut installed = self.installed.lock();
        if let Some(library) = installed.get(path) {
            return Some(library.clone());
        }
        let hash = library::installed_hash(path, "soft", &library::library_root())?;
        let library = HostDriver::vouched(path, DriverKind::Soft).ok()?;
        if library.path() != path || library.hash().ok()? != hash {
            return None;
        }
        let library = Arc::new(library);
        installed.insert(path.to_owned(), library.clone());
        Some(library)
    }
}
