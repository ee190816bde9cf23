//! A property: what a kernel does when it runs, its analysis has said before.
//!
//! Programs are made at random, written as PTX, and run by an interpreter of their own form that knows
//! nothing of PTX: a pointer is a parameter and an offset. What was touched must be covered.

use std::collections::HashMap;
use std::fmt::Write;

use proptest::prelude::*;

use gpucr_wire::reach::Sizes;

use super::from_ptx;
use crate::Direction;

/// Parameters of the kernel, each a pointer to a buffer of its own.
const PARAMS: usize = 4;
/// Registers for pointers.
const REGISTERS: usize = 5;
/// Registers of 32 bits.
const NUMBERS: usize = 3;
/// Slots on the stack, and bytes of each buffer that are used.
const SLOTS: usize = 3;
const BYTES: u64 = 64;

#[derive(Debug, Clone)]
enum Op {
    LoadParam {
        to: usize,
        param: usize,
    },
    Move {
        to: usize,
        from: usize,
    },
    /// Adds a multiple of 8.
    Offset {
        to: usize,
        from: usize,
        by: u8,
    },
    /// Adds eight times a number, in one of several ways.
    Index {
        to: usize,
        from: usize,
        number: usize,
        how: u8,
    },
    /// By whether a number is odd.
    Select {
        to: usize,
        a: usize,
        b: usize,
        number: usize,
    },
    /// Through two halves of 32 bits.
    Halves {
        to: usize,
        from: usize,
    },
    Load {
        to: usize,
        at: usize,
    },
    Store {
        at: usize,
        value: usize,
    },
    Add {
        to: usize,
        at: usize,
    },
    StorePointer {
        at: usize,
        from: usize,
    },
    LoadPointer {
        to: usize,
        at: usize,
    },
    Spill {
        slot: usize,
        from: usize,
        shared: bool,
    },
    Reload {
        to: usize,
        slot: usize,
        shared: bool,
    },
    /// A function that does something with its pointers, and returns one of them.
    Call {
        function: u8,
        to: usize,
        a: usize,
        b: usize,
    },
    /// Both sides, by whether a number is odd.
    If {
        number: usize,
        then: Vec<Op>,
        otherwise: Vec<Op>,
    },
    Repeat {
        times: u8,
        body: Vec<Op>,
    },
}

fn ops() -> impl Strategy<Value = Vec<Op>> {
    let (r, n, s) = (0..REGISTERS, 0..NUMBERS, 0..SLOTS);
    let leaf = prop_oneof![
        3 => (r.clone(), 0..PARAMS).prop_map(|(to, param)| Op::LoadParam { to, param }),
        1 => (r.clone(), r.clone()).prop_map(|(to, from)| Op::Move { to, from }),
        1 => (r.clone(), r.clone(), 0..8_u8).prop_map(|(to, from, by)| Op::Offset { to, from, by }),
        1 => (r.clone(), r.clone(), n.clone(), 0..5_u8)
            .prop_map(|(to, from, number, how)| Op::Index { to, from, number, how }),
        1 => (r.clone(), r.clone(), r.clone(), n.clone())
            .prop_map(|(to, a, b, number)| Op::Select { to, a, b, number }),
        1 => (r.clone(), r.clone()).prop_map(|(to, from)| Op::Halves { to, from }),
        2 => (n.clone(), r.clone()).prop_map(|(to, at)| Op::Load { to, at }),
        2 => (r.clone(), n.clone()).prop_map(|(at, value)| Op::Store { at, value }),
        1 => (n.clone(), r.clone()).prop_map(|(to, at)| Op::Add { to, at }),
        4 => (r.clone(), r.clone()).prop_map(|(at, from)| Op::StorePointer { at, from }),
        4 => (r.clone(), r.clone()).prop_map(|(to, at)| Op::LoadPointer { to, at }),
        1 => (s.clone(), r.clone(), any::<bool>())
            .prop_map(|(slot, from, shared)| Op::Spill { slot, from, shared }),
        1 => (r.clone(), s, any::<bool>())
            .prop_map(|(to, slot, shared)| Op::Reload { to, slot, shared }),
        2 => (0..4_u8, r.clone(), r.clone(), r)
            .prop_map(|(function, to, a, b)| Op::Call { function, to, a, b }),
    ];
    let op =
        leaf.prop_recursive(3, 24, 6, move |inner| {
            let body = prop::collection::vec(inner, 0..6);
            prop_oneof![
                (n.clone(), body.clone(), body.clone())
                    .prop_map(|(number, then, otherwise)| Op::If { number, then, otherwise }),
                (1..3_u8, body).prop_map(|(times, body)| Op::Repeat { times, body }),
            ]
        });
    prop::collection::vec(op, 1..16)
}

