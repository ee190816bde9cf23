//! What a fetch from a texture gives.
//!
//! Places between elements are known in steps of 1/256, as the CUDA C++ Programming Guide describes
//! ("Texture Fetching"): weights have eight bits behind the point. How weights and means are rounded is not
//! documented; it is taken from what an H100 gives (`tests/golden/h100.bin`).

use super::block::Room;
use super::context::{Fault, Step};
use super::memory::{Use, read};
use super::warp::Warp;
use crate::ptx::code::{Detail, Fetch, FetchResult, Lanes, NONE};
use crate::ptx::image::{Beyond, Channel, Image, Level, Texture};
use crate::ptx::kernels::rounding::{F16, Round, to_small};
use half::f16;

/// Steps between two elements, and the sum of the weights of a mean.
const STEPS: i64 = 256;

/// The numbers of an element as the type of the image has them, in 32 bits each.
type Bits = [u32; 4];
/// The numbers of an element or of a mean.
type Numbers = [f64; 4];

/// Where a fetch is made.
struct Spot {
    at: [f64; 3],
    offset: [i64; 3],
    layer: u32,
    dimensions: u8,
    /// The coordinates are numbers of elements, and nothing is added up.
    integers: bool,
    /// The coordinates are on a side of a cube, from 0 to 1.
    cube: bool,
}

/// The neighbours of a place in one direction: the first and the second, and the weight of the
/// second in [`STEPS`].
#[derive(Clone, Copy)]
struct Between(i64, i64, i64);

/// Two levels, and the weight of the second in [`STEPS`].
#[derive(Clone, Copy)]
struct Levels(usize, usize, i64);

/// Divides a weight between two neighbours of which the second has a part. The share of one of them is
/// rounded, from the half on up, and the other gets the rest.
fn divided(weight: i64, part: i64, rounds_second: bool) -> [i64; 2] {
    let share = |part: i64| (weight * part + STEPS / 2) / STEPS;
    if rounds_second {
        [weight - share(part), share(part)]
    } else {
        [share(STEPS - part), weight - share(STEPS - part)]
    }
}

/// Rounds to so many binary digits behind the first one, from the half on away from zero; the digits of
/// numbers below two to the power `least` are those of that power.
fn rounded(x: f64, digits: i32, least: i32) -> f64 {
    if !x.is_finite() {
        return x;
    }
    let exponent = (x.to_bits() >> 52 & 0x7ff) as i32 - 1023;
    let unit = 2f64.powi(exponent.max(least) - digits);
    (x / unit).round() * unit
}

/// Numbers of single precision from here on are whole ones.
const FAR: f64 = 8_388_608.0;

/// The number of an element, from 0, that an index means; none is the border.
fn inside(index: i64, size: u32, beyond: Beyond) -> Option<i64> {
    let size = i64::from(size.max(1));
    match beyond {
        Beyond::Clamp => Some(index.clamp(0, size - 1)),
        Beyond::Wrap => Some(index.rem_euclid(size)),
        Beyond::Mirror => {
            let at = index.rem_euclid(2 * size);
            Some(if at < size { at } else { 2 * size - 1 - at })
        }
        Beyond::Border => (0..size).contains(&index).then_some(index),
    }
}

/// The side of a cube that a direction meets, and where, from 0 to 1.
fn side([x, y, z]: [f64; 3]) -> (u32, [f64; 3]) {
    let (face, m, s, t) = if x.abs() >= y.abs() && x.abs() >= z.abs() {
        if x >= 0.0 { (0, x, -z, -y) } else { (1, -x, z, -y) }
    } else if y.abs() >= z.abs() {
        if y >= 0.0 { (2, y, x, z) } else { (3, -y, x, -z) }
    } else if z >= 0.0 {
        (4, z, x, -y)
    } else {
        (5, -z, -x, -y)
    };
    (face, [(s / m + 1.0) / 2.0, (t / m + 1.0) / 2.0, 0.0])
}

