//! Textures and surfaces. What a fetch gives is computed here as the CUDA C++ Programming Guide
//! describes it ("Texture Fetching"), and rounded as an H100 does.

use super::host::away;
use super::job::{Argument, Job, Kind, Launch, Picture, Precision, Reading, Shape, bytes32};
use super::table::Random;
use half::f16;

pub(crate) const U8: u32 = 0x01;
pub(crate) const U16: u32 = 0x02;
pub(crate) const U32: u32 = 0x03;
const S8: u32 = 0x08;
const S16: u32 = 0x09;
pub(crate) const S32: u32 = 0x0a;
const F16: u32 = 0x10;
pub(crate) const F32: u32 = 0x20;

/// `CUDA_ARRAY3D_LAYERED` and so on.
pub(crate) const LAYERED: u32 = 1;
pub(crate) const SURFACE: u32 = 2;
const CUBEMAP: u32 = 4;
const GATHER: u32 = 8;

/// `CU_TRSF_READ_AS_INTEGER` and so on.
const INTEGERS: u32 = 1;
const NORMALIZED: u32 = 2;
const SRGB: u32 = 0x10;

const WRAP: u32 = 0;
const CLAMP: u32 = 1;
const MIRROR: u32 = 2;
const BORDER: u32 = 3;
const MODES: [(&str, u32); 4] =
    [("wrap", WRAP), ("clamp", CLAMP), ("mirror", MIRROR), ("border", BORDER)];

/// A kernel gives each thread four words and keeps four words of each.
const ROW: usize = 4;

/// An array with random numbers that its format can hold.
pub(crate) fn picture(size: [usize; 3], format: u32, channels: u32) -> Picture {
    let shape = Shape::Array { size, flags: 0, levels: 1 };
    let bytes = Vec::new();
    let picture = Picture { shape, format, channels, bytes, reading: Reading::default() };
    picture.filled()
}

impl Picture {
    fn filled(mut self) -> Picture {
        let Shape::Array { levels, .. } = self.shape else { return self };
        let count: usize = (0..levels)
            .map(|level| self.level(level).map(|n| n.max(1)).iter().product::<usize>())
            .sum();
        let mut random = Random::new(7 + u64::from(self.format) + count as u64);
        self.bytes.clear();
        for _ in 0..count * self.channels as usize {
            let bits = random.next() >> 20;
            let number = (bits & 0xffff) as f32 / 655.36 - 50.0;
            match self.format {
                F32 => self.bytes.extend(number.to_le_bytes()),
                F16 => self.bytes.extend(f16::from_f32(number).to_le_bytes()),
                _ => {
                    let size = self.element() / self.channels as usize;
                    self.bytes.extend(&bits.to_le_bytes()[..size]);
                }
            }
        }
        self
    }

    pub(crate) fn flags(mut self, given: u32) -> Picture {
        if let Shape::Array { flags, .. } = &mut self.shape {
            *flags = given;
        }
        self.filled()
    }

    fn levels(mut self, given: usize) -> Picture {
        if let Shape::Array { levels, .. } = &mut self.shape {
            *levels = given;
        }
        self.filled()
    }

    fn reads(mut self, beyond: u32, filter: u32, flags: u32) -> Picture {
        let Picture { reading, .. } = &mut self;
        (reading.beyond, reading.filter, reading.flags) = ([beyond; 3], filter, flags);
        reading.border = [0.25, -2.0, 3.0, 7.0];
        self
    }

    /// Width, height and depth of a level, in elements.
    fn size(&self, level: usize) -> [i64; 3] {
        match self.shape {
            Shape::Array { .. } => self.level(level).map(|n| n.max(1) as i64),
            Shape::Linear => [(self.bytes.len() / self.element()) as i64, 1, 1],
            Shape::Rows { width, height, .. } => [width as i64, height as i64, 1],
        }
    }

    fn start(&self, level: usize) -> usize {
        let elements = |level| self.size(level).iter().product::<i64>() as usize;
        (0..level).map(elements).sum::<usize>() * self.element()
    }