/// Functions that programs call: `(result) name(a, b)`.
const FUNCTIONS: &str = "
.func (.param .b64 r) read_first(.param .b64 a, .param .b64 b) {
    .reg .b64 %x<3>; .reg .b32 %n; ld.param.b64 %x1, [a]; ld.param.b64 %x2, [b];
    ld.u32 %n, [%x1]; st.param.b64 [r], %x2; ret; }
.func (.param .b64 r) write_second(.param .b64 a, .param .b64 b) {
    .reg .b64 %x<3>; ld.param.b64 %x1, [a]; ld.param.b64 %x2, [b];
    st.u32 [%x2], 3; st.param.b64 [r], %x1; ret; }
.func (.param .b64 r) both(.param .b64 a, .param .b64 b) {
    .reg .b64 %x<4>; ld.param.b64 %x1, [a]; ld.param.b64 %x2, [b];
    { .param .b64 p; .param .b64 q; .param .b64 s; st.param.b64 [p], %x2; st.param.b64 [q], %x1;
      call.uni (s), read_first, (p, q); ld.param.b64 %x3, [s]; }
    { .param .b64 p; .param .b64 q; .param .b64 s; st.param.b64 [p], %x3; st.param.b64 [q], %x3;
      call.uni (s), write_second, (p, q); ld.param.b64 %x3, [s]; }
    st.param.b64 [r], %x3; ret; }
.func (.param .b64 r) swap(.param .b64 a, .param .b64 b) {
    .reg .b64 %x<4>; .reg .b32 %n; .reg .pred %p;
    ld.param.b64 %x1, [a]; ld.param.b64 %x2, [b]; ld.u32 %n, [%x2]; and.b32 %n, %n, 1;
    setp.eq.u32 %p, %n, 0; @%p bra $end;
    st.u32 [%x2], 2;
    { .param .b64 p; .param .b64 q; .param .b64 s; st.param.b64 [p], %x2; st.param.b64 [q], %x1;
      call.uni (s), swap, (p, q); ld.param.b64 %x1, [s]; }
    $end: st.param.b64 [r], %x1; ret; }
";
const NAMES: [&str; 4] = ["read_first", "write_second", "both", "swap"];

struct Writer {
    text: String,
    labels: usize,
}

impl Writer {
    fn program(ops: &[Op]) -> String {
        let mut writer = Writer { text: String::new(), labels: 0 };
        writer.ops(ops);
        let params: Vec<_> = (0..PARAMS).map(|param| format!(".param .u64 p{param}")).collect();
        format!(
            ".version 8.0\n.target sm_80\n.address_size 64\n{FUNCTIONS}\n.entry k({})\n{{\n\
             .reg .b64 %a<{REGISTERS}>, %t<9>; .reg .b32 %n<{NUMBERS}>, %u<9>; .reg .pred %p;\n\
             .local .align 8 .b8 stack[64]; .shared .align 8 .b8 tile[64];\n{}ret;\n}}\n",
            params.join(", "),
            writer.text
        )
    }

    fn label(&mut self) -> usize {
        self.labels += 1;
        self.labels
    }

    fn ops(&mut self, ops: &[Op]) {
        for op in ops {
            self.op(op);
        }
    }

    fn line(&mut self, line: String) {
        writeln!(self.text, "{line}").unwrap();
    }

    fn odd(&mut self, number: usize) {
        self.line(format!("and.b32 %u1, %n{number}, 1; setp.ne.u32 %p, %u1, 0;"));
    }

