//! What the adversaries share: their kernels, and memory whose content the host knows.

use anyhow::{Result, ensure};

use crate::gpu::{Buffer, Shape};
use crate::numbers::mix;
use crate::report::Run;

pub(super) const PTX: &str = include_str!("../kernels/adversaries.ptx");
/// Allocations of a field.
pub(super) const POOLS: u32 = 8;
/// Words that one call of the kernels' `touch` changes, one in each thread.
pub(super) const TOUCHED: u32 = 32;
pub(super) const TOUCH: Shape = Shape::row(TOUCHED);
/// Words of a chunk, the unit in which gpucr copies.
pub(super) const CHUNK_WORDS: u32 = 1 << 18;

/// Several large allocations, and what the host knows of their content.
pub(super) struct Field {
    pub(super) pools: Vec<Buffer>,
    pub(super) host: Vec<Vec<u64>>,
    pub(super) words: u32,
}

impl Field {
    pub(super) fn new(run: &Run) -> Result<Self> {
        let words = CHUNK_WORDS * run.pick(2, 8, 256);
        let word =
            |pool: u32, i: u32| u64::from(mix(i ^ mix(pool ^ run.seed))) << 32 | u64::from(i);
        let host: Vec<Vec<u64>> =
            (0..POOLS).map(|pool| (0..words).map(|i| word(pool, i)).collect()).collect();
        let pools = host.iter().map(|pool| Buffer::holding(pool)).collect::<Result<_>>()?;
        Ok(Self { pools, host, words })
    }

    pub(super) fn addresses(&self) -> Vec<u64> {
        self.pools.iter().map(Buffer::address).collect()
    }

    /// Repeats on the host what `touch` does to a pool, and says where.
    pub(super) fn touch(&mut self, pool: u32, step: u32, seed: u32) -> usize {
        touch(&mut self.host[pool as usize], step, seed)
    }

    /// A word as it is on the device, which must be what the host expects.
    pub(super) fn word(&self, pool: u32, index: usize) -> Result<u64> {
        let found = self.pools[pool as usize].read_one(index)?;
        let wanted: u64 = self.host[pool as usize][index];
        ensure!(found == wanted, "word {index} of pool {pool} is wrong: {found:x}, not {wanted:x}");
        Ok(found)
    }

    /// Compares all of the memory, and ends the run.
    pub(super) fn finish(&self, run: &mut Run) -> Result<()> {
        for (number, (pool, host)) in self.pools.iter().zip(&self.host).enumerate() {
            let words: Vec<u64> = pool.read()?;
            let wrong = words.iter().zip(host).position(|(a, b)| a != b);
            ensure!(wrong.is_none(), "word {wrong:?} of pool {number} is wrong");
            run.absorb(&words);
        }
        run.finish()
    }
}

/// What the kernels' function `touch` does to words. Gives the first that it changes.
pub(super) fn touch(words: &mut [u64], step: u32, seed: u32) -> usize {
    let start = (mix(seed ^ mix(step)) % (words.len() as u32 / TOUCHED) * TOUCHED) as usize;
    for (thread, word) in words[start..][..TOUCHED as usize].iter_mut().enumerate() {
        *word = word.wrapping_mul(3).wrapping_add(u64::from(step) + thread as u64);
    }
    start
}