    /// One number of an element as it is stored.
    pub(crate) fn stored(&self, level: usize, [x, y, z]: [i64; 3], channel: usize) -> u32 {
        let [width, height, _] = self.size(level);
        let element = self.element();
        let at = match self.shape {
            Shape::Rows { pitch, .. } => y as usize * pitch + x as usize * element,
            _ => self.start(level) + ((z * height + y) * width + x) as usize * element,
        };
        let size = element / self.channels as usize;
        let mut bits = [0; 4];
        bits[..size].copy_from_slice(&self.bytes[at + channel * size..][..size]);
        let bits = u32::from_le_bytes(bits);
        match self.format {
            S8 => bits as u8 as i8 as u32,
            S16 => bits as u16 as i16 as u32,
            _ => bits,
        }
    }

    fn is_integer(&self) -> bool {
        matches!(self.format, U32 | S32)
            || (!matches!(self.format, F16 | F32) && self.reading.flags & INTEGERS != 0)
    }

    /// Whether a number of an element is taken as sRGB: of two only the first.
    fn is_srgb(&self, channel: usize) -> bool {
        let converted = if self.channels == 4 { 3 } else { 1 };
        self.format == U8 && self.reading.flags & SRGB != 0 && channel < converted
    }

    /// One number of an element as fetches give it: what has no channel is 0.
    fn value(&self, level: usize, at: [i64; 3], channel: usize) -> f64 {
        if channel >= self.channels as usize {
            return 0.0;
        }
        let bits = self.stored(level, at, channel);
        let signed = f64::from(bits as i32);
        match self.format {
            _ if self.is_integer() => f64::from(bits),
            U8 if self.is_srgb(channel) => linear(signed / 255.0),
            U8 => signed / 255.0,
            U16 => signed / 65535.0,
            S8 => (signed / 127.0).max(-1.0),
            S16 => (signed / 32767.0).max(-1.0),
            F16 => f64::from(f16::from_bits(bits as u16).to_f32()),
            _ => f64::from(f32::from_bits(bits)),
        }
    }

    /// The element that an index means, in one direction; none is the border.
    fn index(&self, index: i64, size: i64, axis: usize) -> Option<i64> {
        let normalized = self.reading.flags & NORMALIZED != 0;
        match self.reading.beyond[axis] {
            WRAP if normalized => Some((index % size + size) % size),
            MIRROR if normalized => {
                let turn = (index % (2 * size) + 2 * size) % (2 * size);
                Some(turn.min(2 * size - 1 - turn))
            }
            BORDER => (0..size).contains(&index).then_some(index),
            _ => Some(index.max(0).min(size - 1)),
        }
    }

    /// One number of an element in steps of a mean, and how many steps are 1.
    fn steps(&self, level: usize, at: Option<[i64; 3]>, channel: usize) -> (f64, f64) {
        let unit = match self.format {
            _ if self.is_srgb(channel) => 1.0,
            U8 | U16 => 65535.0,
            S8 | S16 => 32767.0,
            _ => 1.0,
        };
        let Some(at) = at else { return (f64::from(self.reading.border[channel]) * unit, unit) };
        let there = channel < self.channels as usize;
        let stored = || f64::from(self.stored(level, at, channel) as i32);
        let number = match self.format {
            _ if !there || unit == 1.0 => self.value(level, at, channel),
            U8 => 257.0 * stored(),
            S8 => stored() * 32767.0 / 127.0,
            _ => stored(),
        };
        (number, unit)
    }

    /// Whether an index beside the image means the element at the edge.
    fn has_edge(&self, axis: usize) -> bool {
        let repeats = matches!(self.reading.beyond[axis], WRAP | MIRROR);
        self.reading.beyond[axis] == CLAMP || repeats && self.reading.flags & NORMALIZED == 0
    }

