//! The types of the running kernel, as it tells them in `/sys/kernel/btf/vmlinux`.
//!
//! The format is BTF (Documentation/bpf/btf.rst of Linux): a header, a list of types in which each refers to others by
//! their places in it, and the names. Of all that only two things are looked for: the place of a function, and where in
//! a structure a member is.

/// The file's first bytes, in this machine's order.
const MAGIC: u16 = 0xeb9f;
/// Bytes of the header that are read.
const HEADER: usize = 24;
/// Bytes of what all types begin with: name, kind, and size or another type.
const HEAD: usize = 12;
/// Bytes that describe a member of a structure: name, type, and place.
const MEMBER: usize = 12;
/// Kinds of types.
const STRUCT: u32 = 4;
const UNION: u32 = 5;
const FUNC: u32 = 12;
/// How deep structures without a name may lie in each other.
const DEPTH: u32 = 8;

/// What is in the file.
pub(super) struct Types<'a> {
    /// All types, one after the other.
    types: &'a [u8],
    names: &'a [u8],
    /// Where each begins; the first has the number 1.
    places: Vec<usize>,
}

/// How one type begins.
struct Head {
    name: u32,
    kind: u32,
    /// How many members it has.
    members: usize,
    /// Whether the places of members also say how many bits these have.
    has_widths: bool,
}

impl<'a> Types<'a> {
    /// `None` if this is no such file, or has kinds of types that are not known.
    pub(super) fn of(file: &'a [u8]) -> Option<Self> {
        if word(file, 0)? as u16 != MAGIC {
            return None;
        }
        let header = file.get(..HEADER)?;
        let rest = file.get(word(header, 4)? as usize..)?;
        let part = |at: usize| {
            let (start, len) = (word(header, at)? as usize, word(header, at + 4)? as usize);
            rest.get(start..start.checked_add(len)?)
        };
        let mut this = Self { types: part(8)?, names: part(16)?, places: Vec::new() };
        let mut at = 0;
        while at < this.types.len() {
            this.places.push(at);
            let head = this.head(at)?;
            at += HEAD + size_of_rest(&head)?;
        }
        Some(this)
    }

    /// The number of the function with this name.
    pub(super) fn function(&self, name: &str) -> Option<u32> {
        let (number, _) = self.named(FUNC, name)?;
        Some(number)
    }

    /// Where a structure has its members of these names, in bytes from its beginning.
    pub(super) fn members<const N: usize>(
        &self,
        structure: &str,
        names: [&str; N],
    ) -> Option<[i16; N]> {
        let (_, at) = self.named(STRUCT, structure)?;
        let mut found = [0; N];
        for (place, name) in found.iter_mut().zip(names) {
            let bits = self.member(at, name, DEPTH)?;
            *place = i16::try_from(bits / 8).ok().filter(|_| bits.is_multiple_of(8))?;
        }
        Some(found)
    }

    /// Where in the type at `at` a member is, in bits; also in those of its members that have no name.
    fn member(&self, at: usize, name: &str, depth: u32) -> Option<u32> {
        let head = self.head(at)?;
        if !matches!(head.kind, STRUCT | UNION) || depth == 0 {
            return None;
        }
        (0..head.members).find_map(|index| {
            let member = at + HEAD + index * MEMBER;
            let place = word(self.types, member + 8)?;
            let place = if head.has_widths { place & 0xff_ffff } else { place };
            match self.name(word(self.types, member)?)? {
                "" => {
                    let number = word(self.types, member + 4)? as usize;
                    let inner = *self.places.get(number.checked_sub(1)?)?;
                    place.checked_add(self.member(inner, name, depth - 1)?)
                }
                its => (its == name).then_some(place),
            }
        })
    }

    /// The number and the place of a type.
    fn named(&self, kind: u32, name: &str) -> Option<(u32, usize)> {
        (1..).zip(self.places.iter().copied()).find(|(_, at)| {
            self.head(*at)
                .is_some_and(|head| head.kind == kind && self.name(head.name) == Some(name))
        })
    }

