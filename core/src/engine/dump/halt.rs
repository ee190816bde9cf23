//! Brings several processes to rest that may wait for each other.
//!
//! All gates are shut at the same time. A collective operation that one process has launched and another has not does
//! not come to an end behind shut gates. So, while a device of one process stays busy, the others, as far as they have
//! an idle one, are let launch once more, again and again, until all stand still or the time is over.
//!
//! It may be that nobody can launch anything but the process whose device is busy: it may have to launch more before it
//! tells the others to launch theirs. So, once half of the time is over and the others have been let through in vain, it
//! is let launch too.
//!
//! A kernel that just takes long looks the same. It does no harm to let others go on meanwhile, but they have to stand
//! still too when it is over; so nobody is let through before a device has been busy for a while, and for twice as
//! long as any device took that has become idle by itself. What it took before somebody was let through does not count:
//! what it waited for may have been just that.

use std::sync::{Condvar, Mutex, MutexGuard};
use std::time::{Duration, Instant};

use gpucr_wire::Rest;

use crate::engine::memory::joined;
use crate::host::process::{Agent, AgentError};

/// How long a device is busy until anybody is let through.
const GRACE: Duration = Duration::from_millis(200);
/// How long is waited for a launch of a process that is let through.
const PASS: Duration = Duration::from_millis(50);
/// So often in a row is somebody let through in vain until it is believed that there is nothing to launch.
const IN_VAIN: u32 = 2;
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
    /// Its gate has been shut. It stays shut.
    is_shut: bool,
    /// The longest time that a device of it took to become idle by itself.
    longest: Duration,
    launches: u64,
    /// How often it was let through in vain since anybody has launched something.
    in_vain: u32,
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
    /// It has told something, after others were left alone for so long.
    fn tell(&mut self, rest: Rest, asked: Instant, alone: Duration) {
        let same = self.told.filter(|told| told.rest.is_at_rest == rest.is_at_rest);
        let since = same.map_or_else(Instant::now, |told| told.since);
        self.longest = self.longest.max(Duration::from_millis(rest.longest_ms).min(alone));
        self.told = Some(Told { rest, asked, since });
    }

    fn is_at_rest(&self) -> bool {
        self.is_gone || self.told.is_some_and(|told| told.rest.is_at_rest)
    }
}

/// Whether process `number` is to be let through.
fn may_pass(all: &[Known], number: usize) -> bool {
    let Some(own) = all[number].told.filter(|told| told.rest.may_pass) else { return false };
    let longest = all.iter().map(|known| known.longest).max().unwrap_or_default();
    let grace = GRACE.max(longest.saturating_mul(2));
    all.iter().enumerate().any(|(other, known)| {
        let told = known.told.filter(|told| !known.is_gone && !told.rest.is_at_rest);
        // What it has told before this one stood still may be over.
        told.is_some_and(|told| {
            Duration::from_millis(told.rest.busy_ms) >= grace
                && (other == number || told.asked >= own.since)
        })
    })
}

/// Whether process `number`, whose devices are busy, is to be let through, since nobody else has anything to launch.
fn may_go_ahead(all: &[Known], number: usize) -> bool {
    let Some(own) = all[number].told.map(|told| told.rest) else { return false };
    let others = || all.iter().filter(|known| !known.is_gone);
    let may_pass = |known: &Known| known.told.is_some_and(|told| told.rest.may_pass);
    !own.is_at_rest
        && own.is_shut
        && Duration::from_millis(own.busy_ms) >= GRACE
        && others().any(|known| known.in_vain >= IN_VAIN)
        && others()
            .all(|known| known.in_vain >= IN_VAIN || known.told.is_some() && !may_pass(known))
}

/// What is known of all of them.
struct All {
    processes: Vec<Known>,
    /// Nothing makes a difference any more.
    is_over: bool,
    /// When somebody was let through last.
    passed: Instant,
}

/// What the threads that ask the agents know together.
struct Shared {
    all: Mutex<All>,
    news: Condvar,
    /// When half of the time is over, and all of it.
    half: Option<Instant>,
    end: Option<Instant>,
}

/// What to do next with a process.
enum Next {
    /// All stand still, or it makes no difference any more.
    End,
    Ask,
    /// Lets it launch something on an idle device, or on any.
    Pass {
        busy_too: bool,
    },
    /// The time is over, and it does not stand still.
    Fail,
}

