//! What `gpucr inspect` knows of an image, and prints with `--json`.

use std::path::{Path, PathBuf};

use gpucr_core::image::{BlockKind, DriverKind, Listener, Phase, Protocol, Stdio};
use gpucr_core::interrupted::Interrupted;
use gpucr_core::multicast;
use gpucr_core::open_blocks::OpenBlock;

/// Everything that an image says about itself.
#[derive(serde::Serialize)]
pub(super) struct Summary<'a> {
    pub(super) id: String,
    /// `alone`, `incremental` or `stored`.
    pub(super) kind: &'static str,
    /// Where the ancestors of an incremental image were found, the parent first.
    pub(super) ancestors: Vec<PathBuf>,
    /// The store of a stored image.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) store: Option<PathBuf>,
    pub(super) created: String,
    pub(super) gpucr_version: &'a str,
    pub(super) hostname: &'a str,
    pub(super) kernel: &'a str,
    pub(super) protocol: Protocol,
    pub(super) driver: &'a Path,
    pub(super) driver_version: i32,
    pub(super) driver_kind: DriverKind,
    pub(super) driver_hash: String,
    pub(super) devices: Vec<DeviceRow<'a>>,
    /// Each after its parent; the first is the root.
    pub(super) processes: Vec<ProcessRow<'a>>,
    pub(super) criu_version: &'a str,
    pub(super) criu_options: &'a [String],
    /// Device memory that gpucr saved.
    pub(super) bulk_bytes: u64,
    /// CRIU's files: the host side.
    pub(super) host_bytes: u64,
    /// Libraries that the image brings along.
    pub(super) library_bytes: u64,
    /// The image's own files, and what it shares with others.
    pub(super) stored_bytes: u64,
    /// Bytes of its own chunks that changed after they had been copied, and are not needed.
    pub(super) unneeded_bytes: u64,
    /// Plain bytes for each stored byte.
    pub(super) ratio: f64,
    pub(super) chunks: ChunkRow,
    pub(super) criu_files: Vec<CriuRow<'a>>,
    /// What the image says besides, by kind.
    pub(super) sections: Vec<SectionRow<'a>>,
    /// The places at which something from outside was mounted, if it was in a container.
    pub(super) container: Option<Vec<PathBuf>>,
    /// Libraries that are put back in place.
    pub(super) libraries: Vec<LibraryRow<'a>>,
    /// Files that must be in place for a restore, with these sizes.
    pub(super) files: Vec<FileRow<'a>>,
    /// The kernels that each process launched while it was dumped, as far as the dump recorded that.
    pub(super) kernels: Vec<super::kernels::ProcessKernels>,
    /// Parts that processes have in multicast objects.
    pub(super) multicast: Vec<multicast::Part>,
    /// Blocks that processes have open of each other.
    pub(super) opened: Vec<OpenBlock>,
    /// Launches that were interrupted, and go on from there.
    pub(super) interrupted: Vec<Interrupted>,
    pub(super) stopped_ms: f64,
    pub(super) phases: &'a [Phase],
}

#[derive(serde::Serialize)]
pub(super) struct DeviceRow<'a> {
    pub(super) uuid: String,
    pub(super) name: &'a str,
    pub(super) memory: u64,
    /// How much of it the image holds.
    pub(super) bulk_bytes: u64,
}

#[derive(serde::Serialize)]
pub(super) struct SectionRow<'a> {
    pub(super) kind: &'a str,
    pub(super) version: u32,
    /// Whether a restore has to know it.
    pub(super) needed: bool,
    /// Bytes that belong to it.
    pub(super) size: u64,
}

/// Distinct chunks.
#[derive(Default, serde::Serialize)]
pub(super) struct ChunkRow {
    pub(super) count: u64,
    /// Their plain bytes.
    pub(super) bytes: u64,
    /// Their stored bytes.
    pub(super) stored_bytes: u64,
    /// How many are of one repeated byte, and so have no stored bytes.
    pub(super) constant: u64,
}

#[derive(serde::Serialize)]
pub(super) struct FileRow<'a> {
    pub(super) path: &'a Path,
    pub(super) size: u64,
    /// Open, rather than only mapped as a library is.
    pub(super) open: bool,
    pub(super) mapped: bool,
}

#[derive(serde::Serialize)]
pub(super) struct CriuRow<'a> {
    pub(super) name: &'a str,
    pub(super) size: u64,
    pub(super) stored_bytes: u64,
    pub(super) mode: String,
    pub(super) chunks: usize,
}

#[derive(serde::Serialize)]
pub(super) struct LibraryRow<'a> {
    pub(super) path: &'a Path,
    pub(super) size: u64,
    pub(super) stored_bytes: u64,
    pub(super) mode: String,
    pub(super) chunks: usize,
}

#[derive(serde::Serialize)]
pub(super) struct ProcessRow<'a> {
    pub(super) pid: u32,
    pub(super) ppid: u32,
    pub(super) command: &'a [String],
    pub(super) exe: &'a Path,
    pub(super) cuda: bool,
    pub(super) under_gpucr: bool,
    pub(super) stdio: &'a [Stdio; 3],
    pub(super) listeners: &'a [Listener],
    pub(super) shim: Option<ShimRow<'a>>,
    pub(super) counts: Option<CountsRow>,
    pub(super) blocks: Vec<BlockRow>,
}

#[derive(serde::Serialize)]
pub(super) struct ShimRow<'a> {
    pub(super) path: &'a Path,
    pub(super) hash: String,
}

/// What a process had besides its blocks: an object with a number by each name.
pub(super) struct CountsRow(pub(super) Vec<(&'static str, u64)>);

impl serde::Serialize for CountsRow {
    fn serialize<S: serde::Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_map(self.0.iter().copied())
    }
}

#[derive(serde::Serialize)]
pub(super) struct BlockRow {
    pub(super) id: u64,
    pub(super) device: String,
    pub(super) address: String,
    pub(super) size: u64,
    pub(super) stored_bytes: u64,
    pub(super) allocations: u32,
    pub(super) kind: BlockKind,
    pub(super) chunks: usize,
}
