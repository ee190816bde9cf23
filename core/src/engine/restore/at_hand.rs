//! What a restore needs of this host, whatever the image: found while there is time.

use std::sync::Arc;
use std::sync::atomic::AtomicBool;

use crate::cuda::Drivers;
use crate::host::criu::{Criu, CriuError};

/// CRIU, and the host's driver libraries, some of them open. By default each is looked for when it is needed.
#[derive(Default)]
pub struct AtHand {
    pub(super) drivers: Drivers,
    criu: Option<Criu>,
}

impl AtHand {
    /// Looks for CRIU, and opens this host's driver library with this hash, which takes some tenths of a second. What is not
    /// there now is looked for once more by the restore, which says so.
    pub fn with_driver(hash: &[u8; 32]) -> Self {
        let drivers = Drivers::default();
        match drivers.with_hash(hash) {
            Ok(Some(library)) => {
                // What it is asked for the first time takes longest.
                let opened = drivers.open(&library).map(|driver| driver.devices());
                if let Err(error) = opened {
                    tracing::debug!(%error, "the driver is not opened ahead");
                }
            }
            Ok(None) => tracing::debug!("the driver is not on this host"),
            Err(error) => tracing::debug!(%error, "the driver is not looked for ahead"),
        }
        Self { drivers, criu: Criu::find(None).ok() }
    }

    /// CRIU, which ends whatever it is at when `stop` is set.
    pub(super) fn criu(&self, stop: &Arc<AtomicBool>) -> Result<Criu, CriuError> {
        match &self.criu {
            Some(criu) => Ok(criu.clone().stopped_by(stop)),
            None => Criu::find(Some(stop)),
        }
    }
}

impl std::fmt::Debug for AtHand {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("AtHand").field("criu", &self.criu).finish_non_exhaustive()
    }
}