/// A byte of sRGB as a number with at most eight digits, of which there are fewer than 15/16 of 256 steps; the
/// smallest step is two to the power -15.
fn from_srgb(byte: u32) -> f64 {
    let x = f64::from(byte) / 255.0;
    let linear = if x <= 0.04045 { x / 12.92 } else { ((x + 0.055) / 1.055).powf(2.4) };
    let mut steps = 2f64.powi(15);
    while linear * steps >= 240.0 && steps > 128.0 {
        steps /= 2.0;
    }
    (linear * steps).round() / steps
}

/// The number that bits stand for; those of small integers are from 0 or -1 to 1.
fn number(channel: Channel, bits: u32) -> f64 {
    match channel {
        Channel::U8 => f64::from(bits) / 255.0,
        Channel::U16 => f64::from(bits) / 65535.0,
        Channel::S8 => (f64::from(bits as i32) / 127.0).max(-1.0),
        Channel::S16 => (f64::from(bits as i32) / 32767.0).max(-1.0),
        Channel::F16 => f64::from(f16::from_bits(bits as u16).to_f32()),
        _ => f64::from(f32::from_bits(bits)),
    }
}

/// How many steps of a mean are 1: means of small integers are numbers of 16 bits.
fn unit(channel: Channel) -> f64 {
    match channel {
        Channel::U8 | Channel::U16 => 65535.0,
        Channel::S8 | Channel::S16 => 32767.0,
        _ => 1.0,
    }
}

impl Texture {
    /// Whether a number of elements is taken as sRGB: of two numbers the first.
    fn is_srgb(&self, index: usize) -> bool {
        let Image { channel, channels, .. } = self.image;
        let converted = if channels == 4 { 3 } else { 1 };
        self.sampler.srgb && channel == Channel::U8 && index < converted
    }

    fn numbers(&self, bits: Bits) -> Numbers {
        std::array::from_fn(|index| match self.is_srgb(index) {
            true => from_srgb(bits[index]),
            false => number(self.image.channel, bits[index]),
        })
    }

    /// The numbers of an element in steps of a mean.
    fn parts(&self, bits: Bits) -> Numbers {
        std::array::from_fn(|index| match self.image.channel {
            Channel::U8 if self.is_srgb(index) => from_srgb(bits[index]),
            Channel::U8 => f64::from(bits[index] * 257),
            Channel::U16 => f64::from(bits[index]),
            Channel::S8 => f64::from(bits[index] as i32) * 32767.0 / 127.0,
            Channel::S16 => f64::from(bits[index] as i32),
            channel => number(channel, bits[index]),
        })
    }

    /// The colour of the border in steps of a mean.
    fn border_parts(&self) -> Numbers {
        let unit_of = |index| if self.is_srgb(index) { 1.0 } else { unit(self.image.channel) };
        std::array::from_fn(|index| f64::from(self.sampler.border[index]) * unit_of(index))
    }

    /// What a mean in steps gives.
    fn finished(&self, mean: Numbers) -> Numbers {
        let channel = self.image.channel;
        let unit = unit(channel);
        std::array::from_fn(|index| match channel {
            Channel::U8 if self.is_srgb(index) => rounded(mean[index], 23, -126),
            Channel::U8 | Channel::U16 => (mean[index] + 0.5).floor().clamp(0.0, unit) / unit,
            Channel::S8 | Channel::S16 => (mean[index] + 0.5).floor().clamp(-unit, unit) / unit,
            Channel::F16 => rounded(mean[index], 10, -14),
            _ => rounded(mean[index], 23, -126),
        })
    }

    /// What is beside the image in a direction: repetition needs coordinates from 0 to 1.
    fn beyond(&self, axis: usize, spot: &Spot) -> Beyond {
        match self.sampler.beyond[axis] {
            _ if spot.cube => Beyond::Clamp,
            _ if self.image.linear => Beyond::Border,
            Beyond::Wrap | Beyond::Mirror if !self.sampler.normalized => Beyond::Clamp,
            beyond => beyond,
        }
    }

