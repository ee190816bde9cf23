//! Loads, stores, atomics and address conversions.

use super::{Location, Lower, Lowered};
use crate::ptx::ast::{Base, Operand, Space, Type};
use crate::ptx::code::{
    AtomicOp, AtomicType, LOCAL_WINDOW, NONE, Op, PARAM_WINDOW, Place, SHARED_WINDOW, Src,
    WINDOW_MASK,
};
use crate::ptx::kernels::int;

pub(super) fn space(modifier: &str) -> Option<Space> {
    Some(match modifier {
        "global" => Space::Global,
        "const" => Space::Const,
        // Addresses say which block of the cluster they are in.
        "shared" | "shared::cta" | "shared::cluster" => Space::Shared,
        "local" => Space::Local,
        "param" | "param::entry" | "param::func" => Space::Param,
        _ => return None,
    })
}

/// Modifiers about ordering and caching: every access is coherent and every read-modify-write
/// is ordered; what else there is to ordering, [`Lower::ordered`] says.
pub(super) fn ignorable(modifier: &str) -> bool {
    matches!(
        modifier,
        "weak"
            | "relaxed"
            | "acquire"
            | "release"
            | "acq_rel"
            | "volatile"
            | "sc"
            | "mmio"
            | "cta"
            | "cluster"
            | "gpu"
            | "sys"
            | "ca"
            | "cg"
            | "cs"
            | "cv"
            | "lu"
            | "wb"
            | "wt"
            | "nc"
            | "noftz"
            | "unified"
    ) || modifier.starts_with("L1::")
        || modifier.starts_with("L2::")
}

