//! Pages of zeros in the memory that CRIU has saved: a restore need not read them.
//!
//! `pagemap-PID.img` lists runs of pages that a process had, in order of their addresses: after 8 bytes that
//! say what it is, each message behind its length (32 bits): first the number N of the file `pages-N.img` that
//! has the bytes of all runs one after the other, then the runs (CRIU's `pagemap.proto`). Memory that a process
//! has for itself and that comes from no file is made of zeros in a restore, so runs of zeros in it can be left
//! out. CRIU marks such memory for its own purposes, as what could be loaded late: other memory (of files, locked,
//! of large pages) is left as it is, and so is every file that is not exactly as it is said here.

use std::fs::File;
use std::io::{self, Read};
use std::os::fd::BorrowedFd;
use std::os::unix::fs::FileExt;

use prost::Message;
use rustix::fs::{Mode, OFlags};

const PAGE: usize = 4096;
/// Fewer zeros in a row are left: CRIU reads each run by itself. Pages.
const SHORTEST: usize = 16;
/// A file that lists memory has no more bytes: one of a process with as many runs as it can have mappings has a few
/// million.
const MAX_LIST: u64 = 256 << 20;
/// So many pages are looked at at a time.
const PIECE: usize = 1024;
/// The numbers of CRIU's images and of `mm-PID.img`.
const MM_MAGIC: [u8; 8] = [0x19, 0x43, 0x56, 0x54, 0x20, 0x28, 0x49, 0x57];
/// The numbers of CRIU's images and of this one.
const MAGIC: [u8; 8] = [0x19, 0x43, 0x56, 0x54, 0x25, 0x40, 0x08, 0x56];
/// In [`Run::flags`]: private memory without a file.
const LAZY: u32 = 1 << 1;
/// In [`Run::flags`]: its bytes are in the file.
const PRESENT: u32 = 1 << 2;

/// Memory of a process, and where its bytes are.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Extent {
    /// Its address.
    pub(super) to: u64,
    /// Where it begins in the file of pages.
    pub(super) at: u64,
    /// Bytes.
    pub(super) len: u64,
}

/// What `mm-PID.img` has of a process's memory, as far as it matters here.
#[derive(Clone, PartialEq, Message)]
struct Mappings {
    #[prost(message, repeated, tag = "14")]
    all: Vec<Between>,
}

/// A mapping (CRIU's `vma.proto`).
#[derive(Clone, PartialEq, Message)]
struct Between {
    #[prost(uint64, required, tag = "1")]
    start: u64,
    #[prost(uint64, required, tag = "2")]
    end: u64,
    /// As mmap(2) takes them.
    #[prost(uint32, required, tag = "5")]
    protection: u32,
    #[prost(uint32, required, tag = "6")]
    flags: u32,
    /// What CRIU knows of it.
    #[prost(uint32, required, tag = "7")]
    status: u32,
}

/// In [`Between::status`]: memory of the kernel in every process, and shadow stacks.
const SPECIAL: u32 = 1 << 2 | 1 << 3 | 1 << 12 | 1 << 15;

impl Between {
    /// Whether CRIU, asked for lazy pages, leaves its marked pages to somebody else. (It does so too with shadow
    /// stacks, for which it then has no place.)
    fn is_left(&self) -> bool {
        let (wanted, unwanted) =
            (libc::MAP_ANONYMOUS | libc::MAP_PRIVATE, libc::MAP_LOCKED | libc::MAP_HUGETLB);
        let flags = self.flags as i32;
        flags & wanted == wanted && flags & unwanted == 0 && self.status & SPECIAL == 0
    }

    /// Bytes that CRIU, asked for lazy pages, maps as if they were to be written, though they are not.
    fn charged(&self) -> u64 {
        let flags = self.flags as i32;
        let is_charged = flags & libc::MAP_PRIVATE != 0
            && flags & libc::MAP_NORESERVE == 0
            && self.protection as i32 & libc::PROT_WRITE == 0;
        if is_charged { self.end - self.start } else { 0 }
    }
}

