//! The values of one kernel: computed until nothing changes, then judged.

use std::collections::{HashMap, VecDeque};

use super::classes::is_computation;
use super::parse::{Function, Instruction, Module, Operand, Var};
use super::value::{CONST, FOREIGN, LOCAL, Marks, NUMBER, PARAM, SHARED, VARIABLE, Value};
use super::{parse::Atom, parse::Space, reach};
use crate::{Direction, Kernel, Param, Source};

/// All local memory, and all shared memory.
pub(super) const LOCAL_CELL: usize = 0;
pub(super) const SHARED_CELL: usize = 1;

/// The most values that a kernel may have, in units of 64 words: 128 MiB.
const MOST_VALUES: usize = 1 << 21;
/// How many values its instructions may look at, in all.
const MOST_USES: usize = 1 << 24;
/// How often its instructions may be looked at on average.
const MOST_ROUNDS: usize = 100;
/// How many instructions and values may be looked at for all kernels of a module. What kernels call is
/// followed for each of them anew, so this may be much more than the module has.
pub(super) const MOST_WORK: usize = 1 << 23;

/// A function as a part of a kernel.
struct Frame {
    /// Where the values of each variable begin: one for a register, one for each 8 bytes of a
    /// parameter. One entry more than there are variables.
    first: Vec<usize>,
}

/// A function of a module, by index.
pub(super) type FunctionId = usize;

pub(super) struct Flow<'m, 'a> {
    pub(super) module: &'m Module<'a>,
    pub(super) entry: FunctionId,
    frames: HashMap<FunctionId, Frame>,
    values: Vec<Value>,
    /// Where the values of the kernel's parameters are. They never grow.
    parameters: std::ops::Range<usize>,
    /// What has grown since it was last asked for.
    grown: Vec<usize>,
    /// Values are final: accesses count.
    judging: bool,
    /// The instruction that is looked at, among all.
    at: usize,
    /// Each instruction that touches memory by way of a word, and the word.
    accesses: Vec<(usize, usize)>,
    directions: Vec<Direction>,
    indirect: bool,
    variables: Direction,
    closed: bool,
}

/// The parameters of a kernel as a launch lays them out, all words with this direction.
fn parameters(function: &Function<'_>, direction: Direction) -> Vec<Param> {
    let mut end = 0_u32;
    let sizes = function.params.iter().map(|param| match function.vars[*param] {
        Var::Param { bytes, align } => (bytes, align),
        Var::Register(bytes) => (bytes, bytes.max(1)),
        Var::Memory(_) => (0, 1),
    });
    sizes
        .map(|(bytes, align)| {
            // Size and alignment are bounded by the parser, and so is the number of parameters.
            let offset = end.next_multiple_of(align);
            end = offset + bytes;
            Param::uniform(offset, bytes, direction, Source::Ptx)
        })
        .collect()
}

/// What the kernel of this index does. Takes what it costs from `work`.
pub(super) fn kernel(module: &Module<'_>, entry: FunctionId, work: &mut usize) -> Kernel {
    let function = &module.functions[entry];
    let name = function.name.to_owned();
    let Some(flow) = Flow::settled(module, entry, work) else {
        let params = parameters(function, Direction::Unknown);
        let variables = Direction::Unknown;
        return Kernel { name, params, indirect: true, variables, closed: false };
    };
    let mut params = parameters(function, Direction::None);
    let words = params.iter_mut().flat_map(|param| &mut param.words);
    // The kernel's own instructions come first.
    let reaches = reach::reaches(function, &flow.accesses, flow.directions.len(), work);
    for ((word, direction), reach) in words.zip(&flow.directions).zip(reaches) {
        word.direction = *direction;
        word.reach = reach.filter(|_| *direction != Direction::Unknown);
    }
    let Flow { indirect, variables, closed, .. } = flow;
    Kernel { name, params, indirect, variables, closed }
}

/// Takes the cost of something; `None` if that is more than there is.
fn spend(work: &mut usize, cost: usize) -> Option<()> {
    let left = work.checked_sub(cost);
    *work = left.unwrap_or(0);
    left.map(drop)
}

