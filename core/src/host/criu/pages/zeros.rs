//! Leaving out zeros.

use std::fs::File;
use std::io::{self, ErrorKind};
use std::ops::Range;
use std::os::fd::BorrowedFd;
use std::os::unix::fs::FileExt;

use rustix::fs::OFlags;

use super::files::{LAZY, PAGE, Run, decode, encode, open, pagemap, pages, process, read, zeros};
use super::private::mark;

/// Fewer zeros in a row are left: CRIU reads each run by itself. Pages.
const SHORTEST: usize = 16;
/// So many pages are looked at at a time.
const PIECE: usize = 1024;

/// Leaves zeros out of the pages of all processes whose files are among `names` in a directory, and lists in another one
/// which ([`left_out`]). Gives the bytes that it has left out.
///
/// # Errors
/// The files cannot be read or written; then they are of no use any more.
pub(crate) fn leave_out_zeros<'a>(
    dir: BorrowedFd<'_>,
    lists: BorrowedFd<'_>,
    names: impl IntoIterator<Item = &'a str>,
) -> io::Result<u64> {
    let mut left_out = 0;
    for name in names {
        if let Some(pid) = process(name) {
            mark(dir, pid)?;
            left_out += leave_out(dir, lists, pid)?;
        }
    }
    Ok(left_out)
}

fn leave_out(dir: BorrowedFd<'_>, lists: BorrowedFd<'_>, pid: i32) -> io::Result<u64> {
    let map = open(dir, &pagemap(pid), OFlags::RDWR)?;
    let bytes = read(dir, &pagemap(pid))?;
    let Some((head, runs)) = decode(&bytes) else { return Ok(0) };
    let pages = open(dir, &pages(&head), OFlags::RDWR)?;
    let listed = runs.iter().try_fold(0, |at, run| run.end_in_file(at));
    let size = pages.metadata()?.len();
    if listed != Some(size) {
        return Ok(0);
    }
    let Compact { kept, end, left_out } = compact(&pages, runs)?;
    pages.set_len(end)?;
    if end < size {
        let bytes = encode(&head, &kept);
        map.write_all_at(&bytes, 0)?;
        map.set_len(bytes.len() as u64)?;
        let words = left_out.iter().flat_map(|zeros| [zeros.start, zeros.end]);
        let list: Vec<u8> = words.flat_map(u64::to_le_bytes).collect();
        let flags = OFlags::WRONLY | OFlags::CREATE | OFlags::EXCL;
        open(lists, &zeros(pid), flags)?.write_all_at(&list, 0)?;
    }
    Ok(size - end)
}

/// The addresses, in their order, at which a process had zeros that [`leave_out_zeros`] has left out, as it has listed
/// them in this directory. That must be one in which nobody else writes: they need memory for their page tables.
///
/// # Errors
/// The list cannot be read.
pub(crate) fn left_out(lists: BorrowedFd<'_>, pid: i32) -> io::Result<Vec<Range<u64>>> {
    let list = match read(lists, &zeros(pid)) {
        Err(error) if error.kind() == ErrorKind::NotFound => return Ok(Vec::new()),
        read => read?,
    };
    let word = |bytes: &[u8; 8]| u64::from_le_bytes(*bytes);
    let (words, _) = list.as_chunks::<8>();
    let (pairs, _) = words.as_chunks::<2>();
    Ok(pairs.iter().map(|[start, end]| word(start)..word(end)).collect())
}

/// A file of pages without zeros.
struct Compact {
    /// The runs that are left.
    kept: Vec<Run>,
    /// Where they end in the file.
    end: u64,
    /// The addresses of what is not.
    left_out: Vec<Range<u64>>,
}

/// Moves what is kept to the front of the file.
fn compact(file: &File, runs: Vec<Run>) -> io::Result<Compact> {
    let mut kept: Vec<Run> = Vec::with_capacity(runs.len());
    let mut left_out: Vec<Range<u64>> = Vec::new();
    let (mut from, mut to) = (0, 0);
    let mut buffer = vec![0; PIECE * PAGE];
    for run in runs {
        if !run.is_present() {
            kept.push(run);
            continue;
        }
        let (mut address, mut left) = (run.address, run.pages() as usize);
        // Whether the last run in the list is the beginning of this one.
        let mut begun = false;
        while left > 0 {
            let piece = &mut buffer[..left.min(PIECE) * PAGE];
            file.read_exact_at(piece, from)?;
            for (zeros, part) in parts(piece, run.flags() & LAZY != 0) {
                let pages = part.len() / PAGE;
                if zeros {
                    let end = address + part.len() as u64;
                    match left_out.last_mut().filter(|last| last.end == address) {
                        Some(last) => last.end = end,
                        None => left_out.push(address..end),
                    }
                } else {
                    if from != to {
                        file.write_all_at(part, to)?;
                    }
                    to += part.len() as u64;
                    match kept.last_mut().filter(|_| begun) {
                        Some(last) => last.set_pages(last.pages() + pages as u64),
                        None => {
                            let mut part = run.clone();
                            part.address = address;
                            part.set_pages(pages as u64);
                            kept.push(part);
                        }
                    }
                }
                begun = !zeros;
                from += part.len() as u64;
                address += part.len() as u64;
                left -= pages;
            }
        }
    }
    Ok(Compact { kept, end: to, left_out })
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
