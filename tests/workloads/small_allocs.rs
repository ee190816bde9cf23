//! Ten thousand allocations of 1 KiB, each with its own pattern, updated through a pointer table.

use anyhow::{Result, ensure};

use crate::args;
use crate::gpu::{Buffer, Gpu, Module, Shape, fill_at};
use crate::numbers::mix;
use crate::report::Run;

const PTX: &str = include_str!("kernels/small_allocs.ptx");
const BYTES: usize = 1024;
const WORDS: usize = BYTES / 4;
/// Each step updates one allocation of this many.
const TURNS: u32 = 20;

fn pattern(seed: u32, allocation: u32) -> u32 {
    mix(seed ^ mix(allocation ^ 0xa110_c000))
}

/// Runs the workload.
pub(crate) fn run(run: &mut Run) -> Result<()> {
    let count: u32 = run.pick(10_000, 10_000, 100_000);
    let steps = run.plan(100, 2000, 5000);
    let gpu = Gpu::open()?;
    let module = Module::load(PTX)?;
    let update = module.kernel("small_update")?;
    let mut all = Vec::new();
    for a in 0..count {
        let buffer = Buffer::new(BYTES)?;
        fill_at(buffer.address(), pattern(run.seed, a), WORDS)?;
        all.push(buffer);
    }
    let addresses: Vec<u64> = all.iter().map(Buffer::address).collect();
    let mut sorted = addresses.clone();
    sorted.sort_unstable();
    ensure!(sorted.windows(2).all(|w| w[1] - w[0] >= BYTES as u64), "allocations overlap");
    let table = Buffer::holding(&addresses)?;
    gpu.synchronize()?;
    run.ready()?;
    let shape = Shape::of(count.div_ceil(TURNS), 128);
    for step in 0..steps {
        let arguments = args![&table, count, WORDS as u32, step % TURNS, TURNS, step];
        update.run(shape, arguments)?;
        let probe = mix(run.seed ^ step) % count;
        let word: u32 = all[probe as usize].read_one(step as usize % WORDS)?;
        run.step(step, format_args!("allocation {probe} word {word:08x}"))?;
    }

    ensure!(table.read::<u64>()? == addresses, "the pointer table has changed");
    for (a, buffer) in (0..count).zip(&all) {
        // All words of an allocation are equal: they started so, and the update treats them alike.
        let mut word = pattern(run.seed, a);
        for step in (a % TURNS..steps).step_by(TURNS as usize) {
            word = mix(word.wrapping_add(step)).wrapping_add(a);
        }
        let words: Vec<u32> = buffer.read()?;
        ensure!(words.iter().all(|&w| w == word), "allocation {a} has wrong content");
        run.absorb(&words);
    }
    run.finish()
}
