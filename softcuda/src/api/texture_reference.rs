//! Texture references: variables of modules that stand for textures.

use std::sync::Arc;

use super::arguments::{In, Out, Text};
use super::array::PlainDescriptor;
use super::driver_api;
use super::module;
use crate::arrays::{ARRAYS, MIPMAPPED};
use crate::context;
use crate::handles::new_handle;
use crate::modules::FUNCTIONS;
use crate::status::{Code, Outcome};
use crate::textures::{
    ALIGNMENT, ReferenceState, Resource, TEXTURE_REFERENCES, TextureReference, check_element,
};

/// `CU_TRSA_OVERRIDE_FORMAT`: the format is that of the array.
const OVERRIDE_FORMAT: u32 = 1;
/// `CU_PARAM_TR_DEFAULT`: the place of a texture reference among the parameters.
const DEFAULT_UNIT: i32 = -1;

fn find(handle: u64) -> Outcome<Arc<TextureReference>> {
    context::current()?;
    TEXTURE_REFERENCES.get(handle).ok_or(Code::INVALID_VALUE)
}

fn get<T>(out: &Out<T>, handle: u64, read: impl FnOnce(&ReferenceState) -> T) -> Outcome {
    out.set(read(&find(handle)?.state.lock()))
}

fn set(handle: u64, write: impl FnOnce(&mut ReferenceState)) -> Outcome {
    write(&mut find(handle)?.state.lock());
    Ok(())
}

/// Sets one of a few numbers.
fn set_one(handle: u64, value: u32, most: u32, at: fn(&mut ReferenceState) -> &mut u32) -> Outcome {
    if value > most {
        return Err(Code::INVALID_VALUE);
    }
    set(handle, |state| *at(state) = value)
}

fn set_rows(handle: u64, given: &In<PlainDescriptor>, address: u64, pitch: usize) -> Outcome {
    let PlainDescriptor { width, height, format, channels } = given.get()?;
    let resource = Resource::Rows { address, format, channels, size: [width, height], pitch };
    resource.check()?;
    set(handle, |state| {
        (state.resource, state.format, state.channels) = (Some(resource), format, channels);
    })
}

/// Binds plain memory; what the address has beyond its alignment is given to the program to add.
fn set_address(offset: &Out<usize>, handle: u64, address: u64, size: usize) -> Outcome {
    let reference = find(handle)?;
    let mut state = reference.state.lock();
    let beyond = address % ALIGNMENT;
    if beyond != 0 && offset.check().is_err() {
        return Err(Code::INVALID_VALUE);
    }
    let size = size.checked_add(beyond as usize).ok_or(Code::INVALID_VALUE)?;
    let (format, channels) = (state.format, state.channels);
    let resource = Resource::Linear { address: address - beyond, format, channels, size };
    resource.check()?;
    state.resource = Some(resource);
    offset.set_if_wanted(beyond as usize);
    Ok(())
}

