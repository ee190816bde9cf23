//! `cvt` between all types.

use super::floats::{bits32, f32_of, flush};
use super::host::{self, Direction};
use super::integers::Int;
use super::job::Kind;
use super::table::{
    BRAINS, Case, EDGES64, HALVES, Random, Row, double_rows, float_rows, half_rows, random_f32,
    rows64, single,
};
use half::{bf16, f16};

pub(crate) fn cases() -> Vec<Case> {
    let mut cases = Vec::new();
    between_integers(&mut cases);
    from_integers(&mut cases);
    to_integers(&mut cases);
    between_floats(&mut cases);
    to_halves(&mut cases);
    cases
}

fn between_integers(cases: &mut Vec<Case>) {
    let narrow = [false, true].map(|signed| Int { signed, width: 8 });
    for from in Int::ALL {
        for to in Int::ALL.into_iter().chain(narrow) {
            for (sat, saturates) in [("", false), (".sat", true)] {
                if saturates && to.least() <= from.least() && from.most() <= to.most() {
                    continue;
                }
                // A result of 8 bits fills a register of 32.
                let holder = if to.width == 8 { Int { width: 32, ..to } } else { to };
                let text = format!("cvt{sat}.{}.{} $0, $1;", to.name(), from.name());
                let types = [holder.register(), from.register(), "b64", "b64"];
                cases.push(Case::new(text, types, &rows64(), move |[a, ..]| {
                    let value = from.value(a);
                    let value = if saturates { value.clamp(to.least(), to.most()) } else { value };
                    holder.bits(to.value(to.bits(value)))
                }));
            }
        }
    }
}

fn from_integers(cases: &mut Vec<Case>) {
    let mut random = Random::new(40);
    let rows = single(&EDGES64, 180, || random.next() >> (random.next() & 63));
    for from in Int::ALL {
        for (name, direction) in Direction::ALL {
            let types = ["b32", from.register(), "b64", "b64"];
            let text = format!("cvt.{name}.f32.{} $0, $1;", from.name());
            cases.push(Case::new(text, types, &rows, move |[a, ..]| {
                u64::from(host::single_of(from.value(a), direction).to_bits())
            }));
            let types = ["b64", from.register(), "b64", "b64"];
            let text = format!("cvt.{name}.f64.{} $0, $1;", from.name());
            cases.push(Case::new(text, types, &rows, move |[a, ..]| {
                host::double_of(from.value(a), direction).to_bits()
            }));
        }
        if from.width < 64 {
            let types = ["b16", from.register(), "b64", "b64"];
            let text = format!("cvt.rn.f16.{} $0, $1;", from.name());
            cases.push(Case::new(text, types, &rows, move |[a, ..]| {
                u64::from(f16::from_f64(from.value(a) as f64).to_bits())
            }));
        }
    }
}

/// What a conversion of a number gives. NaN is zero, but where one of the types has 64 bits, it is
/// the highest bit alone.
fn clamped(x: f64, from: u32, to: Int) -> u64 {
    if x.is_nan() {
        return if from == 64 || to.width == 64 { 1 << (to.width - 1) } else { 0 };
    }
    let value = if x >= 2f64.powi(100) { i128::MAX } else { x as i128 };
    to.bits(value.clamp(to.least(), to.most()))
}

fn to_integers(cases: &mut Vec<Case>) {
    let mut random = Random::new(41);
    let mut floats = float_rows();
    floats.extend((0..100).map(|_| {
        let x = (random.next() as i64 >> (random.next() & 63)) as f32 * 0.5;
        [u64::from(x.to_bits()), 0, 0]
    }));
    let mut doubles = double_rows();
    doubles.extend((0..100).map(|_| {
        let x = (random.next() as i64 >> (random.next() & 63)) as f64 * 0.5;
        [x.to_bits(), 0, 0]
    }));
    for to in Int::ALL {
        for (name, direction) in Direction::ALL {
            for (ftz, flushes) in [("", false), (".ftz", true)] {
                let text = format!("cvt.{name}i{ftz}.{}.f32 $0, $1;", to.name());
                let types = [to.register(), "b32", "b32", "b32"];
                cases.push(Case::new(text, types, &floats, move |[a, ..]| {
                    let x = if flushes { flush(f32_of(a)) } else { f32_of(a) };
                    clamped(host::integral(x.into(), direction), 32, to)
                }));
            }
            let text = format!("cvt.{name}i.{}.f64 $0, $1;", to.name());
            let types = [to.register(), "b64", "b64", "b64"];
            cases.push(Case::new(text, types, &doubles, move |[a, ..]| {
                clamped(host::integral(f64::from_bits(a), direction), 64, to)
            }));
            let text = format!("cvt.{name}i.{}.f16 $0, $1;", to.name());
            let types = [to.register(), "b16", "b16", "b16"];
            cases.push(Case::new(text, types, &half_rows(&HALVES), move |[a, ..]| {
                clamped(host::integral(f16::from_bits(a as u16).to_f64(), direction), 16, to)
            }));
        }
    }
}

