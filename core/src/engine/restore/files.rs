//! Files that a program had open and that are not as they were at the dump.
//!
//! A log is a file to whose end all who had it open were adding. With [`FilePolicy::Keep`] it may have other bytes by
//! now, and the program goes on at its end. With [`FilePolicy::Rewind`] what a program was writing is made what it was:
//! by cutting off what was added, if the end of what is left shows that it is the same file, or else from the copy
//! that the image has. Nothing is changed to which a symbolic link leads, or that belongs to another owner than at the
//! dump; and a log to which one leads, or that another owner has put there, is not gone on with.

use std::collections::{BTreeMap, HashMap};
use std::fs::File;
use std::io;
use std::os::unix::fs::{FileExt, MetadataExt};
use std::path::PathBuf;

use rustix::fs::OFlags;

use crate::base::file_tree::FileTree;
use crate::engine::error::Error;
use crate::engine::kept_files::{self, Kept};
use crate::engine::sections;
use crate::host::criu::{FILES, open_files};
use crate::image::{FileEntry, RequiredFile};

use super::source::Source;

/// What is done about files that are not as they were.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub enum FilePolicy {
    /// Logs stay as they are, and the program goes on at their ends. Other files must have their old sizes.
    #[default]
    Keep,
    /// Files that the program was writing are made what they were.
    Rewind,
    /// Nothing may have another size.
    Strict,
}

/// What became of a file that was not as it had been.
#[derive(Debug, Clone, PartialEq, Eq, serde::Serialize)]
pub struct ChangedFile {
    /// Its path.
    #[serde(serialize_with = "crate::base::format::lossy")]
    pub path: PathBuf,
    /// Its bytes at the dump.
    pub expected: u64,
    /// Its bytes before the restore; none if it was not there.
    pub found: Option<u64>,
    /// What was done.
    pub done: FileFate,
}

/// See [`ChangedFile::done`].
#[derive(Debug, Clone, Copy, PartialEq, Eq, serde::Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum FileFate {
    /// The program goes on at its end.
    Continued,
    /// It was cut to its old size.
    CutBack,
    /// It was written anew from the copy in the image.
    PutBack,
}

/// What is to be done about files.
#[derive(Debug, Default)]
pub(super) struct Files {
    /// Where they are.
    tree: FileTree,
    changed: Vec<ChangedFile>,
    /// For those that are put back: what the image has of them.
    copies: HashMap<PathBuf, (Kept, FileEntry)>,
}

impl Files {
    /// Compares the files that the program needs with what they were. Gives what is to be done, and every reason why it
    /// cannot be restored.
    ///
    /// # Errors
    /// The image cannot be read.
    pub(super) fn look(
        image: &Source,
        policy: FilePolicy,
        tree: &FileTree,
    ) -> Result<(Self, Vec<Error>), Error> {
        let mut files = Self { tree: tree.clone(), ..Self::default() };
        let mut reasons = Vec::new();
        let mut logs = Logs { image, paths: None };
        let kept = sections::read_kept_files(image.manifest());
        files.copies =
            kept.map(|(kept, chunks)| kept_files::kept(kept, chunks)).unwrap_or_default();
        files.copies.retain(|_, (kept, _)| kept.path.is_absolute());
        for file in &image.manifest().required {
            let found = tree.metadata(&file.path).ok().map(|meta| meta.len());
            let copy = files.copies.get(&file.path);
            let done = match (policy, copy) {
                (FilePolicy::Rewind, Some(copy)) => rewound(image, tree, file, found, copy),
                _ if found == Some(file.size) => Ok(None),
                (FilePolicy::Keep, copy) if found.is_some() && logs.have(file)? => {
                    is_own_log(tree, file, copy.map(|(kept, _)| kept))
                        .map(|()| Some(FileFate::Continued))
                }
                _ => Err(refused(file, found)),
            };
            let (path, expected) = (file.path.clone(), file.size);
            match done {
                Ok(Some(done)) => files.changed.push(ChangedFile { path, expected, found, done }),
                Ok(None) => {}
                Err(error) => reasons.push(error),
            }
        }
        Ok((files, reasons))
    }

    /// The sizes of the files at whose ends the program goes on.
    pub(super) fn continued(&self) -> BTreeMap<PathBuf, u64> {
        let continued = self.changed.iter().filter(|file| file.done == FileFate::Continued);
        continued.filter_map(|file| Some((file.path.clone(), file.found?))).collect()
    }

    /// Makes files what they were.
    ///
    /// # Errors
    /// A file cannot be written, or has just changed. Others may have been made what they were.
    pub(super) fn rewind(&self, image: &Source) -> Result<(), Error> {
        for file in &self.changed {
            let Some((kept, entry)) = self.copies.get(&file.path) else { continue };
            let bytes = image.kept_file(entry)?;
            let done = match file.done {
                FileFate::Continued => Ok(()),
                FileFate::PutBack => put_back(&self.tree, kept, &bytes),
                FileFate::CutBack => cut(&self.tree, kept, &bytes),
            };
            done.map_err(|source| Error::Io {
                what: format!("cannot make {} what it was", file.path.display()),
                source,
            })?;
        }
        Ok(())
    }

