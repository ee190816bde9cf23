//! The bulk memory of the programs, as gpucr sees it: hashing it, and copying it into the image.

use std::collections::{BTreeMap, HashMap, HashSet};
use std::os::fd::AsFd;
use std::sync::atomic::AtomicBool;
use std::sync::{Arc, LazyLock};

use gpucr_wire::{Block, CHUNK_SIZE};

use crate::base::cores::Cores;
use crate::base::progress::Progress;
use crate::base::stop::Stop;
use crate::base::timeline::Misspeculation;
use crate::base::timeline::{Counter, Timeline, Track};
use crate::cuda::driver::code;
use crate::cuda::lanes::chunks_in;
use crate::cuda::{Context, Device, Driver, DriverError, Hashed, Hasher, Lane, SharedBlock, Span};
use crate::engine::access::Extent;
use crate::engine::error::Error;
use crate::engine::held::Held;
use crate::store::{ChunkId, ChunkWriter};

/// The blocks of a program with the chunks that they turned into.
pub(super) type Saved = Vec<(Block, Vec<ChunkId>)>;

/// The memory of all programs, mapped in gpucr.
pub(crate) struct Bulk {
    /// In the order of the programs and their blocks. Let go of before the lanes.
    pieces: Vec<Piece>,
    /// Places among the pieces by program and address; without those that are not mapped there.
    by_address: BTreeMap<(usize, u64), usize>,
    /// For each lane; none where the driver does not run the kernel.
    hashers: Option<Vec<Hasher>>,
    /// How often the programs had been asked what they launch when copying went on (see
    /// [`Speculation`](super::speculate::Speculation)).
    pub(super) interval: usize,
    /// Memory of gpucr's own with copies of what was still to be saved.
    pub(super) shadows: Vec<Shadow>,
    /// What is saved while the programs run.
    deferred: Arc<Deferred>,
    /// What was found to have changed while it was saved so.
    pub(super) missed: Vec<Miss>,
    /// gpucr's context on each device.
    pub(super) lanes: Vec<Lane>,
    /// Which CPUs may be used beside the programs; `None` if nothing is copied beside them.
    cores: Option<Arc<Cores>>,
    timeline: Timeline,
}

/// A piece of device memory that holds shadows.
pub(super) struct Shadow {
    #[expect(dead_code, reason = "keeps the memory until everything is saved")]
    pub(super) memory: SharedBlock,
}

/// One block of one program.
struct Piece {
    program: usize,
    id: u64,
    /// Where the program sees its start; 0 if it does not.
    address: u64,
    lane: usize,
    /// `None` when the program has it for itself again.
    memory: Option<SharedBlock>,
    chunks: Vec<Chunk>,
    /// Its number in the chunk table of its program, if it is there.
    range: Option<usize>,
}

impl Chunk {
    /// Whether it has held still between the last two looks, and the store lacks it.
    fn is_worth_copying(&self) -> bool {
        self.still && !self.held_back && self.copied != self.seen
    }
}

impl Piece {
    /// The address behind its last chunk, as the program sees it.
    fn end(&self) -> u64 {
        self.address.saturating_add(self.chunks.len() as u64 * CHUNK_SIZE)
    }

    /// The numbers of the chunks that have bytes between two addresses of the program.
    fn chunks_within(&self, start: u64, end: u64) -> std::ops::Range<usize> {
        let (start, end) = (start.max(self.address), end.min(self.end()));
        if self.address == 0 || start >= end {
            return 0..0;
        }
        let number = |address: u64| ((address - self.address) / CHUNK_SIZE) as usize;
        number(start)..number(end - 1) + 1
    }

    fn miss(&self, number: usize) -> Miss {
        let offset = if self.address == 0 { 0 } else { number as u64 * CHUNK_SIZE };
        Miss {
            program: self.program,
            address: self.address + offset,
            size: CHUNK_SIZE,
            interval: self.chunks[number].interval,
        }
    }

    /// How many bytes of a chunk lie between two addresses of the program.
    fn overlap(&self, number: usize, start: u64, end: u64) -> u64 {
        let first = self.address + number as u64 * CHUNK_SIZE;
        end.min(first + CHUNK_SIZE).saturating_sub(start.max(first))
    }
}

