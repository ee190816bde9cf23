//! Who is inside the gate.
//!
//! A thread has a place, which counts its calls and launches. Most threads have a place of their own,
//! which nobody else writes, so that entering and leaving are plain stores. What makes them visible in
//! time to the closer is its [`barrier`]: after it every thread has either shown that it entered, or will
//! see that the gate is closed. (The asymmetric form of Dekker's mutual exclusion, see membarrier(2).)
//!
//! Threads beyond the number of such places, and all threads where the kernel has no such barrier, share
//! places, and pay an atomic addition each time.

use std::cell::Cell;
use std::io;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering, compiler_fence};

use rustix::thread::MembarrierCommand::{PrivateExpedited, RegisterPrivateExpedited};
use rustix::thread::membarrier;

/// In a count: one call inside.
pub(super) const CALL: u64 = 1;
/// In a count: one launch so far. Below it is room for a million calls inside.
pub(super) const LAUNCH: u64 = 1 << 20;
/// Places with one thread each.
const OWN: usize = 192;
/// Places that threads share.
const SHARED: usize = 64;

/// All places.
pub(crate) const COUNT: usize = OWN + SHARED;

/// A cache line of its own, and the one that the processor fetches with it.
#[repr(align(128))]
pub(super) struct Place {
    count: AtomicU64,
    taken: AtomicBool,
}

static PLACES: [Place; COUNT] =
    [const { Place { count: AtomicU64::new(0), taken: AtomicBool::new(false) } }; COUNT];

/// What a thread knows of itself.
#[derive(Clone, Copy)]
pub(super) struct Me {
    /// The number of its place plus one; 0: none yet.
    place: u32,
    /// How many calls deep it is.
    pub(super) depth: u32,
}

/// Lets the thread leave when it ends, and gives its place back. It may end within a call: cancelled, by
/// `pthread_exit`, or with a stack that nobody could unwind.
struct Leaving;

thread_local! {
    static ME: Cell<Me> = const { Cell::new(Me { place: 0, depth: 0 }) };
    static LEAVING: Leaving = const { Leaving };
}

impl Drop for Leaving {
    fn drop(&mut self) {
        // What the thread calls from here on counts in a shared place.
        let me = ME.replace(Me { place: 0, depth: 0 });
        if me.place == 0 {
            return;
        }
        let (place, own) = me.place();
        if own {
            place.leave(own, place.count.load(Ordering::Relaxed) % LAUNCH);
            place.taken.store(false, Ordering::Release);
        } else if me.depth > 0 {
            place.leave(own, CALL);
        }
        super::captures::end_own_captures();
    }
}

impl Place {
    /// Counts `amount` more, before the caller's next look at the gate, as far as somebody can tell who
    /// closed it and then called [`barrier`].
    #[inline(always)]
    pub(super) fn enter(&self, own: bool, amount: u64) {
        if own {
            // Nobody else writes it.
            self.count.store(self.count.load(Ordering::Relaxed) + amount, Ordering::Relaxed);
            compiler_fence(Ordering::SeqCst);
        } else {
            self.count.fetch_add(amount, Ordering::SeqCst);
        }
    }

    /// Counts `amount` less.
    #[inline(always)]
    pub(super) fn leave(&self, own: bool, amount: u64) {
        if own {
            self.count.store(self.count.load(Ordering::Relaxed) - amount, Ordering::Release);
        } else {
            self.count.fetch_sub(amount, Ordering::SeqCst);
        }
    }
}

impl Me {
    /// Its place, and whether it has that for itself.
    #[inline(always)]
    pub(super) fn place(self) -> (&'static Place, bool) {
        let number = self.number();
        (&PLACES[number], number < OWN)
    }

    /// The number of its place.
    #[inline(always)]
    pub(super) fn number(self) -> usize {
        self.place.wrapping_sub(1) as usize % PLACES.len()
    }

    /// This caller at another depth.
    #[inline(always)]
    pub(super) fn at(self, depth: u32) -> Self {
        Self { depth, ..self }
    }

    /// With a place, if it has none yet.
    #[inline(always)]
    pub(super) fn placed(self) -> Self {
        if self.place == 0 { self.first_placed() } else { self }
    }

