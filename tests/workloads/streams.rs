//! Streams in a ring, held together by events only: each step of a stream waits for the previous
//! step of both neighbours. The host waits every few steps, so much work is in flight in between.

use anyhow::{Result, ensure};

use crate::args;
use crate::cuda::STREAM_NON_BLOCKING;
use crate::event::Event;
use crate::gpu::{Buffer, Gpu, Module, Shape, Stream};
use crate::numbers::{filled, mix};
use crate::report::Run;

const PTX: &str = include_str!("kernels/streams.ptx");
const STREAMS: usize = 12;
/// Steps between two waits of the host.
const IN_FLIGHT: u32 = 4;

fn host_step(from: &[Vec<u32>], step: u32) -> Vec<Vec<u32>> {
    let n = from[0].len();
    let next = |s: usize| -> Vec<u32> {
        let (left, right) = (&from[(s + STREAMS - 1) % STREAMS], &from[(s + 1) % STREAMS]);
        let word = |i: usize| {
            mix(from[s][i] ^ step)
                .wrapping_add(left[(i + 1) % n].wrapping_mul(3))
                .wrapping_add(right[(i + n - 1) % n])
        };
        (0..n).map(word).collect()
    };
    (0..STREAMS).map(next).collect()
}

/// Runs the workload.
pub(crate) fn run(run: &mut Run) -> Result<()> {
    let n: u32 = run.pick(2 << 10, 256 << 10, 8 << 20);
    let steps = run.plan(240, 1000, 4000);
    let gpu = Gpu::open()?;
    let module = Module::load(PTX)?;
    let kernel = module.kernel("ring_step")?;
    let mut host: Vec<Vec<u32>> =
        (0..STREAMS as u32).map(|s| filled(n as usize, mix(run.seed ^ mix(s)))).collect();
    let mut buffers: [Vec<Buffer>; 2] = [Vec::new(), Vec::new()];
    let mut events: [Vec<Event>; 2] = [Vec::new(), Vec::new()];
    let mut streams = Vec::new();
    for (s, words) in host.iter().enumerate() {
        buffers[0].push(Buffer::holding(words)?);
        buffers[1].push(Buffer::zeroed::<u32>(n as usize)?);
        events[0].push(Event::new()?);
        events[1].push(Event::new()?);
        streams.push(Stream::new(if s % 2 == 0 { STREAM_NON_BLOCKING } else { 0 })?);
    }
    gpu.synchronize()?;
    run.ready()?;

    let mut probes = Vec::new();
    for step in 0..steps {
        // Two sets of events: a stream of this step must find its neighbours' events of the last
        // one, even where those have already recorded this one's.
        let (now, before) = ((step % 2) as usize, (step % 2) as usize ^ 1);
        for (s, stream) in streams.iter().enumerate() {
            let (left, right) = ((s + STREAMS - 1) % STREAMS, (s + 1) % STREAMS);
            events[before][left].hold(stream)?;
            events[before][right].hold(stream)?;
            let [left, own, right] = [left, s, right].map(|i| &buffers[now][i]);
            let arguments = args![left, own, right, &buffers[now ^ 1][s], n, step];
            kernel.run_on(stream, Shape::covering(n), arguments)?;
            events[now][s].record(stream)?;
        }
        if (step + 1) % IN_FLIGHT != 0 && step + 1 != steps {
            run.step(step, "in flight")?;
            continue;
        }
        for (s, stream) in streams.iter().enumerate() {
            if s % 3 == 0 {
                events[now][s].synchronize()?;
            } else {
                stream.synchronize()?;
                ensure!(stream.is_idle()?, "stream {s} is busy after it was waited for");
            }
        }
        let mut probe = 0;
        for buffer in &buffers[now ^ 1] {
            probe = mix(probe ^ buffer.read_one::<u32>(step as usize % n as usize)?);
        }
        probes.push((step, probe));
        run.step(step, format_args!("probe {probe:08x}"))?;
    }

    let checked = run.checkable(u64::from(n) * STREAMS as u64);
    let mut probes = probes.into_iter().peekable();
    for step in 0..checked {
        host = host_step(&host, step);
        if let Some((_, probe)) = probes.next_if(|(at, _)| *at == step) {
            let wanted =
                host.iter().fold(0, |p, words| mix(p ^ words[step as usize % words.len()]));
            ensure!(probe == wanted, "step {}: probe {probe:08x}, not {wanted:08x}", step + 1);
        }
    }
    for (s, wanted) in host.iter().enumerate() {
        let last: Vec<u32> = buffers[(steps % 2) as usize][s].read()?;
        ensure!(checked < steps || last == *wanted, "the final buffer of stream {s} is wrong");
        run.absorb(&last);
    }
    run.finish()
}
