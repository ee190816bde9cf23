//! Copies.

use std::sync::Arc;

use cudarc::driver::sys;

use super::arguments::{Address, In};
use super::driver_api;
use crate::address_space;
use crate::arrays;
use crate::capture;
use crate::context::{self, Context};
use crate::copy_engine::{self, Direction, Transfer};
use crate::graph_memory;
use crate::graphs::Work;
use crate::operations::Operation;
use crate::status::{Code, Outcome};
use crate::streams::Stream;
use crate::submission::{self, DefaultStream};

/// Pageable sources up to this size are copied at the call, so that it need not wait.
pub(super) const STAGED: usize = 64 << 10;

/// `CUDA_MEMCPY2D` with its enumerations as numbers.
#[repr(C)]
#[derive(Clone, Copy)]
struct Copy2d {
    from: Side2d,
    to: Side2d,
    width: usize,
    height: usize,
}

#[repr(C)]
#[derive(Clone, Copy)]
struct Side2d {
    x: usize,
    y: usize,
    kind: u32,
    host: u64,
    device: u64,
    array: u64,
    pitch: usize,
}

/// `CUDA_MEMCPY3D` and `CUDA_MEMCPY3D_PEER` with their enumerations as numbers.
#[repr(C)]
#[derive(Clone, Copy)]
pub(super) struct Copy3d {
    from: Side3d,
    to: Side3d,
    width: usize,
    height: usize,
    depth: usize,
}

#[repr(C)]
#[derive(Clone, Copy)]
struct Side3d {
    x: usize,
    y: usize,
    z: usize,
    level: usize,
    kind: u32,
    host: u64,
    device: u64,
    array: u64,
    context: u64,
    pitch: usize,
    height: usize,
}

const _: () = assert!(size_of::<Copy2d>() == size_of::<sys::CUDA_MEMCPY2D>());
const _: () = assert!(size_of::<Copy3d>() == size_of::<sys::CUDA_MEMCPY3D>());
const _: () = assert!(size_of::<Copy3d>() == size_of::<sys::CUDA_MEMCPY3D_PEER>());

/// `CUmemorytype`: host, device, unified.
fn side(kind: u32, host: u64, device: u64) -> Outcome<u64> {
    match kind {
        1 => Ok(host),
        2 | 4 => Ok(device),
        _ => Err(Code::INVALID_VALUE),
    }
}

/// `CU_MEMORYTYPE_ARRAY`.
const ARRAY: u32 = 3;

fn offset(parts: [(usize, usize); 3]) -> Outcome<u64> {
    let mut sum = 0usize;
    for (count, size) in parts {
        let part = count.checked_mul(size).ok_or(Code::INVALID_VALUE)?;
        sum = sum.checked_add(part).ok_or(Code::INVALID_VALUE)?;
    }
    Ok(sum as u64)
}

impl Copy2d {
    fn transfer(&self) -> Outcome<Transfer> {
        let place = |s: &Side2d| {
            if s.kind == ARRAY {
                let size = [self.width, self.height, 1];
                let part = arrays::by_handle(s.array)?.part([s.x, s.y, 0], size)?;
                return Ok((part.address, part.pitch));
            }
            let pitch = if s.pitch == 0 { self.width } else { s.pitch };
            if pitch < self.width && self.height > 1 {
                return Err(Code::INVALID_VALUE);
            }
            let at = side(s.kind, s.host, s.device)?;
            let at = at.checked_add(offset([(s.x, 1), (s.y, pitch), (0, 0)])?);
            Ok((at.ok_or(Code::INVALID_VALUE)?, pitch as u64))
        };
        let (to, to_pitch) = place(&self.to)?;
        let (from, from_pitch) = place(&self.from)?;
        let mut transfer = Transfer::linear(to, from, self.width);
        transfer.height = self.height;
        (transfer.to_pitch, transfer.from_pitch) = (to_pitch, from_pitch);
        Ok(transfer)
    }
}

impl Copy3d {
    pub(super) fn transfer(&self) -> Outcome<Transfer> {
        let place = |s: &Side3d| {
            if s.kind == ARRAY && s.level == 0 {
                let size = [self.width, self.height, self.depth];
                let part = arrays::by_handle(s.array)?.part([s.x, s.y, s.z], size)?;
                return Ok((part.address, part.pitch, part.plane));
            }
            let pitch = if s.pitch == 0 { self.width } else { s.pitch };
            let height = if s.height == 0 { self.height } else { s.height };
            if s.level != 0
                || pitch < self.width && self.height > 1
                || height < self.height && self.depth > 1
            {
                return Err(Code::INVALID_VALUE);
            }
            let plane = pitch.checked_mul(height).ok_or(Code::INVALID_VALUE)?;
            let at = side(s.kind, s.host, s.device)?;
            let at = at.checked_add(offset([(s.x, 1), (s.y, pitch), (s.z, plane)])?);
            Ok((at.ok_or(Code::INVALID_VALUE)?, pitch as u64, plane as u64))
        };
        let (to, to_pitch, to_plane) = place(&self.to)?;
        let (from, from_pitch, from_plane) = place(&self.from)?;
        Ok(Transfer {
            to,
            from,
            width: self.width,
            height: self.height,
            depth: self.depth,
            to_pitch,
            from_pitch,
            to_plane,
            from_plane,
        })
    }
}

