//! Instructions of several lanes, and atomics.

use super::job::{Argument, Job, Kind, Launch, Precision};
use super::table::{Case, EDGES32, EDGES64, Random, Row, cross};

pub(crate) fn jobs() -> Vec<Job> {
    let mut jobs = Vec::new();
    shuffles(&mut jobs);
    votes(&mut jobs);
    matches(&mut jobs);
    reductions(&mut jobs);
    atomics(&mut jobs);
    jobs
}

/// Four warps, as many rows.
fn rows(seed: u64, values: u64) -> Vec<Row> {
    let mut random = Random::new(seed);
    (0..128)
        .map(|_| {
            let value = random.next();
            [if values == 0 { value } else { value % values }, random.next() & 63, random.next()]
        })
        .collect()
}

/// A job whose host computation sees all rows of a warp, and the number of the lane.
fn of_warp(
    text: impl Into<String>,
    types: [&'static str; 4],
    rows: &[Row],
    host: impl Fn(&[Row], usize) -> u64,
) -> Job {
    let mut job = Case::new(text, types, rows, |_| 0).job();
    let size = job.kind.size();
    job.expected = rows
        .chunks(32)
        .flat_map(|warp| (0..32).map(move |lane| (warp, lane)))
        .flat_map(|(warp, lane)| host(warp, lane).to_le_bytes()[..size].to_vec())
        .collect();
    job
}

fn shuffles(jobs: &mut Vec<Job>) {
    // The lane that is read, and whether it lies in range, as the PTX ISA has it.
    fn source(mode: &str, lane: usize, b: u64, c: u32) -> (usize, bool) {
        let (b, c, mask) = ((b & 31) as usize, (c & 31) as usize, (c >> 8 & 31) as usize);
        let most = (lane & mask) | (c & !mask);
        let (from, inside) = match mode {
            "up" => (lane.wrapping_sub(b), lane as i64 - b as i64 >= most as i64),
            "down" => (lane + b, lane + b <= most),
            "bfly" => (lane ^ b, lane ^ b <= most),
            _ => {
                let from = (lane & mask) | (b & !mask);
                (from, from <= most)
            }
        };
        if inside { (from, true) } else { (lane, false) }
    }
    let rows = rows(1, 0);
    for mode in ["up", "down", "bfly", "idx"] {
        for c in [0x1fu32, 0, 0x0f, 0x181f, 0x1c07, 0x1e01] {
            let text = format!("shfl.sync.{mode}.b32 $0|%p4, $1, $2, {c:#x}, -1;");
            jobs.push(of_warp(text, ["b32"; 4], &rows, |warp, lane| {
                warp[source(mode, lane, warp[lane][1], c).0][0] & 0xffff_ffff
            }));
            let text = format!("shfl.sync.{mode}.b32 %r4|$0, $1, $2, {c:#x}, -1;");
            jobs.push(of_warp(text, ["pred", "b32", "b32", "b32"], &rows, |warp, lane| {
                u64::from(source(mode, lane, warp[lane][1], c).1)
            }));
        }
    }
}

fn votes(jobs: &mut Vec<Job>) {
    // Warps where all, none and some of the predicates hold.
    let mut rows = rows(2, 2);
    rows[..32].iter_mut().for_each(|row| row[0] = 1);
    rows[32..64].iter_mut().for_each(|row| row[0] = 0);
    type Vote = (&'static str, fn(u32) -> bool);
    let votes: [Vote; 3] =
        [("all", |v| v == !0), ("any", |v| v != 0), ("uni", |v| v == 0 || v == !0)];
    let ballot = |warp: &[Row]| (0..32).map(|lane| (warp[lane][0] as u32 & 1) << lane).sum::<u32>();
    let types = ["pred", "pred", "b32", "b32"];
    for (name, holds) in votes {
        let text = format!("vote.sync.{name}.pred $0, $1, -1;");
        jobs.push(of_warp(text, types, &rows, |warp, _| u64::from(holds(ballot(warp)))));
        let text = format!("vote.sync.{name}.pred $0, !$1, -1;");
        jobs.push(of_warp(text, types, &rows, |warp, _| u64::from(holds(!ballot(warp)))));
    }
    let types = ["b32", "pred", "b32", "b32"];
    jobs.push(of_warp("vote.sync.ballot.b32 $0, $1, -1;", types, &rows, |warp, _| {
        ballot(warp).into()
    }));
}

fn matches(jobs: &mut Vec<Job>) {
    let mut rows = rows(3, 5);
    rows[..32].iter_mut().for_each(|row| row[0] = 7);
    // Values that differ in the upper word only.
    rows[96..].iter_mut().for_each(|row| row[0] = (row[0] & 1) << 40);
    for (width, kept) in [(32, 0xffff_ffff), (64, u64::MAX)] {
        let register = super::integers::register(width);
        let equal = move |warp: &[Row], lane: usize| {
            let same = |other: usize| (warp[other][0] ^ warp[lane][0]) & kept == 0;
            (0..32).map(|other| u64::from(same(other)) << other).sum::<u64>()
        };
        let types = ["b32", register, "b32", "b32"];
        let text = format!("match.any.sync.b{width} $0, $1, -1;");
        jobs.push(of_warp(text, types, &rows, equal));
        let text = format!("match.all.sync.b{width} $0|%p4, $1, -1;");
        jobs.push(of_warp(text, types, &rows, move |warp, lane| {
            if equal(warp, lane) == 0xffff_ffff { 0xffff_ffff } else { 0 }
        }));
    }
}

fn reductions(jobs: &mut Vec<Job>) {
    let rows = rows(4, 0);
    type Reduction = (&'static str, fn(u32, u32) -> u32);
    let reductions: [Reduction; 8] = [
        ("add.u32", u32::wrapping_add),
        ("add.s32", u32::wrapping_add),
        ("min.u32", u32::min),
        ("max.u32", u32::max),
        ("min.s32", |a, b| (a as i32).min(b as i32) as u32),
        ("max.s32", |a, b| (a as i32).max(b as i32) as u32),
        ("and.b32", |a, b| a & b),
        ("xor.b32", |a, b| a ^ b),
    ];
    for (name, join) in reductions {
        let text = format!("redux.sync.{name} $0, $1, -1;");
        jobs.push(of_warp(text, ["b32"; 4], &rows, |warp, _| {
            let values = warp.iter().map(|row| row[0] as u32);
            values.reduce(join).unwrap_or(0).into()
        }));
    }
}

/// Where a cell's value comes from, after the values of all its threads.
type Join = fn(u64, u64) -> u64;

fn atomics(jobs: &mut Vec<Job>) {
    let f32_sum: Join =
        |a, b| u64::from((f32::from_bits(a as u32) + f32::from_bits(b as u32)).to_bits());
    let f64_sum: Join = |a, b| (f64::from_bits(a) + f64::from_bits(b)).to_bits();
    let words: [(&str, Join); 11] = [
        ("add.u32", |a, b| (a + b) & 0xffff_ffff),
        ("min.u32", u64::min),
        ("max.u32", u64::max),
        ("min.s32", |a, b| (a as i32).min(b as i32) as u32 as u64),
        ("max.s32", |a, b| (a as i32).max(b as i32) as u32 as u64),
        ("and.b32", |a, b| a & b),
        ("or.b32", |a, b| a | b),
        ("xor.b32", |a, b| a ^ b),
        // Counters up to, and down from, a limit that all threads share.
        ("inc.u32", |a, _| if a >= 5 { 0 } else { a + 1 }),
        ("dec.u32", |a, _| if a == 0 || a > 5 { 5 } else { a - 1 }),
        ("add.f32", f32_sum),
    ];
    let longs: [(&str, Join); 9] = [
        ("add.u64", u64::wrapping_add),
        ("min.u64", u64::min),
        ("max.u64", u64::max),
        ("min.s64", |a, b| (a as i64).min(b as i64) as u64),
        ("max.s64", |a, b| (a as i64).max(b as i64) as u64),
        ("and.b64", |a, b| a & b),
        ("or.b64", |a, b| a | b),
        ("xor.b64", |a, b| a ^ b),
        ("add.f64", f64_sum),
    ];
    let mut random = Random::new(8);
    let edges = cross(&EDGES32.map(u64::from), 31, || random.next() & 0xffff_ffff);
    let words_of = |name: &str| -> Vec<u64> {
        edges
            .iter()
            .map(|row| match name {
                "inc.u32" | "dec.u32" => 5,
                "add.f32" => u64::from((row[0] as i32 as f32 / 65536.0).trunc().to_bits()),
                _ => row[0],
            })
            .collect()
    };
    let mut random = Random::new(9);
    let edges64 = cross(&EDGES64, 56, || random.next());
    let longs_of = |name: &str| -> Vec<u64> {
        edges64
            .iter()
            .map(|row| match name {
                "add.f64" => ((row[0] as i64 >> 20) as f64).to_bits(),
                _ => row[0],
            })
            .collect()
    };
    for space in ["global", "shared"] {
        for (name, join) in words {
            jobs.push(atomic(space, name, 4, &words_of(name), join));
        }
        for (name, join) in longs {
            jobs.push(atomic(space, name, 8, &longs_of(name), join));
        }
    }
    jobs.push(compare_and_swap());
}

/// Threads of one block combine their values in 16 cells.
fn atomic(space: &str, name: &str, size: usize, values: &[u64], join: Join) -> Job {
    let (r, b) = if size == 4 { ("%r3", "b32") } else { ("%d8", "b64") };
    let ptx = format!(
        ".version 8.0\n.target sm_80\n.address_size 64\n\
         .visible .entry k(.param .u64 p0, .param .u64 p1)\n{{\n\
         .reg .b32 %r<9>; .reg .b64 %d<9>; .reg .pred %p<3>; .shared .align 8 .b8 cells[128];\n\
         ld.param.u64 %d1, [p0]; ld.param.u64 %d2, [p1]; mov.u32 %r1, %tid.x;\n\
         and.b32 %r2, %r1, 15; mul.wide.u32 %d3, %r2, {size}; add.s64 %d4, %d2, %d3;\n\
         mov.u64 %d5, cells; add.s64 %d5, %d5, %d3; setp.lt.u32 %p1, %r1, 16;\n\
         @%p1 ld.global.{b} {r}, [%d4]; @%p1 st.shared.{b} [%d5], {r}; bar.sync 0;\n\
         mul.wide.u32 %d6, %r1, {size}; add.s64 %d6, %d1, %d6; ld.global.{b} {r}, [%d6];\n\
         red.{space}.{name} [{at}], {r}; bar.sync 0;\n\
         {back}ret;\n}}\n",
        at = if space == "global" { "%d4" } else { "%d5" },
        back = if space == "global" {
            String::new()
        } else {
            format!("@%p1 ld.shared.{b} {r}, [%d5]; @%p1 st.global.{b} [%d4], {r};\n")
        },
    );
    let pack = |values: &[u64]| -> Vec<u8> {
        values.iter().flat_map(|value| value.to_le_bytes()[..size].to_vec()).collect()
    };
    let start: Vec<u64> =
        (0..16).map(|cell| if cell % 2 == 0 { 0 } else { values[cell] }).collect();
    let mut cells = start.clone();
    for (thread, &value) in values.iter().enumerate() {
        cells[thread % 16] = join(cells[thread % 16], value);
    }
    Job {
        name: format!("red.{space}.{name}"),
        ptx,
        buffers: vec![pack(values), pack(&start)],
        launches: vec![Launch {
            kernel: "k",
            shape: (1, values.len() as u32, 0),
            arguments: vec![Argument::Buffer(0), Argument::Buffer(1)],
        }],
        result: 1,
        kind: if size == 4 { Kind::B32 } else { Kind::B64 },
        expected: pack(&cells),
        pictures: Vec::new(),
        precision: Precision::Exact,
        golden: Precision::Exact,
    }
}

/// A product that is kept by `atom.cas`, one factor from each thread.
fn compare_and_swap() -> Job {
    let ptx = ".version 8.0\n.target sm_80\n.address_size 64\n\
         .visible .entry k(.param .u64 p0, .param .u64 p1)\n{\n\
         .reg .b32 %r<9>; .reg .b64 %d<9>; .reg .pred %p<3>;\n\
         ld.param.u64 %d1, [p0]; ld.param.u64 %d2, [p1]; mov.u32 %r1, %tid.x;\n\
         mul.wide.u32 %d3, %r1, 4; add.s64 %d3, %d1, %d3; ld.global.u32 %r2, [%d3];\n\
         ld.global.u32 %r3, [%d2];\n\
         again: mul.lo.u32 %r4, %r3, %r2; atom.global.cas.b32 %r5, [%d2], %r3, %r4;\n\
         setp.ne.u32 %p1, %r5, %r3; mov.u32 %r3, %r5; @%p1 bra again; ret;\n}\n";
    let mut random = Random::new(10);
    let values: Vec<u32> = (0..96).map(|_| random.next() as u32 | 1).collect();
    let product = values.iter().fold(3u32, |product, &value| product.wrapping_mul(value));
    Job {
        name: "atom.global.cas.b32 in a loop".to_owned(),
        ptx: ptx.to_owned(),
        buffers: vec![super::job::bytes32(&values), super::job::bytes32(&[3])],
        launches: vec![Launch {
            kernel: "k",
            shape: (1, 96, 0),
            arguments: vec![Argument::Buffer(0), Argument::Buffer(1)],
        }],
        result: 1,
        kind: Kind::B32,
        expected: super::job::bytes32(&[product]),
        pictures: Vec::new(),
        precision: Precision::Exact,
        golden: Precision::Exact,
    }
}
