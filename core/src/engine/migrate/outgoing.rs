//! The source's side of the link, as a dump sees it: who takes the image in the place of a disk.
//!
//! Chunks are put from many threads. One thread of its own takes what they have put, asks the other side which of it
//! is lacking, and sends that.

use std::collections::HashSet;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use crossbeam_channel::{Receiver, Sender};
use parking_lot::Mutex;
use rustix::process::{Pid, getsid};

use self::layout::Told;
use self::sending::{Item, QUEUE, Sending, Shared};
use super::cpu;
use super::fit::private_memory;
use super::goal::Goal;
use super::greeting::{check_hello, hello, named, namespace};
use super::link::{LOOK, Link, LinkError, unexpected_message};
use super::message::{MAX_STEPS, Message, Step, offered};
use super::record::{MigrationId, Record, Side, State};
use super::relay::Ends;
use super::relayed::Relayed;
use super::safety::SafetyImage;
use super::streams::{Streams, Wanted, Way};
use crate::base::faults::fault;
use crate::base::format::milliseconds;
use crate::base::progress::Pass;
use crate::base::threads::joined;
use crate::base::timeline::{Timeline, Track};
use crate::engine::error::Error;
use crate::engine::memory::Laid;
use crate::host::network::NetworkNamespace;
use crate::host::process::ProcessInfo;
use crate::image::trust::PrivateKey;
use crate::image::{Committed, ImageError, Manifest, Recipient, Written};
use crate::store::{ChunkId, ChunkSink, Compression, Entry, MAX_CHUNK, Stats, StoreError};

mod files;
mod layout;
mod sending;
mod standard;
#[cfg(test)]
mod tests;

/// So many characters of the name of a step are shown.
const MAX_NAME: usize = 40;

/// How a program goes: see [`Wishes`](super::Wishes), which has all that is wanted.
pub(super) struct Terms {
    pub(super) compression: Compression,
    pub(super) max_stopped: Duration,
    /// How long the other side may take for its first word, besides the time for which it may be silent.
    pub(super) patience: Duration,
    pub(super) goal: Option<Goal>,
    pub(super) streams: Option<Wanted>,
    pub(super) copies_files: bool,
    pub(super) tight_disk: bool,
    pub(super) relays: bool,
}

/// The other side.
pub struct Outgoing {
    link: Arc<Link>,
    id: MigrationId,
    /// How long the program may stand still.
    max_stopped: Duration,
    goal: Option<Goal>,
    state: Arc<Shared>,
    /// To the thread that sends; `None` once it is to end.
    queue: Mutex<Option<Sender<Item>>>,
    record: Mutex<Record>,
    /// Since when the program stands still.
    since: Mutex<Option<Instant>>,
    /// Where the image is on the other side, and whether the processes are there and wait.
    prepared: Mutex<Option<(String, bool)>>,
    /// Whether the other side was told of the decision.
    is_told: AtomicBool,
    /// What the other side knows of where memory belongs.
    told: Mutex<Told>,
    /// Connections besides the link.
    streams: Option<Wanted>,
    /// Whether files go along.
    copies_files: bool,
    /// Whether it goes though the other side may have too little space for its image.
    tight_disk: bool,
    /// Whether its standard streams are relayed.
    relays: bool,
    /// The ends of these, if they are.
    ends: Mutex<Option<Ends>>,
    /// Outputs of the program that nobody reads there.
    unread: Mutex<Vec<&'static str>>,
    /// Those of the offer that the other side has.
    files_there: Mutex<HashSet<PathBuf>>,
    /// Gets all that is sent too.
    safety: Option<SafetyImage>,
}

impl std::fmt::Debug for Outgoing {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Outgoing({})", self.id)
    }
}

