//! Random kernels as PTX. No two threads of a launch touch the same word, but by atomic operations
//! whose order does not matter, so the result of a launch does not depend on how threads are scheduled.

use std::fmt::Write;

use crate::numbers::Sequence;

/// Threads of a block; a launch has whole blocks.
pub(super) const BLOCK: u32 = 64;

/// What a kernel does with the buffer whose address it finds in the table.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum Indirect {
    Read,
    Write,
}

/// A generated kernel. Its parameters are, as the launch in `mod.rs` gives them: the table, the
/// written buffer, the read one, the masked address of another written one, the one for atomics; the
/// numbers of words of each less one, in that order (for the table: of the buffer that is found there);
/// the slot of the table; the step.
pub(super) struct Source {
    pub(super) name: String,
    pub(super) indirect: Indirect,
    /// What the masked address is xor-ed with.
    pub(super) mask: u64,
}

/// Numbers of the registers that hold values.
const VALUES: u32 = 8;

struct Body<'a> {
    random: &'a mut Sequence,
    text: String,
    /// Registers, predicates and labels used so far.
    registers: u32,
    predicates: u32,
    labels: u32,
}

impl Body<'_> {
    fn line(&mut self, text: impl AsRef<str>) {
        self.text.push('\t');
        self.text.push_str(text.as_ref());
        self.text.push('\n');
    }

    fn register(&mut self) -> String {
        self.registers += 1;
        format!("%r{}", self.registers - 1)
    }

    fn predicate(&mut self) -> String {
        self.predicates += 1;
        format!("%p{}", self.predicates - 1)
    }

    fn label(&mut self) -> String {
        self.labels += 1;
        format!("L{}", self.labels - 1)
    }

    fn value(&mut self) -> String {
        format!("%v{}", self.random.below(VALUES))
    }

    /// A value or a number.
    fn operand(&mut self) -> String {
        if self.random.below(4) == 0 {
            self.random.below(1 << 20).to_string()
        } else {
            self.value()
        }
    }

    fn pick<'t>(&mut self, of: &[&'t str]) -> &'t str {
        of[self.random.below(of.len() as u32) as usize]
    }

    /// One to so many statements.
    fn statements(&mut self, most: u32, depth: u32) {
        for _ in 0..1 + self.random.below(most) {
            match self.random.below(if depth > 0 { 14 } else { 10 }) {
                0..=6 => self.arithmetic(),
                7 => self.choice(),
                8 => self.read(),
                9 => self.atomic(),
                10 | 11 => self.branch(depth - 1),
                _ => self.repeat(depth - 1),
            }
        }
    }

    fn arithmetic(&mut self) {
        let (to, a, b, c) = (self.value(), self.value(), self.operand(), self.operand());
        let two = [
            "add.u32",
            "sub.u32",
            "mul.lo.u32",
            "xor.b32",
            "and.b32",
            "or.b32",
            "min.u32",
            "max.s32",
            "mul.hi.u32",
        ];
        match self.random.below(8) {
            0..=3 => {
                let operation = self.pick(&two);
                self.line(format!("{operation} {to}, {a}, {b};"));
            }
            4 => self.line(format!("mad.lo.u32 {to}, {a}, {b}, {c};")),
            5 => {
                let (operation, by) =
                    (self.pick(&["shl.b32", "shr.u32", "shr.s32"]), self.random.below(32));
                self.line(format!("{operation} {to}, {a}, {by};"));
            }
            6 => {
                let operation = self.pick(&["popc.b32", "brev.b32", "clz.b32", "not.b32"]);
                self.line(format!("{operation} {to}, {a};"));
            }
            _ => {
                // Division by what is not 0.
                let divisor = self.register();
                self.line(format!("or.b32 {divisor}, {a}, 1;"));
                let operation = self.pick(&["rem.u32", "div.u32"]);
                let dividend = self.value();
                self.line(format!("{operation} {to}, {dividend}, {divisor};"));
            }
        }
    }

    /// A predicate that compares two values.
    fn comparison(&mut self) -> String {
        let p = self.predicate();
        let how = self.pick(&["lt.u32", "ge.s32", "eq.u32", "ne.u32", "gt.u32"]);
        let (a, b) = (self.value(), self.operand());
        self.line(format!("setp.{how} {p}, {a}, {b};"));
        p
    }

    fn choice(&mut self) {
        let p = self.comparison();
        let (to, a, b) = (self.value(), self.operand(), self.operand());
        self.line(format!("selp.b32 {to}, {a}, {b}, {p};"));
    }

    /// Reads from the buffer that nobody writes, at any place.
    fn read(&mut self) {
        let (to, index) = (self.value(), self.value());
        let space = self.pick(&["", ".global"]);
        self.line(format!("and.b32 %index, {index}, %mask_r;"));
        self.line("mul.wide.u32 %rd9, %index, 4;");
        self.line("add.s64 %rd9, %rd9, %read;");
        self.line(format!("ld{space}.u32 {to}, [%rd9];"));
    }

    /// Changes a word of the buffer for atomics, at any place. One kind of change in a kernel.
    fn atomic(&mut self) {
        let (value, index) = (self.value(), self.value());
        self.line(format!("and.b32 %index, {index}, %mask_a;"));
        self.line("mul.wide.u32 %rd9, %index, 4;");
        self.line("add.s64 %rd9, %rd9, %atomic;");
        self.line(format!("red.global.ATOMIC [%rd9], {value};"));
    }

    fn branch(&mut self, depth: u32) {
        let p = self.comparison();
        let (other, end) = (self.label(), self.label());
        self.line(format!("@{p} bra {other};"));
        self.statements(4, depth);
        self.line(format!("bra {end};"));
        let _ = writeln!(self.text, "{other}:");
        self.statements(3, depth);
        let _ = writeln!(self.text, "{end}:");
    }

    /// A loop whose number of rounds depends on the data, and has a bound.
    fn repeat(&mut self, depth: u32) {
        let (counter, rounds, p) = (self.register(), self.register(), self.predicate());
        let (again, end) = (self.label(), self.label());
        let value = self.value();
        self.line(format!("and.b32 {rounds}, {value}, 3;"));
        self.line(format!("mov.u32 {counter}, 0;"));
        let _ = writeln!(self.text, "{again}:");
        self.line(format!("setp.ge.u32 {p}, {counter}, {rounds};"));
        self.line(format!("@{p} bra {end};"));
        self.statements(4, depth);
        self.line(format!("add.u32 {counter}, {counter}, 1;"));
        self.line(format!("bra {again};"));
        let _ = writeln!(self.text, "{end}:");
    }

    /// Values that other threads of the block have.
    fn exchange(&mut self) {
        let (from, to, with) = (self.value(), self.value(), 1 + self.random.below(BLOCK - 1));
        self.line("mul.wide.u32 %rd9, %tidx, 4;");
        self.line("mov.u64 %rd8, shared;");
        self.line("add.s64 %rd9, %rd8, %rd9;");
        self.line(format!("st.shared.u32 [%rd9], {from};"));
        self.line("bar.sync 0;");
        self.line(format!("xor.b32 %index, %tidx, {with};"));
        self.line("mul.wide.u32 %rd9, %index, 4;");
        self.line("add.s64 %rd9, %rd8, %rd9;");
        self.line(format!("ld.shared.u32 {to}, [%rd9];"));
        self.line("bar.sync 0;");
    }

    /// The address of the thread's own word in a buffer: another one for each thread, as the factor
    /// is odd and the number of words a power of two that is not below the number of threads.
    fn own_word(&mut self, address: &str, buffer: &str, mask: &str) {
        let (factor, start) = (self.random.below(1 << 16) * 2 + 1, self.random.below(1 << 20));
        self.line(format!("mad.lo.u32 %index, %gid, {factor}, {start};"));
        self.line(format!("and.b32 %index, %index, {mask};"));
        self.line(format!("mul.wide.u32 {address}, %index, 4;"));
        self.line(format!("add.s64 {address}, {address}, {buffer};"));
    }
}

