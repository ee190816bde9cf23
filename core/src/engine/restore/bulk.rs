//! Bringing the bulk memory of an image back to the device.

use std::collections::HashMap;
use std::os::fd::OwnedFd;
use std::sync::Arc;

use gpucr_wire::CHUNK_SIZE;
use rayon::prelude::*;

use crate::base::progress::Progress;
use crate::base::stage::Stage;
use crate::base::stop::Stop;
use crate::cuda::span::spans_on;
use crate::cuda::{self, Driver, DriverError, Hasher, Lane, SharedBlock, Span};
use crate::engine::error::Error;
use crate::engine::sections;
use crate::host::process::Agent;
use crate::image::{Block, Manifest, Process};
use crate::store::{ChunkId, ChunkSource};

use super::devices::Placement;
use super::source::Source;

pub(super) use crate::base::threads::joined;

/// Bytes that the agent copies at a time when it copies from inside.
const STAGE: u64 = 64 << 20;

/// Device memory that is left free while a load is at work: for hashes and bounce buffers.
pub(super) const SPARE: u64 = 128 << 20;

/// The memory of each process, in the order of [`cuda_processes`]: descriptors by block id.
pub(super) type Loaded = Vec<Vec<(u64, OwnedFd)>>;

/// The processes of the image that used CUDA, with their blocks of [`Manifest::blocks`].
pub(super) fn cuda_processes(processes: &[Process]) -> Vec<(&Process, &[Block])> {
    processes.iter().filter_map(|p| Some((p, p.cuda.as_ref()?.blocks.as_slice()))).collect()
}

/// Device memory that is kept for the contexts of the processes, by pid, until the driver makes them anew.
pub(super) type Reserve = HashMap<u32, Vec<OwnedFd>>;

/// New device memory of gpucr's own for blocks, and the lanes of their devices.
pub(super) struct Room {
    pub(super) lanes: Vec<Lane>,
    /// In the order of the blocks.
    pub(super) memory: Vec<SharedBlock>,
}

impl Room {
    /// Takes what the contexts of the processes will need of these devices, as far as it is there. It is not
    /// missed if it is not: the driver may find enough all the same.
    pub(super) fn reserve(&self, manifest: &Manifest, placement: &Placement) -> Reserve {
        let on_device = |(uuid, bytes): &([u8; 16], u64)| {
            let device = placement.of(uuid);
            let lane = self.lanes.iter().find(|lane| lane.context().device().uuid == device);
            let Some(context) = lane.map(Lane::context) else { return Vec::new() };
            // The load needs some memory itself, and what an image says is no reason to ask for more than there is.
            let room = context.free_memory().unwrap_or(0).saturating_sub(SPARE);
            cuda::take(context, (*bytes).min(room))
        };
        let contexts = sections::read_contexts(manifest).into_iter();
        contexts.map(|(pid, devices)| (pid, devices.iter().flat_map(on_device).collect())).collect()
    }
}

/// Makes new device memory. `None` where the device has no room for it besides gpucr's context, or grants none.
pub(super) fn make_room(
    driver: &Arc<Driver>,
    blocks: &[&Block],
    placement: &Placement,
) -> Result<Option<Room>, Error> {
    match try_to_make_room(driver, blocks, placement) {
        Ok(room) => Ok(Some(room)),
        Err(Error::Driver(error)) if error.is_no_room() => {
            tracing::warn!(%error, "no room for a second context; loading inside");
            Ok(None)
        }
        Err(error) => Err(error),
    }
}

fn try_to_make_room(
    driver: &Arc<Driver>,
    blocks: &[&Block],
    placement: &Placement,
) -> Result<Room, Error> {
    let mut used: Vec<[u8; 16]> = blocks.iter().map(|block| placement.of(&block.device)).collect();
    used.sort_unstable();
    used.dedup();
    let (mut lanes, mut memory) = (Vec::new(), Vec::with_capacity(blocks.len()));
    if used.is_empty() {
        return Ok(Room { lanes, memory });
    }
    let cores = std::thread::available_parallelism().map_or(2, usize::from);
    let workers = (cores / used.len()).max(2);
    for device in driver.devices()?.iter().filter(|device| used.contains(&device.uuid)) {
        lanes.push(Lane::prepare(driver, device, workers)?);
    }
    for block in blocks {
        let device = placement.of(&block.device);
        let lane = lanes.iter().find(|lane| lane.context().device().uuid == device);
        let lane = lane.ok_or_else(|| Error::Damaged {
            what: format!("block {} is on a device that the image does not list", block.id),
        })?;
        memory.push(SharedBlock::allocate(lane.context(), block.size)?);
    }
    Ok(Room { lanes, memory })
}

/// Loads blocks into new device memory of gpucr's own, and gives a descriptor of each; and what is kept for the
/// programs' contexts meanwhile. `None` where there is no room for that: then the programs load it from inside.
pub(super) fn load(
    driver: &Arc<Driver>,
    blocks: &[&Block],
    image: &Source,
    placement: &Placement,
    stop: &Stop,
    progress: &dyn Progress,
) -> Result<Option<(Vec<OwnedFd>, Reserve)>, Error> {
    let Some(room) = make_room(driver, blocks, placement)? else { return Ok(None) };
    let reserve = room.reserve(image.manifest(), placement);
    let Room { mut lanes, memory } = room;
    let chunks = Chunks { blocks, image };
    std::thread::scope(|scope| {
        let loads: Vec<_> = lanes
            .iter_mut()
            .map(|lane| {
                let work = spans_on(&memory, &lane.context().device().uuid);
                scope.spawn(|| chunks.load(lane, work, stop, progress))
            })
            .collect();
        loads.into_iter().try_for_each(joined)
    })?;
    if stop.is_set() {
        return Err(Error::Interrupted);
    }
    let fds = memory.iter().map(SharedBlock::export).collect::<Result<_, _>>()?;
    Ok(Some((fds, reserve)))
}

