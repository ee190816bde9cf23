//! Half precision: `f16` and `bf16`, alone and in pairs.

use super::floats::extreme;
use super::job::Kind;
use super::table::{BRAINS, Case, HALVES, Row, half_rows};
use half::{bf16, f16};

/// One of the two formats.
#[derive(Clone, Copy)]
struct Format {
    name: &'static str,
    kind: Kind,
    value: fn(u16) -> f64,
    /// To the nearest; numbers of double precision are rounded once.
    bits: fn(f64) -> u16,
    edges: &'static [u16],
}

const F16: Format = Format {
    name: "f16",
    kind: Kind::F16,
    value: |bits| f16::from_bits(bits).to_f64(),
    bits: |x| f16::from_f64(x).to_bits(),
    edges: &HALVES,
};

const BF16: Format = Format {
    name: "bf16",
    kind: Kind::Bf16,
    value: |bits| bf16::from_bits(bits).to_f64(),
    bits: |x| bf16::from_f64(x).to_bits(),
    edges: &BRAINS,
};

type Function = fn(f64, f64, f64) -> f64;

/// A sum that double precision may not hold is rounded to odd, so that the second rounding is
/// as if it were the only one.
fn sum(a: f64, b: f64) -> f64 {
    let near = a + b;
    if !near.is_finite() {
        return near;
    }
    let back = near - a;
    let error = (a - (near - back)) + (b - back);
    if error == 0.0 || near.to_bits() & 1 == 1 {
        return near;
    }
    if (error > 0.0) == (near > 0.0) {
        f64::from_bits(near.to_bits() + 1)
    } else {
        f64::from_bits(near.to_bits() - 1)
    }
}

pub(crate) fn cases() -> Vec<Case> {
    let mut cases = Vec::new();
    let f16_only: [(&str, &str, Function); 3] = [
        ("add", "$1, $2", |a, b, _| sum(a, b)),
        ("sub", "$1, $2", |a, b, _| sum(a, -b)),
        ("mul", "$1, $2", |a, b, _| a * b),
    ];
    let both: [(&str, &str, Function); 5] = [
        ("fma.rn", "$1, $2, $3", |a, b, c| sum(a * b, c)),
        ("neg", "$1", |a, _, _| -a),
        ("abs", "$1", |a, _, _| a.abs()),
        ("min", "$1, $2", |a, b, _| extreme(a, b, false)),
        ("max", "$1, $2", |a, b, _| extreme(a, b, true)),
    ];
    for (name, sources, host) in f16_only {
        for (modifier, after) in AFTER {
            operation(F16, &format!("{name}{modifier}"), sources, host, after, &mut cases);
        }
    }
    for (name, sources, host) in both {
        operation(F16, name, sources, host, |x| x, &mut cases);
        operation(BF16, name, sources, host, |x| x, &mut cases);
    }
    operation(F16, "fma.rn.sat", "$1, $2, $3", both[0].2, AFTER[1].1, &mut cases);
    // NaN stays what it is.
    let relu: fn(f64) -> f64 = |x| if x <= 0.0 { 0.0 } else { x };
    operation(F16, "fma.rn.relu", "$1, $2, $3", both[0].2, relu, &mut cases);
    operation(BF16, "fma.rn.relu", "$1, $2, $3", both[0].2, relu, &mut cases);
    for (name, greater) in [("min.NaN", false), ("max.NaN", true)] {
        for format in [F16, BF16] {
            let host = move |a: f64, b: f64| {
                if a.is_nan() || b.is_nan() { f64::NAN } else { extreme(a, b, greater) }
            };
            let rows = half_rows(format.edges);
            let text = format!("{name}.{} $0, $1, $2;", format.name);
            let case = Case::new(text, ["b16"; 4], &rows, move |[a, b, _]| {
                (format.bits)(host((format.value)(a as u16), (format.value)(b as u16))).into()
            });
            cases.push(case.number(format.kind));
        }
    }
    // A tie that rounding to single precision first would break.
    let rows = [[0x3c01, 0x3c01, 0x0001], [0x3c01, 0xbc01, 0x8001]];
    let text = "fma.rn.f16 %h4, $1, $2, $3; mov.b16 $0, %h4;";
    let case = Case::new(text, ["b16"; 4], &rows, |row| {
        let [a, b, c] = row.map(|bits| (F16.value)(bits as u16));
        // Exact in double precision.
        (F16.bits)(a * b + c).into()
    });
    cases.push(case);
    comparisons(&mut cases);
    approximations(&mut cases);
    cases
}