const PARAMETERS: [(&str, &str); 12] = [
    ("table", "u64"),
    ("written", "u64"),
    ("read", "u64"),
    ("hidden", "u64"),
    ("atomic", "u64"),
    ("mask_t", "u32"),
    ("mask_w", "u32"),
    ("mask_r", "u32"),
    ("mask_h", "u32"),
    ("mask_a", "u32"),
    ("slot", "u32"),
    ("step", "u32"),
];

/// One random kernel, appended to `module`.
fn kernel(module: &mut String, name: String, random: &mut Sequence) -> Source {
    let indirect = if random.below(2) == 0 { Indirect::Read } else { Indirect::Write };
    let mask = u64::from(random.below(u32::MAX)) << 32 | u64::from(random.below(u32::MAX));
    let mut body = Body { random, text: String::new(), registers: 0, predicates: 0, labels: 0 };
    for (parameter, kind) in PARAMETERS {
        body.line(format!("ld.param.{kind} %{parameter}, [{name}_{parameter}];"));
    }
    body.line("mov.u32 %tidx, %tid.x;");
    body.line("mov.u32 %gid, %ctaid.x;");
    body.line("mov.u32 %index, %ntid.x;");
    body.line("mad.lo.u32 %gid, %gid, %index, %tidx;");
    body.line(format!("xor.b64 %hidden, %hidden, {};", mask as i64));
    body.line("mul.wide.u32 %rd9, %slot, 8;");
    body.line("add.s64 %rd9, %table, %rd9;");
    body.line("ld.u64 %found, [%rd9];");
    body.own_word("%rd0", "%written", "%mask_w");
    body.own_word("%rd1", "%hidden", "%mask_h");
    body.own_word("%rd2", "%found", "%mask_t");
    for (register, address) in [("%v0", "%rd0"), ("%v1", "%rd1"), ("%v2", "%rd2")] {
        body.line(format!("ld.u32 {register}, [{address}];"));
    }
    body.line("mov.u32 %v3, %gid;");
    body.line("mov.u32 %v4, %step;");
    body.line("xor.b32 %v5, %v0, %v1;");
    body.line("add.u32 %v6, %v2, %v3;");
    body.line("mul.lo.u32 %v7, %v3, -1640531535;");
    body.statements(8, 2);
    if body.random.below(2) == 0 {
        body.exchange();
    }
    body.statements(8, 2);
    body.atomic();
    let (a, b, c) = (body.value(), body.value(), body.value());
    body.line(format!("st.u32 [%rd0], {a};"));
    body.line(format!("st.global.u32 [%rd1], {b};"));
    if indirect == Indirect::Write {
        body.line(format!("st.u32 [%rd2], {c};"));
    }
    body.line("ret;");
    let change = ["add.u32", "xor.b32", "min.u32", "max.u32", "or.b32", "and.b32"];
    let change = change[body.random.below(6) as usize];
    let text = body.text.replace("ATOMIC", change);
    let (registers, predicates) = (body.registers.max(1), body.predicates.max(1));

    let _ = writeln!(module, ".visible .entry {name}(");
    for (number, (parameter, kind)) in PARAMETERS.into_iter().enumerate() {
        let comma = if number + 1 < PARAMETERS.len() { "," } else { "" };
        let _ = writeln!(module, "\t.param .{kind} {name}_{parameter}{comma}");
    }
    let _ = writeln!(
        module,
        ")\n{{\n\t.reg .pred %p<{predicates}>;\n\t.reg .b32 %r<{registers}>, %v<{VALUES}>;\n\t\
         .reg .b32 %gid, %tidx, %index, %slot, %step;\n\t\
         .reg .b32 %mask_t, %mask_w, %mask_r, %mask_h, %mask_a;\n\t\
         .reg .b64 %rd<10>, %table, %written, %read, %hidden, %atomic, %found;\n\t\
         .shared .align 4 .b8 shared[{}];\n{text}}}\n",
        BLOCK * 4
    );
    Source { name, indirect, mask }
}

/// A module of `count` random kernels, and what they are.
pub(super) fn module(count: u32, random: &mut Sequence) -> (String, Vec<Source>) {
    let mut text = ".version 6.4\n.target sm_75\n.address_size 64\n\n".to_owned();
    let sources = (0..count).map(|i| kernel(&mut text, format!("random_{i}"), random)).collect();
    (text, sources)
}

#[cfg(test)]
mod tests {
    use super::module;
    use crate::numbers::Sequence;

    #[test]
    fn a_seed_gives_the_same_kernels_each_time() {
        let made = |seed| module(4, &mut Sequence::new(seed)).0;
        assert_eq!(made(1), made(1));
        assert_ne!(made(1), made(2));
    }
}
