//! How to read the arguments of functions that the table names a form for.
//!
//! Each form is given the arguments as integer slots, as the program passed them. The upper half of
//! a slot whose argument is 32 bits wide says nothing.

use std::ffi::c_void;

use gpucr_wire::access::Operation;
use gpucr_wire::reach::Sizes;

use super::kernels::Kernel;
use super::{graphs, guard, images};
use crate::driver::{
    ArrayDescriptor, Copy2d, Copy3d, Copy3dOp, Copy3dOperand, DecompressParams, LARGEST_ELEMENT,
    LaunchParams, MEMORY_DEVICE, MEMORY_UNIFIED, MemoryOp, OPERAND_ARRAY, OPERAND_POINTER, SUCCESS,
};
use crate::real;

/// Names of the values in `extra`.
const BUFFER_POINTER: usize = 1;
const BUFFER_SIZE: usize = 2;
/// More than all arguments of a kernel together can have, bytes.
const LARGEST_BUFFER: usize = 32 << 10;
/// `CU_STREAM_MEM_OP_*`.
const WAIT_32: u32 = 1;
const WRITE_32: u32 = 2;
const WAIT_64: u32 = 4;
const WRITE_64: u32 = 5;
const ATOMIC_REDUCTION: u32 = 8;

const COPY: Operation = Operation::Copy {};
const FILL: Operation = Operation::Fill {};
const VALUE: Operation = Operation::Value {};

/// A range that is read or written by something that is not a kernel.
pub(super) type Range = (Operation, bool, u64, u64);

fn note(range: Range) {
    super::range(range);
}

/// The call is for this stream, if its form has one.
fn on(stream: Option<&usize>) {
    if let Some(stream) = stream {
        guard::stream(*stream as u64);
    }
}

fn read(operation: Operation, address: usize, bytes: usize) -> Range {
    (operation, false, address as u64, bytes as u64)
}

fn written(operation: Operation, address: usize, bytes: usize) -> Range {
    (operation, true, address as u64, bytes as u64)
}

/// Reads what an argument points to; `None` for a null pointer, which the driver refuses.
///
/// # Safety
/// The argument is null or points to `T`, as the function's signature says.
unsafe fn at<T: Copy>(address: usize) -> Option<T> {
    // SAFETY: the caller's duty.
    (address != 0).then(|| unsafe { (address as *const T).read_unaligned() })
}

// Launches.

/// `cuLaunchKernel(f, grid, block, shared, stream, kernelParams, extra)`.
pub(crate) fn kernel(a: &[usize]) {
    on(a.get(8));
    launched(a[0], shape(&a[1..7]), a[9], a[10]);
}

/// `cuLaunchCooperativeKernel(f, grid, block, shared, stream, kernelParams)`.
pub(crate) fn cooperative(a: &[usize]) {
    on(a.get(8));
    launched(a[0], shape(&a[1..7]), a[9], 0);
}

/// `cuLaunchKernelEx(config, f, kernelParams, extra)`.
pub(crate) fn kernel_ex(a: &[usize]) {
    // SAFETY: the function's signature: six sizes and the bytes of shared memory come first.
    let stream = unsafe { at::<usize>(if a[0] == 0 { 0 } else { a[0] + 32 }) };
    on(stream.as_ref());
    // SAFETY: as above.
    let sizes = unsafe { at::<[u32; 6]>(a[0]) }.map_or(Sizes::UNKNOWN, sizes);
    launched(a[1], sizes, a[2], a[3]);
}

/// `cuLaunchCooperativeKernelMultiDevice(list, count, flags)`.
pub(crate) fn kernels(a: &[usize]) {
    for i in 0..a[1] as u32 as usize {
        // SAFETY: the list has so many members.
        let Some(one) = (unsafe { at::<LaunchParams>(a[0] + i * size_of::<LaunchParams>()) })
        else {
            return;
        };
        let [gx, gy, gz, bx, by, bz, _] = one.shape;
        launched(one.function as usize, sizes([gx, gy, gz, bx, by, bz]), one.params as usize, 0);
    }
}

