//! Files whose name is gone but which have another one.
//!
//! A semaphore of POSIX is such a file: sem_open(3) makes it under a passing name, gives it the lasting one with
//! link(2), and takes the first away; what the program has mapped has the first name for ever. CRIU links such a file
//! back under a third name (`--link-remap`), which has to be there when the image is restored: it serves for one
//! restore, on this host, of a program that was ended. So what CRIU has written is settled here while the program is
//! frozen: a file that has another name in its directory is opened by that name, and the bytes of any other become a
//! part of CRIU's files, as those of deleted files are (`ghost-file-ID.img`). The link is taken away again.
//!
//! What is known of CRIU's files is in its `images/*.proto` and `criu/files-reg.c` (4.2).

use std::collections::{BTreeSet, HashMap};
use std::ffi::OsStr;
use std::fs::File;
use std::io::{self, BufWriter, Write};
use std::os::fd::{AsFd, BorrowedFd};
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};

use prost::Message;
use prost::encoding::{
    DecodeContext, WireType, decode_key, decode_varint, encode_key, encode_varint,
};
use rustix::fs::{AtFlags, Mode, OFlags, SeekFrom, Stat};
use rustix::io::Errno;

use super::pages::files;
use crate::base::careful::Place;

/// The files in CRIU's directory.
const REMAPS: &str = "remap-fpath.img";
const OPEN_FILES: &str = "files.img";
/// The numbers of CRIU's images and of these kinds of them.
const REMAPS_MAGIC: [u8; 8] = [0x19, 0x43, 0x56, 0x54, 0x54, 0x39, 0x13, 0x59];
const FILES_MAGIC: [u8; 8] = [0x19, 0x43, 0x56, 0x54, 0x38, 0x31, 0x30, 0x56];
const GHOST_MAGIC: [u8; 8] = [0x19, 0x43, 0x56, 0x54, 0x05, 0x36, 0x58, 0x52];
/// What the names of CRIU's links begin with.
const LINK: &str = "link_remap.";
/// So many names of a directory are looked at.
const MAX_NAMES: usize = 1 << 20;
/// In a `file_entry`: the field with a regular file. In that: its name.
const REGULAR: u32 = 3;
const NAME: u32 = 6;

/// `remap_file_path_entry`.
#[derive(Clone, PartialEq, Message)]
struct Remap {
    /// The `reg_file_entry` of a file that is to be opened elsewhere.
    #[prost(uint32, required, tag = "1")]
    file: u32,
    /// Another `reg_file_entry`, or a ghost file.
    #[prost(uint32, required, tag = "2")]
    by: u32,
    #[prost(enumeration = "RemapKind", optional, tag = "3")]
    kind: Option<i32>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, prost::Enumeration)]
#[repr(i32)]
enum RemapKind {
    Linked = 0,
    Ghost = 1,
    Procfs = 2,
}

/// `ghost_file_entry`. Runs of [`Chunk`] and its bytes follow.
#[derive(Clone, PartialEq, Message)]
struct Ghost {
    #[prost(uint32, required, tag = "1")]
    user: u32,
    #[prost(uint32, required, tag = "2")]
    group: u32,
    #[prost(uint32, required, tag = "3")]
    mode: u32,
    #[prost(bool, optional, tag = "9")]
    chunks: Option<bool>,
    #[prost(uint64, optional, tag = "10")]
    size: Option<u64>,
}

/// `ghost_chunk_entry`.
#[derive(Clone, PartialEq, Message)]
struct Chunk {
    #[prost(uint64, required, tag = "1")]
    len: u64,
    #[prost(uint64, required, tag = "2")]
    at: u64,
}

/// What matters of a `file_entry`.
#[derive(Clone, PartialEq, Message)]
struct OpenFile {
    #[prost(uint32, required, tag = "2")]
    id: u32,
    #[prost(message, optional, tag = "3")]
    regular: Option<Regular>,
}

