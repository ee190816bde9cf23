//! Protocol `cow`: what is saved while the programs run on, and what follows if it was written too early.
//!
//! The shims let launches wait that may write memory which is not saved yet. What a launch may write is
//! a guess. So every chunk that is copied late is compared with the hash that it had when the program
//! was stopped. If one differs the image of that moment is lost; the dump goes back to copying while
//! the program runs, stops it once more, and then copies everything before it lets it go on.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use gpucr_wire::table::{Wait, monotonic_ns};
use parking_lot::Mutex;

use super::speculate::{Blamed, LEARNING, Speculation};
use crate::base::faults::skipped;
use crate::base::format::milliseconds;
use crate::base::stop::Stop;
use crate::base::timeline::{Misspeculation, Timeline, Track};
use crate::engine::cuda_process::CudaProcess;
use crate::engine::error::Error;
use crate::engine::memory::{Bulk, Deferred, PutOff};
use crate::host::process::Guard;

/// For so long launches wait while nothing at all arrives.
pub(super) const LIMIT: Duration = Duration::from_secs(10);
/// How often it is checked whether anything arrives.
const POLL: Duration = Duration::from_millis(50);

/// Memory that was saved while the program ran on.
#[derive(Debug, Clone, Default, PartialEq, serde::Serialize)]
pub struct Deferral {
    /// Chunks that were still to be saved when the program was stopped, and were not copied before
    /// it went on.
    pub chunks: u64,
    /// Calls of the program that waited because they might have written such a chunk.
    pub blocked: u64,
    /// For how long they waited, added up over all threads, milliseconds.
    pub blocked_ms: f64,
    /// Chunks that were found to be written before they were saved. If there are any the program was
    /// stopped a second time, and the image is of that moment.
    pub misspeculated: u64,
    /// Which allocations these chunks belong to, and what may have written them; at most 100.
    pub misspeculations: Vec<Misspeculation>,
}

/// Kernels that have written where that was not expected, by process: they wait for everything from then
/// on. Clones share what is learnt.
#[derive(Debug, Clone, Default)]
pub struct Feedback(Arc<Mutex<BTreeMap<u32, BTreeSet<String>>>>);

impl Feedback {
    fn of(&self, pid: u32) -> Vec<String> {
        self.0.lock().get(&pid).into_iter().flatten().cloned().collect()
    }

    fn learn(&self, pid: u32, kernels: impl IntoIterator<Item = String>) {
        self.0.lock().entry(pid).or_default().extend(kernels);
    }
}

/// Ends all waiting if nothing arrives of what launches wait for: the disk may hang, and a program is not to hang
/// with it. Sees to that until it is dropped.
pub(super) struct Patience {
    has_ended: Arc<AtomicBool>,
    ending: Arc<AtomicBool>,
    thread: Option<JoinHandle<()>>,
}

impl Patience {
    fn new(shared: Arc<Deferred>, stop: Stop) -> Self {
        let (has_ended, ending) = (Arc::<AtomicBool>::default(), Arc::<AtomicBool>::default());
        let (told, until) = (has_ended.clone(), ending.clone());
        let watch = move || {
            let (mut left, mut since) = (shared.left(), Instant::now());
            while !until.load(Ordering::Relaxed) && left > 0 {
                std::thread::sleep(POLL);
                let now = shared.left();
                if now != left || !shared.is_wanted() {
                    (left, since) = (now, Instant::now());
                } else if since.elapsed() >= LIMIT {
                    told.store(true, Ordering::Relaxed);
                    tracing::warn!(
                        "nothing can be stored; the program continues, and there will be no image"
                    );
                    stop.fail();
                    return shared.end();
                }
            }
        };
        // Without a thread nothing ends the wait.
        let thread = std::thread::Builder::new().spawn(watch).ok();
        Self { has_ended, ending, thread }
    }

    /// Whether it has come to an end.
    pub(super) fn has_ended(&self) -> bool {
        self.has_ended.load(Ordering::Relaxed)
    }
}