/// `cuLaunch(f)` and `cuLaunchGrid(f, ...)`: the arguments were set one by one before.
pub(crate) fn kernel_legacy(a: &[usize]) {
    launched(a[0], Sizes::UNKNOWN, 0, 0);
}

/// `cuGraphLaunch(exec, stream)`.
pub(crate) fn graph(a: &[usize]) {
    on(a.get(1));
    super::graph(a[0] as u64);
}

/// `cuLaunchHostFunc` and `cuStreamAddCallback`.
pub(crate) fn host_function(_: &[usize]) {
    super::host_function();
}

/// Six arguments: blocks in each direction, threads of a block in each direction.
fn shape(a: &[usize]) -> Sizes {
    sizes(std::array::from_fn(|of| a[of] as u32))
}

fn sizes([gx, gy, gz, bx, by, bz]: [u32; 6]) -> Sizes {
    Sizes::of([gx, gy, gz], [bx, by, bz])
}

fn launched(function: usize, sizes: Sizes, params: usize, extra: usize) {
    super::launch(function as u64, sizes, |kernel, note| {
        // SAFETY: the program passes these to a launch of the kernel.
        unsafe { words(kernel, params as _, extra as _, note) };
    });
}

/// Calls `note` with the number and value of each word of the kernel's arguments.
///
/// # Safety
/// `params` and `extra` are those of a launch of `kernel`; either may be null.
pub(super) unsafe fn words(
    kernel: &Kernel,
    params: *const *const u8,
    extra: *const *const c_void,
    note: &mut dyn FnMut(usize, u64),
) {
    // SAFETY: `params` points to as many pointers as the kernel has parameters, each to that
    // parameter. `extra` ends with 0, and names a buffer and its size.
    unsafe {
        if !params.is_null() {
            for (number, word) in kernel.words.iter().enumerate() {
                let param = params.add(word.param as usize).read();
                if !param.is_null() {
                    let place = param.add(word.offset as usize).cast::<u64>();
                    note(number, place.read_unaligned());
                }
            }
            return;
        }
        let Some((buffer, size)) = packed(extra) else { return };
        let word = |offset: usize| buffer.add(offset).cast::<u64>().read_unaligned();
        let Some(params) = &kernel.params else {
            // The driver has not looked at the size yet.
            let words = size.min(LARGEST_BUFFER) / 8;
            (0..words).for_each(|number| note(number, word(8 * number)));
            return;
        };
        for (number, of) in kernel.words.iter().enumerate() {
            let offset = (params[of.param as usize].offset + of.offset) as usize;
            if offset + 8 <= size {
                note(number, word(offset));
            }
        }
    }
}

/// The buffer of packed arguments and its size.
///
/// # Safety
/// `extra` is null or the last argument of a launch.
unsafe fn packed(extra: *const *const c_void) -> Option<(*const u8, usize)> {
    let (mut buffer, mut size) = (std::ptr::null::<u8>(), 0);
    // SAFETY: by the contract of launches a list of names and values that ends with 0.
    unsafe {
        let mut next = extra;
        while !next.is_null() {
            match next.read() as usize {
                BUFFER_POINTER => buffer = next.add(1).read().cast(),
                BUFFER_SIZE => size = at::<usize>(next.add(1).read() as usize)?,
                _ => break,
            }
            next = next.add(2);
        }
    }
    (!buffer.is_null()).then_some((buffer, size))
}

// Copies.

/// `cuMemcpy*(to, from, bytes, ...)` between linear memory.
pub(crate) fn copy(a: &[usize]) {
    on(a.get(3));
    note(read(COPY, a[1], a[2]));
    note(written(COPY, a[0], a[2]));
}

/// `cuMemcpyWithAttributesAsync(to, from, bytes, attributes, stream)`.
pub(crate) fn copy_with_attributes(a: &[usize]) {
    on(a.get(4));
    copy(&a[..3]);
}