impl<'a> Lower<'_, 'a> {
    pub(super) fn memory(&mut self, opcode: &str) -> Lowered<()> {
        match opcode {
            "cvta" => self.cvta(),
            "isspacep" => self.isspacep(),
            "atom" | "red" => self.atomic(opcode == "atom"),
            _ => self.access(opcode == "st"),
        }
    }

    pub(super) fn place(
        &mut self,
        space: Space,
        operand: &Operand<'a>,
        size: usize,
    ) -> Lowered<Place> {
        let Operand::Address(base, offset) = *operand else {
            return Err(self.position.mistyped("expected an address in brackets"));
        };
        let mut place =
            Place { space, base: 0, offset, narrow: false, frame: false, size: size as u8 };
        match base {
            Base::Register(register) => {
                place.base = register;
                match self.types[register as usize].size() {
                    8 => {}
                    4 => place.narrow = true,
                    _ => return Err(self.position.mistyped("an address is 32 or 64 bits wide")),
                }
                if space == Space::Param {
                    place.space = self.param_space();
                }
            }
            Base::Absolute => place.base = self.constant(0),
            Base::Variable(_) | Base::Name(_) => {
                if let Base::Name(name) = base
                    && self.names.functions.contains_key(name)
                {
                    return Err(self.position.mistyped("a function is not a variable"));
                }
                match self.locate(base)? {
                    Location::Frame(at) => {
                        place.space = Space::Local;
                        place.frame = true;
                        place.offset = place.offset.wrapping_add(i64::from(at));
                        place.base = self.constant(0);
                    }
                    Location::Param(at) => {
                        place.space = Space::Param;
                        place.offset = place.offset.wrapping_add(i64::from(at));
                        place.base = self.constant(0);
                    }
                    Location::Shared(at) => {
                        place.space = Space::Shared;
                        place.offset = place.offset.wrapping_add(i64::from(at));
                        place.base = self.constant(0);
                    }
                    Location::Dynamic(_) => {
                        place.space = Space::Shared;
                        place.base = self.address_of(base, 0, false)?;
                    }
                    Location::Global(_) => {
                        place.space = Space::Global;
                        place.base = self.address_of(base, 0, false)?;
                    }
                }
            }
        }
        Ok(place)
    }

    /// Whether an access orders others.
    fn ordered(&self) -> bool {
        self.modifiers.iter().any(|m| matches!(*m, "acquire" | "release" | "acq_rel" | "sc"))
    }

    /// Takes the ordering, caching and state space modifiers.
    pub(super) fn qualifiers(&mut self) -> Space {
        self.modifiers.retain(|modifier| !ignorable(modifier));
        self.find(space).unwrap_or(Space::Generic)
    }

    fn access(&mut self, stores: bool) -> Lowered<()> {
        let ty = self.ty()?;
        if ty.size() > 8 || ty == Type::Pred {
            return Err(self.unsupported());
        }
        let ordered = self.ordered();
        let space = self.qualifiers();
        let count = self.find(|m| match m {
            "v2" => Some(2),
            "v4" => Some(4),
            _ => None,
        });
        self.done()?;
        let current = self.current.map_or(&[][..], |current| &current.operands);
        // A cache policy may follow; it is a hint.
        let (first, second) = match current {
            [first, second] | [first, second, _] => (first, second),
            _ => return Err(self.position.mistyped("expected 2 operands")),
        };
        let (values, address) = if stores { (second, first) } else { (first, second) };
        let values = match (count, values) {
            (Some(count), Operand::Vector(values)) if values.len() == count => &values[..],
            (None, Operand::Vector(values)) if values.len() == 1 => &values[..],
            (None, Operand::Vector(_)) | (Some(_), _) => {
                return Err(self.position.mistyped("the vector does not have that many elements"));
            }
            (None, value) => std::slice::from_ref(value),
        };
        let place = self.place(space, address, ty.size())?;
        let mut registers = [NONE; 4];
        for (slot, value) in registers.iter_mut().zip(values) {
            *slot = match value {
                _ if stores => self.wide_src(value, ty)?,
                Operand::Register(register) => self.wide_enough(*register, ty)?,
                other => self.to(other, ty)?,
            };
        }
        let count = values.len() as u8;
        if stores && ordered {
            self.emit(Op::Fence);
        }
        self.emit(if stores {
            Op::Store { place, count, from: registers }
        } else {
            Op::Load { place, signed: ty.is_signed(), count, to: registers }
        });
        if !stores && ordered {
            self.emit(Op::Fence);
        }
        Ok(())
    }

    fn cvta(&mut self) -> Lowered<()> {
        let ty = self.ty()?;
        let to_space = self.has("to");
        let space = self.find(space).ok_or_else(|| self.unsupported())?;
        self.done()?;
        let [to, from] = self.operands()?;
        let to = self.to(to, ty)?;
        if let Operand::Symbol(base, offset) = from {
            let from = self.address_of(*base, *offset, !to_space)?;
            self.emit(Op::Copy(to, from));
            return Ok(());
        }
        let from = self.src(from, ty)?;
        let window = match space {
            Space::Shared => SHARED_WINDOW,
            Space::Local => LOCAL_WINDOW,
            Space::Param if self.function.is_entry => PARAM_WINDOW,
            Space::Param => LOCAL_WINDOW,
            _ => {
                self.emit(Op::Copy(to, from));
                return Ok(());
            }
        };
        let (name, constant) = if to_space { ("and", !WINDOW_MASK) } else { ("or", window) };
        let constant = self.constant(constant);
        self.map2(int::binary(name, Type::B64), to, from, constant)
    }

    fn isspacep(&mut self) -> Lowered<()> {
        use crate::ptx::kernels::compare::comparison;
        let space = self.find(space).ok_or_else(|| self.unsupported())?;
        self.done()?;
        let [to, from] = self.operands()?;
        let (to, from) = (self.to(to, Type::Pred)?, self.src(from, Type::B64)?);
        let window = match space {
            Space::Shared => SHARED_WINDOW,
            Space::Local => LOCAL_WINDOW,
            Space::Param => PARAM_WINDOW,
            Space::Global => 0,
            _ => return Err(self.unsupported()),
        };
        let (mask, window) = (self.constant(WINDOW_MASK), self.constant(window));
        let top = self.temporary(Type::B64);
        self.map2(int::binary("and", Type::B64), top, from, mask)?;
        self.map2(comparison("eq", Type::B64, false), to, top, window)
    }

    /// `createpolicy`: a hint on caching, which means nothing here.
    pub(super) fn cache_policy(&mut self) -> Lowered<()> {
        let known = ["fractional", "range", "cvt"].into_iter().any(|kind| self.has(kind));
        self.has("L2");
        self.modifiers.retain(|modifier| !ignorable(modifier));
        self.find(space);
        if !known || self.ty()? != Type::B64 {
            return Err(self.unsupported());
        }
        self.done()?;
        let operands = self.current.map_or(&[][..], |current| &current.operands);
        let [to, ..] = operands else {
            return Err(self.position.mistyped("expected a destination register"));
        };
        let (to, none) = (self.to(to, Type::B64)?, self.constant(0));
        self.emit(Op::Copy(to, none));
        Ok(())
    }

    fn atomic(&mut self, returns: bool) -> Lowered<()> {
        let ty = self.ty()?;
        let space = self.qualifiers();
        let op = self.find(atomic_op).ok_or_else(|| self.unsupported())?;
        self.done()?;
        let kind = match ty {
            Type::F32 | Type::F64 => AtomicType::Float,
            Type::F16 => AtomicType::Half,
            Type::F16x2 => AtomicType::Half2,
            Type::Bf16 => AtomicType::Bfloat,
            Type::Bf16x2 => AtomicType::Bfloat2,
            Type::S32 | Type::S64 => AtomicType::Signed,
            Type::B16 | Type::B32 | Type::U32 | Type::B64 | Type::U64 => AtomicType::Unsigned,
            _ => return Err(self.unsupported()),
        };
        let bitwise = matches!(op, AtomicOp::Exchange | AtomicOp::CompareExchange);
        let small = ty.size() == 2 && !(ty.is_float() || bitwise);
        if small || (ty.is_float() && !bitwise && op != AtomicOp::Add) {
            return Err(self.unsupported());
        }
        let current = self.current.map_or(&[][..], |current| &current.operands);
        let (to, rest) = match current {
            [to, rest @ ..] if returns => (Some(to), rest),
            rest => (None, rest),
        };
        let third = op == AtomicOp::CompareExchange;
        let (address, b, c): (_, _, Option<&Operand<'a>>) = match rest {
            [address, b, c] | [address, b, c, _] if third => (address, b, Some(c)),
            [address, b] | [address, b, _] if !third => (address, b, None),
            _ => return Err(self.position.mistyped("wrong number of operands")),
        };
        let place = self.place(space, address, ty.size())?;
        let b: Src = self.src(b, ty)?;
        let c = match c {
            Some(c) => self.src(c, ty)?,
            None => b,
        };
        let to = match to {
            Some(Operand::Sink) | None => NONE,
            Some(to) => self.to(to, ty)?,
        };
        self.emit(Op::Atomic { place, op, ty: kind, to, b, c });
        Ok(())
    }
}

pub(super) fn atomic_op(name: &str) -> Option<AtomicOp> {
    Some(match name {
        "add" => AtomicOp::Add,
        "min" => AtomicOp::Min,
        "max" => AtomicOp::Max,
        "inc" => AtomicOp::Inc,
        "dec" => AtomicOp::Dec,
        "and" => AtomicOp::And,
        "or" => AtomicOp::Or,
        "xor" => AtomicOp::Xor,
        "exch" => AtomicOp::Exchange,
        "cas" => AtomicOp::CompareExchange,
        _ => return None,
    })
}
