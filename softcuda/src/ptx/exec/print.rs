//! Functions of CUDA's device runtime without code of their own: `printf`, `assert`, `cudaGraphSetConditional`.

use super::block::Room;
use super::context::{Fault, Step};
use super::warp::Warp;
use crate::ptx::ast::Space;
use std::ffi::{CStr, CString};

/// The longest string a kernel may print, in bytes.
const LONGEST: usize = 64 << 10;

impl Warp<'_> {
    /// A parameter of a call that has no code.
    pub(super) fn argument(
        &mut self,
        room: &mut Room<'_>,
        lane: usize,
        site: u32,
        index: usize,
    ) -> Step<u64> {
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

    /// `cudaGraphSetConditional`, for one lane after the other.
    pub(super) fn set_condition(&mut self, room: &mut Room<'_>, mask: u32, site: u32) -> Step<()> {
        let mut rest = mask;
        while rest != 0 {
            let lane = rest.trailing_zeros() as usize;
            rest &= rest - 1;
            let handle = self.argument(room, lane, site, 0)?;
            let value = self.argument(room, lane, site, 1)? as u32;
            if !(room.context.launch.set_condition)(handle, value) {
                return Err(Fault::Condition(handle));
            }
        }
        Ok(())
    }

    pub(super) fn print(&mut self, room: &mut Room<'_>, mask: u32, site: u32) -> Step<()> {
        let mut rest = mask;
        while rest != 0 {
            let lane = rest.trailing_zeros() as usize;
            rest &= rest - 1;
            let format = self.argument(room, lane, site, 0)?;
            let values = self.argument(room, lane, site, 1)?;
            // As the CUDA C++ Programming Guide has it, no text is -1.
            let mut count = u64::from(u32::MAX);
            if format != 0 {
                let format = self.string(room, lane, format)?;
                let mut arguments = Arguments { room: &mut *room, lane, at: values };
                let text = self.formatted(&mut arguments, &format, &mut count)?;
                let size = arguments.at.wrapping_sub(values) as usize;
                (room.context.launch.print)(&text, size);
            }
            if let Some(result) = self.code.calls[site as usize].returns.first() {
                let address = self.frame_address(result.offset);
                self.poke(room, Space::Generic, lane, (address, 4), count)?;
            }
        }
        Ok(())
    }

    /// The text; counts the arguments.
    fn formatted(
        &mut self,
        arguments: &mut Arguments<'_, '_>,
        format: &[u8],
        count: &mut u64,
    ) -> Step<Vec<u8>> {
        let mut text = Vec::new();
        let mut rest = format;
        *count = 0;
        while let Some(start) = rest.iter().position(|byte| *byte == b'%') {
            text.extend_from_slice(&rest[..start]);
            rest = &rest[start..];
            let Some((spec, length)) = Spec::read(rest) else {
                // What is no specifier is printed as it is.
                text.push(b'%');
                rest = &rest[1..];
                continue;
            };
            rest = &rest[length..];
            if spec.conversion == b'%' {
                text.push(b'%');
                continue;
            }
            let width = self.number(arguments, spec.width, count)?;
            let precision = self.number(arguments, spec.precision, count)?;
            *count += 1;
            let value = self.next_value(arguments, spec.size())?;
            let shown = Shown { spec: &spec, width, precision };
            if spec.conversion == b's' {
                let string = match value {
                    0 => b"(null)".to_vec(),
                    address => self.string(arguments.room, arguments.lane, address)?,
                };
                text.extend(shown.string(string));
            } else {
                text.extend(shown.value(value));
            }
            if text.len() > LONGEST {
                break;
            }
        }
        text.extend_from_slice(rest);
        Ok(text)
    }

    fn next_value(&mut self, arguments: &mut Arguments<'_, '_>, size: u8) -> Step<u64> {
        let step = u64::from(size);
        let address = arguments.at.wrapping_add(step - 1) & !(step - 1);
        arguments.at = address.wrapping_add(step);
        self.peek(arguments.room, Space::Generic, arguments.lane, address, size)
    }

    /// A width or a precision, which may be an argument.
    fn number(
        &mut self,
        arguments: &mut Arguments<'_, '_>,
        given: Given,
        count: &mut u64,
    ) -> Step<Option<i32>> {
        let most = MOST_PADDING;
        Ok(match given {
            Given::No => None,
            Given::Number(number) => Some(number),
            Given::Argument => {
                *count += 1;
                Some((self.next_value(arguments, 4)? as u32 as i32).clamp(-most, most))
            }
        })
    }
}

/// The longest width and precision.
const MOST_PADDING: i32 = 4096;

/// The arguments of one call, as far as they are read.
struct Arguments<'r, 'a> {
    room: &'r mut Room<'a>,
    lane: usize,
    at: u64,
}

#[derive(Clone, Copy)]
enum Given {
    No,
    Number(i32),
    Argument,
}

/// A conversion in a format.
struct Spec {
    flags: Vec<u8>,
    width: Given,
    precision: Given,
    /// Bytes of an integer.
    integer: u8,
    conversion: u8,
}