/// `cuMemcpyPeer(to, context, from, context, bytes)`.
pub(crate) fn copy_peer(a: &[usize]) {
    on(a.get(5));
    note(read(COPY, a[2], a[4]));
    note(written(COPY, a[0], a[4]));
}

/// `cuMemcpyDtoA(array, offset, from, bytes)`.
pub(crate) fn copy_to_array(a: &[usize]) {
    note(read(COPY, a[2], a[3]));
}

/// `cuMemcpyAtoD(to, array, offset, bytes)`.
pub(crate) fn copy_from_array(a: &[usize]) {
    note(written(COPY, a[0], a[3]));
}

/// `cuMemcpy2D(copy, ...)`.
pub(crate) fn copy_2d(a: &[usize]) {
    on(a.get(1));
    // SAFETY: the function's signature.
    if let Some(copy) = unsafe { at::<Copy2d>(a[0]) } {
        let side = |kind: u32, pointer: [u64; 2], x: usize, y: usize, pitch: usize| {
            let area = (copy.width, copy.height, 1);
            linear(kind, pointer, (x, y, 0), (pitch, 0), area)
        };
        let c = &copy;
        side(c.from_kind, [c.from_host, c.from_device], c.from_x, c.from_y, c.from_pitch)
            .into_iter()
            .for_each(|(address, bytes)| note(read(COPY, address, bytes)));
        side(c.to_kind, [c.to_host, c.to_device], c.to_x, c.to_y, c.to_pitch)
            .into_iter()
            .for_each(|(address, bytes)| note(written(COPY, address, bytes)));
    }
}

/// `cuMemcpy3D(copy, ...)` and `cuMemcpy3DPeer(copy, ...)`.
pub(crate) fn copy_3d(a: &[usize]) {
    on(a.get(1));
    // SAFETY: the function's signature.
    if let Some(copy) = unsafe { at::<Copy3d>(a[0]) } {
        copy_3d_ranges(&copy).into_iter().for_each(note);
    }
}

/// The linear memory that a copy touches.
pub(super) fn copy_3d_ranges(copy: &Copy3d) -> Vec<Range> {
    let area = (copy.width, copy.height, copy.depth);
    let side = |side: &crate::driver::Copy3dSide| {
        let origin = (side.x, side.y, side.z);
        linear(side.kind, [side.host, side.device], origin, (side.pitch, side.height), area)
    };
    let from = side(&copy.from).map(|(address, bytes)| read(COPY, address, bytes));
    let to = side(&copy.to).map(|(address, bytes)| written(COPY, address, bytes));
    from.into_iter().chain(to).collect()
}

/// Address and bytes from the first to the last byte of a box in linear memory.
fn linear(
    kind: u32,
    [host, device]: [u64; 2],
    (x, y, z): (usize, usize, usize),
    (pitch, rows): (usize, usize),
    (width, height, depth): (usize, usize, usize),
) -> Option<(usize, usize)> {
    let base = match kind {
        MEMORY_DEVICE => device,
        // Unified addresses are given in the device's place.
        MEMORY_UNIFIED if device != 0 => device,
        MEMORY_UNIFIED => host,
        _ => return None,
    };
    if width == 0 || height == 0 || depth == 0 {
        return None;
    }
    let pitch = pitch.max(width);
    let slice = pitch.saturating_mul(rows.max(height));
    let at = |x: usize, y: usize, z: usize| {
        slice.saturating_mul(z).saturating_add(pitch.saturating_mul(y)).saturating_add(x)
    };
    let (first, last) = (at(x, y, z), at(x, y, z).saturating_add(at(width, height - 1, depth - 1)));
    Some(((base as usize).saturating_add(first), last - first))
}

/// `cuMemcpyBatchAsync(to[], from[], bytes[], count, ...)`.
pub(crate) fn copies(a: &[usize]) {
    on(a.last());
    for i in 0..a[3] {
        // SAFETY: three arrays of so many members.
        let one = |array: usize| unsafe { at::<usize>(if array == 0 { 0 } else { array + 8 * i }) };
        let (Some(to), Some(from), Some(bytes)) = (one(a[0]), one(a[1]), one(a[2])) else { return };
        copy(&[to, from, bytes]);
    }
}

