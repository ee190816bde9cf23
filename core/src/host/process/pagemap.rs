//! What memory processes have, and what of it they have written, as `/proc/PID/smaps` and the ioctl `PAGEMAP_SCAN`
//! (Linux 6.7) tell.

use std::fs::File;
use std::io;
use std::ops::Range;
use std::os::fd::AsFd;
use std::os::unix::fs::FileExt;

use rayon::prelude::*;
use rustix::io::Errno;
use rustix::ioctl::{Opcode, Updater, ioctl, opcode};

use super::smaps::{self, addresses};
use crate::base::ranges::Ranges;

/// Pages in a row that a process has for itself.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Run {
    pub(crate) address: u64,
    /// Bytes.
    pub(crate) len: u64,
    pub(crate) state: State,
}

impl Run {
    pub(crate) fn end(&self) -> u64 {
        self.address + self.len
    }
}

/// What is known of writes to pages.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum State {
    /// Nothing.
    Untracked,
    /// They were written since they were protected, or never protected.
    Written,
    /// They were not written since they were protected.
    Clean,
}

/// A mapping that is of the process alone and can be read safely.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Mapping {
    pub(super) start: u64,
    pub(super) end: u64,
    /// Whether CRIU leaves what is in it in the process, if it is asked to.
    pub(super) is_left: bool,
    /// Whether a userfaultfd protects it.
    pub(super) is_watched: bool,
}

/// The pages that a process has for itself now and that hold something, in order of their addresses: those of files
/// and of zeros that it has never written are none. What could be kept from being read by anybody but the kernel, such
/// as memory that the process itself brings in when it is touched, is left out.
///
/// # Errors
/// The process has ended, must not be looked at, or the kernel cannot tell (before Linux 6.7).
pub(crate) fn private_runs(pid: i32) -> io::Result<Vec<Run>> {
    let mappings = mappings(pid)?;
    let unwatched: Vec<_> = mappings.into_iter().filter(|mapping| !mapping.is_watched).collect();
    runs(pid, &unwatched)
}

/// The pages of these mappings that hold something.
pub(super) fn runs(pid: i32, mappings: &[Mapping]) -> io::Result<Vec<Run>> {
    let (pagemap, mut runs) = (open(pid)?, Vec::<Run>::new());
    let request = Scan {
        inverted: IS_FILE | IS_ZERO,
        mask: IS_FILE | IS_ZERO,
        any_of: IS_PRESENT | IS_SWAPPED,
        returned: IS_WATCHABLE | IS_WRITTEN,
        ..Scan::default()
    };
    for mapping in mappings {
        scan(&pagemap, mapping.start, mapping.end, request, |region| {
            let state = match region.categories {
                it if it & IS_WATCHABLE == 0 => State::Untracked,
                it if it & IS_WRITTEN != 0 => State::Written,
                _ => State::Clean,
            };
            match runs.last_mut().filter(|last| last.end() == region.start && last.state == state) {
                Some(last) => last.len += region.end - region.start,
                None => {
                    let (address, len) = (region.start, region.end - region.start);
                    runs.push(Run { address, len, state });
                }
            }
        })?;
    }
    Ok(runs)
}

/// Protects the pages between two addresses that hold something, as far as a userfaultfd watches them.
pub(super) fn protect(pagemap: &File, start: u64, end: u64) -> io::Result<()> {
    let request = Scan {
        flags: PROTECT,
        mask: IS_WATCHABLE | IS_WRITTEN,
        any_of: IS_PRESENT | IS_SWAPPED,
        // Who does not ask what was found has all pages protected, those too that do not exist.
        returned: IS_WATCHABLE,
        ..Scan::default()
    };
    scan(pagemap, start, end, request, |_| {})
}

/// The pages of memory that a userfaultfd watches and that were not written since they were protected. All cores look
/// for them.
pub(super) fn clean(pagemap: &File, memory: &Ranges) -> io::Result<Ranges> {
    let request = Scan {
        inverted: IS_WRITTEN,
        mask: IS_WATCHABLE | IS_WRITTEN,
        any_of: IS_PRESENT | IS_SWAPPED,
        returned: IS_WATCHABLE,
        ..Scan::default()
    };
    scan_all(pagemap, memory, request)
}

