//! `mma` of double precision and of small integers, `wmma`, `stmatrix` and `movmatrix`.

use super::job::{Job, Kind, bytes32};
use super::matrices::{Data, decode, draw, encode, precisions, warp};
use super::table::Random;

pub(crate) fn jobs() -> Vec<Job> {
    let mut jobs = Vec::new();
    for count in [1, 2, 4] {
        for transposed in [false, true] {
            jobs.push(store_matrix(count, transposed));
        }
    }
    jobs.push(transpose());
    for (rows, depth) in [(8, 4), (16, 4), (16, 8), (16, 16)] {
        for data in [Data::Whole, Data::Real, Data::Special] {
            jobs.push(doubles(rows, depth, data));
        }
    }
    for (rows, depth, types) in [
        (8, 16, ["s8", "u8"]),
        (8, 32, ["s4", "u4"]),
        (16, 32, ["s4", "u4"]),
        (16, 64, ["s4", "u4"]),
    ] {
        for a in types {
            for b in types {
                jobs.push(integers(rows, depth, [a, b], "", ""));
            }
        }
        jobs.push(integers(rows, depth, [types[0]; 2], ".satfinite", ""));
    }
    for (rows, depth) in [(8, 128), (16, 128), (16, 256)] {
        for operation in [".and.popc", ".xor.popc"] {
            jobs.push(integers(rows, depth, ["b1"; 2], "", operation));
        }
    }
    wmma_jobs(&mut jobs);
    jobs
}

fn newer(mut job: Job) -> Job {
    job.ptx = job.ptx.replace("sm_80", "sm_90");
    job
}

fn list(name: &str, count: usize) -> String {
    (0..count).map(|i| format!("%{name}{i}")).collect::<Vec<_>>().join(", ")
}

/// Lane `l` names row `7 l % 32` of rows that lie 48 bytes apart in shared memory.
fn store_matrix(count: usize, transposed: bool) -> Job {
    let words: Vec<u32> = (0..32 * count as u32).map(|i| i * 0x0203_0107 + 11).collect();
    let trans = if transposed { ".trans" } else { "" };
    let instruction = format!("stmatrix.sync.aligned.m8n8.x{count}{trans}.shared.b16");
    let loads: String =
        (0..count).map(|i| format!("ld.global.b32 %q{i}, [%d3+{}];\n", 4 * i)).collect();
    let body = format!(
        ".reg .b32 %q<4>; mul.wide.u32 %d3, %r1, {}; add.s64 %d3, %d1, %d3;\n{loads}\
         mul.lo.u32 %r7, %r1, 7; and.b32 %r7, %r7, 31; mad.lo.u32 %r7, %r7, 48, %sm;\n\
         mad.lo.u32 %r6, %r1, 48, %sm; mov.u32 %r2, 0;\n\
         st.shared.v4.u32 [%r6], {{%r2, %r2, %r2, %r2}}; bar.sync 0;\n\
         {instruction} [%r7], {{{}}}; bar.sync 0;\n\
         ld.shared.v4.u32 {{%r2, %r3, %r4, %r5}}, [%r6];\n\
         mul.wide.u32 %d4, %r1, 16; add.s64 %d4, %d2, %d4;\n\
         st.global.v4.u32 [%d4], {{%r2, %r3, %r4, %r5}};\n",
        4 * count,
        list("q", count)
    );
    let mut rows = [[0u16; 8]; 32];
    for lane in 0..32 {
        for matrix in 0..count {
            let word = words[lane * count + matrix];
            for (part, value) in [word as u16, (word >> 16) as u16].into_iter().enumerate() {
                let (row, column) = (lane / 4, lane % 4 * 2 + part);
                let (row, column) = if transposed { (column, row) } else { (row, column) };
                rows[7 * (8 * matrix + row) % 32][column] = value;
            }
        }
    }
    let expected = rows.iter().flatten().flat_map(|value| value.to_le_bytes()).collect();
    newer(warp(instruction, &body, bytes32(&words), Kind::B32, expected))
}

