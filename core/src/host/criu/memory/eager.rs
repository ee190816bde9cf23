//! All memory is loaded before any process runs.

use std::io;
use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::time::Duration;

use parking_lot::Mutex;
use rustix::io::Errno;

use super::plan::{Memory, Part};
use super::stage::Stage;
use super::uffd::{Event, PAGE, Uffd};

/// Most threads for one process: the kernel's work for each page is done with locks of the process.
const THREADS: usize = 8;
/// The time between two checks whether a mapping is in its place.
const POLL: Duration = Duration::from_micros(200);

/// A process whose memory is being loaded.
pub(super) struct Process {
    pub(super) uffd: Uffd,
    memory: Arc<Memory>,
    next: AtomicUsize,
    /// The part of the zeros in no file that comes next.
    next_zeros: AtomicUsize,
    /// Parts of the file that somebody waits for.
    wanted: Mutex<Vec<usize>>,
    /// For each part of the file, whether somebody loads it, or has loaded it.
    begun: Vec<AtomicBool>,
}

/// How many threads load the memory of each of so many processes.
pub(super) fn threads(processes: usize) -> usize {
    let cores = std::thread::available_parallelism().map_or(1, usize::from);
    (cores.min(THREADS) / processes.max(1)).max(1)
}

impl Process {
    pub(super) fn new(uffd: Uffd, memory: Arc<Memory>) -> Self {
        let begun = (0..memory.groups()).map(|_| AtomicBool::default()).collect();
        let (next, next_zeros) = (AtomicUsize::new(0), AtomicUsize::new(0));
        Self { uffd, memory, next, next_zeros, wanted: Mutex::default(), begun }
    }

    /// Loads part by part, while other threads do the same.
    pub(super) fn load(&self, stage: &Stage) -> io::Result<()> {
        let mut buffer = Vec::new();
        while let Some(number) = self.begin() {
            if stage.is_over() {
                return Ok(());
            }
            self.load_part(number, &mut buffer, stage)?;
        }
        while let Some(zeros) = self.memory.zeros(self.next_zeros.fetch_add(1, Ordering::Relaxed)) {
            self.put_zeros(zeros, stage);
        }
        Ok(())
    }

    /// Puts pages to addresses that would read as zeros without them, too: the driver reads them when it restores its
    /// state, and would have to wait for each.
    fn put_zeros(&self, zeros: &Range<u64>, stage: &Stage) {
        let mut at = zeros.start;
        while at < zeros.end && !stage.is_over() {
            let is_complete = stage.is_complete();
            match self.uffd.zero(at, zeros.end - at) {
                Ok(0) => std::thread::sleep(POLL),
                Ok(done) => at += done,
                // CRIU has touched it.
                Err(Errno::EXIST) => at += PAGE,
                Err(Errno::NOENT) if !is_complete => std::thread::sleep(POLL),
                Err(error) => {
                    tracing::debug!(%error, "zeros are left to be made when they are touched");
                    return;
                }
            }
        }
    }

    /// The next part that nobody has begun: first what somebody waits for.
    fn begin(&self) -> Option<usize> {
        let is_new = |number: &usize| !self.begun[*number].swap(true, Ordering::Relaxed);
        loop {
            let wanted = self.wanted.lock().pop();
            let number = wanted.unwrap_or_else(|| self.next.fetch_add(1, Ordering::Relaxed));
            if number >= self.begun.len() {
                return None;
            }
            if is_new(&number) {
                return Some(number);
            }
        }
    }

    fn load_part(&self, number: usize, buffer: &mut Vec<u8>, stage: &Stage) -> io::Result<()> {
        let Some(pieces) = self.memory.group(number) else { return Ok(()) };
        let file = &self.memory.file;
        let part = file.part(pieces[0].at);
        let content = file.read(&part, buffer)?;
        for piece in pieces {
            let mut done = 0;
            while done < piece.len {
                if stage.is_over() {
                    return Ok(());
                }
                // Before the try: what is not in its place then never will be.
                let is_complete = stage.is_complete();
                let (to, len) = (piece.to + done, piece.len - done);
                let copied = match content {
                    Part::Zeros => self.uffd.zero(to, len),
                    Part::Bytes(bytes) => {
                        let from = (piece.at + done - part.start) as usize;
                        self.uffd.copy(to, &bytes[from..from + len as usize])
                    }
                };
                match copied {
                    // The kernel is at the mappings just now.
                    Ok(0) => std::thread::sleep(POLL),
                    Ok(copied) => done += copied,
                    Err(Errno::NOENT) if !is_complete => std::thread::sleep(POLL),
                    Err(error) => return Err(error.into()),
                }
            }
        }
        Ok(())
    }

    /// Memory that is to be loaded, and that CRIU or a thread that it makes has touched, comes next: they wait for it.
    /// Elsewhere the process would have zeros.
    pub(super) fn answer_fault(&self) -> io::Result<()> {
        let Some(Event::Fault(address)) = self.uffd.event()? else { return Ok(()) };
        if let Some(piece) = self.memory.at(address) {
            // Those who load take it: whoever hears of faults must not wait for a process that changes its mappings.
            self.wanted.lock().push(self.memory.group_of(piece.at));
            return Ok(());
        }
        match self.uffd.zero(address / PAGE * PAGE, PAGE) {
            // Another thread was faster, or the process is changing its mappings and will ask again.
            Ok(_) | Err(Errno::EXIST | Errno::NOENT | Errno::SRCH) => Ok(()),
            Err(error) => Err(error.into()),
        }
    }
}
