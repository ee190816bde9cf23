//! The CPUs that are left to programs while their memory is copied and they run.
//!
//! A thread that launches kernels without end wants a core for that. Nice workers do not leave it one: what runs
//! on the other hyperthread of its core takes a part of what the core can do, nice or not; and a worker that is
//! in the middle of a write lets nobody else have its CPU. So threads that copy while programs run stay off the CPUs on
//! which busy threads of the programs run, and off the siblings of those. A virtual machine may not be told of
//! siblings (`docs/results/concurrent-copies.md`, "Rounds in which the program is slow"), so of many CPUs they leave
//! some more, and as a rule the same ones, since waking up a CPU is what seems to bring it onto another's core.
//!
//! A CPU is what the kernel numbers: of a core with hyperthreads each one.

use std::cell::Cell;
use std::cmp::Reverse;
use std::collections::{BTreeSet, HashMap};
use std::time::{Duration, Instant};

use parking_lot::Mutex;
use rustix::thread::{CpuSet, sched_getaffinity, sched_setaffinity};

use crate::base::faults::skipped;

/// The least time between two readings: CPU time is told in clock ticks, of 10 ms or so. Threads move, so another one
/// is made when it has passed.
const INTERVAL: Duration = Duration::from_millis(100);
/// One CPU of so many is left to the programs while it is not known which ones they need.
const CPUS_LEFT: usize = 8;
/// One CPU of so many is left in addition to those that the programs need.
const CPUS_SPARE: usize = 16;

type Cpus = BTreeSet<usize>;

/// Which CPUs may be used by threads that copy while programs run.
pub(crate) struct Cores {
    /// The programs' processes.
    pids: Vec<u32>,
    /// The CPUs that this process may use.
    own: Cpus,
    last: Mutex<Reading>,
    free: Mutex<Free>,
}

/// What all threads of the programs have used of CPUs up to a moment, by their numbers.
struct Reading {
    at: Instant,
    threads: HashMap<i32, Used>,
}

#[derive(Debug, Clone, Copy)]
struct Used {
    /// CPU time in clock ticks.
    ticks: u64,
    /// Where it ran last.
    cpu: usize,
}

/// What is left to the threads that copy.
struct Free {
    cpus: Cpus,
    /// How often that has changed.
    changes: usize,
}

thread_local! {
    /// [`Free::changes`] when this thread took the CPUs that were free.
    static TAKEN: Cell<usize> = const { Cell::new(0) };
}

impl Cores {
    /// Begins to watch what these processes use. For some time nothing is known of that.
    pub(crate) fn watch(pids: Vec<u32>) -> Self {
        let own = if skipped("cores") { Cpus::new() } else { own_cpus() };
        let last = Mutex::new(Reading::of(&pids));
        let free = Mutex::new(Free { cpus: own.clone(), changes: 0 });
        Self { pids, own, last, free }
    }

    /// How many of so many workers, which are made for all CPUs, are to copy.
    pub(crate) fn share(&self, workers: usize) -> usize {
        let free = self.free.lock().cpus.len();
        if free == self.own.len() {
            return workers - workers / CPUS_LEFT;
        }
        (workers * free).div_ceil(self.own.len())
    }

    /// Takes the calling thread off the CPUs that the programs need now. For threads that end with the copy,
    /// each time before they begin with something: nothing is undone.
    pub(crate) fn stay_off(&self) {
        self.follow();
        self.keep_off();
    }

    /// Takes the calling thread off the CPUs that other threads have last found to be needed: for a thread that has
    /// no time to find out.
    pub(crate) fn keep_off(&self) {
        let free = self.free.lock();
        if TAKEN.replace(free.changes) != free.changes {
            let mut cpus = CpuSet::new();
            free.cpus.iter().for_each(|cpu| cpus.set(*cpu));
            // If the kernel refuses, the program is slower, that is all.
            let _ = sched_setaffinity(None, &cpus);
        }
    }

