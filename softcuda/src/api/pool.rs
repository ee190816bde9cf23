//! Stream-ordered memory and its pools.

use std::sync::Arc;

use cudarc::driver::sys;
use rustix::fd::{BorrowedFd, IntoRawFd};

use super::arguments::{Address, In, Out};
use super::pool_properties::{MANAGED, PINNED, Properties, preferred};
use super::vmm::{Access, READ_WRITE};
use super::{driver_api, graph_memory};
use crate::capture;
use crate::context::{self, Context};
use crate::device_memory;
use crate::graphs::Work;
use crate::ipc::{self, Handle};
use crate::managed_memory::{self, Location};
use crate::managed_pools;
use crate::pools::{self, Kind, Pool};
use crate::settings::device;
use crate::shared_pools;
use crate::status::{Code, Outcome};
use crate::streams::Stream;
use crate::submission::{DefaultStream, stream_and_context};
use crate::virtual_memory::POSIX_FILE_DESCRIPTOR;

const _: () = assert!(size_of::<Handle>() == size_of::<sys::CUmemPoolPtrExportData>());

fn create(properties: &Properties) -> Outcome<u64> {
    if let Some(preferred) = properties.managed()? {
        let kind = Kind::Managed { preferred, is_default: false };
        return Ok(pools::create(0, properties.most as u64, kind).handle);
    }
    let device = properties.device()?;
    let kind = if properties.is_shareable() { Kind::Shareable } else { Kind::Own };
    Ok(pools::create(device, properties.most as u64, kind).handle)
}

fn allocate(
    out: &Out<u64>,
    size: usize,
    pool: &Pool,
    context: &Context,
    stream: &Arc<Stream>,
) -> Outcome {
    out.check()?;
    // The tests of cuda.core allocate nothing, in graphs too, and expect any address.
    if size == 0 {
        return out.set(0);
    }
    if capture::info(stream).is_some() {
        // It becomes a node, whose address is known at once.
        let properties = match pool.kind() {
            Kind::Managed { preferred, .. } => Properties::of_managed(preferred),
            _ => Properties::of_device(pool.device),
        };
        let memory = graph_memory::node_memory(&properties, &[], size)?;
        let address = memory.address;
        capture::record(stream, Work::Allocate(memory))?;
        return out.set(address);
    }
    capture::refuse(context, stream)?;
    let (address, after) = pool.allocate(stream, size as u64)?;
    if !after.is_empty()
        && let Err(code) = context.submit(stream, after.clone(), || ())
    {
        pools::free(address, after)?;
        return Err(code);
    }
    out.set(address)
}

fn free(mode: DefaultStream, address: u64, stream: u64) -> Outcome {
    let (stream, context) = stream_and_context(stream, mode)?;
    // Nothing documents this; NanoVDB in NVIDIA Warp frees null and takes an error for fatal.
    if address == 0 && capture::info(&stream).is_none() {
        return Ok(());
    }
    let of_graph = crate::graph_memory::at(address);
    if capture::info(&stream).is_some() {
        let memory = of_graph.ok_or(Code::INVALID_VALUE)?;
        return capture::record(&stream, Work::Free(memory)).map(|_| ());
    }
    capture::refuse(&context, &stream)?;
    if let Some(memory) = of_graph {
        let freed = memory.free()?;
        return context.submit(&stream, Vec::new(), move || drop((memory, freed))).map(|_| ());
    }
    if pools::find(address).is_some_and(|allocation| allocation.address == address) {
        return pools::free(address, vec![context.submit_marker(&stream)?]);
    }
    if ipc::is_of_pool(address) {
        return ipc::close_after(address, context::positions_of_all());
    }
    if managed_memory::find(address).is_some_and(|memory| memory.pool != 0) {
        let managed = pools::take_managed(address)?;
        let freed =
            context.submit(&stream, Vec::new(), move || managed_memory::give_back(&managed));
        if freed.is_err() {
            managed_memory::give_back(&managed);
        }
        return freed.map(|_| ());
    }
    // Plain memory may be freed in stream order, too.
    let allocation = device_memory::take(address)?;
    let freed = context.submit(&stream, Vec::new(), move || device_memory::give_back(&allocation));
    if freed.is_err() {
        device_memory::give_back(&allocation);
    }
    freed.map(|_| ())
}

