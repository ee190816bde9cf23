//! A process that shares memory of its device with two workers: one forked before CUDA is used, and one started anew. They
//! change the memory in turn on their devices, each after an event of the one before, and give back memory of their own.

use std::io::{BufRead as _, BufReader, Write};

use anyhow::{Context as _, Result, bail, ensure};

use crate::args;
use crate::cuda::{STREAM_NON_BLOCKING, load};
use crate::event::Event;
use crate::gpu::{Buffer, Gpu, Kernel, Module, Shape, Stream};
use crate::ipc::{Opened, offer, parsed};
use crate::numbers::{filled, mix, mixer_round, mixer_sum};
use crate::report::Run;
use crate::second::Second;

const PTX: &str = include_str!("kernels/mixer.ptx");
/// Set in the worker that was started anew: its number.
const ENV: &str = "WORKLOAD_WORKER";
/// Words of a batch, and of what a worker gives back.
const BATCH: u32 = 1 << 14;
const RESULT: u32 = 1 << 12;
/// Batches at once; each is made anew after so many steps.
const BATCHES: u32 = 2;
const LIFE: u32 = 6;
/// So often each worker has its turn in a step.
const TURNS: u32 = 3;

/// The kernel by which everything changes.
struct Mixer {
    round: Kernel,
    stream: Stream,
    _module: Module,
}

impl Mixer {
    fn new() -> Result<Self> {
        let module = Module::load(PTX)?;
        let stream = Stream::new(STREAM_NON_BLOCKING)?;
        Ok(Self { round: module.kernel("mixer_round")?, stream, _module: module })
    }

    fn mix(&self, address: u64, words: u32, number: u32) -> Result<()> {
        self.round.run_on(&self.stream, Shape::covering(words), args![address, words, number])
    }
}

fn first_result(worker: u32) -> Vec<u32> {
    filled(RESULT as usize, mix(worker))
}

/// What the parent has of a worker.
struct Worker {
    process: Second,
    /// Recorded by the worker after its turn.
    done: Event,
    result: Opened,
    /// What that holds.
    expected: Vec<u32>,
}

impl Worker {
    /// Meets a worker that has begun.
    fn meet(mut process: Second, number: u32, own: &str) -> Result<Self> {
        process.tell(own)?;
        let done = Event::opened(parsed(&process.hear()?)?)?;
        let result = Opened::open(parsed(&process.hear()?)?)?;
        Ok(Self { process, done, result, expected: first_result(number) })
    }

    /// Tells it something that it does at once.
    fn tell(&mut self, order: &str) -> Result<()> {
        self.process.tell(order)?;
        ensure!(self.process.hear()? == "enqueued", "a worker does as it is told");
        Ok(())
    }
}

/// A batch, on the device and on the host.
struct Batch {
    words: Buffer,
    host: Vec<u32>,
}

/// The parent.
struct Parent {
    gpu: Gpu,
    mixer: Mixer,
    /// Recorded after the parent's own turn.
    own: Event,
    workers: Vec<Worker>,
    batches: Vec<Batch>,
    turns: u32,
}

impl Parent {
    /// Makes a batch and lets the workers have it instead of what they had in this place.
    fn renew(&mut self, place: u32, tag: u32) -> Result<()> {
        let host = filled(BATCH as usize, tag);
        let words = Buffer::holding(&host)?;
        let order = format!("batch {place} {}", offer(words.address())?);
        self.workers.iter_mut().try_for_each(|worker| worker.tell(&order))?;
        let batch = Batch { words, host };
        // The old one is freed once nobody has it open any more.
        match self.batches.get_mut(place as usize) {
            Some(old) => *old = batch,
            None => self.batches.push(batch),
        }
        Ok(())
    }

    /// The parent's turn and one of each worker, none of which the host waits for.
    fn turn(&mut self) -> Result<()> {
        let place = self.turns % BATCHES;
        let batch = &mut self.batches[place as usize];
        let mut number = self.turns * 8;
        self.mixer.mix(batch.words.address(), BATCH, number)?;
        mixer_round(&mut batch.host, number);
        self.own.record(&self.mixer.stream)?;
        for worker in &mut self.workers {
            number += 1;
            worker.tell(&format!("turn {place} {number}"))?;
            mixer_round(&mut batch.host, number);
            mixer_round(&mut worker.expected, number);
            worker.done.hold(&self.mixer.stream)?;
            // The next one comes after this one.
            self.own.record(&self.mixer.stream)?;
        }
        self.turns += 1;
        Ok(())
    }