    /// If the last reading is old enough, makes another one, and finds out from both which CPUs are free.
    pub(crate) fn follow(&self) {
        // A thread that is at it already does it for all.
        let Some(mut last) = self.last.try_lock() else { return };
        if self.own.len() < 2 || last.at.elapsed() < INTERVAL {
            return;
        }
        let now = Reading::of(&self.pids);
        let busy = busy(&last, &now);
        *last = now;
        // Stopped programs will go on where they were.
        if !busy.is_empty() {
            let last = self.free.lock().cpus.clone();
            let cpus = free(&self.own, &busy, siblings, &last);
            self.set_free(cpus);
        }
    }

    fn set_free(&self, cpus: Cpus) {
        let mut free = self.free.lock();
        if free.cpus != cpus {
            tracing::debug!(?cpus, "the threads that copy while the programs run move");
            *free = Free { cpus, changes: free.changes + 1 };
        }
    }
}

impl Reading {
    fn of(pids: &[u32]) -> Self {
        let at = Instant::now();
        // A process or thread that ends meanwhile needs no CPU.
        let processes =
            pids.iter().filter_map(|pid| procfs::process::Process::new(*pid as i32).ok());
        let threads = processes.filter_map(|process| process.tasks().ok()).flatten();
        let used = threads.filter_map(|thread| {
            let stat = thread.ok()?.stat().ok()?;
            let cpu = stat.processor?.try_into().ok()?;
            Some((stat.pid, Used { ticks: stat.utime + stat.stime, cpu }))
        });
        Self { at, threads: used.collect() }
    }
}

/// The CPUs of the threads that have used more than half of the time between two readings, the busiest first.
fn busy(before: &Reading, now: &Reading) -> Vec<usize> {
    let time = now.at.saturating_duration_since(before.at).as_secs_f64();
    let half = time * procfs::ticks_per_second() as f64 / 2.0;
    let used = now.threads.iter().map(|(number, used)| {
        let before = before.threads.get(number).map_or(0, |before| before.ticks);
        (used.ticks.saturating_sub(before), used.cpu)
    });
    let mut busy: Vec<(u64, usize)> = used.filter(|(ticks, _)| *ticks as f64 > half).collect();
    busy.sort_unstable_by(|a, b| b.cmp(a));
    busy.into_iter().map(|(_, cpu)| cpu).collect()
}

/// What is left of these CPUs without the busy ones, given the busiest first, and their siblings, and without some
/// to spare. At least half: a program that needs them all shares them. `last` were left before.
fn free(own: &Cpus, busy: &[usize], siblings: impl Fn(usize) -> Cpus, last: &Cpus) -> Cpus {
    let mut free = own.clone();
    for cpu in busy {
        let left: Cpus = free.difference(&siblings(*cpu)).copied().collect();
        if 2 * left.len() < own.len() {
            break;
        }
        free = left;
    }
    // The spare CPUs are always the same, if possible: to wake a CPU up may slow another
    // (`docs/results/concurrent-copies.md`, "Rounds in which the program is slow").
    let mut spare: Vec<usize> = free.iter().copied().collect();
    spare.sort_by_key(|cpu| (last.contains(cpu), Reverse(*cpu)));
    for cpu in spare.iter().take(own.len() / CPUS_SPARE) {
        if 2 * (free.len() - 1) >= own.len() {
            free.remove(cpu);
        }
    }
    free
}

/// The CPUs of a core of which this is one.
fn siblings(cpu: usize) -> Cpus {
    let path = format!("/sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list");
    let listed = std::fs::read_to_string(path).ok().and_then(|list| listed(&list));
    let mut cpus = listed.unwrap_or_default();
    cpus.insert(cpu);
    cpus
}

/// The numbers of a list like `0,8` or `2-3`.
fn listed(list: &str) -> Option<Cpus> {
    let mut cpus = Cpus::new();
    for part in list.trim().split(',') {
        let (first, last) = part.split_once('-').unwrap_or((part, part));
        cpus.extend(first.parse::<usize>().ok()?..=last.parse::<usize>().ok()?);
    }
    Some(cpus)
}

/// The CPUs that this process may use; none if the kernel does not say.
fn own_cpus() -> Cpus {
    let set = sched_getaffinity(None);
    set.map_or_else(
        |_| Cpus::new(),
        |set| (0..CpuSet::MAX_CPU).filter(|cpu| set.is_set(*cpu)).collect(),
    )
}

#[cfg(test)]
mod tests;
