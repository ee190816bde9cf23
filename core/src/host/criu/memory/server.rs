//! What serves processes whose memory comes while they run.
//!
//! One thread serves each process: only between two reads of its userfaultfd does it copy, so what it knows of the
//! mappings is what the kernel does. Others read ahead what is to be copied next (`ahead.rs`). The kernel stops a thread that touches
//! what is missing until it is there, and one that forks, moves or gives up memory until that was heard.

use std::io;
use std::ops::Range;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::sync::mpsc::{Receiver, RecvTimeoutError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use parking_lot::Mutex;
use rustix::event::{PollFd, PollFlags, Timespec};
use rustix::io::Errno;

use super::super::pages::Extent;
use super::ahead::{Order, Read};
use super::follow::{Advice, Follower, Untold};
use super::missing::Missing;
use super::plan::{Memory, Part};
use super::stage::Stage;
use super::uffd::{Event, PAGE, Uffd, is_alive};
use crate::base::faults::{is_asked, skipped};

/// The longest time for which an event is not looked for.
const LISTEN: Duration = Duration::from_millis(1);
/// The time between two looks at how far it is.
pub(super) const LOOK_UP: Duration = Duration::from_millis(10);
/// Most processes that are served at a time: a program could fork without end.
const MOST_SERVED: usize = 512;
/// For how long it is waited until the kernel has done with a change that was heard. It is not longer, since it has
/// not done for as long as another change waits for being heard.
const SETTLING: Duration = Duration::from_millis(5);
/// For so long of that it is looked without a pause: not longer, as a program can have many that wait for changes.
const SPINNING: Duration = Duration::from_micros(200);
/// For how long a process may be changing its mappings without telling of it, while a thread of it waits for memory.
const PATIENCE: Duration = Duration::from_secs(5);

/// Keeps another descriptor of a userfaultfd for as long as the program lives, or until all memory is there: when the
/// last is closed, what is missing is zeros.
pub(crate) type Keep = Arc<dyn Fn(BorrowedFd<'_>) -> io::Result<()> + Send + Sync>;

/// What is needed for memory to come while the processes run.
pub(super) struct Late {
    pub(super) keep: Keep,
    pub(super) advice: Arc<Advice>,
}

/// Why memory cannot be brought any more. The program must be ended before the memory is dropped.
#[derive(Debug)]
pub(crate) enum OnDemandError {
    /// It is damaged or cannot be read, or the kernel does not take it.
    Io(io::Error),
    /// The program has forked and changed its mappings at the same time, and the kernel tells of that in no order, so that
    /// it is not known what the child lacks; or it has forked too often; or it has moved and enlarged locked memory: the
    /// kernel fills that before it tells that it has moved, and until that is heard nobody can fill it (`do_mremap` of
    /// Linux 6.18). Or guards, or memory that children find empty, were made of what is missing, in a way of which the
    /// kernel tells too little (`follow.rs`).
    Untold,
}

impl From<io::Error> for OnDemandError {
    fn from(error: io::Error) -> Self {
        Self::Io(error)
    }
}

impl From<Untold> for OnDemandError {
    fn from(Untold: Untold) -> Self {
        Self::Untold
    }
}

impl From<Errno> for OnDemandError {
    fn from(error: Errno) -> Self {
        Self::Io(error.into())
    }
}

/// What the threads that serve processes share.
pub(super) struct Shared {
    pub(super) stage: Arc<Stage>,
    keep: Keep,
    pub(super) advice: Arc<Advice>,
    /// Ends the conversation with CRIU when something has failed.
    wake: OwnedFd,
    pub(super) threads: Mutex<Vec<JoinHandle<()>>>,
    pub(super) failure: Mutex<Option<OnDemandError>>,
    /// Of processes that nobody can serve: open until they have been ended.
    unserved: Mutex<Vec<Uffd>>,
    /// Processes that lack memory, and those that are served.
    pub(super) lacking: AtomicUsize,
    served: AtomicUsize,
    pub(super) all: AtomicU64,
    pub(super) bytes: AtomicU64,
    pub(super) faults: AtomicU64,
}

impl Shared {
    pub(super) fn new(stage: Arc<Stage>, wake: OwnedFd, late: Late) -> Self {
        Self {
            stage,
            keep: late.keep,
            advice: late.advice,
            wake,
            threads: Mutex::default(),
            failure: Mutex::default(),
            unserved: Mutex::default(),
            lacking: AtomicUsize::new(0),
            served: AtomicUsize::new(0),
            all: AtomicU64::new(0),
            bytes: AtomicU64::new(0),
            faults: AtomicU64::new(0),
        }
    }

    /// Begins to serve a process, which is followed by `follower`.
    ///
    /// # Errors
    /// Its descriptor cannot be kept, or there is no thread for it.
    pub(super) fn serve(
        this: &Arc<Self>,
        memory: Arc<Memory>,
        uffd: Uffd,
        missing: Missing,
        follower: Follower,
    ) -> io::Result<()> {
        if let Err(error) = (this.keep)(uffd.as_fd()) {
            this.unserved.lock().push(uffd);
            return Err(error);
        }
        this.lacking.fetch_add(1, Ordering::SeqCst);
        this.served.fetch_add(1, Ordering::Relaxed);
        let shared = this.clone();
        let serve = move || {
            let mut server = Server {
                shared: &shared,
                uffd,
                order: Order::of(memory.clone()),
                memory,
                missing,
                is_child: follower.is_of_child(),
                follower,
                unsettled: None,
                waiting: Vec::new(),
                waiting_since: None,
            };
            let result = server.run();
            shared.served.fetch_sub(1, Ordering::Relaxed);
            if let Err(error) = result {
                tracing::debug!(?error, "the memory of a process cannot be brought");
                shared.failure.lock().get_or_insert(error);
                if !shared.stage.is_complete() {
                    shared.stage.end();
                    let _ = rustix::io::write(&shared.wake, &1u64.to_ne_bytes());
                }
                // The processes must not find zeros where their memory was: whoever ends them ends this.
                while !shared.stage.is_over() {
                    std::thread::sleep(LOOK_UP);
                }
            }
        };
        let thread = std::thread::Builder::new().name("gpucr-demand".into()).spawn(serve)?;
        this.threads.lock().push(thread);
        Ok(())
    }
}

/// What serves one process.
struct Server<'a> {
    shared: &'a Arc<Shared>,
    uffd: Uffd,
    memory: Arc<Memory>,
    order: Arc<Order>,
    missing: Missing,
    follower: Follower,
    /// Was forked since the restore.
    is_child: bool,
    /// The last change that was heard, if the kernel may have been at another since before that.
    unsettled: Option<Change>,
    /// Pages that threads wait for, and that could not be brought while the process was changing its mappings.
    waiting: Vec<u64>,
    /// Since when nothing else was heard.
    waiting_since: Option<Instant>,
}

/// What a process has done to memory that is missing.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Change {
    Forked,
    Moved,
}

