//! Rows of inputs, and the kernel that runs one instruction over them.

use super::job::{Argument, Job, Kind, Launch, Precision};

/// The inputs `$1`, `$2` and `$3` of one execution.
pub(crate) type Row = [u64; 3];

/// One line of the table: an instruction, or a few, that make `$0` of `$1`, `$2` and `$3`.
pub(crate) struct Case {
    pub(crate) text: String,
    /// Of the result and the inputs: `b16`, `b32`, `b64` or `pred`.
    pub(crate) types: [&'static str; 4],
    pub(crate) kind: Kind,
    pub(crate) rows: Vec<Row>,
    pub(crate) host: Box<dyn Fn(Row) -> u64>,
    pub(crate) precision: Precision,
    pub(crate) golden: Precision,
}

impl Case {
    /// A case whose result is compared bit for bit.
    pub(crate) fn new(
        text: impl Into<String>,
        types: [&'static str; 4],
        rows: &[Row],
        host: impl Fn(Row) -> u64 + 'static,
    ) -> Case {
        let kind = match types[0] {
            "b16" => Kind::B16,
            "b64" => Kind::B64,
            _ => Kind::B32,
        };
        Case {
            text: text.into(),
            types,
            kind,
            rows: rows.to_vec(),
            host: Box::new(host),
            precision: Precision::Exact,
            golden: Precision::Exact,
        }
    }

    /// The result is a floating-point number; any NaN is as good as another.
    pub(crate) fn number(self, kind: Kind) -> Case {
        Case { kind, precision: Precision::Numbers, golden: Precision::Numbers, ..self }
    }

    /// The result may be off, from the host and from a GPU.
    pub(crate) fn within(self, kind: Kind, relative: f64, absolute: f64) -> Case {
        let precision = Precision::Within { relative, absolute };
        Case { kind, precision, golden: precision, ..self }
    }

    pub(crate) fn job(self) -> Job {
        let count = self.rows.len();
        let input = self.rows.iter().flatten().flat_map(|word| word.to_le_bytes()).collect();
        let size = self.kind.size();
        let expected =
            self.rows.iter().flat_map(|row| (self.host)(*row).to_le_bytes()[..size].to_vec());
        let launch = Launch {
            kernel: "k",
            shape: (count.div_ceil(128) as u32, 128, 0),
            arguments: vec![Argument::Buffer(0), Argument::Buffer(1), Argument::U32(count as u32)],
        };
        Job {
            ptx: kernel(&self.text, self.types),
            expected: expected.collect(),
            buffers: vec![input, vec![0; size * count]],
            pictures: Vec::new(),
            launches: vec![launch],
            result: 1,
            kind: self.kind,
            precision: self.precision,
            golden: self.golden,
            name: self.text,
        }
    }
}

fn letter(ty: &str) -> char {
    match ty {
        "b16" => 'h',
        "b32" => 'r',
        "b64" => 'd',
        _ => 'p',
    }
}

/// A module whose kernel `k(inputs, results, rows)` gives each thread one row.
fn kernel(text: &str, types: [&str; 4]) -> String {
    let mut body = String::new();
    let mut line = text.to_owned();
    for (index, ty) in types.iter().enumerate().rev() {
        let name = format!("%{}{index}", letter(ty));
        line = line.replace(&format!("${index}"), &name);
        if index == 0 {
            continue;
        }
        let from = 8 * (index - 1);
        if letter(ty) == 'p' {
            body += &format!("ld.global.u32 %r7, [%a3+{from}]; setp.ne.u32 {name}, %r7, 0;\n");
        } else {
            body += &format!("ld.global.{ty} {name}, [%a3+{from}];\n");
        }
    }
    body += &format!("{line}\n");
    let (size, store) = match types[0] {
        "b16" => (2, "st.global.b16 [%a5], %h0;"),
        "b64" => (8, "st.global.b64 [%a5], %d0;"),
        "b32" => (4, "st.global.b32 [%a5], %r0;"),
        _ => (4, "selp.u32 %r0, 1, 0, %p0; st.global.u32 [%a5], %r0;"),
    };
    // Instructions that came with a later architecture.
    let newer = [
        "cvt.f32.bf16",
        "ex2.approx.ftz.bf16",
        "tanh.approx.bf16",
        "e4m3",
        "e5m2",
        ".s16x2",
        ".u16x2",
        "relu.s32",
    ];
    let target = if newer.iter().any(|name| text.contains(name)) { "sm_90" } else { "sm_80" };
    if text.contains("%b0") {
        body.insert_str(0, ".reg .b8 %b0;\n");
    }
    let predicated = ["lop3.or", "lop3.and"].iter().any(|name| text.contains(name));
    let version = if predicated { "8.2" } else { "8.0" };
    format!(
        ".version {version}\n.target {target}\n.address_size 64\n\
         .visible .entry k(.param .u64 p0, .param .u64 p1, .param .u32 p2)\n{{\n\
         .reg .b16 %h<9>; .reg .b32 %r<12>; .reg .b64 %d<9>; .reg .pred %p<9>; .reg .b64 %a<9>;\n\
         .reg .pred %out; .reg .b32 %i, %n;\n\
         mov.u32 %i, %tid.x; mov.u32 %r8, %ctaid.x; mad.lo.u32 %i, %r8, 128, %i;\n\
         ld.param.u32 %n, [p2]; setp.ge.u32 %out, %i, %n; @%out ret;\n\
         ld.param.u64 %a1, [p0]; mul.wide.u32 %a2, %i, 24; add.s64 %a3, %a1, %a2;\n\
         {body}ld.param.u64 %a4, [p1]; mad.wide.u32 %a5, %i, {size}, %a4;\n{store} ret;\n}}\n"
    )
}

/// A sequence of numbers without pattern, the same every time (xorshift64*).
pub(crate) struct Random(u64);

impl Random {
    pub(crate) fn new(seed: u64) -> Random {
        Random(seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1)
    }

