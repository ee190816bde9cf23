//! Device memory of a program whose image is not there yet: it is loaded as it arrives, to where it is expected to be.
//!
//! What is expected is a guess, and nothing rests on it: [`Ahead::finish`] compares it, chunk by chunk, with the image,
//! and loads what is different or missing. What was loaded is checked on the device, as in any restore.

use std::collections::{HashMap, HashSet};
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::AtomicBool;

use super::bulk::{Chunks, Room, joined};
use super::devices::{self, MappedDevice, Placement};
use super::driver;
use super::given::LoadedMemory;
use super::memory;
use crate::base::format::hex;
use crate::base::progress::Quiet;
use crate::base::stop::Stop;
use crate::cuda::context::GRANULE;
use crate::cuda::span::chunks_in;
use crate::cuda::{Driver, DriverError, Hasher, Lane, SharedBlock, Span};
use crate::engine::error::Error;
use crate::image::{Block, DriverKind, ImageReader, Manifest};
use crate::store::{ChunkId, Filled, StoreError, constant_byte};

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
    /// The program does not have memory on these devices itself.
    is_elsewhere: bool,
    stop: Arc<AtomicBool>,
}

/// A lane, and what hashes on its device.
struct ReadyLane {
    lane: Lane,
    hasher: Result<Hasher, DriverError>,
}

