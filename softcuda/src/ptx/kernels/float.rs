//! Single and double precision arithmetic.

use super::rounding::{self, Round};
use super::{map1, map2, map3};
use crate::ptx::ast::Type;
use crate::ptx::code::{Map1, Map2, Map3};

/// Replaces a subnormal number by the zero of its sign.
#[inline(always)]
pub(crate) fn flush(a: f32) -> f32 {
    if a.abs() < f32::MIN_POSITIVE { 0f32.copysign(a) } else { a }
}

/// Two kernels from one expression, with and without flushing of subnormal numbers.
macro_rules! flushable {
    ($map:ident, $flush:expr, |$($x:ident),+| $e:expr) => {
        if $flush {
            $map!(|$($x: f32),+| { $(let $x = flush($x);)+ flush($e) })
        } else {
            $map!(|$($x: f32),+| $e)
        }
    };
}

/// One kernel for each rounding.
macro_rules! rounded {
    ($map:ident, $t:ty, $round:expr, |$($x:ident),+| $nearest:expr, $directed:path) => {
        match $round {
            Round::Nearest => $map!(|$($x: $t),+| $nearest),
            Round::Zero => $map!(|$($x: $t),+| $directed($($x),+, Round::Zero)),
            Round::Down => $map!(|$($x: $t),+| $directed($($x),+, Round::Down)),
            Round::Up => $map!(|$($x: $t),+| $directed($($x),+, Round::Up)),
        }
    };
}

/// How a floating-point instruction is modified.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Style {
    pub(crate) round: Round,
    pub(crate) flush: bool,
    /// `.NaN`: a NaN operand makes the result NaN.
    pub(crate) propagate: bool,
}

trait Real: Copy {
    fn least(self, other: Self) -> Self;
    fn most(self, other: Self) -> Self;
    /// Clamped to the range from 0 to 1.
    fn saturated(self) -> Self;
}

macro_rules! real {
    ($t:ty) => {
        impl Real for $t {
            #[inline(always)]
            fn least(self, other: Self) -> Self {
                if self.is_nan() {
                    other
                } else if other < self || (other == self && other.is_sign_negative()) {
                    other
                } else {
                    self
                }
            }
            #[inline(always)]
            fn most(self, other: Self) -> Self {
                if self.is_nan() {
                    other
                } else if other > self || (other == self && !other.is_sign_negative()) {
                    other
                } else {
                    self
                }
            }
            #[inline(always)]
            fn saturated(self) -> Self {
                // NaN and -0 become +0.
                if self > 0.0 { if self > 1.0 { 1.0 } else { self } } else { 0.0 }
            }
        }
    };
}
real!(f32);
real!(f64);

pub(crate) fn binary(name: &str, ty: Type, style: Style) -> Option<Map2> {
    let exact = style.round == Round::Nearest;
    Some(match (ty, name) {
        (Type::F32, "add") if exact => flushable!(map2, style.flush, |a, b| a + b),
        (Type::F32, "sub") if exact => flushable!(map2, style.flush, |a, b| a - b),
        (Type::F32, "mul") if exact => flushable!(map2, style.flush, |a, b| a * b),
        (Type::F32, "div") if exact => flushable!(map2, style.flush, |a, b| a / b),
        (Type::F32, "add") => rounded!(map2, f32, style.round, |a, b| a + b, rounding::add32),
        (Type::F32, "sub") => match style.round {
            Round::Zero => map2!(|a: f32, b: f32| rounding::add32(a, -b, Round::Zero)),
            Round::Down => map2!(|a: f32, b: f32| rounding::add32(a, -b, Round::Down)),
            _ => map2!(|a: f32, b: f32| rounding::add32(a, -b, Round::Up)),
        },
        (Type::F32, "mul") => rounded!(map2, f32, style.round, |a, b| a * b, rounding::mul32),
        (Type::F32, "div") => rounded!(map2, f32, style.round, |a, b| a / b, rounding::div32),
        (Type::F32, "min") if style.propagate => {
            flushable!(map2, style.flush, |a, b| if b.is_nan() {
                b
            } else if a.is_nan() {
                a
            } else {
                a.least(b)
            })
        }
        (Type::F32, "max") if style.propagate => {
            flushable!(map2, style.flush, |a, b| if b.is_nan() {
                b
            } else if a.is_nan() {
                a
            } else {
                a.most(b)
            })
        }
        (Type::F32, "min") => flushable!(map2, style.flush, |a, b| a.least(b)),
        (Type::F32, "max") => flushable!(map2, style.flush, |a, b| a.most(b)),
        (Type::F64, "add") => rounded!(map2, f64, style.round, |a, b| a + b, rounding::add64),
        (Type::F64, "sub") => match style.round {
            Round::Nearest => map2!(|a: f64, b: f64| a - b),
            Round::Zero => map2!(|a: f64, b: f64| rounding::add64(a, -b, Round::Zero)),
            Round::Down => map2!(|a: f64, b: f64| rounding::add64(a, -b, Round::Down)),
            Round::Up => map2!(|a: f64, b: f64| rounding::add64(a, -b, Round::Up)),
        },
        (Type::F64, "mul") => rounded!(map2, f64, style.round, |a, b| a * b, rounding::mul64),
        (Type::F64, "div") => rounded!(map2, f64, style.round, |a, b| a / b, rounding::div64),
        (Type::F64, "min") => map2!(|a: f64, b: f64| a.least(b)),
        (Type::F64, "max") => map2!(|a: f64, b: f64| a.most(b)),
        // The sign of the first with the magnitude of the second; bits, not arithmetic.
        (Type::F32, "copysign") => {
            map2!(|a: u32, b: u32| a & 0x8000_0000 | b & 0x7fff_ffff)
        }
        (Type::F64, "copysign") => {
            map2!(|a: u64, b: u64| a & (1 << 63) | b & !(1 << 63))
        }
        _ => return None,
    })
}