fn transpose() -> Job {
    let words: Vec<u32> = (0..32u32).map(|i| i * 0x0203_0107 + 5).collect();
    let instruction = "movmatrix.sync.aligned.m8n8.trans.b16";
    let body = format!(
        "mul.wide.u32 %d3, %r1, 4; add.s64 %d4, %d1, %d3; ld.global.b32 %r2, [%d4];\n\
         {instruction} %r3, %r2; add.s64 %d4, %d2, %d3; st.global.b32 [%d4], %r3;\n"
    );
    let element =
        |row: usize, column: usize| (words[row * 4 + column / 2] >> (16 * (column % 2))) as u16;
    let expected = (0..64).flat_map(|i| element(i % 8, i / 8).to_le_bytes()).collect();
    warp(instruction.to_owned(), &body, bytes32(&words), Kind::B32, expected)
}

/// A matrix by rows.
type Matrix<T> = Vec<Vec<T>>;

fn matrix<T>(rows: usize, columns: usize, mut draw: impl FnMut() -> T) -> Matrix<T> {
    (0..rows).map(|_| (0..columns).map(|_| draw()).collect()).collect()
}

/// The elements of A, B and C that a lane holds, and where those of D are, as the figures of the
/// PTX ISA have them; `n` elements lie side by side.
fn dealt<T: Copy>(n: usize, [a, b, c]: [&Matrix<T>; 3], lane: usize) -> [Vec<T>; 3] {
    let (group, thread) = (lane / 4, lane % 4);
    let (rows, depth) = (a.len(), b.len());
    let halves = rows / 8;
    let blocks = depth / (4 * n);
    let mut of_a = Vec::new();
    let mut of_b = Vec::new();
    for block in 0..blocks {
        for half in 0..halves {
            of_a.extend((0..n).map(|i| a[group + 8 * half][block * 4 * n + thread * n + i]));
        }
        of_b.extend((0..n).map(|i| b[block * 4 * n + thread * n + i][group]));
    }
    (of_a, of_b, sums_of(c, lane)).into()
}

/// The elements of C or D that a lane holds.
fn sums_of<T: Copy>(c: &Matrix<T>, lane: usize) -> Vec<T> {
    let (group, thread) = (lane / 4, lane % 4);
    (0..c.len() / 4).map(|i| c[group + i / 2 * 8][thread * 2 + i % 2]).collect()
}

fn doubles(rows: usize, depth: usize, data: Data) -> Job {
    let mut random = Random::new(700 + rows as u64 + depth as u64);
    let mut draw = |small| draw(&mut random, "f64", data, small);
    let a = matrix(rows, depth, || draw(true));
    let b = matrix(depth, 8, || draw(false));
    let c = matrix(rows, 8, || draw(false));
    let instruction = format!("mma.sync.aligned.m{rows}n8k{depth}.row.col.f64.f64.f64.f64");
    let mut input = Vec::new();
    let mut counts = [0; 3];
    for lane in 0..32 {
        let parts = dealt(1, [&a, &b, &c], lane);
        counts = [0, 1, 2].map(|i| parts[i].len());
        input.extend(parts.iter().flatten().flat_map(|x| x.to_le_bytes()));
    }
    let d: Matrix<f64> = (0..rows)
        .map(|row| {
            let sum = |column: usize| {
                // From the far end, unlike the interpreter.
                let terms = (0..depth).rev().map(|k| a[row][k] * b[k][column]);
                terms.sum::<f64>() + c[row][column]
            };
            (0..8).map(sum).collect()
        })
        .collect();
    let expected = (0..32).flat_map(|lane| sums_of(&d, lane)).flat_map(f64::to_le_bytes).collect();
    let [na, nb, nc] = counts;
    let loads: String = ["a", "b", "c"]
        .iter()
        .zip(counts)
        .flat_map(|(name, count)| (0..count).map(move |i| format!("%{name}{i}")))
        .enumerate()
        .map(|(place, name)| format!("ld.global.f64 {name}, [%d3+{}];\n", 8 * place))
        .collect();
    let stores: String =
        (0..nc).map(|i| format!("st.global.f64 [%d4+{}], %e{i};\n", 8 * i)).collect();
    let body = format!(
        ".reg .f64 %a<8>, %b<8>, %c<8>, %e<8>;\n\
         mul.wide.u32 %d3, %r1, {}; add.s64 %d3, %d1, %d3;\n{loads}\
         {instruction} {{{}}}, {{{}}}, {{{}}}, {{{}}};\n\
         mul.wide.u32 %d4, %r1, {}; add.s64 %d4, %d2, %d4;\n{stores}",
        8 * (na + nb + nc),
        list("e", nc),
        list("a", na),
        list("b", nb),
        list("c", nc),
        8 * nc
    );
    let mut job =
        warp(format!("{instruction} of {data:?} data"), &body, input, Kind::F64, expected);
    (job.precision, job.golden) = precisions("f64", data);
    if rows == 16 { newer(job) } else { job }
}

