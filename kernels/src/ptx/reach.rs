//! How far from its parameters' addresses a kernel goes: the values of its registers as sums of a
//! parameter's word, of numbers that the launch gives to each thread, and of constants.
//!
//! A register has one such sum or none: where two instructions write different ones, as in a loop, it has
//! none. Branches are left out of account, as in the rest of the analysis, so `if (i < n)` makes a reach no
//! shorter. Numbers are taken not to overflow their registers.
//!
//! An access counts only if its address is such a sum, with the word that it goes by. All others, and those
//! of functions that are called, leave the word without a reach.

use gpucr_wire::reach::{INDICES, Index, Reach, Term};

use super::parse::{Atom, Function, Instruction, Operand, Space, Var};

/// How often all instructions are looked at, at most. Compilers write most values before they read them.
const MOST_ROUNDS: usize = 16;
/// The most registers that a kernel may have: 72 MiB.
const MOST_REGISTERS: usize = 1 << 19;

/// A number from `low` to `high`, and for each number that the launch gives so many more bytes or units.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Sum {
    /// The word of the parameters that is a part of it.
    word: Option<usize>,
    low: i64,
    high: i64,
    terms: [i64; INDICES],
}

/// What a register holds.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Held {
    /// Nothing was written to it yet.
    Nothing,
    Sum(Sum),
    Anything,
}

impl Sum {
    fn constant(number: i64) -> Self {
        Self { word: None, low: number, high: number, terms: [0; INDICES] }
    }

    fn index(number: u8) -> Self {
        let mut sum = Self::constant(0);
        sum.terms[usize::from(number)] = 1;
        sum
    }

    fn word(word: usize) -> Self {
        Self { word: Some(word), ..Self::constant(0) }
    }

    fn as_constant(&self) -> Option<i64> {
        (*self == Self::constant(self.low)).then_some(self.low)
    }

    fn plus(&self, other: &Self) -> Option<Self> {
        if self.word.is_some() && other.word.is_some() {
            return None;
        }
        let mut sum = Self {
            word: self.word.or(other.word),
            low: self.low.checked_add(other.low)?,
            high: self.high.checked_add(other.high)?,
            ..*self
        };
        for (own, other) in sum.terms.iter_mut().zip(other.terms) {
            *own = own.checked_add(other)?;
        }
        Some(sum)
    }

    fn scaled(&self, by: i64) -> Option<Self> {
        if by == 1 {
            return Some(*self);
        }
        if self.word.is_some() {
            return None;
        }
        let (low, high) = (self.low.checked_mul(by)?, self.high.checked_mul(by)?);
        let mut sum = Self { low: low.min(high), high: low.max(high), ..*self };
        for term in &mut sum.terms {
            *term = term.checked_mul(by)?;
        }
        Some(sum)
    }

    fn times(&self, other: &Self) -> Option<Self> {
        if let Some(number) = other.as_constant() {
            return self.scaled(number);
        }
        if let Some(number) = self.as_constant() {
            return other.scaled(number);
        }
        self.first_thread(other).or_else(|| other.first_thread(self))
    }

    /// The number of a block times the size of one.
    fn first_thread(&self, threads: &Self) -> Option<Self> {
        (0..3).find_map(|direction| {
            let (block, first) = (Index::Block.number(direction), Index::First.number(direction));
            let factor = self.terms[block];
            let is_block = *self == Self::index(block as u8).scaled(factor)?;
            let is_threads = *threads == Self::index(Index::Threads.number(direction) as u8);
            if !is_block || !is_threads || factor == 0 {
                return None;
            }
            Self::index(first as u8).scaled(factor)
        })
    }

    /// A number that is not negative, whatever the launch.
    fn is_natural(&self) -> bool {
        self.word.is_none() && self.low >= 0 && self.terms.iter().all(|term| *term >= 0)
    }

    /// No more than such a number, and not negative.
    fn up_to(&self) -> Option<Self> {
        self.is_natural().then_some(Self { low: 0, ..*self })
    }

    /// The most that a natural number can be without its lowest bits, in units of `1 << bits`.
    fn shifted_right(&self, bits: u32) -> Option<Self> {
        let mut sum = self.up_to()?;
        let unit = 1_i64.checked_shl(bits).filter(|unit| *unit > 0)?;
        for number in sum.terms.iter_mut().chain([&mut sum.high]) {
            *number = *number / unit + i64::from(*number % unit != 0);
        }
        Some(sum)
    }

