//! Instructions on matrices.
//!
//! Products of floating-point elements are exact, and they and the element of C are added in
//! double precision, in the order of k and C first; the sum is rounded once, to nearest even. A GPU
//! aligns all terms to the largest one and cuts off low bits before it adds them, in an order that
//! NVIDIA does not document, so its results differ in the last places. Those of double precision
//! are added one after the other, each rounded once.

use super::block::Room;
use super::context::{Fault, Step};
use super::warp::Warp;
use crate::ptx::ast::Space;
use crate::ptx::code::{
    FragmentMove, Lanes, MatrixProduct, Multiply, Place, Reg, SHARED_WINDOW, Src, WIDTH,
    WINDOW_MASK,
};
use crate::ptx::fragment::{Element, Fragment, MOST_REGISTERS, Sum};
use crate::ptx::kernels::Bits;
use crate::ptx::kernels::tiny;
use half::{bf16, f16};

/// All lanes of a warp take part in these instructions; what a GPU does otherwise is undefined.
fn whole_warp(mask: u32) -> Step<()> {
    if mask != u32::MAX {
        return Err(Fault::Instruction("a matrix instruction in a part of a warp"));
    }
    Ok(())
}

impl Element {
    /// One element of a register, as a number. Ten bits of the fraction of `tf32` count.
    fn float(self, register: u64, index: usize) -> f64 {
        match self {
            Element::F16 => f16::from_bits((register >> (16 * index)) as u16).to_f64(),
            Element::Bf16 => bf16::from_bits((register >> (16 * index)) as u16).to_f64(),
            Element::Tf32 => f64::from(f32::from_bits(register as u32 & !0x1fff)),
            Element::F64 => f64::from_bits(register),
            Element::E4m3 => tiny::E4M3.value(register >> (8 * index)),
            Element::E5m2 => tiny::E5M2.value(register >> (8 * index)),
            _ => self.integer(register, index).into(),
        }
    }

    fn integer(self, register: u64, index: usize) -> i32 {
        let width = 32 / self.per_register();
        let bits = (register >> (width * index)) as u32;
        let unused = 32 - width as u32;
        match self {
            Element::S8 | Element::S4 => (bits << unused) as i32 >> unused,
            _ => (bits << unused >> unused) as i32,
        }
    }
}

impl Sum {
    fn value(self, bits: u64) -> f64 {
        match self {
            Sum::F16 => f16::from_bits(bits as u16).to_f64(),
            Sum::F32 => f64::from(f32::from_bits(bits as u32)),
            Sum::F64 => f64::from_bits(bits),
            Sum::S32 => f64::from(bits as i32),
        }
    }

    fn bits(self, sum: f64) -> u64 {
        match self {
            Sum::F16 if sum.is_nan() => 0x7fff,
            Sum::F16 => u64::from(f16::from_f64(sum).to_bits()),
            Sum::F32 => (sum as f32).bits(),
            Sum::F64 => sum.bits(),
            Sum::S32 => u64::from(sum as i32 as u32),
        }
    }
}

/// Where the element of a row and a column of an 8 by 8 matrix is: lane, and place in its register.
fn pair(lane: usize, part: usize) -> (usize, usize) {
    (lane / 4, lane % 4 * 2 + part)
}

