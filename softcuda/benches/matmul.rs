//! How fast PTX is executed, on one core: tiled matrix products (`matmul.ptx`, made of `matmul.cu` by
//! `nvcc -ptx -arch=sm_80 -O3`, nvcc 13.0.88), by softcuda and by `ptoxide`, by turns.
//!
//!     cargo bench -p softcuda

use softcuda::ptx::{self, AddressSpace, Launch, Module};
use std::time::Instant;

const PTX: &str = include_str!("matmul.ptx");
/// As in `matmul.cu`.
const TILE: u32 = 16;
/// Rows and columns of the matrices.
const SIZE: u32 = 256;
const RUNS: usize = 5;

/// All of the host's memory: the kernel is known to be sound.
struct Host;

impl AddressSpace for Host {
    fn is_mapped(&self, _: u64, _: usize) -> bool {
        true
    }

    fn is_writable(&self, _: u64, _: usize) -> bool {
        true
    }
}

/// Seconds of one product.
fn softcuda(module: &Module, a: &[f32], b: &[f32], c: &mut [f32]) -> f64 {
    let entry = module.entry("matmul").expect("the kernel");
    let mut params = Vec::new();
    for pointer in [a.as_ptr(), b.as_ptr(), c.as_mut_ptr().cast_const()] {
        params.extend_from_slice(&(pointer as u64).to_le_bytes());
    }
    params.extend_from_slice(&SIZE.to_le_bytes());
    let launch = Launch::plain([SIZE / TILE, SIZE / TILE, 1], [TILE, TILE, 1], &params);
    let start = Instant::now();
    ptx::run(module, entry, &launch, &Host).expect("the kernel runs");
    start.elapsed().as_secs_f64()
}

fn ptoxide(context: &mut ptoxide::Context, a: &[f32], b: &[f32], c: &mut [f32]) -> f64 {
    use ptoxide::{Argument, LaunchParams};
    context.reset_mem();
    let [left, right, out] = [a, b, &*c].map(|matrix| context.alloc::<f32>(matrix.len()));
    context.write(left, a);
    context.write(right, b);
    let shape = LaunchParams::func_id(0).grid2d(SIZE / TILE, SIZE / TILE).block2d(TILE, TILE);
    let arguments =
        [Argument::ptr(left), Argument::ptr(right), Argument::ptr(out), Argument::U32(SIZE)];
    let start = Instant::now();
    context.run(shape, &arguments).expect("the kernel runs");
    let seconds = start.elapsed().as_secs_f64();
    context.read(out, c);
    seconds
}

/// PTX instructions that a thread executes: all of them once, but those from the loop's label to its
/// branch once for each tile.
fn instructions_of_a_thread() -> u64 {
    let body = PTX.split_once("\n{").expect("a body").1;
    let count = |text: &str| {
        let lines = text.lines().map(str::trim).filter(|line| line.ends_with(';'));
        lines.filter(|line| !line.starts_with('.')).count() as u64
    };
    let (before, rest) = body.split_once("$L__BB0_2:").expect("the loop");
    let (inner, after) = rest.split_once("$L__BB0_3:").expect("the end of the loop");
    count(before) + u64::from(SIZE / TILE) * count(inner) + count(after)
}

fn median(mut seconds: Vec<f64>) -> f64 {
    seconds.sort_by(f64::total_cmp);
    seconds[seconds.len() / 2]
}

fn main() {
    let cells = (SIZE * SIZE) as usize;
    let a: Vec<f32> = (0..cells).map(|i| (i % 17) as f32).collect();
    let b: Vec<f32> = (0..cells).map(|i| (i % 13) as f32).collect();
    let (mut ours, mut theirs) = (vec![0.0; cells], vec![0.0; cells]);
    let module = Module::load(PTX).expect("the module");
    let mut context = ptoxide::Context::new_with_module(PTX).expect("ptoxide takes the module");
    let one_core = rayon::ThreadPoolBuilder::new().num_threads(1).build().expect("a thread");
    let (mut our_times, mut their_times) = (Vec::new(), Vec::new());
    for _ in 0..RUNS {
        our_times.push(one_core.install(|| softcuda(&module, &a, &b, &mut ours)));
        their_times.push(ptoxide(&mut context, &a, &b, &mut theirs));
    }
    // Small whole numbers: every sum is exact.
    assert!(ours == theirs, "the results differ");
    let last =
        (0..SIZE as usize).map(|k| a[cells - SIZE as usize + k] * b[(k + 1) * SIZE as usize - 1]);
    assert!(ours[cells - 1] == last.sum::<f32>(), "the result is wrong");

    let all = instructions_of_a_thread() * cells as u64;
    println!(
        "{SIZE} x {SIZE}, {all} PTX instructions of threads, one core, medians of {RUNS} runs by turns"
    );
    for (name, times) in [("softcuda", our_times), ("ptoxide", their_times)] {
        let seconds = median(times);
        let rate = all as f64 / seconds / 1e6;
        println!("{name:10} {seconds:8.3} s {rate:8.0} million thread-instructions/s");
    }
}
