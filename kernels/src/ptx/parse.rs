//! PTX to functions and instructions with resolved names. Anything that may carry a value or an
//! address is kept; types are kept as sizes. What no rule needs (debug information, initial values,
//! labels) is left out, and opcodes need not be known here.

use std::collections::HashMap;

use gpucr_rewrite::lexer::{Lexer, Token};
use gpucr_wire::reach::Index;

use super::PtxError;

/// The most bytes of parameters that a function may have. CUDA allows 32764 for a kernel.
const MOST_PARAM_BYTES: u32 = 32 << 10;

/// Braces within braces. Compilers use two or three; each name is looked for in all of them.
const MOST_SCOPES: usize = 32;

/// Where a variable lives.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Space {
    Generic,
    Global,
    Const,
    Shared,
    Local,
    Param,
}

impl Space {
    /// The space that a modifier such as `global` or `shared::cluster` names.
    pub(super) fn of(modifier: &str) -> Option<Space> {
        Some(match modifier.split("::").next()? {
            "global" => Space::Global,
            "const" => Space::Const,
            "shared" => Space::Shared,
            "local" => Space::Local,
            "param" => Space::Param,
            _ => return None,
        })
    }
}

/// What a name that a function declares stands for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Var {
    /// Bytes; 0 is a predicate.
    Register(u32),
    /// A parameter, a returned value, or a variable from which one is passed.
    Param { bytes: u32, align: u32 },
    /// Memory of another space.
    Memory(Space),
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Atom<'a> {
    /// An index into [`Function::vars`].
    Var(usize),
    /// A name of the module, or a label.
    Name(&'a str),
    Number(i64),
    /// A special register with a number of [`gpucr_wire::reach::Index`].
    Index(u8),
    /// A special register that may hold something else when the kernel runs again, such as a clock.
    Fleeting,
    /// Another special register, a floating-point number, or a sink.
    Other,
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum Operand<'a> {
    Plain(Vec<Atom<'a>>),
    /// `{a, b}` and `p|q`.
    Vector(Vec<Atom<'a>>),
    /// `(a, b)` of a call.
    List(Vec<Atom<'a>>),
    /// `[base]`, `[base+offset]`: the offset is in bytes, and absent for anything else in brackets.
    Address(Vec<Atom<'a>>, Option<i64>),
}

impl<'a> Operand<'a> {
    pub(super) fn atoms(&self) -> &[Atom<'a>] {
        match self {
            Operand::Plain(atoms) | Operand::Vector(atoms) | Operand::List(atoms) => atoms,
            Operand::Address(atoms, _) => atoms,
        }
    }
}

#[derive(Debug)]
pub(super) struct Instruction<'a> {
    /// The name with its modifiers: `ld.global.u64`.
    pub(super) opcode: &'a str,
    pub(super) operands: Vec<Operand<'a>>,
}

impl<'a> Instruction<'a> {
    /// The opcode without modifiers.
    pub(super) fn base(&self) -> &'a str {
        self.opcode.split('.').next().unwrap_or("")
    }

    pub(super) fn modifiers(&self) -> impl Iterator<Item = &'a str> {
        self.opcode.split('.').skip(1)
    }

    pub(super) fn has(&self, modifier: &str) -> bool {
        self.modifiers().any(|found| found == modifier)
    }

    /// The spaces that it names, in this order.
    pub(super) fn spaces(&self) -> impl Iterator<Item = Space> {
        self.modifiers().filter_map(Space::of)
    }

    /// Bytes of one element: of the last type among the modifiers, or 8.
    pub(super) fn element(&self) -> u32 {
        self.modifiers().filter_map(type_bytes).last().unwrap_or(8)
    }
}

#[derive(Debug)]
pub(super) struct Function<'a> {
    pub(super) name: &'a str,
    pub(super) is_entry: bool,
    /// Indices into `vars`.
    pub(super) returns: Vec<usize>,
    pub(super) params: Vec<usize>,
    pub(super) vars: Vec<Var>,
    pub(super) code: Vec<Instruction<'a>>,
}

#[derive(Debug, Default)]
pub(super) struct Module<'a> {
    /// The functions that have a body.
    pub(super) functions: Vec<Function<'a>>,
    pub(super) by_name: HashMap<&'a str, usize>,
    pub(super) variables: HashMap<&'a str, Space>,
    pub(super) aliases: HashMap<&'a str, &'a str>,
}

