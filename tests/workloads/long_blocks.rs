//! A kernel of many blocks that takes long, or one of few blocks that take long, and threads that wait for it in every way.
//!
//! Each thread of the kernel goes on with a sequence of numbers so many times that the host can only jump there. The threads of
//! many blocks meet before that, so that they cannot be interrupted on their way.

use std::time::Duration;

use anyhow::{Result, ensure};

use crate::args;
use crate::event::Event;
use crate::gpu::{Buffer, Gpu, Module, Shape, Stream};
use crate::numbers::mix;
use crate::report::Run;

/// `NAME` and `MEET` are put in.
const PTX: &str = "
.version 8.0
.target sm_70
.address_size 64
.visible .entry NAME(
	.param .u64 words,
	.param .u32 times,
	.param .u32 first
)
{
	.reg .b32 %r<10>;
	.reg .b64 %rd<4>;
	.reg .pred %p<2>;
	ld.param.u64 %rd0, [words];
	ld.param.u32 %r0, [times];
	ld.param.u32 %r8, [first];
	mov.u32 %r1, %ctaid.x;
	mov.u32 %r2, %ntid.x;
	mov.u32 %r3, %tid.x;
	mad.lo.u32 %r1, %r1, %r2, %r3;
	mul.wide.u32 %rd1, %r1, 4;
	add.u64 %rd0, %rd0, %rd1;
	ld.global.u32 %r4, [%rd0];
	add.u32 %r4, %r4, %r8;
	MEET
NEXT:
	mad.lo.u32 %r4, %r4, 1664525, 1013904223;
	sub.u32 %r0, %r0, 1;
	setp.ne.u32 %p0, %r0, 0;
	@%p0 bra NEXT;
	st.global.u32 [%rd0], %r4;
	ret;
}
";

const THREADS: u32 = 32;
/// Blocks for each core: a software driver runs as many at a time, and the kernel takes long on any machine.
const BLOCKS: u32 = 60;

/// What becomes of a number after so many steps.
fn jump(number: u32, mut times: u32) -> u32 {
    let (mut factor, mut term) = (1u32, 0u32);
    let (mut by, mut plus) = (1_664_525u32, 1_013_904_223u32);
    while times > 0 {
        if times & 1 == 1 {
            (factor, term) = (factor.wrapping_mul(by), term.wrapping_mul(by).wrapping_add(plus));
        }
        (by, plus) = (by.wrapping_mul(by), plus.wrapping_mul(by).wrapping_add(plus));
        times >>= 1;
    }
    number.wrapping_mul(factor).wrapping_add(term)
}

/// Runs the workload with many blocks.
pub(crate) fn run(run: &mut Run) -> Result<()> {
    let cores = std::thread::available_parallelism().map_or(1, |n| n.get() as u32);
    let blocks = run.pick(BLOCKS * cores, 2 * BLOCKS * cores, 1 << 14);
    let times = run.pick(1_500_000, 1_500_000, 100_000_000);
    run_with(run, "long_blocks", "bar.sync 0;", blocks, times)
}

/// Runs the workload with few blocks: no core has two of them.
pub(crate) fn run_loops(run: &mut Run) -> Result<()> {
    let blocks = std::thread::available_parallelism().map_or(1, |n| n.get() as u32).min(60);
    let times = run.pick(90_000_000, 180_000_000, 2_000_000_000);
    run_with(run, "long_loops", "", blocks, times)
}

fn run_with(run: &mut Run, name: &str, meet: &str, blocks: u32, times: u32) -> Result<()> {
    let steps = run.plan(1, 1, 4);
    let gpu = Gpu::open()?;
    // Modules keep their text as long as the program runs.
    let text = PTX.replace("NAME", name).replace("MEET", meet).leak();
    let module = Module::load(text)?;
    let kernel = module.kernel(name)?;
    let stream = Stream::new(if run.seed.is_multiple_of(2) { 1 } else { 0 })?;
    let mut host: Vec<u32> = (0..blocks * THREADS).map(|i| mix(run.seed ^ i)).collect();
    let buffer = Buffer::holding(&host)?;
    let before = Event::new()?;
    run.ready()?;
    for step in 0..steps {
        before.record(&stream)?;
        kernel.run_on(&stream, Shape::of(blocks, THREADS), args![&buffer, times, step])?;
        run.line(format_args!("launched {}", step + 1))?;
        let told: &Run = run;
        std::thread::scope(|scope| -> Result<()> {
            let wait = || -> Result<()> {
                gpu.make_current()?;
                stream.synchronize()
            };
            let poll = || -> Result<()> {
                gpu.make_current()?;
                let mut looks = 0;
                while !stream.is_idle()? {
                    std::thread::sleep(Duration::from_millis(1));
                    looks += 1;
                    // A program that was restored shows that it lives.
                    if looks % 200 == 0 {
                        told.line("waiting")?;
                    }
                }
                Ok(())
            };
            let others = [scope.spawn(wait), scope.spawn(poll)];
            gpu.synchronize()?;
            for other in others {
                other.join().expect("no panic")?;
            }
            Ok(())
        })?;
        ensure!(before.is_done()?, "what was before it is over");
        host.iter_mut().for_each(|word| *word = jump(word.wrapping_add(step), times));
        // Directly: a copy of the whole would be waited for on its own.
        let words: Vec<u32> = buffer.read()?;
        let wrong = words.iter().zip(&host).position(|(found, word)| found != word);
        ensure!(wrong.is_none(), "word {wrong:?} is wrong after step {step}");
        run.absorb(&words);
        run.step(step, format_args!("word {:08x}", words[7]))?;
    }
    run.finish()
}
