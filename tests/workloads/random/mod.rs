//! A random program: random kernels over several buffers, launched, copied, filled, freed and made again
//! in a random order on several streams. The seed decides all of it.
//!
//! Streams wait for each other by events where they use the same buffer, so the result is exact; apart
//! from that nothing is waited for within a step.

mod ptx;

use std::rc::Rc;

use anyhow::{Context as _, Result};

use crate::args;
use crate::cuda::{STREAM_NON_BLOCKING, check, driver};
use crate::event::Event;
use crate::gpu::{Buffer, Gpu, Kernel, Module, Shape, Stream, fill_at, write_at};
use crate::numbers::{Sequence, mix};
use crate::report::Run;

use ptx::{BLOCK, Indirect, Source};

const BUFFERS: u32 = 12;
/// Buffers in use at a time; the others stay unchanged, and look as if they would for longer.
const ACTIVE: usize = 6;
/// Steps after which others are in use.
const SEASON: u32 = 12;
const STREAMS: u32 = 3;
const KERNELS: u32 = 4;
/// Most operations of a step.
const OPERATIONS: u32 = 12;
/// Most threads of a launch.
const THREADS: u32 = 1 << 10;

/// A buffer, and who used it last: the numbers of streams, and what to wait for.
struct Memory {
    buffer: Buffer,
    /// A power of two.
    words: u32,
    written: Option<(usize, Rc<Event>)>,
    read: Vec<(usize, Rc<Event>)>,
}

impl Memory {
    /// From 4 KiB to 8 MiB.
    fn make(random: &mut Sequence, scale: u32) -> Result<Self> {
        let exponent = match random.below(2) {
            0 => 19 + random.below(3),
            _ => 10 + random.below(7),
        };
        let words = 1 << (exponent + scale);
        let buffer = Buffer::new(words as usize * 4)?;
        fill_at(buffer.address(), random.below(u32::MAX), words as usize)?;
        let start: Vec<u32> = (0..1024).map(|_| random.below(u32::MAX)).collect();
        write_at(buffer.address(), &start)?;
        Ok(Self { buffer, words, written: None, read: Vec::new() })
    }
}

struct Program {
    random: Sequence,
    scale: u32,
    memories: Vec<Memory>,
    active: Vec<usize>,
    streams: Vec<Stream>,
    kernels: Vec<(Source, Kernel)>,
    /// The addresses of all memories in another order, in device memory.
    table: Buffer,
    /// Which memory is in each slot of the table.
    slots: Vec<usize>,
}

impl Program {
    /// So many different memories of those in use.
    fn choose(&mut self, count: usize) -> Vec<usize> {
        let order = self.active.clone();
        self.draw(order, count)
    }

    /// Other memories are in use from now on.
    fn change_season(&mut self) {
        self.active = self.draw((0..self.memories.len()).collect(), ACTIVE);
    }

    fn draw(&mut self, mut from: Vec<usize>, count: usize) -> Vec<usize> {
        for i in 0..count {
            let j = i + self.random.below((from.len() - i) as u32) as usize;
            from.swap(i, j);
        }
        from.truncate(count);
        from
    }

    /// Does work on a random stream, after everything that must come before it.
    fn enqueue(
        &mut self,
        reads: &[usize],
        writes: &[usize],
        work: impl FnOnce(&Self, &Stream) -> Result<()>,
    ) -> Result<()> {
        let number = self.random.below(STREAMS) as usize;
        let stream = &self.streams[number];
        for &memory in reads.iter().chain(writes) {
            let written = self.memories[memory].written.iter();
            let read = self.memories[memory].read.iter().filter(|_| writes.contains(&memory));
            for (_, event) in written.chain(read).filter(|(by, _)| *by != number) {
                event.hold(stream)?;
            }
        }
        work(self, stream)?;
        let event = Rc::new(Event::new()?);
        event.record(stream)?;
        for &memory in writes {
            self.memories[memory].written = Some((number, event.clone()));
            self.memories[memory].read.clear();
        }
        for &memory in reads {
            self.memories[memory].read.push((number, event.clone()));
        }
        Ok(())
    }

