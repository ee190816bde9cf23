//! The regular files that processes had open, as CRIU lists them in `files.img`: after 8 bytes that say what it is, each
//! message (CRIU's `fdinfo.proto` and `regfile.proto`) behind its length (32 bits).
//!
//! CRIU opens each file anew, refuses one of another size, and goes on at the old offset. For a log that has grown since,
//! the size is taken out of the list, and the offset of who was writing at its end is set to where its end is now. All
//! else in the file stays as it is, byte by byte.

use std::collections::BTreeMap;
use std::ffi::OsStr;
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};

use super::pages::IMAGE_MAGIC;

/// Name of the file.
pub(crate) const FILES: &str = "files.img";
/// The number of this file, behind that of CRIU's images.
const MAGIC: [u8; 4] = [0x38, 0x31, 0x30, 0x56];

/// Fields of `FileEntry` and of `RegFileEntry`.
const REGULAR: u64 = 3;
const FLAGS: u64 = 2;
const OFFSET: u64 = 3;
const NAME: u64 = 6;
const SIZE: u64 = 8;

/// A regular file as one that had it open sees it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct OpenFile {
    /// Its path.
    pub(crate) path: PathBuf,
    /// Flags as open(2) takes them.
    pub(crate) flags: i32,
    /// Where the next byte would have been read or written.
    pub(crate) offset: u64,
    /// How many bytes the file had.
    pub(crate) size: Option<u64>,
}

impl OpenFile {
    /// Whether all that was written to it was added at its end: as to a log.
    pub(crate) fn is_at_end(&self) -> bool {
        let writes_only = self.flags & libc::O_ACCMODE == libc::O_WRONLY;
        writes_only && (self.flags & libc::O_APPEND != 0 || Some(self.offset) == self.size)
    }
}

/// All that are listed. `None` if it is no such list.
pub(crate) fn open_files(list: &[u8]) -> Option<Vec<OpenFile>> {
    let mut files = Vec::new();
    for message in messages(list)? {
        files.extend(regular(message?)?);
    }
    Some(files)
}

/// The list, with files that have other sizes by now: these. `None` if it is no such list.
pub(crate) fn with_sizes(list: &[u8], sizes: &BTreeMap<PathBuf, u64>) -> Option<Vec<u8>> {
    let mut out = list.get(..8)?.to_vec();
    for message in messages(list)? {
        let message = message?;
        let now = regular(message)?.and_then(|file| Some((sizes.get(&file.path)?, file)));
        let message = match now {
            Some((size, file)) => changed(message, file.is_at_end().then_some(*size))?,
            None => message.to_vec(),
        };
        out.extend_from_slice(&(message.len() as u32).to_le_bytes());
        out.extend(message);
    }
    Some(out)
}

/// The messages of the list; `None` among them where it ends too early.
fn messages(list: &[u8]) -> Option<impl Iterator<Item = Option<&[u8]>>> {
    let mut rest = list.strip_prefix(&IMAGE_MAGIC)?.strip_prefix(&MAGIC)?;
    Some(std::iter::from_fn(move || {
        let (len, after) = match rest.split_first_chunk() {
            Some(split) => split,
            None => return (!std::mem::take(&mut rest).is_empty()).then_some(None),
        };
        let split = after.split_at_checked(u32::from_le_bytes(*len) as usize);
        rest = split.map_or(&[], |(_, rest)| rest);
        Some(split.map(|(message, _)| message))
    }))
}

/// The regular file that a message is about: `Some(None)` if it is about something else, `None` if it makes no sense.
fn regular(message: &[u8]) -> Option<Option<OpenFile>> {
    let mut found = None;
    for field in fields(message) {
        let Field { number, value, .. } = field?;
        if number == REGULAR {
            let Value::Bytes(bytes) = value else { return None };
            found = Some(bytes);
        }
    }
    let Some(bytes) = found else { return Some(None) };
    let mut file = OpenFile { path: PathBuf::new(), flags: 0, offset: 0, size: None };
    for field in fields(bytes) {
        match field? {
            Field { number: FLAGS, value: Value::Number(flags), .. } => file.flags = flags as i32,
            Field { number: OFFSET, value: Value::Number(offset), .. } => file.offset = offset,
            Field { number: SIZE, value: Value::Number(size), .. } => file.size = Some(size),
            Field { number: NAME, value: Value::Bytes(name), .. } => {
                file.path = Path::new(OsStr::from_bytes(name)).to_owned();
            }
            _ => {}
        }
    }
    Some(Some(file))
}

/// A message about a regular file without the file's size, and with another offset if there is one.
fn changed(message: &[u8], offset: Option<u64>) -> Option<Vec<u8>> {
    let mut out = Vec::new();
    for field in fields(message) {
        let Field { number, value, whole } = field?;
        let Value::Bytes(bytes) = value else {
            out.extend_from_slice(whole);
            continue;
        };
        if number != REGULAR {
            out.extend_from_slice(whole);
            continue;
        }
        let mut inner = Vec::new();
        for field in fields(bytes) {
            match (field?, offset) {
                (Field { number: SIZE, .. }, _) => {}
                (Field { number: OFFSET, .. }, Some(offset)) => {
                    put_number(&mut inner, OFFSET << 3);
                    put_number(&mut inner, offset);
                }
                (Field { whole, .. }, _) => inner.extend_from_slice(whole),
            }
        }
        put_number(&mut out, (REGULAR << 3) | 2);
        put_number(&mut out, inner.len() as u64);
        out.extend(inner);
    }
    Some(out)
}

/// A field of a message, and all its bytes.
struct Field<'m> {
    number: u64,
    value: Value<'m>,
    whole: &'m [u8],
}

