//! The memory of the programs, mapped in gpucr.

use std::collections::{BTreeMap, HashMap, HashSet};
use std::os::fd::AsFd;
use std::sync::Arc;

use gpucr_wire::{Block, CHUNK_SIZE};

use super::chunks::{Chunk, Miss, ProgramBlock};
use super::deferred::Deferred;
use crate::base::cores::Cores;
use crate::base::timeline::Timeline;
use crate::cuda::span::chunks_in;
use crate::cuda::{Context, Device, Driver, Hasher, Lane, SharedBlock};
use crate::engine::cuda_process::CudaProcess;
use crate::engine::error::Error;
use crate::engine::multicast;

/// The memory of all programs, mapped in gpucr.
pub(crate) struct Bulk {
    /// The blocks, in the order of the programs. Let go of before the lanes.
    pub(super) pieces: Vec<ProgramBlock>,
    /// Places among the pieces by program and address, without blocks that are not mapped there.
    pub(super) by_address: BTreeMap<(usize, u64), usize>,
    /// A hasher for each lane; none where the driver does not run the kernel.
    pub(super) hashers: Option<Vec<Hasher>>,
    /// How often the programs had been asked what they launch when copying went on (see
    /// `engine/dump/speculate.rs`).
    pub(crate) interval: usize,
    /// Memory of gpucr's own with copies of what is to be saved.
    pub(super) shadows: Vec<Shadow>,
    /// What is saved while the programs run.
    pub(super) deferred: Arc<Deferred>,
    /// What was found to have changed before it was saved while the programs ran.
    pub(crate) missed: Vec<Miss>,
    /// gpucr's context on each device.
    pub(super) lanes: Vec<Lane>,
    /// Which CPUs may be used while the programs run; `None` if nothing is copied meanwhile.
    pub(super) cores: Option<Arc<Cores>>,
    pub(super) timeline: Timeline,
}

/// Device memory in which shadows are.
pub(super) struct Shadow {
    #[expect(dead_code, reason = "keeps the memory until everything is saved")]
    pub(super) memory: SharedBlock,
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
                Err(error) if error.is_no_room() => {
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
    pub(crate) fn contexts(&self) -> Vec<Arc<Context>> {
        self.lanes.iter().map(|lane| lane.context().clone()).collect()
    }

    /// Makes ready to have what is copied hashed on the devices, so that the host need not. Without that, and
    /// where the devices have no memory for it, copying works all the same.
    pub(crate) fn prepare_bounce(&mut self, bulk_bytes: u64) {
        for lane in &mut self.lanes {
            if let Err(error) = lane.prepare_bounce(bulk_bytes) {
                tracing::debug!(%error, "the host hashes what it copies");
            }
        }
    }

    /// Maps the blocks that are new and lets go of blocks that are gone, so that exactly `blocks` are
    /// mapped, in their order. `false` where the driver has no room for that.
    pub(crate) fn follow(
        &mut self,
        cuda_processes: &[CudaProcess],
        blocks: &[Vec<Block>],
    ) -> Result<bool, Error> {
        let mut known: HashMap<(usize, u64), ProgramBlock> =
            self.pieces.drain(..).map(|piece| ((piece.program, piece.id), piece)).collect();
        let mut listed = HashSet::new();
        for (program, blocks) in blocks.iter().enumerate() {
            listed.extend(blocks.iter().map(|block| (program, block.id)));
        }
        // First let go of memory, then map more.
        known.retain(|key, _| listed.contains(key));
        for (number, (program, blocks)) in cuda_processes.iter().zip(blocks).enumerate() {
            let fds: HashMap<u64, _> = program.blocks.iter().map(|(id, fd)| (*id, fd)).collect();
            for block in blocks {
                if let Some(mut piece) = known.remove(&(number, block.id)) {
                    piece.address = block.address;
                    self.pieces.push(piece);
                    continue;
                }
                let on = |lane: &Lane| lane.context().device().uuid == block.device;
                let lane = self.lanes.iter().position(on).ok_or_else(|| Error::Changed {
                    pid: program.process.pid,
                    what: format!(
                        "it began to use the device {}",
                        crate::base::format::device_uuid(&block.device)
                    ),
                })?;
                let fd = fds.get(&block.id).ok_or_else(|| Error::Changed {
                    pid: program.process.pid,
                    what: format!("its block {} came without memory", block.id),
                })?;
                let context = self.lanes[lane].context();
                let memory = match SharedBlock::import(context, fd.as_fd(), block.size) {
                    Ok(memory) => memory,
                    Err(error) if error.is_no_room() => {
                        tracing::warn!(%error, "no room to map the memory; copying inside");
                        return Ok(false);
                    }
                    Err(error) => return Err(error.into()),
                };
                let chunks = vec![Chunk::default(); chunks_in(block.size)];
                let memory = Some(memory);
                let (id, address) = (block.id, block.address);
                self.pieces.push(ProgramBlock {
                    program: number,
                    id,
                    address,
                    lane,
                    memory,
                    chunks,
                    is_open_to_others: false,
                    range: None,
                });
            }
        }
        let mapped = self.pieces.iter().enumerate().filter(|(_, piece)| piece.address != 0);
        self.by_address = mapped.map(|(at, piece)| ((piece.program, piece.address), at)).collect();
        let opened: HashSet<(u32, u64)> = cuda_processes
            .iter()
            .flat_map(|program| &program.opened)
            .map(|opened| (opened.owner, opened.block))
            .collect();
        let bound = multicast::bound(cuda_processes);
        for piece in &mut self.pieces {
            let pid = cuda_processes[piece.program].process.pid;
            piece.is_open_to_others =
                opened.contains(&(pid, piece.id)) || bound.contains(&(piece.program, piece.id));
        }
        Ok(true)
    }

    /// A program has ended: lets go of its memory. The programs behind it move up.
    pub(crate) fn forget_program(&mut self, program: usize) {
        self.pieces.retain(|piece| piece.program != program);
        for piece in self.pieces.iter_mut().filter(|piece| piece.program > program) {
            piece.program -= 1;
        }
        // The next list of blocks brings it up to date.
        self.by_address.clear();
    }

    /// Lets go of all memory and of what is known of it.
    pub(crate) fn forget(&mut self) {
        self.pieces.clear();
        self.by_address.clear();
        self.shadows.clear();
        self.missed.clear();
        self.deferred = Arc::default();
        self.run_concurrently(false);
    }

    /// Begins to watch which CPUs the programs, with these processes, need when memory is copied while they run.
    pub(crate) fn watch(&mut self, pids: Vec<u32>) {
        self.cores = Some(Arc::new(Cores::watch(pids)));
    }

    /// Whether copies run while the programs do, which come first then.
    pub(super) fn run_concurrently(&mut self, concurrently: bool) {
        let cores = self.cores.as_ref().filter(|_| concurrently);
        if let Some(cores) = cores {
            cores.follow();
        }
        self.lanes.iter_mut().for_each(|lane| lane.yield_cpus_to(cores.cloned()));
    }
}
