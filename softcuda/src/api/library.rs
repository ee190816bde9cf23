//! Libraries and kernels.

use std::ffi::c_char;
use std::sync::Arc;

use super::arguments::{Address, In, Out, Text};
use super::driver_api;
use super::function::{attribute, parameter, set_attribute};
use super::module::{Options, image, image_in_file, likely_device, parse};
use crate::context;
use crate::fatbin;
use crate::modules::{self, FUNCTIONS, KERNELS, Kernel, LIBRARIES, Library};
use crate::status::{Code, Outcome};

fn find(handle: u64) -> Outcome<Arc<Library>> {
    LIBRARIES.get(handle).ok_or(Code::INVALID_HANDLE)
}

fn find_kernel(handle: u64) -> Outcome<Arc<Kernel>> {
    KERNELS.get(handle).ok_or(Code::INVALID_HANDLE)
}

/// As on a GPU (driver 580.159.04), text that is no PTX is loaded as well: what asks for anything of it fails.
fn load(out: &Out<u64>, image: &[u8], options: Option<&Options>) -> Outcome {
    out.check()?;
    let code = match parse(image, likely_device(), options) {
        Err(code) if code != Code::INVALID_PTX || image.starts_with(&fatbin::MAGIC) => {
            return Err(code);
        }
        other => other,
    };
    out.set(modules::make_library(code)?.handle)
}

driver_api! {
    call fn cuLibraryLoadData(
        out: Out<u64>, code: Address, names: In<u32>, values: Out<u64>, count: u32,
        _library_options: Address, _library_values: Address, _library_count: u32,
    ) {
        load(&out, &image(code)?, Some(&Options { count, names, values }))
    }

    call fn cuLibraryLoadFromFile(
        out: Out<u64>, path: Text, names: In<u32>, values: Out<u64>, count: u32,
        _library_options: Address, _library_values: Address, _library_count: u32,
    ) {
        let image = image_in_file(path.get()?)?;
        load(&out, &image, Some(&Options { count, names, values }))
    }

    call fn cuLibraryUnload(handle: u64) {
        let library = find(handle)?;
        context::wait_everything();
        modules::unload_library(&library);
        Ok(())
    }

    call fn cuLibraryGetKernel(out: Out<u64>, handle: u64, name: Text) {
        out.set(find(handle)?.kernel(name.get()?)?)
    }

    call fn cuLibraryGetKernelCount(out: Out<u32>, handle: u64) {
        out.set(find(handle)?.kernels()?.len() as u32)
    }

    call fn cuLibraryEnumerateKernels(out: Out<u64>, count: u32, handle: u64) {
        out.set_all(find(handle)?.kernels()?.iter().copied().take(count as usize))
    }

    call fn cuLibraryGetModule(out: Out<u64>, handle: u64) {
        let context = context::current()?;
        out.set(find(handle)?.module(&context)?.handle)
    }

    call fn cuLibraryGetGlobal(out: Out<u64>, bytes: Out<usize>, handle: u64, name: Text) {
        let context = context::current()?;
        let (address, size) = find(handle)?.module(&context)?.global(name.get()?)?;
        out.set_if_wanted(address);
        bytes.set_if_wanted(size);
        Ok(())
    }

    call fn cuLibraryGetManaged(out: Out<u64>, bytes: Out<usize>, handle: u64, name: Text) {
        let (address, size) = find(handle)?.managed_variable(name.get()?)?;
        out.set_if_wanted(address);
        bytes.set_if_wanted(size);
        Ok(())
    }

    call fn cuLibraryGetUnifiedFunction(_out: Out<u64>, handle: u64, name: Text) {
        // There is none without the device attribute for them.
        find(handle)?;
        name.get()?;
        Err(Code::NOT_FOUND)
    }

    call fn cuKernelGetFunction(out: Out<u64>, handle: u64) {
        find_kernel(handle)?;
        out.set(modules::function(handle, &*context::current()?)?.handle)
    }

    call fn cuKernelGetLibrary(out: Out<u64>, handle: u64) {
        out.set(find_kernel(handle)?.library)
    }

    call fn cuKernelGetName(out: Out<*const c_char>, handle: u64) {
        if handle == 0 {
            return Err(Code::INVALID_VALUE);
        }
        if let Some(kernel) = KERNELS.get(handle) {
            return out.set(kernel.name.as_ptr());
        }
        let function = FUNCTIONS.get(handle).ok_or(Code::INVALID_HANDLE)?;
        out.set(function.name.as_ptr())
    }

    call fn cuKernelGetParamInfo(
        handle: u64, index: usize, offset: Out<usize>, size: Out<usize>,
    ) {
        context::current()?;
        parameter(&find_kernel(handle)?.entry, index, &offset, &size)
    }

    call fn cuKernelGetParamCount(handle: u64, count: Out<usize>) {
        crate::settings::settings().driver.since(13_020)?;
        count.set(find_kernel(handle)?.entry.params.len())
    }

    call fn cuKernelGetAttribute(out: Out<i32>, number: u32, handle: u64, ordinal: i32) {
        crate::settings::device(ordinal)?;
        find_kernel(handle)?;
        out.set(attribute(&*modules::function(handle, &*context::current()?)?, number)?)
    }

    call fn cuKernelSetAttribute(number: u32, value: i32, handle: u64, ordinal: i32) {
        crate::settings::device(ordinal)?;
        find_kernel(handle)?;
        set_attribute(&*modules::function(handle, &*context::current()?)?, number, value)
    }

    call fn cuKernelSetCacheConfig(handle: u64, config: u32, ordinal: i32) {
        crate::settings::device(ordinal)?;
        find_kernel(handle)?;
        if config > 3 { Err(Code::INVALID_VALUE) } else { Ok(()) }
    }
}
