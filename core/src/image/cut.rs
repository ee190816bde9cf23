//! Where files are cut into chunks.
//!
//! A file of CRIU's holds the pages of a program one after the other. In the next image of the
//! same program some pages have changed, and some have come or gone, so that all behind them have
//! moved. Cut at fixed places, the file would share nothing behind the first page that came. So the
//! contents decide: a page whose hash has some zero bits is a mark, and a chunk begins at it. After
//! a page that came or went, the cuts of both files meet again at the next mark.
//!
//! How files are cut is no part of the format, since the manifest tells the length of each chunk.
//! But images that are to share chunks must have been cut alike.

use crate::store::MAX_CHUNK;

/// Files are cut only at multiples of this, since what comes and goes are pages.
const PAGE: usize = 4096;

/// A way to cut. All in bytes, and multiples of 4096.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Cut {
    /// A mark that would make a chunk shorter than this is passed over.
    pub min: usize,
    /// How far marks are apart in the mean; a power of two.
    pub mark: usize,
    /// Where no mark comes, a chunk ends after so many.
    pub max: usize,
}

/// How the files of an image are cut. `docs/results/store.md` has the measurements behind it.
pub const FILE_CUT: Cut = Cut { min: 8 << 10, mark: 32 << 10, max: 128 << 10 };

/// A file is cut by spans of this many bytes, which many threads work on.
pub(super) const SPAN: usize = MAX_CHUNK;

impl Cut {
    /// Cuts `bytes`, which begin at a cut, into pieces that are not empty.
    pub fn pieces(self, bytes: &[u8]) -> impl Iterator<Item = &[u8]> {
        let mut rest = bytes;
        std::iter::from_fn(move || {
            let (piece, after) = rest.split_at(self.first(rest));
            rest = after;
            (!piece.is_empty()).then_some(piece)
        })
    }

    /// Which part of `bytes`, read from a multiple of [`SPAN`] on up to [`reach`](Self::reach)
    /// bytes, belongs to this span. A span, too, begins at a mark if there is one near its place,
    /// so that spans make no cuts that move with the pages.
    pub(super) fn span(self, is_first: bool, bytes: &[u8]) -> std::ops::Range<usize> {
        let near = |place: usize| {
            let near = bytes[place..].chunks(PAGE).take(self.max / PAGE);
            place + near.map(|page| self.is_mark(page)).position(|mark| mark).unwrap_or(0) * PAGE
        };
        let start = if is_first { 0 } else { near(0) };
        start..if bytes.len() > SPAN { near(SPAN) } else { bytes.len() }
    }

    /// How many bytes must be read to know where a span ends.
    pub(super) fn reach(self) -> usize {
        SPAN + self.max
    }

    /// Bytes of the first piece.
    fn first(self, bytes: &[u8]) -> usize {
        let end = bytes.len().min(self.max);
        let places = (self.min.max(PAGE)..end).step_by(PAGE);
        let mut places = places.filter(|&at| self.is_mark(&bytes[at..bytes.len().min(at + PAGE)]));
        places.next().unwrap_or(end)
    }

    fn is_mark(self, page: &[u8]) -> bool {
        page_hash(page) < u64::MAX / (self.mark / PAGE) as u64
    }
}

/// A hash that is fast rather than strong: a program that can choose its pages can at worst choose where its
/// own file is cut. Bytes after the last multiple of 32 do not count.
fn page_hash(page: &[u8]) -> u64 {
    const FACTOR: u64 = 0x9e37_79b9_7f4a_7c15;
    // Four at a time, as a multiplication takes the processor longer than it keeps it busy.
    let mut lanes = [3u64, 5, 7, 11];
    for words in page.chunks_exact(32) {
        for (lane, word) in lanes.iter_mut().zip(words.chunks_exact(8)) {
            let word = u64::from_le_bytes(std::array::from_fn(|i| word[i]));
            *lane = (lane.rotate_left(29) ^ word).wrapping_mul(FACTOR);
        }
    }
    let all = lanes
        .into_iter()
        .fold(0u64, |all, lane| (all.rotate_left(29) ^ lane ^ (lane >> 32)).wrapping_mul(FACTOR));
    (all ^ (all >> 29)).wrapping_mul(FACTOR)
}

#[cfg(test)]
mod tests {
    use std::collections::HashSet;

    use super::*;
    use crate::store::tests::noise;

    /// The pieces that a file of these bytes is cut into, span by span.
    fn file(bytes: &[u8]) -> Vec<&[u8]> {
        let spans = (0..bytes.len().div_ceil(SPAN)).flat_map(|number| {
            let from = number * SPAN;
            let read = &bytes[from..bytes.len().min(from + FILE_CUT.reach())];
            FILE_CUT.pieces(&read[FILE_CUT.span(number == 0, read)])
        });
        spans.collect()
    }

    #[test]
    fn pieces_are_the_whole_and_keep_the_limits() {
        for len in [0, 1, 4095, 4096, 8193, SPAN - 1, SPAN, SPAN + 1, SPAN + 5000, 3 * SPAN + 77] {
            for bytes in [noise(1, len), vec![0; len]] {
                let pieces = file(&bytes);
                assert!(pieces.concat() == bytes, "{len}");
                assert!(pieces.iter().all(|p| !p.is_empty() && p.len() <= FILE_CUT.max));
                let whole = |p: &&[u8]| p.len().is_multiple_of(PAGE);
                assert!(pieces.iter().rev().skip(1).all(whole), "cut within a page");
            }
        }
    }

    #[test]
    fn zeros_are_cut_only_where_they_must_be() {
        let zeros = vec![0; SPAN];
        assert_eq!(file(&zeros).len(), SPAN / FILE_CUT.max);
    }

    #[test]
    fn marks_are_as_far_apart_as_said() {
        let bytes = noise(7, 32 << 20);
        let marks = bytes.chunks(PAGE).filter(|page| FILE_CUT.is_mark(page)).count();
        let expected = bytes.len() / FILE_CUT.mark;
        assert!(marks.abs_diff(expected) < expected / 8, "{marks} of {expected}");
    }

    #[test]
    fn a_page_that_comes_or_changes_costs_few_chunks() {
        let before = noise(3, 8 << 20);
        let known: HashSet<_> = file(&before).into_iter().collect();
        let page = noise(4, PAGE);
        let (head, tail) = before.split_at(1 << 20);
        for after in [
            [head, &page, tail].concat(),
            [head, &tail[PAGE..]].concat(),
            [head, &page, &tail[PAGE..]].concat(),
            [&page, head, tail].concat(),
        ] {
            let new = file(&after).into_iter().filter(|piece| !known.contains(piece));
            let bytes: usize = new.map(<[u8]>::len).sum();
            // A few spans begin at another mark, each of which may change two chunks more.
            assert!(bytes < 600 << 10, "{bytes} of {}", after.len());
        }
    }
}