/// `cuMemcpy3DBatchAsync(count, list, ...)`.
pub(crate) fn copies_3d(a: &[usize]) {
    on(a.last());
    for i in 0..if a[1] == 0 { 0 } else { a[0] } {
        // SAFETY: a list of so many members.
        let Some(op) = (unsafe { at::<Copy3dOp>(a[1] + i * size_of::<Copy3dOp>()) }) else {
            return;
        };
        copy_of_list(&op);
    }
}

/// `cuMemcpy3DWithAttributesAsync(op, flags, stream)`.
pub(crate) fn copy_3d_op(a: &[usize]) {
    on(a.get(2));
    // SAFETY: the function's signature.
    if let Some(op) = unsafe { at::<Copy3dOp>(a[0]) } {
        copy_of_list(&op);
    }
}

fn copy_of_list(op: &Copy3dOp) {
    // Widths and lengths of rows are in the elements of the array, if there is one.
    let arrays = [&op.from, &op.to].into_iter().filter(|side| side.kind == OPERAND_ARRAY);
    let element = arrays.map(|side| element(side.words[0])).max().unwrap_or(1);
    let side = |operand: &Copy3dOperand| {
        if operand.kind != OPERAND_POINTER {
            return None;
        }
        // Lengths of 0 mean that rows and layers follow each other.
        let [address, row, rows, _] = operand.words;
        let pitch = ((row as usize).saturating_mul(element), rows as usize);
        let area = (op.width.saturating_mul(element), op.height, op.depth);
        linear(MEMORY_DEVICE, [0, address], (0, 0, 0), pitch, area)
    };
    if let Some((address, bytes)) = side(&op.from) {
        note(read(COPY, address, bytes));
    }
    if let Some((address, bytes)) = side(&op.to) {
        note(written(COPY, address, bytes));
    }
}

/// Bytes of an element of an array; the most there can be if the driver does not say.
fn element(array: u64) -> usize {
    let mut descriptor = ArrayDescriptor::default();
    // SAFETY: fills the descriptor of an array that the program uses.
    let mut ask = || unsafe { real::cuArray3DGetDescriptor_v2(&mut descriptor, array) };
    if array != 0 && is_success(ask()) { descriptor.element() } else { LARGEST_ELEMENT }
}

// Fills.

/// `cuMemsetD8(to, value, count)`.
pub(crate) fn fill_8(a: &[usize]) {
    on(a.get(3));
    note(written(FILL, a[0], a[2]));
}

/// `cuMemsetD16(to, value, count)`.
pub(crate) fn fill_16(a: &[usize]) {
    on(a.get(3));
    note(written(FILL, a[0], a[2].saturating_mul(2)));
}

/// `cuMemsetD32(to, value, count)`.
pub(crate) fn fill_32(a: &[usize]) {
    on(a.get(3));
    note(written(FILL, a[0], a[2].saturating_mul(4)));
}

/// `cuMemsetD2D8(to, pitch, value, width, height)`.
pub(crate) fn fill_2d_8(a: &[usize]) {
    on(a.get(5));
    note(fill_range(a[0], a[1], a[3], a[4]));
}

/// `cuMemsetD2D16(to, pitch, value, width, height)`.
pub(crate) fn fill_2d_16(a: &[usize]) {
    on(a.get(5));
    note(fill_range(a[0], a[1], a[3].saturating_mul(2), a[4]));
}

/// `cuMemsetD2D32(to, pitch, value, width, height)`.
pub(crate) fn fill_2d_32(a: &[usize]) {
    on(a.get(5));
    note(fill_range(a[0], a[1], a[3].saturating_mul(4), a[4]));
}

/// The range of a fill of `height` rows of `width` bytes.
pub(super) fn fill_range(to: usize, pitch: usize, width: usize, height: usize) -> Range {
    let rows = pitch.max(width).saturating_mul(height.saturating_sub(1));
    let bytes = if height == 0 || width == 0 { 0 } else { rows.saturating_add(width) };
    written(FILL, to, bytes)
}

