//! Single and double precision: arithmetic, comparisons, approximations.

use super::host::{self, Direction};
use super::job::Kind;
use super::table::{Case, Random, Row, double_rows, float_rows, random_f32, single};

pub(crate) fn f32_of(bits: u64) -> f32 {
    f32::from_bits(bits as u32)
}

/// The bits of a result; every NaN is the one that arithmetic of single precision makes on a GPU.
pub(crate) fn bits32(x: f32) -> u64 {
    u64::from(if x.is_nan() { 0x7fff_ffff } else { x.to_bits() })
}

pub(crate) fn flush(x: f32) -> f32 {
    if x.is_subnormal() { 0f32.copysign(x) } else { x }
}

fn saturated(x: f32) -> f32 {
    if x > 0.0 { x.min(1.0) } else { 0.0 }
}

pub(crate) fn cases() -> Vec<Case> {
    let mut cases = Vec::new();
    single_precision(&mut cases);
    double_precision(&mut cases);
    signs(&mut cases);
    comparisons(&mut cases);
    approximations(&mut cases);
    wide_approximations(&mut cases);
    cases
}

type Function32 = fn(f32, f32, f32, Direction, bool) -> f32;

fn single_precision(cases: &mut Vec<Case>) {
    let rows = float_rows();
    let operations: [(&str, &str, Function32); 7] = [
        ("add", "$1, $2", |a, b, _, d, flush| host::add32(a, b, d, flush)),
        ("sub", "$1, $2", |a, b, _, d, flush| host::sub32(a, b, d, flush)),
        ("mul", "$1, $2", |a, b, _, d, flush| host::mul32(a, b, d, flush)),
        ("div", "$1, $2", |a, b, _, d, flush| host::div32(a, b, d, flush)),
        ("fma", "$1, $2, $3", host::fma32),
        ("sqrt", "$1", |a, _, _, d, flush| host::sqrt32(a, d, flush)),
        ("rcp", "$1", |a, _, _, d, flush| host::div32(1.0, a, d, flush)),
    ];
    for (name, sources, host) in operations {
        for (direction_name, direction) in Direction::ALL {
            for (ftz, flushes) in [("", false), (".ftz", true)] {
                let text = format!("{name}.{direction_name}{ftz}.f32 $0, {sources};");
                let exact =
                    move |[a, b, c]: Row| host(f32_of(a), f32_of(b), f32_of(c), direction, flushes);
                cases.push(
                    Case::new(text, ["b32"; 4], &rows, move |row| bits32(exact(row)))
                        .number(Kind::F32),
                );
                if matches!(name, "add" | "sub" | "mul" | "fma") {
                    let text = format!("{name}.{direction_name}{ftz}.sat.f32 $0, {sources};");
                    cases.push(
                        Case::new(text, ["b32"; 4], &rows, move |row| {
                            bits32(saturated(exact(row)))
                        })
                        .number(Kind::F32),
                    );
                }
            }
        }
    }
    // Without a rounding a multiplication may be fused with an addition, but not when alone.
    for (text, host) in [
        ("add.f32 $0, $1, $2;", host::add32 as fn(f32, f32, Direction, bool) -> f32),
        ("sub.f32 $0, $1, $2;", host::sub32),
        ("mul.f32 $0, $1, $2;", host::mul32),
    ] {
        cases.push(
            Case::new(text, ["b32"; 4], &rows, move |[a, b, _]| {
                bits32(host(f32_of(a), f32_of(b), Direction::Nearest, false))
            })
            .number(Kind::F32),
        );
    }
    for (name, greater) in [("min", false), ("max", true)] {
        for (ftz, flushes) in [("", false), (".ftz", true)] {
            for (nan, propagates) in [("", false), (".NaN", true)] {
                let text = format!("{name}{ftz}{nan}.f32 $0, $1, $2;");
                let case = Case::new(text, ["b32"; 4], &rows, move |[a, b, _]| {
                    let cut = |x| if flushes { flush(f32_of(x)) } else { f32_of(x) };
                    let (a, b) = (cut(a), cut(b));
                    bits32(if propagates && (a.is_nan() || b.is_nan()) {
                        f32::NAN
                    } else {
                        extreme(f64::from(a), f64::from(b), greater) as f32
                    })
                });
                cases.push(case.number(Kind::F32));
            }
        }
    }
}

