//! Integer arithmetic, logic and bit manipulation.

use super::{by_int, by_width, map1, map2, map3, map4};
use crate::ptx::ast::Type;
use crate::ptx::code::{Map1, Map2, Map3, Map4};

trait Integer: Copy + PartialEq + PartialOrd {
    fn quotient(self, divisor: Self) -> Self;
    fn remainder(self, divisor: Self) -> Self;
    fn high(self, other: Self) -> Self;
    fn magnitude_between(self, other: Self) -> Self;
    /// Shift right with the sign (or zeros), by any amount.
    fn shifted_right(self, amount: u32) -> Self;
    fn clamped_add(self, other: Self) -> Self;
    fn clamped_sub(self, other: Self) -> Self;
}

macro_rules! integer {
    ($($t:ty, $wide:ty, $by_zero:expr);*) => {$(
        impl Integer for $t {
            #[inline(always)]
            fn quotient(self, divisor: Self) -> Self {
                // PTX leaves division by zero open; GPUs give all ones.
                if divisor == 0 { $by_zero } else { self.wrapping_div(divisor) }
            }
            #[inline(always)]
            fn remainder(self, divisor: Self) -> Self {
                if divisor == 0 { self } else { self.wrapping_rem(divisor) }
            }
            #[inline(always)]
            fn high(self, other: Self) -> Self {
                ((self as $wide * other as $wide) >> Self::BITS) as $t
            }
            #[inline(always)]
            fn magnitude_between(self, other: Self) -> Self {
                if self < other { other.wrapping_sub(self) } else { self.wrapping_sub(other) }
            }
            #[inline(always)]
            fn shifted_right(self, amount: u32) -> Self {
                let clamped = amount.min(Self::BITS - 1);
                let result = self >> clamped;
                // For unsigned types nothing is left at the full width.
                if amount >= Self::BITS && Self::MIN == 0 { 0 } else { result }
            }
            #[inline(always)]
            fn clamped_add(self, other: Self) -> Self {
                self.saturating_add(other)
            }
            #[inline(always)]
            fn clamped_sub(self, other: Self) -> Self {
                self.saturating_sub(other)
            }
        }
    )*};
}
integer!(
    u8, u16, u8::MAX; u16, u32, u16::MAX; u32, u64, u32::MAX; u64, u128, u64::MAX;
    i8, i16, -1; i16, i32, -1; i32, i64, -1; i64, i128, -1
);