    /// Waits for the device: the sums of what all have made, which must be right.
    fn look(&self) -> Result<String> {
        self.gpu.synchronize()?;
        let mut sums = Vec::new();
        for batch in &self.batches {
            let words: Vec<u32> = batch.words.read()?;
            ensure!(words == batch.host, "a batch is wrong");
            sums.push(mixer_sum(&words));
        }
        for worker in &self.workers {
            ensure!(worker.done.is_done()?, "it was waited for");
            let words: Vec<u32> = crate::gpu::read_at(worker.result.address, RESULT as usize)?;
            ensure!(words == worker.expected, "what a worker gave back is wrong");
            sums.push(mixer_sum(&words));
        }
        Ok(sums.iter().map(|sum| format!("{sum:016x}")).collect::<Vec<_>>().join(" "))
    }
}

/// Runs the workload.
pub(crate) fn run(run: &mut Run) -> Result<()> {
    if let Ok(number) = std::env::var(ENV) {
        return work(std::io::stdin(), std::io::stdout(), number.parse()?);
    }
    let steps = run.plan(100, 400, 1000);
    // The library is there, as in a program that was linked with it, and not used yet: CUDA allows a fork.
    load()?;
    // SAFETY: this program has started no thread yet.
    let forked = unsafe { Second::fork(|orders, answers| work(orders, answers, 1)) }?;
    let gpu = Gpu::open_at(0)?;
    let started = Second::start("workers", ENV, "2")?;
    let (own, handle) = Event::shared()?;
    let mut workers = Vec::new();
    for (number, process) in (1..).zip([forked, started]) {
        workers.push(Worker::meet(process, number, &handle)?);
    }
    let (mixer, batches) = (Mixer::new()?, Vec::new());
    let mut parent = Parent { gpu, mixer, own, workers, batches, turns: 0 };
    for place in 0..BATCHES {
        parent.renew(place, run.seed.wrapping_add(place))?;
    }
    for worker in &parent.workers {
        run.line(format_args!("child pid={}", worker.process.pid()))?;
    }
    run.ready()?;
    for step in 0..steps {
        if step % LIFE == LIFE - 1 {
            parent.renew(step / LIFE % BATCHES, mix(run.seed ^ step))?;
        }
        (0..TURNS).try_for_each(|_| parent.turn())?;
        run.step(step, parent.look()?)?;
    }
    let last = parent.batches.iter().map(|batch| batch.host.clone()).collect::<Vec<_>>().concat();
    for worker in parent.workers {
        drop((worker.done, worker.result));
        worker.process.end()?;
    }
    run.absorb(&last);
    run.finish()
}

/// A worker: does as it is told.
fn work(orders: impl std::io::Read, mut answers: impl Write, number: u32) -> Result<()> {
    let mut orders = BufReader::new(orders).lines();
    let _gpu = Gpu::open_at(number)?;
    let mixer = Mixer::new()?;
    let result = Buffer::holding(&first_result(number))?;
    let before = orders.next().context("the parent's event")??;
    let before = Event::opened(parsed(&before)?)?;
    let (done, handle) = Event::shared()?;
    writeln!(answers, "{handle}\n{}", offer(result.address())?)?;
    let mut batches: Vec<Opened> = Vec::new();
    for order in orders {
        let order = order?;
        let words: Vec<&str> = order.split(' ').collect();
        let [what, place, given] = words[..] else { bail!("what, where, and with what") };
        let place: usize = place.parse()?;
        if what == "batch" {
            let batch = Opened::open(parsed(given)?)?;
            match batches.get_mut(place) {
                Some(old) => *old = batch,
                None => batches.push(batch),
            }
        } else {
            let round: u32 = given.parse()?;
            before.hold(&mixer.stream)?;
            mixer.mix(batches[place].address, BATCH, round)?;
            mixer.mix(result.address(), RESULT, round)?;
            done.record(&mixer.stream)?;
        }
        writeln!(answers, "enqueued")?;
    }
    mixer.stream.synchronize()
}
