//! Linking: several pieces of PTX to one.
//!
//! Names that a piece keeps to itself get another name where pieces would collide; declarations of
//! variables that another piece defines are left out; of several weak definitions the first stays.
//! The result is PTX text. What it leaves undefined is found when it is loaded.

use std::collections::{BTreeMap, HashMap, HashSet};
use std::ops::Range;

use super::diagnostic::{Diagnostic, DiagnosticKind, Position};
use super::lexer::{Kind, Token, tokens};

/// How a definition is seen by other pieces.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Linkage {
    Own,
    Visible,
    Weak,
    /// Declared here, defined elsewhere.
    Extern,
}

/// A function or a variable at module scope.
struct Symbol<'a> {
    name: &'a str,
    position: Position,
    linkage: Linkage,
    is_variable: bool,
    is_definition: bool,
    /// All of its statement in the source.
    place: Range<usize>,
    /// Where the body of a kernel begins.
    body: Option<usize>,
}

struct Unit<'a> {
    source: &'a str,
    tokens: Vec<Token<'a>>,
    symbols: Vec<Symbol<'a>>,
    version: (u32, u32),
    target: &'a str,
    /// The directives that the result has once.
    header: Vec<Range<usize>>,
}

/// Links pieces of PTX. `most_registers` is what a thread of each kernel may have at most.
///
/// # Errors
/// A piece that is not PTX as far as that matters here, and names that two pieces define; the
/// number of the piece, from 0, and what is wrong in it.
pub fn link(sources: &[&str], most_registers: Option<u32>) -> Result<String, (usize, Diagnostic)> {
    let mut units = Vec::new();
    for (index, source) in sources.iter().enumerate() {
        units.push(Unit::read(source).map_err(|fault| (index, fault))?);
    }
    let defined = definitions(&units)?;
    let version = units.iter().map(|unit| unit.version).max().unwrap_or((7, 0));
    let number = |unit: &&Unit<'_>| {
        unit.target.trim_start_matches("sm_").trim_end_matches(['a', 'f']).parse().unwrap_or(0)
    };
    let target = units.iter().max_by_key(|unit| number(unit) as u32).map_or("sm_50", |u| u.target);
    let mut result =
        format!(".version {}.{}\n.target {target}\n.address_size 64\n", version.0, version.1);
    let mut uses: HashMap<&str, usize> = HashMap::new();
    for unit in &units {
        let names: HashSet<&str> = unit.symbols.iter().map(|symbol| symbol.name).collect();
        for name in names {
            *uses.entry(name).or_default() += 1;
        }
    }
    let mut declared = HashSet::new();
    for (index, unit) in units.iter().enumerate() {
        result.push_str(&unit.text(index, &defined, &uses, &mut declared, most_registers));
        result.push('\n');
    }
    Ok(result)
}

/// The first piece that declares a name which `fault`, said of what they were linked to, has between backquotes and no
/// piece defines; and that name.
pub fn undefined<'a>(sources: &[&'a str], fault: &str) -> Option<(usize, &'a str)> {
    let units: Option<Vec<_>> = sources.iter().map(|source| Unit::read(source).ok()).collect();
    let units = units?;
    let defined = definitions(&units).ok()?;
    units.iter().enumerate().find_map(|(index, unit)| {
        let declared = unit.symbols.iter().filter(|symbol| symbol.linkage == Linkage::Extern);
        let name = declared
            .map(|symbol| symbol.name)
            .find(|name| !defined.contains_key(name) && fault.contains(&format!("`{name}`")))?;
        Some((index, name))
    })
}

/// The piece that defines each name that others see.
fn definitions<'a>(units: &[Unit<'a>]) -> Result<BTreeMap<&'a str, usize>, (usize, Diagnostic)> {
    let mut defined: BTreeMap<&str, (usize, Linkage)> = BTreeMap::new();
    for (index, unit) in units.iter().enumerate() {
        for symbol in unit.symbols.iter().filter(|symbol| symbol.is_definition) {
            if !matches!(symbol.linkage, Linkage::Visible | Linkage::Weak) {
                continue;
            }
            match defined.get(symbol.name) {
                Some((other, Linkage::Visible)) if symbol.linkage == Linkage::Visible => {
                    let message = format!("`{}` is defined twice, also in {other}", symbol.name);
                    let fault = symbol.position.fault(DiagnosticKind::Redefined, message);
                    return Err((index, fault));
                }
                Some((_, Linkage::Visible)) => {}
                Some(_) if symbol.linkage == Linkage::Weak => {}
                _ => {
                    defined.insert(symbol.name, (index, symbol.linkage));
                }
            }
        }
    }
    Ok(defined.into_iter().map(|(name, (index, _))| (name, index)).collect())
}

