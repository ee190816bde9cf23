//! Execution of launches.

mod atomic;
mod block;
mod cluster;
mod collective;
mod context;
mod copy;
mod heap;
mod image;
mod known;
mod launches;
mod matrix;
mod mbarrier;
mod memory;
mod multimem;
mod print;
mod replicas;
mod sample;
mod surface;
mod turns;
mod vectors;
mod warp;

use super::code::RESERVED_SHARED;
use super::launch::{AddressSpace, Launch};
use super::module::{Entry, Module};
use super::trap::Trap;
use block::Block;
use context::{Context, Step};
use std::collections::VecDeque;
use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering};
use std::time::{Duration, Instant};

/// The most threads of a block, as on a GPU.
const MOST_THREADS: u64 = 1024;
/// The most blocks of a cluster, as on a GPU.
const MOST_IN_CLUSTER: u64 = 16;
/// For how long a block runs before others get their turns beside it, and for how long at a time after that.
const PATIENCE: Duration = Duration::from_millis(100);
const SLICE: Duration = Duration::from_millis(2);
/// So many blocks of a worker have begun and not ended at most: each takes memory.
const MOST_HELD: usize = 128;
/// Launches below this many threads are not worth waking other host threads for.
const SMALL: u64 = 256;

impl Context<'_> {
    fn coordinates(&self, index: u64) -> [u32; 3] {
        let [x, y, _] = self.launch.grid.map(u64::from);
        [(index % x) as u32, (index / x % y) as u32, (index / x / y) as u32]
    }

    /// Runs blocks, in their order, until none is left. A block may wait for one that has not begun, as it may on a GPU
    /// where there is room for both: so others get their turns beside one that runs for long.
    fn work(&self) {
        let (mut ended, mut held) = (Vec::new(), VecDeque::new());
        let mut is_last = false;
        while !self.stop.load(Ordering::Relaxed) {
            let index = (!is_last && held.len() < MOST_HELD)
                .then(|| self.next_block.fetch_add(1, Ordering::Relaxed))
                .filter(|index| *index < self.blocks);
            is_last |= index.is_none() && held.len() < MOST_HELD;
            let (mut block, time) = match index {
                Some(index) => {
                    let mut block = ended.pop().unwrap_or_else(|| Block::new(self));
                    block.start(self.coordinates(index), index);
                    (block, PATIENCE)
                }
                None => match held.pop_front() {
                    Some(block) => (block, SLICE),
                    None => return,
                },
            };
            match self.advance(&mut block, time) {
                Ok(true) => ended.push(block),
                Ok(false) => held.push_back(block),
                Err(fault) => return self.fail(fault),
            }
        }
    }

    /// Runs a block for some time; true once it has ended.
    fn advance(&self, block: &mut Block<'_>, time: Duration) -> Step<bool> {
        let begun = Instant::now();
        loop {
            if block.advance()? {
                return Ok(true);
            }
            if begun.elapsed() >= time {
                return Ok(false);
            }
        }
    }

    /// Runs the blocks `first`, `first + step`, ... in turns, so that all of them progress.
    fn work_together(&self, first: u64, step: u64) {
        let mut blocks: Vec<Block<'_>> = Vec::new();
        let mut index = first;
        while index < self.blocks {
            let mut block = Block::new(self);
            block.start(self.coordinates(index), index);
            blocks.push(block);
            index += step;
        }
        while !blocks.is_empty() {
            let mut at = 0;
            while at < blocks.len() {
                match blocks[at].advance() {
                    Ok(true) => {
                        blocks.swap_remove(at);
                    }
                    Ok(false) => at += 1,
                    Err(fault) => return self.fail(fault),
                }
            }
            if self.stop.load(Ordering::Relaxed) {
                return;
            }
        }
    }
}

fn invalid(entry: &Entry, reason: impl Into<String>) -> Trap {
    Trap::InvalidLaunch { kernel: entry.name.clone(), reason: reason.into() }
}

/// Runs a kernel to its end, on all cores.
///
/// # Errors
/// [`Trap::InvalidLaunch`] if the launch does not fit the kernel, and nothing has run; or the first fault of a thread,
/// after which what threads have written to memory stays.
pub(super) fn run(
    module: &Module,
    entry: &Entry,
    launch: &Launch<'_>,
    memory: &dyn AddressSpace,
) -> Result<(), Trap> {
    let threads = launch.block.iter().map(|&n| u64::from(n)).product::<u64>();
    let blocks = launch.grid.iter().try_fold(1u64, |n, &m| n.checked_mul(u64::from(m)));
    let blocks = blocks.ok_or_else(|| invalid(entry, "the grid is too large"))?;
    if threads == 0 || blocks == 0 {
        return Err(invalid(entry, "the grid or the block is empty"));
    }
    if launch.block.iter().any(|&n| u64::from(n) > MOST_THREADS) || threads > MOST_THREADS {
        return Err(invalid(entry, format!("{threads} threads in a block")));
    }
    if launch.params.len() < entry.param_bytes {
        return Err(invalid(entry, "the parameter buffer is too short"));
    }
    if launch.global_addresses.len() != module.globals.len() {
        return Err(invalid(entry, "not every global variable has an address"));
    }
    if entry.function >= module.functions.len() {
        return Err(invalid(entry, "the kernel is of another module"));
    }
    // Dynamic memory may begin after padding for its alignment.
    let mut shared_bytes =
        entry.static_shared.next_multiple_of(128) + launch.dynamic_shared as usize;
    if module.functions.iter().any(|code| code.reserved_shared) {
        shared_bytes = shared_bytes.next_multiple_of(16) + RESERVED_SHARED as usize;
    }
    if shared_bytes > 16 << 20 {
        return Err(invalid(entry, "too much shared memory"));
    }
    let size = launch.cluster.iter().fold(1u64, |all, &n| all.saturating_mul(u64::from(n)));
    let mut directions = launch.grid.iter().zip(launch.cluster);
    if !(1..=MOST_IN_CLUSTER).contains(&size)
        || directions.any(|(&grid, cluster)| !grid.is_multiple_of(cluster))
        || (size > 1 && launch.cooperative)
    {
        return Err(invalid(entry, format!("clusters of {:?} blocks", launch.cluster)));
    }
    let context = Context {
        module,
        entry,
        launch,
        memory,
        shared_bytes,
        next_block: AtomicU64::new(0),
        blocks,
        stop: AtomicBool::new(false),
        workspace: [AtomicU32::new(8), AtomicU32::new(0)],
        trap: Mutex::new(None),
    };
    let work = || if size > 1 { context.work_in_clusters() } else { context.work() };
    let workers = (rayon::current_num_threads() as u64).min(blocks / size);
    if workers <= 1 || threads * blocks <= SMALL {
        if launch.cooperative { context.work_together(0, 1) } else { work() }
    } else if launch.cooperative {
        // Blocks wait for each other, so every worker needs a thread of its own at once.
        std::thread::scope(|scope| {
            for first in 1..workers {
                let context = &context;
                scope.spawn(move || context.work_together(first, workers));
            }
            context.work_together(0, workers);
        });
    } else {
        rayon::in_place_scope(|scope| {
            for _ in 1..workers {
                scope.spawn(|_| work());
            }
            work();
        });
    }
    let trap = context.trap.into_inner().unwrap_or_else(std::sync::PoisonError::into_inner);
    trap.map_or(Ok(()), Err)
}