/// Bytes of a type's value; `None` for what is no type.
fn type_bytes(name: &str) -> Option<u32> {
    Some(match name {
        "pred" => 0,
        "b8" | "u8" | "s8" | "e4m3" | "e5m2" => 1,
        "b16" | "u16" | "s16" | "f16" | "bf16" | "e4m3x2" | "e5m2x2" => 2,
        "b32" | "u32" | "s32" | "f32" | "f16x2" | "bf16x2" | "tf32" | "u8x4" | "s8x4" | "u16x2"
        | "s16x2" => 4,
        "b64" | "u64" | "s64" | "f64" | "f32x2" | "texref" | "samplerref" | "surfref" => 8,
        "b128" => 16,
        _ => return None,
    })
}

fn number(word: &str) -> Option<i64> {
    let digits = word.trim_end_matches(['U', 'u']);
    let radix = |prefix: &[&str], radix| {
        let rest = prefix.iter().find_map(|prefix| digits.strip_prefix(prefix))?;
        u64::from_str_radix(rest, radix).ok()
    };
    let value = radix(&["0x", "0X"], 16)
        .or_else(|| radix(&["0b", "0B"], 2))
        .or_else(|| (digits.len() > 1).then(|| radix(&["0"], 8)).flatten())
        .or_else(|| digits.parse().ok())?;
    Some(value as i64)
}

/// Reads a module.
pub(super) fn module(text: &str) -> Result<Module<'_>, PtxError> {
    let mut parser = Parser { lexer: Lexer::new(text), peeked: None };
    let mut module = Module::default();
    let mut version = false;
    while let Some(token) = parser.next()? {
        match token {
            Token::Word(".version") => {
                version = true;
                parser.skip_line();
            }
            Token::Word(".address_size") => {
                if parser.next()? != Some(Token::Word("64")) {
                    return Err(PtxError::Syntax(parser.line(), "addresses are not of 64 bits"));
                }
            }
            Token::Word(".target" | ".file" | ".loc") => parser.skip_line(),
            Token::Word(".section") => parser.skip_braces()?,
            Token::Word(".alias") => {
                let statement = parser.statement()?;
                if let [Token::Word(alias), Token::Mark(b','), Token::Word(of)] = statement[..] {
                    module.aliases.insert(alias, of);
                }
            }
            Token::Word(word @ (".entry" | ".func")) => {
                if let Some(function) = parser.function(word == ".entry")? {
                    module.by_name.insert(function.name, module.functions.len());
                    module.functions.push(function);
                }
            }
            Token::Word(word) => {
                if let Some(space) = word.strip_prefix('.').and_then(Space::of) {
                    for (name, _) in declarations(&parser.statement()?, parser.line())? {
                        module.variables.insert(name, space);
                    }
                }
            }
            Token::Text | Token::Mark(_) => {}
        }
    }
    if version { Ok(module) } else { Err(PtxError::NotPtx) }
}

/// What a declaration says of one name.
#[derive(Debug, Clone, Copy)]
struct Declared {
    is_register: bool,
    element: u32,
    align: u32,
    bytes: u32,
    /// `%r<100>`.
    is_family: bool,
}

