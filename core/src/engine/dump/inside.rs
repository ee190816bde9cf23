//! The copy from inside, where gpucr has no context of its own: the program's agent copies.

use gpucr_wire::{Block, CHUNK_SIZE};
use rayon::prelude::*;

use crate::base::progress::Progress;
use crate::base::stage::Stage;
use crate::base::stop::Stop;
use crate::base::timeline::{Counter, Timeline, Track};
use crate::cuda::span::chunks_in;
use crate::engine::cuda_process::CudaProcess;
use crate::engine::error::Error;
use crate::store::{ChunkId, ChunkSink};

/// Bytes that the agent copies at a time.
const STAGE: u64 = 64 << 20;

/// Copies the blocks of one program through its own context, by way of shared memory.
pub(super) fn copy(
    program: &mut CudaProcess,
    blocks: &[Block],
    sink: &dyn ChunkSink,
    stop: &Stop,
    progress: &dyn Progress,
    timeline: &Timeline,
) -> Result<Vec<Vec<ChunkId>>, Error> {
    let mut slice = timeline.begin(Track::Copies(0), || "from inside");
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
                pieces.into_par_iter().map(|piece| sink.put(piece)).collect::<Result<_, _>>()?;
            chunks.extend(ids);
            progress.advance(len);
            timeline.add(Counter::Copied, len);
        }
        saved.push(chunks);
    }
    slice.set_bytes(blocks.iter().map(|block| block.size).sum());
    Ok(saved)
}
