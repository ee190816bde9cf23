//! Large allocations that are given back and made again all the time, at the same place and of the
//! same size as likely as not, with other content.

use anyhow::{Result, ensure};

use super::field::{CHUNK_WORDS, PTX, TOUCH, touch};
use crate::args;
use crate::gpu::{Buffer, Gpu, Kernel, Module, fill_at};
use crate::numbers::{Sequence, mix};
use crate::report::Run;

const SLOTS: u32 = 6;

/// An allocation, and what the host knows of it.
struct Slot {
    buffer: Buffer,
    host: Vec<u64>,
}

impl Slot {
    fn make(words: u32, tag: u32) -> Result<Self> {
        let buffer = Buffer::new(words as usize * 8)?;
        fill_at(buffer.address(), tag, words as usize * 2)?;
        Ok(Self { buffer, host: vec![u64::from(tag) << 32 | u64::from(tag); words as usize] })
    }

    fn touch(&mut self, write: &Kernel, step: u32, seed: u32) -> Result<()> {
        write.run(TOUCH, args![&self.buffer, self.host.len() as u32, step, seed])?;
        touch(&mut self.host, step, seed);
        Ok(())
    }

    fn check(&self) -> Result<Vec<u64>> {
        let words: Vec<u64> = self.buffer.read()?;
        let wrong = words.iter().zip(&self.host).position(|(a, b)| a != b);
        ensure!(wrong.is_none(), "word {wrong:?} of {:#x} is wrong", self.buffer.address());
        Ok(words)
    }
}

/// Runs the workload.
pub(crate) fn run(run: &mut Run) -> Result<()> {
    let unit: u32 = CHUNK_WORDS / 2 * run.pick(1, 8, 256);
    let steps = run.plan(100, 400, 1000);
    let gpu = Gpu::open()?;
    let module = Module::load(PTX)?;
    let write = module.kernel("adversary_write")?;
    let mut random = Sequence::new(run.seed);
    let mut slots =
        (0..SLOTS).map(|i| Slot::make(unit * (2 + i % 3), mix(i))).collect::<Result<Vec<_>>>()?;
    gpu.synchronize()?;
    run.ready()?;
    for step in 0..steps {
        let old = slots.swap_remove(random.below(SLOTS) as usize);
        let digest = old.check()?.iter().fold(0, |all, &word| mix(all ^ word as u32));
        let mut words = old.host.len() as u32;
        drop(old);
        if random.below(3) == 0 {
            words = unit * (2 + random.below(3));
        }
        // What was freed is the most likely place of what is made next.
        slots.push(Slot::make(words, mix(run.seed ^ mix(step)))?);
        for slot in &mut slots {
            slot.touch(&write, step, run.seed)?;
        }
        run.step(step, format_args!("digest {digest:08x}"))?;
    }
    for slot in slots {
        run.absorb(&slot.check()?);
    }
    run.finish()
}
