//! Managed memory.

use super::arguments::{In, Out};
use super::driver_api;
use crate::capture;
use crate::context;
use crate::managed_memory::{self, Advice, Location};
use crate::settings::device;
use crate::status::{Code, Outcome};
use crate::submission::{DefaultStream, stream_and_context};

/// `CU_MEM_ATTACH_GLOBAL`, `_HOST` and `_SINGLE`.
const ATTACH_GLOBAL: u32 = 1;
const ATTACH_HOST: u32 = 2;
const ATTACH_SINGLE: u32 = 4;

/// `CUmemLocationType`.
pub(super) const NOWHERE: u32 = 0;
const ON_DEVICE: u32 = 1;
pub(super) const ON_HOST: u32 = 2;
pub(super) const ON_NUMA_NODE: u32 = 3;
const ON_NEAREST_NODE: u32 = 4;

/// `CU_DEVICE_CPU` and `CU_DEVICE_INVALID`, where the API gives a device for a location.
const CPU: i32 = -1;
const NO_DEVICE: i32 = -2;

/// The location that the older functions name by a device.
fn of_device(ordinal: i32) -> Location {
    match ordinal {
        CPU => Location { kind: ON_HOST, id: 0 },
        id => Location { kind: ON_DEVICE, id },
    }
}

/// The device that the older attributes name for a location.
fn device_of(location: Location) -> i32 {
    match location.kind {
        ON_DEVICE => location.id,
        NOWHERE => NO_DEVICE,
        _ => CPU,
    }
}

/// Fails for a location that there is not.
pub(super) fn check(location: Location) -> Outcome {
    match location.kind {
        ON_DEVICE => device(location.id).map(|_| ()),
        ON_HOST | ON_NUMA_NODE | ON_NEAREST_NODE => Ok(()),
        _ => Err(Code::INVALID_VALUE),
    }
}

fn advise(address: u64, size: usize, advice: u32, location: Location) -> Outcome {
    context::current()?;
    match advice {
        // These ignore the location.
        1 | 2 | 4 => {}
        3 | 5 | 6 => check(location)?,
        _ => return Err(Code::INVALID_VALUE),
    }
    managed_memory::advise(address, size as u64, |kept| match advice {
        1 => kept.read_mostly = true,
        2 => kept.read_mostly = false,
        3 => kept.preferred = Some(location),
        4 => kept.preferred = None,
        5 if !kept.accessed_by.contains(&location) => kept.accessed_by.push(location),
        6 => kept.accessed_by.retain(|other| *other != location),
        _ => {}
    })
}

/// Notes where a range is wanted.
pub(super) fn prefetch(
    mode: DefaultStream,
    address: u64,
    size: usize,
    location: Location,
    flags: u32,
    stream: u64,
) -> Outcome {
    stream_and_context(stream, mode)?;
    if flags != 0 {
        return Err(Code::INVALID_VALUE);
    }
    check(location)?;
    // The memory is where everybody wants it, so that there is nothing to do in the stream.
    managed_memory::advise(address, size as u64, |kept| kept.prefetched = Some(location))
}

/// What all parts have in common, or the default.
fn common<T: Default + PartialEq>(parts: &[Advice], of: impl Fn(&Advice) -> T) -> T {
    let mut values = parts.iter().map(of);
    let Some(first) = values.next() else { return T::default() };
    if values.all(|value| value == first) { first } else { T::default() }
}

