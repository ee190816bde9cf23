//! Variables in shared memory.

use crate::inside::Inside;
use crate::lexer::{Lexer, Token};

/// More than a block can have, bytes.
const MOST_BYTES: u64 = 1 << 20;

/// A variable in shared memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Shared<'a> {
    pub(crate) name: &'a str,
    /// `None`: as many as the launch says.
    pub(crate) bytes: Option<u64>,
    pub(crate) align: u64,
}

/// What a declaration declares, from its first word up to its `;`.
pub(crate) fn declared(text: &str) -> Result<Vec<Shared<'_>>, Inside> {
    let mut lexer = Lexer::new(text);
    let mut token = || lexer.token().map_err(|_| Inside::Form);
    let (mut is_extern, mut align, mut vector, mut element) = (false, None, 1, None);
    let mut found: Vec<Shared<'_>> = Vec::new();
    let mut next = token()?;
    while let Some(now) = next {
        next = token()?;
        match now {
            Token::Mark(b';') => break,
            Token::Mark(b',') if !found.is_empty() => {}
            Token::Word(".shared" | ".visible" | ".weak") => {}
            Token::Word(".extern") => is_extern = true,
            Token::Word(".align") => {
                let Some(Token::Word(bytes)) = next else { return Err(Inside::Form) };
                align = Some(number(bytes)?);
                next = token()?;
            }
            Token::Word(".v2") => vector = 2,
            Token::Word(".v4") => vector = 4,
            Token::Word(ty) if ty.starts_with('.') => {
                element = Some(size(ty).ok_or(Inside::Form)?);
            }
            Token::Word(name) => {
                let element = element.ok_or(Inside::Form)? * vector;
                let mut bytes = Some(element);
                while next == Some(Token::Mark(b'[')) {
                    match token()? {
                        Some(Token::Mark(b']')) if is_extern => bytes = None,
                        Some(Token::Word(count)) => {
                            let count = number(count)?;
                            bytes = bytes.and_then(|bytes: u64| bytes.checked_mul(count));
                            if bytes.is_none_or(|bytes| bytes > MOST_BYTES)
                                || token()? != Some(Token::Mark(b']'))
                            {
                                return Err(Inside::Form);
                            }
                        }
                        _ => return Err(Inside::Form),
                    }
                    next = token()?;
                }
                // Where one is that another module declares is not known.
                if is_extern != bytes.is_none() {
                    return Err(Inside::Form);
                }
                found.push(Shared { name, bytes, align: align.unwrap_or(element) });
            }
            Token::Mark(_) | Token::Text => return Err(Inside::Form),
        }
    }
    Ok(found)
}

fn number(word: &str) -> Result<u64, Inside> {
    let parsed = match word.strip_prefix("0x") {
        Some(digits) => u64::from_str_radix(digits, 16),
        None => word.parse(),
    };
    parsed.map_err(|_| Inside::Form)
}

/// Bytes of a value of this type.
fn size(ty: &str) -> Option<u64> {
    Some(match ty {
        ".b8" | ".u8" | ".s8" => 1,
        ".b16" | ".u16" | ".s16" | ".f16" | ".bf16" => 2,
        ".b32" | ".u32" | ".s32" | ".f32" | ".f16x2" | ".bf16x2" => 4,
        ".b64" | ".u64" | ".s64" | ".f64" => 8,
        ".b128" => 16,
        _ => return None,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn declarations() {
        let of = |name, bytes, align| Shared { name, bytes, align };
        let read = |text| declared(text).map(|found| found[..].to_vec());
        assert_eq!(read(".shared .align 4 .b8 x[1024];"), Ok(vec![of("x", Some(1024), 4)]));
        assert_eq!(
            read(".visible .shared .v4 .f32 x[2][0x3], y; rest"),
            Ok(vec![of("x", Some(96), 16), of("y", Some(16), 16)])
        );
        assert_eq!(read(".extern .shared .align 16 .b8 x[];"), Ok(vec![of("x", None, 16)]));
        for other in [
            ".extern .shared .u32 x;",
            ".extern .shared .b8 x[4];",
            ".shared .b8 x[];",
            ".shared .b8 x[4294967296][4294967296];",
            ".shared .u32 x = 3;",
            ".shared .u32 x<4>;",
            ".shared .texref x;",
            ".shared x;",
            ".shared .attribute(.managed) .u32 x;",
            ".shared .b8 x[4",
        ] {
            assert_eq!(read(other), Err(Inside::Form), "{other}");
        }
    }
}