impl Shared {
    fn lock(&self) -> MutexGuard<'_, All> {
        self.all.lock().unwrap_or_else(|poisoned| poisoned.into_inner())
    }

    /// A process has told how far it is.
    fn tell(&self, number: usize, rest: Rest, asked: Instant) {
        let mut all = self.lock();
        let alone = all.passed.elapsed();
        all.processes[number].tell(rest, asked, alone);
        let is_first = rest.is_shut && !std::mem::replace(&mut all.processes[number].is_shut, true);
        if is_first && all.processes.iter().all(|known| known.is_shut) {
            tracing::debug!("all gates are shut");
        }
        drop(all);
        self.news.notify_all();
    }

    /// A process was let through, and has launched something or not.
    fn passed(&self, number: usize, launched: bool) {
        let processes = &mut self.lock().processes;
        if launched {
            processes.iter_mut().for_each(|known| known.in_vain = 0);
            processes[number].launches += 1;
        } else {
            processes[number].in_vain += 1;
        }
        self.news.notify_all();
    }

    fn change(&self, number: usize, change: impl FnOnce(&mut Known)) {
        change(&mut self.lock().processes[number]);
        self.news.notify_all();
    }

    /// Waits until there is something to do with a process that has just told.
    fn next(&self, number: usize) -> Next {
        let mut shared = self.lock();
        loop {
            let All { processes, is_over, passed } = &mut *shared;
            if *is_over || processes.iter().all(Known::is_at_rest) {
                return Next::End;
            }
            let is_at_rest = processes[number].is_at_rest();
            let now = Instant::now();
            if self.end.is_some_and(|end| now >= end) {
                return if is_at_rest { Next::End } else { Next::Fail };
            }
            let is_idle = may_pass(processes, number);
            let is_late = self.half.is_some_and(|half| now >= half);
            if is_idle || is_late && may_go_ahead(processes, number) {
                processes[number].told = None;
                *passed = now;
                return Next::Pass { busy_too: !is_idle };
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
            self.tell(number, rest, asked);
            match self.next(number) {
                Next::End => return Ok(()),
                Next::Ask => wait = ASK,
                Next::Pass { busy_too } => {
                    let launched = agent.pass(busy_too, PASS)?;
                    self.passed(number, launched);
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
    let now = Instant::now();
    let processes = vec![Known::default(); agents.len()];
    let all = Mutex::new(All { processes, is_over: false, passed: now });
    let (half, end) = (now.checked_add(limit / 2), now.checked_add(limit));
    let shared = Shared { all, news: Condvar::new(), half, end };
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
                        shared.lock().is_over = true;
                        shared.news.notify_all();
                    }
                }
                served
            })
        });
        let serving: Vec<_> = serving.collect();
        serving.into_iter().map(joined).collect()
    });
    let launches: Vec<u64> = shared.lock().processes.iter().map(|known| known.launches).collect();
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

    const START: Rest =
        Rest { is_at_rest: true, may_pass: true, is_shut: true, busy_ms: 0, longest_ms: 0 };

    fn busy(busy_ms: u64) -> Rest {
        Rest { is_at_rest: false, may_pass: false, busy_ms, ..START }
    }

    fn told(rest: Rest, asked: Instant) -> Known {
        let mut known = Known::default();
        known.tell(rest, asked, Duration::MAX);
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
        known.tell(START, Instant::now(), Duration::MAX);
        assert!(!may_pass(&[known, told(busy(1 << 40), Instant::now())], 0));
    }

    #[test]
    fn a_process_waits_for_a_device_of_its_own() {
        let partly = Rest { is_at_rest: false, busy_ms: 250, ..START };
        assert!(may_pass(&[told(partly, Instant::now())], 0));
    }

    #[test]
    fn what_was_waited_for_is_no_time_that_a_kernel_takes() {
        let rest = Rest { longest_ms: 3000, ..START };
        let mut known = Known::default();
        known.tell(rest, Instant::now(), Duration::from_millis(7));
        assert_eq!(known.longest, Duration::from_millis(7));
        known.tell(rest, Instant::now(), Duration::from_secs(4));
        assert_eq!(known.longest, Duration::from_secs(3));
    }

    #[test]
    fn who_is_busy_goes_ahead_when_nobody_else_has_anything_to_launch() {
        let now = Instant::now();
        let vainly = |in_vain| Known { in_vain, ..told(START, now) };
        let ahead = told(busy(200), now);
        assert!(may_go_ahead(&[ahead, vainly(2), vainly(3)], 0));
        assert!(!may_go_ahead(&[ahead, vainly(2), vainly(1)], 0), "one may have something");
        assert!(!may_go_ahead(&[ahead, vainly(2), Known::default()], 0), "nothing is known of one");
        assert!(may_go_ahead(&[ahead, vainly(2), told(busy(1), now)], 0), "another is busy too");
        assert!(!may_go_ahead(&[ahead, told(busy(1), now)], 0), "nobody waits for it");
        assert!(!may_go_ahead(&[vainly(2), vainly(2)], 0), "it is at rest");
        let open = told(Rest { is_shut: false, ..busy(200) }, now);
        assert!(!may_go_ahead(&[open, vainly(2)], 0), "its gate is not shut");
        assert!(!may_go_ahead(&[told(busy(199), now), vainly(2)], 0), "not for long");
    }
}