    /// Adds what is around a place to sums, with weights of 256ths that are `weight` together.
    fn add(&self, spot: &Spot, weight: i64, sums: &mut [f64; 4]) {
        let &Spot { level, at, dimensions, layer } = spot;
        let size = self.size(level);
        // One row is read as a plane, at its upper edge.
        let read = dimensions.max(2);
        let around: [(i64, i64); 3] = std::array::from_fn(|axis| {
            if axis >= read {
                return (0, 0);
            }
            let mut place = if axis < dimensions { at[axis] - 0.5 } else { -0.5 };
            if self.has_edge(axis) {
                place = place.clamp(0.0, size[axis] as f64 - 1.0);
            }
            let steps = (place * 256.0).round() as i64;
            (steps.div_euclid(256), steps.rem_euclid(256))
        });
        for corner in 0..1 << read {
            let second = [0, 1, 2].map(|axis| corner >> axis & 1 != 0);
            let mut part = share(weight, around[0].1, second[0], true);
            for axis in [2, 1] {
                part = share(part, around[axis].1, second[axis], second[0]);
            }
            let mut place = Some([0, 0, if dimensions < 3 { layer } else { 0 }]);
            for axis in 0..read {
                let found = self.index(around[axis].0 + i64::from(second[axis]), size[axis], axis);
                place = place.zip(found).map(|(mut place, index)| {
                    place[axis] = index;
                    place
                });
            }
            for (channel, sum) in sums.iter_mut().enumerate() {
                *sum += part as f64 * self.steps(level, place, channel).0 / 256.0;
            }
        }
    }

    /// The numbers that sums stand for.
    fn rounded(&self, sums: [f64; 4]) -> [f64; 4] {
        std::array::from_fn(|channel| {
            let (_, unit) = self.steps(0, None, channel);
            match self.format {
                F16 => away(f16::from_f64(sums[channel]), sums[channel]),
                _ if unit == 1.0 => away(sums[channel] as f32, sums[channel]),
                // The border may be beyond the limits.
                S8 | S16 => ((sums[channel] + 0.5).floor() / unit).clamp(-1.0, 1.0),
                _ => ((sums[channel] + 0.5).floor() / unit).clamp(0.0, 1.0),
            }
        })
    }

    /// What a fetch gives at a place in elements, of a layer.
    fn fetched(&self, level: usize, at: [f64; 3], dimensions: usize, layer: i64) -> [f64; 4] {
        if self.reading.filter == 1 && !self.is_integer() {
            let mut sums = [0.0; 4];
            self.add(&Spot { level, at, dimensions, layer }, 256, &mut sums);
            return self.rounded(sums);
        }
        let size = self.size(level);
        let mut place = Some([0, 0, if dimensions < 3 { layer } else { 0 }]);
        for axis in 0..dimensions {
            let found = self.index(at[axis].floor() as i64, size[axis], axis);
            place = place.zip(found).map(|(mut place, index)| {
                place[axis] = index;
                place
            });
        }
        std::array::from_fn(|channel| match place {
            Some(place) => self.value(level, place, channel),
            None => f64::from(self.reading.border[channel]),
        })
    }

    /// A coordinate in elements.
    fn scaled(&self, level: usize, at: [f64; 3]) -> [f64; 3] {
        let size = self.size(level).map(|n| n as f64);
        let normalized = self.reading.flags & NORMALIZED != 0;
        std::array::from_fn(|axis| if normalized { at[axis] * size[axis] } else { at[axis] })
    }

    /// The bits of what a fetch gives.
    fn bits(&self, numbers: [f64; 4]) -> [u32; 4] {
        if self.is_integer() {
            return numbers.map(|x| x as u32);
        }
        numbers.map(|x| (x as f32).to_bits())
    }
}

/// Where a mean is taken.
struct Spot {
    level: usize,
    /// In elements.
    at: [f64; 3],
    dimensions: usize,
    layer: i64,
}

