//! A program whose main thread ends while another one goes on, as `pthread_exit` in `main` makes it.

use std::process::exit;

use anyhow::Result;

use crate::gpu::{Buffer, Gpu, fill_at};
use crate::report::Run;

/// Runs the workload. With a pace the main thread ends when that allows half of the steps.
pub(crate) fn run(run: &mut Run) -> Result<()> {
    let steps = run.plan(60, 300, 300);
    let pace = run.pace().map(ToOwned::to_owned);
    std::thread::scope(|scope| {
        scope.spawn(|| match work(run, steps) {
            Ok(()) => exit(0),
            Err(error) => {
                eprintln!("error: {error:#}");
                exit(1)
            }
        });
        while let Some(pace) = &pace
            && std::fs::metadata(pace).map_or(0, |meta| meta.len()) < u64::from(steps / 2)
        {
            std::thread::sleep(std::time::Duration::from_millis(2));
        }
        // SAFETY: ends this thread alone. The other one, which uses what lies on this one's stack, ends the
        // process, so the stack stays.
        unsafe { libc::syscall(libc::SYS_exit, 0) };
        unreachable!("this thread has ended")
    })
}

fn work(run: &mut Run, steps: u32) -> Result<()> {
    let gpu = Gpu::open()?;
    let words = Buffer::zeroed::<u32>(1 << 20)?;
    run.ready()?;
    for step in 0..steps {
        fill_at(words.address(), step, 1 << 10)?;
        run.step(step, words.read_one::<u32>(7)?)?;
    }
    gpu.synchronize()?;
    run.absorb(&words.read::<u32>()?);
    run.finish()
}
