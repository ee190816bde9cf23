//! A program that shares memory with other instances of the image that it was restored from.
//!
//! Shared blocks are mapped so that the device only reads them. A call that may write one waits
//! ([`crate::access::guard`]), and wakes a thread, which closes the gate for a moment, waits until the device is
//! idle, gives the block memory of its own with the same bytes, and opens the gate. So nothing outside the
//! program is needed for that. What no call admitted to write is stopped by the device: an error, and never a
//! wrong result ([`crate::access::faults`]).
//!
//! Where that fails, for want of memory for example, the call goes on all the same: it may only have looked
//! as if it wrote.

use std::iter;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use gpucr_wire::Table;
use gpucr_wire::access::Habits;

use crate::access::guard;
use crate::agent::{drain, signals};
use crate::driver::ERROR_INVALID_CONTEXT;
use crate::log::log;
use crate::memory::vmm::Driver;
use crate::memory::{self, Failure};
use crate::real::{self, check};
use crate::{contexts, gate};

/// How long a call that waits is kept if the device does not become idle: it may be what the device waits
/// for.
const LIMIT: Duration = Duration::from_secs(10);

/// The thread that serves calls which wait for memory of their own.
pub(crate) struct Sharing {
    /// Ids of the blocks, in the order of the table's ranges.
    blocks: Arc<Vec<u64>>,
    ending: Arc<AtomicBool>,
    thread: JoinHandle<()>,
}

impl Sharing {
    /// The memory that these blocks, which are detached, get next is shared. The table has a range for each.
    ///
    /// # Errors
    /// Nothing is shared.
    pub(crate) fn begin(
        table: Table,
        blocks: Vec<u64>,
        habits: Vec<Habits>,
    ) -> Result<Self, Failure> {
        let places = memory::lock().share(&blocks)?;
        let started = Self::start(Arc::new(blocks));
        let sharing = started.inspect_err(|_| _ = memory::lock().share(&[]))?;
        guard::install_shared(table, places, habits, sharing.thread.thread().clone());
        Ok(sharing)
    }

    fn start(blocks: Arc<Vec<u64>>) -> Result<Self, Failure> {
        let ending = Arc::<AtomicBool>::default();
        let (of_thread, until) = (blocks.clone(), ending.clone());
        let blocked = signals::block_all();
        let thread = thread::Builder::new()
            .name("gpucr-sharing".into())
            .spawn(move || serve(&of_thread, &until));
        drop(blocked);
        let thread = thread.map_err(|error| Failure::other(format!("no thread: {error}")))?;
        Ok(Self { blocks, ending, thread })
    }

    /// Gives all blocks memory of their own.
    ///
    /// # Errors
    /// Some are shared still, and served unless there is no thread to be had.
    pub(crate) fn end(self, deadline: Instant) -> Result<(), (Option<Self>, Failure)> {
        self.ending.store(true, Ordering::Release);
        self.thread.thread().unpark();
        // It ends whatever it is doing first.
        let _ = self.thread.join();
        let shared = memory::lock().shared_blocks();
        let owned = if shared.is_empty() { Ok(()) } else { own(&shared, deadline) };
        match owned {
            Ok(()) => {
                guard::end();
                Ok(())
            }
            Err(failure) => Err((Self::start(self.blocks).ok(), failure)),
        }
    }
}

/// Serves calls that wait, until it is to end.
fn serve(blocks: &[u64], ending: &AtomicBool) {
    drain::tolerate_captures();
    while !ending.load(Ordering::Acquire) {
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
        if let Err(failure) = own(&ids, Instant::now() + LIMIT) {
            log!("memory stays shared: {} (error {})", failure.message, failure.code);
        }
        for range in wanted {
            table.chunks(range).finish(0);
        }
    }
}

/// Gives blocks memory of their own while the program's calls wait at the gate.
///
/// # Errors
/// The first; the others are done all the same, if the device has become idle.
fn own(ids: &[u64], deadline: Instant) -> Result<(), Failure> {
    /// Opens the gate, even after a panic.
    struct Opens;
    impl Drop for Opens {
        fn drop(&mut self) {
            gate::open();
        }
    }
    gate::close(deadline)
        .map_err(|why| Failure::other(format!("the gate could not be closed: {why}")))?;
    let _opens = Opens;
    drain::drain(deadline)?;
    let mut memory = memory::lock();
    let each = ids.iter().map(|id| memory.own(&Driver, *id, copy));
    each.fold(Ok(()), Result::and)
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
