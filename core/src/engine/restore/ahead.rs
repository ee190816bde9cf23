//! Device memory of a program whose image is not there yet: it is loaded as it arrives, to where it is expected to be.
//!
//! What is expected is a guess, and nothing rests on it: [`Ahead::finish`] compares it, chunk by chunk, with the image,
//! and loads what is different or missing. What was loaded is checked on the device, as in any restore. Where there is no
//! room for it nothing is loaded, and the restore brings everything.

use std::collections::{HashMap, HashSet};
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::AtomicBool;

use gpucr_wire::CHUNK_SIZE;

use super::bulk::{Chunks, Room, SPARE, joined};
use super::devices::{self, MappedDevice, Placement};
use super::driver;
use super::given::LoadedMemory;
use super::room;
use crate::base::format::device_uuid;
use crate::base::progress::Quiet;
use crate::base::stop::Stop;
use crate::cuda::context::GRANULE;
use crate::cuda::span::chunks_in;
use crate::cuda::{Driver, DriverError, Hasher, Lane, SharedBlock, Span};
use crate::engine::error::Error;
use crate::image::{Block, DriverKind, ImageReader, Manifest};
use crate::store::ChunkId;

mod filling;

/// A block that the image is expected to have.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) struct ExpectedBlock {
    /// Pid of its process in the image.
    pub(crate) process: u32,
    /// Its name there.
    pub(crate) id: u64,
    /// UUID of its device in the image.
    pub(crate) device: [u8; 16],
    /// Bytes.
    pub(crate) size: u64,
}

/// Memory that is loaded before there is an image.
pub(crate) struct Ahead {
    /// In the order of what is expected. Let go of before the lanes.
    blocks: Vec<AheadBlock>,
    lanes: Vec<ReadyLane>,
    driver: Arc<Driver>,
    kind: DriverKind,
    placement: Placement,
    /// UUIDs of the program's devices, as its outline has them.
    devices: Vec<[u8; 16]>,
    /// Where a chunk is expected, by block and number. Only what the blocks say counts.
    places: HashMap<ChunkId, HashSet<(usize, usize)>>,
    /// Whole chunks that have come and are one byte again and again, which is all that is kept of them.
    constants: HashMap<ChunkId, u8>,
    /// Why the blocks that are expected do not fit on this host.
    unfit: Option<Error>,
    /// The program does not have memory on these devices itself.
    is_elsewhere: bool,
    stop: Arc<AtomicBool>,
    /// What was given, at last, and the contexts in which it was made.
    given: Option<Room>,
}

/// A lane, and what hashes on its device.
struct ReadyLane {
    lane: Lane,
    hasher: Result<Hasher, DriverError>,
}

struct AheadBlock {
    what: ExpectedBlock,
    /// `None` where there is no room for the blocks: then nothing is kept of what is in them either.
    memory: Option<SharedBlock>,
    chunks: Vec<AheadChunk>,
}

impl AheadBlock {
    fn without_memory(what: ExpectedBlock) -> Self {
        Self { what, memory: None, chunks: Vec::new() }
    }

    /// Bytes that were loaded: for the others the software driver has taken no memory yet.
    fn loaded(&self) -> u64 {
        let loaded = self.chunks.iter().filter(|chunk| chunk.loaded.is_some());
        loaded.count() as u64 * CHUNK_SIZE
    }
}

#[derive(Clone, Copy, Default)]
struct AheadChunk {
    /// What it is expected to be.
    expected: Option<ChunkId>,
    /// What is loaded, and was checked.
    loaded: Option<ChunkId>,
}

impl Ahead {
    /// Opens the driver for a program of which `outline` tells driver and devices; `is_elsewhere` says that its memory is
    /// not on devices of this host.
    ///
    /// # Errors
    /// The driver does not start, or a device is not there.
    pub(crate) fn open(
        outline: &Manifest,
        device_map: &[MappedDevice],
        is_elsewhere: bool,
        stop: &Arc<AtomicBool>,
    ) -> Result<Self, Error> {
        let driver = driver::open_same(&outline.driver)?;
        let root = outline.processes[0].pid;
        let placement = devices::place(root, &outline.devices, &driver.devices()?, device_map)?;
        Ok(Self {
            blocks: Vec::new(),
            lanes: Vec::new(),
            driver,
            kind: outline.driver.kind,
            placement,
            devices: outline.devices.iter().map(|device| device.uuid).collect(),
            places: HashMap::new(),
            constants: HashMap::new(),
            unfit: None,
            is_elsewhere,
            stop: stop.clone(),
            given: None,
        })
    }