    /// What is told of it.
    pub(super) fn into_changed(self) -> Vec<ChangedFile> {
        self.changed
    }
}

/// Which files are logs: read when it is first asked for.
struct Logs<'i> {
    image: &'i Source,
    paths: Option<BTreeMap<PathBuf, bool>>,
}

impl Logs<'_> {
    /// Whether all who had this file open were adding to its end.
    fn have(&mut self, file: &RequiredFile) -> Result<bool, Error> {
        if file.mapped {
            return Ok(false);
        }
        if self.paths.is_none() {
            let mut paths = BTreeMap::new();
            let files = &self.image.manifest().criu.files;
            let list = files.iter().find(|file| file.name == FILES);
            let list = list.map(|list| self.image.criu_file(list)).transpose()?;
            for file in list.as_deref().and_then(open_files).into_iter().flatten() {
                let is_at_end = file.is_at_end();
                let all = paths.entry(file.path).or_insert(true);
                *all = *all && is_at_end;
            }
            self.paths = Some(paths);
        }
        Ok(self.paths.as_ref().is_some_and(|paths| paths.get(&file.path) == Some(&true)))
    }
}

fn refused(file: &RequiredFile, found: Option<u64>) -> Error {
    let (path, expected) = (file.path.clone(), file.size);
    match found {
        Some(found) if found != expected => Error::FileChanged { path, found, expected },
        Some(_) => Error::FileAltered { path },
        None => Error::FileMissing { path },
    }
}

/// What is to be done so that a file is again what it was, of which the image has a copy; nothing if it is.
fn rewound(
    image: &Source,
    tree: &FileTree,
    file: &RequiredFile,
    found: Option<u64>,
    (kept, entry): &(Kept, FileEntry),
) -> Result<Option<FileFate>, Error> {
    if kept.size() != file.size {
        return Err(Error::Damaged { what: "what it says of the files that it has kept".into() });
    }
    if found.is_some() {
        let io =
            |source| Error::Io { what: format!("cannot read {}", file.path.display()), source };
        let now = open(tree, kept, OFlags::RDONLY).map_err(io)?;
        let mut bytes = vec![0; kept.len as usize];
        let is_same = found >= Some(file.size)
            && now.read_exact_at(&mut bytes, kept.from).is_ok()
            && bytes == image.kept_file(entry)?;
        match is_same {
            true if found == Some(file.size) => return Ok(None),
            true => return Ok(Some(FileFate::CutBack)),
            false => {}
        }
    }
    if kept.is_whole() { Ok(Some(FileFate::PutBack)) } else { Err(refused(file, found)) }
}

/// Refuses a log that somebody else has put in the place of the program's.
fn is_own_log(tree: &FileTree, file: &RequiredFile, kept: Option<&Kept>) -> Result<(), Error> {
    let opened = tree.place(&file.path).and_then(|place| place.open(OFlags::PATH));
    let is_own = opened.and_then(|log| Ok(log.metadata()?.uid()));
    match is_own {
        Ok(owner) if kept.is_none_or(|kept| kept.uid == owner) => Ok(()),
        _ => Err(Error::FileAltered { path: file.path.clone() }),
    }
}

/// Opens the file that was kept, if it still belongs to who owned it.
fn open(tree: &FileTree, kept: &Kept, flags: OFlags) -> io::Result<File> {
    let file = tree.place(&kept.path)?.open(flags)?;
    if file.metadata()?.uid() != kept.uid {
        return Err(io::Error::other("it belongs to another user than at the dump"));
    }
    Ok(file)
}

/// Cuts a file, which has grown, if what is left is what it was.
fn cut(tree: &FileTree, kept: &Kept, bytes: &[u8]) -> io::Result<()> {
    let file = open(tree, kept, OFlags::RDWR)?;
    let mut now = vec![0; bytes.len()];
    file.read_exact_at(&mut now, kept.from)?;
    if now != bytes {
        return Err(io::Error::other("it has just changed"));
    }
    file.set_len(kept.size())
}

/// Makes a file what it was, or makes it anew in a directory that is its owner's or root's.
fn put_back(tree: &FileTree, kept: &Kept, bytes: &[u8]) -> io::Result<()> {
    let file = match open(tree, kept, OFlags::RDWR) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => {
            let place = tree.place(&kept.path)?;
            let owner = rustix::fs::fstat(place.directory())?.st_uid;
            if owner != 0 && owner != kept.uid {
                return Err(io::Error::other("its directory belongs to another user"));
            }
            let new = place.create()?;
            std::os::unix::fs::fchown(&new, Some(kept.uid), Some(kept.gid))?;
            let mode = std::os::unix::fs::PermissionsExt::from_mode(kept.mode & 0o777);
            new.set_permissions(mode)?;
            new
        }
        file => file?,
    };
    file.write_all_at(bytes, 0)?;
    file.set_len(bytes.len() as u64)
}