/// What is known of one chunk of device memory.
#[derive(Debug, Clone, Copy, Default)]
struct Chunk {
    /// Its hash when it was last looked at.
    seen: Option<ChunkId>,
    /// And its sum, by its lane's hasher.
    sum: u64,
    /// Whether it had the same hash the time before.
    still: bool,
    /// Whether it was looked at the time before.
    twice: bool,
    /// Whether it ever had another hash than the time before.
    moved: bool,
    /// Whether launches may write it: then others are copied first.
    held_back: bool,
    /// The [`Bulk::interval`] in which it was copied.
    interval: usize,
    /// The hash of the bytes that were last copied of it, or would have been had the store not had
    /// them already.
    copied: Option<ChunkId>,
    /// Where its shadow is.
    shadow: Option<u64>,
    /// Whether it is saved while the program runs.
    deferred: bool,
}

/// A chunk that had changed after it was copied.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Miss {
    pub(super) program: usize,
    /// Where the program sees it; 0 if it does not.
    pub(super) address: u64,
    pub(super) size: u64,
    /// The [`Bulk::interval`] in which it was copied.
    pub(super) interval: usize,
}

/// How chunks that were expected to change compare with those that did.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, serde::Serialize)]
pub struct Compared {
    /// Chunks that were expected to change.
    pub expected: u64,
    /// Those of them that did.
    pub changed: u64,
    /// Others that did.
    pub missed: u64,
}

/// What a check of all device memory has found.
#[derive(Debug, Clone, Default, PartialEq, serde::Serialize)]
pub struct Validation {
    /// Chunks of device memory, all of which were hashed while the program stood still.
    pub chunks: u64,
    /// Chunks that had been copied before, in the belief that they would not change any more.
    pub predicted_clean: u64,
    /// Those of them that had changed all the same.
    pub misspeculated: u64,
    /// Which allocations those belong to, and what may have written them; at most 100.
    pub misspeculations: Vec<Misspeculation>,
    /// Chunks copied while the program stood still, misspeculated ones among them.
    pub recopied: u64,
    /// Milliseconds that hashing and comparing took.
    pub ms: f64,
}

impl Bulk {
    /// Makes gpucr's contexts, one for each device.
    ///
    /// `None` where the driver grants no second context: no memory left, or a compute mode that
    /// admits one process only. Then the programs copy from inside, which is slower.
    pub(crate) fn prepare(
        driver: &Arc<Driver>,
        devices: &[Device],
        bulk_bytes: u64,
        timeline: Timeline,
    ) -> Result<Option<Self>, Error> {
        let cores = std::thread::available_parallelism().map_or(2, usize::from);
        let chunks = (bulk_bytes / CHUNK_SIZE / 2).max(1) as usize;
        let workers = (cores / devices.len().max(1)).max(2).min(chunks);
        let mut lanes = Vec::new();
        for device in devices {
            match Lane::prepare(driver, device, workers) {
                Ok(lane) => lanes.push(lane),
                Err(error) if no_room(&error) => {
                    tracing::warn!(%error, device = device.name, "no second context; copying inside");
                    return Ok(None);
                }
                Err(error) => return Err(error.into()),
            }
        }
        Ok(Some(Self {
            pieces: Vec::new(),
            by_address: BTreeMap::new(),
            hashers: None,
            interval: 0,
            shadows: Vec::new(),
            deferred: Arc::default(),
            missed: Vec::new(),
            lanes,
            cores: None,
            timeline,
        }))
    }

    /// gpucr's context on each device.
    pub(super) fn contexts(&self) -> Vec<Arc<Context>> {
        self.lanes.iter().map(|lane| lane.context().clone()).collect()
    }

    /// Makes ready to have what is copied hashed on the devices, so that the host need not. Without that, and
    /// where the devices have no memory for it, copying works all the same.
    pub(super) fn prepare_bounce(&mut self, bulk_bytes: u64) {
        for lane in &mut self.lanes {
            if let Err(error) = lane.prepare_bounce(bulk_bytes) {
                tracing::debug!(%error, "the host hashes what it copies");
            }
        }
    }

    /// Makes ready to hash. `false` where the driver refuses; copying works all the same.
    pub(crate) fn prepare_hashing(&mut self) -> bool {
        let hashers = self.lanes.iter().map(|lane| Hasher::prepare(lane.context()));
        match hashers.collect::<Result<Vec<_>, _>>() {
            Ok(hashers) => self.hashers = Some(hashers),
            Err(error) => tracing::warn!(%error, "device memory cannot be hashed"),
        }
        self.hashers.is_some()
    }

