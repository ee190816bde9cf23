//! `mbarrier`: barriers that are objects in shared memory.

use super::memory::{ignorable, space};
use super::{Lower, Lowered};
use crate::ptx::ast::{Operand, Space, Type};
use crate::ptx::code::{
    MOST_ARRIVALS, Mbarrier, MbarrierAction, NONE, Op, PENDING_ARRIVALS, Place, Src,
};
use crate::ptx::kernels::int;

impl<'a> Lower<'_, 'a> {
    pub(super) fn mbarrier(&mut self) -> Lowered<()> {
        let names =
            ["init", "inval", "test_wait", "try_wait", "pending_count", "arrive", "arrive_drop"];
        let first = self.modifiers.first().copied().unwrap_or_default();
        let name = if names.contains(&first) {
            self.modifiers.remove(0)
        } else if matches!(first, "expect_tx" | "complete_tx") {
            first
        } else {
            return Err(self.unsupported());
        };
        let drops = name == "arrive_drop";
        let keeps_phase = self.has("noComplete");
        let expects = self.has("expect_tx");
        let completes = self.has("complete_tx");
        let parity = self.has("parity");
        self.modifiers.retain(|modifier| !ignorable(modifier));
        let space = self.find(space).unwrap_or(Space::Generic);
        if self.ty()? != Type::B64 || !matches!(space, Space::Generic | Space::Shared) {
            return Err(self.unsupported());
        }
        self.done()?;
        let arrives = matches!(name, "arrive" | "arrive_drop");
        let waits = matches!(name, "test_wait" | "try_wait");
        if (parity && !waits) || (keeps_phase && !arrives) {
            return Err(self.unsupported());
        }
        let operands = self.current.map_or(&[][..], |current| &current.operands);
        match (name, operands) {
            ("init", [address, count]) => {
                let count = self.src(count, Type::U32)?;
                self.act(MbarrierAction::Initialise, space, address, count)
            }
            ("inval", [address]) => {
                let zero = self.constant(0);
                self.act(MbarrierAction::Invalidate, space, address, zero)
            }
            ("pending_count", [to, state]) => self.pending_count(to, state),
            ("test_wait", [to, address, phase])
            | ("try_wait", [to, address, phase] | [to, address, phase, _]) => {
                let to = self.to(to, Type::Pred)?;
                let phase =
                    if parity { self.src(phase, Type::U32)? } else { self.src(phase, Type::B64)? };
                let action = MbarrierAction::Wait { to, parity };
                self.act(action, space, address, phase)
            }
            _ if arrives => {
                let (to, address, value) = match operands {
                    [to, address] if !keeps_phase && !expects => (to, address, None),
                    [to, address, value] => (to, address, Some(value)),
                    _ => return Err(self.position.mistyped("wrong number of operands")),
                };
                let to = if *to == Operand::Sink { NONE } else { self.to(to, Type::B64)? };
                let value = match value {
                    Some(value) => self.src(value, Type::U32)?,
                    None => self.constant(1),
                };
                self.act(MbarrierAction::Arrive { to, drops, expects }, space, address, value)
            }
            (_, [address, bytes]) if expects || completes => {
                let bytes = self.src(bytes, Type::U32)?;
                let action =
                    if expects { MbarrierAction::Expect } else { MbarrierAction::Complete };
                self.act(action, space, address, bytes)
            }
            _ => Err(self.position.mistyped("wrong number of operands")),
        }
    }

    fn act(
        &mut self,
        action: MbarrierAction,
        space: Space,
        address: &Operand<'a>,
        value: Src,
    ) -> Lowered<()> {
        let place = self.place(space, address, 8)?;
        self.push_mbarrier(action, place, value);
        Ok(())
    }

    /// Something that happens to a barrier at a place.
    pub(super) fn push_mbarrier(&mut self, action: MbarrierAction, place: Place, value: Src) {
        self.code.mbarriers.push(Mbarrier { action, place, value });
        self.emit(Op::Mbarrier(self.code.mbarriers.len() as u32 - 1));
    }

    fn pending_count(&mut self, to: &Operand<'a>, state: &Operand<'a>) -> Lowered<()> {
        let (to, state) = (self.to(to, Type::U32)?, self.src(state, Type::B64)?);
        let shift = self.constant(u64::from(PENDING_ARRIVALS));
        let mask = self.constant(MOST_ARRIVALS);
        let shifted = self.temporary(Type::B64);
        self.map2(int::binary("shr", Type::B64), shifted, state, shift)?;
        self.map2(int::binary("and", Type::B64), to, shifted, mask)
    }
}
