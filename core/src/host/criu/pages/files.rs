//! The files that list memory, as far as they matter here: their names, and their bytes as values.

use std::fs::File;
use std::io::{self, Read};
use std::os::fd::BorrowedFd;

use prost::Message;
use rustix::fs::{Mode, OFlags};

pub(super) const PAGE: usize = 4096;
/// A file that lists memory has no more bytes: one of a process with as many runs as it can have mappings has a few
/// million.
pub(super) const MAX_LIST: u64 = 256 << 20;
/// The number of CRIU's images, at the beginning of each.
pub(crate) const IMAGE_MAGIC: [u8; 4] = [0x19, 0x43, 0x56, 0x54];
/// The numbers of CRIU's images and of `mm-PID.img`.
pub(super) const MM_MAGIC: [u8; 8] = [0x19, 0x43, 0x56, 0x54, 0x20, 0x28, 0x49, 0x57];
/// The numbers of CRIU's images and of this one.
pub(super) const MAGIC: [u8; 8] = [0x19, 0x43, 0x56, 0x54, 0x25, 0x40, 0x08, 0x56];
/// In [`Run::flags`]: private memory without a file.
pub(super) const LAZY: u32 = 1 << 1;
/// In [`Run::flags`]: its bytes are in the file.
pub(super) const PRESENT: u32 = 1 << 2;

/// What `mm-PID.img` has of a process's memory, as far as it matters here.
#[derive(Clone, PartialEq, Message)]
pub(super) struct Mappings {
    #[prost(message, repeated, tag = "14")]
    pub(super) all: Vec<Between>,
}

/// A mapping (CRIU's `vma.proto`).
#[derive(Clone, PartialEq, Message)]
pub(super) struct Between {
    #[prost(uint64, required, tag = "1")]
    pub(super) start: u64,
    #[prost(uint64, required, tag = "2")]
    pub(super) end: u64,
    /// Flags as mmap(2) takes them.
    #[prost(uint32, required, tag = "5")]
    pub(super) protection: u32,
    #[prost(uint32, required, tag = "6")]
    pub(super) flags: u32,
    /// What CRIU knows of it.
    #[prost(uint32, required, tag = "7")]
    pub(super) status: u32,
}

/// In [`Between::status`]: memory of the kernel in every process, and shadow stacks.
pub(super) const SPECIAL: u32 = 1 << 2 | 1 << 3 | 1 << 12 | 1 << 15;

impl Between {
    /// Whether CRIU, asked for lazy pages, leaves its marked pages to somebody else. (It does so too with shadow
    /// stacks, for which it then has no place.)
    pub(super) fn is_left(&self) -> bool {
        let (wanted, unwanted) =
            (libc::MAP_ANONYMOUS | libc::MAP_PRIVATE, libc::MAP_LOCKED | libc::MAP_HUGETLB);
        let flags = self.flags as i32;
        flags & wanted == wanted && flags & unwanted == 0 && self.status & SPECIAL == 0
    }

    /// Bytes that CRIU, asked for lazy pages, maps as if they were to be written, though they are not.
    pub(super) fn charged(&self) -> u64 {
        let flags = self.flags as i32;
        let is_charged = flags & libc::MAP_PRIVATE != 0
            && flags & libc::MAP_NORESERVE == 0
            && self.protection as i32 & libc::PROT_WRITE == 0;
        if is_charged { self.end - self.start } else { 0 }
    }
}

#[derive(Clone, PartialEq, Message)]
pub(super) struct Head {
    #[prost(uint32, required, tag = "1")]
    pub(super) pages_id: u32,
}

/// A run of pages (CRIU's `pagemap.proto`).
#[derive(Clone, PartialEq, Message)]
pub(super) struct Run {
    #[prost(uint64, required, tag = "1")]
    pub(super) address: u64,
    /// How many pages, before CRIU 4.2; since then 0.
    #[prost(uint32, required, tag = "2")]
    narrow_pages: u32,
    #[prost(uint32, optional, tag = "4")]
    pub(super) flags: Option<u32>,
    /// How many pages, since CRIU 4.2.
    #[prost(uint64, optional, tag = "5")]
    wide_pages: Option<u64>,
}

impl Run {
    /// A run as CRIU before 4.2 writes it.
    #[cfg(test)]
    pub(super) fn narrow(address: u64, pages: u32, flags: Option<u32>) -> Self {
        Self { address, narrow_pages: pages, flags, wide_pages: None }
    }

    /// A run as CRIU writes it since 4.2.
    #[cfg(test)]
    pub(super) fn wide(address: u64, pages: u64, flags: Option<u32>) -> Self {
        Self { address, narrow_pages: 0, flags, wide_pages: Some(pages) }
    }

    /// How many pages.
    pub(super) fn pages(&self) -> u64 {
        self.wide_pages.unwrap_or(self.narrow_pages.into())
    }

    /// Sets how many pages, no more than there were.
    pub(super) fn set_pages(&mut self, pages: u64) {
        match &mut self.wide_pages {
            Some(wide) => *wide = pages,
            None => self.narrow_pages = pages as u32,
        }
    }

    /// A part of it, by the addresses where that starts and ends.
    pub(super) fn part(&self, start: u64, end: u64) -> Self {
        let mut part = Self { address: start, ..self.clone() };
        part.set_pages((end - start) / PAGE as u64);
        part
    }

