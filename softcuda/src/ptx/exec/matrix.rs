//! `ldmatrix` and `mma.sync`, on the fragments that the PTX ISA describes: lane `l` holds parts of
//! row `l / 4` (and of row `l / 4 + 8` of a matrix with 16 rows) of A, C and D, and of column
//! `l / 4` of B.
//!
//! Products of floating-point elements are exact, and they and the element of C are added in
//! double precision, in the order of k and C first; the sum is rounded once, to nearest even. A GPU
//! aligns all terms to the largest one and cuts off low bits before it adds them, in an order that
//! NVIDIA does not document, so its results differ in the last places.

use super::block::Room;
use super::warp::Warp;
use super::{Fault, Step};
use crate::ptx::ast::Space;
use crate::ptx::code::{Accumulator, Element, Lanes, MatrixProduct, Place, Reg, SHARED_WINDOW};
use crate::ptx::code::{Src, WINDOW_MASK};
use crate::ptx::kernels::Bits;
use half::{bf16, f16};

const ROWS: usize = 16;
const COLUMNS: usize = 8;
/// The deepest product: 32 elements of 8 bits.
const DEEPEST: usize = 32;

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
            Element::S8 | Element::U8 => self.integer(register, index).into(),
        }
    }

    fn integer(self, register: u64, index: usize) -> i32 {
        let byte = (register >> (8 * index)) as u8;
        if self == Element::S8 { i32::from(byte as i8) } else { i32::from(byte) }
    }
}

impl Warp<'_> {
    pub(super) fn load_matrix(
        &mut self,
        room: &mut Room<'_>,
        place: &Place,
        mask: u32,
        (count, transposed): (u8, bool),
        to: &[Reg; 4],
    ) -> Step<()> {
        whole_warp(mask)?;
        let addresses = self.addresses(place);
        for (matrix, &to) in to.iter().take(usize::from(count)).enumerate() {
            // Eight consecutive lanes give the addresses of a matrix's rows.
            let mut elements = [[0u64; 8]; 8];
            for (row, elements) in elements.iter_mut().enumerate() {
                let lane = 8 * matrix + row;
                let address = addresses[lane];
                if address & 15 != 0 {
                    return Err(Fault::Misaligned(address, 16));
                }
                if place.space == Space::Generic && address & WINDOW_MASK != SHARED_WINDOW {
                    return Err(Fault::Illegal(address));
                }
                for (column, element) in elements.iter_mut().enumerate() {
                    let address = address + 2 * column as u64;
                    *element = self.peek(room, place.space, lane, address, 2)?;
                }
            }
            let to = self.lanes_mut(to);
            for (lane, to) in to.iter_mut().enumerate() {
                let (row, column) = (lane / 4, lane % 4 * 2);
                let pair = if transposed {
                    [elements[column][row], elements[column + 1][row]]
                } else {
                    [elements[row][column], elements[row][column + 1]]
                };
                *to = pair[0] | pair[1] << 16;
            }
        }
        Ok(())
    }

    pub(super) fn multiply_matrices(&mut self, product: &MatrixProduct, mask: u32) -> Step<()> {
        whole_warp(mask)?;
        match product.sum {
            Accumulator::S32 { saturate } => {
                let (a, b) = self.factors(product, Element::integer);
                self.sums(product, |row, column, depth, c| {
                    let terms = (0..depth).map(|k| i64::from(a[row][k]) * i64::from(b[column][k]));
                    let sum = i64::from(c as i32) + terms.sum::<i64>();
                    let wrapped = sum as i32;
                    let clamped = sum.clamp(i32::MIN.into(), i32::MAX.into()) as i32;
                    u64::from(if saturate { clamped } else { wrapped } as u32)
                });
            }
            Accumulator::F32 | Accumulator::F16 => {
                let (a, b) = self.factors(product, Element::float);
                let half = product.sum == Accumulator::F16;
                self.sums(product, |row, column, depth, c| {
                    let c = if half {
                        f16::from_bits(c as u16).to_f64()
                    } else {
                        f64::from(f32::from_bits(c as u32))
                    };
                    let sum = (0..depth).fold(c, |sum, k| sum + a[row][k] * b[column][k]);
                    match half {
                        true if sum.is_nan() => 0x7fff,
                        true => u64::from(f16::from_f64(sum).to_bits()),
                        false => (sum as f32).bits(),
                    }
                });
            }
        }
        Ok(())
    }

    /// The rows of A and the columns of B.
    #[allow(clippy::type_complexity)]
    fn factors<T: Copy + Default>(
        &self,
        product: &MatrixProduct,
        element: fn(Element, u64, usize) -> T,
    ) -> ([[T; DEEPEST]; ROWS], [[T; DEEPEST]; COLUMNS]) {
        let mut a = [[T::default(); DEEPEST]; ROWS];
        let mut b = [[T::default(); DEEPEST]; COLUMNS];
        let per_register = product.a_element.per_register();
        for register in 0..usize::from(product.b_registers) {
            for index in 0..per_register {
                let read = |ty, source: Src, lane: usize| {
                    let lanes: &Lanes = self.lanes(source);
                    element(ty, lanes[lane], index)
                };
                for lane in 0..32 {
                    let k = per_register * (4 * register + lane % 4) + index;
                    let (low, high) = (product.a[2 * register], product.a[2 * register + 1]);
                    a[lane / 4][k] = read(product.a_element, low, lane);
                    a[lane / 4 + 8][k] = read(product.a_element, high, lane);
                    b[lane / 4][k] = read(product.b_element, product.b[register], lane);
                }
            }
        }
        (a, b)
    }

    /// Computes every element of D from its row, its column, the depth and the element of C.
    fn sums(&mut self, product: &MatrixProduct, sum: impl Fn(usize, usize, usize, u64) -> u64) {
        let depth = 4 * product.a_element.per_register() * usize::from(product.b_registers);
        let packed = product.sum == Accumulator::F16;
        let mut results = [[0; 32]; 4];
        for part in 0..4 {
            let (register, shift) = if packed { (part / 2, 16 * (part % 2)) } else { (part, 0) };
            for (lane, result) in results[register].iter_mut().enumerate() {
                let (row, column) = (lane / 4 + part / 2 * 8, lane % 4 * 2 + part % 2);
                let c = self.lanes(product.c[register])[lane] >> shift;
                let c = if packed { c & 0xffff } else { c };
                *result |= sum(row, column, depth, c) << shift;
            }
        }
        let registers = if packed { 2 } else { 4 };
        for (&to, result) in product.d.iter().zip(&results).take(registers) {
            *self.lanes_mut(to) = *result;
        }
    }
}
