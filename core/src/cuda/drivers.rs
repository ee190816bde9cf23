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
use std::io;
use std::path::{Path, PathBuf};
use std::sync::{Arc, OnceLock};

use parking_lot::Mutex;

use super::driver::{Driver, OpenError};
use super::host::HostDriver;
use crate::base::foreign::Foreign;
use crate::base::io_error::IoError;
use crate::image::DriverKind;
use crate::image::library;

/// Environment variable of gpucr that names one driver library more, for whose code its caller answers.
pub const ENV_HOST_DRIVER: &str = "GPUCR_HOST_DRIVER";

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

    /// The library of this host, if any, that is the file which a process has mapped at `path`.
    ///
    /// # Errors
    /// Files cannot be compared.
    pub(crate) fn is_one(
        &self,
        path: &Path,
        open: impl Fn() -> io::Result<Foreign>,
    ) -> Result<Option<Arc<HostDriver>>, IoError> {
        for host in self.installed(path).iter().chain(self.of_host()) {
            // A library that cannot be opened is none of this host's.
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
