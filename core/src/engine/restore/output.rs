//! What a program had written before it was ended, to be restored once more.

use std::path::PathBuf;

use super::files::FilePolicy;
use super::options::Options;
use crate::image::Manifest;

/// The files that a program has open, and how many bytes each has when the program goes on.
#[derive(Debug, Default)]
pub(super) struct Output(Vec<(PathBuf, u64)>);

impl Output {
    /// Before the program is restored for the first time. A log that it goes on with has grown since the dump, maybe.
    pub(super) fn note(manifest: &Manifest, policy: FilePolicy) -> Self {
        let open = manifest.required.iter().filter(|file| file.open);
        let noted = open.map(|file| {
            let now = std::fs::metadata(&file.path).map(|meta| meta.len());
            let kept = now.ok().filter(|_| policy == FilePolicy::Keep);
            (file.path.clone(), kept.unwrap_or(file.size))
        });
        Self(noted.collect())
    }

    /// The same, if a program with these options may have to be restored once more. An image that cannot be read is not
    /// restored at all.
    pub(super) fn of(options: &Options) -> Self {
        if !options.on_demand && options.share.is_none() {
            return Self::default();
        }
        let manifest = options.trust.manifest(&options.image);
        manifest.map(|manifest| Self::note(&manifest, options.files)).unwrap_or_default()
    }

    /// Cuts files that the program has written more to since back to what they were: before it is restored once more.
    pub(super) fn take_back(&self) {
        for (path, size) in &self.0 {
            let longer = std::fs::metadata(path).is_ok_and(|meta| meta.len() > *size);
            if longer
                && let Err(error) = std::fs::File::options()
                    .write(true)
                    .open(path)
                    .and_then(|file_now| file_now.set_len(*size))
            {
                tracing::warn!(%error, path = %path.display(), "cannot be cut back");
            }
        }
    }
}