#[derive(Clone, PartialEq, Message)]
struct Head {
    #[prost(uint32, required, tag = "1")]
    pages_id: u32,
}

#[derive(Clone, PartialEq, Message)]
struct Run {
    #[prost(uint64, required, tag = "1")]
    address: u64,
    #[prost(uint32, required, tag = "2")]
    pages: u32,
    #[prost(uint32, optional, tag = "4")]
    flags: Option<u32>,
}

/// Leaves zeros out of the pages of all processes whose files are among `names` in a directory. Gives the bytes
/// that it has left out.
///
/// # Errors
/// The files cannot be read or written; then they are of no use any more.
pub(crate) fn leave_out_zeros<'a>(
    dir: BorrowedFd<'_>,
    names: impl IntoIterator<Item = &'a str>,
) -> io::Result<u64> {
    let mut left_out = 0;
    for name in names {
        if let Some(pid) = process(name) {
            mark(dir, pid)?;
            left_out += leave_out(dir, pid)?;
        }
    }
    Ok(left_out)
}

fn pagemap(pid: i32) -> String {
    format!("pagemap-{pid}.img")
}

fn mm(pid: i32) -> String {
    format!("mm-{pid}.img")
}

fn pages(head: &Head) -> String {
    format!("pages-{}.img", head.pages_id)
}

/// The process whose pagemap has this name. Those of shared memory have a word before the number.
fn process(name: &str) -> Option<i32> {
    name.strip_prefix("pagemap-")?.strip_suffix(".img")?.parse().ok()
}

fn open(dir: BorrowedFd<'_>, name: &str, flags: OFlags) -> io::Result<File> {
    let flags = flags | OFlags::NOFOLLOW | OFlags::CLOEXEC;
    Ok(rustix::fs::openat(dir, name, flags, Mode::empty())?.into())
}

/// Reads a file that lists memory. One that is too long is cut off, and so is not what is expected.
fn read(dir: BorrowedFd<'_>, name: &str) -> io::Result<Vec<u8>> {
    let mut bytes = Vec::new();
    open(dir, name, OFlags::RDONLY)?.take(MAX_LIST).read_to_end(&mut bytes)?;
    Ok(bytes)
}

