//! Copies.

use gpucr_wire::access::Operation;

use super::arguments::{at, last, member, named};
use super::effects::Effects;
use crate::abi::real;
use crate::abi::types::{
    ArrayDescriptor, Copy2d, Copy3d, Copy3dOp, Copy3dOperand, Copy3dSide, DecompressParams,
    LARGEST_ELEMENT, MEMORY_DEVICE, MEMORY_UNIFIED, OPERAND_ARRAY, OPERAND_POINTER, SUCCESS,
};
use crate::state::range::Range;

const COPY: Operation = Operation::Copy {};
const DECOMPRESS: Operation = Operation::Decompress {};

/// `cuMemcpy*(to, from, bytes, stream)` between linear memory.
pub(crate) fn copy(a: &[usize], effects: &mut dyn Effects) {
    let [to, from, bytes, stream] = named(a);
    effects.stream(stream as u64);
    copied(effects, to, from, bytes);
}

/// `cuMemcpyWithAttributesAsync(to, from, bytes, attributes, stream)`.
pub(crate) fn copy_with_attributes(a: &[usize], effects: &mut dyn Effects) {
    let [to, from, bytes, _attributes, stream] = named(a);
    effects.stream(stream as u64);
    copied(effects, to, from, bytes);
}

/// `cuMemcpyPeer(to, context, from, context, bytes)`, and with a stream. Without one it comes after all work of both
/// contexts, in streams of all kinds.
pub(crate) fn copy_peer(a: &[usize], effects: &mut dyn Effects) {
    let [to, _to_context, from, _from_context, bytes, stream] = named(a);
    if a.len() > 5 {
        effects.stream(stream as u64);
    }
    copied(effects, to, from, bytes);
}

fn copied(effects: &mut dyn Effects, to: usize, from: usize, bytes: usize) {
    effects.range(Range::read(COPY, from, bytes));
    effects.range(Range::written(COPY, to, bytes));
}

/// `cuMemcpyDtoA(array, offset, from, bytes)`.
pub(crate) fn copy_to_array(a: &[usize], effects: &mut dyn Effects) {
    let [_array, _offset, from, bytes] = named(a);
    effects.range(Range::read(COPY, from, bytes));
}

/// `cuMemcpyAtoD(to, array, offset, bytes)`.
pub(crate) fn copy_from_array(a: &[usize], effects: &mut dyn Effects) {
    let [to, _array, _offset, bytes] = named(a);
    effects.range(Range::written(COPY, to, bytes));
}

/// `cuMemcpy2D(copy, stream)`.
pub(crate) fn copy_2d(a: &[usize], effects: &mut dyn Effects) {
    let [copy, stream] = named(a);
    effects.stream(stream as u64);
    // SAFETY: the function's signature.
    if let Some(c) = unsafe { at::<Copy2d>(copy) } {
        let side = |kind: u32, pointer: [u64; 2], x: usize, y: usize, pitch: usize| {
            linear(kind, pointer, (x, y, 0), (pitch, 0), (c.width, c.height, 1))
        };
        side(c.from_kind, [c.from_host, c.from_device], c.from_x, c.from_y, c.from_pitch)
            .into_iter()
            .for_each(|(address, bytes)| effects.range(Range::read(COPY, address, bytes)));
        side(c.to_kind, [c.to_host, c.to_device], c.to_x, c.to_y, c.to_pitch)
            .into_iter()
            .for_each(|(address, bytes)| effects.range(Range::written(COPY, address, bytes)));
    }
}

/// `cuMemcpy3D(copy)` and `cuMemcpy3DPeer(copy)`, and with a stream. The second one without a stream comes after all work
/// of both contexts, in streams of all kinds.
pub(crate) fn copy_3d(a: &[usize], effects: &mut dyn Effects) {
    let [copy, stream] = named(a);
    if a.len() > 1 {
        effects.stream(stream as u64);
    }
    // SAFETY: the function's signature.
    if let Some(copy) = unsafe { at::<Copy3d>(copy) } {
        copy_3d_ranges(&copy).into_iter().flatten().for_each(|range| effects.range(range));
    }
}

/// The linear memory that a copy reads, and that it writes.
pub(super) fn copy_3d_ranges(copy: &Copy3d) -> [Option<Range>; 2] {
    let area = (copy.width, copy.height, copy.depth);
    let side = |side: &Copy3dSide| {
        let origin = (side.x, side.y, side.z);
        linear(side.kind, [side.host, side.device], origin, (side.pitch, side.height), area)
    };
    let from = side(&copy.from).map(|(address, bytes)| Range::read(COPY, address, bytes));
    let to = side(&copy.to).map(|(address, bytes)| Range::written(COPY, address, bytes));
    [from, to]
}

