//! Frees and makes allocations of many sizes all the time; contents are verified when they go.

use anyhow::{Result, ensure};

use crate::args;
use crate::gpu::{Buffer, Gpu, Kernel, Module, Shape};
use crate::numbers::{Sequence, filled, mix, mixer_round};
use crate::report::Run;

const PTX: &str = include_str!("kernels/mixer.ptx");
const SLOTS: u32 = 48;
/// Allocations replaced, and allocations updated, in each step.
const CHANGES: u32 = 3;

/// A live allocation and what the host knows of its content.
struct Slot {
    buffer: Buffer,
    words: u32,
    tag: u32,
    rounds: Vec<u32>,
}

impl Slot {
    fn verify(&self) -> Result<Vec<u32>> {
        let mut wanted = filled(self.words as usize, self.tag);
        for &round in &self.rounds {
            mixer_round(&mut wanted, round);
        }
        let mut got: Vec<u32> = self.buffer.read()?;
        got.truncate(self.words as usize);
        let (address, bytes) = (self.buffer.address(), self.buffer.bytes());
        ensure!(got == wanted, "allocation {address:#x} of {bytes} bytes has wrong content");
        Ok(got)
    }
}

fn make(fill: &Kernel, random: &mut Sequence, largest: u32) -> Result<Slot> {
    // Sizes over all magnitudes, and not only multiples of a word.
    let magnitude = random.below(largest);
    let words = 1 + random.below(16 << magnitude);
    let buffer = Buffer::new(words as usize * 4 + random.below(4) as usize)?;
    let tag = random.below(u32::MAX);
    fill.run(Shape::covering(words), args![&buffer, words, tag])?;
    Ok(Slot { buffer, words, tag, rounds: Vec::new() })
}

/// Runs the workload.
pub(crate) fn run(run: &mut Run) -> Result<()> {
    let largest: u32 = run.pick(13, 18, 20);
    let steps = run.plan(400, 600, 1000);
    let gpu = Gpu::open()?;
    let module = Module::load(PTX)?;
    let (fill, round) = (module.kernel("mixer_fill")?, module.kernel("mixer_round")?);
    let mut random = Sequence::new(run.seed);
    let mut slots: Vec<Option<Slot>> = (0..SLOTS).map(|_| None).collect();
    for slot in slots.iter_mut().step_by(2) {
        *slot = Some(make(&fill, &mut random, largest)?);
    }
    gpu.synchronize()?;
    run.ready()?;
    for step in 0..steps {
        let mut digest = 0;
        for _ in 0..CHANGES {
            let slot = &mut slots[random.below(SLOTS) as usize];
            if let Some(old) = slot.take() {
                digest = old.verify()?.iter().fold(digest, |all, &word| mix(all ^ word));
                // Freed here; two times in three its place is taken again at once.
                drop(old);
                if random.below(3) == 0 {
                    continue;
                }
            }
            *slot = Some(make(&fill, &mut random, largest)?);
        }
        for _ in 0..CHANGES {
            if let Some(slot) = &mut slots[random.below(SLOTS) as usize] {
                let arguments = args![&slot.buffer, slot.words, step];
                round.run(Shape::covering(slot.words), arguments)?;
                slot.rounds.push(step);
            }
        }
        let live = slots.iter().flatten().count();
        run.step(step, format_args!("live {live} digest {digest:08x}"))?;
    }
    for slot in slots.into_iter().flatten() {
        let words = slot.verify()?;
        run.absorb(&words);
    }
    run.finish()
}
