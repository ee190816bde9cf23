//! Copying while the programs run.
//!
//! What is copied here is a guess: chunks that stayed unchanged for a moment are expected to stay so
//! until the program is stopped. Nothing rests on it. Every copy is named by the hash of the bytes
//! that were copied, and once the program is stopped all device memory is hashed where it is; what
//! is not in the store by then is copied.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use gpucr_wire::Block;

use super::host::ahead::HostAhead;
use super::passes::Passes;
use super::speculate::LEARNING;
use super::stop;
use super::task::Task;
use crate::base::phase::Phase;
use crate::base::polite::Polite;
use crate::base::stop::Stop;
use crate::base::timeline::Track;
use crate::engine::copied_files::Candidates;
use crate::engine::cuda_process::CudaProcess;
use crate::engine::error::Error;
use crate::engine::memory::Bulk;
use crate::engine::migrate::outgoing::Outgoing;
use crate::host::process::AgentError;
use crate::image::ImageWriter;

/// The pause between the first two hash passes: what changes in less time is not copied.
const MOMENT: Duration = Duration::from_millis(150);
/// How often the programs are asked for their blocks while memory is copied: what they give back is kept
/// from the device until then.
const ASK: Duration = Duration::from_millis(250);
/// How often it is seen whether the copy has ended meanwhile.
const SEE: Duration = Duration::from_millis(2);
/// After so many passes over the memory the program is stopped in any case.
const PASSES: usize = 5;
/// The same where it is known how fast the copy is.
const MEASURED_PASSES: usize = 30;
/// Device memory that was copied so long ago is looked at once more.
const LONG: Duration = Duration::from_secs(1);

/// Passes in which only memory is copied that no launch seen so far may write. There are none if that is
/// all memory, or if launches tell nothing.
const EARLY_PASSES: usize = 2;

/// Copies what stays unchanged, until the rest is better copied when the programs are stopped. A program that comes
/// to its end meanwhile, and is not the root, is none that the image has to bring back. Where there is no room to map
/// its memory, `memory` is `None` afterwards.
pub(super) fn precopy(
    task: &mut Task<'_>,
    image: &Arc<ImageWriter>,
    memory: &mut Option<Bulk>,
) -> Result<(), Error> {
    let stop = Stop::new(task.options.stop.clone());
    // What goes to another host costs more of this one's processors than what goes to a disk, for longer.
    let peer = task.options.target.peer();
    let _polite = peer.and_then(|peer| Polite::begin(peer.helper().into_iter().collect()));
    let host = HostAhead::start(task, image, memory.as_mut())?;
    let peer = task.options.target.peer().cloned();
    if let Some(peer) = peer.as_ref().filter(|peer| peer.copies_files()) {
        let pids: Vec<u32> = task.processes().map(|process| process.pid).collect();
        let (renamed, stop) = (&task.plan.renamed, &task.options.stop);
        let tree = &task.plan.tree();
        let candidates = Candidates { pids: &pids, renamed, tree, stop };
        candidates.copy_ahead(image, &|path| peer.is_there(path))?;
    }
    let begun = Instant::now();
    let mut precopy =
        Precopy { task, image, memory, stop, peer, pass: 0, hashed: begun, dirty: 0.0 };
    loop {
        match precopy.copy_ahead() {
            Err(Error::Agent(AgentError::Broken { pid, cause }))
                if precopy.task.forget_ended(pid, precopy.memory.as_mut()) =>
            {
                tracing::info!(pid, %cause, "it has ended; the dump continues without it");
            }
            Ok(()) => return precopy.copy_host(host),
            Err(error) => return Err(error),
        }
    }
}

/// What is copied, and where to.
struct Precopy<'p, 'a> {
    task: &'p mut Task<'a>,
    image: &'p ImageWriter,
    memory: &'p mut Option<Bulk>,
    stop: Stop,
    /// The other side of a migration.
    peer: Option<Arc<Outgoing>>,
    /// How many passes were made.
    pass: u32,
    /// When the last hash pass was made, and how many bytes a second had changed by then.
    hashed: Instant,
    dirty: f64,
}

impl Precopy<'_, '_> {
    /// Copies in passes: first what is not expected to be written again, then whatever has stayed unchanged until
    /// then. A chunk that is written now and then is copied once, late.
    fn copy_ahead(&mut self) -> Result<(), Error> {
        let pids = self.task.processes().map(|process| process.pid).collect();
        if let Some(bulk) = self.memory {
            bulk.watch(pids);
        }
        self.task.speculation.start(&mut self.task.made.cuda_processes)?;
        self.hash_pass()?;
        wait(&self.stop, MOMENT)?;
        let hashed = self.passes(EARLY_PASSES, true, false)?;
        self.passes(PASSES, false, hashed)?;
        // To name the kernels that wrote too early. Once the program is stopped there is no time for learning.
        self.ask()
    }

