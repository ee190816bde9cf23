//! `ldmatrix` and `mma.sync`.

use super::memory::space;
use super::{Lower, Lowered};
use crate::ptx::ast::{Operand, Space, Type};
use crate::ptx::code::{Accumulator, Element, MatrixProduct, NONE, Op};

impl Element {
    fn parse(name: &str) -> Option<Element> {
        Some(match name {
            "f16" => Element::F16,
            "bf16" => Element::Bf16,
            "tf32" => Element::Tf32,
            "s8" => Element::S8,
            "u8" => Element::U8,
            _ => return None,
        })
    }

    /// How many of them a register of 32 bits holds.
    pub(crate) fn per_register(self) -> usize {
        match self {
            Element::F16 | Element::Bf16 => 2,
            Element::Tf32 => 1,
            Element::S8 | Element::U8 => 4,
        }
    }
}

impl<'a> Lower<'_, 'a> {
    pub(super) fn load_matrix(&mut self) -> Lowered<()> {
        let shape = self.has("sync") && self.has("aligned") && self.has("m8n8");
        if !shape || self.ty()? != Type::B16 {
            return Err(self.unsupported());
        }
        let count = self.find(|m| match m {
            "x1" => Some(1),
            "x2" => Some(2),
            "x4" => Some(4),
            _ => None,
        });
        let count = count.ok_or_else(|| self.unsupported())?;
        let transposed = self.has("trans");
        let space = self.find(space).unwrap_or(Space::Generic);
        if !matches!(space, Space::Generic | Space::Shared) {
            return Err(self.unsupported());
        }
        self.done()?;
        let [registers, address] = self.operands()?;
        let place = self.place(space, address, 8)?;
        let mut to = [NONE; 4];
        self.fragment(registers, count, |lower, slot, operand| {
            to[slot] = lower.to(operand, Type::B32)?;
            Ok(())
        })?;
        self.emit(Op::LoadMatrix { place, count: count as u8, transposed, to });
        Ok(())
    }

    /// Calls `each` for the registers of a fragment: a vector, or a single register.
    fn fragment(
        &mut self,
        operand: &Operand<'a>,
        count: usize,
        mut each: impl FnMut(&mut Self, usize, &Operand<'a>) -> Lowered<()>,
    ) -> Lowered<()> {
        let parts = match operand {
            Operand::Vector(parts) => &parts[..],
            single => std::slice::from_ref(single),
        };
        if parts.len() != count {
            let message = format!("expected {count} registers, found {}", parts.len());
            return Err(self.position.mistyped(message));
        }
        parts.iter().enumerate().try_for_each(|(slot, part)| each(self, slot, part))
    }

    pub(super) fn multiply_matrices(&mut self) -> Lowered<()> {
        let layout = self.has("sync") && self.has("aligned") && self.has("row") && self.has("col");
        let depth = self.find(|m| m.strip_prefix("m16n8k")?.parse::<usize>().ok());
        let saturate = self.has("satfinite");
        let (true, Some(depth), &[d, a, b, c]) = (layout, depth, &self.modifiers[..]) else {
            return Err(self.unsupported());
        };
        let elements = Element::parse(a).zip(Element::parse(b));
        let (a_element, b_element) = elements.ok_or_else(|| self.unsupported())?;
        let bytes = |element| matches!(element, Element::S8 | Element::U8);
        let same = a_element == b_element || (bytes(a_element) && bytes(b_element));
        let sum = match d {
            "f32" if !saturate && !bytes(a_element) => Accumulator::F32,
            "f16" if !saturate && a_element == Element::F16 => Accumulator::F16,
            "s32" if bytes(a_element) => Accumulator::S32 { saturate },
            _ => return Err(self.unsupported()),
        };
        // Lanes by columns: four lanes hold a row of A, so a register more is four times as deep.
        let b_registers = depth / (4 * a_element.per_register());
        let whole = b_registers * 4 * a_element.per_register() == depth;
        if d != c || !same || !whole || !matches!(b_registers, 1 | 2) {
            return Err(self.unsupported());
        }
        self.modifiers.clear();
        let [d, a, b, c] = self.operands()?;
        let mut product = MatrixProduct {
            a_element,
            b_element,
            sum,
            b_registers: b_registers as u8,
            a: [NONE; 4],
            b: [NONE; 2],
            c: [NONE; 4],
            d: [NONE; 4],
        };
        let (sums, ty) = match sum {
            Accumulator::F16 => (2, Type::B32),
            Accumulator::F32 => (4, Type::F32),
            Accumulator::S32 { .. } => (4, Type::S32),
        };
        self.fragment(a, 2 * b_registers, |lower, slot, operand| {
            product.a[slot] = lower.src(operand, Type::B32)?;
            Ok(())
        })?;
        self.fragment(b, b_registers, |lower, slot, operand| {
            product.b[slot] = lower.src(operand, Type::B32)?;
            Ok(())
        })?;
        self.fragment(c, sums, |lower, slot, operand| {
            product.c[slot] = lower.src(operand, ty)?;
            Ok(())
        })?;
        self.fragment(d, sums, |lower, slot, operand| {
            product.d[slot] = lower.to(operand, ty)?;
            Ok(())
        })?;
        self.code.products.push(product);
        self.emit(Op::MultiplyMatrices(self.code.products.len() as u32 - 1));
        Ok(())
    }
}
