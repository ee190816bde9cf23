//! What PTX leaves open: division by zero, and the bits of NaN. Softcuda does as GPUs were seen to.

use super::integers::{Int, register};
use super::table::{BRAINS, Case, HALVES, double_rows, float_rows, half_rows};

pub(crate) fn cases() -> Vec<Case> {
    let mut cases = Vec::new();
    for ty in Int::ALL {
        let rows: Vec<_> = [0, 1, 5, 1 << (ty.width - 1), u64::MAX].map(|a| [a, 0, 0]).to_vec();
        let types = [ty.register(); 4];
        let ones = ty.bits(-1);
        let name = ty.name();
        cases.push(Case::new(format!("div.{name} $0, $1, $2;"), types, &rows, move |_| ones));
        cases.push(Case::new(format!("rem.{name} $0, $1, $2;"), types, &rows, move |[a, ..]| {
            ty.bits(ty.value(a))
        }));
        if ty.signed {
            let least = ty.bits(ty.least());
            let rows = [[least, u64::MAX, 0]];
            cases.push(Case::new(format!("div.{name} $0, $1, $2;"), types, &rows, move |_| least));
            cases.push(Case::new(format!("rem.{name} $0, $1, $2;"), types, &rows, |_| 0));
        }
    }
    nans(&mut cases);
    cases
}

/// Every NaN that arithmetic makes is the same one.
fn nans(cases: &mut Vec<Case>) {
    let f32_sum = |a: u64, b: u64| f32::from_bits(a as u32) + f32::from_bits(b as u32);
    let rows = float_rows();
    cases.push(Case::new("add.f32 $0, $1, $2;", ["b32"; 4], &rows, move |[a, b, _]| {
        let sum = f32_sum(a, b);
        u64::from(if sum.is_nan() { 0x7fff_ffff } else { sum.to_bits() })
    }));
    cases.push(Case::new("add.f64 $0, $1, $2;", ["b64"; 4], &double_rows(), |[a, b, _]| {
        let sum = f64::from_bits(a) + f64::from_bits(b);
        if sum.is_nan() { 0x7fff_ffff_ffff_ffff } else { sum.to_bits() }
    }));
    let types = [register(16); 4];
    cases.push(Case::new("add.f16 $0, $1, $2;", types, &half_rows(&HALVES), |[a, b, _]| {
        let value = |bits: u64| half::f16::from_bits(bits as u16).to_f32();
        let sum = half::f16::from_f32(value(a) + value(b));
        if sum.is_nan() { 0x7fff } else { u64::from(sum.to_bits()) }
    }));
    cases.push(Case::new("mul.bf16 $0, $1, $2;", types, &half_rows(&BRAINS), |[a, b, _]| {
        let value = |bits: u64| half::bf16::from_bits(bits as u16).to_f32();
        let product = half::bf16::from_f32(value(a) * value(b));
        if product.is_nan() { 0x7fff } else { u64::from(product.to_bits()) }
    }));
}
