//! Two processes that have memory of each other open, by legacy IPC handles: each changes what is the other's, in
//! turn. What one of them allocated is a block of its own, what the other allocated shares a block with more.

use anyhow::{Context as _, Result, ensure};

use crate::args;
use crate::gpu::{Buffer, Gpu, Kernel, Module, Shape, read_at};
use crate::ipc::{Opened, offer, parsed};
use crate::numbers::{filled, mixer_round};
use crate::report::Run;
use crate::second::Second;

const PTX: &str = include_str!("kernels/mixer.ptx");
/// Where a second process finds the handle of the first one's memory, and how many words that has.
const ENV: &str = "WORKLOAD_RING";
/// Words of the second process.
const SMALL: u32 = 1 << 10;
fn mix(kernel: &Kernel, gpu: &Gpu, address: u64, words: u32, step: u32) -> Result<()> {
    kernel.run(Shape::covering(words), args![address, words, step])?;
    gpu.synchronize()
}

/// Runs the workload.
pub(crate) fn run(run: &mut Run) -> Result<()> {
    if let Ok(handle) = std::env::var(ENV) {
        return second(&handle);
    }
    let words: u32 = run.pick(1 << 20, 1 << 22, 64 << 20);
    let steps = run.plan(100, 400, 1000);
    let gpu = Gpu::open()?;
    let module = Module::load(PTX)?;
    let round = module.kernel("mixer_round")?;
    let mut host = filled(words as usize, run.seed);
    let own = Buffer::holding(&host)?;
    gpu.synchronize()?;
    let given = format!("{} {words}", offer(own.address())?);
    let mut other = Second::start("ring", ENV, &given)?;
    let mut others = Opened::open(parsed(&other.hear()?)?)?;
    run.line(format_args!("child pid={}", other.pid()))?;
    run.ready()?;
    let mut small = filled(SMALL as usize, 7);
    let checked = run.checkable(2 * u64::from(words));
    for step in 0..steps {
        mix(&round, &gpu, own.address(), words, step)?;
        other.tell(step)?;
        let said = other.hear()?;
        mix(&round, &gpu, others.address, SMALL, step)?;
        if step % 16 == 7 {
            others = others.reopened()?;
        }
        let seen: Vec<u32> = read_at(others.address, SMALL as usize)?;
        run.step(step, format_args!("{said} {:08x}", seen[5]))?;
        if step < checked {
            mixer_round(&mut host, step);
            mixer_round(&mut host, step + 1000);
            mixer_round(&mut small, step);
            ensure!(seen == small, "step {step}: the memory of the second process is wrong");
        }
    }
    other.end()?;
    let last: Vec<u32> = own.read()?;
    ensure!(checked < steps || last == host, "the final words are wrong");
    run.absorb(&last);
    run.finish()
}

/// The second process: mixes the first one's memory whenever it is told to.
fn second(handle: &str) -> Result<()> {
    let (handle, words) = handle.split_once(' ').context("a handle and a number")?;
    let words: u32 = words.parse()?;
    let gpu = Gpu::open_at(1)?;
    let module = Module::load(PTX)?;
    let round = module.kernel("mixer_round")?;
    let own = Buffer::holding(&filled(SMALL as usize, 7))?;
    let more = Buffer::holding(&filled(SMALL as usize, 8))?;
    let mut others = Opened::open(parsed(handle)?)?;
    println!("{}", offer(own.address())?);
    for line in std::io::stdin().lines() {
        let step: u32 = line?.trim().parse()?;
        mix(&round, &gpu, others.address, words, step + 1000)?;
        if step % 16 == 3 {
            others = others.reopened()?;
        }
        let seen: u32 = read_at(others.address + 4 * u64::from(words - 1), 1)?[0];
        println!("{seen:08x} {:08x}", more.read_one::<u32>(step as usize % 1024)?);
    }
    Ok(())
}
