//! Training with the same layers on each rank and data of its own, as data parallel trainers overlap it: what a layer's
//! weights are to change by is summed on a second stream while the layer before it is still computed.

use anyhow::Result;

use crate::args;
use crate::collective::{Communicator, Member, Program, Step};
use crate::cuda::STREAM_NON_BLOCKING;
use crate::event::Event;
use crate::gpu::{Buffer, Kernel, Module, Shape, Stream};
use crate::numbers::{filled, mix, mixer_sum};

const PTX: &str = include_str!("kernels/parallel.ptx");
const MIXER: &str = include_str!("kernels/mixer.ptx");
const LAYERS: usize = 3;
/// Words of a layer.
const WORDS: u32 = 1 << 10;

/// A layer as each rank has it.
struct Layer {
    weights: Buffer,
    momentum: Buffer,
    /// What it was given.
    input: Buffer,
    gradient: Buffer,
    /// That of all ranks together.
    sum: Buffer,
    /// The gradient is there.
    ready: Event,
}

impl Layer {
    fn new(weights: &[u32]) -> Result<Self> {
        let zeroed = || Buffer::zeroed::<u32>(WORDS as usize);
        Ok(Self {
            weights: Buffer::holding(weights)?,
            momentum: zeroed()?,
            input: zeroed()?,
            gradient: zeroed()?,
            sum: zeroed()?,
            ready: Event::new()?,
        })
    }
}

/// What a rank has.
pub(crate) struct DataParallel {
    communicator: Communicator,
    compute: Stream,
    sums: Stream,
    /// All sums are there.
    summed: Event,
    fill: Kernel,
    forward: Kernel,
    backward: Kernel,
    update: Kernel,
    _modules: [Module; 2],
    layers: Vec<Layer>,
    /// What the last layer gives, and what comes back from a layer and goes to the one before.
    output: Buffer,
    back: [Buffer; 2],
    /// Parts of all steps so far, on the device and on the host.
    number: u32,
    repeated: u32,
    /// Weights and momenta of each layer on the host.
    host: Vec<[Vec<u32>; 2]>,
}

fn first_weights(seed: u32, layer: usize) -> Vec<u32> {
    filled(WORDS as usize, mix(seed ^ layer as u32))
}

/// What a rank's data is filled with.
fn data(seed: u32, rank: u32, number: u32) -> u32 {
    mix(mix(seed ^ rank).wrapping_add(number))
}

/// What a rank finds that the weights are to change by.
fn gradients(layers: &[[Vec<u32>; 2]], data: u32) -> Vec<Vec<u32>> {
    let n = WORDS as usize;
    let mut inputs = vec![filled(n, data)];
    for [weights, _] in layers {
        let x = &inputs[inputs.len() - 1];
        let next = (0..n).map(|i| mix(x[i].wrapping_add(weights[i])) ^ x[(i + 1) % n]).collect();
        inputs.push(next);
    }
    let mut d = inputs.pop().unwrap_or_default();
    let mut all = Vec::new();
    for ([weights, _], input) in layers.iter().zip(&inputs).rev() {
        all.push((0..n).map(|i| d[i].wrapping_mul(weights[i]).wrapping_add(input[i])).collect());
        d = (0..n).map(|i| mix(d[i] ^ weights[i]).wrapping_add(d[(i + 7) % n])).collect();
    }
    all.reverse();
    all
}

impl DataParallel {
    fn launch_forward(&self, data: u32) -> Result<()> {
        let shape = Shape::covering(WORDS);
        self.fill.run_on(&self.compute, shape, args![&self.layers[0].input, WORDS, data])?;
        for (number, layer) in self.layers.iter().enumerate() {
            let next = self.layers.get(number + 1).map_or(&self.output, |next| &next.input);
            let arguments = args![&layer.input, &layer.weights, next, WORDS];
            self.forward.run_on(&self.compute, shape, arguments)?;
        }
        Ok(())
    }

