//! Which memory is brought in, and where its bytes are.

use std::collections::{HashMap, HashSet};
use std::io;
use std::ops::Range;
use std::os::fd::BorrowedFd;
use std::sync::Arc;

use procfs::Current;

use super::super::pages::{self, Extent};
use crate::base::mapping::Mapping;

/// Bytes of a file that is in memory are taken in parts of so many.
const PIECE: u64 = 1 << 20;
/// Zeros are put in place in parts of at most so many bytes.
const ZEROS: u64 = 4 << 20;

/// Bytes of a file of pages.
pub(crate) enum Part<'a> {
    /// These.
    Bytes(&'a [u8]),
    /// Nothing but zeros.
    Zeros,
}

/// A file of pages, wherever its bytes are. Any number of threads read it at once.
pub(crate) trait PagesFile: Send + Sync {
    /// Bytes.
    fn size(&self) -> u64;

    /// The part that has the byte `at`, which lies within the size. Parts begin and end at multiples of a page, and are
    /// read as wholes.
    fn part(&self, at: u64) -> Range<u64>;

    /// Reads a part. Either `buffer` is given back, with its bytes, or they are elsewhere.
    ///
    /// # Errors
    /// The bytes are damaged or cannot be read.
    fn read<'a>(&'a self, part: &Range<u64>, buffer: &'a mut Vec<u8>) -> io::Result<Part<'a>>;
}

/// A file of pages among CRIU's files.
impl PagesFile for Mapping {
    fn size(&self) -> u64 {
        self.len() as u64
    }

    fn part(&self, at: u64) -> Range<u64> {
        let start = at / PIECE * PIECE;
        start..(start + PIECE).min(self.size())
    }

    fn read<'a>(&'a self, part: &Range<u64>, _: &'a mut Vec<u8>) -> io::Result<Part<'a>> {
        let bytes = self.bytes().get(part.start as usize..part.end as usize);
        bytes.map(Part::Bytes).ok_or_else(|| io::ErrorKind::UnexpectedEof.into())
    }
}

/// The private memory of the processes of an image.
pub(crate) struct Plan {
    processes: HashMap<i32, Arc<Memory>>,
    /// What CRIU itself reads of the files of pages.
    left_to_criu: HashMap<String, Vec<Range<u64>>>,
}

/// The private memory of one process.
pub(super) struct Memory {
    pub(super) file: Arc<dyn PagesFile>,
    /// In order of the addresses, and of the places in the file. Each lies in one part of the file.
    pieces: Vec<Extent>,
    /// Those that lie in the same part.
    groups: Vec<Range<usize>>,
    /// The groups in the order in which they are to come while nobody touches them.
    order: Vec<usize>,
    /// The addresses of zeros that are in no file. Each part lies in one mapping.
    zeros: Vec<Range<u64>>,
}

impl Plan {
    /// Looks at CRIU's files in `images`. Of the files of pages that `elsewhere` gives there need be nothing. Where zeros
    /// were left out of them, `zeros` is the directory of the lists. `None` if
    /// something about them is not known here, or the kernel gives no userfaultfd, or CRIU had better do it:
    ///
    /// - Of processes that were forked, and have the same mappings, it finds the pages that are still the same, and
    ///   they go on sharing them.
    /// - Asked for lazy pages it maps all private memory as if it were to be written, which the kernel refuses, or
    ///   counts, where it counts what is promised.
    ///
    /// # Errors
    /// The files cannot be read.
    pub(crate) fn of(
        images: BorrowedFd<'_>,
        elsewhere: &dyn Fn(&str) -> Option<Arc<dyn PagesFile>>,
        zeros: Option<BorrowedFd<'_>>,
    ) -> io::Result<Option<Self>> {
        // SAFETY: a new descriptor, and nothing is registered with it.
        let uffd = unsafe { rustix::mm::userfaultfd(rustix::mm::UserfaultfdFlags::CLOEXEC) };
        if uffd.is_err() {
            return Ok(None);
        }
        let Some(most) = most_charged()? else { return Ok(None) };
        let mut plan = Self { processes: HashMap::new(), left_to_criu: HashMap::new() };
        let mut mappings = HashSet::new();
        for pid in pages::processes(images)? {
            match pages::mark(images, pid) {
                // A warm image, in which it was done.
                Err(error) if error.kind() == io::ErrorKind::ReadOnlyFilesystem => {}
                marked => marked?,
            }
            let mut found_file = None;
            let found = pages::private(images, pid, &mut |name| {
                let file = match elsewhere(name) {
                    Some(file) => file,
                    // SAFETY: the files of an image that is being restored are nobody else's, or of a file system
                    // that cannot be written.
                    None => Arc::new(unsafe { Mapping::new(pages::open_pages(images, name)?) }?),
                };
                Ok(found_file.insert(file).size())
            })?;
            let (Some(found), Some(file)) = (found, found_file) else { return Ok(None) };
            let is_forked = !found.mappings.iter().all(|mapping| mappings.insert(*mapping));
            if is_forked || found.charged > most {
                tracing::debug!(pid, is_forked, charged = found.charged, "memory is left to CRIU");
                return Ok(None);
            }
            plan.left_to_criu.insert(found.pages, between(&found.extents, file.size()));
            let memory = Memory::new(file, &found.extents, &found.mappings);
            let listed = zeros.map_or_else(|| Ok(Vec::new()), |dir| pages::left_out(dir, pid))?;
            let zeros = within(&found.mappings, &listed);
            plan.processes.insert(pid, Arc::new(Memory { zeros, ..memory }));
        }
        Ok((!plan.processes.is_empty()).then_some(plan))
    }

