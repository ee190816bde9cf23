//! The memory that a twin looks at: a word with the flag, and from [`CLAIMS`] on a bit for each block of the grid. A twin that is
//! interrupted in its loops has a word for each thread from [`STATES`] on instead, and behind that what the threads save.
//! One that is interrupted at barriers has a word for each block from [`STATES`] on, and behind that [what is saved of
//! blocks](AtBarriers).
//!
//! Blocks are numbered as threads of a block are: x first, then y, then z. Threads are numbered block by block.

/// Where the flag is: a word of 32 bits that is not 0 if no block is to begin any more.
pub const FLAG: u64 = 0;
/// The flag by which those end that run, in twins that are [begun again](crate::Aborted). Any other that is not 0 is for those that have
/// not begun.
pub const ABORT: u32 = 1;
/// Where the claims begin, bytes: block `n` is bit `n % 32` of word `n / 32`.
pub const CLAIMS: u64 = 16;
/// Where it says how many blocks there is place for that are interrupted at barriers: a word of 32 bits.
pub const SLOTS: u64 = 12;
/// Where the states of threads or blocks begin, bytes: 0 is one that has not begun.
pub const STATES: u64 = 16;
/// The state of a thread or block that a launch runs, or has run.
pub const RUN: u32 = 1;
/// The block's number, to `%gpucr_a`; `%gpucr_b` and `%gpucr_c` are used.
pub(crate) const BLOCK: &str = "	mov.u32 %gpucr_a, %ctaid.z;
	mov.u32 %gpucr_b, %nctaid.y;
	mov.u32 %gpucr_c, %ctaid.y;
	mad.lo.u32 %gpucr_a, %gpucr_a, %gpucr_b, %gpucr_c;
	mov.u32 %gpucr_b, %nctaid.x;
	mov.u32 %gpucr_c, %ctaid.x;
	mad.lo.u32 %gpucr_a, %gpucr_a, %gpucr_b, %gpucr_c;
";
/// The lowest state of a thread or block that has been interrupted and is saved.
pub const FIRST_SAVED: u32 = 2;
/// A control block with what threads save is not longer than this, bytes.
pub const MOST_BYTES: u64 = 64 << 20;
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

/// Bytes of the control block of a launch of so many threads in all, each of which saves so many bytes; `None` if it would be too
/// long. A launch that begins has the flag and the states zero.
pub fn bytes_in_loops(threads: u64, saved: u64) -> Option<u64> {
    let each = saved.checked_add(4)?;
    let bytes = threads.checked_next_multiple_of(4)?.checked_mul(each)?.checked_add(STATES)?;
    (threads > 0 && bytes <= MOST_BYTES).then_some(bytes)
}

/// How many blocks of so many states each are done, of a launch that is over, by the bytes of its control block up to the end of
/// the states.
pub fn done(control: &[u8], blocks: u64, states: u64) -> u64 {
    let all = control.get(STATES as usize..).unwrap_or_default();
    let size = usize::try_from(states * 4).unwrap_or(usize::MAX).max(4);
    let is_run = |state: &[u8]| *state == RUN.to_le_bytes();
    let of_blocks = all.chunks_exact(size).take(blocks as usize);
    of_blocks.filter(|block| block.chunks_exact(4).all(is_run)).count() as u64
}

/// How many blocks of so many states each have begun and are to be begun again, of a launch that is over, by the bytes of its
/// control block up to the end of the states.
pub fn begun(control: &[u8], blocks: u64, states: u64) -> u64 {
    let all = control.get(STATES as usize..).unwrap_or_default();
    let size = usize::try_from(states * 4).unwrap_or(usize::MAX).max(4);
    let of_blocks = all.chunks_exact(size).take(blocks as usize);
    let is = |state: &[u8], of: u32| *state == of.to_le_bytes();
    let has_begun = |block: &&[u8]| {
        let mut states = block.chunks_exact(4);
        states.clone().any(|state| !is(state, 0)) && !states.all(|state| is(state, RUN))
    };
    of_blocks.filter(has_begun).count() as u64
}

