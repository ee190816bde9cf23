//! 16-bit floating point, alone and in pairs.

use super::float::Style;
use super::rounding::{BF16, F16, Round, fma_odd, to_small};
use super::{Bits, map1, map2, map3};
use crate::ptx::ast::Type;
use crate::ptx::code::{Map1, Map2, Map3};
use half::{bf16, f16};

/// A number of the IEEE half format.
#[derive(Clone, Copy)]
pub(crate) struct Half(pub(crate) u16);
/// A number of the brain format.
#[derive(Clone, Copy)]
pub(crate) struct Brain(pub(crate) u16);

pub(crate) trait Small: Copy {
    fn raw(bits: u16) -> Self;
    fn stored(self) -> u16;
    fn value(self) -> f32;
    fn rounded(value: f64) -> Self;
}

impl Small for Half {
    #[inline(always)]
    fn raw(bits: u16) -> Self {
        Half(bits)
    }
    #[inline(always)]
    fn stored(self) -> u16 {
        self.0
    }
    #[inline(always)]
    fn value(self) -> f32 {
        f16::from_bits(self.0).to_f32()
    }
    #[inline(always)]
    fn rounded(value: f64) -> Self {
        Half(to_small(value, F16, Round::Nearest))
    }
}

impl Small for Brain {
    #[inline(always)]
    fn raw(bits: u16) -> Self {
        Brain(bits)
    }
    #[inline(always)]
    fn stored(self) -> u16 {
        self.0
    }
    #[inline(always)]
    fn value(self) -> f32 {
        bf16::from_bits(self.0).to_f32()
    }
    #[inline(always)]
    fn rounded(value: f64) -> Self {
        Brain(to_small(value, BF16, Round::Nearest))
    }
}

macro_rules! small_bits {
    ($t:ident) => {
        impl $t {
            pub(crate) fn value(self) -> f32 {
                Small::value(self)
            }
        }
        impl Bits for $t {
            #[inline(always)]
            fn of(bits: u64) -> Self {
                $t(bits as u16)
            }
            #[inline(always)]
            fn bits(self) -> u64 {
                u64::from(self.0)
            }
        }
    };
}
small_bits!(Half);
small_bits!(Brain);

/// Two numbers in one register, the first in the low half.
#[derive(Clone, Copy)]
struct Two<T>([T; 2]);

impl<T: Small> Bits for Two<T> {
    #[inline(always)]
    fn of(bits: u64) -> Self {
        Two([T::raw(bits as u16), T::raw((bits >> 16) as u16)])
    }
    #[inline(always)]
    fn bits(self) -> u64 {
        u64::from(self.0[0].stored()) | u64::from(self.0[1].stored()) << 16
    }
}

/// Applies an operation on doubles to one number or to each of a pair. Doubles hold sums and
/// products of 16-bit numbers closely enough that rounding twice equals rounding once.
trait Lifted: Copy {
    fn lift1(self, f: impl Fn(f64) -> f64) -> Self;
    fn lift2(self, b: Self, f: impl Fn(f64, f64) -> f64) -> Self;
    fn lift3(self, b: Self, c: Self, f: impl Fn(f64, f64, f64) -> f64) -> Self;
    fn bitwise(self, f: impl Fn(u16) -> u16) -> Self;
}

impl<T: Small> Lifted for Two<T> {
    fn lift1(self, f: impl Fn(f64) -> f64) -> Self {
        Two(std::array::from_fn(|i| T::rounded(f(f64::from(self.0[i].value())))))
    }
    fn lift2(self, b: Self, f: impl Fn(f64, f64) -> f64) -> Self {
        Two(std::array::from_fn(|i| {
            T::rounded(f(f64::from(self.0[i].value()), f64::from(b.0[i].value())))
        }))
    }
    fn lift3(self, b: Self, c: Self, f: impl Fn(f64, f64, f64) -> f64) -> Self {
        Two(std::array::from_fn(|i| {
            let (b, c) = (f64::from(b.0[i].value()), f64::from(c.0[i].value()));
            T::rounded(f(f64::from(self.0[i].value()), b, c))
        }))
    }
    fn bitwise(self, f: impl Fn(u16) -> u16) -> Self {
        Two(self.0.map(|x| T::raw(f(x.stored()))))
    }
}