    #[cold]
    fn first_placed(self) -> Self {
        let number = take().unwrap_or_else(|| {
            let thread = rustix::thread::gettid().as_raw_nonzero().get();
            OWN + thread as usize % SHARED
        });
        Self { place: number as u32 + 1, ..self }
    }
}

/// A place for this thread alone, until it ends.
fn take() -> Option<usize> {
    // Without a way to notice the thread's end, or to make it show what it did, it shares.
    LEAVING.try_with(|_| ()).ok()?;
    barrier().ok()?;
    let free = |place: &Place| {
        !place.taken.load(Ordering::Relaxed) && !place.taken.swap(true, Ordering::Acquire)
    };
    PLACES[..OWN].iter().position(free)
}

/// This thread. The reference is good for as long as the thread lives.
#[inline(always)]
pub(super) fn me() -> *const Cell<Me> {
    ME.with(std::ptr::from_ref)
}

/// After it, every thread of this process has either shown that it entered, or sees what this thread did
/// before.
///
/// # Errors
/// The kernel has no such barrier, or forbids it.
pub(super) fn barrier() -> io::Result<()> {
    // Each time: a restored process is not registered. The second time costs nothing.
    membarrier(RegisterPrivateExpedited)?;
    Ok(membarrier(PrivateExpedited)?)
}

/// How many calls are inside.
pub(super) fn inside() -> u64 {
    PLACES.iter().map(|place| place.count.load(Ordering::SeqCst) % LAUNCH).sum()
}

/// Kernel and graph launches so far.
pub(super) fn launches() -> u64 {
    PLACES.iter().map(|place| place.count.load(Ordering::Relaxed) / LAUNCH).sum()
}

