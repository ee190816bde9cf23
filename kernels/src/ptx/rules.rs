//! What each instruction does to values and memory. Operands are in the order of "Parallel Thread
//! Execution ISA": what is written comes first.

use super::classes::{has_no_effect, is_computation};
use super::flow::{Flow, FunctionId, LOCAL_CELL, SHARED_CELL};
use super::parse::{Atom, Instruction, Operand, Space, Var};
use super::value::{FOREIGN, LARGE, LOCAL, NUMBER, PARAM, PIECES, SHARED, VARIABLE, Value};
use crate::Direction;

/// Shifted left by so many bits, what was an address is a number: the size of an element.
const SCALE_BITS: i64 = 12;
/// Shifted left by so many bits or more, a number may be the upper part of an address.
const PART_BITS: i64 = 24;

impl<'m, 'a> Flow<'m, 'a> {
    /// Applies one instruction.
    pub(super) fn step(&mut self, f: FunctionId, i: &'m Instruction<'a>) {
        let operands = &i.operands[..];
        let space = i.spaces().next().unwrap_or(Space::Generic);
        if is_computation(i) {
            return self.compute(f, i);
        }
        if has_no_effect(i) {
            if i.base() == "activemask" {
                self.mark_open();
            }
            return;
        }
        match (i.base(), operands) {
            ("ld" | "ldu", [to, address, ..]) if space == Space::Param => {
                self.load_parameter(f, i, to, address);
            }
            ("ld" | "ldu", [to, address, ..]) => self.load(f, i, space, to, address),
            ("st", [to, value, ..]) if space == Space::Param => {
                self.store_parameter(f, i, to, value);
            }
            ("st", [to, values @ ..]) => self.store(f, i, space, Direction::Write, to, values),
            ("red", [to, values @ ..]) => {
                self.take_turns(f, i, space, to);
                self.store(f, i, space, Direction::ReadWrite, to, values);
            }
            ("atom", [to, address, values @ ..]) => {
                self.take_turns(f, i, space, address);
                self.store(f, i, space, Direction::ReadWrite, address, values);
                self.load(f, i, space, to, address);
            }
            // The memory is what is bound to a multicast object: at other addresses, on other devices, of other processes.
            ("multimem", _) => {
                self.unknown(f, i);
                self.mark_indirect();
            }
            ("ldmatrix", [to, address, ..]) => self.load(f, i, Space::Shared, to, address),
            ("stmatrix", [to, values @ ..]) => {
                self.store(f, i, Space::Shared, Direction::Write, to, values);
            }
            ("wmma", [to, address, ..]) if i.has("load") => self.load(f, i, space, to, address),
            ("wmma", [to, value, ..]) if i.has("store") => {
                self.store(f, i, space, Direction::Write, to, std::slice::from_ref(value));
            }
            ("wmma", [to, values @ ..]) if i.has("mma") => {
                let value = self.operands(f, values);
                self.set(f, to, &value);
            }
            // These instructions work on registers, on shared memory and on memory of their own.
            ("wgmma" | "tcgen05", operands) => {
                for operand in operands.iter().filter(|to| !matches!(to, Operand::Address(..))) {
                    self.set(f, operand, &Value::marked(FOREIGN));
                }
            }
            ("cp", operands) => self.copy(f, i, operands),
            ("discard", [address, ..]) => {
                let address = self.address(f, Some(address));
                self.access(&address, space, Direction::Write);
            }
            ("tensormap", [address, ..]) => {
                let address = self.address(f, Some(address));
                self.access(&address, Space::Generic, Direction::ReadWrite);
            }
            ("tex" | "tld4" | "suld" | "sust" | "sured", [to, ..]) => {
                let all = self.operands(f, operands);
                self.mark(&all, Direction::Unknown);
                self.mark_indirect();
                // What a store writes first is no register that it changes; more is allowed.
                self.set(f, to, &Value::marked(FOREIGN));
            }
            ("txq" | "suq" | "istypep", [to, ..]) => self.set(f, to, &Value::marked(NUMBER)),
            ("alloca" | "stacksave", [to, ..]) => self.set(f, to, &Value::marked(LOCAL)),
            ("call", _) => self.apply_call(f, i),
            _ => self.unknown(f, i),
        }
    }

