//! Textures and surfaces: objects, references of modules, and what kernels see of them.

use std::sync::Arc;

use parking_lot::Mutex;

use crate::arrays::{ARRAYS, Array, Descriptor, MIPMAPPED};
use crate::handles::{Table, new_handle};
use crate::ptx::{Beyond, Channel, Image, Images, Level, Sampler, Texture};
use crate::status::{Code, Outcome};

/// All texture objects.
pub(crate) static TEXTURES: Table<TextureObject> = Table::new();
/// All surface objects.
pub(crate) static SURFACES: Table<SurfaceObject> = Table::new();
/// All texture references.
pub(crate) static TEXTURE_REFERENCES: Table<TextureReference> = Table::new();
/// All surface references.
pub(crate) static SURFACE_REFERENCES: Table<SurfaceReference> = Table::new();

/// Alignment of the addresses of textures in plain memory, in bytes.
pub(crate) const ALIGNMENT: u64 = 512;
/// Alignment of the rows of such textures, in bytes.
const PITCH_ALIGNMENT: u64 = 32;
/// The most elements of a texture in plain memory without rows.
pub(crate) const MOST_LINEAR: usize = 1 << 28;

/// What a texture reads, or a surface reads and writes.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Resource {
    /// An array, by its handle.
    Array(u64),
    /// An array of several levels, by its handle.
    Mipmapped(u64),
    /// Plain memory.
    Linear {
        /// First address.
        address: u64,
        /// `CUarray_format`.
        format: u32,
        /// Numbers in an element.
        channels: u32,
        /// Size in bytes.
        size: usize,
    },
    /// Rows in plain memory.
    Rows {
        /// First address.
        address: u64,
        /// `CUarray_format`.
        format: u32,
        /// Numbers in an element.
        channels: u32,
        /// Elements in a row, and rows.
        size: [usize; 2],
        /// Bytes from row to row.
        pitch: usize,
    },
}

/// `CUDA_TEXTURE_DESC` with its enumerations as numbers.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub(crate) struct Reading {
    /// `CUaddress_mode` of each direction.
    pub(crate) beyond: [u32; 3],
    /// `CUfilter_mode`.
    pub(crate) filter: u32,
    /// `CU_TRSF_*`.
    pub(crate) flags: u32,
    /// Kept and reported only.
    pub(crate) anisotropy: u32,
    /// `CUfilter_mode` between levels.
    pub(crate) level_filter: u32,
    /// Added to the level.
    pub(crate) bias: f32,
    /// The least and the greatest level.
    pub(crate) levels: [f32; 2],
    /// The colour beside the image.
    pub(crate) border: [f32; 4],
    reserved: [u32; 12],
}

/// `CUDA_RESOURCE_VIEW_DESC` with its enumeration as a number.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub(crate) struct View {
    format: u32,
    size: [usize; 3],
    levels: [u32; 2],
    layers: [u32; 2],
    reserved: [u32; 16],
}

/// `CU_TRSF_READ_AS_INTEGER`.
pub(crate) const READ_AS_INTEGER: u32 = 1;
/// `CU_TRSF_NORMALIZED_COORDINATES`.
pub(crate) const NORMALIZED: u32 = 2;
/// `CU_TRSF_SRGB`.
pub(crate) const SRGB: u32 = 0x10;
/// Those, and `_DISABLE_TRILINEAR_OPTIMIZATION` and `_SEAMLESS_CUBEMAP`, which change nothing here.
const KNOWN_FLAGS: u32 = 0x73;
/// `CUDA_ARRAY3D_SURFACE_LDST`.
const FOR_SURFACES: u32 = 2;

/// A texture object.
pub(crate) struct TextureObject {
    /// Handle of the context that it belongs to.
    pub(crate) context: u64,
    /// As given at creation.
    pub(crate) resource: Resource,
    /// As given at creation.
    pub(crate) reading: Reading,
    /// As given at creation.
    pub(crate) view: Option<View>,
    seen: Arc<Texture>,
}

/// A surface object.
pub(crate) struct SurfaceObject {
    /// Handle of the context that it belongs to.
    pub(crate) context: u64,
    /// As given at creation.
    pub(crate) array: u64,
    seen: Arc<Image>,
}

