//! The copy of host memory that goes on beside that of device memory.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use crossbeam_channel::{Receiver, Sender};

use super::memory::{Host, HostMemory, Mode, pages};
use super::polite::Polite;
use super::watched::{Found, Watched};
use crate::base::cores::Cores;
use crate::base::ranges::Ranges;
use crate::base::stop::Stop;
use crate::base::timeline::{Timeline, Track};
use crate::engine::cuda_process::CudaProcess;
use crate::engine::dump::passes::Passes;
use crate::engine::dump::task::Task;
use crate::engine::error::Error;
use crate::engine::memory::Bulk;
use crate::engine::migrate::outgoing::Outgoing;
use crate::host::process::{
    AgentError, RunningMemory, Tracking, wait_for_writers, why_not_to_track,
};
use crate::image::{Contents, ImageError, ImageWriter};

/// Niceness of the threads that copy while the programs run.
const NICE: i32 = 10;
/// The pause before the first pass: what is written in less time is not copied.
const MOMENT: Duration = Duration::from_millis(150);
/// Between the protection of pages and their being read at least: who had begun to write to them in another way than
/// through the page tables, such as process_vm_writev(2) of another process, has done so then.
const GRACE: Duration = Duration::from_millis(20);
/// How long who is running is waited for because of that.
const PATIENCE: Duration = Duration::from_secs(2);
/// What was copied so long ago is copied once more where it was written since.
const LONG: Duration = Duration::from_secs(1);
/// A pass that would copy less than this share of the memory is left to the stop.
const LITTLE: u64 = 200;
/// Most passes, and most of those that are made when device memory has taken longer.
const PASSES: usize = 8;
const LATE_PASSES: usize = 2;
/// Most passes where it is known how fast the copy is.
const MEASURED_PASSES: usize = 30;
/// Most passes where nothing is tracked. Each reads all memory.
const HASH_PASSES: usize = 3;

/// The copy of the host memory of programs that run. Ends when it is dropped.
pub(in crate::engine::dump) struct HostAhead {
    thread: Option<JoinHandle<Result<Ahead, ImageError>>>,
    /// Dropped when nothing else is copied any more.
    others: Option<Sender<()>>,
    stop: Stop,
}

impl HostAhead {
    /// Begins to copy the memory of the processes of the program into the image. What of it cannot be tracked is stored
    /// all the same: it is read again at the stop, and what has the same bytes need not be compressed and written then.
    ///
    /// # Errors
    /// A thread cannot be started, or an agent is gone.
    pub(in crate::engine::dump) fn start(
        task: &mut Task<'_>,
        image: &Arc<ImageWriter>,
        memory: Option<&mut Bulk>,
    ) -> Result<Self, Error> {
        let asked = task.options.stop.clone();
        let mode = Mode::asked();
        let watched = match mode {
            Mode::Off | Mode::Hashed => Vec::new(),
            Mode::Tracked | Mode::Checked => watch(task, memory)?,
        };
        // Where programs go on before it is stored, nothing is gained by copies that all have to be compared.
        let is_hashed = mode != Mode::Off && !task.strategy.goes_on_early();
        let is_tracked = |pid| watched.iter().any(|watched| watched.pid == pid);
        let pids = task.processes().map(|process| process.pid);
        let untracked: Vec<u32> = pids.filter(|pid| is_hashed && !is_tracked(*pid)).collect();
        if watched.is_empty() && untracked.is_empty() {
            return Ok(Self { thread: None, others: None, stop: Stop::new(asked) });
        }
        let timeline = &task.options.timeline;
        let mut ahead = Ahead::new(mode, untracked, watched, image.clone(), asked, timeline);
        ahead.peer = task.options.target.peer().cloned();
        Self::of(ahead)
    }

    fn of(mut ahead: Ahead) -> Result<Self, Error> {
        let stop = ahead.stop.clone();
        let (others, is_over) = crossbeam_channel::bounded(0);
        let run = move || ahead.run(&is_over).map(|()| ahead);
        let thread = thread::Builder::new().name("gpucr-host".into()).spawn(run);
        let failed = |source| Error::Io { what: "cannot start a thread".to_owned(), source };
        Ok(Self { thread: Some(thread.map_err(failed)?), others: Some(others), stop })
    }