    /// One random operation.
    fn operate(&mut self, gpu: &Gpu, step: u32) -> Result<()> {
        match self.random.below(16) {
            0..=7 => self.launch(step),
            8 | 9 => self.copy(),
            10 | 11 => self.fill(),
            12 => self.write(gpu),
            13 => self.remake(gpu),
            14 => self.shuffle(gpu),
            _ => {
                let stream = self.random.below(STREAMS) as usize;
                self.streams[stream].synchronize()
            }
        }
    }

    fn launch(&mut self, step: u32) -> Result<()> {
        let kernel = self.random.below(KERNELS) as usize;
        let chosen = self.choose(5);
        let [found, written, read, hidden, atomic] = chosen[..] else { unreachable!("five") };
        let own_words = [found, written, hidden].map(|memory| self.memories[memory].words);
        let most = own_words.into_iter().min().unwrap_or(BLOCK).min(THREADS);
        let blocks = 1 + self.random.below(most / BLOCK);
        let slot = self.slots.iter().position(|&memory| memory == found).unwrap_or(0) as u32;
        let indirect = self.kernels[kernel].0.indirect;
        let (mut reads, mut writes) = (vec![read], vec![written, hidden, atomic]);
        if indirect == Indirect::Write { &mut writes } else { &mut reads }.push(found);
        self.enqueue(&reads, &writes, |program, stream| {
            let (source, kernel) = &program.kernels[kernel];
            let address = |memory: usize| program.memories[memory].buffer.address();
            let mask = |memory: usize| program.memories[memory].words - 1;
            let arguments = args![
                &program.table,
                address(written),
                address(read),
                address(hidden) ^ source.mask,
                address(atomic),
                mask(found),
                mask(written),
                mask(read),
                mask(hidden),
                mask(atomic),
                slot,
                step
            ];
            kernel.run_on(stream, Shape::of(blocks, BLOCK), arguments)
        })
    }

    fn copy(&mut self) -> Result<()> {
        let chosen = self.choose(2);
        let (from, to) = (chosen[0], chosen[1]);
        let most = self.memories[from].words.min(self.memories[to].words);
        let words = 1 + self.random.below(most);
        let start = self.random.below(self.memories[to].words - words + 1);
        self.enqueue(&[from], &[to], |program, stream| {
            let from = program.memories[from].buffer.address();
            let to = program.memories[to].buffer.address() + u64::from(start) * 4;
            // SAFETY: takes no host pointers; both ranges lie in their buffers.
            let code =
                unsafe { (driver().cuMemcpyDtoDAsync)(to, from, words as usize * 4, stream.0) };
            check("cuMemcpyDtoDAsync", code)
        })
    }

    fn fill(&mut self) -> Result<()> {
        let memory = self.choose(1)[0];
        let start = self.random.below(self.memories[memory].words);
        let words = 1 + self.random.below((self.memories[memory].words - start).min(1 << 14));
        let value = self.random.below(u32::MAX);
        self.enqueue(&[], &[memory], |program, stream| {
            let address = program.memories[memory].buffer.address() + u64::from(start) * 4;
            // SAFETY: takes no host pointers; the range lies in the buffer.
            let code =
                unsafe { (driver().cuMemsetD32Async)(address, value, words as usize, stream.0) };
            check("cuMemsetD32Async", code)
        })
    }

    /// Words from the host.
    fn write(&mut self, gpu: &Gpu) -> Result<()> {
        let memory = self.choose(1)[0];
        let words: Vec<u32> = (0..256).map(|_| self.random.below(u32::MAX)).collect();
        let start = self.random.below(self.memories[memory].words - 255);
        gpu.synchronize()?;
        write_at(self.memories[memory].buffer.address() + u64::from(start) * 4, &words)
    }