macro_rules! lifted_one {
    ($t:ident) => {
        impl Lifted for $t {
            fn lift1(self, f: impl Fn(f64) -> f64) -> Self {
                Small::rounded(f(f64::from(self.value())))
            }
            fn lift2(self, b: Self, f: impl Fn(f64, f64) -> f64) -> Self {
                Small::rounded(f(f64::from(self.value()), f64::from(b.value())))
            }
            fn lift3(self, b: Self, c: Self, f: impl Fn(f64, f64, f64) -> f64) -> Self {
                let (b, c) = (f64::from(b.value()), f64::from(c.value()));
                Small::rounded(f(f64::from(self.value()), b, c))
            }
            fn bitwise(self, f: impl Fn(u16) -> u16) -> Self {
                $t(f(self.0))
            }
        }
    };
}
lifted_one!(Half);
lifted_one!(Brain);

/// An expression with `$t` standing for the representation of a 16-bit type or pair.
macro_rules! by_small {
    ($ty:expr, $t:ident => $e:expr) => {
        match $ty {
            Type::F16 => {
                type $t = Half;
                $e
            }
            Type::F16x2 => {
                type $t = Two<Half>;
                $e
            }
            Type::Bf16 => {
                type $t = Brain;
                $e
            }
            Type::Bf16x2 => {
                type $t = Two<Brain>;
                $e
            }
            _ => return None,
        }
    };
}

fn saturated(x: f64) -> f64 {
    if x > 0.0 { x.min(1.0) } else { 0.0 }
}

pub(crate) fn least(a: f64, b: f64) -> f64 {
    if a.is_nan() || b < a || (b == a && b.is_sign_negative()) { b } else { a }
}

pub(crate) fn most(a: f64, b: f64) -> f64 {
    if a.is_nan() || b > a || (b == a && !b.is_sign_negative()) { b } else { a }
}

fn either_nan(a: f64, b: f64, otherwise: f64) -> f64 {
    if a.is_nan() || b.is_nan() { f64::NAN } else { otherwise }
}

pub(crate) fn binary(name: &str, ty: Type, style: Style) -> Option<Map2> {
    if style.round != Round::Nearest {
        return None;
    }
    Some(match (name, style.propagate) {
        ("add", _) => by_small!(ty, T => map2!(|a: T, b: T| a.lift2(b, |a, b| fma_odd(a, 1.0, b)))),
        ("sub", _) => {
            by_small!(ty, T => map2!(|a: T, b: T| a.lift2(b, |a, b| fma_odd(a, 1.0, -b))))
        }
        ("mul", _) => by_small!(ty, T => map2!(|a: T, b: T| a.lift2(b, |a, b| a * b))),
        ("min", false) => by_small!(ty, T => map2!(|a: T, b: T| a.lift2(b, least))),
        ("max", false) => by_small!(ty, T => map2!(|a: T, b: T| a.lift2(b, most))),
        ("min", true) => {
            by_small!(ty, T => map2!(|a: T, b: T| a.lift2(b, |a, b| either_nan(a, b, least(a, b)))))
        }
        ("max", true) => {
            by_small!(ty, T => map2!(|a: T, b: T| a.lift2(b, |a, b| either_nan(a, b, most(a, b)))))
        }
        _ => return None,
    })
}

pub(crate) fn ternary(name: &str, ty: Type, style: Style) -> Option<Map3> {
    if style.round != Round::Nearest {
        return None;
    }
    Some(match name {
        "fma" => by_small!(ty, T => map3!(|a: T, b: T, c: T| a.lift3(b, c, fma_odd))),
        "fma.relu" => by_small!(ty, T => map3!(|a: T, b: T, c: T| {
            a.lift3(b, c, |a, b, c| {
                let sum = fma_odd(a, b, c);
                if sum < 0.0 { 0.0 } else { sum }
            })
        })),
        _ => return None,
    })
}

pub(crate) fn unary(name: &str, ty: Type) -> Option<Map1> {
    Some(match name {
        "neg" => by_small!(ty, T => map1!(|a: T| a.bitwise(|x| x ^ 0x8000))),
        "abs" => by_small!(ty, T => map1!(|a: T| a.bitwise(|x| x & 0x7fff))),
        "sat" => by_small!(ty, T => map1!(|a: T| a.lift1(saturated))),
        "ex2" => by_small!(ty, T => map1!(|a: T| a.lift1(f64::exp2))),
        "tanh" => by_small!(ty, T => map1!(|a: T| a.lift1(f64::tanh))),
        _ => return None,
    })
}
