//! Which CPUs are left to programs, and that a busy thread is found where it runs.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use super::*;

impl Cores {
    /// Leaves these CPUs to the threads that copy, and watches no program.
    pub(crate) fn leaving(cpus: impl IntoIterator<Item = usize>) -> Self {
        let cores = Self::watch(Vec::new());
        cores.leave(cpus);
        cores
    }

    /// Leaves others.
    pub(crate) fn leave(&self, cpus: impl IntoIterator<Item = usize>) {
        self.set_free(cpus.into_iter().collect());
    }

    /// All CPUs that this process may use.
    pub(crate) fn own(&self) -> Vec<usize> {
        self.own.iter().copied().collect()
    }
}

/// The calling thread may use these only.
fn pin(cpus: &[usize]) {
    let mut set = CpuSet::new();
    cpus.iter().for_each(|cpu| set.set(*cpu));
    sched_setaffinity(None, &set).unwrap();
}

fn cpus(numbers: impl IntoIterator<Item = usize>) -> Cpus {
    numbers.into_iter().collect()
}

/// A reading so many milliseconds after `since`, of threads with their ticks and CPUs.
fn reading(since: Instant, ms: u64, threads: &[(i32, u64, usize)]) -> Reading {
    let used = threads.iter().map(|&(number, ticks, cpu)| (number, Used { ticks, cpu }));
    Reading { at: since + Duration::from_millis(ms), threads: used.collect() }
}

#[test]
fn lists_of_cpus_are_read() {
    assert_eq!(listed("3\n"), Some(cpus([3])));
    assert_eq!(listed("0,8\n"), Some(cpus([0, 8])));
    assert_eq!(listed("2-3"), Some(cpus([2, 3])));
    assert_eq!(listed("0-2,8,10-11\n"), Some(cpus([0, 1, 2, 8, 10, 11])));
    for bad in ["", "\n", "a", "1-", "-1", "1,,2", "1;2"] {
        assert_eq!(listed(bad), None, "{bad:?}");
    }
}

#[test]
fn a_cpu_is_one_of_its_siblings() {
    for cpu in own_cpus() {
        assert!(siblings(cpu).contains(&cpu));
    }
    assert_eq!(siblings(1 << 20), cpus([1 << 20]), "one that is not there");
}

#[test]
fn who_uses_more_than_half_of_the_time_is_busy() {
    let (since, second) = (Instant::now(), procfs::ticks_per_second());
    let before = reading(since, 0, &[(1, 500, 0), (2, 0, 1), (3, 70, 2), (4, 9 * second, 3)]);
    let after = [
        (1, 500 + second / 4 + 1, 7),
        (2, second / 4, 1),
        (3, 70 + second / 2, 2),
        (4, 9 * second, 3),
        // Began in between.
        (5, second / 3, 4),
    ];
    // Half a second later: where they are now, the busiest first.
    assert_eq!(busy(&before, &reading(since, 500, &after)), [2, 4, 7]);
    assert_eq!(busy(&before, &reading(since, 1500, &after)), [0; 0]);
    // A number that is used again.
    let again = reading(since, 500, &[(4, second / 2, 3)]);
    assert_eq!(busy(&before, &again), [0; 0]);
}

#[test]
fn busy_cpus_and_their_siblings_are_left_to_the_program() {
    let sixteen = cpus(0..16);
    let siblings = |cpu| cpus([cpu % 8, cpu % 8 + 8]);
    let left = |busy: &[usize]| free(&sixteen, busy, siblings, &sixteen);
    assert_eq!(left(&[]), &sixteen - &cpus([15]));
    assert_eq!(left(&[11]), &sixteen - &cpus([3, 11, 15]));
    assert_eq!(left(&[0, 15, 1]), &sixteen - &cpus([0, 8, 7, 15, 1, 9, 14]));
    // Only the siblings of the busiest CPUs are left, if they are too many.
    let half = &sixteen - &cpus([1, 2, 4, 7, 9, 10, 12, 15]);
    assert_eq!(left(&[7, 1, 10, 4, 3, 0]), half);
    // What this process may not use anyway does not count.
    let some = cpus([0, 1, 2, 3]);
    assert_eq!(free(&some, &[9, 13, 20], siblings, &some), cpus([0, 2, 3]));
    let odd = cpus(0..17);
    assert_eq!(free(&odd, &[0, 1, 2, 3, 4, 5, 6, 7], |cpu| cpus([cpu]), &odd), cpus(8..17));
    assert_eq!(free(&odd, &[0, 1, 2, 3, 4, 5, 6], |cpu| cpus([cpu]), &odd), cpus(7..16));
    // Two hyperthreads of one core, and two cores.
    let two = cpus([0, 1]);
    assert_eq!(free(&two, &[1], |_| cpus([0, 1]), &two), two);
    assert_eq!(free(&two, &[1], |cpu| cpus([cpu]), &two), cpus([0]));
}

