//! Turns for the lanes of a warp that run apart.
//!
//! Diverged lanes run one path at a time, and lanes that have come to where paths join wait there
//! for the others. That is a livelock when the others wait for something that a waiting lane would
//! do after the join: in a spin lock the winner of the lock waits for the losers. So lanes that
//! have run for a whole quantum while others of their function wait let those go on past the join.
//! Such lanes meet the rest again at the next operation of several lanes, which waits for all
//! that can still come, or where outer paths join.
//!
//! Only lanes in the same call of a function change turns: lanes that have returned from a
//! function wait until all have.

use super::warp::{Path, Warp};

impl Warp<'_> {
    /// At the end of a quantum: lets lanes go on that wait for the current ones.
    pub(super) fn end_turn(&mut self) {
        if self.path.pc != self.path.join && !self.change_turns() {
            // Inside of a call there may be nobody, but the caller may be the one that spins.
            self.overdue = !self.frames.is_empty();
        }
    }

    /// After a branch: makes up for a turn that could not end in a called function.
    #[cold]
    pub(super) fn end_overdue_turn(&mut self) {
        if self.path.pc != self.path.join {
            self.overdue = self.frames.len() > 1 && !self.change_turns();
        }
    }

    /// Puts the current path last and goes on with the lanes that have waited longest; false when
    /// no others can run.
    fn change_turns(&mut self) -> bool {
        let running = self.live & !self.returned;
        let mut above = self.path.mask;
        let mut chosen = None;
        for index in (self.floor..self.paths.len()).rev() {
            let other = self.paths[index];
            // Lanes at the end of their path wait further down.
            if other.pc == other.join {
                continue;
            }
            let lanes = other.mask & running & !above;
            above |= other.mask;
            if lanes & !self.parked != 0 {
                chosen = Some((index, lanes));
            }
        }
        let Some((index, lanes)) = chosen else { return false };
        let next = Path { mask: lanes, ..self.paths[index] };
        self.paths[index].mask &= !lanes;
        if self.paths[index].mask == 0 {
            self.paths.remove(index);
        }
        self.paths.push(self.path);
        self.path = next;
        self.apart = true;
        true
    }

    /// Before an operation of several lanes, in a warp whose lanes have changed turns: joins the
    /// lanes that wait at the same operation, and otherwise lets others come. True when the
    /// operation must not be executed now.
    #[cold]
    pub(super) fn gather(&mut self) -> bool {
        let (after, pc) = (self.path.pc, self.path.pc - 1);
        let running = self.live & !self.returned;
        let mut together = self.path.mask;
        let mut index = self.floor;
        while index < self.paths.len() {
            let other = self.paths[index];
            let lanes = other.mask & running;
            let waits_here = other.pc == pc && other.join == self.path.join;
            if waits_here && lanes & self.parked == lanes && lanes & together == 0 {
                together |= lanes;
                self.paths.remove(index);
            } else {
                index += 1;
            }
        }
        self.path.pc = pc;
        if together != self.path.mask {
            self.path.mask = together;
            return true;
        }
        self.parked |= together;
        if running & !together != 0 && self.change_turns() {
            return true;
        }
        // Nobody else can come.
        self.apart = running != together;
        self.parked = 0;
        self.path.pc = after;
        false
    }
}
