//! What a program had written before it was ended, to be restored once more.

use std::os::unix::fs::MetadataExt;
use std::path::PathBuf;

use rustix::fs::OFlags;

use super::files::FilePolicy;
use super::options::Options;
use crate::base::file_tree::FileTree;
use crate::image::Manifest;

/// A file that a program has open, when the program goes on.
#[derive(Debug)]
struct Noted {
    path: PathBuf,
    /// Its device and inode; none if it is not there, or is reached by a link.
    file: Option<(u64, u64)>,
    bytes: u64,
}

/// The files that a program has open, and how many bytes each has when the program goes on.
#[derive(Debug, Default)]
pub(super) struct Output {
    files: Vec<Noted>,
    tree: FileTree,
}

impl Output {
    /// Before the program is restored for the first time. A log that it goes on with has grown since the dump, maybe.
    pub(super) fn note(manifest: &Manifest, policy: FilePolicy, tree: FileTree) -> Self {
        let open = manifest.required.iter().filter(|file| file.open);
        let noted = open.map(|file| {
            let opened = tree.place(&file.path).and_then(|place| place.open(OFlags::RDONLY));
            let now = opened.and_then(|file| file.metadata()).ok();
            let kept = now.as_ref().filter(|_| policy == FilePolicy::Keep);
            Noted {
                path: file.path.clone(),
                file: now.as_ref().map(|meta| (meta.dev(), meta.ino())),
                bytes: kept.map_or(file.size, |meta| meta.len()),
            }
        });
        Self { files: noted.collect(), tree }
    }

    /// The same, if a program with these options may have to be restored once more. An image that cannot be read is not
    /// restored at all.
    pub(super) fn of(options: &Options) -> Self {
        if !options.on_demand && options.share.is_none() {
            return Self::default();
        }
        let manifest = options.trust.manifest(&options.image);
        manifest
            .map(|manifest| Self::note(&manifest, options.files, options.tree()))
            .unwrap_or_default()
    }

    /// Cuts files that the program has written more to since back to what they were: before it is restored once more.
    /// What is no longer the same file, or is reached by a link, is left alone: the program may have put it there.
    pub(super) fn take_back(&self) {
        for Noted { path, file, bytes } in &self.files {
            let cut = || -> std::io::Result<()> {
                let now = self.tree.place(path)?.open(OFlags::RDWR)?;
                let meta = now.metadata()?;
                if *file == Some((meta.dev(), meta.ino())) && meta.len() > *bytes {
                    now.set_len(*bytes)?;
                }
                Ok(())
            };
            if let Err(error) = cut() {
                tracing::warn!(%error, path = %path.display(), "cannot be truncated");
            }
        }
    }
}
