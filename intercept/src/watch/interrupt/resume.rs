//! What the agent does with instances: it interrupts them, says how far they are, and launches them again.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Mutex, PoisonError};
use std::thread;
use std::time::Duration;

use gpucr_rewrite::control;
use gpucr_wire::message::{Interrupted, Place};

use super::instances::{Instance, State, new_epoch, with};
use super::launch::own_stream;
use super::twins::{self, Relaxed};
use crate::abi::real::{self, check, with_context};
use crate::abi::types::Code;
use crate::log::log;
use crate::resettable::Resettable;
use crate::state::gate;
use crate::state::memory::Failure;
use crate::watch::{broken, guard, own};

/// A flag by which none begins, and those that run are not aborted.
const NO_MORE: u32 = control::ABORT + 1;
/// How often a launch that has failed is tried again.
const AGAIN: Duration = Duration::from_millis(100);

/// A launch that was aborted so often, and of which no block has come to its end meanwhile, is interrupted between two of its
/// blocks: it has to come to its end although it is dumped again and again.
const MOST_IN_VAIN: u32 = 3;

/// All that is interrupted.
fn interrupted() -> Vec<Instance> {
    let is = |one: &&Instance| one.state == State::Interrupted;
    with(|table| table.instances.iter().filter(is).cloned().collect())
}

fn change(number: u64, change: impl Fn(&mut Instance)) {
    with(|table| table.instances.iter_mut().filter(|one| one.number == number).for_each(change));
}

/// From now on no block begins of what can be interrupted, and threads that can be interrupted in loops or at barriers, or
/// aborted, end there. The gate is shut and nobody is inside.
pub(crate) fn interrupt() {
    if !gate::is_holding() {
        return;
    }
    // Before any flag is raised: who sees the end of an interrupted launch sees this too.
    let raised: Vec<Instance> = with(|table| {
        table.settle();
        new_epoch();
        let running = table.instances.iter_mut().filter(|one| one.state == State::Running);
        running
            .map(|one| {
                one.state = State::Interrupted;
                one.in_vain = one.in_vain.saturating_add(1);
                one.clone()
            })
            .collect()
    });
    for one in raised {
        let raised = with_context(one.context, || one.set_flag(one.flag()));
        if let Err(code) = raised {
            // It runs to its end, which is seen then.
            log!("`{}` cannot be interrupted: error {code}", one.twin.kernel.name);
        }
    }
}

impl Instance {
    /// The flag by which it is interrupted.
    fn flag(&self) -> u32 {
        match self.layout.place {
            Place::Aborted {} if self.in_vain > MOST_IN_VAIN => NO_MORE,
            _ => control::ABORT,
        }
    }

    /// Sets the flag, past all that is in other streams. The context is current.
    fn set_flag(&self, value: u32) -> Result<(), Code> {
        let stream = own_stream(self.context)?;
        // SAFETY: a stream and memory of ours.
        check(unsafe { real::cuStreamWriteValue32_v2(stream, self.control.address, value, 0) })
    }

    /// How many blocks are done of a launch that is over, and how many had begun and are begun again. The context is current.
    fn done(&self) -> Result<(u64, u64), Code> {
        let mut bytes = vec![0u8; self.layout.told as usize];
        // SAFETY: as many bytes on both sides.
        check(unsafe {
            real::cuMemcpyDtoH_v2(bytes.as_mut_ptr().cast(), self.control.address, bytes.len())
        })?;
        Ok((self.layout.done(&bytes, self.shape), self.layout.again(&bytes, self.shape)))
    }

    /// Launches it again in its stream. The context is current, and the launch before is over.
    fn launch_again(&self) -> Result<(), Code> {
        // In the stream in which it was raised, which may not have happened yet.
        self.set_flag(0)?;
        let own = own_stream(self.context)?;
        // SAFETY: the stream is the program's, who cannot end it as long as this is pending; the rest is ours.
        let waits = unsafe {
            check(real::cuEventRecord(self.event, own))
                .and_then(|()| check(real::cuStreamWaitEvent(self.stream, self.event, 0)))
        };
        waits?;
        self.enqueue()?;
        // SAFETY: as above.
        check(unsafe { real::cuEventRecord(self.event, self.stream) })
    }

    /// Launches what is left behind the launch that is not over, in its stream. The flag stays raised until that is over: a
    /// thread that has seen it saves what it needs at some time, and whoever goes on for it has to come later.
    fn launch_behind(&self) -> Result<(), Code> {
        // SAFETY: the program's stream, who cannot end it as long as this is pending; memory of ours.
        check(unsafe { real::cuMemsetD32Async(self.control.address, 0, 1, self.stream) })?;
        self.enqueue()?;
        // SAFETY: an event of ours, and the program's stream.
        check(unsafe { real::cuEventRecord(self.event, self.stream) })
    }

    /// Launches what is left next to the launch that is not over, and has the program's stream wait for it.
    fn launch_beside(&self) -> Result<(), Code> {
        let stream = own_stream(self.context)?;
        self.set_flag(0)?;
        self.enqueue_in(stream)?;
        // SAFETY: streams and an event that there are.
        let waits = unsafe {
            check(real::cuEventRecord(self.event, stream))
                .and_then(|()| check(real::cuStreamWaitEvent(self.stream, self.event, 0)))
                .and_then(|()| check(real::cuEventRecord(self.event, self.stream)))
        };
        if waits.is_err() {
            // Nothing may come before it.
            // SAFETY: a stream of ours.
            return check(unsafe { real::cuStreamSynchronize(stream) });
        }
        Ok(())
    }
}