/// A variable of a module that stands for a texture.
pub(crate) struct TextureReference {
    /// Handle of the context that it belongs to.
    pub(crate) context: u64,
    /// The address by which kernels know it; none is 0.
    pub(crate) address: u64,
    /// What programs set.
    pub(crate) state: Mutex<ReferenceState>,
}

/// What programs set in a texture reference.
#[derive(Clone, Debug)]
pub(crate) struct ReferenceState {
    /// What is read.
    pub(crate) resource: Option<Resource>,
    /// `CUarray_format` of plain memory.
    pub(crate) format: u32,
    /// Numbers in an element of plain memory.
    pub(crate) channels: u32,
    /// How it is read.
    pub(crate) reading: Reading,
}

/// A variable of a module that stands for a surface.
pub(crate) struct SurfaceReference {
    /// Handle of the context that it belongs to.
    pub(crate) context: u64,
    /// The address by which kernels know it.
    pub(crate) address: u64,
    /// Handle of its array; 0 is none.
    pub(crate) array: Mutex<u64>,
}

impl Default for ReferenceState {
    fn default() -> ReferenceState {
        ReferenceState { resource: None, format: 0x20, channels: 1, reading: Reading::default() }
    }
}

/// A reference of a module.
#[derive(Clone)]
pub(crate) enum Reference {
    /// `.texref`.
    Texture(Arc<TextureReference>),
    /// `.surfref`.
    Surface(Arc<SurfaceReference>),
}

impl Reading {
    fn sampler(&self) -> Outcome<Sampler> {
        let mut beyond = [Beyond::Wrap; 3];
        for (slot, mode) in beyond.iter_mut().zip(self.beyond) {
            *slot = match mode {
                0 => Beyond::Wrap,
                1 => Beyond::Clamp,
                2 => Beyond::Mirror,
                3 => Beyond::Border,
                _ => return Err(Code::INVALID_VALUE),
            };
        }
        if self.filter > 1 || self.level_filter > 1 || self.flags & !KNOWN_FLAGS != 0 {
            return Err(Code::INVALID_VALUE);
        }
        Ok(Sampler {
            beyond,
            filters: self.filter == 1,
            filters_levels: self.level_filter == 1,
            normalized: self.flags & NORMALIZED != 0,
            integers: self.flags & READ_AS_INTEGER != 0,
            srgb: self.flags & SRGB != 0,
            bias: self.bias,
            levels: self.levels,
            border: self.border,
        })
    }
}

fn channel(format: u32) -> Outcome<Channel> {
    Ok(match format {
        0x01 => Channel::U8,
        0x02 => Channel::U16,
        0x03 => Channel::U32,
        0x08 => Channel::S8,
        0x09 => Channel::S16,
        0x0a => Channel::S32,
        0x10 => Channel::F16,
        0x20 => Channel::F32,
        _ => return Err(Code::INVALID_VALUE),
    })
}

/// The format and the channels of a view: `CUresourceViewFormat`.
fn viewed(format: u32) -> Outcome<(Channel, u8)> {
    let channels = [Channel::U8, Channel::S8, Channel::U16, Channel::S16];
    let wider = [Channel::U32, Channel::S32, Channel::F16, Channel::F32];
    let index = match format {
        1..=24 => (format - 1) as usize,
        // Compressed blocks.
        25..=38 => return Err(Code::NOT_SUPPORTED),
        _ => return Err(Code::INVALID_VALUE),
    };
    let channel = *channels.iter().chain(&wider).nth(index / 3).ok_or(Code::INVALID_VALUE)?;
    Ok((channel, [1, 2, 4][index % 3]))
}

fn image_of_array(array: &Array) -> Outcome<Image> {
    let Descriptor { width, height, depth, format, channels, .. } = array.descriptor;
    let size = |n: usize| u32::try_from(n).map_err(|_| Code::INVALID_VALUE);
    let (layered, cube) = (array.descriptor.is_layered(), array.descriptor.is_cube());
    let part = array.part([0; 3], [0; 3])?;
    let level = Level {
        address: part.address,
        size: [size(width)?, size(height)?, size(depth)?],
        pitch: part.pitch,
        plane: part.plane,
    };
    let dimensions = match (height, depth) {
        (0, _) => 1,
        (_, 0) => 2,
        _ if layered || cube => 2,
        _ => 3,
    };
    Ok(Image {
        levels: vec![level],
        channel: channel(format)?,
        channels: channels as u8,
        dimensions,
        layered: layered || cube,
        cube,
        linear: false,
    })
}

