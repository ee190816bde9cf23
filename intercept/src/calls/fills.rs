//! Fills, and what else leaves memory with other bytes than it had.

use gpucr_wire::access::Operation;

use super::arguments::{last, member, named};
use super::effects::Effects;
use crate::state::range::Range;

const FILL: Operation = Operation::Fill {};
const DISCARD: Operation = Operation::Discard {};

/// `cuMemsetD8(to, value, count, stream)`.
pub(crate) fn fill_8(a: &[usize], effects: &mut dyn Effects) {
    fill(a, 1, effects);
}

/// `cuMemsetD16(to, value, count, stream)`.
pub(crate) fn fill_16(a: &[usize], effects: &mut dyn Effects) {
    fill(a, 2, effects);
}

/// `cuMemsetD32(to, value, count, stream)`.
pub(crate) fn fill_32(a: &[usize], effects: &mut dyn Effects) {
    fill(a, 4, effects);
}

fn fill(a: &[usize], value_size: usize, effects: &mut dyn Effects) {
    let [to, _value, count, stream] = named(a);
    effects.stream(stream as u64);
    effects.range(Range::written(FILL, to, count.saturating_mul(value_size)));
}

/// `cuMemsetD2D8(to, pitch, value, width, height, stream)`.
pub(crate) fn fill_2d_8(a: &[usize], effects: &mut dyn Effects) {
    fill_2d(a, 1, effects);
}

/// `cuMemsetD2D16(to, pitch, value, width, height, stream)`.
pub(crate) fn fill_2d_16(a: &[usize], effects: &mut dyn Effects) {
    fill_2d(a, 2, effects);
}

/// `cuMemsetD2D32(to, pitch, value, width, height, stream)`.
pub(crate) fn fill_2d_32(a: &[usize], effects: &mut dyn Effects) {
    fill_2d(a, 4, effects);
}

fn fill_2d(a: &[usize], value_size: usize, effects: &mut dyn Effects) {
    let [to, pitch, _value, width, height, stream] = named(a);
    effects.stream(stream as u64);
    effects.range(fill_range(to, pitch, width.saturating_mul(value_size), height));
}

/// The range of a fill of `height` rows of `width` bytes.
pub(super) fn fill_range(to: usize, pitch: usize, width: usize, height: usize) -> Range {
    let rows = pitch.max(width).saturating_mul(height.saturating_sub(1));
    let bytes = if height == 0 || width == 0 { 0 } else { rows.saturating_add(width) };
    Range::written(FILL, to, bytes)
}

/// `cuMemDiscardBatchAsync(addresses[], bytes[], count, ..., stream)`.
pub(crate) fn discard(a: &[usize], effects: &mut dyn Effects) {
    let [addresses, sizes, count] = named(a);
    effects.stream(last(a));
    for number in 0..count {
        // SAFETY: two arrays of so many members.
        let one = |array: usize| unsafe { member::<usize>(array, number) };
        let (Some(address), Some(bytes)) = (one(addresses), one(sizes)) else { return };
        effects.range(Range::written(DISCARD, address, bytes));
    }
}