// The rest.

/// `cuStreamWaitValue32(stream, address, ...)`.
pub(crate) fn wait_32(a: &[usize]) {
    on(a.first());
    note(read(VALUE, a[1], 4));
}

/// `cuStreamWaitValue64(stream, address, ...)`.
pub(crate) fn wait_64(a: &[usize]) {
    on(a.first());
    note(read(VALUE, a[1], 8));
}

/// `cuStreamWriteValue32(stream, address, ...)`.
pub(crate) fn write_32(a: &[usize]) {
    on(a.first());
    note(written(VALUE, a[1], 4));
}

/// `cuStreamWriteValue64(stream, address, ...)`.
pub(crate) fn write_64(a: &[usize]) {
    on(a.first());
    note(written(VALUE, a[1], 8));
}

/// `cuStreamBatchMemOp(stream, count, list, flags)`.
pub(crate) fn memory_ops(a: &[usize]) {
    on(a.first());
    // SAFETY: a list of so many members.
    unsafe { memory_op_ranges(a[1] as u32, a[2]) }.into_iter().for_each(note);
}

/// What a list of memory operations touches.
///
/// # Safety
/// The list is null or has so many members.
pub(super) unsafe fn memory_op_ranges(count: u32, list: usize) -> Vec<Range> {
    let count = if list == 0 { 0 } else { count as usize };
    let op = |i: usize| {
        // SAFETY: the caller's duty.
        let op = unsafe { at::<MemoryOp>(list + i * size_of::<MemoryOp>()) }?;
        let address = op.address as usize;
        match op.operation {
            WAIT_32 => Some(read(VALUE, address, 4)),
            WAIT_64 => Some(read(VALUE, address, 8)),
            WRITE_32 => Some(written(VALUE, address, 4)),
            WRITE_64 => Some(written(VALUE, address, 8)),
            // Which operation and of what type comes before the address.
            ATOMIC_REDUCTION => Some(written(VALUE, op.rest[0] as usize, 8)),
            _ => None,
        }
    };
    (0..count).filter_map(op).collect()
}

/// `cuMemDiscardBatchAsync(addresses[], bytes[], count, ...)`.
pub(crate) fn discard(a: &[usize]) {
    on(a.last());
    for i in 0..a[2] {
        // SAFETY: two arrays of so many members.
        let one = |array: usize| unsafe { at::<usize>(if array == 0 { 0 } else { array + 8 * i }) };
        let (Some(address), Some(bytes)) = (one(a[0]), one(a[1])) else { return };
        note(written(Operation::Discard {}, address, bytes));
    }
}

/// `cuMemBatchDecompressAsync(list, count, ...)`.
pub(crate) fn decompress(a: &[usize]) {
    on(a.last());
    const DECOMPRESS: Operation = Operation::Decompress {};
    for i in 0..if a[0] == 0 { 0 } else { a[1] } {
        // SAFETY: a list of so many members.
        let op = unsafe { at::<DecompressParams>(a[0] + i * size_of::<DecompressParams>()) };
        let Some(op) = op else { return };
        note(read(DECOMPRESS, op.from as usize, op.from_bytes));
        note(written(DECOMPRESS, op.to as usize, op.to_bytes));
        note(written(DECOMPRESS, op.actual_bytes as usize, 4));
    }
}

// After a call that has succeeded, whether anything is recorded or not.

/// Reads what the driver has just written where an argument points.
fn result(place: usize) -> u64 {
    // SAFETY: the functions below write a handle there.
    unsafe { at(place) }.unwrap_or(0)
}

/// `cuModuleLoadData(module, image)`, `cuLibraryLoadData(library, image, ...)`.
pub(crate) fn image_loaded(a: &[usize]) {
    // SAFETY: the driver has loaded it.
    unsafe { images::loaded(result(a[0]), a[1]) };
}

/// `cuModuleLoad(module, path)`, `cuLibraryLoadFromFile(library, path, ...)`.
pub(crate) fn file_loaded(a: &[usize]) {
    // SAFETY: the driver has loaded it.
    unsafe { images::loaded_from_file(result(a[0]), a[1]) };
}

