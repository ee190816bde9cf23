//! How far from an address in its parameters a kernel goes, by the size of the launch.
//!
//! Most kernels use the indices of thread and block for the place in an array: thread `tid` of block
//! `ctaid` goes to `address + 4 * (ctaid * ntid + tid)`. Then a launch of few blocks touches the beginning
//! of an allocation only, however large that is. [`Reach`] says so of a word of a kernel's parameters,
//! [`Sizes`] are what it is applied to.

use std::ops::Range;

use crate::wire_struct;

wire_struct! {
    /// The size of a launch, or in each direction the largest of several. In the order x, y, z.
    #[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
    pub struct Sizes {
        /// Threads of a block.
        pub block: [u64; 3],
        /// Blocks.
        pub grid: [u64; 3],
        /// Number of the first thread of the last block.
        pub last: [u64; 3],
    }
}

impl Sizes {
    /// The sizes of a launch.
    pub fn of(grid: [u32; 3], block: [u32; 3]) -> Self {
        let (grid, block) = (grid.map(u64::from), block.map(u64::from));
        let last = std::array::from_fn(|of| grid[of].saturating_sub(1) * block[of]);
        Self { block, grid, last }
    }

    /// The sizes of a launch of unknown size: nothing follows from any [`Reach`].
    pub const UNKNOWN: Self =
        Self { block: [u64::MAX; 3], grid: [u64::MAX; 3], last: [u64::MAX; 3] };

    /// Takes in another launch.
    pub fn include(&mut self, other: &Self) {
        let all = [
            (&mut self.block, &other.block),
            (&mut self.grid, &other.grid),
            (&mut self.last, &other.last),
        ];
        for (own, other) in all {
            own.iter_mut().zip(other).for_each(|(own, other)| *own = (*own).max(*other));
        }
    }
}

/// A number that a thread knows of itself or of its launch, each in three directions: [`Index::number`]
/// is `kind * 3 + direction`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Index {
    /// Its place in its block (`%tid`).
    Thread = 0,
    /// Threads of a block (`%ntid`).
    Threads = 1,
    /// The place of its block (`%ctaid`).
    Block = 2,
    /// Blocks of the launch (`%nctaid`).
    Blocks = 3,
    /// The number of its block's first thread (`%ctaid * %ntid`).
    First = 4,
}

/// How many numbers there are.
pub const INDICES: usize = 15;

impl Index {
    /// Its number in that direction: 0, 1 or 2 for x, y and z.
    pub fn number(self, direction: usize) -> usize {
        self as usize * 3 + direction
    }
}

wire_struct! {
    /// So many bytes for each unit of a number.
    #[derive(Debug, Clone, Copy, PartialEq, Eq)]
    pub struct Term {
        /// See [`Index::number`].
        pub index: u8,
        /// May be negative.
        pub bytes: i64,
    }
}

wire_struct! {
    /// What a kernel touches by way of a word of its parameters: bytes from `low` to `end`, relative to the
    /// address that the word holds, and shifted by all terms.
    #[derive(Debug, Clone, Default, PartialEq, Eq)]
    pub struct Reach {
        /// Where the first byte is, if all indices are 0.
        pub low: i64,
        /// Where the last byte ends, if all indices are 0.
        pub end: i64,
        /// What indices add to that.
        pub terms: Vec<Term>,
    }
}

impl Reach {
    /// The addresses that launches of these sizes touch, if the word held addresses from `lowest` to
    /// `highest` that point into `allocation`. That is all of it if nothing better is known.
    pub fn within(
        &self,
        sizes: &Sizes,
        lowest: u64,
        highest: u64,
        allocation: Range<u64>,
    ) -> Range<u64> {
        let Some((low, end)) = self.offsets(sizes) else { return allocation };
        let low = (i128::from(lowest) + low).max(allocation.start.into());
        let end = (i128::from(highest) + end).min(allocation.end.into());
        if low >= end {
            return allocation;
        }
        // Both lie within the allocation.
        low as u64..end as u64
    }

    fn offsets(&self, sizes: &Sizes) -> Option<(i128, i128)> {
        let (mut low, mut end) = (i128::from(self.low), i128::from(self.end));
        for term in &self.terms {
            let (kind, direction) = (term.index / 3, usize::from(term.index % 3));
            let most = match kind {
                0 => sizes.block[direction].saturating_sub(1),
                1 => sizes.block[direction],
                2 => sizes.grid[direction].saturating_sub(1),
                3 => sizes.grid[direction],
                4 => sizes.last[direction],
                _ => return None,
            };
            if most >= 1 << 62 {
                return None;
            }
            let most = i128::from(most) * i128::from(term.bytes);
            if most < 0 {
                low += most;
            } else {
                end += most;
            }
        }
        Some((low, end))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn term(index: Index, bytes: i64) -> Term {
        Term { index: index.number(0) as u8, bytes }
    }

    #[test]
    fn the_range_of_a_launch() {
        let each =
            Reach { low: 0, end: 4, terms: vec![term(Index::First, 4), term(Index::Thread, 4)] };
        let mut sizes = Sizes::of([10, 1, 1], [128, 1, 1]);
        assert_eq!(each.within(&sizes, 5000, 5000, 4096..1 << 20), 5000..5000 + 4 * 1280);
        // Several launches reach from the lowest address on, and as far as from the highest.
        sizes.include(&Sizes::of([1, 1, 1], [256, 1, 1]));
        assert_eq!(
            each.within(&sizes, 5000, 6000, 4096..1 << 20),
            5000..6000 + 4 * (9 * 128 + 256)
        );
        assert_eq!(each.within(&sizes, 5000, 6000, 4096..6100), 5000..6100);
        let around = Reach { low: -8, end: 12, terms: vec![term(Index::Block, -16)] };
        let sizes = Sizes::of([3, 1, 1], [32, 1, 1]);
        assert_eq!(around.within(&sizes, 5000, 5000, 4096..8192), 5000 - 40..5012);
        assert_eq!(around.within(&sizes, 4100, 4100, 4096..8192), 4096..4112);
    }

    #[test]
    fn what_makes_no_sense_is_everything() {
        let all = 4096..8192;
        let far = Reach { low: 1 << 40, end: (1 << 40) + 4, terms: Vec::new() };
        let one = Sizes::of([1; 3], [1; 3]);
        assert_eq!(far.within(&one, 5000, 5000, all.clone()), all);
        let strange = Reach { low: 0, end: 4, terms: vec![Term { index: 15, bytes: 1 }] };
        assert_eq!(strange.within(&one, 5000, 5000, all.clone()), all);
        let extreme =
            Reach { low: i64::MIN, end: i64::MAX, terms: vec![term(Index::Block, i64::MAX)] };
        let most = Sizes::of([u32::MAX; 3], [u32::MAX; 3]);
        assert_eq!(extreme.within(&most, u64::MAX, u64::MAX, all.clone()), all);
        let each = Reach { low: 0, end: 4, terms: vec![term(Index::First, 4)] };
        assert_eq!(each.within(&Sizes::UNKNOWN, 5000, 5000, all.clone()), all);
    }
}
