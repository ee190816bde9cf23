//! The protocol of the chunk table in every order that a few threads can run in, with loom.
//!
//! A chunk's bytes are a cell that loom watches: an access that is not ordered against another one is
//! an error. A thread that sleeps and is never woken is one too.

use std::sync::atomic::Ordering;

use gpucr_wire::chunks::{Chunks, Word};
use loom::cell::UnsafeCell;
use loom::sync::atomic::AtomicU32;
use loom::sync::{Arc, Condvar, Mutex};
use loom::thread;

/// What a chunk holds when the program is stopped, and what a launch writes there.
const OLD: u32 = 7;
const NEW: u32 = 8;

/// A word with a futex: the lock is the one that the kernel holds while it compares.
struct Futex {
    value: AtomicU32,
    lock: Mutex<()>,
    woken: Condvar,
}

impl Futex {
    fn new() -> Self {
        Self { value: AtomicU32::new(0), lock: Mutex::new(()), woken: Condvar::new() }
    }
}

impl Word for Futex {
    fn load(&self, order: Ordering) -> u32 {
        self.value.load(order)
    }
    fn store(&self, value: u32, order: Ordering) {
        self.value.store(value, order);
    }
    fn swap(&self, value: u32, order: Ordering) -> u32 {
        self.value.swap(value, order)
    }
    fn exchange(&self, now: u32, new: u32, success: Ordering, other: Ordering) -> Result<u32, u32> {
        self.value.compare_exchange(now, new, success, other)
    }
    fn add(&self, value: u32, order: Ordering) -> u32 {
        self.value.fetch_add(value, order)
    }
    fn subtract(&self, value: u32, order: Ordering) -> u32 {
        self.value.fetch_sub(value, order)
    }
    fn sleep(&self, value: u32) {
        let guard = self.lock.lock().unwrap();
        if self.value.load(Ordering::Relaxed) == value {
            drop(self.woken.wait(guard).unwrap());
        }
    }
    fn wake(&self) {
        let _guard = self.lock.lock().unwrap();
        self.woken.notify_all();
    }
}

/// A table of `N` pending chunks in one range, and the memory that it is about.
struct Model<const N: usize> {
    wanted: Futex,
    left: Futex,
    states: [Futex; N],
    memory: [UnsafeCell<u32>; N],
}

// SAFETY: that the cells are used rightly is what loom checks.
unsafe impl<const N: usize> Sync for Model<N> {}
// SAFETY: plain values.
unsafe impl<const N: usize> Send for Model<N> {}

impl<const N: usize> Model<N> {
    fn new() -> Arc<Self> {
        let model = Self {
            wanted: Futex::new(),
            left: Futex::new(),
            states: [(); N].map(|()| Futex::new()),
            memory: [(); N].map(|()| UnsafeCell::new(OLD)),
        };
        (0..N).for_each(|chunk| model.chunks().pend(chunk));
        Arc::new(model)
    }

    fn chunks(&self) -> Chunks<'_, Futex> {
        Chunks { wanted: &self.wanted, left: &self.left, states: &self.states }
    }

    fn read(&self, chunk: usize) -> u32 {
        // SAFETY: loom checks that nobody else uses the cell meanwhile in a way that conflicts.
        self.memory[chunk].with(|value| unsafe { *value })
    }

    fn write(&self, chunk: usize) {
        // SAFETY: loom checks that nobody else uses the cell meanwhile in a way that conflicts.
        self.memory[chunk].with_mut(|value| unsafe { *value = NEW });
    }

    /// A launch that writes these chunks.
    fn launch(&self, chunks: &[usize]) {
        for chunk in chunks {
            self.chunks().wait(*chunk);
        }
        for chunk in chunks {
            assert!(self.chunks().are_saved(*chunk..*chunk + 1));
            self.write(*chunk);
        }
    }

    /// A copier: takes what is wanted first, then whatever is left.
    fn copy(&self) -> usize {
        let wanted = || self.chunks().claim_wanted();
        let any = || (0..N).find(|chunk| self.chunks().claim(*chunk));
        let mut copied = 0;
        while let Some(chunk) = wanted().or_else(any) {
            assert_eq!(self.read(chunk), OLD, "written before it was saved");
            assert!(self.chunks().finish(chunk), "nobody has ended the table");
            copied += 1;
        }
        copied
    }
}