/// A pool attribute that a program asks for.
enum Value {
    Flag(bool),
    Size(u64),
}

fn attribute(pool: &Pool, number: u32) -> Outcome<Value> {
    let attributes = pool.attributes();
    Ok(match number {
        1 => Value::Flag(attributes.follow_events),
        2 => Value::Flag(attributes.opportunistic),
        3 => Value::Flag(attributes.internal_dependencies),
        4 => Value::Size(attributes.threshold),
        5 => Value::Size(attributes.reserved.current),
        6 => Value::Size(attributes.reserved.high),
        7 => Value::Size(attributes.used.current),
        8 => Value::Size(attributes.used.high),
        _ => return Err(Code::INVALID_VALUE),
    })
}

fn set_attribute(pool: &Pool, number: u32, value: u64) -> Outcome {
    let flag = In::<i32>::at_address(value);
    let size = In::<u64>::at_address(value);
    match number {
        1..=3 => {
            let on = flag.get()? != 0;
            pool.change(|attributes| match number {
                1 => attributes.follow_events = on,
                2 => attributes.opportunistic = on,
                _ => attributes.internal_dependencies = on,
            });
        }
        4 => {
            let threshold = size.get()?;
            pool.change(|attributes| attributes.threshold = threshold);
        }
        // High-water marks can only be reset.
        6 | 8 if size.get()? == 0 => pool.change(|attributes| {
            let mark = if number == 6 { &mut attributes.reserved } else { &mut attributes.used };
            mark.reset();
        }),
        _ => return Err(Code::INVALID_VALUE),
    }
    Ok(())
}

/// For what there is a pool from the beginning.
enum Place {
    Device(usize),
    /// Managed memory, and where it should stay if that is said.
    Managed(Option<Location>),
}

fn place(location: &In<Location>, kind: u32) -> Outcome<Place> {
    let location = location.get()?;
    match kind {
        PINNED => location.device().map(Place::Device),
        MANAGED => preferred(location).map(Place::Managed),
        _ => Err(Code::INVALID_VALUE),
    }
}

