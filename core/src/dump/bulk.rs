//! Copying the bulk memory of stopped programs into the image.

use std::os::fd::AsFd;
use std::sync::Arc;

use gpucr_wire::{Block, CHUNK_SIZE};
use parking_lot::Mutex;
use rayon::prelude::*;

use crate::device::driver::code;
use crate::device::lanes::chunks_in;
use crate::device::{Device, Driver, DriverError, Lane, SharedBlock, TransferError};
use crate::error::Error;
use crate::held::Held;
use crate::phase::Progress;
use crate::stage::Stage;
use crate::stop::Stop;
use crate::store::{ChunkId, ChunkWriter, StoreError};

/// Bytes that the agent copies at a time when it copies from inside.
const STAGE: u64 = 64 << 20;

/// The blocks of a program with the chunks that they turned into.
pub(super) type Saved = Vec<(Block, Vec<ChunkId>)>;

/// The contexts through which gpucr copies by itself, one for each device.
///
/// `None` where the driver grants no second context: no memory left, or a compute mode that
/// admits one process only. Then the programs copy from inside, which is slower.
pub(super) fn prepare(
    driver: &Arc<Driver>,
    devices: &[Device],
    bulk_bytes: u64,
) -> Result<Option<Vec<Lane>>, Error> {
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
    Ok(Some(lanes))
}

fn no_room(error: &DriverError) -> bool {
    [code::OUT_OF_MEMORY, code::DEVICE_UNAVAILABLE].contains(&error.code)
}

/// The memory of all programs, mapped in gpucr.
pub(super) struct Imported {
    /// In the order of the programs and their blocks. Let go of before the lanes.
    shared: Vec<SharedBlock>,
    lanes: Vec<Lane>,
}

impl Imported {
    /// Maps every block of every program. `None` where the driver has no room for that.
    pub(super) fn import(
        lanes: Vec<Lane>,
        held: &[Held],
        blocks: &[Vec<Block>],
    ) -> Result<Option<Self>, Error> {
        let mut shared = Vec::new();
        for (program, blocks) in held.iter().zip(blocks) {
            for (block, (_, fd)) in blocks.iter().zip(&program.blocks) {
                let lane = lanes.iter().find(|lane| lane.context().device().uuid == block.device);
                let lane = lane.ok_or_else(|| Error::Changed {
                    pid: program.process.pid,
                    what: format!("it began to use the device {}", crate::hex(&block.device)),
                })?;
                match SharedBlock::import(lane.context(), fd.as_fd(), block.size) {
                    Ok(block) => shared.push(block),
                    Err(error) if no_room(&error) => {
                        tracing::warn!(%error, "no room to map the memory; copying inside");
                        return Ok(None);
                    }
                    Err(error) => return Err(error.into()),
                }
            }
        }
        Ok(Some(Self { shared, lanes }))
    }

    /// Copies everything into the store; ends early when `stop` is set. The memory is let go of
    /// in any case.
    pub(super) fn copy(
        mut self,
        store: &ChunkWriter,
        stop: &Stop,
        progress: &dyn Progress,
    ) -> Result<Vec<Vec<ChunkId>>, Error> {
        let saved: Vec<Mutex<Vec<Option<ChunkId>>>> =
            self.shared.iter().map(|b| Mutex::new(vec![None; chunks_in(b.len())])).collect();
        let take = |span: crate::device::Span, bytes: &[u8]| -> Result<(), StoreError> {
            let id = store.put(bytes)?;
            saved[span.block].lock()[span.chunk] = Some(id);
            progress.advance(bytes.len() as u64);
            Ok(())
        };
        let shared = &self.shared;
        std::thread::scope(|scope| {
            let copies: Vec<_> = self
                .lanes
                .iter_mut()
                .map(|lane| scope.spawn(|| lane.copy_out(shared, stop, &take)))
                .collect();
            copies.into_iter().try_for_each(|copy| {
                copy.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic))
            })
        })
        .map_err(|error| match error {
            TransferError::Driver(error) => Error::Driver(error),
            TransferError::Chunk(error) => Error::Store(error),
        })?;
        saved
            .into_iter()
            .map(|chunks| chunks.into_inner().into_iter().collect::<Option<Vec<_>>>())
            .collect::<Option<Vec<_>>>()
            .ok_or(Error::CopyIncomplete)
    }
}

/// Copies the blocks of one program through its own context, by way of shared memory.
pub(super) fn copy_inside(
    program: &mut Held,
    blocks: &[Block],
    store: &ChunkWriter,
    stop: &Stop,
    progress: &dyn Progress,
) -> Result<Vec<Vec<ChunkId>>, Error> {
    let stage = Stage::create(STAGE)?;
    let agent = program.agent.as_mut().expect("only programs with an agent have blocks");
    agent.stage(&stage.memory, STAGE)?;
    let mut saved = Vec::with_capacity(blocks.len());
    for block in blocks {
        let mut chunks = Vec::with_capacity(chunks_in(block.size));
        for offset in (0..block.size).step_by(STAGE as usize) {
            if stop.is_set() {
                return Err(Error::CopyIncomplete);
            }
            let len = STAGE.min(block.size - offset);
            agent.copy_out(block.id, offset, len)?;
            let pieces: Vec<&[u8]> =
                stage.bytes()[..len as usize].chunks(CHUNK_SIZE as usize).collect();
            let ids: Vec<ChunkId> =
                pieces.into_par_iter().map(|piece| store.put(piece)).collect::<Result<_, _>>()?;
            chunks.extend(ids);
            progress.advance(len);
        }
        saved.push(chunks);
    }
    Ok(saved)
}