/// The pids of the processes that have memory.
///
/// # Errors
/// The directory cannot be read.
pub(super) fn processes(dir: BorrowedFd<'_>) -> io::Result<Vec<i32>> {
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

/// The memory of a process that it has for itself and that comes from no file.
#[derive(Debug)]
pub(super) struct Private {
    /// In order of the addresses; each lies in one mapping.
    pub(super) extents: Vec<Extent>,
    /// The mappings of these, from their starts to their ends.
    pub(super) mappings: Vec<(u64, u64)>,
    /// Bytes of the largest mapping that the kernel would count as if it were to be written.
    pub(super) charged: u64,
    /// What the extents are in.
    pub(super) pages: File,
}

/// Finds that memory, as CRIU has marked it. `None` if the files are not exactly as they are known here.
///
/// # Errors
/// The files cannot be read.
pub(super) fn private(dir: BorrowedFd<'_>, pid: i32) -> io::Result<Option<Private>> {
    let Some((head, runs)) = decode(&read(dir, &pagemap(pid))?) else { return Ok(None) };
    let Some(all) = decode_mappings(&read(dir, &mm(pid))?) else { return Ok(None) };
    let charged = all.iter().map(Between::charged).max().unwrap_or(0);
    let mappings: Vec<Between> = all.into_iter().filter(Between::is_left).collect();
    let pages = open(dir, &pages(&head), OFlags::RDONLY)?;
    let (mut extents, mut at) = (Vec::new(), 0);
    for run in &runs {
        let Some(end) = run.end_in_file(at) else { return Ok(None) };
        match (run.flags() & LAZY != 0, run.is_present()) {
            (true, true) => {
                let Some(cut) = within(&mappings, run, at) else { return Ok(None) };
                extents.extend(cut);
            }
            // Of zeros, or in the files of another image.
            (true, false) => return Ok(None),
            (false, _) => {}
        }
        at = end;
    }
    let is_whole = at == pages.metadata()?.len();
    let mappings = mappings.iter().map(|mapping| (mapping.start, mapping.end)).collect();
    Ok(is_whole.then_some(Private { extents, mappings, charged, pages }))
}

/// Marks the runs that lie in memory of a process that it has for itself and that comes from no file. CRIU means to
/// do that itself, but for stacks; what it takes for a stack is the whole process, if the stack pointer of one of
/// its threads is a multiple of 4096.
///
/// # Errors
/// The files cannot be read, or what is to be marked cannot be written.
pub(super) fn mark(dir: BorrowedFd<'_>, pid: i32) -> io::Result<()> {
    let before = read(dir, &pagemap(pid))?;
    let Some((head, mut runs)) = decode(&before) else { return Ok(()) };
    let mappings = match read(dir, &mm(pid)) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(()),
        read => decode_mappings(&read?),
    };
    let Some(mut mappings) = mappings else { return Ok(()) };
    mappings.retain(Between::is_left);
    for run in runs.iter_mut().filter(|run| run.is_present()) {
        if within(&mappings, run, 0).is_some() {
            run.flags = Some(run.flags() | LAZY);
        }
    }
    let after = encode(&head, &runs);
    if after != before {
        let file = open(dir, &pagemap(pid), OFlags::WRONLY)?;
        file.write_all_at(&after, 0)?;
        file.set_len(after.len() as u64)?;
    }
    Ok(())
}

/// Cuts a run at the ends of mappings. `None` if not all of it is in one.
fn within(mappings: &[Between], run: &Run, mut at: u64) -> Option<Vec<Extent>> {
    let (mut address, end) = (run.address, run.address.checked_add(run.bytes())?);
    let mut extents = Vec::new();
    while address < end {
        let next = mappings.partition_point(|mapping| mapping.end <= address);
        let mapping = mappings.get(next).filter(|mapping| mapping.start <= address)?;
        let len = mapping.end.min(end) - address;
        extents.push(Extent { to: address, at, len });
        (address, at) = (address + len, at + len);
    }
    Some(extents)
}

/// In order of their addresses.
fn decode_mappings(bytes: &[u8]) -> Option<Vec<Between>> {
    let (len, rest) = bytes.strip_prefix(&MM_MAGIC)?.split_first_chunk()?;
    let message = rest.get(..u32::from_le_bytes(*len) as usize)?;
    let mappings = Mappings::decode(message).ok()?.all;
    let is_in_order = mappings.is_sorted_by(|a, b| a.end <= b.start)
        && mappings.iter().all(|mapping| mapping.start < mapping.end);
    is_in_order.then_some(mappings)
}

fn leave_out(dir: BorrowedFd<'_>, pid: i32) -> io::Result<u64> {
    let map = open(dir, &pagemap(pid), OFlags::RDWR)?;
    let bytes = read(dir, &pagemap(pid))?;
    let Some((head, runs)) = decode(&bytes) else { return Ok(0) };
    let pages = open(dir, &pages(&head), OFlags::RDWR)?;
    let listed = runs.iter().try_fold(0, |at, run| run.end_in_file(at));
    let size = pages.metadata()?.len();
    if listed != Some(size) {
        return Ok(0);
    }
    let (kept, end) = compact(&pages, runs)?;
    pages.set_len(end)?;
    if end < size {
        let bytes = encode(&head, &kept);
        map.write_all_at(&bytes, 0)?;
        map.set_len(bytes.len() as u64)?;
    }
    Ok(size - end)
}

