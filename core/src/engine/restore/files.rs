//! Files that a program had open and that are not as they were at the dump.
//!
//! A log is a file to whose end all who had it open were adding. With [`FilePolicy::Keep`] it may have other bytes by
//! now, and the program goes on at its end. With [`FilePolicy::Rewind`] what a program was writing is made what it was:
//! by cutting off what was added, if the end of what is left shows that it is the same file, or else from the copy
//! that the image has. No link is followed then, and no file of another owner is touched.

use std::collections::{BTreeMap, HashMap};
use std::fs::{File, OpenOptions};
use std::io;
use std::os::unix::fs::{FileExt, MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};

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
    pub(super) fn look(image: &Source, policy: FilePolicy) -> Result<(Self, Vec<Error>), Error> {
        let mut files = Self::default();
        let mut reasons = Vec::new();
        let mut logs = Logs { image, paths: None };
        if policy == FilePolicy::Rewind {
            let kept = sections::read_kept_files(image.manifest());
            files.copies =
                kept.map(|(kept, chunks)| kept_files::kept(kept, chunks)).unwrap_or_default();
            files.copies.retain(|_, (kept, _)| kept.path.is_absolute());
        }
        for file in &image.manifest().required {
            let found = std::fs::metadata(&file.path).ok().map(|meta| meta.len());
            let copy = files.copies.get(&file.path).filter(|_| !file.mapped);
            let done = match (policy, copy) {
                (FilePolicy::Rewind, Some(copy)) => rewound(image, file, found, copy),
                _ if found == Some(file.size) => Ok(None),
                (FilePolicy::Keep, _) if found.is_some() && logs.have(file)? => {
                    Ok(Some(FileFate::Continued))
                }
                (FilePolicy::Rewind, None) if found > Some(file.size) && logs.have(file)? => {
                    Ok(Some(FileFate::CutBack))
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
            let copy = self.copies.get(&file.path);
            let bytes = match (file.done, copy) {
                (FileFate::PutBack, Some((_, entry))) => Some(image.kept_file(entry)?),
                _ => None,
            };
            let done = match (file.done, &bytes, copy) {
                (FileFate::Continued, ..) => Ok(()),
                (FileFate::PutBack, Some(bytes), Some((kept, _))) => put_back(kept, bytes),
                _ => cut(&file.path, file.expected, copy.map(|(kept, _)| kept)),
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
        let now = open(&file.path, kept, false).map_err(io)?;
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

/// Opens the file that was kept, if it still belongs to who owned it.
fn open(path: &Path, kept: &Kept, write: bool) -> io::Result<File> {
    let file = open_own(path, write)?;
    if file.metadata()?.uid() != kept.uid {
        return Err(io::Error::other("it belongs to another user than at the dump"));
    }
    Ok(file)
}

/// Opens a regular file that is no link.
fn open_own(path: &Path, write: bool) -> io::Result<File> {
    let file = OpenOptions::new()
        .read(true)
        .write(write)
        .custom_flags(libc::O_NOFOLLOW | libc::O_NONBLOCK)
        .open(path)?;
    let is_file = file.metadata()?.is_file();
    if is_file { Ok(file) } else { Err(io::Error::other("it is no regular file")) }
}

fn cut(path: &Path, size: u64, kept: Option<&Kept>) -> io::Result<()> {
    let file = match kept {
        Some(kept) => open(path, kept, true)?,
        None => open_own(path, true)?,
    };
    if file.metadata()?.len() < size {
        return Err(io::Error::other("it has just become shorter"));
    }
    file.set_len(size)
}

fn put_back(kept: &Kept, bytes: &[u8]) -> io::Result<()> {
    let file = match open(&kept.path, kept, true) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => {
            let new = OpenOptions::new()
                .write(true)
                .create_new(true)
                .mode(0o600)
                .custom_flags(libc::O_NOFOLLOW)
                .open(&kept.path)?;
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