    fn op(&mut self, op: &Op) {
        let space = |shared: &bool| if *shared { ("shared", "tile") } else { ("local", "stack") };
        match op {
            Op::LoadParam { to, param } => self.line(format!("ld.param.u64 %a{to}, [p{param}];")),
            Op::Move { to, from } => self.line(format!("cvta.to.global.u64 %a{to}, %a{from};")),
            Op::Offset { to, from, by } => {
                self.line(format!("add.s64 %a{to}, %a{from}, {};", u64::from(*by) * 8));
            }
            Op::Index { to, from, number, how } => {
                // The offset stays within the buffer, whatever the number.
                self.line(format!("and.b32 %u2, %n{number}, 7;"));
                self.line(match how {
                    0 => format!("mad.wide.u32 %a{to}, %u2, 8, %a{from};"),
                    1 => format!("mul.wide.u32 %t1, %u2, 8; add.s64 %a{to}, %t1, %a{from};"),
                    2 => format!(
                        "cvt.u64.u32 %t1, %u2; shl.b64 %t1, %t1, 3; add.s64 %a{to}, %a{from}, %t1;"
                    ),
                    3 => format!("cvt.u64.u32 %t1, %u2; mad.lo.s64 %a{to}, %t1, 8, %a{from};"),
                    _ => format!("mul.wide.s32 %t1, %u2, -8; sub.s64 %a{to}, %a{from}, %t1;"),
                });
            }
            Op::Select { to, a, b, number } => {
                self.odd(*number);
                self.line(format!("selp.b64 %a{to}, %a{a}, %a{b}, %p;"));
            }
            Op::Halves { to, from } => {
                self.line(format!("mov.b64 {{%u3, %u4}}, %a{from}; mov.b64 %a{to}, {{%u3, %u4}};"));
            }
            Op::Load { to, at } => self.line(format!("ld.global.u32 %n{to}, [%a{at}];")),
            Op::Store { at, value } => self.line(format!("st.global.u32 [%a{at}], %n{value};")),
            Op::Add { to, at } => self.line(format!("atom.global.add.u32 %n{to}, [%a{at}], 1;")),
            Op::StorePointer { at, from } => self.line(format!("st.u64 [%a{at}], %a{from};")),
            Op::LoadPointer { to, at } => self.line(format!("ld.u64 %a{to}, [%a{at}];")),
            Op::Spill { slot, from, shared } => {
                let (space, name) = space(shared);
                self.line(format!("st.{space}.u64 [{name}+{}], %a{from};", slot * 8));
            }
            Op::Reload { to, slot, shared } => {
                let (space, name) = space(shared);
                self.line(format!(
                    "mov.u64 %t3, {name}; ld.{space}.u64 %a{to}, [%t3+{}];",
                    slot * 8
                ));
            }
            Op::Call { function, to, a, b } => self.line(format!(
                "{{ .param .b64 x; .param .b64 y; .param .b64 z; st.param.b64 [x], %a{a};\n\
                 st.param.b64 [y], %a{b}; call.uni (z), {}, (x, y); ld.param.b64 %a{to}, [z]; }}",
                NAMES[usize::from(*function)]
            )),
            Op::If { number, then, otherwise } => {
                let label = self.label();
                self.odd(*number);
                self.line(format!("@!%p bra $else{label};"));
                self.ops(then);
                self.line(format!("bra.uni $end{label};\n$else{label}:"));
                self.ops(otherwise);
                self.line(format!("$end{label}:"));
            }
            Op::Repeat { times, body } => {
                let label = self.label();
                self.line(format!("{{ .reg .b32 %i; mov.u32 %i, {times};\n$again{label}:"));
                self.ops(body);
                self.line(format!(
                    "sub.u32 %i, %i, 1; setp.ne.u32 %p, %i, 0; @%p bra $again{label}; }}"
                ));
            }
        }
    }
}

/// A parameter and the distance from its address. Programs only use what holds one; see
/// [`Machine::run`]. What is further away than a buffer has bytes is a place in it again: so places are
/// used more than once.
type Pointer = (usize, u64);

