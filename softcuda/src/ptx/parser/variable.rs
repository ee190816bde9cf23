//! Variables and their initial values.

use super::{Parsed, Parser, VariableType};
use crate::ptx::ast::{InitAddress, Reference, Space, Type, Variable};
use crate::ptx::lexer::Kind;
use half::{bf16, f16};

/// The largest variable, in bytes.
const LARGEST: usize = 1 << 40;
/// The deepest nesting of initial values.
const DEEPEST: usize = 16;

impl<'a> Parser<'a> {
    /// A variable declaration from its space to its semicolon.
    pub(super) fn variables(&mut self, is_extern: bool) -> Parsed<Vec<Variable<'a>>> {
        let token = self.take();
        let space = match token.text {
            "global" | "tex" => Space::Global,
            "const" => Space::Const,
            "shared" => Space::Shared,
            "local" => Space::Local,
            "param" => Space::Param,
            other => return Err(token.position.unsupported(format!(".{other}"))),
        };
        let first = self.at;
        let (mut ty, mut align) = self.variable_type()?;
        if token.text == "tex" {
            // The oldest form of `.global .texref`.
            (ty, align) = (VariableType { reference: Some(Reference::Texture), ..ty }, 8);
        }
        let managed = self.tokens[first..self.at].iter().any(|token| token.text == "managed");
        let mut found = Vec::new();
        loop {
            let mut variable = self.declarator(space, ty, align, is_extern)?;
            variable.managed = managed;
            if is_extern && space != Space::Shared {
                return Err(variable.position.undefined(variable.name));
            }
            found.push(variable);
            if !self.eat(b',') {
                break;
            }
        }
        self.expect(b';')?;
        Ok(found)
    }

    /// A name, its dimensions and its initial value.
    pub(super) fn declarator(
        &mut self,
        space: Space,
        ty: VariableType,
        align: usize,
        is_extern: bool,
    ) -> Parsed<Variable<'a>> {
        let name = self.name("a variable name")?;
        let element = match ty.reference {
            Some(_) => Type::U64.size(),
            None => ty.scalar.size() * ty.lanes,
        };
        let mut size = element;
        let mut open = false;
        let mut inner = element;
        let mut first = true;
        while self.eat(b'[') {
            if self.eat(b']') {
                if !first {
                    return Err(name.position.syntax("only the first dimension may be left out"));
                }
                open = true;
            } else {
                let count = usize::try_from(self.integer()?).unwrap_or(usize::MAX);
                size = size.saturating_mul(count);
                inner = inner.saturating_mul(count);
                self.expect(b']')?;
            }
            first = false;
        }
        if size > LARGEST {
            return Err(name.position.limit(format!("`{}` is too large", name.text)));
        }
        let mut variable = Variable {
            managed: false,
            name: name.text,
            position: name.position,
            space,
            size: if open { 0 } else { size },
            align,
            dynamic: open && is_extern,
            reference: ty.reference,
            init: Vec::new(),
            addresses: Vec::new(),
        };
        if ty.reference.is_some() && (self.is_mark(b'=') || size != element || open) {
            return Err(name.position.unsupported("array or initial value of an opaque type"));
        }
        if self.eat(b'=') {
            self.initial(&mut variable, ty.scalar, 0)?;
            if open {
                variable.size = variable.init.len().next_multiple_of(inner.max(1));
            } else if variable.init.len() > variable.size {
                return Err(name.position.mistyped("more initial values than elements"));
            }
            merge_masked(&mut variable)?;
        } else if open && !is_extern && space != Space::Param {
            return Err(name.position.mistyped(format!("`{}` has no size", name.text)));
        }
        Ok(variable)
    }

    fn initial(&mut self, into: &mut Variable<'a>, ty: Type, depth: usize) -> Parsed<()> {
        let token = self.peek();
        if depth > DEEPEST {
            return Err(token.position.limit("initial values are nested too deeply"));
        }
        if self.eat(b'{') {
            while !self.eat(b'}') {
                self.initial(into, ty, depth + 1)?;
                if !self.is_mark(b'}') {
                    self.expect(b',')?;
                }
            }
            return Ok(());
        }
        let negative = self.eat(b'-');
        let token = self.take();
        let size = ty.size();
        let mut bits = match token.kind {
            Kind::Name => return self.address(into, token.text, size, None),
            Kind::Integer(mask) if self.eat(b'(') => {
                let symbol = self.name("a variable name")?;
                let addend = self.addend()?;
                self.expect(b')')?;
                let offset = into.init.len();
                into.init.push(0);
                if size != 1 || mask.count_ones() != 8 {
                    return Err(token.position.unsupported("masked address in a value"));
                }
                // Until the eight bytes are merged, each holds its place in the address.
                into.init[offset] = (mask.trailing_zeros() / 8) as u8;
                into.addresses.push(InitAddress {
                    position: token.position,
                    offset: offset | MASKED,
                    symbol: symbol.text,
                    addend,
                });
                return Ok(());
            }
            Kind::Integer(value) if ty.is_float() => float_bits(value as f64, ty),
            Kind::Integer(value) if negative => value.wrapping_neg(),
            Kind::Integer(value) => value,
            Kind::Decimal(value) => float_bits(value, ty),
            Kind::Single(bits) if ty == Type::F64 => f64::from(f32::from_bits(bits)).to_bits(),
            Kind::Single(bits) => u64::from(bits),
            Kind::Double(bits) if ty == Type::F32 => {
                u64::from((f64::from_bits(bits) as f32).to_bits())
            }
            Kind::Double(bits) => bits,
            _ => {
                self.at -= 1;
                return Err(self.unexpected("an initial value"));
            }
        };
        if negative && (ty.is_float() || !matches!(token.kind, Kind::Integer(_))) {
            bits ^= 1 << (8 * size.clamp(1, 8) - 1);
        }
        let mut bytes = [0; 16];
        bytes[..8].copy_from_slice(&bits.to_le_bytes());
        into.init.extend_from_slice(&bytes[..size]);
        Ok(())
    }

    fn addend(&mut self) -> Parsed<i64> {
        if self.eat(b'+') || self.is_mark(b'-') { self.signed() } else { Ok(0) }
    }

    fn address(
        &mut self,
        into: &mut Variable<'a>,
        symbol: &'a str,
        size: usize,
        inside: Option<&'a str>,
    ) -> Parsed<()> {
        let position = self.tokens[self.at - 1].position;
        if symbol == "generic" && inside.is_none() && self.eat(b'(') {
            let inner = self.name("a variable name")?.text;
            let before = self.addend()?;
            self.expect(b')')?;
            self.address(into, inner, size, Some(inner))?;
            if let Some(last) = into.addresses.last_mut() {
                last.addend = last.addend.wrapping_add(before);
            }
            return Ok(());
        }
        let addend = self.addend()?;
        if size != 8 {
            return Err(position.unsupported("address in a value that is not 64 bits wide"));
        }
        let offset = into.init.len();
        into.init.extend_from_slice(&[0; 8]);
        into.addresses.push(InitAddress { position, offset, symbol, addend });
        Ok(())
    }
}