    pub(super) fn is_present(&self) -> bool {
        self.flags() & PRESENT != 0
    }

    /// Where it ends in the memory of the process. `None` if that is beyond the last address.
    pub(super) fn end(&self) -> Option<u64> {
        self.address.checked_add(self.pages().checked_mul(PAGE as u64)?)
    }

    /// Where its bytes end in the file of pages, of which those before it end at `at`.
    pub(super) fn end_in_file(&self, at: u64) -> Option<u64> {
        if self.is_present() {
            at.checked_add(self.pages().checked_mul(PAGE as u64)?)
        } else {
            Some(at)
        }
    }
}

pub(super) fn pagemap(pid: i32) -> String {
    format!("pagemap-{pid}.img")
}

/// gpucr's own list of zeros that were left out.
pub(super) fn zeros(pid: i32) -> String {
    format!("zeros-{pid}")
}

pub(super) fn mm(pid: i32) -> String {
    format!("mm-{pid}.img")
}

pub(super) fn pages(head: &Head) -> String {
    format!("pages-{}.img", head.pages_id)
}

/// Opens a file of pages.
///
/// # Errors
/// It is not there, or is no regular file.
pub(crate) fn open_pages(dir: BorrowedFd<'_>, name: &str) -> io::Result<File> {
    open(dir, name, OFlags::RDONLY)
}

/// The process whose pagemap has this name. Those of shared memory have a word before the number.
pub(super) fn process(name: &str) -> Option<i32> {
    name.strip_prefix("pagemap-")?.strip_suffix(".img")?.parse().ok()
}

pub(super) fn open(dir: BorrowedFd<'_>, name: &str, flags: OFlags) -> io::Result<File> {
    let flags = flags | OFlags::NOFOLLOW | OFlags::CLOEXEC;
    Ok(rustix::fs::openat(dir, name, flags, Mode::empty())?.into())
}

/// Reads a file that lists memory. One that is too long is cut off, and so is not what is expected.
pub(in crate::host::criu) fn read(dir: BorrowedFd<'_>, name: &str) -> io::Result<Vec<u8>> {
    let mut bytes = Vec::new();
    open(dir, name, OFlags::RDONLY)?.take(MAX_LIST).read_to_end(&mut bytes)?;
    Ok(bytes)
}

/// The pids of the processes that have memory.
///
/// # Errors
/// The directory cannot be read.
pub(crate) fn processes(dir: BorrowedFd<'_>) -> io::Result<Vec<i32>> {
    let mut pids = Vec::new();
    // What was handed here may be good for nothing but finding files in it.
    let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC;
    let dir = rustix::fs::openat(dir, ".", flags, Mode::empty())?;
    for entry in rustix::fs::Dir::new(dir)? {
        let entry = entry?;
        pids.extend(process(entry.file_name().to_str().unwrap_or_default()));
    }
    Ok(pids)
}

/// In [`Between::status`]: no mapping, but pages of another one that the kernel guards (MADV_GUARD_INSTALL). CRIU names
/// them since 4.2, behind all mappings, and has nothing else of them.
pub(super) const GUARD: u32 = 1 << 16;

/// In order of their addresses.
pub(super) fn decode_mappings(bytes: &[u8]) -> Option<Vec<Between>> {
    let (len, rest) = bytes.strip_prefix(&MM_MAGIC)?.split_first_chunk()?;
    let message = rest.get(..u32::from_le_bytes(*len) as usize)?;
    let mut mappings = Mappings::decode(message).ok()?.all;
    mappings.retain(|mapping| mapping.status & GUARD == 0);
    let is_in_order = mappings.is_sorted_by(|a, b| a.end <= b.start)
        && mappings.iter().all(|mapping| mapping.start < mapping.end);
    is_in_order.then_some(mappings)
}

/// `None` if it is not exactly what is expected.
pub(super) fn decode(bytes: &[u8]) -> Option<(Head, Vec<Run>)> {
    let mut rest = bytes.strip_prefix(&MAGIC)?;
    let mut messages = Vec::new();
    while !rest.is_empty() {
        let (len, after) = rest.split_first_chunk()?;
        let (message, after) = after.split_at_checked(u32::from_le_bytes(*len) as usize)?;
        messages.push(message);
        rest = after;
    }
    let (head, runs) = messages.split_first()?;
    let head = Head::decode(*head).ok()?;
    let runs = runs.iter().map(|run| Run::decode(*run));
    let runs = runs.collect::<Result<Vec<_>, _>>().ok()?;
    if runs.iter().any(|run| run.end().is_none()) {
        return None;
    }
    // A field that is not known here would be lost.
    (encode(&head, &runs) == bytes).then_some((head, runs))
}

pub(super) fn put(bytes: &mut Vec<u8>, message: &impl Message) {
    bytes.extend_from_slice(&(message.encoded_len() as u32).to_le_bytes());
    bytes.extend_from_slice(&message.encode_to_vec());
}

pub(super) fn encode(head: &Head, runs: &[Run]) -> Vec<u8> {
    let mut bytes = MAGIC.to_vec();
    put(&mut bytes, head);
    runs.iter().for_each(|run| put(&mut bytes, run));
    bytes
}
