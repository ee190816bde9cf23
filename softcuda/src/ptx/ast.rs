//! The parsed form of PTX: names of registers and variables are resolved, opcodes are not.

use super::diagnostic::Position;
use std::collections::HashMap;

/// A type of the PTX language.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[rustfmt::skip]
pub(crate) enum Type {
    Pred,
    B8, B16, B32, B64, B128,
    U8, U16, U32, U64,
    S8, S16, S32, S64,
    F16, F16x2, Bf16, Bf16x2, F32, F64,
}

impl Type {
    #[rustfmt::skip]
    pub(crate) fn parse(name: &str) -> Option<Type> {
        Some(match name {
            "pred" => Type::Pred,
            "b8" => Type::B8, "b16" => Type::B16, "b32" => Type::B32, "b64" => Type::B64,
            "b128" => Type::B128,
            "u8" => Type::U8, "u16" => Type::U16, "u32" => Type::U32, "u64" => Type::U64,
            "s8" => Type::S8, "s16" => Type::S16, "s32" => Type::S32, "s64" => Type::S64,
            "f16" => Type::F16, "f16x2" => Type::F16x2,
            "bf16" => Type::Bf16, "bf16x2" => Type::Bf16x2,
            "f32" => Type::F32, "f64" => Type::F64,
            _ => return None,
        })
    }

    /// Bytes of one value; a predicate counts as one.
    pub(crate) fn size(self) -> usize {
        use Type::*;
        match self {
            Pred | B8 | U8 | S8 => 1,
            B16 | U16 | S16 | F16 | Bf16 => 2,
            B32 | U32 | S32 | F32 | F16x2 | Bf16x2 => 4,
            B64 | U64 | S64 | F64 => 8,
            B128 => 16,
        }
    }

    pub(crate) fn is_signed(self) -> bool {
        matches!(self, Type::S8 | Type::S16 | Type::S32 | Type::S64)
    }

    pub(crate) fn is_float(self) -> bool {
        use Type::*;
        matches!(self, F16 | F16x2 | Bf16 | Bf16x2 | F32 | F64)
    }
}

/// Where a variable lives.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Space {
    Generic,
    Global,
    Const,
    Shared,
    Local,
    Param,
}

/// What a variable of an opaque type stands for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Reference {
    /// `.texref`.
    Texture,
    /// `.surfref`.
    Surface,
    /// `.samplerref`.
    Sampler,
}

/// A variable or a parameter.
#[derive(Debug, Clone)]
pub(crate) struct Variable<'a> {
    pub(crate) name: &'a str,
    pub(crate) position: Position,
    pub(crate) space: Space,
    pub(crate) size: usize,
    pub(crate) align: usize,
    /// `.extern .shared x[]`: sized at launch.
    pub(crate) dynamic: bool,
    /// It stands for a texture or a surface.
    pub(crate) reference: Option<Reference>,
    /// `.attribute(.managed)`.
    pub(crate) managed: bool,
    pub(crate) init: Vec<u8>,
    pub(crate) addresses: Vec<InitAddress<'a>>,
}

/// An address in an initial value.
#[derive(Debug, Clone)]
pub(crate) struct InitAddress<'a> {
    pub(crate) position: Position,
    pub(crate) offset: usize,
    pub(crate) symbol: &'a str,
    pub(crate) addend: i64,
}

/// What a name in an operand stands for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Base<'a> {
    Register(u32),
    /// An index into [`Body::variables`].
    Variable(usize),
    /// A name of module scope or a label; looked up when the function is translated.
    Name(&'a str),
    /// No base: the offset is the address.
    Absolute,
}

#[derive(Debug, Clone, PartialEq)]
pub(crate) enum Operand<'a> {
    Register(u32),
    /// `!p`.
    Not(u32),
    /// `a|p`; a sink on either side is `None`.
    Pair(Option<u32>, Option<u32>),
    /// A register with what is selected of it, such as `%r1.b0`, or with a minus.
    Part(u32, &'a str, bool),
    /// A special register such as `%tid.x`, without the `%`.
    Special(&'a str, &'a str),
    Integer(u64),
    Decimal(f64),
    Single(u32),
    Double(u64),
    /// A variable, function or label, and an offset.
    Symbol(Base<'a>, i64),
    Address(Base<'a>, i64),
    Vector(Vec<Operand<'a>>),
    /// `{a, b}|p`; a sink is `None`.
    VectorPair(Vec<Operand<'a>>, Option<u32>),
    /// `[texture, {x, y}]` or `[texture, sampler, {x, y}]`.
    Image(Base<'a>, Option<Base<'a>>, Vec<Operand<'a>>),
    List(Vec<Operand<'a>>),
    Sink,
}

#[derive(Debug)]
pub(crate) struct Instruction<'a> {
    pub(crate) position: Position,
    /// The register and whether it is negated.
    pub(crate) guard: Option<(u32, bool)>,
    pub(crate) opcode: &'a str,
    pub(crate) modifiers: Vec<&'a str>,
    pub(crate) operands: Vec<Operand<'a>>,
    pub(crate) scope: usize,
}

/// The inside of a function.
#[derive(Debug, Default)]
pub(crate) struct Body<'a> {
    /// The type of each register.
    pub(crate) registers: Vec<Type>,
    /// Return parameters, parameters, then what the body declares.
    pub(crate) variables: Vec<Variable<'a>>,
    pub(crate) instructions: Vec<Instruction<'a>>,
    /// The scope each scope lies in; the first is its own.
    pub(crate) scopes: Vec<usize>,
    pub(crate) labels: HashMap<(usize, &'a str), usize>,
    /// `.branchtargets` lists.
    pub(crate) targets: HashMap<(usize, &'a str), Vec<&'a str>>,
}

#[derive(Debug)]
pub(crate) struct Function<'a> {
    pub(crate) name: &'a str,
    pub(crate) position: Position,
    pub(crate) is_entry: bool,
    /// How many of the body's first variables are return parameters.
    pub(crate) returns: Vec<Variable<'a>>,
    pub(crate) params: Vec<Variable<'a>>,
    pub(crate) max_threads: Option<[u32; 3]>,
    pub(crate) cluster: Option<[u32; 3]>,
    /// The least of what `.maxnreg` says.
    pub(crate) max_registers: Option<u32>,
    /// Absent for a declaration.
    pub(crate) body: Option<Body<'a>>,
}

/// A parsed module.
#[derive(Debug)]
pub(crate) struct Source<'a> {
    pub(crate) version: (u32, u32),
    pub(crate) target: &'a str,
    pub(crate) variables: Vec<Variable<'a>>,
    pub(crate) functions: Vec<Function<'a>>,
}