    pub(crate) fn next(&mut self) -> u64 {
        self.0 ^= self.0 >> 12;
        self.0 ^= self.0 << 25;
        self.0 ^= self.0 >> 27;
        self.0.wrapping_mul(0x2545_f491_4f6c_dd1d)
    }
}

pub(crate) const EDGES16: [u16; 10] = [0, 1, 2, 15, 16, 0x7fff, 0x8000, 0x8001, 0xffff, 0x1234];
pub(crate) const EDGES32: [u32; 13] = [
    0,
    1,
    2,
    24,
    31,
    32,
    33,
    0x7fff_ffff,
    0x8000_0000,
    0x8000_0001,
    0xffff_ffff,
    0xffff_fffe,
    0x1234_5678,
];
pub(crate) const EDGES64: [u64; 12] = [
    0,
    1,
    31,
    63,
    64,
    i64::MAX as u64,
    i64::MIN as u64,
    i64::MIN as u64 + 1,
    u64::MAX,
    0xffff_ffff,
    0x1_0000_0000,
    0x0123_4567_89ab_cdef,
];
pub(crate) const HALVES: [u16; 14] = [
    0x0000, 0x8000, 0x3c00, 0xbc00, 0x3800, 0x0001, 0x83ff, 0x0400, 0x7bff, 0xfbff, 0x7c00, 0xfc00,
    0x7e01, 0x1234,
];
pub(crate) const BRAINS: [u16; 13] = [
    0x0000, 0x8000, 0x3f80, 0xbf80, 0x3f00, 0x0001, 0x807f, 0x0080, 0x7f7f, 0x7f80, 0xff80, 0x7fc1,
    0x4049,
];
pub(crate) const FLOATS: [f32; 17] = [
    0.0,
    -0.0,
    1.0,
    -1.0,
    0.5,
    1.5,
    -2.5,
    3.999_999_8,
    f32::MAX,
    f32::MIN_POSITIVE,
    1e-40,
    -1e-45,
    f32::INFINITY,
    f32::NEG_INFINITY,
    f32::NAN,
    4_294_967_300.0,
    -1e10,
];
pub(crate) const DOUBLES: [f64; 14] = [
    0.0,
    -0.0,
    1.0,
    -1.5,
    0.1,
    1e300,
    -1e300,
    2.2e-308,
    1e-310,
    -5e-324,
    f64::INFINITY,
    f64::NEG_INFINITY,
    f64::NAN,
    9_007_199_254_740_993.0,
];

/// All pairs of edges with a third in turn, then random rows.
pub(crate) fn cross(edges: &[u64], random: usize, mut next: impl FnMut() -> u64) -> Vec<Row> {
    let pairs = edges.iter().flat_map(|&a| edges.iter().map(move |&b| [a, b]));
    let mut rows: Vec<Row> = pairs
        .enumerate()
        .map(|(index, [a, b])| [a, b, edges[(index / 3 + 5) % edges.len()]])
        .collect();
    rows.extend((0..random).map(|_| [next(), next(), next()]));
    rows
}

/// The edges, then random values, as the only input.
pub(crate) fn single(edges: &[u64], random: usize, mut next: impl FnMut() -> u64) -> Vec<Row> {
    let mut rows: Vec<Row> = edges.iter().map(|&a| [a, 0, 0]).collect();
    rows.extend((0..random).map(|_| [next(), 0, 0]));
    rows
}

/// Random numbers of single precision: half of them of any size, half within a few powers of two.
pub(crate) fn random_f32(random: &mut Random) -> u64 {
    let bits = random.next();
    let near = (bits >> 32) as u32 & 0x807f_ffff | (120 + (bits as u32 & 15)) << 23;
    u64::from(if bits & 16 == 0 { (bits >> 32) as u32 } else { near })
}

pub(crate) fn random_f64(random: &mut Random) -> u64 {
    let bits = random.next();
    let near = bits & 0x800f_ffff_ffff_ffff | (1015 + (random.next() & 15)) << 52;
    if random.next() & 1 == 0 { bits } else { near }
}

pub(crate) fn rows16() -> Vec<Row> {
    let mut random = Random::new(16);
    cross(&EDGES16.map(u64::from), 60, || random.next() & 0xffff)
}

pub(crate) fn rows32() -> Vec<Row> {
    let mut random = Random::new(32);
    cross(&EDGES32.map(u64::from), 55, || random.next() >> (32 + (random.next() & 31)))
}

pub(crate) fn rows64() -> Vec<Row> {
    let mut random = Random::new(64);
    cross(&EDGES64, 56, || random.next() >> (random.next() & 63))
}

pub(crate) fn float_rows() -> Vec<Row> {
    let mut random = Random::new(132);
    cross(&FLOATS.map(|x| u64::from(x.to_bits())), 95, || random_f32(&mut random))
}

pub(crate) fn double_rows() -> Vec<Row> {
    let mut random = Random::new(164);
    cross(&DOUBLES.map(f64::to_bits), 60, || random_f64(&mut random))
}

pub(crate) fn half_rows(edges: &[u16]) -> Vec<Row> {
    let mut random = Random::new(116);
    let edges: Vec<u64> = edges.iter().map(|&x| x.into()).collect();
    cross(&edges, 60, || random.next() & 0xffff)
}