impl From<&Transfer> for Copy3d {
    /// The description of a copy that is the same as the one given, though its offsets may have
    /// become part of the addresses.
    fn from(transfer: &Transfer) -> Copy3d {
        let side = |address: u64, pitch: u64, plane: u64| {
            let is_device = address_space::in_window(address);
            Side3d {
                x: 0,
                y: 0,
                z: 0,
                level: 0,
                kind: if is_device { 2 } else { 1 },
                host: if is_device { 0 } else { address },
                device: if is_device { address } else { 0 },
                array: 0,
                context: 0,
                pitch: pitch as usize,
                height: plane.checked_div(pitch).unwrap_or(0) as usize,
            }
        };
        Copy3d {
            from: side(transfer.from, transfer.from_pitch, transfer.from_plane),
            to: side(transfer.to, transfer.to_pitch, transfer.to_plane),
            width: transfer.width,
            height: transfer.height,
            depth: transfer.depth,
        }
    }
}

/// Last byte that one side of a transfer touches, relative to its first.
fn extent(transfer: &Transfer, pitch: u64, plane: u64) -> Outcome<u64> {
    let rows = (transfer.height as u64 - 1).checked_mul(pitch);
    let planes = (transfer.depth as u64 - 1).checked_mul(plane);
    rows.zip(planes)
        .and_then(|(rows, planes)| rows.checked_add(planes)?.checked_add(transfer.width as u64))
        .ok_or(Code::INVALID_VALUE)
}

/// Refuses what cannot be copied, before it is submitted.
pub(super) fn check(transfer: &Transfer) -> Outcome {
    let sides = [
        (transfer.to, transfer.to_pitch, transfer.to_plane),
        (transfer.from, transfer.from_pitch, transfer.from_plane),
    ];
    for (address, pitch, plane) in sides {
        let size = extent(transfer, pitch, plane)?;
        let known =
            |address| !address_space::in_window(address) || graph_memory::is_accessible(address, 1);
        let overflows = address.checked_add(size).is_none();
        if address == 0 || overflows || !known(address) || !known(address + size - 1) {
            return Err(Code::INVALID_VALUE);
        }
    }
    if transfer.writes_read_only() { Err(Code::INVALID_VALUE) } else { Ok(()) }
}

/// Whether a host address is memory that the program may change after an asynchronous call.
pub(super) fn is_pageable(address: u64) -> bool {
    !address_space::in_window(address) && !address_space::is_registered_host(address, 1)
}

fn submit(
    context: &Arc<Context>,
    stream: &Arc<Stream>,
    mut transfer: Transfer,
    wait: bool,
) -> Outcome {
    if transfer.is_empty() {
        return if wait { context.check() } else { Ok(()) };
    }
    check(&transfer)?;
    if !wait && capture::record(stream, Work::Operation(Operation::Copy(transfer), context.handle))?
    {
        return Ok(());
    }
    let direction = copy_engine::direction(transfer.to, transfer.from);
    let one_row = transfer.height == 1 && transfer.depth == 1;
    let mut staged = Vec::new();
    let mut wait = wait;
    if !wait && direction == Direction::HostToDevice && is_pageable(transfer.from) {
        if one_row && transfer.width <= STAGED {
            // SAFETY: the caller of the API promises the source; its size was checked to be sane.
            staged =
                unsafe { super::arguments::read_bytes(transfer.from as *const u8, transfer.width) };
            transfer.from = staged.as_ptr() as u64;
        } else {
            wait = true;
        }
    }
    wait |= direction == Direction::DeviceToHost && is_pageable(transfer.to);
    let owner = context.clone();
    let position = context.submit(stream, Vec::new(), move || {
        if !owner.has_failed()
            && let Err(code) = copy_engine::copy(&transfer)
        {
            owner.fail(code);
        }
        drop(staged);
    })?;
    if wait {
        position.wait();
        context.prints.flush();
        context.check()?;
    }
    Ok(())
}

/// A copy in the default stream that is over when the call returns.
pub(super) fn now(mode: DefaultStream, transfer: Transfer) -> Outcome {
    let context = context::current()?;
    submit(&context, &context.stream(0, mode)?, transfer, true)
}

/// A copy in a stream.
pub(super) fn later(mode: DefaultStream, stream: u64, transfer: Transfer) -> Outcome {
    let (stream, context) = submission::stream_and_context(stream, mode)?;
    submit(&context, &stream, transfer, false)
}

