//! PTX text to tokens.

use super::diagnostic::{Diagnostic, Position};

#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) enum Kind {
    /// A name: an opcode, a register, a label, a variable.
    Name,
    /// A name that follows a dot (the text is without the dot): a directive or a modifier.
    Dot,
    /// An integer; negative values are written with a separate `-`.
    Integer(u64),
    /// A decimal floating-point number.
    Decimal(f64),
    /// `0f` and eight digits: the bits of a single.
    Single(u32),
    /// `0d` and sixteen digits: the bits of a double.
    Double(u64),
    /// A quoted string; the text is without the quotes.
    Text,
    /// One character of punctuation.
    Mark(u8),
    /// The end of the source.
    End,
}

#[derive(Debug, Clone, Copy)]
pub(crate) struct Token<'a> {
    pub(crate) kind: Kind,
    pub(crate) text: &'a str,
    pub(crate) position: Position,
}

fn name_start(c: u8) -> bool {
    c.is_ascii_alphabetic() || matches!(c, b'_' | b'$' | b'%')
}

fn name_part(c: u8) -> bool {
    c.is_ascii_alphanumeric() || matches!(c, b'_' | b'$')
}

/// All tokens of `source`, ended by one [`Kind::End`].
///
/// # Errors
/// The text has something that is no token of PTX, or a comment without an end; the diagnostic says where.
pub(crate) fn tokens(source: &str) -> Result<Vec<Token<'_>>, Diagnostic> {
    let mut lexer = Lexer { source, at: 0, line: 1, line_start: 0 };
    let mut found = Vec::with_capacity(source.len() / 4);
    loop {
        let token = lexer.next()?;
        found.push(token);
        if token.kind == Kind::End {
            return Ok(found);
        }
    }
}

struct Lexer<'a> {
    source: &'a str,
    at: usize,
    line: u32,
    line_start: usize,
}

impl<'a> Lexer<'a> {
    fn peek(&self, ahead: usize) -> u8 {
        self.source.as_bytes().get(self.at + ahead).copied().unwrap_or(0)
    }

    fn position(&self) -> Position {
        let column = u32::try_from(self.at - self.line_start + 1).unwrap_or(u32::MAX);
        Position { line: self.line, column }
    }

    fn skip_blank(&mut self) -> Result<(), Diagnostic> {
        while self.at < self.source.len() {
            match self.peek(0) {
                b'\n' => {
                    self.at += 1;
                    self.line += 1;
                    self.line_start = self.at;
                }
                b' ' | b'\t' | b'\r' | 0x0c => self.at += 1,
                b'/' if self.peek(1) == b'/' => {
                    while self.at < self.source.len() && self.peek(0) != b'\n' {
                        self.at += 1;
                    }
                }
                b'/' if self.peek(1) == b'*' => {
                    let start = self.position();
                    self.at += 2;
                    loop {
                        if self.at >= self.source.len() {
                            return Err(start.syntax("unterminated comment"));
                        }
                        match self.peek(0) {
                            b'*' if self.peek(1) == b'/' => break,
                            b'\n' => {
                                self.at += 1;
                                self.line += 1;
                                self.line_start = self.at;
                            }
                            _ => self.at += 1,
                        }
                    }
                    self.at += 2;
                }
                // Drivers take PTX with its terminating zero included.
                0 if self.source.as_bytes()[self.at..].iter().all(|&c| c == 0) => {
                    self.at = self.source.len();
                }
                _ => return Ok(()),
            }
        }
        Ok(())
    }