/// What matters of a `reg_file_entry`.
#[derive(Clone, PartialEq, Message)]
struct Regular {
    #[prost(bytes = "vec", required, tag = "6")]
    name: Vec<u8>,
}

/// Settles all links that CRIU has made for what it has written into the directory `images`. The paths are those that
/// `root`, a process of the program, sees. The program has to be frozen. Gives the names by which files are opened that
/// had lost another.
///
/// # Errors
/// A file cannot be read or written, or is not what is expected. The dump must not succeed then; links may be left.
pub(crate) fn settle(images: BorrowedFd<'_>, root: u32) -> io::Result<BTreeSet<PathBuf>> {
    let remaps = match files::read(images, REMAPS) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(BTreeSet::new()),
        read => read?,
    };
    let remaps: Vec<Remap> = messages(&remaps, REMAPS_MAGIC)?
        .into_iter()
        .map(|message| Remap::decode(message).map_err(io::Error::other))
        .collect::<Result<_, _>>()?;
    let is_linked = |remap: &Remap| remap.kind == Some(RemapKind::Linked as i32);
    if !remaps.iter().any(is_linked) {
        return Ok(BTreeSet::new());
    }
    let open_files = files::read(images, OPEN_FILES)?;
    let mut open_files: Vec<Vec<u8>> =
        messages(&open_files, FILES_MAGIC)?.into_iter().map(<[u8]>::to_vec).collect();
    let mut places = HashMap::new();
    for (place, message) in open_files.iter().enumerate() {
        let file = OpenFile::decode(message.as_slice()).map_err(io::Error::other)?;
        places.extend(file.regular.map(|regular| (file.id, (place, regular.name))));
    }
    let root = File::open(format!("/proc/{root}/root"))?;
    let of_ghosts = remaps.iter().filter(|remap| remap.kind == Some(RemapKind::Ghost as i32));
    let mut free = of_ghosts.map(|remap| remap.by).max().unwrap_or(0) + 1;
    let mut ghosts: HashMap<(u64, u64), u32> = HashMap::new();
    let (mut kept, mut names) = (Vec::new(), BTreeSet::new());
    for remap in remaps {
        if !is_linked(&remap) {
            kept.push(remap);
            continue;
        }
        let unknown = || io::Error::other("CRIU names a file that it does not list");
        let (_, link) = places.get(&remap.by).ok_or_else(unknown)?;
        let (place, _) = places.get(&remap.file).ok_or_else(unknown)?;
        let link = Link::find(root.as_fd(), Path::new(OsStr::from_bytes(link)))?;
        if let Some(name) = link.other_name()? {
            open_files[*place] = renamed(&open_files[*place], &name)?;
            names.insert(PathBuf::from(OsStr::from_bytes(&name)));
        } else {
            // Processes that share the file share it afterwards too.
            let key = (link.stat.st_dev, link.stat.st_ino);
            let ghost = match ghosts.get(&key) {
                Some(ghost) => *ghost,
                None => {
                    link.save(images, free)?;
                    ghosts.insert(key, free);
                    free += 1;
                    free - 1
                }
            };
            kept.push(Remap { by: ghost, kind: Some(RemapKind::Ghost as i32), ..remap });
        }
        link.remove()?;
    }
    write(images, OPEN_FILES, FILES_MAGIC, &open_files)?;
    let kept: Vec<Vec<u8>> = kept.iter().map(Message::encode_to_vec).collect();
    write(images, REMAPS, REMAPS_MAGIC, &kept)?;
    Ok(names)
}

/// A link that CRIU has made.
struct Link {
    place: Place,
    /// As the program sees it.
    path: PathBuf,
    name: String,
    stat: Stat,
}

impl Link {
    fn find(root: BorrowedFd<'_>, path: &Path) -> io::Result<Self> {
        let named = path.parent().zip(path.file_name().and_then(|name| name.to_str()));
        let (parent, name) = named
            .filter(|(_, name)| name.starts_with(LINK))
            .ok_or_else(|| io::Error::other(format!("{path:?} is no link of CRIU's")))?;
        // CRIU has the path from the kernel: there is no symbolic link in it.
        let place = Place::find(root, path)?;
        let stat = rustix::fs::statat(place.directory(), name, AtFlags::SYMLINK_NOFOLLOW)?;
        Ok(Self { place, path: parent.to_owned(), name: name.to_owned(), stat })
    }