/// The names of a declaration without its `;`: `.b8 a[4], b` or `.reg .b32 %r<9>`, as well as the
/// parameters of a function.
fn declarations<'a>(tokens: &[Token<'a>], line: u32) -> Result<Vec<(&'a str, Declared)>, PtxError> {
    let large = PtxError::Syntax(line, "a size is too large");
    let none = Declared { is_register: false, element: 0, align: 0, bytes: 0, is_family: false };
    let (mut found, mut now, mut name) = (Vec::new(), none, None);
    let (mut depth, mut pointee, mut vector, mut elements) = (0_usize, false, 1, 1_u64);
    let mut tokens = tokens.iter().copied().chain([Token::Mark(b',')]).peekable();
    while let Some(token) = tokens.next() {
        match token {
            // An initial value in braces.
            Token::Mark(b'{') => depth += 1,
            Token::Mark(b'}') => depth = depth.saturating_sub(1),
            _ if depth > 0 => {}
            Token::Word(word @ (".reg" | ".param")) => now.is_register = word == ".reg",
            // What follows it is about the memory that the parameter points to.
            Token::Word(".ptr") => pointee = true,
            Token::Word(".align") => {
                if let Some(Token::Word(align)) = tokens.next()
                    && !pointee
                {
                    let align = number(align).and_then(|align| u32::try_from(align).ok());
                    now.align = align.filter(|align| *align <= MOST_PARAM_BYTES).ok_or(large)?;
                }
            }
            Token::Word(".v2") => vector = 2,
            Token::Word(".v4") => vector = 4,
            Token::Word(word) if word.starts_with('.') => {
                if let Some(bytes) = type_bytes(&word[1..]) {
                    now.element = bytes;
                }
            }
            Token::Mark(b'<') => now.is_family = true,
            Token::Mark(b'[') => {
                if let Some(Token::Word(word)) = tokens.peek() {
                    let count = number(word).and_then(|count| u64::try_from(count).ok());
                    elements = elements.checked_mul(count.unwrap_or(1)).ok_or(large)?;
                }
            }
            Token::Word(word) if name.is_none() => name = Some(word),
            Token::Mark(b',') => {
                if let Some(name) = name.take() {
                    let bytes = elements.checked_mul(u64::from(now.element * vector));
                    // Only sizes of parameters matter; a variable may be of many gigabytes.
                    now.bytes = u32::try_from(bytes.ok_or(large)?).unwrap_or(u32::MAX);
                    now.align = now.align.max(now.element).max(1);
                    found.push((name, now));
                }
                // In `.reg .b32 a, b` the second has the type of the first, in a list of parameters
                // each has its own.
                (now.is_family, elements, pointee, now.align) = (false, 1, false, 0);
            }
            Token::Mark(_) | Token::Text | Token::Word(_) => {}
        }
    }
    Ok(found)
}

struct Parser<'a> {
    lexer: Lexer<'a>,
    peeked: Option<Token<'a>>,
}

impl<'a> Parser<'a> {
    fn line(&self) -> u32 {
        self.lexer.line()
    }

