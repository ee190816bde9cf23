//! Heat flow in two buffers that change roles with every step.

use anyhow::{Result, ensure};

use crate::args;
use crate::gpu::{Buffer, Gpu, Module, Shape};
use crate::numbers::{mix, unit};
use crate::report::{Exact, Run};

const PTX: &str = include_str!("kernels/stencil.ptx");
const RATE: f32 = 0.2;

fn host_step(from: &[f32], to: &mut [f32], width: usize, height: usize) {
    to.copy_from_slice(from);
    for y in 1..height - 1 {
        for i in y * width + 1..(y + 1) * width - 1 {
            let around = (from[i - 1] + from[i + 1]) + (from[i - width] + from[i + width]);
            to[i] = RATE.mul_add((-4.0f32).mul_add(from[i], around), from[i]);
        }
    }
}

/// Runs the workload.
pub(crate) fn run(run: &mut Run) -> Result<()> {
    let (width, height): (u32, u32) = run.pick((96, 80), (2048, 1024), (16384, 8192));
    let steps = run.plan(500, 1000, 2000);
    let count = (width * height) as usize;
    let gpu = Gpu::open()?;
    let module = Module::load(PTX)?;
    let (init, flow) = (module.kernel("heat_init")?, module.kernel("heat_step")?);
    let mut from = Buffer::new(count * 4)?;
    let mut to = Buffer::new(count * 4)?;
    let shape = Shape::plane(width, height);
    init.run(shape, args![&from, width, height, run.seed])?;
    gpu.synchronize()?;
    run.ready()?;

    // The host repeats the last steps, all of them where there is time.
    let checked = run.checkable(u64::from(width) * u64::from(height));
    let mut host: Vec<f32> =
        (0..width * height).map(|i| unit(mix(run.seed.wrapping_add(i)))).collect();
    if checked == steps {
        ensure!(host == from.read::<f32>()?, "the initial grid is wrong");
    }
    let probe = (height / 2 * width + width / 2) as usize;
    for step in 0..steps {
        if checked < steps && step == steps - checked {
            host = from.read()?;
        }
        flow.run(shape, args![&from, &to, width, height, RATE])?;
        std::mem::swap(&mut from, &mut to);
        let value: f32 = from.read_one(probe)?;
        run.step(step, format_args!("centre {}", Exact(value)))?;
    }
    let mut other = host.clone();
    for _ in 0..checked {
        host_step(&host, &mut other, width as usize, height as usize);
        std::mem::swap(&mut host, &mut other);
    }
    let grid: Vec<f32> = from.read()?;
    let bits = |v: &[f32]| v.iter().map(|x| x.to_bits()).collect::<Vec<_>>();
    ensure!(bits(&grid) == bits(&host), "the final grid differs from the host's");
    run.absorb(&grid);
    run.absorb(&to.read::<f32>()?);
    run.finish()
}
