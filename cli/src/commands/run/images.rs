//! The images of the program that `gpucr run` watches over.

use std::path::{Path, PathBuf};

use gpucr_core::{Quiet, verify};

use crate::commands::note;

/// Those from which it can be restored, the last one last.
pub(super) struct Images {
    all: Vec<Made>,
    keep: usize,
    /// Where the one is that is restored next.
    chosen: usize,
}

struct Made {
    path: PathBuf,
    /// It is not removed: somebody has named it, or it was there before.
    stays: bool,
}

impl Images {
    /// At first there are those of an earlier time, if the program goes on with one. Of those that come and nobody names
    /// `keep` are kept.
    pub(super) fn new(earlier: Vec<PathBuf>, keep: usize) -> Self {
        let all: Vec<Made> = earlier.into_iter().map(|path| Made { path, stays: true }).collect();
        Self { chosen: all.len().saturating_sub(1), all, keep }
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
        let gone = self.all.extract_if(.., goes).map(|made| made.path).collect();
        self.chosen = self.all.len().saturating_sub(1);
        gone
    }

    /// The one to restore.
    pub(super) fn next(&self) -> Option<&Path> {
        self.all.get(self.chosen).map(|made| made.path.as_path())
    }

    /// The last one that is not damaged is restored next. If all seem to be it is the last: a disk may be away for a while.
    pub(super) fn choose(&mut self, is_damaged: impl Fn(&Path) -> bool) {
        let sound = self.all.iter().rposition(|made| !is_damaged(&made.path));
        self.chosen = sound.unwrap_or(self.all.len().saturating_sub(1));
    }
}

/// Whether an image cannot be restored because of what it is.
pub(super) fn is_damaged(image: &Path) -> bool {
    let is_whole = verify::verify(image, &Quiet).is_ok_and(|report| report.whole);
    if !is_whole {
        note!("gpucr: the image {} is damaged, and skipped", image.display());
    }
    !is_whole
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn images_that_have_names_are_kept() {
        let mut images = Images::new(vec!["first".into()], 2);
        assert_eq!(images.next(), Some(Path::new("first")));
        assert!(images.took("a".into(), false).is_empty());
        assert!(images.took("named".into(), true).is_empty());
        assert!(images.took("b".into(), false).is_empty());
        assert_eq!(images.took("c".into(), false), [PathBuf::from("a")]);
        assert_eq!(images.took("d".into(), false), [PathBuf::from("b")]);
        assert_eq!(images.next(), Some(Path::new("d")));
    }

    #[test]
    fn a_damaged_image_is_passed_over() {
        let mut images = Images::new(Vec::new(), usize::MAX);
        images.choose(|_| true);
        assert_eq!(images.next(), None);
        let mut images = Images::new(vec!["a".into(), "b".into()], usize::MAX);
        assert_eq!(images.next(), Some(Path::new("b")));
        images.took("c".into(), false);
        images.choose(|image| image != Path::new("a"));
        assert_eq!(images.next(), Some(Path::new("a")));
        images.choose(|_| true);
        assert_eq!(images.next(), Some(Path::new("c")), "they may be there again");
        images.choose(|image| image == Path::new("c"));
        images.took("d".into(), false);
        assert_eq!(images.next(), Some(Path::new("d")));
    }
}