    /// Whether the program has this device, by its outline.
    pub(crate) fn is_of_program(&self, device: &[u8; 16]) -> bool {
        self.devices.contains(device)
    }

    /// Whether so many bytes of device memory, of which it is not known yet on which of the program's devices they are,
    /// can fit on all of them together. On the devices that the program itself has that cannot be said.
    ///
    /// # Errors
    /// [`Error::DeviceFull`]: they do not.
    pub(crate) fn check_offered(&mut self, needed: u64) -> Result<(), Error> {
        if !self.is_elsewhere {
            return Ok(());
        }
        let devices: HashSet<_> = self.devices.iter().map(|id| self.placement.of(id)).collect();
        let (mut names, mut free) = (Vec::new(), 0u64);
        for device in devices {
            // Whoever needs what is left there may find enough all the same.
            let Some(lane) = if_room(self.lane(&device))? else { return Ok(()) };
            let context = self.lanes[lane].lane.context();
            names.push(context.device().name.clone());
            free = free.saturating_add(context.free_memory()?).saturating_add(SPARE);
        }
        if needed <= free || names.is_empty() {
            return Ok(());
        }
        names.sort_unstable();
        Err(Error::DeviceFull { device: names.join(" and "), needed, free })
    }

    /// These are all blocks that are expected from now on: memory of others is given back, and memory for new ones is
    /// made. Where there is no room for all of them, none has any until the next call.
    pub(crate) fn expect_blocks(&mut self, expected: &[ExpectedBlock]) {
        self.places.clear();
        let wanted: HashSet<ExpectedBlock> = expected.iter().copied().collect();
        let kept = self.blocks.drain(..).filter(|block| wanted.contains(&block.what));
        let kept = kept.map(|block| (block.what, block)).collect();
        self.unfit = match self.make_all(expected, kept) {
            Ok(Some(blocks)) => {
                self.blocks = blocks;
                self.note_places();
                self.unfit = None;
                return;
            }
            Ok(None) => self.check_room(expected).err(),
            Err(error @ Error::NoRoom { .. }) => Some(error),
            Err(error) => {
                tracing::warn!(%error, "no device memory ahead of the image");
                None
            }
        };
        self.blocks = expected.iter().copied().map(AheadBlock::without_memory).collect();
    }

    /// Whether the blocks that are expected fit on this host, as far as that can be said.
    ///
    /// # Errors
    /// [`Error::DeviceFull`] or [`Error::NoRoom`], once for each [`Self::expect_blocks`]: they do not.
    pub(crate) fn check_fit(&mut self) -> Result<(), Error> {
        self.unfit.take().map_or(Ok(()), Err)
    }

    /// The blocks, of which some may have been made before. `None` where there is no room for all of them.
    fn make_all(
        &mut self,
        expected: &[ExpectedBlock],
        mut kept: HashMap<ExpectedBlock, AheadBlock>,
    ) -> Result<Option<Vec<AheadBlock>>, Error> {
        if self.kind == DriverKind::Soft {
            let sizes = expected.iter().fold(0, |sum: u64, what| sum.saturating_add(what.size));
            let loaded: u64 = kept.values().map(AheadBlock::loaded).sum();
            room::check_bytes(sizes.saturating_sub(loaded))?;
        }
        let mut blocks = Vec::with_capacity(expected.len());
        for what in expected {
            let block = match kept.remove(what).filter(|block| block.memory.is_some()) {
                Some(block) => Some(block),
                None => self.make(*what)?,
            };
            let Some(block) = block else {
                tracing::info!("no room for device memory ahead of the image");
                return Ok(None);
            };
            blocks.push(block);
        }
        Ok(Some(blocks))
    }

    fn note_places(&mut self) {
        for (number, block) in self.blocks.iter().enumerate() {
            for (chunk, AheadChunk { expected, loaded }) in block.chunks.iter().enumerate() {
                if let Some(id) = expected.filter(|_| expected != loaded) {
                    self.places.entry(id).or_default().insert((number, chunk));
                }
            }
        }
    }