    /// Another name that the file has in the same directory.
    fn other_name(&self) -> io::Result<Option<Vec<u8>>> {
        for entry in rustix::fs::Dir::read_from(self.place.directory())?.take(MAX_NAMES) {
            let entry = entry?;
            let name = entry.file_name();
            if entry.ino() != self.stat.st_ino || name.to_bytes().starts_with(LINK.as_bytes()) {
                continue;
            }
            match rustix::fs::statat(self.place.directory(), name, AtFlags::SYMLINK_NOFOLLOW) {
                Ok(stat) if (stat.st_dev, stat.st_ino) == (self.stat.st_dev, self.stat.st_ino) => {
                    let path = self.path.join(OsStr::from_bytes(name.to_bytes()));
                    return Ok(Some(path.into_os_string().into_encoded_bytes()));
                }
                // It is gone since, or another file.
                Ok(_) | Err(Errno::NOENT) => {}
                Err(error) => return Err(error.into()),
            }
        }
        Ok(None)
    }

    /// Writes the file as CRIU writes deleted ones. Holes stay holes.
    fn save(&self, images: BorrowedFd<'_>, ghost: u32) -> io::Result<()> {
        let source = self.place.open(OFlags::RDONLY)?;
        let stat = rustix::fs::fstat(&source)?;
        if (stat.st_dev, stat.st_ino) != (self.stat.st_dev, self.stat.st_ino) {
            return Err(io::Error::other(format!("{} is another file by now", self.name)));
        }
        let size = stat.st_size as u64;
        let mut to = create(images, &format!("ghost-file-{ghost:x}.img"))?;
        to.write_all(&GHOST_MAGIC)?;
        let entry = Ghost {
            user: stat.st_uid,
            group: stat.st_gid,
            mode: stat.st_mode,
            chunks: Some(true),
            size: Some(size),
        };
        put(&mut to, &entry.encode_to_vec())?;
        let mut at = 0;
        loop {
            at = match rustix::fs::seek(&source, SeekFrom::Data(at)) {
                Ok(at) if at < size => at,
                Ok(_) | Err(Errno::NXIO) => break,
                Err(error) => return Err(error.into()),
            };
            let end = rustix::fs::seek(&source, SeekFrom::Hole(at))?.min(size);
            put(&mut to, &Chunk { len: end - at, at }.encode_to_vec())?;
            rustix::fs::seek(&source, SeekFrom::Start(at))?;
            let copied = io::copy(&mut io::Read::take(&source, end - at), &mut to)?;
            if copied != end - at {
                return Err(io::ErrorKind::UnexpectedEof.into());
            }
            at = end;
        }
        to.flush()
    }

    fn remove(&self) -> io::Result<()> {
        match rustix::fs::unlinkat(self.place.directory(), self.name.as_str(), AtFlags::empty()) {
            Err(Errno::NOENT) | Ok(()) => Ok(()),
            Err(error) => Err(error.into()),
        }
    }
}

/// The messages of a file, each with its length before it.
fn messages(bytes: &[u8], magic: [u8; 8]) -> io::Result<Vec<&[u8]>> {
    let strange = || io::Error::other("a file of CRIU's is not what is expected");
    let mut rest = bytes.strip_prefix(&magic).ok_or_else(strange)?;
    let mut found = Vec::new();
    while !rest.is_empty() {
        let (len, after) = rest.split_first_chunk().ok_or_else(strange)?;
        let (message, after) =
            after.split_at_checked(u32::from_le_bytes(*len) as usize).ok_or_else(strange)?;
        found.push(message);
        rest = after;
    }
    Ok(found)
}

