//! What the files say is at an address, for who reads an image and restores nothing.

use std::collections::HashMap;
use std::ops::Range;

use prost::Message;

use super::files::{GUARD, MM_MAGIC, PAGE, decode};

/// In [`Area::status`]: memory that processes share and that has no file, and the same by System V's calls.
const SHARED: u32 = 1 << 8 | 1 << 10;
/// In [`Area::status`]: memory of a file, private or shared.
const OF_FILE: u32 = 1 << 6 | 1 << 7;
/// In [`Area::status`]: a memfd, as which CRIU also takes shared memory without a file.
const OF_MEMFD: u32 = 1 << 14;
/// In [`Area::status`]: private memory of a file.
const PRIVATE_OF_FILE: u32 = 1 << 6;
/// In [`Area::status`]: what the kernel has in every process, and devices' memory.
const OF_KERNEL: u32 = 1 << 2 | 1 << 3 | 1 << 11 | 1 << 12 | 1 << 13;

#[derive(Clone, PartialEq, Message)]
struct Areas {
    #[prost(message, repeated, tag = "14")]
    all: Vec<Area>,
}

/// A mapping (CRIU's `vma.proto`).
#[derive(Clone, PartialEq, Message)]
struct Area {
    #[prost(uint64, required, tag = "1")]
    start: u64,
    #[prost(uint64, required, tag = "2")]
    end: u64,
    /// Where it begins in what it maps, in bytes.
    #[prost(uint64, required, tag = "3")]
    offset: u64,
    /// Names what it maps.
    #[prost(uint64, required, tag = "4")]
    of: u64,
    /// Flags as mmap(2) takes them.
    #[prost(uint32, required, tag = "5")]
    protection: u32,
    #[prost(uint32, required, tag = "7")]
    status: u32,
}

/// Pages whose bytes are in a file, and where: runs in order of their addresses.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Pages {
    /// The name of the file.
    pub(crate) file: String,
    /// Addresses, and where the bytes begin in the file.
    runs: Vec<(Range<u64>, u64)>,
}

impl Pages {
    /// Reads a file that lists pages. `None` if it is not exactly what is expected.
    pub(crate) fn decode(bytes: &[u8]) -> Option<Self> {
        let (head, all) = decode(bytes)?;
        let (mut runs, mut at) = (Vec::new(), 0);
        for run in &all {
            let end = run.end_in_file(at)?;
            if !run.is_present() {
                // Its bytes are in the files of another image, of which none of gpucr's tells.
                return None;
            }
            runs.push((run.address..run.end()?, at));
            at = end;
        }
        let is_in_order = runs.is_sorted_by(|(a, _), (b, _)| a.end <= b.start);
        is_in_order.then(|| Self { file: super::files::pages(&head), runs })
    }

    /// Where the bytes of this address are in the file, or `None`; and where what is said of it ends, `end` at most.
    pub(crate) fn at(&self, address: u64, end: u64) -> (Option<u64>, u64) {
        let next = self.runs.partition_point(|(run, _)| run.end <= address);
        match self.runs.get(next) {
            Some((run, at)) if run.start <= address => {
                (Some(at + (address - run.start)), run.end.min(end))
            }
            Some((run, _)) => (None, run.start.min(end)),
            None => (None, end),
        }
    }
}

/// What a process has at an address.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Mapped {
    /// Memory of its own without a file: what no page is listed of is zeros.
    Private,
    /// Memory that processes share and that has no file: pages are listed by their place in it. What no page is
    /// listed of is zeros.
    Shared {
        /// Names the memory.
        of: u64,
        /// The place of the address.
        offset: u64,
    },
    /// The same of a memfd.
    Memfd {
        /// Names the open file: see [`Memfds`].
        of: u64,
        /// The place of the address.
        offset: u64,
    },
    /// Memory of a file: what no page is listed of is as the file has it, which is not in CRIU's files.
    File,
    /// Addresses that are kept free: what no page is listed of cannot be read.
    Kept,
    /// What the kernel or a device has in the process, which is saved nowhere.
    Kernel,
}

/// The mappings of a process.
#[derive(Debug)]
pub(crate) struct Mappings(Vec<Area>);

impl Mappings {
    /// Reads the file of them. `None` if it is not what is expected.
    pub(crate) fn decode(bytes: &[u8]) -> Option<Self> {
        let (len, rest) = bytes.strip_prefix(&MM_MAGIC)?.split_first_chunk()?;
        let message = rest.get(..u32::from_le_bytes(*len) as usize)?;
        let mut all = Areas::decode(message).ok()?.all;
        all.retain(|area| area.status & GUARD == 0);
        let page = PAGE as u64;
        let is_possible = |area: &Area| {
            area.start < area.end
                && (area.start % page, area.end % page) == (0, 0)
                && area.offset.checked_add(area.end - area.start).is_some()
        };
        let is_in_order = all.is_sorted_by(|a, b| a.end <= b.start);
        (is_in_order && all.iter().all(is_possible)).then_some(Self(all))
    }