/// `cuKernelGetFunction(function, kernel)`.
pub(crate) fn function_of_kernel(a: &[usize]) {
    images::function_of_kernel(result(a[0]), a[1] as u64);
}

/// `cuLibraryGetModule(module, library)`.
pub(crate) fn module_of_library(a: &[usize]) {
    images::module_of_library(result(a[0]), a[1] as u64);
}

/// `cuGraphInstantiate(exec, graph, ...)`.
pub(crate) fn graph_made(a: &[usize]) {
    graphs::made(result(a[0]), a[1] as u64);
}

/// `cuGraphExecUpdate(exec, graph, ...)`.
pub(crate) fn graph_updated(a: &[usize]) {
    graphs::made(a[0] as u64, a[1] as u64);
}

/// `cuGraphExecKernelNodeSetParams(exec, node, params)`, both versions.
pub(crate) fn kernel_node_set(a: &[usize]) {
    graphs::set(a[0] as u64, a[1] as u64, graphs::Given::KernelV1(a[2]));
}

/// The second version, whose parameters may name a `CUkernel`.
pub(crate) fn kernel_node_set_v2(a: &[usize]) {
    graphs::set(a[0] as u64, a[1] as u64, graphs::Given::Kernel(a[2]));
}

/// `cuGraphExecMemcpyNodeSetParams(exec, node, params, context)`.
pub(crate) fn copy_node_set(a: &[usize]) {
    graphs::set(a[0] as u64, a[1] as u64, graphs::Given::Copy(a[2]));
}

/// `cuGraphExecMemsetNodeSetParams(exec, node, params, context)`.
pub(crate) fn fill_node_set(a: &[usize]) {
    graphs::set(a[0] as u64, a[1] as u64, graphs::Given::Fill(a[2]));
}

/// `cuGraphExecBatchMemOpNodeSetParams(exec, node, params)`.
pub(crate) fn memory_ops_node_set(a: &[usize]) {
    graphs::set(a[0] as u64, a[1] as u64, graphs::Given::MemoryOps(a[2]));
}

/// `cuGraphExecChildGraphNodeSetParams(exec, node, graph)`.
pub(crate) fn child_node_set(a: &[usize]) {
    graphs::set(a[0] as u64, a[1] as u64, graphs::Given::Child(a[2] as u64));
}

/// `cuGraphExecNodeSetParams(exec, node, params)`.
pub(crate) fn node_set(a: &[usize]) {
    // SAFETY: the function's signature: the kind, and from byte 16 on parameters of that kind.
    let Some(kind) = (unsafe { at::<u32>(a[2]) }) else { return };
    let params = a[2] + 16;
    let given = match kind {
        graphs::KERNEL => graphs::Given::Kernel(params),
        // Flags, a reserved word and a context come first.
        graphs::COPY => graphs::Given::Copy(params + 16),
        graphs::FILL => graphs::Given::Fill(params),
        graphs::CHILD => graphs::Given::Child(result(params)),
        graphs::MEMORY_OPS => graphs::Given::MemoryOps(params),
        _ => return,
    };
    graphs::set(a[0] as u64, a[1] as u64, given);
}

/// Whether a call has done what it was asked for.
pub(super) fn is_success(code: u32) -> bool {
    code == SUCCESS
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_size_that_no_kernel_has_is_not_believed() {
        let arguments = vec![1_u64; LARGEST_BUFFER / 8];
        let size = usize::MAX;
        let extra: [*const c_void; 5] = [
            BUFFER_POINTER as _,
            arguments.as_ptr().cast(),
            BUFFER_SIZE as _,
            (&raw const size).cast(),
            std::ptr::null(),
        ];
        let mut noted = 0;
        // SAFETY: a list of names and values.
        unsafe {
            words(&Kernel::default(), std::ptr::null(), extra.as_ptr(), &mut |_, _| noted += 1);
        }
        assert_eq!(noted, arguments.len());
    }
}
