//! Pointers that no look at the arguments finds, and arguments that say something else.

use anyhow::Result;

use super::field::{CHUNK_WORDS, Field, POOLS, PTX, TOUCH};
use crate::args;
use crate::gpu::{Buffer, Gpu, Module, Shape};
use crate::numbers::mix;
use crate::report::Run;

/// Each launch gets its pointer as two numbers, neither of which is a half of it.
pub(crate) fn halves(run: &mut Run) -> Result<()> {
    let steps = run.plan(200, 1000, 5000);
    let gpu = Gpu::open()?;
    let module = Module::load(PTX)?;
    let write = module.kernel("adversary_halves")?;
    let mut field = Field::new(run)?;
    run.ready()?;
    for step in 0..steps {
        let pool = mix(step) % POOLS;
        let address = field.pools[pool as usize].address();
        let (low, high) = (address as u32, (address >> 32) as u32);
        write.run(TOUCH, args![low ^ mix(step), high ^ mix(low), field.words, step, run.seed])?;
        gpu.synchronize()?;
        let index = field.touch(pool, step, run.seed);
        run.step(step, format_args!("word {:016x}", field.word(pool, index)?))?;
    }
    field.finish(run)
}

/// Each launch permutes a table of pointers where it is, and writes through it.
pub(crate) fn permuted(run: &mut Run) -> Result<()> {
    let steps = run.plan(200, 1000, 5000);
    let gpu = Gpu::open()?;
    let module = Module::load(PTX)?;
    let write = module.kernel("adversary_permute")?;
    let mut field = Field::new(run)?;
    let table = Buffer::holding(&field.addresses())?;
    let mut order: Vec<u32> = (0..POOLS).collect();
    run.ready()?;
    for step in 0..steps {
        write.run(TOUCH, args![&table, POOLS, field.words, step, run.seed])?;
        gpu.synchronize()?;
        order.rotate_left(1 + (mix(step) % (POOLS - 1)) as usize);
        let index = field.touch(order[0], step, run.seed);
        run.step(step, format_args!("word {:016x}", field.word(order[0], index)?))?;
    }
    field.finish(run)
}

/// All launches are the same to the last bit of their arguments; where they write is counted in
/// device memory.
pub(crate) fn shifting(run: &mut Run) -> Result<()> {
    let steps = run.plan(200, 1000, 5000);
    let gpu = Gpu::open()?;
    let module = Module::load(PTX)?;
    let write = module.kernel("adversary_shift")?;
    let mut field = Field::new(run)?;
    let masked = hidden_table(&gpu, &module, &field)?;
    let cursor = Buffer::zeroed::<u32>(1)?;
    run.ready()?;
    for step in 0..steps {
        write.run(TOUCH, args![&cursor, &masked, POOLS, field.words, run.seed])?;
        gpu.synchronize()?;
        let pool = mix(step) % POOLS;
        let index = field.touch(pool, step, run.seed);
        run.step(step, format_args!("word {:016x}", field.word(pool, index)?))?;
    }
    field.finish(run)
}

/// The kernel's name promises to read only what it writes to.
pub(crate) fn const_cast(run: &mut Run) -> Result<()> {
    let steps = run.plan(200, 1000, 5000);
    let gpu = Gpu::open()?;
    let module = Module::load(PTX)?;
    // adversary_const(unsigned long long const *, unsigned, unsigned, unsigned)
    let write = module.kernel("_Z15adversary_constPKyjjj")?;
    let mut field = Field::new(run)?;
    run.ready()?;
    for step in 0..steps {
        let pool = mix(step) % POOLS;
        write.run(TOUCH, args![&field.pools[pool as usize], field.words, step, run.seed])?;
        gpu.synchronize()?;
        let index = field.touch(pool, step, run.seed);
        run.step(step, format_args!("word {:016x}", field.word(pool, index)?))?;
    }
    field.finish(run)
}

/// Each step changes every chunk of memory. With long pauses in between, all of it looks as if it
/// did not change.
pub(crate) fn seldom(run: &mut Run) -> Result<()> {
    let steps = run.plan(50, 100, 200);
    let gpu = Gpu::open()?;
    let module = Module::load(PTX)?;
    let write = module.kernel("adversary_everywhere")?;
    let mut field = Field::new(run)?;
    let masked = hidden_table(&gpu, &module, &field)?;
    let chunks = field.words / CHUNK_WORDS;
    run.ready()?;
    for step in 0..steps {
        write.run(Shape::covering(POOLS * chunks), args![&masked, POOLS, field.words, step])?;
        gpu.synchronize()?;
        let mut last = (0, 0);
        for i in 0..POOLS * chunks {
            let index =
                (i % chunks * CHUNK_WORDS + mix(step.wrapping_add(i)) % CHUNK_WORDS) as usize;
            let word = &mut field.host[(i / chunks) as usize][index];
            *word = word.wrapping_mul(3).wrapping_add(u64::from(step));
            last = (i / chunks, index);
        }
        run.step(step, format_args!("word {:016x}", field.word(last.0, last.1)?))?;
    }
    field.finish(run)
}

/// The addresses of the pools, in device memory only, in a form that does not look like addresses.
pub(super) fn hidden_table(gpu: &Gpu, module: &Module, field: &Field) -> Result<Buffer> {
    let table = Buffer::holding(&field.addresses())?;
    let masked = Buffer::zeroed::<u64>(POOLS as usize)?;
    module.kernel("adversary_hide")?.run(TOUCH, args![&table, &masked, POOLS])?;
    gpu.synchronize()?;
    Ok(masked)
}
