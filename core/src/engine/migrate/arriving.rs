//! The phase `receive` of the destination: chunks come up to the manifest. They are checked, put into the image, and
//! loaded into device memory where that is known already.

use std::collections::HashSet;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use crossbeam_channel::{Receiver, Sender, TryRecvError};
use parking_lot::{Condvar, Mutex};

use super::buffers::Buffers;
use super::link::{Link, LinkError, unexpected};
use super::message::{Frame, LaidOut, MAX_ASKED, MAX_BLOCKS, Message};
use super::streams::Door;
use crate::base::polite::Polite;
use crate::engine::error::Error;
use crate::engine::restore::ahead::{Ahead, ExpectedBlock, is_size_of_block};
use crate::image::{ImageWriter, MAX_MANIFEST};
use crate::store::{ChunkId, Encoding, Entry, check_stored, decode_stored};

/// So many chunks are waited for at a time: a source asks for no more than those after the ones that it is sending.
const MAX_WANTED: usize = 1 << 20;
/// Chunks that wait to be checked, and to be loaded, at most.
const QUEUE: usize = 16;
/// How often it is looked whether something has failed.
const LOOK: Duration = Duration::from_millis(50);
/// Threads that check them, at most.
const WORKERS: usize = 16;

/// What has come.
pub(super) struct Arrived {
    /// The body of the manifest.
    pub(super) body: Vec<u8>,
    /// The message after it.
    pub(super) message: Message,
    /// How many chunks.
    pub(super) chunks: u64,
    /// Device memory with what was loaded into it.
    pub(super) ahead: Option<Ahead>,
}

/// Chunks that the source is to send, and how many have come.
#[derive(Default)]
struct Chunks {
    state: Mutex<(HashSet<ChunkId>, u64)>,
    more: Condvar,
}

impl Chunks {
    /// Those of these that are not in the image are to be sent. `None` if too many are.
    fn ask(&self, ids: Vec<[u8; 32]>, writer: &ImageWriter) -> Option<Vec<bool>> {
        let (wanted, _) = &mut *self.state.lock();
        if wanted.len() + ids.len() > MAX_WANTED {
            return None;
        }
        let lacks = |id: ChunkId| {
            let is_lacking = !writer.chunks().contains(&id);
            is_lacking.then(|| wanted.insert(id));
            is_lacking
        };
        Some(ids.into_iter().map(ChunkId).map(lacks).collect())
    }

    /// Takes one that has come, by `give`: nothing that nobody has asked for.
    fn take(
        &self,
        entry: Entry,
        stored: Vec<u8>,
        give: &dyn Fn(Entry, Vec<u8>) -> bool,
    ) -> Result<(), Error> {
        if !self.state.lock().0.remove(&entry.id) {
            return Err(unexpected(Frame::Chunk(entry, Vec::new())).into());
        }
        if !give(entry, stored) {
            return Err(Error::CopyIncomplete);
        }
        self.state.lock().1 += 1;
        self.more.notify_all();
        Ok(())
    }

    fn came(&self) -> u64 {
        self.state.lock().1
    }

    /// Waits until so many have come. `false` if something has failed.
    fn wait_for(
        &self,
        all: u64,
        link: &Link,
        failed: &dyn Fn() -> bool,
    ) -> Result<bool, LinkError> {
        let mut state = self.state.lock();
        let (mut last, mut since) = (state.1, Instant::now());
        while state.1 < all {
            if failed() {
                return Ok(false);
            }
            link.look()?;
            if state.1 > last {
                (last, since) = (state.1, Instant::now());
            }
            if since.elapsed() >= link.silence() {
                return Err(LinkError::Silent(link.silence()).of_stream());
            }
            self.more.wait_for(&mut state, LOOK);
        }
        Ok(true)
    }
}

/// For whoever loads.
enum Step {
    Layout(Vec<LaidOut>),
    Contents(u32, u32, Vec<ChunkId>),
    /// Its bytes were checked.
    Chunk(ChunkId, Vec<u8>),
    /// The source asks whether all has come: what it has laid out last has to fit here by then.
    Flush(Sender<()>),
}