/// `d = a op b` for operations whose name needs no modifier but the type.
pub(crate) fn binary(name: &str, ty: Type) -> Option<Map2> {
    Some(match name {
        "add" => by_width!(ty, T => map2!(|a: T, b: T| a.wrapping_add(b))),
        "sub" => by_width!(ty, T => map2!(|a: T, b: T| a.wrapping_sub(b))),
        "add.sat" => by_int!(ty, T => map2!(|a: T, b: T| a.clamped_add(b))),
        "sub.sat" => by_int!(ty, T => map2!(|a: T, b: T| a.clamped_sub(b))),
        "mul.lo" => by_width!(ty, T => map2!(|a: T, b: T| a.wrapping_mul(b))),
        "mul.hi" => by_int!(ty, T => map2!(|a: T, b: T| a.high(b))),
        "mul.wide" => match ty {
            Type::U16 => map2!(|a: u16, b: u16| u32::from(a) * u32::from(b)),
            Type::S16 => map2!(|a: i16, b: i16| i32::from(a) * i32::from(b)),
            Type::U32 => map2!(|a: u32, b: u32| u64::from(a) * u64::from(b)),
            Type::S32 => map2!(|a: i32, b: i32| i64::from(a) * i64::from(b)),
            _ => return None,
        },
        "mul24.lo" => match ty {
            Type::U32 => map2!(|a: u64, b: u64| ((a & 0xff_ffff) * (b & 0xff_ffff)) as u32),
            Type::S32 => map2!(|a: u64, b: u64| (low24(a) * low24(b)) as u32),
            _ => return None,
        },
        "mul24.hi" => match ty {
            Type::U32 => {
                map2!(|a: u64, b: u64| (((a & 0xff_ffff) * (b & 0xff_ffff)) >> 16) as u32)
            }
            Type::S32 => map2!(|a: u64, b: u64| ((low24(a) * low24(b)) >> 16) as u32),
            _ => return None,
        },
        "div" => by_int!(ty, T => map2!(|a: T, b: T| a.quotient(b))),
        "rem" => by_int!(ty, T => map2!(|a: T, b: T| a.remainder(b))),
        "min" => by_int!(ty, T => map2!(|a: T, b: T| a.min(b))),
        "max" => by_int!(ty, T => map2!(|a: T, b: T| a.max(b))),
        "min.relu" if ty == Type::S32 => map2!(|a: i32, b: i32| a.min(b).max(0)),
        "max.relu" if ty == Type::S32 => map2!(|a: i32, b: i32| a.max(b).max(0)),
        "and" => map2!(|a: u64, b: u64| a & b),
        "or" => map2!(|a: u64, b: u64| a | b),
        "xor" => map2!(|a: u64, b: u64| a ^ b),
        "shl" => {
            by_width!(ty, T => map2!(|a: T, b: u32| if b >= T::BITS { 0 } else { a << b }))
        }
        "shr" => by_int!(ty, T => map2!(|a: T, b: u32| a.shifted_right(b))),
        "bmsk.clamp" => map2!(|a: u32, b: u32| bits_from(a.min(32), b.min(32))),
        "bmsk.wrap" => map2!(|a: u32, b: u32| bits_from(a & 31, b & 31)),
        "szext.clamp" => match ty {
            Type::U32 => map2!(|a: u32, b: u32| a & bits_from(0, b.min(32))),
            Type::S32 => map2!(|a: u32, b: u32| sign_extended(a, b.min(32))),
            _ => return None,
        },
        "szext.wrap" => match ty {
            Type::U32 => map2!(|a: u32, b: u32| a & bits_from(0, b & 31)),
            Type::S32 => map2!(|a: u32, b: u32| sign_extended(a, b & 31)),
            _ => return None,
        },
        // The carry and borrow out of an addition and a subtraction.
        "carry" => by_width!(ty, T => map2!(|a: T, b: T| a.overflowing_add(b).1)),
        "borrow" => by_width!(ty, T => map2!(|a: T, b: T| a < b)),
        _ => return None,
    })
}

/// Applies an operation to the low and to the high halves of two words.
#[inline(always)]
fn halves(a: u32, b: u32, f: impl Fn(u16, u16) -> u16) -> u32 {
    u32::from(f(a as u16, b as u16)) | u32::from(f((a >> 16) as u16, (b >> 16) as u16)) << 16
}

/// [`halves`] with signs; with `relu`, what is negative becomes zero.
#[inline(always)]
fn signed_halves(a: u32, b: u32, relu: bool, f: impl Fn(i16, i16) -> i16) -> u32 {
    halves(a, b, |a, b| {
        let value = f(a as i16, b as i16);
        (if relu { value.max(0) } else { value }) as u16
    })
}

/// `add`, `min` and `max` of two integers of 16 bits in one register (PTX ISA 8.0).
pub(crate) fn pair(name: &str, relu: bool, ty: &str) -> Option<Map2> {
    Some(match (name, relu, ty) {
        ("add", false, "s16x2" | "u16x2") => {
            map2!(|a: u32, b: u32| halves(a, b, u16::wrapping_add))
        }
        ("min", false, "u16x2") => map2!(|a: u32, b: u32| halves(a, b, u16::min)),
        ("max", false, "u16x2") => map2!(|a: u32, b: u32| halves(a, b, u16::max)),
        ("min", false, "s16x2") => map2!(|a: u32, b: u32| signed_halves(a, b, false, i16::min)),
        ("max", false, "s16x2") => map2!(|a: u32, b: u32| signed_halves(a, b, false, i16::max)),
        ("min", true, "s16x2") => map2!(|a: u32, b: u32| signed_halves(a, b, true, i16::min)),
        ("max", true, "s16x2") => map2!(|a: u32, b: u32| signed_halves(a, b, true, i16::max)),
        _ => return None,
    })
}

/// Ones from a bit on, as many as there are of the given number; both are at most 32.
#[inline(always)]
fn bits_from(start: u32, count: u32) -> u32 {
    let below = |end: u32| ((1u64 << end) - 1) as u32;
    below((start + count).min(32)) & !below(start)
}

/// The low bits, of which the highest is a sign; at most 32.
#[inline(always)]
fn sign_extended(value: u32, bits: u32) -> u32 {
    if bits == 0 { 0 } else { ((value << (32 - bits)) as i32 >> (32 - bits)) as u32 }
}

