//! CUDA arrays. Their elements lie by rows and planes here, in plain device memory whose address no
//! program learns.

use crate::device_memory;
use crate::handles::{Table, new_handle};
use crate::status::{Code, Outcome};

/// All arrays.
pub(crate) static ARRAYS: Table<Array> = Table::new();
/// All arrays of several levels.
pub(crate) static MIPMAPPED: Table<Mipmapped> = Table::new();

/// An array of several levels.
pub(crate) struct Mipmapped {
    /// Handle of the context that it belongs to.
    pub(crate) context: u64,
    /// Handles of the arrays of the levels, the largest first.
    pub(crate) levels: Vec<u64>,
}

/// An array.
pub(crate) struct Array {
    /// Handle of the context that it belongs to.
    pub(crate) context: u64,
    /// As given at creation.
    pub(crate) descriptor: Descriptor,
    /// Whether it is a level of another one.
    is_level: bool,
    /// First address of its memory.
    address: u64,
    /// Size of its memory in bytes.
    size: u64,
    /// Bytes of a row.
    row: u64,
}

/// `CUDA_ARRAY3D_DESCRIPTOR` with its enumerations as numbers.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Descriptor {
    /// Elements in a row.
    pub(crate) width: usize,
    /// Rows, or 0 for an array of one dimension.
    pub(crate) height: usize,
    /// Planes or layers, or 0 for an array of one or two dimensions.
    pub(crate) depth: usize,
    /// `CUarray_format`.
    pub(crate) format: u32,
    /// Numbers in an element: 1, 2 or 4.
    pub(crate) channels: u32,
    /// `CUDA_ARRAY3D_LAYERED` and the like.
    pub(crate) flags: u32,
}

/// `CUDA_ARRAY3D_LAYERED`.
const LAYERED: u32 = 1;
/// `CUDA_ARRAY3D_CUBEMAP`.
const CUBEMAP: u32 = 4;
/// Those, `_SURFACE_LDST`, `_TEXTURE_GATHER`, `_DEPTH_TEXTURE` and `_COLOR_ATTACHMENT`: all that
/// changes nothing but what textures and surfaces may do.
const KNOWN_FLAGS: u32 = 0x3f;
/// `CUDA_ARRAY3D_SPARSE` and `_DEFERRED_MAPPING`.
const WITHOUT_MEMORY: u32 = 0xc0;

/// The place of a part of an array in memory.
pub(crate) struct Part {
    /// First address.
    pub(crate) address: u64,
    /// Bytes from row to row.
    pub(crate) pitch: u64,
    /// Bytes from plane to plane.
    pub(crate) plane: u64,
}

impl Descriptor {
    /// Bytes of an element.
    ///
    /// # Errors
    /// `NOT_SUPPORTED` for formats that are not there, `INVALID_VALUE` for others.
    pub(crate) fn element(&self) -> Outcome<u64> {
        let channel = match self.format {
            0x01 | 0x08 => 1,
            0x02 | 0x09 | 0x10 => 2,
            0x03 | 0x0a | 0x20 => 4,
            // Formats of video, of compressed blocks and of normalised numbers.
            0x50..=0x6f | 0x91..=0xbf => return Err(Code::NOT_SUPPORTED),
            _ => return Err(Code::INVALID_VALUE),
        };
        match self.channels {
            1 | 2 | 4 => Ok(channel * u64::from(self.channels)),
            _ => Err(Code::INVALID_VALUE),
        }
    }

    /// Whether the depth counts layers.
    pub(crate) fn is_layered(&self) -> bool {
        self.flags & LAYERED != 0
    }

    /// Whether six layers each are a cube.
    pub(crate) fn is_cube(&self) -> bool {
        self.flags & CUBEMAP != 0
    }

    /// The next level of an array of several.
    fn halved(&self) -> Descriptor {
        let half = |n: usize| if n == 0 { 0 } else { (n / 2).max(1) };
        let layers = self.is_layered() || self.is_cube();
        let depth = if layers { self.depth } else { half(self.depth) };
        Descriptor { width: half(self.width), height: half(self.height), depth, ..*self }
    }

    fn check_shape(&self) -> Outcome {
        let (layered, cube) = (self.is_layered(), self.is_cube());
        // A cube has six square sides, and several cubes are layers.
        let sides = if layered { self.depth.is_multiple_of(6) } else { self.depth == 6 };
        let bad = self.width == 0
            || (self.height == 0 && self.depth != 0 && !layered)
            || (layered && self.depth == 0)
            || (cube && (self.width != self.height || self.depth == 0 || !sides));
        if bad || self.flags & !(KNOWN_FLAGS | WITHOUT_MEMORY) != 0 {
            return Err(Code::INVALID_VALUE);
        }
        if self.flags & WITHOUT_MEMORY != 0 { Err(Code::NOT_SUPPORTED) } else { Ok(()) }
    }
}

