//! The memory that a twin looks at: a word with the flag, and from [`CLAIMS`] on a bit for each block of the grid.
//!
//! Blocks are numbered as threads of a block are: x first, then y, then z.

/// Where the flag is: a word of 32 bits that is not 0 if no block is to begin any more.
pub const FLAG: u64 = 0;
/// Where the claims begin, bytes: block `n` is bit `n % 32` of word `n / 32`.
pub const CLAIMS: u64 = 16;
/// A grid of more blocks has no control block.
pub const MOST_BLOCKS: u64 = 1 << 27;

/// How many blocks a grid has; `None` if they are too many, or none.
pub fn blocks(grid: [u32; 3]) -> Option<u64> {
    let count = grid.iter().try_fold(1u64, |all, size| all.checked_mul((*size).into()))?;
    (1..=MOST_BLOCKS).contains(&count).then_some(count)
}

/// Bytes of the control block of a grid of so many blocks; a multiple of 4. A launch that begins has all of them zero.
pub fn bytes(blocks: u64) -> u64 {
    CLAIMS + blocks.div_ceil(32) * 4
}

/// How many blocks are claimed, by the bytes of a control block.
pub fn claimed(control: &[u8]) -> u64 {
    let claims = control.get(CLAIMS as usize..).unwrap_or_default();
    claims.iter().map(|byte| u64::from(byte.count_ones())).sum()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes() {
        assert_eq!(blocks([4, 3, 2]), Some(24));
        assert_eq!(blocks([1 << 27, 1, 1]), Some(MOST_BLOCKS));
        assert_eq!(blocks([1 << 27, 2, 1]), None);
        assert_eq!(blocks([u32::MAX; 3]), None, "more than a number holds");
        assert_eq!(blocks([1, 0, 1]), None);
        assert_eq!([bytes(1), bytes(32), bytes(33)], [20, 20, 24]);
        assert_eq!(claimed(&[0xff; 18]), 16, "the flag does not count");
        assert_eq!(claimed(&[0xff; 3]), 0);
    }
}
