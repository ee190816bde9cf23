//! What becomes of memory that has not come, if its process makes a guard of it or has it emptied in children.

use std::collections::HashSet;
use std::io;
use std::ops::Range;
use std::sync::Arc;
use std::time::{Duration, Instant};

use parking_lot::Mutex;

use super::super::pages::Extent;
use super::missing::Missing;
use super::trace::{Asks, Call, Trace};
use crate::host::process::pagemap::{self, Flagged};
use crate::host::process::smaps;

/// For how long a guard is waited for that a process is about to make.
const MAKING: Duration = Duration::from_millis(100);
/// The time between two looks for it.
const LOOK: Duration = Duration::from_micros(20);
/// Most calls that are kept: other processes of the host could make any number.
const MOST: usize = 1 << 20;

/// What a process lacks is not known any more.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Untold;

/// Why the memory of processes cannot come while they run, on this host. `None` if it can.
pub(in super::super) fn why_not_late() -> Option<String> {
    // SAFETY: a new descriptor, and nothing is registered with it.
    let uffd = unsafe { rustix::mm::userfaultfd(rustix::mm::UserfaultfdFlags::CLOEXEC) };
    let error = uffd.err().map(io::Error::from).or_else(|| Advice::listen().err());
    error.map(|error| error.to_string())
}

/// The calls that were heard of, for all that serve processes of a program.
pub(super) struct Advice(Mutex<Heard>);

struct Heard {
    trace: Trace,
    calls: Vec<Call>,
    /// The processes that are served from the beginning.
    pids: HashSet<i32>,
}

impl Advice {
    /// Begins to listen. It is to be done before the processes run.
    ///
    /// # Errors
    /// The kernel cannot tell, or not to this user.
    pub(super) fn listen() -> io::Result<Self> {
        // A process that forks is not to wait for this.
        smaps::prepare();
        let (trace, calls, pids) = (Trace::begin()?, Vec::new(), HashSet::new());
        Ok(Self(Mutex::new(Heard { trace, calls, pids })))
    }

    /// A process, which is served from now on.
    pub(super) fn add(&self, pid: i32) {
        self.0.lock().pids.insert(pid);
    }

    /// A process has ended: others may have its pid.
    pub(super) fn remove(&self, pid: i32) {
        self.0.lock().pids.remove(&pid);
    }

    fn has(&self, pid: i32) -> bool {
        self.0.lock().pids.contains(&pid)
    }

    /// The calls after the first `seen`.
    fn after(&self, seen: &mut usize) -> Result<Vec<Call>, Untold> {
        let mut heard = self.0.lock();
        let Heard { trace, calls, .. } = &mut *heard;
        trace.take(calls).map_err(|_| Untold)?;
        if calls.len() > MOST {
            return Err(Untold);
        }
        let new = calls[*seen..].to_vec();
        *seen = calls.len();
        Ok(new)
    }
}

/// Follows one process.
pub(super) struct Follower {
    advice: Arc<Advice>,
    /// `None` of a child that was forked since the restore: the kernel does not tell which process it is.
    pid: Option<i32>,
    seen: usize,
    /// Where guards were made, or were about to be, of whatever memory.
    guards: Vec<Range<u64>>,
    /// Where it may not be known whether children find something.
    emptied: Vec<Range<u64>>,
}

impl Follower {
    pub(super) fn of(advice: Arc<Advice>, pid: i32) -> Self {
        advice.add(pid);
        Self { advice, pid: Some(pid), seen: 0, guards: Vec::new(), emptied: Vec::new() }
    }

    /// Whether the process was forked since the restore.
    pub(super) fn is_of_child(&self) -> bool {
        self.pid.is_none()
    }

    /// Of a child, which was forked just now.
    pub(super) fn of_child(&self) -> Self {
        let Self { advice, seen, guards, .. } = self;
        let (advice, guards) = (advice.clone(), guards.clone());
        Self { advice, pid: None, seen: *seen, guards, emptied: Vec::new() }
    }