type After = (&'static str, fn(f64) -> f64);
const AFTER: [After; 2] = [("", |x| x), (".sat", |x| if x > 0.0 { x.min(1.0) } else { 0.0 })];

/// An operation on single values, and on the two halves of a pair.
fn operation(
    format: Format,
    name: &str,
    sources: &str,
    host: Function,
    after: fn(f64) -> f64,
    cases: &mut Vec<Case>,
) {
    let exact = move |row: Row| {
        let [a, b, c] = row.map(|bits| (format.value)(bits as u16));
        u64::from((format.bits)(after(host(a, b, c))))
    };
    let rows = half_rows(format.edges);
    let text = format!("{name}.{} $0, {sources};", format.name);
    // Where negative results are cut off, either zero will do.
    let number = |case: Case| {
        if name.ends_with("relu") {
            case.within(format.kind, 0.0, 0.0)
        } else {
            case.number(format.kind)
        }
    };
    cases.push(number(Case::new(text, ["b16"; 4], &rows, exact)));
    // The first half has the three inputs in another order.
    let pairs: Vec<String> = ["$1", "$2", "$3"]
        .iter()
        .enumerate()
        .map(|(i, source)| {
            let other = ["$2", "$3", "$1"][i];
            format!("mov.b32 %r{}, {{{other}, {source}}};", i + 4)
        })
        .collect();
    let packed = sources.replace("$1", "%r4").replace("$2", "%r5").replace("$3", "%r6");
    for (part, unpack) in [(0, "mov.b32 {$0, %h4}, %r9;"), (1, "mov.b32 {%h4, $0}, %r9;")] {
        let text = format!("{} {name}.{}x2 %r9, {packed}; {unpack}", pairs.join(" "), format.name);
        let case = Case::new(text, ["b16"; 4], &rows, move |[a, b, c]| {
            exact(if part == 0 { [b, c, a] } else { [a, b, c] })
        });
        cases.push(number(case));
    }
}

fn comparisons(cases: &mut Vec<Case>) {
    type Comparison = (&'static str, fn(f64, f64) -> bool);
    #[allow(clippy::double_comparisons, clippy::neg_cmp_op_on_partial_ord)]
    // NaN makes the difference
    let comparisons: [Comparison; 8] = [
        ("eq", |a, b| a == b),
        ("ne", |a, b| a < b || a > b),
        ("lt", |a, b| a < b),
        ("ge", |a, b| a >= b),
        ("gtu", |a, b| !(a <= b)),
        ("leu", |a, b| !(a > b)),
        ("num", |a, b| !a.is_nan() && !b.is_nan()),
        ("nan", |a, b| a.is_nan() || b.is_nan()),
    ];
    for (name, holds) in comparisons {
        let types = ["pred", "b16", "b16", "b16"];
        let text = format!("setp.{name}.f16 $0, $1, $2;");
        cases.push(Case::new(text, types, &half_rows(&HALVES), move |[a, b, _]| {
            u64::from(holds((F16.value)(a as u16), (F16.value)(b as u16)))
        }));
    }
}

fn approximations(cases: &mut Vec<Case>) {
    // Bounds of the PTX ISA (9.0), rounded up to whole powers of two.
    type Approximation = (&'static str, Format, fn(f64) -> f64, f64, f64);
    let functions: [Approximation; 4] = [
        ("ex2.approx.f16", F16, f64::exp2, 2f64.powi(-9), 2f64.powi(-24)),
        ("tanh.approx.f16", F16, f64::tanh, 0.0, 2f64.powi(-10)),
        ("ex2.approx.ftz.bf16", BF16, f64::exp2, 2f64.powi(-7), 2e-38),
        ("tanh.approx.bf16", BF16, f64::tanh, 0.0, 2f64.powi(-8)),
    ];
    for (name, format, exact, relative, absolute) in functions {
        let text = format!("{name} $0, $1;");
        let case = Case::new(text, ["b16"; 4], &half_rows(format.edges), move |[a, ..]| {
            u64::from((format.bits)(exact((format.value)(a as u16))))
        });
        cases.push(case.within(format.kind, relative, absolute));
    }
}
