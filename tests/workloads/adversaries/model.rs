//! Memory that is read all the time and hardly ever written: instances may share it, until one writes.

use anyhow::{Result, ensure};

use super::field::{Field, POOLS, PTX, TOUCH, TOUCHED};
use super::hidden::hidden_table;
use crate::args;
use crate::gpu::{Buffer, Gpu, Module, Shape};
use crate::numbers::mix;
use crate::report::Run;

/// So many steps pass between two that write to a pool.
const SELDOM: u32 = 8;
/// So many pools are written now and then, and towards the end as many others.
const TUNED: u32 = 2;

/// Each step reads all pools, and one in eight changes one of two by a plain launch; from the middle of its work
/// on one of two others.
pub(crate) fn model(run: &mut Run) -> Result<()> {
    work(run, false)
}

/// Each step also writes to a pool what is there already, through a pointer that lies in memory.
pub(crate) fn stamp(run: &mut Run) -> Result<()> {
    work(run, true)
}

fn work(run: &mut Run, stamps: bool) -> Result<()> {
    let steps = run.plan(200, 1000, 5000);
    let gpu = Gpu::open()?;
    let module = Module::load(PTX)?;
    let read = module.kernel("adversary_read")?;
    let write = module.kernel("adversary_write")?;
    let stamp = module.kernel("adversary_stamp")?;
    let mut field = Field::new(run)?;
    let masked = hidden_table(&gpu, &module, &field)?;
    let state = Buffer::zeroed::<u64>(TOUCHED as usize)?;
    let mut wanted = vec![0u64; TOUCHED as usize];
    run.ready()?;
    for step in 0..steps {
        for pool in &field.pools {
            read.run(TOUCH, args![&state, pool, field.words, step])?;
        }
        let tuned = step / SELDOM % TUNED + if step > steps / 2 { TUNED } else { 0 };
        if step % SELDOM == SELDOM - 1 {
            let pool = tuned;
            write.run(TOUCH, args![&field.pools[pool as usize], field.words, step, run.seed])?;
        }
        if stamps {
            let pool = POOLS - 1 - step % 2;
            stamp.run(Shape::of(1, 1), args![&masked, pool, field.words, step])?;
        }
        gpu.synchronize()?;
        for pool in &field.host {
            for (thread, word) in (0..).zip(&mut wanted) {
                let index = mix(step ^ mix(thread)) % field.words;
                *word = word.wrapping_mul(31).wrapping_add(pool[index as usize]);
            }
        }
        if step % SELDOM == SELDOM - 1 {
            field.touch(tuned, step, run.seed);
        }
        let found: Vec<u64> = state.read()?;
        ensure!(found == wanted, "the state is wrong in step {step}");
        run.step(step, format_args!("word {:016x}", found[0]))?;
    }
    field.finish(run)
}
