//! The private memory of processes that run, as files that are like those of CRIU.

use std::io::{self, ErrorKind};

use parking_lot::Mutex;

use super::memory::{Place, ProcessMemory};
use super::pagemap::{Run, private_runs};
use crate::base::stop::Stop;
use crate::image::Contents;

/// The memory that a process which runs has for itself: the same pages in the same order as in CRIU's file of pages,
/// but for what comes and goes meanwhile. It is read while it changes, so what is read is good for nothing but to be
/// compared, or named by its hash, unless the process is known not to have written it since before it was read.
pub(crate) struct RunningMemory {
    name: String,
    process: ProcessMemory,
    places: Vec<Place>,
    size: u64,
    stop: Stop,
    /// Addresses, from their starts to their ends, of what could not be read.
    unread: Mutex<Vec<(u64, u64)>>,
}

impl RunningMemory {
    /// Looks at what the process has now. When `stop` is set, reading it ends with an error.
    ///
    /// # Errors
    /// The process has ended, must not be looked at, or the kernel cannot tell (before Linux 6.7).
    pub(crate) fn of(pid: i32, stop: Stop) -> io::Result<Self> {
        Self::with(pid, &private_runs(pid)?, stop)
    }

    /// Memory of the process that has been found before, in the order of its addresses.
    ///
    /// # Errors
    /// The process has ended, or must not be looked at.
    pub(crate) fn with(pid: i32, runs: &[Run], stop: Stop) -> io::Result<Self> {
        let process = ProcessMemory::open(pid)?;
        let mut size = 0;
        let place = |run: &Run| {
            let (at, address, len) = (size, run.address, run.len);
            size += len;
            Place { at, address, len }
        };
        let places = runs.iter().map(place).collect();
        let name = format!("memory-{pid}");
        Ok(Self { name, process, places, size, stop, unread: Mutex::default() })
    }

    /// What lies where in the file.
    pub(crate) fn places(&self) -> &[Place] {
        &self.places
    }

    /// Addresses, from their starts to their ends, of what could not be read so far: zeros were given for it.
    pub(crate) fn unread(&self) -> Vec<(u64, u64)> {
        self.unread.lock().clone()
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
        let mut next = self.places.partition_point(|place| place.at + place.len <= offset);
        let (mut rest, mut at) = (bytes, offset);
        while !rest.is_empty() {
            let place = self.places.get(next).ok_or(ErrorKind::UnexpectedEof)?;
            let skipped = at - place.at;
            let len = (place.len - skipped).min(rest.len() as u64);
            let (now, after) = rest.split_at_mut(len as usize);
            let address = place.address + skipped;
            if self.process.read(now, address).is_err() {
                now.fill(0);
                self.unread.lock().push((address, address + len));
            }
            (rest, at, next) = (after, at + len, next + 1);
        }
        Ok(())
    }
}
