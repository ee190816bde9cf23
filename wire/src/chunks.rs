//! The chunk table: which chunks of a running program's memory are still to be saved.
//!
//! With protocol `cow` a program goes on before all of its memory is saved. The checkpointer and the
//! shim share one word for each chunk of memory that is left:
//!
//! ```text
//!              claim                 finish
//!   PENDING ----------> COPYING ------------> SAVED
//!      |  want            | want                ^
//!      v                  v                     |
//!   PENDING|WANTED --> COPYING|WANTED ----------+  finish, and wakes who waits
//!   any state ---------------------- end -------+  and wakes who waits
//! ```
//!
//! - *Copiers* (the checkpointer's threads: those that carry chunks away, and those that make shadows)
//!   claim a chunk, read its bytes, and finish it. Nobody else reads it meanwhile.
//! - A *launch* that may write a chunk writes only after it has seen it SAVED. Until then it marks the
//!   chunk WANTED, which copiers take first, and sleeps on the chunk's word.
//! - The *end* makes everything SAVED: the checkpointer does it when it is through or has failed, and
//!   the agent does it when the checkpointer is gone. So no launch waits for somebody who has died. A
//!   copier whose chunk was ended under its hands is told so by [`Chunks::finish`], and what it has
//!   read counts for nothing.
//!
//! # Why this order of memory accesses is enough
//!
//! The word of a chunk is changed only by read-modify-write operations after the table was handed
//! over, so all its values form one release sequence. A copier's reads of the bytes come before its
//! `finish`, which is a release; a launch's writes come after a load that sees SAVED, which is an
//! acquire: so no write overtakes a read. `claim` is an acquire for the sake of a second copier, though
//! no chunk is claimed twice. WANTED carries no data. [`Chunks::left`](Chunks) is lowered after each
//! change to SAVED, with release, and a launch that sees 0 there with acquire has all of them before
//! it. The hint `wanted` is set after the mark, with release, and taken with acquire: a copier that
//! takes it finds the mark. A mark that is missed costs nothing but order, since every pending chunk is
//! copied in its turn.
//!
//! Nobody sleeps for ever: a sleeper has seen the word with WANTED in it, and sleeps only while it is
//! as it was seen (that is what a futex promises); the thread that takes WANTED out of the word wakes.
//!
//! `wire/tests/chunks.rs` checks all of this in every order that a few threads can run in.

use std::ops::Range;
use std::sync::atomic::{AtomicU32, Ordering};

use Ordering::{AcqRel, Acquire, Relaxed, Release};

/// Free to be written.
const SAVED: u32 = 0;
/// Still to be copied.
const PENDING: u32 = 1;
/// A copier reads the chunk.
const COPYING: u32 = 2;
/// Set in addition to PENDING or COPYING: a launch waits for the chunk.
const WANTED: u32 = 4;

/// A word of the table: an atomic on which threads can sleep.
pub trait Word {
    /// Does what [`AtomicU32::load`] does.
    fn load(&self, order: Ordering) -> u32;
    /// Does what [`AtomicU32::store`] does.
    fn store(&self, value: u32, order: Ordering);
    /// Does what [`AtomicU32::swap`] does.
    fn swap(&self, value: u32, order: Ordering) -> u32;
    /// Does what [`AtomicU32::compare_exchange`] does.
    ///
    /// # Errors
    /// The value that the word had, if that was not `now`: it is unchanged.
    fn exchange(&self, now: u32, new: u32, success: Ordering, other: Ordering) -> Result<u32, u32>;
    /// Does what [`AtomicU32::fetch_add`] does.
    fn add(&self, value: u32, order: Ordering) -> u32;
    /// Does what [`AtomicU32::fetch_sub`] does.
    fn subtract(&self, value: u32, order: Ordering) -> u32;
    /// Sleeps while the word has this value, until it is woken or for no reason.
    fn sleep(&self, value: u32);
    /// Wakes all who sleep.
    fn wake(&self);
}

