//! `multimem`: accesses to the memory of all devices of a multicast object.
//!
//! Which forms there are is what `ptxas` of CUDA 13.0 takes for `sm_90`. The forms for 8-bit numbers (`sm_100a`) are not
//! there.

use super::memory::{atomic_op, space};
use super::{Lower, Lowered};
use crate::ptx::ast::{Operand, Space, Type};
use crate::ptx::code::{AtomicOp, AtomicType, MOST_ELEMENTS, Multimem, MultimemAction, NONE, Op};

/// What the first modifier says.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Kind {
    LoadReduce,
    Store,
    Reduce,
}

/// Whether a reduction of a type is one that there is.
fn reduces(kind: Kind, op: AtomicOp, ty: Type, count: usize) -> bool {
    match op {
        AtomicOp::Add => !matches!(ty, Type::B32 | Type::B64 | Type::S64),
        AtomicOp::Min | AtomicOp::Max => match ty {
            Type::U32 | Type::S32 | Type::U64 | Type::S64 | Type::F16 | Type::Bf16 => true,
            // `ptxas` takes a single pair for `ld_reduce` only.
            Type::F16x2 | Type::Bf16x2 => kind == Kind::LoadReduce || count > 1,
            _ => false,
        },
        AtomicOp::And | AtomicOp::Or | AtomicOp::Xor => matches!(ty, Type::B32 | Type::B64),
        _ => false,
    }
}

/// Whether a vector of so many elements is one that there is: of floating-point numbers, 4, 8 or 16 bytes together.
fn is_vector(ty: Type, count: usize) -> bool {
    match ty {
        Type::F64 | Type::B32 | Type::B64 | Type::U32 | Type::U64 | Type::S32 | Type::S64 => {
            count == 1
        }
        Type::F16 | Type::Bf16 => count > 1,
        Type::F32 | Type::F16x2 | Type::Bf16x2 => count <= 4,
        _ => false,
    }
}

fn atomic_type(ty: Type) -> AtomicType {
    match ty {
        Type::F32 | Type::F64 => AtomicType::Float,
        Type::F16 => AtomicType::Half,
        Type::F16x2 => AtomicType::Half2,
        Type::Bf16 => AtomicType::Bfloat,
        Type::Bf16x2 => AtomicType::Bfloat2,
        Type::S32 | Type::S64 => AtomicType::Signed,
        _ => AtomicType::Unsigned,
    }
}

impl<'a> Lower<'_, 'a> {
    pub(super) fn multimem(&mut self) -> Lowered<()> {
        let kind = self.find(|modifier| match modifier {
            "ld_reduce" => Some(Kind::LoadReduce),
            "st" => Some(Kind::Store),
            "red" => Some(Kind::Reduce),
            _ => None,
        });
        let kind = kind.ok_or_else(|| self.unsupported())?;
        let wide = self.has("acc::f32");
        let ty = self.ty()?;
        let ordered = self.order(kind)?;
        let space = self.find(space).unwrap_or(Space::Generic);
        let op = if kind == Kind::Store { None } else { self.find(atomic_op) };
        let count = self.find(|modifier| match modifier {
            "v2" => Some(2),
            "v4" => Some(4),
            "v8" => Some(8),
            _ => None,
        });
        self.done()?;
        let elements = count.unwrap_or(1);
        let is_wide = kind == Kind::LoadReduce && op == Some(AtomicOp::Add);
        let is_wide = is_wide && ty.is_float() && !matches!(ty, Type::F32 | Type::F64);
        let action = match (kind, op) {
            (Kind::Store, _) => Some(MultimemAction::Store),
            (_, Some(op)) if !reduces(kind, op, ty, elements) => None,
            (Kind::Reduce, Some(op)) => Some(MultimemAction::Reduce(op, atomic_type(ty))),
            (_, Some(op)) => Some(MultimemAction::LoadReduce { op, ty: atomic_type(ty), wide }),
            _ => None,
        };
        let action = action.filter(|_| {
            is_vector(ty, elements)
                && matches!(space, Space::Generic | Space::Global)
                && (!wide || is_wide)
        });
        let action = action.ok_or_else(|| self.unsupported())?;
        self.multimem_of(action, space, ty, count, ordered)
    }

    /// Takes the modifiers about ordering: none, `.weak`, or an order with a scope. Whether it orders other accesses.
    fn order(&mut self, kind: Kind) -> Lowered<bool> {
        let order = self.find(|modifier| match modifier {
            "weak" if kind != Kind::Reduce => Some((false, false)),
            "relaxed" => Some((true, false)),
            "acquire" if kind == Kind::LoadReduce => Some((true, true)),
            "release" if kind != Kind::LoadReduce => Some((true, true)),
            _ => None,
        });
        let scope = self
            .find(|modifier| matches!(modifier, "cta" | "cluster" | "gpu" | "sys").then_some(()));
        let (scoped, ordered) = order.unwrap_or_default();
        if scoped == scope.is_some() { Ok(ordered) } else { Err(self.unsupported()) }
    }

    fn multimem_of(
        &mut self,
        action: MultimemAction,
        space: Space,
        ty: Type,
        count: Option<usize>,
        ordered: bool,
    ) -> Lowered<()> {
        let [first, second] = self.operands()?;
        let loads = matches!(action, MultimemAction::LoadReduce { .. });
        let (values, address) = if loads { (first, second) } else { (second, first) };
        let values = match (count, values) {
            (Some(count), Operand::Vector(values)) if values.len() == count => &values[..],
            (None, Operand::Vector(_) | Operand::Sink) | (Some(_), _) => {
                return Err(self.position.mistyped("the vector does not have that many elements"));
            }
            (None, value) => std::slice::from_ref(value),
        };
        let place = self.place(space, address, ty.size())?;
        if !matches!(place.space, Space::Generic | Space::Global) {
            return Err(self.position.mistyped("a multimem address is one of global memory"));
        }
        let mut registers = [NONE; MOST_ELEMENTS];
        for (slot, value) in registers.iter_mut().zip(values) {
            *slot = if loads { self.to(value, ty)? } else { self.src(value, ty)? };
        }
        let count = values.len() as u8;
        self.code.multimems.push(Multimem { action, place, count, registers });
        let op = Op::Multimem(self.code.multimems.len() as u32 - 1);
        if ordered && !loads {
            self.emit(Op::Fence);
        }
        self.emit(op);
        if ordered && loads {
            self.emit(Op::Fence);
        }
        Ok(())
    }
}
