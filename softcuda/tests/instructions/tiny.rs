//! Pairs of floating-point numbers of eight bits and less. The numbers of a format are listed here, and
//! what a conversion gives is the nearest of them.

use super::floats::f32_of;
use super::job::Kind;
use super::table::{Case, Row, float_rows, half_rows};
use half::f16;

/// A format: bits of the exponent and of the fraction, the bias, and the greatest number.
#[derive(Clone, Copy)]
struct Format {
    name: &'static str,
    exponent: u32,
    fraction: u32,
    bias: i32,
    greatest: u64,
    /// What a number that is none becomes.
    nan: u64,
}

const FORMATS: [Format; 2] = [
    Format { name: "e4m3x2", exponent: 4, fraction: 3, bias: 7, greatest: 0x7e, nan: 0x7f },
    Format { name: "e5m2x2", exponent: 5, fraction: 2, bias: 15, greatest: 0x7b, nan: 0x7f },
];

/// Formats that came with another architecture.
const SMALLER: [Format; 3] = [
    Format { name: "e3m2x2", exponent: 3, fraction: 2, bias: 3, greatest: 0x1f, nan: 0x1f },
    Format { name: "e2m3x2", exponent: 2, fraction: 3, bias: 1, greatest: 0x1f, nan: 0x1f },
    Format { name: "e2m1x2", exponent: 2, fraction: 1, bias: 1, greatest: 0x7, nan: 0x7 },
];

impl Format {
    fn sign(self) -> u64 {
        1 << (self.exponent + self.fraction)
    }

    fn value(self, bits: u64) -> f64 {
        let (magnitude, sign) = (bits & (self.sign() - 1), bits & self.sign());
        let (high, low) = (magnitude >> self.fraction, magnitude & ((1 << self.fraction) - 1));
        let part = low as f64 / f64::from(1 << self.fraction);
        let value = match high {
            0 => part * 2f64.powi(1 - self.bias),
            _ => (1.0 + part) * 2f64.powi(high as i32 - self.bias),
        };
        let value = match magnitude {
            0x7c if self.name == "e5m2x2" => f64::INFINITY,
            _ if magnitude > self.greatest => f64::NAN,
            _ => value,
        };
        if sign != 0 { -value } else { value }
    }

    /// The nearest of all numbers; of two that are as near, the even one.
    fn nearest(self, x: f64, relu: bool) -> u64 {
        if x.is_nan() {
            return self.nan;
        }
        if relu && x <= 0.0 {
            return 0;
        }
        let sign = if x.is_sign_negative() { self.sign() } else { 0 };
        let distance = |bits: u64| (self.value(bits) - x.abs().min(1e6)).abs();
        let better = |a: u64, b: u64| match distance(a).total_cmp(&distance(b)) {
            std::cmp::Ordering::Less => a,
            std::cmp::Ordering::Greater => b,
            std::cmp::Ordering::Equal => {
                if a.is_multiple_of(2) {
                    a
                } else {
                    b
                }
            }
        };
        sign | (0..=self.greatest).reduce(better).unwrap_or(0)
    }

    fn pair(self, high: f64, low: f64, relu: bool) -> u64 {
        let width = if self.name == "e2m1x2" { 4 } else { 8 };
        self.nearest(high, relu) << width | self.nearest(low, relu)
    }
}

/// What the formats can hold, and what lies between and beyond that.
fn rows() -> Vec<Row> {
    let mut rows = float_rows();
    for format in FORMATS.into_iter().chain(SMALLER) {
        for bits in 0..format.greatest {
            let (here, next) = (format.value(bits), format.value(bits + 1));
            let between = (here + next) / 2.0;
            let bits = |x: f64| u64::from((x as f32).to_bits());
            rows.push([bits(between), bits(-between), 0]);
            rows.push([bits(here), bits(between * 1.000_01), 0]);
        }
    }
    rows
}

fn format_of(ty: &str) -> Format {
    if ty == "e4m3" { FORMATS[0] } else { FORMATS[1] }
}

/// The bits of a number of `e4m3` or `e5m2`.
pub(crate) fn encode(ty: &str, x: f64) -> u32 {
    format_of(ty).nearest(x, false) as u32
}

