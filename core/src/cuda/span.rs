//! The chunks of device memory: where each of them is.

use gpucr_wire::CHUNK_SIZE;

use super::context::SharedBlock;

/// The part of a block that one chunk covers.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Span {
    /// Index of the block in the list that was given.
    pub block: usize,
    /// Index of the chunk in the block.
    pub chunk: usize,
    /// Device address.
    pub address: u64,
    /// Bytes; a whole chunk but for the last one of a block.
    pub len: usize,
}

/// The number of chunks in `len` bytes.
pub fn chunks_in(len: u64) -> usize {
    len.div_ceil(CHUNK_SIZE) as usize
}

impl Span {
    /// Chunk `chunk` of `memory`, which is number `block` of the caller's list.
    pub fn of(memory: &SharedBlock, block: usize, chunk: usize) -> Self {
        let offset = chunk as u64 * CHUNK_SIZE;
        let len = CHUNK_SIZE.min(memory.len() - offset) as usize;
        Self { block, chunk, address: memory.address() + offset, len }
    }

    /// Whether another one follows it in memory that is one block.
    pub(super) fn is_before(&self, next: &Self) -> bool {
        (self.block, self.chunk + 1) == (next.block, next.chunk)
            && self.address + self.len as u64 == next.address
    }
}

/// The chunks of those `blocks` that are on the device.
pub fn spans_on(blocks: &[SharedBlock], device: &[u8; 16]) -> Vec<Span> {
    let here = blocks.iter().enumerate().filter(|(_, block)| block.device().uuid == *device);
    let of = |(block, shared): (usize, &SharedBlock)| -> Vec<Span> {
        (0..chunks_in(shared.len())).map(|chunk| Span::of(shared, block, chunk)).collect()
    };
    here.flat_map(of).collect()
}
