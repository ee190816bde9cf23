//! Texture objects.

use cudarc::driver::sys;

use super::arguments::{In, Out};
use super::driver_api;
use crate::context;
use crate::settings;
use crate::status::{Code, Outcome};
use crate::textures::{self, Reading, Resource, TEXTURES, TextureObject, View};

/// `CUDA_RESOURCE_DESC` with its enumerations as numbers.
#[repr(C)]
#[derive(Clone, Copy)]
pub(super) struct ResourceDescriptor {
    kind: u32,
    /// Handles, addresses and sizes, by the kind; numbers of 32 bits in pairs.
    of: [u64; 16],
    flags: u32,
}

const _: () = assert!(size_of::<ResourceDescriptor>() == size_of::<sys::CUDA_RESOURCE_DESC>());
const _: () = assert!(size_of::<Reading>() == size_of::<sys::CUDA_TEXTURE_DESC>());
const _: () = assert!(size_of::<View>() == size_of::<sys::CUDA_RESOURCE_VIEW_DESC>());

/// `CU_RESOURCE_TYPE_ARRAY` and so on.
const ARRAY: u32 = 0;
const MIPMAPPED_ARRAY: u32 = 1;
const LINEAR: u32 = 2;
const PITCH2D: u32 = 3;

fn pair(low: u32, high: u32) -> u64 {
    u64::from(low) | u64::from(high) << 32
}

impl ResourceDescriptor {
    /// What it describes.
    ///
    /// # Errors
    /// `INVALID_VALUE` for an unknown kind, and for flags.
    pub(super) fn read(&self) -> Outcome<Resource> {
        if self.flags != 0 {
            return Err(Code::INVALID_VALUE);
        }
        let [first, second, third, fourth, fifth, ..] = self.of;
        let (format, channels) = (second as u32, (second >> 32) as u32);
        Ok(match self.kind {
            ARRAY => Resource::Array(first),
            MIPMAPPED_ARRAY => Resource::Mipmapped(first),
            LINEAR => Resource::Linear { address: first, format, channels, size: third as usize },
            PITCH2D => {
                let size = [third as usize, fourth as usize];
                Resource::Rows { address: first, format, channels, size, pitch: fifth as usize }
            }
            _ => return Err(Code::INVALID_VALUE),
        })
    }

    /// The description of something.
    pub(super) fn new(resource: &Resource) -> ResourceDescriptor {
        let mut of = [0; 16];
        let kind = match *resource {
            Resource::Array(array) => {
                of[0] = array;
                ARRAY
            }
            Resource::Mipmapped(array) => {
                of[0] = array;
                MIPMAPPED_ARRAY
            }
            Resource::Linear { address, format, channels, size } => {
                of[..3].copy_from_slice(&[address, pair(format, channels), size as u64]);
                LINEAR
            }
            Resource::Rows { address, format, channels, size, pitch } => {
                let [width, height] = size.map(|n| n as u64);
                let all = [address, pair(format, channels), width, height, pitch as u64];
                of[..5].copy_from_slice(&all);
                PITCH2D
            }
        };
        ResourceDescriptor { kind, of, flags: 0 }
    }
}

fn find(handle: u64) -> Outcome<std::sync::Arc<TextureObject>> {
    context::current()?;
    TEXTURES.get(handle).ok_or(Code::INVALID_VALUE)
}

driver_api! {
    call fn cuTexObjectCreate(
        out: Out<u64>, resource: In<ResourceDescriptor>, reading: In<Reading>, view: In<View>,
    ) {
        out.check()?;
        let context = context::current()?;
        let view = if view.is_null() { None } else { Some(view.get()?) };
        let resource = resource.get()?.read()?;
        out.set(textures::create(context.handle, resource, reading.get()?, view)?)
    }

    call fn cuTexObjectDestroy(handle: u64) {
        find(handle)?;
        // Work that is under way may still use it.
        context::wait_everything();
        TEXTURES.remove(handle).map(|_| ()).ok_or(Code::INVALID_VALUE)
    }

    call fn cuTexObjectGetResourceDesc(out: Out<ResourceDescriptor>, handle: u64) {
        out.set(ResourceDescriptor::new(&find(handle)?.resource))
    }

    call fn cuTexObjectGetTextureDesc(out: Out<Reading>, handle: u64) {
        out.set(find(handle)?.reading)
    }

    call fn cuTexObjectGetResourceViewDesc(out: Out<View>, handle: u64) {
        out.set(find(handle)?.view.ok_or(Code::INVALID_VALUE)?)
    }

    call fn cuDeviceGetTexture1DLinearMaxWidth(
        out: Out<usize>, format: u32, channels: u32, device: i32,
    ) {
        settings::device(device)?;
        textures::check_element(format, channels)?;
        out.set(textures::MOST_LINEAR)
    }
}
