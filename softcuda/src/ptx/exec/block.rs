//! One block: its warps, its shared memory and its barriers.

use super::context::{Context, Fault, QUANTUM, SHORT_QUANTUM, Step};
use super::known::KnownImages;
use super::memory::Mapped;
use super::replicas::KnownReplicas;
use super::warp::{Status, Warp};
use crate::ptx::code::{BarrierMode, NONE, Reg};
use std::sync::atomic::Ordering;

/// A barrier of a block.
#[derive(Debug, Clone, Copy, Default)]
pub(super) struct Barrier {
    /// Threads that have arrived, counted in whole warps.
    arrived: u32,
    /// Threads to wait for; 0 for all that still run.
    expected: u32,
    /// The warps that wait, by number.
    waiting: u32,
    count: u32,
    all: bool,
    any: bool,
}

/// How many barriers programs can number.
const NUMBERED: usize = 16;
/// The place of the cluster's barrier, behind those.
const OF_CLUSTER: usize = NUMBERED;

/// What a warp brings to a barrier.
pub(super) struct Arrival {
    pub(super) mode: BarrierMode,
    /// The number; none for the cluster's.
    pub(super) id: Option<u64>,
    pub(super) threads: u32,
    /// How many lanes arrive, and for how many the predicate holds.
    pub(super) lanes: u32,
    pub(super) holding: u32,
}

/// What the warps of a block share.
pub(super) struct Room<'a> {
    pub(super) context: &'a Context<'a>,
    pub(super) shared: Vec<u8>,
    pub(super) mapped: Mapped<'a>,
    pub(super) known_images: KnownImages,
    pub(super) known_replicas: KnownReplicas,
    pub(super) coordinates: [u32; 3],
    /// The block's number in the grid.
    pub(super) number: u64,
    pub(super) warps: u32,
    /// The block's number in its cluster.
    pub(super) rank: usize,
    /// The shared memory of the other blocks of the cluster, by their numbers, while this one has its turn. Empty where
    /// a cluster is one block.
    pub(super) peers: Vec<Vec<u8>>,
    /// Instructions that warps have executed and that the launch does not know of yet.
    pub(super) executed: u64,
    barriers: [Barrier; NUMBERED + 1],
}

/// What came of a block's turn.
pub(super) struct Turn {
    /// All its warps have ended.
    pub(super) done: bool,
    /// Some of them ran, or can run again.
    pub(super) moved: bool,
}

impl Room<'_> {
    pub(super) fn arrive(&mut self, warp: u32, arrival: &Arrival) -> Step<()> {
        let place = match arrival.id {
            Some(id) => usize::try_from(id).ok().filter(|id| *id < NUMBERED),
            None => Some(OF_CLUSTER),
        };
        let place = place.ok_or(Fault::Instruction("a barrier number above 15"))?;
        let barrier = &mut self.barriers[place];
        if barrier.arrived == 0 {
            *barrier = Barrier { all: true, ..Barrier::default() };
        }
        barrier.arrived = barrier.arrived.saturating_add(32);
        barrier.expected = arrival.threads;
        barrier.count = barrier.count.saturating_add(arrival.holding);
        barrier.all &= arrival.holding == arrival.lanes;
        barrier.any |= arrival.holding != 0;
        if arrival.mode != BarrierMode::Arrive {
            barrier.waiting |= 1 << warp;
        }
        Ok(())
    }
}

pub(super) struct Block<'a> {
    pub(super) room: Room<'a>,
    warps: Vec<Warp<'a>>,
}

impl<'a> Block<'a> {
    pub(super) fn new(context: &'a Context<'a>) -> Self {
        let threads = context.launch.block.iter().product::<u32>();
        let warps = threads.div_ceil(32);
        let code = &context.module.functions[context.entry.function];
        let room = Room {
            context,
            shared: vec![0; context.shared_bytes],
            mapped: Mapped::new(context.memory, context.workspace_address()),
            known_images: KnownImages::default(),
            known_replicas: KnownReplicas::default(),
            coordinates: [0; 3],
            number: 0,
            warps,
            rank: 0,
            peers: Vec::new(),
            executed: 0,
            barriers: [Barrier::default(); NUMBERED + 1],
        };
        let warps = (0..warps).map(|number| Warp::new(code, number, threads, context.launch.block));
        Block { warps: warps.collect(), room }
    }

