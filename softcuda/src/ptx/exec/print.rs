//! `printf` and `assert` of kernels.

use super::block::Room;
use super::context::{Fault, Step};
use super::warp::Warp;
use crate::ptx::ast::Space;
use std::io::Write;

/// The longest string a kernel may print, in bytes.
const LONGEST: usize = 64 << 10;

impl Warp<'_> {
    /// A parameter of a call that has no code.
    fn argument(&mut self, room: &mut Room<'_>, lane: usize, site: u32, index: usize) -> Step<u64> {
        let slot = self.code.calls[site as usize].args[index];
        let size = if slot.size == 8 { 8 } else { 4 };
        let address = self.frame_address(slot.offset);
        self.peek(room, Space::Generic, lane, address, size)
    }

    fn string(&mut self, room: &mut Room<'_>, lane: usize, address: u64) -> Step<Vec<u8>> {
        let mut text = Vec::new();
        while text.len() < LONGEST {
            let at = address.wrapping_add(text.len() as u64);
            match self.peek(room, Space::Generic, lane, at, 1)? as u8 {
                0 => break,
                byte => text.push(byte),
            }
        }
        Ok(text)
    }

    pub(super) fn assertion(&mut self, room: &mut Room<'_>, mask: u32, site: u32) -> Fault {
        let lane = mask.trailing_zeros() as usize;
        let mut read = || -> Step<String> {
            let expression = self.argument(room, lane, site, 0)?;
            let expression = self.string(room, lane, expression)?;
            let file = self.argument(room, lane, site, 1)?;
            let file = self.string(room, lane, file)?;
            let line = self.argument(room, lane, site, 2)?;
            let shown = String::from_utf8_lossy(&expression);
            Ok(format!("{shown} ({}:{line})", String::from_utf8_lossy(&file)))
        };
        match read() {
            Ok(message) => Fault::Assert(message),
            Err(fault) => fault,
        }
    }

    pub(super) fn print(&mut self, room: &mut Room<'_>, mask: u32, site: u32) -> Step<()> {
        let mut rest = mask;
        while rest != 0 {
            let lane = rest.trailing_zeros() as usize;
            rest &= rest - 1;
            let format = self.argument(room, lane, site, 0)?;
            let values = self.argument(room, lane, site, 1)?;
            let format = self.string(room, lane, format)?;
            let (text, count) = self.formatted(room, lane, &format, values)?;
            (room.context.launch.print)(&text);
            if let Some(result) = self.code.calls[site as usize].returns.first() {
                let address = self.frame_address(result.offset);
                self.poke(room, Space::Generic, lane, (address, 4), count)?;
            }
        }
        Ok(())
    }

    /// The text, and the number of arguments.
    fn formatted(
        &mut self,
        room: &mut Room<'_>,
        lane: usize,
        format: &[u8],
        values: u64,
    ) -> Step<(Vec<u8>, u64)> {
        let mut text = Vec::new();
        let mut at = values;
        let mut count = 0;
        let mut bytes = format.iter().copied().peekable();
        while let Some(byte) = bytes.next() {
            if byte != b'%' {
                text.push(byte);
                continue;
            }
            let mut spec = Spec::default();
            while let Some(flag) = bytes.next_if(|c| b"-+ #0".contains(c)) {
                spec.flag(flag);
            }
            spec.width = self.count(room, lane, &mut bytes, &mut at)?.unwrap_or(0) as usize;
            if bytes.next_if_eq(&b'.').is_some() {
                let precision = self.count(room, lane, &mut bytes, &mut at)?.unwrap_or(0);
                spec.precision = Some(precision.min(512) as usize);
            }
            let mut long = false;
            while let Some(length) = bytes.next_if(|c| b"lhzjt".contains(c)) {
                long |= length != b'h';
            }
            let Some(conversion) = bytes.next() else { break };
            if conversion == b'%' {
                text.push(b'%');
                continue;
            }
            count += 1;
            let size = if long || b"fFeEgGaAsp".contains(&conversion) { 8 } else { 4 };
            let value = self.next_value(room, lane, &mut at, size)?;
            let body = match conversion {
                b's' => {
                    let string = self.string(room, lane, value)?;
                    let kept = spec.precision.unwrap_or(usize::MAX).min(string.len());
                    String::from_utf8_lossy(&string[..kept]).into_owned()
                }
                b'c' => char::from(value as u8).to_string(),
                b'd' | b'i' => {
                    let value = if size == 4 { i64::from(value as i32) } else { value as i64 };
                    spec.signed(spec.digits(value.unsigned_abs().to_string()), value < 0)
                }
                b'u' => spec.digits(value.to_string()),
                b'x' => spec.prefixed("0x", spec.digits(format!("{value:x}"))),
                b'X' => spec.prefixed("0X", spec.digits(format!("{value:X}"))),
                b'o' => spec.prefixed("0", spec.digits(format!("{value:o}"))),
                b'p' => format!("0x{value:x}"),
                _ => spec.float(f64::from_bits(value), conversion),
            };
            spec.pad(&mut text, &body, b"sc".contains(&conversion));
        }
        Ok((text, count))
    }

    fn next_value(
        &mut self,
        room: &mut Room<'_>,
        lane: usize,
        at: &mut u64,
        size: u8,
    ) -> Step<u64> {
        let mask = u64::from(size) - 1;
        let address = at.wrapping_add(mask) & !mask;
        *at = address.wrapping_add(u64::from(size));
        self.peek(room, Space::Generic, lane, address, size)
    }

    /// A width or precision: digits, or `*` for an argument.
    fn count(
        &mut self,
        room: &mut Room<'_>,
        lane: usize,
        bytes: &mut std::iter::Peekable<impl Iterator<Item = u8>>,
        at: &mut u64,
    ) -> Step<Option<u64>> {
        if bytes.next_if_eq(&b'*').is_some() {
            return Ok(Some(self.next_value(room, lane, at, 4)?.min(4096)));
        }
        let mut value = None;
        while let Some(digit) = bytes.next_if(u8::is_ascii_digit) {
            value = Some((value.unwrap_or(0) * 10 + u64::from(digit - b'0')).min(4096));
        }
        Ok(value)
    }
}

