//! Comparisons.

use super::half::{Brain, Half};
use super::{by_int, by_width, map2};
use crate::ptx::ast::Type;
use crate::ptx::code::Map2;

/// One kernel for each comparison of floating-point numbers.
macro_rules! float_comparison {
    ($name:expr, $t:ty, |$x:ident| $value:expr) => {{
        #[inline(always)]
        fn value($x: $t) -> f64 {
            $value
        }
        match $name {
            "eq" => map2!(|a: $t, b: $t| value(a) == value(b)),
            "ne" => map2!(|a: $t, b: $t| value(a) < value(b) || value(a) > value(b)),
            "lt" => map2!(|a: $t, b: $t| value(a) < value(b)),
            "le" => map2!(|a: $t, b: $t| value(a) <= value(b)),
            "gt" => map2!(|a: $t, b: $t| value(a) > value(b)),
            "ge" => map2!(|a: $t, b: $t| value(a) >= value(b)),
            "equ" => map2!(|a: $t, b: $t| !(value(a) < value(b) || value(a) > value(b))),
            "neu" => map2!(|a: $t, b: $t| value(a) != value(b)),
            "ltu" => map2!(|a: $t, b: $t| !(value(a) >= value(b))),
            "leu" => map2!(|a: $t, b: $t| !(value(a) > value(b))),
            "gtu" => map2!(|a: $t, b: $t| !(value(a) <= value(b))),
            "geu" => map2!(|a: $t, b: $t| !(value(a) < value(b))),
            "num" => map2!(|a: $t, b: $t| !value(a).is_nan() && !value(b).is_nan()),
            "nan" => map2!(|a: $t, b: $t| value(a).is_nan() || value(b).is_nan()),
            _ => return None,
        }
    }};
}

/// A comparison to a predicate. For the packed types use the low half's type on each half.
#[allow(clippy::neg_cmp_op_on_partial_ord)] // true for unordered operands is what is meant
pub(crate) fn comparison(name: &str, ty: Type, flush: bool) -> Option<Map2> {
    Some(match ty {
        Type::F32 if flush => {
            float_comparison!(name, f32, |x| f64::from(super::float::flush(x)))
        }
        Type::F32 => float_comparison!(name, f32, |x| f64::from(x)),
        Type::F64 => float_comparison!(name, f64, |x| x),
        Type::F16 => float_comparison!(name, Half, |x| f64::from(x.value())),
        Type::Bf16 => float_comparison!(name, Brain, |x| f64::from(x.value())),
        Type::F16x2 | Type::Bf16x2 => return None,
        _ => match name {
            "eq" => by_width!(ty, T => map2!(|a: T, b: T| a == b)),
            "ne" => by_width!(ty, T => map2!(|a: T, b: T| a != b)),
            "lt" => by_int!(ty, T => map2!(|a: T, b: T| a < b)),
            "le" => by_int!(ty, T => map2!(|a: T, b: T| a <= b)),
            "gt" => by_int!(ty, T => map2!(|a: T, b: T| a > b)),
            "ge" => by_int!(ty, T => map2!(|a: T, b: T| a >= b)),
            "lo" => by_width!(ty, T => map2!(|a: T, b: T| a < b)),
            "ls" => by_width!(ty, T => map2!(|a: T, b: T| a <= b)),
            "hi" => by_width!(ty, T => map2!(|a: T, b: T| a > b)),
            "hs" => by_width!(ty, T => map2!(|a: T, b: T| a >= b)),
            _ => return None,
        },
    })
}

/// How `setp` joins a comparison with a third operand.
pub(crate) fn combination(name: &str) -> Option<Map2> {
    Some(match name {
        "and" => map2!(|a: bool, b: bool| a & b),
        "or" => map2!(|a: bool, b: bool| a | b),
        "xor" => map2!(|a: bool, b: bool| a ^ b),
        _ => return None,
    })
}