/// Sorts the descriptors of all blocks by their processes. Who has memory of another open gets descriptors of that too.
///
/// # Errors
/// The image is damaged, or there is no descriptor left.
pub(super) fn by_process(manifest: &Manifest, fds: Vec<OwnedFd>) -> Result<Loaded, Error> {
    let mut fds = fds.into_iter();
    let of = |blocks: &[Block]| blocks.iter().map(|b| b.id).zip(fds.by_ref()).collect();
    let processes = cuda_processes(&manifest.processes);
    let mut loaded: Loaded = processes.iter().map(|(_, blocks)| *blocks).map(of).collect();
    let place = |pid: u32| processes.iter().position(|(process, _)| process.pid == pid);
    for (pid, opened) in sections::read_opened(manifest)? {
        for one in opened {
            let owner = place(one.owner).and_then(|at| loaded.get(at)).into_iter().flatten();
            let fd = owner.into_iter().find(|(id, _)| *id == one.block).map(|(_, fd)| fd);
            let (Some(fd), Some(at)) = (fd, place(pid)) else { return Err(Error::CopyIncomplete) };
            let fd = fd.try_clone().map_err(|source| Error::Io {
                what: "no descriptor for memory that processes share".into(),
                source,
            })?;
            loaded[at].push((one.id, fd));
        }
    }
    Ok(loaded)
}

/// The chunks of the blocks of an image.
///
/// Chunks are checked on the device, where that takes next to no time: the host has enough to do with
/// reading. What does not pass is read again in a way that checks it, which finds another copy or says
/// what is damaged. All of this ends early when the stop is set.
pub(super) struct Chunks<'a> {
    pub(super) blocks: &'a [&'a Block],
    pub(super) image: &'a dyn ChunkSource,
}

impl Chunks<'_> {
    fn id(&self, span: &Span) -> &ChunkId {
        &self.blocks[span.block].chunks[span.chunk]
    }

    /// Loads the chunks of one device.
    pub(super) fn load(
        &self,
        lane: &mut Lane,
        work: Vec<Span>,
        stop: &Stop,
        progress: &dyn Progress,
    ) -> Result<(), Error> {
        let context = lane.context().clone();
        std::thread::scope(|scope| {
            // The driver may have to compile the kernel.
            let hasher = scope.spawn(move || Hasher::prepare(&context));
            self.fill(lane, &work, stop, progress)?;
            self.check(lane, &mut joined(hasher), work, stop)
        })
    }

    /// Reads chunks to the device, without a check.
    pub(super) fn fill(
        &self,
        lane: &mut Lane,
        work: &[Span],
        stop: &Stop,
        progress: &dyn Progress,
    ) -> Result<(), Error> {
        self.image.prefetch(&mut work.iter().map(|span| *self.id(span)));
        let give = |span: Span, buffer: &mut [u8]| {
            progress.advance(span.len as u64);
            self.image.get_unchecked(self.id(&span), buffer)
        };
        Ok(lane.copy_in(work, stop, &give)?)
    }

    /// Checks chunks on the device.
    pub(super) fn check(
        &self,
        lane: &mut Lane,
        hasher: &mut Result<Hasher, DriverError>,
        work: Vec<Span>,
        stop: &Stop,
    ) -> Result<(), Error> {
        if stop.is_set() {
            return Ok(());
        }
        let wrong = match hasher {
            Ok(hasher) => self.wrong(hasher, work)?,
            Err(error) => {
                tracing::warn!(%error, "device memory cannot be hashed; reading it all again");
                work
            }
        };
        let give = |span: Span, buffer: &mut [u8]| self.image.get(self.id(&span), buffer);
        lane.copy_in(&wrong, stop, &give)?;
        let (Ok(hasher), false) = (hasher, stop.is_set()) else { return Ok(()) };
        match self.wrong(hasher, wrong)?.first() {
            None => Ok(()),
            Some(span) => {
                let block = self.blocks[span.block].id;
                let what = format!("chunk {} of block {block}", span.chunk);
                Err(Error::WrongCopy { what })
            }
        }
    }

    /// The spans that do not have the bytes that they should.
    fn wrong(&self, hasher: &mut Hasher, work: Vec<Span>) -> Result<Vec<Span>, Error> {
        let places: Vec<_> = work.iter().map(|span| (span.address, span.len)).collect();
        let hashes = hasher.hash(&places)?;
        let checked = work.into_iter().zip(hashes);
        let wrong = checked.filter(|(span, hashed)| hashed.id != *self.id(span));
        Ok(wrong.map(|(span, _)| span).collect())
    }
}

/// Loads the blocks of one detached process through its own context.
pub(super) fn load_inside(
    agent: &mut Agent,
    image: &Source,
    blocks: &[Block],
    progress: &dyn Progress,
) -> Result<(), Error> {
    let mut stage = Stage::create(STAGE)?;
    agent.stage(&stage.memory, STAGE)?;
    for block in blocks {
        for (part, chunks) in block.chunks.chunks((STAGE / CHUNK_SIZE) as usize).enumerate() {
            let offset = part as u64 * STAGE;
            let len = STAGE.min(block.size - offset);
            stage.bytes_mut()[..len as usize]
                .par_chunks_mut(CHUNK_SIZE as usize)
                .zip(chunks)
                .try_for_each(|(piece, id)| image.read(id, piece))?;
            agent.copy_in(block.id, offset, len)?;
            progress.advance(len);
        }
    }
    Ok(())
}
