//! Two processes that change the same memory in turn, on their devices alone: each waits for an event of the other. The
//! host says only what is enqueued.

use anyhow::{Context as _, Result, ensure};

use crate::args;
use crate::cuda::STREAM_NON_BLOCKING;
use crate::event::Event;
use crate::gpu::{Buffer, Gpu, Module, Shape, Stream, read_at};
use crate::ipc::{Opened, offer, parsed};
use crate::numbers::{filled, mixer_round};
use crate::report::Run;
use crate::second::Second;

const PTX: &str = include_str!("kernels/mixer.ptx");
/// Where the second process finds the handles of the memory and of the first one's event.
const ENV: &str = "WORKLOAD_SIGNALS";
const WORDS: u32 = 1 << 15;
/// So often each changes the memory in a step.
const TURNS: u32 = 4;
/// An event lasts for so many steps.
const LIFE: u32 = 8;

/// Runs the workload.
pub(crate) fn run(run: &mut Run) -> Result<()> {
    if let Ok(given) = std::env::var(ENV) {
        return second(&given);
    }
    let steps = run.plan(100, 400, 1000);
    let gpu = Gpu::open_at(0)?;
    let module = Module::load(PTX)?;
    let round = module.kernel("mixer_round")?;
    let stream = Stream::new(STREAM_NON_BLOCKING)?;
    let mut host = filled(WORDS as usize, run.seed);
    let words = Buffer::holding(&host)?;
    gpu.synchronize()?;
    let (mut own, handle) = Event::shared()?;
    let given = format!("{} {handle}", offer(words.address())?);
    let mut other = Second::start("signals", ENV, &given)?;
    let mut others = Event::opened(parsed(&other.hear()?)?)?;
    run.line(format_args!("child pid={}", other.pid()))?;
    run.ready()?;
    let mut number = 0;
    for step in 0..steps {
        if step % LIFE == LIFE - 1 {
            let (event, handle) = Event::shared()?;
            other.tell(format_args!("event {handle}"))?;
            others = Event::opened(parsed(&other.hear()?)?)?;
            own = event;
        }
        for _ in 0..TURNS {
            round.run_on(&stream, Shape::covering(WORDS), args![&words, WORDS, number])?;
            own.record(&stream)?;
            other.tell(format_args!("turn {}", number + 1))?;
            ensure!(other.hear()? == "enqueued", "the other has had its turn");
            others.hold(&stream)?;
            mixer_round(&mut host, number);
            mixer_round(&mut host, number + 1);
            number += 2;
        }
        stream.synchronize()?;
        ensure!(others.is_done()?, "step {step}: it was waited for");
        let seen: Vec<u32> = read_at(words.address(), WORDS as usize)?;
        ensure!(seen == host, "step {step}: the words are wrong");
        run.step(step, format_args!("{:08x}", seen[3]))?;
    }
    other.end()?;
    run.absorb(&host);
    run.finish()
}

/// The second process: enqueues its turn whenever it is told to.
fn second(given: &str) -> Result<()> {
    let (memory, event) = given.split_once(' ').context("two handles")?;
    let _gpu = Gpu::open_at(1)?;
    let module = Module::load(PTX)?;
    let round = module.kernel("mixer_round")?;
    let stream = Stream::new(STREAM_NON_BLOCKING)?;
    let words = Opened::open(parsed(memory)?)?;
    let mut others = Event::opened(parsed(event)?)?;
    let (mut own, handle) = Event::shared()?;
    println!("{handle}");
    for line in std::io::stdin().lines() {
        let line = line?;
        match line.split_once(' ').context("what to do")? {
            ("event", given) => {
                others = Event::opened(parsed(given)?)?;
                let (event, handle) = Event::shared()?;
                own = event;
                println!("{handle}");
            }
            (_, number) => {
                let number: u32 = number.parse()?;
                others.hold(&stream)?;
                round.run_on(
                    &stream,
                    Shape::covering(WORDS),
                    args![words.address, WORDS, number],
                )?;
                own.record(&stream)?;
                println!("enqueued");
            }
        }
    }
    stream.synchronize()
}