    /// What is at an address, and where that ends.
    pub(crate) fn at(&self, address: u64) -> Option<(Mapped, u64)> {
        let next = self.0.partition_point(|area| area.end <= address);
        let area = self.0.get(next).filter(|area| area.start <= address)?;
        let offset = area.offset + (address - area.start);
        let what = if area.status & OF_KERNEL != 0 {
            Mapped::Kernel
        } else if area.status & SHARED != 0 {
            Mapped::Shared { of: area.of, offset }
        } else if area.status & OF_MEMFD != 0 && area.status & PRIVATE_OF_FILE == 0 {
            Mapped::Memfd { of: area.of, offset }
        } else if area.status & (OF_FILE | OF_MEMFD) != 0 {
            Mapped::File
        } else if area.protection == 0 {
            Mapped::Kept
        } else {
            Mapped::Private
        };
        Some((what, area.end))
    }
}

/// The numbers of `files.img` and of `memfd.img`.
const FILES_MAGIC: [u8; 8] = [0x19, 0x43, 0x56, 0x54, 0x38, 0x31, 0x30, 0x56];
const MEMFD_MAGIC: [u8; 8] = [0x19, 0x43, 0x56, 0x54, 0x99, 0x34, 0x45, 0x48];
/// The name of the latter.
pub(crate) const MEMFD: &str = "memfd.img";

/// An open file (CRIU's `fdinfo.proto`).
#[derive(Clone, PartialEq, Message)]
struct Open {
    #[prost(uint32, required, tag = "2")]
    id: u32,
    #[prost(message, optional, tag = "20")]
    memfd: Option<OpenMemfd>,
}

#[derive(Clone, PartialEq, Message)]
struct OpenMemfd {
    #[prost(uint32, required, tag = "5")]
    inode: u32,
}

/// A memfd (CRIU's `memfd.proto`).
#[derive(Clone, PartialEq, Message)]
struct Inode {
    /// Names its memory among all that is shared.
    #[prost(uint32, required, tag = "5")]
    memory: u32,
    #[prost(uint64, required, tag = "7")]
    id: u64,
}

/// The memory of each memfd, by the number of an open file.
#[derive(Debug, Default)]
pub(crate) struct Memfds(HashMap<u64, u64>);

impl Memfds {
    /// Reads the files of open files and of memfds. `None` if they are not what is expected.
    pub(crate) fn decode(files: &[u8], memfd: &[u8]) -> Option<Self> {
        let inodes: Vec<Inode> = messages(memfd.strip_prefix(&MEMFD_MAGIC)?)?;
        let inodes: HashMap<u64, u64> =
            inodes.into_iter().map(|inode| (inode.id, inode.memory.into())).collect();
        let open: Vec<Open> = messages(files.strip_prefix(&FILES_MAGIC)?)?;
        let of = |open: Open| Some((open.id.into(), *inodes.get(&u64::from(open.memfd?.inode))?));
        Some(Self(open.into_iter().filter_map(of).collect()))
    }

    /// What names the memory of an open file.
    pub(crate) fn memory(&self, of: u64) -> Option<u64> {
        self.0.get(&of).copied()
    }
}

/// Messages, each behind its length.
pub(crate) fn messages<M: Message + Default>(mut rest: &[u8]) -> Option<Vec<M>> {
    let mut all = Vec::new();
    while !rest.is_empty() {
        let (len, after) = rest.split_first_chunk()?;
        let (message, after) = after.split_at_checked(u32::from_le_bytes(*len) as usize)?;
        all.push(M::decode(message).ok()?);
        rest = after;
    }
    Some(all)
}

/// The name of the file that lists the mappings of a process.
pub(crate) fn mappings_file(pid: u32) -> String {
    format!("mm-{pid}.img")
}

/// The name of the file that lists the pages of a process.
pub(crate) fn pages_file(pid: u32) -> String {
    format!("pagemap-{pid}.img")
}

/// The name of the file that lists the pages of memory that processes share.
pub(crate) fn shared_pages_file(of: u64) -> String {
    format!("pagemap-shmem-{of}.img")
}

#[cfg(test)]
mod tests {
    use super::super::files::{Head, LAZY, PRESENT, Run, encode, put};
    use super::*;

    const PAGE: u64 = super::PAGE as u64;

    fn listed(runs: &[(u64, u64, u32)]) -> Vec<u8> {
        let run =
            |&(page, pages, flags): &(u64, u64, u32)| Run::wide(page * PAGE, pages, Some(flags));
        encode(&Head { pages_id: 7 }, &runs.iter().map(run).collect::<Vec<_>>())
    }