pub(crate) fn ternary(name: &str, ty: Type, style: Style) -> Option<Map3> {
    Some(match (ty, name) {
        (Type::F32, "fma") if style.round == Round::Nearest => {
            flushable!(map3, style.flush, |a, b, c| a.mul_add(b, c))
        }
        (Type::F32, "fma") => {
            rounded!(map3, f32, style.round, |a, b, c| a.mul_add(b, c), rounding::fma32)
        }
        (Type::F64, "fma") => {
            rounded!(map3, f64, style.round, |a, b, c| a.mul_add(b, c), rounding::fma64)
        }
        _ => return None,
    })
}

pub(crate) fn unary(name: &str, ty: Type, style: Style) -> Option<Map1> {
    let exact = style.round == Round::Nearest;
    Some(match (ty, name) {
        (Type::F32, "neg") => flushable!(map1, style.flush, |a| -a),
        (Type::F32, "abs") => flushable!(map1, style.flush, |a| a.abs()),
        (Type::F32, "sat") => map1!(|a: f32| a.saturated()),
        (Type::F32, "flush") => map1!(|a: f32| flush(a)),
        (Type::F32, "sqrt") if exact => flushable!(map1, style.flush, |a| a.sqrt()),
        (Type::F32, "sqrt") => rounded!(map1, f32, style.round, |a| a.sqrt(), rounding::sqrt32),
        (Type::F32, "rcp") if exact => flushable!(map1, style.flush, |a| 1.0 / a),
        (Type::F32, "rcp") => match style.round {
            Round::Zero => map1!(|a: f32| rounding::div32(1.0, a, Round::Zero)),
            Round::Down => map1!(|a: f32| rounding::div32(1.0, a, Round::Down)),
            _ => map1!(|a: f32| rounding::div32(1.0, a, Round::Up)),
        },
        (Type::F32, "rsqrt") => {
            flushable!(map1, style.flush, |a| (1.0 / f64::from(a).sqrt()) as f32)
        }
        (Type::F32, "ex2") => flushable!(map1, style.flush, |a| a.exp2()),
        (Type::F32, "lg2") => flushable!(map1, style.flush, |a| a.log2()),
        (Type::F32, "sin") => flushable!(map1, style.flush, |a| a.sin()),
        (Type::F32, "cos") => flushable!(map1, style.flush, |a| a.cos()),
        (Type::F32, "tanh") => map1!(|a: f32| a.tanh()),
        (Type::F64, "neg") => map1!(|a: f64| -a),
        (Type::F64, "abs") => map1!(|a: f64| a.abs()),
        (Type::F64, "sqrt") => rounded!(map1, f64, style.round, |a| a.sqrt(), rounding::sqrt64),
        (Type::F64, "rcp") => match style.round {
            Round::Nearest => map1!(|a: f64| 1.0 / a),
            Round::Zero => map1!(|a: f64| rounding::div64(1.0, a, Round::Zero)),
            Round::Down => map1!(|a: f64| rounding::div64(1.0, a, Round::Down)),
            Round::Up => map1!(|a: f64| rounding::div64(1.0, a, Round::Up)),
        },
        // Only the upper half of the result is computed.
        (Type::F64, "rcp.approx") => map1!(|a: f64| upper_half(1.0 / a)),
        (Type::F64, "rsqrt.approx") => map1!(|a: f64| upper_half(1.0 / a.sqrt())),
        (Type::F64, "rsqrt") => map1!(|a: f64| 1.0 / a.sqrt()),
        _ => return None,
    })
}

fn upper_half(a: f64) -> f64 {
    f64::from_bits(a.to_bits() & 0xffff_ffff_0000_0000)
}

/// `testp`.
pub(crate) fn test(name: &str, ty: Type) -> Option<Map1> {
    Some(match (ty, name) {
        (Type::F32, "finite") => map1!(|a: f32| a.is_finite()),
        (Type::F32, "infinite") => map1!(|a: f32| a.is_infinite()),
        (Type::F32, "number") => map1!(|a: f32| !a.is_nan()),
        (Type::F32, "notanumber") => map1!(|a: f32| a.is_nan()),
        // Zeros count as normal.
        (Type::F32, "normal") => map1!(|a: f32| a.is_finite() && !a.is_subnormal()),
        (Type::F32, "subnormal") => map1!(|a: f32| a.is_subnormal()),
        (Type::F64, "finite") => map1!(|a: f64| a.is_finite()),
        (Type::F64, "infinite") => map1!(|a: f64| a.is_infinite()),
        (Type::F64, "number") => map1!(|a: f64| !a.is_nan()),
        (Type::F64, "notanumber") => map1!(|a: f64| a.is_nan()),
        (Type::F64, "normal") => map1!(|a: f64| a.is_finite() && !a.is_subnormal()),
        (Type::F64, "subnormal") => map1!(|a: f64| a.is_subnormal()),
        _ => return None,
    })
}
