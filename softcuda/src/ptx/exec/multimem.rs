//! `multimem`: what is done to the memory of all devices of a multicast object.
//!
//! Reductions take the devices in the order in which they were added to the object, so that sums of numbers that are
//! rounded are the same each time; NVIDIA documents no order.

use super::atomic::{apply, update};
use super::block::Room;
use super::context::Step;
use super::memory::{read, write};
use super::vectors::{place, read_pair, write_pair};
use super::warp::Warp;
use crate::ptx::code::{
    AtomicOp, AtomicType, Lanes, MOST_ELEMENTS, Multimem, MultimemAction, WIDTH,
};
use crate::ptx::kernels::rounding::{BF16, F16, Round, to_small};
use half::{bf16, f16};

/// The most bytes of a vector, in words of eight, the first in memory first.
type Words = [u64; 2];

/// Reads a vector at once.
///
/// # Safety
/// The `size` bytes (2 to 16) must be mapped, and aligned for their size.
unsafe fn read_vector(address: u64, size: usize) -> Words {
    // SAFETY: by the caller's promise.
    unsafe { if size == 16 { read_pair(address) } else { [read(address, size as u8), 0] } }
}

/// Writes a vector at once.
///
/// # Safety
/// The `size` bytes (2 to 16) must be writable, and aligned for their size.
unsafe fn write_vector(address: u64, size: usize, words: Words) {
    // SAFETY: by the caller's promise.
    unsafe {
        if size == 16 {
            write_pair(address, words);
        } else {
            write(address, size as u8, words[0]);
        }
    }
}

/// An element of a vector, in the low bits.
fn element(words: Words, index: usize, size: u8) -> u64 {
    let (word, bit) = place(index, size);
    let rest = 64 - 8 * u32::from(size);
    words[word] >> bit << rest >> rest
}

/// The vector of elements, of which only the low bits count.
fn vector(elements: &[u64], size: u8) -> Words {
    let rest = 64 - 8 * u32::from(size);
    let mut words = [0; 2];
    for (index, value) in elements.iter().enumerate() {
        let (word, bit) = place(index, size);
        words[word] |= value << rest >> rest << bit;
    }
    words
}

/// The sum of 16-bit numbers, kept in single precision and rounded once.
fn wide_sum(ty: AtomicType, values: impl Iterator<Item = u64> + Clone) -> u64 {
    let is_half = matches!(ty, AtomicType::Half | AtomicType::Half2);
    let number = |bits: u64| match is_half {
        true => f16::from_bits(bits as u16).to_f32(),
        false => bf16::from_bits(bits as u16).to_f32(),
    };
    let format = if is_half { F16 } else { BF16 };
    let one = |shift: u32| {
        let sum = values.clone().map(|bits| number(bits >> shift)).reduce(|a, b| a + b);
        u64::from(to_small(f64::from(sum.unwrap_or_default()), format, Round::Nearest))
    };
    match ty {
        AtomicType::Half2 | AtomicType::Bfloat2 => one(0) | one(16) << 16,
        _ => one(0),
    }
}

/// What the elements of all devices come to.
fn reduced(op: AtomicOp, ty: AtomicType, wide: bool, size: u8, values: &[u64]) -> u64 {
    if wide {
        return wide_sum(ty, values.iter().copied());
    }
    let both = |a: u64, b: u64| apply(op, ty, size, a, b, 0);
    values.iter().copied().reduce(both).unwrap_or_default()
}

impl Warp<'_> {
    pub(super) fn multimem(
        &mut self,
        room: &mut Room<'_>,
        multimem: &Multimem,
        mask: u32,
    ) -> Step<()> {
        let addresses = self.addresses(&multimem.place);
        let size = usize::from(multimem.place.size) * usize::from(multimem.count);
        let written = !matches!(multimem.action, MultimemAction::LoadReduce { .. });
        self.aligned(&addresses, mask, size)?;
        let memory = room.context.memory;
        let lanes = (0..WIDTH).filter(|lane| mask & 1 << lane != 0);
        // All of them first: a fault of one lane keeps the others from writing.
        for lane in lanes.clone() {
            room.known_replicas.find(memory, written, addresses[lane], size as u64)?;
        }
        for lane in lanes {
            let (places, offset) =
                room.known_replicas.find(memory, written, addresses[lane], size as u64)?;
            let places = places.iter().map(|place| place + offset);
            match multimem.action {
                MultimemAction::LoadReduce { op, ty, wide } => {
                    // SAFETY: found to be mapped; aligned as the address is, since pieces are whole pages.
                    let all: Vec<Words> =
                        places.map(|place| unsafe { read_vector(place, size) }).collect();
                    self.set_reduced(multimem, lane, (op, ty, wide), &all);
                }
                MultimemAction::Store => {
                    let words = vector(&self.elements(multimem, lane), multimem.place.size);
                    // SAFETY: as above, and writable.
                    places.for_each(|place| unsafe { write_vector(place, size, words) });
                }
                MultimemAction::Reduce(op, ty) => {
                    let elements = self.elements(multimem, lane);
                    let size = multimem.place.size;
                    for place in places {
                        for (value, at) in elements.iter().zip((place..).step_by(size.into())) {
                            let next = |old| apply(op, ty, size, old, *value, 0);
                            // SAFETY: as above.
                            unsafe { update(at, size, next) };
                        }
                    }
                }
            }
        }
        Ok(())
    }

    /// The values of a lane's elements, of which only the low bits count.
    fn elements(&self, multimem: &Multimem, lane: usize) -> Vec<u64> {
        let sources = &multimem.registers[..usize::from(multimem.count)];
        sources.iter().map(|source| self.lanes(*source)[lane]).collect()
    }

    /// Gives a lane what the vectors of all devices come to, element by element.
    fn set_reduced(
        &mut self,
        multimem: &Multimem,
        lane: usize,
        (op, ty, wide): (AtomicOp, AtomicType, bool),
        all: &[Words],
    ) {
        debug_assert!(usize::from(multimem.count) <= MOST_ELEMENTS);
        let size = multimem.place.size;
        for (index, to) in multimem.registers[..usize::from(multimem.count)].iter().enumerate() {
            let values: Vec<u64> = all.iter().map(|words| element(*words, index, size)).collect();
            let to: &mut Lanes = self.lanes_mut(*to);
            to[lane] = reduced(op, ty, wide, size, &values);
        }
    }
}