    /// Waits for its end. Nothing else is copied while it lasts. Gives, with what was copied, the bytes that are known to
    /// be left.
    ///
    /// # Errors
    /// The image cannot be written, or gpucr was asked to end.
    pub(in crate::engine::dump) fn finish(mut self) -> Result<(Host, u64), Error> {
        drop(self.others.take());
        let joined = self.thread.take().map(JoinHandle::join);
        let copied = joined.map(|it| it.unwrap_or_else(|panic| std::panic::resume_unwind(panic)));
        if self.stop.asked().load(Ordering::Relaxed) {
            return Err(Error::Interrupted);
        }
        let Some(Ahead { mode, watched, account, left, .. }) = copied.transpose()? else {
            return Ok((Host::default(), 0));
        };
        Ok((Host::new(mode, watched, account), left))
    }
}

impl Drop for HostAhead {
    fn drop(&mut self) {
        self.stop.fail();
        drop(self.others.take());
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}

/// Begins to track the processes that can be. One that has come to its end is none that the image has to bring back.
fn watch(task: &mut Task<'_>, mut memory: Option<&mut Bulk>) -> Result<Vec<Watched>, Error> {
    let (mut all, mut number) = (Vec::new(), 0);
    while let Some(program) = task.made.cuda_processes.get_mut(number) {
        let pid = program.process.pid;
        match tracking(program) {
            Ok(Some((tracking, pinned))) => match Watched::begin(pid, tracking, pinned) {
                Ok(watched) => all.push(watched),
                Err(error) => tracing::debug!(%error, pid, "it is not tracked"),
            },
            Ok(None) => {}
            Err(Error::Agent(AgentError::Failed { message, .. })) => {
                tracing::debug!(message, pid, "it is not tracked");
            }
            Err(Error::Agent(AgentError::Broken { .. } | AgentError::Absent { .. }))
                if task.forget_ended(pid, memory.as_deref_mut()) =>
            {
                continue;
            }
            Err(error) => return Err(error),
        }
        number += 1;
    }
    Ok(all)
}

/// A way to track the process, and what devices may write of its memory. `None` if there is none.
fn tracking(program: &mut CudaProcess) -> Result<Option<(Tracking, Ranges)>, Error> {
    let pid = program.process.pid;
    match why_not_to_track(pid as i32) {
        Ok(None) => {}
        Ok(Some(obstacle)) => {
            tracing::info!(pid, obstacle, "its host memory is not copied ahead");
            return Ok(None);
        }
        Err(error) => {
            tracing::debug!(%error, pid, "it is not tracked");
            return Ok(None);
        }
    }
    let Some(agent) = &mut program.agent else { return Ok(None) };
    let uffd = agent.track()?;
    let pinned = agent.pinned()?;
    match Tracking::begin(pid as i32, uffd) {
        Ok(tracking) => Ok(Some((tracking, pages(&pinned)))),
        Err(error) => {
            tracing::debug!(%error, pid, "the kernel cannot track it");
            Ok(None)
        }
    }
}

/// What is copied, and where to.
struct Ahead {
    mode: Mode,
    /// The processes that are copied without being tracked.
    untracked: Vec<u32>,
    watched: Vec<Watched>,
    image: Arc<ImageWriter>,
    cores: Cores,
    timeline: Timeline,
    account: HostMemory,
    /// Bytes that were left to be copied when it was last looked.
    left: u64,
    /// The other side of a migration.
    peer: Option<Arc<Outgoing>>,
    stop: Stop,
}

impl Ahead {
    fn new(
        mode: Mode,
        untracked: Vec<u32>,
        watched: Vec<Watched>,
        image: Arc<ImageWriter>,
        asked: Arc<AtomicBool>,
        timeline: &Timeline,
    ) -> Self {
        let pids = untracked.iter().copied().chain(watched.iter().map(|watched| watched.pid));
        let (cores, stop) = (Cores::watch(pids.collect()), Stop::new(asked));
        let (timeline, account) = (timeline.clone(), HostMemory::default());
        let (left, peer) = (0, None);
        Self { mode, untracked, watched, image, cores, timeline, account, left, peer, stop }
    }

