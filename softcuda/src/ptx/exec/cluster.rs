//! Clusters: blocks that see each other's shared memory and meet at a barrier of their own. One host thread runs all
//! blocks of a cluster, in turns.

use super::block::{Block, Room};
use super::context::{Context, Fault, Step};
use super::warp::{Warp, for_lanes};
use crate::ptx::code::{Op, Special};
use std::sync::atomic::Ordering;

/// Where the rank of a block is in an address of shared memory, plus one: there is none in an address of the block's
/// own. No block has more shared memory than fits below.
pub(super) const RANK_SHIFT: u32 = 24;
/// The bits of it; a cluster has at most 16 blocks.
const RANK_MASK: u64 = 0xff << RANK_SHIFT;

impl Context<'_> {
    /// Blocks of a cluster.
    pub(super) fn cluster_size(&self) -> u64 {
        self.launch.cluster.iter().map(|&n| u64::from(n)).product()
    }

    /// The coordinates of a block of a cluster, and its number in the grid.
    fn in_cluster(&self, cluster: u64, rank: u64) -> ([u32; 3], u64) {
        let (grid, shape) = (self.launch.grid.map(u64::from), self.launch.cluster.map(u64::from));
        let clusters: [u64; 3] = std::array::from_fn(|axis| grid[axis] / shape[axis]);
        let place = |index: u64, [x, y, _]: [u64; 3]| [index % x, index / x % y, index / x / y];
        let (of_cluster, inside) = (place(cluster, clusters), place(rank, shape));
        let at: [u64; 3] = std::array::from_fn(|n| of_cluster[n] * shape[n] + inside[n]);
        (at.map(|n| n as u32), at[0] + grid[0] * (at[1] + grid[1] * at[2]))
    }

    /// Runs clusters, in their order, until none is left.
    pub(super) fn work_in_clusters(&self) {
        let size = self.cluster_size();
        let mut blocks: Vec<Block<'_>> = Vec::new();
        loop {
            let cluster = self.next_block.fetch_add(1, Ordering::Relaxed);
            if cluster >= self.blocks / size || self.stop.load(Ordering::Relaxed) {
                return;
            }
            if blocks.is_empty() {
                blocks.extend((0..size).map(|_| Block::new(self)));
            }
            for (rank, block) in blocks.iter_mut().enumerate() {
                let (coordinates, number) = self.in_cluster(cluster, rank as u64);
                block.start(coordinates, number);
                block.room.rank = rank;
                block.room.peers.resize(size as usize, Vec::new());
            }
            if let Err(fault) = run(&mut blocks) {
                return self.fail(fault);
            }
        }
    }
}

/// Runs a cluster to its end.
fn run(blocks: &mut [Block<'_>]) -> Step<()> {
    loop {
        let (mut done, mut moved) = (true, false);
        for rank in 0..blocks.len() {
            exchange(blocks, rank);
            let turn = blocks[rank].turn();
            exchange(blocks, rank);
            let turn = turn?;
            done &= turn.done;
            moved |= turn.moved;
        }
        if done {
            return Ok(());
        }
        if blocks.iter().all(Block::is_at_the_clusters_barrier) {
            moved |= blocks.iter_mut().fold(false, |any, block| block.pass_the_clusters() | any);
        }
        if !moved {
            return Err(Fault::Deadlock);
        }
    }
}

/// Lends a block the shared memory of all others, or gives it back.
fn exchange(blocks: &mut [Block<'_>], rank: usize) {
    let mut peers = std::mem::take(&mut blocks[rank].room.peers);
    for (other, peer) in peers.iter_mut().enumerate().filter(|(other, _)| *other != rank) {
        std::mem::swap(peer, &mut blocks[other].room.shared);
    }
    blocks[rank].room.peers = peers;
}

impl Room<'_> {
    /// The shared memory that an address with a rank is in, and the offset there.
    #[cold]
    pub(super) fn of_a_rank(&mut self, offset: u64) -> Option<(&mut Vec<u8>, u64)> {
        let rank = usize::try_from((offset >> RANK_SHIFT).checked_sub(1)?).ok()?;
        let inside = offset & ((1 << RANK_SHIFT) - 1);
        let peer = self.peers.get_mut(rank)?;
        Some((if rank == self.rank { &mut self.shared } else { peer }, inside))
    }

    /// A special register that is about clusters.
    pub(super) fn cluster_special(&self, special: Special) -> u32 {
        let launch = self.context.launch;
        let axis = |axis: u8| usize::from(axis);
        match special {
            Special::ClusterId(n) => self.coordinates[axis(n)] / launch.cluster[axis(n)],
            Special::ClusterCount(n) => launch.grid[axis(n)] / launch.cluster[axis(n)],
            Special::BlockInCluster(n) => self.coordinates[axis(n)] % launch.cluster[axis(n)],
            Special::ClusterShape(n) => launch.cluster[axis(n)],
            Special::ClusterRank => self.rank as u32,
            Special::ClusterSize => self.context.cluster_size() as u32,
            _ => u32::from(self.context.cluster_size() > 1),
        }
    }
}

impl Warp<'_> {
    /// `mapa`: the same place in the shared memory of the block of a rank; and `getctarank`, which gives the rank.
    pub(super) fn cluster_address(&mut self, room: &Room<'_>, op: &Op, mask: u32) -> Step<()> {
        let is_one_block = room.peers.is_empty();
        match *op {
            Op::ClusterAddress(to, address, rank) => {
                let (mut result, ranks) = (*self.lanes(address), *self.lanes(rank));
                let size = room.context.cluster_size();
                let mut beyond = false;
                for_lanes(mask, |lane| {
                    let rank = ranks[lane] & 0xffff_ffff;
                    beyond |= rank >= size;
                    if !is_one_block {
                        result[lane] = result[lane] & !RANK_MASK | ((rank + 1) << RANK_SHIFT);
                    }
                });
                if beyond && !is_one_block {
                    return Err(Fault::Instruction("a rank beyond the cluster"));
                }
                self.merge(to, mask, &result);
            }
            Op::RankOfAddress(to, address) => {
                let own = room.rank as u64;
                let ranks = self.lanes(address).map(|address| {
                    ((address & RANK_MASK) >> RANK_SHIFT).checked_sub(1).unwrap_or(own)
                });
                self.merge(to, mask, &ranks);
            }
            _ => return Err(Fault::Instruction("an instruction that is not about clusters")),
        }
        Ok(())
    }
}
