//! What was launched last, so that the kernel which keeps a device busy can be named.
//!
//! Each thread notes its last launches in each of a few streams, in a place of its own: a few plain stores. They
//! are looked at only when a device has not come to rest in time. The driver does not tell which launches of a
//! stream have ended, so what is named has perhaps ended too.
//!
//! Handles are noted, and looked up later; so they are forgotten before the driver is told to take away what
//! they mean, and nobody does that while they are looked up.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt::Write as _;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Mutex, MutexGuard};

use crate::abi::real;
use crate::abi::types::{ERROR_NOT_READY, STREAM_PER_THREAD};
use crate::resettable::Resettable;
use crate::state::{contexts, gate, kernels};

/// Streams of which a thread notes launches; another one takes the place of one of these.
const STREAMS: usize = 4;
/// Launches that are noted of each.
const LAUNCHES: usize = 3;
/// In place of a kernel: a graph.
pub(crate) const GRAPH: u64 = 1;
/// So many are named.
const NAMED: usize = 3;
/// Characters of a name that are given; names of C++ templates may have thousands.
const LONGEST: usize = 200;

/// What is noted of a launch.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Head {
    /// The stream as the program has named it.
    pub(crate) stream: usize,
    /// Its handle, or [`GRAPH`].
    pub(crate) kernel: usize,
}

/// The last launches in a stream, the newest first.
struct Last {
    stream: AtomicU64,
    /// 0: none.
    kernels: [AtomicU64; LAUNCHES],
}

/// What one thread has launched. A cache line of its own, and the one that the processor fetches with it.
#[repr(align(128))]
struct Place([Last; STREAMS]);

impl Last {
    const fn new() -> Self {
        Self { stream: AtomicU64::new(0), kernels: [const { AtomicU64::new(0) }; LAUNCHES] }
    }

    #[inline(always)]
    fn add(&self, stream: u64, kernel: u64) {
        let same = self.stream.load(Ordering::Relaxed) == stream;
        for newer in (0..LAUNCHES - 1).rev() {
            let before = if same { self.kernels[newer].load(Ordering::Relaxed) } else { 0 };
            self.kernels[newer + 1].store(before, Ordering::Relaxed);
        }
        self.kernels[0].store(kernel, Ordering::Relaxed);
        self.stream.store(stream, Ordering::Relaxed);
    }

    fn forget(&self) {
        self.kernels.iter().for_each(|kernel| kernel.store(0, Ordering::Relaxed));
    }
}

static LAST: [Place; gate::PLACES] =
    [const { Place([const { Last::new() }; STREAMS]) }; gate::PLACES];
/// Held while handles are looked up or forgotten.
static LOOKING: Resettable<Mutex<()>> = Resettable::new(Mutex::new(()));

fn all() -> impl Iterator<Item = &'static Last> {
    LAST.iter().flat_map(|place| &place.0)
}

fn lock() -> MutexGuard<'static, ()> {
    LOOKING.get().lock().unwrap_or_else(|poisoned| poisoned.into_inner())
}

/// This thread, which is inside the gate, launches this. `per_thread`: by one of the functions for which the stream
/// 0 means the thread's own.
#[inline(always)]
pub(crate) fn launched(head: Head, per_thread: bool) {
    let own = per_thread && head.stream == 0;
    let stream = if own { STREAM_PER_THREAD } else { head.stream as u64 };
    // The upper bits of the product depend on all of the handle's.
    let place = stream.wrapping_mul(0x9e37_79b9_7f4a_7c15) >> (u64::BITS - STREAMS.ilog2());
    LAST[gate::place()].0[place as usize].add(stream, head.kernel as u64);
}

/// Kernels are about to go, or a context and all in it.
pub(crate) fn forget() {
    let _looking = lock();
    all().for_each(Last::forget);
}

/// A stream is about to go.
pub(crate) fn forget_stream(stream: u64) {
    let _looking = lock();
    all().filter(|last| last.stream.load(Ordering::Relaxed) == stream).for_each(Last::forget);
}

/// What was launched last, while nobody takes away what the handles mean.
pub(crate) struct Looked {
    /// Streams, and the kernels there.
    launched: Vec<(u64, [u64; LAUNCHES])>,
    _looking: MutexGuard<'static, ()>,
}

