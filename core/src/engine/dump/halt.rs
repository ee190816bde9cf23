//! Brings several processes to rest that may wait for each other.
//!
//! All gates are shut at the same time. A collective operation that one process has launched and another has not does
//! not come to an end behind shut gates. So, while a device of one process stays busy, the others, as far as they have
//! an idle one, are let launch once more, again and again, until all stand still or the time is over.
//!
//! A kernel that just takes long looks the same. It does no harm to let others go on meanwhile, but they have to stand
//! still too when it is over; so nobody is let through before a device has been busy for a while, and for twice as
//! long as any device took that has become idle by itself.

use std::sync::{Condvar, Mutex, MutexGuard};
use std::time::{Duration, Instant};

use gpucr_wire::Rest;

use crate::engine::memory::joined;
use crate::host::process::{Agent, AgentError};

/// How long a device is busy until anybody is let through.
const GRACE: Duration = Duration::from_millis(200);
/// How long is waited for a launch of a process that is let through.
const PASS: Duration = Duration::from_millis(50);
/// How often a process that is busy is asked.
const ASK: Duration = Duration::from_millis(5);
/// How often one that stands still looks at the time.
const LOOK: Duration = Duration::from_millis(20);

/// What came of it, for each agent in their order.
pub(super) struct Halted {
    /// Whether it stands still. Where one does not, none of them needs to.
    pub(super) results: Vec<Result<(), AgentError>>,
    /// How many launches were let through.
    pub(super) launches: Vec<u64>,
}

/// What is known of a process.
#[derive(Debug, Clone, Copy, Default)]
struct Known {
    /// What its agent has told last; none while it is let through, or before it has told anything.
    told: Option<Told>,
    /// Its agent does not answer any more.
    is_gone: bool,
    /// The longest time that a device of it was busy, milliseconds.
    longest_ms: u64,
    launches: u64,
}

#[derive(Debug, Clone, Copy)]
struct Told {
    rest: Rest,
    /// When it was asked.
    asked: Instant,
    /// Since when it has told the same.
    since: Instant,
}

impl Known {
    fn tell(&mut self, rest: Rest, asked: Instant) {
        let same = self.told.filter(|told| told.rest.is_at_rest == rest.is_at_rest);
        let since = same.map_or_else(Instant::now, |told| told.since);
        self.longest_ms = self.longest_ms.max(rest.longest_ms);
        self.told = Some(Told { rest, asked, since });
    }

    fn is_at_rest(&self) -> bool {
        self.is_gone || self.told.is_some_and(|told| told.rest.is_at_rest)
    }
}

/// Whether process `number` is to be let through.
fn may_pass(all: &[Known], number: usize) -> bool {
    let Some(own) = all[number].told.filter(|told| told.rest.may_pass) else { return false };
    let longest = all.iter().map(|known| known.longest_ms).max().unwrap_or(0);
    let grace = (GRACE.as_millis() as u64).max(longest.saturating_mul(2));
    all.iter().enumerate().any(|(other, known)| {
        let told = known.told.filter(|told| !known.is_gone && !told.rest.is_at_rest);
        // What it has told before this one stood still may be over.
        told.is_some_and(|told| {
            told.rest.busy_ms >= grace && (other == number || told.asked >= own.since)
        })
    })
}

/// What the threads that ask the agents know together.
struct Shared {
    all: Mutex<(Vec<Known>, bool)>,
    news: Condvar,
    end: Option<Instant>,
}

/// What to do next with a process.
enum Next {
    /// All stand still, or it makes no difference any more.
    End,
    Ask,
    Pass,
    /// The time is over, and it does not stand still.
    Fail,
}

impl Shared {
    fn lock(&self) -> MutexGuard<'_, (Vec<Known>, bool)> {
        self.all.lock().unwrap_or_else(|poisoned| poisoned.into_inner())
    }

    fn change(&self, number: usize, change: impl FnOnce(&mut Known)) {
        change(&mut self.lock().0[number]);
        self.news.notify_all();
    }

    /// Waits until there is something to do with a process that has just told.
    fn next(&self, number: usize) -> Next {
        let mut shared = self.lock();
        loop {
            let (all, is_over) = &mut *shared;
            if *is_over || all.iter().all(Known::is_at_rest) {
                return Next::End;
            }
            let is_at_rest = all[number].is_at_rest();
            if self.end.is_some_and(|end| Instant::now() >= end) {
                return if is_at_rest { Next::End } else { Next::Fail };
            }
            if may_pass(all, number) {
                all[number].told = None;
                return Next::Pass;
            }
            if !is_at_rest {
                return Next::Ask;
            }
            let waited = self.news.wait_timeout(shared, LOOK);
            shared = waited.unwrap_or_else(|poisoned| poisoned.into_inner()).0;
        }
    }

    /// Brings one process to rest.
    fn serve(&self, number: usize, agent: &mut Agent, limit: Duration) -> Result<(), AgentError> {
        let mut wait = GRACE.min(limit);
        loop {
            let asked = Instant::now();
            let rest = agent.halt(wait, limit)?;
            self.change(number, |known| known.tell(rest, asked));
            match self.next(number) {
                Next::End => return Ok(()),
                Next::Ask => wait = ASK,
                Next::Pass => {
                    let launched = agent.pass(PASS)?;
                    self.change(number, |known| known.launches += u64::from(launched));
                    wait = ASK;
                }
                Next::Fail => return agent.close_gate(limit),
            }
        }
    }
}