/// The share that one of two neighbours has of a weight: one of the shares is rounded, and the other is the rest.
fn share(weight: i64, part: i64, second: bool, rounds_second: bool) -> i64 {
    let own = if rounds_second { part } else { 256 - part };
    let rounded = (weight * own + 128) / 256;
    if second == rounds_second { rounded } else { weight - rounded }
}

/// A number of sRGB, in the few steps that an H100 knows: fewer than 240 of a power of two.
fn linear(x: f64) -> f64 {
    let x = if x <= 0.04045 { x / 12.92 } else { ((x + 0.055) / 1.055).powf(2.4) };
    let steps = (7..=15).rev().map(|power| f64::from(1 << power));
    let steps = steps.into_iter().find(|steps| x * steps < 240.0).unwrap_or(128.0);
    (x * steps).round() / steps
}

pub(crate) type Words = [u32; ROW];

fn floats(words: Words) -> [f64; 4] {
    words.map(|word| f64::from(f32::from_bits(word)))
}

/// A kernel `k(rows in, rows out, texture, surface, rows)`: `%i0` to `%i3` (or `%f0` to `%f3`) are
/// the words of a row, `%o0` to `%o3` (or `%g0` to `%g3`, if they are floating-point numbers) are kept.
pub(crate) fn kernel(text: &str) -> String {
    let ends = if text.contains("%g0") {
        "mov.b32 %o0, %g0; mov.b32 %o1, %g1; mov.b32 %o2, %g2; mov.b32 %o3, %g3;"
    } else {
        ""
    };
    format!(
        ".version 8.0\n.target sm_80\n.address_size 64\n\
         .visible .entry k(.param .u64 p0, .param .u64 p1, .param .u64 p2, .param .u64 p3, .param .u32 p4)\n{{\n\
         .reg .b32 %i<8>; .reg .b32 %o<8>; .reg .f32 %f<8>; .reg .f32 %g<8>; .reg .b64 %a<9>;\n\
         .reg .b16 %h<9>; .reg .f16 %hf<5>; .reg .b64 %t, %s; .reg .b32 %n, %row; .reg .pred %out, %p;\n\
         mov.u32 %row, %tid.x; mov.u32 %n, %ctaid.x; mad.lo.u32 %row, %n, 128, %row;\n\
         ld.param.u32 %n, [p4]; setp.ge.u32 %out, %row, %n; @%out ret;\n\
         ld.param.u64 %a1, [p0]; mad.wide.u32 %a1, %row, 16, %a1;\n\
         ld.param.u64 %a2, [p1]; mad.wide.u32 %a2, %row, 16, %a2;\n\
         ld.param.u64 %t, [p2]; ld.param.u64 %s, [p3];\n\
         ld.global.v4.b32 {{%i0, %i1, %i2, %i3}}, [%a1];\n\
         mov.b32 %f0, %i0; mov.b32 %f1, %i1; mov.b32 %f2, %i2; mov.b32 %f3, %i3;\n\
         mov.b32 %o0, 0; mov.b32 %o1, 0; mov.b32 %o2, 0; mov.b32 %o3, 0;\n\
         {text}\n{ends}\n\
         st.global.v4.b32 [%a2], {{%o0, %o1, %o2, %o3}};\nret;\n}}\n"
    )
}

/// A job in which each row gives four words.
pub(crate) fn job(
    name: &str,
    text: &str,
    picture: &Picture,
    rows: &[Words],
    host: impl Fn(&Picture, Words) -> [u32; 4],
) -> Job {
    let count = rows.len();
    let input: Vec<u32> = rows.iter().flatten().copied().collect();
    let expected: Vec<u32> = rows.iter().flat_map(|row| host(picture, *row)).collect();
    let is_surface = matches!(picture.shape, Shape::Array { flags, .. } if flags & SURFACE != 0);
    let surface = if is_surface { Argument::Surface(0) } else { Argument::Buffer(0) };
    let arguments = vec![
        Argument::Buffer(0),
        Argument::Buffer(1),
        Argument::Texture(0),
        surface,
        Argument::U32(count as u32),
    ];
    let shape = (count.div_ceil(128) as u32, 128, 0);
    Job {
        name: format!("{text} {name}"),
        ptx: kernel(text),
        buffers: vec![bytes32(&input), vec![0; 16 * count]],
        pictures: vec![picture.clone()],
        launches: vec![Launch { kernel: "k", shape, arguments }],
        result: 1,
        kind: if text.contains("%g0") { Kind::F32 } else { Kind::B32 },
        expected: bytes32(&expected),
        precision: Precision::Exact,
        golden: Precision::Exact,
    }
}

