//! Memory that threads allocate: `malloc` and `free`, and `alloca`.

use super::block::Room;
use super::context::{Fault, Step};
use super::warp::{Warp, for_lanes};
use crate::ptx::ast::Space;
use crate::ptx::code::{Reg, Src};
use crate::ptx::module::MOST_LOCAL;

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

    /// Gives the lanes as much memory as the one that wants most, all at the same offset.
    pub(super) fn stack_allocate(&mut self, to: Reg, size: Src, align: u32, mask: u32) -> Step<()> {
        let sizes = *self.lanes(size);
        let mut size = 0;
        for_lanes(mask, |lane| size = size.max(sizes[lane]));
        let top = self.local_base + self.code.frame_bytes + self.allocated;
        let start = top.next_multiple_of(align.max(16));
        let end = u64::from(start).saturating_add(size);
        let end = u32::try_from(end).ok().and_then(|end| end.checked_next_multiple_of(16));
        let end = end.filter(|end| *end <= MOST_LOCAL).ok_or(Fault::Stack)?;
        self.local.reserve(end);
        self.allocated += end - top;
        self.write(to, mask, u64::from(start));
        Ok(())
    }

    /// Goes back to what was saved, unless lanes that are elsewhere may use what is beyond it.
    pub(super) fn stack_restore(&mut self, from: Src, mask: u32) {
        let saved = *self.lanes(from);
        let mut most = 0;
        for_lanes(mask, |lane| most = most.max(saved[lane]));
        if mask == self.live & !self.returned {
            self.allocated = self.allocated.min(u32::try_from(most).unwrap_or(u32::MAX));
        }
    }
}