    fn take_while(&mut self, accept: impl Fn(u8) -> bool) -> &'a str {
        let start = self.at;
        while self.at < self.source.len() && accept(self.peek(0)) {
            self.at += 1;
        }
        // Every accepted byte is ASCII, so both ends are character boundaries.
        &self.source[start..self.at]
    }

    fn next(&mut self) -> Result<Token<'a>, Diagnostic> {
        self.skip_blank()?;
        let position = self.position();
        if self.at >= self.source.len() {
            return Ok(Token { kind: Kind::End, text: "", position });
        }
        let c = self.peek(0);
        let start = self.at;
        let kind;
        let text;
        if name_start(c) {
            self.at += 1;
            self.take_while(name_part);
            text = &self.source[start..self.at];
            kind = Kind::Name;
        } else if c == b'.' && (name_part(self.peek(1))) {
            self.at += 1;
            let name = self.at;
            self.take_while(name_part);
            while self.peek(0) == b':' && self.peek(1) == b':' && name_part(self.peek(2)) {
                self.at += 2;
                self.take_while(name_part);
            }
            text = &self.source[name..self.at];
            kind = Kind::Dot;
        } else if c.is_ascii_digit() {
            kind = self.number(position)?;
            text = &self.source[start..self.at];
        } else if c == b'"' {
            self.at += 1;
            while self.at < self.source.len() && !matches!(self.peek(0), b'"' | b'\n') {
                self.at += if self.peek(0) == b'\\' && self.peek(1) == b'"' { 2 } else { 1 };
            }
            if self.peek(0) != b'"' {
                return Err(position.syntax("unterminated string"));
            }
            text = &self.source[start + 1..self.at];
            self.at += 1;
            kind = Kind::Text;
        } else if b",;:(){}[]<>+-*/|!@=~&^?".contains(&c) {
            self.at += 1;
            text = &self.source[start..self.at];
            kind = Kind::Mark(c);
        } else {
            let shown = self.source[start..].chars().next().unwrap_or(' ');
            return Err(position.syntax(format!("unexpected character {shown:?}")));
        }
        Ok(Token { kind, text, position })
    }

    fn number(&mut self, position: Position) -> Result<Kind, Diagnostic> {
        let bad = |what: &str| position.syntax(format!("{what} is not a number"));
        let marker = if self.peek(0) == b'0' { self.peek(1) | 0x20 } else { 0 };
        match marker {
            b'f' | b'd' => {
                self.at += 2;
                let digits = self.take_while(|c| c.is_ascii_alphanumeric());
                let width = if marker == b'f' { 8 } else { 16 };
                let bits = u64::from_str_radix(digits, 16).map_err(|_| bad(digits))?;
                if digits.len() != width {
                    return Err(position.syntax(format!("expected {width} digits")));
                }
                Ok(if marker == b'f' { Kind::Single(bits as u32) } else { Kind::Double(bits) })
            }
            b'x' | b'b' => {
                self.at += 2;
                let digits = self.take_while(|c| c.is_ascii_alphanumeric());
                let digits = digits.strip_suffix(['U', 'u']).unwrap_or(digits);
                let radix = if marker == b'x' { 16 } else { 2 };
                u64::from_str_radix(digits, radix).map(Kind::Integer).map_err(|_| bad(digits))
            }
            _ => {
                let start = self.at;
                self.take_while(|c| c.is_ascii_digit());
                let mut decimal = false;
                if self.peek(0) == b'.' && self.peek(1).is_ascii_digit() {
                    decimal = true;
                    self.at += 1;
                    self.take_while(|c| c.is_ascii_digit());
                }
                let sign = usize::from(matches!(self.peek(1), b'+' | b'-'));
                if self.peek(0) | 0x20 == b'e' && self.peek(1 + sign).is_ascii_digit() {
                    decimal = true;
                    self.at += 1 + sign;
                    self.take_while(|c| c.is_ascii_digit());
                }
                let text = &self.source[start..self.at];
                if decimal {
                    return text.parse().map(Kind::Decimal).map_err(|_| bad(text));
                }
                if self.peek(0) | 0x20 == b'u' {
                    self.at += 1;
                }
                if name_part(self.peek(0)) {
                    return Err(bad(&format!("{text}{}", char::from(self.peek(0)))));
                }
                let octal = text.len() > 1 && text.starts_with('0');
                u64::from_str_radix(text, if octal { 8 } else { 10 })
                    .map(Kind::Integer)
                    .map_err(|_| bad(text))
            }
        }
    }
}
