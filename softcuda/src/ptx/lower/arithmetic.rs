//! Arithmetic, logic and data movement.

use super::{Lower, Lowered};
use crate::ptx::ast::{Operand, Type};
use crate::ptx::code::{NONE, Op, Reg, Src};
use crate::ptx::kernels::compare::comparison;
use crate::ptx::kernels::float::{self, Style};
use crate::ptx::kernels::rounding::Round;
use crate::ptx::kernels::{half, int};

const PLAIN: Style = Style { round: Round::Nearest, flush: false, propagate: false };

impl<'a> Lower<'_, 'a> {
    pub(super) fn mov(&mut self) -> Lowered<()> {
        let ty = self.ty()?;
        self.done()?;
        let [to, from] = self.operands()?;
        if let Operand::Vector(parts) = to {
            let from = self.src(from, ty)?;
            return self.unpack(parts, from, ty);
        }
        let to = self.to(to, ty)?;
        if let Operand::Symbol(base, offset) = from {
            // `mov` of a kernel parameter's address is the one that needs no window: it is
            // an address in parameter space; the window is harmless there.
            let from = self.address_of(*base, *offset, false)?;
            self.emit(Op::Copy(to, from));
            return Ok(());
        }
        let from = self.src(from, ty)?;
        self.emit(Op::Copy(to, from));
        Ok(())
    }

    /// The rounding, flushing and NaN handling of a floating-point instruction.
    fn style(&mut self) -> Style {
        let round = self.find(|m| if m.len() == 2 { Round::parse(m) } else { None });
        Style {
            round: round.unwrap_or(Round::Nearest),
            flush: self.has("ftz"),
            propagate: self.has("NaN"),
        }
    }

    pub(super) fn arithmetic(&mut self, opcode: &str) -> Lowered<()> {
        match opcode {
            "add" | "sub" | "mul" | "div" | "rem" | "min" | "max" | "copysign" | "and" | "or"
            | "xor" | "shl" | "shr" | "mul24" | "bmsk" | "szext" => self.binary(opcode),
            "abs" | "neg" | "not" | "cnot" | "clz" | "popc" | "brev" | "bfind" | "sqrt" | "rcp"
            | "rsqrt" | "ex2" | "lg2" | "sin" | "cos" | "tanh" => self.unary(opcode),
            "mad" | "fma" | "mad24" => self.multiply_add(opcode),
            "addc" | "subc" | "madc" => self.with_carry(opcode),
            "sad" | "bfe" | "prmt" | "shf" | "slct" | "selp" | "dp4a" | "dp2a" | "fns" => {
                self.ternary(opcode)
            }
            "bfi" | "lop3" => self.quaternary(opcode),
            "testp" => {
                let ty = self.ty()?;
                let [to, a] = self.operands()?;
                let (to, a) = (self.to(to, Type::Pred)?, self.src(a, ty)?);
                let kernel = self.find(|name| float::test(name, ty));
                self.done()?;
                self.map1(kernel, to, a)
            }
            _ => Err(self.unsupported()),
        }
    }

    fn binary(&mut self, opcode: &str) -> Lowered<()> {
        if matches!(opcode, "add" | "sub") && self.modifiers.contains(&"cc") {
            return self.with_carry(opcode);
        }
        let relu = self.has("relu");
        let pair = self.find(|part| int::pair(opcode, relu, part));
        if pair.is_some() {
            self.done()?;
            let [to, a, b] = self.operands()?;
            let to = self.to(to, Type::B32)?;
            let (a, b) = (self.src(a, Type::B32)?, self.src(b, Type::B32)?);
            return self.map2(pair, to, a, b);
        }
        let ty = self.ty()?;
        let [to, a, b] = self.operands()?;
        if relu && ty != Type::S32 {
            return Err(self.unsupported());
        }
        if ty.is_float() {
            return self.float_binary(opcode, ty, to, a, b);
        }
        let mut name = if relu { format!("{opcode}.relu") } else { opcode.to_owned() };
        for part in ["lo", "hi", "wide", "sat", "clamp", "wrap"] {
            if self.has(part) {
                name = format!("{name}.{part}");
            }
        }
        self.done()?;
        let to_type = if name == "mul.wide" { self.doubled(ty)? } else { ty };
        let b_type = if matches!(opcode, "shl" | "shr") { Type::U32 } else { ty };
        let (to, a, b) = (self.to(to, to_type)?, self.src(a, ty)?, self.src(b, b_type)?);
        self.map2(int::binary(&name, ty), to, a, b)
    }

    fn doubled(&self, ty: Type) -> Lowered<Type> {
        match ty {
            Type::U16 => Ok(Type::U32),
            Type::S16 => Ok(Type::S32),
            Type::U32 => Ok(Type::U64),
            Type::S32 => Ok(Type::S64),
            _ => Err(self.unsupported()),
        }
    }

    fn float_binary(
        &mut self,
        opcode: &str,
        ty: Type,
        to: &Operand<'a>,
        a: &Operand<'a>,
        b: &Operand<'a>,
    ) -> Lowered<()> {
        let style = self.style();
        let saturate = self.has("sat");
        if opcode == "div" {
            // An exactly rounded quotient satisfies the approximate ones' bounds.
            let _ = self.has("approx") || self.has("full");
        }
        self.done()?;
        let to = self.to(to, ty)?;
        let (a, b) = (self.src(a, ty)?, self.src(b, ty)?);
        let (style, [a, b], flush) = self.flushed(style, ty, [a, b])?;
        let kernel = match ty {
            Type::F32 | Type::F64 => float::binary(opcode, ty, style),
            _ => half::binary(opcode, ty, style),
        };
        self.map2(kernel, to, a, b)?;
        self.flush_result(flush, to)?;
        self.saturated(saturate, to, ty)
    }

    /// Directed rounding with flushing is done in steps: kernels have one or the other.
    fn flushed<const N: usize>(
        &mut self,
        style: Style,
        ty: Type,
        sources: [Src; N],
    ) -> Lowered<(Style, [Src; N], bool)> {
        if !style.flush || style.round == Round::Nearest || ty != Type::F32 {
            return Ok((style, sources, false));
        }
        let mut flushed = sources;
        for source in &mut flushed {
            let to = self.temporary(ty);
            self.map1(float::unary("flush", ty, PLAIN), to, *source)?;
            *source = to;
        }
        Ok((Style { flush: false, ..style }, flushed, true))
    }

    fn flush_result(&mut self, flush: bool, to: Reg) -> Lowered<()> {
        if flush { self.map1(float::unary("flush", Type::F32, PLAIN), to, to) } else { Ok(()) }
    }

    fn saturated(&mut self, saturate: bool, to: Reg, ty: Type) -> Lowered<()> {
        if !saturate {
            return Ok(());
        }
        let kernel = match ty {
            Type::F32 => float::unary("sat", ty, PLAIN),
            _ => half::unary("sat", ty),
        };
        self.map1(kernel, to, to)
    }

    fn unary(&mut self, opcode: &str) -> Lowered<()> {
        let ty = self.ty()?;
        let [to, a] = self.operands()?;
        if ty.is_float() {
            let style = self.style();
            let approximate = self.has("approx");
            self.done()?;
            let (to, a) = (self.to(to, ty)?, self.src(a, ty)?);
            let (style, [a], flush) = self.flushed(style, ty, [a])?;
            let kernel = match ty {
                Type::F32 => float::unary(opcode, ty, style),
                Type::F64 if approximate => float::unary(&format!("{opcode}.approx"), ty, style),
                Type::F64 => float::unary(opcode, ty, style),
                _ => half::unary(opcode, ty),
            };
            self.map1(kernel, to, a)?;
            return self.flush_result(flush, to);
        }
        let name = if self.has("shiftamt") { "bfind.shiftamt" } else { opcode };
        self.done()?;
        let to_type = if matches!(opcode, "clz" | "popc" | "bfind") { Type::U32 } else { ty };
        let (to, a) = (self.to(to, to_type)?, self.src(a, ty)?);
        self.map1(int::unary(name, ty), to, a)
    }

    fn multiply_add(&mut self, opcode: &str) -> Lowered<()> {
        if self.modifiers.contains(&"cc") {
            return self.with_carry(opcode);
        }
        let ty = self.ty()?;
        let [to, a, b, c] = self.operands()?;
        if ty.is_float() {
            let style = self.style();
            let (saturate, relu) = (self.has("sat"), self.has("relu"));
            self.done()?;
            let to = self.to(to, ty)?;
            let (a, b, c) = (self.src(a, ty)?, self.src(b, ty)?, self.src(c, ty)?);
            let (style, [a, b, c], flush) = self.flushed(style, ty, [a, b, c])?;
            let kernel = match ty {
                Type::F32 | Type::F64 if !relu => float::ternary("fma", ty, style),
                Type::F32 | Type::F64 => None,
                _ => half::ternary(if relu { "fma.relu" } else { "fma" }, ty, style),
            };
            self.map3(kernel, to, a, b, c)?;
            self.flush_result(flush, to)?;
            return self.saturated(saturate, to, ty);
        }
        if opcode == "mad24" {
            let part = if self.has("lo") { "mul24.lo" } else { "mul24.hi" };
            let sum = if self.has("hi") && self.has("sat") { "add.sat" } else { "add" };
            self.done()?;
            let (to, a, b) = (self.to(to, ty)?, self.src(a, ty)?, self.src(b, ty)?);
            let c = self.src(c, ty)?;
            let product = self.temporary(ty);
            self.map2(int::binary(part, ty), product, a, b)?;
            return self.map2(int::binary(sum, ty), to, product, c);
        }
        let mut name = opcode.to_owned();
        for part in ["lo", "hi", "wide", "sat"] {
            if self.has(part) {
                name = format!("{name}.{part}");
            }
        }
        self.done()?;
        let sum_type = if name == "mad.wide" { self.doubled(ty)? } else { ty };
        let to = self.to(to, sum_type)?;
        let (a, b, c) = (self.src(a, ty)?, self.src(b, ty)?, self.src(c, sum_type)?);
        self.map3(int::ternary(&name, ty), to, a, b, c)
    }

    /// Extended-precision arithmetic through the carry flag.
    fn with_carry(&mut self, opcode: &str) -> Lowered<()> {
        let ty = self.ty()?;
        let carry_out = self.has("cc");
        let carry_in = opcode.ends_with('c');
        let subtracts = opcode.starts_with("sub");
        let flag = self.carry;
        let (to, a, b) = if opcode.starts_with("mad") {
            let part = if self.has("lo") { "mul.lo" } else { "mul.hi" };
            self.has("hi");
            let [to, a, b, c] = self.operands()?;
            let (to, a, b) = (self.to(to, ty)?, self.src(a, ty)?, self.src(b, ty)?);
            let c = self.src(c, ty)?;
            let product = self.temporary(ty);
            self.map2(int::binary(part, ty), product, a, b)?;
            (to, product, c)
        } else {
            let [to, a, b] = self.operands()?;
            (self.to(to, ty)?, self.src(a, ty)?, self.src(b, ty)?)
        };
        self.done()?;
        let next = self.temporary(Type::Pred);
        if carry_out {
            match (carry_in, subtracts) {
                (false, false) => self.map2(int::binary("carry", ty), next, a, b)?,
                (false, true) => self.map2(int::binary("borrow", ty), next, a, b)?,
                (true, false) => self.map3(int::ternary("carry3", ty), next, a, b, flag)?,
                (true, true) => self.map3(int::ternary("borrow3", ty), next, a, b, flag)?,
            }
        }
        match (carry_in, subtracts) {
            (false, false) => self.map2(int::binary("add", ty), to, a, b)?,
            (false, true) => self.map2(int::binary("sub", ty), to, a, b)?,
            (true, false) => self.map3(int::ternary("add3", ty), to, a, b, flag)?,
            (true, true) => self.map3(int::ternary("sub3", ty), to, a, b, flag)?,
        }
        if carry_out {
            self.emit(Op::Copy(flag, next));
        }
        Ok(())
    }

    fn ternary(&mut self, opcode: &str) -> Lowered<()> {
        let [to, a, b, c] = self.operands()?;
        let (name, ty, types) = match opcode {
            "selp" => {
                let ty = self.ty()?;
                ("select".to_owned(), ty, [ty, ty, ty, Type::Pred])
            }
            "slct" => {
                let selector = self.ty()?;
                let ty = self.ty()?;
                let flush = self.has("ftz");
                let name = match selector {
                    Type::S32 => "slct.s32",
                    // Flushing does not change the sign that is tested.
                    Type::F32 => "slct.f32",
                    _ => return Err(self.unsupported()),
                };
                let _ = flush;
                (name.to_owned(), ty, [ty, ty, ty, selector])
            }
            "bfe" => {
                let ty = self.ty()?;
                (opcode.to_owned(), ty, [ty, ty, Type::U32, Type::U32])
            }
            "fns" => {
                let ty = self.ty()?;
                (opcode.to_owned(), ty, [Type::B32; 4])
            }
            "prmt" | "shf" => {
                let ty = self.ty()?;
                let mut name = opcode.to_owned();
                for modifier in std::mem::take(&mut self.modifiers) {
                    name = format!("{name}.{modifier}");
                }
                (name, ty, [Type::B32; 4])
            }
            "dp4a" | "dp2a" => {
                let (b, a) = (self.ty()?, self.ty()?);
                let mut name = opcode.to_owned();
                for ty in [a, b] {
                    match ty {
                        Type::U32 => name.push_str(".u32"),
                        Type::S32 => name.push_str(".s32"),
                        _ => return Err(self.unsupported()),
                    }
                }
                for part in ["lo", "hi"] {
                    if opcode == "dp2a" && self.has(part) {
                        name = format!("{name}.{part}");
                    }
                }
                (name, a, [Type::B32; 4])
            }
            _ => {
                let ty = self.ty()?;
                (opcode.to_owned(), ty, [ty; 4])
            }
        };
        self.done()?;
        let to = self.to(to, types[0])?;
        let (a, b, c) = (self.src(a, types[1])?, self.src(b, types[2])?, self.src(c, types[3])?);
        self.map3(int::ternary(&name, ty), to, a, b, c)
    }

    fn quaternary(&mut self, opcode: &str) -> Lowered<()> {
        if opcode == "lop3" && self.modifiers.len() > 1 {
            return self.logic_with_predicate();
        }
        let ty = self.ty()?;
        self.done()?;
        let [to, a, b, c, d] = self.operands()?;
        let to = self.to(to, ty)?;
        let (a, b) = (self.src(a, ty)?, self.src(b, ty)?);
        let c = self.src(c, if opcode == "bfi" { Type::U32 } else { ty })?;
        let d = self.src(d, Type::U32)?;
        let kernel = int::quaternary(opcode, ty).ok_or_else(|| self.unsupported())?;
        self.emit(Op::Map4(kernel, to, [a, b, c, d]));
        Ok(())
    }

    /// `lop3` with a predicate: whether the result is not zero, and or or another predicate.
    fn logic_with_predicate(&mut self) -> Lowered<()> {
        let join = if self.has("and") { "and" } else { "or" };
        self.has("or");
        let ty = self.ty()?;
        self.done()?;
        let [to, a, b, c, table, other] = self.operands()?;
        let (to, holds) = self.with_predicate(to, ty)?;
        if holds == NONE {
            return Err(self.position.mistyped("expected a register and a predicate, `d|p`"));
        }
        let (a, b, c) = (self.src(a, ty)?, self.src(b, ty)?, self.src(c, ty)?);
        let table = self.src(table, Type::U32)?;
        let (other, negated) = self.predicate(other)?;
        let other = if negated {
            let inverted = self.temporary(Type::Pred);
            self.map1(int::unary("not", Type::Pred), inverted, other)?;
            inverted
        } else {
            other
        };
        let result = self.temporary(ty);
        let kernel = int::quaternary("lop3", ty).ok_or_else(|| self.unsupported())?;
        self.emit(Op::Map4(kernel, result, [a, b, c, table]));
        let (zero, not_zero) = (self.constant(0), self.temporary(Type::Pred));
        self.map2(comparison("ne", ty, false), not_zero, result, zero)?;
        self.emit(Op::Copy(to, result));
        self.map2(int::binary(join, Type::Pred), holds, not_zero, other)
    }
}
