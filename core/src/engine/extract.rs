//! `gpucr extract`: memory of a process, read from an image without running anything.
//!
//! An image may come from anybody. What it says is used as far as it makes sense: the files of CRIU's that list memory
//! are read up to a limit, and what the image has no bytes of is written up to one.

pub(crate) mod error;

use std::cell::RefCell;
use std::collections::{BTreeMap, HashMap};
use std::fs::File;
use std::io::{self, Seek, SeekFrom, Write};
use std::ops::Range;
use std::sync::atomic::{AtomicBool, Ordering};

use serde::Serialize;

pub use error::ExtractError;
use error::{MAX_STRETCHES, MAX_ZEROS};

use super::error::Error;
use super::sections;
use crate::base::progress::Progress;
use crate::host::criu::{
    FILES, MEMFD, Mapped, Mappings, Memfds, Pages, mappings_file, pages_file, shared_pages_file,
};
use crate::image::{FileEntry, ImageReader, Part, Piece};
use crate::store::{ChunkId, ChunkSource, Filled, MAX_CHUNK};

/// A longer file that lists memory is not read, bytes: one of a process with a million runs of pages has some 20 MB.
const MAX_LIST: u64 = 64 << 20;

/// What memory is.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum Memory {
    /// Device memory: a block.
    Device {
        /// The process that it belongs to: another one, if it is opened memory.
        owner: u32,
        /// The owner's name for the block.
        block: u64,
    },
    /// Host memory that the process has for itself.
    Host {},
    /// Host memory that processes share.
    Shared {},
}

/// Memory at addresses that follow each other, of one kind.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Stretch {
    /// Its first address.
    pub address: u64,
    /// Bytes.
    pub bytes: u64,
    /// What it is.
    #[serde(flatten)]
    pub memory: Memory,
    /// How many of the bytes are zeros that the image does not hold.
    pub zeros: u64,
}

/// Where the bytes come from that are written next.
struct Source<'a> {
    bytes: u64,
    /// What has them, and where in it they begin; zeros if nothing has.
    from: Option<(Part<'a>, u64)>,
}

/// Memory that was found in an image.
pub struct Extract<'a> {
    image: &'a ImageReader,
    stretches: Vec<Stretch>,
    sources: Vec<Source<'a>>,
}

impl<'a> Extract<'a> {
    /// Finds `length` bytes of process `pid` from an address on; without a length what follows there, to the end of the
    /// block or mapping. Nothing but lists is read.
    ///
    /// # Errors
    /// [`Error::Extract`] says what the image does not have; or it is damaged.
    pub fn find(
        image: &'a ImageReader,
        pid: u32,
        address: u64,
        length: Option<u64>,
    ) -> Result<Self, Error> {
        let finder = Finder::new(image, pid)?;
        let mut found = Self { image, stretches: Vec::new(), sources: Vec::new() };
        let end = match length {
            Some(length) => address.checked_add(length).ok_or(ExtractError::Beyond { address })?,
            None => u64::MAX,
        };
        let (mut at, mut zeros) = (address, 0u64);
        while at < end {
            let here = finder.at(at, end)?;
            for (_, source) in &here {
                zeros = zeros.saturating_add(if source.from.is_none() { source.bytes } else { 0 });
            }
            if zeros > MAX_ZEROS {
                return Err(ExtractError::TooManyZeros { zeros }.into());
            }
            for (memory, source) in here {
                at += source.bytes;
                found.add(at - source.bytes, memory, source)?;
            }
            if length.is_none() {
                break;
            }
        }
        Ok(found)
    }

    fn add(&mut self, address: u64, memory: Memory, source: Source<'a>) -> Result<(), Error> {
        if self.sources.len() >= MAX_STRETCHES {
            return Err(ExtractError::TooManyPlaces {}.into());
        }
        let zeros = if source.from.is_none() { source.bytes } else { 0 };
        match self.stretches.last_mut() {
            Some(last) if last.memory == memory => {
                last.bytes += source.bytes;
                last.zeros += zeros;
            }
            _ => self.stretches.push(Stretch { address, bytes: source.bytes, memory, zeros }),
        }
        self.sources.push(source);
        Ok(())
    }

