//! Reading everything of an image to see whether it is whole.
//!
//! Unlike a restore, which ends at the first error, [`verify`] goes on as far as it can: a
//! damaged manifest or index is read around, and each chunk that cannot be had is named with
//! everything that it belongs to.

#[cfg(test)]
mod tests;

use std::collections::{BTreeMap, HashMap};
use std::path::{Path, PathBuf};

use serde::{Serialize, Serializer};

use crate::base::format::lossy;
use crate::base::format::{device_uuid, hex};
use crate::base::progress::Progress;
use crate::image::{ImageError, ImageReader, Manifest, Part, salvage};
use crate::store::index::Index;
use crate::store::{ChunkId, ChunkReader, INDEX, StoreError};

/// What [`verify`] found.
#[derive(Debug, Serialize)]
pub struct Report {
    /// The image.
    #[serde(serialize_with = "lossy")]
    pub image: PathBuf,
    /// Its identity; none if its manifest is damaged.
    #[serde(serialize_with = "maybe_hex")]
    pub id: Option<[u8; 32]>,
    /// Whether there is no damage.
    pub whole: bool,
    /// Distinct chunks that were read.
    pub chunks: u64,
    /// Their plain bytes.
    pub bytes: u64,
    /// Bytes of the image's files.
    pub stored_bytes: u64,
    /// What is damaged: files first, then chunks by their places.
    pub damage: Vec<Damage>,
}

/// One thing that is damaged.
#[derive(Debug, Serialize)]
pub struct Damage {
    /// What is wrong, in words.
    pub problem: String,
    /// The chunk; none if a file is damaged in other bytes than those of a chunk.
    #[serde(serialize_with = "maybe_chunk")]
    pub chunk: Option<ChunkId>,
    /// The file that is damaged; none for a chunk that is in no file.
    #[serde(serialize_with = "maybe_lossy")]
    pub file: Option<PathBuf>,
    /// Where in that file the stored bytes of the chunk begin.
    pub offset: Option<u64>,
    /// What the chunk belongs to.
    pub owners: Vec<Owner>,
}

/// Something that a damaged chunk belongs to, and which bytes of it that are.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
#[serde(tag = "kind", rename_all = "kebab-case")]
pub enum Owner {
    /// Device memory.
    Block {
        /// The process that has it.
        pid: u32,
        /// The shim's name for the block.
        block: u64,
        /// UUID of the device.
        device: String,
        /// Where the program sees the first damaged byte; none if the block is not mapped.
        #[serde(serialize_with = "maybe_address")]
        address: Option<u64>,
        /// Where the damaged bytes begin in the block.
        offset: u64,
        /// How many bytes that are.
        bytes: u64,
    },
    /// A file that CRIU wrote, of the host side of the program.
    Criu {
        /// Its name.
        name: String,
        /// Where the damaged bytes begin in the file.
        offset: u64,
        /// How many bytes that are.
        bytes: u64,
    },
    /// A library that the image brings along.
    Library {
        /// Where the restored program expects it.
        path: String,
        /// Where the damaged bytes begin in the file.
        offset: u64,
        /// How many bytes that are.
        bytes: u64,
    },
    /// What belongs to a section of the manifest.
    Section {
        /// Its kind.
        name: String,
        /// Where the damaged bytes begin in it.
        offset: u64,
        /// How many bytes that are.
        bytes: u64,
    },
}

/// Reads everything of the image at `dir`, on all cores, with a buffer of two chunks for each.
///
/// Damage is no error but part of the report. An error means that nothing could be said: the
/// directory cannot be read, or holds nothing like an image.
///
/// # Errors
/// The directory cannot be read, or holds nothing like an image.
pub fn verify(dir: &Path, progress: &dyn Progress) -> Result<Report, ImageError> {
    let mut files = Vec::new();
    let (manifest, id) = Manifest::salvage(dir, &mut |error| files.push(of_image(error)))?;
    let manifest_len = std::fs::metadata(dir.join("manifest")).map_or(0, |meta| meta.len());
    // Holds the lock of a store until the end.
    let foundation = salvage(dir, &mut |error| files.push(of_image(error)))?;
    let needed = match &manifest {
        Some(manifest) => manifest.chunk_ids(),
        // Without a manifest nobody can say what of a store belongs to the image.
        None => image_own(dir),
    };
    let sources = &foundation.sources;
    let chunks = ChunkReader::salvage(sources, &needed, &mut |error| files.push(of_store(error)));
    let bytes: u64 = chunks.entries().iter().map(|entry| u64::from(entry.plain_len)).sum();
    progress.phase("verify", Some(bytes));
    let damage = check(&chunks, manifest.as_ref(), &|bytes| progress.advance(bytes));
    let damage: Vec<Damage> = files.into_iter().chain(damage).collect();
    Ok(Report {
        image: dir.to_owned(),
        id,
        whole: damage.is_empty(),
        chunks: chunks.entries().len() as u64,
        bytes,
        stored_bytes: chunks.stored_bytes() + manifest_len,
        damage,
    })
}

