//! Where things lie: the address space of a device's heap, and small pieces within a block.

use offset_allocator::{Allocation, Allocator};

use crate::abi::types::{Code, ERROR_OUT_OF_MEMORY};
use crate::state::memory::vmm::Vmm;

/// Alignment and smallest size of a small allocation, as with the driver's own.
const GRAIN: u64 = 512;
/// Pieces of one block that are kept apart at most.
const PIECES: u64 = 1 << 14;

/// Rounds up to a multiple of `unit`; `None` if that is more than fits in 64 bits.
pub(crate) fn round_up(size: u64, unit: u64) -> Option<u64> {
    size.checked_next_multiple_of(unit)
}

/// A piece of a [`Space`].
pub(crate) struct Place {
    /// Where it begins.
    pub(crate) address: u64,
    reservation: usize,
    node: Allocation<u32>,
}

/// The addresses of one device's heap: few large reservations, cut into multiples of a unit.
/// Neighbours in time become neighbours in space, so that unmapping all of it is a few calls.
pub(crate) struct Space {
    unit: u64,
    /// Bytes of the first reservation.
    preferred: u64,
    reservations: Vec<(u64, Allocator<u32>)>,
}

impl Space {
    /// Reserves nothing yet. `total` is the device's memory, bytes.
    pub(crate) fn new(unit: u64, total: u64) -> Self {
        let preferred = total.max(unit).saturating_mul(2).next_power_of_two();
        Self { unit, preferred, reservations: Vec::new() }
    }

    /// Finds room for `size` bytes, a multiple of the unit. Further addresses are reserved if
    /// there is none; `reserved` is told about each.
    ///
    /// # Errors
    /// The driver's code if no addresses can be reserved; then nothing has changed.
    pub(crate) fn place(
        &mut self,
        vmm: &dyn Vmm,
        size: u64,
        mut reserved: impl FnMut(u64, u64),
    ) -> Result<Place, Code> {
        let units = u32::try_from(size / self.unit).map_err(|_| ERROR_OUT_OF_MEMORY)?;
        if let Some(place) = self.find(units) {
            return Ok(place);
        }
        // The allocator rounds sizes up to its classes when it searches, by an eighth at most.
        let least = size.saturating_add(size / 4).saturating_add(self.unit);
        let least = round_up(least, self.unit).ok_or(ERROR_OUT_OF_MEMORY)?;
        let mut wanted = self.preferred.max(least);
        let address = loop {
            match vmm.reserve(wanted) {
                Ok(address) => break address,
                // Limits on address space: make do with less.
                Err(_) if wanted / 2 >= least => {
                    wanted = (wanted / 2).next_multiple_of(self.unit);
                }
                Err(code) => return Err(code),
            }
        };
        let all = u32::try_from(wanted / self.unit).unwrap_or(u32::MAX);
        let nodes = all.saturating_add(2).min(128 << 10);
        self.reservations.push((address, Allocator::with_max_allocs(all, nodes)));
        reserved(address, wanted);
        self.find(units).ok_or(ERROR_OUT_OF_MEMORY)
    }

    fn find(&mut self, units: u32) -> Option<Place> {
        self.reservations.iter_mut().enumerate().find_map(|(reservation, (base, allocator))| {
            let node = allocator.allocate(units)?;
            let address = *base + u64::from(node.offset) * self.unit;
            Some(Place { address, reservation, node })
        })
    }

    /// Gives a place back.
    pub(crate) fn free(&mut self, place: Place) {
        self.reservations[place.reservation].1.free(place.node);
    }
}

/// A piece of a [`Slab`].
pub(crate) struct SlabPiece {
    /// Bytes from the beginning of the block.
    pub(crate) offset: u64,
    node: Allocation<u16>,
}

/// A block that small allocations share.
pub(crate) struct Slab {
    grain: u64,
    allocator: Allocator<u16>,
}

impl Slab {
    /// A block of `size` bytes, all of it free.
    pub(crate) fn new(size: u64) -> Self {
        let grain = GRAIN.max(size / PIECES);
        let grains = (size / grain) as u32;
        Self { grain, allocator: Allocator::with_max_allocs(grains, grains + 2) }
    }

    /// Finds room for `size` bytes.
    pub(crate) fn take(&mut self, size: u64) -> Option<SlabPiece> {
        let grains = u32::try_from(size.div_ceil(self.grain)).ok()?;
        let node = self.allocator.allocate(grains)?;
        Some(SlabPiece { offset: u64::from(node.offset) * self.grain, node })
    }

    /// Gives a piece back.
    pub(crate) fn free(&mut self, piece: SlabPiece) {
        self.allocator.free(piece.node);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::state::memory::fake::Fake;
    use std::collections::BTreeMap;

    const MIB: u64 = 1 << 20;

    #[test]
    fn neighbours_in_time_are_neighbours_in_space() {
        let (fake, mut space) = (Fake::new(), Space::new(2 * MIB, 64 * MIB));
        let mut reserved = Vec::new();
        let mut next = None;
        for size in [2 * MIB, 20 * MIB, 4 * MIB, 2 * MIB] {
            let place = space.place(&fake, size, |a, s| reserved.push((a, s))).expect("room");
            assert!(next.is_none_or(|next| next == place.address), "a gap");
            next = Some(place.address + size);
        }
        assert_eq!(reserved.len(), 1);
        assert_eq!(reserved[0].1, 128 * MIB);
    }

    #[test]
    fn more_is_reserved_when_it_is_full_and_what_is_given_back_is_used_again() {
        let (fake, mut space) = (Fake::new(), Space::new(2 * MIB, 4 * MIB));
        let mut count = 0;
        let first = space.place(&fake, 6 * MIB, |_, _| count += 1).expect("room");
        let address = first.address;
        let big = space.place(&fake, 100 * MIB, |_, _| count += 1).expect("room");
        assert_eq!(count, 2);
        space.free(first);
        let again = space.place(&fake, 6 * MIB, |_, _| count += 1).expect("room");
        assert_eq!((again.address, count), (address, 2));
        space.free(big);
        space.free(again);
    }

    #[test]
    fn pieces_never_overlap() {
        let mut slab = Slab::new(2 * MIB);
        let mut pieces: BTreeMap<u64, (u64, SlabPiece)> = BTreeMap::new();
        let mut random = 12345u64;
        let mut taken = 0;
        for _ in 0..20_000 {
            random = random.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
            let size = (random >> 33) % 9000 + 1;
            if (random >> 20) % 5 < 3 {
                if let Some(piece) = slab.take(size) {
                    assert_eq!(piece.offset % 512, 0);
                    assert!(piece.offset + size <= 2 * MIB, "beyond the block");
                    let before = pieces.range(..=piece.offset).next_back();
                    assert!(before.is_none_or(|(at, (len, _))| at + len <= piece.offset));
                    let after = pieces.range(piece.offset..).next();
                    assert!(after.is_none_or(|(at, _)| piece.offset + size <= *at));
                    pieces.insert(piece.offset, (size, piece));
                    taken += 1;
                }
            } else if let Some((_, (_, piece))) = pieces.pop_first() {
                slab.free(piece);
            }
        }
        assert!(taken > 5_000, "only {taken} pieces were taken");
        for (_, (_, piece)) in pieces {
            slab.free(piece);
        }
        assert!(slab.take(2 * MIB).is_some(), "all of it is free again");
    }

    #[test]
    fn a_block_holds_as_many_pieces_as_fit() {
        let mut slab = Slab::new(2 * MIB);
        let taken = std::iter::from_fn(|| slab.take(1024)).count();
        assert_eq!(taken, 2048);
    }
}
