//! A kernel of many blocks that takes long, be they long or short, or one of few blocks that take long, in loops or with
//! barriers, and threads that wait for it in every way.
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

/// The threads of a block go on together: each adds its neighbour's number to its own.
const TOGETHER: &str = "
.version 8.0
.target sm_70
.address_size 64
.extern .shared .align 16 .b8 more[];
.visible .entry long_barriers(
	.param .u64 words,
	.param .u32 times,
	.param .u32 first
)
{
	.reg .b32 %r<10>;
	.reg .b64 %rd<4>;
	.reg .pred %p<2>;
	.shared .align 4 .b8 cells[256];
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
	shl.b32 %r5, %r3, 2;
	mov.u32 %r6, cells;
	add.u32 %r5, %r5, %r6;
	add.u32 %r3, %r3, 1;
	and.b32 %r3, %r3, 63;
	shl.b32 %r3, %r3, 2;
	add.u32 %r6, %r6, %r3;
	mov.u32 %r7, more;
	add.u32 %r7, %r7, %r3;
	st.shared.u32 [%r7], %r4;
NEXT:
	st.shared.u32 [%r5], %r4;
	bar.sync 0;
	ld.shared.u32 %r9, [%r6];
	mad.lo.u32 %r4, %r4, 1664525, 1013904223;
	mad.lo.u32 %r4, %r9, 22695477, %r4;
	bar.sync 0;
	sub.u32 %r0, %r0, 1;
	setp.ne.u32 %p0, %r0, 0;
	@%p0 bra NEXT;
	ld.shared.u32 %r9, [%r7];
	add.u32 %r4, %r4, %r9;
	st.global.u32 [%rd0], %r4;
	ret;
}
";

/// The sum of where a number is after so many steps and where it began, which a thread keeps in its own memory. Addresses are
/// computed as compilers do, each in a register of its own: so it is seen how far they go.
const AGAIN: &str = "
.version 8.0
.target sm_70
.address_size 64
.visible .entry NAME(
	.param .u64 from,
	.param .u64 to,
	.param .u32 times,
	.param .u32 first
)
{
	.local .align 4 .b8 own[8];
	.reg .b32 %r<10>;
	.reg .b64 %rd<6>;
	.reg .pred %p<2>;
	ld.param.u64 %rd0, [from];
	ld.param.u64 %rd2, [to];
	ld.param.u32 %r0, [times];
	ld.param.u32 %r8, [first];
	mov.u32 %r1, %ctaid.x;
	mov.u32 %r2, %ntid.x;
	mov.u32 %r3, %tid.x;
	mad.lo.u32 %r7, %r1, %r2, %r3;
	mul.wide.u32 %rd1, %r7, 4;
	add.u64 %rd3, %rd0, %rd1;
	add.u64 %rd4, %rd2, %rd1;
	ld.global.u32 %r4, [%rd3];
	add.u32 %r4, %r4, %r8;
	mov.u32 %r5, own;
	st.local.u32 [%r5+4], %r4;
	st.global.u32 [%rd4], %r8;
NEXT:
	mad.lo.u32 %r4, %r4, 1664525, 1013904223;
	sub.u32 %r0, %r0, 1;
	setp.ne.u32 %p0, %r0, 0;
	@%p0 bra NEXT;
	ld.local.u32 %r6, [%r5+4];
	add.u32 %r4, %r4, %r6;
	st.global.u32 [%rd4], %r4;
	ret;
}
";

/// What a kernel reads and writes.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Memory {
    /// By its one argument.
    One,
    /// By two arguments that are the same.
    Same,
    /// By two that are not: it always reads what was there in the beginning.
    Apart,
}

const THREADS: u32 = 32;
/// Of a block in which they go on together.
const THREADS_TOGETHER: usize = 64;
/// Blocks for each core: a software driver runs as many at a time, and the kernel takes long on any machine.
const BLOCKS: u32 = 60;
/// Of the largest blocks. A multiprocessor runs two at a time, and a software driver has one for each core.
const MOST_THREADS: u32 = 1024;
/// How often all multiprocessors get new ones. Of so many blocks all threads could be saved in their loops.
const ROUNDS: u32 = 500;

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

/// What becomes of the numbers of a block in which threads go on together.
fn jump_together(numbers: &mut [u32], mut times: u32) {
    // What a step does with a number and with those that come behind it. All of it is the same for each of them.
    type Factors = [u32; THREADS_TOGETHER];
    let both = |one: &Factors, other: &Factors| {
        let mut product: Factors = [0; THREADS_TOGETHER];
        for (i, a) in one.iter().enumerate() {
            for (j, b) in other.iter().enumerate() {
                let to = &mut product[(i + j) % THREADS_TOGETHER];
                *to = to.wrapping_add(a.wrapping_mul(*b));
            }
        }
        product
    };
    let sum = |factors: &Factors| factors.iter().fold(0u32, |sum, one| sum.wrapping_add(*one));
    let (mut factors, mut term) = ([0; THREADS_TOGETHER], 0u32);
    factors[0] = 1;
    let (mut by, mut plus) = ([0; THREADS_TOGETHER], 1_013_904_223u32);
    (by[0], by[1]) = (1_664_525, 22_695_477);
    while times > 0 {
        if times & 1 == 1 {
            term = term.wrapping_mul(sum(&by)).wrapping_add(plus);
            factors = both(&factors, &by);
        }
        plus = plus.wrapping_mul(sum(&by)).wrapping_add(plus);
        by = both(&by, &by);
        times >>= 1;
    }
    let before = numbers.to_vec();
    for (at, number) in numbers.iter_mut().enumerate() {
        let of = |(behind, factor): (usize, &u32)| {
            before[(at + behind) % THREADS_TOGETHER].wrapping_mul(*factor)
        };
        let first = *number;
        *number = factors.iter().enumerate().map(of).fold(term, u32::wrapping_add);
        // What it has kept in shared memory.
        *number = number.wrapping_add(first);
    }
}

