//! Kernel launches.

use std::sync::Arc;

use cudarc::driver::sys;

use super::arguments::In;
use super::driver_api;
use super::launch_config::Config;
use crate::capture;
use crate::context::Context;
use crate::kernel_launch::KernelLaunch;
use crate::modules::{self, Function};
use crate::operations::Operation;
use crate::shapes::{Shape, check};
use crate::status::{Code, Outcome};
use crate::streams::{Position, Stream};
use crate::submission::{DefaultStream, is_default_stream, stream_and_context};

/// `CU_LAUNCH_PARAM_END`, `_BUFFER_POINTER`, `_BUFFER_SIZE`.
const PARAMETERS_END: u64 = 0;
const PARAMETERS_POINTER: u64 = 1;
const PARAMETERS_SIZE: u64 = 2;

/// `CUDA_COOPERATIVE_LAUNCH_MULTI_DEVICE_NO_PRE_LAUNCH_SYNC` and `_NO_POST_LAUNCH_SYNC`.
const NO_WAIT_BEFORE: u32 = 1;
const NO_WAIT_AFTER: u32 = 2;

/// `CUDA_LAUNCH_PARAMS` with plain types.
#[repr(C)]
#[derive(Clone, Copy)]
struct OnDevice {
    function: u64,
    grid: [u32; 3],
    block: [u32; 3],
    shared: u32,
    stream: u64,
    each: u64,
}

const _: () = assert!(size_of::<OnDevice>() == size_of::<sys::CUDA_LAUNCH_PARAMS>());

/// Copies the parameters, from pointers to each or from one buffer.
fn parameters(function: &Function, each: &In<u64>, extra: &In<u64>) -> Outcome<Vec<u8>> {
    let entry = &function.entry;
    let mut buffer = vec![0; entry.param_bytes];
    if !each.is_null() {
        for (index, parameter) in entry.params.iter().enumerate() {
            let from = each.at(index)?;
            if from == 0 {
                return Err(Code::INVALID_VALUE);
            }
            let to = buffer
                .get_mut(parameter.offset..parameter.offset + parameter.size)
                .ok_or(Code::INVALID_IMAGE)?;
            // SAFETY: the caller promises, for each parameter, a pointer to a value of its size.
            let value = unsafe { super::arguments::read_bytes(from as *const u8, parameter.size) };
            to.copy_from_slice(&value);
        }
        return Ok(buffer);
    }
    if extra.is_null() {
        return if entry.params.is_empty() { Ok(buffer) } else { Err(Code::INVALID_VALUE) };
    }
    let (mut pointer, mut size) = (0, 0);
    for pair in 0.. {
        match extra.at(2 * pair)? {
            PARAMETERS_END => break,
            PARAMETERS_POINTER => pointer = extra.at(2 * pair + 1)?,
            PARAMETERS_SIZE => {
                let at = extra.at(2 * pair + 1)?;
                if at == 0 {
                    return Err(Code::INVALID_VALUE);
                }
                // SAFETY: the caller promises a pointer to the size of its buffer.
                size = unsafe { (at as *const usize).read_unaligned() };
            }
            _ => return Err(Code::INVALID_VALUE),
        }
    }
    if pointer == 0 && size != 0 || size < entry.param_bytes {
        return Err(Code::INVALID_VALUE);
    }
    if pointer != 0 && !buffer.is_empty() {
        // SAFETY: the caller promises a buffer of `size` bytes, which are enough.
        buffer = unsafe { super::arguments::read_bytes(pointer as *const u8, buffer.len()) };
    }
    Ok(buffer)
}

/// Checks a launch and copies its parameters.
pub(super) fn prepare(
    function: Arc<Function>,
    shape: Shape,
    each: &In<u64>,
    extra: &In<u64>,
) -> Outcome<KernelLaunch> {
    check(&function, &shape)?;
    let parameters = parameters(&function, each, extra)?;
    Ok(KernelLaunch::new(function, shape, parameters))
}

fn launch(
    mode: DefaultStream,
    handle: u64,
    shape: Shape,
    stream: u64,
    each: &In<u64>,
    extra: &In<u64>,
) -> Outcome {
    let (stream, context) = stream_and_context(stream, mode)?;
    let function = modules::function(handle, &context)?;
    if !context.has(function.context) {
        return Err(Code::INVALID_CONTEXT);
    }
    let launch = Arc::new(prepare(function, shape, each, extra)?);
    context.prints.flush();
    context.enqueue(&stream, Operation::Kernel(launch)).map(|_| ())
}

/// A kernel on one of several devices.
struct Part {
    stream: Arc<Stream>,
    context: Arc<Context>,
    launch: Arc<KernelLaunch>,
}