/// Places: within the image and around it, none at an edge between two elements.
fn places(picture: &Picture, count: usize) -> Vec<Words> {
    let mut random = Random::new(count as u64);
    let size = picture.size(0).map(|n| n as f32);
    let normalized = picture.reading.flags & NORMALIZED != 0;
    (0..count)
        .map(|_| {
            let mut word = |axis: usize| {
                // Steps of an eighth, from one width before to one behind, off the edges by a bit.
                let steps = (random.next() >> 33) % (24 * size[axis] as u64);
                let at = steps as f32 / 8.0 - size[axis] + 0.0322;
                (if normalized { at / size[axis] } else { at }).to_bits()
            };
            [word(0), word(1), word(2), 0]
        })
        .collect()
}

pub(crate) fn jobs() -> Vec<Job> {
    let mut jobs = Vec::new();
    plain(&mut jobs);
    formats(&mut jobs);
    layers(&mut jobs);
    cubes(&mut jobs);
    details(&mut jobs);
    memory(&mut jobs);
    gathers(&mut jobs);
    results(&mut jobs);
    queries(&mut jobs);
    jobs
}

const SHAPES: [(&str, [usize; 3], &str); 3] = [
    ("1d", [13, 0, 0], "{%f0}"),
    ("2d", [13, 7, 0], "{%f0, %f1}"),
    ("3d", [5, 4, 3], "{%f0, %f1, %f2, %f2}"),
];

/// All ways to read beside an image, in each dimension.
fn plain(jobs: &mut Vec<Job>) {
    for (geometry, size, place) in SHAPES {
        let dimensions = size.iter().filter(|n| **n != 0).count();
        for (mode_name, mode) in MODES {
            for (filter_name, filter) in [("point", 0), ("linear", 1)] {
                for (scale, flags) in [("elements", 0), ("normalized", NORMALIZED)] {
                    let picture = picture(size, F32, 4).reads(mode, filter, flags);
                    let rows = places(&picture, 200);
                    let name = format!("{mode_name} {filter_name} {scale}");
                    let text =
                        format!("tex.{geometry}.v4.f32.f32 {{%g0, %g1, %g2, %g3}}, [%t, {place}];");
                    jobs.push(job(&name, &text, &picture, &rows, move |picture, row| {
                        let at = picture.scaled(0, [0, 1, 2].map(|axis| floats(row)[axis]));
                        picture.bits(picture.fetched(0, at, dimensions, 0))
                    }));
                }
            }
        }
    }
}

fn fetch2d(picture: &Picture, row: Words) -> [u32; 4] {
    let [x, y, ..] = floats(row);
    picture.bits(picture.fetched(0, picture.scaled(0, [x, y, 0.0]), 2, 0))
}

