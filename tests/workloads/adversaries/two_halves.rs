//! Two streams that write to the two halves of one allocation, neither waiting for the other.

use anyhow::Result;

use super::field::{CHUNK_WORDS, PTX, TOUCH, touch};
use crate::args;
use crate::cuda::STREAM_NON_BLOCKING;
use crate::gpu::{Buffer, Gpu, Module, Stream};
use crate::numbers::mix;
use crate::report::Run;

/// Steps between two waits of the host.
const IN_FLIGHT: u32 = 4;

/// Runs the workload.
pub(crate) fn run(run: &mut Run) -> Result<()> {
    // Not a whole number of chunks: the streams race on the chunk in the middle as well.
    let half: u32 = CHUNK_WORDS / 2 + CHUNK_WORDS * run.pick(2, 16, 1024);
    let steps = run.plan(200, 1000, 5000);
    let gpu = Gpu::open()?;
    let module = Module::load(PTX)?;
    let write = module.kernel("adversary_write")?;
    let mut host: Vec<u64> =
        (0..2 * half).map(|i| u64::from(mix(i ^ run.seed)) << 32 | u64::from(i)).collect();
    let memory = Buffer::holding(&host)?;
    let streams = [Stream::new(STREAM_NON_BLOCKING)?, Stream::new(STREAM_NON_BLOCKING)?];
    gpu.synchronize()?;
    run.ready()?;
    for step in 0..steps {
        let mut changed = [0; 2];
        for (side, stream) in streams.iter().enumerate() {
            let (start, seed) = (side * half as usize, mix(run.seed) ^ side as u32);
            let address = memory.address() + start as u64 * 8;
            write.run_on(stream, TOUCH, args![address, half, step, seed])?;
            changed[side] = start + touch(&mut host[start..][..half as usize], step, seed);
        }
        if (step + 1) % IN_FLIGHT != 0 && step + 1 != steps {
            run.step(step, "in flight")?;
            continue;
        }
        streams.iter().try_for_each(Stream::synchronize)?;
        let words = [memory.read_one::<u64>(changed[0])?, memory.read_one::<u64>(changed[1])?];
        anyhow::ensure!(words == changed.map(|i| host[i]), "step {step}: {words:x?} is wrong");
        run.step(step, format_args!("words {:016x} {:016x}", words[0], words[1]))?;
    }
    let found: Vec<u64> = memory.read()?;
    let wrong = found.iter().zip(&host).position(|(a, b)| a != b);
    anyhow::ensure!(wrong.is_none(), "word {wrong:?} is wrong");
    run.absorb(&found);
    run.finish()
}
