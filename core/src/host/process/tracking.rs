//! Which memory a process writes, seen from outside and without its noticing.
//!
//! Memory is registered with a userfaultfd of the process in asynchronous write-protect mode (Linux 6.7): the kernel
//! itself resolves the first write to a page that is protected, and marks the page as written. `PAGEMAP_SCAN` tells
//! the marks, and protects pages. All of that ends when the userfaultfd is closed, also by the end of gpucr.
//!
//! What is not seen are writes that do not go through the page tables of the process, to pages that the kernel or a
//! device had taken hold of before they were protected: by direct input and output, io_uring, RDMA, or a GPU. So
//! [`Tracking::obstacle`] is to be asked after pages were protected and before they are read: an operation under way
//! is seen by the file that it is on, and one that is over has written what is read then.

use std::io::{self, ErrorKind};
use std::os::fd::OwnedFd;

use super::pagemap::{self, Mapping, Run};
use super::write_protect;
use crate::base::ranges::Ranges;

/// `O_DIRECT`, as `/proc/PID/fdinfo` has it.
const DIRECT: i32 = libc::O_DIRECT;

/// Why the memory of processes cannot be tracked on this host. `None` if it can be.
pub fn why_untracked() -> Option<String> {
    let tried = || -> io::Result<()> {
        let own = std::process::id() as i32;
        let mut tracking = Tracking::begin(own, write_protect::own()?)?;
        tracking.ours = [(0x1000, 0x2000)].into_iter().collect();
        tracking.clean().map(drop)
    };
    tried().err().map(|error| error.to_string())
}

/// A process whose memory is tracked until this is dropped.
#[derive(Debug)]
pub(crate) struct Tracking {
    pid: i32,
    uffd: OwnedFd,
    /// Where memory was registered.
    ours: Ranges,
}

/// What a process has at a moment.
pub(crate) struct Look {
    /// The pages that it has for itself, in the order of their addresses.
    pub(crate) runs: Vec<Run>,
    /// Memory that is tracked since now.
    pub(crate) new: Ranges,
}

impl Tracking {
    /// Begins to track a process, by its own userfaultfd, of which nobody has asked anything yet. Nothing is
    /// registered.
    ///
    /// # Errors
    /// The kernel cannot do it.
    pub(crate) fn begin(pid: i32, uffd: OwnedFd) -> io::Result<Self> {
        write_protect::begin(&uffd)?;
        Ok(Self { pid, uffd, ours: Ranges::default() })
    }

    /// Finds what the process has, and tracks from now on what is new and can be tracked.
    ///
    /// # Errors
    /// The process has ended, or must not be looked at.
    pub(crate) fn look(&mut self) -> io::Result<Look> {
        let mut mappings = pagemap::mappings(self.pid)?;
        let new: Ranges = mappings.iter().filter_map(|mapping| self.take_up(mapping)).collect();
        self.ours = self.ours.all(&new);
        // What somebody else watches may be kept from being read.
        mappings.retain(|it| !it.is_watched || self.ours.touch(it.start, it.end));
        // Such as a stack that has grown.
        let grown = mappings.iter().filter(|it| it.is_watched).map(|it| (it.start, it.end));
        self.ours = self.ours.all(&grown.collect());
        Ok(Look { runs: pagemap::runs(self.pid, &mappings)?, new })
    }

    /// Registers a mapping that CRIU leaves in the process, unless it is.
    fn take_up(&self, mapping: &Mapping) -> Option<(u64, u64)> {
        if !mapping.is_left || mapping.is_watched {
            return None;
        }
        let (start, end) = (mapping.start, mapping.end);
        match write_protect::register(&self.uffd, start, end) {
            Ok(()) => Some((start, end)),
            Err(error) => {
                tracing::debug!(%error, pid = self.pid, "memory at {start:#x} is not tracked");
                None
            }
        }
    }

    /// Protects pages, as far as they are tracked: they count as clean until they are written.
    ///
    /// # Errors
    /// The process has ended, or must not be looked at.
    pub(crate) fn protect(&self, pages: &Ranges) -> io::Result<()> {
        let pagemap = pagemap::open(self.pid)?;
        pages.iter().try_for_each(|(start, end)| pagemap::protect(&pagemap, start, end))
    }

    /// What was protected and not written since then. Memory that was mapped, moved or registered anew is not among it.
    ///
    /// # Errors
    /// The process has ended, or must not be looked at.
    pub(crate) fn clean(&self) -> io::Result<Ranges> {
        pagemap::clean(&pagemap::open(self.pid)?, &self.ours)
    }

    /// Why writes of the process may not be seen, or it would notice that it is tracked, if either is so.
    ///
    /// # Errors
    /// The process has ended, or must not be looked at.
    pub(crate) fn obstacle(&self) -> io::Result<Option<&'static str>> {
        obstacle(self.pid)
    }
}

/// Why writes of a process may not be seen, or why it would notice that it is tracked.
pub(crate) fn obstacle(pid: i32) -> io::Result<Option<&'static str>> {
    let process = procfs::process::Process::new(pid).map_err(io::Error::other)?;
    let status = process.status().map_err(io::Error::other)?;
    if status.vmpin.is_some_and(|kib| kib > 0) {
        return Ok(Some("devices have taken hold of its memory"));
    }
    for entry in std::fs::read_dir(format!("/proc/{pid}/fd"))? {
        let entry = entry?;
        let target = match std::fs::read_link(entry.path()) {
            // It was closed meanwhile.
            Err(error) if error.kind() == ErrorKind::NotFound => continue,
            target => target?,
        };
        match target.to_string_lossy().as_ref() {
            "anon_inode:[userfaultfd]" => return Ok(Some("it has a userfaultfd of its own")),
            "anon_inode:[io_uring]" => return Ok(Some("it uses io_uring")),
            path if path.starts_with('/') => {
                let number = entry.file_name();
                let number = number.to_string_lossy();
                if is_direct(pid, &number)? {
                    return Ok(Some("it has a file open for direct input and output"));
                }
            }
            _ => {}
        }
    }
    Ok(None)
}

/// Whether input and output on a descriptor passes the page cache by.
fn is_direct(pid: i32, fd: &str) -> io::Result<bool> {
    let info = match std::fs::read_to_string(format!("/proc/{pid}/fdinfo/{fd}")) {
        Err(error) if error.kind() == ErrorKind::NotFound => return Ok(false),
        info => info?,
    };
    let flags = info.lines().find_map(|line| line.strip_prefix("flags:"));
    let flags = flags.and_then(|flags| i32::from_str_radix(flags.trim(), 8).ok());
    Ok(flags.is_none_or(|flags| flags & DIRECT != 0))
}

#[cfg(test)]
mod tests;
