//! Room in the host's memory.

use crate::base::memory;
use crate::engine::error::Error;

/// Whether there is room in memory for so many bytes.
///
/// # Errors
/// [`Error::NoRoom`]; it cannot be found out.
pub(in crate::engine) fn check_bytes(needed: u64) -> Result<(), Error> {
    let rooms = memory::groups().into_iter().chain([memory::host()?]);
    let allowed = rooms.map(memory::Room::with_swap).min().unwrap_or(u64::MAX);
    if needed <= allowed { Ok(()) } else { Err(Error::NoRoom { needed, allowed }) }
}
