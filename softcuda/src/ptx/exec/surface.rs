//! Reading and writing surfaces.

use super::atomic::{apply, update};
use super::block::Room;
use super::context::{Fault, Step};
use super::memory::{Use, read, write};
use super::warp::Warp;
use crate::ptx::code::{Lanes, SurfaceAccess, SurfaceAction, SurfaceEdge};
use crate::ptx::image::{Channel, Image};
use crate::ptx::kernels::rounding::{F16, Round, to_small};

/// The bits of a number in the format of a surface; registers of a formatted store hold 32 bits of
/// the same kind of number.
fn in_format(channel: Channel, bits: u64) -> u64 {
    let number = bits as u32;
    u64::from(match channel {
        Channel::U8 => number.min(0xff),
        Channel::U16 => number.min(0xffff),
        Channel::S8 => (number as i32).clamp(-0x80, 0x7f) as u32,
        Channel::S16 => (number as i32).clamp(-0x8000, 0x7fff) as u32,
        Channel::F16 => u32::from(to_small(f64::from(f32::from_bits(number)), F16, Round::Nearest)),
        Channel::U32 | Channel::S32 | Channel::F32 => number,
    })
}

/// Where an access is: an address, or nowhere.
fn locate(
    image: &Image,
    access: &SurfaceAccess,
    at: [i64; 3],
    layer: u32,
    bytes: u64,
) -> Step<Option<u64>> {
    let level = &image.levels[0];
    let element = u64::from(image.channel.size()) * u64::from(image.channels);
    let mut found = [0; 3];
    let scale = if access.formatted { element as i64 } else { 1 };
    let row = i64::from(level.size[0]) * element as i64;
    let last = [
        row - bytes as i64,
        i64::from(level.size[1].max(1)) - 1,
        i64::from(level.size[2].max(1)) - 1,
    ];
    let mut wanted = [at[0].saturating_mul(scale), at[1], at[2]];
    if access.place.dimensions < 3 {
        wanted[2] = i64::from(layer);
    }
    for axis in 0..3 {
        let is_inside = (0..=last[axis]).contains(&wanted[axis]);
        found[axis] = match access.beyond {
            _ if is_inside => wanted[axis],
            SurfaceEdge::Trap => return Err(Fault::Illegal(level.address)),
            SurfaceEdge::Zero => return Ok(None),
            SurfaceEdge::Clamp => wanted[axis].min(last[axis]).max(0),
        };
    }
    let [x, y, z] = found.map(|n| n as u64);
    let address = level
        .address
        .wrapping_add(z.wrapping_mul(level.plane))
        .wrapping_add(y.wrapping_mul(level.pitch))
        .wrapping_add(x);
    Ok(Some(address))
}

impl Warp<'_> {
    pub(super) fn surface(
        &mut self,
        room: &mut Room<'_>,
        access: &SurfaceAccess,
        handles: &Lanes,
        mask: u32,
    ) -> Step<()> {
        let mut rest = mask;
        while rest != 0 {
            let lane = rest.trailing_zeros() as usize;
            rest &= rest - 1;
            let image = room.known_images.surface(room.context, handles[lane])?;
            let size = if access.formatted { image.channel.size() } else { access.size };
            let bytes = u64::from(size) * u64::from(access.count);
            let coordinate = |source| i64::from(self.lanes(source)[lane] as u32 as i32);
            let at = access.place.at.map(coordinate);
            let layer = self.layer(&access.place, lane);
            let place = locate(&image, access, at, layer, bytes)?;
            // No more numbers are written than an element has.
            let count = match access.formatted {
                true => access.count.min(image.channels),
                false => access.count,
            };
            for index in 0..usize::from(count) {
                let at = place.map(|place| place.wrapping_add(index as u64 * u64::from(size)));
                self.surface_value(room, access, (at, size), index, (lane, image.channel))?;
            }
        }
        Ok(())
    }

    /// Reads, writes or changes one number.
    fn surface_value(
        &mut self,
        room: &mut Room<'_>,
        access: &SurfaceAccess,
        (address, size): (Option<u64>, u8),
        index: usize,
        (lane, channel): (usize, Channel),
    ) -> Step<()> {
        let register = access.values[index];
        let Some(address) = address else {
            if access.action == SurfaceAction::Load {
                self.lanes_mut(register)[lane] = 0;
            }
            return Ok(());
        };
        if address & (u64::from(size) - 1) != 0 {
            return Err(Fault::Misaligned(address, usize::from(size)));
        }
        let used = if access.action == SurfaceAction::Load { Use::Read } else { Use::Write };
        room.mapped.check(used, address, usize::from(size))?;
        if access.action == SurfaceAction::Load {
            // SAFETY: checked to be mapped, and aligned.
            self.lanes_mut(register)[lane] = unsafe { read(address, size) };
            return Ok(());
        }
        let value = self.lanes(register)[lane];
        match access.action {
            SurfaceAction::Reduce(op, ty) => {
                if size < 4 {
                    return Err(Fault::Instruction("a reduction on numbers of less than 32 bits"));
                }
                // SAFETY: checked to be writable, and aligned.
                unsafe { update(address, size, |old| apply(op, ty, size, old, value, 0)) };
            }
            _ => {
                let value = if access.formatted { in_format(channel, value) } else { value };
                // SAFETY: checked to be writable, and aligned.
                unsafe { write(address, size, value) };
            }
        }
        Ok(())
    }
}
