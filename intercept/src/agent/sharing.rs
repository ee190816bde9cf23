//! A program that shares memory with other instances of the image that it was restored from.
//!
//! Shared blocks are mapped so that the device only reads them. A call that may write one waits
//! ([`crate::watch::guard`]), and wakes a thread, which closes the gate for a moment, waits until the device is
//! idle, gives the block memory of its own with the same bytes, and opens the gate. So nothing outside the
//! program is needed for that. What no call admitted to write is stopped by the device: an error, and never a
//! wrong result ([`crate::watch::faults`]).
//!
//! Where that fails, for want of memory for example, the call goes on all the same: it may only have looked
//! as if it wrote.

use std::iter;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use gpucr_wire::Table;
use gpucr_wire::access::KernelSummary;

use super::{drain, signals};
use crate::abi::real::{self, check};
use crate::abi::types::ERROR_INVALID_CONTEXT;
use crate::limit::Limit;
use crate::log::log;
use crate::resettable::Resettable;
use crate::state::memory::vmm::Driver;
use crate::state::memory::{self, Failure};
use crate::state::{contexts, gate};
use crate::ungated;
use crate::watch::guard;

/// How long a call that waits is kept if the device does not become idle: it may be what the device waits
/// for.
const LIMIT: Duration = Duration::from_secs(10);

/// The thread that serves calls which wait for memory of their own.
pub(crate) struct Sharing {
    ending: Arc<AtomicBool>,
    thread: JoinHandle<()>,
}

/// Taken by a thread that moves the gate for the sake of shared memory.
static AT_WORK: Resettable<Mutex<()>> = Resettable::new(Mutex::new(()));

impl Sharing {
    /// The memory that these blocks, which are detached, get next is shared. The table has a range for each.
    ///
    /// # Errors
    /// Nothing is shared.
    pub(crate) fn begin(
        table: Table,
        blocks: Vec<u64>,
        summaries: Vec<KernelSummary>,
    ) -> Result<Self, Failure> {
        let places = memory::lock().share(&blocks)?;
        let ending = Arc::<AtomicBool>::default();
        let until = ending.clone();
        let blocked = signals::block_all();
        let thread = thread::Builder::new()
            .name("gpucr-sharing".into())
            .spawn(move || serve(&blocks, &until));
        drop(blocked);
        let thread = thread.map_err(|error| {
            let _ = memory::lock().share(&[]);
            Failure::other(format!("no thread: {error}"))
        })?;
        guard::install_shared(table, places, summaries, thread.thread().clone());
        Ok(Self { ending, thread })
    }

    /// Gives all blocks memory of their own. After that nothing is shared any more, and [`end`](Self::end) is
    /// due.
    ///
    /// # Errors
    /// Some are still shared, and calls that wait for them are served as before.
    pub(crate) fn give_up(&self, limit: Limit<'_>) -> Result<(), Failure> {
        let shared = memory::lock().shared_blocks();
        if shared.is_empty() { Ok(()) } else { own(&shared, limit, || false) }
    }

    /// Ends the thread. The gate is not moved any more when this returns.
    pub(crate) fn end(self) {
        self.ending.store(true, Ordering::Release);
        self.thread.thread().unpark();
        let _ = self.thread.join();
        guard::end();
    }
}

/// Serves calls that wait, until it is to end.
fn serve(blocks: &[u64], ending: &AtomicBool) {
    drain::tolerate_captures();
    let is_over = || ending.load(Ordering::Acquire);
    while !is_over() {
        let Some(table) = guard::shared_table() else {
            thread::park();
            continue;
        };
        let wanted: Vec<usize> =
            iter::from_fn(|| table.claim_wanted()).map(|(range, _)| range).collect();
        if wanted.is_empty() {
            thread::park();
            continue;
        }
        let ids: Vec<u64> = wanted.iter().filter_map(|range| blocks.get(*range)).copied().collect();
        if let Err(failure) = own(&ids, (Instant::now() + LIMIT).into(), is_over) {
            log!("memory stays shared: {} (error {})", failure.message, failure.code);
        }
        for range in wanted {
            table.chunks(range).finish(0);
        }
    }
}

/// Gives blocks memory of their own while the program's calls wait at the gate; nothing if that `is_over`.
///
/// # Errors
/// The first; the others are done all the same, if the device has become idle.
fn own(ids: &[u64], limit: Limit<'_>, is_over: impl Fn() -> bool) -> Result<(), Failure> {
    /// Opens the gate, even after a panic.
    struct Opens;
    impl Drop for Opens {
        fn drop(&mut self) {
            gate::open();
        }
    }
    let _alone = AT_WORK.get().lock().unwrap_or_else(|poisoned| poisoned.into_inner());
    if is_over() {
        return Ok(());
    }
    gate::close(limit)
        .map_err(|why| Failure::other(format!("the gate could not be closed: {why}")))?;
    let _opens = Opens;
    ungated::check()?;
    drain::drain(limit)?;
    let mut memory = memory::lock();
    let each = ids.iter().map(|id| memory.own(&Driver, *id, copy));
    each.fold(Ok(()), Result::and)
}

/// Makes everything as in a new process, in the child of a fork.
///
/// # Safety
/// No other thread exists.
pub(crate) unsafe fn reset() {
    // SAFETY: the caller's duty.
    unsafe { AT_WORK.reset(Mutex::new(())) };
}

/// Copies within a device, and waits for the end.
fn copy(device: i32, to: u64, from: u64, size: u64) -> Result<(), Failure> {
    let context = contexts::of_device(device).ok_or_else(|| {
        Failure::driver(ERROR_INVALID_CONTEXT, format!("there is no context on device {device}"))
    })?;
    let copied = real::with_context(context, || {
        // SAFETY: both ranges are mapped, and nothing else runs on the device.
        check(unsafe { real::cuMemcpyDtoD_v2(to, from, size as usize) })
    });
    copied
        .and_then(|()| real::synchronize(context))
        .map_err(|code| Failure::driver(code, "memory cannot be copied within the device"))
}