    /// Maps the blocks that are new and lets go of those that are gone, so that exactly `blocks` are
    /// mapped, in their order. `false` where the driver has no room for that.
    pub(crate) fn follow(&mut self, held: &[Held], blocks: &[Vec<Block>]) -> Result<bool, Error> {
        let mut known: HashMap<(usize, u64), Piece> =
            self.pieces.drain(..).map(|piece| ((piece.program, piece.id), piece)).collect();
        let mut listed = HashSet::new();
        for (program, blocks) in blocks.iter().enumerate() {
            listed.extend(blocks.iter().map(|block| (program, block.id)));
        }
        // First let go of memory, then map more.
        known.retain(|key, _| listed.contains(key));
        for (program, (held, blocks)) in held.iter().zip(blocks).enumerate() {
            let fds: HashMap<u64, _> = held.blocks.iter().map(|(id, fd)| (*id, fd)).collect();
            for block in blocks {
                if let Some(mut piece) = known.remove(&(program, block.id)) {
                    piece.address = block.address;
                    self.pieces.push(piece);
                    continue;
                }
                let on = |lane: &Lane| lane.context().device().uuid == block.device;
                let lane = self.lanes.iter().position(on).ok_or_else(|| Error::Changed {
                    pid: held.process.pid,
                    what: format!(
                        "it began to use the device {}",
                        crate::base::format::hex(&block.device)
                    ),
                })?;
                let fd = fds.get(&block.id).ok_or_else(|| Error::Changed {
                    pid: held.process.pid,
                    what: format!("its block {} came without memory", block.id),
                })?;
                let context = self.lanes[lane].context();
                let memory = match SharedBlock::import(context, fd.as_fd(), block.size) {
                    Ok(memory) => memory,
                    Err(error) if no_room(&error) => {
                        tracing::warn!(%error, "no room to map the memory; copying inside");
                        return Ok(false);
                    }
                    Err(error) => return Err(error.into()),
                };
                let chunks = vec![Chunk::default(); chunks_in(block.size)];
                let memory = Some(memory);
                let (id, address) = (block.id, block.address);
                self.pieces.push(Piece { program, id, address, lane, memory, chunks, range: None });
            }
        }
        let mapped = self.pieces.iter().enumerate().filter(|(_, piece)| piece.address != 0);
        self.by_address = mapped.map(|(at, piece)| ((piece.program, piece.address), at)).collect();
        Ok(true)
    }

    /// A program has ended: lets go of its memory. Those behind it move up.
    pub(super) fn forget_program(&mut self, program: usize) {
        self.pieces.retain(|piece| piece.program != program);
        for piece in self.pieces.iter_mut().filter(|piece| piece.program > program) {
            piece.program -= 1;
        }
        // The next list of blocks brings it up to date.
        self.by_address.clear();
    }

    /// Hashes all memory where it is. What is known of the chunks is brought up to date.
    pub(crate) fn look(&mut self) -> Result<(), Error> {
        let mut slice = self.timeline.begin(Track::Looks, || "look");
        let hashers = self.hashers.as_mut().expect("made ready to hash");
        let pieces = &self.pieces;
        let hashes: Vec<Vec<(Span, Hashed)>> = std::thread::scope(|scope| {
            let threads: Vec<_> = hashers
                .iter_mut()
                .enumerate()
                .map(|(lane, hasher)| {
                    scope.spawn(move || -> Result<_, DriverError> {
                        let spans = spans(pieces, |piece, _| piece.lane == lane);
                        let places: Vec<_> = spans.iter().map(|s| (s.address, s.len)).collect();
                        Ok(spans.into_iter().zip(hasher.hash(&places)?).collect())
                    })
                })
                .collect();
            threads.into_iter().map(joined).collect::<Result<_, _>>()
        })?;
        let mut changed = 0;
        for (span, hash) in hashes.into_iter().flatten() {
            let chunk = &mut self.pieces[span.block].chunks[span.chunk];
            chunk.still = chunk.seen == Some(hash.id);
            chunk.twice = chunk.seen.is_some();
            chunk.moved |= chunk.twice && !chunk.still;
            if chunk.twice && !chunk.still {
                changed += span.len as u64;
            }
            (chunk.seen, chunk.sum) = (Some(hash.id), hash.sum);
        }
        slice.set_bytes(changed);
        self.timeline.add(Counter::Changed, changed);
        Ok(())
    }

    /// The blocks of a program that have held still since the first look. Without those that have a chunk of
    /// zeros: that is room for something.
    pub(super) fn still(&self, program: usize) -> Vec<Extent> {
        static ZEROS: LazyLock<ChunkId> =
            LazyLock::new(|| ChunkId::of(&vec![0; CHUNK_SIZE as usize]));
        let still = |chunk: &Chunk| chunk.twice && !chunk.moved && chunk.seen != Some(*ZEROS);
        let is_still = |piece: &&Piece| {
            piece.program == program && piece.address != 0 && piece.chunks.iter().all(still)
        };
        let extent = |p: &Piece| Extent { id: p.id, low: p.address, end: p.end() };
        self.pieces.iter().filter(is_still).map(extent).collect()
    }