/// The pages of anonymous memory of a process that hold something: neither nothing, nor the zeros of what was only
/// read, nor a guard (`MADV_GUARD_INSTALL`). All cores look for them. `None` if the kernel cannot tell which are
/// guards (before Linux 6.16).
///
/// # Errors
/// The process has ended, or must not be looked at.
pub(crate) fn filled(pid: i32, memory: &Ranges) -> io::Result<Option<Ranges>> {
    let request = Scan {
        // Not whether pages are of files, for which the kernel would look at each.
        inverted: IS_ZERO | IS_GUARD,
        mask: IS_ZERO | IS_GUARD,
        any_of: IS_PRESENT | IS_SWAPPED,
        returned: IS_PRESENT | IS_SWAPPED,
        ..Scan::default()
    };
    match scan_all(&open(pid)?, memory, request) {
        Err(error) if Errno::from_io_error(&error) == Some(Errno::INVAL) => Ok(None),
        found => found.map(Some),
    }
}

/// `/proc/PID/pagemap` of the memory that a process has now: after an execve(2) it has another.
pub(super) fn open(pid: i32) -> io::Result<File> {
    File::open(format!("/proc/{pid}/pagemap"))
}

/// The mappings of a process that are of it alone and can be read safely.
pub(super) fn mappings(pid: i32) -> io::Result<Vec<Mapping>> {
    Ok(private_mappings(&smaps::read(pid)?))
}

/// Those in a file `smaps`.
fn private_mappings(smaps: &[u8]) -> Vec<Mapping> {
    let text = String::from_utf8_lossy(smaps);
    let mut found = Vec::new();
    let mut current: Option<Mapping> = None;
    for line in text.lines() {
        if let Some(flags) = line.strip_prefix("VmFlags:") {
            let has = |any: &[&str]| flags.split_whitespace().any(|flag| any.contains(&flag));
            let Some(mapping) = current.take() else { continue };
            // Of devices, of pages without a frame of their own, and with a userfaultfd that brings pages in.
            if !has(&["io", "pf", "um", "ui"]) {
                // Locked memory, large pages and shadow stacks are not left.
                let is_left = mapping.is_left && !has(&["lo", "ht", "ss"]);
                found.push(Mapping { is_left, is_watched: has(&["uw"]), ..mapping });
            }
        } else if let Some(mapping) = header(line) {
            current = mapping;
        }
    }
    found
}

/// What is known of the memory of a process by the flags of its mappings.
#[derive(Debug, Default)]
pub(crate) struct Flagged {
    /// Where a userfaultfd brings memory in.
    pub(crate) awaited: Vec<Range<u64>>,
    /// What children find empty (`MADV_WIPEONFORK`).
    pub(crate) emptied: Vec<Range<u64>>,
}

impl Flagged {
    /// # Errors
    /// There is no such process, or it must not be looked at.
    pub(crate) fn of(pid: i32) -> io::Result<Self> {
        let smaps = smaps::read(pid)?;
        Ok(Self { awaited: flagged(&smaps, "um"), emptied: flagged(&smaps, "wf") })
    }
}

/// The addresses of mappings that have a flag, in a file `smaps`.
fn flagged(smaps: &[u8], flag: &str) -> Vec<Range<u64>> {
    let text = String::from_utf8_lossy(smaps);
    let (mut found, mut current) = (Vec::new(), None);
    for line in text.lines() {
        if let Some(flags) = line.strip_prefix("VmFlags:") {
            found.extend(current.take().filter(|_| flags.split_whitespace().any(|it| it == flag)));
        } else if let Some(addresses) = addresses(line) {
            current = Some(addresses);
        }
    }
    found
}

/// Whether all pages of a process in `len` bytes from `start` are guards (`MADV_GUARD_INSTALL`), as Linux 6.15 and newer
/// tell.
///
/// # Errors
/// There is no such process, or it must not be looked at.
pub(crate) fn is_guard(pid: i32, start: u64, len: u64) -> io::Result<bool> {
    /// `PM_GUARD_REGION`.
    const GUARD: u64 = 1 << 58;
    const PAGE: u64 = 4096;
    let pagemap = open(pid)?;
    let mut words = [0; 512 * 8];
    let (mut page, end) = (start / PAGE, (start + len).div_ceil(PAGE));
    while page < end {
        let some = &mut words[..(end - page).min(512) as usize * 8];
        pagemap.read_exact_at(some, page * 8)?;
        let (chunks, _) = some.as_chunks();
        if chunks.iter().any(|word| u64::from_ne_bytes(*word) & GUARD == 0) {
            return Ok(false);
        }
        page += chunks.len() as u64;
    }
    Ok(true)
}

/// Bytes of addresses that the mappings of a process have that are its alone, whether or not there are pages.
///
/// # Errors
/// There is no such process, or it must not be looked at.
pub(crate) fn mapped_privately(pid: i32) -> io::Result<u64> {
    let maps = std::fs::read(format!("/proc/{pid}/maps"))?;
    let maps = String::from_utf8_lossy(&maps);
    let mappings = maps.lines().filter_map(header).flatten();
    Ok(mappings.map(|mapping| mapping.end - mapping.start).sum())
}