driver_api! {
    call fn cuModuleGetTexRef(out: Out<u64>, handle: u64, name: Text) {
        context::current()?;
        let found = module::find(handle)?.reference(name.get()?)?;
        TEXTURE_REFERENCES.get(found).ok_or(Code::NOT_FOUND)?;
        out.set(found)
    }

    call fn cuTexRefCreate(out: Out<u64>) {
        out.check()?;
        let context = context::current()?.handle;
        let handle = new_handle();
        let reference = TextureReference { context, address: 0, state: Default::default() };
        TEXTURE_REFERENCES.insert(handle, Arc::new(reference));
        out.set(handle)
    }

    call fn cuTexRefDestroy(handle: u64) {
        // Those of modules end with them.
        if find(handle)?.address != 0 {
            return Err(Code::INVALID_VALUE);
        }
        TEXTURE_REFERENCES.remove(handle);
        Ok(())
    }

    call fn cuParamSetTexRef(function: u64, unit: i32, handle: u64) {
        find(handle)?;
        FUNCTIONS.get(function).ok_or(Code::INVALID_HANDLE)?;
        if unit == DEFAULT_UNIT { Ok(()) } else { Err(Code::INVALID_VALUE) }
    }

    call fn cuTexRefSetArray(handle: u64, array: u64, flags: u32) {
        let descriptor = ARRAYS.get(array).ok_or(Code::INVALID_VALUE)?.descriptor;
        if flags != OVERRIDE_FORMAT {
            return Err(Code::INVALID_VALUE);
        }
        set(handle, |state| {
            state.resource = Some(Resource::Array(array));
            (state.format, state.channels) = (descriptor.format, descriptor.channels);
        })
    }

    call fn cuTexRefSetMipmappedArray(handle: u64, array: u64, flags: u32) {
        MIPMAPPED.get(array).ok_or(Code::INVALID_VALUE)?;
        if flags != OVERRIDE_FORMAT {
            return Err(Code::INVALID_VALUE);
        }
        set(handle, |state| state.resource = Some(Resource::Mipmapped(array)))
    }

    call fn cuTexRefSetAddress_v2(offset: Out<usize>, handle: u64, address: u64, size: usize) {
        set_address(&offset, handle, address, size)
    }

    call fn cuTexRefSetAddress2D_v2(
        handle: u64, given: In<PlainDescriptor>, address: u64, pitch: usize,
    ) {
        set_rows(handle, &given, address, pitch)
    }

    call fn cuTexRefSetAddress2D_v3(
        handle: u64, given: In<PlainDescriptor>, address: u64, pitch: usize,
    ) {
        set_rows(handle, &given, address, pitch)
    }

    call fn cuTexRefSetFormat(handle: u64, format: u32, channels: i32) {
        let channels = u32::try_from(channels).map_err(|_| Code::INVALID_VALUE)?;
        check_element(format, channels)?;
        set(handle, |state| (state.format, state.channels) = (format, channels))
    }

    call fn cuTexRefSetAddressMode(handle: u64, axis: i32, mode: u32) {
        let axis = usize::try_from(axis).ok().filter(|axis| *axis < 3);
        let axis = axis.ok_or(Code::INVALID_VALUE)?;
        if mode > 3 {
            return Err(Code::INVALID_VALUE);
        }
        set(handle, |state| state.reading.beyond[axis] = mode)
    }

    call fn cuTexRefSetFilterMode(handle: u64, mode: u32) {
        set_one(handle, mode, 1, |state| &mut state.reading.filter)
    }

    call fn cuTexRefSetMipmapFilterMode(handle: u64, mode: u32) {
        set_one(handle, mode, 1, |state| &mut state.reading.level_filter)
    }

    call fn cuTexRefSetMaxAnisotropy(handle: u64, most: u32) {
        set_one(handle, most, u32::MAX, |state| &mut state.reading.anisotropy)
    }

    call fn cuTexRefSetFlags(handle: u64, flags: u32) {
        set(handle, |state| state.reading.flags = flags)
    }

    call fn cuTexRefSetMipmapLevelBias(handle: u64, bias: f32) {
        set(handle, |state| state.reading.bias = bias)
    }

    call fn cuTexRefSetMipmapLevelClamp(handle: u64, least: f32, greatest: f32) {
        set(handle, |state| state.reading.levels = [least, greatest])
    }

    call fn cuTexRefSetBorderColor(handle: u64, colour: In<[f32; 4]>) {
        let colour = colour.get()?;
        set(handle, |state| state.reading.border = colour)
    }

    call fn cuTexRefGetArray(out: Out<u64>, handle: u64) {
        match find(handle)?.state.lock().resource {
            Some(Resource::Array(array)) => out.set(array),
            _ => Err(Code::INVALID_VALUE),
        }
    }

    call fn cuTexRefGetMipmappedArray(out: Out<u64>, handle: u64) {
        match find(handle)?.state.lock().resource {
            Some(Resource::Mipmapped(array)) => out.set(array),
            _ => Err(Code::INVALID_VALUE),
        }
    }

    call fn cuTexRefGetAddress_v2(out: Out<u64>, handle: u64) {
        match find(handle)?.state.lock().resource {
            Some(Resource::Linear { address, .. } | Resource::Rows { address, .. }) => {
                out.set(address)
            }
            _ => Err(Code::INVALID_VALUE),
        }
    }

    call fn cuTexRefGetAddressMode(out: Out<u32>, handle: u64, axis: i32) {
        let axis = usize::try_from(axis).ok().filter(|axis| *axis < 3);
        let axis = axis.ok_or(Code::INVALID_VALUE)?;
        get(&out, handle, |state| state.reading.beyond[axis])
    }

    call fn cuTexRefGetFilterMode(out: Out<u32>, handle: u64) {
        get(&out, handle, |state| state.reading.filter)
    }

    call fn cuTexRefGetMipmapFilterMode(out: Out<u32>, handle: u64) {
        get(&out, handle, |state| state.reading.level_filter)
    }

    call fn cuTexRefGetFormat(out: Out<u32>, channels: Out<i32>, handle: u64) {
        channels.set_if_wanted(find(handle)?.state.lock().channels as i32);
        out.set_if_wanted(find(handle)?.state.lock().format);
        Ok(())
    }

    call fn cuTexRefGetFlags(out: Out<u32>, handle: u64) {
        get(&out, handle, |state| state.reading.flags)
    }

    call fn cuTexRefGetMaxAnisotropy(out: Out<u32>, handle: u64) {
        get(&out, handle, |state| state.reading.anisotropy)
    }

    call fn cuTexRefGetMipmapLevelBias(out: Out<f32>, handle: u64) {
        get(&out, handle, |state| state.reading.bias)
    }

    call fn cuTexRefGetMipmapLevelClamp(least: Out<f32>, greatest: Out<f32>, handle: u64) {
        get(&least, handle, |state| state.reading.levels[0])?;
        get(&greatest, handle, |state| state.reading.levels[1])
    }

    call fn cuTexRefGetBorderColor(out: Out<[f32; 4]>, handle: u64) {
        get(&out, handle, |state| state.reading.border)
    }
}
