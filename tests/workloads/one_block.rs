//! One allocation that does not fit into the memory through which a program copies from inside: each of its parts
//! has to come from its own place.

use anyhow::{Result, ensure};

use crate::gpu::{Buffer, Gpu, fill_at};
use crate::numbers::mix;
use crate::report::Run;

/// Two times the 64 MiB of that memory, and a part of a chunk.
const BYTES: usize = (128 << 20) + (5 << 10);
/// Each is filled with a value of its own. Not a part of 64 MiB, so that no two places there look alike.
const STRIPE: usize = (1 << 20) + 1024;

/// Runs the workload.
pub(crate) fn run(run: &mut Run) -> Result<()> {
    let steps = run.plan(20, 200, 200);
    let gpu = Gpu::open()?;
    let buffer = Buffer::new(BYTES)?;
    let mut values = Vec::new();
    for begin in (0..BYTES).step_by(STRIPE) {
        values.push(mix(run.seed ^ begin as u32));
        fill(&buffer, begin, values[begin / STRIPE])?;
    }
    gpu.synchronize()?;
    run.ready()?;
    for step in 0..steps {
        let stripe = mix(run.seed ^ mix(step)) as usize % values.len();
        let begin = stripe * STRIPE;
        let found: u32 = buffer.read_one(begin / 4)?;
        ensure!(found == values[stripe], "stripe {stripe}: {found:08x}");
        values[stripe] = found.wrapping_mul(3).wrapping_add(step);
        fill(&buffer, begin, values[stripe])?;
        run.step(step, format_args!("stripe {stripe} had {found:08x}"))?;
    }
    gpu.synchronize()?;
    let words: Vec<u32> = buffer.read()?;
    let stripes = words.chunks(STRIPE / 4).zip(&values);
    let wrong = stripes.enumerate().find(|(_, (words, value))| words.iter().any(|w| w != *value));
    ensure!(wrong.is_none(), "stripe {:?} is wrong", wrong.map(|(stripe, _)| stripe));
    run.absorb(&words);
    run.finish()
}

fn fill(buffer: &Buffer, begin: usize, value: u32) -> Result<()> {
    fill_at(buffer.address() + begin as u64, value, STRIPE.min(BYTES - begin) / 4)
}
