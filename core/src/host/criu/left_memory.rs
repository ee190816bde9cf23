//! Private memory that CRIU has left in the frozen processes, as the files of pages that it would have written.
//!
//! CRIU copies the memory of processes on one thread: into pipes, and from there into files, which were then read again
//! to be stored. Asked for lazy pages (`criu dump --lazy-pages`) it lists in `pagemap-PID.img` the pages of memory
//! that a process has for itself and that comes from no file, and writes all others. When it calls back, the processes
//! are frozen and have nothing of CRIU's in them any more, and what it has listed is read here from where it
//! is, by as many threads as want to. Together with what CRIU has written that makes the file of pages that it would
//! have written by itself, byte by byte, and the list is changed to say so. So nobody who reads an image, CRIU
//! neither, can tell how its memory was saved.

use std::fs::File;
use std::io::{self, ErrorKind};
use std::os::fd::BorrowedFd;
use std::os::unix::fs::{FileExt, MetadataExt};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use super::pages::{self, Left, Origin, Part};
use crate::host::process::{Place, ProcessMemory, filled};
use crate::image::Contents;

/// The private memory of all processes that are frozen.
pub struct LeftMemory(Vec<PagesFile>);

/// A file of pages as CRIU would have written it.
struct PagesFile {
    name: String,
    mode: u32,
    size: u64,
    /// In the order of the file, without gaps.
    parts: Vec<Part>,
    process: ProcessMemory,
    /// What CRIU has written.
    written: File,
    /// Set from elsewhere to end all reading.
    stop: Arc<AtomicBool>,
}

impl LeftMemory {
    /// Finds the memory that CRIU, called with [`leave_memory`](super::DumpOptions::leave_memory), has left in the
    /// processes whose files are in `images`, and changes its lists so that they no longer say that it was left.
    /// To be called while CRIU waits for its callback: the processes are frozen.
    ///
    /// # Errors
    /// Something about CRIU's files is not known here, a process is not frozen, or memory that it may not read itself
    /// cannot be read. CRIU's files are of no use then, and CRIU is to be asked again, to write that memory itself.
    pub fn of(images: BorrowedFd<'_>, stop: &Arc<AtomicBool>) -> io::Result<Self> {
        let mut files = Vec::new();
        for pid in pages::processes(images)? {
            if let Some(left) = pages::left(images, pid, &|listed| filled(pid, listed))? {
                files.push(PagesFile::new(pid, left, stop.clone())?);
            }
        }
        Ok(Self(files))
    }

    /// The files of pages, which are read from the processes. They can be read as long as these are frozen, and until
    /// `stop` is set.
    pub fn files(&self) -> impl Iterator<Item = &dyn Contents> {
        self.0.iter().map(|file| file as &dyn Contents)
    }

    /// Of each file the process that it is of, and what of it is read from there, in the order of the file.
    pub(crate) fn places(&self) -> impl Iterator<Item = (&dyn Contents, u32, Vec<Place>)> {
        self.0.iter().map(|file| (file as &dyn Contents, file.process.pid(), file.places()))
    }
}

impl PagesFile {
    fn places(&self) -> Vec<Place> {
        let place = |part: &Part| match part.from {
            Origin::Process(address) => Some(Place { at: part.at, address, len: part.len }),
            Origin::Written(_) => None,
        };
        self.parts.iter().filter_map(place).collect()
    }

    fn new(pid: i32, left: Left, stop: Arc<AtomicBool>) -> io::Result<Self> {
        let Left { name, parts, written, guarded } = left;
        let process = frozen(pid)?;
        for address in guarded {
            process.read(&mut [0], address)?;
        }
        let size = parts.last().map_or(0, |part| part.at + part.len);
        let mode = written.metadata()?.mode() & 0o7777;
        Ok(Self { name, mode, size, parts, process, written, stop })
    }
}

impl Contents for PagesFile {
    fn name(&self) -> &str {
        &self.name
    }

    fn mode(&self) -> u32 {
        self.mode
    }

    fn size(&self) -> u64 {
        self.size
    }

    fn read_exact_at(&self, bytes: &mut [u8], offset: u64) -> io::Result<()> {
        if self.stop.load(Ordering::Relaxed) {
            return Err(ErrorKind::Interrupted.into());
        }
        let mut next = self.parts.partition_point(|part| part.at + part.len <= offset);
        let (mut rest, mut at) = (bytes, offset);
        while !rest.is_empty() {
            let part = self.parts.get(next).ok_or(ErrorKind::UnexpectedEof)?;
            let skipped = at - part.at;
            let len = (part.len - skipped).min(rest.len() as u64);
            let (now, after) = rest.split_at_mut(len as usize);
            match part.from {
                Origin::Process(address) => self.process.read(now, address + skipped)?,
                Origin::Written(begin) => self.written.read_exact_at(now, begin + skipped)?,
            }
            (rest, at, next) = (after, at + len, next + 1);
        }
        Ok(())
    }
}

/// # Errors
/// The memory of the process cannot be opened, or nobody has it frozen: it is another one than CRIU's files are of.
fn frozen(pid: i32) -> io::Result<ProcessMemory> {
    let memory = ProcessMemory::open(pid)?;
    let status = procfs::process::Process::new(pid).and_then(|process| process.status());
    if status.map_err(io::Error::other)?.tracerpid == 0 {
        return Err(io::Error::other(format!("process {pid} is not frozen")));
    }
    Ok(memory)
}

#[cfg(test)]
mod tests;