impl Run {
    fn is_present(&self) -> bool {
        self.flags() & PRESENT != 0
    }

    fn bytes(&self) -> u64 {
        u64::from(self.pages) * PAGE as u64
    }

    /// Where its bytes end in the file of pages, of which those before it end at `at`.
    fn end_in_file(&self, at: u64) -> Option<u64> {
        if self.is_present() { at.checked_add(self.bytes()) } else { Some(at) }
    }
}

/// Moves what is kept to the front of the file. Gives the runs that are left, and where they end.
fn compact(file: &File, runs: Vec<Run>) -> io::Result<(Vec<Run>, u64)> {
    let mut kept: Vec<Run> = Vec::with_capacity(runs.len());
    let (mut from, mut to) = (0, 0);
    let mut buffer = vec![0; PIECE * PAGE];
    for run in runs {
        if !run.is_present() {
            kept.push(run);
            continue;
        }
        let (mut address, mut left) = (run.address, run.pages as usize);
        // Whether the last run in the list is the beginning of this one.
        let mut begun = false;
        while left > 0 {
            let piece = &mut buffer[..left.min(PIECE) * PAGE];
            file.read_exact_at(piece, from)?;
            for (zeros, part) in parts(piece, run.flags() & LAZY != 0) {
                let pages = part.len() / PAGE;
                if !zeros {
                    if from != to {
                        file.write_all_at(part, to)?;
                    }
                    to += part.len() as u64;
                    match kept.last_mut().filter(|_| begun) {
                        Some(last) => last.pages += pages as u32,
                        None => kept.push(Run { address, pages: pages as u32, ..run.clone() }),
                    }
                }
                begun = !zeros;
                from += part.len() as u64;
                address += part.len() as u64;
                left -= pages;
            }
        }
    }
    Ok((kept, to))
}

/// Cuts pages into parts that are zeros, if these are looked for, and others.
fn parts(pages: &[u8], look: bool) -> Vec<(bool, &[u8])> {
    let mut cuts = vec![0];
    let mut zeros = Vec::new();
    let is_zero = |page: &[u8]| page.iter().all(|byte| *byte == 0);
    let flags: Vec<bool> = pages.chunks(PAGE).map(|page| look && is_zero(page)).collect();
    let mut at = 0;
    for same in flags.chunk_by(|a, b| a == b) {
        let zero = same[0] && same.len() >= SHORTEST;
        at += same.len() * PAGE;
        match zeros.last() {
            Some(last) if *last == zero => *cuts.last_mut().expect("not empty") = at,
            _ => {
                zeros.push(zero);
                cuts.push(at);
            }
        }
    }
    let between = cuts.windows(2).map(|cut| &pages[cut[0]..cut[1]]);
    zeros.into_iter().zip(between).collect()
}

/// `None` if it is not exactly what is expected.
fn decode(bytes: &[u8]) -> Option<(Head, Vec<Run>)> {
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
    if runs.iter().any(|run| run.address.checked_add(run.bytes()).is_none()) {
        return None;
    }
    // A field that is not known here would be lost.
    (encode(&head, &runs) == bytes).then_some((head, runs))
}

fn put(bytes: &mut Vec<u8>, message: &impl Message) {
    bytes.extend_from_slice(&(message.encoded_len() as u32).to_le_bytes());
    bytes.extend_from_slice(&message.encode_to_vec());
}

fn encode(head: &Head, runs: &[Run]) -> Vec<u8> {
    let mut bytes = MAGIC.to_vec();
    put(&mut bytes, head);
    runs.iter().for_each(|run| put(&mut bytes, run));
    bytes
}

/// What the tests of this and of the other who reads these files make.
#[cfg(test)]
pub(super) mod made {
    use super::*;
    use std::path::Path;

