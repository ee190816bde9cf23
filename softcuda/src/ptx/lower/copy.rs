//! `cp.async`: copies from global to shared memory.
//!
//! A GPU may copy at any time between the instruction and the wait for its group. Here the bytes
//! are there at once, which is one of the allowed orders, so groups need no record.

use super::memory::{ignorable, space};
use super::{Lower, Lowered};
use crate::ptx::ast::{Operand, Space, Type};
use crate::ptx::code::{AsyncCopy, CopyReads, Op};

impl<'a> Lower<'_, 'a> {
    pub(super) fn copy_async(&mut self) -> Lowered<()> {
        if !self.has("async") {
            return Err(self.unsupported());
        }
        if self.has("commit_group") || self.has("wait_all") {
            self.done()?;
            let [] = self.operands()?;
            return Ok(());
        }
        if self.has("wait_group") {
            self.done()?;
            return match self.operands()? {
                [Operand::Integer(_)] => Ok(()),
                [_] => Err(self.position.mistyped("the number of groups is a constant")),
            };
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
