//! `mbarrier`: barriers that are objects in shared memory.
//!
//! PTX leaves it open what is in the 64 bits of such an object. Here: from bit 0 the number of
//! arrivals of each phase, from bit 20 how many of them are pending, from bit 40 the bytes that
//! copies have still to bring (a number with a sign), and in bit 63 whether the phase is an odd one.

use super::block::Room;
use super::context::{Fault, Step};
use super::warp::Warp;
use crate::ptx::ast::Space;
use crate::ptx::code::{
    MOST_ARRIVALS, Mbarrier, MbarrierAction, NONE, PENDING_ARRIVALS, Place, SHARED_WINDOW,
    WINDOW_MASK,
};

const BYTES: u32 = 40;
const BYTES_WIDTH: u32 = 22;
const ODD: u32 = 63;

/// A barrier object, taken apart.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Object {
    expected: u64,
    pending: u64,
    bytes: i64,
    odd: bool,
}

impl Object {
    fn of(word: u64) -> Object {
        let unused = 64 - BYTES_WIDTH;
        Object {
            expected: word & MOST_ARRIVALS,
            pending: word >> PENDING_ARRIVALS & MOST_ARRIVALS,
            bytes: ((word >> BYTES << unused) as i64) >> unused,
            odd: word >> ODD != 0,
        }
    }

    fn word(self) -> u64 {
        let bytes = self.bytes as u64 & ((1 << BYTES_WIDTH) - 1);
        self.expected & MOST_ARRIVALS
            | (self.pending & MOST_ARRIVALS) << PENDING_ARRIVALS
            | bytes << BYTES
            | u64::from(self.odd) << ODD
    }

    /// Takes arrivals away from those that are pending.
    fn arrive(&mut self, count: u64) -> Step<()> {
        let left = self.pending.checked_sub(count);
        self.pending = left.ok_or(Fault::Instruction("more arrivals than the barrier expects"))?;
        Ok(())
    }

    /// Begins the next phase when nothing is pending.
    fn turn(&mut self) {
        if self.pending == 0 && self.bytes == 0 {
            self.pending = self.expected;
            self.odd = !self.odd;
        }
    }
}

impl Warp<'_> {
    /// What the lanes of the mask do to a barrier; true when they ask for a phase that is not over for
    /// any of them.
    pub(super) fn mbarrier(
        &mut self,
        room: &mut Room<'_>,
        barrier: &Mbarrier,
        mask: u32,
    ) -> Step<bool> {
        let addresses = self.addresses(&barrier.place);
        let values = *self.lanes(barrier.value);
        let mut rest = mask;
        while rest != 0 {
            let lane = rest.trailing_zeros() as usize;
            rest &= rest - 1;
            let value = values[lane];
            self.act_on(room, barrier, lane, addresses[lane], value)?;
        }
        Ok(match barrier.action {
            MbarrierAction::Wait { to, .. } => self.holding(to) & mask == 0,
            _ => false,
        })
    }

    /// What one lane does to a barrier.
    fn act_on(
        &mut self,
        room: &mut Room<'_>,
        barrier: &Mbarrier,
        lane: usize,
        address: u64,
        value: u64,
    ) -> Step<()> {
        let space = barrier.place.space;
        if space == Space::Generic && address & WINDOW_MASK != SHARED_WINDOW {
            return Err(Fault::Illegal(address));
        }
        let word = self.peek(room, space, lane, address, 8)?;
        let number = value & 0xffff_ffff;
        let mut object = Object::of(word);
        match barrier.action {
            MbarrierAction::Initialise => {
                if number == 0 || number > MOST_ARRIVALS {
                    return Err(Fault::Instruction("a barrier of no or too many arrivals"));
                }
                object = Object { expected: number, pending: number, bytes: 0, odd: false };
            }
            MbarrierAction::Invalidate => {}
            MbarrierAction::Arrive { to, drops, expects } => {
                let count = if expects { 1 } else { number };
                if expects {
                    object.bytes += number as i64;
                }
                if drops {
                    object.expected = object.expected.saturating_sub(count);
                }
                object.arrive(count)?;
                object.turn();
                if to != NONE {
                    self.lanes_mut(to)[lane] = word;
                }
            }
            MbarrierAction::Expect => object.bytes += number as i64,
            MbarrierAction::Complete => {
                object.bytes -= number as i64;
                object.turn();
            }
            MbarrierAction::Wait { to, parity } => {
                let awaited = if parity { value & 1 != 0 } else { Object::of(value).odd };
                self.lanes_mut(to)[lane] = u64::from(object.odd != awaited);
            }
        }
        self.poke(room, space, lane, (address, 8), object.word())
    }

    /// Tells a barrier that a copy has brought its bytes.
    pub(super) fn bytes_arrived(
        &mut self,
        room: &mut Room<'_>,
        place: Place,
        lane: usize,
        (address, bytes): (u64, u64),
    ) -> Step<()> {
        let barrier = Mbarrier { action: MbarrierAction::Complete, place, value: NONE };
        self.act_on(room, &barrier, lane, address, bytes)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_phase_ends_with_the_last_arrival_and_byte() {
        let mut object = Object { expected: 2, pending: 2, bytes: 0, odd: false };
        object.bytes -= 16;
        assert_eq!(Object::of(object.word()), object);
        object.arrive(2).unwrap();
        object.turn();
        assert!(!object.odd);
        object.bytes += 16;
        object.turn();
        assert_eq!(object, Object { expected: 2, pending: 2, bytes: 0, odd: true });
        assert_eq!(Object::of(object.word()), object);
        assert!(object.arrive(3).is_err());
    }
}