    /// Gives all memory back, until blocks are expected anew.
    fn give_back(&mut self) {
        self.places.clear();
        for block in &mut self.blocks {
            *block = AheadBlock::without_memory(block.what);
        }
    }

    /// Whether a program with these blocks fits at all, if it does not have to make room for itself. Its contexts will
    /// take about as much as those that are here, but for what gpucr hashes and copies with.
    fn check_room(&self, expected: &[ExpectedBlock]) -> Result<(), Error> {
        for ReadyLane { lane, .. } in self.lanes.iter().filter(|_| self.is_elsewhere) {
            let device = lane.context().device();
            let here =
                expected.iter().filter(|what| self.placement.of(&what.device) == device.uuid);
            let needed = here.fold(0, |sum: u64, what| sum.saturating_add(what.size));
            let free = lane.context().free_memory()?.saturating_add(SPARE);
            if needed > free {
                return Err(Error::DeviceFull { device: device.name.clone(), needed, free });
            }
        }
        Ok(())
    }

    /// Makes memory for a block. `None` where the device has no room for that besides what gpucr needs itself.
    fn make(&mut self, what: ExpectedBlock) -> Result<Option<AheadBlock>, Error> {
        let device = self.placement.of(&what.device);
        let made = self.lane(&device).and_then(|lane| {
            let context = self.lanes[lane].lane.context();
            let has_room = context.free_memory()? >= what.size.saturating_add(SPARE);
            Ok(has_room.then(|| SharedBlock::allocate(context, what.size)).transpose()?)
        });
        let memory = if_room(made)?.flatten();
        Ok(memory.map(|memory| {
            let chunks = vec![AheadChunk::default(); chunks_in(what.size)];
            AheadBlock { what, memory: Some(memory), chunks }
        }))
    }

    /// The lane of a device of this host, which is made if there is none.
    fn lane(&mut self, uuid: &[u8; 16]) -> Result<usize, Error> {
        let is_its = |ready: &ReadyLane| ready.lane.context().device().uuid == *uuid;
        if let Some(number) = self.lanes.iter().position(is_its) {
            return Ok(number);
        }
        let devices = self.driver.devices()?;
        let device = devices.iter().find(|device| device.uuid == *uuid);
        let device = device.ok_or_else(|| Error::NoSuchDevice { what: device_uuid(uuid) })?;
        let cores = std::thread::available_parallelism().map_or(2, usize::from);
        let lane = Lane::prepare(&self.driver, device, cores.max(2))?;
        let hasher = Hasher::prepare(lane.context());
        self.lanes.push(ReadyLane { lane, hasher });
        Ok(self.lanes.len() - 1)
    }

    /// From chunk `first` on, block number `block` of those that are expected is expected to have these chunks. `false`
    /// if there is no such block, or it has not so many.
    pub(crate) fn expect_chunks(&mut self, block: usize, first: usize, ids: &[ChunkId]) -> bool {
        let Some(AheadBlock { what, memory, chunks }) = self.blocks.get_mut(block) else {
            return false;
        };
        let end = first.checked_add(ids.len());
        let Some(end) = end.filter(|end| *end <= chunks_in(what.size) && first < *end) else {
            return false;
        };
        if memory.is_none() {
            return true;
        }
        for (number, (chunk, id)) in chunks[first..end].iter_mut().zip(ids).enumerate() {
            let place = (block, first + number);
            let before = chunk.expected.replace(*id);
            if before == Some(*id) {
                continue;
            }
            // There are never more places than chunks, whatever is expected.
            if let Some(before) = before
                && let Some(places) = self.places.get_mut(&before)
            {
                places.remove(&place);
                if places.is_empty() {
                    self.places.remove(&before);
                }
            }
            if chunk.loaded != Some(*id) {
                self.places.entry(*id).or_default().insert(place);
            }
        }
        true
    }

    /// Bytes that were loaded for the blocks of this manifest.
    pub(crate) fn loaded_for(&self, manifest: &Manifest) -> u64 {
        let wanted: HashSet<ExpectedBlock> = blocks_of(manifest).into_iter().collect();
        let blocks = self.blocks.iter().filter(|block| wanted.contains(&block.what));
        blocks.map(AheadBlock::loaded).sum()
    }