    /// The sum of a layer's gradients is on its way while the next one is computed.
    fn launch_backward(&mut self) -> Result<()> {
        let shape = Shape::covering(WORDS);
        let mut from = &self.output;
        for (number, layer) in self.layers.iter().enumerate().rev() {
            let to = &self.back[number % 2];
            let arguments = args![from, &layer.input, &layer.weights, &layer.gradient, to, WORDS];
            self.backward.run_on(&self.compute, shape, arguments)?;
            layer.ready.record(&self.compute)?;
            layer.ready.hold(&self.sums)?;
            let (gradient, sum) = (layer.gradient.address(), layer.sum.address());
            self.communicator.all_reduce(&self.sums, gradient, sum, WORDS)?;
            from = to;
        }
        Ok(())
    }

    fn launch_update(&self) -> Result<()> {
        self.summed.record(&self.sums)?;
        self.summed.hold(&self.compute)?;
        for layer in &self.layers {
            let arguments = args![&layer.weights, &layer.momentum, &layer.sum, WORDS];
            self.update.run_on(&self.compute, Shape::covering(WORDS), arguments)?;
        }
        Ok(())
    }

    /// The same on the host, of all ranks.
    fn train(&mut self, seed: u32) {
        let of_rank = |rank: &u32| gradients(&self.host, data(seed, *rank, self.repeated));
        let all: Vec<Vec<Vec<u32>>> = self.communicator.members().iter().map(of_rank).collect();
        for (number, [weights, momentum]) in self.host.iter_mut().enumerate() {
            for (i, (weight, momentum)) in weights.iter_mut().zip(momentum).enumerate() {
                let sum = all.iter().map(|rank| rank[number][i]).fold(0, u32::wrapping_add);
                *momentum = momentum.wrapping_mul(3).wrapping_add(sum);
                *weight ^= mix(*momentum);
            }
        }
        self.repeated += 1;
    }
}

fn say<'a>(layers: impl Iterator<Item = &'a Vec<u32>>) -> String {
    layers.map(|weights| format!("{:016x}", mixer_sum(weights))).collect::<Vec<_>>().join(" ")
}

impl Program for DataParallel {
    const NAME: &'static str = "data-parallel";
    const RANKS: u32 = 3;

    fn new(member: &mut Member) -> Result<Self> {
        let communicator = member.communicator(WORDS)?;
        let modules = [Module::load(PTX)?, Module::load(MIXER)?];
        let first = (0..LAYERS).map(|layer| first_weights(member.seed, layer));
        let host: Vec<_> = first.map(|weights| [weights, vec![0; WORDS as usize]]).collect();
        let zeroed = || Buffer::zeroed::<u32>(WORDS as usize);
        Ok(Self {
            communicator,
            compute: Stream::new(STREAM_NON_BLOCKING)?,
            sums: Stream::new(STREAM_NON_BLOCKING)?,
            summed: Event::new()?,
            fill: modules[1].kernel("mixer_fill")?,
            forward: modules[0].kernel("layer_forward")?,
            backward: modules[0].kernel("layer_backward")?,
            update: modules[0].kernel("layer_update")?,
            layers: host.iter().map(|[weights, _]| Layer::new(weights)).collect::<Result<_>>()?,
            output: zeroed()?,
            back: [zeroed()?, zeroed()?],
            _modules: modules,
            number: 0,
            repeated: 0,
            host,
        })
    }

    fn step(&mut self, member: &mut Member, step: &Step) -> Result<String> {
        self.communicator.set_ahead(step.is_ahead);
        for _ in 0..step.parts {
            self.launch_forward(data(member.seed, member.bootstrap.rank(), self.number))?;
            self.launch_backward()?;
            self.launch_update()?;
            self.number += 1;
        }
        self.communicator.wait(&self.sums)?;
        self.compute.synchronize()?;
        let layers = self.layers.iter().map(|layer| layer.weights.read());
        Ok(say(layers.collect::<Result<Vec<_>>>()?.iter()))
    }

    fn repeat(&mut self, member: &Member, step: &Step) -> Result<String> {
        (0..step.parts).for_each(|_| self.train(member.seed));
        Ok(say(self.host.iter().map(|[weights, _]| weights)))
    }

    fn last(&self) -> Result<Vec<u32>> {
        let layers = self.layers.iter().flat_map(|layer| [&layer.weights, &layer.momentum]);
        let all = layers.map(Buffer::read).collect::<Result<Vec<Vec<u32>>>>()?;
        Ok(all.concat())
    }
}
