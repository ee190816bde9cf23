//! A two-layer perceptron that learns a synthetic task, on the device and again on the host.
//!
//! Both use the same order of correctly rounded operations, so they agree in every bit.

use anyhow::{Result, ensure};

use crate::args;
use crate::gpu::{Buffer, Gpu, Kernel, Module, Packed, Shape};
use crate::numbers::{mix, unit};
use crate::report::{Exact, Run};

const PTX: &str = include_str!("kernels/mlp.ptx");
const LEARNING_RATE: f32 = 0.05;
const MOMENTUM: f32 = 0.9;
/// lr, beta1, beta2, epsilon, decay.
const ADAMW: [f32; 5] = [0.01, 0.9, 0.999, 1.0e-8, 0.01];

/// How the weights follow the gradients.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum Optimizer {
    /// Gradient descent with momentum.
    Sgd,
    /// Adam with decoupled weight decay.
    AdamW,
}

#[derive(Clone, Copy)]
struct Sizes {
    rows: u32,
    inputs: u32,
    hidden: u32,
    outputs: u32,
}

impl Sizes {
    fn weights(self) -> [usize; 2] {
        let [i, h, o] = [self.inputs, self.hidden, self.outputs].map(|n| n as usize);
        [(i + 1) * h, (h + 1) * o]
    }
}

/// A weight matrix with the state of its optimizer: velocity, or first and second moment.
struct Layer<T> {
    weights: T,
    grad: T,
    first: T,
    second: T,
}

fn initial_weights(seed: u32, sizes: Sizes) -> [Vec<f32>; 2] {
    let [first, second] = sizes.weights();
    let draw = |n: usize, fan_in: u32, salt: u32| -> Vec<f32> {
        let scale = 1.0 / (fan_in as f32).sqrt();
        (0..n as u32).map(|i| unit(mix(seed.wrapping_mul(31) ^ salt ^ mix(i))) * scale).collect()
    };
    [draw(first, sizes.inputs, 0x11), draw(second, sizes.hidden, 0x22)]
}

fn batch_seed(seed: u32, step: u32) -> u32 {
    mix(seed ^ mix(step.wrapping_add(0x51ed)))
}

fn adamw_parameters(step: u32) -> [f32; 7] {
    let [lr, beta1, beta2, epsilon, decay] = ADAMW;
    // Both sides take these two from here, so `powi` need not be reproducible elsewhere.
    let power = step as i32 + 1;
    [lr, beta1, beta2, epsilon, decay, 1.0 - beta1.powi(power), 1.0 - beta2.powi(power)]
}

struct Kernels {
    batch: Kernel,
    forward: Kernel,
    loss: Kernel,
    grad_weights: Kernel,
    grad_input: Kernel,
    update: Kernel,
}

/// The training state on the device.
struct Device {
    kernels: Kernels,
    x: Buffer,
    y: Buffer,
    hidden: Buffer,
    out: Buffer,
    d_out: Buffer,
    d_hidden: Buffer,
    losses: Buffer,
    layers: [Layer<Buffer>; 2],
}

impl Device {
    fn new(module: &Module, run: &Run, sizes: Sizes, steps: u32, kind: Optimizer) -> Result<Self> {
        let update = if kind == Optimizer::Sgd { "sgd_update" } else { "adamw_update" };
        let layer = |weights: &[f32]| -> Result<Layer<Buffer>> {
            let zero = || Buffer::zeroed::<f32>(weights.len());
            let weights = Buffer::holding(weights)?;
            Ok(Layer { weights, grad: zero()?, first: zero()?, second: zero()? })
        };
        let [first, second] = initial_weights(run.seed, sizes);
        let matrix = |columns: u32| Buffer::zeroed::<f32>((sizes.rows * columns) as usize);
        Ok(Self {
            kernels: Kernels {
                batch: module.kernel("mlp_batch")?,
                forward: module.kernel("mlp_forward")?,
                loss: module.kernel("mlp_loss")?,
                grad_weights: module.kernel("mlp_grad_weights")?,
                grad_input: module.kernel("mlp_grad_input")?,
                update: module.kernel(update)?,
            },
            x: matrix(sizes.inputs)?,
            y: matrix(sizes.outputs)?,
            hidden: matrix(sizes.hidden)?,
            out: matrix(sizes.outputs)?,
            d_out: matrix(sizes.outputs)?,
            d_hidden: matrix(sizes.hidden)?,
            losses: Buffer::zeroed::<f32>(steps as usize)?,
            layers: [layer(&first)?, layer(&second)?],
        })
    }