impl Resource {
    /// Fails for what makes no sense.
    ///
    /// # Errors
    /// `INVALID_VALUE`, and `NOT_SUPPORTED` for formats that are not there.
    pub(crate) fn check(&self) -> Outcome {
        self.image().map(|_| ())
    }

    fn image(&self) -> Outcome<Image> {
        match *self {
            Resource::Array(handle) => {
                image_of_array(&*ARRAYS.get(handle).ok_or(Code::INVALID_VALUE)?)
            }
            Resource::Mipmapped(handle) => {
                let levels = MIPMAPPED.get(handle).ok_or(Code::INVALID_VALUE)?;
                let mut images = Vec::new();
                for level in &levels.levels {
                    let array = ARRAYS.get(*level).ok_or(Code::INVALID_VALUE)?;
                    images.push(image_of_array(&array)?);
                }
                let all = images.iter().flat_map(|image| image.levels.clone()).collect();
                let first = images.into_iter().next().ok_or(Code::INVALID_VALUE)?;
                Ok(Image { levels: all, ..first })
            }
            Resource::Linear { address, format, channels, size } => {
                let element = element(format, channels)?;
                let width = size / element as usize;
                if address == 0 || !address.is_multiple_of(ALIGNMENT) || width > MOST_LINEAR {
                    return Err(Code::INVALID_VALUE);
                }
                let size = [width as u32, 0, 0];
                plain(Level { address, size, pitch: 0, plane: 0 }, (format, channels), 1)
            }
            Resource::Rows { address, format, channels, size, pitch } => {
                let element = element(format, channels)?;
                let row = (size[0] as u64).checked_mul(element).ok_or(Code::INVALID_VALUE)?;
                let pitch = pitch as u64;
                let aligned = address.is_multiple_of(ALIGNMENT)
                    && (pitch.is_multiple_of(PITCH_ALIGNMENT) || size[1] == 1);
                if address == 0 || !aligned || row > pitch || size.iter().any(|n| *n > 1 << 17) {
                    return Err(Code::INVALID_VALUE);
                }
                let size = [size[0] as u32, size[1] as u32, 0];
                plain(Level { address, size, pitch, plane: 0 }, (format, channels), 2)
            }
        }
    }
}

/// Checks the format and the channels of an element.
///
/// # Errors
/// `INVALID_VALUE` for what there is not, `NOT_SUPPORTED` for what is not there.
pub(crate) fn check_element(format: u32, channels: u32) -> Outcome {
    element(format, channels).map(|_| ())
}

fn element(format: u32, channels: u32) -> Outcome<u64> {
    let plain = Descriptor { width: 1, height: 0, depth: 0, format, channels, flags: 0 };
    plain.element()
}

fn plain(level: Level, (format, channels): (u32, u32), dimensions: u8) -> Outcome<Image> {
    Ok(Image {
        levels: vec![level],
        channel: channel(format)?,
        channels: channels as u8,
        dimensions,
        layered: false,
        cube: false,
        linear: dimensions == 1,
    })
}

impl View {
    /// The part of an image that the view shows.
    fn of(&self, mut image: Image) -> Outcome<Image> {
        if self.format != 0 {
            let (channel, channels) = viewed(self.format)?;
            let bytes = |channel: Channel, channels: u8| channel.size() * channels;
            if bytes(channel, channels) != bytes(image.channel, image.channels) {
                return Err(Code::INVALID_VALUE);
            }
            (image.channel, image.channels) = (channel, channels);
        }
        let levels = self.levels.map(|n| n as usize);
        if levels[0] > levels[1] || levels[1] >= image.levels.len() {
            return Err(Code::INVALID_VALUE);
        }
        image.levels = image.levels[levels[0]..=levels[1]].to_vec();
        let size = image.levels[0].size.map(|n| n as usize);
        let layers = self.layers;
        let depth = if image.layered { 0 } else { self.size[2] };
        if self.size[..2] != size[..2] || (!image.layered && depth != size[2]) {
            return Err(Code::INVALID_VALUE);
        }
        if image.layered {
            if layers[0] > layers[1] || layers[1] as usize >= size[2] {
                return Err(Code::INVALID_VALUE);
            }
            for level in &mut image.levels {
                level.address += u64::from(layers[0]) * level.plane;
                level.size[2] = layers[1] - layers[0] + 1;
            }
        }
        Ok(image)
    }
}