    fn compute(&mut self, f: FunctionId, i: &Instruction<'a>) {
        let Some((to, from)) = i.operands.split_first() else { return };
        let all = self.operands(f, from);
        let value = match (i.base(), from) {
            ("mov", [Operand::Vector(_)]) if !matches!(to, Operand::Vector(_)) => {
                all.put_together()
            }
            ("bfi", _) => all.put_together(),
            ("cvta" | "mapa", _) => {
                let marks = match i.spaces().next() {
                    Some(Space::Local) => LOCAL,
                    Some(Space::Shared) => SHARED,
                    None if i.base() == "mapa" => SHARED,
                    _ => 0,
                };
                all.with(marks)
            }
            ("shl", [value, by]) => self.shifted(f, value, by),
            ("mul" | "mul24", [a, b]) => self.product(f, i, a, b),
            ("mad" | "mad24" | "madc", [a, b, c]) => {
                self.product(f, i, a, b).and(&self.operand(f, c))
            }
            ("div" | "rem", _) => all.scaled(),
            _ => all,
        };
        self.set(f, to, &value);
    }

    fn shifted(&self, f: FunctionId, value: &Operand<'a>, by: &Operand<'a>) -> Value {
        let value = self.operand(f, value);
        match by.atoms() {
            [Atom::Number(0)] => value,
            [Atom::Number(1..=SCALE_BITS)] => value.scaled(),
            [Atom::Number(bits)] if (0..PART_BITS).contains(bits) => value,
            // A shift by a number of bits that is known late, or of an upper part.
            _ => value.put_together(),
        }
    }

    fn product(
        &self,
        f: FunctionId,
        i: &Instruction<'a>,
        a: &Operand<'a>,
        b: &Operand<'a>,
    ) -> Value {
        let value = self.operand(f, a).and(&self.operand(f, b));
        let constant = [a, b].into_iter().find_map(|operand| match operand.atoms() {
            [Atom::Number(number)] => Some(number.unsigned_abs()),
            _ => None,
        });
        if i.has("wide") || i.has("hi") || i.base() != "mul" && i.base() != "mad" {
            return value.scaled();
        }
        match constant {
            Some(0 | 1) => value,
            _ if value.has(LARGE) => value.put_together(),
            _ => value.scaled(),
        }
    }

    /// What a load of elements of so many bytes finds in local or shared memory.
    fn stored(&self, cell: usize, element: u32) -> Value {
        let value = self.value(cell).clone();
        let value = if element >= 8 && value.has(PIECES) { value.with(FOREIGN) } else { value };
        value.without(PIECES)
    }

    fn load(
        &mut self,
        f: FunctionId,
        i: &Instruction<'a>,
        space: Space,
        to: &Operand<'a>,
        address: &Operand<'a>,
    ) {
        let address = self.address(f, Some(address));
        self.access(&address, space, Direction::Read);
        let element = if i.base() == "ldmatrix" { 4 } else { i.element() };
        let generic = space == Space::Generic;
        let mut value = Value::default();
        if space == Space::Local || generic && address.has(LOCAL | FOREIGN) {
            value.add(&self.stored(LOCAL_CELL, element));
        }
        if space == Space::Shared || generic && address.has(SHARED | FOREIGN) {
            value.add(&self.stored(SHARED_CELL, element));
        }
        // The address of a function's parameter is one in local memory.
        if (generic || space == Space::Local) && address.has(PARAM) {
            value.add(&address.clone().without(PARAM).put_together());
        }
        let only_other = !address.has_words() && !address.has(FOREIGN | VARIABLE);
        let is_other = matches!(space, Space::Local | Space::Shared);
        if !(is_other || generic && only_other && address.has(LOCAL | SHARED)) {
            value.add(&Value::marked(FOREIGN));
        }
        self.set(f, to, &value);
    }