/// One conversion's flags.
#[derive(Default)]
struct Spec {
    left: bool,
    plus: bool,
    space: bool,
    alternate: bool,
    zero: bool,
    width: usize,
    precision: Option<usize>,
}

impl Spec {
    fn flag(&mut self, flag: u8) {
        match flag {
            b'-' => self.left = true,
            b'+' => self.plus = true,
            b' ' => self.space = true,
            b'#' => self.alternate = true,
            _ => self.zero = true,
        }
    }

    /// At least as many digits as the precision asks for.
    fn digits(&self, digits: String) -> String {
        let least = self.precision.unwrap_or(1);
        format!("{}{digits}", "0".repeat(least.saturating_sub(digits.len())))
    }

    fn prefixed(&self, prefix: &str, digits: String) -> String {
        if self.alternate && digits != "0" { format!("{prefix}{digits}") } else { digits }
    }

    fn signed(&self, magnitude: String, negative: bool) -> String {
        let sign = match (negative, self.plus, self.space) {
            (true, _, _) => "-",
            (false, true, _) => "+",
            (false, false, true) => " ",
            _ => "",
        };
        format!("{sign}{magnitude}")
    }

    fn float(&self, value: f64, conversion: u8) -> String {
        let precision = self.precision.unwrap_or(6);
        let magnitude = value.abs();
        let text = if magnitude.is_nan() {
            "nan".to_owned()
        } else if magnitude.is_infinite() {
            "inf".to_owned()
        } else {
            match conversion | 0x20 {
                b'e' => exponential(magnitude, precision),
                b'g' => self.general(magnitude, precision.max(1)),
                _ => format!("{magnitude:.precision$}"),
            }
        };
        let text = if conversion.is_ascii_uppercase() { text.to_uppercase() } else { text };
        self.signed(text, value.is_sign_negative() && !value.is_nan())
    }

    fn general(&self, magnitude: f64, precision: usize) -> String {
        let scientific = exponential(magnitude, precision - 1);
        let exponent: i32 =
            scientific.split_once('e').and_then(|(_, e)| e.parse().ok()).unwrap_or(0);
        let fixed = exponent >= -4 && exponent < precision as i32;
        let text = if fixed {
            let places = (precision as i32 - 1 - exponent).max(0) as usize;
            format!("{magnitude:.places$}")
        } else {
            scientific
        };
        if self.alternate || !text.contains('.') {
            return text;
        }
        let (mantissa, exponent) = match text.split_once('e') {
            Some((mantissa, exponent)) => (mantissa.to_owned(), format!("e{exponent}")),
            None => (text, String::new()),
        };
        let mantissa = mantissa.trim_end_matches('0').trim_end_matches('.');
        format!("{mantissa}{exponent}")
    }

    fn pad(&self, into: &mut Vec<u8>, body: &str, is_text: bool) {
        let missing = self.width.saturating_sub(body.len());
        // Writing to a vector does not fail.
        let _ = if self.left {
            write!(into, "{body}{}", " ".repeat(missing))
        } else if self.zero && !is_text {
            let digits = body.find(|c: char| c.is_ascii_hexdigit()).unwrap_or(0);
            let (sign, digits) = body.split_at(digits);
            write!(into, "{sign}{}{digits}", "0".repeat(missing))
        } else {
            write!(into, "{}{body}", " ".repeat(missing))
        };
    }
}

/// C's `%e`: at least two digits of exponent, with a sign.
fn exponential(magnitude: f64, precision: usize) -> String {
    let text = format!("{magnitude:.precision$e}");
    match text.split_once('e') {
        Some((mantissa, exponent)) => {
            let value: i32 = exponent.parse().unwrap_or(0);
            let sign = if value < 0 { '-' } else { '+' };
            format!("{mantissa}e{sign}{:02}", value.abs())
        }
        None => text,
    }
}