    #[test]
    fn pages_are_found_by_their_address() {
        let both = PRESENT | LAZY;
        let pages = Pages::decode(&listed(&[(2, 3, both), (5, 1, PRESENT), (9, 2, both)])).unwrap();
        assert_eq!(pages.file, "pages-7.img");
        assert_eq!(pages.at(0, 100 * PAGE), (None, 2 * PAGE));
        assert_eq!(pages.at(2 * PAGE + 5, 100 * PAGE), (Some(5), 5 * PAGE));
        assert_eq!(pages.at(2 * PAGE, 3 * PAGE), (Some(0), 3 * PAGE), "not beyond the end");
        assert_eq!(pages.at(5 * PAGE, 100 * PAGE), (Some(3 * PAGE), 6 * PAGE));
        assert_eq!(pages.at(10 * PAGE, 100 * PAGE), (Some(5 * PAGE), 11 * PAGE));
        assert_eq!(pages.at(11 * PAGE, 100 * PAGE), (None, 100 * PAGE));
        // Pages of another image, twice the same, and out of order.
        for wrong in
            [&[(2, 3, LAZY)][..], &[(2, 3, both), (4, 1, both)], &[(9, 1, both), (2, 1, both)]]
        {
            assert_eq!(Pages::decode(&listed(wrong)), None);
        }
        let good = listed(&[(2, 3, both)]);
        assert_eq!(Pages::decode(&good[..good.len() - 1]), None);
    }

    #[test]
    fn mappings_say_what_is_at_an_address() {
        let area = |start: u64, end: u64, status, protection| Area {
            start: start * PAGE,
            end: end * PAGE,
            offset: 3 * PAGE,
            of: 12,
            protection,
            status,
        };
        let file = |all: Vec<Area>| {
            let mut bytes = MM_MAGIC.to_vec();
            put(&mut bytes, &Areas { all });
            bytes
        };
        let all = vec![
            area(1, 2, 1 | 1 << 9, 3),
            area(2, 4, 1 | 1 << 8, 3),
            area(4, 5, 1 | 1 << 6, 1),
            area(8, 9, 1 | 1 << 9, 0),
            area(9, 10, 1 | 1 << 3, 5),
            // Behind all: pages of another mapping that the kernel guards.
            area(1, 2, GUARD, 0),
        ];
        let mappings = Mappings::decode(&file(all)).unwrap();
        let at = |page: u64| mappings.at(page * PAGE + 1).map(|(what, end)| (what, end / PAGE));
        assert_eq!(at(0), None);
        assert_eq!(at(1), Some((Mapped::Private, 2)));
        assert_eq!(at(3), Some((Mapped::Shared { of: 12, offset: 4 * PAGE + 1 }, 4)));
        assert_eq!(at(4), Some((Mapped::File, 5)));
        assert_eq!((at(5), at(7)), (None, None));
        assert_eq!((at(8), at(9)), (Some((Mapped::Kept, 9)), Some((Mapped::Kernel, 10))));
        let memfds = vec![area(1, 2, 0x4081, 3), area(2, 3, 0x4041, 3)];
        let memfds = Mappings::decode(&file(memfds)).unwrap();
        assert_eq!(memfds.at(PAGE), Some((Mapped::Memfd { of: 12, offset: 3 * PAGE }, 2 * PAGE)));
        assert_eq!(memfds.at(2 * PAGE), Some((Mapped::File, 3 * PAGE)), "a private copy");
        for wrong in [
            vec![area(2, 1, 1, 3)],
            vec![area(1, 3, 1, 3), area(2, 4, 1, 3)],
            vec![Area { start: 1, ..area(1, 3, 1, 3) }],
            vec![Area { offset: u64::MAX, ..area(1, 3, 1, 3) }],
        ] {
            assert!(Mappings::decode(&file(wrong)).is_none());
        }
        assert!(Mappings::decode(b"something else").is_none());
    }

    #[test]
    fn memfds_are_found_by_their_open_files() {
        let open = |id, inode| Open { id, memfd: Some(OpenMemfd { inode }) };
        let file = |magic: [u8; 8], put_all: &dyn Fn(&mut Vec<u8>)| {
            let mut bytes = magic.to_vec();
            put_all(&mut bytes);
            bytes
        };
        let files = file(FILES_MAGIC, &|bytes| {
            put(bytes, &open(12, 1));
            put(bytes, &Open { id: 13, memfd: None });
            put(bytes, &open(14, 9));
        });
        let memfd = file(MEMFD_MAGIC, &|bytes| put(bytes, &Inode { memory: 4711, id: 1 }));
        let found = Memfds::decode(&files, &memfd).unwrap();
        let of = |id| found.memory(id);
        assert_eq!((of(12), of(13), of(14)), (Some(4711), None, None));
        assert!(Memfds::decode(&files[..files.len() - 1], &memfd).is_none());
        assert!(Memfds::decode(&memfd, &files).is_none());
    }
}