/// An attribute as the words that it is stored in.
fn attribute(number: u32, address: u64, size: usize, words: usize) -> Outcome<Vec<i32>> {
    let parts = managed_memory::advice(address, size as u64)?;
    let preferred = || common(&parts, |part| part.preferred.unwrap_or_default());
    let prefetched = || common(&parts, |part| part.prefetched.unwrap_or_default());
    let one = match number {
        1 => parts.iter().all(|part| part.read_mostly).into(),
        2 => device_of(preferred()),
        3 => {
            let mut by: Vec<Location> = parts.first().map_or(Vec::new(), |p| p.accessed_by.clone());
            by.retain(|location| parts.iter().all(|part| part.accessed_by.contains(location)));
            let mut devices: Vec<i32> = by.into_iter().map(device_of).collect();
            // Devices by their numbers, and the host behind them, in whatever order they were named.
            devices.sort_by_key(|device| device.cast_unsigned());
            devices.resize(words, NO_DEVICE);
            return if words == 0 { Err(Code::INVALID_VALUE) } else { Ok(devices) };
        }
        4 => device_of(prefetched()),
        5 => preferred().kind as i32,
        6 => preferred().id,
        7 => prefetched().kind as i32,
        8 => prefetched().id,
        _ => return Err(Code::INVALID_VALUE),
    };
    if words == 1 { Ok(vec![one]) } else { Err(Code::INVALID_VALUE) }
}

fn store(to: &Out<i32>, bytes: usize, number: u32, address: u64, size: usize) -> Outcome {
    to.check()?;
    if !bytes.is_multiple_of(4) {
        return Err(Code::INVALID_VALUE);
    }
    to.set_all(attribute(number, address, size, bytes / 4)?)
}

driver_api! {
    call fn cuMemAllocManaged(out: Out<u64>, size: usize, flags: u32) {
        out.check()?;
        let context = context::current()?;
        capture::refuse_unsafe()?;
        if !matches!(flags, ATTACH_GLOBAL | ATTACH_HOST) {
            return Err(Code::INVALID_VALUE);
        }
        out.set(managed_memory::allocate(context.handle, size as u64)?)
    }

    call fn cuMemAdvise(address: u64, size: usize, advice: u32, ordinal: i32) {
        advise(address, size, advice, of_device(ordinal))
    }

    call fn cuMemAdvise_v2(address: u64, size: usize, advice: u32, location: Location) {
        advise(address, size, advice, location)
    }

    stream(mode) fn cuMemPrefetchAsync, cuMemPrefetchAsync_ptsz(
        address: u64, size: usize, ordinal: i32, stream: u64,
    ) {
        prefetch(mode, address, size, of_device(ordinal), 0, stream)
    }

    stream(mode) fn cuMemPrefetchAsync_v2, cuMemPrefetchAsync_v2_ptsz(
        address: u64, size: usize, location: Location, flags: u32, stream: u64,
    ) {
        prefetch(mode, address, size, location, flags, stream)
    }

    call fn cuMemRangeGetAttribute(
        out: Out<i32>, bytes: usize, number: u32, address: u64, size: usize,
    ) {
        context::current()?;
        store(&out, bytes, number, address, size)
    }

    call fn cuMemRangeGetAttributes(
        outs: In<u64>, bytes: In<usize>, numbers: In<u32>, count: usize, address: u64, size: usize,
    ) {
        context::current()?;
        if count == 0 {
            return Err(Code::INVALID_VALUE);
        }
        for index in 0..count {
            let out = Out::at_address(outs.at(index)?);
            store(&out, bytes.at(index)?, numbers.at(index)?, address, size)?;
        }
        Ok(())
    }

    stream(mode) fn cuStreamAttachMemAsync, cuStreamAttachMemAsync_ptsz(
        stream: u64, address: u64, length: usize, flags: u32,
    ) {
        stream_and_context(stream, mode)?;
        let managed = managed_memory::find(address).filter(|m| m.address == address);
        let managed = managed.ok_or(Code::INVALID_VALUE)?;
        let whole = length == 0 || length as u64 == managed.size;
        let alone = flags == ATTACH_SINGLE && stream > 2;
        if !whole || !(matches!(flags, ATTACH_GLOBAL | ATTACH_HOST) || alone) {
            return Err(Code::INVALID_VALUE);
        }
        // Host and all streams may use the memory at any time, whatever it is attached to.
        Ok(())
    }
}