/// The low 24 bits with their sign.
#[inline(always)]
fn low24(a: u64) -> i64 {
    (a << 40) as i64 >> 40
}

pub(crate) fn unary(name: &str, ty: Type) -> Option<Map1> {
    Some(match name {
        "abs" => match ty {
            Type::S16 => map1!(|a: i16| a.wrapping_abs()),
            Type::S32 => map1!(|a: i32| a.wrapping_abs()),
            Type::S64 => map1!(|a: i64| a.wrapping_abs()),
            _ => return None,
        },
        "neg" => by_width!(ty, T => map1!(|a: T| a.wrapping_neg())),
        "not" if ty == Type::Pred => map1!(|a: bool| !a),
        "not" => map1!(|a: u64| !a),
        "cnot" => by_width!(ty, T => map1!(|a: T| a == 0)),
        "clz" => by_width!(ty, T => map1!(|a: T| a.leading_zeros())),
        "popc" => by_width!(ty, T => map1!(|a: T| a.count_ones())),
        "brev" => by_width!(ty, T => map1!(|a: T| a.reverse_bits())),
        "bfind" => match ty {
            Type::U32 => map1!(|a: u32| 31u32.wrapping_sub(a.leading_zeros())),
            Type::S32 => map1!(|a: i32| 31u32.wrapping_sub((a ^ (a >> 31)).leading_zeros())),
            Type::U64 => map1!(|a: u64| 63u32.wrapping_sub(a.leading_zeros())),
            Type::S64 => map1!(|a: i64| 63u32.wrapping_sub((a ^ (a >> 63)).leading_zeros())),
            _ => return None,
        },
        "bfind.shiftamt" => match ty {
            Type::U32 => map1!(|a: u32| shift_amount(a.leading_zeros(), 32)),
            Type::S32 => map1!(|a: i32| shift_amount((a ^ (a >> 31)).leading_zeros(), 32)),
            Type::U64 => map1!(|a: u64| shift_amount(a.leading_zeros(), 64)),
            Type::S64 => map1!(|a: i64| shift_amount((a ^ (a >> 63)).leading_zeros(), 64)),
            _ => return None,
        },
        // Extends a value to the whole slot, by its type.
        "extend" => by_int!(ty, T => map1!(|a: T| a)),
        _ => return None,
    })
}

#[inline(always)]
fn shift_amount(zeros: u32, width: u32) -> u32 {
    if zeros == width { u32::MAX } else { zeros }
}

