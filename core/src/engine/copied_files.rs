//! Files that go along with a program that is migrated: the section of the manifest that says which, and their bytes on
//! their way into the image. Who makes them at the destination is in [`migrate`](super::migrate).

use std::collections::{BTreeSet, HashSet};
use std::fs::File;
use std::io;
use std::os::unix::fs::{FileExt, MetadataExt, PermissionsExt};
use std::path::{Component, Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};

use serde::{Deserialize, Serialize};

use super::error::Error;
use super::kept_files;
use crate::base::file_tree::FileTree;
use crate::host::process::files::{self, HeldFile};
use crate::image::{Contents, FileChunk, FileEntry, ImageWriter};

/// Most files that go along.
const MOST: usize = 4096;
/// The bits of a mode that a file at the destination gets.
const PERMISSIONS: u32 = 0o777;

/// A file that goes along, or could.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct CopiedFile {
    /// The file's path.
    pub(super) path: PathBuf,
    /// How many bytes it has.
    pub(super) size: u64,
    /// The file's permission bits, owner and group.
    pub(super) mode: u32,
    pub(super) uid: u32,
    pub(super) gid: u32,
}

/// Those of a manifest, and the bytes of all one after the other.
pub(super) type Copied<'m> = (Vec<CopiedFile>, &'m [FileChunk]);

/// A regular file as its bytes are read.
struct Read<'s> {
    file: File,
    size: u64,
    mode: u32,
    stop: &'s AtomicBool,
}

impl Contents for Read<'_> {
    fn name(&self) -> &str {
        "copied"
    }

    fn mode(&self) -> u32 {
        self.mode
    }

    fn size(&self) -> u64 {
        self.size
    }

    fn read_exact_at(&self, bytes: &mut [u8], offset: u64) -> io::Result<()> {
        if self.stop.load(Ordering::Relaxed) {
            return Err(io::ErrorKind::Interrupted.into());
        }
        self.file.read_exact_at(bytes, offset)
    }
}

/// The files of some processes that could go along: what they have open or write, but executables and libraries.
pub(super) struct Candidates<'c> {
    /// The processes.
    pub(super) pids: &'c [u32],
    /// The names of files that have lost those by which they were opened.
    pub(super) renamed: &'c BTreeSet<PathBuf>,
    /// Where they have their paths.
    pub(super) tree: &'c FileTree,
    /// Set to end it.
    pub(super) stop: &'c AtomicBool,
}

impl Candidates<'_> {
    /// Those that there are now. What cannot be read, or made anew with its mode, is none.
    pub(super) fn list(&self) -> Vec<CopiedFile> {
        self.opened().map(|(file, _)| file).collect()
    }

    /// Puts the bytes of those into an image that are not known to be `there`, as they are now. Nothing in the image
    /// speaks of them yet. What cannot be read, or changes meanwhile, is left to the [copy](Self::copy).
    ///
    /// # Errors
    /// It was to end.
    pub(super) fn copy_ahead(
        &self,
        image: &ImageWriter,
        there: &dyn Fn(&Path) -> bool,
    ) -> Result<(), Error> {
        for (file, read) in self.opened().filter(|(file, _)| !there(&file.path)) {
            // Where nothing more can be written, whatever follows fails too.
            if let Err(error) = image.add_stretches(&read, std::slice::from_ref(&(0..read.size))) {
                tracing::info!(%error, path = %file.path.display(), "it is copied later");
            }
            if self.stop.load(Ordering::Relaxed) {
                return Err(Error::Interrupted);
            }
        }
        Ok(())
    }

    /// Puts those into an image that are not known to be `there`. The processes are frozen. Gives the bytes of all as
    /// chunks, one file after the other.
    ///
    /// # Errors
    /// A chunk cannot be written, or a file cannot be read: somebody else has cut it off.
    pub(super) fn copy(
        &self,
        image: &ImageWriter,
        there: &dyn Fn(&Path) -> bool,
    ) -> Result<(Vec<CopiedFile>, Vec<FileChunk>), Error> {
        let (mut all, mut chunks) = (Vec::new(), Vec::new());
        for (file, read) in self.opened().filter(|(file, _)| !there(&file.path)) {
            chunks.extend(image.add_contents(&read, &[])?.chunks);
            all.push(file);
        }
        Ok((all, chunks))
    }

    fn opened(&self) -> impl Iterator<Item = (CopiedFile, Read<'_>)> {
        let held =
            files::open_and_written(self.pids, self.renamed, self.tree).into_iter().take(MOST);
        held.filter_map(|HeldFile { path, link }| match self.open(&path, &link) {
            Ok(opened) => Some(opened),
            Err(error) => {
                tracing::info!(%error, path = %path.display(), "it cannot be copied");
                None
            }
        })
    }

    fn open(&self, path: &Path, link: &Path) -> io::Result<(CopiedFile, Read<'_>)> {
        let file = kept_files::open(path, link)?;
        let meta = file.metadata()?;
        let (size, mode) = (meta.size(), meta.permissions().mode() & 0o7777);
        if mode & !PERMISSIONS != 0 {
            return Err(io::Error::other("it has mode bits that no copy gets"));
        }
        let (path, uid, gid) = (path.to_owned(), meta.uid(), meta.gid());
        let copied = CopiedFile { path, size, mode, uid, gid };
        Ok((copied, Read { file, size, mode, stop: self.stop }))
    }
}