    /// What was found, in order of the addresses.
    pub fn stretches(&self) -> &[Stretch] {
        &self.stretches
    }

    /// Bytes of all of it.
    pub fn bytes(&self) -> u64 {
        self.sources.iter().map(|source| source.bytes).sum()
    }

    /// Writes it to a file, from its beginning on, or to a pipe. In a file zeros that the image does not hold take no
    /// room. Every chunk is checked.
    ///
    /// # Errors
    /// A chunk is damaged or cannot be read, the file cannot be written, or [`Error::Interrupted`]: `stop` was set.
    pub fn write(
        &self,
        file: &mut File,
        stop: &AtomicBool,
        progress: &dyn Progress,
    ) -> Result<(), Error> {
        let cannot = |source| Error::Io { what: "cannot write the memory".into(), source };
        let has_holes = file.metadata().map_err(cannot)?.is_file();
        let mut reader = Reader::new(self.image);
        for source in &self.sources {
            let Some((part, from)) = source.from else {
                skip(file, source.bytes, has_holes, stop).map_err(cannot)?;
                progress.advance(source.bytes);
                continue;
            };
            let (mut at, end) = (from, from + source.bytes);
            while at < end {
                if stop.load(Ordering::Relaxed) {
                    return Err(Error::Interrupted);
                }
                let bytes = reader.read(part, at, end)?;
                file.write_all(bytes).map_err(cannot)?;
                progress.advance(bytes.len() as u64);
                at += bytes.len() as u64;
            }
        }
        if stop.load(Ordering::Relaxed) {
            return Err(Error::Interrupted);
        }
        if has_holes {
            let end = file.stream_position().map_err(cannot)?;
            file.set_len(end).map_err(cannot)?;
        }
        Ok(())
    }
}

/// Reads from parts of an image, of which many small stretches may be wanted.
struct Reader<'a> {
    image: &'a ImageReader,
    /// The pieces of each file that was read from, and of the last block.
    files: HashMap<&'a str, Vec<Piece>>,
    block: Option<(u32, u64, Vec<Piece>)>,
    /// The chunk that `buffer` has.
    has: Option<ChunkId>,
    buffer: Vec<u8>,
}

impl<'a> Reader<'a> {
    fn new(image: &'a ImageReader) -> Self {
        let buffer = vec![0; MAX_CHUNK];
        Self { image, files: HashMap::new(), block: None, has: None, buffer }
    }

    /// The bytes of a part from a place on, as far as one chunk has them, and to `end` at most.
    fn read(&mut self, part: Part<'a>, at: u64, end: u64) -> Result<&[u8], Error> {
        let pieces = match part {
            Part::Block { process, block } => {
                let is_same =
                    |(pid, id, _): &&mut (u32, u64, _)| (*pid, *id) == (process.pid, block.id);
                if self.block.as_mut().filter(is_same).is_none() {
                    self.block = Some((process.pid, block.id, part.pieces().collect()));
                }
                self.block.as_ref().map_or(&[][..], |(_, _, pieces)| pieces)
            }
            _ => {
                let name = part.file().map_or("", |file| file.name.as_str());
                self.files.entry(name).or_insert_with(|| part.pieces().collect())
            }
        };
        let number = pieces.partition_point(|piece| piece.offset + piece.len as u64 <= at);
        let damaged = || Error::Damaged { what: format!("{part} is shorter than it says") };
        let Piece { id, offset, len } = *pieces.get(number).ok_or_else(damaged)?;
        let bytes = &mut self.buffer[..len];
        if self.has != Some(id) {
            self.has = None;
            if let Filled::Constant(byte) = self.image.get(&id, bytes)? {
                bytes.fill(byte);
            }
            self.has = Some(id);
        }
        let last = (end - offset).min(len as u64) as usize;
        Ok(&bytes[(at - offset) as usize..last])
    }
}

