//! What a module consists of, and where that is in its text.

use std::collections::{HashMap, HashSet};
use std::ops::Range;

use crate::lexer::{Lexer, Syntax, Token};

/// A kernel that has a body.
pub(crate) struct Kernel<'a> {
    pub(crate) name: &'a str,
    /// Where the name is.
    pub(crate) named: Range<usize>,
    /// Where the closing parenthesis of its parameters is, and whether there are any; `None`: it has no parentheses.
    pub(crate) params: Option<(usize, bool)>,
    /// All of it, from the first word of its head to the brace that ends it.
    pub(crate) all: Range<usize>,
    /// Between its outer braces.
    pub(crate) body: Range<usize>,
    /// Whether its directives speak of clusters.
    pub(crate) has_cluster: bool,
    /// Names in the body: of functions, variables, labels and the like; and the spaces of variables that it declares.
    pub(crate) names: HashSet<&'a str>,
}

/// A module.
#[derive(Default)]
pub(crate) struct Module<'a> {
    pub(crate) kernels: Vec<Kernel<'a>>,
    /// Names in the bodies of functions, by the names of these.
    pub(crate) functions: HashMap<&'a str, HashSet<&'a str>>,
    /// Their names, and where they are between their outer braces.
    pub(crate) bodies: Vec<(&'a str, Range<usize>)>,
    /// What the module declares besides kernels, functions, and variables that each block has for itself.
    pub(crate) variables: HashSet<&'a str>,
    /// It declares variables whose names are not known.
    pub(crate) has_nameless: bool,
    /// Where it declares variables that each block has for itself, and their names.
    pub(crate) shared: Vec<(Range<usize>, Vec<&'a str>)>,
    /// Bits of an address, as the text says.
    pub(crate) address_size: Option<&'a str>,
}

/// Finds the parts of a module.
pub(crate) fn scan(text: &str) -> Result<Module<'_>, Syntax> {
    let mut scan = Scan { lexer: Lexer::new(text), module: Module::default() };
    while let Some(token) = scan.lexer.token()? {
        match token {
            Token::Word(".version") => drop(scan.some()?),
            Token::Word(".address_size") => {
                if let Token::Word(size) = scan.some()? {
                    scan.module.address_size = Some(size);
                }
            }
            Token::Word(".target") => scan.list()?,
            Token::Word(".file") => {
                scan.some()?;
                scan.list()?;
            }
            Token::Word(".section") => scan.section()?,
            // Debug information of old compilers: `@@DWARF ...`.
            Token::Mark(b'@') => scan.lexer.skip_line(),
            Token::Mark(b';') => {}
            first => scan.statement(first)?,
        }
    }
    Ok(scan.module)
}

struct Scan<'a> {
    lexer: Lexer<'a>,
    module: Module<'a>,
}