/// The smaller or greater number; zeros are ordered by their signs; a number rather than NaN.
pub(crate) fn extreme(a: f64, b: f64, greater: bool) -> f64 {
    match (a.is_nan(), b.is_nan()) {
        (true, _) => b,
        (_, true) => a,
        _ if (a.total_cmp(&b) == std::cmp::Ordering::Greater) == greater => a,
        _ => b,
    }
}

type Function64 = fn(f64, f64, f64, Direction) -> f64;

fn double_precision(cases: &mut Vec<Case>) {
    let rows = double_rows();
    let operations: [(&str, &str, Function64); 7] = [
        ("add", "$1, $2", |a, b, _, d| host::add64(a, b, d, false)),
        ("sub", "$1, $2", |a, b, _, d| host::sub64(a, b, d, false)),
        ("mul", "$1, $2", |a, b, _, d| host::mul64(a, b, d, false)),
        ("div", "$1, $2", |a, b, _, d| host::div64(a, b, d, false)),
        ("fma", "$1, $2, $3", |a, b, c, d| host::fma64(a, b, c, d, false)),
        ("sqrt", "$1", |a, _, _, d| host::sqrt64(a, d)),
        ("rcp", "$1", |a, _, _, d| host::div64(1.0, a, d, false)),
    ];
    for (name, sources, host) in operations {
        for (direction_name, direction) in Direction::ALL {
            let text = format!("{name}.{direction_name}.f64 $0, {sources};");
            let case = Case::new(text, ["b64"; 4], &rows, move |row| {
                let [a, b, c] = row.map(f64::from_bits);
                host(a, b, c, direction).to_bits()
            });
            cases.push(case.number(Kind::F64));
        }
    }
    for (name, greater) in [("min", false), ("max", true)] {
        let text = format!("{name}.f64 $0, $1, $2;");
        let case = Case::new(text, ["b64"; 4], &rows, move |[a, b, _]| {
            extreme(f64::from_bits(a), f64::from_bits(b), greater).to_bits()
        });
        cases.push(case.number(Kind::F64));
    }
}

fn signs(cases: &mut Vec<Case>) {
    let (floats, doubles) = (float_rows(), double_rows());
    let mut single = |text: &str, host: fn(f32, f32) -> f32| {
        let case = Case::new(text, ["b32"; 4], &floats, move |[a, b, _]| {
            bits32(host(f32_of(a), f32_of(b)))
        });
        cases.push(case.number(Kind::F32));
    };
    single("neg.f32 $0, $1;", |a, _| -a);
    single("neg.ftz.f32 $0, $1;", |a, _| -flush(a));
    single("abs.f32 $0, $1;", |a, _| a.abs());
    single("abs.ftz.f32 $0, $1;", |a, _| flush(a).abs());
    // The magnitude is that of the second.
    single("copysign.f32 $0, $1, $2;", |a, b| b.copysign(a));
    let mut double = |text: &str, host: fn(f64, f64) -> f64| {
        let case = Case::new(text, ["b64"; 4], &doubles, move |[a, b, _]| {
            host(f64::from_bits(a), f64::from_bits(b)).to_bits()
        });
        cases.push(case.number(Kind::F64));
    };
    double("neg.f64 $0, $1;", |a, _| -a);
    double("abs.f64 $0, $1;", |a, _| a.abs());
    double("copysign.f64 $0, $1, $2;", |a, b| b.copysign(a));
}

