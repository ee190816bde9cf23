//! Host memory that is copied while the programs run.
//!
//! While the programs run their memory is protected page by page, so that the kernel notes which pages are written
//! ([`Tracking`](crate::host::process::Tracking)), and read and stored after that. At the stop what was not written
//! since it was protected is what was stored, and need not be read. Whatever is not known to be so is read then, and hashed: memory that is not tracked,
//! that devices may write, that was mapped or moved meanwhile.
//!
//! Where nothing can be tracked, memory can be copied ahead all the same: chunks are named by the hash of their bytes,
//! so nothing rests on these copies. At the stop all memory is read and hashed, and what the store has by then need not
//! be compressed and written.

pub(super) mod ahead;
mod copied;
pub(super) mod memory;
mod polite;
mod watched;