fn put(to: &mut impl Write, message: &[u8]) -> io::Result<()> {
    to.write_all(&(message.len() as u32).to_le_bytes())?;
    to.write_all(message)
}

fn create(images: BorrowedFd<'_>, name: &str) -> io::Result<BufWriter<File>> {
    let flags = OFlags::WRONLY | OFlags::CREATE | OFlags::EXCL | OFlags::CLOEXEC;
    Ok(BufWriter::new(rustix::fs::openat(images, name, flags, Mode::from(0o600))?.into()))
}

/// Puts a file in the place of what CRIU has written.
fn write(images: BorrowedFd<'_>, name: &str, magic: [u8; 8], all: &[Vec<u8>]) -> io::Result<()> {
    let passing = format!("{name}.settled");
    let mut to = create(images, &passing)?;
    to.write_all(&magic)?;
    all.iter().try_for_each(|message| put(&mut to, message))?;
    to.flush()?;
    Ok(rustix::fs::renameat(images, &passing, images, name)?)
}

/// A `file_entry` whose regular file has another name; all other fields stay.
fn renamed(entry: &[u8], name: &[u8]) -> io::Result<Vec<u8>> {
    replaced(entry, REGULAR, &|regular| replaced(regular, NAME, &|_| Ok(name.to_vec())))
}

/// A message of which the bytes of one field are changed.
fn replaced(
    message: &[u8],
    field: u32,
    change: &dyn Fn(&[u8]) -> io::Result<Vec<u8>>,
) -> io::Result<Vec<u8>> {
    let (mut rest, mut made) = (message, Vec::with_capacity(message.len()));
    while !rest.is_empty() {
        let before = rest;
        let (tag, wire) = decode_key(&mut rest).map_err(io::Error::other)?;
        if tag == field && wire == WireType::LengthDelimited {
            let len = decode_varint(&mut rest).map_err(io::Error::other)?;
            let (value, after) = usize::try_from(len)
                .ok()
                .and_then(|len| rest.split_at_checked(len))
                .ok_or(io::ErrorKind::UnexpectedEof)?;
            let value = change(value)?;
            encode_key(tag, wire, &mut made);
            encode_varint(value.len() as u64, &mut made);
            made.extend(value);
            rest = after;
        } else {
            let context = DecodeContext::default();
            prost::encoding::skip_field(wire, tag, &mut rest, context).map_err(io::Error::other)?;
            made.extend(&before[..before.len() - rest.len()]);
        }
    }
    Ok(made)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_name_is_changed_and_all_else_stays() {
        // type 1, id 7, regular file: id 7, flags 2, a field that is not known here, the name.
        let regular = b"\x08\x07\x10\x02\x7a\x03abc\x32\x02/x\x38\x09";
        let mut entry = b"\x08\x01\x10\x07\x1a".to_vec();
        entry.push(regular.len() as u8);
        entry.extend(regular);
        let longer = renamed(&entry, b"/dev/shm/sem.a").unwrap();
        let file = OpenFile::decode(longer.as_slice()).unwrap();
        assert_eq!((file.id, file.regular.unwrap().name.as_slice()), (7, &b"/dev/shm/sem.a"[..]));
        assert_eq!(renamed(&longer, b"/x").unwrap(), entry);
        for cut in 1..entry.len() {
            // It is an error, or what is left is whole fields.
            let _ = renamed(&entry[..cut], b"/y");
        }
        assert!(renamed(&entry[..entry.len() - 3], b"/y").is_err());
    }

    #[test]
    fn what_is_no_list_of_messages_is_an_error() {
        let mut bytes = REMAPS_MAGIC.to_vec();
        put(&mut bytes, b"abc").unwrap();
        assert_eq!(messages(&bytes, REMAPS_MAGIC).unwrap(), [b"abc"]);
        assert!(messages(&bytes, FILES_MAGIC).is_err());
        assert!(messages(&bytes[..bytes.len() - 1], REMAPS_MAGIC).is_err());
        assert!(messages(&bytes[..9], REMAPS_MAGIC).is_err());
    }
}