impl Outgoing {
    /// Greets the other side, which must be of the same version of the protocol.
    ///
    /// # Errors
    /// It is not, or the link is lost.
    pub(super) fn greet(
        link: Arc<Link>,
        terms: Terms,
        safety: Option<SafetyImage>,
    ) -> Result<Self, Error> {
        let id = MigrationId::random()
            .map_err(|source| Error::Io { what: "the system has no randomness".into(), source })?;
        let sent = link.send(&hello());
        // One that has ended may have said something before.
        let greeting = link.receive_greeting(terms.patience)?;
        sent?;
        check_hello(greeting)?;
        let state = Arc::new(Shared::default());
        let (sender, queue) = crossbeam_channel::bounded(QUEUE);
        let pool = rayon::ThreadPoolBuilder::new().build().map_err(|error| Error::Io {
            what: "cannot start threads".into(),
            source: std::io::Error::other(error),
        })?;
        let compression = terms.compression;
        let sending = Sending { link: link.clone(), state: state.clone(), compression, pool };
        std::thread::spawn(move || sending.run(&queue));
        Ok(Self {
            link,
            id,
            max_stopped: terms.max_stopped,
            goal: terms.goal,
            state,
            queue: Mutex::new(Some(sender)),
            record: Mutex::new(Record::new(id, Side::Source, State::Undecided)),
            since: Mutex::default(),
            prepared: Mutex::default(),
            is_told: AtomicBool::default(),
            told: Mutex::default(),
            streams: terms.streams,
            copies_files: terms.copies_files,
            tight_disk: terms.tight_disk,
            relays: terms.relays,
            ends: Mutex::default(),
            unread: Mutex::default(),
            files_there: Mutex::default(),
            safety,
        })
    }

    /// The migration's name.
    pub(super) fn id(&self) -> MigrationId {
        self.id
    }

    /// The process that carries what is sent, if this one has started it.
    pub(crate) fn helper(&self) -> Option<u32> {
        self.link.helper()
    }

    /// Where this side notes what it has decided.
    pub(crate) fn record_path(&self) -> PathBuf {
        self.record.lock().path()
    }

    /// Where the image is that this side keeps, complete or not.
    pub(crate) fn safety_path(&self) -> Option<&Path> {
        self.safety.as_ref().map(SafetyImage::path)
    }

    /// Begins that image, if there is to be one.
    ///
    /// # Errors
    /// It cannot be made.
    pub(crate) fn begin_safety_image(&self) -> Result<(), ImageError> {
        self.safety.as_ref().map_or(Ok(()), SafetyImage::begin)
    }

    /// Where it is, if it is complete.
    pub(super) fn complete_safety_image(&self) -> Option<PathBuf> {
        let complete = self.safety.as_ref().filter(|image| image.is_complete());
        complete.map(|image| image.path().to_owned())
    }

    /// The image that this side keeps is not needed: the program runs, here or there.
    pub(super) fn remove_safety_image(&self) {
        self.safety.iter().for_each(SafetyImage::remove);
    }

    /// Where the image is on the other side, once it is complete there.
    pub(crate) fn image(&self) -> String {
        self.prepared.lock().clone().unwrap_or_default().0
    }

    /// For how long the program has not run anywhere by now.
    pub(super) fn downtime(&self) -> Duration {
        self.since.lock().map_or(Duration::ZERO, |since| since.elapsed())
    }

    /// Chunks that were sent, and those that the other side had.
    pub(super) fn chunks(&self) -> (u64, u64) {
        let known = self.state.known.lock();
        (known.sent, known.there)
    }

