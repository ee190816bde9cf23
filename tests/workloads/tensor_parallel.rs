//! Inference with a slice of each layer on each rank, as servers have it that are tensor parallel: the first rank gives all
//! of them the inputs, each layer ends with the sum of what the slices add, and all gather what the last slices have found.

use anyhow::Result;

use crate::args;
use crate::collective::{Communicator, Member, Program, Step};
use crate::cuda::STREAM_NON_BLOCKING;
use crate::gpu::{Buffer, Kernel, Module, Shape, Stream};
use crate::numbers::{filled, mix, mixer_sum};

const PTX: &str = include_str!("kernels/parallel.ptx");
const MIXER: &str = include_str!("kernels/mixer.ptx");
const LAYERS: u32 = 2;
/// Inputs at once, words of each, and words of a slice.
const ROWS: u32 = 2;
const WIDTH: u32 = 16;
const SLICE: u32 = 8;

/// The two halves of a layer, of all ranks: `[WIDTH][ranks][SLICE]` and `[ranks][SLICE][WIDTH]`.
fn weights(seed: u32, ranks: u32, layer: u32) -> [Vec<u32>; 2] {
    let words = (WIDTH * ranks * SLICE) as usize;
    [2 * layer, 2 * layer + 1].map(|half| filled(words, mix(seed ^ half)))
}

/// The slice of a rank: `[WIDTH][SLICE]` and `[SLICE][WIDTH]`.
fn slices([first, second]: &[Vec<u32>; 2], ranks: u32, rank: u32) -> [Vec<u32>; 2] {
    let slice = SLICE as usize;
    let rows = first.chunks_exact(slice).skip(rank as usize).step_by(ranks as usize);
    let half = (SLICE * WIDTH) as usize;
    [rows.flatten().copied().collect(), second[rank as usize * half..][..half].to_vec()]
}

/// What a rank has.
pub(crate) struct TensorParallel {
    communicator: Communicator,
    stream: Stream,
    fill: Kernel,
    hidden: Kernel,
    project: Kernel,
    add: Kernel,
    _modules: [Module; 2],
    /// The slices of each layer.
    layers: Vec<[Buffer; 2]>,
    x: Buffer,
    found: Buffer,
    part: Buffer,
    sum: Buffer,
    gathered: Buffer,
    /// Parts of all steps so far, on the device and on the host.
    number: u32,
    repeated: u32,
    host: Vec<[Vec<u32>; 2]>,
}

fn input(seed: u32, number: u32) -> u32 {
    mix(seed.wrapping_add(number))
}

impl TensorParallel {
    /// Everything of one batch is launched, and nothing waited for.
    fn launch(&mut self, seed: u32) -> Result<()> {
        let (stream, x) = (&self.stream, ROWS * WIDTH);
        if self.communicator.is_first() {
            let tag = input(seed, self.number);
            self.fill.run_on(stream, Shape::covering(x), args![&self.x, x, tag])?;
        }
        self.communicator.broadcast(stream, 0, (self.x.address(), x))?;
        for [first, second] in &self.layers {
            let shape = Shape::covering(ROWS * SLICE);
            self.hidden.run_on(
                stream,
                shape,
                args![&self.x, first, &self.found, ROWS, WIDTH, SLICE],
            )?;
            self.project.run_on(
                stream,
                Shape::covering(x),
                args![&self.found, second, &self.part, ROWS, WIDTH, SLICE],
            )?;
            self.communicator.all_reduce(stream, self.part.address(), self.sum.address(), x)?;
            let arguments = args![&self.x, &self.sum, x, self.number];
            self.add.run_on(stream, Shape::covering(x), arguments)?;
        }
        let (from, to) = (self.found.address(), self.gathered.address());
        self.communicator.all_gather(stream, from, to, ROWS * SLICE)?;
        self.number += 1;
        Ok(())
    }

