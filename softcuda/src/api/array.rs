//! CUDA arrays, and copies of their bytes. Copies of boxes are among the others.

use cudarc::driver::sys;

use super::arguments::{Address, In, Out};
use super::copy::{later, now};
use super::driver_api;
use crate::arrays::{self, ARRAYS, Descriptor, MIPMAPPED, by_handle};
use crate::capture;
use crate::context;
use crate::copy_engine::Transfer;
use crate::status::{Code, Outcome};

/// `CUDA_ARRAY_DESCRIPTOR` with its enumeration as a number.
#[repr(C)]
#[derive(Clone, Copy)]
pub(super) struct PlainDescriptor {
    pub(super) width: usize,
    pub(super) height: usize,
    pub(super) format: u32,
    pub(super) channels: u32,
}

const _: () = assert!(size_of::<Descriptor>() == size_of::<sys::CUDA_ARRAY3D_DESCRIPTOR>());
const _: () = assert!(size_of::<PlainDescriptor>() == size_of::<sys::CUDA_ARRAY_DESCRIPTOR>());

fn create(out: &Out<u64>, descriptor: Descriptor) -> Outcome {
    out.check()?;
    let context = context::current()?;
    capture::refuse_unsafe()?;
    out.set(arrays::create(context.device, context.handle, descriptor)?)
}

fn descriptor(array: u64) -> Outcome<Descriptor> {
    context::current()?;
    Ok(ARRAYS.get(array).ok_or(Code::INVALID_HANDLE)?.descriptor)
}

driver_api! {
    call fn cuArrayCreate_v2(out: Out<u64>, given: In<PlainDescriptor>) {
        let PlainDescriptor { width, height, format, channels } = given.get()?;
        create(&out, Descriptor { width, height, depth: 0, format, channels, flags: 0 })
    }

    call fn cuArray3DCreate_v2(out: Out<u64>, given: In<Descriptor>) {
        create(&out, given.get()?)
    }

    call fn cuArrayGetDescriptor_v2(out: Out<PlainDescriptor>, array: u64) {
        let Descriptor { width, height, format, channels, .. } = descriptor(array)?;
        out.set(PlainDescriptor { width, height, format, channels })
    }

    call fn cuArray3DGetDescriptor_v2(out: Out<Descriptor>, array: u64) {
        out.set(descriptor(array)?)
    }

    call fn cuArrayDestroy(array: u64) {
        descriptor(array)?;
        capture::refuse_unsafe()?;
        context::wait_everything();
        arrays::destroy(array)
    }

    call fn cuMipmappedArrayCreate(out: Out<u64>, given: In<Descriptor>, levels: u32) {
        out.check()?;
        let context = context::current()?;
        capture::refuse_unsafe()?;
        let array =
            arrays::create_mipmapped(context.device, context.handle, given.get()?, levels)?;
        out.set(array)
    }

    call fn cuMipmappedArrayGetLevel(out: Out<u64>, array: u64, level: u32) {
        context::current()?;
        let array = MIPMAPPED.get(array).ok_or(Code::INVALID_HANDLE)?;
        out.set(*array.levels.get(level as usize).ok_or(Code::INVALID_VALUE)?)
    }

    call fn cuMipmappedArrayDestroy(array: u64) {
        context::current()?;
        capture::refuse_unsafe()?;
        context::wait_everything();
        arrays::destroy_mipmapped(array)
    }

    stream(mode) fn cuMemcpyAtoH_v2, cuMemcpyAtoH_v2_ptds(
        to: Address, from: u64, start: usize, size: usize,
    ) {
        now(mode, Transfer::linear(to.0, by_handle(from)?.bytes(start, size)?, size))
    }

    stream(mode) fn cuMemcpyAtoHAsync_v2, cuMemcpyAtoHAsync_v2_ptsz(
        to: Address, from: u64, start: usize, size: usize, stream: u64,
    ) {
        later(mode, stream, Transfer::linear(to.0, by_handle(from)?.bytes(start, size)?, size))
    }

    stream(mode) fn cuMemcpyHtoA_v2, cuMemcpyHtoA_v2_ptds(
        to: u64, start: usize, from: Address, size: usize,
    ) {
        now(mode, Transfer::linear(by_handle(to)?.bytes(start, size)?, from.0, size))
    }

    stream(mode) fn cuMemcpyHtoAAsync_v2, cuMemcpyHtoAAsync_v2_ptsz(
        to: u64, start: usize, from: Address, size: usize, stream: u64,
    ) {
        later(mode, stream, Transfer::linear(by_handle(to)?.bytes(start, size)?, from.0, size))
    }

    stream(mode) fn cuMemcpyAtoD_v2, cuMemcpyAtoD_v2_ptds(
        to: u64, from: u64, start: usize, size: usize,
    ) {
        now(mode, Transfer::linear(to, by_handle(from)?.bytes(start, size)?, size))
    }

    stream(mode) fn cuMemcpyDtoA_v2, cuMemcpyDtoA_v2_ptds(
        to: u64, start: usize, from: u64, size: usize,
    ) {
        now(mode, Transfer::linear(by_handle(to)?.bytes(start, size)?, from, size))
    }

    stream(mode) fn cuMemcpyAtoA_v2, cuMemcpyAtoA_v2_ptds(
        to: u64, to_start: usize, from: u64, from_start: usize, size: usize,
    ) {
        let to = by_handle(to)?.bytes(to_start, size)?;
        now(mode, Transfer::linear(to, by_handle(from)?.bytes(from_start, size)?, size))
    }
}
