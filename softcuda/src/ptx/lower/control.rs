//! Branches and calls.

use super::Location;
use super::{Lower, Lowered, Pending};
use crate::ptx::ast::{Base, Operand, Space, Type};
use crate::ptx::code::{CallSite, Op, Slot};

impl<'a> Lower<'_, 'a> {
    pub(super) fn control(&mut self, opcode: &str) -> Lowered<()> {
        self.has("uni");
        match opcode {
            "bra" => self.branch(),
            "brx" => self.branch_indexed(),
            "call" => self.call(),
            _ => {
                self.done()?;
                let [] = self.operands()?;
                self.emit(match opcode {
                    "ret" => Op::Return,
                    "exit" => Op::Exit,
                    _ => Op::Trap,
                });
                Ok(())
            }
        }
    }

    fn branch(&mut self) -> Lowered<()> {
        self.done()?;
        let [Operand::Symbol(Base::Name(name), 0)] = self.operands()? else {
            return Err(self.position.mistyped("expected a label"));
        };
        let target = self.label(name)?;
        self.branches.push(Pending::Branch { inst: self.code.insts.len(), target });
        self.emit(Op::Branch(0, 0));
        Ok(())
    }

    fn branch_indexed(&mut self) -> Lowered<()> {
        if !self.has("idx") {
            return Err(self.unsupported());
        }
        self.done()?;
        let [index, Operand::Symbol(Base::Name(list), 0)] = self.operands()? else {
            return Err(self.position.mistyped("expected an index and a list of targets"));
        };
        let index = self.src(index, Type::U32)?;
        let labels = self
            .in_scope(|body, scope| body.targets.get(&(scope, list)))
            .ok_or_else(|| self.position.undefined(list))?;
        let targets = labels.iter().map(|label| self.label(label)).collect::<Lowered<Vec<_>>>()?;
        let table = self.code.tables.len();
        self.code.tables.push(Vec::new());
        self.branches.push(Pending::Table { table, targets });
        self.emit(Op::BranchIndexed(index, table as u32, 0));
        Ok(())
    }

    /// `alloca`, `stacksave` and `stackrestore`.
    pub(super) fn stack(&mut self, opcode: &str) -> Lowered<()> {
        let ty = self.ty()?;
        if !matches!(ty, Type::U32 | Type::U64) {
            return Err(self.unsupported());
        }
        self.done()?;
        let op = match opcode {
            "alloca" => {
                let (to, size, align) = match self.current.map_or(&[][..], |c| &c.operands) {
                    [to, size] => (to, size, 8),
                    [to, size, Operand::Integer(align)]
                        if align.is_power_of_two() && *align <= 1 << 16 =>
                    {
                        (to, size, *align as u32)
                    }
                    _ => return Err(self.position.mistyped("expected a size and an alignment")),
                };
                Op::StackAllocate(self.to(to, ty)?, self.src(size, ty)?, align)
            }
            "stacksave" => {
                let [to] = self.operands()?;
                Op::StackSave(self.to(to, ty)?)
            }
            _ => {
                let [from] = self.operands()?;
                Op::StackRestore(self.src(from, ty)?)
            }
        };
        self.emit(op);
        Ok(())
    }

    /// The frame slots of a parenthesised list of `.param` variables.
    fn arguments(&self, operands: &[Operand<'a>]) -> Lowered<Vec<Slot>> {
        operands
            .iter()
            .map(|operand| {
                let Operand::Symbol(Base::Variable(index), 0) = *operand else {
                    return Err(self.position.unsupported("call with an argument not in .param"));
                };
                let body = self.function.body.as_ref();
                let variable = body.map(|body| &body.variables[index]);
                match (self.locations[index], variable) {
                    (Location::Frame(offset), Some(variable)) if variable.space == Space::Param => {
                        Ok(Slot { offset, size: variable.size as u32 })
                    }
                    _ => Err(self.position.mistyped("an argument must be a .param variable")),
                }
            })
            .collect()
    }

    fn call(&mut self) -> Lowered<()> {
        self.done()?;
        let operands = self.current.map_or(&[][..], |current| &current.operands);
        let (returns, rest) = match operands {
            [Operand::List(returns), rest @ ..] => (&returns[..], rest),
            rest => (&[][..], rest),
        };
        let Some((target, rest)) = rest.split_first() else {
            return Err(self.position.mistyped("expected a function"));
        };
        let args = match rest.first() {
            Some(Operand::List(args)) => &args[..],
            _ => &[],
        };
        let site = CallSite { args: self.arguments(args)?, returns: self.arguments(returns)? };
        match *target {
            Operand::Symbol(Base::Name(name), 0) => {
                let signature = self.names.functions.get(name);
                let signature = signature.ok_or_else(|| self.position.undefined(name))?;
                if !signature.fits(&site) {
                    let message = format!("the arguments do not match those of `{name}`");
                    return Err(self.position.mistyped(message));
                }
                let op = match signature.number {
                    Some(number) => Op::Call(number, self.call_site(site)),
                    None => self.known_function(name, site)?,
                };
                self.emit(op);
                Ok(())
            }
            Operand::Register(register) => {
                let target = self.typed(register, Type::U64)?;
                let site = self.call_site(site);
                self.emit(Op::CallIndirect(target, site));
                Ok(())
            }
            _ => Err(self.position.mistyped("expected a function")),
        }
    }

    /// A call of a function that the driver has code for.
    fn known_function(&mut self, name: &str, site: CallSite) -> Lowered<Op> {
        let op: fn(u32) -> Op = match (name, site.args.len(), site.returns.len()) {
            ("vprintf", 2, 1) => Op::Print,
            ("__assertfail", 5, _) => Op::AssertFail,
            ("malloc", 1, 1) => Op::HeapAllocate,
            ("free", 1, _) => Op::HeapFree,
            ("cudaGraphSetConditional", 2, _) => Op::SetCondition,
            _ => return self.device_call(name, site),
        };
        self.code.uses_heap |= matches!(name, "malloc" | "free");
        Ok(op(self.call_site(site)))
    }
}