/// Runs the model in every order with at most two changes of threads that are forced on them; more of
/// these take minutes, and have found nothing.
fn check(model: impl Fn() + Sync + Send + 'static) {
    let mut builder = loom::model::Builder::new();
    builder.preemption_bound = Some(2);
    builder.check(model);
}

#[test]
fn launches_write_only_what_is_saved() {
    check(|| {
        let model = Model::<2>::new();
        let launches: Vec<_> = [[0], [1]]
            .map(|chunks| {
                let model = model.clone();
                thread::spawn(move || model.launch(&chunks))
            })
            .into();
        assert_eq!(model.copy(), 2);
        launches.into_iter().for_each(|launch| launch.join().unwrap());
        assert_eq!(model.chunks().left.load(Ordering::Relaxed), 0);
    });
}

/// One copier carries chunks away, one makes shadows: each chunk is read once, and before it is written.
#[test]
fn two_copiers_share_the_work() {
    check(|| {
        let model = Model::<2>::new();
        let (shadows, launches) = (model.clone(), model.clone());
        let shadows = thread::spawn(move || shadows.copy());
        let launch = thread::spawn(move || launches.launch(&[1]));
        let copied = model.copy();
        assert_eq!(copied + shadows.join().unwrap(), 2);
        launch.join().unwrap();
    });
}

/// A launch that sees that nothing is left writes without checking the chunks.
#[test]
fn nothing_left_means_that_all_is_saved() {
    check(|| {
        let model = Model::<1>::new();
        let other = model.clone();
        let launch = thread::spawn(move || {
            if other.chunks().left.load(Ordering::Acquire) == 0 {
                other.write(0);
            }
        });
        model.copy();
        launch.join().unwrap();
    });
}

/// The checkpointer dies after so many steps. The agent, which sees that, ends the table.
#[test]
fn nobody_waits_for_a_dead_checkpointer() {
    for steps in 0..3 {
        check(move || {
            let model = Model::<2>::new();
            let launches = model.clone();
            let launch = thread::spawn(move || launches.launch(&[0, 1]));
            if steps > 0 {
                assert!(model.chunks().claim(0));
            }
            if steps > 1 {
                assert_eq!(model.read(0), OLD);
                assert!(model.chunks().finish(0));
            }
            model.chunks().end();
            launch.join().unwrap();
            assert_eq!(model.chunks().left.load(Ordering::Relaxed), 0);
            assert!(model.chunks().are_saved(0..2));
        });
    }
}

/// The agent ends the table while a copier lives: what that has read counts only if it is told so.
#[test]
fn a_copier_is_told_of_the_end() {
    check(|| {
        let model = Model::<1>::new();
        // The launch may write what is being read here, so the value is an atomic one.
        let value = Arc::new(AtomicU32::new(OLD));
        let (ended, launches, written) = (model.clone(), model.clone(), value.clone());
        let agent = thread::spawn(move || ended.chunks().end());
        let launch = thread::spawn(move || {
            launches.chunks().wait(0);
            written.store(NEW, Ordering::Relaxed);
        });
        if model.chunks().claim(0) {
            let read = value.load(Ordering::Relaxed);
            if model.chunks().finish(0) {
                assert_eq!(read, OLD, "taken for saved, and changed");
            }
        }
        agent.join().unwrap();
        launch.join().unwrap();
        assert_eq!(model.chunks().left.load(Ordering::Relaxed), 0);
    });
}

/// A chunk that is wanted is found: the hint is never lost.
#[test]
fn what_is_wanted_comes_first() {
    check(|| {
        let model = Model::<2>::new();
        let other = model.clone();
        let launch = thread::spawn(move || other.chunks().want(1));
        let first = model.chunks().claim_wanted();
        assert!(launch.join().unwrap());
        let second = model.chunks().claim_wanted();
        assert_eq!(first.or(second), Some(1));
        assert!(first.is_none() || second.is_none());
    });
}
