//! Pairs of floating-point numbers of eight bits and less.

use super::half::Half;
use super::rounding::{F16, Round, to_small};
use super::{map2, map3};
use crate::ptx::code::{Map2, Map3};

/// A format.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Tiny {
    /// Bits of a number.
    pub(crate) width: u32,
    fraction: u32,
    /// Exponent of the least normal number.
    least: i32,
    /// The bits of the greatest number.
    greatest: u64,
    /// What a number that is none becomes: the greatest one where the format has nothing else.
    nan: u64,
}

/// Four bits of exponent, three of fraction.
pub(crate) const E4M3: Tiny = Tiny { width: 8, fraction: 3, least: -6, greatest: 0x7e, nan: 0x7f };
/// Five bits of exponent, two of fraction.
pub(crate) const E5M2: Tiny = Tiny { width: 8, fraction: 2, least: -14, greatest: 0x7b, nan: 0x7f };

/// The formats by the numbers that instructions describe them with.
const FORMATS: [(&str, Tiny); 5] = [
    ("e4m3x2", E4M3),
    ("e5m2x2", E5M2),
    ("e3m2x2", Tiny { width: 8, fraction: 2, least: -2, greatest: 0x1f, nan: 0x1f }),
    ("e2m3x2", Tiny { width: 8, fraction: 3, least: 0, greatest: 0x1f, nan: 0x1f }),
    ("e2m1x2", Tiny { width: 4, fraction: 1, least: 0, greatest: 0x7, nan: 0x7 }),
];

/// The number of a format by its name.
pub(crate) fn format(name: &str) -> Option<usize> {
    FORMATS.iter().position(|(known, _)| *known == name)
}

/// Bits of a number of a format.
pub(crate) fn width(format: usize) -> u32 {
    FORMATS[format].1.width
}

/// A conversion as the constant operand of the kernels.
pub(crate) fn packed(format: usize, relu: bool) -> u64 {
    format as u64 | u64::from(relu) << 3
}

fn unpacked(description: u64) -> (Tiny, bool) {
    (FORMATS[(description & 7) as usize % FORMATS.len()].1, description >> 3 & 1 != 0)
}

impl Tiny {
    /// The nearest number; what is beyond the greatest becomes that.
    fn rounded(self, value: f64, relu: bool) -> u64 {
        if value.is_nan() {
            return self.nan;
        }
        if relu && value <= 0.0 {
            return 0;
        }
        let sign = u64::from(value.is_sign_negative()) << (self.width.min(self.bits()) - 1);
        let magnitude = value.abs();
        if magnitude.is_infinite() {
            return sign | self.greatest;
        }
        let exponent = ((magnitude.to_bits() >> 52) as i32 - 1023).max(self.least);
        // As an integer in units of the last place; a double holds that exactly.
        let unit = exponent - self.fraction as i32;
        let scaled = (magnitude * 2f64.powi(-unit)).round_ties_even() as u64;
        // A carry out of the fraction steps the exponent, which is what addition does.
        let bits = (((exponent - self.least) as u64) << self.fraction) + scaled;
        sign | bits.min(self.greatest)
    }

    /// Bits of a number with its sign.
    fn bits(self) -> u32 {
        64 - (self.nan | self.greatest).leading_zeros() + 1
    }

    /// The number that the low bits stand for.
    pub(crate) fn value(self, bits: u64) -> f64 {
        let sign = bits >> (self.bits() - 1) & 1;
        let magnitude = bits & ((1 << (self.bits() - 1)) - 1);
        let has_nan = self.nan > self.greatest;
        let value = if has_nan && magnitude == self.nan {
            f64::NAN
        } else if has_nan && magnitude > self.greatest {
            // Between the greatest number and the last NaN: infinity, then other NaN.
            if magnitude == self.greatest + 1 { f64::INFINITY } else { f64::NAN }
        } else {
            let exponent = magnitude >> self.fraction;
            let fraction = magnitude & ((1 << self.fraction) - 1);
            let normal = u64::from(exponent > 0) << self.fraction;
            let unit = self.least + exponent.saturating_sub(1) as i32 - self.fraction as i32;
            (fraction | normal) as f64 * 2f64.powi(unit)
        };
        if sign != 0 { -value } else { value }
    }
}

fn pair(high: f64, low: f64, description: u64) -> u64 {
    let (tiny, relu) = unpacked(description);
    tiny.rounded(high, relu) << tiny.width | tiny.rounded(low, relu)
}

/// From two numbers of single precision, the first for the high part.
pub(crate) fn from_singles() -> Map3 {
    map3!(|high: f32, low: f32, description: u64| pair(
        f64::from(high),
        f64::from(low),
        description
    ))
}

/// From a pair of numbers of half precision.
pub(crate) fn from_halves() -> Map2 {
    map2!(|both: u32, description: u64| {
        let [high, low] = [both >> 16, both].map(|bits| f64::from(Half(bits as u16).value()));
        pair(high, low, description)
    })
}

/// To a pair of numbers of half precision, which holds all of them.
pub(crate) fn to_halves() -> Map2 {
    map2!(|both: u64, description: u64| {
        let (tiny, relu) = unpacked(description);
        let half = |bits: u64| {
            let value = tiny.value(bits & ((1 << tiny.width) - 1));
            let value = if relu && value <= 0.0 { 0.0 } else { value };
            u64::from(to_small(value, F16, Round::Nearest))
        };
        half(both >> tiny.width) << 16 | half(both)
    })
}

/// How a number is rounded to `tf32`: to the nearest, where ties go away from zero or to the even one, or
/// towards zero.
pub(crate) fn tf32_mode(name: &str) -> Option<u64> {
    match name {
        "rna" => Some(0),
        "rn" => Some(1),
        "rz" => Some(2),
        _ => None,
    }
}

fn tf32(x: u32, mode: u64) -> u64 {
    const LOST: u32 = 13;
    const INFINITY: u32 = 0x7f80_0000;
    let (sign, magnitude) = (x & 0x8000_0000, x & 0x7fff_ffff);
    if magnitude > INFINITY {
        return 0x7fff_ffff;
    }
    if mode >> 3 & 1 != 0 && (sign != 0 || magnitude == 0) {
        return 0;
    }
    let half = match mode & 3 {
        0 => 1 << (LOST - 1),
        1 => (1 << (LOST - 1)) - 1 + (magnitude >> LOST & 1),
        _ => 0,
    };
    let rounded = if magnitude == INFINITY { INFINITY } else { (magnitude + half) >> LOST << LOST };
    let limit = if mode >> 2 & 1 != 0 { INFINITY - (1 << LOST) } else { INFINITY };
    u64::from(sign | rounded.min(limit))
}

/// From single precision to `tf32`; the second source is the mode, and bits for limits and for `relu`.
pub(crate) fn to_tf32() -> Map2 {
    map2!(|x: u32, mode: u64| tf32(x, mode))
}
