//! `cvt`.

use super::half::{Brain, Half};
use super::rounding::{BF16, F16, Round, narrow, to_small};
use super::{Bits, map1, map2};
use crate::ptx::ast::Type;
use crate::ptx::code::{Map1, Map2};

/// A conversion.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Conversion {
    pub(crate) to: Type,
    pub(crate) from: Type,
    pub(crate) round: Round,
    /// Rounds to an integral value (`.rni` to `.rpi`).
    pub(crate) integral: bool,
    pub(crate) saturate: bool,
    pub(crate) flush: bool,
    pub(crate) relu: bool,
}

/// The types of a conversion, in the order of their codes.
#[rustfmt::skip]
const TYPES: [Type; 16] = [
    Type::B8, Type::B16, Type::B32, Type::B64, Type::U8, Type::U16, Type::U32, Type::U64,
    Type::S8, Type::S16, Type::S32, Type::S64, Type::F16, Type::Bf16, Type::F32, Type::F64,
];

fn code(ty: Type) -> u64 {
    TYPES.iter().position(|&each| each == ty).unwrap_or(0) as u64
}

impl Conversion {
    /// As the constant operand of [`any`].
    pub(crate) fn packed(self) -> u64 {
        let round = match self.round {
            Round::Nearest => 0,
            Round::Zero => 1,
            Round::Down => 2,
            Round::Up => 3,
        };
        code(self.to)
            | code(self.from) << 4
            | round << 8
            | u64::from(self.integral) << 10
            | u64::from(self.saturate) << 11
            | u64::from(self.flush) << 12
            | u64::from(self.relu) << 13
    }

    fn unpacked(bits: u64) -> Conversion {
        let rounds = [Round::Nearest, Round::Zero, Round::Down, Round::Up];
        Conversion {
            to: TYPES[bits as usize & 15],
            from: TYPES[(bits >> 4) as usize & 15],
            round: rounds[(bits >> 8) as usize & 3],
            integral: bits >> 10 & 1 != 0,
            saturate: bits >> 11 & 1 != 0,
            flush: bits >> 12 & 1 != 0,
            relu: bits >> 13 & 1 != 0,
        }
    }
}

/// A kernel for every conversion, described by the second source.
pub(crate) fn any() -> Map2 {
    map2!(|a: u64, description: u64| convert(&Conversion::unpacked(description), a))
}

/// A kernel for the common conversions.
pub(crate) fn common(c: Conversion) -> Option<Map1> {
    if c.saturate || c.flush || c.relu {
        return None;
    }
    let nearest = c.round == Round::Nearest;
    let truncates = c.round == Round::Zero;
    Some(match (c.to, c.from) {
        (Type::F32, Type::S32) if nearest => map1!(|a: i32| a as f32),
        (Type::F32, Type::U32) if nearest => map1!(|a: u32| a as f32),
        (Type::F32, Type::S64) if nearest => map1!(|a: i64| a as f32),
        (Type::F32, Type::U64) if nearest => map1!(|a: u64| a as f32),
        (Type::F64, Type::S32) => map1!(|a: i32| f64::from(a)),
        (Type::F64, Type::U32) => map1!(|a: u32| f64::from(a)),
        (Type::F64, Type::F32) if !c.integral => map1!(|a: f32| f64::from(a)),
        (Type::F32, Type::F64) if nearest && !c.integral => map1!(|a: f64| a as f32),
        (Type::F32, Type::F16) => map1!(|a: Half| a.value()),
        (Type::F32, Type::Bf16) => map1!(|a: Brain| a.value()),
        (Type::F16, Type::F32) if nearest => {
            map1!(|a: f32| u64::from(to_small(f64::from(a), F16, Round::Nearest)))
        }
        (Type::Bf16, Type::F32) if nearest => {
            map1!(|a: f32| u64::from(to_small(f64::from(a), BF16, Round::Nearest)))
        }
        (Type::S32, Type::F32) if truncates => map1!(|a: f32| a as i32),
        (Type::U32, Type::F32) if truncates => map1!(|a: f32| a as u32),
        (Type::S32, Type::F32) if nearest => map1!(|a: f32| a.round_ties_even() as i32),
        _ => return None,
    })
}

