//! Instructions on matrices: `ldmatrix`, `stmatrix`, `movmatrix`, `mma` and `wmma`.

use super::memory::space;
use super::{Lower, Lowered};
use crate::ptx::ast::{Operand, Space, Type};
use crate::ptx::code::{FragmentMove, MatrixProduct, Multiply, NONE, Op};
use crate::ptx::fragment::{Element, Family, Fragment, MOST_REGISTERS, Sum};

/// Rows, columns and depth of a product.
#[derive(Clone, Copy, PartialEq, Eq)]
struct Shape(usize, usize, usize);

impl Shape {
    /// `m16n8k16` and the like.
    fn parse(name: &str) -> Option<Shape> {
        let (rows, rest) = name.strip_prefix('m')?.split_once('n')?;
        let (columns, depth) = rest.split_once('k')?;
        Some(Shape(rows.parse().ok()?, columns.parse().ok()?, depth.parse().ok()?))
    }

    fn is_of_mma(self, element: Element) -> bool {
        let Shape(rows, columns, depth) = self;
        // Registers that four lanes hold a row in.
        let width = 4 * element.per_register();
        let deep = depth / width;
        depth.is_multiple_of(width)
            && columns == 8
            && match (rows, element) {
                (8, Element::F64) => deep == 1,
                (8, _) => deep == 1 && element.is_integer(),
                (16, Element::F64) => matches!(deep, 1 | 2 | 4),
                (16, _) => matches!(deep, 1 | 2),
                _ => false,
            }
    }

    fn is_of_wmma(self, element: Element) -> bool {
        match element {
            Element::F16 | Element::Bf16 | Element::S8 | Element::U8 => {
                [Shape(16, 16, 16), Shape(8, 32, 16), Shape(32, 8, 16)].contains(&self)
            }
            Element::Tf32 => self == Shape(16, 16, 8),
            Element::F64 => self == Shape(8, 8, 4),
            Element::S4 | Element::U4 | Element::B1 | Element::E4m3 | Element::E5m2 => false,
        }
    }
}