    /// Whether memory of a program has changed between the last two looks; `None` where that is not
    /// known, because it was not there both times.
    pub(crate) fn has_changed(&self, program: usize, address: u64, size: u64) -> Option<bool> {
        let end = address.checked_add(size)?;
        let (mut covered, mut changed) = (0, false);
        for at in self.overlapping(program, address, end) {
            let piece = &self.pieces[at];
            for number in piece.chunks_within(address, end) {
                let chunk = &piece.chunks[number];
                if !chunk.twice {
                    return None;
                }
                covered += piece.overlap(number, address, end);
                changed |= !chunk.still;
            }
        }
        (covered == size).then_some(changed)
    }

    /// Compares the chunks of a program that have changed between the last two looks with those that
    /// have bytes in some ranges of its addresses.
    pub(crate) fn compare(
        &self,
        program: usize,
        ranges: impl IntoIterator<Item = (u64, u64)>,
    ) -> Compared {
        let mut expected = HashSet::new();
        for (start, end) in ranges {
            for at in self.overlapping(program, start, end) {
                expected
                    .extend(self.pieces[at].chunks_within(start, end).map(|number| (at, number)));
            }
        }
        let mut compared = Compared::default();
        for (at, piece) in self.pieces.iter().enumerate().filter(|(_, p)| p.program == program) {
            let chunks = piece.chunks.iter().enumerate().filter(|(_, chunk)| chunk.twice);
            for (number, chunk) in chunks {
                match (expected.contains(&(at, number)), !chunk.still) {
                    (true, changed) => {
                        compared.expected += 1;
                        compared.changed += u64::from(changed);
                    }
                    (false, changed) => compared.missed += u64::from(changed),
                }
            }
        }
        compared
    }

    /// The pieces that have bytes between two addresses of a program.
    fn overlapping(&self, program: usize, start: u64, end: u64) -> impl Iterator<Item = usize> {
        let below = self.by_address.range((program, 0)..(program, end)).rev().map(|(_, at)| *at);
        below.take_while(move |at| self.pieces[*at].end() > start)
    }

    /// Lets the chunks that have bytes between two addresses of a program wait until
    /// [`hold_nothing_back`](Self::hold_nothing_back). Says whether there are any.
    pub(super) fn hold_back(&mut self, program: usize, start: u64, end: u64) -> bool {
        let mut any = false;
        let pieces: Vec<usize> = self.overlapping(program, start, end).collect();
        for at in pieces {
            let piece = &mut self.pieces[at];
            for number in piece.chunks_within(start, end) {
                piece.chunks[number].held_back = true;
                any = true;
            }
        }
        any
    }

    /// From now on all chunks are as good as each other.
    pub(super) fn hold_nothing_back(&mut self) {
        let chunks = self.pieces.iter_mut().flat_map(|piece| &mut piece.chunks);
        chunks.for_each(|chunk| chunk.held_back = false);
    }

    /// Bytes of the chunks that have held still between the last two looks and are not in the store.
    pub(super) fn worth_copying(&mut self, store: &ChunkWriter) -> u64 {
        self.mark_known(store);
        spans(&self.pieces, |_, chunk| chunk.is_worth_copying())
            .iter()
            .map(|span| span.len as u64)
            .sum()
    }

    /// Chunks that the store has need not be copied, whoever gave them to it.
    fn mark_known(&mut self, store: &ChunkWriter) {
        for chunk in self.pieces.iter_mut().flat_map(|piece| &mut piece.chunks) {
            if chunk.copied != chunk.seen && chunk.seen.is_some_and(|id| store.contains(&id)) {
                chunk.copied = chunk.seen;
            }
        }
    }

    /// Copies chunks that are [worth](Self::worth_copying) it, equal ones once, until it is `enough`, but
    /// some in any case. The program may be writing to them: what is copied is named by what it is.
    /// Gives the number of chunks that were copied; 0 when there are no more.
    pub(super) fn copy_some(
        &mut self,
        enough: &AtomicBool,
        store: &ChunkWriter,
        stop: &Stop,
        progress: &dyn Progress,
    ) -> Result<usize, Error> {
        self.mark_known(store);
        let mut taken = HashSet::new();
        let mut work = spans(&self.pieces, |_, chunk| chunk.is_worth_copying());
        work.retain(|span| {
            let seen = self.pieces[span.block].chunks[span.chunk].seen;
            taken.insert(seen)
        });
        self.run_beside(true);
        let copied = self.transfer_ahead(&work, enough, store, stop, progress);
        self.run_beside(false);
        let copied = copied?;
        let count = copied.len();
        for (span, id) in copied {
            let chunk = &mut self.pieces[span.block].chunks[span.chunk];
            chunk.copied = Some(id);
            chunk.interval = self.interval;
            // If it has changed since it was looked at, it is not worth another copy before it has
            // held still again.
            chunk.still = chunk.seen == Some(id);
        }
        Ok(count)
    }