#[test]
fn what_is_spared_stays_so() {
    let all = cpus(0..48);
    let alone = |cpu| cpus([cpu]);
    let first = free(&all, &[3], alone, &all);
    assert_eq!(first, &all - &cpus([3, 45, 46, 47]));
    // The program has moved, but nobody else has to but the one in its way.
    assert_eq!(free(&all, &[20], alone, &first), &all - &cpus([20, 47, 46, 45]));
    assert_eq!(free(&all, &[46], alone, &first), &all - &cpus([46, 47, 45, 3]));
    assert_eq!(free(&all, &[], alone, &first), &all - &cpus([47, 46, 45]));
}

#[test]
fn there_are_as_many_workers_as_free_cpus() {
    let cores = |own: usize, free: usize| Cores {
        pids: Vec::new(),
        own: cpus(0..own),
        last: Mutex::new(Reading::of(&[])),
        free: Mutex::new(Free { cpus: cpus(0..free), changes: 0 }),
    };
    assert_eq!(cores(16, 14).share(16), 14);
    assert_eq!(cores(16, 8).share(16), 8);
    assert_eq!(cores(16, 14).share(8), 7, "one of two devices");
    assert_eq!(cores(16, 14).share(2), 2, "few chunks");
    assert_eq!((cores(2, 1).share(2), cores(2, 1).share(1)), (1, 1));
    // Where nobody is known to be busy.
    assert_eq!((cores(16, 16).share(16), cores(4, 4).share(4)), (14, 4));
    assert_eq!(cores(0, 0).share(16), 14);
}

/// A thread that does nothing but use its CPU, until this is dropped.
struct Spinning(Arc<AtomicBool>, Option<std::thread::JoinHandle<()>>);

impl Spinning {
    fn on(cpu: usize) -> Self {
        let stop = Arc::new(AtomicBool::new(false));
        let stopped = stop.clone();
        let spin = move || {
            pin(&[cpu]);
            // Others may be busy on this machine.
            let _ = rustix::process::setpriority_process(None, -20);
            while !stopped.load(Ordering::Relaxed) {
                std::hint::spin_loop();
            }
        };
        Self(stop, Some(std::thread::spawn(spin)))
    }
}

impl Drop for Spinning {
    fn drop(&mut self) {
        self.0.store(true, Ordering::Relaxed);
        let _ = self.1.take().unwrap().join();
    }
}

/// Follows until `left` is left to the threads that copy.
fn follow_until(cores: &Cores, left: &Cpus) {
    let since = Instant::now();
    loop {
        std::thread::sleep(INTERVAL);
        cores.follow();
        let free = cores.free.lock().cpus.clone();
        if free == *left {
            return;
        }
        assert!(since.elapsed() < Duration::from_secs(20), "{free:?} is left, not {left:?}");
    }
}

#[test]
fn a_busy_thread_is_found_and_followed() {
    let cores = Cores::watch(vec![std::process::id()]);
    let own = cores.own.clone();
    std::thread::sleep(INTERVAL);
    cores.follow();
    assert_eq!(cores.free.lock().cpus, own, "a thread that sleeps needs no CPU");
    for cpu in own.iter().take(2) {
        let spinning = Spinning::on(*cpu);
        let left = free(&own, &[*cpu], siblings, &cores.free.lock().cpus);
        follow_until(&cores, &left);
        drop(spinning);
        std::thread::sleep(INTERVAL);
        cores.follow();
        std::thread::sleep(INTERVAL);
        cores.follow();
        assert_eq!(cores.free.lock().cpus, left, "it may go on there");
    }
}

#[test]
fn a_thread_takes_the_cpus_that_are_free() {
    let own: Vec<usize> = own_cpus().into_iter().collect();
    let cores = Cores::watch(Vec::new());
    cores.stay_off();
    assert_eq!(own_cpus(), cores.own, "nothing is known");
    for cpu in [own[0], own[own.len() - 1], own[0]] {
        cores.leave([cpu]);
        cores.stay_off();
        assert_eq!(own_cpus(), cpus([cpu]));
    }
}
