//! Nodes of graphs that allocate and free memory.

use std::sync::Arc;

use cudarc::driver::sys;

use super::arguments::{In, Out, read_bytes};
use super::capture::list;
use super::driver_api;
use super::graph_parts;
use super::pool_properties::Properties;
use super::vmm::{Access, ON_DEVICE, READ_WRITE};
use crate::context;
use crate::graph_memory::{self, Amounts, Description, GraphMemory};
use crate::graphs::{self, Work};
use crate::managed_memory::Location;
use crate::settings::device;
use crate::status::{Code, Outcome};

/// `CUDA_MEM_ALLOC_NODE_PARAMS`.
#[repr(C)]
#[derive(Clone, Copy)]
pub(super) struct Parameters {
    properties: Properties,
    access: u64,
    access_count: usize,
    size: usize,
    address: u64,
}

const _: () = assert!(size_of::<Parameters>() == size_of::<sys::CUDA_MEM_ALLOC_NODE_PARAMS>());

/// Memory for a node.
///
/// # Errors
/// `INVALID_VALUE`, `INVALID_DEVICE`, `OUT_OF_MEMORY` without addresses, and `NOT_SUPPORTED` for
/// read-only access.
pub(super) fn node_memory(
    properties: &Properties,
    access: &[Access],
    size: usize,
) -> Outcome<Arc<GraphMemory>> {
    let managed = properties.managed()?;
    let device = match managed {
        None => properties.device()?,
        Some(Some(Location { kind: ON_DEVICE, id })) => device(id)?,
        // It counts as memory of the device that the graph is made for.
        Some(_) => context::current()?.device,
    };
    if properties.is_shareable() {
        return Err(Code::NOT_SUPPORTED);
    }
    for access in access {
        access.location.device()?;
        match access.flags {
            READ_WRITE => {}
            1 => return Err(Code::NOT_SUPPORTED),
            _ => return Err(Code::INVALID_VALUE),
        }
    }
    let description = Description {
        properties: bytes_of(std::slice::from_ref(properties)),
        access: bytes_of(access),
        access_count: access.len(),
    };
    graph_memory::create(device, size as u64, managed.is_some(), description)
}

/// The bytes of plain values.
fn bytes_of<T: Copy>(values: &[T]) -> Vec<u8> {
    // SAFETY: the slice has that many bytes; the structures of the API that are passed here have no
    // padding.
    unsafe { read_bytes(values.as_ptr().cast(), size_of_val(values)) }
}

/// Adds a node that allocates memory, and stores its address where its parameters are.
pub(super) fn add(
    out: &Out<u64>,
    graph: u64,
    dependencies: &In<u64>,
    count: usize,
    place: &Out<Parameters>,
) -> Outcome {
    let mut parameters = place.get()?;
    let access = list(&In::<Access>::at_address(parameters.access), parameters.access_count)?;
    let memory = node_memory(&parameters.properties, &access, parameters.size)?;
    parameters.address = memory.address;
    graph_parts::add(out, graph, dependencies, count, Work::Allocate(memory))?;
    place.set(parameters)
}

/// The work of freeing memory that a graph allocates.
pub(super) fn freed(address: u64) -> Outcome<Work> {
    graph_memory::at(address).map(Work::Free).ok_or(Code::INVALID_VALUE)
}

fn attribute(amounts: &mut Amounts, number: u32) -> Outcome<&mut u64> {
    Ok(match number {
        0 => &mut amounts.used.current,
        1 => &mut amounts.used.high,
        2 => &mut amounts.reserved.current,
        3 => &mut amounts.reserved.high,
        _ => return Err(Code::INVALID_VALUE),
    })
}

driver_api! {
    call fn cuGraphAddMemAllocNode(
        out: Out<u64>, graph: u64, dependencies: In<u64>, count: usize, given: Out<Parameters>,
    ) {
        add(&out, graph, &dependencies, count, &given)
    }

    call fn cuGraphAddMemFreeNode(
        out: Out<u64>, graph: u64, dependencies: In<u64>, count: usize, address: u64,
    ) {
        graph_parts::add(&out, graph, &dependencies, count, freed(address)?)
    }

    call fn cuGraphMemAllocNodeGetParams(node: u64, out: Out<Parameters>) {
        let Work::Allocate(memory) = graphs::work(node)? else { return Err(Code::INVALID_VALUE) };
        let Description { properties, access, access_count } = &memory.description;
        // The node keeps the descriptions of accesses alive.
        let access = if *access_count == 0 { 0 } else { access.as_ptr() as u64 };
        out.set(Parameters {
            properties: In::at_address(properties.as_ptr() as u64).get()?,
            access,
            access_count: *access_count,
            size: memory.size as usize,
            address: memory.address,
        })
    }

    call fn cuGraphMemFreeNodeGetParams(node: u64, out: Out<u64>) {
        match graphs::work(node)? {
            Work::Free(memory) => out.set(memory.address),
            _ => Err(Code::INVALID_VALUE),
        }
    }

    call fn cuDeviceGraphMemTrim(ordinal: i32) {
        let device = device(ordinal)?;
        context::while_idle(|| graph_memory::trim(device));
        Ok(())
    }

    call fn cuDeviceGetGraphMemAttribute(ordinal: i32, number: u32, out: Out<u64>) {
        let mut amounts = graph_memory::amounts(device(ordinal)?);
        out.set(*attribute(&mut amounts, number)?)
    }

    call fn cuDeviceSetGraphMemAttribute(ordinal: i32, number: u32, value: In<u64>) {
        let device = device(ordinal)?;
        // High-water marks can only be reset.
        if !matches!(number, 1 | 3) || value.get()? != 0 {
            return Err(Code::INVALID_VALUE);
        }
        graph_memory::change_amounts(device, |amounts| match number {
            1 => amounts.used.reset(),
            _ => amounts.reserved.reset(),
        });
        Ok(())
    }
}
