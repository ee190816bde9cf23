//! `cp.async`, done at once.

use super::block::Room;
use super::context::{Fault, Step};
use super::warp::Warp;
use crate::ptx::code::{AsyncCopy, BulkCopy, CopyReads};

impl Warp<'_> {
    pub(super) fn copy_async(
        &mut self,
        room: &mut Room<'_>,
        copy: &AsyncCopy,
        mask: u32,
    ) -> Step<()> {
        let (to, from) = (self.addresses(&copy.to), self.addresses(&copy.from));
        let size = u64::from(copy.size);
        let read = match copy.reads {
            CopyReads::All => [size; 32],
            CopyReads::Count(source) => self.lanes(source).map(|n| (n & 0xffff_ffff).min(size)),
            CopyReads::Unless(predicate, negated) => self
                .lanes(predicate)
                .map(|holds| if (holds & 1 != 0) == negated { size } else { 0 }),
        };
        self.aligned(&to, mask, usize::from(copy.size))?;
        self.aligned(&from, mask, usize::from(copy.size))?;
        let mut rest = mask;
        while rest != 0 {
            let lane = rest.trailing_zeros() as usize;
            rest &= rest - 1;
            for at in (0..size).step_by(4) {
                let word = self.read_part(room, copy, lane, from[lane] + at, read[lane], at)?;
                self.poke(room, copy.to.space, lane, (to[lane] + at, 4), word)?;
            }
        }
        Ok(())
    }

    pub(super) fn copy_bulk(
        &mut self,
        room: &mut Room<'_>,
        copy: &BulkCopy,
        mask: u32,
    ) -> Step<()> {
        let (to, from) = (self.addresses(&copy.to), self.addresses(&copy.from));
        let sizes = *self.lanes(copy.size);
        let barriers = copy.barrier.map(|place| (place, self.addresses(&place)));
        self.aligned(&to, mask, 16)?;
        self.aligned(&from, mask, 16)?;
        let mut rest = mask;
        while rest != 0 {
            let lane = rest.trailing_zeros() as usize;
            rest &= rest - 1;
            let size = sizes[lane] & 0xffff_ffff;
            if !size.is_multiple_of(16) {
                return Err(Fault::Instruction("a bulk copy of no multiple of 16 bytes"));
            }
            for at in (0..size).step_by(8) {
                let word = self.peek(room, copy.from.space, lane, from[lane] + at, 8)?;
                self.poke(room, copy.to.space, lane, (to[lane] + at, 8), word)?;
            }
            if let Some((place, addresses)) = &barriers {
                self.bytes_arrived(room, *place, lane, (addresses[lane], size))?;
            }
        }
        Ok(())
    }

    /// Four bytes at `at` of a copy of which only the first `read` bytes are read.
    fn read_part(
        &mut self,
        room: &mut Room<'_>,
        copy: &AsyncCopy,
        lane: usize,
        address: u64,
        read: u64,
        at: u64,
    ) -> Step<u64> {
        if at + 4 <= read {
            return self.peek(room, copy.from.space, lane, address, 4);
        }
        let mut word = 0;
        for byte in at..read.max(at) {
            let value = self.peek(room, copy.from.space, lane, address + byte - at, 1)?;
            word |= value << (8 * (byte - at));
        }
        Ok(word)
    }
}
