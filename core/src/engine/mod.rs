//! What the commands do, put together of all the floors below.

pub mod access;
pub(crate) mod copied_files;
pub(crate) mod cuda_process;
pub(crate) mod device_state;
pub mod dump;
pub mod error;
pub mod extract;
mod hook;
pub mod hostile;
pub mod interrupted;
mod kept_files;
pub mod kinds;
pub mod launched;
mod locks;
pub(crate) mod mapped;
pub(crate) mod memory;
pub mod migrate;
pub mod multicast;
pub mod open_blocks;
mod opened;
pub mod restore;
mod sections;
mod sharers;
pub mod sharing;
pub(crate) mod teams;
pub mod warm;
pub mod watchdog;
