//! Programs that nvcc compiled (`tests/programs`), against plain computations on the host.

use super::job::Argument::{Buffer, F32, U32};
use super::job::{Argument, Job, Kind, Launch, Precision, bytes_f32, bytes32};
use super::table::Random;

const PTX: &str = include_str!("../programs/programs.ptx");

/// Integers are exact everywhere, and so are numbers on which only IEEE operations work: softcuda
/// and a GPU agree bit for bit. The host computes in double precision.
fn program(name: &str, buffers: Vec<Vec<u8>>, launches: Vec<Launch>, result: usize) -> Job {
    Job {
        name: format!("program {name}"),
        ptx: PTX.to_owned(),
        buffers,
        launches,
        result,
        kind: Kind::B32,
        expected: Vec::new(),
        pictures: Vec::new(),
        precision: Precision::Exact,
        golden: Precision::Exact,
    }
}

impl Job {
    fn gives_integers(mut self, expected: &[u32]) -> Job {
        self.expected = bytes32(expected);
        self
    }

    /// Within a relative and an absolute error of the host's numbers.
    fn gives(mut self, expected: &[f64], error: f64) -> Job {
        let rounded: Vec<f32> = expected.iter().map(|&x| x as f32).collect();
        self.expected = bytes_f32(&rounded);
        self.kind = Kind::F32;
        self.precision = Precision::Within { relative: error, absolute: error };
        self
    }

    /// An approximate function takes part, so a GPU's result is another one.
    fn approximately(mut self, error: f64) -> Job {
        self.golden = Precision::Within { relative: error, absolute: error };
        self
    }
}

fn launch(kernel: &'static str, grid: u32, block: u32, arguments: &[Argument]) -> Launch {
    Launch { kernel, shape: (grid, block, 0), arguments: arguments.to_vec() }
}

/// Numbers from -1 to 1.
fn numbers(seed: u64, count: usize) -> Vec<f32> {
    let mut random = Random::new(seed);
    (0..count).map(|_| (random.next() >> 40) as f32 / (1 << 23) as f32 - 1.0).collect()
}

fn integers(seed: u64, count: usize) -> Vec<u32> {
    let mut random = Random::new(seed);
    (0..count).map(|_| (random.next() >> 32) as u32).collect()
}

fn wide(values: &[f32]) -> Vec<f64> {
    values.iter().map(|&value| value.into()).collect()
}

fn zeros(words: usize) -> Vec<u8> {
    vec![0; 4 * words]
}

pub(crate) fn jobs() -> Vec<Job> {
    vec![
        matmul(),
        reduce(),
        reduce_integers(),
        scan(),
        sort(),
        softmax(),
        layer_norm(),
        attention(),
        convolution(),
        sgd(),
        adam(),
        philox(),
        histogram(),
        n_body(),
        black_scholes(),
        spmv(),
        bfs(),
        recursion(),
    ]
}

fn matmul() -> Job {
    let n = 64;
    let (a, b) = (numbers(1, n * n), numbers(2, n * n));
    let (x, y) = (wide(&a), wide(&b));
    let cell = |i: usize| (0..n).map(|k| x[i / n * n + k] * y[k * n + i % n]).sum::<f64>();
    let expected: Vec<f64> = (0..n * n).map(cell).collect();
    let arguments = [Buffer(0), Buffer(1), Buffer(2), U32(n as u32)];
    let launches = vec![launch("matmul", 16, 256, &arguments)];
    program("matmul", vec![bytes_f32(&a), bytes_f32(&b), zeros(n * n)], launches, 2)
        .gives(&expected, 1e-5)
}

fn reduce() -> Job {
    let values = numbers(3, 10_000);
    let mut sums = vec![0.0; 8];
    for (i, &value) in values.iter().enumerate() {
        sums[i / 256 % 8] += f64::from(value);
    }
    let launches = vec![launch("reduce", 8, 256, &[Buffer(0), Buffer(1), U32(10_000)])];
    program("reduce", vec![bytes_f32(&values), zeros(8)], launches, 1).gives(&sums, 1e-4)
}

fn reduce_integers() -> Job {
    let values = integers(4, 10_000);
    let sum = values.iter().fold(0u32, |sum, &value| sum.wrapping_add(value));
    let most = values.iter().copied().max().unwrap_or(0);
    let launches = vec![launch("reduce_integers", 8, 128, &[Buffer(0), Buffer(1), U32(10_000)])];
    program("reduce_integers", vec![bytes32(&values), zeros(2)], launches, 1)
        .gives_integers(&[sum, most])
}

