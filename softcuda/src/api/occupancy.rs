//! Occupancy: simple answers from the limits that the device attributes state.

use super::arguments::Out;
use super::driver_api;
use super::function::find;
use crate::modules::Function;
use crate::status::{Code, Outcome};

type SharedForBlock = Option<unsafe extern "C" fn(i32) -> usize>;

/// Blocks of a function that a multiprocessor holds at the same time.
pub(crate) fn resident_blocks(function: &Function, threads: i32, dynamic_shared: usize) -> i32 {
    let limits = function.model().generation;
    let shared = function.entry.static_shared.saturating_add(dynamic_shared);
    let by_shared = limits.shared.checked_div(shared).unwrap_or(limits.blocks as usize);
    let fits = (1..=function.max_threads() as i32).contains(&threads);
    if !fits || shared > limits.shared_of_block {
        return 0;
    }
    let threads = (threads + 31) / 32 * 32;
    (limits.blocks as i32).min(limits.threads as i32 / threads).min(by_shared as i32)
}

fn active(out: &Out<i32>, function: u64, threads: i32, shared: usize, flags: u32) -> Outcome {
    if threads <= 0 || flags & !1 != 0 {
        return Err(Code::INVALID_VALUE);
    }
    out.set(resident_blocks(&*find(function)?, threads, shared))
}

fn best(
    grid: &Out<i32>,
    block: &Out<i32>,
    function: u64,
    shared_for: SharedForBlock,
    shared: usize,
    limit: i32,
) -> Outcome {
    let function = find(function)?;
    let most = function.max_threads() as i32;
    let most = if limit > 0 { most.min(limit) } else { most };
    let mut found = (0, 0, 0);
    for threads in (1..=(most + 31) / 32).rev().map(|warps| (warps * 32).min(most)) {
        // SAFETY: the caller promises a function that may be called with any block size.
        let shared = shared_for.map_or(shared, |shared_for| unsafe { shared_for(threads) });
        let blocks = resident_blocks(&function, threads, shared);
        if blocks * threads > found.0 {
            found = (blocks * threads, blocks, threads);
        }
    }
    grid.set(found.1 * function.model().multiprocessors as i32)?;
    block.set(found.2)
}

driver_api! {
    call fn cuOccupancyMaxActiveBlocksPerMultiprocessor(
        out: Out<i32>, function: u64, threads: i32, shared: usize,
    ) {
        active(&out, function, threads, shared, 0)
    }

    call fn cuOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(
        out: Out<i32>, function: u64, threads: i32, shared: usize, flags: u32,
    ) {
        active(&out, function, threads, shared, flags)
    }

    call fn cuOccupancyMaxPotentialBlockSize(
        grid: Out<i32>, block: Out<i32>, function: u64, shared_for: SharedForBlock,
        shared: usize, limit: i32,
    ) {
        best(&grid, &block, function, shared_for, shared, limit)
    }

    call fn cuOccupancyMaxPotentialBlockSizeWithFlags(
        grid: Out<i32>, block: Out<i32>, function: u64, shared_for: SharedForBlock,
        shared: usize, limit: i32, flags: u32,
    ) {
        if flags & !1 != 0 {
            return Err(Code::INVALID_VALUE);
        }
        best(&grid, &block, function, shared_for, shared, limit)
    }

    call fn cuOccupancyAvailableDynamicSMemPerBlock(
        out: Out<usize>, function: u64, blocks: i32, threads: i32,
    ) {
        let function = find(function)?;
        if blocks <= 0 || threads <= 0 {
            return Err(Code::INVALID_VALUE);
        }
        let limits = function.model().generation;
        let each = (limits.shared / blocks as usize).min(limits.shared_of_block);
        out.set(each.saturating_sub(function.entry.static_shared))
    }
}
