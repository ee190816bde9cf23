//! The destination's side: from an offer to a restored program.
//!
//! Up to the moment at which the source is told that all is prepared, every failure leaves nothing here. From then on
//! the image stays until it is known who owns the program.

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use super::arriving::{self, Arrived};
use super::greeting::{check_hello, hello};
use super::link::{Link, LinkError, Pulse, unexpected_message};
use super::message::{Frame, Message, Step};
use super::placing::Coming;
use super::received::{ReceiveFailure, Received, Remains, steps};
use super::record::{Brought, MigrationId, Record, RelayedEnds, Restore, Side, State, noted};
use super::relayed::Relayed;
use crate::base::clock::Clock;
use crate::base::faults::fault;
use crate::base::format::{hex, milliseconds};
use crate::base::phase::Phase;
use crate::base::progress::Progress;
use crate::engine::error::Error;
use crate::engine::restore::FilePolicy;
use crate::engine::restore::ahead::Ahead;
use crate::engine::restore::lacks;
use crate::engine::watchdog::Watchdog;
use crate::image::trust;
use crate::image::{self, Manifest};

mod offer;
mod wanted;

use self::offer::Taken;
pub use self::wanted::{Incoming, Place};

/// How long a source that hears nothing any more may take for what it has to say.
const LAST_WORD: Duration = Duration::from_secs(1);

/// Takes one program.
///
/// # Errors
/// See [`ReceiveFailure::remains`] for what holds then.
pub fn receive(
    link: Link,
    wishes: &Incoming,
    progress: &dyn Progress,
    restore: &mut dyn Restore,
) -> Result<Received, ReceiveFailure> {
    let link = Arc::new(link);
    let clock = Clock::start(progress);
    let remains = Remains::Nothing;
    let link_too = link.clone();
    let mut task =
        Task { link: link_too, wishes, clock, watchdog: None, chunks: 0, ahead_bytes: 0, remains };
    let received = task.run(restore);
    if received.is_err() {
        restore.give_up();
    }
    // Where this process lives to see it, nothing is left for it to remove.
    task.watchdog.take().into_iter().for_each(Watchdog::done);
    received.map_err(|error| {
        if task.remains == Remains::Nothing {
            // If nobody hears it, that comes to the same.
            let _ = link.send_regardless(&Message::Failed { why: error.to_string() });
        }
        let Task { clock, remains, .. } = task;
        ReceiveFailure { phase: clock.phase(), error: Box::new(error), remains }
    })
}

struct Task<'t> {
    link: Arc<Link>,
    wishes: &'t Incoming,
    clock: Clock<'t>,
    /// Removes an unfinished image if this process dies.
    watchdog: Option<Watchdog>,
    chunks: u64,
    ahead_bytes: u64,
    remains: Remains,
}

/// An image that is complete.
struct Prepared {
    record: Record,
    path: PathBuf,
    identity: [u8; 32],
    new_bytes: u64,
    /// Whether the processes are there and wait.
    waits: bool,
}

/// How a program is brought back whose image is complete.
struct Bringing<'b> {
    id: MigrationId,
    path: &'b Path,
    /// Ids of all its threads.
    threads: Vec<u32>,
    coming: Option<&'b Coming>,
    /// Its device memory, as far as that has come.
    ahead: Option<Ahead>,
    /// Bytes of it.
    loaded: u64,
    same_pids: bool,
    /// Whether its processes are made before the source decides.
    makes: bool,
}

