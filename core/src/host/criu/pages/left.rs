//! Memory that CRIU has listed and not written.

use std::fs::File;
use std::io;
use std::os::fd::BorrowedFd;
use std::os::unix::fs::FileExt;

use rustix::fs::OFlags;

use super::files::{
    Between, LAZY, PRESENT, Run, decode, decode_mappings, encode, mm, open, pagemap, pages, read,
};
use crate::base::ranges::Ranges;

/// Bytes of a file of pages.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Part {
    /// Where they begin in it.
    pub(crate) at: u64,
    /// How many.
    pub(crate) len: u64,
    pub(crate) from: Origin,
}

/// Where the bytes of a file of pages are.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Origin {
    /// In the process, at this address.
    Process(u64),
    /// In the file that CRIU has written, at this offset.
    Written(u64),
}

/// What makes the file of pages of a process of which CRIU has left memory in it.
pub(crate) struct Left {
    /// The name of the file.
    pub(crate) name: String,
    /// Its bytes, in their order.
    pub(crate) parts: Vec<Part>,
    /// What CRIU has written under that name.
    pub(crate) written: File,
    /// Addresses of memory that was left and that the process itself may not read, one in each run.
    pub(crate) guarded: Vec<u64>,
}

/// Finds what CRIU has left in a process, and changes its list so that all of that is in the file of pages. `None` if
/// it has left nothing.
///
/// Of what CRIU has listed as left it may not have looked which pages there are: `filled` gives the pages among addresses
/// that hold something, or `None` if all do.
///
/// # Errors
/// The files are not exactly as they are known here, or cannot be read or written; or `filled` fails.
pub(crate) fn left(
    dir: BorrowedFd<'_>,
    pid: i32,
    filled: &dyn Fn(&Ranges) -> io::Result<Option<Ranges>>,
) -> io::Result<Option<Left>> {
    let strange = || io::Error::other(format!("unknown memory files of process {pid}"));
    let (head, listed) = decode(&read(dir, &pagemap(pid))?).ok_or_else(strange)?;
    if !listed.iter().any(is_left) {
        return Ok(None);
    }
    let spans = listed.iter().filter(|run| is_left(run));
    let spans = spans.map(|run| Some((run.address, run.end()?))).collect::<Option<Ranges>>();
    let mut runs = match filled(&spans.ok_or_else(strange)?)? {
        Some(filled) => listed.iter().flat_map(|run| filled_part(run, &filled)).collect(),
        None => listed,
    };
    let mappings = decode_mappings(&read(dir, &mm(pid))?).ok_or_else(strange)?;
    let name = pages(&head);
    let written = open(dir, &name, OFlags::RDONLY)?;
    let guarded = guarded(&runs, &mappings);
    let (parts, end) = layout(&mut runs).ok_or_else(strange)?;
    if end != written.metadata()?.len() {
        return Err(strange());
    }
    let list = open(dir, &pagemap(pid), OFlags::WRONLY)?;
    let bytes = encode(&head, &runs);
    list.write_all_at(&bytes, 0)?;
    list.set_len(bytes.len() as u64)?;
    Ok(Some(Left { name, parts, written, guarded }))
}

/// What of a run there is: all of what CRIU has written, and the pages of the rest that hold something.
fn filled_part(run: &Run, filled: &Ranges) -> Vec<Run> {
    if !is_left(run) {
        return vec![run.clone()];
    }
    let end = run.end().unwrap_or(run.address);
    filled.within(run.address, end).map(|(start, end)| run.part(start, end)).collect()
}

fn is_left(run: &Run) -> bool {
    run.flags() & LAZY != 0 && !run.is_present()
}

/// Addresses of runs, or parts of them, that were left and lie in mappings without the permission to read.
fn guarded(runs: &[Run], mappings: &[Between]) -> Vec<u64> {
    let is_guarded = |mapping: &&Between| mapping.protection as i32 & libc::PROT_READ == 0;
    let guarded: Vec<&Between> = mappings.iter().filter(is_guarded).collect();
    let mut addresses = Vec::new();
    for run in runs.iter().filter(|run| is_left(run)) {
        let end = run.end().unwrap_or(u64::MAX);
        let first = guarded.partition_point(|mapping| mapping.end <= run.address);
        let overlapping = guarded[first..].iter().take_while(|mapping| mapping.start < end);
        addresses.extend(overlapping.map(|mapping| mapping.start.max(run.address)));
    }
    addresses
}

/// Marks what was left as present. Gives where the bytes of the file of pages are then, and where those end that CRIU
/// has written.
fn layout(runs: &mut [Run]) -> Option<(Vec<Part>, u64)> {
    let (mut parts, mut at, mut written) = (Vec::new(), 0, 0);
    for run in runs {
        let from = if is_left(run) {
            run.flags = Some(run.flags() | PRESENT);
            Origin::Process(run.address)
        } else if run.is_present() {
            Origin::Written(written)
        } else {
            continue;
        };
        let end = run.end_in_file(at)?;
        let len = end - at;
        if from == Origin::Written(written) {
            written += len;
        }
        parts.push(Part { at, len, from });
        at = end;
    }
    Some((parts, written))
}
