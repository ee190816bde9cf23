//! Video instructions: arithmetic on bytes, halves and words of registers, alone and side by side.
//!
//! GPUs that have no circuits for them run what the driver's compiler makes of them. Where that is not as the PTX ISA
//! says, this does as the driver (580.159.04, for an H100) does; `tests/golden/h100.bin` shows it.

use super::map4;
use crate::ptx::code::Map4;

/// What is done with two numbers.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Act {
    Add,
    Subtract,
    Average,
    Difference,
    Least,
    Greatest,
    ShiftLeft,
    ShiftRight,
    Equal,
    NotEqual,
    Less,
    LessEqual,
    Greater,
    GreaterEqual,
    MultiplyAdd,
}

/// In the order of their codes.
const ACTS: [Act; 16] = [
    Act::Add,
    Act::Subtract,
    Act::Average,
    Act::Difference,
    Act::Least,
    Act::Greatest,
    Act::ShiftLeft,
    Act::ShiftRight,
    Act::Equal,
    Act::NotEqual,
    Act::Less,
    Act::LessEqual,
    Act::Greater,
    Act::GreaterEqual,
    Act::MultiplyAdd,
    Act::Add,
];

/// What is done with the result and the third source.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Second {
    Nothing,
    Add,
    Least,
    Greatest,
    /// The result replaces parts of the third source.
    Merge,
}

/// In the order of their codes.
const SECONDS: [Second; 8] = [
    Second::Nothing,
    Second::Add,
    Second::Least,
    Second::Greatest,
    Second::Merge,
    Second::Nothing,
    Second::Nothing,
    Second::Nothing,
];

/// One instruction.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Video {
    pub(crate) act: Act,
    pub(crate) second: Second,
    /// The result, and the two sources.
    pub(crate) signed: [bool; 3],
    pub(crate) saturate: bool,
    /// Shifts take their amount modulo 32.
    pub(crate) wraps: bool,
    /// Bits of a part of the result: 8, 16 or 32.
    pub(crate) width: u32,
    /// Bits of a part of each source.
    pub(crate) widths: [u32; 2],
    /// Which part of each source makes each part of the result; of two numbers side by side, the
    /// parts of both sources are counted on.
    pub(crate) parts: [[u8; 4]; 2],
    /// Whether the parts count over both sources.
    pub(crate) joined: bool,
    /// The parts of the result that are computed.
    pub(crate) mask: u8,
    /// Of a product: which of the three sources are negative, whether one is added, and how many bits
    /// it is shifted by.
    pub(crate) negative: [bool; 3],
    pub(crate) plus_one: bool,
    pub(crate) shift: u32,
}

/// Puts fields of so many bits into a word.
struct Packer(u64, u32);

impl Packer {
    fn put(&mut self, value: u64, bits: u32) {
        self.0 |= value << self.1;
        self.1 += bits;
    }

    fn take(&mut self, bits: u32) -> u64 {
        let value = self.0 & ((1 << bits) - 1);
        self.0 >>= bits;
        value
    }
}

impl Video {
    /// As the constant operand of [`video`].
    pub(crate) fn packed(&self) -> u64 {
        let mut to = Packer(0, 0);
        to.put(self.act as u64, 4);
        to.put(self.second as u64, 3);
        for flag in self.signed.into_iter().chain(self.negative) {
            to.put(u64::from(flag), 1);
        }
        for flag in [self.saturate, self.wraps, self.joined, self.plus_one] {
            to.put(u64::from(flag), 1);
        }
        for width in [self.width, self.widths[0], self.widths[1]] {
            to.put(u64::from(width / 16), 2);
        }
        for part in self.parts.iter().flatten() {
            to.put(u64::from(*part), 3);
        }
        to.put(u64::from(self.mask), 4);
        to.put(u64::from(self.shift), 4);
        to.0
    }

    fn unpacked(bits: u64) -> Video {
        let mut from = Packer(bits, 0);
        let act = ACTS[from.take(4) as usize];
        let second = SECONDS[from.take(3) as usize];
        let signed = [(); 3].map(|()| from.take(1) != 0);
        let negative = [(); 3].map(|()| from.take(1) != 0);
        let [saturate, wraps, joined, plus_one] = [(); 4].map(|()| from.take(1) != 0);
        let [width, first, other] = [(); 3].map(|()| 8 << from.take(2));
        let parts = [(); 2].map(|()| [(); 4].map(|()| from.take(3) as u8));
        let mask = from.take(4) as u8;
        let shift = from.take(4) as u32;
        let widths = [first, other];
        Video {
            act,
            second,
            signed,
            saturate,
            wraps,
            width,
            widths,
            parts,
            joined,
            mask,
            negative,
            plus_one,
            shift,
        }
    }