/// All formats, as integers and as numbers from 0 or -1 to 1.
fn formats(jobs: &mut Vec<Job>) {
    let formats = [U8, U16, U32, S8, S16, S32, F16, F32];
    let names = ["u8", "u16", "u32", "s8", "s16", "s32", "f16", "f32"];
    for (format, format_name) in formats.into_iter().zip(names) {
        for channels in [1, 2, 4] {
            for (how, flags, filter) in [
                ("as integers", INTEGERS, 0),
                ("as numbers", 0, 0),
                ("filtered", NORMALIZED, 1),
                ("as sRGB", SRGB, 0),
            ] {
                let small = matches!(format, U8 | U16 | S8 | S16);
                let is_float = matches!(format, F16 | F32);
                let pointless = match how {
                    "as integers" => is_float,
                    "as sRGB" => format != U8 || channels == 1,
                    _ => !small && !is_float,
                };
                if pointless {
                    continue;
                }
                let picture = picture([13, 7, 0], format, channels).reads(CLAMP, filter, flags);
                let integer = picture.is_integer();
                let (ty, to) = match format {
                    _ if !integer => ("f32", "g"),
                    S8 | S16 | S32 => ("s32", "o"),
                    _ => ("u32", "o"),
                };
                let name = format!("{format_name} by {channels} {how}");
                let text = format!(
                    "tex.2d.v4.{ty}.f32 {{%{to}0, %{to}1, %{to}2, %{to}3}}, [%t, {{%f0, %f1}}];"
                );
                let rows = places(&picture, 100);
                let job = job(&name, &text, &picture, &rows, fetch2d);
                // Of means of signed bytes an H100 gives a few as the next step.
                let near = Precision::Within { relative: 0.0, absolute: 1.01 / 32767.0 };
                jobs.push(match how {
                    "filtered" if format == S8 => Job { golden: near, ..job },
                    _ => job,
                });
            }
        }
    }
}

fn layers(jobs: &mut Vec<Job>) {
    for (geometry, size, place) in
        [("a1d", [13, 0, 5], "{%i3, %f0}"), ("a2d", [13, 7, 5], "{%i3, %f0, %f1, %f1}")]
    {
        let dimensions = if size[1] == 0 { 1 } else { 2 };
        let picture = picture(size, F32, 2).flags(LAYERED).reads(CLAMP, 1, NORMALIZED);
        let mut rows = places(&picture, 120);
        // Layers that are not there are the last one.
        rows.iter_mut().enumerate().for_each(|(index, row)| row[3] = index as u32 % 7);
        let text = format!("tex.{geometry}.v4.f32.f32 {{%g0, %g1, %g2, %g3}}, [%t, {place}];");
        jobs.push(job("layers", &text, &picture, &rows, move |picture, row| {
            let [x, y, ..] = floats(row);
            let at = picture.scaled(0, [x, y, 0.0]);
            picture.bits(picture.fetched(0, at, dimensions, i64::from(row[3]).min(4)))
        }));
    }
}

/// The table of the guide: the side, and the place on it from 0 to 1.
fn side([x, y, z]: [f64; 3]) -> (i64, f64, f64) {
    let (face, m, s, t) = match (x.abs(), y.abs(), z.abs()) {
        (a, b, c) if a >= b && a >= c && x >= 0.0 => (0, x, -z, -y),
        (a, b, c) if a >= b && a >= c => (1, -x, z, -y),
        (_, b, c) if b >= c && y >= 0.0 => (2, y, x, z),
        (_, b, c) if b >= c => (3, -y, x, -z),
        _ if z >= 0.0 => (4, z, x, -y),
        _ => (5, -z, -x, -y),
    };
    (face, (s / m + 1.0) / 2.0, (t / m + 1.0) / 2.0)
}

fn cubes(jobs: &mut Vec<Job>) {
    let mut random = Random::new(3);
    let rows: Vec<Words> = (0..300)
        .map(|index| {
            // The middle of an element of a side, in all directions.
            let mut axis = || (random.next() >> 40) % 5;
            let [a, b] = [axis(), axis()].map(|at| (at as f32 + 0.5) / 2.5 - 1.0);
            let main = if index % 2 == 0 { 1.0 } else { -1.0 };
            let [x, y, z] = match index % 3 {
                0 => [main, a, b],
                1 => [a, main, b],
                _ => [a, b, main],
            };
            [x, y, z].map(f32::to_bits).into_iter().chain([index % 4]).collect::<Vec<_>>()
        })
        .map(|row| row.try_into().expect("four words"))
        .collect();
    for (geometry, layers, flags, place) in [
        ("cube", 6, CUBEMAP, "{%f0, %f1, %f2, %f2}"),
        ("acube", 18, CUBEMAP | LAYERED, "{%i3, %f0, %f1, %f2}"),
    ] {
        let picture = picture([5, 5, layers], F32, 1).flags(flags).reads(CLAMP, 0, NORMALIZED);
        let text = format!("tex.{geometry}.v4.f32.f32 {{%g0, %g1, %g2, %g3}}, [%t, {place}];");
        jobs.push(job("sides", &text, &picture, &rows, move |picture, row| {
            let [x, y, z, _] = floats(row);
            let (face, s, t) = side([x, y, z]);
            let cube = if layers == 6 { 0 } else { i64::from(row[3]).min(2) };
            picture.bits(picture.fetched(0, picture.scaled(0, [s, t, 0.0]), 2, 6 * cube + face))
        }));
    }
}