    fn step(&self, s: Sizes, seed: u32, step: u32, kind: Optimizer) -> Result<()> {
        let Sizes { rows, inputs, hidden, outputs } = s;
        let [one, two] = &self.layers;
        let k = &self.kernels;
        let seed = batch_seed(seed, step);
        let count = rows * outputs;
        let scale = 1.0 / count as f32;
        let (many, wide) = (Shape::covering(rows * inputs.max(outputs)), rows * hidden);
        k.batch.run(many, args![&self.x, &self.y, rows, inputs, outputs, seed])?;
        let forward = args![&self.x, &one.weights, &self.hidden, rows, inputs, hidden, 1u32];
        k.forward.run(Shape::covering(wide), forward)?;
        let forward = args![&self.hidden, &two.weights, &self.out, rows, hidden, outputs, 0u32];
        k.forward.run(Shape::covering(count), forward)?;
        let loss = args![&self.out, &self.y, &self.d_out, &self.losses, step, count, scale];
        k.loss.run(Shape::of(1, 256), loss)?;
        let grad = args![&self.hidden, &self.d_out, &two.grad, rows, hidden, outputs];
        k.grad_weights.run(Shape::covering((hidden + 1) * outputs), grad)?;
        let (d_hidden, act) = (&self.d_hidden, &self.hidden);
        let grad = args![&self.d_out, &two.weights, act, d_hidden, rows, hidden, outputs];
        k.grad_input.run(Shape::covering(wide), grad)?;
        let grad = args![&self.x, d_hidden, &one.grad, rows, inputs, hidden];
        k.grad_weights.run(Shape::covering((inputs + 1) * hidden), grad)?;
        for layer in &self.layers {
            let n = (layer.weights.bytes() / 4) as u32;
            let (w, g, m, v) = (&layer.weights, &layer.grad, &layer.first, &layer.second);
            match kind {
                Optimizer::Sgd => {
                    k.update.run(Shape::covering(n), args![w, g, m, n, LEARNING_RATE, MOMENTUM])?;
                }
                Optimizer::AdamW => {
                    let parameters = adamw_parameters(step)
                        .iter()
                        .fold(Packed::default(), |all, p| all.word(p.to_bits()));
                    k.update.run(Shape::covering(n), args![w, g, m, v, n, parameters])?;
                }
            }
        }
        Ok(())
    }
}

/// The training of this workload on the host.
struct Host {
    layers: [Layer<Vec<f32>>; 2],
}

impl Host {
    fn new(seed: u32, sizes: Sizes) -> Self {
        let layers = initial_weights(seed, sizes).map(|weights| {
            let zero = vec![0.0; weights.len()];
            Layer { weights, grad: zero.clone(), first: zero.clone(), second: zero }
        });
        Self { layers }
    }

    /// One step; gives the loss.
    fn step(&mut self, s: Sizes, seed: u32, step: u32, kind: Optimizer) -> f32 {
        let [rows, inputs, hidden, outputs] =
            [s.rows, s.inputs, s.hidden, s.outputs].map(|n| n as usize);
        let seed = batch_seed(seed, step);
        let number = |i: usize| unit(mix(seed.wrapping_add(i as u32)));
        let x: Vec<f32> = (0..rows * inputs).map(number).collect();
        let target = |i: usize| {
            let (row, o) = (i / outputs, i % outputs);
            let at = |k: usize| number(row * inputs + (o + k) % inputs);
            at(0).abs() - at(1) * at(2)
        };
        let [one, two] = &mut self.layers;
        let act = forward(&x, &one.weights, rows, inputs, hidden, true);
        let out = forward(&act, &two.weights, rows, hidden, outputs, false);
        let count = rows * outputs;
        let scale = 1.0 / count as f32;
        let error: Vec<f32> = (0..count).map(|i| out[i] - target(i)).collect();
        let mut part = [0.0f32; 256];
        for (i, d) in error.iter().enumerate() {
            part[i % 256] = d.mul_add(*d, part[i % 256]);
        }
        for half in [128, 64, 32, 16, 8, 4, 2, 1] {
            for t in 0..half {
                part[t] += part[t + half];
            }
        }
        let d_out: Vec<f32> = error.iter().map(|d| (2.0 * d) * scale).collect();
        grad_weights(&act, &d_out, &mut two.grad, rows, hidden, outputs);
        let mut d_hidden = vec![0.0; rows * hidden];
        for (i, d) in d_hidden.iter_mut().enumerate().filter(|(i, _)| act[*i] > 0.0) {
            let (row, k) = (i / hidden, i % hidden);
            for o in 0..outputs {
                *d = d_out[row * outputs + o].mul_add(two.weights[k * outputs + o], *d);
            }
        }
        grad_weights(&x, &d_hidden, &mut one.grad, rows, inputs, hidden);
        for layer in &mut self.layers {
            update(layer, step, kind);
        }
        part[0] * scale
    }
}