    /// The phase `offer`: asks whether the program can go on there. `outline` is its manifest without memory and files,
    /// and `network` where it has its network. Nothing is changed on either side.
    ///
    /// # Errors
    /// [`Error::Refused`] with all that is in the way; or the link is lost.
    pub(crate) fn offer(
        &self,
        outline: &Manifest,
        network: &NetworkNamespace,
        signer: Option<&PrivateKey>,
        dry_run: bool,
    ) -> Result<(), Error> {
        let cannot = |what: &str| Error::Damaged { what: what.into() };
        let relayed = self.hold_streams(outline)?;
        let (version, body) = outline.body().map_err(cannot)?;
        self.link.send_long(&body)?;
        let (pids, network, cpu) = (namespace("pid"), named(&network.name()), cpu::features());
        let id = self.id.0;
        let sign = |key: &PrivateKey| key.sign_offer(&offered(&id, version, &body));
        let signatures = signer.map(sign).unwrap_or_default();
        let streams = self.streams.as_ref().map_or(0, |wanted| wanted.count);
        let host_memory = private_memory(outline.processes.iter().map(|process| process.pid));
        let offer = Message::Offer {
            id,
            dry_run,
            pids,
            network,
            version,
            cpu,
            signatures,
            streams,
            host_memory,
            tight_disk: self.tight_disk,
            relay: Relayed::to_wire(relayed),
            leads: leads_its_session(outline),
        };
        self.link.send(&offer)?;
        match self.link.receive_message()? {
            Message::Accept { there, port, token, key, outputs } => {
                self.note_unread(outline, outputs)?;
                self.take_answer(outline, &there)?;
                let wanted = self.streams.as_ref().filter(|_| !dry_run);
                let Some(wanted) = wanted else { return Ok(()) };
                let no_port = |_| LinkError::Protocol("it names no port".into());
                let port = u16::try_from(port).map_err(no_port)?;
                let streams = Streams::connect(&self.link, wanted, &Way { port, token, key })?;
                _ = self.state.streams.set(streams);
                Ok(())
            }
            Message::Refuse { reasons } => Err(Error::Refused { reasons }),
            other => Err(unexpected_message(other).into()),
        }
    }

    /// How much of the memory goes over in the time for which the program may stand still because of that. `None` if
    /// nobody has said for how long, or the rate is not known.
    pub(crate) fn little(&self) -> Option<u64> {
        Some((self.state.meter.rate()? * self.goal?.max_downtime.as_secs_f64()) as u64)
    }

    /// How it gets on: `left` bytes are left, and so many change in a second.
    pub(crate) fn progress(&self, pass: u32, left: u64, written_per_s: f64) -> Pass {
        Pass {
            pass,
            sent_bytes: self.link.sent(),
            left_bytes: left,
            bytes_per_s: self.state.meter.rate(),
            written_per_s,
            downtime_ms: self.state.meter.takes(left).map(milliseconds),
        }
    }

    /// After the last pass: whether the program is to be stopped with so many bytes left.
    ///
    /// # Errors
    /// [`Error::TooFast`] if it is not.
    pub(crate) fn check_left(&self, left: u64) -> Result<(), Error> {
        match (self.goal, self.state.meter.takes(left)) {
            (Some(goal), Some(takes)) => goal.check(left, takes),
            _ => Ok(()),
        }
    }

    /// Tells the other side what is in which block of the programs' device memory, as far as it does not know. `pid`
    /// gives the pid of a program by its number.
    ///
    /// # Errors
    /// The link is lost, or the other side does not take it.
    pub(crate) fn lay_out(&self, laid: Vec<Laid>, pid: impl Fn(usize) -> u32) -> Result<(), Error> {
        let messages = self.told.lock().messages(laid, pid);
        messages.into_iter().try_for_each(|message| Ok(self.give(Item::Say(message))?))
    }

    /// Waits until the other side has received all that was put, and it is synced in the image that this side keeps.
    ///
    /// # Errors
    /// The link is lost, the other side does not take it, or the image cannot be written.
    pub(crate) fn arrive(&self) -> Result<(), Error> {
        self.safety.as_ref().map_or(Ok(()), SafetyImage::sync)?;
        Ok(self.flush()?)
    }

    /// The program stands still from now on.
    pub(crate) fn stopped(&self) {
        *self.since.lock() = Some(Instant::now());
        tracing::debug!(sent = self.link.sent(), "the program stands still");
        self.link.limit(Some(self.max_stopped));
    }