impl<'a> Unit<'a> {
    fn read(source: &'a str) -> Result<Unit<'a>, Diagnostic> {
        let mut reader = Reader { source, tokens: tokens(source)?, at: 0 };
        let mut unit = Unit {
            source,
            tokens: Vec::new(),
            symbols: Vec::new(),
            version: (0, 0),
            target: "",
            header: Vec::new(),
        };
        while reader.peek().kind != Kind::End {
            reader.statement(&mut unit)?;
        }
        if unit.version == (0, 0) || unit.target.is_empty() {
            return Err(Position { line: 1, column: 1 }.syntax("expected `.version` and `.target`"));
        }
        unit.tokens = reader.tokens;
        Ok(unit)
    }

    /// The text without what belongs to the whole, with other names where they collide.
    fn text(
        &self,
        index: usize,
        defined: &BTreeMap<&str, usize>,
        uses: &HashMap<&str, usize>,
        declared: &mut HashSet<&'a str>,
        most_registers: Option<u32>,
    ) -> String {
        let mut changes: BTreeMap<usize, (usize, String)> = BTreeMap::new();
        let mut leave_out = |place: &Range<usize>| {
            changes.insert(place.start, (place.end, String::new()));
        };
        self.header.iter().for_each(&mut leave_out);
        for symbol in &self.symbols {
            let elsewhere = defined.get(symbol.name).is_some_and(|unit| *unit != index);
            let superfluous = match symbol.linkage {
                Linkage::Weak => symbol.is_definition,
                Linkage::Extern => symbol.is_variable,
                _ => false,
            };
            // What nobody defines (dynamic shared memory) is declared once.
            let again =
                superfluous && symbol.linkage == Linkage::Extern && !declared.insert(symbol.name);
            if again || elsewhere && superfluous {
                leave_out(&symbol.place);
            }
        }
        if let Some(most) = most_registers {
            let bodies = self.symbols.iter().filter_map(|symbol| symbol.body);
            changes.extend(bodies.map(|body| (body, (body, format!(".maxnreg {most}\n")))));
        }
        let own = self.symbols.iter().filter(|symbol| symbol.linkage == Linkage::Own);
        let collide: HashSet<&str> =
            own.map(|symbol| symbol.name).filter(|name| uses.get(name) > Some(&1)).collect();
        for token in &self.tokens {
            if token.kind == Kind::Name && collide.contains(token.text) {
                let start = offset(self.source, token.text);
                let name = format!("{}$link{index}", token.text);
                changes.entry(start).or_insert((start + token.text.len(), name));
            }
        }
        let mut text = String::with_capacity(self.source.len());
        let mut done = 0;
        for (start, (end, new)) in changes {
            if start < done {
                continue; // inside of what was left out
            }
            text.push_str(&self.source[done..start]);
            text.push_str(&new);
            done = end;
        }
        text.push_str(self.source[done..].trim_end_matches('\0'));
        text
    }
}

/// Where a part of a text begins in it.
fn offset(source: &str, part: &str) -> usize {
    part.as_ptr() as usize - source.as_ptr() as usize
}

struct Reader<'a> {
    source: &'a str,
    tokens: Vec<Token<'a>>,
    at: usize,
}

