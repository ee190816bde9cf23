//! Large local arrays and recursion, under a stack limit that the program has raised.

use anyhow::{Result, ensure};

use crate::args;
use crate::gpu::{Buffer, Gpu, Module, Shape};
use crate::numbers::{filled, mix};
use crate::report::Run;

const PTX: &str = include_str!("kernels/stack.ptx");
/// More than the default of 1 KiB. Not much more: the driver reserves it for every thread that
/// fits on the GPU at the same time.
const STACK_BYTES: usize = 4096;
const LOCAL_WORDS: usize = 512;
const DEPTH: u32 = 7;
const ROUNDS: u32 = 256;

fn tree(seed: u32, depth: u32) -> u32 {
    if depth == 0 {
        return mix(seed);
    }
    let twice = seed.wrapping_mul(2);
    let left = tree(twice.wrapping_add(1), depth - 1);
    let right = tree(twice.wrapping_add(2).wrapping_add(left & 1), depth - 1);
    (left << 1) ^ (right >> 1) ^ depth
}

fn array(start: u32) -> u32 {
    let mut local = [0u32; LOCAL_WORDS];
    let mut x = start;
    for word in &mut local {
        x = x.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
        *word = x;
    }
    let mut at = x as usize % LOCAL_WORDS;
    for round in 0..ROUNDS {
        let v = local[at];
        local[at] = v.wrapping_mul(5).wrapping_add(round);
        at = (v >> 7) as usize % LOCAL_WORDS;
        x ^= v;
    }
    x.wrapping_add(local[x as usize % LOCAL_WORDS])
}

/// Runs the workload.
pub(crate) fn run(run: &mut Run) -> Result<()> {
    let n: u32 = run.pick(512, 32 << 10, 256 << 10);
    let steps = run.plan(100, 400, 2000);
    let gpu = Gpu::open_own_context()?;
    gpu.set_stack_size(STACK_BYTES)?;
    let limit = gpu.stack_size()?;
    ensure!(limit >= STACK_BYTES, "the stack limit is {limit} after it was set");
    let module = Module::load(PTX)?;
    let recurse = module.kernel("stack_tree")?;
    let local = module.kernel("stack_array")?;
    let mut host = filled(n as usize, run.seed);
    let words = Buffer::holding(&host)?;
    gpu.synchronize()?;
    run.ready()?;
    let shape = Shape::covering(n);
    let mut probes = Vec::new();
    for step in 0..steps {
        recurse.run(shape, args![&words, n, DEPTH, step])?;
        local.run(shape, args![&words, n, ROUNDS])?;
        let probe: u32 = words.read_one((step % n) as usize)?;
        probes.push(probe);
        let now = gpu.stack_size()?;
        ensure!(now == limit, "the stack limit changed from {limit} to {now}");
        run.step(step, format_args!("probe {probe:08x}"))?;
    }

    let checked = run.checkable(u64::from(n) * 2000);
    for (step, &probe) in (0..checked).zip(&probes) {
        for word in &mut host {
            *word = array(tree(word.wrapping_add(step), DEPTH));
        }
        let wanted = host[(step % n) as usize];
        ensure!(probe == wanted, "step {}: probe {probe:08x}, not {wanted:08x}", step + 1);
    }
    let last: Vec<u32> = words.read()?;
    ensure!(checked < steps || last == host, "the final words are wrong");
    run.absorb(&last);
    run.absorb(&[limit as u64]);
    run.finish()
}