/// Checks a launch of one kernel on several devices.
fn parts(list: &In<OnDevice>, count: u32) -> Outcome<Vec<Part>> {
    if count == 0 {
        return Err(Code::INVALID_VALUE);
    }
    let mut parts: Vec<Part> = Vec::new();
    for index in 0..count as usize {
        let OnDevice { function, grid, block, shared, stream, each } = list.at(index)?;
        if is_default_stream(stream) {
            return Err(Code::INVALID_VALUE);
        }
        let (stream, context) = stream_and_context(stream, DefaultStream::Legacy)?;
        let function = modules::function(function, &context)?;
        if !context.has(function.context) {
            return Err(Code::INVALID_CONTEXT);
        }
        let shape = Shape { grid, block, shared, cooperative: true, cluster: None };
        let differs =
            |one: &Part| one.launch.shape != shape || one.launch.function.name != function.name;
        if parts.iter().any(|one| differs(one) || one.context.device == context.device) {
            return Err(Code::INVALID_VALUE);
        }
        capture::refuse(&context, &stream)?;
        let launch = prepare(function, shape, &In::at_address(each), &In::null())?;
        parts.push(Part { stream, context, launch: Arc::new(launch) });
    }
    Ok(parts)
}

/// Lets each stream wait for all.
fn wait_for_each_other(parts: &[Part]) -> Outcome {
    let all: Vec<Position> = parts.iter().map(|part| part.stream.last()).collect();
    parts.iter().try_for_each(|part| {
        part.context.submit(&part.stream, all.clone(), || ())?;
        Ok(())
    })
}

/// What the launch attributes ask for.
fn read_attributes(config: &Config) -> Outcome<(bool, Option<[u32; 3]>)> {
    let (mut cooperative, mut cluster) = (false, None);
    for attribute in config.attributes()? {
        let three = attribute.three();
        match attribute.id {
            // Hints: L2 window, waiting, priority, memory domains, carve-out; and overlap with the
            // kernel before, which may also not happen.
            0 | 1 | 3 | 5 | 6 | 8 | 9 | 10 | 14 | 16 => {}
            2 => cooperative = three[0] != 0,
            // A cluster of one block is no cluster, and one of no blocks is none that was asked for.
            4 | 11 if three.iter().all(|n| *n <= 1) => {}
            4 => cluster = Some(three),
            7 | 11..=13 => return Err(Code::NOT_SUPPORTED),
            _ => return Err(Code::INVALID_VALUE),
        }
    }
    Ok((cooperative, cluster))
}

driver_api! {
    stream(mode) fn cuLaunchKernel, cuLaunchKernel_ptsz(
        function: u64, grid_x: u32, grid_y: u32, grid_z: u32, block_x: u32, block_y: u32,
        block_z: u32, shared: u32, stream: u64, each: In<u64>, extra: In<u64>,
    ) {
        let (grid, block) = ([grid_x, grid_y, grid_z], [block_x, block_y, block_z]);
        let shape = Shape { grid, block, shared, cooperative: false, cluster: None };
        launch(mode, function, shape, stream, &each, &extra)
    }

    stream(mode) fn cuLaunchCooperativeKernel, cuLaunchCooperativeKernel_ptsz(
        function: u64, grid_x: u32, grid_y: u32, grid_z: u32, block_x: u32, block_y: u32,
        block_z: u32, shared: u32, stream: u64, each: In<u64>,
    ) {
        let (grid, block) = ([grid_x, grid_y, grid_z], [block_x, block_y, block_z]);
        let shape = Shape { grid, block, shared, cooperative: true, cluster: None };
        launch(mode, function, shape, stream, &each, &In::null())
    }

    stream(mode) fn cuLaunchKernelEx, cuLaunchKernelEx_ptsz(
        config: In<Config>, function: u64, each: In<u64>, extra: In<u64>,
    ) {
        let config = config.get()?;
        let (cooperative, cluster) = read_attributes(&config)?;
        let Config { grid, block, shared, stream, .. } = config;
        let shape = Shape { grid, block, shared, cooperative, cluster };
        launch(mode, function, shape, stream, &each, &extra)
    }

    call fn cuLaunchCooperativeKernelMultiDevice(list: In<OnDevice>, count: u32, flags: u32) {
        if flags & !(NO_WAIT_BEFORE | NO_WAIT_AFTER) != 0 {
            return Err(Code::INVALID_VALUE);
        }
        let parts = parts(&list, count)?;
        if flags & NO_WAIT_BEFORE == 0 {
            wait_for_each_other(&parts)?;
        }
        for Part { stream, context, launch } in &parts {
            context.enqueue(stream, Operation::Kernel(launch.clone()))?;
        }
        if flags & NO_WAIT_AFTER == 0 {
            wait_for_each_other(&parts)?;
        }
        Ok(())
    }
}
