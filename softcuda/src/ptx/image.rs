//! What textures and surfaces are to a kernel: images in memory, and how they are read.

use std::sync::Arc;

/// Numbers of an image's elements.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[expect(missing_docs, reason = "the names are those of PTX's types")]
pub enum Channel {
    U8,
    U16,
    U32,
    S8,
    S16,
    S32,
    F16,
    F32,
}

impl Channel {
    /// Bytes of one number.
    #[must_use]
    pub fn size(self) -> u8 {
        match self {
            Channel::U8 | Channel::S8 => 1,
            Channel::U16 | Channel::S16 | Channel::F16 => 2,
            Channel::U32 | Channel::S32 | Channel::F32 => 4,
        }
    }
}

/// One size of an image.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Level {
    /// First address.
    pub address: u64,
    /// Elements in a row, rows, and planes or layers; none is 0.
    pub size: [u32; 3],
    /// Bytes from row to row.
    pub pitch: u64,
    /// Bytes from plane to plane, or from layer to layer.
    pub plane: u64,
}

/// Elements in rows, planes and layers. Nothing promises that there is memory: each access is checked.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Image {
    /// The sizes, the largest first; at least one.
    pub levels: Vec<Level>,
    /// What the numbers of an element are.
    pub channel: Channel,
    /// Numbers in an element: 1, 2 or 4.
    pub channels: u8,
    /// 1, 2 or 3; a cube has 2. Layers are none.
    pub dimensions: u8,
    /// The third size counts layers (sides of a cube, or of several).
    pub layered: bool,
    /// Six sides each are a cube.
    pub cube: bool,
    /// Plain memory, which reads as zero beyond its end.
    pub linear: bool,
}

/// What is read beside an image.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Beyond {
    /// The image again.
    Wrap,
    /// The element at the edge.
    Clamp,
    /// The image in a mirror.
    Mirror,
    /// The colour of the border.
    Border,
}

/// How an image is read.
#[derive(Debug, Clone, PartialEq)]
pub struct Sampler {
    /// For each direction.
    pub beyond: [Beyond; 3],
    /// Between elements, their weighted mean is taken.
    pub filters: bool,
    /// Between levels, too.
    pub filters_levels: bool,
    /// Coordinates run from 0 to 1.
    pub normalized: bool,
    /// Small integers stay integers, and are not mapped to numbers from 0 or -1 to 1.
    pub integers: bool,
    /// Bytes are taken as sRGB.
    pub srgb: bool,
    /// Added to a level.
    pub bias: f32,
    /// The least and the greatest level.
    pub levels: [f32; 2],
    /// The colour beside the image.
    pub border: [f32; 4],
}

/// An image and how it is read.
#[derive(Debug, Clone, PartialEq)]
pub struct Texture {
    /// The elements.
    pub image: Image,
    /// How they are read.
    pub sampler: Sampler,
}

/// Answers what the handles that kernels use stand for: those of objects, and the addresses of a
/// module's `.texref` and `.surfref` variables. Answers are remembered for the length of a launch.
pub trait Images: Sync {
    /// The texture of a handle, if there is one.
    fn texture(&self, handle: u64) -> Option<Arc<Texture>>;

    /// The image of a surface's handle, if there is one.
    fn surface(&self, handle: u64) -> Option<Arc<Image>>;
}

/// No textures and no surfaces.
#[derive(Debug, Clone, Copy, Default)]
pub struct NoImages;

impl Images for NoImages {
    fn texture(&self, _handle: u64) -> Option<Arc<Texture>> {
        None
    }

    fn surface(&self, _handle: u64) -> Option<Arc<Image>> {
        None
    }
}

impl Texture {
    /// Whether fetches give floating-point numbers.
    #[must_use]
    pub fn gives_floats(&self) -> bool {
        match self.image.channel {
            Channel::F16 | Channel::F32 => true,
            Channel::U32 | Channel::S32 => false,
            _ => !self.sampler.integers,
        }
    }
}
