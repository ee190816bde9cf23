//! Instructions that work across the lanes of a warp or the warps of a block.

use super::memory::{atomic_op, ignorable, space};
use super::{Lower, Lowered};
use crate::ptx::ast::{Operand, Space, Type};
use crate::ptx::code::{AtomicOp, BarrierMode, NONE, Op, Reg, ShuffleMode, Src, VoteMode};

impl<'a> Lower<'_, 'a> {
    pub(super) fn collective(&mut self, opcode: &str) -> Lowered<()> {
        match opcode {
            "shfl" => self.shuffle(),
            "vote" => self.vote(),
            "activemask" => {
                let ty = self.ty()?;
                self.done()?;
                let [to] = self.operands()?;
                let to = self.to(to, ty)?;
                self.emit(Op::ActiveMask(to));
                Ok(())
            }
            "match" => self.matching(),
            "redux" => self.reduce(),
            "elect" => {
                self.has("sync");
                self.done()?;
                let [to, members] = self.operands()?;
                let (to, valid) = self.with_predicate(to, Type::B32)?;
                let members = self.src(members, Type::B32)?;
                self.emit(Op::Elect { to, valid, members });
                Ok(())
            }
            _ => self.barrier(),
        }
    }

    /// A destination that may be followed by `|p`.
    pub(super) fn with_predicate(
        &mut self,
        operand: &Operand<'a>,
        ty: Type,
    ) -> Lowered<(Reg, Reg)> {
        match *operand {
            Operand::Pair(first, second) => {
                let first = match first {
                    Some(first) => self.typed(first, ty)?,
                    None => self.temporary(ty),
                };
                let second = match second {
                    Some(second) => self.typed(second, Type::Pred)?,
                    None => NONE,
                };
                Ok((first, second))
            }
            _ => Ok((self.to(operand, ty)?, NONE)),
        }
    }

    /// A predicate source, and whether it is negated.
    pub(super) fn predicate(&mut self, operand: &Operand<'a>) -> Lowered<(Src, bool)> {
        match *operand {
            Operand::Not(register) => Ok((self.typed(register, Type::Pred)?, true)),
            _ => Ok((self.src(operand, Type::Pred)?, false)),
        }
    }

    fn shuffle(&mut self) -> Lowered<()> {
        let ty = self.ty()?;
        let sync = self.has("sync");
        let mode = self.find(|m| {
            Some(match m {
                "up" => ShuffleMode::Up,
                "down" => ShuffleMode::Down,
                "bfly" => ShuffleMode::Butterfly,
                "idx" => ShuffleMode::Index,
                _ => return None,
            })
        });
        let mode = mode.ok_or_else(|| self.unsupported())?;
        self.done()?;
        let (to, value, lane, clamp) = if sync {
            let [to, value, lane, clamp, _members] = self.operands()?;
            (to, value, lane, clamp)
        } else {
            let [to, value, lane, clamp] = self.operands()?;
            (to, value, lane, clamp)
        };
        let (to, valid) = self.with_predicate(to, ty)?;
        let value = self.src(value, ty)?;
        let lane = self.src(lane, Type::B32)?;
        let clamp = self.src(clamp, Type::B32)?;
        self.emit(Op::Shuffle { mode, to, valid, value, lane, clamp });
        Ok(())
    }

    fn vote(&mut self) -> Lowered<()> {
        let ty = self.ty()?;
        let sync = self.has("sync");
        let mode = self.find(|m| {
            Some(match m {
                "all" => VoteMode::All,
                "any" => VoteMode::Any,
                "uni" => VoteMode::Uniform,
                "ballot" => VoteMode::Ballot,
                _ => return None,
            })
        });
        let mode = mode.ok_or_else(|| self.unsupported())?;
        self.done()?;
        let (to, predicate, members) = if sync {
            let [to, predicate, members] = self.operands()?;
            let members = self.src(members, Type::B32)?;
            (to, predicate, members)
        } else {
            let [to, predicate] = self.operands()?;
            (to, predicate, self.constant(u64::from(u32::MAX)))
        };
        let (predicate, negated) = self.predicate(predicate)?;
        let to = self.to(to, ty)?;
        self.emit(Op::Vote { mode, to, predicate, negated, members });
        Ok(())
    }

    fn matching(&mut self) -> Lowered<()> {
        let ty = self.ty()?;
        self.has("sync");
        let all = self.has("all");
        if !all && !self.has("any") {
            return Err(self.unsupported());
        }
        self.done()?;
        let [to, value, members] = self.operands()?;
        let (to, valid) = self.with_predicate(to, Type::B32)?;
        let (value, members) = (self.src(value, ty)?, self.src(members, Type::B32)?);
        self.emit(Op::Match { all, wide: ty.size() == 8, to, valid, value, members });
        Ok(())
    }

    fn reduce(&mut self) -> Lowered<()> {
        let ty = self.ty()?;
        self.has("sync");
        let op = self.find(atomic_op).ok_or_else(|| self.unsupported())?;
        self.done()?;
        use AtomicOp::{Add, And, Max, Min, Or, Xor};
        if ty.size() != 4 || ty.is_float() || !matches!(op, Add | And | Max | Min | Or | Xor) {
            return Err(self.unsupported());
        }
        let [to, value, members] = self.operands()?;
        let (to, value) = (self.to(to, ty)?, self.src(value, ty)?);
        let members = self.src(members, Type::B32)?;
        self.emit(Op::Reduce { op, signed: ty.is_signed(), to, value, members });
        Ok(())
    }

    fn barrier(&mut self) -> Lowered<()> {
        if self.has("warp") {
            self.has("sync");
            return self.done();
        }
        if self.has("cluster") {
            return self.cluster_barrier();
        }
        self.has("cta");
        self.has("aligned");
        let operands = self.current.map_or(&[][..], |current| &current.operands);
        let absent = NONE;
        if self.has("red") {
            let mode = self.find(|m| {
                Some(match m {
                    "popc" => BarrierMode::Count,
                    "and" => BarrierMode::And,
                    "or" => BarrierMode::Or,
                    _ => return None,
                })
            });
            let mode = mode.ok_or_else(|| self.unsupported())?;
            let ty = self.ty()?;
            self.done()?;
            let (to, id, threads, predicate) = match operands {
                [to, id, predicate] => (to, id, None, predicate),
                [to, id, threads, predicate] => (to, id, Some(threads), predicate),
                _ => return Err(self.position.mistyped("wrong number of operands")),
            };
            let to = self.to(to, ty)?;
            let id = self.src(id, Type::U32)?;
            let threads = match threads {
                Some(threads) => self.src(threads, Type::U32)?,
                None => absent,
            };
            let (predicate, negated) = self.predicate(predicate)?;
            self.emit(Op::Barrier { mode, id, threads, to, predicate, negated });
            return Ok(());
        }
        let mode = if self.has("arrive") { BarrierMode::Arrive } else { BarrierMode::Sync };
        if mode == BarrierMode::Sync && !self.has("sync") {
            return Err(self.unsupported());
        }
        self.done()?;
        let (id, threads) = match operands {
            [id] => (id, None),
            [id, threads] => (id, Some(threads)),
            _ => return Err(self.position.mistyped("wrong number of operands")),
        };
        let id = self.src(id, Type::U32)?;
        let threads = match threads {
            Some(threads) => self.src(threads, Type::U32)?,
            None => absent,
        };
        let (to, predicate) = (absent, absent);
        self.emit(Op::Barrier { mode, id, threads, to, predicate, negated: false });
        Ok(())
    }

    /// The threads of a cluster meet where they wait, which all of them do.
    fn cluster_barrier(&mut self) -> Lowered<()> {
        self.has("aligned");
        self.modifiers.retain(|modifier| !ignorable(modifier));
        let [] = self.operands()?;
        if self.has("arrive") {
            self.done()?;
            self.emit(Op::Fence);
            return Ok(());
        }
        if !self.has("wait") {
            return Err(self.unsupported());
        }
        self.done()?;
        let (id, threads, to, predicate) = (NONE, NONE, NONE, NONE);
        let mode = BarrierMode::Sync;
        self.emit(Op::Barrier { mode, id, threads, to, predicate, negated: false });
        Ok(())
    }

    /// `mapa` and `getctarank`: an address in the block of a rank, and the rank of an address.
    pub(super) fn cluster_address(&mut self, opcode: &str) -> Lowered<()> {
        let ty = self.ty()?;
        let space = self.find(space).unwrap_or(Space::Generic);
        if !matches!(space, Space::Generic | Space::Shared) || !matches!(ty, Type::U32 | Type::U64)
        {
            return Err(self.unsupported());
        }
        self.done()?;
        if opcode == "getctarank" {
            let [to, address] = self.operands()?;
            let (to, address) = (self.to(to, Type::U32)?, self.src(address, ty)?);
            self.emit(Op::RankOfAddress(to, address));
            return Ok(());
        }
        let [to, address, rank] = self.operands()?;
        let (to, address) = (self.to(to, ty)?, self.src(address, ty)?);
        let rank = self.src(rank, Type::U32)?;
        self.emit(Op::ClusterAddress(to, address, rank));
        Ok(())
    }
}