/// Levels: by number, and by how fast coordinates change.
fn details(jobs: &mut Vec<Job>) {
    for (name, level_filter, filter) in [("nearest level", 0, 0), ("between levels", 1, 1)] {
        let mut picture = picture([16, 8, 0], F32, 4).levels(4).reads(CLAMP, filter, NORMALIZED);
        picture.reading.level_filter = level_filter;
        picture.reading.levels = [0.0, 2.5];
        let mut rows = places(&picture, 150);
        let levels = [-1.0f32, 0.0, 0.25, 0.75, 1.0, 1.75, 2.25, 2.5, 9.0];
        rows.iter_mut().enumerate().for_each(|(index, row)| {
            row[2] = levels[index % levels.len()].to_bits();
        });
        let at_level = move |picture: &Picture, row: Words, level: f64| {
            let [x, y, ..] = floats(row);
            let level = level.clamp(0.0, 2.5);
            if level_filter == 0 {
                let level = (level + 0.5).floor() as usize;
                return picture.bits(picture.fetched(
                    level,
                    picture.scaled(level, [x, y, 0.0]),
                    2,
                    0,
                ));
            }
            let first = level.floor() as usize;
            let part = ((level - level.floor()) * 256.0).round() as i64;
            let mut sums = [0.0; 4];
            for (level, weight) in [(first, 256 - part), ((first + 1).min(3), part)] {
                let at = picture.scaled(level, [x, y, 0.0]);
                let spot = Spot { level, at, dimensions: 2, layer: 0 };
                picture.add(&spot, weight, &mut sums);
            }
            picture.bits(picture.rounded(sums))
        };
        let text = "tex.level.2d.v4.f32.f32 {%g0, %g1, %g2, %g3}, [%t, {%f0, %f1}], %f2;";
        let by_level = job(name, text, &picture, &rows, move |picture, row| {
            at_level(picture, row, floats(row)[2])
        });
        // As many elements from pixel to pixel as the level's power of two, along one side.
        rows.iter_mut().enumerate().for_each(|(index, row)| {
            row[3] = ((index % 3) as f32).exp2().to_bits();
        });
        let text = "mul.f32 %f4, %f3, 0.0625; mul.f32 %f5, %f3, 0.125; mov.f32 %f6, 0f00000000; \
            tex.grad.2d.v4.f32.f32 {%g0, %g1, %g2, %g3}, [%t, {%f0, %f1}], {%f4, %f6}, {%f6, %f5};";
        let by_gradient = job(name, text, &picture, &rows, move |picture, row| {
            at_level(picture, row, floats(row)[3].log2())
        });
        jobs.extend([by_level, by_gradient]);
    }
}

