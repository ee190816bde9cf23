//! What a manifest has. It is stored in postcard form: fields never change, and variants are only added at the end of
//! an enum.

use std::path::PathBuf;

use serde::{Deserialize, Serialize};

use crate::store::ChunkId;

/// Everything about an image but the bytes themselves.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Manifest {
    /// When the dump began, seconds since 1970 UTC.
    pub created: u64,
    /// Version of the gpucr that made the image.
    pub gpucr_version: String,
    /// Name of the host that it was made on.
    pub hostname: String,
    /// Release of that host's kernel, as `uname -r` prints it.
    pub kernel: String,
    /// How memory was copied.
    pub protocol: Protocol,
    /// The driver library that served the program.
    pub driver: Driver,
    /// The devices on which the program had contexts.
    pub devices: Vec<Device>,
    /// The process tree, each process after its parent; the first is the root.
    pub processes: Vec<Process>,
    /// What CRIU wrote.
    pub criu: CriuImage,
    /// Files that the program needs and the image brings along.
    pub carried: Vec<CarriedFile>,
    /// Files that must be on the host before a restore is begun.
    pub required: Vec<RequiredFile>,
    /// Bytes of device memory that gpucr itself saved.
    pub bulk_bytes: u64,
    /// What the dump did, in order, as far as it was known when the manifest was written.
    pub phases: Vec<Phase>,
    /// For how many milliseconds the program had been stopped when the manifest was written.
    pub stopped_ms: f64,
    /// What later versions say more. Not among the fields above: they follow them in the file.
    #[serde(skip)]
    pub sections: Vec<Section>,
}

/// Something that an image says and that the fields of the [`Manifest`] have no place for.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Section {
    /// What it is: lower-case letters, digits and hyphens, 64 at most; each kind once.
    pub kind: String,
    /// The version of what it says; readers know kinds by name and version.
    pub version: u32,
    /// Whether a program cannot be restored right by who does not know it. Otherwise it may be passed over.
    pub needed: bool,
    /// What it says.
    pub data: Vec<u8>,
    /// Bytes that belong to it, in order.
    pub chunks: Vec<FileChunk>,
}

/// How memory was copied.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Protocol {
    /// All memory was copied in the stopped window.
    Stop,
    /// Copied while the program ran, then again what had changed: the state at the end.
    Recopy,
    /// Copied while the program ran, before it was overwritten: the state at the start.
    Cow,
    /// The driver's own checkpoint saved it all: the program did not run under gpucr.
    Driver,
}

/// A driver library.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Driver {
    /// Absolute path of its file.
    pub path: PathBuf,
    /// What `cuDriverGetVersion` says, for example 13000.
    pub version: i32,
    /// Whose it is.
    pub kind: DriverKind,
    /// BLAKE3 of the file: the same driver or another?
    pub file_hash: [u8; 32],
}

/// Whose driver library it is.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum DriverKind {
    /// gpucr's software driver.
    Soft,
    /// NVIDIA's.
    Nvidia,
}

/// A device.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Device {
    /// Its UUID, as `cuDeviceGetUuid` gives it.
    pub uuid: [u8; 16],
    /// Its name, for example `NVIDIA H200`.
    pub name: String,
    /// Bytes of memory that it has.
    pub total_memory: u64,
}

/// A process of the tree.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Process {
    /// Its pid, which it has again after a restore.
    pub pid: u32,
    /// Its parent's pid.
    pub ppid: u32,
    /// Its arguments, the command first; bytes that are not UTF-8 are replaced.
    pub command: Vec<String>,
    /// Absolute path of its executable.
    pub exe: PathBuf,
    /// What it had on devices, if it used CUDA.
    pub cuda: Option<CudaProcess>,
    /// How its file descriptors 0, 1 and 2 were connected.
    pub stdio: [Stdio; 3],
    /// The sockets by which other processes reach what is in it; a restore makes them anew.
    pub listeners: Vec<Listener>,
}

/// A socket that listens under an abstract name that ends in the process's pid namespace and its pid.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Listener {
    /// What comes before these, without the hyphen.
    pub name: String,
    /// Whether a byte of 0 comes after them.
    pub terminated: bool,
    /// The kind of socket.
    pub kind: ListenerKind,
    /// The inode of its socket, which is what CRIU knows it by.
    pub inode: u32,
}

/// A kind of socket.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum ListenerKind {
    /// `SOCK_STREAM`.
    Stream,
    /// `SOCK_SEQPACKET`.
    SeqPacket,
}

