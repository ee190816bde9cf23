//! The images that a block has used last.

use super::context::{Context, Fault, Step};
use crate::ptx::image::{Image, Texture};
use std::sync::Arc;

/// The images that the last accesses of a block meant.
#[derive(Default)]
pub(super) struct KnownImages {
    texture: Option<(u64, Arc<Texture>)>,
    surface: Option<(u64, Arc<Image>)>,
}

impl KnownImages {
    pub(super) fn texture(&mut self, context: &Context<'_>, handle: u64) -> Step<Arc<Texture>> {
        if let Some((known, texture)) = &self.texture
            && *known == handle
        {
            return Ok(texture.clone());
        }
        let found = context.launch.images.texture(handle);
        let found = found.filter(|texture| !texture.image.levels.is_empty());
        let texture = found.ok_or(Fault::Instruction("a fetch from what is no texture"))?;
        self.texture = Some((handle, texture.clone()));
        Ok(texture)
    }

    pub(super) fn surface(&mut self, context: &Context<'_>, handle: u64) -> Step<Arc<Image>> {
        if let Some((known, image)) = &self.surface
            && *known == handle
        {
            return Ok(image.clone());
        }
        let found = context.launch.images.surface(handle);
        let found = found.filter(|image| !image.levels.is_empty());
        let image = found.ok_or(Fault::Instruction("an access to what is no surface"))?;
        self.surface = Some((handle, image.clone()));
        Ok(image)
    }
}