/// Marks the offset of a single byte of an address until [`merge_masked`].
const MASKED: usize = 1 << 62;

/// Joins eight bytes `0xFF(x), 0xFF00(x), ...` to one address.
fn merge_masked(variable: &mut Variable<'_>) -> Parsed<()> {
    let mut merged: Vec<InitAddress<'_>> = Vec::new();
    let mut pending = 0;
    for address in std::mem::take(&mut variable.addresses) {
        if address.offset & MASKED == 0 {
            merged.push(address);
            continue;
        }
        let offset = address.offset & !MASKED;
        let place = usize::from(std::mem::take(&mut variable.init[offset]));
        let continues = merged
            .last()
            .is_some_and(|last| last.symbol == address.symbol && last.offset + pending == offset);
        if place == 0 && pending == 0 {
            merged.push(InitAddress { offset, ..address });
        } else if place != pending || !continues {
            return Err(address.position.unsupported("part of an address in a value"));
        }
        pending = (place + 1) % 8;
    }
    if pending != 0 {
        return Err(variable.position.unsupported("part of an address in a value"));
    }
    variable.addresses = merged;
    Ok(())
}

/// The bits of a number as a value of a floating-point type (or of an integer, truncated).
pub(crate) fn float_bits(value: f64, ty: Type) -> u64 {
    match ty {
        Type::F32 => u64::from((value as f32).to_bits()),
        Type::F64 => value.to_bits(),
        Type::F16 => u64::from(f16::from_f64(value).to_bits()),
        Type::Bf16 => u64::from(bf16::from_f64(value).to_bits()),
        _ => value as i64 as u64,
    }
}
