//! What an image holds bytes of, and which chunks these are.

use std::path::Path;

use rayon::prelude::*;

use super::manifest::{
    Block, CarriedFile, FileChunk, FileEntry, Manifest, Piece, Process, Section, Shim,
};
use crate::store::{ChunkId, MAX_CHUNK};

/// So many chunks are a long list.
const LONG: usize = 16 << 10;

/// Something that an image holds the bytes of.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Part<'a> {
    /// A block of device memory.
    Block {
        /// The process that has it.
        process: &'a Process,
        /// The block.
        block: &'a Block,
    },
    /// A file that CRIU wrote.
    Criu(&'a FileEntry),
    /// A file that the image brings along.
    Carried(&'a CarriedFile),
    /// The shim that a process runs under.
    Shim {
        /// The process.
        process: &'a Process,
        /// Its shim.
        shim: &'a Shim,
    },
    /// What belongs to a section of the manifest.
    Section(&'a Section),
}

impl<'a> Part<'a> {
    /// Bytes.
    pub fn size(&self) -> u64 {
        match self {
            Self::Block { block, .. } => block.size,
            Self::Section(section) => section.size(),
            _ => self.file().map_or(0, |file| file.size),
        }
    }

    /// Its chunks, from the first byte to the last, without gaps; of a manifest that was checked.
    pub fn pieces(&self) -> impl Iterator<Item = Piece> + use<'a> {
        let block = match *self {
            Self::Block { block, .. } => Some(block.pieces()),
            _ => None,
        };
        let section = match *self {
            Self::Section(section) => Some(section.pieces()),
            _ => None,
        };
        let file = self.file().map(FileEntry::pieces);
        let memory = block.into_iter().flatten().chain(section.into_iter().flatten());
        memory.chain(file.into_iter().flatten())
    }

    /// How many chunks it has.
    pub(super) fn chunk_count(&self) -> usize {
        match *self {
            Self::Block { block, .. } => block.chunks.len(),
            Self::Section(section) => section.chunks.len(),
            _ => self.file().map_or(0, |file| file.chunks.len()),
        }
    }

    /// Adds the ids of its chunks.
    pub(super) fn add_ids(&self, ids: &mut Vec<ChunkId>) {
        let chunks = match *self {
            Self::Block { block, .. } => return ids.extend_from_slice(&block.chunks),
            Self::Section(section) => &section.chunks,
            _ => self.file().map_or(&[][..], |file| &file.chunks),
        };
        // Threads are worth it for a long list alone.
        match chunks.len() {
            ..LONG => ids.extend(chunks.iter().map(|chunk| chunk.id)),
            _ => ids.par_extend(chunks.par_iter().map(|chunk| chunk.id)),
        }
    }

    /// Whether its chunks fit its size.
    pub(super) fn check_chunks(&self) -> Result<(), &'static str> {
        if self.size() > i64::MAX as u64 {
            return Err("a file or block has an impossible size");
        }
        // At most 2 MiB for each of some million chunks: no overflow.
        let add_up = |chunks: &[FileChunk], size: u64| {
            let lens = || chunks.iter().map(|chunk| chunk.len as usize);
            lens().all(|len| (1..=MAX_CHUNK).contains(&len))
                && lens().map(|len| len as u64).sum::<u64>() == size
        };
        let fits = match self {
            Self::Block { block, .. } => {
                block.chunks.len() as u64 == block.size.div_ceil(MAX_CHUNK as u64)
            }
            Self::Section(section) => add_up(&section.chunks, section.size()),
            _ => self.file().is_none_or(|file| add_up(&file.chunks, file.size)),
        };
        if fits { Ok(()) } else { Err("a list of chunks does not fit its size") }
    }

    /// The file that it is, unless it is device memory.
    pub fn file(&self) -> Option<&'a FileEntry> {
        match *self {
            Self::Block { .. } | Self::Section(_) => None,
            Self::Criu(file) => Some(file),
            Self::Carried(carried) => Some(&carried.file),
            Self::Shim { shim, .. } => Some(&shim.file),
        }
    }

    /// Where the restored program expects it, for a file that is put back in place.
    pub fn path(&self) -> Option<&'a Path> {
        match *self {
            Self::Carried(carried) => Some(&carried.path),
            Self::Shim { shim, .. } => Some(&shim.path),
            Self::Block { .. } | Self::Criu(_) | Self::Section(_) => None,
        }
    }
}

impl std::fmt::Display for Part<'_> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Block { process, block } => {
                write!(f, "block {} of process {} at {:#x}", block.id, process.pid, block.address)
            }
            Self::Criu(file) => write!(f, "CRIU's file {:?}", file.name),
            Self::Carried(carried) => write!(f, "carried file {:?}", carried.path),
            Self::Shim { process, shim } => {
                write!(f, "shim {:?} of process {}", shim.path, process.pid)
            }
            Self::Section(section) => write!(f, "section {}", section.kind),
        }
    }
}

impl Manifest {
    /// Everything that the image holds bytes of: blocks by process, then CRIU's files, files that
    /// are carried, shims, and sections that have bytes. The shim of a process is most often a carried file too.
    pub fn parts(&self) -> impl Iterator<Item = Part<'_>> {
        let cuda = self.processes.iter().filter_map(|p| Some((p, p.cuda.as_ref()?)));
        let blocks = cuda.clone().flat_map(|(process, cuda)| {
            cuda.blocks.iter().map(move |block| Part::Block { process, block })
        });
        let shims = cuda
            .filter_map(|(process, cuda)| Some(Part::Shim { process, shim: cuda.shim.as_ref()? }));
        let criu = self.criu.files.iter().map(Part::Criu);
        let carried = self.carried.iter().map(Part::Carried);
        let sections = self.sections.iter().filter(|section| !section.chunks.is_empty());
        blocks.chain(criu).chain(carried).chain(shims).chain(sections.map(Part::Section))
    }
}