/// Creates an array.
///
/// # Errors
/// `INVALID_VALUE` for a description that makes no sense, `NOT_SUPPORTED` for formats and flags that
/// are not there, `OUT_OF_MEMORY`.
pub(crate) fn create(device: usize, context: u64, descriptor: Descriptor) -> Outcome<u64> {
    create_part(device, context, descriptor, false)
}

fn create_part(
    device: usize,
    context: u64,
    descriptor: Descriptor,
    is_level: bool,
) -> Outcome<u64> {
    let element = descriptor.element()?;
    descriptor.check_shape()?;
    let sizes = [descriptor.height.max(1) as u64, descriptor.depth.max(1) as u64];
    let row = (descriptor.width as u64).checked_mul(element).ok_or(Code::OUT_OF_MEMORY)?;
    let size = sizes.iter().try_fold(row, |size, count| size.checked_mul(*count));
    let size = size.ok_or(Code::OUT_OF_MEMORY)?;
    let address = device_memory::allocate(device, context, size)?;
    let handle = new_handle();
    ARRAYS.insert(handle, Array { context, descriptor, is_level, address, size, row }.into());
    Ok(handle)
}

/// Creates an array of several levels, of which each has half of the size of the one before.
///
/// # Errors
/// As [`create`]; `INVALID_VALUE` without levels. Nothing is left then.
pub(crate) fn create_mipmapped(
    device: usize,
    context: u64,
    descriptor: Descriptor,
    levels: u32,
) -> Outcome<u64> {
    if levels == 0 {
        return Err(Code::INVALID_VALUE);
    }
    let layers = descriptor.is_layered() || descriptor.is_cube();
    let depth = if layers { 1 } else { descriptor.depth };
    let largest = descriptor.width.max(descriptor.height).max(depth).max(1);
    // More levels than the size has halves are not made.
    let levels = levels.min(largest.ilog2() + 1);
    let mut made = Vec::new();
    let mut next = descriptor;
    for _ in 0..levels {
        match create_part(device, context, next, true) {
            Ok(array) => made.push(array),
            Err(code) => {
                made.into_iter().for_each(free);
                return Err(code);
            }
        }
        next = next.halved();
    }
    let handle = new_handle();
    MIPMAPPED.insert(handle, Mipmapped { context, levels: made }.into());
    Ok(handle)
}

/// Frees an array that is there.
fn free(handle: u64) {
    if let Some(array) = ARRAYS.remove(handle) {
        let _ = device_memory::free(array.address);
    }
}

/// Destroys an array. No work that uses it may be under way.
///
/// # Errors
/// `INVALID_HANDLE` for anything else, and for a level of an array.
pub(crate) fn destroy(handle: u64) -> Outcome {
    let array = ARRAYS.get(handle).filter(|array| !array.is_level);
    array.ok_or(Code::INVALID_HANDLE)?;
    free(handle);
    Ok(())
}

/// Destroys an array of several levels. No work that uses it may be under way.
///
/// # Errors
/// `INVALID_HANDLE` for anything else.
pub(crate) fn destroy_mipmapped(handle: u64) -> Outcome {
    let array = MIPMAPPED.remove(handle).ok_or(Code::INVALID_HANDLE)?;
    array.levels.iter().copied().for_each(free);
    Ok(())
}

/// Forgets the arrays of a context; their memory is freed with the context's.
pub(crate) fn forget_context(context: u64) {
    ARRAYS.remove_where(|array| array.context == context);
    MIPMAPPED.remove_where(|array| array.context == context);
}

/// The array behind a handle in a copy.
///
/// # Errors
/// `INVALID_VALUE` for anything else.
pub(crate) fn by_handle(handle: u64) -> Outcome<std::sync::Arc<Array>> {
    ARRAYS.get(handle).ok_or(Code::INVALID_VALUE)
}

impl Array {
    /// The place of a box: where it begins, in bytes, rows and planes, and how large it is.
    ///
    /// # Errors
    /// `INVALID_VALUE` when it is not all inside.
    pub(crate) fn part(&self, start: [usize; 3], size: [usize; 3]) -> Outcome<Part> {
        let rows = self.descriptor.height.max(1) as u64;
        let planes = self.descriptor.depth.max(1) as u64;
        for ((start, size), limit) in start.iter().zip(size).zip([self.row, rows, planes]) {
            let end = (*start as u64).checked_add(size as u64);
            if end.is_none_or(|end| end > limit) {
                return Err(Code::INVALID_VALUE);
            }
        }
        let [x, y, z] = start.map(|at| at as u64);
        let plane = self.row * rows;
        Ok(Part { address: self.address + x + y * self.row + z * plane, pitch: self.row, plane })
    }

    /// The address of bytes of an array of one dimension, or of consecutive rows.
    ///
    /// # Errors
    /// `INVALID_VALUE` when they are not all inside.
    pub(crate) fn bytes(&self, start: usize, size: usize) -> Outcome<u64> {
        let end = (start as u64).checked_add(size as u64);
        if end.is_none_or(|end| end > self.size) {
            return Err(Code::INVALID_VALUE);
        }
        Ok(self.address + start as u64)
    }
}
