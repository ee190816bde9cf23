//! PTX text to tokens. Opcodes, directives and type names keep their dots: `ld.global.u64` is one
//! word. The grammar is that of NVIDIA's "Parallel Thread Execution ISA", chapter "Syntax".

use std::fmt;
use std::ops::Range;

/// A line that the grammar does not allow, and why.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Syntax(pub u32, pub &'static str);

impl fmt::Display for Syntax {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "PTX, line {}: {}", self.0, self.1)
    }
}

impl std::error::Error for Syntax {}

/// What a text is made of.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Token<'a> {
    /// A name, a number, a directive or an opcode.
    Word(&'a str),
    /// A quoted string.
    Text,
    /// One character of punctuation.
    Mark(u8),
}

/// Hands out tokens one by one: no list of them is ever held, however long the text.
#[derive(Debug, Clone)]
pub struct Lexer<'a> {
    text: &'a str,
    /// Where the last token begins.
    start: usize,
    /// Where it ends.
    at: usize,
    line: u32,
}

fn word_part(c: u8) -> bool {
    c.is_ascii_alphanumeric() || matches!(c, b'_' | b'$' | b'%' | b'.')
}

impl<'a> Lexer<'a> {
    /// Begins at the first token of a text.
    pub fn new(text: &'a str) -> Lexer<'a> {
        Lexer { text, start: 0, at: 0, line: 1 }
    }

    /// The line of the next token, or of what stands before it.
    pub fn line(&self) -> u32 {
        self.line
    }

    /// Where the last token is in the text.
    pub fn span(&self) -> Range<usize> {
        self.start..self.at
    }

    /// Leaves out the rest of this line.
    pub fn skip_line(&mut self) {
        while !matches!(self.byte(0), 0 | b'\n') {
            self.at += 1;
        }
    }

    /// The next token, or `None` at the end.
    ///
    /// # Errors
    /// A string or a comment has no end, or there is something that is no token.
    pub fn token(&mut self) -> Result<Option<Token<'a>>, Syntax> {
        self.skip_blank()?;
        let start = self.at;
        self.start = start;
        let c = self.byte(0);
        if start == self.text.len() {
            return Ok(None);
        }
        if word_part(c) {
            while word_part(self.byte(0)) || self.double_colon() {
                self.at += if self.byte(0) == b':' { 2 } else { 1 };
            }
            return Ok(Some(Token::Word(&self.text[start..self.at])));
        }
        self.at += 1;
        if c == b'"' {
            while !matches!(self.byte(0), 0 | b'"') {
                // What is escaped may be a quote.
                self.at += if self.byte(0) == b'\\' && self.byte(1) != 0 { 2 } else { 1 };
            }
            if self.byte(0) == 0 {
                return Err(Syntax(self.line, "a string has no end"));
            }
            self.at += 1;
            return Ok(Some(Token::Text));
        }
        if c.is_ascii_punctuation() {
            return Ok(Some(Token::Mark(c)));
        }
        Err(Syntax(self.line, "an unexpected character"))
    }

    /// A `::` inside a word, as in `shared::cluster`. A label ends in a single colon.
    fn double_colon(&self) -> bool {
        self.byte(0) == b':' && self.byte(1) == b':' && word_part(self.byte(2))
    }

    /// 0 beyond the end; a NUL in the text counts as its end, as the driver has it.
    fn byte(&self, ahead: usize) -> u8 {
        self.text.as_bytes().get(self.at + ahead).copied().unwrap_or(0)
    }

    fn skip_blank(&mut self) -> Result<(), Syntax> {
        loop {
            match (self.byte(0), self.byte(1)) {
                (0, _) => {
                    self.at = self.text.len();
                    return Ok(());
                }
                (b'/', b'/') => self.skip_line(),
                (b'/', b'*') => {
                    let Some(end) = self.text[self.at + 2..].find("*/") else {
                        return Err(Syntax(self.line, "a comment has no end"));
                    };
                    let comment = &self.text[self.at..self.at + 2 + end];
                    self.line += comment.bytes().filter(|c| *c == b'\n').count() as u32;
                    self.at += end + 4;
                }
                (b'\n', _) => {
                    self.line += 1;
                    self.at += 1;
                }
                (c, _) if c.is_ascii_whitespace() || c == 0x0b => self.at += 1,
                _ => return Ok(()),
            }
        }
    }
}