    /// Writes the files of process 42 with mappings (start and end) and runs of memory (address, whether it is
    /// marked as private, bytes).
    pub(in super::super) fn write(dir: &Path, maps: &[(u64, u64)], runs: &[(u64, bool, &[u8])]) {
        let flags = (libc::MAP_PRIVATE | libc::MAP_ANONYMOUS) as u32;
        let map = |&(start, end)| Between { start, end, protection: 3, flags, status: 1 };
        let all = maps.iter().map(map).collect();
        let mut bytes = MM_MAGIC.to_vec();
        put(&mut bytes, &Mappings { all });
        std::fs::write(dir.join("mm-42.img"), bytes).unwrap();
        let run = |&(address, is_private, bytes): &(u64, bool, &[u8])| Run {
            address,
            pages: (bytes.len() / PAGE) as u32,
            flags: Some(if is_private { LAZY | PRESENT } else { PRESENT }),
        };
        let runs_of = runs.iter().map(run).collect::<Vec<_>>();
        std::fs::write(dir.join("pagemap-42.img"), encode(&Head { pages_id: 7 }, &runs_of))
            .unwrap();
        let pages: Vec<u8> = runs.iter().flat_map(|(_, _, bytes)| *bytes).copied().collect();
        std::fs::write(dir.join("pages-7.img"), pages).unwrap();
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::BTreeMap;
    use std::os::fd::AsFd;
    use std::path::Path;

    const BOTH: Option<u32> = Some(LAZY | PRESENT);

    /// Writes runs of pages, each filled with its number, or with zeros.
    fn write(dir: &Path, runs: &[(u64, Option<u32>, &[u8])]) {
        let run = |(page, flags, bytes): &(u64, Option<u32>, &[u8])| Run {
            address: page * PAGE as u64,
            pages: bytes.len() as u32,
            flags: *flags,
        };
        let map = encode(&Head { pages_id: 7 }, &runs.iter().map(run).collect::<Vec<_>>());
        std::fs::write(dir.join("pagemap-42.img"), map).unwrap();
        let present = runs.iter().filter(|(_, flags, _)| flags.is_some_and(|f| f & PRESENT != 0));
        let pages = present.flat_map(|(_, _, bytes)| bytes.iter().flat_map(|byte| [*byte; PAGE]));
        std::fs::write(dir.join("pages-7.img"), pages.collect::<Vec<u8>>()).unwrap();
    }

    /// The pages as a restore reads them.
    fn read(dir: &Path) -> BTreeMap<u64, u8> {
        let (_, runs) = decode(&std::fs::read(dir.join("pagemap-42.img")).unwrap()).unwrap();
        let bytes = std::fs::read(dir.join("pages-7.img")).unwrap();
        let mut pages = bytes.chunks(PAGE);
        let mut found = BTreeMap::new();
        for run in runs.iter().filter(|run| run.is_present()) {
            for page in 0..u64::from(run.pages) {
                let bytes = pages.next().unwrap();
                assert!(bytes.iter().all(|byte| *byte == bytes[0]));
                found.insert(run.address / PAGE as u64 + page, bytes[0]);
            }
        }
        assert!(pages.next().is_none());
        found
    }

    fn left_out(dir: &Path) -> u64 {
        let dir = File::open(dir).unwrap();
        let names = ["pagemap-42.img", "pagemap-shmem-3.img", "pages-7.img"];
        leave_out_zeros(dir.as_fd(), names).unwrap() / PAGE as u64
    }

    #[test]
    fn long_runs_of_zeros_in_private_memory_are_left_out() {
        let dir = tempfile::tempdir().unwrap();
        let mut long = vec![0; 3000];
        (long[0], long[1500], long[1505], long[2999]) = (1, 2, 3, 4);
        let short = [5, 0, 0, 0, 6];
        let nothing = [0; 40];
        let runs: [(u64, Option<u32>, &[u8]); 6] = [
            (10, BOTH, &short),
            (100, BOTH, &long),
            (5000, Some(PRESENT), &nothing),
            (6000, BOTH, &nothing),
            (7000, Some(1), &nothing),
            (8000, BOTH, &short),
        ];
        write(dir.path(), &runs);
        let before = read(dir.path());
        assert_eq!(left_out(dir.path()), 1499 + 1493 + 40);
        let after = read(dir.path());
        assert_eq!(after.len() + 1499 + 1493 + 40, before.len());
        for (page, byte) in &before {
            assert_eq!(after.get(page).copied().unwrap_or(0), *byte, "page {page}");
        }
        assert!((5000..5040).all(|page| after.contains_key(&page)), "it may be of a file");
        assert!(!after.contains_key(&6000));
        assert_eq!(left_out(dir.path()), 0, "nothing is left to be done");
        assert_eq!(read(dir.path()), after);
    }

    #[test]
    fn what_is_not_as_expected_is_left_alone() {
        let dir = tempfile::tempdir().unwrap();
        let (map, pages) = (dir.path().join("pagemap-42.img"), dir.path().join("pages-7.img"));
        let nothing = [0; 64];
        write(dir.path(), &[(1, BOTH, &nothing)]);
        let good = std::fs::read(&map).unwrap();
        let mut other_magic = good.clone();
        other_magic[4] ^= 1;
        let mut more = good.clone();
        // One more field, of a newer CRIU.
        let len = more.len();
        let at = len - Run { address: PAGE as u64, pages: 64, flags: BOTH }.encoded_len() - 4;
        more[at] += 2;
        more.extend_from_slice(&[5 << 3, 64]);
        for bytes in [&good[..good.len() - 1], &other_magic, &more, b""] {
            std::fs::write(&map, bytes).unwrap();
            assert_eq!(left_out(dir.path()), 0);
            assert_eq!(std::fs::read(&map).unwrap(), bytes);
        }
        std::fs::write(&map, &good).unwrap();
        std::fs::write(&pages, vec![0; 63 * PAGE]).unwrap();
        assert_eq!(left_out(dir.path()), 0, "a page is missing");
        std::fs::write(&pages, vec![0; 64 * PAGE]).unwrap();
        assert_eq!(left_out(dir.path()), 64);
    }

    #[test]
    fn sums_that_overflow_are_not_as_expected() {
        let dir = tempfile::tempdir().unwrap();
        let open = || std::fs::File::open(dir.path()).unwrap();
        let (page, bytes) = (PAGE as u64, vec![1; PAGE]);
        // A mapping that ends before it begins, alone or as the last one.
        for maps in [&[(5 * page, 2 * page)][..], &[(page, 2 * page), (5 * page, 3 * page)]] {
            made::write(dir.path(), maps, &[(page, true, &bytes)]);
            assert!(private(open().as_fd(), 42).unwrap().is_none());
        }
        // Memory that goes on after the last address, and more pages than any file has.
        let run = |address, pages| Run { address, pages, flags: BOTH };
        let last = u64::MAX - page + 1;
        for runs in [vec![run(last, 2)], vec![run(page, u32::MAX); (1 << 20) + 1]] {
            made::write(dir.path(), &[(page, last)], &[(page, true, &bytes)]);
            let map = encode(&Head { pages_id: 7 }, &runs);
            std::fs::write(dir.path().join("pagemap-42.img"), map).unwrap();
            assert_eq!(left_out(dir.path()), 0);
            assert!(private(open().as_fd(), 42).unwrap().is_none());
        }
    }

    #[test]
    fn private_memory_is_cut_at_mappings() {
        let dir = tempfile::tempdir().unwrap();
        let open = || std::fs::File::open(dir.path()).unwrap();
        let found = || private(open().as_fd(), 42).unwrap().map(|found| found.extents);
        let page = PAGE as u64;
        let pages = |count: usize| vec![1; count * PAGE];
        let maps = [(2 * page, 5 * page), (5 * page, 9 * page), (20 * page, 30 * page)];
        made::write(
            dir.path(),
            &maps,
            &[
                (3 * page, true, &pages(4)),
                (7 * page, false, &pages(1)),
                (25 * page, true, &pages(5)),
            ],
        );
        assert_eq!(processes(open().as_fd()).unwrap(), [42]);
        let extent = |to, at, len| Extent { to: to * page, at: at * page, len: len * page };
        assert_eq!(found(), Some(vec![extent(3, 0, 2), extent(5, 2, 2), extent(25, 5, 5)]));

        // Beyond every mapping, between two, and mappings out of order.
        made::write(dir.path(), &maps, &[(28 * page, true, &pages(3))]);
        assert_eq!(found(), None);
        made::write(dir.path(), &maps, &[(8 * page, true, &pages(2))]);
        assert_eq!(found(), None);
        made::write(dir.path(), &[maps[1], maps[0]], &[(3 * page, true, &pages(1))]);
        assert_eq!(found(), None);
        // More pages in the file than are listed; no file of mappings that is known here.
        made::write(dir.path(), &maps, &[(3 * page, true, &pages(1))]);
        assert!(found().is_some());
        std::fs::write(dir.path().join("pages-7.img"), pages(2)).unwrap();
        assert_eq!(found(), None);
        made::write(dir.path(), &maps, &[(3 * page, true, &pages(1))]);
        std::fs::write(dir.path().join("mm-42.img"), b"something else").unwrap();
        assert_eq!(found(), None);
    }

    #[test]
    fn what_criu_has_not_marked_is_marked() {
        let dir = tempfile::tempdir().unwrap();
        let open = || std::fs::File::open(dir.path()).unwrap();
        let page = PAGE as u64;
        let pages = |count: usize| vec![1; count * PAGE];
        let maps = [(2 * page, 5 * page), (20 * page, 30 * page)];
        let runs = [(3 * page, false, &pages(2)[..]), (25 * page, true, &pages(5))];
        made::write(dir.path(), &maps, &runs);
        let found = || private(open().as_fd(), 42).unwrap().unwrap().extents.len();
        assert_eq!(found(), 1);
        mark(open().as_fd(), 42).unwrap();
        assert_eq!(found(), 2);
        // Not where CRIU reads in any case: memory of a file, locked memory, a shadow stack.
        let private_memory = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS;
        for (flags, status) in [
            (libc::MAP_PRIVATE, 1),
            (libc::MAP_SHARED | libc::MAP_ANONYMOUS, 1),
            (private_memory | libc::MAP_LOCKED, 1),
            (private_memory, 1 | 1 << 15),
        ] {
            made::write(dir.path(), &maps, &runs[..1]);
            let (flags, protection) = (flags as u32, 3);
            let all = vec![Between { start: 0, end: 9 * page, protection, flags, status }];
            let mut bytes = MM_MAGIC.to_vec();
            put(&mut bytes, &Mappings { all });
            std::fs::write(dir.path().join("mm-42.img"), bytes).unwrap();
            mark(open().as_fd(), 42).unwrap();
            assert_eq!(found(), 0, "{flags:x} {status:x}");
        }
        // Nor where there is no file of mappings.
        std::fs::remove_file(dir.path().join("mm-42.img")).unwrap();
        mark(open().as_fd(), 42).unwrap();
    }

    #[test]
    fn what_would_be_charged_is_counted() {
        let map = |protection, flags: i32| {
            let flags = flags as u32;
            Between { start: 1 << 20, end: 3 << 20, protection, flags, status: 1 }.charged()
        };
        let private_memory = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS;
        assert_eq!(map(0, private_memory), 2 << 20);
        assert_eq!(map(0, private_memory | libc::MAP_NORESERVE), 0);
        assert_eq!(map(3, private_memory), 0);
        assert_eq!(map(0, libc::MAP_SHARED), 0);
    }
}