    /// One batch on the host: the last inputs, and what all slices have found, one rank after the other.
    fn batch(&self, seed: u32, number: u32) -> (Vec<u32>, Vec<u32>) {
        let ranks = self.communicator.size();
        let wide = (ranks * SLICE) as usize;
        let mut x = filled((ROWS * WIDTH) as usize, input(seed, number));
        let mut found = vec![0u32; ROWS as usize * wide];
        for [first, second] in &self.host {
            for (row, found) in x.chunks_exact_mut(WIDTH as usize).zip(found.chunks_exact_mut(wide))
            {
                for (j, found) in found.iter_mut().enumerate() {
                    let terms =
                        row.iter().enumerate().map(|(k, x)| x.wrapping_mul(first[k * wide + j]));
                    *found = mix(terms.fold(0, u32::wrapping_add));
                }
                for (c, x) in row.iter_mut().enumerate() {
                    let term = |(j, found): (usize, &u32)| {
                        found.wrapping_mul(second[j * WIDTH as usize + c])
                    };
                    let sum = found.iter().enumerate().map(term).fold(0, u32::wrapping_add);
                    *x = mix(x.wrapping_add(sum).wrapping_add(number));
                }
            }
        }
        let of_rank = |rank: u32| {
            let first = (rank * SLICE) as usize;
            found.chunks_exact(wide).flat_map(move |row| row[first..][..SLICE as usize].to_vec())
        };
        let gathered = (0..ranks).flat_map(of_rank).collect();
        (x, gathered)
    }
}

fn say(x: &[u32], gathered: &[u32]) -> String {
    format!("{:016x} {:016x}", mixer_sum(x), mixer_sum(gathered))
}

impl Program for TensorParallel {
    const NAME: &'static str = "tensor-parallel";
    const RANKS: u32 = 3;

    fn new(member: &mut Member) -> Result<Self> {
        let communicator = member.communicator(ROWS * WIDTH)?;
        let (ranks, rank) = (communicator.size(), member.bootstrap.rank());
        let modules = [Module::load(PTX)?, Module::load(MIXER)?];
        let host: Vec<_> = (0..LAYERS).map(|layer| weights(member.seed, ranks, layer)).collect();
        let upload = |all: &[Vec<u32>; 2]| {
            let [first, second] = slices(all, ranks, rank);
            Ok([Buffer::holding(&first)?, Buffer::holding(&second)?])
        };
        let zeroed = |words: u32| Buffer::zeroed::<u32>(words as usize);
        Ok(Self {
            communicator,
            stream: Stream::new(STREAM_NON_BLOCKING)?,
            fill: modules[1].kernel("mixer_fill")?,
            hidden: modules[0].kernel("slice_hidden")?,
            project: modules[0].kernel("slice_project")?,
            add: modules[0].kernel("slice_add")?,
            layers: host.iter().map(upload).collect::<Result<_>>()?,
            x: zeroed(ROWS * WIDTH)?,
            found: zeroed(ROWS * SLICE)?,
            part: zeroed(ROWS * WIDTH)?,
            sum: zeroed(ROWS * WIDTH)?,
            gathered: zeroed(ranks * ROWS * SLICE)?,
            _modules: modules,
            number: 0,
            repeated: 0,
            host,
        })
    }

    fn step(&mut self, member: &mut Member, step: &Step) -> Result<String> {
        self.communicator.set_ahead(step.is_ahead);
        for _ in 0..step.parts {
            self.launch(member.seed)?;
        }
        self.communicator.wait(&self.stream)?;
        Ok(say(&self.x.read()?, &self.gathered.read()?))
    }

    fn repeat(&mut self, member: &Member, step: &Step) -> Result<String> {
        self.repeated += step.parts;
        let (x, gathered) = self.batch(member.seed, self.repeated - 1);
        Ok(say(&x, &gathered))
    }

    fn last(&self) -> Result<Vec<u32>> {
        self.x.read()
    }
}