/// Address and bytes from the first to the last byte of a box in linear memory.
fn linear(
    kind: u32,
    [host, device]: [u64; 2],
    (x, y, z): (usize, usize, usize),
    (pitch, rows): (usize, usize),
    (width, height, depth): (usize, usize, usize),
) -> Option<(usize, usize)> {
    let base = match kind {
        MEMORY_DEVICE => device,
        // Unified addresses are given in the device's place.
        MEMORY_UNIFIED if device != 0 => device,
        MEMORY_UNIFIED => host,
        _ => return None,
    };
    if width == 0 || height == 0 || depth == 0 {
        return None;
    }
    let pitch = pitch.max(width);
    let slice = pitch.saturating_mul(rows.max(height));
    let at = |x: usize, y: usize, z: usize| {
        slice.saturating_mul(z).saturating_add(pitch.saturating_mul(y)).saturating_add(x)
    };
    let (first, last) = (at(x, y, z), at(x, y, z).saturating_add(at(width, height - 1, depth - 1)));
    Some(((base as usize).saturating_add(first), last - first))
}

/// `cuMemcpyBatchAsync(to[], from[], bytes[], count, ..., stream)`.
pub(crate) fn copies(a: &[usize], effects: &mut dyn Effects) {
    let [to, from, bytes, count] = named(a);
    effects.stream(last(a));
    for number in 0..count {
        // SAFETY: three arrays of so many members.
        let one = |array: usize| unsafe { member::<usize>(array, number) };
        let (Some(to), Some(from), Some(bytes)) = (one(to), one(from), one(bytes)) else { return };
        copied(effects, to, from, bytes);
    }
}

/// `cuMemcpy3DBatchAsync(count, list, ..., stream)`.
pub(crate) fn copies_3d(a: &[usize], effects: &mut dyn Effects) {
    let [count, list] = named(a);
    effects.stream(last(a));
    for number in 0..count {
        // SAFETY: a list of so many members.
        let Some(op) = (unsafe { member::<Copy3dOp>(list, number) }) else { return };
        copy_of_list(effects, &op);
    }
}

/// `cuMemcpy3DWithAttributesAsync(op, flags, stream)`.
pub(crate) fn copy_3d_op(a: &[usize], effects: &mut dyn Effects) {
    let [op, _flags, stream] = named(a);
    effects.stream(stream as u64);
    // SAFETY: the function's signature.
    if let Some(op) = unsafe { at::<Copy3dOp>(op) } {
        copy_of_list(effects, &op);
    }
}

fn copy_of_list(effects: &mut dyn Effects, op: &Copy3dOp) {
    // Widths and lengths of rows are in the elements of the array, if there is one.
    let arrays = [&op.from, &op.to].into_iter().filter(|side| side.kind == OPERAND_ARRAY);
    let element = arrays.map(|side| element(side.words[0])).max().unwrap_or(1);
    let side = |operand: &Copy3dOperand| {
        if operand.kind != OPERAND_POINTER {
            return None;
        }
        // Lengths of 0 mean that rows and layers follow each other.
        let [address, row, rows, _] = operand.words;
        let pitch = ((row as usize).saturating_mul(element), rows as usize);
        let area = (op.width.saturating_mul(element), op.height, op.depth);
        linear(MEMORY_DEVICE, [0, address], (0, 0, 0), pitch, area)
    };
    if let Some((address, bytes)) = side(&op.from) {
        effects.range(Range::read(COPY, address, bytes));
    }
    if let Some((address, bytes)) = side(&op.to) {
        effects.range(Range::written(COPY, address, bytes));
    }
}

/// Bytes of an element of an array; the most there can be if the driver does not say.
fn element(array: u64) -> usize {
    let mut descriptor = ArrayDescriptor::default();
    // SAFETY: fills the descriptor of an array that the program uses.
    let mut ask = || unsafe { real::cuArray3DGetDescriptor_v2(&mut descriptor, array) };
    if array != 0 && ask() == SUCCESS { descriptor.element() } else { LARGEST_ELEMENT }
}

/// `cuMemBatchDecompressAsync(list, count, ..., stream)`.
pub(crate) fn decompress(a: &[usize], effects: &mut dyn Effects) {
    let [list, count] = named(a);
    effects.stream(last(a));
    for number in 0..count {
        // SAFETY: a list of so many members.
        let Some(op) = (unsafe { member::<DecompressParams>(list, number) }) else { return };
        effects.range(Range::read(DECOMPRESS, op.from as usize, op.from_bytes));
        effects.range(Range::written(DECOMPRESS, op.to as usize, op.to_bytes));
        effects.range(Range::written(DECOMPRESS, op.actual_bytes as usize, 4));
    }
}