driver_api! {
    stream(mode) fn cuMemAllocAsync, cuMemAllocAsync_ptsz(
        out: Out<u64>, size: usize, stream: u64,
    ) {
        let (stream, context) = stream_and_context(stream, mode)?;
        allocate(&out, size, &pools::current_of(context.device), &context, &stream)
    }

    stream(mode) fn cuMemAllocFromPoolAsync, cuMemAllocFromPoolAsync_ptsz(
        out: Out<u64>, size: usize, pool: u64, stream: u64,
    ) {
        let (stream, context) = stream_and_context(stream, mode)?;
        allocate(&out, size, &*pools::by_handle(pool)?, &context, &stream)
    }

    stream(mode) fn cuMemFreeAsync, cuMemFreeAsync_ptsz(address: u64, stream: u64) {
        free(mode, address, stream)
    }

    call fn cuMemPoolCreate(out: Out<u64>, properties: In<Properties>) {
        out.check()?;
        out.set(create(&properties.get()?)?)
    }

    call fn cuMemPoolDestroy(pool: u64) {
        pools::destroy(&*pools::by_handle(pool)?)
    }

    call fn cuMemPoolExportToShareableHandle(out: Out<i32>, pool: u64, kind: u32, flags: u64) {
        out.check()?;
        if kind != POSIX_FILE_DESCRIPTOR || flags != 0 {
            return Err(Code::INVALID_VALUE);
        }
        out.set(shared_pools::export(&*pools::by_handle(pool)?)?.into_raw_fd())
    }

    call fn cuMemPoolImportFromShareableHandle(
        out: Out<u64>, descriptor: Address, kind: u32, flags: u64,
    ) {
        out.check()?;
        let descriptor = i32::try_from(descriptor.0).ok().filter(|fd| *fd >= 0);
        let descriptor = descriptor.filter(|_| kind == POSIX_FILE_DESCRIPTOR && flags == 0);
        let descriptor = descriptor.ok_or(Code::INVALID_VALUE)?;
        // SAFETY: the caller lends the descriptor for the length of the call; one that is not open
        // fails in the kernel.
        out.set(shared_pools::import(unsafe { BorrowedFd::borrow_raw(descriptor) })?)
    }

    call fn cuMemPoolExportPointer(out: Out<Handle>, address: u64) {
        out.check()?;
        out.set(shared_pools::export_pointer(address)?)
    }

    call fn cuMemPoolImportPointer(out: Out<u64>, pool: u64, data: In<Handle>) {
        out.check()?;
        out.set(shared_pools::import_pointer(&*pools::by_handle(pool)?, &data.get()?)?)
    }

    call fn cuMemPoolTrimTo(pool: u64, keep: usize) {
        pools::by_handle(pool)?.trim(keep as u64);
        Ok(())
    }

    call fn cuMemPoolGetAttribute(pool: u64, number: u32, value: u64) {
        match attribute(&*pools::by_handle(pool)?, number)? {
            Value::Flag(flag) => Out::<i32>::at_address(value).set(flag.into()),
            Value::Size(size) => Out::<u64>::at_address(value).set(size),
        }
    }

    call fn cuMemPoolSetAttribute(pool: u64, number: u32, value: u64) {
        set_attribute(&*pools::by_handle(pool)?, number, value)
    }

    call fn cuMemPoolSetAccess(pool: u64, access: In<Access>, count: usize) {
        let pool = pools::by_handle(pool)?;
        let mut wanted = Vec::new();
        for index in 0..count {
            let access = access.at(index)?;
            let on = match access.flags {
                0 => false,
                READ_WRITE => true,
                1 => return Err(Code::NOT_SUPPORTED), // read-only
                _ => return Err(Code::INVALID_VALUE),
            };
            let device = access.location.device()?;
            if device == pool.device && !on {
                return Err(Code::INVALID_VALUE);
            }
            wanted.push((device, on));
        }
        wanted.into_iter().try_for_each(|(device, on)| pool.set_access(device, on))
    }

    call fn cuMemPoolGetAccess(out: Out<u32>, pool: u64, location: In<Location>) {
        let pool = pools::by_handle(pool)?;
        let device = location.get()?.device()?;
        out.set(if pool.has_access(device) { READ_WRITE } else { 0 })
    }

    call fn cuDeviceGetDefaultMemPool(out: Out<u64>, ordinal: i32) {
        out.set(pools::default_of(device(ordinal)?).handle)
    }

    call fn cuDeviceGetMemPool(out: Out<u64>, ordinal: i32) {
        out.set(pools::current_of(device(ordinal)?).handle)
    }

    call fn cuDeviceSetMemPool(ordinal: i32, pool: u64) {
        pools::set_current(device(ordinal)?, &*pools::by_handle(pool)?)
    }

    call fn cuMemGetDefaultMemPool(out: Out<u64>, location: In<Location>, kind: u32) {
        out.set(match place(&location, kind)? {
            Place::Device(device) => pools::default_of(device).handle,
            Place::Managed(preferred) => managed_pools::default_of(preferred).handle,
        })
    }

    call fn cuMemGetMemPool(out: Out<u64>, location: In<Location>, kind: u32) {
        out.set(match place(&location, kind)? {
            Place::Device(device) => pools::current_of(device).handle,
            Place::Managed(preferred) => managed_pools::current_of(preferred).handle,
        })
    }

    call fn cuMemSetMemPool(location: In<Location>, kind: u32, pool: u64) {
        let pool = pools::by_handle(pool)?;
        match place(&location, kind)? {
            Place::Device(device) => pools::set_current(device, &pool),
            Place::Managed(preferred) => managed_pools::set_current(preferred, &pool),
        }
    }
}