pub(crate) fn ternary(name: &str, ty: Type) -> Option<Map3> {
    Some(match name {
        "mad.lo" => {
            by_width!(ty, T => map3!(|a: T, b: T, c: T| a.wrapping_mul(b).wrapping_add(c)))
        }
        "mad.hi" => by_int!(ty, T => map3!(|a: T, b: T, c: T| a.high(b).wrapping_add(c))),
        "mad.hi.sat" => {
            by_int!(ty, T => map3!(|a: T, b: T, c: T| a.high(b).clamped_add(c)))
        }
        "mad.wide" => match ty {
            Type::U16 => {
                map3!(|a: u16, b: u16, c: u32| (u32::from(a) * u32::from(b)).wrapping_add(c))
            }
            Type::S16 => {
                map3!(|a: i16, b: i16, c: i32| (i32::from(a) * i32::from(b)).wrapping_add(c))
            }
            Type::U32 => {
                map3!(|a: u32, b: u32, c: u64| (u64::from(a) * u64::from(b)).wrapping_add(c))
            }
            Type::S32 => {
                map3!(|a: i32, b: i32, c: i64| (i64::from(a) * i64::from(b)).wrapping_add(c))
            }
            _ => return None,
        },
        "sad" => {
            by_int!(ty, T => map3!(|a: T, b: T, c: T| c.wrapping_add(a.magnitude_between(b))))
        }
        "bfe" => match ty {
            Type::U32 => map3!(|a: u32, b: u32, c: u32| extract(u64::from(a), b, c, 32, false)),
            Type::S32 => map3!(|a: i32, b: u32, c: u32| extract(a as u64, b, c, 32, true)),
            Type::U64 => map3!(|a: u64, b: u32, c: u32| extract(a, b, c, 64, false)),
            Type::S64 => map3!(|a: u64, b: u32, c: u32| extract(a, b, c, 64, true)),
            _ => return None,
        },
        "prmt" => map3!(|a: u32, b: u32, c: u32| permute(a, b, c)),
        "prmt.f4e" => {
            map3!(|a: u32, b: u32, c: u32| permute(a, b, pick(c, [0x3210, 0x4321, 0x5432, 0x6543])))
        }
        "prmt.b4e" => {
            map3!(|a: u32, b: u32, c: u32| permute(a, b, pick(c, [0x5670, 0x6701, 0x7012, 0x0123])))
        }
        "prmt.rc8" => {
            map3!(|a: u32, b: u32, c: u32| permute(a, b, pick(c, [0, 0x1111, 0x2222, 0x3333])))
        }
        "prmt.ecl" => {
            map3!(|a: u32, b: u32, c: u32| permute(a, b, pick(c, [0x3210, 0x3211, 0x3222, 0x3333])))
        }
        "prmt.ecr" => {
            map3!(|a: u32, b: u32, c: u32| permute(a, b, pick(c, [0, 0x1110, 0x2210, 0x3210])))
        }
        "prmt.rc16" => {
            map3!(|a: u32, b: u32, c: u32| permute(a, b, pick(c, [0x1010, 0x3232, 0x1010, 0x3232])))
        }
        "shf.l.wrap" => map3!(|a: u32, b: u32, c: u32| (joined(a, b) << (c & 31)) >> 32),
        "shf.l.clamp" => map3!(|a: u32, b: u32, c: u32| (joined(a, b) << c.min(32)) >> 32),
        "shf.r.wrap" => map3!(|a: u32, b: u32, c: u32| joined(a, b) >> (c & 31)),
        "shf.r.clamp" => map3!(|a: u32, b: u32, c: u32| joined(a, b) >> c.min(32)),
        "select" => map3!(|a: u64, b: u64, c: bool| if c { a } else { b }),
        "slct.s32" => map3!(|a: u64, b: u64, c: i32| if c >= 0 { a } else { b }),
        "slct.f32" => map3!(|a: u64, b: u64, c: f32| if c >= 0.0 { a } else { b }),
        "carry3" => by_width!(ty, T => map3!(|a: T, b: T, c: bool| {
            let (sum, first) = a.overflowing_add(b);
            first | sum.overflowing_add(T::from(c)).1
        })),
        "add3" => by_width!(ty, T => map3!(|a: T, b: T, c: bool| {
            a.wrapping_add(b).wrapping_add(T::from(c))
        })),
        "borrow3" => by_width!(ty, T => map3!(|a: T, b: T, c: bool| {
            let (difference, first) = a.overflowing_sub(b);
            first | difference.overflowing_sub(T::from(c)).1
        })),
        "sub3" => by_width!(ty, T => map3!(|a: T, b: T, c: bool| {
            a.wrapping_sub(b).wrapping_sub(T::from(c))
        })),
        "fns" => map3!(|a: u32, b: u32, c: i32| nth_set(a, b, c)),
        "dp4a.u32.u32" => map3!(|a: u32, b: u32, c: u32| dot4(a, b, c, false, false)),
        "dp4a.u32.s32" => map3!(|a: u32, b: u32, c: u32| dot4(a, b, c, false, true)),
        "dp4a.s32.u32" => map3!(|a: u32, b: u32, c: u32| dot4(a, b, c, true, false)),
        "dp4a.s32.s32" => map3!(|a: u32, b: u32, c: u32| dot4(a, b, c, true, true)),
        "dp2a.u32.u32.lo" => map3!(|a: u32, b: u32, c: u32| dot2(a, b, c, false, false)),
        "dp2a.u32.s32.lo" => map3!(|a: u32, b: u32, c: u32| dot2(a, b, c, false, true)),
        "dp2a.s32.u32.lo" => map3!(|a: u32, b: u32, c: u32| dot2(a, b, c, true, false)),
        "dp2a.s32.s32.lo" => map3!(|a: u32, b: u32, c: u32| dot2(a, b, c, true, true)),
        "dp2a.u32.u32.hi" => map3!(|a: u32, b: u32, c: u32| dot2(a, b >> 16, c, false, false)),
        "dp2a.u32.s32.hi" => map3!(|a: u32, b: u32, c: u32| dot2(a, b >> 16, c, false, true)),
        "dp2a.s32.u32.hi" => map3!(|a: u32, b: u32, c: u32| dot2(a, b >> 16, c, true, false)),
        "dp2a.s32.s32.hi" => map3!(|a: u32, b: u32, c: u32| dot2(a, b >> 16, c, true, true)),
        _ => return None,
    })
}