/// A product of integers of a few bits, or of single bits that `operation` joins.
fn integers(
    rows: usize,
    depth: usize,
    [a_type, b_type]: [&str; 2],
    saturate: &str,
    operation: &str,
) -> Job {
    let width: usize = a_type[1..].parse().expect("a width");
    let mut random = Random::new(800 + rows as u64 + depth as u64 + operation.len() as u64);
    let mut draw = |ty: &str| {
        let bits = random.next() >> 20;
        match ty {
            "s8" => i64::from(bits as i8),
            "u8" => i64::from(bits as u8),
            "s4" => (bits & 15) as i64 - 8,
            "u4" => (bits & 15) as i64,
            "b1" => (bits & 1) as i64,
            // Near the ends, so that sums overflow.
            _ if bits & 3 == 0 => 2_147_483_000,
            _ if bits & 3 == 1 => -2_147_483_000,
            _ => i64::from(bits as i16),
        }
    };
    let a = matrix(rows, depth, || draw(a_type));
    let b = matrix(depth, 8, || draw(b_type));
    let c = matrix(rows, 8, || draw("s32"));
    let n = 32 / width;
    let packed = |elements: &[i64]| -> Vec<u32> {
        let mask = ((1u64 << width) - 1) as i64;
        let word = |part: &[i64]| {
            part.iter().rev().fold(0u64, |word, x| word << width | (x & mask) as u64) as u32
        };
        elements.chunks(n).map(word).collect()
    };
    let mut input = Vec::new();
    let mut counts = [0; 3];
    for lane in 0..32 {
        let [of_a, of_b, of_c] = dealt(n, [&a, &b, &c], lane);
        let parts = [packed(&of_a), packed(&of_b), of_c.iter().map(|x| *x as u32).collect()];
        counts = [0, 1, 2].map(|i| parts[i].len());
        input.extend(parts.iter().flat_map(|part| bytes32(part)));
    }
    let join = |x: i64, y: i64| match operation {
        ".and.popc" => x & y,
        ".xor.popc" => x ^ y,
        _ => x * y,
    };
    let d: Matrix<u32> = (0..rows)
        .map(|row| {
            let sum = |column: usize| {
                let terms = (0..depth).map(|k| join(a[row][k], b[k][column]));
                let sum = terms.sum::<i64>() + c[row][column];
                if saturate.is_empty() {
                    sum as u32
                } else {
                    sum.clamp(i32::MIN.into(), i32::MAX.into()) as u32
                }
            };
            (0..8).map(sum).collect()
        })
        .collect();
    let expected: Vec<u32> = (0..32).flat_map(|lane| sums_of(&d, lane)).collect();
    let instruction = format!(
        "mma.sync.aligned.m{rows}n8k{depth}.row.col{saturate}.s32.{a_type}.{b_type}.s32{operation}"
    );
    let [na, nb, nc] = counts;
    let loads: String = (0..na + nb + nc)
        .map(|i| format!("ld.global.b32 %r{}, [%d3+{}];\n", 10 + i, 4 * i))
        .collect();
    let stores: String =
        (0..nc).map(|i| format!("st.global.b32 [%d4+{}], %e{i};\n", 4 * i)).collect();
    let registers = |from: usize, count: usize| {
        (from..from + count).map(|i| format!("%r{i}")).collect::<Vec<_>>().join(", ")
    };
    let body = format!(
        ".reg .b32 %e<4>; mul.wide.u32 %d3, %r1, {}; add.s64 %d3, %d1, %d3;\n{loads}\
         {instruction} {{{}}}, {{{}}}, {{{}}}, {{{}}};\n\
         mul.wide.u32 %d4, %r1, {}; add.s64 %d4, %d2, %d4;\n{stores}",
        4 * (na + nb + nc),
        list("e", nc),
        registers(10, na),
        registers(10 + na, nb),
        registers(10 + na + nb, nc),
        4 * nc
    );
    warp(instruction, &body, input, Kind::B32, bytes32(&expected))
}