impl Drop for Patience {
    fn drop(&mut self) {
        self.ending.store(true, Ordering::Relaxed);
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}

/// What a dump knows of the memory that it saves late.
pub(super) struct Late {
    shared: Arc<Deferred>,
    /// How often the programs had been asked what they launch when they were stopped.
    interval: usize,
    /// What the report will say of it.
    pub(super) found: Deferral,
}

impl Late {
    /// Puts off saving what is left until the programs run again, and makes their guards. `None` if nothing is left.
    pub(super) fn defer(
        cuda_processes: &mut [CudaProcess],
        bulk: &mut Bulk,
        speculation: &Speculation,
        feedback: &Feedback,
    ) -> Result<Option<Self>, Error> {
        let PutOff { shared, files, chunks } = bulk.defer(cuda_processes.len())?;
        if chunks == 0 {
            return Ok(None);
        }
        for (program, table) in files.into_iter().enumerate() {
            let Some(table) = table else { continue };
            let summaries =
                if skipped("summaries") { Vec::new() } else { speculation.summaries(program) };
            cuda_processes[program].guard = Some(Guard {
                ranges: shared.ranges(program).to_vec(),
                summaries,
                distrusted: feedback.of(cuda_processes[program].process.pid),
                table,
            });
        }
        let found = Deferral { chunks, ..Deferral::default() };
        Ok(Some(Self { shared, interval: speculation.intervals(), found }))
    }

    /// The programs are about to go on, with memory that is still to be saved.
    pub(super) fn set_running(&self) {
        self.shared.set_running();
    }

    /// The programs wait for what is saved while they run, but not for ever: then `stop` ends the copy.
    pub(super) fn patience(&self, stop: &Stop) -> Patience {
        Patience::new(self.shared.clone(), stop.clone())
    }

    /// No call waits any more: takes down for how long calls were blocked.
    pub(super) fn settled(&mut self, timeline: &Timeline) {
        let (blocked, time) = self.shared.blocked();
        (self.found.blocked, self.found.blocked_ms) = (blocked, milliseconds(time));
        let (now, now_ns) = (Instant::now(), monotonic_ns());
        for Wait { begin, end } in self.shared.waits() {
            let before = |ns: u64| Duration::from_nanos(now_ns.saturating_sub(ns));
            let since = now.checked_sub(before(begin)).unwrap_or(now);
            let length = before(begin).saturating_sub(before(end));
            timeline.lasted(Track::Blocked, "blocked", since, length);
        }
    }

    /// Memory was written before it was saved: finds out by whom, and remembers them.
    pub(super) fn learn(
        &mut self,
        cuda_processes: &mut [CudaProcess],
        bulk: &mut Bulk,
        speculation: &mut Speculation,
        feedback: &Feedback,
    ) {
        if let Err(error) = speculation.ask(cuda_processes, LEARNING) {
            tracing::warn!(%error, "the programs do not report what they have launched");
        }
        let mut missed = std::mem::take(&mut bulk.missed);
        for miss in &mut missed {
            miss.interval = self.interval;
        }
        for (number, program) in cuda_processes.iter().enumerate() {
            if missed.iter().any(|miss| miss.program == number) {
                // Launches that point there openly have waited. It may have been any other kernel.
                let launched = speculation.launched(number, self.interval);
                feedback.learn(program.process.pid, launched);
            }
        }
        self.found.misspeculated = missed.len() as u64;
        self.found.misspeculations = speculation.blame(&missed, cuda_processes, Blamed::All);
    }
}

/// Programs that go on as before guard nothing.
pub(super) fn forget_guards(cuda_processes: &mut [CudaProcess]) {
    cuda_processes.iter_mut().for_each(|program| program.guard = None);
}

/// Whether all shims guard what is still to be saved.
///
/// # Errors
/// The error of the first shim that does not.
pub(super) fn check_guards(cuda_processes: &mut [CudaProcess]) -> Result<(), Error> {
    let failed = cuda_processes.iter_mut().find_map(|program| program.guard_failed.take());
    failed.map_or(Ok(()), |error| Err(error.into()))
}

/// Ends the guards, and with them what is recorded.
pub(super) fn unguard(cuda_processes: &mut [CudaProcess]) {
    for program in cuda_processes.iter_mut().filter(|program| program.guard.is_some()) {
        (program.guard, program.agent) = (None, None);
    }
}
