//! The body of a kernel, for twins that are interrupted in loops: its instructions, what each does with registers, and
//! where it goes. A body is read only as far as each of its instructions is a matter of its thread alone, or, for twins that
//! are interrupted at barriers, as what the threads of a block do together is over at these. Twins that are begun again need
//! less: what is in registers is not looked at.

use std::collections::{HashMap, HashSet};
use std::ops::Range;

use crate::again;
use crate::inside::Inside;
use crate::lexer::{Lexer, Token};
use crate::opcodes::{self, Class};
use crate::shared::{self, Shared};

/// Bodies of more items are not read.
const MOST_ITEMS: usize = 1 << 17;
/// Bodies that use more registers are not read.
const MOST_REGISTERS: usize = 1 << 15;
/// Braces within braces.
const MOST_SCOPES: usize = 32;

/// What a register holds.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Kind {
    Predicate,
    /// So many bytes.
    Bytes(u32),
}

/// A register that is used.
#[derive(Debug)]
pub(crate) struct Register<'a> {
    pub(crate) name: &'a str,
    pub(crate) kind: Kind,
    /// It is known in all of the body.
    pub(crate) is_outer: bool,
}

/// Where a thread goes from an instruction.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum Flow<'a> {
    Next,
    /// To a label, which is named there.
    Branch(&'a str, Range<usize>),
    /// To one of a list of labels.
    Table(&'a str),
    End,
}

/// An instruction.
#[derive(Debug)]
pub(crate) struct Step<'a> {
    /// The predicate on which it depends, and whether that has to be false.
    pub(crate) guard: Option<(u32, bool)>,
    /// Where its opcode is.
    pub(crate) opcode: Range<usize>,
    pub(crate) class: Class,
    /// Whether it sets the carry flag, and whether it reads that.
    pub(crate) carry: (bool, bool),
    pub(crate) reads: Vec<u32>,
    pub(crate) writes: Vec<u32>,
    pub(crate) flow: Flow<'a>,
}

#[derive(Debug)]
pub(crate) enum What<'a> {
    Label(&'a str),
    Step(Step<'a>),
    Open,
    Close,
    /// Of registers.
    Declaration,
    /// A list of labels, and where each is named.
    Targets(Vec<(&'a str, Range<usize>)>),
    /// What is no part of the program.
    Remark,
}

/// A part of a body, and where it is in the body's text.
#[derive(Debug)]
pub(crate) struct Item<'a> {
    pub(crate) span: Range<usize>,
    pub(crate) what: What<'a>,
    /// Braces that are open there.
    pub(crate) depth: usize,
}

#[derive(Debug)]
pub(crate) struct Body<'a> {
    pub(crate) items: Vec<Item<'a>>,
    pub(crate) registers: Vec<Register<'a>>,
    /// Items, by the names of labels.
    pub(crate) labels: HashMap<&'a str, usize>,
    /// Items, by the names of lists.
    pub(crate) lists: HashMap<&'a str, usize>,
    /// Variables in shared memory.
    pub(crate) shared: Vec<Shared<'a>>,
    /// It begins copies to shared memory that go on behind that.
    pub(crate) has_copies: bool,
}

/// What is wanted of a body.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Rules {
    /// Its threads have nothing to do with each other, and all that one has is in registers.
    Alone,
    /// What its threads do together is over at barriers.
    Together,
    /// Its threads have nothing to do with each other. What they have is not looked at.
    AgainAlone,
    /// What its threads do together is over at barriers. What they have is not looked at.
    AgainTogether,
}

impl Rules {
    fn are_together(self) -> bool {
        matches!(self, Self::Together | Self::AgainTogether)
    }

    fn are_again(self) -> bool {
        matches!(self, Self::AgainAlone | Self::AgainTogether)
    }

    fn class(self, opcode: &str) -> Option<Class> {
        match self {
            Self::Alone => opcodes::class(opcode),
            Self::Together => opcodes::class_together(opcode),
            Self::AgainAlone => again::class(opcode),
            Self::AgainTogether => again::class_together(opcode),
        }
    }
}

/// Reads a body, without its outer braces, whose threads have nothing to do with each other.
pub(crate) fn read(text: &str) -> Result<Body<'_>, Inside> {
    read_as(text, Rules::Alone, &[])
}

/// Reads a body whose threads or blocks can be begun again. It is not known what its instructions do with registers.
pub(crate) fn read_again(text: &str, is_together: bool) -> Result<Body<'_>, Inside> {
    read_as(text, if is_together { Rules::AgainTogether } else { Rules::AgainAlone }, &[])
}