/// How a matrix lies in memory.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Layout {
    Row,
    Col,
}

use Layout::{Col, Row};

const LAYOUTS: [[Layout; 4]; 4] =
    [[Row, Col, Row, Row], [Col, Row, Col, Row], [Row, Row, Row, Col], [Col, Col, Col, Col]];

fn wmma_jobs(jobs: &mut Vec<Job>) {
    const SHAPES: [[usize; 3]; 3] = [[16, 16, 16], [8, 32, 16], [32, 8, 16]];
    for shape in SHAPES {
        for types in [
            ["f32", "f16", "f16", "f32"],
            ["f16", "f16", "f16", "f16"],
            ["f32", "f16", "f16", "f16"],
            ["f16", "f16", "f16", "f32"],
            ["f32", "bf16", "bf16", "f32"],
            ["s32", "s8", "s8", "s32"],
            ["s32", "u8", "u8", "s32"],
        ] {
            for (index, layouts) in LAYOUTS.into_iter().enumerate() {
                let data = [Data::Whole, Data::Real, Data::Special][index % 3];
                jobs.push(wmma(shape, types, layouts, data));
            }
        }
    }
    for (shape, ty, sum) in [([16, 16, 8], "tf32", "f32"), ([8, 8, 4], "f64", "f64")] {
        for layouts in LAYOUTS {
            for data in [Data::Whole, Data::Real, Data::Special] {
                jobs.push(wmma(shape, [sum, ty, ty, sum], layouts, data));
            }
        }
    }
}

fn size(ty: &str) -> usize {
    match ty {
        "f64" => 8,
        "f16" | "bf16" => 2,
        "s8" | "u8" => 1,
        _ => 4,
    }
}

fn bits(ty: &str, x: f64) -> u64 {
    if ty == "f64" { x.to_bits() } else { encode(ty, x).into() }
}

/// A matrix of a type in memory.
struct Stored {
    values: Matrix<f64>,
    bytes: Vec<u8>,
    /// Elements from row to row, or from column to column.
    stride: usize,
}

/// The bytes of a matrix, padded at the end of its rows or columns; those of the pad are 0.
fn stored(ty: &str, layout: Layout, values: Matrix<f64>) -> Stored {
    let (rows, columns) = (values.len(), values[0].len());
    let (major, minor) = if layout == Row { (rows, columns) } else { (columns, rows) };
    // A GPU wants the beginning of each aligned to all that a lane holds: at most 32 bytes.
    let stride = (minor + 16).next_multiple_of(16);
    let size = size(ty);
    let mut bytes = vec![0; major * stride * size];
    for (i, line) in bytes.chunks_mut(stride * size).enumerate() {
        for (j, cell) in line.chunks_mut(size).take(minor).enumerate() {
            let x = if layout == Row { values[i][j] } else { values[j][i] };
            cell.copy_from_slice(&self::bits(ty, x).to_le_bytes()[..size]);
        }
    }
    Stored { values, bytes, stride }
}

