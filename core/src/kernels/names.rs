//! Directions from the names of kernels.

use std::fmt;

use cpp_demangle::{DemangleOptions, DemangleWrite, Symbol};
use gpucr_kernels::Direction;

/// The longest demangled name that is believed in, in bytes: a short mangled name can stand for a very
/// long one.
const LONGEST: usize = 1 << 20;

/// What the types in a mangled C++ name (Itanium ABI, as nvcc makes them) say of each parameter:
/// `Some(Read)` for a pointer to const, `None` for anything else. `None` altogether for a name that
/// is not mangled or has no parameters in it.
///
/// That is a statement about types. A kernel may cast `const` away, and the const memory may hold
/// pointers to other memory; code decides ([`from_ptx`](super::from_ptx)) where there is any.
pub fn from_name(mangled: &str) -> Option<Vec<Option<Direction>>> {
    let name = demangled(mangled, &DemangleOptions::new())?;
    let list = parameters(&name)?;
    Some(if list == "void" || list.is_empty() {
        Vec::new()
    } else {
        split(list)?.into_iter().map(direction).collect()
    })
}

/// The name as people write it, without its parameters and what it returns. `None` for one that is not
/// mangled or would be longer than 1 MiB.
pub fn readable(mangled: &str) -> Option<String> {
    demangled(mangled, &DemangleOptions::new().no_params().no_return_type())
}

fn demangled(mangled: &str, options: &DemangleOptions) -> Option<String> {
    if !mangled.starts_with("_Z") {
        return None;
    }
    let symbol = Symbol::new(mangled).ok()?;
    let mut name = Bounded(String::new());
    symbol.structured_demangle(&mut name, options).ok()?;
    Some(name.0)
}

struct Bounded(String);

impl DemangleWrite for Bounded {
    fn write_string(&mut self, part: &str) -> fmt::Result {
        if self.0.len() + part.len() > LONGEST {
            return Err(fmt::Error);
        }
        self.0.push_str(part);
        Ok(())
    }
}

/// The inside of the last parentheses: kernels return nothing and are no members, so their names end
/// with the list of parameters. A clone by the compiler may follow in brackets.
fn parameters(name: &str) -> Option<&str> {
    let inside = name.strip_suffix(')')?;
    let mut depth = 0_usize;
    for (at, c) in inside.bytes().enumerate().rev() {
        match c {
            b')' => depth += 1,
            b'(' if depth == 0 => return Some(&inside[at + 1..]),
            b'(' => depth -= 1,
            _ => {}
        }
    }
    None
}

/// Splits at the commas outside all brackets. `None` if these do not match, as with `operator<`.
fn split(list: &str) -> Option<Vec<&str>> {
    let (mut parts, mut open, mut start) = (Vec::new(), Vec::new(), 0);
    for (at, c) in list.bytes().enumerate() {
        match c {
            b'(' | b'[' | b'{' | b'<' => open.push(c),
            b')' | b']' | b'}' | b'>' => {
                let opened = match c {
                    b')' => b'(',
                    b']' => b'[',
                    b'}' => b'{',
                    _ => b'<',
                };
                if open.pop() != Some(opened) {
                    return None;
                }
            }
            b',' if open.is_empty() => {
                parts.push(list[start..at].trim());
                start = at + 1;
            }
            _ => {}
        }
    }
    parts.push(list[start..].trim());
    open.is_empty().then_some(parts)
}

fn direction(parameter: &str) -> Option<Direction> {
    // Qualifiers of the pointer itself do not matter, and of the pointee's only `const`:
    // `float const volatile* restrict`.
    let pointer = without(parameter, &[" const", " volatile", " restrict"]);
    let pointee = without(pointer.strip_suffix('*')?, &[" volatile", " restrict"]);
    pointee.ends_with(" const").then_some(Direction::Read)
}

fn without<'a>(mut name: &'a str, endings: &[&str]) -> &'a str {
    while let Some(rest) = endings.iter().find_map(|ending| name.strip_suffix(ending)) {
        name = rest;
    }
    name
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    const READ: Option<Direction> = Some(Direction::Read);

    #[test]
    fn pointers_to_const_are_read() {
        for (name, expected) in [
            // copy(float const*, float*, int)
            ("_Z4copyPKfPfi", vec![READ, None, None]),
            // none()
            ("_Z4nonev", vec![]),
            // void scale<float>(float const*, float*)
            ("_Z5scaleIfEvPKT_PS0_", vec![READ, None]),
            // a::b::pick(a::Pair const*, a::Pair const*, a::Pair*)
            ("_ZN1a1b4pickEPKNS_4PairES3_PS1_", vec![READ, READ, None]),
            // walk(int const* const*, int* const*, int const**)
            ("_Z4walkPKPKiPKPiPS0_", vec![READ, READ, None]),
            // Qualifiers of the pointee: int const volatile*, int volatile*
            ("_Z4waitPVKiPVi", vec![READ, None]),
            // float* const restrict*, float* restrict const*, float* restrict*
            ("_Z1fPVrKPfPrKS_PrS_", vec![READ, READ, None]),
            // By value: f(Big, Pair<float const*, 3>, void (*)(int const*))
            ("_Z1f3Big4PairIPKfLi3EEPFvPKiE", vec![None, None, None]),
            // Something with commas and parentheses in its template arguments:
            // void run<void (*)(int, int)>(int const*, int)
            ("_Z3runIPFviiEEvPKii", vec![READ, None]),
            // In an unnamed namespace.
            ("_ZN12_GLOBAL__N_13addEPKfPf", vec![READ, None]),
            // References.
            ("_Z1fRKfRf", vec![None, None]),
        ] {
            assert_eq!(from_name(name), Some(expected), "{name}");
        }
    }

    #[test]
    fn other_names_say_nothing() {
        for name in ["", "scale", "_Z", "_Z4copy", "_ZTV3Foo", "_Z4copyPKf?", "main(int const*)"] {
            assert_eq!(from_name(name), None, "{name}");
        }
    }

    #[test]
    fn a_name_that_would_explode_is_given_up() {
        // f<A<int, int>, B<the last one, the last one>, B<the last one, the last one>, ...>
        let exploding = |depth| {
            let arguments = (0..depth).map(|at| {
                let last = base36(2 * at + 1);
                format!("1BIS{last}_S{last}_E")
            });
            format!("_Z1fI1AIiiE{}EvPKi", arguments.collect::<String>())
        };
        assert_eq!(from_name(&exploding(3)), Some(vec![READ]));
        let short = readable(&exploding(1));
        assert_eq!(short.as_deref(), Some("f<A<int, int>, B<A<int, int>, A<int, int> > >"));
        assert!(from_name(&exploding(60)).is_none() && readable(&exploding(60)).is_none());
    }

    fn base36(number: usize) -> String {
        let digit = |value: usize| char::from_digit(value as u32, 36).unwrap().to_ascii_uppercase();
        if number < 36 {
            digit(number).to_string()
        } else {
            format!("{}{}", digit(number / 36), digit(number % 36))
        }
    }

    proptest! {
        #[test]
        fn no_name_makes_it_panic(name in "_Z[0-9A-Za-z_]{0,40}") {
            let _ = from_name(&name);
        }
    }
}