    /// The levels to read.
    fn levels(&self, wanted: f64) -> Levels {
        let sampler = &self.sampler;
        let [least, greatest] = sampler.levels.map(f64::from);
        let last = self.image.levels.len() - 1;
        let level = (wanted + f64::from(sampler.bias)).min(greatest).max(least);
        let level = level.min(last as f64).max(0.0);
        if !sampler.filters_levels {
            let near = ((level + 0.5).floor() as usize).min(last);
            return Levels(near, near, 0);
        }
        let steps = (level * STEPS as f64).round() as i64;
        let first = ((steps / STEPS) as usize).min(last);
        Levels(first, (first + 1).min(last), steps - first as i64 * STEPS)
    }

    /// The elements around a place in one direction.
    fn between(&self, spot: &Spot, level: &Level, axis: usize, filters: bool) -> Between {
        let scale = if spot.cube || self.sampler.normalized && !spot.integers {
            f64::from(level.size[axis].max(1))
        } else {
            1.0
        };
        let is_there = axis < usize::from(spot.dimensions);
        let (at, offset) = if is_there { (spot.at[axis], spot.offset[axis]) } else { (0.0, 0) };
        // A place so far off that it is a whole number is brought near, where that changes nothing.
        let is_far = !spot.integers && at.is_finite() && at.abs() >= FAR;
        let at = match self.beyond(axis, spot) {
            Beyond::Wrap if is_far => 0.0,
            Beyond::Mirror if is_far => at % 2.0,
            _ => at,
        };
        let most = 2f64.powi(40);
        let at = (at * scale).clamp(-most, most);
        if !filters {
            let index = at.floor() as i64 + offset;
            return Between(index, index, 0);
        }
        let steps = ((at - 0.5) * STEPS as f64).round() as i64;
        let first = steps.div_euclid(STEPS) + offset;
        // Beside an image whose edge goes on there is only one neighbour.
        let last = i64::from(level.size[axis].max(1)) - 1;
        let beside = self.beyond(axis, spot) == Beyond::Clamp && !(0..last).contains(&first);
        Between(first, first + 1, if beside { 0 } else { steps.rem_euclid(STEPS) })
    }
}

/// Reads an element.
fn element(room: &mut Room<'_>, image: &Image, level: &Level, at: [i64; 3]) -> Step<Bits> {
    let size = image.channel.size();
    let whole = u64::from(size) * u64::from(image.channels);
    let [x, y, z] = at.map(|at| at as u64);
    let address = level
        .address
        .wrapping_add(z.wrapping_mul(level.plane))
        .wrapping_add(y.wrapping_mul(level.pitch))
        .wrapping_add(x.wrapping_mul(whole));
    let mut bits = [0; 4];
    for (index, slot) in bits.iter_mut().take(usize::from(image.channels)).enumerate() {
        let at = address.wrapping_add(index as u64 * u64::from(size));
        if at & (u64::from(size) - 1) != 0 {
            return Err(Fault::Misaligned(at, usize::from(size)));
        }
        room.mapped.check(Use::Read, at, usize::from(size))?;
        // SAFETY: checked to be mapped, and aligned.
        let value = unsafe { read(at, size) } as u32;
        *slot = match image.channel {
            Channel::S8 => i32::from(value as i8) as u32,
            Channel::S16 => i32::from(value as i16) as u32,
            _ => value,
        };
    }
    Ok(bits)
}

/// One texture, as the lanes of a warp read it.
struct Reader<'r, 'a> {
    room: &'r mut Room<'a>,
    texture: &'r Texture,
}

impl Reader<'_, '_> {
    /// The bits of an element; none is the border.
    fn bits(&mut self, spot: &Spot, level: &Level, at: [i64; 3]) -> Step<Option<Bits>> {
        let image = &self.texture.image;
        let mut found = [0; 3];
        for axis in 0..usize::from(spot.dimensions.max(2)) {
            let beyond = self.texture.beyond(axis, spot);
            match inside(at[axis], level.size[axis], beyond) {
                Some(index) => found[axis] = index,
                None => return Ok(None),
            }
        }
        if spot.dimensions < 3 {
            let last = level.size[2].max(1) - 1;
            found[2] = i64::from(spot.layer.min(last));
        }
        element(self.room, image, level, found).map(Some)
    }

