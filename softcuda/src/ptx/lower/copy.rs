//! `cp.async`: copies between global and shared memory.
//!
//! A GPU may copy at any time between the instruction and the wait for its group. Here the bytes
//! are there at once, which is one of the allowed orders, so groups need no record.

use super::memory::{ignorable, space};
use super::{Lower, Lowered};
use crate::ptx::ast::{Operand, Space, Type};
use crate::ptx::code::{AsyncCopy, BulkCopy, CopyReads, MbarrierAction, NONE, Op};

impl<'a> Lower<'_, 'a> {
    pub(super) fn copy_async(&mut self) -> Lowered<()> {
        if !self.has("async") {
            return Err(self.unsupported());
        }
        if self.has("bulk") {
            return self.copy_bulk();
        }
        if self.has("commit_group") || self.has("wait_all") {
            self.done()?;
            let [] = self.operands()?;
            return Ok(());
        }
        if self.has("wait_group") {
            return self.wait_group();
        }
        if self.has("mbarrier") {
            return self.arrive_after_copies();
        }
        let whole_lines = self.modifiers.contains(&"cg");
        if !whole_lines && !self.modifiers.contains(&"ca") {
            return Err(self.unsupported());
        }
        let has_policy = self.modifiers.contains(&"L2::cache_hint");
        self.modifiers.retain(|modifier| !ignorable(modifier));
        let spaces = (self.find(space), self.find(space));
        if spaces != (Some(Space::Shared), Some(Space::Global)) {
            return Err(self.unsupported());
        }
        self.done()?;
        let current = self.current.map_or(&[][..], |current| &current.operands);
        let operands = match current {
            [rest @ .., _policy] if has_policy => rest,
            all => all,
        };
        let (to, from, size, reads) = match operands {
            [to, from, size] => (to, from, size, None),
            [to, from, size, reads] => (to, from, size, Some(reads)),
            _ => return Err(self.position.mistyped("wrong number of operands")),
        };
        let size = match *size {
            Operand::Integer(16) => 16,
            Operand::Integer(size @ (4 | 8)) if !whole_lines => size as u8,
            _ => return Err(self.position.mistyped("cp.async copies 4, 8 or 16 bytes, cg 16")),
        };
        let to = self.place(Space::Shared, to, 8)?;
        let from = self.place(Space::Global, from, 8)?;
        let reads = self.copy_reads(reads)?;
        let copy = self.code.copies.len() as u32;
        self.code.copies.push(AsyncCopy { to, from, size, reads });
        self.emit(Op::CopyAsync(copy));
        Ok(())
    }

    /// `cp.async.bulk`: whole pieces of memory, copied at once here.
    fn copy_bulk(&mut self) -> Lowered<()> {
        if self.has("commit_group") {
            self.done()?;
            let [] = self.operands()?;
            return Ok(());
        }
        if self.has("wait_group") {
            self.has("read");
            return self.wait_group();
        }
        if self.has("prefetch") {
            let known = self.has("L2") && self.has("global");
            return if known { self.done() } else { Err(self.unsupported()) };
        }
        let has_policy = self.modifiers.contains(&"L2::cache_hint");
        self.modifiers.retain(|modifier| !ignorable(modifier));
        let spaces = (self.find(space), self.find(space));
        let counted = self.has("mbarrier::complete_tx::bytes");
        let grouped = self.has("bulk_group");
        self.done()?;
        let (to_space, from_space) = match spaces {
            (Some(Space::Shared), Some(from @ (Space::Global | Space::Shared))) if counted => {
                (Space::Shared, from)
            }
            (Some(Space::Global), Some(Space::Shared)) if grouped => (Space::Global, Space::Shared),
            _ => return Err(self.unsupported()),
        };
        let current = self.current.map_or(&[][..], |current| &current.operands);
        let operands = match current {
            [rest @ .., _policy] if has_policy => rest,
            all => all,
        };
        let (to, from, size, barrier) = match operands {
            [to, from, size, barrier] if counted => (to, from, size, Some(barrier)),
            [to, from, size] if grouped => (to, from, size, None),
            _ => return Err(self.position.mistyped("wrong number of operands")),
        };
        let to = self.place(to_space, to, 8)?;
        let from = self.place(from_space, from, 8)?;
        let size = self.src(size, Type::U32)?;
        let barrier = match barrier {
            Some(barrier) => Some(self.place(Space::Shared, barrier, 8)?),
            None => None,
        };
        self.code.bulk_copies.push(BulkCopy { to, from, size, barrier });
        self.emit(Op::CopyBulk(self.code.bulk_copies.len() as u32 - 1));
        Ok(())
    }

    fn wait_group(&mut self) -> Lowered<()> {
        self.done()?;
        match self.operands()? {
            [Operand::Integer(_)] => Ok(()),
            [_] => Err(self.position.mistyped("the number of groups is a constant")),
        }
    }

    /// `cp.async.mbarrier.arrive`: an arrival when the copies are done, which they are. Without
    /// `.noinc` it is one that was not counted before.
    fn arrive_after_copies(&mut self) -> Lowered<()> {
        let known = self.has("arrive");
        let counted = self.has("noinc");
        let space = self.find(space).unwrap_or(Space::Generic);
        if !known || self.ty()? != Type::B64 || !matches!(space, Space::Generic | Space::Shared) {
            return Err(self.unsupported());
        }
        self.done()?;
        let [address] = self.operands()?;
        let place = self.place(space, address, 8)?;
        if counted {
            let one = self.constant(1);
            let arrive = MbarrierAction::Arrive { to: NONE, drops: false, expects: false };
            self.push_mbarrier(arrive, place, one);
        }
        Ok(())
    }

    /// The fourth operand: a number of bytes, or a predicate that says to read none.
    fn copy_reads(&mut self, operand: Option<&Operand<'a>>) -> Lowered<CopyReads> {
        Ok(match operand {
            None => CopyReads::All,
            Some(&Operand::Not(register)) => {
                CopyReads::Unless(self.typed(register, Type::Pred)?, true)
            }
            Some(&Operand::Register(register)) if self.types[register as usize] == Type::Pred => {
                CopyReads::Unless(register, false)
            }
            Some(operand) => CopyReads::Count(self.src(operand, Type::U32)?),
        })
    }
}
