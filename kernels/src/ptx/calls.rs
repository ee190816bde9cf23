//! Calls, and what happens to values that leave the module.

use super::flow::{Flow, FunctionId, LOCAL_CELL, SHARED_CELL};
use super::parse::{Atom, Instruction, Operand};
use super::value::{FOREIGN, LOCAL, PARAM, PIECES, SHARED, Value};
use crate::Direction;

/// A call's operands.
pub(super) struct Call<'i, 'a> {
    returns: &'i [Atom<'a>],
    /// Absent for a function without a body, and for a pointer.
    pub(super) callee: Option<FunctionId>,
    name: Option<&'a str>,
    arguments: &'i [Atom<'a>],
}

impl<'m, 'a> Flow<'m, 'a> {
    /// The operands of a call; `None` for other instructions.
    pub(super) fn call<'i>(&self, i: &'i Instruction<'a>) -> Option<Call<'i, 'a>> {
        if i.base() != "call" {
            return None;
        }
        let (returns, rest) = match &i.operands[..] {
            [Operand::List(returns), rest @ ..] => (&returns[..], rest),
            rest => (&[][..], rest),
        };
        let (target, rest) = rest.split_first()?;
        let arguments = match rest {
            [Operand::List(arguments), ..] => &arguments[..],
            _ => &[],
        };
        let name = match target.atoms() {
            [Atom::Name(name)] => Some(*self.module.aliases.get(name).unwrap_or(name)),
            _ => None,
        };
        let callee = name.and_then(|name| self.module.by_name.get(name).copied());
        Some(Call { returns, callee, name, arguments })
    }

    pub(super) fn apply_call(&mut self, f: FunctionId, i: &Instruction<'a>) {
        let Some(call) = self.call(i) else { return self.unknown(f, i) };
        let Some(callee) = call.callee else {
            return self.call_unknown(f, &call);
        };
        let called = &self.module.functions[callee];
        self.bind(f, call.arguments, callee, &called.params);
        for (atom, from) in call.returns.iter().zip(&called.returns) {
            if let Atom::Var(to) = atom {
                self.transfer((callee, *from), (f, *to));
            }
        }
    }

    /// Arguments to parameters. A function that takes more than it says gets all in each.
    fn bind(
        &mut self,
        f: FunctionId,
        arguments: &[Atom<'a>],
        callee: FunctionId,
        params: &[usize],
    ) {
        if arguments.len() == params.len() {
            for (argument, param) in arguments.iter().zip(params) {
                match argument {
                    Atom::Var(var) => self.transfer((f, *var), (callee, *param)),
                    other => {
                        let value = self.operand(f, &Operand::Plain(vec![*other]));
                        let slot = self.slots(callee, *param).start;
                        self.grow(slot, &value);
                    }
                }
            }
        } else {
            let value = self.operand(f, &Operand::List(arguments.to_vec())).with(FOREIGN);
            for param in params {
                for slot in self.slots(callee, *param) {
                    self.grow(slot, &value);
                }
            }
        }
    }

    /// Copies all values of a variable to another one's.
    fn transfer(&mut self, from: (FunctionId, usize), to: (FunctionId, usize)) {
        let (source, target) = (self.slots(from.0, from.1), self.slots(to.0, to.1));
        if source.len() == target.len() {
            for (from, to) in source.zip(target) {
                let value = self.value(from).clone();
                self.grow(to, &value);
            }
        } else {
            let value = self.union(source).with(FOREIGN);
            for to in target {
                self.grow(to, &value);
            }
        }
    }

    /// A function without a body, or a pointer to one.
    fn call_unknown(&mut self, f: FunctionId, call: &Call<'_, 'a>) {
        let mut passed = self.operand(f, &Operand::List(call.arguments.to_vec()));
        let printed = call.name == Some("vprintf");
        match call.name {
            // Runtime functions that touch no memory of the program's, given no bad pointer.
            Some(name @ ("__assertfail" | "free" | "malloc" | "vprintf")) => {
                if name != "__assertfail" {
                    self.mark_open();
                }
                if printed {
                    // What `%s` prints is read.
                    passed.add(self.value(LOCAL_CELL));
                    self.mark(&passed, Direction::Read);
                    if self.value(LOCAL_CELL).has(FOREIGN) {
                        self.mark_indirect();
                    }
                }
            }
            _ => {
                self.reach(&passed);
                self.mark_indirect();
            }
        }
        for atom in call.returns {
            let Atom::Var(var) = atom else { continue };
            for slot in self.slots(f, *var) {
                self.grow(slot, &passed.clone().without(PARAM).with(FOREIGN));
            }
        }
    }

    /// Anything may be done to what a value points to, also by way of local and shared memory.
    pub(super) fn reach(&mut self, value: &Value) {
        self.mark(value, Direction::Unknown);
        if value.has(FOREIGN) {
            self.mark_indirect();
        }
        for (mark, cell) in [(LOCAL, LOCAL_CELL), (SHARED, SHARED_CELL)] {
            if value.has(mark | FOREIGN) {
                let stored = self.value(cell).clone();
                self.mark(&stored, Direction::Unknown);
                if stored.has(FOREIGN | PIECES) {
                    self.mark_indirect();
                }
                self.grow(cell, &value.clone().with(FOREIGN));
            }
        }
    }
}
