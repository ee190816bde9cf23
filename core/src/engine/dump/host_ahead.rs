//! Host memory that is copied while the programs run.
//!
//! As with device memory nothing rests on these copies: chunks are named by the hash of their bytes. Once the programs
//! are frozen all of their private memory is read and hashed again, and what the store has by then need not be
//! compressed and written. Memory is cut as CRIU's files of pages are, by its contents, so that it does not matter if
//! pages have come or gone in between.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};
use std::{io, thread};

use super::task::Task;
use crate::base::cores::Cores;
use crate::base::stop::Stop;
use crate::engine::error::Error;
use crate::host::process::RunningMemory;
use crate::image::{Contents, ImageError, ImageWriter};

/// Set to anything, it has the host memory of programs copied ahead.
const ENV_HOST_AHEAD: &str = "GPUCR_HOST_AHEAD";
/// Niceness of the threads that copy while the programs run.
const NICE: i32 = 10;
/// A pass that took longer is followed by another one, which copies what was written meanwhile.
const LONG: Duration = Duration::from_secs(1);
/// Most passes.
const PASSES: usize = 3;

/// The copy of the host memory of programs that run. Ends when it is dropped.
pub(super) struct HostAhead {
    thread: Option<JoinHandle<Result<(), ImageError>>>,
    stop: Stop,
}

impl HostAhead {
    /// Begins to copy the memory of all processes of the program into the image, if that is asked for. Where they go on
    /// before it is stored, nothing is gained by that, and nothing is copied.
    ///
    /// # Errors
    /// A thread cannot be started.
    pub(super) fn start(task: &Task<'_>, image: &Arc<ImageWriter>) -> Result<Self, Error> {
        if task.strategy.goes_on_early() || std::env::var_os(ENV_HOST_AHEAD).is_none() {
            let stop = Stop::new(task.options.stop.clone());
            return Ok(Self { thread: None, stop });
        }
        let pids = task.processes().map(|process| process.pid).collect();
        Self::of(pids, image.clone(), task.options.stop.clone())
    }

    fn of(pids: Vec<u32>, image: Arc<ImageWriter>, asked: Arc<AtomicBool>) -> Result<Self, Error> {
        let stop = Stop::new(asked);
        let copy = Ahead { cores: Cores::watch(pids.clone()), pids, image, stop: stop.clone() };
        let thread = thread::Builder::new().name("gpucr-host".into()).spawn(move || copy.passes());
        let failed = |source| Error::Io { what: "cannot start a thread".to_owned(), source };
        Ok(Self { thread: Some(thread.map_err(failed)?), stop })
    }

    /// Waits for its end.
    ///
    /// # Errors
    /// The image cannot be written, or gpucr was asked to end.
    pub(super) fn finish(mut self) -> Result<(), Error> {
        let copied = self.join();
        if self.stop.asked().load(Ordering::Relaxed) {
            return Err(Error::Interrupted);
        }
        Ok(copied?)
    }

    fn join(&mut self) -> Result<(), ImageError> {
        let joined = self.thread.take().map(JoinHandle::join);
        joined.unwrap_or(Ok(Ok(()))).unwrap_or_else(|panic| std::panic::resume_unwind(panic))
    }
}

impl Drop for HostAhead {
    fn drop(&mut self) {
        self.stop.fail();
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}

/// What is copied, and where to.
struct Ahead {
    pids: Vec<u32>,
    image: Arc<ImageWriter>,
    cores: Cores,
    stop: Stop,
}

impl Ahead {
    fn passes(&self) -> Result<(), ImageError> {
        let cpus = thread::available_parallelism().map_or(1, usize::from);
        let pool = rayon::ThreadPoolBuilder::new()
            .num_threads(self.cores.share(cpus))
            .thread_name(|_| "gpucr-host".into())
            .start_handler(|_| {
                // The priority is the thread's own, and the thread ends with the copy.
                let _ = rustix::process::setpriority_process(None, NICE);
            })
            .build();
        let pool = match pool {
            Ok(pool) => pool,
            Err(error) => {
                tracing::warn!(%error, "host memory is not copied ahead");
                return Ok(());
            }
        };
        for pass in 1..=PASSES {
            let begun = Instant::now();
            let bytes = pool.install(|| self.pass())?;
            let took = begun.elapsed();
            tracing::debug!(pass, bytes, ?took, "host memory");
            if took < LONG {
                break;
            }
        }
        Ok(())
    }

    /// Copies what the store lacks. Gives the bytes of all memory.
    fn pass(&self) -> Result<u64, ImageError> {
        let mut bytes = 0;
        for pid in &self.pids {
            match RunningMemory::of(*pid as i32, self.stop.clone()) {
                Ok(memory) => {
                    let copied =
                        self.image.add_contents(&Polite { memory: &memory, cores: &self.cores });
                    // What ends the copy from outside is not its failure.
                    if self.stop.is_set() {
                        return Ok(bytes);
                    }
                    copied?;
                    bytes += memory.size();
                }
                Err(error) => tracing::debug!(%error, pid, "its memory is not copied ahead"),
            }
        }
        Ok(bytes)
    }
}

/// Memory that is read by threads that stay off the CPUs which the programs need.
struct Polite<'a> {
    memory: &'a RunningMemory,
    cores: &'a Cores,
}

impl Contents for Polite<'_> {
    fn name(&self) -> &str {
        self.memory.name()
    }

    fn mode(&self) -> u32 {
        self.memory.mode()
    }

    fn size(&self) -> u64 {
        self.memory.size()
    }

    fn read_exact_at(&self, bytes: &mut [u8], offset: u64) -> io::Result<()> {
        self.cores.stay_off();
        self.memory.read_exact_at(bytes, offset)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::image::FILE_CUT;
    use crate::store::tests::noise;
    use crate::store::{ChunkId, Compression};

    fn image(dir: &tempfile::TempDir) -> Arc<ImageWriter> {
        Arc::new(ImageWriter::create(&dir.path().join("image"), Compression::None).unwrap())
    }

    #[test]
    fn what_is_read_while_a_process_runs_is_cut_as_it_is_at_the_stop() {
        // Large enough for a mapping of its own.
        let memory = noise(5, 24 << 20);
        let own = std::process::id();
        match RunningMemory::of(own as i32, Stop::new(Arc::default())) {
            // A kernel before Linux 6.7.
            Err(error) if error.raw_os_error() == Some(libc::ENOTTY) => return,
            found => assert!(found.unwrap().size() >= memory.len() as u64),
        }
        let dir = tempfile::tempdir().unwrap();
        let image = image(&dir);
        // One of the processes has ended.
        HostAhead::of(vec![i32::MAX as u32, own], image.clone(), Arc::default())
            .unwrap()
            .finish()
            .unwrap();
        let pieces: Vec<&[u8]> =
            FILE_CUT.pieces(&memory[4096 - memory.as_ptr() as usize % 4096..]).collect();
        let found =
            pieces.iter().filter(|piece| image.chunks().contains(&ChunkId::of(piece))).count();
        // Spans begin elsewhere.
        assert!(found > pieces.len() * 3 / 4, "{found} of {}", pieces.len());
    }

    #[test]
    fn it_ends_when_gpucr_is_to_end() {
        let dir = tempfile::tempdir().unwrap();
        let asked = Arc::new(AtomicBool::new(true));
        let copy = HostAhead::of(vec![std::process::id()], image(&dir), asked).unwrap();
        assert!(matches!(copy.finish(), Err(Error::Interrupted)));
    }
}