    fn numbers(&mut self, spot: &Spot, level: &Level, at: [i64; 3]) -> Step<Numbers> {
        let found = self.bits(spot, level, at)?;
        let texture = self.texture;
        let border = || texture.sampler.border.map(f64::from);
        Ok(found.map_or_else(border, |bits| texture.numbers(bits)))
    }

    /// Adds the elements around a place to a sum, with weights whose sum is `weight`. An image of one direction
    /// is one row, and the place is on the upper edge of it: half of what is read is above.
    fn add(&mut self, spot: &Spot, level: &Level, weight: i64, sum: &mut Numbers) -> Step<()> {
        let texture = self.texture;
        let read = usize::from(spot.dimensions.max(2));
        let [x, y, z]: [Between; 3] = std::array::from_fn(|axis| match axis < read {
            true => texture.between(spot, level, axis, true),
            false => Between(0, 0, 0),
        });
        for (second, weight) in [false, true].into_iter().zip(divided(weight, x.2, true)) {
            let column = if second { x.1 } else { x.0 };
            for (plane, weight) in [z.0, z.1].into_iter().zip(divided(weight, z.2, second)) {
                for (row, weight) in [y.0, y.1].into_iter().zip(divided(weight, y.2, second)) {
                    if weight == 0 {
                        continue;
                    }
                    let found = self.bits(spot, level, [column, row, plane])?;
                    let parts =
                        found.map_or_else(|| texture.border_parts(), |bits| texture.parts(bits));
                    sum.iter_mut().zip(parts).for_each(|(sum, x)| *sum += weight as f64 * x);
                }
            }
        }
        Ok(())
    }

    /// The weighted mean of the elements around a place, of two levels.
    fn mean(&mut self, spot: &Spot, Levels(first, second, part): Levels) -> Step<Numbers> {
        let texture = self.texture;
        let mut sum = [0.0; 4];
        for (level, weight) in [(first, STEPS - part), (second, part)] {
            if weight != 0 {
                self.add(spot, &texture.image.levels[level], weight, &mut sum)?;
            }
        }
        Ok(texture.finished(sum.map(|x| x / STEPS as f64)))
    }

    /// The numbers of the element at a place, or of two levels their mean.
    fn at(&mut self, spot: &Spot, Levels(first, second, part): Levels) -> Step<Numbers> {
        let texture = self.texture;
        let mut one = |level: usize| {
            let level = &texture.image.levels[level];
            let at = std::array::from_fn(|axis| texture.between(spot, level, axis, false).0);
            self.numbers(spot, level, at)
        };
        let numbers = one(first)?;
        if part == 0 {
            return Ok(numbers);
        }
        let (other, part) = (one(second)?, part as f64 / STEPS as f64);
        Ok(std::array::from_fn(|i| numbers[i] * (1.0 - part) + other[i] * part))
    }

    /// One element's integers.
    fn nearest(&mut self, spot: &Spot, level: &Level) -> Step<Bits> {
        let at = std::array::from_fn(|axis| self.texture.between(spot, level, axis, false).0);
        let border = self.texture.sampler.border.map(|x| x as i32 as u32);
        Ok(self.bits(spot, level, at)?.unwrap_or(border))
    }

    /// One number of each of the four elements around a place.
    fn gather(&mut self, spot: &Spot, channel: usize) -> Step<Bits> {
        let texture = self.texture;
        let level = &texture.image.levels[0];
        let [x, y] = [0, 1].map(|axis| texture.between(spot, level, axis, true));
        let mut found = [0; 4];
        for (slot, at) in
            found.iter_mut().zip([[x.0, y.1, 0], [x.1, y.1, 0], [x.1, y.0, 0], [x.0, y.0, 0]])
        {
            *slot = if texture.gives_floats() {
                (self.numbers(spot, level, at)?[channel] as f32).to_bits()
            } else {
                self.bits(spot, level, at)?.map_or(0, |bits| bits[channel])
            };
        }
        Ok(found)
    }

