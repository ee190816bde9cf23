//! Fills.

use super::driver_api;
use crate::capture;
use crate::copy_engine::Fill;
use crate::graph_memory;
use crate::operations::Operation;
use crate::status::{Code, Outcome};
use crate::submission::{self, DefaultStream};

/// Refuses what cannot be filled, before it is submitted.
pub(super) fn check(fill: &Fill) -> Outcome {
    let size = (fill.width as u64).checked_mul(fill.value_size as u64);
    let size = size.ok_or(Code::INVALID_VALUE)?;
    let aligned = fill.to.is_multiple_of(fill.value_size as u64)
        && (fill.height <= 1 || fill.pitch.is_multiple_of(fill.value_size as u64));
    if !aligned || fill.height > 1 && fill.pitch < size {
        return Err(Code::INVALID_VALUE);
    }
    if fill.width == 0 || fill.height == 0 {
        return Ok(());
    }
    let last = fill.pitch.checked_mul(fill.height as u64 - 1).and_then(|o| fill.to.checked_add(o));
    let last = last.ok_or(Code::INVALID_VALUE)?;
    if !graph_memory::is_accessible(fill.to, size)
        || !graph_memory::is_accessible(last, size)
        || fill.writes_read_only()
    {
        return Err(Code::INVALID_VALUE);
    }
    Ok(())
}

fn submit(mode: DefaultStream, stream: u64, fill: Fill, wait: bool) -> Outcome {
    let (stream, context) = submission::stream_and_context(stream, mode)?;
    check(&fill)?;
    if fill.width == 0 || fill.height == 0 {
        return Ok(());
    }
    if wait {
        // A caller that wants to wait cannot mean a stream that captures.
        capture::refuse(&context, &stream)?;
    }
    let position = context.enqueue(&stream, Operation::Fill(fill))?;
    if let Some(position) = position.filter(|_| wait) {
        position.wait();
        context.check()?;
    }
    Ok(())
}

fn row(to: u64, value: u32, value_size: usize, width: usize) -> Fill {
    Fill { to, pitch: 0, value, value_size, width, height: 1 }
}

driver_api! {
    stream(mode) fn cuMemsetD8_v2, cuMemsetD8_v2_ptds(to: u64, value: u8, count: usize) {
        submit(mode, 0, row(to, value.into(), 1, count), true)
    }

    stream(mode) fn cuMemsetD16_v2, cuMemsetD16_v2_ptds(to: u64, value: u16, count: usize) {
        submit(mode, 0, row(to, value.into(), 2, count), true)
    }

    stream(mode) fn cuMemsetD32_v2, cuMemsetD32_v2_ptds(to: u64, value: u32, count: usize) {
        submit(mode, 0, row(to, value, 4, count), true)
    }

    stream(mode) fn cuMemsetD8Async, cuMemsetD8Async_ptsz(
        to: u64, value: u8, count: usize, stream: u64,
    ) {
        submit(mode, stream, row(to, value.into(), 1, count), false)
    }

    stream(mode) fn cuMemsetD16Async, cuMemsetD16Async_ptsz(
        to: u64, value: u16, count: usize, stream: u64,
    ) {
        submit(mode, stream, row(to, value.into(), 2, count), false)
    }

    stream(mode) fn cuMemsetD32Async, cuMemsetD32Async_ptsz(
        to: u64, value: u32, count: usize, stream: u64,
    ) {
        submit(mode, stream, row(to, value, 4, count), false)
    }

    stream(mode) fn cuMemsetD2D8_v2, cuMemsetD2D8_v2_ptds(
        to: u64, pitch: usize, value: u8, width: usize, height: usize,
    ) {
        let fill = row(to, value.into(), 1, width);
        submit(mode, 0, Fill { pitch: pitch as u64, height, ..fill }, true)
    }

    stream(mode) fn cuMemsetD2D16_v2, cuMemsetD2D16_v2_ptds(
        to: u64, pitch: usize, value: u16, width: usize, height: usize,
    ) {
        let fill = row(to, value.into(), 2, width);
        submit(mode, 0, Fill { pitch: pitch as u64, height, ..fill }, true)
    }

    stream(mode) fn cuMemsetD2D32_v2, cuMemsetD2D32_v2_ptds(
        to: u64, pitch: usize, value: u32, width: usize, height: usize,
    ) {
        let fill = row(to, value, 4, width);
        submit(mode, 0, Fill { pitch: pitch as u64, height, ..fill }, true)
    }

    stream(mode) fn cuMemsetD2D8Async, cuMemsetD2D8Async_ptsz(
        to: u64, pitch: usize, value: u8, width: usize, height: usize, stream: u64,
    ) {
        let fill = row(to, value.into(), 1, width);
        submit(mode, stream, Fill { pitch: pitch as u64, height, ..fill }, false)
    }

    stream(mode) fn cuMemsetD2D16Async, cuMemsetD2D16Async_ptsz(
        to: u64, pitch: usize, value: u16, width: usize, height: usize, stream: u64,
    ) {
        let fill = row(to, value.into(), 2, width);
        submit(mode, stream, Fill { pitch: pitch as u64, height, ..fill }, false)
    }

    stream(mode) fn cuMemsetD2D32Async, cuMemsetD2D32Async_ptsz(
        to: u64, pitch: usize, value: u32, width: usize, height: usize, stream: u64,
    ) {
        let fill = row(to, value, 4, width);
        submit(mode, stream, Fill { pitch: pitch as u64, height, ..fill }, false)
    }
}
