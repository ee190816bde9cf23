//! Host threads that launch at the same time, each on its own stream of the shared context.

use std::sync::mpsc;
use std::time::Duration;

use anyhow::{Context as _, Result, anyhow, ensure};

use crate::args;
use crate::cuda::STREAM_NON_BLOCKING;
use crate::gpu::{Buffer, Gpu, Kernel, Module, Shape, Stream};
use crate::numbers::{filled, mix, mixer_round, mixer_sum};
use crate::report::Run;

const PTX: &str = include_str!("kernels/mixer.ptx");
const THREADS: u32 = 4;

struct Lane<'a> {
    gpu: &'a Gpu,
    round: &'a Kernel,
    sum: &'a Kernel,
    words: u32,
    tag: u32,
    steps: u32,
    delay: Duration,
}

impl Lane<'_> {
    /// All steps of one thread. Sends the checksum after each; gives the final words.
    fn work(&self, send: &mpsc::Sender<u64>) -> Result<Vec<u32>> {
        self.gpu.make_current()?;
        let stream = Stream::new(STREAM_NON_BLOCKING)?;
        let words = Buffer::holding(&filled(self.words as usize, self.tag))?;
        let sum = Buffer::zeroed::<u64>(1)?;
        self.gpu.synchronize()?;
        for step in 0..self.steps {
            let (shape, n) = (Shape::covering(self.words), self.words);
            self.round.run_on(&stream, shape, args![&words, n, self.tag ^ step])?;
            self.sum.run_on(&stream, Shape::of(4, 128), args![&words, n, &sum])?;
            stream.synchronize()?;
            // The receiver stops listening only when another thread has failed.
            send.send(sum.read_one(0)?).context("the run has ended early")?;
            std::thread::sleep(self.delay);
        }
        words.read()
    }
}

/// Runs the workload.
pub(crate) fn run(run: &mut Run) -> Result<()> {
    let words: u32 = run.pick(4 << 10, 1 << 20, 32 << 20);
    let steps = run.plan(400, 1000, 4000);
    let delay = run.delay();
    let gpu = Gpu::open()?;
    let module = Module::load(PTX)?;
    let (round, sum) = (module.kernel("mixer_round")?, module.kernel("mixer_sum")?);
    let tags: Vec<u32> = (0..THREADS).map(|t| mix(run.seed ^ mix(t + 100))).collect();
    run.ready()?;

    let (gpu, round, sum) = (&gpu, &round, &sum);
    let (series, finals) = std::thread::scope(|scope| -> Result<_> {
        let mut lanes = Vec::new();
        for &tag in &tags {
            let (send, receive) = mpsc::channel();
            let lane = Lane { gpu, round, sum, words, tag, steps, delay };
            lanes.push((receive, scope.spawn(move || lane.work(&send))));
        }
        let mut series = Vec::new();
        'steps: for step in 0..steps {
            let mut sums = Vec::new();
            for (receive, _) in &lanes {
                // A thread that failed says why when it is joined.
                let Ok(sum) = receive.recv() else { break 'steps };
                sums.push(sum);
            }
            let text: Vec<String> = sums.iter().map(|sum| format!("{sum:016x}")).collect();
            run.step(step, format_args!("sums {}", text.join(" ")))?;
            series.push(sums);
        }
        let mut finals = Vec::new();
        for (receive, thread) in lanes {
            drop(receive);
            finals.push(thread.join().map_err(|_| anyhow!("a thread panicked"))??);
        }
        Ok((series, finals))
    })?;

    let checked = run.checkable(u64::from(words * THREADS) * 2);
    for (t, (&tag, last)) in tags.iter().zip(&finals).enumerate() {
        let (mut host, mut total) = (filled(words as usize, tag), 0u64);
        for (step, sums) in (0..checked).zip(&series) {
            mixer_round(&mut host, tag ^ step);
            total = total.wrapping_add(mixer_sum(&host));
            ensure!(sums[t] == total, "thread {t}, step {}: wrong checksum", step + 1);
        }
        ensure!(checked < steps || host == *last, "the final words of thread {t} are wrong");
        run.absorb(last);
    }
    run.finish()
}