    /// The phase `decide`: from here on the program belongs to the other side, whatever happens. Its processes, which
    /// CRIU has frozen, do not run any more even if whoever holds them dies.
    ///
    /// # Errors
    /// Nothing is decided; the processes run on when they are let go of.
    pub(crate) fn decide<'p, I: Iterator<Item = &'p ProcessInfo>>(
        &self,
        processes: impl Fn() -> I,
    ) -> Result<(), Error> {
        self.check_streams(processes())?;
        tracing::debug!("its streams are what they were");
        let mut record = self.record.lock();
        record.note(processes());
        // Whoever finds them stopped finds here why.
        record.enter(State::Undecided)?;
        tracing::debug!("the decision is about to be made");
        processes().for_each(ProcessInfo::suspend);
        let suspended = fault("suspended").map_err(Error::from);
        let decided = suspended.and_then(|()| Ok(record.enter(State::HandedOver)?));
        if let Err(error) = decided {
            if let Err(error) = record.remove() {
                tracing::error!(%error, "the record of a decision that was not made could not be removed");
            }
            processes().for_each(ProcessInfo::go_on);
            return Err(error);
        }
        tracing::debug!("the program is handed over");
        // Nothing can fail any more.
        let _ = fault("decided");
        if self.prepared.lock().as_ref().is_some_and(|(_, waits)| *waits) {
            // A process that was killed makes no further step, though its end may take its time, of which those that wait
            // need nothing.
            processes().for_each(ProcessInfo::kill);
            if let Err(error) = self.commit() {
                tracing::warn!(%error, "the destination cannot be told of the decision");
            }
        }
        Ok(())
    }

    /// Tells the other side of the decision, once.
    fn commit(&self) -> Result<(), LinkError> {
        self.link.limit(None);
        if !self.is_told.load(Ordering::Relaxed) {
            self.link.send_regardless(&Message::Commit {})?;
            self.is_told.store(true, Ordering::Relaxed);
        }
        Ok(())
    }

    /// Tells the other side that the program stays here.
    pub(super) fn abort(&self, why: &Error) {
        self.queue.lock().take();
        self.link.limit(None);
        // If nobody hears it, that comes to the same.
        let _ = self.link.send_regardless(&Message::Abort { why: why.to_string() });
        let _ = self.record.lock().remove();
    }

    /// The phase `handover`: the program exists here no more, and the other side is told so if it does not know. Gives the
    /// program's pid there.
    ///
    /// # Errors
    /// The program was not brought back there, or that is not known. The other side has a complete image.
    pub(super) fn hand_over(&self, timeline: &Timeline) -> Result<u32, Error> {
        self.queue.lock().take();
        self.commit()?;
        match self.link.receive_message()? {
            Message::Running { pid, steps } => {
                draw(&steps, timeline);
                if let Err(error) = self.record.lock().remove() {
                    tracing::warn!(%error, "the record of the migration could not be removed");
                }
                Ok(pid)
            }
            other => Err(unexpected_message(other).into()),
        }
    }

    fn give(&self, item: Item) -> Result<(), StoreError> {
        let queue = self.queue.lock().clone();
        let given = queue.is_some_and(|queue| queue.send(item).is_ok());
        if given { Ok(()) } else { Err(self.failure()) }
    }

    fn failure(&self) -> StoreError {
        match &*self.state.failure.lock() {
            Some(error) => not_taken(error),
            None => StoreError::NotTaken { what: "it is over".into() },
        }
    }

    /// Waits until all that was put has arrived.
    fn flush(&self) -> Result<(), StoreError> {
        let (done, flushed) = crossbeam_channel::bounded(1);
        self.give(Item::Flush(done))?;
        if self.is_answered(&flushed) { Ok(()) } else { Err(self.failure()) }
    }

    /// Waits for an answer of the thread that sends; there is none if it ends before.
    fn is_answered(&self, answer: &Receiver<()>) -> bool {
        loop {
            match answer.recv_timeout(LOOK) {
                Ok(()) => return true,
                // It is about to end, and has yet to say why.
                Err(error) if error.is_disconnected() => {
                    while !self.state.is_over.load(Ordering::Acquire) {
                        std::thread::yield_now();
                    }
                    return false;
                }
                // What was not taken from the queue is answered by nobody.
                Err(_) if self.state.is_over.load(Ordering::Acquire) => {
                    return answer.try_recv().is_ok();
                }
                Err(_) => {}
            }
        }
    }

    fn take(&self, image: &Written) -> Result<(), LinkError> {
        self.link.send_long(&image.body)?;
        let Written { id, version, signatures, .. } = image;
        let (id, version, signatures) = (*id, *version, signatures.clone());
        self.link.send(&Message::Manifest { id, version, signatures })?;
        match self.link.receive_message()? {
            Message::Prepared { image, waits } => {
                *self.prepared.lock() = Some((image, waits));
                Ok(())
            }
            other => Err(unexpected_message(other)),
        }
    }
}

