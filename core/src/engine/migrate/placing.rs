//! Files that go along with a program, at the destination: which of them may be made there, how they are made, and how
//! they are removed if the program does not come.
//!
//! What is there already is never touched. A file is made in a directory that is there, below one that this side has
//! named, and no symbolic link leads to it. It is written under a hidden name, which nothing else has; before it gets
//! its own name it is durably noted which inode it is, so that nothing else is removed in its place.

use std::fs::{File, Permissions};
use std::io;
use std::os::fd::AsRawFd;
use std::os::unix::fs::{PermissionsExt, fchown};
use std::path::{Path, PathBuf};

use rustix::fs::{CWD, OFlags};
use serde::{Deserialize, Serialize};

use super::link::LinkError;
use crate::base::careful::Place;
use crate::base::faults::fault;
use crate::base::io_error::IoError;
use crate::engine::copied_files::{Copied, CopiedFile, with_bytes};
use crate::engine::error::Error;
use crate::engine::sections;
use crate::image::{FileEntry, ImageReader, Manifest};

/// A file that a destination makes, or has made.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct MadeFile {
    /// Its path.
    pub path: PathBuf,
    /// The device and inode of what has that name, or is about to get it; `None` if nothing of this migration has.
    number: Option<(u64, u64)>,
}

/// What is found of the files that an offer would send along.
#[derive(Debug, Default)]
pub(super) struct Looked {
    /// Of each whether it is there.
    pub(super) there: Vec<bool>,
    /// Bytes of those that are not.
    pub(super) lacking: u64,
    /// What is in the way.
    pub(super) reasons: Vec<String>,
}

/// Looks at the files that an offer would send along. Those that are not there may be made or are in the way; the
/// outline does not require them any more.
pub(super) fn look(outline: &mut Manifest, below: &[PathBuf]) -> Result<Looked, LinkError> {
    let mut looked = Looked::default();
    let Some((files, _)) = read(outline)? else { return Ok(looked) };
    for file in &files {
        let found = std::fs::symlink_metadata(&file.path).is_ok();
        looked.there.push(found);
        let reason = if found { check_size(file) } else { check_place(&file.path, below) };
        looked.reasons.extend(reason.err().map(|error| error.to_string()));
        if !found {
            looked.lacking = looked.lacking.saturating_add(file.size);
        }
    }
    let there = &looked.there;
    let lacking =
        |path: &Path| files.iter().zip(there).any(|(file, there)| file.path == path && !*there);
    outline.required.retain(|file| !lacking(&file.path));
    Ok(looked)
}

/// A file that is there and is shorter is another one: what the program writes meanwhile only makes it longer here,
/// if it is the same.
fn check_size(file: &CopiedFile) -> Result<(), Error> {
    match std::fs::metadata(&file.path) {
        Ok(meta) if meta.len() < file.size => {
            Err(Error::FileInPlace { path: file.path.clone(), found: meta.len() })
        }
        // Whatever else it is, it is compared with what the program requires.
        _ => Ok(()),
    }
}

/// Whether a file may be made here.
fn check_place(path: &Path, below: &[PathBuf]) -> Result<(), Error> {
    if !below.iter().any(|root| path.starts_with(root) && path != root) {
        return Err(Error::FileNotPermitted { path: path.to_owned() });
    }
    Place::find(CWD, path).map(drop).map_err(|source| Error::Io {
        what: format!("{} cannot be made: its directory", path.display()),
        source,
    })
}

fn read(manifest: &Manifest) -> Result<Option<Copied<'_>>, LinkError> {
    let bad = |what: &str| LinkError::Protocol(format!("its manifest: {what}"));
    sections::read_copied_files(manifest).map_err(bad)
}

/// The files that have come along with an image.
pub(super) struct Coming {
    files: Vec<(CopiedFile, FileEntry)>,
}

impl Coming {
    /// Those of a manifest, all of which may be made; `None` if the source does not send any.
    ///
    /// # Errors
    /// What the manifest says makes no sense, or one may not be made.
    pub(super) fn of(manifest: &Manifest, below: &[PathBuf]) -> Result<Option<Self>, Error> {
        let Some((files, chunks)) = read(manifest)? else { return Ok(None) };
        files.iter().try_for_each(|file| check_place(&file.path, below))?;
        let bad = || LinkError::Protocol("its manifest: files that go along lack bytes".into());
        let files = with_bytes(files, chunks).ok_or_else(bad)?;
        Ok(Some(Self { files }))
    }