impl<'m, 'a> Flow<'m, 'a> {
    /// Everything computed and judged; `None` if it is too large.
    fn settled(
        module: &'m Module<'a>,
        entry: FunctionId,
        work: &mut usize,
    ) -> Option<Flow<'m, 'a>> {
        let mut flow = Flow {
            module,
            entry,
            frames: HashMap::new(),
            values: Vec::new(),
            parameters: 0..0,
            grown: Vec::new(),
            judging: false,
            at: 0,
            accesses: Vec::new(),
            directions: Vec::new(),
            indirect: false,
            variables: Direction::None,
            closed: true,
        };
        let functions = flow.reached(work)?;
        flow.lay_out(&functions)?;
        spend(work, flow.values.len())?;
        let code: Vec<(FunctionId, &'m Instruction<'a>)> = functions
            .iter()
            .flat_map(|id| module.functions[*id].code.iter().map(|instruction| (*id, instruction)))
            .collect();

        let mut users = vec![Vec::new(); flow.values.len()];
        let mut uses = 0;
        // A value has a bit for each word of the parameters.
        let value_cost = flow.directions.len() / 64 + 1;
        let mut costs = Vec::with_capacity(code.len());
        for (at, (function, instruction)) in code.iter().enumerate() {
            let read = flow.read_by(*function, instruction);
            uses += read.len();
            let cost = 1 + read.len() * value_cost;
            spend(work, cost)?;
            costs.push(cost);
            for slot in read {
                users[slot].push(at);
            }
            if uses > MOST_USES {
                return None;
            }
        }
        let mut queue: VecDeque<usize> = (0..code.len()).collect();
        let mut queued = vec![true; code.len()];
        let mut left = code.len().saturating_mul(MOST_ROUNDS);
        while let Some(at) = queue.pop_front() {
            left = left.checked_sub(1)?;
            spend(work, costs[at])?;
            queued[at] = false;
            flow.step(code[at].0, code[at].1);
            for slot in std::mem::take(&mut flow.grown) {
                for user in &users[slot] {
                    if !std::mem::replace(&mut queued[*user], true) {
                        queue.push_back(*user);
                    }
                }
            }
        }
        flow.judging = true;
        let mut accesses = 0;
        for (at, (function, instruction)) in code.into_iter().enumerate() {
            flow.at = at;
            flow.step(function, instruction);
            if instruction.operands.iter().any(|operand| operand.atoms().contains(&Atom::Fleeting))
            {
                flow.mark_open();
            }
            spend(work, flow.accesses.len() - accesses)?;
            accesses = flow.accesses.len();
        }
        Some(flow)
    }

    /// The kernel and all functions that it may call by name.
    fn reached(&self, work: &mut usize) -> Option<Vec<FunctionId>> {
        let mut found = vec![self.entry];
        let mut seen = vec![false; self.module.functions.len()];
        seen[self.entry] = true;
        spend(work, seen.len())?;
        let mut at = 0;
        while let Some(id) = found.get(at).copied() {
            spend(work, self.module.functions[id].code.len())?;
            for instruction in &self.module.functions[id].code {
                if let Some(callee) = self.call(instruction).and_then(|call| call.callee)
                    && !std::mem::replace(&mut seen[callee], true)
                {
                    found.push(callee);
                }
            }
            at += 1;
        }
        Some(found)
    }

    /// Makes room for all values and puts the words where the kernel finds its parameters.
    fn lay_out(&mut self, functions: &[FunctionId]) -> Option<()> {
        let entry = &self.module.functions[self.entry];
        let params = parameters(entry, Direction::None);
        let words: usize = params.iter().map(|param| param.words.len()).sum();
        let mut total = SHARED_CELL + 1;
        for id in functions {
            let mut first = Vec::new();
            for var in &self.module.functions[*id].vars {
                first.push(total);
                total += match var {
                    Var::Register(_) => 1,
                    Var::Param { bytes, .. } => bytes.div_ceil(8).max(1) as usize,
                    Var::Memory(_) => 0,
                };
            }
            first.push(total);
            self.frames.insert(*id, Frame { first });
        }
        if total.checked_mul(words / 64 + 1)? > MOST_VALUES {
            return None;
        }
        // The parser puts parameters first, and the kernel is the first function.
        let first = &self.frames[&self.entry].first;
        self.parameters = first[0]..first[entry.returns.len() + entry.params.len()];
        self.values = vec![Value::default(); total];
        self.directions = vec![Direction::None; words];
        let mut word = 0;
        for (var, param) in entry.params.iter().zip(&params) {
            for (at, slot) in self.slots(self.entry, *var).enumerate() {
                self.values[slot] = if at < param.words.len() {
                    word += 1;
                    Value::of_word(word - 1)
                } else {
                    Value::marked(NUMBER)
                };
            }
        }
        Some(())
    }

    /// The values of a variable.
    pub(super) fn slots(&self, function: FunctionId, var: usize) -> std::ops::Range<usize> {
        let first = &self.frames[&function].first;
        first[var]..first[var + 1]
    }

    /// The values that a step of this instruction may look at.
    fn read_by(&self, function: FunctionId, instruction: &Instruction<'a>) -> Vec<usize> {
        let mut slots = Vec::new();
        for atom in instruction.operands.iter().flat_map(Operand::atoms) {
            if let Atom::Var(var) = atom {
                let own = self.slots(function, *var);
                if !self.parameters.contains(&own.start) {
                    slots.extend(own);
                }
            }
        }
        if let Some(callee) = self.call(instruction).and_then(|call| call.callee) {
            let called = &self.module.functions[callee];
            slots.extend(called.returns.iter().flat_map(|var| self.slots(callee, *var)));
        }
        // Whatever has an address may read local and shared memory; so may calls and instructions
        // without a rule.
        if !is_computation(instruction) {
            slots.extend([LOCAL_CELL, SHARED_CELL]);
        }
        slots.sort_unstable();
        slots.dedup();
        slots
    }

