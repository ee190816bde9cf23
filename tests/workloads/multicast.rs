//! As many processes as there are devices, each on one of them with memory behind one multicast object: in each step all
//! change their own memory, and together sum it in place, each a part of it, as NCCL does with NVLink SHARP.

use std::os::fd::{AsRawFd as _, FromRawFd as _, OwnedFd};
use std::path::Path;
use std::time::Duration;

use anyhow::{Context as _, Result, ensure};
use cudarc::driver::sys::CUmulticastObjectProp;
use rustix::io::{FdFlags, fcntl_setfd};

use crate::args;
use crate::cuda::{check, driver};
use crate::gpu::{Gpu, Kernel, Module, Shape, read_at, write_at};
use crate::handles::{Mapped, export, import};
use crate::numbers::{filled, mixer_round, mixer_sum};
use crate::report::Run;
use crate::second::Second;

const PTX: &str = include_str!("kernels/multicast.ptx");
const MIXER: &str = include_str!("kernels/mixer.ptx");
/// Where the other processes find their number, how many there are, the words, the seed, and the descriptor of the object.
const ENV: &str = "WORKLOAD_MULTICAST";
/// A file: the others add their devices once it is there, and the first one waits for that as it binds its memory. All
/// have the object by then: what begins to use CUDA during a dump is not part of it.
const LATE: &str = "WORKLOAD_LATE";
/// What another process says once it has the object, where it waits for the file.
const HAS_IT: &str = "has it";
/// What another process says once its device is part of the object.
const ADDED: &str = "added";
/// The most processes.
const MOST: u32 = 4;
/// Memory is whole granules of this.
const GRANULE: usize = 2 << 20;

/// What a process starts with.
#[derive(Clone, Copy)]
struct Plan {
    rank: u32,
    ranks: u32,
    words: u32,
    seed: u32,
}

impl Plan {
    /// Bytes of memory on each device: the words, and one in which all count.
    fn bytes(&self) -> usize {
        (4 * (self.words as usize + 1)).next_multiple_of(GRANULE)
    }

    /// The memory of a process before the first step.
    fn first_words(&self, rank: u32) -> Vec<u32> {
        filled(self.words as usize, self.seed.wrapping_add(rank))
    }

    /// What a process mixes its memory with.
    fn tag(&self, rank: u32, step: u32) -> u32 {
        step * self.ranks + rank
    }
}

/// A process with its device and its memory.
struct Rank {
    plan: Plan,
    round: Kernel,
    reduce: Kernel,
    add: Kernel,
    _modules: [Module; 2],
    /// All memory at once; it goes before the memory of this device.
    team: Mapped,
    own: Mapped,
    gpu: Gpu,
}

impl Rank {
    /// Takes part in an object that the device was added to, whose handle this takes over. Waits for the others.
    fn new(gpu: Gpu, object: u64, plan: Plan) -> Result<Self> {
        let modules = [Module::load(MIXER)?, Module::load(PTX)?];
        let round = modules[0].kernel("mixer_round")?;
        let (reduce, add) =
            (modules[1].kernel("multicast_reduce")?, modules[1].kernel("multicast_add")?);
        let own = Mapped::create(&gpu, plan.bytes())?;
        let mut words = plan.first_words(plan.rank);
        words.push(0);
        write_at(own.address, &words)?;
        let bind = driver().cuMulticastBindMem;
        // SAFETY: these are handles of the driver's, which checks them and the range.
        let code = unsafe { bind(object, 0, own.handle, 0, plan.bytes(), 0) };
        check("cuMulticastBindMem", code)?;
        let team = Mapped::map(&gpu, object, plan.bytes())?;
        Ok(Self { plan, round, reduce, add, _modules: modules, team, own, gpu })
    }

    /// Changes the memory of this device alone.
    fn mix(&self, step: u32) -> Result<()> {
        let Plan { words, rank, .. } = self.plan;
        let tag = self.plan.tag(rank, step);
        self.round.run(Shape::covering(words), args![self.own.address, words, tag])?;
        self.gpu.synchronize()
    }

    /// Sums this process's part of the memory of all devices, and counts.
    fn sum(&self) -> Result<()> {
        let Plan { words, rank, ranks, .. } = self.plan;
        let part = words.div_ceil(ranks);
        let first = (rank * part).min(words);
        let count = part.min(words - first);
        self.reduce.run(Shape::covering(part), args![self.team.address, first, count])?;
        self.add.run(Shape::row(1), args![self.team.address, words, rank + 1])?;
        self.gpu.synchronize()
    }

    /// The words of this device, and what was counted there.
    fn look(&self) -> Result<(Vec<u32>, u32)> {
        let mut words: Vec<u32> = read_at(self.own.address, self.plan.words as usize + 1)?;
        let counted = words.pop().context("the last word")?;
        Ok((words, counted))
    }
}

impl Drop for Rank {
    fn drop(&mut self) {
        // SAFETY: bound by this value, once.
        unsafe {
            let (device, bytes) = (self.gpu.device(), self.plan.bytes());
            (driver().cuMulticastUnbind)(self.team.handle, device, 0, bytes);
        }
    }
}

/// Adds a device to an object.
fn add(gpu: &Gpu, object: u64) -> Result<()> {
    // SAFETY: the driver checks the handle.
    let code = unsafe { (driver().cuMulticastAddDevice)(object, gpu.device()) };
    check("cuMulticastAddDevice", code)
}

