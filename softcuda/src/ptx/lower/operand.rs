//! Operands: registers, constants, addresses and special registers.

use super::{Location, Lower, Lowered};
use crate::ptx::ast::{Base, Operand, Type};
use crate::ptx::code::{
    CONSTANT, FUNCTION_WINDOW, Op, PARAM_WINDOW, RESERVED_SHARED, Reg, Special, Src, WIDTH,
    WINDOW_MASK,
};
use crate::ptx::kernels::int;
use crate::ptx::parser::float_bits;

impl<'a> Lower<'_, 'a> {
    pub(super) fn temporary(&mut self, ty: Type) -> Reg {
        self.types.push(ty);
        self.types.len() as u32 - 1
    }

    /// A constant in every lane.
    pub(super) fn constant(&mut self, bits: u64) -> Src {
        let code = &mut self.code;
        *self.constants.entry(bits).or_insert_with(|| {
            code.constants.push([bits; WIDTH]);
            CONSTANT | (code.constants.len() as u32 - 1)
        })
    }

    /// A register of the width of `ty`.
    pub(super) fn typed(&self, register: u32, ty: Type) -> Lowered<Reg> {
        let found = self.types[register as usize];
        if found.size() == ty.size() && (found == Type::Pred) == (ty == Type::Pred) {
            return Ok(register);
        }
        let message = format!("a register of type {found:?} where {ty:?} is needed");
        Err(self.position.mistyped(message))
    }

    /// A register at least as wide as `ty`, as loads, stores and conversions take it.
    pub(super) fn wide_enough(&self, register: u32, ty: Type) -> Lowered<Reg> {
        let found = self.types[register as usize];
        if found.size() >= ty.size() && (found == Type::Pred) == (ty == Type::Pred) {
            return Ok(register);
        }
        let message = format!("a register of type {found:?} is too narrow for {ty:?}");
        Err(self.position.mistyped(message))
    }

    pub(super) fn to(&mut self, operand: &Operand<'a>, ty: Type) -> Lowered<Reg> {
        match operand {
            Operand::Register(register) => self.typed(*register, ty),
            Operand::Sink => Ok(self.temporary(ty)),
            _ => Err(self.position.mistyped("expected a destination register")),
        }
    }

    pub(super) fn src(&mut self, operand: &Operand<'a>, ty: Type) -> Lowered<Src> {
        if let Operand::Register(register) = operand {
            return self.typed(*register, ty);
        }
        self.value(operand, ty)
    }

    /// A source that may be wider than its type.
    pub(super) fn wide_src(&mut self, operand: &Operand<'a>, ty: Type) -> Lowered<Src> {
        if let Operand::Register(register) = operand {
            return self.wide_enough(*register, ty);
        }
        self.value(operand, ty)
    }

    fn value(&mut self, operand: &Operand<'a>, ty: Type) -> Lowered<Src> {
        let bits = match *operand {
            Operand::Integer(value) if ty.is_float() => float_bits(value as i64 as f64, ty),
            Operand::Integer(value) if ty == Type::Pred => u64::from(value != 0),
            Operand::Integer(value) => value,
            Operand::Decimal(value) => float_bits(value, ty),
            Operand::Single(bits) if ty == Type::F64 => f64::from(f32::from_bits(bits)).to_bits(),
            Operand::Single(bits) => u64::from(bits),
            Operand::Double(bits) if ty == Type::F32 => {
                u64::from((f64::from_bits(bits) as f32).to_bits())
            }
            Operand::Double(bits) => bits,
            Operand::Not(register) => {
                let register = self.typed(register, ty)?;
                let to = self.temporary(ty);
                self.map1(int::unary("not", ty), to, register)?;
                return Ok(to);
            }
            Operand::Special(name, component) => {
                let special = self.special(name, component)?;
                self.code.reserved_shared |= matches!(special, Special::ReservedShared(_));
                let to = self.temporary(ty);
                self.emit(Op::Special(to, special));
                return Ok(to);
            }
            Operand::Symbol(base, offset) => return self.address_of(base, offset, false),
            Operand::Vector(ref parts) => return self.pack(parts, ty),
            _ => return Err(self.position.mistyped("this operand cannot be a source")),
        };
        Ok(self.constant(bits))
    }

    /// A vector of registers joined to one value, the first in the low bits.
    fn pack(&mut self, parts: &[Operand<'a>], ty: Type) -> Lowered<Src> {
        let part = self.part_type(parts.len(), ty)?;
        let width = 8 * part.size() as u64;
        let to = self.temporary(ty);
        let zero = self.constant(0);
        self.emit(Op::Copy(to, zero));
        for (index, operand) in parts.iter().enumerate() {
            let source = self.src(operand, part)?;
            let wide = self.temporary(ty);
            self.map1(int::unary("extend", part), wide, source)?;
            let shift = self.constant(index as u64 * width);
            self.map2(int::binary("shl", Type::B64), wide, wide, shift)?;
            self.map2(int::binary("or", Type::B64), to, to, wide)?;
        }
        Ok(to)
    }

    fn part_type(&self, parts: usize, ty: Type) -> Lowered<Type> {
        match (parts, ty.size()) {
            (2, 8) => Ok(Type::B32),
            (2, 4) | (4, 8) => Ok(Type::B16),
            (2, 2) | (4, 4) => Ok(Type::B8),
            _ => Err(self.position.mistyped("these parts do not make up the type")),
        }
    }

    /// Splits a value over a vector of registers.
    pub(super) fn unpack(&mut self, parts: &[Operand<'a>], from: Src, ty: Type) -> Lowered<()> {
        let part = self.part_type(parts.len(), ty)?;
        let width = 8 * part.size() as u64;
        let mut moves = Vec::new();
        for (index, operand) in parts.iter().enumerate() {
            if *operand == Operand::Sink {
                continue;
            }
            let to = self.to(operand, part)?;
            let shift = self.constant(index as u64 * width);
            let shifted = self.temporary(part);
            self.map2(int::binary("shr", Type::B64), shifted, from, shift)?;
            moves.push(Op::Copy(to, shifted));
        }
        // The source may be among the targets, so it is read completely first.
        moves.into_iter().for_each(|op| self.emit(op));
        Ok(())
    }

    /// The address of a variable in its own space (or, if `generic`, as a generic address).
    pub(super) fn address_of(
        &mut self,
        base: Base<'a>,
        offset: i64,
        generic: bool,
    ) -> Lowered<Src> {
        use crate::ptx::code::{LOCAL_WINDOW, SHARED_WINDOW};
        if let Base::Register(_) | Base::Absolute = base {
            return Err(self.position.mistyped("expected a variable"));
        }
        if let Base::Name(name) = base
            && let Some(function) = self.names.functions.get(name)
        {
            let number = function.number.ok_or_else(|| self.position.undefined(name))?;
            return Ok(self.constant(FUNCTION_WINDOW + u64::from(number)));
        }
        let shared = if generic { SHARED_WINDOW as i64 } else { 0 };
        Ok(match self.locate(base)? {
            Location::Shared(at) => {
                self.constant(i64::from(at).wrapping_add(offset).wrapping_add(shared) as u64)
            }
            Location::Param(at) => self
                .constant(i64::from(at).wrapping_add(offset) as u64 & !WINDOW_MASK | PARAM_WINDOW),
            Location::Dynamic(align) => {
                let to = self.temporary(Type::B64);
                self.emit(Op::DynamicShared(to, align, offset.wrapping_add(shared)));
                to
            }
            Location::Frame(at) => {
                let to = self.temporary(Type::B64);
                let at = at.wrapping_add(offset as u32);
                self.emit(Op::FrameAddress(to, at, if generic { LOCAL_WINDOW } else { 0 }));
                to
            }
            Location::Global(index) => {
                let to = self.temporary(Type::B64);
                self.emit(Op::GlobalAddress(to, index, offset));
                to
            }
        })
    }

    fn special(&self, name: &str, component: &str) -> Lowered<Special> {
        let axis = match component {
            "x" => Some(0),
            "y" => Some(1),
            "z" => Some(2),
            _ => None,
        };
        Ok(match (name, axis) {
            ("tid", Some(axis)) => Special::Tid(axis),
            ("ntid", Some(axis)) => Special::Ntid(axis),
            ("ctaid", Some(axis)) => Special::Ctaid(axis),
            ("nctaid", Some(axis)) => Special::Nctaid(axis),
            ("clusterid", Some(axis)) => Special::ClusterId(axis),
            ("nclusterid", Some(axis)) => Special::ClusterCount(axis),
            ("cluster_ctaid", Some(axis)) => Special::BlockInCluster(axis),
            ("cluster_nctaid", Some(axis)) => Special::ClusterShape(axis),
            ("cluster_ctarank", None) => Special::ClusterRank,
            ("cluster_nctarank", None) => Special::ClusterSize,
            ("is_explicit_cluster", None) => Special::IsCluster,
            ("laneid", None) => Special::LaneId,
            ("warpid", None) => Special::WarpId,
            ("nwarpid", None) => Special::WarpCount,
            ("smid", None) => Special::SmId,
            ("nsmid", None) => Special::SmCount,
            ("gridid", None) => Special::GridId,
            ("clock" | "clock64", None) => Special::Clock,
            ("globaltimer" | "globaltimer_lo", None) => Special::GlobalTimer,
            ("lanemask_eq", None) => Special::LaneMaskEq,
            ("lanemask_le", None) => Special::LaneMaskLe,
            ("lanemask_lt", None) => Special::LaneMaskLt,
            ("lanemask_ge", None) => Special::LaneMaskGe,
            ("lanemask_gt", None) => Special::LaneMaskGt,
            ("dynamic_smem_size", None) => Special::DynamicShared,
            ("total_smem_size", None) => Special::TotalShared,
            ("reserved_smem_offset_begin" | "reserved_smem_offset_0", None) => {
                Special::ReservedShared(0)
            }
            ("reserved_smem_offset_1", None) => Special::ReservedShared(RESERVED_SHARED / 2),
            ("reserved_smem_offset_end" | "reserved_smem_offset_cap", None) => {
                Special::ReservedShared(RESERVED_SHARED)
            }
            // What the driver passes to cooperative launches: a structure of a size and the
            // barrier that all blocks meet at.
            ("envreg1", None) => Special::GridWorkspace(true),
            ("envreg2", None) => Special::GridWorkspace(false),
            _ => return Err(self.position.undefined(&format!("%{name}"))),
        })
    }
}
