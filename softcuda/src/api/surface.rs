//! Surface objects and references.

use super::arguments::{In, Out, Text};
use super::driver_api;
use super::module;
use super::texture::ResourceDescriptor;
use crate::context;
use crate::status::{Code, Outcome};
use crate::textures::{self, Resource, SURFACE_REFERENCES, SURFACES, SurfaceReference};

fn reference(handle: u64) -> Outcome<std::sync::Arc<SurfaceReference>> {
    context::current()?;
    SURFACE_REFERENCES.get(handle).ok_or(Code::INVALID_VALUE)
}

driver_api! {
    call fn cuSurfObjectCreate(out: Out<u64>, resource: In<ResourceDescriptor>) {
        out.check()?;
        let context = context::current()?;
        let Resource::Array(array) = resource.get()?.read()? else {
            return Err(Code::INVALID_VALUE);
        };
        out.set(textures::create_surface(context.handle, array)?)
    }

    call fn cuSurfObjectDestroy(handle: u64) {
        context::current()?;
        SURFACES.get(handle).ok_or(Code::INVALID_VALUE)?;
        // Work that is under way may still use it.
        context::wait_everything();
        SURFACES.remove(handle).map(|_| ()).ok_or(Code::INVALID_VALUE)
    }

    call fn cuSurfObjectGetResourceDesc(out: Out<ResourceDescriptor>, handle: u64) {
        context::current()?;
        let surface = SURFACES.get(handle).ok_or(Code::INVALID_VALUE)?;
        out.set(ResourceDescriptor::new(&Resource::Array(surface.array)))
    }

    call fn cuModuleGetSurfRef(out: Out<u64>, handle: u64, name: Text) {
        context::current()?;
        let found = module::find(handle)?.reference(name.get()?)?;
        SURFACE_REFERENCES.get(found).ok_or(Code::NOT_FOUND)?;
        out.set(found)
    }

    call fn cuSurfRefSetArray(handle: u64, array: u64, flags: u32) {
        if flags != 0 {
            return Err(Code::INVALID_VALUE);
        }
        reference(handle)?.set(array)
    }

    call fn cuSurfRefGetArray(out: Out<u64>, handle: u64) {
        match *reference(handle)?.array.lock() {
            0 => Err(Code::INVALID_VALUE),
            array => out.set(array),
        }
    }
}
