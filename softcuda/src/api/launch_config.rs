//! `CUlaunchConfig`: how a kernel is to be launched.

use cudarc::driver::sys;

use crate::status::{Code, Outcome};

/// `CUlaunchConfig` with plain types.
#[repr(C)]
#[derive(Clone, Copy)]
pub(super) struct Config {
    /// Blocks in each direction.
    pub(super) grid: [u32; 3],
    /// Threads of a block in each direction.
    pub(super) block: [u32; 3],
    /// Dynamic shared memory in bytes.
    pub(super) shared: u32,
    /// The stream.
    pub(super) stream: u64,
    attributes: *const Attribute,
    attribute_count: u32,
}

/// `CUlaunchAttribute` with plain types.
#[repr(C)]
#[derive(Clone, Copy)]
pub(super) struct Attribute {
    /// `CUlaunchAttributeID`.
    pub(super) id: u32,
    padding: u32,
    value: [u64; 8],
}

const _: () = assert!(size_of::<Config>() == size_of::<sys::CUlaunchConfig>());
const _: () = assert!(size_of::<Attribute>() == size_of::<sys::CUlaunchAttribute>());

/// `CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION`.
const CLUSTER: u32 = 4;

impl Attribute {
    /// The first three numbers of the value.
    pub(super) fn three(&self) -> [u32; 3] {
        let [first, third, ..] = self.value;
        [first as u32, (first >> 32) as u32, third as u32]
    }
}

impl Config {
    /// The attributes.
    ///
    /// # Errors
    /// `INVALID_VALUE` when there are some and nowhere.
    pub(super) fn attributes(&self) -> Outcome<Vec<Attribute>> {
        if self.attribute_count != 0 && self.attributes.is_null() {
            return Err(Code::INVALID_VALUE);
        }
        let all = 0..self.attribute_count as usize;
        // SAFETY: not null, so the caller promises as many attributes as it counted.
        Ok(all.map(|index| unsafe { self.attributes.add(index).read_unaligned() }).collect())
    }

    /// Blocks of a cluster in each direction, if there are to be clusters.
    ///
    /// # Errors
    /// `INVALID_VALUE` as [`Config::attributes`]; `INVALID_CLUSTER_SIZE` for clusters that do not divide the grid.
    pub(super) fn cluster(&self) -> Outcome<Option<[u32; 3]>> {
        let attributes = self.attributes()?;
        let cluster = attributes.iter().find(|attribute| attribute.id == CLUSTER);
        let Some(cluster) = cluster.map(Attribute::three) else { return Ok(None) };
        let mut directions = self.grid.iter().zip(cluster);
        if directions.any(|(grid, cluster)| cluster == 0 || !grid.is_multiple_of(cluster)) {
            return Err(Code::INVALID_CLUSTER_SIZE);
        }
        Ok(Some(cluster))
    }
}