impl Spec {
    /// Reads one from its `%` on, and how long it is; none for what CUDA's `printf` does not know.
    fn read(text: &[u8]) -> Option<(Spec, usize)> {
        let mut at = 1;
        let mut flags = Vec::new();
        while let Some(flag) = text.get(at).filter(|c| b"-+ #0'".contains(c)) {
            if !flags.contains(flag) {
                flags.push(*flag);
            }
            at += 1;
        }
        let width = Self::number(text, &mut at);
        let mut precision = Given::No;
        if text.get(at) == Some(&b'.') {
            at += 1;
            precision = match Self::number(text, &mut at) {
                Given::No => Given::Number(0),
                given => given,
            };
        }
        let mut integer = 4;
        for (name, size) in [(&b"ll"[..], 8), (b"l", 8), (b"hh", 1), (b"h", 2)] {
            if text[at..].starts_with(name) {
                (integer, at) = (size, at + name.len());
                break;
            }
        }
        let conversion = *text.get(at).filter(|c| b"%cdiouxXpeEfFgGaAs".contains(c))?;
        Some((Spec { flags, width, precision, integer, conversion }, at + 1))
    }

    fn number(text: &[u8], at: &mut usize) -> Given {
        if text.get(*at) == Some(&b'*') {
            *at += 1;
            return Given::Argument;
        }
        let mut given = Given::No;
        while let Some(digit) = text.get(*at).filter(|c| c.is_ascii_digit()) {
            let so_far = if let Given::Number(number) = given { number } else { 0 };
            given = Given::Number((so_far * 10 + i32::from(digit - b'0')).min(MOST_PADDING));
            *at += 1;
        }
        given
    }

    /// Bytes of the argument. Integers shorter than `int` are passed as one.
    fn size(&self) -> u8 {
        match self.conversion {
            b'c' => 4,
            b'd' | b'i' | b'o' | b'u' | b'x' | b'X' => self.integer.max(4),
            _ => 8,
        }
    }
}

/// A conversion with its width and its precision. The host's C library formats, as it does for CUDA.
struct Shown<'s> {
    spec: &'s Spec,
    width: Option<i32>,
    precision: Option<i32>,
}

impl Shown<'_> {
    /// The conversion for the C library, with these letters at the end.
    fn format(&self, letters: &str) -> CString {
        let mut format = vec![b'%'];
        format.extend_from_slice(&self.spec.flags);
        if let Some(width) = self.width {
            format.extend_from_slice(width.to_string().as_bytes());
        }
        // A negative precision is none.
        if let Some(precision) = self.precision.filter(|precision| *precision >= 0) {
            format.extend_from_slice(format!(".{precision}").as_bytes());
        }
        format.extend_from_slice(letters.as_bytes());
        CString::new(format).unwrap_or_default()
    }

    fn value(&self, value: u64) -> Vec<u8> {
        let conversion = char::from(self.spec.conversion);
        let signed = |value: u64| match self.spec.integer {
            1 => i64::from(value as i8),
            2 => i64::from(value as i16),
            4 => i64::from(value as i32),
            _ => value as i64,
        };
        let kept = u64::MAX >> (64 - 8 * u32::from(self.spec.integer));
        match self.spec.conversion {
            b'd' | b'i' => {
                print_one(&self.format(&format!("ll{conversion}")), |to, size, format| {
                    // SAFETY: the place has `size` bytes, and the format one conversion, of a `long long`.
                    unsafe { libc::snprintf(to, size, format, signed(value)) }
                })
            }
            b'o' | b'u' | b'x' | b'X' => {
                print_one(&self.format(&format!("ll{conversion}")), |to, size, format| {
                    // SAFETY: as for `long long`, of an `unsigned long long`.
                    unsafe { libc::snprintf(to, size, format, value & kept) }
                })
            }
            b'c' => print_one(&self.format("c"), |to, size, format| {
                // SAFETY: as for `long long`, of an `int`.
                unsafe { libc::snprintf(to, size, format, i32::from(value as u8)) }
            }),
            b'p' => print_one(&self.format("p"), |to, size, format| {
                // SAFETY: as for `long long`, of a pointer, which is not followed.
                unsafe { libc::snprintf(to, size, format, value as *const libc::c_void) }
            }),
            _ => print_one(&self.format(&conversion.to_string()), |to, size, format| {
                // SAFETY: as for `long long`, of a `double`.
                unsafe { libc::snprintf(to, size, format, f64::from_bits(value)) }
            }),
        }
    }

    fn string(&self, text: Vec<u8>) -> Vec<u8> {
        // It ended at the first zero.
        let text = CString::new(text).unwrap_or_default();
        print_one(&self.format("s"), |to, size, format| {
            // SAFETY: the format has one conversion, of a string, which ends in zero.
            unsafe { libc::snprintf(to, size, format, text.as_ptr()) }
        })
    }
}

/// What a function like `snprintf` writes for a format.
fn print_one(
    format: &CStr,
    print: impl Fn(*mut libc::c_char, usize, *const libc::c_char) -> i32,
) -> Vec<u8> {
    let length = usize::try_from(print(std::ptr::null_mut(), 0, format.as_ptr())).unwrap_or(0);
    let mut text = vec![0u8; length + 1];
    print(text.as_mut_ptr().cast(), text.len(), format.as_ptr());
    text.truncate(length);
    text
}
