//! Programs that make it hard to tell what a launch writes: none of them may come back wrong from a
//! dump that copied memory while they ran.

mod graph_nodes;
mod hidden;
mod long_kernel;
mod model;
mod remade;
mod two_halves;

pub(crate) use graph_nodes::run as graph_nodes;
pub(crate) use hidden::{const_cast, halves, permuted, seldom, shifting};
pub(crate) use long_kernel::run as long_kernel;
pub(crate) use model::{model, stamp};
pub(crate) use remade::run as remade;
pub(crate) use two_halves::run as two_halves;

use anyhow::{Result, ensure};

use crate::gpu::{Buffer, Shape};
use crate::numbers::mix;
use crate::report::Run;

const PTX: &str = include_str!("../kernels/adversaries.ptx");
/// Allocations of a field.
const POOLS: u32 = 8;
/// Words that one call of the kernels' `touch` changes, one in each thread.
const TOUCHED: u32 = 32;
const TOUCH: Shape = Shape::row(TOUCHED);
/// Words of a chunk, the unit in which gpucr copies.
const CHUNK_WORDS: u32 = 1 << 18;

/// Several large allocations, and what the host knows of their content.
struct Field {
    pools: Vec<Buffer>,
    host: Vec<Vec<u64>>,
    words: u32,
}

impl Field {
    fn new(run: &Run) -> Result<Self> {
        let words = CHUNK_WORDS * run.pick(2, 8, 256);
        let word =
            |pool: u32, i: u32| u64::from(mix(i ^ mix(pool ^ run.seed))) << 32 | u64::from(i);
        let host: Vec<Vec<u64>> =
            (0..POOLS).map(|pool| (0..words).map(|i| word(pool, i)).collect()).collect();
        let pools = host.iter().map(|pool| Buffer::holding(pool)).collect::<Result<_>>()?;
        Ok(Self { pools, host, words })
    }

    fn addresses(&self) -> Vec<u64> {
        self.pools.iter().map(Buffer::address).collect()
    }

    /// Repeats on the host what `touch` does to a pool, and says where.
    fn touch(&mut self, pool: u32, step: u32, seed: u32) -> usize {
        touch(&mut self.host[pool as usize], step, seed)
    }

    /// A word as it is on the device, which must be what the host expects.
    fn word(&self, pool: u32, index: usize) -> Result<u64> {
        let found = self.pools[pool as usize].read_one(index)?;
        let wanted: u64 = self.host[pool as usize][index];
        ensure!(found == wanted, "word {index} of pool {pool} is wrong: {found:x}, not {wanted:x}");
        Ok(found)
    }

    /// Compares all of the memory, and ends the run.
    fn finish(&self, run: &mut Run) -> Result<()> {
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
fn touch(words: &mut [u64], step: u32, seed: u32) -> usize {
    let start = (mix(seed ^ mix(step)) % (words.len() as u32 / TOUCHED) * TOUCHED) as usize;
    for (thread, word) in words[start..][..TOUCHED as usize].iter_mut().enumerate() {
        *word = word.wrapping_mul(3).wrapping_add(u64::from(step) + thread as u64);
    }
    start
}
