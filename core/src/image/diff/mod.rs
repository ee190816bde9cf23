//! What changed from one image to another. Works on the addresses of chunks: no data is read.

#[cfg(test)]
mod tests;

use std::collections::{BTreeMap, HashMap, HashSet};

use serde::Serialize;

use crate::base::format::hex;
use crate::image::{ImageReader, Part};
use crate::store::ChunkId;

/// What changed from image A to image B.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Diff {
    /// Identity of A.
    pub a: String,
    /// Identity of B.
    pub b: String,
    /// The processes of both, by pid.
    pub processes: Vec<ProcessDiff>,
    /// Blocks of device memory and files of both; what changed the most comes first.
    pub parts: Vec<PartDiff>,
    /// All device memory together.
    pub memory: Total,
    /// All files of the host side together.
    pub host: Total,
    /// All libraries together.
    pub libraries: Total,
    /// What B needs besides the chunks of A.
    pub cost: Cost,
}

/// How something stands in B, seen from A.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum Change {
    /// It is in B alone.
    New,
    /// It is in A alone.
    Gone,
    /// It is in both, with other bytes, another size, or (a process) another command.
    Changed,
    /// It is the same in both.
    Same,
}

/// A process of one image or both.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct ProcessDiff {
    /// Its pid, by which it is known.
    pub pid: u32,
    /// Its arguments, in B if it is there.
    pub command: Vec<String>,
    /// How it stands.
    pub change: Change,
}

/// A block or file of one image or both.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct PartDiff {
    /// What it is.
    #[serde(flatten)]
    pub name: Name,
    /// How it stands.
    pub change: Change,
    /// Its size in A, in bytes.
    pub size_before: Option<u64>,
    /// Its size in B, in bytes.
    pub size: Option<u64>,
    /// Bytes of B that A does not have: in a block, at the same place; in a file, anywhere in the
    /// file of that name, because CRIU may write the same pages in another order. Of what is gone,
    /// all bytes of A.
    pub changed_bytes: u64,
    /// The changed bytes as a share of the size, from 0 to 1.
    pub share: f64,
}

/// What a block or file is known by.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize)]
#[serde(tag = "kind", rename_all = "kebab-case")]
pub enum Name {
    /// A block of device memory. Blocks are matched by process and number; what is left over, by
    /// process, device and address.
    Block {
        /// The process that has it.
        pid: u32,
        /// The shim's name for it, in B if it is there.
        block: u64,
        /// UUID of its device.
        device: String,
        /// Where the program sees it, in B if it is there; 0 if it is not mapped.
        #[serde(serialize_with = "hex_address")]
        address: u64,
    },
    /// A file of CRIU's, matched by name.
    Criu {
        /// Its name.
        name: String,
    },
    /// A library, matched by path.
    Library {
        /// Where the program expects it.
        path: String,
    },
    /// What belongs to a section of the manifest, matched by kind.
    Section {
        /// The kind.
        section: String,
    },
}

/// A sum over blocks or files.
#[derive(Debug, Clone, Copy, Default, PartialEq, Serialize)]
pub struct Total {
    /// Bytes in A.
    pub bytes_before: u64,
    /// Bytes in B.
    pub bytes: u64,
    /// Bytes of B that changed or are new.
    pub changed_bytes: u64,
    /// The changed bytes as a share of the bytes in B, from 0 to 1.
    pub share: f64,
}

/// Chunks of B that A does not have.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize)]
pub struct Cost {
    /// How many.
    pub chunks: u64,
    /// How many chunks B has in all.
    pub of_chunks: u64,
    /// Their plain bytes.
    pub bytes: u64,
    /// Their stored bytes, as they are stored for B.
    pub stored_bytes: u64,
}

