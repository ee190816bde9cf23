//! Kernels that Triton compiled for sm_80 (`tests/triton`), against plain computations on the host.

use super::job::Argument::{Buffer, U32};
use super::job::{Argument, Job, Kind, Launch, Precision, bytes_f32};
use super::table::Random;
use half::{bf16, f16};

/// Triton's four warps.
const THREADS: u32 = 128;
/// Triton's kernels end in two pointers to scratch memory, which none of these uses.
const NO_SCRATCH: [Argument; 2] = [U32(0), U32(0)];

pub(crate) fn jobs() -> Vec<Job> {
    let f16 = |&x: &f32| f16::from_f32(x).to_le_bytes().to_vec();
    let bf16 = |&x: &f32| bf16::from_f32(x).to_le_bytes().to_vec();
    let tf32 = |&x: &f32| x.to_le_bytes().to_vec();
    vec![
        add(),
        softmax(),
        matmul("f16", include_str!("../triton/matmul_f16.ptx"), &f16),
        matmul("bf16", include_str!("../triton/matmul_bf16.ptx"), &bf16),
        matmul("tf32", include_str!("../triton/matmul_tf32.ptx"), &tf32),
    ]
}

/// The last buffer is the result.
fn job(
    name: &str,
    ptx: &str,
    kernel: &'static str,
    grid: u32,
    buffers: Vec<Vec<u8>>,
    sizes: &[u32],
) -> Job {
    let first = ptx.lines().next().unwrap_or_default();
    let shared = first.rsplit(' ').nth(1).and_then(|bytes| bytes.parse().ok());
    let arguments = (0..buffers.len()).map(Buffer).chain(sizes.iter().copied().map(U32));
    let launch = Launch {
        kernel,
        shape: (grid, THREADS, shared.expect("build.py writes it into the first line")),
        arguments: arguments.chain(NO_SCRATCH).collect(),
    };
    Job {
        name: format!("triton {name}"),
        ptx: ptx.to_owned(),
        result: buffers.len() - 1,
        buffers,
        launches: vec![launch],
        kind: Kind::F32,
        expected: Vec::new(),
        pictures: Vec::new(),
        precision: Precision::Exact,
        golden: Precision::Exact,
    }
}

/// Multiples of 1/128 from -1 to 1, which all types hold. Some hundred products of two of them have a
/// sum that a float holds, so that every order of summation gives the same bits.
fn numbers(seed: u64, count: usize) -> Vec<f32> {
    let mut random = Random::new(seed);
    (0..count).map(|_| (random.next() >> 56) as f32 / 128.0 - 1.0).collect()
}

fn add() -> Job {
    let (x, y) = (numbers(51, 1000), numbers(52, 1000));
    let sums: Vec<f32> = x.iter().zip(&y).map(|(x, y)| x + y).collect();
    // The last of four blocks is not full; what lies behind the end stays as it is.
    let buffers = vec![bytes_f32(&x), bytes_f32(&y), vec![0xff; 4 * 1024]];
    let mut expected = bytes_f32(&sums);
    expected.resize(4 * 1024, 0xff);
    Job { expected, ..job("add", include_str!("../triton/add.ptx"), "add", 4, buffers, &[1000]) }
}

fn softmax() -> Job {
    let (rows, columns) = (7, 300);
    let values: Vec<f32> = numbers(53, rows * columns).iter().map(|x| 20.0 * x).collect();
    let mut expected = Vec::new();
    for row in values.chunks(columns) {
        let most = row.iter().copied().fold(f32::NEG_INFINITY, f32::max);
        let powers: Vec<f64> = row.iter().map(|&x| f64::from(x - most).exp()).collect();
        let sum: f64 = powers.iter().sum();
        expected.extend(powers.iter().map(|power| (power / sum) as f32));
    }
    let buffers = vec![bytes_f32(&values), vec![0; 4 * values.len()]];
    let ptx = include_str!("../triton/softmax.ptx");
    // ex2.approx has an error of 2 ulp; its argument, up to 58, is rounded before.
    let precision = Precision::Within { relative: 1e-5, absolute: 1e-30 };
    let expected = bytes_f32(&expected);
    let job = job("softmax", ptx, "softmax", rows as u32, buffers, &[columns as u32]);
    Job { expected, precision, golden: precision, ..job }
}

/// No size is one of whole tiles (64 by 64 by 32).
fn matmul(name: &str, ptx: &str, bytes: &dyn Fn(&f32) -> Vec<u8>) -> Job {
    let (m, n, k) = (100, 80, 112);
    let (a, b) = (numbers(54, m * k), numbers(55, k * n));
    let cell = |i: usize| (0..k).map(|j| a[i / n * k + j] * b[j * n + i % n]).sum();
    let expected: Vec<f32> = (0..m * n).map(cell).collect();
    let buffers = vec![
        a.iter().flat_map(bytes).collect(),
        b.iter().flat_map(bytes).collect(),
        vec![0; 4 * m * n],
    ];
    let sizes = [m, n, k].map(|size| size as u32);
    let grid = (m.div_ceil(64) * n.div_ceil(64)) as u32;
    let expected = bytes_f32(&expected);
    Job { expected, ..job(&format!("matmul {name}"), ptx, "matmul", grid, buffers, &sizes) }
}