fn between_floats(cases: &mut Vec<Case>) {
    let (floats, mut doubles) = (float_rows(), double_rows());
    let mut random = Random::new(42);
    // Numbers that single precision can hold, with bits beyond it.
    doubles.extend((0..200).map(|_| {
        let x = f64::from(f32_of(random_f32(&mut random)));
        [x.to_bits() ^ random.next() >> (random.next() & 63) & 0x7fff_ffff, 0, 0]
    }));
    cases.push(
        Case::new("cvt.f64.f32 $0, $1;", ["b64", "b32", "b32", "b32"], &floats, |[a, ..]| {
            f64::from(f32_of(a)).to_bits()
        })
        .number(Kind::F64),
    );
    for (name, direction) in Direction::ALL {
        for (ftz, flushes) in [("", false), (".ftz", true)] {
            let types = ["b32", "b64", "b64", "b64"];
            let text = format!("cvt.{name}{ftz}.f32.f64 $0, $1;");
            let case = Case::new(text, types, &doubles, move |[a, ..]| {
                bits32(host::narrow(f64::from_bits(a), direction, false))
                    .pipe(|bits| if flushes { bits32(flush(f32_of(bits))) } else { bits })
            });
            cases.push(case.number(Kind::F32));
            let text = format!("cvt.{name}i{ftz}.f32.f32 $0, $1;");
            let case = Case::new(text, ["b32"; 4], &floats, move |[a, ..]| {
                let x = if flushes { flush(f32_of(a)) } else { f32_of(a) };
                bits32(host::integral(x.into(), direction) as f32)
            });
            cases.push(case.number(Kind::F32));
        }
        let text = format!("cvt.{name}i.f64.f64 $0, $1;");
        let case = Case::new(text, ["b64"; 4], &doubles, move |[a, ..]| {
            host::integral(f64::from_bits(a), direction).to_bits()
        });
        cases.push(case.number(Kind::F64));
        let text = format!("cvt.{name}i.f16.f16 $0, $1;");
        let case = Case::new(text, ["b16"; 4], &half_rows(&HALVES), move |[a, ..]| {
            let x = f16::from_bits(a as u16).to_f64();
            u64::from(f16::from_f64(host::integral(x, direction)).to_bits())
        });
        cases.push(case.number(Kind::F16));
    }
    for (text, host) in [
        ("cvt.sat.f32.f32 $0, $1;", (|x| if x > 0.0 { x.min(1.0) } else { 0.0 }) as fn(f32) -> f32),
        ("cvt.ftz.f32.f32 $0, $1;", flush),
    ] {
        let case = Case::new(text, ["b32"; 4], &floats, move |[a, ..]| bits32(host(f32_of(a))));
        cases.push(case.number(Kind::F32));
    }
    let types = ["b32", "b16", "b16", "b16"];
    let case = Case::new("cvt.f32.f16 $0, $1;", types, &half_rows(&HALVES), |[a, ..]| {
        bits32(f16::from_bits(a as u16).to_f32())
    });
    cases.push(case.number(Kind::F32));
    let case = Case::new("cvt.f32.bf16 $0, $1;", types, &half_rows(&BRAINS), |[a, ..]| {
        bits32(bf16::from_bits(a as u16).to_f32())
    });
    cases.push(case.number(Kind::F32));
    let types = ["b64", "b16", "b16", "b16"];
    let case = Case::new("cvt.f64.f16 $0, $1;", types, &half_rows(&HALVES), |[a, ..]| {
        f16::from_bits(a as u16).to_f64().to_bits()
    });
    cases.push(case.number(Kind::F64));
}

