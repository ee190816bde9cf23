//! What an image says of memory that its processes have opened of each other, for people.

use super::error::Error;
use super::sections;
use super::sharers::Opened;
use crate::image::Manifest;

/// A block of one process that another one of the tree has open.
#[derive(Debug, Clone, PartialEq, Eq, serde::Serialize)]
pub struct OpenBlock {
    /// The process that has it open.
    pub pid: u32,
    /// Where that sees its start; 0 if it does not see it.
    pub address: u64,
    /// The process whose it is.
    pub owner: u32,
    /// The owner's name for it.
    pub block: u64,
    /// Bytes.
    pub size: u64,
}

/// What an image says of blocks that processes have open of each other.
///
/// # Errors
/// [`Error::Damaged`]: it makes no sense.
pub fn read(manifest: &Manifest) -> Result<Vec<OpenBlock>, Error> {
    let of_process = |(pid, opened): (u32, Vec<Opened>)| {
        opened.into_iter().map(move |Opened { size, address, owner, block, .. }| OpenBlock {
            pid,
            address,
            owner,
            block,
            size,
        })
    };
    Ok(sections::read_opened(manifest)?.into_iter().flat_map(of_process).collect())
}