/// The mapping that a line begins, if it begins one; nothing of it if it is not of the process alone.
fn header(line: &str) -> Option<Option<Mapping>> {
    let Range { start, end } = addresses(line)?;
    let mut words = line.split_ascii_whitespace().skip(1);
    let is_private = words.next()?.as_bytes().get(3) == Some(&b'p');
    let (inode, name) = (words.nth(2), words.next());
    let is_kernels = name.is_some_and(|name| name.starts_with("[v"));
    let mapping = Mapping { start, end, is_left: inode == Some("0"), is_watched: false };
    Some((is_private && !is_kernels && start < end).then_some(mapping))
}

/// `struct page_region` of linux/fs.h.
#[repr(C)]
#[derive(Clone, Copy, Default)]
struct Region {
    start: u64,
    end: u64,
    categories: u64,
}

/// `struct pm_scan_arg`.
#[repr(C)]
#[derive(Clone, Copy, Default)]
struct Scan {
    size: u64,
    flags: u64,
    start: u64,
    end: u64,
    /// Where the kernel has stopped.
    walk_end: u64,
    regions: u64,
    regions_len: u64,
    max_pages: u64,
    inverted: u64,
    mask: u64,
    any_of: u64,
    returned: u64,
}

/// `PAGEMAP_SCAN`.
const PAGEMAP_SCAN: Opcode = opcode::read_write::<Scan>(b'f', 16);
/// `PM_SCAN_WP_MATCHING`: what is found is protected at once. Memory that no userfaultfd watches is passed over.
const PROTECT: u64 = 1 << 0;
/// `PAGE_IS_WPALLOWED`.
const IS_WATCHABLE: u64 = 1 << 0;
const IS_WRITTEN: u64 = 1 << 1;
const IS_FILE: u64 = 1 << 2;
const IS_PRESENT: u64 = 1 << 3;
const IS_SWAPPED: u64 = 1 << 4;
const IS_ZERO: u64 = 1 << 5;
/// Since Linux 6.16.
const IS_GUARD: u64 = 1 << 8;

/// Carries out a request for much memory on all cores.
fn scan_all(pagemap: &File, memory: &Ranges, request: Scan) -> io::Result<Ranges> {
    /// Bytes of addresses that one thread looks at in one go: a quarter of a million pages.
    const SPAN: u64 = 1 << 30;
    let spans = |(start, end): (u64, u64)| {
        let starts = (start..end).step_by(SPAN as usize);
        starts.map(move |at| (at, end.min(at.saturating_add(SPAN))))
    };
    let spans: Vec<_> = memory.iter().flat_map(spans).collect();
    let of_span = |(start, end): (u64, u64)| {
        let mut found = Vec::new();
        scan(pagemap, start, end, request, |region| found.push((region.start, region.end)))?;
        Ok(found)
    };
    let found: io::Result<Vec<Vec<_>>> = spans.into_par_iter().map(of_span).collect();
    Ok(found?.into_iter().flatten().collect())
}

