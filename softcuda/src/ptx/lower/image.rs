//! Textures and surfaces.

use super::memory::{atomic_op, ignorable};
use super::{Location, Lower, Lowered};
use crate::ptx::ast::{Base, Operand, Space, Type};
use crate::ptx::code::{
    AtomicType, Detail, Fetch, FetchResult, ImageAccess, ImageAction, ImagePlace, ImageQuery, NONE,
    Op, Reg, Src, SurfaceAccess, SurfaceAction, SurfaceEdge,
};

/// The shape that an instruction takes an image for.
#[derive(Clone, Copy)]
struct Geometry {
    dimensions: u8,
    layered: bool,
    cube: bool,
}

fn geometry(name: &str) -> Option<Geometry> {
    let (dimensions, layered, cube) = match name {
        "1d" => (1, false, false),
        "2d" => (2, false, false),
        "3d" => (3, false, false),
        "a1d" => (1, true, false),
        "a2d" => (2, true, false),
        "cube" => (3, false, true),
        "acube" => (3, true, true),
        _ => return None,
    };
    Some(Geometry { dimensions, layered, cube })
}

fn count(name: &str) -> Option<u8> {
    match name {
        "v2" => Some(2),
        "v4" => Some(4),
        _ => None,
    }
}

impl<'a> Lower<'_, 'a> {
    fn push_image(&mut self, handle: Src, action: ImageAction) {
        self.code.images.push(ImageAccess { handle, action });
        self.emit(Op::Image(self.code.images.len() as u32 - 1));
    }

    /// The handle that a base means: what is in a register or a parameter, or the address of a
    /// module's variable.
    fn image_handle(&mut self, base: Base<'a>) -> Lowered<Src> {
        match base {
            Base::Register(register) => self.typed(register, Type::B64),
            Base::Absolute => Err(self.position.mistyped("expected a texture or a surface")),
            _ => match self.locate(base)? {
                Location::Global(_) => self.address_of(base, 0, false),
                Location::Param(_) => {
                    let place = self.place(Space::Param, &Operand::Address(base, 0), 8)?;
                    let to = self.temporary(Type::B64);
                    let registers = [to, NONE, NONE, NONE];
                    self.emit(Op::Load { place, signed: false, count: 1, to: registers });
                    Ok(to)
                }
                _ => Err(self.position.mistyped("expected a texture or a surface")),
            },
        }
    }

    fn image_operand(&mut self, operand: &Operand<'a>) -> Lowered<(Src, Vec<Operand<'a>>)> {
        match operand {
            Operand::Image(base, None, at) => Ok((self.image_handle(*base)?, at.clone())),
            Operand::Image(..) => Err(self.position.unsupported("texture with a separate sampler")),
            _ => Err(self.position.mistyped("expected a texture or surface and coordinates")),
        }
    }

    /// Up to three values of a vector; those that are not there are zero.
    fn components(&mut self, given: &[Operand<'a>], least: usize, ty: Type) -> Lowered<[Src; 3]> {
        if given.len() < least {
            return Err(self.position.mistyped("too few coordinates"));
        }
        let mut found = [self.constant(0); 3];
        for (slot, operand) in found.iter_mut().zip(given.iter().take(least)) {
            *slot = self.src(operand, ty)?;
        }
        Ok(found)
    }

    fn image_place(
        &mut self,
        shape: Geometry,
        given: &[Operand<'a>],
        ty: Type,
    ) -> Lowered<ImagePlace> {
        let mut rest = given;
        let mut layer = NONE;
        if shape.layered {
            let Some((first, others)) = given.split_first() else {
                return Err(self.position.mistyped("expected a layer"));
            };
            layer = self.src(first, Type::U32)?;
            rest = others;
        }
        let at = self.components(rest, usize::from(shape.dimensions), ty)?;
        Ok(ImagePlace { dimensions: shape.dimensions, cube: shape.cube, layer, at })
    }

    /// A vector, or one value alone.
    fn vector(operand: &Operand<'a>) -> Vec<Operand<'a>> {
        match operand {
            Operand::Vector(parts) => parts.clone(),
            other => vec![other.clone()],
        }
    }

    pub(super) fn fetch(&mut self) -> Lowered<()> {
        let opcode = self.current.map_or("", |current| current.opcode);
        let coordinates = self.ty()?;
        let ty = self.ty()?;
        let shape = self.find(geometry).ok_or_else(|| self.unsupported())?;
        let count = self.find(count).ok_or_else(|| self.unsupported())?;
        self.has("base");
        let (by_level, by_gradient) = (self.has("level"), self.has("grad"));
        let gather = match opcode {
            "tld4" => Some(
                self.find(|m| "rgba".find(m).filter(|_| m.len() == 1))
                    .ok_or_else(|| self.unsupported())? as u8,
            ),
            _ => None,
        };
        let result = match (ty, count) {
            (Type::F32 | Type::S32 | Type::U32, 4) => FetchResult::Word,
            (Type::F16, 4) => FetchResult::Half,
            (Type::F16x2, 2) => FetchResult::HalfPair,
            _ => return Err(self.unsupported()),
        };
        if !matches!(coordinates, Type::F32 | Type::S32) {
            return Err(self.unsupported());
        }
        self.done()?;
        let operands = self.current.map_or(&[][..], |current| &current.operands);
        let [to, from, rest @ ..] = operands else {
            return Err(self.position.mistyped("expected a destination and a texture"));
        };
        let (handle, at) = self.image_operand(from)?;
        let place = self.image_place(shape, &at, coordinates)?;
        let dimensions = usize::from(shape.dimensions);
        let (detail, rest) = match rest {
            [level, rest @ ..] if by_level => (Detail::Level(self.src(level, coordinates)?), rest),
            [x, y, rest @ ..] if by_gradient => {
                let x = self.components(&Self::vector(x), dimensions, Type::F32)?;
                let y = self.components(&Self::vector(y), dimensions, Type::F32)?;
                (Detail::Gradient(x, y), rest)
            }
            _ if by_level || by_gradient => {
                return Err(self.position.mistyped("expected a level or gradients"));
            }
            rest => (Detail::Base, rest),
        };
        let offset = match rest {
            [] => [self.constant(0); 3],
            [Operand::Vector(parts)] => self.components(parts, dimensions, Type::S32)?,
            _ => return Err(self.position.unsupported("texture with depth comparison")),
        };
        let (to, resident) = self.fetched(to, ty, count)?;
        let integers = coordinates == Type::S32;
        self.push_image(
            handle,
            ImageAction::Fetch(Fetch {
                place,
                integers,
                detail,
                offset,
                gather,
                to,
                result,
                resident,
            }),
        );
        Ok(())
    }

    /// The registers of a fetch, and the predicate that says whether there is memory.
    fn fetched(&mut self, to: &Operand<'a>, ty: Type, count: u8) -> Lowered<([Reg; 4], Reg)> {
        let (parts, predicate) = match to {
            Operand::Vector(parts) => (parts, None),
            Operand::VectorPair(parts, predicate) => (parts, *predicate),
            _ => return Err(self.position.mistyped("expected a vector of registers")),
        };
        if parts.len() != usize::from(count) {
            return Err(self.position.mistyped("the vector does not have that many elements"));
        }
        let mut registers = [NONE; 4];
        for (slot, part) in registers.iter_mut().zip(parts) {
            if *part != Operand::Sink {
                *slot = self.to(part, ty)?;
            }
        }
        let resident = match predicate {
            Some(register) => self.typed(register, Type::Pred)?,
            None => NONE,
        };
        Ok((registers, resident))
    }

    pub(super) fn query_image(&mut self) -> Lowered<()> {
        let surface = self.current.is_some_and(|current| current.opcode == "suq");
        let ty = self.ty()?;
        let by_level = !surface && self.has("level");
        let what = self.find(|name| {
            Some(match name {
                "width" => ImageQuery::Size(0),
                "height" => ImageQuery::Size(1),
                "depth" => ImageQuery::Size(2),
                "array_size" => ImageQuery::Layers,
                "channel_data_type" => ImageQuery::DataType,
                "channel_order" => ImageQuery::Order,
                "num_mipmap_levels" if !surface => ImageQuery::Levels,
                "num_samples" if !surface => ImageQuery::Samples,
                "normalized_coords" if !surface => ImageQuery::Normalized,
                "memory_layout" if surface => ImageQuery::Layout,
                _ => return None,
            })
        });
        let what = what.ok_or_else(|| self.unsupported())?;
        if ty != Type::B32 {
            return Err(self.unsupported());
        }
        self.done()?;
        let operands = self.current.map_or(&[][..], |current| &current.operands);
        let (to, image, level) = match operands {
            [to, image] if !by_level => (to, image, None),
            [to, image, level] if by_level => (to, image, Some(level)),
            _ => return Err(self.position.mistyped("wrong number of operands")),
        };
        let Operand::Address(base, 0) = *image else {
            return Err(self.position.mistyped("expected a texture or a surface in brackets"));
        };
        let handle = self.image_handle(base)?;
        let level = match level {
            Some(level) => self.src(level, Type::S32)?,
            None => NONE,
        };
        let to = self.to(to, ty)?;
        self.push_image(handle, ImageAction::Query { to, what, level, surface });
        Ok(())
    }

    pub(super) fn surface(&mut self) -> Lowered<()> {
        let opcode = self.current.map_or("", |current| current.opcode);
        let ty = self.ty()?;
        self.modifiers.retain(|m| matches!(*m, "clamp" | "zero" | "trap") || !ignorable(m));
        let formatted = self.has("p") && opcode != "suld";
        if !formatted && !self.has("b") {
            return Err(self.unsupported());
        }
        let shape = self.find(geometry).filter(|shape| !shape.cube);
        let shape = shape.ok_or_else(|| self.unsupported())?;
        let count = self.find(count).unwrap_or(1);
        let beyond = self.find(|name| match name {
            "trap" => Some(SurfaceEdge::Trap),
            "clamp" => Some(SurfaceEdge::Clamp),
            "zero" => Some(SurfaceEdge::Zero),
            _ => None,
        });
        let beyond = beyond.unwrap_or(SurfaceEdge::Trap);
        let action = match opcode {
            "suld" => SurfaceAction::Load,
            "sust" => SurfaceAction::Store,
            _ => self.reduction(ty)?,
        };
        let plain = matches!(ty, Type::B8 | Type::B16 | Type::B32 | Type::B64);
        let word = matches!(ty, Type::B32 | Type::U32 | Type::S32 | Type::F32);
        let fits = match action {
            SurfaceAction::Reduce(..) => count == 1 && !(formatted && ty.size() != 4),
            _ if formatted => word,
            _ => plain && !(ty == Type::B64 && count == 4),
        };
        if !fits {
            return Err(self.unsupported());
        }
        self.done()?;
        let [first, second] = self.operands()?;
        let (image, values) =
            if action == SurfaceAction::Load { (second, first) } else { (first, second) };
        let (handle, at) = self.image_operand(image)?;
        let place = self.image_place(shape, &at, Type::S32)?;
        let values = Self::vector(values);
        if values.len() != usize::from(count) {
            return Err(self.position.mistyped("the vector does not have that many elements"));
        }
        let mut registers = [NONE; 4];
        for (slot, value) in registers.iter_mut().zip(&values) {
            *slot = match value {
                _ if action != SurfaceAction::Load => self.wide_src(value, ty)?,
                Operand::Register(register) => self.wide_enough(*register, ty)?,
                other => self.to(other, ty)?,
            };
        }
        let size = ty.size() as u8;
        let access =
            SurfaceAccess { place, action, beyond, size, count, values: registers, formatted };
        self.push_image(handle, ImageAction::Surface(access));
        Ok(())
    }

    fn reduction(&mut self, ty: Type) -> Lowered<SurfaceAction> {
        let op = self.find(atomic_op).ok_or_else(|| self.unsupported())?;
        let kind = match ty {
            Type::S32 | Type::S64 => AtomicType::Signed,
            Type::U32 | Type::U64 | Type::B32 | Type::B64 => AtomicType::Unsigned,
            _ => return Err(self.unsupported()),
        };
        Ok(SurfaceAction::Reduce(op, kind))
    }

    /// Whether an address is that of a texture or a surface. Samplers stand alone nowhere.
    pub(super) fn is_type(&mut self) -> Lowered<()> {
        let surface = match self.find(|name| match name {
            "texref" => Some(false),
            "surfref" => Some(true),
            _ => None,
        }) {
            Some(surface) => surface,
            None => return Err(self.unsupported()),
        };
        self.done()?;
        let [to, handle] = self.operands()?;
        let (to, handle) = (self.to(to, Type::Pred)?, self.src(handle, Type::B64)?);
        self.push_image(handle, ImageAction::Is { to, surface });
        Ok(())
    }
}
