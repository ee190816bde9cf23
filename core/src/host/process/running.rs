//! The private memory of processes that run, as files that are like those of CRIU.

use std::io::{self, ErrorKind};

use super::memory::{ProcessMemory, Run, private_runs};
use crate::base::stop::Stop;
use crate::image::Contents;

/// The memory that a process which runs has for itself: the same pages in the same order as in CRIU's file of pages,
/// but for what comes and goes meanwhile. It is read while it changes, so what is read is good for nothing but to be
/// compared, or named by its hash.
pub(crate) struct RunningMemory {
    name: String,
    process: ProcessMemory,
    /// Where each run begins in the file, and the run.
    runs: Vec<(u64, Run)>,
    size: u64,
    stop: Stop,
}

impl RunningMemory {
    /// Looks at what the process has now. When `stop` is set, reading it ends with an error.
    ///
    /// # Errors
    /// The process has ended, must not be looked at, or the kernel cannot tell (before Linux 6.7).
    pub(crate) fn of(pid: i32, stop: Stop) -> io::Result<Self> {
        let process = ProcessMemory::open(pid)?;
        let mut size = 0;
        let place = |run: Run| {
            let at = size;
            size += run.len;
            (at, run)
        };
        let runs = private_runs(pid)?.into_iter().map(place).collect();
        Ok(Self { name: format!("memory-{pid}"), process, runs, size, stop })
    }
}

impl Contents for RunningMemory {
    fn name(&self) -> &str {
        &self.name
    }

    fn mode(&self) -> u32 {
        0o600
    }

    fn size(&self) -> u64 {
        self.size
    }

    /// What is not there any more reads as zeros.
    fn read_exact_at(&self, bytes: &mut [u8], offset: u64) -> io::Result<()> {
        if self.stop.is_set() {
            return Err(ErrorKind::Interrupted.into());
        }
        let mut next = self.runs.partition_point(|(at, run)| at + run.len <= offset);
        let (mut rest, mut at) = (bytes, offset);
        while !rest.is_empty() {
            let (begin, run) = self.runs.get(next).ok_or(ErrorKind::UnexpectedEof)?;
            let skipped = at - begin;
            let len = (run.len - skipped).min(rest.len() as u64);
            let (now, after) = rest.split_at_mut(len as usize);
            let read = self.process.read_permitted(now, run.address + skipped);
            now[read..].fill(0);
            (rest, at, next) = (after, at + len, next + 1);
        }
        Ok(())
    }
}