/// The chunks that the image's own index names.
fn image_own(dir: &Path) -> Vec<ChunkId> {
    let path = dir.join(INDEX);
    let index = Index::read(&path).unwrap_or_else(|_| Index::salvage(&path));
    index.entries.iter().map(|entry| entry.id).collect()
}

impl ImageReader {
    /// Reads and checks every chunk, on all cores. Returns each that is damaged, with what it
    /// belongs to; an empty list means that the image is whole.
    pub fn verify(&self) -> Vec<Damage> {
        check(self.chunks(), Some(self.manifest()), &|_| ())
    }
}

/// Reads every chunk, and looks for every chunk that the manifest needs. Calls `advance` with the
/// plain bytes of each chunk that was read.
pub(crate) fn check(
    chunks: &ChunkReader,
    manifest: Option<&Manifest>,
    advance: &(dyn Fn(u64) + Sync),
) -> Vec<Damage> {
    // Why each bad chunk cannot be had; in the order of the report.
    let mut bad: BTreeMap<(Option<PathBuf>, Option<u64>, ChunkId), String> = BTreeMap::new();
    for (id, error) in chunks.verify_with(advance) {
        let mut damage = of_store(error);
        let len = chunks.entry(&id).map_or(0, |entry| entry.plain_len as usize);
        if chunks.get(&id, &mut vec![0; len]).is_ok() {
            damage.problem.push_str("; another copy of it is sound");
        }
        bad.insert((damage.file, damage.offset, id), damage.problem);
    }
    for piece in manifest.into_iter().flat_map(Manifest::parts).flat_map(|part| part.pieces()) {
        let problem = match chunks.entry(&piece.id) {
            None => "the index does not have it",
            Some(entry) if entry.plain_len as usize != piece.len => {
                "the index has it with another length"
            }
            Some(_) => continue,
        };
        bad.insert((None, None, piece.id), problem.to_owned());
    }
    let wanted = bad.keys().map(|(_, _, id)| *id);
    let mut owners = owners(manifest, wanted);
    bad.into_iter()
        .map(|((file, offset, id), problem)| Damage {
            problem,
            chunk: Some(id),
            file,
            offset,
            owners: owners.remove(&id).unwrap_or_default(),
        })
        .collect()
}

/// What a chunk belongs to.
pub(crate) fn owners_of(manifest: &Manifest, id: ChunkId) -> Vec<Owner> {
    owners(Some(manifest), [id].into_iter()).remove(&id).unwrap_or_default()
}

/// What each of these chunks belongs to: one pass over the manifest, however many there are.
fn owners(
    manifest: Option<&Manifest>,
    wanted: impl Iterator<Item = ChunkId>,
) -> HashMap<ChunkId, Vec<Owner>> {
    let mut found: HashMap<ChunkId, Vec<Owner>> = wanted.map(|id| (id, Vec::new())).collect();
    if found.is_empty() {
        return found;
    }
    for part in manifest.into_iter().flat_map(Manifest::parts) {
        for piece in part.pieces() {
            if let Some(owners) = found.get_mut(&piece.id) {
                let owner = owner(&part, piece.offset, piece.len as u64);
                // A shim is a carried file too.
                if !owners.contains(&owner) {
                    owners.push(owner);
                }
            }
        }
    }
    found
}