fn scan() -> Job {
    let values = integers(5, 512 * 6);
    let mut sum = 0u32;
    let expected: Vec<u32> = values
        .iter()
        .map(|&value| {
            sum = sum.wrapping_add(value);
            sum
        })
        .collect();
    let launches = vec![
        launch("scan_blocks", 6, 512, &[Buffer(0), Buffer(1), Buffer(2)]),
        launch("scan_add", 6, 512, &[Buffer(1), Buffer(2)]),
    ];
    program("scan", vec![bytes32(&values), zeros(values.len()), zeros(6)], launches, 1)
        .gives_integers(&expected)
}

fn sort() -> Job {
    let values = integers(6, 2048);
    let mut expected: Vec<i32> = values.iter().map(|&value| value as i32).collect();
    expected.sort_unstable();
    let mut launches = Vec::new();
    for size in (1..=11).map(|bits| 1u32 << bits) {
        for step in (0..size.ilog2()).rev().map(|bits| 1u32 << bits) {
            launches.push(launch("bitonic", 8, 256, &[Buffer(0), U32(size), U32(step)]));
        }
    }
    let expected: Vec<u32> = expected.into_iter().map(|value| value as u32).collect();
    program("sort", vec![bytes32(&values)], launches, 0).gives_integers(&expected)
}

fn softmax() -> Job {
    let values: Vec<f32> = numbers(7, 16 * 128).iter().map(|x| x * 8.0).collect();
    let expected: Vec<f64> = wide(&values)
        .chunks(128)
        .flat_map(|row| {
            let most = row.iter().copied().fold(f64::MIN, f64::max);
            let weights: Vec<f64> = row.iter().map(|x| (x - most).exp()).collect();
            let sum: f64 = weights.iter().sum();
            weights.into_iter().map(move |weight| weight / sum)
        })
        .collect();
    let launches = vec![launch("softmax", 16, 32, &[Buffer(0), Buffer(1)])];
    program("softmax", vec![bytes_f32(&values), zeros(values.len())], launches, 1)
        .gives(&expected, 1e-5)
        .approximately(2e-6)
}

fn layer_norm() -> Job {
    let (values, scale, shift) = (numbers(8, 16 * 128), numbers(9, 128), numbers(10, 128));
    let expected: Vec<f64> = wide(&values)
        .chunks(128)
        .flat_map(|row| {
            let mean = row.iter().sum::<f64>() / 128.0;
            let variance = row.iter().map(|x| (x - mean).powi(2)).sum::<f64>() / 128.0;
            let rate = 1.0 / (variance + 1e-5).sqrt();
            let scaled = row.iter().zip(scale.iter().zip(&shift));
            scaled
                .map(move |(x, (&a, &b))| (x - mean) * rate * f64::from(a) + f64::from(b))
                .collect::<Vec<_>>()
        })
        .collect();
    let launches =
        vec![launch("layer_norm", 16, 32, &[Buffer(0), Buffer(1), Buffer(2), Buffer(3)])];
    let buffers =
        vec![bytes_f32(&values), bytes_f32(&scale), bytes_f32(&shift), zeros(values.len())];
    program("layer_norm", buffers, launches, 3).gives(&expected, 1e-5).approximately(2e-6)
}

fn attention() -> Job {
    let [q, k, v] = [11, 12, 13].map(|seed| numbers(seed, 64 * 32));
    let [a, b, c] = [wide(&q), wide(&k), wide(&v)];
    let mut expected = Vec::new();
    for row in 0..64 {
        let scores = (0..64)
            .map(|t| (0..32).map(|i| a[row * 32 + i] * b[t * 32 + i]).sum::<f64>() / 32f64.sqrt());
        let weights: Vec<f64> = scores.map(f64::exp).collect();
        let sum: f64 = weights.iter().sum();
        for i in 0..32 {
            expected.push((0..64).map(|t| weights[t] * c[t * 32 + i]).sum::<f64>() / sum);
        }
    }
    let launches = vec![launch("attention", 64, 64, &[Buffer(0), Buffer(1), Buffer(2), Buffer(3)])];
    let buffers = vec![bytes_f32(&q), bytes_f32(&k), bytes_f32(&v), zeros(64 * 32)];
    program("attention", buffers, launches, 3).gives(&expected, 1e-5).approximately(2e-6)
}

