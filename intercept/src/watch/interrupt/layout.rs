//! What the control block of a launch has, by the place where the launch is interrupted.

use gpucr_rewrite::control;
use gpucr_wire::message::Place;

use super::twins::Inside;

/// How large a launch is.
#[derive(Debug, Clone, Copy)]
pub(super) struct Shape {
    pub(super) blocks: u64,
    /// Of a block.
    pub(super) threads: u64,
}

/// What is in a control block.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Layout {
    pub(super) place: Place,
    /// All bytes.
    pub(super) bytes: u64,
    /// From [`control::CLAIMS`] up to here all is zero when the launch begins.
    pub(super) zero: u64,
    /// Up to here it tells what is done.
    pub(super) told: u64,
    /// States of each block.
    states: u64,
    /// How many blocks can be saved at a time, where that is told to the twin.
    pub(super) slots: Option<u32>,
}

impl Layout {
    /// For a twin that is interrupted between blocks.
    pub(super) fn between(shape: Shape) -> Self {
        let bytes = control::bytes(shape.blocks);
        Self { place: Place::Between {}, bytes, zero: bytes, told: bytes, states: 0, slots: None }
    }

    /// For one that is aborted: as one block each, or thread by thread. `None` if it would be too large.
    pub(super) fn aborted(by_blocks: bool, Shape { blocks, threads }: Shape) -> Option<Self> {
        let states = if by_blocks { 1 } else { threads };
        let all = blocks.checked_mul(states)?;
        let bytes = control::bytes_in_loops(all, 0)?;
        let told = control::STATES + 4 * all;
        Some(Self { place: Place::Aborted {}, bytes, zero: told, told, states, slots: None })
    }

    /// For one that is interrupted inside of them, with so much dynamic shared memory for each; `None` if it would be too
    /// large, or that memory cannot be saved. `resident`: no more blocks run at a time.
    pub(super) fn inside(
        inside: Inside,
        shape: Shape,
        dynamic: u32,
        resident: u64,
    ) -> Option<Self> {
        let Shape { blocks, threads } = shape;
        match inside {
            Inside::Loops { saved } => {
                let all = blocks.checked_mul(threads)?;
                let bytes = control::bytes_in_loops(all, saved)?;
                let told = control::STATES + 4 * all;
                let place = Place::Loops {};
                Some(Self { place, bytes, zero: told, told, states: threads, slots: None })
            }
            Inside::Barriers { saved, shared, dynamic: unit } => {
                let dynamic = u64::from(dynamic);
                if unit.is_some_and(|unit| !dynamic.is_multiple_of(unit)) {
                    return None;
                }
                let together = shared + unit.map_or(0, |_| dynamic.next_multiple_of(16));
                // Those that were saved and have not gone on yet are not among those that run.
                let wanted = resident.saturating_mul(2);
                let all = control::AtBarriers::of(blocks, threads, saved, together, wanted)?;
                let told = control::STATES + 4 * blocks;
                let slots = Some(u32::try_from(all.slots).ok()?);
                let control::AtBarriers { bytes, zero, .. } = all;
                Some(Self { place: Place::Barriers {}, bytes, zero, told, states: 1, slots })
            }
        }
    }

    /// How many blocks are done of a launch that is over, by what its control block tells.
    pub(super) fn done(&self, told: &[u8], Shape { blocks, .. }: Shape) -> u64 {
        match self.place {
            Place::Between {} => control::claimed(told).min(blocks),
            Place::Loops {} | Place::Barriers {} | Place::Aborted {} => {
                control::done(told, blocks, self.states)
            }
        }
    }

    /// How many blocks had begun and are begun again.
    pub(super) fn again(&self, told: &[u8], Shape { blocks, .. }: Shape) -> u64 {
        match self.place {
            Place::Between {} | Place::Loops {} | Place::Barriers {} => 0,
            Place::Aborted {} => control::begun(told, blocks, self.states),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_control_blocks_have() {
        let shape = Shape { blocks: 10, threads: 30 };
        let between = Layout::between(shape);
        assert_eq!((between.bytes, between.zero, between.told), (20, 20, 20));
        let loops = Layout::inside(Inside::Loops { saved: 8 }, shape, 7, 1).expect("little");
        assert_eq!((loops.bytes, loops.zero, loops.told), (16 + 300 * 12, 1216, 1216));
        let at = |unit| Inside::Barriers { saved: 8, shared: 64, dynamic: unit };
        let barriers = Layout::inside(at(Some(4)), shape, 20, 2).expect("little");
        // States, told words, and of four places a word, 32 words, and what is saved.
        let zero = 96 + 16 + 4 * 32 * 4;
        let saved = 4 * (32 * 8 + 64 + 32);
        assert_eq!((barriers.zero, barriers.bytes), (zero, zero + saved));
        assert_eq!((barriers.slots, barriers.told), (Some(4), 56));
        assert_eq!(Layout::inside(at(Some(4)), shape, 21, 2), None, "it is copied by words");
        assert!(Layout::inside(at(None), shape, 21, 2).is_some());
        assert_eq!(
            Layout::inside(at(None), shape, 0, u64::MAX).and_then(|all| all.slots),
            Some(10)
        );
        let [threads, whole] = [false, true].map(|by_blocks| Layout::aborted(by_blocks, shape));
        let threads = threads.expect("little");
        assert_eq!((threads.bytes, threads.zero, threads.told), (16 + 300 * 4, 1216, 1216));
        let whole = whole.expect("little");
        assert_eq!((whole.bytes, whole.zero, whole.told), (16 + 12 * 4, 56, 56));
        let told = [[0; 16].as_slice(), &[1, 0, 0, 0, 2, 0, 0, 0], &[0; 32]].concat();
        assert_eq!((whole.done(&told, shape), whole.again(&told, shape)), (1, 1));
    }
}
