//! Shapes of launches: how many blocks and threads, and which of them a function can be launched with.

use crate::modules::Function;
use crate::status::{Code, Outcome};

/// Grid, blocks and shared memory of a launch.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Shape {
    /// Blocks in each direction.
    pub(crate) grid: [u32; 3],
    /// Threads of a block in each direction.
    pub(crate) block: [u32; 3],
    /// Dynamic shared memory in bytes.
    pub(crate) shared: u32,
    /// All blocks run at the same time.
    pub(crate) cooperative: bool,
    /// Blocks of a cluster in each direction, if the launch says so.
    pub(crate) cluster: Option<[u32; 3]>,
}

impl Shape {
    /// Blocks of a cluster of this function in each direction.
    pub(crate) fn cluster_of(&self, function: &Function) -> [u32; 3] {
        self.cluster.or(function.entry.cluster).unwrap_or([1; 3])
    }
}

fn is_within(sizes: [u32; 3], limits: [u32; 3]) -> bool {
    sizes.iter().zip(limits).all(|(size, limit)| (1..=limit).contains(size))
}

/// Whether the devices can have a block of this shape.
pub(crate) fn is_block(block: [u32; 3]) -> bool {
    is_within(block, [1024, 1024, 64]) && block.iter().product::<u32>() <= 1024
}

/// Refuses shapes that the function cannot be launched with.
///
/// # Errors
/// `INVALID_VALUE`; of clusters `INVALID_CLUSTER_SIZE` or `NOT_SUPPORTED`; `COOPERATIVE_LAUNCH_TOO_LARGE`.
pub(crate) fn check(function: &Function, shape: &Shape) -> Outcome {
    if !is_within(shape.grid, [i32::MAX as u32, 65535, 65535])
        || !is_block(shape.block)
        || shape.shared as usize > function.dynamic_shared_limit()
    {
        return Err(Code::INVALID_VALUE);
    }
    let threads: u32 = shape.block.iter().product();
    // By the tests of numba-cuda, which launch beyond `.maxntid`.
    if threads > function.max_threads() {
        return Err(Code::INVALID_VALUE);
    }
    check_cluster(function, shape)?;
    if shape.cooperative {
        let blocks = shape.grid.iter().try_fold(1u32, |product, n| product.checked_mul(*n));
        let resident = function.resident_blocks(threads as i32, shape.shared as usize);
        let limit = resident.saturating_mul(function.model().multiprocessors as i32);
        if blocks.is_none_or(|blocks| blocks > limit as u32) {
            return Err(Code::COOPERATIVE_LAUNCH_TOO_LARGE);
        }
    }
    Ok(())
}

/// Refuses clusters that the function cannot be launched in.
fn check_cluster(function: &Function, shape: &Shape) -> Outcome {
    let cluster = shape.cluster_of(function);
    if cluster == [1; 3] {
        return Ok(());
    }
    let wanted = function.entry.cluster;
    if wanted.is_none() && !function.has_clusters() || shape.cooperative {
        return Err(Code::NOT_SUPPORTED);
    }
    let blocks = cluster.iter().try_fold(1u32, |product, n| product.checked_mul(*n));
    let fits = shape.grid.iter().zip(cluster).all(|(grid, n)| n > 0 && grid.is_multiple_of(n));
    if !fits
        || blocks.is_none_or(|blocks| blocks > function.most_in_cluster())
        || wanted.is_some_and(|wanted| wanted != cluster)
    {
        return Err(Code::INVALID_CLUSTER_SIZE);
    }
    Ok(())
}