/// Compares two images.
pub fn diff(a: &ImageReader, b: &ImageReader) -> Diff {
    let (before, after) = (parts(a), parts(b));
    let pairs = pair(&before, &after);
    let mut parts: Vec<PartDiff> =
        pairs.into_iter().map(|(before, after)| compare(before, after)).collect();
    // Names make the order the same in every run.
    parts.sort_by(|x, y| y.changed_bytes.cmp(&x.changed_bytes).then(x.name.cmp(&y.name)));
    let total = |of: fn(&Name) -> bool| total(parts.iter().filter(|part| of(&part.name)));
    Diff {
        a: hex(&a.id()),
        b: hex(&b.id()),
        processes: processes(a, b),
        memory: total(|name| matches!(name, Name::Block { .. })),
        host: total(|name| matches!(name, Name::Criu { .. })),
        libraries: total(|name| matches!(name, Name::Library { .. })),
        cost: cost(a, b),
        parts,
    }
}

/// The parts of an image. A shim that is a carried file too is one part.
fn parts(image: &ImageReader) -> Vec<(Name, Part<'_>)> {
    let mut parts: Vec<(Name, Part<'_>)> = Vec::new();
    let mut libraries = HashSet::new();
    for part in image.manifest().parts() {
        let name = match part {
            Part::Block { process, block } => Name::Block {
                pid: process.pid,
                block: block.id,
                device: hex(&block.device),
                address: block.address,
            },
            Part::Criu(file) => Name::Criu { name: file.name.clone() },
            Part::Carried(_) | Part::Shim { .. } => {
                let path = part.path().map(|path| path.to_string_lossy().into_owned());
                let path = path.unwrap_or_default();
                if !libraries.insert(path.clone()) {
                    continue;
                }
                Name::Library { path }
            }
            Part::Section(section) => Name::Section { section: section.kind.clone() },
        };
        parts.push((name, part));
    }
    parts
}

type Pair<'x, 'a> = (Option<&'x (Name, Part<'a>)>, Option<&'x (Name, Part<'a>)>);

/// Finds what belongs together.
fn pair<'x, 'a>(
    before: &'x [(Name, Part<'a>)],
    after: &'x [(Name, Part<'a>)],
) -> Vec<Pair<'x, 'a>> {
    let by_number = |name: &Name| match name {
        Name::Block { pid, block, .. } => Some(format!("block {pid} {block}")),
        Name::Criu { name } => Some(format!("criu {name}")),
        Name::Library { path } => Some(format!("library {path}")),
        Name::Section { section } => Some(format!("section {section}")),
    };
    let by_address = |name: &Name| match name {
        Name::Block { pid, device, address, .. } if *address != 0 => {
            Some(format!("at {pid} {device} {address}"))
        }
        _ => None,
    };
    let mut pairs = Vec::new();
    let (mut before, mut after): (Vec<_>, Vec<_>) =
        (before.iter().collect(), after.iter().collect());
    for key in [&by_number as &dyn Fn(&Name) -> Option<String>, &by_address] {
        let mut known: HashMap<String, &(Name, Part<'_>)> =
            before.iter().filter_map(|part| Some((key(&part.0)?, *part))).collect();
        let mut matched: HashSet<Name> = HashSet::new();
        after.retain(|part| match key(&part.0).and_then(|key| known.remove(&key)) {
            Some(old) => {
                matched.insert(old.0.clone());
                pairs.push((Some(old), Some(*part)));
                false
            }
            None => true,
        });
        before.retain(|part| !matched.contains(&part.0));
    }
    pairs.extend(before.into_iter().map(|part| (Some(part), None)));
    pairs.extend(after.into_iter().map(|part| (None, Some(part))));
    pairs
}

fn compare(before: Option<&(Name, Part<'_>)>, after: Option<&(Name, Part<'_>)>) -> PartDiff {
    let size_before = before.map(|(_, part)| part.size());
    let size = after.map(|(_, part)| part.size());
    let changed_bytes = match (before, after) {
        (Some((_, a)), Some((_, b))) => changed(a, b),
        _ => size.or(size_before).unwrap_or(0),
    };
    let change = match (before, after) {
        (None, _) => Change::New,
        (_, None) => Change::Gone,
        (Some((_, a)), Some((_, b))) if a.pieces().eq(b.pieces()) => Change::Same,
        _ => Change::Changed,
    };
    let name = after.or(before).map(|(name, _)| name.clone());
    PartDiff {
        name: name.expect("one of both is there"),
        change,
        size_before,
        size,
        changed_bytes,
        share: share(changed_bytes, size.or(size_before).unwrap_or(0)),
    }
}

/// Bytes of `b` that `a` does not have.
fn changed(a: &Part<'_>, b: &Part<'_>) -> u64 {
    if let Part::Block { .. } = b {
        let old: HashSet<_> = a.pieces().map(|piece| (piece.offset, piece.id)).collect();
        let pieces = b.pieces().filter(|piece| !old.contains(&(piece.offset, piece.id)));
        pieces.map(|piece| piece.len as u64).sum()
    } else {
        let old: HashSet<_> = a.pieces().map(|piece| piece.id).collect();
        let pieces = b.pieces().filter(|piece| !old.contains(&piece.id));
        pieces.map(|piece| piece.len as u64).sum()
    }
}

fn total<'a>(parts: impl Iterator<Item = &'a PartDiff>) -> Total {
    let mut total = Total::default();
    for part in parts {
        total.bytes_before += part.size_before.unwrap_or(0);
        total.bytes += part.size.unwrap_or(0);
        if part.change != Change::Gone {
            total.changed_bytes += part.changed_bytes;
        }
    }
    total.share = share(total.changed_bytes, total.bytes);
    total
}

