//! Chunks that need not be written, since the parent of an image or its store has them.

use std::collections::HashMap;
use std::path::Path;

use super::index::Index;
use super::{ChunkId, StoreError};

/// Addresses of chunks, with the bytes that each takes; about 40 bytes of memory for each.
#[derive(Debug, Default)]
pub(crate) struct StoredChunks {
    /// The addresses are in order.
    chunks: Vec<(ChunkId, u32)>,
}

impl StoredChunks {
    /// Whether a chunk is there.
    pub(crate) fn contains(&self, id: &ChunkId) -> bool {
        self.stored_len(id).is_some()
    }

    /// The bytes that a chunk takes where it is; none if it is not there.
    pub(crate) fn stored_len(&self, id: &ChunkId) -> Option<u32> {
        let place = self.chunks.binary_search_by_key(id, |(id, _)| *id).ok()?;
        Some(self.chunks[place].1)
    }

    /// Adds the chunks that an index names in packs of the directory `packs`. Those of packs that
    /// are not there, or that have another length, are left out: they are to be written again.
    ///
    /// Nothing is added after a failure. Call [`sort`](Self::sort) after the last.
    pub(crate) fn add(&mut self, index: &Path, packs: &Path) -> Result<(), StoreError> {
        let before = self.chunks.len();
        // The packs of each chunk are looked at after all were read, and each once.
        let mut numbers: Vec<Option<u32>> = Vec::new();
        let scanned = Index::scan(index, |entry| {
            self.chunks.push((entry.id, entry.stored_len));
            numbers.push(entry.encoding.has_data().then_some(entry.pack));
        });
        let infos = match scanned {
            Ok((infos, _)) => infos,
            Err(error) => {
                self.chunks.truncate(before);
                return Err(error);
            }
        };
        let mut whole: HashMap<u32, bool> = HashMap::new();
        let mut usable = |number: u32| {
            *whole.entry(number).or_insert_with(|| {
                let info = infos[number as usize];
                let meta = std::fs::symlink_metadata(packs.join(info.id.file_name()));
                meta.is_ok_and(|meta| meta.is_file() && meta.len() == info.len)
            })
        };
        let mut kept = before;
        for (place, number) in numbers.into_iter().enumerate() {
            if number.is_none_or(&mut usable) {
                self.chunks[kept] = self.chunks[before + place];
                kept += 1;
            }
        }
        self.chunks.truncate(kept);
        Ok(())
    }

    /// Brings the chunks in order, each once.
    pub(crate) fn sort(&mut self) {
        self.chunks.sort_unstable();
        self.chunks.dedup_by_key(|(id, _)| *id);
        self.chunks.shrink_to_fit();
    }
}