/// Puts what the other side did, which it has just said, into the timeline of this side.
fn draw(steps: &[Step], timeline: &Timeline) {
    let now = Instant::now();
    for Step { name, restores, ago, length } in steps.iter().take(MAX_STEPS) {
        let track = if *restores { Track::RestoreThere } else { Track::There };
        let name: String = name.chars().take(MAX_NAME).collect();
        let begun = now.checked_sub(Duration::from_micros(*ago));
        // What it says cannot be right otherwise.
        if let Some(begun) = begun.filter(|_| length <= ago) {
            timeline.lasted(track, name, begun, Duration::from_micros(*length));
        }
    }
}

/// What has become of something that was to be sent.
/// Whether the program leads its session: then it can have a terminal in a pid namespace of its own.
fn leads_its_session(outline: &Manifest) -> bool {
    let root = outline.processes.first().and_then(|process| Pid::from_raw(process.pid as i32));
    root.is_some_and(|root| getsid(Some(root)) == Ok(root))
}

fn not_taken(error: &LinkError) -> StoreError {
    match error {
        LinkError::Interrupted => StoreError::Interrupted,
        LinkError::Refused(why) => StoreError::NotTaken { what: why.clone() },
        error => StoreError::NotTaken { what: error.to_string() },
    }
}

impl Recipient for Outgoing {
    fn sink(&self) -> &dyn ChunkSink {
        self
    }

    fn commit(&self, image: Written) -> Result<Committed, ImageError> {
        self.flush()?;
        tracing::debug!(sent = self.link.sent(), "all that was put has arrived");
        let (kept, taken) = std::thread::scope(|scope| {
            let keep = || self.safety.as_ref().map_or(Ok(()), |safety| safety.commit(&image));
            let keeping = scope.spawn(keep);
            let taken = self.take(&image);
            (joined(keeping), taken)
        });
        taken.map_err(|error| not_taken(&error))?;
        kept?;
        let known = self.state.known.lock();
        let stats = Stats { chunks: known.sent, ..Stats::default() };
        let sent = self.link.sent();
        Ok(Committed {
            id: image.id,
            stored_bytes: sent,
            new_bytes: sent,
            unneeded_bytes: 0,
            stats,
        })
    }
}

impl ChunkSink for Outgoing {
    fn contains(&self, id: &ChunkId) -> bool {
        self.state.known.lock().all.contains(id)
            && self.safety.as_ref().is_none_or(|image| image.contains(id))
    }

    fn put_hashed(&self, id: ChunkId, plain: &[u8]) -> Result<ChunkId, StoreError> {
        if plain.len() > MAX_CHUNK {
            return Err(StoreError::ChunkTooLarge { len: plain.len() });
        }
        self.safety.as_ref().map_or(Ok(()), |image| image.put(id, plain))?;
        if self.state.known.lock().all.insert(id) {
            if !self.state.room.take(plain.len(), &self.state.is_over) {
                return Err(self.failure());
            }
            self.give(Item::Chunk(id, plain.to_vec()))?;
        }
        Ok(id)
    }

    fn put_stored(&self, entry: &Entry, stored: &[u8]) -> Result<(), StoreError> {
        let mut plain = Vec::new();
        let decoded = crate::store::decode_stored(entry, stored, &mut plain);
        decoded.map_err(|what| StoreError::NotTaken { what: what.to_owned() })?;
        self.put_hashed(entry.id, &plain).map(drop)
    }

    fn expect(&self, ids: &mut dyn Iterator<Item = ChunkId>) {
        let unknown: Vec<ChunkId> = {
            let known = self.state.known.lock();
            ids.filter(|id| !known.all.contains(id)).collect()
        };
        if unknown.is_empty() {
            return;
        }
        let (done, answered) = crossbeam_channel::bounded(1);
        // Where that fails, so will all that follows.
        if self.give(Item::Ask(unknown, done)).is_ok() {
            self.is_answered(&answered);
        }
    }

    fn finish(self: Box<Self>) -> Result<Stats, StoreError> {
        self.flush()?;
        Ok(Stats { chunks: self.state.known.lock().sent, ..Stats::default() })
    }
}
