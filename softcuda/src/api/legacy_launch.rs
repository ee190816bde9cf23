//! Launches of the first versions of CUDA: block shape, shared memory and parameters are set in the
//! function, one by one, before it is launched.

use std::sync::Arc;

use super::arguments::{Address, read_bytes};
use super::driver_api;
use crate::capture;
use crate::context;
use crate::kernel_launch::KernelLaunch;
use crate::modules::{FUNCTIONS, Function, LegacySettings};
use crate::operations::Operation;
use crate::shapes::{self, Shape};
use crate::status::{Code, Outcome};
use crate::submission::{DefaultStream, stream_and_context};

/// The parameters of a kernel have at most so many bytes.
const MOST: usize = 32_764;

/// The function of a handle; kernels of libraries are none here.
fn find(handle: u64) -> Outcome<Arc<Function>> {
    context::current()?;
    FUNCTIONS.get(handle).ok_or(Code::INVALID_HANDLE)
}

fn set_parameter(handle: u64, offset: i32, value: &[u8]) -> Outcome {
    let function = find(handle)?;
    let start = usize::try_from(offset).map_err(|_| Code::INVALID_VALUE)?;
    let end = start.checked_add(value.len()).filter(|end| *end <= MOST);
    let end = end.ok_or(Code::INVALID_VALUE)?;
    let mut settings = function.settings.legacy.lock();
    if settings.parameters.len() < end {
        settings.parameters.resize(end, 0);
    }
    settings.parameters[start..end].copy_from_slice(value);
    Ok(())
}

/// Launches with what was set. What was not is zero, and the block one thread.
fn launch(handle: u64, width: i32, height: i32, stream: u64) -> Outcome {
    let (stream, context) = stream_and_context(stream, DefaultStream::Legacy)?;
    let function = FUNCTIONS.get(handle).ok_or(Code::INVALID_HANDLE)?;
    if !context.has(function.context) {
        return Err(Code::INVALID_CONTEXT);
    }
    // These launches cannot be captured, whatever their stream.
    capture::refuse_unsafe()?;
    capture::refuse(&context, &stream)?;
    let size = |size: i32| u32::try_from(size).map_err(|_| Code::INVALID_VALUE);
    let grid = [size(width)?, size(height)?, 1];
    let settings = function.settings.legacy.lock().clone();
    let LegacySettings { block, shared, size, parameters: given } = settings;
    let shape = Shape { grid, block, shared, cooperative: false, cluster: None };
    shapes::check(&function, &shape)?;
    let mut parameters = vec![0; function.entry.param_bytes];
    if size > parameters.len() {
        return Err(Code::LAUNCH_OUT_OF_RESOURCES);
    }
    let known = size.min(given.len());
    parameters[..known].copy_from_slice(&given[..known]);
    let launch = KernelLaunch::new(function, shape, parameters);
    context.prints.flush();
    context.enqueue(&stream, Operation::Kernel(Arc::new(launch))).map(|_| ())
}

driver_api! {
    call fn cuFuncSetBlockShape(handle: u64, x: i32, y: i32, z: i32) {
        let function = find(handle)?;
        let size = |size: i32| u32::try_from(size).map_err(|_| Code::INVALID_VALUE);
        let block = [size(x)?, size(y)?, size(z)?];
        if !shapes::is_block(block) {
            return Err(Code::INVALID_VALUE);
        }
        function.settings.legacy.lock().block = block;
        Ok(())
    }

    call fn cuFuncSetSharedSize(handle: u64, bytes: u32) {
        let function = find(handle)?;
        if bytes as usize > function.dynamic_shared_limit() {
            return Err(Code::INVALID_VALUE);
        }
        function.settings.legacy.lock().shared = bytes;
        Ok(())
    }

    call fn cuParamSetSize(handle: u64, bytes: u32) {
        let function = find(handle)?;
        if bytes as usize > MOST {
            return Err(Code::INVALID_VALUE);
        }
        function.settings.legacy.lock().size = bytes as usize;
        Ok(())
    }

    call fn cuParamSeti(handle: u64, offset: i32, value: u32) {
        set_parameter(handle, offset, &value.to_ne_bytes())
    }

    call fn cuParamSetf(handle: u64, offset: i32, value: f32) {
        set_parameter(handle, offset, &value.to_ne_bytes())
    }

    call fn cuParamSetv(handle: u64, offset: i32, value: Address, bytes: u32) {
        let bytes = bytes as usize;
        if bytes > MOST || value.0 == 0 && bytes != 0 {
            return Err(Code::INVALID_VALUE);
        }
        let value = match bytes {
            0 => Vec::new(),
            // SAFETY: not null, so the caller promises as many bytes as it says.
            bytes => unsafe { read_bytes(value.0 as *const u8, bytes) },
        };
        set_parameter(handle, offset, &value)
    }

    call fn cuLaunch(handle: u64) {
        launch(handle, 1, 1, 0)
    }

    call fn cuLaunchGrid(handle: u64, width: i32, height: i32) {
        launch(handle, width, height, 0)
    }

    call fn cuLaunchGridAsync(handle: u64, width: i32, height: i32, stream: u64) {
        launch(handle, width, height, stream)
    }
}
