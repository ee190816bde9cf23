//! What a restore says that it did.

use std::path::PathBuf;

use crate::base::phase::PhaseTime;

use super::devices::Moved;
use super::files::ChangedFile;

/// What a restore did.
#[derive(Debug, Clone, serde::Serialize)]
pub struct Report {
    /// The image.
    #[serde(serialize_with = "crate::base::format::lossy")]
    pub image: PathBuf,
    /// Its identity.
    pub id: String,
    /// Root of the process tree; a child of this process unless it was detached.
    pub pid: u32,
    /// What loaded memory: `outside`, `inside` or `driver`, as in a dump's report.
    pub copied: &'static str,
    /// Whether the image was kept warm, so that nothing was read, decompressed and checked.
    pub warm: bool,
    /// Whether the process that keeps it warm has loaded the device memory, from pinned memory.
    pub by_holder: bool,
    /// Whether the gpucr that has started this one had loaded the device memory before.
    pub was_given: bool,
    /// Bytes of device memory that gpucr loaded.
    pub bulk_bytes: u64,
    /// Devices that others have taken the place of.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub moved: Vec<Moved>,
    /// The program was in a network namespace of its own at the dump, and is in gpucr's now.
    #[serde(skip_serializing_if = "std::ops::Not::not")]
    pub left_network: bool,
    /// Outputs of the program, `stdout` and `stderr`, that were pipes and go nowhere now.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub unread: Vec<&'static str>,
    /// Files that were not as they had been at the dump.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub files: Vec<ChangedFile>,
    /// What became of `--on-demand`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub on_demand: Option<OnDemand>,
    /// What became of `--share`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub shared: Option<Shared>,
    /// Until the program went on.
    pub running_ms: f64,
    /// The whole restore.
    pub total_ms: f64,
    /// Its phases. The load runs during `extract` and `criu`, which waits for it.
    pub phases: Vec<PhaseTime>,
}

/// What loading on demand did.
#[derive(Debug, Clone, Default, PartialEq, serde::Serialize)]
pub struct OnDemand {
    /// Calls of the program that waited for memory.
    pub blocked: u64,
    /// For how long they waited, added up over all threads, milliseconds.
    pub blocked_ms: f64,
    /// Bytes of host memory that came while the program ran.
    pub host_bytes: u64,
    /// How often a thread of the program waited for some of it.
    pub host_faults: u64,
    /// Why the program was ended and restored anew, with all of its memory.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub fallen_back: Option<String>,
}

/// What sharing did.
#[derive(Debug, Clone, Default, PartialEq, serde::Serialize)]
pub struct Shared {
    /// Bytes of device memory that the program shares when it goes on.
    pub bytes: u64,
    /// Whether they were there already, so that they were not loaded.
    pub joined: bool,
    /// Why the program was ended and restored anew, with all memory its own.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub fallen_back: Option<String>,
}
