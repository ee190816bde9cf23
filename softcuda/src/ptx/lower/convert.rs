//! `cvt`, `setp` and `set`.

use super::{Lower, Lowered};
use crate::ptx::ast::{Operand, Type};
use crate::ptx::code::{Op, Reg, Src};
use crate::ptx::kernels::compare::{combination, comparison};
use crate::ptx::kernels::convert::{Conversion, any, common};
use crate::ptx::kernels::rounding::Round;
use crate::ptx::kernels::{int, tiny};
use crate::ptx::parser::float_bits;

impl<'a> Lower<'_, 'a> {
    pub(super) fn cvt(&mut self) -> Lowered<()> {
        if let Some((index, format)) =
            self.modifiers.iter().enumerate().find_map(|(i, m)| Some((i, tiny::format(m)?)))
        {
            self.modifiers.remove(index);
            return self.cvt_tiny(format);
        }
        if self.modifiers.contains(&"tf32") {
            return self.cvt_tf32();
        }
        let from = self.ty()?;
        let to_type = self.ty()?;
        let round = self.find(|m| Some((Round::parse(m)?, m.len() == 3)));
        let (round, integral) = round.unwrap_or((Round::Nearest, false));
        let conversion = Conversion {
            to: to_type,
            from,
            round,
            integral,
            saturate: self.has("sat"),
            flush: self.has("ftz"),
            relu: self.has("relu"),
        };
        self.done()?;
        if matches!(to_type, Type::F16x2 | Type::Bf16x2) {
            return self.cvt_packed(conversion);
        }
        if matches!(from, Type::F16x2 | Type::Bf16x2) || to_type.size() > 8 || from.size() > 8 {
            return Err(self.unsupported());
        }
        let [to, source] = self.operands()?;
        let source = self.wide_src(source, from)?;
        let (to, wide) = match to {
            Operand::Register(register) => {
                let register = self.wide_enough(*register, to_type)?;
                (register, self.types[register as usize].size() > to_type.size())
            }
            other => (self.to(other, to_type)?, false),
        };
        self.conversion(conversion, to, source)?;
        if wide && !to_type.is_float() {
            // A narrow result fills a wider register by its sign.
            self.map1(int::unary("extend", to_type), to, to)?;
        }
        Ok(())
    }

    /// Between pairs of numbers of eight bits or less and wider ones.
    fn cvt_tiny(&mut self, format: usize) -> Lowered<()> {
        let other = self.ty()?;
        let limited = self.has("satfinite");
        let description = tiny::packed(format, self.has("relu"));
        if !self.has("rn") {
            return Err(self.unsupported());
        }
        self.done()?;
        let small = if tiny::width(format) == 4 { Type::B8 } else { Type::B16 };
        let description = self.constant(description);
        match (other, limited) {
            (Type::F32, true) => {
                let [to, high, low] = self.operands()?;
                let to = self.to(to, small)?;
                let (high, low) = (self.src(high, other)?, self.src(low, other)?);
                self.map3(Some(tiny::from_singles()), to, high, low, description)
            }
            (Type::F16x2, true) if small == Type::B16 => {
                let [to, from] = self.operands()?;
                let (to, from) = (self.to(to, small)?, self.src(from, other)?);
                self.map2(Some(tiny::from_halves()), to, from, description)
            }
            (Type::F16x2, false) => {
                let [to, from] = self.operands()?;
                let (to, from) = (self.to(to, other)?, self.src(from, small)?);
                self.map2(Some(tiny::to_halves()), to, from, description)
            }
            _ => Err(self.unsupported()),
        }
    }

    /// To single precision with a fraction of ten bits.
    fn cvt_tf32(&mut self) -> Lowered<()> {
        self.has("tf32");
        let from = self.ty()?;
        let mode = self.find(tiny::tf32_mode).ok_or_else(|| self.unsupported())?;
        let mode = mode | u64::from(self.has("satfinite")) << 2 | u64::from(self.has("relu")) << 3;
        self.done()?;
        let [to, source] = self.operands()?;
        let (to, source) = (self.to(to, Type::B32)?, self.src(source, from)?);
        let mode = self.constant(mode);
        let kernel = Some(tiny::to_tf32()).filter(|_| from == Type::F32);
        self.map2(kernel, to, source, mode)
    }

    fn conversion(&mut self, c: Conversion, to: Reg, source: Src) -> Lowered<()> {
        let simple = !c.saturate && !c.relu;
        if !c.to.is_float() && !c.from.is_float() && simple {
            return self.map1(int::unary("extend", c.from), to, source);
        }
        if c.to == c.from && c.to.is_float() && simple && !c.integral && !c.flush {
            self.emit(Op::Copy(to, source));
            return Ok(());
        }
        if let Some(kernel) = common(c) {
            return self.map1(Some(kernel), to, source);
        }
        let description = self.constant(c.packed());
        self.emit(Op::Map2(any(), to, source, description));
        Ok(())
    }

    /// Two values to a pair: the first operand goes to the high half.
    fn cvt_packed(&mut self, c: Conversion) -> Lowered<()> {
        if c.from != Type::F32 {
            return Err(self.unsupported());
        }
        let [to, high, low] = self.operands()?;
        let element = if c.to == Type::F16x2 { Type::F16 } else { Type::Bf16 };
        let single = Conversion { to: element, ..c };
        let to = self.to(to, c.to)?;
        let (high, low) = (self.src(high, c.from)?, self.src(low, c.from)?);
        let (high_half, low_half) = (self.temporary(element), self.temporary(element));
        self.conversion(single, high_half, high)?;
        self.conversion(single, low_half, low)?;
        let shift = self.constant(16);
        self.map2(int::binary("shl", Type::B32), high_half, high_half, shift)?;
        self.map2(int::binary("or", Type::B32), to, high_half, low_half)
    }

    pub(super) fn compare(&mut self, opcode: &str) -> Lowered<()> {
        let ty = self.ty()?;
        let result = if opcode == "set" { self.ty()? } else { Type::Pred };
        let flush = self.has("ftz");
        let join = self.find(combination);
        if matches!(ty, Type::F16x2 | Type::Bf16x2) {
            return self.compare_packed(opcode, ty, result, join.is_some());
        }
        let kernel = self.find(|m| comparison(m, ty, flush));
        self.done()?;
        let all = self.current.map_or(&[][..], |current| &current.operands);
        let (to, a, b, joined) = match all {
            [to, a, b] if join.is_none() => (to, a, b, None),
            [to, a, b, c] if join.is_some() => (to, a, b, Some(c)),
            _ => return Err(self.position.mistyped("wrong number of operands")),
        };
        let (a, b) = (self.src(a, ty)?, self.src(b, ty)?);
        let joined = match joined {
            Some(c) => Some(self.src(c, Type::Pred)?),
            None => None,
        };
        if opcode == "set" {
            let to = self.to(to, result)?;
            let truth = self.temporary(Type::Pred);
            self.map2(kernel, truth, a, b)?;
            if let Some(joined) = joined {
                self.map2(join, truth, truth, joined)?;
            }
            let one = if result.is_float() { float_bits(1.0, result) } else { u64::MAX };
            let (one, zero) = (self.constant(one), self.constant(0));
            return self.map3(int::ternary("select", result), to, one, zero, truth);
        }
        let (first, second) = match to {
            Operand::Pair(first, second) => (*first, *second),
            Operand::Register(register) => (Some(*register), None),
            Operand::Sink => (None, None),
            _ => return Err(self.position.mistyped("expected a predicate register")),
        };
        if let (Some(first), None, None) = (first, second, joined) {
            let first = self.typed(first, Type::Pred)?;
            return self.map2(kernel, first, a, b);
        }
        let truth = self.temporary(Type::Pred);
        let opposite = self.temporary(Type::Pred);
        self.map2(kernel, truth, a, b)?;
        self.map1(int::unary("not", Type::Pred), opposite, truth)?;
        if let Some(joined) = joined {
            self.map2(join, truth, truth, joined)?;
            self.map2(join, opposite, opposite, joined)?;
        }
        for (register, value) in [(first, truth), (second, opposite)] {
            if let Some(register) = register {
                let register = self.typed(register, Type::Pred)?;
                self.emit(Op::Copy(register, value));
            }
        }
        Ok(())
    }

    /// Compares both halves: to two predicates, or to a pair of ones and zeros.
    fn compare_packed(&mut self, opcode: &str, ty: Type, result: Type, joins: bool) -> Lowered<()> {
        let half = if ty == Type::F16x2 { Type::F16 } else { Type::Bf16 };
        let kernel = self.find(|m| comparison(m, half, false));
        self.done()?;
        if joins {
            return Err(self.unsupported());
        }
        let [to, a, b] = self.operands()?;
        let (a, b) = (self.src(a, ty)?, self.src(b, ty)?);
        let shift = self.constant(16);
        let (high_a, high_b) = (self.temporary(Type::B32), self.temporary(Type::B32));
        self.map2(int::binary("shr", Type::B32), high_a, a, shift)?;
        self.map2(int::binary("shr", Type::B32), high_b, b, shift)?;
        let (low, high) = (self.temporary(Type::Pred), self.temporary(Type::Pred));
        self.map2(kernel, low, a, b)?;
        self.map2(kernel, high, high_a, high_b)?;
        if opcode == "setp" {
            let Operand::Pair(first, second) = *to else {
                return Err(self.position.mistyped("expected two predicate registers"));
            };
            for (register, value) in [(first, low), (second, high)] {
                if let Some(register) = register {
                    let register = self.typed(register, Type::Pred)?;
                    self.emit(Op::Copy(register, value));
                }
            }
            return Ok(());
        }
        let one = if result.is_float() { float_bits(1.0, half) } else { 0xffff };
        let to = self.to(to, Type::B32)?;
        let zero = self.constant(0);
        let (low_one, high_one) = (self.constant(one), self.constant(one << 16));
        let (low_bits, high_bits) = (self.temporary(Type::B32), self.temporary(Type::B32));
        self.map3(int::ternary("select", Type::B32), low_bits, low_one, zero, low)?;
        self.map3(int::ternary("select", Type::B32), high_bits, high_one, zero, high)?;
        self.map2(int::binary("or", Type::B32), to, low_bits, high_bits)
    }
}
