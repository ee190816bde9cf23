//! Function bodies.

use super::{Parsed, Parser};
use crate::ptx::ast::{Base, Body, Function, Instruction, Operand, Type};
use crate::ptx::diagnostic::DiagnosticKind;
use crate::ptx::lexer::Kind;
use std::collections::HashMap;

/// The most registers of a function.
const MOST_REGISTERS: u64 = 1 << 20;
/// The deepest nesting of scopes and of operands.
const DEEPEST: usize = 64;

/// What a scope declares.
#[derive(Default)]
struct Scope<'a> {
    id: usize,
    registers: HashMap<&'a str, u32>,
    /// `%r<8>`: prefix, first register, count.
    ranges: HashMap<&'a str, (u32, u32)>,
    variables: HashMap<&'a str, usize>,
}

struct Reader<'p, 'a> {
    parser: &'p mut Parser<'a>,
    body: Body<'a>,
    scopes: Vec<Scope<'a>>,
}

impl<'a> Parser<'a> {
    /// A body after its opening brace, to its closing brace.
    pub(super) fn body(&mut self, function: &Function<'a>) -> Parsed<Body<'a>> {
        let mut scope = Scope::default();
        let mut body = Body { scopes: vec![0], ..Body::default() };
        for variable in function.returns.iter().chain(&function.params) {
            if scope.variables.insert(variable.name, body.variables.len()).is_some() {
                let message = format!("parameter `{}` is declared twice", variable.name);
                return Err(variable.position.fault(DiagnosticKind::Redefined, message));
            }
            body.variables.push(variable.clone());
        }
        let mut reader = Reader { parser: self, body, scopes: vec![scope] };
        while !reader.scopes.is_empty() {
            reader.statement()?;
        }
        Ok(reader.body)
    }
}

impl<'a> Reader<'_, 'a> {
    fn scope(&mut self) -> &mut Scope<'a> {
        self.scopes.last_mut().expect("the loop over statements ends with the last scope")
    }

    fn statement(&mut self) -> Parsed<()> {
        let token = self.parser.peek();
        match (token.kind, token.text) {
            (Kind::Mark(b'{'), _) => {
                self.parser.at += 1;
                if self.scopes.len() >= DEEPEST {
                    return Err(token.position.limit("scopes are nested too deeply"));
                }
                let id = self.body.scopes.len();
                let outer = self.scope().id;
                self.body.scopes.push(outer);
                self.scopes.push(Scope { id, ..Scope::default() });
            }
            (Kind::Mark(b'}'), _) => {
                self.parser.at += 1;
                self.scopes.pop();
            }
            (Kind::Mark(b';'), _) => self.parser.at += 1,
            (Kind::Dot, "reg") => self.registers()?,
            (Kind::Dot, "local" | "shared" | "param" | "global" | "const") => {
                for variable in self.parser.variables(false)? {
                    let index = self.body.variables.len();
                    if self.scope().variables.insert(variable.name, index).is_some() {
                        let message = format!("variable `{}` is declared twice", variable.name);
                        return Err(variable.position.fault(DiagnosticKind::Redefined, message));
                    }
                    if matches!(token.text, "global" | "const") {
                        return Err(token.position.unsupported("global variable in a function"));
                    }
                    self.body.variables.push(variable);
                }
            }
            (Kind::Dot, "loc" | "file") => self.parser.skip_line(token.position.line),
            (Kind::Dot, "pragma") => self.parser.skip_past(b';')?,
            (Kind::Dot, other) => return Err(token.position.unsupported(format!(".{other}"))),
            (Kind::Name, name) if self.parser.ahead(1).kind == Kind::Mark(b':') => {
                self.parser.at += 2;
                self.label(name)?;
            }
            (Kind::Name, _) | (Kind::Mark(b'@'), _) => self.instruction()?,
            _ => return Err(self.parser.unexpected("an instruction")),
        }
        Ok(())
    }

    fn label(&mut self, name: &'a str) -> Parsed<()> {
        let position = self.parser.peek().position;
        let scope = self.scope().id;
        if self.parser.is_dot("branchtargets") {
            self.parser.at += 1;
            let mut targets = Vec::new();
            loop {
                targets.push(self.parser.name("a label")?.text);
                if !self.parser.eat(b',') {
                    break;
                }
            }
            self.parser.expect(b';')?;
            self.body.targets.insert((scope, name), targets);
            return Ok(());
        }
        if self.parser.is_dot("callprototype") || self.parser.is_dot("calltargets") {
            return self.parser.skip_past(b';');
        }
        let at = self.body.instructions.len();
        if self.body.labels.insert((scope, name), at).is_some() {
            let message = format!("label `{name}` is declared twice");
            return Err(position.fault(DiagnosticKind::Redefined, message));
        }
        Ok(())
    }

    fn registers(&mut self) -> Parsed<()> {
        self.parser.at += 1;
        let token = self.parser.take();
        let ty = Type::parse(token.text).filter(|_| token.kind == Kind::Dot);
        let Some(ty) = ty.filter(|&ty| ty != Type::B128) else {
            return Err(token.position.unsupported(format!(".reg .{}", token.text)));
        };
        loop {
            let name = self.parser.name("a register name")?;
            let first = self.body.registers.len() as u32;
            let count = if self.parser.eat(b'<') {
                let count = self.parser.integer()?;
                self.parser.expect(b'>')?;
                if count > MOST_REGISTERS - u64::from(first) {
                    return Err(name.position.limit("too many registers"));
                }
                self.scope().ranges.insert(name.text, (first, count as u32));
                count
            } else {
                if u64::from(first) >= MOST_REGISTERS {
                    return Err(name.position.limit("too many registers"));
                }
                self.scope().registers.insert(name.text, first);
                1
            };
            self.body.registers.extend(std::iter::repeat_n(ty, count as usize));
            if !self.parser.eat(b',') {
                break;
            }
        }
        self.parser.expect(b';')
    }

    fn register(&self, name: &str) -> Option<u32> {
        let digits = name.bytes().rev().take_while(u8::is_ascii_digit).count();
        let (prefix, number) = name.split_at(name.len() - digits);
        let plain = number == "0" || !number.starts_with('0');
        let number = number.parse::<u32>().ok().filter(|_| plain);
        self.scopes.iter().rev().find_map(|scope| {
            let single = scope.registers.get(name).copied();
            single.or_else(|| {
                let (first, count) = scope.ranges.get(prefix)?;
                number.filter(|n| n < count).map(|n| first + n)
            })
        })
    }

    fn instruction(&mut self) -> Parsed<()> {
        let mut guard = None;
        if self.parser.eat(b'@') {
            let negated = self.parser.eat(b'!');
            guard = Some((self.named_register()?, negated));
        }
        let opcode = self.parser.name("an opcode")?;
        let mut modifiers = Vec::new();
        while self.parser.peek().kind == Kind::Dot {
            modifiers.push(self.parser.take().text);
        }
        let mut operands = Vec::new();
        while !self.parser.is_mark(b';') {
            if !operands.is_empty() {
                self.parser.expect(b',')?;
            }
            let operand = self.operand(0)?;
            operands.push(operand);
        }
        self.parser.at += 1;
        let scope = self.scope().id;
        self.body.instructions.push(Instruction {
            position: opcode.position,
            guard,
            opcode: opcode.text,
            modifiers,
            operands,
            scope,
        });
        Ok(())
    }

    fn named_register(&mut self) -> Parsed<u32> {
        let token = self.parser.name("a register")?;
        self.register(token.text).ok_or_else(|| token.position.undefined(token.text))
    }

    fn base(&self, name: &'a str) -> Base<'a> {
        if let Some(register) = self.register(name) {
            return Base::Register(register);
        }
        let variable = self.scopes.iter().rev().find_map(|scope| scope.variables.get(name));
        variable.map_or(Base::Name(name), |&index| Base::Variable(index))
    }

    fn offset(&mut self) -> Parsed<i64> {
        if self.parser.eat(b'+') || self.parser.is_mark(b'-') {
            self.parser.signed()
        } else {
            Ok(0)
        }
    }

    fn group(&mut self, end: u8, depth: usize) -> Parsed<Vec<Operand<'a>>> {
        let mut members = Vec::new();
        while !self.parser.eat(end) {
            if !members.is_empty() {
                self.parser.expect(b',')?;
            }
            members.push(self.operand(depth + 1)?);
        }
        Ok(members)
    }

    fn operand(&mut self, depth: usize) -> Parsed<Operand<'a>> {
        let token = self.parser.peek();
        if depth > DEEPEST {
            return Err(token.position.limit("operands are nested too deeply"));
        }
        self.parser.at += 1;
        match token.kind {
            Kind::Mark(b'{') => {
                let members = self.group(b'}', depth)?;
                if !self.parser.eat(b'|') {
                    return Ok(Operand::Vector(members));
                }
                Ok(Operand::VectorPair(members, self.predicate()?))
            }
            Kind::Mark(b'(') => Ok(Operand::List(self.group(b')', depth)?)),
            Kind::Mark(b'[') => {
                let base = self.parser.peek();
                let operand = match base.kind {
                    Kind::Name => {
                        self.parser.at += 1;
                        let found = self.base(base.text);
                        if matches!(found, Base::Name(name) if name.starts_with('%')) {
                            return Err(base.position.undefined(base.text));
                        }
                        Operand::Address(found, self.offset()?)
                    }
                    _ => Operand::Address(Base::Absolute, self.parser.signed()?),
                };
                if self.parser.eat(b',') {
                    let Operand::Address(first, 0) = operand else {
                        return Err(base.position.unsupported("multi-part address"));
                    };
                    return self.image(first, depth);
                }
                self.parser.expect(b']')?;
                Ok(operand)
            }
            Kind::Mark(b'!') => Ok(Operand::Not(self.named_register()?)),
            Kind::Mark(b'-') => match self.parser.take().kind {
                Kind::Integer(value) => Ok(Operand::Integer(value.wrapping_neg())),
                Kind::Decimal(value) => Ok(Operand::Decimal(-value)),
                Kind::Name => {
                    self.parser.at -= 1;
                    let register = self.named_register()?;
                    Ok(Operand::Part(register, self.selector(), true))
                }
                _ => {
                    self.parser.at -= 1;
                    Err(self.parser.unexpected("a number"))
                }
            },
            Kind::Integer(value) => Ok(Operand::Integer(value)),
            Kind::Decimal(value) => Ok(Operand::Decimal(value)),
            Kind::Single(bits) => Ok(Operand::Single(bits)),
            Kind::Double(bits) => Ok(Operand::Double(bits)),
            Kind::Name => self.named(token.text),
            _ => {
                self.parser.at -= 1;
                Err(self.parser.unexpected("an operand"))
            }
        }
    }

    /// What follows the bar of a pair.
    fn predicate(&mut self) -> Parsed<Option<u32>> {
        let second = self.parser.name("a register")?;
        match second.text {
            "_" => Ok(None),
            text => {
                let register = self.register(text);
                Ok(Some(register.ok_or_else(|| second.position.undefined(text))?))
            }
        }
    }

    /// What is selected of a register; all of it is nothing.
    fn selector(&mut self) -> &'a str {
        if self.parser.peek().kind == Kind::Dot { self.parser.take().text } else { "" }
    }

    /// The address of a texture's or surface's element after the first comma.
    fn image(&mut self, first: Base<'a>, depth: usize) -> Parsed<Operand<'a>> {
        let mut sampler = None;
        if !self.parser.is_mark(b'{') && self.parser.ahead(1).kind == Kind::Mark(b',') {
            let name = self.parser.name("a sampler")?.text;
            sampler = Some(self.base(name));
            self.parser.expect(b',')?;
        }
        let coordinates = match self.operand(depth + 1)? {
            Operand::Vector(coordinates) => coordinates,
            single => vec![single],
        };
        self.parser.expect(b']')?;
        Ok(Operand::Image(first, sampler, coordinates))
    }

    fn named(&mut self, name: &'a str) -> Parsed<Operand<'a>> {
        let base = self.base(name);
        let first = match base {
            Base::Register(register) => Some(register),
            _ if name == "_" => None,
            Base::Name(_) if name == "WARP_SZ" => return Ok(Operand::Integer(32)),
            Base::Name(_) if name.starts_with('%') => {
                let dot = self.parser.peek();
                let component = if dot.kind == Kind::Dot { self.parser.take().text } else { "" };
                return Ok(Operand::Special(&name[1..], component));
            }
            _ => {
                let offset = self.offset()?;
                return Ok(Operand::Symbol(base, offset));
            }
        };
        if self.parser.eat(b'|') {
            return Ok(Operand::Pair(first, self.predicate()?));
        }
        if let Some(register) = first
            && self.parser.peek().kind == Kind::Dot
        {
            return Ok(Operand::Part(register, self.selector(), false));
        }
        Ok(first.map_or(Operand::Sink, Operand::Register))
    }
}