    fn store(
        &mut self,
        f: FunctionId,
        i: &Instruction<'a>,
        space: Space,
        direction: Direction,
        to: &Operand<'a>,
        values: &[Operand<'a>],
    ) {
        let address = self.address(f, Some(to));
        self.access(&address, space, direction);
        let value = self.operands(f, values);
        let element = if i.base() == "stmatrix" { 4 } else { i.element() };
        let pieces = if element < 8 && value.has(NUMBER) { PIECES } else { 0 };
        let generic = space == Space::Generic;
        if (generic || space == Space::Local) && address.has(PARAM) {
            self.lose(&value);
        }
        let value = value.with(pieces);
        if space == Space::Local || generic && address.has(LOCAL | FOREIGN) {
            self.grow(LOCAL_CELL, &value);
        }
        if space == Space::Shared || generic && address.has(SHARED | FOREIGN) {
            self.grow(SHARED_CELL, &value);
        }
    }

    /// An atomic operation. In shared memory nothing else tells that the threads' order counts: for whoever is told what
    /// was there before, and for sums of numbers that are rounded. (Device memory is read and written by it.)
    fn take_turns(&mut self, f: FunctionId, i: &Instruction<'a>, space: Space, to: &Operand<'a>) {
        let address = self.address(f, Some(to));
        let is_shared =
            space == Space::Shared || space == Space::Generic && address.has(SHARED | FOREIGN);
        let rounds =
            ["f16", "f16x2", "bf16", "bf16x2", "f32", "f64"].iter().any(|kind| i.has(kind));
        if is_shared && (i.base() == "atom" || rounds) {
            self.mark_open();
        }
    }

    /// A value goes where it is not followed.
    fn lose(&mut self, value: &Value) {
        self.mark(value, Direction::Unknown);
        self.mark_indirect();
    }

    fn load_parameter(
        &mut self,
        f: FunctionId,
        i: &Instruction<'a>,
        to: &Operand<'a>,
        address: &Operand<'a>,
    ) {
        let element = i.element();
        if let Operand::Address(base, Some(offset)) = address
            && let [Atom::Var(var), ..] = base[..]
            && let Var::Param { .. } = self.var(f, var)
        {
            for (at, one) in to.atoms().iter().enumerate() {
                let offset = offset.saturating_add(at as i64 * i64::from(element));
                let value = self.parameter(f, var, offset, element);
                self.set(f, &Operand::Plain(vec![*one]), &value);
            }
            return;
        }
        // Through a register: any of the words of the parameter that it points to.
        let value = if element < 8 {
            Value::marked(NUMBER)
        } else {
            let value = self.address(f, Some(address));
            let value = if value.has(PIECES) { value.with(FOREIGN) } else { value };
            value.without(PARAM | PIECES)
        };
        self.set(f, to, &value);
    }

    /// What lies in a parameter at this offset.
    fn parameter(&self, f: FunctionId, var: usize, offset: i64, element: u32) -> Value {
        let slots = self.slots(f, var);
        let first = offset.div_euclid(8);
        let last = offset.saturating_add(i64::from(element.max(1)) - 1).div_euclid(8);
        if first < 0 || last >= slots.len() as i64 {
            return self.union(slots).with(FOREIGN);
        }
        if element < 8 && f == self.entry {
            return Value::marked(NUMBER);
        }
        let value = self.union(slots.start + first as usize..=slots.start + last as usize);
        let cut = element >= 8 && (offset % 8 != 0 || value.has(PIECES));
        value.with(if cut { FOREIGN } else { 0 }).without(PIECES)
    }

    fn store_parameter(
        &mut self,
        f: FunctionId,
        i: &Instruction<'a>,
        to: &Operand<'a>,
        from: &Operand<'a>,
    ) {
        let element = i.element();
        let Operand::Address(base, Some(offset)) = to else { return self.unknown(f, i) };
        let [Atom::Var(var), ..] = base[..] else { return self.unknown(f, i) };
        let slots = self.slots(f, var);
        for (at, one) in from.atoms().iter().enumerate() {
            let offset = offset.saturating_add(at as i64 * i64::from(element));
            let value = self.operand(f, &Operand::Plain(vec![*one]));
            let pieces = if element < 8 && value.has(NUMBER) { PIECES } else { 0 };
            let value = value.with(pieces);
            let end = offset.saturating_add(i64::from(element.max(1)));
            let fits = offset >= 0 && end <= 8 * slots.len() as i64;
            for (slot, start) in slots.clone().zip((0..).step_by(8)) {
                if !fits || offset < start + 8 && start < end {
                    self.grow(slot, &value);
                }
            }
        }
    }

    /// Asynchronous copies.
    fn copy(&mut self, f: FunctionId, i: &Instruction<'a>, operands: &[Operand<'a>]) {
        if i.has("tensor") || !i.has("async") {
            // A tensor map tells where the memory is.
            self.unknown(f, i);
            self.mark_indirect();
            return self.grow(SHARED_CELL, &Value::marked(FOREIGN));
        }
        let spaces: Vec<Space> = i.spaces().collect();
        if i.has("prefetch") {
            return;
        }
        let ([to, from], [to_address, from_address, ..]) = (&spaces[..], operands) else {
            return self.unknown(f, i);
        };
        let written = if i.has("reduce") { Direction::ReadWrite } else { Direction::Write };
        let address = self.address(f, Some(to_address));
        self.access(&address, *to, written);
        let address = self.address(f, Some(from_address));
        self.access(&address, *from, Direction::Read);
        if *to == Space::Shared {
            self.grow(SHARED_CELL, &Value::marked(FOREIGN));
        }
    }

    /// An instruction that has no rule.
    pub(super) fn unknown(&mut self, f: FunctionId, i: &Instruction<'a>) {
        self.mark_open();
        let all = self.operands(f, &i.operands);
        self.reach(&all);
        for operand in &i.operands {
            if let Operand::Address(..) = operand {
                let address = self.address(f, Some(operand));
                self.access(&address, Space::Generic, Direction::Unknown);
            } else {
                self.set(f, operand, &all.clone().with(FOREIGN));
            }
        }
    }
}