/// The number that bits of `e4m3` or `e5m2` stand for.
pub(crate) fn decode(ty: &str, bits: u32) -> f64 {
    format_of(ty).value(bits.into())
}

/// A number with ten bits of fraction; `tie` says what becomes of what is half-way.
fn tf32(x: f32, tie: fn(f64) -> f64) -> u64 {
    if x.is_nan() {
        return 0x7fff_ffff;
    }
    let x = f64::from(x);
    let exponent = x.abs().log2().floor().max(-126.0);
    let unit = 2f64.powi(exponent as i32 - 10);
    let rounded = if x.is_finite() { tie(x / unit) * unit } else { x };
    u64::from((rounded as f32).to_bits())
}

pub(crate) fn cases() -> Vec<Case> {
    let mut cases = Vec::new();
    for format in FORMATS {
        conversions(&mut cases, format);
    }
    let text = "cvt.rna.tf32.f32 $0, $1;";
    let case = Case::new(text, ["b32"; 4], &rows(), |[a, ..]| tf32(f32_of(a), f64::round));
    cases.push(case.number(Kind::F32));
    cases
}

/// Those that no GPU of the table has.
pub(crate) fn newer() -> Vec<Case> {
    let mut cases = Vec::new();
    for format in SMALLER {
        conversions(&mut cases, format);
    }
    for (name, tie) in [("rn", f64::round_ties_even as fn(f64) -> f64), ("rz", f64::trunc)] {
        let text = format!("cvt.{name}.tf32.f32 $0, $1;");
        let case = Case::new(text, ["b32"; 4], &rows(), move |[a, ..]| tf32(f32_of(a), tie));
        cases.push(case.number(Kind::F32));
        let text = format!("cvt.{name}.relu.tf32.f32 $0, $1;");
        let case = Case::new(text, ["b32"; 4], &rows(), move |[a, ..]| {
            let x = f32_of(a);
            if x <= 0.0 { 0 } else { tf32(x, tie) }
        });
        cases.push(case.number(Kind::F32));
    }
    cases
}

fn conversions(cases: &mut Vec<Case>, format: Format) {
    let name = format.name;
    let small = name == "e2m1x2";
    // Four bits each go through a register of eight.
    let (to, out, input, from) = if small {
        ("%b0", " cvt.u16.u8 $0, %b0;", "cvt.u8.u16 %b0, $1; ", "%b0")
    } else {
        ("$0", "", "", "$1")
    };
    for (relu_name, relu) in [("", false), (".relu", true)] {
        let text = format!("cvt.rn.satfinite{relu_name}.{name}.f32 {to}, $1, $2;{out}");
        cases.push(Case::new(text, ["b16", "b32", "b32", "b32"], &rows(), move |[a, b, _]| {
            format.pair(f32_of(a).into(), f32_of(b).into(), relu)
        }));
        if format.greatest >= 0x7b {
            let text = format!("cvt.rn.satfinite{relu_name}.{name}.f16x2 $0, $1;");
            let rows: Vec<Row> = half_rows(&super::table::HALVES)
                .into_iter()
                .map(|[a, b, c]| [a << 16 | b, c, 0])
                .collect();
            cases.push(Case::new(text, ["b16", "b32", "b32", "b32"], &rows, move |[a, ..]| {
                let [high, low] = [a >> 16, a].map(|x| f16::from_bits(x as u16).to_f64());
                format.pair(high, low, relu)
            }));
        }
        let width = if small { 4 } else { 8 };
        let most = format.sign() * 2;
        let all: Vec<Row> =
            (0..most).map(|bits| [(bits << width) | ((bits + 1) % most), 0, 0]).collect();
        for (part, shift) in [("mov.b32 {$0, %h4}, %r4;", 0), ("mov.b32 {%h4, $0}, %r4;", width)] {
            let text = format!("{input}cvt.rn{relu_name}.f16x2.{name} %r4, {from}; {part}");
            let case = Case::new(text, ["b16"; 4], &all, move |[a, ..]| {
                let value = format.value(a >> shift & (most - 1));
                let value = if relu && value <= 0.0 { 0.0 } else { value };
                u64::from(f16::from_f64(value).to_bits())
            });
            cases.push(case.number(Kind::F16));
        }
    }
}