    /// A part of one source, or of both side by side.
    fn part(&self, source: usize, index: usize, values: [u32; 2]) -> i64 {
        let width = self.widths[source];
        let both = u64::from(values[0]) | u64::from(values[1]) << 32;
        let from = if self.joined { both } else { u64::from(values[source]) };
        let bits = from >> (u32::from(self.parts[source][index]) * width % 64);
        let shift = 64 - width;
        if self.signed[source + 1] {
            (bits << shift) as i64 >> shift
        } else {
            (bits << shift >> shift) as i64
        }
    }

    fn clamped(&self, value: i64, width: u32) -> i64 {
        if !self.saturate {
            return value;
        }
        let (low, high) = match self.signed[0] {
            true => (-(1 << (width - 1)), (1 << (width - 1)) - 1),
            false => (0, (1i64 << width) - 1),
        };
        match self.second {
            // What goes into a part without a sign has none itself: the limit of what is negative is the upper one.
            Second::Merge if !self.joined && !self.signed[0] => i64::from(value as u32).min(high),
            // Sums of words without signs have no limit.
            Second::Nothing if self.act == Act::Add && self.signed == [false; 3] => value,
            _ => value.clamp(low, high),
        }
    }

    /// Whether the upper half of a word takes the upper half of a result, and not the lower one, which PTX says.
    fn keeps_halves(&self) -> bool {
        let computes = matches!(
            self.act,
            Act::Add | Act::Subtract | Act::Difference | Act::Least | Act::Greatest
        );
        computes && !self.joined && self.width == 16
    }

    fn result(&self, a: i64, b: i64) -> i64 {
        let amount = if self.wraps { b & 31 } else { b.clamp(0, 32) };
        match self.act {
            Act::Add => a + b,
            Act::Subtract => a - b,
            Act::Average => (a + b + i64::from(a + b >= 0)) >> 1,
            Act::Difference => (a - b).abs(),
            Act::Least => a.min(b),
            Act::Greatest => a.max(b),
            Act::ShiftLeft => a << amount,
            Act::ShiftRight => a >> amount,
            Act::Equal => i64::from(a == b),
            Act::NotEqual => i64::from(a != b),
            Act::Less => i64::from(a < b),
            Act::LessEqual => i64::from(a <= b),
            Act::Greater => i64::from(a > b),
            Act::GreaterEqual => i64::from(a >= b),
            Act::MultiplyAdd => 0,
        }
    }

    /// `vmad`: a product of parts, with the third source, as the PTX ISA has it.
    fn product(&self, a: i64, b: i64, c: u32) -> u32 {
        let turns = self.negative[0] != self.negative[1];
        let signed = self.signed[1] || self.signed[2] || turns || self.negative[2];
        let product = i128::from(a) * i128::from(b);
        // A sum that is shifted has a sign in any case.
        let extends = signed || self.shift != 0;
        let extended = if extends { i128::from(c as i32) } else { i128::from(c) };
        let mut sum = if self.plus_one {
            product + extended + 1
        } else if turns {
            extended - product
        } else if self.negative[2] {
            product - extended
        } else {
            product + extended
        };
        sum >>= self.shift;
        if self.saturate {
            let (low, high) = match signed {
                true => (i128::from(i32::MIN), i128::from(i32::MAX)),
                false => (0, i128::from(u32::MAX)),
            };
            sum = sum.clamp(low, high);
        }
        sum as u32
    }

    fn apply(&self, a: u32, b: u32, c: u32) -> u32 {
        if self.act == Act::MultiplyAdd {
            let [a, b] = [0, 1].map(|source| self.part(source, 0, [a, b]));
            return self.product(a, b, c);
        }
        let mut merged = c;
        let mut sum = i64::from(c);
        let third = if self.signed[0] { i64::from(c as i32) } else { i64::from(c) };
        for index in (0..4).filter(|index| self.mask >> index & 1 != 0) {
            // Only one part of the result of a scalar instruction; its sources are the first ones.
            let from = if self.joined { index } else { 0 };
            let [a, b] = [0, 1].map(|source| self.part(source, from, [a, b]));
            let value = self.clamped(self.result(a, b), self.width);
            match self.second {
                Second::Nothing => return value as u32,
                Second::Least => return value.min(third) as u32,
                Second::Greatest => return value.max(third) as u32,
                Second::Add => sum += value,
                Second::Merge => {
                    let shift = index as u32 * self.width;
                    let mask = (u32::MAX >> (32 - self.width)) << shift;
                    let moves = if self.keeps_halves() { 0 } else { shift };
                    merged = merged & !mask | (value as u32) << moves & mask;
                }
            }
        }
        if self.second == Second::Add { sum as u32 } else { merged }
    }
}

/// A kernel for every instruction, described by the fourth source.
pub(crate) fn video() -> Map4 {
    map4!(|a: u32, b: u32, c: u32, description: u64| Video::unpacked(description).apply(a, b, c))
}
