//! Functions.

use std::ffi::c_char;
use std::sync::Arc;
use std::sync::atomic::Ordering;

use super::arguments::Out;
use super::driver_api;
use crate::context;
use crate::models;
use crate::modules::{self, Function};
use crate::ptx::Entry;
use crate::settings::settings;
use crate::status::{Code, Outcome};

/// The function of a handle, which may also be a kernel's.
pub(crate) fn find(handle: u64) -> Outcome<Arc<Function>> {
    modules::function(handle, &*context::current()?)
}

/// An attribute by its number in the API.
pub(crate) fn attribute(function: &Function, number: u32) -> Outcome<i32> {
    let entry = &function.entry;
    Ok(match number {
        0 => function.max_threads() as i32,
        1 => entry.static_shared as i32,
        2 => {
            let constants = function.code.globals.iter().filter(|global| global.constant);
            constants.map(|global| global.size).sum::<usize>() as i32
        }
        3 => entry.local_bytes as i32,
        4 => entry.registers as i32,
        // CUB chooses what it launches by the version of the PTX, of which a program may have another than the device.
        5 => models::number(&function.code.target).unwrap_or_else(|| function.model().target())
            as i32,
        6 => function.model().target() as i32,
        8 => function.dynamic_shared_limit() as i32,
        9 => function.settings.carveout.load(Ordering::Relaxed),
        10 => function.entry.cluster.is_some().into(),
        11..=13 => function.entry.cluster.map_or(0, |shape| shape[number as usize - 11] as i32),
        14 => function.settings.large_clusters.load(Ordering::Relaxed).into(),
        7 | 15 => 0,
        _ => return Err(Code::INVALID_VALUE),
    })
}

/// Sets an attribute by its number in the API.
pub(crate) fn set_attribute(function: &Function, number: u32, value: i32) -> Outcome {
    match number {
        8 => {
            let wanted = usize::try_from(value).map_err(|_| Code::INVALID_VALUE)?;
            if wanted + function.entry.static_shared > function.model().generation.shared_of_block {
                return Err(Code::INVALID_VALUE);
            }
            function.settings.dynamic_shared.store(value, Ordering::Relaxed);
            Ok(())
        }
        9 if (-1..=100).contains(&value) => {
            function.settings.carveout.store(value, Ordering::Relaxed);
            Ok(())
        }
        14 if function.has_clusters() && matches!(value, 0 | 1) => {
            function.settings.large_clusters.store(value != 0, Ordering::Relaxed);
            Ok(())
        }
        // Other settings of clusters.
        10..=15 => Err(Code::NOT_SUPPORTED),
        _ => Err(Code::INVALID_VALUE),
    }
}

/// Place of a parameter in the parameter buffer.
pub(crate) fn parameter(
    entry: &Entry,
    index: usize,
    offset: &Out<usize>,
    size: &Out<usize>,
) -> Outcome {
    let parameter = entry.params.get(index).ok_or(Code::INVALID_VALUE)?;
    offset.set(parameter.offset)?;
    size.set_if_wanted(parameter.size);
    Ok(())
}

driver_api! {
    call fn cuFuncGetAttribute(out: Out<i32>, number: u32, handle: u64) {
        out.set(attribute(&*find(handle)?, number)?)
    }

    call fn cuFuncSetAttribute(handle: u64, number: u32, value: i32) {
        set_attribute(&*find(handle)?, number, value)
    }

    call fn cuFuncGetParamInfo(handle: u64, index: usize, offset: Out<usize>, size: Out<usize>) {
        parameter(&find(handle)?.entry, index, &offset, &size)
    }

    call fn cuFuncGetParamCount(handle: u64, count: Out<usize>) {
        settings().driver.since(13_020)?;
        count.set(find(handle)?.entry.params.len())
    }

    call fn cuFuncGetName(out: Out<*const c_char>, handle: u64) {
        if handle == 0 {
            return Err(Code::INVALID_VALUE);
        }
        out.set(find(handle)?.name.as_ptr())
    }

    call fn cuFuncGetModule(out: Out<u64>, handle: u64) {
        out.set(find(handle)?.module)
    }

    call fn cuFuncSetCacheConfig(handle: u64, config: u32) {
        find(handle)?;
        if config > 3 { Err(Code::INVALID_VALUE) } else { Ok(()) }
    }

    call fn cuFuncSetSharedMemConfig(handle: u64, config: u32) {
        find(handle)?;
        if config > 2 { Err(Code::INVALID_VALUE) } else { Ok(()) }
    }

    call fn cuFuncIsLoaded(out: Out<u32>, handle: u64) {
        find(handle)?;
        out.set(1)
    }

    call fn cuFuncLoad(handle: u64) {
        find(handle)?;
        Ok(())
    }
}
