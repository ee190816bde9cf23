//! The images of the program that `gpucr run` watches over.

use std::path::{Path, PathBuf};

use gpucr_core::{Quiet, verify};

use crate::commands::note;

/// Those from which it can be restored, the last one last.
pub(super) struct Images {
    all: Vec<Made>,
    keep: usize,
}

struct Made {
    path: PathBuf,
    /// It is not removed: somebody has named it, or it was there before.
    stays: bool,
}

impl Images {
    /// At first there is the one with which the program goes on, if it does so. Of those that nobody names `keep` are kept.
    pub(super) fn new(first: Option<PathBuf>, keep: usize) -> Self {
        Self { all: first.map(|path| Made { path, stays: true }).into_iter().collect(), keep }
    }

    /// There is one more. Gives those that are not to be kept any more.
    pub(super) fn took(&mut self, path: PathBuf, is_named: bool) -> Vec<PathBuf> {
        self.all.push(Made { path, stays: is_named });
        let unnamed = self.all.iter().filter(|made| !made.stays).count();
        let mut surplus = unnamed.saturating_sub(self.keep);
        let goes = |made: &mut Made| {
            let goes = !made.stays && surplus > 0;
            surplus -= usize::from(goes);
            goes
        };
        self.all.extract_if(.., goes).map(|made| made.path).collect()
    }

    /// The one to restore.
    pub(super) fn last(&self) -> Option<&Path> {
        self.all.last().map(|made| made.path.as_path())
    }

    /// From here on the one before counts as the last, and so on, as long as the last one is damaged.
    pub(super) fn pass_over_if(&mut self, is_damaged: impl Fn(&Path) -> bool) {
        while self.last().is_some_and(&is_damaged) {
            self.all.pop();
        }
    }
}

/// Whether an image cannot be restored because of what it is.
pub(super) fn is_damaged(image: &Path) -> bool {
    let is_whole = verify::verify(image, &Quiet).is_ok_and(|report| report.whole);
    if !is_whole {
        note!("gpucr: the image {} is damaged, and passed over", image.display());
    }
    !is_whole
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn images_that_have_names_are_kept() {
        let mut images = Images::new(Some("first".into()), 2);
        assert_eq!(images.last(), Some(Path::new("first")));
        assert!(images.took("a".into(), false).is_empty());
        assert!(images.took("named".into(), true).is_empty());
        assert!(images.took("b".into(), false).is_empty());
        assert_eq!(images.took("c".into(), false), [PathBuf::from("a")]);
        assert_eq!(images.took("d".into(), false), [PathBuf::from("b")]);
        assert_eq!(images.last(), Some(Path::new("d")));
    }

    #[test]
    fn a_damaged_image_is_passed_over() {
        let mut images = Images::new(None, usize::MAX);
        images.pass_over_if(|_| true);
        assert_eq!(images.last(), None);
        for image in ["a", "b", "c"] {
            images.took(image.into(), false);
        }
        images.pass_over_if(|image| image != Path::new("a"));
        assert_eq!(images.last(), Some(Path::new("a")));
        images.pass_over_if(|_| true);
        assert_eq!(images.last(), None);
    }
}
