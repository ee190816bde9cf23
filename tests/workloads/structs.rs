//! Pointers inside struct arguments: nested, in arrays, after padding, and cut into halves.

use anyhow::{Result, ensure};

use crate::args;
use crate::gpu::{Buffer, Gpu, Module, Packed, Shape};
use crate::numbers::{filled, mix};
use crate::report::Run;

const PTX: &str = include_str!("kernels/structs.ptx");
const PARTS: usize = 6;
const WEIGHT: f64 = 2.5;
const SHIFT: u16 = 3;

/// What the three kernels do, on the host.
struct Host {
    source: Vec<u32>,
    out: Vec<u32>,
    parts: Vec<Vec<u32>>,
    count: u32,
}

impl Host {
    fn step(&mut self, step: u32) {
        let n = self.source.len();
        let tag = step % 256;
        for i in 0..n {
            let v = mix(self.source[i].wrapping_add(tag)) >> SHIFT;
            self.out[i] = v.wrapping_add((WEIGHT * (i & 1023) as f64) as u32);
            self.count = self.count.wrapping_add(v & 1);
        }
        for i in 0..n {
            let word = &mut self.parts[(i + step as usize) % PARTS][i];
            *word = word.wrapping_mul(5).wrapping_add(self.out[i]);
        }
        let from = &self.parts[step as usize % PARTS];
        for i in 0..n {
            self.source[i] ^= from[(i + step as usize) % n];
        }
    }
}

/// Runs the workload.
pub(crate) fn run(run: &mut Run) -> Result<()> {
    let n: u32 = run.pick(8 << 10, 1 << 20, 32 << 20);
    let steps = run.plan(150, 1000, 4000);
    let words = n as usize;
    let gpu = Gpu::open()?;
    let module = Module::load(PTX)?;
    let apply = module.kernel("structs_apply")?;
    let spread = module.kernel("structs_spread")?;
    let split = module.kernel("structs_split")?;
    let mut host = Host {
        source: filled(words, run.seed),
        out: vec![0; words],
        parts: vec![vec![0; words]; PARTS],
        count: 0,
    };
    let source = Buffer::holding(&host.source)?;
    let out = Buffer::zeroed::<u32>(words)?;
    let counter = Buffer::zeroed::<u32>(1)?;
    let parts: Vec<Buffer> =
        (0..PARTS).map(|_| Buffer::zeroed::<u32>(words)).collect::<Result<_>>()?;
    gpu.synchronize()?;
    run.ready()?;
    let shape = Shape::covering(n);
    let mut counts = Vec::new();
    for step in 0..steps {
        let target = Packed::default().pointer(out.address()).word(n);
        let job = Packed::default()
            .field([(step % 256) as u8])
            .pointer(source.address())
            .nested(target)
            .field(SHIFT.to_ne_bytes())
            .pointer(counter.address())
            .field(WEIGHT.to_ne_bytes());
        apply.run(shape, args![job])?;
        let list = parts
            .iter()
            .fold(Packed::default().word(PARTS as u32), |list, part| list.pointer(part.address()));
        spread.run(shape, args![&out, n, list, step])?;
        let address = source.address();
        let halves = Packed::default().word(address as u32).word(step).word((address >> 32) as u32);
        split.run(shape, args![halves, n, &parts[step as usize % PARTS]])?;
        let count: u32 = counter.read_one(0)?;
        counts.push(count);
        run.step(step, format_args!("count {count}"))?;
    }

    let checked = run.checkable(4 * u64::from(n));
    for (step, &count) in (0..checked).zip(&counts) {
        host.step(step);
        ensure!(count == host.count, "step {}: count {count}, not {}", step + 1, host.count);
    }
    let all = [&source, &out].into_iter().chain(&parts);
    for (buffer, wanted) in all.zip([&host.source, &host.out].into_iter().chain(&host.parts)) {
        let last: Vec<u32> = buffer.read()?;
        ensure!(checked < steps || last == *wanted, "a final buffer is wrong");
        run.absorb(&last);
    }
    run.finish()
}