/// Goes over zeros, or writes them where there can be no holes.
fn skip(file: &mut File, bytes: u64, has_holes: bool, stop: &AtomicBool) -> io::Result<()> {
    if has_holes {
        let by = i64::try_from(bytes).map_err(|_| io::ErrorKind::FileTooLarge)?;
        return file.seek(SeekFrom::Current(by)).map(drop);
    }
    let zeros = [0; 64 << 10];
    let mut left = bytes;
    while left > 0 && !stop.load(Ordering::Relaxed) {
        let now = left.min(zeros.len() as u64);
        file.write_all(&zeros[..now as usize])?;
        left -= now;
    }
    Ok(())
}

/// Finds what is at the addresses of a process.
struct Finder<'a> {
    image: &'a ImageReader,
    pid: u32,
    /// Blocks by their first address: the owner, and the block.
    blocks: BTreeMap<u64, Part<'a>>,
    mappings: Mappings,
    own: Pages,
    memfds: Memfds,
    /// Whether the driver has saved device memory of the process in a form of its own.
    of_driver: bool,
    /// The list of pages of the shared memory that was looked at last, by its name.
    last_shared: RefCell<Option<(u64, Pages)>>,
}

/// What is at an address, and from where on that is.
type Here<'a> = Vec<(Memory, Source<'a>)>;

impl<'a> Finder<'a> {
    fn new(image: &'a ImageReader, pid: u32) -> Result<Self, Error> {
        let manifest = image.manifest();
        let process = manifest.processes.iter().find(|process| process.pid == pid);
        let process = process.ok_or_else(|| ExtractError::NoProcess {
            pid,
            pids: manifest.processes.iter().map(|process| process.pid).collect(),
        })?;
        let mut blocks = BTreeMap::new();
        for block in process.cuda.iter().flat_map(|cuda| &cuda.blocks) {
            if block.address != 0 && block.size != 0 {
                blocks.insert(block.address, Part::Block { process, block });
            }
        }
        let opened = sections::read_opened(manifest)?;
        let opened = opened.into_iter().filter(|(opener, _)| *opener == pid);
        for one in opened.flat_map(|(_, opened)| opened).filter(|one| one.address != 0) {
            let of_owner = manifest.parts().find(|part| {
                matches!(part, Part::Block { process, block }
                    if (process.pid, block.id) == (one.owner, one.block) && block.size != 0)
            });
            blocks.extend(of_owner.map(|part| (one.address, part)));
        }
        let mappings = Mappings::decode(&read(image, &mappings_file(pid))?);
        let own = pages(image, &pages_file(pid))?;
        let unknown = || bad(&mappings_file(pid), "is not as it is known here");
        let mappings = mappings.ok_or_else(unknown)?;
        let memfds = if manifest.criu.files.iter().any(|file| file.name == MEMFD) {
            let found = Memfds::decode(&read(image, FILES)?, &read(image, MEMFD)?);
            found.ok_or_else(|| bad(MEMFD, "is not as it is known here"))?
        } else {
            Memfds::default()
        };
        let of_driver = process.cuda.as_ref().is_some_and(|cuda| {
            cuda.shim.is_none() || cuda.counts.pool_bytes > 0 || cuda.counts.pinned_bytes > 0
        });
        let last_shared = RefCell::default();
        Ok(Self { image, pid, blocks, mappings, own, memfds, of_driver, last_shared })
    }

