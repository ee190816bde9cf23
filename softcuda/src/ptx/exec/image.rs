//! Textures and surfaces: which image an access means, and queries.

use super::block::Room;
use super::context::Step;
use super::warp::{Warp, for_lanes};
use crate::ptx::code::{ImageAccess, ImageAction, ImagePlace, ImageQuery, NONE, Src};
use crate::ptx::image::{Channel, Image, Texture};

/// The numbers of OpenCL for what an element is, which PTX's queries give.
fn data_type(channel: Channel, normalized: bool) -> u32 {
    match (channel, normalized) {
        (Channel::S8, true) => 0x10d0,
        (Channel::S16, true) => 0x10d1,
        (Channel::U8, true) => 0x10d2,
        (Channel::U16, true) => 0x10d3,
        (Channel::S8, false) => 0x10d7,
        (Channel::S16, false) => 0x10d8,
        (Channel::S32, _) => 0x10d9,
        (Channel::U8, false) => 0x10da,
        (Channel::U16, false) => 0x10db,
        (Channel::U32, _) => 0x10dc,
        (Channel::F16, _) => 0x10dd,
        (Channel::F32, _) => 0x10de,
    }
}

fn answer(image: &Image, texture: Option<&Texture>, what: ImageQuery, level: usize) -> u32 {
    // A level that is not there has no size.
    let size = image.levels.get(level).map_or([0; 3], |level| level.size);
    let floats = texture.is_some_and(Texture::gives_floats);
    match what {
        ImageQuery::Size(2) if image.layered => 0,
        ImageQuery::Size(axis) => size[usize::from(axis)],
        ImageQuery::Layers if image.layered => size[2],
        ImageQuery::Layers | ImageQuery::Layout => 0,
        ImageQuery::Levels => image.levels.len() as u32,
        ImageQuery::Samples => 1,
        ImageQuery::Normalized => u32::from(texture.is_some_and(|t| t.sampler.normalized)),
        ImageQuery::DataType => data_type(image.channel, floats),
        ImageQuery::Order => match image.channels {
            1 => 0x10b0,
            2 => 0x10b2,
            _ => 0x10b5,
        },
    }
}

impl Warp<'_> {
    pub(super) fn image(
        &mut self,
        room: &mut Room<'_>,
        access: &ImageAccess,
        mask: u32,
    ) -> Step<()> {
        let handles = *self.lanes(access.handle);
        match access.action {
            ImageAction::Fetch(ref fetch) => self.fetch(room, fetch, &handles, mask),
            ImageAction::Surface(ref access) => self.surface(room, access, &handles, mask),
            ImageAction::Is { to, surface } => {
                let images = room.context.launch.images;
                let lanes = self.lanes_mut(to);
                for_lanes(mask, |lane| {
                    let there = match surface {
                        true => images.surface(handles[lane]).is_some(),
                        false => images.texture(handles[lane]).is_some(),
                    };
                    lanes[lane] = u64::from(there);
                });
                Ok(())
            }
            ImageAction::Query { to, what, level, surface } => {
                let mut rest = mask;
                while rest != 0 {
                    let lane = rest.trailing_zeros() as usize;
                    rest &= rest - 1;
                    let level = match level {
                        NONE => 0,
                        level => self.lanes(level)[lane] as u32 as usize,
                    };
                    let (context, known) = (room.context, &mut room.known_images);
                    let value = if surface {
                        answer(&*known.surface(context, handles[lane])?, None, what, level)
                    } else {
                        let texture = known.texture(context, handles[lane])?;
                        answer(&texture.image, Some(&texture), what, level)
                    };
                    self.lanes_mut(to)[lane] = u64::from(value);
                }
                Ok(())
            }
        }
    }

    /// A value of one lane, or 0 where there is no source.
    pub(super) fn value(&self, source: Src, lane: usize) -> u64 {
        if source == NONE { 0 } else { self.lanes(source)[lane] }
    }

    /// The layer that a lane means.
    pub(super) fn layer(&self, place: &ImagePlace, lane: usize) -> u32 {
        self.value(place.layer, lane) as u32
    }
}
