//! A process with CUDA and two children with CUDA: three contexts that belong together.

use anyhow::{Context as _, Result, ensure};

use crate::args;
use crate::gpu::{Buffer, Gpu, Module, Shape};
use crate::launcher::Worker;
use crate::numbers::{filled, mix, mixer_round, mixer_sum};
use crate::report::Run;

const PTX: &str = include_str!("kernels/mixer.ptx");
const CHILDREN: [&str; 2] = ["sgd", "stencil"];

/// Runs the workload.
pub(crate) fn run(run: &mut Run) -> Result<()> {
    let n: u32 = run.pick(8 << 10, 1 << 20, 64 << 20);
    let steps = run.plan(250, 1000, 2000);
    let gpu = Gpu::open()?;
    let module = Module::load(PTX)?;
    let (round, add) = (module.kernel("mixer_round")?, module.kernel("mixer_sum")?);
    let mut host = filled(n as usize, run.seed);
    let words = Buffer::holding(&host)?;
    let sum = Buffer::zeroed::<u64>(1)?;
    gpu.synchronize()?;
    // The context exists already: the children must not inherit anything of it.
    let mut children = Vec::new();
    for (name, number) in CHILDREN.iter().zip(1..) {
        let child = Worker::start(run, name, mix(run.seed ^ number))?;
        run.line(format_args!("child pid={}", child.pid))?;
        children.push(child);
    }
    run.ready()?;
    let mut sums = Vec::new();
    for step in 0..steps {
        round.run(Shape::covering(n), args![&words, n, step])?;
        add.run(Shape::of(8, 128), args![&words, n, &sum])?;
        let total: u64 = sum.read_one(0)?;
        sums.push(total);
        run.step(step, format_args!("sum {total:016x}"))?;
    }

    // A child's whole output (two hundred lines at most) fits in its pipe, so none waited for us.
    for (name, mut child) in CHILDREN.iter().zip(children) {
        let mut last = None;
        while let Some(line) = child.next_line()? {
            last = Some(line);
        }
        let status = child.wait()?;
        ensure!(status.success(), "child {name} ended with {status}");
        let last = last.context("a child said nothing")?;
        ensure!(last.starts_with("result "), "child {name} ended with: {last}");
        run.line(format_args!("child {name} {last}"))?;
        run.absorb(last.as_bytes());
    }
    let (checked, mut total) = (run.checkable(2 * u64::from(n)), 0u64);
    for (step, &got) in (0..checked).zip(&sums) {
        mixer_round(&mut host, step);
        total = total.wrapping_add(mixer_sum(&host));
        ensure!(got == total, "step {}: sum {got:016x}, not {total:016x}", step + 1);
    }
    let last: Vec<u32> = words.read()?;
    ensure!(checked < steps || last == host, "the final words are wrong");
    run.absorb(&last);
    run.finish()
}