/// Makes a texture object.
///
/// # Errors
/// `INVALID_VALUE` for a description that makes no sense, `NOT_SUPPORTED` for views of compressed
/// blocks.
pub(crate) fn create(
    context: u64,
    resource: Resource,
    reading: Reading,
    view: Option<View>,
) -> Outcome<u64> {
    let mut image = resource.image()?;
    if let Some(view) = &view {
        if !matches!(resource, Resource::Array(_) | Resource::Mipmapped(_)) {
            return Err(Code::INVALID_VALUE);
        }
        image = view.of(image)?;
    }
    let seen = Arc::new(Texture { image, sampler: reading.sampler()? });
    let handle = new_handle();
    let object = TextureObject { context, resource, reading, view, seen };
    TEXTURES.insert(handle, Arc::new(object));
    Ok(handle)
}

/// The image of an array that surfaces may use.
fn surface_image(array: u64) -> Outcome<Image> {
    let array = ARRAYS.get(array).ok_or(Code::INVALID_VALUE)?;
    if array.descriptor.flags & FOR_SURFACES == 0 {
        return Err(Code::INVALID_VALUE);
    }
    image_of_array(&array)
}

/// Makes a surface object.
///
/// # Errors
/// `INVALID_VALUE` for what is no array, or one that was not made for surfaces.
pub(crate) fn create_surface(context: u64, array: u64) -> Outcome<u64> {
    let seen = Arc::new(surface_image(array)?);
    let handle = new_handle();
    SURFACES.insert(handle, Arc::new(SurfaceObject { context, array, seen }));
    Ok(handle)
}

impl SurfaceReference {
    /// Has it stand for an array.
    ///
    /// # Errors
    /// As [`create_surface`].
    pub(crate) fn set(&self, array: u64) -> Outcome {
        surface_image(array)?;
        *self.array.lock() = array;
        Ok(())
    }
}

/// Forgets the textures and surfaces of a context.
pub(crate) fn forget_context(context: u64) {
    TEXTURES.remove_where(|texture| texture.context == context);
    SURFACES.remove_where(|surface| surface.context == context);
    TEXTURE_REFERENCES.remove_where(|reference| reference.context == context);
    SURFACE_REFERENCES.remove_where(|reference| reference.context == context);
}

/// What a launch sees: the references of its module as they were then, and all objects.
pub(crate) struct LaunchImages {
    textures: Vec<(u64, Arc<Texture>)>,
    surfaces: Vec<(u64, Arc<Image>)>,
}

impl LaunchImages {
    /// Takes over what the references stand for now. One that stands for nothing is none.
    pub(crate) fn new(references: &[Reference]) -> LaunchImages {
        let mut images = LaunchImages { textures: Vec::new(), surfaces: Vec::new() };
        for reference in references {
            match reference {
                Reference::Texture(reference) => {
                    let state = reference.state.lock();
                    let image = state.resource.map(|resource| resource.image());
                    if let (Some(Ok(image)), Ok(sampler)) = (image, state.reading.sampler()) {
                        let texture = Arc::new(Texture { image, sampler });
                        images.textures.push((reference.address, texture));
                    }
                }
                Reference::Surface(reference) => {
                    if let Ok(image) = surface_image(*reference.array.lock()) {
                        images.surfaces.push((reference.address, Arc::new(image)));
                    }
                }
            }
        }
        images
    }
}

impl Images for LaunchImages {
    fn texture(&self, handle: u64) -> Option<Arc<Texture>> {
        let own = self.textures.iter().find(|(address, _)| *address == handle);
        own.map(|(_, texture)| texture.clone())
            .or_else(|| TEXTURES.get(handle).map(|object| object.seen.clone()))
    }

    fn surface(&self, handle: u64) -> Option<Arc<Image>> {
        let own = self.surfaces.iter().find(|(address, _)| *address == handle);
        own.map(|(_, image)| image.clone())
            .or_else(|| SURFACES.get(handle).map(|object| object.seen.clone()))
    }
}
