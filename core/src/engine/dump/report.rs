//! What a dump is asked for, and what it reports.

use std::ffi::OsString;
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::AtomicBool;
use std::time::Duration;

use super::defer::{Deferral, Feedback};
use super::host::memory::HostMemory;
use crate::base::phase::PhaseTime;
use crate::base::timeline::Timeline;
use crate::engine::interrupted::Interrupted;
use crate::engine::memory::Validation;
use crate::engine::migrate::outgoing::Outgoing;
use crate::image::trust::PrivateKey;
use crate::image::{Destination, Protocol};
use crate::store::Compression;

/// Files that the program writes and that have no more bytes are kept whole in the image, if nothing else is asked.
pub const SAVE_FILES: u64 = 64 << 10;

/// What to dump, and how.
#[derive(Debug, Clone)]
pub struct Options {
    /// Root of the process tree.
    pub pid: u32,
    /// Where the image goes.
    pub target: Target,
    /// Let the program run on afterwards instead of ending it.
    pub leave_running: bool,
    /// How memory is to be copied; none leaves the choice to gpucr.
    pub protocol: Option<Protocol>,
    /// Most bytes of each device for shadows; none takes up to half of what is free.
    pub shadow_memory: Option<u64>,
    /// Most bytes of gpucr's own for host memory that is saved after the program goes on; none takes up to a quarter of
    /// what can be had.
    pub host_memory_limit: Option<u64>,
    /// Run in a shell before the program is stopped.
    pub before_stop: Option<OsString>,
    /// Limit for closing the gate and draining, and for the driver's lock.
    pub timeout: Duration,
    /// Wait, for so long at most, until each program comes back from a call by which it waits for the device, and stop it
    /// behind that.
    pub at_sync: Option<Duration>,
    /// How chunks are compressed.
    pub compression: Compression,
    /// The root is no session leader (found out by itself; CRIU's `--shell-job`).
    pub shell_job: bool,
    /// Options of CRIU with the same names.
    pub criu: CriuOptions,
    /// Words by which the image can be found again.
    pub tags: Vec<String>,
    /// Files that the program writes are kept whole in the image if they have at most so many bytes.
    pub save_files: u64,
    /// Records what happens when, if it is wanted.
    pub timeline: Timeline,
    /// What earlier dumps have learnt of the program's kernels, and this one adds to.
    pub feedback: Feedback,
    /// Signs the image.
    pub sign: Option<Arc<PrivateKey>>,
    /// Set by a signal handler to end the dump and roll it back.
    pub stop: Arc<AtomicBool>,
}

/// Where an image goes.
#[derive(Debug, Clone)]
pub enum Target {
    /// To a disk of this host.
    Image(Destination),
    /// To the other side of a migration. Once the dump is complete, the program is that side's.
    Peer(Arc<Outgoing>),
}

impl Target {
    /// Where the image is, or is to be.
    pub fn path(&self) -> PathBuf {
        match self {
            Self::Image(destination) => destination.path(),
            Self::Peer(peer) => peer.image().into(),
        }
    }

    /// The other side of a migration, if this is one.
    pub(super) fn peer(&self) -> Option<&Arc<Outgoing>> {
        match self {
            Self::Image(_) => None,
            Self::Peer(peer) => Some(peer),
        }
    }
}

/// Options that are CRIU's, by its names.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
#[allow(missing_docs)]
pub struct CriuOptions {
    pub tcp_established: bool,
    pub tcp_close: bool,
    pub file_locks: bool,
    pub ext_unix_sk: bool,
}

/// What was let through the closed gate of a process.
#[derive(Debug, Clone, serde::Serialize)]
pub struct LetThrough {
    /// The process.
    pub pid: u32,
    /// Launches of kernels and graphs.
    pub launches: u64,
}

/// What a dump did.
#[derive(Debug, Clone, serde::Serialize)]
pub struct Report {
    /// Where the image is.
    #[serde(serialize_with = "crate::base::format::lossy")]
    pub image: PathBuf,
    /// Its identity.
    pub id: String,
    /// Root of the process tree.
    pub pid: u32,
    /// How memory was copied.
    pub protocol: Protocol,
    /// What copied it: `outside` by gpucr's own context, `inside` by the program's, `driver` by the
    /// driver's checkpoint.
    pub copied: &'static str,
    /// Whether each process was stopped behind a call by which it waits for the device, if that was asked for.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub at_sync: Option<bool>,
    /// Whether the program runs on.
    pub left_running: bool,
    /// Bytes of device memory that gpucr saved.
    pub bulk_bytes: u64,
    /// Bytes of device memory that the driver's checkpoint had to save, since they cannot be handed to another
    /// process.
    pub private_bytes: u64,
    /// Bytes of the image, with the chunks that it shares with its ancestors or its store.
    pub stored_bytes: u64,
    /// Chunks copied while the program ran.
    pub precopied_chunks: u64,
    /// How the copies were checked against the memory of the stopped program; none where everything
    /// was copied after it had been stopped.
    pub validation: Option<Validation>,
    /// Host memory that was copied while the program ran; none where it was not.
    pub host: Option<HostMemory>,
    /// Bytes copied aside within the devices, and saved from there while the program ran on.
    pub shadowed_bytes: u64,
    /// What was saved while the program ran on, and launches that may write it waited; none if there
    /// was no such memory.
    pub deferral: Option<Deferral>,
    /// Launches that were let through the closed gates, for each process, since a device of another one waited for
    /// them, or another one could launch nothing before them. Empty if there was no need.
    pub let_through: Vec<LetThrough>,
    /// Launches of kernels that were interrupted, and go on from there with the program. Empty if there was none.
    pub interrupted: Vec<Interrupted>,
    /// Bytes that this dump has written; the rest was there.
    pub new_bytes: u64,
    /// Of the written bytes, those of chunks that changed after they had been copied: the image does not
    /// need them. In a store the next gc frees them.
    pub unneeded_bytes: u64,
    /// For how long the program was stopped, up to the commit or until it ran again.
    pub stopped_ms: f64,
    /// The whole dump.
    pub total_ms: f64,
    /// Its phases. `copy` runs during `detach`, `checkpoint` and `criu` where gpucr copies by
    /// itself, so the sum can be more than the whole.
    pub phases: Vec<PhaseTime>,
}
