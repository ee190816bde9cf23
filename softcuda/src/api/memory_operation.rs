//! Waiting for values in memory and writing them, in streams and as nodes of graphs.

use std::sync::Arc;

use cudarc::driver::sys;

use super::arguments::{In, Out};
use super::capture::list;
use super::driver_api;
use super::graph_parts::{add, find};
use crate::context;
use crate::graphs::{self, Work};
use crate::memory_operations::{MemoryOperation, Version, WAIT_32, WAIT_64, WRITE_32, WRITE_64};
use crate::operations::Operation;
use crate::status::{Code, Outcome};
use crate::submission::{DefaultStream, stream_and_context};

/// A batch has fewer operations than this.
const TOO_MANY: u32 = 256;

/// `CUDA_BATCH_MEM_OP_NODE_PARAMS`; both versions are the same.
#[repr(C)]
#[derive(Clone, Copy)]
pub(super) struct NodeParameters {
    context: u64,
    count: u32,
    list: u64,
    flags: u32,
}

const _: () =
    assert!(size_of::<NodeParameters>() == size_of::<sys::CUDA_BATCH_MEM_OP_NODE_PARAMS>());

/// The operations of a batch, which may also be none.
fn checked(
    count: u32,
    given: &In<MemoryOperation>,
    flags: u32,
    version: Version,
) -> Outcome<Arc<[MemoryOperation]>> {
    if count >= TOO_MANY || flags != 0 {
        return Err(Code::INVALID_VALUE);
    }
    let operations = list(given, count as usize)?;
    operations.iter().try_for_each(|operation| operation.check(version))?;
    Ok(operations.into())
}

fn batch(
    mode: DefaultStream,
    stream: u64,
    count: u32,
    given: &In<MemoryOperation>,
    flags: u32,
    version: Version,
) -> Outcome {
    let (stream, context) = stream_and_context(stream, mode)?;
    let operations = checked(count, given, flags, version)?;
    context.enqueue(&stream, Operation::Values(operations)).map(|_| ())
}

fn one(mode: DefaultStream, stream: u64, operation: MemoryOperation, version: Version) -> Outcome {
    let (stream, context) = stream_and_context(stream, mode)?;
    operation.check(version)?;
    context.enqueue(&stream, Operation::Values(Arc::new([operation]))).map(|_| ())
}

/// The work that parameters of a node describe. Unlike other kinds it must name its context.
pub(super) fn node(given: &NodeParameters) -> Outcome<Work> {
    let owner = context::by_handle(given.context).map_err(|_| Code::INVALID_VALUE)?.handle;
    let operations = In::at_address(given.list);
    let operations = checked(given.count, &operations, given.flags, Version::V2)?;
    Ok(Work::Operation(Operation::Values(operations), owner))
}

driver_api! {
    stream(mode) fn cuStreamWaitValue32_v2, cuStreamWaitValue32_v2_ptsz(
        stream: u64, address: u64, value: u32, flags: u32,
    ) {
        let operation = MemoryOperation::new(WAIT_32, address, value.into(), flags);
        one(mode, stream, operation, Version::V2)
    }

    stream(mode) fn cuStreamWaitValue64_v2, cuStreamWaitValue64_v2_ptsz(
        stream: u64, address: u64, value: u64, flags: u32,
    ) {
        let operation = MemoryOperation::new(WAIT_64, address, value, flags);
        one(mode, stream, operation, Version::V2)
    }

    stream(mode) fn cuStreamWriteValue32_v2, cuStreamWriteValue32_v2_ptsz(
        stream: u64, address: u64, value: u32, flags: u32,
    ) {
        let operation = MemoryOperation::new(WRITE_32, address, value.into(), flags);
        one(mode, stream, operation, Version::V2)
    }

    stream(mode) fn cuStreamWriteValue64_v2, cuStreamWriteValue64_v2_ptsz(
        stream: u64, address: u64, value: u64, flags: u32,
    ) {
        let operation = MemoryOperation::new(WRITE_64, address, value, flags);
        one(mode, stream, operation, Version::V2)
    }

    stream(mode) fn cuStreamWaitValue32, cuStreamWaitValue32_ptsz(
        stream: u64, address: u64, value: u32, flags: u32,
    ) {
        let operation = MemoryOperation::new(WAIT_32, address, value.into(), flags);
        one(mode, stream, operation, Version::V1)
    }

    stream(mode) fn cuStreamWaitValue64, cuStreamWaitValue64_ptsz(
        stream: u64, address: u64, value: u64, flags: u32,
    ) {
        let operation = MemoryOperation::new(WAIT_64, address, value, flags);
        one(mode, stream, operation, Version::V1)
    }

    stream(mode) fn cuStreamWriteValue32, cuStreamWriteValue32_ptsz(
        stream: u64, address: u64, value: u32, flags: u32,
    ) {
        let operation = MemoryOperation::new(WRITE_32, address, value.into(), flags);
        one(mode, stream, operation, Version::V1)
    }

    stream(mode) fn cuStreamWriteValue64, cuStreamWriteValue64_ptsz(
        stream: u64, address: u64, value: u64, flags: u32,
    ) {
        let operation = MemoryOperation::new(WRITE_64, address, value, flags);
        one(mode, stream, operation, Version::V1)
    }

    stream(mode) fn cuStreamBatchMemOp, cuStreamBatchMemOp_ptsz(
        stream: u64, count: u32, given: In<MemoryOperation>, flags: u32,
    ) {
        batch(mode, stream, count, &given, flags, Version::V1)
    }

    stream(mode) fn cuStreamBatchMemOp_v2, cuStreamBatchMemOp_v2_ptsz(
        stream: u64, count: u32, given: In<MemoryOperation>, flags: u32,
    ) {
        batch(mode, stream, count, &given, flags, Version::V2)
    }

    call fn cuGraphAddBatchMemOpNode(
        out: Out<u64>, graph: u64, dependencies: In<u64>, count: usize, given: In<NodeParameters>,
    ) {
        add(&out, graph, &dependencies, count, node(&given.get()?)?)
    }

    call fn cuGraphBatchMemOpNodeGetParams(node: u64, out: Out<NodeParameters>) {
        let Work::Operation(Operation::Values(operations), context) = graphs::work(node)? else {
            return Err(Code::INVALID_VALUE);
        };
        // The graph keeps the operations alive as long as the node is not changed.
        let (count, list) = (operations.len() as u32, operations.as_ptr() as u64);
        out.set(NodeParameters { context, count, list, flags: 0 })
    }

    call fn cuGraphBatchMemOpNodeSetParams(handle: u64, given: In<NodeParameters>) {
        graphs::set_work(handle, node(&given.get()?)?)
    }

    call fn cuGraphExecBatchMemOpNodeSetParams(
        executable: u64, handle: u64, given: In<NodeParameters>,
    ) {
        find(executable)?.set_work(handle, node(&given.get()?)?)
    }
}
