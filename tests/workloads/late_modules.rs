//! Modules that come and go in the middle of the run, with variables and constants that live in
//! the driver's memory, not in an allocation of the program.

use anyhow::{Context as _, Result, ensure};

use crate::args;
use crate::gpu::{Buffer, Gpu, Kernel, Module, Shape, read_at, write_at};
use crate::numbers::{filled, mix};
use crate::report::Run;

const EARLY: &str = include_str!("kernels/early.ptx");
const LATE: &str = include_str!("kernels/late.ptx");
const TABLE: usize = 256;
const RING: usize = 64;

/// A loaded late module and its step.
struct Late {
    // Before the module, so that it is dropped first.
    step: Kernel,
    calls: u64,
    sum: u64,
    module: Module,
}

impl Late {
    fn load(table: &[u32]) -> Result<Self> {
        let module = Module::load(LATE)?;
        let (address, bytes) = module.global("late_table")?;
        ensure!(bytes == TABLE * 4, "late_table has {bytes} bytes");
        write_at(address, table)?;
        let (calls, _) = module.global("late_calls")?;
        let (sum, _) = module.global("late_sum")?;
        Ok(Self { step: module.kernel("late_step")?, calls, sum, module })
    }

    fn state(&self) -> Result<(u32, u64)> {
        let again = self.module.global("late_sum")?.0;
        ensure!(again == self.sum, "late_sum has moved from {:x} to {again:x}", self.sum);
        Ok((read_at::<u32>(self.calls, 1)?[0], read_at::<u64>(self.sum, 1)?[0]))
    }
}

/// What the modules do, on the host: constants, calls, sum.
struct HostLate {
    table: Vec<u32>,
    state: (u32, u64),
}

impl HostLate {
    fn step(&mut self, words: &mut [u32]) {
        self.state.0 += 1;
        for word in words {
            let w = *word as usize;
            *word ^= self.table[w & 255] ^ (self.table[(w >> 8) & 255] << 3);
            self.state.1 = self.state.1.wrapping_add(u64::from(*word));
        }
    }
}

/// Runs the workload.
pub(crate) fn run(run: &mut Run) -> Result<()> {
    let n: u32 = run.pick(16 << 10, 1 << 20, 32 << 20);
    let steps = run.plan(300, 1000, 4000);
    // In this order for every number of steps.
    let first_at = steps / 2;
    let (second_at, drop_at) = (steps - steps.div_ceil(4), steps - steps.div_ceil(8));
    let tables = [1, 2].map(|which| filled(TABLE, mix(run.seed ^ which)));
    let gpu = Gpu::open()?;
    let module = Module::load(EARLY)?;
    let early = module.kernel("early_step")?;
    let (total, _) = module.global("early_total")?;
    let (ring, _) = module.global("early_ring")?;
    let words = Buffer::holding(&filled(n as usize, run.seed))?;
    gpu.synchronize()?;
    run.ready()?;
    let (mut first, mut second) = (None, None);
    let mut first_state = None;
    let mut totals = Vec::new();
    let shape = Shape::covering(n);
    for step in 0..steps {
        if step == first_at {
            first = Some(Late::load(&tables[0])?);
        }
        if step == second_at {
            second = Some(Late::load(&tables[1])?);
        }
        if step == drop_at
            && let Some(late) = first.take()
        {
            first_state = Some(late.state()?);
        }
        early.run(shape, args![&words, n, step])?;
        for late in [&first, &second].into_iter().flatten() {
            late.step.run(shape, args![&words, n])?;
        }
        let sum = read_at::<u64>(total, 1)?[0];
        totals.push(sum);
        run.step(step, format_args!("total {sum:016x}"))?;
    }

    let mut host = filled(n as usize, run.seed);
    let (mut host_total, mut host_ring) = (5u64, vec![0u32; RING]);
    let [mut host_first, mut host_second] = tables.map(|table| HostLate { table, state: (0, 0) });
    let checked = run.checkable(3 * u64::from(n));
    for (step, &got) in (0..checked).zip(&totals) {
        for (i, word) in host.iter_mut().enumerate() {
            *word = mix(*word ^ step);
            host_total = host_total.wrapping_add(u64::from(*word));
            host_ring[i % RING] ^= *word;
        }
        if (first_at..drop_at).contains(&step) {
            host_first.step(&mut host);
        }
        if step >= second_at {
            host_second.step(&mut host);
        }
        ensure!(got == host_total, "step {}: total {got:016x}, not {host_total:016x}", step + 1);
    }
    let complete = checked == steps;
    let last: Vec<u32> = words.read()?;
    let ring: Vec<u32> = read_at(ring, RING)?;
    ensure!(!complete || last == host, "the final words are wrong");
    ensure!(!complete || ring == host_ring, "the module's ring is wrong");
    run.absorb(&last);
    run.absorb(&ring);
    if let Some(late) = first.take() {
        first_state = Some(late.state()?);
    }
    let second_state = second.context("too few steps to load the second module")?.state()?;
    let states = [(first_state.unwrap_or_default(), host_first), (second_state, host_second)];
    for (got, wanted) in states {
        let wanted = wanted.state;
        ensure!(!complete || got == wanted, "a late module has {got:?}, not {wanted:?}");
        run.absorb(&[got.0]);
        run.absorb(&[got.1]);
    }
    run.finish()
}
