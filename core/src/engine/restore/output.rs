//! What a program had written before it was ended, to be restored once more.

use crate::image::Manifest;

/// Cuts files that the program had open, and has written more to since, back to what they were at the dump:
/// before it is restored once more.
pub(super) fn take_back_output(manifest: &Manifest) {
    for file in manifest.required.iter().filter(|file| file.open) {
        let longer = std::fs::metadata(&file.path).is_ok_and(|meta| meta.len() > file.size);
        if longer
            && let Err(error) = std::fs::File::options()
                .write(true)
                .open(&file.path)
                .and_then(|file_now| file_now.set_len(file.size))
        {
            tracing::warn!(%error, path = %file.path.display(), "cannot be cut back");
        }
    }
}