    pub(super) fn var(&self, function: FunctionId, var: usize) -> Var {
        self.module.functions[function].vars[var]
    }

    pub(super) fn value(&self, slot: usize) -> &Value {
        &self.values[slot]
    }

    pub(super) fn grow(&mut self, slot: usize, value: &Value) {
        if self.values[slot].add(value) {
            self.grown.push(slot);
        }
    }

    pub(super) fn union(&self, slots: impl IntoIterator<Item = usize>) -> Value {
        slots.into_iter().fold(Value::default(), |all, slot| all.and(&self.values[slot]))
    }

    /// What an atom stands for when it is computed with, or is an address.
    fn atom(&self, function: FunctionId, atom: &Atom<'a>) -> Value {
        let address_of = |space| {
            Value::marked(match space {
                Space::Local => LOCAL,
                Space::Shared => SHARED,
                Space::Const => CONST,
                Space::Global => VARIABLE,
                Space::Generic | Space::Param => FOREIGN,
            })
        };
        match atom {
            Atom::Var(var) => match self.var(function, *var) {
                // Values do not flow through predicates.
                Var::Register(0) => Value::default(),
                Var::Register(_) => self.union(self.slots(function, *var)),
                Var::Param { .. } => self.union(self.slots(function, *var)).with(PARAM),
                Var::Memory(space) => address_of(space),
            },
            Atom::Name(name) => match self.module.variables.get(name) {
                Some(space) => address_of(*space),
                // A function or a label.
                None => Value::marked(FOREIGN),
            },
            Atom::Number(number) => Value::constant(*number),
            Atom::Index(_) | Atom::Fleeting | Atom::Other => Value::default(),
        }
    }

    pub(super) fn operand(&self, function: FunctionId, operand: &Operand<'a>) -> Value {
        let atoms = operand.atoms().iter();
        atoms.fold(Value::default(), |all, atom| all.and(&self.atom(function, atom)))
    }

    pub(super) fn operands(&self, function: FunctionId, operands: &[Operand<'a>]) -> Value {
        let operands = operands.iter();
        operands.fold(Value::default(), |all, operand| all.and(&self.operand(function, operand)))
    }

    /// The address in brackets: what comes after the base is an offset, or coordinates.
    pub(super) fn address(&self, function: FunctionId, operand: Option<&Operand<'a>>) -> Value {
        match operand.and_then(|operand| operand.atoms().first()) {
            // An absolute address.
            Some(Atom::Number(_)) | None => Value::default(),
            Some(atom) => self.atom(function, atom),
        }
    }

    /// Writes registers.
    pub(super) fn set(&mut self, function: FunctionId, operand: &Operand<'a>, value: &Value) {
        for atom in operand.atoms() {
            let Atom::Var(var) = atom else { continue };
            let slot = self.slots(function, *var).start;
            match self.var(function, *var) {
                Var::Register(0) | Var::Param { .. } | Var::Memory(_) => {}
                Var::Register(..8) => self.grow(slot, &value.clone().narrow()),
                Var::Register(_) => self.grow(slot, value),
            }
        }
    }

    /// Counts an access to global memory. A generic address may be one of another space.
    pub(super) fn access(&mut self, address: &Value, space: Space, direction: Direction) {
        let is_global = space == Space::Global;
        if self.judging && space == Space::Const {
            self.variables = self.variables.and(direction);
        }
        if !self.judging || !(is_global || space == Space::Generic) {
            return;
        }
        self.mark(address, direction);
        let other: Marks = LOCAL | SHARED | CONST | PARAM;
        let explained =
            address.has_words() || address.has(VARIABLE) || !is_global && address.has(other);
        if address.has(FOREIGN) || !explained {
            self.indirect = true;
        }
    }

    /// Counts something that is done to the memory that all words of a value point to.
    pub(super) fn mark(&mut self, value: &Value, direction: Direction) {
        if !self.judging {
            return;
        }
        for word in value.words() {
            self.directions[word] = self.directions[word].and(direction);
            self.accesses.push((self.at, word));
        }
        if value.has(VARIABLE | CONST) {
            self.variables = self.variables.and(direction);
        }
    }

    /// Counts something that reaches memory in a way that words do not tell.
    pub(super) fn mark_indirect(&mut self) {
        self.indirect |= self.judging;
    }

    /// Counts something that depends on more than memory, or shows elsewhere.
    pub(super) fn mark_open(&mut self) {
        self.closed &= !self.judging;
    }
}