#[inline(always)]
fn byte(word: u32, index: u32, signed: bool) -> i32 {
    let byte = (word >> (8 * index)) as u8;
    if signed { i32::from(byte as i8) } else { i32::from(byte) }
}

#[inline(always)]
fn half_word(word: u32, index: u32, signed: bool) -> i32 {
    let half = (word >> (16 * index)) as u16;
    if signed { i32::from(half as i16) } else { i32::from(half) }
}

/// Four products of bytes, added to `c`.
#[inline(always)]
fn dot4(a: u32, b: u32, c: u32, a_signed: bool, b_signed: bool) -> u32 {
    (0..4).fold(c, |sum, i| sum.wrapping_add((byte(a, i, a_signed) * byte(b, i, b_signed)) as u32))
}

/// Two products of a half word and a byte, added to `c`.
#[inline(always)]
fn dot2(a: u32, b: u32, c: u32, a_signed: bool, b_signed: bool) -> u32 {
    (0..2).fold(c, |sum, i| {
        sum.wrapping_add((half_word(a, i, a_signed) * byte(b, i, b_signed)) as u32)
    })
}

#[inline(always)]
fn joined(low: u32, high: u32) -> u64 {
    u64::from(high) << 32 | u64::from(low)
}

#[inline(always)]
fn pick(control: u32, table: [u32; 4]) -> u32 {
    table[control as usize & 3]
}

/// The position of the `nth` set bit from `base` on, upwards or downwards.
fn nth_set(mask: u32, base: u32, nth: i32) -> u32 {
    let mut position = i64::from(base);
    let mut left = nth.unsigned_abs();
    let step = if nth < 0 { -1 } else { 1 };
    while (0..32).contains(&position) {
        if mask >> position & 1 != 0 {
            left = left.saturating_sub(1);
            if left == 0 {
                return position as u32;
            }
        }
        if nth == 0 {
            break;
        }
        position += step;
    }
    u32::MAX
}

fn permute(a: u32, b: u32, control: u32) -> u32 {
    let bytes = joined(a, b).to_le_bytes();
    let mut result = [0; 4];
    for (index, slot) in result.iter_mut().enumerate() {
        let selector = control >> (4 * index);
        let byte = bytes[selector as usize & 7];
        *slot = if selector & 8 == 0 { byte } else { ((byte as i8) >> 7) as u8 };
    }
    u32::from_le_bytes(result)
}

fn extract(value: u64, position: u32, length: u32, width: u32, signed: bool) -> u64 {
    let (position, length) = (position & 0xff, length & 0xff);
    let sign_at = (position + length).saturating_sub(1).min(width - 1);
    let negative = signed && length != 0 && value >> sign_at & 1 != 0;
    let field = if position >= width { 0 } else { value >> position };
    let taken = length.min(width.saturating_sub(position));
    let kept = if taken >= 64 { u64::MAX } else { (1 << taken) - 1 };
    if negative { field & kept | !kept } else { field & kept }
}

fn insert(field: u64, into: u64, position: u32, length: u32, width: u32) -> u64 {
    let (position, length) = (position & 0xff, length & 0xff);
    if position >= width {
        return into;
    }
    let mask = (if length >= 64 { u64::MAX } else { (1 << length) - 1 }) << position;
    into & !mask | (field << position) & mask
}

pub(crate) fn quaternary(name: &str, ty: Type) -> Option<Map4> {
    Some(match (name, ty.size()) {
        ("bfi", 4) => map4!(|a: u32, b: u32, c: u32, d: u32| {
            insert(u64::from(a), u64::from(b), c, d, 32) as u32
        }),
        ("bfi", _) => map4!(|a: u64, b: u64, c: u32, d: u32| insert(a, b, c, d, 64)),
        ("lop3", _) => map4!(|a: u64, b: u64, c: u64, table: u64| {
            let mut result = 0;
            for row in 0..8u64 {
                let x = if row & 4 != 0 { a } else { !a };
                let y = if row & 2 != 0 { b } else { !b };
                let z = if row & 1 != 0 { c } else { !c };
                result |= x & y & z & (table >> row & 1).wrapping_neg();
            }
            result
        }),
        _ => return None,
    })
}
