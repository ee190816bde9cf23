//! Kernels that write without pause for as long as a step lasts, however long that is: the host
//! tells them through mapped memory when to end.

use std::time::Duration;

use anyhow::Result;

use super::field::{CHUNK_WORDS, Field, POOLS, PTX, TOUCH};
use crate::args;
use crate::gpu::{Gpu, Module};
use crate::numbers::mix;
use crate::pinned::Pinned;
use crate::report::Run;

/// Words that a kernel writes, all of them again and again.
const WRITTEN: u32 = CHUNK_WORDS / 16;

/// Runs the workload.
pub(crate) fn run(run: &mut Run) -> Result<()> {
    let steps = run.plan(40, 100, 200);
    let gpu = Gpu::open()?;
    let module = Module::load(PTX)?;
    let write = module.kernel("adversary_long")?;
    let mut field = Field::new(run)?;
    let flag = Pinned::new(1, true)?;
    run.ready()?;
    for step in 0..steps {
        let pool = mix(step ^ run.seed) % POOLS;
        write.run(TOUCH, args![&field.pools[pool as usize], WRITTEN, flag.device(), step])?;
        std::thread::sleep(Duration::from_millis(1));
        run.last(step);
        flag.set(0, step + 1);
        gpu.synchronize()?;
        let host = &mut field.host[pool as usize][..WRITTEN as usize];
        for (i, word) in (0..).zip(host) {
            *word = u64::from(mix(step ^ mix(i))) << 32 | u64::from(i);
        }
        let index = (mix(step) % WRITTEN) as usize;
        run.step(step, format_args!("word {:016x}", field.word(pool, index)?))?;
    }
    field.finish(run)
}