impl Word for AtomicU32 {
    fn load(&self, order: Ordering) -> u32 {
        self.load(order)
    }
    fn store(&self, value: u32, order: Ordering) {
        self.store(value, order);
    }
    fn swap(&self, value: u32, order: Ordering) -> u32 {
        self.swap(value, order)
    }
    fn exchange(&self, now: u32, new: u32, success: Ordering, other: Ordering) -> Result<u32, u32> {
        self.compare_exchange(now, new, success, other)
    }
    fn add(&self, value: u32, order: Ordering) -> u32 {
        self.fetch_add(value, order)
    }
    fn subtract(&self, value: u32, order: Ordering) -> u32 {
        self.fetch_sub(value, order)
    }
    fn sleep(&self, value: u32) {
        // The futex is not private: the other process sleeps and wakes on the same memory.
        let flags = rustix::thread::futex::Flags::empty();
        // Woken, changed in between or interrupted: the caller checks again in any case.
        let _ = rustix::thread::futex::wait(self, flags, value, None);
    }
    fn wake(&self) {
        let flags = rustix::thread::futex::Flags::empty();
        let _ = rustix::thread::futex::wake(self, flags, u32::MAX >> 1);
    }
}

/// The chunks of one range of addresses, as both sides see them.
#[derive(Debug)]
pub struct Chunks<'a, W = AtomicU32> {
    /// Not 0 if a launch waits for a chunk that nobody copies yet.
    pub wanted: &'a W,
    /// How many chunks are not saved.
    pub left: &'a W,
    /// A word for each.
    pub states: &'a [W],
}

impl<W: Word> Chunks<'_, W> {
    /// Says that a chunk is to be saved. Only before the table is handed over.
    pub fn pend(&self, chunk: usize) {
        if self.states[chunk].swap(PENDING, Relaxed) == SAVED {
            self.left.add(1, Relaxed);
        }
    }

    /// Whether all of these chunks are free to be written. What was once stays so.
    pub fn are_saved(&self, chunks: Range<usize>) -> bool {
        let saved = |word: &W| word.load(Acquire) == SAVED;
        self.left.load(Acquire) == 0 || self.states[chunks].iter().all(saved)
    }

    /// Whether a launch waits for one of them.
    pub fn are_wanted(&self) -> bool {
        self.states.iter().any(|word| word.load(Relaxed) & WANTED != 0)
    }

    /// Asks for a chunk to be saved soon. `false` if it is.
    pub fn want(&self, chunk: usize) -> bool {
        let word = &self.states[chunk];
        let mut state = word.load(Acquire);
        while state != SAVED && state & WANTED == 0 {
            match word.exchange(state, state | WANTED, Relaxed, Acquire) {
                Ok(_) => {
                    self.wanted.store(1, Release);
                    return true;
                }
                Err(other) => state = other,
            }
        }
        state != SAVED
    }

    /// Sleeps until a chunk is free to be written.
    pub fn wait(&self, chunk: usize) {
        while self.want(chunk) {
            let word = &self.states[chunk];
            let state = word.load(Acquire);
            if state & WANTED != 0 {
                word.sleep(state);
            }
        }
    }

    /// Takes a pending chunk, to read its bytes. `false` if it is not pending.
    pub fn claim(&self, chunk: usize) -> bool {
        let word = &self.states[chunk];
        let mut state = word.load(Relaxed);
        while state & PENDING != 0 {
            match word.exchange(state, state ^ (PENDING | COPYING), Acquire, Relaxed) {
                Ok(_) => return true,
                Err(other) => state = other,
            }
        }
        false
    }

    /// Claims a pending chunk that a launch waits for.
    pub fn claim_wanted(&self) -> Option<usize> {
        if self.wanted.load(Relaxed) == 0 || self.wanted.swap(0, Acquire) == 0 {
            return None;
        }
        let wanted = |chunk: &usize| self.states[*chunk].load(Relaxed) == PENDING | WANTED;
        let found = (0..self.states.len()).filter(wanted).find(|chunk| self.claim(*chunk));
        if found.is_some() {
            // There may be more.
            self.wanted.store(1, Relaxed);
        }
        found
    }

    /// The bytes of a claimed chunk have been read. `false` if the table was ended meanwhile: then
    /// they may have changed while they were read.
    pub fn finish(&self, chunk: usize) -> bool {
        let before = self.states[chunk].swap(SAVED, Release);
        self.after(chunk, before);
        before & COPYING != 0
    }

    /// Makes all chunks free to be written, saved or not.
    pub fn end(&self) {
        for chunk in 0..self.states.len() {
            let before = self.states[chunk].swap(SAVED, AcqRel);
            self.after(chunk, before);
        }
    }

    /// After a chunk has become SAVED from `before`.
    fn after(&self, chunk: usize, before: u32) {
        if before != SAVED {
            self.left.subtract(1, Release);
        }
        if before & WANTED != 0 {
            self.states[chunk].wake();
        }
    }
}