    fn next(&mut self) -> Result<Option<Token<'a>>, PtxError> {
        match self.peeked.take() {
            Some(token) => Ok(Some(token)),
            None => Ok(self.lexer.token()?),
        }
    }

    fn peek(&mut self) -> Result<Option<Token<'a>>, PtxError> {
        if self.peeked.is_none() {
            self.peeked = self.lexer.token()?;
        }
        Ok(self.peeked)
    }

    fn some(&mut self) -> Result<Token<'a>, PtxError> {
        self.next()?.ok_or(PtxError::Syntax(self.lexer.line(), "the text ends too early"))
    }

    fn skip_line(&mut self) {
        // Only called right after a word, so nothing is peeked at.
        self.lexer.skip_line();
    }

    fn skip_braces(&mut self) -> Result<(), PtxError> {
        let mut depth = 0;
        loop {
            match self.some()? {
                Token::Mark(b'{') => depth += 1,
                Token::Mark(b'}') if depth <= 1 => return Ok(()),
                Token::Mark(b'}') => depth -= 1,
                _ => {}
            }
        }
    }

    /// The tokens up to a `;`, which is taken and left out.
    fn statement(&mut self) -> Result<Vec<Token<'a>>, PtxError> {
        let mut tokens = Vec::new();
        loop {
            match self.some()? {
                Token::Mark(b';') => return Ok(tokens),
                token => tokens.push(token),
            }
        }
    }

    /// The tokens up to the `)` of a `(` that was just taken.
    fn parenthesised(&mut self) -> Result<Vec<Token<'a>>, PtxError> {
        let (mut tokens, mut depth) = (Vec::new(), 0);
        loop {
            match self.some()? {
                Token::Mark(b')') if depth == 0 => return Ok(tokens),
                token => {
                    depth += i32::from(token == Token::Mark(b'('));
                    depth -= i32::from(token == Token::Mark(b')'));
                    tokens.push(token);
                }
            }
        }
    }

    /// Parses from behind `.entry` or `.func` on. `None` for a declaration without body.
    fn function(&mut self, is_entry: bool) -> Result<Option<Function<'a>>, PtxError> {
        let (mut name, mut lists) = (None, [Vec::new(), Vec::new()]);
        let has_body = loop {
            match self.some()? {
                Token::Word(".pragma") => drop(self.statement()?),
                Token::Word(".attribute") => {
                    self.some()?;
                    self.parenthesised()?;
                }
                Token::Word(word) if name.is_none() && !word.starts_with('.') => name = Some(word),
                Token::Mark(b'(') => {
                    let list = self.parenthesised()?;
                    lists[usize::from(name.is_some())] = declarations(&list, self.line())?;
                }
                Token::Mark(b'{') => break true,
                Token::Mark(b';') => break false,
                _ => {}
            }
        };
        let name = name.ok_or(PtxError::Syntax(self.line(), "a function has no name"))?;
        if !has_body {
            return Ok(None);
        }
        let mut body = Body {
            function: Function {
                name,
                is_entry,
                returns: Vec::new(),
                params: Vec::new(),
                vars: Vec::new(),
                code: Vec::new(),
            },
            scopes: vec![HashMap::new()],
        };
        let [returns, params] = lists;
        body.function.returns = body.parameters(&returns, self.line())?;
        body.function.params = body.parameters(&params, self.line())?;
        self.body(&mut body)?;
        Ok(Some(body.function))
    }

    /// Parses from behind the `{` of a function to behind its `}`.
    fn body(&mut self, body: &mut Body<'a>) -> Result<(), PtxError> {
        loop {
            match self.some()? {
                Token::Mark(b'{') if body.scopes.len() == MOST_SCOPES => {
                    return Err(PtxError::Syntax(self.line(), "too many braces are open"));
                }
                Token::Mark(b'{') => body.scopes.push(HashMap::new()),
                Token::Mark(b'}') => {
                    body.scopes.pop();
                    if body.scopes.is_empty() {
                        return Ok(());
                    }
                }
                Token::Mark(b';') => {}
                Token::Mark(b'@') => {
                    let guard = self.some()?;
                    if guard == Token::Mark(b'@') {
                        // `@@DWARF`: debug information of old compilers.
                        self.skip_line();
                    } else if guard == Token::Mark(b'!') {
                        self.some()?;
                    }
                }
                Token::Word(".loc" | ".file") => self.skip_line(),
                Token::Word(".section") => self.skip_braces()?,
                Token::Word(
                    word @ (".reg" | ".param" | ".local" | ".shared" | ".global" | ".const"),
                ) => {
                    let statement = self.statement()?;
                    body.declare(word, &declarations(&statement, self.line())?);
                }
                Token::Word(word) if word.starts_with('.') => drop(self.statement()?),
                Token::Word(_) if self.peek()? == Some(Token::Mark(b':')) => drop(self.next()?),
                Token::Word(opcode) => {
                    let operands = body.operands(&self.statement()?);
                    body.function.code.push(Instruction { opcode, operands });
                }
                Token::Mark(_) | Token::Text => {
                    return Err(PtxError::Syntax(self.line(), "this is no statement"));
                }
            }
        }
    }
}

/// What a name stands for within braces.
#[derive(Clone, Copy)]
enum Meaning {
    Var(usize),
    /// A family of registers of so many bytes: its members become variables when first used.
    Family(u32),
}

struct Body<'a> {
    function: Function<'a>,
    scopes: Vec<HashMap<&'a str, Meaning>>,
}

impl<'a> Body<'a> {
    fn add(&mut self, scope: usize, name: &'a str, var: Var) -> usize {
        self.function.vars.push(var);
        self.scopes[scope].insert(name, Meaning::Var(self.function.vars.len() - 1));
        self.function.vars.len() - 1
    }