    /// Waits until what was copied is on the disk, and host memory is copied too. If that takes long, device memory is
    /// looked at once more.
    fn copy_host(&mut self, host: HostAhead) -> Result<(), Error> {
        let since = Instant::now();
        // The commit waits for the disk, and may do so while the programs stand still.
        self.image.sync_written()?;
        let left;
        (self.task.host, left) = host.finish()?;
        // The program is not to stand still for what is only on its way.
        let arrive = |peer: &Option<Arc<Outgoing>>| peer.as_ref().map_or(Ok(()), |it| it.arrive());
        arrive(&self.peer)?;
        if since.elapsed() > LONG {
            self.passes(PASSES, false, false)?;
            self.ask()?;
            arrive(&self.peer)?;
        }
        let Some(peer) = &self.peer else { return Ok(()) };
        let device = self.memory.as_ref().map_or(0, |bulk| bulk.left());
        peer.check_left(left + device)
    }

    /// Makes passes, at most `most`, for as long as each has much less to copy than the last. Each begins with a
    /// hash pass, except the first if `hashed` says that there has just been one. Says whether a hash pass was the
    /// last thing it did: a second one soon after it would take anything for clean.
    fn passes(&mut self, most: usize, early: bool, hashed: bool) -> Result<bool, Error> {
        let little = |peer: &Option<Arc<Outgoing>>| peer.as_ref().and_then(|peer| peer.little());
        let has_goal = !early && little(&self.peer).is_some();
        let most = if has_goal { MEASURED_PASSES } else { most };
        let mut passes = Passes::new(most);
        for pass in 0..most {
            let kind = if early { "early pass" } else { "pass" };
            let timeline = &self.task.options.timeline;
            let _pass = timeline.begin(Track::Passes, || format!("{kind} {}", pass + 1));
            if pass > 0 || !hashed {
                self.hash_pass()?;
            }
            let Some(bulk) = self.memory else { return Ok(false) };
            bulk.hold_nothing_back();
            if early && !self.task.speculation.hold_back(bulk) {
                return Ok(true);
            }
            let left = bulk.worth_copying(self.image.chunks());
            tracing::debug!(pass, early, left, "pre-copy");
            if !passes.is_worth(left, self.task.account.bulk_bytes, little(&self.peer)) {
                return Ok(true);
            }
            self.pass += 1;
            if let Some(peer) = &self.peer {
                let all = bulk.left();
                self.task.progress.pass(&peer.progress(self.pass, all, self.dirty));
            }
            self.task.clock.announce(Phase::Precopy, left);
            loop {
                let blocks = self.follow()?;
                let copied = self.copy(&blocks)?;
                if copied == 0 {
                    break;
                }
                self.task.account.precopied += copied as u64;
            }
        }
        Ok(false)
    }

    /// Copies until there is nothing more to copy, or the programs have other blocks than these. Gives the
    /// number of chunks.
    fn copy(&mut self, blocks: &[Vec<Block>]) -> Result<usize, Error> {
        let Some(bulk) = self.memory else { return Ok(0) };
        let (cuda_processes, progress) =
            (&mut self.task.made.cuda_processes, self.task.progress.as_ref());
        let (store, stop, enough) = (self.image.chunks(), &self.stop, &AtomicBool::default());
        std::thread::scope(|scope| {
            let copy = scope.spawn(|| bulk.copy_some(enough, store, stop, progress));
            let mut asked = Instant::now();
            let mut same = Ok(true);
            while matches!(same, Ok(true)) && !copy.is_finished() {
                std::thread::sleep(SEE);
                if asked.elapsed() >= ASK {
                    same = are_same(cuda_processes, blocks);
                    asked = Instant::now();
                }
            }
            enough.store(true, Ordering::Relaxed);
            let copied = copy.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic))?;
            same.map(|_| copied)
        })
    }

    /// Asks what was launched, hashes the memory that the programs have now, and draws conclusions.
    fn hash_pass(&mut self) -> Result<(), Error> {
        self.follow()?;
        // Before the hash pass: what is launched meanwhile belongs to the next one.
        self.ask()?;
        let Some(bulk) = self.memory else { return Ok(()) };
        let changed = bulk.hash_pass()?;
        let since = std::mem::replace(&mut self.hashed, Instant::now());
        self.dirty = changed as f64 / since.elapsed().as_secs_f64().max(1e-3);
        bulk.interval = self.task.speculation.intervals();
        self.task.speculation.observe(bulk);
        self.task.lay_out(bulk)
    }

    fn ask(&mut self) -> Result<(), Error> {
        self.task.speculation.ask(&mut self.task.made.cuda_processes, LEARNING)
    }

    /// Takes up blocks that are new, lets go of blocks that the programs have given back, and gives all that there are.
    fn follow(&mut self) -> Result<Vec<Vec<Block>>, Error> {
        let blocks = stop::export(self.task)?;
        stop::follow(&self.task.made.cuda_processes, self.memory, &blocks)?;
        Ok(blocks)
    }
}

/// Whether the programs still have these blocks and no others.
fn are_same(cuda_processes: &mut [CudaProcess], blocks: &[Vec<Block>]) -> Result<bool, Error> {
    for (program, blocks) in cuda_processes.iter_mut().zip(blocks) {
        let now = program.export()?;
        if !now.iter().map(|block| block.id).eq(blocks.iter().map(|block| block.id)) {
            return Ok(false);
        }
    }
    Ok(true)
}

fn wait(stop: &Stop, time: Duration) -> Result<(), Error> {
    let until = Instant::now() + time;
    while Instant::now() < until {
        if stop.is_set() {
            return Err(Error::Interrupted);
        }
        std::thread::sleep(Duration::from_millis(10));
    }
    Ok(())
}
