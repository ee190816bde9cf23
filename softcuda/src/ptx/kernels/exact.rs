//! Double precision with directed rounding, by integers: the exact result, or enough of it, is
//! rounded once. (Errors of products and quotients of doubles may be too small for a double, so
//! they do not tell on which side of a rounded result the exact one lies.)

use super::round::Round;

/// `mantissa * 2^exponent`, and a little more if `sticky`: less than one unit of the mantissa.
/// A sticky mantissa has at least 60 bits.
#[derive(Clone, Copy)]
struct Exact {
    negative: bool,
    mantissa: u128,
    exponent: i32,
    sticky: bool,
}

/// The exponent of the smallest subnormal number.
const LEAST: i32 = -1074;

impl Exact {
    fn of(x: f64) -> Exact {
        let bits = x.to_bits();
        let fraction = u128::from(bits & ((1 << 52) - 1));
        let biased = (bits >> 52 & 0x7ff) as i32;
        let (mantissa, exponent) =
            if biased == 0 { (fraction, LEAST) } else { (fraction | 1 << 52, biased + LEAST - 1) };
        Exact { negative: x.is_sign_negative(), mantissa, exponent, sticky: false }
    }

    /// Shifted left until only `spare` leading bits are zero.
    fn raised(self, spare: u32) -> Exact {
        let shift = self.mantissa.leading_zeros().saturating_sub(spare);
        let mantissa = self.mantissa << shift;
        Exact { mantissa, exponent: self.exponent - shift as i32, ..self }
    }

    fn rounded(self, mode: Round) -> f64 {
        let negative = self.negative;
        let away = (mode == Round::Up && !negative) || (mode == Round::Down && negative);
        let bits = 128 - self.mantissa.leading_zeros() as i32;
        let shift = (bits - 53).max(LEAST - self.exponent);
        let mut exponent = self.exponent + shift;
        let (mut kept, rest) = match shift {
            128.. => (0, self.mantissa),
            1..128 => (self.mantissa >> shift, self.mantissa & ((1 << shift) - 1)),
            _ => (self.mantissa << -shift, 0),
        };
        if away && (rest != 0 || self.sticky) {
            kept += 1;
        }
        if kept == 1 << 53 {
            kept >>= 1;
            exponent += 1;
        }
        let biased = exponent - LEAST + 1;
        let magnitude = if kept < 1 << 52 {
            f64::from_bits(kept as u64)
        } else if biased < 0x7ff {
            f64::from_bits((biased as u64) << 52 | kept as u64 & ((1 << 52) - 1))
        } else if away {
            f64::INFINITY
        } else {
            f64::MAX
        };
        if negative { -magnitude } else { magnitude }
    }
}

/// `a * b + c` in a direction other than to nearest.
pub(super) fn fma(a: f64, b: f64, c: f64, mode: Round) -> f64 {
    let plain = a.mul_add(b, c);
    if !a.is_finite() || !b.is_finite() || !c.is_finite() {
        return plain;
    }
    let (x, y, addend) = (Exact::of(a), Exact::of(b), Exact::of(c));
    let product = Exact {
        negative: x.negative != y.negative,
        mantissa: x.mantissa * y.mantissa,
        exponent: x.exponent + y.exponent,
        sticky: false,
    };
    if product.mantissa == 0 || addend.mantissa == 0 {
        if product.mantissa == addend.mantissa {
            let negative = if product.negative == addend.negative {
                product.negative
            } else {
                mode == Round::Down
            };
            return if negative { -0.0 } else { 0.0 };
        }
        return if product.mantissa == 0 { c } else { product.rounded(mode) };
    }
    // The one with the higher leading bit stays whole; the other is cut off below it.
    let (p, q) = (product.raised(2), addend.raised(2));
    let (large, small) = if p.exponent >= q.exponent { (p, q) } else { (q, p) };
    let shift = (large.exponent - small.exponent) as u32;
    let (moved, lost) = match shift {
        0 => (small.mantissa, false),
        1..128 => (small.mantissa >> shift, small.mantissa & ((1 << shift) - 1) != 0),
        _ => (0, true),
    };
    let mut sum = Exact { sticky: lost, ..large };
    if large.negative == small.negative {
        sum.mantissa += moved;
    } else {
        // What was cut off is missing too: one unit less, and a little more.
        let less = moved + u128::from(lost);
        sum.negative = if large.mantissa >= less { large.negative } else { small.negative };
        sum.mantissa = large.mantissa.abs_diff(less);
        if sum.mantissa == 0 && !lost {
            return if mode == Round::Down { -0.0 } else { 0.0 };
        }
    }
    sum.rounded(mode)
}

/// `a / b`.
pub(super) fn div(a: f64, b: f64, mode: Round) -> f64 {
    if !a.is_finite() || !b.is_finite() || a == 0.0 || b == 0.0 {
        return a / b;
    }
    let (x, y) = (Exact::of(a).raised(0), Exact::of(b));
    let quotient = x.mantissa / y.mantissa;
    Exact {
        negative: x.negative != y.negative,
        mantissa: quotient,
        exponent: x.exponent - y.exponent,
        sticky: x.mantissa % y.mantissa != 0,
    }
    .rounded(mode)
}

/// The square root of `a`.
pub(super) fn sqrt(a: f64, mode: Round) -> f64 {
    if !(a > 0.0 && a.is_finite()) {
        return a.sqrt();
    }
    let mut x = Exact::of(a).raised(1);
    if x.exponent % 2 != 0 {
        x.mantissa >>= 1;
        x.exponent += 1;
    }
    let root = x.mantissa.isqrt();
    Exact {
        negative: false,
        mantissa: root,
        exponent: x.exponent / 2,
        sticky: root * root != x.mantissa,
    }
    .rounded(mode)
}
