//! The parsed form to the executable form: opcodes are resolved, operands are checked.

mod arithmetic;
mod control;
mod convert;
mod copy;
mod device_runtime;
mod flow;
mod image;
mod matrix;
mod mbarrier;
mod memory;
mod multimem;
mod operand;
mod video;
mod warp;

use super::ast::{Base, Function, Instruction, Operand, Space, Type, Variable};
use super::code::{CallSite, Code, Inst, Map1, Map2, Map3, NONE, Op, Reg, Slot, Src};
use super::diagnostic::{Diagnostic, Position};
use std::collections::HashMap;

type Lowered<T> = Result<T, Diagnostic>;

/// Where a variable of a function is.
#[derive(Debug, Clone, Copy)]
pub(crate) enum Location {
    /// Offset in the launch's parameter buffer.
    Param(u32),
    /// Offset in the function's frame in local memory.
    Frame(u32),
    /// Offset in shared memory.
    Shared(u32),
    /// Dynamic shared memory, aligned to this.
    Dynamic(u32),
    /// The index of a module variable.
    Global(u32),
}

/// A function as its callers see it.
#[derive(Debug, Default)]
pub(crate) struct Signature {
    /// Absent for a function that is only declared.
    pub(crate) number: Option<u32>,
    /// Parameters and results as they are defined, and as they are declared: a linker does not compare these, and a
    /// piece that it links may declare other ones than the piece that defines the function.
    pub(crate) forms: Vec<(Vec<Slot>, Vec<Slot>)>,
}

impl Signature {
    /// Whether a call with such arguments and results is one of the function.
    pub(crate) fn fits(&self, site: &CallSite) -> bool {
        let same = |given: &[Slot], wanted: &[Slot]| {
            given.len() == wanted.len() && given.iter().zip(wanted).all(|(g, w)| g.size == w.size)
        };
        self.forms
            .iter()
            .any(|(params, returns)| same(&site.args, params) && same(&site.returns, returns))
    }
}

/// What names at module scope stand for.
#[derive(Debug, Default)]
pub(crate) struct Names<'a> {
    pub(crate) globals: HashMap<&'a str, u32>,
    pub(crate) functions: HashMap<&'a str, Signature>,
    /// Module-scope shared variables that every function sees at the same place.
    pub(crate) shared: HashMap<&'a str, Location>,
}

/// Gives variables consecutive places.
#[derive(Debug, Clone, Copy, Default)]
pub(crate) struct Layout {
    pub(crate) size: usize,
}

impl Layout {
    pub(crate) fn place(&mut self, size: usize, align: usize) -> usize {
        let offset = self.size.next_multiple_of(align.max(1));
        self.size = offset.saturating_add(size);
        offset
    }
}

/// The slots of a function's return parameters and parameters, in one frame.
pub(crate) fn slots(function: &Function<'_>) -> (Vec<Slot>, Vec<Slot>) {
    let mut layout = Layout::default();
    let mut place = |variable: &Variable<'_>| Slot {
        offset: layout.place(variable.size, variable.align.max(8)) as u32,
        size: variable.size as u32,
    };
    let returns = function.returns.iter().map(&mut place).collect();
    let params = function.params.iter().map(&mut place).collect();
    (params, returns)
}

/// Translates a function's body. `locations` says where each of its variables is; `shared`
/// where the module's shared variables are that only this function uses.
pub(crate) fn lower(
    names: &Names<'_>,
    function: &Function<'_>,
    locations: Vec<Location>,
    shared: &HashMap<&str, Location>,
    frame_bytes: u32,
) -> Lowered<Code> {
    let Some(body) = &function.body else {
        return Err(function.position.undefined(function.name));
    };
    let (params, returns) = slots(function);
    let registers = body.registers.len() as u32;
    let lasting = body.registers.len() + 1;
    let mut lower = Lower {
        names,
        function,
        // The carry flag follows the declared registers.
        types: body.registers.iter().copied().chain([Type::Pred]).collect(),
        carry: registers,
        locations,
        shared,
        code: Code { registers: lasting as u32, frame_bytes, params, returns, ..Code::default() },
        constants: HashMap::new(),
        branches: Vec::new(),
        guard: NONE,
        position: function.position,
        current: None,
        modifiers: Vec::new(),
    };
    let mut starts = Vec::with_capacity(body.instructions.len() + 1);
    for instruction in &body.instructions {
        starts.push(lower.code.insts.len() as u32);
        // Temporaries live no longer than one instruction.
        lower.types.truncate(lasting);
        lower.instruction(instruction)?;
        lower.code.registers = lower.code.registers.max(lower.types.len() as u32);
    }
    starts.push(lower.code.insts.len() as u32);
    lower.guard = NONE;
    lower.emit(Op::Return);
    lower.resolve_branches(&starts)?;
    flow::reconverge(&mut lower.code);
    Ok(lower.code)
}