    /// The image is there: loads what is missing, and gives all of its device memory, and how many bytes of it were
    /// loaded before. `None` where the device has no room for that besides gpucr's contexts, which end when this is let go
    /// of. To be called once.
    ///
    /// # Errors
    /// The image is damaged; a copy has failed; the stop was set.
    pub(crate) fn finish(&mut self, image: &Path) -> Result<Option<(LoadedMemory, u64)>, Error> {
        let image = ImageReader::open(image)?;
        let manifest = image.manifest();
        let expected = blocks_of(manifest);
        let blocks = manifest.blocks();
        if expected.len() != blocks.len() {
            return Err(Error::CopyIncomplete);
        }
        let is_of_image: HashSet<ExpectedBlock> = expected.iter().copied().collect();
        let kept = self.blocks.drain(..).filter(|block| is_of_image.contains(&block.what));
        let kept = kept.map(|block| (block.what, block)).collect();
        let Some(made) = self.make_all(&expected, kept)? else { return Ok(None) };
        let mut memory: Vec<SharedBlock> = Vec::with_capacity(blocks.len());
        let (mut missing, mut ahead) = (Vec::new(), 0);
        for (number, (made, block)) in made.into_iter().zip(&blocks).enumerate() {
            let AheadBlock { memory: Some(its), chunks, .. } = made else {
                return Err(Error::CopyIncomplete);
            };
            for (chunk, (there, id)) in chunks.iter().zip(&block.chunks).enumerate() {
                let span = Span::of(&its, number, chunk);
                match there.loaded == Some(*id) {
                    true => ahead += span.len as u64,
                    false => missing.push(span),
                }
            }
            memory.push(its);
        }
        tracing::debug!(chunks = missing.len(), "device memory that has not come ahead");
        let loaded = self.load_missing(&image, &blocks, &memory, missing);
        if if_room(loaded)?.is_none() {
            return Ok(None);
        }
        let fds = memory.iter().map(SharedBlock::export).collect::<Result<_, _>>()?;
        let lanes = self.lanes.drain(..).map(|ready| ready.lane).collect();
        let room = self.given.insert(Room { lanes, memory });
        let reserve = room.reserve(manifest, &self.placement);
        tracing::debug!("memory for contexts is kept");
        Ok(Some((LoadedMemory::new(image.id(), fds, reserve), ahead)))
    }

    /// Loads chunks from the image, on all devices at once.
    fn load_missing(
        &mut self,
        image: &ImageReader,
        blocks: &[&Block],
        memory: &[SharedBlock],
        missing: Vec<Span>,
    ) -> Result<(), Error> {
        let (chunks, stop) = (Chunks { blocks, image }, Stop::new(self.stop.clone()));
        std::thread::scope(|scope| {
            let threads: Vec<_> = self
                .lanes
                .iter_mut()
                .map(|ReadyLane { lane, hasher }| {
                    let uuid = lane.context().device().uuid;
                    let is_here = |span: &&Span| memory[span.block].device().uuid == uuid;
                    let here: Vec<Span> = missing.iter().filter(is_here).copied().collect();
                    let (chunks, stop) = (&chunks, &stop);
                    scope.spawn(move || {
                        chunks.fill(lane, &here, stop, &Quiet)?;
                        chunks.check(lane, hasher, here, stop)
                    })
                })
                .collect();
            threads.into_iter().try_for_each(joined)
        })?;
        if stop.is_set() { Err(Error::Interrupted) } else { Ok(()) }
    }
}

/// The blocks of a manifest, in its order.
fn blocks_of(manifest: &Manifest) -> Vec<ExpectedBlock> {
    let mut all = Vec::new();
    for process in &manifest.processes {
        let blocks = process.cuda.iter().flat_map(|cuda| &cuda.blocks);
        all.extend(blocks.map(|Block { id, device, size, .. }| ExpectedBlock {
            process: process.pid,
            id: *id,
            device: *device,
            size: *size,
        }));
    }
    all
}

/// `None` where the device has no room.
fn if_room<T>(done: Result<T, Error>) -> Result<Option<T>, Error> {
    match done {
        Ok(done) => Ok(Some(done)),
        Err(Error::Driver(error)) if error.is_no_room() => {
            tracing::info!(%error, "no device memory ahead of the restore");
            Ok(None)
        }
        Err(error) => Err(error),
    }
}

/// Whether memory of so many bytes can be made.
pub(crate) fn is_size_of_block(size: u64) -> bool {
    size > 0 && size.is_multiple_of(GRANULE)
}

#[cfg(test)]
mod tests;