trait Pipe: Sized {
    fn pipe<T>(self, next: impl FnOnce(Self) -> T) -> T {
        next(self)
    }
}
impl Pipe for u64 {}

/// Bits of f16 and bf16 in a direction: the nearest, then its neighbour on the right side.
fn small(
    x: f64,
    direction: Direction,
    near: u16,
    value: impl Fn(u16) -> f64,
    infinity: u16,
) -> u64 {
    let found = value(near);
    if x.is_nan() || x == found || direction == Direction::Nearest {
        return near.into();
    }
    let away = found.abs() > x.abs();
    let wants_away = match direction {
        Direction::Up => x > 0.0,
        Direction::Down => x < 0.0,
        _ => false,
    };
    let sign = near & 0x8000;
    let magnitude = near & 0x7fff;
    u64::from(match (away, wants_away) {
        (true, false) => sign | (magnitude - 1),
        (false, true) => sign | (magnitude + 1).min(infinity),
        _ => near,
    })
}

fn to_halves(cases: &mut Vec<Case>) {
    let mut random = Random::new(43);
    let mut rows: Vec<Row> = float_rows();
    let edges = [
        65504f32,
        65519.9,
        65520.0,
        65536.0,
        5.96e-8,
        2.98e-8,
        2.9e-8,
        6.1e-5,
        6.09e-5,
        1.0 / 3.0,
        2049.0,
        2051.0,
    ];
    rows.extend(edges.map(|x| [u64::from(x.to_bits()), u64::from((-x).to_bits()), 0]));
    rows.extend((0..150).map(|_| {
        // Exponents that half precision has.
        let bits = random.next();
        let x = (bits as u32 & 0x807f_ffff) | (100 + ((bits >> 32) as u32 % 45)) << 23;
        [u64::from(x), bits >> 33, 0]
    }));
    let to_f16 = |x: f64, direction| {
        small(x, direction, f16::from_f64(x).to_bits(), |b| f16::from_bits(b).to_f64(), 0x7c00)
    };
    let to_bf16 = |x: f64, direction| {
        small(x, direction, bf16::from_f64(x).to_bits(), |b| bf16::from_bits(b).to_f64(), 0x7f80)
    };
    let types = ["b16", "b32", "b32", "b32"];
    for (name, direction) in [("rn", Direction::Nearest), ("rz", Direction::Zero)] {
        let text = format!("cvt.{name}.f16.f32 $0, $1;");
        let case =
            Case::new(text, types, &rows, move |[a, ..]| to_f16(f32_of(a).into(), direction));
        cases.push(case.number(Kind::F16));
        let text = format!("cvt.{name}.bf16.f32 $0, $1;");
        let case =
            Case::new(text, types, &rows, move |[a, ..]| to_bf16(f32_of(a).into(), direction));
        cases.push(case.number(Kind::Bf16));
        let text = format!("cvt.{name}.f16x2.f32 %r4, $1, $2; mov.b32 {{%h4, $0}}, %r4;");
        let case =
            Case::new(text, types, &rows, move |[a, ..]| to_f16(f32_of(a).into(), direction));
        cases.push(case.number(Kind::F16));
        let text = format!("cvt.{name}.bf16x2.f32 %r4, $2, $1; mov.b32 {{$0, %h4}}, %r4;");
        let case =
            Case::new(text, types, &rows, move |[a, ..]| to_bf16(f32_of(a).into(), direction));
        cases.push(case.number(Kind::Bf16));
    }
    for (name, direction) in [("rm", Direction::Down), ("rp", Direction::Up)] {
        let text = format!("cvt.{name}.f16.f32 $0, $1;");
        let case =
            Case::new(text, types, &rows, move |[a, ..]| to_f16(f32_of(a).into(), direction));
        cases.push(case.number(Kind::F16));
    }
    let relu = "cvt.rn.relu.f16.f32 $0, $1;";
    let case = Case::new(relu, types, &rows, move |[a, ..]| {
        let x = f64::from(f32_of(a));
        if x <= 0.0 { 0 } else { to_f16(x, Direction::Nearest) }
    });
    // Either zero will do.
    cases.push(case.within(Kind::F16, 0.0, 0.0));
}