    /// The four numbers of a fetch: what an element has no number for is 0, also the last.
    fn fetch(&mut self, spot: &Spot, level: f64, gather: Option<u8>) -> Step<Bits> {
        let texture = self.texture;
        let channels = usize::from(texture.image.channels);
        if let Some(channel) = gather.map(|channel| usize::from(channel & 3)) {
            return if channel < channels { self.gather(spot, channel) } else { Ok([0; 4]) };
        }
        let levels = texture.levels(level);
        let mut bits = if !texture.gives_floats() {
            self.nearest(spot, &texture.image.levels[levels.0])?
        } else {
            let filters = texture.sampler.filters && !spot.integers;
            let found = if filters { self.mean(spot, levels)? } else { self.at(spot, levels)? };
            found.map(|x| (x as f32).to_bits())
        };
        bits[channels..].fill(0);
        Ok(bits)
    }
}

impl Warp<'_> {
    /// Where a lane reads, and at which level.
    fn spot(&self, fetch: &Fetch, texture: &Texture, lane: usize) -> (Spot, f64) {
        let coordinate = |bits: u64| match fetch.integers {
            true => f64::from(bits as u32 as i32),
            false => f64::from(f32::from_bits(bits as u32)),
        };
        let place = &fetch.place;
        let values = |sources: [u32; 3]| sources.map(|s| coordinate(self.lanes(s)[lane]));
        let mut at = values(place.at);
        let mut layer = self.layer(place, lane);
        let offset = fetch.offset.map(|source| i64::from(self.lanes(source)[lane] as u32 as i32));
        let size = texture.image.levels[0].size.map(|n| f64::from(n.max(1)));
        let scale = |axis: usize| if texture.sampler.normalized { size[axis] } else { 1.0 };
        let level = match fetch.detail {
            Detail::Base => 0.0,
            Detail::Level(source) => coordinate(self.lanes(source)[lane]),
            Detail::Gradient(x, y) => {
                let length = |change: [f64; 3]| {
                    (0..3).map(|axis| (change[axis] * scale(axis)).powi(2)).sum::<f64>().sqrt()
                };
                let longest = length(values(x)).max(length(values(y)));
                if longest > 0.0 { longest.log2() } else { f64::MIN }
            }
        };
        if place.cube {
            let (face, on_face) = side(at);
            at = on_face;
            let last = (size[2] as u32 / 6).saturating_sub(1);
            layer = layer.min(last) * 6 + face;
        }
        let dimensions = if place.cube { 2 } else { place.dimensions };
        let integers = fetch.integers;
        (Spot { at, offset, layer, dimensions, integers, cube: place.cube }, level)
    }

    pub(super) fn fetch(
        &mut self,
        room: &mut Room<'_>,
        fetch: &Fetch,
        handles: &Lanes,
        mask: u32,
    ) -> Step<()> {
        let mut rest = mask;
        while rest != 0 {
            let lane = rest.trailing_zeros() as usize;
            rest &= rest - 1;
            let texture = room.known_images.texture(room.context, handles[lane])?;
            let (spot, level) = self.spot(fetch, &texture, lane);
            let mut reader = Reader { room: &mut *room, texture: &texture };
            let bits = reader.fetch(&spot, level, fetch.gather)?;
            let half = |bits: u32| match texture.gives_floats() {
                true => to_small(f64::from(f32::from_bits(bits)), F16, Round::Nearest),
                false => bits as u16,
            };
            let values = match fetch.result {
                FetchResult::Word => bits.map(u64::from),
                FetchResult::Half => bits.map(|bits| u64::from(half(bits))),
                FetchResult::HalfPair => {
                    let [r, g, b, a] = bits.map(|bits| u64::from(half(bits)));
                    [r | g << 16, b | a << 16, 0, 0]
                }
            };
            for (register, value) in fetch.to.into_iter().zip(values) {
                if register != NONE {
                    self.lanes_mut(register)[lane] = value;
                }
            }
        }
        if fetch.resident != NONE {
            self.write(fetch.resident, mask, 1);
        }
        Ok(())
    }
}
