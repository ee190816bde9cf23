//! Tests with files as CRIU makes them.

use std::collections::BTreeMap;
use std::fs::File;
use std::os::fd::AsFd;
use std::path::Path;

use prost::Message;

use super::files::{
    Between, Head, LAZY, MM_MAGIC, Mappings, PAGE, PRESENT, Run, decode, encode, put,
};
use super::private::{Extent, Private, mark, private};
use super::zeros::{leave_out_zeros, left_out as listed};
use super::{Origin, Part, left, made, open_pages, processes};
use crate::base::ranges::Ranges;

const BOTH: Option<u32> = Some(LAZY | PRESENT);

/// Writes runs of pages, each filled with its number, or with zeros.
fn write(dir: &Path, runs: &[(u64, Option<u32>, &[u8])]) {
    let run = |(page, flags, bytes): &(u64, Option<u32>, &[u8])| {
        Run::narrow(page * PAGE as u64, bytes.len() as u32, *flags)
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
        for page in 0..run.pages() {
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
    leave_out_zeros(dir.as_fd(), dir.as_fd(), names).unwrap() / PAGE as u64
}

/// The private memory of process 42.
fn found_in(dir: &std::fs::File) -> std::io::Result<Option<Private>> {
    private(dir.as_fd(), 42, &mut |name| Ok(open_pages(dir.as_fd(), name)?.metadata()?.len()))
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
    let listed = || {
        let listed = listed(File::open(dir.path()).unwrap().as_fd(), 42).unwrap();
        let page = |address| address / PAGE as u64;
        listed.into_iter().map(|zeros| page(zeros.start)..page(zeros.end)).collect::<Vec<_>>()
    };
    assert_eq!(listed(), []);
    assert_eq!(left_out(dir.path()), 1499 + 1493 + 40);
    let zeros = [101..1600, 1606..3099, 6000..6040];
    assert_eq!(listed(), zeros);
    let after = read(dir.path());
    assert_eq!(after.len() + 1499 + 1493 + 40, before.len());
    for (page, byte) in &before {
        assert_eq!(after.get(page).copied().unwrap_or(0), *byte, "page {page}");
    }
    assert!((5000..5040).all(|page| after.contains_key(&page)), "it may be of a file");
    assert!(!after.contains_key(&6000));
    assert_eq!(left_out(dir.path()), 0, "nothing is left to be done");
    assert_eq!(listed(), zeros);
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
    // A newer CRIU may have one more field.
    let len = more.len();
    let at = len - Run::narrow(PAGE as u64, 64, BOTH).encoded_len() - 4;
    more[at] += 2;
    more.extend_from_slice(&[6 << 3, 64]);
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
        assert!(found_in(&open()).unwrap().is_none());
    }
    // Memory that goes on after the last address, and more pages than any file has.
    let run = |address, pages| Run::narrow(address, pages, BOTH);
    let last = u64::MAX - page + 1;
    for runs in [vec![run(last, 2)], vec![run(page, u32::MAX); (1 << 20) + 1]] {
        made::write(dir.path(), &[(page, last)], &[(page, true, &bytes)]);
        let map = encode(&Head { pages_id: 7 }, &runs);
        std::fs::write(dir.path().join("pagemap-42.img"), map).unwrap();
        assert_eq!(left_out(dir.path()), 0);
        assert!(found_in(&open()).unwrap().is_none());
    }
}

#[test]
fn pages_counted_in_64_bits_are_counted_so_again() {
    let dir = tempfile::tempdir().unwrap();
    let map = dir.path().join("pagemap-42.img");
    let write_runs =
        |runs: &[Run]| std::fs::write(&map, encode(&Head { pages_id: 7 }, runs)).unwrap();
    let (page, flags) = (PAGE as u64, BOTH);
    let bytes = [&[1; PAGE][..], &[0; 64 * PAGE], &[2; 2 * PAGE]].concat();
    made::write(dir.path(), &[(page, 68 * page)], &[(page, true, &bytes)]);
    write_runs(&[Run::wide(page, 67, flags)]);
    let found = found_in(&std::fs::File::open(dir.path()).unwrap()).unwrap().unwrap();
    assert_eq!(found.extents, [Extent { to: page, at: 0, len: 67 * page }]);
    assert_eq!(left_out(dir.path()), 64);
    let (_, runs) = decode(&std::fs::read(&map).unwrap()).unwrap();
    assert_eq!(runs, [Run::wide(page, 1, flags), Run::wide(66 * page, 2, flags)]);
    // So many that their bytes are no number.
    write_runs(&[Run::wide(0, u64::MAX / 8, flags)]);
    assert!(decode(&std::fs::read(&map).unwrap()).is_none());
}

#[test]
fn private_memory_is_cut_at_mappings() {
    let dir = tempfile::tempdir().unwrap();
    let open = || std::fs::File::open(dir.path()).unwrap();
    let found = || found_in(&open()).unwrap().map(|found| found.extents);
    let page = PAGE as u64;
    let pages = |count: usize| vec![1; count * PAGE];
    let maps = [(2 * page, 5 * page), (5 * page, 9 * page), (20 * page, 30 * page)];
    made::write(
        dir.path(),
        &maps,
        &[(3 * page, true, &pages(4)), (7 * page, false, &pages(1)), (25 * page, true, &pages(5))],
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
    let found = || found_in(&open()).unwrap().unwrap().extents.len();
    assert_eq!(found(), 1);
    mark(open().as_fd(), 42).unwrap();
    assert_eq!(found(), 2);
    // Nothing is marked where CRIU reads in any case: memory of a file, locked memory, a shadow stack.
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
    // Nothing is marked without a file of mappings.
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

#[test]
fn what_is_left_in_a_process_has_its_place_among_what_is_written() {
    let dir = tempfile::tempdir().unwrap();
    let open = || std::fs::File::open(dir.path()).unwrap();
    let page = PAGE as u64;
    let map = |start: u64, end: u64, protection| {
        let flags = (libc::MAP_PRIVATE | libc::MAP_ANONYMOUS) as u32;
        Between { start: start * page, end: end * page, protection, flags, status: 1 }
    };
    let write = |written: u64, runs: &[(u64, u64, u32)]| {
        let run = |&(address, pages, flags): &(u64, u64, u32)| {
            Run::wide(address * page, pages, Some(flags))
        };
        let runs = runs.iter().map(run).collect::<Vec<_>>();
        std::fs::write(dir.path().join("pagemap-42.img"), encode(&Head { pages_id: 7 }, &runs))
            .unwrap();
        std::fs::write(dir.path().join("pages-7.img"), vec![1; (written * page) as usize]).unwrap();
        let mut bytes = MM_MAGIC.to_vec();
        // Last the pages of another mapping that the kernel guards.
        let guarded = Between { flags: 0, status: 1 << 16, ..map(7, 8, 0) };
        let all = vec![map(1, 10, 3), map(10, 14, 0), map(20, 30, 1), guarded];
        put(&mut bytes, &Mappings { all });
        std::fs::write(dir.path().join("mm-42.img"), bytes).unwrap();
    };
    let part = |at, len, from| Part { at: at * page, len: len * page, from };
    let (process, file) = (|n| Origin::Process(n * page), |n| Origin::Written(n * page));
    let runs =
        [(2, 3, LAZY), (5, 1, PRESENT), (6, 1, 1), (8, 5, LAZY), (20, 2, PRESENT), (25, 4, LAZY)];
    write(3, &runs);
    let found = left(open().as_fd(), 42, &|_| Ok(None)).unwrap().unwrap();
    let parts = [
        part(0, 3, process(2)),
        part(3, 1, file(0)),
        part(4, 5, process(8)),
        part(9, 2, file(1)),
        part(11, 4, process(25)),
    ];
    assert_eq!(found.parts, parts);
    assert_eq!(found.guarded, [10 * page]);
    assert_eq!(
        (found.name.as_str(), found.written.metadata().unwrap().len()),
        ("pages-7.img", 3 * page)
    );
    // Nobody can tell any more.
    let (_, after) = decode(&std::fs::read(dir.path().join("pagemap-42.img")).unwrap()).unwrap();
    let is_changed = |&(address, pages, flags): &(u64, u64, u32)| {
        let flags = if flags == LAZY { LAZY | PRESENT } else { flags };
        Run::wide(address * page, pages, Some(flags))
    };
    assert_eq!(after, runs.iter().map(is_changed).collect::<Vec<_>>());
    assert!(left(open().as_fd(), 42, &|_| Ok(None)).unwrap().is_none());
    // It has listed more than there is.
    write(3, &runs);
    let filled = |listed: &Ranges| {
        let expected = [(2, 5), (8, 13), (25, 29)].map(|(start, end)| (start * page, end * page));
        assert_eq!(*listed, expected.into_iter().collect());
        let filled = [(3, 4), (9, 10), (12, 13)].map(|(start, end)| (start * page, end * page));
        Ok(Some(filled.into_iter().collect()))
    };
    let found = left(open().as_fd(), 42, &filled).unwrap().unwrap();
    let parts = [
        part(0, 1, process(3)),
        part(1, 1, file(0)),
        part(2, 1, process(9)),
        part(3, 1, process(12)),
        part(4, 2, file(1)),
    ];
    assert_eq!(found.parts, parts);
    assert_eq!(found.guarded, [12 * page]);
    assert!(left(open().as_fd(), 42, &|_| panic!("nothing is left")).unwrap().is_none());
    write(3, &runs);
    let fails = |_: &Ranges| Err(std::io::Error::other("it has ended"));
    assert!(left(open().as_fd(), 42, &fails).is_err());
    // CRIU has written another number of pages than it says, and files that are not known here.
    write(2, &runs);
    assert!(left(open().as_fd(), 42, &|_| Ok(None)).is_err());
    write(3, &runs);
    std::fs::write(dir.path().join("mm-42.img"), b"something else").unwrap();
    assert!(left(open().as_fd(), 42, &|_| Ok(None)).is_err());
    std::fs::write(dir.path().join("pagemap-42.img"), b"something else").unwrap();
    assert!(left(open().as_fd(), 42, &|_| Ok(None)).is_err());
}