struct AheadBlock {
    what: ExpectedBlock,
    memory: SharedBlock,
    chunks: Vec<AheadChunk>,
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
            is_elsewhere,
            stop: stop.clone(),
        })
    }

    /// Whether the program has this device, by its outline.
    pub(crate) fn is_of_program(&self, device: &[u8; 16]) -> bool {
        self.devices.contains(device)
    }

    /// These are all blocks that are expected from now on: memory of others is given back, and memory for new ones is
    /// made. `false` where the driver grants none besides what the program will need: then nothing can be loaded ahead.
    ///
    /// # Errors
    /// [`Error::DeviceFull`] or [`Error::NoRoom`]: they do not fit on this host.
    pub(crate) fn expect_blocks(&mut self, expected: &[ExpectedBlock]) -> Result<bool, Error> {
        let wanted: HashSet<ExpectedBlock> = expected.iter().copied().collect();
        let kept = self.blocks.drain(..).filter(|block| wanted.contains(&block.what));
        let mut kept: HashMap<ExpectedBlock, AheadBlock> =
            kept.map(|block| (block.what, block)).collect();
        let new = expected.iter().filter(|what| !kept.contains_key(what));
        let new = new.fold(0, |sum: u64, what| sum.saturating_add(what.size));
        if self.kind == DriverKind::Soft {
            memory::check_bytes(new)?;
        }
        for what in expected {
            let block = match kept.remove(what) {
                Some(block) => block,
                None => match self.make(*what) {
                    Ok(block) => block,
                    Err(Error::Driver(error)) if error.is_no_room() => {
                        tracing::info!(%error, "no device memory ahead of the image");
                        drop(kept);
                        self.blocks.clear();
                        return self.check_room(expected).map(|()| false);
                    }
                    Err(error) => {
                        tracing::warn!(%error, "no device memory ahead of the image");
                        return Ok(false);
                    }
                },
            };
            self.blocks.push(block);
        }
        self.places.clear();
        for (number, block) in self.blocks.iter().enumerate() {
            for (chunk, id) in block.chunks.iter().enumerate() {
                if let Some(id) = id.expected {
                    self.places.entry(id).or_default().insert((number, chunk));
                }
            }
        }
        Ok(true)
    }

    /// Whether a program with these blocks fits at all, if it does not have to make room for itself. Its contexts will take about as much as those that are here.
    fn check_room(&self, expected: &[ExpectedBlock]) -> Result<(), Error> {
        for ReadyLane { lane, .. } in self.lanes.iter().filter(|_| self.is_elsewhere) {
            let device = lane.context().device();
            let here =
                expected.iter().filter(|what| self.placement.of(&what.device) == device.uuid);
            let needed = here.fold(0, |sum: u64, what| sum.saturating_add(what.size));
            let free = lane.context().free_memory()?;
            if needed > free {
                return Err(Error::DeviceFull { device: device.name.clone(), needed, free });
            }
        }
        Ok(())
    }

    fn make(&mut self, what: ExpectedBlock) -> Result<AheadBlock, Error> {
        let device = self.placement.of(&what.device);
        let lane = self.lane(&device)?;
        let memory = SharedBlock::allocate(self.lanes[lane].lane.context(), what.size)?;
        Ok(AheadBlock { what, memory, chunks: vec![AheadChunk::default(); chunks_in(what.size)] })
    }

    /// The lane of a device of this host, which is made if there is none.
    fn lane(&mut self, uuid: &[u8; 16]) -> Result<usize, Error> {
        let is_its = |ready: &ReadyLane| ready.lane.context().device().uuid == *uuid;
        if let Some(number) = self.lanes.iter().position(is_its) {
            return Ok(number);
        }
        let devices = self.driver.devices()?;
        let device = devices.iter().find(|device| device.uuid == *uuid);
        let device = device.ok_or_else(|| Error::NoSuchDevice { what: hex(uuid) })?;
        let cores = std::thread::available_parallelism().map_or(2, usize::from);
        let lane = Lane::prepare(&self.driver, device, cores.max(2))?;
        let hasher = Hasher::prepare(lane.context());
        self.lanes.push(ReadyLane { lane, hasher });
        Ok(self.lanes.len() - 1)
    }

    /// From chunk `first` on, block number `block` of those that are expected is expected to have these chunks. `false`
    /// if there is no such block, or it has not so many.
    pub(crate) fn expect_chunks(&mut self, block: usize, first: usize, ids: &[ChunkId]) -> bool {
        let Some(chunks) = self.blocks.get_mut(block).and_then(|it| it.chunks.get_mut(first..))
        else {
            return false;
        };
        if chunks.len() < ids.len() {
            return false;
        }
        for (number, (chunk, id)) in chunks.iter_mut().zip(ids).enumerate() {
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
            self.places.entry(*id).or_default().insert(place);
        }
        true
    }

    /// Loads chunks, whose bytes were checked against their ids, to where they are expected.
    ///
    /// # Errors
    /// A copy has failed, or the bytes on the device are other ones.
    pub(crate) fn load(&mut self, chunks: &[(ChunkId, Vec<u8>)]) -> Result<(), Error> {
        let bytes: HashMap<ChunkId, (&[u8], Option<u8>)> = chunks
            .iter()
            .map(|(id, bytes)| (*id, (bytes.as_slice(), constant_byte(bytes))))
            .collect();
        let mut spans: Vec<Span> = Vec::new();
        for (id, (bytes, _)) in &bytes {
            for (block, chunk) in self.places.remove(id).into_iter().flatten() {
                let AheadBlock { memory, chunks, .. } = &mut self.blocks[block];
                let span = Span::of(memory, block, chunk);
                let AheadChunk { expected, loaded } = &mut chunks[chunk];
                if *expected == Some(*id) && *loaded != Some(*id) && span.len == bytes.len() {
                    *loaded = None;
                    spans.push(span);
                }
            }
        }
        let Self { lanes, blocks, stop, .. } = self;
        for ReadyLane { lane, hasher } in lanes {
            let uuid = lane.context().device().uuid;
            let is_here = |span: &&Span| blocks[span.block].memory.device().uuid == uuid;
            let here: Vec<Span> = spans.iter().filter(is_here).copied().collect();
            if here.is_empty() {
                continue;
            }
            let expected = |span: &Span| blocks[span.block].chunks[span.chunk].expected;
            let stop = Stop::new(stop.clone());
            let give = |span: Span, buffer: &mut [u8]| -> Result<Filled, StoreError> {
                let id = expected(&span).unwrap_or(ChunkId([0; 32]));
                let given = bytes.get(&id).filter(|(given, _)| given.len() == buffer.len());
                let (given, constant) = *given.ok_or(StoreError::UnknownChunk { id })?;
                if let Some(byte) = constant {
                    return Ok(Filled::Constant(byte));
                }
                buffer.copy_from_slice(given);
                Ok(Filled::Bytes)
            };
            lane.copy_in(&here, &stop, &give).map_err(Error::from)?;
            if stop.is_set() {
                return Err(Error::Interrupted);
            }
            // Without a hasher the host's check of these bytes is the one that there is.
            if let Ok(hasher) = hasher {
                let places: Vec<_> = here.iter().map(|span| (span.address, span.len)).collect();
                let mut checked = here.iter().zip(hasher.hash(&places)?);
                let wrong = checked.find(|(span, hashed)| expected(span) != Some(hashed.id));
                if let Some((span, _)) = wrong {
                    let block = blocks[span.block].what.id;
                    let what = format!("chunk {} of block {block}", span.chunk);
                    return Err(Error::WrongCopy { what });
                }
            }
            for span in here {
                let chunk = &mut blocks[span.block].chunks[span.chunk];
                chunk.loaded = chunk.expected;
            }
        }
        Ok(())
    }

    /// The image is there: loads what is missing, and gives all of its device memory, and how many bytes of it were
    /// loaded before. `None` where the device has no room for that besides gpucr's contexts, which end with this.
    ///
    /// # Errors
    /// The image is damaged; a copy has failed; the stop was set.
    pub(crate) fn finish(mut self, image: &Path) -> Result<Option<(LoadedMemory, u64)>, Error> {
        let image = ImageReader::open(image)?;
        let manifest = image.manifest();
        let mut kept: HashMap<ExpectedBlock, AheadBlock> =
            self.blocks.drain(..).map(|block| (block.what, block)).collect();
        let of = |process: u32, block: &Block| ExpectedBlock {
            process,
            id: block.id,
            device: block.device,
            size: block.size,
        };
        let mut expected = Vec::new();
        for process in &manifest.processes {
            let blocks = process.cuda.iter().flat_map(|cuda| &cuda.blocks);
            expected.extend(blocks.map(|block| of(process.pid, block)));
        }
        let blocks = manifest.blocks();
        if expected.len() != blocks.len() {
            return Err(Error::CopyIncomplete);
        }
        let is_of_image: HashSet<ExpectedBlock> = expected.iter().copied().collect();
        kept.retain(|what, _| is_of_image.contains(what));
        if self.kind == DriverKind::Soft {
            let new = expected.iter().filter(|what| !kept.contains_key(what));
            memory::check_bytes(new.fold(0, |sum: u64, what| sum.saturating_add(what.size)))?;
        }
        let mut memory: Vec<SharedBlock> = Vec::with_capacity(blocks.len());
        let (mut missing, mut ahead) = (Vec::new(), 0);
        for (number, (what, block)) in expected.iter().zip(&blocks).enumerate() {
            let made = kept.remove(what).map_or_else(|| self.make(*what), Ok);
            let made = match made {
                Ok(made) => made,
                Err(Error::Driver(error)) if error.is_no_room() => {
                    tracing::info!(%error, "no device memory ahead of the restore");
                    return Ok(None);
                }
                Err(error) => return Err(error),
            };
            for (chunk, id) in block.chunks.iter().enumerate() {
                let span = Span::of(&made.memory, number, chunk);
                match made.chunks[chunk].loaded == Some(*id) {
                    true => ahead += span.len as u64,
                    false => missing.push(span),
                }
            }
            memory.push(made.memory);
        }
        self.load_missing(&image, &blocks, &memory, missing)?;
        let fds = memory.iter().map(SharedBlock::export).collect::<Result<_, _>>()?;
        let lanes = self.lanes.drain(..).map(|ready| ready.lane).collect();
        let room = Room { lanes, memory };
        let reserve = room.reserve(manifest, &self.placement);
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

/// Whether memory of so many bytes can be made.
pub(crate) fn is_size_of_block(size: u64) -> bool {
    size > 0 && size.is_multiple_of(GRANULE)
}

#[cfg(test)]
#[path = "ahead_tests.rs"]
mod tests;
