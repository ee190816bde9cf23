//! `ldmatrix`, `mma.sync` and `cp.async`.

use super::job::{Argument, Job, Kind, Launch, Precision, bytes32};
use super::table::Random;
use super::tiny;
use half::{bf16, f16};

pub(crate) fn jobs() -> Vec<Job> {
    let mut jobs = Vec::new();
    for count in [1, 2, 4] {
        for transposed in [false, true] {
            jobs.push(load_matrix(count, transposed));
        }
    }
    for format in FORMATS {
        for depth in [4, 2].map(|n| n * format.per_register * 2) {
            for data in [Data::Whole, Data::Real, Data::Special] {
                if let Some(job) = product(format, depth, data) {
                    jobs.push(job);
                }
            }
        }
    }
    for format in TINY {
        for data in [Data::Whole, Data::Real, Data::Special] {
            let job = product(format, 32, data);
            jobs.extend(job.map(|mut job| {
                job.ptx = job.ptx.replace("sm_80", "sm_90").replace(".version 8.0", ".version 8.4");
                job
            }));
        }
    }
    for (size, cache) in [(4, "ca"), (8, "ca"), (16, "ca"), (16, "cg")] {
        for third in ["", ", %r7", ", %p1", ", !%p1"] {
            jobs.push(copy_async(size, cache, third));
        }
    }
    jobs
}

/// One warp that runs `body` with the address of its inputs in `%d1`, of its results in `%d2` and
/// its lane in `%r1`; `%sm` is the address of 4 KiB of shared memory.
pub(crate) fn warp(name: String, body: &str, input: Vec<u8>, kind: Kind, expected: Vec<u8>) -> Job {
    let ptx = format!(
        ".version 8.0\n.target sm_80\n.address_size 64\n\
         .visible .entry k(.param .u64 p0, .param .u64 p1)\n{{\n\
         .reg .b32 %r<40>; .reg .b64 %d<9>; .reg .pred %p<3>; .reg .b32 %sm;\n\
         .shared .align 16 .b8 room[4096];\n\
         ld.param.u64 %d1, [p0]; ld.param.u64 %d2, [p1]; mov.u32 %r1, %tid.x;\n\
         mov.u32 %sm, room;\n{body}ret;\n}}\n"
    );
    Job {
        name,
        ptx,
        buffers: vec![input, vec![0; expected.len()]],
        launches: vec![Launch {
            kernel: "k",
            shape: (1, 32, 0),
            arguments: vec![Argument::Buffer(0), Argument::Buffer(1)],
        }],
        result: 1,
        kind,
        expected,
        pictures: Vec::new(),
        precision: Precision::Exact,
        golden: Precision::Exact,
    }
}