impl Warp<'_> {
    /// The addresses of the rows of matrices in shared memory: eight consecutive lanes give those of
    /// one matrix.
    fn row_addresses(&self, place: &Place, count: u8) -> Step<Lanes> {
        let addresses = self.addresses(place);
        for &address in addresses.iter().take(8 * usize::from(count)) {
            if address & 15 != 0 {
                return Err(Fault::Misaligned(address, 16));
            }
            if place.space == Space::Generic && address & WINDOW_MASK != SHARED_WINDOW {
                return Err(Fault::Illegal(address));
            }
        }
        Ok(addresses)
    }

    pub(super) fn load_matrix(
        &mut self,
        room: &mut Room<'_>,
        place: &Place,
        mask: u32,
        (count, transposed): (u8, bool),
        to: &[Reg; 4],
    ) -> Step<()> {
        whole_warp(mask)?;
        let addresses = self.row_addresses(place, count)?;
        for (matrix, &to) in to.iter().take(usize::from(count)).enumerate() {
            let mut elements = [[0u64; 8]; 8];
            for (row, elements) in elements.iter_mut().enumerate() {
                let lane = 8 * matrix + row;
                for (column, element) in elements.iter_mut().enumerate() {
                    let address = addresses[lane] + 2 * column as u64;
                    *element = self.peek(room, place.space, lane, address, 2)?;
                }
            }
            for (lane, to) in self.lanes_mut(to).iter_mut().enumerate() {
                let [low, high] = [0, 1].map(|part| {
                    let (row, column) = pair(lane, part);
                    if transposed { elements[column][row] } else { elements[row][column] }
                });
                *to = low | high << 16;
            }
        }
        Ok(())
    }

    pub(super) fn store_matrix(
        &mut self,
        room: &mut Room<'_>,
        place: &Place,
        mask: u32,
        (count, transposed): (u8, bool),
        from: &[Src; 4],
    ) -> Step<()> {
        whole_warp(mask)?;
        let addresses = self.row_addresses(place, count)?;
        for (matrix, &from) in from.iter().take(usize::from(count)).enumerate() {
            let values = *self.lanes(from);
            for (lane, value) in values.into_iter().enumerate() {
                for part in 0..2 {
                    let (row, column) = pair(lane, part);
                    let (row, column) = if transposed { (column, row) } else { (row, column) };
                    let pointer = 8 * matrix + row;
                    let address = addresses[pointer] + 2 * column as u64;
                    let value = value >> (16 * part) & 0xffff;
                    self.poke(room, place.space, pointer, (address, 2), value)?;
                }
            }
        }
        Ok(())
    }

    pub(super) fn transpose_matrix(&mut self, to: Reg, from: Src, mask: u32) -> Step<()> {
        whole_warp(mask)?;
        let values = *self.lanes(from);
        let element = |row: usize, column: usize| {
            values[4 * row + column / 2] >> (16 * (column % 2)) & 0xffff
        };
        for (lane, to) in self.lanes_mut(to).iter_mut().enumerate() {
            let [low, high] = [0, 1].map(|part| {
                let (row, column) = pair(lane, part);
                element(column, row)
            });
            *to = low | high << 16;
        }
        Ok(())
    }

    /// The address of an element that a lane of `wmma.load` or `wmma.store` holds.
    fn element_address(&self, moved: &FragmentMove, start: u64, lane: usize, index: usize) -> u64 {
        let (row, column) = moved.fragment.place(lane, index);
        let (major, minor) = if moved.by_rows { (row, column) } else { (column, row) };
        let stride = self.lanes(moved.stride)[lane] & 0xffff_ffff;
        let at = (major as u64).wrapping_mul(stride).wrapping_add(minor as u64);
        start.wrapping_add(at.wrapping_mul(u64::from(moved.place.size)))
    }

    pub(super) fn load_fragment(
        &mut self,
        room: &mut Room<'_>,
        moved: &FragmentMove,
        mask: u32,
    ) -> Step<()> {
        whole_warp(mask)?;
        let starts = self.addresses(&moved.place);
        let (size, per_register) = (moved.place.size, moved.fragment.per_register);
        for register in 0..moved.fragment.registers {
            let mut values = [0; WIDTH];
            for (lane, value) in values.iter_mut().enumerate() {
                for part in 0..per_register {
                    let index = register * per_register + part;
                    let address = self.element_address(moved, starts[lane], lane, index);
                    let element = self.peek(room, moved.place.space, lane, address, size)?;
                    *value |= element << (8 * usize::from(size) * part);
                }
            }
            *self.lanes_mut(moved.registers[register]) = values;
        }
        Ok(())
    }

    pub(super) fn store_fragment(
        &mut self,
        room: &mut Room<'_>,
        moved: &FragmentMove,
        mask: u32,
    ) -> Step<()> {
        whole_warp(mask)?;
        let starts = self.addresses(&moved.place);
        let (size, per_register) = (moved.place.size, moved.fragment.per_register);
        for register in 0..moved.fragment.registers {
            let values = *self.lanes(moved.registers[register]);
            for (lane, value) in values.iter().enumerate() {
                for part in 0..per_register {
                    let index = register * per_register + part;
                    let address = self.element_address(moved, starts[lane], lane, index);
                    let element = value >> (8 * usize::from(size) * part);
                    self.poke(room, moved.place.space, lane, (address, size), element)?;
                }
            }
        }
        Ok(())
    }

    pub(super) fn multiply_matrices(&mut self, product: &MatrixProduct, mask: u32) -> Step<()> {
        whole_warp(mask)?;
        if product.d_sum == Sum::S32 {
            let (a, b) = self.factors(product, Element::integer);
            let multiply = |a: i32, b: i32| match product.multiply {
                Multiply::Product => i64::from(a) * i64::from(b),
                Multiply::And => i64::from(a & b),
                Multiply::Xor => i64::from(a ^ b),
            };
            self.sums(product, |row, column, c| {
                let terms = a.row(row).iter().zip(b.row(column)).map(|(a, b)| multiply(*a, *b));
                let sum = i64::from(c as i32) + terms.sum::<i64>();
                let wrapped = sum as i32;
                let clamped = sum.clamp(i32::MIN.into(), i32::MAX.into()) as i32;
                u64::from(if product.saturate { clamped } else { wrapped } as u32)
            });
            return Ok(());
        }
        let (a, b) = self.factors(product, Element::float);
        let rounds_each = product.d_sum == Sum::F64;
        self.sums(product, |row, column, c| {
            let terms = a.row(row).iter().zip(b.row(column));
            let sum = terms.fold(product.c_sum.value(c), |sum, (a, b)| {
                if rounds_each { a.mul_add(*b, sum) } else { sum + a * b }
            });
            product.d_sum.bits(sum)
        });
        Ok(())
    }

    /// The rows of A and the columns of B.
    fn factors<T: Copy + Default>(
        &self,
        product: &MatrixProduct,
        element: fn(Element, u64, usize) -> T,
    ) -> (Factor<T>, Factor<T>) {
        let read = |fragment: &Fragment, ty: Element, from: &[Src; MOST_REGISTERS]| {
            let mut factor = Factor::new(fragment);
            let n = fragment.per_register;
            for index in 0..fragment.elements() {
                for (lane, register) in self.lanes(from[index / n]).iter().enumerate() {
                    let (row, column) = fragment.place(lane, index);
                    factor.set(row, column, element(ty, *register, index % n));
                }
            }
            factor
        };
        let a = read(&product.a_fragment, product.a_element, &product.a);
        (a, read(&product.b_fragment, product.b_element, &product.b))
    }

    /// Computes every element of D from its row, its column and the element of C.
    fn sums(&mut self, product: &MatrixProduct, sum: impl Fn(usize, usize, u64) -> u64) {
        let mut results = [[0; WIDTH]; MOST_REGISTERS];
        let MatrixProduct { c_fragment, d_fragment, .. } = product;
        for index in 0..d_fragment.elements() {
            let from = self.lanes(product.c[index / c_fragment.per_register]);
            let to = &mut results[index / d_fragment.per_register];
            for (lane, (c, to)) in from.iter().zip(to).enumerate() {
                let (row, column) = d_fragment.place(lane, index);
                *to |= sum(row, column, c >> c_fragment.shift(index)) << d_fragment.shift(index);
            }
        }
        for (&to, result) in product.d.iter().zip(&results).take(d_fragment.registers) {
            *self.lanes_mut(to) = *result;
        }
    }
}

/// A factor of a product: A by its rows, or B by its columns.
struct Factor<T> {
    depth: usize,
    elements: Vec<T>,
}

impl<T: Copy + Default> Factor<T> {
    fn new(fragment: &Fragment) -> Factor<T> {
        let elements = vec![T::default(); fragment.rows * fragment.columns];
        Factor { depth: fragment.columns, elements }
    }

    fn set(&mut self, row: usize, column: usize, value: T) {
        self.elements[row * self.depth + column] = value;
    }

    fn row(&self, row: usize) -> &[T] {
        &self.elements[row * self.depth..][..self.depth]
    }
}