    fn run(&mut self, is_over: &Receiver<()>) -> Result<(), ImageError> {
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
                self.watched.clear();
                return Ok(());
            }
        };
        pool.install(|| self.hash_passes())?;
        if self.watched.is_empty() {
            return Ok(());
        }
        // Ends early when nothing else is copied, or nothing is wanted any more; the passes see which it is.
        wait(&self.stop, MOMENT);
        pool.install(|| self.passes(PASSES))?;
        let copied = Instant::now();
        // Nothing comes: this is the end of the sender.
        let _ = is_over.recv();
        if copied.elapsed() > LONG {
            pool.install(|| self.passes(LATE_PASSES))?;
        }
        Ok(())
    }

    /// Copies what was written since it was copied, again and again, for as long as that is worth it.
    fn passes(&mut self, most: usize) -> Result<(), ImageError> {
        let has_goal = self.peer.as_ref().is_some_and(|peer| peer.little().is_some());
        let mut passes = Passes::new(if has_goal { MEASURED_PASSES } else { most });
        loop {
            if self.stop.is_set() {
                return Ok(());
            }
            let found: Vec<Option<Found>> = self.watched.iter_mut().map(Watched::look).collect();
            let sum = |of: fn(&Found) -> u64| found.iter().flatten().map(of).sum::<u64>();
            let (left, all) = (sum(Found::left), sum(Found::all));
            tracing::debug!(left, all, "pre-copy of host memory");
            self.left = left;
            // At the stop, a chunk is read for each page that was written; so a pass is made for less than with devices.
            let little = self.peer.as_ref().and_then(|peer| peer.little());
            if !passes.is_worth(left, all, little.or(Some(all / LITTLE))) {
                return Ok(());
            }
            self.account.passes += 1;
            let number = self.account.passes;
            let mut slice = self.timeline.begin(Track::HostPasses, || format!("pass {number}"));
            for (watched, found) in self.watched.iter_mut().zip(&found) {
                found.iter().for_each(|found| watched.protect(found));
            }
            thread::sleep(GRACE);
            wait_for_writers(PATIENCE, &self.stop);
            let mut bytes = 0;
            for (watched, found) in self.watched.iter_mut().zip(found) {
                let Some(found) = found else { continue };
                match watched.copy(&found, &self.image, &self.cores, &self.stop) {
                    // What ends the copy from outside is not its failure.
                    Err(_) if self.stop.is_set() => return Ok(()),
                    copied => bytes += copied?,
                }
            }
            slice.set_bytes(bytes);
            self.account.ahead_bytes += bytes;
        }
    }

    /// Copies all memory that is not tracked, again and again while that takes long.
    fn hash_passes(&mut self) -> Result<(), ImageError> {
        if self.untracked.is_empty() {
            return Ok(());
        }
        for _ in 0..HASH_PASSES {
            let begun = Instant::now();
            self.account.passes += 1;
            let pass = self.account.passes;
            let mut slice = self.timeline.begin(Track::HostPasses, || format!("pass {pass}"));
            let bytes = self.hash_pass()?;
            slice.set_bytes(bytes);
            self.account.ahead_bytes += bytes;
            let took = begun.elapsed();
            tracing::debug!(pass, bytes, ?took, "host memory");
            if took < LONG {
                break;
            }
        }
        Ok(())
    }

    /// Copies what the store lacks. Gives the bytes of all memory.
    fn hash_pass(&self) -> Result<u64, ImageError> {
        let mut bytes = 0;
        for pid in &self.untracked {
            match RunningMemory::of(*pid as i32, self.stop.clone()) {
                Ok(memory) => {
                    let polite = Polite { memory: &memory, cores: &self.cores };
                    let all = 0..memory.size();
                    let copied = self.image.add_stretches(&polite, std::slice::from_ref(&all));
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

fn wait(stop: &Stop, time: Duration) {
    let until = Instant::now() + time;
    while Instant::now() < until && !stop.is_set() {
        thread::sleep(Duration::from_millis(10));
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

    fn hashing(pids: Vec<u32>, image: Arc<ImageWriter>, asked: Arc<AtomicBool>) -> HostAhead {
        let timeline = Timeline::default();
        HostAhead::of(Ahead::new(Mode::Hashed, pids, Vec::new(), image, asked, &timeline)).unwrap()
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
        hashing(vec![i32::MAX as u32, own], image.clone(), Arc::default()).finish().unwrap();
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
        let copy = hashing(vec![std::process::id()], image(&dir), asked);
        assert!(matches!(copy.finish(), Err(Error::Interrupted)));
    }
}