fn place((param, offset): Pointer) -> Pointer {
    (param, offset % BYTES)
}

#[derive(Debug, Clone, Copy, PartialEq)]
enum Cell {
    Number(u32),
    Pointer(Pointer),
}

#[derive(Default)]
struct Machine {
    pointers: [Option<Pointer>; REGISTERS],
    numbers: [u32; NUMBERS],
    memory: HashMap<Pointer, Cell>,
    stack: [[Option<Pointer>; SLOTS]; 2],
    read: [bool; PARAMS],
    written: [bool; PARAMS],
    /// The nearest and the furthest access, by distance.
    touched: [Option<(u64, u64)>; PARAMS],
}

impl Machine {
    /// `None` at the first use of what is no pointer: a real kernel would fault there. What was done
    /// until then counts.
    fn run(&mut self, ops: &[Op]) -> Option<()> {
        for op in ops {
            self.op(op)?;
        }
        Some(())
    }

    fn at(&self, register: usize) -> Option<Pointer> {
        self.pointers[register]
    }

    fn moved((param, offset): Pointer, by: u64) -> Pointer {
        (param, offset + by)
    }

    fn touch(&mut self, (param, offset): Pointer) {
        let (low, high) = self.touched[param].unwrap_or((offset, offset));
        self.touched[param] = Some((low.min(offset), high.max(offset)));
    }

    fn load(&mut self, at: Pointer) -> Cell {
        self.touch(at);
        self.read[at.0] = true;
        let at = place(at);
        // What the host has put there: some odd, some even.
        let first = Cell::Number((at.1 / 8) as u32 + at.0 as u32);
        *self.memory.get(&at).unwrap_or(&first)
    }

    fn number(&mut self, at: Pointer) -> u32 {
        match self.load(at) {
            Cell::Number(number) => number,
            Cell::Pointer(pointer) => {
                let (param, offset) = place(pointer);
                (param as u32) << 16 | offset as u32
            }
        }
    }

    fn store(&mut self, at: Pointer, cell: Cell) {
        self.touch(at);
        self.written[at.0] = true;
        self.memory.insert(place(at), cell);
    }

    fn call(&mut self, function: u8, a: Pointer, b: Pointer, depth: u8) -> Option<Pointer> {
        Some(match function {
            0 => {
                self.load(a);
                b
            }
            1 => {
                self.store(b, Cell::Number(3));
                a
            }
            2 => {
                let x = self.call(0, b, a, depth)?;
                self.call(1, x, x, depth)?
            }
            _ => {
                if self.number(b).is_multiple_of(2) || depth == 0 {
                    return Some(a);
                }
                self.store(b, Cell::Number(2));
                self.call(3, b, a, depth - 1)?
            }
        })
    }

    fn op(&mut self, op: &Op) -> Option<()> {
        match op {
            Op::LoadParam { to, param } => self.pointers[*to] = Some((*param, 0)),
            Op::Move { to, from } | Op::Halves { to, from } => self.pointers[*to] = self.at(*from),
            Op::Offset { to, from, by } => {
                self.pointers[*to] = Some(Self::moved(self.at(*from)?, u64::from(*by) * 8));
            }
            Op::Index { to, from, number, .. } => {
                let by = u64::from(self.numbers[*number] & 7) * 8;
                self.pointers[*to] = Some(Self::moved(self.at(*from)?, by));
            }
            Op::Select { to, a, b, number } => {
                let from = if self.numbers[*number] % 2 == 1 { a } else { b };
                self.pointers[*to] = self.at(*from);
            }
            Op::Load { to, at } => self.numbers[*to] = self.number(self.at(*at)?),
            Op::Store { at, value } => {
                self.store(self.at(*at)?, Cell::Number(self.numbers[*value]));
            }
            Op::Add { to, at } => {
                let at = self.at(*at)?;
                self.numbers[*to] = self.number(at);
                self.store(at, Cell::Number(self.numbers[*to].wrapping_add(1)));
            }
            Op::StorePointer { at, from } => {
                self.store(self.at(*at)?, Cell::Pointer(self.at(*from)?));
            }
            Op::LoadPointer { to, at } => {
                self.pointers[*to] = match self.load(self.at(*at)?) {
                    Cell::Pointer(pointer) => Some(pointer),
                    Cell::Number(_) => None,
                };
            }
            Op::Spill { slot, from, shared } => {
                self.stack[usize::from(*shared)][*slot] = self.at(*from);
            }
            Op::Reload { to, slot, shared } => {
                self.pointers[*to] = self.stack[usize::from(*shared)][*slot];
            }
            Op::Call { function, to, a, b } => {
                self.pointers[*to] = Some(self.call(*function, self.at(*a)?, self.at(*b)?, 4)?);
            }
            Op::If { number, then, otherwise } => {
                self.run(if self.numbers[*number] % 2 == 1 { then } else { otherwise })?;
            }
            Op::Repeat { times, body } => {
                for _ in 0..*times {
                    self.run(body)?;
                }
            }
        }
        Some(())
    }
}

