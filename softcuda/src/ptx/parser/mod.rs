//! Tokens to the parsed form: modules, functions and their parameters.

mod body;
mod variable;

pub(crate) use variable::float_bits;

use super::ast::{Function, Reference, Source, Space, Type, Variable};
use super::diagnostic::{Diagnostic, DiagnosticKind};
use super::lexer::{Kind, Token, tokens};

type Parsed<T> = Result<T, Diagnostic>;

/// Parses a whole module.
pub(crate) fn parse(source: &str) -> Parsed<Source<'_>> {
    let tokens = tokens(source)?;
    let mut parser = Parser { tokens, at: 0 };
    parser.module()
}

struct Parser<'a> {
    tokens: Vec<Token<'a>>,
    at: usize,
}

impl<'a> Parser<'a> {
    fn peek(&self) -> Token<'a> {
        self.ahead(0)
    }

    /// The token `n` after the next; past the end, the end token.
    fn ahead(&self, n: usize) -> Token<'a> {
        self.tokens[(self.at + n).min(self.tokens.len() - 1)]
    }

    fn take(&mut self) -> Token<'a> {
        let token = self.peek();
        self.at += 1;
        token
    }

    fn is_mark(&self, mark: u8) -> bool {
        self.peek().kind == Kind::Mark(mark)
    }

    fn is_dot(&self, name: &str) -> bool {
        self.peek().kind == Kind::Dot && self.peek().text == name
    }

    fn eat(&mut self, mark: u8) -> bool {
        let found = self.is_mark(mark);
        if found {
            self.at += 1;
        }
        found
    }

    fn unexpected(&self, wanted: &str) -> Diagnostic {
        let token = self.peek();
        let dot = if token.kind == Kind::Dot { "." } else { "" };
        let found = match token.kind {
            Kind::End => "the end of the source".to_owned(),
            _ => format!("`{dot}{}`", token.text),
        };
        token.position.syntax(format!("expected {wanted}, found {found}"))
    }

    fn expect(&mut self, mark: u8) -> Parsed<()> {
        if self.eat(mark) {
            return Ok(());
        }
        Err(self.unexpected(&format!("`{}`", char::from(mark))))
    }

    fn name(&mut self, wanted: &str) -> Parsed<Token<'a>> {
        if self.peek().kind == Kind::Name {
            return Ok(self.take());
        }
        Err(self.unexpected(wanted))
    }

    fn integer(&mut self) -> Parsed<u64> {
        match self.peek().kind {
            Kind::Integer(value) => {
                self.at += 1;
                Ok(value)
            }
            _ => Err(self.unexpected("a number")),
        }
    }

    fn signed(&mut self) -> Parsed<i64> {
        let negative = self.eat(b'-');
        let value = self.integer()? as i64;
        Ok(if negative { value.wrapping_neg() } else { value })
    }

    /// Skips the rest of the line the last token was on: debug line directives end there.
    fn skip_line(&mut self, line: u32) {
        while self.peek().kind != Kind::End && self.peek().position.line == line {
            self.at += 1;
        }
    }

    fn skip_past(&mut self, mark: u8) -> Parsed<()> {
        while !self.eat(mark) {
            if self.peek().kind == Kind::End {
                return Err(self.unexpected(&format!("`{}`", char::from(mark))));
            }
            self.at += 1;
        }
        Ok(())
    }

    fn module(&mut self) -> Parsed<Source<'a>> {
        let (version, target) = self.header()?;
        let mut source = Source { version, target, variables: Vec::new(), functions: Vec::new() };
        loop {
            let token = self.peek();
            match (token.kind, token.text) {
                (Kind::End, _) => return Ok(source),
                (Kind::Dot, "visible" | "weak" | "extern" | "common") => {
                    let is_extern = token.text == "extern";
                    self.at += 1;
                    self.linked(&mut source, is_extern)?;
                }
                (Kind::Dot, "file" | "loc") => self.skip_line(token.position.line),
                (Kind::Dot, "section") => {
                    self.at += 1;
                    // Its name, and nothing else: what the braces of a function have is no section.
                    while self.peek().kind == Kind::Dot {
                        self.at += 1;
                    }
                    self.expect(b'{')?;
                    self.skip_past(b'}')?;
                }
                (Kind::Dot, "pragma" | "alias") => self.skip_past(b';')?,
                (Kind::Dot, "address_size") => {
                    self.at += 1;
                    if self.integer()? != 64 {
                        let message = "only 64-bit addresses are supported";
                        return Err(token
                            .position
                            .fault(DiagnosticKind::UnsupportedTarget, message));
                    }
                }
                (Kind::Mark(b';'), _) => self.at += 1,
                (Kind::Mark(b'@'), _) => self.skip_line(token.position.line),
                _ => self.linked(&mut source, false)?,
            }
        }
    }

    fn header(&mut self) -> Parsed<((u32, u32), &'a str)> {
        if !self.is_dot("version") {
            return Err(self.unexpected("`.version`"));
        }
        self.at += 1;
        let token = self.take();
        let mut parts = token.text.split('.').map(str::parse::<u32>);
        let version = match (token.kind, parts.next(), parts.next()) {
            (Kind::Decimal(_), Some(Ok(major)), Some(Ok(minor))) => (major, minor),
            _ => return Err(token.position.syntax("`.version` takes a number such as 9.0")),
        };
        if !(1..=9).contains(&version.0) {
            let message = format!("PTX version {} is not supported", token.text);
            return Err(token.position.fault(DiagnosticKind::UnsupportedTarget, message));
        }
        while matches!(self.peek().kind, Kind::Dot) && matches!(self.peek().text, "file" | "loc") {
            let line = self.peek().position.line;
            self.skip_line(line);
        }
        if !self.is_dot("target") {
            return Err(self.unexpected("`.target`"));
        }
        self.at += 1;
        let target = self.name("a target such as sm_75")?;
        let digits = target.text.strip_prefix("sm_").unwrap_or("").trim_end_matches(['a', 'f']);
        if !digits.parse::<u32>().is_ok_and(|sm| sm >= 10) {
            let message = format!("target `{}` is not supported", target.text);
            return Err(target.position.fault(DiagnosticKind::UnsupportedTarget, message));
        }
        while self.eat(b',') {
            self.name("a target option")?;
        }
        Ok((version, target.text))
    }

    /// A function or a variable at module scope, after its linkage.
    fn linked(&mut self, source: &mut Source<'a>, is_extern: bool) -> Parsed<()> {
        let token = self.peek();
        match (token.kind, token.text) {
            (Kind::Dot, "entry" | "func") => {
                self.at += 1;
                let function = self.function(token.text == "entry")?;
                source.functions.push(function);
                Ok(())
            }
            (Kind::Dot, "global" | "const" | "shared" | "tex") => {
                let found = self.variables(is_extern)?;
                source.variables.extend(found);
                Ok(())
            }
            (Kind::Dot, "visible" | "weak" | "extern" | "common") => {
                self.at += 1;
                self.linked(source, is_extern || token.text == "extern")
            }
            (Kind::Dot, other) => Err(token.position.unsupported(format!(".{other}"))),
            _ => Err(self.unexpected("a directive")),
        }
    }

    fn function(&mut self, is_entry: bool) -> Parsed<Function<'a>> {
        self.attribute()?;
        let returns = if self.is_mark(b'(') { self.params()? } else { Vec::new() };
        let name = self.name("a function name")?;
        let params = if self.is_mark(b'(') { self.params()? } else { Vec::new() };
        let mut function = Function {
            name: name.text,
            position: name.position,
            is_entry,
            returns,
            params,
            max_threads: None,
            cluster: None,
            max_registers: None,
            body: None,
        };
        loop {
            let token = self.peek();
            match (token.kind, token.text) {
                (Kind::Mark(b';'), _) => {
                    self.at += 1;
                    return Ok(function);
                }
                (Kind::Mark(b'{'), _) => {
                    self.at += 1;
                    function.body = Some(self.body(&function)?);
                    return Ok(function);
                }
                (Kind::Dot, "maxntid" | "reqntid") => {
                    self.at += 1;
                    function.max_threads = Some(self.shape()?);
                }
                (Kind::Dot, "maxnreg") => {
                    self.at += 1;
                    let [most, ..] = self.shape()?;
                    function.max_registers =
                        Some(function.max_registers.map_or(most, |least| least.min(most)));
                }
                (Kind::Dot, "minnctapersm" | "maxnctapersm" | "maxclusterrank") => {
                    self.at += 1;
                    self.shape()?;
                }
                (Kind::Dot, "reqnctapercluster") => {
                    self.at += 1;
                    function.cluster = Some(self.shape()?);
                }
                (Kind::Dot, "noreturn" | "explicitcluster" | "blocksareclusters") => self.at += 1,
                (Kind::Dot, "pragma") => self.skip_past(b';')?,
                (Kind::Dot, "attribute") => self.attribute()?,
                (Kind::Dot, "abi_preserve" | "abi_preserve_control") => {
                    self.at += 1;
                    self.integer()?;
                }
                (Kind::Dot, "loc" | "file") => self.skip_line(token.position.line),
                (Kind::Dot, other) => return Err(token.position.unsupported(format!(".{other}"))),
                _ => return Err(self.unexpected("a function body")),
            }
        }
    }

    fn attribute(&mut self) -> Parsed<()> {
        if self.is_dot("attribute") {
            self.at += 1;
            self.skip_past(b')')?;
        }
        Ok(())
    }

    fn shape(&mut self) -> Parsed<[u32; 3]> {
        let mut shape = [1; 3];
        for (index, slot) in shape.iter_mut().enumerate() {
            if index > 0 && !self.eat(b',') {
                break;
            }
            let position = self.peek().position;
            *slot = u32::try_from(self.integer()?).map_err(|_| position.limit("too large"))?;
        }
        Ok(shape)
    }

    fn params(&mut self) -> Parsed<Vec<Variable<'a>>> {
        self.expect(b'(')?;
        let mut params = Vec::new();
        while !self.eat(b')') {
            if !params.is_empty() {
                self.expect(b',')?;
            }
            let token = self.peek();
            if token.kind == Kind::Dot && token.text == "reg" {
                return Err(token.position.unsupported(".reg parameter"));
            }
            if !self.is_dot("param") {
                return Err(self.unexpected("`.param`"));
            }
            self.at += 1;
            let (ty, align) = self.variable_type()?;
            let variable = self.declarator(Space::Param, ty, align, false)?;
            params.push(variable);
        }
        Ok(params)
    }

    /// The qualifiers of a variable: alignment, element bytes as a type, and the rest.
    fn variable_type(&mut self) -> Parsed<(VariableType, usize)> {
        let mut align = 0;
        let mut lanes = 1;
        loop {
            let token = self.peek();
            if token.kind != Kind::Dot {
                return Err(self.unexpected("a type"));
            }
            self.at += 1;
            match token.text {
                "align" => {
                    let value = self.integer()?;
                    if !value.is_power_of_two() || value > 1 << 16 {
                        return Err(token.position.limit("alignment is not a small power of two"));
                    }
                    align = align.max(value as usize);
                }
                "v2" => lanes = 2,
                "v4" => lanes = 4,
                "ptr" | "global" | "const" | "shared" | "local" => {}
                "attribute" => {
                    self.at -= 1;
                    self.attribute()?;
                }
                "texref" | "surfref" | "samplerref" => {
                    // A handle; what it stands for is the driver's.
                    let reference = Some(match token.text {
                        "texref" => Reference::Texture,
                        "surfref" => Reference::Surface,
                        _ => Reference::Sampler,
                    });
                    return Ok((
                        VariableType { scalar: Type::U64, lanes, reference },
                        align.max(8),
                    ));
                }
                name => {
                    let Some(scalar) = Type::parse(name) else {
                        return Err(token.position.unsupported(format!(".{name} variable")));
                    };
                    // A parameter's `.ptr .global .align 8` describes what it points to.
                    let align = align.max(scalar.size() * lanes);
                    if self.is_dot("ptr") {
                        while self.peek().kind == Kind::Dot {
                            if self.take().text == "align" {
                                self.integer()?;
                            }
                        }
                    }
                    return Ok((VariableType { scalar, lanes, reference: None }, align));
                }
            }
        }
    }
}

#[derive(Clone, Copy)]
struct VariableType {
    scalar: Type,
    lanes: usize,
    reference: Option<Reference>,
}
