//! Integer atomics in shared and global memory, reductions, a scan and a counting sort. Each step's
//! keys come from the checksum of the step before.

use anyhow::{Result, ensure};

use crate::args;
use crate::gpu::{Buffer, Gpu, Module, Shape, fill_at};
use crate::numbers::mix;
use crate::report::Run;

const PTX: &str = include_str!("kernels/histogram.ptx");
const BINS: usize = 256;

/// One step on the host: updates the totals, gives the new checksum.
fn host_step(n: u32, state: u64, totals: &mut [u64]) -> u64 {
    let keys = (0..n).map(|i| mix(i ^ state as u32 ^ (state >> 32) as u32));
    let mut bins = [0u32; BINS];
    let mut sum = state;
    for key in keys {
        bins[(key >> 24) as usize] += 1;
        sum = sum.wrapping_add(u64::from(key));
    }
    let mut place = 0u64;
    for (bin, &count) in bins.iter().enumerate() {
        totals[bin] += u64::from(count);
        for _ in 0..count {
            place += 1;
            sum = sum.wrapping_add(place * bin as u64);
        }
    }
    sum
}

/// Runs the workload.
pub(crate) fn run(run: &mut Run) -> Result<()> {
    let n: u32 = run.pick(16 << 10, 1 << 20, 16 << 20);
    let steps = run.plan(120, 500, 500);
    let gpu = Gpu::open()?;
    let module = Module::load(PTX)?;
    let make = module.kernel("hist_keys")?;
    let count = module.kernel("hist_count")?;
    let scan = module.kernel("hist_scan")?;
    let scatter = module.kernel("hist_scatter")?;
    let check = module.kernel("hist_check")?;
    let keys = Buffer::zeroed::<u32>(n as usize)?;
    let sorted = Buffer::zeroed::<u32>(n as usize)?;
    let bins = Buffer::zeroed::<u32>(BINS)?;
    let offsets = Buffer::zeroed::<u32>(BINS)?;
    let totals = Buffer::zeroed::<u64>(BINS)?;
    let unordered = Buffer::zeroed::<u32>(1)?;
    let first = u64::from(run.seed).wrapping_mul(0x9e37_79b9_7f4a_7c15);
    let state = Buffer::holding(&[first])?;
    gpu.synchronize()?;
    run.ready()?;
    let wide = Shape::of((n / 256 / 8).clamp(1, 1024), 256);
    let mut series = Vec::new();
    for step in 0..steps {
        fill_at(bins.address(), 0, BINS)?;
        make.run(Shape::covering(n), args![&keys, n, &state])?;
        count.run(wide, args![&keys, n, &bins])?;
        scan.run(Shape::of(1, BINS as u32), args![&bins, &offsets, &totals])?;
        scatter.run(Shape::covering(n), args![&keys, n, &offsets, &sorted])?;
        check.run(wide, args![&sorted, &keys, n, &state, &unordered])?;
        let sum: u64 = state.read_one(0)?;
        series.push(sum);
        run.step(step, format_args!("sum {sum:016x}"))?;
    }

    ensure!(unordered.read_one::<u32>(0)? == 0, "sorted keys are out of order");
    let (mut sum, mut host_totals) = (first, vec![0u64; BINS]);
    let checked = run.checkable(2 * u64::from(n));
    for (step, &got) in (0..checked).zip(&series) {
        sum = host_step(n, sum, &mut host_totals);
        ensure!(got == sum, "step {}: checksum {got:016x}, not {sum:016x}", step + 1);
    }
    let totals: Vec<u64> = totals.read()?;
    ensure!(checked < steps || totals == host_totals, "the totals are wrong");
    let all = totals.iter().sum::<u64>();
    ensure!(all == u64::from(n) * u64::from(steps), "{all} keys were counted");
    run.absorb(&totals);
    run.absorb(&keys.read::<u32>()?);
    run.absorb(&sorted.read::<u32>()?);
    run.finish()
}