/// Runs the workload with many blocks.
pub(crate) fn run(run: &mut Run) -> Result<()> {
    let cores = std::thread::available_parallelism().map_or(1, |n| n.get() as u32);
    let blocks = run.pick(BLOCKS * cores, 2 * BLOCKS * cores, 1 << 14);
    let times = run.pick(1_500_000, 1_500_000, 100_000_000);
    run_each(run, "long_blocks", "bar.sync 0;", Shape::of(blocks, THREADS), times)
}

/// Runs the workload with very many blocks, none of which takes long.
pub(crate) fn run_rounds(run: &mut Run) -> Result<()> {
    let cores = std::thread::available_parallelism().map_or(1, |n| n.get() as u32);
    let blocks = 2 * cores * run.pick(ROUNDS, 2 * ROUNDS, 10 * ROUNDS);
    run_each(run, "long_rounds", "", Shape::of(blocks, MOST_THREADS), 1500)
}

/// Runs the workload with few blocks: no core has two of them.
pub(crate) fn run_loops(run: &mut Run) -> Result<()> {
    let blocks = std::thread::available_parallelism().map_or(1, |n| n.get() as u32).min(60);
    let times = run.pick(90_000_000, 180_000_000, 2_000_000_000);
    run_each(run, "long_loops", "", Shape::of(blocks, THREADS), times)
}

/// Runs the workload with few blocks whose threads meet again and again.
pub(crate) fn run_barriers(run: &mut Run) -> Result<()> {
    let blocks = std::thread::available_parallelism().map_or(1, |n| n.get() as u32).min(60);
    let times = run.pick(6_000_000, 12_000_000, 100_000_000);
    let threads = THREADS_TOGETHER as u32;
    let shape = Shape::of(blocks, threads).sharing(4 * threads);
    run_with(run, "long_barriers", TOGETHER, shape, times, Memory::One, |words, step| {
        words.iter_mut().for_each(|word| *word = word.wrapping_add(step));
        words.chunks_mut(THREADS_TOGETHER).for_each(|block| jump_together(block, times));
    })
}

/// Runs the workload with threads that have nothing to do with each other.
fn run_each(run: &mut Run, name: &str, meet: &str, shape: Shape, times: u32) -> Result<()> {
    // Modules keep their text as long as the program runs.
    let text = PTX.replace("NAME", name).replace("MEET", meet).leak();
    run_with(run, name, text, shape, times, Memory::One, |words, step| {
        words.iter_mut().for_each(|word| *word = jump(word.wrapping_add(step), times));
    })
}

/// Runs the workload with few blocks whose threads have memory of their own, and read what nobody writes.
pub(crate) fn run_again(run: &mut Run) -> Result<()> {
    run_keeping(run, "long_again", Memory::Apart)
}

/// The same, but they write where they read.
pub(crate) fn run_in_place(run: &mut Run) -> Result<()> {
    run_keeping(run, "long_in_place", Memory::Same)
}

fn run_keeping(run: &mut Run, name: &str, memory: Memory) -> Result<()> {
    let blocks = std::thread::available_parallelism().map_or(1, |n| n.get() as u32).min(60);
    let times = run.pick(60_000_000, 90_000_000, 2_000_000_000);
    let text = AGAIN.replace("NAME", name).leak();
    run_with(run, name, text, Shape::of(blocks, THREADS), times, memory, |words, step| {
        words.iter_mut().for_each(|word| {
            let begin = word.wrapping_add(step);
            *word = jump(begin, times).wrapping_add(begin);
        });
    })
}

/// Runs a kernel again and again, each launch of which does with the words what `next` does.
fn run_with(
    run: &mut Run,
    name: &str,
    text: &'static str,
    shape: Shape,
    times: u32,
    memory: Memory,
    next: impl Fn(&mut [u32], u32),
) -> Result<()> {
    let steps = run.plan(1, 1, 4);
    let gpu = Gpu::open()?;
    let module = Module::load(text)?;
    let kernel = module.kernel(name)?;
    let stream = Stream::new(if run.seed.is_multiple_of(2) { 1 } else { 0 })?;
    let first: Vec<u32> = (0..shape.all_threads()).map(|i| mix(run.seed ^ i)).collect();
    let mut host = first.clone();
    let [buffer, other] = [Buffer::holding(&host)?, Buffer::holding(&first)?];
    let before = Event::new()?;
    run.ready()?;
    for step in 0..steps {
        before.record(&stream)?;
        match memory {
            Memory::One => kernel.run_on(&stream, shape, args![&buffer, times, step])?,
            Memory::Same => kernel.run_on(&stream, shape, args![&buffer, &buffer, times, step])?,
            Memory::Apart => kernel.run_on(&stream, shape, args![&other, &buffer, times, step])?,
        }
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
        if memory == Memory::Apart {
            host.copy_from_slice(&first);
        }
        next(&mut host, step);
        // Directly: a copy of the whole would be waited for on its own.
        let words: Vec<u32> = buffer.read()?;
        let wrong = words.iter().zip(&host).position(|(found, word)| found != word);
        ensure!(wrong.is_none(), "word {wrong:?} is wrong after step {step}");
        run.absorb(&words);
        run.step(step, format_args!("word {:08x}", words[7]))?;
    }
    run.finish()
}
