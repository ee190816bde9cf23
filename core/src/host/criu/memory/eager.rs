//! All memory is loaded before any process runs.

use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

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
}

/// How many threads load the memory of each of so many processes.
pub(super) fn threads(processes: usize) -> usize {
    let cores = std::thread::available_parallelism().map_or(1, usize::from);
    (cores.min(THREADS) / processes.max(1)).max(1)
}

impl Process {
    pub(super) fn new(uffd: Uffd, memory: Arc<Memory>) -> Self {
        Self { uffd, memory, next: AtomicUsize::new(0) }
    }

    /// Loads part by part, while other threads do the same.
    pub(super) fn load(&self, stage: &Stage) -> io::Result<()> {
        let mut buffer = Vec::new();
        let file = &self.memory.file;
        while let Some(pieces) = self.memory.group(self.next.fetch_add(1, Ordering::Relaxed)) {
            if stage.is_over() {
                return Ok(());
            }
            let part = file.part(pieces[0].at);
            let content = file.read(&part, &mut buffer)?;
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
        }
        Ok(())
    }

    /// A fault where there is memory to be loaded ends when that is there. Elsewhere the process would have
    /// zeros.
    pub(super) fn answer_fault(&self) -> io::Result<()> {
        let Some(Event::Fault(address)) = self.uffd.event()? else { return Ok(()) };
        if self.memory.at(address).is_some() {
            return Ok(());
        }
        match self.uffd.zero(address / PAGE * PAGE, PAGE) {
            // Another thread was faster, or the process is changing its mappings and will ask again.
            Ok(_) | Err(Errno::EXIST | Errno::NOENT | Errno::SRCH) => Ok(()),
            Err(error) => Err(error.into()),
        }
    }
}
