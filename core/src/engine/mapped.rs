//! Which driver library a process has mapped.

use std::path::PathBuf;
use std::sync::Arc;

use crate::base::io_error::IoError;
use crate::cuda::{Drivers, HostDriver};
use crate::engine::error::Error;
use crate::host::process::ProcessInfo;
use crate::image::library;

/// How many of the files that a process maps under a driver's name are compared at most.
const MOST_LIBRARIES: usize = 16;

/// What a process has mapped under a driver library's name.
#[derive(Debug)]
pub(crate) enum Mapped {
    /// Nothing.
    Nothing,
    /// A driver of this host.
    Host {
        /// Which driver.
        library: Arc<HostDriver>,
        /// Where the process has it.
        path: PathBuf,
    },
    /// Something for which this host does not vouch.
    Stranger {
        /// Where the process has it.
        path: PathBuf,
    },
}

impl Mapped {
    /// What `process` has mapped. gpucr's shim, which it may have mapped too, is passed over.
    ///
    /// # Errors
    /// Files cannot be compared.
    pub(crate) fn of(process: &ProcessInfo, drivers: &Drivers) -> Result<Self, IoError> {
        let mut stranger = None;
        let mapped = process.driver_libraries.iter();
        for mapped in mapped.filter(|mapped| !library::is_shim(&mapped.path)).take(MOST_LIBRARIES) {
            if let Some(library) = drivers.is_one(&mapped.path, || mapped.open())? {
                return Ok(Self::Host { library, path: mapped.path.clone() });
            }
            stranger.get_or_insert_with(|| mapped.path.clone());
        }
        Ok(stranger.map_or(Self::Nothing, |path| Self::Stranger { path }))
    }

    /// Why a process that has to have a driver of this host has none.
    pub(crate) fn refused(self, pid: u32) -> Error {
        match self {
            Self::Stranger { path } => Error::StrangeDriver { pid, path },
            Self::Nothing | Self::Host { .. } => Error::NoDriverMapped { pid },
        }
    }
}