    fn head(&self, at: usize) -> Option<Head> {
        let (name, info) = (word(self.types, at)?, word(self.types, at + 4)?);
        let (kind, members) = (info >> 24 & 0x1f, (info & 0xffff) as usize);
        Some(Head { name, kind, members, has_widths: info >> 31 == 1 })
    }

    fn name(&self, at: u32) -> Option<&'a str> {
        let bytes = self.names.get(at as usize..)?;
        str::from_utf8(bytes.split(|byte| *byte == 0).next()?).ok()
    }
}

/// Bytes that follow the head of a type.
fn size_of_rest(head: &Head) -> Option<usize> {
    Some(match head.kind {
        // Pointers, declarations, other names, qualifiers, functions, floating point, tags of types.
        2 | 7..=11 | FUNC | 16 | 18 => 0,
        // Integers, variables, tags of declarations.
        1 | 14 | 17 => 4,
        // An array.
        3 => 12,
        // Enumerations, and the parameters of functions.
        6 | 13 => 8 * head.members,
        // Sections of data, and enumerations with 64 bits.
        STRUCT | UNION | 15 | 19 => MEMBER * head.members,
        _ => return None,
    })
}

fn word(bytes: &[u8], at: usize) -> Option<u32> {
    Some(u32::from_ne_bytes(*bytes.get(at..)?.first_chunk()?))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A file with an integer, a union without a name of a structure without a name and the integer, and a structure
    /// that has the integer, and the union from its eighth byte; and a function.
    fn file() -> Vec<u8> {
        let names = b"\0int\0outer\0first\0inner\0run\0";
        let at = |name: &str| {
            let found = names
                .windows(name.len() + 1)
                .position(|it| it[..name.len()] == *name.as_bytes() && it[name.len()] == 0);
            found.unwrap() as u32
        };
        let (nameless, own) = (0, 1 << 31);
        let types = [
            vec![at("int"), 1 << 24, 4, 32],
            vec![nameless, STRUCT << 24 | 1, 4, at("inner"), 1, 0],
            vec![nameless, UNION << 24 | 2, 4, nameless, 2, 0, at("int"), 1, 0],
            vec![
                at("outer"),
                own | STRUCT << 24 | 2,
                12,
                at("first"),
                1,
                32 << 24,
                nameless,
                3,
                64,
            ],
            vec![at("run"), FUNC << 24, 1],
        ];
        let types: Vec<u8> = types.concat().into_iter().flat_map(u32::to_ne_bytes).collect();
        let parts = [HEADER as u32, 0, types.len() as u32, types.len() as u32, names.len() as u32];
        let mut file = vec![0x9f, 0xeb, 1, 0];
        file.extend(parts.into_iter().flat_map(u32::to_ne_bytes));
        file.extend(types);
        file.extend(names);
        file
    }

    #[test]
    fn members_are_found_within_members_without_a_name() {
        let file = file();
        let types = Types::of(&file).unwrap();
        assert_eq!(types.members("outer", ["first", "inner", "int"]), Some([0, 8, 8]));
        assert_eq!(types.members("outer", ["last"]), None);
        assert_eq!(types.members("int", ["first"]), None);
        assert_eq!(types.function("run"), Some(5));
        assert_eq!(types.function("outer"), None);
    }

    #[test]
    fn what_is_no_such_file_is_refused_wherever_it_ends() {
        let file = file();
        for len in 0..file.len() {
            // Names may be missing at the end, but nothing else.
            let found = Types::of(&file[..len]).map(|types| types.function("run"));
            assert_eq!(found, None, "of {len} bytes");
        }
        assert!(Types::of(b"\0\0\0\0").is_none());
    }

    #[test]
    fn this_kernel_tells_where_mappings_have_their_flags() {
        let Ok(file) = std::fs::read("/sys/kernel/btf/vmlinux") else { return };
        let types = Types::of(&file).unwrap();
        let places = types.members("vm_area_struct", ["vm_start", "vm_end", "vm_flags"]);
        assert!(places.is_some_and(|[start, end, flags]| start != end && end != flags));
    }
}
