//! What runs on a driver and what must come out of it.

use half::{bf16, f16};

/// A launch of a kernel of the job's module.
pub(crate) struct Launch {
    pub(crate) kernel: &'static str,
    /// Blocks, threads of a block, bytes of dynamic shared memory.
    pub(crate) shape: (u32, u32, u32),
    pub(crate) arguments: Vec<Argument>,
}

#[derive(Clone, Copy)]
pub(crate) enum Argument {
    /// The address of a buffer, by its number.
    Buffer(usize),
    /// The texture of a picture, by its number.
    Texture(usize),
    /// The surface of a picture, by its number.
    Surface(usize),
    U32(u32),
    F32(f32),
}

/// What a texture or a surface shows.
#[derive(Clone, Copy, PartialEq, Debug)]
pub(crate) enum Shape {
    /// An array: its size in elements, its flags and its levels.
    Array { size: [usize; 3], flags: u32, levels: usize },
    /// Plain memory.
    Linear,
    /// So many rows, and bytes from row to row, in plain memory.
    Rows { width: usize, height: usize, pitch: usize },
}

/// `CUDA_TEXTURE_DESC`.
#[repr(C)]
#[derive(Clone, Copy, Default)]
pub(crate) struct Reading {
    pub(crate) beyond: [u32; 3],
    pub(crate) filter: u32,
    pub(crate) flags: u32,
    pub(crate) anisotropy: u32,
    pub(crate) level_filter: u32,
    pub(crate) bias: f32,
    pub(crate) levels: [f32; 2],
    pub(crate) border: [f32; 4],
    reserved: [u32; 12],
}

/// A texture, or a surface.
#[derive(Clone)]
pub(crate) struct Picture {
    pub(crate) shape: Shape,
    /// `CUarray_format`.
    pub(crate) format: u32,
    pub(crate) channels: u32,
    /// Of all levels, one after the other.
    pub(crate) bytes: Vec<u8>,
    pub(crate) reading: Reading,
}

impl Picture {
    /// Bytes of an element.
    pub(crate) fn element(&self) -> usize {
        let number = match self.format {
            0x01 | 0x08 => 1,
            0x02 | 0x09 | 0x10 => 2,
            _ => 4,
        };
        number * self.channels as usize
    }

    /// The size of a level of an array.
    pub(crate) fn level(&self, level: usize) -> [usize; 3] {
        let Shape::Array { size, flags, .. } = self.shape else { return [0; 3] };
        let mut halves = size.map(|n| if n == 0 { 0 } else { (n >> level).max(1) });
        if flags & 5 != 0 {
            halves[2] = size[2]; // layers stay
        }
        halves
    }
}

/// What the elements of a result are.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Kind {
    B16,
    B32,
    B64,
    F16,
    Bf16,
    F32,
    F64,
}

/// How close a result must come.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Precision {
    /// Every bit.
    Exact,
    /// Every bit, but any NaN stands for any other.
    Numbers,
    /// `|found - expected| <= relative * |expected| + absolute`; infinities and NaN are the same.
    Within { relative: f64, absolute: f64 },
}

/// One program: a module, its memory, its launches, and the buffer that holds the result.
pub(crate) struct Job {
    pub(crate) name: String,
    pub(crate) ptx: String,
    pub(crate) buffers: Vec<Vec<u8>>,
    pub(crate) pictures: Vec<Picture>,
    pub(crate) launches: Vec<Launch>,
    pub(crate) result: usize,
    pub(crate) kind: Kind,
    /// What the host computed.
    pub(crate) expected: Vec<u8>,
    /// Between softcuda and the host.
    pub(crate) precision: Precision,
    /// Between softcuda and a GPU.
    pub(crate) golden: Precision,
}

impl Kind {
    pub(crate) fn size(self) -> usize {
        match self {
            Kind::B16 | Kind::F16 | Kind::Bf16 => 2,
            Kind::B32 | Kind::F32 => 4,
            Kind::B64 | Kind::F64 => 8,
        }
    }

    pub(crate) fn number(self, element: &[u8]) -> f64 {
        let mut bits = [0; 8];
        bits[..element.len()].copy_from_slice(element);
        let bits = u64::from_le_bytes(bits);
        match self {
            Kind::F16 => f16::from_bits(bits as u16).to_f64(),
            Kind::Bf16 => bf16::from_bits(bits as u16).to_f64(),
            Kind::F32 => f64::from(f32::from_bits(bits as u32)),
            Kind::F64 => f64::from_bits(bits),
            Kind::B16 | Kind::B32 | Kind::B64 => bits as f64,
        }
    }
}

impl Precision {
    fn holds(self, kind: Kind, found: &[u8], expected: &[u8]) -> bool {
        let (x, y) = (kind.number(found), kind.number(expected));
        match self {
            _ if found == expected => true,
            Precision::Exact => false,
            Precision::Numbers => x.is_nan() && y.is_nan(),
            Precision::Within { relative, absolute } => {
                (x.is_nan() && y.is_nan()) || x == y || {
                    y.is_finite() && (x - y).abs() <= relative * y.abs() + absolute
                }
            }
        }
    }
}

/// Compares results element by element.
///
/// # Errors
/// How many elements differ, and the first three of them by number.
pub(crate) fn compare(
    kind: Kind,
    precision: Precision,
    found: &[u8],
    expected: &[u8],
) -> Result<(), String> {
    if found.len() != expected.len() {
        return Err(format!("{} bytes instead of {}", found.len(), expected.len()));
    }
    let size = kind.size();
    let pairs = found.chunks(size).zip(expected.chunks(size)).enumerate();
    let wrong: Vec<String> = pairs
        .filter(|(_, (found, expected))| !precision.holds(kind, found, expected))
        .map(|(index, (found, expected))| {
            let hex = |bytes: &[u8]| bytes.iter().rev().map(|b| format!("{b:02x}")).collect();
            let (f, e): (String, String) = (hex(found), hex(expected));
            let (x, y) = (kind.number(found), kind.number(expected));
            format!("element {index} is {f} ({x:e}), not {e} ({y:e})")
        })
        .collect();
    match &wrong[..] {
        [] => Ok(()),
        some => {
            let first = some.iter().take(3).cloned().collect::<Vec<_>>().join("; ");
            Err(format!("{} of {} differ: {first}", some.len(), found.len() / size))
        }
    }
}

pub(crate) fn bytes32(values: &[u32]) -> Vec<u8> {
    values.iter().flat_map(|value| value.to_le_bytes()).collect()
}

pub(crate) fn bytes_f32(values: &[f32]) -> Vec<u8> {
    values.iter().flat_map(|value| value.to_le_bytes()).collect()
}
