//! A decode loop with a KV cache: every step reads all that earlier steps wrote.
//!
//! Exponentials are approximate on a GPU, so the host verifies each step from the device's own
//! inputs of that step, within a tolerance.

use anyhow::{Result, ensure};

use crate::args;
use crate::gpu::{Buffer, Gpu, Module, Shape};
use crate::numbers::{mix, unit, worst_error};
use crate::report::{Exact, Run};

const PTX: &str = include_str!("kernels/attention.ptx");
const HEAD: usize = 32;
const TOLERANCE: f64 = 5.0e-4;

/// The device's final state, and the weights, for the check on the host.
struct Trace {
    n: usize,
    seed: u32,
    weights: [Vec<f32>; 4],
    x: Vec<f32>,
    keys: Vec<f32>,
    values: Vec<f32>,
    norms: Vec<f32>,
}

fn product(x: &[f64], w: &[f32], n: usize) -> Vec<f64> {
    let mut out = vec![0.0; n];
    for (j, &x) in x.iter().enumerate() {
        for (o, sum) in out.iter_mut().enumerate() {
            *sum += x * f64::from(w[j * n + o]);
        }
    }
    out
}

impl Trace {
    fn row(all: &[f32], t: usize, n: usize) -> Vec<f64> {
        all[t * n..(t + 1) * n].iter().copied().map(f64::from).collect()
    }

    /// Computes step `t` from the device's token `t` and its caches, and compares.
    fn check(&self, t: usize) -> Result<()> {
        let n = self.n;
        let [wq, wk, wv, wo] = &self.weights;
        let x = Self::row(&self.x, t, n);
        let rows = t * n..(t + 1) * n;
        let error = worst_error(&self.keys[rows.clone()], &product(&x, wk, n));
        ensure!(error < TOLERANCE, "key of step {}: error {error}", t + 1);
        let error = worst_error(&self.values[rows], &product(&x, wv, n));
        ensure!(error < TOLERANCE, "value of step {}: error {error}", t + 1);

        let q = product(&x, wq, n);
        let mut attended = vec![0.0; n];
        for head in (0..n).step_by(HEAD) {
            let score = |p: usize| -> f64 {
                let terms = (head..head + HEAD).map(|d| q[d] * f64::from(self.keys[p * n + d]));
                terms.sum::<f64>() / (HEAD as f64).sqrt()
            };
            let scores: Vec<f64> = (0..=t).map(score).collect();
            let top = scores.iter().copied().fold(f64::MIN, f64::max);
            let weights: Vec<f64> = scores.iter().map(|s| (s - top).exp()).collect();
            let sum: f64 = weights.iter().sum();
            for (d, out) in attended.iter_mut().enumerate().skip(head).take(HEAD) {
                let terms = weights.iter().enumerate();
                *out = terms.map(|(p, w)| w * f64::from(self.values[p * n + d])).sum::<f64>() / sum;
            }
        }
        let mut next = product(&attended, wo, n);
        for (o, next) in next.iter_mut().enumerate() {
            let place = self.seed.wrapping_add((t * n + o) as u32);
            *next += x[o] + f64::from(unit(mix(place)));
        }
        let mean = next.iter().map(|v| v * v).sum::<f64>() / n as f64;
        for value in &mut next {
            *value /= (mean + 1.0e-6).sqrt();
        }
        let error = worst_error(&self.x[(t + 1) * n..(t + 2) * n], &next);
        ensure!(error < TOLERANCE, "token after step {}: error {error}", t + 1);
        let error = worst_error(&self.norms[t..=t], &[mean]);
        ensure!(error < TOLERANCE, "norm of step {}: error {error}", t + 1);
        Ok(())
    }
}

/// Runs the workload.
pub(crate) fn run(run: &mut Run) -> Result<()> {
    let n: u32 = run.pick(128, 256, 1024);
    let steps = run.plan(300, 512, 4096);
    ensure!(steps <= 8192, "attention keeps its scores in shared memory: at most 8192 steps");
    let (wide, long) = (n as usize, steps as usize);
    let scale = 1.0 / (n as f32).sqrt();
    let weights = [1u32, 2, 3, 4].map(|which| -> Vec<f32> {
        let salt = mix(run.seed ^ which.wrapping_mul(0x0101_0101));
        (0..n * n).map(|i| unit(mix(salt.wrapping_add(i))) * scale).collect()
    });
    let seed = mix(run.seed.wrapping_add(77));

    let gpu = Gpu::open()?;
    let module = Module::load(PTX)?;
    let project = module.kernel("attn_project")?;
    let attend = module.kernel("attn_attend")?;
    let next = module.kernel("attn_next")?;
    let wq = Buffer::holding(&weights[0])?;
    let wk = Buffer::holding(&weights[1])?;
    let wv = Buffer::holding(&weights[2])?;
    let wo = Buffer::holding(&weights[3])?;
    let first: Vec<f32> = (0..n).map(|i| unit(mix(seed ^ mix(i)))).collect();
    let x = Buffer::zeroed::<f32>((long + 1) * wide)?;
    crate::gpu::write_at(x.address(), &first)?;
    let keys = Buffer::zeroed::<f32>(long * wide)?;
    let values = Buffer::zeroed::<f32>(long * wide)?;
    let (q, attended) = (Buffer::zeroed::<f32>(wide)?, Buffer::zeroed::<f32>(wide)?);
    let norms = Buffer::zeroed::<f32>(long)?;
    gpu.synchronize()?;
    run.ready()?;
    for t in 0..steps {
        project.run(Shape::covering(3 * n), args![&x, &wq, &wk, &wv, &q, &keys, &values, n, t])?;
        let heads = Shape::of(n / HEAD as u32, 128).with_shared((t + 1) * 4);
        attend.run(heads, args![&q, &keys, &values, &attended, n, t])?;
        let one = Shape::of(1, 128).with_shared(n * 4);
        next.run(one, args![&attended, &wo, &x, &norms, n, t, seed])?;
        let norm: f32 = norms.read_one(t as usize)?;
        run.step(t, format_args!("norm {}", Exact(norm)))?;
    }

    for (buffer, wanted) in [&wq, &wk, &wv, &wo].into_iter().zip(&weights) {
        ensure!(buffer.read::<f32>()? == *wanted, "the weights have changed");
    }
    let (x, keys, values, norms) = (x.read()?, keys.read()?, values.read()?, norms.read()?);
    for state in [&x, &keys, &values, &norms] {
        run.absorb(state);
    }
    let trace = Trace { n: wide, seed, weights, x, keys, values, norms };
    let cost = 4 * u64::from(n) * u64::from(n) + 2 * u64::from(n) * u64::from(steps);
    let stride = steps.div_ceil(run.checkable(cost));
    for t in (0..long).step_by(stride as usize) {
        trace.check(t)?;
    }
    run.finish()
}
