//! Copies of the files that a program writes, which an image brings along: small files whole, of others the end.
//!
//! A restore that is to [put files back](crate::restore::FilePolicy::Rewind) takes from here what they were, and sees by
//! the end of a file whether what comes before it is still the same.

use std::collections::{BTreeSet, HashMap};
use std::fs::File;
use std::os::unix::fs::{FileExt, MetadataExt, OpenOptionsExt, PermissionsExt};
use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};

use super::error::Error;
use crate::base::file_tree::FileTree;
use crate::host::process::files::{self, HeldFile};
use crate::image::{FileChunk, FileEntry, ImageWriter};

/// So many bytes at the end of a file are kept that is too large to be kept whole.
const TAIL: u64 = 4096;
/// Most files of which something is kept: a program may have opened any number.
const MOST: usize = 4096;
/// `FUSE_SUPER_MAGIC` of linux/magic.h.
const FUSE: i64 = 0x6573_5546;
/// Most bytes of a file that are kept: they are read into memory as a whole.
const MOST_BYTES: u64 = 128 << 20;

/// What an image has of a file.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Kept {
    /// The file's path.
    pub(super) path: PathBuf,
    /// Where in the file the bytes begin that are kept; they go to its end.
    pub(super) from: u64,
    /// How many bytes are kept.
    pub(super) len: u64,
    /// The file's permission bits, owner and group.
    pub(super) mode: u32,
    pub(super) uid: u32,
    pub(super) gid: u32,
}

impl Kept {
    /// Whether the whole file is kept.
    pub(super) fn is_whole(&self) -> bool {
        self.from == 0
    }

    /// How many bytes the file had.
    pub(super) fn size(&self) -> u64 {
        self.from + self.len
    }
}

/// Keeps what belongs into the image of the files that these processes, which are frozen, have open for writing or mapped
/// so, some of them `renamed`, by their paths in their `tree`: those of at most `whole` bytes whole. A file that cannot be read is left out. Gives their bytes as chunks, one file after the other.
///
/// # Errors
/// A chunk cannot be written.
pub(super) fn keep(
    pids: impl IntoIterator<Item = u32>,
    renamed: &BTreeSet<PathBuf>,
    tree: &FileTree,
    whole: u64,
    image: &ImageWriter,
) -> Result<(Vec<Kept>, Vec<FileChunk>), Error> {
    let (mut all, mut chunks) = (Vec::new(), Vec::new());
    for HeldFile { path, link } in files::written(pids, renamed, tree).into_iter().take(MOST) {
        match read(&path, &link, whole) {
            Ok((kept, bytes)) => {
                chunks.extend(image.add_bytes("file", 0o600, &bytes)?.chunks);
                all.push(kept);
            }
            Err(error) => tracing::warn!(%error, path = %path.display(), "no copy of it is kept"),
        }
    }
    Ok((all, chunks))
}

/// Opens what a frozen process has open, to copy it.
///
/// # Errors
/// It cannot be opened, or not without waiting for somebody, or its path cannot be told to others.
pub(super) fn open(path: &Path, link: &Path) -> std::io::Result<File> {
    if path.to_str().is_none() {
        return Err(std::io::Error::other("its path is not UTF-8"));
    }
    // Whoever holds a lease of it, or serves its file system, may be frozen now: nothing is waited for.
    let file = File::options().read(true).custom_flags(libc::O_NONBLOCK).open(link)?;
    let served = rustix::fs::fstatfs(&file)?.f_type as i64;
    if served == FUSE {
        return Err(std::io::Error::other("another process serves its file system"));
    }
    Ok(file)
}

fn read(path: &Path, link: &Path, whole: u64) -> std::io::Result<(Kept, Vec<u8>)> {
    let file = open(path, link)?;
    let meta = file.metadata()?;
    let size = meta.size();
    let len = if size <= whole.min(MOST_BYTES) { size } else { TAIL.min(size) };
    let (from, mut bytes) = (size - len, vec![0; len as usize]);
    file.read_exact_at(&mut bytes, from)?;
    let (path, mode) = (path.to_owned(), meta.permissions().mode() & 0o7777);
    Ok((Kept { path, from, len, mode, uid: meta.uid(), gid: meta.gid() }, bytes))
}

/// What an image has kept, each with its bytes as a file of the image; nothing if that makes no sense.
pub(super) fn kept(all: Vec<Kept>, chunks: &[FileChunk]) -> HashMap<PathBuf, (Kept, FileEntry)> {
    let mut chunks = chunks.iter();
    let mut found = HashMap::new();
    for kept in all.into_iter().take(MOST) {
        let mut own: Vec<FileChunk> = Vec::new();
        let mut len = 0;
        while len < kept.len {
            let Some(chunk) = chunks.next() else { break };
            len += u64::from(chunk.len);
            own.push(*chunk);
        }
        if len != kept.len || len > MOST_BYTES || kept.from.checked_add(len).is_none() {
            return HashMap::new();
        }
        let file = FileEntry { name: "file".into(), size: len, mode: 0o600, chunks: own };
        found.insert(kept.path.clone(), (kept, file));
    }
    found
}
