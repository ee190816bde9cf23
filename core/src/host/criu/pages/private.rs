//! The memory that processes have for themselves and that comes from no file.

use std::io;
use std::ops::Range;
use std::os::fd::BorrowedFd;
use std::os::unix::fs::FileExt;

use rustix::fs::OFlags;

use super::files::{
    Between, LAZY, Run, decode, decode_mappings, encode, mm, open, pagemap, pages, read,
};

/// Memory of a process, and where its bytes are.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Extent {
    /// Its address.
    pub(crate) to: u64,
    /// Where it begins in the file of pages.
    pub(crate) at: u64,
    /// Bytes.
    pub(crate) len: u64,
}

impl Extent {
    /// What of it is at some addresses.
    pub(crate) fn within(&self, addresses: &Range<u64>) -> Option<Self> {
        let to = self.to.max(addresses.start);
        let end = (self.to + self.len).min(addresses.end);
        (to < end).then(|| Self { to, at: self.at + (to - self.to), len: end - to })
    }
}

/// The memory of a process that it has for itself and that comes from no file.
#[derive(Debug)]
pub(crate) struct Private {
    /// In order of the addresses; each lies in one mapping.
    pub(crate) extents: Vec<Extent>,
    /// The mappings of these, from their starts to their ends.
    pub(crate) mappings: Vec<(u64, u64)>,
    /// Bytes of the largest mapping that the kernel would count as if it were to be written.
    pub(crate) charged: u64,
    /// The name of the file that the extents are in.
    pub(crate) pages: String,
}

/// Finds that memory, as CRIU has marked it; `size` gives the bytes of a file of pages. `None` if the files are not
/// exactly as they are known here.
///
/// # Errors
/// The files cannot be read.
pub(crate) fn private(
    dir: BorrowedFd<'_>,
    pid: i32,
    size: &mut dyn FnMut(&str) -> io::Result<u64>,
) -> io::Result<Option<Private>> {
    let Some((head, runs)) = decode(&read(dir, &pagemap(pid))?) else { return Ok(None) };
    let Some(all) = decode_mappings(&read(dir, &mm(pid))?) else { return Ok(None) };
    let charged = all.iter().map(Between::charged).max().unwrap_or(0);
    let mappings: Vec<Between> = all.into_iter().filter(Between::is_left).collect();
    let pages = pages(&head);
    let size = size(&pages)?;
    let (mut extents, mut at) = (Vec::new(), 0);
    for run in &runs {
        let Some(end) = run.end_in_file(at) else { return Ok(None) };
        match (run.flags() & LAZY != 0, run.is_present()) {
            (true, true) => {
                let Some(cut) = within(&mappings, run, at) else { return Ok(None) };
                extents.extend(cut);
            }
            // The pages are zeros, or in the files of another image.
            (true, false) => return Ok(None),
            (false, _) => {}
        }
        at = end;
    }
    let is_whole = at == size;
    let mappings = mappings.iter().map(|mapping| (mapping.start, mapping.end)).collect();
    Ok(is_whole.then_some(Private { extents, mappings, charged, pages }))
}

/// Marks the runs that lie in memory of a process that it has for itself and that comes from no file. CRIU means to
/// do that itself, but for stacks; what it takes for a stack is the whole process, if the stack pointer of one of
/// its threads is a multiple of 4096.
///
/// # Errors
/// The files cannot be read, or what is to be marked cannot be written.
pub(crate) fn mark(dir: BorrowedFd<'_>, pid: i32) -> io::Result<()> {
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
    let (mut address, end) = (run.address, run.end()?);
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