    /// Either of them, or both.
    fn or(&self, other: &Self) -> Option<Self> {
        let mut sum =
            Self { low: self.low.min(other.low), high: self.high.max(other.high), ..*self };
        for (own, other) in sum.terms.iter_mut().zip(other.terms) {
            if own.signum() * other.signum() < 0 {
                return None;
            }
            *own = if own.unsigned_abs() > other.unsigned_abs() { *own } else { other };
        }
        (self.word == other.word).then_some(sum)
    }

    fn reach(&self) -> Reach {
        let terms = self.terms.iter().enumerate().filter(|(_, bytes)| **bytes != 0);
        Reach {
            low: self.low,
            end: self.high,
            terms: terms.map(|(index, bytes)| Term { index: index as u8, bytes: *bytes }).collect(),
        }
    }
}

/// The registers of a kernel.
struct Registers<'f, 'a> {
    function: &'f Function<'a>,
    held: Vec<Held>,
    /// Of each variable that is a parameter the number of its first word, and how many it has.
    words: Vec<(usize, usize)>,
}

/// For each of so many words of a kernel's parameters how far it goes from the address there. `accesses`
/// has each instruction that goes by a word; those beyond the kernel's own are of functions that it calls.
/// Takes what it costs from `work`.
pub(super) fn reaches(
    function: &Function<'_>,
    accesses: &[(usize, usize)],
    words: usize,
    work: &mut usize,
) -> Vec<Option<Reach>> {
    let Some(registers) = Registers::settled(function, work) else { return vec![None; words] };
    let mut sums: Vec<Option<Held>> = vec![None; words];
    for &(at, word) in accesses {
        let touched = function.code.get(at).and_then(|instruction| registers.touched(instruction));
        let touched = match touched.filter(|sum| sum.word == Some(word)) {
            Some(sum) => Held::Sum(sum),
            None => Held::Anything,
        };
        sums[word] = Some(match (sums[word], touched) {
            (None, touched) => touched,
            (Some(Held::Sum(old)), Held::Sum(new)) => {
                old.or(&new).map_or(Held::Anything, Held::Sum)
            }
            _ => Held::Anything,
        });
    }
    let reach = |sum: Option<Held>| match sum {
        Some(Held::Sum(sum)) => Some(sum.reach()),
        _ => None,
    };
    sums.into_iter().map(reach).collect()
}

impl<'f, 'a> Registers<'f, 'a> {
    /// What they hold whichever instruction comes next; `None` if that takes too long.
    fn settled(function: &'f Function<'a>, work: &mut usize) -> Option<Self> {
        if function.vars.len() > MOST_REGISTERS {
            return None;
        }
        let mut words = vec![(0, 0); function.vars.len()];
        let mut next = 0;
        for param in &function.params {
            let count = match function.vars[*param] {
                Var::Param { bytes, .. } | Var::Register(bytes) => bytes as usize / 8,
                Var::Memory(_) => 0,
            };
            words[*param] = (next, count);
            next += count;
        }
        let held = vec![Held::Nothing; function.vars.len()];
        let mut registers = Self { function, held, words };
        for _ in 0..MOST_ROUNDS {
            *work = work.checked_sub(function.code.len())?;
            let mut grown = false;
            for instruction in &function.code {
                grown |= registers.step(instruction);
            }
            if !grown && !registers.settle_unwritten() {
                return Some(registers);
            }
        }
        None
    }

    /// A register that no instruction writes may have any value. Says whether there was one.
    fn settle_unwritten(&mut self) -> bool {
        let unwritten = self.held.iter_mut().filter(|held| **held == Held::Nothing);
        unwritten.map(|held| *held = Held::Anything).count() > 0
    }