/// Fails unless the address is device memory or pinned host memory.
fn device_side(address: u64, size: usize) -> Outcome {
    if size == 0 || graph_memory::is_accessible(address, size as u64) {
        Ok(())
    } else {
        Err(Code::INVALID_VALUE)
    }
}

/// A copy between device memory, in the order of a stream.
pub(super) fn within_device(
    mode: DefaultStream,
    to: u64,
    from: u64,
    size: usize,
    stream: u64,
) -> Outcome {
    device_side(to, size)?;
    device_side(from, size)?;
    later(mode, stream, Transfer::linear(to, from, size))
}

driver_api! {
    stream(mode) fn cuMemcpy, cuMemcpy_ptds(to: u64, from: u64, size: usize) {
        now(mode, Transfer::linear(to, from, size))
    }

    stream(mode) fn cuMemcpyAsync, cuMemcpyAsync_ptsz(
        to: u64, from: u64, size: usize, stream: u64,
    ) {
        later(mode, stream, Transfer::linear(to, from, size))
    }

    stream(mode) fn cuMemcpyHtoD_v2, cuMemcpyHtoD_v2_ptds(to: u64, from: Address, size: usize) {
        device_side(to, size)?;
        now(mode, Transfer::linear(to, from.0, size))
    }

    stream(mode) fn cuMemcpyHtoDAsync_v2, cuMemcpyHtoDAsync_v2_ptsz(
        to: u64, from: Address, size: usize, stream: u64,
    ) {
        device_side(to, size)?;
        later(mode, stream, Transfer::linear(to, from.0, size))
    }

    stream(mode) fn cuMemcpyDtoH_v2, cuMemcpyDtoH_v2_ptds(to: Address, from: u64, size: usize) {
        device_side(from, size)?;
        now(mode, Transfer::linear(to.0, from, size))
    }

    stream(mode) fn cuMemcpyDtoHAsync_v2, cuMemcpyDtoHAsync_v2_ptsz(
        to: Address, from: u64, size: usize, stream: u64,
    ) {
        device_side(from, size)?;
        later(mode, stream, Transfer::linear(to.0, from, size))
    }

    stream(mode) fn cuMemcpyDtoD_v2, cuMemcpyDtoD_v2_ptds(to: u64, from: u64, size: usize) {
        device_side(to, size)?;
        device_side(from, size)?;
        now(mode, Transfer::linear(to, from, size))
    }

    stream(mode) fn cuMemcpyDtoDAsync_v2, cuMemcpyDtoDAsync_v2_ptsz(
        to: u64, from: u64, size: usize, stream: u64,
    ) {
        within_device(mode, to, from, size, stream)
    }

    stream(mode) fn cuMemcpyPeer, cuMemcpyPeer_ptds(
        to: u64, to_context: u64, from: u64, from_context: u64, size: usize,
    ) {
        context::by_handle(to_context)?;
        context::by_handle(from_context)?;
        now(mode, Transfer::linear(to, from, size))
    }

    stream(mode) fn cuMemcpyPeerAsync, cuMemcpyPeerAsync_ptsz(
        to: u64, to_context: u64, from: u64, from_context: u64, size: usize, stream: u64,
    ) {
        context::by_handle(to_context)?;
        context::by_handle(from_context)?;
        later(mode, stream, Transfer::linear(to, from, size))
    }

    stream(mode) fn cuMemcpy2D_v2, cuMemcpy2D_v2_ptds(copy: In<Copy2d>) {
        now(mode, copy.get()?.transfer()?)
    }

    stream(mode) fn cuMemcpy2DUnaligned_v2, cuMemcpy2DUnaligned_v2_ptds(copy: In<Copy2d>) {
        now(mode, copy.get()?.transfer()?)
    }

    stream(mode) fn cuMemcpy2DAsync_v2, cuMemcpy2DAsync_v2_ptsz(copy: In<Copy2d>, stream: u64) {
        later(mode, stream, copy.get()?.transfer()?)
    }

    stream(mode) fn cuMemcpy3D_v2, cuMemcpy3D_v2_ptds(copy: In<Copy3d>) {
        now(mode, copy.get()?.transfer()?)
    }

    stream(mode) fn cuMemcpy3DAsync_v2, cuMemcpy3DAsync_v2_ptsz(copy: In<Copy3d>, stream: u64) {
        later(mode, stream, copy.get()?.transfer()?)
    }

    stream(mode) fn cuMemcpy3DPeer, cuMemcpy3DPeer_ptds(copy: In<Copy3d>) {
        now(mode, copy.get()?.transfer()?)
    }

    stream(mode) fn cuMemcpy3DPeerAsync, cuMemcpy3DPeerAsync_ptsz(copy: In<Copy3d>, stream: u64) {
        later(mode, stream, copy.get()?.transfer()?)
    }
}