fn owner(part: &Part<'_>, offset: u64, bytes: u64) -> Owner {
    match part {
        Part::Block { process, block } => Owner::Block {
            pid: process.pid,
            block: block.id,
            device: device_uuid(&block.device),
            address: (block.address != 0).then(|| block.address.saturating_add(offset)),
            offset,
            bytes,
        },
        Part::Criu(file) => Owner::Criu { name: file.name.clone(), offset, bytes },
        Part::Carried(_) | Part::Shim { .. } => Owner::Library {
            path: part.path().map(|path| path.to_string_lossy().into_owned()).unwrap_or_default(),
            offset,
            bytes,
        },
        Part::Section(section) => Owner::Section { name: section.kind.clone(), offset, bytes },
    }
}

fn of_image(error: ImageError) -> Damage {
    let problem = error.to_string();
    let file = match error {
        ImageError::Truncated { path, .. }
        | ImageError::Damaged { path, .. }
        | ImageError::NewerVersion { path, .. }
        | ImageError::ParentInStore { path }
        | ImageError::ChainTooLong { path } => Some(path),
        ImageError::ParentMissing { image, .. } | ImageError::ParentChanged { image, .. } => {
            Some(image.join("base"))
        }
        ImageError::NotAnImage { path, .. } => Some(path.join("manifest")),
        ImageError::Store(error) => return of_store(error),
        _ => None,
    };
    Damage { problem, chunk: None, file, offset: None, owners: Vec::new() }
}

fn of_store(error: StoreError) -> Damage {
    let problem = match &error {
        // The rest of its message says what the other fields say.
        StoreError::DamagedChunk { what, .. } => (*what).to_owned(),
        _ => error.to_string(),
    };
    let (chunk, file, offset) = match error {
        StoreError::DamagedChunk { id, pack, offset, .. } => (Some(id), Some(pack), Some(offset)),
        StoreError::UnknownChunk { id } | StoreError::WrongLength { id, .. } => {
            (Some(id), None, None)
        }
        StoreError::Io { path, .. }
        | StoreError::NoSpace { path, .. }
        | StoreError::Damaged { path, .. }
        | StoreError::Truncated { path, .. }
        | StoreError::NotAStore { path }
        | StoreError::NotAStoreDir { path, .. }
        | StoreError::Busy { path }
        | StoreError::NewerVersion { path, .. } => (None, Some(path), None),
        StoreError::Incomplete { .. }
        | StoreError::NotTaken { .. }
        | StoreError::Interrupted
        | StoreError::ChunkTooLarge { .. } => (None, None, None),
    };
    Damage { problem, chunk, file, offset, owners: Vec::new() }
}

impl std::fmt::Display for Owner {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Block { pid, block, device, address: Some(address), bytes, .. } => {
                let end = address.saturating_add(*bytes);
                write!(f, "process {pid}, block {block}, {address:#x}-{end:#x} on device {device}")
            }
            Self::Block { pid, block, device, address: None, offset, bytes } => {
                let end = offset + bytes;
                write!(
                    f,
                    "process {pid}, block {block} (not mapped), bytes {offset}-{end} on device \
                     {device}"
                )
            }
            Self::Criu { name, offset, bytes } => {
                write!(f, "CRIU's file {name}, bytes {offset}-{}", offset + bytes)
            }
            Self::Library { path, offset, bytes } => {
                write!(f, "library {path}, bytes {offset}-{}", offset + bytes)
            }
            Self::Section { name, offset, bytes } => {
                write!(f, "section {name}, bytes {offset}-{}", offset + bytes)
            }
        }
    }
}

fn maybe_hex<S: Serializer>(id: &Option<[u8; 32]>, serializer: S) -> Result<S::Ok, S::Error> {
    id.map(|id| hex(&id)).serialize(serializer)
}

fn maybe_chunk<S: Serializer>(id: &Option<ChunkId>, serializer: S) -> Result<S::Ok, S::Error> {
    id.map(|id| id.to_string()).serialize(serializer)
}

fn maybe_lossy<S: Serializer>(path: &Option<PathBuf>, serializer: S) -> Result<S::Ok, S::Error> {
    path.as_ref().map(|path| path.to_string_lossy()).serialize(serializer)
}

fn maybe_address<S: Serializer>(address: &Option<u64>, serializer: S) -> Result<S::Ok, S::Error> {
    address.map(|address| format!("{address:#x}")).serialize(serializer)
}