/// Takes all that the source says up to its manifest, and what comes through the door for streams.
///
/// # Errors
/// The link is lost; the source does not keep to the protocol, or gives up; the image cannot be written; its memory does
/// not fit on the devices.
pub(super) fn receive(
    link: &Arc<Link>,
    writer: &ImageWriter,
    ahead: Option<Ahead>,
    door: Option<&Door>,
) -> Result<Arrived, Error> {
    let cores = std::thread::available_parallelism().map_or(1, |n| n.get());
    let failure: Mutex<Option<Error>> = Mutex::default();
    let fail = |error: Error| _ = failure.lock().get_or_insert(error);
    let (sender, queue) = crossbeam_channel::bounded::<(Entry, Vec<u8>)>(QUEUE);
    let (to_loader, steps) = crossbeam_channel::bounded::<Step>(QUEUE);
    let (received, ahead) = std::thread::scope(|scope| {
        let buffers = link.buffers();
        let loading = scope.spawn(move || load(ahead, steps, buffers).map_err(fail));
        for _ in 0..cores.min(WORKERS) {
            let (queue, to_loader, fail) = (queue.clone(), to_loader.clone(), &fail);
            scope.spawn(move || {
                for (entry, stored) in queue.iter() {
                    match keep(writer, buffers, &entry, stored) {
                        // Whoever loads may have given that up.
                        Ok(plain) => _ = to_loader.send(Step::Chunk(entry.id, plain)),
                        Err(error) => return fail(error),
                    }
                }
            });
        }
        drop(queue);
        let give = |entry, stored| sender.send((entry, stored)).is_ok();
        let (chunks, is_over) = (Chunks::default(), AtomicBool::default());
        let take = |entry, stored| chunks.take(entry, stored, &give);
        let received = std::thread::scope(|scope| {
            if let Some(door) = door {
                scope.spawn(|| door.let_in(link, &is_over, &take, &fail));
            }
            link.read_ahead(true);
            let received = read(link, writer, &failure, &to_loader, &chunks, &take);
            link.read_ahead(false);
            is_over.store(true, Ordering::Release);
            received
        });
        // The workers end first, and then whoever loads.
        drop((sender, to_loader));
        let ahead = loading.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic));
        (received, ahead)
    });
    match (failure.into_inner(), ahead) {
        (Some(error), _) => Err(error),
        (None, ahead) => Ok(Arrived { ahead: ahead.ok().flatten(), ..received? }),
    }
}

/// Reads what the source says up to its manifest, and gives it on.
fn read(
    link: &Arc<Link>,
    writer: &ImageWriter,
    failure: &Mutex<Option<Error>>,
    to_loader: &Sender<Step>,
    chunks: &Chunks,
    take: &dyn Fn(Entry, Vec<u8>) -> Result<(), Error>,
) -> Result<Arrived, Error> {
    // Other programs go first for as long as this one runs on.
    let mut polite = Polite::begin(Vec::new());
    let (mut body, mut sent) = (Vec::new(), 0);
    let failed = || failure.lock().is_some();
    // What has failed first is what matters.
    let first = |error: Error| failure.lock().take().unwrap_or(error);
    loop {
        let Some(frame) = link.receive_unless(&failed)? else {
            return Err(first(Error::CopyIncomplete));
        };
        match frame {
            Frame::Message(Message::Ask { ids }) if ids.len() <= MAX_ASKED => {
                if ids.is_empty() {
                    // Very soon the program will stand still.
                    drop(polite.take());
                    let has_come = chunks.wait_for(sent, link, &failed)?;
                    if !has_come || !flush(to_loader, &failed) {
                        return Err(first(Error::CopyIncomplete));
                    }
                }
                let wanted = chunks.ask(ids, writer).ok_or_else(|| {
                    LinkError::Protocol("it asks on and on, and does not send".into())
                })?;
                link.send(&Message::Want { wanted })?;
            }
            Frame::Message(Message::Sent { chunks }) => sent = chunks,
            Frame::Chunk(entry, stored) => take(entry, stored).map_err(first)?,
            Frame::Piece(piece) if (body.len() + piece.len()) as u64 <= MAX_MANIFEST => {
                body.extend(piece);
            }
            // Where memory belongs is told before the manifest begins.
            Frame::Message(Message::Layout { blocks })
                if blocks.len() <= MAX_BLOCKS && body.is_empty() =>
            {
                _ = to_loader.send(Step::Layout(blocks));
            }
            Frame::Message(Message::Contents { block, first, ids })
                if ids.len() <= MAX_ASKED && body.is_empty() =>
            {
                let ids = ids.into_iter().map(ChunkId).collect();
                _ = to_loader.send(Step::Contents(block, first, ids));
            }
            Frame::Message(message @ Message::Manifest { .. }) => {
                return Ok(Arrived { body, message, chunks: chunks.came(), ahead: None });
            }
            other => return Err(unexpected(other).into()),
        }
    }
}