/// Checks what a manifest says of files that go along, which comes from anybody: not too many, each by one plain path,
/// with no more than permission bits.
pub(super) fn are_possible(files: &[CopiedFile]) -> bool {
    let mut paths = HashSet::new();
    files.len() <= MOST
        && files.iter().all(|file| {
            is_plain(&file.path) && file.mode & !PERMISSIONS == 0 && paths.insert(&file.path)
        })
}

/// Whether a path is absolute, and says nothing in a roundabout way.
pub fn is_plain(path: &Path) -> bool {
    let is_plain = |part| matches!(part, Component::RootDir | Component::Normal(_));
    let plain: PathBuf = path.components().collect();
    path.is_absolute() && path.components().all(is_plain) && plain.as_os_str() == path.as_os_str()
}

/// The files with their bytes as files of the image; `None` if the chunks are not those of the files.
pub(super) fn with_bytes(
    files: Vec<CopiedFile>,
    chunks: &[FileChunk],
) -> Option<Vec<(CopiedFile, FileEntry)>> {
    let mut chunks = chunks.iter().copied();
    let mut all = Vec::new();
    for file in files {
        let (mut own, mut len) = (Vec::new(), 0u64);
        while len < file.size {
            let chunk = chunks.next()?;
            len = len.checked_add(chunk.len.into())?;
            own.push(chunk);
        }
        let entry = FileEntry { name: "copied".into(), size: len, mode: 0o600, chunks: own };
        if len != file.size {
            return None;
        }
        all.push((file, entry));
    }
    chunks.next().is_none().then_some(all)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::store::ChunkId;

    fn file(path: &str, size: u64) -> CopiedFile {
        CopiedFile { path: path.into(), size, mode: 0o640, uid: 0, gid: 0 }
    }

    #[test]
    fn only_plain_paths_are_possible() {
        assert!(are_possible(&[file("/a/b", 1), file("/a/c", 0)]));
        for path in ["", "a", "a/b", "/a/../b", "/a/./b", "//a", "/a//b", "/a/", "/.."] {
            assert!(!are_possible(&[file(path, 1)]), "{path}");
        }
        assert!(!are_possible(&[file("/a", 1), file("/a", 1)]), "twice");
        let special = CopiedFile { mode: 0o4755, ..file("/a", 1) };
        assert!(!are_possible(&[special]), "a mode that gives rights");
        let many: Vec<_> = (0..=MOST).map(|n| file(&format!("/{n}"), 0)).collect();
        assert!(!are_possible(&many) && are_possible(&many[1..]));
    }

    #[test]
    fn chunks_are_those_of_the_files() {
        let chunk = |len| FileChunk { id: ChunkId::of(b"x"), len };
        let files = || vec![file("/a", 5), file("/b", 0), file("/c", 4)];
        let all = with_bytes(files(), &[chunk(2), chunk(3), chunk(4)]).expect("they fit");
        let lens: Vec<_> = all.iter().map(|(_, entry)| entry.chunks.len()).collect();
        assert_eq!(lens, [2, 0, 1]);
        for wrong in [&[chunk(5)][..], &[chunk(6), chunk(3)], &[chunk(5), chunk(4), chunk(1)]] {
            assert!(with_bytes(files(), wrong).is_none(), "{wrong:?}");
        }
    }
}