fn integer_of(bits: u64, ty: Type) -> i128 {
    let shift = 64 - 8 * ty.size() as u32;
    if ty.is_signed() {
        i128::from((bits << shift) as i64 >> shift)
    } else {
        i128::from(bits << shift >> shift)
    }
}

fn range(ty: Type) -> (i128, i128) {
    let width = 8 * ty.size() as u32;
    if ty.is_signed() {
        (-(1 << (width - 1)), (1 << (width - 1)) - 1)
    } else {
        (0, (1 << width) - 1)
    }
}

fn integral(value: f64, round: Round) -> f64 {
    match round {
        Round::Nearest => value.round_ties_even(),
        Round::Zero => value.trunc(),
        Round::Down => value.floor(),
        Round::Up => value.ceil(),
    }
}

fn flushed(value: f64) -> f64 {
    if value.abs() < f64::from(f32::MIN_POSITIVE) { 0f64.copysign(value) } else { value }
}

/// Rounds an integer to a double's precision, keeping what is needed to round once more.
fn double_of(value: i128, to: Type, round: Round) -> f64 {
    if to == Type::F64 {
        let near = value as f64;
        let exact = value.cmp(&(near as i128));
        return match (round, exact) {
            (Round::Down, std::cmp::Ordering::Less) => near.next_down(),
            (Round::Up, std::cmp::Ordering::Greater) => near.next_up(),
            (Round::Zero, std::cmp::Ordering::Less) if near > 0.0 => near.next_down(),
            (Round::Zero, std::cmp::Ordering::Greater) if near < 0.0 => near.next_up(),
            _ => near,
        };
    }
    // Odd rounding at 40 bits is far beyond what the narrower types keep.
    let magnitude = value.unsigned_abs();
    let excess = (128 - magnitude.leading_zeros()).saturating_sub(40);
    let kept = magnitude >> excess;
    let lost = magnitude != kept << excess;
    let odd = ((kept | u128::from(lost)) << excess) as f64;
    if value < 0 { -odd } else { odd }
}

/// One conversion of one value, for every pair of types but the packed ones.
pub(crate) fn convert(c: &Conversion, bits: u64) -> u64 {
    if !c.from.is_float() {
        let value = integer_of(bits, c.from);
        if !c.to.is_float() {
            let (low, high) = range(c.to);
            return if c.saturate { value.clamp(low, high) } else { value } as u64;
        }
        return to_float(c, double_of(value, c.to, c.round));
    }
    let value = match c.from {
        Type::F16 => f64::from(Half(bits as u16).value()),
        Type::Bf16 => f64::from(Brain(bits as u16).value()),
        Type::F32 => f64::from(f32::of(bits)),
        _ => f64::of(bits),
    };
    let value = if c.flush && c.from == Type::F32 { flushed(value) } else { value };
    if c.to.is_float() {
        return to_float(c, if c.integral { integral(value, c.round) } else { value });
    }
    if value.is_nan() {
        let wide = c.from == Type::F64 || matches!(c.to, Type::S64 | Type::U64);
        return if wide { 1 << (8 * c.to.size() - 1) } else { 0 };
    }
    let (low, high) = range(c.to);
    (integral(value, c.round) as i128).clamp(low, high) as u64
}

fn to_float(c: &Conversion, value: f64) -> u64 {
    let value = if c.saturate { if value > 0.0 { value.min(1.0) } else { 0.0 } } else { value };
    let value = if c.relu && value < 0.0 { 0.0 } else { value };
    match c.to {
        Type::F16 => u64::from(to_small(value, F16, c.round)),
        Type::Bf16 => u64::from(to_small(value, BF16, c.round)),
        Type::F32 => {
            let single = narrow(value, c.round);
            if c.flush { super::float::flush(single).bits() } else { single.bits() }
        }
        _ => value.bits(),
    }
}
