//! What a destination is to do with a program that comes.

use std::net::SocketAddr;
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::AtomicBool;

use crate::engine::error::Error;
use crate::engine::migrate::greeting::{named, namespace};
use crate::engine::migrate::record::MigrationId;
use crate::engine::restore::lacks::Circumstances;
use crate::engine::restore::{MappedDevice, OutputFiles};
use crate::host::network::NetworkNamespace;
use crate::image::Destination;
use crate::image::trust::Trust;

/// What is to be done with a program that comes.
#[derive(Debug, Clone)]
pub struct Incoming {
    /// Where its image goes.
    pub place: Place,
    /// It gets a pid namespace of its own.
    pub new_pids: bool,
    /// Where it gets its network; `None` for gpucr's own namespace.
    pub network: Option<NetworkNamespace>,
    /// Devices that others of this host take the place of, as `gpucr restore --device-map` takes them.
    pub device_map: Vec<String>,
    /// Directories below which files may be made that the program has open: absolute paths.
    pub files_below: Vec<PathBuf>,
    /// Files here for outputs that are pipes at the source.
    pub outputs: OutputFiles,
    /// Where streams may come to, with port 0 at any that is free: nowhere if it is `None`.
    pub streams_at: Option<SocketAddr>,
    /// Which images are taken.
    pub trust: Trust,
    /// Set by a signal handler to end it.
    pub stop: Arc<AtomicBool>,
}

/// Where the image of a program that comes goes.
#[derive(Debug, Clone)]
pub enum Place {
    /// To this directory, which is new or empty.
    Directory(PathBuf),
    /// Into the store in this directory, under this name or that of the migration.
    Store(PathBuf, Option<String>),
}

impl Place {
    pub(super) fn destination(&self, id: MigrationId) -> Destination {
        match self {
            Self::Directory(path) => Destination::Alone(path.clone()),
            Self::Store(store, name) => {
                let name = name.clone().unwrap_or_else(|| format!("migration-{id}"));
                Destination::Stored { store: store.clone(), name }
            }
        }
    }
}

impl Incoming {
    /// The devices that others take the place of.
    pub(super) fn mapped_devices(&self) -> Result<Vec<MappedDevice>, Error> {
        let parse =
            |text: &String| text.parse().map_err(|what: String| Error::NoSuchDevice { what });
        self.device_map.iter().map(parse).collect()
    }

    /// Tells the network namespace that the program gets apart from others, as a source tells its own.
    pub(super) fn network_name(&self) -> String {
        match &self.network {
            Some(network) => named(&network.name()),
            None => namespace("net"),
        }
    }

    /// How the program is to be restored; `same` says that its pids are in this very namespace.
    pub(super) fn circumstances<'c>(
        &'c self,
        device_map: &'c [MappedDevice],
        same: bool,
    ) -> Circumstances<'c> {
        let needs_pids = !self.new_pids && !same;
        Circumstances { device_map, needs_pids, named: self.outputs.named(), stop: &self.stop }
    }
}