    /// Applies an instruction; says whether a register has changed.
    fn step(&mut self, i: &Instruction<'a>) -> bool {
        let Some((to, from)) = i.operands.split_first() else { return false };
        match (i.base(), from) {
            // What comes first is not a register that is written.
            ("bra" | "bar" | "barrier", _) => false,
            _ if matches!(to, Operand::Address(..)) => false,
            ("ld", [Operand::Address(base, Some(offset)), ..])
                if i.spaces().next() == Some(Space::Param) =>
            {
                let element = i64::from(i.element());
                let mut grown = false;
                for (at, atom) in to.atoms().iter().enumerate() {
                    let offset = offset.saturating_add(at as i64 * element);
                    let sum = (element == 8).then(|| self.parameter(base, offset)).flatten();
                    grown |= self.write(atom, sum.map_or(Held::Anything, Held::Sum));
                }
                grown
            }
            _ => {
                let value = match to {
                    Operand::Plain(_) => self.computed(i, from),
                    _ => Held::Anything,
                };
                let mut grown = false;
                for atom in to.atoms() {
                    grown |= self.write(atom, value);
                }
                grown
            }
        }
    }

    fn parameter(&self, base: &[Atom<'a>], offset: i64) -> Option<Sum> {
        let [Atom::Var(var), ..] = base else { return None };
        let (first, count) = self.words[*var];
        let word = usize::try_from(offset / 8).ok().filter(|word| *word < count)?;
        (offset % 8 == 0).then(|| Sum::word(first + word))
    }

    fn write(&mut self, atom: &Atom<'a>, value: Held) -> bool {
        let Atom::Var(var) = atom else { return false };
        let held = &mut self.held[*var];
        let new = match (*held, value) {
            (old, Held::Nothing) => old,
            (Held::Nothing, new) => new,
            (old, new) if old == new => old,
            _ => Held::Anything,
        };
        std::mem::replace(held, new) != new
    }

    fn operand(&self, operand: &Operand<'a>) -> Held {
        match operand {
            Operand::Plain(atoms) => match atoms[..] {
                [Atom::Var(var)] if matches!(self.function.vars[var], Var::Register(1..)) => {
                    self.held[var]
                }
                [Atom::Number(number)] => Held::Sum(Sum::constant(number)),
                [Atom::Index(index)] => Held::Sum(Sum::index(index)),
                _ => Held::Anything,
            },
            _ => Held::Anything,
        }
    }

    /// What an instruction makes of its operands.
    fn computed(&self, i: &Instruction<'a>, from: &[Operand<'a>]) -> Held {
        // Which of both a selection takes is not followed.
        let from = if i.base() == "selp" { &from[..from.len().min(2)] } else { from };
        let mut sums = Vec::with_capacity(from.len());
        for operand in from {
            match self.operand(operand) {
                Held::Nothing => return Held::Nothing,
                Held::Anything => return Held::Anything,
                Held::Sum(sum) => sums.push(sum),
            }
        }
        // Of floating-point numbers nothing is known, and nothing of carries.
        let is_whole =
            !i.modifiers().any(|m| m.starts_with('f') || m.starts_with("bf") || m == "cc");
        let sum = if is_whole { rule(i, &sums) } else { None };
        sum.map_or(Held::Anything, Held::Sum)
    }

    /// What a load or store touches, relative to a word; `None` if that cannot be said, or if it is something
    /// else.
    fn touched(&self, i: &Instruction<'a>) -> Option<Sum> {
        let at = match i.base() {
            "st" | "red" => 0,
            "ld" | "ldu" | "atom" => 1,
            _ => return None,
        };
        let Operand::Address(base, Some(offset)) = i.operands.get(at)? else { return None };
        let Held::Sum(mut sum) = self.operand(&Operand::Plain(vec![*base.first()?])) else {
            return None;
        };
        let width = [("v2", 2), ("v4", 4), ("v8", 8)].into_iter().find(|(name, _)| i.has(name));
        let bytes = i64::from(i.element()) * width.map_or(1, |(_, width)| width);
        sum.low = sum.low.checked_add(*offset)?;
        sum.high = sum.high.checked_add(*offset)?.checked_add(bytes)?;
        Some(sum)
    }
}

