//! Directed rounding. In single precision the nearest result is computed, then moved by one step
//! if the exact result, which doubles can tell, lies on the wrong side of it.

pub(crate) use super::round::Round;

use super::exact;
use std::cmp::Ordering;

/// The exact sum of two doubles as a rounded sum and its error.
#[inline(always)]
fn two_sum(a: f64, b: f64) -> (f64, f64) {
    let sum = a + b;
    let shadow = sum - a;
    (sum, (a - (sum - shadow)) + (b - shadow))
}

fn sign(x: f64) -> Ordering {
    x.partial_cmp(&0.0).unwrap_or(Ordering::Equal)
}

/// Moves a nearest result to the wanted side; `exact` is the order of the exact result relative
/// to it.
fn adjust32(nearest: f32, exact: Ordering, mode: Round) -> f32 {
    let toward = match (mode, exact) {
        (Round::Nearest, _) | (_, Ordering::Equal) => return nearest,
        (Round::Down, Ordering::Less) => Ordering::Less,
        (Round::Up, Ordering::Greater) => Ordering::Greater,
        (Round::Zero, Ordering::Less) if nearest > 0.0 => Ordering::Less,
        (Round::Zero, Ordering::Greater) if nearest < 0.0 => Ordering::Greater,
        _ => return nearest,
    };
    if nearest.is_nan() {
        nearest
    } else if toward == Ordering::Less {
        nearest.next_down()
    } else {
        nearest.next_up()
    }
}

/// Sums to zero of numbers of opposite signs are negative when rounding down.
fn zero_sum(downward: bool, opposite: bool) -> bool {
    downward && opposite
}

/// Orders `high + low` relative to a nearby `result`.
fn order(high: f64, low: f64, result: f64) -> Ordering {
    if result.is_infinite() {
        return if high.is_infinite() { Ordering::Equal } else { sign(-result) };
    }
    sign(high - result).then(sign(low))
}

pub(crate) fn add32(a: f32, b: f32, mode: Round) -> f32 {
    let sum = a + b;
    if sum == 0.0 && zero_sum(mode == Round::Down, a.is_sign_negative() != b.is_sign_negative()) {
        return -0.0;
    }
    let (high, low) = two_sum(f64::from(a), f64::from(b));
    adjust32(sum, order(high, low, f64::from(sum)), mode)
}

pub(crate) fn mul32(a: f32, b: f32, mode: Round) -> f32 {
    let product = a * b;
    adjust32(product, order(f64::from(a) * f64::from(b), 0.0, f64::from(product)), mode)
}

pub(crate) fn fma32(a: f32, b: f32, c: f32, mode: Round) -> f32 {
    let sum = a.mul_add(b, c);
    let product = f64::from(a) * f64::from(b);
    if sum == 0.0
        && product == -f64::from(c)
        && zero_sum(mode == Round::Down, product.is_sign_negative() != c.is_sign_negative())
    {
        return -0.0;
    }
    let (high, low) = two_sum(product, f64::from(c));
    adjust32(sum, order(high, low, f64::from(sum)), mode)
}

pub(crate) fn div32(a: f32, b: f32, mode: Round) -> f32 {
    let quotient = a / b;
    if !a.is_finite() || !b.is_finite() || b == 0.0 {
        return quotient;
    }
    let exact = if quotient.is_infinite() {
        sign(f64::from(-quotient))
    } else {
        let order = sign(f64::from(a) - f64::from(quotient) * f64::from(b));
        if b < 0.0 { order.reverse() } else { order }
    };
    adjust32(quotient, exact, mode)
}

pub(crate) fn sqrt32(a: f32, mode: Round) -> f32 {
    let root = a.sqrt();
    if !root.is_finite() {
        return root;
    }
    adjust32(root, sign(f64::from(a) - f64::from(root) * f64::from(root)), mode)
}

pub(crate) fn add64(a: f64, b: f64, mode: Round) -> f64 {
    exact::fma(a, 1.0, b, mode)
}

pub(crate) fn mul64(a: f64, b: f64, mode: Round) -> f64 {
    // Adding the zero of the product's sign changes nothing.
    let zero = if a.is_sign_negative() == b.is_sign_negative() { 0.0 } else { -0.0 };
    exact::fma(a, b, zero, mode)
}

pub(crate) fn fma64(a: f64, b: f64, c: f64, mode: Round) -> f64 {
    exact::fma(a, b, c, mode)
}

pub(crate) fn div64(a: f64, b: f64, mode: Round) -> f64 {
    exact::div(a, b, mode)
}

pub(crate) fn sqrt64(a: f64, mode: Round) -> f64 {
    exact::sqrt(a, mode)
}

/// A double as a single.
pub(crate) fn narrow(a: f64, mode: Round) -> f32 {
    let near = a as f32;
    if a.is_infinite() {
        return near;
    }
    adjust32(near, order(a, 0.0, f64::from(near)), mode)
}

/// `a * b + c` rounded to odd: rounding it once more, to far fewer bits, gives what rounding
/// the exact result once would have.
pub(crate) fn fma_odd(a: f64, b: f64, c: f64) -> f64 {
    let product = a * b;
    let (sum, error) = two_sum(product, c);
    if !sum.is_finite() || error == 0.0 || sum.to_bits() & 1 == 1 {
        return sum;
    }
    if error > 0.0 { sum.next_up() } else { sum.next_down() }
}

/// The shape of a 16-bit format: stored fraction bits, and the exponent of the smallest
/// normal number.
#[derive(Clone, Copy)]
pub(crate) struct Small {
    fraction: u32,
    least: i32,
}

pub(crate) const F16: Small = Small { fraction: 10, least: -14 };
pub(crate) const BF16: Small = Small { fraction: 7, least: -126 };

/// A double as a 16-bit number; NaN becomes 0x7fff.
pub(crate) fn to_small(a: f64, format: Small, mode: Round) -> u16 {
    let negative = a.is_sign_negative();
    let sign = u16::from(negative) << 15;
    if a.is_nan() {
        return 0x7fff;
    }
    let infinity = ((1u64 << (15 - format.fraction)) - 1) << format.fraction;
    let magnitude = a.abs();
    if magnitude.is_infinite() {
        return sign | infinity as u16;
    }
    // As an integer in units of the last place; a double holds that exactly.
    let exponent = ((magnitude.to_bits() >> 52) as i32 - 1023).max(format.least);
    let unit = exponent - format.fraction as i32;
    let scaled = magnitude * f64::from_bits(((1023 - unit) as u64) << 52);
    let rounded = match mode {
        Round::Nearest => scaled.round_ties_even(),
        Round::Zero => scaled.trunc(),
        Round::Down if negative => scaled.ceil(),
        Round::Down => scaled.floor(),
        Round::Up if negative => scaled.floor(),
        Round::Up => scaled.ceil(),
    };
    // A carry out of the fraction steps the exponent, which is what addition does.
    let biased = (exponent - format.least) as u64;
    let bits = (biased << format.fraction) + rounded as u64;
    let truncates = match mode {
        Round::Nearest => false,
        Round::Zero => true,
        Round::Down => !negative,
        Round::Up => negative,
    };
    let limit = if truncates { infinity - 1 } else { infinity };
    sign | bits.min(limit) as u16
}