/// Reads a body whose threads have these variables in shared memory together, and those that it declares.
pub(crate) fn read_together<'a>(text: &'a str, shared: &[Shared<'a>]) -> Result<Body<'a>, Inside> {
    read_as(text, Rules::Together, shared)
}

fn read_as<'a>(text: &'a str, rules: Rules, shared: &[Shared<'a>]) -> Result<Body<'a>, Inside> {
    let body = Body {
        items: Vec::new(),
        registers: Vec::new(),
        labels: HashMap::new(),
        lists: HashMap::new(),
        shared: shared.to_vec(),
        has_copies: false,
    };
    let scopes = vec![HashMap::new()];
    let inner = HashSet::new();
    let mut reader = Reader { text, lexer: Lexer::new(text), body, scopes, inner, rules };
    while let Some(token) = reader.token()? {
        reader.item(token)?;
        if reader.body.items.len() > MOST_ITEMS || reader.body.registers.len() > MOST_REGISTERS {
            return Err(Inside::Size);
        }
    }
    reader.end()
}

/// What a name stands for within braces.
#[derive(Clone, Copy)]
enum Meaning {
    Register(u32),
    /// So many registers, whose names end in numbers.
    Family(u32, Kind),
}

struct Reader<'a> {
    text: &'a str,
    lexer: Lexer<'a>,
    body: Body<'a>,
    scopes: Vec<HashMap<&'a str, Meaning>>,
    /// Labels in inner braces.
    inner: HashSet<&'a str>,
    rules: Rules,
}

impl<'a> Reader<'a> {
    fn token(&mut self) -> Result<Option<Token<'a>>, Inside> {
        self.lexer.token().map_err(|_| Inside::Form)
    }

    fn some(&mut self) -> Result<Token<'a>, Inside> {
        self.token()?.ok_or(Inside::Form)
    }

    fn peek(&self) -> Option<Token<'a>> {
        self.lexer.clone().token().ok().flatten()
    }

    /// What comes up to a `;`, which is taken, and where each token is.
    fn statement(&mut self) -> Result<Vec<(Token<'a>, Range<usize>)>, Inside> {
        let mut tokens = Vec::new();
        loop {
            match self.some()? {
                Token::Mark(b';') => return Ok(tokens),
                token => tokens.push((token, self.lexer.span())),
            }
        }
    }

    fn push(&mut self, start: usize, what: What<'a>) {
        let (span, depth) = (start..self.lexer.span().end, self.scopes.len());
        self.body.items.push(Item { span, what, depth });
    }

    fn item(&mut self, token: Token<'a>) -> Result<(), Inside> {
        let start = self.lexer.span().start;
        match token {
            Token::Mark(b'{') if self.scopes.len() < MOST_SCOPES => {
                self.push(start, What::Open);
                self.scopes.push(HashMap::new());
            }
            Token::Mark(b'}') if self.scopes.len() > 1 => {
                self.scopes.pop();
                self.push(start, What::Close);
            }
            Token::Mark(b';') => {}
            Token::Word(".reg") => {
                self.registers()?;
                self.push(start, What::Declaration);
            }
            Token::Word(".loc" | ".file") => self.lexer.skip_line(),
            Token::Word(".pragma") => {
                self.statement()?;
                self.push(start, What::Remark);
            }
            // One in inner braces would be another one in a copy of these.
            Token::Word(".local") if self.rules.are_again() && self.scopes.len() == 1 => {
                self.statement()?;
                self.push(start, What::Declaration);
            }
            Token::Word(".param") if self.rules.are_again() => {
                self.statement()?;
                self.push(start, What::Declaration);
            }
            Token::Word(".shared") if self.rules.are_together() && self.scopes.len() == 1 => {
                self.statement()?;
                let declared = shared::declared(&self.text[start..self.lexer.span().end])?;
                // One of the module that has the same name is another one.
                let is_hidden =
                    |one: &Shared<'_>| declared.iter().any(|other| other.name == one.name);
                self.body.shared.retain(|one| !is_hidden(one));
                self.body.shared.extend(declared);
                self.push(start, What::Declaration);
            }
            Token::Word(word) if word.starts_with('.') => {
                return Err(Inside::Uses(word.to_owned()));
            }
            Token::Word(name) if self.peek() == Some(Token::Mark(b':')) => self.label(name)?,
            Token::Mark(b'@') => {
                let guard = self.guard()?;
                let Token::Word(opcode) = self.some()? else { return Err(Inside::Form) };
                self.step(start, Some(guard), opcode)?;
            }
            Token::Word(opcode) => self.step(start, None, opcode)?,
            Token::Mark(_) | Token::Text => return Err(Inside::Form),
        }
        Ok(())
    }

    fn label(&mut self, name: &'a str) -> Result<(), Inside> {
        let start = self.lexer.span().start;
        self.some()?;
        if self.scopes.len() > 1 {
            // What is known by one name alone can be named from anywhere.
            if !self.rules.are_again() {
                return Err(Inside::Form);
            }
            self.inner.insert(name);
            // It goes with its braces.
            self.push(start, What::Declaration);
            return Ok(());
        }
        let at = self.body.items.len();
        if self.peek() != Some(Token::Word(".branchtargets")) {
            let is_new = self.body.labels.insert(name, at).is_none();
            self.push(start, What::Label(name));
            return is_new.then_some(()).ok_or(Inside::Form);
        }
        self.some()?;
        let listed = self.statement()?.into_iter().filter(|(token, _)| *token != Token::Mark(b','));
        let named = |(token, span)| match token {
            Token::Word(label) => Ok((label, span)),
            _ => Err(Inside::Form),
        };
        let listed = listed.map(named).collect::<Result<Vec<_>, _>>()?;
        let is_new = self.body.lists.insert(name, at).is_none();
        self.push(start, What::Targets(listed));
        is_new.then_some(()).ok_or(Inside::Form)
    }

    fn guard(&mut self) -> Result<(u32, bool), Inside> {
        let mut token = self.some()?;
        let is_negated = token == Token::Mark(b'!');
        if is_negated {
            token = self.some()?;
        }
        let Token::Word(name) = token else { return Err(Inside::Form) };
        Ok((self.register(name).ok_or(Inside::Form)?, is_negated))
    }

    /// Behind `.reg`.
    fn registers(&mut self) -> Result<(), Inside> {
        let Token::Word(mut ty) = self.some()? else { return Err(Inside::Form) };
        let is_vector = self.rules.are_again() && matches!(ty, ".v2" | ".v4");
        if is_vector && let Token::Word(element) = self.some()? {
            ty = element;
        }
        // What is not looked at has any size.
        let any = self.rules.are_again().then_some(Kind::Bytes(16));
        let kind = kind(ty).filter(|_| !is_vector).or(any);
        let kind = kind.ok_or_else(|| Inside::Uses(format!(".reg {ty}")))?;
        let tokens = self.statement()?;
        for one in tokens.split(|(token, _)| *token == Token::Mark(b',')) {
            let scope = self.scopes.len() - 1;
            match one {
                [(Token::Word(name), _)] => {
                    let register = self.add(scope, name, kind);
                    self.scopes[scope].insert(name, Meaning::Register(register));
                }
                [(Token::Word(name), _), (Token::Mark(b'<'), _), (Token::Word(count), _), _] => {
                    let count = count.parse().map_err(|_| Inside::Form)?;
                    self.scopes[scope].insert(name, Meaning::Family(count, kind));
                }
                _ => return Err(Inside::Form),
            }
        }
        Ok(())
    }

    fn add(&mut self, scope: usize, name: &'a str, kind: Kind) -> u32 {
        self.body.registers.push(Register { name, kind, is_outer: scope == 0 });
        self.body.registers.len() as u32 - 1
    }

    fn register(&mut self, name: &'a str) -> Option<u32> {
        let family = name.trim_end_matches(|c: char| c.is_ascii_digit());
        let number: Option<u32> = name[family.len()..].parse().ok();
        for scope in (0..self.scopes.len()).rev() {
            if let Some(Meaning::Register(register)) = self.scopes[scope].get(name) {
                return Some(*register);
            }
            if let (Some(Meaning::Family(count, kind)), Some(number)) =
                (self.scopes[scope].get(family).copied(), number)
                && number < count
            {
                let register = self.add(scope, name, kind);
                self.scopes[scope].insert(name, Meaning::Register(register));
                return Some(register);
            }
        }
        None
    }

    fn step(
        &mut self,
        start: usize,
        guard: Option<(u32, bool)>,
        opcode: &'a str,
    ) -> Result<(), Inside> {
        let place = self.lexer.span();
        let class = self.rules.class(opcode).ok_or_else(|| Inside::Uses(opcode.to_owned()))?;
        let tokens = self.statement()?;
        if matches!(class, Class::Meets { .. } | Class::Asks) && !is_whole(class, &tokens) {
            return Err(Inside::Uses(format!("{opcode} for some threads or with a number")));
        }
        self.body.has_copies |= opcodes::is_copy(opcode);
        let (mut reads, mut writes, mut flow) = (Vec::new(), Vec::new(), Flow::Next);
        match class {
            Class::Branches => {
                let [(Token::Word(label), span)] = &tokens[..] else { return Err(Inside::Form) };
                flow = Flow::Branch(label, span.clone());
            }
            Class::Chooses => {
                let [(Token::Word(index), _), (Token::Mark(b','), _), (Token::Word(list), _)] =
                    tokens[..]
                else {
                    return Err(Inside::Form);
                };
                if !self.rules.are_again() {
                    reads.extend(self.operand(index, false)?);
                }
                flow = Flow::Table(list);
            }
            Class::Ends if tokens.is_empty() => flow = Flow::End,
            Class::Ends => return Err(Inside::Form),
            // What is known of it is for all threads.
            Class::Meets { .. } if guard.is_some() || self.scopes.len() > 1 => {
                return Err(Inside::Form);
            }
            Class::Meets { .. } => {}
            _ if self.rules.are_again() => {}
            Class::Computes | Class::Writes | Class::Reads | Class::Asks => {
                let is_writing = class != Class::Reads;
                let of_param = opcodes::is_of_param(opcode);
                let (mut depth, mut is_first) = (0, is_writing);
                for (token, _) in &tokens {
                    match token {
                        Token::Mark(b'{' | b'[') => depth += 1,
                        Token::Mark(b'}' | b']') => depth -= 1,
                        Token::Mark(b',') if depth == 0 => is_first = false,
                        Token::Mark(b',' | b'|' | b'+' | b'-' | b'!') => {}
                        Token::Word(word) => {
                            let register = self.operand(word, of_param && depth > 0)?;
                            let to = if is_first { &mut writes } else { &mut reads };
                            to.extend(register);
                        }
                        _ => return Err(Inside::Form),
                    }
                    // What is written is a register.
                    if is_first && *token == Token::Mark(b'[') {
                        return Err(Inside::Form);
                    }
                }
            }
        }
        // The address of a parameter is another one in the next launch.
        let class = match class {
            Class::Computes if opcodes::is_of_param(opcode) && !reads.is_empty() => Class::Writes,
            class => class,
        };
        let carry = opcodes::carry(opcode);
        let step = Step { guard, opcode: place, class, carry, reads, writes, flow };
        self.push(start, What::Step(step));
        Ok(())
    }

    /// Of branches to labels in inner braces nothing is known but that there they stay.
    fn end(mut self) -> Result<Body<'a>, Inside> {
        if self.inner.iter().any(|name| self.body.labels.contains_key(name)) {
            return Err(Inside::Form);
        }
        for item in &mut self.body.items {
            if let What::Step(step) = &mut item.what
                && let Flow::Branch(name, _) = &step.flow
                && self.inner.contains(name)
            {
                step.flow = Flow::Next;
            }
        }
        Ok(self.body)
    }

    /// The register that a word in an operand means; `None`: it is a number, or has the same value in each launch.
    fn operand(&mut self, word: &'a str, is_param: bool) -> Result<Option<u32>, Inside> {
        if let Some(register) = self.register(word) {
            return Ok(Some(register));
        }
        let is_number = word.starts_with(|c: char| c.is_ascii_digit());
        // Each launch has a block's variables at the same places.
        if self.body.shared.iter().any(|shared| shared.name == word) {
            return Ok(None);
        }
        let is_name = !word.contains(['%', '.']);
        let special = word.strip_prefix('%').is_some_and(opcodes::is_lasting);
        if is_number || special || matches!(word, "_" | "WARP_SZ") || is_param && is_name {
            return Ok(None);
        }
        Err(Inside::Uses(word.to_owned()))
    }
}

/// Whether a barrier is number 0, and for all threads of the block.
fn is_whole(class: Class, tokens: &[(Token<'_>, Range<usize>)]) -> bool {
    let operands: Vec<&[_]> = tokens.split(|(token, _)| *token == Token::Mark(b',')).collect();
    let zero = |operand: &[(Token<'_>, Range<usize>)]| matches!(operand, [(Token::Word("0"), _)]);
    match (class, &operands[..]) {
        (Class::Meets { .. }, [number]) => zero(number),
        (Class::Asks, [_, number, _]) => zero(number),
        _ => false,
    }
}

fn kind(ty: &str) -> Option<Kind> {
    Some(match ty {
        ".pred" => Kind::Predicate,
        ".b8" | ".u8" | ".s8" => Kind::Bytes(1),
        ".b16" | ".u16" | ".s16" | ".f16" | ".bf16" => Kind::Bytes(2),
        ".b32" | ".u32" | ".s32" | ".f32" | ".f16x2" | ".bf16x2" => Kind::Bytes(4),
        ".b64" | ".u64" | ".s64" | ".f64" => Kind::Bytes(8),
        _ => return None,
    })
}