/// What a run touched that the analysis does not cover; `None` if there is nothing.
fn uncovered(ops: &[Op]) -> Option<String> {
    let text = Writer::program(ops);
    let mut machine = Machine::default();
    machine.run(ops);
    let kernel = from_ptx(&text).expect("the program is PTX").remove(0);
    assert_eq!(kernel.variables, Direction::None);
    for (param, (read, written)) in machine.read.iter().zip(machine.written).enumerate() {
        let direction = kernel.params[param].words[0].direction;
        let covered = (!read || direction.reads()) && (!written || direction.writes());
        if !covered && !kernel.indirect {
            return Some(format!(
                "p{param} is {direction:?}; read: {read}, written: {written}\n{text}"
            ));
        }
        let reach = &kernel.params[param].words[0].reach;
        if let (Some(reach), Some((low, high)), false) =
            (reach, machine.touched[param], kernel.indirect)
        {
            const BASE: u64 = 1 << 32;
            let said = reach.within(&Sizes::of([1; 3], [1; 3]), BASE, BASE, 0..u64::MAX);
            if !(said.contains(&(BASE + low)) && said.contains(&(BASE + high + 3))) {
                return Some(format!("p{param}: {low} to {high} is not in {reach:?}\n{text}"));
            }
        }
    }
    None
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 3000, ..ProptestConfig::default() })]

    #[test]
    fn what_a_kernel_does_was_said_before(ops in ops()) {
        prop_assert_eq!(uncovered(&begun(ops)), None);
    }

    /// Without pointers in memory there is no excuse: every word must be covered.
    #[test]
    fn kernels_without_pointers_in_memory_are_not_indirect(mut ops in ops()) {
        direct(&mut ops);
        let ops = begun(ops);
        let kernel = from_ptx(&Writer::program(&ops)).expect("the program is PTX").remove(0);
        prop_assert!(!kernel.indirect);
        prop_assert_eq!(uncovered(&ops), None);
    }
}

/// A program that has a pointer in every register and on every place of the stack before it does
/// anything else: without one, it would end early, and an address from nowhere excuses everything.
fn begun(ops: Vec<Op>) -> Vec<Op> {
    let registers = (0..REGISTERS).map(|to| Op::LoadParam { to, param: to % 2 });
    let places = (0..SLOTS).flat_map(|slot| [(slot, false), (slot, true)]);
    let stack = places.map(|(slot, shared)| Op::Spill { slot, from: slot, shared });
    registers.chain(stack).chain(ops).collect()
}

/// Leaves out what the analysis has to give up on: an address from memory, and one that is put
/// together again from halves after a number from memory was added.
fn direct(ops: &mut Vec<Op>) {
    ops.retain(|op| {
        !matches!(op, Op::StorePointer { .. } | Op::LoadPointer { .. } | Op::Halves { .. })
    });
    for op in ops {
        match op {
            Op::If { then, otherwise, .. } => {
                direct(then);
                direct(otherwise);
            }
            Op::Repeat { body, .. } => direct(body),
            _ => {}
        }
    }
}