/// The value of an instruction on whole numbers.
fn rule(i: &Instruction<'_>, operands: &[Sum]) -> Option<Sum> {
    match (i.base(), operands) {
        ("mov" | "cvta" | "cvt", [a]) => Some(*a),
        ("add", [a, b]) => a.plus(b),
        ("sub", [a, b]) => a.plus(&b.scaled(-1)?),
        ("neg", [a]) => a.scaled(-1),
        ("mul" | "mul24", [a, b]) if !i.has("hi") => a.times(b),
        ("mad" | "mad24", [a, b, c]) if !i.has("hi") => a.times(b)?.plus(c),
        ("shl", [a, bits]) => {
            let bits = bits.as_constant().filter(|bits| (0..32).contains(bits))?;
            a.scaled(1 << bits)
        }
        ("shr", [a, bits]) => a.shifted_right(u32::try_from(bits.as_constant()?).ok()?),
        ("and", [a, b]) => {
            let (mask, other) = match (a.as_constant(), b.as_constant()) {
                (_, Some(mask)) => (mask, a),
                (Some(mask), _) => (mask, b),
                (None, None) => return a.up_to().filter(|_| b.is_natural()),
            };
            match mask {
                // The mask takes no bits, or the lowest ones, from a natural number.
                ..0 | 0xffff_ffff.. if other.is_natural() => other.up_to(),
                ..0 => None,
                _ => Sum::constant(mask).up_to(),
            }
        }
        // Their bits are those of the sum where no bit is in both, and less where one is.
        ("or" | "xor", [a, b]) => a.up_to()?.plus(&b.up_to()?),
        ("rem", [a, b]) => {
            let most = b.as_constant().filter(|number| *number > 0)? - 1;
            Sum::constant(most).up_to().filter(|_| a.is_natural())
        }
        ("div", [a, b]) => {
            let by = b.as_constant().filter(|number| number.count_ones() == 1)?;
            a.shifted_right(by.trailing_zeros())
        }
        ("min", [a, b]) => {
            let most = [a, b].into_iter().find_map(Sum::as_constant).filter(|most| *most >= 0)?;
            Sum::constant(most).up_to().filter(|_| a.is_natural() && b.is_natural())
        }
        ("selp", [a, b]) => a.or(b),
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use gpucr_wire::reach::Sizes;

    use crate::from_ptx;

    /// What a kernel with parameters `out` and `in`, `n` and this body touches by way of them, in a launch
    /// of 10 blocks of 64 threads, relative to the addresses; `None` if that is not known.
    fn touched(body: &str) -> [Option<(i64, i64)>; 2] {
        let ptx = format!(
            ".version 8.0\n.target sm_80\n.address_size 64\n\
             .visible .entry k(.param .u64 out, .param .u64 in, .param .u32 n)\n{{\n\
             .reg .b64 %rd<20>; .reg .b32 %r<20>; .reg .f32 %f<9>; .reg .pred %p<9>;\n\
             ld.param.u64 %rd1, [out]; ld.param.u64 %rd2, [in]; ld.param.u32 %r9, [n];\n\
             cvta.to.global.u64 %rd1, %rd1;\n\
             mov.u32 %r1, %ctaid.x; mov.u32 %r2, %ntid.x; mov.u32 %r3, %tid.x;\n\
             mad.lo.s32 %r4, %r1, %r2, %r3; mul.wide.s32 %rd3, %r4, 4;\n{body}\nret;\n}}\n"
        );
        let kernels = from_ptx(&ptx).expect("readable");
        let base = 1_u64 << 40;
        let sizes = Sizes::of([10, 1, 1], [64, 1, 1]);
        [0, 1].map(|param| {
            let reach = kernels[0].params[param].words[0].reach.as_ref()?;
            let range = reach.within(&sizes, base, base, 0..1 << 50);
            Some((range.start as i64 - base as i64, range.end as i64 - base as i64))
        })
    }

    #[test]
    fn a_register_that_nothing_writes_holds_anything() {
        let body = "mov.u64 %rd4, %rd1; and.b32 %r5, %r6, 7; mad.wide.u32 %rd4, %r5, 8, %rd2;
            st.global.u32 [%rd4], 1;";
        assert_eq!(touched(body), [None, None]);
    }

    #[test]
    fn an_element_for_each_thread() {
        let body = "setp.ge.s32 %p1, %r4, %r9; @%p1 bra $end;
            add.s64 %rd4, %rd2, %rd3; ld.global.f32 %f1, [%rd4];
            add.s64 %rd5, %rd1, %rd3; st.global.f32 [%rd5], %f1; $end:";
        assert_eq!(touched(body), [Some((0, 2560)), Some((0, 2560))]);
        // Neighbours, whole vectors, and parts of a block.
        let body = "add.s64 %rd4, %rd2, %rd3; ld.global.f32 %f1, [%rd4+-4]; ld.global.f32 %f2, [%rd4+8];
            shl.b32 %r5, %r1, 4; and.b32 %r6, %r3, 3; or.b32 %r7, %r5, %r6; mul.wide.u32 %rd5, %r7, 16;
            add.s64 %rd6, %rd5, %rd1; st.global.v4.f32 [%rd6], {%f1, %f1, %f2, %f2};";
        assert_eq!(
            touched(body),
            [Some((0, (9 * 16 + 3) * 16 + 16)), Some((-4, 63 * 4 + 576 * 4 + 12))]
        );
        let body = "sub.s32 %r5, 100, %r3; shr.u32 %r6, %r3, 5; cvt.s64.s32 %rd4, %r5; shl.b64 %rd5, %rd4, 3;
            add.s64 %rd6, %rd1, %rd5; red.global.add.u64 [%rd6], 1; mul.wide.u32 %rd7, %r6, 8;
            and.b64 %rd7, %rd7, 4294967295;
            add.s64 %rd8, %rd2, %rd7; atom.global.add.u32 %r7, [%rd8], 1;";
        // Rounded up: a 32nd of 63 is one for each.
        assert_eq!(touched(body), [Some((37 * 8, 101 * 8)), Some((0, 63 * 8 + 4))]);
    }

    #[test]
    fn accesses_by_one_word_count_together() {
        let body =
            "st.global.u32 [%rd1+400], %r9; add.s64 %rd4, %rd1, %rd3; st.global.u32 [%rd4], %r9;";
        assert_eq!(
            touched(body),
            [Some((0, 576 * 4 + 63 * 4 + 404)), None],
            "the other is not used"
        );
        let body = "selp.b32 %r5, 3, 7, %p1; mul.wide.u32 %rd4, %r5, 4; add.s64 %rd5, %rd2, %rd4;
            ld.global.u32 %r6, [%rd5];";
        assert_eq!(touched(body), [None, Some((12, 32))]);
    }

    #[test]
    fn what_is_no_sum_has_no_reach() {
        // By a parameter, by memory, by a loop, backwards from the end, by a product, from a call.
        let bodies = [
            "mul.wide.s32 %rd4, %r9, 4; add.s64 %rd5, %rd2, %rd4; ld.global.u32 %r5, [%rd5];",
            "ld.shared.u32 %r5, [%rd9]; mul.wide.s32 %rd4, %r5, 4; add.s64 %rd5, %rd2, %rd4;
             ld.global.u32 %r6, [%rd5];",
            "mov.u64 %rd5, %rd2; $l: ld.global.u32 %r6, [%rd5]; add.s64 %rd5, %rd5, 4; @%p1 bra $l;",
            "mov.u32 %r5, 0; $l: mul.wide.s32 %rd4, %r5, 4; add.s64 %rd5, %rd2, %rd4;
             ld.global.u32 %r6, [%rd5]; add.s32 %r5, %r5, 1; @%p1 bra $l;",
            "mul.lo.s32 %r5, %r3, %r4; mul.wide.s32 %rd4, %r5, 4; add.s64 %rd5, %rd2, %rd4;
             ld.global.u32 %r6, [%rd5];",
            "selp.b64 %rd5, %rd1, %rd2, %p1; ld.global.u32 %r6, [%rd5];",
            "cvt.rn.f32.s32 %f1, %r4; cvt.rzi.s32.f32 %r5, %f1; mul.wide.s32 %rd4, %r5, 4;
             add.s64 %rd5, %rd2, %rd4; ld.global.u32 %r6, [%rd5];",
        ];
        for body in bodies {
            assert_eq!(touched(body)[1], None, "{body}");
            // A kernel takes the value from others.
            let body = format!("ld.global.u32 %r10, [%rd2]; {body}");
            assert_eq!(touched(&body)[1], None, "{body}");
        }
        assert_eq!(touched("ld.global.u32 %r10, [%rd2];")[1], Some((0, 4)));
    }
}