/// What is interrupted has not come to rest: blocks that run may be waiting for some that have not begun, or take long. All
/// are let run, and nothing of it is interrupted any more.
pub(crate) fn give_up() {
    for one in interrupted() {
        let _relaxed = Relaxed::now();
        let too_long = "it took too long to come to a place where it can be interrupted";
        let launched = with_context(one.context, || match one.layout.place {
            // Nobody waits for blocks of one that is aborted, and those that end behind the flag are begun by that launch.
            Place::Loops {} | Place::Aborted {} => one.launch_behind(),
            // Blocks at barriers see that the flag has been lowered.
            Place::Between {} | Place::Barriers {} => one.launch_beside(),
        });
        let why = match one.layout.place {
            Place::Between {} => "its blocks wait for each other",
            Place::Loops {} | Place::Barriers {} | Place::Aborted {} => too_long,
        };
        match launched {
            Ok(()) => {
                twins::note(&one.twin.kernel.name, why);
                new_epoch();
                with(|table| table.end(one.number));
            }
            Err(code) => log!("`{}` cannot be continued: error {code}", one.twin.kernel.name),
        }
    }
}

/// The devices are idle: what is over is forgotten, and of all else it is seen how far it is.
pub(crate) fn standing() -> Vec<Interrupted> {
    if !gate::is_holding() {
        return Vec::new();
    }
    let mut standing = Vec::new();
    for one in interrupted() {
        let (done, again) = with_context(one.context, || one.done()).unwrap_or_else(|code| {
            log!("it is not known how far `{}` is: error {code}", one.twin.kernel.name);
            (0, 0)
        });
        if done == one.shape.blocks {
            // The next launch with this control block has to find the flag so.
            let lowered = with_context(one.context, || {
                one.set_flag(0)?;
                // SAFETY: a stream of ours.
                check(unsafe { real::cuStreamSynchronize(own_stream(one.context)?) })
            });
            if lowered.is_ok() {
                with(|table| table.end(one.number));
                continue;
            }
        }
        change(one.number, |one| {
            if done > one.done {
                (one.done, one.in_vain) = (done, 0);
            }
        });
        let (kernel, blocks) = (one.twin.kernel.name.clone(), one.shape.blocks);
        standing.push(Interrupted { kernel, done, blocks, place: one.layout.place, again });
    }
    standing
}

/// Launches again what is interrupted. To be called by the agent before it opens the gate, or inside of it.
///
/// # Errors
/// The driver does not launch one; those before it are launched, and this may be called again.
pub(crate) fn relaunch() -> Result<(), Failure> {
    if !gate::is_holding() {
        return Ok(());
    }
    let _relaxed = Relaxed::now();
    // The agent and a thread that waits for memory may both be here: each launches what the other has not.
    let _alone = LAUNCHING.get().lock().unwrap_or_else(PoisonError::into_inner);
    for one in interrupted() {
        match with_context(one.context, || one.launch_again()) {
            Ok(()) => {
                new_epoch();
                change(one.number, |one| one.state = State::Running);
            }
            // All calls of the program say so themselves.
            Err(code) if broken::is_lasting(code) => {
                log!("`{}` is lost with its context: error {code}", one.twin.kernel.name);
                new_epoch();
                with(|table| table.end(one.number));
            }
            Err(code) => {
                let name = &one.twin.kernel.name;
                let what = format!("`{name}`, which was interrupted, cannot be launched again");
                return Err(Failure::driver(code, what));
            }
        }
    }
    Ok(())
}

/// Held by who launches again.
static LAUNCHING: Resettable<Mutex<()>> = Resettable::new(Mutex::new(()));
/// A thread launches what is interrupted as soon as it may touch all memory.
static IS_WAITING: AtomicBool = AtomicBool::new(false);

/// Has what is interrupted launched as soon as all memory is there that it may touch, and as the driver takes it. Calls that
/// come after it wait.
pub(crate) fn relaunch_later() {
    if interrupted().is_empty() || IS_WAITING.swap(true, Ordering::SeqCst) {
        return;
    }
    let wait = || {
        own::exempt_this_thread();
        loop {
            let inside = gate::enter();
            guard::wait_for_all();
            let relaunched = relaunch();
            if relaunched.is_ok() {
                // Inside of the gate: nothing is interrupted before the next thread can be started.
                IS_WAITING.store(false, Ordering::SeqCst);
            }
            drop(inside);
            match relaunched {
                Ok(()) => break,
                Err(failure) => log!("{} (error {})", failure.message, failure.code),
            }
            thread::sleep(AGAIN);
        }
    };
    let started = thread::Builder::new().name("gpucr-relaunch".into()).spawn(wait);
    if let Err(error) = started {
        IS_WAITING.store(false, Ordering::SeqCst);
        log!("no thread to launch what was interrupted: {error}");
    }
}

/// Forgets everything, in the child of a fork.
///
/// # Safety
/// No other thread exists.
pub(super) unsafe fn reset() {
    IS_WAITING.store(false, Ordering::SeqCst);
    // SAFETY: the caller's duty.
    unsafe { LAUNCHING.reset(Mutex::new(())) };
}