/// Loads of three matrices, a product, and a store; the numbers of registers are those of the ISA.
fn wmma(shape: [usize; 3], types: [&str; 4], layouts: [Layout; 4], data: Data) -> Job {
    let [rows, columns, depth] = shape;
    let [d_type, a_type, b_type, c_type] = types;
    let [a_layout, b_layout, c_layout, d_layout] = layouts;
    let mut random = Random::new(900 + (rows * columns + depth) as u64 + size(a_type) as u64);
    let mut fill = |ty: &str, rows, columns, small| -> Matrix<f64> {
        matrix(rows, columns, || {
            let x = draw(&mut random, ty, data, small);
            if ty == "f64" { x } else { decode(ty, encode(ty, x)) }
        })
    };
    let a = stored(a_type, a_layout, fill(a_type, rows, depth, true));
    let b = stored(b_type, b_layout, fill(b_type, depth, columns, false));
    let c = stored(c_type, c_layout, fill(c_type, rows, columns, false));
    let sum = |row: usize, column: usize| {
        let terms = (0..depth).rev().map(|k| a.values[row][k] * b.values[k][column]);
        let sum = terms.sum::<f64>() + c.values[row][column];
        // Without `.satfinite` integers wrap.
        if d_type == "s32" { (sum as i64 as i32).into() } else { sum }
    };
    let d = (0..rows).map(|row| (0..columns).map(|column| sum(row, column)).collect()).collect();
    let d = stored(d_type, d_layout, d);
    let registers = |ty: &str, rows: usize, columns: usize, factor: bool| match ty {
        "f16" if factor => 8,
        _ => rows * columns * size(ty) / 32 / if ty == "f64" { 8 } else { 4 },
    };
    let na = registers(a_type, rows, depth, true);
    let nb = registers(b_type, depth, columns, true);
    let nc = registers(c_type, rows, columns, false);
    let nd = registers(d_type, rows, columns, false);
    let name = |layout: Layout| if layout == Row { "row" } else { "col" };
    let shape = format!("m{rows}n{columns}k{depth}");
    let [la, lb, lc, ld] = layouts.map(name);
    let of_types = match a_type {
        "f16" => format!("{d_type}.{c_type}"),
        _ => format!("{d_type}.{a_type}.{b_type}.{c_type}"),
    };
    let aligned = |at: usize| at.next_multiple_of(256);
    let b_at = aligned(a.bytes.len());
    let c_at = aligned(b_at + b.bytes.len());
    let mut input = a.bytes.clone();
    input.resize(b_at, 0);
    input.extend(&b.bytes);
    input.resize(c_at, 0);
    input.extend(&c.bytes);
    let ty = if d_type == "f64" { "f64" } else { "b32" };
    let instruction = format!("wmma.mma.sync.aligned.{la}.{lb}.{shape}.{of_types}");
    let body = format!(
        ".reg .{ty} %a<8>, %b<8>, %c<8>, %e<8>;\n\
         add.s64 %d3, %d1, {b_at}; add.s64 %d4, %d1, {c_at}; mov.u32 %r2, {};\n\
         wmma.load.a.sync.aligned.{la}.{shape}.global.{a_type} {{{}}}, [%d1], %r2;\n\
         wmma.load.b.sync.aligned.{lb}.{shape}.{b_type} {{{}}}, [%d3], {};\n\
         wmma.load.c.sync.aligned.{lc}.{shape}.global.{c_type} {{{}}}, [%d4], {};\n\
         {instruction} {{{}}}, {{{}}}, {{{}}}, {{{}}};\n\
         wmma.store.d.sync.aligned.{ld}.{shape}.global.{d_type} [%d2], {{{}}}, {};\n",
        a.stride,
        list("a", na),
        list("b", nb),
        b.stride,
        list("c", nc),
        c.stride,
        list("e", nd),
        list("a", na),
        list("b", nb),
        list("c", nc),
        list("e", nd),
        d.stride
    );
    let kind = match d_type {
        "f16" => Kind::F16,
        "f32" => Kind::F32,
        "f64" => Kind::F64,
        _ => Kind::B32,
    };
    let name = format!("{instruction} of {data:?} data, c.{lc}, d.{ld}");
    let mut job = warp(name, &body, input, kind, d.bytes);
    (job.precision, job.golden) = precisions(d_type, data);
    job
}