/// The same on the host, of all processes: the sum is what each has after a step.
fn repeat(plan: &Plan, step: u32, all: &mut [Vec<u32>]) {
    for (rank, words) in (0..).zip(all.iter_mut()) {
        mixer_round(words, plan.tag(rank, step));
    }
    let mut sums = vec![0u32; plan.words as usize];
    for words in all.iter() {
        sums.iter_mut().zip(words).for_each(|(sum, word)| *sum = sum.wrapping_add(*word));
    }
    all.iter_mut().for_each(|words| words.clone_from(&sums));
}

/// Runs the workload.
pub(crate) fn run(run: &mut Run) -> Result<()> {
    if let Ok(given) = std::env::var(ENV) {
        return another(&given);
    }
    let words: u32 = run.pick(1 << 14, 1 << 18, 1 << 22);
    let steps = run.plan(100, 400, 1000);
    let gpu = Gpu::open_at(0)?;
    let plan = Plan { rank: 0, ranks: Gpu::count()?.min(MOST), words, seed: run.seed };
    let properties = CUmulticastObjectProp {
        numDevices: plan.ranks,
        size: plan.bytes(),
        handleTypes: 1,
        flags: 0,
    };
    let mut object = 0;
    // SAFETY: a place for the result, and properties that live through the call.
    let code = unsafe { (driver().cuMulticastCreate)(&raw mut object, &raw const properties) };
    check("cuMulticastCreate", code)?;
    let descriptor = export(object)?;
    fcntl_setfd(&descriptor, FdFlags::empty())?;
    let start = |rank: u32| {
        let Plan { ranks, words, seed, .. } = plan;
        let given = format!("{rank} {ranks} {words} {seed} {}", descriptor.as_raw_fd());
        Second::start("multicast", ENV, &given)
    };
    let mut others = (1..plan.ranks).map(start).collect::<Result<Vec<_>>>()?;
    drop(descriptor);
    add(&gpu, object)?;
    let own = if std::env::var_os(LATE).is_some() {
        others.iter_mut().try_for_each(|other| hear(other, HAS_IT))?;
        run.line("binding")?;
        let own = Rank::new(gpu, object, plan)?;
        hear_of(&mut others, run)?;
        own
    } else {
        // What waits for a device would wait for ever if its process has ended.
        hear_of(&mut others, run)?;
        Rank::new(gpu, object, plan)?
    };
    together(&mut others, "begin", || Ok(()))?;
    run.ready()?;
    let mut host: Vec<_> = (0..plan.ranks).map(|rank| plan.first_words(rank)).collect();
    let checked = run.checkable(2 * u64::from(words) * u64::from(plan.ranks));
    for step in 0..steps {
        together(&mut others, "mix", || own.mix(step))?;
        together(&mut others, "sum", || own.sum())?;
        let (seen, counted) = own.look()?;
        let said = together(&mut others, "look", || Ok(()))?;
        let own_sum = mixer_sum(&seen);
        let expected = format!("{own_sum:016x} {counted}");
        ensure!(said.iter().all(|said| *said == expected), "step {step}: the devices differ");
        let each = plan.ranks * (plan.ranks + 1) / 2;
        ensure!(counted == each.wrapping_mul(step + 1), "step {step}: {counted} was counted");
        run.step(step, &expected)?;
        if step < checked {
            repeat(&plan, step, &mut host);
            ensure!(seen == host[0], "step {step}: the sums are wrong");
        }
    }
    others.into_iter().try_for_each(Second::end)?;
    run.absorb(&own.look()?.0);
    run.finish()
}

/// Hears that the others take part.
fn hear_of(others: &mut [Second], run: &Run) -> Result<()> {
    others.iter_mut().try_for_each(|other| {
        hear(other, ADDED)?;
        run.line(format_args!("child pid={}", other.pid()))
    })
}

/// Hears this of another process.
fn hear(other: &mut Second, expected: &str) -> Result<()> {
    let said = other.hear()?;
    ensure!(said == expected, "another process says {said:?} instead of {expected:?}");
    Ok(())
}

/// Has all processes do something, this one too, and waits for them: what the others say.
fn together(
    others: &mut [Second],
    order: &str,
    own: impl FnOnce() -> Result<()>,
) -> Result<Vec<String>> {
    others.iter_mut().try_for_each(|other| other.tell(order))?;
    own()?;
    others.iter_mut().map(Second::hear).collect()
}

/// Another process: does what it is told.
fn another(given: &str) -> Result<()> {
    let numbers: Vec<u32> = given.split(' ').map(str::parse).collect::<Result<_, _>>()?;
    let [rank, ranks, words, seed, descriptor] = numbers[..] else {
        anyhow::bail!("five numbers");
    };
    let plan = Plan { rank, ranks, words, seed };
    // SAFETY: the first process leaves the descriptor to this one, which uses it here alone.
    let descriptor = unsafe { OwnedFd::from_raw_fd(descriptor as i32) };
    let gpu = Gpu::open_at(rank)?;
    let object = import(&descriptor)?;
    drop(descriptor);
    if let Some(file) = std::env::var_os(LATE) {
        println!("{HAS_IT}");
        while !Path::new(&file).exists() {
            std::thread::sleep(Duration::from_millis(5));
        }
    }
    add(&gpu, object)?;
    println!("{ADDED}");
    let own = Rank::new(gpu, object, plan)?;
    let mut step = 0;
    for line in std::io::stdin().lines() {
        match line?.trim() {
            "begin" => {}
            "mix" => {
                own.mix(step)?;
                step += 1;
            }
            "sum" => own.sum()?,
            _ => {
                let (seen, counted) = own.look()?;
                println!("{:016x} {counted}", mixer_sum(&seen));
                continue;
            }
        }
        println!("done");
    }
    Ok(())
}