/// Plain memory, and rows of it.
fn memory(jobs: &mut Vec<Job>) {
    let array = picture([64, 0, 0], F32, 2);
    let linear = Picture { shape: Shape::Linear, ..array };
    let rows: Vec<Words> = (0..100u32).map(|index| [index.wrapping_sub(10), 0, 0, 0]).collect();
    let text = "tex.1d.v4.f32.s32 {%g0, %g1, %g2, %g3}, [%t, {%i0}];";
    // Beyond the end there are zeros.
    jobs.push(job("plain memory", text, &linear, &rows, |picture, [x, ..]| {
        let inside = (0..64).contains(&(x as i32));
        let value = |channel| picture.value(0, [i64::from(x), 0, 0], channel);
        picture.bits(if inside { [0, 1, 2, 3].map(value) } else { [0.0; 4] })
    }));
    let array = picture([16, 6, 0], F32, 1).reads(WRAP, 1, NORMALIZED);
    let shape = Shape::Rows { width: 13, height: 6, pitch: 64 };
    let pitched = Picture { shape, ..array };
    let rows = places(&pitched, 120);
    let text = "tex.2d.v4.f32.f32 {%g0, %g1, %g2, %g3}, [%t, {%f0, %f1}];";
    jobs.push(job("rows in plain memory", text, &pitched, &rows, fetch2d));
}

fn gathers(jobs: &mut Vec<Job>) {
    for (index, name) in ["r", "g", "b", "a"].into_iter().enumerate() {
        let picture = picture([13, 7, 0], F32, 4).flags(GATHER).reads(CLAMP, 1, 0);
        let rows = places(&picture, 100);
        let text = format!("tld4.{name}.2d.v4.f32.f32 {{%g0, %g1, %g2, %g3}}, [%t, {{%f0, %f1}}];");
        jobs.push(job("four around", &text, &picture, &rows, move |picture, row| {
            let [x, y, ..] = floats(row);
            let (x, y) = ((x - 0.5).floor() as i64, (y - 0.5).floor() as i64);
            let value =
                |x: i64, y: i64| picture.value(0, [x.clamp(0, 12), y.clamp(0, 6), 0], index);
            picture.bits([value(x, y + 1), value(x + 1, y + 1), value(x + 1, y), value(x, y)])
        }));
    }
}

/// Half precision, and whether there is memory.
fn results(jobs: &mut Vec<Job>) {
    let picture = picture([13, 7, 0], F16, 4).reads(CLAMP, 0, 0);
    let rows = places(&picture, 60);
    let halves = |picture: &Picture, row: Words| {
        let bits = fetch2d(picture, row).map(|bits| f16::from_f32(f32::from_bits(bits)).to_bits());
        let [r, g, b, a] = bits.map(u32::from);
        [r | g << 16, b | a << 16, 0, 0]
    };
    let text = "tex.2d.v4.f16.f32 {%h0, %h1, %h2, %h3}, [%t, {%f0, %f1}]; \
        mov.b32 %o0, {%h0, %h1}; mov.b32 %o1, {%h2, %h3};";
    jobs.push(job("half precision", text, &picture, &rows, halves));
    let text = "tex.2d.v2.f16x2.f32 {%o0, %o1}, [%t, {%f0, %f1}];";
    jobs.push(job("half precision", text, &picture, &rows, halves));
    let text = "tex.2d.v4.f32.f32 {%g0, %g1, %g2, %g3}|%p, [%t, {%f0, %f1}]; \
        selp.f32 %g3, 0f3F800000, 0f00000000, %p;";
    jobs.push(job("and whether there is memory", text, &picture, &rows, |picture, row| {
        let [r, g, b, _] = fetch2d(picture, row);
        [r, g, b, 1f32.to_bits()]
    }));
}

fn queries(jobs: &mut Vec<Job>) {
    let solid = picture([5, 4, 3], U8, 4).flags(SURFACE).reads(CLAMP, 0, INTEGERS);
    let text = "txq.width.b32 %o0, [%t]; txq.height.b32 %o1, [%t]; txq.depth.b32 %o2, [%t];";
    jobs.push(job("of a texture", text, &solid, &[[0; 4]], |_, _| [5, 4, 3, 0]));
    let text = "suq.width.b32 %o0, [%s]; suq.height.b32 %o1, [%s]; suq.depth.b32 %o2, [%s];";
    jobs.push(job("of a surface", text, &solid, &[[0; 4]], |_, _| [5, 4, 3, 0]));
}