fn processes(a: &ImageReader, b: &ImageReader) -> Vec<ProcessDiff> {
    let commands = |image: &ImageReader| -> BTreeMap<u32, Vec<String>> {
        image.manifest().processes.iter().map(|p| (p.pid, p.command.clone())).collect()
    };
    let mut before = commands(a);
    let mut found: Vec<ProcessDiff> = commands(b)
        .into_iter()
        .map(|(pid, command)| {
            let change = match before.remove(&pid) {
                None => Change::New,
                Some(old) if old != command => Change::Changed,
                Some(_) => Change::Same,
            };
            ProcessDiff { pid, command, change }
        })
        .collect();
    let gone = before.into_iter();
    found.extend(gone.map(|(pid, command)| ProcessDiff { pid, command, change: Change::Gone }));
    found.sort_by_key(|process| process.pid);
    found
}

fn cost(a: &ImageReader, b: &ImageReader) -> Cost {
    let chunks = |image: &ImageReader| -> HashSet<ChunkId> {
        image.manifest().parts().flat_map(|part| part.pieces()).map(|piece| piece.id).collect()
    };
    let (old, new) = (chunks(a), chunks(b));
    let mut cost = Cost { of_chunks: new.len() as u64, ..Cost::default() };
    for entry in new.difference(&old).filter_map(|id| b.chunks().entry(id)) {
        cost.chunks += 1;
        cost.bytes += u64::from(entry.plain_len);
        cost.stored_bytes += u64::from(entry.stored_len);
    }
    cost
}

fn share(part: u64, whole: u64) -> f64 {
    if whole == 0 { 0.0 } else { part as f64 / whole as f64 }
}

fn hex_address<S: serde::Serializer>(address: &u64, serializer: S) -> Result<S::Ok, S::Error> {
    serializer.collect_str(&format_args!("{address:#x}"))
}

impl std::fmt::Display for Name {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Block { pid, block, address, .. } => {
                write!(f, "process {pid}, block {block} at {address:#x}")
            }
            Self::Criu { name } => write!(f, "CRIU's file {name}"),
            Self::Library { path } => write!(f, "library {path}"),
            Self::Section { section } => write!(f, "section {section}"),
        }
    }
}
