//! Which files go along.

use std::collections::HashSet;
use std::path::Path;

use super::Outgoing;
use crate::engine::migrate::link::LinkError;
use crate::engine::sections;
use crate::image::Manifest;

impl Outgoing {
    /// Whether files that the program has open go along, as far as the other side lacks them.
    pub(crate) fn copies_files(&self) -> bool {
        self.copies_files
    }

    /// Whether the other side has said that it has such a file.
    pub(crate) fn is_there(&self, path: &Path) -> bool {
        self.files_there.lock().contains(path)
    }

    /// The other side has said of each file of the offer whether it is there.
    ///
    /// # Errors
    /// Not of each.
    pub(super) fn take_answer(&self, outline: &Manifest, there: &[bool]) -> Result<(), LinkError> {
        let offered = sections::read_copied_files(outline).ok().flatten();
        let offered = offered.map(|(files, _)| files).unwrap_or_default();
        if offered.len() != there.len() {
            let what = "it does not say of each file whether that is there".to_owned();
            return Err(LinkError::Protocol(what));
        }
        let found = offered.into_iter().zip(there).filter(|(_, there)| **there);
        let found: HashSet<_> = found.map(|(file, _)| file.path).collect();
        *self.files_there.lock() = found;
        Ok(())
    }
}
