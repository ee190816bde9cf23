//! What an image says about itself.
//!
//! The manifest is stored in postcard form, in which fields and variants have an order and no
//! names. So within one [`MANIFEST_VERSION`]: fields never change, and variants are only added
//! at the end of an enum. Anything else raises the version.

use std::collections::HashSet;
use std::path::{Path, PathBuf};

use rayon::prelude::*;
use serde::{Deserialize, Serialize};

use super::{ImageError, MANIFEST};
use crate::store::disk::Disk;
use crate::store::{ChunkId, MAX_CHUNK, StoreError, index};

/// Version of the manifest that this code writes, and the newest that it reads.
pub const MANIFEST_VERSION: u32 = 1;

const MAGIC: &[u8; 8] = b"gpucrIMG";
/// Most bytes that a manifest may have; that of a 139 GiB image has about 3 MB.
pub(crate) const MAX_MANIFEST: u64 = 256 << 20;

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
}

/// How memory was copied.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Protocol {
    /// All in the stopped window.
    Stop,
    /// Copied while the program ran, then again what had changed: the state at the end.
    Recopy,
    /// Copied while the program ran, before it was overwritten: the state at the start.
    Cow,
    /// By the driver's own checkpoint: the program did not run under gpucr.
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
    /// By which others reach what is in it; a restore makes them anew.
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
    /// What else it held.
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
    /// Its contents, each chunk but the last of [`MAX_CHUNK`] bytes.
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

/// What a process held beside its blocks, for `gpucr inspect`.
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
    /// How many these are: 1 to [`MAX_CHUNK`].
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

impl Manifest {
    /// The blocks of all processes, in the order of these.
    pub(crate) fn blocks(&self) -> Vec<&Block> {
        let cuda = self.processes.iter().filter_map(|process| process.cuda.as_ref());
        cuda.flat_map(|cuda| &cuda.blocks).collect()
    }

    /// The ids of all processes and of their threads, each once, which a restore needs again. CRIU has
    /// a file for each.
    pub fn thread_ids(&self) -> Vec<u32> {
        let number = |name: &str| name.strip_prefix("core-")?.strip_suffix(".img")?.parse().ok();
        let threads = self.criu.files.iter().filter_map(|file| number(&file.name));
        let mut ids: Vec<u32> = self.processes.iter().map(|p| p.pid).chain(threads).collect();
        ids.sort_unstable();
        ids.dedup();
        ids
    }

    /// Reads and checks the manifest of the image at `dir`.
    pub fn read(dir: &Path) -> Result<Self, ImageError> {
        Ok(Self::read_with_id(dir)?.0)
    }

    pub(crate) fn read_with_id(dir: &Path) -> Result<(Self, [u8; 32]), ImageError> {
        let (body, id) = Self::read_body(dir)?;
        let manifest = Self::decode(&body).map_err(|what| ImageError::Damaged {
            path: dir.join(MANIFEST),
            what: what.to_owned(),
        })?;
        Ok((manifest, id))
    }

    /// The identity of the image at `dir`, whose manifest is not decoded.
    pub(crate) fn identity(dir: &Path) -> Result<[u8; 32], ImageError> {
        Ok(Self::read_body(dir)?.1)
    }

    fn read_body(dir: &Path) -> Result<(Vec<u8>, [u8; 32]), ImageError> {
        let not = |reason| ImageError::NotAnImage { path: dir.to_owned(), reason };
        match std::fs::metadata(dir) {
            Ok(meta) if meta.is_dir() => {}
            Ok(_) => return Err(not("it is not a directory")),
            Err(e) => return Err(super::io_failure("open", dir, e)),
        }
        let path = dir.join(MANIFEST);
        let (body, hash) = index::read_framed(&path, MAGIC, MANIFEST_VERSION, MAX_MANIFEST)
            .map_err(|error| match error {
                StoreError::NotAStore { .. } => not("its manifest is something else"),
                StoreError::Io { source, .. } if source.kind() == std::io::ErrorKind::NotFound => {
                    not("it has no manifest")
                }
                other => other.into(),
            })?;
        Ok((body, *hash.as_bytes()))
    }

    /// The chunks that the image needs, in order, each once.
    pub fn chunk_ids(&self) -> Vec<ChunkId> {
        let mut ids: Vec<ChunkId> =
            self.parts().flat_map(|part| part.pieces()).map(|piece| piece.id).collect();
        ids.par_sort_unstable();
        ids.dedup();
        ids
    }

    /// The same with their lengths in bytes. One that has several lengths, which cannot be, comes several
    /// times.
    pub(super) fn chunk_lens(&self) -> Vec<(ChunkId, usize)> {
        let pieces = self.parts().flat_map(|part| part.pieces());
        let mut chunks: Vec<_> = pieces.map(|piece| (piece.id, piece.len)).collect();
        chunks.sort_unstable();
        chunks.dedup();
        chunks
    }