/// Carries out a request for the pages between two addresses, and gives what it finds.
fn scan(
    pagemap: &File,
    start: u64,
    end: u64,
    request: Scan,
    mut found: impl FnMut(Region),
) -> io::Result<()> {
    let mut at = start;
    while at < end {
        // What the kernel does not fill in stays empty.
        let mut regions = [Region::default(); 512];
        let mut scan = Scan {
            size: size_of::<Scan>() as u64,
            start: at,
            end,
            regions: regions.as_mut_ptr().expose_provenance() as u64,
            regions_len: regions.len() as u64,
            ..request
        };
        // SAFETY: the request is the kernel's for this structure, and the kernel writes at most `regions_len` regions
        // to where they are, which nobody else refers to meanwhile.
        unsafe { ioctl(pagemap.as_fd(), Updater::<PAGEMAP_SCAN, Scan>::new(&mut scan)) }?;
        regions.iter().take_while(|region| region.end > region.start).for_each(|it| found(*it));
        if scan.walk_end <= at {
            return Err(io::Error::other("the kernel makes no progress"));
        }
        at = scan.walk_end;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn addresses_without_pages_are_mapped_too() {
        let len = 1 << 40;
        let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_NORESERVE;
        let pid = std::process::id() as i32;
        assert!(mapped_privately(pid).unwrap() < len as u64);
        // SAFETY: a new mapping, anywhere.
        let memory =
            unsafe { libc::mmap(std::ptr::null_mut(), len, libc::PROT_NONE, flags, -1, 0) };
        assert_ne!(memory, libc::MAP_FAILED);
        assert!(mapped_privately(pid).unwrap() >= len as u64);
        // SAFETY: the mapping is this test's.
        unsafe { libc::munmap(memory, len) };
    }

    #[test]
    fn pages_that_hold_something_are_told_from_guards_and_zeros() {
        /// `MADV_GUARD_INSTALL`.
        const GUARD: i32 = 102;
        const PAGE: usize = 4096;
        let pages = 8 << 20 >> 12;
        let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_NORESERVE;
        let access = libc::PROT_READ | libc::PROT_WRITE;
        // Three spans, of which the second has no page at all.
        let len = 3 << 30;
        // SAFETY: a new mapping, anywhere.
        let memory = unsafe { libc::mmap(std::ptr::null_mut(), len, access, flags, -1, 0) };
        assert_ne!(memory, libc::MAP_FAILED);
        let place = |page: usize| memory.cast::<u8>().wrapping_add(page * PAGE);
        // SAFETY: all of this is within the mapping, to which nothing else refers.
        let guarded = unsafe {
            libc::madvise(memory, len, libc::MADV_NOHUGEPAGE);
            (0..pages).filter(|page| page % 4 != 3).for_each(|page| place(page).write(1));
            (0..pages).for_each(|page| _ = place(page).read_volatile());
            place(len / PAGE - 1).write(1);
            libc::madvise(place(8).cast(), 2 * PAGE, GUARD) == 0
        };
        let start = memory.expose_provenance() as u64;
        let all: Ranges = [(start, start + len as u64)].into_iter().collect();
        let found = filled(std::process::id() as i32, &all).unwrap();
        // SAFETY: the mapping is this test's.
        unsafe { libc::munmap(memory, len) };
        // An older kernel does not tell.
        let Some(found) = found else { return };
        let is_filled =
            |page: usize| page % 4 != 3 && !(guarded && (8..10).contains(&page)) && page < pages;
        let page = |page: usize| start + (page * PAGE) as u64;
        let expected = (0..pages).filter(|page| is_filled(*page)).chain([len / PAGE - 1]);
        assert_eq!(found, expected.map(|number| (page(number), page(number + 1))).collect());
    }

    #[test]
    fn mappings_are_found_by_their_flags() {
        let smaps = b"00400000-00401000 r-xp 00000000 08:01 12 /bin/cat\nVmFlags: rd ex\n\
            00500000-00600000 rw-s 00000000 00:01 99 /x\nSize: 8 kB\nVmFlags: rd wr wf um\n\
            00700000-00701000 rw-p 00000000 00:00 0 \nVmFlags: rd wf\n";
        assert_eq!(flagged(smaps, "wf"), [0x50_0000..0x60_0000, 0x70_0000..0x70_1000]);
        assert_eq!(flagged(smaps, "um"), vec![0x50_0000..0x60_0000; 1]);
        assert!(flagged(smaps, "gd").is_empty());
    }

    #[test]
    fn mappings_of_the_process_alone_are_told_from_others() {
        let smaps = b"00400000-00401000 r-xp 00000000 08:01 12 /bin/cat file\nSize: 4 kB\n\
            VmFlags: rd ex mr mw me\n\
            00500000-00600000 rw-s 00000000 00:01 99 /dev/zero (deleted)\nVmFlags: rd wr sh\n\
            7f0000000000-7f0000002000 rw-p 00000000 00:00 0 \nRss: 8 kB\nVmFlags: rd wr mr ac\n\
            7f0000004000-7f0000005000 rw-p 00000000 00:00 0 \nVmFlags: rd wr um ac\n\
            7f0000006000-7f0000007000 rw-p 00000000 00:05 3 /dev/nvidia0\nVmFlags: rd wr io dd\n\
            7f0000008000-7f0000009000 rw-p 00000000 00:00 0 [heap]\nVmFlags: rd wr uw ac\n\
            7f000000a000-7f000000b000 rw-p 00000000 00:00 0 [stack]\nVmFlags: rd wr lo ac\n\
            7fff00000000-7fff00001000 r--p 00000000 00:00 0 [vvar]\nVmFlags: rd mr pf de dd\n\
            7fff00001000-7fff00002000 r-xp 00000000 00:00 0 [vdso]\nVmFlags: rd ex mr\n";
        let of = |start, end, is_left, is_watched| Mapping { start, end, is_left, is_watched };
        let expected = [
            of(0x40_0000, 0x40_1000, false, false),
            of(0x7f00_0000_0000, 0x7f00_0000_2000, true, false),
            of(0x7f00_0000_8000, 0x7f00_0000_9000, true, true),
            of(0x7f00_0000_a000, 0x7f00_0000_b000, false, false),
        ];
        assert_eq!(private_mappings(smaps), expected);
    }
}