/// A branch whose targets are still instruction numbers of the source.
enum Pending {
    Branch { inst: usize, target: usize },
    Table { table: usize, targets: Vec<usize> },
}

struct Lower<'l, 'a> {
    names: &'l Names<'a>,
    function: &'l Function<'a>,
    /// The type of each register, temporaries included.
    types: Vec<Type>,
    locations: Vec<Location>,
    shared: &'l HashMap<&'l str, Location>,
    code: Code,
    constants: HashMap<u64, Src>,
    branches: Vec<Pending>,
    guard: u32,
    /// The carry flag's register.
    carry: Reg,
    position: Position,
    current: Option<&'l Instruction<'a>>,
    /// Modifiers of the current instruction that are not understood yet.
    modifiers: Vec<&'a str>,
}

impl<'l, 'a> Lower<'l, 'a> {
    fn emit(&mut self, op: Op) {
        self.code.insts.push(Inst { guard: self.guard, op });
    }

    fn map1(&mut self, kernel: Option<Map1>, to: Reg, a: Src) -> Lowered<()> {
        let kernel = kernel.ok_or_else(|| self.unsupported())?;
        self.emit(Op::Map1(kernel, to, a));
        Ok(())
    }

    fn map2(&mut self, kernel: Option<Map2>, to: Reg, a: Src, b: Src) -> Lowered<()> {
        let kernel = kernel.ok_or_else(|| self.unsupported())?;
        self.emit(Op::Map2(kernel, to, a, b));
        Ok(())
    }

    fn map3(&mut self, kernel: Option<Map3>, to: Reg, a: Src, b: Src, c: Src) -> Lowered<()> {
        let kernel = kernel.ok_or_else(|| self.unsupported())?;
        self.emit(Op::Map3(kernel, to, a, b, c));
        Ok(())
    }

    /// A fault that names the current instruction with all its modifiers.
    fn unsupported(&self) -> Diagnostic {
        let name = self.current.map_or(String::new(), |current| {
            let mut name = current.opcode.to_owned();
            for modifier in &current.modifiers {
                name.push('.');
                name.push_str(modifier);
            }
            name
        });
        self.position.unsupported(name)
    }

    /// Takes a modifier if it is there.
    fn has(&mut self, name: &str) -> bool {
        let found = self.modifiers.iter().position(|modifier| *modifier == name);
        if let Some(index) = found {
            self.modifiers.remove(index);
        }
        found.is_some()
    }

    /// Takes the first modifier that `parse` understands.
    fn find<T>(&mut self, parse: impl Fn(&str) -> Option<T>) -> Option<T> {
        let (index, value) =
            self.modifiers.iter().enumerate().find_map(|(i, m)| Some((i, parse(m)?)))?;
        self.modifiers.remove(index);
        Some(value)
    }

    /// Takes the instruction's type: its last modifier that is one.
    fn ty(&mut self) -> Lowered<Type> {
        let found = self.modifiers.iter().rposition(|modifier| Type::parse(modifier).is_some());
        let index = found.ok_or_else(|| self.unsupported())?;
        Type::parse(self.modifiers.remove(index)).ok_or_else(|| self.unsupported())
    }

    /// No modifier may be left.
    fn done(&self) -> Lowered<()> {
        if self.modifiers.is_empty() { Ok(()) } else { Err(self.unsupported()) }
    }