/// Shuts the gates of all these at the same time, and lets those launch that others wait for, until all stand still.
/// `limit` bounds all of it. After a failure the gates of some are shut.
pub(super) fn halt_all(agents: Vec<&mut Agent>, limit: Duration) -> Halted {
    let all = Mutex::new((vec![Known::default(); agents.len()], false));
    let shared = Shared { all, news: Condvar::new(), end: Instant::now().checked_add(limit) };
    let mut results: Vec<_> = std::thread::scope(|scope| {
        let shared = &shared;
        let serving = agents.into_iter().enumerate().map(|(number, agent)| {
            scope.spawn(move || {
                let served = shared.serve(number, agent, limit);
                match &served {
                    Ok(()) => {}
                    // It may have ended. The others go on without it.
                    Err(AgentError::Broken { .. }) => {
                        shared.change(number, |known| known.is_gone = true)
                    }
                    Err(_) => {
                        shared.lock().1 = true;
                        shared.news.notify_all();
                    }
                }
                served
            })
        });
        let serving: Vec<_> = serving.collect();
        serving.into_iter().map(joined).collect()
    });
    let launches: Vec<u64> = shared.lock().0.iter().map(|known| known.launches).collect();
    let passed: u64 = launches.iter().sum();
    for result in &mut results {
        if let Err(AgentError::Failed { message, .. }) = result
            && passed > 0
        {
            let plural = if passed == 1 { "" } else { "es" };
            *message +=
                &format!("; {passed} launch{plural} of the processes were let through for it");
        }
    }
    Halted { results, launches }
}

#[cfg(test)]
mod tests {
    use super::*;

    const START: Rest = Rest { is_at_rest: true, may_pass: true, busy_ms: 0, longest_ms: 0 };

    fn busy(busy_ms: u64) -> Rest {
        Rest { is_at_rest: false, may_pass: false, busy_ms, longest_ms: 0 }
    }

    fn told(rest: Rest, asked: Instant) -> Known {
        let mut known = Known::default();
        known.tell(rest, asked);
        known
    }

    #[test]
    fn who_is_idle_is_let_through_while_another_is_busy() {
        let idle = told(START, Instant::now());
        let later = Instant::now();
        assert!(may_pass(&[idle, told(busy(200), later)], 0));
        assert!(!may_pass(&[idle, told(busy(200), later)], 1), "it is busy");
        assert!(!may_pass(&[idle, told(busy(199), later)], 0), "not for long");
        assert!(!may_pass(&[idle, idle], 0), "all stand still");
        let mut gone = told(busy(200), later);
        gone.is_gone = true;
        assert!(!may_pass(&[idle, gone], 0), "it has ended");
        assert!(!may_pass(&[idle, Known::default()], 0), "nothing is known of it");
    }

    #[test]
    fn what_was_busy_before_may_be_done() {
        let before = Instant::now();
        std::thread::sleep(Duration::from_millis(1));
        let idle = told(START, Instant::now());
        assert!(!may_pass(&[idle, told(busy(200), before)], 0));
    }

    #[test]
    fn nobody_is_let_through_where_kernels_just_take_long() {
        let rest = Rest { longest_ms: 3000, ..START };
        let idle = told(rest, Instant::now());
        let later = Instant::now();
        assert!(!may_pass(&[idle, told(busy(5999), later)], 0));
        assert!(may_pass(&[idle, told(busy(6000), later)], 0));
        // What was told once counts for good, and no number is too large.
        let rest = Rest { longest_ms: u64::MAX, ..START };
        let mut known = told(rest, Instant::now());
        known.tell(START, Instant::now());
        assert!(!may_pass(&[known, told(busy(1 << 40), Instant::now())], 0));
    }

    #[test]
    fn a_process_waits_for_a_device_of_its_own() {
        let partly = Rest { is_at_rest: false, may_pass: true, busy_ms: 250, longest_ms: 0 };
        assert!(may_pass(&[told(partly, Instant::now())], 0));
    }
}