/// The control block of a launch that is interrupted at barriers. Behind the states it has: a word for each block, in which
/// its first thread tells the others something; a word for each place where a block can be saved, which says whether that is
/// taken; a word for each thread of these; and what is saved.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct AtBarriers {
    /// Places for blocks that are saved. Where they are all taken, blocks go on.
    pub slots: u64,
    /// All bytes.
    pub bytes: u64,
    /// Up to here all is zero in a launch that begins, but for the word at [`SLOTS`].
    pub zero: u64,
}

impl AtBarriers {
    /// For so many blocks of so many threads, which save so many bytes each and for all of them together. No more than
    /// `wanted` places; `None` if there is room for none.
    pub fn of(blocks: u64, threads: u64, each: u64, together: u64, wanted: u64) -> Option<Self> {
        let threads = threads.checked_next_multiple_of(4)?;
        let area =
            threads.checked_mul(each)?.checked_add(together.checked_next_multiple_of(16)?)?;
        let begin = STATES.checked_add(blocks.checked_mul(8)?)?.next_multiple_of(16);
        let of_slot = threads.checked_mul(4)?.checked_add(area)?.checked_add(4)?;
        let fit = MOST_BYTES.checked_sub(begin + 16)?.checked_div(of_slot)?;
        let slots = fit.min(wanted).min(blocks);
        let zero = begin + (4 * slots).next_multiple_of(16) + 4 * threads * slots;
        (slots > 0 && threads > 0).then_some(Self { slots, bytes: zero + area * slots, zero })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn places_for_blocks() {
        // 5 words of states, 5 that are told, and of each place 1 word, 8 words, and 8 * 12 + 48 bytes.
        let three = AtBarriers::of(5, 7, 12, 40, 3).expect("little");
        assert_eq!(three, AtBarriers { slots: 3, zero: 64 + 16 + 3 * 32, bytes: 176 + 3 * 144 });
        assert_eq!(AtBarriers::of(2, 7, 12, 40, 3).map(|two| two.slots), Some(2));
        let full = AtBarriers::of(1 << 16, 1024, 256, 0, 1 << 16).expect("some");
        assert!(full.bytes <= MOST_BYTES && full.bytes > MOST_BYTES - (1 << 19), "{full:?}");
        assert_eq!(AtBarriers::of(MOST_BLOCKS, 32, 4, 0, 3), None);
        assert_eq!(AtBarriers::of(1, 1024, MOST_BYTES, 0, 3), None);
        assert_eq!(AtBarriers::of(1, u64::MAX, 4, 0, 3), None);
        assert_eq!(AtBarriers::of(1, 0, 4, 0, 3), None);
        let states = [1, 1, 0, 2, 1].map(u32::to_le_bytes).concat();
        assert_eq!(done(&[&[0; 16][..], &states].concat(), 4, 1), 2);
    }

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

    #[test]
    fn threads() {
        assert_eq!(bytes_in_loops(5, 12), Some(16 + 8 * 16));
        assert_eq!(bytes_in_loops(0, 12), None);
        assert_eq!(bytes_in_loops(1 << 24, 0), None, "the states alone, and the flag");
        assert_eq!(bytes_in_loops(u64::MAX, 8), None);
        assert_eq!(bytes_in_loops(8, u64::MAX), None);
        let states = [1, 1, 1, 2, 1, 1, 0, 1, 1, 1, 1, 1].map(u32::to_le_bytes).concat();
        let control = [&[0; 16][..], &states].concat();
        assert_eq!(done(&control, 6, 2), 4);
        assert_eq!(done(&control, 4, 3), 2);
        assert_eq!(done(&control[..20], 6, 2), 0);
        assert_eq!(begun(&control, 6, 2), 2);
        assert_eq!(begun(&control, 12, 1), 1, "one that has not begun is none");
        assert_eq!(begun(&control, 1, 2), 0);
    }
}
