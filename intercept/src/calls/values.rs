//! Values that a stream writes, or waits for.

use gpucr_wire::access::Operation;

use super::arguments::{member, named};
use super::effects::Effects;
use crate::abi::types::{
    MemoryOp, STREAM_ATOMIC_REDUCTION, STREAM_WAIT_32, STREAM_WAIT_64, STREAM_WRITE_32,
    STREAM_WRITE_64,
};
use crate::state::range::Range;

const VALUE: Operation = Operation::Value {};

/// `cuStreamWaitValue32(stream, address, ...)`.
pub(crate) fn wait_32(a: &[usize], effects: &mut dyn Effects) {
    let [stream, address] = named(a);
    effects.stream(stream as u64);
    effects.range(Range::read(VALUE, address, 4));
}

/// `cuStreamWaitValue64(stream, address, ...)`.
pub(crate) fn wait_64(a: &[usize], effects: &mut dyn Effects) {
    let [stream, address] = named(a);
    effects.stream(stream as u64);
    effects.range(Range::read(VALUE, address, 8));
}

/// `cuStreamWriteValue32(stream, address, ...)`.
pub(crate) fn write_32(a: &[usize], effects: &mut dyn Effects) {
    let [stream, address] = named(a);
    effects.stream(stream as u64);
    effects.range(Range::written(VALUE, address, 4));
}

/// `cuStreamWriteValue64(stream, address, ...)`.
pub(crate) fn write_64(a: &[usize], effects: &mut dyn Effects) {
    let [stream, address] = named(a);
    effects.stream(stream as u64);
    effects.range(Range::written(VALUE, address, 8));
}

/// `cuStreamBatchMemOp(stream, count, list, flags)`.
pub(crate) fn memory_ops(a: &[usize], effects: &mut dyn Effects) {
    let [stream, count, list, _flags] = named(a);
    effects.stream(stream as u64);
    // SAFETY: a list of so many members.
    unsafe { memory_op_ranges(count as u32, list) }.for_each(|range| effects.range(range));
}

/// What a list of memory operations touches.
///
/// # Safety
/// The list is null or has so many members, for as long as the result is used.
pub(super) unsafe fn memory_op_ranges(count: u32, list: usize) -> impl Iterator<Item = Range> {
    let op = move |number: usize| {
        // SAFETY: the caller's duty.
        let op = unsafe { member::<MemoryOp>(list, number) }?;
        let address = op.address as usize;
        match op.operation {
            STREAM_WAIT_32 => Some(Range::read(VALUE, address, 4)),
            STREAM_WAIT_64 => Some(Range::read(VALUE, address, 8)),
            STREAM_WRITE_32 => Some(Range::written(VALUE, address, 4)),
            STREAM_WRITE_64 => Some(Range::written(VALUE, address, 8)),
            // Which operation and of what type comes before the address.
            STREAM_ATOMIC_REDUCTION => Some(Range::written(VALUE, op.rest[0] as usize, 8)),
            _ => None,
        }
    };
    let count = if list == 0 { 0 } else { count as usize };
    (0..count).filter_map(op)
}
