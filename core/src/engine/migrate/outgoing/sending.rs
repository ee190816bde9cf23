//! What is put is sent, by a thread of its own, as far as the other side lacks it.

use std::collections::HashSet;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, OnceLock};
use std::time::Instant;

use crossbeam_channel::{Receiver, Sender};
use parking_lot::{Condvar, Mutex};
use rayon::prelude::*;

use crate::base::threads::joined;
use crate::engine::migrate::goal::Meter;
use crate::engine::migrate::link::{LOOK, Link, LinkError, unexpected};
use crate::engine::migrate::message::{Frame, MAX_ASKED, Message};
use crate::engine::migrate::streams::Streams;
use crate::store::{ChunkId, Compression, Encoder, Encoding, Entry, MAX_CHUNK, constant_byte};

/// So many chunks wait at most: who puts more waits. Chunks of host memory are small, and each question that the other side
/// answers is about those that wait.
pub(super) const QUEUE: usize = 1024;
/// So many bytes of them wait at most.
const ROOM: usize = 32 * MAX_CHUNK;

/// What those who put chunks and the thread that sends them know.
#[derive(Default)]
pub(super) struct Shared {
    pub(super) known: Mutex<Known>,
    /// Why nothing more can be sent.
    pub(super) failure: Mutex<Option<LinkError>>,
    /// The thread that sends has ended.
    pub(super) is_over: AtomicBool,
    pub(super) meter: Meter,
    /// For chunks that wait.
    pub(super) room: Room,
    /// Where chunks go if not over the link.
    pub(super) streams: OnceLock<Streams>,
}

#[derive(Default)]
pub(super) struct Known {
    /// Chunks that were put, or that the other side has.
    pub(super) all: HashSet<ChunkId>,
    /// Chunks that the other side has been found to have, and how many were sent.
    pub(super) there: u64,
    pub(super) sent: u64,
}

/// How many bytes of chunks wait to be sent.
#[derive(Default)]
pub(super) struct Room {
    taken: Mutex<usize>,
    more: Condvar,
}

impl Room {
    /// Waits until there is room for so many bytes, and takes it. `false` if it is over before.
    pub(super) fn take(&self, bytes: usize, is_over: &AtomicBool) -> bool {
        let mut taken = self.taken.lock();
        while *taken > 0 && *taken + bytes > ROOM {
            if is_over.load(Ordering::Acquire) {
                return false;
            }
            self.more.wait_for(&mut taken, LOOK);
        }
        *taken += bytes;
        true
    }

    fn give_back(&self, bytes: usize) {
        *self.taken.lock() -= bytes;
        self.more.notify_all();
    }
}

/// What the thread that sends is given.
pub(super) enum Item {
    Chunk(ChunkId, Vec<u8>),
    Say(Message),
    /// Asks which of these the other side has.
    Ask(Vec<ChunkId>, Sender<()>),
    /// Says when all that came before has arrived.
    Flush(Sender<()>),
}

/// What the other side lacks, in the form in which it is sent.
#[derive(Default)]
struct Ready {
    frames: Vec<Vec<u8>>,
    /// Bytes of memory that are in them, but for those that take next to no time.
    bytes: u64,
}

/// The thread that sends.
pub(super) struct Sending {
    pub(super) link: Arc<Link>,
    pub(super) state: Arc<Shared>,
    pub(super) compression: Compression,
    /// Threads of its own: those of everybody may all be waiting for a place in the queue.
    pub(super) pool: rayon::ThreadPool,
}

