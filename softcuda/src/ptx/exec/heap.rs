//! `malloc` and `free` of kernels.

use super::block::Room;
use super::context::{Fault, Step};
use super::warp::Warp;
use crate::ptx::ast::Space;

impl Warp<'_> {
    pub(super) fn heap_allocate(&mut self, room: &mut Room<'_>, mask: u32, site: u32) -> Step<()> {
        let mut rest = mask;
        while rest != 0 {
            let lane = rest.trailing_zeros() as usize;
            rest &= rest - 1;
            let size = self.argument(room, lane, site, 0)?;
            let address = room.context.launch.heap.allocate(size).unwrap_or(0);
            if let Some(result) = self.code.calls[site as usize].returns.first() {
                let size = if result.size == 8 { 8 } else { 4 };
                let place = self.frame_address(result.offset);
                self.poke(room, Space::Generic, lane, (place, size), address)?;
            }
        }
        Ok(())
    }

    pub(super) fn heap_free(&mut self, room: &mut Room<'_>, mask: u32, site: u32) -> Step<()> {
        let mut rest = mask;
        while rest != 0 {
            let lane = rest.trailing_zeros() as usize;
            rest &= rest - 1;
            let address = self.argument(room, lane, site, 0)?;
            if address != 0 && !room.context.launch.heap.free(address) {
                return Err(Fault::Free(address));
            }
        }
        Ok(())
    }
}
