//! Whether there is room for what an image says that a restore needs.

use super::room::check_bytes;
use super::source::Source;
use crate::engine::error::Error;
use crate::image::DriverKind;

/// Refuses an image for which there is no room in memory, as far as that can be said beforehand: CRIU's files lie in
/// memory until the processes have their own, and what the software driver has for device memory is the host's.
/// So many bytes of that, `there`, were taken already.
///
/// # Errors
/// [`Error::NoRoom`]; it cannot be found out.
pub(super) fn check(image: &Source, there: u64) -> Result<(), Error> {
    let manifest = image.manifest();
    let blocks = match manifest.driver.kind {
        DriverKind::Soft => manifest.blocks(),
        DriverKind::Nvidia => Vec::new(),
    };
    let device = blocks.iter().fold(0, |sum: u64, block| sum.saturating_add(block.size));
    check_bytes(image.host_memory()?.saturating_add(device.saturating_sub(there)))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::base::memory;
    use crate::image::tests::manifest;
    use crate::image::{FileChunk, FileEntry, ImageWriter};
    use crate::store::{Compression, MAX_CHUNK};

    /// An image whose processes have so many chunks of memory, all the same.
    fn image(chunks: usize, byte: u8) -> (tempfile::TempDir, Source) {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("image");
        let writer = ImageWriter::create(&path, Compression::Level(1)).unwrap();
        let chunk = writer.chunks().put(&vec![byte; MAX_CHUNK]).unwrap();
        let size = chunks as u64 * MAX_CHUNK as u64;
        let chunks = vec![FileChunk { id: chunk, len: MAX_CHUNK as u32 }; chunks];
        let file = FileEntry { name: "pages-1.img".into(), size, mode: 0o600, chunks };
        let mut manifest = manifest();
        manifest.criu.files = vec![file];
        writer.commit(&manifest).unwrap();
        assert!(std::fs::metadata(path.join("manifest")).unwrap().len() < 64 << 20);
        (dir, Source::open(&path, false).unwrap())
    }

    #[test]
    fn an_image_that_needs_more_memory_than_there_is_is_refused() {
        for byte in [0, 1] {
            let (_dir, small) = image(1, byte);
            assert_eq!(small.host_memory().unwrap(), MAX_CHUNK as u64);
            check(&small, 0).unwrap();
            let room = memory::host().unwrap().with_swap();
            // Twice as much, since others may give some back meanwhile.
            let (_dir, large) = image(2 * room as usize / MAX_CHUNK + 1, byte);
            let error = check(&large, 0).unwrap_err();
            assert!(matches!(error, Error::NoRoom { needed, .. } if needed > 2 * room), "{error}");
        }
    }
}
