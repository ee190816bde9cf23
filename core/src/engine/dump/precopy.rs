//! Copying while the programs run.
//!
//! What is copied here is a guess: chunks that held still for a moment are expected to hold still
//! until the program is stopped. Nothing rests on it. Every copy is named by the hash of the bytes
//! that were copied, and once the program stands still all device memory is hashed where it is; what
//! is not in the store by then is copied.

use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use gpucr_wire::Block;

use super::Dump;
use super::speculate::LEARNING;
use crate::base::phase::Phase;
use crate::base::stop::Stop;
use crate::base::timeline::Track;
use crate::engine::error::Error;
use crate::engine::held::Held;
use crate::host::process::AgentError;

/// Between the first two looks: what changes in less is not copied.
const MOMENT: Duration = Duration::from_millis(150);
/// How often the programs are asked for their blocks while memory is copied: what they give back is kept
/// from the device until then.
const ASK: Duration = Duration::from_millis(250);
/// How often it is seen whether the copy has ended meanwhile.
const SEE: Duration = Duration::from_millis(2);
/// After so many passes over the memory the program is stopped in any case.
const PASSES: usize = 5;
/// A pass that would copy less than this share of the memory is left to the stopped window.
const WORTH_A_PASS: u64 = 200;

/// Passes in which only memory is copied that no launch seen so far may write. There are none if that is
/// all memory, or if launches tell nothing.
const EARLY_PASSES: usize = 2;

/// Copies what holds still, until the rest is better copied when the programs stand still. A program that comes
/// to its end meanwhile, and is not the root, is none that the image has to bring back.
pub(super) fn precopy(dump: &mut Dump<'_>) -> Result<(), Error> {
    loop {
        match copy_ahead(dump) {
            Err(Error::Agent(AgentError::Broken { pid, cause })) if dump.forget_ended(pid) => {
                tracing::info!(pid, %cause, "it has ended; the dump goes on without it");
            }
            done => return done,
        }
    }
}

/// In passes: first what is not expected to be written again, then whatever has held still until then. A chunk
/// that is written now and then is copied once, late.
fn copy_ahead(dump: &mut Dump<'_>) -> Result<(), Error> {
    let stop = Stop::new(dump.options.stop.clone());
    let pids = dump.processes().map(|process| process.pid).collect();
    if let Some(bulk) = &mut dump.bulk {
        bulk.watch(pids);
    }
    dump.speculation.start(&mut dump.held)?;
    look(dump)?;
    wait(&stop, MOMENT)?;
    let looked = passes(dump, &stop, EARLY_PASSES, true, false)?;
    passes(dump, &stop, PASSES, false, looked)?;
    // For those who will be suspected. Once the program stands still there is no time for learning.
    dump.speculation.ask(&mut dump.held, LEARNING)
}

/// Passes, `most` of them, for as long as each has much less to copy than the last. Each begins with a
/// look, except the first if that has just been `looked`. Says whether the last thing it did was to look:
/// a second look soon after it would take anything for still.
fn passes(
    dump: &mut Dump<'_>,
    stop: &Stop,
    most: usize,
    early: bool,
    looked: bool,
) -> Result<bool, Error> {
    let image = dump.image.as_ref().expect("not committed yet").clone();
    let store = image.chunks();
    let mut last = u64::MAX;
    for pass in 0..most {
        let kind = if early { "early pass" } else { "pass" };
        let _pass = dump.options.timeline.begin(Track::Passes, || format!("{kind} {}", pass + 1));
        if pass > 0 || !looked {
            look(dump)?;
        }
        let Some(bulk) = &mut dump.bulk else { return Ok(false) };
        bulk.hold_nothing_back();
        if early && !dump.speculation.hold_back(bulk) {
            return Ok(true);
        }
        let left = bulk.worth_copying(store);
        tracing::debug!(pass, early, left, "pre-copy");
        if left <= dump.bulk_bytes / WORTH_A_PASS || left > last / 2 {
            return Ok(true);
        }
        last = left;
        dump.clock.announce(Phase::Precopy, left);
        loop {
            let blocks = follow(dump)?;
            let copied = copy(dump, &blocks, stop)?;
            if copied == 0 {
                break;
            }
            dump.precopied += copied as u64;
        }
    }
    Ok(false)
}

/// Copies until there is nothing more to copy, or the programs have other blocks than these. Gives the
/// number of chunks.
fn copy(dump: &mut Dump<'_>, blocks: &[Vec<Block>], stop: &Stop) -> Result<usize, Error> {
    let image = dump.image.as_ref().expect("not committed yet").clone();
    let Some(bulk) = &mut dump.bulk else { return Ok(0) };
    let (held, progress, enough) = (&mut dump.held, dump.progress.as_ref(), &AtomicBool::default());
    std::thread::scope(|scope| {
        let copy = scope.spawn(|| bulk.copy_some(enough, image.chunks(), stop, progress));
        let mut asked = Instant::now();
        let mut same = Ok(true);
        while matches!(same, Ok(true)) && !copy.is_finished() {
            std::thread::sleep(SEE);
            if asked.elapsed() >= ASK {
                same = are_same(held, blocks);
                asked = Instant::now();
            }
        }
        enough.store(true, Ordering::Relaxed);
        let copied = copy.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic))?;
        same.map(|_| copied)
    })
}

/// Whether the programs still have these blocks and no others.
fn are_same(held: &mut [Held], blocks: &[Vec<Block>]) -> Result<bool, Error> {
    for (held, blocks) in held.iter_mut().zip(blocks) {
        let now = held.export()?;
        if !now.iter().map(|block| block.id).eq(blocks.iter().map(|block| block.id)) {
            return Ok(false);
        }
    }
    Ok(true)
}

/// Asks what was launched, hashes the memory that the programs have now, and draws conclusions.
fn look(dump: &mut Dump<'_>) -> Result<(), Error> {
    follow(dump)?;
    // Before the look: what is launched meanwhile belongs to the next one.
    dump.speculation.ask(&mut dump.held, LEARNING)?;
    let Some(bulk) = &mut dump.bulk else { return Ok(()) };
    bulk.look()?;
    bulk.interval = dump.speculation.intervals();
    dump.speculation.observe(bulk);
    Ok(())
}

/// Takes up blocks that are new, and lets go of those that the programs have given back. Gives all.
fn follow(dump: &mut Dump<'_>) -> Result<Vec<Vec<Block>>, Error> {
    let blocks = dump.export()?;
    dump.follow(&blocks)?;
    Ok(blocks)
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
