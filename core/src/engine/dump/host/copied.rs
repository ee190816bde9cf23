//! What was copied ahead of the memory of a process, and where it is found again.

use rayon::prelude::*;

use crate::base::concat::concat;
use crate::base::ranges::Ranges;
use crate::host::process::{Place, RunningMemory};
use crate::image::FileChunk;

/// Chunks that one thread looks at in one go.
const BATCH: usize = 4 << 10;

/// A chunk of memory that was read while it was protected.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Copied {
    /// The addresses of its bytes, from starts to ends, in their order.
    pub(super) pieces: Vec<(u64, u64)>,
    pub(super) chunk: FileChunk,
}

impl Copied {
    /// Whether all of it is among these addresses.
    pub(super) fn lies_in(&self, pages: &Ranges) -> bool {
        self.pieces.iter().all(|(start, end)| pages.cover(*start, *end))
    }

    /// Whether any of it is among these addresses.
    pub(super) fn touches(&self, pages: &Ranges) -> bool {
        self.pieces.iter().any(|(start, end)| pages.touch(*start, *end))
    }
}

/// Where memory that is wanted lies in a file: stretches, from their starts to their ends.
pub(super) fn stretches(memory: &RunningMemory, wanted: &Ranges) -> Vec<std::ops::Range<u64>> {
    let mut found: Vec<std::ops::Range<u64>> = Vec::new();
    for place in memory.places() {
        for (start, end) in wanted.within(place.address, place.end()) {
            let (from, to) = (place.at + (start - place.address), place.at + (end - place.address));
            match found.last_mut().filter(|last| last.end == from) {
                Some(last) => last.end = to,
                None => found.push(from..to),
            }
        }
    }
    found
}

/// Chunks of a file, each with where it begins there, by their addresses.
pub(super) fn placed(
    places: &[Place],
    chunks: impl Iterator<Item = (u64, FileChunk)>,
) -> impl Iterator<Item = Copied> {
    chunks.map(|(at, chunk)| {
        let end = at + u64::from(chunk.len);
        let first = places.partition_point(|place| place.at + place.len <= at);
        let mut pieces = Ranges::default();
        for place in places[first..].iter().take_while(|place| place.at < end) {
            let (low, high) = (at.max(place.at), end.min(place.at + place.len));
            pieces.push(place.address + (low - place.at), place.address + (high - place.at));
        }
        Copied { pieces: pieces.iter().collect(), chunk }
    })
}

/// Of what was copied, which is in the order of the addresses, that which lies as it did in a file with these places,
/// and is all among the addresses that are as they were. Gives where each begins in the file.
pub(super) fn found_again(
    copied: &[Copied],
    places: &[Place],
    unchanged: &Ranges,
) -> Vec<(u64, FileChunk)> {
    // Of a file in another order nothing is known.
    if !places.is_sorted_by(|a, b| a.end() <= b.address && a.at + a.len <= b.at) {
        return Vec::new();
    }
    let same = |copied: &&Copied| copied.lies_in(unchanged);
    let placed = |copied: &Copied| Some((begin(copied, places)?, copied.chunk));
    // The programs stand still meanwhile, and there can be millions.
    let some = |some: &[Copied]| some.iter().filter(same).filter_map(placed).collect();
    let found: Vec<Vec<_>> = copied.par_chunks(BATCH).map(some).collect();
    let found: Vec<&[_]> = found.iter().map(Vec::as_slice).collect();
    concat(&found, |placed| *placed)
}

/// Where a chunk begins in a file, if all of its bytes are there one after the other.
fn begin(copied: &Copied, places: &[Place]) -> Option<u64> {
    let (mut begin, mut next) = (None, 0);
    for (start, end) in &copied.pieces {
        let mut address = *start;
        while address < *end {
            let number = places.partition_point(|place| place.end() <= address);
            let place = places.get(number).filter(|place| place.address <= address)?;
            let at = place.at + (address - place.address);
            if *begin.get_or_insert(at) != at && at != next {
                return None;
            }
            let len = end.min(&place.end()) - address;
            (address, next) = (address + len, at + len);
        }
    }
    begin
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::store::ChunkId;

    const PAGE: u64 = 4096;

    fn place(at: u64, address: u64, pages: u64) -> Place {
        Place { at: at * PAGE, address: address * PAGE, len: pages * PAGE }
    }

    fn chunk(number: u8, pages: u64) -> FileChunk {
        FileChunk { id: ChunkId::of(&[number]), len: (pages * PAGE) as u32 }
    }

    fn pages(all: &[(u64, u64)]) -> Ranges {
        all.iter().map(|(start, end)| (start * PAGE, end * PAGE)).collect()
    }

    #[test]
    fn chunks_are_found_where_they_lie_as_they_did() {
        let places = [place(0, 100, 4), place(4, 104, 2), place(6, 200, 8)];
        let chunks = vec![chunk(1, 3), chunk(2, 5), chunk(3, 4)];
        let in_file = [0, 3, 8].map(|page| page * PAGE).into_iter().zip(chunks.clone());
        let copied: Vec<_> = placed(&places, in_file).collect();
        let of = |pieces: &[(u64, u64)]| pages(pieces).iter().collect::<Vec<_>>();
        let pieces: Vec<_> = copied.iter().map(|copied| copied.pieces.clone()).collect();
        assert_eq!(pieces, [of(&[(100, 103)]), of(&[(103, 106), (200, 202)]), of(&[(202, 206)])]);

        let all = pages(&[(0, 1000)]);
        let found = |places: &[Place], unchanged: &Ranges| -> Vec<(u64, FileChunk)> {
            let found = found_again(&copied, places, unchanged).into_iter();
            found.map(|(at, chunk)| (at / PAGE, chunk)).collect()
        };
        assert_eq!(found(&places, &all), [(0, chunks[0]), (3, chunks[1]), (8, chunks[2])]);
        // A page of each of the first two was written.
        let clean = all.without(&pages(&[(102, 103), (201, 202)]));
        assert_eq!(found(&places, &clean), [(8, chunks[2])]);
        // A page has come between the pages of the second; what CRIU has written comes first.
        let came = [place(7, 100, 6), place(13, 150, 1), place(14, 200, 8)];
        assert_eq!(found(&came, &all), [(7, chunks[0]), (16, chunks[2])]);
        // A page of the first has gone.
        let gone = [place(0, 100, 1), place(1, 102, 4), place(5, 200, 8)];
        assert_eq!(found(&gone, &all), [(2, chunks[1]), (7, chunks[2])]);
        // In the file there are bytes of CRIU's between them.
        let apart = [place(0, 100, 4), place(5, 104, 2), place(7, 200, 8)];
        assert_eq!(found(&apart, &all), [(0, chunks[0]), (9, chunks[2])]);
        assert_eq!(found(&[places[2], places[0]], &all), []);
        assert_eq!(found(&[], &all), []);
    }
}