type Comparison = (&'static str, fn(f64, f64) -> bool);
/// Every comparison with a number; those that also hold for NaN are their opposites' negations.
#[allow(clippy::double_comparisons, clippy::neg_cmp_op_on_partial_ord)] // NaN makes the difference
const COMPARISONS: [Comparison; 14] = [
    ("eq", |a, b| a == b),
    ("ne", |a, b| a < b || a > b),
    ("lt", |a, b| a < b),
    ("le", |a, b| a <= b),
    ("gt", |a, b| a > b),
    ("ge", |a, b| a >= b),
    ("equ", |a, b| !(a < b || a > b)),
    ("neu", |a, b| a != b),
    ("ltu", |a, b| !(a >= b)),
    ("leu", |a, b| !(a > b)),
    ("gtu", |a, b| !(a <= b)),
    ("geu", |a, b| !(a < b)),
    ("num", |a, b| !a.is_nan() && !b.is_nan()),
    ("nan", |a, b| a.is_nan() || b.is_nan()),
];

fn comparisons(cases: &mut Vec<Case>) {
    let (floats, doubles) = (float_rows(), double_rows());
    for (name, holds) in COMPARISONS {
        for (ftz, flushes) in [("", false), (".ftz", true)] {
            let value =
                move |bits| f64::from(if flushes { flush(f32_of(bits)) } else { f32_of(bits) });
            let types = ["pred", "b32", "b32", "b32"];
            let text = format!("setp.{name}{ftz}.f32 $0, $1, $2;");
            cases.push(Case::new(text, types, &floats, move |[a, b, _]| {
                u64::from(holds(value(a), value(b)))
            }));
            let text = format!("set.{name}{ftz}.f32.f32 $0, $1, $2;");
            cases.push(Case::new(text, ["b32"; 4], &floats, move |[a, b, _]| {
                if holds(value(a), value(b)) { u64::from(1f32.to_bits()) } else { 0 }
            }));
        }
        let types = ["pred", "b64", "b64", "b64"];
        let text = format!("setp.{name}.f64 $0, $1, $2;");
        cases.push(Case::new(text, types, &doubles, move |[a, b, _]| {
            u64::from(holds(f64::from_bits(a), f64::from_bits(b)))
        }));
    }
    type Test = (&'static str, fn(f64, bool) -> bool);
    // The flag: whether the number is subnormal in its own format.
    let tests: [Test; 6] = [
        ("finite", |x, _| x.is_finite()),
        ("infinite", |x, _| x.is_infinite()),
        ("number", |x, _| !x.is_nan()),
        ("notanumber", |x, _| x.is_nan()),
        ("normal", |x, subnormal| x.is_finite() && !subnormal),
        ("subnormal", |_, subnormal| subnormal),
    ];
    for (name, holds) in tests {
        let text = format!("testp.{name}.f32 $0, $1;");
        cases.push(Case::new(text, ["pred", "b32", "b32", "b32"], &floats, move |[a, ..]| {
            u64::from(holds(f64::from(f32_of(a)), f32_of(a).is_subnormal()))
        }));
        let text = format!("testp.{name}.f64 $0, $1;");
        cases.push(Case::new(text, ["pred", "b64", "b64", "b64"], &doubles, move |[a, ..]| {
            u64::from(holds(f64::from_bits(a), f64::from_bits(a).is_subnormal()))
        }));
    }
    cases.push(Case::new(
        "selp.f32 $0, $1, $2, $3;",
        ["b32", "b32", "b32", "pred"],
        &floats,
        |[a, b, c]| {
            if c as u32 != 0 { a & 0xffff_ffff } else { b & 0xffff_ffff }
        },
    ));
    cases.push(Case::new("slct.f32.f32 $0, $1, $2, $3;", ["b32"; 4], &floats, |[a, b, c]| {
        let chosen = if f32_of(c) >= 0.0 { a } else { b };
        chosen & 0xffff_ffff
    }));
}

/// Numbers of single precision between two bounds, and their negatives where asked.
fn between(least: f32, most: f32, negatives: bool) -> Vec<Row> {
    let mut random = Random::new(u64::from(most.to_bits()));
    let (low, high) = (least.ln(), most.ln());
    single(&[u64::from(least.to_bits()), u64::from(most.to_bits())], 254, || {
        let part = (random.next() >> 40) as f32 / (1u64 << 24) as f32;
        let x = (low + (high - low) * part).exp().clamp(least, most);
        u64::from(if negatives && random.next() & 1 == 0 { -x } else { x }.to_bits())
    })
}

/// Zeros, infinities, NaN and subnormal numbers.
fn special() -> Vec<Row> {
    [0.0f32, -0.0, f32::INFINITY, f32::NEG_INFINITY, f32::NAN]
        .map(|x| [u64::from(x.to_bits()), 0, 0])
        .into()
}

/// Approximations with the largest errors that the PTX ISA (9.0) gives for them, rounded up to
/// whole powers of two.
fn approximations(cases: &mut Vec<Case>) {
    type Approximation = (&'static str, fn(f64) -> f64, f32, f32, bool, f64, f64);
    let tiny = f32::MIN_POSITIVE;
    let (b22, b20, b14) = (2f64.powi(-22), 2f64.powi(-20), 2f64.powi(-14));
    let functions: [Approximation; 14] = [
        ("ex2.approx.f32", f64::exp2, 1e-6, 125.0, true, b22, 0.0),
        ("ex2.approx.ftz.f32", f64::exp2, 1e-6, 125.0, true, b22, 0.0),
        ("lg2.approx.f32", f64::log2, tiny, f32::MAX, false, b22, b22),
        ("lg2.approx.ftz.f32", f64::log2, tiny, f32::MAX, false, b22, b22),
        ("rsqrt.approx.f32", |x| 1.0 / x.sqrt(), tiny, f32::MAX, false, b22, 0.0),
        ("rsqrt.approx.ftz.f32", |x| 1.0 / x.sqrt(), tiny, f32::MAX, false, b22, 0.0),
        ("sqrt.approx.f32", f64::sqrt, tiny, f32::MAX, false, b22, 0.0),
        ("sqrt.approx.ftz.f32", f64::sqrt, tiny, f32::MAX, false, b22, 0.0),
        ("rcp.approx.f32", |x| 1.0 / x, 1e-37, 1e37, true, b22, 0.0),
        ("rcp.approx.ftz.f32", |x| 1.0 / x, 1e-37, 1e37, true, b22, 0.0),
        ("sin.approx.f32", f64::sin, 1e-6, std::f32::consts::TAU, true, 0.0, b20),
        ("cos.approx.f32", f64::cos, 1e-6, std::f32::consts::TAU, true, 0.0, b20),
        ("tanh.approx.f32", f64::tanh, 1e-6, 20.0, true, 2f64.powi(-10), 0.0),
        ("sin.approx.ftz.f32", f64::sin, 6.3, 314.0, true, 0.0, b14),
    ];
    for (name, exact, least, most, negatives, relative, absolute) in functions {
        let rows = between(least, most, negatives);
        let host = move |[a, ..]: Row| bits32(exact(f64::from(f32_of(a))) as f32);
        let case = Case::new(format!("{name} $0, $1;"), ["b32"; 4], &rows, host);
        cases.push(case.within(Kind::F32, relative, absolute));
        // Where there is a limit, it is the result.
        let host = move |[a, ..]: Row| bits32(exact(f64::from(f32_of(a))) as f32);
        let text = format!("{name} $0, $1; // of special values");
        cases.push(Case::new(text, ["b32"; 4], &special(), host).number(Kind::F32));
    }
    let mut random = Random::new(3);
    let rows: Vec<Row> = (0..256)
        .map(|_| [0; 3].map(|_| random_f32(&mut random) & 0x8fff_ffff | 0x3000_0000))
        .collect();
    for name in ["div.approx.f32", "div.approx.ftz.f32", "div.full.f32", "div.full.ftz.f32"] {
        let case = Case::new(format!("{name} $0, $1, $2;"), ["b32"; 4], &rows, |[a, b, _]| {
            bits32(f32_of(a) / f32_of(b))
        });
        cases.push(case.within(Kind::F32, b22, 0.0));
    }
}

fn wide_approximations(cases: &mut Vec<Case>) {
    let mut random = Random::new(5);
    let rows = single(&[], 256, || {
        random.next() >> 4 & 0x000f_ffff_ffff_ffff | (923 + (random.next() % 200)) << 52
    });
    type Approximation = (&'static str, fn(f64) -> f64);
    let functions: [Approximation; 3] = [
        ("rcp.approx.ftz.f64", |x| 1.0 / x),
        ("rsqrt.approx.ftz.f64", |x| 1.0 / x.sqrt()),
        ("rsqrt.approx.f64", |x| 1.0 / x.sqrt()),
    ];
    for (name, exact) in functions {
        let case = Case::new(format!("{name} $0, $1;"), ["b64"; 4], &rows, move |[a, ..]| {
            exact(f64::from_bits(a)).to_bits()
        });
        cases.push(case.within(Kind::F64, 2f64.powi(-19), 0.0));
    }
}