/// What a process had on devices.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct CudaProcess {
    /// Its physical memory, as far as gpucr saved it, in the order in which a restore loads it.
    pub blocks: Vec<Block>,
    /// The shim that it runs under; none if it does not.
    pub shim: Option<Shim>,
    /// What the process had besides its blocks.
    pub counts: Counts,
}

/// One block of physical device memory.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Block {
    /// The shim's name for it.
    pub id: u64,
    /// UUID of its device.
    pub device: [u8; 16],
    /// Bytes.
    pub size: u64,
    /// Who asked for it.
    pub kind: BlockKind,
    /// Where the program sees its start; 0 if it is not mapped.
    pub address: u64,
    /// Live allocations inside it.
    pub allocations: u32,
    /// Its contents, each chunk but the last of [`MAX_CHUNK`](crate::store::MAX_CHUNK) bytes.
    pub chunks: Vec<ChunkId>,
}

/// Who asked for a block.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum BlockKind {
    /// The shim, to serve `cuMemAlloc*`.
    Heap,
    /// The program itself, with `cuMemCreate`.
    Program,
}

/// The shim inside a program.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Shim {
    /// Absolute path of its file, which the restored program maps.
    pub path: PathBuf,
    /// BLAKE3 of its file.
    pub hash: [u8; 32],
    /// Its file.
    pub file: FileEntry,
}

/// What a process had besides its blocks, for `gpucr inspect`.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Counts {
    /// Live allocations served from blocks.
    pub allocations: u64,
    /// Bytes in stream-ordered pools, saved by the driver.
    pub pool_bytes: u64,
    /// Arrays, saved by the driver.
    pub arrays: u64,
    /// Bytes of pinned host memory, saved by the driver and CRIU.
    pub pinned_bytes: u64,
    /// Kernel and graph launches so far.
    pub launches: u64,
}

/// How a file descriptor was connected.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Stdio {
    /// Not open.
    Closed,
    /// A terminal.
    Terminal {
        /// Its path, for example `/dev/pts/3`.
        path: PathBuf,
        /// Device number of the terminal, as `st_rdev`.
        rdev: u64,
        /// Device number of the file system that holds it, as `st_dev`.
        dev: u64,
    },
    /// A pipe that leads out of the process tree.
    Pipe {
        /// Its inode, by which CRIU knows it: `pipe:[inode]`.
        inode: u64,
    },
    /// A regular file.
    File {
        /// Its absolute path.
        path: PathBuf,
    },
    /// `/dev/null`.
    DevNull,
    /// A socket, or anything else.
    Other {
        /// What `/proc/PID/fd/N` points at.
        target: String,
    },
}

/// What CRIU wrote.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct CriuImage {
    /// Version of the CRIU that wrote it, for example `4.2.1`.
    pub version: String,
    /// Its files.
    pub files: Vec<FileEntry>,
    /// The options of the dump that a restore must repeat, as on CRIU's command line, for
    /// example `--shell-job`.
    pub options: Vec<String>,
}

/// A file whose contents are in the store.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct FileEntry {
    /// Its name, with no directory.
    pub name: String,
    /// Its length in bytes.
    pub size: u64,
    /// Its permission bits.
    pub mode: u32,
    /// Its contents, in order.
    pub chunks: Vec<FileChunk>,
}

/// A part of a file.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct FileChunk {
    /// The address of its bytes.
    pub id: ChunkId,
    /// How many these are: 1 to [`MAX_CHUNK`](crate::store::MAX_CHUNK).
    pub len: u32,
}

/// A file that the image brings along.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct CarriedFile {
    /// Absolute path at which the restored program expects it.
    pub path: PathBuf,
    /// Its permission bits.
    pub mode: u32,
    /// Its contents.
    pub file: FileEntry,
}

/// A file that must be on the host.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct RequiredFile {
    /// Its absolute path.
    pub path: PathBuf,
    /// Its length in bytes; CRIU refuses to restore with another.
    pub size: u64,
    /// Whether a process had it mapped.
    pub mapped: bool,
    /// Whether a process had it open.
    pub open: bool,
}

/// A phase of the dump.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Phase {
    /// Its name.
    pub name: String,
    /// Milliseconds that it took.
    pub ms: f64,
}

/// A chunk where it is used.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Piece {
    /// The address of its bytes.
    pub id: ChunkId,
    /// Where these begin in the block or file, in bytes.
    pub offset: u64,
    /// How many they are.
    pub len: usize,
}