impl<'a> Scan<'a> {
    fn some(&mut self) -> Result<Token<'a>, Syntax> {
        self.lexer.token()?.ok_or(Syntax(self.lexer.line(), "the text ends too early"))
    }

    /// One item, and further ones after commas.
    fn list(&mut self) -> Result<(), Syntax> {
        self.some()?;
        while self.lexer.clone().token()? == Some(Token::Mark(b',')) {
            self.lexer.token()?;
            self.some()?;
        }
        Ok(())
    }

    /// A section of debug information, up to its closing brace.
    fn section(&mut self) -> Result<(), Syntax> {
        while self.some()? != Token::Mark(b'{') {}
        self.body().map(drop)
    }

    /// What is in braces, up to the closing one, which ends it: the names in it.
    fn body(&mut self) -> Result<HashSet<&'a str>, Syntax> {
        let (mut depth, mut names) = (1, HashSet::new());
        while depth > 0 {
            match self.some()? {
                Token::Mark(b'{') => depth += 1,
                Token::Mark(b'}') => depth -= 1,
                Token::Word(word) if is_name(word) => drop(names.insert(word)),
                Token::Word(word @ (".global" | ".const")) => drop(names.insert(word)),
                _ => {}
            }
        }
        Ok(names)
    }

    /// A kernel, a function, or a declaration.
    fn statement(&mut self, first: Token<'a>) -> Result<(), Syntax> {
        let mut head = Head { start: self.lexer.span().start, ..Head::default() };
        let mut token = first;
        loop {
            let span = self.lexer.span();
            match token {
                Token::Mark(b'{') if head.depth == 0 && head.is_code() => {
                    let names = self.body()?;
                    self.code(head, span.end..self.lexer.span().start, names);
                    return Ok(());
                }
                Token::Mark(b';') if head.depth == 0 => {
                    if !head.is_code() {
                        self.declared(head, span.end);
                    }
                    return Ok(());
                }
                token => head.take(token, span),
            }
            token = self.some()?;
        }
    }

    fn code(&mut self, head: Head<'a>, body: Range<usize>, names: HashSet<&'a str>) {
        let Some((name, named)) = head.code else { return };
        if head.is_kernel {
            let (params, has_cluster) = (head.params, head.has_cluster);
            let all = head.start..body.end + 1;
            let kernel = Kernel { name, named, params, all, body, has_cluster, names };
            self.module.kernels.push(kernel);
        } else {
            self.module.functions.entry(name).or_default().extend(names);
            self.module.bodies.push((name, body));
        }
    }

    fn declared(&mut self, head: Head<'a>, end: usize) {
        // Each block has its own variables in shared memory, whichever module they are in.
        if head.is_shared && !head.is_lasting {
            self.module.shared.push((head.start..end, head.names));
            return;
        }
        self.module.variables.extend(&head.names);
        self.module.has_nameless |= head.has_nameless;
    }
}

/// What is known of a statement before its body or its end.
#[derive(Default)]
struct Head<'a> {
    /// Where it begins.
    start: usize,
    /// Parentheses, brackets and braces that are open.
    depth: u32,
    has_entry: bool,
    has_func: bool,
    /// The name of a kernel or function, and where it is.
    code: Option<(&'a str, Range<usize>)>,
    is_kernel: bool,
    params: Option<(usize, bool)>,
    has_cluster: bool,
    is_shared: bool,
    is_lasting: bool,
    has_nameless: bool,
    /// Behind an `=`: what follows is a value.
    is_value: bool,
    /// The parentheses that are open are the parameters, and something is in them.
    in_params: Option<bool>,
    names: Vec<&'a str>,
}

impl<'a> Head<'a> {
    fn is_code(&self) -> bool {
        self.has_entry || self.has_func
    }

    fn take(&mut self, token: Token<'a>, span: Range<usize>) {
        match token {
            Token::Mark(b'(' | b'[' | b'{') => {
                if self.depth == 0 && self.code.is_some() && self.params.is_none() {
                    self.in_params = Some(false);
                }
                self.depth += 1;
                return;
            }
            Token::Mark(b')' | b']' | b'}') => {
                self.depth = self.depth.saturating_sub(1);
                if self.depth == 0
                    && let Some(any) = self.in_params.take()
                {
                    self.params = Some((span.start, any));
                }
                return;
            }
            _ => {}
        }
        if let Some(any) = &mut self.in_params {
            *any = true;
        }
        if self.depth == 0 {
            self.take_outside(token, span);
        }
    }

    /// Outside of all parentheses.
    fn take_outside(&mut self, token: Token<'a>, span: Range<usize>) {
        match token {
            Token::Mark(b'=') => self.is_value = true,
            Token::Mark(b',') => self.is_value = false,
            Token::Mark(b'<') => self.has_nameless = true,
            Token::Word(".entry") => (self.has_entry, self.is_kernel) = (true, true),
            Token::Word(".func") => self.has_func = true,
            Token::Word(".shared") => self.is_shared = true,
            Token::Word(".global" | ".const" | ".tex") => self.is_lasting = true,
            Token::Word(word) if word.starts_with('.') => {
                self.has_cluster |= word.contains("cluster")
            }
            Token::Word(word) if is_name(word) && !self.is_value => {
                if self.is_code() && self.code.is_none() {
                    self.code = Some((word, span));
                }
                self.names.push(word);
            }
            _ => {}
        }
    }
}

/// Whether a word may be the name of something that the module declares.
fn is_name(word: &str) -> bool {
    !word.contains('.') && !word.starts_with(|c: char| c.is_ascii_digit())
}