    /// What CRIU itself reads of a file of pages; `None` if that is all of it.
    pub(crate) fn left_to_criu(&self, name: &str) -> Option<&[Range<u64>]> {
        self.left_to_criu.get(name).map(Vec::as_slice)
    }

    pub(super) fn processes(&self) -> &HashMap<i32, Arc<Memory>> {
        &self.processes
    }
}

impl Memory {
    /// `mappings` are those that the extents lie in, in order.
    pub(super) fn new(
        file: Arc<dyn PagesFile>,
        extents: &[Extent],
        mappings: &[(u64, u64)],
    ) -> Self {
        let (mut pieces, mut groups) = (Vec::<Extent>::new(), Vec::<Range<usize>>::new());
        let mut part = 0..0;
        for extent in extents {
            let mut rest = *extent;
            while rest.len > 0 {
                if !part.contains(&rest.at) {
                    part = file.part(rest.at);
                    groups.push(pieces.len()..pieces.len());
                }
                let len = rest.len.min(part.end - rest.at);
                pieces.push(Extent { len, ..rest });
                groups.last_mut().expect("was pushed").end = pieces.len();
                rest = Extent { to: rest.to + len, at: rest.at + len, len: rest.len - len };
            }
        }
        let order = order(&pieces, &groups, mappings);
        Self { file, pieces, groups, order, zeros: Vec::new() }
    }

    /// A part of the zeros that are in no file, by its number; `None` after the last.
    pub(super) fn zeros(&self, number: usize) -> Option<&Range<u64>> {
        self.zeros.get(number)
    }

    /// The groups in the order in which they are to come while nobody touches them.
    pub(super) fn order(&self) -> &[usize] {
        &self.order
    }

    /// The number of the part that has a byte of the file.
    pub(super) fn group_of(&self, at: u64) -> usize {
        let after = self.groups.partition_point(|group| self.pieces[group.start].at <= at);
        after.saturating_sub(1)
    }

    /// In order of the addresses. Each lies in one part of the file.
    pub(super) fn pieces(&self) -> &[Extent] {
        &self.pieces
    }

    /// The pieces of a part of the file, by the number of that part; `None` after the last.
    pub(super) fn group(&self, number: usize) -> Option<&[Extent]> {
        self.groups.get(number).map(|pieces| &self.pieces[pieces.clone()])
    }

    /// How many parts of the file there are.
    pub(super) fn groups(&self) -> usize {
        self.groups.len()
    }

    /// The piece that has an address.
    pub(super) fn at(&self, address: u64) -> Option<Extent> {
        let after = self.pieces.partition_point(|piece| piece.to <= address);
        let piece = self.pieces[..after].last()?;
        (address < piece.to + piece.len).then_some(*piece)
    }

    pub(super) fn bytes(&self) -> u64 {
        self.pieces.iter().map(|piece| piece.len).sum()
    }
}

/// The groups of pieces by the memory that the smallest mapping has of which one of the pieces is.
fn order(pieces: &[Extent], groups: &[Range<usize>], mappings: &[(u64, u64)]) -> Vec<usize> {
    let mapping = |piece: &Extent| mappings.partition_point(|(_, end)| *end <= piece.to);
    let mut bytes = vec![0; mappings.len() + 1];
    pieces.iter().for_each(|piece| bytes[mapping(piece)] += piece.len);
    let of_group = |group: &usize| {
        let pieces = &pieces[groups[*group].clone()];
        pieces.iter().map(|piece| bytes[mapping(piece)]).min()
    };
    let mut order: Vec<usize> = (0..groups.len()).collect();
    order.sort_by_cached_key(of_group);
    order
}

/// What of some addresses lies in mappings, in parts.
fn within(mappings: &[(u64, u64)], addresses: &[Range<u64>]) -> Vec<Range<u64>> {
    let mut parts = Vec::new();
    for range in addresses {
        let first = mappings.partition_point(|(_, end)| *end <= range.start);
        for (start, end) in mappings[first..].iter().take_while(|(start, _)| *start < range.end) {
            let (mut at, end) = (range.start.max(*start), range.end.min(*end));
            while at < end {
                let next = at.saturating_add(ZEROS).min(end);
                parts.push(at..next);
                at = next;
            }
        }
    }
    parts
}

/// What of a file of so many bytes is in none of the extents.
fn between(extents: &[Extent], size: u64) -> Vec<Range<u64>> {
    let (mut gaps, mut at) = (Vec::new(), 0);
    for extent in extents {
        if extent.at > at {
            gaps.push(at..extent.at);
        }
        at = extent.at + extent.len;
    }
    if size > at {
        gaps.push(at..size);
    }
    gaps
}

/// The most bytes of one mapping that the kernel lets a process promise itself to write. `None` if it looks at what
/// all mappings have promised. CUDA's driver reserves more than 100 GiB of addresses in one mapping.
fn most_charged() -> io::Result<Option<u64>> {
    Ok(match std::fs::read_to_string("/proc/sys/vm/overcommit_memory")?.trim() {
        "0" => Some(procfs::Meminfo::current().map_err(io::Error::other)?.mem_total),
        "1" => Some(u64::MAX),
        _ => None,
    })
}
