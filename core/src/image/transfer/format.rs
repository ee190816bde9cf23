//! How large the parts of such a tar are.

/// Length of a tar's header, and what members are filled up to.
pub(super) const BLOCK: u64 = 512;
/// Most stored bytes that are in memory at a time in each of two buffers.
pub(super) const BATCH: usize = 16 << 20;

/// What a member takes up in the tar.
pub(super) fn member_len(size: u64) -> u64 {
    BLOCK + size.next_multiple_of(BLOCK)
}