/// What a field has.
enum Value<'m> {
    Number(u64),
    Bytes(&'m [u8]),
    /// 4 or 8 bytes, which are of no interest here.
    Fixed,
}

/// The fields of a message; `None` among them where it is none, which is the last then.
fn fields(message: &[u8]) -> impl Iterator<Item = Option<Field<'_>>> {
    let mut rest = message;
    std::iter::from_fn(move || {
        if rest.is_empty() {
            return None;
        }
        let field = field(rest);
        rest = field.as_ref().map_or(&[], |field| &rest[field.whole.len()..]);
        Some(field)
    })
}

fn field(bytes: &[u8]) -> Option<Field<'_>> {
    let mut rest = bytes;
    let tag = number(&mut rest)?;
    let value = match tag & 7 {
        0 => Value::Number(number(&mut rest)?),
        1 => {
            rest = rest.get(8..)?;
            Value::Fixed
        }
        2 => {
            let len = usize::try_from(number(&mut rest)?).ok()?;
            let (bytes, after) = rest.split_at_checked(len)?;
            rest = after;
            Value::Bytes(bytes)
        }
        5 => {
            rest = rest.get(4..)?;
            Value::Fixed
        }
        _ => return None,
    };
    Some(Field { number: tag >> 3, value, whole: &bytes[..bytes.len() - rest.len()] })
}

/// A number in groups of 7 bits, the lowest first.
fn number(bytes: &mut &[u8]) -> Option<u64> {
    let mut number = 0;
    for shift in (0..64).step_by(7) {
        let (byte, rest) = bytes.split_first()?;
        *bytes = rest;
        number |= u64::from(byte & 0x7f) << shift;
        if byte & 0x80 == 0 {
            return Some(number);
        }
    }
    None
}

fn put_number(out: &mut Vec<u8>, mut number: u64) {
    while number >= 0x80 {
        out.push(number as u8 | 0x80);
        number >>= 7;
    }
    out.push(number as u8);
}

#[cfg(test)]
mod tests {
    use super::*;

    fn bytes(out: &mut Vec<u8>, number: u64, bytes: &[u8]) {
        put_number(out, (number << 3) | 2);
        put_number(out, bytes.len() as u64);
        out.extend_from_slice(bytes);
    }

    fn value(out: &mut Vec<u8>, number: u64, value: u64) {
        put_number(out, number << 3);
        put_number(out, value);
    }

    /// The message for a file, with a field of each kind that is not known here.
    fn entry(path: &str, flags: i32, offset: u64, size: Option<u64>) -> Vec<u8> {
        let mut file = Vec::new();
        value(&mut file, 1, 7);
        value(&mut file, FLAGS, flags as u64);
        value(&mut file, OFFSET, offset);
        bytes(&mut file, 5, b"owner");
        bytes(&mut file, NAME, path.as_bytes());
        size.into_iter().for_each(|size| value(&mut file, SIZE, size));
        file.extend([(20 << 3 | 1) as u8 | 0x80, 1, 1, 2, 3, 4, 5, 6, 7, 8]);
        let mut message = Vec::new();
        value(&mut message, 1, 1);
        value(&mut message, 2, 7);
        bytes(&mut message, REGULAR, &file);
        (message.len() as u32).to_le_bytes().into_iter().chain(message).collect()
    }

    fn list(entries: &[Vec<u8>]) -> Vec<u8> {
        [&IMAGE_MAGIC[..], &MAGIC, &entries.concat()].concat()
    }

    #[test]
    fn files_that_have_grown_are_gone_on_with_at_their_ends() {
        let append = libc::O_WRONLY | libc::O_APPEND;
        let all = |size: Option<u64>, log: u64| {
            list(&[
                entry("/log", libc::O_WRONLY, log, size),
                entry("/appended", append, 3, Some(1000)),
                entry("/data", libc::O_RDWR, 1000, Some(1000)),
            ])
        };
        let before = all(Some(1000), 1000);
        let files = open_files(&before).unwrap();
        let at_end: Vec<bool> = files.iter().map(OpenFile::is_at_end).collect();
        assert_eq!(at_end, [true, true, false]);
        assert_eq!((files[1].offset, files[2].size), (3, Some(1000)));
        let sizes = BTreeMap::from([(PathBuf::from("/log"), 1 << 40)]);
        assert_eq!(with_sizes(&before, &sizes).unwrap(), all(None, 1 << 40));
        assert_eq!(with_sizes(&before, &BTreeMap::new()).unwrap(), before);
        // Of one that is not written at its end only the size goes.
        let sizes = BTreeMap::from([(PathBuf::from("/data"), 5)]);
        let after = open_files(&with_sizes(&before, &sizes).unwrap()).unwrap();
        assert_eq!((after[2].offset, after[2].size), (1000, None));
    }

    #[test]
    fn nonsense_is_no_list() {
        let good = list(&[entry("/log", 1, 2, Some(3)), vec![2, 0, 0, 0, 8, 1]]);
        assert_eq!(open_files(&good).map(|files| files.len()), Some(1));
        for len in 0..good.len() {
            let files = open_files(&good[..len]);
            assert!(files.is_none_or(|files| files.len() <= 1), "{len}");
        }
        assert!(open_files(&good[..good.len() - 1]).is_none() && open_files(b"").is_none());
        for at in 8..good.len() {
            let mut bad = good.clone();
            bad[at] ^= 0xff;
            // Whatever is said then, it is said without a panic.
            let _ = (open_files(&bad), with_sizes(&bad, &BTreeMap::from([("/log".into(), 1)])));
        }
    }
}
