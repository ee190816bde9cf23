//! More allocations than the program may have open files, which limits itself to few.

use std::fs::File;
use std::time::{Duration, Instant};

use anyhow::{Result, ensure};
use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};

use crate::gpu::{Buffer, Gpu, fill_at};
use crate::report::Run;

/// Open files; what is beyond it the program may choose, and does not.
const FILES: u64 = 64;
/// Files that it opens in each step.
const OWN: u64 = 24;
/// When a raised limit counts as one that is never put back.
const PUT_BACK: Duration = Duration::from_secs(60);
/// Each has a block of its own.
const BYTES: usize = 1 << 20;

/// The limit is what the program has set, but for the time in which descriptors of blocks are made: the workload's own
/// thread may be at work meanwhile.
fn its_own_limit() -> Result<()> {
    let start = Instant::now();
    loop {
        let now = getrlimit(Resource::Nofile).current;
        if now == Some(FILES) {
            return Ok(());
        }
        ensure!(start.elapsed() < PUT_BACK, "the limit was {FILES} and stays {now:?}");
        std::thread::sleep(Duration::from_millis(1));
    }
}

/// Runs the workload.
pub(crate) fn run(run: &mut Run) -> Result<()> {
    let steps = run.plan(100, 1000, 1000);
    let count = run.pick(100, 1000, 10_000);
    let limit = Rlimit { current: Some(FILES), ..getrlimit(Resource::Nofile) };
    setrlimit(Resource::Nofile, limit)?;
    let gpu = Gpu::open()?;
    let mut all = Vec::new();
    for number in 0..count {
        let buffer = Buffer::new(BYTES)?;
        fill_at(buffer.address(), number, BYTES / 4)?;
        all.push(buffer);
    }
    gpu.synchronize()?;
    run.ready()?;
    for step in 0..steps {
        its_own_limit()?;
        // Memory leaves it room for its own.
        let _own = (0..OWN).map(|_| File::open("/dev/null")).collect::<Result<Vec<_>, _>>()?;
        let number = step % count;
        let last = all[number as usize].read_one::<u32>(BYTES / 4 - 1)?;
        fill_at(all[number as usize].address(), last.wrapping_mul(3) ^ step, BYTES / 4)?;
        run.step(step, format_args!("block {number} had {last}"))?;
    }
    gpu.synchronize()?;
    for buffer in &all {
        run.absorb(&buffer.read::<u32>()?);
    }
    run.finish()
}