/// Rows of 16 bytes lie in shared memory 48 bytes apart; lane `l` names row `7 l % 32`.
fn load_matrix(count: usize, transposed: bool) -> Job {
    let elements: Vec<u16> = (0..256).map(|i| (i * 257 + 11) as u16).collect();
    let registers =
        |from: usize| (0..count).map(|i| format!("%r{}", from + i)).collect::<Vec<_>>().join(", ");
    let stores: String =
        (0..count).map(|i| format!("st.global.u32 [%d4+{}], %r{};\n", 4 * i, 20 + i)).collect();
    let trans = if transposed { ".trans" } else { "" };
    let instruction = format!("ldmatrix.sync.aligned.m8n8.x{count}{trans}.shared.b16");
    let body = format!(
        "mul.wide.u32 %d3, %r1, 16; add.s64 %d3, %d1, %d3;\n\
         ld.global.v4.u32 {{%r2, %r3, %r4, %r5}}, [%d3]; mad.lo.u32 %r6, %r1, 48, %sm;\n\
         st.shared.v4.u32 [%r6], {{%r2, %r3, %r4, %r5}}; bar.sync 0;\n\
         mul.lo.u32 %r7, %r1, 7; and.b32 %r7, %r7, 31; mad.lo.u32 %r7, %r7, 48, %sm;\n\
         {instruction} {{{}}}, [%r7];\n\
         mul.wide.u32 %d4, %r1, {}; add.s64 %d4, %d2, %d4;\n{stores}",
        registers(20),
        4 * count
    );
    let mut expected = Vec::new();
    for lane in 0..32 {
        for matrix in 0..count {
            for half in 0..2 {
                let (row, column) = (lane / 4, lane % 4 * 2 + half);
                let (row, column) = if transposed { (column, row) } else { (row, column) };
                // The row of a matrix is where the lane of that number points.
                let stored = 7 * (8 * matrix + row) % 32;
                expected.extend(elements[8 * stored + column].to_le_bytes());
            }
        }
    }
    let input = elements.iter().flat_map(|element| element.to_le_bytes()).collect();
    warp(instruction, &body, input, Kind::B32, expected)
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Data {
    /// Small whole numbers: every sum is exact in every order.
    Whole,
    /// Numbers from -1 to 1.
    Real,
    /// Subnormal and large numbers, infinities and NaN among small whole numbers.
    Special,
}

#[derive(Clone, Copy)]
struct Format {
    /// Type of A, B, and of C and D.
    types: [&'static str; 3],
    /// Elements of 32 bits.
    per_register: usize,
    saturate: bool,
}

const fn format(
    a: &'static str,
    b: &'static str,
    sum: &'static str,
    per_register: usize,
) -> Format {
    Format { types: [a, b, sum], per_register, saturate: false }
}

/// Those of floating-point numbers of eight bits, which came with another architecture.
const TINY: [Format; 3] = [
    format("e4m3", "e4m3", "f32", 4),
    format("e5m2", "e5m2", "f32", 4),
    format("e4m3", "e5m2", "f32", 4),
];

const FORMATS: [Format; 9] = [
    format("f16", "f16", "f32", 2),
    format("f16", "f16", "f16", 2),
    format("bf16", "bf16", "f32", 2),
    format("tf32", "tf32", "f32", 1),
    format("s8", "s8", "s32", 4),
    format("u8", "u8", "s32", 4),
    format("s8", "u8", "s32", 4),
    format("u8", "s8", "s32", 4),
    Format { types: ["s8", "s8", "s32"], per_register: 4, saturate: true },
];

/// The bits of a number in a type.
pub(crate) fn encode(ty: &str, x: f64) -> u32 {
    match ty {
        "f16" => f16::from_f64(x).to_bits().into(),
        "bf16" => bf16::from_f64(x).to_bits().into(),
        "tf32" | "f32" => (x as f32).to_bits(),
        "s8" | "u8" => u32::from(x as i64 as u8),
        "e4m3" | "e5m2" => tiny::encode(ty, x),
        _ => x as i64 as u32,
    }
}

/// The number that bits of a type stand for.
pub(crate) fn decode(ty: &str, bits: u32) -> f64 {
    match ty {
        "f16" => f16::from_bits(bits as u16).to_f64(),
        "bf16" => bf16::from_bits(bits as u16).to_f64(),
        // Only ten bits of the fraction count.
        "tf32" => f32::from_bits(bits >> 13 << 13).into(),
        "f32" => f32::from_bits(bits).into(),
        "s8" => (bits as i8).into(),
        "u8" => (bits as u8).into(),
        "e4m3" | "e5m2" => tiny::decode(ty, bits),
        _ => (bits as i32).into(),
    }
}

pub(crate) fn draw(random: &mut Random, ty: &str, data: Data, small: bool) -> f64 {
    let bits = random.next();
    let whole = ((bits >> 32) % 17) as f64 - 8.0;
    match (ty, data) {
        ("s8", _) => f64::from(bits as i8),
        ("u8", _) => f64::from(bits as u8),
        // Near the ends, so that sums overflow.
        ("s32", Data::Special) => {
            if bits & 1 == 0 {
                2_147_480_000.0
            } else {
                -2_147_480_000.0
            }
        }
        ("s32", _) => f64::from(bits as i16),
        (_, Data::Real) => (bits >> 11) as f64 / (1u64 << 52) as f64 - 1.0,
        (_, Data::Special) if small && bits.is_multiple_of(23) => {
            let largest = 65504.0;
            let least = if ty == "f16" { 6e-8 } else { 1e-39 };
            [f64::INFINITY, f64::NEG_INFINITY, f64::NAN, largest, -largest, least, -0.0]
                [(bits >> 40) as usize % 7]
        }
        _ => whole,
    }
}

/// A product of one warp; none where the shape is not one of the ISA's.
fn product(format: Format, depth: usize, data: Data) -> Option<Job> {
    let [a_type, b_type, sum_type] = format.types;
    let integers = sum_type == "s32";
    if integers && data == Data::Whole {
        return None;
    }
    let seed = 500 + depth as u64 + 100 * a_type.len() as u64 + u64::from(a_type.as_bytes()[0]);
    let mut random = Random::new(seed);
    let mut matrix = |rows: usize, columns: usize, ty: &str, small: bool| -> Vec<Vec<u32>> {
        let mut draw = || encode(ty, draw(&mut random, ty, data, small));
        (0..rows).map(|_| (0..columns).map(|_| draw()).collect()).collect()
    };
    let a = matrix(16, depth, a_type, true);
    let b = matrix(depth, 8, b_type, false);
    let c = matrix(16, 8, sum_type, false);
    let registers = depth / (4 * format.per_register);
    let sums = if sum_type == "f16" { 2 } else { 4 };
    let mut input = Vec::new();
    for lane in 0..32 {
        let (group, thread) = (lane / 4, lane % 4);
        // Elements a0, a1, ... of the lane, as the figures of the PTX ISA have them.
        let n = format.per_register;
        let column = |i: usize| thread * n + i % n + i / (2 * n) * 4 * n;
        let of_a = (0..2 * registers * n).map(|i| a[group + i / n % 2 * 8][column(i)]);
        let of_b = (0..registers * n).map(|i| b[thread * n + i % n + i / n * 4 * n][group]);
        let of_c = (0..4).map(|i| c[group + i / 2 * 8][thread * 2 + i % 2]);
        input.extend(pack(&of_a.collect::<Vec<_>>(), n));
        input.extend(pack(&of_b.collect::<Vec<_>>(), n));
        input.extend(pack(&of_c.collect::<Vec<_>>(), 4 / sums));
    }
    let mut expected = Vec::new();
    for lane in 0..32 {
        let (group, thread) = (lane / 4, lane % 4);
        let of_d: Vec<u32> = (0..4)
            .map(|i| {
                let (row, column) = (group + i / 2 * 8, thread * 2 + i % 2);
                // From the far end, unlike the interpreter.
                let terms = (0..depth)
                    .rev()
                    .map(|k| decode(a_type, a[row][k]) * decode(b_type, b[k][column]));
                let sum = terms.sum::<f64>() + decode(sum_type, c[row][column]);
                match sum_type {
                    "s32" if format.saturate => sum as i32 as u32,
                    _ => encode(sum_type, sum),
                }
            })
            .collect();
        expected.extend(pack(&of_d, 4 / sums));
    }
    let (na, nb) = (2 * registers, registers);
    let list = |from: usize, count: usize| {
        (from..from + count).map(|i| format!("%r{i}")).collect::<Vec<_>>().join(", ")
    };
    let stride = 4 * (na + nb + sums);
    let loads: String = (0..na + nb + sums)
        .map(|i| format!("ld.global.b32 %r{}, [%d3+{}];\n", 10 + i, 4 * i))
        .collect();
    let stores: String =
        (0..sums).map(|i| format!("st.global.b32 [%d4+{}], %r{};\n", 4 * i, 30 + i)).collect();
    let saturate = if format.saturate { ".satfinite" } else { "" };
    let instruction = format!(
        "mma.sync.aligned.m16n8k{depth}.row.col{saturate}.{sum_type}.{a_type}.{b_type}.{sum_type}"
    );
    let body = format!(
        "mul.wide.u32 %d3, %r1, {stride}; add.s64 %d3, %d1, %d3;\n{loads}\
         {instruction} {{{}}}, {{{}}}, {{{}}}, {{{}}};\n\
         mul.wide.u32 %d4, %r1, {}; add.s64 %d4, %d2, %d4;\n{stores}",
        list(30, sums),
        list(10, na),
        list(10 + na, nb),
        list(10 + na + nb, sums),
        4 * sums
    );
    let kind = match sum_type {
        "f16" => Kind::F16,
        "f32" => Kind::F32,
        _ => Kind::B32,
    };
    let mut job = warp(format!("{instruction} of {data:?} data"), &body, input, kind, expected);
    (job.precision, job.golden) = precisions(sum_type, data);
    Some(job)
}

/// How close sums of a type come to the host's, and to a GPU's.
pub(crate) fn precisions(sum_type: &str, data: Data) -> (Precision, Precision) {
    match (sum_type, data) {
        // Rounded once, from a sum of double precision, whatever its order.
        ("f32", Data::Real) => (
            Precision::Within { relative: 2f64.powi(-23), absolute: 2f64.powi(-45) },
            Precision::Within { relative: 0.0, absolute: 2f64.powi(-19) },
        ),
        ("f16", Data::Real) => (
            Precision::Within { relative: 2f64.powi(-10), absolute: 2f64.powi(-24) },
            Precision::Within { relative: 2f64.powi(-9), absolute: 2f64.powi(-9) },
        ),
        ("f32", Data::Special) => (
            Precision::Numbers,
            // The largest terms are half a million.
            Precision::Within { relative: 2f64.powi(-20), absolute: 1.0 },
        ),
        ("f16", Data::Special) => {
            (Precision::Numbers, Precision::Within { relative: 2f64.powi(-9), absolute: 1.0 })
        }
        // Each term is rounded, in an order of the GPU's own.
        ("f64", Data::Real) => {
            let precision = Precision::Within { relative: 0.0, absolute: 2f64.powi(-46) };
            (precision, precision)
        }
        ("f64", Data::Special) => (Precision::Numbers, Precision::Numbers),
        _ => (Precision::Exact, Precision::Exact),
    }
}

/// Elements to registers of 32 bits, the first in the low bits.
fn pack(elements: &[u32], per_register: usize) -> Vec<u8> {
    let width = 32 / per_register;
    let words: Vec<u32> = elements
        .chunks(per_register)
        .map(|parts| {
            parts.iter().enumerate().fold(0, |word, (i, part)| word | part << (width * i % 32))
        })
        .collect();
    bytes32(&words)
}

/// Each lane copies `size` bytes between places in mirrored order, in two groups. `%r7` is a
/// number of bytes to read, `%p1` says to read none.
fn copy_async(size: usize, cache: &str, third: &str) -> Job {
    let instruction = format!("cp.async.{cache}.shared.global [%r6], [%d4], {size}{third}");
    let half = size * 32;
    let body = format!(
        "xor.b32 %r2, %r1, 31; mul.wide.u32 %d4, %r2, {size}; add.s64 %d4, %d1, %d4;\n\
         mad.lo.u32 %r6, %r1, {size}, %sm; mul.lo.u32 %r7, %r1, 5; rem.u32 %r7, %r7, {};\n\
         and.b32 %r8, %r1, 3; setp.eq.u32 %p1, %r8, 1;\n\
         {instruction}; cp.async.commit_group;\n\
         add.u32 %r6, %r6, {half}; add.s64 %d4, %d4, {half};\n\
         {instruction}; cp.async.commit_group; cp.async.wait_group 1; cp.async.wait_group 0;\n\
         cp.async.wait_all; bar.sync 0; mov.u32 %r9, %r1;\n\
         again: mad.lo.u32 %r10, %r9, 4, %sm; ld.shared.u32 %r11, [%r10];\n\
         mul.wide.u32 %d5, %r9, 4; add.s64 %d5, %d2, %d5; st.global.u32 [%d5], %r11;\n\
         add.u32 %r9, %r9, 32; setp.lt.u32 %p2, %r9, {}; @%p2 bra again;\n",
        size + 1,
        half / 2
    );
    let mut random = Random::new(size as u64);
    let input: Vec<u8> = (0..2 * half).map(|_| random.next() as u8).collect();
    let mut expected = vec![0; 2 * half];
    for (place, cell) in expected.chunks_mut(size).enumerate() {
        let lane = place % 32;
        let read = match third {
            ", %r7" => lane * 5 % (size + 1),
            ", %p1" if lane % 4 == 1 => 0,
            ", !%p1" if lane % 4 != 1 => 0,
            _ => size,
        };
        let from = (place / 32 * 32 + (31 - lane)) * size;
        cell[..read].copy_from_slice(&input[from..from + read]);
    }
    warp(instruction, &body, input, Kind::B32, expected)
}