    /// Reads the manifest of the image at `dir` as far as that can be done, and tells `problem` what
    /// [`read`](Self::read) would have refused it for. Fails if nothing like an image is there.
    pub(crate) fn salvage(
        dir: &Path,
        problem: &mut dyn FnMut(ImageError),
    ) -> Result<(Option<Self>, Option<[u8; 32]>), ImageError> {
        let error = match Self::read_with_id(dir) {
            Ok((manifest, id)) => return Ok((Some(manifest), Some(id))),
            Err(error) => error,
        };
        let denied = matches!(&error, ImageError::Store(StoreError::Io { source, .. })
            if source.kind() == std::io::ErrorKind::PermissionDenied);
        let newer = matches!(error, ImageError::NewerVersion { .. });
        // Something else than an image, rather than one whose manifest is damaged.
        if denied
            || newer
            || ![crate::store::INDEX, "base"].iter().any(|name| dir.join(name).is_file())
        {
            return Err(error);
        }
        problem(error);
        let body = index::salvage_body(&dir.join(MANIFEST), MAX_MANIFEST).unwrap_or_default();
        Ok((Self::decode(&body).ok(), None))
    }

    /// What is to be written of the manifest into `dir`. What could not be read back is refused.
    pub(super) fn encode(&self, dir: &Path) -> Result<Encoded, ImageError> {
        let path = dir.join(MANIFEST);
        let damaged = |what: &str| ImageError::Damaged { path: path.clone(), what: what.into() };
        self.check().map_err(damaged)?;
        let body = postcard::to_stdvec(self).map_err(|_| damaged("it cannot be encoded"))?;
        if body.len() as u64 > MAX_MANIFEST {
            return Err(damaged("it is larger than the format's limit"));
        }
        Ok(Encoded { path, body })
    }

    /// The manifest file of the image at `dir` as bytes, which must be that of image `id`.
    pub(crate) fn file_bytes(dir: &Path, id: &[u8; 32]) -> Result<Vec<u8>, ImageError> {
        let path = dir.join(MANIFEST);
        let bytes = std::fs::read(&path).map_err(|e| super::io_failure("read", &path, e))?;
        if blake3::hash(&bytes).as_bytes() != id {
            return Err(ImageError::Damaged { path, what: "it has just changed".into() });
        }
        Ok(bytes)
    }

    /// The identity of an image that is written with this manifest.
    pub(crate) fn written_identity(&self) -> Result<[u8; 32], &'static str> {
        let body = postcard::to_stdvec(self).map_err(|_| "it cannot be encoded")?;
        let mut hasher = blake3::Hasher::new();
        hasher.update(&index::frame_header(MAGIC, MANIFEST_VERSION, &body)).update(&body);
        Ok(*hasher.finalize().as_bytes())
    }

    /// Decodes the body of a manifest file; any bytes are safe.
    pub(crate) fn decode(body: &[u8]) -> Result<Self, &'static str> {
        let (manifest, rest) =
            postcard::take_from_bytes::<Self>(body).map_err(|_| "it cannot be decoded")?;
        if !rest.is_empty() {
            return Err("there are bytes after its last field");
        }
        manifest.check()?;
        Ok(manifest)
    }

    /// Checks what the rest of the code relies on: file names that stay inside their directory,
    /// and chunk lists that fit the sizes.
    fn check(&self) -> Result<(), &'static str> {
        if self.processes.is_empty() {
            return Err("it has no process");
        }
        if self.processes.iter().any(|process| process.pid < 2) {
            return Err("a process has an impossible pid");
        }
        let mut names = HashSet::new();
        for file in &self.criu.files {
            if !names.insert(file.name.as_str()) {
                return Err("two of CRIU's files have the same name");
            }
        }
        for part in self.parts() {
            part.check_chunks()?;
            if let Some(file) = part.file() {
                file.check_name()?;
            }
        }
        if self.carried.iter().any(|carried| !carried.path.is_absolute()) {
            return Err("a carried file has no absolute path");
        }
        Ok(())
    }
}

/// A manifest that is to be written.
pub(super) struct Encoded {
    path: PathBuf,
    body: Vec<u8>,
}

impl Encoded {
    /// Writes and syncs it. Returns the image's identity and the length in bytes.
    pub(super) fn write(&self, disk: &dyn Disk) -> Result<([u8; 32], u64), ImageError> {
        let (path, body) = (&self.path, &self.body);
        let (hash, len) = index::write_framed(disk, path, MAGIC, MANIFEST_VERSION, body)?;
        Ok((*hash.as_bytes(), len))
    }
}

impl Block {
    /// Its chunks, in order.
    pub(super) fn pieces(&self) -> impl Iterator<Item = Piece> {
        self.chunks.iter().enumerate().map(|(number, &id)| {
            let offset = number as u64 * MAX_CHUNK as u64;
            let len = self.size.saturating_sub(offset).min(MAX_CHUNK as u64) as usize;
            Piece { id, offset, len }
        })
    }
}

impl FileEntry {
    /// Its chunks, in order.
    pub(super) fn pieces(&self) -> impl Iterator<Item = Piece> {
        self.chunks.iter().scan(0u64, |end, chunk| {
            let offset = *end;
            *end = offset.saturating_add(chunk.len.into());
            Some(Piece { id: chunk.id, offset, len: chunk.len as usize })
        })
    }

    /// Refuses every name that could lead out of the directory that it is put in.
    pub(super) fn check_name(&self) -> Result<(), &'static str> {
        let name = self.name.as_str();
        if name.is_empty() || name.len() > 255 || name == "." || name == ".." {
            return Err("a file has an impossible name");
        }
        if name.contains(['/', '\0']) {
            return Err("a file's name contains a directory");
        }
        Ok(())
    }
}