impl<'a> Lower<'_, 'a> {
    /// What `ldmatrix` and `stmatrix` have in common: how many matrices, whether transposed, and
    /// where.
    fn rows_of_matrices(&mut self) -> Lowered<(usize, bool, Space)> {
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
        Ok((count, transposed, space))
    }

    pub(super) fn load_matrix(&mut self) -> Lowered<()> {
        let (count, transposed, space) = self.rows_of_matrices()?;
        let [registers, address] = self.operands()?;
        let place = self.place(space, address, 8)?;
        let to = self.targets(registers, count, Type::B32)?;
        let to = [to[0], to[1], to[2], to[3]];
        self.emit(Op::LoadMatrix { place, count: count as u8, transposed, to });
        Ok(())
    }

    pub(super) fn store_matrix(&mut self) -> Lowered<()> {
        let (count, transposed, space) = self.rows_of_matrices()?;
        let [address, registers] = self.operands()?;
        let place = self.place(space, address, 8)?;
        let from = self.sources(registers, count, Type::B32)?;
        let from = [from[0], from[1], from[2], from[3]];
        self.emit(Op::StoreMatrix { place, count: count as u8, transposed, from });
        Ok(())
    }

    pub(super) fn transpose_matrix(&mut self) -> Lowered<()> {
        let known = ["sync", "aligned", "m8n8", "trans"].map(|name| self.has(name));
        if known.contains(&false) || self.ty()? != Type::B16 {
            return Err(self.unsupported());
        }
        self.done()?;
        let [to, from] = self.operands()?;
        let (to, from) = (self.to(to, Type::B32)?, self.src(from, Type::B32)?);
        self.emit(Op::TransposeMatrix(to, from));
        Ok(())
    }

    /// The registers of a vector, or a single one, of which there must be `count`.
    fn parts<'o>(&self, operand: &'o Operand<'a>, count: usize) -> Lowered<&'o [Operand<'a>]> {
        let parts = match operand {
            Operand::Vector(parts) => &parts[..],
            single => std::slice::from_ref(single),
        };
        if parts.len() != count || count > MOST_REGISTERS {
            let message = format!("expected {count} registers, found {}", parts.len());
            return Err(self.position.mistyped(message));
        }
        Ok(parts)
    }

    fn sources(
        &mut self,
        operand: &Operand<'a>,
        count: usize,
        ty: Type,
    ) -> Lowered<[u32; MOST_REGISTERS]> {
        let mut found = [NONE; MOST_REGISTERS];
        for (slot, part) in found.iter_mut().zip(self.parts(operand, count)?) {
            *slot = self.src(part, ty)?;
        }
        Ok(found)
    }

    fn targets(
        &mut self,
        operand: &Operand<'a>,
        count: usize,
        ty: Type,
    ) -> Lowered<[u32; MOST_REGISTERS]> {
        let mut found = [NONE; MOST_REGISTERS];
        for (slot, part) in found.iter_mut().zip(self.parts(operand, count)?) {
            *slot = self.to(part, ty)?;
        }
        Ok(found)
    }

    fn shape(&mut self) -> Lowered<Shape> {
        self.find(Shape::parse).ok_or_else(|| self.unsupported())
    }

    pub(super) fn multiply_matrices(&mut self) -> Lowered<()> {
        let layout = ["sync", "aligned", "row", "col"].map(|name| self.has(name));
        if layout.contains(&false) {
            return Err(self.unsupported());
        }
        let shape = self.shape()?;
        let saturate = self.has("satfinite");
        let multiply = match (self.has("and"), self.has("xor")) {
            (true, _) => Multiply::And,
            (_, true) => Multiply::Xor,
            _ => Multiply::Product,
        };
        let counts = self.has("popc");
        let rounding = self.has("rn");
        let &[d, a, b, c] = &self.modifiers[..] else { return Err(self.unsupported()) };
        let types = Element::parse(a).zip(Element::parse(b)).zip(Sum::parse(d));
        let ((a, b), sum) = types.ok_or_else(|| self.unsupported())?;
        let single_bits = a == Element::B1;
        let whole = counts == single_bits && (multiply != Multiply::Product) == single_bits;
        if d != c || !whole || (rounding && sum != Sum::F64) || !shape.is_of_mma(a) {
            return Err(self.unsupported());
        }
        self.product(Family::Mma, shape, (a, b), (sum, sum), (multiply, saturate))
    }

    /// A product of types that belong together; its operands.
    fn product(
        &mut self,
        family: Family,
        shape: Shape,
        (a_element, b_element): (Element, Element),
        (d_sum, c_sum): (Sum, Sum),
        (multiply, saturate): (Multiply, bool),
    ) -> Lowered<()> {
        let same = a_element == b_element
            || a_element.is_tiny() && b_element.is_tiny()
            || a_element.is_integer() && a_element.per_register() == b_element.per_register();
        let fits = |sum| match sum {
            Sum::F32 => !a_element.is_integer() && a_element != Element::F64,
            Sum::F16 => a_element == Element::F16,
            Sum::F64 => a_element == Element::F64,
            Sum::S32 => a_element.is_integer(),
        };
        if !same || !fits(d_sum) || !fits(c_sum) || (saturate && d_sum != Sum::S32) {
            return Err(self.unsupported());
        }
        self.modifiers.clear();
        let Shape(rows, columns, depth) = shape;
        let [d, a, b, c] = self.operands()?;
        let mut product = MatrixProduct {
            a_fragment: Fragment::factor(family, a_element, rows, depth),
            b_fragment: Fragment::factor(family, b_element, columns, depth),
            c_fragment: Fragment::sum(family, c_sum, rows, columns),
            d_fragment: Fragment::sum(family, d_sum, rows, columns),
            a_element,
            b_element,
            c_sum,
            d_sum,
            multiply,
            saturate,
            a: [NONE; MOST_REGISTERS],
            b: [NONE; MOST_REGISTERS],
            c: [NONE; MOST_REGISTERS],
            d: [NONE; MOST_REGISTERS],
        };
        let ty = |fragment: &Fragment| if fragment.wide { Type::F64 } else { Type::B32 };
        product.a = self.sources(a, product.a_fragment.registers, ty(&product.a_fragment))?;
        product.b = self.sources(b, product.b_fragment.registers, ty(&product.b_fragment))?;
        product.c = self.sources(c, product.c_fragment.registers, ty(&product.c_fragment))?;
        product.d = self.targets(d, product.d_fragment.registers, ty(&product.d_fragment))?;
        self.code.products.push(product);
        self.emit(Op::MultiplyMatrices(self.code.products.len() as u32 - 1));
        Ok(())
    }

    pub(super) fn wmma(&mut self) -> Lowered<()> {
        if self.has("mma") {
            return self.wmma_multiply();
        }
        let stores = self.has("store");
        if !stores && !self.has("load") {
            return Err(self.unsupported());
        }
        let sides = if stores { &["d"][..] } else { &["a", "b", "c"] };
        let side = sides.iter().copied().find(|side| self.has(side));
        let known = self.has("sync") && self.has("aligned");
        let side = side.filter(|_| known).ok_or_else(|| self.unsupported())?;
        let by_rows = self.has("row");
        if !by_rows && !self.has("col") {
            return Err(self.unsupported());
        }
        let shape = self.shape()?;
        let space = self.find(space).unwrap_or(Space::Generic);
        if !matches!(space, Space::Generic | Space::Shared | Space::Global) {
            return Err(self.unsupported());
        }
        let &[ty] = &self.modifiers[..] else { return Err(self.unsupported()) };
        let fragment = self.fragment(side, shape, ty)?;
        self.modifiers.clear();
        let operands = self.current.map_or(&[][..], |current| &current.operands);
        let (first, second, stride) = match operands {
            [first, second] => (first, second, None),
            [first, second, stride] => (first, second, Some(stride)),
            _ => return Err(self.position.mistyped("expected 2 or 3 operands")),
        };
        let (address, values) = if stores { (first, second) } else { (second, first) };
        let size = if fragment.wide { 8 } else { 4 / fragment.per_register };
        let place = self.place(space, address, size)?;
        // B is seen by its columns.
        let lies_by_rows = by_rows != (side == "b");
        let stride = match stride {
            Some(stride) => self.src(stride, Type::U32)?,
            None if lies_by_rows => self.constant(fragment.columns as u64),
            None => self.constant(fragment.rows as u64),
        };
        let ty = if fragment.wide { Type::F64 } else { Type::B32 };
        let registers = if stores {
            self.sources(values, fragment.registers, ty)?
        } else {
            self.targets(values, fragment.registers, ty)?
        };
        let by_rows = lies_by_rows;
        self.code.fragments.push(FragmentMove { place, fragment, by_rows, stride, registers });
        let index = self.code.fragments.len() as u32 - 1;
        self.emit(if stores { Op::StoreFragment(index) } else { Op::LoadFragment(index) });
        Ok(())
    }

    /// The fragment of a side of a product: A, B, or C and D.
    fn fragment(&self, side: &str, shape: Shape, ty: &str) -> Lowered<Fragment> {
        let Shape(rows, columns, depth) = shape;
        if matches!(side, "a" | "b") {
            let element = Element::parse(ty).filter(|element| shape.is_of_wmma(*element));
            let element = element.ok_or_else(|| self.unsupported())?;
            let rows = if side == "a" { rows } else { columns };
            return Ok(Fragment::factor(Family::Wmma, element, rows, depth));
        }
        let sum = Sum::parse(ty).ok_or_else(|| self.unsupported())?;
        let factors: &[Element] = match sum {
            Sum::F32 => &[Element::F16, Element::Bf16, Element::Tf32],
            Sum::F16 => &[Element::F16],
            Sum::F64 => &[Element::F64],
            Sum::S32 => &[Element::S8],
        };
        if !factors.iter().any(|element| shape.is_of_wmma(*element)) {
            return Err(self.unsupported());
        }
        Ok(Fragment::sum(Family::Wmma, sum, rows, columns))
    }

    fn wmma_multiply(&mut self) -> Lowered<()> {
        let known = self.has("sync") && self.has("aligned");
        // The layouts say how the factors lay in memory, which does not matter any more.
        let layouts = [0; 2].map(|_| self.has("row") || self.has("col"));
        if !known || layouts.contains(&false) {
            return Err(self.unsupported());
        }
        let shape = self.shape()?;
        let saturate = self.has("satfinite");
        let rounding = self.has("rn");
        let (d, a, b, c) = match self.modifiers[..] {
            [d, c] => (d, "f16", "f16", c),
            [d, a, b, c] => (d, a, b, c),
            _ => return Err(self.unsupported()),
        };
        let types = Element::parse(a).zip(Element::parse(b)).zip(Sum::parse(d).zip(Sum::parse(c)));
        let ((a, b), sums) = types.ok_or_else(|| self.unsupported())?;
        if !shape.is_of_wmma(a) || (rounding && a != Element::F64) {
            return Err(self.unsupported());
        }
        self.product(Family::Wmma, shape, (a, b), sums, (Multiply::Product, saturate))
    }
}