/// What has become of a process.
#[derive(Debug, PartialEq, Eq)]
enum State {
    Lives,
    /// It has ended, or has become another program; or its memory is not wanted any more.
    Ended,
}

impl Server<'_> {
    fn run(&mut self) -> Result<(), OnDemandError> {
        let state = self.bring_all()?;
        tracing::debug!(?state, self.is_child, "the memory of a process is there");
        self.shared.lacking.fetch_sub(1, Ordering::SeqCst);
        // Where there was nothing, the kernel asks as long as somebody has a descriptor.
        while state == State::Lives && is_alive(&self.uffd) {
            if self.listen(LOOK_UP)? == State::Ended {
                break;
            }
        }
        tracing::debug!(self.is_child, "a process is not served any more");
        Ok(())
    }

    fn bring_all(&mut self) -> Result<State, OnDemandError> {
        // Until the processes run, only what CRIU itself touches: mappings may not be in their places.
        while !self.shared.stage.is_complete() {
            if self.listen(LOOK_UP)? == State::Ended {
                return Ok(State::Ended);
            }
        }
        if is_asked("fail", "untold") {
            return Err(OnDemandError::Untold);
        }
        while skipped("unwanted") && is_alive(&self.uffd) {
            if self.listen(LOOK_UP)? == State::Ended {
                return Ok(State::Ended);
            }
        }
        // A child lacks little, since what its parent has touched came first, and often becomes another program.
        if !self.is_child && self.stream()? == State::Ended {
            return Ok(State::Ended);
        }
        // What has moved.
        while let Some(extent) = self.missing.first() {
            if self.hear()? == State::Ended || self.bring(extent.to)? == State::Ended {
                return Ok(State::Ended);
            }
        }
        self.follower.check_all_heard()?;
        Ok(State::Lives)
    }

    /// Brings everything that is at its old place, and what is touched before that.
    fn stream(&mut self) -> Result<State, OnDemandError> {
        let order = self.order.clone();
        std::thread::scope(|scope| {
            let receiver = order.read_ahead(scope);
            let result = self.take(&receiver);
            order.end();
            result
        })
    }

    /// Takes what was read ahead, until that is all.
    fn take(&mut self, receiver: &Receiver<io::Result<Read>>) -> Result<State, OnDemandError> {
        loop {
            if self.hear()? == State::Ended {
                return Ok(State::Ended);
            }
            let (group, bytes) = match receiver.recv_timeout(LISTEN) {
                Ok(read) => read?,
                Err(RecvTimeoutError::Timeout) => continue,
                Err(RecvTimeoutError::Disconnected) => return Ok(State::Lives),
            };
            let content = bytes.as_deref().map_or(Part::Zeros, Part::Bytes);
            if self.put_group(group, &content)? == State::Ended {
                return Ok(State::Ended);
            }
        }
    }

    /// Copies what is missing of a part of the file, where it is at its old place: what else has come there by moving
    /// about is brought at last.
    fn put_group(&mut self, group: usize, content: &Part<'_>) -> Result<State, OnDemandError> {
        let memory = self.memory.clone();
        let pieces = memory.group(group).unwrap_or_default();
        let Some(first) = pieces.first() else { return Ok(State::Lives) };
        let part = memory.file.part(first.at);
        for piece in pieces {
            for extent in self.missing.within(piece.to..piece.to + piece.len) {
                if extent.at - piece.at == extent.to - piece.to
                    && self.put(extent, &part, content)? == State::Ended
                {
                    return Ok(State::Ended);
                }
            }
        }
        Ok(State::Lives)
    }

    /// Waits for events for a moment.
    fn listen(&mut self, moment: Duration) -> Result<State, OnDemandError> {
        let timeout = Timespec { tv_sec: 0, tv_nsec: moment.subsec_nanos().into() };
        let mut polled = [PollFd::new(&self.uffd, PollFlags::IN)];
        match rustix::event::poll(&mut polled, Some(&timeout)) {
            Ok(_) | Err(Errno::INTR) => self.hear(),
            Err(error) => Err(error.into()),
        }
    }

    /// Hears all that a process waits for, and brings what it has touched.
    fn hear(&mut self) -> Result<State, OnDemandError> {
        loop {
            if self.shared.stage.is_over() {
                return Ok(State::Ended);
            }
            match self.uffd.event()? {
                None => {
                    // A guard that is seen is known; one that is gone is not.
                    self.follow()?;
                    return self.try_again();
                }
                Some(Event::Fault(address)) => {
                    if self.answer(address)? == State::Ended {
                        return Ok(State::Ended);
                    }
                    continue;
                }
                Some(Event::Fork(child)) => {
                    if self.shared.served.load(Ordering::Relaxed) >= MOST_SERVED {
                        self.shared.unserved.lock().push(child);
                        return Err(OnDemandError::Untold);
                    }
                    let missing = match self.forked() {
                        Ok(missing) => missing,
                        Err(error) => {
                            self.shared.unserved.lock().push(child);
                            return Err(error);
                        }
                    };
                    let (memory, follower) = (self.memory.clone(), self.follower.of_child());
                    Shared::serve(self.shared, memory, child, missing, follower)?;
                }
                Some(Event::Moved { from, to, len }) => {
                    self.follow()?;
                    if self.lacks(from..from.saturating_add(len)) {
                        self.changed(Change::Moved)?;
                        self.follower.check_moved(&(to..to.saturating_add(len)))?;
                    }
                    self.missing.shift(from, to, len);
                    // It is told besides, as a part of the same change, that there is nothing left at the old place.
                }
                Some(Event::Gone { from, to }) => {
                    if self.lacks(from..to) {
                        self.changed(Change::Moved)?;
                    }
                    self.is_there(from..to);
                    self.settle();
                }
            }
            self.waiting_since = None;
        }
    }

    /// Takes note of guards that the process has made of what it lacks: that is not missing any more. It is to be done
    /// before anything is copied, so that no guard is lost, and after that, since one could be made meanwhile.
    fn follow(&mut self) -> Result<(), OnDemandError> {
        let Self { follower, missing, uffd, .. } = self;
        let guarded = follower.guarded(missing, &|| is_alive(uffd))?;
        if !guarded.is_empty() {
            self.changed(Change::Moved)?;
            for Extent { to, len, .. } in guarded {
                self.is_there(to..to + len);
                // Who had touched it before it was a guard looks again.
                self.uffd.wake(to, len)?;
            }
            self.settle();
        }
        Ok(())
    }

    /// What a child lacks that was forked just now.
    fn forked(&mut self) -> Result<Missing, OnDemandError> {
        // A guard that is heard of before this is settled may have been made before or after.
        self.changed(Change::Forked)?;
        self.follow()?;
        let lacked = self.follower.lacked_by_child(&self.missing)?;
        self.follow()?;
        self.follower.check_children(&self.missing)?;
        self.settle();
        Ok(lacked)
    }

    fn lacks(&self, addresses: Range<u64>) -> bool {
        !self.missing.within(addresses).is_empty()
    }

    /// A change of memory that is missing was heard. While the kernel is at any it lets nobody copy, so where copying is
    /// possible the next change that is told comes after this one. Otherwise it may have come before: what a child has
    /// then is not known.
    fn changed(&mut self, change: Change) -> Result<(), OnDemandError> {
        match self.unsettled.replace(change) {
            Some(before) if before != change => Err(OnDemandError::Untold),
            _ => Ok(()),
        }
    }

    /// Waits for a moment until the kernel has done with all changes.
    fn settle(&mut self) {
        let since = Instant::now();
        while self.uffd.is_changing() {
            match since.elapsed() {
                // The process may go on to its next change at once: this must not be missed by sleeping.
                elapsed if elapsed < SPINNING => std::thread::yield_now(),
                elapsed if elapsed < SETTLING => std::thread::sleep(SPINNING / 4),
                _ => return,
            }
        }
        self.unsettled = None;
    }

    /// Brings what could not be brought before.
    fn try_again(&mut self) -> Result<State, OnDemandError> {
        for page in std::mem::take(&mut self.waiting) {
            if self.answer(page)? == State::Ended {
                return Ok(State::Ended);
            }
        }
        if self.waiting.is_empty() {
            self.waiting_since = None;
        } else if self.waiting_since.get_or_insert_with(Instant::now).elapsed() > PATIENCE {
            return Err(OnDemandError::Untold);
        }
        Ok(State::Lives)
    }

    /// A thread has touched this address.
    fn answer(&mut self, address: u64) -> Result<State, OnDemandError> {
        let page = address / PAGE * PAGE;
        if self.missing.at(page).is_some() {
            self.shared.faults.fetch_add(1, Ordering::Relaxed);
            let state = self.bring(page)?;
            if self.missing.at(page).is_some() {
                self.waiting.push(page);
            }
            return Ok(state);
        }
        match self.uffd.zero(page, PAGE) {
            Ok(0) => self.waiting.push(page),
            Ok(_) => self.unsettled = None,
            Err(Errno::SRCH) => return Ok(State::Ended),
            // It has just come, or there is no such memory any more.
            Err(Errno::EXIST | Errno::NOENT) => {
                self.uffd.wake(page, PAGE)?;
            }
            Err(error) => return Err(error.into()),
        }
        Ok(State::Lives)
    }

    /// Brings what is missing at an address, with what else is in the same part of the file.
    fn bring(&mut self, address: u64) -> Result<State, OnDemandError> {
        let Some(extent) = self.missing.at(address) else { return Ok(State::Lives) };
        let at = extent.at + (address - extent.to);
        let part = self.memory.file.part(at);
        let from = extent.to + part.start.saturating_sub(extent.at);
        let end = extent.to + (part.end - extent.at).min(extent.len);
        let Some(extent) = extent.within(&(from..end)) else { return Ok(State::Lives) };
        let group = self.memory.group_of(at);
        self.order.touched(group);
        let (memory, mut buffer) = (self.memory.clone(), Vec::new());
        let content = memory.file.read(&part, &mut buffer)?;
        // The page that is waited for first.
        let first = address / PAGE * PAGE;
        let parts = [first..first + PAGE, from..first, first + PAGE..end];
        for extent in parts.iter().filter_map(|part| extent.within(part)) {
            if self.put(extent, &part, &content)? == State::Ended {
                return Ok(State::Ended);
            }
        }
        self.put_group(group, &content)
    }

    /// Copies an extent, whose bytes are in a part of the file. If the process changes its mappings meanwhile some of it
    /// may be missing still.
    fn put(
        &mut self,
        extent: Extent,
        part: &Range<u64>,
        content: &Part<'_>,
    ) -> Result<State, OnDemandError> {
        let (mut at, mut most) = (extent.to, extent.len);
        loop {
            self.follow()?;
            // Some of it may have been given up meanwhile.
            let rest = self.missing.within(at..extent.to + extent.len);
            let Some(next) = rest.first() else { break };
            let (to, len) = (next.to, most.min(next.len));
            let copied = match content {
                Part::Zeros => self.uffd.zero(to, len),
                Part::Bytes(bytes) => {
                    let from = (next.at - part.start) as usize;
                    self.uffd.copy(to, &bytes[from..from + len as usize])
                }
            };
            let copied = match copied {
                // There is an event to be heard first.
                Ok(0) => break,
                Ok(copied) => copied,
                Err(Errno::SRCH) => return Ok(State::Ended),
                // CRIU has not registered it yet.
                Err(Errno::NOENT) if !self.shared.stage.is_complete() => break,
                // It may lie in several mappings by now: nobody tells that one was cut.
                Err(Errno::NOENT) if len > PAGE => {
                    most = (len / 2).next_multiple_of(PAGE);
                    continue;
                }
                // A child may have none that its parent had when it was made.
                Err(Errno::NOENT) if self.is_child => len,
                Err(error) => return Err(error.into()),
            };
            self.unsettled = None;
            self.follow()?;
            self.is_there(to..to + copied);
            at = to + copied;
        }
        Ok(State::Lives)
    }

    /// Is not missing any more.
    fn is_there(&mut self, addresses: Range<u64>) {
        let bytes: u64 = self.missing.remove(addresses).iter().map(|extent| extent.len).sum();
        // What children lack is not counted, as they make the sum larger than the image.
        if !self.is_child {
            self.shared.bytes.fetch_add(bytes, Ordering::Relaxed);
        }
    }
}