fn convolution() -> Job {
    let image = numbers(14, 64 * 64);
    let weights = [1.0, 4.0, 6.0, 4.0, 1.0];
    let at = |x: i32, y: i32| {
        let inside = (0..64).contains(&x) && (0..64).contains(&y);
        if inside { f64::from(image[(y * 64 + x) as usize]) } else { 0.0 }
    };
    let expected: Vec<f64> = (0..64 * 64)
        .map(|i| {
            let (x, y) = (i % 64, i / 64);
            // The kernel is a product of two rows of Pascal's triangle.
            let row = |v: i32| (0..5).map(|u| weights[u as usize] * at(x + u - 2, v)).sum::<f64>();
            (0..5).map(|v| weights[v as usize] * row(y + v - 2)).sum::<f64>() / 256.0
        })
        .collect();
    let launches = vec![launch("convolution", 32, 128, &[Buffer(0), Buffer(1)])];
    program("convolution", vec![bytes_f32(&image), zeros(64 * 64)], launches, 1)
        .gives(&expected, 1e-5)
}

fn sgd() -> Job {
    let [weights, gradients, momentum] = [15, 16, 17].map(|seed| numbers(seed, 1024));
    let mut expected = wide(&weights);
    for (i, weight) in expected.iter_mut().enumerate() {
        let mut speed = f64::from(momentum[i]);
        for _ in 0..5 {
            speed = 0.9 * speed + f64::from(gradients[i]);
            *weight -= 0.01 * speed;
        }
    }
    let arguments = [Buffer(0), Buffer(1), Buffer(2), F32(0.01)];
    let launches = (0..5).map(|_| launch("sgd", 8, 128, &arguments)).collect();
    let buffers = [weights, gradients, momentum].map(|values| bytes_f32(&values));
    program("sgd", buffers.into(), launches, 0).gives(&expected, 1e-5)
}

fn adam() -> Job {
    let [weights, gradients] = [18, 19].map(|seed| numbers(seed, 1024));
    let mut expected = wide(&weights);
    for (weight, &gradient) in expected.iter_mut().zip(&gradients) {
        let (g, mut m, mut v) = (f64::from(gradient), 0.0, 0.0);
        for step in 1..=5 {
            m = 0.9 * m + 0.1 * g;
            v = 0.999 * v + 0.001 * g * g;
            let (m, v) = (m / (1.0 - 0.9f64.powi(step)), v / (1.0 - 0.999f64.powi(step)));
            *weight -= 0.01 * m / (v.sqrt() + 1e-8);
        }
    }
    let launches = (1..=5)
        .map(|step| {
            let state = [Buffer(0), Buffer(1), Buffer(2), Buffer(3), U32(step), F32(0.01)];
            launch("adam", 8, 128, &state)
        })
        .collect();
    let buffers = vec![bytes_f32(&weights), bytes_f32(&gradients), zeros(1024), zeros(1024)];
    program("adam", buffers, launches, 0).gives(&expected, 1e-5)
}

fn philox() -> Job {
    let seed = 0xdead_beef;
    let mut expected = Vec::new();
    for i in 0..256 {
        let mut counter = [i, 0, 0x1234, 0];
        let mut key = [seed, !seed];
        for _ in 0..10 {
            let product = |factor: u32, x: u32| u64::from(factor) * u64::from(x);
            let (p, q) = (product(0xD251_1F53, counter[0]), product(0xCD9E_8D57, counter[2]));
            let high = |product: u64| (product >> 32) as u32;
            counter =
                [high(q) ^ counter[1] ^ key[0], q as u32, high(p) ^ counter[3] ^ key[1], p as u32];
            key = [key[0].wrapping_add(0x9E37_79B9), key[1].wrapping_add(0xBB67_AE85)];
        }
        expected.extend(counter);
    }
    let launches = vec![launch("philox", 2, 128, &[Buffer(0), U32(seed)])];
    program("philox", vec![zeros(1024)], launches, 0).gives_integers(&expected)
}

fn histogram() -> Job {
    let mut random = Random::new(20);
    let bytes: Vec<u8> =
        (0..20_000).map(|_| (random.next() as u8) & (random.next() as u8)).collect();
    let mut bins = vec![0; 256];
    bytes.iter().for_each(|&byte| bins[usize::from(byte)] += 1);
    let launches = vec![launch("histogram", 6, 256, &[Buffer(0), Buffer(1), U32(20_000)])];
    program("histogram", vec![bytes, zeros(256)], launches, 1).gives_integers(&bins)
}

fn n_body() -> Job {
    let bodies = numbers(21, 4 * 256);
    let at = |i: usize, axis: usize| f64::from(bodies[4 * i + axis]);
    let mut expected = Vec::new();
    for i in 0..256 {
        let mut sum = [0.0; 4];
        for j in 0..256 {
            let away = [0, 1, 2].map(|axis| at(j, axis) - at(i, axis));
            let square = away.iter().map(|x| x * x).sum::<f64>() + 0.01;
            let force = at(j, 3) / (square * square.sqrt());
            (0..3).for_each(|axis| sum[axis] += away[axis] * force);
        }
        expected.extend(sum);
    }
    let launches = vec![launch("n_body", 2, 128, &[Buffer(0), Buffer(1), U32(256)])];
    program("n_body", vec![bytes_f32(&bodies), zeros(1024)], launches, 1)
        .gives(&expected, 1e-3)
        .approximately(1e-4)
}