    /// Looks at everything while the program stands still and tells what has changed since it was
    /// copied.
    pub(super) fn validate(
        &mut self,
        store: &ChunkWriter,
    ) -> Result<(Validation, Vec<Miss>), Error> {
        self.look()?;
        let (mut found, mut missed) = (Validation::default(), Vec::new());
        for piece in &self.pieces {
            for (number, chunk) in piece.chunks.iter().enumerate() {
                found.chunks += 1;
                if chunk.copied.is_none() {
                    continue;
                }
                found.predicted_clean += 1;
                if chunk.copied != chunk.seen {
                    missed.push(piece.miss(number));
                }
            }
        }
        found.misspeculated = missed.len() as u64;
        self.mark_known(store);
        found.recopied = spans(&self.pieces, |_, c| c.copied != c.seen).len() as u64;
        Ok((found, missed))
    }

    /// Takes what was copied while the program ran for what its memory holds, for the test that shows
    /// that this is wrong.
    pub(super) fn trust(&mut self) {
        for chunk in self.pieces.iter_mut().flat_map(|piece| &mut piece.chunks) {
            chunk.seen = chunk.copied;
        }
    }

    /// Bytes that [`save`](Self::save) has to copy.
    pub(super) fn left(&self) -> u64 {
        let left =
            spans(&self.pieces, |_, chunk| chunk.seen.is_none() || chunk.copied != chunk.seen);
        left.iter().map(|span| span.len as u64).sum()
    }

    /// What is left to be saved on a lane's device.
    pub(super) fn left_on(&self, lane: usize) -> Vec<Span> {
        spans(&self.pieces, |piece, chunk| piece.lane == lane && chunk.copied != chunk.seen)
    }

    /// The hash that the chunk had when it was last looked at.
    pub(super) fn seen(&self, span: &Span) -> Option<ChunkId> {
        self.pieces[span.block].chunks[span.chunk].seen
    }

    /// The chunk will be saved from there.
    pub(super) fn set_shadow(&mut self, span: &Span, address: u64) {
        self.pieces[span.block].chunks[span.chunk].shadow = Some(address);
    }

    /// The hash of each chunk of each block: what the image will say, once all of it is saved. None
    /// where not everything has been looked at.
    pub(super) fn hashes(&self) -> Option<Vec<Vec<ChunkId>>> {
        self.pieces.iter().map(|p| p.chunks.iter().map(|chunk| chunk.seen).collect()).collect()
    }

    /// Begins to watch which CPUs the programs, with these processes, need when memory is copied beside them.
    pub(super) fn watch(&mut self, pids: Vec<u32>) {
        self.cores = Some(Arc::new(Cores::watch(pids)));
    }

    /// Whether copies run beside the programs, which come first then.
    fn run_beside(&mut self, beside: bool) {
        let cores = self.cores.as_ref().filter(|_| beside);
        if let Some(cores) = cores {
            cores.follow();
        }
        self.lanes.iter_mut().for_each(|lane| lane.run_beside(cores.cloned()));
    }
}

/// The chunks that `wanted` admits, with the indices of their pieces.
fn spans(pieces: &[Piece], wanted: impl Fn(&Piece, &Chunk) -> bool) -> Vec<Span> {
    let mut spans = Vec::new();
    for (number, piece) in pieces.iter().enumerate() {
        let wanted = (0..piece.chunks.len()).filter(|&chunk| wanted(piece, &piece.chunks[chunk]));
        let Some(memory) = &piece.memory else { continue };
        spans.extend(wanted.map(|chunk| {
            let span = Span::of(memory, number, chunk);
            let shadow = piece.chunks[chunk].shadow;
            Span { address: shadow.unwrap_or(span.address), ..span }
        }));
    }
    spans
}

pub(super) fn joined<T>(thread: std::thread::ScopedJoinHandle<'_, T>) -> T {
    thread.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic))
}

fn no_room(error: &DriverError) -> bool {
    [code::OUT_OF_MEMORY, code::DEVICE_UNAVAILABLE].contains(&error.code)
}

mod save;
#[cfg(test)]
mod save_tests;
#[cfg(test)]
mod tests;

pub(super) use save::{Deferred, PutOff};
