//! Read-modify-write.

use super::block::Room;
use super::context::Step;
use super::memory::{Use, resolve};
use super::warp::Warp;
use crate::ptx::ast::Space;
use crate::ptx::code::{AtomicOp, AtomicType, NONE, Place, Reg, Src};
use crate::ptx::kernels::Bits;
use crate::ptx::kernels::half::{least, most};
use crate::ptx::kernels::rounding::{BF16, F16, Round, fma_odd, to_small};
use half::{bf16, f16};
use std::sync::atomic::{AtomicU16, AtomicU32, AtomicU64, Ordering};

fn add_half(a: u64, b: u64) -> u64 {
    let value = |bits| f64::from(f16::from_bits(bits as u16).to_f32());
    u64::from(to_small(fma_odd(value(a), 1.0, value(b)), F16, Round::Nearest))
}

fn add_bfloat(a: u64, b: u64) -> u64 {
    let value = |bits| f64::from(bf16::from_bits(bits as u16).to_f32());
    u64::from(to_small(fma_odd(value(a), 1.0, value(b)), BF16, Round::Nearest))
}

/// The smaller or larger of two 16-bit numbers. As for `min` and `max`, a NaN gives way, and -0 is less than 0.
fn extreme(op: AtomicOp, ty: AtomicType, a: u64, b: u64) -> u64 {
    let is_half = matches!(ty, AtomicType::Half | AtomicType::Half2);
    let value = |bits: u64| match is_half {
        true => f16::from_bits(bits as u16).to_f64(),
        false => bf16::from_bits(bits as u16).to_f64(),
    };
    let chosen = if op == AtomicOp::Min { least } else { most };
    let format = if is_half { F16 } else { BF16 };
    u64::from(to_small(chosen(value(a), value(b)), format, Round::Nearest))
}

/// The value to write; `old` is in the low `size` bytes.
pub(super) fn apply(op: AtomicOp, ty: AtomicType, size: u8, old: u64, b: u64, c: u64) -> u64 {
    let shift = 64 - 8 * u32::from(size);
    let zero_extended = |x: u64| x << shift >> shift;
    let sign_extended = |x: u64| (x << shift) as i64 >> shift;
    let (old, b) = (zero_extended(old), zero_extended(b));
    let signed = ty == AtomicType::Signed;
    let less = if signed { sign_extended(b) < sign_extended(old) } else { b < old };
    zero_extended(match (op, ty) {
        (AtomicOp::Add, AtomicType::Float) if size == 4 => (f32::of(old) + f32::of(b)).bits(),
        (AtomicOp::Add, AtomicType::Float) => (f64::of(old) + f64::of(b)).bits(),
        (AtomicOp::Add, AtomicType::Half) => add_half(old, b),
        (AtomicOp::Add, AtomicType::Half2) => add_half(old, b) | add_half(old >> 16, b >> 16) << 16,
        (AtomicOp::Add, AtomicType::Bfloat) => add_bfloat(old, b),
        (AtomicOp::Add, AtomicType::Bfloat2) => {
            add_bfloat(old, b) | add_bfloat(old >> 16, b >> 16) << 16
        }
        (AtomicOp::Add, _) => old.wrapping_add(b),
        (AtomicOp::Min | AtomicOp::Max, AtomicType::Half | AtomicType::Bfloat) => {
            extreme(op, ty, old, b)
        }
        (AtomicOp::Min | AtomicOp::Max, AtomicType::Half2 | AtomicType::Bfloat2) => {
            extreme(op, ty, old, b) | extreme(op, ty, old >> 16, b >> 16) << 16
        }
        (AtomicOp::Min, _) => {
            if less {
                b
            } else {
                old
            }
        }
        (AtomicOp::Max, _) => {
            if less {
                old
            } else {
                b
            }
        }
        (AtomicOp::Inc, _) => {
            if old >= b {
                0
            } else {
                old + 1
            }
        }
        (AtomicOp::Dec, _) => {
            if old == 0 || old > b {
                b
            } else {
                old - 1
            }
        }
        (AtomicOp::And, _) => old & b,
        (AtomicOp::Or, _) => old | b,
        (AtomicOp::Xor, _) => old ^ b,
        (AtomicOp::Exchange, _) => b,
        (AtomicOp::CompareExchange, _) => {
            if old == b {
                c
            } else {
                old
            }
        }
    })
}

/// A real atomic update; the old value.
///
/// # Safety
/// The address must be writable and aligned for the size (2, 4 or 8).
pub(super) unsafe fn update(address: u64, size: u8, mut next: impl FnMut(u64) -> u64) -> u64 {
    // SAFETY: writable and aligned by the caller's promise.
    unsafe {
        match size {
            2 => {
                let cell = AtomicU16::from_ptr(address as *mut u16);
                let order = (Ordering::AcqRel, Ordering::Relaxed);
                let step = |old| Some(next(u64::from(old)) as u16);
                u64::from(cell.fetch_update(order.0, order.1, step).unwrap_or_default())
            }
            4 => {
                let cell = AtomicU32::from_ptr(address as *mut u32);
                let step = |old| Some(next(u64::from(old)) as u32);
                let found = cell.fetch_update(Ordering::AcqRel, Ordering::Relaxed, step);
                u64::from(found.unwrap_or_default())
            }
            _ => {
                let cell = AtomicU64::from_ptr(address as *mut u64);
                let found =
                    cell.fetch_update(Ordering::AcqRel, Ordering::Relaxed, |old| Some(next(old)));
                found.unwrap_or_default()
            }
        }
    }
}

impl Warp<'_> {
    #[allow(clippy::too_many_arguments)] // the fields of one instruction
    pub(super) fn atomic(
        &mut self,
        room: &mut Room<'_>,
        place: &Place,
        mask: u32,
        op: AtomicOp,
        ty: AtomicType,
        to: Reg,
        b: Src,
        c: Src,
    ) -> Step<()> {
        let addresses = self.addresses(place);
        let (b, c) = (*self.lanes(b), *self.lanes(c));
        let size = place.size;
        let global = self.all_global(place, &addresses, mask);
        if global {
            room.mapped.check_lanes(Use::Write, &addresses, mask, usize::from(size))?;
        }
        let mut rest = mask;
        while rest != 0 {
            let lane = rest.trailing_zeros() as usize;
            rest &= rest - 1;
            let address = addresses[lane];
            let next = |old| apply(op, ty, size, old, b[lane], c[lane]);
            let old = if global {
                // SAFETY: checked to be writable and aligned.
                unsafe { update(address, size, next) }
            } else if resolve(place.space, address).0 == Space::Global {
                self.aligned(&addresses, 1 << lane, usize::from(size))?;
                room.mapped.check(Use::Write, address, usize::from(size))?;
                // SAFETY: checked to be writable and aligned.
                unsafe { update(address, size, next) }
            } else {
                let old = self.peek(room, place.space, lane, address, size)?;
                let new = next(old);
                self.poke(room, place.space, lane, (address, size), new)?;
                old
            };
            if to != NONE {
                self.lanes_mut(to)[lane] = old;
            }
        }
        Ok(())
    }
}