impl Task<'_> {
    fn run(&mut self, restore: &mut dyn Restore) -> Result<Received, Error> {
        self.clock.enter(Phase::Offer, None)?;
        let greeting = self.link.receive_message()?;
        self.link.send(&hello())?;
        check_hello(greeting)?;
        let _pulse = Pulse::start(self.link.clone());
        let mut taken = offer::take(&self.link, self.wishes, &mut self.watchdog)?;
        if taken.dry_run {
            taken.accept(&self.link)?;
            return Ok(self.received(taken.id, None, None));
        }
        taken.accept(&self.link)?;
        let record = self.begin_record(&taken)?;
        if self.makes_ahead(&taken) && !record.new_pids && taken.relayed.is_none() {
            restore.stand_by(&record, &taken.driver);
        }
        self.clock.enter(Phase::Receive, None)?;
        let (ahead, door) = (taken.ahead.take(), taken.door.take());
        let arrived = arriving::receive(&self.link, &taken.writer, ahead, door.as_ref());
        let arrived = arrived.map_err(|error| self.last_word(error));
        let Arrived { body, message, chunks, ahead } = match arrived {
            Ok(arrived) => arrived,
            Err(error) => {
                if !matches!(error, Error::Link(LinkError::Protocol(_)))
                    && let Err(error) = taken.writer.leave_chunks()
                {
                    tracing::info!(%error, "what was received is not kept for another attempt");
                }
                return Err(error);
            }
        };
        (self.chunks, taken.ahead) = (chunks, ahead);
        self.clock.enter(Phase::Prepare, None)?;
        let id = taken.id;
        let prepared = self.prepare((taken, record), &body, message, restore)?;
        self.settle(id, prepared, restore)
    }

    /// Where a stream has ended the source may have said why.
    fn last_word(&self, error: Error) -> Error {
        if !matches!(error, Error::Link(LinkError::Closed | LinkError::Stream(_))) {
            return error;
        }
        self.link.limit(Some(LAST_WORD));
        let said = loop {
            match self.link.receive() {
                Ok(Frame::Message(Message::Abort { why })) => break Error::GivenUp { why },
                Ok(_) => {}
                Err(_) => break error,
            }
        };
        self.link.limit(None);
        said
    }

    /// What is noted of the program that comes, as far as it is known from the offer.
    fn begin_record(&self, taken: &Taken) -> Result<Record, Error> {
        let path = taken.destination.path();
        let path = std::path::absolute(&path).map_err(|source| Error::Io {
            what: format!("cannot make {} absolute", path.display()),
            source,
        })?;
        let mut record = Record::new(taken.id, Side::Destination, State::Preparing);
        record.image = Some(path);
        record.new_pids = self.wishes.new_pids;
        record.device_map.clone_from(&self.wishes.device_map);
        Ok(record)
    }

    /// Whether its processes can be made before the source decides: the program itself has its pids and addresses, where
    /// these are one for both sides.
    fn makes_ahead(&self, taken: &Taken) -> bool {
        !taken.same_network && (!taken.same_pids || self.wishes.new_pids)
    }

    /// The phase `prepare`: completes the image, and checks that the program can be restored from it. `record` is what is
    /// to be noted of it.
    fn prepare(
        &mut self,
        (taken, mut record): (Taken, Record),
        body: &[u8],
        message: Message,
        restore: &mut dyn Restore,
    ) -> Result<Prepared, Error> {
        let Message::Manifest { id, version, signatures } = message else {
            return Err(unexpected_message(message).into());
        };
        let bad = |what: &str| LinkError::Protocol(format!("its manifest: {what}"));
        let manifest = Manifest::decode(version, body).map_err(bad)?;
        if manifest.written_identity() != Ok(id) {
            return Err(bad("it does not have the identity that it should have").into());
        }
        if signatures.len() as u64 > trust::LARGEST {
            return Err(bad("it has too many signatures").into());
        }
        self.wishes.trust.check(&id, &signatures)?;
        let path = record.image.clone().ok_or(Error::CopyIncomplete)?;
        let makes = self.makes_ahead(&taken);
        let coming = Coming::of(&manifest, &self.wishes.files_below)?;
        record.streams = Relayed::of_coming(taken.relayed, &manifest, self.wishes.outputs.named())?;
        record.outputs = noted(&self.wishes.outputs);
        record.relays = taken.relayed.is_some();
        record.files = coming.as_ref().map(Coming::to_note).unwrap_or_default();
        record.write()?;
        tracing::debug!("preparations are noted");
        let Taken { id, mut writer, same_pids, ahead, .. } = taken;
        writer.set_signatures(signatures);
        let mut is_there = false;
        let loaded = ahead.as_ref().map_or(0, |ahead| ahead.loaded_for(&manifest));
        let completed = writer.commit(&manifest).map_err(Error::from);
        let prepared = completed.and_then(|committed| {
            is_there = true;
            tracing::debug!("the image is complete");
            let coming = coming.as_ref();
            let threads = manifest.thread_ids();
            let bringing =
                Bringing { id, path: &path, threads, coming, ahead, loaded, same_pids, makes };
            self.bring(&mut record, bringing, restore)?;
            record.enter(State::Prepared)?;
            let (record, path) = (record.clone(), path.clone());
            let (identity, new_bytes) = (committed.id, committed.new_bytes);
            Ok(Prepared { record, path, identity, new_bytes, waits: makes })
        });
        prepared.inspect_err(|_| {
            restore.give_up();
            if is_there {
                forget(&record, &path);
            } else {
                // What is at that place now, if anything is, is not of this migration.
                forget_record(&record);
            }
        })
    }

    /// Has host and image checked, loads what is left of the device memory meanwhile, and has the processes made. In the end
    /// whatever has loaded has given up its contexts: the program needs the room.
    fn bring(
        &mut self,
        record: &mut Record,
        bringing: Bringing<'_>,
        restore: &mut dyn Restore,
    ) -> Result<(), Error> {
        let Bringing { id, path, threads, coming, ahead, loaded, same_pids, makes } = bringing;
        let is_awaited = ahead.is_some();
        let (sender, finished) = crossbeam_channel::bounded(1);
        std::thread::scope(|scope| {
            if let Some(mut ahead) = ahead {
                scope.spawn(move || {
                    // If nobody takes it the migration has failed.
                    let _ = sender.send(ahead.finish(path));
                    drop(ahead);
                    tracing::debug!("the contexts for device memory are given up");
                });
            }
            let files = self.place_files(record, coming, path)?;
            // A restore that is made now checks the same.
            if !makes || files != FilePolicy::default() {
                let device_map = self.wishes.mapped_devices()?;
                let how = self.wishes.circumstances(&device_map, same_pids);
                lacks::check_image(path, &self.wishes.trust, how, files, loaded)?;
                tracing::debug!("the image is checked");
            }
            self.relay(record, id, restore)?;
            let not_back = |why| Error::NotBack { why };
            if makes {
                restore.begin(record, &threads, is_awaited).map_err(not_back)?;
            }
            if is_awaited {
                let memory = finished.recv().map_err(|_| Error::CopyIncomplete)??;
                tracing::debug!("all device memory is loaded");
                if let Some((memory, bytes)) = memory {
                    self.ahead_bytes = bytes;
                    fault("loaded")?;
                    restore.give(memory);
                }
            }
            if makes {
                restore.make().map_err(not_back)?;
                fault("made")?;
            }
            Ok(())
        })
    }

    /// Has the program get streams that lead to a process of their own, if that is needed.
    fn relay(
        &self,
        record: &Record,
        id: MigrationId,
        restore: &mut dyn Restore,
    ) -> Result<(), Error> {
        let Some(streams) = record.streams else { return Ok(()) };
        let link = record.relays.then(|| self.link.ends()).transpose();
        let link = link
            .map_err(|source| Error::Io { what: "the link cannot be handed on".into(), source })?;
        let (silence, keeps) = (self.link.silence(), record.relays);
        let ends = RelayedEnds { id, streams, link, silence, keeps };
        restore.relay(ends).map_err(|why| Error::NotRelayed { why })
    }

    /// Makes the files that have come along. Gives what is done about others that are not as they were.
    fn place_files(
        &self,
        record: &mut Record,
        coming: Option<&Coming>,
        path: &Path,
    ) -> Result<FilePolicy, Error> {
        fault("completed")?;
        let Some(coming) = coming else { return Ok(FilePolicy::default()) };
        let (hidden, made) = coming.write(path, &record.id)?;
        record.files = made;
        record.write()?;
        hidden.show()?;
        // Whoever has files sent wants to go on with those, and not with a log that lacks a part.
        Ok(FilePolicy::Strict)
    }

    /// The phases `decide` and `handover`: waits for the source's decision, and restores the program.
    fn settle(
        &mut self,
        id: MigrationId,
        prepared: Prepared,
        restore: &mut dyn Restore,
    ) -> Result<Received, Error> {
        let Prepared { mut record, path, identity, new_bytes, waits } = prepared;
        let image = path.to_string_lossy().into_owned();
        if let Err(error) = self.link.send_regardless(&Message::Prepared { image, waits }) {
            // Not all of it went out, so the source cannot have decided. It may have said why before it went.
            restore.give_up();
            forget(&record, &path);
            self.link.limit(Some(LAST_WORD));
            return Err(match self.link.receive_message() {
                Ok(Message::Abort { why }) => Error::GivenUp { why },
                _ => error.into(),
            });
        }
        self.remains = Remains::InDoubt(id, path.clone());
        self.clock.enter(Phase::Decide, None)?;
        match self.link.receive_message()? {
            Message::Commit {} => record.enter(State::Taken)?,
            Message::Abort { why } => {
                restore.give_up();
                forget(&record, &path);
                self.remains = Remains::Nothing;
                return Err(Error::GivenUp { why });
            }
            other => return Err(unexpected_message(other).into()),
        }
        self.remains = Remains::Parked(id, path.clone());
        let restored = self.restore(&mut record, restore);
        self.clock.end();
        let said = match &restored {
            Ok(brought) => Message::Running { pid: brought.pid, steps: self.steps(brought) },
            Err(error) => Message::Failed { why: error.to_string() },
        };
        if let Err(error) = self.link.send_regardless(&said) {
            tracing::warn!(%error, "the source cannot be told what happened to the program");
        }
        let Brought { pid, was_given, unread, .. } = restored?;
        if !was_given {
            self.ahead_bytes = 0;
        }
        let done = self.received(id, Some(pid), Some(path));
        let files = record.files.iter().map(|file| file.path.to_string_lossy().into_owned());
        let files = files.collect();
        Ok(Received { id: Some(hex(&identity)), files, unread, new_bytes, ..done })
    }

    fn restore(
        &mut self,
        record: &mut Record,
        restore: &mut dyn Restore,
    ) -> Result<Brought, Error> {
        self.clock.enter(Phase::Handover, None)?;
        record.restore(restore)
    }

    /// What was done here, up to now.
    fn steps(&self, brought: &Brought) -> Vec<Step> {
        let own = self.clock.times().iter().map(|phase| (phase.name.to_owned(), phase.ms));
        let restore = brought.phases.iter().cloned();
        [steps(false, own.collect()), steps(true, restore.collect())].concat()
    }

    fn received(&mut self, id: MigrationId, pid: Option<u32>, image: Option<PathBuf>) -> Received {
        self.clock.end();
        Received {
            migration: id.to_string(),
            pid,
            image,
            id: None,
            chunks: self.chunks,
            files: Vec::new(),
            unread: Vec::new(),
            new_bytes: 0,
            ahead_bytes: self.ahead_bytes,
            total_ms: milliseconds(self.clock.total()),
            phases: self.clock.times().to_vec(),
        }
    }
}

/// Removes what there is of an image that is not needed: the program is the source's.
fn forget(record: &Record, path: &Path) {
    let files = record.remove_files().map_err(|error| error.to_string());
    let image = match path.exists() {
        true => image::remove(path, true).map(drop).map_err(|error| error.to_string()),
        false => Ok(()),
    };
    match files.and(image) {
        Ok(()) => forget_record(record),
        Err(error) => tracing::error!(%error, "something is left of a migration that was given up"),
    }
}

fn forget_record(record: &Record) {
    if let Err(error) = record.remove() {
        tracing::warn!(%error, "the record of a migration that was given up could not be removed");
    }
}