    /// What is at an address, up to `end` at most, as far as one block or mapping goes; one thing at least.
    fn at(&self, address: u64, end: u64) -> Result<Here<'a>, Error> {
        let (pid, before) = (self.pid, self.blocks.range(..=address).next_back());
        if let Some((first, part)) = before
            && let Part::Block { process, block } = part
            && address - first < block.size
        {
            let from = address - first;
            let bytes = (block.size - from).min(end - address);
            let memory = Memory::Device { owner: process.pid, block: block.id };
            return Ok(vec![(memory, Source { bytes, from: Some((*part, from)) })]);
        }
        let Some((what, mapping_end)) = self.mappings.at(address) else {
            return Err(ExtractError::Nothing { pid, address, of_driver: self.of_driver }.into());
        };
        // A block lies where the host side may have kept addresses for it.
        let next_block = self.blocks.range(address..).next().map_or(u64::MAX, |(next, _)| *next);
        let end = end.min(mapping_end).min(next_block);
        match what {
            Mapped::Kernel => Err(ExtractError::OfKernel { pid, address }.into()),
            Mapped::Private => {
                self.listed(&self.own, address, address..end, Memory::Host {}, |_| Ok(()))
            }
            Mapped::Kept => {
                let kept = |address| Err(ExtractError::Kept { pid, address }.into());
                self.listed(&self.own, address, address..end, Memory::Host {}, kept)
            }
            Mapped::File => {
                let of_file = |address| Err(ExtractError::OfFile { pid, address }.into());
                self.listed(&self.own, address, address..end, Memory::Host {}, of_file)
            }
            Mapped::Memfd { of, offset } => {
                let memory = self.memfds.memory(of);
                let memory = memory.ok_or_else(|| bad(MEMFD, "does not name all memory"))?;
                self.shared(memory, address, offset..offset + (end - address))
            }
            Mapped::Shared { of, offset } => {
                self.shared(of, address, offset..offset + (end - address))
            }
        }
    }

    /// Shared memory of this name, at these places of it.
    fn shared(&self, of: u64, address: u64, places: Range<u64>) -> Result<Here<'a>, Error> {
        let name = shared_pages_file(of);
        if self.file(&name).is_none() {
            // Nobody has touched it.
            let source = Source { bytes: places.end - places.start, from: None };
            return Ok(vec![(Memory::Shared {}, source)]);
        }
        // Any number of mappings may show one memory: its list is read once for those that follow each other.
        let mut last = self.last_shared.borrow_mut();
        let pages = match &*last {
            Some((known, pages)) if *known == of => pages,
            _ => &last.insert((of, pages(self.image, &name)?)).1,
        };
        self.listed(pages, address, places, Memory::Shared {}, |_| Ok(()))
    }

    /// The memory at these places of a list of pages. `unlisted` says whether what is not listed, from an address on, is
    /// zeros.
    fn listed(
        &self,
        pages: &Pages,
        address: u64,
        places: Range<u64>,
        memory: Memory,
        unlisted: impl Fn(u64) -> Result<(), Error>,
    ) -> Result<Here<'a>, Error> {
        let (mut here, mut at) = (Vec::new(), places.start);
        let file = self.file(&pages.file);
        while at < places.end {
            let (found, end) = pages.at(at, places.end);
            let bytes = end - at;
            let from = match found {
                None => match unlisted(address + (at - places.start)) {
                    // What is there is given where no more was asked for than what follows.
                    Err(_) if !here.is_empty() => break,
                    Err(error) => return Err(error),
                    Ok(()) => None,
                },
                Some(from) => {
                    let file = file.ok_or_else(|| bad(&pages.file, "is missing"))?;
                    if from.checked_add(bytes).is_none_or(|end| end > file.size) {
                        return Err(bad(&pages.file, "has fewer pages than are listed"));
                    }
                    Some((Part::Criu(file), from))
                }
            };
            if here.len() >= MAX_STRETCHES {
                return Err(ExtractError::TooManyPlaces {}.into());
            }
            here.push((memory, Source { bytes, from }));
            at = end;
        }
        Ok(here)
    }

    fn file(&self, name: &str) -> Option<&'a FileEntry> {
        self.image.manifest().criu.files.iter().find(|file| file.name == name)
    }
}

fn bad(file: &str, what: &'static str) -> Error {
    ExtractError::BadFile { file: file.to_owned(), what }.into()
}

fn pages(image: &ImageReader, name: &str) -> Result<Pages, Error> {
    Pages::decode(&read(image, name)?).ok_or_else(|| bad(name, "is not as it is known here"))
}

/// Reads a file that lists memory.
fn read(image: &ImageReader, name: &str) -> Result<Vec<u8>, Error> {
    let files = &image.manifest().criu.files;
    let entry = files.iter().find(|file| file.name == name);
    let entry = entry.ok_or_else(|| bad(name, "is missing"))?;
    if entry.size > MAX_LIST {
        return Err(bad(name, "is longer than any list of memory"));
    }
    Ok(image.read_file(entry)?)
}
