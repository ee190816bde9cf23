//! Occupancy: simple answers from the limits that the device attributes state.

use super::arguments::{In, Out};
use super::driver_api;
use super::function::find;
use super::launch_config::Config;
use crate::status::{Code, Outcome};

type SharedForBlock = Option<unsafe extern "C" fn(i32) -> usize>;

fn active(out: &Out<i32>, function: u64, threads: i32, shared: usize, flags: u32) -> Outcome {
    if threads <= 0 || flags & !1 != 0 {
        return Err(Code::INVALID_VALUE);
    }
    out.set(find(function)?.resident_blocks(threads, shared))
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
        let blocks = function.resident_blocks(threads, shared);
        if blocks * threads > found.0 {
            found = (blocks * threads, blocks, threads);
        }
    }
    grid.set(found.1 * function.model().multiprocessors as i32)?;
    block.set(found.2)
}

/// Checks the clusters that a launch asks for: the most that can run at the same time, if it asks for any.
///
/// # Errors
/// `INVALID_CLUSTER_SIZE` for what the device or the function cannot have, `INVALID_VALUE` for blocks without threads.
fn clusters(function: u64, config: &In<Config>) -> Outcome<i32> {
    let config = config.get()?;
    let function = find(function)?;
    let cluster = config.cluster()?;
    let size = cluster.unwrap_or([1; 3]).iter().try_fold(1_u32, |all, n| all.checked_mul(*n));
    let most = if function.has_clusters() { function.most_in_cluster() } else { 1 };
    let size = size.filter(|size| *size <= most).ok_or(Code::INVALID_CLUSTER_SIZE)?;
    let threads = config.block.iter().try_fold(1_u32, |all, n| all.checked_mul(*n));
    let threads = threads.and_then(|n| i32::try_from(n).ok()).filter(|n| *n > 0);
    let threads = threads.ok_or(Code::INVALID_VALUE)?;
    let blocks = function.resident_blocks(threads, config.shared as usize);
    // Driver 580 has none where the launch does not ask for clusters.
    let all = blocks * function.model().multiprocessors as i32;
    Ok(cluster.map_or(0, |_| all / size as i32))
}

driver_api! {
    call fn cuOccupancyMaxActiveClusters(out: Out<i32>, function: u64, config: In<Config>) {
        out.check()?;
        out.set(clusters(function, &config)?)
    }

    call fn cuOccupancyMaxPotentialClusterSize(out: Out<i32>, function: u64, config: In<Config>) {
        out.check()?;
        clusters(function, &config)?;
        let function = find(function)?;
        out.set(if function.has_clusters() { function.most_in_cluster() as i32 } else { 1 })
    }

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
        // Without the function's consent a block has no more than any has, as the tests of cuda.core expect.
        let most = function.dynamic_shared_limit();
        out.set(each.saturating_sub(function.entry.static_shared).min(most))
    }
}