    /// What is noted before anything is made.
    pub(super) fn to_note(&self) -> Vec<MadeFile> {
        let made = |(file, _): &(CopiedFile, _)| MadeFile { path: file.path.clone(), number: None };
        self.files.iter().map(made).collect()
    }

    /// Writes them under hidden names, which have the migration's, from what the image has, all synced. Gives what is to
    /// be noted before they get their own.
    ///
    /// # Errors
    /// One cannot be made. What was made is there still, under hidden names.
    pub(super) fn write(
        &self,
        image: &Path,
        migration: &str,
    ) -> Result<(Hidden<'_>, Vec<MadeFile>), Error> {
        let (mut places, mut made) = (Vec::new(), Vec::new());
        if self.files.is_empty() {
            return Ok((Hidden(places), made));
        }
        let image = ImageReader::open(image)?;
        for (number, (file, entry)) in self.files.iter().enumerate() {
            let failed =
                |source| Error::Io { what: format!("cannot make {}", file.path.display()), source };
            let place = Place::find(CWD, &file.path).map_err(failed)?;
            let hidden = hidden(migration, number);
            let entry = FileEntry { name: hidden.clone(), ..entry.clone() };
            image.extract_file(&entry, place.directory())?;
            let hidden = place.beside(&hidden).map_err(failed)?;
            let number = Some(finish(&hidden, file).map_err(failed)?);
            made.push(MadeFile { path: file.path.clone(), number });
            places.push((hidden, place, file));
        }
        Ok((Hidden(places), made))
    }
}

/// Files that were written under hidden names, and where each belongs.
pub(super) struct Hidden<'c>(Vec<(Place, Place, &'c CopiedFile)>);

impl Hidden<'_> {
    /// Gives them their own names.
    ///
    /// # Errors
    /// Something has the name of one. Others have theirs.
    pub(super) fn show(self) -> Result<(), Error> {
        fault("written")?;
        for (hidden, place, file) in self.0 {
            let named = hidden.rename_to(&place).and_then(|()| sync_directory(&place));
            named.map_err(|source| Error::Io {
                what: format!("cannot make {}", file.path.display()),
                source,
            })?;
        }
        fault("placed")?;
        Ok(())
    }
}

/// Gives a file its owner and mode, and syncs it. Gives its number.
fn finish(hidden: &Place, file: &CopiedFile) -> io::Result<(u64, u64)> {
    let made = hidden.open(OFlags::RDWR)?;
    fchown(&made, Some(file.uid), Some(file.gid))?;
    made.set_permissions(Permissions::from_mode(file.mode))?;
    made.sync_all()?;
    hidden.number()
}

fn sync_directory(place: &Place) -> io::Result<()> {
    File::open(format!("/proc/self/fd/{}", place.directory().as_raw_fd()))?.sync_all()
}

/// The name under which the file of this number is written.
fn hidden(migration: &str, number: usize) -> String {
    format!(".gpucr-{migration}-{number}")
}

/// Removes the files that were made for a migration, whose program does not come. What has the name of one by now and is
/// another file stays.
///
/// # Errors
/// One cannot be removed; all others are gone.
pub(super) fn remove(migration: &str, files: &[MadeFile]) -> Result<(), IoError> {
    let mut failed = None;
    for (number, file) in files.iter().enumerate() {
        if let Err(source) = remove_one(&hidden(migration, number), file) {
            let what = format!("cannot remove {}", file.path.display());
            failed.get_or_insert(IoError { what, source });
        }
    }
    failed.map_or(Ok(()), Err)
}

fn remove_one(hidden: &str, file: &MadeFile) -> io::Result<()> {
    let is_gone = |error: &io::Error| error.kind() == io::ErrorKind::NotFound;
    let place = match Place::find(CWD, &file.path) {
        Err(error) if is_gone(&error) => return Ok(()),
        place => place?,
    };
    match place.beside(hidden)?.remove() {
        Err(error) if !is_gone(&error) => return Err(error),
        _ => {}
    }
    match place.number() {
        Err(error) if is_gone(&error) => Ok(()),
        Err(error) => Err(error),
        Ok(number) if file.number == Some(number) => place.remove(),
        Ok(_) => Ok(()),
    }
}

#[cfg(test)]
mod tests;