    /// Gives a buffer back and makes one anew, as likely as not of the same size.
    fn remake(&mut self, gpu: &Gpu) -> Result<()> {
        let number = self.choose(1)[0];
        gpu.synchronize()?;
        let old = self.memories.swap_remove(number);
        let words = old.words;
        drop(old);
        let made = if self.random.below(2) == 0 {
            let buffer = Buffer::new(words as usize * 4)?;
            fill_at(buffer.address(), self.random.below(u32::MAX), words as usize)?;
            Memory { buffer, words, written: None, read: Vec::new() }
        } else {
            Memory::make(&mut self.random, self.scale)?
        };
        // The last one has taken the place of the old: now back, so that numbers stay.
        self.memories.push(made);
        let last = self.memories.len() - 1;
        self.memories.swap(number, last);
        self.write_table()
    }

    /// Puts the addresses in another order.
    fn shuffle(&mut self, gpu: &Gpu) -> Result<()> {
        gpu.synchronize()?;
        let (a, b) = (self.random.below(BUFFERS) as usize, self.random.below(BUFFERS) as usize);
        self.slots.swap(a, b);
        self.write_table()
    }

    fn write_table(&self) -> Result<()> {
        let addresses: Vec<u64> =
            self.slots.iter().map(|&memory| self.memories[memory].buffer.address()).collect();
        write_at(self.table.address(), &addresses)
    }

    /// A digest of these memories. Nothing is under way.
    fn digest(&self, of: impl IntoIterator<Item = usize>) -> Result<String> {
        let mut hash = blake3::Hasher::new();
        for memory in of.into_iter().map(|number| &self.memories[number]) {
            hash.update(&memory.words.to_le_bytes());
            hash.update(&memory.buffer.read::<u8>()?);
        }
        Ok(hash.finalize().to_hex()[..16].to_owned())
    }
}

/// Runs the workload.
pub(crate) fn run(run: &mut Run) -> Result<()> {
    let steps = run.plan(40, 200, 1000);
    let scale = run.pick(0, 2, 6);
    let mut random = Sequence::new(mix(run.seed));
    let gpu = Gpu::open()?;
    let (text, sources) = ptx::module(KERNELS, &mut random);
    // One module in the life of the program.
    let text: &'static str = Box::leak(text.into_boxed_str());
    let module = Module::load(text).with_context(|| format!("generated PTX:\n{text}"))?;
    let kernels = sources
        .into_iter()
        .map(|source| {
            let kernel = module.kernel(&source.name)?;
            Ok((source, kernel))
        })
        .collect::<Result<Vec<_>>>()?;
    let memories =
        (0..BUFFERS).map(|_| Memory::make(&mut random, scale)).collect::<Result<Vec<_>>>()?;
    let streams = (0..STREAMS)
        .map(|i| Stream::new(if i % 2 == 0 { STREAM_NON_BLOCKING } else { 0 }))
        .collect::<Result<Vec<_>>>()?;
    let table = Buffer::zeroed::<u64>(BUFFERS as usize)?;
    let slots = (0..BUFFERS as usize).rev().collect();
    let active = (0..ACTIVE).collect();
    let mut program = Program { random, scale, memories, active, streams, kernels, table, slots };
    program.write_table()?;
    gpu.synchronize()?;
    run.ready()?;
    for step in 0..steps {
        if step % SEASON == 0 {
            program.change_season();
        }
        let operations = 1 + program.random.below(OPERATIONS);
        let pause = program.random.below(operations + 1);
        for operation in 0..operations {
            if operation == pause {
                // With work under way.
                run.last(step);
            }
            program.operate(&gpu, step)?;
        }
        gpu.synchronize()?;
        // A buffer that stays unchanged is looked at when the season ends.
        let ends = (step + 1) % SEASON == 0 || step + 1 == steps;
        let digest = if ends {
            program.digest(0..program.memories.len())?
        } else {
            program.digest(program.active.iter().copied())?
        };
        run.step(step, format_args!("digest {digest}"))?;
    }
    run.finish()
}