    /// Makes this the block at `coordinates`, about to start.
    pub(super) fn start(&mut self, coordinates: [u32; 3], number: u64) {
        self.room.coordinates = coordinates;
        self.room.number = number;
        self.room.barriers = [Barrier::default(); NUMBERED + 1];
        self.room.shared.fill(0);
        self.warps.iter_mut().for_each(Warp::start);
    }

    /// Gives every warp that can run a turn; true once all have ended.
    pub(super) fn advance(&mut self) -> Step<bool> {
        let turn = self.turn()?;
        if turn.done || turn.moved { Ok(turn.done) } else { Err(Fault::Deadlock) }
    }

    /// Gives every warp that can run a turn.
    pub(super) fn turn(&mut self) -> Step<Turn> {
        self.room.context.check_stop()?;
        let mut ran = false;
        let mut done = true;
        // Where lanes have changed turns, they and the other warps probably wait for each other.
        let apart = self.warps.iter().any(|warp| warp.apart && warp.status != Status::Done);
        let quantum = if apart { SHORT_QUANTUM } else { QUANTUM };
        for warp in &mut self.warps {
            if warp.status == Status::Ready {
                ran = true;
                warp.run(&mut self.room, quantum)?;
            }
            done &= warp.status == Status::Done;
        }
        if let Some(executed) = self.room.context.launch.executed {
            executed.fetch_add(std::mem::take(&mut self.room.executed), Ordering::Relaxed);
        }
        let released = !done && self.release();
        Ok(Turn { done, moved: ran || released })
    }

    /// Whether all warps that have not ended wait at the barrier of the cluster.
    pub(super) fn is_at_the_clusters_barrier(&self) -> bool {
        let live = self.warps.iter().filter(|warp| warp.status != Status::Done).count() as u32;
        self.room.barriers[OF_CLUSTER].arrived >= live * 32
    }

    /// Lets the warps pass the barrier of the cluster; whether there are any.
    pub(super) fn pass_the_clusters(&mut self) -> bool {
        let barrier = std::mem::take(&mut self.room.barriers[OF_CLUSTER]);
        self.pass(&barrier)
    }

    fn pass(&mut self, barrier: &Barrier) -> bool {
        let waiting = self.warps.iter_mut().enumerate();
        let waiting = waiting.filter(|(number, _)| barrier.waiting >> number & 1 != 0);
        waiting.map(|(_, warp)| warp.pass(barrier)).count() > 0
    }

    /// Lets warps pass the barriers that all have reached.
    fn release(&mut self) -> bool {
        let live = self.warps.iter().filter(|warp| warp.status != Status::Done).count() as u32;
        let mut released = false;
        // The barrier of a cluster of several blocks is not this block's to open.
        let own = if self.room.peers.is_empty() { NUMBERED + 1 } else { NUMBERED };
        for place in 0..own {
            let barrier = &mut self.room.barriers[place];
            let expected = if barrier.expected == 0 {
                live * 32
            } else {
                barrier.expected.div_ceil(32).saturating_mul(32)
            };
            if barrier.arrived == 0 || barrier.arrived < expected {
                continue;
            }
            let done = std::mem::take(barrier);
            released |= self.pass(&done);
        }
        released
    }
}

impl Barrier {
    /// The result of a reduction at this barrier.
    pub(super) fn result(&self, mode: BarrierMode) -> u64 {
        match mode {
            BarrierMode::And => u64::from(self.all),
            BarrierMode::Or => u64::from(self.any),
            _ => u64::from(self.count),
        }
    }
}

/// Where a waiting warp wants the result of a reduction.
#[derive(Debug, Clone, Copy)]
pub(super) struct Waiting {
    pub(super) mode: BarrierMode,
    pub(super) to: Reg,
    pub(super) mask: u32,
}

impl Default for Waiting {
    fn default() -> Self {
        Waiting { mode: BarrierMode::Sync, to: NONE, mask: 0 }
    }
}