impl<'a> Reader<'a> {
    fn peek(&self) -> Token<'a> {
        self.tokens[self.at.min(self.tokens.len() - 1)]
    }

    /// The offset of the next token; a dot belongs to it.
    fn start(&self) -> usize {
        let token = self.peek();
        match token.kind {
            Kind::End => self.source.len(),
            Kind::Dot => offset(self.source, token.text) - 1,
            _ => offset(self.source, token.text),
        }
    }

    fn is_mark(&self, mark: u8) -> bool {
        self.peek().kind == Kind::Mark(mark)
    }

    /// Skips from an opening bracket to behind the one that closes it.
    fn skip_group(&mut self) -> Result<(), Diagnostic> {
        let begin = self.peek().position;
        let mut depth = 0_u32;
        loop {
            match self.peek().kind {
                Kind::Mark(b'(' | b'{' | b'[') => depth += 1,
                Kind::Mark(b')' | b'}' | b']') => depth = depth.saturating_sub(1),
                Kind::End => return Err(begin.syntax("a bracket that is not closed")),
                _ => {}
            }
            self.at += 1;
            if depth == 0 {
                return Ok(());
            }
        }
    }

    fn skip_line(&mut self) {
        let line = self.peek().position.line;
        while self.peek().kind != Kind::End && self.peek().position.line == line {
            self.at += 1;
        }
    }

    fn statement(&mut self, unit: &mut Unit<'a>) -> Result<(), Diagnostic> {
        let (begin, first) = (self.start(), self.peek());
        match (first.kind, first.text) {
            (Kind::Dot, "version") => {
                self.at += 1;
                let mut parts = self.peek().text.split('.').map(str::parse::<u32>);
                if let (Some(Ok(major)), Some(Ok(minor))) = (parts.next(), parts.next()) {
                    unit.version = (major, minor);
                }
                self.at += 1;
            }
            (Kind::Dot, "target") => {
                self.at += 1;
                unit.target = self.peek().text;
                self.at += 1;
                while self.is_mark(b',') {
                    self.at += 2;
                }
            }
            (Kind::Dot, "address_size") => self.at += 2,
            (Kind::Dot, "file" | "loc") => {
                self.skip_line();
                return Ok(());
            }
            (Kind::Dot, "section") => {
                while !self.is_mark(b'{') && self.peek().kind != Kind::End {
                    self.at += 1;
                }
                return self.skip_group();
            }
            _ => return self.symbol(unit),
        }
        unit.header.push(begin..self.start());
        Ok(())
    }

    /// A function or variables, or a directive without a name, up to its end.
    fn symbol(&mut self, unit: &mut Unit<'a>) -> Result<(), Diagnostic> {
        let begin = self.start();
        let first = unit.symbols.len();
        let mut linkage = Linkage::Own;
        let mut is_variable = false;
        let mut is_named = false;
        let mut is_definition = true;
        let (mut is_entry, mut body) = (false, None);
        loop {
            let token = self.peek();
            match (token.kind, token.text) {
                (Kind::Dot, "visible") => linkage = Linkage::Visible,
                (Kind::Dot, "weak" | "common") => linkage = Linkage::Weak,
                (Kind::Dot, "extern") => linkage = Linkage::Extern,
                (Kind::Dot, "entry") => is_entry = true,
                (Kind::Dot, "global" | "const" | "shared") => is_variable = true,
                (Kind::Mark(b'{'), _) => {
                    body = is_entry.then(|| self.start());
                    self.skip_group()?;
                    // The end of a function; the value of a variable goes on.
                    if !is_variable {
                        break;
                    }
                    continue;
                }
                (Kind::Mark(b'(' | b'['), _) => {
                    self.skip_group()?;
                    continue;
                }
                (Kind::Mark(b';'), _) => {
                    self.at += 1;
                    is_definition = is_variable;
                    break;
                }
                (Kind::Mark(b'='), _) => is_named = true,
                (Kind::Mark(b','), _) if is_variable => is_named = false,
                (Kind::End, _) => break,
                (Kind::Name, name) if !is_named => {
                    is_named = true;
                    unit.symbols.push(Symbol {
                        name,
                        position: token.position,
                        linkage,
                        is_variable,
                        is_definition: true,
                        place: begin..begin,
                        body: None,
                    });
                }
                _ => {}
            }
            self.at += 1;
        }
        let end = self.start();
        for symbol in &mut unit.symbols[first..] {
            symbol.place = begin..end;
            symbol.body = body;
            symbol.is_definition = is_definition && linkage != Linkage::Extern;
        }
        Ok(())
    }
}
