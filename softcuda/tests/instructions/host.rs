//! Floating-point arithmetic of the host's processor, with its own directed rounding and its own
//! flushing of subnormal numbers: an independent opinion on what an IEEE operation gives.

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

/// A function of two numbers that is one instruction of the processor.
macro_rules! binary {
    ($name:ident, $t:ty, $instruction:literal) => {
        pub(crate) fn $name(a: $t, b: $t, direction: Direction, flush: bool) -> $t {
            let mut result = a;
            let (there, back) = (control(direction, flush), PLAIN);
            // SAFETY: the control word is the usual one again before the block ends.
            unsafe {
                asm!(
                    "ldmxcsr [{there}]",
                    concat!($instruction, " {result}, {b}"),
                    "ldmxcsr [{back}]",
                    there = in(reg) &raw const there,
                    back = in(reg) &raw const back,
                    result = inout(xmm_reg) result,
                    b = in(xmm_reg) b,
                    options(nostack)
                );
            }
            result
        }
    };
}
binary!(add32, f32, "addss");
binary!(sub32, f32, "subss");
binary!(mul32, f32, "mulss");
binary!(div32, f32, "divss");
binary!(sqrt32_of, f32, "sqrtss");
binary!(add64, f64, "addsd");
binary!(sub64, f64, "subsd");
binary!(mul64, f64, "mulsd");
binary!(div64, f64, "divsd");
binary!(sqrt64_of, f64, "sqrtsd");

pub(crate) fn sqrt32(a: f32, direction: Direction, flush: bool) -> f32 {
    sqrt32_of(0.0, a, direction, flush)
}

pub(crate) fn sqrt64(a: f64, direction: Direction) -> f64 {
    sqrt64_of(0.0, a, direction, false)
}

/// `a * b + c`, rounded once.
macro_rules! fused {
    ($name:ident, $t:ty, $instruction:literal) => {
        pub(crate) fn $name(a: $t, b: $t, c: $t, direction: Direction, flush: bool) -> $t {
            assert!(is_x86_feature_detected!("fma"), "these tests need a processor with FMA");
            let mut result = a;
            let (there, back) = (control(direction, flush), PLAIN);
            // SAFETY: the processor has the instruction; the control word is the usual one again
            // before the block ends.
            unsafe {
                asm!(
                    "ldmxcsr [{there}]",
                    concat!($instruction, " {result}, {b}, {c}"),
                    "ldmxcsr [{back}]",
                    there = in(reg) &raw const there,
                    back = in(reg) &raw const back,
                    result = inout(xmm_reg) result,
                    b = in(xmm_reg) b,
                    c = in(xmm_reg) c,
                    options(nostack)
                );
            }
            result
        }
    };
}
fused!(fma32, f32, "vfmadd213ss");
fused!(fma64, f64, "vfmadd213sd");

/// To single precision.
pub(crate) fn narrow(a: f64, direction: Direction, flush: bool) -> f32 {
    let mut result = 0f32;
    let (there, back) = (control(direction, flush), PLAIN);
    // SAFETY: as above.
    unsafe {
        asm!(
            "ldmxcsr [{there}]",
            "cvtsd2ss {result}, {a}",
            "ldmxcsr [{back}]",
            there = in(reg) &raw const there,
            back = in(reg) &raw const back,
            result = inout(xmm_reg) result,
            a = in(xmm_reg) a,
            options(nostack)
        );
    }
    result
}

/// An integer to single precision: the nearest number, then its neighbour on the right side.
pub(crate) fn single_of(a: i128, direction: Direction) -> f32 {
    let near = a as f32;
    let off = near as i128 - a;
    match direction {
        Direction::Down if off > 0 => near.next_down(),
        Direction::Up if off < 0 => near.next_up(),
        Direction::Zero if off > 0 && a > 0 => near.next_down(),
        Direction::Zero if off < 0 && a < 0 => near.next_up(),
        _ => near,
    }
}

/// An integer to double precision.
pub(crate) fn double_of(a: i128, direction: Direction) -> f64 {
    let near = a as f64;
    let off = near as i128 - a;
    match direction {
        Direction::Down if off > 0 => near.next_down(),
        Direction::Up if off < 0 => near.next_up(),
        Direction::Zero if off > 0 && a > 0 => near.next_down(),
        Direction::Zero if off < 0 && a < 0 => near.next_up(),
        _ => near,
    }
}

/// The integer in the given direction.
pub(crate) fn integral(a: f64, direction: Direction) -> f64 {
    match direction {
        Direction::Nearest => a.round_ties_even(),
        Direction::Down => a.floor(),
        Direction::Up => a.ceil(),
        Direction::Zero => a.trunc(),
    }
}
