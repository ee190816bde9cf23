//! Large memory of which each launch changes one word, anywhere, through pointers that nothing
//! outside the device can see: what has been copied ahead of a dump changes behind its back.

use anyhow::{Result, ensure};

use crate::args;
use crate::gpu::{Buffer, Gpu, Module, Shape};
use crate::numbers::mix;
use crate::report::Run;

const PTX: &str = include_str!("kernels/scatter.ptx");
const POOLS: u32 = 8;

/// Runs the workload.
pub(crate) fn run(run: &mut Run) -> Result<()> {
    let words: u32 = run.pick(1 << 20, 4 << 20, 128 << 20);
    let steps = run.plan(300, 1000, 5000);
    let gpu = Gpu::open()?;
    let module = Module::load(PTX)?;
    let hide = module.kernel("scatter_hide")?;
    let write = module.kernel("scatter_write")?;
    let mut host: Vec<Vec<u64>> = (0..POOLS)
        .map(|p| (0..words).map(|i| u64::from(mix(i ^ mix(p))) << 32 | u64::from(i)).collect())
        .collect();
    let pools: Vec<Buffer> =
        host.iter().map(|pool| Buffer::holding(pool)).collect::<Result<_>>()?;
    let addresses: Vec<u64> = pools.iter().map(Buffer::address).collect();
    let table = Buffer::holding(&addresses)?;
    let masked = Buffer::zeroed::<u64>(POOLS as usize)?;
    let shape = Shape::of(1, 32);
    hide.run(shape, args![&table, &masked, POOLS])?;
    gpu.synchronize()?;
    run.ready()?;
    for step in 0..steps {
        write.run(shape, args![&masked, POOLS, words, step, run.seed])?;
        gpu.synchronize()?;
        let (pool, index) = ((step % POOLS) as usize, (mix(run.seed ^ mix(step)) % words) as usize);
        let word = &mut host[pool][index];
        *word = word.wrapping_mul(3).wrapping_add(u64::from(step));
        let found: u64 = pools[pool].read_one(index)?;
        run.step(step, format_args!("word {found:016x}"))?;
    }
    for (pool, host) in pools.iter().zip(&host) {
        let words: Vec<u64> = pool.read()?;
        let wrong = words.iter().zip(host).position(|(a, b)| a != b);
        ensure!(wrong.is_none(), "word {wrong:?} is wrong");
        run.absorb(&words);
    }
    run.finish()
}
