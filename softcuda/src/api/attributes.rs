//! Attributes of streams and of kernel nodes.

use std::sync::Arc;

use super::arguments::{In, Out};
use super::driver_api;
use crate::attributes::{self, Attributes, COOPERATIVE, OF_KERNELS, OF_STREAMS, Value};
use crate::graphs::{self, Work};
use crate::kernel_launch::KernelLaunch;
use crate::operations::Operation;
use crate::shapes;
use crate::status::{Code, Outcome};
use crate::submission::{DefaultStream, stream_and_context};

/// Stores a value, as many bytes of it as the attribute has.
fn store(out: &Out<u8>, id: u32, value: &Value) -> Outcome {
    out.set_all(value[..attributes::size(id)].iter().copied())
}

/// What the caller gives for an attribute; only as many bytes as the attribute has need be there.
fn given(id: u32, value: &In<u8>) -> Outcome<Value> {
    let mut given = [0; 64];
    for (index, byte) in given.iter_mut().enumerate().take(attributes::size(id)) {
        *byte = value.at(index)?;
    }
    Ok(given)
}

fn copy_of_stream(mode: DefaultStream, to: u64, from: u64) -> Outcome {
    let (to, _) = stream_and_context(to, mode)?;
    let (from, _) = stream_and_context(from, mode)?;
    let copied = from.attributes.lock().clone();
    *to.attributes.lock() = copied;
    Ok(())
}

/// The kernel of a node, and the context that it is for.
fn kernel(node: u64) -> Outcome<(Arc<KernelLaunch>, u64)> {
    match graphs::work(node)? {
        Work::Operation(Operation::Kernel(launch), owner) => Ok((launch, owner)),
        _ => Err(Code::INVALID_VALUE),
    }
}

fn attributes_of(launch: &KernelLaunch) -> Outcome<Attributes> {
    let mut attributes = launch.attributes.clone();
    let cooperative = attributes::number(launch.shape.cooperative.into());
    attributes.set(COOPERATIVE, cooperative, OF_KERNELS)?;
    Ok(attributes)
}

fn set_attributes(node: u64, attributes: Attributes) -> Outcome {
    let (launch, owner) = kernel(node)?;
    let cooperative = attributes.get(COOPERATIVE, OF_KERNELS)?;
    let mut changed = launch.again();
    changed.shape.cooperative = attributes::number_in(&cooperative) != 0;
    changed.attributes = attributes;
    shapes::check(&changed.function, &changed.shape)?;
    graphs::set_work(node, Work::Operation(Operation::Kernel(Arc::new(changed)), owner))
}

/// The new work of a kernel node, with the attributes that the node has.
pub(super) fn keep(node: u64, work: Work) -> Outcome<Work> {
    let attributes = attributes_of(&kernel(node)?.0)?;
    let Work::Operation(Operation::Kernel(launch), owner) = work else { return Ok(work) };
    let mut changed = launch.again();
    let cooperative = attributes.get(COOPERATIVE, OF_KERNELS)?;
    changed.shape.cooperative |= attributes::number_in(&cooperative) != 0;
    changed.attributes = attributes;
    Ok(Work::Operation(Operation::Kernel(Arc::new(changed)), owner))
}

driver_api! {
    stream(mode) fn cuStreamGetAttribute, cuStreamGetAttribute_ptsz(
        stream: u64, id: u32, out: Out<u8>,
    ) {
        let (stream, _) = stream_and_context(stream, mode)?;
        out.check()?;
        let value = stream.attributes.lock().get(id, OF_STREAMS)?;
        store(&out, id, &value)
    }

    stream(mode) fn cuStreamSetAttribute, cuStreamSetAttribute_ptsz(
        stream: u64, id: u32, value: In<u8>,
    ) {
        let (stream, _) = stream_and_context(stream, mode)?;
        stream.attributes.lock().set(id, given(id, &value)?, OF_STREAMS)
    }

    stream(mode) fn cuStreamCopyAttributes, cuStreamCopyAttributes_ptsz(to: u64, from: u64) {
        copy_of_stream(mode, to, from)
    }

    call fn cuGraphKernelNodeGetAttribute(node: u64, id: u32, out: Out<u8>) {
        out.check()?;
        store(&out, id, &attributes_of(&kernel(node)?.0)?.get(id, OF_KERNELS)?)
    }

    call fn cuGraphKernelNodeSetAttribute(node: u64, id: u32, value: In<u8>) {
        let mut attributes = attributes_of(&kernel(node)?.0)?;
        attributes.set(id, given(id, &value)?, OF_KERNELS)?;
        set_attributes(node, attributes)
    }

    call fn cuGraphKernelNodeCopyAttributes(to: u64, from: u64) {
        let attributes = attributes_of(&kernel(from)?.0)?;
        set_attributes(to, attributes)
    }
}