    /// The operands, if there are as many as wanted.
    fn operands<const N: usize>(&self) -> Lowered<&'l [Operand<'a>; N]> {
        let found = self.current.map_or(&[][..], |current| &current.operands);
        found.try_into().map_err(|_| {
            self.position.mistyped(format!("expected {N} operands, found {}", found.len()))
        })
    }

    fn instruction(&mut self, instruction: &'l Instruction<'a>) -> Lowered<()> {
        self.position = instruction.position;
        self.current = Some(instruction);
        self.modifiers.clone_from(&instruction.modifiers);
        self.guard = NONE;
        if let Some((register, negated)) = instruction.guard {
            let register = self.typed(register, Type::Pred)?;
            self.guard = register << 1 | u32::from(negated);
        }
        let before = self.code.insts.len();
        match instruction.opcode {
            "mov" => self.mov(),
            "ld" | "ldu" | "st" | "cvta" | "isspacep" | "atom" | "red" => {
                self.memory(instruction.opcode)
            }
            "cvt" => self.cvt(),
            "setp" | "set" => self.compare(instruction.opcode),
            "bra" | "brx" | "call" | "ret" | "exit" | "trap" => self.control(instruction.opcode),
            "shfl" | "vote" | "activemask" | "match" | "redux" | "elect" | "bar" | "barrier" => {
                self.collective(instruction.opcode)
            }
            "cp" => self.copy_async(),
            "alloca" | "stacksave" | "stackrestore" => self.stack(instruction.opcode),
            "tex" | "tld4" => self.fetch(),
            "txq" | "suq" => self.query_image(),
            "suld" | "sust" | "sured" => self.surface(),
            "istypep" => self.is_type(),
            "mapa" | "getctarank" => self.cluster_address(instruction.opcode),
            "createpolicy" => self.cache_policy(),
            "mbarrier" => self.mbarrier(),
            "multimem" => self.multimem(),
            "ldmatrix" => self.load_matrix(),
            "stmatrix" => self.store_matrix(),
            "movmatrix" => self.transpose_matrix(),
            "mma" => self.multiply_matrices(),
            "wmma" => self.wmma(),
            "vadd" | "vsub" | "vabsdiff" | "vmin" | "vmax" | "vshl" | "vshr" | "vset" | "vmad"
            | "vadd2" | "vsub2" | "vavrg2" | "vabsdiff2" | "vmin2" | "vmax2" | "vset2"
            | "vadd4" | "vsub4" | "vavrg4" | "vabsdiff4" | "vmin4" | "vmax4" | "vset4" => {
                self.video(instruction.opcode)
            }
            // Lanes run in step and memory is coherent, so ordering needs only a fence;
            // hints need nothing.
            "membar" | "fence" => {
                self.emit(Op::Fence);
                Ok(())
            }
            "nanosleep" | "prefetch" | "prefetchu" | "applypriority" | "discard" | "brkpt"
            | "pmevent" | "griddepcontrol" => Ok(()),
            opcode => self.arithmetic(opcode),
        }?;
        self.keep_guard(before);
        Ok(())
    }

    /// An instruction that became several must not see its guard change half-way.
    fn keep_guard(&mut self, first: usize) {
        if self.guard == NONE || self.code.insts.len() < first + 2 {
            return;
        }
        let guard = self.guard;
        let copy = self.temporary(Type::Pred);
        for inst in &mut self.code.insts[first..] {
            inst.guard = copy << 1 | guard & 1;
        }
        let op = Op::Copy(copy, guard >> 1);
        self.code.insts.insert(first, Inst { guard: NONE, op });
        for branch in &mut self.branches {
            if let Pending::Branch { inst, .. } = branch
                && *inst >= first
            {
                *inst += 1;
            }
        }
    }

    fn label(&self, name: &str) -> Lowered<usize> {
        self.in_scope(|body, scope| body.labels.get(&(scope, name)).copied())
            .ok_or_else(|| self.position.undefined(name))
    }

    /// Looks a name up from the current instruction's scope outwards.
    fn in_scope<T>(
        &self,
        find: impl Fn(&'l super::ast::Body<'a>, usize) -> Option<T>,
    ) -> Option<T> {
        let body = self.function.body.as_ref()?;
        let mut scope = self.current?.scope;
        loop {
            if let Some(found) = find(body, scope) {
                return Some(found);
            }
            if scope == 0 {
                return None;
            }
            scope = body.scopes[scope];
        }
    }

    fn resolve_branches(&mut self, starts: &[u32]) -> Lowered<()> {
        for branch in std::mem::take(&mut self.branches) {
            match branch {
                Pending::Branch { inst, target } => {
                    if let Op::Branch(to, _) = &mut self.code.insts[inst].op {
                        *to = starts[target];
                    }
                }
                Pending::Table { table, targets } => {
                    self.code.tables[table] = targets.iter().map(|&t| starts[t]).collect();
                }
            }
        }
        Ok(())
    }

    fn call_site(&mut self, site: CallSite) -> u32 {
        self.code.calls.push(site);
        self.code.calls.len() as u32 - 1
    }

    fn locate(&self, base: Base<'a>) -> Lowered<Location> {
        match base {
            Base::Variable(index) => Ok(self.locations[index]),
            Base::Name(name) => {
                let shared = self.shared.get(name).or_else(|| self.names.shared.get(name));
                let global = self.names.globals.get(name);
                shared
                    .copied()
                    .or_else(|| global.map(|&index| Location::Global(index)))
                    .ok_or_else(|| self.position.undefined(name))
            }
            Base::Register(_) | Base::Absolute => {
                Err(self.position.mistyped("expected a variable"))
            }
        }
    }

    /// The space that `.param` means for an address in a register.
    fn param_space(&self) -> Space {
        if self.function.is_entry { Space::Param } else { Space::Local }
    }
}