/// Looks at what was launched last.
pub(crate) fn look() -> Looked {
    let _looking = lock();
    let of = |last: &Last| {
        let kernels = last.kernels.each_ref().map(|kernel| kernel.load(Ordering::Relaxed));
        (last.stream.load(Ordering::Relaxed), kernels)
    };
    let launched = all().map(of).filter(|(_, kernels)| kernels[0] != 0).collect();
    Looked { launched, _looking }
}

impl Looked {
    /// What of it went to streams that are not done yet, as the end of a message; empty if there is nothing. `remark` says
    /// more of a kernel, by its name.
    pub(crate) fn unfinished(self, remark: impl Fn(&str) -> Option<String>) -> String {
        let contexts: Vec<u64> = contexts::all().into_iter().map(|(context, _)| context).collect();
        let mut is_busy = BTreeMap::new();
        let mut names = Vec::new();
        for (stream, kernels) in &self.launched {
            if *is_busy.entry(*stream).or_insert_with(|| self::is_busy(*stream, &contexts)) {
                let noted = kernels.iter().filter(|kernel| **kernel != 0);
                names.extend(noted.map(|kernel| name(*kernel, &contexts, &remark)));
            }
        }
        said(&names)
    }
}

/// Whether a stream is not done, or one of that name in any of these contexts.
fn is_busy(stream: u64, contexts: &[u64]) -> bool {
    // The default stream of another thread cannot be asked.
    stream == STREAM_PER_THREAD
        || contexts.iter().any(|context| {
            let asked = real::with_context(*context, || {
                // SAFETY: the stream has not been destroyed: it would be forgotten.
                Ok(unsafe { real::cuStreamQuery(stream) })
            });
            asked == Ok(ERROR_NOT_READY)
        })
}

fn name(kernel: u64, contexts: &[u64], remark: &dyn Fn(&str) -> Option<String>) -> String {
    if kernel == GRAPH {
        return "a graph".to_owned();
    }
    // The driver tells it in the kernel's context.
    let mut asked = contexts.iter().map(|context| {
        real::with_context(*context, || Ok(kernels::name_of(kernel))).unwrap_or_default()
    });
    let Some(mut name) = asked.find(|name| !name.is_empty()) else {
        return "a kernel without a name".to_owned();
    };
    let remark = remark(&name).map_or_else(String::new, |remark| format!(" ({remark})"));
    if let Some((end, _)) = name.char_indices().nth(LONGEST) {
        name.truncate(end);
        name.push('…');
    }
    format!("`{name}`{remark}")
}

fn said(names: &[String]) -> String {
    let mut seen = BTreeSet::new();
    let names: Vec<&String> = names.iter().filter(|name| seen.insert(*name)).collect();
    let mut said = String::new();
    for (number, name) in names.iter().take(NAMED).enumerate() {
        let before = if number == 0 { "; launched last, and perhaps not finished: " } else { ", " };
        let _ = write!(said, "{before}{name}");
    }
    if names.len() > NAMED {
        let _ = write!(said, " and {} more", names.len() - NAMED);
    }
    said
}

/// Forgets everything, in the child of a fork.
///
/// # Safety
/// No other thread exists.
pub(crate) unsafe fn reset() {
    all().for_each(Last::forget);
    // SAFETY: the caller's duty.
    unsafe { LOOKING.reset(Mutex::new(())) };
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn of_each_stream_the_last_launches_are_noted_and_of_another_one_none() {
        let last = Last::new();
        let noted = || last.kernels.each_ref().map(|kernel| kernel.load(Ordering::Relaxed));
        for kernel in 10..15 {
            last.add(7, kernel);
        }
        assert_eq!(noted(), [14, 13, 12]);
        last.add(8, 20);
        assert_eq!(noted(), [20, 0, 0]);
        last.forget();
        assert_eq!(noted(), [0, 0, 0]);
    }

    #[test]
    fn a_few_names_are_said_each_once() {
        assert_eq!(said(&[]), "");
        let names = ["a", "b", "a", "c", "d", "e", "d"].map(str::to_owned);
        let told = said(&names);
        assert_eq!(told, "; launched last, and perhaps not finished: a, b, c and 2 more");
    }
}