/// The standard normal distribution, by the integral of its density (Simpson's rule).
fn normal(d: f64) -> f64 {
    let steps = 2000;
    let width = d / f64::from(steps);
    let density = |x: f64| (-x * x / 2.0).exp() / std::f64::consts::TAU.sqrt();
    let weight = |i: i32| if i == 0 || i == steps { 1.0 } else { f64::from(2 + 2 * (i % 2)) };
    let sum: f64 = (0..=steps).map(|i| weight(i) * density(f64::from(i) * width)).sum();
    0.5 + sum * width / 3.0
}

fn black_scholes() -> Job {
    let options: Vec<f32> = numbers(22, 3 * 256)
        .iter()
        .enumerate()
        .map(|(i, x)| if i % 3 == 2 { 2.6 + 2.4 * x } else { 50.0 + 45.0 * x })
        .collect();
    let mut expected = Vec::new();
    for option in wide(&options).chunks(3) {
        let (s, x, t, r, v) = (option[0], option[1], option[2], 0.02, 0.30);
        let d1 = ((s / x).ln() + (r + 0.5 * v * v) * t) / (v * t.sqrt());
        let d2 = d1 - v * t.sqrt();
        let discounted = x * (-r * t).exp();
        expected.push(s * normal(d1) - discounted * normal(d2));
        expected.push(discounted * normal(-d2) - s * normal(-d1));
    }
    let launches = vec![launch("black_scholes", 2, 128, &[Buffer(0), Buffer(1)])];
    program("black_scholes", vec![bytes_f32(&options), zeros(512)], launches, 1)
        .gives(&expected, 1e-4)
        .approximately(5e-5)
}

/// Rows of up to seven columns.
fn sparse(rows: usize) -> (Vec<u32>, Vec<u32>) {
    let mut random = Random::new(23);
    let (mut starts, mut columns) = (vec![0], Vec::new());
    for _ in 0..rows {
        let count = random.next() % 8;
        columns.extend((0..count).map(|_| (random.next() % rows as u64) as u32));
        starts.push(columns.len() as u32);
    }
    (starts, columns)
}

fn spmv() -> Job {
    let (starts, columns) = sparse(500);
    let (values, x) = (numbers(24, columns.len()), numbers(25, 500));
    let expected: Vec<f64> = starts
        .windows(2)
        .map(|row| {
            let row = row[0] as usize..row[1] as usize;
            row.map(|i| f64::from(values[i]) * f64::from(x[columns[i] as usize])).sum()
        })
        .collect();
    let arguments = [Buffer(0), Buffer(1), Buffer(2), Buffer(3), Buffer(4), U32(500)];
    let launches = vec![launch("spmv", 4, 128, &arguments)];
    let buffers =
        vec![bytes32(&starts), bytes32(&columns), bytes_f32(&values), bytes_f32(&x), zeros(500)];
    program("spmv", buffers, launches, 4).gives(&expected, 1e-5)
}

fn bfs() -> Job {
    let (starts, edges) = sparse(500);
    let mut distances = vec![u32::MAX; 500];
    distances[0] = 0;
    let initial = distances.clone();
    let mut queue = std::collections::VecDeque::from([0usize]);
    while let Some(node) = queue.pop_front() {
        for edge in starts[node]..starts[node + 1] {
            let to = edges[edge as usize] as usize;
            if distances[to] == u32::MAX {
                distances[to] = distances[node] + 1;
                queue.push_back(to);
            }
        }
    }
    let levels = distances.iter().filter(|&&d| d != u32::MAX).max().copied().unwrap_or(0);
    let launches = (0..=levels)
        .map(|level| {
            launch("bfs", 4, 128, &[Buffer(0), Buffer(1), Buffer(2), U32(level), U32(500)])
        })
        .collect();
    let buffers = vec![bytes32(&starts), bytes32(&edges), bytes32(&initial)];
    program("bfs", buffers, launches, 2).gives_integers(&distances)
}

fn recursion() -> Job {
    // The function's values for 0, 1 and 2 as its first argument.
    let expected: Vec<u32> =
        (0..32).map(|i| [i / 3 + 1, i / 3 + 2, 2 * (i / 3) + 3][i as usize % 3]).collect();
    let launches = vec![launch("recursion", 1, 32, &[Buffer(0)])];
    program("recursion", vec![zeros(32)], launches, 0).gives_integers(&expected)
}
