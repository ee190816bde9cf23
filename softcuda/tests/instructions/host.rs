//! Floating-point arithmetic of the host's processor, with its own directed rounding and its own
//! flushing of subnormal numbers: an independent opinion on what an IEEE operation gives.

use half::f16;
use std::arch::asm;

/// Directions of rounding, as the processor's control word has them.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Direction {
    Nearest = 0,
    Down = 1,
    Up = 2,
    Zero = 3,
}

impl Direction {
    pub(crate) const ALL: [(&'static str, Direction); 4] = [
        ("rn", Direction::Nearest),
        ("rm", Direction::Down),
        ("rp", Direction::Up),
        ("rz", Direction::Zero),
    ];
}

/// All exceptions masked.
const PLAIN: u32 = 0x1f80;
/// Subnormal results and operands are zero.
const FLUSH: u32 = 0x8040;

fn control(direction: Direction, flush: bool) -> u32 {
    PLAIN | (direction as u32) << 13 | if flush { FLUSH } else { 0 }
}

/// A function that is one instruction of the processor, which overwrites the first argument.
macro_rules! instruction {
    ($name:ident($a:ident: $t:ty $(, $rest:ident: $u:ty)*), $text:literal) => {
        pub(crate) fn $name(mut $a: $t $(, $rest: $u)*, direction: Direction, flush: bool) -> $t {
            let (there, back) = (control(direction, flush), PLAIN);
            // SAFETY: the processor has the instruction (callers of the fused ones ask it first);
            // the control word is the usual one again before the block ends.
            unsafe {
                asm!(
                    "ldmxcsr [{there}]",
                    $text,
                    "ldmxcsr [{back}]",
                    there = in(reg) &raw const there,
                    back = in(reg) &raw const back,
                    $a = inout(xmm_reg) $a,
                    $($rest = in(xmm_reg) $rest,)*
                    options(nostack)
                );
            }
            $a
        }
    };
}
instruction!(add32(a: f32, b: f32), "addss {a}, {b}");
instruction!(sub32(a: f32, b: f32), "subss {a}, {b}");
instruction!(mul32(a: f32, b: f32), "mulss {a}, {b}");
instruction!(div32(a: f32, b: f32), "divss {a}, {b}");
instruction!(add64(a: f64, b: f64), "addsd {a}, {b}");
instruction!(sub64(a: f64, b: f64), "subsd {a}, {b}");
instruction!(mul64(a: f64, b: f64), "mulsd {a}, {b}");
instruction!(div64(a: f64, b: f64), "divsd {a}, {b}");
instruction!(sqrt32(a: f32), "sqrtss {a}, {a}");
instruction!(root64(a: f64), "sqrtsd {a}, {a}");
instruction!(fused32(a: f32, b: f32, c: f32), "vfmadd213ss {a}, {b}, {c}");
instruction!(fused64(a: f64, b: f64, c: f64), "vfmadd213sd {a}, {b}, {c}");
instruction!(narrowed(to: f32, a: f64), "cvtsd2ss {to}, {a}");

pub(crate) fn sqrt64(a: f64, direction: Direction) -> f64 {
    root64(a, direction, false)
}

fn ask_for_fma() {
    assert!(is_x86_feature_detected!("fma"), "these tests need a processor with FMA");
}

/// `a * b + c`, rounded once.
pub(crate) fn fma32(a: f32, b: f32, c: f32, direction: Direction, flush: bool) -> f32 {
    ask_for_fma();
    fused32(a, b, c, direction, flush)
}

/// `a * b + c`, rounded once.
pub(crate) fn fma64(a: f64, b: f64, c: f64, direction: Direction, flush: bool) -> f64 {
    ask_for_fma();
    fused64(a, b, c, direction, flush)
}

/// To single precision.
pub(crate) fn narrow(a: f64, direction: Direction, flush: bool) -> f32 {
    narrowed(0.0, a, direction, flush)
}

/// An integer to a number: the nearest one, then its neighbour on the right side.
macro_rules! of_integer {
    ($name:ident, $t:ty) => {
        pub(crate) fn $name(a: i128, direction: Direction) -> $t {
            let near = a as $t;
            let off = near as i128 - a;
            match direction {
                Direction::Down if off > 0 => near.next_down(),
                Direction::Up if off < 0 => near.next_up(),
                Direction::Zero if off > 0 && a > 0 => near.next_down(),
                Direction::Zero if off < 0 && a < 0 => near.next_up(),
                _ => near,
            }
        }
    };
}
of_integer!(single_of, f32);
of_integer!(double_of, f64);

/// The integer in the given direction.
pub(crate) fn integral(a: f64, direction: Direction) -> f64 {
    match direction {
        Direction::Nearest => a.round_ties_even(),
        Direction::Down => a.floor(),
        Direction::Up => a.ceil(),
        Direction::Zero => a.trunc(),
    }
}

/// A type of numbers that has a nearest one to each `f64`.
pub(crate) trait Near: Into<f64> + Copy {
    /// The next one further from zero.
    fn outer(self) -> Self;
}

impl Near for f32 {
    fn outer(self) -> f32 {
        f32::from_bits(self.to_bits() + 1)
    }
}

impl Near for f16 {
    fn outer(self) -> f16 {
        f16::from_bits(self.to_bits() + 1)
    }
}

/// Of the two numbers that are equally near the one further from zero, else the nearest.
pub(crate) fn away<T: Near>(near: T, exact: f64) -> f64 {
    let (near, outer): (f64, f64) = (near.into(), near.outer().into());
    if (outer - exact).abs() == (near - exact).abs() { outer } else { near }
}