/// Forgets all calls and all threads but this one.
///
/// # Safety
/// No other thread exists.
pub(super) unsafe fn reset() {
    let mine = ME.get().place.wrapping_sub(1) as usize;
    for (number, place) in PLACES.iter().enumerate() {
        place.count.store(0, Ordering::Relaxed);
        place.taken.store(number == mine, Ordering::Relaxed);
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Barrier;
    use std::thread;
    use std::time::{Duration, Instant};

    use super::super::tests::ALONE;
    use super::*;

    /// Whether this thread has a place for itself.
    fn has_own() -> bool {
        drop(crate::state::gate::enter());
        ME.get().place().1
    }

    /// Without the barrier a store may come after the load that follows it, and this can fail. It takes a
    /// second at most: with fewer cores than busy threads a round takes long.
    #[test]
    fn the_closer_sees_who_does_not_see_it() {
        static PLACE: Place = Place { count: AtomicU64::new(0), taken: AtomicBool::new(true) };
        const ROUNDS: u64 = 20_000;
        /// Both begin a round at nearly the same time, in any order, with both lines in their caches.
        fn meet(arrived: &AtomicU64, closed: &AtomicBool, round: u64, delay: u64) {
            arrived.fetch_add(1, Ordering::SeqCst);
            let mut waited = 0;
            while arrived.load(Ordering::SeqCst) < 2 * round {
                waited += 1;
                // The other one may need this processor.
                if waited % 1024 == 0 {
                    thread::yield_now();
                }
            }
            for _ in 0..delay % 32 {
                std::hint::black_box((
                    closed.load(Ordering::SeqCst),
                    PLACE.count.load(Ordering::SeqCst),
                ));
            }
        }
        let (closed, over) = (AtomicBool::new(false), AtomicBool::new(false));
        let arrived = AtomicU64::new(0);
        let (entered, left, looked) = (AtomicU64::new(0), AtomicU64::new(0), AtomicU64::new(0));
        let unseen = thread::scope(|scope| {
            scope.spawn(|| {
                for round in 1..=ROUNDS {
                    meet(&arrived, &closed, round, round / 32);
                    PLACE.enter(true, CALL);
                    let passes = !closed.load(Ordering::SeqCst);
                    entered.store(2 * round + u64::from(passes), Ordering::SeqCst);
                    while looked.load(Ordering::SeqCst) < round {
                        thread::yield_now();
                    }
                    PLACE.leave(true, CALL);
                    left.store(round, Ordering::SeqCst);
                    if over.load(Ordering::SeqCst) {
                        break;
                    }
                }
            });
            let mut unseen = 0;
            let since = Instant::now();
            for round in 1..=ROUNDS {
                meet(&arrived, &closed, round, round);
                closed.store(true, Ordering::SeqCst);
                barrier().expect("this kernel has it");
                let seen = PLACE.count.load(Ordering::SeqCst) != 0;
                while entered.load(Ordering::SeqCst) < 2 * round {
                    thread::yield_now();
                }
                unseen += u64::from(!seen && entered.load(Ordering::SeqCst) % 2 == 1);
                let last = since.elapsed() > Duration::from_secs(1);
                over.store(last, Ordering::SeqCst);
                looked.store(round, Ordering::SeqCst);
                while left.load(Ordering::SeqCst) < round {
                    thread::yield_now();
                }
                closed.store(false, Ordering::SeqCst);
                if last {
                    break;
                }
            }
            unseen
        });
        assert_eq!(unseen, 0, "entered a closed gate");
    }

    #[test]
    fn a_place_is_given_back_when_its_thread_ends() {
        let _alone = ALONE.lock();
        for _ in 0..2 * OWN {
            assert!(thread::spawn(has_own).join().expect("no panic"));
        }
    }

    #[test]
    fn threads_beyond_the_places_share_and_are_counted() {
        let _alone = ALONE.lock();
        let threads = OWN + SHARED;
        let (inside, counted) = (Barrier::new(threads + 1), Barrier::new(threads + 1));
        let before = (super::inside(), launches());
        thread::scope(|scope| {
            let all: Vec<_> = (0..threads)
                .map(|_| {
                    scope.spawn(|| {
                        let call = crate::state::gate::enter_launch();
                        inside.wait();
                        counted.wait();
                        drop(call);
                        ME.get().place().1
                    })
                })
                .collect();
            inside.wait();
            assert_eq!(super::inside(), before.0 + threads as u64);
            assert_eq!(launches(), before.1 + threads as u64);
            counted.wait();
            let own = all.into_iter().map(|thread| thread.join());
            let own = own.filter(|own| *own.as_ref().expect("no panic")).count();
            assert!((1..=OWN).contains(&own), "{own}");
        });
        assert_eq!(super::inside(), before.0);
    }

    #[test]
    fn a_thread_that_ends_within_a_call_has_left() {
        let _alone = ALONE.lock();
        let before = super::inside();
        let ends_inside = || {
            std::mem::forget((crate::state::gate::enter_launch(), crate::state::gate::enter()));
            super::inside()
        };
        for _ in 0..2 * OWN {
            assert_eq!(thread::spawn(ends_inside).join().expect("no panic"), before + 1);
            assert_eq!(super::inside(), before);
        }
        // Here places are shared.
        let stay = Barrier::new(OWN + 1);
        thread::scope(|scope| {
            let others: Vec<_> =
                (0..OWN).map(|_| scope.spawn(|| (has_own(), stay.wait()))).collect();
            while PLACES[..OWN].iter().any(|place| !place.taken.load(Ordering::SeqCst)) {
                thread::yield_now();
            }
            assert_eq!(thread::spawn(ends_inside).join().expect("no panic"), before + 1);
            assert_eq!(super::inside(), before);
            stay.wait();
            drop(others);
        });
    }

    /// What a thread calls while it ends, after its place is given back.
    #[test]
    fn a_thread_may_call_while_it_ends() {
        let _alone = ALONE.lock();
        struct Late;
        impl Drop for Late {
            fn drop(&mut self) {
                drop(crate::state::gate::enter());
                assert!(!ME.get().place().1, "it shares");
            }
        }
        thread_local! { static LATE: Late = const { Late } }
        let before = super::inside();
        let thread = thread::spawn(|| {
            // Made before the place is, so dropped after it.
            LATE.with(|_| ());
            has_own()
        });
        assert!(thread.join().expect("no panic"));
        assert_eq!(super::inside(), before);
    }
}