    fn parameters(
        &mut self,
        list: &[(&'a str, Declared)],
        line: u32,
    ) -> Result<Vec<usize>, PtxError> {
        let total: u64 = list.iter().map(|(_, declared)| u64::from(declared.bytes)).sum();
        if total > u64::from(MOST_PARAM_BYTES) {
            return Err(PtxError::Syntax(line, "the parameters are too large"));
        }
        Ok(list.iter().map(|(name, declared)| self.add(0, name, declared.param())).collect())
    }

    fn declare(&mut self, directive: &str, list: &[(&'a str, Declared)]) {
        let scope = self.scopes.len() - 1;
        for (name, declared) in list {
            if declared.is_family {
                self.scopes[scope].insert(name, Meaning::Family(declared.element));
                continue;
            }
            let var = match directive {
                ".reg" => Var::Register(declared.element),
                ".param" => declared.param(),
                other => Var::Memory(Space::of(&other[1..]).unwrap_or(Space::Generic)),
            };
            self.add(scope, name, var);
        }
    }

    fn resolve(&mut self, word: &'a str) -> Atom<'a> {
        // `%v.x` is a part of `%v`.
        let whole = word.rsplit_once('.').map(|(whole, _)| whole);
        for name in [Some(word), whole].into_iter().flatten() {
            let family = name.trim_end_matches(|c: char| c.is_ascii_digit());
            for scope in (0..self.scopes.len()).rev() {
                let names = &self.scopes[scope];
                if let Some(Meaning::Var(var)) = names.get(name) {
                    return Atom::Var(*var);
                }
                if family.len() < name.len()
                    && let Some(Meaning::Family(bytes)) = names.get(family)
                {
                    let bytes = *bytes;
                    return Atom::Var(self.add(scope, name, Var::Register(bytes)));
                }
            }
        }
        match word.strip_prefix('%') {
            Some(register) => match index(register) {
                Some(index) => Atom::Index(index),
                None if is_lasting(register) => Atom::Other,
                None => Atom::Fleeting,
            },
            None if word == "_" => Atom::Other,
            None => Atom::Name(word),
        }
    }

    /// The operands in the tokens between an opcode and its `;`.
    fn operands(&mut self, tokens: &[Token<'a>]) -> Vec<Operand<'a>> {
        let (mut operands, mut depth, mut start) = (Vec::new(), 0_i32, 0);
        for (at, token) in tokens.iter().enumerate() {
            match token {
                Token::Mark(b'[' | b'{' | b'(') => depth += 1,
                Token::Mark(b']' | b'}' | b')') => depth -= 1,
                Token::Mark(b',') if depth == 0 => {
                    operands.push(self.operand(&tokens[start..at]));
                    start = at + 1;
                }
                _ => {}
            }
        }
        if start < tokens.len() {
            operands.push(self.operand(&tokens[start..]));
        }
        operands
    }

    fn operand(&mut self, tokens: &[Token<'a>]) -> Operand<'a> {
        let (mut atoms, mut negative) = (Vec::new(), false);
        for token in tokens {
            if let Token::Word(word) = token {
                atoms.push(if !word.starts_with(|c: char| c.is_ascii_digit()) {
                    self.resolve(word)
                } else if let Some(number) = number(word) {
                    Atom::Number(if negative { number.wrapping_neg() } else { number })
                } else {
                    Atom::Other
                });
            }
            negative = *token == Token::Mark(b'-');
        }
        match tokens.first() {
            Some(Token::Mark(b'[')) => {
                let inside = &tokens[1..tokens.len().max(2) - 1];
                let simple = !inside.iter().any(|token| matches!(token, Token::Mark(b'{' | b',')));
                let offset = match atoms[..] {
                    [_] if simple => Some(0),
                    [_, Atom::Number(offset)] if simple => Some(offset),
                    _ => None,
                };
                Operand::Address(atoms, offset)
            }
            Some(Token::Mark(b'{')) => Operand::Vector(atoms),
            Some(Token::Mark(b'(')) => Operand::List(atoms),
            _ if tokens.contains(&Token::Mark(b'|')) => Operand::Vector(atoms),
            _ => Operand::Plain(atoms),
        }
    }
}

/// The number of a special register that tells a thread its place, or the size of the launch.
fn index(register: &str) -> Option<u8> {
    let (name, direction) = register.split_once('.')?;
    let index = match name {
        "tid" => Index::Thread,
        "ntid" => Index::Threads,
        "ctaid" => Index::Block,
        "nctaid" => Index::Blocks,
        _ => return None,
    };
    let direction = ["x", "y", "z"].iter().position(|one| *one == direction)?;
    Some(index.number(direction) as u8)
}

/// Special registers that the launch alone decides.
fn is_lasting(register: &str) -> bool {
    let name = register.split('.').next().unwrap_or(register);
    let of_launch = ["tid", "ntid", "ctaid", "nctaid", "laneid", "is_explicit_cluster"];
    let kinds = ["lanemask_", "cluster", "ncluster", "total_smem", "aggr_smem", "dynamic_smem"];
    of_launch.contains(&name) || kinds.iter().any(|kind| name.starts_with(kind))
}

impl Declared {
    fn param(&self) -> Var {
        if self.is_register {
            Var::Register(self.element)
        } else {
            Var::Param { bytes: self.bytes.min(MOST_PARAM_BYTES), align: self.align }
        }
    }
}