/// Checks a chunk, and puts it into the image. Gives its bytes.
fn keep(
    writer: &ImageWriter,
    buffers: &Buffers,
    entry: &Entry,
    stored: Vec<u8>,
) -> Result<Vec<u8>, Error> {
    let damaged = |what| LinkError::Protocol(format!("the chunk {} is damaged: {what}", entry.id));
    // What is stored as it is need not be copied.
    if entry.encoding == Encoding::Raw && entry.plain_len == entry.stored_len {
        check_stored(entry, &stored).map_err(damaged)?;
        writer.chunks().put_stored(entry, &stored)?;
        return Ok(stored);
    }
    let mut plain = buffers.take(0);
    decode_stored(entry, &stored, &mut plain).map_err(damaged)?;
    writer.chunks().put_stored(entry, &stored)?;
    buffers.give_back(stored);
    Ok(plain)
}

/// Waits until whoever loads has taken all that it was given. `false` if something has failed.
fn flush(to_loader: &Sender<Step>, failed: &dyn Fn() -> bool) -> bool {
    let (done, is_done) = crossbeam_channel::bounded(1);
    if to_loader.send(Step::Flush(done)).is_err() {
        return false;
    }
    loop {
        match is_done.recv_timeout(LOOK) {
            Ok(()) => return true,
            Err(error) if error.is_disconnected() || failed() => return false,
            Err(_) => {}
        }
    }
}

/// Loads what comes to where it belongs, until nothing more comes.
fn load(
    mut ahead: Option<Ahead>,
    queue: Receiver<Step>,
    buffers: &Buffers,
) -> Result<Option<Ahead>, Error> {
    loop {
        // What is one byte again and again is written a part at a time, and meanwhile no one has to wait.
        let is_filling = ahead.as_mut().map_or(Ok(false), Ahead::fill_some)?;
        let first = match is_filling {
            true => queue.try_recv(),
            false => queue.recv().map_err(|_| TryRecvError::Disconnected),
        };
        match first {
            Ok(first) => {
                let mut steps = std::iter::once(first).chain(queue.try_iter().take(QUEUE));
                load_some(ahead.as_mut(), &mut steps, buffers)?;
            }
            Err(TryRecvError::Empty) => {}
            Err(TryRecvError::Disconnected) => break,
        }
    }
    ahead.as_mut().map_or(Ok(()), Ahead::check_fit)?;
    Ok(ahead)
}

fn load_some(
    mut ahead: Option<&mut Ahead>,
    steps: &mut dyn Iterator<Item = Step>,
    buffers: &Buffers,
) -> Result<(), Error> {
    let mut chunks = Vec::new();
    let load = |memory: &mut Ahead, chunks: Vec<(ChunkId, Vec<u8>)>| {
        memory.load(&chunks)?;
        chunks.into_iter().for_each(|(_, plain)| buffers.give_back(plain));
        Ok::<_, Error>(())
    };
    for step in steps {
        match (step, &mut ahead) {
            (Step::Chunk(id, plain), Some(_)) => chunks.push((id, plain)),
            (Step::Layout(blocks), Some(memory)) => {
                load(memory, std::mem::take(&mut chunks))?;
                let blocks = expected(blocks)?;
                if !blocks.iter().all(|block| memory.is_of_program(&block.device)) {
                    let what = "it tells of memory on a device that it has not offered".to_owned();
                    return Err(LinkError::Protocol(what).into());
                }
                memory.expect_blocks(&blocks);
            }
            (Step::Contents(block, first, ids), Some(memory)) => {
                if !memory.expect_chunks(block as usize, first as usize, &ids) {
                    let what = "it tells of memory that there is not".to_owned();
                    return Err(LinkError::Protocol(what).into());
                }
            }
            (Step::Flush(done), memory) => {
                if let Some(memory) = memory {
                    load(memory, std::mem::take(&mut chunks))?;
                    memory.check_fit()?;
                }
                _ = done.send(());
            }
            (Step::Chunk(_, plain), None) => buffers.give_back(plain),
            (_, None) => {}
        }
    }
    ahead.map_or(Ok(()), |memory| load(memory, chunks))
}

/// The blocks of a layout.
fn expected(blocks: Vec<LaidOut>) -> Result<Vec<ExpectedBlock>, LinkError> {
    let expected = blocks.into_iter().map(|block| {
        let LaidOut { process, id, device, size } = block;
        is_size_of_block(size).then_some(ExpectedBlock { process, id, device, size })
    });
    let expected: Option<Vec<_>> = expected.collect();
    let expected = expected
        .ok_or_else(|| LinkError::Protocol("it tells of a block of no possible size".into()))?;
    let names: HashSet<(u32, u64)> = expected.iter().map(|it| (it.process, it.id)).collect();
    if names.len() < expected.len() {
        return Err(LinkError::Protocol("it tells of a block twice".into()));
    }
    Ok(expected)
}