impl Sending {
    pub(super) fn run(self, queue: &Receiver<Item>) {
        /// Says that it is over, even after a panic: others wait for that.
        struct Ends<'s>(&'s Shared);
        impl Drop for Ends<'_> {
            fn drop(&mut self) {
                self.0.is_over.store(true, Ordering::Release);
            }
        }
        let _ends = Ends(&self.state);
        if let Err(error) = self.send(queue) {
            self.state.failure.lock().get_or_insert(error);
        }
    }

    fn send(&self, queue: &Receiver<Item>) -> Result<(), LinkError> {
        let mut ready = Ready::default();
        loop {
            let first = match queue.try_recv() {
                Ok(first) => first,
                Err(_) => {
                    self.write(std::mem::take(&mut ready))?;
                    let Ok(first) = queue.recv() else { return Ok(()) };
                    first
                }
            };
            let mut chunks = Vec::new();
            for item in std::iter::once(first).chain(queue.try_iter().take(QUEUE)) {
                match item {
                    Item::Chunk(id, plain) => chunks.push((id, plain)),
                    // It comes before the chunks that it is about.
                    Item::Say(message) => self.link.send(&message)?,
                    Item::Ask(ids, done) => {
                        ready = self.prepare(std::mem::take(&mut chunks), ready)?;
                        self.find(&ids)?;
                        let _ = done.send(());
                    }
                    Item::Flush(done) => {
                        ready = self.prepare(std::mem::take(&mut chunks), ready)?;
                        self.write(std::mem::take(&mut ready))?;
                        // An answer says that what was sent before has come.
                        if let Some(streams) = self.state.streams.get() {
                            self.link.send(&Message::Sent { chunks: streams.given() })?;
                        }
                        self.ask(&[])?;
                        let _ = done.send(());
                    }
                }
            }
            ready = self.prepare(chunks, ready)?;
        }
    }

    /// Finds out which of these the other side has.
    fn find(&self, ids: &[ChunkId]) -> Result<(), LinkError> {
        for ids in ids.chunks(MAX_ASKED) {
            let wanted = self.ask(ids)?;
            let mut known = self.state.known.lock();
            for id in ids.iter().zip(wanted).filter(|(_, wanted)| !wanted).map(|(id, _)| id) {
                known.there += u64::from(known.all.insert(*id));
            }
        }
        Ok(())
    }

    /// Finds out what the other side lacks of these, and encodes that, while what is `ready` goes out.
    fn prepare(
        &self,
        mut chunks: Vec<(ChunkId, Vec<u8>)>,
        ready: Ready,
    ) -> Result<Ready, LinkError> {
        if chunks.is_empty() {
            return Ok(ready);
        }
        let ids: Vec<ChunkId> = chunks.iter().map(|(id, _)| *id).collect();
        let (all, bytes) = (chunks.len(), chunks.iter().map(|(_, plain)| plain.len()).sum());
        // First, so that the answer does not wait for what is ready.
        self.begin_to_ask(&ids)?;
        let (written, wanted) = std::thread::scope(|scope| {
            let writing = scope.spawn(|| self.write(ready));
            let wanted = self.answer(all).map(|wanted| {
                let mut wanted = wanted.into_iter();
                chunks.retain(|_| wanted.next().unwrap_or(true));
                self.encode(&chunks)
            });
            (joined(writing), wanted)
        });
        // What the other side says of a failure says more than that the link is lost. Why a stream was lost is told once, to
        // whichever of both has asked first.
        let next = match (wanted, written) {
            (Err(LinkError::Closed) | Ok(_), Err(error)) => return Err(error),
            (wanted, _) => wanted?,
        };
        drop(chunks);
        self.state.room.give_back(bytes);
        self.state.known.lock().there += (all - next.frames.len()) as u64;
        Ok(next)
    }

    fn encode(&self, chunks: &[(ChunkId, Vec<u8>)]) -> Ready {
        let compression = self.compression;
        let encode = || {
            chunks
                .par_iter()
                .map_init(
                    || Encoder::new(compression),
                    |encoder, (id, plain)| frame(encoder, *id, plain),
                )
                .collect::<Vec<Vec<u8>>>()
        };
        let frames = self.pool.install(encode);
        // What is one byte again and again says nothing of the link.
        let told = chunks.iter().filter(|(_, plain)| constant_byte(plain).is_none());
        Ready { frames, bytes: told.map(|(_, plain)| plain.len() as u64).sum() }
    }

    /// Sends what is ready.
    fn write(&self, ready: Ready) -> Result<(), LinkError> {
        let begun = Instant::now();
        let sent = ready.frames.len() as u64;
        match self.state.streams.get() {
            None => self.link.write_all(&ready.frames)?,
            Some(streams) => ready.frames.into_iter().try_for_each(|frame| streams.give(frame))?,
        }
        if ready.bytes > 0 {
            self.state.meter.add(ready.bytes, begun.elapsed());
        }
        self.state.known.lock().sent += sent;
        Ok(())
    }

    fn ask(&self, ids: &[ChunkId]) -> Result<Vec<bool>, LinkError> {
        self.begin_to_ask(ids)?;
        self.answer(ids.len())
    }

    fn begin_to_ask(&self, ids: &[ChunkId]) -> Result<(), LinkError> {
        self.link.send(&Message::Ask { ids: ids.iter().map(|id| id.0).collect() })
    }

    /// What the other side wants of so many that it was asked about.
    fn answer(&self, asked: usize) -> Result<Vec<bool>, LinkError> {
        let streams = self.state.streams.get();
        let is_lost = || streams.is_some_and(Streams::has_failed);
        match self.link.receive_unless(&is_lost)? {
            Some(Frame::Message(Message::Want { wanted })) if wanted.len() == asked => Ok(wanted),
            Some(other) => Err(unexpected(other)),
            None => {
                Err(streams.and_then(|streams| streams.check().err()).unwrap_or(LinkError::Closed))
            }
        }
    }
}

/// The frame of a chunk, in the form in which it is stored.
pub(super) fn frame(encoder: &mut Encoder, id: ChunkId, plain: &[u8]) -> Vec<u8> {
    let entry = |encoding, stored_len, check| Entry {
        id,
        encoding,
        pack: 0,
        offset: 0,
        stored_len,
        plain_len: plain.len() as u32,
        check,
    };
    if let Some(value) = constant_byte(plain) {
        return Frame::of_chunk(&entry(Encoding::Constant(value), 0, 0), &[]);
    }
    let encoded = encoder.encode(plain);
    let entry = entry(encoded.encoding, encoded.bytes.len() as u32, encoded.check);
    Frame::of_chunk(&entry, encoded.bytes)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn who_puts_more_bytes_than_there_is_room_for_waits() {
        let (room, is_over) = (Room::default(), AtomicBool::default());
        for _ in 0..ROOM / MAX_CHUNK {
            assert!(room.take(MAX_CHUNK, &is_over));
        }
        std::thread::scope(|scope| {
            let waiting = scope.spawn(|| room.take(1, &is_over));
            std::thread::sleep(2 * LOOK);
            assert!(!waiting.is_finished());
            room.give_back(MAX_CHUNK);
            assert!(joined(waiting));
            let waiting = scope.spawn(|| room.take(MAX_CHUNK, &is_over));
            is_over.store(true, Ordering::Release);
            assert!(!joined(waiting), "nobody makes room any more");
        });
    }
}
