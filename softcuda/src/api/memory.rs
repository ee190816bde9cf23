//! Plain device memory.

use super::arguments::Out;
use super::driver_api;
use crate::capture;
use crate::context;
use crate::device_memory;
use crate::graph_memory;
use crate::host_memory;
use crate::ipc;
use crate::managed_memory;
use crate::pools;
use crate::settings::settings;
use crate::status::{Code, Outcome};
use crate::virtual_memory;

/// Rows of `cuMemAllocPitch` begin at multiples of this.
const PITCH: usize = 512;

fn allocate(out: &Out<u64>, size: usize) -> Outcome {
    out.check()?;
    let context = context::current()?;
    capture::refuse_unsafe()?;
    let allocate = || device_memory::allocate(context.device, context.handle, size as u64);
    let address = allocate().or_else(|code| {
        if code != Code::OUT_OF_MEMORY {
            return Err(code);
        }
        // Pools may hold memory that nobody uses.
        pools::tidy(Some(context.device));
        allocate()
    })?;
    out.set(address)
}

driver_api! {
    call fn cuMemAlloc_v2(out: Out<u64>, size: usize) {
        allocate(&out, size)
    }

    call fn cuMemAllocPitch_v2(
        out: Out<u64>, pitch: Out<usize>, width: usize, height: usize, element: u32,
    ) {
        if width == 0 || height == 0 || !matches!(element, 4 | 8 | 16) {
            return Err(Code::INVALID_VALUE);
        }
        pitch.check()?;
        let row = width.checked_next_multiple_of(PITCH).ok_or(Code::OUT_OF_MEMORY)?;
        allocate(&out, row.checked_mul(height).ok_or(Code::OUT_OF_MEMORY)?)?;
        pitch.set(row)
    }

    call fn cuMemFree_v2(address: u64) {
        context::current()?;
        if address == 0 {
            return Ok(());
        }
        capture::refuse_unsafe()?;
        let managed = managed_memory::find(address).is_some_and(|m| m.address == address);
        let pooled = pools::find(address).is_some_and(|m| m.address == address);
        let plain = device_memory::find(address).is_some_and(|m| m.address == address);
        let of_graph = graph_memory::at(address).filter(|memory| memory.is_allocated());
        let imported = ipc::is_of_pool(address);
        if !(managed || pooled || plain || imported || of_graph.is_some()) {
            return Err(Code::INVALID_VALUE);
        }
        // As on a device, freeing waits for all work: it may use this memory.
        context::wait_everything();
        if let Some(memory) = of_graph {
            memory.free().map(drop)
        } else if managed {
            managed_memory::give_back(&pools::take_managed(address)?);
            Ok(())
        } else if pooled {
            pools::free(address, Vec::new())
        } else if imported {
            ipc::close(address)
        } else {
            device_memory::free(address)
        }
    }

    call fn cuMemGetInfo_v2(free: Out<usize>, total: Out<usize>) {
        let device = context::current()?.device;
        free.set(device_memory::free_bytes(device) as usize)?;
        total.set(settings().model(device).memory as usize)
    }

    call fn cuMemGetAddressRange_v2(base: Out<u64>, size: Out<usize>, address: u64) {
        context::current()?;
        let (start, length) = if let Some(allocation) = device_memory::find(address) {
            (allocation.address, allocation.size)
        } else if let Some((start, mapping)) = virtual_memory::find(address) {
            (start, mapping.size)
        } else if let Some(memory) = host_memory::find(address) {
            (memory.address, memory.size)
        } else if let Some(memory) = managed_memory::find(address) {
            (memory.address, memory.size)
        } else if let Some(memory) = pools::find(address) {
            (memory.address, memory.size)
        } else if let Some(memory) = graph_memory::find(address) {
            (memory.address, memory.size)
        } else if let Some(memory) = ipc::find(address) {
            (memory.address, memory.size)
        } else {
            return Err(Code::NOT_FOUND);
        };
        base.set_if_wanted(start);
        size.set_if_wanted(length as usize);
        Ok(())
    }
}
