//! A pool of memory that other processes could open, in the middle third of the steps. Where memory is left to the driver,
//! it cannot checkpoint the program then, and before and after it can.

use anyhow::Result;

use crate::gpu::{Buffer, Gpu, fill_at};
use crate::pool::Pool;
use crate::report::Run;

/// Runs the workload.
pub(crate) fn run(run: &mut Run) -> Result<()> {
    let steps = run.plan(60, 300, 300);
    let gpu = Gpu::open()?;
    let words = Buffer::zeroed::<u32>(1 << 20)?;
    let mut pool = None;
    run.ready()?;

    for step in 0..steps {
        if step == steps / 3 {
            let shared = Pool::shareable(&gpu)?;
            shared.export()?;
            pool = Some(shared);
        } else if step == steps * 2 / 3 {
            pool = None;
        }
        fill_at(words.address(), step, 1 << 10)?;
        let state = if pool.is_some() { "shared" } else { "alone" };
        run.step(step, format_args!("{state} {}", words.read_one::<u32>(7)?))?;
    }
    gpu.synchronize()?;
    run.absorb(&words.read::<u32>()?);
    run.finish()
}