    /// What of the missing memory has become a guard since this was last asked: it is not missing any more. What was
    /// copied and is not found to be missing here was copied before a guard was made there.
    ///
    /// # Errors
    /// A guard cannot be seen: something was copied to where it was, or it is gone already, or was not made after all; or
    /// a process has made it of which it is not known whose memory it has.
    pub(super) fn guarded(
        &mut self,
        missing: &Missing,
        is_alive: &dyn Fn() -> bool,
    ) -> Result<Vec<Extent>, Untold> {
        let mut guarded = Vec::new();
        for Call { pid, asks, addresses } in self.advice.after(&mut self.seen)? {
            let lacking = missing.within(addresses.clone());
            let is_own = self.pid == Some(pid);
            if !is_own && self.advice.has(pid) {
                continue;
            }
            // What is unknown may be a child, or a process that shares the memory of another.
            if !is_own && !lacking.is_empty() && is_awaited(pid, &addresses) {
                return Err(Untold);
            }
            match asks {
                Asks::Unknown if is_own && !lacking.is_empty() => return Err(Untold),
                Asks::Guard => {
                    self.guards.push(addresses);
                    if is_own && !lacking.is_empty() {
                        wait_until_made(pid, &lacking, is_alive)?;
                        guarded.extend(lacking);
                    }
                }
                Asks::Emptied if is_own => self.emptied.push(addresses),
                Asks::Emptied | Asks::Unknown => {}
            }
        }
        Ok(guarded)
    }

    /// What a child lacks that was forked just now, if its parent lacks this: what it was to find empty it does not lack.
    ///
    /// # Errors
    /// It is not known.
    pub(super) fn lacked_by_child(&self, missing: &Missing) -> Result<Missing, Untold> {
        let mut lacked = missing.clone();
        // What a child lacks it does not find empty in its children, unless it says so, which is heard of.
        let (Some(pid), Some(_)) = (self.pid, missing.first()) else { return Ok(lacked) };
        let Flagged { awaited, emptied } = Flagged::of(pid).map_err(|_| Untold)?;
        // Otherwise it has become another program by now.
        if awaited.iter().all(|at| missing.within(at.clone()).is_empty()) {
            return Err(Untold);
        }
        emptied.into_iter().for_each(|emptied| drop(lacked.remove(emptied)));
        Ok(lacked)
    }

    /// # Errors
    /// It is not known what children find of the memory that is missing.
    pub(super) fn check_children(&self, missing: &Missing) -> Result<(), Untold> {
        let is_missing = |emptied: &Range<u64>| !missing.within(emptied.clone()).is_empty();
        if self.emptied.iter().any(is_missing) { Err(Untold) } else { Ok(()) }
    }

    /// Missing memory has come to these addresses.
    ///
    /// # Errors
    /// A guard was made there, before that or after it.
    pub(super) fn check_moved(&self, to: &Range<u64>) -> Result<(), Untold> {
        let overlaps = |guard: &Range<u64>| guard.start < to.end && to.start < guard.end;
        if self.guards.iter().any(overlaps) { Err(Untold) } else { Ok(()) }
    }

    /// # Errors
    /// Calls may have been missed.
    pub(super) fn check_all_heard(&self) -> Result<(), Untold> {
        if self.advice.0.lock().trace.is_whole() { Ok(()) } else { Err(Untold) }
    }
}

impl Drop for Follower {
    fn drop(&mut self) {
        if let Some(pid) = self.pid {
            self.advice.remove(pid);
        }
    }
}

/// Whether a process has memory that comes, at some addresses. One that has ended has none.
fn is_awaited(pid: i32, addresses: &Range<u64>) -> bool {
    let overlaps = |it: &Range<u64>| it.start < addresses.end && addresses.start < it.end;
    Flagged::of(pid).unwrap_or_default().awaited.iter().any(overlaps)
}

/// The call has begun, and is over when all that it was for is a guard.
fn wait_until_made(pid: i32, pages: &[Extent], is_alive: &dyn Fn() -> bool) -> Result<(), Untold> {
    let since = Instant::now();
    loop {
        let is_guard = |at: &Extent| pagemap::is_guard(pid, at.to, at.len).unwrap_or(false);
        if pages.iter().all(is_guard) || !is_alive() {
            return Ok(());
        }
        if since.elapsed() > MAKING {
            return Err(Untold);
        }
        std::thread::sleep(LOOK);
    }
}