fn forward(x: &[f32], w: &[f32], rows: usize, n_in: usize, n_out: usize, relu: bool) -> Vec<f32> {
    let mut out = Vec::with_capacity(rows * n_out);
    for i in 0..rows * n_out {
        let (row, o) = (i / n_out, i % n_out);
        let start = w[n_in * n_out + o];
        let sum = (0..n_in).fold(start, |sum, k| x[row * n_in + k].mul_add(w[k * n_out + o], sum));
        out.push(if relu && sum < 0.0 { 0.0 } else { sum });
    }
    out
}

fn grad_weights(x: &[f32], d: &[f32], grad: &mut [f32], rows: usize, n_in: usize, n_out: usize) {
    for (i, g) in grad.iter_mut().enumerate() {
        let (k, o) = (i / n_out, i % n_out);
        let input = |row: usize| if k < n_in { x[row * n_in + k] } else { 1.0 };
        *g = (0..rows).fold(0.0, |sum, row| input(row).mul_add(d[row * n_out + o], sum));
    }
}

fn update(layer: &mut Layer<Vec<f32>>, step: u32, kind: Optimizer) {
    let [lr, beta1, beta2, epsilon, decay, correction1, correction2] = adamw_parameters(step);
    for (i, w) in layer.weights.iter_mut().enumerate() {
        let g = layer.grad[i];
        let (first, second) = (&mut layer.first[i], &mut layer.second[i]);
        match kind {
            Optimizer::Sgd => {
                *first = MOMENTUM.mul_add(*first, g);
                *w = (-LEARNING_RATE).mul_add(*first, *w);
            }
            Optimizer::AdamW => {
                *first = beta1.mul_add(*first, (1.0 - beta1) * g);
                *second = beta2.mul_add(*second, (1.0 - beta2) * (g * g));
                let update = (*first / correction1) / ((*second / correction2).sqrt() + epsilon);
                *w = (-lr).mul_add(decay.mul_add(*w, update), *w);
            }
        }
    }
}

/// Trains, and verifies losses (and weights, if the whole run could be repeated) on the host.
pub(crate) fn train(run: &mut Run, kind: Optimizer) -> Result<()> {
    let sizes = run.pick(
        Sizes { rows: 32, inputs: 16, hidden: 64, outputs: 4 },
        Sizes { rows: 128, inputs: 64, hidden: 512, outputs: 16 },
        Sizes { rows: 256, inputs: 512, hidden: 4096, outputs: 64 },
    );
    let steps = run.plan(250, 1000, 2000);
    let gpu = Gpu::open()?;
    let module = Module::load(PTX)?;
    let device = Device::new(&module, run, sizes, steps, kind)?;
    gpu.synchronize()?;
    run.ready()?;
    for step in 0..steps {
        device.step(sizes, run.seed, step, kind)?;
        let loss: f32 = device.losses.read_one(step as usize)?;
        run.step(step, format_args!("loss {}", Exact(loss)))?;
    }

    let mut host = Host::new(run.seed, sizes);
    let losses: Vec<f32> = device.losses.read()?;
    let cost = 3 * u64::from(sizes.rows) * sizes.weights().iter().sum::<usize>() as u64;
    let checked = run.checkable(cost);
    for (step, &loss) in (0..checked).zip(&losses) {
        let wanted = host.step(sizes, run.seed, step, kind);
        ensure!(
            loss.to_bits() == wanted.to_bits(),
            "loss of step {}: {} on the device, {} on the host",
            step + 1,
            Exact(loss),
            Exact(wanted)
        );
    }
    let quarter = (steps as usize / 4).max(1);
    let mean = |part: &[f32]| part.iter().sum::<f32>() / part.len() as f32;
    if steps >= 100 {
        let (early, late) = (mean(&losses[..quarter]), mean(&losses[losses.len() - quarter..]));
        ensure!(late < early, "the loss does not fall: {early} early, {late} late");
    }
    run.absorb(&losses);
    for (layer, wanted) in device.layers.iter().zip(&host.layers) {
        for (buffer, wanted) in [
            (&layer.weights, &wanted.weights),
            (&layer.first, &wanted.first),
            (&layer.second, &wanted.second),
        ] {
            let values: Vec<f32> = buffer.read()?;
            ensure!(checked < steps || values == *wanted, "the final weights or moments are wrong");
            run.absorb(&values);
        }
    }
    run.finish()
}
